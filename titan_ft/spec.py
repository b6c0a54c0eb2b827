# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Wraps a model's TrainSpec, so that any model of torchtitan trains with a replica dimension."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import torch
import torchtitan.protocols.train_spec as train_spec
from datasets import Dataset, IterableDataset
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger

from titan_ft import device
from titan_ft.config import ConfigError, FaultTolerance


class SlotLoaders:
    """Builds this rank's data loader of any slot, as torchtitan had its own built.

    Attributes:
        shard: this rank's part of a slot (its data rank in the group).
        num_shards: parts that a slot is cut into (the group's data-parallel degree).
    """

    def __init__(self, config: FaultTolerance) -> None:
        self.shard, self.num_shards = 0, 1
        self._config = config
        self._build: Callable[..., Any] | None = None
        self._first: Any = None

    def begin(self, build: Callable[..., Any], shard: int, num_shards: int) -> Any:
        """Build the loader of this group's own slot, for torchtitan; `build` takes dp_rank and dp_world_size."""
        self._build, self.shard, self.num_shards = build, shard, num_shards
        self._first = self._build_slot(self._config.replica_id)
        _check_workers(self._first)
        return self._first

    def open(self, slot: int) -> Any:
        """Return a loader of `slot` that nobody has read from."""
        first, self._first = self._first, None
        return first if first is not None and slot == self._config.replica_id else self._build_slot(slot)

    def _build_slot(self, slot: int) -> Any:
        # Slot r with in-group data rank i reads shard r * degree + i of group_size * degree, as torchtitan's HSDP does.
        assert self._build is not None, "torchtitan builds its loader first"
        loader = self._build(
            dp_world_size=self.num_shards * self._config.group_size, dp_rank=self.num_shards * slot + self.shard
        )
        if getattr(loader, "num_workers", 0) and loader.worker_init_fn is None:
            loader.worker_init_fn = _let_go_of_the_rank
        return loader


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

    def parallelize(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = device.adapt_model(spec.parallelize_fn(*args, **kwargs))
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


def _check_workers(loader: Any) -> None:
    """Tell of data that torchtitan does not share out among the loader's workers.

    Raises:
        ConfigError: a worker would find no file of its own and look for one for ever.
    """
    workers, data = getattr(loader, "num_workers", 0), getattr(getattr(loader, "dataset", None), "_data", None)
    if workers > 1 and isinstance(data, Dataset):
        logger.warning(
            f"training.dataloader.num_workers should be 0 or 1 for data in memory, got {workers}: torchtitan gives "
            "each worker all of it, so that every batch is trained as often; stream it instead"
        )
    elif workers > 1 and isinstance(data, IterableDataset) and workers > data.num_shards:
        raise ConfigError(
            "training.dataloader.num_workers must be <= the files of the stream for each data rank "
            f"({data.num_shards}), got {workers}; lower it, or cut the data into more files"
        )


def _let_go_of_the_rank(worker: int) -> None:
    """Make a forked data loader worker leave the rank's signals and connections alone."""
    # Slurm and Kubernetes signal all processes of a job: the group still reads batches to leave in order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The worker's copies of the rank's sockets would keep its connections open when the rank closes them or dies, so
    # that peers wait for it. Replaced, not closed: the numbers must not be used again under their owners' feet.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _inet_sockets():
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _inet_sockets() -> list[int]:
    """Return the descriptors of this process's network sockets; none where the system does not list them."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):  # no socket, or the listing's own descriptor
            probe = socket.socket(fileno=os.dup(int(name)))
            with probe:
                if probe.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(int(name))
    return found


def _refuse_load_balancing(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "load_balance_coeff", None):
            raise ConfigError(
                f"model: {name}.load_balance_coeff must be 0 with fault_tolerance.enable, got "
                f"{module.load_balance_coeff}; the experts' bias is not exchanged between replica groups yet: "
                "set load_balance_coeff to None"
            )
