# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the drawn failures of a scenario as a chaos trace, so that `titan-ft launch --chaos` carries a forecast out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_ft.forecast.failures import Failure, draw_failures
from titan_ft.forecast.logs import write_trace
from titan_ft.forecast.scenario import DAY, Scenario

_FAULTS = {"stop": "kill_group", "slow": "slow_rank", "corrupt": "flip_parameter"}


def write_drawn(path: Path, scenario: Scenario, seed: int) -> int:
    """Write the failures that hit the groups of a scenario, a line for each group; return how many lines.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = list(draw_until(scenario, seed))
    whole = sum(failure.kind.scope == "job" for failure in drawn)
    notes = [f"drawn by titan-ft plan: seed {seed}, {scenario.days:g} days, {scenario.job.groups} groups"]
    if whole:
        notes.append(f"{whole} failures of the whole job are left out: chaos leaves one group untouched")
    return write_trace(path, _lines(drawn, scenario), notes)


def draw_until(scenario: Scenario, seed: int) -> Iterator[Failure]:
    """Yield the failures of a scenario's days."""
    for failure in draw_failures(scenario, seed):
        if failure.time > scenario.days * DAY:
            return
        yield failure


def _lines(drawn: list[Failure], scenario: Scenario) -> Iterator[tuple[float, str, int | None, str]]:
    groups = scenario.job.groups
    size = scenario.cluster.nodes // groups
    for failure in drawn:
        if failure.kind.scope == "job":
            continue
        params = ""
        if failure.kind.effect == "slow":
            params = f"factor={failure.kind.factor} seconds={failure.kind.found_after}"
        if failure.node is None:
            hit = [failure.group]
        else:
            last = min(failure.node + failure.nodes, groups * size) - 1
            hit = list(range(failure.node // size, last // size + 1))
        for group in hit:
            yield failure.time, _FAULTS[failure.kind.effect], group, params
