# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leave on SIGTERM: all ranks of a group after the same vote, or not at all if a rank of it has died."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from titan_ft.engine.watchdog import end_process
from titan_ft.membership.group_store import set_for_all
from titan_ft.run.events import NOT_BEGUN
from titan_ft.system.process import Process

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a rank that did not leave but was ended."""

# Where Slurm signals every process of a job and the agent hands its own SIGTERM on, a worker gets the same one twice.
_ONE_REQUEST_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0  # of a rank that waits for a round, for a sibling's word: 8,192 ranks may look at one store
# Of the timeout: a round of several steps is finished if this group's are over within the first, the others are waited
# for until the second is over, and what is left is for the exchange with them.
OWN_SHARE = 0.5
WAITING_SHARE = 0.75
_NO_VOTE_SECONDS = 1.0  # time to find a dead sibling for a rank that has nothing to finish


class Drain:
    """One rank's part in leaving. Votes must be a barrier over the ranks of the group, the same votes on each of them.

    A rank that is told to leave writes the number of its next vote to the group's store before that vote; right after
    each vote every rank looks for its number. The write comes before the writer's vote, and nobody is past a vote
    before all have cast it: all ranks find it after the same vote. Without the number, a rank that is slow to look
    after one vote could find what was written for the next.

    Args:
        connect: opens a connection to the group's store; None when the group has one rank.
        key: prefix of the keys in the store, unique to this attempt of the group.
        timeout_seconds: after this time the rank ends without having left in order.
        on_abandon: called with the reason before such an end, on another thread.
    """

    def __init__(
        self,
        connect: Callable[[], TCPStore] | None,
        *,
        key: str,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        on_abandon: Callable[[str], None],
    ) -> None:
        assert connect is not None or num_ranks == 1, "the ranks of a group agree through its store"
        self._connect, self._key, self._rank, self._num_ranks = connect, key, rank, num_ranks
        self._timeout_seconds, self._on_abandon = timeout_seconds, on_abandon
        self._requested = self._left = False
        self._requested_at = math.inf
        self._votes = 0
        self._begun = False
        self._asks = self._announced = self._agreed = False
        self._next_look = -math.inf  # for the word of a sibling, in seconds of the monotonic clock
        self._hurries_since = -1  # number of votes at which this rank last said that its time is nearly over
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._store = None if connect is None else connect()
        if self._store is not None:
            self._store.set(f"{key}/process/{rank}", str(Process.this()))

    @property
    def requested(self) -> bool:
        """Say whether this rank was told to leave, by SIGTERM, by `request` or by another rank of the group."""
        return self._requested

    @property
    def spent(self) -> float:
        """Return which share of the timeout is over, by this rank's clock; 0 before this rank was told to leave."""
        return max(0.0, time.monotonic() - self._requested_at) / self._timeout_seconds

    @property
    def is_urgent(self) -> bool:
        """Say whether this rank's group should wait for no other group any more, by this rank's clock."""
        return self.spent >= WAITING_SHARE

    def install(self) -> None:
        """Take SIGTERM as the request to leave, and a second one as the order to end at once; main thread only.

        Signals that come within a second of the first count as that one. Processes that this one forks get SIGTERM's
        default action.
        """
        receive, send = os.pipe()
        os.set_blocking(send, False)
        threading.Thread(target=self._receive, args=(receive,), name="titan_ft_signals", daemon=True).start()
        # The main thread may sit in a vote or a collective for long, where Python's handlers do not run. The byte that
        # Python's C handler writes comes through at any time.
        signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.siginterrupt(signal.SIGTERM, False)  # libraries that know no EINTR need not see one
        # A forked child must die of SIGTERM, and not write it to this process's pipe: not even right after the fork.
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=_forget_signals,
        )

    def request(self) -> None:
        """Ask the group to leave; any thread, returns at once. From now on the timeout runs."""
        with self._lock:
            if self._requested:
                return
            self._requested, self._requested_at = True, time.monotonic()
        threading.Thread(target=self._expire, name="titan_ft_drain_timeout", daemon=True).start()
        if self._connect is not None:
            threading.Thread(target=self._watch, args=(self._connect,), name="titan_ft_siblings", daemon=True).start()

    def begin(self) -> None:
        """Note that this rank has something to finish, though it may not have come to a vote yet; training thread."""
        self._begun = True

    @property
    def seconds_left(self) -> float:
        """Return how much of the timeout is left, by this rank's clock."""
        return max(0.0, (1.0 - self.spent) * self._timeout_seconds)

    def before_vote(self, may_leave: Callable[[], bool]) -> None:
        """Tell the other ranks if this one was told to leave; training thread, right before each vote.

        Args:
            may_leave: says whether the group may leave after this vote, as this rank sees it. If not, this
                rank tells the others before a later vote. It is asked only if this rank was told.
        """
        self._votes += 1
        self._asks = self._requested and may_leave()
        if self._store is not None and self._asks and not self._announced:
            set_for_all(self._store, f"{self._key}/vote/{self._votes}")
            self._announced = True

    def after_vote(self) -> bool:
        """Say whether the group leaves, from this vote on: the same on all its ranks; training thread."""
        if not self._agreed:
            if self._store is None:
                self._agreed = self._asks
            elif self._store.check([f"{self._key}/vote/{self._votes}"]):
                self._agreed = True
                self.request()
        return self._agreed

    def wait_for_others(self, is_answered: Callable[[], bool], pause: Callable[[], object]) -> bool:
        """Wait until a round of other groups is there; training thread.

        Args:
            is_answered: says whether the round is there, for this rank.
            pause: waits for it for a moment.

        Returns:
            False if the group, which was told to leave, waits no longer; the same on all its ranks.
        """
        while True:
            answered = is_answered()
            if self.stops_waiting(answered):
                return False
            if answered:
                return True
            pause()

    def stops_waiting(self, is_answered: bool) -> bool:
        """Say whether the group waits for other groups no longer: the same on all its ranks.

        A waiting rank calls this again and again. When its time is nearly over, the rank writes so to the
        group's store. Its siblings then write the same, even if nobody told them to leave. The group leaves
        once all ranks have written, unless one of them was answered after it had written. Whichever of these
        two is stored first decides for all ranks. A rank that is answered before it has written goes on
        without a look at the store: the group cannot leave without its word.

        Args:
            is_answered: whether what this rank waits for is there.
        """
        is_new = self._hurries_since != self._votes
        if is_new and (is_answered or not (self.is_urgent or self._is_a_sibling_urgent())):
            return False
        self._hurries_since = self._votes
        if self._store is None:
            return not is_answered
        said = [f"{self._key}/hurry/{self._votes}/{rank}" for rank in range(self._num_ranks)]
        if is_new:
            set_for_all(self._store, said[self._rank])
            self._store.set(f"{self._key}/urgent/{self._votes}", "1")
        if not is_answered and not self._store.check(said):
            return False
        word = "go on" if is_answered else "leave"
        return bool(self._store.compare_set(f"{self._key}/waiting/{self._votes}", "", word) == b"leave")

    def _is_a_sibling_urgent(self) -> bool:
        if self._store is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._store.check([f"{self._key}/urgent/{self._votes}"])

    def leave(self) -> None:
        """Mark this rank as gone in order and wait, for 2 seconds at most, until all ranks are.

        Call it last of all, also when training has finished: the store that the others vote through may end with rank
        0, and a rank that ends without this mark counts as dead.
        """
        self._left = True
        if self._store is None:
            return
        try:
            self._store.set(self._left_key(self._rank), "1")
            keys = [self._left_key(rank) for rank in range(self._num_ranks)]
            self._store.wait(keys, timedelta(seconds=_LEAVE_SECONDS))
        except RuntimeError:  # the time is over, or the store went first; this rank leaves in any case
            return

    # Threads

    def _receive(self, receive: int) -> None:
        """Read the numbers of the signals that came."""
        first: float | None = None
        while True:
            if signal.SIGTERM not in os.read(receive, 64):
                continue
            if first is None:
                first = time.monotonic()
                self.request()
            elif time.monotonic() - first > _ONE_REQUEST_SECONDS:
                os._exit(TERMINATED)

    def _expire(self) -> None:
        """End when the time is over, or soon if this rank has not come to a vote: then it has nothing to finish."""
        began = time.monotonic()
        if self._store is not None:
            time.sleep(min(_NO_VOTE_SECONDS, self._timeout_seconds))
        reason = NOT_BEGUN
        if self._votes or self._begun:
            time.sleep(max(0.0, began + self._timeout_seconds - time.monotonic()))
            reason = f"fault_tolerance.drain_timeout_seconds ({self._timeout_seconds:g} s) is over"
        self._abandon(reason)

    def _watch(self, connect: Callable[[], TCPStore]) -> None:
        """End at once when another rank has died or given up: the step cannot be finished.

        An agent sends SIGTERM to the other ranks when one dies. Ranks on other hosts cannot be looked at.
        """
        try:
            store = connect()  # of its own: a request on the other connection may be waiting for long
            siblings: dict[int, Process] = {}
            while not self._left:
                for rank in range(self._num_ranks):
                    name = f"{self._key}/process/{rank}"
                    if rank != self._rank and rank not in siblings and store.check([name]):
                        siblings[rank] = Process.parse(store.get(name).decode())
                gone = [rank for rank, process in siblings.items() if process.is_gone()]
                if store.check([f"{self._key}/abandoned"]):
                    self._abandon("another rank of this group had to end")
                # The mark is older than the end: looked for after it, a rank that left has it.
                elif dead := [rank for rank in gone if not store.check([self._left_key(rank)])]:
                    line = f"rank {dead[0]} of this group is gone, so that its step cannot be finished: ending at once"
                    self._end(TERMINATED, partial(print_line, line))
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store is gone; the timeout holds
            return

    def _abandon(self, reason: str) -> None:
        line = f"SIGTERM: ending without having left in order, because {reason}"
        # A rank that has left has said so already, and only hangs in its clean-up.
        last_words = (
            () if self._left else (partial(print_line, line), partial(self._on_abandon, reason), self._tell_abandoned)
        )
        self._end(0, *last_words)

    def _tell_abandoned(self) -> None:
        if self._store is not None:
            set_for_all(self._store, f"{self._key}/abandoned")  # else siblings take this rank for dead

    def _end(self, status: int, *last_words: Callable[[], object]) -> None:
        if self._ending.acquire(blocking=False):
            end_process(status, *last_words)

    def _left_key(self, rank: int) -> str:
        return f"{self._key}/left/{rank}"


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def print_line(line: str) -> None:
    """Print a line to stderr, whatever the other threads are at."""
    os.write(2, f"titan_ft: {line}\n".encode())  # sys.stderr may be locked by a thread that hangs
