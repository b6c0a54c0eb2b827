# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Describe a stopped run for a person: where it stopped, its checkpoint, and the command to
continue.

`LocalRun` prints the lines after a request to stop and after --minutes. Pure functions.
"""

from __future__ import annotations

from titan_ft.live.run_status import RunStatus

CHECKPOINTS_OFF = (
    "checkpoints are off (checkpoint.enable): if all groups are stopped or lost, training starts "
    "anew; --checkpoint.enable after a -- turns them on"
)


def describe_stop(run: RunStatus, command: str, *, saves: bool, drain_seconds: float) -> list[str]:
    """Return the last lines of a stopped run.

    Args:
        command: continues from the run's last checkpoint.
        saves: whether checkpoints are on.
        drain_seconds: time that the groups had to leave.
    """
    latest = run.fold.checkpoints.latest
    if run.step is None and latest is None:
        return ["stopped before the first step; the same command starts it again"]
    if run.step is None:
        where = "before a step was made"
        step = 0
    else:
        where = f"after {run.fold.unit.name(run.step)}"
        step = run.fold.unit.step_after(run.step)
    if not saves:
        return [f"stopped {where}; nothing is saved: {CHECKPOINTS_OFF}"]
    if latest is None:
        found = f"no checkpoint is complete{_explain_missing_save(run, drain_seconds)}"
        return [f"stopped {where}; {found}: training would start anew, in another --run-dir"]
    found = f"the checkpoint of step {latest} is complete"
    if latest < step:
        reason = _explain_missing_save(run, drain_seconds)
        found = f"the latest complete checkpoint is that of step {latest}{reason}"
    return [f"stopped {where}; {found}; go on with:", f"  {command}"]


def _explain_missing_save(run: RunStatus, drain_seconds: float) -> str:
    """Explain why the last step is not saved, in parentheses after a space.

    The explanation is empty if no group began to save the step, for example after a kill.
    """
    checkpoints = run.fold.checkpoints
    if checkpoints.save_error:
        return f" ({checkpoints.save_error})"
    if checkpoints.saving is None:
        return ""
    return (
        f" (that of step {checkpoints.saving} was not in time: raise --drain-timeout, "
        f"{drain_seconds:g} s now)"
    )
