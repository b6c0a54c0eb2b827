# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A fork request to a zygote yields a running child of the requester, or a fork that never runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titan_ft.launch.group import zygote as zygote_module
from titan_ft.launch.group.forks import ForkedProcess
from titan_ft.launch.group.zygote import Zygote

ROOT = Path(__file__).parents[2]
SUBJECT = """
import os, sys
if __name__ == "__main__":
    print(os.getpid(), os.getppid(), flush=True)
    print("an error", file=sys.stderr, flush=True)
"""


class Asker:
    """Requests forks of `SUBJECT` from a zygote of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "subject.py").write_text(SUBJECT)
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, *args: str) -> Zygote:
        """Start the zygote, and wait until it has checked its arguments."""

        def start(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
            self.processes.append(subprocess.Popen(command, env=self.env, pass_fds=[descriptor]))
            return self.processes[-1]

        zygote = Zygote(start, "subject", args)
        self.wait(zygote, lambda: zygote.checked)
        return zygote

    def begin_forks(self) -> Zygote:
        """Start the zygote, and wait until it can fork."""
        zygote = self.begin()
        with open(self.folder / "log", "wb") as log:
            zygote.proceed(log.fileno())
        self.wait(zygote, lambda: zygote.ready)
        assert not zygote.is_lost
        return zygote

    @staticmethod
    def wait(zygote: Zygote, condition: Callable[[], bool]) -> None:
        """Wait until the zygote has reached a state, or is lost."""
        deadline = time.monotonic() + 30.0
        while not (condition() or zygote.is_lost):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            zygote.poll()

    def fork(self, zygote: Zygote) -> ForkedProcess | None:
        with open(self.folder / "out", "ab") as out, open(self.folder / "errors", "ab") as errors:
            return zygote.fork(
                "subject", [], self.env, (out.fileno(), errors.fileno()), "titan-ft 7.0"
            )

    def printed(self) -> str:
        return (self.folder / "out").read_text()


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    made = Asker(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_fork_is_the_asker_s_child(asker: Asker) -> None:
    """The output goes to the given files. The fork outlives the zygote, and its parent waits for
    the fork as for any child.
    """
    zygote = asker.begin_forks()
    forks = [asker.fork(zygote) for _ in range(2)]
    zygote.close()
    assert [fork is not None and fork.wait(30.0) for fork in forks] == [0, 0]
    told = [line.split() for line in asker.printed().splitlines()]
    assert sorted(told) == sorted(
        [str(fork.pid), str(os.getpid())] for fork in forks if fork is not None
    )
    assert (asker.folder / "errors").read_text() == "an error\n" * 2
    assert asker.processes[0].wait(10.0) == -signal.SIGKILL
    assert asker.fork(zygote) is None


def test_it_stops_after_the_check(asker: Asker) -> None:
    """Until the zygote may proceed, it imports nothing more. From then on its output goes to the
    given log.
    """
    (asker.folder / "subject.py").write_text(
        "import sys\n"
        "def check(args): print('checked', args, flush=True)\n"
        "def preload(args): print('preloads', args, flush=True)\n"
    )
    zygote = asker.begin("--a=1")
    assert not zygote.is_lost
    assert not zygote.ready
    with open(asker.folder / "log", "wb") as log:
        zygote.proceed(log.fileno())
    asker.wait(zygote, lambda: zygote.ready)
    assert (asker.folder / "log").read_text() == "preloads ['--a=1']\n"


def test_a_mistake_ends_it(asker: Asker) -> None:
    """The requester gets the mistake in one line, whether it waits for the check or for the
    imports.
    """
    (asker.folder / "subject.py").write_text(
        "from titan_ft.config import ConfigError\n"
        "def check(args): raise ConfigError(f'must be \"new\", got {args[0]}')\n"
    )
    zygote = asker.begin("old")
    assert zygote.mistake == 'must be "new", got old'


def frozen(zygote: Zygote, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_module, "FORK_SECONDS", 0.3)
    os.kill(asker.processes[0].pid, signal.SIGSTOP)


def answer_lost(zygote: Zygote, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    read = zygote._read_line

    def read_and_lose() -> bytes:
        read()  # the fork is there, and nobody knows its pid
        raise ConnectionError("lost")

    monkeypatch.setattr(zygote, "_read_line", read_and_lose)


@pytest.mark.parametrize("lose", [frozen, answer_lost])
def test_a_fork_that_nobody_knows_of_never_runs(
    asker: Asker, monkeypatch: pytest.MonkeyPatch, lose: Callable[..., None]
) -> None:
    """The requester starts another process in its place, and a rank must not run twice."""
    zygote = asker.begin_forks()
    lose(zygote, asker, monkeypatch)
    assert asker.fork(zygote) is None
    assert zygote.loss_reason.startswith("the zygote did not answer")
    assert asker.processes[0].wait(10.0) == -signal.SIGKILL, "a frozen one would go on some day"
    time.sleep(0.5)
    assert asker.printed() == ""


def test_what_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    """The caller gets the error."""

    def start(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
        raise BlockingIOError("too many processes")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        Zygote(start, "subject", [])
    assert len(os.listdir("/proc/self/fd")) == before
