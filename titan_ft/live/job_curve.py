# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's curves in TensorBoard: each committed step, or round, once, from the run's events.

A group that wrote the curves for all could die right after a commit, and its step would be missing.
The events of the other groups have that step. One writer also suits TensorBoard, which loses files
of a folder with several writers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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
    becomes certain. If the job goes back to an earlier state, the steps after that state come
    again.

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
        """Return the steps that lead to the latest commit, at the end of the run."""
        return self._take_out(self._chain_to_latest(self._pending.values()))

    def _observe_commit(self, event: StepCommitted) -> list[StepCommitted]:
        if event.lineage in self._pending or event.lineage in self._returned:
            return []
        self._pending[event.lineage] = event
        certain = self._chain(event.parent)
        if not certain:
            return []
        first = certain[0]
        if self._misses_one(first):
            if event.time - first.time < HOLD_SECONDS:
                return []
            earlier = [commit for commit in self._pending.values() if commit.step < first.step]
            certain = self._chain_to_latest(earlier) + certain
        return self._take_out(certain)

    def _chain(self, lineage: str) -> list[StepCommitted]:
        """Return the pending commits that led to a state, oldest first."""
        chain: list[StepCommitted] = []
        while lineage in self._pending:
            commit = self._pending[lineage]
            chain.append(commit)
            lineage = commit.parent
        chain.reverse()
        return chain

    def _chain_to_latest(self, commits: Collection[StepCommitted]) -> list[StepCommitted]:
        if not commits:
            return []
        latest = max(commits, key=lambda commit: (commit.time, commit.step))
        return self._chain(latest.lineage)

    def _misses_one(self, first: StepCommitted) -> bool:
        """Return whether a step before `first` is missing, whose event may still come."""
        if self._last is None or first.parent == ROOT or first.parent in self._returned:
            return False
        return first.step > self._last.step + 1

    def _take_out(self, certain: list[StepCommitted]) -> list[StepCommitted]:
        if not certain:
            return []
        for commit in certain:
            del self._pending[commit.lineage]
            self._returned[commit.lineage] = None
            if len(self._returned) > MAX_REMEMBERED:
                oldest = next(iter(self._returned))
                del self._returned[oldest]
        last = certain[-1]
        self._last = last
        # An older commit of the same or an earlier step is one that no commit continued.
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
        self.folder = folder
        self._report = report
        self._steps = JobSteps()
        self._file = CurveFile(folder, report)
        self._last: StepCommitted | None = None

    @property
    def has_outage(self) -> bool:
        """True while points wait because the folder cannot be written."""
        return self._file.has_outage

    def observe(self, event: Event) -> None:
        """Take in the next event of the run. Events should come in the order of time."""
        self._write(self._steps.observe(event))

    def close(self, seconds: float = 0.0) -> int:
        """Write the remaining points; return the number of lost points.

        Args:
            seconds: longest wait for room on the disk.
        """
        self._write(self._steps.finish())
        num_lost = self._file.close(seconds)
        if num_lost:
            lost = f"the last {num_lost} points of its curves are lost"
            self._report(f"{self.folder} still cannot be written: {lost}")
        return num_lost

    def _write(self, commits: Iterable[StepCommitted]) -> None:
        for commit in commits:
            anew = self._last is None or commit.step <= self._last.step
            # The axis is torchtitan's step, as in the curves of a group and of plain torchtitan.
            self._file.add(commit.titan_step, self._figures(commit), commit.time, anew=anew)
            self._last = commit

    def _figures(self, commit: StepCommitted) -> dict[str, float]:
        """Return the values by name. torchtitan's names put group and job into one plot."""
        figures = {
            "loss_metrics/global_avg_loss": _nan_if_unknown(commit.loss),
            "grad_norm": _nan_if_unknown(commit.grad_norm),
            "lr": _nan_if_unknown(commit.lr),
            "ft/participants": len(commit.participants),
            "ft/retries": commit.exchanges - 1,
            "ft/exchange(s)": commit.exchange_seconds,
        }
        last = self._last
        if last is None or commit.step != last.step + 1 or commit.time <= last.time:
            return figures
        seconds = commit.time - last.time
        num_steps = max(1, commit.titan_step - last.titan_step)
        figures["job/step(s)"] = seconds / num_steps
        figures["job/tokens_per_second"] = commit.tokens / seconds
        return figures


def _nan_if_unknown(value: float | None) -> float:
    return float("nan") if value is None else value
