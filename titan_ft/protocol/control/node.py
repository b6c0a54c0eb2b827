# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of a replica group's control tree: the node of one rank.

The ranks of a group are connected as a tree. Rank 0 is the root, and a rank's *neighbours* are its
parent and its children. The ranks use the tree to agree on votes and quorums, to notify each other,
and to notice that a rank has died. The tree is separate from the process groups of the training, so
that it also works while their collectives hang.

A node has no clock, no socket and no thread. The caller (`membership/control_tree.py`) calls one
method of the node for each event, and carries out the actions that the method returns. The
protocol has four parts:

*Agreements.* An agreement is a decision of rank 0 that reaches all ranks. There are two kinds:

- Each rank *joins* the agreement with a set of strings, its *words*. A node waits until all ranks
  of its subtree have joined, and sends the union of their words to its parent. Rank 0 decides when
  it has the words of all ranks. Its decision is the *answer*, which travels down to all ranks.
- Rank 0 *announces* its answer without waiting for any words.

Agreements have the numbers 1, 2, ... All ranks make the same agreements in the same order, and use
the same kind for the agreement of one number. Otherwise the messages count as bad frames.

*Notes.* A note is a text with a topic, which any rank may send to all ranks at any time. A note
travels up to rank 0, and from there down to all ranks. If several ranks send a note with the same
topic, rank 0 takes the first text and drops the others. Messages stay in order on each connection.
So if a rank sends a note and then joins an agreement, all ranks get the note before the answer. An
announcement waits for no rank, so only the notes of rank 0 are sure to arrive before it. There is
also a note that reaches the ranks only after every rank has sent it (`send_note_with_all`).

*Losses.* A neighbour is lost if its process has ended, if it has no connection for
`GRACE_SECONDS`, if it does not answer pings (`heartbeat.py`), or if it keeps sending bad frames.
This rank then reports the loss to its other neighbours, and they pass the report on. If only the
network between two neighbours is broken, each of them reports the other one as lost.

*Links.* For each neighbour there is a `TreeLink` (`link.py`). It numbers the messages to the
neighbour, and keeps each one until the neighbour has acknowledged it. A new connection sends the
kept messages again. So no message is lost when a connection breaks. A *frame* is one message on a
connection, as bytes. A frame is *bad* if it cannot be decoded, or if its message is impossible in
the present state of the protocol.
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

# Actions. The first four are orders to the caller, the others are news for the caller.


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
    """Close the connection to this rank, or end the attempt to make one. Do not call `disconnected`
    for it."""

    peer: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Call `decide` for this agreement, because all ranks have joined it. Only on rank 0.

    Attributes:
        words: union of the words of all ranks; None = the union is too long for a message.
    """

    number: int
    words: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Rank 0 has answered this agreement."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class HeardNote:
    """A note has arrived. Each topic arrives once, with the same text on all ranks."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank of the group is lost. There is one such action for each lost rank.

    Attributes:
        rank: the lost rank.
        host: name of its host, for people; empty = not known.
        silent_seconds: time without a heartbeat of this rank; 0 = it is lost for another reason.
    """

    rank: int
    reason: str
    host: str
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MayExit:
    """This rank may exit after `leave`: no neighbour needs it any more.

    A neighbour needs this rank until the neighbour has left as well and has acknowledged all
    messages of this rank, or until the neighbour is lost.
    """


MAX_TOPICS = 1024
"""Number of topics that a rank remembers, so that memory stays bounded. If a rank sends a note with
a forgotten topic again, all ranks get that note a second time."""


def drop_oldest_topic(by_topic: dict[str, Any]) -> None:
    """Remove the oldest topic if there are more than `MAX_TOPICS`."""
    if len(by_topic) > MAX_TOPICS:
        del by_topic[next(iter(by_topic))]


Action = Connect | Send | Close | Decide | Answer | HeardNote | LostRank | MayExit


class Node:
    """One rank of the control tree.

    `ControlTree` and `ControlSockets` call the node, from the tree's own thread and from the rank's
    threads. The node is not thread-safe: the caller holds one lock during each call.

    Each public method is an *event*, and returns the actions that the caller must carry out, in
    this order. After each event the caller reads `next_tick`, and calls `tick` at that time. If an
    event raises, it has changed nothing.

    Args of the events:
        now: the time in seconds, by any monotonic clock. All events have this argument, also those
            that do not need it, so that the caller can call all of them in the same way.
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
        # Topics of the last notes that this node has passed on, up or down, the oldest first.
        self._passed_topics: dict[str, None] = {}
        # For each topic of `send_note_with_all`: this rank and those of its children from whose
        # subtrees the note is still missing.
        self._missing_shares: dict[str, set[int]] = {}
        self._lost: set[int] = set()
        self._leave_requested = False
        self._may_exit = False
        self._number = 0  # number of the agreement under way; `_start_agreement` increases it
        self._start_agreement()

    @property
    def next_tick(self) -> float:
        """Time of the next call of `tick`; math.inf = none is needed.

        A tick is needed at two times: when a neighbour has had no connection for too long, and when
        this rank should dial its parent again. A child that has never connected does not count as
        lost, because the first of these times is counted from the end of a connection.
        """
        next_tick = math.inf
        for link in self._links.values():
            # Skip connected links, which need no tick. The tree's thread reads `next_tick` twice
            # each time it wakes up. Without this test, 17 links took a fifth of a rank's CPU time.
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
        """Give up neighbours that had no connection for too long. Dial the parent if it is time."""
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
        """A connection to a neighbour was made. Use it for all frames from now on.

        There may still be an earlier connection: a child may notice the end of a connection before
        its parent does. The caller reads no more frames of the earlier connection.

        Args:
            host: name of the peer's host, for the report if the peer is lost.
        """
        link = self._links.get(peer)
        if link is None or link.ended:
            # Not a neighbour, or one that this rank has reported as lost.
            return [Close(peer)]
        self._send_frames(link, link.resume(host))
        return self._finish_event()

    def disconnected(self, peer: int, now: float, has_ended: bool = False) -> list[Action]:
        """A connection has ended, or an attempt to connect has failed.

        Args:
            has_ended: the peer's process has ended. It cannot connect again, so the peer is lost
                at once. If the caller learns this only later, it calls this method a second time.
        """
        link = self._links.get(peer)
        if link is None or link.ended:
            return []
        if has_ended:
            self._give_up(link, "its process has ended")
        else:
            link.disconnect(now)
        return self._finish_event()

    def report_silence(self, peer: int, seconds: float, now: float) -> list[Action]:
        """A neighbour has not answered pings for some seconds, although it is connected."""
        link = self._links.get(peer)
        if link is None or link.ended:
            return []
        # After a leave message of either rank, the peer may be silent because it exits.
        if link.peer_left or self._leave_requested:
            return []
        self._give_up(link, f"no heartbeat for {seconds:.1f} s", seconds)
        return self._finish_event()

    def receive(self, peer: int, frame: bytes, now: float) -> list[Action]:
        """A frame has arrived from a neighbour.

        A bad frame closes the connection and has no other effect. After several bad frames in a row
        the peer is lost.
        """
        link = self._links.get(peer)
        if link is None or not link.connected:
            return []
        new_message: Message | None = None
        try:
            decoded = decode(frame)
            if link.is_new(decoded):
                new_message = decoded.message
            if new_message is not None:
                self._check(peer, new_message)
        except ValueError as error:
            self._reject(link, error, now)
            return self._finish_event()
        # Accept also a frame without a new message, because it acknowledges messages of this rank.
        link.accept(decoded)
        if new_message is not None:
            self._apply(peer, new_message)
        self._send_frames(link, link.acknowledge())
        return self._finish_event()

    # Events of the rank's own threads

    def join(self, number: int, words: Iterable[str], now: float) -> list[Action]:
        """Join agreement `number` with this rank's words.

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
            ValueError: the agreement has another number, not all ranks have joined it, this is not
                rank 0, or the answer is too long.
        """
        message = AnswerMessage(number, answer)
        check_length(message)
        self._check_answer(None, message)
        self._pass_answer_down(message)
        return self._finish_event()

    def announce(self, number: int, answer: str, now: float) -> list[Action]:
        """Answer agreement `number` without waiting for any words, on rank 0.

        Raises:
            ValueError: another agreement is under way, this is not rank 0, or the answer is too
                long.
        """
        message = AnswerMessage(number, answer, announced=True)
        check_length(message)
        self._check_answer(None, message)
        self._pass_answer_down(message)
        return self._finish_event()

    def send_note(self, topic: str, text: str, now: float) -> list[Action]:
        """Send a note to all ranks. If several ranks send one topic, rank 0 takes the first text.

        Raises:
            ValueError: the text is too long.
        """
        note = NoteMessage(topic, text)
        check_length(note)
        self._pass_note_up(note)
        return self._finish_event()

    def send_note_with_all(self, topic: str, now: float) -> list[Action]:
        """Send a note that reaches all ranks after every rank has sent it.

        Raises:
            ValueError: the topic is too long.
        """
        check_length(ShareMessage(topic))
        self._add_share(self._rank, topic)
        return self._finish_event()

    def leave(self, now: float) -> list[Action]:
        """Tell the neighbours that this rank leaves, so that its end does not count as a loss.

        The node still passes messages on, until it returns `MayExit`.
        """
        self._leave_requested = True
        for link in self._links.values():
            self._send(link, LeaveMessage())
        return self._finish_event()

    def end(self, now: float) -> list[Action]:
        """Tell the neighbours that this rank exits now. Call this after `leave`.

        It may be called without waiting for `MayExit`, if the neighbours take too long to leave.
        """
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
                # A report cannot reach the lost rank: the tree has no other path to it.
                raise ValueError(f"rank {rank} is lost: that is this rank, or none of the group")

    def _apply(self, peer: int, message: Message) -> None:
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
                self._report_loss(message)
            case LeaveMessage():
                self._links[peer].peer_left = True
            case EndMessage():
                self._give_up(self._links[peer], "it has ended in order")

    # Agreements

    def _start_agreement(self) -> None:
        self._number += 1
        self._words: frozenset[str] = frozenset()  # union of the words that have arrived
        self._words_too_long = False
        # This rank and those of its children whose words have not arrived yet.
        self._missing = {self._rank, *self._children}

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
        # Each sender has checked the length of its words, but the union may be too long. Then only
        # that fact travels up, and rank 0 reports it.
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
        """Raise a ValueError if no such answer is possible now.

        Args:
            sender: rank that sent the answer; None = this rank, which must be rank 0.
        """
        number = message.number
        num_missing = len(self._missing)
        if message.announced:
            # No rank joins an agreement that rank 0 announces.
            is_expected = num_missing == 1 + len(self._children)
        else:
            # Rank 0 decides after all ranks have joined.
            is_expected = num_missing == 0
        if sender != self._parent or number != self._number or not is_expected:
            under_way = f"agreement {self._number} is under way"
            raise ValueError(f"an answer of agreement {number} that is not due: {under_way}")

    def _pass_answer_down(self, message: AnswerMessage) -> None:
        self._send_down(message)
        self._actions.append(Answer(message.number, message.text))
        self._start_agreement()

    # Notes

    def _pass_note_up(self, note: NoteMessage) -> None:
        """Pass a note up, unless a note of this topic was passed on before.

        Rank 0 takes only the first note of a topic.
        """
        if note.topic in self._passed_topics:
            return
        if self._parent is None:
            self._pass_note_down(note)
        else:
            self._remember(note.topic)
            self._send_up(note)

    def _pass_note_down(self, note: NoteMessage) -> None:
        self._remember(note.topic)
        self._send_down(note)
        self._actions.append(HeardNote(note.topic, note.text))

    def _remember(self, topic: str) -> None:
        self._passed_topics[topic] = None
        drop_oldest_topic(self._passed_topics)

    def _add_share(self, rank: int, topic: str) -> None:
        """Record that all ranks in the subtree of this child have sent the note `topic`.

        Args:
            rank: the child; or this rank, for its own note.
        """
        missing = self._missing_shares.setdefault(topic, {self._rank, *self._children})
        missing.discard(rank)
        drop_oldest_topic(self._missing_shares)  # Some rank may never send the note.
        if missing:
            return
        self._missing_shares.pop(topic, None)
        if self._parent is None:
            self._pass_note_up(NoteMessage(topic, ""))
        else:
            self._send_up(ShareMessage(topic))

    # Losses

    def _reject(self, link: TreeLink, error: ValueError, now: float) -> None:
        """Close the connection after a bad frame.

        The peer sends the message again on the next connection, perhaps intact.
        """
        link.count_bad_frame()
        if link.has_too_many_bad_frames:
            self._give_up(link, f"it sends bad frames: {error}")
            return
        link.disconnect(now)
        self._actions.append(Close(link.peer))

    def _give_up(self, link: TreeLink, reason: str, silent_seconds: float = 0.0) -> None:
        """End the link to a neighbour for good. Report a loss, unless the neighbour has left."""
        link.end()
        self._actions.append(Close(link.peer))
        if not link.peer_left:
            self._report_loss(LossMessage(link.peer, reason, link.host, silent_seconds))

    def _report_loss(self, loss: LossMessage) -> None:
        """Report a loss, once, to the caller and to all neighbours.

        A loss does not travel to rank 0 first, as a note does: the lost rank may be on the path to
        rank 0.
        """
        if loss.rank in self._lost:
            return
        self._lost.add(loss.rank)
        self._actions.append(LostRank(loss.rank, loss.reason, loss.host, loss.silent_seconds))
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
        if self._leave_requested and not self._may_exit:
            self._check_may_exit()
        actions = self._actions
        self._actions = []
        return actions

    def _check_may_exit(self) -> None:
        for link in self._links.values():
            if not self._needs_this_rank_no_more(link):
                return
        self._may_exit = True
        self._actions.append(MayExit())

    @staticmethod
    def _needs_this_rank_no_more(link: TreeLink) -> bool:
        if link.ended:
            return True
        return link.peer_left and link.num_kept == 0
