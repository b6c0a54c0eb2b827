# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which other groups of the job are *lost*: silent for too long. No clock, no thread.

If a worker dies, its group closes its connections, and the group's agent restarts it within
seconds. If a host is lost, or if a group is frozen or cut off, nothing is closed and nothing is
restarted. The other groups would train on, and no line in a log would report the missing group. So
every group measures how long each other group has been silent. Two things end a silence: a
heartbeat of the group, which the lighthouse shows on its status page, and an update in which the
group takes part.

`RollCall` (membership/roll_call.py) calls it: `commit` after each update, and `find_changes` every
few seconds with the heartbeats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

MIN_SILENCE_SECONDS = 10.0
"""A shorter silence is never reported: a restart by an agent takes a few seconds."""
MIN_SILENT_STEPS = 3
"""A silence of fewer usual steps is not reported: long steps give a restart enough time."""
MIN_SILENT_HEARTBEATS = 4
"""A silence of fewer heartbeat timeouts is not reported: the timeout may be a minute."""
_REPORT_AGAIN_FACTOR = 4.0
"""A lost group is reported again when its silence is this many times as long as at the last report.

A group that is being restarted is silent as well, so the reader of the reports
(`GroupFold.find_silence`) ignores a report during a restart. If the host is lost during that
restart, only another report shows the loss.
"""
_NUM_RECENT_STEPS = 8  # The usual duration of a step is the median of so many steps.


def silence_limit(step_seconds: float, heartbeat_timeout: float) -> float:
    """Return the seconds of silence after which a group is lost.

    Args:
        step_seconds: duration of a usual step; 0 if not known yet.
        heartbeat_timeout: seconds after which the lighthouse gives a group up.
    """
    steps_limit = MIN_SILENT_STEPS * step_seconds
    heartbeats_limit = MIN_SILENT_HEARTBEATS * heartbeat_timeout
    return max(MIN_SILENCE_SECONDS, steps_limit, heartbeats_limit)


@dataclass(frozen=True)
class Lost:
    """A group is lost."""

    slot: int
    seconds: float
    """Length of the silence so far."""
    last_step: int | None
    """The last update in which the group took part; None if this group saw none."""


@dataclass(frozen=True)
class Back:
    """A group that was reported as lost is heard again."""

    slot: int
    seconds: float
    """Length of the silence."""


@dataclass
class _Group:
    """One other group. Times are by this host's monotonic clock, unless stated otherwise."""

    heard: float
    """Time of the latest heartbeat or update."""
    last_step: int | None = None
    """The last update in which the group took part; None if this group saw none."""
    reported_silence: float = 0.0
    """Seconds of silence at the latest report; 0 if the group is not lost."""
    heard_before_report: float = 0.0
    """The value of `heard` at the latest report, at which the reported silence began."""
    process_started: float = 0.0
    """Unix seconds at which the group's newest process started; 0 if not known."""
    trains_since: float = -math.inf
    """Time of the first update of the group's newest process.

    -inf for the first process that this group has heard of: it may have trained for long. +inf for
    a process that was started later, and has not taken part in an update yet.
    """


class Roll:
    """Finds lost groups. Times are seconds of this host's monotonic clock.

    Not thread-safe: `RollCall` holds a lock.

    Args:
        own: slot of this group.
        heartbeat_timeout: seconds after which the lighthouse gives a group up.
    """

    def __init__(self, own: int, heartbeat_timeout: float) -> None:
        self._own = own
        self._heartbeat_timeout = heartbeat_timeout
        self._groups: dict[int, _Group] = {}
        self._recent_step_seconds: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._last_commit: float | None = None

    @property
    def limit(self) -> float:
        """Seconds of silence after which a group is lost, by the duration of the latest steps."""
        usual = 0.0
        if self._recent_step_seconds:
            usual = median(self._recent_step_seconds)
        return silence_limit(usual, self._heartbeat_timeout)

    def commit(self, step: int, slots: Collection[int], now: float, num_steps: int = 1) -> None:
        """Note which groups took part in update `step`, made of `num_steps` local steps."""
        if self._last_commit is not None:
            self._recent_step_seconds.append((now - self._last_commit) / max(1, num_steps))
        self._last_commit = now
        for slot in slots:
            if slot == self._own:
                continue
            group = self._groups.setdefault(slot, _Group(now))
            group.heard = max(group.heard, now)
            group.last_step = step
            group.trains_since = min(group.trains_since, now)

    def restart_clocks(self, now: float) -> None:
        """Let every silence begin now, because this process could hear no group for a while.

        A group that was reported as lost stays lost until it is heard again.
        """
        for group in self._groups.values():
            if not group.reported_silence:
                group.heard = now

    def find_changes(
        self,
        heartbeat_ages: Mapping[int, float],
        left: Collection[int],
        now: float,
        started: Mapping[int, float] | None = None,
    ) -> list[Lost | Back]:
        """Return which groups are lost since the last call, and which are back.

        Args:
            heartbeat_ages: by slot, seconds since the last heartbeat that the lighthouse received.
            left: slots of groups that left in order; their silence is no loss.
            started: by slot, Unix seconds at which the group's newest process started.
        """
        limit = self.limit
        self._note_heartbeats(heartbeat_ages, started or {}, now, limit)
        changes: list[Lost | Back] = []
        for slot, group in sorted(self._groups.items()):
            silence = now - group.heard
            is_lost = group.reported_silence > 0
            report_due = max(limit, _REPORT_AGAIN_FACTOR * group.reported_silence)
            if slot in left:
                group.reported_silence = 0.0
            # A group is back only if its silence is short. A newer heartbeat than before is no
            # proof: on a busy host, this process may read the page seconds late, and then the last
            # heartbeat of a dead group seems to be newer than at the read before.
            elif is_lost and silence < limit / 2:
                changes.append(Back(slot, group.heard - group.heard_before_report))
                group.reported_silence = 0.0
            elif silence >= report_due and self._must_report(group, heartbeat_ages, limit):
                changes.append(Lost(slot, silence, group.last_step))
                group.reported_silence = silence
                group.heard_before_report = group.heard
        return changes

    def _note_heartbeats(
        self,
        ages: Mapping[int, float],
        started: Mapping[int, float],
        now: float,
        limit: float,
    ) -> None:
        for slot, age in ages.items():
            if slot == self._own:
                continue
            # The status page shows dead groups for ever. Ignore a group that was lost before this
            # group came.
            if slot not in self._groups and age >= limit:
                continue
            group = self._groups.setdefault(slot, _Group(now - age))
            group.heard = max(group.heard, now - age)
            _note_process(group, started.get(slot, 0.0))

    def _must_report(self, silent: _Group, ages: Mapping[int, float], limit: float) -> bool:
        """Return True unless a living group with a lower slot reports the silent group.

        One report for the whole job is enough. A group that was restarted during the silence has
        never heard the silent group, and does not report it. So do not rely on such a group.
        """
        for slot, age in ages.items():
            group = self._groups.get(slot)
            if group is None or slot >= self._own:
                continue
            lives = age < limit
            if lives and _has_heard(group, silent):
                return False
        return True


def _note_process(group: _Group, started: float) -> None:
    """Note when the process that sends a group's heartbeats started."""
    is_restarted = group.process_started > 0 and started > group.process_started
    if is_restarted:
        group.trains_since = math.inf
    group.process_started = max(group.process_started, started)


def _has_heard(group: _Group, silent: _Group) -> bool:
    """Return True if the current process of `group` trained while `silent` was still heard."""
    return group.last_step is not None and group.trains_since <= silent.heard
