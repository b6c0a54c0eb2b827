# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the data of a run again as an uninterrupted run would: `titan-ft check --reread`.

`titan-ft check` sees numbers of batches, and those come from the ledger. Only the data tell whether the
batch after a reopening was the one that follows. So each shard is read here from its beginning, by the
loader of the run's own config, and its checksums are compared with those in the events.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from titan_ft.config import read_flags
from titan_ft.history.record import RunRecord
from titan_ft.history.reread import Reread, Shard, collect, compare
from titan_ft.run.paths import RunPaths

_CONFIG_FLAG = "job.config_file"


def reread(record: RunRecord, run_dir: Path) -> Reread:
    """Read all data that a run has trained again, and compare them with its events.

    Raises:
        ConfigError: the config of the run cannot be read any more.
    """
    history = collect(record)
    result = Reread(unknown=list(history.unknown))
    builders: dict[int, Callable[[Shard], Any]] = {}
    for shard, trained in sorted(history.shards.items()):
        if shard.span not in builders:
            arguments = history.readers[shard.span].arguments
            builders[shard.span] = _prepare(_arguments_here(arguments or [], run_dir))
        last = max(each.first_batch + each.num_batches for each in trained)
        print(f"titan-ft: reading {last} batches of shard {shard.number} of {shard.of}", file=sys.stderr)
        loader = builders[shard.span](shard)
        compare(shard, trained, iter(loader), _extend, result)
        del loader  # its workers end with it
    return result


def _arguments_here(arguments: list[str], run_dir: Path) -> list[str]:
    """Return a worker's command line for a run whose folder may have been moved since."""
    config = RunPaths(run_dir).config
    recorded = dict(read_flags(arguments)).get(_CONFIG_FLAG, "")
    if os.path.exists(recorded) or not config.exists():
        return arguments
    return [*arguments, f"--{_CONFIG_FLAG}={config}"]


def _prepare(arguments: list[str]) -> Callable[[Shard], Any]:
    """Read a worker's config; return what builds the loader of a shard as the worker had it built."""
    from titan_ft.training.job_config import read_config

    job_config = read_config(*arguments)
    if job_config.training.global_batch_size > 0:  # counts all groups; a worker's loader was built for its own
        job_config.training.global_batch_size //= job_config.fault_tolerance.group_size
    from torchtitan.protocols.train_spec import get_train_spec

    from titan_ft.training.slot_loaders import SlotLoaders
    from titan_ft.training.spec import import_custom

    import_custom(job_config.experimental.custom_import)
    spec = get_train_spec(job_config.model.name)
    tokenizer = None if spec.build_tokenizer_fn is None else spec.build_tokenizer_fn(job_config)
    build = partial(spec.build_dataloader_fn, tokenizer=tokenizer, job_config=job_config)

    def build_shard(shard: Shard) -> Any:
        per_group = shard.of // job_config.fault_tolerance.group_size
        loaders = SlotLoaders(job_config.fault_tolerance)
        loaders.begin(build, shard.number % per_group, per_group)
        return loaders.open(shard.slot)

    return build_shard


def _extend(batch: Any, former: str) -> str:
    from titan_ft.replica.feed import checksum

    return checksum([batch], former)
