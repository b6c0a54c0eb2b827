# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A wrapped TrainSpec adds the replica dimension and nothing else."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.host import cpu

cpu.prepare()

import torchtitan.protocols.train_spec as train_spec  # noqa: E402  # after the seam
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing  # noqa: E402
from torchtitan.config import Optimizer  # noqa: E402
from torchtitan.models.moe import MoE, MoEArgs  # noqa: E402

from titan_ft.training import spec  # noqa: E402

FOUR_GROUPS = FaultTolerance(enable=True, group_size=4, replica_id=2)


def llama3(**changes: Any) -> train_spec.TrainSpec:
    return dataclasses.replace(train_spec.get_train_spec("llama3"), **changes)


def test_disabled_is_stock() -> None:
    """With enable = false only the CPU seam around parallelize is there."""
    stock = llama3()
    wrapped = spec.wrap(stock, FaultTolerance())
    differing = {
        f.name
        for f in dataclasses.fields(stock)
        if getattr(stock, f.name) is not getattr(wrapped, f.name)
    }
    assert differing == {"parallelize_fn"}


@pytest.mark.parametrize(("rank", "shard"), [(0, 4), (1, 5)])
def test_a_slot_reads_the_shards_that_hsdp_would_give_it(rank: int, shard: int) -> None:
    """Slot 2 of 4 with 2 data ranks reads shards 4 and 5 of 8."""
    asked = {}
    wrapped = spec.wrap(
        llama3(build_dataloader_fn=lambda **kwargs: asked.update(kwargs)), FOUR_GROUPS
    )
    wrapped.build_dataloader_fn(dp_world_size=2, dp_rank=rank, tokenizer="t", job_config="c")
    assert asked == {"dp_world_size": 8, "dp_rank": shard, "tokenizer": "t", "job_config": "c"}


def test_register_wins_over_the_built_in_model_and_may_come_twice() -> None:
    """The second worker start in one process wraps again without an error."""
    try:
        spec.register("llama3", FOUR_GROUPS)
        first = train_spec.get_train_spec("llama3")
        spec.register("llama3", FaultTolerance())
        assert train_spec.get_train_spec("llama3") is not first
        assert first.build_metrics_processor_fn is not None
    finally:
        train_spec._extra_train_specs.pop("llama3", None)


def test_a_model_of_the_users_own_is_known_by_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchtitan's Trainer imports `experimental.custom_import`, which registers models; the
    wrapping comes before.
    """
    (tmp_path / "my_models.py").write_text(
        "from torchtitan.protocols import train_spec\n"
        "train_spec.register_train_spec('mine', train_spec.get_train_spec('llama3'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train_spec, "_extra_train_specs", {})
    spec.register("mine", FOUR_GROUPS, "my_models")
    assert train_spec.get_train_spec("mine").build_dataloader_fn is not llama3().build_dataloader_fn


class Block(torch.nn.Module):
    """A layer of a model, as torchtitan's load balancing looks for it."""

    def __init__(self, coeff: float | None) -> None:
        super().__init__()
        self.moe_enabled = True
        self.moe = MoE(
            MoEArgs(num_experts=4, num_shared_experts=0, load_balance_coeff=coeff),
            dim=8,
            hidden_dim=8,
        )


def experts(*coeffs: float | None) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict(
        {str(number): Block(coeff) for number, coeff in enumerate(coeffs)}
    )
    model.dense = torch.nn.Linear(2, 2)
    return cpu.adapt_model(model)


def test_token_counts_are_those_that_load_balancing_needs() -> None:
    """A layer without load balancing has unused counts; a layer without experts has none."""
    model = experts(1e-3, None, 1e-2)
    counts = spec.token_counts([model, torch.nn.Linear(2, 2)])
    layers = [model.get_submodule(f"layers.{number}.moe") for number in (0, 2)]
    assert [id(count) for count in counts] == [id(layer.tokens_per_expert) for layer in layers]


def test_load_balancing_moves_the_biases_by_the_counts_once() -> None:
    """torchtitan's own step of the optimizer reads the buffers that the exchange has written, and
    empties them.
    """
    model = experts(1e-3, 1e-3)
    dims: Any = SimpleNamespace(
        get_optional_mesh=lambda name: None, ep_enabled=False, pp_enabled=False
    )
    optimizers = build_optimizers_with_moe_load_balancing([model], Optimizer(), dims)
    first, second = spec.token_counts([model])
    first.copy_(torch.tensor([9.0, 1.0, 1.0, 1.0]))
    second.copy_(torch.tensor([1.0, 1.0, 1.0, 9.0]))
    for _ in range(2):  # the second step finds nothing left
        optimizers.step()
    for number, expected in ((0, [-1.5e-3, 5e-4, 5e-4, 5e-4]), (1, [5e-4, 5e-4, 5e-4, -1.5e-3])):
        bias = model.get_buffer(f"layers.{number}.moe.expert_bias")
        assert bias.tolist() == pytest.approx(expected)
    assert not any(count.any() for count in (first, second))


def test_a_metrics_processor_of_the_users_own_is_kept() -> None:
    """Only torchtitan's default is replaced."""
    own = SimpleNamespace()
    wrapped = spec.wrap(llama3(build_metrics_processor_fn=lambda *_: own), FOUR_GROUPS)
    assert wrapped.build_metrics_processor_fn is not None
    assert wrapped.build_metrics_processor_fn("config", "dims", "args") is own


def test_the_replica_dimension_is_on_the_console(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchtitan's line comes first, then one with what begins with ft/."""
    logged = []
    monkeypatch.setattr(MetricsProcessor, "log", lambda self, *args: logged.append(args))
    metrics = spec.ReplicaMetrics.__new__(spec.ReplicaMetrics)
    with caplog.at_level(logging.INFO):
        metrics.log(
            7, 1.0, 2.0, 3.0, {"lr": 0.1, "ft/participants": 3, "ft/exchange(s)": 0.0123456}
        )
        metrics.log(8, 1.0, 2.0, 3.0)
    assert [args[0] for args in logged] == [7, 8]
    assert [record.message for record in caplog.records] == [
        "step:  7  ft/participants: 3  ft/exchange(s): 0.01235"
    ]


def test_more_loader_workers_than_files_are_refused(tmp_path: Path) -> None:
    """A worker without a file would spin for ever in torchtitan's loop over the stream, and the
    others wait for it.
    """
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "It is a truth."}\n')
    data = datasets.load_dataset(
        "json", data_files=f"{tmp_path}/*.jsonl", split="train", streaming=True
    )
    loader = SimpleNamespace(
        num_workers=2, worker_init_fn=None, dataset=SimpleNamespace(_data=data)
    )
    wrapped = spec.wrap(llama3(build_dataloader_fn=lambda **kwargs: loader), FOUR_GROUPS)
    assert wrapped.build_dataloader_fn(dp_world_size=1, dp_rank=0) is loader
    loader.num_workers = 3
    with pytest.raises(ConfigError, match=r"num_workers must be <= .* \(2\), got 3"):
        wrapped.build_dataloader_fn(dp_world_size=1, dp_rank=0)
