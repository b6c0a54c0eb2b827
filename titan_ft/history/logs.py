# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The last lines of the processes that ended by themselves: exception, place, traceback, and where the log is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from titan_ft.history.fold import Reason
from titan_ft.history.notes import name_groups
from titan_ft.history.outcome import find_outcome
from titan_ft.history.record import RunRecord
from titan_ft.run.error_file import kind_of
from titan_ft.run.excerpt import explain_end, read_end
from titan_ft.run.paths import RunPaths


@dataclass(frozen=True)
class End:
    """The last end of one or several groups that ended for the same reason."""

    reason: Reason
    """Of the group that ended last."""
    groups: tuple[int, ...]

    def title(self, record: RunRecord) -> str:
        """Return in two lines what ended the groups, and where and when."""
        reason, unit = self.reason, record.unit
        place = "" if reason.rank is None else f"rank {reason.rank} of "
        where = [f"{place}group {reason.slot}, attempt {reason.attempt}"]
        where.append("before its first step" if reason.step is None else f"after {unit.name(reason.step)}")
        where += [f"at {reason.time - record.begin:.1f} s"]
        where += [reason.where] if reason.where else []
        others = [group for group in self.groups if group != reason.slot]
        also = f"; {name_groups(others)} ended alike" if others else ""
        return f"{reason.text}\n  {', '.join(where)}{also}"


def find_ends(record: RunRecord, group: int | None = None) -> list[End]:
    """Return the last end of each group that ended by itself, each reason once; the latest first.

    Of the ranks of a group the one that its agent named first counts: the others ended because of it. The reason that
    the outcome of the run names comes before all others.

    Args:
        group: the only one that is asked for; None asks for all.
    """
    alike: dict[str, list[Reason]] = defaultdict(list)
    for known in record.fold.groups.values():
        if known.last_end is not None and group in (None, known.slot):
            alike[kind_of(known.last_end.text)].append(known.last_end)
    decisive = find_outcome(record).reason
    first = "" if decisive is None else kind_of(decisive.text)
    ends = []
    for reasons in alike.values():
        last = max(reasons, key=lambda reason: reason.time)
        ends.append(End(last, tuple(sorted(reason.slot for reason in reasons if reason.slot is not None))))
    return sorted(ends, key=lambda end: (kind_of(end.reason.text) != first, -end.reason.time))


def find_log(reason: Reason, run_dir: Path) -> Path | None:
    """Return the log of the rank that ended, or of the agent; None if there is none in the run's folder.

    The events have its path on the host of the rank. A run that was moved, or is mounted elsewhere, has it at the same
    place of its folder.
    """
    if reason.slot is None or reason.attempt is None:
        return None
    paths = RunPaths(run_dir)
    usual = paths.supervisor_log(reason.slot)
    if reason.rank is not None:
        usual = paths.logs(reason.slot, reason.attempt, reason.rank)
    found = [path for path in (usual, Path(reason.log)) if reason.log and path.is_file()]
    return found[0] if found else usual if usual.is_file() else None


def show_logs(record: RunRecord, run_dir: Path, group: int | None, limit: int) -> list[str]:
    """Return what `titan-ft logs` prints, a line each.

    Where nothing ended by itself, these are the last lines of each group's rank 0.

    Args:
        group: the only one that is asked for; None asks for all.
        limit: lines of each log at most.
    """
    lines = [find_outcome(record).headline]
    ends = find_ends(record, group)
    for end in ends:
        lines += ["", *end.title(record).split("\n"), *_excerpt(find_log(end.reason, run_dir), limit)]
    if ends:
        return lines
    slots = record.groups if group is None else [group]
    lines += ["no group ended by itself; the last lines of rank 0:"]
    for slot in slots:
        log = RunPaths(run_dir).latest_logs(slot) / "rank-0.log"
        end_of_log = [f"    {line}" for line in read_end(log)[-limit:]]
        lines += ["", f"group {slot}: {log}", *(end_of_log or ["    (no log in this folder)"])]
    return lines


def _excerpt(log: Path | None, limit: int) -> list[str]:
    """Return the path of a log and the lines of it that explain the end of its process."""
    if log is None:
        return ["  its log is not in this folder: what it printed went to the output of its group"]
    found = explain_end(read_end(log), limit)
    return [f"  {log}", *(f"    {line}" for line in found or ["(empty log)"])]
