# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What `launch --dry-run` predicts is what a rank then holds and moves."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.protocol.member import Member, Quorum
from titan_ft.training.job_config import read_config

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_debug.toml"
# Prepares the device, before torchtitan is imported.
config = read_config(f"--job.config_file={CONFIG}")

import torch.distributed as dist  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.models.llama3 import Transformer, llama3_args  # noqa: E402

from benchmarks.member_facts import exchange_with  # noqa: E402
from titan_ft.gradients.exchange import GradientExchange  # noqa: E402
from titan_ft.training.sizes import measure  # noqa: E402
from titan_ft.transfer.snapshot import TrainState  # noqa: E402


class Wire:
    """Stands in for a Membership of two groups; notes what is handed to the process group to
    sum.
    """

    timeout = timedelta(seconds=1)

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.process_group = self

    def await_quorum(self) -> Quorum:
        return Quorum(
            "1/test", 0, tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in (0, 1)), max_step=0
        )

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.sent += [tensor.numel() * tensor.element_size() for tensor in tensors]
        return SimpleNamespace(wait=lambda: None)

    def alltoall_base(self, received: torch.Tensor, given: torch.Tensor, *_: Any) -> Any:
        received.copy_(given)
        return SimpleNamespace(wait=lambda: None)

    def errored(self) -> None:
        return None


def test_a_rank_holds_and_moves_what_was_predicted() -> None:
    """Parameters, gradients, optimizer, the copy of the state, and the exchange's buckets, byte for
    byte.
    """
    predicted = measure(config, num_ranks=1).largest
    torch.manual_seed(0)
    model = Transformer(llama3_args["debugmodel"])
    wire = Wire()
    exchange = GradientExchange(
        model.parameters(),
        wire,  # type: ignore[arg-type]  # stands in for it
        bucket_bytes=int(config.fault_tolerance.bucket_size_mb * 2**20),
        where=torch.device("cpu"),
        overlap=False,
    )
    optimizers = build_optimizers([model], config.optimizer, None)
    tokens = torch.zeros((1, 8), dtype=torch.long)
    model(tokens).sum().backward()
    exchange_with(exchange, lambda quorum: ([0.0], b""))
    optimizers.step()

    def held(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert predicted.parameters == held(model.parameters())
    assert predicted.gradients == held(parameter.grad for parameter in model.parameters())
    (optimizer,) = optimizers
    assert predicted.optimizer == held(
        value for state in optimizer.state.values() for value in state.values()
    )
    schedulers = counters = SimpleNamespace(state_dict=dict)
    assert (
        predicted.state
        == TrainState([model], optimizers, schedulers, counters).copy(1, 1).payload.numel()
    )
    assert predicted.exchange == predicted.sent == sum(wire.sent)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("method", "momentum"), [("diloco", 1), ("local_sgd", 0)])
def test_a_rank_of_a_semi_synchronous_job_holds_and_moves_what_was_predicted(
    method: str, momentum: int
) -> None:
    """Beside what a synchronous one holds: anchors in fp32 and the outer momentum, in the state of
    a heal as well.
    """
    plain = measure(config, num_ranks=1).largest
    needs = (
        f"--fault_tolerance.semi_sync_method={method}",
        "--fault_tolerance.hang_timeout_seconds=60",
    )
    predicted = measure(read_config(f"--job.config_file={CONFIG}", *needs), num_ranks=1).largest
    assert (predicted.parameters, predicted.gradients, predicted.optimizer, predicted.exchange) == (
        plain.parameters,
        plain.gradients,
        plain.optimizer,
        plain.exchange,
    )
    assert (predicted.anchors, predicted.momentum) == (plain.gradients, momentum * plain.gradients)
    torch.manual_seed(0)
    model = Transformer(llama3_args["debugmodel"])
    anchors = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    outer = torch.optim.SGD(anchors, momentum=0.9 * momentum)
    optimizers = build_optimizers([model], config.optimizer, None)
    for parameter in [*model.parameters(), *anchors]:
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    outer.step()
    schedulers = counters = SimpleNamespace(state_dict=dict)
    state = TrainState([model], [outer, *optimizers], schedulers, counters)
    assert predicted.state == state.copy(1, 1).payload.numel()


def test_anchors_are_fp32_whatever_the_weights_are() -> None:
    """With weights in bfloat16 the anchors, their momentum and what travels are as large as
    ever.
    """
    needs = (
        "--fault_tolerance.semi_sync_method=diloco",
        "--fault_tolerance.hang_timeout_seconds=60",
    )
    config = read_config(f"--job.config_file={CONFIG}", *needs)
    full = measure(config, num_ranks=1).largest
    config.training.dtype = (
        "bfloat16"  # which is refused, but a user's own model may have such weights
    )
    half = measure(config, num_ranks=1).largest
    assert 2 * half.parameters == full.parameters
    assert (half.anchors, half.momentum, half.exchange) == (
        full.anchors,
        full.momentum,
        full.exchange,
    )
    assert half.state - half.anchors - half.momentum == pytest.approx(half.optimizer, rel=1e-3)


def test_shards_add_up_to_the_model() -> None:
    """Of two ranks each holds half; of two stages with two ranks each, all four together the model
    once.
    """
    whole = measure(config, num_ranks=1).largest
    half = measure(config, num_ranks=2).largest
    assert (2 * half.parameters, 2 * half.gradients) == (whole.parameters, whole.gradients)
    cut = read_config(f"--job.config_file={CONFIG}", "--parallelism.pipeline_parallel_degree=2")
    stages = measure(cut, num_ranks=4).stages
    assert len(stages) == 2
    assert 2 * sum(stage.parameters for stage in stages) == whole.parameters


def test_a_batch_of_all_groups_is_accumulated() -> None:
    """Of 24 sequences in all each of 2 groups makes 12, on 2 ranks of 2 at a time: 3
    microbatches.
    """
    given = read_config(
        f"--job.config_file={CONFIG}", "--fault_tolerance.enable", "--training.global_batch_size=24"
    )
    assert measure(given, num_ranks=2).accumulation == 3
    assert measure(config, num_ranks=2).accumulation == 1
