# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""End this process when its parent is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from titan_ft.run.appender import retry_waiting

PARENT_PID_ENV = "TITAN_FT_PARENT_PID"
"""Set by the launcher and the agent for what they start. It closes the gap between the start of a
process and its first look at its parent: a parent that died within it has already been replaced in
`os.getppid()`."""


def exit_with_parent(
    poll_seconds: float = 0.5,
    *,
    before_exit: Callable[[], None] | None = None,
) -> threading.Thread:
    """Watch the parent from a daemon thread; once it is gone, call `before_exit` and exit with
    status 1.

    The parent is the process named by `TITAN_FT_PARENT_PID`, or else the present parent. The
    process ends without clean-up, because its supervisor is dead and its main thread may hang. If
    it leads a session, as all workers and all processes of the launcher do, it also ends its own
    children (data loader processes).
    """
    expected = int(os.environ.get(PARENT_PID_ENV, "0")) or os.getppid()
    # A worker that is stopped (SIGSTOP) runs no thread: it would keep its GPU for as long as it is.
    # Others ignore it.
    _signal_at_parents_end(signal.SIGCONT)

    def watch() -> None:
        while os.getppid() == expected:
            # Here, for it is a thread that every worker has: on a disk that was full, the events of
            # a worker in a long step would wait for its next one.
            retry_waiting()
            time.sleep(poll_seconds)
        try:
            if before_exit is not None:
                before_exit()
        finally:
            # Then its process group holds only itself and what it started.
            if os.getsid(0) == os.getpid():
                os.killpg(os.getpgrp(), signal.SIGKILL)
            os._exit(1)

    thread = threading.Thread(target=watch, name="exit_with_parent", daemon=True)
    thread.start()
    return thread


def end_with_parent(before_exit: Callable[[], None] = lambda: None) -> None:
    """Like `exit_with_parent`, but without a thread, which a fork would lose. Call it in the main
    thread only.

    On Linux, the kernel signals the end of the parent. On other systems a thread watches the
    parent.
    """
    if sys.platform != "linux":
        exit_with_parent(before_exit=before_exit)
        return
    expected = int(os.environ.get(PARENT_PID_ENV, "0")) or os.getppid()

    def look(signum: int = 0, frame: FrameType | None = None) -> None:
        if os.getppid() == expected:
            return  # sent by somebody else
        try:
            before_exit()
        finally:
            os._exit(1)

    signal.signal(signal.SIGRTMIN, look)
    if not _signal_at_parents_end(signal.SIGRTMIN):
        exit_with_parent(before_exit=before_exit)
    look()  # it may have ended before


def _signal_at_parents_end(signum: int) -> bool:
    """Let the kernel signal this process, not its forks, when its parent ends; False if it
    cannot.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    set_pdeathsig = 1  # linux/prctl.h
    return bool(ctypes.CDLL(None).prctl(set_pdeathsig, int(signum), 0, 0, 0) == 0)
