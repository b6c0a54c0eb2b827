# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulate a job under failures, event by event, and account for each second of each group.

A committed step adds its usual duration to the effective time, once for each group that
contributed. `titan_ft.history.timing.goodput` has the same rule. So if a simulated run is written
as events, `titan-ft report` shows the effective training time of its `Account`.

`choice` and `published` simulate candidates here.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import simpy

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.schedule import GroupView, Injection, Refusal, Shot, View, aim, shots
from titan_ft.faults.fault import Need
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.failures import (
    USUAL_LUCK,
    Failure,
    Luck,
    draw_failures,
    groups_hit,
    with_effect_of,
)
from titan_ft.forecast.scenario import Kind, Maintenance, to_length

PARTS = {
    "useful": "training",
    "stall": "stalled",
    "slower": "slower steps",
    "exchange": "exchange",
    "checkpoints": "checkpoints",
    "lost": "lost work",
    "waiting": "too few groups",
    "away": "away",
    "nodes": "no nodes",
}
"""Where the time of the groups goes, with the name that people read.

- useful: the usual time of committed steps. Its share is the effective training time.
- stall: the others wait because a group has died.
- slower: what stragglers, groups away and groups that return add to committed steps.
- lost: computed in vain.
- waiting: fewer groups than min_replica_size are left, so nobody trains.
- away: the group starts again, and heals.
- nodes: the group waits for nodes.
"""
_PARTS_OF_TRAINING = ("useful", "stall", "slower", "exchange", "checkpoints")
"""Parts that are counted when a step ends. What they leave of the training time is "lost"."""
POLL_SECONDS = 0.1
"""A chaos runner tries a refused fault again after this time."""
MAX_CHECKPOINTS = 100_000
"""The newest checkpoints that a run remembers. Wrong numbers that are found late may send a job
back to any of them."""
SimProcess = Generator[simpy.Event, Any, None]
OnCommit = Callable[[float, frozenset[int]], None]
"""Called at each commit, with the simulated time and the groups that made the step."""


@dataclass
class Account:
    """Group-seconds of one simulated run, by what they were spent on, and counts of what happened.

    Attributes:
        seconds: length of the run.
        groups: number of groups of the job.
    """

    seconds: float
    groups: int
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    """Committed steps (rounds) that are in the job's state at the end."""
    votes: int = 0
    """Attempted exchanges. A step whose exchange was repeated counts once for each attempt."""
    contributions: float = 0.0
    """Committed steps, summed over the groups that made them. A group that joined in the middle of
    a round adds the fraction for which it was there."""
    failures: int = 0
    """Failures that hit at least one group. One on a node without a group does not count."""
    skipped: int = 0
    """Faults of a chaos plan that could not be injected in time."""
    restarts: int = 0
    """Times at which no group was left."""

    @property
    def effective(self) -> float:
        """Return the effective training time as a share of all time, from 0 to 1."""
        return self.parts["useful"] / (self.seconds * self.groups)

    def shares(self) -> dict[str, float]:
        """Return the parts as shares of all time."""
        total = self.seconds * self.groups
        return {name: seconds / total for name, seconds in self.parts.items()}


@dataclass
class _Group:
    number: int
    state: str = "training"
    """What the group does: "training", or the key of PARTS to which its time is added."""
    since: float = 0.0
    """When the state began."""
    joined: float = 0.0
    """When it last began to take part in steps."""
    stops: int = 0
    """How often it was stopped. A process that waits for this group remembers the number. If it has
    changed, another stop made the wait void."""
    lacks: int = 0
    """Nodes that it waits for."""
    luck: Luck = USUAL_LUCK
    """The quantiles, from 0 to 1, of the costs of its last stop."""


class _Checkpoint(NamedTuple):
    time: float
    useful_seconds: float
    contributions: float
    steps: int


def simulate(
    candidate: Candidate,
    seed: int,
    seconds: float | None = None,
    on_commit: OnCommit | None = None,
) -> Account:
    """Return the account of one run.

    Args:
        seed: decides all that is random.
        seconds: how long the run is; when left out, the scenario's days.
        on_commit: called for every step. If None, all steps up to the next event are simulated in
            one jump. The account is the same, but for failures at the very end of a step: rounding
            decides whether they come before it.
    """
    return _Simulation(candidate, seed, seconds or candidate.scenario.seconds, on_commit).run()


class _Simulation:
    """One run, made by `simulate`.

    These are simpy's processes, which act one at a time: `_train` makes the steps,
    `_cause_failures`, `_run_plan` and `_maintain` stop groups. Each stop starts processes that
    return the mended nodes and, later, the group. The groups in `_training_groups` make the step
    under way.
    """

    def __init__(
        self, candidate: Candidate, seed: int, seconds: float, on_commit: OnCommit | None
    ) -> None:
        self.candidate, self.scenario, self._on_commit = candidate, candidate.scenario, on_commit
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
        # With spares = None nodes never run out, and this count is not used.
        self._free_nodes = candidate.spares or 0
        self._waiting_for_nodes: deque[_Group] = deque()
        self._slow_factors: dict[int, list[float]] = {}
        """The factors of the stragglers in each group."""
        self._pace = 1.0
        """The factor of the slowest straggler; 1 without one."""
        # The faults of a trace or a plan may be stragglers.
        self._has_stragglers = any(
            kind.effect == "slow" or kind.source in ("trace", "chaos")
            for kind in self.scenario.failures
        )
        self._step_shortened = self.env.event()
        """Succeeds when a straggler ends in the step under way, which then ends sooner."""
        self._leaves: list[tuple[int, Callable[[], None]]] = []
        """Who leaves in order at the end of the step under way: the group, and what stops it. A
        group may be asked twice, for a drain and for its nodes."""
        self._wrong_since: dict[object, tuple[int, float]] = {}
        """For each failure that made numbers wrong, while they are: the group, and since when."""
        self._clock_stood = 0.0
        """Seconds in which the clock of failures stood still, up to its last start. With clock =
        "training" it does so in stalls and while too few groups are there."""
        self._clock_stopped_at: float | None = None
        """None while the clock of failures runs."""
        self._clock_started = self.env.event()
        self._enough_groups: simpy.Event | None = None
        """Succeeds when enough groups are there again; None while the job trains."""
        self._is_step_under_way = False
        self._is_step_lost = False
        self._compute_end = 0.0
        """When the step under way has been computed; what makes it late comes after that."""
        self._exchange_begin: float | None = None
        """When the exchange of the step under way begins; None during a save."""
        self._step_due = 0.0
        """When the step under way, or its save, would end without stalls."""
        self._step_end = 0.0
        """When it ends, with the stalls so far."""
        self._checkpoints = deque([_Checkpoint(0.0, 0.0, 0.0, 0)])
        self._unsaved_steps = 0
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
            # The time since the last change of state is counted, too.
            self._change_state(group, group.state)
        parts = account.parts
        counted = math.fsum(parts[name] for name in _PARTS_OF_TRAINING)
        parts["lost"] = self._training_seconds - counted
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

    def _train(self) -> SimProcess:
        late = 0.0
        while True:
            late = max(late, self._let_join())
            if len(self._training_groups) < self.candidate.least:
                yield from self._wait_for_groups()
                continue
            if late == 0.0 and self._on_commit is None:
                yield from self._make_calm_steps_at_once()
            self._is_step_under_way = True
            # An interrupt means that too few groups are left: the step is lost.
            with contextlib.suppress(simpy.Interrupt):
                yield from self._make_step(late)
            self._is_step_under_way = False
            late = 0.0
            yield from self._let_leave()

    def _let_join(self) -> float:
        """Let the groups that are ready take part; return by how much they make this step late."""
        late = 0.0
        for group in (self.groups[number] for number in sorted(self._ready_groups)):
            self._join(group)
            # A returning group joins a round in its middle (`_come_back`), and makes nobody late.
            if self.candidate.strategy != "rounds":
                late = max(late, self.candidate.costs.rejoin.quantile(group.luck.rejoin))
        self._ready_groups.clear()
        return late

    def _join(self, group: _Group) -> None:
        group.joined = self.env.now
        self._training_groups[group.number] = True
        self._change_state(group, "training")

    def _let_leave(self) -> SimProcess:
        """Take the groups away that leave in order after the step that has ended.

        If they are the last ones, they save first.
        """
        leaves, self._leaves = self._leaves, []
        leaving = {number for number, _ in leaves}
        are_last = leaving >= self._training_groups.keys() and not self._ready_groups
        if leaves and are_last and self.candidate.save_every:
            yield self.env.timeout(self.candidate.save)
            num_groups = len(self._training_groups)
            self.account.parts["checkpoints"] += num_groups * self.candidate.save
        for _, stop in leaves:
            stop()

    def _wait_for_groups(self) -> SimProcess:
        """Wait until enough groups are there."""
        for number in self._training_groups:
            self._change_state(self.groups[number], "waiting")
        self._enough_groups = self.env.event()
        self._stop_clock()
        yield self._enough_groups
        self._start_clock()
        self._enough_groups = None
        for number in self._training_groups:
            self._change_state(self.groups[number], "training")

    def _step_seconds(self) -> float:
        """Return how long a step takes now. The slowest straggler, and each absent group, slow it."""
        candidate = self.candidate
        away = candidate.groups - len(self._training_groups)
        return candidate.step * self._pace + candidate.exchange + candidate.costs.drag * away

    def _make_calm_steps_at_once(self) -> SimProcess:
        """Jump over the steps that end before the next event.

        `_make_step` makes the step in which the event happens, and the one that ends with a save.
        `peek` is the time of the next event of any process. So nothing can happen during the jump.
        """
        candidate, step, now = self.candidate, self._step_seconds(), self.env.now
        event = self.env.peek()
        free = event - now
        if candidate.save_every and self._unsaved_steps == 0:
            # Whole cycles of steps and a save. One less than fit: rounding must not pass the event.
            cycle = candidate.save_every * step + candidate.save
            cycles = int(free / cycle) - 1
            if cycles > 0:
                yield self.env.timeout(cycles * cycle)
                self._count_calm(cycles * candidate.save_every, step)
                save_seconds = cycles * candidate.save
                self.account.parts["checkpoints"] += save_seconds * len(self._training_groups)
                self._save()
                return
        steps = math.ceil(free / step) - 1
        while now + steps * step >= event:  # Rounding must not carry a step's end to the event.
            steps -= 1
        if candidate.save_every:
            steps_before_save = candidate.save_every - self._unsaved_steps - 1
            steps = min(steps, steps_before_save)
        if steps > 0:
            yield self.env.timeout(steps * step)
            self._count_calm(steps, step)

    def _count_calm(self, steps: int, seconds: float) -> None:
        """Count steps of so many seconds each, during which nothing happened."""
        slower = steps * (seconds - self.candidate.step - self.candidate.exchange)
        self.account.votes += steps
        self._count(steps, slower, len(self._training_groups))

    def _make_step(self, late: float) -> SimProcess:
        candidate, parts, begin = self.candidate, self.account.parts, self.env.now
        due = begin + self._step_seconds() + late
        self._compute_end = begin + candidate.step * self._pace
        self._exchange_begin = due - candidate.exchange
        self._is_step_lost = False
        self.account.votes += 1
        stalled = yield from self._wait_with_stalls(due)
        present = self._find_present(begin)
        parts["stall"] += present * stalled
        if self._is_step_lost:
            return  # Its own time is counted as "lost": `run` finds it left over.
        usual = candidate.step + candidate.exchange
        self._count(1, self._step_due - begin - usual, present)
        if candidate.save_every and self._unsaved_steps >= candidate.save_every:
            save_begin, self._exchange_begin = self.env.now, None
            stalled = yield from self._wait_with_stalls(save_begin + candidate.save)
            present = self._find_present(save_begin)
            parts["checkpoints"] += present * candidate.save
            parts["stall"] += present * stalled
            self._save()

    def _wait_with_stalls(self, due: float) -> Generator[simpy.Event, Any, float]:
        """Wait until `due`, then for the stalls of the deaths meanwhile; return their seconds.

        Stragglers that come or go meanwhile move `_step_due`.
        """
        self._step_due = self._step_end = due
        while self.env.now < self._step_due:
            timeout = self.env.timeout(self._step_due - self.env.now)
            yield (timeout | self._step_shortened) if self._has_stragglers else timeout
        if self._step_end > self._step_due:
            self._stop_clock()
            try:
                while self.env.now < self._step_end:  # Another death moves the end meanwhile.
                    yield self.env.timeout(self._step_end - self.env.now)
            finally:
                self._start_clock()
        return self._step_end - self._step_due

    def _find_present(self, begin: float) -> float:
        """Return how many groups have made what began at `begin` and ends now.

        In a round, a group that joined later counts as the fraction of the time that it was there.
        """
        seconds = self.env.now - begin
        if self.candidate.strategy != "rounds" or seconds == 0.0:
            return len(self._training_groups)
        present = 0.0
        for number in self._training_groups:
            since = max(begin, self.groups[number].joined)
            present += (self.env.now - since) / seconds
        return present

    def _count(self, steps: int, slower: float, present: float) -> None:
        """Count committed steps.

        Args:
            slower: seconds beyond the usual ones, of all these steps together.
            present: groups that made them.
        """
        candidate, account = self.candidate, self.account
        account.steps += steps
        account.contributions += steps * present
        account.parts["useful"] += present * steps * candidate.usual_step
        # Calm steps vary, and the report counts no more than the usual one of each.
        beyond_usual = steps * (candidate.step - candidate.usual_step)
        # Rounding must not make a part negative.
        account.parts["slower"] += present * (beyond_usual + max(0.0, slower))
        account.parts["exchange"] += present * steps * candidate.exchange
        self._unsaved_steps += steps
        if self._on_commit is not None:
            self._on_commit(self.env.now, frozenset(self._training_groups))

    def _save(self) -> None:
        account = self.account
        useful_seconds = account.parts["useful"]
        self._checkpoints.append(
            _Checkpoint(self.env.now, useful_seconds, account.contributions, account.steps)
        )
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            self._checkpoints.popleft()
        self._unsaved_steps = 0

    def _roll_back(self, before: float) -> None:
        """Go back to the last checkpoint from before a time."""
        while len(self._checkpoints) > 1 and self._checkpoints[-1].time > before:
            self._checkpoints.pop()
        checkpoint, account = self._checkpoints[-1], self.account
        account.parts["useful"] = checkpoint.useful_seconds
        account.contributions = checkpoint.contributions
        account.steps = checkpoint.steps
        account.restarts += 1
        self._unsaved_steps = 0
        # Wrong numbers that began before the checkpoint are in it.
        for failure, (_, since) in list(self._wrong_since.items()):
            if since >= checkpoint.time:
                del self._wrong_since[failure]

    # The clock of failures

    def _stop_clock(self) -> None:
        self._clock_stopped_at = self.env.now

    def _start_clock(self) -> None:
        assert self._clock_stopped_at is not None, "the clock runs"
        self._clock_stood += self.env.now - self._clock_stopped_at
        self._clock_stopped_at = None
        started, self._clock_started = self._clock_started, self.env.event()
        started.succeed()

    def _wait_for_clock(self, when: float) -> SimProcess:
        """Wait for a time of the failures' clock."""
        if self.scenario.clock == "wall":
            yield self.env.timeout(max(0.0, when - self.env.now))
            return
        while True:
            if self._clock_stopped_at is not None:
                yield self._clock_started
            elif self.env.now < when + self._clock_stood:
                yield self.env.timeout(when + self._clock_stood - self.env.now)
            else:
                return

    # Failures

    def _cause_failures(self, seed: int) -> SimProcess:
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
            repair: seconds until they are mended, from a log; None: drawn from the kind's `repair`.
        """
        if kind.effect in ("slow", "corrupt"):
            self.env.process(self._wait_until_found(group, kind, luck))
            return
        if repair is None:
            repair = self._repairs[kind.name].quantile(luck.repair)
        # `luck.breaks` is uniform from 0 to 1, `kind.breaks` the share of failures that break nodes.
        broken = nodes if luck.breaks < kind.breaks else 0
        if kind.effect == "drain":
            self._leave(group, broken, repair, luck)
        else:
            self._stop(group, broken, repair, luck)

    def _wait_until_found(self, group: _Group, kind: Kind, luck: Luck) -> SimProcess:
        """Let a straggler slow all groups down, or wrong numbers go unseen, until they are found.

        Then the group leaves in order, and heals from the others. The model assumes that no wrong
        number has reached them. A job without other groups goes back to a checkpoint before its
        wrong numbers; another restart meanwhile has not mended them, unless from such a checkpoint.
        """
        if group.number not in self._training_groups:
            return  # A group that is away slows nobody down, and starts from the others' state.
        if kind.effect == "corrupt":
            yield from self._wait_until_numbers_are_found(group, kind, luck)
            return
        stops = group.stops
        self._slow_factors.setdefault(group.number, []).append(kind.factor)
        self._change_pace()
        yield self.env.timeout(kind.found_after)
        if group.stops != stops:
            return  # The group was stopped meanwhile, which has ended the straggler.
        self._slow_factors[group.number].remove(kind.factor)
        self._change_pace()
        if kind.leaves:
            self._leave(group, 0, 0.0, luck)

    def _wait_until_numbers_are_found(self, group: _Group, kind: Kind, luck: Luck) -> SimProcess:
        failure, since = object(), self.env.now
        self._wrong_since[failure] = (group.number, since)
        yield self.env.timeout(kind.found_after)
        if failure not in self._wrong_since:
            return  # The group has healed, or the job went back far enough.
        if group.number in self._training_groups or group.number in self._ready_groups:
            self._stop(group, 0, 0.0, luck, in_order=True, good_until=since)
        else:
            self._roll_back(since)  # The job is away, and starts from an older checkpoint.

    def _change_pace(self) -> None:
        """Let the rest of the step under way go on at the pace of the stragglers there are now."""
        pace = 1.0
        for factors in self._slow_factors.values():
            pace = max([pace, *factors])
        if self._is_step_under_way and self._exchange_begin is not None:
            rest = max(0.0, self._compute_end - self.env.now)
            longer = rest * (pace / self._pace - 1)
            self._compute_end += longer
            self._exchange_begin += longer
            self._step_due += longer
            self._step_end += longer
            if longer < 0:
                shortened, self._step_shortened = self._step_shortened, self.env.event()
                shortened.succeed()
        self._pace = pace

    def _maintain(self, maintenance: Maintenance) -> SimProcess:
        """At each interval, take away the nodes that follow those taken last time, round and round."""
        first, total = 0, self.candidate.groups * self.candidate.group_nodes
        while True:
            yield self.env.timeout(maintenance.every)
            num_nodes = min(maintenance.nodes, total)
            nodes = [(first + place) % total for place in range(num_nodes)]
            first = (nodes[-1] + 1) % total
            counts = Counter(node // self.candidate.group_nodes for node in nodes)
            for number, count in counts.items():
                self._leave(self.groups[number], count, maintenance.lasts, USUAL_LUCK)

    def _run_plan(self, kind: Kind, plan: Plan, seed: int) -> SimProcess:
        """Carry out a chaos plan as its runner does: the same shots, groups and limits."""
        rng = random.Random(f"{seed}/{kind.name}/luck")
        # A refused shot tries again in its own process, so that the next one is not late. The loop
        # waits too, because shots may be without end.
        for shot in shots(plan):
            self.env.process(self._inject_when_allowed(kind, plan, shot, Luck.draw(rng)))
            yield from self._wait_for_clock(plan.start_seconds + shot.time)

    def _inject_when_allowed(self, kind: Kind, plan: Plan, shot: Shot, luck: Luck) -> SimProcess:
        yield from self._wait_for_clock(plan.start_seconds + shot.time)
        due = self.env.now
        while True:
            answer = aim(shot, self._view(), plan.limits)
            if not isinstance(answer, Refusal):
                self._inject(kind, answer, luck)
                return
            if answer.final or self.env.now - due >= plan.limits.patience_seconds:
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

    def _inject(self, kind: Kind, injection: Injection, luck: Luck) -> None:
        effective_kind = with_effect_of(kind, injection.shot.fault)
        replicas = [target.replica for target in injection.targets]
        hit = [self.groups[replica] for replica in replicas if replica is not None]
        # The fault costs its group nothing, or its target is a lighthouse: no failure here.
        if effective_kind is None or not hit:
            return
        self.account.failures += 1
        for group in hit:
            self._hit_group(group, effective_kind, luck, 1)

    # Groups that go

    def _leave(self, group: _Group, broken: int, repair: float, luck: Luck) -> None:
        """Take a group away in order. One that trains finishes its step first; see `_stop`.

        A round is too long for that: the group loses its part of it.
        """
        stops = group.stops

        def stop() -> None:
            # A group that has died meanwhile does not leave any more. Its nodes do.
            if group.stops == stops or broken:
                self._stop(group, broken, repair, luck, in_order=True)

        is_in_step = self._is_step_under_way and group.number in self._training_groups
        if is_in_step and self.candidate.strategy != "rounds":
            self._leaves.append((group.number, stop))
        else:
            stop()

    def _stop(
        self,
        group: _Group,
        broken: int,
        repair: float,
        luck: Luck,
        *,
        in_order: bool = False,
        good_until: float | None = None,
    ) -> None:
        """Take a group away now, for whatever reason.

        Args:
            broken: nodes that it loses until they are mended; `repair` is how long that takes.
            in_order: nobody stalls.
            good_until: when its numbers became wrong; None if they are right. Checkpoints since
                then are worth nothing.
        """
        group.stops += 1
        if self._slow_factors.pop(group.number, None):
            self._change_pace()
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
        is_last = not self._training_groups and not self._ready_groups
        if not is_last:
            # It will heal from the others.
            for failure, (number, _) in list(self._wrong_since.items()):
                if number == group.number:
                    del self._wrong_since[failure]
        if holds_state and is_last:
            self._restart_from_checkpoint(good_until, in_order=in_order)
        if is_training:
            self._react_to_loss(luck, in_order=in_order)
        if not group.lacks:
            self.env.process(self._come_back(group, group.stops))
            return
        if group not in self._waiting_for_nodes:
            self._waiting_for_nodes.append(group)
        self._give_nodes()

    def _restart_from_checkpoint(self, good_until: float | None, *, in_order: bool) -> None:
        """Let the job, of which no group is left, go on from a checkpoint.

        A last group that leaves in order makes one before, unless its numbers are wrong.
        """
        if in_order and good_until is None and self.candidate.save_every:
            self._save()
            self.account.restarts += 1
        else:
            self._roll_back(math.inf if good_until is None else good_until)

    def _react_to_loss(self, luck: Luck, *, in_order: bool) -> None:
        """Let the others find out that a group is gone."""
        if not self._is_step_under_way:
            return
        candidate = self.candidate
        if len(self._training_groups) < candidate.least:
            self._is_step_under_way = False  # one interrupt is enough
            self._trainer.interrupt()
            return
        if in_order:
            return
        # Between the exchanges of rounds nobody waits for this group.
        is_noticed = candidate.strategy != "rounds" or self._is_exchange_under_way()
        if not is_noticed and not candidate.loses_step:
            return
        # The others notice when their exchange breaks: at its end, or now if that has passed.
        noticed = max(self.env.now, self._step_due)
        stall = candidate.costs.stall.quantile(luck.stall)
        self._step_end = max(self._step_end, noticed + stall)  # Stalls that overlap count once.
        if candidate.loses_step:
            self._is_step_lost = True
        else:
            self.account.votes += 1  # The exchange is repeated.

    def _is_exchange_under_way(self) -> bool:
        return self._exchange_begin is not None and self._exchange_begin <= self.env.now

    # Nodes

    def _repair_nodes(self, nodes: int, seconds: float) -> SimProcess:
        yield self.env.timeout(seconds)
        self._free_nodes += nodes
        self._give_nodes()

    def _give_nodes(self) -> None:
        """Give nodes to the groups that lack some, first come first served.

        A group that lacks none any more begins to come back.
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

    def _come_back(self, group: _Group, stops: int) -> SimProcess:
        yield self.env.timeout(self.candidate.costs.away.quantile(group.luck.away))
        if group.stops != stops:
            return
        if self.candidate.strategy == "rounds" and self._enough_groups is None:
            self._join(group)
            return
        self._ready_groups.add(group.number)
        there = len(self._training_groups) + len(self._ready_groups)
        enough = self._enough_groups
        if enough is not None and there >= self.candidate.least and not enough.triggered:
            enough.succeed()
