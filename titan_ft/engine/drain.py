# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leave on SIGTERM: all ranks of a group after the same vote, or not at all if a rank of it has died.

See docs/leaving.md.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from titan_ft.engine.watchdog import end_process
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.control.node import Lose
from titan_ft.run.events import NOT_BEGUN
from titan_ft.system.threads import call_aside

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a rank that did not leave but was ended."""

# Where Slurm signals every process of a job and the agent hands its own SIGTERM on, a worker gets the same one twice.
_ONE_REQUEST_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
# Shares of the drain timeout. Until the first one, the group finishes its own steps of a round of several steps. Until
# the second one, it waits for the other groups. The rest is for the exchange with them.
OWN_SHARE = 0.5
WAITING_SHARE = 0.75
_NO_VOTE_SECONDS = 1.0  # time to find a dead sibling for a rank that has nothing to finish
_ABANDONED = "abandoned"  # a note's topic
_ABANDON_SECONDS = 0.2  # for the neighbours to hear of it


class Drain:
    """One rank's part in leaving. Votes must be a barrier over the ranks of the group, the same votes on each of them.

    A rank that is told to leave says the number of its next vote to all ranks before that vote. Right after each vote
    every rank looks whether it has heard the number. A note reaches all ranks before the result of the vote that its
    sender casts next, so all ranks find the number after the same vote. Without the number, a rank that is slow to
    look after one vote could find what was said for the next.

    Args:
        control: tree of the group's ranks.
        timeout_seconds: after this time the rank ends without having left in order.
        on_abandon: called with the reason before such an end, on another thread.
    """

    def __init__(
        self,
        control: ControlTree,
        *,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        on_abandon: Callable[[str], None],
    ) -> None:
        self._control, self._rank, self._num_ranks = control, rank, num_ranks
        self._timeout_seconds, self._on_abandon = timeout_seconds, on_abandon
        self._requested = self._left = False
        self._requested_at = math.inf
        self._votes = 0
        self._begun = False
        self._asks = self._announced = self._agreed = False
        self._lost = ""  # ranks of the group, for people
        self._hurries_since = -1  # number of votes at which this rank last said that its time is nearly over
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        control.listen(_ABANDONED, self._follow_sibling)
        control.listen_for_losses(self._note_loss)

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
        self._end_with_siblings()

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
        if self._asks and not self._announced:
            self._control.say(f"leave/{self._votes}")
            self._announced = True

    def after_vote(self) -> bool:
        """Say whether the group leaves, from this vote on: the same on all its ranks; training thread."""
        if not self._agreed and self._control.heard(f"leave/{self._votes}") is not None:
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

        A waiting rank calls this again and again.

        1. When the time of a rank is nearly over, the rank says "hurry". Its siblings then say it too, even if they
           were not told to leave.
        2. A rank that is answered before it has said "hurry" goes on. The group cannot leave without its word.
        3. A rank that is answered later proposes to go on.
        4. All ranks hear "hurry" once each of them has said it. A rank that is not answered then proposes to leave.

        The first proposal that reaches rank 0 decides for all ranks.

        Args:
            is_answered: whether what this rank waits for is there.
        """
        is_new = self._hurries_since != self._votes
        if is_new and (is_answered or not (self.is_urgent or self._is_a_sibling_urgent())):
            return False
        self._hurries_since = self._votes
        said_by_all = f"hurry/{self._votes}"
        if is_new:
            self._control.say_with_all(said_by_all)
            self._control.say(self._urgent_topic())
        if not is_answered and self._control.heard(said_by_all) is None:
            return False
        word = "go on" if is_answered else "leave"
        return self._control.settle(f"waiting/{self._votes}", word) == "leave"

    def _is_a_sibling_urgent(self) -> bool:
        return self._control.heard(self._urgent_topic()) is not None

    def _urgent_topic(self) -> str:
        return f"urgent/{self._votes}"

    def leave(self) -> None:
        """Mark this rank as gone in order and wait, for 2 seconds at most, until all ranks are.

        Call it last of all, also when training has finished: the siblings may need this rank to pass on what they say,
        and a rank that ends without this mark counts as dead.
        """
        self._left = True
        self._control.leave(_LEAVE_SECONDS)

    # Siblings that end; on the control tree's thread, or on the one that requests

    def _note_loss(self, loss: Lose) -> None:
        if loss.silent_seconds:
            return  # rank 0 ends the group, and reports the silent ranks (`Links`)
        where = f" (on {loss.host})" if loss.host else ""
        self._lost = self._lost or f"rank {loss.rank} of this group{where} is gone ({loss.reason})"
        self._end_with_siblings()

    def _follow_sibling(self, _: str) -> None:
        """Take the end of a rank whose time is over for the request to leave: this rank may not have got one."""
        if not self._left:
            self.request()
            self._end_with_siblings()

    def _end_with_siblings(self) -> None:
        """End now if this rank was told to leave and another rank has died or given up.

        The step cannot be finished then. An agent sends SIGTERM to the other ranks when one dies. The end of a rank
        that gave up tells the siblings through the tree, which its own thread must not wait for.
        """
        if not self._requested or self._left:
            return
        if self._control.heard(_ABANDONED) is not None:
            call_aside(partial(self._abandon, "another rank of this group had to end"), "titan_ft_abandon")
        elif self._lost:
            line = f"{self._lost}, so that its step cannot be finished: ending at once"
            self._end(TERMINATED, partial(print_line, line))

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
        if self._num_ranks > 1:
            time.sleep(min(_NO_VOTE_SECONDS, self._timeout_seconds))
        reason = NOT_BEGUN
        if self._votes or self._begun:
            time.sleep(max(0.0, began + self._timeout_seconds - time.monotonic()))
            reason = f"fault_tolerance.drain_timeout_seconds ({self._timeout_seconds:g} s) is over"
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        line = f"SIGTERM: ending without having left in order, because {reason}"
        # A rank that has left has said so already, and only hangs in its clean-up.
        last_words = (
            () if self._left else (partial(print_line, line), partial(self._on_abandon, reason), self._tell_abandoned)
        )
        self._end(0, *last_words)

    def _tell_abandoned(self) -> None:
        """Let the siblings end as well. Without the mark that this rank has left, they would take it for dead."""
        self._control.say(_ABANDONED)
        self._control.announce_end(_ABANDON_SECONDS)

    def _end(self, status: int, *last_words: Callable[[], object]) -> None:
        if self._ending.acquire(blocking=False):
            end_process(status, *last_words)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def print_line(line: str) -> None:
    """Print a line to stderr, whatever the other threads are at."""
    os.write(2, f"titan_ft: {line}\n".encode())  # sys.stderr may be locked by a thread that hangs
