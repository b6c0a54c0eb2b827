# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The phases of a heal and the transitions between them, as pure values.

    phase      the group ...                                      ends with
    ASKING     has no state, and asks holders for an offer        `start_fetch`
    FETCHING   fetches an offered state, and queues updates       `finish_fetch`
    REPLAYING  loads the state and replays the queued updates     `finish`
    READY      holds the job's state

Three transitions lead back to ASKING: `drop_outdated`, `drop_for_newer` and `drop_failed`.

The bytes of a fetched state are confirmed by a digest on which all holders agree. An offer may have
this digest already. Otherwise `confirm` takes it from a round of this group with the holders. Only
`roll_back` makes a group READY without a digest, because the group then keeps its own state.

`engine/heal.py` calls the transitions, and has the threads, the memory and the clocks. All ranks of
a group make the same transitions. See docs/heal.md.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from titan_ft.protocol.row import Standing

FIRST_PAUSE_SECONDS = 1.0
"""Pause before the third attempt of a heal. The second attempt follows the first at once. Each
further pause is twice as long, up to `MAX_PAUSE_SECONDS`."""
MAX_PAUSE_SECONDS = 64.0

NO_DIGEST = 0
"""In the place of a digest: the bytes have not been hashed, or the hashes differ. Rows travel as
numbers, so the absence is a number as well."""
NO_DONOR = -1
"""In the place of a donor's slot."""


@dataclass(frozen=True)
class Offer:
    """A state that groups hold until their next update.

    Attributes:
        slots: of the groups that offer the state; empty = no group offers a state.
        step: committed updates in the state.
        lineage: hash of the exchanges that made the state (`row.descend`).
        digest: of the state's bytes, if all holders have compared them; `NO_DIGEST` = a round must
            confirm the bytes.
        milliseconds: duration of the last step of the group in `slots[0]`; 0 = unknown. The joiner
            takes this as its first estimate of the time between two updates.
        elapsed_milliseconds: time from the update to that group's answer.
    """

    slots: tuple[int, ...]
    step: int
    lineage: int
    digest: int
    milliseconds: int = 0
    elapsed_milliseconds: int = field(default=0, compare=False)


NO_OFFER = Offer((), 0, 0, NO_DIGEST)


def choose_offer(offers: Sequence[Offer]) -> Offer:
    """Return the state in most of `offers`, with the slots of all groups that offer it.

    If several states are in equally many offers, the later state counts.
    """
    if not offers:
        return NO_OFFER
    by_state: dict[tuple[int, int], list[Offer]] = {}
    for offer in offers:
        by_state.setdefault((offer.step, offer.lineage), []).append(offer)

    def count_and_step(same_state: list[Offer]) -> tuple[int, int]:
        return len(same_state), same_state[0].step

    chosen = max(by_state.values(), key=count_and_step)
    slots: list[int] = []
    for offer in chosen:
        slots += offer.slots
    return replace(chosen[0], slots=tuple(slots))


def rotate(slots: Iterable[int], after: int) -> tuple[int, ...]:
    """Return `slots` in ascending order, beginning with the first slot above `after`.

    After the highest slot, the order goes on with the lowest one.
    """
    ascending = sorted(slots)
    start = bisect.bisect_right(ascending, after)
    return (*ascending[start:], *ascending[:start])


class Phase(enum.Enum):
    """A phase of a heal; see the table in this module's docstring."""

    ASKING = enum.auto()
    FETCHING = enum.auto()
    REPLAYING = enum.auto()
    READY = enum.auto()


class VoidError(Exception):
    """The fetched state is not the holders' state. The caller calls `drop_failed`."""


class OutdatedError(VoidError):
    """The holders have a newer state, without a donor's fault. The caller calls `drop_outdated`."""


@dataclass(frozen=True)
class Healing:
    """The state of a heal. Immutable: each transition returns a new value.

    Attributes:
        max_queued: number of updates that may be queued.
        failures: number of attempts of this heal that failed.
        is_renewed: `drop_for_newer` was used. The caller uses it once in a heal. After that, a full
            queue makes the others wait.
        last_donor: slot of the donor that the latest attempt named; before the first attempt, this
            group's own slot (set by `engine/heal.py`).
        donors: slots of the groups that serve the state. The group's row names the first one, and
            later joiners choose another.
        from_step: committed updates in the fetched state.
        lineage: hash of the exchanges that made the fetched state.
        digest: of the fetched state's bytes; `NO_DIGEST` = no holder has confirmed them.
        is_loaded: the fetched state has replaced this group's own.
        queued: for each queued update, the lineage of the state after it.
        num_replayed: number of queued updates that have been applied to the loaded state.
        others_wait: the other groups hold back their next update.
    """

    phase: Phase = Phase.ASKING
    max_queued: int = 1
    failures: int = 0
    is_renewed: bool = False
    last_donor: int = NO_DONOR
    donors: tuple[int, ...] = ()
    from_step: int = 0
    lineage: int = 0
    digest: int = NO_DIGEST
    is_loaded: bool = False
    queued: tuple[int, ...] = ()
    num_replayed: int = 0
    others_wait: bool = False

    # What follows from the state

    @property
    def standing(self) -> Standing:
        """The standing that the group's row shows."""
        if self.phase is Phase.ASKING:
            return Standing.BEHIND
        if self.phase is Phase.READY:
            return Standing.READY
        return Standing.CATCHING_UP

    @property
    def donor(self) -> int:
        """Slot of the donor that the group's row names; `NO_DONOR` if it names none."""
        if not self.donors:
            return NO_DONOR
        return self.donors[0]

    @property
    def target_step(self) -> int:
        """Committed updates in the state after the replay."""
        return self.from_step + len(self.queued)

    @property
    def num_remaining(self) -> int:
        """Number of queued updates that are not replayed yet."""
        return len(self.queued) - self.num_replayed

    @property
    def is_confirmed(self) -> bool:
        """True if all holders have agreed on a digest of the fetched state."""
        return self.digest != NO_DIGEST

    @property
    def is_queue_full(self) -> bool:
        """True if no more updates may be queued."""
        return len(self.queued) >= self.max_queued

    @property
    def may_finish(self) -> bool:
        """True if the state is confirmed and loaded, and at most one queued update is left.

        The group applies this update while the holders do, and calls `finish`.
        """
        if self.phase is not Phase.REPLAYING or not self.is_loaded:
            return False
        return self.is_confirmed and self.num_remaining <= 1

    @property
    def pause_seconds(self) -> float:
        """Pause after the latest failure. Each attempt costs its donors a copy of the state."""
        if self.failures <= 1:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self.failures - 2), MAX_PAUSE_SECONDS)

    def choose_donors(self, slots: Sequence[int], max_donors: int) -> tuple[int, ...]:
        """Return the groups to fetch from, out of those that offer the same state.

        The first donor is the next slot after the last donor. After a failure, this donor alone
        serves the state: if several donors serve wrong bytes together, nobody can tell which of
        them is at fault.
        """
        in_turn = rotate(slots, self.last_donor)
        if self.failures:
            return in_turn[:1]
        return in_turn[:max_donors]

    # Transitions

    def start_fetch(self, offer: Offer, max_donors: int) -> Healing:
        """Begin to fetch an offered state."""
        self._require_phase(Phase.ASKING)
        donors = self.choose_donors(offer.slots, max_donors)
        return replace(
            self,
            phase=Phase.FETCHING,
            last_donor=donors[0],
            donors=donors,
            from_step=offer.step,
            lineage=offer.lineage,
            digest=offer.digest,
        )

    def name_donor(self, donor: int) -> Healing:
        """Name another donor in the row, because the named one is gone."""
        self._require_phase(Phase.FETCHING)
        others = tuple(slot for slot in self.donors if slot != donor)
        return replace(self, last_donor=donor, donors=(donor, *others))

    def finish_fetch(self) -> Healing:
        """End the fetch: all ranks of the group have their part of the state."""
        self._require_phase(Phase.FETCHING)
        return replace(self, phase=Phase.REPLAYING, others_wait=False)

    def mark_loaded(self) -> Healing:
        """Note that the fetched state has replaced this group's own."""
        self._require_phase(Phase.REPLAYING)
        return replace(self, is_loaded=True)

    def confirm(self, step: int, lineage: int, digest: int, own_digest: int) -> Healing:
        """Compare the fetched state with the state that the holders show in a round.

        Args:
            step: committed updates in the holders' state.
            lineage: of the holders' state.
            digest: on which all holders agree; `NO_DIGEST` = the digests differ, or a holder has
                taken none.
            own_digest: of the loaded state; ignored before the state is loaded.

        Raises:
            OutdatedError: the holders have a later or another state, or did not compare its bytes.
            VoidError: the loaded bytes are not those of the holders.
        """
        if self.phase is Phase.ASKING:
            return self
        if self.is_confirmed:
            # Only the step needs a comparison. Otherwise a group with an outdated state would find
            # out only at the holders' next update, an hour later if a round has many steps.
            if step > self.target_step:
                raise OutdatedError("the others have made an update since")
            return self
        if digest == NO_DIGEST or (step, lineage) != (self.from_step, self.lineage):
            raise OutdatedError(
                "the state that was offered is not the one that the holders agree on",
            )
        if self.is_loaded and own_digest != digest:
            raise VoidError("the state that was offered is not the one that the holders agree on")
        return replace(self, digest=digest)

    def queue_update(self, step: int, base: int, lineage: int) -> Healing:
        """Queue an update.

        If no group committed an update after its round, another round makes the update again. The
        second update then replaces the queued one.

        Args:
            step: number of the update.
            base: lineage of the state before the update.
            lineage: lineage of the state after the update.

        Raises:
            OutdatedError: an update was missed, or the holders did not commit a queued one.
        """
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        index = step - self.from_step - 1
        if index < self.num_replayed or index > len(self.queued):
            raise OutdatedError(f"missed an update before update {step}")
        expected_base = self.lineage
        if index > 0:
            expected_base = self.queued[index - 1]
        if base != expected_base:
            raise OutdatedError(f"missed an update before update {step}")
        return replace(self, queued=(*self.queued[:index], lineage))

    def mark_replayed(self) -> Healing:
        """Note that the next queued update has been applied to the loaded state."""
        self._require_phase(Phase.REPLAYING)
        assert self.is_loaded, "the fetched state is loaded before an update is replayed"
        assert self.num_remaining > 0, "no update is left to replay"
        return replace(self, num_replayed=self.num_replayed + 1)

    def let_others_wait(self) -> Healing:
        """Ask the other groups to hold back their next update."""
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        return replace(self, others_wait=True)

    def let_others_go_on(self) -> Healing:
        """Ask for the update that the other groups hold back."""
        self._require_phase(Phase.REPLAYING)
        return replace(self, others_wait=False)

    def finish(self) -> Healing:
        """End the heal: this group holds the job's state."""
        assert self.may_finish, "the state is confirmed, loaded and replayed before it is the job's"
        assert self.num_remaining == 0, "an update is left to replay"
        return Healing(Phase.READY)

    def roll_back(self) -> Healing:
        """End the heal with this group's own state, because no other group has a later one.

        Allowed in any phase.
        """
        return Healing(Phase.READY)

    def drop_outdated(self) -> Healing:
        """Give up a state that the holders no longer have. This does not count as a failure."""
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        return Healing(
            max_queued=self.max_queued,
            failures=self.failures,
            is_renewed=self.is_renewed,
            last_donor=self.last_donor,
        )

    def drop_for_newer(self) -> Healing:
        """Give up a transfer because the queue is full, to fetch a newer state instead."""
        return replace(self.drop_outdated(), is_renewed=True)

    def drop_failed(self) -> Healing:
        """Give up a transfer that failed or brought wrong bytes."""
        return replace(self.drop_outdated(), failures=self.failures + 1)

    def _require_phase(self, *phases: Phase) -> None:
        assert self.phase in phases, f"not a transition of {self.phase.name}"
