# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a group's further host, beside a leader in this process; its workers are none."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from titan_ft.launch.group import agent, follower
from titan_ft.launch.group.agent import GroupSpec, _AgentProcess
from titan_ft.launch.group.agent_connection import StartOrder
from titan_ft.launch.group.follower import Follower
from titan_ft.launch.group.hosts import Followers
from titan_ft.launch.group.worker_group import LocalWorkers, MeetingPoint, PlainStarter, Share
from titan_ft.system.stop import StopRequests


class NoWorkers:
    """The workers of a host, which neither run nor end."""

    pids: ClassVar[dict[int, int]] = {}

    def exits(self) -> list[Any]:
        return []

    def ranks_that_raised(self) -> list[int]:
        return []

    def end(self, grace_seconds: float) -> list[Any]:
        return []


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def lead_once(listener: socket.socket, started: threading.Event) -> None:
    """Give a follower an attempt to start, and end silently once it has started it."""
    leader = Followers(listener, 2, "secret", 0, lambda text: None)
    (member,) = leader.wait_for_all(lambda: False) or []
    member.connection.send(StartOrder(0, 1, 2, 1, 2, "127.0.0.1", 1))
    assert started.wait(30.0)
    listener.close()
    member.connection.close()


def test_a_follower_waits_for_another_leader_no_longer_than_for_the_first(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Slurm the leader's agent is not restarted: the job would hold its hosts until its time
    limit.
    """
    started = threading.Event()

    def make_follower(*args: Any, **settings: Any) -> Follower:
        def start(*order: Any) -> Any:
            started.set()
            return NoWorkers()

        stop, token, slot, num_ranks, _ = args
        return Follower(stop, token, slot, num_ranks, start, **settings)

    monkeypatch.setattr(agent, "MEETING_SECONDS", 1.0)
    monkeypatch.setattr(agent, "listen_if_own_address", lambda address: None)
    monkeypatch.setattr(agent, "Follower", make_follower)
    monkeypatch.setenv("TITAN_FT_TOKEN", "secret")
    leader = threading.Thread(target=lead_once, args=(listener, started), daemon=True)
    leader.start()
    spec = GroupSpec(tmp_path, 1, hosts=2, rendezvous=address_of(listener))
    stop = StopRequests()
    timer = threading.Timer(20.0, stop)
    timer.start()
    assert _AgentProcess(spec, stop)._lead_or_follow("") == 1
    timer.cancel()
    assert started.is_set()
    assert not stop


def test_another_server_at_the_rendezvous_is_not_waited_for_without_end(
    listener: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has the port of the group's first host, takes connections and says nothing: the agent says
    so, and ends.
    """
    for module in (agent, follower):
        monkeypatch.setattr(module, "MEETING_SECONDS", 0.5)
    spec = GroupSpec(tmp_path, 1, hosts=2, rendezvous=address_of(listener))
    stop = StopRequests()
    timer = threading.Timer(20.0, stop)
    timer.start()
    assert _AgentProcess(spec, stop)._lead_or_follow("") == 1
    timer.cancel()
    assert not stop
    said = capsys.readouterr().err
    assert f"no agent leads this group at {spec.rendezvous}: the other end says nothing" in said


def test_workers_are_asked_to_leave_once(run: Any) -> None:
    """Either by the leader or by the scheduler of their own host: a second SIGTERM would end them
    at once.
    """
    code = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
pathlib.Path("ready").touch()
while not asked: time.sleep(0.02)
time.sleep(0.5)
raise SystemExit(10 + len(asked))
"""
    folder = run.paths.root
    folder.mkdir(parents=True)
    (folder / "leaving.py").write_text(code.replace('"ready"', repr(str(folder / "ready"))))
    env = {"PYTHONPATH": f"{folder}:{run.env['PYTHONPATH']}"}
    group = LocalWorkers(
        PlainStarter(),
        "leaving",
        [],
        env,
        Share.whole(1),
        MeetingPoint("127.0.0.1", 1),
        attempt=0,
        max_restarts=1,
        logs={0: folder / "log"},
    )
    try:
        run.wait_until((folder / "ready").exists, 30.0, "the worker runs")
        group.ask_to_leave()
        time.sleep(0.2)
        group.ask_to_leave()
        (end,) = run.wait_until(group.exits, 30.0, "the worker left")
        assert end.code == 11
    finally:
        group.end(0.0)


def test_a_port_at_which_this_user_may_not_listen_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent ends with a line, and the status of a wrong config: it would be no other the next
    time.
    """

    def refuse(*args: Any, **settings: Any) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    spec = GroupSpec(tmp_path, 1, hosts=2, rendezvous="127.0.0.1:80", zygote=False, cluster=True)
    assert _AgentProcess(spec, StopRequests()).run_on_cluster() == 2
    rule = "titan_ft: --rendezvous must have a port at which this user may listen, got 127.0.0.1:80; take one above"
    assert capsys.readouterr().err.startswith(rule)
