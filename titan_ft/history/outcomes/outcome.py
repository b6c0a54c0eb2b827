# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a run: finished or not, the reason of a failure, who stopped it, its lost groups.

`check`, `report`, the report's page and `top` show this outcome first, so that they cannot
contradict each other. `decide_outcome` reads the fold of the run's events, and no file or clock. It
answers four questions:

1. Which *kind* of end did the run have, or does it go on (`_find_kind`)?
2. Why did groups fail that have not come back, the likeliest cause first (`_find_reasons`)?
3. Who stopped the run (`_find_stopped_by`)?
4. Which groups are lost (`_find_lost_groups`)? A lost group neither finished nor left, and nobody
   starts it again.

A run has a *launcher* if `titan-ft launch` started it. Its launcher restarts groups, and reports
the end of the run with an exit status. On a cluster, groups may be started one by one: then nobody
reports the end of the run, and the groups' own events must show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from titan_ft.history.fold.group import ENDED, GroupFold, Reason, group_alike
from titan_ft.history.fold.run import RunFold
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.run.events import LaunchFinished

Kind = Literal["running", "finished", "stopped", "failed", "never began", "unknown"]
"""How a run ended.

- "running": it goes on.
- "finished": at least one group made the last step.
- "stopped": somebody stopped the launch, or asked the groups to leave.
- "failed": it made updates, and ended without the last step.
- "never began": groups failed before the first update, also if somebody stopped the run then.
- "unknown": the launcher or the groups are gone, and no event says how they ended.
"""
Colour = Literal["green", "amber", "red"]

SAME_CAUSE_SECONDS = 60.0
"""Failures of several groups within this time are taken to have one cause."""
LOST_SECONDS = 60.0
"""Without a launcher, a group that failed and has written no event for so long is lost."""
_SIGNALS = {"SIGINT": "Ctrl-C", "SIGHUP": "a closed terminal"}
"""Signals that stop a launch, as people call them; other signals keep their names."""


@dataclass(frozen=True)
class LostGroup:
    """A group that is gone for good: it neither finished nor left, and is not started again."""

    slot: int
    since_step: int | None
    """torchtitan's step after the group's last update; None if the group made none."""
    reason: Reason | None
    """None if no event says why."""

    def describe(self) -> str:
        """Return one line: "group 1, lost since step 7: killed by SIGKILL, rank 0"."""
        since = "before its first step"
        if self.since_step is not None:
            since = f"since step {self.since_step}"
        why = "no event says why"
        if self.reason is not None:
            why = _describe_without_group(self.reason)
        return f"group {self.slot}, lost {since}: {why}"


@dataclass(frozen=True)
class Outcome:
    """How a run ended, or how a running run is going."""

    kind: Kind
    headline: str
    """One line: "Failed at step 12 of 40: RuntimeError: boom, rank 0 of group 0, mybug.py:15"."""
    step: int
    """torchtitan's step after the last update; 0 before the first."""
    steps: int | None
    """`training.steps`; None if unknown."""
    lost: tuple[LostGroup, ...]
    reason: Reason | None
    """Why the run failed, or why it has made no update yet; None in all other cases."""
    reasons: tuple[Reason, ...]
    """Why groups failed that have not contributed to an update since.

    The likeliest cause comes first, and each cause is listed once.
    """
    stopped_by: str
    """The request that stopped the run: "Ctrl-C", "SIGTERM", "--minutes"; empty if unknown, or if
    the run was not stopped.
    """
    colour: Colour

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as dictionaries, lists and numbers for JSON."""
        return asdict(self) | {"lost": [asdict(group) for group in self.lost]}


@once_per_record
def find_outcome(record: RunRecord) -> Outcome:
    """Return the outcome of a recorded run."""
    outcome = decide_outcome(record.fold, is_live=record.is_live)
    has_trained = outcome.step > 0
    if outcome.kind == "running" and has_trained and record.silent_seconds > 0:
        # All groups may be frozen at once: then no group can report the others as lost.
        headline = f"{outcome.headline}; no event for {record.silent_seconds:.0f} s"
        return replace(outcome, headline=headline, colour="amber")
    return outcome


def decide_outcome(fold: RunFold, *, is_live: bool) -> Outcome:
    """Return the outcome of a run by its events so far.

    Args:
        is_live: whether the launcher lives; without a launcher, whether the groups live.
    """
    kind = _find_kind(fold, is_live=is_live)
    reasons = _find_reasons(fold)
    reason = None
    if reasons and _needs_reason(fold, kind):
        reason = reasons[0]
    stopped_by = ""
    # A launch that was stopped may also end as "finished" or "never began": say who stopped it.
    was_stopped = kind == "stopped" or fold.stopping is not None
    if was_stopped:
        stopped_by = _find_stopped_by(fold)
    lost = tuple(_find_lost_groups(fold, kind))
    # The fold counts updates; people know torchtitan's steps.
    step = 0
    if fold.step is not None:
        step = fold.unit.step_after(fold.step)
    return Outcome(
        kind=kind,
        headline=_headline(fold, kind, step, lost, reason, stopped_by),
        step=step,
        steps=fold.target_step,
        lost=lost,
        reason=reason,
        reasons=reasons,
        stopped_by=stopped_by,
        colour=_find_colour(fold, kind, step, lost),
    )


def _find_kind(fold: RunFold, *, is_live: bool) -> Kind:
    if not _is_over(fold, is_live=is_live):
        if is_live:
            return "running"
        return "unknown"  # the launcher is gone, and no event reports its end
    states = {group.state for group in fold.groups.values()}
    # One group that made the last step finishes the run, whatever became of the others.
    if "finished" in states:
        return "finished"
    end = fold.launch_end
    if end is None:
        return _find_kind_without_launcher(fold)
    has_trained = fold.step is not None
    if fold.stopping is not None:
        # A user who stops a launch that cannot begin wants to see why it cannot.
        if not has_trained and _find_reasons(fold):
            return "never began"
        return "stopped"
    if end.code != 0:
        return _failed_or_never_began(fold)
    # Exit status 0. On a full disk the groups' last events are missing: the exit status counts,
    # even if no group wrote any event. But groups that wrote events and no update did not finish.
    has_group_events = bool(states)
    if has_group_events and not has_trained:
        return "unknown"
    return "finished"


def _failed_or_never_began(fold: RunFold) -> Kind:
    if fold.step is None:
        return "never began"
    return "failed"


def _is_over(fold: RunFold, *, is_live: bool) -> bool:
    """Return whether the launch announced its end; without a launcher, whether all groups ended."""
    if fold.launched:
        return fold.launch_end is not None
    return fold.ended or not is_live


def _find_kind_without_launcher(fold: RunFold) -> Kind:
    """Return the kind for groups that were started one by one, if none of them finished."""
    states = {group.state for group in fold.groups.values()}
    states.discard("not started")
    if states == {"given up"}:
        return _failed_or_never_began(fold)
    any_left = "left" in states
    all_left_or_failed = states <= {"left", "given up", "died"}
    if any_left and all_left_or_failed:
        return "stopped"  # some groups left because somebody asked; the others had failed before
    return "unknown"


def _needs_reason(fold: RunFold, kind: Kind) -> bool:
    """Return whether the headline names a reason: the run failed, or has made no update."""
    if kind in ("failed", "never began"):
        return True
    if kind in ("running", "unknown"):
        return fold.step is None
    return False


def _find_reasons(fold: RunFold) -> tuple[Reason, ...]:
    """Return why groups failed that have not contributed since; the likeliest cause comes first.

    Exceptions that differ only in numbers are one cause.
    """
    # The fold clears a group's reason when the group contributes to an update again.
    reasons = [group.reason for group in fold.groups.values() if group.reason is not None]
    if reasons:
        latest = max(reason.time for reason in reasons)
        reasons.sort(key=lambda reason: _likeliest_first(reason, latest))
    end = fold.launch_end
    if end is not None and end.code != 0 and fold.stopping is None:
        # A failure of the launch itself, such as the end of the lighthouse, comes before failures
        # of groups. In all other cases the launcher only repeats the groups' reasons.
        launch_is_cause = end.own_failure or not reasons
        if launch_is_cause:
            reasons.insert(0, Reason(end.reason, time=end.time))
    causes = group_alike(reasons).values()
    return tuple(same_cause[0] for same_cause in causes)


def _likeliest_first(reason: Reason, latest: float) -> tuple[bool, bool, bool, float]:
    """Return a sort key: the likeliest cause of the last failures comes first.

    Args:
        latest: Unix seconds of the last failure.
    """
    # False sorts before True.
    is_of_earlier_failure = reason.time < latest - SAME_CAUSE_SECONDS
    # When one group raises an exception, other groups may fail as a consequence: by a signal, or by
    # a transient exception such as a lost connection. So a permanent exception comes first.
    is_no_exception = not reason.exception
    return is_of_earlier_failure, is_no_exception, reason.transient, reason.time


def _find_lost_groups(fold: RunFold, kind: Kind) -> list[LostGroup]:
    lost = []
    for group in fold.groups.values():
        if not _is_lost(fold, group, kind):
            continue
        reason = group.reason
        if reason is None:
            # The group wrote no event of its end, and another group reported its silence.
            reason = group.silence
        lost.append(LostGroup(group.slot, _find_last_step(fold, group), reason))
    return lost


def _find_last_step(fold: RunFold, group: GroupFold) -> int | None:
    """Return torchtitan's step after a group's last update; None if the group made none."""
    update = group.step
    # The group's own event of its last update may be missing: the others name it as a participant.
    if group.took_part is not None:
        update = max(group.took_part, update or 0)
    if update is None:
        return None
    return fold.unit.step_after(update)


def _is_lost(fold: RunFold, group: GroupFold, kind: Kind) -> bool:
    """Return whether a group is gone for good."""
    if group.state in ENDED:
        return False
    if group.state == "given up" or group.silence is not None:
        return True
    if kind == "finished":
        # A group that was still coming back when the others finished is not lost: with exit status
        # 0 all agents ended well.
        end = fold.launch_end
        all_agents_ended_well = end is not None and end.code == 0
        return not all_agents_ended_well
    if fold.launched:
        return False  # a launcher restarts its groups, and writes an event when it gives one up
    if kind not in ("running", "stopped"):
        return False  # the headline says that the whole run failed or is gone
    is_away = group.failure is not None
    quiet_seconds = fold.last_event_time - group.last_event_time
    return is_away and quiet_seconds > LOST_SECONDS


def _find_stopped_by(fold: RunFold) -> str:
    """Return the request that stopped a run; empty if unknown. See `Outcome.stopped_by`."""
    end = fold.launch_end
    if end is not None:
        if end.signal is None:
            return "--minutes"  # the only stop that needs no signal
        return _SIGNALS.get(end.signal, end.signal)
    if fold.stopping is not None:
        return ""  # a launch that is still stopping says at its end who asked
    # Without a launcher, each group that left says who asked; groups that died know nothing of it.
    last: GroupFold | None = None
    for group in fold.groups.values():
        if group.state != "left":
            continue
        if last is None or group.last_event_time > last.last_event_time:
            last = group
    if last is None:
        return ""
    return last.leave_reason


def _headline(
    fold: RunFold,
    kind: Kind,
    step: int,
    lost: Sequence[LostGroup],
    reason: Reason | None,
    stopped_by: str,
) -> str:
    """Return the outcome in one line.

    Args:
        step: torchtitan's step after the last update.
    """
    has_trained = fold.step is not None
    because = ""
    if reason is not None:
        because = f": {reason.describe()}"
    by_whom = ""
    if stopped_by:
        by_whom = f" by {stopped_by}"
    match kind:
        case "failed":
            return f"Failed at {_name_step(fold, _failed_step(fold, step))}{because}"
        case "never began":
            if stopped_by:
                return f"Never began{because}; stopped{by_whom}"
            return f"Never began{because}"
        case "finished":
            text = _describe_finish(fold, step, has_lost=bool(lost))
        case "stopped":
            text = f"Stopped{by_whom} {_describe_progress(fold, step)}"
        case "running":
            if has_trained:
                text = f"Running: {_describe_progress(fold, step)}"
            else:
                text = f"Running: no step yet{because}{_count_failures(fold, reason)}"
        case "unknown":
            gone = "the groups are gone"
            if fold.launched:
                gone = "the launcher is gone"
            if has_trained:
                text = f"End unknown, {gone}: last {_describe_progress(fold, step)}"
            else:
                text = f"No step, and {gone}{because}"
    if lost:
        text += " without " + "; ".join(group.describe() for group in lost)
    return text


def _name_step(fold: RunFold, step: int) -> str:
    """Return "step 12 of 40", or "step 12" if the number of steps is unknown."""
    if fold.target_step:
        return f"step {step} of {fold.target_step}"
    return f"step {step}"


def _describe_progress(fold: RunFold, step: int) -> str:
    if fold.step is None:
        return "before the first step"
    return f"at {_name_step(fold, step)}"


def _failed_step(fold: RunFold, step: int) -> int:
    """Return the step that the run did not complete: its last step plus 1, at most the target."""
    next_step = step + 1
    if fold.target_step:
        return min(next_step, fold.target_step)
    return next_step


def _count_failures(fold: RunFold, reason: Reason | None) -> str:
    """Return ", 3 times" if the group of a reason failed three times; empty for one failure."""
    if reason is None or reason.slot is None:
        return ""
    # Only of that group: others may have failed more often, for other reasons.
    num_failures = fold.groups[reason.slot].num_failed_attempts
    if num_failures <= 1:
        return ""
    return f", {num_failures} times"


def _describe_finish(fold: RunFold, step: int, *, has_lost: bool) -> str:
    if _misses_last_events(fold, step):
        text = f"Finished; the events after {_name_step(fold, step)} are missing"
    else:
        text = f"Finished at step {step}"
        left = [group.slot for group in fold.groups.values() if group.state == "left"]
        if left:
            text += f"; {name_groups(left)} left before"
    end = fold.launch_end
    if end is None or has_lost:
        return text  # groups that were lost already explain the exit status
    if _has_failed(end):
        text += f", but the launch ended with exit status {end.code}: {end.reason}"
    return text


def _describe_without_group(reason: Reason) -> str:
    """Return one line: "RuntimeError: boom, rank 0, mybug.py:15"."""
    parts = [reason.text]
    if reason.rank is not None:
        parts.append(f"rank {reason.rank}")
    parts.append(reason.where)
    return ", ".join(part for part in parts if part)


def _find_colour(fold: RunFold, kind: Kind, step: int, lost: Sequence[LostGroup]) -> Colour:
    """Return green for a run without trouble, red for a failed one, amber for all others."""
    if kind in ("failed", "never began"):
        return "red"
    if kind in ("stopped", "unknown") or lost:
        return "amber"
    if kind == "finished" and _misses_last_events(fold, step):
        return "amber"
    end = fold.launch_end
    if end is not None and _has_failed(end):
        return "amber"
    return "green"


def _misses_last_events(fold: RunFold, step: int) -> bool:
    """Return whether a finished run has no events of its last steps, as on a full disk."""
    # An agent also reports the exit of a worker whose own last events were lost. So only the
    # group's own report proves that it made the last step.
    for group in fold.groups.values():
        if group.has_announced_end:
            return False
    return fold.target_step is not None and step < fold.target_step


def _has_failed(end: LaunchFinished) -> bool:
    """Return whether a launch failed; a launch that a signal stopped has not."""
    return end.code != 0 and end.signal is None
