# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether and when an ended replica group is restarted, and when no restart helps the run.

An *attempt* is one start of a group's workers, or of a group's agent. A group's agent applies
`RestartPolicy` to its workers (`group/agent.py`), the launcher to its agents (`agent_keeper.py`,
`local.py`). The launcher alone uses `CommonEnd`. All calls are on the main thread of the process.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from titan_ft.history.fold.group import GroupFold
from titan_ft.history.fold.run import RunFold
from titan_ft.launch.group.own_end import (
    EARLY_END,
    cause_of_end,
    describe_code,
    exit_code_of,
    may_come_from_host,
)
from titan_ft.run.appender import any_is_cut
from titan_ft.run.error_file import WorkerError
from titan_ft.run.events import (
    LIGHTHOUSE_ERROR,
    Drained,
    FaultInjected,
    LaunchStarted,
    ReplicaGaveUp,
    StepCommitted,
    WorkerExited,
)
from titan_ft.run.log import decode, open_lines
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail, last_error_line

CONFIG_ERROR_CODE = 2
"""Exit status of a worker whose configuration is wrong: starting it again cannot help."""
FINAL_CODE = 3
"""Exit status of a worker whose group must not come back by itself: its state diverged, or another
took its place.
"""
HOST_SUSPECTED_CODE = 4
"""Exit status of a group's agent that leaves a suspected host: the group should go on elsewhere."""
AGENT_CRASHED_CODE = 5
"""Exit status of an agent that crashed. Its group has not been given up."""
WINDOW_SECONDS = 24 * 3600.0
"""Once the group has committed, restarts longer ago than this no longer count.

Otherwise a run of weeks would use up its restarts.
"""
MAX_SAME_ENDS = 3
"""A group is given up after this many ends in a row with the same cause, without progress."""
MAX_OWN_ENDS_FACTOR = 2
"""A group is also given up after this many times as many ends in a row with any causes, without
progress.

Otherwise two causes in turn would use up all 100 restarts, in 19 minutes.
"""
MAX_SAME_ROUNDS = 2
"""The run stops when all groups have ended this often with the same cause after the same step."""
MAX_NETWORK_ENDS = 3
"""A group is given up after this many network errors before the run's first step, if
`NETWORK_SECONDS` have passed as well."""
NETWORK_SECONDS = 120.0
"""Time for a network to come up, from the start of a group's first attempt.

A file server or a lighthouse may need a minute to start, and three attempts can be over within
seconds. A network that is missing after three errors and this time has a wrong name or is cut off.
A restart does not help.
"""

# Why a group is given up: `ReplicaGaveUp.cause`.
CONFIG = "config"
FINAL = "final"
CRASH_LOOP = "crash loop"
NETWORK = "network"
RESTARTS = "restarts"
HOST = "host"


def backoff_seconds(streak: int) -> float:
    """Return the seconds before a restart after `streak` restarts without success.

    0 for the first (a killed group should be back at once), then 0.5 s, doubling up to 10 s.
    """
    if streak == 0:
        return 0.0
    # Bounded, because a power of a large number would overflow.
    num_doublings = min(streak - 1, 30)
    return min(0.5 * 2.0**num_doublings, 10.0)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt of a group ended."""

    code: int
    """Exit status of the worker whose end caused the other ends (negative: the signal)."""
    alive_seconds: float
    committed: bool = False
    """True if the attempt contributed to a step."""
    error: WorkerError | None = None
    """The exception of that worker; None if a signal ended it, or if it left none."""
    disturbed: bool = False
    """True if a fault was injected into the attempt, or if its events are cut.

    The end then shows nothing about the run.
    """
    step: int | None = None
    """Last step to which the attempt contributed; None without one, or if unknown."""

    @property
    def cause(self) -> str:
        """Text that ends with the same cause share; empty if the end does not count."""
        if self.disturbed or (self.error is not None and self.error.transient):
            return ""
        return cause_of_end(self.code, None if self.error is None else self.error.text)

    @property
    def is_network_error(self) -> bool:
        """True if a network, a file server or the lighthouse did not answer."""
        return self.error is not None and self.error.network and not self.disturbed


@dataclass(frozen=True)
class NoRestart:
    """A group is not restarted."""

    cause: str
    """One of the causes above."""
    reason: str
    """The reason, for people."""


class AttemptEvents:
    """Follows the workers of one attempt of a group. The agent's only thread calls all methods."""

    def __init__(self, paths: RunPaths, slot: int, attempt: int) -> None:
        self._folder = paths.events
        self._pattern = paths.workers_pattern(slot, attempt)
        # Other events do not matter for a restart, and are not decoded.
        wanted = (StepCommitted, Drained, FaultInjected)
        self._tail = EventTail(self._folder, *wanted, pattern=self._pattern, from_start=True)
        self._fold = RunFold(slot + 1)
        self._slot = slot
        self._has_left = False

    @property
    def step(self) -> int | None:
        """The last step to which the group contributed; None without any."""
        contributed = self._group.contributed
        return None if contributed is None else contributed[1]

    @property
    def committed(self) -> bool:
        """Whether the group contributed to a step."""
        return self._group.contributed is not None

    @property
    def drained(self) -> bool:
        """Whether the group was asked to leave, and did."""
        return self._has_left or self._group.state == "left"

    @property
    def disturbed(self) -> bool:
        """Whether a fault was injected into the attempt, or may have been.

        On a full disk the events of a worker wait in its memory, and a SIGKILL destroys them. A
        group whose commits could not be seen must not be given up for attempts without success.
        """
        return self._group.attempt_with_fault is not None or self.is_cut

    @property
    def is_cut(self) -> bool:
        """True if events of the attempt are missing. Only valid after its end."""
        return any_is_cut(self._folder, self._pattern)

    @property
    def _group(self) -> GroupFold:
        return self._fold.groups[self._slot]

    def note_leave(self) -> None:
        """Record an orderly leave that the exit status shows; its event may be missing."""
        self._has_left = True

    def poll(self) -> None:
        """Process new events. Call this regularly, so that they are few."""
        for event in self._tail.poll():
            self._fold.observe(event)


def has_trained(paths: RunPaths) -> bool:
    """True if any group of the run has made a step.

    In a run of `titan-ft launch`, steps of earlier launches do not count. Groups that are started
    one by one share one history without launches.

    Each worker's file is read up to the first commit only. Agents on a cluster call this, and the
    events of all groups may be gigabytes.
    """
    launches = EventTail(
        paths.events, LaunchStarted, pattern="launcher-*.jsonl", from_start=True
    ).poll()
    since = max((event.time for event in launches), default=0.0)
    return any(_has_commit(path, since) for path in paths.events.glob(paths.workers_pattern()))


def _has_commit(path: Path, since: float) -> bool:
    """True if the first step in a worker's events is not older than `since` (Unix seconds)."""
    try:
        with open_lines(path) as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # the line may be damaged
                    event = decode(line, StepCommitted)
                    if event is not None:
                        return event.time >= since
    except OSError:
        # A file server may have no answer right now.
        pass
    return False


def exit_status(code: int) -> int:
    """Return the agent's exit status when it gives a group up.

    Args:
        code: exit status of the worker that was the cause.
    """
    return code if code in (CONFIG_ERROR_CODE, FINAL_CODE) else 1


@dataclass
class RestartPolicy:
    """Counts the restarts of one group, and decides about the next restart.

    `Agent` has a policy for the workers of its group, and `AgentKeeper` has one for the agents.
    Each calls `decide` on its only thread, once for each end. After an attempt that committed, or
    that lived for `healthy_seconds`, the next restart has no delay.
    """

    max_restarts: int
    """Restarts within `WINDOW_SECONDS`, or since the last attempt that contributed to a step if
    that is longer.
    """
    healthy_seconds: float = 60.0
    """An attempt that lived this long counts as a success."""
    clock: Callable[[], float] = time.monotonic
    has_run_trained: Callable[[], bool] = lambda: False
    """Returns True if any group of the run has made a step; called after a network error only."""
    host_deaths: int = 0
    """Deaths on a host after which the group leaves it (`suspect`); 0 = it never does."""
    streak: int = 0
    """Restarts since the last success."""
    _restarts: deque[float] = field(default_factory=deque)
    _last_cause: str = ""
    _last_step: int | None = None
    """Last step of the latest attempt that contributed to one."""
    _num_same: int = 0
    """Ends in a row with the cause `_last_cause`, without progress."""
    _num_ends: int = 0
    """Ends in a row that count, with any cause, without progress."""
    _num_network: int = 0
    """Ends with a network error."""
    _first_start: float | None = None
    """When the first attempt began, by `clock`."""
    _run_has_trained: bool = False
    """True if the run is known to have made a step."""

    def decide(self, end: AttemptEnd) -> float | NoRestart:
        """Return the seconds to wait before the group's restart, or why it is not restarted.

        A group that is killed repeatedly but commits in between is no crash loop, however short its
        attempts are.
        """
        if self._first_start is None:
            self._first_start = self.clock() - end.alive_seconds
        if end.code == CONFIG_ERROR_CODE:
            return NoRestart(
                CONFIG, "the configuration is wrong (exit status 2); it is not started again"
            )
        if end.code == FINAL_CODE:
            return NoRestart(
                FINAL, "the group must not come back by itself (exit status 3); see its log"
            )
        hopeless = self._find_loop(end) or self._find_dead_network(end)
        if hopeless is not None:
            return hopeless
        # Forget old restarts only after a commit. Otherwise attempts that each wait long for a file
        # server that never comes would go on for ever.
        if end.committed:
            self._forget_old_restarts()
        if len(self._restarts) >= self.max_restarts:
            hours = WINDOW_SECONDS / 3600
            return NoRestart(
                RESTARTS,
                f"no restart left (--max-restarts {self.max_restarts} within {hours:g} hours)",
            )
        if end.committed or end.alive_seconds >= self.healthy_seconds:
            self.streak = 0
        delay = backoff_seconds(self.streak)
        self._restarts.append(self.clock())
        self.streak += 1
        return delay

    def _forget_old_restarts(self) -> None:
        oldest = self.clock() - WINDOW_SECONDS
        while self._restarts and self._restarts[0] <= oldest:
            self._restarts.popleft()

    def _find_loop(self, end: AttemptEnd) -> NoRestart | None:
        """Return why the group is given up if it ends repeatedly for one cause, else None.

        Commits in between are progress, unless they lead to the same step each time: then the group
        continued from the same checkpoint, and met the same end.

        A kill, an injected fault and a transient error neither count nor end the row, because they
        do not show that the earlier cause is gone.
        """
        is_same_step = end.step is not None and end.step == self._last_step
        if end.committed and not is_same_step:
            self._last_cause = ""
            self._last_step = end.step
            self._num_same = 0
            self._num_ends = 0
        if not end.cause:
            return None
        if end.cause != self._last_cause:
            self._num_same = 0
        self._num_same += 1
        self._num_ends += 1
        self._last_cause = end.cause
        where = "and no step committed between"
        if end.committed:
            where = f"each time after step {end.step}"
        if self._num_ends >= MAX_OWN_ENDS_FACTOR * self._most_crashes:
            return NoRestart(
                CRASH_LOOP, f"{self._num_ends} ends of its own in a row, without progress"
            )
        if self._num_same < self._most_ends(end):
            return None
        what = "the same exception"
        if end.error is None:
            what = f"the same end ({describe_code(end.code)})"
        elif end.code == 0:
            what = f"the same end ({EARLY_END})"
        return NoRestart(CRASH_LOOP, f"{what} {self._num_same} times in a row, {where}")

    def _most_ends(self, end: AttemptEnd) -> int:
        """Return how many ends like this one make a crash loop.

        The host may be the cause of a crash. If the group leaves suspected hosts, it must die there
        often enough to do so before it is given up.
        """
        text = type_name = None
        if end.error is not None:
            text = end.error.text
            type_name = end.error.type_name
        if may_come_from_host(text, type_name):
            return self._most_crashes
        return MAX_SAME_ENDS

    @property
    def _most_crashes(self) -> int:
        return max(MAX_SAME_ENDS, self.host_deaths + 1)

    def _find_dead_network(self, end: AttemptEnd) -> NoRestart | None:
        """Return why the group is given up if there is no network, else None.

        This applies only before the run's first step: later the group may be a late one that the
        training others wait for.
        """
        if end.committed:
            self._run_has_trained = True
        if not end.is_network_error or self._run_has_trained:
            return None
        self._run_has_trained = self.has_run_trained()
        if self._run_has_trained:
            return None
        assert self._first_start is not None, "`decide` has set it"
        self._num_network += 1
        seconds = self.clock() - self._first_start
        if self._num_network < MAX_NETWORK_ENDS or seconds < NETWORK_SECONDS:
            return None
        return NoRestart(
            NETWORK,
            f"{self._num_network} network errors within {seconds:.0f} s, and no step committed",
        )


class CommonEnd:
    """Notices that restarts of groups do not help the run. `LocalRun` calls it at each event."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, str]] = {}
        """Step and cause of each group's latest end. Emptied when all groups have ended alike."""
        self._rounds: Counter[tuple[int, str]] = Counter()
        """How often all groups have ended alike, by step and cause."""

    def observe_exit(self, event: WorkerExited, step: int, groups: Collection[int]) -> str:
        """Process a worker's end that ended an attempt; return why the run must stop, or "".

        Groups that end alike and lose the state return to that step from a checkpoint, and end
        there again.

        Args:
            event: `GroupFold.failed_by` of the group.
            step: last committed step of the group.
            groups: groups that are still in the run.
        """
        # A group that is not restarted anyway does not show that restarts are useless. Other groups
        # may still save the last step.
        if event.transient or event.code in (CONFIG_ERROR_CODE, FINAL_CODE):
            return ""
        cause = cause_of_end(exit_code_of(event), event.error)
        if not cause:
            return ""
        end = (step, cause)
        self._latest[event.replica] = end
        latest_ends = {self._latest.get(slot) for slot in groups}
        if latest_ends != {end}:
            return ""
        self._latest = {}
        self._rounds[end] += 1
        if self._rounds[end] < MAX_SAME_ROUNDS:
            return ""
        where = f"after step {step}" if step else "before any step"
        return (
            f"all groups end with {_describe_cause(event)} ({where}, {self._rounds[end]} times; "
            f"see {event.log})"
        )

    @staticmethod
    def observe_loss(event: ReplicaGaveUp, any_committed: bool) -> str:
        """Process the end of a group that is not restarted; return why the run must stop, or "".

        Before any group has made a step an end loses nothing, and the user who started the run is
        there to see it. Later the other groups train on.
        """
        if any_committed or event.cause not in (CRASH_LOOP, NETWORK):
            return ""
        line = (
            f"group {event.replica} ends with {event.error} ({event.reason} by any group; see "
            f"{event.log})"
        )
        # An error of the lighthouse names its own remedy.
        if event.cause == NETWORK and event.error_kind != LIGHTHOUSE_ERROR:
            line += (
                "; check the network, or name data that are on this host (training.dataset_path)"
            )
        return line


def _describe_cause(event: WorkerExited) -> str:
    """Return the exception that ended a worker, or else its signal or exit status.

    The last line of the worker's log follows a signal or an exit status.
    """
    if event.error is not None:
        return event.error
    name = describe_code(exit_code_of(event))
    if event.log is None:
        return name
    return f"{name} ({last_error_line(Path(event.log))})"


def may_replace(code: int | None, gave_up: bool) -> bool:
    """True if a spare may replace a group, by how its agent ended.

    A new process would not help if the config is wrong or the state diverged.
    """
    return gave_up and code not in (None, 0, CONFIG_ERROR_CODE, FINAL_CODE)
