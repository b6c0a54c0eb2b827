# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Quorum, process group and vote, with a real lighthouse and groups within this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

from tests.replica.conftest import TOKEN, FakeProbe
from titan_ft.launch.gate import Gate
from titan_ft.membership import membership, rendezvous
from titan_ft.membership.membership import Membership
from titan_ft.membership.seat import Reply
from titan_ft.protocol.errors import (
    ConfigMismatchError,
    ForeignMemberError,
    LighthouseError,
    ReplacedError,
    TokenRefusedError,
    UnknownTokenError,
)
from titan_ft.protocol.member import UNSEALED, Admission, Member
from titan_ft.run.error_file import is_network_error, is_transient
from titan_ft.system.address import split_address
from titan_ft.system.seal import lighthouse_secret

DEADLINE = 20.0  # seconds; only a bug reaches it


def add_up(seats: Any, *members: Membership) -> list[float]:
    """Let the members add 1, 2, 4, ... over the process group. Return each member's sum."""
    tensors = [torch.tensor([float(2**number)]) for number in range(len(members))]
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM

    def reduce(member: Membership, tensor: torch.Tensor) -> float:
        member.process_group.allreduce([tensor], options).wait()
        return tensor.item()

    return seats.together(
        *[lambda m=m, t=t: reduce(m, t) for m, t in zip(members, tensors, strict=True)]
    )


# Quorum


def test_two_groups_meet(seats: Any) -> None:
    """Both groups see the same quorum, and their own ranks in the order of the slots.

    Their process group adds.
    """
    late, early = seats.take(3), seats.take(1)
    first, second = seats.meet(late, early)
    assert first.key == second.key
    assert first.members == second.members == (early.member, late.member)
    assert first.slots == [1, 3]
    assert (first.rank, second.rank) == (1, 0)
    assert (first.error, second.error) == (None, None)
    assert (first.max_step, second.max_step) == (0, 0)
    assert add_up(seats, late, early) == [3.0, 3.0]


def test_peers_know_each_others_state_server(seats: Any) -> None:
    """Each member learns the address that each other member advertises."""
    members = seats.take(0, address="10.0.0.1:70"), seats.take(1, address="10.0.0.2:71")
    seats.meet(*members)
    for member in members:
        other = {0: "10.0.0.1:70", 1: "10.0.0.2:71"}.items() - {
            (member.member.slot, member._seat._address)
        }
        assert {(slot, peer.address) for slot, peer in member.find_holders().items()} == other


def test_a_group_alone_has_a_quorum_of_one(seats: Any) -> None:
    """A lone group needs no other group. Its sum is its own value."""
    alone = seats.take(5)
    (quorum,) = seats.meet(alone)
    assert (quorum.rank, quorum.slots, quorum.error) == (0, [5], None)
    assert add_up(seats, alone) == [1.0]


def test_the_largest_number_of_updates_is_told(seats: Any) -> None:
    """The quorum has the largest number of updates, so each group sees whether it is behind."""
    quorums = seats.meet(seats.take(0), seats.take(1), seats.take(2), steps=[5, 3, 5])
    assert [quorum.max_step for quorum in quorums] == [5, 5, 5]


def test_asking_returns_at_once(seats: Any, start_lighthouse: Callable[..., str]) -> None:
    """A request runs in the background. A group that waits for others goes on computing."""
    seats.lighthouse = start_lighthouse(min_replicas=2)
    one, two = seats.take(0), seats.take(1)
    assert not one.quorum_requested
    one.request_quorum(0)
    assert one.quorum_requested
    assert not one._requested_quorum.done()
    seats.meet(one, two)
    assert one.quorum_requested, "the vote uses a quorum up, a look does not"


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_move_belongs_to_the_reply_after_it(seats: Any, asks_again: bool) -> None:
    """The seat moves while its group looks for a joiner.

    The present reply is the former lighthouse's.
    """
    seat = seats.take(0)._seat
    repeats = [asks_again, False]

    def move(names: Sequence[str]) -> bool:
        seat._moved = len(repeats) == 2
        return repeats.pop(0)

    assert seat.request(0, 0, move).moved is asks_again
    assert seat.request(0, 0).moved is not asks_again


def compute_alone(seats: Any, step_seconds: float) -> list[Membership]:
    """Return the ranks of a lone group that has requested its quorum and computes a step."""
    ranks: list[Membership] = seats.take_group(0)
    seats.meet(*ranks)
    seats.together(*[partial(rank.vote, 0, True) for rank in ranks])
    # As after earlier steps.
    ranks[0]._computing_seconds, ranks[0]._connecting_seconds = (step_seconds, 0.01)
    for rank in ranks:
        rank.request_quorum(1, may_grow=True)
    return ranks


def test_a_lone_group_that_computes_admits_a_group_that_comes(seats: Any) -> None:
    """The quorum stays open until the group needs it.

    So the joiner is in the exchange of the current step.
    """
    ranks = compute_alone(seats, DEADLINE)
    joiner = seats.take(1)
    for rank in ranks:
        with pytest.raises(TimeoutError):  # a group with heartbeats alone is in no quorum yet
            rank._requested_quorum.result(0.3)
    joiner.request_quorum(0)
    assert [seat.await_quorum().slots for seat in (joiner, *ranks)] == [[0, 1]] * 3


def test_a_lone_group_that_has_computed_waits_for_nobody(seats: Any) -> None:
    """A group that asks later comes to the next exchange. Rank 0 decides for all ranks."""
    ranks = compute_alone(seats, DEADLINE)
    seats.take(1)
    ranks[1].need_quorum()
    with pytest.raises(TimeoutError):
        ranks[1]._requested_quorum.result(0.3)
    ranks[0].need_quorum()
    assert [rank.await_quorum().slots for rank in ranks] == [[0], [0]]


@pytest.mark.parametrize(
    "reason", ["its step is nearly over", "it is to leave", "no step was measured"]
)
def test_a_lone_group_admits_nobody_that_would_hold_it_up(
    seats: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The group gets its quorum while it computes.

    Connections to a joiner would delay it after its step.
    """
    if reason == "it is to leave":
        monkeypatch.setattr(seats, "take", partial(seats.take, leave_requested=lambda: True))
    ranks = compute_alone(
        seats, {"its step is nearly over": 0.02, "no step was measured": 0.0}.get(reason, DEADLINE)
    )
    assert [rank._requested_quorum.result(DEADLINE).slots for rank in ranks] == [[0], [0]]


def test_a_group_that_computes_and_is_not_alone_has_its_quorum_at_once(seats: Any) -> None:
    """Its exchange makes collectives during backward, with the present members."""
    one, two = seats.take(0), seats.take(1)
    seats.meet(one, two)
    seats.together(*[partial(seat.vote, 0, True) for seat in (one, two)])
    for seat in (one, two):
        seat.request_quorum(1, may_grow=True)
    assert [seat._requested_quorum.result(DEADLINE).slots for seat in (one, two)] == [
        [0, 1],
        [0, 1],
    ]


def test_waiting_for_a_quorum_needs_a_question(seats: Any) -> None:
    """A wait without a request is a bug. It raises, and does not wait for ever."""
    with pytest.raises(AssertionError, match="request_quorum"):
        seats.take(0).await_quorum()


@pytest.mark.parametrize("answered", [False, True])
def test_a_quorum_is_asked_for_once_in_a_round(
    seats: Any, start_lighthouse: Callable[..., str], answered: bool
) -> None:
    """A second request before the vote is a bug.

    It would drop the answer to the first request on one rank only.
    """
    seats.lighthouse = start_lighthouse(min_replicas=2)
    one, two = seats.take(0), seats.take(1)
    one.request_quorum(0)
    if answered:
        two.request_quorum(0)
        one.await_quorum()
    with pytest.raises(AssertionError, match="requested already"):
        one.request_quorum(0)
    assert one.quorum_ready == answered, "the first request goes on"
    seats.meet(one, two)
    one.vote(0, True)
    one.request_quorum(1)
    assert one.quorum_requested


def test_waiting_for_others_is_no_error(
    seats: Any,
    start_lighthouse: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After `PROBE_SECONDS` a waiting group logs the wait, and waits on with the same request.

    A rank that asked again would be counted for the next quorum, and its siblings would get that
    quorum without it.
    """
    seats.lighthouse = start_lighthouse(min_replicas=2)
    monkeypatch.setattr("titan_ft.membership.seat.PROBE_SECONDS", 0.3)
    one, two = (seats.take(slot) for slot in (0, 1))
    asked = []
    client = one._seat._client
    one._seat._client = SimpleNamespace(
        _quorum=lambda **request: asked.append(request) or client._quorum(**request)
    )
    one.request_quorum(7)
    with pytest.raises(TimeoutError):
        one._requested_quorum.result(0.8)
    assert "no quorum after step 7" in caplog.text
    one._seat._client = client
    seats.meet(one, two, steps=[7, 7])
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("method", "told"), [(None, [10, 20, 30, 40, 50, 60, 70, 80]), ("diloco", [10, 20, 40, 80])]
)
def test_a_long_wait_for_others_is_told(
    seats: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str | None,
    told: list[int],
) -> None:
    """The wait is logged each `PROBE_SECONDS`.

    With long rounds it is logged each time it has doubled.
    """
    monkeypatch.setattr("titan_ft.membership.seat.PROBE_SECONDS", 10.0)
    seat = seats.take(0, config=seats.config(0, semi_sync_method=method))._seat
    now, reply = 0.0, Reply(7, ["one", "other"], 3)

    class Answer:
        """An answer that comes after 85 seconds."""

        def exception(self, timeout: float) -> None:
            nonlocal now
            if now + timeout < 85.0:
                now += timeout
                raise TimeoutError

        def result(self) -> Reply:
            return reply

    monkeypatch.setattr(seat, "_ask", lambda step, failures: Answer())
    monkeypatch.setattr("titan_ft.membership.seat.time", SimpleNamespace(monotonic=lambda: now))
    assert seat.request(3, 0) == reply
    what = "round" if method else "step"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"no quorum after {what} 3 for {seconds} s" for seconds in told
    ]


# Vote


def test_a_quorum_goes_on_after_a_yes(seats: Any) -> None:
    """While the members stay the same, the process group stays. `joined` is written once."""
    members = seats.take(0), seats.take(1)
    before = seats.meet(*members)[0]
    groups = [member.process_group._pg for member in members]
    assert [member.vote(0, True) for member in members] == [True, True]
    assert not members[0].quorum_requested
    after = seats.meet(*members, steps=[1, 1])[0]
    assert after.key == before.key
    assert [member.process_group._pg for member in members] == groups
    for member in members:
        joined = [event for event in member._events.all if event["event"] == "joined"]
        assert [event["participants"] for event in joined].count([0, 1]) == 1


def test_a_no_of_one_group_renews_the_quorum(seats: Any) -> None:
    """After one group's failed exchange, all members build a new process group, which works."""
    members = seats.take(0), seats.take(1)
    before = seats.meet(*members)[0]
    assert [members[0].vote(0, True), members[1].vote(0, False)] == [True, False]
    after = seats.meet(*members, steps=[1, 0])
    assert after[0].key == after[1].key != before.key
    assert [quorum.max_step for quorum in after] == [1, 1]
    assert add_up(seats, *members) == [3.0, 3.0]


def test_ranks_of_a_group_agree(seats: Any) -> None:
    """A "no" of one rank is the "no" of its group. A "yes" needs all ranks."""
    ranks = seats.take_group(0)
    for votes, agreed in (((True, True), True), ((True, False), False), ((False, True), False)):
        quorums = seats.meet(*ranks)
        assert [quorum.slots for quorum in quorums] == [[0], [0]]
        answers = seats.together(
            *[lambda r=r, v=v: r.vote(0, v) for r, v in zip(ranks, votes, strict=True)]
        )
        assert answers == [agreed, agreed]


def test_a_vote_ends_although_a_rank_does_not_vote(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vote has a limit, because the other groups wait for it."""
    monkeypatch.setattr("titan_ft.membership.membership.VOTE_SECONDS", 0.2)
    ranks = seats.take_group(0)
    seats.meet(*ranks)
    with pytest.raises(TimeoutError, match=r"after step 3 within 0.2 s"):
        ranks[0].vote(3, True)


def test_ranks_meet_their_counterparts(seats: Any) -> None:
    """Rank r of one group exchanges with rank r of the other, and learns that rank's state
    server.
    """
    first = seats.take_group(0)
    second = seats.take_group(1)
    seats.meet(*first, *second)
    assert add_up(seats, first[0], second[0]) == [3.0, 3.0]
    assert add_up(seats, second[1], first[1]) == [3.0, 3.0]
    assert [first[rank].find_addresses([1]) for rank in range(2)] == [
        ["127.0.0.1:9010"],
        ["127.0.0.1:9011"],
    ]


# Members that come and go


def test_a_group_that_left_is_missing_from_the_next_quorum(seats: Any) -> None:
    """A closed group sends no heartbeats. The others go on in a process group without it."""
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
    """A group that comes later joins the present groups, and all of them can add."""
    old = seats.take(0), seats.take(2)
    seats.meet(*old)
    for member in old:
        member.vote(0, True)
    new = seats.take(1)
    quorums = seats.meet(*old, new, steps=[1, 1, 0])
    assert [quorum.slots for quorum in quorums] == [[0, 1, 2]] * 3
    assert [quorum.rank for quorum in quorums] == [0, 2, 1]
    assert quorums[2].max_step == 1
    assert add_up(seats, *old, new) == [7.0] * 3


class Stranger:
    """A client that requests quorums again and again."""

    def __init__(self, lighthouse: str, replica_id: str, step: int = 0) -> None:
        from torchft.coordination import LighthouseClient

        self._client = LighthouseClient(lighthouse, timedelta(seconds=2))
        self._replica_id, self._step = replica_id, step
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
                    step=self._step,
                    world_size=1,
                    shrink_only=False,
                )
                self.listed.set()
            except TimeoutError:
                pass

    def leave(self) -> None:
        """Make no further requests."""
        self._stop.set()
        self._thread.join()


@pytest.fixture
def stranger(seats: Any) -> Iterator[Stranger]:
    """Provide a member of another kind of job, with an impossible step.

    It sorts before all groups.
    """
    stranger = Stranger(seats.lighthouse, "somebody_elses_llama_0", step=1_000_000)
    yield stranger
    stranger.leave()


def test_a_foreign_member_is_left_aside(
    seats: Any, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger is named once. The groups meet without it, and ignore its step."""
    members = seats.take(0), seats.take(1)
    for step in (3, 4):
        quorums = seats.meet(*members, steps=[step, step])
        assert [quorum.rank for quorum in quorums] == [0, 1]
        assert {(q.slots[0], q.slots[1], q.error, q.max_step) for q in quorums} == {
            (0, 1, None, step)
        }
        assert add_up(seats, *members) == [3.0, 3.0]
        assert [member.vote(step, True) for member in members] == [True, True]
    for member in members:
        (event,) = member._events.named("foreign_member")
        assert (event["member"], event["reason"]) == ("somebody_elses_llama_0", UNSEALED)
    assert caplog.text.count("somebody_elses_llama_0") == 2  # each group logs it once


def test_who_is_behind_shows_in_spite_of_a_stranger(seats: Any, stranger: Stranger) -> None:
    """Members exchange their steps. So a stranger's claim does not hide a group that is behind."""
    old = seats.take(1)
    seats.meet(old, steps=[5])
    old.vote(5, True)
    quorums = seats.meet(seats.take(0), old, steps=[0, 6])
    assert [(q.max_step, q.error) for q in quorums] == [(6, None), (6, None)]


def test_one_rank_of_a_group_names_a_stranger(seats: Any, stranger: Stranger) -> None:
    """The other ranks leave the stranger aside as well, and log nothing."""
    ranks = seats.take_group(0)
    assert [quorum.slots for quorum in seats.meet(*ranks)] == [[0], [0]]
    assert [len(rank._events.named("foreign_member")) for rank in ranks] == [1, 0]


def test_strangers_are_reported_again_after_a_pause(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reason has one line, whatever the strangers' names are. Control characters are escaped
    once.
    """
    seat = seats.take(0)
    now = 1000.0
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now))
    for number in range(3):
        seat._report_strangers(Admission((), {f"forged-{number}\x1b": "its seal is wrong"}))
    seat._report_strangers(Admission((), {"other": "of another job"}))
    now += membership._STRANGER_PAUSE_SECONDS
    seat._report_strangers(Admission((), {"forged-3": "its seal is wrong"}))
    members = [event["member"] for event in seat._events.named("foreign_member")]
    assert members == ["forged-0\\x1b", "other", "forged-3"]


def test_a_member_that_dies_before_the_process_group_stands(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that never comes makes this exchange fail soon. The next quorum is without it."""
    monkeypatch.setattr(rendezvous, "_BASE_SECONDS", 0.2)
    stranger = Stranger(
        seats.lighthouse, Member(1, time.time(), "ghost", "c0ffee", token=TOKEN).replica_id
    )
    try:
        member = seats.take(0)
        started = time.monotonic()
        member.request_quorum(0)
        quorum = member.await_quorum()
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
    """Go from quorum to quorum until one of them ends this group. Return the error."""
    while True:
        if not seat.quorum_requested:
            seat.request_quorum(0)
        try:
            seat.await_quorum()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            seat.close()
            return error
        seat.vote(0, False)


def stay(seat: Any, slots: list[int], stranger: bool = False) -> None:
    """Go from quorum to quorum, as training does, until one has these slots.

    Each exchange must work.

    Args:
        stranger: a stranger must have been named as well.
    """
    while True:
        if not seat.quorum_requested:
            seat.request_quorum(0)
        quorum = seat.await_quorum()
        if quorum.slots == slots and (not stranger or seat._events.named("foreign_member")):
            return
        seat.vote(0, quorum.error is None)


def test_the_older_of_two_processes_of_a_slot_ends(seats: Any) -> None:
    """After a restart, the older process of a slot ends with an error, and the newer one goes
    on.
    """
    old = seats.take(0)
    seats.meet(old)
    new = seats.take(0)
    end, _ = seats.together(lambda: fate(old), lambda: stay(new, [0]))
    assert isinstance(end, ReplacedError)
    assert "replica group 0" in str(end)
    assert "fault_tolerance.replica_id must be unique" in str(end)
    (quorum,) = seats.meet(new)
    assert (quorum.members, quorum.error) == ((new.member,), None)


def test_a_bystander_takes_the_newer_process(seats: Any) -> None:
    """A third group exchanges with the newer process.

    It does so even in a quorum that still has the older one.
    """
    bystander, old = seats.take(1), seats.take(0)
    seats.meet(bystander, old)
    for seat in (bystander, old):
        seat.vote(0, True)
    new = seats.take(0)
    # All three request a quorum. The older process stays in it, as if it hung after its request.
    new.request_quorum(0)

    def ask_until_the_newer_one_is_there() -> None:
        for _ in range(100):
            for seat in (bystander, old):
                seat.request_quorum(0)
            old.await_quorum()
            # A quorum of the first two, made before the newer process's request.
            bystander.await_quorum()
            for seat in (bystander, old):
                seat.vote(0, True)

    with pytest.raises(ReplacedError):
        ask_until_the_newer_one_is_there()
    quorums = [new.await_quorum(), bystander.await_quorum()]
    assert [(q.members, q.error) for q in quorums] == [((new.member, bystander.member), None)] * 2
    assert add_up(seats, new, bystander) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "error", "told", "named"),
    [
        (
            {"config_digest": "deadbeef"},
            ConfigMismatchError,
            ["digest deadbeef", "groups [0] (c0ffee)"],
            "deadbeef",
        ),
        (
            {"shape": "2r"},
            ConfigMismatchError,
            ["has 2 ranks; the job's groups [0] have 1 rank:"],
            "it has 2 ranks",
        ),
        (
            {"job": "theirs"},
            ForeignMemberError,
            ["job 'theirs'", "job 'ours' (groups [0])"],
            "job 'theirs'",
        ),
        (
            {"token": "another"},
            UnknownTokenError,
            ["got titan_ft/000000/", "another TITAN_FT_TOKEN"],
            "no valid seal",
        ),
    ],
)
def test_a_newcomer_of_another_kind_ends(
    seats: Any, kind: dict[str, str], error: type[Exception], told: list[str], named: str
) -> None:
    """A newcomer with another config, shape, job or token ends.

    The error names the group that it differs from. The first group logs the newcomer and goes on.
    """
    old = seats.take(0, config=seats.config(0, job_id="ours"), shape="1r")
    seats.meet(old)
    old.vote(0, True)
    config = seats.config(1, job_id=kind.get("job", "ours"))
    new = seats.take(
        1, config=config, **{"shape": "1r", **{name: kind[name] for name in kind if name != "job"}}
    )
    end, _ = seats.together(lambda: fate(new), lambda: stay(old, [0], stranger=True))
    assert isinstance(end, error)
    for part in told:
        assert part in str(end)
    (event,) = old._events.named("foreign_member")
    assert event["member"] == new.member.replica_id
    assert named in event["reason"]
    assert not new._events.named("joined")
    assert seats.meet(old)[0].error is None


# The lighthouse


def test_a_lighthouse_that_is_not_there(seats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group takes no seat within `CONNECT_SECONDS`. The error names both settings of the
    address.
    """
    monkeypatch.setattr("titan_ft.membership.seat.CONNECT_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(LighthouseError) as caught:
        seats.take(0, lighthouse="http://127.0.0.1:9")
    assert time.monotonic() - started < 5.0
    for part in (
        "http://127.0.0.1:9",
        "within 0.5 s",
        "fault_tolerance.lighthouse",
        "TORCHFT_LIGHTHOUSE",
    ):
        assert part in str(caught.value)


class Port:
    """A port of this host, and the gate that has it."""

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = split_address(lighthouse)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.close = self._listener.close

    @contextlib.contextmanager
    def gate(self, token: str) -> Iterator[None]:
        """Have a gate for groups with this token at the port."""
        secret = lighthouse_secret(token)
        # The gate closes its listener. This one keeps the port, as nothing else may take it here.
        gate = Gate(self._listener.dup(), self._lighthouse, secret, lambda _: None)
        thread = threading.Thread(target=gate.run)
        thread.start()
        try:
            yield
        finally:
            gate.close()
            thread.join()


@pytest.fixture
def port(seats: Any) -> Iterator[Port]:
    """Provide a port at which the seats' lighthouse is behind gates."""
    found = Port(seats.lighthouse)
    seats.lighthouse = found.address
    yield found
    found.close()


def test_a_lighthouse_that_refuses_the_token(seats: Any, port: Port) -> None:
    """The error says how long the group has waited. The next start would be refused as well, so the
    agent does not start the group for ever.
    """
    started = time.monotonic()
    with port.gate("another token"), pytest.raises(TokenRefusedError) as caught:
        seats.take(0, config=seats.config(0, start_timeout_seconds=1.0))
    assert 1.0 <= time.monotonic() - started < DEADLINE
    for part in (
        f"{port.address} refuses this group's TITAN_FT_TOKEN",
        "fault_tolerance.start_timeout_seconds = 1 is over",
    ):
        assert part in str(caught.value)
    assert not is_transient(caught.value)
    assert not is_network_error(caught.value)


def test_another_runs_lighthouse_at_the_port_for_a_while(
    seats: Any, port: Port, caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    """It took the port while the run's own restarted. Each group that started then was lost."""

    def count_warnings() -> int:
        return sum("refuses this group's TITAN_FT_TOKEN" in line for line in caplog.messages)

    foreign, own = contextlib.ExitStack(), contextlib.ExitStack()
    foreign.enter_context(port.gate("another token"))

    def give_way() -> None:
        wait_until(lambda: count_warnings() > 0, "the group says why it waits")
        foreign.close()
        own.enter_context(port.gate(TOKEN))

    with ThreadPoolExecutor(1) as pool, own:
        gave_way = pool.submit(give_way)
        member = seats.take(0, config=seats.config(0, start_timeout_seconds=DEADLINE))
        gave_way.result(DEADLINE)
        assert seats.meet(member)[0].error is None
        assert count_warnings() == 1


def test_a_lighthouse_that_dies(
    seats: Any, mortal_lighthouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request without an answer ends after `PROBE_SECONDS`, with the same advice."""
    monkeypatch.setattr("titan_ft.membership.seat.PROBE_SECONDS", 0.7)
    seats.lighthouse = mortal_lighthouse.address
    member = seats.take(0)
    seats.meet(member)
    member.vote(0, True)
    mortal_lighthouse.kill()
    member.request_quorum(1)
    with pytest.raises(LighthouseError) as caught:
        member._requested_quorum.result(10.0)
    for part in (
        seats.lighthouse,
        "within 0.7 s",
        "fault_tolerance.lighthouse",
        "TORCHFT_LIGHTHOUSE",
    ):
        assert part in str(caught.value)


def restart(lighthouse: Any) -> None:
    """Kill the lighthouse, and start another one at its port as soon as the port is free."""
    lighthouse.kill()
    host, port = lighthouse.address.removeprefix("http://").split(":")
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except ConnectionRefusedError:
            break
        except OSError:  # it is ending
            pass
    lighthouse.start()


def test_a_lighthouse_that_comes_back(seats: Any, mortal_lighthouse: Any) -> None:
    """The lighthouse dies during a request and comes back. The groups meet well before the timeout.

    The new lighthouse numbers quorums from the beginning. The stores have these numbers already.
    """
    seats.lighthouse = mortal_lighthouse.address
    members = [seats.take(slot) for slot in (0, 1)]
    for step in range(3):
        seats.meet(*members, steps=[step, step])
        for member in members:
            member.vote(step, False)
    members[0].request_quorum(5)
    restart(mortal_lighthouse)
    started = time.monotonic()
    quorums = seats.meet(*members, steps=[5, 5])
    assert time.monotonic() - started < 15.0
    assert [quorum.error for quorum in quorums] == [None, None]
    assert quorums[0].key == quorums[1].key
    assert add_up(seats, *members) == [3.0, 3.0]


def test_no_key_of_a_store_is_used_twice(seats: Any, mortal_lighthouse: Any) -> None:
    """A restarted lighthouse numbers quorums again.

    Even with the same members, the store keys differ.
    """
    seats.lighthouse = mortal_lighthouse.address
    groups = [FakeProcessGroup() for _ in range(2)]
    members = [seats.take(slot, process_group=groups[slot]) for slot in (0, 1)]
    keys = []
    for _ in range(3):
        for _ in range(3):
            quorums = seats.meet(*members, steps=[5, 5])
            assert [quorum.error for quorum in quorums] == [None, None]
            keys.append(quorums[0].key)
            for member in members:
                member.vote(5, False)
        restart(mortal_lighthouse)
    assert len(set(keys)) < len(keys), (
        "the lighthouse never repeated a number, so this test shows nothing"
    )
    for group in groups:
        assert len(set(group.configured)) == len(group.configured)


def test_a_forgetful_lighthouse_separates_nobody(
    seats: Any,
    mortal_lighthouse: Any,
    wait_until: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restarted lighthouse gives a quorum to the first group.

    That group waits for its former members.
    """
    seats.lighthouse = mortal_lighthouse.address
    # The second group's heartbeat is slow. So the new lighthouse does not know the group before it
    # asks.
    one = seats.take(0)
    monkeypatch.setattr("titan_ft.membership.seat.beat_interval", lambda config: timedelta(hours=1))
    members = [one, seats.take(1)]
    seats.meet(*members)
    for member in members:
        member.vote(0, True)
    restart(mortal_lighthouse)
    members[0].request_quorum(1)
    wait_until(
        lambda: "waiting for groups [1]" in caplog.text, "the first group found itself alone"
    )
    members[1].request_quorum(1)
    quorums = [member._requested_quorum.result(DEADLINE) for member in members]
    assert [(quorum.slots, quorum.error) for quorum in quorums] == [([0, 1], None)] * 2
    assert add_up(seats, *members) == [3.0, 3.0]


def test_a_group_that_died_with_the_lighthouse_is_not_waited_for_long(
    seats: Any, mortal_lighthouse: Any
) -> None:
    """A group that does not come back to a restarted lighthouse counts as gone."""
    seats.lighthouse = mortal_lighthouse.address
    stays, dies = seats.take(0), seats.take(1)
    seats.meet(stays, dies)
    stays.vote(0, True)
    dies.close()
    restart(mortal_lighthouse)
    stays.request_quorum(1)
    assert stays._requested_quorum.result(DEADLINE).slots == [0]


# Aborts


class FakeProcessGroup:
    """A process group that records the calls to it."""

    def __init__(self) -> None:
        self.configured: list[str] = []
        self.aborted = threading.Event()

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def configure(self, store_address: str, *_: object) -> None:
        self.aborted.clear()
        self.configured.append(store_address)

    def abort(self, errored: bool = True) -> None:
        self.aborted.set()


def test_an_abort_reaches_the_other_ranks_of_the_group(seats: Any) -> None:
    """If one rank breaks off an exchange, its siblings do so too. Other groups get no note."""
    own, other = ([FakeProcessGroup() for _ in range(2)] for _ in range(2))
    ranks = [
        rank
        for slot, groups in enumerate((own, other))
        for rank in seats.take_group(
            slot, of_rank=lambda rank, groups=groups: {"process_group": groups[rank]}
        )
    ]
    assert [quorum.error for quorum in seats.meet(*ranks)] == [None] * 4
    ranks[1].abort()
    assert own[1].aborted.is_set()
    assert own[0].aborted.wait(DEADLINE)
    assert not any(group.aborted.is_set() for group in other)


def test_an_abort_is_of_one_quorum_only(seats: Any) -> None:
    """A process group that was built after an abort is not affected, and can be aborted as well."""
    groups = [FakeProcessGroup() for _ in range(2)]
    ranks = seats.take_group(0, of_rank=lambda rank: {"process_group": groups[rank]})
    for _ in range(3):
        seats.meet(*ranks)
        assert not groups[1].aborted.is_set()
        ranks[0].abort()
        assert groups[1].aborted.wait(DEADLINE)
        assert seats.together(*[lambda r=r: r.vote(0, False) for r in ranks]) == [False, False]
    seats.meet(*ranks)
    assert not groups[0].aborted.is_set()
    assert not groups[1].aborted.is_set()
    assert all(len(set(group.configured)) >= 4 for group in groups)


def test_an_abort_before_another_rank_has_begun(
    seats: Any, wait_until: Callable[..., None]
) -> None:
    """A rank that builds its process group later sees the abort.

    It does not wait in that exchange.
    """
    groups = [FakeProcessGroup() for _ in range(2)]
    ranks = seats.take_group(0, of_rank=lambda rank: {"process_group": groups[rank]})
    first, second = (rank._rendezvous for rank in ranks)
    member = ranks[0].member
    assert first.configure("key", 1, (member,), member, 0) is None
    ranks[0].abort()
    seats.together(*[lambda r=r: r._control.rank0_decides((), lambda _: "") for r in ranks])
    assert (
        second.configure("key", 1, (member,), member, 0)
        == "broke on another rank of this group before it began here"
    )
    assert second.configure("key", 1, (member,), member, 0) is None, "another process group"


def test_an_abort_of_a_former_quorum_does_nothing(seats: Any) -> None:
    """A watch may act late. Then another process group is there, which goes on."""
    group = FakeProcessGroup()
    member = seats.take(0, process_group=group)
    seats.meet(member)
    former = member._rendezvous.prefix
    assert not member.vote(0, False)
    seats.meet(member)
    assert len(set(group.configured)) == 2
    member._rendezvous.abort(former)
    assert not group.aborted.is_set()
    member.abort()
    assert group.aborted.is_set()


def test_an_exchange_that_the_others_have_left(seats: Any) -> None:
    """A group that was frozen in an exchange breaks it off by itself when it thaws."""
    group = FakeProcessGroup()
    frozen, other = (
        seats.take(0, process_group=group),
        seats.take(1, process_group=FakeProcessGroup()),
    )
    seats.meet(frozen, other)
    frozen._seat.leave()
    group.aborted.clear()
    assert other.vote(0, False) is False
    seats.meet(other)
    assert not group.aborted.is_set()
    with frozen.watch_exchange():
        assert group.aborted.wait(DEADLINE)
    assert [event["members"] for event in frozen._events.named("left_out")] == [[1]]
    assert frozen._events.named("peer_silent") == []


def test_an_exchange_that_another_group_has_broken_off(
    seats: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All members live, but one of them took another for dead. NCCL's abort reaches no other
    rank.
    """
    group = FakeProcessGroup()
    config = seats.config(0, process_group="nccl")
    waits, leaves = (
        seats.take(0, config=config, process_group=group),
        seats.take(1, process_group=FakeProcessGroup()),
    )
    seats.meet(waits, leaves)
    leaves.abort()
    assert leaves.vote(0, False) is False
    group.aborted.clear()
    leaves.request_quorum(0)
    with waits.watch_exchange():
        assert group.aborted.wait(DEADLINE)
    assert "asks for the next quorum already" in caplog.text
    assert not waits._events.named("left_out")
    assert not waits._events.named("peer_silent")
    waits.vote(0, False)
    assert [quorum.slots for quorum in seats.meet(waits, leaves)] == [[0, 1]] * 2


def test_a_store_that_went_with_its_group_is_not_tried_again(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer would otherwise wait seconds for the host of a dead group.

    The others would wait for the newcomer.
    """
    member = seats.take(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = Member(1, 1.0, "gone", "c0ffee", store=f"127.0.0.1:{listener.getsockname()[1]}")

    def connect(*_: object, **__: object) -> None:
        pytest.fail("torch's client tries again and again")

    monkeypatch.setattr("titan_ft.membership.rendezvous.TCPStore", connect)
    with pytest.raises(ConnectionRefusedError):
        member._rendezvous._exchange_texts(gone, 0, 2, 0, 2.0)


def test_with_nccl_a_silent_member_is_waited_for_half_as_long(seats: Any) -> None:
    """NCCL shows no closed connection. The patience is one heartbeat timeout, as at the
    lighthouse.
    """
    gloo, nccl = (
        seats.take(
            slot, config=seats.config(slot, process_group=backend), process_group=FakeProcessGroup()
        )
        for slot, backend in enumerate(("gloo", "nccl"))
    )
    patience = [member._watches[0]._patience for member in (gloo, nccl)]
    assert patience == [2 * patience[1], seats.config(1).heartbeat_timeout_ms / 1000]


def test_who_lives_and_is_in_no_quorum(seats: Any, wait_until: Callable[..., None]) -> None:
    """A group outside has come or come back, and has not asked yet. Only rank 0 looks."""
    ranks = seats.take_group(0)
    quorums = seats.meet(*ranks)
    assert ranks[0].find_outsiders(quorums[0], 0) == []
    seats.take(1)
    wait_until(lambda: ranks[0].find_outsiders(quorums[0], 0) == [1], "group 1 is heard of")
    assert ranks[1].find_outsiders(quorums[1], 0) == []


def test_who_of_a_former_quorum_still_heartbeats(
    seats: Any, wait_until: Callable[..., None]
) -> None:
    """Another process in the slot of a dead one does not count.

    Without a page, all groups count as living.
    """
    own, other = seats.take(0), seats.take(1)
    (quorum, _) = seats.meet(own, other)
    assert own.find_living(quorum.members) == {0, 1}
    other.close()
    seats.take(1)
    wait_until(
        lambda: own.find_living(quorum.members) == {0}, "group 1 is silent, or another process"
    )
    assert own.find_living([]) == set()
    own._page.read = lambda timeout: None
    assert own.find_living(quorum.members) == {0, 1}


def test_who_holds_a_later_state_and_is_outside(
    seats: Any, wait_until: Callable[..., None]
) -> None:
    """A group outside is silent, and lives while it answers a probe.

    Its later state must not be given up.
    """
    gone: list[str] = []
    probe = FakeProbe(lambda peer: peer.unique in gone)
    own = seats.take(0, probe=probe)
    (quorum,) = seats.meet(own)
    other = seats.take(1)
    other._seat.adopt_name(other._seat.reopen(other.member.reporting(5, [own.member])))
    wait_until(
        lambda: other.member.replica_id in own._read_status().heartbeats, "its report is heard"
    )
    other._seat.leave()
    wait_until(lambda: own.find_outsiders(quorum, 5) == [], "group 1 is silent")
    assert own.find_outsiders(quorum, 4) == [1]
    gone.append(other.member.unique)
    assert own.find_outsiders(quorum, 4) == []


def test_a_group_finds_its_counterparts_without_a_quorum(
    seats: Any, wait_until: Callable[..., None]
) -> None:
    """Each rank finds its counterpart from the lighthouse's page and the other group's store."""
    waits = seats.take_group(0, of_rank=lambda rank: {"address": f"10.0.0.{rank}:1"})
    seats.take_group(1, of_rank=lambda rank: {"address": f"10.0.1.{rank}:1"})
    wait_until(
        lambda: list(waits[1]._find_peers(waits[1]._read_status())) == [1], "group 1 is heard of"
    )
    assert [rank.find_addresses([1]) for rank in waits] == [["10.0.1.0:1"], ["10.0.1.1:1"]]
    assert waits[0].find_addresses([2, 1]) == ["", "10.0.1.0:1"], (
        "the others give the data of a group that is gone"
    )
    with pytest.raises(ConnectionError):
        waits[0].find_addresses([2])


def test_whose_state_a_newcomer_can_use(seats: Any) -> None:
    """Only an exchange that expects its former process.

    Other exchanges make an update before the newcomer has a quorum.
    """
    first, former = seats.take(0), seats.take(1)
    seats.meet(first, former)
    newcomer, successor = seats.take(2), seats.take(1)
    assert newcomer.find_holders() == {}
    assert [*successor.find_holders()] == [0, 2]
    assert successor.find_addresses([0]) == [f"127.0.0.1:{9000}"]
    seats.meet(first, successor, newcomer)
    assert [*successor.find_holders()] == [0, 2], (
        "as members of its quorum, whose addresses it knows"
    )
    assert [*newcomer.find_holders()] == [0, 1]


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_process_group_that_cannot_be_aborted(
    seats: Any, wait_until: Callable[..., None], stuck: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks still get the note, and the log has the reason.

    The next quorum is watched.
    """

    class Stuck(FakeProcessGroup):
        def abort(self, errored: bool = True) -> None:
            super().abort(errored)
            if errored:
                raise OSError("no such socket")

    groups: list[FakeProcessGroup] = [
        Stuck() if rank == stuck else FakeProcessGroup() for rank in range(2)
    ]
    ranks = seats.take_group(0, of_rank=lambda rank: {"process_group": groups[rank]})
    for _ in range(2):
        seats.meet(*ranks)
        caplog.clear()
        ranks[0].abort()
        assert groups[1].aborted.wait(DEADLINE)
        assert seats.together(*[lambda r=r: r.vote(0, False) for r in ranks]) == [False, False]
        # The line follows the abort, on a thread of its own.
        wait_until(lambda: "no such socket" in caplog.text, "the reason is logged")


def test_closing_after_the_silence(seats: Any) -> None:
    """A group whose heartbeats have stopped makes no requests. It can be closed once or twice."""
    member, other = seats.take(0), seats.take(1)
    seats.meet(member, other)
    member.stop_heartbeats()
    assert member.member not in seats.meet(other)[0].members
    with pytest.raises(LighthouseError, match="left the job"):
        member._seat.request(0, 0)
    member.close()
    member.close()


def test_a_vote_under_way_when_the_group_falls_silent(
    seats: Any, wait_until: Callable[..., None]
) -> None:
    """The vote waits, because the thread that ends the process still has to report.

    Closing ends the vote.
    """
    ranks = seats.take_group(0)
    seats.meet(*ranks)
    control = ranks[0]._control
    number = control.num_agreements
    vote = seats.submit(ranks[0].vote, 0, True)
    wait_until(lambda: control.num_agreements > number, "the vote is under way")
    ranks[0].stop_heartbeats()
    with pytest.raises(TimeoutError):
        vote.result(0.1)
    for rank in ranks:
        rank.close()
    with pytest.raises(LighthouseError, match="left the job"):
        vote.result(DEADLINE)


def test_closing_stops_the_heartbeats_and_the_process_group(seats: Any) -> None:
    """A closed seat has no process group for which a peer could wait. The close needs no peer."""
    group = FakeProcessGroup()
    member = seats.take(0, process_group=group)
    seats.meet(member)
    started = time.monotonic()
    member.close()
    assert group.aborted.is_set()
    assert time.monotonic() - started < 2.0


def test_who_has_tried_already_is_not_kept_waiting(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lighthouse restarts and a group is gone.

    A member that knows of no restart asks after a failed exchange.
    """
    monkeypatch.setattr("titan_ft.membership.membership._REPEAT_PAUSE_SECONDS", 0.0)
    members = [seats.take(slot) for slot in range(3)]
    first = seats.meet(*members)[0]
    names = members[0]._last_quorum.names
    assert len(first.members) == len(names) == 3
    left = [name for name in names if not name.startswith("titan_ft/000002/")]
    former = members[0]._last_quorum
    for ids, patient in (([0] * 30, True), ([0, 1, 1], False)):
        replies = iter(ids)
        told: list[int] = []

        def request(
            step: int, failures: int, _: object, replies: Any = replies, told: list[int] = told
        ) -> Any:
            told.append(failures)
            return Reply(next(replies), left, 0)

        members[0]._last_quorum = former
        monkeypatch.setattr(members[0]._seat, "request", request)
        admission = members[0]._request_until_complete(1, 3).admission
        assert [member.slot for member in admission.members] == [0, 1]
        assert told[:2] == [3, 0]
        assert (len(told) > 2) is patient


def test_nobody_waits_for_a_group_that_it_cannot_reach(
    seats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is present and unreachable after a restart of the lighthouse.

    The others do not wait for it.
    """
    members = [seats.take(slot) for slot in range(2)]
    seats.meet(*members)
    first, second = (member.member for member in members)
    cut_off = first.reporting(1, [second]), second.reporting(1, [first])
    told: list[int] = []

    def request(step: int, failures: int, _: object) -> Any:
        told.append(failures)
        return Reply(0, [member.replica_id for member in cut_off], 0)

    monkeypatch.setattr(members[0]._seat, "member", cut_off[0])
    monkeypatch.setattr(members[0]._seat, "request", request)
    admission = members[0]._request_until_complete(1, 3).admission
    assert [member.slot for member in admission.members] == [0]
    assert [member.slot for member in admission.cut_off] == [1]
    assert told == [3]


def test_the_manager_takes_no_other_connection(seats: Any) -> None:
    """Any process of the host could kill this process there.

    Quorums and heartbeats go on, after a second seat too.
    """
    members = [seats.take(slot) for slot in (0, 1)]
    for step in range(2):
        for member in members:
            host, port = split_address(member._seat._server.address())
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port), 5.0)
        assert [quorum.slots for quorum in seats.meet(*members, steps=[step, step])] == [[0, 1]] * 2
        assert [member.vote(step, True) for member in members] == [True, True]
        members[0]._seat.adopt_name(
            members[0]._seat.open(members[0].member.renamed("another name"))
        )
    living = members[1].find_living([member.member for member in members])
    assert living == {0, 1}
