# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions that ended groups of a run: each once, with how often, where and when."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.judgement import count
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.run import events as ev
from titan_ft.run.error_file import kind_of


@dataclass(frozen=True)
class Crash:
    """One exception; those that differ in numbers, addresses and ids only are the same."""

    error: str
    """Its type and the first line of its message, as it was the first time."""
    count: int
    """Attempts of groups that ended with it."""
    replicas: list[int]
    """Groups that did."""
    first: float
    last: float
    """When it ended one for the first and for the last time; Unix seconds."""
    transient: bool
    """Whether it was of a kind that may go by itself, or injected, each time."""
    log: str | None
    """Path of the log that has its last traceback."""
    where: str = ""
    """File and line that raised it the last time; empty if unknown."""

    def describe(self, start: float) -> str:
        """Return it in one line, with the times since `start`."""
        when = f"{self.first - start:.1f} s"
        if self.count > 1:
            when = f"from {when} to {self.last - start:.1f} s"
        parts = [self.where, f"{count(self.count, 'time')}, {name_groups(self.replicas)}, {when}", self.log or ""]
        return f"{self.error} ({'; '.join(part for part in parts if part)})"


@view
def find_crashes(record: RunRecord) -> list[Crash]:
    """Return the exceptions that ended attempts of groups, in order of their first time.

    Of an attempt that of its first rank counts: others end because of that.
    """
    found: dict[str, list[ev.WorkerExited]] = {}
    seen: set[tuple[int, int]] = set()
    for event in record.of(ev.WorkerExited):
        if event.stopped or (event.replica, event.attempt) in seen:
            continue
        seen.add((event.replica, event.attempt))
        if event.error is not None:
            found.setdefault(kind_of(event.error), []).append(event)
    return [
        Crash(
            error=ends[0].error or "",
            count=len(ends),
            replicas=sorted({event.replica for event in ends}),
            first=ends[0].time,
            last=ends[-1].time,
            transient=all(event.transient for event in ends),
            log=ends[-1].log,
            where=ends[-1].where or "",
        )
        for ends in found.values()
    ]
