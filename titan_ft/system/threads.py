# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Threads for single calls: their owner is the caller, and they end with the call.

Threads that go on for longer are started by their owners; docs/patches.md lists them, with the end of each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def call_aside(call: Callable[[], T], name: str) -> Future[T]:
    """Make a call on a thread of its own, and return at once.

    Not on a pool's thread: the interpreter waits for a pool when it ends, and a call to torch's store or to the
    lighthouse may never return.

    Args:
        name: of the thread.
    """
    outcome = Future[T]()
    threading.Thread(target=_call, args=(call, outcome), name=name, daemon=True).start()
    return outcome


def _call(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001  # the future carries it
        with contextlib.suppress(InvalidStateError):  # the caller has given the future another outcome
            outcome.set_exception(error)
        # The error holds this frame, and would hold itself by it until a garbage collection.
        del outcome
    else:
        with contextlib.suppress(InvalidStateError):
            outcome.set_result(answer)


def call_for_each(call: Callable[[S], T], items: Sequence[S], name: str, at_once: int) -> list[T]:
    """Make a call for each item, so many at a time, and wait for all of them; returns their results in order.

    Args:
        name: prefix of the threads' names.
    """
    if not items:
        return []
    with ThreadPoolExecutor(min(at_once, len(items)), name) as pool:
        return list(pool.map(call, items))
