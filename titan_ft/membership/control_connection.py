# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One connection of the control tree: a socket with its buffers and the state of its handshake.

`control_sockets.py` owns the connections, waits for them, and decides when each one is closed.

On the wire a frame is its length in 4 bytes (big-endian), its bytes, and its seal. Each connection
begins with the handshake of `control_handshake.py`, from which both ends derive the seals.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from titan_ft.membership.control_handshake import SEAL_BYTES, FrameSeal, HandshakeError
from titan_ft.protocol.control.message import MAX_BYTES
from titan_ft.system.process import Process

LENGTH_BYTES = 4

_HOST_GONE_SECONDS = 30
"""A host that vanishes closes no connection. The kernel closes it after this time without a sign of
the host. A frozen process does not matter here: its kernel still answers."""

TCP_OPTIONS = {
    "TCP_NODELAY": 1,  # a small frame does not wait for the acknowledgement of the frame before
    "TCP_KEEPIDLE": 5,  # seconds
    "TCP_KEEPINTVL": 5,  # seconds
    "TCP_USER_TIMEOUT": _HOST_GONE_SECONDS * 1000,  # limits keepalive probes and data: tcp(7)
}


class FrameError(ValueError):
    """The bytes on a connection are not what a neighbour of this version sends."""


class ControlConnection:
    """One socket, the bytes that are still to be sent, and the bytes that are not yet taken.

    `ControlSockets` alone creates and uses it, and holds the tree's lock for every call. No method
    blocks, and no method closes the socket.

    Attributes:
        source: address of the other end's host.
        dialed: rank that this end connected to; None = the other end made the connection.
        peer: rank at the other end; None until that rank has proved the run's token.
        process: process at the other end; None = not known.
        own_seal: seals the frames that this end sends; None until both ends have proved the token.
        others_seal: seals the frames that the other end sends; None until then as well.
        is_accepted: the host of the parent has accepted the connection.
        waits_to_write: the selector reports when the socket takes more bytes.
        unsent: bytes that the kernel has not taken yet.
        received: bytes that have arrived and are not taken yet.
    """

    def __init__(self, connection: socket.socket, source: str, dialed: int | None) -> None:
        self.socket = connection
        self.source = source
        self.dialed = dialed
        self.peer: int | None = None
        self.process: Process | None = None
        self.own_seal: FrameSeal | None = None
        self.others_seal: FrameSeal | None = None
        self.unsent = bytearray()
        self.received = bytearray()
        self.waits_to_write = False
        self.is_accepted = False
        self.closed = False
        self._message_bytes = 0  # length of the next message of the handshake
        self._on_message: Callable[[bytes], None] = _refuse

    @property
    def num_missing(self) -> int:
        """Bytes that the next message of the handshake still lacks."""
        return self._message_bytes - len(self.received)

    def expect_message(self, length: int, on_message: Callable[[bytes], None]) -> None:
        """Let `handle_message` call `on_message` with the next `length` bytes of the handshake."""
        self._message_bytes = length
        self._on_message = on_message

    def handle_message(self) -> None:
        """Pass on the message of the handshake that has arrived completely.

        Raises:
            HandshakeError: the message does not come from a neighbour.
        """
        message = bytes(self.received)
        self.received.clear()
        self._on_message(message)

    def write_frame(self, frame: bytes) -> None:
        """Append a frame to the unsent bytes."""
        assert self.own_seal is not None, "a neighbour has proved the token"
        self.unsent += len(frame).to_bytes(LENGTH_BYTES, "big")
        self.unsent += frame
        self.unsent += self.own_seal.make(frame)

    def pop_frame(self) -> bytes | None:
        """Return the next frame, or None if it has not arrived completely.

        Raises:
            FrameError: the frame is too long, or its seal is wrong.
        """
        if len(self.received) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self.received[:LENGTH_BYTES], "big")
        if length > MAX_BYTES:
            # Checked before the bytes are waited for: a wrong length must not fill the memory.
            raise FrameError(f"a frame of {length} bytes; the longest has {MAX_BYTES}")
        frame_end = LENGTH_BYTES + length
        seal_end = frame_end + SEAL_BYTES
        if len(self.received) < seal_end:
            return None
        frame = bytes(self.received[LENGTH_BYTES:frame_end])
        seal = bytes(self.received[frame_end:seal_end])
        del self.received[:seal_end]
        assert self.others_seal is not None, "a neighbour has proved the token"
        if not self.others_seal.is_seal(seal, frame):
            raise FrameError("a frame is not what the other end has sent")
        return frame

    def send_unsent(self) -> None:
        """Send as many of the unsent bytes as the kernel takes now."""
        try:
            while self.unsent:
                num_sent = self.socket.send(self.unsent)
                del self.unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError:
            # The connection is broken, so the socket is readable now. Reading ends the connection:
            # frames that arrived before the end are taken first.
            self.unsent.clear()


def start_connecting(address: tuple[str, int]) -> socket.socket:
    """Return a non-blocking socket that connects to a numeric address.

    The socket is writable when the connection is made.

    Raises:
        OSError: nobody listens there, no route leads there, or no descriptor is left.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        status = connection.connect_ex(address)
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))
    except OSError:
        connection.close()
        raise
    return connection


def listen(host: str, backlog: int = 16) -> socket.socket:
    """Return a socket that listens on a free port of a numeric address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def set_tcp_options(connection: socket.socket) -> None:
    """Have the kernel send small frames at once, and notice a vanished host."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # no system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _refuse(_: bytes) -> None:
    raise HandshakeError("the other end sent a message that nobody expects")
