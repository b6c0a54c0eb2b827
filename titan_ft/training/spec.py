# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Wraps a model's TrainSpec, so that any model of torchtitan trains with a replica dimension."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from titan_ft.config import FaultTolerance
from titan_ft.host import cpu
from titan_ft.host.titan import (
    TOKEN_COUNTS,
    MetricsProcessor,
    ParallelDims,
    TrainSpec,
    adapt_attention,
    get_train_spec,
    logger,
    register_spec,
)
from titan_ft.training.custom_import import import_custom
from titan_ft.training.slot_loaders import SlotLoaders, enough_documents


def register(
    model_name: str, fault_tolerance: FaultTolerance, custom_import: str = ""
) -> SlotLoaders:
    """Register the wrapped spec of `model_name`, which torchtitan's `get_train_spec` then prefers.

    A model that the user registered is wrapped as well.

    Args:
        custom_import: module that registers the model (`experimental.custom_import`). torchtitan's
            Trainer imports the module, too, but looks the model up right after that.
    """
    import_custom(custom_import)
    loaders = SlotLoaders(fault_tolerance)
    register_spec(model_name, wrap(get_train_spec(model_name), fault_tolerance, loaders))
    return loaders


def wrap(
    spec: TrainSpec, fault_tolerance: FaultTolerance, loaders: SlotLoaders | None = None
) -> TrainSpec:
    """Return `spec` with the additions for a CPU and, with `enable = true`, for a replica group."""
    loaders = loaders or SlotLoaders(fault_tolerance)

    def parallelize(
        model: torch.nn.Module, parallel_dims: ParallelDims, job_config: Any
    ) -> torch.nn.Module:
        model = cpu.adapt_model(spec.parallelize_fn(model, parallel_dims, job_config))
        if parallel_dims.cp_enabled:
            adapt_attention(model, job_config.parallelism.context_parallel_load_balancer)
        return model

    wrapped = dataclasses.replace(spec, parallelize_fn=parallelize)
    if not fault_tolerance.enable:
        return wrapped

    def build_dataloader(*, dp_world_size: int, dp_rank: int, **kwargs: Any) -> Any:
        return loaders.build_own(
            functools.partial(spec.build_dataloader_fn, **kwargs), dp_rank, dp_world_size
        )

    def build_metrics_processor(*args: Any, **kwargs: Any) -> MetricsProcessor:
        build = spec.build_metrics_processor_fn or ReplicaMetrics
        return build(*args, **kwargs)

    def build_validator(*, dp_world_size: int, **kwargs: Any) -> Any:
        assert spec.build_validator_fn is not None, "the config was refused"
        with enough_documents("validation.dataset", dp_world_size):
            return spec.build_validator_fn(dp_world_size=dp_world_size, **kwargs)

    return dataclasses.replace(
        wrapped,
        build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=build_metrics_processor,
        build_validator_fn=spec.build_validator_fn and build_validator,
    )


class ReplicaMetrics(MetricsProcessor):
    """torchtitan's metrics, with a line for the replica dimension on the console."""

    def __init__(
        self, job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None
    ) -> None:
        super().__init__(job_config, parallel_dims, tag)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log as torchtitan does; `ft/...` entries of `extra_metrics` also go to the console."""
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        entries = []
        for key, value in (extra_metrics or {}).items():
            if key.startswith("ft/"):
                entries.append(f"{key}: {value:.4g}")
        if entries:
            logger.info(f"step: {step:2}  {'  '.join(entries)}")


def token_counts(model_parts: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the buffers that count each expert's tokens, if the model balances its experts' load.

    Before each step of the optimizer, torchtitan's load balancing
    (`build_optimizers_with_moe_load_balancing`) sums the buffers over the ranks of a group, moves
    the experts' biases by them, and sets them to zero.
    """
    counts = []
    for part in model_parts:
        for module in part.modules():
            balances = getattr(module, "load_balance_coeff", None)
            if balances and TOKEN_COUNTS in module._buffers:
                counts.append(module.get_buffer(TOKEN_COUNTS))
    return counts
