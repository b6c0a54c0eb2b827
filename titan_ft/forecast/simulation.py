# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulate one run of a job under failures, and account for each second of each replica group.

`choice` and `published` call `simulate` with a candidate (a strategy and a number of groups) and a
seed. simpy advances the simulated time from event to event. No thread is started.

A simulated run repeats these steps:

1. The groups that are ready join the training. If fewer than `Candidate.min_groups` train, the job
   waits for more.
2. The training groups make a step: they compute, exchange gradients, commit, and sometimes save a
   checkpoint. With strategy "rounds", a step of this module is a whole round of local steps.
3. Meanwhile failures hit groups. A group that dies stops at once, and the other groups stall at the
   end of the step. A group that leaves in order finishes the step first, and nobody stalls.
   A straggler slows down all groups. Wrong numbers have no effect until they are found.
4. A stopped group waits for nodes if it lost some, then restarts and heals, and is ready again.
5. If no group is left, the job returns to its last checkpoint.

The effective training time is the share of "useful" time. A committed step adds its usual duration
to this time, once for each group that contributed. `titan_ft.history.timing.goodput` measures real
runs by the same rule. A test writes a simulated run as events, and checks that both figures agree.

Terms:
- calm step: a step in which no failure happens and no group leaves or returns.
- luck: random numbers of a failure. Each one selects a cost from the distribution of that cost.
- clock of failures: the time by which failures come. With clock = "wall" it always runs. With
  clock = "training" it stops while groups stall, and while too few groups are there to train.
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
from titan_ft.forecast.lengths import Length
from titan_ft.forecast.scenario import FailureKind, Maintenance, to_length

TIME_CATEGORIES = {
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
"""The categories of an `Account`, each with its heading in tables and charts.

- useful: usual duration of committed steps. Its share is the effective training time.
- stall: the groups wait because another group has died.
- slower: time that committed steps took beyond their usual duration, because of stragglers, of
  absent groups, or of returning groups.
- exchange: the part of the gradient exchange that computing does not hide.
- checkpoints: training stands still for a save.
- lost: time of steps that were not committed, or that the return to a checkpoint undid.
- waiting: the group could train, but fewer than `min_groups` groups are there.
- away: the group restarts and heals.
- nodes: the group waits for nodes.
"""
_CATEGORIES_OF_STEPS = ("useful", "stall", "slower", "exchange", "checkpoints")
"""Categories that are counted at the end of each step. Training time in none of them is "lost"."""
POLL_SECONDS = 0.1
"""A chaos runner retries a refused fault after this time."""
MAX_CHECKPOINTS = 100_000
"""A run remembers only its newest checkpoints. It needs many: wrong numbers that are found late may
send the job back to any of them."""
SimProcess = Generator[simpy.Event, Any, None]
"""A process of simpy: a generator that yields each event for which it waits."""
OnCommit = Callable[[float, frozenset[int]], None]
"""Called at each commit with the simulated time and the groups that made the step."""


@dataclass
class Account:
    """The time of all groups in one simulated run, by category, and counts of events.

    Attributes:
        seconds: length of the run.
        groups: number of groups of the job.
    """

    seconds: float
    groups: int
    group_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(TIME_CATEGORIES, 0.0)
    )
    """Seconds summed over the groups, by category. All categories add up to seconds x groups."""
    steps: int = 0
    """Committed steps (rounds) that are in the job's state at the end of the run."""
    votes: int = 0
    """Attempted exchanges. A step whose exchange was repeated counts once for each attempt."""
    contributions: float = 0.0
    """Committed steps, summed over the groups that made them. A group that joined in the middle of
    a round adds the fraction of the round for which it was there."""
    failures: int = 0
    """Failures that hit at least one group. A failure on a node without a group does not count."""
    skipped: int = 0
    """Faults of a chaos plan that could not be injected in time."""
    restarts: int = 0
    """How many times no group was left."""

    @property
    def effective(self) -> float:
        """Return the effective training time as a share of all time, from 0 to 1."""
        return self.group_seconds["useful"] / (self.seconds * self.groups)

    def shares(self) -> dict[str, float]:
        """Return each category's share of all time."""
        total = self.seconds * self.groups
        return {name: seconds / total for name, seconds in self.group_seconds.items()}


@dataclass
class _Group:
    number: int
    state: str = "training"
    """Either "training" or the category to which the time of the group is added now."""
    state_since: float = 0.0
    """Simulated time at which the state began."""
    joined_at: float = 0.0
    """Simulated time at which the group last joined the training."""
    stop_count: int = 0
    """How many times the group was stopped. A simpy process that waits for something of this group
    remembers the count. After the wait, a higher count means that the group was stopped meanwhile.
    """
    missing_nodes: int = 0
    """Nodes that the group needs before it can restart."""
    luck: Luck = USUAL_LUCK
    """Luck of the last stop: it selects the costs of the group's return."""


class _Checkpoint(NamedTuple):
    """The time of a save, and the counts of the account to which a return to it goes back."""

    time: float
    useful_seconds: float
    contributions: float
    steps: int


@dataclass(frozen=True)
class _OrderlyLeave:
    """A request that a group leaves at the end of the step under way.

    A group may get two requests in one step: one of a drain, one of a maintenance.
    """

    group: _Group
    stop_count: int
    """`_Group.stop_count` at the time of the request."""
    broken_nodes: int
    repair_seconds: float
    luck: Luck


@dataclass(eq=False)
class _WrongNumbers:
    """Wrong numbers in the state of a group, not found yet."""

    group: int
    since: float


def simulate(
    candidate: Candidate,
    seed: int,
    seconds: float | None = None,
    on_commit: OnCommit | None = None,
) -> Account:
    """Return the account of one simulated run.

    Args:
        seed: decides all random choices.
        seconds: length of the run; None takes the scenario's days.
        on_commit: called at each commit. None makes the simulation faster: it jumps over all calm
            steps up to the next event. The account is the same within rounding: a failure at the
            very end of a step may fall into this step or into the next one.
    """
    return _Simulation(candidate, seed, seconds or candidate.scenario.seconds, on_commit).run()


class _Simulation:
    """One run, made by `simulate`.

    The simulation consists of simpy processes, which act one at a time. `_train` makes the steps.
    `_cause_failures`, `_run_plan` and `_maintain` stop groups. Each stop starts processes that
    return the repaired nodes and, later, the group.

    A step has these times. Groups that have returned, and groups that are absent, delay its exchange.

        begin    _compute_end    _exchange_begin    _planned_end    _stalled_end
          |  compute   |     delays     |    exchange     |     stalls     |

    The save that may follow has these:

        begin    _planned_end    _stalled_end
          |    save    |    stalls    |
    """

    def __init__(
        self, candidate: Candidate, seed: int, seconds: float, on_commit: OnCommit | None
    ) -> None:
        self.candidate = candidate
        self.scenario = candidate.scenario
        self._on_commit = on_commit
        self.account = Account(seconds, candidate.groups)
        self.env = simpy.Environment()
        self.groups = [_Group(number) for number in range(candidate.groups)]
        self._training_groups = dict.fromkeys(range(candidate.groups), True)
        """The groups that make the step under way. The dict is an ordered set: sums over the groups
        then have one order, so that equal seeds give equal results."""
        self._ready_groups: set[int] = set()
        """Groups that hold the job's state and wait for the next step to begin."""
        self._training_group_seconds = 0.0
        """Seconds that groups spent in the state "training", summed over the groups."""
        self._free_nodes = candidate.spares or 0
        """Not used if `candidate.spares` is None: then there is always another node."""
        self._waiting_for_nodes: deque[_Group] = deque()
        self._slow_factors: dict[int, list[float]] = {}
        """For each group with stragglers, the factor of each straggler."""
        self._slowdown = 1.0
        """The factor of the slowest straggler of all groups; 1 without a straggler."""
        # A trace or a chaos plan may contain faults that make stragglers.
        self._may_have_stragglers = any(
            kind.effect == "slow" or kind.source in ("trace", "chaos")
            for kind in self.scenario.failures
        )
        self._step_shortened = self.env.event()
        """Succeeds when a straggler ends, and the step under way will end sooner than planned."""
        self._orderly_leaves: list[_OrderlyLeave] = []
        self._wrong_numbers: list[_WrongNumbers] = []
        self._clock_stopped_seconds = 0.0
        """How long the clock of failures has been stopped, without a stop that still lasts."""
        self._clock_stopped_at: float | None = None
        """Simulated time at which the clock of failures stopped; None while it runs."""
        self._clock_started = self.env.event()
        self._enough_groups: simpy.Event | None = None
        """Succeeds when enough groups are there again; None while the job trains."""
        self._is_step_under_way = False
        self._is_saving = False
        """True while the step under way has been committed and its save goes on."""
        self._is_step_lost = False
        """True if a death has cost the others the step under way (`Candidate.loses_step`)."""
        self._compute_end = 0.0
        """Simulated time at which the step under way has been computed."""
        self._exchange_begin = 0.0
        """Simulated time at which the exchange of the step under way begins."""
        self._planned_end = 0.0
        """Simulated time at which the step (or save) under way ends if nothing stalls it."""
        self._stalled_end = 0.0
        """Simulated time at which it ends with the stalls known so far."""
        begin_of_run = _Checkpoint(0.0, 0.0, 0.0, 0)
        self._checkpoints = deque([begin_of_run])
        self._unsaved_steps = 0
        self._repair_lengths: dict[str, Length] = {}
        for kind in self.scenario.failures:
            self._repair_lengths[kind.name] = to_length(kind.repair, candidate.gpus)
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
            # Add the time since the group's last change of state.
            self._change_state(group, group.state)
        # Training time that no step has counted was spent for nothing.
        spent = account.group_seconds
        counted = math.fsum(spent[name] for name in _CATEGORIES_OF_STEPS)
        spent["lost"] = self._training_group_seconds - counted
        total = account.seconds * account.groups
        assert spent["lost"] >= -1e-9 * total, "more time was counted than groups trained"
        spent["lost"] = max(0.0, spent["lost"])
        summed = math.fsum(spent.values())
        assert math.isclose(summed, total, rel_tol=1e-9), "the time of the groups does not add up"
        return account

    def _change_state(self, group: _Group, state: str) -> None:
        """Add the time since the last change to the group's old state, and enter the new state."""
        spent = self.env.now - group.state_since
        if group.state == "training":
            self._training_group_seconds += spent
        else:
            self.account.group_seconds[group.state] += spent
        group.state = state
        group.state_since = self.env.now

    # Training

    def _train(self) -> SimProcess:
        late_seconds = 0.0
        while True:
            # Groups that joined before a wait for more groups still make the first step late.
            late_seconds = max(late_seconds, self._let_ready_groups_join())
            if len(self._training_groups) < self.candidate.min_groups:
                yield from self._wait_for_groups()
                continue
            # A step with a return is not calm, and `on_commit` must be called for each single step.
            if late_seconds == 0.0 and self._on_commit is None:
                yield from self._jump_over_calm_steps()
            self._is_step_under_way = True
            # `_react_to_loss` interrupts the step if too few groups are left. The step is then lost.
            with contextlib.suppress(simpy.Interrupt):
                yield from self._make_step(late_seconds)
            self._is_step_under_way = False
            late_seconds = 0.0
            yield from self._let_groups_leave()

    def _let_ready_groups_join(self) -> float:
        """Let the ready groups join; return how many seconds later the next step ends for that."""
        late_seconds = 0.0
        for number in sorted(self._ready_groups):
            group = self.groups[number]
            self._join(group)
            # In rounds a returning group delays nobody: it joins while the others train locally.
            if self.candidate.strategy != "rounds":
                rejoin_seconds = self.candidate.costs.rejoin.quantile(group.luck.rejoin)
                late_seconds = max(late_seconds, rejoin_seconds)
        self._ready_groups.clear()
        return late_seconds

    def _join(self, group: _Group) -> None:
        group.joined_at = self.env.now
        self._training_groups[group.number] = True
        self._change_state(group, "training")

    def _let_groups_leave(self) -> SimProcess:
        """Stop the groups that were asked to leave during the step that has just ended.

        If no group stays that holds the job's state, the leaving groups save a checkpoint first.
        `_restart_job` records this checkpoint.
        """
        leaves = self._orderly_leaves
        self._orderly_leaves = []
        if not leaves:
            return
        leaving = {leave.group.number for leave in leaves}
        staying = self._ready_groups | (self._training_groups.keys() - leaving)
        if not staying and self.candidate.save_every:
            yield self.env.timeout(self.candidate.save)
            num_groups = len(self._training_groups)
            self.account.group_seconds["checkpoints"] += num_groups * self.candidate.save
        for leave in leaves:
            self._carry_out_leave(leave)

    def _wait_for_groups(self) -> SimProcess:
        """Wait until at least `min_groups` groups are there. Stop the clock of failures meanwhile."""
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
        """Return how long a step takes with the stragglers and the absent groups of this moment."""
        candidate = self.candidate
        absent = candidate.groups - len(self._training_groups)
        compute_seconds = candidate.step * self._slowdown
        return compute_seconds + candidate.exchange + candidate.costs.drag * absent

    def _jump_over_calm_steps(self) -> SimProcess:
        """Advance the time by all calm steps that end before the next event of any process.

        `_make_step` then makes the step in which that event happens. It also makes each step that
        is followed by a save, unless the jump consists of whole intervals between two saves.
        """
        candidate = self.candidate
        step_seconds = self._step_seconds()
        begin = self.env.now
        next_event = self.env.peek()  # simulated time of the next event
        available = next_event - begin
        if candidate.save_every and self._unsaved_steps == 0:
            interval = candidate.save_every * step_seconds + candidate.save
            # Leave one interval out, so that rounding cannot carry the jump past the event.
            intervals = int(available / interval) - 1
            if intervals > 0:
                yield self.env.timeout(intervals * interval)
                self._count_calm_steps(intervals * candidate.save_every, step_seconds)
                save_seconds = intervals * candidate.save
                num_groups = len(self._training_groups)
                self.account.group_seconds["checkpoints"] += save_seconds * num_groups
                self._save()
                return
        steps = math.ceil(available / step_seconds) - 1
        # Rounding must not carry the end of a step to the event: the event would then hit the jump,
        # and all its steps would be lost.
        while begin + steps * step_seconds >= next_event:
            steps -= 1
        if candidate.save_every:
            steps_before_save = candidate.save_every - self._unsaved_steps - 1
            steps = min(steps, steps_before_save)
        if steps > 0:
            yield self.env.timeout(steps * step_seconds)
            self._count_calm_steps(steps, step_seconds)

    def _count_calm_steps(self, steps: int, step_seconds: float) -> None:
        extra_seconds = steps * (step_seconds - self.candidate.step - self.candidate.exchange)
        self.account.votes += steps
        self._count_commits(steps, extra_seconds, len(self._training_groups))

    def _make_step(self, late_seconds: float) -> SimProcess:
        """Make one step, and the save that is due after it. See the times in the class docstring.

        Args:
            late_seconds: how much later the step ends because groups have returned.

        Raises:
            simpy.Interrupt: too few groups are left; the step, or its save, does not take place.
        """
        candidate = self.candidate
        spent = self.account.group_seconds
        begin = self.env.now
        end = begin + self._step_seconds() + late_seconds
        self._compute_end = begin + candidate.step * self._slowdown
        self._exchange_begin = end - candidate.exchange
        self._is_saving = False
        self._is_step_lost = False
        self.account.votes += 1
        stalled_seconds = yield from self._wait_with_stalls(end)
        present = self._count_present_groups(begin)
        spent["stall"] += present * stalled_seconds
        if self._is_step_lost:
            return  # `run` counts the time of this step as "lost", because no category has it.
        usual_seconds = candidate.step + candidate.exchange
        self._count_commits(1, self._planned_end - begin - usual_seconds, present)
        if candidate.save_every and self._unsaved_steps >= candidate.save_every:
            save_begin = self.env.now
            self._is_saving = True
            stalled_seconds = yield from self._wait_with_stalls(save_begin + candidate.save)
            present = self._count_present_groups(save_begin)
            spent["checkpoints"] += present * candidate.save
            spent["stall"] += present * stalled_seconds
            self._save()

    def _wait_with_stalls(self, end: float) -> Generator[simpy.Event, Any, float]:
        """Wait until `end`, then for the stalls of the groups that died; return their seconds.

        Other processes change the ends during the wait: a straggler that comes or goes moves
        `_planned_end`, and a death moves `_stalled_end`. The clock of failures stops in stalls.
        """
        self._planned_end = end
        self._stalled_end = end
        while self.env.now < self._planned_end:
            planned_end: simpy.Event = self.env.timeout(self._planned_end - self.env.now)
            if self._may_have_stragglers:
                planned_end |= self._step_shortened
            yield planned_end
        if self._stalled_end > self._planned_end:
            self._stop_clock()
            # An interrupt may end the wait. A clock that never starts would hold back all failures.
            try:
                while self.env.now < self._stalled_end:
                    yield self.env.timeout(self._stalled_end - self.env.now)
            finally:
                self._start_clock()
        return self._stalled_end - self._planned_end

    def _count_present_groups(self, begin: float) -> float:
        """Return how many groups took part from `begin` until now.

        In a round, a group that joined after `begin` counts as the fraction of the time since then.
        """
        seconds = self.env.now - begin
        if self.candidate.strategy != "rounds" or seconds == 0.0:
            return len(self._training_groups)
        present = 0.0
        for number in self._training_groups:
            since = max(begin, self.groups[number].joined_at)
            present += (self.env.now - since) / seconds
        return present

    def _count_commits(self, steps: int, extra_seconds: float, present: float) -> None:
        """Count committed steps, and their time without stalls and saves.

        Args:
            extra_seconds: time of all these steps together beyond `step` + `exchange` of each.
            present: number of groups that made the steps.
        """
        candidate = self.candidate
        account = self.account
        spent = account.group_seconds
        account.steps += steps
        account.contributions += steps * present
        # Calm steps of a record vary. The report counts at most their median (`usual_step`) as
        # effective, so the difference to their mean (`step`) is "slower" time here as well.
        spent["useful"] += present * steps * candidate.usual_step
        beyond_usual = steps * (candidate.step - candidate.usual_step)
        # Rounding may make the extra time negative by a tiny amount.
        spent["slower"] += present * (beyond_usual + max(0.0, extra_seconds))
        spent["exchange"] += present * steps * candidate.exchange
        self._unsaved_steps += steps
        if self._on_commit is not None:
            self._on_commit(self.env.now, frozenset(self._training_groups))

    def _save(self) -> None:
        account = self.account
        useful_seconds = account.group_seconds["useful"]
        self._checkpoints.append(
            _Checkpoint(self.env.now, useful_seconds, account.contributions, account.steps)
        )
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            self._checkpoints.popleft()
        self._unsaved_steps = 0

    def _return_to_checkpoint(self, latest: float) -> None:
        """Return to the newest checkpoint that was saved at the time `latest` or earlier.

        The useful time since that checkpoint is removed, so that `run` counts it as "lost".
        """
        while len(self._checkpoints) > 1 and self._checkpoints[-1].time > latest:
            self._checkpoints.pop()
        checkpoint = self._checkpoints[-1]
        account = self.account
        account.group_seconds["useful"] = checkpoint.useful_seconds
        account.contributions = checkpoint.contributions
        account.steps = checkpoint.steps
        account.restarts += 1
        self._unsaved_steps = 0
        # Wrong numbers that began before the checkpoint was saved are in the checkpoint. The return
        # removes only the later ones.
        self._wrong_numbers = [
            wrong for wrong in self._wrong_numbers if wrong.since < checkpoint.time
        ]

    # The clock of failures

    def _stop_clock(self) -> None:
        self._clock_stopped_at = self.env.now

    def _start_clock(self) -> None:
        assert self._clock_stopped_at is not None, "the clock runs"
        self._clock_stopped_seconds += self.env.now - self._clock_stopped_at
        self._clock_stopped_at = None
        started = self._clock_started
        self._clock_started = self.env.event()
        started.succeed()

    def _wait_for_clock(self, clock_seconds: float) -> SimProcess:
        """Wait until the clock of failures shows `clock_seconds`.

        A clock = "wall" shows the simulated time, whether it was stopped or not.
        """
        if self.scenario.clock == "wall":
            yield self.env.timeout(max(0.0, clock_seconds - self.env.now))
            return
        # The clock may be stopped during each wait, so look again after it.
        while True:
            due = clock_seconds + self._clock_stopped_seconds
            if self._clock_stopped_at is not None:
                yield self._clock_started
            elif self.env.now < due:
                yield self.env.timeout(due - self.env.now)
            else:
                return

    # Failures

    def _cause_failures(self, seed: int) -> SimProcess:
        for failure in draw_failures(self.scenario, seed, self.account.seconds):
            yield from self._wait_for_clock(failure.time)
            self._hit_groups(failure)

    def _hit_groups(self, failure: Failure) -> None:
        nodes_by_group = groups_hit(failure, self.candidate.groups, self.candidate.group_nodes)
        if not nodes_by_group:
            return
        self.account.failures += 1
        for number, nodes in nodes_by_group.items():
            group = self.groups[number]
            self._hit_group(group, failure.kind, failure.luck, nodes, failure.repair_seconds)

    def _hit_group(
        self,
        group: _Group,
        kind: FailureKind,
        luck: Luck,
        nodes: int,
        repair_seconds: float | None = None,
    ) -> None:
        """Apply the effect of a failure to one group.

        Args:
            nodes: how many nodes of this group are hit.
            repair_seconds: how long their repair takes, from a log; None draws it from
                `kind.repair`.
        """
        if kind.effect == "slow":
            self.env.process(self._slow_down(group, kind, luck))
            return
        if kind.effect == "corrupt":
            self.env.process(self._corrupt(group, kind, luck))
            return
        if repair_seconds is None:
            repair_seconds = self._repair_lengths[kind.name].quantile(luck.repair)
        # `luck.breaks` is uniform from 0 to 1, so it is below the share `kind.breaks` that often.
        broken_nodes = nodes if luck.breaks < kind.breaks else 0
        if kind.effect == "drain":
            self._leave(group, broken_nodes, repair_seconds, luck)
        else:
            self._stop(group, broken_nodes, repair_seconds, luck)

    def _slow_down(self, group: _Group, kind: FailureKind, luck: Luck) -> SimProcess:
        """Let a straggler slow down all groups for `kind.found_after` seconds.

        Then the group of the straggler leaves in order, if `kind.leaves`.
        """
        if group.number not in self._training_groups:
            return  # A group that is away slows down nobody, and a restart ends the straggler.
        stop_count = group.stop_count
        self._slow_factors.setdefault(group.number, []).append(kind.factor)
        self._update_slowdown()
        yield self.env.timeout(kind.found_after)
        if group.stop_count != stop_count:
            return  # The group was stopped meanwhile, and `_stop` has ended the straggler.
        self._slow_factors[group.number].remove(kind.factor)
        self._update_slowdown()
        if kind.leaves:
            self._leave(group, 0, 0.0, luck)

    def _corrupt(self, group: _Group, kind: FailureKind, luck: Luck) -> SimProcess:
        """Let a group compute wrong numbers until they are found after `kind.found_after` seconds.

        Then the group stops, and heals from the other groups. The model assumes that no wrong
        number has reached the other groups. If there is no other group, the job returns to a
        checkpoint from before the wrong numbers. An earlier restart ends the wrong numbers only if
        it starts from such a checkpoint.
        """
        if group.number not in self._training_groups:
            return  # A group that is away takes its state from the other groups when it returns.
        wrong = _WrongNumbers(group.number, self.env.now)
        self._wrong_numbers.append(wrong)
        yield self.env.timeout(kind.found_after)
        if wrong not in self._wrong_numbers:
            return  # The group has healed, or the job has returned to a right checkpoint.
        if group.number in self._training_groups or group.number in self._ready_groups:
            self._stop(group, 0, 0.0, luck, in_order=True, wrong_since=wrong.since)
        else:
            # The job restarts just now from a checkpoint with the wrong numbers: take an older one.
            self._return_to_checkpoint(wrong.since)

    def _update_slowdown(self) -> None:
        """Apply a change of the stragglers, also to the remaining computing of the step."""
        slowdown = 1.0
        for factors in self._slow_factors.values():
            slowdown = max([slowdown, *factors])
        if self._is_step_under_way and not self._is_saving:
            remaining_seconds = max(0.0, self._compute_end - self.env.now)
            extra_seconds = remaining_seconds * (slowdown / self._slowdown - 1)
            self._compute_end += extra_seconds
            self._exchange_begin += extra_seconds
            self._planned_end += extra_seconds
            self._stalled_end += extra_seconds
            if extra_seconds < 0:
                # `_wait_with_stalls` waits for the former end: wake it up. A later end needs no
                # signal, because that loop waits again.
                shortened = self._step_shortened
                self._step_shortened = self.env.event()
                shortened.succeed()
        self._slowdown = slowdown

    def _maintain(self, maintenance: Maintenance) -> SimProcess:
        """Take nodes away at each interval, in the order of their numbers, again from 0 at the end.

        A group whose nodes are taken away leaves in order.
        """
        total = self.candidate.groups * self.candidate.group_nodes
        num_nodes = min(maintenance.nodes, total)
        first = 0
        while True:
            yield self.env.timeout(maintenance.every)
            nodes = [(first + offset) % total for offset in range(num_nodes)]
            first = (nodes[-1] + 1) % total
            nodes_by_group = Counter(node // self.candidate.group_nodes for node in nodes)
            for number, count in nodes_by_group.items():
                self._leave(self.groups[number], count, maintenance.lasts, USUAL_LUCK)

    def _run_plan(self, kind: FailureKind, plan: Plan, seed: int) -> SimProcess:
        """Carry out a chaos plan with the shots, the choice of groups and the limits of its runner.

        A shot is one fault that the plan wants injected at a certain time.
        """
        rng = random.Random(f"{seed}/{kind.name}/luck")
        for shot in shots(plan):
            # Each shot has its own process: a refused shot is retried, and must not delay the next.
            self.env.process(self._inject_when_allowed(kind, plan, shot, Luck.draw(rng)))
            # A plan may have shots without end, so create the next process only after this shot.
            yield from self._wait_for_clock(plan.start_seconds + shot.time)

    def _inject_when_allowed(
        self, kind: FailureKind, plan: Plan, shot: Shot, luck: Luck
    ) -> SimProcess:
        yield from self._wait_for_clock(plan.start_seconds + shot.time)
        first_try = self.env.now
        while True:
            answer = aim(shot, self._view(), plan.limits)
            if not isinstance(answer, Refusal):
                self._inject(kind, answer, luck)
                return
            waited_seconds = self.env.now - first_try
            if answer.final or waited_seconds >= plan.limits.patience_seconds:
                self.account.skipped += 1
                return
            yield self.env.timeout(POLL_SECONDS)

    def _view(self) -> View:
        """Return the state of the groups as a chaos runner sees it."""
        groups = {}
        for number in range(self.candidate.groups):
            is_up = number in self._training_groups
            # A fault of any rank has the same effect on a simulated group, so one rank will do.
            groups[number] = GroupView(number, num_ranks=1, up=is_up)
        # A simulated job meets every need of a fault.
        return View(groups, frozenset(Need))

    def _inject(self, kind: FailureKind, injection: Injection, luck: Luck) -> None:
        effective_kind = with_effect_of(kind, injection.shot.fault)
        if effective_kind is None:
            return  # The group trains on, so this fault is no failure.
        # A target without a group is a lighthouse, which the simulation does not have.
        slots = [target.replica for target in injection.targets]
        hit = [self.groups[slot] for slot in slots if slot is not None]
        if not hit:
            return
        self.account.failures += 1
        for group in hit:
            self._hit_group(group, effective_kind, luck, 1)

    # Groups that stop

    def _leave(self, group: _Group, broken_nodes: int, repair_seconds: float, luck: Luck) -> None:
        """Let a group leave in order: a training group finishes the step under way first.

        A round is too long to be finished. The group leaves at once, and its work in the round is
        lost.
        """
        leave = _OrderlyLeave(group, group.stop_count, broken_nodes, repair_seconds, luck)
        is_in_step = self._is_step_under_way and group.number in self._training_groups
        if is_in_step and self.candidate.strategy != "rounds":
            self._orderly_leaves.append(leave)
        else:
            self._carry_out_leave(leave)

    def _carry_out_leave(self, leave: _OrderlyLeave) -> None:
        has_died_meanwhile = leave.group.stop_count != leave.stop_count
        # A group that has died does not leave again. But nodes in maintenance are still taken away.
        if has_died_meanwhile and not leave.broken_nodes:
            return
        self._stop(leave.group, leave.broken_nodes, leave.repair_seconds, leave.luck, in_order=True)

    def _stop(
        self,
        group: _Group,
        broken_nodes: int,
        repair_seconds: float,
        luck: Luck,
        *,
        in_order: bool = False,
        wrong_since: float | None = None,
    ) -> None:
        """Stop a group now, and start its way back.

        Args:
            broken_nodes: nodes that the group loses for `repair_seconds`.
            in_order: the group leaves in order, so that the others do not stall.
            wrong_since: time at which the numbers of the group became wrong; None if no wrong
                numbers have been found. The job cannot use a checkpoint that was saved later.
        """
        group.stop_count += 1
        if self._slow_factors.pop(group.number, None):
            self._update_slowdown()
        group.luck = luck
        was_training = group.number in self._training_groups
        held_state = was_training or group.number in self._ready_groups
        self._training_groups.pop(group.number, None)
        self._ready_groups.discard(group.number)
        # With spares = None there is always another node, and no group waits for one.
        if self.candidate.spares is not None and broken_nodes:
            group.missing_nodes += broken_nodes
            self.env.process(self._repair_nodes(broken_nodes, repair_seconds))
        self._change_state(group, "nodes" if group.missing_nodes else "away")
        # Both training and ready groups hold the job's state.
        is_state_gone = not self._training_groups and not self._ready_groups
        if not is_state_gone:
            # The group will copy the state of another group, and loses its wrong numbers by that.
            self._wrong_numbers = [
                wrong for wrong in self._wrong_numbers if wrong.group != group.number
            ]
        if held_state and is_state_gone:
            self._restart_job(wrong_since, in_order=in_order)
        if was_training:
            self._react_to_loss(luck, in_order=in_order)
        if not group.missing_nodes:
            self.env.process(self._come_back(group, group.stop_count))
            return
        if group not in self._waiting_for_nodes:
            self._waiting_for_nodes.append(group)
        self._distribute_free_nodes()

    def _restart_job(self, wrong_since: float | None, *, in_order: bool) -> None:
        """Set the job, of which no group is left, to the checkpoint from which it will start.

        A last group that leaves in order has saved a new checkpoint. A last group whose wrong
        numbers have been found has not.
        """
        if wrong_since is not None:
            self._return_to_checkpoint(wrong_since)
        elif in_order and self.candidate.save_every:
            self._save()
            self.account.restarts += 1
        else:
            self._return_to_checkpoint(math.inf)

    def _react_to_loss(self, luck: Luck, *, in_order: bool) -> None:
        """Apply the loss of a training group to the step under way of the other groups."""
        if not self._is_step_under_way:
            return
        candidate = self.candidate
        if len(self._training_groups) < candidate.min_groups:
            # Reset the flag now: another loss at the same time must not interrupt `_train` again,
            # which would end the simulation.
            self._is_step_under_way = False
            self._trainer.interrupt()
            return
        if in_order:
            return
        # Between two exchanges of rounds nobody waits for this group.
        others_wait = candidate.strategy != "rounds" or self._is_exchange_under_way()
        if not others_wait and not candidate.loses_step:
            return
        # The others notice the death when their exchange fails: at the planned end of the step. If
        # that has passed, they are in a stall of another death, and notice this one now.
        noticed_at = max(self.env.now, self._planned_end)
        stall_seconds = candidate.costs.stall.quantile(luck.stall)
        # Stalls that overlap count once.
        self._stalled_end = max(self._stalled_end, noticed_at + stall_seconds)
        if candidate.loses_step:
            self._is_step_lost = True
        else:
            self.account.votes += 1  # The other groups repeat the exchange.

    def _is_exchange_under_way(self) -> bool:
        return not self._is_saving and self._exchange_begin <= self.env.now

    # Nodes and groups that return

    def _repair_nodes(self, nodes: int, seconds: float) -> SimProcess:
        yield self.env.timeout(seconds)
        self._free_nodes += nodes
        self._distribute_free_nodes()

    def _distribute_free_nodes(self) -> None:
        """Give free nodes to the groups that need some, in the order in which they began to wait.

        A group that has all its nodes begins to come back.
        """
        while self._waiting_for_nodes:
            group = self._waiting_for_nodes[0]
            given = min(self._free_nodes, group.missing_nodes)
            self._free_nodes -= given
            group.missing_nodes -= given
            if group.missing_nodes:
                return
            self._waiting_for_nodes.popleft()
            self._change_state(group, "away")
            self.env.process(self._come_back(group, group.stop_count))

    def _come_back(self, group: _Group, stop_count: int) -> SimProcess:
        """Restart and heal a group; then let it join, or be ready for the next step.

        Args:
            stop_count: `_Group.stop_count` of the stop after which the group comes back.
        """
        yield self.env.timeout(self.candidate.costs.away.quantile(group.luck.away))
        if group.stop_count != stop_count:
            return  # The group was stopped again, and that stop has started another return.
        if self.candidate.strategy == "rounds" and self._enough_groups is None:
            self._join(group)  # in the middle of the round
            return
        self._ready_groups.add(group.number)
        if self._enough_groups is None or self._enough_groups.triggered:
            return
        num_groups = len(self._training_groups) + len(self._ready_groups)
        if num_groups >= self.candidate.min_groups:
            self._enough_groups.succeed()
