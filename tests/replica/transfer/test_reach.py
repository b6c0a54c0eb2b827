# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The peers with which a rank can exchange bytes. With real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from titan_ft.chaos.inside.blackhole import Blackhole, supported
from titan_ft.system.seal import add_seal
from titan_ft.system.threads import call_within
from titan_ft.transfer import reach
from titan_ft.transfer.reach import Peer, Probe, address_key
from titan_ft.transfer.state_server import StateServer

TOKEN = "a shared secret"
DEADLINE = 20.0  # seconds; only a bug reaches it


@pytest.fixture
def servers() -> Iterator[dict[str, StateServer]]:
    """Provide the state servers of a test, by address."""
    servers: dict[str, StateServer] = {}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture
def serve(servers: dict[str, StateServer]) -> Callable[..., str]:
    """Provide a function that starts a state server and returns its address."""

    def start(token: str = TOKEN) -> str:
        server = StateServer("127.0.0.1", token, 1.0, lambda *_: None)
        servers[server.address] = server
        return server.address

    return start


class Path:
    """A path to an address.

    It passes this many bytes in each direction, and then loses everything.
    """

    def __init__(self, target: str, passes: int = 1 << 30) -> None:
        self._target, self._passes = target, passes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.split(":")
            far = socket.create_connection((host, int(port)))
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        left = self._passes
        try:
            while data := source.recv(1024):
                left -= len(data)
                if left >= 0:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for connection in self._open:
            connection.close()


@pytest.fixture
def lay(
    monkeypatch: pytest.MonkeyPatch, servers: dict[str, StateServer]
) -> Iterator[Callable[..., Path]]:
    """Provide paths. Lost bytes count as lost soon."""
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(reach, "_BACK_SECONDS", 0.2)
    paths = []

    def make(target: str, **options: int) -> Path:
        paths.append(Path(target, **options))
        if target in servers:
            servers[target].address = paths[
                -1
            ].address  # the path stands for a network, and not for a relay
        return paths[-1]

    yield make
    for path in paths:
        path.close()


def ask(own: str, *addresses: str, token: str = TOKEN) -> dict[str, str]:
    return Probe(token, own, 0)(
        [Peer(f"u{place}", "", address) for place, address in enumerate(addresses)]
    )


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_peers_that_can_be_reached(serve: Callable[..., str]) -> None:
    """Reachable peers are not in the result, however many there are."""
    own, addresses = serve(), [serve() for _ in range(40)]
    assert ask(own) == {}
    assert ask(own, *addresses) == {}
    peers = [Peer("u", "", addresses[0])]
    assert Probe(TOKEN, own, 0).find_answering(peers) == peers


def test_a_peer_that_is_not_there(serve: Callable[..., str]) -> None:
    """The missing peer is named with the reason. The others are not."""
    reasons = ask(serve(), serve(), closed_port(), serve())
    assert reasons.keys() == {"u1"}
    assert "refused" in reasons["u1"]


def test_a_path_that_loses_large_packets(
    serve: Callable[..., str], lay: Callable[..., Path]
) -> None:
    """The silence is noticed within seconds, although small packets pass."""
    own, path = serve(), lay(serve(), passes=5_000)
    began = time.monotonic()
    assert ask(own, path.address, serve()).keys() == {"u0"}
    assert time.monotonic() - began < 5.0


@pytest.mark.skipif(not supported(), reason="socket filters are Linux's")
@pytest.mark.parametrize("connected", [False, True])
def test_a_path_that_loses_everything(
    serve: Callable[..., str],
    lay: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    connected: bool,
) -> None:
    """The path loses the first packet already, or everything after the connection is made."""
    own, peer = serve(), serve()
    connect = reach._connect

    def connect_and_cut(address: str, seconds: float) -> socket.socket:
        connection = connect(address, seconds)
        if address == peer:
            Blackhole(1.0, lambda _: {os.fstat(connection.fileno()).st_ino}).extend()
        return connection

    if connected:
        monkeypatch.setattr(reach, "_connect", connect_and_cut)
    else:
        port = int(peer.split(":")[1])
        Blackhole(
            1.0, lambda connections: {c.inode for c in connections if c.local[1] == port}
        ).extend()
    began = time.monotonic()
    assert ask(own, peer, serve()).keys() == {"u0"}
    assert time.monotonic() - began < 5.0


def test_a_peer_that_is_busy_can_be_reached(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a long call that keeps the GIL, no thread of the peer answers.

    Its kernel acknowledges.
    """
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 0.3)
    probe = Probe(TOKEN, serve(), 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its connections are not accepted
        busy = Peer("busy", "", f"127.0.0.1:{listener.getsockname()[1]}")
        assert probe([busy]) == {}
        assert probe.find_answering([busy]) == []


@pytest.mark.parametrize("passes", [-1, 5_000])
def test_a_path_of_one_direction(
    serve: Callable[..., str], lay: Callable[..., Path], passes: int
) -> None:
    """The peer is reached, but cannot reach this rank.

    Such a link is dead, and the reason says so.
    """
    back = closed_port() if passes < 0 else lay(serve(), passes=passes).address
    reasons = ask(back, serve())
    assert "not from there" in reasons["u0"]


def test_a_peer_with_another_token_can_be_reached(serve: Callable[..., str]) -> None:
    """A peer that refuses this rank has heard it. So the network works."""
    own = serve()
    assert ask(own, serve(token="another")) == {}
    assert ask(own, serve(), token="another") == {}


def test_an_address_comes_from_the_groups_store(
    serve: Callable[..., str], lay: Callable[..., Path]
) -> None:
    """A rank that has never exchanged with a peer looks its address up.

    The link is dead if the store lacks the address, or does not answer.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where, own = f"127.0.0.1:{store.port}", serve()
    there, forged = address_key("there", 1), address_key("forged", 1)
    store.set(there, add_seal(TOKEN, there, serve()))
    store.set(forged, add_seal(TOKEN, there, serve()))  # copied from another key
    silent = lay(where, passes=0).address
    peers = [
        Peer("there", where),
        Peer("unknown", where),
        Peer("gone", closed_port()),
        Peer("silent", silent),
    ]
    peers.append(Peer("forged", where))
    began = time.monotonic()
    probe = Probe(TOKEN, own, 1)
    assert probe(peers).keys() == {"unknown", "gone", "silent"}, (
        "a stranger's writing makes no link dead"
    )
    assert time.monotonic() - began < 5.0
    assert [peer.unique for peer in probe.find_answering(peers)] == ["there"]


def test_ranks_meet_at_the_peers_store(serve: Callable[..., str]) -> None:
    """A rank other than 0 must reach the peer's store, which is on another host than the peer."""
    peer = Peer("u", closed_port(), serve())
    assert Probe(TOKEN, serve(), 0)([peer]) == {}
    assert Probe(TOKEN, serve(), 1)([peer]).keys() == {"u"}


def test_what_takes_too_long_is_left_alone() -> None:
    """Results and errors are passed on. Without either, there is an error after the limit."""
    assert call_within(DEADLINE, lambda: 7) == 7
    with pytest.raises(KeyError):
        call_within(DEADLINE, lambda: {}["nothing"])
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        call_within(0.05, threading.Event().wait)
