# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The watchdog, in processes that hang in different ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

DEADLINE = 60.0  # seconds; only a bug reaches it

PREAMBLE = """
import sys, threading, time
from titan_ft.engine.watchdog import Watchdog
told = lambda: print("told", flush=True)
def say(text): print(text, flush=True)
def wait(): sys.stdin.readline()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code that imports the watchdog. The process ends with the test."""
    processes = []

    def start(code: str, **options: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREAMBLE + code]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]  # a plain dict
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_hang_is_explained_reported_and_ended(start: Start) -> None:
    """A training thread waits for ever.

    The log has all stacks and the field, the event is emitted, and the exit status is 1.
    """
    process = start("""
def stuck_in_a_lock(): threading.Lock().__enter__(); lock = threading.Lock(); lock.acquire(); lock.acquire()
def another_thread(): time.sleep(1000)
threading.Thread(target=another_thread, daemon=True).start()
Watchdog(0.5, told)
stuck_in_a_lock()
""")
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert output == "told\n"
    assert "stuck_in_a_lock" in errors
    assert "another_thread" in errors
    assert "hang_timeout_seconds" in errors.splitlines()[-1]


def test_final_calls_are_made_in_their_order(start: Start) -> None:
    """A final call may end the process, and must not cut off those before it."""
    process = start(
        """
import os
from titan_ft.engine.watchdog import end_process
end_process(3, lambda: (time.sleep(0.3), say("first")), lambda: say("second"), lambda: os._exit(4))
"""
    )
    said, _ = process.communicate(timeout=DEADLINE)
    assert said == "first\nsecond\n"
    assert process.returncode == 4


def test_final_calls_that_fail_do_not_hold_up_the_end(start: Start) -> None:
    """A final call that fails does not cut off the others. Nobody reads the full pipe of stderr."""
    receive, send = os.pipe()
    process = start(
        """
import os
from titan_ft.engine import watchdog
watchdog._FINAL_CALLS_SECONDS = 2.0
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096): pass
except BlockingIOError: pass
os.set_blocking(2, True)
watchdog.end_process(3, lambda: 1 / 0, lambda: say("second"))
""",
        stderr=send,
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE)
    finally:
        os.close(receive)
        os.close(send)
    assert said == "second\n"
    assert process.returncode == 3


@pytest.mark.slow
def test_nothing_holds_up_the_end(start: Start) -> None:
    """The process ends although the callback blocks, and nobody reads the full pipe of its
    stderr.
    """
    receive, send = os.pipe()
    process = start(
        """
import os
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096): pass
except BlockingIOError: pass
os.set_blocking(2, True)
Watchdog(0.5, lambda: time.sleep(1000))
print("full", flush=True)
os.write(2, b"stuck")
""",
        stderr=send,
    )
    os.close(send)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        assert process.wait(DEADLINE) == 1
    finally:
        os.close(receive)


def test_a_call_that_keeps_the_gil_is_ended(start: Start) -> None:
    """No Python thread runs any more.

    The stacks are in the log nevertheless, and the process ends.
    """
    process = start("""
import ctypes
watchdog = Watchdog(0.5, told)
def keeps_the_gil(): ctypes.PyDLL(None).sleep(1000)
keeps_the_gil()
""")
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "keeps_the_gil" in errors


@pytest.mark.slow
def test_beats_and_pauses_keep_it_alive(start: Start) -> None:
    """Slow progress is no hang, and neither is a long or nested pause.

    After a pause, the full time counts again.
    """
    process = start("""
watchdog = Watchdog(1.5, told)
for _ in range(6):
    time.sleep(0.4); watchdog.beat()
with watchdog.paused():
    with watchdog.paused(): time.sleep(0.1)
    time.sleep(2.5)
say("alive")
time.sleep(1000)
""")
    output, _ = process.communicate(timeout=DEADLINE)
    assert output == "alive\ntold\n"
    assert process.returncode == 1


def test_a_pause_does_not_count(start: Start) -> None:
    """A wait for other groups may take any time."""
    process = start("""
watchdog = Watchdog(0.5, told)
with watchdog.paused():
    time.sleep(1.1)
watchdog.close()
say("alive")
""")
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, "alive\n")


def test_off_or_closed_it_never_ends_anything(start: Start) -> None:
    """Zero seconds turn the watchdog off. After `close`, no timer is left either."""
    process = start(
        "Watchdog(0, told); w = Watchdog(0.2, told); w.close(); w.close(); time.sleep(0.5); say('alive')"
    )
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output, errors) == (0, "alive\n", "")


@pytest.mark.slow
def test_time_in_which_the_process_was_stopped_does_not_count(start: Start) -> None:
    """The process was stopped for longer than the timeout, and then continued."""
    process = start("""
watchdog = Watchdog(3.0, told)
threading.Thread(target=lambda: [(time.sleep(0.2), say("tick")) for _ in range(1000)], daemon=True).start()
wait()
watchdog.beat()
say("alive")
""")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "tick\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)  # longer than the timeout, and shorter than the backstop for the GIL
    os.kill(process.pid, signal.SIGCONT)
    # Its threads ran again for several ticks of the watchdog.
    ticks = [process.stdout.readline() for _ in range(3)]
    assert ticks == ["tick\n"] * 3
    output, _ = process.communicate("\n", timeout=DEADLINE)
    assert output.endswith("alive\n")
    assert process.returncode == 0
