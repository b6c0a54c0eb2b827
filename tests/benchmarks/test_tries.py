# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run of the peer, read as one of ours."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.figures import figures
from benchmarks.kills import costs
from benchmarks.record import compare_digests, injected, num_crashes
from benchmarks.tries import StepTried, translate
from tests.benchmarks.histories import in_order, started
from tests.event_builder import build
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.run.events import Event, FaultInjected, StepCommitted, Target

LOST = {"committed": False, "contributed": False}


def tried(
    time: float, step: int, replica: int = 0, attempt: int = 0, rank: int = 0, **fields: Any
) -> Event:
    shape = {
        "replica": replica,
        "attempt": attempt,
        "rank": rank,
        "committed": True,
        "contributed": True,
    }
    return build(StepTried, time=time, **{"step": step, "own_loss": 4.0, **shape, **fields})


def test_what_a_kill_destroys() -> None:
    """Steps of 1 s with two groups; a kill in step 3 discards the survivor's pass and stalls it for
    4 s.

    Lost are that pass, the pass that the death cut short, and the pass of the healing group. The
    time from step 1 to 5 is 8 s; of it steps 2 and 5 count as a second each, and steps 3 and 4 of
    one group as half a second."""
    events = [started(0.0, 0), started(0.0, 1)]
    events += [tried(float(step), step, replica) for step in (1, 2) for replica in (0, 1)]
    events += [build(FaultInjected, time=2.5, fault="sigkill_group", target=Target(1), shot=0)]
    events += [tried(6.0, 3, 0, **LOST), tried(7.0, 3, 0), started(4.0, 1, attempt=1)]
    # While the group that is back heals, it gives nothing to the step that it commits.
    events += [
        tried(8.0, 4, replica, attempt=replica, contributed=replica == 0) for replica in (0, 1)
    ]
    events += [tried(9.0, 5, replica, attempt=replica) for replica in (0, 1)]
    record = RunRecord(translate(in_order(events)))
    shown, good = figures(record), measure_goodput(record)
    assert (good.exchanges_committed, good.exchanges_attempted) == (5, 6)
    assert shown["forward passes for nothing"] == "3 of 11 (27.3 %)"
    # The first step counts as a usual one: 1 + 1 + 0.5 + 0.5 + 1 of 9 s.
    assert good.effective_training_time_in_training == pytest.approx(4 / 9)
    (kill,) = injected(record)
    assert (num_crashes(record), kill.stall_seconds) == (0, pytest.approx(4.0))
    (cost,) = costs(record)
    assert (cost["steps_lost"], cost["num_starts"], cost["rejoin_seconds"]) == (1, 1, 6.5)
    assert shown["loss of the last steps that all runs have"] == "4.000"


def test_a_try_counts_once_however_many_groups_were_in_it() -> None:
    """All three groups lose the attempt; one of them commits the next one alone."""
    events = [tried(1.0, 1, replica, **LOST) for replica in (0, 1, 2)] + [tried(2.0, 1, 2)]
    record = RunRecord(translate(events))
    good = measure_goodput(record)
    assert (good.exchanges_committed, good.exchanges_attempted) == (1, 2)
    assert figures(record)["forward passes for nothing"] == "3 of 4 (75.0 %)"


def test_a_job_that_begins_anew_has_lost_its_steps() -> None:
    """The one group with the state crashes: its steps are made again, and are other steps."""
    events = [started(0.0, 0), *(tried(float(step), step) for step in range(1, 11))]
    events += [
        started(12.0, 0, attempt=1),
        *(tried(20.0 + step, step, attempt=1) for step in range(1, 4)),
    ]
    record = RunRecord(translate(events))
    good = measure_goodput(record)
    assert (good.exchanges_committed, good.exchanges_attempted) == (3, 13)
    assert good.wasted["the state was thrown away"] == 10
    assert (num_crashes(record), injected(record)) == (1, [])


def test_the_loss_is_of_whole_groups() -> None:
    """Ranks report their shares; a group with a missing rank, as after a kill, does not count."""
    events = [tried(1.0, 1, own_loss=2.0 + rank, rank=rank) for rank in (0, 1)] + [
        tried(1.0, 1, 1, own_loss=9.0)
    ]
    assert {event.loss for event in translate(events) if isinstance(event, StepCommitted)} == {5.0}


def test_weights_that_differ_are_told() -> None:
    events = [tried(5.0, 5, replica, digest="a") for replica in (0, 1)]
    events += [tried(10.0, 10, replica, digest=f"b{replica}") for replica in (0, 1)]
    assert (
        compare_digests(RunRecord(translate(events)))
        == "differ (step 10); differ in 1 of 2 comparisons"
    )


def test_the_same_step_of_a_job_that_began_anew_is_another_state() -> None:
    events = [
        tried(float(step), step, replica, digest="a") for step in (5, 50) for replica in (0, 1)
    ]
    events += [tried(90.0 + replica, 5, replica, digest="xy"[replica]) for replica in (0, 1)]
    assert (
        compare_digests(RunRecord(translate(events)))
        == "differ (step 5); differ in 1 of 3 comparisons"
    )


def test_events_of_ours_stay_as_they_are() -> None:
    events = [started(0.0), build(StepCommitted, time=1.0, step=1)]
    assert translate(events) == events
    assert injected(RunRecord(events)) == []
