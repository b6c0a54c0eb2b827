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
"""Pid of the parent, which the launcher and the agent give to their processes.

A parent may die between the start of a process and its first look at `os.getppid()`, which then
already returns another process.
"""


def exit_with_parent(
    poll_seconds: float = 0.5,
    *,
    before_exit: Callable[[], None] | None = None,
) -> threading.Thread:
    """Watch the parent from a daemon thread, and end this process when the parent is gone.

    Calls `before_exit` first. The exit status is 1. The parent is the process named by
    `TITAN_FT_PARENT_PID`, or else the present parent. The process ends without clean-up, because
    its supervisor is dead and its main thread may hang. If it leads a session, as all workers and
    all processes of the launcher do, it also ends its own children, such as data loader processes.
    """
    expected = int(os.environ.get(PARENT_PID_ENV, "0")) or os.getppid()
    # A stopped worker (SIGSTOP) runs no thread, and would keep its GPU. The signal wakes it. Other
    # processes ignore the signal.
    _signal_at_parents_end(signal.SIGCONT)

    def watch() -> None:
        while os.getppid() == expected:
            # Every worker has this thread. Without the retry, events would wait for the worker's
            # next event after the disk has room again, which a long step delays.
            retry_waiting()
            time.sleep(poll_seconds)
        try:
            if before_exit is not None:
                before_exit()
        finally:
            # The leader of a session has a process group with only its own children.
            if os.getsid(0) == os.getpid():
                os.killpg(os.getpgrp(), signal.SIGKILL)
            os._exit(1)

    thread = threading.Thread(target=watch, name="exit_with_parent", daemon=True)
    thread.start()
    return thread


def end_with_parent(before_exit: Callable[[], None] = lambda: None) -> None:
    """Do the same as `exit_with_parent`, but without a thread, which a fork would lose.

    Call this in the main thread only. On Linux, the kernel signals the end of the parent. On other
    systems a thread watches the parent.
    """
    if sys.platform != "linux":
        exit_with_parent(before_exit=before_exit)
        return
    expected = int(os.environ.get(PARENT_PID_ENV, "0")) or os.getppid()

    def look(signum: int = 0, frame: FrameType | None = None) -> None:
        if os.getppid() == expected:
            return  # Another process sent the signal.
        try:
            before_exit()
        finally:
            os._exit(1)

    signal.signal(signal.SIGRTMIN, look)
    if not _signal_at_parents_end(signal.SIGRTMIN):
        exit_with_parent(before_exit=before_exit)
    look()  # The parent may have ended before the signal was set up.


def _signal_at_parents_end(signum: int) -> bool:
    """Let the kernel signal this process, but not its forks, when its parent ends.

    Returns:
        False if the kernel cannot.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    set_pdeathsig = 1  # The number in linux/prctl.h.
    return bool(ctypes.CDLL(None).prctl(set_pdeathsig, int(signum), 0, 0, 0) == 0)
