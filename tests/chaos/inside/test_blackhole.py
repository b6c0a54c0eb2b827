# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Connections that drop incoming packets, against a process at the other end."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole, all_but, connected_to

pytestmark = pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")

DEADLINE = 20.0  # seconds; only ever reached by a bug
SILENCE_SECONDS = 0.3  # of listening for what must not come

ECHO = """
import socket, sys, threading
listener = socket.create_server(
    (sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, backlog=50
)
print(listener.getsockname()[1], flush=True)
def echo(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
def call_back():
    for line in sys.stdin:  # ports of listeners to connect to
        try:
            connection = socket.create_connection((sys.argv[1], int(line)), 20)
            threading.Thread(target=echo, args=(connection,), daemon=True).start()
        except OSError as error:
            print(error, file=sys.stderr)
threading.Thread(target=call_back, daemon=True).start()
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()
"""


class Echo:
    """A process that sends back what it receives."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        command = [sys.executable, "-c", ECHO, host]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), DEADLINE)

    def call_back(self, port: int) -> None:
        """Make it connect to a listener of this process."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{port}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start_echo() -> Iterator[Callable[..., Echo]]:
    """Provide the builder of such processes; ends them."""
    started: list[Echo] = []

    def start(host: str = "127.0.0.1") -> Echo:
        started.append(Echo(host))
        return started[-1]

    yield start
    for echo in started:
        echo.close()


@pytest.fixture
def make_hole() -> Iterator[Callable[..., Blackhole]]:
    """Provide the builder of blackholes; lifts them, for the filters would outlive the test."""
    made: list[Blackhole] = []

    def make(loss: float, **spared: Any) -> Blackhole:
        made.append(Blackhole(loss, all_but(**spared)))
        return made[-1]

    yield make
    for hole in made:
        hole.lift()


def answers(
    connection: socket.socket, text: bytes = b"x", within_seconds: float = DEADLINE
) -> bool:
    """True if the other end's answer arrives in time."""
    connection.settimeout(within_seconds)
    connection.sendall(text)
    try:
        return connection.recv(len(text)) == text
    except TimeoutError:
        return False
    finally:
        connection.settimeout(DEADLINE)


def is_silent(connection: socket.socket, text: bytes = b"x") -> bool:
    """Say whether no answer comes."""
    return not answers(connection, text, SILENCE_SECONDS)


def filter_length(connection: socket.socket) -> int:
    """Return the number of instructions of a socket's filter; 0 = none."""
    length = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert (
        libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, 26, None, ctypes.byref(length)) == 0
    )
    return length.value


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_dead_network_is_silent_and_loses_nothing(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole], host: str
) -> None:
    """A dead network gives neither answer nor error. Afterwards TCP delivers everything, in
    order.
    """
    with start_echo(host).connect() as connection:
        assert answers(connection)
        hole = make_hole(1.0)
        assert hole.extend() >= 1
        assert is_silent(connection, b"one")
        assert is_silent(connection, b"two")
        hole.lift()
        received = b""
        while len(received) < 6:
            received += connection.recv(6)
        assert received == b"onetwo"
        assert answers(connection)


def test_its_own_kind_stays_connected(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """Connections to a sibling and to a spared endpoint work, also new ones; others do not."""
    sibling, store, stranger = start_echo(), start_echo(), start_echo()
    with sibling.connect() as first, store.connect() as second, stranger.connect() as third:
        hole = make_hole(1.0, own_pids=[sibling.pid], spared=[(store.host, store.port)])
        hole.extend()
        assert answers(first)
        assert answers(second)
        assert is_silent(third)
        with sibling.connect() as late, store.connect() as later:
            hole.extend()
            assert answers(late)
            assert answers(later)


def test_connections_within_this_process_stay(make_hole: Callable[..., Blackhole]) -> None:
    """A host without network still talks to itself."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        other, _ = listener.accept()
        with other:
            make_hole(1.0).extend()
            other.sendall(b"x")
            one.settimeout(DEADLINE)
            assert one.recv(1) == b"x"


def test_a_connection_made_meanwhile_is_taken_in(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """The next look finds it."""
    echo = start_echo()
    hole = make_hole(1.0)
    hole.extend()
    with echo.connect() as connection:
        assert answers(connection)
        hole.extend()
        assert is_silent(connection)


def test_a_connection_that_one_look_at_the_table_misses_is_taken_in(
    start_echo: Callable[..., Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux's table may omit a connection, and its listener too, while others close. The table is
    read again.
    """
    echo = start_echo()
    read_table, looks = blackhole._read_table, itertools.count()

    def pass_over() -> Iterator[blackhole.Connection]:
        look = next(looks)
        for connection in read_table():
            if look > 0 or echo.port not in (connection.local[1], connection.peer[1]):
                yield connection

    monkeypatch.setattr(blackhole, "_read_table", pass_over)
    with echo.connect() as connection:
        hole = Blackhole(1.0, lambda connections: connected_to([echo.pid], connections))
        assert hole.extend() == 1
        assert is_silent(connection)
        hole.lift()


def test_after_its_end_nothing_is_taken_in(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """A thread that looks after the end adds no filter, because nothing would remove it."""
    hole = make_hole(1.0)
    hole.extend()
    hole.lift()
    with start_echo().connect() as connection:
        assert hole.extend() == 0
        assert filter_length(connection) == 0
        assert answers(connection)


def test_a_listener_answers_nobody(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """A caller gets no answer until the network is back, and then a connection without a filter."""
    echo = start_echo()
    with socket.create_server((echo.host, 0)) as listener:
        listener.settimeout(SILENCE_SECONDS)
        hole = make_hole(1.0)
        hole.extend()
        echo.call_back(listener.getsockname()[1])
        with pytest.raises(TimeoutError):
            listener.accept()
        hole.lift()
        listener.settimeout(DEADLINE)
        connection, _ = listener.accept()
        with connection:
            assert filter_length(connection) == 0
            assert answers(connection)


def test_what_a_lossy_listener_accepts_is_freed_too(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """An accepted connection inherits its listener's filter, and must lose it at the end."""
    echo = start_echo()
    with socket.create_server((echo.host, 0)) as listener:
        listener.settimeout(DEADLINE)
        hole = make_hole(1e-9)
        hole.extend()
        echo.call_back(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            assert filter_length(connection) > 0
            hole.lift()
            assert filter_length(connection) == 0
            assert filter_length(listener) == 0


@pytest.mark.parametrize(
    ("loss", "least", "most"), [(0.0, 400, 400), (0.5, 120, 280), (0.999999, 0, 2), (1.0, 0, 0)]
)
def test_the_share_that_is_lost(loss: float, least: int, most: int) -> None:
    """The filter drops about its share of 400 datagrams; the limits are eight standard deviations
    away.
    """
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        inode = os.fstat(receiver.fileno()).st_ino
        assert blackhole._set_option(receiver.fileno(), inode, 26, blackhole._drop_program(loss))
        receiver.setblocking(False)
        received = 0
        for _ in range(400):
            sender.sendto(b"x", receiver.getsockname())
            try:  # at once: a queue may be short
                receiver.recv(1)
                received += 1
            except BlockingIOError:
                pass
        assert least <= received <= most


def test_a_lossy_network_delivers_everything(
    start_echo: Callable[..., Echo], make_hole: Callable[..., Blackhole]
) -> None:
    """TCP resends lost packets."""
    with start_echo().connect() as connection:
        make_hole(0.2).extend()
        for number in range(20):
            connection.sendall(bytes([number]))
            assert connection.recv(1) == bytes([number])


def test_a_descriptor_that_was_given_away_is_left_alone() -> None:
    """The number may have been closed and belong to another socket when the filter is set."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not blackhole._set_option(listener.fileno(), 1, 26, blackhole._drop_program(1.0))
        assert filter_length(listener) == 0


def test_sockets_in_time_wait_are_passed_over() -> None:
    """Sockets in TIME_WAIT belong to no process. Thousands of them must not make a look longer than
    a fault.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as closed_first:
            ours, theirs = closed_first.getsockname(), closed_first.getpeername()
            accepted, _ = server.accept()
        accepted.close()
        port = f":{ours[1]:04X} "
        deadline = time.monotonic() + DEADLINE
        while not any(
            port in line and " 06 " in line
            for line in Path("/proc/net/tcp").read_text().splitlines()
        ):
            assert time.monotonic() < deadline, "no socket is in TIME_WAIT"
        here = {
            (connection.local[1], connection.peer[1]) for connection in blackhole.connections_here()
        }
        assert (
            ours[1],
            theirs[1],
        ) not in here  # the port alone may be another connection's as well
