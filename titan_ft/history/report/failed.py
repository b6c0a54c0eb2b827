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
from titan_ft.history.record.run_record import RunRecord, view
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
    """The last one, or the one that the outcome names."""
    groups: tuple[int, ...]
    count: int
    """Attempts of groups that ended for it."""
    num_injected: int
    """Those of them that an injected fault ended."""
    first: float
    last: float
    """When it ended one for the first and for the last time; seconds since the run's begin."""
    decisive: bool
    """Whether the outcome names it: because of it the run failed, or a group is lost for good."""

    @property
    def place(self) -> str:
        """The rank, its group and the line of code."""
        groups = name_groups(self.groups)
        rank = (
            ""
            if self.reason.rank is None or len(self.groups) > 1
            else f"rank {self.reason.rank} of "
        )
        return ", ".join(filter(None, (f"{rank}{groups}", self.reason.where)))

    @property
    def injected(self) -> str:
        """How many of its ends were injected, in words."""
        if not self.num_injected:
            return ""
        return (
            "injected"
            if self.num_injected == self.count
            else f"{self.num_injected} of {self.count} injected"
        )


@view
def find_failed(record: RunRecord) -> list[Failed]:
    """Return the reasons for which attempts of groups failed.

    The reason of the outcome comes first, then those without an injected fault, the latest first.
    """
    injected = {
        (attempt.replica, attempt.number)
        for attempts in record.attempts.values()
        for attempt in attempts
        if attempt.fault is not None
    }
    outcome = find_outcome(record)
    decisive = outcome.reason
    lost = {kind_of(group.reason.text) for group in outcome.lost if group.reason is not None}
    found = []
    for kind, reasons in group_alike(record.fold.first_ends.values()).items():
        decides = decisive is not None and kind_of(decisive.text) == kind
        loses = kind in lost
        found.append(
            Failed(
                reason=decisive if decides and decisive is not None else reasons[-1],
                groups=tuple(
                    sorted({reason.slot for reason in reasons if reason.slot is not None})
                ),
                count=len(reasons),
                num_injected=sum((reason.slot, reason.attempt) in injected for reason in reasons),
                first=reasons[0].time - record.begin,
                last=reasons[-1].time - record.begin,
                decisive=decides or loses,
            )
        )
    return sorted(
        found, key=lambda one: (not one.decisive, one.num_injected == one.count, -one.last)
    )


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
