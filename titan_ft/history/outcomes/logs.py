# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The output of `titan-ft logs`: the exception of each failed process and the end of its log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titan_ft.history.fold.group import Reason, group_alike
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.error_file import kind_of
from titan_ft.run.excerpt import explain_end, read_end
from titan_ft.run.paths import RunPaths


@dataclass(frozen=True)
class FailedAttempts:
    """The last failed attempts of the groups that failed for one reason."""

    reason: Reason
    """The reason of the attempt that failed last."""
    slots: tuple[int, ...]

    def title(self, record: RunRecord) -> str:
        """Return two lines: the reason, and the place and time."""
        reason = self.reason
        writer = f"group {reason.slot}, attempt {reason.attempt}"
        if reason.rank is not None:
            writer = f"rank {reason.rank} of {writer}"
        facts = [writer]
        if reason.step is None:
            facts.append("before its first step")
        else:
            facts.append(f"after {record.unit.name(reason.step)}")
        facts.append(f"at {reason.time - record.begin:.1f} s")
        if reason.where:
            facts.append(reason.where)
        place = ", ".join(facts)
        others = [slot for slot in self.slots if slot != reason.slot]
        if others:
            place += f"; {name_groups(others)} ended alike"
        return f"{reason.text}\n  {place}"


def find_failed_attempts(record: RunRecord, slot: int | None = None) -> list[FailedAttempts]:
    """Return the last failed attempt of each group; attempts with the same reason are one entry.

    The reason that the outcome of the run names comes first, then the latest. An attempt has the
    reason of the rank that the agent reported first: the other ranks failed as a consequence.

    Args:
        slot: consider this group only; None considers all groups.
    """
    last_reasons = []
    for group in record.fold.groups.values():
        if slot is not None and slot != group.slot:
            continue
        if group.last_reason is not None:
            last_reasons.append(group.last_reason)
    found = []
    for reasons in group_alike(last_reasons).values():
        latest = max(reasons, key=lambda reason: reason.time)
        slots = sorted(reason.slot for reason in reasons if reason.slot is not None)
        found.append(FailedAttempts(latest, tuple(slots)))
    found.sort(key=lambda attempts: attempts.reason.time, reverse=True)
    decisive = find_outcome(record).reason
    if decisive is not None:
        # The sort is stable, so the other entries stay in order of time.
        decisive_kind = kind_of(decisive.text)
        found.sort(key=lambda attempts: kind_of(attempts.reason.text) != decisive_kind)
    return found


def find_log(reason: Reason, run_dir: Path) -> Path | None:
    """Return the log of the failed rank, or of the failed agent; None if the log cannot be found.

    The events name the log by its path on the host of the rank. If the run folder was moved or is
    mounted elsewhere, the log is still at its usual place within the folder.
    """
    if reason.slot is None or reason.attempt is None:
        return None
    paths = RunPaths(run_dir)
    if reason.rank is None:
        usual = paths.agent_log(reason.slot)
    else:
        usual = paths.logs(reason.slot, reason.attempt, reason.rank)
    if usual.is_file():
        return usual
    named = Path(reason.log)
    if reason.log and named.is_file():
        return named
    return None


def show_logs(record: RunRecord, run_dir: Path, slot: int | None, limit: int) -> list[str]:
    """Return the lines that `titan-ft logs` prints.

    If no process failed, these are the last lines of each group's rank 0.

    Args:
        slot: show this group only; None shows all groups.
        limit: maximum number of lines of each log.
    """
    lines = [find_outcome(record).headline]
    found = find_failed_attempts(record, slot)
    for attempts in found:
        log = find_log(attempts.reason, run_dir)
        lines += ["", *attempts.title(record).split("\n"), *_excerpt(log, limit)]
    if found:
        return lines
    lines.append("no group ended by itself; the last lines of rank 0:")
    shown_slots = record.groups
    if slot is not None:
        shown_slots = [slot]
    for shown in shown_slots:
        log = RunPaths(run_dir).latest_logs(shown) / "rank-0.log"
        last_lines = read_end(log)[-limit:]
        if not last_lines:
            last_lines = ["(no log in this folder)"]
        lines += ["", f"group {shown}: {log}"]
        lines += _indent(last_lines)
    return lines


def _excerpt(log: Path | None, limit: int) -> list[str]:
    """Return the path of a log and those of its lines that explain why its process failed."""
    if log is None:
        return ["  its log is not in this folder: what it printed went to the output of its group"]
    explanation = explain_end(read_end(log), limit)
    if not explanation:
        explanation = ["(empty log)"]
    return [f"  {log}", *_indent(explanation)]


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
