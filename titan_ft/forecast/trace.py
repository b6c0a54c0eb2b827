# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the drawn failures of a scenario as a chaos trace.

`titan-ft plan --trace-out` calls `write_drawn`. `titan-ft launch --chaos` can then inject the same
failures into a real job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from titan_ft.chaos.plan_file import COLUMNS
from titan_ft.config import ConfigError
from titan_ft.forecast.failures import Failure, draw_failures, groups_hit
from titan_ft.forecast.scenario import Scenario

_FAULT_OF_EFFECT = {
    "stop": "kill_group",
    "drain": "term_group",
    "slow": "slow_rank",
    "corrupt": "flip_parameter",
}


class TraceLine(NamedTuple):
    """The columns of one line of a chaos trace."""

    time: float
    fault: str
    group: int | None
    params: str = ""


def write_drawn(path: Path, scenario: Scenario, seed: int) -> int:
    """Write the failures of a scenario, one line for each group that is hit.

    Comments at the begin of the file say which failures are left out, and why.

    Returns:
        num_lines: how many faults the file has.

    Raises:
        ConfigError: the file cannot be written, or there is nothing to write.
    """
    drawn = list(draw_failures(scenario, seed))
    lines: list[TraceLine] = []
    for failure in drawn:
        lines += _make_lines(failure, scenario)
    groups = scenario.job.groups
    notes = [f"drawn by titan-ft plan: seed {seed}, {scenario.days:g} days, {groups} groups"]
    for name, value in scenario.swept.items():
        notes.append(f"of the lists the first case: {name} = {value}")
    num_of_job = sum(failure.kind.scope == "job" for failure in drawn)
    if num_of_job:
        why = "chaos leaves one group untouched"
        notes.append(f"{num_of_job} failures of the whole job are left out: {why}")
    notes += [
        f"left out: the chaos plan of {name}, which chaos takes as it is" for name in scenario.plans
    ]
    if scenario.maintenance:
        notes.append("left out: maintenance")
    if any(kind.breaks for kind in scenario.failures):
        notes.append("left out: repairs, for chaos breaks no node")
    if scenario.clock == "training":
        notes.append("times are of the training clock; chaos goes by the wall clock")
    if not lines:
        rule = "must get a failure of a group that chaos can inject"
        got = f"none in {scenario.days:g} days of seed {seed}"
        raise ConfigError(f"--trace-out {rule}, got {got}; raise days, or take another seed")
    return write_trace(path, sorted(lines, key=lambda line: line.time), notes)


def write_trace(path: Path, lines: Iterable[TraceLine], notes: Iterable[str] = ()) -> int:
    """Write a chaos trace; return how many lines it has.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = []
    for line in lines:
        group = "" if line.group is None else line.group
        rows.append(f"{line.time!r},{line.fault},{group},{line.params}")
    text = "\n".join([*(f"# {note}" for note in notes), ",".join(COLUMNS), *rows])
    try:
        path.write_text(f"{text}\n")
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise ConfigError(
            f"--trace-out must be a file that can be written, got {got}; give another"
        ) from error
    return len(rows)


def _make_lines(failure: Failure, scenario: Scenario) -> Iterator[TraceLine]:
    """Yield one line for each group that a failure hits; none if it hits the whole job.

    A straggler whose group leaves at the end has a second line, with a fault that drains the group.
    """
    kind = failure.kind
    if kind.scope == "job":
        return
    groups = scenario.job.groups
    for group in groups_hit(failure, groups, scenario.cluster.nodes // groups):
        if kind.effect != "slow":
            yield TraceLine(failure.time, _FAULT_OF_EFFECT[kind.effect], group)
            continue
        # A fault of 0 seconds is refused by the chaos plan.
        params = f"factor={kind.factor} seconds={max(kind.found_after, 0.001)}"
        yield TraceLine(failure.time, _FAULT_OF_EFFECT["slow"], group, params)
        if kind.leaves:
            yield TraceLine(failure.time + kind.found_after, _FAULT_OF_EFFECT["drain"], group)
