# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Serve one group's figures to Prometheus, if no launcher sees all groups: on a cluster.

A process beside the group's agent: `python -m titan_ft.live.group_metrics PLACE RUN_DIR GROUP`. The
agent has no threads, because it forks.
"""

from __future__ import annotations

import sys
import time

from titan_ft.config import ConfigError
from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus
from titan_ft.live.status import LOST
from titan_ft.run.events import Event
from titan_ft.run.orphan import end_with_parent
from titan_ft.run.output import protect_output
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail

PORT_ENV = "TITAN_FT_METRICS_PORT"
"""PORT or HOST:PORT at which the agent of a group's first host has them served."""
POLL_SECONDS = 1.0


class GroupMetrics:
    """Follows one group's events and serves their figures, from a thread of the server's own.

    New events of the group's own processes are counted; earlier ones are not. The metrics have the
    same names as a launcher's: metrics of the whole job are as this group sees them, those of
    groups are of this group, and states of other groups are shown for those that this group has
    reported as lost.

    Args:
        place: PORT or HOST:PORT.

    Raises:
        ConfigError: the place cannot be listened at.
    """

    def __init__(self, place: str, paths: RunPaths, slot: int) -> None:
        self._slot = slot
        self._status = RunStatus()
        self._tails = [
            EventTail(paths.events, pattern=pattern) for pattern in paths.group_patterns(slot)
        ]
        self._server = MetricsServer.at(
            self._status.fold, place, {"run_dir": str(paths.root), "replica": str(slot)}
        )
        self.url = self._server.url

    def close(self) -> None:
        """Serve no more."""
        self._server.close()

    def poll(self) -> None:
        """Take in the new events."""
        events: list[Event] = []
        for tail in self._tails:
            events += tail.poll()
        events.sort(key=lambda event: event.time)
        for event in events:
            self._status.observe(event)
            self._server.observe(event)
        groups = self._status.groups
        if self._slot not in groups:
            return
        shown = {}
        for slot, group in groups.items():
            # A lost group cannot say so itself, and its own series have vanished: the group that
            # missed it shows it.
            is_lost = group.state == LOST
            if is_lost or slot == self._slot:
                shown[slot] = group
        self._server.update(shown, num_groups=len(groups))


def main() -> int:
    """Serve until the agent ends."""
    protect_output()
    end_with_parent()
    place, run_dir, slot = sys.argv[1:]
    try:
        metrics = GroupMetrics(place, RunPaths(run_dir), int(slot))
    except ConfigError as error:  # training goes on without
        print(f"titan_ft: group {slot} serves no metrics: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"titan_ft: group {slot}: metrics at {metrics.url}", file=sys.stderr, flush=True)
    while True:
        time.sleep(POLL_SECONDS)
        metrics.poll()


if __name__ == "__main__":
    sys.exit(main())
