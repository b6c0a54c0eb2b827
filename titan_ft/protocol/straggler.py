# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the groups that keep the others waiting, by each group's own time of every step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

FACTOR, STEPS = 1.5, 5
"""A group is reported as slow if it takes `FACTOR` times the usual time, `STEPS` steps in a row.

A single slow step has many harmless causes, such as a checkpoint, an evaluation or a collection of
garbage. A lasting slowdown comes from a sick GPU, link or disk, and only a report shows it. The
report changes nothing in the training, so users need not tune these numbers."""


@dataclass(frozen=True)
class StragglerChange:
    """A group became a straggler at this step, or stopped being one.

    Attributes:
        ratio: the group's seconds of this step / median of the others' seconds.
        recovered: the group stopped being a straggler.
    """

    slot: int
    ratio: float
    recovered: bool


@dataclass
class _Record:
    straggler: bool = False
    streak: int = 0  # steps in a row that contradict `straggler`


class Stragglers:
    """Compares the groups' own seconds step by step. Training thread only.

    A group becomes a straggler when it is slower than `factor` times the median of the others for
    `steps` steps in a row. It stops being one after as many steps in a row in which it is not
    slower: one good step among bad ones changes nothing. Groups that saw the same steps find the
    same stragglers.

    Args:
        factor: >= 1.
        steps: >= 1.
    """

    def __init__(self, factor: float, steps: int) -> None:
        self._factor = factor
        self._steps = steps
        self._records: dict[int, _Record] = {}
        self.ratios: dict[int, float] = {}
        """Own seconds / median of the others' in the last step, by slot. Empty with one group."""

    def observe(self, seconds: Mapping[int, float]) -> list[StragglerChange]:
        """Take in one step, and return the changes in order of slot.

        An absent group is forgotten: its speed before a restart says nothing about its speed after
        it.

        Args:
            seconds: by slot, the group's own time of the step, for the groups that contributed.
        """
        self.ratios = _ratios(seconds)
        former = self._records
        self._records = {}
        changes = []
        for slot, ratio in sorted(self.ratios.items()):
            record = former.get(slot, _Record())
            self._records[slot] = record
            is_slow = ratio > self._factor
            if is_slow == record.straggler:
                record.streak = 0
            else:
                record.streak += 1
            if record.streak >= self._steps:
                record.straggler = is_slow
                record.streak = 0
                changes.append(StragglerChange(slot, ratio, recovered=not is_slow))
        return changes


def _ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    if len(seconds) < 2:
        return {}
    ratios = {}
    for slot, own in seconds.items():
        others = dict(seconds)
        del others[slot]
        median = statistics.median(others.values())
        if median > 0:
            ratios[slot] = own / median
        else:
            # A clock that did not move says nothing about the group.
            ratios[slot] = 1.0
    return ratios
