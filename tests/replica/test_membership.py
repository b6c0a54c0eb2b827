# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Quorum, process group and vote, against a real lighthouse with groups of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

from titan_ft.replica import membership as membership_module
from titan_ft.replica.errors import ConfigMismatchError, ForeignMemberError, LighthouseError, ReplacedError
from titan_ft.replica.membership import Member, Membership

DEADLINE = 20.0  # seconds; only ever reached by a bug


def add_up(seats: Any, *members: Membership) -> list[float]:
    """Let each member add 1, 2, 4, ... over the process group; returns what each of them then has."""
    tensors = [torch.tensor([float(2**number)]) for number in range(len(members))]
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM

    def reduce(member: Membership, tensor: torch.Tensor) -> float:
        member.process_group.allreduce([tensor], options).wait()
        return tensor.item()

    return seats.together(*[lambda m=m, t=t: reduce(m, t) for m, t in zip(members, tensors, strict=True)])


# Names


def test_a_member_survives_its_name() -> None:
    """Everything of a member comes back from the replica id; a microsecond of its start is kept."""
    member = Member(12, 1_700_000_000.123457, "abc", "c0ffee")
    assert Member.parse(member.replica_id) == member


def test_ids_sort_by_slot() -> None:
    """torchft orders members by id as text: that must be the order of the slots, also with ten groups and more."""
    members = [Member(slot, 5.0, "u", "c") for slot in (0, 2, 9, 10, 100, 99_999)]
    assert sorted(member.replica_id for member in members) == [member.replica_id for member in members]


@pytest.mark.parametrize("name", ["", "train_llama_0", "titan_ft/x/1.0/u/c", "titan_ft/1/1.0/u", "other/1/1.0/u/c"])
def test_a_foreign_name_is_refused(name: str) -> None:
    """An id that is not ours is named, with the remedy."""
    with pytest.raises(ForeignMemberError, match="own lighthouse") as caught:
        Member.parse(name)
    assert repr(name) in str(caught.value)


# Quorum


def test_two_groups_meet(seats: Any) -> None:
    """Both see the same quorum, each its own rank in the order of slots, and can add up over the process group."""
    late, early = seats.take(3), seats.take(1)
    first, second = seats.meet(late, early)
    assert first.key == second.key
    assert first.members == second.members == (early.member, late.member)
    assert first.slots == [1, 3]
    assert (first.rank, second.rank) == (1, 0)
    assert (first.error, second.error) == (None, None)
    assert (first.max_step, first.behind, second.behind) == (0, False, False)
    assert add_up(seats, late, early) == [3.0, 3.0]


def test_peers_know_each_others_state_server(seats: Any) -> None:
    """Each member learns the address that each other member advertised, by rank."""
    members = seats.take(0, address="10.0.0.1:70"), seats.take(1, address="10.0.0.2:71")
    seats.meet(*members)
    for member in members:
        assert [member.peer_address(rank) for rank in range(2)] == ["10.0.0.1:70", "10.0.0.2:71"]


def test_a_group_alone_has_a_quorum_of_one(seats: Any) -> None:
    """Nobody else is needed; what it adds up is its own."""
    alone = seats.take(5)
    (quorum,) = seats.meet(alone)
    assert (quorum.rank, quorum.slots, quorum.error) == (0, [5], None)
    assert add_up(seats, alone) == [1.0]


def test_who_reports_fewer_updates_is_behind(seats: Any) -> None:
    """The largest number of updates in the quorum tells who is behind."""
    quorums = seats.meet(seats.take(0), seats.take(1), seats.take(2), steps=[5, 3, 5])
    assert [quorum.max_step for quorum in quorums] == [5, 5, 5]
    assert [quorum.behind for quorum in quorums] == [False, True, False]


def test_asking_returns_at_once(seats: Any, start_lighthouse: Callable[..., str]) -> None:
    """The quorum is asked for in the background: a group that has to wait for others goes on computing."""
    seats.lighthouse = start_lighthouse(min_replicas=2)
    one, two = seats.take(0), seats.take(1)
    assert not one.asked
    one.begin(0)
    assert one.asked
    assert not one._pending.done()
    seats.meet(one, two)
    assert one.asked, "a quorum is used up by the vote, not by looking at it"


def test_waiting_for_a_quorum_needs_a_question(seats: Any) -> None:
    """Waiting without having asked is our bug, and no endless wait."""
    with pytest.raises(AssertionError, match="begin"):
        seats.take(0).wait()


def test_waiting_for_others_is_no_error(
    seats: Any, start_lighthouse: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond quorum_timeout_seconds a group that waits for others says so and goes on waiting."""
    seats.lighthouse = start_lighthouse(min_replicas=2)
    one, two = (seats.take(slot, config=seats.config(slot, quorum_timeout_seconds=0.3)) for slot in (0, 1))
    one.begin(7)
    with pytest.raises(TimeoutError):
        one._pending.result(0.8)
    assert "no quorum after step 7" in caplog.text
    seats.meet(one, two, steps=[7, 7])


# Vote


def test_a_quorum_goes_on_after_a_yes(seats: Any) -> None:
    """While nothing changes the process group stays, and `joined` is told once."""
    members = seats.take(0), seats.take(1)
    before = seats.meet(*members)[0]
    groups = [member.process_group._pg for member in members]
    assert [member.vote(0, True) for member in members] == [True, True]
    assert not members[0].asked
    after = seats.meet(*members, steps=[1, 1])[0]
    assert after.key == before.key
    assert [member.process_group._pg for member in members] == groups
    for member in members:
        joined = [event for event in member._events.all if event["event"] == "joined"]
        assert [event["participants"] for event in joined] == [[0, 1]]


def test_a_no_of_one_group_renews_the_quorum(seats: Any) -> None:
    """After one group's broken exchange all members build a new process group, which works."""
    members = seats.take(0), seats.take(1)
    before = seats.meet(*members)[0]
    assert [members[0].vote(0, True), members[1].vote(0, False)] == [True, False]
    after = seats.meet(*members, steps=[1, 0])
    assert after[0].key == after[1].key != before.key
    assert [quorum.behind for quorum in after] == [False, True]
    assert add_up(seats, *members) == [3.0, 3.0]


def test_ranks_of_a_group_agree(seats: Any) -> None:
    """One rank's no is the no of the whole group; a yes needs all."""
    ranks = [seats.take(0, rank=rank, world_size=2) for rank in range(2)]
    for votes, agreed in (((True, True), True), ((True, False), False), ((False, True), False)):
        quorums = seats.meet(*ranks)
        assert [quorum.slots for quorum in quorums] == [[0], [0]]
        answers = seats.together(*[lambda r=r, v=v: r.vote(0, v) for r, v in zip(ranks, votes, strict=True)])
        assert answers == [agreed, agreed]


def test_ranks_meet_their_counterparts(seats: Any) -> None:
    """Rank r of a group exchanges with rank r of the other, and learns that rank's state server."""
    first = [seats.take(0, rank=rank, world_size=2) for rank in range(2)]
    second = [seats.take(1, rank=rank, world_size=2) for rank in range(2)]
    seats.meet(*first, *second)
    assert add_up(seats, first[0], second[0]) == [3.0, 3.0]
    assert add_up(seats, second[1], first[1]) == [3.0, 3.0]
    assert [first[rank].peer_address(1) for rank in range(2)] == ["127.0.0.1:9010", "127.0.0.1:9011"]


# Members that come and go


def test_a_group_that_left_is_missing_from_the_next_quorum(seats: Any) -> None:
    """After close a group has no heartbeat: the others go on without it, with a process group of their own."""
    stays, leaves = seats.take(0), seats.take(1)
    before = seats.meet(stays, leaves)[0]
    for member in (stays, leaves):
        member.vote(0, True)
    leaves.close()
    (after,) = seats.meet(stays, steps=[1])
    assert after.slots == [0]
    assert after.key != before.key
    assert add_up(seats, stays) == [1.0]


def test_a_newcomer_is_in_the_next_quorum(seats: Any) -> None:
    """A group that comes later joins those that are there, and all can add up."""
    old = seats.take(0), seats.take(2)
    seats.meet(*old)
    for member in old:
        member.vote(0, True)
    new = seats.take(1)
    quorums = seats.meet(*old, new, steps=[1, 1, 0])
    assert [quorum.slots for quorum in quorums] == [[0, 1, 2]] * 3
    assert [quorum.rank for quorum in quorums] == [0, 2, 1]
    assert quorums[2].behind
    assert add_up(seats, *old, new) == [7.0] * 3


class Stranger:
    """A client that asks the lighthouse for quorums again and again, and does nothing else."""

    def __init__(self, lighthouse: str, replica_id: str) -> None:
        from torchft.coordination import LighthouseClient

        self._client = LighthouseClient(lighthouse, timedelta(seconds=2))
        self._replica_id = replica_id
        self._stop, self.listed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.listed.wait(DEADLINE)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._client.quorum(
                    replica_id=self._replica_id,
                    timeout=timedelta(seconds=0.5),
                    address="nobody:1",
                    store_address="nobody:1",
                    step=0,
                    world_size=1,
                    shrink_only=False,
                )
                self.listed.set()
            except TimeoutError:
                pass

    def leave(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join()


def test_a_foreign_member_ends_the_group(seats: Any) -> None:
    """Another job at the same lighthouse is named, instead of being waited for or averaged with."""
    stranger = Stranger(seats.lighthouse, "somebody_elses_llama_0")
    try:
        member = seats.take(0)
        member.begin(0)
        with pytest.raises(ForeignMemberError, match="somebody_elses_llama_0"):
            member.wait()
    finally:
        stranger.leave()


def test_a_member_that_dies_before_the_process_group_stands(seats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of the quorum that never comes makes this quorum's exchange fail soon; the next one is without it."""
    monkeypatch.setattr(membership_module, "_RENDEZVOUS_SECONDS", 0.2)
    stranger = Stranger(seats.lighthouse, Member(1, time.time(), "ghost", "c0ffee").replica_id)
    try:
        member = seats.take(0)
        started = time.monotonic()
        member.begin(0)
        quorum = member.wait()
        assert quorum.slots == [0, 1]
        assert quorum.error is not None
        assert time.monotonic() - started < 3.0
        assert member._events.named("joined") == []
    finally:
        stranger.leave()
    assert not member.vote(0, False)
    (quorum,) = seats.meet(member)
    assert (quorum.slots, quorum.error) == ([0], None)


def fate(seat: Membership) -> BaseException:
    """Go from quorum to quorum until one ends this group; returns how."""
    while True:
        if not seat.asked:
            seat.begin(0)
        try:
            seat.wait()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            seat.close()
            return error
        seat.vote(0, False)


def objection(seat: Membership) -> str:
    """Go from quorum to quorum until one cannot be used; returns why."""
    while True:
        if not seat.asked:
            seat.begin(0)
        error = seat.wait().error
        seat.vote(0, False)
        if error is not None:
            return error


def test_the_older_of_two_processes_of_a_slot_ends(seats: Any) -> None:
    """A slot that was started again: the older process is told that it was replaced, the newer one goes on alone."""
    old = seats.take(0)
    seats.meet(old)
    new = seats.take(0)
    end, why = seats.together(lambda: fate(old), lambda: objection(new))
    assert isinstance(end, ReplacedError)
    assert "replica group 0" in str(end)
    assert "fault_tolerance.replica_id must be unique" in str(end)
    assert "[0] were started again" in why
    (quorum,) = seats.meet(new)
    assert (quorum.members, quorum.error) == ((new.member,), None)


def test_a_bystander_waits_until_the_older_process_has_left(seats: Any) -> None:
    """A third group does not exchange in a quorum that holds a slot twice, and meets the newer process after it."""
    bystander, old = seats.take(1), seats.take(0)
    new = seats.take(0)
    end, why, same = seats.together(lambda: fate(old), lambda: objection(new), lambda: objection(bystander))
    assert isinstance(end, ReplacedError)
    assert why == same
    assert [quorum.error for quorum in seats.meet(bystander, new)] == [None, None]
    assert add_up(seats, bystander, new) == [3.0, 3.0]


def test_a_group_with_another_config_ends(seats: Any) -> None:
    """A newcomer whose config differs is told with whom it must agree; the others go on without it."""
    old, new = seats.take(0), seats.take(1, config_digest="deadbeef")
    end, why = seats.together(lambda: fate(new), lambda: objection(old))
    assert isinstance(end, ConfigMismatchError)
    assert "digest deadbeef" in str(end)
    assert "groups [0] (c0ffee)" in str(end)
    assert "[1] run another config" in why
    assert seats.meet(old)[0].error is None


# The lighthouse


def test_a_lighthouse_that_is_not_there(seats: Any) -> None:
    """Taking a seat fails within connect_timeout_seconds, and names both ways to give the right address."""
    started = time.monotonic()
    with pytest.raises(LighthouseError) as caught:
        seats.take(0, lighthouse="http://127.0.0.1:9", config=seats.config(0, connect_timeout_seconds=0.5))
    assert time.monotonic() - started < 5.0
    for part in ("http://127.0.0.1:9", "connect_timeout_seconds", "fault_tolerance.lighthouse", "TORCHFT_LIGHTHOUSE"):
        assert part in str(caught.value)


def test_a_lighthouse_that_dies(seats: Any, mortal_lighthouse: Any) -> None:
    """A quorum that nobody answers ends after quorum_timeout_seconds with the same advice."""
    seats.lighthouse = mortal_lighthouse.address
    member = seats.take(0, config=seats.config(0, quorum_timeout_seconds=0.7))
    seats.meet(member)
    member.vote(0, True)
    mortal_lighthouse.kill()
    member.begin(1)
    with pytest.raises(LighthouseError) as caught:
        member._pending.result(10.0)
    for part in (seats.lighthouse, "quorum_timeout_seconds", "fault_tolerance.lighthouse", "TORCHFT_LIGHTHOUSE"):
        assert part in str(caught.value)


def test_a_lighthouse_that_comes_back(seats: Any, mortal_lighthouse: Any) -> None:
    """Killed while it is asked, and back: the groups meet again well before the timeout, and can exchange.

    It counts quorums from the beginning, under numbers that the groups' stores know already.
    """
    seats.lighthouse = mortal_lighthouse.address
    patient = [seats.config(slot, quorum_timeout_seconds=60.0) for slot in (0, 1)]
    members = [seats.take(slot, config=config) for slot, config in enumerate(patient)]
    for step in range(3):
        seats.meet(*members, steps=[step, step])
        for member in members:
            member.vote(step, False)
    members[0].begin(5)
    mortal_lighthouse.kill()
    mortal_lighthouse.start()
    started = time.monotonic()
    quorums = seats.meet(*members, steps=[5, 5])
    assert time.monotonic() - started < 15.0
    assert [quorum.error for quorum in quorums] == [None, None]
    assert quorums[0].key == quorums[1].key
    assert add_up(seats, *members) == [3.0, 3.0]


# Aborts


class FakeProcessGroup:
    """A process group that notes what is done to it."""

    def __init__(self) -> None:
        self.configured: list[str] = []
        self.aborted = threading.Event()

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def configure(self, store_address: str, *_: object) -> None:
        self.aborted.clear()
        self.configured.append(store_address)

    def abort(self) -> None:
        self.aborted.set()


def test_an_abort_reaches_the_other_ranks_of_the_group(seats: Any) -> None:
    """When one rank breaks an exchange off, the other ranks of its group do so too; other groups are not told."""
    own, other = ([FakeProcessGroup() for _ in range(2)] for _ in range(2))
    ranks = [
        seats.take(slot, rank=rank, world_size=2, process_group=group)
        for slot, groups in enumerate((own, other))
        for rank, group in enumerate(groups)
    ]
    assert [quorum.error for quorum in seats.meet(*ranks)] == [None] * 4
    ranks[1].abort()
    assert own[1].aborted.is_set()
    assert own[0].aborted.wait(DEADLINE)
    assert not any(group.aborted.is_set() for group in other)


def test_an_abort_is_of_one_quorum_only(seats: Any, wait_until: Callable[..., None]) -> None:
    """A process group that was built after the abort is left alone, and can be aborted in its turn."""
    groups = [FakeProcessGroup() for _ in range(2)]
    ranks = [seats.take(0, rank=rank, world_size=2, process_group=groups[rank]) for rank in range(2)]
    for _ in range(3):
        seats.meet(*ranks)
        assert not groups[1].aborted.is_set()
        ranks[0].abort()
        assert groups[1].aborted.wait(DEADLINE)
        assert seats.together(*[lambda r=r: r.vote(0, False) for r in ranks]) == [False, False]
    seats.meet(*ranks)
    names = [thread.name for thread in threading.enumerate()]
    wait_until(lambda: watchers() <= 2, f"the watchers of former quorums end: {names}")
    assert not groups[0].aborted.is_set()
    assert not groups[1].aborted.is_set()
    assert [len(set(group.configured)) for group in groups] == [4, 4]


def watchers() -> int:
    """Count the threads that wait for an abort."""
    return sum(thread.name == "titan_ft_abort_watch" for thread in threading.enumerate())


def test_closing_stops_the_heartbeats_and_the_process_group(seats: Any) -> None:
    """A closed seat has no process group left that a peer could wait for, and closing needs no peer."""
    group = FakeProcessGroup()
    member = seats.take(0, process_group=group)
    seats.meet(member)
    started = time.monotonic()
    member.close()
    assert group.aborted.is_set()
    assert time.monotonic() - started < 2.0


def test_ranks_of_a_later_attempt_find_their_own_server(seats: Any) -> None:
    """The store of torchrun's agent outlives an attempt: a rank must not find the former attempt's dead server."""
    seats.take(0, rank=0, world_size=2).close()
    agent_store = seats.stores[0]  # held: the next rank 0 brings a store of its own, which nobody uses
    store = ("127.0.0.1", agent_store.port)
    rank_one = seats.submit(lambda: seats.take(0, rank=1, world_size=2, attempt=1, store=store))
    with pytest.raises(TimeoutError):
        rank_one.result(0.3)
    rank_zero = seats.take(0, rank=0, world_size=2, attempt=1, store=store)
    assert rank_one.result(DEADLINE).member == rank_zero.member
