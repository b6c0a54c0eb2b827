# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""End this process when its training thread hangs: its heartbeats would go on, and the other groups would wait."""

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
_BACKSTOP = 2.0  # timeouts
_LAST_WORDS_SECONDS = 5.0


class Watchdog:
    """Ends this process after `seconds` without a beat of the training thread; it prints all threads' stacks first.

    Counts ticks of its own thread instead of reading a clock, so that time in which the whole process did not run
    (SIGSTOP, a suspended machine) is no hang. A call that keeps the GIL stops this thread as well; then faulthandler's
    timer, a C thread, ends the process after twice the time. That one reads a clock: a process that was stopped for
    so long ends when it is continued.

    Args:
        seconds: 0 never ends anything.
        on_hang: called before the end, from another thread; what it does must not matter to the end.
    """

    def __init__(self, seconds: float, on_hang: Callable[[], None]) -> None:
        self._seconds, self._on_hang = seconds, on_hang
        # The training thread writes these two and the watchdog's thread only reads them, so that no beat gets lost.
        self._beats = 0
        self._pauses = 0
        self._closed = threading.Event()
        if seconds > 0:
            self._thread = threading.Thread(target=self._watch, name="titan_ft_watchdog", daemon=True)
            self._thread.start()

    def beat(self) -> None:
        """Note that training makes progress; training thread only."""
        self._beats += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside, which others decide about; training thread only, may be nested."""
        self._pauses += 1
        try:
            yield
        finally:
            self._beats += 1
            self._pauses -= 1

    def close(self) -> None:
        """Watch no more; a second call does nothing."""
        self._closed.set()
        if self._seconds > 0:
            self._thread.join()

    def _watch(self) -> None:
        tick = self._seconds / _TICKS
        seen, idle = self._beats, 0
        while idle <= _TICKS:  # the first tick may have begun before the last beat
            faulthandler.dump_traceback_later(self._seconds * _BACKSTOP, exit=True, file=_STDERR)
            if self._closed.wait(tick):
                faulthandler.cancel_dump_traceback_later()
                return
            if self._pauses or self._beats != seen:
                seen, idle = self._beats, 0
            else:
                idle += 1
        end_process(1, self._explain, self._on_hang)

    def _explain(self) -> None:
        """Print the stacks, then what to do."""
        os.write(
            _STDERR,
            _stacks()
            + f"titan_ft: no progress of the training thread for {self._seconds:g} s: this worker ends, so that its "
            "group starts again; the stacks of its threads are above. If a step may take that long, raise "
            "fault_tolerance.hang_timeout_seconds\n".encode(),
        )


def end_process(status: int, *last_words: Callable[[], object]) -> NoReturn:
    """End this process without clean-up, whatever locks its threads hold.

    Args:
        last_words: called before, one after the other, each for its share of 5 seconds at most: any of them may block
            for good, on a lock that a stuck thread holds, a full pipe or a hung disk.
    """
    if status == 0:  # of a rank that was told to leave; else its group would be started again
        last_words = (mark_end_in_order, *last_words)
    try:
        for words in last_words:
            with contextlib.suppress(TimeoutError, OSError):  # stderr may be closed
                said = call_aside(partial(_say, words), "titan_ft_last_words")
                said.result(_LAST_WORDS_SECONDS / len(last_words))
    finally:
        os._exit(status)


def _say(words: Callable[[], object]) -> None:
    try:
        words()
    except Exception as error:  # noqa: BLE001  # nothing may keep the process from ending
        os.write(_STDERR, f"titan_ft: {first_line(error)}\n".encode())  # here: the pipe may be full, and block


def _stacks() -> bytes:
    """Return the stacks of all threads.

    faulthandler writes with the GIL held. Into a full pipe that nobody reads it would block this process for good, so
    that it writes to memory where there is such a file.
    """
    if not hasattr(os, "memfd_create"):
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        return b""
    with open(os.memfd_create("titan_ft_stacks"), "w+b", buffering=0) as memory:
        faulthandler.dump_traceback(file=memory, all_threads=True)
        memory.seek(0)
        return memory.read()
