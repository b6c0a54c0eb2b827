# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's curves in TensorBoard: each committed step, or round, once, from the run's events.

A group that wrote the curves for all could die right after a commit, and its step would be missing.
The events of the other groups have that step. One writer also suits TensorBoard, which loses files
of a folder with several writers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from titan_ft.history.record.trajectory import ROOT
from titan_ft.run.curve_file import CurveFile
from titan_ft.run.events import Drained, Event, StepCommitted, TrainingFinished

HOLD_SECONDS = 30.0
"""Longest wait for a missing step's event, which a network file system may deliver late."""
MAX_REMEMBERED = 4096


class JobSteps:
    """Follows the job's trajectory: returns each committed step once, in order, once it is certain.

    A commit is certain once another commit continues it, or a group ends with its state. If an
    exchange was complete for one group only, one step may have two commits; the wrong one never
    becomes certain. If the job goes back to an earlier state, the steps after that state come again.

    This is not part of the fold of a run (`titan_ft.history.fold`). The fold uses the latest commit
    at once, and the history finds the trajectory from its end. Only a file that is written during
    the run must wait for certainty.
    """

    def __init__(self) -> None:
        self._pending: dict[str, StepCommitted] = {}
        """Commits that are not certain yet, by lineage."""
        self._returned: dict[str, None] = {}
        """Lineages of the newest returned steps, in order."""
        self._last: StepCommitted | None = None

    def observe(self, event: Event) -> list[StepCommitted]:
        """Take in the next event; return the steps that it makes certain."""
        match event:
            case StepCommitted():
                return self._observe_commit(event)
            case TrainingFinished(lineage=str(final)) | Drained(lineage=str(final)):
                return self._take_out(self._chain(final))
        return []

    def finish(self) -> list[StepCommitted]:
        """Return the remaining steps at the end of the run: those that lead to the latest commit."""
        return self._take_out(self._chain_to_latest(self._pending.values()))

    def _observe_commit(self, event: StepCommitted) -> list[StepCommitted]:
        if event.lineage in self._pending or event.lineage in self._returned:
            return []
        self._pending[event.lineage] = event
        certain = self._chain(event.parent)
        if certain and self._misses_one(certain[0]):
            if event.time - certain[0].time < HOLD_SECONDS:
                return []
            earlier = [c for c in self._pending.values() if c.step < certain[0].step]
            certain = self._chain_to_latest(earlier) + certain
        return self._take_out(certain)

    def _chain(self, lineage: str) -> list[StepCommitted]:
        """Return the pending commits that led to a state, oldest first."""
        chain: list[StepCommitted] = []
        while lineage in self._pending:
            commit = self._pending[lineage]
            chain.append(commit)
            lineage = commit.parent
        return chain[::-1]

    def _chain_to_latest(self, commits: Iterable[StepCommitted]) -> list[StepCommitted]:
        latest = max(commits, key=lambda commit: (commit.time, commit.step), default=None)
        return [] if latest is None else self._chain(latest.lineage)

    def _misses_one(self, first: StepCommitted) -> bool:
        """Return whether a step before `first` is missing, whose event may still come."""
        if self._last is None or first.parent == ROOT or first.parent in self._returned:
            return False
        return first.step > self._last.step + 1

    def _take_out(self, certain: list[StepCommitted]) -> list[StepCommitted]:
        for commit in certain:
            del self._pending[commit.lineage]
            self._returned[commit.lineage] = None
            self._last = commit
            if len(self._returned) > MAX_REMEMBERED:
                del self._returned[next(iter(self._returned))]
        if certain:
            # An older commit of the same or an earlier step is one that no commit continued.
            last = certain[-1]
            for other in list(self._pending.values()):
                if other.step <= last.step and other.time <= last.time:
                    del self._pending[other.lineage]
        return certain


class JobCurve:
    """Writes the job's curves to a folder, one point for each committed step.

    Args:
        folder: a folder for these files only. Points of an earlier launch stay, up to the step from
            which this launch goes on.
        report: called with a line when the folder cannot be written, and when it can be again.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self._report = folder, report
        self._steps = JobSteps()
        self._file = CurveFile(folder, report)
        self._last: StepCommitted | None = None

    @property
    def is_stalled(self) -> bool:
        """True while points wait because the folder cannot be written."""
        return self._file.is_stalled

    def observe(self, event: Event) -> None:
        """Take in the next event of the run. Events should come in the order of time."""
        self._write(self._steps.observe(event))

    def close(self, seconds: float = 0.0) -> int:
        """Write the remaining points, waiting up to `seconds` for room; return the number of lost points."""
        self._write(self._steps.finish())
        num_lost = self._file.close(seconds)
        if num_lost:
            self._report(
                f"{self.folder} still cannot be written: the last {num_lost} points of its curves are lost"
            )
        return num_lost

    def _write(self, commits: Iterable[StepCommitted]) -> None:
        for commit in commits:
            anew = self._last is None or commit.step <= self._last.step
            # The axis is torchtitan's step, as in the curves of a group and of plain torchtitan.
            self._file.add(commit.titan_step, self._figures(commit), commit.time, anew=anew)
            self._last = commit

    def _figures(self, commit: StepCommitted) -> dict[str, float]:
        """Return the values by name. torchtitan's names put group and job into one plot."""
        nan = float("nan")
        figures = {
            "loss_metrics/global_avg_loss": nan if commit.loss is None else commit.loss,
            "grad_norm": nan if commit.grad_norm is None else commit.grad_norm,
            "lr": nan if commit.lr is None else commit.lr,
            "ft/participants": len(commit.participants),
            "ft/retries": commit.exchanges - 1,
            "ft/exchange(s)": commit.exchange_seconds,
        }
        if (
            self._last is not None
            and commit.step == self._last.step + 1
            and commit.time > self._last.time
        ):
            seconds = commit.time - self._last.time
            figures["job/step(s)"] = seconds / max(1, commit.titan_step - self._last.titan_step)
            figures["job/tokens_per_second"] = commit.tokens / seconds
        return figures
