# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether and when an ended replica group is restarted, and when no restart helps the run.

`RestartPolicy` decides about one group. The group's agent asks after each attempt, which is one
start of all workers of the group. The launcher asks in the same way after each unexpected death of
the agent. The rules apply in this order:

1. After exit status 2 (wrong config) or 3 (must not come back), the group is not restarted. Nor is
   it after the lighthouse has refused its token: the worker has waited for another answer already.
2. After several own ends in a row without progress, a crash loop, the group is given up.
3. If no network answers before the run's first step, the group is given up.
4. If --max-restarts restarts are used up, the group is given up.
5. Otherwise the group is restarted. The first restart is at once, and each further restart waits
   longer, until an attempt succeeds: it commits a step, or lives for a minute.

An *own end* is an end that the worker itself caused: by an exception, a crash or an exit status. A
kill from outside, an injected fault and a transient error are no own ends. *Progress* means that
the attempt committed a step, and ended after another step than the attempt before.

`RunStopPolicy` decides whether the launcher stops the whole run, because restarts do not help. All
calls are on the main thread of the agent or of the launcher.
"""

from __future__ import annotations

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
    TOKEN_REFUSED_ERROR,
    Drained,
    FaultInjected,
    LaunchStarted,
    ReplicaGaveUp,
    StepCommitted,
    WorkerExited,
)
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventFileTail, EventTail, last_error_line

CONFIG_ERROR_CODE = 2
"""Exit status of a worker whose configuration is wrong: starting it again cannot help."""
NO_RESTART_CODE = 3
"""Exit status of a worker whose group must not come back by itself: its state diverged, or another
group took its place.
"""
HOST_SUSPECTED_CODE = 4
"""Exit status of a group's agent that leaves a suspected host: the group should go on elsewhere."""
AGENT_CRASHED_CODE = 5
"""Exit status of an agent that crashed. Its group has not been given up."""
WINDOW_SECONDS = 24 * 3600.0
"""After a commit of the group, its restarts longer ago than this no longer count.

Otherwise a run of weeks would use up its restarts.
"""
MAX_ENDS_OF_ONE_CAUSE = 3
"""A group is given up after this many own ends in a row with the same cause, without progress."""
ANY_CAUSE_FACTOR = 2
"""A group is also given up after this many times as many own ends in a row, whatever their causes.

Without this limit, two causes in turn would use up all 100 restarts. The pauses between them take
only 16 minutes.
"""
MAX_COMMON_ENDS = 2
"""The run stops when all groups have ended this often with the same cause after the same step."""
MAX_NETWORK_ERRORS = 3
"""A group is given up after this many network errors before the run's first step, if its first
attempt began `NETWORK_SECONDS` ago or earlier.
"""
NETWORK_SECONDS = 120.0
"""Time for a network to come up, from the start of a group's first attempt.

A file server or a lighthouse may need a minute to start, and three attempts can be over within
seconds. A network that is missing after three errors and this time has a wrong name or is cut off.
A restart does not help.
"""

# Why a group is given up: values of `ReplicaGaveUp.cause`.
CAUSE_CONFIG = "config"
CAUSE_FINAL = "final"
CAUSE_CRASH_LOOP = "crash loop"
CAUSE_NETWORK = "network"
CAUSE_RESTARTS = "restarts"
CAUSE_HOST = "host"


def backoff_seconds(num_failed_restarts: int) -> float:
    """Return the pause before a restart, by the number of restarts since the last success.

    The first restart is at once, because a killed group should be back soon. The second waits for
    0.5 s, and each further restart for twice as long, up to 10 s.
    """
    if num_failed_restarts == 0:
        return 0.0
    # Bounded, because a power of a large number would overflow.
    num_doublings = min(num_failed_restarts - 1, 30)
    return min(0.5 * 2.0**num_doublings, 10.0)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt of a group ended, or how the group's agent died."""

    code: int
    """Exit status of the worker that was the root cause, or of the agent (negative: the signal)."""
    alive_seconds: float
    """Time from the start of the attempt, or of the agent, to its end."""
    committed: bool = False
    """Whether the group contributed to a step in the attempt."""
    error: WorkerError | None = None
    """The exception of that worker; None if a signal ended the worker, or no exception is known."""
    disturbed: bool = False
    """Whether a fault was injected into the attempt, or its events are incomplete.

    The end is then no evidence of a crash loop.
    """
    step: int | None = None
    """Last step to which the group contributed in the attempt; None without one, or if unknown."""

    @property
    def own_cause(self) -> str:
        """Text that is equal for own ends with the same cause; empty if this is no own end."""
        if self.disturbed:
            return ""
        if self.error is None:
            return cause_of_end(self.code, None)
        if self.error.transient:
            return ""
        return cause_of_end(self.code, self.error.text)

    @property
    def is_token_refused(self) -> bool:
        """True if the lighthouse's gate refused the group's token."""
        return self.error is not None and self.error.type_name == TOKEN_REFUSED_ERROR

    @property
    def is_network_error(self) -> bool:
        """True if a network, a file server or the lighthouse did not answer."""
        return self.error is not None and self.error.network and not self.disturbed


@dataclass(frozen=True)
class NoRestart:
    """The decision that a group is not restarted."""

    cause: str
    """One of the constants `CAUSE_...`."""
    reason: str
    """The reason, for people."""


class AttemptEvents:
    """Reads the events of one attempt's workers while they run, and keeps the facts for a restart.

    The group's agent makes the object for each attempt, and calls all methods on its main thread.
    """

    def __init__(self, paths: RunPaths, slot: int, attempt: int) -> None:
        self._folder = paths.events
        self._pattern = paths.workers_pattern(slot, attempt)
        # Other events do not matter for a restart, and are not decoded.
        wanted = (StepCommitted, Drained, FaultInjected)
        self._tail = EventTail(self._folder, *wanted, pattern=self._pattern, from_start=True)
        # A fold needs the number of groups. Only this group has events here.
        self._fold = RunFold(slot + 1)
        self._slot = slot
        self._has_left_mark = False

    @property
    def step(self) -> int | None:
        """The last step to which the group contributed; None without any."""
        if self._group.contributed is None:
            return None
        _attempt, step = self._group.contributed
        return step

    @property
    def committed(self) -> bool:
        """Whether the group contributed to a step."""
        return self._group.contributed is not None

    @property
    def drained(self) -> bool:
        """Whether the group was asked to leave, and did."""
        return self._has_left_mark or self._group.state == "left"

    @property
    def disturbed(self) -> bool:
        """Whether a fault was injected into the attempt, or may have been.

        On a full disk the events of a worker wait in its memory, and a SIGKILL destroys them. The
        missing events may be commits, and a group that commits must not be given up.
        """
        return self._group.attempt_with_fault is not None or self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether events of the attempt are missing. Only valid after the attempt's end."""
        return any_is_cut(self._folder, self._pattern)

    @property
    def _group(self) -> GroupFold:
        return self._fold.groups[self._slot]

    def note_leave(self) -> None:
        """Record that a worker left, by its mark (`run.marks`). Its event may be missing."""
        self._has_left_mark = True

    def poll(self) -> None:
        """Process new events. Call this regularly, so that they are few."""
        for event in self._tail.poll():
            self._fold.observe(event)


def has_run_committed(paths: RunPaths) -> bool:
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
    commit = next(EventFileTail(path, StepCommitted).poll(), None)
    return commit is not None and commit.time >= since


def agent_exit_status(code: int) -> int:
    """Return the exit status of an agent that gives its group up.

    Args:
        code: exit status of the worker that was the root cause.
    """
    return code if code in (CONFIG_ERROR_CODE, NO_RESTART_CODE) else 1


@dataclass
class RestartPolicy:
    """Counts the restarts of one group, and decides about the next restart.

    `Agent` has a policy for the workers of its group, and `AgentKeeper` has one for the agents.
    Each calls `decide` on its only thread, once for each end. The module's head lists the rules.
    """

    max_restarts: int
    """Restarts within `WINDOW_SECONDS`; also older restarts, if the group has not committed since.
    """
    healthy_seconds: float = 60.0
    """An attempt that lived this long counts as a success."""
    clock: Callable[[], float] = time.monotonic
    has_run_committed: Callable[[], bool] = lambda: False
    """Returns True if any group of the run has made a step; called after a network error only."""
    deaths_until_suspected: int = 0
    """Deaths on a host after which the group leaves the host (`suspect`); 0 = it never does."""
    _num_failed_restarts: int = 0
    """Restarts since the last success."""
    _restart_times: deque[float] = field(default_factory=deque)
    _last_cause: str = ""
    """Cause of the latest own end; empty after progress."""
    _last_step: int | None = None
    """Last step of the latest attempt that contributed to one."""
    _num_same_cause: int = 0
    """Own ends in a row with the cause `_last_cause`, without progress."""
    _num_own_ends: int = 0
    """Own ends in a row with any cause, without progress."""
    _num_network_errors: int = 0
    """Network errors before the run's first step."""
    _first_start: float | None = None
    """When the first attempt began, by `clock`."""
    _is_run_known_to_train: bool = False
    """Whether a commit of the run was seen. Then `has_run_committed` is not called again."""

    def decide(self, end: AttemptEnd) -> float | NoRestart:
        """Return the seconds to wait before the group's restart, or why it is not restarted."""
        if self._first_start is None:
            self._first_start = self.clock() - end.alive_seconds
        if end.code == CONFIG_ERROR_CODE:
            return NoRestart(
                CAUSE_CONFIG, "the configuration is wrong (exit status 2); it is not started again"
            )
        if end.code == NO_RESTART_CODE:
            return NoRestart(
                CAUSE_FINAL, "the group must not come back by itself (exit status 3); see its log"
            )
        if end.is_token_refused:
            return NoRestart(
                CAUSE_CRASH_LOOP, "another start would be refused as well; it is not started again"
            )
        give_up = self._count_own_end(end)
        if give_up is None:
            give_up = self._count_network_error(end)
        if give_up is not None:
            return give_up
        # Forget old restarts only after a commit. Otherwise attempts that each wait long for a file
        # server that never comes would go on for ever.
        if end.committed:
            self._forget_old_restarts()
        if len(self._restart_times) >= self.max_restarts:
            hours = WINDOW_SECONDS / 3600
            return NoRestart(
                CAUSE_RESTARTS,
                f"no restart left (--max-restarts {self.max_restarts} within {hours:g} hours)",
            )
        was_success = end.committed or end.alive_seconds >= self.healthy_seconds
        if was_success:
            self._num_failed_restarts = 0
        pause_seconds = backoff_seconds(self._num_failed_restarts)
        self._restart_times.append(self.clock())
        self._num_failed_restarts += 1
        return pause_seconds

    def _forget_old_restarts(self) -> None:
        oldest = self.clock() - WINDOW_SECONDS
        while self._restart_times and self._restart_times[0] <= oldest:
            self._restart_times.popleft()

    def _count_own_end(self, end: AttemptEnd) -> NoRestart | None:
        """Count an own end; return why the group is given up if this is a crash loop, else None.

        A commit is progress, however short the attempt was. But if the attempt before committed the
        same last step, the group continued from the same checkpoint, and met the same end.

        An end that is no own end changes no count, because it does not show that the earlier cause
        is gone.
        """
        is_same_step = end.step is not None and end.step == self._last_step
        if end.committed and not is_same_step:
            self._last_cause = ""
            self._last_step = end.step
            self._num_same_cause = 0
            self._num_own_ends = 0
        cause = end.own_cause
        if not cause:
            return None
        if cause != self._last_cause:
            self._num_same_cause = 0
        self._num_same_cause += 1
        self._num_own_ends += 1
        self._last_cause = cause
        if self._num_own_ends >= ANY_CAUSE_FACTOR * self._max_crashes:
            return NoRestart(
                CAUSE_CRASH_LOOP,
                f"{self._num_own_ends} ends of its own in a row, without progress",
            )
        if self._num_same_cause < self._max_ends_like(end):
            return None
        what = "the same exception"
        if end.error is None:
            what = f"the same end ({describe_code(end.code)})"
        elif end.code == 0:
            # A worker that ended before the last step has no exception, although `error` is set.
            what = f"the same end ({EARLY_END})"
        where = "and no step committed between"
        if end.committed:
            where = f"each time after step {end.step}"
        return NoRestart(CAUSE_CRASH_LOOP, f"{what} {self._num_same_cause} times in a row, {where}")

    def _max_ends_like(self, end: AttemptEnd) -> int:
        """Return how many ends in a row with the cause of this end make a crash loop."""
        text = type_name = None
        if end.error is not None:
            text = end.error.text
            type_name = end.error.type_name
        if may_come_from_host(text, type_name):
            return self._max_crashes
        return MAX_ENDS_OF_ONE_CAUSE

    @property
    def _max_crashes(self) -> int:
        """How many crashes in a row, which the host may have caused, make a crash loop.

        A group that leaves suspected hosts must crash often enough for the suspicion, before the
        group is given up.
        """
        return max(MAX_ENDS_OF_ONE_CAUSE, self.deaths_until_suspected + 1)

    def _count_network_error(self, end: AttemptEnd) -> NoRestart | None:
        """Count a network error; return why the group is given up if there is no network, else
        None.

        After the run's first step, a network error never ends the group: other groups train, so the
        network exists, and they may wait for this group.
        """
        if end.committed:
            self._is_run_known_to_train = True
        if not end.is_network_error or self._is_run_known_to_train:
            return None
        self._is_run_known_to_train = self.has_run_committed()
        if self._is_run_known_to_train:
            return None
        assert self._first_start is not None, "`decide` has set it"
        self._num_network_errors += 1
        seconds = self.clock() - self._first_start
        if self._num_network_errors < MAX_NETWORK_ERRORS or seconds < NETWORK_SECONDS:
            return None
        return NoRestart(
            CAUSE_NETWORK,
            f"{self._num_network_errors} network errors within {seconds:.0f} s, and no step "
            "committed",
        )


class RunStopPolicy:
    """Decides whether the launcher stops the whole run, because restarts of groups do not help.

    There are two such cases. Before the run's first step, one group was given up for a crash loop
    or a missing network, which the other groups would meet as well. Or all groups ended with the
    same cause after the same step, twice: they returned to that step from a checkpoint, and ended
    there again.

    `LocalRun` makes the object, and calls it on its only thread for each event of an ended group.
    """

    def __init__(self) -> None:
        self._latest_ends: dict[int, tuple[int, str]] = {}
        """Step and cause of each group's latest end. Emptied when all groups have ended alike."""
        self._num_common_ends: Counter[tuple[int, str]] = Counter()
        """How often all groups have ended alike, by step and cause."""

    def observe_exit(self, event: WorkerExited, step: int, groups: Collection[int]) -> str:
        """Take a worker's end that ended an attempt; return why the run must stop, or "".

        Args:
            event: `GroupFold.failed_by` of the group.
            step: last committed step of the group.
            groups: groups that are still in the run.
        """
        # A group that is not restarted anyway does not show that restarts are useless. Other groups
        # may still save the last step.
        if event.transient or event.code in (CONFIG_ERROR_CODE, NO_RESTART_CODE):
            return ""
        cause = cause_of_end(exit_code_of(event), event.error)
        if not cause:
            return ""
        end = (step, cause)
        self._latest_ends[event.replica] = end
        latest_ends = {self._latest_ends.get(slot) for slot in groups}
        have_ended_alike = latest_ends == {end}
        if not have_ended_alike:
            return ""
        self._latest_ends = {}
        self._num_common_ends[end] += 1
        if self._num_common_ends[end] < MAX_COMMON_ENDS:
            return ""
        where = f"after step {step}" if step else "before any step"
        return (
            f"all groups end with {_describe_cause(event)} ({where}, {self._num_common_ends[end]} "
            f"times; see {event.log})"
        )

    @staticmethod
    def observe_give_up(event: ReplicaGaveUp, *, may_have_committed: bool) -> str:
        """Take the end of a group that is not restarted; return why the run must stop, or "".

        Args:
            may_have_committed: whether any group of the run may have made a step. Before a step,
                stopping the run loses nothing, and the user who started the run is there to see it.
                Later the other groups train on.
        """
        if may_have_committed or event.cause not in (CAUSE_CRASH_LOOP, CAUSE_NETWORK):
            return ""
        line = (
            f"group {event.replica} ends with {event.error} ({event.reason} by any group; see "
            f"{event.log})"
        )
        # An error of the lighthouse names its own remedy.
        if event.cause == CAUSE_NETWORK and event.error_kind != LIGHTHOUSE_ERROR:
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


def can_spare_help(code: int | None, gave_up: bool) -> bool:
    """True if a spare may take the place of a group.

    A spare would not help if the config is wrong or the state diverged.

    Args:
        code: exit status of the group's agent; None while the agent runs.
        gave_up: whether the agent gave the group up.
    """
    return gave_up and code not in (None, 0, CONFIG_ERROR_CODE, NO_RESTART_CODE)
