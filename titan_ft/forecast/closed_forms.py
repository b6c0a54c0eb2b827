# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The effective training time of a candidate by closed forms: microseconds each, for sweeps.

`choice` ranks all candidates by them, and the tables show `find_doubts` beside such a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from titan_ft.forecast.candidate import Candidate, lost_state_rate

ACCURACY = 0.01
"""Relative error of the closed forms, held against the simulation, where `find_doubts` has none."""
ENVELOPE = 0.25
"""Pressure below which they have that accuracy, if nothing else is to be doubted."""
MEMORYLESS_ENVELOPE = 0.03
"""The part of the time that may be lost before the spacing of failures puts them further off."""
MANY_LIVES = 30


def estimate(candidate: Candidate) -> float:
    """Return the effective training time under memoryless failures, or under even ones."""
    kinds = candidate.scenario.failures
    is_even = len(kinds) == 1 and kinds[0].spacing == "even"
    is_restart = candidate.strategy == "restart"
    share = _restarts(candidate, is_even) if is_restart else _groups(candidate, is_even)
    # Of stragglers at the same time only the slowest one counts.
    share *= math.exp(-candidate.rates.slowed)
    share *= candidate.usual_step / candidate.step
    return share * _with_nodes(candidate) * _with_maintenance(candidate)


def find_doubts(candidate: Candidate) -> Iterator[str]:
    """Yield reasons why the closed forms may be further off than `ACCURACY`."""
    rates, scenario = candidate.rates, candidate.scenario
    if candidate.pressure > ENVELOPE:
        yield f"pressure {candidate.pressure:.2f}"
    wanted = standbys(rates.broken_nodes)
    for stop in scenario.maintenance:
        wanted += stop.nodes * math.ceil(stop.lasts / stop.every)
    if candidate.spares is not None and candidate.spares < wanted:
        yield "too few spares"
    if candidate.least > 1:
        yield "min_replica_size"
    if scenario.plans:
        yield "the limits of a chaos plan"
    if not candidate.save_every and lost_state_rate(candidate) * scenario.seconds > ACCURACY:
        yield "no checkpoints"
    breaks = rates.deaths + rates.job
    if candidate.groups == 1:
        breaks += rates.leaves
    if candidate.strategy != "rounds" and breaks * candidate.step > 0.05:
        yield "steps as long as the time between failures"
    if rates.slowed > 0.02 or rates.rolled_back > 0.02:
        yield "stragglers or wrong numbers"
    if candidate.strategy != "restart" and candidate.groups == 1:
        yield "a single group"
    if candidate.strategy == "restart" and (rates.leaves > 0 or rates.corrupt > 0):
        yield "a job that leaves, or goes back behind wrong numbers"
    for kind in scenario.failures:
        nodes = candidate.groups * candidate.group_nodes
        hits_all = candidate.groups > 1 and scenario.nodes_of(kind) >= nodes
        if hits_all and kind.effect != "stop":
            yield f"{kind.name}, which hits all groups"
    at_risk = lost_state_rate(candidate) * candidate.save_every * candidate.step
    if estimate(candidate) > 1 - MEMORYLESS_ENVELOPE and at_risk < ACCURACY:
        return
    for kind in scenario.failures:
        # Lives of many parts are, together, as good as memoryless.
        has_many_lives = kind.has_lives and len(scenario.parts_of(kind)) >= MANY_LIVES
        is_memoryless = kind.spacing == "memoryless" or kind.shape == 1.0 or has_many_lives
        if not is_memoryless and kind.name not in scenario.plans:
            yield f"{kind.name} is not memoryless"


def daly(mtbf: float, interval: float, save: float, recover: float) -> float:
    """Return the effective share of a job that restarts, under memoryless failures, exactly.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", Future Generation Computer Systems 22 (2006), equation 20.
    """
    if recover + interval + save > 700 * mtbf:
        return 0.0
    return interval / (mtbf * math.exp(recover / mtbf) * math.expm1((interval + save) / mtbf))


def standbys(expected: float) -> int:
    """Return the nodes that suffice 99 % of the time, if so many are being mended on average."""
    total = 0.0
    for number, weight in _poisson(expected):
        total += weight
        if total >= 0.99:
            return number
    return math.ceil(expected + 10 * math.sqrt(expected))


def _poisson(mean: float) -> Iterator[tuple[int, float]]:
    """Yield the numbers that are likely under a Poisson distribution, each with its probability."""
    spread = 10 * math.sqrt(mean) + 20
    is_large = mean > 500
    normal = NormalDist(mean, math.sqrt(mean)) if is_large else None
    low = max(0, int(mean - spread)) if is_large else 0
    weight = math.exp(-mean) if not is_large else 0.0
    for number in range(low, int(mean + spread)):
        if normal is not None:
            weight = normal.cdf(number + 0.5) - normal.cdf(number - 0.5)
        elif number:
            weight *= mean / number
        yield number, weight


def _restarts(candidate: Candidate, is_even: bool) -> float:
    rates, save, recover = candidate.rates, candidate.save, candidate.costs.away.mean
    interval = candidate.step * candidate.save_every
    rate, leaves = lost_state_rate(candidate), rates.leaves
    is_training_clock = candidate.scenario.clock == "training"
    if rate == 0:
        share = interval / (interval + save)
    elif is_even:
        gap = 1 / rate + recover if is_training_clock else 1 / rate
        whole = math.floor(max(0.0, gap - recover) / (interval + save))
        share = min(1.0, whole * interval / gap)
    elif is_training_clock:
        share = daly(1 / rate, interval, save, 0.0) / (1 + rate * recover)
    else:
        share = daly(1 / rate, interval, save, recover)
    # A job that leaves in order saves first, and loses no work.
    away = recover + save
    up = 1 / (1 + leaves * away) if is_training_clock else math.exp(-leaves * away)
    return share * up * max(0.0, 1 - rates.rolled_back)


def _groups(candidate: Candidate, is_even: bool) -> float:
    """Return the share of time in which a group trains, neither stalled nor late by a return."""
    costs, rates, groups, step = candidate.costs, candidate.rates, candidate.groups, candidate.step
    stall, away, rejoin = costs.stall.mean, costs.away.mean, costs.rejoin.mean
    if candidate.strategy == "rounds":
        # A group that returns joins within a round. Only the exchange of a round stalls, unless a
        # death loses the round.
        rejoin = 0.0
        if not candidate.loses_step:
            stall *= candidate.exchange / (step + candidate.exchange)
    each = rates.aways / groups
    up = math.exp(-each * away)
    # A stalled group that is away as well counts once.
    apart = max(0.0, each * away - rates.deaths / groups * min(stall, away))
    if is_even:
        share = max(0.0, 1 - rates.deaths * stall - apart - rates.aways * rejoin)
    else:
        share = math.exp(-rates.deaths * up * stall - apart) / (1 + rates.aways * up * rejoin)
    if candidate.loses_step:
        share *= math.exp(-rates.deaths * up * step)
    if candidate.strategy == "rounds" and each > 0:
        share *= -math.expm1(-each * step) / (each * step)
    if groups == 1:
        share *= max(0.0, 1 - rates.rolled_back)  # nobody else has the right numbers
    return share * _of_those_up(candidate, up) * _kept(candidate)


def _of_those_up(candidate: Candidate, up: float) -> float:
    """Return the part of the groups' time that exchanges, drag and lacking groups leave.

    Args:
        up: part of the time in which a group is there, whatever the others do.
    """
    groups, step, drag = candidate.groups, candidate.step, candidate.costs.drag
    usual = step + candidate.exchange
    if up == 1.0 or (candidate.least <= 1 and drag == 0.0):
        return step / usual
    part = 0.0
    for number in range(candidate.least, groups + 1):
        ways = math.lgamma(groups + 1) - math.lgamma(number + 1) - math.lgamma(groups - number + 1)
        likely = math.exp(ways + number * math.log(up) + (groups - number) * math.log1p(-up))
        part += likely * number * step / (usual + drag * (groups - number))
    return part / (groups * up)


def _kept(candidate: Candidate) -> float:
    """Return the part of the work that losses of all groups, and saves, leave."""
    lost, rates = lost_state_rate(candidate), candidate.rates
    interval = candidate.save_every * (candidate.step + candidate.exchange)
    if candidate.save_every and lost > 0:
        # The time away of single groups counts elsewhere; that of all at once counts here.
        away = candidate.costs.away.mean * rates.job / lost
        return daly(1 / lost, interval, candidate.save, away)
    if candidate.save_every:
        return 1 / (1 + candidate.save / interval)
    expected = lost * candidate.scenario.seconds
    return -math.expm1(-expected) / expected if expected > 0 else 1.0


def _with_nodes(candidate: Candidate) -> float:
    """Return the part of the groups that have all their nodes; any group may lack one."""
    spares, expected = candidate.spares, candidate.rates.broken_nodes
    if spares is None or expected == 0:
        return 1.0
    share = 0.0
    for number, weight in _poisson(expected):
        share += weight * (1 - 1 / candidate.groups) ** max(0, number - spares)
    return share


def _with_maintenance(candidate: Candidate) -> float:
    """Return the part of the groups that maintenance leaves; spares stand in for its nodes."""
    share = 1.0
    for stop in candidate.scenario.maintenance:
        at_once = stop.nodes * math.ceil(stop.lasts / stop.every)
        if candidate.spares is None or candidate.spares >= at_once:
            continue
        hit = min(candidate.groups, max(1.0, stop.nodes / candidate.group_nodes))
        lacking = 1 - candidate.spares / at_once
        share *= max(0.0, 1 - lacking * hit * stop.lasts / stop.every / candidate.groups)
    return share
