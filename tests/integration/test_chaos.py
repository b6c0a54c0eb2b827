# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Faults that a file orders inside workers: their effect on a job, and the job's recovery."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from harness.events import Event, audit
from harness.job import Job
from harness.trajectory import check, check_finished, check_one_trajectory, named

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.orders import Order

FLAGS = ("--fault_tolerance.chaos",)
FORWARD_SECONDS = 0.1  # a forward takes that longer, so that a fault strikes amid training
STEP = 3  # committed before the fault is ordered


def make(
    make_job: Callable[..., Job],
    groups: int,
    steps: int,
    flags: Sequence[str] = (),
    constants: Mapping[str, float] | None = None,
    **more: Any,
) -> Job:
    delays = [
        {"replica": r, "rank": 0, "attempt": "any", "seconds": FORWARD_SECONDS}
        for r in range(groups)
    ]
    hooks = {"delays": delays, "constants": dict(constants or {})}
    return make_job(
        groups=groups, steps=steps, flags=[*FLAGS, *flags], hooks=hooks, late=False, **more
    )


def order(
    job: Job, fault: str, replica: int | None = 1, rank: int | None = 0, **params: float
) -> None:
    """Order a fault."""
    Order(fault=fault, replica=replica, rank=rank, params=params, seed=7, shot=1).append_to(
        job.paths.chaos_orders
    )


def begin(job: Job) -> None:
    """Start the job; returns when every group is amid training."""
    job.start()

    def trained() -> bool:
        return {e["replica"] for e in job.events("step_committed") if e["step"] >= STEP} == set(
            range(len(job.groups))
        )

    job.wait_until(trained, 60, "every group trains")


def finish(job: Job, survivors: Collection[int], fault: str) -> list[Event]:
    """Let the job end; it came through, and the fault struck once."""
    job.finish(120)
    events = check(job, survivors=survivors, longest_gap=30.0)
    found = audit(events)
    assert found.verdict == "holds", found
    (injected,) = named(events, "fault_injected")
    assert injected["fault"] == fault
    assert injected["target"] == {"replica": injected["replica"], "rank": injected["rank"]}
    assert not named(events, "fault_skipped")
    return events


def final_digests(job: Job) -> set[str]:
    return {event["digest"] for event in job.events("training_finished")}


def test_an_agent_without_orders_changes_nothing(make_job: Callable[..., Job]) -> None:
    """The same bytes as without one."""
    digests = []
    for flags in ((), FLAGS):
        job = make_job(groups=2, steps=6, flags=flags)
        job.run()
        digests.append(final_digests(job))
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


def test_an_aborted_process_group_costs_one_repeated_exchange(make_job: Callable[..., Job]) -> None:
    """No group ends, none recomputes; all meet again in the next quorum."""
    job = make(make_job, groups=2, steps=10)
    begin(job)
    order(job, "abort_process_group")
    events = finish(job, survivors=[0, 1], fault="abort_process_group")
    assert {e["replica"] for e in named(events, "exchange_failed")} == {0, 1}
    assert not named(events, "heal_started")


@pytest.mark.slow
@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_a_short_outage_costs_time_only(make_job: Callable[..., Job]) -> None:
    """A process without network for a second continues, after a heal if the other group made steps
    meanwhile.
    """
    job = make(make_job, groups=2, steps=16)
    begin(job)
    order(job, "network_dead", rank=None, seconds=1.0)
    events = finish(job, survivors=[0], fault="network_dead")
    assert job.groups[1].attempt == 0
    (injected,) = named(events, "fault_injected")
    (undone,) = named(events, "fault_undone")
    assert undone["time"] - injected["time"] >= 1.0
    # What it needs for more than the step under way does not arrive in between.
    during = [
        e for e in named(events, "step_committed") if injected["time"] < e["time"] < undone["time"]
    ]
    assert sum(e["replica"] == 1 for e in during) <= 1


def test_a_flipped_bit_of_the_optimizer_is_named_and_heals(make_job: Callable[..., Job]) -> None:
    """The digests' majority names the group with a flipped optimizer bit, although its parameters
    are still equal.
    """
    job = make(make_job, groups=3, steps=15, flags=["--fault_tolerance.digest_every=5"])
    begin(job)
    order(job, "flip_optimizer")
    job.finish(120)
    events = job.events()
    assert [e["fault"] for e in named(events, "fault_injected")] == ["flip_optimizer"]
    mismatches = named(events, "digest_mismatch")
    assert {e["replica"] for e in mismatches} == {0, 1, 2}
    assert all(e["minority"] == [1] for e in mismatches)
    assert {e["replica"] for e in named(events, "heal_finished")} == {1}
    check_finished(job, events, job.steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("segfault", -signal.SIGSEGV, ""),
        ("exception", 1, "fault injection"),
        ("out_of_memory", 1, "memory"),
        ("deadlock", 1, "hang_timeout_seconds"),
    ],
)
def test_a_worker_that_ends_comes_back(
    make_job: Callable[..., Job], fault: str, code: int, text: str
) -> None:
    """A worker ended by a fault has the fault's exit status and message, restarts and heals; the
    other group goes on.
    """
    job = make(
        make_job,
        groups=2,
        steps=30,
        ranks=1,
        replica_flags={1: ["--fault_tolerance.hang_timeout_seconds=4"]},
    )
    begin(job)
    order(job, fault)
    events = finish(job, survivors=[0], fault=fault)
    assert job.groups[1].ended == [[code]]
    assert text in job.output(1)
    assert {e["attempt"] for e in named(events, "heal_finished")} == {1}
    assert bool(named(events, "hung")) == (fault == "deadlock")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_gradient_counts_for_nothing(make_job: Callable[..., Job], ranks: int) -> None:
    """A step excludes the group with a NaN gradient, and all groups continue."""
    job = make(make_job, groups=3, ranks=ranks, steps=16)
    begin(job)
    order(job, "nan_gradient")
    job.finish(120)
    events = job.events()
    (injected,) = named(events, "fault_injected")
    committed = named(events, "step_committed")
    without = [e for e in committed if e["step"] == injected["step"]]
    assert without
    assert {tuple(e["participants"]) for e in without} == {(0, 2)}
    check_one_trajectory(committed)
    check_finished(job, events, job.steps)
    assert audit(events).verdict == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fault", "params"),
    [("network_dead", {"seconds": 20.0}), ("network_slow", {"seconds": 5.0, "loss": 0.05})],
)
@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_a_bad_network(
    make_job: Callable[..., Job], fault: str, params: Mapping[str, float], ranks: int
) -> None:
    """No worker ends; the ranks of the group stay together; in the end all hold the same state."""
    job = make(make_job, groups=3, ranks=ranks, steps=100)
    begin(job)
    order(job, fault, rank=None, **params)
    job.finish(150)
    events = job.events()
    assert [group.attempt for group in job.groups] == [0, 0, 0]
    assert len(named(events, "fault_injected")) == len(named(events, "fault_undone")) == ranks
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)
    assert audit(events).verdict == "holds"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_a_dead_link(make_job: Callable[..., Job], ranks: int) -> None:
    """Training continues with one end of a dead link; the other end waits, and heals when the link
    is back.
    """
    job = make(make_job, groups=3, ranks=ranks, steps=40)
    begin(job)
    for replica, peer in ((1, 2), (2, 1)):
        order(job, "link_dead", replica=replica, rank=None, seconds=15.0, peer=peer)
    job.finish(150)
    events = job.events()
    assert [group.attempt for group in job.groups] == [0, 0, 0]
    injected, undone = named(events, "fault_injected"), named(events, "fault_undone")
    ends = [(replica, rank) for replica in (1, 2) for rank in range(ranks)]
    assert sorted((e["replica"], e["rank"]) for e in injected) == ends
    assert sorted((e["replica"], e["rank"]) for e in undone) == ends
    # The step under way at its beginning may have been exchanged already, and not committed yet.
    begun, over = max(e["time"] for e in injected), min(e["time"] for e in undone)
    during = [
        e for e in named(events, "step_committed") if begun < e["time"] < over and e["rank"] == 0
    ]
    together = {e["step"] for e in during if {1, 2} <= set(e["participants"])}
    assert len(together) <= 1
    without = {tuple(e["participants"]) for e in during if e["step"] not in together}
    assert without
    assert without <= {(0, 1), (0, 2)}, "the largest part whose groups all reach each other"
    assert named(events, "link_back")
    assert named(events, "heal_finished")
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)
    assert audit(events).verdict == "holds"


@pytest.mark.slow
def test_a_corrupt_chunk_is_no_state(make_job: Callable[..., Job]) -> None:
    """The joiner fetches a corrupt chunk again, and its heal does not fail."""
    job = make(make_job, groups=3, steps=40)
    begin(job)
    order(job, "corrupt_chunk", replica=None, rank=None)
    job.send_signal(2, signal.SIGKILL)
    events = finish(job, survivors=[0, 1], fault="corrupt_chunk")
    assert not named(events, "heal_failed")
    assert "checksums differ" in job.output(2, attempt=1)


@pytest.mark.slow
def test_a_donor_that_dies_is_replaced(make_job: Callable[..., Job]) -> None:
    """The joiner asks another donor; the killed one comes back as well."""
    job = make(make_job, groups=3, steps=60)
    begin(job)
    order(job, "kill_donor", replica=None, rank=None)
    job.send_signal(2, signal.SIGKILL)
    job.finish(120)
    events = job.events()
    (injected,) = named(events, "fault_injected")
    killed = injected["replica"]
    assert job.groups[killed].ended[0] == [-signal.SIGKILL]
    assert {e["replica"] for e in named(events, "heal_finished")} == {2, killed}
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)


@pytest.mark.slow
def test_a_full_disk_costs_one_checkpoint(make_job: Callable[..., Job]) -> None:
    """A full disk fails one save, which is reported; the next save is complete."""
    job = make(
        make_job, groups=2, steps=20, flags=["--checkpoint.enable", "--checkpoint.interval=8"]
    )
    begin(job)
    order(job, "disk_full", replica=None, rank=None)
    events = finish(job, survivors=[0, 1], fault="disk_full")
    (failed,) = named(events, "checkpoint_failed")
    assert "No space left" in failed["error"]
    assert {e["step"] for e in named(events, "checkpoint_saved")} == {8, 16, 20} - {failed["step"]}


@pytest.mark.slow
def test_a_slow_rank_is_a_straggler(make_job: Callable[..., Job]) -> None:
    """A slow rank is reported as a straggler, and so is its recovery."""
    # Of 2 slow steps one may be missing: a machine that stands still for 0.2 s in a forward, which
    # the fault makes 20 times as long, has its 4 s over in the first. And 2 steps of another group
    # may be slow for such a reason.
    job = make(make_job, groups=3, steps=80, constants={"titan_ft.protocol.straggler.STEPS": 4})
    begin(job)
    order(job, "slow_rank", factor=20.0, seconds=15.0)
    events = finish(job, survivors=[0, 1, 2], fault="slow_rank")
    assert {e["slot"] for e in named(events, "straggler")} == {1}
    assert {e["slot"] for e in named(events, "straggler_recovered")} == {1}
