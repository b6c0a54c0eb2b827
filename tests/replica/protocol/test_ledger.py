# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ledger: entries on the wire, commits, and shares.

Its shards do not depend on the groups.
"""

from __future__ import annotations

import json

import pytest

from titan_ft.protocol.ledger import Entry, Ledger, deal_anew, decode, encode, share_out
from titan_ft.protocol.member import GroupProcess


def entry(
    slot: int, first_batch: int, num_batches: int = 2, state: bytes = b"\0state\n\xff"
) -> Entry:
    return Entry(slot, first_batch, num_batches, state)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry(0, 0)],
        [entry(3, 7, 1, b""), entry(0, 2**40, 5, bytes(range(256)) * 9)],
        [entry(0, 1, state=b"one"), entry(1, 2, state=b"second"), entry(2, 3, state=b"3")],
    ],
)
def test_entries_survive_the_wire(entries: list[Entry]) -> None:
    """A loader's state comes back with any bytes. An empty list takes no bytes."""
    data = encode(entries)
    assert decode(data) == entries
    assert bool(data) == bool(entries)


def processes(*slots: int) -> list[GroupProcess]:
    """Return the processes of groups."""
    return [(slot, 100.0 + slot) for slot in slots]


def test_a_commit_moves_its_slots_only() -> None:
    """Slots without data in the update stay where they are."""
    ledger = Ledger(3)
    ledger.advance([entry(0, 0), entry(2, 0, 1, b"two")], readers=processes(0, 2))
    ledger.advance([entry(0, 2, 3, b"later")], readers=processes(0))
    assert [ledger.count_committed(slot) for slot in range(3)] == [5, 0, 1]
    assert [ledger.loader_state(slot) for slot in range(3)] == [b"later", None, b"two"]
    assert ledger.readers == tuple(processes(0))


@pytest.mark.parametrize("first_batch", [0, 3])
def test_a_repeated_or_skipped_batch_is_an_error(first_batch: int) -> None:
    """The batches of a commit must continue exactly where the ledger ends."""
    ledger = Ledger(1)
    ledger.advance([entry(0, 0)], readers=processes(0))
    with pytest.raises(ValueError, match="slot 0 is trained up to batch 2"):
        ledger.advance([entry(0, first_batch)], readers=processes(0))


def test_it_heals_to_a_joiner_as_json() -> None:
    """A joiner's ledger equals the donor's after a trip through a snapshot's header."""
    ledger, joiner = Ledger(3), Ledger(3)
    ledger.advance([entry(0, 0), entry(2, 0)], readers=processes(0, 2))
    joiner.advance([entry(1, 0)], readers=processes(1))  # its own values are void
    joiner.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert joiner.state_dict() == ledger.state_dict()
    assert [joiner.count_committed(slot) for slot in range(3)] == [2, 0, 2]
    assert joiner.loader_state(1) is None


def test_shards_carry_over_to_another_split_into_groups() -> None:
    """Two groups of two data ranks continue where four groups of one rank stopped.

    The job has the same shards.
    """
    before = Ledger(4)
    before.advance(
        [entry(slot, 0, slot + 1, bytes([slot])) for slot in range(4)],
        readers=processes(0, 1, 2, 3),
    )
    saved = before.shards()
    assert sorted(saved) == ["0", "1", "2", "3"]
    ranks = [Ledger(2, shard, 2) for shard in range(2)]
    for ledger in ranks:
        ledger.load_shards(saved)
    assert [[ledger.count_committed(slot) for slot in range(2)] for ledger in ranks] == [
        [1, 3],
        [2, 4],
    ]
    assert [[ledger.loader_state(slot) for slot in range(2)] for ledger in ranks] == [
        [b"\0", b"\2"],
        [b"\1", b"\3"],
    ]
    assert ranks[0].shards() | ranks[1].shards() == saved


def test_a_shard_that_was_not_begun_stays_so() -> None:
    """A slot without a committed batch is read from its beginning after a resume as well."""
    ledger = Ledger(2)
    ledger.advance([entry(1, 0)], readers=processes(1))  # its own values are void
    ledger.load_shards(Ledger(2).shards())
    assert ledger.loader_state(1) is None
    assert ledger.count_committed(1) == 0


def test_absent_slots_are_dealt_out_evenly() -> None:
    """Each reader gets slots in turn, in the same order everywhere.

    Readers without a share are in the answer as well.
    """
    assert share_out([5, 1, 3, 4], [0, 2, 6]) == {0: [1, 5], 2: [3], 6: [4]}
    assert share_out([], [0, 2]) == {0: [], 2: []}
    assert share_out([1], []) == {}, "no group has made an update yet"


def test_readers_that_are_gone_leave_their_shares_to_the_others() -> None:
    """The last update gives the shares. Groups may be lost one after the other."""
    ledger = Ledger(6)
    ledger.advance([], readers=processes(0, 2, 3, 5))
    shares = ledger.shares()
    zero, two, three, five = processes(0, 2, 3, 5)
    assert shares == {zero: [0, 1], two: [2, 4], three: [3], five: [5]}
    newcomer = processes(1)
    assert deal_anew(shares, [zero, *newcomer, two, three, five]) == {
        zero: [],
        two: [],
        three: [],
        five: [],
    }
    started_again = (0, zero[1] + 1.0)
    assert deal_anew(shares, [started_again, two, three, five]) == {two: [0], three: [1], five: []}
    assert deal_anew(shares, [started_again, two, three, five]) == {two: [], three: [], five: []}, (
        "taken over once"
    )
    assert deal_anew(shares, [three, five]) == {three: [0, 4], five: [2]}, (
        "the slots that were taken over as well"
    )
    assert shares == {three: [3, 1, 0, 4], five: [5, 2]}
    assert deal_anew(shares, newcomer) == {}
