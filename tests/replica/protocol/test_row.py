# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The meaning of the members' rows: the holders, the counted gradients, the donors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from titan_ft.protocol.row import Row, Standing, descend, fold48
from titan_ft.protocol.verdict import judge

LARGEST = 2**48 - 1


def ready(slot: int, step: int = 7, **facts: float) -> Row:
    """Return the row of a training member.

    Unless told otherwise, it weighs 10 valid tokens and shows its bytes.
    """
    usual = {
        "standing": Standing.READY,
        "valid_tokens": 10,
        "tokens": 12,
        "digest": 9,
        "training": 1,
    }
    return Row(**{"slot": slot, "step": step, **usual, **facts})


def behind(slot: int, step: int = 0, **facts: float) -> Row:
    """Return the row of a member that asks for a donor."""
    return Row(**{"slot": slot, "standing": Standing.BEHIND, "step": step, **facts})


def test_row_survives_the_exchange() -> None:
    """Every field comes back from float64 with its value and type, even the largest 48-bit
    hashes.
    """
    row = Row(
        slot=3,
        standing=Standing.CATCHING_UP,
        step=1_000_000,
        seen_step=1_000_001,
        lineage=LARGEST,
        digest=LARGEST - 1,
        valid_tokens=2**40 + 1,
        tokens=2**40 + 2,
        loss=0.1 + 0.2,
        max_loss=1e-300,
        donor=2,
        from_step=999,
        waited_seconds=0.25,
        others_wait=1,
        seconds=0.125,
        saved_step=1000,
        leaving=1,
        nonfinite=True,
        forced=1,
        excluded=1,
        holding_back=1,
        training=1,
        opening=1,
        unfinished=1,
        asked_before_seconds=0.03125,
        ready_after_seconds=1.5,
        connecting=1,
        activity=3,
    )
    assert all(getattr(row, field.name) != field.default for field in dataclasses.fields(Row)), (
        "give new fields a value here"
    )
    decoded = Row.decode(
        torch.tensor(row.encode(), dtype=torch.float64).tolist(), nonfinite=row.nonfinite
    )
    assert decoded == row
    assert [type(value) for value in dataclasses.astuple(decoded)] == [
        type(v) for v in dataclasses.astuple(row)
    ]


def test_decode_refuses_a_row_of_another_width() -> None:
    """A row of another version's width is an error. Its fields are not shifted."""
    with pytest.raises(ValueError, match="zip"):
        Row.decode(ready(0).encode()[:-1], nonfinite=False)


@pytest.mark.parametrize(
    ("standing", "claims"),
    [
        (Standing.BEHIND, False),
        (Standing.CATCHING_UP, False),
        (Standing.READY, True),
        (Standing.FINISHED, True),
    ],
)
def test_standings_that_claim_the_state(standing: Standing, claims: bool) -> None:
    """Only members that train or have finished claim the job's state."""
    assert Row(slot=0, standing=standing, step=4).has_state is claims


def test_agreement_makes_everybody_holder_and_contributor() -> None:
    """With equal states all members contribute.

    The facts are summed, and the largest loss is kept.
    """
    verdict = judge(
        [
            ready(0, valid_tokens=10, tokens=12, loss=0.5, max_loss=3.0),
            ready(1, valid_tokens=7, tokens=12, loss=0.25, max_loss=4.0),
            ready(2, valid_tokens=1, tokens=12, loss=0.125, max_loss=2.0),
        ]
    )
    assert verdict.step == 7
    assert verdict.holders == verdict.contributors == (0, 1, 2)
    assert (verdict.valid_tokens, verdict.tokens, verdict.loss, verdict.max_loss) == (
        18,
        36,
        0.875,
        4.0,
    )
    assert (verdict.strays, verdict.tie, verdict.offering) == ((), False, (0, 1, 2))


def test_a_joiner_weighs_nothing() -> None:
    """A member that is behind is no holder, offers nothing, and adds no tokens or loss."""
    verdict = judge(
        [ready(0), behind(1, valid_tokens=99, tokens=99, loss=9.0, max_loss=9.0), ready(2)]
    )
    assert verdict.holders == verdict.contributors == (0, 2)
    assert (verdict.valid_tokens, verdict.tokens, verdict.loss, verdict.max_loss) == (
        20,
        24,
        0.0,
        0.0,
    )
    assert verdict.offering == (0, 2)
    assert verdict.strays == ()


def catching_up(slot: int, donor: int, **facts: float) -> Row:
    """Return the row of a member that fetches from slot `donor`.

    -1 = it pauses between two attempts.
    """
    return Row(
        **{"slot": slot, "standing": Standing.CATCHING_UP, "step": 0, "donor": donor, **facts}
    )


def test_a_member_that_catches_up_weighs_nothing() -> None:
    """A member that fetches is no holder yet."""
    verdict = judge([ready(0), catching_up(1, donor=2, valid_tokens=5), ready(2)])
    assert verdict.offering == verdict.holders == verdict.contributors == (0, 2)
    assert verdict.valid_tokens == 20


def test_a_group_that_has_not_started_offers_nothing_beside_groups_that_train() -> None:
    """It has their bytes, but its ledger has no readers.

    Ranks of a joiner could get different ledgers.
    """
    rows = [ready(0, training=0), behind(1), ready(2, training=1), ready(3, training=1)]
    verdict = judge(rows)
    assert (verdict.holders, verdict.offering) == ((0, 2, 3), (2, 3))
    assert judge([ready(0, training=0), behind(1)]).offering == (0,)


@pytest.mark.parametrize("field", ["digest", "lineage"])
def test_the_majority_names_the_stray(field: str) -> None:
    """A member whose digest or lineage differs from the majority's is a stray, and does not
    contribute.
    """
    verdict = judge([ready(0, **{field: 5}), ready(1, **{field: 6}), ready(2, **{field: 5})])
    assert verdict.strays == (1,)
    assert verdict.holders == verdict.contributors == (0, 2)
    assert verdict.valid_tokens == 20
    assert not verdict.tie


def test_the_majority_wins_wherever_it_stands() -> None:
    """The stray may have the lowest slot."""
    for field in ("digest", "lineage"):
        assert judge(
            [ready(0, **{field: 6}), ready(1, **{field: 5}), ready(2, **{field: 5})]
        ).strays == (0,)


@pytest.mark.parametrize("older", [5, 6])
def test_a_claim_of_an_older_step_is_a_stray(older: int) -> None:
    """A member that claims the state with fewer updates holds nothing."""
    verdict = judge([ready(0, step=older), ready(1, step=7)])
    assert verdict.step == 7
    assert verdict.holders == (1,)
    assert verdict.strays == (0,)


def test_a_group_ahead_of_most_goes_back() -> None:
    """The exchange was complete for one group and broke for two.

    They keep their gradients, and the one group heals.
    """
    verdict = judge([ready(0, step=6), ready(1, step=7), ready(2, step=6)])
    assert verdict.step == 6
    assert verdict.holders == verdict.contributors == (0, 2)
    assert verdict.strays == (1,)
    assert verdict.corrupt == ()


@pytest.mark.parametrize("standing", [Standing.BEHIND, Standing.CATCHING_UP, Standing.FINISHED])
def test_only_groups_that_train_outvote_a_group_ahead(standing: Standing) -> None:
    """Joiners have no gradients to lose. Two updates ahead are not from one broken exchange."""
    rear = [Row(slot=slot, standing=standing, step=6, digest=9) for slot in (0, 2, 3)]
    assert judge([rear[0], ready(1, step=7), *rear[1:]]).step == 7
    assert judge([ready(0, step=5), ready(1, step=7), ready(2, step=5)]).step == 7


def test_a_member_without_a_digest_does_not_differ() -> None:
    """The member trains on, and no joiner's state is confirmed."""
    verdict = judge([ready(0, digest=0), ready(1, digest=5), ready(2, digest=5), behind(3)])
    assert verdict.holders == verdict.contributors == (0, 1, 2)
    assert verdict.digest == 5
    assert not verdict.verified
    assert judge([ready(0, digest=0), ready(1, digest=5)]).strays == ()


def test_a_corrupt_group_offers_nothing() -> None:
    """A group with the majority's lineage and other bytes is named, and never serves the state."""
    verdict = judge([ready(0, digest=6), ready(1, digest=5), ready(2, digest=5), behind(3)])
    assert verdict.corrupt == verdict.strays == (0,)
    assert verdict.offering == (1, 2)
    assert judge([ready(0, lineage=6), ready(1, lineage=5), ready(2, lineage=5)]).corrupt == ()


def test_two_against_two_is_a_tie_without_holders() -> None:
    """Bytes of one lineage differ without a majority. No member counts, contributes or serves."""
    verdict = judge(
        [ready(0, digest=1), ready(1, digest=1), ready(2, digest=2), ready(3, digest=2), behind(4)]
    )
    assert verdict.tie
    assert verdict.holders == verdict.contributors == ()
    assert verdict.offering == ()
    assert verdict.valid_tokens == 0


def test_equally_common_lineages_are_no_tie() -> None:
    """States of different quorums are both sound. All members take the lowest rank's lineage."""
    verdict = judge([behind(0), ready(1, lineage=9), ready(2, lineage=4), behind(3)])
    assert not verdict.tie
    assert verdict.holders == (1,)
    assert verdict.strays == (2,)
    assert verdict.offering == (1,)


def test_a_lineage_is_chosen_before_digests_are_compared() -> None:
    """Digests of another lineage do not count. A tie can only be within the chosen lineage."""
    rows = [
        ready(0, lineage=1, digest=1),
        ready(1, lineage=1, digest=2),
        ready(2, lineage=2, digest=2),
    ]
    assert judge(rows).tie
    rows = [
        ready(0, lineage=1, digest=1),
        ready(1, lineage=1, digest=1),
        ready(2, lineage=2, digest=2),
    ]
    assert judge(rows).holders == (0, 1)
    assert judge([*rows, ready(3, lineage=2, digest=3)]).holders == (0, 1)


def test_a_plurality_wins() -> None:
    """The most frequent state wins, even without an absolute majority."""
    verdict = judge(
        [ready(0, digest=1), ready(1, digest=2), ready(2, digest=3), ready(3, digest=2)]
    )
    assert not verdict.tie
    assert verdict.holders == (1, 3)
    assert verdict.strays == (0, 2)


def test_a_tie_before_the_first_step_goes_to_the_lowest_slot() -> None:
    """Initial states are equally good.

    The others heal from the lowest slot, and the job does not end.
    """
    verdict = judge(
        [
            behind(0),
            ready(1, step=0, digest=8),
            ready(2, step=0, digest=9),
            ready(3, step=0, digest=7),
        ]
    )
    assert not verdict.tie
    assert verdict.holders == verdict.contributors == (1,)
    assert verdict.strays == (2, 3)
    assert verdict.offering == (1,)


def test_a_member_without_valid_tokens_holds_but_does_not_contribute() -> None:
    """A batch without a label that counts gives no gradient.

    The member is no participant of the update.
    """
    verdict = judge([ready(0), ready(1, valid_tokens=0, tokens=12, max_loss=9.0)])
    assert verdict.holders == (0, 1)
    assert verdict.contributors == (0,)
    assert (verdict.valid_tokens, verdict.tokens, verdict.max_loss) == (10, 12, 0.0)


def test_no_member_has_a_valid_token() -> None:
    """Without contributors all sums are zero, and there is no update."""
    verdict = judge([ready(0, valid_tokens=0), ready(1, valid_tokens=0)])
    assert verdict.contributors == ()
    assert (verdict.valid_tokens, verdict.tokens, verdict.loss, verdict.max_loss) == (
        0,
        0,
        0.0,
        0.0,
    )


def test_a_finished_member_serves_but_does_not_contribute() -> None:
    """The member holds the final state and offers it, and adds nothing to an update."""
    verdict = judge(
        [Row(slot=0, standing=Standing.FINISHED, step=7, valid_tokens=10, digest=9), behind(1)]
    )
    assert verdict.holders == (0,)
    assert verdict.contributors == ()
    assert verdict.offering == (0,)


def test_all_members_are_behind() -> None:
    """Without a claim there is no holder, donor or stray.

    The latest state that is left gives the step.
    """
    verdict = judge(
        [behind(0, step=4), behind(1, step=6), Row(slot=2, standing=Standing.CATCHING_UP, step=0)]
    )
    assert verdict.step == 6
    assert verdict.holders == verdict.contributors == verdict.strays == ()
    assert verdict.offering == ()
    assert not verdict.tie


def test_a_claim_counts_more_than_a_later_step_without_one() -> None:
    """The step of a member that is behind does not count for the job's."""
    assert judge([ready(0, step=5), behind(1, step=9)]).step == 5


def test_every_member_comes_to_the_same_verdict() -> None:
    """The verdict depends on the rows alone. Decoded anywhere, they give the same decision."""
    rows = [ready(0, loss=0.1), behind(1), ready(2, digest=4, loss=0.2), ready(3, loss=0.3)]
    there = [
        Row.decode(torch.tensor(row.encode(), dtype=torch.float64).tolist(), False) for row in rows
    ]
    assert judge(there) == judge(rows)


def test_lineages_differ_by_parent_quorum_step_and_what_they_are_made_of() -> None:
    """States with different histories have different lineages.

    Equal histories have equal lineages.
    """
    base = descend(0, "1/abc", 1, "[0]")
    assert base == descend(0, "1/abc", 1, "[0]")
    others = {
        descend(0, "2/abc", 1, "[0]"),
        descend(0, "1/abd", 1, "[0]"),
        descend(0, "1/abc", 2, "[0]"),
        descend(0, "1/abc", 1, "[0, 1]"),
        descend(base, "1/abc", 1, "[0]"),
    }
    assert len(others | {base}) == 6


def test_hashes_fit_into_a_float64() -> None:
    """A hash of a row survives float64; it has more than 40 bits of freedom."""
    hashes = [fold48(str(number)) for number in range(2000)]
    assert all(int(float(value)) == value <= LARGEST for value in hashes)
    assert len(set(hashes)) == len(hashes)
    assert max(hashes) > 2**47
