# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Control tree of one replica group: agreements, notes and losses among its ranks.

Each rank of the group is connected to its parent and its children. Three things travel in the tree:

- An *agreement*: each rank sends words up to rank 0. Rank 0 decides, and sends the decision down to
  all ranks.
- A *note*: a text with a topic, which any rank sends to all ranks.
- A *loss*: the report that a rank has died, or is silent.

`group_collectives.py` agrees by collectives, which only the training threads may make. The control
tree serves the other threads, and decisions during which the training threads compute or wait:
votes, quorums, aborts, leaving.

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
from titan_ft.system.refusal import Refusal
from titan_ft.system.seal import UnsealedError, add_seal, remove_seal

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The parent listens before its address is in the store, so a healthy one answers within
milliseconds."""


@dataclass(frozen=True)
class ReceivedDecision:
    """A decision of rank 0, and when it reached this rank.

    Attributes:
        received_at: monotonic time in seconds. The rank may read the decision later, but its waits
            for other groups are counted from this time.
    """

    text: str
    received_at: float


HearTopic = Callable[[str], None]
"""Takes the topic of a note, without its prefix."""

HearLoss = Callable[[Lose], None]
"""Takes the lost rank, its host and the reason."""


class ControlTree:
    """One rank's place in the control tree of its group.

    `training/links.py` creates it when the worker starts. `Membership`, `Seat`, `Rendezvous`,
    `Partition` and the engine call it.

    Threads: all ranks of the group make the same agreements (`rank0_decides`, `rank0_announces`) in
    the same order, on each rank one thread at a time. Any thread may call the other methods. The
    tree's own thread calls the listeners. A group of one rank opens no socket and starts no thread.

    After a loss, and after a failure of the tree's thread, every agreement raises the same error.
    Notes still travel between the ranks that are connected.

    Args:
        host: numeric address at which the group's ranks reach this rank.
        token: the run's shared secret. A process without it takes no part.
        store: the group's store. The constructor alone uses it, to exchange addresses. None = the
            group has one rank.
        key: prefix of the keys in the store, unique to this attempt of the group.
        host_name: name of this rank's host, for people.
        patience: seconds without a heartbeat after which a child of a rank is lost. The same on all
            ranks; math.inf = nobody watches.
        fan_out: number of children of a rank; the same on all ranks.
        on_refusal: see `ControlSockets`.

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
        self._changed = threading.Condition()  # guards all fields below, the node and the sockets
        self._node = Node(rank, num_ranks, fan_out)
        # On rank 0, the words of all ranks by the number of the agreement; None = too long.
        self._words: dict[int, frozenset[str] | None] = {}
        self._answers: dict[int, ReceivedDecision] = {}  # by the number of the agreement
        self._heard: dict[str, str] = {}  # the notes: text by topic
        self._topic_listeners: dict[str, HearTopic] = {}  # by prefix
        self._loss_listeners: list[HearLoss] = []
        self._losses: list[Lose] = []
        self._callbacks: deque[Callable[[], None]] = deque()  # calls of listeners that are due
        self._num_unfinished_callbacks = 0  # these, and the one that runs now
        self._failure: Exception | None = None  # why no agreement is possible any more
        self._left = False  # the neighbours need nothing more from this rank
        self._agreements_ended = False
        self._closed = False
        self._has_thread = False  # False: the caller's thread calls the listeners
        self.num_agreements = 0
        self._sockets: ControlSockets | None = None
        self._echo: EchoServer | None = None  # answers the parent's pings
        if store is None or num_ranks == 1:
            return
        if rank > 0 and patience < math.inf:
            self._echo = EchoServer(host)
        echo_address = self._echo.address if self._echo is not None else ""
        own = Identity(self._host_name, str(Process.this()), echo_address)
        self._sockets = ControlSockets(
            self._node,
            self._changed,
            rank=rank,
            children=find_children(rank, num_ranks, fan_out),
            secret=Secret(token, key),
            host=host,
            own=own,
            patience=patience,
            on_action=self._handle_action,
            on_turn=self._run_callbacks,
            on_failure=self._fail,
            on_refusal=on_refusal,
        )
        self._has_thread = True
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
        """Let rank 0 call `decide`, and return the result on all ranks. All ranks call this.

        A decision that depends on a clock or on the lighthouse belongs into `decide`. If each rank
        looked for itself, two ranks could decide differently. If `decide` raises, rank 0 must end:
        the other ranks wait for its decision until rank 0 is lost.

        Args:
            words: this rank's words; `decide` gets those of all ranks.
            timeout: seconds to wait for the other ranks. On ranks other than 0 it includes the
                duration of `decide`. After a timeout the caller must make no further agreement.

        Raises:
            LighthouseError: this group has left the job meanwhile. A request at the lighthouse
                raises the same error then, so callers of both catch one error.
            RankLostError: names the rank and its host.
            TimeoutError: the others took longer.
            ValueError: words or decision are too long for a message.
        """
        number = self.num_agreements + 1
        with self._changed:
            self._raise_if_ended()
            self._call(partial(self._node.join, number, words))
            self.num_agreements = number  # after `join`: it refuses words that are too long
            arrived = self._words if self._rank == 0 else self._answers
            self._wait(lambda: number in arrived, timeout)
            if self._rank > 0:
                return self._answers.pop(number).text
            all_words = self._words.pop(number)
        if all_words is None:
            raise ValueError("the words of all ranks together are too long for a message")
        # Without the lock: `decide` may ask the lighthouse for seconds.
        decision = decide(set(all_words))
        with self._changed:
            self._call(partial(self._node.decide, number, decision))
            self._answers.pop(number, None)  # rank 0 has its decision already
        return decision

    def rank0_announces(self, decide: Callable[[], str]) -> ReceivedDecision:
        """Let rank 0 call `decide`, and return the result on all ranks. All ranks call this.

        Rank 0 waits for no other rank. Use it where the other ranks have no words to add.

        Raises:
            LighthouseError, RankLostError, ValueError: see `rank0_decides`.
        """
        number = self.num_agreements + 1
        text = ""
        if self._rank == 0:
            text = decide()  # without the lock: it may take seconds
        with self._changed:
            self._raise_if_ended()
            if self._rank == 0:
                self._call(partial(self._node.announce, number, text))
            self.num_agreements = number
            self._wait(lambda: number in self._answers, None)
            return self._answers.pop(number)

    def pause(self, seconds: float) -> None:
        """Sleep. The sleep ends early, with an error, if the group leaves or a rank is lost.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            RankLostError: names the rank and its host.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, seconds)
            self._raise_if_ended()

    def say(self, topic: str, text: str = "") -> None:
        """Send a note to all ranks of the group, this rank included; any thread, returns at once.

        If ranks send several texts for one topic, rank 0 takes the first, and every rank hears that
        text. If a rank sends a note and then joins an agreement, every rank hears the note before
        the decision. Before an announcement, only the notes of rank 0 have this guarantee.

        Raises:
            ValueError: the text is too long for a message.
        """
        with self._changed:
            if not self._closed:
                self._call(partial(self._node.say, topic, text))
        self._run_callbacks_without_thread()

    def say_with_all(self, topic: str) -> None:
        """Send a note that all ranks hear after each of them has sent it; any thread.

        Returns at once.

        Raises:
            ValueError: the topic is too long for a message.
        """
        with self._changed:
            if not self._closed:
                self._call(partial(self._node.say_with_all, topic))
        self._run_callbacks_without_thread()

    def heard(self, topic: str) -> str | None:
        """Return the text of a topic; None if it is not among the last `MAX_TOPICS` topics."""
        with self._changed:
            return self._heard.get(topic)

    def settle(self, topic: str, text: str) -> str:
        """Send a note, and return the text that all ranks hear for this topic.

        That text is the first one that reached rank 0, which may be another rank's.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            RankLostError: names the rank and its host.
        """
        self.say(topic, text)
        with self._changed:
            # Notes outlast `end_agreements`, so only a close or a loss ends this wait early.
            self._changed.wait_for(partial(self._is_settled, topic))
            if topic not in self._heard:
                self._raise_if_ended()
            return self._heard[topic]

    def _is_settled(self, topic: str) -> bool:
        if topic in self._heard:
            return True
        return self._closed or self._failure is not None

    def listen(self, prefix: str, hear: HearTopic) -> None:
        """Call `hear` once for each topic with this prefix, earlier topics included.

        The tree's thread calls `hear`, which must not block: that thread also serves the children.
        A prefix has one listener.
        """
        with self._changed:
            assert prefix not in self._topic_listeners, f"{prefix!r} has a listener"
            self._topic_listeners[prefix] = hear
            for topic in self._heard:
                if topic.startswith(prefix):
                    self._add_callback(partial(hear, topic.removeprefix(prefix)))
        self._run_callbacks_without_thread()

    def listen_for_losses(self, hear: HearLoss) -> None:
        """Call `hear` once for each lost rank, as `listen` does for topics.

        A group of one rank calls it after no event.
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
        """End all agreements, because this group has left the job. Notes go on until `leave`."""
        with self._changed:
            self._agreements_ended = True
            self._changed.notify_all()

    def leave(self, seconds: float) -> None:
        """Leave the tree in order, so that the other ranks do not report this rank as lost.

        Args:
            seconds: to wait at most for the neighbours to leave as well. They may need this rank to
                pass on a last message.
        """
        self.announce_end(seconds)
        self.close()

    def announce_end(self, seconds: float) -> None:
        """Report to the neighbours that this process ends in order; see `leave`.

        Waits of other threads go on: the caller ends the process.
        """
        with self._changed:
            self._call(self._node.leave)
            self._changed.wait_for(lambda: self._left or self._closed, seconds)
            self._call(self._node.end)

    def close(self) -> None:
        """Close the connections, and end all waits. Without `leave` the others lose this rank."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
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
        if sockets.address is not None:  # None: a rank without children does not listen
            address = join_address(*sockets.address)
            own_key = f"{key}/{self._rank}"
            store.set(own_key, add_seal(token, own_key, f"{address} {own.process} {own.host}"))
        if self._parent is None:
            with self._changed:
                sockets.start()
            return
        parent_key = f"{key}/{self._parent}"
        sealed = store.get(parent_key).decode(errors="replace")  # waits until the key is there
        try:
            text = remove_seal(token, parent_key, sealed)
        except UnsealedError as unsealed:
            this_rank = f"rank {self._rank} of this group ({own.host})"
            raise LighthouseError(f"{this_rank}: {unsealed}") from unsealed
        address, process, parent_host = text.split(" ", 2)
        with self._changed:
            sockets.start_below(address, Identity(parent_host, process))
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

        with self._changed:
            self._changed.wait_for(is_over, CONNECT_SECONDS)
            return sockets.is_connected(parent)

    # Under the lock

    def _call(self, event: Callable[[float], list[Action]]) -> None:
        """Give the node an event: one of its methods, which takes the time as its last argument."""
        if self._sockets is not None:
            self._sockets.call(event)
            return
        for action in event(time.monotonic()):  # without neighbours no action concerns a connection
            self._handle_action(action)

    def _handle_action(self, action: Action) -> None:
        """Carry out an action of the node that concerns no connection."""
        match action:
            case Decide(number, words):
                self._words[number] = words
            case Answer(number, text):
                self._answers[number] = ReceivedDecision(text, time.monotonic())
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
            self._sockets.wake()  # the tree's thread calls the listener, not the caller of `say`

    def _wait(self, has_arrived: Callable[[], bool], timeout: float | None) -> None:
        """Wait until `has_arrived` returns True and all listeners have returned.

        When the caller acts on a decision, the listeners have therefore seen all earlier notes.

        Raises:
            LighthouseError, RankLostError: the wait is in vain.
            TimeoutError: the wait took longer.
        """

        def is_over() -> bool:
            if self._has_ended:
                return True
            return has_arrived() and self._num_unfinished_callbacks == 0

        in_time = self._changed.wait_for(is_over, timeout)
        if has_arrived():
            return  # even if a rank was lost just now: the others may act on this decision
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
            # First the listeners: one of them may end the process with a report. The error would
            # end it without a report.
            self._changed.wait_for(lambda: self._closed or self._num_unfinished_callbacks == 0)
            # A new object for each waiting thread: threads must not share a traceback.
            raise type(self._failure)(*self._failure.args)

    # Without the lock, on the tree's thread; if there is none, on the caller's thread

    def _run_callbacks_without_thread(self) -> None:
        """Call the listeners if no thread does: in a group of one rank, and after a failure."""
        if not self._has_thread:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Call the listeners, in the order of the notes and losses."""
        # Reading without the lock is safe: a callback that is queued after this test wakes the
        # thread.
        while self._callbacks:
            with self._changed:
                if not self._callbacks:
                    return  # another caller's thread has taken the callback
                callback = self._callbacks.popleft()
            try:
                callback()
            except Exception:
                # The next callbacks, and the tree, must go on.
                logger.exception("a listener of the control tree has failed")
            with self._changed:
                self._num_unfinished_callbacks -= 1
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all waits after an unexpected error of the tree's thread, which ends.

        The listeners hear that this rank itself is lost: it can take no further part in its group.
        """
        with self._changed:
            text = f"the control tree failed on this rank: {first_line(error)}"
            self._note_loss(Lose(self._rank, text, self._host_name), RuntimeError(text))
            self._has_thread = False
            self._changed.notify_all()
        self._run_callbacks()
