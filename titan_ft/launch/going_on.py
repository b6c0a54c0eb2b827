# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a person reads when they have stopped a run: where it stopped, what is saved, and how to go on; pure."""

from __future__ import annotations

from titan_ft.live.run_status import RunStatus

CHECKPOINTS_OFF = (
    "checkpoints are off (checkpoint.enable): if all groups are stopped or lost, training starts anew; "
    "--checkpoint.enable after a -- turns them on"
)


def describe_stop(run: RunStatus, command: str, *, saves: bool, drain_seconds: float) -> list[str]:
    """Return the lines that a run ends with that was stopped.

    Args:
        command: goes on from the run's last checkpoint.
        saves: whether checkpoints are on.
        drain_seconds: what the groups had to leave.
    """
    if run.step is None and run.checkpoint is None:
        return ["stopped before the first step; the same command starts it again"]
    where = "before a step was made" if run.step is None else f"after {run.unit.name(run.step)}"
    step = 0 if run.step is None else run.unit.step_after(run.step)
    if not saves:
        return [f"stopped {where}; nothing is saved: {CHECKPOINTS_OFF}"]
    if run.checkpoint is None:
        found = f"no checkpoint is complete{_why(run, drain_seconds)}"
        return [f"stopped {where}; {found}: training would start anew, in another --run-dir"]
    found = f"the checkpoint of step {run.checkpoint} is complete"
    if run.checkpoint < step:
        found = f"the latest complete checkpoint is that of step {run.checkpoint}{_why(run, drain_seconds)}"
    return [f"stopped {where}; {found}; go on with:", f"  {command}"]


def _why(run: RunStatus, drain_seconds: float) -> str:
    """Say why the last step is not saved; empty if nobody was to save it, for the groups were killed perhaps."""
    if run.save_error:
        return f" ({run.save_error})"
    if run.saving is None:
        return ""
    return f" (that of step {run.saving} was not in time: raise --drain-timeout, {drain_seconds:g} s now)"
