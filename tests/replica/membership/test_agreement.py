# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement among the ranks of a group over real stores, and connections to them that break."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # exported at run time

from tests.replica.conftest import DEADLINE, Seats, wait_until
from titan_ft.membership.agreement import Agreement
from titan_ft.protocol.errors import LighthouseError
from titan_ft.system.process import borrowed_socket, own_sockets


class Relay:
    """Hands connections on to a store, and breaks them when it is told to.

    Attributes:
        lost: what is lost from now on: "said" by its clients, "told" to them.
        num_lost: bytes of that.
    """

    def __init__(self, port: int) -> None:
        self._store_port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.clients: list[socket.socket] = []
        self.lost: set[str] = set()
        self.num_lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self, number: int) -> None:
        """Reset the connection that was the `number`th to be made; neither end is told why."""
        client = self.clients[number]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
        client.close()

    def refuse(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def close(self) -> None:
        """Break all of them."""
        self.refuse()
        for client in self.clients:
            client.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                store = socket.create_connection(("127.0.0.1", self._store_port))
                self.clients.append(client)
                for way in ((client, store, "said"), (store, client, "told")):
                    threading.Thread(target=self._hand_on, args=way, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket, what: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if what in self.lost:
                    self.num_lost += len(data)
                else:
                    target.sendall(data)
        target.close()


@pytest.fixture
def store() -> TCPStore:
    """Provide a group's store."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def relay(store: TCPStore) -> Iterator[Relay]:
    """Provide a way to it that can break."""
    relay = Relay(store.port)
    yield relay
    relay.close()


def agreement(port: int, rank: int, ranks: int = 2) -> Agreement:
    """Return a rank's part."""

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE))

    return Agreement(connect, "agreed", group_rank=rank, group_world_size=ranks)


def never(found: set[str]) -> str:
    """Stand for what a rank that is not the first one must not be asked."""
    raise AssertionError("only rank 0 decides")


def test_rank_0_decides_from_what_all_have_found(seats: Seats, store: TCPStore) -> None:
    """All ranks get what it says, each time, and what was said before does not pile up in the store."""
    ranks = [agreement(store.port, rank, 3) for rank in range(3)]
    for number in range(20):
        told = seats.together(
            lambda n=number: ranks[0].rank0_decides(["a"], lambda found: f"{n}:{','.join(sorted(found))}"),
            lambda: ranks[1].rank0_decides(["b", "c"], never),
            lambda: ranks[2].rank0_decides([], never),
        )
        assert told == [f"{number}:a,b,c"] * 3
    assert store.num_keys() < 10


def test_one_rank_needs_no_store() -> None:
    """It agrees with itself."""

    def connect() -> TCPStore:
        raise AssertionError("there is nobody to agree with")

    assert Agreement(connect, "agreed", group_rank=0, group_world_size=1).rank0_decides(["a"], "".join) == "a"


def test_a_decision_that_a_broken_connection_lost_is_asked_for_again(
    seats: Seats, store: TCPStore, relay: Relay
) -> None:
    """The rank gets that one, also if its sibling has long gone on to the next."""
    first, second = agreement(store.port, 0), agreement(relay.port, 1)
    for turn in range(3):
        answer = seats.submit(lambda: second.rank0_decides([], never))
        wait_until(lambda n=first.number + 1: store.check([f"agreed/{n}/1"]), "rank 1 waits")
        relay.reset(turn)
        assert first.rank0_decides([], lambda _, t=turn: f"decision {t}") == f"decision {turn}"
        ahead = seats.submit(lambda: first.rank0_decides([], lambda _: "the next one"))
        assert answer.result(DEADLINE) == f"decision {turn}"
        assert not ahead.done(), "rank 1 has not asked for it"
        assert second.rank0_decides([], never) == ahead.result(DEADLINE) == "the next one"


def test_what_was_said_on_a_broken_connection_is_said_again(seats: Seats, store: TCPStore, relay: Relay) -> None:
    """Sent is not arrived: what the rank has found must not get lost with the connection."""
    first, second = agreement(store.port, 0), agreement(relay.port, 1)
    relay.lost = {"said"}
    answers = [
        seats.submit(lambda: first.rank0_decides(["a"], lambda found: ",".join(sorted(found)))),
        seats.submit(lambda: second.rank0_decides(["b"], never)),
    ]
    wait_until(lambda: relay.num_lost > 0, "rank 1 has said what it found")
    relay.lost = set()
    relay.reset(0)
    assert [answer.result(DEADLINE) for answer in answers] == ["a,b", "a,b"]


def test_rank_0_loses_its_connection(seats: Seats, store: TCPStore, relay: Relay) -> None:
    """It decides once, whatever it has to say twice."""
    first, second = agreement(relay.port, 0), agreement(store.port, 1)
    decisions: list[set[str]] = []

    def decide(found: set[str]) -> str:
        decisions.append(found)
        relay.reset(0)
        return "decided"

    answers = seats.together(lambda: first.rank0_decides(["a"], decide), lambda: second.rank0_decides(["b"], never))
    assert answers == ["decided", "decided"]
    assert decisions == [{"a", "b"}]


def test_a_store_that_is_gone_ends_the_wait(seats: Seats, store: TCPStore, relay: Relay) -> None:
    """There is no group any more to agree with."""
    second = agreement(relay.port, 1)
    second._connect = lambda: TCPStore(
        "127.0.0.1", relay.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.5)
    )
    answer = seats.submit(lambda: second.rank0_decides([], never))
    wait_until(lambda: store.check(["agreed/1/1"]), "rank 1 waits")
    relay.refuse()
    relay.reset(0)
    with pytest.raises(DistNetworkError):
        answer.result(DEADLINE)


def test_leaving_ends_the_wait(seats: Seats, store: TCPStore) -> None:
    """On whichever rank; nobody waits for one that is gone."""
    for rank in range(2):
        waiting = agreement(store.port, rank)
        answer = seats.submit(lambda w=waiting: w.rank0_decides([], never))
        with pytest.raises(TimeoutError):
            answer.result(0.05)
        waiting.close()
        with pytest.raises(LighthouseError, match="left the job"):
            answer.result(DEADLINE)


def test_a_sibling_that_takes_too_long(seats: Seats, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vote must end: it is the other groups' time as well."""
    alone = agreement(store.port, 0)
    with pytest.raises(TimeoutError):
        alone.rank0_decides([], never, timeout=0.05)
    alone.close()
    monkeypatch.setattr("titan_ft.membership.membership.VOTE_SECONDS", 0.2)
    group = seats.take_group(0)
    seats.meet(*group)
    with pytest.raises(TimeoutError, match=r"after step 3 within 0.2 s"):
        group[0].vote(3, True)


@pytest.mark.parametrize("moment", ["asked", "answered"])
def test_a_rank_that_loses_its_connection_gets_its_siblings_quorum(
    seats: Seats, start_lighthouse: Callable[..., str], moment: str
) -> None:
    """While the group's request is under way, or with the answer to it; the next request is not ahead of it."""
    seats.lighthouse = start_lighthouse(min_replicas=2)
    relay = Relay(seats.open_store(0)[1])
    first, second = seats.together(
        lambda: seats.take(0, world_size=2, store=("127.0.0.1", seats.stores[0].port)),
        lambda: seats.take(0, rank=1, world_size=2, store=("127.0.0.1", relay.port)),
    )
    others = seats.take_group(1)
    connection = 1  # of the second one: that of its agreements
    for step in range(3):
        first.begin(step)
        second.begin(step)
        if moment == "asked":
            second.wait_briefly(0.1)
            relay.reset(connection)
        relay.lost = {"told"} if moment == "answered" else set()
        for rank in others:
            rank.begin(step)
        if moment == "answered":
            first.wait()
            wait_until(lambda: relay.num_lost > 0, "the answer is lost")
            relay.lost, relay.num_lost = set(), 0
            assert not second.answered
            relay.reset(connection)
        ranks = [first, second, *others]
        quorums = seats.together(*[rank.wait for rank in ranks])
        assert {quorum.key for quorum in quorums} == {quorums[0].key}
        assert [(quorum.slots, quorum.error) for quorum in quorums] == [([0, 1], None)] * 4
        assert seats.together(*[lambda r=r, s=step: r.vote(s, True) for r in ranks]) == [True] * 4
        connection = -1
    relay.close()


# A host that is gone without a word


def test_the_kernel_asks_whether_the_stores_host_is_still_there(seats: Seats) -> None:
    """A connection that says nothing for hours, as a wait for the next quorum may, is one of a host that lives."""
    seats.take_group(0)
    found = []
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:
            assert connection is not None
            if connection.getpeername()[1:2] == (seats.stores[0].port,):
                alive = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                found.append((bool(alive), connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))
    assert len(found) >= 3  # that of the seat, of the agreement and of the watch for broken exchanges
    assert set(found) == {(True, 30_000)}


VANISHING = """
import subprocess, sys, threading, time
from datetime import timedelta
from torch.distributed import DistNetworkError, TCPStore
from titan_ft.membership import group_store, membership
from titan_ft.membership.agreement import Agreement

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
group_store._KEEP_ALIVE = {name: min(value, 1000) for name, value in group_store._KEEP_ALIVE.items()}
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
connect = lambda: membership._connect(("127.0.0.1", store.port), timedelta(seconds=1))
rank1 = Agreement(connect, "agreed", group_rank=1, group_world_size=2)
def vanish():
    while not store.check(["agreed/1/1"]):
        time.sleep(0.01)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)  # what is sent from now on is lost
    print("gone", flush=True)
threading.Thread(target=vanish, daemon=True).start()
try:
    rank1.rank0_decides([], None)
except DistNetworkError:
    print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
def test_a_host_that_vanishes_ends_the_wait(asks: bool) -> None:
    """No connection of it is closed; without being asked, the kernel would let a rank wait for ever."""
    script = VANISHING if asks else VANISHING.replace("_KEEP_ALIVE = ", "_KEEP_ALIVE = {} and ")
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", script]
    if shutil.which("ip") is None or subprocess.run([*command[:4], "true"], check=False).returncode:
        pytest.skip("needs a network of its own, and the command ip")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "gone\n"
        try:
            process.wait(20 if asks else 8)
            assert process.stdout.read() == "ended\n"
        except subprocess.TimeoutExpired:
            assert not asks
        finally:
            process.kill()
