# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats in the control tree: each rank pings its children, and finds the silent ones.

A frozen rank keeps its connections, and the job's lighthouse hears of rank 0 only. Without
heartbeats inside a group, the other groups would wait for a frozen rank as for a slow step.

The answer must come from the child's process itself, but without Python's lock:

- A Python thread would be silent while a long call holds the lock, and a healthy group would end.
- The kernel answers for a stopped process, and for a frozen container.
- A server of torch's TCPStore is a native thread of the process, and has a message for this
  purpose. Each rank that has a parent runs such a server, and stores nothing there.

At the default timeout, pings take a group of 4 ranks 1.9 ms of a core in each second. Heartbeats of
torchft's managers at a lighthouse took 10.9 ms.

A child's address reaches the parent in the handshake of the tree, under the child's proof. So no
stranger answers for a rank. A stranger who connects to the store can do what PyTorch's stores let
him do: his values take memory, and nobody reads them.

See docs/membership.md, "Control tree".
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titan_ft.membership.control_connection import listen, start_connecting
from titan_ft.protocol.control.heartbeat import HeartbeatWatch
from titan_ft.system.address import join_address, split_address

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

# torch/csrc/distributed/c10d/TCPStoreBackend.hpp: QueryType, validationMagicNumber. Numbers have
# the host's byte order. tests/test_contract.py checks these bytes against the installed torch.
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_PING = struct.Struct("=BI")
_PING_TYPE = 13
_ANSWER = struct.Struct("=I")  # the number of the ping
_NUMBERS = 1 << 32

_READ_BYTES = 4096


class EchoServer:
    """Answers the parent's pings, whatever Python does in this process.

    A native thread of torch's store answers. `ControlTree` creates and closes the server.

    Args:
        host: numeric address to listen on.

    Attributes:
        address: host:port.
    """

    def __init__(self, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

        # A store that listens by itself does so at all addresses of the host.
        listener = listen(host)
        port = listener.getsockname()[1]
        self.address = join_address(host, port)
        self._store: TCPStore | None = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Answer no more. A second call does nothing."""
        self._store = None  # the destructor ends the native thread


class Pings:
    """Pings the children.

    `ControlSockets` owns it, and calls every method on the thread that serves the selector or with
    the tree's lock held. A child that cannot be reached has no answers, and becomes silent.

    Args:
        patience: see `HeartbeatWatch`.
        selector: calls the data of a key, with the events, when its socket is ready.
    """

    def __init__(self, patience: float, selector: selectors.BaseSelector) -> None:
        self._watch = HeartbeatWatch(patience)
        self._selector = selector
        self._pingers: dict[int, _Pinger] = {}

    @property
    def next_look(self) -> float:
        """Time of the next call of `look`."""
        return self._watch.next_look

    def add(self, child: int, address: str) -> None:
        """Ping a child from now on.

        Args:
            address: host:port of its echo server; empty = the child has none, and is not pinged.
        """
        try:
            server = split_address(address)
        except ValueError:
            return
        note_answer = partial(self._watch.note_answer, child)
        self._pingers[child] = _Pinger(server, self._selector, note_answer)
        self._watch.add(child, time.monotonic())

    def remove(self, child: int) -> None:
        """Stop pinging a child."""
        pinger = self._pingers.pop(child, None)
        if pinger is not None:
            pinger.close()
            self._watch.remove(child)

    def look(self, now: float) -> dict[int, float]:
        """Ping all children. Return the seconds of silence of each silent child."""
        for pinger in self._pingers.values():
            pinger.ping()
        return self._watch.look(now)


class _Pinger:
    """The connection to the echo server of one child; made again after it breaks.

    Args:
        on_answer: takes the time of an answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        on_answer: Callable[[float], None],
    ) -> None:
        self._address = address
        self._selector = selector
        self._on_answer = on_answer
        self._socket: socket.socket | None = None
        self._num_sent = 0  # on this connection
        self._num_answered = 0
        self._unsent = bytearray()
        self._received = bytearray()

    def ping(self) -> None:
        """Send a ping. The next call sends the bytes that the kernel does not take now."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            self._num_sent += 1
            self._unsent += _PING.pack(_PING_TYPE, self._num_sent % _NUMBERS)
            num_bytes = self._socket.send(self._unsent)
            del self._unsent[:num_bytes]
        except BlockingIOError:
            pass  # the connection is not made yet
        except OSError:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        """Start to connect.

        Raises:
            OSError: nobody listens there, no route leads there, or no descriptor is left.
        """
        connection = start_connecting(self._address)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, self._read)
        except OSError:
            connection.close()
            raise
        self._socket = connection
        self._num_sent = 0
        self._num_answered = 0
        self._unsent = bytearray(_VALIDATE)
        self._received = bytearray()

    def _read(self, _: int) -> None:
        if self._socket is None:
            return  # closed after the selector found it ready: the child's process has ended
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
            if number != self._num_answered % _NUMBERS:
                # Another server has taken over this port; its words are no heartbeats.
                self.close()
                return
            self._on_answer(time.monotonic())
