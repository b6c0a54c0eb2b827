# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the faults that were injected into a run."""

from __future__ import annotations

from collections import Counter

from titan_ft.run import events as ev


class InjectedFaults:
    """Count injected faults: the one definition of how many there were, for every view of a run.

    A fault is what `fault_injected` announces. The events of one shot of a plan with the same name are one fault,
    however many groups it hits and however many ranks write it; an event without a shot, as of a script, is one of its
    own. Where a shot kills a group to disturb the heal that follows, the kill is one fault and the disturbance another.
    A shot that was skipped is none. Failures are something else: a fault may end no group or several, and groups end of
    themselves.
    """

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        """How many there were of each name."""
        self.last = 0
        """Number, from 1, of the fault that the last `fault_injected` was part of."""
        self._shots: dict[tuple[object, ...], int] = {}
        self._last_time = 0.0
        """Unix seconds of the last `fault_injected`."""

    @property
    def num_injected(self) -> int:
        return self.by_kind.total()

    def observe(self, event: ev.Event) -> bool:
        """Take any event, in order of time; return whether it is a new fault."""
        # A plan that is carried out again numbers its shots anew. A late line says nothing of the shots after it.
        if isinstance(event, ev.ChaosStarted | ev.LaunchStarted) and event.time >= self._last_time:
            self._shots.clear()
        if not isinstance(event, ev.FaultInjected):
            return False
        self._last_time = event.time
        shot = (event.fault, event.seed, event.shot)
        if event.shot is not None and shot in self._shots:
            self.last = self._shots[shot]
            return False
        self.by_kind[event.fault] += 1
        self.last = self._shots[shot] = self.num_injected
        return True
