# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that are alive without progress: a hung training thread, and processes that are stopped
and continued.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from harness.events import Event, audit
from harness.job import Job
from harness.trajectory import check, named

from titan_ft.engine.drain import TERMINATED
from titan_ft.launch.lighthouse import LighthouseSettings

STEP = 4  # the step in which a group comes to a stop
LATER = 8  # the step in which another group waits for it to be continued
NEVER_SECONDS = 300  # of a timeout that nobody lives to see
JOIN_SECONDS = LighthouseSettings().join_timeout_ms / 1000
# Hang timeouts: of a group that waits for others, of one that is to hang. On a busy machine a step
# may take a second.
SHORT_SECONDS, LONG_SECONDS = 3, 4


def gate(name: str, step: int = STEP, replica: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "replica": replica, "step": step, **more}


def hang_after(seconds: float) -> str:
    return f"--fault_tolerance.hang_timeout_seconds={seconds:g}"


def check_hung(job: Job, events: list[Event], replica: int, ranks: Collection[int]) -> None:
    """One of these ranks ended itself because it hung. No watchdog of another group acted."""
    hung = named(events, "hung")
    assert hung
    assert {e["replica"] for e in hung} == {replica}
    assert {e["rank"] for e in hung} <= set(ranks)
    assert {e["step"] for e in hung} == {STEP - 1}
    for rank in {e["rank"] for e in hung}:
        output = job.output(replica, rank)
        assert "most recent call first" in output
        assert "hang_timeout_seconds" in output


def stop(job: Job, replica: int, rank: int) -> None:
    """Stop one rank of a group, and wait until it has stopped."""
    job.send_signal(replica, signal.SIGSTOP, rank)
    stat = Path(f"/proc/{job.groups[replica].workers[rank].pid}/stat")
    job.wait_until(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T",
        30,
        f"rank {rank} has stopped",
    )


def failed(job: Job, replica: int, num_ranks: int) -> bool:
    """True once all ranks of the group reported a broken exchange."""
    ranks = {e["rank"] for e in job.events("exchange_failed") if e["replica"] == replica}
    return len(ranks) == num_ranks


def check_data(events: list[Event]) -> None:
    """Every batch was trained once."""
    found = audit(events)
    assert found.verdict == "holds", found


def test_a_hung_rank_ends_itself(make_job: Callable[..., Job]) -> None:
    """A hung rank prints its stacks and ends, and its group restarts. The others wait beyond their
    own hang timeout.
    """
    job = make_job(
        groups=2,
        ranks=2,
        hooks={"gates": [gate("never", rank=1)], "hold": 2},
        replica_flags={0: [hang_after(SHORT_SECONDS)], 1: [hang_after(LONG_SECONDS)]},
    )
    job.start()
    job.wait_for_gate("never", 1, [1])
    job.mark("down-1-0")  # the survivor soon waits for the next attempt
    job.finish()
    events = check(job, survivors=[0], longest_gap=math.inf)
    check_data(events)
    # A rank that waits for the one that hangs makes no progress either.
    check_hung(job, events, 1, [0, 1])
    (codes,) = job.groups[1].ended
    assert 1 in codes
    assert set(codes) <= {1, TERMINATED}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_stopped_group_is_left_behind_and_heals(make_job: Callable[..., Job], ranks: int) -> None:
    """The others do not wait for a group without heartbeats. Continued, that group notices, and
    heals without a restart.
    """
    gates = [
        gate("go", rank=0),
        *(gate("later", LATER, replica=0, rank=rank) for rank in range(ranks)),
    ]
    job = make_job(
        groups=2,
        ranks=ranks,
        flags=[f"--fault_tolerance.process_group_timeout_ms={1000 * NEVER_SECONDS}"],
        hooks={"gates": gates, "hold": 2},
    )
    job.start()
    job.wait_for_gate("go", 1)
    # The one that heartbeats; another one is left in the middle of its forward.
    stop(job, 1, rank=0)
    job.wait_for_gate("later", 0, range(ranks))
    assert not failed(job, 1, ranks)
    job.send_signal(1, signal.SIGCONT, rank=0)
    job.mark("go")
    job.wait_until(lambda: failed(job, 1, ranks), 30, "the group has noticed")
    job.mark("later")
    job.finish()
    events = check(job, survivors=[0], longest_gap=math.inf)
    check_data(events)
    assert job.groups[1].attempt == 0
    assert {(e["replica"], *e["slots"]) for e in named(events, "peer_silent")} >= {(0, 1)}
    assert [e["replica"] for e in named(events, "heal_finished")] == [1] * ranks
    participants = {e["step"]: e["participants"] for e in named(events, "step_committed")}
    assert [participants[step] for step in (STEP - 1, STEP, LATER, job.steps)] == [
        [0, 1],
        [0],
        [0],
        [0, 1],
    ]


def test_a_stopped_rank_takes_its_group_along(make_job: Callable[..., Job]) -> None:
    """A stopped rank that sends no heartbeats to the lighthouse ends its group, and the others do
    not wait.
    """
    job = make_job(
        groups=2,
        ranks=2,
        flags=[f"--fault_tolerance.process_group_timeout_ms={1000 * NEVER_SECONDS}"],
        replica_flags={
            1: ["--fault_tolerance.advertise_address=127.0.1.1{rank}"]
        },  # as on two hosts
        hooks={"gates": [gate("go", rank=1)], "hold": 2},
        grace_seconds=0.2,
    )
    job.start()
    job.wait_for_gate("go", 1, [1])
    job.mark("down-1-0")
    stop(job, 1, rank=1)
    job.mark("go")
    job.finish()
    # Neither the process group's timeout nor the lighthouse's join_timeout_ms.
    events = check(job, survivors=[0], longest_gap=min(NEVER_SECONDS, JOIN_SECONDS) / 2)
    check_data(events)
    (silent,) = named(events, "rank_silent")
    assert (silent["replica"], silent["rank"], silent["ranks"]) == (1, 0, [1])
    line = next(
        line
        for line in job.output(1).splitlines()
        if line.startswith("titan_ft: no heartbeat from rank 1 on ")
    )
    assert socket.gethostname() in line
    assert "fault_tolerance.heartbeat_timeout_ms" in line
    # Of the agent: a stopped process takes no SIGTERM.
    assert job.groups[1].ended == [[1, -signal.SIGKILL]]
    assert not named(events, "hung")
    assert {(e["replica"], e["rank"]) for e in named(events, "heal_finished")} == {(1, 0), (1, 1)}
    participants = {e["step"]: e["participants"] for e in named(events, "step_committed")}
    assert [participants[step] for step in (STEP - 1, STEP, job.steps)] == [[0, 1], [0], [0, 1]]


@pytest.mark.slow
def test_each_rank_of_four_is_stopped(make_job: Callable[..., Job]) -> None:
    """In a tree where each rank is the child of the previous one, the stopped rank is named and its
    children are not.

    A stopped rank 0 stops the group's heartbeats; see
    `test_a_stopped_group_is_left_behind_and_heals`.
    """
    gates = [gate(f"go{rank}", rank=rank, attempt=rank - 1) for rank in (1, 2, 3)]
    job = make_job(
        groups=2,
        ranks=4,
        steps=40,
        max_restarts=4,
        flags=[f"--fault_tolerance.process_group_timeout_ms={1000 * NEVER_SECONDS}"],
        hooks={"gates": gates, "hold": 1, "fan_out": 1},
        grace_seconds=0.2,
    )
    job.start()
    for rank in (1, 2, 3):
        job.wait_for_gate(f"go{rank}", 1, [rank], rank - 1)
        job.mark(f"down-1-{rank - 1}")
        stop(job, 1, rank)
        job.mark(f"go{rank}")
    job.finish(240)
    events = check(job, survivors=[0], longest_gap=min(NEVER_SECONDS, JOIN_SECONDS) / 2)
    check_data(events)
    silent = [
        (e["replica"], e["attempt"], e["rank"], e["ranks"]) for e in named(events, "rank_silent")
    ]
    assert silent == [(1, rank - 1, 0, [rank]) for rank in (1, 2, 3)]
    assert not named(events, "hung")
    participants = {e["step"]: e["participants"] for e in named(events, "step_committed")}
    assert participants[job.steps] == [0, 1]


@pytest.mark.slow
def test_a_long_call_is_no_silence(make_job: Callable[..., Job]) -> None:
    """A rank whose GIL is held by one call still heartbeats, so its group is not ended."""
    long = [
        {"replica": 1, "rank": rank, "step": STEP + rank, "seconds": 3.0, "gil": True}
        for rank in (0, 1)
    ]
    job = make_job(groups=2, ranks=2, steps=8, hooks={"delays": long})
    job.run()
    events = check(job, survivors=[0, 1], longest_gap=math.inf)
    assert not named(events, "rank_silent", "peer_silent", "exchange_failed", "heal_started")


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_short_stop_is_no_failure(make_job: Callable[..., Job], ranks: int, rank: int) -> None:
    """A stop shorter than the heartbeat timeout costs only its own time."""
    job = make_job(
        groups=2, ranks=ranks, hooks={"gates": [gate("go", rank=rank)]}, heartbeat_timeout_ms=5000
    )
    job.start()
    job.wait_for_gate("go", 1, [rank])
    stop(job, 1, rank=rank)
    job.mark("go")
    until = time.monotonic() + 0.1
    job.wait_until(lambda: time.monotonic() > until, 10, "it was stopped for 0.1 s")
    job.send_signal(1, signal.SIGCONT)
    job.finish()
    events = check(job, survivors=[0, 1])
    check_data(events)
    committed = named(events, "step_committed")
    assert {(tuple(e["participants"]), e["exchanges"]) for e in committed} == {((0, 1), 1)}
    assert not named(events, "exchange_failed", "heal_started", "hung", "rank_silent")
