# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Register the packaged corpus with torchtitan's text datasets.

The corpus is small. It lets a run train on real text without a download.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from titan_ft.data import assets
from titan_ft.data.documents import read_text, split_documents

TRAIN = "austen"
STREAMED = "austen_streamed"
SHUFFLED = "austen_shuffled"
VALIDATION = "austen_validation"
KNOWN = {
    TRAIN: assets.TRAIN_TEXT,
    STREAMED: assets.TRAIN_TEXT,
    SHUFFLED: assets.TRAIN_TEXT,
    VALIDATION: assets.VALIDATION_TEXT,
}
"""Path of the text of each dataset."""
NUM_SHARDS = 16
"""Number of shards of a streamed text, as if it were that many files. The data ranks and the
workers of their loaders share the shards."""
BUFFER_SIZE = 100
"""Documents in the shuffle buffer of `austen_shuffled`."""


def register_datasets() -> None:
    """Add the packaged texts to torchtitan's ``DATASETS``, beside its own datasets.

    ``austen`` and ``austen_validation`` are in memory. ``austen_streamed`` is a stream, and
    ``austen_shuffled`` a stream with a shuffle buffer. ``training.dataset_path`` may name another
    text file (``.txt`` or ``.txt.gz``), which is cut into documents the same way.
    """
    # Import torchtitan here, because its import takes seconds. Importing this module is fast.
    from titan_ft.host.titan import DATASETS, DatasetConfig

    loaders = {STREAMED: _stream, SHUFFLED: _shuffle}
    for name, path in KNOWN.items():
        loader = loaders.get(name, load_documents)
        DATASETS[name] = DatasetConfig(path=str(path), loader=loader, sample_processor=_text)


def load_text(name: str, path: str | None) -> None:
    """Load the text of a packaged dataset into the cache of `_load`; ignore other datasets.

    The zygote calls this, so that the workers that it forks have the text already.

    Args:
        path: another text file to load instead.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if name in KNOWN:
        load_documents(path or str(KNOWN[name]))


def load_documents(path: str) -> Any:
    """Return the documents of a text file as a ``datasets.Dataset`` in memory.

    It needs no cache files and no locks. torchtitan can resume such a map-style dataset at the
    exact place, and splits it among the data ranks into contiguous parts.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"training.dataset_path must be an existing .txt or .txt.gz file, got {path!r}"
        )
    status = os.stat(path)
    return _load(path, status.st_mtime_ns, status.st_size)


# Cached, because a group has a loader for each slot. Forked workers inherit the cache.
@functools.lru_cache(maxsize=8)
def _load(path: str, modified_ns: int, size: int) -> Any:
    """Return the documents of a text file.

    Args:
        modified_ns, size: of the file. They are part of the cache's key, so that a changed file is
            loaded again.
    """
    import datasets

    return datasets.Dataset.from_dict({"text": list(split_documents(read_text(Path(path))))})


def _stream(path: str) -> Any:
    documents = load_documents(path)
    return documents.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(documents)))


def _shuffle(path: str) -> Any:
    return _stream(path).shuffle(seed=1, buffer_size=BUFFER_SIZE)


def _text(sample: dict[str, Any]) -> str:
    return str(sample["text"])
