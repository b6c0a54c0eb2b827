# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How the members of a quorum meet, beside what `test_membership.py` tests with a lighthouse."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import MagicMock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from tests.replica.conftest import Trees
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.rendezvous import Rendezvous, find_host
from titan_ft.protocol.member import Member


def serve(port: int = 0) -> TCPStore:
    """Open a group's store at a port of this host."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def meet(key: str, members: tuple[Member, Member], ends: tuple[Rendezvous, Rendezvous]) -> list[str | None]:
    """Let two groups build the process group of a quorum; returns what went wrong in each."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda end, own: end.configure(key, 1, members, own, 0), ends, members))


def rendezvous(control: ControlTree, slot: int) -> Rendezvous:
    address = f"127.0.0.1:{slot}"
    return Rendezvous(
        MagicMock(), timedelta(seconds=10), control=control, group_rank=0, group_world_size=1, address=address
    )


def test_another_process_serves_its_store_at_the_same_port(trees: Trees) -> None:
    """The lowest group is started again where the port is fixed (torchrun's --master-port): the others meet it at once.

    A connection to the store of the process that died is of no use, and to find that out by an exchange that breaks
    would keep all the others for the rendezvous's whole timeout.
    """
    store = serve()
    lower, upper = (Member(slot, 1.0, f"unique-{slot}", "c", "j", f"127.0.0.1:{store.port}") for slot in range(2))
    survivor = rendezvous(trees.connect(), 1)
    assert meet("first", (lower, upper), (rendezvous(trees.connect(), 0), survivor)) == [None, None]

    port = store.port
    del store
    store = serve(port)
    reborn = Member(0, 2.0, "unique-0-again", "c", "j", f"127.0.0.1:{store.port}")
    assert meet("second", (reborn, upper), (rendezvous(trees.connect(), 0), survivor)) == [None, None]


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "most"), [(1, 2, 2), (8, 30, 240), (8, 100, 300), (64, 30, 360), (8192, 12, 8196)]
)
def test_ranks_of_large_quorums_meet_at_several_stores(num_ranks: int, num_groups: int, most: int) -> None:
    """One store answered the ranks of all groups. A small quorum still meets at its first member."""
    members = [Member(slot, 1.0, f"process {slot}", "digest", "job", f"10.0.0.{slot}:1") for slot in range(num_groups)]
    hosts = [find_host(members, rank, num_ranks) for rank in range(num_ranks)]
    ranks_at_a_store = Counter(host.slot for host in hosts for _ in members)
    assert max(ranks_at_a_store.values()) <= most
    if num_ranks * num_groups < 256:
        assert set(hosts) == {members[0]}
