# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank's node in the control tree of its group. No clock, no socket, no thread.

*Agreements.* Each rank contributes a set of strings, its *words*; the set may be empty. A node
waits for the words of its whole subtree, and sends their union up. Rank 0 decides, and the answer
travels down: one trip up and one trip down. Rank 0 can also announce its decision without any
words: one trip down. The callers on all ranks use the same kind for each number. A message of the
other kind is a bad frame.

*Notes.* A note travels up to rank 0, which takes the first text of each topic, and from there down
to all ranks. Notes and words keep their order on each link. So a note reaches all ranks before the
answer of the next agreement that its sender joins. Before an announcement this holds for the notes
of rank 0 alone. A note that needs all ranks travels up when all ranks of a subtree have said it.

*Losses.* A neighbour is lost if its process has ended, if its connection stays closed for
`GRACE_SECONDS`, if it has no heartbeat (`heartbeat.py`), or if it keeps sending bad frames. Where
the connection alone is dead, each end reports the other one. All ranks that are still connected
pass a report on.

*Links.* A `TreeLink` (`link.py`) keeps each message until the neighbour has acknowledged it, and
returns the frames to send now: none while the connection is closed, or after the link has ended. A
new connection sends the kept messages again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titan_ft.protocol.control.link import TreeLink
from titan_ft.protocol.control.message import (
    AnswerMessage,
    EndMessage,
    LeaveMessage,
    LossMessage,
    Message,
    NoteMessage,
    ShareMessage,
    WordsMessage,
    check_length,
    decode,
    fits,
)
from titan_ft.protocol.control.tree import FAN_OUT, find_children, find_parent


@dataclass(frozen=True, slots=True)
class Connect:
    """Make a connection to this rank. Then call `connected` or `disconnected`."""

    peer: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to this rank."""

    peer: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection to this rank, or the attempt to make one, if there is one.

    The caller does not report this end with `disconnected`.
    """

    peer: int


@dataclass(frozen=True, slots=True)
class Decide:
    """On rank 0: all ranks have joined this agreement. Call `decide`.

    Attributes:
        words: of all ranks; None = they are too long together for a message.
    """

    number: int
    words: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """This agreement has this answer."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Hear:
    """A rank has said this. Each topic is heard once, with the same text on all ranks."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Lose:
    """This rank is lost. Each rank is lost once.

    Attributes:
        host: of this rank, for people; empty = not known.
        silent_seconds: without a heartbeat of this rank; 0 = it is lost for another reason.
    """

    rank: int
    reason: str
    host: str
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Left:
    """This rank may exit: each neighbour has left and has acknowledged this rank's `LeaveMessage`,
    or is lost."""


MAX_TOPICS = 1024
"""Topics of notes that a rank remembers. An older topic, said again, would be a new note."""


def drop_oldest(by_topic: dict[str, Any]) -> None:
    """Forget the oldest topic if there are too many."""
    if len(by_topic) > MAX_TOPICS:
        del by_topic[next(iter(by_topic))]


Action = Connect | Send | Close | Decide | Answer | Hear | Lose | Left


class Node:
    """One rank of the control tree.

    `membership/control_tree.py` calls it, from the tree's own thread and from the rank's threads.
    Not thread-safe: the caller holds one lock around each event. An event returns its actions, to
    be carried out in this order. After each event the caller reads `next_tick`, and calls `tick` at
    that time. An event that raises changes nothing.

    Args of the events:
        now: seconds of any monotonic clock. All events take it, so that callers treat them alike.
        peer: rank of a neighbour.
    """

    def __init__(self, rank: int, num_ranks: int, fan_out: int = FAN_OUT) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._parent = find_parent(rank, fan_out)
        self._children = find_children(rank, num_ranks, fan_out)
        self._links = {child: TreeLink(child, dials=False) for child in self._children}
        if self._parent is not None:
            self._links[self._parent] = TreeLink(self._parent, dials=True)
        self._actions: list[Action] = []
        # Topics of the last notes that this node has passed on, up or down.
        self._topics: dict[str, None] = {}
        # For each note that needs all ranks: this rank and the children that have not said it yet.
        self._shares: dict[str, set[int]] = {}
        self._lost: set[int] = set()
        self._leave_requested = False
        self._may_end = False
        self._number = 0  # of the agreement under way: `_start_agreement` makes it 1
        self._start_agreement()

    @property
    def next_tick(self) -> float:
        """Time of the next call of `tick`; math.inf = none is needed.

        A link's grace begins when a connection ends. So a child that has never connected is not
        lost.
        """
        next_tick = math.inf
        for link in self._links.values():
            # A connected link waits for no time. This is read twice in each turn of the loop: with
            # a time for each of 17 links it took a fifth of a rank's CPU.
            if not link.connected:
                next_tick = min(next_tick, link.grace_end, link.next_dial)
        return next_tick

    @property
    def num_kept(self) -> int:
        """Number of messages that are kept until a neighbour acknowledges them."""
        return sum(link.num_kept for link in self._links.values())

    # Events of the clock and the connections

    def start(self, now: float) -> list[Action]:
        """Start to connect to the parent, which listens already."""
        if self._parent is not None:
            self._links[self._parent].next_dial = now
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Give up the neighbours whose grace is over, and dial the ones that are due."""
        for link in self._links.values():
            if now >= link.grace_end:
                connection = f"its connection to rank {self._rank}"
                grace = f"{link.grace_seconds:g} s"
                self._give_up(link, f"{connection} closed and did not come back in {grace}")
            elif now >= link.next_dial:
                link.note_dial(now)
                self._actions.append(Connect(link.peer))
        return self._finish_event()

    def connected(self, peer: int, now: float, host: str = "") -> list[Action]:
        """Use a new connection from now on. The caller reads no more frames of an earlier one.

        A child may see the end of its connection and make a new one, while its parent still
        believes in the earlier one.

        Args:
            host: of the peer, for people; named if the peer is lost.
        """
        link = self._links.get(peer)
        if link is None or link.ended:
            return [Close(peer)]
        self._send_frames(link, link.resume(host))
        return self._finish_event()

    def disconnected(self, peer: int, now: float, has_ended: bool = False) -> list[Action]:
        """A connection ended, or an attempt to connect failed.

        Args:
            has_ended: the peer's process does not exist any more, so the grace would only delay
                the report. The caller may find that out later, and then calls a second time.
        """
        link = self._links.get(peer)
        if link is None or link.ended:
            return []
        if has_ended:
            self._give_up(link, "its process has ended")
        else:
            link.disconnect(now)
        return self._finish_event()

    def fall_silent(self, peer: int, seconds: float, now: float) -> list[Action]:
        """A neighbour has had no heartbeat for some seconds, though its connection is there."""
        link = self._links.get(peer)
        if link is None or link.ended:
            return []
        # After the leave message of either end, the silence is no loss.
        if link.peer_left or self._leave_requested:
            return []
        self._give_up(link, f"no heartbeat for {seconds:.1f} s", seconds)
        return self._finish_event()

    def receive(self, peer: int, frame: bytes, now: float) -> list[Action]:
        """Take a frame. A bad frame is not applied, and closes the connection.

        Several bad frames in a row lose the peer.
        """
        link = self._links.get(peer)
        if link is None or not link.connected:
            return []
        try:
            decoded = decode(frame)
            message = None
            if link.is_new(decoded):
                message = decoded.message
            if message is not None:
                self._check(peer, message)
        except ValueError as error:
            self._reject(link, error, now)
            return self._finish_event()
        link.accept(decoded)  # a frame whose message is known already acknowledges messages, too
        if message is not None:
            self._take(peer, message)
        self._send_frames(link, link.acknowledge())
        return self._finish_event()

    # Events of the rank's own threads

    def join(self, number: int, words: Iterable[str], now: float) -> list[Action]:
        """Give this rank's words for agreement `number`: 1, 2, ... in this order.

        Raises:
            ValueError: another agreement is under way, or the words are too long.
        """
        message = WordsMessage(number, frozenset(words))
        self._check_words(self._rank, message)
        self._add_words(self._rank, message)
        return self._finish_event()

    def decide(self, number: int, answer: str, now: float) -> list[Action]:
        """Answer agreement `number`, on rank 0.

        Raises:
            ValueError: this agreement is not to be decided here and now, or the answer is too long.
        """
        message = AnswerMessage(number, answer)
        check_length(message)
        self._check_answer(None, message)
        self._pass_answer_down(message)
        return self._finish_event()

    def announce(self, number: int, answer: str, now: float) -> list[Action]:
        """Answer agreement `number` without the words of the ranks, on rank 0.

        Raises:
            ValueError: another agreement is under way, or the answer is too long.
        """
        message = AnswerMessage(number, answer, announced=True)
        check_length(message)
        self._check_answer(None, message)
        self._pass_answer_down(message)
        return self._finish_event()

    def say(self, topic: str, text: str, now: float) -> list[Action]:
        """Say something to all ranks. Of several texts for one topic, rank 0 takes the first one.

        Raises:
            ValueError: the text is too long.
        """
        note = NoteMessage(topic, text)
        check_length(note)
        self._pass_note_up(note)
        return self._finish_event()

    def say_with_all(self, topic: str, now: float) -> list[Action]:
        """Say a note that all ranks hear once each of them has said it.

        Raises:
            ValueError: the topic is too long.
        """
        check_length(ShareMessage(topic))
        self._add_share(self._rank, topic)
        return self._finish_event()

    def leave(self, now: float) -> list[Action]:
        """Announce the end of this rank. The node still passes messages on until `Left`."""
        self._leave_requested = True
        for link in self._links.values():
            self._send(link, LeaveMessage())
        return self._finish_event()

    def end(self, now: float) -> list[Action]:
        """End this rank after `leave`, whether or not the neighbours have left."""
        for link in self._links.values():
            self._send(link, EndMessage())
        return self._finish_event()

    # Messages

    def _check(self, peer: int, message: Message) -> None:
        """Raise a ValueError if the peer cannot send this message now."""
        match message:
            case WordsMessage():
                self._check_words(peer, message)
            case AnswerMessage():
                self._check_answer(peer, message)
            case ShareMessage() if peer == self._parent:
                raise ValueError("a parent has no share in a note")
            case EndMessage() if not self._links[peer].peer_left:
                raise ValueError("an end without a message that the sender leaves")
            case LossMessage(rank) if rank >= self._num_ranks or rank == self._rank:
                # A neighbour hears of a loss from others than the lost rank.
                raise ValueError(f"rank {rank} is lost: that is this rank, or none of the group")

    def _take(self, peer: int, message: Message) -> None:
        match message:
            case WordsMessage():
                self._add_words(peer, message)
            case AnswerMessage():
                self._pass_answer_down(message)
            case NoteMessage() if peer == self._parent:
                self._pass_note_down(message)
            case NoteMessage():
                self._pass_note_up(message)
            case ShareMessage(topic):
                self._add_share(peer, topic)
            case LossMessage():
                self._lose(message)
            case LeaveMessage():
                self._links[peer].peer_left = True
            case EndMessage():
                self._give_up(self._links[peer], "it has ended in order")

    # Agreements

    def _start_agreement(self) -> None:
        self._number += 1
        self._words: frozenset[str] = frozenset()
        self._words_too_long = False
        self._missing = {self._rank, *self._children}  # they have not given words yet

    def _check_words(self, rank: int, message: WordsMessage) -> None:
        number = message.number
        if number != self._number:
            under_way = f"agreement {self._number} is under way"
            raise ValueError(f"words of rank {rank} for agreement {number}, while {under_way}")
        if rank not in self._missing:
            raise ValueError(f"words of rank {rank} for agreement {number} came twice")
        if rank == self._rank:
            check_length(message)

    def _add_words(self, rank: int, message: WordsMessage) -> None:
        self._words |= message.words
        self._words_too_long |= message.too_long
        self._missing.remove(rank)
        if self._missing:
            return
        # No sender is to blame if the union alone is too long. Rank 0 reports it.
        union = WordsMessage(self._number, self._words)
        if self._words_too_long or not fits(union):
            union = WordsMessage(self._number, frozenset(), too_long=True)
        if self._parent is not None:
            self._send_up(union)
        elif union.too_long:
            self._actions.append(Decide(self._number, None))
        else:
            self._actions.append(Decide(self._number, union.words))

    def _check_answer(self, sender: int | None, message: AnswerMessage) -> None:
        """Raise a ValueError for an answer that is not due. The sender is None on rank 0."""
        number = message.number
        if message.announced:
            # Nobody has joined.
            is_due = len(self._missing) == len(self._children) + 1
        else:
            # All ranks of the subtree have joined.
            is_due = not self._missing
        if sender != self._parent or number != self._number or not is_due:
            under_way = f"agreement {self._number} is under way"
            raise ValueError(f"an answer of agreement {number} that is not due: {under_way}")

    def _pass_answer_down(self, message: AnswerMessage) -> None:
        self._send_down(message)
        self._actions.append(Answer(message.number, message.text))
        self._start_agreement()

    # Notes

    def _pass_note_up(self, note: NoteMessage) -> None:
        """Pass the first note of a topic up. Rank 0 would drop the next ones."""
        if note.topic in self._topics:
            return
        if self._parent is None:
            self._pass_note_down(note)
        else:
            self._remember(note.topic)
            self._send_up(note)

    def _pass_note_down(self, note: NoteMessage) -> None:
        self._remember(note.topic)
        self._send_down(note)
        self._actions.append(Hear(note.topic, note.text))

    def _remember(self, topic: str) -> None:
        self._topics[topic] = None
        drop_oldest(self._topics)

    def _add_share(self, rank: int, topic: str) -> None:
        missing = self._shares.setdefault(topic, {self._rank, *self._children})
        missing.discard(rank)
        drop_oldest(self._shares)  # some ranks may never say a note
        if missing:
            return
        self._shares.pop(topic, None)
        if self._parent is None:
            self._pass_note_up(NoteMessage(topic, ""))
        else:
            self._send_up(ShareMessage(topic))

    # Losses

    def _reject(self, link: TreeLink, error: ValueError, now: float) -> None:
        """Close the connection after a bad frame. The next one may bring the message intact."""
        link.count_bad_frame()
        if link.has_too_many_bad_frames:
            self._give_up(link, f"it sends bad frames: {error}")
            return
        link.disconnect(now)
        self._actions.append(Close(link.peer))

    def _give_up(self, link: TreeLink, reason: str, silent_seconds: float = 0.0) -> None:
        link.end()
        self._actions.append(Close(link.peer))
        if not link.peer_left:
            self._lose(LossMessage(link.peer, reason, link.host, silent_seconds))

    def _lose(self, loss: LossMessage) -> None:
        """Report a loss once, here and to all neighbours.

        A loss does not travel by way of rank 0 like a note: the way there may be lost.
        """
        if loss.rank in self._lost:
            return
        self._lost.add(loss.rank)
        self._actions.append(Lose(loss.rank, loss.reason, loss.host, loss.silent_seconds))
        for link in self._links.values():
            self._send(link, loss)

    # Actions

    def _send_up(self, message: Message) -> None:
        assert self._parent is not None
        self._send(self._links[self._parent], message)

    def _send_down(self, message: Message) -> None:
        for child in self._children:
            self._send(self._links[child], message)

    def _send(self, link: TreeLink, message: Message) -> None:
        self._send_frames(link, link.send(message))

    def _send_frames(self, link: TreeLink, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._actions.append(Send(link.peer, frame))

    def _finish_event(self) -> list[Action]:
        if self._leave_requested and not self._may_end:
            self._report_end_if_done()
        actions = self._actions
        self._actions = []
        return actions

    def _report_end_if_done(self) -> None:
        for link in self._links.values():
            if not self._is_over(link):
                return
        self._may_end = True
        self._actions.append(Left())

    @staticmethod
    def _is_over(link: TreeLink) -> bool:
        """Return True if the neighbour no longer needs this rank."""
        if link.ended:
            return True
        return link.peer_left and link.num_kept == 0
