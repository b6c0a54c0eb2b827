# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups on each host, and the deaths there: a bad host shows by its deaths, whichever groups
it had.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.history.fold.hosts import HostFigures
from titan_ft.history.record.run_record import RunRecord, view


@view
def find_hosts(record: RunRecord) -> list[HostFigures]:
    """Return the hosts of a run, those with the most deaths first."""
    return record.fold.hosts.figures


def worth_a_table(hosts: Sequence[HostFigures]) -> bool:
    """Return True if there are several hosts, or deaths; otherwise the groups say the same."""
    return len(hosts) > 1 or any(figures.deaths for figures in hosts)


def name_range(groups: Sequence[int]) -> str:
    """Return sorted groups in few words, with a range for consecutive ones."""
    parts: list[list[int]] = []
    for group in groups:
        if parts and group == parts[-1][-1] + 1:
            parts[-1].append(group)
        else:
            parts.append([group])
    return ", ".join(_name_part(part) for part in parts) or "none"


def _name_part(part: Sequence[int]) -> str:
    return f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part))
