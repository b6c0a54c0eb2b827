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

from titan_ft import device
from titan_ft.config import ConfigError, FaultTolerance

device.prepare()

import torchtitan.protocols.train_spec as train_spec  # noqa: E402  # after the seam
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402

from titan_ft.training import spec  # noqa: E402

FOUR_GROUPS = FaultTolerance(enable=True, group_size=4, replica_id=2)


def llama3(**changes: Any) -> train_spec.TrainSpec:
    return dataclasses.replace(train_spec.get_train_spec("llama3"), **changes)


def test_disabled_is_stock() -> None:
    """With enable = false only the CPU seam around parallelize is there."""
    stock = llama3()
    wrapped = spec.wrap(stock, FaultTolerance())
    differing = {f.name for f in dataclasses.fields(stock) if getattr(stock, f.name) is not getattr(wrapped, f.name)}
    assert differing == {"parallelize_fn"}


@pytest.mark.parametrize(("rank", "shard"), [(0, 4), (1, 5)])
def test_a_slot_reads_the_shards_that_hsdp_would_give_it(rank: int, shard: int) -> None:
    """Slot 2 of 4 with 2 data ranks reads shards 4 and 5 of 8."""
    asked = {}
    wrapped = spec.wrap(llama3(build_dataloader_fn=lambda **kwargs: asked.update(kwargs)), FOUR_GROUPS)
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


def test_expert_load_balancing_is_refused_by_name() -> None:
    """Its bias is updated from token counts that groups do not exchange."""
    model = torch.nn.ModuleDict({"moe": torch.nn.Identity()})
    model["moe"].load_balance_coeff = 1e-3  # type: ignore[assignment]
    wrapped = spec.wrap(llama3(parallelize_fn=lambda model, *_: model), FOUR_GROUPS)
    dims = SimpleNamespace(cp_enabled=False)
    with pytest.raises(ConfigError, match=r"moe\.load_balance_coeff must be 0 .* got 0\.001; .*None"):
        wrapped.parallelize_fn(model, dims, None)
    model["moe"].load_balance_coeff = None  # type: ignore[assignment]
    assert wrapped.parallelize_fn(model, dims, None) is model


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
        metrics.log(7, 1.0, 2.0, 3.0, {"lr": 0.1, "ft/participants": 3, "ft/exchange(s)": 0.0123456})
        metrics.log(8, 1.0, 2.0, 3.0)
    assert [args[0] for args in logged] == [7, 8]
    assert [record.message for record in caplog.records] == ["step:  7  ft/participants: 3  ft/exchange(s): 0.01235"]


def test_more_loader_workers_than_files_are_refused(tmp_path: Path) -> None:
    """A worker without a file would spin for ever in torchtitan's loop over the stream, and the others wait for it."""
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "It is a truth."}\n')
    data = datasets.load_dataset("json", data_files=f"{tmp_path}/*.jsonl", split="train", streaming=True)
    loader = SimpleNamespace(num_workers=2, worker_init_fn=None, dataset=SimpleNamespace(_data=data))
    wrapped = spec.wrap(llama3(build_dataloader_fn=lambda **kwargs: loader), FOUR_GROUPS)
    assert wrapped.build_dataloader_fn(dp_world_size=1, dp_rank=0) is loader
    loader.num_workers = 3
    with pytest.raises(ConfigError, match=r"num_workers must be <= .* \(2\), got 3"):
        wrapped.build_dataloader_fn(dp_world_size=1, dp_rank=0)
