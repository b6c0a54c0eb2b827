# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The end of a worker, and the search for the end that caused the others."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ft.launch.group.own_end import EARLY_END, cause_of_end
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE
from titan_ft.protocol.errors import RankLostError
from titan_ft.run.error_file import WorkerError
from titan_ft.run.events import WorkerExited
from titan_ft.system.process import node_name


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended."""

    rank: int
    pid: int
    code: int
    """Exit status; negative: the signal, as in `subprocess`."""
    error: WorkerError | None = None
    """The exception that ended the worker; None if unknown; `ENDED_EARLY` after an early end."""
    has_left: bool = False
    """Whether the worker was asked to leave, and has confirmed that by a mark in a file.

    On a full disk the worker's event may be missing, but the mark is there.
    """
    host: str = ""
    """Name of the worker's host; empty: this host."""
    is_lost: bool = False
    """Whether the worker's host, or the agent there, is gone.

    Then nobody saw the end of the worker, and `code` is SIGKILL.
    """

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.is_early

    @property
    def is_early(self) -> bool:
        """True if the worker ended with status 0 during training, as if all were done.

        It neither made the last step nor was asked to leave: a model's own code called exit.
        """
        return self.code == 0 and self.error is not None

    @property
    def reports_lost_rank(self) -> bool:
        """True if the worker ended because another rank of its group was lost."""
        return self.error is not None and self.error.type_name == RankLostError.__name__

    def describe(self) -> str:
        """Return the end in words, such as "rank 1 was killed by SIGKILL"."""
        if self.is_lost:
            return f"rank {self.rank} was lost with its host {self.host}, or with the agent there"
        if self.is_early:
            return f"rank {self.rank} ended with {EARLY_END}"
        if self.code >= 0:
            return f"rank {self.rank} ended with exit status {self.code}"
        return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"

    def event(
        self, attempt: int, stopped_because: str = "", *, disturbed: bool, log: Path | None
    ) -> WorkerExited:
        """Return the event of this end.

        Args:
            stopped_because: reason if the worker was ended from outside; else empty.
            disturbed: whether the end says nothing about the run; see `AttemptEnd`.
            log: the worker's own log, if it has one.
        """
        reason = f"stopped because {stopped_because}" if stopped_because else self.describe()
        event = WorkerExited(
            rank=self.rank,
            attempt=attempt,
            worker_pid=self.pid,
            reason=reason,
            stopped=bool(stopped_because),
        )
        event.host = self.host or node_name()
        if self.code >= 0:
            event.code = self.code
        else:
            event.signal = signal.Signals(-self.code).name
        if log is not None and (self.is_early or cause_of_end(self.code, None)):
            event.log = str(log)
        if self.error is not None:
            event.error = self.error.text
            event.error_kind = None if self.is_early else self.error.type_name
            event.where = self.error.where or None
        if self.failed:
            is_transient = self.error is not None and self.error.transient
            event.transient = True if disturbed or is_transient else None
        return event


ENDED_EARLY = WorkerError(EARLY_END, transient=False, time=0.0)
"""The error of a worker that ended early; see `WorkerExit.is_early`."""


def root_failure(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Return the failed worker whose end most likely caused the others'; None if none failed.

    The ends were all found at the same poll, so their order of arrival is no evidence.

    A killed rank breaks its peers' connections before the next poll, and not the other way round.
    Of ranks with exceptions the earliest counts, as in torch elastic's `ChildFailedError`: later
    ones may be consequences.

    A SIGABRT and an exit status without an exception (also 0 of an early end) may follow from a
    lost peer, because Gloo and NCCL abort the process. So a permanent exception ranks before them.
    A connection error ranks after them, because a rank that aborted causes it in its peers. A rank
    that reports another one as lost ranks last, whatever the clocks of the two hosts say.
    """
    earliest: WorkerError | None = None
    for exit in exits:
        if exit.error is None or exit.is_early or exit.reports_lost_rank:
            continue
        if earliest is None or exit.error.time < earliest.time:
            earliest = exit.error
    is_explained = earliest is not None and not earliest.transient

    def implausibility(exit: WorkerExit) -> int:
        """Rank the ends: 0 for the most likely cause."""
        if exit.reports_lost_rank:
            return 4
        if exit.code < 0 and exit.code != -signal.SIGABRT:
            return 0
        if exit.error is not None and not exit.is_early:
            return 1 if is_explained else 2
        if exit.is_early or cause_of_end(exit.code, None):
            return 2 if is_explained else 1
        # The rank was asked to end, and could not do so in order.
        return 3

    def sort_key(exit: WorkerExit) -> tuple[bool, int, float, int]:
        has_wrong_config = exit.code == CONFIG_ERROR_CODE
        error_time = float("inf")
        if exit.error is not None:
            error_time = exit.error.time
        return not has_wrong_config, implausibility(exit), error_time, exit.rank

    failed = [exit for exit in exits if exit.failed]
    return min(failed, key=sort_key, default=None)
