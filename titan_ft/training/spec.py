# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Wraps a model's TrainSpec, so that any model of torchtitan trains with a replica dimension."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torchtitan.protocols.train_spec as train_spec
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_ft import device
from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.training.slot_loaders import SlotLoaders


def register(model_name: str, fault_tolerance: FaultTolerance) -> SlotLoaders:
    """Register the wrapped spec of `model_name`, which torchtitan's `get_train_spec` then prefers.

    A model that the user registered himself is wrapped as well.
    """
    loaders = SlotLoaders(fault_tolerance)
    # torchtitan's register_train_spec refuses a name twice; the table itself is what get_train_spec reads.
    train_spec._extra_train_specs[model_name] = wrap(train_spec.get_train_spec(model_name), fault_tolerance, loaders)
    return loaders


def wrap(
    spec: train_spec.TrainSpec, fault_tolerance: FaultTolerance, loaders: SlotLoaders | None = None
) -> train_spec.TrainSpec:
    """Return `spec` with what a replica group (and a CPU) needs; nothing of the groups if they are not enabled."""
    loaders = loaders or SlotLoaders(fault_tolerance)

    def parallelize(model: torch.nn.Module, parallel_dims: ParallelDims, job_config: Any) -> torch.nn.Module:
        model = device.adapt_model(spec.parallelize_fn(model, parallel_dims, job_config))
        if parallel_dims.cp_enabled:
            device.adapt_attention(model, job_config.parallelism.context_parallel_load_balancer)
        if fault_tolerance.enable:
            _refuse_load_balancing(model)
        return model

    wrapped = dataclasses.replace(spec, parallelize_fn=parallelize)
    if not fault_tolerance.enable:
        return wrapped

    def build_dataloader(*, dp_world_size: int, dp_rank: int, **kwargs: Any) -> Any:
        return loaders.begin(functools.partial(spec.build_dataloader_fn, **kwargs), dp_rank, dp_world_size)

    def build_metrics_processor(*args: Any, **kwargs: Any) -> MetricsProcessor:
        build = spec.build_metrics_processor_fn or ReplicaMetrics
        return build(*args, **kwargs)

    return dataclasses.replace(
        wrapped, build_dataloader_fn=build_dataloader, build_metrics_processor_fn=build_metrics_processor
    )


class ReplicaMetrics(MetricsProcessor):
    """torchtitan's metrics, with a line for the replica dimension on the console."""

    def __init__(self, job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None) -> None:
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
        ours = {key: value for key, value in (extra_metrics or {}).items() if key.startswith("ft/")}
        if ours:
            logger.info(f"step: {step:2}  " + "  ".join(f"{key}: {value:.4g}" for key, value in ours.items()))


def _refuse_load_balancing(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "load_balance_coeff", None):
            raise ConfigError(
                f"model: {name}.load_balance_coeff must be 0 with fault_tolerance.enable, got "
                f"{module.load_balance_coeff}; the experts' bias is not exchanged between replica groups yet: "
                "set load_balance_coeff to None"
            )
