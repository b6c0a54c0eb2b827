# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt of a group by its events: its begin, the last event of each rank, its end.

An attempt is one start of a group's processes. `RunFold` makes one `Attempt` for each and feeds it
with the events of the group; `RunRecord.attempts` then sets the fault that ended it.

Each fact has one source: rank 0 for the group's actions, the agent for the end and the restart of
the group, and the injector for the moment of a fault (an agent notes a death only afterwards).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.fold.group import is_of_worker
from titan_ft.run import events as ev


@dataclass
class Attempt:
    """One attempt of a group; times in Unix microseconds."""

    slot: int
    number: int
    begin_us: int
    """The first event, of a worker, the agent or the launcher."""
    last_us: int = 0
    """The last event, of a worker, the agent or the launcher."""
    last_by_rank: dict[int, int] = field(default_factory=dict)
    """The last event of each worker."""
    committed_us: int = 0
    """The last commit of rank 0; 0 without any."""
    alive_us: int = 0
    """The last commit, or end of a heal, of rank 0; 0 without any."""
    hung_us: int | None = None
    """When a rank noticed that the group hung."""
    drained_us: int | None = None
    """When a rank first announced that it leaves on request."""
    in_order: bool = False
    """Whether the group finished its step before it left."""
    exit_us: int | None = None
    """When the agent noticed the end of the first worker, or the launcher that of the agent."""
    end: ev.WorkerExited | ev.AgentEnded | None = None
    """The failure of the first worker, or of the agent; None without a failure."""
    stopped: bool = False
    """Whether the agent ended the workers because the run was stopped."""
    gave_up_us: int | None = None
    fault: RecordedFault | None = None
    """The fault that ended the attempt, by `find_fatal_fault`; None if unknown."""

    @property
    def failed(self) -> bool:
        """True if a worker or the agent ended with a signal or a nonzero code, without a
        request.
        """
        return self.end is not None

    @property
    def cause(self) -> str:
        """The exception, or else the signal or the exit code; empty if it has not failed."""
        if self.end is None:
            return ""
        if isinstance(self.end, ev.WorkerExited) and self.end.error:
            return self.end.error
        return self.end.cause or ""

    @property
    def category(self) -> str | None:
        """The category of its end (`titan_ft.faults.fault.Category`); None if it did not fail."""
        if self.end is None:
            return None
        if self.end.signal:
            return "process killed"
        return "error raised"

    @property
    def why_ended(self) -> str:
        """The fault that ended it, if one did, and the cause; empty if it has not failed."""
        if self.fault is None:
            return self.cause
        return f"{self.fault.name} ({self.cause})"

    @property
    def died_us(self) -> int | None:
        """The time of its end: the time of the fatal fault if known, or else the time when the end
        was noticed.
        """
        if self.exit_us is None:
            return None
        if self.fault is None or not self.fault.deadly:
            return self.exit_us
        return max(self.fault.time_us, self.alive_us)

    @property
    def silent_us(self) -> int | None:
        """The earliest time of a death: the last event of the worker that fell silent first. None
        without events.
        """
        return min(self.last_by_rank.values(), default=None)

    def observe(self, event: ev.Event) -> None:
        """Take the next event of the attempt."""
        time = event.time_us
        self.last_us = time
        if isinstance(event, ev.StepCommitted):
            self.last_by_rank[event.rank] = time
            if event.rank == 0:
                self.committed_us = time
                self.alive_us = time
            return
        if is_of_worker(event):
            self.last_by_rank[event.rank or 0] = time
        match event:
            case ev.HealFinished():
                if event.rank == 0:
                    self.alive_us = time
            case ev.WorkerExited():
                self._note_exit(time, event)
            case ev.AgentEnded():
                self._note_agent_end(time, event)
            case ev.ReplicaGaveUp():
                self.gave_up_us = time
            case ev.Hung():
                self.hung_us = self.hung_us or time
            case ev.Drained():
                if self.drained_us is None:
                    self.drained_us = time
                    self.in_order = event.in_order

    def _note_agent_end(self, time: int, event: ev.AgentEnded) -> None:
        """Take the death of the group's agent, which ends the workers.

        If a worker failed before, the worker's failure counts instead.
        """
        if self.failed:
            return
        if self.exit_us is None:
            self.exit_us = time
        self.end = event
        self.stopped = False

    def _note_exit(self, time: int, event: ev.WorkerExited) -> None:
        """Take the end of a worker.

        Only the first failure of a worker counts: the other workers die as a consequence.
        """
        if self.exit_us is None:
            self.exit_us = time
        if self.failed:
            return
        if event.stopped:
            self.stopped = True
            return
        # A group that is asked to leave may be killed by the very signal that asked it.
        was_asked = self.drained_us is not None and event.cause == "SIGTERM"
        if event.cause is None or was_asked:
            return
        self.end = event
        self.stopped = False


def find_fatal_fault(
    attempt: Attempt, faults: Sequence[RecordedFault], since: int
) -> RecordedFault | None:
    """Return the fault that ended an attempt; None if no fault did.

    This is the last fault that ends a process at once, or else the last fault after whose end the
    attempt made no commit.

    Args:
        faults: of the run, in order of time.
        since: Unix microseconds of the end of the attempt before.
    """
    if not attempt.failed or attempt.exit_us is None:
        return None
    fatal = None
    not_survived = None
    for fault in faults:
        is_in_time = since <= fault.time_us <= attempt.exit_us
        if fault.slot != attempt.slot or not is_in_time:
            continue
        if fault.deadly:
            fatal = fault
        # A commit after the end of a fault shows that the attempt survived it.
        end_us = fault.undone_us or fault.time_us
        if end_us >= attempt.committed_us:
            not_survived = fault
    return fatal or not_survived
