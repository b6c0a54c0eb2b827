# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The effect of one fault on one group, until the group is as good as before."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.faults.fault import Ending, Fault
from titan_ft.run.events import Target

SETTLE_SECONDS = 15.0
"""A fault that should have ended the group's workers, who still commit after this time, has not worked."""
GIVE_UP_SECONDS = 300.0
"""An effect whose end was not seen for this long after it was due must not hold up the schedule for ever."""


@dataclass(eq=False)
class Effect:
    """The effect of a fault that has hit a group, or is about to. All times in Unix seconds."""

    fault: Fault
    shot: int
    """Number of the shot."""
    target: Target
    life: int
    """The life of the group that it hit; 0 for the lighthouse."""
    over_from: float | None = None
    """A commit of the group after this shows that it is over; None as long as that is not known."""
    _begun: float | None = None
    _step: int | None = None

    def begin(self, time: float, step: int | None = None) -> None:
        """Note that it has happened, after the group's commit of `step`."""
        if self._begun is not None:
            return  # each rank of the group announces it
        self._begun, self._step = time, step
        if self.fault.ends == "at once":
            self.over_from = time
        if self.fault.ends == "settle":
            self.over_from = time + SETTLE_SECONDS

    def undo(self, time: float) -> None:
        """Note that it was undone; of several ranks that say so, the last one counts."""
        if self.fault.ends == "undone":
            self.over_from = time

    def agree(self, step: int, time: float) -> None:
        """Note that after `step`, which the group committed at this time, its state was the same as another group's."""
        if self._step is None or step > self._step:
            self.end("healed", time)

    def end(self, by: Ending, time: float) -> None:
        """End it if `by` is what ends it: the group got the others' state, or its gradient was left out."""
        if self.fault.ends == by and self.over_from is None and self._begun is not None and time > self._begun:
            self.over_from = time

    def is_over(self, life: int, time: float) -> bool:
        """Tell whether a contribution of the group at this time, in this life, shows that it is over."""
        if life > self.life:
            return True
        if self.over_from is not None:
            return time > self.over_from
        return self._begun is not None and time > self._begun + self.fault.duration_seconds + GIVE_UP_SECONDS
