# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The cost of a kill, and how a group is killed."""

from __future__ import annotations

import pytest

from benchmarks.kills import costs
from benchmarks.run import BenchError
from tests.benchmarks.histories import commits, killed, started
from titan_ft.history.record.run_record import RunRecord


def test_the_cost_of_a_kill() -> None:
    """Steps of 1 s; a kill at 3.9 stalls the next step but one for 3 s; a return at 12.5 costs 0.5
    s.
    """
    events = [
        *commits([0.0, 1.0, 2.0, 3.0, 4.0]),
        *commits([0.0, 1.0, 2.0, 3.0], replica=1),
        *killed(3.9, exited=4.1),
    ]
    events += commits([8.0], first_step=6, participants=[0], forward_passes=2)
    events += commits([9.0, 10.0, 11.5], first_step=7, participants=[0])
    events += commits([12.5, 13.5], first_step=10)
    # It is back while it still gives nothing.
    events += commits([11.5], replica=1, first_step=9, attempt=2, participants=[0])
    events += commits([12.5, 13.5], replica=1, first_step=10, attempt=2)
    events += [started(6.0, attempt=1), started(9.5, attempt=2)]
    (cost,) = costs(RunRecord(events))
    assert cost["stall_seconds"] == pytest.approx(3.0)
    assert cost["steps_lost"] == 1
    assert cost["rejoin_seconds"] == pytest.approx(8.6)
    assert cost["rejoin_stall_seconds"] == pytest.approx(0.5)
    assert cost["num_starts"] == 2


def test_lost_steps_belong_to_the_kill_before_them() -> None:
    survivor = commits(float(time) for time in range(20))
    for late, passes in ((3, 2), (12, 3), (14, 2)):
        survivor[late].forward_passes = passes
    victim = [
        *commits([0.0, 1.0], replica=1),
        *commits([8.0, 9.0], replica=1, first_step=9, attempt=1),
    ]
    events = [
        *survivor,
        *victim,
        started(7.0, attempt=1),
        *killed(2.1),
        *killed(11.1, attempt=1, shot=1),
    ]
    first, second = costs(RunRecord(events))
    assert (first["steps_lost"], second["steps_lost"]) == (1, 2)
    assert first["rejoin_seconds"] == pytest.approx(5.9)
    assert (second["rejoin_seconds"], second["rejoin_stall_seconds"], second["num_starts"]) == (
        None,
        None,
        None,
    )


def test_a_process_that_is_there_within_the_stall_does_not_count_it_twice() -> None:
    times = [0.0, 1.0, 2.0, 5.0, 6.0, 7.0]
    back = commits([6.0, 7.0], replica=1, first_step=5, attempt=1)
    events = [
        *commits(times),
        *commits([0.0, 1.0, 2.0], replica=1),
        *killed(2.5),
        started(3.0, attempt=1),
        *back,
    ]
    (cost,) = costs(RunRecord(events))
    assert (cost["stall_seconds"], cost["rejoin_stall_seconds"]) == (pytest.approx(2.0), 0.0)


def test_a_survivor_that_never_commits_again_is_no_figure() -> None:
    events = [*commits([0.0, 1.0]), *commits([0.0, 1.0], replica=1), *killed(5.0)]
    with pytest.raises(BenchError, match="committed nothing"):
        costs(RunRecord(events))


def test_a_run_without_steps_is_no_figure() -> None:
    with pytest.raises(BenchError, match="no steps"):
        costs(RunRecord([started(0.0)]))
