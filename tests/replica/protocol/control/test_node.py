# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The node of the control tree, and its parts.

`test_explore` covers the faults of the network.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.replica.protocol.control.garbage import BAD_BYTES, BAD_MESSAGES
from titan_ft.protocol.control import node as nodes
from titan_ft.protocol.control.link import (
    ACKNOWLEDGE_EVERY,
    GRACE_SECONDS,
    MAX_BAD_FRAMES,
    RETRY_SECONDS,
    START_SECONDS,
)
from titan_ft.protocol.control.message import (
    MAX_BYTES,
    AnswerMessage,
    EndMessage,
    Frame,
    LossMessage,
    NoteMessage,
    ShareMessage,
    WordsMessage,
    check_length,
    decode,
    encode,
)
from titan_ft.protocol.control.node import (
    Action,
    Answer,
    Close,
    Connect,
    Decide,
    HeardNote,
    LostRank,
    MayExit,
    Node,
    Send,
)
from titan_ft.protocol.control.tree import find_children, find_depth, find_parent


class Group:
    """Nodes over a network that delivers each frame at once, in order."""

    def __init__(self, num_ranks: int, fan_out: int = 2) -> None:
        self.nodes = [Node(rank, num_ranks, fan_out) for rank in range(num_ranks)]
        self.actions: list[tuple[int, Action]] = []
        self.frames: Counter[tuple[int, int]] = Counter()
        self._under_way: deque[tuple[int, int, bytes]] = deque()
        for rank, node in enumerate(self.nodes):
            self.act(rank, node.start(0.0))

    def act(self, rank: int, actions: list[Action]) -> None:
        """Carry out actions, and all that follow from them."""
        for action in actions:
            match action:
                case Connect(peer):
                    self.act(peer, self.nodes[peer].connected(rank, 0.0))
                    self.act(rank, self.nodes[rank].connected(peer, 0.0))
                case Send(peer, frame):
                    self.frames[rank, peer] += 1
                    self._under_way.append((rank, peer, frame))
                case _:
                    self.actions.append((rank, action))
        while self._under_way:
            sender, receiver, frame = self._under_way.popleft()
            self.act(receiver, self.nodes[receiver].receive(sender, frame, 0.0))

    def agree(self, number: int) -> None:
        """Let all ranks join an agreement, and rank 0 decide it."""
        for rank, node in enumerate(self.nodes):
            self.act(rank, node.join(number, [str(rank)], 0.0))
        self.act(0, self.nodes[0].decide(number, f"answer {number}", 0.0))

    def take(self, kind: type[Action]) -> list[tuple[int, Action]]:
        """Return the actions of this kind, with their ranks, and forget them."""
        taken = [(rank, action) for rank, action in self.actions if isinstance(action, kind)]
        self.actions = [pair for pair in self.actions if pair not in taken]
        return taken


# The tree


@pytest.mark.parametrize("fan_out", [1, 2, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 17, 18, 300])
def test_each_rank_is_a_child_of_its_parent(num_ranks: int, fan_out: int) -> None:
    children = {rank: find_children(rank, num_ranks, fan_out) for rank in range(num_ranks)}
    assert find_parent(0, fan_out) is None
    assert sorted(chain(*children.values())) == list(range(1, num_ranks))
    for rank in range(1, num_ranks):
        parent = find_parent(rank, fan_out)
        assert parent is not None
        assert rank in children[parent]


def test_depth() -> None:
    assert [find_depth(num_ranks) for num_ranks in (1, 2, 17, 18, 273, 274, 8192)] == [
        0,
        1,
        1,
        2,
        2,
        3,
        4,
    ]


# Frames


@given(some.binary(max_size=200))
def test_bytes_that_are_no_frame_raise_a_value_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except ValueError:
        return
    assert decode(encode(frame)) == frame


def test_a_message_fits_into_a_frame_or_is_refused() -> None:
    """A node that passes the longest message on writes larger numbers around it."""
    longest = NoteMessage("topic", "x" * (MAX_BYTES - 100))
    check_length(longest)
    assert len(encode(Frame(1 << 40, 1 << 40, longest))) <= MAX_BYTES
    with pytest.raises(ValueError, match="shorten"):
        check_length(NoteMessage("topic", "x" * MAX_BYTES))


# Agreements and notes


def test_an_agreement_costs_one_frame_up_and_one_down() -> None:
    """No frame only acknowledges."""
    group = Group(7)
    group.frames.clear()
    for number in range(1, 100):
        group.agree(number)
    assert set(group.frames.values()) == {99}
    assert len(group.frames) == 2 * 6
    assert len(group.take(Answer)) == 99 * 7
    assert group.take(Decide)[0] == (0, Decide(1, frozenset("0123456")))


def test_notes_are_acknowledged_though_nobody_answers() -> None:
    group = Group(3)
    for number in range(10 * ACKNOWLEDGE_EVERY):
        group.act(0, group.nodes[0].send_note(f"topic {number}", "", 0.0))
    assert group.frames[1, 0] == 1 + 10
    assert group.nodes[0].num_kept == 0


def test_the_first_text_of_a_topic_wins_on_all_ranks() -> None:
    group = Group(7)
    for rank in (5, 0, 6):
        group.act(rank, group.nodes[rank].send_note("who", f"rank {rank}", 0.0))
    assert sorted(group.take(HeardNote)) == [
        (rank, HeardNote("who", "rank 5")) for rank in range(7)
    ]


def test_one_note_of_a_topic_travels_up() -> None:
    """If all ranks of a large group send the same note, rank 0 gets it once from each child."""
    node = Node(1, 4, fan_out=2)
    node.connected(0, 0.0)
    node.connected(3, 0.0)
    assert len(node.send_note("broken", "here", 0.0)) == 1
    assert node.receive(3, encode(Frame(1, 0, NoteMessage("broken", "there"))), 0.0) == []


def test_the_end_in_order_is_announced_once() -> None:
    group = Group(7)
    for rank, node in enumerate(group.nodes):
        group.act(rank, node.leave(0.0))
    assert sorted(rank for rank, _ in group.take(MayExit)) == list(range(7))
    for rank in range(7):
        parent = find_parent(rank, 2)
        if parent is not None:
            group.act(rank, group.nodes[rank].disconnected(parent, 1.0))
            group.act(rank, group.nodes[rank].tick(1.0 + GRACE_SECONDS))
    assert group.take(MayExit) == group.take(LostRank) == []


def test_a_group_of_one_rank_needs_no_link() -> None:
    group = Group(1)
    group.act(0, group.nodes[0].send_note("topic", "text", 0.0))
    group.agree(1)
    group.act(0, group.nodes[0].leave(0.0))
    decide, answer = Decide(1, frozenset("0")), Answer(1, "answer 1")
    actions = [action for _, action in group.actions]
    assert actions == [HeardNote("topic", "text"), decide, answer, MayExit()]
    assert group.nodes[0].next_tick == math.inf


def test_misuse_raises_and_changes_nothing() -> None:
    group = Group(3)
    root = group.nodes[0]
    too_long = "x" * MAX_BYTES
    with pytest.raises(ValueError, match="agreement 1 is under way"):
        root.join(2, [], 0.0)
    with pytest.raises(ValueError, match="shorten"):
        root.join(1, [too_long], 0.0)
    with pytest.raises(ValueError, match="shorten"):
        root.send_note("topic", too_long, 0.0)
    with pytest.raises(ValueError, match="not due"):
        root.decide(1, "early", 0.0)
    with pytest.raises(ValueError, match="shorten"):
        root.decide(1, too_long, 0.0)
    with pytest.raises(ValueError, match="not due"):
        group.nodes[1].decide(1, "not rank 0", 0.0)
    group.agree(1)
    with pytest.raises(ValueError, match="agreement 2 is under way"):
        root.join(1, [], 0.0)
    assert len(group.take(Answer)) == 3


# Links


def test_a_parent_that_does_not_come_back_is_lost() -> None:
    """The child tries again and again, at the times that the node gives."""
    node = Node(1, 3)
    assert node.start(5.0) == [Connect(0)]
    assert node.send_note("before", "", 5.0) == []
    now, dials = 5.0, 0
    while True:
        node.disconnected(0, now)
        now = node.next_tick
        actions = node.tick(now)
        if actions != [Connect(0)]:
            break
        dials += 1
    assert [type(action) for action in actions] == [Close, LostRank]
    assert now == 5.0 + START_SECONDS
    assert dials == pytest.approx(START_SECONDS / RETRY_SECONDS, abs=1)
    assert node.next_tick == math.inf
    assert node.connected(0, now) == [Close(0)]
    assert node.send_note("after", "", now) == []
    assert node.num_kept == 0, "nothing is kept for a neighbour that does not come back"


@pytest.mark.parametrize("make", [*BAD_BYTES, *BAD_MESSAGES])
def test_a_bad_frame_closes_the_connection(make: Callable[[bytes], bytes]) -> None:
    """A new connection heals the link. After too many bad frames in a row the neighbour is lost."""
    group = Group(3)
    good = encode(Frame(1, 0, WordsMessage(1, frozenset({"word"}))))
    for _ in range(MAX_BAD_FRAMES - 1):
        assert group.nodes[0].receive(1, make(good), 1.0) == [Close(1)]
        assert group.nodes[0].receive(1, good, 1.0) == [], "the connection is closed"
        group.act(0, group.nodes[0].connected(1, 1.0))
    lost, passed_on = group.nodes[0].receive(1, make(good), 1.0)[1:]
    assert isinstance(lost, LostRank)
    assert "sends bad frames" in lost.reason
    assert isinstance(passed_on, Send)
    assert passed_on.peer == 2
    note = encode(Frame(1, 0, NoteMessage("topic", "")))
    assert group.nodes[0].receive(1, note, 1.0) == []
    assert group.nodes[0].next_tick == math.inf


def test_bad_frames_between_good_ones_cost_no_rank() -> None:
    node = Node(0, 3)
    for number in range(1, 3 * MAX_BAD_FRAMES):
        node.connected(1, 0.0)
        note = Frame(number, 0, NoteMessage(str(number), ""))
        assert HeardNote(str(number), "") in node.receive(1, encode(note), 0.0)
        too_early = encode(Frame(number + 2, 0, NoteMessage("too early", "")))
        for _ in range(MAX_BAD_FRAMES - 1):
            assert node.receive(1, too_early, 0.0) == [Close(1)]
            node.connected(1, 0.0)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_cannot_be_lost(rank: int) -> None:
    """A message reports the loss of rank 0 to itself, or the loss of a rank beyond the group."""
    node = Node(0, 3)
    node.connected(1, 0.0)
    assert node.receive(1, encode(Frame(1, 0, LossMessage(rank, "", ""))), 0.0) == [Close(1)]


@pytest.mark.parametrize(
    ("peer", "number", "has_joined"),
    [(0, 1, False), (0, 2, True), (3, 1, True)],
    ids=["before the words", "of another agreement", "from a child"],
)
def test_an_answer_that_is_not_due(peer: int, number: int, has_joined: bool) -> None:
    node = Node(1, 4, fan_out=2)
    node.connected(0, 0.0)
    node.connected(3, 0.0)
    node.receive(3, encode(Frame(1, 0, WordsMessage(1, frozenset()))), 0.0)
    if has_joined:
        node.join(1, [], 0.0)
    frame = Frame(2 if peer == 3 else 1, 0, AnswerMessage(number, "answer"))
    assert node.receive(peer, encode(frame), 0.0) == [Close(peer)]


def test_a_process_that_has_ended_is_lost_at_once() -> None:
    """The sockets may find that out later, and while a new connection is tried."""
    node = Node(1, 2)
    node.start(0.0)
    node.connected(0, 0.0, "node-7")
    assert node.disconnected(0, 1.0) == []
    assert node.tick(1.0) == [Connect(0)]
    lost = LostRank(0, "its process has ended", "node-7")
    assert node.disconnected(0, 1.02, has_ended=True) == [Close(0), lost]
    assert node.disconnected(0, 1.04, has_ended=True) == []


def test_words_that_are_too_long_together_are_nobodys_fault() -> None:
    """The words of each rank fit into a frame, and their union does not.

    Rank 0 gets the error, and no rank is lost.
    """
    group = Group(7)
    for rank, node in enumerate(group.nodes):
        group.act(rank, node.join(1, [str(rank) * (MAX_BYTES // 2)], 0.0))
    assert group.actions == [(0, Decide(1, None))]
    group.actions.clear()
    group.act(0, group.nodes[0].decide(1, "answer 1", 0.0))
    assert group.take(Answer) == [(rank, Answer(1, "answer 1")) for rank in range(7)]
    group.agree(2)
    assert group.take(Decide) == [(0, Decide(2, frozenset("0123456")))]


def test_own_words_that_are_too_long_are_refused() -> None:
    node = Node(0, 2)
    with pytest.raises(ValueError, match="shorten"):
        node.join(1, ["x" * MAX_BYTES], 0.0)
    assert node.join(1, ["x"], 0.0) == []


def test_notes_take_a_bounded_room() -> None:
    """An attempt lasts for weeks, and each break of an exchange is a note."""
    group = Group(3)
    for number in range(nodes.MAX_TOPICS + 10):
        group.act(1, group.nodes[1].send_note(str(number), "", 0.0))
        group.act(1, group.nodes[1].send_note_with_all(f"shared {number}", 0.0))
    assert [len(node._passed_topics) for node in group.nodes] == [nodes.MAX_TOPICS] * 3
    assert max(len(node._missing_shares) for node in group.nodes) <= nodes.MAX_TOPICS
    group.actions.clear()
    group.act(2, group.nodes[2].send_note(str(nodes.MAX_TOPICS), "again", 0.0))
    assert group.actions == [], "a recent topic is known"


def test_a_note_that_needs_all_ranks_costs_one_message_on_each_link() -> None:
    group = Group(7)
    group.frames.clear()
    for rank, node in enumerate(group.nodes):
        assert group.take(HeardNote) == []
        group.act(rank, node.send_note_with_all("hurry", 0.0))
    assert {rank for rank, _ in group.take(HeardNote)} == set(range(7))
    assert set(group.frames.values()) == {1}


def test_an_end_without_a_message_that_the_sender_leaves() -> None:
    """The end would hide a loss."""
    node = Node(0, 2)
    node.connected(1, 0.0)
    assert node.receive(1, encode(Frame(1, 0, EndMessage())), 0.0) == [Close(1)]


def test_a_parent_has_no_share_in_a_note() -> None:
    node = Node(1, 2)
    node.connected(0, 0.0)
    assert node.receive(0, encode(Frame(1, 0, ShareMessage("hurry"))), 0.0) == [Close(0)]


def test_a_neighbour_that_did_not_wait_is_not_waited_for() -> None:
    """Rank 0 has left and ended. Rank 1, which leaves later, may end at once."""
    parent, child = Node(0, 2), Node(1, 2)
    frames = [
        frame
        for action in parent.connected(1, 0.0)
        if isinstance(action, Send)
        for frame in [action.frame]
    ]
    child.connected(0, 0.0)
    frames += [
        action.frame
        for action in [*parent.leave(1.0), *parent.end(3.0)]
        if isinstance(action, Send)
    ]
    actions = [action for frame in frames for action in child.receive(0, frame, 3.0)]
    assert actions[-1] == Close(0)
    assert not any(isinstance(action, LostRank) for action in actions)
    assert child.leave(5.0) == [MayExit()]


def test_a_stranger_is_sent_away() -> None:
    node = Node(1, 3)
    assert node.connected(2, 0.0) == [nodes.Close(2)]
    assert node.disconnected(2, 0.0) == node.receive(2, b"", 0.0) == []
