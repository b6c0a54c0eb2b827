# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare candidates: all by closed forms, the best by simulation; advise in a sentence.

`titan-ft plan` compares scenarios here; the tables and the page show the cases that come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, quantiles, stdev
from typing import Any

from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import Candidate, Costs, make_candidates, with_saves
from titan_ft.forecast.closed_forms import ACCURACY, estimate
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured, resample
from titan_ft.forecast.scenario import Scenario
from titan_ft.forecast.simulation import PARTS, Account, simulate

SHORTLIST = 6
DECISIONS = ("job.groups", "cluster.spare_nodes", "rounds.steps")
"""Fields that a planner chooses; every other swept field makes cases of their own, which are not
compared."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 1 to 10 degrees of freedom."""

ValueOf = Callable[[Account], float]


@dataclass(frozen=True)
class Forecast:
    """What one candidate is expected to do."""

    candidate: Candidate
    estimate: float
    """The effective training time by closed forms."""
    accounts: tuple[Account, ...] = ()
    """Of simulated runs; empty if it is not on the shortlist."""

    @property
    def effective(self) -> float:
        return fmean(each.effective for each in self.accounts) if self.accounts else self.estimate

    @property
    def half_interval(self) -> float:
        """Return half of the 95 % interval of the mean."""
        return half_interval([each.effective for each in self.accounts])

    @property
    def has_other_estimate(self) -> bool:
        """True if the closed forms are further off the simulation than they say, and than chance.

        Sensitivities, charts and the advice on inputs rest on them.
        """
        difference = abs(self.effective - self.estimate)
        return difference > ACCURACY * self.effective + self.half_interval

    def spread(self, value_of: ValueOf = attrgetter("effective")) -> tuple[float, float]:
        """Return the 5th and the 95th percentile of one run."""
        values = [value_of(each) for each in self.accounts]
        twentieths = quantiles(values, n=20, method="inclusive")
        return twentieths[0], twentieths[-1]

    def shares(self) -> dict[str, float]:
        """Return where the time went, as shares that add up to 1."""
        found = [each.shares() for each in self.accounts]
        return {name: fmean(each[name] for each in found) for name in PARTS}

    @property
    def worth(self) -> float:
        """Return useful GPUs for each GPU that is paid for. Candidates are ranked by it."""
        return self.effective * self.candidate.value_of_time

    @property
    def closed_worth(self) -> float:
        """Return `worth` by closed forms."""
        return self.estimate * self.candidate.value_of_time

    @property
    def lost_gpu_hours(self) -> float:
        """Return GPU-hours of a month (30 days) that are paid for and not used."""
        candidate = self.candidate
        return (candidate.paid_gpus - candidate.scenario.cluster.gpus * self.effective) * 30 * 24

    @property
    def lost_money(self) -> float:
        """Return the money of a month for these GPU-hours."""
        return self.lost_gpu_hours * self.candidate.scenario.cluster.price_per_gpu_hour


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    factor = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return factor * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Case:
    """Candidates for the same circumstances, the best first."""

    circumstances: Mapping[str, Any]
    forecasts: tuple[Forecast, ...]
    advice: str
    excluded: tuple[str, ...] = ()
    """Shapes that do not fit, and why."""

    @property
    def title(self) -> str:
        texts = []
        for name, value in self.circumstances.items():
            shown = f"{value:.5g}" if isinstance(value, float) else f"{value}"
            texts.append(f"{name} = {shown}")
        return ", ".join(texts)


Refine = Callable[[Candidate], Candidate]
"""Bound a candidate by the sizes of the job; raises ConfigError for one that does not fit."""


def compare(
    scenarios: Iterable[Scenario],
    measured: Measured | None = None,
    seeds: int = 20,
    refine: Refine = lambda candidate: candidate,
) -> list[Case]:
    """Return the cases of a file, each with its candidates.

    Args:
        seeds: simulated runs of each candidate on the shortlist.
        refine: bounds a candidate by sizes.
    """
    cases: dict[str, tuple[dict[str, Any], list[Candidate], list[str]]] = {}
    for scenario in scenarios:
        circumstances = dict(scenario.swept)
        for name in DECISIONS:
            circumstances.pop(name, None)
        _, candidates, excluded = cases.setdefault(repr(circumstances), (circumstances, [], []))
        for candidate in make_candidates(scenario, measured):
            try:
                candidates.append(refine(candidate))
            except ConfigError as error:
                excluded.append(f"{candidate.shape}: {error}")
    return [_case(*case, measured, seeds) for case in cases.values()]


def _case(
    circumstances: dict[str, Any],
    candidates: list[Candidate],
    excluded: list[str],
    measured: Measured | None,
    seeds: int,
) -> Case:
    forecasts = [Forecast(candidate, estimate(candidate)) for candidate in _distinct(candidates)]
    forecasts.sort(key=lambda each: -each.worth)
    shortlist = _shortlist(forecasts)
    accounts = run_seeds([each.candidate for each in shortlist], measured, seeds)
    best = [replace(each, accounts=runs) for each, runs in zip(shortlist, accounts, strict=True)]
    best.sort(key=lambda each: -each.worth)
    simulated = [each.candidate for each in best]
    everything = (*best, *(each for each in forecasts if each.candidate not in simulated))
    advice = advise(best) if best else f"No shape fits: {excluded[0]}"
    return Case(circumstances, everything, advice, tuple(dict.fromkeys(excluded)))


def _shortlist(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the best ones, and of each strategy that is not among them its best one."""
    shortlist = list(forecasts[:SHORTLIST])
    for each in forecasts[SHORTLIST:]:
        if each.candidate.strategy not in [known.candidate.strategy for known in shortlist]:
            shortlist.append(each)
    return shortlist


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Leave out what is the same: a restart with another number of groups."""
    found: dict[Any, Candidate] = {}
    for each in candidates:
        steps = each.step if each.strategy == "rounds" else 0.0
        found.setdefault((each.strategy, each.groups, each.spares, steps), each)
    return list(found.values())


def run_seeds(
    candidates: Sequence[Candidate],
    measured: Measured | None,
    seeds: int,
    seconds: float | None = None,
) -> list[tuple[Account, ...]]:
    """Return the accounts of simulated runs, for each candidate those of all seeds.

    Candidates meet the failures of one seed after each other, because draws are kept for a while.
    With a record, each run has the costs of another such record.
    """
    accounts: list[list[Account]] = [[] for _ in candidates]
    for seed in range(seeds):
        other = None if measured is None else resample(measured, seed)
        for candidate, runs in zip(candidates, accounts, strict=True):
            each = candidate
            if measured is not None and other is not None and candidate.strategy != "restart":
                each = _with_costs_of(candidate, measured, other)
            runs.append(simulate(each, seed, seconds))
    return [tuple(runs) for runs in accounts]


def _with_costs_of(candidate: Candidate, measured: Measured, other: Measured) -> Candidate:
    """Return the candidate with the pace and the costs of another record in place of `measured`."""
    costs = candidate.costs
    lengths: dict[str, Length] = {}
    for name in ("stall", "away", "rejoin"):
        is_measured = getattr(costs, name) is getattr(measured, name)
        lengths[name] = getattr(other if is_measured else costs, name)
    step = candidate.step * other.step / measured.step
    return replace(candidate, step=step, costs=Costs(**lengths, drag=costs.drag))


# Advice


def advise(ranked: Sequence[Forecast]) -> str:
    """Return one sentence: the choice, the runner-up, restarts, the input that would turn it."""
    best = ranked[0]
    said = f"Take {best.candidate.name}: {100 * best.effective:.1f} % effective training time"
    if len(ranked) == 1:
        return f"{said}; nothing else was compared."
    other = ranked[1]
    said += f"; next comes {other.candidate.name} with {100 * other.effective:.1f} %"
    restart = next((each for each in ranked[2:] if each.candidate.strategy == "restart"), None)
    if restart is not None and "restart" not in (best.candidate.strategy, other.candidate.strategy):
        said += f" (restarts from checkpoints: {100 * restart.effective:.1f} %)"
    if not is_better(best, other):
        return f"{said}, which is no difference: its 95 % interval holds 0."
    advantage = best.worth - other.worth
    closed_advantage = best.closed_worth - other.closed_worth
    if abs(advantage - closed_advantage) > ACCURACY * best.worth:
        # They would carry their error over to other values of an input, and name a false one.
        return (
            f"{said}; the closed forms are too far off here to name an input that would turn that."
        )
    turn = find_turn(best.candidate, other.candidate, advantage)
    if turn is None:
        return f"{said}, and no input, changed by itself up to 16 times, turns that."
    name, factor = turn
    return f"{said}, which would be better if {name} were {factor:.2g} times its value."


def is_better(best: Forecast, other: Forecast) -> bool:
    """True if the 95 % interval of the mean difference, run by run, is above 0."""
    differences = []
    for ours, others in zip(best.accounts, other.accounts, strict=True):
        our_worth = ours.effective * best.candidate.value_of_time
        differences.append(our_worth - others.effective * other.candidate.value_of_time)
    return fmean(differences) > half_interval(differences)


COSTS = {"stall": "stall", "time away": "away", "late when one returns": "rejoin"}
INPUTS = ("time between failures", *COSTS, "save", "repair")
"""Inputs whose effect the closed forms can tell; those of `COSTS` are fields of a candidate's."""


def scaled(candidate: Candidate, name: str, factor: float) -> Candidate:
    """Return a candidate, for closed forms, with one of `INPUTS` multiplied."""
    costs, rates = candidate.costs, candidate.rates
    if name in COSTS:
        field = COSTS[name]
        length: Any = Constant(getattr(costs, field).mean * factor)
        changed = replace(candidate, costs=replace(costs, **{field: length}))
    elif name == "time between failures":
        changed = replace(candidate, rates=rates.scaled(1 / factor))
    elif name == "save":
        changed = replace(candidate, save=candidate.save * factor)
    else:
        changed = replace(candidate, rates=replace(rates, broken_nodes=rates.broken_nodes * factor))
    return with_saves(changed)


def find_turn(best: Candidate, other: Candidate, advantage: float) -> tuple[str, float] | None:
    """Return the input and its smallest factor, 1/16 to 16, with which the other one is better.

    Args:
        advantage: of the best one's worth, by simulation; closed forms say how an input changes it.
    """

    def closed_advantage(name: str, factor: float) -> float:
        ours = estimate(scaled(best, name, factor)) * best.value_of_time
        return ours - estimate(scaled(other, name, factor)) * other.value_of_time

    now = closed_advantage(INPUTS[0], 1.0)
    for eighth in range(1, 33):
        for name in INPUTS:
            for factor in (2.0 ** (eighth / 8), 2.0 ** (-eighth / 8)):
                if advantage + closed_advantage(name, factor) - now < 0:
                    return name, factor
    return None


def sensitivity(candidate: Candidate) -> list[tuple[str, float, float, float]]:
    """Return each input that matters, with the effective time at half, once and twice of it."""
    rows = []
    for name in INPUTS:
        values = [estimate(scaled(candidate, name, factor)) for factor in (0.5, 1.0, 2.0)]
        half, usual, twice = values
        if max(abs(half - usual), abs(twice - usual)) > 1e-5:
            rows.append((name, half, usual, twice))
    return sorted(rows, key=lambda row: -abs(row[3] - row[1]))
