# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the facts that a comparison with stock torchtitan needs and that runs do not write by
themselves.

Workers load this module as their `experimental.custom_import`, stock ones too. At its end each rank
writes to the run's folder the logged values in full precision and the digest of its state.

A stock job of one rank that accumulates gradients reads in each step the batches of as many groups
of one rank: a microbatch of each group's share of the data.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import torch.utils.deterministic
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.train import Trainer

from benchmarks.parity import Witness, witness_file
from titan_ft import device
from titan_ft.transfer.snapshot import TrainState

NUM_DIGESTS = 5
"""That the seconds of one are the median of."""

_logged: dict[int, tuple[float, float]] = {}


def _before(owner: type, name: str, act: Callable[..., None]) -> None:
    """Do something before a method, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _log(
    _: Any, step: int, loss: Any, max_loss: Any, grad_norm: Any, extra_metrics: Any = None
) -> None:
    _logged[step] = (float(loss), float(grad_norm))


def _begin(trainer: Any) -> None:
    if not trainer.job_config.fault_tolerance.enable and dist.get_world_size() == 1:
        trainer.dataloader = _deal(trainer, trainer.gradient_accumulation_steps)


def _deal(trainer: Any, num_shards: int) -> Any:
    """Return the batches of all shards of the data in turn."""
    shared = {"tokenizer": trainer.tokenizer, "job_config": trainer.job_config}
    build = trainer.train_spec.build_dataloader_fn
    shards = [
        build(dp_world_size=num_shards, dp_rank=shard, **shared) for shard in range(num_shards)
    ]
    return (batch for batches in zip(*shards, strict=True) for batch in batches)


def _end(trainer: Any) -> None:
    state = TrainState(trainer.model_parts, trainer.optimizers, trainer.lr_schedulers, None)  # type: ignore[arg-type]
    found, seconds = "", []
    for _ in range(NUM_DIGESTS):
        device.synchronize()
        started = time.perf_counter()
        found = state.digest()  # the host reads its sums, so that it is over when it returns
        seconds.append(time.perf_counter() - started)
    path = witness_file(
        Path(trainer.job_config.job.dump_folder), _replica(trainer), dist.get_rank()
    )
    path.write_text(json.dumps(asdict(Witness(_logged, found, median(seconds)))), encoding="utf-8")


def _replica(trainer: Any) -> int:
    config = trainer.job_config.fault_tolerance
    return int(config.replica_id) if config.enable else 0


# With deterministic kernels torch would write into all memory that it makes, on whatever stream is
# current there.
torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
_before(MetricsProcessor, "log", _log)
_before(Trainer, "train", _begin)
_before(Trainer, "close", _end)
