# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The validation set: published figures beside this planner's; fitted and open ones are marked.

`titan-ft plan --validate` and a test compare the cases of published.toml here.
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
from titan_ft.forecast.closed_forms import standbys
from titan_ft.forecast.scenario import read_scenarios
from titan_ft.forecast.simulation import Account, simulate

SEEDS = 5


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
    """A published figure and this planner's; `ours` is None where it is not to be had."""

    case: PublishedCase
    figure: str
    published: float | None
    ours: float | None

    @property
    def error(self) -> float | None:
        """Return the relative error."""
        if self.ours is None or not self.published:
            return None
        return self.ours / self.published - 1

    @property
    def kind(self) -> str:
        return "open" if self.figure in self.case.open else self.case.kind

    @property
    def holds(self) -> bool | None:
        """True if the figure comes out within its tolerance; None if it is open."""
        if self.kind == "open" or self.error is None:
            return None
        return abs(self.error) <= self.case.tolerance


_OF_RUNS: Mapping[str, Callable[[Account], float]] = {
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


def read_cases() -> list[PublishedCase]:
    text = (Path(__file__).parent / "published.toml").read_text()
    cases = tomli.loads(text)["case"]
    return [convert(PublishedCase, case, f"case[{index}]") for index, case in enumerate(cases)]


def validate(cases: Sequence[PublishedCase] | None = None) -> list[Comparison]:
    """Compute the figures of all cases."""
    return [row for case in cases or read_cases() for row in compare_case(case)]


def compare_case(case: PublishedCase) -> list[Comparison]:
    if not case.expect:
        return [Comparison(case, "", None, None)]
    candidate = _candidate(case)
    runs: list[Account] = []
    if candidate is not None and case.expect.keys() & _OF_RUNS.keys():
        runs = [simulate(candidate, seed, case.seconds) for seed in range(SEEDS)]
    rows = []
    for name, value in case.expect.items():
        rows.append(Comparison(case, name, value, _figure(case, name, candidate, runs)))
    return rows


def _candidate(case: PublishedCase) -> Candidate | None:
    if case.scenario is None:
        return None
    (scenario,) = read_scenarios(case.scenario, Path())
    return make_candidates(scenario)[0]


def _figure(
    case: PublishedCase,
    name: str,
    candidate: Candidate | None,
    runs: Sequence[Account],
) -> float:
    if name == "product":
        return math.prod(above / below for above, below in case.ratios)
    if name == "standbys":
        return sum(standbys(mean) for mean in case.means)
    assert candidate is not None, "every other figure is of a scenario"
    if name == "mtbf_hours":
        return 1 / (candidate.rates.deaths + candidate.rates.job) / 3600
    return fmean(_OF_RUNS[name](run) for run in runs)
