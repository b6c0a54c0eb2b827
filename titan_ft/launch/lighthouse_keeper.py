# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep a lighthouse at one address: restart it there whenever it dies, or no longer answers.

The launcher owns the listening socket. It outlives every lighthouse, so that no other process of
the host can listen at the port in between. Groups that connect meanwhile wait in the socket's
backlog.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.launch.gate import BACKLOG
from titan_ft.launch.group.children import Child, Children
from titan_ft.launch.lighthouse import LISTENER_VARIABLE
from titan_ft.launch.restart_policy import backoff_seconds
from titan_ft.run.events import LighthouseRestarted, LighthouseStarted
from titan_ft.run.lighthouse import answers
from titan_ft.run.log import EventLog
from titan_ft.system.threads import call_aside

HOST = "127.0.0.1"
START_SECONDS = 120.0
HEALTHY_SECONDS = 10.0
"""A lighthouse that listened this long before it died is no crash loop."""
_ASK_SECONDS = 3.0
"""Time for one answer. A busy machine takes a second for a page of many groups."""
_ASK_PAUSE_SECONDS = 1.0
MAX_SILENCES = 3
"""Questions in a row without an answer that end a lighthouse: it hangs, or has closed its door for
good (torchft's does when it has no descriptor left)."""
MAX_DEATHS = 5
"""Deaths in a row, each after a shorter life, that end the run."""


class LighthouseKeeper:
    """Keeps one lighthouse running. Groups wait while it is away and continue when it is back,
    without a restart.

    The launcher's main thread calls `poll`.

    Args:
        command: makes the lighthouse's command line for a port.
        port: where it listens; 0 chooses a free port, once.
        log: gets the output of all its processes.
        children: starts its processes.
        token: the run's shared secret.
        events: gets the event of a restart.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        port: int,
        log: Path,
        children: Children,
        token: str,
        events: EventLog,
    ) -> None:
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._token = token
        self.address = f"http://{HOST}:{self.port}"
        self.log = log
        self.listens = False
        self.failure = ""
        """Why there is no lighthouse any more and will be none; empty as long as it runs or is
        started again.
        """
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
        self._answer: Future[bool] | None = None  # to the question that is under way
        self._ask_at = 0.0
        self._num_silences = 0
        self._silent = False  # it was killed because of that

    def poll(self) -> None:
        """Start the lighthouse, notice that it listens or has died, restart it. Call this every few
        moments.
        """
        now = time.monotonic()
        if self.failure:
            return
        if self._child is None:
            if now >= self._start_at:
                self._start(now)
            return
        ended = self._child.code is not None  # asked first: what it did last counts
        self._ask(self._child, now)
        if not self.listens and not ended and now >= self._start_at + START_SECONDS:
            self.failure = f"the lighthouse did not come up within {START_SECONDS:.0f} s"
        if ended and not self.failure:
            self._note_death(self._child, now)

    def _start(self, now: float) -> None:
        descriptor = self._listener.fileno()
        self._child = self._children.start(
            "lighthouse",
            self._command,
            self.log,
            needed_by_others=True,
            env={LISTENER_VARIABLE: str(descriptor)},
            pass_fds=[descriptor],
        )
        self._answer, self._ask_at, self._num_silences = None, 0.0, 0
        self._start_at = now
        self._events.emit(
            LighthouseStarted(lighthouse_pid=self._child.process.pid, address=self.address)
        )

    @property
    def pid(self) -> int | None:
        """Return the process id of the lighthouse; None while there is none."""
        return (
            None if self._child is None or self._child.code is not None else self._child.process.pid
        )

    def _ask(self, child: Child, now: float) -> None:
        """Process the last answer, and ask again, on a thread, because an answer may take seconds.

        The lighthouse's log would not serve: on a full disk it cannot be written, and the run would
        end for lack of it.
        """
        if self._answer is None:
            if now >= self._ask_at:
                ask = partial(answers, self.address, self._token, _ASK_SECONDS)
                self._answer = call_aside(ask, "titan_ft_ask_lighthouse")
            return
        if not self._answer.done():
            return
        answered, self._answer = self._answer.result(), None
        if self.listens or answered:
            self._ask_at = now + _ASK_PAUSE_SECONDS
        if answered:
            self._num_silences = 0
            if not self.listens:
                self._note_start(now)
        elif self.listens:
            self._num_silences += 1
            if self._num_silences == MAX_SILENCES and child.code is None:
                self._silent = True
                child.process.kill()

    def _note_start(self, now: float) -> None:
        self.listens, self._up_since = True, now
        if self._down_since is not None:
            seconds = round(now - self._down_since, 3)
            self._down_since = None
            self._events.emit(
                LighthouseRestarted(reason=self._down_reason, seconds=seconds, address=self.address)
            )

    def _note_death(self, child: Child, now: float) -> None:
        reason = f"the {child.describe_end()}"
        if self._silent:
            self._silent = False
            reason = (
                f"the lighthouse was killed: it did not answer {MAX_SILENCES} times, "
                f"{_ASK_SECONDS:g} s each"
            )
        if self._up_since is None:
            self.failure = (
                reason  # it could not even start: its settings or its installation are wrong
            )
            return
        if self.listens:
            self._down_since, self._down_reason = now, reason
        lived = now - self._up_since if self.listens else 0.0
        self._num_deaths = 1 if lived >= HEALTHY_SECONDS else self._num_deaths + 1
        if self._num_deaths >= MAX_DEATHS:
            self.failure = (
                f"{reason}, {self._num_deaths} times in a row within moments of its start"
            )
            return
        self.listens, self._child = False, None
        self._start_at = now + backoff_seconds(self._num_deaths - 1)
        self.poll()

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()


def _listen(port: int) -> socket.socket:
    """Listen at a port of this host (0: any free one).

    Raises:
        ConfigError: the port is taken.
    """
    try:
        return socket.create_server((HOST, port), backlog=BACKLOG)
    except OSError as error:
        remedy = "choose another, or 0 to have one chosen"
        raise ConfigError(
            f"--lighthouse-port must be a free port, got {port} ({error.strerror}); {remedy}"
        ) from error
