# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Look, while an exchange waits, whether all of its members still send heartbeats.

A process that dies closes its connections, and the others see it at once. A host that is frozen or has lost its network
closes nothing: an exchange with it waits for the process group's whole timeout, which must be longer than the slowest
step. The lighthouse knows better: its status page tells how long ago each member was heard of.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator

_HEARTBEAT = re.compile(r"^\s*(\S+): seen ([0-9.eE+-]+)s ago\s*$", re.MULTILINE)


def read_heartbeats(page: str) -> dict[str, float]:
    """Return the seconds since each member's last heartbeat, by replica id, from the lighthouse's status page."""
    return {html.unescape(name): float(seconds) for name, seconds in _HEARTBEAT.findall(page)}


class StatusPage:
    """A lighthouse's page of heartbeats.

    Args:
        lighthouse: its address, http://host:port.
        timeout: seconds that an answer may take.
    """

    def __init__(self, lighthouse: str, timeout: float) -> None:
        self._page, self._timeout = f"{lighthouse}/status", timeout
        # Whatever proxy the environment names is not on the way to the lighthouse.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> dict[str, float]:
        """Return the seconds since each member's last heartbeat, by replica id; nothing if it does not answer."""
        try:
            with self._opener.open(self._page, timeout=self._timeout) as answer:
                return read_heartbeats(answer.read().decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException):  # it is away, or went while it answered
            return {}


class Pulse:
    """Watches over the exchanges of one group. Costs nothing while they take less than `interval` seconds to finish.

    Args:
        lighthouse: its address, http://host:port.
        interval: seconds until the first look and between two.
        patience: seconds of silence after which a member counts as gone.
        own: replica id of this group.
        members: returns the replica ids of the others in the exchange under way; none as long as they are not known.
        on_silence: called with the silent ones and their seconds, to break the exchange off.
    """

    def __init__(
        self,
        lighthouse: str,
        interval: float,
        patience: float,
        own: str,
        members: Callable[[], Collection[str]],
        on_silence: Callable[[dict[str, float]], None],
    ) -> None:
        self._page = StatusPage(lighthouse, patience)
        self._interval, self._patience = interval, patience
        self._own, self._members, self._on_silence = own, members, on_silence
        self._changed = threading.Condition()
        self._exchange: object | None = None  # the one under way
        self._closed = False
        threading.Thread(target=self._run, name="titan_ft_pulse", daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while an exchange is waited for."""
        self._set(object())
        try:
            yield
        finally:
            self._set(None)

    def close(self) -> None:
        """Watch no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _set(self, exchange: object | None) -> None:
        with self._changed:
            self._exchange = exchange
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._exchange is not None)
                exchange, ends = self._exchange, time.monotonic() + self._interval
                while not self._closed and self._exchange is exchange and (rest := ends - time.monotonic()) > 0:
                    self._changed.wait(rest)
                if self._closed:
                    return
                if self._exchange is not exchange:
                    continue
            silent = self._find_silent()
            if silent and self._exchange is exchange:
                self._on_silence(silent)
                with self._changed:  # once is enough
                    self._changed.wait_for(lambda over=exchange: self._closed or self._exchange is not over)  # type: ignore[misc]  # bound by default

    def _find_silent(self) -> dict[str, float]:
        members = self._members()
        if not members:
            return {}
        heartbeats = self._page.read()  # empty: nothing is known, the exchange has its timeout
        if heartbeats.get(self._own, 0.0) > self._patience / 2:
            return {}  # this group lives: it is the lighthouse that hears late, or the way there
        # One that is not listed has not been heard of since the lighthouse was started: it is given time.
        return {name: heartbeats[name] for name in members if heartbeats.get(name, 0.0) > self._patience}
