# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the usual steps of a long run, and represent them by far fewer events.

A run of 100,000 steps and 30 groups has three million commits. Nearly all of them report the same:
every group took part, no group waited for an absent one, the figures agree. `Reducer` takes the
events of a run in order of time and splits them in two:

- *Usual* steps. The first commit of each is kept, with all values that the groups agree on. For
  each process, one `UsualSteps` event replaces its commits of consecutive usual steps.
- All other events are kept unchanged.

A step is usual only if no checker could do more than count it (`_is_usual`), and if the `MARGIN`
steps before and after it are usual as well, without any other event of any process. So a failure, a
fault or a save keeps its own events and those around it. A digest keeps its events only if groups
differ.

A *row* has the commits of one step by all processes. The reducer holds the last `MARGIN` + 2 rows:

1. The newest row fills until a commit of the next step comes.
2. Then the row is compared with the row before it. If it is not usual, or if any other event comes,
   all rows that are held keep their events (`_keep_rows`).
3. Once `MARGIN` usual rows have followed the oldest row, the reducer decides about the oldest
   (`_settle_oldest`).

If training goes back over usual steps, their single commits are needed after all. Then the reducer
raises `WentBackError`, and the caller starts over. `titan_ft.history.record.kept` calls this
module.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from titan_ft.history.fold.faults import seconds_of
from titan_ft.history.fold.group import WorkerKey
from titan_ft.run import events as ev

MARGIN = 8
"""Steps before and after an unusual one that keep all of their events."""
EFFECT_SECONDS = 60.0
"""For this long after an injected fault no step is usual, because its effect may show late."""
STEADY_SECONDS = 0.1
"""If the wall clock of a process moved this much against its monotonic clock, it was set."""
LOSS_TOLERANCE = 1e-6
"""Relative difference between a loss and the mean of the participants' own losses; the same as
`checks.average` allows.
"""
HARMLESS_WAITS = frozenset({"computing", "loading", "between_steps"})
"""Waits for groups that take part. Waits for a joiner or a lost group are judged one by one."""


class WentBackError(Exception):
    """Training went back to a step that was taken for usual, or one of its events came late.

    Attributes:
        step: no step from this one to the furthest is usual.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"steps from {step} on were not usual")
        self.step = step


class UsualSteps(ev.RankEvent, kw_only=True):
    """Consecutive usual steps of a process. Replaces the commits of these steps in a `Reduction`.

    `time` and `mono` are those of the last commit.
    """

    first_step: int
    step: int  # the last one
    parent: str  # lineage before the first one
    lineage: str  # after the last one
    forward_passes: int
    wire_bytes: int | None  # sum; null if one of the commits does not know
    memory_bytes: int | None  # at most
    slot: int  # whose batches it read
    next_batch: int  # number of the batch after those that it read
    num_digests: int  # that it took, each equal to that of its rank in all other groups
    productive_us: int  # of the time since the commit before the first one: computing and updating
    exchange_us: int  # of the same: in the exchanges

    @property
    def num_steps(self) -> int:
        return self.step - self.first_step + 1


@dataclass
class Reduction:
    """The events of a run, reduced."""

    events: list[ev.Event] = field(default_factory=list)
    """The unchanged events and the `UsualSteps`, nearly in order of time."""
    firsts: list[ev.StepCommitted] = field(default_factory=list)
    """The first commit of each usual step by a rank 0."""

    @property
    def num_omitted(self) -> int:
        """Commits of usual steps, all processes together."""
        return sum(event.num_steps for event in self.events if isinstance(event, UsualSteps))


class Memory(msgspec.Struct):
    """A reducer's knowledge of the events that an earlier reducer of the same run has taken."""

    furthest: int = 0  # the highest step that was committed
    last_usual: int = 0  # the last step that was taken for usual
    unusual: list[tuple[int, int]] = []  # first and last of steps in a row none of which is usual
    unusual_until: float = 0.0  # Unix seconds until which an injected fault may have effects
    # for each injected fault, the highest step that was committed before it
    fault_steps: dict[str, int] = {}
    # seconds by which the wall clock of each process was ahead of its monotonic clock at first
    offsets: dict[WorkerKey, float] = {}


class Reducer:
    """Takes the events of a run in order of time; see this module.

    Args:
        memory: memory of the earlier reducer of the same run; it is changed.
        until: Unix seconds after which no step is usual: other files may still lack earlier events.
    """

    def __init__(self, memory: Memory | None = None, until: float = math.inf) -> None:
        self.found = Reduction()
        self.memory = memory or Memory()
        self._until = until
        self._rows: deque[list[ev.StepCommitted]] = deque()
        """The rows of the last steps, oldest first; the newest row may not be complete."""
        self._row_before: list[ev.StepCommitted] = []
        """The row before the oldest in `_rows`; empty if that was no whole row."""
        self._num_quiet_rows = 0
        """Consecutive whole rows without any other event, up to the newest whole one."""
        self._open: dict[WorkerKey, UsualSteps] = {}
        """For each process, the event that further usual steps extend."""

    def take(self, event: ev.Event) -> None:
        """Take the next event.

        Raises:
            WentBackError: a step taken for usual comes again; start over, with this step in
                `Memory.unusual`.
        """
        if not isinstance(event, ev.StepCommitted):
            self._keep_rows()
            self._take_other(event)
            return
        self.memory.furthest = max(self.memory.furthest, event.step)
        if event.step <= self.memory.last_usual:
            raise WentBackError(event.step)
        if self._rows and self._rows[-1][0].step == event.step:
            self._rows[-1].append(event)
            return
        # The event is the first of another step: the newest row is complete.
        if self._rows and not self._accept_newest():
            self._keep_rows()
        self._rows.append([event])
        # Besides the oldest row and the new one, `MARGIN` rows must have gone as usual.
        while len(self._rows) > MARGIN + 1:
            self._settle_oldest()

    def finish(self) -> Reduction:
        """Return the result. Steps that may still turn out to be usual keep their events."""
        self._keep_rows()
        return self.found

    def _take_other(self, event: ev.Event) -> None:
        """Keep an event that is no commit, and note how long a fault makes steps unusual."""
        memory = self.memory
        if isinstance(event, ev.FaultInjected):
            effect_end = event.time + max(EFFECT_SECONDS, seconds_of(event))
            memory.unusual_until = max(memory.unusual_until, effect_end)
            memory.fault_steps[_name_shot(event)] = memory.furthest
        elif isinstance(event, ev.FaultUndone):
            # The event of its beginning may be missing.
            before = memory.fault_steps.get(_name_shot(event), 0)
            if memory.last_usual > before:
                # The fault lasted for longer than its parameters said, and the steps meanwhile were
                # taken for usual.
                raise WentBackError(before + 1)
        self.found.events.append(event)

    def _accept_newest(self) -> bool:
        """Return True, and count the newest row, if it follows the row before it as usual."""
        newest = self._rows[-1]
        before = self._row_before
        if len(self._rows) > 1:
            before = self._rows[-2]
        if before and not self._is_usual(before, newest):
            return False
        self._num_quiet_rows += 1
        return True

    def _keep_rows(self) -> None:
        """Keep all events of the rows that are held, and begin anew."""
        self._end_usual_steps()
        for row in self._rows:
            self.found.events += row
        self._rows.clear()
        self._row_before = []
        self._num_quiet_rows = 0

    def _settle_oldest(self) -> None:
        """Decide about the oldest row: all that may make it unusual is known now."""
        row = self._rows.popleft()
        if self._can_replace(row):
            self._replace(row)
        else:
            self._end_usual_steps()
            self.found.events += row
        self._row_before = row

    def _can_replace(self, row: list[ev.StepCommitted]) -> bool:
        """Return True if the oldest row, and the `MARGIN` rows on both sides of it, are usual."""
        if not self._row_before:
            return False
        if self._num_quiet_rows <= 2 * MARGIN:
            return False
        for first, last in self.memory.unusual:
            if first <= row[0].step <= last:
                return False
        return _digests_agree(row)

    def _replace(self, row: list[ev.StepCommitted]) -> None:
        """Keep the first commit of a usual step, and add the others to each process's event."""
        self.memory.last_usual = row[0].step
        self.found.firsts.append(_first_of_rank_0(row))
        before = {_worker_of(commit): commit for commit in self._row_before}
        for commit in row:
            worker = _worker_of(commit)
            if worker not in self._open:
                self._open[worker] = _begin_usual_steps(commit)
            _extend(self._open[worker], before[worker], commit)

    def _end_usual_steps(self) -> None:
        self.found.events += self._open.values()
        self._open = {}

    def _is_usual(self, before: list[ev.StepCommitted], row: list[ev.StepCommitted]) -> bool:
        """Return True if a step was usual, by the commits of all processes and those of the step
        before it.
        """
        first = row[0]
        previous = before[0]
        if len(row) != len(before):
            return False
        if first.step != previous.step + 1 or first.parent != previous.lineage:
            return False
        # A fault may have effects, or files that are read later may still lack events.
        if first.time <= self.memory.unusual_until or first.time > self._until:
            return False
        if first.exchanges != 1 or first.inner_steps not in (None, 1):
            return False
        workers = {_worker_of(commit) for commit in row}
        if len(workers) != len(row):
            return False
        if workers != {_worker_of(commit) for commit in before}:
            return False
        groups = set()
        for commit in row:
            if not _agrees(commit, first):
                return False
            if not self._is_sound(commit):
                return False
            if commit.rank == 0:
                groups.add(commit.replica)
        if groups != set(first.participants):
            return False
        return _follows(previous.batches, first.batches) and _sums_up(row)

    def _is_sound(self, commit: ev.StepCommitted) -> bool:
        """Return whether a commit by itself, without the other commits, is as usual."""
        data = commit.data
        if not commit.contributed or commit.waits is None:
            return False
        # The group trained the batches of its own slot only, as the step counts them.
        if data is None or commit.extra_data or data.slot != commit.replica:
            return False
        if commit.batches.get(data.slot) != (data.first_batch, data.num_batches):
            return False
        if data.num_batches != commit.forward_passes:
            return False
        # The wall clock was not set.
        offset = commit.time - commit.mono
        first_offset = self.memory.offsets.setdefault(_worker_of(commit), offset)
        if abs(offset - first_offset) >= STEADY_SECONDS:
            return False
        for wait in commit.waits:
            if wait.why not in HARMLESS_WAITS:
                return False
        return True


def _name_shot(event: ev.FaultInjected | ev.FaultUndone) -> str:
    return f"{event.fault} {event.shot}"


def _worker_of(commit: ev.StepCommitted) -> WorkerKey:
    return commit.replica, commit.rank, commit.attempt, commit.pid


def _first_of_rank_0(row: list[ev.StepCommitted]) -> ev.StepCommitted:
    for commit in row:
        if commit.rank == 0:
            return commit
    raise AssertionError("every group of a usual step has a commit of its rank 0")


def _begin_usual_steps(commit: ev.StepCommitted) -> UsualSteps:
    """Return an event of no usual step yet, which begins with the step of `commit`."""
    assert commit.data is not None, "a usual step has data"
    return UsualSteps(
        replica=commit.replica,
        rank=commit.rank,
        attempt=commit.attempt,
        pid=commit.pid,
        first_step=commit.step,
        step=commit.step,
        parent=commit.parent,
        lineage=commit.lineage,
        forward_passes=0,
        wire_bytes=0,
        memory_bytes=None,
        slot=commit.data.slot,
        next_batch=0,
        num_digests=0,
        productive_us=0,
        exchange_us=0,
    )


def _extend(usual: UsualSteps, before: ev.StepCommitted, commit: ev.StepCommitted) -> None:
    """Add a commit of a usual step to the event of its process.

    Args:
        before: the commit of the same process for the step before.
    """
    assert commit.data is not None, "a usual step has data"
    usual.time = commit.time
    usual.mono = commit.mono
    usual.step = commit.step
    usual.lineage = commit.lineage
    usual.forward_passes += commit.forward_passes
    if usual.wire_bytes is None or commit.wire_bytes is None:
        usual.wire_bytes = None
    else:
        usual.wire_bytes += commit.wire_bytes
    if commit.memory_bytes is not None:
        usual.memory_bytes = max(usual.memory_bytes or 0, commit.memory_bytes)
    usual.next_batch = commit.data.first_batch + commit.data.num_batches
    usual.num_digests += bool(commit.digest)
    productive_us, exchange_us = _split_time(before, commit)
    usual.productive_us += productive_us
    usual.exchange_us += exchange_us


def _agrees(commit: ev.StepCommitted, first: ev.StepCommitted) -> bool:
    """Return whether two processes report the same values for a step."""
    return (
        commit.lineage == first.lineage
        and commit.parent == first.parent
        and commit.exchanges == 1
        and commit.tokens == first.tokens
        and commit.loss == first.loss
        and commit.grad_norm == first.grad_norm
        and commit.lr == first.lr
        and commit.inner_step == first.inner_step
        and commit.inner_steps == first.inner_steps
        and commit.participants == first.participants
        and commit.batches == first.batches
    )


def _digests_agree(row: list[ev.StepCommitted]) -> bool:
    """Return whether no process took a digest, or several groups have the same one of each rank."""
    if not any(commit.digest for commit in row):
        return True
    digests_of_rank: dict[int, list[str | None]] = {}
    for commit in row:
        digests_of_rank.setdefault(commit.rank, []).append(commit.digest)
    for digests in digests_of_rank.values():
        if not digests[0] or len(digests) == 1:
            return False
        if digests.count(digests[0]) != len(digests):
            return False
    return True


def _follows(before: dict[int, tuple[int, int]], batches: dict[int, tuple[int, int]]) -> bool:
    """Return whether each slot goes on with the batch after those of the step before."""
    if before.keys() != batches.keys():
        return False
    for slot, (first, _) in batches.items():
        first_before, num_before = before[slot]
        if first != first_before + num_before:
            return False
    return True


def _sums_up(row: list[ev.StepCommitted]) -> bool:
    """Return whether tokens and loss of a step are those of its participants."""
    tokens: dict[int, int] = {}
    losses: dict[int, float] = {}
    loss = row[0].loss
    total = row[0].tokens
    for commit in row:
        if commit.loss is None or commit.own_loss is None or commit.own_tokens <= 0:
            return False
        tokens.setdefault(commit.replica, commit.own_tokens)
        losses.setdefault(commit.replica, commit.own_loss)
    if loss is None or sum(tokens.values()) != total:
        return False
    weighted = sum(loss_of_group * tokens[group] for group, loss_of_group in losses.items())
    mean = weighted / total
    return math.isclose(loss, mean, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE)


def _split_time(before: ev.StepCommitted, commit: ev.StepCommitted) -> tuple[int, int]:
    """Return the productive and the exchange microseconds between two consecutive commits of a
    process.

    The same arithmetic as `build_timeline`'s for a step without a broken exchange.
    """
    gap = max(0, round(commit.time * 1e6) - round(before.time * 1e6))
    compute = max(0, round(commit.compute_seconds * 1e6))
    update = min(max(0, round(commit.apply_seconds * 1e6)), gap)
    exchange = min(max(0, round(commit.exchange_seconds * 1e6)), gap - update)
    return min(compute + update, gap - exchange), exchange
