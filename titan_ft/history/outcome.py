# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a run: whether it finished, why it failed, who stopped it, and which groups it lost; pure.

`check`, `report`, its page and `top` begin with it, so that all of them say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from titan_ft.history.fold import ENDED, GroupFold, Reason, RunFold
from titan_ft.history.notes import name_groups
from titan_ft.history.record import RunRecord, view
from titan_ft.run.error_file import kind_of

Kind = Literal["running", "finished", "stopped", "failed", "never began", "no word"]
"""Where the launcher is gone without a word, or the history ends without one, the kind is "no word"."""
Colour = Literal["green", "amber", "red"]

SAME_END_SECONDS = 60.0
"""Groups that end within this time end of one cause: one raises an exception, the others miss it."""
MISSED_SECONDS = 60.0
"""A group without a launcher that the others have trained without for so long, and that has no event since, is lost."""
_SIGNALS = {"SIGINT": "Ctrl-C", "SIGHUP": "a closed terminal"}
"""What people call the signals that stop a launch; others by their own names."""


@dataclass(frozen=True)
class LostGroup:
    """A group that is gone for good: it neither finished nor left, and it is not started again."""

    slot: int
    since_step: int | None
    """torchtitan's step that it committed last; None if it made none."""
    reason: Reason | None
    """None where no event says why."""

    def describe(self) -> str:
        """Return it in one line, to stand after "without" or "lost"."""
        since = "before its first step" if self.since_step is None else f"since step {self.since_step}"
        why = "no event says why" if self.reason is None else _why_lost(self.reason)
        return f"group {self.slot}, lost {since}: {why}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    kind: Kind
    headline: str
    """In one line, such as "Failed at step 12 of 40: RuntimeError: boom, rank 0 of group 0, mybug.py:15"."""
    step: int
    """torchtitan's step after the last commit; 0 before the first."""
    steps: int | None
    """`training.steps`; None if unknown."""
    lost: tuple[LostGroup, ...]
    reason: Reason | None
    """Why it failed, or why it does not begin; None otherwise."""
    reasons: tuple[Reason, ...]
    """Why groups ended that have not contributed since, each reason once: the one that decided first."""
    stopped_by: str
    """Who stopped it: "Ctrl-C", "SIGTERM", "--minutes"; empty if nobody did, or nobody knows."""
    colour: Colour

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain dictionaries, lists and numbers, for JSON."""
        return asdict(self) | {"lost": [asdict(group) for group in self.lost]}


@view
def find_outcome(record: RunRecord) -> Outcome:
    """Return what became of a run."""
    return decide_outcome(record.fold, goes_on=record.goes_on)


def decide_outcome(fold: RunFold, *, goes_on: bool) -> Outcome:
    """Return what became of a run, or what is known of it so far.

    Args:
        goes_on: whether its launcher lives, or, without a launcher, its groups do.
    """
    kind = _find_kind(fold, goes_on=goes_on)
    reasons = _find_reasons(fold)
    has_reason = kind in ("failed", "never began") or (kind in ("running", "no word") and fold.step is None)
    reason = next(iter(reasons), None) if has_reason else None
    lost = tuple(_lost_groups(fold, kind))
    by = _stopped_by(fold) if kind == "stopped" or fold.stopping is not None else ""
    step = 0 if fold.step is None else fold.unit.step_after(fold.step)
    return Outcome(
        kind=kind,
        headline=_headline(fold, kind, step, lost, reason, by),
        step=step,
        steps=fold.target,
        lost=lost,
        reason=reason,
        reasons=reasons,
        stopped_by=by,
        colour=_colour(fold, kind, step, lost),
    )


def _find_kind(fold: RunFold, *, goes_on: bool) -> Kind:
    end, states = fold.launch_end, [group.state for group in fold.groups.values()]
    over = end is not None if fold.launched else fold.ended or not goes_on
    if not over:
        return "running" if goes_on else "no word"
    if "finished" in states:
        return "finished"
    if end is None:
        return _kind_without_launcher(fold)
    if fold.stopping is not None:
        # A run whose workers died again and again before the first step came to nothing, whoever ended it.
        return "never began" if fold.step is None and _find_reasons(fold) else "stopped"
    if end.code == 0:
        return "finished" if not states or fold.step is not None else "no word"
    return "failed" if fold.step is not None else "never began"


def _kind_without_launcher(fold: RunFold) -> Kind:
    """Return what became of groups that were started one by one, of which none finished."""
    states = {group.state for group in fold.groups.values()} - {"not started"}
    if "left" in states and states <= {"left", "given up", "died"}:
        return "stopped"
    if states == {"given up"}:
        return "failed" if fold.step is not None else "never began"
    return "no word"


def _find_reasons(fold: RunFold) -> tuple[Reason, ...]:
    """Return why groups ended that have not contributed since; exceptions that differ in numbers only are one.

    Of ends at about the same time as the last one, the exception that does not go by itself comes first:
    the others follow from it. Where the launch itself failed, or nothing else is known, its own word comes first.
    """
    found = [group.reason for group in fold.groups.values() if group.reason is not None]
    latest = max((reason.time for reason in found), default=0.0)
    found.sort(key=lambda one: (one.time < latest - SAME_END_SECONDS, not one.exception, one.transient, one.time))
    end = fold.launch_end
    if end is not None and end.code and fold.stopping is None and (end.own_failure or not found):
        found.insert(0, Reason(end.reason, time=end.time))
    distinct: dict[str, Reason] = {}
    for reason in found:
        distinct.setdefault(kind_of(reason.text), reason)
    return tuple(distinct.values())


def _lost_groups(fold: RunFold, kind: Kind) -> list[LostGroup]:
    return [
        LostGroup(
            group.slot,
            _step_of(fold, group),
            group.reason or group.silence,
        )
        for group in fold.groups.values()
        if _is_lost(fold, group, kind)
    ]


def _step_of(fold: RunFold, group: GroupFold) -> int | None:
    """Return torchtitan's step that a group made last; None if it made none."""
    made = [step for step in (group.step, group.took_part) if step is not None]
    return fold.unit.step_after(max(made)) if made else None


def _is_lost(fold: RunFold, group: GroupFold, kind: Kind) -> bool:
    """Tell whether a group is gone for good."""
    if group.state in ENDED:
        return False
    if group.state == "given up" or group.silence is not None:
        return True
    end = fold.launch_end
    if kind == "finished":
        # The launcher ends well only if all agents did: a group that was still coming back is not lost then.
        return end is None or end.code != 0
    if fold.launched or kind not in ("running", "stopped"):
        return False
    return group.failure is not None and fold.last - group.last > MISSED_SECONDS


def _stopped_by(fold: RunFold) -> str:
    end = fold.launch_end
    if end is not None:
        return "--minutes" if end.signal is None else _SIGNALS.get(end.signal, end.signal)
    if fold.stopping is not None:
        return ""
    last = max(fold.groups.values(), key=lambda group: group.last, default=None)
    return "" if last is None else last.left_because


def _headline(fold: RunFold, kind: Kind, step: int, lost: Sequence[LostGroup], reason: Reason | None, by: str) -> str:
    of = f" of {fold.target}" if fold.target else ""
    why = "" if reason is None else f": {reason.describe()}"
    at = f"at step {step}{of}" if fold.step is not None else "before the first step"
    match kind:
        case "finished":
            text = f"Finished at step {step}{_also_left(fold)}"
            if _misses_end(fold, step):
                text = f"Finished; the events after step {step}{of} are missing"
            if not lost and not _ended_well(fold):
                text += f", but {_say_end(fold)}"
        case "stopped":
            text = f"Stopped{f' by {by}' if by else ''} {at}"
        case "failed":
            return f"Failed at step {min(step + 1, fold.target or step + 1)}{of}{why}"
        case "never began":
            return f"Never began{why}" + (f"; stopped by {by}" if by else "")
        case "running":
            text = f"Running: {at}" if fold.step is not None else f"Running: no step yet{_so_far(fold, reason)}"
        case "no word":
            who = "the launcher is gone" if fold.launched else "its groups are gone"
            text = f"No word of its end, {who}: last {at}" if fold.step is not None else f"No step, and {who}{why}"
    return text if not lost else f"{text} without {'; '.join(group.describe() for group in lost)}"


def _so_far(fold: RunFold, reason: Reason | None) -> str:
    """Say why a run that goes on has not begun to train; empty if nothing failed."""
    if reason is None:
        return ""
    ends = max((group.num_ends for group in fold.groups.values()), default=0)  # none in a history without its begin
    return f": {reason.describe()}" + (f", {ends} times" if ends > 1 else "")


def _also_left(fold: RunFold) -> str:
    """Name the groups that left a finished run before its end."""
    left = [group for group in fold.groups.values() if group.state == "left"]
    return f"; {name_groups([group.slot for group in left])} left before" if left else ""


def _why_lost(reason: Reason) -> str:
    rank = "" if reason.rank is None else f"rank {reason.rank}"
    return ", ".join(part for part in (reason.text, rank, reason.where) if part)


def _colour(fold: RunFold, kind: Kind, step: int, lost: Sequence[LostGroup]) -> Colour:
    if kind in ("failed", "never began"):
        return "red"
    whole = kind == "running" or (kind == "finished" and not _misses_end(fold, step))
    return "green" if whole and _ended_well(fold) and not lost else "amber"


def _misses_end(fold: RunFold, step: int) -> bool:
    """Tell whether a run that finished, as its launcher says, has no event of its last steps: the disk was full."""
    told = any(group.state == "finished" and group.step is not None for group in fold.groups.values())
    return not told and fold.target is not None and step < fold.target


def _ended_well(fold: RunFold) -> bool:
    """Tell whether the launcher says of nothing that it failed; True without a launcher."""
    end = fold.launch_end
    return end is None or end.code == 0 or end.signal is not None


def _say_end(fold: RunFold) -> str:
    end = fold.launch_end
    return "" if end is None else f"the launch ended with exit status {end.code}: {end.reason}"
