# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults that were injected into a run: how many there were, when each began and ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from titan_ft.run import events as ev


@dataclass
class RecordedFault:
    """One `fault_injected`; times in Unix microseconds."""

    time_us: int
    name: str
    slot: int | None
    """None where it hit no group, but the lighthouse or whichever group comes first."""
    rank: int | None
    lighthouse: bool
    shot: int | None
    """The number of the shot in the schedule; one shot may hit several groups."""
    number: int
    """The ordinal of the fault in the run, from 1.

    Several events of one shot have the same; see `InjectedFaults`.
    """
    undone_us: int | None
    """The end of the fault by the events, or else by its parameters; None if it has none.

    For a lighthouse: the time at which the next one listened.
    """

    @property
    def outcome(self) -> str:
        """The expected outcome for the target: `titan_ft.faults.fault.Outcome`."""
        return expected_outcome(self.name)

    @property
    def category(self) -> str | None:
        """See `titan_ft.faults.fault.Category`; None for an unknown name."""
        # Loaded late: a run without faults loads nothing that breaks runs.
        from titan_ft.faults.catalogue import read_category

        return read_category(self.name)

    @property
    def deadly(self) -> bool:
        """Whether it ends a process at once."""
        return self.outcome == "killed"


class InjectedFaults:
    """Counts injected faults: the one definition of their number, for every view of a run.

    Each `fault_injected` event announces a fault. Events with the same shot of a plan and the same
    name are one fault, however many groups it hits and ranks report it. An event without a shot, as
    of a script, is a fault of its own. If a shot kills a group to disturb the following heal, the
    kill and the disturbance are two faults. A skipped shot is none. Failures are counted elsewhere:
    a fault may end no group or several, and groups may fail without one.
    """

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        """The number of faults of each name since the latest launch began."""
        self.injected: list[RecordedFault] = []
        """The faults of all launches, in order of time."""
        self._num_faults = 0
        """The number of faults of all launches."""
        self._shots: dict[tuple[object, ...], int] = {}
        """The number of the fault of each shot."""
        self._lasting: dict[object, list[RecordedFault]] = defaultdict(list)
        """The faults that no event has undone yet, by `_lasting_key`."""
        self._last_time = 0.0
        """Unix seconds of the last `fault_injected`."""

    @property
    def num_injected(self) -> int:
        return self.by_kind.total()

    def observe(self, event: ev.Event) -> bool:
        """Take any event, in order of time; return whether it is a new fault."""
        # A plan that is carried out again numbers its shots anew. If the line of its start comes
        # late, shots of this plan are known already: further events of them are no new faults.
        if isinstance(event, ev.ChaosStarted | ev.LaunchStarted) and event.time >= self._last_time:
            self._shots.clear()
        if isinstance(event, ev.LaunchStarted):
            # The line of the launch may be read after the lines of its first faults.
            name_of: dict[int, str] = {}
            for fault in self.injected:
                if fault.time_us >= event.time_us:
                    name_of[fault.number] = fault.name
            self.by_kind = Counter(name_of.values())
        if isinstance(event, ev.FaultUndone | ev.LighthouseRestarted):
            for fault in self._lasting.pop(_lasting_key(event), []):
                fault.undone_us = event.time_us
        if not isinstance(event, ev.FaultInjected):
            return False
        self._last_time = event.time
        shot = (event.fault, event.seed, event.shot)
        is_new = event.shot is None or shot not in self._shots
        if is_new:
            self.by_kind[event.fault] += 1
            self._num_faults += 1
            self._shots[shot] = self._num_faults
        self._add(event, self._shots[shot])
        return is_new

    def _add(self, event: ev.FaultInjected, number: int) -> None:
        target = event.target
        seconds = seconds_of(event)
        planned_end_us = None
        if seconds:
            planned_end_us = event.time_us + round(seconds * 1e6)
        fault = RecordedFault(
            time_us=event.time_us,
            name=event.fault,
            slot=target.replica,
            rank=target.rank,
            lighthouse=target.lighthouse,
            shot=event.shot,
            number=number,
            undone_us=planned_end_us,
        )
        self.injected.append(fault)
        self._lasting[_lasting_key(event)].append(fault)


def expected_outcome(fault: str) -> str:
    """Return the expected outcome for the target of a fault with this name:
    `titan_ft.faults.fault.Outcome`.
    """
    # Loaded late: a run without faults loads nothing that breaks runs.
    from titan_ft.faults.catalogue import read_outcome

    return read_outcome(fault)


def seconds_of(fault: ev.FaultInjected) -> float:
    """Return how long a fault lasts by its parameters; 0 where they do not say."""
    params = fault.params or {}
    seconds = params.get("seconds")
    if not isinstance(seconds, int | float):
        return 0.0
    return seconds


def _lasting_key(event: ev.FaultInjected | ev.FaultUndone | ev.LighthouseRestarted) -> object:
    """Return a key that a fault shares with the event of its end. All lighthouses share one."""
    if isinstance(event, ev.LighthouseRestarted) or event.target.lighthouse:
        return "lighthouse"
    return event.fault, event.shot, event.target
