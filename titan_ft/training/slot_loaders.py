# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Data loaders by slot: torchtitan's own loaders, for the data of any group's slot."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset, IterableDataset

from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.host.loader_workers import prepare_workers
from titan_ft.host.titan import logger
from titan_ft.run.events import LoaderChecked
from titan_ft.training.loader_check import check_loader


class SlotLoaders:
    """Builds this rank's data loader of any slot, in the way torchtitan built its own.

    The wrapped TrainSpec, the feed and the trainer call it, on the training thread.

    Attributes:
        shard: this rank's part of a slot (its data rank in the group).
        num_shards: parts of a slot (the group's data-parallel degree).
    """

    def __init__(self, config: FaultTolerance) -> None:
        self.shard = 0
        self.num_shards = 1
        self._config = config
        self._build: Callable[..., Any] | None = None
        # The unread loader that torchtitan has built; None after it was opened.
        self._first: Any = None

    def build_own(self, build: Callable[..., Any], shard: int, num_shards: int) -> Any:
        """Build the loader of this group's own slot, when torchtitan builds its loader.

        Args:
            build: builds a loader from dp_rank and dp_world_size.
            shard: this rank's data rank in the group.
            num_shards: data ranks of the group.

        Raises:
            ConfigError: the data have too few documents or files.
        """
        self._build = build
        self.shard = shard
        self.num_shards = num_shards
        self._first = self._build_slot(self._config.replica_id)
        _check_workers(self._first)
        return self._first

    def open(self, slot: int) -> Any:
        """Return an unread loader of `slot`."""
        first = self._first
        self._first = None
        if first is not None and slot == self._config.replica_id:
            return first
        return self._build_slot(slot)

    def check(self) -> LoaderChecked:
        """Check that this group's loader goes on exactly where its state was saved.

        Raises:
            ConfigError: the loader cannot save its state, or cannot load its own saved state.
        """
        return check_loader(functools.partial(self._build_slot, self._config.replica_id))

    def _build_slot(self, slot: int) -> Any:
        # Slot r with in-group data rank i reads shard r * degree + i of group_size * degree, as
        # torchtitan's HSDP does.
        assert self._build is not None, "torchtitan builds its loader first"
        num_shards = self.num_shards * self._config.group_size
        with enough_documents("training.dataset", num_shards):
            loader = self._build(
                dp_world_size=num_shards, dp_rank=self.num_shards * slot + self.shard
            )
        prepare_workers(loader)
        return loader


@contextlib.contextmanager
def enough_documents(field: str, num_shards: int) -> Iterator[None]:
    """Explain an error inside the block: a dataset in memory has too few documents for its shards.

    `datasets` raised "Index 1 out of range for dataset of size 1", at each start again.

    Args:
        field: field of the config that names the dataset.
        num_shards: shards of the dataset.

    Raises:
        ConfigError: there are more shards than documents.
    """
    try:
        yield
    except IndexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not frames[-1].filename.endswith("datasets/arrow_dataset.py"):
            raise  # The user's own code raised the error.
        raise ConfigError(
            f"{field} must have a document for each of the {num_shards} ranks that read data, got "
            f"fewer ({error}); take more data, or fewer ranks"
        ) from error


def _check_workers(loader: Any) -> None:
    """Report data that torchtitan does not divide among the loader's workers.

    Raises:
        ConfigError: a worker would get no file, and search for one without end.
    """
    workers = getattr(loader, "num_workers", 0)
    dataset = getattr(loader, "dataset", None)
    data = getattr(dataset, "_data", None)
    if workers > 1 and isinstance(data, Dataset):
        logger.warning(
            f"training.dataloader.num_workers should be 0 or 1 for data in memory, got {workers}: "
            "torchtitan gives each worker all of it, so that every batch is trained as often; "
            "stream it instead"
        )
    elif workers > 1 and isinstance(data, IterableDataset) and workers > data.num_shards:
        raise ConfigError(
            "training.dataloader.num_workers must be <= the files of the stream for each data rank "
            f"({data.num_shards}), got {workers}; lower it, or cut the data into more files"
        )
