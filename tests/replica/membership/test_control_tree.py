# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreements, notes and losses of a group over real sockets, with and without links that break."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from tests.replica.membership.control_group import (
    DEADLINE,
    ControlGroup,
    RelayedStore,
    join_words,
    make_tree,
    wait_until,
)
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.control.link import GRACE_SECONDS
from titan_ft.protocol.control.node import MAX_TOPICS, Answer, LostRank, Node
from titan_ft.protocol.errors import LighthouseError, RankLostError

# Agreements


@pytest.mark.parametrize(("num_ranks", "fan_out"), [(2, 16), (8, 16), (8, 2), (64, 16)])
def test_all_ranks_get_what_rank_0_decides(num_ranks: int, fan_out: int) -> None:
    """In a flat and in a deep tree, rank 0 has the words of all ranks."""
    with ControlGroup(num_ranks, fan_out=fan_out) as group:
        group.check_agreements(10)
        assert group.losses == [[]] * num_ranks


def test_one_rank_needs_no_socket_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone rank agrees with itself, and hears its own notes."""
    monkeypatch.setattr("titan_ft.membership.control_tree.ControlSockets", None)
    heard: list[str] = []
    num_threads = threading.active_count()
    tree = make_tree(0, 1, None)
    tree.listen_for_notes("leave/", heard.append)
    tree.send_note("leave/3", "now")
    assert heard == ["3"]
    assert tree.read_note("leave/3") == "now"
    assert tree.propose("leave/3", "later") == "now"
    assert [tree.rank0_decides(["a"], join_words) for _ in range(3)] == ["a"] * 3
    assert threading.active_count() == num_threads
    tree.leave(DEADLINE)
    with pytest.raises(LighthouseError, match="left the job"):
        tree.rank0_decides(["a"], join_words)


def test_rank_0_may_take_its_time_to_decide() -> None:
    """The other ranks hear of an abort during the decision."""
    with ControlGroup(3) as group:

        def decide(_: set[str]) -> str:
            group.trees[2].send_note("broken")
            wait_until(
                lambda: group.trees[1].read_note("broken") is not None, "rank 1 has heard of it"
            )
            return "decided"

        answers = [group.submit(tree.rank0_decides, [], decide) for tree in group.trees]
        assert [answer.result(DEADLINE) for answer in answers] == ["decided"] * 3


def test_rank_0_announces_and_waits_for_nobody() -> None:
    """The other ranks read its decisions in order, later. Agreements go on after announcements."""
    with ControlGroup(7, fan_out=2) as group:
        texts = ["first", "second", "third"]
        assert [
            group.trees[0].rank0_announces(lambda text=text: text).text for text in texts
        ] == texts
        group.trees[0].send_note("all have them")  # a note follows them on each connection
        wait_until(
            lambda: all(tree.read_note("all have them") is not None for tree in group.trees),
            "all have them",
        )
        came = time.monotonic()
        for text in texts:
            announced = [
                group.submit(tree.rank0_announces, pytest.fail) for tree in group.trees[1:]
            ]
            results = [each.result(DEADLINE) for each in announced]
            assert [result.text for result in results] == [text] * 6
            assert max(result.received_at for result in results) < came
        group.check_agreements(2)
        announced = [group.submit(tree.rank0_announces, lambda: "last") for tree in group.trees]
        assert [each.result(DEADLINE).text for each in announced] == ["last"] * 7


def test_a_rank_that_takes_too_long() -> None:
    """A vote has a limit, because the other groups wait for it."""
    with ControlGroup(3) as group:
        for rank in (0, 1):
            with pytest.raises(TimeoutError, match=r"longer than 0.05 s"):
                group.trees[rank].rank0_decides([], join_words, timeout=0.05)


def test_a_decision_that_has_come_counts_although_a_rank_is_lost() -> None:
    """The other ranks may act on the decision. The loss ends the next agreement."""
    with ControlGroup(2) as group:
        tree = group.trees[1]
        waits = group.agree(0)
        wait_until(lambda: tree.num_agreements == 1, "rank 1 waits")
        with tree._condition:
            tree._handle_action(Answer(1, "decided"))
            tree._handle_action(LostRank(0, "its process has ended", "node-0"))
        assert waits[0].result(DEADLINE) == "decided"
        with pytest.raises(
            RankLostError, match=r"rank 0 of this group \(on node-0\) is lost: its process"
        ):
            tree.rank0_decides([], join_words)


def test_closing_ends_the_wait() -> None:
    """A close ends agreements and pauses on every rank."""
    with ControlGroup(3) as group:
        waits = group.agree(2)
        pause = group.submit(group.trees[2].pause, DEADLINE)
        group.on_each(ControlTree.close, group.trees)
        for wait in [*waits, pause]:
            with pytest.raises(LighthouseError, match="left the job"):
                wait.result(DEADLINE)


# Notes


def test_a_note_that_needs_all_ranks() -> None:
    """All ranks hear the note after the last rank has sent it."""
    with ControlGroup(7, fan_out=2) as group:
        for tree in group.trees[:-1]:
            tree.send_note_with_all("hurry")
        group.check_agreements(1)
        assert group.notes == [[]] * 7
        group.trees[6].send_note_with_all("hurry")
        group.check_agreements(1)
        assert group.notes == [["hurry"]] * 7
    alone = make_tree(0, 1, None)
    alone.send_note_with_all("hurry")
    assert alone.read_note("hurry") is not None


def test_notes_are_forgotten_in_the_end() -> None:
    """The tree remembers the last topics only."""
    alone = make_tree(0, 1, None)
    for number in range(MAX_TOPICS + 1):
        alone.send_note(str(number))
    assert alone.read_note("0") is None
    assert alone.read_note("1") is not None
    assert len(alone._notes) == MAX_TOPICS


def test_a_note_is_known_before_the_next_decision() -> None:
    """All listeners have heard a note before the next decision.

    A group that must leave after a vote leaves after that vote.
    """
    with ControlGroup(9, fan_out=2) as group:
        for number in range(20):
            group.trees[number % 9].send_note(f"topic {number}", f"text {number}")
            group.check_agreements(1)
            assert {tree.read_note(f"topic {number}") for tree in group.trees} == {f"text {number}"}
            assert all(f"topic {number}" in notes for notes in group.notes)
        assert all(len(notes) == 20 for notes in group.notes)


def test_a_rank_hears_itself_although_nothing_comes() -> None:
    """The tree's thread calls the listener.

    It must not wait for a message from another rank first.
    """
    with ControlGroup(2) as group:
        group.trees[0].send_note("topic")
        wait_until(lambda: group.notes[0] == ["topic"], "rank 0 has heard of it")


def test_a_decision_waits_for_the_listeners() -> None:
    """A rank must not start its next exchange before the last one is broken off."""
    with ControlGroup(2) as group:
        broken_off = threading.Event()
        heard: list[bool] = []
        group.trees[0].listen_for_notes("broken", lambda _: heard.append(broken_off.wait(DEADLINE)))
        other = group.agree(0)
        wait_until(lambda: 1 not in group.trees[0]._node._missing, "rank 1 has joined")
        group.trees[0].send_note("broken")
        own = group.submit(group.trees[0].rank0_decides, [], join_words)
        with pytest.raises(TimeoutError):
            own.result(0.1)
        broken_off.set()
        assert [own.result(DEADLINE), other[0].result(DEADLINE)] == ["w1", "w1"]
        assert heard == [True]


def test_all_ranks_hear_the_text_that_rank_0_got_first() -> None:
    """Two ranks that acted on different texts would separate."""
    with ControlGroup(9, fan_out=2) as group:
        for number in range(10):
            said = [
                group.submit(tree.propose, f"{number}", f"by {rank}")
                for rank, tree in enumerate(group.trees)
            ]
            texts = {each.result(DEADLINE) for each in said}
            assert len(texts) == 1
            assert texts == {tree.read_note(f"{number}") for tree in group.trees}
        group.check_agreements(1)
        assert all(len(notes) == 10 for notes in group.notes)


def test_what_was_said_before_a_rank_listens() -> None:
    """A listener also gets earlier topics, once, and only topics with its prefix."""
    with ControlGroup(2) as group:
        heard: list[str] = []
        for topic in ("broken/1", "leave/1", "broken/2"):
            group.trees[0].send_note(topic)
        group.check_agreements(1)
        group.trees[1].listen_for_notes("broken/", heard.append)
        for topic in ("leave/2", "broken/3"):
            group.trees[0].send_note(topic)
        group.check_agreements(1)
        assert heard == ["1", "2", "3"]


def test_what_ends_the_wait_for_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 passes nothing on. A close or a loss ends the wait."""
    with ControlGroup(3) as group:
        monkeypatch.setattr(Node, "_pass_note_up", lambda *_: None)
        waits = [group.submit(tree.propose, "topic", "text") for tree in group.trees]
        group.trees[1].close()
        with pytest.raises(LighthouseError, match="left the job"):
            waits[1].result(DEADLINE)
        with pytest.raises(RankLostError, match=r"rank 1 of this group .on node-1. is lost"):
            waits[2].result(DEADLINE)


def test_a_listener_that_fails_costs_nothing_else() -> None:
    """The tree also serves other ranks, and goes on."""
    with ControlGroup(2) as group:

        def fail(_: str) -> None:
            raise RuntimeError("a bug of the listener")

        for tree in group.trees:
            tree.listen_for_notes("broken", fail)
        group.trees[1].send_note("broken")
        group.check_agreements(2)


def test_a_listener_may_say_something() -> None:
    """The tree's thread calls the listener, and the tree accepts calls from that thread."""
    with ControlGroup(2) as group:
        group.trees[1].listen_for_notes("question", lambda _: group.trees[1].send_note("answer"))
        group.trees[0].send_note("question")
        wait_until(
            lambda: group.trees[0].read_note("answer") is not None, "rank 0 has heard the answer"
        )


def test_notes_go_on_after_the_last_agreement() -> None:
    """A rank that has left the job may still send notes until it ends."""
    with ControlGroup(3) as group:
        waits = group.agree(2)
        for tree in group.trees:
            tree.end_agreements()
        for wait in waits:
            with pytest.raises(LighthouseError, match="left the job"):
                wait.result(DEADLINE)
        assert group.trees[1].propose("abandoned", "by 1") == "by 1"
        wait_until(lambda: all("abandoned" in notes for notes in group.notes), "all have heard")


def test_too_long_a_text_is_refused_where_it_is_said() -> None:
    """The sender gets an error, and may send less. The other ranks notice nothing."""
    with ControlGroup(2) as group:
        with pytest.raises(ValueError, match="at most"):
            group.trees[1].send_note("long", "x" * (1 << 21))
        with pytest.raises(ValueError, match="at most"):
            group.trees[1].rank0_decides(["x" * (1 << 21)], join_words)
        group.check_agreements(1)


# Links that break


@pytest.mark.parametrize("loses", [True, False])
def test_a_reset_at_each_message_costs_nothing(
    loses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All children of each parent are reset at once, at each message. Each reset is logged."""
    for chunk in range(20):
        store = RelayedStore(reset_at=chunk, loses=loses)
        with ControlGroup(7, store=store, fan_out=2) as group:
            group.trees[6].send_note("topic", "text")
            group.check_agreements(4)
            assert all(len(relay.chunks) > chunk for relay in store.relays.values())
            assert group.notes == [["topic"]] * 7
            assert group.losses == [[]] * 7
    assert "rank 1 (on node-1) is connected again: " in caplog.text


def test_a_child_that_reads_nothing_keeps_nobody_else_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The parent keeps the messages. 27 MB exceed the kernel's buffers: 10 MB on Linux."""
    store = RelayedStore()
    with ControlGroup(5, store=store, fan_out=2) as group:  # rank 1 has ranks 3 and 4
        group.check_agreements(1)  # otherwise the relay could hold a child's proof back
        store.relays[1].open.clear()
        texts = [f"{number % 10}" * 900_000 for number in range(30)]
        for topic, text in enumerate(texts):
            group.trees[0].send_note(f"{topic}", text)
        wait_until(
            lambda: all(len(group.notes[rank]) == 30 for rank in (0, 1, 2)), "the others have heard"
        )
        sockets = group.trees[1]._sockets
        assert sockets is not None
        wait_until(
            lambda: bool(sockets._neighbours[4].unsent),
            "its parent has more to send than the kernel takes",
        )
        store.relays[1].open.set()
        group.check_agreements(1)
        assert [group.trees[4].read_note(topic) for topic in group.notes[4]] == texts
    assert "connected again" not in caplog.text


def test_a_link_that_is_cut_for_longer_is_a_loss() -> None:
    """All ranks hear at once which rank is lost. Both ends of the link report the other one."""
    store = RelayedStore()
    with ControlGroup(5, store=store, fan_out=2) as group:
        group.check_agreements(1)
        waits = group.agree(4)
        store.relays[1].close()
        for rank, wait in enumerate(waits):
            with pytest.raises(
                RankLostError, match=r"rank [134] of this group .on node-[134]. is lost"
            ):
                wait.result(DEADLINE)
            with pytest.raises(RankLostError):
                group.trees[rank].pause(DEADLINE)
        with pytest.raises(RankLostError, match=r"rank 1 of this group .on node-1. is lost"):
            group.trees[4].rank0_decides([], join_words)
        wait_until(lambda: {3, 4} <= set(group.losses[0]), "rank 0 has heard of both")
        assert group.losses[4] == [1]
        later: list[tuple[int, str]] = []
        group.trees[4].listen_for_losses(lambda loss: later.append((loss.rank, loss.host)))
        wait_until(lambda: later == [(1, "node-1")], "a later listener hears of it as well")


def test_a_bug_in_the_node_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the thread ended silently, its rank would wait for ever."""
    with ControlGroup(3) as group:
        monkeypatch.setattr(Node, "receive", lambda *_: 1 / 0)
        waits = group.agree()
        with pytest.raises(RuntimeError, match="failed on this rank: ZeroDivisionError"):
            waits[0].result(DEADLINE)
        for wait in waits[1:]:
            with pytest.raises(RuntimeError):
                wait.result(DEADLINE)
        # A leaving rank ends when it loses a sibling. It must end at its own loss as well.
        assert group.losses[0] == [0]
        later: list[str] = []
        group.trees[0].listen_for_losses(lambda loss: later.append(loss.reason))
        assert later == [
            "the control tree failed on this rank: ZeroDivisionError: division by zero"
        ]


def test_words_that_are_too_long_together() -> None:
    """Rank 0 raises an error. No rank is lost for bad frames."""
    with ControlGroup(3) as group:
        long = [
            group.submit(tree.rank0_decides, [str(tree._rank) * 500_000], join_words)
            for tree in group.trees
        ]
        with pytest.raises(ValueError, match="the words of all ranks together are too long"):
            long[0].result(DEADLINE)
        assert group.losses == [[]] * 3
        group.on_each(ControlTree.close, group.trees)


class BlockedLog(logging.Handler):
    """A log that nobody reads: its pipe is full."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.blocks, self.read = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.blocks.set()
        self.read.wait(2 * DEADLINE)


def test_a_log_that_nobody_reads() -> None:
    """The log may stop the tree's thread. The training thread still reads notes, and goes on."""
    log = BlockedLog()
    logging.getLogger("titan_ft.membership").addHandler(log)
    try:
        store = RelayedStore()
        with ControlGroup(2, store=store) as group:
            group.check_agreements(1)
            store.relays[0].reset()
            assert log.blocks.wait(DEADLINE)
            looks = [group.submit(tree.read_note, "topic") for tree in group.trees]
            assert [look.result(DEADLINE) for look in looks] == [None, None]
            log.read.set()
            group.check_agreements(1)
    finally:
        log.read.set()
        logging.getLogger("titan_ft.membership").removeHandler(log)


# Leaving


def test_ranks_that_leave_are_not_lost() -> None:
    """This also holds if they leave one after the other, from either end of the tree."""
    for order in (range(7), range(6, -1, -1)):
        with ControlGroup(7, fan_out=2) as group:
            group.check_agreements(1)
            leaving = [group.submit(group.trees[order[0]].leave, DEADLINE)]
            with pytest.raises(TimeoutError):
                leaving[0].result(0.05)  # the rank's neighbours may still need it
            leaving += [group.submit(group.trees[rank].leave, DEADLINE) for rank in order[1:]]
            assert [each.result(DEADLINE) for each in leaving] == [None] * 7
            assert group.losses == [[]] * 7


@pytest.mark.parametrize("first", [0, 1], ids=["parent", "child"])
def test_a_late_leaver_waits_for_nobody_that_has_ended(first: int) -> None:
    """The other rank did not wait for the late one.

    The late rank does not wait for the grace of the closed connection either.
    """
    with ControlGroup(2) as group:
        group.trees[first].leave(0.05)
        began = time.monotonic()
        group.submit(group.trees[1 - first].leave, DEADLINE).result(DEADLINE)
        assert time.monotonic() - began < GRACE_SECONDS / 2
        assert group.losses == [[], []]


def test_a_rank_that_leaves_alone_waits_no_longer_than_it_may() -> None:
    """Its siblings live on."""
    with ControlGroup(3) as group:
        group.trees[2].leave(0.05)
        group.trees[0].send_note("topic")
        wait_until(lambda: group.trees[1].read_note("topic") is not None, "a note comes through")
        group.trees[1].pause(GRACE_SECONDS + 0.2)
        assert group.losses[:2] == [[], []]
