# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and scheduling for all tests."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# No question to a name server, here or in a process that a test starts: all addresses are this
# host's. torch's TCPStore looks up the name of every connection's address, on both sides; some
# resolvers drop what exceeds a number per second, and each dropped query would cost a rendezvous,
# which has two seconds, one of them.
os.environ.setdefault("RES_OPTIONS", "attempts:0")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each test process one file at a time, and all of tests/integration to one process.

    Two jobs of tests/integration at once have up to ten busy processes. On two cores their
    heartbeats come too late, and the groups take each other for dead.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/integration" if file.startswith("tests/integration/") else file

    return Scheduler(config, log)


@pytest.fixture(autouse=True)
def _machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Let a test that is marked `alone` have the machine for itself, where several run at a
    time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # of all workers
    alone = request.node.get_closest_marker("alone") is not None
    with (folder / "door").open("w") as door, (folder / "machine").open("w") as machine:
        # Kept by who waits to be alone, so that no further test begins.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        # Here, and not with the file: a forked child may have it open.
        fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `titan_ft.device` use a GPU's threads. Streams and memory of a GPU are tested in
    tests/cuda.
    """
    from titan_ft import device

    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "thread_initializer", lambda: lambda: None)
    monkeypatch.setattr(device, "memory_bytes", lambda: 0)


class SmallDisk:
    """A file system of a few MB. `fill` uses all of its free space, and `free` gives that space
    back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / ".ballast"

    def fill(self) -> None:
        """Leave no room for anything, but in the last block of each file."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (2**20, 2**12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        self._ballast.unlink()

    def resize(self, size: str) -> None:
        """Give it another size, such as "400m"."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)


@contextlib.contextmanager
def mounted_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount a small disk at a new folder. Skip the test if this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small disk needs mount(8)")
    if mounted.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A small disk for one test, if this user may mount one."""
    with mounted_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture(scope="session", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """Kill data loader workers that a failed test left: they ignore SIGTERM, and Python waits for
    them.
    """
    yield
    # Torch's handler would take their end for a failure.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
