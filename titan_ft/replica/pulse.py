# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Look, while an exchange waits, whether all of its members still send heartbeats.

A process that dies closes its connections, and the others see it at once. A host that is frozen or has lost its network
closes nothing: an exchange with it waits for the process group's whole timeout, which must be longer than the slowest
step. The lighthouse knows more: its status page has the time since each member's last heartbeat.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from typing import Any

logger = logging.getLogger(__name__)

SILENT_BEATS = 2
"""Heartbeat timeouts; one would be enough for the lighthouse, but breaking off costs a repetition."""

_HEARTBEAT = re.compile(r"^\s*(\S+): seen ([0-9.eE+-]+)s ago\s*$", re.MULTILINE)


def read_heartbeats(page: str) -> dict[str, float]:
    """Return the seconds since each member's last heartbeat, by replica id, from the lighthouse's status page."""
    return {html.unescape(name): float(seconds) for name, seconds in _HEARTBEAT.findall(page)}


class StatusPage:
    """The lighthouse's status page, with the time since each member's last heartbeat.

    Args:
        lighthouse: its address, http://host:port.
    """

    def __init__(self, lighthouse: str) -> None:
        self._url = f"{lighthouse}/status"
        # A proxy that the environment names could not reach the lighthouse.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, timeout: float) -> dict[str, float] | None:
        """Return the seconds since each member's last heartbeat, by replica id; None if there is no answer."""
        try:
            with self._opener.open(self._url, timeout=timeout) as answer:
                return read_heartbeats(answer.read().decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException):  # it is away, or went while it answered
            return None


class Watch:
    """Looks at something while an exchange is waited for. Costs nothing while one takes less than `interval` seconds.

    Args:
        name: of its thread.
        interval: returns the seconds until the first look.
        growth: how many times longer each pause between two looks at the same exchange is.
        look: returns what is wrong, if anything is.
        act: called with it, once in an exchange, which does not end before it returns: it must not wait for that.
    """

    def __init__(
        self,
        name: str,
        interval: Callable[[], float],
        growth: float,
        look: Callable[[], dict[str, Any]],
        act: Callable[[dict[str, Any]], None],
    ) -> None:
        self._name, self._interval, self._growth = name, interval, growth
        self._look, self._act = look, act
        self._changed = threading.Condition()
        self._exchange: object | None = None  # the one under way
        self._pause = 0.0  # before the next look at it
        self._due = self._wakes = math.inf  # when to look next; when the thread does, unless it is notified
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

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
            self._exchange, self._due = exchange, math.inf
            if exchange is not None:
                self._pause = self._interval()
                self._due = time.monotonic() + self._pause
            if self._due < self._wakes:  # else the thread finds it when it wakes: no step has to switch to it
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (rest := self._due - time.monotonic()) > 0:
                    self._wakes = self._due
                    self._changed.wait(None if rest == math.inf else rest)
                if self._closed:
                    return
                exchange = self._exchange
            wrong = self._try(self._look)
            # The lock keeps this exchange from ending before it is acted on: the next one would be broken off.
            with self._changed:
                if self._exchange is exchange:
                    self._pause *= self._growth
                    self._due = math.inf if wrong else time.monotonic() + self._pause  # it is broken off once
                    if wrong:
                        self._try(self._act, wrong)

    def _try(self, do: Callable[..., Any], *args: Any) -> Any:
        """Call it; a store that is gone or a full disk is not the end of all watching."""
        try:
            return do(*args)
        except (OSError, RuntimeError):
            logger.exception("%s could not do all that it should", self._name)
            return None


class Pulse(Watch):
    """Watches the heartbeats of an exchange's members.

    Args:
        lighthouse: its address, http://host:port.
        interval: seconds until the first look and between two.
        patience: seconds of silence after which a member counts as gone.
        own: returns the replica id of this group.
        members: returns the replica ids of the others in the exchange under way; none as long as they are not known.
        on_silence: called with the silent ones and their seconds, to break the exchange off.
    """

    def __init__(
        self,
        lighthouse: str,
        interval: float,
        patience: float,
        own: Callable[[], str],
        members: Callable[[], Collection[str]],
        on_silence: Callable[[dict[str, float]], None],
    ) -> None:
        self._page, self._patience, self._own, self._members = StatusPage(lighthouse), patience, own, members
        super().__init__("titan_ft_pulse", lambda: interval, 1.0, self._find_silent, on_silence)

    def _find_silent(self) -> dict[str, float]:
        members = self._members()
        if not members:
            return {}
        heartbeats = self._page.read(self._patience)
        if heartbeats is None:
            return {}  # nothing is known, the exchange has its timeout
        if heartbeats.get(self._own(), 0.0) > self._patience / 2:
            return {}  # this group is alive, so it is the lighthouse, or the network to it, that is late
        # A member that is not listed may not have reached a lighthouse that was just started again: it gets time.
        return {name: heartbeats[name] for name in members if heartbeats.get(name, 0.0) > self._patience}
