# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare candidates: all by closed forms, the best by simulation under common random numbers; advise in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import msgspec

from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import ENVELOPE, Candidate, Costs, estimate, make_candidates, pressure, with_saves
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured, resample
from titan_ft.forecast.scenario import Scenario
from titan_ft.forecast.simulation import PARTS, Account, simulate

SHORTLIST = 6
DECISIONS = ("job.groups", "cluster.spare_nodes", "rounds.steps")
"""Fields that a planner chooses; every other swept field makes cases of their own, which are not compared."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 1 to 10 degrees of freedom."""


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

    def spread(self, value_of: Callable[[Account], float] = lambda each: each.effective) -> tuple[float, float]:
        """Return the 5th and the 95th percentile of one run."""
        return percentile([value_of(each) for each in self.accounts], 0.05), percentile(
            [value_of(each) for each in self.accounts], 0.95
        )

    def shares(self) -> dict[str, float]:
        """Return where the time went, as shares that add up to 1."""
        found = [each.shares() for each in self.accounts]
        return {name: fmean(each[name] for each in found) for name in PARTS}

    @property
    def worth(self) -> float:
        """Return useful GPUs for each one that is paid for: the figure that candidates are ranked by."""
        return self.effective * self.candidate.value / self.candidate.cost_factor

    @property
    def lost_gpu_hours(self) -> float:
        """Return GPU-hours of a month (30 days) that are paid for and not used."""
        candidate = self.candidate
        return (candidate.paid_gpus - candidate.scenario.cluster.gpus * self.effective) * 30 * 24

    @property
    def is_outside(self) -> bool:
        """True if the pressure is beyond that in which the closed forms are within 1 %."""
        return pressure(self.candidate) > ENVELOPE


def half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    factor = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return factor * stdev(values) / math.sqrt(len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Case:
    """Candidates for the same circumstances, the best first."""

    circumstances: Mapping[str, Any]
    forecasts: tuple[Forecast, ...]
    advice: str
    excluded: tuple[str, ...] = ()
    """Shapes that do not fit, and why."""


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
        circumstances = {name: value for name, value in scenario.swept.items() if name not in DECISIONS}
        _, candidates, excluded = cases.setdefault(repr(circumstances), (circumstances, [], []))
        for candidate in make_candidates(scenario, measured):
            try:
                candidates.append(refine(candidate))
            except ConfigError as error:
                excluded.append(f"{candidate.describe()}: {error}")
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
    best = [replace(each, accounts=run_seeds(each.candidate, measured, seeds)) for each in _shortlist(forecasts)]
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
    candidate: Candidate, measured: Measured | None, seeds: int, seconds: float | None = None
) -> tuple[Account, ...]:
    """Return the accounts of simulated runs. With a record, each run has the costs of another such record."""
    accounts = []
    for seed in range(seeds):
        each = candidate
        if measured is not None and candidate.strategy != "restart":
            other = resample(measured, seed)
            costs = candidate.costs
            lengths: dict[str, Length] = {}
            for name in ("stall", "away", "rejoin"):
                is_measured = getattr(costs, name) is getattr(measured, name)
                lengths[name] = getattr(other, name) if is_measured else getattr(costs, name)
            step = candidate.step * other.step / measured.step
            each = replace(candidate, step=step, costs=Costs(**lengths, drag=costs.drag))
        accounts.append(simulate(each, seed, seconds))
    return tuple(accounts)


# Advice


def advise(ranked: Sequence[Forecast]) -> str:
    """Return one sentence: what to take, the runner-up, what restarts would do, and which input would turn it."""
    best = ranked[0]
    said = f"Take {name_of(best)}: {100 * best.effective:.1f} % effective training time"
    if len(ranked) == 1:
        return f"{said}; nothing else was compared."
    other = ranked[1]
    said += f"; next comes {name_of(other)} with {100 * other.effective:.1f} %"
    restart = next((each for each in ranked[2:] if each.candidate.strategy == "restart"), None)
    if restart is not None and "restart" not in (best.candidate.strategy, other.candidate.strategy):
        said += f" (restarts from checkpoints: {100 * restart.effective:.1f} %)"
    if not is_better(best, other):
        return f"{said}, which is no difference: its 95 % interval holds 0."
    turn = find_turn(best.candidate, other.candidate)
    if turn is None:
        return f"{said}, and no input, changed by itself up to 16 times, turns that."
    name, factor = turn
    return f"{said}, which would be better if {name} were {factor:.2g} times what it is."


def is_better(best: Forecast, other: Forecast) -> bool:
    """True if the mean difference of runs with the same failures is above 0 by its 95 % interval."""
    differences = [
        ours.effective * best.candidate.value / best.candidate.cost_factor
        - others.effective * other.candidate.value / other.candidate.cost_factor
        for ours, others in zip(best.accounts, other.accounts, strict=True)
    ]
    return fmean(differences) > half_interval(differences)


def name_of(forecast: Forecast) -> str:
    candidate = forecast.candidate
    spares = candidate.spares
    return candidate.describe() + ("" if spares is None else f" with {spares} spare nodes")


INPUTS = ("time between failures", "stall", "time away", "late when one returns", "save", "repair")


def scaled(candidate: Candidate, name: str, factor: float) -> Candidate:
    """Return a candidate with one of `INPUTS` multiplied."""
    costs, scenario = candidate.costs, candidate.scenario
    if name == "stall":
        return replace(candidate, costs=replace(costs, stall=Constant(costs.stall.mean * factor)))
    if name == "time away":
        return replace(candidate, costs=replace(costs, away=Constant(costs.away.mean * factor)))
    if name == "late when one returns":
        return replace(candidate, costs=replace(costs, rejoin=Constant(costs.rejoin.mean * factor)))
    if name == "save":
        return with_saves(replace(candidate, save=candidate.save * factor))
    kinds = []
    for kind in scenario.failures:
        values = msgspec.structs.asdict(kind)
        if name == "repair" and isinstance(kind.repair, float | int):
            values["repair"] = kind.repair * factor
        elif name == "time between failures":
            for rate in ("mtbf", "mtbf_of_each"):
                if values[rate] is not None:
                    values[rate] *= factor
            if kind.per_1000_node_days is not None:
                values["per_1000_node_days"] = kind.per_1000_node_days / factor
        kinds.append(type(kind)(**values))
    return with_saves(replace(candidate, scenario=msgspec.structs.replace(scenario, failures=tuple(kinds))))


def _advantage(best: Candidate, other: Candidate, name: str, factor: float) -> float:
    def worth(candidate: Candidate) -> float:
        return estimate(scaled(candidate, name, factor)) * candidate.value / candidate.cost_factor

    return worth(best) - worth(other)


def find_turn(best: Candidate, other: Candidate) -> tuple[str, float] | None:
    """Return the input, and the smallest factor up to 16 or down to 1/16, with which the other one is better."""
    found: list[tuple[float, str, float]] = []
    for name in INPUTS:
        for direction in (1, -1):
            for eighth in range(1, 33):
                factor = 2.0 ** (direction * eighth / 8)
                if _advantage(best, other, name, factor) < 0:
                    found.append((eighth, name, factor))
                    break
    if not found:
        return None
    _, name, factor = min(found)
    return name, factor


def sensitivity(candidate: Candidate) -> list[tuple[str, float, float, float]]:
    """Return each input that matters: the effective training time with half of it, as it is, and twice."""
    rows = []
    for name in INPUTS:
        half, usual, twice = (estimate(scaled(candidate, name, factor)) for factor in (0.5, 1.0, 2.0))
        if max(abs(half - usual), abs(twice - usual)) > 1e-5:
            rows.append((name, half, usual, twice))
    return sorted(rows, key=lambda row: -abs(row[3] - row[1]))
