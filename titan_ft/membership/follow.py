# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Following a lighthouse that moves: it is gone, or another lighthouse has announced itself.

Rank 0 of each group follows, because it alone talks to the lighthouse. It also follows in the
middle of a step. The lighthouse's successor knows no group. If this group sent no heartbeat there,
the first groups that ask would be given a quorum without it.

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

_RETRY_SECONDS = 0.2  # pause between two looks while the lighthouse does not answer
_CALM_SECONDS = 1.0  # pause while it answers; longer for the groups after the first ones
_NUM_FREQUENT = 32  # groups with the shortest calm pause
_CONNECT_SECONDS = 0.5
_ANSWER_BYTES = 65536
_UNREADABLE_SECONDS = 10.0
"""If the file cannot be read for this time, a lighthouse that answers is believed without the
file."""

_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


class LighthouseFollower:
    """Notices where the lighthouse is, and has the group's seat moved there.

    `Seat` creates it on rank 0. It holds a silent connection to the lighthouse, on a thread of its
    own. Such a connection shows at once that the lighthouse's process has died, and within seconds
    that its host is gone. Any thread may call `check` and `close`. If the seat cannot be moved, the
    follower tries again.

    Args:
        address: the lighthouse's address.
        slot: slot of this group.
        move: moves the seat to a place. Returns False if that was not possible.
    """

    def __init__(
        self,
        address: LighthouseAddress,
        slot: int,
        move: Callable[[Place], bool],
    ) -> None:
        self._address = address
        self._move = move
        self._calm_seconds = _CALM_SECONDS * (1 + (slot // _NUM_FREQUENT).bit_length())
        self._checking = threading.Lock()
        self._unreadable_since: float | None = None
        self._closed = threading.Event()
        self._line: socket.socket | None = None  # the silent connection
        # A gate does not answer the request of `_open_line`, and keeps the connection open. A
        # lighthouse without a gate answers and closes the connection. To such a lighthouse, a
        # connection without a request stays open.
        self._has_gate = True
        threading.Thread(target=self._run, name="titan_ft_follow", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake()

    def check(self) -> bool:
        """True if the seat is at the place that was announced last. If not, try to move it there.

        A superseded lighthouse that was merely slow may still answer. So the result is False while
        the file with the announcement cannot be read. If the file cannot be read for long, the
        result is True, because training must go on.
        """
        with self._checking:
            place = self._address.look()
            if place is None:
                return self._is_believed_unread()
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

    def _is_believed_unread(self) -> bool:
        """True if the lighthouse in use is believed although its place cannot be read now."""
        if not self._address.is_file:
            return True
        now = time.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
        return now - self._unreadable_since >= _UNREADABLE_SECONDS

    def _run(self) -> None:
        while not self._closed.is_set():
            answers = self._listen()
            # A name may stand for several addresses in turn. So for a name, only a lighthouse that
            # is gone has moved.
            if self._address.is_file or not answers:
                self.check()
            if not answers:
                self._closed.wait(_RETRY_SECONDS)
        self._hang_up()

    def _listen(self) -> bool:
        """Wait for the calm pause. Return False if the lighthouse went away or is not there."""
        place = self._address.place
        assert place is not None, "the seat was taken at a place"
        try:
            if self._line is None:
                headers = self._address.headers if self._has_gate else {}
                self._line = _open_line(place.url, headers)
            self._line.settimeout(self._calm_seconds)
            if self._line.recv(_ANSWER_BYTES):
                self._has_gate = False  # an answer, so this is no gate: connect without a request
                self._hang_up()
                return True
            self._has_gate = True  # the end of the connection; the next lighthouse may have a gate
        except TimeoutError:
            if self._line is not None:
                return True  # the line was silent all the time, as it should be
        except OSError:
            pass
        self._hang_up()
        return False

    def _wake(self) -> None:
        """End the wait of the follower's thread. That thread alone may close the line."""
        line = self._line
        if line is not None:
            with contextlib.suppress(OSError):  # the thread has just closed the line
                line.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def _open_line(url: str, headers: Mapping[str, str]) -> socket.socket:
    """Connect to a lighthouse.

    Args:
        headers: of a request that holds the connection open at a gate, which closes connections
            without a request; empty = send no request.
    """
    line = socket.create_connection(split_address(url), timeout=_CONNECT_SECONDS)
    if headers:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        line.sendall(f"GET /hold HTTP/1.1\r\nConnection: close\r\n{fields}\r\n".encode())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line
