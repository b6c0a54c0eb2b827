# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders for the agents."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from titan_ft.chaos.orders import Order


def test_an_order_is_one_line_with_all_an_agent_needs(tmp_path: Path) -> None:
    """The first order makes file and folder; a replica, rank or attempt that is left open is
    null.
    """
    path = tmp_path / "chaos" / "orders.jsonl"
    before = time.time()
    first = Order(
        fault="slow_rank", replica=2, rank=1, attempt=3, params={"factor": 3.0}, seed=7, shot=4
    )
    second = Order(fault="kill_donor", params={}, seed=8, shot=5)
    first.append_to(path)
    second.append_to(path)
    text = path.read_text()
    assert text.endswith("\n")
    orders = [json.loads(line) for line in text.splitlines()]
    assert before <= orders[0].pop("time") <= time.time()
    assert orders[0] == {
        "id": first.id, "fault": "slow_rank", "replica": 2, "rank": 1, "attempt": 3, "params": {"factor": 3.0},
        "seed": 7, "shot": 4,
    }  # fmt: skip
    assert [orders[1][name] for name in ("id", "replica", "rank", "attempt")] == [
        second.id,
        None,
        None,
        None,
    ]
    assert first.id != second.id
    int(first.id, 16)


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    """Orders of several writers at once are all whole."""
    path = tmp_path / "orders.jsonl"

    def write(writer: int) -> None:
        for shot in range(100):
            Order(
                fault="segfault", replica=writer, params={"padding": 1.0}, seed=writer, shot=shot
            ).append_to(path)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((order["replica"], order["shot"]) for order in orders) == [
        (w, s) for w in range(4) for s in range(100)
    ]


def test_an_order_cut_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that is cut short by a full disk is an error; the next order is complete."""
    path, write = tmp_path / "orders.jsonl", os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="took only a part of the order 'segfault'"):
            Order(fault="segfault", replica=0, params={}, seed=0, shot=0).append_to(path)
    Order(fault="deadlock", replica=0, params={}, seed=0, shot=1).append_to(path)
    (line,) = path.read_bytes().splitlines()
    assert msgspec.json.decode(line, type=Order).fault == "deadlock"
