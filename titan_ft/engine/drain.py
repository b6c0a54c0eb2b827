# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leave on SIGTERM: all ranks of a group leave after the same vote.

After each exchange with the other groups, the ranks of a group *vote* whether it worked. Each vote
is a barrier over the ranks. A group that left in the middle of an exchange would break the exchange
for the others. So it leaves right after a vote, or while it waits for the others before an exchange
(`agree_to_stop_waiting`).

The ranks get SIGTERM at different moments, perhaps one of them before a vote and another one after
it. So they agree over the *control tree* (`membership/control_tree.py`). A rank sends a *note* into
the tree, and all ranks of the group hear it.

A rank ends in one of two ways:

- It *leaves*: all ranks of the group have agreed to leave at the same point.
- It is *abandoned*: `drain_timeout_seconds` are over before that, or it has nothing to finish yet.
  Then all ranks of the group end.

If a rank has died, no vote is possible, and the other ranks end at once. See docs/leaving.md.
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
from titan_ft.protocol.control.node import LostRank
from titan_ft.run.events import NOT_BEGUN
from titan_ft.system.threads import call_aside

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a rank that was ended before it could leave."""

_ONE_REQUEST_SECONDS = 1.0
"""SIGTERMs within this time are one request. Slurm signals every process of a job, and the agent
passes its own SIGTERM on. So a worker gets the same request twice."""
_LEAVE_SECONDS = 2.0
"""How long a rank that has left waits for its siblings, the other ranks of its group, to leave."""
STEPS_SHARE = 0.5
"""Share of `drain_timeout_seconds` in which a group may go on with the local steps of a round."""
WAITING_SHARE = 0.75
"""Share of `drain_timeout_seconds` after which a group no longer waits for other groups. The
remaining time is for the exchange with them, and for a save."""
_IDLE_SECONDS = 1.0
"""A rank with nothing to finish ends after this time. Until then it may find a dead sibling."""
_ABANDONED_TOPIC = "abandoned"
"""Topic of the note of a rank that is abandoned."""
_ABANDON_SECONDS = 0.2  # time for the neighbours in the tree to hear this note


class Drain:
    """One rank's part in leaving.

    The ranks agree on the vote after which they leave:

    1. Before a vote, a rank with a leave request sends the number of this vote to all ranks, as a
       note on the control tree.
    2. Right after each vote, every rank checks whether it has heard the number of this vote. If so,
       it leaves.

    All ranks find the note after the same vote, because a note reaches all ranks before the result
    of its sender's next vote. The number is necessary: a rank that checks late after one vote may
    have heard the note for the next vote already. All ranks of the group must cast the same votes,
    and each vote must be a barrier over the ranks.

    Threads: `Rounds` calls the methods around votes on the training thread. Any thread may call
    `request`, `spent_share` and `is_urgent`. Notes and losses of ranks come on the control tree's
    thread. A thread of this class ends the process when the timeout is over, even if the training
    thread hangs.

    Args:
        control: control tree of the group's ranks.
        num_ranks: number of the group's ranks.
        timeout_seconds: time from a leave request until the rank is abandoned.
        on_abandon: called with the reason before a rank is abandoned, on another thread.
    """

    def __init__(
        self,
        control: ControlTree,
        *,
        num_ranks: int,
        timeout_seconds: float,
        on_abandon: Callable[[str], None],
    ) -> None:
        self._control = control
        self._num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds
        self._on_abandon = on_abandon
        self._requested = False
        self._requested_at = math.inf  # monotonic time in seconds; infinite before a request
        self._num_votes = 0
        self._is_busy = False  # this rank has something to finish
        self._is_announced = False  # the others have heard of this rank's leave request
        self._agreed = False  # all ranks have found the note: the group leaves
        self._left = False  # `leave` was called
        self._lost = ""  # description of a lost rank of the group; empty = none is lost
        # Number of the vote before which this rank last said "hurry"; None = it never did.
        self._hurried_at_vote: int | None = None
        self._request_lock = threading.Lock()  # only one request starts the timeout
        self._end_lock = threading.Lock()  # held for good by the first thread that ends the process
        control.listen_for_notes(_ABANDONED_TOPIC, self._handle_abandoned)
        control.listen_for_losses(self._handle_loss)

    @property
    def requested(self) -> bool:
        """True after a leave request: by SIGTERM, by `request`, or by another rank of the group."""
        return self._requested

    @property
    def spent_share(self) -> float:
        """Share of the timeout that has passed, by this rank's clock; 0 before a leave request."""
        return max(0.0, time.monotonic() - self._requested_at) / self._timeout_seconds

    @property
    def is_urgent(self) -> bool:
        """True if the group should no longer wait for other groups, by this rank's clock."""
        return self.spent_share >= WAITING_SHARE

    def install(self) -> None:
        """Handle SIGTERM as a leave request, and a second SIGTERM as an order to end at once.

        Signals within a second of the first one count as that one. Processes that this one forks
        get SIGTERM's default action. Main thread only.
        """
        receive, send = os.pipe()
        os.set_blocking(send, False)
        threading.Thread(
            target=self._read_signals,
            args=(receive,),
            name="titan_ft_signals",
            daemon=True,
        ).start()
        # Python's handlers do not run while the main thread is inside a vote or a collective,
        # perhaps for long. Python's C handler writes a byte to the pipe at any time.
        signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.siginterrupt(signal.SIGTERM, False)  # some libraries cannot handle EINTR
        # A forked child must die of SIGTERM. It must not write to this process's pipe, not even
        # right after the fork.
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=_restore_signals,
        )

    def request(self) -> None:
        """Request that the group leaves; any thread, returns at once. The timeout starts now."""
        with self._request_lock:
            if self._requested:
                return
            self._requested = True
            self._requested_at = time.monotonic()
        threading.Thread(target=self._expire, name="titan_ft_drain_timeout", daemon=True).start()
        # A rank may have died before this request.
        self._end_with_siblings()

    def mark_busy(self) -> None:
        """Note that this rank has something to finish, even before its first vote.

        Without this mark and without a vote, a rank ends soon after a leave request.
        """
        self._is_busy = True

    @property
    def seconds_left(self) -> float:
        """Time that is left of the timeout, by this rank's clock."""
        return max(0.0, (1.0 - self.spent_share) * self._timeout_seconds)

    def before_vote(self, may_leave: Callable[[], bool]) -> None:
        """Announce a leave request to the other ranks. Call this right before each vote.

        Training thread.

        Args:
            may_leave: returns True if the group may leave after this vote, as this rank sees it. If
                not, this rank announces the request before a later vote.
        """
        self._num_votes += 1
        if self._is_announced or not self._requested:
            return
        if may_leave():
            self._control.send_note(f"leave/{self._num_votes}")
            self._is_announced = True

    def after_vote(self) -> bool:
        """Return True if the group leaves. Call this right after each vote.

        The result is the same on all ranks of the group. Training thread.
        """
        if not self._agreed and self._control.read_note(f"leave/{self._num_votes}") is not None:
            self._agreed = True
            self.request()
        return self._agreed

    def wait_for_others(self, is_answered: Callable[[], bool], pause: Callable[[], object]) -> bool:
        """Wait until other groups are ready for a round; training thread.

        Args:
            is_answered: returns True if this rank has its quorum.
            pause: waits for the quorum for a moment.

        Returns:
            False if the group leaves and waits no longer; the same on all ranks of the group.
        """
        while True:
            answered = is_answered()
            if self.agree_to_stop_waiting(answered):
                return False
            if answered:
                return True
            pause()

    def agree_to_stop_waiting(self, is_answered: bool) -> bool:
        """Take the next step of the agreement below; return True if the group stops waiting.

        The result is the same on all ranks of the group. A waiting rank calls this again and again.

        1. When the time of a rank is nearly over, the rank says "hurry". Its siblings then say
           "hurry" too, even without a leave request.
        2. A rank that gets its quorum before it has said "hurry" goes on. The group cannot leave
           then, because that takes the "hurry" of all ranks.
        3. A rank that gets its quorum after it has said "hurry" proposes to go on.
        4. When all ranks have said "hurry", a rank without a quorum proposes to leave.
        5. The first proposal that reaches rank 0 decides for all ranks.

        Args:
            is_answered: this rank has its quorum.
        """
        # The number of the vote is in each topic: notes of an earlier wait must not count.
        vote = self._num_votes
        hurry_topic = f"hurry/{vote}"
        has_hurried = self._hurried_at_vote == vote
        if not has_hurried:
            if is_answered:
                return False
            if not self.is_urgent and not self._is_a_sibling_urgent():
                return False
            self._hurried_at_vote = vote
            # The ranks hear this note when all of them have sent it.
            self._control.send_note_with_all(hurry_topic)
            # The ranks hear this note at once.
            self._control.send_note(self._urgent_topic())
        if is_answered:
            proposal = "go on"
        elif self._control.read_note(hurry_topic) is not None:
            proposal = "leave"
        else:
            return False
        # `propose` returns the proposal that reached rank 0 first.
        return self._control.propose(f"waiting/{vote}", proposal) == "leave"

    def _is_a_sibling_urgent(self) -> bool:
        return self._control.read_note(self._urgent_topic()) is not None

    def _urgent_topic(self) -> str:
        return f"urgent/{self._num_votes}"

    def leave(self) -> None:
        """Mark this rank as gone in order. Wait, for 2 seconds at most, until its siblings are too.

        Call this last of all, also when training has finished. The siblings may need this rank to
        pass on their messages, and a rank that ends without this mark counts as dead.
        """
        self._left = True
        self._control.leave(_LEAVE_SECONDS)

    # Siblings that end; on the control tree's thread, or on the thread that calls `request`

    def _handle_loss(self, loss: LostRank) -> None:
        is_silent = loss.silent_seconds > 0
        if is_silent:
            return  # rank 0 ends the group, and reports the silent ranks (`Links`)
        where = ""
        if loss.host:
            where = f" (on {loss.host})"
        if not self._lost:
            self._lost = f"rank {loss.rank} of this group{where} is gone ({loss.reason})"
        self._end_with_siblings()

    def _handle_abandoned(self, _: str) -> None:
        """Treat the end of an abandoned sibling as a leave request."""
        if not self._left:
            self.request()
            self._end_with_siblings()

    def _end_with_siblings(self) -> None:
        """End now if this rank has a leave request, and another rank has died or is abandoned.

        The step cannot be finished then. When a rank dies, the agent sends SIGTERM to the other
        ranks, which is their leave request.
        """
        if not self._requested or self._left:
            return
        if self._control.read_note(_ABANDONED_TOPIC) is not None:
            reason = "another rank of this group had to end"
            # `_abandon` sends a note and waits for it. The tree's own thread may be here, and must
            # not wait, because it sends the notes.
            call_aside(partial(self._abandon, reason), "titan_ft_abandon")
        elif self._lost:
            line = f"{self._lost}, so that its step cannot be finished: ending at once"
            self._end(TERMINATED, partial(print_line, line))

    # Threads

    def _read_signals(self, receive: int) -> None:
        """Read the numbers of the signals that this process gets.

        Args:
            receive: file descriptor. Python's C handler writes one byte for each signal: its
                number.
        """
        first_at: float | None = None  # time of the first SIGTERM
        while True:
            signal_numbers = os.read(receive, 64)
            if signal.SIGTERM not in signal_numbers:
                continue
            if first_at is None:
                first_at = time.monotonic()
                self.request()
            elif time.monotonic() - first_at > _ONE_REQUEST_SECONDS:
                os._exit(TERMINATED)

    def _expire(self) -> None:
        """Abandon this rank when its time is over, or soon if it has nothing to finish."""
        started = time.monotonic()
        has_siblings = self._num_ranks > 1
        if has_siblings:
            time.sleep(min(_IDLE_SECONDS, self._timeout_seconds))
        reason = NOT_BEGUN  # to train
        if self._num_votes or self._is_busy:
            time.sleep(max(0.0, started + self._timeout_seconds - time.monotonic()))
            reason = f"fault_tolerance.drain_timeout_seconds ({self._timeout_seconds:g} s) is over"
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        """End this rank, and let its siblings end. The status is 0: the agent must not restart it.

        Any thread.
        """
        line = f"SIGTERM: ending without having left in order, because {reason}"
        if self._left:
            self._end(0)  # the siblings know that this rank has left; it only hangs in its clean-up
            return
        self._end(
            0,
            partial(print_line, line),
            partial(self._on_abandon, reason),
            self._announce_abandoned,
        )

    def _announce_abandoned(self) -> None:
        """Let the siblings end as well. Without this note, they would report this rank as dead."""
        self._control.send_note(_ABANDONED_TOPIC)
        self._control.announce_end(_ABANDON_SECONDS)

    def _end(self, status: int, *final_calls: Callable[[], object]) -> None:
        if self._end_lock.acquire(blocking=False):
            end_process(status, *final_calls)


def _restore_signals() -> None:
    """Give SIGTERM its default action, in a process that was just forked."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def print_line(line: str) -> None:
    """Print a line to stderr, even if other threads hang."""
    # A thread that hangs may hold the lock of sys.stderr.
    os.write(2, f"titan_ft: {line}\n".encode())
