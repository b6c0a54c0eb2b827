# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Defects of the control tree that the exploration must find.

`python -m tests.replica.protocol.control.mutations` explores with each of them. A mutation replaces
functions or constants by name. So a line may be moved or formatted freely, and a name that is gone
is an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.replica.protocol.control.explore import explore
from titan_ft.protocol.control import link as links
from titan_ft.protocol.control import message as messages
from titan_ft.protocol.control import node as nodes
from titan_ft.protocol.control.link import TreeLink
from titan_ft.protocol.control.message import (
    Frame,
    LeaveMessage,
    LossMessage,
    Message,
    NoteMessage,
    ShareMessage,
    WordsMessage,
)
from titan_ft.protocol.control.node import HeardNote, Node

SCHEDULES = 1000
"""Within so many schedules the exploration must find a mutation."""

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: of the function that puts the defect into the machine.
        text: description of the defect.
        apply: puts the defect into the machine.
    """

    name: str
    text: str
    apply: Callable[[Patch], None]


MUTATIONS: list[Mutation] = []


def mutation(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Enter a function that applies a defect into `MUTATIONS`."""
    text = (apply.__doc__ or "").strip().removesuffix(".")
    MUTATIONS.append(Mutation(apply.__name__, text, apply))
    return apply


def around(patch: Patch, owner: type, name: str, act: Callable[..., Any]) -> None:
    """Let `act` run in the place of a method. `act` gets the former one as its first argument."""
    former = vars(owner)[name]
    patch.setattr(owner, name, lambda *args, **kwargs: act(former, *args, **kwargs))


def find(mutation: Mutation) -> tuple[int, str] | None:
    """Return the first seed whose schedule finds the mutation, and the broken rule."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
        problems = explore(range(SCHEDULES), stop_at_first=True).problems
    return next(iter(problems.items()), None)


# Links: numbers, kept messages, acknowledgements


@mutation
def announcements_stay_with_rank_0(patch: Patch) -> None:
    """An announcement is not passed on."""
    former = Node._send_down

    def send_down(self: Node, message: Any) -> None:
        if not getattr(message, "announced", False):
            former(self, message)

    patch.setattr(Node, "_send_down", send_down)


@mutation
def announcements_end_no_agreement(patch: Patch) -> None:
    """After an announcement the same agreement is still under way."""
    former = Node._pass_answer_down

    def pass_answer_down(self: Node, message: Any) -> None:
        number = self._number
        former(self, message)
        if message.announced:
            self._number = number

    patch.setattr(Node, "_pass_answer_down", pass_answer_down)


@mutation
def duplicates_count(patch: Patch) -> None:
    """A message that is sent again is taken again."""
    around(
        patch,
        TreeLink,
        "is_new",
        lambda former, self, frame: former(self, frame) or frame.number > 0,
    )


@mutation
def nothing_is_sent_again(patch: Patch) -> None:
    """A new connection begins with the next message."""
    patch.setattr(TreeLink, "resume", _connect_without_kept)


def _connect_without_kept(self: TreeLink, host: str) -> list[bytes]:
    self.connected, self.next_dial = True, math.inf
    return [self._encode(0, None)]


@mutation
def only_the_last_is_sent_again(patch: Patch) -> None:
    """Of several kept messages, a new connection brings the last one."""
    around(patch, TreeLink, "resume", lambda former, self, host: former(self, host)[-1:])


@mutation
def sent_again_in_reverse(patch: Patch) -> None:
    """The kept messages are sent again with the newest one first."""
    around(patch, TreeLink, "resume", lambda former, self, host: former(self, host)[::-1])


@mutation
def no_first_frame(patch: Patch) -> None:
    """A new connection without kept messages stays silent, and the other end does not trust it."""

    def connect(former: Callable[..., list[bytes]], self: TreeLink, host: str) -> list[bytes]:
        frames = former(self, host)
        return frames if self._kept else []

    around(patch, TreeLink, "resume", connect)


@mutation
def not_kept_while_closed(patch: Patch) -> None:
    """A message that is sent while the connection is closed is forgotten."""
    around(
        patch,
        TreeLink,
        "send",
        lambda former, self, message: former(self, message) if self.connected else [],
    )


@mutation
def kept_for_ever(patch: Patch) -> None:
    """Acknowledged messages are kept."""

    def accept(former: Callable[..., None], self: TreeLink, frame: Frame) -> None:
        former(self, Frame(frame.number, 0, frame.message))

    around(patch, TreeLink, "accept", accept)


@mutation
def all_acknowledged(patch: Patch) -> None:
    """Each frame acknowledges everything that was sent."""

    def accept(former: Callable[..., None], self: TreeLink, frame: Frame) -> None:
        former(self, Frame(frame.number, self._num_sent, frame.message))

    around(patch, TreeLink, "accept", accept)


@mutation
def one_too_many_acknowledged(patch: Patch) -> None:
    """A frame acknowledges the message after the last one that has come."""

    def encode(former: Callable[..., bytes], self: TreeLink, number: int, message: Any) -> bytes:
        self._num_received += 1
        made = former(self, number, message)
        self._num_received -= 1
        return made

    around(patch, TreeLink, "_encode", encode)


@mutation
def never_acknowledged_alone(patch: Patch) -> None:
    """Only messages acknowledge: a parent with much to say keeps all of it."""
    around(patch, TreeLink, "acknowledge", lambda former, self: [])


@mutation
def leave_acknowledged_late(patch: Patch) -> None:
    """A neighbour that leaves waits for the next message that has something to say."""
    around(patch, TreeLink, "acknowledge", _acknowledge_as_ever)


def _acknowledge_as_ever(former: Callable[..., Any], self: TreeLink) -> Any:
    peer_left, self.peer_left = self.peer_left, False
    frames = former(self)
    self.peer_left = peer_left
    return frames


@mutation
def future_numbers_accepted(patch: Patch) -> None:
    """A number from the future is taken for the next one."""

    def check(former: Callable[..., bool], self: TreeLink, frame: Frame) -> bool:
        return frame.number > self._num_received

    around(patch, TreeLink, "is_new", check)


@mutation
def numbers_begin_anew(patch: Patch) -> None:
    """A new connection counts its messages from 1."""

    def connect(former: Callable[..., list[bytes]], self: TreeLink, host: str) -> list[bytes]:
        self._num_received = 0
        return former(self, host)

    around(patch, TreeLink, "resume", connect)


@mutation
def bad_frame_takes_a_number(patch: Patch) -> None:
    """A bad frame counts as received, and the good one in its place is dropped."""

    def check(former: Callable[..., bool], self: TreeLink, frame: Frame) -> bool:
        is_new = former(self, frame)
        self._num_received = max(self._num_received, frame.number)
        return is_new

    around(patch, TreeLink, "is_new", check)


# Links: the second of grace


@mutation
def no_grace(patch: Patch) -> None:
    """A neighbour is lost as soon as its connection closes."""
    patch.setattr(links, "GRACE_SECONDS", 0.0)


@mutation
def half_the_grace(patch: Patch) -> None:
    """A neighbour is lost after half of the time."""
    patch.setattr(links, "GRACE_SECONDS", 0.5)


@mutation
def long_grace(patch: Patch) -> None:
    """A dead neighbour is lost seconds later than promised."""
    patch.setattr(links, "GRACE_SECONDS", 2.0)


@mutation
def grace_for_an_ended_process(patch: Patch) -> None:
    """A neighbour whose process has ended is lost when the grace is over."""

    def disconnected(former: Callable[..., Any], self: Node, peer: int, now: float, _: bool) -> Any:
        return former(self, peer, now)

    around(patch, Node, "disconnected", disconnected)


@mutation
def grace_goes_on(patch: Patch) -> None:
    """A neighbour that has come back is lost all the same."""

    def accept(former: Callable[..., None], self: TreeLink, frame: Frame) -> None:
        deadline = self.deadline
        former(self, frame)
        self.deadline = deadline

    around(patch, TreeLink, "accept", accept)


@mutation
def grace_begins_anew(patch: Patch) -> None:
    """Each failed attempt to connect gives a dead neighbour another second."""

    def disconnect(former: Callable[..., None], self: TreeLink, now: float) -> None:
        self.deadline = math.inf
        former(self, now)

    around(patch, TreeLink, "disconnect", disconnect)


@mutation
def grace_ends_with_the_connection(patch: Patch) -> None:
    """A connection is trusted without a frame, also that to a neighbour that closes each one."""

    def connect(former: Callable[..., list[bytes]], self: TreeLink, host: str) -> list[bytes]:
        self.deadline = math.inf
        return former(self, host)

    around(patch, TreeLink, "resume", connect)


@mutation
def one_attempt(patch: Patch) -> None:
    """A connection is tried once."""

    def disconnect(former: Callable[..., None], self: TreeLink, now: float) -> None:
        was_connected = self.connected
        former(self, now)
        if not was_connected:
            self.next_dial = math.inf

    around(patch, TreeLink, "disconnect", disconnect)


@mutation
def attempts_without_a_pause(patch: Patch) -> None:
    """A refused connection is tried again at once, as fast as the host can."""
    patch.setattr(links, "RETRY_SECONDS", 0.0)


@mutation
def seldom_attempts(patch: Patch) -> None:
    """The next attempt to connect comes so late that the grace is over."""
    patch.setattr(links, "RETRY_SECONDS", 0.9)


@mutation
def newer_connection_refused(patch: Patch) -> None:
    """A parent that has not seen the end of a connection closes the next one."""

    def connected(former: Callable[..., Any], self: Node, peer: int, now: float, host: str) -> Any:
        link = self._links[peer]
        return [nodes.Close(peer)] if link.connected else former(self, peer, now, host)

    around(patch, Node, "connected", connected)


@mutation
def newer_connection_not_noticed(patch: Patch) -> None:
    """A parent that has not seen the end of a connection does not send again on the next one."""

    def connected(former: Callable[..., Any], self: Node, peer: int, now: float, host: str) -> Any:
        return [] if self._links[peer].connected else former(self, peer, now, host)

    around(patch, Node, "connected", connected)


@mutation
def lost_neighbour_comes_back(patch: Patch) -> None:
    """A neighbour that was given up is taken again."""

    def end(former: Callable[..., None], self: TreeLink) -> None:
        former(self)
        self.ended = False

    around(patch, TreeLink, "end", end)


@mutation
def one_bad_frame_is_deadly(patch: Patch) -> None:
    """A neighbour is lost for its first bad frame."""
    patch.setattr(links, "MAX_BAD_FRAMES", 1)


@mutation
def bad_frames_raise(patch: Patch) -> None:
    """A frame that cannot be decoded ends the loop thread."""

    def decode(data: bytes) -> Frame:
        try:
            return messages.decode(data)
        except ValueError as error:
            raise TypeError(str(error)) from error

    patch.setattr(nodes, "decode", decode)


# Agreements


@mutation
def own_words_are_not_waited_for(patch: Patch) -> None:
    """A node with children sends their words without its own ones."""

    def add_words(former: Callable[..., None], self: Node, rank: int, words: WordsMessage) -> None:
        if len(self._missing) == 2 and self._rank in self._missing and rank != self._rank:
            self._missing.discard(self._rank)
        former(self, rank, words) if rank in self._missing else None

    around(patch, Node, "_add_words", add_words)


@mutation
def last_child_is_not_waited_for(patch: Patch) -> None:
    """The words of the last child are not waited for."""

    def begin(former: Callable[..., None], self: Node) -> None:
        former(self)
        if len(self._children) > 1:
            self._missing.discard(self._children[-1])

    around(patch, Node, "_start_agreement", begin)


@mutation
def words_of_one_rank(patch: Patch) -> None:
    """Instead of their union, the words that came last travel up."""

    def add_words(former: Callable[..., None], self: Node, rank: int, words: WordsMessage) -> None:
        self._words = frozenset()
        former(self, rank, words)

    around(patch, Node, "_add_words", add_words)


@mutation
def words_of_the_agreement_before(patch: Patch) -> None:
    """An agreement begins with the words of the one before."""

    def begin(former: Callable[..., None], self: Node) -> None:
        words: frozenset[str] = getattr(self, "_words", frozenset())
        former(self)
        self._words = words

    around(patch, Node, "_start_agreement", begin)


@mutation
def any_words_accepted(patch: Patch) -> None:
    """Words for another agreement are taken for this one's."""

    def check(former: Callable[..., None], self: Node, rank: int, words: WordsMessage) -> None:
        former(self, rank, WordsMessage(self._number, words.words))

    around(patch, Node, "_check_words", check)


@mutation
def any_answer_accepted(patch: Patch) -> None:
    """An answer is taken from anybody, for whichever agreement."""
    around(patch, Node, "_check_answer", lambda former, self, peer, message: None)


@mutation
def answer_stops_at_the_first_child(patch: Patch) -> None:
    """Of several children, the first one gets the answers and notes."""

    def send_down(former: Callable[..., None], self: Node, message: Any) -> None:
        for child in self._children[:1]:
            self._send(self._links[child], message)

    around(patch, Node, "_send_down", send_down)


@mutation
def each_rank_answers(patch: Patch) -> None:
    """A node with children answers for rank 0."""

    def add_words(former: Callable[..., None], self: Node, rank: int, words: WordsMessage) -> None:
        former(self, rank, words)
        if not self._missing and self._parent is not None and len(self._children) > 1:
            self._pass_answer_down(messages.AnswerMessage(self._number, f"answer {self._number}"))

    around(patch, Node, "_add_words", add_words)


# Notes


@mutation
def speaker_hears_at_once(patch: Patch) -> None:
    """A rank hears its own note before rank 0 does."""

    def send_note(former: Callable[..., Any], self: Node, topic: str, text: str, now: float) -> Any:
        return [*former(self, topic, text, now), HeardNote(topic, text)]

    around(patch, Node, "send_note", send_note)


@mutation
def notes_after_the_words(patch: Patch) -> None:
    """A rank's note travels after the words that follow it."""

    def join(former: Callable[..., Any], self: Node, number: int, words: Any, now: float) -> Any:
        waiting, self._waiting = getattr(self, "_waiting", []), []  # type: ignore[attr-defined]
        actions = former(self, number, words, now)
        for note in waiting:
            self._pass_note_up(note)
        return actions + self._finish_event()

    def send_note(former: Callable[..., Any], self: Node, topic: str, text: str, now: float) -> Any:
        waiting = getattr(self, "_waiting", [])
        self._waiting = [*waiting, NoteMessage(topic, text)]  # type: ignore[attr-defined]
        return []

    around(patch, Node, "join", join)
    around(patch, Node, "send_note", send_note)


@mutation
def every_text_heard(patch: Patch) -> None:
    """Rank 0 passes on each text of a topic."""

    def raise_note(former: Callable[..., None], self: Node, note: NoteMessage) -> None:
        self._passed_topics.pop(note.topic, None)
        former(self, note)

    around(patch, Node, "_pass_note_up", raise_note)


@mutation
def note_stays_in_its_subtree(patch: Patch) -> None:
    """A node with children passes its subtree's notes down, and not up."""

    def raise_note(former: Callable[..., None], self: Node, note: NoteMessage) -> None:
        if self._children and note.topic not in self._passed_topics:
            self._pass_note_down(note)
        else:
            former(self, note)

    around(patch, Node, "_pass_note_up", raise_note)


@mutation
def speaker_is_not_answered(patch: Patch) -> None:
    """A node that has said something does not pass down the text that rank 0 took."""

    def pass_down(former: Callable[..., None], self: Node, note: NoteMessage) -> None:
        if self._parent is None or note.topic not in self._passed_topics:
            former(self, note)

    around(patch, Node, "_pass_note_down", pass_down)


# Losses and leaving


@mutation
def loss_is_not_passed_on(patch: Patch) -> None:
    """Only the neighbours know of a loss."""

    def lose(former: Callable[..., None], self: Node, loss: LossMessage) -> None:
        if loss.rank in self._links:
            former(self, loss)

    around(patch, Node, "_report_loss", lose)


@mutation
def loss_travels_down_only(patch: Patch) -> None:
    """A parent does not hear of its child's losses."""

    def lose(former: Callable[..., None], self: Node, loss: LossMessage) -> None:
        is_new = loss.rank not in self._lost
        parent = None if self._parent is None else self._links[self._parent]
        if is_new and parent is not None and not parent.ended:
            sent, kept, connected = parent._num_sent, list(parent._kept), parent.connected
            parent.connected = False
            former(self, loss)
            parent._num_sent, parent.connected = sent, connected
            parent._kept.clear()
            parent._kept.extend(kept)
        else:
            former(self, loss)

    around(patch, Node, "_report_loss", lose)


@mutation
def loss_is_a_note(patch: Patch) -> None:
    """A loss travels by way of rank 0: it reaches nobody when the way there is what is lost."""

    def lose(former: Callable[..., None], self: Node, loss: LossMessage) -> None:
        if loss.rank not in self._lost:
            self._lost.add(loss.rank)
            self._actions.append(
                nodes.LostRank(loss.rank, loss.reason, loss.host, loss.silent_seconds)
            )
            if self._parent is not None:
                self._send(self._links[self._parent], loss)
            if self._parent is None:
                self._send_down(loss)

    around(patch, Node, "_report_loss", lose)


@mutation
def loss_comes_back(patch: Patch) -> None:
    """A loss that is known is passed on again."""

    def lose(former: Callable[..., None], self: Node, loss: LossMessage) -> None:
        self._lost.discard(loss.rank)
        former(self, loss)

    around(patch, Node, "_report_loss", lose)


@mutation
def share_waits_for_nobody(patch: Patch) -> None:
    """One rank of a subtree is enough for a note that needs all ranks."""

    def add(former: Callable[..., None], self: Node, rank: int, topic: str) -> None:
        self._missing_shares[topic] = {rank}
        former(self, rank, topic)

    around(patch, Node, "_add_share", add)


@mutation
def share_stays_with_the_parent(patch: Patch) -> None:
    """A node forgets the share of its subtree in a note that needs all ranks."""

    def send(former: Callable[..., None], self: Node, message: Message) -> None:
        if not isinstance(message, ShareMessage):
            former(self, message)

    around(patch, Node, "_send_up", send)


@mutation
def end_is_not_announced(patch: Patch) -> None:
    """A late leaver waits for a neighbour that has ended."""
    patch.setattr(Node, "end", lambda self, now: [])


@mutation
def silence_is_ignored(patch: Patch) -> None:
    """A neighbour without a heartbeat is waited for."""
    patch.setattr(Node, "report_silence", lambda self, peer, seconds, now: [])


@mutation
def silence_is_not_passed_on(patch: Patch) -> None:
    """The other ranks do not learn that a lost rank had no heartbeat."""

    def lose(former: Callable[..., None], self: Node, loss: LossMessage) -> None:
        former(self, LossMessage(loss.rank, loss.reason, loss.host))

    around(patch, Node, "_report_loss", lose)


@mutation
def leaver_is_lost(patch: Patch) -> None:
    """The end of a rank that has announced it is a loss."""

    def give_up(former: Callable[..., None], self: Node, link: TreeLink, *args: Any) -> None:
        link.peer_left = False
        former(self, link, *args)

    around(patch, Node, "_give_up", give_up)


@mutation
def leaves_without_a_word(patch: Patch) -> None:
    """A node tells its parent that it leaves, and not its children."""

    def leave(former: Callable[..., Any], self: Node, now: float) -> Any:
        self._leave_requested = True
        if self._parent is not None:
            self._send(self._links[self._parent], LeaveMessage())
        return self._finish_event()

    around(patch, Node, "leave", leave)


@mutation
def ends_before_its_children(patch: Patch) -> None:
    """A rank ends as soon as its neighbours know that it leaves."""
    patch.setattr(
        Node,
        "_needs_this_rank_no_more",
        staticmethod(lambda link: link.ended or link.num_kept == 0),
    )


@mutation
def ends_before_it_is_known(patch: Patch) -> None:
    """A rank ends while a neighbour may not know that it leaves."""
    patch.setattr(
        Node, "_needs_this_rank_no_more", staticmethod(lambda link: link.ended or link.peer_left)
    )


@mutation
def never_ends(patch: Patch) -> None:
    """A rank that has lost a neighbour waits for it to leave."""
    is_over = staticmethod(lambda link: link.peer_left and link.num_kept == 0)
    patch.setattr(Node, "_needs_this_rank_no_more", is_over)


def main() -> int:
    """Explore with each mutation. Return 1 if one is not found."""
    missed = 0
    for mutation in MUTATIONS:
        found = find(mutation)
        missed += found is None
        seed, problem = found or (SCHEDULES, "NOT FOUND")
        print(f"{mutation.name:34} {seed:5}  {problem[:100]}", flush=True)
    print(f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} mutations found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
