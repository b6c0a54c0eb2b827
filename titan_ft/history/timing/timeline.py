# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into time: what each group did from the job's begin to its end, without gaps or overlaps.

| state | a group is in it while |
| --- | --- |
| productive | it computes, or applies, a step that counts: forward, backward, data; clipping and the optimizer |
| wasted | it computes what is thrown away: killed in mid-step, its gradient left out, its state not the job's |
| exchange_wait | its training thread waits in an exchange that works, or for others to come to it |
| detection | an exchange is broken, from the failure (else from the begin of the wait) until that is noticed |
| quorum | it waits for the lighthouse's answer, also for a lighthouse that is down |
| rebuild | it builds the process group |
| wait_for_groups | the job has too few groups: at its first meeting, below `min_replica_size`, or held for a joiner |
| heal | it fetches the state from a donor, from the begin of the heal until the state is there |
| replay | it applies the updates that were made meanwhile |
| start | its first process starts, until it asks for its first quorum |
| restart | it is dead, from its death until the next process asks for its first quorum |
| hung | it lives and does nothing: stopped (SIGSTOP) or deadlocked |
| overhead | it is between two steps: digests, logging, checkpoints, validation |
| idle | it has finished, was drained or stopped for good, or gave up |
| unknown | there is no event, as at the end of a history that was cut |

What is hidden behind forward and backward (most quorums, a donor's transfers) is productive time: it costs nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.timing.intervals import STATES, Interval, Strip
from titan_ft.run import events as ev

_Pending = ev.Joined | ev.ExchangeFailed | ev.Waiting
USUAL = "of usual steps together"
"""Detail of an interval that is a sum."""
_AWAY = {"start", "restart", "idle", "unknown"}


@dataclass(frozen=True)
class Unfinished:
    """Forward passes of a step that their group did not commit itself."""

    forward_passes: int
    """At most: those begun in the time that there was, by the pace of the group's other steps."""
    kept: bool
    """Whether the others committed the step with its gradient."""
    reason: str
    told: bool = False
    """Whether the group told them in an event, so that their number is exact."""


@dataclass(frozen=True)
class Timeline:
    """What each group did from `begin_us` to `end_us` (Unix microseconds)."""

    begin_us: int
    end_us: int
    groups: dict[int, tuple[Interval, ...]]
    unfinished: tuple[Unfinished, ...]

    @property
    def wall_us(self) -> int:
        return self.end_us - self.begin_us

    def totals_us(self, replica: int) -> Counter[str]:
        """Return a group's microseconds in each state; they add up to `wall_us`, exactly."""
        totals = Counter[str]()
        for interval in self.groups[replica]:
            totals[interval.state] += interval.num_us
        return totals


@view
def timeline(record: RunRecord) -> Timeline:
    """Return what each group did from the job's begin to its end."""
    folds = {replica: GroupCutter(record, replica) for replica in record.groups}
    groups = {replica: fold.run() for replica, fold in folds.items()}
    unfinished = tuple(one for fold in folds.values() for one in fold.unfinished)
    return Timeline(*record.span_us, groups, unfinished)


@view
def _of_rank_0(record: RunRecord) -> dict[tuple[int, int], list[ev.Event]]:
    """Return what rank 0 of each group and attempt wrote, in order of time, without that it hung."""
    found: dict[tuple[int, int], list[ev.Event]] = defaultdict(list)
    for process in record.processes:
        if process.rank == 0:
            found[process.replica, process.attempt] += process.events
    for key, events in found.items():
        found[key] = sorted((e for e in events if not isinstance(e, ev.Hung)), key=lambda e: e.time)
    return found


class GroupCutter:
    """Cuts one group's time, attempt by attempt and event by event."""

    def __init__(self, record: RunRecord, replica: int) -> None:
        self._record, self._replica, self._attempts = record, replica, record.attempts.get(replica, [])
        self._strip = Strip(*record.span_us)
        self.unfinished: list[Unfinished] = []
        commits = [e for attempt in self._attempts for e in self._moments(attempt) if isinstance(e, ev.StepCommitted)]
        self._own_steps = {event.step for event in commits}
        parts = [_parts(event) for event in commits]
        if record.unit.steps > 1:  # who joins in the midst of a round computes less of it than it could
            paces = [_us(event.compute_seconds) / event.forward_passes for event in commits if event.forward_passes]
            self._most_passes = max((event.forward_passes for event in commits), default=0)
            self._usual_compute = round(median(paces) * self._most_passes) if paces else 0
        else:
            self._most_passes = 0
            self._usual_compute = round(median(part[0] for part in parts)) if parts else 0
        self._usual_exchange = round(median(part[1] for part in parts)) if parts else 0
        self._passes = max((event.forward_passes for event in commits[-1:]), default=0)
        self._step = 0  # that the group holds
        self._begun = False  # whether the attempt has committed or begun to heal
        self._heal: int | None = None  # when the one under way began
        self._pending: list[tuple[int, _Pending]] = []  # of the step under way

    def _moments(self, attempt: Attempt) -> list[ev.Event]:
        """Return what rank 0 wrote in an attempt, in order of time."""
        return _of_rank_0(self._record).get((attempt.replica, attempt.number), [])

    def run(self) -> tuple[Interval, ...]:
        strip, cause = self._strip, ""
        for index, attempt in enumerate(self._attempts):
            self._begun, self._heal, self._pending = False, None, []
            self._prepare(attempt, "restart" if index else "start", cause)
            if self._live(attempt):
                self._end(attempt)
            cause = attempt.cause or ("its end is not told" if attempt.exit_us is None else "ended")
            if index + 1 == len(self._attempts):
                self._rest(attempt)
        for fault in self._record.faults:
            if fault.replica == self._replica and fault.outcome == "frozen":
                resumed = fault.undone_us or self._next_word(fault.time_us)
                over = set(STATES) - _AWAY
                strip.paint(fault.time_us, resumed, "hung", over, f"stopped ({fault.name})")
        for start, end in self._record.outages_us:
            for left, right in strip.stretches("exchange_wait"):
                if left < end and right > start:
                    strip.paint(max(left, start), right, "quorum", {"exchange_wait"}, "the lighthouse is down")
        return strip.cut()

    def _prepare(self, attempt: Attempt, state: str, cause: str) -> None:
        """Fill the time until the process asks for its first quorum."""
        until = attempt.last_us if attempt.died_us is None else attempt.died_us
        for event in self._moments(attempt):
            if isinstance(event, ev.Joined | ev.StepCommitted | ev.HealStarted | ev.TrainingFinished):
                until = event.time_us
                if isinstance(event, ev.Joined):
                    until -= _us(event.quorum_seconds) + _us(event.rebuild_seconds)
                elif isinstance(event, ev.StepCommitted):
                    until -= sum(_parts(event))
                break
        self._strip.fill(until, state, cause)

    def _live(self, attempt: Attempt) -> bool:
        """Walk through rank 0's events; returns whether the attempt has still to be ended."""
        died, strip = attempt.died_us, self._strip
        for event in self._moments(attempt):
            time = event.time_us
            if died is not None and time > died and not isinstance(event, ev.TrainingFinished):
                continue
            match event:
                case ev.Joined() | ev.ExchangeFailed() | ev.Waiting():
                    self._pending.append((time, event))
                case ev.StepCommitted():
                    self._commit(time, event)
                case UsualSteps():
                    self._pass_usual(time, event)
                case ev.HealStarted():
                    self._begin_heal(time)
                case ev.HealFinished() if self._heal is not None:
                    self._end_heal(time, event, begun=self._heal)
                case ev.RolledBack() if self._heal is not None:
                    strip.fill(time, "heal", "went back: nobody holds the state")
                    self._heal = None
                case ev.Drained():
                    if not event.in_order:
                        self._break_off(time, "drained", event.void)
                    strip.fill(time, "overhead")
                    return False
                case ev.TrainingFinished():
                    strip.fill(time, "idle", "waits for the others to finish")
                    return False
        return True

    def _commit(self, time: int, event: ev.StepCommitted) -> None:
        """Fill the time of a step: what was before it, computing, the exchange, and the update."""
        strip, begun = self._strip, self._begun
        compute, exchange, update = _parts(event)
        gap = max(0, time - strip.cursor)
        breaks = [
            at - (_us(each.seconds) if isinstance(each, ev.ExchangeFailed) else 0)
            for at, each in self._pending
            if not isinstance(each, ev.Joined)
        ]
        if not begun:  # the first step's exchange counts from the first meeting on
            exchange = min(exchange, max(self._usual_exchange, time - update - min(breaks, default=time)))
        update = min(update, gap)
        exchange = min(exchange, gap - update)
        # Where an exchange broke it is known when it began; else it is taken to end right before the update.
        head = gap - exchange - update
        if breaks:
            head = min(max(0, min(breaks) - strip.cursor), gap - exchange)
        tail = gap - head - exchange
        done = min(compute + update, head + tail)
        applying = min(tail, max(update, done - head))
        computing = min(head, done - applying)
        void = event.lineage in self._record.void
        counts = not void and (event.contributed or _trained(event))
        why = "" if counts else "the step is void" if void else "its gradient did not count"
        before = "overhead"
        if self._heal is not None or not begun:
            before = "wait_for_groups" if not begun else "heal"  # the heal's end is not in the history
        strip.fill(strip.cursor + head - computing, before, "" if begun else "first meeting")
        strip.fill(strip.cursor + computing, "productive" if counts else "wasted", why)
        strip.fill(strip.cursor + exchange, "exchange_wait")
        self._paint_exchange(strip.cursor)
        strip.fill(strip.cursor + applying, "wasted" if void else "productive", "the step is void" if void else "")
        strip.fill(time, "overhead")
        self._begun, self._heal, self._step = True, None, event.step
        self._passes = event.forward_passes

    def _pass_usual(self, time: int, event: UsualSteps) -> None:
        """Fill the time of usual steps in a row: their sums, in three parts."""
        strip = self._strip
        strip.fill(strip.cursor + event.productive_us, "productive", USUAL, is_sum=True)
        strip.fill(strip.cursor + event.exchange_us, "exchange_wait", USUAL, is_sum=True)
        strip.fill(time, "overhead", USUAL, is_sum=True)
        self._step = event.step

    def _paint_exchange(self, until: int) -> None:
        """Say of what the wait in the exchange until `until` consisted."""
        paint, waiting = self._strip.paint, {"exchange_wait", "unknown"}
        for time, event in self._pending:
            if isinstance(event, ev.ExchangeFailed):
                start = self._record.last_fault_us(time - _us(event.seconds), time)
                paint(start, time, "detection", waiting, event.error[:80])
        for time, event in self._pending:
            if isinstance(event, ev.Joined):
                built = time - _us(event.rebuild_seconds)
                over = {*waiting, "detection"}
                paint(built - _us(event.quorum_seconds), built, "quorum", over)
                paint(built, time, "rebuild", {*over, "quorum", "wait_for_groups"}, f"groups {event.participants}")
        for time, event in self._pending:
            if isinstance(event, ev.Waiting):
                paint(time, until, "wait_for_groups", {*waiting, "quorum"}, event.reason)
        self._pending = []

    def _begin_heal(self, time: int) -> None:
        if self._heal is not None:  # the attempt failed: the next donor is asked
            self._strip.fill(time, "heal", "looks for another donor")
        elif self._begun:
            self._break_off(time, "its state was not the job's")
        else:
            self._strip.fill(time, "exchange_wait", "joins the others' round")
            self._paint_exchange(time)
        self._begun, self._heal = True, time

    def _end_heal(self, time: int, event: ev.HealFinished, begun: int) -> None:
        """Fill the time of a heal: the fetch, and the replay."""
        arrived = begun + round(event.fetch_seconds * 1e6)
        self._strip.fill(min(arrived, time), "heal", f"from group {event.donor}")
        self._strip.fill(time, "replay", f"{event.replayed} updates")
        self._heal, self._step = None, event.step
        self._pending = []

    def _break_off(self, until: int, reason: str, void: Sequence[ev.Batches] | None = None) -> None:
        """Fill the time of a step that this group does not commit, or of a heal that does not end.

        Args:
            void: what it had read for the step, where it told.
        """
        strip, commits = self._strip, self._record.commits
        until = min(until, strip.end)
        if void is not None and self._heal is None:
            self.unfinished.append(Unfinished(sum(each.num_batches for each in void), False, reason, told=True))
            strip.fill(until, "wasted", reason)
            return
        if self._heal is not None:
            strip.fill(until, "heal", "in vain")
        elif not self._begun:
            met = bool(commits) and strip.cursor >= commits[0].time_us
            strip.fill(until, "exchange_wait" if met else "wait_for_groups", "" if met else "first meeting")
        elif until > strip.cursor:
            compute = min(self._usual_compute, until - strip.cursor)
            share = compute / self._usual_compute if self._usual_compute else 1.0
            # The gradient in that step must be this one, not one that the group computed anew after its return.
            others = self._step + 1 not in self._own_steps
            kept = others and self._replica in self._record.makers.get(self._step + 1, ())
            passes = math.ceil(share * max(self._passes, self._most_passes))
            self.unfinished.append(Unfinished(passes, kept, reason))
            strip.fill(strip.cursor + compute, "productive" if kept else "wasted", "" if kept else reason)
            strip.fill(until, "exchange_wait")
        self._paint_exchange(until)

    def _end(self, attempt: Attempt) -> None:
        """Fill the time from the attempt's last step or heal to its end, as far as that is known."""
        until = attempt.died_us
        if until is None:  # its end is not in the history
            self._strip.fill(attempt.last_us, "heal" if self._heal is not None else "unknown")
            self._paint_exchange(self._strip.cursor)
            return
        hung = self._hung_since(attempt, self._strip.cursor)
        self._break_off(until if hung is None else hung, attempt.cause or "stopped")
        self._strip.fill(until, "hung", "deadlocked")

    def _hung_since(self, attempt: Attempt, cursor: int) -> int | None:
        """Return since when an attempt that has not gone on after `cursor` hung; None if it did not."""
        for fault in self._record.faults:
            hit = fault.replica == self._replica and fault.outcome == "hung"
            if hit and cursor <= fault.time_us <= (attempt.hung_us or attempt.exit_us or 0):
                return fault.time_us
        if attempt.hung_us is None or attempt.hung_us < cursor:
            return None
        return cursor if self._record.hang_us is None else max(cursor, attempt.hung_us - self._record.hang_us)

    def _rest(self, attempt: Attempt) -> None:
        """Fill the time behind the last attempt."""
        strip, stopping = self._strip, self._record.fold.stopping
        ends = (e for e in self._moments(attempt) if isinstance(e, ev.TrainingFinished | ev.Drained))
        ended = next(ends, None)
        if attempt.gave_up_us is not None:
            strip.fill(attempt.gave_up_us, "restart", attempt.cause)
            strip.fill(strip.end, "idle", "gave up")
        elif ended is not None or (attempt.exit_us is not None and not attempt.failed):
            how = "stopped" if ended is None else "drained" if isinstance(ended, ev.Drained) else "finished"
            strip.fill(strip.end, "idle", how)
        elif attempt.failed:  # a restart that was not seen to begin
            until = attempt.last_us if stopping is None else stopping.time_us
            strip.fill(until, "restart", attempt.cause)
            if stopping is not None:
                strip.fill(strip.end, "idle", "stopped")

    def _next_word(self, since: int) -> int:
        """Return the time of rank 0's first event after `since`; the job's end if there is none."""
        times = sorted(event.time_us for attempt in self._attempts for event in self._moments(attempt))
        index = bisect_left(times, since + 1)
        return times[index] if index < len(times) else self._record.span_us[1]


def _us(seconds: float) -> int:
    """Return seconds in microseconds; 0 where they are negative."""
    return max(0, round(seconds * 1e6))


def _parts(commit: ev.StepCommitted) -> tuple[int, int, int]:
    """Return the microseconds of a step that went into computing, the exchange and the update."""
    return _us(commit.compute_seconds), _us(commit.exchange_seconds), _us(commit.apply_seconds)


def _trained(commit: ev.StepCommitted) -> bool:
    """Say whether the group's own batch counts as trained: one without labels has no weight, and is."""
    return commit.data is not None and commit.data.slot in commit.batches
