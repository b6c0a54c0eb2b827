# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell which groups keep the others waiting, from each group's own time of every step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

FACTOR, STEPS = 1.5, 5
"""A group is reported as slow from so many slow steps in a row on. One step that is slow has many harmless reasons (a
checkpoint, an evaluation, a collection of garbage); a lasting third is a sick GPU, link or disk, which only a report
shows. The report changes nothing, so that nobody has to tune it."""


@dataclass(frozen=True)
class StragglerChange:
    """A group that became a straggler at this step, or is none any more.

    Attributes:
        ratio: its seconds of this step / median of the others' seconds.
    """

    slot: int
    ratio: float
    recovered: bool


@dataclass
class _Record:
    straggler: bool = False
    streak: int = 0  # steps in a row that contradict `straggler`


class Stragglers:
    """Compares the groups' own seconds step by step. Groups that saw the same steps come to the same answers.

    A group is a straggler when it was slower than `factor` times the median of the others for `steps` steps in a row,
    and none any more after as many steps in a row in which it was not: one good step among bad ones is no news.

    Args:
        factor: >= 1.
        steps: >= 1.
    """

    def __init__(self, factor: float, steps: int) -> None:
        self._factor, self._steps = factor, steps
        self._records: dict[int, _Record] = {}
        self.ratios: dict[int, float] = {}
        """Of the last step, by slot: own seconds / median of the others'. Empty with one group."""

    def observe(self, seconds: Mapping[int, float]) -> list[StragglerChange]:
        """Take the seconds of one step by slot, of the groups that contributed to it; returns what changed, by slot.

        An absent group is forgotten: what it will be when it is back says nothing about what it was.
        """
        self.ratios = _ratios(seconds)
        self._records = {slot: self._records.get(slot, _Record()) for slot in self.ratios}
        changes = []
        for slot, record in sorted(self._records.items()):
            slow = self.ratios[slot] > self._factor
            record.streak = record.streak + 1 if slow != record.straggler else 0
            if record.streak >= self._steps:
                record.straggler, record.streak = slow, 0
                changes.append(StragglerChange(slot, self.ratios[slot], recovered=not slow))
        return changes


def _ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    if len(seconds) < 2:
        return {}
    ratios = {}
    for slot, own in seconds.items():
        median = statistics.median(value for other, value in seconds.items() if other != slot)
        ratios[slot] = own / median if median > 0 else 1.0  # a clock that did not move means nothing
    return ratios
