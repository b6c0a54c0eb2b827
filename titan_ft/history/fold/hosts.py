# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The starts and deaths of workers by host."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from titan_ft.run.events import HostLeft, WorkerExited, WorkerStarted


@dataclass
class HostFigures:
    """The groups, starts and deaths on one host."""

    host: str
    """The name without a domain."""
    groups: list[int] = field(default_factory=list)
    """Groups that had workers there."""
    starts: int = 0
    """Workers that were started there."""
    deaths: int = 0
    """Workers that failed or were killed; workers that an agent stopped do not count."""
    left: int = 0
    """How often a group left the host because of too many deaths."""


class HostsFold:
    """The hosts of a run by the events so far."""

    def __init__(self) -> None:
        self._found: dict[str, HostFigures] = {}

    @property
    def figures(self) -> list[HostFigures]:
        """The hosts, those with the most deaths first."""
        return sorted(self._found.values(), key=_most_deaths_first)

    def note_start(self, event: WorkerStarted) -> None:
        """Count the start of a worker."""
        if not event.node:
            return
        figures = self._at(event.node)
        figures.starts += 1
        if event.replica not in figures.groups:
            figures.groups = sorted([*figures.groups, event.replica])

    def note_exit(self, event: WorkerExited) -> None:
        """Count the end of a worker if it is a death."""
        is_death = bool(event.cause) and not event.stopped
        if is_death and event.host is not None:
            self._at(event.host).deaths += 1

    def note_left(self, event: HostLeft) -> None:
        """Count a group that leaves a host."""
        self._at(event.host).left += 1

    def _at(self, host: str) -> HostFigures:
        name = host.partition(".")[0]
        return self._found.setdefault(name, HostFigures(name))


def _most_deaths_first(figures: HostFigures) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key: hosts with most deaths come first, and of the others n2 before n10."""
    name: list[tuple[int, str]] = []
    # The pattern has a group, so that texts and numbers alternate, and a text comes first.
    for place, part in enumerate(re.split(r"(\d+)", figures.host)):
        is_number = place % 2 == 1
        name.append((int(part), "") if is_number else (0, part))
    return -figures.deaths, name
