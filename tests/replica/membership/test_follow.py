# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups follow a lighthouse that moves, without a restart and without separating."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_ft.run.lighthouse import Announcement, LighthouseAddress

DEADLINE = 20.0  # seconds; only a bug reaches it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the file in which lighthouses announce themselves."""
    return tmp_path / "lighthouse.json"


@pytest.fixture
def moving(path: Path, start_lighthouse: Callable[..., str]) -> Iterator[Any]:
    """Provide seats at the announced lighthouse. No lighthouse is announced yet."""
    from tests.replica.conftest import Seats

    seats = Seats(f"file:{path}")
    yield seats
    seats.close()


def named(seat: Any, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = seat._events.named(name)
    return events


def test_groups_follow_one_that_died(
    moving: Any, path: Path, nursery: subprocess.Popen[str]
) -> None:
    """Both ranks of both groups go on under their names as soon as another lighthouse is
    announced.
    """
    from tests.replica.conftest import MortalLighthouse

    first = MortalLighthouse(nursery)
    Announcement(first.address).write(path)
    seats = [*moving.take_group(0), *moving.take_group(1)]
    quorums = moving.meet(*seats, steps=[3] * 4)
    names = [seat.member for seat in seats]
    first.kill()
    moving.together(*[lambda seat=seat: seat.vote(3, True) for seat in seats])
    for seat in seats:
        seat.request_quorum(4)
    with pytest.raises(TimeoutError):
        seats[0]._requested_quorum.result(0.5)  # no lighthouse answers
    second = MortalLighthouse(nursery)
    Announcement(second.address, job="78").write(path)
    after = moving.together(*[seat.await_quorum for seat in seats])
    assert [seat.member for seat in seats] == names
    assert [quorum.members for quorum in after] == [quorum.members for quorum in quorums]
    assert {quorum.max_step for quorum in after} == {4}
    moved = [event for seat in seats for event in named(seat, "lighthouse_moved")]
    assert [(event["former"], event["address"], event["job"]) for event in moved] == [
        (first.address, second.address, "78")
    ] * 2


def test_a_newcomer_waits_for_the_successor_of_one_that_refuses_it(
    moving: Any,
    path: Path,
    start_lighthouse: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier run's lighthouse, with another token, may still be announced."""
    former, present = start_lighthouse(), start_lighthouse()
    Announcement(former).write(path)

    def refuses(address: LighthouseAddress, seconds: float) -> bool:
        if str(address) == present:
            return False
        Announcement(present).write(path)
        return True

    monkeypatch.setattr(LighthouseAddress, "refuses", refuses)
    assert moving.meet(moving.take(0))[0].slots == [0]


def test_a_group_in_the_midst_of_a_step_is_waited_for(
    moving: Any, path: Path, start_lighthouse: Any
) -> None:
    """The group follows during its step.

    The successor knows no group, and gives no quorum without this one.
    """
    Announcement(start_lighthouse()).write(path)
    early, late = moving.take(0), moving.take(1)
    moving.meet(early, late, steps=[3, 3])
    moving.together(lambda: early.vote(3, True), lambda: late.vote(3, True))
    Announcement(start_lighthouse()).write(path)
    early.request_quorum(4)
    with pytest.raises(TimeoutError):
        early._requested_quorum.result(1.5)
    late.request_quorum(4)
    assert [quorum.slots for quorum in moving.together(early.await_quorum, late.await_quorum)] == [
        [0, 1],
        [0, 1],
    ]


def test_a_file_that_cannot_be_read_makes_no_lighthouse_count(
    moving: Any, path: Path, start_lighthouse: Any
) -> None:
    """Changed members count only from the announced lighthouse.

    An unreadable file does not show which one that is.
    """
    announced = Announcement(start_lighthouse())
    announced.write(path)
    one, other = moving.take(0), moving.take(1)
    path.rename(path.with_name("away"))
    one.request_quorum(0)
    other.request_quorum(0)
    with pytest.raises(TimeoutError):
        one._requested_quorum.result(1.0)
    announced.write(path)
    assert [quorum.slots for quorum in moving.meet(one, other)] == [[0, 1], [0, 1]]


def test_one_that_was_only_slow_gives_no_quorum_any_more(
    moving: Any, path: Path, start_lighthouse: Any
) -> None:
    """A successor is announced and one group has followed.

    The old lighthouse still answers the other group.
    """
    Announcement(start_lighthouse()).write(path)
    one, other = moving.take(0), moving.take(1)
    moving.meet(one, other, steps=[3, 3])
    moving.together(lambda: one.vote(3, True), lambda: other.vote(3, True))
    other._seat._follower.close()  # as if shared storage showed the file late
    successor = start_lighthouse()
    Announcement(successor).write(path)
    one._events.wait_for("lighthouse_moved")
    one.request_quorum(4)
    other.request_quorum(4)
    assert [quorum.slots for quorum in moving.together(one.await_quorum, other.await_quorum)] == [
        [0, 1],
        [0, 1],
    ]
    assert {str(seat._seat._lighthouse) for seat in (one, other)} == {successor}


def test_a_first_start_waits_for_the_successor(
    moving: Any, path: Path, start_lighthouse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names a lighthouse that is gone. The group waits, because Slurm starts another
    one.
    """
    monkeypatch.setattr("titan_ft.membership.seat.CONNECT_SECONDS", 0.3)
    Announcement("http://127.0.0.1:9").write(path)
    taken = moving.submit(lambda: moving.take(0))
    with pytest.raises(TimeoutError):
        taken.result(1.0)
    Announcement(start_lighthouse()).write(path)
    (quorum,) = moving.meet(taken.result(DEADLINE))
    assert quorum.slots == [0]


def test_a_name_that_stands_for_another_address(
    seats: Any, monkeypatch: pytest.MonkeyPatch, nursery: subprocess.Popen[str]
) -> None:
    """The name is resolved again only when no lighthouse answers."""
    from tests.replica.conftest import MortalLighthouse
    from titan_ft.run import lighthouse as where

    numbers = ["10.0.0.1"]
    monkeypatch.setattr(where, "_resolve", lambda url: iter(numbers))
    mortal = MortalLighthouse(nursery)
    seats.lighthouse = mortal.address.replace("127.0.0.1", "localhost")
    seat = seats.take(0)
    seats.meet(seat)
    numbers[:] = ["10.0.0.2"]
    time.sleep(2.5)  # two looks without a resolution of the name
    assert not named(seat, "lighthouse_moved")
    mortal.kill()
    mortal.start()
    seat._events.wait_for("lighthouse_moved")
    seats.meet(seat)
