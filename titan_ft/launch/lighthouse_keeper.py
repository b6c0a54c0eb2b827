# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep a lighthouse at one address: restart the lighthouse whenever it dies or stops answering.

The launcher owns the listening socket, and each lighthouse inherits that socket. So no other
process of the host can take the port between two lighthouses. Groups that connect in between wait
in the socket's backlog.

`poll` starts the lighthouse and asks it for an answer every second, a *probe*. It restarts the
lighthouse after its death. A lighthouse that does not answer `MAX_FAILED_PROBES` times is killed
first. The keeper gives up if the first lighthouse never answers, or after `MAX_DEATHS` in a row.
See docs/agents.md.
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
"""A lighthouse that has not answered this long after its start ends the run."""
HEALTHY_SECONDS = 10.0
"""A lighthouse that listened this long before its death is not part of a crash loop."""
MAX_DEATHS = 5
"""This many deaths in a row end the run. A death after `HEALTHY_SECONDS` begins a new row."""
MAX_FAILED_PROBES = 3
"""After this many probes in a row without an answer, the lighthouse is killed.

Its process lives but serves nobody: it hangs, or its accept loop has ended. torchft's accept loop
ends for good when the process has no descriptor left.
"""
_PROBE_TIMEOUT_SECONDS = 3.0
"""Time for one answer. On a busy machine, the page of many groups takes a second."""
_PROBE_PAUSE_SECONDS = 1.0


class LighthouseKeeper:
    """Keeps one lighthouse running at one address.

    Groups wait while the lighthouse is away, and continue without a restart when it is back.

    `LocalRun` makes the keeper and calls all its methods on the launcher's main thread. A probe
    runs on a thread of its own. After a `failure` the keeper does nothing more, and the run must
    end.

    Args:
        command: makes the lighthouse's command line for a port.
        port: port of the lighthouse; 0 chooses a free port, once.
        log: file for the output of all lighthouses.
        children: starts the lighthouses.
        token: the run's shared secret.
        events: log for the events of starts and restarts.

    Attributes:
        port: the port in use.
        address: the lighthouse's URL.
        listens: True from the first answer of the latest lighthouse until its end is noticed.
        failure: why no lighthouse will be started again; empty while the keeper works.

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
        self.address = f"http://{HOST}:{self.port}"
        self.log = log
        self.listens = False
        self.failure = ""
        self._token = token
        self._command = command(self.port)
        self._children = children
        self._events = events
        self._child: Child | None = None
        """The running lighthouse; None before the first start, and in the pause after a death."""
        self._restart_time = 0.0
        """Earliest time of the next start."""
        self._start_time = 0.0
        """Time of the latest start."""
        self._up_since: float | None = None
        """When a lighthouse last began to listen; None if none ever did."""
        self._down_since: float | None = None
        """When a lighthouse that listened died; None once another one listens."""
        self._down_reason = ""
        self._num_deaths = 0
        """Deaths in a row, see `MAX_DEATHS`."""
        self._probe: Future[bool] | None = None
        """The probe under way."""
        self._probe_time = 0.0
        """Earliest time of the next probe."""
        self._num_failed_probes = 0
        self._was_killed_for_silence = False
        """Whether the keeper killed the latest lighthouse after `MAX_FAILED_PROBES`."""

    def poll(self) -> None:
        """Start the lighthouse, notice its first answer or its death, restart it; call it often."""
        if self.failure:
            return
        now = time.monotonic()
        if self._child is None:
            if now >= self._restart_time:
                self._start(now)
            return
        # Read before the probe: a lighthouse that answered and died at once has listened. Its death
        # must not look like a failed start, which ends the run.
        has_ended = self._child.code is not None
        self._poll_probe(self._child, now)
        if has_ended:
            self._note_death(self._child, now)
        elif not self.listens and now >= self._start_time + START_SECONDS:
            self.failure = f"the lighthouse did not come up within {START_SECONDS:.0f} s"

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
        self._start_time = now
        self._probe = None
        self._probe_time = 0.0
        self._num_failed_probes = 0
        self._events.emit(
            LighthouseStarted(lighthouse_pid=self._child.process.pid, address=self.address)
        )

    @property
    def pid(self) -> int | None:
        """Process id of the running lighthouse; None while no lighthouse runs."""
        if self._child is None or self._child.code is not None:
            return None
        return self._child.process.pid

    def _poll_probe(self, child: Child, now: float) -> None:
        """Start a probe when it is due, or process its result.

        The lighthouse's log cannot serve instead of probes. On a full disk the log stays empty, and
        the run would end although the lighthouse listens.
        """
        if self._probe is None:
            if now >= self._probe_time:
                # On a thread, because an answer may take seconds.
                probe = partial(answers, self.address, self._token, _PROBE_TIMEOUT_SECONDS)
                self._probe = call_aside(probe, "titan_ft_ask_lighthouse")
            return
        if not self._probe.done():
            return
        has_answered = self._probe.result()
        self._probe = None
        if has_answered:
            self._probe_time = now + _PROBE_PAUSE_SECONDS
            self._num_failed_probes = 0
            if not self.listens:
                self._note_start(now)
        elif self.listens:
            self._probe_time = now + _PROBE_PAUSE_SECONDS
            self._num_failed_probes += 1
            # Equal, not larger: one kill is enough, and the end of the process takes a moment.
            if self._num_failed_probes == MAX_FAILED_PROBES and child.code is None:
                self._was_killed_for_silence = True
                child.process.kill()
        # A lighthouse that starts is probed again at the next poll: the run waits for its answer.

    def _note_start(self, now: float) -> None:
        self.listens = True
        self._up_since = now
        if self._down_since is not None:
            seconds = round(now - self._down_since, 3)
            self._down_since = None
            self._events.emit(
                LighthouseRestarted(reason=self._down_reason, seconds=seconds, address=self.address)
            )

    def _note_death(self, child: Child, now: float) -> None:
        """Plan the restart of a lighthouse that has ended, or give up."""
        reason = f"the {child.describe_end()}"
        if self._was_killed_for_silence:
            self._was_killed_for_silence = False
            reason = (
                f"the lighthouse was killed: it did not answer {MAX_FAILED_PROBES} times, "
                f"{_PROBE_TIMEOUT_SECONDS:g} s each"
            )
        if self._up_since is None:
            # It never listened: its settings or its installation are wrong. A restart cannot help.
            self.failure = reason
            return
        lived_seconds = 0.0
        if self.listens:
            lived_seconds = now - self._up_since
            self._down_since = now
            self._down_reason = reason
        if lived_seconds >= HEALTHY_SECONDS:
            self._num_deaths = 0
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            self.failure = (
                f"{reason}, {self._num_deaths} times in a row within moments of its start"
            )
            return
        self.listens = False
        self._child = None
        self._restart_time = now + backoff_seconds(self._num_deaths - 1)
        # After the first death there is no pause. This call starts the lighthouse at once, because
        # groups wait.
        self.poll()

    def close(self) -> None:
        """Release the port."""
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
