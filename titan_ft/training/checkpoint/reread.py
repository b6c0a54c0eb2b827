# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the data of a run again as an uninterrupted run would: `titan-ft check --reread`.

`titan-ft check` compares numbers of batches, which come from the ledger. Only the data show whether
the first batch after a reopening was the next one. So each shard is read here from its beginning,
by the loader of the run's own config, and its checksums are compared with the checksums in the
events.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_ft.history.batches.reread import Reread, Shard, collect, compare
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import WorkerStarted
from titan_ft.run.paths import RunPaths

_CONFIG_FLAG = "job.config_file"


def reread(record: RunRecord, run_dir: Path) -> Reread:
    """Read all data that a run has trained again, and compare them with its events.

    Raises:
        ConfigError: the config of the run can no longer be read.
    """
    history = collect(record)
    result = Reread(unknown=list(history.unknown))
    builders: dict[int, Callable[[Shard], Any] | None] = {}
    for shard, trained in sorted(history.shards.items()):
        if shard.span not in builders:
            builders[shard.span] = _prepare(history.readers[shard.span], run_dir, result)
        build = builders[shard.span]
        if build is None:
            continue
        last = max(each.first_batch + each.num_batches for each in trained)
        print(
            f"titan-ft: reading {last} batches of {shard.name}",
            file=sys.stderr,
        )
        loader = build(shard)
        compare(shard, trained, iter(loader), _extend, result)
        del loader  # Its workers end with it.
    return result


def _arguments_here(arguments: list[str], run_dir: Path) -> list[str]:
    """Return a worker's command line with the config in `run_dir`: the folder may have moved."""
    config = RunPaths(run_dir).config
    if not config.exists():
        return arguments
    kept = []
    places = iter(arguments)
    for argument in places:
        name, has_value, _ = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name.replace("-", "_") != _CONFIG_FLAG:
            kept.append(argument)
        elif not has_value:
            next(places, None)
    return [f"--{_CONFIG_FLAG}={config}", *kept]


def _prepare(
    started: WorkerStarted, run_dir: Path, result: Reread
) -> Callable[[Shard], Any] | None:
    """Read a worker's config; return a function that builds a shard's loader as the worker did.

    If the config has changed since, add the reason to `result` and return None.
    """
    from titan_ft.training.job_config import digest_config, read_config

    # A copy, because `read_config` caches its result.
    job_config = copy.deepcopy(read_config(*_arguments_here(started.arguments or [], run_dir)))
    if digest_config(job_config) != started.config_digest:
        # With another sequence length, for example, every batch would differ without any fault.
        result.unknown.append(
            f"the config has changed since group {started.replica}, attempt {started.attempt} read "
            "its data"
        )
        return None
    # The config counts all groups. A worker's loader was built for one group.
    if job_config.training.global_batch_size > 0:
        job_config.training.global_batch_size //= job_config.fault_tolerance.group_size
    from titan_ft.host.loader_workers import prepare_workers
    from titan_ft.host.titan import get_train_spec
    from titan_ft.training.slot_loaders import enough_documents

    spec = get_train_spec(job_config.model.name)
    tokenizer = None if spec.build_tokenizer_fn is None else spec.build_tokenizer_fn(job_config)

    def build_shard(shard: Shard) -> Any:
        with enough_documents("training.dataset", shard.num_shards):
            loader = spec.build_dataloader_fn(
                dp_world_size=shard.num_shards,
                dp_rank=shard.number,
                tokenizer=tokenizer,
                job_config=job_config,
            )
        prepare_workers(loader)
        return loader

    return build_shard


def _extend(batch: Any, former: str) -> str:
    from titan_ft.engine.feed import checksum

    return checksum([batch], former)
