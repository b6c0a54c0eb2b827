# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The time of each group from the job's begin to its end, cut into states without gaps or overlaps.

| state | while the group |
| --- | --- |
| productive | computes or applies a step that counts: data, forward, backward, clip, optimizer |
| wasted | computes a step that does not count: killed in it, gradient left out, state thrown away |
| exchange_wait | waits in a working exchange, or for other groups to join the exchange |
| detection | is in a broken exchange, from the failure (or the wait's begin) until its notice |
| quorum | waits for the lighthouse's answer, also for a lighthouse that is down |
| rebuild | builds the process group |
| wait_for_groups | waits to meet first, below `min_replica_size`, or because a joiner asked |
| heal | fetches the state from a donor, from the begin of the heal until the state is there |
| replay | applies the updates that the others made during the fetch |
| start | starts its first process, until this process asks for its first quorum |
| restart | is dead, until the next process asks for its first quorum |
| hung | lives and does nothing: stopped (SIGSTOP) or deadlocked |
| overhead | is between two steps: digests, logging, checkpoints, validation |
| idle | has finished, was drained or stopped for good, or gave up |
| unknown | has no event, as at the end of a cut history |

Work that overlaps with forward and backward is productive time, because it costs nothing. Most
quorums and the transfers of a donor are such work.

`titan_ft.history.timing.goodput`, the report and the audit read this module. See docs/observing.md,
"The history".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.timing.intervals import STATES, Interval, Strip
from titan_ft.run import events as ev

_OfExchange = ev.Joined | ev.ExchangeFailed | ev.Waiting
"""Events within a step that say why its exchange took time."""
USUAL = "of usual steps together"
"""The detail of an interval that is a sum over usual steps."""
_AWAY = {"start", "restart", "idle", "unknown"}
"""States in which a group cannot be frozen."""


@dataclass(frozen=True)
class Unfinished:
    """The forward passes of a step that its group did not commit itself."""

    forward_passes: int
    """An upper bound, by the length of the time and the pace of the group's other steps."""
    kept: bool
    """True if the other groups committed the step with this group's gradient."""
    reason: str
    is_reported: bool = False
    """True if the group reported the passes in an event. Their number is exact then."""


@dataclass(frozen=True)
class Timeline:
    """The states of each group from `begin_us` to `end_us` (Unix microseconds)."""

    begin_us: int
    end_us: int
    groups: dict[int, tuple[Interval, ...]]
    unfinished: tuple[Unfinished, ...]

    @property
    def wall_us(self) -> int:
        return self.end_us - self.begin_us

    def totals_us(self, slot: int) -> Counter[str]:
        """Return a group's microseconds in each state; their sum is exactly `wall_us`."""
        totals = Counter[str]()
        for interval in self.groups[slot]:
            totals[interval.state] += interval.num_us
        return totals


@once_per_record
def build_timeline(record: RunRecord) -> Timeline:
    """Return the states of all groups from the job's begin to its end."""
    groups: dict[int, tuple[Interval, ...]] = {}
    unfinished: list[Unfinished] = []
    for slot in record.groups:
        cutter = GroupCutter(record, slot)
        groups[slot] = cutter.run()
        unfinished += cutter.unfinished
    begin_us, end_us = record.span_us
    return Timeline(begin_us, end_us, groups, tuple(unfinished))


@once_per_record
def _events_of_rank_0(record: RunRecord) -> dict[tuple[int, int], list[ev.Event]]:
    """Return the events of rank 0 by group and attempt, in order of time.

    `Hung` is left out: it announces an end, and `Attempt.hung_us` has its time.
    """
    found: dict[tuple[int, int], list[ev.Event]] = defaultdict(list)
    for process in record.processes:
        if process.rank != 0:
            continue
        for event in process.events:
            if not isinstance(event, ev.Hung):
                found[process.slot, process.attempt].append(event)
    for events in found.values():
        events.sort(key=lambda event: event.time)
    return found


class _Parts(NamedTuple):
    """The microseconds of one step."""

    compute: int
    exchange: int
    apply: int

    @classmethod
    def of(cls, commit: ev.StepCommitted) -> _Parts:
        return cls(
            _us(commit.compute_seconds),
            _us(commit.exchange_seconds),
            _us(commit.apply_seconds),
        )


class _StepShares(NamedTuple):
    """A committed step, cut into consecutive stretches of microseconds."""

    before: int
    computing: int
    exchange: int
    applying: int


class GroupCutter:
    """Cuts the time of one group, attempt by attempt and event by event.

    `build_timeline` makes one for each group and calls `run` once.
    """

    def __init__(self, record: RunRecord, slot: int) -> None:
        self._record = record
        self._slot = slot
        self._attempts = record.attempts.get(slot, [])
        self._strip = Strip(*record.span_us)
        self.unfinished: list[Unfinished] = []
        commits = [event for event in self._all_events() if isinstance(event, ev.StepCommitted)]
        self._own_steps = {commit.step for commit in commits}
        self._measure_pace(commits)
        self._last_passes = commits[-1].forward_passes if commits else 0
        self._step = 0
        """The step that the group holds."""
        # State of the attempt under way:
        self._has_begun = False
        """True once the attempt has committed or begun to heal."""
        self._heal_begin: int | None = None
        """Begin of the heal under way; None outside of a heal."""
        self._pending: list[tuple[int, _OfExchange]] = []
        """Time and event of all that delayed the exchange of the step under way."""

    def _measure_pace(self, commits: Sequence[ev.StepCommitted]) -> None:
        """Set the usual computing and exchange time of the group's steps."""
        self._most_passes = 0
        self._usual_compute = 0
        self._usual_exchange = 0
        if not commits:
            return
        parts = [_Parts.of(commit) for commit in commits]
        self._usual_exchange = round(median(part.exchange for part in parts))
        if self._record.unit.steps == 1:
            self._usual_compute = round(median(part.compute for part in parts))
            return
        # A group that joins in the midst of a round computes only a part of it, so the median of
        # whole rounds would be too short: take the pace of one forward pass.
        self._most_passes = max(commit.forward_passes for commit in commits)
        paces = []
        for commit, part in zip(commits, parts, strict=True):
            if commit.forward_passes:
                paces.append(part.compute / commit.forward_passes)
        if paces:
            self._usual_compute = round(median(paces) * self._most_passes)

    def _events_of(self, attempt: Attempt) -> list[ev.Event]:
        """Return the events of rank 0 in an attempt, in order of time."""
        return _events_of_rank_0(self._record).get((attempt.slot, attempt.number), [])

    def _all_events(self) -> list[ev.Event]:
        """Return the events of rank 0 in all attempts, one attempt after the other."""
        events: list[ev.Event] = []
        for attempt in self._attempts:
            events += self._events_of(attempt)
        return events

    def run(self) -> tuple[Interval, ...]:
        cause = ""
        for index, attempt in enumerate(self._attempts):
            self._has_begun = False
            self._heal_begin = None
            self._pending = []
            self._fill_start(attempt, "start" if index == 0 else "restart", cause)
            has_left = self._fill_training(attempt)
            if not has_left:
                self._fill_end(attempt)
            cause = _name_end(attempt)
        if self._attempts:
            self._fill_rest(self._attempts[-1])
        self._paint_frozen()
        self._paint_outages()
        return self._strip.cut()

    def _paint_frozen(self) -> None:
        """Mark the times for which a fault had frozen the group."""
        over = set(STATES) - _AWAY
        for fault in self._record.faults:
            if fault.slot == self._slot and fault.outcome == "frozen":
                resumed = fault.undone_us or self._next_event_us(fault.time_us)
                self._strip.paint(fault.time_us, resumed, "hung", over, f"stopped ({fault.name})")

    def _paint_outages(self) -> None:
        """Mark the waits in an exchange during which there was no lighthouse."""
        reason = "the lighthouse is down"
        for start, end in self._record.outages_us:
            for left, right in self._strip.stretches("exchange_wait"):
                if left < end and right > start:
                    self._strip.paint(max(left, start), right, "quorum", {"exchange_wait"}, reason)

    def _fill_start(self, attempt: Attempt, state: str, cause: str) -> None:
        """Fill the time until the process asks for its first quorum."""
        until = attempt.last_us if attempt.died_us is None else attempt.died_us
        for event in self._events_of(attempt):
            if isinstance(event, ev.Joined):
                until = event.time_us - _us(event.quorum_seconds) - _us(event.rebuild_seconds)
                break
            if isinstance(event, ev.StepCommitted):
                until = event.time_us - sum(_Parts.of(event))
                break
            if isinstance(event, ev.HealStarted | ev.TrainingFinished):
                until = event.time_us
                break
        self._strip.fill(until, state, cause)

    def _fill_training(self, attempt: Attempt) -> bool:
        """Fill the time that the events of rank 0 describe.

        Returns:
            True if the attempt finished or left; its end needs no further filling then.
        """
        died = attempt.died_us
        strip = self._strip
        for event in self._events_of(attempt):
            time = event.time_us
            is_after_death = died is not None and time > died
            if is_after_death and not isinstance(event, ev.TrainingFinished):
                continue
            match event:
                case ev.Joined() | ev.ExchangeFailed() | ev.Waiting():
                    self._pending.append((time, event))
                case ev.StepCommitted():
                    self._fill_step(time, event)
                case UsualSteps():
                    self._fill_usual_steps(time, event)
                case ev.HealStarted():
                    self._begin_heal(time)
                case ev.HealFinished() if self._heal_begin is not None:
                    self._fill_heal(time, event, self._heal_begin)
                case ev.RolledBack() if self._heal_begin is not None:
                    strip.fill(time, "heal", "went back: nobody holds the state")
                    self._heal_begin = None
                case ev.Drained():
                    if not event.in_order:
                        self._fill_unfinished(time, "drained", event.void)
                    strip.fill(time, "overhead")
                    return True
                case ev.TrainingFinished():
                    strip.fill(time, "idle", "waits for the others to finish")
                    return True
        return False

    def _fill_step(self, time: int, event: ev.StepCommitted) -> None:
        """Fill the time of a step: the time before it, computing, the exchange, the update."""
        strip = self._strip
        shares = self._share_out(time, event)
        is_void = event.lineage in self._record.void_lineages
        has_counted = event.contributed or _counts_own_batch(event)
        computed = "productive"
        why_wasted = ""
        if is_void:
            computed, why_wasted = "wasted", "the step is void"
        elif not has_counted:
            computed, why_wasted = "wasted", "its gradient did not count"
        if not self._has_begun:
            strip.fill(strip.cursor + shares.before, "wait_for_groups", "first meeting")
        elif self._heal_begin is not None:
            # The event of the heal's end is not in the history.
            strip.fill(strip.cursor + shares.before, "heal")
        else:
            strip.fill(strip.cursor + shares.before, "overhead")
        strip.fill(strip.cursor + shares.computing, computed, why_wasted)
        strip.fill(strip.cursor + shares.exchange, "exchange_wait")
        self._paint_exchange(strip.cursor)
        if is_void:
            strip.fill(strip.cursor + shares.applying, "wasted", "the step is void")
        else:
            # The update counts even if this group's gradient is not in it.
            strip.fill(strip.cursor + shares.applying, "productive")
        strip.fill(time, "overhead")
        self._has_begun = True
        self._heal_begin = None
        self._step = event.step
        self._last_passes = event.forward_passes

    def _share_out(self, time: int, event: ev.StepCommitted) -> _StepShares:
        """Cut the time since the last filled moment into the parts of a step.

        The event has the seconds of each part, and no part may exceed the time that there was.
        """
        compute, exchange, update = _Parts.of(event)
        gap = max(0, time - self._strip.cursor)
        breaks = self._find_breaks()
        if not self._has_begun:
            # The exchange of a first step includes the wait for the first meeting, which is not
            # part of the step. Count from the break, or else the usual length.
            since_break = time - update - min(breaks, default=time)
            exchange = min(exchange, max(self._usual_exchange, since_break))
        update = min(update, gap)
        exchange = min(exchange, gap - update)
        # The begin of a broken exchange is known. A sound one is taken to end when the update
        # begins.
        head = gap - exchange - update
        if breaks:
            until_break = max(0, min(breaks) - self._strip.cursor)
            head = min(until_break, gap - exchange)
        tail = gap - head - exchange
        done = min(compute + update, head + tail)
        applying = min(tail, max(update, done - head))
        computing = min(head, done - applying)
        return _StepShares(head - computing, computing, exchange, applying)

    def _find_breaks(self) -> list[int]:
        """Return when the broken exchanges and waits of the step under way began."""
        breaks = []
        for time, event in self._pending:
            if isinstance(event, ev.ExchangeFailed):
                breaks.append(time - _us(event.seconds))
            elif isinstance(event, ev.Waiting):
                breaks.append(time)
        return breaks

    def _fill_usual_steps(self, time: int, event: UsualSteps) -> None:
        """Fill the time of usual steps in a row with three sums over all of them."""
        strip = self._strip
        strip.fill(strip.cursor + event.productive_us, "productive", USUAL, is_sum=True)
        strip.fill(strip.cursor + event.exchange_us, "exchange_wait", USUAL, is_sum=True)
        strip.fill(time, "overhead", USUAL, is_sum=True)
        self._step = event.step

    def _paint_exchange(self, until: int) -> None:
        """Replace the wait in the exchange until `until` by its causes, as far as events name them.

        Later paint covers earlier paint: a quorum within a detection is a quorum.
        """
        paint = self._strip.paint
        waiting = {"exchange_wait", "unknown"}
        for time, event in self._pending:
            if isinstance(event, ev.ExchangeFailed):
                start = self._record.find_last_fault_us(time - _us(event.seconds), time)
                paint(start, time, "detection", waiting, event.error[:80])
        for time, event in self._pending:
            if isinstance(event, ev.Joined):
                built = time - _us(event.rebuild_seconds)
                asked = built - _us(event.quorum_seconds)
                over_quorum = {*waiting, "detection"}
                over_rebuild = {*over_quorum, "quorum", "wait_for_groups"}
                paint(asked, built, "quorum", over_quorum)
                paint(built, time, "rebuild", over_rebuild, f"groups {event.participants}")
        for time, event in self._pending:
            if isinstance(event, ev.Waiting):
                paint(time, until, "wait_for_groups", {*waiting, "quorum"}, event.reason)
        self._pending = []

    def _begin_heal(self, time: int) -> None:
        if self._heal_begin is not None:
            # The transfer failed, and the group asks the next donor.
            self._strip.fill(time, "heal", "looks for another donor")
        elif self._has_begun:
            self._fill_unfinished(time, "its state was not the job's")
        else:
            self._strip.fill(time, "exchange_wait", "joins the others' round")
            self._paint_exchange(time)
        self._has_begun = True
        self._heal_begin = time

    def _fill_heal(self, time: int, event: ev.HealFinished, begin: int) -> None:
        """Fill the time of a finished heal: the fetch and the replay."""
        fetched = begin + round(event.fetch_seconds * 1e6)
        self._strip.fill(min(fetched, time), "heal", f"from group {event.donor}")
        self._strip.fill(time, "replay", f"{event.replayed} updates")
        self._heal_begin = None
        self._step = event.step
        self._pending = []

    def _fill_unfinished(
        self, until: int, reason: str, void: Sequence[ev.Batches] | None = None
    ) -> None:
        """Fill the time of a step that this group did not commit, or of a heal that did not end.

        Args:
            void: the batches that the group had read for the step, if an event reports them.
        """
        strip = self._strip
        until = min(until, strip.end)
        if void is not None and self._heal_begin is None:
            num_batches = sum(batches.num_batches for batches in void)
            self.unfinished.append(
                Unfinished(num_batches, kept=False, reason=reason, is_reported=True)
            )
            strip.fill(until, "wasted", reason)
            return
        if self._heal_begin is not None:
            strip.fill(until, "heal", "in vain")
        elif not self._has_begun:
            commits = self._record.commits
            job_has_met = bool(commits) and strip.cursor >= commits[0].time_us
            if job_has_met:
                strip.fill(until, "exchange_wait")
            else:
                strip.fill(until, "wait_for_groups", "first meeting")
        elif until > strip.cursor:
            self._fill_cut_step(until, reason)
        self._paint_exchange(until)

    def _fill_cut_step(self, until: int, reason: str) -> None:
        """Fill the time of a step that was cut short while the group computed or exchanged it."""
        strip = self._strip
        compute = min(self._usual_compute, until - strip.cursor)
        share = compute / self._usual_compute if self._usual_compute else 1.0
        passes = math.ceil(share * max(self._last_passes, self._most_passes))
        next_step = self._step + 1
        # If the group itself committed this step after its return, the gradient in the step is the
        # one that it computed then, and this one is lost.
        is_made_anew = next_step in self._own_steps
        is_kept = not is_made_anew and self._slot in self._record.contributors_of_step.get(
            next_step, ()
        )
        self.unfinished.append(Unfinished(passes, is_kept, reason))
        if is_kept:
            strip.fill(strip.cursor + compute, "productive")
        else:
            strip.fill(strip.cursor + compute, "wasted", reason)
        strip.fill(until, "exchange_wait")

    def _fill_end(self, attempt: Attempt) -> None:
        """Fill the time from the attempt's last step or heal to its end, as far as known."""
        died = attempt.died_us
        if died is None:
            # The attempt's end is not in the history.
            is_healing = self._heal_begin is not None
            self._strip.fill(attempt.last_us, "heal" if is_healing else "unknown")
            self._paint_exchange(self._strip.cursor)
            return
        hung_since = self._find_hung_since(attempt, self._strip.cursor)
        until = died if hung_since is None else hung_since
        self._fill_unfinished(until, attempt.why_ended or "stopped")
        self._strip.fill(died, "hung", "deadlocked")

    def _find_hung_since(self, attempt: Attempt, cursor: int) -> int | None:
        """Return since when an attempt without events after `cursor` hung; None if it did not."""
        noticed = attempt.hung_us or attempt.exit_us or 0
        for fault in self._record.faults:
            has_hung_group = fault.slot == self._slot and fault.outcome == "hung"
            if has_hung_group and cursor <= fault.time_us <= noticed:
                return fault.time_us
        if attempt.hung_us is None or attempt.hung_us < cursor:
            return None
        timeout_us = self._record.hang_timeout_us
        if timeout_us is None:
            return cursor
        return max(cursor, attempt.hung_us - timeout_us)

    def _fill_rest(self, last: Attempt) -> None:
        """Fill the time after the group's last attempt."""
        strip = self._strip
        stopping = self._record.fold.stopping
        if last.gave_up_us is not None:
            strip.fill(last.gave_up_us, "restart", last.why_ended)
            strip.fill(strip.end, "idle", "gave up")
            return
        for event in self._events_of(last):
            if isinstance(event, ev.TrainingFinished):
                strip.fill(strip.end, "idle", "finished")
                return
            if isinstance(event, ev.Drained):
                strip.fill(strip.end, "idle", "drained")
                return
        if last.failed:
            # The begin of the restart is not in the history.
            until = last.last_us if stopping is None else stopping.time_us
            strip.fill(until, "restart", last.why_ended)
            if stopping is not None:
                strip.fill(strip.end, "idle", "stopped")
        elif last.exit_us is not None:
            strip.fill(strip.end, "idle", "stopped")

    def _next_event_us(self, since: int) -> int:
        """Return the time of rank 0's first event after `since`; without one, the job's end."""
        times = sorted(event.time_us for event in self._all_events())
        index = bisect_left(times, since + 1)
        if index == len(times):
            return self._record.span_us[1]
        return times[index]


def _name_end(attempt: Attempt) -> str:
    """Return why an attempt ended; the detail of the restart that follows."""
    if attempt.why_ended:
        return attempt.why_ended
    return "its end is not told" if attempt.exit_us is None else "ended"


def _us(seconds: float) -> int:
    """Return seconds in microseconds; 0 if they are negative, as after a clock was set."""
    return max(0, round(seconds * 1e6))


def _counts_own_batch(commit: ev.StepCommitted) -> bool:
    """Return whether the job counts the group's own batch as trained.

    A batch without labels has no weight, so that its group did not contribute, and is trained.
    """
    return commit.data is not None and commit.data.slot in commit.batches
