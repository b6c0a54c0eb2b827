# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of a group write for each other in its store, and their connections to it. Imports no torch."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from titan_ft.system.process import borrowed_socket, own_sockets

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time


def set_for_all(store: TCPStore, key: str) -> None:
    """Set a key, and return when every rank that asks from now on finds it.

    TCPStore.set() returns when the key is sent. A sibling that asks at once, on its own connection, may be answered
    without it (in one of a hundred tries on one host), and two ranks would decide differently.
    """
    store.set(key, "1")
    store.check([key])  # the server answers after it has taken in what came before on this connection


_GONE_SECONDS = 30
"""Without a sign of the host until a connection to it breaks. A process that is frozen is none the less there."""

_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 5,  # seconds
    "TCP_KEEPINTVL": 5,
    "TCP_USER_TIMEOUT": _GONE_SECONDS * 1000,  # counts for both: tcp(7)
}


def keep_alive(port: int) -> None:
    """Let this process's connections to the store at `port` break when its host is gone without a word.

    torch's client waits for an answer without end, and TCP asks nobody whether he is still there: where a host lost its
    power or a firewall forgot the connection, a rank would wait for ever, and its group would never be started again.
    """
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:
            if connection is not None and connection.getpeername()[1:2] == (port,):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEP_ALIVE.items():
                    if hasattr(socket, name):  # not all systems have all
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
