# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether, and when, a replica group that ended is started again, and when that helps no group of a run."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from titan_ft.run.error_file import WorkerError, kind_of
from titan_ft.run.events import Drained, FaultInjected, ReplicaGaveUp, StepCommitted, WorkerExited
from titan_ft.run.tail import EventTail

CONFIG_ERROR_CODE = 2
"""Exit status of a worker whose configuration is wrong: starting it again cannot help."""
FINAL_CODE = 3
"""Exit status of a worker whose group must not come back by itself: its state diverged, or another took its place."""
HOST_SUSPECTED_CODE = 4
"""Exit status of a group's agent that leaves a suspected host: the group should go on elsewhere."""
WINDOW_SECONDS = 24 * 3600.0
"""Restarts before it are forgotten when the group commits: a run of weeks does not end of what has happened in all."""
MAX_SAME_ENDS = 3
"""Ends of a group in a row with the same exception, no step committed between, after which it is not started again."""
MAX_SAME_ROUNDS = 2
"""How often all groups may end with the same exception at the same step."""
CRASH_LOOP = "the same exception"
"""Begins the reason of a group that is not started again because of a crash loop."""


def backoff_seconds(streak: int) -> float:
    """Return the wait before a restart that follows `streak` restarts none of which got the group going.

    0 for the first (a group that was killed should be back at once), then 0.5 s, doubling up to 10 s.
    """
    return 0.0 if streak == 0 else min(0.5 * 2.0 ** min(streak - 1, 30), 10.0)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt of a group ended."""

    code: int
    """Exit status of the worker whose end caused the others' (negative: the signal)."""
    alive_seconds: float
    committed: bool = False
    """Whether it contributed to a step."""
    error: WorkerError | None = None
    """The exception of that worker; None where a signal ended it, or it left none."""
    disturbed: bool = False
    """Whether a fault was injected into it, so that its end says nothing about the run."""


class AttemptEvents:
    """What the workers of one attempt of a group have announced.

    Args:
        pattern: of the names of their event files.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._tail = EventTail(folder, StepCommitted, Drained, FaultInjected, pattern=pattern, from_start=True)
        self.committed = False
        """Whether the group contributed to a step."""
        self.drained = False
        """Whether it was asked to leave, and did."""
        self.disturbed = False
        """Whether a fault was injected into it."""

    def poll(self) -> None:
        """Take in what is new; call it every now and then, so that it is never much."""
        for event in self._tail.poll():
            match event:
                case StepCommitted():
                    self.committed = self.committed or event.own_tokens > 0
                case Drained():
                    self.drained = True
                case FaultInjected():
                    self.disturbed = True


def exit_status(code: int) -> int:
    """Return the exit status of who gives a group up, by that of the worker that was the cause."""
    return code if code in (CONFIG_ERROR_CODE, FINAL_CODE) else 1


@dataclass
class RestartPolicy:
    """Count the restarts of one group. A group that got going (see `decide`) is restarted without delay again."""

    max_restarts: int
    """Restarts within `WINDOW_SECONDS`, or since the last attempt that contributed to a step if that is longer."""
    healthy_seconds: float = 60.0
    """An attempt that lived this long had got going."""
    clock: Callable[[], float] = time.monotonic
    streak: int = 0
    """Restarts since the last attempt that had got going."""
    _restarts: deque[float] = field(default_factory=deque)
    _last_kind: str = ""
    _num_same: int = 0
    """Ends with the exception `_last_kind` since the last commit, and since the last end with another one."""

    def decide(self, end: AttemptEnd) -> float | str:
        """Return the seconds to wait before the group is started again, or why it is not.

        A group that is killed again and again but commits in between is no crash loop, however short its lives are.
        """
        if end.code == CONFIG_ERROR_CODE:
            return "the configuration is wrong (exit status 2); it is not started again"
        if end.code == FINAL_CODE:
            return "the group must not come back by itself (exit status 3); see its log"
        if self._count_same(end) >= MAX_SAME_ENDS:
            return f"{CRASH_LOOP} {self._num_same} times in a row, and no step committed between"
        # Not without a commit: attempts that each wait long for what never comes (a file server) would go on for ever.
        while end.committed and self._restarts and self._restarts[0] <= self.clock() - WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return f"no restart left (--max-restarts {self.max_restarts} within {WINDOW_SECONDS / 3600:g} hours)"
        if end.committed or end.alive_seconds >= self.healthy_seconds:
            self.streak = 0
        delay = backoff_seconds(self.streak)
        self._restarts.append(self.clock())
        self.streak += 1
        return delay

    def _count_same(self, end: AttemptEnd) -> int:
        """Return how often in a row the group has ended with this exception; 0 for an end that does not count.

        A kill, an injected fault and an error that may go by itself neither count nor end the row: they do not say
        that the exception before them is gone.
        """
        if end.committed:
            self._last_kind, self._num_same = "", 0
        if end.error is None or end.error.transient or end.disturbed:
            return 0
        same = end.error.kind == self._last_kind
        self._last_kind, self._num_same = end.error.kind, self._num_same + 1 if same else 1
        return self._num_same


class CommonEnd:
    """Notice, in the launcher, that starting groups again does not help the run."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, str]] = {}
        """By group: step and exception of its last end, since the last time that these were the same for all."""
        self._attempts: dict[int, int] = {}
        """By group: the attempt of which the first end, that of the cause, was seen."""
        self._rounds: Counter[tuple[int, str]] = Counter()

    def observe_exit(self, event: WorkerExited, step: int, groups: Collection[int]) -> str:
        """Take the end of a worker; return why the run is to stop, or nothing.

        Groups that end alike and lose the state with it come back to that step from a checkpoint, and end there again.

        Args:
            step: last step that its group has committed.
            groups: those that are still in the run.
        """
        if event.stopped or self._attempts.get(event.replica) == event.attempt:
            return ""
        self._attempts[event.replica] = event.attempt
        # Who is not started again anyway says nothing of starts: others may yet save the last step that it could not.
        if event.error is None or event.transient or event.code in (CONFIG_ERROR_CODE, FINAL_CODE):
            return ""
        self._latest[event.replica] = end = (step, kind_of(event.error))
        if {self._latest.get(replica) for replica in groups} != {end}:
            return ""
        self._latest = {}
        self._rounds[end] += 1
        if self._rounds[end] < MAX_SAME_ROUNDS:
            return ""
        where = f"after step {step}" if step else "before any step"
        return f"all groups end with {event.error} ({where}, {self._rounds[end]} times; see {event.log})"

    @staticmethod
    def observe_loss(event: ReplicaGaveUp, any_committed: bool) -> str:
        """Take the end of a group that is not started again; return why the run is to stop, or nothing.

        As long as no group has made a step nobody loses anything by an end, and whoever has started the run is there to
        see it. Later on the other groups train on.
        """
        if any_committed or CRASH_LOOP not in event.reason:
            return ""
        return f"replica {event.replica} ends with {event.error} ({event.reason} by any group; see {event.log})"


def may_replace(code: int | None, gave_up: bool) -> bool:
    """Tell whether a spare may take the place of a group, by how its supervisor ended.

    Another process would do no better where the config is wrong or the state diverged. A supervisor that was killed
    did not get to say that it gave up.
    """
    if code is None or code in (0, CONFIG_ERROR_CODE, FINAL_CODE):
        return False
    return gave_up or code < 0
