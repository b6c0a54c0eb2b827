# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""When a group copies its state for joiners, and how long it keeps the copy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.engine.donor import Donor
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import Row, Standing
from titan_ft.protocol.verdict import judge
from titan_ft.transfer.snapshot import WHOLE, Part
from titan_ft.transfer.wire import Message

ME, OTHER, THIRD, FIRST, SECOND = range(5)  # slots: three groups hold the state, two heal


class Server:
    """Stands in for the state server. Records its calls, and has the wishes of joiners."""

    def __init__(self) -> None:
        self.snapshot: Any = None
        self.offers: list[Message | None] = []
        # Called for a joiner that asks for the offered state.
        self.take: Callable[[int, Part], None] = lambda step, part: None
        self.wanted_part: Part | None = None
        self.is_snapshot_kept = False

    def publish(self, snapshot: Any, seconds: float) -> None:
        self.snapshot, self.wanted_part, self.is_snapshot_kept = snapshot, None, True

    def withdraw(self) -> Any:
        snapshot, self.snapshot = self.snapshot, None
        return snapshot

    def keep_snapshot(self, is_kept: bool) -> None:
        self.is_snapshot_kept = is_kept

    def offer(self, offer: Message | None, copy: Callable[[int, Part], None] | None = None) -> None:
        self.offers.append(offer)
        self.take = copy or (lambda step, part: setattr(self, "wanted_part", part))

    @property
    def offered_step(self) -> int | None:
        offer = self.offers[-1] if self.offers else None
        return None if offer is None else offer["step"]


class World:
    """A donor with its server, and rounds for it."""

    def __init__(self) -> None:
        self.step, self.copies, self.reused = 5, 0, 0
        self.shared = (-1, 0)  # step and lineage of the state that another thread may copy
        self.has_buffers = False
        self.is_scarce = False  # the host is short of memory
        self.server = Server()
        state: Any = SimpleNamespace(
            copy=self._copy,
            reuse_memory=self._reuse_memory,
            allow_copying=self._allow_copying,
            forbid_copying=self._forbid_copying,
            copy_if_allowed=self._copy_if_allowed,
        )
        server: Any = self.server
        self.donor = Donor(state, server)

    @property
    def served(self) -> tuple[int, Part] | None:
        """Step and part of the served copy."""
        held = self.server.snapshot
        return None if held is None else (held.step, held.part)

    def offer(self) -> None:
        """Let the group make an update."""
        self.donor.offer(Position(step=self.step, lineage=1000 + self.step))

    def ask(self, part: Part = WHOLE, step: int | None = None) -> None:
        """Let a joiner ask for the state that is offered."""
        self.server.take(self.step if step is None else step, part)

    def _allow_copying(self, step: int, lineage: int) -> bool:
        self.shared = (step, lineage)
        return not self.has_buffers

    def _forbid_copying(self) -> None:
        self.shared = (-1, 0)

    def _copy_if_allowed(self, step: int, part: Part) -> Any:
        return self._copy(*self.shared, part) if self.shared[0] == step else None

    def _copy(self, step: int, lineage: int, part: Part) -> Any:
        self.copies += 1
        part = part if self.is_scarce else WHOLE
        return SimpleNamespace(step=step, lineage=lineage, part=part, payload=torch.empty(8))

    def _reuse_memory(self, snapshot: Any) -> None:
        self.reused += 1

    def make_round(
        self,
        *joiners: Row,
        is_update: bool = True,
        is_holder: bool = True,
        lineage: int | None = None,
    ) -> None:
        """Make a round. If it is an update, apply it."""
        if lineage is None:
            lineage = 1000 + self.step
        held = {"lineage": lineage, "digest": 77, "training": 1}
        rows = [
            *(Row(slot, Standing.READY, self.step, **held) for slot in (ME, OTHER, THIRD)),
            *joiners,
        ]
        members = tuple(Member(row.slot, 0.0, f"process {row.slot}", "c0ffee") for row in rows)
        if not is_holder:
            rows[0] = Row(ME, Standing.BEHIND, 0)
        made = Round(Quorum("1/a", 0, members, self.step), rows, judge(rows), [])
        self.donor.copy_after_round(
            made, Position(step=self.step, lineage=lineage), is_update=is_update
        )
        self.step += is_update


def fetching(slot: int, donor: int, from_step: int = 5) -> Row:
    """Return the row of a group that fetches the state after `from_step` from `donor`."""
    return Row(slot, Standing.CATCHING_UP, 0, donor=donor, from_step=from_step)


@pytest.fixture
def world() -> World:
    """Provide a group that offers its state and serves no joiner."""
    made = World()
    made.offer()
    return made


def test_the_offered_state_is_copied_for_a_joiner_that_asks(world: World) -> None:
    """The state is copied once, during the step, and served until no joiner fetches it."""
    (offer,) = world.server.offers
    assert offer is not None
    assert (offer["step"], offer["lineage"], offer["digest"]) == (5, 1005, 0)
    assert (world.served, world.copies) == (None, 0)
    world.ask()
    world.ask()  # the joiner asks on another connection
    assert (world.served, world.copies) == ((5, WHOLE), 1)
    # the joiner names this group first; group 1 helps
    for row in (fetching(FIRST, ME), fetching(FIRST, OTHER)):
        world.make_round(row)
        assert (world.served, world.copies) == ((5, WHOLE), 1)
    world.make_round()
    assert (world.served, world.reused) == (None, 1)


def test_the_time_of_the_last_step_goes_along(world: World) -> None:
    """With this time the joiner knows until when it may load the state.

    Before the second offer the time is unknown.
    """
    world.offer()
    first, second = (offer["milliseconds"] for offer in world.server.offers if offer is not None)
    assert first == 0
    assert 0 <= second < 20_000


def test_a_newcomer_that_does_not_come_to_the_update_is_served_no_more(world: World) -> None:
    """The newcomer has died, or found another state, so the memory is freed.

    While all groups wait, the state stays useful.
    """
    world.ask()
    world.make_round(is_update=False)
    assert world.served == (5, WHOLE)
    world.make_round()
    assert world.served is None


def test_a_state_is_not_copied_for_a_joiner_that_misses_its_update(world: World) -> None:
    """The update makes the state outdated, and the optimizer would wait for the copy."""
    world.make_round()
    world.ask(step=5)
    assert (world.served, world.copies) == (None, 0)


def test_a_joiner_that_names_this_group_finds_a_copy(world: World) -> None:
    """The joiner's request may come after the round, when the state is gone."""
    world.make_round(fetching(FIRST, OTHER))
    assert world.copies == 0, "the joiner may never ask here"
    world.offer()
    world.make_round(fetching(FIRST, ME, 6))
    assert (world.served, world.copies) == ((6, WHOLE), 1)


def test_a_state_that_may_change_is_copied_by_the_training_thread(world: World) -> None:
    """A forward may write buffers during a copy on another thread.

    So the next round copies, before the optimizer.
    """
    world.has_buffers = True
    world.offer()
    world.ask(Part(1, 2))
    assert world.copies == 0
    assert world.donor.has_waiting_joiner
    world.make_round(fetching(FIRST, OTHER))
    assert (world.served, world.copies, world.donor.has_waiting_joiner) == ((5, WHOLE), 1, False)


def test_a_changing_state_is_not_copied_for_a_joiner_that_misses_its_update(world: World) -> None:
    """While all groups wait, the state is copied."""
    world.has_buffers = True
    world.offer()
    world.ask()
    world.make_round()
    assert world.copies == 0
    world.offer()
    world.ask()
    world.make_round(is_update=False)
    assert (world.served, world.copies) == ((6, WHOLE), 1)


def test_a_group_that_lost_the_state_copies_nothing(world: World) -> None:
    """The round shows that its state is not the job's."""
    world.make_round(fetching(FIRST, ME), is_holder=False)
    assert world.copies == 0


def test_a_copy_that_its_only_donor_serves_is_not_replaced(world: World) -> None:
    """A later joiner needs a newer copy, and asks another group."""
    world.ask()
    world.make_round(fetching(FIRST, ME))
    world.offer()
    assert world.server.is_snapshot_kept, "so the server offers nothing"
    world.ask()
    world.make_round(fetching(FIRST, ME), fetching(SECOND, ME, 6))
    assert (world.served, world.copies) == ((5, WHOLE), 1)


def test_a_copy_of_another_lineage_is_replaced(world: World) -> None:
    """The group healed after the copy. No group goes on from the copied state of this step."""
    world.ask()
    world.make_round(fetching(FIRST, ME), is_update=False)
    assert world.server.is_snapshot_kept
    for number, lineage in enumerate((77, 78, 79), 1):
        position = Position(step=5, lineage=lineage)
        world.donor.offer(position)
        if lineage == 77:
            world.ask()
        elif lineage == 78:
            world.donor.copy_ahead(position)
        else:
            world.make_round(fetching(FIRST, ME), is_update=False, lineage=lineage)
        assert (world.server.snapshot.lineage, world.copies) == (lineage, 1 + number)


def test_a_copy_of_another_lineage_is_dropped_if_no_joiner_needs_it(world: World) -> None:
    """Its memory is free for the next copy."""
    world.ask()
    world.make_round(is_update=False, lineage=77)
    assert (world.served, world.reused) == (None, 1)


def test_a_donor_that_is_not_named_serves_a_later_joiner(world: World) -> None:
    """The first joiner still has its named donor."""
    world.ask()
    world.make_round(fetching(FIRST, OTHER))
    assert not world.server.is_snapshot_kept
    world.offer()
    world.ask()
    assert (world.served, world.copies) == ((6, WHOLE), 2)
    world.make_round(fetching(FIRST, OTHER), fetching(SECOND, ME, 6))
    assert world.served == (6, WHOLE)


def test_the_successor_of_a_joiner_that_died_finds_nobody_in_the_way(world: World) -> None:
    """The copy of the dead joiner goes with the first round without it."""
    world.ask()
    world.make_round(fetching(FIRST, ME))
    world.offer()
    world.make_round(fetching(FIRST, ME, 6))
    assert (world.served, world.copies) == ((6, WHOLE), 2)


def test_a_state_that_is_not_the_others_is_offered_no_more(world: World) -> None:
    """A group that heals offers nothing."""
    take = world.server.take
    world.donor.retract()
    take(5, WHOLE)
    assert (world.server.offers[-1], world.donor.offered_step, world.copies) == (None, None, 0)


def test_a_copy_ahead_of_a_request_is_made_once(world: World) -> None:
    """Rounds without an update may follow each other quickly.

    Without a joiner, the update drops the copy.
    """
    position = Position(step=5, lineage=1005)
    for _ in range(2):
        world.donor.copy_ahead(position)
        world.make_round(is_update=False)
    assert (world.served, world.copies) == ((5, WHOLE), 1)
    world.make_round()
    assert (world.served, world.reused) == (None, 1)


def test_compared_bytes_are_offered_until_that_is_taken_back(world: World) -> None:
    """In a round of several steps, the training thread copies the state between two steps."""
    position = Position(step=5, lineage=1005)
    world.donor.offer_compared(position, 77)
    assert world.server.offers[-1] == {"step": 5, "lineage": 1005, "digest": 77}
    world.ask()
    assert world.donor.has_waiting_joiner
    world.donor.copy(position)
    assert (world.served, world.donor.has_waiting_joiner) == ((5, WHOLE), False)
    world.donor.end_offer()
    assert world.donor.offered_step is None


# Donors whose hosts are short of memory


def test_each_donor_copies_its_part(world: World) -> None:
    """The joiner names the part, because it knows its donors."""
    world.is_scarce = True
    world.ask(Part(1, 3))
    assert world.served == (5, Part(1, 3))
    world.ask(Part(1, 3))
    assert world.copies == 1


def test_a_part_does_not_do_for_a_joiner_that_has_other_donors(world: World) -> None:
    """A copy of the whole state serves both joiners."""
    world.is_scarce = True
    world.ask(Part(1, 3))
    world.ask(Part(0, 2))
    assert (world.served, world.copies) == ((5, WHOLE), 2)
    world.ask(Part(1, 3))
    assert world.copies == 2


@pytest.mark.parametrize("in_round", [True, False])
def test_the_training_thread_replaces_a_part_by_the_whole(world: World, in_round: bool) -> None:
    """Otherwise two joiners would take the copy from each other again and again."""
    world.is_scarce = world.has_buffers = True
    world.offer()
    for part, served in ((Part(0, 2), Part(0, 2)), (Part(1, 2), WHOLE)):
        world.ask(part)
        if in_round:
            world.make_round(fetching(FIRST, OTHER), is_update=False)
        else:
            world.donor.copy(Position(step=5, lineage=1005))
        assert world.served == (5, served)


def test_a_retry_gets_the_whole(world: World) -> None:
    """A retry has one donor. The training thread makes the copy if no other thread may."""
    world.is_scarce = world.has_buffers = True
    world.offer()
    world.ask(Part(0, 2))
    world.make_round(fetching(FIRST, ME), is_update=False)
    assert world.served == (5, Part(0, 2))
    world.make_round(fetching(FIRST, ME), is_update=False)
    assert world.copies == 1, "whether or not the others wait"
    world.ask(WHOLE)
    world.make_round(fetching(FIRST, ME), is_update=False)
    assert (world.served, world.copies) == ((5, WHOLE), 2)
