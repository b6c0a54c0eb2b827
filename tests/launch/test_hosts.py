# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agents of a group on several hosts. Here all agents are on one host. The workers start as
real workers do, but do not train.

`tests/integration/test_two_hosts.py` has hosts that can vanish.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import re
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore

from tests import strangers
from tests.launch.forked import children
from titan_ft.launch.group import hosts
from titan_ft.launch.group.agent_connection import (
    GONE_SECONDS,
    AgentConnection,
    Hello,
    WorkersState,
)
from titan_ft.launch.group.hosts import Followers, GroupWorkers, listen_if_own_address
from titan_ft.launch.group.worker_group import Share
from titan_ft.system.refusal import Refusal

WAIT = "while not (paths.root / f'go-{attempt}').exists(): __import__('time').sleep(0.02)\n"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(
    run: Any, port: int, crash: str, ranks: int = 1, token: str = "secret", host: str = "127.0.0.1"
) -> subprocess.Popen[str]:
    """Start the agent of one of two hosts, which gets its pid as the name of its host."""
    run.env |= {"CRASH": crash, "TITAN_FT_TOKEN": token}
    command = [
        "-m",
        "titan_ft.launch.group.agent",
        "--cluster",
        f"--run-dir={run.paths.root}",
        "--replica=3",
    ]
    command += [
        f"--ranks={ranks}",
        "--module=crashing_worker",
        "--hosts=2",
        f"--rendezvous={host}:{port}",
    ]
    flags = [f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=3"]
    return run.start(*command, "--no-zygote", "--", *flags)


def lead_and_follow(
    run: Any, port: int, crash: str
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start the leading agent, and then the follower."""
    leader = start(run, port, crash)
    run.wait_until(lambda: is_listening(port), 60.0, "the first agent leads")
    return leader, start(run, port, crash)


def start_ranks_that_leave(
    run: Any, port: int
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start both agents of a group whose ranks end in order at SIGTERM; wait until the ranks handle
    SIGTERM.
    """
    leave = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    agents = lead_and_follow(run, port, f"{leave}(paths.root / f'ready-{{rank}}').touch()\n{WAIT}")
    run.wait_until(
        lambda: len(list(run.paths.root.glob("ready-*"))) == 2,
        60.0,
        "both ranks would leave in order",
    )
    return agents


def wait_for_workers(run: Any, attempt: int, number: int) -> list[dict[str, Any]]:
    """Return the workers of an attempt, by rank, once all have begun."""

    def started() -> list[dict[str, Any]]:
        events = [event for event in run.events("worker_started") if event["attempt"] == attempt]
        return sorted(events, key=lambda event: event["rank"]) if len(events) == number else []

    return list(run.wait_until(started, 60.0, f"{number} workers of attempt {attempt}"))


def end(run: Any, attempt: int) -> None:
    """Let the workers of an attempt finish."""
    (run.paths.root / f"go-{attempt}").touch()


FINISH = f"{WAIT}import os\nos._exit(0)"


def test_a_group_on_two_hosts_finishes(run: Any, port: int) -> None:
    """Each rank knows its place in the group and on its host. All ranks meet at one store, and both
    agents end with 0.
    """
    crash = f"""
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
text = json.dumps([int(os.environ[name]) for name in names] + [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
(paths.root / f"rank-{{rank}}.json").write_text(text)
{FINISH}
"""
    run.use_torch()
    agents = [start(run, port, crash, ranks=2), start(run, port, crash, ranks=2)]
    wait_for_workers(run, 0, 4)
    files = [run.paths.root / f"rank-{rank}.json" for rank in range(4)]
    run.wait_until(
        lambda: all(file.exists() and file.read_text().endswith("]") for file in files),
        what="all ranks have written",
    )
    places = [json.loads(file.read_text()) for file in files]
    (store,) = {tuple(place[6:]) for place in places}
    TCPStore(store[0], int(store[1]), is_master=False).set("here", "yes")
    end(run, 0)
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert not any("is gone" in text for text in errors), errors
    assert [place[:6] for place in places] == [
        [0, 0, 4, 2, 0, 2],
        [1, 1, 4, 2, 0, 2],
        [2, 0, 4, 2, 1, 2],
        [3, 1, 4, 2, 1, 2],
    ]
    assert {event["rank"]: event["code"] for event in run.events("worker_exited")} == dict.fromkeys(
        range(4), 0
    )


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_a_group_meets_at_any_address_of_the_loopback(run: Any, port: int) -> None:
    """If localhost is ::1, the store listens at ::1 as well, because the agents meet there."""
    crash = """
import os, socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10)
os._exit(0)
"""
    agents = [start(run, port, crash, host="[::1]") for _ in range(2)]
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_restarts_the_group_on_both_hosts(run: Any, port: int, rank: int) -> None:
    """On either host. One agent decides, and the other follows. The event of the cause is the end
    of that rank.
    """
    crash = f"import os, signal\nif attempt == 0 and rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)\n{FINISH}"
    agents = [start(run, port, crash), start(run, port, crash)]
    wait_for_workers(run, 1, 2)
    end(run, 1)
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    (restarted,) = run.events("replica_restarted")
    assert (restarted["attempt"], restarted["reason"]) == (1, f"rank {rank} was killed by SIGKILL")
    ends = {
        (event["rank"], event["stopped"])
        for event in run.events("worker_exited")
        if event["attempt"] == 0
    }
    assert ends == {(rank, False), (1 - rank, True)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_must_not_come_back_ends_on_both_hosts(run: Any, port: int, rank: int) -> None:
    """Both agents end with the same status, because a scheduler may read either. The exception is
    named, not its consequence.
    """
    crash = f"""
from titan_ft.protocol.errors import DivergedError
if rank == {rank}: raise DivergedError("two states")
{WAIT}
"""
    agents = [start(run, port, crash), start(run, port, crash)]
    errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [3, 3], errors
    assert (
        sum("DivergedError: two states" in text.replace("\nDiverged", "") for text in errors) >= 1
    )
    assert sum("it was given up; see the output of host" in text for text in errors) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["rank"], gave_up["error"]) == (
        "final",
        rank,
        "DivergedError: two states",
    )


def test_an_agent_that_dies_takes_its_workers_along_and_another_one_comes(
    run: Any, port: int
) -> None:
    """The group waits for another agent, and is restarted as a whole. The ranks of the dead agent
    are reported as lost.
    """
    leader, lost = lead_and_follow(run, port, FINISH)
    first = wait_for_workers(run, 0, 2)
    lost.kill()
    run.wait_until(
        lambda: run.events("worker_exited"), 30.0, "the end of the lost host's rank is announced"
    )
    run.wait_until(
        lambda: not run.is_alive(first[1]["pid"]), 10.0, "the worker ended with its agent"
    )
    exit = run.events("worker_exited")[0]
    assert (exit["rank"], exit["stopped"], exit["signal"]) == (1, False, "SIGKILL")
    assert re.search(
        r"^rank 1 was lost with its host \S+, or with the agent there$", exit["reason"]
    )
    follower = start(run, port, FINISH)
    wait_for_workers(run, 1, 2)
    end(run, 1)
    errors = [agent.communicate(timeout=60)[1] for agent in (leader, follower)]
    assert [leader.returncode, follower.returncode] == [0, 0], errors
    assert "titan_ft: group 3: the agent of host" in errors[0]


def test_where_the_leading_agent_dies_the_group_goes_on_with_another_one(
    run: Any, port: int
) -> None:
    """The remaining agent ends its workers, and leads if the rendezvous is on its own host. The
    numbers of attempts continue.
    """
    leader, follower = lead_and_follow(run, port, FINISH)
    first = wait_for_workers(run, 0, 2)
    leader.kill()
    run.wait_until(
        lambda: not any(run.is_alive(worker["pid"]) for worker in first),
        30.0,
        "all workers are gone",
    )
    back = start(run, port, FINISH)
    wait_for_workers(run, 1, 2)
    end(run, 1)
    errors = [agent.communicate(timeout=60)[1] for agent in (follower, back)]
    assert [follower.returncode, back.returncode] == [0, 0], errors
    (restarted,) = run.events("replica_restarted")
    assert (restarted["attempt"], restarted["reason"]) == (1, "started by hand")


def test_an_agent_that_is_stopped_lets_its_workers_leave(run: Any, port: int) -> None:
    """If the leader is stopped, the whole group leaves. Both agents report it, and end as an agent
    of a single host does.
    """
    leader, follower = start_ranks_that_leave(run, port)
    leader.terminate()
    errors = [agent.communicate(timeout=60)[1] for agent in (leader, follower)]
    assert [leader.returncode, follower.returncode] == [1, 1], errors
    assert "this group was stopped by SIGTERM" in errors[0]
    assert "titan_ft: group 3: it was stopped on host" in errors[1]
    assert {(event["rank"], event["code"]) for event in run.events("worker_exited")} == {
        (0, 0),
        (1, 0),
    }


def test_a_follower_that_is_stopped_lets_its_workers_leave(run: Any, port: int) -> None:
    """The follower's host is drained: its workers leave in order, and the group waits for another
    agent.
    """
    leader, follower = start_ranks_that_leave(run, port)
    follower.terminate()
    _, errors = follower.communicate(timeout=60)
    assert (follower.returncode, errors.count("this group was stopped by SIGTERM")) == (1, 1)
    assert leader.poll() is None
    leader.terminate()
    leader.communicate(timeout=60)
    ends = {event["rank"]: event.get("code") for event in run.events("worker_exited")}
    assert ends == {0: 0, 1: 0}


def test_an_agent_without_the_token_takes_no_part(run: Any, port: int) -> None:
    """Both agents report the reason, and the group waits for an agent with the token."""
    leader = start(run, port, FINISH)
    run.wait_until(lambda: is_listening(port), 60.0, "the first agent leads")
    stranger = start(run, port, FINISH, token="guess")
    assert stranger.stderr is not None
    said = stranger.stderr.readline()
    assert "no agent leads this group at 127.0.0.1" in said
    follower = start(run, port, FINISH)
    workers = wait_for_workers(run, 0, 2)
    assert not set(children(stranger.pid)) & {worker["pid"] for worker in workers}
    stranger.kill()
    end(run, 0)
    errors = [agent.communicate(timeout=60)[1] for agent in (leader, follower)]
    assert [leader.returncode, follower.returncode] == [0, 0], errors
    assert (
        errors[0].count("an agent was refused: the other end does not know this run's token") == 1
    )
    (refused,) = run.events("stranger_refused")
    assert (refused["port"], refused["kind"]) == ("agent", "no_secret")


def test_strangers_do_not_keep_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """At too many silent connections the oldest are closed, and each silent connection is closed
    after a while.
    """
    monkeypatch.setattr(hosts, "_MAX_STRANGERS", 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Followers(listener, 2, "secret", 0, print)
        knocking = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        deadline = time.monotonic() + 10.0
        refusals: list[Refusal] = []
        ours.on_refusal = refusals.append
        while len(ours.descriptors()) != 1 + 3:
            assert time.monotonic() < deadline
            ours.poll()
        later = time.monotonic() + GONE_SECONDS + 1.0
        monkeypatch.setattr(time, "monotonic", lambda: later)
        ours.poll()
        assert ours.descriptors() == [listener.fileno()]
        assert [refusal.kind for refusal in refusals] == ["crowd", "silent"]
        for connection in knocking:
            connection.close()


def test_a_crowd_of_one_host_takes_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's handshake takes a trip, and a stranger's host connects many times meanwhile."""
    monkeypatch.setattr(hosts, "_MAX_STRANGERS", 3)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        ours = Followers(listener, 2, "secret", 0, print)
        follower = AgentConnection(
            socket.create_connection(address, source_address=("127.0.0.2", 0)),
            "secret",
            0,
            leads=False,
        )
        opened.callback(follower.close)
        ours.poll()
        for _ in range(5):
            opened.enter_context(socket.create_connection(address))
        ours.poll()
        follower.send(Hello("n1", 1))
        deadline = time.monotonic() + 10.0
        while not any(agent.is_follower for agent in ours._agents):
            assert time.monotonic() < deadline
            follower.poll()
            ours.poll()


def test_a_flood_leaves_the_other_agents_their_turn() -> None:
    """Strangers that connect faster than they are accepted do not keep the agent's only thread."""
    with contextlib.ExitStack() as opened:
        door = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        accepted: list[socket.socket] = []

        def accept() -> tuple[socket.socket, Any]:
            assert len(accepted) < 500, "accepted without end"
            opened.enter_context(socket.create_connection(door.getsockname()))
            own, source = door.accept()
            accepted.append(opened.enter_context(own))
            return own, source

        listener: Any = SimpleNamespace(setblocking=lambda _: None, accept=accept)
        Followers(listener, 2, "secret", 0, print).poll()
    assert len(accepted) > 1


@strangers.numbers_of_strangers
def test_fuzzed_lines_cost_an_agent_nothing(number_of_strangers: int) -> None:
    """Whatever strangers send, messages of the other agent arrive in between. One refusal of each
    kind is reported.
    """
    said: list[str] = []
    refusals: list[Refusal] = []
    hello = b"0" * 32 + b"\n" + b"0" * 64 + b' {"type": "Hello", "host": "n1", "num_ranks": 1}\n'
    chance = random.Random(38)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Followers(listener, 2, "secret", 0, said.append)
        ours.on_refusal = refusals.append
        follower = AgentConnection(
            socket.create_connection(listener.getsockname()), "secret", 0, leads=False
        )
        follower.send(Hello("n1", 1))
        with strangers.bounded_cost():
            for number in range(number_of_strangers):
                strangers.knock(listener.getsockname(), (hello, hello[:40], b"GET / HTTP"), chance)
                follower.send(WorkersState(number, {}, [], [], False, 0))
                follower.poll()
                ours.poll()
        (member,) = ours.wait_for_all(lambda: False) or []
        deadline = time.monotonic() + 10.0
        while member.state is None or member.state.attempt < number_of_strangers - 1:
            assert time.monotonic() < deadline
            follower.poll()
            ours.poll()
        follower.close()
    assert [refusal.kind for refusal in refusals] == ["no_secret"]
    assert len(said) == 1, "said once"


def test_a_stranger_fills_no_memory() -> None:
    """An end that has not proved the token may send a few kilobytes. Then it is closed."""
    refusals: list[Refusal] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Followers(listener, 2, "secret", 0, print)
        ours.on_refusal = refusals.append
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(b"x" * 10_000)
            deadline = time.monotonic() + 10.0
            while not refusals:
                assert time.monotonic() < deadline
                ours.poll()
    assert [refusal.kind for refusal in refusals] == ["no_secret"]


def test_a_host_that_does_not_end_its_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent on that host may be stopped (SIGSTOP). The group continues without the host, and
    the leader reports its name.
    """
    monkeypatch.setattr(hosts, "_REAP_SECONDS", 0.1)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Followers(listener, 2, "secret", 3, said.append)
        follower = AgentConnection(
            socket.create_connection(listener.getsockname()), "secret", 3, leads=False
        )
        follower.send(Hello("n1", 1))
        deadline = time.monotonic() + 10.0

        def is_late() -> bool:
            follower.poll()
            return time.monotonic() > deadline

        members = ours.wait_for_all(is_late)
        assert members is not None
        local = SimpleNamespace(end=lambda grace_seconds: None, exits=list)
        store = SimpleNamespace(
            meeting_point=SimpleNamespace(host="127.0.0.1", port=1), close=lambda: None
        )
        workers = GroupWorkers(0, Share(1, 2), cast(Any, store), cast(Any, local), ours, members)
        (lost,) = workers.end(0.0)
        assert (lost.rank, lost.host, lost.is_lost) == (1, "n1", True)
        follower.close()
    assert said == ["the agent of host n1 is gone: it does not end its workers"]


def test_who_leads(port: int) -> None:
    """The agent that can listen at the rendezvous leads: no other agent on its host, and no agent
    of another host.
    """
    listener = listen_if_own_address(f"127.0.0.1:{port}")
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listen_if_own_address(f"127.0.0.1:{port}") is None
    assert listen_if_own_address("203.0.113.1:29400") is None


@pytest.mark.parametrize(
    "other", [("fe80::1", 1 << 20), ("2001:db8::1", 0)], ids=["of a link", "no IPv6"]
)
def test_a_name_may_have_addresses_at_which_nobody_can_listen(
    monkeypatch: pytest.MonkeyPatch, port: int, other: tuple[str, int]
) -> None:
    """For a host's own name, systemd lists link-local addresses first, and a name server knows IPv6
    addresses.
    """
    real = socket.socket

    def without_ipv6(family: int = -1, *args: Any, **settings: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *args, **settings)

    host, scope = other
    stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [
        (socket.AF_INET6, *stream, (host, port, 0, scope)),
        (socket.AF_INET, *stream, ("127.0.0.1", port)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **settings: found)
    if not scope:
        monkeypatch.setattr(socket, "socket", without_ipv6)
    listener = listen_if_own_address(f"host-a:{port}")
    assert listener is not None
    listener.close()


def is_listening(port: int) -> bool:
    """Return whether a process listens at a port of the loopback, without a connection to it."""
    wanted = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1] == wanted and line.split()[3] == "0A" for line in lines)
