# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGTERM: a group leaves after a committed step, or at once if no step is under way."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

from harness.events import Event, audit
from harness.job import Job
from harness.trajectory import by_process, check, named

STEP = 4  # the step in which the first signal comes
# What a survivor may stand still for: one step and the lighthouse's heartbeat timeout (0.5 s) on a
# busy machine. Well below process_group_timeout_ms (10 s), which it would sit out if a group went
# without a word.
LONGEST_STALL_SECONDS = 3.0


def gate(name: str, replica: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "replica": replica, "step": STEP, **more}


def terminate(job: Job, replica: int) -> None:
    """Send SIGTERM to all processes of a group: its ranks and their forked children."""
    for worker in job.groups[replica].workers:
        assert worker.pid is not None
        assert worker.running
        os.killpg(worker.pid, signal.SIGTERM)


def check_data(events: list[Event]) -> None:
    """Every batch was trained once, also those of the absent group."""
    found = audit(events)
    assert found.verdict == "holds", found


def check_drained(events: list[Event], replica: int, num_ranks: int, attempt: int = 0) -> int:
    """Each rank of the group left in order, after the same step; return that step."""
    drained = [
        e for e in named(events, "drained") if (e["replica"], e["attempt"]) == (replica, attempt)
    ]
    assert sorted(e["rank"] for e in drained) == list(range(num_ranks))
    assert all(e["in_order"] and e["reason"] == "SIGTERM" for e in drained)
    (step,) = {e["step"] for e in drained}
    return int(step)


def test_sigterm_in_mid_training(make_job: Callable[..., Job]) -> None:
    """The group finishes its step and leaves. The others notice no failure, and its data continues
    on its return.

    The group's loader workers get the signal too.
    """
    ranks = 2
    job = make_job(
        groups=2,
        ranks=ranks,
        flags=["--training.dataloader.num_workers=1"],
        hooks={"gates": [gate("go", rank=rank) for rank in range(ranks)], "hold": 2},
        heartbeat_timeout_ms=2000,
    )
    job.start()
    job.wait_for_gate("go", 1, range(ranks))
    job.mark("down-1-0")  # the survivor soon waits for the next attempt
    terminate(job, 1)
    job.mark("go")
    assert job.wait_for_end(1) == [0] * ranks
    job.wait_until(lambda: (job.markers / "waiting-1-0-0").exists(), 30, "the survivor has gone on")
    job.start_again(1)
    job.finish()

    events = check(job, survivors=[0])
    check_data(events)
    last = check_drained(events, 1, ranks)
    assert last >= STEP
    committed = named(events, "step_committed")
    own = [e["step"] for e in committed if (e["replica"], e["attempt"]) == (1, 0)]
    assert max(own) == last
    participants = {e["step"]: e["participants"] for e in committed if e["replica"] == 0}
    assert [participants[step] for step in (last, last + 1, job.steps)] == [[0, 1], [0], [0, 1]]
    assert not named(events, "exchange_failed")
    assert {e["exchanges"] for e in committed if e["replica"] == 0} == {1}
    assert stall(events, last) < LONGEST_STALL_SECONDS


def stall(events: list[Event], step: int) -> float:
    """Return the longest time from a step to the next commit of a survivor."""
    gaps = []
    for process in by_process(events).values():
        for earlier, later in itertools.pairwise(named(process, "step_committed")):
            if earlier["replica"] == 0 and earlier["step"] == step:
                gaps.append(later["time"] - earlier["time"])
    return max(gaps)


def test_the_drain_timeout_abandons_a_step(make_job: Callable[..., Job]) -> None:
    """A step that takes longer than drain_timeout_seconds is not finished; its batch is trained on
    return.
    """
    flags = ["--fault_tolerance.drain_timeout_seconds=1"]
    job = make_job(groups=2, flags=flags, hooks={"gates": [gate("never")], "hold": 2})
    job.start()
    job.wait_for_gate("never", 1)
    job.mark("down-1-0")
    terminate(job, 1)
    assert job.wait_for_end(1) == [0]
    job.start_again(1)
    job.finish()
    events = check(job, survivors=[0])
    check_data(events)
    (drained,) = named(events, "drained")
    assert (drained["replica"], drained["in_order"], drained["step"]) == (1, False, STEP - 1)
    assert "drain_timeout_seconds" in drained["reason"]
    assert "drain_timeout_seconds" in job.output(1)


def test_sigterm_while_waiting_for_the_first_step(make_job: Callable[..., Job]) -> None:
    """A group that waits for the other groups' arrival leaves promptly."""
    ranks = 2
    gates = [gate("go", replica=0, rank=rank, point="vote_after", step=0) for rank in range(ranks)]
    job = make_job(
        groups=1, ranks=ranks, flags=["--fault_tolerance.group_size=2"], hooks={"gates": gates}
    )
    job.start()
    job.wait_for_gate("go", 0, range(ranks))
    terminate(job, 0)
    job.mark("go")
    assert job.wait_for_end(0) == [0] * ranks
    assert check_drained(job.events(), 0, ranks) == 0


def test_sigterm_while_too_few_groups_are_there(make_job: Callable[..., Job]) -> None:
    """A group that waits for min_replica_size groups leaves promptly, with its last
    committed step.
    """
    faults = [{"replica": 1, "point": "backward", "step": STEP}]
    flags = ["--fault_tolerance.min_replica_size=2"]
    job = make_job(groups=2, flags=flags, hooks={"faults": faults}, max_restarts=0)
    job.start()
    job.wait_until(lambda: job.events("waiting"), 30, "the survivor waits")
    terminate(job, 0)
    assert job.wait_for_end(0) == [0]
    assert check_drained(job.events(), 0, 1) == STEP - 1


def test_sigterm_in_mid_heal(make_job: Callable[..., Job]) -> None:
    """A joiner leaves during its fetch. Its donor trains on, and serves it again on its return."""
    hooks = {
        "faults": [{"replica": 1, "point": "backward", "step": STEP}],
        "gates": [{"name": "never", "replica": 1, "attempt": 1, "point": "fetch"}],
        "hold": 4,
    }
    job = make_job(groups=2, steps=24, hooks=hooks)
    job.start()
    job.wait_for_gate("never", 1, attempt=1)
    terminate(job, 1)
    # The survivor waits no more for this transfer, but soon for the next attempt.
    job.mark("down-1-1")
    assert job.wait_for_end(1) == [0]
    job.start_again(1)
    job.finish()
    events = check(job, survivors=[0])
    check_data(events)
    check_drained(events, 1, 1, attempt=1)
    assert [e["attempt"] for e in named(events, "heal_finished")] == [2]
    assert {
        e["participants"][-1] for e in named(events, "step_committed") if e["step"] == job.steps
    } == {1}
