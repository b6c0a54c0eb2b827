# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only reopening: what it measures, and its table."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import table
from benchmarks.reopening import measure, measure_reopenings


def test_what_is_read_again(tmp_path: Path) -> None:
    """Near the beginning all examples are read again, because the buffer fills; later a bounded
    number.
    """
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps({"text": str(each)}) + "\n" for each in range(3000)))
    early = measure(path, 10, 5)
    assert early["examples"] == 10 + 5 + 1
    late = [measure(path, 10, place)["examples"] for place in (1000, 2000)]
    assert all(10 < examples < 200 for examples in late)


def test_each_size_at_each_place_is_a_row() -> None:
    found = dict(measure_reopenings([5, 10], [20, 40]))
    assert list(found) == ["5-20", "5-40", "10-20", "10-40"]
    _, _, *rows = table._reopening_table(found)
    assert [row.split("|")[1].strip() for row in rows] == ["5", "5", "10", "10"]
    assert rows[0].split("|")[2].strip() == "20 examples"
