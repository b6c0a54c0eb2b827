# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixtures of experts: load balancing over all groups, expert parallelism inside a group, and
failures of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.biases import check_biases, read_counts
from harness.job import Job
from harness.trajectory import by_process, check, check_killed, named

STEP = 4
TOP_K = {"deepseek_v3": 3, "qwen3_balanced": 2}  # experts of a token
TOKENS = 2 * 32  # of a rank's microbatch
SHARDED = [("deepseek_v3", 1), ("deepseek_v3", 2), ("qwen3_balanced", 1), ("qwen3_balanced", 2)]


def flags(model: str, degree: int = 1, *more: str) -> list[str]:
    return [f"--model.name={model}", f"--parallelism.expert_parallel_degree={degree}", *more]


@pytest.mark.parametrize(
    ("model", "ranks", "degree"),
    [
        ("deepseek_v3", 1, 1),
        *(pytest.param(model, 2, degree, marks=pytest.mark.slow) for model, degree in SHARDED),
    ],
)
def test_a_healed_group_balances_as_its_peers_do(
    make_job: Callable[..., Job], model: str, ranks: int, degree: int
) -> None:
    """Biases heal, and follow the tokens of the participants. A joiner's warm-up and void step do
    not move them.
    """
    faults = [{"replica": 1, "point": "backward", "step": STEP, "rank": ranks - 1}]
    hooks = {"faults": faults, "hold": 2, "experts": True}
    job = make_job(groups=2, ranks=ranks, steps=14, hooks=hooks, flags=flags(model, degree))
    job.run()
    events = check(job, survivors=[0])  # digests too, which the biases are part of
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    assert all(event["replayed"] > 0 for event in named(events, "heal_finished"))
    check_biases(job)
    updates = read_counts(job, 0)
    made = [
        event
        for event in named(events, "step_committed")
        if (event["replica"], event["rank"]) == (0, 0)
    ]
    assert {len(event["participants"]) for event in made} == {1, 2}
    each = TOKENS * TOP_K[model]
    assert [set(update) for update in updates] == [
        {each * len(event["participants"])} for event in made
    ]
    replayed = max(
        event["replayed"] for event in named(events, "heal_finished") if event["rank"] == 0
    )
    again = read_counts(job, 1)[STEP - 1 :]
    assert len(again) > replayed
    assert again == updates[-len(again) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "passes"), [("none", (1, 1)), ("full", (2, 2)), ("selective", (1, 2))]
)
def test_tokens_are_added_up_once(
    make_job: Callable[..., Job], checkpointing: str, passes: tuple[int, ...]
) -> None:
    """All microbatches count, and validation does not. Recomputation counts again, which torchtitan
    corrects.

    Args:
        passes: forward passes of each layer; the config's selective mode recomputes every second
            layer.
    """
    settings = [
        "--training.global_batch_size=8",
        "--validation.enable",
        "--validation.freq=2",
        "--validation.steps=1",
        "--validation.seq_len=32",
        f"--activation_checkpoint.mode={checkpointing}",
    ]
    job = make_job(
        groups=2, steps=6, hooks={"experts": True}, flags=flags("qwen3_balanced", 1, *settings)
    )
    job.run()
    check(job, survivors=[0, 1])
    assert job.output(0).count("validate step") == 4  # torchtitan validates after step 1 as well
    once = 2.0 * 2 * TOKENS * TOP_K["qwen3_balanced"]
    assert read_counts(job, 0) == read_counts(job, 1) == [[once * number for number in passes]] * 6
    check_biases(job)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3"])
def test_without_load_balancing_nothing_is_counted(
    make_job: Callable[..., Job], model: str, degree: int
) -> None:
    """Experts in parallel train and heal without it too."""
    hooks = {
        "faults": [{"replica": 1, "point": "backward", "step": STEP}],
        "hold": 2,
        "experts": True,
    }
    unbalanced = flags(model, degree, "--model.flavor=tiny_unbalanced")
    job = make_job(groups=2, ranks=2, steps=12, hooks=hooks, flags=unbalanced)
    job.run()
    check(job, survivors=[0])
    check_biases(job, balanced=False)
    assert read_counts(job, 0) == [[]] * 12


@pytest.mark.slow
@pytest.mark.parametrize(("model", "degree"), SHARDED)
def test_a_resumed_run_is_the_run_that_never_stopped(
    make_job: Callable[..., Job], tmp_path: Path, model: str, degree: int
) -> None:
    """After the death of all groups, the state with its biases continues from the checkpoint to the
    same bytes.
    """
    steps, interval = 9, 5
    straight = make_job(
        groups=2, ranks=2, steps=steps, hooks={"experts": True}, flags=flags(model, degree)
    )
    straight.run()
    expected = named(check(straight, survivors=[0, 1]), "training_finished")
    saving = [
        f"--checkpoint.folder={tmp_path / 'checkpoints'}",
        f"--checkpoint.interval={interval}",
    ]
    job = make_job(
        groups=2,
        ranks=2,
        steps=steps,
        hooks={
            "faults": [{"replica": replica, "point": "backward", "step": 7} for replica in (0, 1)],
            "experts": True,
        },
        flags=flags(model, degree, "--checkpoint.enable", *saving),
    )
    job.run()
    events = job.events()
    for own in by_process([event for event in events if event["attempt"] == 1]).values():
        assert [event["step"] for event in named(own, "checkpoint_loaded")] == [interval]
    finished = named(events, "training_finished")
    assert {(e["rank"], e["digest"]) for e in finished} == {
        (e["rank"], e["digest"]) for e in expected
    }
    check_biases(job)
