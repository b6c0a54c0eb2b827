# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare candidates: all by closed forms, the best by simulation; advise in a sentence.

`titan-ft plan` compares scenarios here; the tables and the page show the cases that come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

SHORTLIST_SIZE = 6
DECISIONS = ("job.groups", "cluster.spare_nodes", "rounds.steps")
"""Fields that a planner chooses. Each combination of the other swept fields is a case of its own.
Cases are not compared with each other."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t for 1 to 10 degrees of freedom."""

_MATTERS = 1e-5
"""Share of all time. Less would be shown as 0.0 %."""

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
        return half_of_interval([each.effective for each in self.accounts])

    @property
    def closed_forms_disagree(self) -> bool:
        """True if closed forms and simulation differ by more than ACCURACY and the interval of the
        mean together.

        Then sensitivities, charts and advice on inputs are doubtful: they use closed forms only.
        """
        difference = abs(self.effective - self.estimate)
        return difference > ACCURACY * self.effective + self.half_interval

    def spread(self, value_of: ValueOf = attrgetter("effective")) -> tuple[float, float]:
        """Return the range that holds 90 % of the simulated runs, of which there must be two."""
        values = [value_of(each) for each in self.accounts]
        twentieths = quantiles(values, n=20, method="inclusive")
        return twentieths[0], twentieths[-1]

    def shares(self) -> dict[str, float]:
        """Return where the time of the simulated runs went, as shares that add up to 1."""
        found = [each.shares() for each in self.accounts]
        return {name: fmean(each[name] for each in found) for name in PARTS}

    @property
    def worth(self) -> float:
        """Return useful GPUs for each GPU that is paid for. Candidates are ranked by it.

        `value_of_time` allows for spares, and for the value of a token in rounds.
        """
        return self.effective * self.candidate.value_of_time

    @property
    def estimated_worth(self) -> float:
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


def half_of_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean; 0 for a single value, of which nothing is known."""
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    # Above 10 degrees of freedom the sum is within 0.02 of Student's t.
    factor = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return factor * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Case:
    """Candidates for the same circumstances, the best first.

    Attributes:
        circumstances: the swept fields with their values, `DECISIONS` apart.
    """

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


FitToSizes = Callable[[Candidate], Candidate]
"""Return the candidate with the measured length of its exchange; raise ConfigError if the model
cannot be cut so, or if its state does not fit into a GPU."""


@dataclass
class _CaseDraft:
    circumstances: dict[str, Any]
    candidates: list[Candidate] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


def compare(
    scenarios: Iterable[Scenario],
    measured: Measured | None = None,
    num_runs: int = 20,
    fit_to_sizes: FitToSizes = lambda candidate: candidate,
) -> list[Case]:
    """Return the cases of a file, each with its candidates.

    Args:
        num_runs: simulated runs of each candidate on the shortlist, at least two.
    """
    drafts: dict[str, _CaseDraft] = {}
    for scenario in scenarios:
        circumstances = dict(scenario.swept)
        for name in DECISIONS:
            circumstances.pop(name, None)
        draft = drafts.setdefault(repr(circumstances), _CaseDraft(circumstances))
        for candidate in make_candidates(scenario, measured):
            try:
                draft.candidates.append(fit_to_sizes(candidate))
            except ConfigError as error:
                draft.excluded.append(f"{candidate.shape}: {error}")
    return [_make_case(draft, measured, num_runs) for draft in drafts.values()]


def _make_case(draft: _CaseDraft, measured: Measured | None, num_runs: int) -> Case:
    candidates = _distinct(draft.candidates)
    forecasts = [Forecast(candidate, estimate(candidate)) for candidate in candidates]
    forecasts.sort(key=lambda each: -each.worth)
    shortlist = _shortlist(forecasts)
    accounts = run_seeds([each.candidate for each in shortlist], measured, num_runs)
    simulated = []
    for forecast, runs in zip(shortlist, accounts, strict=True):
        simulated.append(replace(forecast, accounts=runs))
    simulated.sort(key=lambda each: -each.worth)
    simulated_candidates = [each.candidate for each in simulated]
    others = [each for each in forecasts if each.candidate not in simulated_candidates]
    advice = advise(simulated) if simulated else f"No shape fits: {draft.excluded[0]}"
    excluded = tuple(dict.fromkeys(draft.excluded))
    return Case(draft.circumstances, (*simulated, *others), advice, excluded)


def _shortlist(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the best `SHORTLIST_SIZE` forecasts, and the best of each strategy that has none among
    them.
    """
    shortlist = list(forecasts[:SHORTLIST_SIZE])
    for each in forecasts[SHORTLIST_SIZE:]:
        if each.candidate.strategy not in [known.candidate.strategy for known in shortlist]:
            shortlist.append(each)
    return shortlist


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Leave out duplicates: a restart has one group, whatever `job.groups` is."""
    found: dict[Any, Candidate] = {}
    for each in candidates:
        # The length of a round differs with rounds.steps.
        round_seconds = each.step if each.strategy == "rounds" else 0.0
        found.setdefault((each.strategy, each.groups, each.spares, round_seconds), each)
    return list(found.values())


def run_seeds(
    candidates: Sequence[Candidate],
    measured: Measured | None,
    num_runs: int,
    seconds: float | None = None,
) -> list[tuple[Account, ...]]:
    """Return the accounts of simulated runs, for each candidate those of all seeds.

    The outer loop is over seeds: all candidates use the failures of a seed while
    `failures._first_ends` still has them. With a record, each run draws its costs anew from it.
    """
    accounts: list[list[Account]] = [[] for _ in candidates]
    for seed in range(num_runs):
        for candidate, runs in zip(candidates, accounts, strict=True):
            each = candidate
            # A restart has no cost from a record.
            if measured is not None and candidate.strategy != "restart":
                each = _with_costs_of(candidate, measured, resample(measured, seed))
            runs.append(simulate(each, seed, seconds))
    return [tuple(runs) for runs in accounts]


def _with_costs_of(candidate: Candidate, measured: Measured, other: Measured) -> Candidate:
    """Return the candidate with the pace and the costs of another record in place of `measured`."""
    costs = candidate.costs
    lengths: dict[str, Length] = {}
    for name in ("stall", "away", "rejoin"):
        # The same object: the scenario left this cost out, and the record's was taken.
        is_measured = getattr(costs, name) is getattr(measured, name)
        source = other if is_measured else costs
        lengths[name] = getattr(source, name)
    pace = other.step / measured.step
    return replace(
        candidate,
        step=candidate.step * pace,
        usual_step=candidate.usual_step * pace,
        costs=Costs(**lengths, drag=costs.drag),
    )


# Advice


def advise(ranked: Sequence[Forecast]) -> str:
    """Return what to take, the runner-up, the next shape, and the input that would turn it."""
    best = ranked[0]
    differs = any(abs(each.worth - each.effective) >= 5e-4 for each in ranked)
    said = f"Take {_describe(best, with_worth=differs)}"
    if len(ranked) == 1:
        return f"{said}; nothing else was compared."
    other = ranked[1]
    said += f"; next comes {_describe(other, with_worth=differs)}"
    for each in _find_next_shapes(ranked):
        said += f"; {_describe(each, with_worth=differs)}"
    if not is_better(best, other):
        return f"{said}. The first two do not differ: the 95 % interval of the difference holds 0."
    advantage = best.worth - other.worth
    closed_advantage = best.estimated_worth - other.estimated_worth
    if abs(advantage - closed_advantage) > ACCURACY * best.worth:
        # The closed forms would carry their error over to other values of an input, and a wrong
        # input would be named.
        return f"{said}. The closed forms are too far off here to name an input that turns that."
    turn = find_turn(best.candidate, other.candidate, advantage)
    if turn is None:
        tried = ", ".join(_find_inputs_of(best.candidate, other.candidate))
        return f"{said}. None of these inputs, changed up to 16 times, turns that: {tried}."
    name, factor = turn
    return (
        f"{said}. {other.candidate.name} would be better if {name} were {factor:.2g} times as much."
    )


def _describe(forecast: Forecast, *, with_worth: bool) -> str:
    """Return the name of a candidate with its effective time.

    Args:
        with_worth: name `worth` too, by which candidates are ranked.
    """
    said = f"{forecast.candidate.name}: {100 * forecast.effective:.1f} % effective training time"
    if not with_worth:
        return said
    return f"{said}, {100 * forecast.worth:.1f} % of what is paid for"


def _find_next_shapes(ranked: Sequence[Forecast]) -> list[Forecast]:
    """Return the best forecast of another shape and the best restart, unless the first two have
    been named already.
    """
    found: list[Forecast] = []
    shapes = [each.candidate.shape for each in ranked[:2]]
    wants_shape = shapes[0] == shapes[1]
    for each in ranked[2:]:
        if each.candidate.shape in shapes:
            continue
        if each.candidate.strategy == "restart":
            found.append(each)
            shapes.append(each.candidate.shape)
        elif wants_shape:
            found.append(each)
            shapes.append(each.candidate.shape)
            wants_shape = False
    return found


def _find_inputs_of(best: Candidate, other: Candidate) -> list[str]:
    """Return the names of the inputs that change at least one of two candidates when they change."""
    found = []
    for name in INPUTS:
        for candidate in (best, other):
            changed = scaled(candidate, name, 2.0)
            worth = estimate(candidate) * candidate.value_of_time
            if estimate(changed) * changed.value_of_time != worth:
                found.append(name)
                break
    return found


def is_better(best: Forecast, other: Forecast) -> bool:
    """True if the 95 % interval of the mean difference, run by run, is above 0."""
    differences = []
    for ours, others in zip(best.accounts, other.accounts, strict=True):
        our_worth = ours.effective * best.candidate.value_of_time
        differences.append(our_worth - others.effective * other.candidate.value_of_time)
    return fmean(differences) > half_of_interval(differences)


COST_FIELDS = {
    "stall": "stall",
    "time away": "away",
    "recover": "away",
    "late when one returns": "rejoin",
}
"""The inputs that are fields of `Costs`, by their names for people."""
INPUTS = (
    "time between failures",
    *COST_FIELDS,
    "save",
    "repair",
    "drag",
    "exchange",
    "the value of a token in rounds",
)
"""Inputs whose effect the closed forms can tell."""


def scaled(candidate: Candidate, name: str, factor: float) -> Candidate:
    """Return a candidate with one of `INPUTS` multiplied.

    It is for closed forms, which read means only: its costs are constants, and its scenario is
    still the former one.
    """
    costs, rates = candidate.costs, candidate.rates
    changed = candidate
    is_restart = candidate.strategy == "restart"
    if name in COST_FIELDS and is_restart == (name == "recover"):
        field_name = COST_FIELDS[name]
        length = Constant(getattr(costs, field_name).mean * factor)
        lengths: dict[str, Any] = {field_name: length}
        changed = replace(candidate, costs=replace(costs, **lengths))
    elif name == "time between failures":
        changed = replace(candidate, rates=rates.scaled(1 / factor))
    elif name == "save":
        changed = replace(candidate, save=candidate.save * factor)
    elif name == "repair":
        # The nodes that are being mended, on average, are the rate times the time of a repair.
        broken_nodes = min(candidate.scenario.cluster.nodes, rates.broken_nodes * factor)
        changed = replace(candidate, rates=replace(rates, broken_nodes=broken_nodes))
    elif name == "drag":
        changed = replace(candidate, costs=replace(costs, drag=costs.drag * factor))
    elif name == "exchange":
        changed = replace(candidate, exchange=candidate.exchange * factor)
    elif name == "the value of a token in rounds" and candidate.strategy == "rounds":
        changed = replace(candidate, value_of_a_token=candidate.value_of_a_token * factor)
    return with_saves(changed)  # the best interval between saves follows the input


def find_turn(best: Candidate, other: Candidate, advantage: float) -> tuple[str, float] | None:
    """Return the input, and its factor nearest to 1, that makes `other` better.

    Factors of 1/16 to 16 are tried.

    Args:
        advantage: the worth of `best` minus that of `other`, simulated. Closed forms say how it
            changes with an input.
    """

    def closed_advantage(name: str, factor: float) -> float:
        ours, theirs = scaled(best, name, factor), scaled(other, name, factor)
        return estimate(ours) * ours.value_of_time - estimate(theirs) * theirs.value_of_time

    unchanged = closed_advantage(INPUTS[0], 1.0)
    for eighth in range(1, 33):  # of an octave, up to 2 ** 4 = 16
        for name in INPUTS:
            for factor in (2.0 ** (eighth / 8), 2.0 ** (-eighth / 8)):
                if advantage + closed_advantage(name, factor) - unchanged < 0:
                    return name, factor
    return None


def sensitivity(candidate: Candidate) -> list[tuple[str, float, float, float]]:
    """Return each input that matters, with the effective time at half, once and twice of it."""
    rows = []
    for name in INPUTS:
        values = [estimate(scaled(candidate, name, factor)) for factor in (0.5, 1.0, 2.0)]
        half, usual, twice = values
        if max(abs(half - usual), abs(twice - usual)) > _MATTERS:
            rows.append((name, half, usual, twice))
    return sorted(rows, key=lambda row: -abs(row[3] - row[1]))
