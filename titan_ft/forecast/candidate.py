# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A candidate: one strategy with one shape, as the numbers that a forecast needs.

`choice` makes the candidates of a scenario with `make_candidates`. The closed forms and the
simulation read them, and neither changes them. `make_candidates` works in this order:

1. It divides the nodes of the cluster into groups. A job that restarts from checkpoints is a single
   group with all nodes.
2. It takes the costs of a failure from the scenario. Costs that the scenario leaves out are taken
   from a run's record.
3. It sums up the rates of all kinds of failure, for the closed forms. The simulation draws single
   failures from the scenario instead.
4. It chooses the number of steps between two checkpoints.

Terms:
- strategy: what the job does when a group fails. With "restart" the whole job restarts from a
  checkpoint, with "groups" the other groups train on. "rounds" is like "groups", but the groups
  exchange only after several local steps.
- shape: the number and the size of the groups.
- pressure: see `Candidate.pressure`. A high pressure means a busy machine, whose costs are higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

from titan_ft.config import ConfigError
from titan_ft.forecast.failures import rates_of
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.scenario import DAY, FailureKind, Groups, Scenario, Strategy, to_length

MAX_INTERVAL = 7 * DAY
"""Longest time between saves. The formula of the best interval gives longer ones for very rare
failures, whose rate is only a guess."""
NO_TIME = Constant(0.0)
MAX_PRESSURE_RATIO = 1.5
"""A record says nothing about a job with more than so many times the record's own pressure."""


@dataclass(frozen=True)
class Costs:
    """The costs of a failure, in seconds. A record measures each of them in other steps."""

    stall: Length = NO_TIME
    """By how much the death of a group delays the end of the step."""
    away: Length = NO_TIME
    """How long a group is away until it could join a step."""
    rejoin: Length = NO_TIME
    """By how much a group that returns delays the end of the step."""
    drag: float = 0.0
    """By how much each absent group makes every step longer."""


@dataclass
class Rates:
    """The means of all failures and services of a cluster. Events are counted per second."""

    deaths: float = 0.0
    """Failures that stop one group or several without notice, but not all groups."""
    leaves: float = 0.0
    """Groups that leave in order: drains, maintenance, and stragglers that were found."""
    corruptions: float = 0.0
    """Groups whose wrong numbers were found. They heal. A job without another group goes back to a
    checkpoint."""
    group_deaths: float = 0.0
    """Groups that deaths stop. It is more than `deaths` if the nodes that fail together belong to
    several groups."""
    losses_of_all: float = 0.0
    """Failures that stop all groups at once. If there are no checkpoints, a leave of all groups at
    once counts as well, because it loses the job's state."""
    rolled_back_share: float = 0.0
    """Share of the time that a job without another group computes with wrong numbers."""
    slowed_share: float = 0.0
    """Share of the time that stragglers cost."""
    broken_nodes: float = 0.0
    """Nodes that are in repair, on average."""

    @property
    def departures(self) -> float:
        """Return how many groups go away per second, without failures that hit all groups."""
        return self.group_deaths + self.leaves + self.corruptions

    def scaled(self, factor: float) -> Rates:
        """Return the rates if everything happens `factor` times as often."""
        return Rates(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Candidate:
    """One strategy with one shape. All times are in seconds.

    Attributes:
        groups: number of groups; 1 for a job that restarts from checkpoints.
        group_nodes: nodes of each group.
        spares: spare nodes; None if there is always another node.
        step: a step of all groups without failures. In rounds it is a whole round.
        usual_step: how much of `step` counts as effective; see `Job.usual_step`.
        min_groups: with fewer groups nobody trains (`min_replica_size`).
        exchange: the part of the exchange that computing does not hide. `step` does not contain it.
        save: training stands still so long for a checkpoint.
        save_every: steps between two saves; 0 without checkpoints.
        loses_step: True if the death of a group costs the others the step under way.
        value_of_a_token: value of a token in rounds, relative to synchronous training.
        has_sizes: True if a dry run has measured the exchange and the memory of a GPU.
        pressure_ratio: pressure relative to the record's, if that is beyond `MAX_PRESSURE_RATIO`; 0
            if it is not, or without a record.
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
    min_groups: int = 1
    exchange: float = 0.0
    save: float = 0.0
    save_every: int = 0
    loses_step: bool = False
    value_of_a_token: float = 1.0
    has_sizes: bool = False
    pressure_ratio: float = 0.0

    @property
    def gpus(self) -> int:
        """Return the GPUs of each group."""
        return self.group_nodes * self.scenario.cluster.gpus_per_node

    @property
    def paid_gpus(self) -> int:
        """Return the GPUs of the job and of the spare nodes."""
        cluster = self.scenario.cluster
        return cluster.gpus + (self.spares or 0) * cluster.gpus_per_node

    @property
    def value_of_time(self) -> float:
        """Return the useful GPUs as a share of the paid GPUs, while all groups train."""
        return self.value_of_a_token * self.scenario.cluster.gpus / self.paid_gpus

    @property
    def pressure(self) -> float:
        """Return the share of all time that failures would take if their costs never overlapped."""
        costs = self.costs
        rates = self.rates
        late = rates.deaths * costs.stall.mean + rates.departures * costs.rejoin.mean
        # While one of n groups is away, the job loses 1/n of its work.
        return late + (rates.departures / self.groups + rates.losses_of_all) * costs.away.mean

    @property
    def name(self) -> str:
        if self.spares is None:
            return self.shape
        return f"{self.shape} with {self.spares} spare {'node' if self.spares == 1 else 'nodes'}"

    @property
    def shape(self) -> str:
        """Return the name without spare nodes."""
        if self.strategy == "restart":
            return "restart from checkpoints"
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        shape = f"{groups} of {self.gpus:,}"
        if self.strategy == "rounds" and self.scenario.rounds is not None:
            shape += f", rounds of {self.scenario.rounds.steps}"
        return shape


def make_candidates(scenario: Scenario, measured: Measured | None = None) -> list[Candidate]:
    """Return the candidates of a case, one for each of its strategies.

    Args:
        measured: the record from which costs are taken that the scenario leaves out.

    Raises:
        ConfigError: a cost of the groups is neither in the scenario nor in a record.
    """
    return [_make_candidate(scenario, strategy, measured) for strategy in scenario.strategies]


def _make_candidate(scenario: Scenario, strategy: Strategy, measured: Measured | None) -> Candidate:
    job = scenario.job
    cluster = scenario.cluster
    groups = 1 if strategy == "restart" else job.groups
    group_nodes = cluster.nodes // groups
    candidate = Candidate(
        scenario=scenario,
        strategy=strategy,
        groups=groups,
        group_nodes=group_nodes,
        spares=cluster.spare_nodes,
        step=job.step,
        usual_step=job.step if job.usual_step is None else job.usual_step,
        costs=Costs(),
        rates=_sum_rates(scenario, groups, group_nodes),
        save=0.0 if scenario.checkpoint is None else scenario.checkpoint.save,
    )
    if strategy == "restart":
        assert scenario.restart is not None, "the strategy has a table"
        recover = to_length(scenario.restart.recover, cluster.gpus)
        return with_saves(replace(candidate, costs=Costs(away=recover)))
    assert scenario.groups is not None, "checked when the scenario was read"
    costs = _choose_costs(scenario.groups, candidate.gpus, measured)
    candidate = replace(
        candidate,
        costs=costs,
        min_groups=job.min_replica_size,
        loses_step=scenario.groups.loses,
    )
    if strategy == "rounds":
        assert scenario.rounds is not None, "the strategy has a table"
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
    uses_record = costs.stall is measured.stall or costs.away is measured.away
    pressure_ratio = candidate.pressure / measured.pressure
    if uses_record and pressure_ratio > MAX_PRESSURE_RATIO:
        return replace(candidate, pressure_ratio=pressure_ratio)
    return candidate


def check_costs(scenario: Scenario, measured: Measured | None) -> None:
    """Check that the scenario and the record together have all costs of the groups.

    Raises:
        ConfigError: a cost is missing.
    """
    if scenario.groups is not None:
        _choose_costs(scenario.groups, scenario.cluster.gpus, measured)


def _choose_costs(given: Groups, gpus: int, measured: Measured | None) -> Costs:
    """Return the costs of the scenario. Costs that it leaves out are the record's own objects.

    `choice` recognizes the record's objects, to replace them by resampled ones.
    """
    lengths: dict[str, Length] = {}
    for name in ("stall", "away", "rejoin"):
        in_scenario = getattr(given, name)
        in_record = getattr(measured, name, None)
        if in_scenario is not None:
            lengths[name] = to_length(in_scenario, gpus)
        elif in_record is not None:
            lengths[name] = in_record
        elif name == "rejoin":
            lengths[name] = NO_TIME  # the only cost that may be left out without a record
        else:
            remedy = "give it, or a run that has it: --from RUN_DIR"
            raise ConfigError(f"groups.{name} must be set, got nothing; {remedy}")
    drag = given.drag
    if drag is None:
        drag = 0.0 if measured is None else measured.drag
    return Costs(**lengths, drag=drag)


def _sum_rates(scenario: Scenario, groups: int, group_nodes: int) -> Rates:
    """Return the rates of all kinds of failure and of the maintenance together.

    Args:
        groups: number of groups.
        group_nodes: nodes of each group.
    """
    rates = Rates()
    has_checkpoints = scenario.checkpoint is not None
    for kind, rate in _list_rates(scenario):
        nodes = scenario.nodes_per_target(kind)
        # The nodes of a domain may be less than one group, or several groups.
        groups_hit = min(groups, max(1.0, nodes / group_nodes))
        if kind.scope == "job":
            groups_hit = groups
        # Groups that leave in order save a checkpoint first, if there are checkpoints at all.
        loses_state = kind.effect == "stop" or not has_checkpoints
        if groups_hit == groups and loses_state:
            rates.losses_of_all += rate
        elif kind.effect == "stop":
            rates.deaths += rate
            rates.group_deaths += rate * groups_hit
        elif kind.effect == "corrupt":
            rates.corruptions += rate * groups_hit
            rates.rolled_back_share += rate * kind.found_after
        elif kind.effect == "drain" or kind.leaves:
            rates.leaves += rate * groups_hit
        if kind.effect == "slow":
            rates.slowed_share += rate * kind.found_after * (1 - 1 / kind.factor)
        repair = _mean_repair(kind, scenario, group_nodes * scenario.cluster.gpus_per_node)
        rates.broken_nodes += rate * kind.breaks * repair * nodes
    for maintenance in scenario.maintenance:
        groups_hit = min(groups, max(1.0, maintenance.nodes / group_nodes))
        if groups_hit == groups and not has_checkpoints:
            rates.losses_of_all += 1 / maintenance.every
        else:
            rates.leaves += groups_hit / maintenance.every
    rates.broken_nodes = min(rates.broken_nodes, float(scenario.cluster.nodes))
    return rates


def _list_rates(scenario: Scenario) -> list[tuple[FailureKind, float]]:
    """Return the kinds of failure with their rates per second.

    A trace or a chaos plan becomes several kinds, one for each effect of its faults.
    """
    return [item for kind in scenario.failures for item in rates_of(kind, scenario).items()]


def _mean_repair(kind: FailureKind, scenario: Scenario, gpus: int) -> float:
    """Return the mean seconds until a node is repaired. A log has the repair of each failure."""
    usual = to_length(kind.repair, gpus).mean
    listed = scenario.listed_failures.get(kind.name, ())
    repairs = [usual if each.down_seconds is None else each.down_seconds for each in listed]
    return fmean(repairs) if repairs else usual


# Checkpoints


def lost_state_rate(candidate: Candidate) -> float:
    """Return how often per second no group is left, so that the job returns to a checkpoint.

    Either a failure hits all groups, or it hits the last group while all others are away. A last
    group that leaves in order does not count if there are checkpoints, because it saves first.
    """
    rates = candidate.rates
    if candidate.scenario.checkpoint is None:
        losses_of_one = rates.departures
    else:
        losses_of_one = rates.group_deaths + rates.corruptions
    others = candidate.groups - 1
    if others == 0:
        return rates.losses_of_all + losses_of_one
    rate_of_each = rates.departures / candidate.groups
    # The probability that a certain group is away, if departures are memoryless.
    away = -math.expm1(-rate_of_each * candidate.costs.away.mean)
    return rates.losses_of_all + losses_of_one * (1 - away) * away**others


def with_saves(candidate: Candidate) -> Candidate:
    """Return the candidate with `save_every` by the scenario's interval, or by the best one."""
    checkpoint = candidate.scenario.checkpoint
    if checkpoint is None:
        return candidate
    rate = lost_state_rate(candidate)
    if checkpoint.interval != "best":
        interval = checkpoint.interval
    elif rate > 0:
        interval = min(MAX_INTERVAL, best_interval(1 / rate, candidate.save))
    else:
        interval = MAX_INTERVAL
    return replace(candidate, save_every=max(1, round(interval / candidate.step)))


def best_interval(mtbf: float, save: float) -> float:
    """Return the best seconds of computing between two saves, at least 1.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22 (2006), equation 37.
    """
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return max(1.0, math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save)
