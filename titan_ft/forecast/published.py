# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The validation set: compare published figures with those of this planner.

`titan-ft plan --validate` and a test call `validate`. The cases are in published.toml, which explains
their fields. Each case describes a published system as a scenario, and lists the figures that its
source gives (`expect`). Each figure is computed from simulated runs, or by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tomli
from msgspec import Struct

from titan_ft.faults.schema import convert
from titan_ft.forecast.candidate import Candidate, make_candidates
from titan_ft.forecast.closed_forms import enough_spares
from titan_ft.forecast.scenario import read_scenarios
from titan_ft.forecast.simulation import Account, simulate

NUM_RUNS = 5
"""Simulated runs of a case. A figure is the mean of its runs."""


class PublishedCase(Struct, frozen=True):
    """One row of published.toml, which explains the fields."""

    id: str
    kind: Literal["pin", "fitted", "identity", "bound", "open"]
    grade: str
    source: str
    tolerance: float = 0.0
    expect: dict[str, float] = {}
    open: tuple[str, ...] = ()
    why: str = ""
    fitted: str = ""
    seconds: float | None = None
    ratios: tuple[tuple[float, float], ...] = ()
    means: tuple[float, ...] = ()
    scenario: dict[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """A published figure beside this planner's.

    Attributes:
        figure: name of the figure; empty if the case has none.
        ours: None if this planner cannot compute the figure from what was published.
    """

    case: PublishedCase
    figure: str
    published: float | None
    ours: float | None

    @property
    def error(self) -> float | None:
        """Return the relative error; None if one of the figures is missing."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published - 1

    @property
    def kind(self) -> str:
        return "open" if self.figure in self.case.open else self.case.kind

    @property
    def holds(self) -> bool | None:
        """True if our figure is within the tolerance of the published one; None if it is open."""
        if self.kind == "open" or self.error is None:
            return None
        return abs(self.error) <= self.case.tolerance


_FIGURES_OF_RUNS: Mapping[str, Callable[[Account], float]] = {
    "effective": attrgetter("effective"),
    "steps": attrgetter("steps"),
    "votes": attrgetter("votes"),
    "contributions": attrgetter("contributions"),
    "failures": attrgetter("failures"),
    "committed": lambda run: run.steps / run.votes,
    "vote_seconds": lambda run: run.seconds / run.votes,
    "participants": lambda run: run.contributions / run.steps,
    "hours_for_6144": lambda run: 6144 / run.effective,
}
"""The figures that a simulated run gives, by their names in published.toml."""


def read_cases() -> list[PublishedCase]:
    text = (Path(__file__).parent / "published.toml").read_text()
    cases = tomli.loads(text)["case"]
    return [convert(PublishedCase, case, f"case[{index}]") for index, case in enumerate(cases)]


def validate(cases: Sequence[PublishedCase] | None = None) -> list[Comparison]:
    """Return the comparisons of all cases, by default of those in published.toml."""
    return [row for case in cases or read_cases() for row in compare_case(case)]


def compare_case(case: PublishedCase) -> list[Comparison]:
    """Return one comparison for each figure of a case. A case without figures has one empty row."""
    if not case.expect:
        return [Comparison(case, "", None, None)]
    candidate = _make_candidate(case)
    needs_runs = bool(case.expect.keys() & _FIGURES_OF_RUNS.keys())
    runs: list[Account] = []
    if candidate is not None and needs_runs:
        runs = [simulate(candidate, seed, case.seconds) for seed in range(NUM_RUNS)]
    rows = []
    for figure, published in case.expect.items():
        ours = _compute_figure(case, figure, candidate, runs)
        rows.append(Comparison(case, figure, published, ours))
    return rows


def _make_candidate(case: PublishedCase) -> Candidate | None:
    """Return the candidate of the first strategy in the case's scenario; None without a scenario."""
    if case.scenario is None:
        return None
    (scenario,) = read_scenarios(case.scenario, Path())
    return make_candidates(scenario)[0]


def _compute_figure(
    case: PublishedCase,
    figure: str,
    candidate: Candidate | None,
    runs: Sequence[Account],
) -> float:
    if figure == "product":
        return math.prod(numerator / denominator for numerator, denominator in case.ratios)
    if figure == "standbys":
        return sum(enough_spares(mean) for mean in case.means)
    assert candidate is not None, "every other figure needs a scenario"
    if figure == "mtbf_hours":
        return 1 / (candidate.rates.deaths + candidate.rates.losses_of_all) / 3600
    return fmean(_FIGURES_OF_RUNS[figure](run) for run in runs)
