# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What ran on each host, and how often it died there: a bad host shows by that, whichever groups it had."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.history.record import RunRecord, view
from titan_ft.run.events import Event, HostLeft, WorkerExited, WorkerStarted


@dataclass
class HostFigures:
    """One host's part in a run."""

    host: str
    """Its name, without a domain."""
    groups: list[int] = field(default_factory=list)
    """Groups that had workers there."""
    starts: int = 0
    """Workers that were started there."""
    deaths: int = 0
    """Of them, those that failed or were killed, and not stopped because of another one."""
    left: int = 0
    """How often a group left it because of too many deaths."""


class HostsSoFar:
    """What the events told so far say of each host."""

    def __init__(self) -> None:
        self._found: dict[str, HostFigures] = {}

    def observe(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case WorkerStarted() if event.node:
                figures = self._at(event.node)
                figures.starts += 1
                if event.replica not in figures.groups:
                    figures.groups = sorted([*figures.groups, event.replica])
            case WorkerExited(host=str(host), stopped=False) if event.cause:
                self._at(host).deaths += 1
            case HostLeft():
                self._at(event.host).left += 1

    @property
    def figures(self) -> list[HostFigures]:
        """The hosts, those with the most deaths first."""
        return sorted(self._found.values(), key=lambda figures: (-figures.deaths, _by_number(figures.host)))

    def _at(self, host: str) -> HostFigures:
        name = host.partition(".")[0]
        return self._found.setdefault(name, HostFigures(name))


@view
def find_hosts(record: RunRecord) -> list[HostFigures]:
    """Return the hosts of a run, those with the most deaths first."""
    hosts = HostsSoFar()
    for event in record.events:
        hosts.observe(event)
    return hosts.figures


def _by_number(host: str) -> list[tuple[int, str]]:
    """Return what sorts hosts as people count them: n2 is before n10."""
    return [(int(part or 0), "") if place % 2 else (0, part) for place, part in enumerate(re.split(r"(\d+)", host))]


def worth_a_table(hosts: Sequence[HostFigures]) -> bool:
    """Tell whether there are several hosts, or deaths: else the groups tell it all."""
    return len(hosts) > 1 or any(figures.deaths for figures in hosts)


def name_range(groups: Sequence[int]) -> str:
    """Return groups, sorted, in few words: those that follow each other as a range."""
    parts: list[list[int]] = []
    for group in groups:
        if parts and group == parts[-1][-1] + 1:
            parts[-1].append(group)
        else:
            parts.append([group])
    return ", ".join(_name_part(part) for part in parts) or "none"


def _name_part(part: Sequence[int]) -> str:
    return f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part))
