# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell when a group that a fault hit is as good as before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from titan_ft.chaos.faults import Fault
from titan_ft.chaos.schedule import Shot, Target

Ending = Literal["restart", "settle", "undone", "healed", "excluded", "at once"]
"""What ends a trouble, beside a new start of the group, which ends all: nothing; some time without a new start; that it
is undone; a heal, or a digest that agrees; that the gradient was left out; nothing, as it is over when it happens."""

SETTLE_SECONDS = 15.0
"""A fault that should have ended the group's workers, who still commit after this time, has not worked."""
GIVE_UP_SECONDS = 300.0
"""A trouble whose end was not seen for this long after it should have come must not hold up the schedule for ever."""

_ENDINGS: Mapping[str, Ending] = {
    "flip_parameter": "healed",
    "flip_optimizer": "healed",
    "nan_gradient": "excluded",
    "corrupt_chunk": "at once",
}


def trouble_of(fault: Fault, shot: Shot, target: Target, life: int) -> Trouble:
    """Return the trouble that a shot makes for a target, a rank or a group in this life of it."""
    return Trouble(_ending(fault), life, (shot.fault, shot.number), target.rank, shot.params.get("seconds", 0.0))


def _ending(fault: Fault) -> Ending:
    if fault.name in _ENDINGS:
        return _ENDINGS[fault.name]
    if "seconds" in fault.params:
        return "undone"
    if fault.by == "signal":
        return "restart"
    return "settle" if fault.takes_down else "at once"


@dataclass(eq=False)
class Trouble:
    """What one fault did, or is about to do, to one group. All times in Unix seconds."""

    ending: Ending
    life: int
    """The life of the group that it befell."""
    key: tuple[str, int] | None = None
    """Fault and number of the shot."""
    rank: int | None = None
    seconds: float = 0.0
    """How long it lasts by itself."""
    good_from: float | None = None
    """A commit of the group after this shows that it is over; None as long as that is not known."""
    _acted: float | None = None
    _step: int | None = None

    def act(self, time: float, step: int | None = None) -> None:
        """Note that it has happened, after the group's commit of `step`."""
        if self._acted is not None:
            return  # each rank of the group tells it
        self._acted, self._step = time, step
        if self.ending == "at once":
            self.good_from = time
        elif self.ending == "settle":
            self.good_from = time + SETTLE_SECONDS

    def undo(self, time: float) -> None:
        """Note that it was undone; of several ranks that say so, the last one counts."""
        if self.ending == "undone":
            self.good_from = time

    def heal(self, time: float) -> None:
        """Note that the group got the others' state."""
        self._end("healed", time)

    def agree(self, step: int, time: float) -> None:
        """Note that after `step`, which the group committed at this time, its state was the same as another group's."""
        if self._step is None or step > self._step:
            self._end("healed", time)

    def exclude(self, time: float) -> None:
        """Note that the group's gradient was left out."""
        self._end("excluded", time)

    def over(self, life: int, time: float) -> bool:
        """Tell whether a contribution of the group at this time, in this life, shows that it is over."""
        if life > self.life:
            return True
        if self.good_from is not None:
            return time > self.good_from
        return self._acted is not None and time > self._acted + self.seconds + GIVE_UP_SECONDS

    def _end(self, by: Ending, time: float) -> None:
        if self.ending == by and self.good_from is None and self._acted is not None and time > self._acted:
            self.good_from = time
