# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Register the packaged corpus with torchtitan's text datasets."""

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
"""Where the text of each is."""
NUM_SHARDS = 16
"""That a stream of the text has, as if it lay in so many files: data ranks and their loaders' workers share them."""
BUFFER_SIZE = 100
"""Documents in the shuffle buffer of `austen_shuffled`."""


def register_datasets() -> None:
    """Add the packaged texts to torchtitan's ``DATASETS``; its own names stay as they are.

    ``austen`` is in memory, ``austen_streamed`` a stream, ``austen_shuffled`` a stream with a shuffle buffer,
    ``austen_validation`` another text in memory. ``training.dataset_path`` may name another text file (``.txt`` or
    ``.txt.gz``), which is cut the same way.
    """
    # Imported here: importing this module does no work, and torchtitan's import takes seconds.
    from titan_ft.host.titan import DATASETS, DatasetConfig

    loaders = {STREAMED: _stream, SHUFFLED: _shuffle}
    for name, path in KNOWN.items():
        loader = loaders.get(name, load_documents)
        DATASETS[name] = DatasetConfig(path=str(path), loader=loader, sample_processor=_text)


def load_text(name: str, path: str | None) -> None:
    """Load the text of one of these datasets, which is there then when it is asked for; of others nothing is known.

    Args:
        path: of another text file that takes its place.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if name in KNOWN:
        load_documents(path or str(KNOWN[name]))


def load_documents(path: str) -> Any:
    """Return the documents of a text file as a ``datasets.Dataset`` in memory: no cache files, no locks.

    It is a map-style dataset, for which torchtitan keeps the exact place of a stream and splits by node in
    contiguous, disjoint parts.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"training.dataset_path must be an existing .txt or .txt.gz file, got {path!r}")
    status = os.stat(path)
    return _load(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)  # each slot has a loader; and forks have it from the process that they are forks of
def _load(path: str, modified: int, size: int) -> Any:
    """Cut the text of a file as it is now, which the time of its last change and its size tell."""
    import datasets

    return datasets.Dataset.from_dict({"text": list(split_documents(read_text(Path(path))))})


def _stream(path: str) -> Any:
    documents = load_documents(path)
    return documents.to_iterable_dataset(num_shards=min(NUM_SHARDS, len(documents)))


def _shuffle(path: str) -> Any:
    return _stream(path).shuffle(seed=1, buffer_size=BUFFER_SIZE)


def _text(sample: dict[str, Any]) -> str:
    return str(sample["text"])
