# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The failures of a run, one entry per reason: count, places, the end of its log, and the lost
groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_ft.history.fold.group import Reason, group_alike
from titan_ft.history.outcomes.logs import find_log
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.run.error_file import kind_of
from titan_ft.run.excerpt import explain_end, read_end

MAX_LINES = 30
"""Lines of a log on the page."""
MAX_LETTERS = 400
"""Letters of each of them: a line of a tensor's values would fill the page."""


@dataclass(frozen=True)
class Failed:
    """One reason why attempts of groups ended."""

    reason: Reason
    """The outcome's reason if it is of this kind, else the latest reason."""
    groups: tuple[int, ...]
    count: int
    """The number of attempts that ended for this reason."""
    num_injected: int
    """The number of these attempts that an injected fault ended."""
    first: float
    last: float
    """The first and the last end for this reason; seconds since the run's begin."""
    decisive: bool
    """True if the run failed, or a group is lost for good, for this reason."""

    @property
    def place(self) -> str:
        """The rank, its group and the line of code."""
        place = name_groups(self.groups)
        if self.reason.rank is not None and len(self.groups) <= 1:
            place = f"rank {self.reason.rank} of {place}"
        return ", ".join(filter(None, (place, self.reason.where)))

    @property
    def injected(self) -> str:
        """The number of injected ends in words; empty without any."""
        if not self.num_injected:
            return ""
        if self.num_injected == self.count:
            return "injected"
        return f"{self.num_injected} of {self.count} injected"


@once_per_record
def find_failed(record: RunRecord) -> list[Failed]:
    """Return the reasons for which attempts of groups failed.

    The reason of the outcome comes first, then those without an injected fault, the latest first.
    """
    injected = set()
    for attempts in record.attempts.values():
        for attempt in attempts:
            if attempt.fault is not None:
                injected.add((attempt.slot, attempt.number))
    outcome = find_outcome(record)
    decisive_kind = None
    if outcome.reason is not None:
        decisive_kind = kind_of(outcome.reason.text)
    lost_kinds = {kind_of(group.reason.text) for group in outcome.lost if group.reason is not None}
    found = []
    for kind, reasons in group_alike(record.fold.first_reasons.values()).items():
        reason = reasons[-1]
        if outcome.reason is not None and kind == decisive_kind:
            reason = outcome.reason
        num_injected = 0
        groups = set()
        for each in reasons:
            if each.slot is not None:
                groups.add(each.slot)
            if (each.slot, each.attempt) in injected:
                num_injected += 1
        failed = Failed(
            reason=reason,
            groups=tuple(sorted(groups)),
            count=len(reasons),
            num_injected=num_injected,
            first=reasons[0].time - record.begin,
            last=reasons[-1].time - record.begin,
            decisive=kind == decisive_kind or kind in lost_kinds,
        )
        found.append(failed)
    return sorted(found, key=_most_telling_first)


def _most_telling_first(failed: Failed) -> tuple[bool, bool, float]:
    # False sorts before True.
    is_injected = failed.num_injected == failed.count
    return not failed.decisive, is_injected, -failed.last


def excerpt(reason: Reason, run_dir: Path) -> list[str]:
    """Return the lines of a rank's log that explain its end; empty if no line can, as after
    SIGKILL.
    """
    if reason.signal == "SIGKILL":
        return []
    log = find_log(reason, run_dir)
    if log is None:
        return []
    return [line[:MAX_LETTERS] for line in explain_end(read_end(log), MAX_LINES)]
