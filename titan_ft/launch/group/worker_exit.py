# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The end of a worker, and the choice of the end that caused the others.

When one rank of a group fails, its peers fail as well: they lose their connections to it, or Gloo
or NCCL aborts them. An agent often finds several ended workers at once. `find_root_cause` chooses
the worker whose end is announced as the reason, and by which `RestartPolicy` decides.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
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
    """The exception that ended the worker; None if none is known. `EARLY_END_ERROR` if the worker
    ended early.
    """
    has_left: bool = False
    """Whether the worker was asked to leave, and wrote a mark that it left (`run.marks`).

    On a full disk the worker's event may be missing, but the mark is there.
    """
    host: str = ""
    """Name of the worker's host; empty: this host."""
    is_lost: bool = False
    """Whether the worker's host, or the agent there, is gone.

    Nobody saw the end of such a worker, and `code` stands for SIGKILL.
    """

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.ended_early

    @property
    def ended_early(self) -> bool:
        """True if the worker ended with status 0 during training, as if all were done.

        The worker neither made the last step nor was asked to leave: code of the model called exit.
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
        if self.ended_early:
            return f"rank {self.rank} ended with {EARLY_END}"
        if self.code >= 0:
            return f"rank {self.rank} ended with exit status {self.code}"
        return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"

    def to_event(
        self, attempt: int, stopped_because: str = "", *, disturbed: bool, log: Path | None
    ) -> WorkerExited:
        """Return the event of this end.

        Args:
            stopped_because: reason if the worker was ended from outside; else empty.
            disturbed: whether the end is no evidence of a crash loop; see `AttemptEnd`.
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
        if log is not None and (self.ended_early or cause_of_end(self.code, None)):
            event.log = str(log)
        if self.error is not None:
            event.error = self.error.text
            event.error_kind = None if self.ended_early else self.error.type_name
            event.where = self.error.where or None
        if self.failed:
            is_transient = self.error is not None and self.error.transient
            event.transient = True if disturbed or is_transient else None
        return event


EARLY_END_ERROR = WorkerError(EARLY_END, transient=False, time=0.0)
"""The error of a worker that ended early; see `WorkerExit.ended_early`."""


class _EndKind(Enum):
    """What the end of a worker looks like. `_LIKELIHOOD` orders the kinds."""

    SIGNAL = auto()
    """A signal other than SIGABRT. The worker's peers lose their connections only afterwards."""
    EXCEPTION = auto()
    ABORT = auto()
    """SIGABRT, or an exit status without an exception, also 0 before the last step. Gloo and NCCL
    abort a process so after it lost a peer.
    """
    FAILED_LEAVE = auto()
    """The worker was asked to end by a signal, and could not do so in order."""
    LOST_RANK = auto()
    """An exception that reports the loss of another rank, and so is a consequence."""

    @classmethod
    def of(cls, exit: WorkerExit) -> _EndKind:
        if exit.reports_lost_rank:
            return cls.LOST_RANK
        if exit.code < 0 and exit.code != -signal.SIGABRT:
            return cls.SIGNAL
        if exit.error is not None and not exit.ended_early:
            return cls.EXCEPTION
        if exit.ended_early or cause_of_end(exit.code, None):
            return cls.ABORT
        return cls.FAILED_LEAVE


_LIKELIHOOD = (
    _EndKind.SIGNAL,
    _EndKind.ABORT,
    _EndKind.EXCEPTION,
    _EndKind.FAILED_LEAVE,
    _EndKind.LOST_RANK,
)
"""The kinds of ends, the most likely cause first, if the earliest exception is transient.

Such an exception is a connection error, which follows from a peer's abort.
"""
_LIKELIHOOD_AFTER_A_MISTAKE = (
    _EndKind.SIGNAL,
    _EndKind.EXCEPTION,
    _EndKind.ABORT,
    _EndKind.FAILED_LEAVE,
    _EndKind.LOST_RANK,
)
"""The same if the earliest exception is permanent.

Such an exception is a mistake in the code, and a peer's abort follows from it.
"""


def find_root_cause(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Return the failed worker whose end most likely caused the others; None if none failed.

    The ends were all found at the same poll, so the order in which they were found is no evidence.
    The choice is, in this order:

    1. A worker whose config is wrong, because no restart can help.
    2. By the kind of the end, see `_LIKELIHOOD`.
    3. Of several exceptions the earliest, as in torch elastic's `ChildFailedError`: later ones may
       be consequences. The clocks of two hosts may differ, so a rank that reports another rank as
       lost comes last whatever its time is.
    4. The lowest rank.
    """
    failed = [exit for exit in exits if exit.failed]
    wrong_configs = [exit for exit in failed if exit.code == CONFIG_ERROR_CODE]
    candidates = wrong_configs or failed
    order = _LIKELIHOOD
    if _is_earliest_exception_permanent(exits):
        order = _LIKELIHOOD_AFTER_A_MISTAKE

    def sort_key(exit: WorkerExit) -> tuple[int, float, int]:
        error_time = float("inf")
        if exit.error is not None:
            error_time = exit.error.time
        return order.index(_EndKind.of(exit)), error_time, exit.rank

    return min(candidates, key=sort_key, default=None)


def _is_earliest_exception_permanent(exits: Sequence[WorkerExit]) -> bool:
    """True if the earliest exception of the workers is not transient; False without any."""
    earliest: WorkerError | None = None
    for exit in exits:
        if exit.error is None or exit.ended_early or exit.reports_lost_rank:
            continue
        if earliest is None or exit.error.time < earliest.time:
            earliest = exit.error
    return earliest is not None and not earliest.transient
