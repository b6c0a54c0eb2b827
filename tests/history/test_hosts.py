# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts, deaths and departures of each host of a run."""

from __future__ import annotations

from typing import Any

from tests.event_builder import build
from titan_ft.history.outcomes.hosts import HostFigures, find_hosts, name_range
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import show
from titan_ft.run.events import HostLeft, WorkerExited, WorkerStarted


def record() -> RunRecord:
    """Two groups, one of which restarted on another host."""
    events: list[Any] = []
    for replica, host in (
        (0, "n1.cluster"),
        (1, "n2.cluster"),
        (1, "n2.cluster"),
        (1, "n1.cluster"),
    ):
        events.append(build(WorkerStarted, replica=replica, host=host, pid=10 + len(events)))
    events += [
        build(WorkerExited, replica=1, host="n2", signal="SIGBUS", stopped=False) for _ in range(2)
    ]
    events.append(build(WorkerExited, replica=1, host="n2", signal="SIGTERM", stopped=True))
    events.append(build(WorkerExited, replica=0, host="n1", code=0, stopped=False))
    # Of an older history.
    events.append(build(WorkerExited, replica=0, signal="SIGKILL", stopped=False))
    events.append(build(HostLeft, replica=1, host="n2", deaths=2))
    return RunRecord(events)


def test_deaths_are_the_hosts() -> None:
    """An orderly end, an end caused by another rank, and one on an unknown host do not count."""
    assert find_hosts(record()) == [
        HostFigures("n2", groups=[1], starts=2, deaths=2, left=1),
        HostFigures("n1", groups=[0, 1], starts=2),
    ]


def test_a_node_has_the_name_that_slurm_gives_it() -> None:
    """Agents report ends by Slurm's node name; the workers' own host name may differ."""
    slurm = {"job": "1", "step": "0", "node": "n7"}
    started = build(WorkerStarted, replica=0, host="ip-10-0-0-7.internal", slurm=slurm)
    ended = build(WorkerExited, replica=0, host="n7", signal="SIGBUS", stopped=False)
    assert find_hosts(RunRecord([started, ended])) == [
        HostFigures("n7", groups=[0], starts=1, deaths=1)
    ]


def test_the_report_has_a_table(capsys: Any) -> None:
    """A run on several hosts has a table."""
    show(make_summary_table(summarize(record())))
    text = capsys.readouterr().out
    assert "n2" in text
    assert "2 deaths of 2 workers started, groups 1; left once as suspected" in " ".join(
        text.split()
    )
    assert summarize(record()).to_dict()["hosts"][0]["deaths"] == 2


def test_many_groups_take_few_words() -> None:
    """Three or more consecutive groups are written as a range; two are not."""
    assert name_range([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7, 8"
    assert name_range([]) == "none"
