# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions that ended groups of a run: each once, with how often, where and when."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.fold.group import group_alike
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.record.run_record import RunRecord, once_per_record


@dataclass(frozen=True)
class Crash:
    """One exception. Exceptions that differ only in numbers, addresses and ids are the same."""

    error: str
    """Type and first line of the message of the first one."""
    count: int
    """The number of attempts that ended with this exception."""
    replicas: list[int]
    """The groups of these attempts."""
    first: float
    last: float
    """The first and the last end with this exception; Unix seconds."""
    transient: bool
    """Whether another attempt could succeed, or the exception was injected, each time."""
    log: str | None
    """Path of the log with the last traceback."""
    where: str = ""
    """File and line that raised the last one; empty if unknown."""

    def describe(self, start: float) -> str:
        """Return the exception in one line, with the times since `start` in Unix seconds."""
        when = f"{self.first - start:.1f} s"
        if self.count > 1:
            when = f"from {when} to {self.last - start:.1f} s"
        parts = []
        if self.where:
            parts.append(self.where)
        parts.append(f"{count(self.count, 'time')}, {name_groups(self.replicas)}, {when}")
        if self.log:
            parts.append(self.log)
        return f"{self.error} ({'; '.join(parts)})"


@once_per_record
def find_crashes(record: RunRecord) -> list[Crash]:
    """Return the exceptions that ended attempts of groups, in order of their first time.

    The exception of an attempt is that of its first failed rank; other ranks fail as a consequence.
    """
    exceptions = [reason for reason in record.fold.first_reasons.values() if reason.exception]
    crashes = []
    for reasons in group_alike(exceptions).values():
        first = reasons[0]
        last = reasons[-1]
        slots = {reason.slot for reason in reasons if reason.slot is not None}
        crash = Crash(
            error=first.text,
            count=len(reasons),
            replicas=sorted(slots),
            first=first.time,
            last=last.time,
            transient=all(reason.transient for reason in reasons),
            log=last.log or None,
            where=last.where,
        )
        crashes.append(crash)
    return crashes
