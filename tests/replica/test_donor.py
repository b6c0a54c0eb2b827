# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""When a group copies its state for joiners, and how long it keeps the copy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.config import FaultTolerance
from titan_ft.engine.donor import Donor
from titan_ft.protocol import decision
from titan_ft.protocol.decision import Round, judge
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.row import Row, Standing
from titan_ft.transfer.snapshot import WHOLE, Part
from titan_ft.transfer.wire import Message

ME, OTHER, THIRD, FIRST, SECOND = range(5)  # slots: three that hold the state, two that heal


class World:
    """A donor, rounds that it takes in, and what it serves."""

    def __init__(self) -> None:
        self.step, self.copies, self.serves = 5, 0, 0  # serves: step of what it serves; 0 = nothing
        self.shared = (-1, 0)  # step and lineage that another thread may copy
        self.has_buffers = False
        self.is_scarce = False  # the host's memory
        self.parts: list[Part] = []  # of the state, that were copied
        self.offers: list[Message | None] = []
        self.take: Callable[[int], None] = lambda step: None  # what the server calls for who wants what is offered
        state: Any = SimpleNamespace(
            copy=self._copy,
            reuse=lambda snapshot: None,
            share=self._share,
            unshare=self._unshare,
            copy_shared=self._copy_shared,
        )
        self._server: Any = SimpleNamespace(
            publish=self._publish,
            withdraw=self._withdraw,
            offer=self._offer,
            wanted=False,
            snapshot=None,
        )
        self._donor = Donor(state, self._server)

    def offer(self) -> None:
        """Let the group make an update."""
        self._donor.offer(Position(step=self.step, lineage=1000 + self.step))

    def _share(self, step: int, lineage: int) -> bool:
        self.shared = (step, lineage)
        return not self.has_buffers

    def _unshare(self) -> None:
        self.shared = (-1, 0)

    def retract(self) -> None:
        """Let the group find out that its state is not the others'."""
        self._donor.retract()

    def _copy_shared(self, step: int) -> Any:
        return self._copy(*self.shared, WHOLE) if self.shared[0] == step else None

    def _offer(self, offer: Message | None, copy: Callable[[int], None] | None = None) -> None:
        self.offers.append(offer)
        self.take = copy or (lambda step: None)

    def _copy(self, step: int, lineage: int, part: Part) -> Any:
        self.copies += 1
        self.parts.append(part if self.is_scarce else WHOLE)
        return SimpleNamespace(step=step, lineage=lineage, part=self.parts[-1], payload=torch.empty(8))

    def _publish(self, snapshot: Any, seconds: float) -> None:
        self.serves, self._server.snapshot = snapshot.step, snapshot

    def _withdraw(self) -> Any:
        self.serves, self._server.snapshot = 0, None

    def make_round(self, *joiners: Row, heal_donors: int = 8, tokens: int = 0, repeats: bool = False) -> Round:
        """Make a round, and the update that it is unless it `repeats`; the donor is the lowest slot's."""
        held = {"lineage": 1000 + self.step, "digest": 77, "training": 1, "valid_tokens": tokens, "tokens": tokens}
        rows = [*(Row(slot, Standing.READY, self.step, **held) for slot in (ME, OTHER, THIRD)), *joiners]
        members = tuple(Member(row.slot, 0.0, f"process {row.slot}", "c0ffee") for row in rows)
        made = Round(Quorum("1/a", 0, members, self.step), rows, judge(rows), [])
        config = FaultTolerance(enable=True, group_size=5, heal_donors=heal_donors)
        position = Position(step=self.step, lineage=1000 + self.step)
        self._donor.serve(made, position, decision.find_donors(made, config))
        self.step += not repeats
        return made


def behind(slot: int, heals: int = 0) -> Row:
    """Return the row of a group that asks for a donor; with as many `heals` another one."""
    return Row(slot, Standing.BEHIND, 0, heals=heals)


def fetching(slot: int, donor: int, from_step: int = 5) -> Row:
    """Return the row of a group that was sent to `donor`, behind the update `from_step`."""
    return Row(slot, Standing.CATCHING_UP, 0, heals=1, donor=donor, from_step=from_step)


@pytest.fixture
def world() -> World:
    """Provide a group that serves nobody."""
    return World()


def test_it_serves_the_joiner_that_is_sent_here(world: World) -> None:
    """From the round that names it until nobody fetches."""
    world.make_round(behind(FIRST))
    assert world.serves == 5
    for _ in range(3):
        world.make_round(fetching(FIRST, ME))
        assert (world.serves, world.copies) == (5, 1)
    world.make_round()
    assert world.serves == 0


def test_it_helps_the_donor_of_another_joiner(world: World) -> None:
    """Two joiners are sent to two donors in one round; each fetches from both, as long as one of them fetches."""
    made = world.make_round(behind(FIRST), behind(SECOND))
    assert made.verdict.donors == {3: ME, 4: OTHER}
    world.make_round(fetching(FIRST, ME), fetching(SECOND, OTHER))
    world.make_round(fetching(SECOND, OTHER))
    assert (world.serves, world.copies) == (5, 1), "the second joiner still fetches here as well"
    world.make_round()
    assert world.serves == 0


def test_it_copies_nothing_when_donors_are_enough(world: World) -> None:
    """With `heal_donors` 1 a group copies for those that are sent to it only."""
    world.make_round(behind(FIRST, heals=1), heal_donors=1)  # sent to the next slot's
    assert (world.serves, world.copies) == (0, 0)


def test_a_joiner_that_is_sent_here_comes_before_those_that_it_helps(world: World) -> None:
    """Those have other donors; who comes later would have none."""
    world.make_round(behind(FIRST), behind(SECOND))
    world.make_round(fetching(SECOND, OTHER))  # the first is healed
    world.make_round(fetching(SECOND, OTHER), behind(FIRST))
    assert world.serves == 7
    world.make_round(fetching(SECOND, OTHER), fetching(FIRST, ME, 7))
    assert (world.serves, world.copies) == (7, 2)
    world.make_round(fetching(SECOND, OTHER))
    assert world.serves == 0, "the second has found out that this group has another state now"


def test_it_goes_on_helping_while_another_joiner_is_sent_elsewhere(world: World) -> None:
    """A new copy would take the old one from who fetches it; the newcomer has donors enough."""
    world.make_round(behind(FIRST), behind(SECOND))
    world.make_round(fetching(SECOND, OTHER))
    made = world.make_round(fetching(SECOND, OTHER), behind(FIRST, heals=1))
    assert made.verdict.donors == {4: THIRD}
    assert (world.serves, world.copies) == (5, 1)


def test_a_joiner_whose_attempt_is_over_is_not_waited_for(world: World) -> None:
    """While it rests, its donors have their memory back."""
    world.make_round(behind(FIRST))
    world.make_round(fetching(FIRST, ME))
    world.make_round(Row(FIRST, Standing.CATCHING_UP, 0, heals=1, donor=-1))
    assert world.serves == 0


def test_a_joiner_that_fetches_although_this_group_voted_no_finds_a_copy(world: World) -> None:
    """The round that sent it here did not work on all ranks of this group, which has its step still."""
    world.make_round(fetching(FIRST, ME))
    assert (world.serves, world.copies) == (5, 1)


def test_the_successor_of_a_joiner_that_died_gets_the_state_that_it_fetches(world: World) -> None:
    """It took an offer behind a later update, and finds nobody in the way who reads the former one."""
    world.make_round(behind(FIRST))
    world.make_round(fetching(FIRST, ME))
    world.make_round(fetching(FIRST, ME, 7))
    assert (world.serves, world.copies) == (7, 2)


def test_a_joiner_with_another_offer_does_not_end_a_fetch(world: World) -> None:
    """Only one state is served, and who fetches it has come further."""
    world.make_round(behind(FIRST))
    world.make_round(fetching(FIRST, ME), fetching(SECOND, ME, 6))
    assert (world.serves, world.copies) == (5, 1)
    world.make_round(fetching(SECOND, ME, 6))
    assert world.serves == 0, "that state is gone"


def test_a_newcomer_takes_what_is_offered(world: World) -> None:
    """While the step is computed; it is served until nobody fetches it, as what a round has asked for."""
    world.offer()
    world.offer()
    assert [(offer["step"], offer["lineage"], offer["digest"]) for offer in world.offers if offer] == [(5, 1005, 0)] * 2
    assert world.copies == 0
    world.take(5)
    world.take(5)  # on another of its connections
    assert (world.serves, world.copies) == (5, 1)
    world.make_round(fetching(FIRST, ME))
    world.make_round(fetching(FIRST, OTHER))  # it helps
    assert (world.serves, world.copies) == (5, 1)
    world.make_round()
    assert world.serves == 0


def test_a_newcomer_that_does_not_come_to_the_round_is_served_no_more(world: World) -> None:
    """It has died, or found another state; the memory is wanted."""
    world.offer()
    world.take(5)
    world.make_round()
    assert world.serves == 0


def test_what_is_offered_serves_who_is_sent_here_in_the_same_round(world: World) -> None:
    """It is the same state: no second copy."""
    world.offer()
    world.take(5)
    world.make_round(fetching(FIRST, OTHER), behind(SECOND))
    assert (world.serves, world.copies) == (5, 1)
    world.make_round(fetching(SECOND, ME))
    assert (world.serves, world.copies) == (5, 1)


def test_a_copy_that_one_joiner_fetches_is_not_replaced(world: World) -> None:
    """Nor is a state copied that is not there any more."""
    world.make_round(behind(FIRST))
    world.offer()
    world.take(6)
    assert (world.serves, world.copies) == (5, 1)
    world.make_round()
    world.take(5)
    assert (world.serves, world.copies) == (0, 1)


def test_a_copy_for_who_is_not_in_the_round_is_not_made_again_before_its_update(world: World) -> None:
    """The state is outdated with it, and the optimizer would wait for the copy. As long as all wait, it is good."""
    world.offer()
    world.take(5)
    world.make_round()  # nobody gives anything: it is no update
    world.take(5)
    assert (world.serves, world.copies) == (5, 2)
    world.make_round(tokens=10)
    world.take(5)
    assert (world.serves, world.copies) == (0, 2)


def test_a_state_that_is_not_the_others_is_offered_no_more(world: World) -> None:
    """Who heals has nothing to give; and nobody asks it for a copy."""
    world.offer()
    take = world.take
    world.retract()
    take(5)
    assert (world.offers[-1], world.copies) == (None, 0)


def test_a_state_that_changes_between_updates_is_not_offered(world: World) -> None:
    """A forward may write its buffers while another thread reads them."""
    world.has_buffers = True
    world.offer()
    assert world.offers == []


def test_where_memory_is_scarce_each_donor_copies_a_part(world: World) -> None:
    """As large as their number says, also for two joiners that have the same donors; nobody else has one to give."""
    world.is_scarce = True
    world.make_round(behind(FIRST), behind(SECOND))
    assert world.parts == [Part(0, 3)]
    world.make_round()
    world.make_round(behind(FIRST), heal_donors=2)
    world.make_round()
    world.make_round(behind(FIRST), heal_donors=1)
    assert world.parts[1:] == [Part(0, 2), WHOLE]
    assert world.serves == 9


def test_a_part_does_not_do_for_a_joiner_that_has_other_donors(world: World) -> None:
    """The whole of the same state does, for both."""
    world.is_scarce = True
    world.make_round(behind(FIRST), behind(SECOND), heal_donors=2)  # from this one and the next, from the next two
    assert world.parts == [Part(0, 2)]
    world.make_round()
    world.make_round(behind(FIRST), repeats=True)
    world.make_round(fetching(FIRST, OTHER, 7), repeats=True)
    assert world.parts[1:] == [Part(0, 3)]
    made = world.make_round(fetching(FIRST, OTHER, 7), behind(SECOND))
    assert made.verdict.donors == {4: ME}
    assert (world.parts[2:], world.serves) == ([WHOLE], 7)


def test_who_comes_while_another_one_fetches_gets_all_from_who_it_is_sent_to(world: World) -> None:
    """Some donors serve the other one, and have no part for it."""
    world.is_scarce = True
    world.make_round(behind(FIRST))
    made = world.make_round(fetching(FIRST, OTHER), behind(SECOND))
    assert made.verdict.donors == {4: ME}
    assert (world.parts, world.serves) == ([Part(0, 3), WHOLE], 6)


def test_a_part_is_copied_once_however_long_the_others_wait(world: World) -> None:
    """For the joiner that fetches it: the state stays the same until that has come. A retry is from one donor."""
    world.is_scarce = True
    world.make_round(behind(FIRST), repeats=True)
    for _ in range(3):
        world.make_round(fetching(FIRST, ME), repeats=True)
    assert world.parts == [Part(0, 3)]
    world.make_round(behind(FIRST, heals=3), repeats=True)
    assert (world.parts, world.serves) == ([Part(0, 3), WHOLE], 5)


def test_an_offer_does_not_outlive_what_it_is_of(world: World) -> None:
    """Where a state is not shared any more, as on a host whose memory is scarce, none is offered."""
    world.offer()
    world.has_buffers = True
    world.offer()
    assert [None if offer is None else offer["step"] for offer in world.offers] == [5, None]
