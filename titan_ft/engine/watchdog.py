# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""End this process when its training thread hangs.

Otherwise its heartbeats would go on, and the other groups would wait for it. The training thread
*beats* when it makes progress, such as a forward. While it waits for others, the watchdog is
*paused*.

See docs/failures.md.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

from titan_ft.protocol.errors import first_line
from titan_ft.run.marks import mark_end_in_order
from titan_ft.system.threads import call_aside

_STDERR = 2  # the descriptor: sys.stderr may be replaced, or locked by the thread that hangs
_TICKS = 20  # per timeout
_BACKSTOP_TIMEOUTS = 2.0
"""faulthandler's timer ends the process after this many timeouts if this module's thread cannot."""
_FINAL_CALLS_SECONDS = 5.0


class Watchdog:
    """Ends this process after `seconds` without a beat of the training thread.

    It prints the stacks of all threads first. Its own thread counts ticks instead of reading a
    clock. So time in which the whole process did not run (SIGSTOP, a suspended machine) is no hang.

    A call that keeps the GIL stops the watchdog's thread as well. Then faulthandler's timer, a C
    thread, ends the process after twice the time. That timer reads a clock: a process that was
    stopped for this time ends when it continues.

    Args:
        seconds: time without a beat; 0 = never end the process.
        on_hang: called before the end, on another thread. The process ends even if it fails or
            blocks.
    """

    def __init__(self, seconds: float, on_hang: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_hang = on_hang
        # Only the training thread writes these two. With two writers, a beat could be lost.
        self._beats = 0
        self._pauses = 0
        self._closed = threading.Event()
        if seconds > 0:
            self._thread = threading.Thread(
                target=self._watch,
                name="titan_ft_watchdog",
                daemon=True,
            )
            self._thread.start()

    def beat(self) -> None:
        """Note that training makes progress. Training thread only."""
        self._beats += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time does not count. Training thread only; may be nested."""
        self._pauses += 1
        try:
            yield
        finally:
            self._beats += 1
            self._pauses -= 1

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._closed.set()
        if self._seconds > 0:
            self._thread.join()

    def _watch(self) -> None:
        tick = self._seconds / _TICKS
        seen_beats, idle_ticks = self._beats, 0
        # One tick more, because the first one may have begun before the last beat.
        while idle_ticks <= _TICKS:
            faulthandler.dump_traceback_later(
                self._seconds * _BACKSTOP_TIMEOUTS,
                exit=True,
                file=_STDERR,
            )
            if self._closed.wait(tick):
                faulthandler.cancel_dump_traceback_later()
                return
            if self._pauses or self._beats != seen_beats:
                seen_beats, idle_ticks = self._beats, 0
            else:
                idle_ticks += 1
        end_process(1, self._explain, self._on_hang)

    def _explain(self) -> None:
        """Print the stacks, then the remedy."""
        remedy = (
            f"titan_ft: no progress of the training thread for {self._seconds:g} s: this worker "
            "ends, so that its group starts again; the stacks of its threads are above. If a step "
            "may take that long, raise fault_tolerance.hang_timeout_seconds\n"
        )
        os.write(_STDERR, _stacks() + remedy.encode())


def end_process(status: int, *final_calls: Callable[[], object]) -> NoReturn:
    """End this process without clean-up, whatever locks its threads hold.

    Args:
        final_calls: called before the end, one after the other. Each gets an equal share of 5
            seconds: it may block for good, on a lock of a stuck thread, a full pipe or a hung disk.
    """
    if status == 0:
        # Without the mark, the agent would restart the group of a rank that leaves.
        final_calls = (mark_end_in_order, *final_calls)
    try:
        for call in final_calls:
            with contextlib.suppress(TimeoutError, OSError):  # OSError: stderr may be closed
                done = call_aside(partial(_call_and_print_error, call), "titan_ft_final_call")
                done.result(_FINAL_CALLS_SECONDS / len(final_calls))
    finally:
        os._exit(status)


def _call_and_print_error(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # an error must not keep the process from ending
        # On this thread, because a full pipe blocks it.
        os.write(_STDERR, f"titan_ft: {first_line(error)}\n".encode())


def _stacks() -> bytes:
    """Return the stacks of all threads.

    faulthandler writes with the GIL held. It would block this process for good at a full pipe that
    nobody reads. So it writes to a file in memory, if the system has such files.
    """
    if not hasattr(os, "memfd_create"):
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        return b""
    with open(os.memfd_create("titan_ft_stacks"), "w+b", buffering=0) as memory:
        faulthandler.dump_traceback(file=memory, all_threads=True)
        memory.seek(0)
        return memory.read()
