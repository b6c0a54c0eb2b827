# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Several lighthouses of one job: the file decides which of them serves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from titan_ft.launch import succession
from titan_ft.launch.succession import SILENT_SECONDS, Succession
from titan_ft.run.lighthouse import Announcement

DEADLINE = 30.0  # seconds; only ever reached by a bug


class World:
    """A clock, a file, and the set of lighthouses that answer."""

    def __init__(self, path: Path) -> None:
        self.path, self.now, self.answering = path, 100.0, set[str]()

    def monotonic(self) -> float:
        return self.now

    def lighthouse(self, name: str, *, standby: bool) -> Succession:
        self.answering.add(f"http://{name}:1")
        own = Announcement(f"http://{name}:1", host=name)
        return Succession(
            self.path, own, standby=standby, ask=lambda address, *_: address in self.answering
        )

    @property
    def announced(self) -> str | None:
        said = Announcement.read(self.path)
        return None if said is None else said.host


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path / "run" / "lighthouse.json")
    monkeypatch.setattr(succession, "time", world)
    return world


def test_a_standby_that_starts_anew_does_not_wait_for_itself(world: World) -> None:
    """The file has the address of its former process, at which the standby itself answers. It would
    stand by for itself for ever.
    """
    first = world.lighthouse("a", standby=True)
    while not first.serves:
        assert first.poll()
        world.now += 0.1
    anew = world.lighthouse("a", standby=True)
    while not anew.serves:
        assert anew.poll()
        world.now += 0.1
        assert world.now < 110.0
    assert not first.poll()


def test_a_standby_takes_over_from_one_that_is_silent(world: World) -> None:
    """The standby waits for `SILENT_SECONDS` first. If the former lighthouse was only slow, it
    steps down.
    """
    first, second = world.lighthouse("a", standby=False), world.lighthouse("b", standby=True)
    assert first.poll()
    assert second.poll()
    world.now += 10.0
    assert second.poll()
    assert (world.announced, second.serves) == ("a", False)
    world.answering.clear()
    world.now += SILENT_SECONDS / 2
    assert second.poll()
    assert world.announced == "a"
    world.now += SILENT_SECONDS / 2
    assert second.poll()
    assert (world.announced, second.serves) == ("b", True)
    assert not first.poll()
    assert first.other is not None
    assert first.other.host == "b"
    assert second.poll()


def test_a_standby_that_was_stopped_has_not_listened(world: World) -> None:
    """A single look without an answer is no reason to take over, however long after the previous
    look.
    """
    first, second = world.lighthouse("a", standby=False), world.lighthouse("b", standby=True)
    assert first.poll()
    assert second.poll()
    world.now += 60.0  # the standby is stopped, and answers come too late
    world.answering.clear()
    assert second.poll()
    world.answering.add("http://a:1")
    world.now += 0.1
    assert second.poll()
    assert (world.announced, second.serves) == ("a", False)


def test_one_that_is_no_standby_takes_over_at_once(world: World) -> None:
    """Slurm has started it because the former lighthouse is gone. If both live, the newer one
    serves.
    """
    first, second = world.lighthouse("a", standby=False), world.lighthouse("b", standby=False)
    assert first.poll()
    assert second.poll()
    assert world.announced == "b"
    assert not first.poll()
    assert second.poll()


def test_of_two_that_take_over_at_once_one_remains(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds one name at a time, so the other lighthouse steps down."""
    both = [world.lighthouse(name, standby=True) for name in ("a", "b")]
    for one in both:
        assert one.poll()
    assert world.announced is None
    with monkeypatch.context() as neither_has_seen_the_other:
        neither_has_seen_the_other.setattr(Announcement, "read", lambda path: None)
        for _ in range(2):
            world.now += SILENT_SECONDS / 2
            for one in both:
                assert one.poll()
    assert [one.poll() for one in both] == [False, True]
    assert world.announced == "b"


def test_a_file_that_cannot_be_read_is_no_silence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby continues to ask the lighthouse that it knows."""
    first, second = world.lighthouse("a", standby=False), world.lighthouse("b", standby=True)
    first.poll()
    second.poll()
    with monkeypatch.context() as storage_is_away:
        storage_is_away.setattr(Announcement, "read", lambda path: None)
        for _ in range(6):
            world.now += SILENT_SECONDS / 2
            assert second.poll()
    assert (world.announced, second.serves) == ("a", False)


def test_a_standby_gives_a_successor_its_time(world: World) -> None:
    """The silence of the former lighthouse does not count against its successor."""
    first, second, third = (
        world.lighthouse(name, standby=number > 0) for number, name in enumerate("abc")
    )
    first.poll()
    assert third.poll()
    world.answering.clear()
    world.now += SILENT_SECONDS - 0.1
    third.poll()
    world.now += 0.2
    for _ in range(3):
        second.poll()
        world.now += SILENT_SECONDS / 2
    assert world.announced == "b"
    third.poll()
    assert world.announced == "b"


def test_a_lighthouse_that_serves_is_not_misled_by_a_file_that_cannot_be_read(world: World) -> None:
    """A partial announcement, or a missing file, does not name another lighthouse."""
    first = world.lighthouse("a", standby=False)
    first.poll()
    world.path.write_text("")
    assert first.poll()
    world.path.unlink()
    assert first.poll()


@pytest.fixture
def lighthouses(tmp_path: Path) -> Iterator[Any]:
    """Start real lighthouses."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [
            "-m",
            "titan_ft",
            "lighthouse",
            "--bind",
            "[::]:0",
            "--announce",
            str(tmp_path / "lighthouse.json"),
        ]
        log = (tmp_path / f"{len(started)}.log").open("w")
        environ = {**os.environ, "TITAN_FT_TOKEN": "0123456789abcdef"}
        command += ["--advertise", "127.0.0.1", *options]
        process = subprocess.Popen([sys.executable, *command], stdout=log, env=environ)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


def test_a_frozen_lighthouse_is_replaced_and_becomes_the_standby(
    lighthouses: Any, tmp_path: Path
) -> None:
    """A stopped process still accepts connections. When the process continues, it reads the file
    and becomes the standby.
    """
    path = tmp_path / "lighthouse.json"
    first = lighthouses("--standby")
    served = wait_for(lambda: Announcement.read(path), "one announces itself")
    second = lighthouses("--standby")
    wait_for(
        lambda: (
            f"standby of the lighthouse at {served.address}" in (tmp_path / "1.log").read_text()
        ),
        "a standby",
    )
    first.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    successor = wait_for(
        lambda: (said := Announcement.read(path)) and said.id != served.id and said, "a successor"
    )
    assert time.monotonic() - stopped < DEADLINE / 2
    first.send_signal(signal.SIGCONT)
    line = f"standby of the lighthouse at {successor.address}"
    wait_for(lambda: line in (tmp_path / "0.log").read_text(), "the first one stands by")
    second.kill()
    again = wait_for(
        lambda: (said := Announcement.read(path)) and said.id != successor.id and said,
        "the first again",
    )
    assert again.id not in (served.id, successor.id)
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE) == 143


def test_a_lighthouse_on_a_full_disk_announces_itself_when_it_can(
    lighthouses: Any, small_disk: Any
) -> None:
    """The lighthouse does not end, because the groups wait for its announcement. A path that is no
    folder is still a mistake.
    """
    path = small_disk.folder / "lighthouse.json"
    small_disk.fill()
    started = lighthouses("--announce", str(path))
    log = small_disk.folder.parent / "0.log"
    wait_for(lambda: "cannot be written (No space left on device)" in log.read_text(), "a line")
    assert started.poll() is None
    small_disk.free()
    wait_for(lambda: Announcement.read(path), "its announcement")
    wait_for(lambda: "lighthouse announced in" in log.read_text(), "a line")
    started.send_signal(signal.SIGTERM)
    assert started.wait(DEADLINE) == 143
    assert not list(small_disk.folder.glob(".lighthouse*"))
    (small_disk.folder / "file").touch()
    assert (
        lighthouses("--announce", str(small_disk.folder / "file" / "lighthouse.json")).wait(
            DEADLINE
        )
        == 2
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_lighthouse_lives_where_it_cannot_log() -> None:
    """torchft's code panics if stderr accepts nothing, and the task that forms quorums would end
    for good.

    torchft logs an error when no client waits any more for a formed quorum.
    """
    from torchft._torchft import LighthouseClient

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "lighthouse",
        "--bind",
        f"127.0.0.1:{port}",
        "--min-replicas",
        "1",
    ]
    command += ["--join-timeout-ms", "600", "--heartbeat-timeout-ms", "2000"]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            command, stdout=full, stderr=full, env={**os.environ, "RUST_LOG": "error"}
        )
    try:
        second = timedelta(seconds=1.0)
        client = wait_for(lambda: _client(LighthouseClient, port), "the lighthouse")
        for name in "abc":
            client.heartbeat(replica_id=f"{name}:x", timeout=second)
        # Two of three wait for the third, and give up before the lighthouse does.
        with contextlib.suppress(Exception):
            client.quorum(replica_id="a:x", timeout=timedelta(seconds=0.2))
        with contextlib.suppress(Exception):
            client.quorum(replica_id="b:x", timeout=timedelta(seconds=0.2))
        wait_for(
            lambda: "Current quorum_id: 1" in _status(port), "the quorum that nobody waits for"
        )
        assert client.quorum(replica_id="a:x", timeout=timedelta(seconds=20.0)).quorum_id > 0
    finally:
        process.kill()
        process.wait()


def _status(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5.0) as page:
        text: str = page.read().decode()
    return text


def _client(kind: Any, port: int) -> Any:
    try:
        return kind(addr=f"http://127.0.0.1:{port}", connect_timeout=timedelta(seconds=1.0))
    except Exception:  # noqa: BLE001  # whatever torchft raises while nobody listens
        return None
