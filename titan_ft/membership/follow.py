# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follows a lighthouse that moves to another address.

The lighthouse may die, and its successor may run on another host. The address is given by a file on
shared storage, which the successor overwrites (it *announces* itself), or by a host name.

Only rank 0 of each group follows, because only rank 0 talks to the lighthouse. It follows on a
thread of its own, also in the middle of a step. The reason: the successor knows no group. If this
group did not soon send heartbeats there, the first groups that ask would get a quorum without it.

See docs/membership.md, "The lighthouse dies or moves".
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from titan_ft.run.lighthouse import LighthouseAddress, Place
from titan_ft.system.address import split_address

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2  # pause between two checks while the lighthouse does not answer
# Pause between two checks while the lighthouse answers. It is this long for the first
# `_NUM_FREQUENT` groups, and longer for the others.
_HEALTHY_PAUSE_SECONDS = 1.0
_NUM_FREQUENT = 32
_CONNECT_SECONDS = 0.5
_ANSWER_BYTES = 65536
_MAX_UNREADABLE_SECONDS = 10.0
"""If the file cannot be read for this time, trust a lighthouse that answers without the file."""

_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class LighthouseFollower:
    """Finds out where the lighthouse is, and moves the group's seat there.

    `Seat` creates it on rank 0. The follower's thread keeps a connection to the lighthouse on which
    nothing is sent. The connection shows at once that the lighthouse's process has died, and within
    seconds that its host is gone. Any thread may call `check` and `close`. If the seat cannot be
    moved, the follower tries again.

    Args:
        address: address of the lighthouse, as it was given to the group.
        slot: slot of this group.
        move: moves the seat to another place. Returns False if that was not possible.
    """

    def __init__(
        self,
        address: LighthouseAddress,
        slot: int,
        move: Callable[[Place], bool],
    ) -> None:
        self._address = address
        self._move = move
        num_pauses = 1 + (slot // _NUM_FREQUENT).bit_length()
        self._healthy_pause_seconds = _HEALTHY_PAUSE_SECONDS * num_pauses
        self._check_lock = threading.Lock()
        self._unreadable_since: float | None = None
        self._closed = threading.Event()
        self._connection: socket.socket | None = None  # the silent connection to the lighthouse
        # A lighthouse with a gate needs a request on the connection (see `_connect`), does not
        # answer it, and keeps the connection open. A lighthouse without a gate answers a request
        # and closes the connection, but keeps a connection without a request open.
        self._has_gate = True
        threading.Thread(target=self._run, name="titan_ft_follow", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake()

    def check(self) -> bool:
        """True if the seat is at the place that was announced last. If not, try to move it there.

        If the file with the announcement cannot be read, the result is False: there may be a
        successor, while the former lighthouse was only slow and still answers. If the file cannot
        be read for long, the result is True, because training must continue.
        """
        with self._check_lock:
            place = self._address.look()
            if place is None:
                return self._is_trusted_without_file()
            self._unreadable_since = None
            former = self._address.place
            if place == former:
                return True
            if self._move(place):
                former_url = former.url if former is not None else None
                logger.warning(
                    "the lighthouse is at %s now, and no longer at %s",
                    place.url,
                    former_url,
                )
                self._address.place = place
                self._wake()
            return False

    def _is_trusted_without_file(self) -> bool:
        """True if the present lighthouse may be trusted although the file cannot be read now."""
        if not self._address.is_file:
            return True
        now = time.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
        return now - self._unreadable_since >= _MAX_UNREADABLE_SECONDS

    def _run(self) -> None:
        while not self._closed.is_set():
            answers = self._watch_lighthouse()
            # A host name may resolve to several addresses in turn. So with a host name, look for a
            # move only if the lighthouse does not answer.
            if self._address.is_file or not answers:
                self.check()
            if not answers:
                self._closed.wait(_RETRY_SECONDS)
        self._disconnect()

    def _watch_lighthouse(self) -> bool:
        """Wait for one pause. Return False if the lighthouse dies meanwhile, or does not listen."""
        place = self._address.place
        assert place is not None, "the seat was taken at a place"
        try:
            if self._connection is None:
                headers = self._address.headers if self._has_gate else {}
                self._connection = _connect(place.url, headers)
            self._connection.settimeout(self._healthy_pause_seconds)
            if self._connection.recv(_ANSWER_BYTES):
                # An answer, so there is no gate. Connect without a request the next time.
                self._has_gate = False
                self._disconnect()
                return True
            # The connection has ended. The next lighthouse may have a gate.
            self._has_gate = True
        except TimeoutError:
            if self._connection is not None:
                return True  # The connection was silent all the time, as it should be.
        except OSError:
            pass
        self._disconnect()
        return False

    def _wake(self) -> None:
        """End the wait of the follower's thread. Only that thread may close the connection."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # The thread may just have closed the connection.
                connection.shutdown(socket.SHUT_RDWR)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _connect(url: str, headers: Mapping[str, str]) -> socket.socket:
    """Connect to a lighthouse.

    Args:
        headers: headers of a request. A gate closes a connection without a request, and keeps it
            open with this request. Empty = send no request.
    """
    connection = socket.create_connection(split_address(url), timeout=_CONNECT_SECONDS)
    if headers:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"GET /hold HTTP/1.1\r\nConnection: close\r\n{fields}\r\n".encode())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
