# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A candidate: one strategy with one shape, as numbers.

`choice` makes the candidates of a scenario here, and closed forms and the simulation read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

from titan_ft.config import ConfigError
from titan_ft.forecast.failures import rates_of
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.scenario import DAY, Groups, Kind, Scenario, Strategy, to_length

MAX_INTERVAL = 7 * DAY
"""The best time between saves is never longer: the rate of very rare losses is a guess."""
NOTHING = Constant(0.0)
BEYOND = 1.5
"""Beyond so many times its own pressure a record says nothing."""


@dataclass(frozen=True)
class Costs:
    """The costs of a failure, in seconds; each has steps of its own in a record."""

    stall: Length = NOTHING
    """By how much a step is late in which a group dies."""
    away: Length = NOTHING
    """How long a group is away until it could join a step."""
    rejoin: Length = NOTHING
    """By how much a step is late in which a group returns."""
    drag: float = 0.0
    """By how much each group that is away makes every step longer."""


@dataclass
class Rates:
    """How often failures do what, per second: the means that closed forms know of a cluster."""

    deaths: float = 0.0
    """Failures that stop a group, or several at once, without notice."""
    leaves: float = 0.0
    """Groups that leave in order: drains, maintenance, stragglers that were found."""
    corrupt: float = 0.0
    """Groups whose wrong numbers were found. They heal; a job without other groups goes back."""
    groups_lost: float = 0.0
    """Groups that deaths stop: more than deaths where a domain has several groups."""
    job: float = 0.0
    """Failures that stop all groups at once, and without checkpoints also leaves of all groups."""
    rolled_back: float = 0.0
    """Seconds a second that a job without other groups has computed with wrong numbers."""
    slowed: float = 0.0
    """Part of the time that stragglers take."""
    broken_nodes: float = 0.0
    """Nodes that are being mended, on average."""

    @property
    def aways(self) -> float:
        """Return how many groups go away a second, by failures that do not hit all of them."""
        return self.groups_lost + self.leaves + self.corrupt

    def scaled(self, factor: float) -> Rates:
        """Return the rates of failures that are so many times as frequent."""
        return Rates(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Candidate:
    """One strategy with one shape. A job that restarts from checkpoints is one of one group.

    Attributes:
        group_nodes: nodes of a group.
        spares: spare nodes; None if there is always one.
        step: of all groups without failures; of rounds, of a whole round.
        usual_step: what of it counts as effective; see `Job.usual_step`.
        least: groups without which nobody trains.
        exchange: the part of the exchange that nothing hides, beyond the step.
        save_every: steps between saves; 0 for none.
        loses_step: the others lose the step under way when a group dies.
        value_of_a_token: of rounds, compared with one of synchronous training.
        bounded: sizes say how long the exchange is, and that a group fits its GPUs.
        beyond: how many times the record's pressure; 0 without a record, or within it.
    """

    scenario: Scenario
    strategy: Strategy
    groups: int
    group_nodes: int
    spares: int | None
    step: float
    usual_step: float
    costs: Costs
    rates: Rates
    least: int = 1
    exchange: float = 0.0
    save: float = 0.0
    save_every: int = 0
    loses_step: bool = False
    value_of_a_token: float = 1.0
    bounded: bool = False
    beyond: float = 0.0

    @property
    def gpus(self) -> int:
        """Return the GPUs of a group."""
        return self.group_nodes * self.scenario.cluster.gpus_per_node

    @property
    def paid_gpus(self) -> int:
        cluster = self.scenario.cluster
        return cluster.gpus + (self.spares or 0) * cluster.gpus_per_node

    @property
    def value_of_time(self) -> float:
        """Return useful GPUs for each GPU that is paid for, while all groups train."""
        return self.value_of_a_token * self.scenario.cluster.gpus / self.paid_gpus

    @property
    def pressure(self) -> float:
        """Return the share of the time that failures take if none of their costs overlap."""
        costs, rates = self.costs, self.rates
        late = rates.deaths * costs.stall.mean + rates.aways * costs.rejoin.mean
        return late + (rates.aways / self.groups + rates.job) * costs.away.mean

    @property
    def name(self) -> str:
        if self.spares is None:
            return self.shape
        return f"{self.shape} with {self.spares} spare {'node' if self.spares == 1 else 'nodes'}"

    @property
    def shape(self) -> str:
        """Return the name without spares."""
        if self.strategy == "restart":
            return "restart from checkpoints"
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        shape = f"{groups} of {self.gpus:,}"
        if self.strategy == "rounds" and self.scenario.rounds is not None:
            shape += f", rounds of {self.scenario.rounds.steps}"
        return shape


def make_candidates(scenario: Scenario, measured: Measured | None = None) -> list[Candidate]:
    """Return the candidates of a case, one for each of its strategies.

    Raises:
        ConfigError: a cost of the groups is neither in the scenario nor in a record.
    """
    return [_make(scenario, strategy, measured) for strategy in scenario.strategies]


def _make(scenario: Scenario, strategy: Strategy, measured: Measured | None) -> Candidate:
    job, cluster, checkpoint = scenario.job, scenario.cluster, scenario.checkpoint
    groups = 1 if strategy == "restart" else job.groups
    group_nodes = cluster.nodes // groups
    candidate = Candidate(
        scenario,
        strategy,
        groups,
        group_nodes,
        cluster.spare_nodes,
        job.step,
        job.step if job.usual_step is None else job.usual_step,
        Costs(),
        _rates(scenario, groups, group_nodes),
        save=0.0 if checkpoint is None else checkpoint.save,
    )
    if scenario.restart is not None and strategy == "restart":
        recover = to_length(scenario.restart.recover, cluster.gpus)
        return with_saves(replace(candidate, costs=Costs(away=recover)))
    assert scenario.groups is not None, "checked when the scenario was read"
    costs = _costs(scenario.groups, candidate.gpus, measured)
    least, loses_step = job.min_replica_size, scenario.groups.loses
    candidate = replace(candidate, costs=costs, least=least, loses_step=loses_step)
    if scenario.rounds is not None and strategy == "rounds":
        steps = scenario.rounds.steps
        candidate = replace(
            candidate,
            step=candidate.step * steps,
            usual_step=candidate.usual_step * steps,
            exchange=scenario.rounds.exchange,
            costs=replace(costs, drag=costs.drag * steps),
            value_of_a_token=scenario.rounds.value_of_a_token,
        )
    candidate = with_saves(candidate)
    if measured is None or not measured.pressure:
        return candidate
    is_measured = costs.stall is measured.stall or costs.away is measured.away
    times = candidate.pressure / measured.pressure
    if is_measured and times > BEYOND:
        return replace(candidate, beyond=times)
    return candidate


def check_costs(scenario: Scenario, measured: Measured | None) -> None:
    """Check that a scenario's groups have all their costs, from it or from a record.

    Raises:
        ConfigError: one is missing.
    """
    if scenario.groups is not None:
        _costs(scenario.groups, scenario.cluster.gpus, measured)


def _costs(given: Groups, gpus: int, measured: Measured | None) -> Costs:
    """Return the costs of the scenario; those that it leaves out are the record's."""
    lengths: dict[str, Length] = {"rejoin": NOTHING}
    for name in ("stall", "away", "rejoin"):
        amount, known = getattr(given, name), getattr(measured, name, None)
        if amount is not None:
            lengths[name] = to_length(amount, gpus)
        elif known is not None:
            lengths[name] = known
        elif name not in lengths:
            remedy = "give it, or a run that has it: --from RUN_DIR"
            raise ConfigError(f"groups.{name} must be set, got nothing; {remedy}")
    drag = 0.0 if measured is None else measured.drag
    return Costs(**lengths, drag=drag if given.drag is None else given.drag)


def _rates(scenario: Scenario, groups: int, group_nodes: int) -> Rates:
    rates = Rates()
    saves = scenario.checkpoint is not None
    for kind, rate in _kinds_with_rates(scenario):
        nodes = scenario.nodes_of(kind)
        hit = groups if kind.scope == "job" else min(groups, max(1.0, nodes / group_nodes))
        if hit == groups and (kind.effect == "stop" or not saves):
            rates.job += rate
        elif kind.effect == "stop":
            rates.deaths += rate
            rates.groups_lost += rate * hit
        elif kind.effect == "corrupt":
            rates.corrupt += rate * hit
            rates.rolled_back += rate * kind.found_after
        elif kind.effect == "drain" or kind.leaves:
            rates.leaves += rate * hit
        if kind.effect == "slow":
            rates.slowed += rate * kind.found_after * (1 - 1 / kind.factor)
        repair = _mean_repair(kind, scenario, group_nodes * scenario.cluster.gpus_per_node)
        rates.broken_nodes += rate * kind.breaks * repair * nodes
    for stop in scenario.maintenance:
        hit = min(groups, max(1.0, stop.nodes / group_nodes))
        if hit == groups and not saves:
            rates.job += 1 / stop.every
        else:
            rates.leaves += hit / stop.every
    rates.broken_nodes = min(rates.broken_nodes, float(scenario.cluster.nodes))
    return rates


def _kinds_with_rates(scenario: Scenario) -> list[tuple[Kind, float]]:
    return [item for kind in scenario.failures for item in rates_of(kind, scenario).items()]


def _mean_repair(kind: Kind, scenario: Scenario, gpus: int) -> float:
    """Return the mean seconds until a node is mended; a log has those of each failure."""
    usual = to_length(kind.repair, gpus).mean
    listed = scenario.listed.get(kind.name, ())
    logged = [usual if each.down_seconds is None else each.down_seconds for each in listed]
    return fmean(logged) if logged else usual


# Checkpoints


def lost_state_rate(candidate: Candidate) -> float:
    """Return how often no group is left: a failure hits all, or the last one while others are away.

    A last group that leaves in order saves first, if there are checkpoints.
    """
    rates, others = candidate.rates, candidate.groups - 1
    of_one = rates.groups_lost + rates.corrupt
    if candidate.scenario.checkpoint is None:
        of_one = rates.aways
    if others == 0:
        return rates.job + of_one
    away = -math.expm1(-rates.aways / candidate.groups * candidate.costs.away.mean)
    return rates.job + of_one * (1 - away) * away**others


def with_saves(candidate: Candidate) -> Candidate:
    """Return the candidate with saves at the scenario's interval, or at the best one."""
    checkpoint = candidate.scenario.checkpoint
    if checkpoint is None:
        return candidate
    rate = lost_state_rate(candidate)
    interval = MAX_INTERVAL
    if checkpoint.interval != "best":
        interval = checkpoint.interval
    elif rate > 0:
        interval = min(MAX_INTERVAL, best_interval(1 / rate, candidate.save))
    return replace(candidate, save_every=max(1, round(interval / candidate.step)))


def best_interval(mtbf: float, save: float) -> float:
    """Return the best seconds of computing between saves, at least one: Daly 2006, equation 37."""
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return max(1.0, math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save)
