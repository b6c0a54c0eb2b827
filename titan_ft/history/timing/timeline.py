# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The time of each group from the job's begin to its end, cut into states without gaps or overlaps.

| state | while the group |
| --- | --- |
| productive | computes or applies a step that counts: data, forward, backward, clip, optimizer |
| wasted | computes a step that does not count: killed in it, gradient left out, state thrown away |
| exchange_wait | waits in a working exchange, or for other groups to join the exchange |
| detection | is in an exchange that broke, from the failure of the other group until its notice |
| quorum | waits for the lighthouse's answer, also for a lighthouse that is down |
| rebuild | builds the process group |
| wait_for_groups | waits for the first groups, for `min_replica_size` groups, or for a joiner |
| heal | fetches the state from a donor, from the begin of the heal until the state is there |
| replay | applies the updates that the others made during the fetch |
| start | starts its first process, until this process asks for its first quorum |
| restart | is dead, until the next process asks for its first quorum |
| hung | lives and does nothing: stopped (SIGSTOP) or deadlocked |
| overhead | is between two steps: digests, logging, checkpoints, validation |
| idle | has finished, was drained or stopped for good, or gave up |
| unknown | has no event, as at the end of a cut history |

Events have only one time, the end of the action that they report, and the lengths of its parts. So
a `GroupCutter` lays out the time of one group in this order:

1. Attempt by attempt (one start of the group's processes each), it fills the group's `Strip` from
   left to right. All time up to the strip's *cursor* is filled. The time of a step is filled when
   its commit is read (`_fill_step`). Events of a broken exchange wait for the commit (`_delays`).
2. Then it paints over parts of the strip with more exact states, as far as events name the causes:
   quorums and rebuilds within an exchange, times for which a fault froze the group, outages of the
   lighthouse.

All times are whole microseconds, so that the states of a group add up to exactly the job's time.
Work that overlaps with forward and backward is productive time, because it costs nothing. Most
quorums and the transfers of a donor are such work.

`titan_ft.history.timing.goodput`, the report and the audit call `build_timeline`. See
docs/observing.md, "The history".
"""

from __future__ import annotations

import math
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

_ExchangeDelay = ev.Joined | ev.ExchangeFailed | ev.Waiting
"""Events within a step that say why its exchange took time."""
OF_USUAL_STEPS = "of usual steps together"
"""The detail of an interval that is a sum over usual steps."""
_STATES_WITHOUT_PROCESS = {"start", "restart", "idle", "unknown"}
"""States in which a fault cannot freeze a group, because no process of it trains."""
_MAX_ERROR_CHARS = 80
"""The detail of a broken exchange is at most this long."""


@dataclass(frozen=True)
class UnfinishedStep:
    """The forward passes of a group for a step that the group did not commit itself."""

    forward_passes: int
    """An upper bound, by the length of the time and the pace of the group's other steps."""
    is_committed: bool
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
    unfinished: tuple[UnfinishedStep, ...]

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
    unfinished: list[UnfinishedStep] = []
    for slot in record.groups:
        cutter = GroupCutter(record, slot)
        groups[slot] = cutter.run()
        unfinished += cutter.unfinished
    begin_us, end_us = record.span_us
    return Timeline(begin_us, end_us, groups, tuple(unfinished))


@once_per_record
def _events_of_rank_0(record: RunRecord) -> dict[tuple[int, int], list[ev.Event]]:
    """Return the events of rank 0 by group and attempt, in order of time.

    `Hung` is left out, because no action of the group ends with it. `Attempt.hung_us` has its time.
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


class _ReportedParts(NamedTuple):
    """The lengths of a step's parts by its commit, in microseconds.

    They need not follow each other: an exchange may begin while the group still computes.
    """

    compute: int
    exchange: int
    apply: int

    @classmethod
    def of(cls, commit: ev.StepCommitted) -> _ReportedParts:
        return cls(
            _us(commit.compute_seconds),
            _us(commit.exchange_seconds),
            _us(commit.apply_seconds),
        )


class _StepLayout(NamedTuple):
    """The lengths of a step's parts in microseconds, as they follow each other on the strip."""

    before_computing: int
    computing: int
    exchange: int
    applying: int


class GroupCutter:
    """Cuts the time of one group into states, attempt by attempt and event by event.

    `build_timeline` makes one for each group and calls `run` once.

    Attributes:
        unfinished: the steps that the group did not finish; filled by `run`.
    """

    def __init__(self, record: RunRecord, slot: int) -> None:
        self._record = record
        self._slot = slot
        self._attempts = record.attempts.get(slot, [])
        self._strip = Strip(*record.span_us)
        self.unfinished: list[UnfinishedStep] = []
        commits = [event for event in self._all_events() if isinstance(event, ev.StepCommitted)]
        self._committed_steps = {commit.step for commit in commits}
        """All steps that the group commits itself, in any attempt."""
        self._measure_pace(commits)
        self._last_passes = 0
        """Forward passes of the group's latest step; before its first step, of its last one."""
        if commits:
            self._last_passes = commits[-1].forward_passes
        self._step = 0
        """The last step that the group has committed or fetched so far."""
        # State of the attempt that is being filled:
        self._has_begun = False
        """True once the attempt has committed or begun to heal."""
        self._heal_begin: int | None = None
        """Begin of the heal under way; None outside of a heal."""
        self._delays: list[tuple[int, _ExchangeDelay]] = []
        """Time and event of all that delayed the exchange of the step under way."""

    def _measure_pace(self, commits: Sequence[ev.StepCommitted]) -> None:
        """Set the usual computing and exchange time of the group's steps."""
        self._most_passes = 0
        self._usual_compute = 0
        self._usual_exchange = 0
        if not commits:
            return
        parts = [_ReportedParts.of(commit) for commit in commits]
        self._usual_exchange = round(median(part.exchange for part in parts))
        if self._record.unit.steps == 1:
            self._usual_compute = round(median(part.compute for part in parts))
            return
        # A group that joins in the midst of a round computes only a part of it, so the median of
        # all rounds would be too short. Multiply the pace of one forward pass by the passes of a
        # whole round.
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
        """Return the group's intervals, and set `unfinished`."""
        cause_of_restart = ""
        for index, attempt in enumerate(self._attempts):
            self._has_begun = False
            self._heal_begin = None
            self._delays = []
            state = "start" if index == 0 else "restart"
            self._fill_start(attempt, state, cause_of_restart)
            has_left = self._fill_training(attempt)
            if not has_left:
                self._fill_end(attempt)
            cause_of_restart = _name_end(attempt)
        if self._attempts:
            self._fill_after_last_attempt(self._attempts[-1])
        self._paint_frozen()
        self._paint_outages()
        return self._strip.make_intervals()

    def _paint_frozen(self) -> None:
        """Mark the times for which a fault had frozen the group."""
        over_states = set(STATES) - _STATES_WITHOUT_PROCESS
        for fault in self._record.faults:
            if fault.slot != self._slot or fault.outcome != "frozen":
                continue
            resumed = fault.undone_us
            if resumed is None:
                resumed = self._next_event_us(fault.time_us)
            detail = f"stopped ({fault.name})"
            self._strip.repaint(fault.time_us, resumed, "hung", over_states, detail)

    def _paint_outages(self) -> None:
        """Mark the waits in an exchange during which there was no lighthouse."""
        detail = "the lighthouse is down"
        for outage_begin, outage_end in self._record.outages_us:
            for wait_begin, wait_end in self._strip.find_stretches("exchange_wait"):
                overlaps = wait_begin < outage_end and wait_end > outage_begin
                if not overlaps:
                    continue
                # The wait after the outage counts as well: it is for the new lighthouse's answer.
                begin = max(wait_begin, outage_begin)
                self._strip.repaint(begin, wait_end, "quorum", {"exchange_wait"}, detail)

    def _fill_start(self, attempt: Attempt, state: str, cause: str) -> None:
        """Fill the time until the process asks for its first quorum."""
        self._strip.fill_until(self._find_first_quorum(attempt), state, cause)

    def _find_first_quorum(self, attempt: Attempt) -> int:
        """Return when an attempt asked for its first quorum; if it never did, when it ended."""
        for event in self._events_of(attempt):
            match event:
                case ev.Joined():
                    quorum_us = _us(event.quorum_seconds)
                    return event.time_us - quorum_us - _us(event.rebuild_seconds)
                case ev.StepCommitted():
                    # The event of the quorum is not in the history: take the begin of the step.
                    return event.time_us - sum(_ReportedParts.of(event))
                case ev.HealStarted() | ev.TrainingFinished():
                    return event.time_us
        if attempt.died_us is not None:
            return attempt.died_us
        return attempt.last_us

    def _fill_training(self, attempt: Attempt) -> bool:
        """Fill the time that the events of rank 0 describe.

        Returns:
            True if the attempt finished or left; its end needs no further filling then.
        """
        died = attempt.died_us
        strip = self._strip
        for event in self._events_of(attempt):
            time = event.time_us
            # The clock of another host may show a time after the fault. An attempt that reports the
            # end of training did finish.
            is_after_death = died is not None and time > died
            if is_after_death and not isinstance(event, ev.TrainingFinished):
                continue
            match event:
                case ev.Joined() | ev.ExchangeFailed() | ev.Waiting():
                    self._delays.append((time, event))
                case ev.StepCommitted():
                    self._fill_step(time, event)
                case UsualSteps():
                    self._fill_usual_steps(time, event)
                case ev.HealStarted():
                    self._begin_heal(time)
                case ev.HealFinished():
                    if self._heal_begin is not None:
                        self._fill_heal(time, event, self._heal_begin)
                case ev.RolledBack():
                    if self._heal_begin is not None:
                        strip.fill_until(time, "heal", "went back: nobody holds the state")
                        self._heal_begin = None
                case ev.Drained():
                    if not event.in_order:
                        self._fill_unfinished(time, "drained", event.void)
                    strip.fill_until(time, "overhead")
                    return True
                case ev.TrainingFinished():
                    strip.fill_until(time, "idle", "waits for the others to finish")
                    return True
        return False

    def _fill_step(self, time: int, event: ev.StepCommitted) -> None:
        """Fill the time of a step: the time before it, computing, the exchange, the update."""
        strip = self._strip
        layout = self._lay_out_step(time, event)
        # Training went back to an earlier step, and threw the state of a void step away.
        is_void = event.lineage in self._record.void_lineages
        has_counted = event.contributed or _counts_own_batch(event)
        if not self._has_begun:
            strip.fill_for(layout.before_computing, "wait_for_groups", "first meeting")
        elif self._heal_begin is not None:
            # The event of the heal's end is not in the history.
            strip.fill_for(layout.before_computing, "heal")
        else:
            strip.fill_for(layout.before_computing, "overhead")
        if is_void:
            strip.fill_for(layout.computing, "wasted", "the step is void")
        elif not has_counted:
            strip.fill_for(layout.computing, "wasted", "its gradient did not count")
        else:
            strip.fill_for(layout.computing, "productive")
        strip.fill_for(layout.exchange, "exchange_wait")
        self._paint_exchange(strip.cursor)
        if is_void:
            strip.fill_for(layout.applying, "wasted", "the step is void")
        else:
            # The update counts even if this group's gradient is not in it.
            strip.fill_for(layout.applying, "productive")
        strip.fill_until(time, "overhead")
        self._has_begun = True
        self._heal_begin = None
        self._step = event.step
        self._last_passes = event.forward_passes

    def _lay_out_step(self, time: int, event: ev.StepCommitted) -> _StepLayout:
        """Lay out the parts of a step in the time between the cursor and the commit.

        The order is: anything else, computing, the exchange, applying. The parts that the commit
        reports may be longer than this time, as when the exchange overlapped with computing. So
        each part gets at most the time that is left: first the update, then the exchange, then
        computing.
        """
        compute, exchange, update = _ReportedParts.of(event)
        available = max(0, time - self._strip.cursor)
        first_break = min(self._find_breaks(), default=None)
        if not self._has_begun:
            # The exchange of a first step includes the wait for the first meeting, which is not
            # part of the step. Count from the break, or else the usual length.
            since_break = 0
            if first_break is not None:
                since_break = time - update - first_break
            exchange = min(exchange, max(self._usual_exchange, since_break))
        update = min(update, available)
        exchange = min(exchange, available - update)
        if first_break is None:
            # No event says when an exchange without a break began: take it to end when the update
            # begins.
            before_exchange = available - exchange - update
        else:
            until_break = max(0, first_break - self._strip.cursor)
            before_exchange = min(until_break, available - exchange)
        after_exchange = available - before_exchange - exchange
        # Computing that has no room before the exchange comes after it, together with the update.
        busy = min(compute + update, before_exchange + after_exchange)
        applying = min(after_exchange, max(update, busy - before_exchange))
        computing = min(before_exchange, busy - applying)
        return _StepLayout(before_exchange - computing, computing, exchange, applying)

    def _find_breaks(self) -> list[int]:
        """Return when the broken exchanges and waits of the step under way began."""
        breaks = []
        for time, event in self._delays:
            if isinstance(event, ev.ExchangeFailed):
                breaks.append(time - _us(event.seconds))
            elif isinstance(event, ev.Waiting):
                breaks.append(time)
        return breaks

    def _fill_usual_steps(self, time: int, event: UsualSteps) -> None:
        """Fill the time of usual steps in a row with three sums over all of them."""
        strip = self._strip
        strip.fill_for(event.productive_us, "productive", OF_USUAL_STEPS, is_sum=True)
        strip.fill_for(event.exchange_us, "exchange_wait", OF_USUAL_STEPS, is_sum=True)
        strip.fill_until(time, "overhead", OF_USUAL_STEPS, is_sum=True)
        self._step = event.step

    def _paint_exchange(self, until: int) -> None:
        """Replace the wait in the exchange until `until` by its causes, as far as events name them.

        Later paint covers earlier paint: a quorum within a detection is a quorum.
        """
        repaint = self._strip.repaint
        over_waiting = {"exchange_wait", "unknown"}
        over_quorum = {*over_waiting, "detection"}
        over_rebuild = {*over_quorum, "quorum", "wait_for_groups"}
        over_wait_for_groups = {*over_waiting, "quorum"}
        for time, event in self._delays:
            if isinstance(event, ev.ExchangeFailed):
                # If a fault is known, the exchange worked until the fault.
                begin = self._record.find_last_fault_us(time - _us(event.seconds), time)
                repaint(begin, time, "detection", over_waiting, event.error[:_MAX_ERROR_CHARS])
        for time, event in self._delays:
            if isinstance(event, ev.Joined):
                quorum_end = time - _us(event.rebuild_seconds)
                quorum_begin = quorum_end - _us(event.quorum_seconds)
                repaint(quorum_begin, quorum_end, "quorum", over_quorum)
                repaint(quorum_end, time, "rebuild", over_rebuild, f"groups {event.participants}")
        for time, event in self._delays:
            if isinstance(event, ev.Waiting):
                repaint(time, until, "wait_for_groups", over_wait_for_groups, event.reason)
        self._delays = []

    def _begin_heal(self, time: int) -> None:
        """Fill the time until a heal begins, and note the begin."""
        if self._heal_begin is not None:
            # The transfer failed, and the group asks the next donor.
            self._strip.fill_until(time, "heal", "looks for another donor")
        elif self._has_begun:
            self._fill_unfinished(time, "its state was not the job's")
        else:
            self._strip.fill_until(time, "exchange_wait", "joins the others' round")
            self._paint_exchange(time)
        self._has_begun = True
        self._heal_begin = time

    def _fill_heal(self, time: int, event: ev.HealFinished, begin: int) -> None:
        """Fill the time of a finished heal: the fetch and the replay."""
        fetch_end = begin + round(event.fetch_seconds * 1e6)
        self._strip.fill_until(min(fetch_end, time), "heal", f"from group {event.donor}")
        self._strip.fill_until(time, "replay", f"{event.replayed} updates")
        self._heal_begin = None
        self._step = event.step
        self._delays = []

    def _fill_unfinished(
        self, until: int, reason: str, void: Sequence[ev.Batches] | None = None
    ) -> None:
        """Fill the time from the cursor to an event that broke off the group's action.

        The action was a heal, the first meeting, or a step that this group did not commit.

        Args:
            void: the batches that the group had read for the step; None if no event reports them.
        """
        strip = self._strip
        until = min(until, strip.end)
        if self._heal_begin is not None:
            strip.fill_until(until, "heal", "in vain")
        elif void is not None:
            num_batches = sum(batches.num_batches for batches in void)
            step = UnfinishedStep(num_batches, is_committed=False, reason=reason, is_reported=True)
            self.unfinished.append(step)
            strip.fill_until(until, "wasted", reason)
            return
        elif not self._has_begun:
            commits = self._record.commits
            job_has_met = bool(commits) and strip.cursor >= commits[0].time_us
            if job_has_met:
                strip.fill_until(until, "exchange_wait")
            else:
                strip.fill_until(until, "wait_for_groups", "first meeting")
        elif until > strip.cursor:
            self._fill_step_in_part(until, reason)
        self._paint_exchange(until)

    def _fill_step_in_part(self, until: int, reason: str) -> None:
        """Fill the time of a step that ended while the group computed or exchanged it."""
        strip = self._strip
        compute = min(self._usual_compute, until - strip.cursor)
        share = 1.0
        if self._usual_compute:
            share = compute / self._usual_compute
        passes_of_whole_step = max(self._last_passes, self._most_passes)
        passes = math.ceil(share * passes_of_whole_step)
        next_step = self._step + 1
        # If the group itself committed this step after its return, the gradient in the step is the
        # one that it computed then, and this one is lost.
        is_made_anew = next_step in self._committed_steps
        contributors = self._record.contributors_of_step.get(next_step, ())
        is_committed = not is_made_anew and self._slot in contributors
        self.unfinished.append(UnfinishedStep(passes, is_committed, reason))
        if is_committed:
            strip.fill_for(compute, "productive")
        else:
            strip.fill_for(compute, "wasted", reason)
        strip.fill_until(until, "exchange_wait")

    def _fill_end(self, attempt: Attempt) -> None:
        """Fill the time from the attempt's last step or heal to its end, as far as known."""
        died = attempt.died_us
        if died is None:
            # The attempt's end is not in the history.
            state = "unknown" if self._heal_begin is None else "heal"
            self._strip.fill_until(attempt.last_us, state)
            self._paint_exchange(self._strip.cursor)
            return
        reason = attempt.why_ended or "stopped"
        hung_since = self._find_hung_since(attempt, self._strip.cursor)
        if hung_since is None:
            self._fill_unfinished(died, reason)
        else:
            self._fill_unfinished(hung_since, reason)
        self._strip.fill_until(died, "hung", "deadlocked")

    def _find_hung_since(self, attempt: Attempt, cursor: int) -> int | None:
        """Return since when an attempt without events after `cursor` hung; None if it did not."""
        noticed = attempt.hung_us or attempt.exit_us or 0
        for fault in self._record.faults:
            if fault.slot != self._slot or fault.outcome != "hung":
                continue
            if cursor <= fault.time_us <= noticed:
                return fault.time_us
        if attempt.hung_us is None or attempt.hung_us < cursor:
            return None
        timeout_us = self._record.hang_timeout_us
        if timeout_us is None:
            return cursor
        # The watchdog noticed the hang after this time without progress.
        return max(cursor, attempt.hung_us - timeout_us)

    def _fill_after_last_attempt(self, last: Attempt) -> None:
        """Fill the time after the end of the group's last attempt."""
        strip = self._strip
        if last.gave_up_us is not None:
            strip.fill_until(last.gave_up_us, "restart", last.why_ended)
            strip.fill_until(strip.end, "idle", "gave up")
            return
        for event in self._events_of(last):
            if isinstance(event, ev.TrainingFinished):
                strip.fill_until(strip.end, "idle", "finished")
                return
            if isinstance(event, ev.Drained):
                strip.fill_until(strip.end, "idle", "drained")
                return
        stopping = self._record.fold.stopping
        if last.failed:
            # The group was about to start again, and no event of the next attempt is there.
            if stopping is None:
                strip.fill_until(last.last_us, "restart", last.why_ended)
            else:
                strip.fill_until(stopping.time_us, "restart", last.why_ended)
                strip.fill_until(strip.end, "idle", "stopped")
        elif last.exit_us is not None:
            strip.fill_until(strip.end, "idle", "stopped")

    def _next_event_us(self, since: int) -> int:
        """Return the time of rank 0's first event after `since`; without one, the job's end."""
        times = [event.time_us for event in self._all_events() if event.time_us > since]
        return min(times, default=self._record.span_us[1])


def _name_end(attempt: Attempt) -> str:
    """Return why an attempt ended; the detail of the restart that follows."""
    if attempt.why_ended:
        return attempt.why_ended
    if attempt.exit_us is None:
        return "its end is not told"
    return "ended"


def _us(seconds: float) -> int:
    """Return seconds in microseconds; 0 if they are negative, as after a clock was set."""
    return max(0, round(seconds * 1e6))


def _counts_own_batch(commit: ev.StepCommitted) -> bool:
    """Return whether the job counts the group's own batch as trained, even without a gradient.

    A batch without labels has no weight. Its group does not contribute then, and the batch counts
    as trained.
    """
    return commit.data is not None and commit.data.slot in commit.batches
