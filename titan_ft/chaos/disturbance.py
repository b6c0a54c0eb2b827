# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell when a group that a fault hit is as good as before."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.chaos.schedule import Shot
from titan_ft.faults.fault import Ending, Fault
from titan_ft.run.events import Target

SETTLE_SECONDS = 15.0
"""A fault that should have ended the group's workers, who still commit after this time, has not worked."""
GIVE_UP_SECONDS = 300.0
"""A disturbance whose end was not seen for this long after it was due must not hold up the schedule for ever."""


@dataclass(eq=False)
class Disturbance:
    """What one fault did, or is about to do, to one group. All times in Unix seconds."""

    ending: Ending
    life: int
    """The life of the group that it hit."""
    key: tuple[str, int]
    """Fault and number of the shot."""
    rank: int | None
    seconds: float
    """How long it lasts by itself."""
    over_from: float | None = None
    """A commit of the group after this shows that it is over; None as long as that is not known."""
    _begun: float | None = None
    _step: int | None = None

    @classmethod
    def of(cls, fault: Fault, shot: Shot, target: Target, life: int) -> Disturbance:
        """Return what a fault of a shot does to a target, a rank or a group in this life of it."""
        return cls(fault.ends, life, (fault.name, shot.number), target.rank, fault.seconds_it_lasts)

    def begin(self, time: float, step: int | None = None) -> None:
        """Note that it has happened, after the group's commit of `step`."""
        if self._begun is not None:
            return  # each rank of the group announces it
        self._begun, self._step = time, step
        if self.ending in ("at once", "settle"):
            self.over_from = time + (SETTLE_SECONDS if self.ending == "settle" else 0.0)

    def undo(self, time: float) -> None:
        """Note that it was undone; of several ranks that say so, the last one counts."""
        if self.ending == "undone":
            self.over_from = time

    def agree(self, step: int, time: float) -> None:
        """Note that after `step`, which the group committed at this time, its state was the same as another group's."""
        if self._step is None or step > self._step:
            self.end("healed", time)

    def end(self, by: Ending, time: float) -> None:
        """End it if `by` is what ends it: the group got the others' state, or its gradient was left out."""
        if self.ending == by and self.over_from is None and self._begun is not None and time > self._begun:
            self.over_from = time

    def is_over(self, life: int, time: float) -> bool:
        """Tell whether a contribution of the group at this time, in this life, shows that it is over."""
        if life > self.life:
            return True
        if self.over_from is not None:
            return time > self.over_from
        return self._begun is not None and time > self._begun + self.seconds + GIVE_UP_SECONDS
