# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Control tree of one replica group: agreements, notes and losses among its ranks.

`group.Group` agrees by collectives, which only the training threads may make. The control tree
serves what is decided while these threads compute or wait. An agreement costs one trip up the tree
and one trip down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from titan_ft.membership.control_handshake import Identity, Secret
from titan_ft.membership.control_sockets import ControlSockets
from titan_ft.protocol.control.node import Action, Answer, Decide, Hear, Left, Lose, Node
from titan_ft.protocol.control.tree import FAN_OUT, find_children, find_parent
from titan_ft.protocol.errors import LighthouseError, first_line
from titan_ft.system.address import join_address
from titan_ft.system.process import Process, node_name

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The parent listens before its address is in the store, so a healthy one answers within
milliseconds."""


@dataclass(frozen=True)
class Announcement:
    """A decision of rank 0.

    Attributes:
        at: monotonic time in seconds at which it reached this rank, which may ask for it later.
    """

    text: str
    at: float


HearNote = Callable[[str], None]
HearLoss = Callable[[int, str, str], None]


class ControlTree:
    """One rank's place in the control tree of its group.

    All ranks of the group make the same agreements in the same order. A group of one rank opens no
    socket and starts no thread.

    Args:
        host: numeric address at which the group's ranks reach this rank.
        token: the run's shared secret. A process without it takes no part.
        store: of the group; needed here only, for the addresses. None = the group has one rank.
        key: prefix of the keys in the store, unique to this attempt of the group.
        name: of this rank's host, for people.
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
        fan_out: int = FAN_OUT,
    ) -> None:
        assert store is not None or num_ranks == 1, "ranks find each other by the group's store"
        self._rank = rank
        self._parent = find_parent(rank, fan_out)
        self._changed = threading.Condition()  # guards all below, the node and the sockets
        self._node = Node(rank, num_ranks, fan_out)
        self._words: dict[int, frozenset[str]] = {}
        self._answers: dict[int, Announcement] = {}
        self._heard: dict[str, str] = {}
        self._note_listeners: dict[str, HearNote] = {}
        self._loss_listeners: list[HearLoss] = []
        self._losses: list[tuple[int, str, str]] = []
        self._reports: deque[Callable[[], None]] = deque()  # notes and losses
        self._num_unreported = 0  # of these, and one whose callback has yet to return
        self._loss = ""
        self._left = self._agrees_no_more = self._closed = False
        self.number = 0
        """Number of agreements that were made."""
        self._sockets: ControlSockets | None = None
        if store is None or num_ranks == 1:
            return
        own = Identity(name or node_name(), str(Process.this()))
        self._sockets = ControlSockets(
            self._node,
            self._changed,
            rank=rank,
            children=find_children(rank, num_ranks, fan_out),
            secret=Secret(token, key),
            host=host,
            own=own,
            on_action=self._take,
            on_turn=self._report,
            on_failure=self._fail,
        )
        try:
            self._connect(self._sockets, store, key, own)
        except BaseException:
            self.close()
            raise

    def rank0_decides(
        self,
        found: Collection[str],
        decide: Callable[[set[str]], str],
        timeout: float | None = None,
    ) -> str:
        """Return on all ranks what `decide`, called on rank 0 alone, returns. A collective.

        A decision that depends on a clock or on the lighthouse belongs into `decide`: two ranks
        that looked for themselves could decide differently.

        Args:
            found: words that this rank has found; `decide` gets the words of all ranks.
            timeout: seconds that the other ranks may take. A tree that timed out makes no further
                agreement.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            ConnectionError: a rank is lost; names it and its host.
            TimeoutError: the others took longer.
            ValueError: words or decision are too long for a message.
        """
        number = self.number + 1
        with self._changed:
            self._check()
            self._call(partial(self._node.join, number, found))
            self.number = number  # words that are too long make no agreement
            arrived = self._words if self._rank == 0 else self._answers
            self._wait(lambda: number in arrived, timeout)
            if self._rank > 0:
                return self._answers.pop(number).text
            words = self._words.pop(number)
        decision = decide(set(words))  # without the lock: it may ask the lighthouse for seconds
        with self._changed:
            self._call(partial(self._node.decide, number, decision))
            self._answers.pop(number, None)
        return decision

    def rank0_announces(self, decide: Callable[[], str]) -> Announcement:
        """Return on all ranks what `decide`, called on rank 0 alone, returns. A collective.

        Rank 0 waits for no other rank: this is an agreement for which no rank has anything to say.

        Raises:
            LighthouseError, ConnectionError, ValueError: see `rank0_decides`.
        """
        number = self.number + 1
        text = decide() if self._rank == 0 else ""  # without the lock: it may take seconds
        with self._changed:
            self._check()
            if self._rank == 0:
                self._call(partial(self._node.announce, number, text))
            self.number = number
            self._wait(lambda: number in self._answers, None)
            return self._answers.pop(number)

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            ConnectionError: a rank is lost; names it and its host.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, seconds)
            self._check()

    def say(self, topic: str, text: str = "") -> None:
        """Say something to all ranks of the group, this one included; any thread, returns at once.

        Of several texts for one topic rank 0 takes the first, and every rank hears that one. A note
        that this rank says before an agreement is known on every rank before its decision. Of the
        notes before an announcement that holds for those of rank 0 alone.

        Raises:
            ValueError: the text is too long for a message.
        """
        with self._changed:
            if not self._closed:
                self._call(partial(self._node.say, topic, text))
        if self._sockets is None:
            self._report()

    def heard(self, topic: str) -> str | None:
        """Return the text of a topic; None if this rank has not heard of it."""
        with self._changed:
            return self._heard.get(topic)

    def settle(self, topic: str, text: str) -> str:
        """Say something, and return the text that all ranks hear for this topic: the first one.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            ConnectionError: a rank is lost; names it and its host.
        """
        self.say(topic, text)
        with self._changed:
            self._changed.wait_for(lambda: topic in self._heard or self._closed or bool(self._loss))
            if topic not in self._heard:
                self._check()
            return self._heard[topic]

    def listen(self, beginning: str, hear: HearNote) -> None:
        """Call `hear` with the rest of each topic that begins so, once.

        It is called on the tree's thread, and must not block: that thread serves the children.
        Notes that came before count, too.
        """
        with self._changed:
            self._note_listeners[beginning] = hear
            for topic in self._heard:
                if topic.startswith(beginning):
                    self._add_report(partial(hear, topic.removeprefix(beginning)))
        if self._sockets is None:
            self._report()

    def listen_for_losses(self, hear: HearLoss) -> None:
        """Call `hear` with each rank that is lost, once: the rank, its host and the reason.

        It is called like the listeners of `listen`. The host is empty if it is not known.
        """
        with self._changed:
            self._loss_listeners.append(hear)
            for loss in self._losses:
                self._add_report(partial(hear, *loss))

    def end_agreements(self) -> None:
        """Make no more agreements: this group has left the job. Notes go on until `leave`."""
        with self._changed:
            self._agrees_no_more = True
            self._changed.notify_all()

    def leave(self, seconds: float) -> None:
        """End this rank's part in order, so that its end is no loss to the others.

        Waits for the neighbours to leave as well, at most so many seconds: they may need this rank
        to pass on a last message.
        """
        with self._changed:
            self._call(self._node.leave)
            self._changed.wait_for(lambda: self._left or self._closed, seconds)
        self.close()

    def close(self) -> None:
        """Close the connections, and end all waiting. Without `leave` the others lose this rank."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._sockets is not None:
            self._sockets.close()

    # Start

    def _connect(self, sockets: ControlSockets, store: TCPStore, key: str, own: Identity) -> None:
        """Publish this rank's address, and connect to the parent.

        Raises:
            LighthouseError: the parent cannot be reached.
        """
        if sockets.address is not None:
            address = join_address(*sockets.address)
            store.set(f"{key}/{self._rank}", f"{address} {own.process} {own.host}")
        if self._parent is None:
            with self._changed:
                sockets.start()
            return
        found = store.get(f"{key}/{self._parent}").decode()  # waits until it is there
        address, process, parent_host = found.split(" ", 2)
        with self._changed:
            sockets.start_below(address, Identity(parent_host, process))
        if self._await_parent(sockets, self._parent):
            return
        error = sockets.last_error or f"no answer within {CONNECT_SECONDS:g} s"
        raise LighthouseError(
            f"rank {self._rank} of this group ({own.host}) cannot connect to rank {self._parent} "
            f"({parent_host}) at {address}: {error}; check that the hosts of a group reach each "
            "other at any port, that all have the same TITAN_FT_TOKEN, and "
            "fault_tolerance.advertise_address"
        )

    def _await_parent(self, sockets: ControlSockets, parent: int) -> bool:
        """Wait for the first connection. Returns False if there is none."""

        def is_over() -> bool:
            return sockets.is_connected(parent) or bool(self._loss) or self._closed

        with self._changed:
            self._changed.wait_for(is_over, CONNECT_SECONDS)
            return sockets.is_connected(parent)

    # With the lock

    def _call(self, event: Callable[[float], list[Action]]) -> None:
        """Give the node an event."""
        if self._sockets is not None:
            self._sockets.call(event)
            return
        for action in event(time.monotonic()):  # of a rank without neighbours
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
                for beginning, hear in self._note_listeners.items():
                    if topic.startswith(beginning):
                        self._add_report(partial(hear, topic.removeprefix(beginning)))
            case Lose(rank, reason, host):
                where = f" (on {host})" if host else ""
                self._loss = self._loss or f"rank {rank} of this group{where} is lost: {reason}"
                self._losses.append((rank, host, reason))
                for hear_loss in self._loss_listeners:
                    self._add_report(partial(hear_loss, rank, host, reason))
            case Left():
                self._left = True
        self._changed.notify_all()

    def _add_report(self, report: Callable[[], None]) -> None:
        self._reports.append(report)
        self._num_unreported += 1
        if self._sockets is not None:
            self._sockets.wake()  # its thread calls it, not the thread that called `say`

    def _wait(self, has_arrived: Callable[[], bool], timeout: float | None) -> None:
        """Wait for what comes from the other ranks, and for the reports of what came before it."""

        def is_over() -> bool:
            return self._has_ended or (has_arrived() and not self._num_unreported)

        in_time = self._changed.wait_for(is_over, timeout)
        if has_arrived():
            return  # also if a rank was lost just now: the others may have this decision
        self._check()
        if not in_time:
            raise TimeoutError(f"the other ranks of this group took longer than {timeout:g} s")

    @property
    def _has_ended(self) -> bool:
        """True if no agreement is made any more."""
        return self._closed or self._agrees_no_more or bool(self._loss)

    def _check(self) -> None:
        if self._closed or self._agrees_no_more:
            raise LighthouseError("this group has left the job")
        if self._loss:
            raise ConnectionError(self._loss)

    # On the tree's thread, without the lock

    def _report(self) -> None:
        """Report notes and losses, in their order."""
        while self._reports:  # a report that is added while this ends wakes the thread
            with self._changed:
                if not self._reports:
                    return  # in a group of one rank, another thread has taken it
                report = self._reports.popleft()
            try:
                report()
            except Exception:  # the next reports, and the tree, must go on all the same
                logger.exception("a report of the control tree has failed")
            with self._changed:
                self._num_unreported -= 1
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all waiting after an unexpected error of the tree's thread."""
        with self._changed:
            self._loss = self._loss or f"the control tree failed on this rank: {first_line(error)}"
            self._changed.notify_all()
