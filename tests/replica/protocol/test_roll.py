# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The lost groups, by plain numbers."""

from __future__ import annotations

import pytest

from titan_ft.membership.pulse import LighthouseStatus, find_ages
from titan_ft.protocol.member import Member
from titan_ft.protocol.roll import (
    MIN_SILENCE_SECONDS,
    MIN_SILENT_HEARTBEATS,
    Back,
    Lost,
    Roll,
    silence_limit,
)

BEAT = 0.5


@pytest.mark.parametrize(
    ("step_seconds", "beat_seconds", "expected"),
    [
        (0.0, 0.5, MIN_SILENCE_SECONDS),
        (0.2, 0.5, MIN_SILENCE_SECONDS),
        (60.0, 0.5, 180.0),
        (1.0, 30.0, MIN_SILENT_HEARTBEATS * 30.0),
    ],
)
def test_limit(step_seconds: float, beat_seconds: float, expected: float) -> None:
    """Some seconds at least, a few long steps, and some heartbeat timeouts."""
    assert silence_limit(step_seconds, beat_seconds) == expected


def trained(own: int = 0, groups: int = 3, steps: int = 5) -> Roll:
    """Return the roll of a group that has made a step a second with all groups, until second 5."""
    roll = Roll(own, BEAT)
    for step in range(1, steps + 1):
        roll.commit(step, range(groups), float(step))
    return roll


def test_silent_group_is_lost_once_and_then_back() -> None:
    roll = trained()
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 3.0}, [], 8.0) == []
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 9.9}, [], 14.9) == []
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 10.5}, [], 15.5) == [Lost(2, 10.5, 5)]
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 13.0}, [], 18.0) == []
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 0.2}, [], 20.0) == [Back(2, pytest.approx(14.8))]  # type: ignore[arg-type]
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 0.5}, [], 22.0) == []
    assert roll.find_changes({0: 0.0, 1: 0.1, 2: 11.0}, [], 32.5) == [Lost(2, 11.0, 5)]


def test_a_page_that_is_read_late_makes_no_dead_group_live() -> None:
    """On a busy host the ages on the page are seconds old when they are counted.

    The last heartbeat of a dead group then seems to move.
    """
    roll = trained()
    assert roll.find_changes({0: 0.0, 1: 0.0, 2: 10.5}, [], 16.0) == [Lost(2, 10.5, 5)]
    assert roll.find_changes({0: 0.0, 1: 0.0, 2: 11.5}, [], 19.0) == []
    assert roll.find_changes({0: 0.0, 1: 0.0, 2: 12.0}, [], 21.0) == []


def test_group_that_takes_part_is_back() -> None:
    """The group was silent until then, even if the next call comes later."""
    roll = trained()
    assert roll.find_changes({0: 0.0, 1: 0.0, 2: 11.0}, [], 16.0) == [Lost(2, 11.0, 5)]
    roll.commit(20, [0, 1, 2], 18.0)
    roll.commit(21, [0, 1, 2], 19.0)
    assert roll.find_changes({0: 0.0, 1: 0.0, 2: 0.1}, [], 19.1) == [Back(2, 14.0)]


def test_lost_group_is_reported_again_when_it_stays_away() -> None:
    """At the first report, an agent may have been restarting the group.

    Its host may be gone by now.
    """
    roll = trained()
    reports = [
        roll.find_changes({0: 0.0, 1: 0.1, 2: now - 5.0}, [], now)
        for now in (16.0, 30.0, 48.0, 50.0, 200.0)
    ]
    assert [[each.seconds for each in report] for report in reports] == [
        [11.0],
        [],
        [],
        [45.0],
        [195.0],
    ]


def test_who_leaves_in_order_or_never_came_is_not_lost() -> None:
    roll = trained()
    assert roll.find_changes({0: 0.0, 2: 60.0, 7: 500.0}, [1, 2], 65.0) == []
    assert roll.find_changes({0: 0.0, 1: 60.0}, [2], 65.0) == [Lost(1, 60.0, 5)]


def test_group_that_takes_part_was_heard() -> None:
    """A restarted lighthouse does not list a group yet that has just taken part in a step."""
    roll = trained()
    roll.commit(6, [0, 1, 2], 30.0)
    assert roll.find_changes({0: 0.0}, [], 31.0) == []


def test_only_the_lowest_group_that_trains_reports() -> None:
    """The lowest group of all may be the lost one.

    A group that has just come knows nothing, and does not count.
    """
    silent = {0: 40.0, 1: 0.1, 2: 0.1}
    assert trained(own=1).find_changes(silent, [], 45.0) == [Lost(0, 40.0, 5)]
    assert trained(own=2).find_changes(silent, [], 45.0) == []
    newcomer = trained(own=2, groups=2)
    assert newcomer.find_changes({1: 40.0, 2: 0.0, -1: 0.1}, [], 45.0) == [
        Lost(0, 40.0, 5),
        Lost(1, 40.0, 5),
    ]


def test_a_group_that_was_restarted_since_is_not_left_the_report() -> None:
    """The restarted group has never heard the lost one, whose last heartbeat is too old.

    So it reports nothing.
    """
    before, after = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 99.0, 1: 1.0, 2: 1.0}
    roll = trained(own=2)
    assert roll.find_changes({0: 0.0, 1: 0.5, 2: 0.1}, [], 5.5, before) == []
    assert roll.find_changes({0: 0.1, 1: 9.0, 2: 0.1}, [], 14.0, after) == []
    roll.commit(6, [0, 2], 15.0)
    assert roll.find_changes({0: 0.1, 1: 11.0, 2: 0.1}, [], 16.0, after) == [Lost(1, 11.0, 5)]
    roll.commit(7, [0, 1, 2], 17.0)
    assert roll.find_changes({0: 0.1, 1: 0.1, 2: 0.1}, [], 17.1, after) == [Back(1, 12.0)]
    assert roll.find_changes({0: 0.1, 1: 20.0, 2: 0.1}, [], 37.0, after) == [], (
        "the new process took part with it"
    )


def test_a_start_that_becomes_known_late_is_no_restart() -> None:
    """The status page shows a group's heartbeat before its start.

    Group 0 has heard group 1, and reports it.
    """
    roll = trained(own=2)
    assert roll.find_changes({0: 0.0, 1: 0.5, 2: 0.1}, [], 5.5) == []
    started = {0: 99.0, 1: 99.0, 2: 99.0}
    assert roll.find_changes({0: 0.1, 1: 11.0, 2: 0.1}, [], 16.0, started) == []


def test_who_could_not_hear_gives_all_groups_time() -> None:
    """After a freeze of this group, or without a lighthouse, no group is lost at once."""
    roll = trained()
    roll.restart_clocks(100.0)
    assert roll.find_changes({0: 0.0}, [], 100.0) == []
    assert [each.slot for each in roll.find_changes({0: 0.0}, [], 110.5)] == [1, 2]


def test_long_steps_give_more_time() -> None:
    roll = Roll(0, BEAT)
    for step in range(4):
        roll.commit(step, [0, 1], 60.0 * step, num_steps=2)
    assert roll.limit == 90.0
    assert roll.find_changes({0: 0.0, 1: 89.0}, [], 269.0) == []
    assert roll.find_changes({0: 0.0, 1: 91.0}, [], 271.0) == [Lost(1, 91.0, 3)]


def test_ages_are_those_of_the_newest_process() -> None:
    """Names of ended processes stay on the page. Names of other jobs do not count."""
    found = ((0, 1.0, "a"), (1, 1.0, "b"), (1, 2.0, "c"))
    own, old, new = (Member(slot, started, unique, "c", "job") for slot, started, unique in found)
    other = Member(1, 1.0, "d", "c", "another job")
    beats = {
        own.replica_id: 0.1,
        old.replica_id: 70.0,
        new.replica_id: 0.3,
        other.replica_id: 0.0,
        "stranger": 0.0,
    }
    assert find_ages(own, LighthouseStatus(beats), BEAT) == ({0: 0.1, 1: 0.3}, {0: 1.0, 1: 2.0})
    assert find_ages(own, LighthouseStatus({**beats, own.replica_id: 0.6}), BEAT) is None
    assert find_ages(own, LighthouseStatus({new.replica_id: 0.3}), BEAT) is None
