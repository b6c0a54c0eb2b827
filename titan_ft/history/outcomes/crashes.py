# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions that ended groups of a run: each once, with how often, where and when."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.fold.group import group_alike
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.record.run_record import RunRecord, view


@dataclass(frozen=True)
class Crash:
    """One exception. Exceptions that differ only in numbers, addresses and ids are the same."""

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
        who = f"{count(self.count, 'time')}, {name_groups(self.replicas)}, {when}"
        parts = filter(None, (self.where, who, self.log))
        return f"{self.error} ({'; '.join(parts)})"


@view
def find_crashes(record: RunRecord) -> list[Crash]:
    """Return the exceptions that ended attempts of groups, in order of their first time.

    The exception of an attempt is that of its first failed rank; other ranks fail as a consequence.
    """
    exceptions = [reason for reason in record.fold.first_ends.values() if reason.exception]
    crashes = []
    for ends in group_alike(exceptions).values():
        first = ends[0]
        last = ends[-1]
        crash = Crash(
            error=first.text,
            count=len(ends),
            replicas=sorted({end.slot for end in ends if end.slot is not None}),
            first=first.time,
            last=last.time,
            transient=all(end.transient for end in ends),
            log=last.log or None,
            where=last.where,
        )
        crashes.append(crash)
    return crashes
