# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The drawn failures: their rates, their targets, and the files that they come from and go to."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.forecast.scenarios import MEMORYLESS, scenario
from titan_ft.chaos.plan_file import load_plan
from titan_ft.chaos.schedule import shots
from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import make_candidates
from titan_ft.forecast.choice import compare
from titan_ft.forecast.failures import draw_failures
from titan_ft.forecast.logs import read_faults, read_lanl
from titan_ft.forecast.scenario import DAY
from titan_ft.forecast.simulation import simulate
from titan_ft.forecast.table import case_notes
from titan_ft.forecast.trace import write_drawn

RACKS = {"gpus": 1024, "gpus_per_node": 8, "domain": [{"name": "rack", "nodes": 16}]}


@pytest.mark.parametrize(
    "failure",
    [
        {"mtbf": 3600, "spacing": "memoryless"},
        {"mtbf": 3600, "spacing": "even"},
        {"mtbf": 3600, "spacing": "uniform"},
        {"mtbf": 3600, "spacing": "weibull", "shape": 0.7},
        {"mtbf_of_each": 128 * 3600, "spacing": "memoryless"},
        {"mtbf_of_each": 128 * 3600, "spacing": "weibull", "shape": 1.0},
        {"mtbf_of_each": 8 * 3600, "spacing": "memoryless", "domain": "rack"},
        # Lives with early deaths have their mean rate once the nodes are old.
        {"mtbf_of_each": 128 * 3600, "spacing": "weibull", "shape": 0.7, "age": "400 d"},
    ],
)
def test_failures_come_at_their_rate(failure: dict[str, Any]) -> None:
    read = scenario(
        cluster=RACKS,
        job={"step": 20.0, "groups": 8},
        days=100.0,
        failure=[{"name": "any", **failure}],
    )
    drawn = [failure for seed in range(3) for failure in draw_failures(read, seed)]
    assert len(drawn) == pytest.approx(3 * 2400, rel=0.06)
    assert {each.nodes for each in drawn} == {16 if "domain" in failure else 1}
    assert all(each.node is not None and each.node % each.nodes == 0 for each in drawn)


def test_a_young_cluster_fails_more() -> None:
    failure = {"name": "any", "mtbf_of_each": "1000 d", "spacing": "weibull", "shape": 0.7}
    young, old = (
        len(list(draw_failures(scenario(failure=[{**failure, "age": age}]), 0)))
        for age in (0, "2000 d")
    )
    assert young > 1.5 * old


def test_every_shape_meets_the_same_failures() -> None:
    """Also with the same luck: a difference between two shapes is not one of chance."""
    drawn = [
        list(itertools.islice(draw_failures(scenario(job={"step": 20.0, "groups": groups}), 3), 50))
        for groups in (6, 48)
    ]
    assert [(each.time, each.node, each.luck) for each in drawn[0]] == [
        (each.time, each.node, each.luck) for each in drawn[1]
    ]


def test_a_trace_that_is_written_is_read_again(tmp_path: Path) -> None:
    """The same run follows from the trace as from what was drawn; a chaos plan carries the same
    faults out.
    """
    read = scenario()
    number = write_drawn(tmp_path / "drawn.csv", read, seed=4)
    again = scenario(tmp_path, failure=[{"name": "any", "trace": "drawn.csv"}])
    (one,), (other,) = make_candidates(read), make_candidates(again)
    assert simulate(one, 4) == simulate(other, 4)
    (tmp_path / "plan.toml").write_text('[[rule]]\nwhen = "trace"\nfile = "drawn.csv"\n')
    planned = list(shots(load_plan(tmp_path / "plan.toml", 1)))
    assert len(planned) == number > 500
    assert [(shot.time, shot.replica) for shot in planned] == [
        (failure.time, (failure.node or 0) // 1024) for failure in draw_failures(read, 4)
    ]


def test_a_rack_is_a_line_for_each_group_and_the_whole_job_none(tmp_path: Path) -> None:
    failures = [
        {"name": "rack", "domain": "rack", "mtbf": "1 d", "spacing": "even"},
        {"name": "software", "scope": "job", "mtbf": "2 d", "spacing": "even"},
        {
            "name": "slow",
            "effect": "slow",
            "factor": 1.5,
            "found_after": 60,
            "mtbf": "3 d",
            "spacing": "even",
        },
    ]
    read = scenario(cluster=RACKS, job={"step": 20.0, "groups": 16}, failure=failures, days=3.0)
    write_drawn(tmp_path / "drawn.csv", read, seed=0)
    lines = (tmp_path / "drawn.csv").read_text().splitlines()
    assert "# 1 failures of the whole job are left out: chaos leaves one group untouched" in lines
    assert sum("kill_group" in line for line in lines) == 3 * 2
    assert sum(line.endswith("factor=1.5 seconds=60.0") for line in lines) == 1
    assert sum("term_group" in line for line in lines) == 1, "the straggler that was found leaves"
    assert len(read_faults(tmp_path / "drawn.csv")) == 8


HEADER = "System,machine type,nodes,nodenumz,Prob Started,Prob Fixed,Down Time,Facilities"


def write_lanl(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join([HEADER, *lines]))
    return path


def test_a_log_of_lanl_is_converted(tmp_path: Path) -> None:
    """Nodes, times since the first failure, and how long each was mended; other systems are left
    out.
    """
    lines = [
        "20,cluster,256,7,6/21/2005 11:54,6/21/2005 14:54,180,",
        "20,cluster,256,200,6/21/2005 10:54,,,",
        "2,cluster,49,0,6/20/2005 10:54,6/20/2005 11:00,6,",
    ]
    path = write_lanl(tmp_path / "lanl.csv", lines)
    found = read_lanl(path, 20)
    assert [(each.time, each.node, each.down_seconds) for each in found] == [
        (0, 200, None),
        (3600, 7, 3 * 3600),
    ]
    cluster = {"gpus": 1024, "gpus_per_node": 8, "spare_nodes": 0}
    failure = {"name": "lanl", "log": "lanl.csv", "system": 20, "breaks": 1.0}
    read = scenario(tmp_path, cluster=cluster, job={"step": 20.0, "groups": 4}, failure=[failure])
    assert write_drawn(tmp_path / "trace.csv", read, 0) == 2
    assert [entry.group for entry in read_faults(tmp_path / "trace.csv")] == [(200 % 128) // 32, 0]
    (found_candidate,) = make_candidates(read)
    account = simulate(found_candidate, 0)
    assert found_candidate.rates.broken_nodes == pytest.approx(3 * 3600 / (10 * DAY))
    assert account.group_seconds["nodes"] == pytest.approx(3 * 3600), (
        "the repair of the log; the other is mended at once"
    )


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (
            ["20,cluster,256,x,6/21/2005 10:54,,,"],
            "lanl.csv:2 must have a node's number and times such as 6/21/2005",
        ),
        (
            ["20,cluster,256,1,2005-06-21,,,"],
            "lanl.csv:2 must have a node's number and times such as 6/21/2005",
        ),
        (
            ["2,cluster,256,1,6/21/2005 10:54,,,"],
            "lanl.csv must hold a failure of system 20, got none",
        ),
    ],
)
def test_a_mistake_in_a_log_is_one_line(tmp_path: Path, lines: list[str], line: str) -> None:
    path = write_lanl(tmp_path / "lanl.csv", lines)
    with pytest.raises(ConfigError) as refused:
        read_lanl(path, 20)
    assert str(refused.value).startswith(line)


def test_a_trace_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,fault,target\n1,kill_group,0\n")
    with pytest.raises(ConfigError, match=r"trace\.csv:1 must have the columns System, nodenumz,"):
        read_lanl(tmp_path / "trace.csv")


def test_the_days_of_a_scenario_bound_what_is_drawn() -> None:
    read = scenario(days=2.0)
    assert max(failure.time for failure in draw_failures(read, 0)) <= 2 * DAY


def test_a_trace_of_every_effect_is_read_again(tmp_path: Path) -> None:
    """A straggler stays one, and leaves when it was found; a fault that costs nothing costs
    nothing.
    """
    failures = [
        {"name": "kill", "mtbf": "5 h", "spacing": "memoryless"},
        {
            "name": "slow",
            "effect": "slow",
            "factor": 1.5,
            "found_after": 600,
            "mtbf": "9 h",
            "spacing": "memoryless",
        },
        {"name": "drain", "effect": "drain", "mtbf": "7 h", "spacing": "memoryless"},
    ]
    read = scenario(failure=failures, groups={"stall": 200.0, "away": 600.0})
    write_drawn(tmp_path / "drawn.csv", read, seed=4)
    with (tmp_path / "drawn.csv").open("a") as file:
        file.write("5,kill_lighthouse,lighthouse,\n")
    again = scenario(
        tmp_path,
        failure=[{"name": "all", "trace": "drawn.csv"}],
        groups={"stall": 200.0, "away": 600.0},
    )
    (one,), (other,) = make_candidates(read), make_candidates(again)
    before, after = simulate(one, 4), simulate(other, 4)
    assert before.group_seconds["slower"] > 12 * 10 * 300
    # A straggler that died before it was found is asked to leave by the trace all the same.
    assert after.group_seconds == pytest.approx(before.group_seconds, rel=0.01, abs=1e-3)
    assert after.steps == before.steps
    assert abs(after.votes - before.votes) <= 1
    assert vars(other.rates) == pytest.approx(vars(one.rates), rel=0.5)


def test_wrong_numbers_of_a_trace_are_found_as_late_as_those_of_a_rate(tmp_path: Path) -> None:
    """A job that restarts loses half an hour each; found at once, they would cost little."""
    common: dict[str, Any] = {
        "cluster": {"gpus": 8, "gpus_per_node": 8},
        "job": {"step": 20.0},
        "groups": None,
        "checkpoint": {"save": 5.0, "interval": 600.0},
        "restart": {"recover": 60.0},
    }
    late = {"name": "sdc", "effect": "corrupt", "found_after": 1800.0}
    read = scenario(failure=[{**late, "mtbf": "3 h", "spacing": "memoryless"}], **common)
    write_drawn(tmp_path / "drawn.csv", read, seed=4)
    listed = {"name": "all", "trace": "drawn.csv"}
    with pytest.raises(ConfigError, match=r"^failure\[0\]\.found_after must be > 0 with the wrong"):
        scenario(tmp_path, failure=[listed], **common)
    again = scenario(tmp_path, failure=[{**listed, "found_after": 1800.0}], **common)
    (one,), (other,) = make_candidates(read), make_candidates(again)
    assert simulate(other, 4).effective == pytest.approx(simulate(one, 4).effective, abs=0.01)


def test_a_log_needs_the_part_that_breaks(tmp_path: Path) -> None:
    """Without it, the repairs that the log has would be dropped without a word."""
    write_lanl(tmp_path / "lanl.csv", ["20,cluster,256,7,6/21/2005 11:54,6/21/2005 14:54,180,"])
    with pytest.raises(
        ConfigError, match=r"^failure\[0\]\.breaks must be > 0 with log, got 0; 1 if"
    ):
        scenario(tmp_path, failure=[{"name": "lanl", "log": "lanl.csv"}])


def test_a_file_is_one_draw_and_ends(tmp_path: Path) -> None:
    lines = ["time,fault,target", *(f"{3600 * hour},kill_group," for hour in range(1, 25))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    failure = [{"name": "file", "trace": "trace.csv"}]
    notes = {}
    for days in (0.5, 1.0, 30.0):
        (case,) = compare([scenario(tmp_path, failure=failure, days=days)], num_runs=2)
        notes[days] = next(note for note in case_notes(case) if "same failures" in note)
    one_draw = "All runs meet the same failures of file, those of its file"
    assert notes[0.5] == f"{one_draw} in its first 12 h."
    assert notes[1.0] == f"{one_draw}."
    covered = "IT COVERS 1.042 d of 30 d, and then nothing of that kind fails"
    assert notes[30.0] == f"{one_draw}; {covered}."


def test_a_domain_that_begins_below_the_first_node_is_never_hit() -> None:
    read = scenario(
        cluster={"gpus": 96, "gpus_per_node": 1, "domain": [{"name": "rack", "nodes": 16}]},
        job={"step": 20.0, "groups": 4},
        failure=[{**MEMORYLESS, "domain": "rack", "first_node": 8}],
    )
    nodes = {failure.node for failure in draw_failures(read, 0)}
    assert nodes == {16, 32, 48, 64, 80}


def test_a_trace_names_groups_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,fault,target\n1,kill_group,12\n")
    with pytest.raises(
        ConfigError,
        match=r"^failure\[0\]\.trace must hit groups below job\.groups \(12\), got 12; ",
    ):
        scenario(tmp_path, failure=[{"name": "a", "trace": "trace.csv"}])


def test_a_trace_counts_in_the_days_of_the_run(tmp_path: Path) -> None:
    """Closed forms know that it is over after an hour, and that a later failure is beyond the
    horizon.
    """
    lines = [f"{60 * minute},kill_group,{minute % 12}" for minute in range(60)]
    (tmp_path / "trace.csv").write_text(
        "\n".join(["time,fault,target", *lines, f"{99 * DAY},kill_group,0"])
    )
    read = scenario(tmp_path, failure=[{"name": "a", "trace": "trace.csv"}], days=10.0)
    (found,) = make_candidates(read)
    assert found.rates.deaths == pytest.approx(60 / (10 * DAY))
    assert simulate(found, 0).failures == 60


def test_a_straggler_that_dies_is_slow_no_more(tmp_path: Path) -> None:
    """Group 0 is slow from 100 s on, for an hour if it lives, but it dies at 200 s."""
    lines = [
        "time,fault,target,params",
        "100,slow_rank,0,factor=2 seconds=3600",
        "200,kill_group,0,",
    ]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    read = scenario(
        tmp_path,
        cluster={"gpus": 16, "gpus_per_node": 8},
        job={"step": 1.0, "groups": 2},
        failure=[{"name": "all", "trace": "trace.csv"}],
        groups={"stall": 0.0, "away": 100.0},
    )
    (found,) = make_candidates(read)
    account = simulate(found, 0, 1000.0)
    assert account.steps == 950 - 1, "50 of 2 s; the one that the end cuts is not counted"
    assert account.group_seconds["slower"] == pytest.approx(50 * 2 - 1), (
        "of the last slow step one group sees the end"
    )
