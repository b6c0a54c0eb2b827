# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signals reach the right processes of this host, or none."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from titan_ft.chaos.processes import Processes, RunProcess, Unreachable

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start sleeping processes with these words in their command lines, and end each by its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*words: str) -> subprocess.Popen[bytes]:
        code = "import sys, time; print('up', flush=True); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def worker(process: subprocess.Popen[bytes], name: str = "rank 0 of group 1") -> RunProcess:
    return RunProcess(name, process.pid, Processes().host, mono=time.monotonic())


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_state(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 30
    while state(pid) not in wanted:
        assert time.monotonic() < deadline, f"{pid} is {state(pid)}, not one of {wanted}"
        time.sleep(0.01)


def send(target: RunProcess, signum: signal.Signals) -> None:
    reach = Processes().hold([target], [target])
    try:
        reach.send(signum)
    finally:
        reach.close()


def test_all_ranks_of_a_group_are_hit(start: Start) -> None:
    """SIGKILL reaches each process named, and no other of the run."""
    ranks = [start("titan_ft", str(rank)) for rank in range(3)]
    workers = [worker(process) for process in ranks[:2]]
    reach = Processes().hold(workers, workers)
    reach.send(signal.SIGKILL)
    reach.close()
    assert [process.wait(30) for process in ranks[:2]] == [-signal.SIGKILL] * 2
    assert ranks[2].poll() is None


def test_stop_and_continue(start: Start) -> None:
    """A process stopped through a reach continues through the same reach."""
    process = start("titan_ft")
    reach = Processes().hold([worker(process)], [])
    reach.send(signal.SIGSTOP)
    wait_state(process.pid, "T")
    reach.send(signal.SIGCONT)
    wait_state(process.pid, "S")
    reach.close()


def test_a_foreign_process_is_never_signalled(start: Start) -> None:
    """A pid that belongs to a process of something else is as good as gone."""
    process = start("another program")
    with pytest.raises(Unreachable, match="rank 0 of group 1 does not run any more"):
        send(worker(process), signal.SIGKILL)
    assert process.poll() is None


def test_a_reused_pid_is_never_signalled(start: Start) -> None:
    """A process younger than the worker's event is another process, even if it belongs to a run."""
    process = start("titan_ft")
    old = dataclasses.replace(worker(process), mono=time.monotonic() - 3600.0)
    with pytest.raises(Unreachable, match="does not run any more"):
        send(old, signal.SIGKILL)
    assert process.poll() is None
    # A history without it: the command line must do.
    send(dataclasses.replace(old, mono=None), signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_a_pid_reused_after_the_reach_is_never_signalled(start: Start) -> None:
    """A reach holds the process and not its number: after the process has ended nothing is hit."""
    process = start("titan_ft")
    reach = Processes().hold([worker(process)], [])
    process.kill()
    process.wait(30)
    with pytest.raises(Unreachable, match="ended just now"):
        reach.send(signal.SIGKILL)
    reach.close()


def test_a_zombie_and_a_pid_of_nobody_are_gone(start: Start) -> None:
    """Of several workers the live ones are hit; if none lives, the error says so."""
    alive, zombie = start("titan_ft"), start("titan_ft")
    nobody = start("titan_ft")
    gone = [worker(zombie), worker(nobody, "rank 1 of group 1")]
    nobody.kill()
    nobody.wait(30)
    zombie.kill()
    wait_state(zombie.pid, "Z")
    with pytest.raises(
        Unreachable, match="rank 0 of group 1, rank 1 of group 1 do not run any more"
    ) as caught:
        Processes().hold(gone, gone)
    assert not caught.value.final  # it may be back
    reach = Processes().hold([*gone, worker(alive)], [])
    reach.send(signal.SIGKILL)
    reach.close()
    assert alive.wait(30) == -signal.SIGKILL


def test_a_worker_of_another_host_is_refused(start: Start) -> None:
    """A pid of another host means nothing here; the reason names both hosts."""
    process = start("titan_ft")
    elsewhere = dataclasses.replace(worker(process), host="node7")
    with pytest.raises(Unreachable, match="runs on node7, not on") as caught:
        send(elsewhere, signal.SIGKILL)
    assert caught.value.final
    assert process.poll() is None
    assert not Processes().is_alive(elsewhere)
    assert Processes("node7").is_alive(elsewhere)


def test_close_lets_go(start: Start) -> None:
    """A reach keeps no descriptors open."""
    target = worker(start("titan_ft"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reach = Processes().hold([target, target], [])
        reach.close()
        reach.close()
    assert len(os.listdir("/proc/self/fd")) == before
