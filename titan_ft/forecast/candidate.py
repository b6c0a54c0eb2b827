# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A candidate: one strategy with one shape, as numbers; and what it costs by closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from titan_ft.config import ConfigError
from titan_ft.forecast.failures import mtbf_of
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.scenario import DAY, Groups, Scenario, Strategy, to_length

MAX_INTERVAL = 7 * DAY
"""The best time between saves is never longer: what is so rare that it asks for more is not known so well."""
NOTHING = Constant(0.0)
ENVELOPE = 0.25
"""Pressure below which the closed forms are within 1 % of the simulation; see `pressure`."""
BEYOND = 1.5
"""A record says nothing of a pressure that is so many times its own."""


@dataclass(frozen=True)
class Costs:
    """What a failure costs, in seconds."""

    stall: Length = NOTHING
    away: Length = NOTHING
    rejoin: Length = NOTHING
    drag: float = 0.0
    """By how much each group that is away makes every step longer."""


@dataclass(frozen=True)
class Candidate:
    """A job that restarts from checkpoints is one of one group, whose step is the interval between them.

    Attributes:
        step: of all groups without failures; of rounds, of a whole round.
        exchange: what a step takes beyond that, because of the exchange that nothing hides.
        save_every: steps between saves; 0 for none.
        group_nodes: nodes of a group.
    """

    scenario: Scenario
    strategy: Strategy
    groups: int
    group_nodes: int
    step: float
    costs: Costs
    least: int = 1
    exchange: float = 0.0
    save: float = 0.0
    save_every: int = 0
    loses: bool = False
    bounded: bool = False
    """True if sizes say that a group fits its GPUs, and what the exchange takes."""
    beyond: float = 0.0
    """How many times the record's pressure; 0 without a record, or within it."""

    @property
    def spares(self) -> int | None:
        return self.scenario.cluster.spare_nodes

    @property
    def gpus(self) -> int:
        """Return the GPUs of a group."""
        return self.group_nodes * self.scenario.cluster.gpus_per_node

    @property
    def paid_gpus(self) -> int:
        cluster = self.scenario.cluster
        return cluster.gpus + (self.spares or 0) * cluster.gpus_per_node

    @property
    def value(self) -> float:
        """Return what a token of it is worth, of one of synchronous training; see `Rounds`."""
        rounds = self.scenario.rounds
        return rounds.value_of_a_token if self.strategy == "rounds" and rounds is not None else 1.0

    @property
    def cost_factor(self) -> float:
        """Return GPUs that are paid for each one of the cluster."""
        return self.paid_gpus / self.scenario.cluster.gpus

    def describe(self) -> str:
        """Return its name in tables."""
        if self.strategy == "restart":
            return "restart from checkpoints"
        rounds = self.scenario.rounds
        steps = f", rounds of {rounds.steps}" if self.strategy == "rounds" and rounds is not None else ""
        return f"{self.groups} groups of {self.gpus:,}{steps}"


def make_candidates(scenario: Scenario, measured: Measured | None = None) -> list[Candidate]:
    """Return the candidates of a case, one for each of its strategies.

    Raises:
        ConfigError: a cost of the groups is neither in the scenario nor in a record.
    """
    return [_make(scenario, strategy, measured) for strategy in scenario.strategies]


def _make(scenario: Scenario, strategy: Strategy, measured: Measured | None) -> Candidate:
    job, checkpoint = scenario.job, scenario.checkpoint
    nodes, per_node = scenario.cluster.nodes, scenario.cluster.gpus_per_node
    save = checkpoint.save if checkpoint is not None else 0.0
    if strategy == "restart":
        assert scenario.restart is not None, "checked when the scenario was read"
        recover = to_length("restart.recover", scenario.restart.recover, scenario.cluster.gpus)
        return with_saves(Candidate(scenario, strategy, 1, nodes, job.step, Costs(away=recover), save=save))
    assert scenario.groups is not None, "checked when the scenario was read"
    group_nodes = nodes // job.groups
    costs = _costs(scenario.groups, group_nodes * per_node, measured)
    step, exchange = job.step, 0.0
    if strategy == "rounds" and scenario.rounds is not None:
        step, exchange = job.step * scenario.rounds.steps, scenario.rounds.exchange
    candidate = Candidate(
        scenario,
        strategy,
        job.groups,
        group_nodes,
        step,
        costs,
        job.min_replica_size,
        exchange,
        save=save,
        loses=scenario.groups.loses,
    )
    candidate = with_saves(candidate)
    if measured is None or not measured.pressure or not _is_measured(costs, measured):
        return candidate
    times = pressure(candidate) / measured.pressure
    return replace(candidate, beyond=times if times > BEYOND else 0.0)


def _is_measured(costs: Costs, measured: Measured) -> bool:
    """True if a cost comes from the record."""
    return costs.stall is measured.stall or costs.away is measured.away


def _costs(given: Groups, gpus: int, measured: Measured | None) -> Costs:
    lengths: dict[str, Length] = {}
    for name in ("stall", "away", "rejoin"):
        amount = getattr(given, name)
        known = None if measured is None else getattr(measured, name)
        if amount is not None:
            lengths[name] = to_length(f"groups.{name}", amount, gpus)
        elif known is not None:
            lengths[name] = known
        elif name == "rejoin":
            lengths[name] = Constant(0.0)
        else:
            raise ConfigError(f"groups.{name} must be set, got nothing; give it, or a run that has it: --from RUN_DIR")
    drag = given.drag
    if drag is None:
        drag = 0.0 if measured is None else measured.drag
    return Costs(lengths["stall"], lengths["away"], lengths["rejoin"], drag)


def with_saves(candidate: Candidate) -> Candidate:
    """Return the candidate with its saves at the scenario's interval, or at the best one for what loses the state."""
    checkpoint = candidate.scenario.checkpoint
    if checkpoint is None:
        return candidate
    is_restart = candidate.strategy == "restart"
    rate = stop_rate(candidate) if is_restart else lost_state_rate(candidate)
    if checkpoint.interval != "best":
        interval = float(checkpoint.interval)
    else:
        interval = min(MAX_INTERVAL, best_interval(1 / rate, candidate.save)) if rate else MAX_INTERVAL
    if is_restart:
        return replace(candidate, step=interval, save_every=1)
    return replace(candidate, save_every=max(1, round(interval / candidate.step)))


# Rates, per second


def group_rate(candidate: Candidate) -> float:
    """Return how often a failure takes away some group, but not the whole job."""
    return sum(1 / mtbf_of(kind, candidate.scenario) for kind in candidate.scenario.failures if kind.scope != "job")


def stall_rate(candidate: Candidate) -> float:
    """Return how often a group stops without notice; a straggler or a corrupt group that was found leaves in order."""
    kinds = [kind for kind in candidate.scenario.failures if kind.scope != "job" and kind.effect == "stop"]
    return sum(1 / mtbf_of(kind, candidate.scenario) for kind in kinds)


def job_rate(candidate: Candidate) -> float:
    """Return how often a failure takes the whole job away at once."""
    return sum(1 / mtbf_of(kind, candidate.scenario) for kind in candidate.scenario.failures if kind.scope == "job")


def stop_rate(candidate: Candidate) -> float:
    return group_rate(candidate) + job_rate(candidate)


def lost_state_rate(candidate: Candidate) -> float:
    """Return how often no group is left: all hit at once, or the last one while the others are away."""
    rate, others = group_rate(candidate), candidate.groups - 1
    away = -math.expm1(-rate / candidate.groups * candidate.costs.away.mean)
    return job_rate(candidate) + rate * away**others


def pressure(candidate: Candidate) -> float:
    """Return the share of the time that failures take if none of their costs overlap."""
    costs = candidate.costs
    late = stall_rate(candidate) * costs.stall.mean + group_rate(candidate) * costs.rejoin.mean
    return late + group_rate(candidate) * costs.away.mean / candidate.groups


# Closed forms


def daly(mtbf: float, interval: float, save: float, recover: float) -> float:
    """Return the effective share of a job that restarts, under memoryless failures, exactly.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), equation 20.
    """
    if recover + interval + save > 700 * mtbf:
        return 0.0
    return interval / (mtbf * math.exp(recover / mtbf) * math.expm1((interval + save) / mtbf))


def best_interval(mtbf: float, save: float) -> float:
    """Return the best seconds of computing between saves: Daly 2006, equation 37. At least a second."""
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return max(1.0, math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save)


def standbys(expected: float) -> int:
    """Return the nodes that are enough in 99 of 100 moments, if so many are being mended on average (Poisson)."""
    term = total = math.exp(-expected)
    number = 0
    while total < 0.99 and number < 10 * expected + 100:
        number += 1
        term *= expected / number
        total += term
    return number


def broken_nodes(candidate: Candidate) -> float:
    """Return how many nodes are being mended on average."""
    scenario = candidate.scenario
    number = 0.0
    for kind in scenario.failures:
        repair = to_length(f"{kind.name}.repair", kind.repair, candidate.gpus).mean
        nodes = scenario.domains[kind.domain] if kind.domain is not None else 1
        number += kind.breaks * repair * nodes / mtbf_of(kind, scenario)
    return number


def estimate(candidate: Candidate) -> float:
    """Return the effective training time by closed forms.

    Memoryless failures of any kind that stops; even spacing by arithmetic. Stragglers and spares are first order.
    """
    kinds = candidate.scenario.failures
    is_even = len(kinds) == 1 and kinds[0].spacing == "even"
    share = _restarts(candidate, is_even) if candidate.strategy == "restart" else _groups(candidate, is_even)
    return share * _speed(candidate) * _with_nodes(candidate)


def _restarts(candidate: Candidate, is_even: bool) -> float:
    rate, save, recover = stop_rate(candidate), candidate.save, candidate.costs.away.mean
    if rate == 0:
        return 1.0
    if candidate.scenario.clock == "training":
        # Only the running time counts for the clock: a failure costs its recovery and half an interval, exactly so.
        running = daly(1 / rate, candidate.step, save, 0.0)
        return running / (1 + rate * recover)
    if is_even:
        whole = math.floor(max(0.0, 1 / rate - recover) / (candidate.step + save))
        return min(1.0, whole * candidate.step * rate)
    return daly(1 / rate, candidate.step, save, recover)


def _groups(candidate: Candidate, is_even: bool) -> float:
    """Return the share of time in which a group trains and is not stalled, times the cost of the groups' returns."""
    costs, groups, step = candidate.costs, candidate.groups, candidate.step
    rate, sudden = group_rate(candidate), stall_rate(candidate)
    stall, away, rejoin = costs.stall.mean, costs.away.mean, costs.rejoin.mean
    if candidate.strategy == "rounds":
        # A stall only in the exchange; a group that was hit loses its round, one that comes back makes the rest of one.
        stall = stall * candidate.exchange / (step + candidate.exchange)
    each = rate / groups
    # A stalled group that is away as well counts once.
    apart = max(0.0, each * away - sudden / groups * min(stall, away))
    if is_even:
        share = max(0.0, 1 - sudden * stall - apart - rate * rejoin)
    else:
        up = math.exp(-each * away)
        share = math.exp(-sudden * up * stall - apart) / (1 + rate * up * rejoin)
    if candidate.strategy == "rounds" and rate > 0:
        share *= -math.expm1(-each * step) / (each * step)
    absent = groups * -math.expm1(-each * away)
    share *= step / (step + candidate.exchange + costs.drag * absent)
    lost = lost_state_rate(candidate)
    if candidate.save_every and lost > 0:
        share *= daly(1 / lost, candidate.save_every * step, candidate.save, away)
    return share


def _speed(candidate: Candidate) -> float:
    """Return the mean speed with stragglers."""
    slow = 1.0
    for kind in candidate.scenario.failures:
        if kind.effect == "slow":
            slow += (kind.factor - 1) * kind.found_after / mtbf_of(kind, candidate.scenario)
    return 1 / slow


def _with_nodes(candidate: Candidate) -> float:
    """Return the part of the groups that have all their nodes: a lack of nodes is spread over the groups at random."""
    spares, expected = candidate.spares, broken_nodes(candidate)
    if spares is None or expected == 0:
        return 1.0
    count = NormalDist(expected, math.sqrt(expected)) if expected > 500 else None
    term, share = math.exp(-min(expected, 700.0)), 0.0
    for number in range(int(expected + 12 * math.sqrt(expected) + 20)):
        if number:
            term *= expected / number
        weight = term if count is None else count.cdf(number + 0.5) - count.cdf(number - 0.5)
        share += weight * (1 - 1 / candidate.groups) ** max(0, number - spares)
    return share
