# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How many faults there were: one definition, and the same number in every view of a run."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.figures import figures
from tests.history.histories import fault, killed_run, say
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.facts import report_figures
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of
from titan_ft.history.timing.incidents import count_faults
from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.events import Event


def of_rank(told: Any, rank: int) -> Any:
    """Make an agent's event of a fault."""
    told.replica, told.rank, told.attempt = told.target.replica, rank, 0
    return told


@pytest.fixture
def events() -> list[Event]:
    """Make a run with eight faults of four kinds: killed_run's kill, and seven with other forms of
    report.
    """
    told = [
        *killed_run(),
        say(13.0, "chaos_started", seed=1, plan="a plan", schedule="now and then"),
        # one shot that hits two groups, of which one takes its time
        fault(14.1, "kill_groups", 1, shot=3),
        fault(14.1, "kill_groups", 2, shot=3),
        fault(18.1, "kill_groups", 3, shot=3),
        # both ends of a link, and each of their ranks
        *(
            of_rank(fault(15.0 + rank / 100, "link_dead", end, shot=4), rank)
            for end in (1, 2)
            for rank in (0, 1)
        ),
        # a kill that provokes a heal, and the kill of the donor in it
        fault(16.0, "kill_group", 2, shot=5, params={"provokes": "kill_donor"}),
        of_rank(fault(17.0, "kill_donor", 0, shot=5), 0),
        # by a script, twice
        fault(17.5, "kill_group", 1),
        fault(17.6, "kill_group", 1),
        say(
            18.0,
            "fault_skipped",
            fault="kill_rank",
            shot=6,
            target={"replica": 1},
            reason="too few groups",
        ),
    ]
    # killed_run's own fault stands before the plan begins: its shot's number comes again.
    told.append(fault(18.5, "kill_group", 1, shot=0))
    return sorted(told, key=lambda event: event.time)


KINDS = {"kill_group": 5, "kill_donor": 1, "kill_groups": 1, "link_dead": 1}
TOTAL = 8


def test_every_view_counts_the_same_faults(events: list[Event]) -> None:
    """Terminal, JSON, stalls, top, Prometheus and the campaign's table have the same number and
    kinds.
    """
    record = RunRecord(events)
    assert count_faults(record) == KINDS
    shown = report_figures(record)
    assert (shown["num_faults"], shown["faults_by_kind"]) == (TOTAL, KINDS)
    assert sum(stall["injected"] for stall in shown["stalls"]) == TOTAL
    assert f"faults injected                {TOTAL}" in text_of(
        make_summary_table(summarize(record))
    )
    assert figures(record)["faults injected"] == f"{TOTAL} of {len(KINDS)} kinds"
    run = RunStatus()
    server = MetricsServer(run.fold, 0)
    try:
        for event in events:
            run.observe(event)
            server.observe(event)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            server.url, timeout=30
        ) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    finally:
        server.close()
    assert (run.fold.faults.num_injected, dict(run.fold.faults.by_kind)) == (TOTAL, KINDS)
    assert f"faults {TOTAL}" in text_of(frame(run, "a run", 1e9 + 20.0, Screen(200)))
    samples = [sample for family in families for sample in family.samples]
    served = {
        s.labels["fault"]: s.value
        for s in samples
        if s.name == "titan_ft_faults_injected_total" and s.value
    }
    assert served == KINDS


def test_faults_of_one_shot_are_one_incident(events: list[Event]) -> None:
    """All targets of a shot are one incident, however far apart; a shot of another plan with its
    number is not.
    """
    stalls = report_figures(RunRecord(events))["stalls"]
    assert [stall["replicas"] for stall in stalls if stall["fault"] == "kill_groups"] == [(1, 2, 3)]
    assert [stall["replicas"] for stall in stalls if stall["shot"] == 0] == [(1,), (1,)]
