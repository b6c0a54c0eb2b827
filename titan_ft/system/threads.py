# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Threads for single calls. The caller owns such a thread, and it ends with the call.

Threads that live longer are started by their owners. docs/patches.md lists these with their ends.
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
    """Make a call on a daemon thread, and return its future at once.

    A pool's thread would not do: the interpreter waits for a pool when it ends, and a call to
    torch's store or to the lighthouse may never return.

    Args:
        name: name of the thread.
    """
    outcome = Future[T]()
    threading.Thread(target=_call, args=(call, outcome), name=name, daemon=True).start()
    return outcome


def _call(call: Callable[[], T], outcome: Future[T]) -> None:
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001  # the future carries it
        # InvalidStateError: the caller has given the future another outcome.
        with contextlib.suppress(InvalidStateError):
            outcome.set_exception(error)
        # The error refers to this frame, and the frame to the future with the error. Without this
        # line the cycle would live until a garbage collection.
        del outcome
    else:
        with contextlib.suppress(InvalidStateError):
            outcome.set_result(answer)


def call_for_each(call: Callable[[S], T], items: Sequence[S], name: str, at_once: int) -> list[T]:
    """Make a call for each item, wait for all of them, and return their results in order.

    Args:
        name: prefix of the threads' names.
        at_once: number of calls that run at the same time.
    """
    if not items:
        return []
    with ThreadPoolExecutor(min(at_once, len(items)), name) as pool:
        return list(pool.map(call, items))


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Make a call on a thread of its own, and return its result or raise its error.

    After the limit the thread is abandoned. Use this for torch's stores: if the network to a store
    dies, the client waits without end, whatever timeout it has.

    Raises:
        TimeoutError: the call took longer than `seconds`.
    """
    outcome = call_aside(call, "titan_ft_within")
    try:
        outcome.exception(seconds)  # returns an error of the call; raises for this wait only
    except TimeoutError:
        raise TimeoutError(f"no answer for {seconds:g} s") from None
    try:
        return outcome.result(0)
    finally:
        # The error would refer to this frame, and the frame to the error: a cycle until a garbage
        # collection.
        del outcome
