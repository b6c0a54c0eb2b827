# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Cut the time of one group into intervals; see `titan_ft.history.timeline` for the states."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from titan_ft.history.events import Event
from titan_ft.history.failures import contributed, integer, number
from titan_ft.history.intervals import STATES, Interval, Strip
from titan_ft.history.job_facts import JobFacts
from titan_ft.history.lives import DEADLOCKS, STOPS, Life, Moment

_AWAY = {"start", "restart", "idle", "unknown"}


@dataclass(frozen=True)
class Unfinished:
    """Forward passes of a step that their group did not commit itself."""

    replica: int
    time_us: int
    forward_passes: int
    """At most: those begun in the time that there was, by the pace of the group's other steps."""
    kept: bool
    """Whether the others committed the step with its gradient."""
    reason: str


class GroupFold:
    """Cuts one group's time, attempt by attempt and event by event."""

    def __init__(self, job: JobFacts, replica: int) -> None:
        self._job, self._replica, self._lives = job, replica, job.lives.get(replica, [])
        self._strip = Strip(job.begin, job.end)
        self.unfinished: list[Unfinished] = []
        commits = [e for life in self._lives for _, e in life.moments if e["event"] == "step_committed"]
        self._own_steps = {integer(event, "step") for event in commits}
        parts = [_parts(event) for event in commits]
        self._usual_compute = round(median(part[0] for part in parts)) if parts else 0
        self._usual_exchange = round(median(part[1] for part in parts)) if parts else 0
        self._passes = max((integer(event, "forward_passes") for event in commits[-1:]), default=0)
        self._step = 0  # that the group holds
        self._begun = False  # whether the attempt has committed or begun to heal
        self._heal: Moment | None = None  # the begin of the one under way
        self._pending: list[Moment] = []  # of the step under way

    def run(self) -> tuple[Interval, ...]:
        strip, cause = self._strip, ""
        for index, life in enumerate(self._lives):
            self._begun, self._heal, self._pending = False, None, []
            self._prepare(life, "restart" if index else "start", cause)
            if self._live(life):
                self._end(life)
            cause = life.cause or ("its end is not told" if life.exit_us is None else "ended")
            if index + 1 == len(self._lives):
                self._rest(life)
        for fault in self._job.faults:
            if fault.replica == self._replica and fault.name in STOPS:
                resumed = fault.undone_us or self._next_word(fault.time_us)
                over = set(STATES) - _AWAY
                strip.paint(fault.time_us, resumed, "hung", over, f"stopped ({fault.name})")
        for start, end in self._job.outages:
            for left, right in strip.stretches("exchange_wait"):
                if left < end and right > start:
                    strip.paint(max(left, start), right, "quorum", {"exchange_wait"}, "the lighthouse is down")
        return strip.cut()

    def _prepare(self, life: Life, state: str, cause: str) -> None:
        """Fill the time until the process asks for its first quorum."""
        words = ("joined", "step_committed", "heal_started", "training_finished")
        ready = next((moment for moment in life.moments if moment[1]["event"] in words), None)
        if ready is None:
            until = life.last_us if life.died_us is None else life.died_us
        else:
            until = ready[0]
            if ready[1]["event"] == "joined":
                until -= _us(ready[1], "quorum_seconds") + _us(ready[1], "rebuild_seconds")
            elif ready[1]["event"] == "step_committed":
                until -= sum(_parts(ready[1]))
        self._strip.fill(until, state, cause)

    def _live(self, life: Life) -> bool:
        """Walk through rank 0's events; returns whether the attempt has still to be ended."""
        died, strip = life.died_us, self._strip
        for time, event in life.moments:
            name = event["event"]
            if died is not None and time > died and name != "training_finished":
                continue
            if name in ("joined", "exchange_failed", "waiting"):
                self._pending.append((time, event))
            elif name == "step_committed":
                self._commit(time, event)
            elif name == "heal_started":
                self._begin_heal(time, event)
            elif name == "heal_finished" and self._heal is not None:
                self._end_heal(time, event)
            elif name == "rolled_back" and self._heal is not None:
                strip.fill(time, "heal", "went back: nobody holds the state")
                self._heal = None
            elif name == "drained":
                if event.get("in_order") is False:
                    self._break_off(time, "drained")
                strip.fill(time, "overhead")
                return False
            elif name == "training_finished":
                strip.fill(time, "idle", "waits for the others to finish")
                return False
        return True

    def _commit(self, time: int, event: Event) -> None:
        """Fill the time of a step: what was before it, computing, the exchange, and the update."""
        strip, begun = self._strip, self._begun
        compute, exchange, update = _parts(event)
        gap = max(0, time - strip.cursor)
        breaks = [at - _us(e, "seconds") for at, e in self._pending if e["event"] in ("exchange_failed", "waiting")]
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
        void = event.get("lineage") in self._job.void
        counts = not void and (contributed(event) or _trained(event))
        why = "" if counts else "the step is void" if void else "its gradient did not count"
        before = "overhead" if number(event, "seconds") is not None else "unknown"
        if self._heal is not None or not begun:
            before = "wait_for_groups" if not begun else "heal"  # the heal's end is not told
        strip.fill(strip.cursor + head - computing, before, "" if begun else "first meeting")
        strip.fill(strip.cursor + computing, "productive" if counts else "wasted", why)
        strip.fill(strip.cursor + exchange, "exchange_wait")
        self._paint_exchange(strip.cursor)
        strip.fill(strip.cursor + applying, "wasted" if void else "productive", "the step is void" if void else "")
        strip.fill(time, "overhead")
        self._begun, self._heal, self._step = True, None, integer(event, "step")
        self._passes = integer(event, "forward_passes", self._passes)

    def _paint_exchange(self, until: int) -> None:
        """Say of what the wait in the exchange until `until` consisted."""
        paint, waiting, failed = self._strip.paint, {"exchange_wait", "unknown"}, None
        for time, event in self._pending:
            if event["event"] == "exchange_failed":
                start = self._job.last_fault(time - _us(event, "seconds"), time)
                paint(start, time, "detection", waiting, str(event.get("error", ""))[:80])
        for time, event in self._pending:
            if event["event"] == "exchange_failed":
                failed = time
            elif event["event"] == "joined":
                built = time - _us(event, "rebuild_seconds")
                asked = built - _us(event, "quorum_seconds")
                if number(event, "quorum_seconds") is None:  # an old history
                    asked = built if failed is None else failed
                slots = event.get("participants")
                paint(asked, built, "quorum", {*waiting, "detection"})
                paint(built, time, "rebuild", {*waiting, "detection", "quorum", "wait_for_groups"}, f"groups {slots}")
        for time, event in self._pending:
            if event["event"] == "waiting":
                paint(time, until, "wait_for_groups", {*waiting, "quorum"}, str(event.get("reason", "")))
        self._pending = []

    def _begin_heal(self, time: int, event: Event) -> None:
        if self._heal is not None:  # the next donor's turn
            self._strip.fill(time, "heal", "looks for another donor")
        elif self._begun:
            self._break_off(time, "its state was not the job's")
        else:
            self._strip.fill(time, "exchange_wait", "joins the others' round")
            self._paint_exchange(time)
        self._begun, self._heal = True, (time, event)

    def _end_heal(self, time: int, event: Event) -> None:
        """Fill the time of a heal: the fetch ends when the donors have served the state."""
        assert self._heal is not None
        start, step = self._heal[0], integer(event, "from_step", -1)
        seconds = number(event, "fetch_seconds")
        served = [at for at, which in self._job.served[self._replica] if which == step and start <= at <= time]
        arrived = max(served, default=time) if seconds is None else start + round(seconds * 1e6)
        self._strip.fill(min(arrived, time), "heal", f"from group {event.get('donor')}")
        self._strip.fill(time, "replay", f"{integer(event, 'replayed')} updates")
        self._heal, self._step = None, integer(event, "step", self._step)
        self._pending = []

    def _break_off(self, until: int, reason: str) -> None:
        """Fill the time of a step that this group does not commit, or of a heal that does not end."""
        strip = self._strip
        until = min(until, strip.end)
        if self._heal is not None:
            strip.fill(until, "heal", "in vain")
        elif not self._begun:
            met = strip.cursor >= self._job.first_commit
            strip.fill(until, "exchange_wait" if met else "wait_for_groups", "" if met else "first meeting")
        elif until > strip.cursor:
            compute = min(self._usual_compute, until - strip.cursor)
            share = compute / self._usual_compute if self._usual_compute else 1.0
            # With its gradient from now, not with one that it computed when it was back.
            others = self._step + 1 not in self._own_steps
            kept = others and self._replica in self._job.makers.get(self._step + 1, ())
            passes = math.ceil(share * self._passes)
            self.unfinished.append(Unfinished(self._replica, until, passes, kept, reason))
            strip.fill(strip.cursor + compute, "productive" if kept else "wasted", "" if kept else reason)
            strip.fill(until, "exchange_wait")
        self._paint_exchange(until)

    def _end(self, life: Life) -> None:
        """Fill the time from the attempt's last step or heal to its end, as far as that is known."""
        until = life.died_us
        if until is None:  # nothing tells of its end
            self._strip.fill(life.last_us, "heal" if self._heal is not None else "unknown")
            self._paint_exchange(self._strip.cursor)
            return
        hung = self._hung_since(life, self._strip.cursor)
        self._break_off(until if hung is None else hung, life.cause or "stopped")
        self._strip.fill(until, "hung", "deadlocked")

    def _hung_since(self, life: Life, cursor: int) -> int | None:
        """Return since when a life that has not gone on after `cursor` hung; None if it did not."""
        for fault in self._job.faults:
            hit = fault.replica == self._replica and fault.name in DEADLOCKS
            if hit and cursor <= fault.time_us <= (life.hung_us or life.exit_us or 0):
                return fault.time_us
        if life.hung_us is None or life.hung_us < cursor:
            return None
        return cursor if self._job.hang_us is None else max(cursor, life.hung_us - self._job.hang_us)

    def _rest(self, life: Life) -> None:
        """Fill the time behind the last attempt."""
        strip, stopping = self._strip, self._job.stopping
        ended = next((e["event"] for _, e in life.moments if e["event"] in ("training_finished", "drained")), None)
        if life.gave_up_us is not None:
            strip.fill(life.gave_up_us, "restart", life.cause)
            strip.fill(strip.end, "idle", "gave up")
        elif ended is not None or (life.exit_us is not None and not life.failed):
            words = {"training_finished": "finished", "drained": "drained"}
            strip.fill(strip.end, "idle", words.get(ended or "", "stopped"))
        elif life.failed:  # a restart that was not seen to begin
            strip.fill(life.last_us if stopping is None else stopping, "restart", life.cause)
            if stopping is not None:
                strip.fill(strip.end, "idle", "stopped")

    def _next_word(self, since: int) -> int:
        """Return the time of rank 0's first event after `since`; the job's end if there is none."""
        times = sorted(time for life in self._lives for time, _ in life.moments)
        index = bisect_left(times, since + 1)
        return times[index] if index < len(times) else self._job.end


def _us(event: Mapping[str, object], name: str) -> int:
    """Return a field of seconds in microseconds; 0 where it is missing or negative."""
    return max(0, round((number(event, name) or 0.0) * 1e6))


def _parts(commit: Event) -> tuple[int, int, int]:
    """Return the microseconds of a step that went into computing, the exchange and the update.

    An old history does not tell the last from the first.
    """
    exchange, update = _us(commit, "exchange_seconds"), _us(commit, "apply_seconds")
    if number(commit, "compute_seconds") is not None:
        return _us(commit, "compute_seconds"), exchange, update
    return max(0, _us(commit, "seconds") - exchange - update), exchange, update


def _trained(commit: Event) -> bool:
    """Say whether the group's own batch counts as trained: one without labels has no weight, and is."""
    batches, data = commit.get("batches"), commit.get("data")
    if not isinstance(batches, Mapping) or not isinstance(data, Mapping):
        return False
    return str(data.get("slot")) in {str(slot) for slot in batches}
