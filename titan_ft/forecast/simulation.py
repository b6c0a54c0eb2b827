# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a job under failures, event by event, and account for each second of each group.

A step is counted as `titan_ft.history.timing.goodput` counts it: its usual time, for each group
that contributed. So a report on a simulated run that is written as events shows the same effective
training time as its account. `choice` and published.py simulate candidates here.
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

PARTS = {
    "steps": "training",
    "stall": "stalled",
    "slower": "slower steps",
    "exchange": "exchange",
    "checkpoints": "checkpoints",
    "lost": "lost work",
    "waiting": "too few groups",
    "away": "away",
    "nodes": "no nodes",
}
"""Where the time of the groups goes, with the name that people read. "steps" is the effective
training time. "slower" is the time that stragglers, groups away and groups that return add to
steps. "lost" was computed in vain. "waiting" groups are fewer than min_replica_size. "nodes" is
the wait for nodes."""
POLL_SECONDS = 0.1
"""A chaos runner tries a refused fault again after this time."""
MAX_SAVES = 1000
"""The newest checkpoints that a run remembers. Wrong numbers that are found late may send a job
back to any of them."""
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
    """Attempted exchanges. The groups vote at the end of each. A step counts every attempt."""
    contributions: float = 0.0
    """Committed steps, summed over the groups that made them. A part of a round counts as a part."""
    failures: int = 0
    """Failures that hit at least one group. One on a node without a group does not count."""
    skipped: int = 0
    """Faults of a chaos plan that could not be injected in time."""
    restarts: int = 0
    """Times at which no group was left."""

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
    """"training", or the key of PARTS that gets its time. `run` divides the time in training among
    the other keys."""
    since: float = 0.0
    """When the state began."""
    joined: float = 0.0
    """When its part in steps began."""
    stops: int = 0
    """How often it was stopped. A process that waits for this group remembers the number. If it has
    changed, another stop made the wait void."""
    lacks: int = 0
    """Nodes that it waits for."""
    luck: Luck = USUAL_LUCK
    """Of its last stop: uniform numbers from 0 to 1, the quantiles of what that stop costs."""


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
    """One run, made by `simulate`.

    These are simpy's processes, which act one at a time: `_train` makes the steps,
    `_cause_failures`, `_run_plan` and `_maintain` stop groups, and each stop has processes that
    give its nodes and the group back. The groups in `_training_groups` make the step under way.
    """

    def __init__(
        self, candidate: Candidate, seed: int, seconds: float, commit: Commit | None
    ) -> None:
        self.candidate, self.scenario, self._commit = candidate, candidate.scenario, commit
        self.account = Account(seconds, candidate.groups)
        self.env = simpy.Environment()
        self.groups = [_Group(number) for number in range(candidate.groups)]
        # A dict as an ordered set: sums over the groups have one order, so that equal seeds give
        # equal results.
        self._training_groups = dict.fromkeys(range(candidate.groups), True)
        self._ready_groups: set[int] = set()
        """Groups that wait for the next step to begin."""
        self._training_seconds = 0.0
        """Group-seconds in training."""
        self._free_nodes = candidate.spares or 0
        self._waiting_for_nodes: deque[_Group] = deque()
        self._slow_factors: dict[int, float] = {}
        """Factors of the groups that have a straggler."""
        self._clock_stood = 0.0
        """Seconds in which the clock of failures stood still. With clock = "training" it does so in
        stalls and while too few groups are there."""
        self._idle_since: float | None = None
        self._resumed = self.env.event()
        self._step_end = self._step_due = self._stalled_until = 0.0
        """Of the step under way: when it ends, when it would end without stalls, and until when its
        stalls so far last."""
        self._exchange_due = 0.0
        """When the exchange of the step under way would end without stalls. A save comes after it."""
        self._step_lost = self._interrupted = False
        self._saves: deque[tuple[float, float, float, int]] = deque([(0.0, 0.0, 0.0, 0)])
        """Of each checkpoint its time, and the useful seconds, contributions and steps in it."""
        self._unsaved = 0
        self._keeps_saves = any(kind.effect == "corrupt" for kind in self.scenario.failures)
        """True if wrong numbers may send the job back beyond its last checkpoint."""
        self._repairs = {
            kind.name: to_length(kind.repair, candidate.gpus) for kind in self.scenario.failures
        }
        self._trainer = self.env.process(self._train())
        self.env.process(self._cause_failures(seed))
        for kind in self.scenario.failures:
            if kind.name in self.scenario.plans:
                self.env.process(self._run_plan(kind, self.scenario.plans[kind.name], seed))
        for maintenance in self.scenario.maintenance:
            self.env.process(self._maintain(maintenance))

    def run(self) -> Account:
        account = self.account
        self.env.run(until=account.seconds)
        for group in self.groups:
            self._change_state(group, group.state)
        parts = account.parts
        divided = ("steps", "stall", "slower", "exchange", "checkpoints")
        parts["lost"] = self._training_seconds - math.fsum(parts[name] for name in divided)
        total = account.seconds * account.groups
        assert parts["lost"] >= -1e-9 * total, "more time was counted than groups trained"
        parts["lost"] = max(0.0, parts["lost"])
        summed = math.fsum(parts.values())
        assert math.isclose(summed, total, rel_tol=1e-9), "the time of the groups does not add up"
        return account

    def _change_state(self, group: _Group, state: str) -> None:
        spent = self.env.now - group.since
        if group.state == "training":
            self._training_seconds += spent
        else:
            self.account.parts[group.state] += spent
        group.state, group.since = state, self.env.now

    # Training

    def _train(self) -> Events:
        while True:
            late = self._let_join()
            if len(self._training_groups) < self.candidate.least:
                yield from self._wait_for_groups()
                continue
            if late == 0.0 and self._commit is None:
                yield from self._skip_steps()
            try:
                yield from self._make_step(late)
            except simpy.Interrupt:
                # Too few groups are left: the step is lost, and those that are ready may join.
                self._interrupted = False

    def _let_join(self) -> float:
        """Let the groups that are ready take part; return by how much they make this step late."""
        late = 0.0
        if not self._ready_groups:
            return late
        for group in (self.groups[number] for number in sorted(self._ready_groups)):
            group.joined = self.env.now
            self._training_groups[group.number] = True
            self._change_state(group, "training")
            # A round is not late for a group that returns: groups join it at any time.
            if self.candidate.strategy != "rounds":
                late = max(late, self.candidate.costs.rejoin.draw(group.luck.rejoin))
        self._ready_groups.clear()
        return late

    def _wait_for_groups(self) -> Events:
        """Wait until enough groups are there."""
        self._idle_since = self.env.now
        for number in self._training_groups:
            self._change_state(self.groups[number], "waiting")
        self._resumed = self.env.event()
        yield self._resumed
        self._clock_stood += self.env.now - self._idle_since
        self._idle_since = None
        for number in self._training_groups:
            self._change_state(self.groups[number], "training")

    def _step_seconds(self) -> float:
        """Return how long a step takes now. The slowest straggler, and each absent group, slow it."""
        candidate = self.candidate
        away = candidate.groups - len(self._training_groups)
        slow = max(self._slow_factors.values()) if self._slow_factors else 1.0
        return candidate.step * slow + candidate.exchange + candidate.costs.drag * away

    def _skip_steps(self) -> Events:
        """Make at once the steps that end before anything else happens, but for the last one.

        Nothing can happen in between: `peek` sees every other event, those of this moment too.
        """
        candidate, step = self.candidate, self._step_seconds()
        free = min(self.env.peek(), self.account.seconds) - self.env.now
        if candidate.save_every and self._unsaved == 0 and not self._keeps_saves:
            cycle = candidate.save_every * step + candidate.save
            cycles = int(free / cycle) - 1
            if cycles > 0:
                yield self.env.timeout(cycles * cycle)
                self._count_calm(cycles * candidate.save_every, step)
                saves = cycles * candidate.save
                self.account.parts["checkpoints"] += saves * len(self._training_groups)
                self._save()
                return
        whole = math.ceil(free / step) - 1
        if candidate.save_every:
            whole = min(whole, candidate.save_every - self._unsaved - 1)
        if whole > 0:
            yield self.env.timeout(whole * step)
            self._count_calm(whole, step)

    def _count_calm(self, steps: int, seconds: float) -> None:
        """Count steps of so many seconds each, during which nothing happened."""
        slower = steps * (seconds - self.candidate.step - self.candidate.exchange)
        self.account.votes += steps
        self._count(steps, slower, len(self._training_groups))

    def _make_step(self, late: float) -> Events:
        begin, candidate, parts = self.env.now, self.candidate, self.account.parts
        saves = bool(candidate.save_every) and self._unsaved + 1 >= candidate.save_every
        save = candidate.save if saves else 0.0
        usual = self._step_seconds()
        # A measured lateness may be below 0, but no step is shorter than 0.
        self._exchange_due = begin + usual + max(late, -usual)
        self._step_due = self._stalled_until = self._exchange_due + save
        self._step_end, self._step_lost = self._step_due, False
        self.account.votes += 1
        while self.env.now < self._step_end:
            yield self.env.timeout(self._step_end - self.env.now)
        if self._step_lost:
            return
        parts["stall"] += len(self._training_groups) * (self._step_end - self._step_due)
        parts["checkpoints"] += len(self._training_groups) * save
        slower = self._step_due - begin - candidate.step - candidate.exchange - save
        self._count(1, slower, self._contribution(begin))
        if saves:
            self._save()

    def _contribution(self, begin: float) -> float:
        """Return how many groups made the step since `begin`; a part of a round counts as a part.

        Groups join a step only at its begin, but a round at any time.
        """
        if self.candidate.strategy != "rounds":
            return len(self._training_groups)
        present = 0.0
        for number in self._training_groups:
            since = max(begin, self.groups[number].joined)
            present += min(1.0, (self.env.now - since) / (self.env.now - begin))
        return present

    def _count(self, steps: int, slower: float, present: float) -> None:
        """Count committed steps.

        Args:
            slower: seconds beyond the usual ones, of all these steps together.
            present: groups that made them.
        """
        candidate, account = self.candidate, self.account
        useful = steps * candidate.step
        if abs(slower) < 1e-9 * candidate.step:
            slower = 0.0  # Rounding must not make a part negative.
        if slower < 0:
            # A step that was faster than usual counts as long as it was, as in goodput.
            useful, slower = useful + slower, 0.0
        account.steps += steps
        account.contributions += steps * present
        account.parts["steps"] += present * useful
        account.parts["slower"] += present * slower
        account.parts["exchange"] += present * steps * candidate.exchange
        self._unsaved += steps
        if self._commit is not None:
            self._commit(self.env.now, frozenset(self._training_groups))

    def _save(self) -> None:
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

    def _wait_for_clock(self, when: float) -> Events:
        """Wait for a time of the failures' clock."""
        if self.scenario.clock == "wall":
            yield self.env.timeout(max(0.0, when - self.env.now))
            return
        while True:
            if self._idle_since is not None:
                yield self._resumed
            elif self.env.now < when + self._clock_stood:
                yield self.env.timeout(when + self._clock_stood - self.env.now)
            else:
                return

    def _cause_failures(self, seed: int) -> Events:
        for failure in draw_failures(self.scenario, seed, self.account.seconds):
            yield from self._wait_for_clock(failure.time)
            self._hit_groups(failure)

    def _hit_groups(self, failure: Failure) -> None:
        groups = groups_hit(failure, self.candidate.groups, self.candidate.group_nodes)
        if not groups:
            return
        self.account.failures += 1
        for number, nodes in groups.items():
            group, repair = self.groups[number], failure.repair_seconds
            self._hit_group(group, failure.kind, failure.luck, nodes, repair)

    def _hit_group(
        self, group: _Group, kind: Kind, luck: Luck, nodes: int, repair: float | None = None
    ) -> None:
        """Let a failure have its effect on one group.

        Args:
            nodes: how many of the group are hit.
            repair: seconds until they are mended, where a log has it.
        """
        if kind.effect in ("slow", "corrupt"):
            self.env.process(self._wait_until_found(group, kind, luck))
            return
        if repair is None:
            repair = self._repairs[kind.name].draw(luck.repair)
        # `luck.breaks` is uniform from 0 to 1, `kind.breaks` the share of failures that break nodes.
        is_broken = luck.breaks < kind.breaks
        self._stop(group, nodes if is_broken else 0, repair, luck, in_order=kind.effect == "drain")

    def _wait_until_found(self, group: _Group, kind: Kind, luck: Luck) -> Events:
        """Let a straggler slow all groups down, or wrong numbers go unseen, until they are found.

        Then the group leaves in order, and heals from the others, which are assumed to have taken
        over nothing wrong. A job without other groups goes back to a checkpoint before its wrong
        numbers.
        """
        since, stops = self.env.now, group.stops
        if kind.effect == "slow" and group.number in self._training_groups:
            self._slow_factors[group.number] = kind.factor
        yield self.env.timeout(kind.found_after)
        if group.stops != stops:
            return  # Another failure has ended the straggler, or the wrong numbers, before.
        self._slow_factors.pop(group.number, None)
        if kind.leaves:
            good_until = since if kind.effect == "corrupt" else math.inf
            self._stop(group, 0, 0.0, luck, in_order=True, good_until=good_until)

    def _maintain(self, maintenance: Maintenance) -> Events:
        """Take nodes away at each interval: those after the last ones, round and round."""
        first, total = 0, self.candidate.groups * self.candidate.group_nodes
        while True:
            yield self.env.timeout(maintenance.every)
            num_nodes = min(maintenance.nodes, total)
            nodes = [(first + place) % total for place in range(num_nodes)]
            first = (nodes[-1] + 1) % total
            counts = Counter(node // self.candidate.group_nodes for node in nodes)
            for number, count in counts.items():
                lasts = maintenance.lasts
                self._stop(self.groups[number], count, lasts, USUAL_LUCK, in_order=True)

    def _run_plan(self, kind: Kind, plan: Plan, seed: int) -> Events:
        """Carry out a chaos plan as its runner does: the same shots, groups and limits."""
        rng = random.Random(f"{seed}/{kind.name}/luck")
        # A refused shot tries again in its own process, so that the next one is not late. The loop
        # waits too, because shots may be without end.
        for shot in shots(plan):
            self.env.process(self._inject_when_allowed(kind, plan, shot, Luck.draw(rng)))
            yield from self._wait_for_clock(plan.start_seconds + shot.time)

    def _inject_when_allowed(self, kind: Kind, plan: Plan, shot: Shot, luck: Luck) -> Events:
        due = plan.start_seconds + shot.time
        yield from self._wait_for_clock(due)
        while True:
            aimed = aim(shot, self._view(), plan.limits)
            if not isinstance(aimed, Refusal):
                self._inject(kind, aimed, luck)
                return
            if aimed.final or self.env.now - due >= plan.limits.patience_seconds:
                self.account.skipped += 1
                return
            yield self.env.timeout(POLL_SECONDS)

    def _view(self) -> View:
        groups = {}
        for number in range(self.candidate.groups):
            is_up = number in self._training_groups
            groups[number] = GroupView(number, num_ranks=1, up=is_up)
        # A simulated job meets every need of a fault.
        return View(groups, frozenset(Need))

    def _inject(self, kind: Kind, aimed: Injection, luck: Luck) -> None:
        kind_of_fault = as_fault(kind, aimed.shot.fault)
        replicas = [target.replica for target in aimed.targets]
        hit = [self.groups[replica] for replica in replicas if replica is not None]
        # The fault costs its group nothing, or its target is a lighthouse: no failure here.
        if kind_of_fault is None or not hit:
            return
        self.account.failures += 1
        for group in hit:
            self._hit_group(group, kind_of_fault, luck, 1)

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
        self._slow_factors.pop(group.number, None)
        group.luck = luck
        is_training = group.number in self._training_groups
        holds_state = is_training or group.number in self._ready_groups
        self._training_groups.pop(group.number, None)
        self._ready_groups.discard(group.number)
        # With spares = None there is always another node, and no group waits for one.
        if self.candidate.spares is not None and broken:
            group.lacks += broken
            self.env.process(self._repair_nodes(broken, repair))
        self._change_state(group, "nodes" if group.lacks else "away")
        # A group that is ready to join holds the job's state, too. It may be the last one.
        if holds_state and not self._training_groups and not self._ready_groups:
            self._lose_all(good_until, in_order=in_order)
        if is_training:
            self._react_to_loss(luck, in_order=in_order)
        if not group.lacks:
            self.env.process(self._come_back(group, group.stops))
            return
        if group not in self._waiting_for_nodes:
            self._waiting_for_nodes.append(group)
        self._give_nodes()

    def _lose_all(self, good_until: float, *, in_order: bool) -> None:
        """Go back to a checkpoint.

        A last group that leaves in order saves before, unless its numbers are wrong.
        """
        if in_order and good_until == math.inf and self.candidate.save_every:
            self._save()
            self.account.restarts += 1
        else:
            self._roll_back(good_until)

    def _react_to_loss(self, luck: Luck, *, in_order: bool) -> None:
        """Let the others find out that a group is gone."""
        if self._idle_since is not None or self._interrupted:
            return
        if len(self._training_groups) < self.candidate.least:
            self._interrupted = True
            self._trainer.interrupt()
            return
        if in_order:
            return
        candidate, now = self.candidate, self.env.now
        stall = candidate.costs.stall.draw(luck.stall)
        if candidate.loses:  # a death loses the step under way
            self._step_lost = True
            # The others notice at the step's end, or now if that is later, and then stall.
            end = max(self._step_end, max(now, self._step_due) + stall)
        elif candidate.strategy == "rounds" and not self._exchange_is_under_way():
            return
        else:  # the exchange at the step's end breaks; stalls that overlap count once
            begin = max(now, self._step_due)
            beyond_others = begin + stall - max(begin, self._stalled_until)
            end = self._step_end + max(0.0, beyond_others)
            self._stalled_until = max(self._stalled_until, begin + stall)
            self.account.votes += 1
        self._clock_stood += end - self._step_end
        self._step_end = end

    def _exchange_is_under_way(self) -> bool:
        begin = self._exchange_due - self.candidate.exchange
        stalled = self._step_end - self._step_due
        return begin <= self.env.now < self._exchange_due + stalled

    # Nodes

    def _repair_nodes(self, nodes: int, seconds: float) -> Events:
        yield self.env.timeout(seconds)
        self._free_nodes += nodes
        self._give_nodes()

    def _give_nodes(self) -> None:
        """Give nodes to the groups that lack some, first come first served.

        One that has all of them starts.
        """
        while self._waiting_for_nodes:
            group = self._waiting_for_nodes[0]
            given = min(self._free_nodes, group.lacks)
            self._free_nodes -= given
            group.lacks -= given
            if group.lacks:
                return
            self._waiting_for_nodes.popleft()
            self._change_state(group, "away")
            self.env.process(self._come_back(group, group.stops))

    def _come_back(self, group: _Group, stops: int) -> Events:
        yield self.env.timeout(self.candidate.costs.away.draw(group.luck.away))
        if group.stops != stops:
            return
        if self.candidate.strategy == "rounds" and self._idle_since is None:
            group.joined = self.env.now
            self._training_groups[group.number] = True
            self._change_state(group, "training")
            return
        self._ready_groups.add(group.number)
        there = len(self._training_groups) + len(self._ready_groups)
        is_enough = there >= self.candidate.least
        if self._idle_since is not None and is_enough and not self._resumed.triggered:
            self._resumed.succeed()
