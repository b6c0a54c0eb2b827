# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt of a heal: the fetch on a thread, and the queue of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from titan_ft.engine.catch_up import CatchUp, FetchStatus
from titan_ft.protocol.errors import RefusedError
from titan_ft.protocol.round import NO_SUMS, NoSums, Update
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError

SUMS = NoSums()  # size of an update
DEADLINE = 10.0  # seconds; only a bug reaches it
FROM_STEP = 5


class HeldFetch:
    """A fetch that ends when the test releases it."""

    def __init__(self) -> None:
        self.result: Snapshot | Exception = Snapshot(
            FROM_STEP, 100, b"{}", torch.empty(0, dtype=torch.uint8)
        )
        self.began, self.let_go = threading.Event(), threading.Event()

    def __call__(
        self, cancelled: threading.Event, report_share: Callable[[float], None]
    ) -> Snapshot:
        self.cancelled, self.report_share = cancelled, report_share
        self.began.set()
        assert self.let_go.wait(DEADLINE)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def held() -> Iterator[HeldFetch]:
    """Provide a fetch under the test's control. It ends with the test."""
    fetch = HeldFetch()
    yield fetch
    fetch.let_go.set()


@pytest.fixture
def attempt(held: HeldFetch) -> CatchUp:
    """Provide an attempt that may queue four updates."""
    return CatchUp(held, max_queued=4)


def update(step: int, lineage: int) -> Update:
    """Return a committed update that made a state of `lineage`."""
    return Update(
        step=step, tokens=1, lineage=lineage, scale=1.0, entries=[], readers=[], sums=SUMS
    )


def end(held: HeldFetch, attempt: CatchUp) -> None:
    """Release the fetch, and wait until the attempt knows its end."""
    ended = threading.Event()
    attempt._fetch.add_done_callback(lambda _: ended.set())
    held.let_go.set()
    assert ended.wait(DEADLINE)


@pytest.mark.parametrize(
    ("at_half", "at_end", "in_time"),
    [(0.0, 0.5, True), (0.3, 0.8, True), (0.3, 0.79, False), (0.6, 0.9, False)],
)
def test_the_latest_pace_decides_whether_a_newer_state_is_fetched(
    held: HeldFetch, attempt: CatchUp, at_half: float, at_end: float, in_time: bool
) -> None:
    """Two of four updates came after the queue was half full.

    So half of the state must have come in that time.
    """
    assert held.began.wait(DEADLINE)
    for number in range(4):
        held.report_share(at_half if number == 1 else at_end)
        attempt.queue_update(update(6 + number, 101 + number), number)
    assert attempt.newer_would_be_in_time is in_time
    end(held, attempt)
    assert attempt.newer_would_be_in_time, "a rank with its whole part is always in time"


def test_the_fetched_state_is_handed_over(held: HeldFetch, attempt: CatchUp) -> None:
    """The snapshot is unchanged."""
    end(held, attempt)
    assert attempt.get_snapshot() is held.result


def test_the_fetch_does_not_block(held: HeldFetch, attempt: CatchUp) -> None:
    """While the fetch runs, it is pending without an error. Afterwards it is done."""
    assert attempt.fetch_status is FetchStatus.PENDING
    assert attempt.error is None
    end(held, attempt)
    assert attempt.fetch_status is FetchStatus.DONE
    assert attempt.error is None


def test_a_failed_fetch_has_a_reason(held: HeldFetch, attempt: CatchUp) -> None:
    """A transfer that failed makes the attempt failed."""
    held.result = TransferError("the donor is gone")
    end(held, attempt)
    assert attempt.fetch_status is FetchStatus.FAILED
    assert attempt.error == "the donor is gone"


def test_a_refusal_is_a_failed_fetch(held: HeldFetch, attempt: CatchUp) -> None:
    """A stranger may answer at the address of a donor that died.

    The next attempt has another donor.
    """
    held.result = RefusedError("127.0.0.1:1: no")
    end(held, attempt)
    assert (attempt.fetch_status, attempt.error) == (FetchStatus.FAILED, "127.0.0.1:1: no")


@pytest.mark.parametrize("look", [CatchUp.fetch_status.fget, lambda attempt: attempt.error])
def test_a_bug_in_the_fetch_is_not_a_failed_transfer(
    held: HeldFetch, attempt: CatchUp, look: Callable[[CatchUp], object]
) -> None:
    """An error that no transfer raises reaches the training thread unchanged."""
    held.result = ZeroDivisionError("a bug")
    end(held, attempt)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        look(attempt)


def test_cancelling_ends_the_fetch(held: HeldFetch, attempt: CatchUp) -> None:
    """The fetch of an abandoned attempt must not load the donor any longer."""
    assert held.began.wait(DEADLINE)
    assert not held.cancelled.is_set()
    attempt.queue_update(update(1, 1), 0)
    attempt.cancel()
    assert attempt._updates == [], "an error refers to the queue, and garbage is collected late"
    assert held.cancelled.is_set()


def test_one_failed_rank_outvotes_the_others() -> None:
    """The smallest value over the group's ranks counts: failed, then pending, then done."""
    assert FetchStatus.FAILED < FetchStatus.PENDING < FetchStatus.DONE


def test_a_replaced_update_drops_the_updates_after_it(attempt: CatchUp) -> None:
    """The new sums are replayed instead."""
    for place in range(3):
        attempt.queue_update(update(6 + place, 101 + place), place)
    again = update(7, 202)
    attempt.queue_update(again, 1)
    assert attempt.get_for_replay(1) is again
    with pytest.raises(IndexError):
        attempt.get_for_replay(2)


def test_a_replayed_update_needs_no_memory(attempt: CatchUp) -> None:
    """The queue drops its sums."""
    attempt.queue_update(update(6, 101), 0)
    assert attempt.get_for_replay(0).sums is SUMS
    assert attempt.get_for_replay(0).sums is NO_SUMS
