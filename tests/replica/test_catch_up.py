# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt to heal: the fetch in the background and the queue of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from titan_ft.engine.catch_up import CatchUp, Fetched
from titan_ft.protocol.decision import NO_SUMS, NoSums, Update
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError

DEADLINE = 10.0  # seconds; only ever reached by a bug
FROM_STEP = 5
SUMS = NoSums()  # of an update


class HeldFetch:
    """A fetch that ends when the test says so."""

    def __init__(self) -> None:
        self.result: Snapshot | Exception = Snapshot(FROM_STEP, 100, b"{}", torch.empty(0, dtype=torch.uint8))
        self.began, self.let_go = threading.Event(), threading.Event()

    def __call__(self, cancelled: threading.Event, note_share: Callable[[float], None]) -> Snapshot:
        self.cancelled, self.note_share = cancelled, note_share
        self.began.set()
        assert self.let_go.wait(DEADLINE)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def held() -> Iterator[HeldFetch]:
    """Provide a fetch under the test's control; never leaves its thread waiting."""
    fetch = HeldFetch()
    yield fetch
    fetch.let_go.set()


@pytest.fixture
def attempt(held: HeldFetch) -> CatchUp:
    """Provide an attempt from donor 3 at step 5, of lineage 100."""
    return CatchUp(3, FROM_STEP, 100, 9, held, most=4)


def update(step: int, lineage: int) -> Update:
    """Return a committed update that made a state of `lineage`."""
    return Update(step=step, tokens=1, lineage=lineage, scale=1.0, entries=[], readers=[], sums=SUMS)


def end(held: HeldFetch, attempt: CatchUp) -> None:
    """Let the fetch end and wait until the attempt knows it."""
    ended = threading.Event()
    attempt._fetch.add_done_callback(lambda _: ended.set())
    held.let_go.set()
    assert ended.wait(DEADLINE)


def test_updates_queue_in_order(attempt: CatchUp) -> None:
    """Consecutive updates, each made on the one before, are kept in order; the target follows them."""
    assert attempt.target_step == FROM_STEP
    assert attempt.queue(update(6, 101), base=100)
    assert attempt.queue(update(7, 102), base=101)
    assert attempt.queue(update(8, 103), base=102)
    assert [kept.step for kept in attempt.updates] == [6, 7, 8]
    assert attempt.target_step == 8


@pytest.mark.parametrize(
    ("at_half", "at_end", "in_time"), [(0.0, 0.5, True), (0.3, 0.8, True), (0.3, 0.79, False), (0.6, 0.9, False)]
)
def test_the_pace_of_late_says_whether_a_newer_state_is_worth_it(
    held: HeldFetch, attempt: CatchUp, at_half: float, at_end: float, in_time: bool
) -> None:
    """Two of the four updates have come since the queue was half full: half of the state must have, too."""
    assert held.began.wait(DEADLINE)
    for number in range(4):
        assert not attempt.full
        held.note_share(at_half if number == 1 else at_end)
        assert attempt.queue(update(6 + number, 101 + number), base=100 + number)
    assert attempt.full
    assert attempt.newer_would_be_in_time is in_time
    end(held, attempt)
    assert attempt.newer_would_be_in_time, "whose part is there has time for whatever the others do"


def test_a_missed_update_voids_the_attempt(attempt: CatchUp) -> None:
    """An update that does not follow the last one says that one was missed."""
    assert attempt.queue(update(6, 101), base=100)
    assert not attempt.queue(update(8, 103), base=102)
    assert [kept.step for kept in attempt.updates] == [6]


def test_a_missed_first_update_voids_the_attempt(attempt: CatchUp) -> None:
    """The first update must be the one after the fetched step."""
    assert not attempt.queue(update(7, 102), base=101)


def test_an_update_of_a_fetched_step_voids_the_attempt(attempt: CatchUp) -> None:
    """If the others make the fetched step again, what is fetched is not their state."""
    assert not attempt.queue(update(5, 100), base=99)


def test_an_update_that_nobody_else_committed_is_replaced(attempt: CatchUp) -> None:
    """A step that only the joiner saw succeed is repeated by the others: the repetition counts from then on."""
    assert attempt.queue(update(6, 101), base=100)
    assert attempt.queue(update(7, 102), base=101)
    repeated = update(7, 202)
    assert attempt.queue(repeated, base=101)
    assert attempt.updates[1] is repeated
    assert attempt.target_step == 7
    assert attempt.queue(update(8, 203), base=202)
    assert not attempt.queue(update(9, 104), base=103)


def test_replacing_an_update_drops_what_was_built_on_it(attempt: CatchUp) -> None:
    """When an earlier step is made again, the queued later ones are void."""
    for step, lineage in ((6, 101), (7, 102), (8, 103)):
        assert attempt.queue(update(step, lineage), base=lineage - 1)
    assert attempt.queue(update(7, 202), base=101)
    assert [kept.lineage for kept in attempt.updates] == [101, 202]


def test_an_update_on_another_state_voids_the_attempt(attempt: CatchUp) -> None:
    """An update of the right number that was not made on the queued one cannot be replayed after it."""
    assert attempt.queue(update(6, 101), base=100)
    assert not attempt.queue(update(7, 302), base=301)


def test_an_update_on_another_state_than_the_donors_voids_the_attempt(attempt: CatchUp) -> None:
    """The first update must be made on the state that is fetched, also when that is there and the queue is empty."""
    assert not attempt.queue(update(6, 101), base=99)
    assert attempt.queue(update(6, 101), base=100)


@pytest.mark.parametrize("other", [(FROM_STEP, 99), (FROM_STEP + 1, 100)])
def test_the_fetched_state_must_be_the_one_that_was_named(
    held: HeldFetch, attempt: CatchUp, other: tuple[int, int]
) -> None:
    """A donor that serves another step or another history by now does not fit."""
    held.result = Snapshot(*other, b"{}", torch.empty(0, dtype=torch.uint8))
    end(held, attempt)
    assert attempt.fetched() is Fetched.DONE
    assert not attempt.fits


def test_the_state_that_was_named_fits(held: HeldFetch, attempt: CatchUp) -> None:
    """What came is what the round told of."""
    end(held, attempt)
    assert attempt.fits
    assert attempt.snapshot() is held.result


def test_the_fetch_does_not_block(held: HeldFetch, attempt: CatchUp) -> None:
    """While the fetch runs it is pending, without an error; afterwards it is done."""
    assert attempt.fetched() is Fetched.PENDING
    assert attempt.error is None
    end(held, attempt)
    assert attempt.fetched() is Fetched.DONE
    assert attempt.error is None


def test_a_failed_fetch_tells_why(held: HeldFetch, attempt: CatchUp) -> None:
    """A transfer that failed makes the attempt failed, with the reason."""
    held.result = TransferError("the donor is gone")
    end(held, attempt)
    assert attempt.fetched() is Fetched.FAILED
    assert attempt.error == "the donor is gone"


@pytest.mark.parametrize("look", [CatchUp.fetched, lambda attempt: attempt.error])
def test_a_bug_in_the_fetch_is_not_a_failed_transfer(
    held: HeldFetch, attempt: CatchUp, look: Callable[[CatchUp], object]
) -> None:
    """An error that no transfer is expected to raise reaches the training thread as it is."""
    held.result = ZeroDivisionError("a bug")
    end(held, attempt)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        look(attempt)


def test_cancelling_tells_the_fetch(held: HeldFetch, attempt: CatchUp) -> None:
    """An attempt that is given up lets its fetch know, so that it stops loading the donor."""
    assert held.began.wait(DEADLINE)
    assert not held.cancelled.is_set()
    attempt.updates.append(update(1, 1))
    attempt.cancel()
    assert attempt.updates == [], "an error refers to it, and nobody collects garbage for a while"
    assert held.cancelled.is_set()


def test_one_failed_rank_outvotes_the_others() -> None:
    """The smallest value over a group's ranks tells how far the group is: failed before pending before done."""
    assert Fetched.FAILED < Fetched.PENDING < Fetched.DONE


def test_a_replayed_update_cannot_be_replaced(attempt: CatchUp) -> None:
    """While the replay goes on updates still come; one that the others take back after it was replayed voids all."""
    for step in (6, 7, 8):
        assert attempt.queue(update(step, lineage=step), base=step - 1 if step > 6 else 100)
    taken = [attempt.take(), attempt.take()]
    assert [one.step for one in taken] == [6, 7]
    assert all(one.sums is SUMS for one in taken)
    assert attempt.updates[0].sums is NO_SUMS, "what is replayed needs no memory"
    assert (attempt.replayed, attempt.remaining) == (2, 1)
    assert attempt.queue(update(8, lineage=80), base=7), "the third is not replayed yet"
    assert attempt.queue(update(9, lineage=9), base=80)
    assert attempt.remaining == 2
    assert not attempt.queue(update(7, lineage=70), base=6)
