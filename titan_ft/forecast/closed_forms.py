# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The effective training time of a candidate by closed forms (formulas): microseconds each.

`choice` ranks all candidates by `estimate`, and simulates only the best of them. The tables show the
reasons of `find_doubts` beside an estimate. tests/forecast/test_closed_forms.py compares the
estimates with the simulation.

The formulas multiply shares of the time, as if their causes were independent:

    estimate = share that failures of the strategy leave   (`_share_of_restarts`, `_share_of_groups`)
             x share that stragglers leave
             x share of a step that counts as effective    (usual_step / step)
             x share of the groups that have all nodes     (`_share_with_nodes`)
             x share of the groups out of maintenance      (`_share_outside_maintenance`)

Most terms have the form exp(-rate x cost): the probability that no failure of the rate came within
the last `cost` seconds, if the failures are memoryless.

Terms:
- pressure: the share of all time that failures would take if their costs never overlapped.
- departure: a group dies, leaves in order, or restarts because of wrong numbers.
- loss of the state: no group is left, so that the job returns to a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from titan_ft.forecast.candidate import Candidate, lost_state_rate

ACCURACY = 0.01
"""Relative error of the closed forms against the simulation, where `find_doubts` finds no doubt."""
ENVELOPE = 0.25
"""The closed forms have that accuracy only below this pressure."""
MEMORYLESS_ENVELOPE = 0.03
"""The spacing of failures hardly matters while a smaller share of the time is lost."""
MANY_LIVES = 30
"""The failures of so many nodes together are about memoryless, whatever the life of each node."""


def estimate(candidate: Candidate) -> float:
    """Return the effective training time. A single kind of failure may be evenly spaced. In all
    other cases the failures count as memoryless.
    """
    kinds = candidate.scenario.failures
    is_even = len(kinds) == 1 and kinds[0].spacing == "even"
    if candidate.strategy == "restart":
        share = _share_of_restarts(candidate, is_even)
    else:
        share = _share_of_groups(candidate, is_even)
    # The share of the time without any straggler. Stragglers at the same time do not add up: the
    # slowest one alone decides.
    share *= math.exp(-candidate.rates.slowed_share)
    share *= candidate.usual_step / candidate.step
    return share * _share_with_nodes(candidate) * _share_outside_maintenance(candidate)


def find_doubts(candidate: Candidate) -> Iterator[str]:
    """Yield reasons why the estimate may be further off than `ACCURACY`, in words for people."""
    rates = candidate.rates
    scenario = candidate.scenario
    if candidate.pressure > ENVELOPE:
        yield f"pressure {candidate.pressure:.2f}"
    enough = enough_spares(rates.broken_nodes)
    for maintenance in scenario.maintenance:
        enough += maintenance.nodes * math.ceil(maintenance.lasts / maintenance.every)
    if candidate.spares is not None and candidate.spares < enough:
        yield "too few spares"
    if candidate.min_groups > 1:
        yield "min_replica_size"
    if scenario.plans:
        yield "the limits of a chaos plan"
    if not candidate.save_every and lost_state_rate(candidate) * scenario.seconds > ACCURACY:
        yield "no checkpoints"
    lost_step_rate = rates.deaths + rates.losses_of_all
    if candidate.groups == 1:
        lost_step_rate += rates.leaves
    if candidate.strategy != "rounds" and lost_step_rate * candidate.step > 0.05:
        yield "steps as long as the time between failures"
    if rates.slowed_share > 0.02 or rates.rolled_back_share > 0.02:
        yield "stragglers or wrong numbers"
    if candidate.strategy != "restart" and candidate.groups == 1:
        yield "a single group"
    if candidate.strategy == "restart" and (rates.leaves > 0 or rates.corruptions > 0):
        yield "a job that leaves, or goes back behind wrong numbers"
    for kind in scenario.failures:
        nodes = candidate.groups * candidate.group_nodes
        hits_all = candidate.groups > 1 and scenario.nodes_per_target(kind) >= nodes
        if hits_all and kind.effect != "stop":
            yield f"{kind.name}, which hits all groups"
    # Share of the time that would be lost if each loss of the state came just before a save.
    at_risk = lost_state_rate(candidate) * candidate.save_every * candidate.step
    if estimate(candidate) > 1 - MEMORYLESS_ENVELOPE and at_risk < ACCURACY:
        return
    for kind in scenario.failures:
        has_many_lives = kind.has_lives and len(scenario.targets_of(kind)) >= MANY_LIVES
        is_memoryless = kind.spacing == "memoryless" or kind.shape == 1.0 or has_many_lives
        if not is_memoryless and kind.name not in scenario.plans:
            yield f"{kind.name} is not memoryless"


def daly_share(mtbf: float, interval: float, save: float, recover: float) -> float:
    """Return the effective share of a job that restarts from checkpoints. Failures are memoryless.

    The formula is exact.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22 (2006), equation 20.

    Args:
        mtbf: mean seconds between failures.
        interval: seconds of computing between two saves.
        save: seconds of a save.
        recover: seconds from a failure until the job computes again.
    """
    # exp() overflows at about 709.
    if recover + interval + save > 700 * mtbf:
        return 0.0
    return interval / (mtbf * math.exp(recover / mtbf) * math.expm1((interval + save) / mtbf))


def enough_spares(mean_broken_nodes: float) -> int:
    """Return how many spare nodes are enough for 99 % of the time.

    Args:
        mean_broken_nodes: nodes that are in repair, on average.
    """
    total = 0.0
    for number, probability in _poisson(mean_broken_nodes):
        total += probability
        if total >= 0.99:
            return number
    return math.ceil(mean_broken_nodes + 10 * math.sqrt(mean_broken_nodes))


def _poisson(mean: float) -> Iterator[tuple[int, float]]:
    """Yield numbers and their probabilities under a Poisson distribution.

    Numbers whose probability is negligible are left out.
    """
    spread = 10 * math.sqrt(mean) + 20
    high = int(mean + spread)
    if mean > 500:
        # exp(-mean) is 0 in floating point for large means. The normal distribution is close.
        normal = NormalDist(mean, math.sqrt(mean))
        for number in range(max(0, int(mean - spread)), high):
            yield number, normal.cdf(number + 0.5) - normal.cdf(number - 0.5)
        return
    probability = math.exp(-mean)
    for number in range(high):
        if number:
            probability *= mean / number
        yield number, probability


def _share_of_restarts(candidate: Candidate, is_even: bool) -> float:
    """Return the effective share of a job that restarts from checkpoints."""
    rates = candidate.rates
    save = candidate.save
    recover = candidate.costs.away.mean
    interval = candidate.step * candidate.save_every
    rate = lost_state_rate(candidate)
    is_training_clock = candidate.scenario.clock == "training"
    if rate == 0:
        share = interval / (interval + save)
    elif is_even:
        gap = 1 / rate + recover if is_training_clock else 1 / rate
        # Only whole intervals between two failures count: the last one has not been saved.
        whole_intervals = math.floor(max(0.0, gap - recover) / (interval + save))
        share = min(1.0, whole_intervals * interval / gap)
    elif is_training_clock:
        # No failure comes during a recovery, so a recovery only makes the gaps longer.
        share = daly_share(1 / rate, interval, save, 0.0) / (1 + rate * recover)
    else:
        share = daly_share(1 / rate, interval, save, recover)
    # A job that leaves in order saves first, and loses only the time of the save and the recovery.
    away = recover + save
    if is_training_clock:
        present = 1 / (1 + rates.leaves * away)
    else:
        present = math.exp(-rates.leaves * away)
    return share * present * max(0.0, 1 - rates.rolled_back_share)


def _share_of_groups(candidate: Candidate, is_even: bool) -> float:
    """Return the effective share of groups that train on without each other."""
    costs = candidate.costs
    rates = candidate.rates
    groups = candidate.groups
    step = candidate.step
    stall = costs.stall.mean
    away = costs.away.mean
    rejoin = costs.rejoin.mean
    if candidate.strategy == "rounds":
        # A group that returns joins in the middle of a round, and delays nobody.
        rejoin = 0.0
        # Only a death during the exchange stalls the others, unless a death loses the round.
        if not candidate.loses_step:
            stall *= candidate.exchange / (step + candidate.exchange)
    rate_of_each = rates.departures / groups
    present = math.exp(-rate_of_each * away)
    # A group that is away during a stall loses this time once: take the overlap off the time away.
    overlap = rates.deaths / groups * min(stall, away)
    away_share = max(0.0, rate_of_each * away - overlap)
    if is_even:
        share = max(0.0, 1 - rates.deaths * stall - away_share - rates.departures * rejoin)
    else:
        # A group that is away cannot die, so the rates hold for the groups that are present.
        share = math.exp(-rates.deaths * present * stall - away_share)
        share /= 1 + rates.departures * present * rejoin
    if candidate.loses_step:
        share *= math.exp(-rates.deaths * present * step)
    if candidate.strategy == "rounds" and rate_of_each > 0:
        # Mean share of a round that a group completes, if its failure loses its work of the round.
        share *= -math.expm1(-rate_of_each * step) / (rate_of_each * step)
    if groups == 1:
        share *= max(0.0, 1 - rates.rolled_back_share)  # No other group has the right numbers.
    return share * _share_of_present_groups(candidate, present) * _share_kept(candidate)


def _share_of_present_groups(candidate: Candidate, present: float) -> float:
    """Return the share of the present groups' time that is spent in steps.

    The exchange, the drag of absent groups, and waits for `min_groups` take the remainder.

    Args:
        present: probability that a certain group is present.
    """
    groups = candidate.groups
    step = candidate.step
    drag = candidate.costs.drag
    usual = step + candidate.exchange
    if present == 1.0 or (candidate.min_groups <= 1 and drag == 0.0):
        return step / usual
    # The number of present groups has a binomial distribution. With fewer than `min_groups` nobody
    # trains. Logarithms keep the binomial coefficient of many groups from an overflow.
    share = 0.0
    for number in range(candidate.min_groups, groups + 1):
        log_ways = (
            math.lgamma(groups + 1) - math.lgamma(number + 1) - math.lgamma(groups - number + 1)
        )
        absent = groups - number
        probability = math.exp(
            log_ways + number * math.log(present) + absent * math.log1p(-present)
        )
        share += probability * number * step / (usual + drag * absent)
    return share / (groups * present)


def _share_kept(candidate: Candidate) -> float:
    """Return the share of the work that saves, and returns to a checkpoint, leave to groups."""
    rates = candidate.rates
    rate = lost_state_rate(candidate)
    interval = candidate.save_every * (candidate.step + candidate.exchange)
    if candidate.save_every and rate > 0:
        # `_share_of_groups` has counted the time away of single groups. Here only losses of all
        # groups at once cost a recovery: take their share of the rate.
        recover = candidate.costs.away.mean * rates.losses_of_all / rate
        return daly_share(1 / rate, interval, candidate.save, recover)
    if candidate.save_every:
        return 1 / (1 + candidate.save / interval)
    # Without checkpoints only the work since the last loss of the state is left at the end.
    expected = rate * candidate.scenario.seconds
    return -math.expm1(-expected) / expected if expected > 0 else 1.0


def _share_with_nodes(candidate: Candidate) -> float:
    """Return the share of the groups that have all their nodes.

    Broken nodes beyond the spares are missing in random groups.
    """
    spares = candidate.spares
    mean_broken_nodes = candidate.rates.broken_nodes
    if spares is None or mean_broken_nodes == 0:
        return 1.0
    share = 0.0
    for number, probability in _poisson(mean_broken_nodes):
        missing = max(0, number - spares)
        share += probability * (1 - 1 / candidate.groups) ** missing
    return share


def _share_outside_maintenance(candidate: Candidate) -> float:
    """Return the share of the groups that train during maintenance. Spares replace its nodes."""
    share = 1.0
    for maintenance in candidate.scenario.maintenance:
        # A maintenance that lasts longer than its interval overlaps with the next one.
        nodes_at_once = maintenance.nodes * math.ceil(maintenance.lasts / maintenance.every)
        if candidate.spares is None or candidate.spares >= nodes_at_once:
            continue
        groups_hit = min(candidate.groups, max(1.0, maintenance.nodes / candidate.group_nodes))
        missing = 1 - candidate.spares / nodes_at_once
        lost = missing * groups_hit * maintenance.lasts / maintenance.every / candidate.groups
        share *= max(0.0, 1 - lost)
    return share
