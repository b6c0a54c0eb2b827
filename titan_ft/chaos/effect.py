# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The effect of one fault on one group, until the group works as before."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.faults.fault import Ending, Fault
from titan_ft.run.events import Target

SETTLE_SECONDS = 15.0
"""A fault that should end a group's workers failed if the group commits this long after it."""
GIVE_UP_SECONDS = 300.0
"""Longest wait for the end of an effect after it is due. A longer wait would block the schedule."""


@dataclass(eq=False)
class Effect:
    """The effect of a fault on a group, or a planned effect. All times are Unix seconds."""

    fault: Fault
    shot: int
    """Number of the shot."""
    target: Target
    num_starts: int
    """Number of starts of the group when it was hit; 0 for the lighthouse."""
    over_from: float | None = None
    """A commit of the group after this time shows that the effect is over; None = not known yet."""
    _struck: float | None = None
    _step: int | None = None

    def mark_struck(self, time: float, step: int | None = None) -> None:
        """Record that the fault has happened, after the group's commit of `step`."""
        # Each rank of the group reports the fault. The first report counts.
        if self._struck is not None:
            return
        self._struck = time
        self._step = step
        if self.fault.ends == "at once":
            self.over_from = time
        if self.fault.ends == "settle":
            self.over_from = time + SETTLE_SECONDS

    def mark_undone(self, time: float) -> None:
        """Record that the fault was undone. Of several ranks the last report counts."""
        if self.fault.ends == "undone":
            self.over_from = time

    def mark_agreement(self, step: int, time: float) -> None:
        """Record that the group's state after `step` equals another group's state."""
        if self._step is None or step > self._step:
            self.end("healed", time)

    def end(self, by: Ending, time: float) -> None:
        """End the effect if `by` ends this kind of fault and the fault has happened before."""
        if self.fault.ends != by or self.over_from is not None:
            return
        if self._struck is not None and time > self._struck:
            self.over_from = time

    def is_over(self, num_starts: int, time: float) -> bool:
        """Return whether a contribution at `time`, after that many starts, ends the effect."""
        if num_starts > self.num_starts:
            return True
        if self.over_from is not None:
            return time > self.over_from
        if self._struck is None:
            return False
        return time > self._struck + self.fault.duration_seconds + GIVE_UP_SECONDS
