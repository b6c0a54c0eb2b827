# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow a lighthouse that moves: notice that it is gone, or that another one has announced itself.

On rank 0 of each group, which alone talks to the lighthouse. In the midst of a step too: the lighthouse's successor
knows nobody, and the first groups that ask there would be given a quorum without one that does not heartbeat yet.
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

_HASTE_SECONDS = 0.2  # between two looks while the lighthouse does not answer
_CALM_SECONDS = 1.0  # while it does; of many groups each looks more seldom
_CONNECT_SECONDS = 0.5
_ANSWER_BYTES = 65536
_UNREADABLE_SECONDS = 10.0  # after which a lighthouse that answers is believed without the file
_MANY = 32  # groups that look once in that time
_KEEPALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))  # seconds, seconds, probes


class Follower:
    """Looks where the lighthouse is, and has the group's seat moved when it is somewhere else.

    A connection that nothing is sent over shows at once that the process at its other end has died, and within seconds
    that its host has.

    Args:
        address: the lighthouse's.
        slot: of this group.
        move: moves the seat to a place; returns whether it could.
    """

    def __init__(self, address: LighthouseAddress, slot: int, move: Callable[[Place], bool]) -> None:
        self._address, self._move = address, move
        self._calm_seconds = _CALM_SECONDS * (1 + (slot // _MANY).bit_length())
        self._looking = threading.Lock()
        self._unreadable_since: float | None = None
        self._closed = threading.Event()
        self._line: socket.socket | None = None  # to the lighthouse, as long as it is there
        # A gate answers nothing. A lighthouse without one answers, and ends the connection; at that one a connection
        # stays open that says nothing.
        self._has_gate = True
        threading.Thread(target=self._run, name="titan_ft_follow", daemon=True).start()

    def close(self) -> None:
        """Follow no more."""
        self._closed.set()
        self._wake()

    def check(self) -> bool:
        """Say whether the seat is where the lighthouse was announced at last; if not it is moved there, if it can be.

        A lighthouse that was only slow, and whose successor is announced, may still answer. So a file that cannot be
        read just now says neither; one that cannot be read for long is no reason not to train.
        """
        with self._looking:
            place = self._address.look()
            if place is None:
                now = time.monotonic()
                if self._unreadable_since is None:
                    self._unreadable_since = now
                return not self._address.is_file or now - self._unreadable_since >= _UNREADABLE_SECONDS
            self._unreadable_since = None
            if place == self._address.place:
                return True
            former = self._address.place
            if self._move(place):
                logger.warning("the lighthouse is at %s now, and no longer at %s", place.url, former and former.url)
                self._address.place = place
                self._wake()
            return False

    def _run(self) -> None:
        while not self._closed.is_set():
            answers = self._listen()
            # A name may stand for several addresses, one after the other: only a lighthouse that is gone has moved.
            if self._address.is_file or not answers:
                self.check()
            if not answers:
                self._closed.wait(_HASTE_SECONDS)
        self._hang_up()

    def _listen(self) -> bool:
        """Wait for a while; says whether the lighthouse was there all the time."""
        place = self._address.place
        assert place is not None, "the seat was taken there"
        try:
            if self._line is None:
                self._line = _open_line(place.url, self._address.headers if self._has_gate else {})
            self._line.settimeout(self._calm_seconds)
            if self._line.recv(_ANSWER_BYTES):
                self._has_gate = False
                self._hang_up()
                return True
            self._has_gate = True
        except TimeoutError:
            if self._line is not None:  # nothing was said all the time, as it should be
                return True
        except OSError:
            pass
        self._hang_up()
        return False

    def _wake(self) -> None:
        """End the wait of the thread that listens; only that one may close what it waits for."""
        line = self._line
        if line is not None:
            with contextlib.suppress(OSError):  # it was closed just now
                line.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def _open_line(url: str, headers: Mapping[str, str]) -> socket.socket:
    line = socket.create_connection(split_address(url), timeout=_CONNECT_SECONDS)
    if headers:  # there is a gate, which closes a connection that says nothing
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        line.sendall(f"GET /hold HTTP/1.1\r\nConnection: close\r\n{fields}\r\n".encode())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line
