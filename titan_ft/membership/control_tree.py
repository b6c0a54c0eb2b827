# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Control tree of one replica group: agreements, notes and losses among the group's ranks.

The ranks of a group must act alike: they must all commit a step, or none of them. For this they
need connections that work while a collective hangs, and from threads other than the training
thread. So each rank of the group has TCP connections to its parent and its children in a tree whose
root is rank 0. Three things travel in the tree:

- An *agreement*: each rank sends *words* (strings) up to rank 0. Rank 0 decides, and sends the
  decision down to all ranks. A vote is an agreement.
- A *note*: a text with a topic, which any rank sends to all ranks at any time. For example, a rank
  reports that it has aborted the exchange.
- A *loss*: the report that a rank has died or is silent.

`Node` (protocol/control/node.py) is the protocol, as pure code. `ControlSockets` has the
connections and the tree's thread. `ControlTree` is the interface for the threads of this rank: it
gives the node events, and lets threads wait for the results.

See docs/membership.md, "Control tree".
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
    HeardNote,
    LostRank,
    MayExit,
    Node,
    drop_oldest_topic,
)
from titan_ft.protocol.control.tree import FAN_OUT, find_children, find_parent
from titan_ft.protocol.errors import LighthouseError, RankLostError, first_line
from titan_ft.system.address import join_address
from titan_ft.system.process import Process, node_name
from titan_ft.system.refusal import Refusal
from titan_ft.system.seal import UnsealedError, add_seal, remove_seal

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""Limit of the wait for the connection to the parent. The parent listens before it publishes its
address, so a healthy parent answers within milliseconds."""


@dataclass(frozen=True)
class ReceivedDecision:
    """A decision of rank 0, and when it reached this rank.

    Attributes:
        received_at: monotonic time in seconds at which the decision arrived. A busy thread may read
            the decision later. All ranks received it at nearly the same moment, so they measure
            their waits for other groups from this time.
    """

    text: str
    received_at: float


TopicListener = Callable[[str], None]
"""Called with the topic of a note, without the prefix of the topic."""

LossListener = Callable[[LostRank], None]


class ControlTree:
    """One rank's end of the control tree of its group.

    `training/links.py` creates it when the worker starts. `Membership`, `Seat`, `Rendezvous`,
    `Partition` and the engine call it.

    Threads: one thread at a time makes agreements (`rank0_decides`, `rank0_announces`), and all
    ranks of the group make the same agreements in the same order. Any thread may call the other
    methods. The tree's own thread calls the listeners. A group of one rank opens no socket and
    starts no thread.

    After a loss, and after a failure of the tree's thread, every agreement raises the same error.
    Notes still travel between the ranks that are connected.

    Args:
        host: numeric address at which the group's ranks reach this rank.
        token: the run's shared secret. A process without the token cannot connect.
        store: the group's TCPStore, through which the ranks exchange their addresses; used only by
            the constructor. None = the group has one rank.
        key: prefix of the keys in the store, unique to this start of the group.
        host_name: name of this rank's host, for people.
        patience: seconds after which a child that does not answer pings is lost; the same on all
            ranks. math.inf = no pings.
        fan_out: number of children of a rank; the same on all ranks.
        on_refusal: takes a report about a connection that was refused (see `ControlSockets`).

    Attributes:
        num_agreements: agreements that this rank has joined.

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
        host_name: str = "",
        patience: float = math.inf,
        fan_out: int = FAN_OUT,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        assert store is not None or num_ranks == 1, "ranks find each other by the group's store"
        self._rank = rank
        self._host_name = host_name or node_name()
        self._parent = find_parent(rank, fan_out)
        # The lock of all fields below, of the node and of the sockets. Notified at each change.
        self._condition = threading.Condition()
        self._node = Node(rank, num_ranks, fan_out)
        # By the number of the agreement, on rank 0: the words of all ranks; None = too long.
        self._words: dict[int, frozenset[str] | None] = {}
        self._answers: dict[int, ReceivedDecision] = {}  # by the number of the agreement
        self._notes: dict[str, str] = {}  # text by topic
        self._topic_listeners: dict[str, TopicListener] = {}  # by prefix
        self._loss_listeners: list[LossListener] = []
        self._losses: list[LostRank] = []
        self._pending_calls: deque[Callable[[], None]] = deque()  # calls of listeners
        self._num_pending_calls = 0  # includes the call that runs now
        self._failure: Exception | None = None  # the error that all agreements raise from now on
        self._may_exit = False  # no neighbour needs this rank any more
        self._agreements_ended = False
        self._closed = False
        # False if the tree has no thread. Then the thread that sends a note calls the listeners.
        self._thread_calls_listeners = False
        self.num_agreements = 0
        self._sockets: ControlSockets | None = None
        self._echo: EchoServer | None = None  # answers the parent's pings
        if store is None or num_ranks == 1:
            return
        has_pings = patience < math.inf
        if rank > 0 and has_pings:
            self._echo = EchoServer(host)
        echo_address = self._echo.address if self._echo is not None else ""
        own = Identity(self._host_name, str(Process.this()), echo_address)
        self._sockets = ControlSockets(
            self._node,
            self._condition,
            rank=rank,
            children=find_children(rank, num_ranks, fan_out),
            secret=Secret(token, key),
            host=host,
            own=own,
            patience=patience,
            on_action=self._handle_action,
            on_turn=self._call_listeners,
            on_failure=self._fail,
            on_refusal=on_refusal,
        )
        self._thread_calls_listeners = True
        try:
            self._connect(self._sockets, store, key, token, own)
        except BaseException:
            self.close()
            raise

    def rank0_decides(
        self,
        words: Collection[str],
        decide: Callable[[set[str]], str],
        timeout: float | None = None,
    ) -> str:
        """Let rank 0 call `decide`, and return its result on all ranks. All ranks must call this.

        Read a clock or ask the lighthouse only in `decide`. If each rank did so by itself, two
        ranks could decide differently. If `decide` raises, rank 0 must end: the other ranks wait
        for its decision until they learn that rank 0 is lost.

        Args:
            words: this rank's words. `decide` gets the union of the words of all ranks.
            timeout: seconds to wait for the other ranks. On ranks other than 0 it includes the
                duration of `decide`. After a timeout the caller must make no further agreement.

        Raises:
            LighthouseError: `end_agreements` or `close` was called, because this group leaves the
                job. A request to the lighthouse raises the same error then, so the callers handle
                both in the same way.
            RankLostError: a rank of the group is lost; names the rank and its host.
            TimeoutError: the other ranks took longer than `timeout`.
            ValueError: the words or the decision are too long for a message.
        """
        number = self.num_agreements + 1
        with self._condition:
            self._raise_if_ended()
            self._give_event(partial(self._node.join, number, words))
            # Only now: `join` raises if the words are too long, and then there is no agreement.
            self.num_agreements = number
            if self._rank > 0:
                self._wait(lambda: number in self._answers, timeout)
                return self._answers.pop(number).text
            self._wait(lambda: number in self._words, timeout)
            all_words = self._words.pop(number)
        if all_words is None:
            raise ValueError("the words of all ranks together are too long for a message")
        # Without the lock, because `decide` may wait for the lighthouse for seconds.
        decision = decide(set(all_words))
        with self._condition:
            self._give_event(partial(self._node.decide, number, decision))
            # The node returned the decision to rank 0 as well, where nobody waits for it.
            self._answers.pop(number, None)
        return decision

    def rank0_announces(self, decide: Callable[[], str]) -> ReceivedDecision:
        """Let rank 0 call `decide`, and return its result on all ranks. All ranks must call this.

        Unlike in `rank0_decides`, rank 0 does not wait for the other ranks.

        Raises:
            LighthouseError, RankLostError, ValueError: see `rank0_decides`.
        """
        number = self.num_agreements + 1
        text = ""
        if self._rank == 0:
            text = decide()  # Without the lock, because it may take seconds.
        with self._condition:
            self._raise_if_ended()
            if self._rank == 0:
                self._give_event(partial(self._node.announce, number, text))
            self.num_agreements = number
            self._wait(lambda: number in self._answers, None)
            return self._answers.pop(number)

    def pause(self, seconds: float) -> None:
        """Sleep. The sleep ends early, with an error, if no agreement is possible any more.

        Raises:
            LighthouseError, RankLostError: see `rank0_decides`.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._has_ended, seconds)
            self._raise_if_ended()

    def send_note(self, topic: str, text: str = "") -> None:
        """Send a note to all ranks of the group, this rank included. Returns at once.

        If ranks send several texts for one topic, every rank gets the text that reached rank 0
        first. If a rank sends a note and then joins an agreement (`rank0_decides`), every rank has
        the note before the decision. With `rank0_announces` this is so only for notes of rank 0.

        Raises:
            ValueError: the text is too long for a message.
        """
        with self._condition:
            if not self._closed:
                self._give_event(partial(self._node.send_note, topic, text))
        self._call_listeners_if_no_thread()

    def send_note_with_all(self, topic: str) -> None:
        """Send a note that reaches the ranks after all of them have sent it. Returns at once.

        Raises:
            ValueError: the topic is too long for a message.
        """
        with self._condition:
            if not self._closed:
                self._give_event(partial(self._node.send_note_with_all, topic))
        self._call_listeners_if_no_thread()

    def read_note(self, topic: str) -> str | None:
        """Return the text of a topic; None = there is no such note among the last `MAX_TOPICS`."""
        with self._condition:
            return self._notes.get(topic)

    def propose(self, topic: str, text: str) -> str:
        """Propose a text for a topic, and return the text that all ranks get for this topic.

        The first proposal that reaches rank 0 wins, so the result may be another rank's text. Waits
        until the result is known.

        Raises:
            LighthouseError, RankLostError: see `rank0_decides`.
        """
        self.send_note(topic, text)
        with self._condition:
            # Not `_has_ended`: notes still travel after `end_agreements`.
            self._condition.wait_for(partial(self._is_decided_or_ended, topic))
            if topic not in self._notes:
                self._raise_if_ended()
            return self._notes[topic]

    def _is_decided_or_ended(self, topic: str) -> bool:
        if topic in self._notes:
            return True
        return self._closed or self._failure is not None

    def listen_for_notes(self, prefix: str, hear: TopicListener) -> None:
        """Call `hear` once for each note whose topic has this prefix, earlier notes included.

        The tree's thread calls `hear`, which must not block, because the thread also serves the
        other ranks. There is at most one listener for a prefix.
        """
        with self._condition:
            assert prefix not in self._topic_listeners, f"{prefix!r} has a listener"
            self._topic_listeners[prefix] = hear
            for topic in self._notes:
                if topic.startswith(prefix):
                    self._queue_listener_call(partial(hear, topic.removeprefix(prefix)))
        self._call_listeners_if_no_thread()

    def listen_for_losses(self, hear: LossListener) -> None:
        """Call `hear` once for each lost rank, earlier losses included.

        The tree's thread calls `hear`, which must not block.
        """
        with self._condition:
            self._loss_listeners.append(hear)
            for loss in self._losses:
                self._queue_listener_call(partial(hear, loss))
        self._call_listeners_if_no_thread()

    @property
    def losses(self) -> list[LostRank]:
        """The lost ranks, in the order in which this rank learned of them."""
        with self._condition:
            return list(self._losses)

    def end_agreements(self) -> None:
        """Let all agreements raise an error, because this group leaves the job.

        Notes still travel until `leave` or `close`.
        """
        with self._condition:
            self._agreements_ended = True
            self._condition.notify_all()

    def leave(self, seconds: float) -> None:
        """Leave the tree in order, so that the other ranks do not report this rank as lost.

        Args:
            seconds: limit of the wait for the neighbours to leave as well. They may need this rank
                to pass on a last message.
        """
        self.announce_end(seconds)
        self.close()

    def announce_end(self, seconds: float) -> None:
        """Do the same as `leave`, but leave the connections open and other threads waiting.

        For a caller that ends the process right after this call.
        """
        with self._condition:
            self._give_event(self._node.leave)
            self._condition.wait_for(lambda: self._may_exit or self._closed, seconds)
            self._give_event(self._node.end)

    def close(self) -> None:
        """Close the connections, and end all waits.

        Without `leave` before it, the other ranks report this rank as lost.
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._sockets is not None:
            self._sockets.close()
        if self._echo is not None:
            self._echo.close()

    # Start

    def _connect(
        self,
        sockets: ControlSockets,
        store: TCPStore,
        key: str,
        token: str,
        own: Identity,
    ) -> None:
        """Publish this rank's address, and connect to the parent.

        Raises:
            LighthouseError: the parent cannot be reached, or its address has no valid seal.
        """
        if sockets.address is not None:  # None: a rank without children does not listen.
            address = join_address(*sockets.address)
            own_key = f"{key}/{self._rank}"
            # Sealed with the token, because any process that reaches the store can write to it.
            store.set(own_key, add_seal(token, own_key, f"{address} {own.process} {own.host}"))
        if self._parent is None:
            with self._condition:
                sockets.start()
            return
        parent_key = f"{key}/{self._parent}"
        # `get` waits until the parent has set the key.
        sealed = store.get(parent_key).decode(errors="replace")
        try:
            text = remove_seal(token, parent_key, sealed)
        except UnsealedError as unsealed:
            this_rank = f"rank {self._rank} of this group ({own.host})"
            raise LighthouseError(f"{this_rank}: {unsealed}") from unsealed
        address, process, parent_host = text.split(" ", 2)
        with self._condition:
            sockets.connect_to_parent(address, Identity(parent_host, process))
        if self._await_parent(sockets, self._parent):
            return
        error = sockets.last_error
        if not error and self._failure is not None:
            error = str(self._failure)
        if not error:
            error = f"no answer within {CONNECT_SECONDS:g} s"
        raise LighthouseError(
            f"rank {self._rank} of this group ({own.host}) cannot connect to rank {self._parent} "
            f"({parent_host}) at {address}: {error}; check that the hosts of a group reach each "
            "other at any port, that all have the same TITAN_FT_TOKEN, and "
            "fault_tolerance.advertise_address"
        )

    def _await_parent(self, sockets: ControlSockets, parent: int) -> bool:
        """Wait for the connection to the parent. Return False if none was made."""

        def is_over() -> bool:
            if sockets.is_connected(parent):
                return True
            return self._failure is not None or self._closed

        with self._condition:
            self._condition.wait_for(is_over, CONNECT_SECONDS)
            return sockets.is_connected(parent)

    # Under the lock

    def _give_event(self, event: Callable[[float], list[Action]]) -> None:
        """Call a method of the node, and carry out the actions that it returns.

        Args:
            event: the method, with all arguments except the last one, which is the time.
        """
        if self._sockets is not None:
            self._sockets.give_event(event)
            return
        # A group of one rank has no neighbours, so no action concerns a connection.
        for action in event(time.monotonic()):
            self._handle_action(action)

    def _handle_action(self, action: Action) -> None:
        """Carry out an action of the node. `ControlSockets` handles those for a connection."""
        match action:
            case Decide(number, words):
                self._words[number] = words
            case Answer(number, text):
                self._answers[number] = ReceivedDecision(text, time.monotonic())
            case HeardNote(topic, text):
                self._notes[topic] = text
                drop_oldest_topic(self._notes)
                for prefix, hear in self._topic_listeners.items():
                    if topic.startswith(prefix):
                        self._queue_listener_call(partial(hear, topic.removeprefix(prefix)))
            case LostRank(rank, reason, host):
                where = f" (on {host})" if host else ""
                lost = f"rank {rank} of this group{where} is lost: {reason}"
                self._record_loss(action, RankLostError(lost))
            case MayExit():
                self._may_exit = True
        self._condition.notify_all()

    def _record_loss(self, loss: LostRank, error: Exception) -> None:
        self._failure = self._failure or error
        self._losses.append(loss)
        for hear in self._loss_listeners:
            self._queue_listener_call(partial(hear, loss))

    def _queue_listener_call(self, call: Callable[[], None]) -> None:
        self._pending_calls.append(call)
        self._num_pending_calls += 1
        if self._sockets is not None:
            self._sockets.wake()  # The tree's thread calls the listener.

    def _wait(self, has_arrived: Callable[[], bool], timeout: float | None) -> None:
        """Wait until `has_arrived` returns True and no call of a listener is pending.

        Therefore the listeners have seen all earlier notes when the caller acts on a decision.

        Raises:
            LighthouseError, RankLostError: see `rank0_decides`.
            TimeoutError: the wait took longer than `timeout`.
        """

        def is_over() -> bool:
            if self._has_ended:
                return True
            return has_arrived() and self._num_pending_calls == 0

        in_time = self._condition.wait_for(is_over, timeout)
        if has_arrived():
            return  # Even if a rank was lost just now: other ranks may act on this decision.
        self._raise_if_ended()
        if not in_time:
            raise TimeoutError(f"the other ranks of this group took longer than {timeout:g} s")

    @property
    def _has_ended(self) -> bool:
        """True if no further agreement can be made."""
        return self._closed or self._agreements_ended or self._failure is not None

    def _raise_if_ended(self) -> None:
        if self._closed or self._agreements_ended:
            raise LighthouseError("this group has left the job")
        if self._failure is not None:
            # Let the listeners run first. One of them may report the loss and end the process. If
            # the caller got the error first, the process could end without this report.
            self._condition.wait_for(lambda: self._closed or self._num_pending_calls == 0)
            # Raise a new object in each waiting thread, because threads must not share a traceback.
            raise type(self._failure)(*self._failure.args)

    # Without the lock. On the tree's thread, or on the caller's thread if the tree has no thread

    def _call_listeners_if_no_thread(self) -> None:
        """Call the listeners if the tree has no thread (a group of one rank, or after `_fail`)."""
        if not self._thread_calls_listeners:
            self._call_listeners()

    def _call_listeners(self) -> None:
        """Call the listeners, in the order of the notes and losses."""
        # This test needs no lock: whoever queues a call after it wakes the tree's thread again.
        while self._pending_calls:
            with self._condition:
                if not self._pending_calls:
                    return  # Another thread has taken the call.
                call = self._pending_calls.popleft()
            try:
                call()
            except Exception:
                # An error of one listener must end neither the other listeners nor the tree.
                logger.exception("a listener of the control tree has failed")
            with self._condition:
                self._num_pending_calls -= 1
                self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all waits after an unexpected error of the tree's thread. The thread then ends.

        The listeners are told that this rank itself is lost, because it cannot act together with
        its group any more.
        """
        with self._condition:
            text = f"the control tree failed on this rank: {first_line(error)}"
            self._record_loss(LostRank(self._rank, text, self._host_name), RuntimeError(text))
            self._thread_calls_listeners = False
            self._condition.notify_all()
        self._call_listeners()
