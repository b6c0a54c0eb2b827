# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats in the control tree: each rank pings its children, and finds the ones that are silent.

A frozen rank keeps its connections. The job's lighthouse hears of rank 0 only. So without
heartbeats inside a group, the other groups would wait for a frozen rank as for a slow step.

The answer must come from the process itself, and without Python's lock. A thread of ours would be
silent while a long call holds that lock, and a healthy group would end. The kernel answers for a
process that is stopped, and for a container that is frozen. A server of torch's TCPStore is a
native thread of the process, and it has a message for this purpose. Each rank that has a parent
runs one, and stores nothing there. At the default timeout a group of 4 ranks takes 1.9 ms of a core
in each second. With heartbeats of torchft's managers at a lighthouse it took 10.9 ms.

A child's address reaches the parent in the handshake of the tree, under the child's proof. So no
stranger answers for a rank. A stranger who connects to the store can do what PyTorch's stores let
him do: his values take memory, and nobody reads them.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titan_ft.protocol.control.heartbeat import HeartbeatWatch
from titan_ft.system.address import join_address, split_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

# torch/csrc/distributed/c10d/TCPStoreBackend.hpp: QueryType, validationMagicNumber. Numbers have
# the host's byte order. tests/test_contract.py holds them against the store of this release.
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_PING = struct.Struct("=BI")
_PING_TYPE = 13
_ANSWER = struct.Struct("=I")  # the number of the ping
_NUMBERS = 1 << 32

_READ_BYTES = 4096


class EchoServer:
    """Answers the parent's pings, whatever Python does in this process.

    Args:
        host: numeric address to listen on.

    Attributes:
        address: host:port.
    """

    def __init__(self, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

        listener = listen(host)  # a store that listens itself does so on all addresses of the host
        port = listener.getsockname()[1]
        self.address = join_address(host, port)
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Answer no more. A second call does nothing."""
        self._store = None  # its end stops the thread


class Pings:
    """Pings the children, on the thread that serves the selector.

    Args:
        patience: see `HeartbeatWatch`.
        selector: calls the data of a key when its socket is ready, with the events.
    """

    def __init__(self, patience: float, selector: selectors.BaseSelector) -> None:
        self._watch, self._selector = HeartbeatWatch(patience), selector
        self._pingers: dict[int, _Pinger] = {}

    @property
    def next_look(self) -> float:
        """Time of the next call of `look`."""
        return self._watch.next_look

    def add(self, child: int, address: str) -> None:
        """Ping a child from now on.

        Args:
            address: host:port of its echo server; empty = it has none, and is not pinged.
        """
        try:
            server = split_address(address)
        except ValueError:
            return
        note = partial(self._watch.note_answer, child)
        self._pingers[child] = _Pinger(server, self._selector, note)
        self._watch.add(child, time.monotonic())

    def remove(self, child: int) -> None:
        """Ping a child no longer."""
        if (pinger := self._pingers.pop(child, None)) is not None:
            pinger.close()
            self._watch.remove(child)

    def look(self, now: float) -> dict[int, float]:
        """Ping all children. Returns the silent ones, and for how many seconds each of them is."""
        for pinger in self._pingers.values():
            pinger.ping()
        return self._watch.look(now)


class _Pinger:
    """The connection to the echo server of one child; made again if it breaks.

    Args:
        on_answer: takes the time of an answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        on_answer: Callable[[float], None],
    ) -> None:
        self._address, self._selector, self._on_answer = address, selector, on_answer
        self._socket: socket.socket | None = None
        self._num_sent = self._num_answered = 0
        self._unsent, self._received = bytearray(), bytearray()

    def ping(self) -> None:
        """Send a ping, or begin to. The next call sends the rest."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            self._num_sent += 1
            self._unsent += _PING.pack(_PING_TYPE, self._num_sent % _NUMBERS)
            sent = self._socket.send(self._unsent)
            del self._unsent[:sent]
        except BlockingIOError:
            pass  # the connection is not there yet
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        """Begin to connect.

        Raises:
            OSError: nobody listens, no route leads there, no descriptor is left.
        """
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            status = connection.connect_ex(self._address)
            if status not in (0, errno.EINPROGRESS):
                raise OSError(status, os.strerror(status))
            self._selector.register(connection, selectors.EVENT_READ, self._read)
        except OSError:
            connection.close()
            raise
        self._socket = connection
        self._num_sent = self._num_answered = 0
        self._unsent, self._received = bytearray(_VALIDATE), bytearray()

    def _read(self, _: int) -> None:
        if self._socket is None:
            return  # closed since the selector has found it ready: the child's process has ended
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        while len(self._received) >= _ANSWER.size:
            (number,) = _ANSWER.unpack_from(self._received)
            del self._received[: _ANSWER.size]
            self._num_answered += 1
            if number != self._num_answered % _NUMBERS:  # another server has this port
                self.close()
                return
            self._on_answer(time.monotonic())


def listen(host: str, backlog: int = 16) -> socket.socket:
    """Return a socket that listens on a free port of a numeric address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)
