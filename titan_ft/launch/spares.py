# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep spare groups, which take the place of groups that are out of restarts."""

from __future__ import annotations

import json

from titan_ft.launch.children import Child, Children
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, FINAL_CODE
from titan_ft.run.events import SpareTookOver
from titan_ft.run.log import EventLog


def may_replace(code: int | None, gave_up: bool) -> bool:
    """Tell whether a spare may take the place of a group, by how its supervisor ended.

    Another process would do no better where the config is wrong or the state diverged. A supervisor that was killed
    did not get to say that it gave up.
    """
    if code is None or code in (0, CONFIG_ERROR_CODE, FINAL_CODE):
        return False
    return gave_up or code < 0


class Spares:
    """The supervisors that wait for a group to take over, in the order in which they do."""

    def __init__(self, plan: LaunchPlan, children: Children, events: EventLog) -> None:
        self._plan = plan
        self._children = children
        self._events = events
        self._waiting: list[Child] = []

    def start(self) -> None:
        command, paths = self._plan.spare_command(), self._plan.paths
        for spare in range(self._plan.options.spares):
            self._waiting.append(self._children.start(f"spare {spare}", command, paths.spare_log(spare)))

    def tell_address(self, address: str) -> None:
        """Tell the lighthouse's address; the group to take over follows on the same pipe."""
        for child in self._waiting:
            child.write_line(address, more=True)

    def take_dead(self) -> list[Child]:
        """Return the spares that ended while they waited, once."""
        dead = [child for child in self._waiting if child.code is not None]
        self._waiting = [child for child in self._waiting if child not in dead]
        return dead

    def take_over(self, replica: int) -> Child | None:
        """Have a spare take the place of a group, and return it; None when none is left."""
        while self._waiting:
            child = self._waiting.pop(0)
            if child.code is not None:
                continue
            attempt = self._plan.paths.next_attempt(replica)
            child.write_line(json.dumps({"replica": replica, "attempt": attempt}))
            self._events.emit(SpareTookOver(replica=replica, attempt=attempt))
            return child
        return None
