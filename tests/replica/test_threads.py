# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table in docs/patches.md has all threads of the engine. And the threads for single calls."""

from __future__ import annotations

import ast
import gc
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest

from titan_ft.system.threads import call_aside, call_for_each

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "transfer", "membership", "gradients", "engine")
STARTS = ("threading.Thread", "ThreadPoolExecutor", "threading.Timer")
DEADLINE = 10.0  # seconds; only a bug reaches it


def places_that_start_threads() -> Counter[str]:
    """Return the number of places that start a thread, for each file of the engine."""
    package = ROOT / "titan_ft"
    files = [
        *(path for room in ROOMS for path in (package / room).glob("*.py")),
        package / "system/threads.py",
    ]
    return Counter(
        str(path.relative_to(package))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS
    )


def test_every_thread_is_in_the_table_with_its_owner_and_its_end() -> None:
    """A thread that is not in the table may outlive its owner.

    Or it waits for a lock that another thread holds.
    """
    lines = (
        (ROOT / "docs/patches.md")
        .read_text()
        .split("\n## Threads\n")[1]
        .split("\n## ")[0]
        .splitlines()
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]
    assert all(len(row) == 4 and all(row) for row in rows)
    assert Counter(row[0].strip("`") for row in rows) == places_that_start_threads()


def test_a_call_aside_has_an_outcome() -> None:
    """The outcome is a result, an error, or a value that the caller has set meanwhile."""

    def fail() -> None:
        raise ValueError("no")

    assert call_aside(lambda: threading.current_thread().name, "aside").result(DEADLINE) == "aside"
    with pytest.raises(ValueError, match="no"):
        call_aside(fail, "aside").result(DEADLINE)
    go_on = threading.Event()
    given_up = call_aside(lambda: go_on.wait(DEADLINE), "aside")
    given_up.set_exception(TimeoutError("moved"))
    go_on.set()
    with pytest.raises(TimeoutError, match="moved"):
        given_up.result(DEADLINE)


def test_an_error_of_a_call_aside_holds_nothing() -> None:
    """Memory of a GPU that its frames refer to must not wait for a garbage collection."""

    class Block:
        """Stands in for memory."""

    blocks: list[weakref.ref[Block]] = []

    def fail() -> None:
        block = Block()
        blocks.append(weakref.ref(block))
        raise ValueError("no")

    gc.collect()
    gc.disable()
    try:
        outcome = call_aside(fail, "aside")
        assert isinstance(outcome.exception(DEADLINE), ValueError)
        del outcome
        end = time.monotonic() + DEADLINE
        while blocks[0]() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert blocks[0]() is None
    finally:
        gc.enable()


def test_calls_for_each_item_are_made_at_once_and_in_order() -> None:
    """A limited number of calls runs at a time.

    The caller gets the error of a call.
    """
    meet = threading.Barrier(3, timeout=DEADLINE)

    def double(item: int) -> int:
        meet.wait()
        return 2 * item

    assert call_for_each(double, [3, 1, 2], "each", 3) == [6, 2, 4]
    assert call_for_each(double, [], "each", 3) == []
    with pytest.raises(ZeroDivisionError):
        call_for_each(lambda item: 1 // item, [1, 0], "each", 2)
