# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's report, and the row that the quorum's answer makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from titan_ft.protocol.ledger import Entry, decode
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.report import Contribution, GradientUse, RoundReport
from titan_ft.protocol.row import Row, Standing, Why

TRAINED = Contribution(90, 100, 0.5, 0.7, 1.5, (Entry(0, 4, 1, b"state"),))
FACTS = Row(0, Standing.READY, 7, lineage=5, digest=3, training=1)
QUORUM = Quorum(
    "1/a",
    0,
    (Member(0, 0.0, "process 0", "c0ffee"),),
    7,
    requested_at=10.0,
    answered_at=12.0,
    connected_at=13.0,
)


@dataclass
class Request:
    """Stands in for a drain."""

    requested: bool = False


def report(
    use: GradientUse = GradientUse.GIVE, began: float = 11.0, leave: Request | None = None
) -> RoundReport:
    """Return the report of a group that trains and has made 7 updates."""
    return RoundReport(FACTS, TRAINED, use, 8, began, Why.CATCHING_UP, leave or Request())


def row_of(
    made: RoundReport, quorum: Quorum = QUORUM, gave: bool = True, came: float = 12.5
) -> Row:
    """Return the row that is sent."""
    return Row.decode(made.complete(quorum, gave, came)[0], nonfinite=False)


def test_a_request_to_leave_that_comes_during_the_sums_is_in_the_row() -> None:
    """Otherwise the group would have to make one more step before it may leave."""
    leave = Request()
    made = report(leave=leave)
    leave.requested = True
    assert row_of(made).leaving == 1


@pytest.mark.parametrize(("newest", "standing"), [(8, Standing.READY), (9, Standing.BEHIND)])
def test_a_quorum_with_more_updates_voids_the_claim(newest: int, standing: Standing) -> None:
    """One update more may be of an exchange that broke for this group. Two are not."""
    row = row_of(report(), replace(QUORUM, max_step=newest), gave=standing is Standing.READY)
    assert (row.standing, row.training) == (standing, standing is Standing.READY)
    assert row.valid_tokens == (90 if standing is Standing.READY else 0)
    assert row.activity == (Why.COMPUTING if standing is Standing.READY else Why.CATCHING_UP)


@pytest.mark.parametrize(("use", "gave"), [(GradientUse.GIVE, False), (GradientUse.EXCLUDE, False)])
def test_tokens_are_reported_only_with_gradients(use: GradientUse, gave: bool) -> None:
    """Tokens without gradients would make the mean too small.

    A group that holds its gradients back keeps both.
    """
    values, message = report(use).complete(QUORUM, gave, 12.5)
    assert Row.decode(values, nonfinite=False).tokens == 0
    assert decode(message) == []
    assert row_of(report(GradientUse.HOLD_BACK), gave=False).tokens == 100


def test_the_seconds_count_from_the_answer() -> None:
    """The process group was ready last. In an opening round, a group is ready when it asks."""
    row = row_of(report())
    assert (row.asked_before_seconds, row.ready_after_seconds, row.connecting) == (2.0, 1.0, 1)
    assert row_of(report(), came=14.0).ready_after_seconds == 2.0
    assert row_of(report(GradientUse.OPEN, began=14.0), came=20.0).ready_after_seconds == 1.0
