# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The waits of an exchange, for which group, how long and why, by the rows."""

from __future__ import annotations

from typing import Any

import pytest

from titan_ft.engine.waits import MIN_WAIT_SECONDS, WaitLog, find_waits
from titan_ft.protocol.row import Row, Standing, Why


def row(
    slot: int,
    came: float,
    asked_before_seconds: float = 0.0,
    activity: Why = Why.COMPUTING,
    connecting: bool = False,
) -> Row:
    return Row(
        slot,
        Standing.READY,
        7,
        asked_before_seconds=asked_before_seconds,
        ready_after_seconds=came,
        activity=activity,
        connecting=connecting,
    )


def waits(
    *rows: Row,
    began: float | None = None,
    connected: float = 0.0,
    gone: Any = (),
) -> list[tuple[int, Why, float]]:
    """Return the waits of the first member."""
    found = find_waits(
        rows,
        0,
        rows[0].ready_after_seconds if began is None else began,
        connected,
        gone,
    )
    return [(slot, why, pytest.approx(seconds)) for slot, why, seconds in found]


def test_the_wait_is_for_the_last_group() -> None:
    """The wait is the time by which the last group came later than this one.

    If this group came last, there is no wait.
    """
    assert waits(row(0, 1.0), row(1, 1.5), row(2, 3.0, activity=Why.LOADING)) == [
        (2, Why.LOADING, 2.0),
    ]
    assert waits(row(0, 3.0), row(1, 1.5), row(2, 3.0)) == []
    assert waits(row(0, 3.0)) == []


def test_a_joiner_is_charged_for_the_time_after_all_others() -> None:
    """Without the joiner, the exchange would have waited for the slowest training group."""
    joiner = row(1, 3.0, activity=Why.CATCHING_UP)
    assert waits(row(0, 1.0), joiner, row(2, 2.5)) == [
        (2, Why.COMPUTING, 1.5),
        (1, Why.CATCHING_UP, 0.5),
    ]
    assert waits(row(0, 1.0), joiner, row(2, 4.0)) == [(2, Why.COMPUTING, 3.0)]


def test_the_wait_for_the_quorum_is_for_the_last_request() -> None:
    """This group was ready two seconds before the answer.

    The last request came half a second before it.
    """
    early, late = (
        row(0, 0.0, asked_before_seconds=4.0),
        row(1, 0.0, asked_before_seconds=0.5, activity=Why.BETWEEN_STEPS),
    )
    assert waits(early, late, began=-2.0) == [(1, Why.BETWEEN_STEPS, 1.5)]
    gone = [(2, Why.LOST)]
    assert waits(early, late, began=-2.0, gone=gone) == [
        (1, Why.BETWEEN_STEPS, 1.5),
        (2, Why.LOST, 0.5),
    ]
    assert waits(late, early, began=-2.0) == [], "the group asked last, so it has waited for nobody"


def test_connecting_at_the_start_is_charged_to_nobody() -> None:
    """Only a group that connects longer is charged, for instance over a link that was cut."""
    own, other, slow = (
        row(slot, came, connecting=True) for slot, came in ((0, 0.5), (1, 0.5), (1, 2.0))
    )
    assert waits(own, other, began=-1.0, connected=0.5) == []
    assert waits(own, slow, began=-1.0, connected=0.5) == [(1, Why.CONNECTING, 1.5)]


def test_connecting_is_charged_to_joiners_and_lost_groups() -> None:
    """The charge begins with the answer, or when this group was ready."""
    own, other = row(0, 5.0, connecting=True), row(1, 5.0, connecting=True)
    joiner = row(2, 5.5, connecting=True, activity=Why.CATCHING_UP)
    assert waits(own, other, joiner, began=-1.0, connected=5.0) == [
        (2, Why.CATCHING_UP, 5.0),
        (2, Why.CONNECTING, 0.5),
    ]
    assert waits(own, other, began=1.0, connected=5.0, gone=[(3, Why.LOST)]) == [(3, Why.LOST, 4.0)]
    assert waits(own, joiner, began=1.0, connected=5.0, gone=[(3, Why.LEFT)]) == [
        (3, Why.LEFT, 2.0),
        (2, Why.CATCHING_UP, 2.0),
        (2, Why.CONNECTING, 0.5),
    ]
    assert waits(row(0, 5.0), joiner, began=5.0, connected=4.0) == [(2, Why.CONNECTING, 0.5)], (
        "the group was busy longer"
    )
    late = row(0, 6.0, connecting=True)
    assert waits(late, joiner, began=3.0, connected=5.0) == [(2, Why.CATCHING_UP, 2.0)], (
        "the wait was for ranks of this group"
    )


def test_a_joiner_that_asks_while_the_lighthouse_waits_for_a_lost_group_is_not_waited_for() -> None:
    """The joiner may be the new process of the lost group, whose last heartbeat is still too
    young.
    """
    own, joiner = (
        row(0, 0.0, asked_before_seconds=1.0),
        row(1, 0.0, asked_before_seconds=0.2, activity=Why.CATCHING_UP),
    )
    assert waits(own, joiner, began=-1.0) == [(1, Why.CATCHING_UP, 0.8)]
    assert waits(own, joiner, began=-1.0, gone=[(1, Why.LOST)]) == [(1, Why.LOST, 1.0)]


def test_time_before_the_own_request_belongs_to_the_exchange_before() -> None:
    """Gradients of a repeated exchange were ready long ago."""
    assert waits(
        row(0, 0.0, asked_before_seconds=1.0),
        row(1, 0.2, asked_before_seconds=1.0),
        began=-9.0,
    ) == [(1, Why.COMPUTING, 0.2)]


def make(log: WaitLog, began: float, *rows: Row, answered: float = 10.0, left: Any = ()) -> None:
    """Make an exchange that works. `began` and `answered` are times of one clock."""
    log.start_wait(began)
    log.record_success(rows, 0, answered, answered, [(each.slot, 0.0) for each in rows], left)


def take(log: WaitLog) -> list[tuple[int, float, str]]:
    return [(wait.slot, wait.seconds, wait.why) for wait in log.pop_waits()]


def test_the_waits_of_all_exchanges_of_an_update_are_added_up() -> None:
    """The longest comes first, and very short ones are left out.

    The next update starts with none.
    """
    log = WaitLog()
    make(log, 11.0, row(0, 1.0), row(1, 1.5), row(2, 0.5))
    make(log, 20.0, row(0, 0.0), row(1, 0.2), row(2, 0.9), answered=20.0)
    make(log, 30.0, row(0, 0.0), row(1, MIN_WAIT_SECONDS / 2), answered=30.0, left=[2])
    assert take(log) == [(2, 0.9, "computing"), (1, 0.505, "computing")]
    assert take(log) == []


@pytest.mark.parametrize(("left", "why"), [([], "lost"), ([2], "left")])
def test_a_broken_exchange_is_charged_to_the_groups_that_are_gone(
    left: list[int], why: str
) -> None:
    """The next exchange that works shows which groups these are."""
    log = WaitLog()
    make(log, 10.0, row(0, 0.0), row(1, 0.0), row(2, 0.0))
    log.start_wait(12.0)
    log.record_broken([(0, 0.0), (1, 0.0), (2, 0.0)], 12.5)
    log.start_wait(12.6)
    log.record_broken([(0, 0.0), (1, 0.0), (2, 0.0)], 12.7)
    make(
        log,
        12.7,
        row(0, 0.0, asked_before_seconds=0.3),
        row(1, 0.0, asked_before_seconds=0.3),
        answered=13.1,
        left=left,
    )
    # 0.5 s and 0.1 s until the exchanges broke, and 0.3 s in which the lighthouse waited.
    assert take(log) == [(2, 0.9, why)]
    make(log, 20.0, row(0, 0.0), row(1, 0.3), answered=20.0)
    assert take(log) == [(1, 0.3, "computing")], "the group is gone once"


def test_a_group_that_was_restarted_meanwhile_was_lost_too() -> None:
    """The restarted group's new process is in the next exchange. The former process is charged."""
    log = WaitLog()
    make(log, 10.0, row(0, 0.0), row(1, 0.0))
    log.start_wait(11.0)
    log.record_broken([(0, 0.0), (1, 0.0)], 11.5)
    log.start_wait(12.0)
    rows = [row(0, 0.0), row(1, 0.25, activity=Why.CATCHING_UP)]
    log.record_success(rows, 0, 12.0, 12.0, [(0, 0.0), (1, 11.2)], [])
    assert take(log) == [(1, 0.5, "lost"), (1, 0.25, "catching_up")]


def test_an_update_that_is_held_back_waits_for_the_groups_it_needs() -> None:
    """The whole time until the next exchange is charged to them.

    It makes no difference which group came last to the exchange before.
    """
    log = WaitLog()
    make(log, 10.0, row(0, 0.0), row(1, 0.05))
    log.record_hold([2, 3], Why.TOO_FEW)
    make(log, 14.0, row(0, 0.0), row(1, 0.2), answered=14.0)
    assert take(log) == [(2, 2.0, "too_few"), (3, 2.0, "too_few"), (1, 0.2, "computing")]
    log.record_hold([], Why.TOO_FEW)
    make(log, 15.0, row(0, 0.0), row(1, 0.3), answered=15.0)
    assert take(log) == [(1, 0.3, "computing")]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_a_group_waited_for_while_it_healed_is_no_wait_of_its_update(breaks: bool) -> None:
    log = WaitLog()
    make(log, 10.0, row(0, 0.0), row(1, 5.0))
    if breaks:
        log.start_wait(16.0)
        log.record_broken([(0, 0.0), (2, 0.0)], 17.0)
    log.discard()
    make(log, 20.0, row(0, 0.0), row(1, 0.1), answered=20.0)
    assert take(log) == [(1, 0.1, "computing")]
