# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The forecast and the unmodified engine agree.

They get the same failures, and have the same steps, votes and participants.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from titan_ft.host import cpu

cpu.prepare()

from tests.forecast.scenarios import candidate, scenario  # noqa: E402
from tests.simulation import standins  # noqa: E402
from tests.simulation.faults import KillGroups  # noqa: E402
from tests.simulation.schedule import Schedule  # noqa: E402
from tests.simulation.world import Options, World  # noqa: E402
from titan_ft.forecast.failures import draw_failures  # noqa: E402
from titan_ft.forecast.simulation import simulate  # noqa: E402
from titan_ft.forecast.trace import TraceLine, write_trace  # noqa: E402

STEPS, GROUPS = 150, 4
CONFIG = {
    "enable": True,
    "group_size": GROUPS,
    "start_timeout_seconds": 0.8,
    "join_timeout_ms": 5000,
    "process_group_timeout_ms": 3000,
}
OPTIONS = Options(
    GROUPS,
    1,
    STEPS,
    CONFIG,
    jitter=0.001,
    transfer_seconds=(0.05, 0.05),
    compute_seconds=0.4,
    restart_seconds=(1.0, 1.0),
    switch=0.1,
)


def drawn_kills(seed: int) -> list[tuple[float, int]]:
    """Return (time, group) of drawn kills.

    They are far enough apart for a group to return in between.
    """
    cluster = {"gpus": GROUPS, "gpus_per_node": 1}
    failure = {"name": "kill", "mtbf": 6.0, "spacing": "memoryless"}
    read = scenario(
        cluster=cluster, job={"step": 0.45, "groups": GROUPS}, failure=[failure], days=60 / 86400
    )
    kills: list[tuple[float, int]] = []
    for each in draw_failures(read, seed):
        if each.time > (kills[-1][0] if kills else 0.0) + 4.0:
            kills.append((each.time, each.node or 0))
    return kills


def commits_of(world: World) -> list[tuple[float, frozenset[int]]]:
    """Return when each step was first committed, and by which groups."""
    found: dict[int, tuple[float, frozenset[int]]] = {}
    for time, _, text in world.trace:
        match = re.match(r"commits step (\d+) of groups \[(.*?)\]", text)
        if match is not None:
            found.setdefault(int(match[1]), (time, frozenset(map(int, match[2].split(",")))))
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_and_the_forecast_agree(seed: int, tmp_path: Path) -> None:
    """The steps are equal within one, because a step's length is a mean.

    Each death costs one more vote. The participants are equal.
    """
    kills = drawn_kills(seed)
    with standins.installed():
        world = Schedule(
            seed, OPTIONS, tuple(KillGroups(time, (group,)) for time, group in kills)
        ).run(traces=True)
    assert not world.problems
    commits = commits_of(world)
    assert len(commits) == STEPS
    kills = [(time, group) for time, group in kills if time < commits[-1][0] - 4.0]
    assert len(kills) > 3
    calm, late, away = [], [], []
    for (begin, _), (end, _) in pairwise(commits):
        is_death = any(begin < time <= end for time, _ in kills)
        (late if is_death else calm).append(end - begin)
    step = fmean(calm)
    for time, group in kills:
        joined = next(
            place
            for place, (end, groups) in enumerate(commits)
            if end > time + 1.0 and group in groups
        )
        away.append(commits[joined - 1][0] - time - step / 2)
    start = commits[0][0] - step
    write_trace(
        tmp_path / "kills.csv",
        [TraceLine(time - start, "kill_group", group) for time, group in kills],
    )
    job = candidate(
        tmp_path,
        cluster={"gpus": GROUPS, "gpus_per_node": 1},
        job={"step": step, "groups": GROUPS},
        failure=[{"name": "kill", "trace": "kills.csv"}],
        groups={"stall": fmean(late) - step, "away": fmean(away)},
    )
    account = simulate(job, seed, commits[-1][0] - start + step / 2)
    broken = {text for _, _, text in world.trace if text.startswith("exchange_failed")}
    assert account.failures == len(kills)
    assert abs(account.steps - STEPS) <= 1
    assert (
        account.votes - account.steps - 1
        == len(kills)
        == len({text.rpartition("step=")[2] for text in broken})
    )
    assert (
        abs(account.contributions - sum(len(groups) for _, groups in commits))
        <= 2 + len(kills) + GROUPS
    )
