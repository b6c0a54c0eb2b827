# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What does not divide is refused, with field, rule, value and remedy; what torchtitan can cut is
not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.config import ConfigError
from titan_ft.host import cpu

cpu.prepare()

from torchtitan.config.job_config import Parallelism  # noqa: E402  # after the seam
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from titan_ft.training.divisions import check_model, check_ranks  # noqa: E402


def config(
    name: str = "llama3",
    flavor: str = "8B",
    training: Any = None,
    validation: Any = None,
    **degrees: Any,
) -> Any:
    full = {
        name
        if name.startswith(("pipeline_parallel_", "expert_tensor"))
        else f"{name}_degree": value
        for name, value in degrees.items()
    }
    return SimpleNamespace(
        parallelism=Parallelism(**full),
        training=SimpleNamespace(
            **{"seq_len": 64, "local_batch_size": 4, "global_batch_size": -1, **(training or {})}
        ),
        validation=SimpleNamespace(
            **{
                "enable": validation is not None,
                "seq_len": 64,
                "local_batch_size": 4,
                **(validation or {}),
            }
        ),
        fault_tolerance=SimpleNamespace(group_size=2),
        model=SimpleNamespace(name=name, flavor=flavor),
    )


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (1, {}),
        (8, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        (8, {"data_parallel_shard": 4, "context_parallel": 2}),
        (8, {"expert_parallel": 8}),
        (8, {"expert_parallel": 4, "tensor_parallel": 2, "expert_tensor_parallel_degree": 2}),
        (4, {"training": {"global_batch_size": 64}}),
    ],
)
def test_what_divides_passes(ranks: int, asked: dict[str, Any]) -> None:
    check_ranks(config(**asked), ranks)


@pytest.mark.parametrize(
    ("ranks", "asked", "answer"),
    [
        (
            4,
            {"tensor_parallel": 3},
            r"ranks of a group must be a multiple of tensor_parallel_degree \(3\), got 4; ",
        ),
        (
            8,
            {"tensor_parallel": 2, "data_parallel_shard": 2},
            r"ranks of a group must be data_parallel_shard_degree \(2\) x tensor_parallel_degree \(2\), got 8; ",
        ),
        (2, {"data_parallel_shard": 1}, r"ranks of a group must be 1, got 2; "),
        (
            2,
            {"data_parallel_shard": 0},
            r"data_parallel_shard_degree must be >= 1, or -1 for .*, got 0; ",
        ),
        (2, {"tensor_parallel": 0}, r"tensor_parallel_degree must be >= 1, got 0; "),
        (
            4,
            {"context_parallel": 2, "training": {"seq_len": 66}},
            r"training\.seq_len must be a multiple of .*, got 66",
        ),
        (
            2,
            {
                "tensor_parallel": 2,
                "training": {"seq_len": 66},
            },  # torchtitan's models want an even part for each rank
            r"training\.seq_len must be a multiple of tensor_parallel_degree \(2\) x 2 x .* got 66",
        ),
        (
            6,
            {"expert_parallel": 4},
            r"expert_parallel_degree must divide the ranks .* = 6\), got 4; lower it",
        ),
        (
            8,
            {"expert_parallel": 2, "tensor_parallel": 4, "expert_tensor_parallel_degree": 2},
            r"expert_tensor_parallel_degree must be 1 or tensor_parallel_degree \(4\), got 2; ",
        ),
        (
            2,
            {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 3},
            r"local_batch_size must be a multiple of parallelism\.pipeline_parallel_microbatch_size \(3\), got 4; ",
        ),
        (
            2,
            {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 0},
            r"pipeline_parallel_microbatch_size must be >= 1, got 0; 1 is the default",
        ),
        (
            4,
            {"training": {"global_batch_size": 48}},
            r"global_batch_size must be a multiple of fault_tolerance\.group_size \(2\) x .* x 4 ranks .*, got 48",
        ),
    ],
)
def test_what_ranks_cannot_be_cut_into_is_refused(
    ranks: int, asked: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer):
        check_ranks(config(**asked), ranks)


@pytest.mark.parametrize(
    ("model", "asked", "answer"),
    [
        (
            "llama3 8B",
            {"tensor_parallel": 3},
            r"tensor_parallel_degree must divide the 32 attention heads .* 8B, got 3",
        ),
        (
            "llama3 8B",
            {"tensor_parallel": 16},
            r"must divide the 8 key-value heads of llama3 8B, got 16; lower it",
        ),
        (
            "llama3 8B",
            {"pipeline_parallel": 64},
            r"pipeline_parallel_degree must leave each of its 64 stages a layer",
        ),
        (
            "llama3 8B",
            {"pipeline_parallel": 32, "pipeline_parallel_schedule": "Interleaved1F1B"},
            r"must leave each of its 64 stages a layer of the 32 layers of llama3 8B \(and 2 for the ends\), got 32; ",
        ),
        (
            "llama3 8B",
            {"pipeline_parallel": 4, "pipeline_parallel_layers_per_stage": 5},
            r"layers_per_stage must cut the 32 layers .* into 4 stages for 1F1B, got 5; it makes 7; ",
        ),
        (
            "llama3 8B",
            {"pipeline_parallel": 2, "pipeline_parallel_schedule": "1B1F"},
            r"pipeline_parallel_schedule must be a schedule of torch, got '1B1F'",
        ),
        ("llama3 8B", {"context_parallel": 0}, r"context_parallel_degree must be >= 1, got 0; "),
        (
            "llama3 8B",
            {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 0},
            r"microbatch_size must be >= 1, got 0; ",
        ),
        (
            "llama3 8B",
            {"training": {"seq_len": 63}},
            r"training\.seq_len must be a multiple of .* got 63; ",
        ),
        (
            "llama3 8B",
            {"context_parallel": 2, "validation": {"seq_len": 66}},
            r"validation\.seq_len must be a multiple of .* got 66; ",
        ),
        (
            "llama3 8B",
            {"pipeline_parallel": 2, "validation": {"local_batch_size": 6}},
            r"validation\.local_batch_size must be a multiple of the 4 microbatches .* got 6; set it to training\.",
        ),
        (
            "llama3 8B",
            {
                "pipeline_parallel": 4,
                "pipeline_parallel_schedule": "ZBVZeroBubble",
                "pipeline_parallel_layers_per_stage": 3,
            },
            r"layers_per_stage must cut the 32 layers .* into 8 stages for ZBVZeroBubble, got 3; it makes 12; ",
        ),
        (
            "qwen3 30B-A3B",
            {"expert_parallel": 48},
            r"must divide the 128 experts of qwen3 30B-A3B, got 48; lower it",
        ),
        (
            "qwen3 0.6B",
            {"pipeline_parallel": 2},
            r"must be 1: torchtitan cannot cut qwen3 0\.6B into stages, got 2",
        ),
    ],
)
def test_what_a_model_cannot_be_cut_into_is_refused(
    model: str, asked: dict[str, Any], answer: str
) -> None:
    name, flavor = model.split()
    with pytest.raises(ConfigError, match=answer):
        check_model(config(name, flavor, **asked), get_train_spec(name))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("stages", [2, 4, 16, 32])
def test_a_pipeline_is_refused_where_torchtitan_refuses_it(stages: int, schedule: str) -> None:
    """The debug model has 6 layers and two ends."""
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    batch = {"local_batch_size": 64}  # enough for any schedule
    asked = config(
        flavor="debugmodel",
        training=batch,
        pipeline_parallel=stages,
        pipeline_parallel_schedule=schedule,
    )
    try:
        generate_llm_fqn_per_model_part(stages * (1 if schedule == "1F1B" else 2), 6)
    except ValueError:
        with pytest.raises(ConfigError):
            check_model(asked, get_train_spec("llama3"))
    else:
        check_model(asked, get_train_spec("llama3"))


SCHEDULES = [
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "ZBVZeroBubble",
    "DualPipeV",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", range(1, 10))
def test_microbatches_are_refused_where_torch_refuses_them(
    schedule: str, microbatches: int
) -> None:
    """In each rank, and in mid-start: `launch` would tell of an exception."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    ranks, schedule_class = 3, get_schedule_class(schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    parts = [
        SimpleNamespace(
            group=None,
            group_rank=0,
            group_size=ranks,
            stage_index=index,
            num_stages=ranks * (1 if single else 2),
            is_first=index == 0,
            is_last=False,
            stage_index_to_group_rank={},
            submod=None,
            has_backward=True,
        )
        for index in ((0,) if single else (0, 2 * ranks - 1))
    ]
    asked = config(
        training={"local_batch_size": 2 * microbatches},
        pipeline_parallel=ranks,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=2,
    )
    try:
        schedule_class(
            parts[0] if single else parts, microbatches, loss_fn=lambda *_: None, scale_grads=False
        )
    except ValueError:
        with pytest.raises(ConfigError, match=r"^training\.local_batch_size must make "):
            check_model(asked, get_train_spec("llama3"))
    else:
        check_model(asked, get_train_spec("llama3"))


def test_a_validation_without_parallelism_may_have_any_length() -> None:
    """torchtitan asserts the length of training's sequences only."""
    check_model(config(validation={"seq_len": 33, "local_batch_size": 3}), get_train_spec("llama3"))
