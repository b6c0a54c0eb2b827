# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios are read, swept, and refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.forecast.scenarios import scenario, tables
from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import make_candidates
from titan_ft.forecast.scenario import DAY, load_scenarios, read_scenarios


def test_lengths_of_time_are_seconds() -> None:
    read = scenario(groups={"stall": "1.5 min", "away": {"base": "50 s", "per_gpu": "9 ms"}})
    (found,) = make_candidates(read)
    assert found.costs.stall.mean == 90
    assert found.costs.away.mean == pytest.approx(50 + 0.009 * 8192)


def test_lists_are_swept_in_all_combinations() -> None:
    cluster = {"gpus": 98304, "gpus_per_node": 8, "spare_nodes": [0, 24]}
    cases = read_scenarios(
        tables(cluster=cluster, job={"step": 20.0, "groups": [6, 12, 24]}), Path()
    )
    found = [(case.cluster.spare_nodes, case.job.groups) for case in cases]
    assert found == [(spares, groups) for spares in (0, 24) for groups in (6, 12, 24)]
    assert cases[1].swept == {"cluster.spare_nodes": 0, "job.groups": 12}


def test_a_list_in_an_array_of_tables_is_swept() -> None:
    failure = {"name": "any", "mtbf": ["18 min", "1 h"], "spacing": "even"}
    assert [
        case.failures[0].mtbf for case in read_scenarios(tables(failure=[failure]), Path())
    ] == [1080, 3600]


RACK = {"name": "rack", "mtbf": 5.0, "spacing": "even", "domain": "rack"}
MISTAKES = [
    ("job.step", "20 sec", 'job.step must be a length of time, such as 20 (seconds) or "18 min", >= 1 ms, got'),
    ("job.step", None, "job.step must be set, got nothing"),
    ("job.groups", 7, "job.groups must divide the 12288 nodes of the cluster, got 7"),
    ("job.groups", [], "job.groups must hold at least one value, got []"),
    ("job.groups", [*range(1, 3000)], "the lists must make 2000 cases at most, got 2999"),
    ("job.min_replica_size", 13, "job.min_replica_size must be <= job.groups (12), got 13"),
    ("cluster.gpus", 98305, "cluster.gpus must be a multiple of gpus_per_node (8), got 98305"),
    ("cluster.spares", 3, "cluster.spares is not a valid key; did you mean spare_nodes?"),
    ("clock", "cpu", 'clock must be "wall" or "training", got \'cpu\''),
    ("clock", None, 'clock must be set, got nothing; "training" if failures come only while the job trains'),
    ("days", -1, "days must be a number > 0, at most 10000, got -1"),
    ("groups", None, "restart must be set, or groups or rounds, got none"),
    ("groups.stall", None, "groups.stall must be set, got nothing; give it, or a run that has it: --from RUN_DIR"),
    ("groups.away", {"median": 5}, "groups.away must be a length of time"),
    ("rounds", {"steps": 0}, "rounds.steps must be a whole number from 1 to 10,000,000, got 0"),
    ("restart", {"recover": 600}, "checkpoint must be set with restart, got nothing"),
    ("failure", [], "failure must hold at least one value, got []"),
    ("failure[0].spacing", None, "failure[0].spacing must be one of memoryless, even, uniform, weibull, got nothing"),
    ("failure[0].spacing", "often", "failure[0].spacing must be one of memoryless, even, uniform, weibull, got"),
    ("failure[0].spacing", "weibull", "failure[0].shape must come with spacing = \"weibull\", got nothing"),
    ("failure[0].mtbf", None, "failure[0].mtbf must be alone of per_1000_node_days, mtbf,"),
    ("failure[0].mtbf_of_each", 5, "failure[0].mtbf must be alone of per_1000_node_days, mtbf,"),
    ("failure[0].domain", "rack", "failure[0].domain must be one of none, got 'rack'"),
    ("failure[0].effect", "slow", 'failure[0].factor must be > 1 with effect = "slow", got 1'),
    ("failure[0].effect", "corrupt", 'failure[0].found_after must be > 0 with effect = "corrupt", got 0'),
    ("failure[0].breaks", 0.4, "failure[0].repair must be > 0 with breaks, got 0; set it"),
    ("failure[0].breaks", 2, "failure[0].breaks must be a share from 0 to 1, got 2"),
    ("failure[0].first_node", 12288, "failure[0].first_node must leave a part of the 12288 nodes of the cluster"),
    ("failure", [{"name": "a", "chaos": "no_such"}], "failure[0].chaos: chaos plan must be the path of a TOML file"),
    ("failure", [{"name": "a", "trace": "gone.csv"}], "failure[0].trace: trace must be a readable CSV file, got gone.csv"),
    ("failure[0].mtbf", "1e5 d", "failure[0].mtbf must be a length of time"),
    ("failure[0].mtbf", float("inf"), "failure[0].mtbf must be a length of time"),
    ("failure[0].mtbf", 0.001, "days must have 10,000,000 failures and checkpoints at most, got about 8.6e+08"),
    ("failure[0].scope", "domain", 'failure[0].scope must be "node" or "job", got \'domain\''),
    ("failure[0].age", 5, "failure[0].age must be left out without lives"),
    ("failure[0].factor", 2, "failure[0].factor must be left out with effect = stop, got 2"),
    ("failure[0].found_after", 2, "failure[0].found_after must be left out with effect = stop"),
    ("failure[0].repair", 2, "failure[0].repair must be left out without breaks"),
    ("failure[0].system", 2, "failure[0].system must be left out without log"),
    ("failure[0].seed", 2, "failure[0].seed must be left out without chaos"),
    ("failure", [RACK | {"scope": "job"}], "failure[0].domain must be left out with mtbf and scope = job"),
    ("failure", [RACK | {"per_1000_node_days": 6.5, "mtbf": None}], "failure[0].per_1000_node_days must be left out"),
    ("failure", [{"name": "a", "chaos": "blog_15s", "effect": "slow", "factor": 2.0}], "failure[0].effect must be"),
    ("checkpoint", {"save": 1, "interval": float("inf")}, 'checkpoint.interval must be a length of time >= 1 s, or "b'),
    ("groups.away", {"median": 1, "p99": 1e9}, "groups.away must be a length of time"),
    ("groups.away", {"median": 1, "p99": 2, "base": 3}, "groups.away must be a length of time"),
    ("groups.drag", float("inf"), "groups.drag must be a length of time"),
    ("job.step", 1e-300, "job.step must be a length of time"),
    ("cluster.gpus", 10**9, "cluster.gpus must be a whole number from 1 to 10,000,000, got 1000000000"),
    ("cluster.domain", 3, "cluster.domain must be an array of tables, got 3; write [[cluster.domain]] above each"),
    ("cluster.domain", [{"name": "a", "nodes": 2}, {"name": "a", "nodes": 3}], "cluster.domain[1].name must be unlike"),
    ("maintenance", [{"every": "7 d", "nodes": 2}], "maintenance[0].lasts must be set, got nothing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "line"),
    MISTAKES,
    ids=[f"{place}-{value}"[:40] for place, value, _ in MISTAKES],
)
def test_a_mistake_is_one_line(place: str, value: Any, line: str) -> None:
    values = copy.deepcopy(tables())
    table: Any = values
    *path, key = place.replace("[0]", ".0").split(".")
    for part in path:
        table = table[int(part) if part.isdigit() else part]
    table.pop(key, None)
    if value is not None:
        table[key] = value
    values["failure"] = [
        {name: each for name, each in kind.items() if each is not None}
        for kind in values["failure"]
    ]
    with pytest.raises(ConfigError) as refused:
        [make_candidates(case) for case in read_scenarios(values, Path())]
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_file_is_named_in_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("days = 3\n")
    with pytest.raises(
        ConfigError, match=r"cluster\.toml: cluster must be set, got nothing; write \[cluster\]"
    ):
        load_scenarios(path)


def test_a_rate_is_of_the_nodes() -> None:
    failure = {"name": "node", "per_1000_node_days": 6.5, "spacing": "memoryless"}
    read = scenario(failure=[failure])
    assert read.mtbf_of(read.failures[0]) == pytest.approx(1000 * DAY / 6.5 / 12288)


def test_a_chaos_plan_ends_no_job_of_one_group() -> None:
    """It leaves one group untouched: a job that restarts would be forecast without a failure."""
    chaos = [{"name": "a", "chaos": "blog_15s"}]
    with pytest.raises(ConfigError, match=r"^restart must be left out with a chaos plan, "):
        scenario(failure=chaos, restart={"recover": 600}, checkpoint={"save": 1})
