# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups on each host, and the deaths there: a bad host shows by its deaths, whichever groups
it had.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.history.fold.hosts import HostFigures
from titan_ft.history.record.run_record import RunRecord, once_per_record


@once_per_record
def find_hosts(record: RunRecord) -> list[HostFigures]:
    """Return the hosts of a run, those with the most deaths first."""
    return record.fold.hosts.figures


def worth_a_table(hosts: Sequence[HostFigures]) -> bool:
    """Return True if there are several hosts, or deaths; otherwise the groups say the same."""
    if len(hosts) > 1:
        return True
    return any(figures.deaths for figures in hosts)


def name_range(groups: Sequence[int]) -> str:
    """Return sorted groups in few words, with a range for consecutive ones."""
    runs: list[list[int]] = []
    for group in groups:
        if runs and group == runs[-1][-1] + 1:
            runs[-1].append(group)
        else:
            runs.append([group])
    parts = []
    for run in runs:
        if len(run) > 2:
            parts.append(f"{run[0]}-{run[-1]}")
        else:
            parts += [str(group) for group in run]
    return ", ".join(parts) or "none"
