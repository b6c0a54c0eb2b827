# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of replica groups is that of torchtitan's own data parallelism."""

from __future__ import annotations

import pytest
from harness.biases import check_biases
from harness.runs import FLOAT32_ULP, Runs, check_equal, column
from harness.trajectory import check_one_trajectory, named

ROUNDING = 1e-5
# torch adds up the squares of a large tensor in float32, with an error near 1e-4 for this model's
# embeddings; sharded tensors are smaller, and so is their error.
NORM_ROUNDING = 3e-4
EMPTY_BATCH = 3  # of group 1, see harness.mask


def experts(model: str, degree: int) -> list[str]:
    return [f"--model.name={model}", f"--parallelism.expert_parallel_degree={degree}"]


def test_two_groups_equal_stock_hsdp(runs: Runs) -> None:
    """2 groups x 2 ranks equal HSDP 2 x 2, bit for bit: gradient norm, largest loss, LR, tokens,
    final state.

    The logged mean loss is a sum of the same float32 losses. Stock adds them in float32, replica
    groups exactly.
    """
    check_equal(runs.groups(2, 2), runs.stock(4, replicate=2, shard=2))


def test_groups_in_bfloat16_stay_identical_and_near_fp32(runs: Runs) -> None:
    """With bfloat16, all groups hold the same bytes after each step, send half of the bytes, and
    learn as with fp32.
    """

    def train(name: str) -> tuple[list[float], int]:
        records = runs.groups(2, 1, [f"--fault_tolerance.exchange_dtype={name}"], name=name)
        assert runs.job is not None
        committed = named(runs.job.events(), "step_committed")
        check_one_trajectory(committed)
        losses = [column(ours, "loss") for ours in records.values()]
        assert losses[0] == losses[1]
        (sent,) = {event["wire_bytes"] for event in committed}
        return losses[0], sent

    (exact, full), (losses, sent) = train("float32"), train("bfloat16")
    assert losses[0] == exact[0]
    assert losses != exact, "it rounds"
    assert losses == pytest.approx(exact, rel=1e-3, abs=0)
    assert full / 2 <= sent < 0.51 * full


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_balanced"])
def test_experts_equal_stock_hsdp(runs: Runs, model: str, degree: int, checkpointing: str) -> None:
    """Load balancing, expert parallelism and recomputation (which counts tokens twice) equal stock,
    bit for bit.

    The biases are part of the state whose digest is compared.
    """
    flags = [*experts(model, degree), f"--activation_checkpoint.mode={checkpointing}"]
    check_equal(
        runs.groups(2, 2, flags, experts=True),
        runs.stock(4, replicate=2, shard=2, flags=flags, experts=True),
    )
    assert runs.job is not None
    check_biases(runs.job)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_of_one_rank_against_stock_fsdp(runs: Runs, groups: int) -> None:
    """N groups x 1 rank equal stock FSDP over N ranks up to rounding: sums have another order,
    norms are of shards.
    """
    ours = runs.groups(groups, dump=True)["0-0"]
    stock = runs.stock(groups, replicate=1, shard=groups, begin=str(runs.parameters("begin")))[0]
    for name in ("loss", "max_loss", "lr", "tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=ROUNDING, abs=0), name
    assert column(ours, "grad_norm") == pytest.approx(
        column(stock, "grad_norm"), rel=NORM_ROUNDING, abs=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_balanced"])
def test_experts_of_one_rank_against_stock_fsdp(runs: Runs, model: str) -> None:
    """2 groups x 1 rank equal stock FSDP over 2 ranks up to rounding, if rounding routes no token
    to another expert.
    """
    ours = runs.groups(2, flags=experts(model, 1), dump=True, experts=True)["0-0"]
    begin = str(runs.parameters("begin"))
    stock = runs.stock(2, replicate=1, shard=2, flags=experts(model, 1), begin=begin, experts=True)[
        0
    ]
    for name in ("loss", "max_loss", "lr", "tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=ROUNDING, abs=0), name
    assert column(ours, "grad_norm") == pytest.approx(
        column(stock, "grad_norm"), rel=NORM_ROUNDING, abs=0
    )


@pytest.mark.slow
def test_stock_ddp_averages_twice(runs: Runs) -> None:
    """torchtitan's DDP divides gradients by the number of ranks, although the loss is that of all
    ranks' tokens.

    Replica groups follow its FSDP and HSDP, which do not. The first step's gradients are exactly
    twice those of DDP.
    """
    ours, stock = runs.groups(2)["0-0"], runs.stock(2, replicate=2, shard=1)[0]
    assert ours[0]["loss"] == pytest.approx(stock[0]["loss"], rel=2 * FLOAT32_ULP, abs=0)
    assert ours[0]["grad_norm"] == 2 * stock[0]["grad_norm"]


@pytest.mark.parametrize(
    ("microbatches", "mask"),
    [
        (1, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_token_weighted_mean(runs: Runs, microbatches: int, mask: bool) -> None:
    """The update is the mean over all valid tokens, also with unequal groups and gradient
    accumulation.
    """
    flags = [f"--training.global_batch_size={2 * 2 * microbatches}"]
    ours = runs.groups(2, flags=flags, mask=mask, dump=True)["0-0"]
    oracle = runs.oracle(microbatches, mask)
    for name in ("loss", "grad_norm", "lr"):
        expected = [step[name] for step in oracle["steps"]]
        assert column(ours, name) == pytest.approx(expected, rel=ROUNDING, abs=0), name
    assert oracle["difference"] < 0.01 * oracle["change"]

    assert runs.job is not None
    events = runs.job.events()
    for event in named(events, "step_committed"):
        assert event["tokens"] == oracle["steps"][event["step"] - 1]["valid_tokens"]
        assert event["exchanges"] == 1
        assert event["forward_passes"] == microbatches
        empty = mask and microbatches == 1 and event["step"] - 1 == EMPTY_BATCH
        assert event["participants"] == ([0] if empty else [0, 1])
    # One exchange a step: each bucket and the row of facts travel once, whatever the number of
    # microbatches.
    (reductions,) = {
        event["reductions"] for event in named(events, "computed") if event["step"] > 1
    }
    assert 4 <= reductions <= 5


PIPELINE = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4")
NOT_QUICK = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "flags"),
    [
        ("1F1B", 2, 2, []),
        pytest.param("GPipe", 2, 1, [], **NOT_QUICK),
        pytest.param("Interleaved1F1B", 2, 2, [], **NOT_QUICK),  # two stages on each rank
        pytest.param("ZBVZeroBubble", 2, 2, [], **NOT_QUICK),  # the last stage is on rank 0
        pytest.param("InterleavedZeroBubble", 2, 1, [], **NOT_QUICK),
        pytest.param("LoopedBFS", 2, 1, [], **NOT_QUICK),
        pytest.param("1F1B", 4, 2, ["--parallelism.data_parallel_shard_degree=2"], **NOT_QUICK),
        pytest.param(
            "Interleaved1F1B", 4, 2, ["--parallelism.data_parallel_shard_degree=2"], **NOT_QUICK
        ),
        pytest.param(
            "ZBVZeroBubble", 4, 2, ["--parallelism.data_parallel_shard_degree=2"], **NOT_QUICK
        ),
        pytest.param("1F1B", 4, 1, ["--parallelism.tensor_parallel_degree=2"], **NOT_QUICK),
    ],
)
def test_a_pipeline_s_update_is_the_token_weighted_mean(
    runs: Runs, schedule: str, ranks: int, microbatches: int, flags: list[str]
) -> None:
    """Clipping and Adam get the mean's gradient, although torchtitan's pipelines compute the
    gradient of the sum.

    The loss is the mean as well, and all ranks know it.
    """
    shards = ranks // 2 if any("shard_degree" in flag for flag in flags) else 1
    batch = f"--training.global_batch_size={2 * 4 * shards * microbatches}"
    flags = [*PIPELINE, f"--parallelism.pipeline_parallel_schedule={schedule}", batch, *flags]
    records = runs.groups(2, ranks, flags=flags, mask=True, dump=True)
    oracle = runs.oracle(microbatches, mask=True, shards=shards, same_begin=True)
    for ours in records.values():
        for name in ("loss", "grad_norm", "lr"):
            expected = [step[name] for step in oracle["steps"]]
            assert column(ours, name) == pytest.approx(expected, rel=NORM_ROUNDING, abs=0), name
    assert oracle["difference"] < 0.01 * oracle["change"]
