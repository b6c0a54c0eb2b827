# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What ran on each host, and how often it died there: a bad host shows by that, whichever groups it had."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_ft.history.record import RunRecord, view
from titan_ft.run.events import HostLeft, WorkerExited, WorkerStarted


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


@view
def find_hosts(record: RunRecord) -> list[HostFigures]:
    """Return the hosts of a run, those with the most deaths first."""
    found: dict[str, HostFigures] = {}

    def at(host: str) -> HostFigures:
        name = host.partition(".")[0]
        return found.setdefault(name, HostFigures(name))

    for event in record.events:
        match event:
            case WorkerStarted():
                figures = at(event.host)
                figures.starts += 1
                if event.replica not in figures.groups:
                    figures.groups = sorted([*figures.groups, event.replica])
            case WorkerExited(host=str(host), stopped=False) if event.cause:
                at(host).deaths += 1
            case HostLeft():
                at(event.host).left += 1
    return sorted(found.values(), key=lambda figures: (-figures.deaths, figures.host))
