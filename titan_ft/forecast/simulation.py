# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a job under failures, event by event, and account for each second of each group.

A step is counted as `titan_ft.history.timing.goodput` counts it: its usual time, for each group
that contributed. A simulated run, written as events, has the same effective training time in a report.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.schedule import GroupView, Injection, Refusal, Shot, View, aim, shots
from titan_ft.faults.fault import Need
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.failures import (
    USUAL_LUCK,
    Failure,
    Luck,
    as_fault,
    draw_failures,
    groups_hit,
)
from titan_ft.forecast.scenario import Kind, Maintenance, to_length

PARTS = ("steps", "stall", "slower", "exchange", "checkpoints", "lost", "waiting", "away", "nodes")
"""Where the time of the groups goes. "steps" is the effective training time. "slower" is the time
that stragglers, groups away and groups that return add to steps. "lost" was computed in vain.
"waiting" groups are fewer than min_replica_size. "nodes" is the wait for nodes."""
POLL_SECONDS = 0.1
"""So often a chaos runner tries again to inject a fault that was refused."""
MAX_SAVES = 1000
"""Checkpoints to which wrong numbers that are found late may send a job back."""
Events = Generator[simpy.Event, Any, None]
Commit = Callable[[float, frozenset[int]], None]
"""Called with the time of each step and the groups in it."""


@dataclass
class Account:
    """Where the time of a simulated run went, in seconds of a group; and its counts."""

    seconds: float
    groups: int
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    """Committed steps (rounds) that are in the job's state at the end."""
    votes: int = 0
    """Exchanges that were attempted for steps."""
    contributions: float = 0.0
    failures: int = 0
    """Those that hit a group, or the job."""
    skipped: int = 0
    """Faults of a chaos plan that could not be injected in time."""
    restarts: int = 0
    """How often no group was left."""

    @property
    def effective(self) -> float:
        """Return the effective training time."""
        return self.parts["steps"] / (self.seconds * self.groups)

    def shares(self) -> dict[str, float]:
        total = self.seconds * self.groups
        return {name: seconds / total for name, seconds in self.parts.items()}


@dataclass
class _Group:
    number: int
    state: str = "training"
    """A part of the account; the time in training is divided at the end."""
    since: float = 0.0
    joined: float = 0.0
    stops: int = 0
    """Voids what was under way before the last one."""
    lacks: int = 0
    """Nodes."""
    luck: Luck | None = None


def simulate(
    candidate: Candidate,
    seed: int,
    seconds: float | None = None,
    commit: Commit | None = None,
) -> Account:
    """Return the account of one run.

    Args:
        seed: decides all that is random.
        seconds: how long the run is; when left out, the scenario's days.
        commit: called for every step. Without it, the steps before the next event are made at once,
            which changes nothing.
    """
    return _Simulation(candidate, seed, seconds or candidate.scenario.seconds, commit).run()


class _Simulation:
    def __init__(
        self, candidate: Candidate, seed: int, seconds: float, commit: Commit | None
    ) -> None:
        self.candidate, self.scenario, self._commit = candidate, candidate.scenario, commit
        self.account = Account(seconds, candidate.groups)
        self.env = simpy.Environment()
        self.groups = [_Group(number) for number in range(candidate.groups)]
        # A dict keeps its order in every process, unlike a set.
        self._up = dict.fromkeys(range(candidate.groups), True)
        self._ready: set[int] = set()
        """Groups that wait for the next step to begin."""
        self._training = 0.0
        """Group-seconds in training."""
        self._free = candidate.spares or 0
        self._waiting: deque[_Group] = deque()
        self._slow: dict[int, float] = {}
        """Factors of the groups that have a straggler."""
        self._held = 0.0
        """Seconds in which the clock of failures stood, with clock = "training"."""
        self._idle_since: float | None = None
        self._resumed = self.env.event()
        self._end = self._due = self._paused = 0.0
        self._step_lost = self._interrupted = False
        self._saves: deque[tuple[float, float, float, int]] = deque([(0.0, 0.0, 0.0, 0)])
        """Of each checkpoint its time, and the useful seconds, contributions and steps in it."""
        self._unsaved = 0
        self._keeps_saves = any(kind.effect == "corrupt" for kind in self.scenario.failures)
        self._repairs = {
            kind.name: to_length(kind.repair, candidate.gpus) for kind in self.scenario.failures
        }
        self._process = self.env.process(self._train())
        self.env.process(self._fail(seed))
        for kind in self.scenario.failures:
            if kind.name in self.scenario.plans:
                self.env.process(self._shoot(kind, self.scenario.plans[kind.name], seed))
        for stop in self.scenario.maintenance:
            self.env.process(self._maintain(stop))

    def run(self) -> Account:
        account = self.account
        self.env.run(until=account.seconds)
        for group in self.groups:
            self._enter(group, group.state)
        parts = account.parts
        divided = ("steps", "stall", "slower", "exchange", "checkpoints")
        parts["lost"] = self._training - math.fsum(parts[name] for name in divided)
        total = account.seconds * account.groups
        assert parts["lost"] >= -1e-9 * total, "more time was counted than groups trained"
        parts["lost"] = max(0.0, parts["lost"])
        summed = math.fsum(parts.values())
        assert math.isclose(summed, total, rel_tol=1e-9), "the time of the groups does not add up"
        return account

    def _enter(self, group: _Group, state: str) -> None:
        spent = self.env.now - group.since
        if group.state == "training":
            self._training += spent
        else:
            self.account.parts[group.state] += spent
        group.state, group.since = state, self.env.now

    # Training

    def _train(self) -> Events:
        while True:
            late = self._admit()
            if len(self._up) < self.candidate.least:
                yield from self._wait()
                continue
            if late == 0.0 and self._commit is None:
                yield from self._skip()
            try:
                yield from self._make_step(late)
            except simpy.Interrupt:
                # Too few groups are left: the step is lost, and those that are ready may join.
                self._interrupted = False

    def _admit(self) -> float:
        """Let the groups that are ready take part; return by how much they make this step late."""
        late = 0.0
        if not self._ready:
            return late
        for group in (self.groups[number] for number in sorted(self._ready)):
            assert group.luck is not None, "a group that comes back was stopped"
            group.joined = self.env.now
            self._up[group.number] = True
            self._enter(group, "training")
            if self.candidate.strategy != "rounds":
                late = max(late, self.candidate.costs.rejoin.draw(group.luck.rejoin))
        self._ready.clear()
        return late

    def _wait(self) -> Events:
        """Wait until enough groups are there."""
        self._idle_since = self.env.now
        for number in self._up:
            self._enter(self.groups[number], "waiting")
        self._resumed = self.env.event()
        yield self._resumed
        self._held += self.env.now - self._idle_since
        self._idle_since = None
        for number in self._up:
            self._enter(self.groups[number], "training")

    def _step_seconds(self) -> float:
        candidate = self.candidate
        away = candidate.groups - len(self._up)
        slow = max(self._slow.values()) if self._slow else 1.0
        return candidate.step * slow + candidate.exchange + candidate.costs.drag * away

    def _skip(self) -> Events:
        """Make at once the steps that end before anything else happens, but for the last one.

        That holds only because this process is the last one to act at this moment: any other event
        is one that `peek` sees.
        """
        candidate, step = self.candidate, self._step_seconds()
        free = min(self.env.peek(), self.account.seconds) - self.env.now
        if candidate.save_every and self._unsaved == 0 and not self._keeps_saves:
            cycle = candidate.save_every * step + candidate.save
            cycles = int(free / cycle) - 1
            if cycles > 0:
                yield self.env.timeout(cycles * cycle)
                self._count(cycles * candidate.save_every, cycles * candidate.save_every)
                self.account.parts["checkpoints"] += cycles * candidate.save * len(self._up)
                self._saved()
                return
        whole = math.ceil(free / step) - 1
        if candidate.save_every:
            whole = min(whole, candidate.save_every - self._unsaved - 1)
        if whole > 0:
            yield self.env.timeout(whole * step)
            self._count(whole, whole)

    def _make_step(self, late: float) -> Events:
        begin, candidate, parts = self.env.now, self.candidate, self.account.parts
        saves = bool(candidate.save_every) and self._unsaved + 1 >= candidate.save_every
        save = candidate.save if saves else 0.0
        usual = self._step_seconds()
        self._due = self._paused = begin + usual + max(late, -usual) + save
        self._end, self._step_lost = self._due, False
        self.account.votes += 1
        while self.env.now < self._end:
            yield self.env.timeout(self._end - self.env.now)
        if self._step_lost:
            return
        parts["stall"] += len(self._up) * (self._end - self._due)
        parts["checkpoints"] += len(self._up) * save
        self._count(
            1, 0, slower=self._due - begin - candidate.step - candidate.exchange - save, began=begin
        )
        if saves:
            self._saved()

    def _count(
        self, steps: int, votes: int, slower: float | None = None, began: float = 0.0
    ) -> None:
        """Count committed steps; a single one if `slower` is given: its seconds beyond usual."""
        candidate, account = self.candidate, self.account
        present = float(len(self._up))
        if slower is None:
            slower = steps * (self._step_seconds() - candidate.step - candidate.exchange)
        elif candidate.strategy == "rounds":
            length = self.env.now - began
            present = 0.0
            for number in self._up:
                since = max(began, self.groups[number].joined)
                present += min(1.0, (self.env.now - since) / length)
        useful = steps * candidate.step
        slower = 0.0 if abs(slower) < 1e-9 * candidate.step else slower  # rounding
        if slower < 0:  # a step that was faster than usual counts as long as it was, as in goodput
            useful, slower = useful + slower, 0.0
        account.steps += steps
        account.votes += votes
        account.contributions += steps * present
        account.parts["steps"] += present * useful
        account.parts["slower"] += present * slower
        account.parts["exchange"] += present * steps * candidate.exchange
        self._unsaved += steps
        if self._commit is not None:
            self._commit(self.env.now, frozenset(self._up))

    def _saved(self) -> None:
        account = self.account
        self._saves.append(
            (self.env.now, account.parts["steps"], account.contributions, account.steps)
        )
        if len(self._saves) > MAX_SAVES:
            self._saves.popleft()
        self._unsaved = 0

    def _roll_back(self, before: float) -> None:
        """Go back to the last checkpoint from before a time."""
        while len(self._saves) > 1 and self._saves[-1][0] > before:
            self._saves.pop()
        _, useful, contributions, steps = self._saves[-1]
        account = self.account
        account.parts["steps"], account.contributions, account.steps = useful, contributions, steps
        account.restarts += 1
        self._unsaved = 0

    # Failures

    def _until(self, when: float) -> Events:
        """Wait for a time of the failures' clock."""
        if self.scenario.clock == "wall":
            yield self.env.timeout(max(0.0, when - self.env.now))
            return
        while True:
            if self._idle_since is not None:
                yield self._resumed
            elif self.env.now < when + self._held:
                yield self.env.timeout(when + self._held - self.env.now)
            else:
                return

    def _fail(self, seed: int) -> Events:
        for failure in draw_failures(self.scenario, seed, self.account.seconds):
            yield from self._until(failure.time)
            self._hit(failure)

    def _hit(self, failure: Failure) -> None:
        groups = groups_hit(failure, self.candidate.groups, self.candidate.group_nodes)
        if not groups:
            return
        self.account.failures += 1
        for number, nodes in groups.items():
            self._affect(
                self.groups[number], failure.kind, failure.luck, nodes, failure.repair_seconds
            )

    def _affect(
        self, group: _Group, kind: Kind, luck: Luck, nodes: int, repair: float | None = None
    ) -> None:
        """Let a failure have its effect on one group.

        Args:
            nodes: how many of the group are hit.
            repair: seconds until they are mended, where a log has it.
        """
        if kind.effect in ("slow", "corrupt"):
            self.env.process(self._find(group, kind, luck))
            return
        if repair is None:
            repair = self._repairs[kind.name].draw(luck.repair)
        is_broken = luck.breaks < kind.breaks
        self._stop(group, nodes if is_broken else 0, repair, luck, in_order=kind.effect == "drain")

    def _find(self, group: _Group, kind: Kind, luck: Luck) -> Events:
        """Let a straggler slow all groups down, or wrong numbers go unseen, until they are found.

        Then the group leaves in order, and heals from the others. A job without other groups goes
        back to a checkpoint before its wrong numbers.
        """
        since, stops = self.env.now, group.stops
        if kind.effect == "slow" and group.number in self._up:
            self._slow[group.number] = kind.factor
        yield self.env.timeout(kind.found_after)
        if group.stops != stops:
            return  # another failure has ended the straggler, or the wrong numbers, before
        self._slow.pop(group.number, None)
        if kind.leaves:
            good_until = since if kind.effect == "corrupt" else math.inf
            self._stop(group, 0, 0.0, luck, in_order=True, good_until=good_until)

    def _maintain(self, stop: Maintenance) -> Events:
        first, total = 0, self.candidate.groups * self.candidate.group_nodes
        while True:
            yield self.env.timeout(stop.every)
            nodes = [(first + place) % total for place in range(min(stop.nodes, total))]
            first = (nodes[-1] + 1) % total
            counts = Counter(node // self.candidate.group_nodes for node in nodes)
            for number, count in counts.items():
                self._stop(self.groups[number], count, stop.lasts, USUAL_LUCK, in_order=True)

    def _shoot(self, kind: Kind, plan: Plan, seed: int) -> Events:
        """Carry out a chaos plan as its runner does: the same shots, groups and limits."""
        rng = random.Random(f"{seed}/{kind.name}/luck")
        for shot in shots(plan):
            self.env.process(self._shoot_one(kind, plan, shot, Luck.draw(rng)))
            yield from self._until(plan.start_seconds + shot.time)

    def _shoot_one(self, kind: Kind, plan: Plan, shot: Shot, luck: Luck) -> Events:
        due = plan.start_seconds + shot.time
        yield from self._until(due)
        while isinstance(aimed := aim(shot, self._view(), plan.limits), Refusal):
            if aimed.final or self.env.now - due >= plan.limits.patience_seconds:
                self.account.skipped += 1
                return
            yield self.env.timeout(POLL_SECONDS)
        self._inject(kind, aimed, luck)

    def _view(self) -> View:
        groups = {}
        for number in range(self.candidate.groups):
            groups[number] = GroupView(number, 1, number in self._up)
        return View(groups, frozenset(Need))

    def _inject(self, kind: Kind, aimed: Injection, luck: Luck) -> None:
        of_fault = as_fault(kind, aimed.shot.fault)
        replicas = [target.replica for target in aimed.targets]
        hit = [self.groups[replica] for replica in replicas if replica is not None]
        if of_fault is None or not hit:
            return
        self.account.failures += 1
        for group in hit:
            self._affect(group, of_fault, luck, 1)

    def _stop(
        self,
        group: _Group,
        broken: int,
        repair: float,
        luck: Luck,
        *,
        in_order: bool = False,
        good_until: float = math.inf,
    ) -> None:
        """Take a group away, for whatever reason.

        Args:
            broken: nodes that it loses until they are mended; `repair` is how long that takes.
            in_order: it leaves between two steps, and nobody stalls.
            good_until: checkpoints since then are worth nothing.
        """
        group.stops += 1
        self._slow.pop(group.number, None)
        group.luck = luck
        self._ready.discard(group.number)
        if self.candidate.spares is not None and broken:
            group.lacks += broken
            self.env.process(self._mend(broken, repair))
        self._enter(group, "nodes" if group.lacks else "away")
        if group.number in self._up:
            del self._up[group.number]
            if not self._up and not self._ready:
                self._lose_all(good_until, in_order=in_order)
            self._notice(luck, in_order=in_order)
        if not group.lacks:
            self.env.process(self._start(group, group.stops))
            return
        if group not in self._waiting:
            self._waiting.append(group)
        self._hand_out()

    def _lose_all(self, good_until: float, *, in_order: bool) -> None:
        """Go back to a checkpoint.

        A last group that leaves in order saves before, unless its numbers are wrong.
        """
        if in_order and good_until == math.inf and self.candidate.save_every:
            self._saved()
            self.account.restarts += 1
        else:
            self._roll_back(good_until)

    def _notice(self, luck: Luck, *, in_order: bool) -> None:
        """Let the others find out that a group is gone."""
        if self._idle_since is not None or self._interrupted:
            return
        if len(self._up) < self.candidate.least:
            self._interrupted = True
            self._process.interrupt()
            return
        if in_order:
            return
        candidate, now = self.candidate, self.env.now
        stall = candidate.costs.stall.draw(luck.stall)
        if candidate.loses:
            self._step_lost = True
            end = max(self._end, max(now, self._due) + stall)
        elif candidate.strategy == "rounds" and now < self._due - candidate.exchange:
            return
        else:  # the exchange at the step's end breaks; stalls that overlap count once
            begin = max(now, self._due)
            end = self._end + max(0.0, begin + stall - max(begin, self._paused))
            self._paused = max(self._paused, begin + stall)
            self.account.votes += 1
        self._held += end - self._end
        self._end = end

    # Nodes

    def _mend(self, nodes: int, seconds: float) -> Events:
        yield self.env.timeout(seconds)
        self._free += nodes
        self._hand_out()

    def _hand_out(self) -> None:
        """Give nodes to the groups that lack some, first come first served.

        One that has all of them starts.
        """
        while self._waiting:
            group = self._waiting[0]
            given = min(self._free, group.lacks)
            self._free -= given
            group.lacks -= given
            if group.lacks:
                return
            self._waiting.popleft()
            self._enter(group, "away")
            self.env.process(self._start(group, group.stops))

    def _start(self, group: _Group, stops: int) -> Events:
        assert group.luck is not None, "a group that starts was stopped"
        yield self.env.timeout(self.candidate.costs.away.draw(group.luck.away))
        if group.stops != stops:
            return
        if self.candidate.strategy == "rounds" and self._idle_since is None:
            group.joined = self.env.now
            self._up[group.number] = True
            self._enter(group, "training")
            return
        self._ready.add(group.number)
        there = len(self._up) + len(self._ready)
        is_enough = there >= self.candidate.least
        if self._idle_since is not None and is_enough and not self._resumed.triggered:
            self._resumed.succeed()
