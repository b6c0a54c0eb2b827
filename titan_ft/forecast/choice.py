# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the candidates of a scenario file, and advise in one sentence which one to take.

`titan-ft plan` calls `compare`. The tables and the page show the cases that `compare` returns:

1. It groups the candidates of all scenarios into cases.
2. It estimates the effective training time of each candidate by closed forms, and ranks them.
3. It simulates the shortlist: the best candidates, and the best of each strategy.
4. It ranks the simulated candidates again by the results, and writes the advice.

Terms:
- candidate: a strategy (restarts from checkpoints, groups, rounds) with a number of groups, a
  number of spare nodes, and its costs.
- closed forms: formulas for the effective training time (closed_forms.py). They are much faster
  than a simulation and less exact.
- swept field: a field of the scenario file with a list of values.
- case: the candidates that have the same values in all swept fields, except in `CHOICES`. Only
  candidates of the same case compete with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import fmean, quantiles, stdev
from typing import Any, NamedTuple

from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import Candidate, Costs, make_candidates, with_saves
from titan_ft.forecast.closed_forms import ACCURACY, estimate
from titan_ft.forecast.lengths import Constant, Length
from titan_ft.forecast.measured import Measured, resample
from titan_ft.forecast.scenario import Scenario
from titan_ft.forecast.simulation import TIME_CATEGORIES, Account, simulate

SHORTLIST_SIZE = 6
CHOICES = ("job.groups", "cluster.spare_nodes", "rounds.steps")
"""Fields that the reader of a forecast can choose. The other fields are given circumstances."""
_STUDENT_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom."""
_SMALLEST_EFFECT = 1e-5
"""Share of all time. Smaller effects would be shown as 0.0 %."""
_VISIBLE_DIFFERENCE = 5e-4
"""Difference between two shares of all time that shows in the first decimal of a percentage."""

ValueOf = Callable[[Account], float]
"""Selects one figure of a simulated run."""
FitToSizes = Callable[[Candidate], Candidate]
"""Takes a candidate, and returns it with the measured length of its exchange.

Raises ConfigError if the model cannot be sharded over so many GPUs, or if its state does not fit
into the memory of a GPU.
"""


@dataclass(frozen=True)
class Forecast:
    """The expected performance of one candidate."""

    candidate: Candidate
    estimate: float
    """The effective training time by closed forms."""
    accounts: tuple[Account, ...] = ()
    """The simulated runs of the candidate; empty if the candidate is not on the shortlist."""

    @property
    def effective(self) -> float:
        """Return the mean effective training time of the simulated runs, or else the estimate."""
        if not self.accounts:
            return self.estimate
        return fmean(account.effective for account in self.accounts)

    @property
    def half_interval(self) -> float:
        """Return half of the 95 % confidence interval of `effective`."""
        return half_interval_of_mean([account.effective for account in self.accounts])

    @property
    def closed_forms_disagree(self) -> bool:
        """True if closed forms and simulation differ by more than ACCURACY and chance together.

        Sensitivities, charts and the advice on inputs are then doubtful, because all of them rest
        on closed forms.
        """
        difference = abs(self.effective - self.estimate)
        return difference > ACCURACY * self.effective + self.half_interval

    def spread(self, value_of: ValueOf = attrgetter("effective")) -> tuple[float, float]:
        """Return the 5th and the 95th percentile of a figure. There must be two runs or more."""
        values = [value_of(account) for account in self.accounts]
        twentieths = quantiles(values, n=20, method="inclusive")
        return twentieths[0], twentieths[-1]

    def shares(self) -> dict[str, float]:
        """Return the share of each time category, as the mean of the simulated runs."""
        shares_of_runs = [account.shares() for account in self.accounts]
        means = {}
        for name in TIME_CATEGORIES:
            means[name] = fmean(shares[name] for shares in shares_of_runs)
        return means

    @property
    def worth(self) -> float:
        """Return the useful GPUs as a share of the paid GPUs. It ranks the candidates.

        Spare nodes are paid as well. In rounds a token may be worth less than a token of
        synchronous training. `Candidate.value_of_time` takes both into account.
        """
        return self.effective * self.candidate.value_of_time

    @property
    def estimated_worth(self) -> float:
        """Return `worth` by closed forms."""
        return self.estimate * self.candidate.value_of_time

    @property
    def lost_gpu_hours(self) -> float:
        """Return the GPU-hours of 30 days that are paid for and not useful."""
        candidate = self.candidate
        useful_gpus = candidate.scenario.cluster.gpus * self.effective
        return (candidate.paid_gpus - useful_gpus) * 30 * 24

    @property
    def lost_money(self) -> float:
        """Return the price of `lost_gpu_hours`."""
        return self.lost_gpu_hours * self.candidate.scenario.cluster.price_per_gpu_hour


def half_interval_of_mean(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean of some values.

    It is 0 for fewer than two values, from which no interval can be computed.
    """
    if len(values) < 2:
        return 0.0
    freedom = len(values) - 1
    if freedom <= len(_STUDENT_T_95):
        factor = _STUDENT_T_95[freedom - 1]
    else:
        # An approximation: above 10 degrees of freedom it is within 0.02 of Student's t.
        factor = 1.96 + 2.5 / freedom
    return factor * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Case:
    """Candidates under the same circumstances, the best first.

    Attributes:
        circumstances: the values of the swept fields, without `CHOICES`.
        forecasts: the simulated candidates, then the other candidates.
        advice: the sentence of advice.
    """

    circumstances: Mapping[str, Any]
    forecasts: tuple[Forecast, ...]
    advice: str
    excluded: tuple[str, ...] = ()
    """Shapes that `FitToSizes` refused, each with the reason."""

    @property
    def title(self) -> str:
        texts = []
        for name, value in self.circumstances.items():
            shown = f"{value:.5g}" if isinstance(value, float) else f"{value}"
            texts.append(f"{name} = {shown}")
        return ", ".join(texts)


@dataclass
class _CaseDraft:
    """The candidates of a case before any estimate."""

    circumstances: dict[str, Any]
    candidates: list[Candidate] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


def compare(
    scenarios: Iterable[Scenario],
    measured: Measured | None = None,
    num_runs: int = 20,
    fit_to_sizes: FitToSizes = lambda candidate: candidate,
) -> list[Case]:
    """Return the cases of a scenario file, each with its candidates and its advice.

    Args:
        scenarios: one scenario for each combination of the swept values.
        measured: the costs of a run's record, for costs that the scenarios leave out.
        num_runs: simulated runs of each candidate on the shortlist, at least two.
        fit_to_sizes: by default no candidate is refused, and the length of the exchange is that of
            the scenario.
    """
    drafts: dict[str, _CaseDraft] = {}
    for scenario in scenarios:
        circumstances = dict(scenario.swept)
        for name in CHOICES:
            circumstances.pop(name, None)
        key = repr(circumstances)  # a dict cannot be a key itself
        draft = drafts.setdefault(key, _CaseDraft(circumstances))
        for candidate in make_candidates(scenario, measured):
            try:
                draft.candidates.append(fit_to_sizes(candidate))
            except ConfigError as error:
                draft.excluded.append(f"{candidate.shape}: {error}")
    return [_make_case(draft, measured, num_runs) for draft in drafts.values()]


def _make_case(draft: _CaseDraft, measured: Measured | None, num_runs: int) -> Case:
    candidates = _without_duplicates(draft.candidates)
    forecasts = [Forecast(candidate, estimate(candidate)) for candidate in candidates]
    forecasts.sort(key=attrgetter("worth"), reverse=True)
    shortlist = _make_shortlist(forecasts)
    not_simulated = [forecast for forecast in forecasts if forecast not in shortlist]
    accounts = run_seeds([forecast.candidate for forecast in shortlist], measured, num_runs)
    simulated = []
    for forecast, runs in zip(shortlist, accounts, strict=True):
        simulated.append(replace(forecast, accounts=runs))
    simulated.sort(key=attrgetter("worth"), reverse=True)
    advice = advise(simulated) if simulated else f"No shape fits: {draft.excluded[0]}"
    # Candidates that differ only in their spare nodes are refused with the same text.
    excluded = tuple(dict.fromkeys(draft.excluded))
    return Case(draft.circumstances, (*simulated, *not_simulated), advice, excluded)


def _make_shortlist(ranked: Sequence[Forecast]) -> list[Forecast]:
    """Return the best `SHORTLIST_SIZE` forecasts.

    If they contain no forecast of some strategy, the best forecast of that strategy is added.
    """
    shortlist = list(ranked[:SHORTLIST_SIZE])
    strategies = {forecast.candidate.strategy for forecast in shortlist}
    for forecast in ranked[SHORTLIST_SIZE:]:
        if forecast.candidate.strategy not in strategies:
            shortlist.append(forecast)
            strategies.add(forecast.candidate.strategy)
    return shortlist


class _Identity(NamedTuple):
    """The fields in which two candidates of the same case must differ. Else they are duplicates."""

    strategy: str
    groups: int
    spares: int | None
    round_seconds: float


def _without_duplicates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each identity.

    A list of `job.groups` makes duplicates: a job that restarts from checkpoints is the same for
    each value.
    """
    found: dict[_Identity, Candidate] = {}
    for candidate in candidates:
        # Candidates with strategy "rounds" may differ in `rounds.steps` only.
        round_seconds = candidate.step if candidate.strategy == "rounds" else 0.0
        identity = _Identity(candidate.strategy, candidate.groups, candidate.spares, round_seconds)
        found.setdefault(identity, candidate)
    return list(found.values())


def run_seeds(
    candidates: Sequence[Candidate],
    measured: Measured | None,
    num_runs: int,
    seconds: float | None = None,
) -> list[tuple[Account, ...]]:
    """Simulate each candidate with the seeds 0, 1, ...; return its accounts.

    With the costs of a record, each run draws a new sample of these costs. So the spread of the runs
    shows how little the record knows.

    Args:
        measured: the record from which costs of the candidates were taken.
        num_runs: number of seeds.
        seconds: length of a run; None takes the scenario's days.
    """
    accounts: list[list[Account]] = [[] for _ in candidates]
    # All candidates meet the same failures of a seed. The outer loop is over the seeds, because
    # `failures._draw_first_ends` caches expensive draws, and only those of the latest few seeds.
    for seed in range(num_runs):
        for candidate, runs in zip(candidates, accounts, strict=True):
            drawn = candidate
            # A job that restarts takes no cost from a record.
            if measured is not None and candidate.strategy != "restart":
                drawn = _replace_costs(candidate, measured, resample(measured, seed))
            runs.append(simulate(drawn, seed, seconds))
    return [tuple(runs) for runs in accounts]


def _replace_costs(candidate: Candidate, measured: Measured, resampled: Measured) -> Candidate:
    """Return the candidate with resampled costs in place of those that came from the record.

    Costs that the scenario gives stay as they are. The length of a step changes as the mean step of
    the record does.
    """
    costs = candidate.costs
    lengths: dict[str, Length] = {}
    for name in ("stall", "away", "rejoin"):
        # `make_candidates` puts the record's own object into a candidate, so identity shows where a
        # cost came from. Equal numbers would not show it.
        is_from_record = getattr(costs, name) is getattr(measured, name)
        source = resampled if is_from_record else costs
        lengths[name] = getattr(source, name)
    pace = resampled.step / measured.step
    return replace(
        candidate,
        step=candidate.step * pace,
        usual_step=candidate.usual_step * pace,
        costs=Costs(**lengths, drag=costs.drag),
    )


# Advice


def advise(ranked: Sequence[Forecast]) -> str:
    """Return a sentence with the best candidate, the runner-up and the best of another shape.

    If the first two differ, the sentence also names the input whose change would make the runner-up
    better, or says why it names none.

    Args:
        ranked: simulated candidates, the best first.
    """
    best = ranked[0]
    # Without spares and with tokens of full value, worth and effective time are the same figure.
    with_worth = any(
        abs(forecast.worth - forecast.effective) >= _VISIBLE_DIFFERENCE for forecast in ranked
    )
    sentence = f"Take {_describe(best, with_worth=with_worth)}"
    if len(ranked) == 1:
        return f"{sentence}; nothing else was compared."
    runner_up = ranked[1]
    sentence += f"; next comes {_describe(runner_up, with_worth=with_worth)}"
    for forecast in _find_other_shapes(ranked):
        sentence += f"; {_describe(forecast, with_worth=with_worth)}"
    if not is_better(best, runner_up):
        reason = "the 95 % interval of the difference holds 0"
        return f"{sentence}. The first two do not differ: {reason}."
    advantage = best.worth - runner_up.worth
    estimated_advantage = best.estimated_worth - runner_up.estimated_worth
    if abs(advantage - estimated_advantage) > ACCURACY * best.worth:
        # The closed forms are wrong about this very pair. They would name a wrong input.
        return (
            f"{sentence}. The closed forms are too far off here to name an input that turns that."
        )
    tipping_point = find_tipping_point(best.candidate, runner_up.candidate, advantage)
    if tipping_point is None:
        tried = ", ".join(_find_relevant_inputs(best.candidate, runner_up.candidate))
        return f"{sentence}. None of these inputs, changed up to 16 times, turns that: {tried}."
    change = f"{tipping_point.input_name} were {tipping_point.factor:.2g} times as much"
    return f"{sentence}. {runner_up.candidate.name} would be better if {change}."


def _describe(forecast: Forecast, *, with_worth: bool) -> str:
    """Return the name of a candidate with its effective training time.

    Args:
        with_worth: add `worth`, by which the candidates are ranked.
    """
    text = f"{forecast.candidate.name}: {100 * forecast.effective:.1f} % effective training time"
    if with_worth:
        text += f", {100 * forecast.worth:.1f} % of what is paid for"
    return text


def _find_other_shapes(ranked: Sequence[Forecast]) -> list[Forecast]:
    """Return forecasts that the advice names after the first two, the best first.

    They are the best restart, if it is not among the first two, and the best forecast of another
    shape, if the first two have the same shape and differ in spare nodes only.
    """
    found: list[Forecast] = []
    named_shapes = [forecast.candidate.shape for forecast in ranked[:2]]
    needs_another_shape = named_shapes[0] == named_shapes[1]
    for forecast in ranked[2:]:
        shape = forecast.candidate.shape
        if shape in named_shapes:
            continue
        is_restart = forecast.candidate.strategy == "restart"
        if not is_restart and not needs_another_shape:
            continue
        found.append(forecast)
        named_shapes.append(shape)
        if not is_restart:
            needs_another_shape = False
    return found


def _find_relevant_inputs(best: Candidate, runner_up: Candidate) -> list[str]:
    """Return the inputs that have an effect on one of the two candidates at least."""
    found = []
    for name in INPUTS:
        for candidate in (best, runner_up):
            if _estimate_worth(scale_input(candidate, name, 2.0)) != _estimate_worth(candidate):
                found.append(name)
                break
    return found


def _estimate_worth(candidate: Candidate) -> float:
    return estimate(candidate) * candidate.value_of_time


def is_better(best: Forecast, other: Forecast) -> bool:
    """True if `best` is better by more than chance: the 95 % interval of the difference is above 0.

    The runs of a seed are compared with each other, because they meet the same failures.
    """
    differences = []
    for best_run, other_run in zip(best.accounts, other.accounts, strict=True):
        best_worth = best_run.effective * best.candidate.value_of_time
        other_worth = other_run.effective * other.candidate.value_of_time
        differences.append(best_worth - other_worth)
    return fmean(differences) > half_interval_of_mean(differences)


COST_FIELDS = {
    "stall": "stall",
    "time away": "away",
    "recover": "away",
    "late when one returns": "rejoin",
}
"""The inputs that are fields of `Costs`, by their names for people.

`Costs.away` has two names: "recover" for a job that restarts, "time away" for groups. They are two
inputs, so that a change of one does not change the other.
"""
INPUTS = (
    "time between failures",
    *COST_FIELDS,
    "save",
    "repair",
    "drag",
    "exchange",
    "the value of a token in rounds",
)
"""The inputs whose effect the closed forms can show, by their names for people."""


def scale_input(candidate: Candidate, name: str, factor: float) -> Candidate:
    """Return the candidate with one of its inputs multiplied by a factor.

    Only closed forms can use the result, because they read nothing but the means of a candidate.
    Its costs become constants. Its `scenario`, which a simulation would read, stays unchanged.

    Args:
        name: one of `INPUTS`. An input that the candidate does not have changes nothing.
    """
    costs = candidate.costs
    rates = candidate.rates
    changed = candidate
    cost_field = _find_cost_field(candidate, name)
    if cost_field is not None:
        length = Constant(getattr(costs, cost_field).mean * factor)
        lengths: dict[str, Any] = {cost_field: length}
        changed = replace(candidate, costs=replace(costs, **lengths))
    elif name == "time between failures":
        changed = replace(candidate, rates=rates.scaled(1 / factor))
    elif name == "save":
        changed = replace(candidate, save=candidate.save * factor)
    elif name == "repair":
        # On average as many nodes are in repair as break during the time of one repair.
        broken_nodes = min(candidate.scenario.cluster.nodes, rates.broken_nodes * factor)
        changed = replace(candidate, rates=replace(rates, broken_nodes=broken_nodes))
    elif name == "drag":
        changed = replace(candidate, costs=replace(costs, drag=costs.drag * factor))
    elif name == "exchange":
        changed = replace(candidate, exchange=candidate.exchange * factor)
    elif name == "the value of a token in rounds" and candidate.strategy == "rounds":
        changed = replace(candidate, value_of_a_token=candidate.value_of_a_token * factor)
    # The best interval between saves depends on most inputs.
    return with_saves(changed)


def _find_cost_field(candidate: Candidate, name: str) -> str | None:
    """Return the field of `Costs` that an input changes; None if it changes none."""
    if candidate.strategy == "restart":
        return COST_FIELDS[name] if name == "recover" else None
    return None if name == "recover" else COST_FIELDS.get(name)


class TippingPoint(NamedTuple):
    """The change of one input that makes the runner-up better than the best candidate."""

    input_name: str
    factor: float
    """How many times as large the input must be."""


def find_tipping_point(
    best: Candidate, runner_up: Candidate, advantage: float
) -> TippingPoint | None:
    """Return the smallest change of one input that makes `runner_up` better; None if there is none.

    The changes are factors from 1/16 to 16, in eighths of an octave, the factors nearest to 1 first.

    Args:
        advantage: the worth of `best` minus the worth of `runner_up`, by simulation. The closed
            forms only add the change of the advantage that an input causes.
    """

    def estimated_advantage(name: str, factor: float) -> float:
        changed_best = scale_input(best, name, factor)
        changed_runner_up = scale_input(runner_up, name, factor)
        return _estimate_worth(changed_best) - _estimate_worth(changed_runner_up)

    unchanged = estimated_advantage(INPUTS[0], 1.0)
    for eighths in range(1, 4 * 8 + 1):
        for name in INPUTS:
            for factor in (2.0 ** (eighths / 8), 2.0 ** (-eighths / 8)):
                if advantage + estimated_advantage(name, factor) - unchanged < 0:
                    return TippingPoint(name, factor)
    return None


class Sensitivity(NamedTuple):
    """The estimated effective training time at half, once and twice the value of an input."""

    input_name: str
    half: float
    usual: float
    twice: float


def find_sensitivities(candidate: Candidate) -> list[Sensitivity]:
    """Return the sensitivity to each input that has a visible effect, the largest effect first."""
    rows = []
    for name in INPUTS:
        half, usual, twice = (
            estimate(scale_input(candidate, name, factor)) for factor in (0.5, 1.0, 2.0)
        )
        if max(abs(half - usual), abs(twice - usual)) > _SMALLEST_EFFECT:
            rows.append(Sensitivity(name, half, usual, twice))
    return sorted(rows, key=lambda row: abs(row.twice - row.half), reverse=True)
