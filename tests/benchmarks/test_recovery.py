# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The costs of a return with a slow transfer, of a drain, and of the lighthouse's death."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.record import injected
from benchmarks.recovery import drain_after, outage_after, rejoin_after, throttle
from benchmarks.run import BenchError
from tests.benchmarks.histories import commits, killed, started
from tests.event_builder import build
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import (
    Drained,
    Event,
    FaultInjected,
    HealFinished,
    LighthouseRestarted,
    ReplicaRestarted,
    Target,
)

BEFORE = [float(step) for step in range(11)]


def healed(time: float, seconds: float, **fields: Any) -> Event:
    return build(HealFinished, time=time, replica=1, attempt=1, seconds=seconds, **fields)


def disturbed(time: float, fault: str, target: Target) -> Event:
    return build(FaultInjected, time=time, fault=fault, target=target, shot=0)


def test_a_rejoin_with_replay() -> None:
    """Steps of 1 s; a kill; the survivor alone is faster; steps of 1.1 s during the transfer; 3 s
    at the return.
    """
    during = [13.0 + 1.1 * step for step in range(1, 11)]
    alone = commits([12.0, 12.5, 13.0, *during], first_step=12, participants=[0])
    events = [*commits(BEFORE), *commits(BEFORE, replica=1), *killed(10.2), *alone]
    events += commits([27.0, 28.0], first_step=25)
    events += [started(12.0, attempt=1), healed(24.1, 11.2, fetch_seconds=6.2, replayed=10)]
    events += commits([24.5], replica=1, first_step=24, attempt=1, participants=[0])
    events += commits([27.0, 28.0], replica=1, first_step=25, attempt=1)
    record = RunRecord(events)
    rejoin = rejoin_after(record, *injected(record))
    assert rejoin["transfer_seconds"] == pytest.approx(11.2)
    assert rejoin["transfer_steps"] == pytest.approx(11.2)
    assert rejoin["steps_made"] == 11
    assert rejoin["step_ratio"] == pytest.approx(1.1)
    assert rejoin["stall"]["seconds"] == rejoin["return_stall"]["seconds"] == pytest.approx(2.0)
    assert (rejoin["replayed"], rejoin["replay_rate"]) == (10, pytest.approx(2.0))


@pytest.mark.parametrize("done", [21.9, 22.2])
def test_a_rejoin_with_wait(done: float) -> None:
    """The survivor stands still for the whole transfer, and its few steps give no median.

    Its commit at the end comes shortly before or after the joiner's event.
    """
    events = [*commits(BEFORE), *commits(BEFORE, replica=1), *killed(10.2)]
    events += [
        *commits([12.0, 22.0], first_step=12, participants=[0]),
        *commits([23.0, 24.0], first_step=14),
    ]
    events += [started(11.5, attempt=1), healed(done, done - 12.1, replayed=1)]
    events += commits([23.0, 24.0], replica=1, first_step=14, attempt=1)
    record = RunRecord(events)
    rejoin = rejoin_after(record, *injected(record))
    assert (rejoin["stall"]["seconds"], rejoin["stall"]["steps"]) == (
        pytest.approx(9.0),
        pytest.approx(9.0),
    )
    assert rejoin["step_ratio"] is rejoin["replay_rate"] is None
    assert rejoin["steps_made"] == (done > 22.0)
    assert rejoin["return_stall"]["seconds"] == 0.0


def test_a_group_that_does_not_return_is_no_figure() -> None:
    record = RunRecord(
        [*commits(BEFORE), *commits(BEFORE[:4], replica=1), *killed(3.2), started(5.0, attempt=1)]
    )
    with pytest.raises(BenchError, match="did not contribute again"):
        rejoin_after(record, *injected(record))


def test_a_drain_stalls_in_the_step_after_the_one_that_is_finished() -> None:
    events = [
        *commits([0.0, 1.0, 2.0, 3.0, 4.0, 6.5, 7.0]),
        *commits([0.0, 1.0, 2.0, 3.0, 4.0], replica=1),
    ]
    events.append(disturbed(3.2, "term_group", Target(1)))
    events += [build(Drained, time=3.95 + rank / 100, replica=1, rank=rank) for rank in (0, 1)]
    record = RunRecord(events)
    drain = drain_after(record, *injected(record))
    assert drain["stall"] == {"seconds": 1.5, "steps": 1.5, "usual_seconds": 1.0}
    assert drain["leave_seconds"] == pytest.approx(0.75)
    assert drain["in_order"]
    stayed = RunRecord(event for event in events if not isinstance(event, Drained))
    with pytest.raises(BenchError, match="asked to leave"):
        drain_after(stayed, *injected(stayed))


def test_an_outage_is_the_pause_of_the_group_hit_hardest() -> None:
    events = [
        *commits([0.0, 1.0, 2.0, 3.0, 5.0, 6.0]),
        *commits([0.0, 1.0, 2.0, 3.0, 5.5, 6.0], replica=1),
    ]
    events.append(disturbed(3.2, "kill_lighthouse", Target(lighthouse=True)))
    events += [
        build(LighthouseRestarted, time=1.5, seconds=9.0),
        build(LighthouseRestarted, time=4.0, seconds=0.7),
        build(ReplicaRestarted, time=0.5, replica=1),
    ]
    record = RunRecord(events)
    outage = outage_after(record, *injected(record))
    assert outage["stall"]["seconds"] == pytest.approx(1.5)
    assert (outage["away_seconds"], outage["num_restarts"]) == (0.7, 0)
    down = RunRecord(event for event in events if event.time != 4.0)
    with pytest.raises(BenchError, match="did not come back"):
        outage_after(down, *injected(down))


def test_the_throttle_makes_the_transfer_last_its_steps() -> None:
    """2.5 MB in 20 steps of half a second are 2 Mbit/s; steps without the other group do not
    count.
    """
    events = [*commits([0.0, 0.5, 1.0, 1.5]), *commits([5.0, 9.0], first_step=5, participants=[0])]
    events.append(healed(9.5, 1.0, bytes=2_500_000))
    assert throttle(RunRecord(events)) == pytest.approx(2.0)
    with pytest.raises(BenchError, match="no group fetched"):
        throttle(RunRecord(commits([0.0, 1.0])))
