# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure what it costs to open a shuffled stream at a saved state: time, examples read again,
bytes of the state.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from benchmarks.run import progress
from titan_ft.host import streams

BUFFER_SIZES = (100, 1_000, 10_000)
PLACES = (1_000, 20_000, 250_000)
"""Examples that the stream had given when its state was saved."""
WORDS = 50
"""Of each example, about 300 bytes."""


def measure_reopenings(
    buffer_sizes: Sequence[int] = BUFFER_SIZES, places: Sequence[int] = PLACES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures for each size of the buffer at each place of the stream.

    The figures are: seconds until the first example, examples read for it, bytes of the state as
    JSON, and the stream's examples per second without a break.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "examples.jsonl"
        _write(path, max(places) + max(buffer_sizes) + 1)
        for size in buffer_sizes:
            for place in places:
                progress(f"a buffer of {size}, opened after {place} examples")
                yield f"{size}-{place}", measure(path, size, place)


def measure(path: Path, buffer_size: int, place: int) -> dict[str, Any]:
    """Open a stream of JSON lines at a place.

    Raises:
        AssertionError: the stream did not go on there.
    """
    streams.patch()
    num_read = 0

    def count(example: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_read
        num_read += 1
        return example

    def build() -> Any:
        stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        return stream.map(count).shuffle(seed=1, buffer_size=buffer_size)

    stream = build()
    examples = iter(stream)
    began = time.perf_counter()
    for _ in islice(examples, place):
        pass
    rate = place / (time.perf_counter() - began)
    state = stream.state_dict()
    expected = next(examples)
    again = build()
    num_read = 0
    began = time.perf_counter()
    again.load_state_dict(state)
    found = next(iter(again))
    seconds = time.perf_counter() - began
    assert found == expected, "a stream must go on where its state was saved"
    return {
        "buffer_size": buffer_size,
        "place": place,
        "seconds": seconds,
        "examples": num_read,
        "bytes": len(json.dumps(state)),
        "rate": rate,
    }


def _write(path: Path, number: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for each in range(number):
            text = f"{each} " + " ".join(str(each * word % 99_991) for word in range(WORDS))
            file.write(json.dumps({"text": text}) + "\n")
