# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which groups of the job are lost: not heard of for so long that somebody should look; pure.

A group that dies closes its connections, and its agent restarts it within seconds. A lost host, a frozen group or a
group that is cut off says nothing of itself, and the others train on without it. So each survivor calls the roll: by
the heartbeats on the lighthouse's page and by who took part in its own steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

LEAST_SECONDS = 10.0
"""A group that is restarted is usually heard of again by then: detection and fork take a second or two."""
STEPS = 3
"""Usual steps. Where a step takes a minute nobody must look sooner: a restart costs less than the steps do."""
BEATS = 4
"""Heartbeat timeouts, where somebody has made these long."""
_REPEAT = 4.0
"""A group that stays silent is reported again when it was silent so many times longer than at the last report.

At the first report its agent may have been restarting it, so that it was not lost. Its host may be lost since."""
_RECENT_STEPS = 8


def silence_limit(step_seconds: float, beat_seconds: float) -> float:
    """Return after how many seconds of silence a group is lost.

    Args:
        step_seconds: what a step usually takes; 0 if that is not known yet.
        beat_seconds: the heartbeat timeout.
    """
    return max(LEAST_SECONDS, STEPS * step_seconds, BEATS * beat_seconds)


@dataclass(frozen=True)
class Lost:
    """A group was not heard of for `seconds`; it took part in `last_step` last, None if this is not known."""

    slot: int
    seconds: float
    last_step: int | None


@dataclass(frozen=True)
class Back:
    """A group that was reported as lost is heard of again, after `seconds`."""

    slot: int
    seconds: float


@dataclass
class _Group:
    heard: float
    """When it was last heard of."""
    last_step: int | None = None
    reported: float = 0.0
    """Seconds of silence at the last report; 0 while it is not lost."""
    silent_since: float = 0.0
    """When it was last heard of before that report."""
    started: float = 0.0
    """Unix seconds at which its process began; 0 if that is not known."""
    trains_since: float = -math.inf
    """Since when this process of it takes part; infinite until it does."""


class Roll:
    """What one group knows of the others. All times are seconds of its monotonic clock.

    Args:
        own: slot of this group.
        beat_seconds: the heartbeat timeout.
    """

    def __init__(self, own: int, beat_seconds: float) -> None:
        self._own, self._beat = own, beat_seconds
        self._groups: dict[int, _Group] = {}
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._committed: float | None = None

    @property
    def limit(self) -> float:
        """Seconds of silence after which a group is lost, as of now."""
        return silence_limit(median(self._steps) if self._steps else 0.0, self._beat)

    def commit(self, step: int, slots: Collection[int], now: float, num_steps: int = 1) -> None:
        """Note the groups that took part in an update, which is one of `num_steps` steps."""
        if self._committed is not None:
            self._steps.append((now - self._committed) / max(1, num_steps))
        self._committed = now
        for slot in slots:
            if slot != self._own:
                group = self._groups.setdefault(slot, _Group(now))
                group.heard, group.last_step = max(group.heard, now), step
                group.trains_since = min(group.trains_since, now)

    def begin_anew(self, now: float) -> None:
        """Give all groups the whole time again, because this group could not have heard of them for a while."""
        for group in self._groups.values():
            if not group.reported:
                group.heard = now

    def call(
        self, ages: Mapping[int, float], left: Collection[int], now: float, started: Mapping[int, float] | None = None
    ) -> list[Lost | Back]:
        """Return what there is to report.

        Args:
            ages: seconds since the last heartbeat of each group that the lighthouse knows.
            left: slots of groups that left in order: they may be silent.
            started: Unix seconds at which the newest process of each group began.
        """
        limit = self.limit
        for slot, age in ages.items():
            if slot != self._own and (slot in self._groups or age < limit):
                group = self._groups.setdefault(slot, _Group(now - age))
                group.heard = max(group.heard, now - age)
                self._note_start(group, (started or {}).get(slot, 0.0))
        found: list[Lost | Back] = []
        for slot, group in sorted(self._groups.items()):
            silent = now - group.heard
            if slot in left:
                group.reported = 0.0
            elif group.reported and silent < limit / 2:
                # Not by a newer heartbeat alone: the age on the lighthouse's page is a little old when it is
                # read, on a busy host by seconds, so that a dead group's last heartbeat seems to move.
                found.append(Back(slot, group.heard - group.silent_since))
                group.reported = 0.0
            elif silent >= max(limit, _REPEAT * group.reported) and self._reports(group, ages, limit):
                group.reported, group.silent_since = silent, group.heard
                found.append(Lost(slot, silent, group.last_step))
        return found

    @staticmethod
    def _note_start(group: _Group, started: float) -> None:
        """Note which process of a group heartbeats: a new one has not taken part yet."""
        if group.started and started > group.started:
            group.trains_since = math.inf
        group.started = max(group.started, started)

    def _reports(self, silent: _Group, ages: Mapping[int, float], limit: float) -> bool:
        """Tell whether this group is the lowest one that lives and knows of the silent group: one report is enough.

        A group that was restarted since the silent one was last heard of has never seen it, and reports nothing. Where
        the others left the report to it, nobody made one.
        """
        return not any(
            slot < self._own and age < limit and slot in self._groups and self._knows(self._groups[slot], silent)
            for slot, age in ages.items()
        )

    @staticmethod
    def _knows(group: _Group, silent: _Group) -> bool:
        """Tell whether the process that a group has now took part while the silent group was heard of."""
        return group.last_step is not None and group.trains_since <= silent.heard
