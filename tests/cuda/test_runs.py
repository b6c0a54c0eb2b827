# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole jobs over NCCL on torch's CUDA build: their bytes equal those of Gloo, of stock, of an
undisturbed run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from harness.events import Event
from harness.job import Job
from harness.runs import SECONDS, Runs, check_equal
from harness.trajectory import check, check_finished, check_killed, check_one_trajectory, named

NCCL, GLOO = (f"--fault_tolerance.process_group={name}" for name in ("nccl", "gloo"))
STEPS = 8
KILL_STEP = 4
PIPELINE = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4")
TENSOR = ("--parallelism.tensor_parallel_degree=2",)
FULL_CHECKPOINTS = (
    "--checkpoint.enable",
    "--checkpoint.interval=4",
    "--checkpoint.no-last-save-model-only",
)
SLOW = {"marks": pytest.mark.slow}


def digests(events: Sequence[Event]) -> dict[tuple[int, int], str]:
    """Return the digest of each rank's state by (step, rank), after checking that the
    groups agree.
    """
    committed = named(events, "step_committed")
    check_one_trajectory(committed)
    found = {(event["step"], event["rank"]): event["digest"] for event in committed}
    assert None not in found.values()
    return found


def train(
    make_job: Callable[..., Job], flags: Sequence[str], **settings: Any
) -> dict[tuple[int, int], str]:
    """Train without a failure; returns the digests of all steps."""
    # The one that is left of two that cannot sum does not wait for long.
    hooks = settings.pop("hooks", {}) | {"constants": {"titan_ft.engine.step.FINISH_SECONDS": 5.0}}
    job = make_job(
        flags=flags, hooks=hooks, **{"groups": 2, "steps": STEPS, "max_restarts": 0, **settings}
    )
    job.run(SECONDS)
    assert [group.finished for group in job.groups] == [True] * len(job.groups), job.output(0)
    return digests(job.events())


@pytest.mark.parametrize(
    ("groups", "ranks", "flags"),
    [
        pytest.param(2, 1, (), id="2x1"),
        pytest.param(
            2, 2, (), id="2x2", **SLOW
        ),  # two ranks a group: the two last rows have them too
        pytest.param(3, 1, (), id="3x1"),
        pytest.param(2, 2, PIPELINE, id="pipeline"),
        pytest.param(2, 2, TENSOR, id="tensor"),
    ],
)
def test_a_kill_changes_no_byte(
    make_job: Callable[..., Job], groups: int, ranks: int, flags: tuple[str, ...]
) -> None:
    """The others wait for the killed group to heal, so each step has the bytes of a run without a
    kill.
    """
    flags = (NCCL, f"--fault_tolerance.min_replica_size={groups}", *flags)
    undisturbed = train(make_job, flags, groups=groups, ranks=ranks)
    kill = {"replica": 1, "rank": ranks - 1, "point": "backward", "step": KILL_STEP}
    job = make_job(
        groups=groups, ranks=ranks, steps=STEPS, flags=flags, hooks={"faults": [kill]}, late=False
    )
    job.run(SECONDS)
    events = check(job, survivors=set(range(groups)) - {1}, longest_gap=SECONDS)
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    assert len(named(events, "heal_finished")) == ranks
    assert digests(events) == undisturbed


ROUNDS = ("--fault_tolerance.sync_steps=4", "--fault_tolerance.semi_sync_method")
FRAGMENTS = ("--fault_tolerance.num_fragments=2", "--fault_tolerance.fragment_sync_delay=1")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--fault_tolerance.exchange_dtype=bfloat16",), id="bfloat16"),
        pytest.param((*ROUNDS, "local_sgd"), id="local_sgd"),
        pytest.param((*ROUNDS, "diloco", "--fault_tolerance.should_quantize"), id="diloco_8_bits"),
        pytest.param((*ROUNDS, "diloco", *FRAGMENTS), id="streaming_diloco"),
        pytest.param((), id="float32", **SLOW),
        pytest.param((*ROUNDS, "diloco"), id="diloco", **SLOW),
        pytest.param(
            (*ROUNDS, "diloco", *FRAGMENTS, "--fault_tolerance.should_quantize"),
            id="streaming_8_bits",
            **SLOW,
        ),
    ],
)
def test_nccl_makes_the_bytes_of_gloo(make_job: Callable[..., Job], flags: tuple[str, ...]) -> None:
    """Two addends have one sum in any order: after each update both runs have the same state."""
    over_nccl, over_gloo = (
        train(make_job, (process_group, *flags)) for process_group in (NCCL, GLOO)
    )
    assert over_nccl == over_gloo


@pytest.mark.parametrize("process_group", [NCCL, pytest.param(GLOO, **SLOW)])
def test_two_groups_equal_stock_hsdp(runs: Runs, process_group: str) -> None:
    """2 groups x 2 ranks are stock torchtitan's HSDP 2 x 2, bit for bit, on a GPU too."""
    check_equal(runs.groups(2, 2, [process_group]), runs.stock(4, replicate=2, shard=2))


@pytest.mark.parametrize("mode", ["async", pytest.param("async_with_pinned_mem", **SLOW)])
def test_all_are_killed_and_resume(make_job: Callable[..., Job], mode: str) -> None:
    """From an asynchronous checkpoint of two shards on, all steps have the bytes of an undisturbed
    run.
    """
    flags = (NCCL, *FULL_CHECKPOINTS, f"--checkpoint.async_mode={mode}")
    undisturbed = train(make_job, flags, ranks=2)
    places = [(replica, rank) for replica in range(2) for rank in range(2)]
    gates = [
        {"name": "killed", "replica": replica, "rank": rank, "step": 6} for replica, rank in places
    ]
    job = make_job(
        groups=2, ranks=2, steps=STEPS, flags=flags, hooks={"gates": gates}, max_restarts=0
    )
    job.start()
    for replica in range(2):
        job.wait_for_gate("killed", replica, ranks=(0, 1))
    # Renamed to that; the event waits for the training thread.
    whole = job.paths.root / "checkpoint" / "step-4"
    job.wait_until(whole.exists, SECONDS, "the checkpoint is whole")
    for replica in range(2):
        job.send_signal(replica, signal.SIGKILL)
        job.wait_for_end(replica)
    for replica in range(2):
        job.start_again(replica)
    job.finish(SECONDS)
    events = job.events()
    assert {event["step"] for event in named(events, "checkpoint_loaded")} == {4}
    check_finished(job, events, STEPS)
    assert not named(events, "heal_started", "started_anew", "data_reset")
    assert digests(events) == undisturbed
