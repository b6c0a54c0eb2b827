# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The processor time of a job's processes, by /proc."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.processor import ENDED_THREADS, MAIN_THREAD, ProcessorClock, Seconds

# A parent that sleeps, with a child that works until it has taken two seconds: one in its main
# thread, one in a thread that ends.
PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
CHILD = """
import sys, threading, time
def work(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
input()
thread = threading.Thread(target=work, args=(1.0,))
thread.start()
thread.join()
work(1.0)
print("done", flush=True)
input()
"""


def test_a_rank_has_the_time_of_its_main_thread_and_of_threads_that_ended() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=pipe, stdout=pipe, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        clock = ProcessorClock([parent.pid])
        deadline = time.monotonic() + 60.0
        while len(clock.sample()) < 2:
            assert time.monotonic() < deadline, "the child does not start"
            time.sleep(0.1)
        begin = time.time()
        clock.sample()
        print(file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "done\n"
        clock.sample()
        found = clock.per_step(begin, time.time(), steps=2, num_ranks=1)
        print(file=parent.stdin, flush=True)
    # More only by the child's start, which may take a while before it reads.
    assert 1.0 - 0.05 <= found["user"] + found["system"] < 2.0
    assert found["threads"][MAIN_THREAD] >= 0.5 - 0.05
    assert found["threads"][ENDED_THREADS] >= 0.5 - 0.05
    assert found["others"] < 0.1


def test_a_moment_between_two_samples_has_its_share_of_what_was_taken_between_them() -> None:
    clock = ProcessorClock([1])
    for number, when in enumerate((0.0, 10.0, 20.0)):
        clock.add(when, {1: Seconds(2.0 * number, 1.0 * number, {MAIN_THREAD: 2.5 * number})})
    found = clock.per_step(5.0, 20.0, steps=3, num_ranks=1)
    assert found["user"] == pytest.approx(1.0)
    assert found["system"] == pytest.approx(0.5)
    assert found["threads"] == pytest.approx({MAIN_THREAD: 1.25, ENDED_THREADS: 0.25})
