# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The meeting of a quorum's members.

`test_membership.py` tests it with a lighthouse.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import MappingProxyType
from unittest.mock import MagicMock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from tests.replica.conftest import Trees
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.process_group import build_process_group
from titan_ft.membership.rendezvous import Rendezvous, find_leader, find_limit
from titan_ft.protocol.member import Member


def serve(port: int = 0) -> TCPStore:
    """Open a group's store at a port of this host."""
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def meet(
    key: str, members: tuple[Member, Member], ends: tuple[Rendezvous, Rendezvous]
) -> list[str | None]:
    """Let two groups build the process group of a quorum. Return the error of each."""
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda end, own: end.configure(key, 1, members, own, 0), ends, members)
        )


def rendezvous(control: ControlTree, slot: int) -> Rendezvous:
    address = f"127.0.0.1:{slot}"
    return Rendezvous(
        MagicMock(),
        timedelta(seconds=10),
        control=control,
        group_rank=0,
        group_world_size=1,
        address=address,
    )


def test_another_process_serves_its_store_at_the_same_port(trees: Trees) -> None:
    """The leader restarts at a fixed port (torchrun --master-port). The others meet it at once.

    A connection to the dead process is of no use. A broken exchange would show that only after the
    whole timeout of the meeting.
    """
    store = serve()
    lower, upper = (
        Member(slot, 1.0, f"unique-{slot}", "c", "j", f"127.0.0.1:{store.port}")
        for slot in range(2)
    )
    survivor = rendezvous(trees.connect(), 1)
    assert meet("first", (lower, upper), (rendezvous(trees.connect(), 0), survivor)) == [None, None]

    port = store.port
    del store
    store = serve(port)
    reborn = Member(0, 2.0, "unique-0-again", "c", "j", f"127.0.0.1:{store.port}")
    assert meet("second", (reborn, upper), (rendezvous(trees.connect(), 0), survivor)) == [
        None,
        None,
    ]


def test_what_a_stranger_writes_is_no_address(trees: Trees) -> None:
    """A forged step would turn holders into joiners.

    Joiners would ask a forged address for the state.
    """
    store = serve()
    pair = tuple(
        Member(slot, 1.0 + slot, f"unique-{slot}", "c", "j", f"127.0.0.1:{store.port}", token="t")
        for slot in range(2)
    )
    end = rendezvous(trees.connect(), 0)
    store.set("titan_ft/first/1/0/1", "10.6.6.6:1 1000000")
    wrong = end.configure("first", 1, pair, pair[0], 0)
    assert wrong is not None
    assert "no valid seal" in wrong
    assert (end.max_step, end.addresses) == (0, {})


def test_a_store_keeps_the_keys_of_the_last_meeting_only(trees: Trees) -> None:
    """Otherwise each change of members would leave their addresses, and those of Gloo."""
    store = serve()
    quorum = tuple(
        Member(slot, 1.0 + slot, f"unique-{slot}", "c", "j", f"127.0.0.1:{store.port}")
        for slot in range(2)
    )
    timeout = timedelta(seconds=10)
    ends = [
        Rendezvous(
            build_process_group("gloo", timeout, "127.0.0.1"),
            timeout,
            control=trees.connect(),
            group_rank=0,
            group_world_size=1,
            address=f"127.0.0.1:{slot}",
        )
        for slot in range(2)
    ]
    assert meet("first", quorum, (ends[0], ends[1])) == [None, None]
    num_keys = store.num_keys()
    for number in range(5):
        assert meet(f"later {number}", quorum, (ends[0], ends[1])) == [None, None]
    deadline = time.monotonic() + 10.0
    while store.num_keys() > num_keys:
        assert time.monotonic() < deadline, store.list_keys()
        time.sleep(0.01)
    for end in ends:
        end.close()


def members(slots: Iterable[int], came: Mapping[int, float] = MappingProxyType({})) -> list[Member]:
    """Return members of these slots.

    Args:
        came: start of a slot's process; 1.0 for the first processes.
    """
    return [
        Member(slot, time, f"{slot} {time}", "digest", "job", f"10.0.0.{slot}:1")
        for slot in slots
        for time in (came.get(slot, 1.0 + slot / 1000),)
    ]


def leaders(quorum: Sequence[Member], num_ranks: int) -> list[Member]:
    """Return the leader of each column."""
    return [find_leader(quorum, rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "most"), [(8, 30, 3), (8, 300, 2), (64, 30, 12), (8192, 12, 1500)]
)
def test_columns_meet_at_the_stores_of_many_groups(
    num_ranks: int, num_groups: int, most: int
) -> None:
    """A store serves about twice the ranks of a group, or one column. Before, one store served
    all.
    """
    columns = Counter(leaders(members(range(num_groups)), num_ranks))
    assert max(columns.values()) <= most


def test_all_members_find_the_same_leader() -> None:
    """The order of the lighthouse's names makes no difference, and neither does the member that
    looks.
    """
    quorum = members(range(20))
    assert leaders(quorum, 50) == leaders(quorum[::-1], 50)


def test_a_death_moves_the_columns_of_the_dead_group_and_few_others() -> None:
    """Each moved column costs each of its ranks a new connection."""
    before = members(range(40))
    survivors = [member for member in before if member.slot != 7]
    former, moved = leaders(before, 1000), leaders(survivors, 1000)
    others = [(old, new) for old, new in zip(former, moved, strict=True) if old.slot != 7]
    assert len(others) < 1000, "group 7 led columns"
    # One more group is among the older half now, and gets its share of the columns.
    assert sum(old != new for old, new in others) < 2 * 1000 / 20
    assert {new.slot for old, new in others if old != new} <= {20}


@pytest.mark.parametrize("num_groups", [2, 3, 30])
def test_a_group_that_comes_moves_no_column(num_groups: int) -> None:
    """The others would have to connect to the newcomer while it starts.

    Of two groups, the older one leads.
    """
    for slot in range(num_groups):
        there = members(other for other in range(num_groups) if other != slot)
        whole = members(range(num_groups), {slot: 9.0})
        assert slot not in {leader.slot for leader in leaders(whole, 100)}
        if num_groups % 2 == 0:  # the older half is the same as before
            assert leaders(whole, 100) == leaders(there, 100)


def test_the_limit_of_a_meeting_grows() -> None:
    """With a constant of two seconds, the meetings of many or large groups ended again and
    again.
    """
    assert find_limit(2, 1) == pytest.approx(2.0, abs=0.1)
    assert find_limit(300, 8) == pytest.approx(5.0, abs=0.1)
    assert find_limit(12, 8192) == pytest.approx(10.3, abs=0.1)
