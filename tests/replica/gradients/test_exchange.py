# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange of gradients over real Gloo. The members are threads of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.links import pace
from benchmarks.member_facts import MemberFacts, exchange_with
from tests.replica.conftest import wait_until
from titan_ft.device import local_shard
from titan_ft.gradients import exchange, operations
from titan_ft.gradients.bucket import BucketState, Gradient, partition
from titan_ft.gradients.exchange import ExchangeResult, GradientExchange, HookCalls
from titan_ft.gradients.flight import ExchangeError
from titan_ft.gradients.operations import Operations
from titan_ft.gradients.sums import Sums
from titan_ft.membership.process_group import BreakableGloo, build_process_group
from titan_ft.protocol.errors import LighthouseError
from titan_ft.protocol.member import Member, Quorum
from titan_ft.system.process import borrowed_socket

DEADLINE = 20.0  # seconds; only a bug reaches it
CPU = torch.device("cpu")


class Model(nn.Module):
    """Layers of different sizes.

    One layer is used only on demand, and one is frozen.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 3)
        self.sometimes = nn.Linear(3, 3)
        self.last = nn.Linear(3, 40)
        self.frozen = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, batch: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
        """Return a loss."""
        hidden = torch.tanh(self.first(batch) + self.frozen(batch))
        return self.last(self.sometimes(hidden) if sometimes else hidden).square().sum()


class Seat:
    """Stands in for a Membership.

    The test makes the quorums, and the process group is real.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout = timedelta(seconds=timeout_seconds)
        self.process_group = build_process_group("gloo", self.timeout)
        self.quorum: Future[Quorum] = Future()
        self.num_aborts = 0

    def await_quorum(self) -> Quorum:
        return self.quorum.result(DEADLINE)

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def abort(self) -> None:
        """Abort the process group, as Membership does."""
        self.num_aborts += 1
        self.process_group.abort()


MESSAGE = bytes([0, 255, 0])
NEWEST = 0  # largest step of a member with which a rank's gradients still count


class Rank:
    """One rank: model, exchange and seat."""

    def __init__(
        self,
        seed: int,
        bucket_bytes: int,
        overlap: bool,
        timeout_seconds: float,
        counts: bool = False,
        gradient_scale: float = 1.0,
        fragments: Sequence[int] = (),
        quantize: bool = False,
        dtype: torch.dtype = torch.float32,
        hook_calls: int | HookCalls = HookCalls.ONE,
    ) -> None:
        self.model = Model(seed)
        self.count = torch.zeros(2)
        self.seat = Seat(timeout_seconds)
        self.sums: Sums  # outcome of the last exchange
        self.exchange = GradientExchange(
            self.model.parameters(),
            self.seat,  # type: ignore[arg-type]  # stands in for it
            bucket_bytes=bucket_bytes,
            where=CPU,
            overlap=overlap,
            hook_calls=hook_calls,
            gradient_scale=gradient_scale,
            fragments=fragments,
            quantize=quantize,
            dtype=dtype,
            counts=[self.count] if counts else (),
        )

    def backward(self, seed: int, sometimes: bool = False) -> None:
        """Add the gradients of a batch."""
        self.model(
            torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)),
            sometimes,
        ).backward()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in the order of the model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gradients(self) -> list[torch.Tensor | None]:
        """Copy the local gradients, in the order of the model."""
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def finish(self, gives: bool = True, *, may_update: bool = True) -> ExchangeResult:
        """Complete the exchange.

        The row has the rank and a number. Each further rank's message is one byte longer.
        """
        reduced = exchange_with(
            self.exchange,
            lambda quorum: ([float(quorum.rank), 2.0**-40], MESSAGE[: quorum.rank]),
            gives,
            may_update,
        )
        self.sums = reduced.sums
        return reduced


class Ring:
    """Builds ranks, and process groups between them."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_quorums = 0

    def rank(
        self,
        seed: int = 0,
        bucket_bytes: int = 60,
        overlap: bool = True,
        timeout_seconds: float = DEADLINE,
        counts: bool = False,
    ) -> Rank:
        """Make a rank without a quorum."""
        return Rank(seed, bucket_bytes, overlap, timeout_seconds, counts)

    def meet(self, *ranks: Rank) -> None:
        """Give `ranks` a quorum and a process group of their own."""
        self._num_quorums += 1
        key = f"{self._num_quorums}/test"
        members = tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in range(len(ranks)))

        def configure(number: int, rank: Rank) -> None:
            if rank.seat.quorum.done():
                rank.seat.quorum = Future()
            group = rank.seat.process_group
            group.configure(f"127.0.0.1:{self._store.port}/{key}", number, len(ranks))
            rank.seat.quorum.set_result(Quorum(key, number, members, max_step=0))

        self.together(*[lambda n=n, r=r: configure(n, r) for n, r in enumerate(ranks)])

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on a thread of its own."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # handed to the test
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def together(self, *functions: Callable[[], Any]) -> list[Any]:
        """Run functions at the same time. Return their results in order."""
        futures = [self.start(function) for function in functions]
        return [future.result(DEADLINE) for future in futures]


@pytest.fixture
def ring() -> Ring:
    """Provide ranks and their process groups."""
    return Ring()


def check_gradients(rank: Rank, expected: list[torch.Tensor | None]) -> None:
    """Check that the local gradients are exactly `expected`."""
    for found, wanted in zip(rank.gradients(), expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert torch.equal(found, wanted)


def sums(*gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Add up gradients of several ranks; None where no rank has one."""
    totals: list[torch.Tensor | None] = []
    for parts in zip(*gradients, strict=True):
        there = [part for part in parts if part is not None]
        totals.append(sum(there[1:], there[0].clone()) if there else None)
    return totals


# Sums


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [4, 60, 1 << 20], ids=["a bucket each", "some", "one"])
def test_two_ranks_get_the_sum(ring: Ring, overlap: bool, bucket_bytes: int) -> None:
    """Both ranks write the exact sum of their gradients, for any buckets, with and without
    overlap.
    """
    ranks = [ring.rank(bucket_bytes=bucket_bytes, overlap=overlap) for _ in range(2)]
    ring.meet(*ranks)

    def step(number: int) -> tuple[list[torch.Tensor | None], ExchangeResult]:
        rank = ranks[number]
        rank.exchange.launch_for_backward(NEWEST)
        rank.backward(seed=number)
        before = rank.gradients()
        reduced = rank.finish()
        check_gradients(rank, before)  # gradients are untouched until the write
        rank.sums.write(1.0)
        return before, reduced

    (first, reduced), (second, _) = ring.together(lambda: step(0), lambda: step(1))
    assert any(g is not None and g.abs().sum() > 0 for g in first)
    for rank in ranks:
        check_gradients(rank, sums(first, second))
    assert reduced.rows == [[0.0, 2.0**-40], [1.0, 2.0**-40]]


def test_a_pipelines_gradients_travel_with_its_last_microbatch(ring: Ring) -> None:
    """Autograd's hooks run after each microbatch. A gradient is final with the last one.

    This holds in every step.
    """
    ranks = [Rank(0, 60, overlap=True, timeout_seconds=DEADLINE, hook_calls=3) for _ in range(2)]

    def step(number: int, first: int) -> list[torch.Tensor | None]:
        rank, missing = ranks[number], []
        rank.model.zero_grad()
        # a backward of an earlier batch of this step: the exchange is not armed
        rank.backward(seed=9)
        rank.exchange.launch_for_backward(NEWEST)
        for microbatch in range(3):
            missing.append(sum(len(bucket.missing_parts) for bucket in rank.exchange._buckets))
            rank.backward(seed=first + microbatch)
        missing.append(sum(len(bucket.missing_parts) for bucket in rank.exchange._buckets))
        before = rank.gradients()
        unused = sum(gradient is None for gradient in before)
        assert missing == [len(before)] * 3 + [unused], (
            "all gradients are handed over in the last backward"
        )
        rank.finish()
        rank.sums.write(1.0)
        return before

    for first in (10, 20):
        ring.meet(*ranks)
        gradients = ring.together(lambda: step(0, first), lambda: step(1, first + 5))  # noqa: B023  # ended here
        for rank in ranks:
            check_gradients(rank, sums(*gradients))


def test_gradients_without_a_hook_call_are_taken_at_the_end(ring: Ring) -> None:
    """A zero-bubble schedule adds gradients of weights by itself, for some of the microbatches."""
    ranks = [Rank(0, 60, overlap=True, timeout_seconds=DEADLINE, hook_calls=2) for _ in range(2)]
    ring.meet(*ranks)

    def step(number: int) -> list[torch.Tensor | None]:
        rank = ranks[number]
        rank.exchange.launch_for_backward(NEWEST)
        rank.backward(seed=number)
        with torch.no_grad():
            for parameter in rank.parameters:
                if parameter.grad is not None:
                    parameter.grad += 1.0
        before = rank.gradients()
        rank.finish()
        rank.sums.write(1.0)
        return before

    gradients = ring.together(lambda: step(0), lambda: step(1))
    for rank in ranks:
        check_gradients(rank, sums(*gradients))


def test_a_gradient_that_changes_after_its_last_microbatch_ends_the_run() -> None:
    """The gradient has left already. The update would have other bytes than in stock torchtitan."""
    rank = Rank(0, 60, overlap=True, timeout_seconds=DEADLINE, hook_calls=1)
    rank.exchange.launch_for_backward(NEWEST)
    rank.backward(seed=1)
    with pytest.raises(AssertionError, match="before it was final"):
        rank.backward(seed=2)
    rank.seat.quorum.set_exception(RuntimeError("no quorum"))
    with pytest.raises(RuntimeError, match="no quorum"):
        rank.finish()


def test_the_first_backward_counts_the_calls_of_each_hook(ring: Ring) -> None:
    """A loss that goes backward in two parts calls the hook of a shared weight twice.

    After the first call, half of the gradient is there.
    """
    ranks = [
        Rank(0, 60, overlap=True, timeout_seconds=DEADLINE, hook_calls=HookCalls.COUNTED)
        for _ in range(2)
    ]

    def step(number: int, first: int) -> tuple[list[torch.Tensor | None], list[int]]:
        rank, missing = ranks[number], []
        rank.model.zero_grad()
        rank.exchange.launch_for_backward(NEWEST)
        for part in range(2):
            rank.backward(seed=first + part)
            missing.append(sum(len(bucket.missing_parts) for bucket in rank.exchange._buckets))
        before = rank.gradients()
        rank.finish()
        rank.sums.write(1.0)
        return before, missing

    for first in (10, 20):
        ring.meet(*ranks)
        (one, missing), (other, _) = ring.together(
            lambda: step(0, first),  # noqa: B023  # ended here
            lambda: step(1, first + 5),  # noqa: B023
        )
        unused = sum(gradient is None for gradient in one)
        assert missing == ([len(one)] * 2 if first == 10 else [len(one), unused])
        for rank in ranks:
            check_gradients(rank, sums(one, other))

    rank = ranks[0]
    rank.seat.quorum = Future()
    rank.exchange.launch_for_backward(NEWEST)
    for part in range(2):
        rank.backward(seed=part)
    with pytest.raises(AssertionError, match="before it was final"):
        rank.backward(seed=2)
    rank.seat.quorum.set_exception(RuntimeError("no quorum"))
    with pytest.raises(RuntimeError, match="no quorum"):
        rank.finish()


def test_all_ranks_get_the_same_bits(ring: Ring) -> None:
    """With three ranks, a ring adds in another order than this test.

    But every rank has the same result.
    """
    ranks = [ring.rank() for _ in range(3)]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.backward(seed=number)
    expected = sums(*[rank.gradients() for rank in ranks])
    found = ring.together(*[lambda r=r: r.finish() for r in ranks])
    for reduced in found:
        assert reduced.rows == [[float(n), 2.0**-40] for n in range(3)]
        assert reduced.messages == [b"", b"\0", b"\0\xff"]
    for rank in ranks:
        rank.sums.write(1.0)
        for gradient, wanted in zip(rank.gradients(), expected, strict=True):
            if wanted is not None:
                torch.testing.assert_close(gradient, wanted)
        check_gradients(rank, ranks[0].gradients())


def test_a_rank_alone_keeps_its_gradients(ring: Ring) -> None:
    """In a quorum of one, the sum is the rank's own gradient, and nothing is sent."""
    rank = ring.rank()
    ring.meet(rank)
    rank.seat.process_group.abort()  # a collective would not keep this value
    rank.backward(seed=1)
    before = rank.gradients()
    assert rank.finish().rows == [[0.0, 2.0**-40]]
    rank.sums.write(1.0)
    check_gradients(rank, before)


def test_a_rank_that_does_not_contribute_sends_zeros(ring: Ring) -> None:
    """A group that heals adds no gradient and no count, and still gets the sum.

    So does a group whose gradients are void.
    """
    giver, taker = ring.rank(counts=True), ring.rank(counts=True)
    ring.meet(giver, taker)
    for number, rank in enumerate((giver, taker)):
        rank.count.fill_(1.0 + number)
        rank.backward(seed=number, sometimes=rank is taker)
    for bucket in taker.exchange._buckets:
        bucket.flat.fill_(7.0)  # for example the last sums
    expected = giver.gradients()
    ring.together(giver.finish, lambda: taker.finish(gives=False))
    for rank in (giver, taker):
        rank.sums.write(1.0)
        check_gradients(rank, expected)
        assert rank.count.tolist() == [1.0, 1.0]


def test_a_rank_that_offers_nothing_has_time_for_itself(ring: Ring) -> None:
    """The others exchange their buckets while a healing rank replays earlier sums.

    The replay leaves the buckets alone.
    """
    giver, taker = ring.rank(), ring.rank()
    ring.meet(giver, taker)
    giver.backward(seed=1)
    buckets = taker.exchange._buckets
    flats = [torch.full_like(each.flat, 2.0) for each in buckets]
    earlier = Sums(
        buckets,
        [[1.0] * len(each.parts) for each in buckets],
        taker.exchange.copy_memory,
        flats,
    )
    taker.exchange.launch()
    earlier.write(1.0)
    assert all(
        gradient is not None and bool((gradient == 2.0).all()) for gradient in taker.gradients()
    )
    expected = giver.gradients()
    ring.together(giver.finish, lambda: taker.finish(gives=False))
    for rank in (giver, taker):
        rank.sums.write(1.0)
        check_gradients(rank, expected)


def test_an_exchange_is_under_way_until_the_others_give(ring: Ring) -> None:
    """Even if all sums are in flight at once. A rank that heals loads its state meanwhile."""
    giver, taker = ring.rank(bucket_bytes=10_000), ring.rank(bucket_bytes=10_000)
    ring.meet(giver, taker)
    assert len(taker.exchange._buckets) == 1
    giver.backward(seed=1)
    giver.exchange.launch_for_backward(NEWEST)
    taker.exchange.launch()
    time.sleep(0.2)
    assert taker.exchange.waits_for_members
    told = ring.start(giver.finish)
    ring.together(lambda: taker.finish(gives=False))
    told.result(DEADLINE)
    assert not taker.exchange.waits_for_members


def arm(rank: Rank) -> None:
    """Let the next backward launch the exchange."""
    rank.exchange.launch_for_backward(NEWEST)


def send(rank: Rank) -> None:
    """Launch a whole exchange."""
    rank.exchange.launch_with_facts(NEWEST, MemberFacts(lambda quorum: ([float(quorum.rank)], b"")))


def launch_empty(rank: Rank) -> None:
    """Launch an exchange to which the rank gives nothing."""
    rank.exchange.launch()


@pytest.mark.parametrize("second", [arm, send, launch_empty])
@pytest.mark.parametrize("first", [arm, send, launch_empty])
def test_an_exchange_is_launched_once(
    ring: Ring,
    first: Callable[[Rank], None],
    second: Callable[[Rank], None],
) -> None:
    """A second launch before `finish` is a bug: two threads would write the same buckets.

    The first exchange goes on.
    """
    rank = ring.rank()
    rank.backward(seed=1)
    expected = rank.gradients()
    first(rank)
    flight = rank.exchange._flight
    with pytest.raises(AssertionError, match="under way already"):
        second(rank)
    assert rank.exchange._flight is flight
    ring.meet(rank)
    rank.finish()
    assert not rank.exchange.is_launched
    second(rank)
    rank.finish()
    if second is not launch_empty:
        rank.sums.write(1.0)
        check_gradients(rank, expected)


def test_without_a_giver_only_rows_travel(ring: Ring) -> None:
    """Without gradients no bucket is exchanged. A waiting job must not compete with a transfer."""
    ranks = [ring.rank(), ring.rank()]
    ring.meet(*ranks)
    summed: list[int] = []
    sizes: list[int] = []
    for rank in ranks:
        rank.backward(seed=1)
        rank.exchange._buckets[0].flat.fill_(7.0)
        rank.seat.process_group.allreduce = lambda tensors, options: summed.append(
            tensors[0].numel(),
        )
        send = rank.seat.process_group.alltoall_base

        def count(received: torch.Tensor, *more: Any, send: Any = send) -> Any:
            sizes.append(received.numel())
            return send(received, *more)

        rank.seat.process_group.alltoall_base = count
    told = ring.together(*[lambda rank=rank: rank.finish(gives=False) for rank in ranks])
    assert all([row[0] for row in reduced.rows] == [0.0, 1.0] for reduced in told)
    assert all(bool((rank.exchange._buckets[0].flat == 7.0).all()) for rank in ranks)
    assert not summed
    assert max(sizes) <= 8, "the number of givers, the rows, the messages"


class _Noted:
    """An operation that records the wait for it."""

    def __init__(self, work: Any, name: str, notes: list[str]) -> None:
        self._work, self._name, self._notes = work, name, notes

    def wait(self) -> bool:
        """Wait for the operation."""
        self._notes.append(f"wait for {self._name}")
        return bool(self._work.wait())


def note_operations(rank: Rank) -> list[str]:
    """Record when a rank starts sums, waits for them, and sends facts."""
    notes: list[str] = []
    group = rank.seat.process_group
    reduce, send = group.allreduce, group.alltoall_base

    def allreduce(tensors: list[torch.Tensor], options: Any) -> Any:
        name = f"sum {sum(note.startswith('sum') for note in notes)}"
        notes.append(name)
        return _Noted(reduce(tensors, options), name, notes)

    def alltoall_base(*arguments: Any) -> Any:
        notes.append("facts")
        return send(*arguments)

    group.allreduce, group.alltoall_base = allreduce, alltoall_base
    return notes


def test_three_sums_are_in_flight(ring: Ring) -> None:
    """Further sums start before one is awaited, so that the wire is busy.

    Rows are sent after all of them.
    """
    ranks = [ring.rank(bucket_bytes=48), ring.rank(bucket_bytes=48)]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.backward(seed=number)
    (first, second) = map(note_operations, ranks)
    ring.together(*[rank.finish for rank in ranks])
    number = len(ranks[0].exchange._buckets)
    assert number >= 4
    between = [note for n in range(2, number) for note in (f"sum {n}", f"wait for sum {n - 2}")]
    rest = [f"wait for sum {n}" for n in (number - 2, number - 1)]
    assert first == second == ["facts", "sum 0", "sum 1", *between, *rest, "facts", "facts"]


def test_a_member_that_lacks_a_sum_sends_no_row(ring: Ring) -> None:
    """The member's last sum breaks.

    The other members, whose sums are complete, must not commit without it.
    """
    ranks = [ring.rank(timeout_seconds=1.0), ring.rank(timeout_seconds=1.0)]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.backward(seed=number)
    group, num_sums = ranks[1].seat.process_group, len(ranks[1].exchange._buckets)
    reduce = group.allreduce
    works: list[Any] = []

    class Broken:
        def wait(self) -> bool:
            raise RuntimeError("a connection is closed")

    def allreduce(tensors: list[torch.Tensor], options: Any) -> Any:
        works.append(reduce(tensors, options))
        return Broken() if len(works) == num_sums else works[-1]

    group.allreduce = allreduce

    def tell(quorum: Quorum) -> tuple[list[float], bytes]:
        return [0.0], b""  # a message would be a second chance to notice the loss

    outcomes = [ring.start(lambda rank=rank: exchange_with(rank.exchange, tell)) for rank in ranks]
    for outcome in outcomes:
        with pytest.raises(ExchangeError):
            outcome.result(DEADLINE)


@pytest.mark.parametrize("due", [False, True])
def test_gradients_without_an_update_do_not_travel(ring: Ring, due: bool) -> None:
    """Groups with steps left meet for a group that heals. No group would use their sums."""
    ranks = [ring.rank(), ring.rank()]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.backward(seed=number)
    own = ranks[0].gradients()
    told = ring.together(
        lambda: ranks[0].finish(may_update=False),
        lambda: ranks[1].finish(gives=False, may_update=due),
    )
    assert all([row[0] for row in reduced.rows] == [0.0, 1.0] for reduced in told)
    assert (ranks[0].exchange.pop_sent_bytes() > 0) == due
    ranks[0].sums.write(1.0)
    given = [grad is not None for grad in own]
    assert [grad is not None for grad in ranks[0].gradients()] == (
        given if due else [False] * len(given)
    )


def test_a_rank_without_gradients_gets_the_sum(ring: Ring) -> None:
    """A group without a backward gets gradients of the right shapes from the others."""
    giver, taker = ring.rank(), ring.rank()
    ring.meet(giver, taker)
    giver.backward(seed=1)
    ring.together(giver.finish, taker.finish)
    taker.sums.write(1.0)
    check_gradients(taker, giver.gradients())


def test_a_parameter_that_one_rank_uses(ring: Ring) -> None:
    """A parameter without a gradient counts as zeros if another rank has one."""
    ranks = [ring.rank(), ring.rank()]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.exchange.launch_for_backward(NEWEST)
        rank.backward(seed=number, sometimes=number == 1)
    assert ranks[0].model.sometimes.weight.grad is None
    before = [rank.gradients() for rank in ranks]
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        rank.sums.write(1.0)
        check_gradients(rank, sums(*before))
        assert rank.model.sometimes.weight.grad is not None


def test_a_parameter_that_no_rank_uses_has_no_gradient(ring: Ring) -> None:
    """An optimizer skips a parameter without a gradient.

    With zeros, it would decay the parameter. Old gradients are removed.
    """
    ranks = [ring.rank(), ring.rank()]
    ring.meet(*ranks)
    for rank in ranks:
        rank.backward(seed=1)
    ring.together(*[rank.finish for rank in ranks])
    ranks[0].model.sometimes.weight.grad = torch.ones_like(ranks[0].model.sometimes.weight)
    for rank in ranks:
        rank.sums.write(0.125)
        assert rank.model.sometimes.weight.grad is None
        assert rank.model.frozen.weight.grad is None
        assert rank.model.first.weight.grad is not None


def test_low_precision_gradients_are_added_in_float32(ring: Ring) -> None:
    """bfloat16 gradients are rounded once, after the sum.

    Otherwise 256 + 3 x 1 would lose each 1.
    """
    ranks = [ring.rank(bucket_bytes=1 << 20, overlap=False) for _ in range(4)]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.model.to(torch.bfloat16)
        for parameter in rank.parameters:
            parameter.grad = torch.full_like(parameter, 256.0 if number == 0 else 1.0)
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        rank.sums.write(1.0)
        assert rank.model.last.weight.grad is not None
        assert rank.model.last.weight.grad.dtype == torch.bfloat16
        assert rank.model.last.weight.grad.unique().tolist() == [260.0]


def test_scaling_and_keeping(ring: Ring) -> None:
    """A copy of the sums outlives the next exchange. Each write scales the sums."""
    rank = ring.rank()
    ring.meet(rank)
    rank.backward(seed=1)
    before = rank.gradients()
    rank.finish()
    kept = rank.sums.copy()
    rank.model.zero_grad()
    rank.backward(seed=2)
    rank.finish()
    kept.write(2.0)
    kept.write(2.0)
    check_gradients(rank, [None if gradient is None else gradient * 2.0 for gradient in before])


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_another_loss_are_scaled_once(ring: Ring, kept: bool) -> None:
    """Live or replayed, and after a broken exchange.

    Gradients travel, and are kept, without the scale.
    """
    rank = Rank(0, 60, overlap=False, timeout_seconds=DEADLINE, gradient_scale=0.25)
    ring.meet(rank)
    rank.backward(seed=1)
    before = rank.gradients()
    rank.finish()
    ring.meet(rank)
    rank.finish()  # again, from the same gradients
    (rank.sums.copy() if kept else rank.sums).write(2.0)
    check_gradients(rank, [None if gradient is None else gradient * 0.5 for gradient in before])


# Fragments


def fragmented(ring: Ring, number: int = 2, quantize: bool = False) -> list[Rank]:
    """Return ranks in one quorum with gradients of three fragments."""
    ranks = []
    for seed in range(number):
        rank = Rank(0, 60, overlap=False, timeout_seconds=DEADLINE)
        fragments = [place % 3 for place in range(len(rank.parameters))]
        ranks.append(
            Rank(
                0,
                60,
                overlap=False,
                timeout_seconds=DEADLINE,
                fragments=fragments,
                quantize=quantize,
            ),
        )
        for place, parameter in enumerate(ranks[-1].parameters):
            parameter.grad = torch.full_like(parameter, 1.0 + place + 10 * seed)
    ring.meet(*ranks)
    return ranks


def only(
    fragments: Collection[int],
    gradients: list[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return the gradients of these fragments, and None for the others."""
    return [
        gradient if place % 3 in fragments else None for place, gradient in enumerate(gradients)
    ]


@pytest.mark.parametrize("given", [[1], [0, 2]])
@pytest.mark.parametrize("kept", [False, True])
def test_only_given_fragments_travel(ring: Ring, given: list[int], kept: bool) -> None:
    """Parameters of other fragments get no gradient, so an optimizer skips them.

    This holds on joiners as well.
    """
    ranks = fragmented(ring, 3)
    totals = only(given, sums(ranks[0].gradients(), ranks[1].gradients()))
    for rank in ranks[:2]:
        rank.exchange.set_fragment_weights(dict.fromkeys(given, 1.0))
    ranks[2].exchange.launch()  # a joiner knows of no fragment
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        reduced = rank.sums.copy()
        held = [bucket.fragment in given for bucket in rank.exchange._buckets]
        assert [each is not None for each in reduced.flats] == held
        assert set(held) == {False, True}
        (reduced if kept else rank.sums).write(1.0)
        check_gradients(rank, totals)


def test_a_stage_that_lacks_a_given_fragment_sends_rows(ring: Ring) -> None:
    """A stage of a pipeline may have fewer fragments than the model. Its exchange works."""
    ranks = fragmented(ring)
    before = [rank.gradients() for rank in ranks]
    for rank in ranks:
        rank.exchange.set_fragment_weights({3: 1.0})
    told = ring.together(*[rank.finish for rank in ranks])
    for rank, reduced, own in zip(ranks, told, before, strict=True):
        assert [row[0] for row in reduced.rows] == [0.0, 1.0]
        check_gradients(rank, own)


def test_a_mean_is_by_the_weights_that_were_given(ring: Ring) -> None:
    """Each fragment has its own weight: a group may have trained more on one than on another."""
    ranks = fragmented(ring)
    first, second = (only([0, 1], rank.gradients()) for rank in ranks)
    for rank, weights in zip(ranks, ({0: 0.25, 1: 1.0}, {0: 0.75, 1: 3.0}), strict=True):
        for place, parameter in enumerate(rank.parameters):
            assert parameter.grad is not None
            parameter.grad *= weights.get(place % 3, 1.0)
        rank.exchange.set_fragment_weights(weights)
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        rank.sums.write()
        for mean, one, other in zip(rank.gradients(), first, second, strict=True):
            assert (mean is None) == (one is None)
            if mean is not None and one is not None and other is not None:
                torch.testing.assert_close(mean, 0.25 * one + 0.75 * other)


def test_givers_of_different_fragments_send_rows_only(ring: Ring) -> None:
    """One group has made an update that the other has missed.

    The rows show it, and no sum may mix two fragments.
    """
    ranks = fragmented(ring)
    before = [rank.gradients() for rank in ranks]
    ranks[0].exchange.set_fragment_weights({0: 1.0})
    ranks[1].exchange.set_fragment_weights({1: 1.0})
    told = ring.together(*[rank.finish for rank in ranks])
    for rank, reduced, own in zip(ranks, told, before, strict=True):
        assert [row[0] for row in reduced.rows] == [0.0, 1.0]
        check_gradients(rank, own)
        assert not any(each is not None for each in rank.sums.copy().flats)


def test_a_whole_exchange_goes_on_without_the_training_thread(ring: Ring) -> None:
    """Rows and sums travel between the threads while this rank does other work.

    Neither has a part of that work.
    """
    ranks = fragmented(ring)
    totals = only([0], sums(*[rank.gradients() for rank in ranks]))
    facts: list[Callable[[Quorum], Any]] = [
        lambda quorum: ([float(quorum.rank)], b"x" * quorum.rank),
    ] * 2
    for rank, describe in zip(ranks, facts, strict=True):
        rank.exchange.set_fragment_weights({0: 1.0})
        rank.exchange.launch_with_facts(NEWEST, MemberFacts(describe))
        assert rank.exchange.is_launched
    for rank in ranks:
        assert rank.exchange._flight is not None
        rank.exchange._flight._thread.join(DEADLINE)
    for rank in ranks:
        for parameter in rank.parameters:
            parameter.grad = None
        reduced = rank.finish()
        assert (reduced.rows, reduced.messages) == ([[0.0], [1.0]], [b"", b"x"])
        rank.sums.write(1.0)
        check_gradients(rank, totals)
        assert not rank.exchange.is_launched


def test_a_whole_exchange_that_broke_is_repeated(ring: Ring) -> None:
    """The exchange breaks while the training thread is busy.

    `finish` raises, and the next exchange has the same sums.
    """
    ranks = fragmented(ring)
    totals = only([0], ranks[0].gradients())
    ranks[0].exchange.set_fragment_weights({0: 1.0})
    ranks[0].exchange.launch_with_facts(NEWEST, MemberFacts(lambda quorum: ([1.0], b"")))
    ranks[1].seat.process_group.abort()
    with pytest.raises(ExchangeError):
        ranks[0].finish()
    assert ranks[0].seat.num_aborts == 1
    ring.meet(ranks[0])
    ranks[0].finish()
    ranks[0].sums.write(1.0)
    check_gradients(ranks[0], totals)


# Quantization


def quantized(ring: Ring, number: int = 2) -> list[Rank]:
    """Return ranks in one quorum that send 8 bits and have gradients of their own."""
    ranks = [
        Rank(0, 200, overlap=False, timeout_seconds=DEADLINE, quantize=True) for _ in range(number)
    ]
    for seed, rank in enumerate(ranks):
        rank.backward(seed, sometimes=True)
    ring.meet(*ranks)
    return ranks


def note_payloads(rank: Rank) -> list[bytes]:
    """Return a list. From now on it gets the payloads of a rank's all-gathers."""
    sent: list[bytes] = []
    gather = rank.seat.process_group.allgather

    def noted(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        sent.append(inputs[0].numpy().tobytes())
        return gather(outputs, inputs, options)

    rank.seat.process_group.allgather = noted
    return sent


def values_of(rank: Rank) -> torch.Tensor:
    """Return the gradients of a rank in one vector."""
    return torch.cat([gradient.flatten() for gradient in rank.gradients() if gradient is not None])


def exchange_all(ring: Ring, ranks: list[Rank]) -> torch.Tensor:
    """Let ranks exchange and make the update. Afterwards their gradients are as before.

    Returns:
        The sums.
    """
    before = [rank.gradients() for rank in ranks]
    ring.meet(*ranks)
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        rank.sums.write(1.0)
    sums_of_all = [values_of(rank) for rank in ranks]
    for rank, own in zip(ranks, before, strict=True):
        for parameter, gradient in zip(rank.parameters, own, strict=True):
            parameter.grad = gradient
    assert all(torch.equal(each, sums_of_all[0]) for each in sums_of_all)
    return sums_of_all[0]


def test_quantized_sums_have_the_same_bytes_everywhere(ring: Ring) -> None:
    """On givers, on joiners, and in the copies for their replay.

    The error is smaller than a ring's.
    """
    *givers, joiner = quantized(ring, 4)
    totals = sums(*[rank.gradients() for rank in givers])
    joiner.exchange.launch()
    ring.together(*[rank.finish for rank in (*givers, joiner)])
    kept = joiner.sums.copy()
    for rank in givers:
        for mine, theirs in zip(rank.sums.copy().flats, kept.flats, strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.numpy().tobytes() == theirs.numpy().tobytes()
    kept.write(1.0)
    assert all(
        bucket.part_weights.tolist() == [3.0] * len(bucket.parts)
        for bucket in joiner.exchange._buckets
    )
    for found, wanted in zip(joiner.gradients(), totals, strict=True):
        assert found is not None
        assert wanted is not None
        assert (
            0
            < (found - wanted).abs().max()
            < 3 * 0.51 / 127 * max(values_of(rank).abs().max() for rank in givers)
        )


def test_the_rounding_error_is_sent_later(ring: Ring) -> None:
    """The sums of many exchanges add up to the exact ones. Errors neither grow nor drift."""
    ranks = quantized(ring)
    exact = sum(values_of(rank).double() for rank in ranks)
    first = exchange_all(ring, ranks).double()
    total, rounds = first.clone(), 40
    for _ in range(rounds - 1):
        total += exchange_all(ring, ranks).double()
    assert (total - rounds * exact).abs().max() < 2.5 * (first - exact).abs().max()


def test_a_broken_quantized_exchange_is_repeated_with_the_same_bytes(ring: Ring) -> None:
    """The exchange breaks in the last bucket. The rounding errors of other buckets count once."""
    ranks = quantized(ring, 3)
    survivors, lost = ranks[:2], ranks[2]
    exchange_all(ring, ranks)  # values with a rounding error
    payloads = [note_payloads(rank) for rank in survivors]
    gather, num_buckets = lost.seat.process_group.allgather, len(lost.exchange._buckets)
    left = num_buckets

    def die(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            # An abort before the survivors' last bucket would break an earlier bucket.
            wait_until(
                lambda: all(len(sent) == num_buckets for sent in payloads),
                "the survivors give their last",
            )
            lost.seat.process_group.abort()
            raise RuntimeError("dead")
        return gather(*arguments)

    lost.seat.process_group.allgather = die
    ring.meet(*ranks)
    for broken in [ring.start(rank.finish) for rank in ranks]:
        with pytest.raises(ExchangeError):
            broken.result(DEADLINE)
    ring.meet(*survivors)
    ring.together(*[rank.finish for rank in survivors])
    for sent in payloads:
        half = len(sent) // 2
        assert half == len(survivors[0].exchange._buckets)
        assert sent[:half] == sent[half:]
        sent.clear()
    for rank in survivors:
        rank.sums.write(1.0)
        rank.model.zero_grad()
        for parameter in rank.parameters:
            parameter.grad = torch.zeros_like(parameter)
    total = exchange_all(ring, survivors)
    assert total.abs().max() > 0, "the last exchange's rounding error, and no new gradient"
    assert exchange_all(ring, survivors).abs().max() < total.abs().max()


@pytest.mark.parametrize("gives", ["nothing", "a replay"])
def test_the_rounding_error_stays_if_this_rank_gives_nothing(ring: Ring, gives: str) -> None:
    """An update without its gradients corrects nothing, and neither does a replayed one."""
    rank, peer = quantized(ring)
    exchange_all(ring, [rank, peer])
    sent = note_payloads(rank)
    ring.meet(rank, peer)
    ring.together(rank.finish, peer.finish)  # as after an exchange that broke elsewhere
    kept = rank.sums.copy()
    before = rank.gradients()
    if gives == "nothing":
        ring.meet(rank, peer)
        ring.together(lambda: rank.finish(gives=False), peer.finish)
    (rank.sums if gives == "nothing" else kept).write(1.0)
    for parameter, gradient in zip(rank.parameters, before, strict=True):
        parameter.grad = gradient
    ring.meet(rank, peer)
    ring.together(rank.finish, peer.finish)
    number = len(rank.exchange._buckets)
    assert sent[-number:] == sent[:number]


def test_the_rounding_error_goes_with_the_state(ring: Ring) -> None:
    """A group that has loaded another group's state starts like a group that has sent nothing."""
    ranks = quantized(ring)
    sent = note_payloads(ranks[0])
    exchange_all(ring, ranks)
    exchange_all(ring, ranks)
    ranks[0].exchange.drop_residuals()
    exchange_all(ring, ranks)
    number = len(ranks[0].exchange._buckets)
    assert sent[:number] == sent[2 * number :] != sent[number : 2 * number]


def test_a_rank_alone_rounds_nothing(ring: Ring) -> None:
    """In a quorum of one, the sum is the own gradient plus the earlier rounding error.

    The error is 0 afterwards.
    """
    rank, peer = quantized(ring)
    exact = sum(values_of(each).double() for each in (rank, peer))
    left = exact - exchange_all(ring, [rank, peer]).double()
    own = values_of(rank)
    alone = exchange_all(ring, [rank])
    assert not torch.equal(alone, own)
    assert (alone - own).abs().max() <= 2 * left.abs().max()
    assert torch.equal(exchange_all(ring, [rank]), own)


def test_the_rounding_error_belongs_to_a_fragment(ring: Ring) -> None:
    """An exchange of another fragment neither sends it nor drops it."""
    ranks = fragmented(ring, quantize=True)
    for rank in ranks:
        for place, parameter in enumerate(rank.parameters):
            parameter.grad = torch.linspace(0.1, 1.0 + place, parameter.numel()).view_as(parameter)
    totals = torch.zeros(())
    exact = 0.0
    before = ranks[0].gradients()
    for given in (0, 1, 0, 2, 0):
        for rank in ranks:
            rank.exchange.set_fragment_weights({given: 1.0})
        ring.meet(*ranks)
        ring.together(*[rank.finish for rank in ranks])
        for rank in ranks:
            rank.sums.write(1.0)
        if given == 0:
            totals = totals + torch.cat(
                [g.flatten() for g in ranks[0].gradients() if g is not None],
            )
            exact += 2 * torch.cat([g.flatten() for g in only([0], before) if g is not None])
        for rank in ranks:
            for parameter, gradient in zip(rank.parameters, before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
    assert (totals - exact).abs().max() < 1.1 * 4.0 / 127, (
        "of the last exchange: two halves of a scale"
    )


def test_a_quantized_gradient_that_is_not_finite_is_seen(ring: Ring) -> None:
    """The value is found before it is rounded. The sum has no finite number in its place."""
    ranks = quantized(ring)
    assert ranks[0].parameters[0].grad is not None
    ranks[0].parameters[0].grad[0, 0] = float("inf")
    assert [reduced.nonfinite for reduced in ring.together(*[rank.finish for rank in ranks])] == [
        [True, False],
    ] * 2
    ranks[1].sums.write(1.0)
    first = ranks[1].parameters[0].grad
    assert first is not None
    assert not first.isfinite().any()


BFLOAT16 = {"dtype": torch.bfloat16}


def test_sums_in_bfloat16_have_the_same_bytes_everywhere(ring: Ring) -> None:
    """On givers, on joiners, and in the copies for their replay. Counts and weights are exact."""
    ranks = [
        Rank(0, 60, overlap=True, timeout_seconds=DEADLINE, counts=True, **BFLOAT16)
        for _ in range(4)
    ]
    *givers, joiner = ranks
    ring.meet(*ranks)
    for seed, rank in enumerate(givers):
        rank.count.fill_(2.0**22 + seed)
        rank.exchange.launch_for_backward(NEWEST)
        rank.backward(seed, sometimes=True)
    own = [rank.gradients() for rank in givers]
    joiner.exchange.launch()
    ring.together(*[rank.finish for rank in ranks])
    kept = joiner.sums.copy()
    kept.write(1.0)
    for rank in givers:
        check_gradients(rank, own[givers.index(rank)])
        rank.sums.write(1.0)
        check_gradients(rank, joiner.gradients())
    assert [rank.count.tolist() for rank in ranks] == [[3 * 2.0**22 + 3] * 2] * 4
    assert all(
        bucket.part_weights.tolist() == [3.0] * len(bucket.parts)
        for bucket in joiner.exchange._buckets
    )
    for found, *terms in zip(joiner.gradients(), *own, strict=True):
        assert found is not None
        exact = torch.stack([term for term in terms if term is not None])
        assert bool(((found - exact.sum(0)).abs() <= exact.abs().sum(0) / 127).all())
        assert torch.equal(found, found.bfloat16().float()), (
            "rounded once, when the sum is complete"
        )


@pytest.mark.parametrize("numel", [1, 64, 601])
def test_buckets_in_bfloat16_take_half_of_the_memory(numel: int) -> None:
    """The copies of a joiner do so, too: two bytes for a gradient, four for an exact value."""
    parameters = [nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(3, 2))]
    count = torch.zeros(5)

    def build(dtype: torch.dtype) -> GradientExchange:
        options: dict[str, Any] = {
            "bucket_bytes": 1 << 20,
            "where": torch.device("cpu"),
            "overlap": False,
        }
        return GradientExchange(parameters, None, dtype=dtype, counts=[count], **options)  # type: ignore[arg-type]

    exact = 4 * (5 + 3)  # the counts, and a weight for each of three parts
    assert build(torch.float32).num_bytes == 4 * (numel + 6) + exact
    in_half = build(torch.bfloat16)
    assert in_half.num_bytes == in_half.copy_memory.num_bytes == 2 * (numel + numel % 2 + 6) + exact


@pytest.mark.parametrize("kept", [False, True])
def test_means_of_sums_in_bfloat16_are_rounded_once(ring: Ring, kept: bool) -> None:
    """Means are made in fp32. A product in bfloat16 would lose digits."""
    ranks = [Rank(0, 200, overlap=False, timeout_seconds=DEADLINE, **BFLOAT16) for _ in range(2)]
    ring.meet(*ranks)
    for seed, rank in enumerate(ranks):
        rank.backward(seed)
    ring.together(*[rank.finish for rank in ranks])
    for rank in ranks:
        sums, unscaled = rank.sums.copy(), rank.sums.copy()
        unscaled.write(1.0)
        expected = [None if each is None else each * 0.3 for each in rank.gradients()]
        (sums if kept else rank.sums).write(0.3)
        check_gradients(rank, expected)


def test_a_broken_exchange_in_bfloat16_is_repeated(ring: Ring) -> None:
    """The survivors repeat it from the same gradients.

    A rank alone rounds them too, and a NaN is named.
    """
    ranks = [Rank(0, 200, overlap=False, timeout_seconds=DEADLINE, **BFLOAT16) for _ in range(3)]
    ring.meet(*ranks)
    for seed, rank in enumerate(ranks):
        rank.backward(seed)
    own = [rank.gradients() for rank in ranks]
    ranks[2].seat.process_group.abort()
    for finished in [ring.start(rank.finish) for rank in ranks[:2]]:
        with pytest.raises(ExchangeError):
            finished.result(DEADLINE)
    ring.meet(*ranks[:2])
    ring.together(*[rank.finish for rank in ranks[:2]])
    for bucket, found, terms in zip(
        ranks[0].exchange._buckets,
        *[rank.sums.copy().flats for rank in ranks[:2]],
        strict=True,
    ):
        assert found is not None
        assert terms is not None
        views = [[*parts, weights] for parts, weights in map(bucket.split, (found, terms))]
        assert all(map(torch.equal, *views))  # the gap between gradients and weights has any bytes
    check_gradients(ranks[0], own[0])
    ring.meet(ranks[2])
    ranks[2].finish()
    ranks[2].sums.write(1.0)
    check_gradients(
        ranks[2],
        [None if each is None else each.bfloat16().float() for each in own[2]],
    )
    ring.meet(*ranks)
    assert ranks[1].parameters[-1].grad is not None
    ranks[1].parameters[-1].grad[0] = float("nan")  # the first of several buckets
    assert [reduced.nonfinite for reduced in ring.together(*[r.finish for r in ranks])] == [
        [False, True, False],
    ] * 3


# Slices


def meet_for_operations(
    ring: Ring,
    number: int,
    timeout_seconds: float = DEADLINE,
) -> tuple[list[Operations], list[BreakableGloo]]:
    """Return the operations of ranks in one quorum, and their process groups."""
    ranks = [ring.rank() for _ in range(number)]
    groups = [BreakableGloo(timedelta(seconds=DEADLINE)) for _ in ranks]
    for rank, group in zip(ranks, groups, strict=True):
        rank.seat.process_group, rank.seat.timeout = group, timedelta(seconds=timeout_seconds)
    ring.meet(*ranks)
    made = [Operations(rank.seat, CPU) for rank in ranks]  # type: ignore[arg-type]  # stands in for a membership
    for each, rank in zip(made, ranks, strict=True):
        each.set_quorum(rank.seat.await_quorum())
        each.turn.held().__enter__()  # as the exchange's thread does
    return made, groups


OPERATIONS = {"all-gather": Operations.all_gather, "all-to-all": Operations.all_to_all}


def payload(operation: str, seed: int, num_members: int, columns: int) -> torch.Tensor:
    """Return a member's input to an operation."""
    generator = torch.Generator().manual_seed(seed)
    shape = (columns,) if operation == "all-gather" else (num_members, columns)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "operation",
    [
        each if each == "all-to-all" else pytest.param(each, marks=pytest.mark.slow)
        for each in OPERATIONS
    ],
)
def test_the_timeout_bounds_a_slice_and_not_a_bucket(
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    """On a slow link that works, a bucket arrives even if it takes longer than the timeout."""
    # Gloo itself would wait for half of the bucket, which takes longer.
    seconds, timeout, size = (1.25, 0.5, 8 << 20)
    monkeypatch.setattr(operations, "_SLICE_BYTES", size // 8)
    made, groups = meet_for_operations(ring, 2, timeout)
    for link in [link for group in groups for link in group._connections]:
        with borrowed_socket(*link) as connection:
            assert connection is not None
            pace(connection, int(size / seconds))
    run, given = OPERATIONS[operation], payload(operation, 0, 2, size)
    began = time.monotonic()
    ring.together(*[lambda f=f: run(f, given) for f in made])
    assert time.monotonic() - began > 2 * timeout, "the link was not slow"


@pytest.mark.parametrize("columns", [1, 96, 97, 384, 1000])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_slices_are_put_together_as_one_operation_would(
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    columns: int,
) -> None:
    """The bytes are the same for any size. An input of at most one slice is not cut."""
    made, groups = meet_for_operations(ring, 3)
    run = OPERATIONS[operation]
    given = [payload(operation, seed, 3, columns) for seed in range(3)]
    whole = ring.together(*[lambda f=f, g=g: run(f, g) for f, g in zip(made, given, strict=True)])
    sizes: list[int] = []
    for name in ("allgather", "alltoall_base"):
        make = getattr(groups[0], name)

        def note(*arguments: Any, make: Any = make) -> Any:
            sizes.append(
                arguments[1][0].numel() if isinstance(arguments[1], list) else arguments[1].numel(),
            )
            return make(*arguments)

        monkeypatch.setattr(groups[0], name, note)
    monkeypatch.setattr(operations, "_SLICE_BYTES", most := given[0].numel() // columns * 96)
    cut = ring.together(*[lambda f=f, g=g: run(f, g) for f, g in zip(made, given, strict=True)])
    assert len(sizes) == -(-columns // 96)
    assert max(sizes) <= most
    for one, other in zip(whole, cut, strict=True):
        assert one.shape == other.shape == (3, columns)
        assert torch.equal(one, other)
    rows = [g.expand(3, -1) if operation == "all-gather" else g for g in given]
    assert torch.equal(cut[1], torch.stack([row[1] for row in rows]))


def test_a_gpu_gets_no_slices(ring: Ring) -> None:
    """NCCL's operations are queued, and none of them must end within a time of its own."""
    (single,), _ = meet_for_operations(ring, 1)
    single._where = torch.device("meta")
    given: list[torch.Tensor] = []
    own = torch.empty(operations._SLICE_BYTES + 1, dtype=torch.uint8, device="meta")
    assert single._in_slices(lambda part: given.append(part) or part, own) is own
    assert len(given) == 1


@pytest.mark.parametrize("quantize", [False, True])
def test_bytes_on_the_wire_are_counted(ring: Ring, quantize: bool) -> None:
    """Bytes of gradients count, whether the exchange works or breaks. A lone rank sends none."""
    ranks = [
        Rank(0, 1 << 20, overlap=False, timeout_seconds=DEADLINE, quantize=quantize)
        for _ in range(3)
    ]
    for rank in ranks:
        rank.backward(seed=1)
    # 187 values, and the weights of 6 parameters; quantized in one block, with its scale.
    full = 187 + 6
    once = 2 * (256 + 4 + 4 * 6) if quantize else 2 * full * 4 * 2 // 3
    ring.meet(*ranks)
    ring.together(*[rank.finish for rank in ranks])
    assert [rank.exchange.pop_sent_bytes() for rank in ranks] == [once] * 3
    assert ranks[0].exchange.count_sent_bytes(3) == once
    ring.meet(*ranks)
    ring.together(*[lambda rank=rank: rank.finish(gives=False) for rank in ranks])
    assert ranks[0].exchange.pop_sent_bytes() == 0, "rows"
    name = "allgather" if quantize else "allreduce"
    make = getattr(ranks[0].seat.process_group, name)

    def die(*arguments: Any) -> Any:
        if quantize or arguments[0][0].numel() == full:
            # An abort before the others give their gradients would break them off with nothing
            # sent.
            wait_until(lambda: all(rank.exchange._flight.sent_bytes for rank in ranks), "all give")
            ranks[0].seat.process_group.abort()
        return make(*arguments)

    setattr(ranks[0].seat.process_group, name, die)
    ring.meet(*ranks)
    for broken in [ring.start(rank.finish) for rank in ranks]:
        with pytest.raises(ExchangeError):
            broken.result(DEADLINE)
    setattr(ranks[0].seat.process_group, name, make)
    ring.meet(*ranks)
    ring.together(*[rank.finish for rank in ranks])
    assert [rank.exchange.pop_sent_bytes() for rank in ranks] == [2 * once] * 3
    ring.meet(ranks[0])
    ranks[0].finish()
    assert ranks[0].exchange.pop_sent_bytes() == 0, "alone"


def test_sharded_gradients_travel_as_shards(ring: Ring, world: None) -> None:
    """FSDP calls the hooks with sharded gradients.

    They launch the exchange, and the sums are written back as DTensors.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from titan_ft.host import cpu

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    cpu.adapt_model(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
    seat = Seat(DEADLINE)
    exchange = GradientExchange(model.parameters(), seat, bucket_bytes=1, where=CPU, overlap=True)  # type: ignore[arg-type]
    rank = ring.rank()
    rank.seat = seat
    ring.meet(rank)
    exchange.launch_for_backward(NEWEST)
    model(torch.ones(2, 4)).sum().backward()
    assert [bucket.missing_parts for bucket in exchange._buckets] == [set()] * 4
    before = [local_shard(parameter.grad).clone() for parameter in model.parameters()]
    exchange_with(exchange, lambda _: ([0.0], b"")).sums.write(3.0)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(local_shard(parameter.grad), gradient * 3.0)


# Order and buckets


def test_parameters_are_cut_into_buckets_in_order() -> None:
    """A bucket has a run of parameters of at most the given size.

    A larger parameter has a bucket of its own. None is lost or reordered.
    """
    parts = [Gradient(nn.Parameter(torch.empty(numel))) for numel in (2, 2, 1, 30, 3, 0, 1, 1)]
    runs = partition(parts, 16)
    assert [[part.shape.numel() for part in run] for run in runs] == [
        [2, 2],
        [1],
        [30],
        [3, 0, 1],
        [1],
    ]
    assert [part for run in runs for part in run] == parts


def test_the_last_layers_come_first(ring: Ring) -> None:
    """Buckets follow the order in which autograd finishes. Frozen parameters are left out."""
    rank = ring.rank(bucket_bytes=1)
    model = rank.model
    expected = [model.last.bias, model.last.weight, model.sometimes.bias, model.sometimes.weight]
    expected += [model.first.bias, model.first.weight]
    assert [len(bucket.parts) for bucket in rank.exchange._buckets] == [1] * 6
    assert [id(bucket.parts[0].parameter) for bucket in rank.exchange._buckets] == [
        id(part) for part in expected
    ]  # type: ignore[union-attr]  # no counts


def test_collectives_come_in_the_order_of_the_buckets(
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients become ready in any order.

    All ranks must launch the same buckets in the same order, or they would deadlock.
    """
    ranks = [ring.rank(bucket_bytes=1), ring.rank(bucket_bytes=1)]
    ring.meet(*ranks)
    launched: list[list[int]] = [[], []]
    for number, rank in enumerate(ranks):
        allreduce, send = rank.seat.process_group.allreduce, rank.seat.process_group.alltoall_base

        def noted(
            tensors: list[torch.Tensor],
            options: Any,
            number: int = number,
            allreduce: Any = allreduce,
        ) -> Any:
            launched[number].append(tensors[0].numel())
            return allreduce(tensors, options)

        def sent(received: torch.Tensor, *more: Any, number: int = number, send: Any = send) -> Any:
            launched[number].append(received.numel())
            return send(received, *more)

        monkeypatch.setattr(rank.seat.process_group, "allreduce", noted)
        monkeypatch.setattr(rank.seat.process_group, "alltoall_base", sent)
        rank.exchange.launch_for_backward(NEWEST)
        for parameter in rank.parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + number)
    for number, rank in enumerate(ranks):
        order = rank.exchange._buckets if number else rank.exchange._buckets[::-1]
        for bucket in order:
            rank.exchange._fill(bucket, [0])
    ring.together(*[rank.finish for rank in ranks])
    # First each member reports whether it knows of an update, whether it gives, and what. Each
    # bucket carries a weight per parameter besides the gradients. The rows come last, with the
    # messages' sizes, and then the messages.
    assert launched[0] == launched[1] == [6, 41, 121, 4, 10, 4, 13, 8, 2]
    ranks[0].sums.write(1.0)
    assert all(parameter.grad.unique().tolist() == [3.0] for parameter in ranks[0].parameters)


# Counts


@pytest.mark.parametrize("bucket_bytes", [4, 1 << 20], ids=["a bucket each", "one"])
def test_counts_are_summed_exactly_and_unscaled(ring: Ring, bucket_bytes: int) -> None:
    """The counts of all passes are summed with the gradients, exact up to 2**24."""
    ranks = [ring.rank(bucket_bytes=bucket_bytes, counts=True) for _ in range(3)]
    ring.meet(*ranks)
    for number, rank in enumerate(ranks):
        rank.count.add_(
            torch.tensor([2.0**23 + 1, 1.0 + number]) if number < 2 else torch.tensor([0.0, 5.0]),
        )
        rank.backward(seed=number)
        rank.exchange.launch_for_backward(NEWEST)
        # The last backward recomputes a layer, which counts again, and finishes the gradients
        # before that.
        rank.backward(seed=number)
        rank.count.add_(torch.tensor([-1.0, 0.0]))
    own = [rank.count.clone() for rank in ranks]
    ring.together(*[rank.finish for rank in ranks])
    assert [rank.count.tolist() for rank in ranks] == [count.tolist() for count in own], (
        "counts are untouched until the commit"
    )
    kept = ranks[2].sums.copy()
    for rank in ranks:
        rank.sums.write(0.7)
        assert rank.count.tolist() == [2.0**24 - 1, 8.0]
    ranks[2].count.zero_()
    kept.write(0.7)  # a joiner's replay
    assert ranks[2].count.tolist() == [2.0**24 - 1, 8.0]


# Overlap


@pytest.mark.parametrize("on_cpu", [True, False])
def test_offloaded_gradients_have_no_hooks(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """With a hook, FSDP2 waits for the copy of each gradient from the device to host memory."""
    monkeypatch.setattr(exchange.device, "on_cpu", lambda: on_cpu)
    parameter = nn.Parameter(torch.zeros(3))
    GradientExchange([parameter], None, bucket_bytes=100, where=CPU, overlap=True)  # type: ignore[arg-type]
    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # no public name
    assert bool(hooks) == on_cpu


def test_buckets_leave_during_backward(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers' all-reduce is launched while backward is still at the first layer."""
    rank, peer = ring.rank(bucket_bytes=1), ring.rank(bucket_bytes=1)
    ring.meet(rank, peer)
    launched = threading.Event()
    allreduce = rank.seat.process_group.allreduce

    def noted(tensors: list[torch.Tensor], options: Any) -> Any:
        launched.set()
        return allreduce(tensors, options)

    monkeypatch.setattr(rank.seat.process_group, "allreduce", noted)
    others = ring.start(peer.finish)
    seen: list[bool] = []
    rank.model.first.register_full_backward_hook(lambda *_: seen.append(launched.wait(DEADLINE)))
    rank.exchange.launch_for_backward(NEWEST)
    # A hook of the first layer needs an input that requires a gradient.
    batch = torch.ones(5, 4, requires_grad=True)
    rank.model(batch).backward()
    assert seen == [True]
    assert rank.model.first.weight.grad is not None
    rank.finish()
    others.result(DEADLINE)


def test_backward_does_not_wait_for_the_quorum(ring: Ring) -> None:
    """A slow lighthouse delays neither backward nor its hooks."""
    rank = ring.rank()
    rank.exchange.launch_for_backward(NEWEST)
    rank.backward(seed=1)
    assert not rank.seat.quorum.done()
    finished = ring.start(rank.finish)
    with pytest.raises(TimeoutError):
        finished.result(0.05)
    ring.meet(rank)
    assert finished.result(DEADLINE).quorum.rank == 0


def test_only_the_armed_backward_launches(ring: Ring) -> None:
    """With gradient accumulation, nothing leaves before the last microbatch.

    Then the sum of all of them leaves.
    """
    rank, peer = ring.rank(bucket_bytes=1), ring.rank(bucket_bytes=1)
    ring.meet(rank, peer)
    for bucket in rank.exchange._buckets:
        bucket.flat.zero_()
    rank.backward(seed=1)
    rank.backward(seed=2)
    assert rank.exchange._flight is None
    assert all(not bucket.flat.any() for bucket in rank.exchange._buckets)
    rank.exchange.launch_for_backward(NEWEST)
    rank.backward(seed=3)
    used = [bucket for bucket in rank.exchange._buckets if bucket.parts[0].read() is not None]
    assert [bucket.missing_parts for bucket in used] == [set()] * 4
    before = rank.gradients()
    ring.together(rank.finish, peer.finish)
    peer.sums.write(1.0)
    check_gradients(peer, before)
    rank.model.zero_grad()
    rank.backward(seed=4)
    assert rank.exchange._flight is None, "the next step's first microbatch launches nothing"


# Failures


def test_a_broken_exchange_is_repeated_from_the_same_gradients(ring: Ring) -> None:
    """After a member is lost, the survivors repeat with their gradients.

    The sum is exact, and nothing is computed again.
    """
    ranks = [ring.rank(counts=True) for _ in range(3)]
    ring.meet(*ranks)
    survivors, lost = ranks[:2], ranks[2]
    for number, rank in enumerate(survivors):
        rank.count.fill_(10.0**number)
        rank.exchange.launch_for_backward(NEWEST)
        rank.backward(seed=number)
    before = [rank.gradients() for rank in survivors]
    touched = [bucket.flat for rank in survivors for bucket in rank.exchange._buckets]
    started = time.monotonic()
    broken = [ring.start(rank.finish) for rank in survivors]
    lost.seat.process_group.abort()  # closes its connections, as the end of its process does
    for failed in broken:
        with pytest.raises(ExchangeError):
            failed.result(DEADLINE)
    assert time.monotonic() - started < DEADLINE / 2, (
        "the survivors notice closed connections, and wait for no timeout"
    )
    assert [rank.seat.num_aborts for rank in survivors] == [1, 1]
    for flat in touched:  # an operation that was broken off may still do so
        flat.fill_(7.0)
    for rank, gradients in zip(survivors, before, strict=True):
        check_gradients(rank, gradients)
    ring.meet(*survivors)
    ring.together(*[rank.finish for rank in survivors])
    assert all(bool((flat == 7.0).all()) for flat in touched), (
        "it writes to memory that is not in use any more"
    )
    for rank in survivors:
        rank.sums.write(1.0)
        check_gradients(rank, sums(*before))
        assert rank.count.tolist() == [11.0, 11.0]


def test_a_peer_that_hangs_costs_the_timeout(ring: Ring) -> None:
    """A member that stops during the exchange breaks it after the timeout.

    Then the buckets are free again.
    """
    rank, peer = ring.rank(bucket_bytes=1, timeout_seconds=0.5), ring.rank(bucket_bytes=1)
    ring.meet(rank, peer)
    rank.backward(seed=1)
    expected = rank.gradients()
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=r"Timed out|timeout"):
        rank.finish()
    assert 0.4 < time.monotonic() - started < 5.0
    assert rank.seat.num_aborts == 1
    ring.meet(rank)
    rank.finish()
    late = torch.ones(41)
    with pytest.raises(RuntimeError):  # the peer's later bytes reach no rank
        peer.seat.process_group.allreduce([late], dist.AllreduceOptions()).wait()
    rank.sums.write(1.0)
    check_gradients(rank, expected)


def test_the_timeout_is_of_a_collective_not_of_the_rendezvous(ring: Ring) -> None:
    """Membership builds process groups with a short timeout.

    In an exchange, a peer may be later than that.
    """
    ranks = [ring.rank(), ring.rank()]
    for rank in ranks:
        rank.seat.process_group.set_timeout(timedelta(seconds=0.3))
    ring.meet(*ranks)
    ranks[0].backward(seed=1)
    early = ring.start(ranks[0].finish)
    with pytest.raises(TimeoutError):
        early.result(0.8)
    ranks[1].finish()
    early.result(DEADLINE)


def test_a_quorum_without_process_group_is_a_broken_exchange(ring: Ring) -> None:
    """If the process group could not be built, the exchange reports why, and can be repeated."""
    rank = ring.rank()
    rank.seat.quorum.set_result(Quorum("1/test", 0, (), max_step=0, error="nobody came"))
    rank.backward(seed=1)
    before = rank.gradients()
    with pytest.raises(ExchangeError, match="nobody came"):
        rank.finish()
    rank.seat.quorum = Future()
    ring.meet(rank)
    rank.finish()
    rank.sums.write(1.0)
    check_gradients(rank, before)


def test_an_error_of_the_membership_is_no_broken_exchange(ring: Ring) -> None:
    """A dead lighthouse or a replaced group ends the run with its own error.

    A repetition would not help.
    """
    rank = ring.rank()
    rank.seat.quorum.set_exception(LighthouseError("gone"))
    rank.exchange.launch_for_backward(NEWEST)
    rank.backward(seed=1)
    with pytest.raises(LighthouseError, match="gone"):
        rank.finish()
    assert rank.seat.num_aborts == 0


def test_an_abort_by_another_rank_is_a_broken_exchange(ring: Ring) -> None:
    """A process group that was aborted before the launch breaks the exchange with the reason."""
    rank, peer = ring.rank(), ring.rank()
    ring.meet(rank, peer)
    rank.seat.process_group.abort()
    rank.backward(seed=1)
    with pytest.raises(ExchangeError, match="another rank of this group"):
        rank.finish()


def test_a_defect_is_no_broken_exchange(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed assertion on the exchange's thread ends the run.

    A repetition of the exchange would hide it.
    """
    rank = ring.rank()
    ring.meet(rank)
    monkeypatch.setattr(
        rank.exchange._buckets[0],
        "compute_total",
        lambda: rank.exchange._buckets[0].mark_applied(),
    )
    with pytest.raises(AssertionError, match="a bucket is applied that is FULL"):
        rank.finish()
    assert rank.seat.num_aborts == 0


def test_a_broken_number_of_givers_is_no_number(
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL raises nothing and leaves garbage.

    A rank that trusted it would make another collective than the others.
    """
    rank, peer = ring.rank(), ring.rank()
    ring.meet(rank, peer)
    sizes: list[int] = []

    def break_silently(gathered: torch.Tensor, *_: Any) -> Any:
        sizes.append(gathered.numel())
        gathered.fill_(3.0)
        done: Future[None] = Future()
        done.set_result(None)
        done.wait = done.result  # type: ignore[attr-defined]  # as torch's Work has it
        return done

    monkeypatch.setattr(rank.seat.process_group, "alltoall_base", break_silently)
    monkeypatch.setattr(
        rank.seat.process_group,
        "errored",
        lambda: RuntimeError("the communicator was aborted"),
    )
    with pytest.raises(ExchangeError, match="communicator was aborted"):
        rank.finish(gives=False)
    assert sizes == [2 * 3], "nothing is sent after the number of givers"


def test_no_thread_outlives_its_exchange(ring: Ring) -> None:
    """The exchange's thread has ended when `finish` returns, whether or not it worked.

    The next exchange writes the same buckets.
    """
    others = set(threading.enumerate())
    rank = ring.rank()
    ring.meet(rank)
    for _ in range(3):
        rank.finish()
    rank.seat.quorum = Future()
    rank.seat.quorum.set_exception(LighthouseError("gone"))
    with pytest.raises(LighthouseError):
        rank.finish()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "titan_ft_exchange" and thread not in others
    ]


# Owners of memory


def test_an_update_owns_its_sums_until_the_next_exchange(ring: Ring) -> None:
    """A later write would make an update of other bytes, and is refused. A copy lasts."""
    rank = ring.rank()
    ring.meet(rank)
    rank.backward(seed=1)
    before = rank.gradients()
    live = rank.finish().sums
    kept = live.copy()
    rank.exchange.launch()
    with pytest.raises(AssertionError, match="the next exchange has begun"):
        live.write(1.0)
    with pytest.raises(AssertionError, match="the next exchange has begun"):
        live.copy()
    rank.finish()
    kept.write(1.0)
    check_gradients(rank, before)


def test_a_bucket_names_the_owner_of_its_memory(ring: Ring) -> None:
    """The owner is the training, the exchange, or the update.

    After a broken exchange it is the training again.
    """
    rank, peer = ring.rank(), ring.rank()
    ring.meet(rank, peer)
    states = lambda: {bucket.state for bucket in rank.exchange._buckets}  # noqa: E731
    rank.exchange.launch_for_backward(NEWEST)
    assert states() == {BucketState.FILLING}
    rank.backward(seed=1)
    assert states() == {BucketState.FILLING, BucketState.FULL}, (
        "one layer was not used: `finish` fills its bucket"
    )
    peer.seat.process_group.abort()
    with pytest.raises(ExchangeError):
        rank.finish()
    ring.meet(rank)
    rank.finish()
    assert states() == {BucketState.SUMMED}
    rank.sums.write(1.0)
    assert states() == {BucketState.APPLIED}
    with pytest.raises(AssertionError, match="APPLIED"):
        rank.sums.write(1.0)
    rank.exchange.launch()
    assert states() == {BucketState.FULL}
    rank.finish()


def test_sums_of_a_broken_exchange_hold_no_memory(ring: Ring) -> None:
    """Its buckets get other memory.

    An earlier update must not keep the old memory, which may be gigabytes.
    """
    rank, peer = ring.rank(), ring.rank()
    ring.meet(rank)
    live = rank.finish().sums
    ring.meet(rank, peer)
    peer.seat.process_group.abort()
    with pytest.raises(ExchangeError):
        rank.finish()
    assert not live.flats
