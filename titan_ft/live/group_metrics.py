# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Serve one group's figures to Prometheus, where no launcher sees all groups: on a cluster, from the group's agent."""

from __future__ import annotations

import threading

from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus
from titan_ft.live.status import LOST
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail

PORT_ENV = "TITAN_FT_METRICS_PORT"
"""PORT or HOST:PORT where a group's agent serves."""
POLL_SECONDS = 1.0


class GroupMetrics:
    """Follow one group's events and serve their figures, from threads of their own.

    What the group's own processes announce is counted from now on; what they have announced before is not. All metrics
    are there, by the same names as a launcher's: those of the whole job as this group sees them, those of groups for
    this one, and the state of groups that this one has reported as lost.

    Args:
        place: PORT or HOST:PORT.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(self, place: str, paths: RunPaths, replica: int) -> None:
        self._replica = replica
        self._status = RunStatus()
        self._tails = [EventTail(paths.events, pattern=pattern) for pattern in paths.group_patterns(replica)]
        self._server = MetricsServer.at(place, {"run_dir": str(paths.root), "replica": str(replica)})
        self.url = self._server.url
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="titan_ft_group_metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        self._closed.set()
        self._thread.join()
        self._server.close()

    def _follow(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.poll()

    def poll(self) -> None:
        """Take in what is new."""
        events = sorted((event for tail in self._tails for event in tail.poll()), key=lambda event: event.time)
        for event in events:
            self._status.observe(event)
            self._server.observe(event)
        groups = self._status.groups
        if self._replica in groups:
            # A lost group cannot say so itself, and its own series have vanished: the group that missed it shows it.
            shown = {r: group for r, group in groups.items() if r == self._replica or group.state == LOST}
            self._server.update(shown, num_groups=len(groups))
