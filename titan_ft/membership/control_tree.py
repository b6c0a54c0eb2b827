# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Control tree of one replica group: agreements, notes and losses among its ranks.

`group.Group` agrees by collectives, which the training threads alone may make. The control tree
serves the other threads, and decisions that fall while the training threads compute or wait: votes,
quorums, aborts, leaving. An agreement costs one trip up the tree and one trip down.

See docs/membership.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from titan_ft.membership.control_handshake import Identity, Secret
from titan_ft.membership.control_pings import EchoServer
from titan_ft.membership.control_sockets import ControlSockets
from titan_ft.protocol.control.node import (
    Action,
    Answer,
    Decide,
    Hear,
    Left,
    Lose,
    Node,
    drop_oldest,
)
from titan_ft.protocol.control.tree import FAN_OUT, find_children, find_parent
from titan_ft.protocol.errors import LighthouseError, RankLostError, first_line
from titan_ft.system.address import join_address
from titan_ft.system.process import Process, node_name
from titan_ft.system.seal import UnsealedError, add_seal, remove_seal

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The parent listens before its address is in the store, so a healthy one answers within
milliseconds."""


@dataclass(frozen=True)
class Announcement:
    """A decision of rank 0, and when this rank got it.

    Attributes:
        at: monotonic time in seconds at which the decision reached this rank. The rank may read it
            later: waits for other groups are counted from this time.
    """

    text: str
    at: float


HearTopic = Callable[[str], None]
"""Takes the topic of a note, without its prefix."""

HearLoss = Callable[[Lose], None]
"""Takes the lost rank, its host and the reason."""


class ControlTree:
    """One rank's place in the control tree of its group.

    All ranks of the group make the same agreements in the same order, on each rank one thread at a
    time. A group of one rank opens no socket and starts no thread.

    Args:
        host: numeric address at which the group's ranks reach this rank.
        token: the run's shared secret. A process without it takes no part.
        store: of the group, used by the constructor alone, to exchange addresses. None = the group
            has one rank.
        key: prefix of the keys in the store, unique to this attempt of the group.
        name: of this rank's host, for people.
        patience: seconds without a heartbeat after which a child of a rank is lost; the same on all
            ranks; math.inf = nobody watches.
        fan_out: children of a rank; the same on all ranks.

    Raises:
        LighthouseError: the parent of this rank cannot be reached.
        RuntimeError: the parent did not publish its address within the store's timeout.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        host: str,
        token: str,
        store: TCPStore | None,
        key: str,
        name: str = "",
        patience: float = math.inf,
        fan_out: int = FAN_OUT,
    ) -> None:
        assert store is not None or num_ranks == 1, "ranks find each other by the group's store"
        self._rank, self._name = rank, name or node_name()
        self._parent = find_parent(rank, fan_out)
        self._changed = threading.Condition()  # guards all below, the node and the sockets
        self._node = Node(rank, num_ranks, fan_out)
        self._words: dict[int, frozenset[str] | None] = {}
        self._answers: dict[int, Announcement] = {}
        self._heard: dict[str, str] = {}
        self._topic_listeners: dict[str, HearTopic] = {}  # by prefix
        self._loss_listeners: list[HearLoss] = []
        self._losses: list[Lose] = []
        self._callbacks: deque[Callable[[], None]] = deque()  # of listeners
        self._num_unfinished_callbacks = 0  # queued, and the one that runs
        self._failure: Exception | None = None  # why no agreement is possible any more
        self._left = self._agreements_ended = self._closed = False
        self._has_thread = False  # that calls the listeners
        self.number = 0
        """Number of agreements that this rank has joined."""
        self._sockets: ControlSockets | None = None
        self._echo: EchoServer | None = None  # answers the parent's pings
        if store is None or num_ranks == 1:
            return
        if rank > 0 and patience < math.inf:
            self._echo = EchoServer(host)
        echo = self._echo.address if self._echo is not None else ""
        own = Identity(self._name, str(Process.this()), echo)
        self._sockets = ControlSockets(
            self._node,
            self._changed,
            rank=rank,
            children=find_children(rank, num_ranks, fan_out),
            secret=Secret(token, key),
            host=host,
            own=own,
            patience=patience,
            on_action=self._take,
            on_turn=self._run_callbacks,
            on_failure=self._fail,
        )
        self._has_thread = True
        try:
            self._connect(self._sockets, store, key, token, own)
        except BaseException:
            self.close()
            raise

    def rank0_decides(
        self,
        found: Collection[str],
        decide: Callable[[set[str]], str],
        timeout: float | None = None,
    ) -> str:
        """Let rank 0 call `decide`, and return the result on all ranks. All ranks call this.

        A decision that depends on a clock or on the lighthouse belongs into `decide`: two ranks
        that looked for themselves could decide differently. If `decide` raises, rank 0 must end:
        the other ranks wait for its decision until it is lost.

        Args:
            found: words that this rank has found; `decide` gets the words of all ranks.
            timeout: seconds to wait for the other ranks. On the other ranks it includes the time
                that rank 0 takes for `decide`. The caller makes no agreement after a timeout.

        Raises:
            LighthouseError: this group has left the job meanwhile. It is what a request at the
                lighthouse raises then, and what callers of both catch.
            RankLostError: names the rank and its host.
            TimeoutError: the others took longer.
            ValueError: words or decision are too long for a message.
        """
        number = self.number + 1
        with self._changed:
            self._raise_if_ended()
            self._call(partial(self._node.join, number, found))
            self.number = number  # words that are too long make no agreement
            arrived = self._words if self._rank == 0 else self._answers
            self._wait(lambda: number in arrived, timeout)
            if self._rank > 0:
                return self._answers.pop(number).text
            words = self._words.pop(number)
        if words is None:
            raise ValueError("the words of all ranks together are too long for a message")
        decision = decide(set(words))  # without the lock: it may ask the lighthouse for seconds
        with self._changed:
            self._call(partial(self._node.decide, number, decision))
            self._answers.pop(number, None)  # rank 0 has its decision already
        return decision

    def rank0_announces(self, decide: Callable[[], str]) -> Announcement:
        """Let rank 0 call `decide`, and return the result on all ranks. All ranks call this.

        Rank 0 waits for no other rank: this is an agreement for which no rank has anything to say.

        Raises:
            LighthouseError, RankLostError, ValueError: see `rank0_decides`.
        """
        number = self.number + 1
        text = decide() if self._rank == 0 else ""  # without the lock: it may take seconds
        with self._changed:
            self._raise_if_ended()
            if self._rank == 0:
                self._call(partial(self._node.announce, number, text))
            self.number = number
            self._wait(lambda: number in self._answers, None)
            return self._answers.pop(number)

    def pause(self, seconds: float) -> None:
        """Sleep. Ends early, with an error, if the group leaves or a rank is lost.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            RankLostError: names the rank and its host.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, seconds)
            self._raise_if_ended()

    def say(self, topic: str, text: str = "") -> None:
        """Say something to all ranks of the group, this one included; any thread, returns at once.

        Of several texts for one topic rank 0 takes the first, and every rank hears that one. If a
        rank says a note and then joins an agreement, every rank hears the note before the decision.
        Before an announcement, the notes of rank 0 alone have this guarantee.

        Raises:
            ValueError: the text is too long for a message.
        """
        with self._changed:
            if not self._closed:
                self._call(partial(self._node.say, topic, text))
        self._run_callbacks_without_thread()

    def say_with_all(self, topic: str) -> None:
        """Say something that all ranks hear once each of them has said it; any thread, returns at once.

        Raises:
            ValueError: the topic is too long for a message.
        """
        with self._changed:
            if not self._closed:
                self._call(partial(self._node.say_with_all, topic))
        self._run_callbacks_without_thread()

    def heard(self, topic: str) -> str | None:
        """Return the text of a topic; None if this rank has not heard of it lately (`MAX_TOPICS`)."""
        with self._changed:
            return self._heard.get(topic)

    def settle(self, topic: str, text: str) -> str:
        """Say something, and return the text that all ranks hear for this topic: the first one.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            RankLostError: names the rank and its host.
        """
        self.say(topic, text)
        with self._changed:
            # Notes outlast `end_agreements`: only a close or a loss ends this wait.
            self._changed.wait_for(lambda: topic in self._heard or self._closed or self._failure is not None)
            if topic not in self._heard:
                self._raise_if_ended()
            return self._heard[topic]

    def listen(self, prefix: str, hear: HearTopic) -> None:
        """Call `hear` once for each topic with this prefix, also for topics that came before.

        The tree's thread calls `hear`, which must not block: that thread serves the children. A
        prefix has one listener.
        """
        with self._changed:
            assert prefix not in self._topic_listeners, f"{prefix!r} has a listener"
            self._topic_listeners[prefix] = hear
            for topic in self._heard:
                if topic.startswith(prefix):
                    self._add_callback(partial(hear, topic.removeprefix(prefix)))
        self._run_callbacks_without_thread()

    def listen_for_losses(self, hear: HearLoss) -> None:
        """Call `hear` once for each rank that is lost; see `listen`.

        A group of one rank loses none.
        """
        with self._changed:
            self._loss_listeners.append(hear)
            for loss in self._losses:
                self._add_callback(partial(hear, loss))
        self._run_callbacks_without_thread()

    @property
    def losses(self) -> list[Lose]:
        """The ranks that are lost, in the order of the reports."""
        with self._changed:
            return list(self._losses)

    def end_agreements(self) -> None:
        """Make no more agreements: this group has left the job. Notes go on until `leave`."""
        with self._changed:
            self._agreements_ended = True
            self._changed.notify_all()

    def leave(self, seconds: float) -> None:
        """End this rank's part in order, so that its end is no loss to the others.

        Waits for the neighbours to leave as well, at most so many seconds: they may need this rank
        to pass on a last message. After that they wait for this rank no more.
        """
        self.announce_end(seconds)
        self.close()

    def announce_end(self, seconds: float) -> None:
        """Let the neighbours know that this process ends in order, and wait at most so many seconds.

        Ends no wait of another thread: the caller ends the process.
        """
        with self._changed:
            self._call(self._node.leave)
            self._changed.wait_for(lambda: self._left or self._closed, seconds)
            self._call(self._node.end)

    def close(self) -> None:
        """Close the connections, and end all waiting. Without `leave` the others lose this rank."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._sockets is not None:
            self._sockets.close()
        if self._echo is not None:
            self._echo.close()

    # Start

    def _connect(self, sockets: ControlSockets, store: TCPStore, key: str, token: str, own: Identity) -> None:
        """Publish this rank's address, and connect to the parent.

        Raises:
            LighthouseError: the parent cannot be reached, or its address is not of this run.
        """
        if sockets.address is not None:  # a rank without children does not listen
            address = join_address(*sockets.address)
            own_key = f"{key}/{self._rank}"
            store.set(own_key, add_seal(token, own_key, f"{address} {own.process} {own.host}"))
        if self._parent is None:
            with self._changed:
                sockets.start()
            return
        parent_key = f"{key}/{self._parent}"
        sealed = store.get(parent_key).decode(errors="replace")  # waits until it is there
        try:
            found = remove_seal(token, parent_key, sealed)
        except UnsealedError as unsealed:
            raise LighthouseError(f"rank {self._rank} of this group ({own.host}): {unsealed}") from unsealed
        address, process, parent_host = found.split(" ", 2)
        with self._changed:
            sockets.start_below(address, Identity(parent_host, process))
        if self._await_parent(sockets, self._parent):
            return
        error = sockets.last_error or self._failure or f"no answer within {CONNECT_SECONDS:g} s"
        raise LighthouseError(
            f"rank {self._rank} of this group ({own.host}) cannot connect to rank {self._parent} "
            f"({parent_host}) at {address}: {error}; check that the hosts of a group reach each "
            "other at any port, that all have the same TITAN_FT_TOKEN, and "
            "fault_tolerance.advertise_address"
        )

    def _await_parent(self, sockets: ControlSockets, parent: int) -> bool:
        """Wait for the first connection. Returns False if there is none."""

        def is_over() -> bool:
            return sockets.is_connected(parent) or self._failure is not None or self._closed

        with self._changed:
            self._changed.wait_for(is_over, CONNECT_SECONDS)
            return sockets.is_connected(parent)

    # With the lock

    def _call(self, event: Callable[[float], list[Action]]) -> None:
        """Give the node an event: a method that takes the time."""
        if self._sockets is not None:
            self._sockets.call(event)
            return
        for action in event(time.monotonic()):  # without neighbours no action concerns a connection
            self._take(action)

    def _take(self, action: Action) -> None:
        """Carry out an action of the node that concerns no connection."""
        match action:
            case Decide(number, words):
                self._words[number] = words
            case Answer(number, text):
                self._answers[number] = Announcement(text, time.monotonic())
            case Hear(topic, text):
                self._heard[topic] = text
                drop_oldest(self._heard)
                for prefix, hear in self._topic_listeners.items():
                    if topic.startswith(prefix):
                        self._add_callback(partial(hear, topic.removeprefix(prefix)))
            case Lose(rank, reason, host):
                where = f" (on {host})" if host else ""
                lost = f"rank {rank} of this group{where} is lost: {reason}"
                self._note_loss(action, RankLostError(lost))
            case Left():
                self._left = True
        self._changed.notify_all()

    def _note_loss(self, loss: Lose, error: Exception) -> None:
        self._failure = self._failure or error
        self._losses.append(loss)
        for hear in self._loss_listeners:
            self._add_callback(partial(hear, loss))

    def _add_callback(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        self._num_unfinished_callbacks += 1
        if self._sockets is not None:
            self._sockets.wake()  # its thread calls it, not the thread that called `say`

    def _wait(self, has_arrived: Callable[[], bool], timeout: float | None) -> None:
        """Wait until it has arrived, and until all callbacks of listeners have returned.

        So a listener has seen the notes before a decision when the caller acts on the decision.
        """

        def is_over() -> bool:
            return self._has_ended or (has_arrived() and not self._num_unfinished_callbacks)

        in_time = self._changed.wait_for(is_over, timeout)
        if has_arrived():
            return  # also if a rank was lost just now: the others may have this decision
        self._raise_if_ended()
        if not in_time:
            raise TimeoutError(f"the other ranks of this group took longer than {timeout:g} s")

    @property
    def _has_ended(self) -> bool:
        """True if no agreement is made any more."""
        return self._closed or self._agreements_ended or self._failure is not None

    def _raise_if_ended(self) -> None:
        if self._closed or self._agreements_ended:
            raise LighthouseError("this group has left the job")
        if self._failure is not None:
            # A listener may end the process with a report. The error would end it without one.
            self._changed.wait_for(lambda: self._closed or not self._num_unfinished_callbacks)
            raise type(self._failure)(*self._failure.args)  # anew for each thread that waits

    # On the tree's thread, or on the caller's if there is none; without the lock

    def _run_callbacks_without_thread(self) -> None:
        """Call the listeners if no thread does: in a group of one rank, and after a failure."""
        if not self._has_thread:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Call the listeners, in the order of the notes and losses."""
        # Read without the lock: a callback that is queued after this test wakes the thread.
        while self._callbacks:
            with self._changed:
                if not self._callbacks:
                    return  # without the tree's thread: another thread has taken it
                callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:  # the next callbacks, and the tree, must go on all the same
                logger.exception("a listener of the control tree has failed")
            with self._changed:
                self._num_unfinished_callbacks -= 1
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all waiting after an unexpected error of the tree's thread, which ends.

        The listeners hear of the loss of this rank itself: it can do nothing any more in its group.
        """
        with self._changed:
            text = f"the control tree failed on this rank: {first_line(error)}"
            self._note_loss(Lose(self._rank, text, self._name), RuntimeError(text))
            self._has_thread = False
            self._changed.notify_all()
        self._run_callbacks()
