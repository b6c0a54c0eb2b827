# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep a lighthouse at one address: start it again there whenever it dies."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.launch.group.children import Child, Children
from titan_ft.launch.restart_policy import backoff_seconds
from titan_ft.run.events import LighthouseRestarted, LighthouseStarted
from titan_ft.run.log import EventLog

HOST = "127.0.0.1"
START_SECONDS = 120.0
HEALTHY_SECONDS = 10.0
"""A lighthouse that listened this long before it died is no crash loop."""
_CONNECT_SECONDS = 1.0  # to this very host: refused or taken at once, if it is not overloaded
MAX_DEATHS = 5
"""Deaths in a row, each after a shorter life, that end the run."""


class LighthouseKeeper:
    """Keep one lighthouse running. Groups wait while it is away and go on when it is back, so none is restarted.

    Args:
        command: makes its command line for a port.
        port: where it listens; 0 chooses a free port, once.
        log: gets the output of all its lives.
        children: where its processes are started.
        events: where a restart is announced.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(
        self, command: Callable[[int], list[str]], port: int, log: Path, children: Children, events: EventLog
    ) -> None:
        self._holder, self.port = _hold(port)
        self.address = f"http://{HOST}:{self.port}"
        self.log = log
        self.listens = False
        self.failure = ""
        """Why there is no lighthouse any more and will be none; empty as long as it runs or is started again."""
        self._command = command(self.port)
        self._children = children
        self._events = events
        self._child: Child | None = None
        self._start_at = 0.0
        """Earliest moment of the next start, then the moment of the start."""
        self._up_since: float | None = None
        """Moment when it last began to listen; None before the first time."""
        self._down_since: float | None = None
        self._down_reason = ""
        self._num_deaths = 0

    def poll(self) -> None:
        """Start it, notice that it listens or that it died, start it again; to be called every few moments."""
        now = time.monotonic()
        if self.failure:
            return
        if self._child is None:
            if now >= self._start_at:
                self._start(now)
            return
        ended = self._child.code is not None  # asked first: what it did last counts
        if not self.listens:
            self._look(now)
        if ended and not self.failure:
            self._note_death(self._child, now)

    def _start(self, now: float) -> None:
        self._child = self._children.start("lighthouse", self._command, self.log, needed_by_others=True)
        self._start_at = now
        self._events.emit(LighthouseStarted(lighthouse_pid=self._child.process.pid, address=self.address))

    @property
    def pid(self) -> int | None:
        """Return the process id of the lighthouse; None while there is none."""
        return None if self._child is None or self._child.code is not None else self._child.process.pid

    def _look(self, now: float) -> None:
        self.listens = _listens(self.port)
        if not self.listens:
            if now >= self._start_at + START_SECONDS:
                self.failure = f"the lighthouse did not come up within {START_SECONDS:.0f} s"
            return
        self._up_since = now
        if self._down_since is not None:
            seconds = round(now - self._down_since, 3)
            self._down_since = None
            self._events.emit(LighthouseRestarted(reason=self._down_reason, seconds=seconds, address=self.address))

    def _note_death(self, child: Child, now: float) -> None:
        reason = f"the {child.describe_end()}"
        if self._up_since is None:
            self.failure = reason  # it could not even start: its settings or its installation are wrong
            return
        if self.listens:
            self._down_since, self._down_reason = now, reason
        lived = now - self._up_since if self.listens else 0.0
        self._num_deaths = 1 if lived >= HEALTHY_SECONDS else self._num_deaths + 1
        if self._num_deaths >= MAX_DEATHS:
            self.failure = f"{reason}, {self._num_deaths} times in a row within moments of its start"
            return
        self.listens, self._child = False, None
        self._start_at = now + backoff_seconds(self._num_deaths - 1)
        self.poll()

    def close(self) -> None:
        """Give the port back."""
        self._holder.close()


def _listens(port: int) -> bool:
    """Say whether somebody listens at a port of this host, which only the lighthouse can (see `_hold`).

    A line in its log would not do: on a full disk it cannot be written, and the run would end for want of it.
    """
    try:
        with socket.create_connection((HOST, port), timeout=_CONNECT_SECONDS) as connection:
            return connection.getsockname() != connection.getpeername()  # else it has met itself
    except OSError:
        return False


def _hold(port: int) -> tuple[socket.socket, int]:
    """Take a port (0: any free one) without listening there, so that nobody else gets it while this process lives.

    While the lighthouse is away, clients keep trying to reach it: the system could give one of them that very port for
    its own end of the connection.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The lighthouse's socket has the same option. Linux then lets both be bound as long as only one of them listens.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((HOST, port))
    except OSError as error:
        holder.close()
        remedy = "choose another, or 0 to have one chosen"
        raise ConfigError(f"--lighthouse-port must be a free port, got {port} ({error.strerror}); {remedy}") from error
    chosen = holder.getsockname()[1]
    if sys.platform != "linux":
        holder.close()
    return holder, chosen
