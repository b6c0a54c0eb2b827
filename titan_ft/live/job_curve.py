# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's own curves in TensorBoard: each committed step, or round, once, from the run's events.

The events are the source, and not a group that would write on behalf of all: a step whose writer dies right behind its
commit is in the events of the others, and a folder with one writer is what TensorBoard reads without losing files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from titan_ft.history.record.trajectory import ROOT
from titan_ft.run.curve_file import CurveFile
from titan_ft.run.events import Drained, Event, StepCommitted, TrainingFinished

HOLD_SECONDS = 30.0
"""So long the others' steps wait for one whose event has not come, as through a network file system."""
MAX_REMEMBERED = 4096


class JobSteps:
    """Follow the job's trajectory through commits: give each step once, in order, as soon as it is certain.

    A commit is certain once another one goes on from it, or a group ends with it. Of the two commits that there may be
    of one step, when an exchange was complete for one group only, the wrong one never comes to that. Where the job goes
    back to an earlier state, its steps come again.

    This is no part of the fold of a run (`titan_ft.history.fold`). The fold takes the latest commit at once, and the
    history finds the job's trajectory from its end. Only a file that is written meanwhile has to know what is certain.
    """

    def __init__(self) -> None:
        self._pending: dict[str, StepCommitted] = {}
        """Commits that are not certain yet, by the state that they made."""
        self._given: dict[str, None] = {}
        """The states behind the steps that were given last, in order."""
        self._last: StepCommitted | None = None

    def observe(self, event: Event) -> list[StepCommitted]:
        """Take the next event; return the steps that are certain by it, often none."""
        match event:
            case StepCommitted():
                return self._observe_commit(event)
            case TrainingFinished(lineage=str(final)) | Drained(lineage=str(final)):
                return self._give(self._chain(final))
        return []

    def rest(self) -> list[StepCommitted]:
        """Return the steps that are left at the end: those that lead to the latest commit."""
        return self._give(self._chain_to_latest(self._pending.values()))

    def _observe_commit(self, event: StepCommitted) -> list[StepCommitted]:
        if event.lineage in self._pending or event.lineage in self._given:
            return []
        self._pending[event.lineage] = event
        certain = self._chain(event.parent)
        if certain and self._misses_one(certain[0]):
            if event.time - certain[0].time < HOLD_SECONDS:
                return []
            certain = self._chain_to_latest(c for c in self._pending.values() if c.step < certain[0].step) + certain
        return self._give(certain)

    def _chain(self, lineage: str) -> list[StepCommitted]:
        """Return the commits that led to a state, oldest first, as far as they are pending."""
        chain: list[StepCommitted] = []
        while (commit := self._pending.get(lineage)) is not None:
            chain.append(commit)
            lineage = commit.parent
        return chain[::-1]

    def _chain_to_latest(self, commits: Iterable[StepCommitted]) -> list[StepCommitted]:
        latest = max(commits, key=lambda commit: (commit.time, commit.step), default=None)
        return [] if latest is None else self._chain(latest.lineage)

    def _misses_one(self, first: StepCommitted) -> bool:
        """Tell whether there is a step before this one that has not been given, and whose event is still to come."""
        if self._last is None or first.parent == ROOT or first.parent in self._given:
            return False
        return first.step > self._last.step + 1

    def _give(self, certain: list[StepCommitted]) -> list[StepCommitted]:
        for commit in certain:
            del self._pending[commit.lineage]
            self._given[commit.lineage] = None
            self._last = commit
            if len(self._given) > MAX_REMEMBERED:
                del self._given[next(iter(self._given))]
        if certain:
            # A commit of that step or an earlier one which came before it is one that nobody went on from.
            last = certain[-1]
            for other in [o for o in self._pending.values() if o.step <= last.step and o.time <= last.time]:
                del self._pending[other.lineage]
        return certain


class JobCurve:
    """Write the job's curves to a folder, a point of each for every committed step.

    Args:
        folder: for its files alone; what an earlier launch of the job wrote there stays, up to the step at which this
            one goes on.
        report: called with a line when the folder cannot be written, and when it can again.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self._report = folder, report
        self._steps = JobSteps()
        self._file = CurveFile(folder, report)
        self._last: StepCommitted | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether points wait, because the folder cannot be written."""
        return self._file.is_stalled

    def observe(self, event: Event) -> None:
        """Take the next event of the run; they should come in order of time."""
        self._write(self._steps.observe(event))

    def close(self, seconds: float = 0.0) -> int:
        """Write what is left; return how many points are lost, after so many seconds of waiting for room."""
        self._write(self._steps.rest())
        num_lost = self._file.close(seconds)
        if num_lost:
            self._report(f"{self.folder} still cannot be written: the last {num_lost} points of its curves are lost")
        return num_lost

    def _write(self, commits: Iterable[StepCommitted]) -> None:
        for commit in commits:
            anew = self._last is None or commit.step <= self._last.step
            # Over torchtitan's steps, as a group's own curves and those of a run without this package are.
            self._file.add(commit.titan_step, self._figures(commit), commit.time, anew=anew)
            self._last = commit

    def _figures(self, commit: StepCommitted) -> dict[str, float]:
        """Return the curves' values, by torchtitan's names where it has one, so that groups and job share a plot."""
        nan = float("nan")
        figures = {
            "loss_metrics/global_avg_loss": nan if commit.loss is None else commit.loss,
            "grad_norm": nan if commit.grad_norm is None else commit.grad_norm,
            "lr": nan if commit.lr is None else commit.lr,
            "ft/participants": len(commit.participants),
            "ft/retries": commit.exchanges - 1,
            "ft/exchange(s)": commit.exchange_seconds,
        }
        if self._last is not None and commit.step == self._last.step + 1 and commit.time > self._last.time:
            seconds = commit.time - self._last.time
            figures["job/step(s)"] = seconds / max(1, commit.titan_step - self._last.titan_step)
            figures["job/tokens_per_second"] = commit.tokens / seconds
        return figures
