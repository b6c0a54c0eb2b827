# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The phases of a heal and the transitions between them, as pure values.

A *heal* gives a replica group the job's state again, for example after a restart. The healing group
is the *joiner*. The other groups hold the job's state, and train on during the heal. They are the
*holders*. Between two updates a holder *offers* its state. A holder that serves its state to a
joiner is a *donor*.

1. ASKING: the joiner lacks the state, and asks holders for their offers. `start_fetch` ends this
   phase.
2. FETCHING: the joiner fetches an offered state. Meanwhile the holders make further updates. The
   joiner takes part in their rounds without gradients of its own, and queues these updates
   (`queue_update`). `finish_fetch` ends this phase on all ranks of the joiner.
3. REPLAYING: the joiner loads the fetched state (`mark_loaded`), and applies the queued updates to
   that state (`mark_replayed`). `finish` ends this phase.
4. READY: the joiner has the job's state, and trains.

Three transitions give a fetched state up and lead back to ASKING: `drop_outdated` if the holders
have another state by now, `drop_for_newer` if the queue is full before the fetch has ended, and
`drop_failed` if the fetch failed or brought wrong bytes.

A fetched state becomes the job's state only after a check. Its *digest*, a hash of its bytes, must
be the digest on which all holders agree. An offer may contain this digest. Otherwise a round with
the holders brings it (`confirm`). `roll_back` needs no check: the group keeps its own state.

`Heal` (engine/heal.py) calls the transitions on the training thread, in the same order on all ranks
of a group. It has the threads, the memory and the clocks. See docs/heal.md.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from titan_ft.protocol.row import Standing

FIRST_PAUSE_SECONDS = 1.0
"""Pause before the third attempt of a heal. The second attempt follows the first without a pause,
because most failures pass. Each further pause is twice as long, up to `MAX_PAUSE_SECONDS`."""
MAX_PAUSE_SECONDS = 64.0

NO_DIGEST = 0
"""Value of a digest if the bytes have not been hashed, or if the holders' hashes differ. It is a
number, because rows travel as floats."""
NO_DONOR = -1
"""Value of a donor's slot if there is no donor."""


@dataclass(frozen=True)
class Offer:
    """An offer of one group, or of several groups that offer the same state.

    Attributes:
        slots: slots of the groups that offer the state; empty = no group offers a state.
        step: committed updates in the state.
        lineage: hash of the exchanges that made the state (`row.descend`).
        digest: digest of the state, if all holders have compared their digests; `NO_DIGEST` = a
            round must confirm the bytes.
        step_milliseconds: duration of the last step of the group in `slots[0]`; 0 = unknown. The
            joiner takes this as its first estimate of the time between two updates.
        elapsed_milliseconds: time from this group's last update to its answer. Not compared,
            because it differs between two answers about the same state.
    """

    slots: tuple[int, ...]
    step: int
    lineage: int
    digest: int
    step_milliseconds: int = 0
    elapsed_milliseconds: int = field(default=0, compare=False)


NO_OFFER = Offer((), 0, 0, NO_DIGEST)


def choose_offer(offers: Sequence[Offer]) -> Offer:
    """Return the state that most of `offers` contain, with the slots of all groups that offer it.

    The majority decides, because a single group may offer a state that the job does not continue
    from. In a tie the state with more updates is chosen.
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
    """A phase of a heal; see this module's docstring."""

    ASKING = enum.auto()
    FETCHING = enum.auto()
    REPLAYING = enum.auto()
    READY = enum.auto()


class AttemptError(Exception):
    """This attempt to get the state has failed. The caller must call `drop_failed`."""


class OutdatedError(AttemptError):
    """The holders have another state by now, and no donor is at fault.

    The caller must call `drop_outdated`.
    """


@dataclass(frozen=True)
class Healing:
    """How far a heal has come. Immutable: each transition returns a new value.

    *The fetched state* is also the state that is still being fetched.

    Attributes:
        max_queued: number of updates for which the joiner has memory (`Heal._agree_on_queue`).
        failures: number of attempts of this heal that failed.
        has_dropped_for_newer: `drop_for_newer` was used once. The caller uses it only once in a
            heal, because a slow transfer might never end otherwise. If the queue is full again, the
            other groups wait for the joiner.
        last_donor: slot after which the next donor is sought: the first donor of the latest
            attempt, or this group's own slot before the first attempt.
        donors: slots of the groups that serve the state. The joiner's row names the first of them,
            so that later joiners choose another donor.
        from_step: committed updates in the fetched state.
        lineage: hash of the exchanges that made the fetched state.
        digest: digest of the fetched state on which the holders agree; `NO_DIGEST` = not confirmed.
        is_loaded: the fetched state has replaced this group's own state.
        queued: for each queued update, the lineage of the state after that update.
        num_replayed: number of queued updates that have been applied to the loaded state.
        others_wait: the other groups must hold back their next update until this group is ready
            for it.
    """

    phase: Phase = Phase.ASKING
    max_queued: int = 1
    failures: int = 0
    has_dropped_for_newer: bool = False
    last_donor: int = NO_DONOR
    donors: tuple[int, ...] = ()
    from_step: int = 0
    lineage: int = 0
    digest: int = NO_DIGEST
    is_loaded: bool = False
    queued: tuple[int, ...] = ()
    num_replayed: int = 0
    others_wait: bool = False

    # Derived values

    @property
    def standing(self) -> Standing:
        """The `Standing` that this group's row shows to the other groups."""
        if self.phase is Phase.ASKING:
            return Standing.BEHIND
        if self.phase is Phase.READY:
            return Standing.READY
        return Standing.CATCHING_UP

    @property
    def donor(self) -> int:
        """Slot of the donor that this group's row names; `NO_DONOR` if there is none."""
        if not self.donors:
            return NO_DONOR
        return self.donors[0]

    @property
    def target_step(self) -> int:
        """Committed updates in the state after the replay of all queued updates."""
        return self.from_step + len(self.queued)

    @property
    def num_remaining(self) -> int:
        """Number of queued updates that are not replayed yet."""
        return len(self.queued) - self.num_replayed

    @property
    def is_confirmed(self) -> bool:
        """True if all holders have agreed on the digest of the fetched state."""
        return self.digest != NO_DIGEST

    @property
    def is_queue_full(self) -> bool:
        """True if there is no memory for one more update."""
        return len(self.queued) >= self.max_queued

    @property
    def may_finish(self) -> bool:
        """True if the state is confirmed and loaded, and at most one queued update is left.

        The joiner applies the last update at the same time as the holders do, and then calls
        `finish`. So it has gradients for the next update.
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
        """Return the groups to fetch from.

        The first donor is the next slot after `last_donor`, so that a new attempt does not repeat
        the fault of one donor. After a failure there is only one donor: if several donors together
        serve wrong bytes, nobody can tell which of them is at fault.

        Args:
            slots: groups that offer the same state.
        """
        in_turn = rotate(slots, self.last_donor)
        if self.failures:
            return in_turn[:1]
        return in_turn[:max_donors]

    # Transitions

    def start_fetch(self, offer: Offer, max_donors: int) -> Healing:
        """ASKING -> FETCHING: begin to fetch an offered state."""
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

    def replace_first_donor(self, donor: int) -> Healing:
        """Move `donor` to the front, because the first donor serves no longer.

        This group's row names the first donor. The named donor keeps its copy of the state for this
        group, so it must be a donor that still serves.
        """
        self._require_phase(Phase.FETCHING)
        others = tuple(slot for slot in self.donors if slot != donor)
        return replace(self, last_donor=donor, donors=(donor, *others))

    def finish_fetch(self) -> Healing:
        """FETCHING -> REPLAYING: all ranks of the group have their part of the state.

        If the other groups waited for the fetch, they need to wait no longer.
        """
        self._require_phase(Phase.FETCHING)
        return replace(self, phase=Phase.REPLAYING, others_wait=False)

    def mark_loaded(self) -> Healing:
        """Record that the fetched state has replaced this group's own state."""
        self._require_phase(Phase.REPLAYING)
        return replace(self, is_loaded=True)

    def confirm(self, step: int, lineage: int, digest: int, own_digest: int) -> Healing:
        """Compare the fetched state with the state that the holders show in a round.

        Args:
            step: committed updates in the holders' state.
            lineage: lineage of the holders' state.
            digest: digest on which all holders agree; `NO_DIGEST` = their digests differ, or a
                holder has not computed one.
            own_digest: digest of the loaded state; ignored before the state is loaded.

        Raises:
            OutdatedError: the holders have a later or another state, or did not compare its bytes.
            AttemptError: the bytes of the loaded state differ from those of the holders.
        """
        if self.phase is Phase.ASKING:
            return self  # There is no fetched state.
        if self.is_confirmed:
            # The bytes need no second comparison, but the state may be outdated. Find that out
            # now: the holders' next update may come an hour later if a round has many steps.
            if step > self.target_step:
                raise OutdatedError("the others have made an update since")
            return self
        if digest == NO_DIGEST or (step, lineage) != (self.from_step, self.lineage):
            raise OutdatedError(
                "the state that was offered is not the one that the holders agree on",
            )
        if self.is_loaded and own_digest != digest:
            raise AttemptError(
                "the state that was offered is not the one that the holders agree on"
            )
        return replace(self, digest=digest)

    def queue_update(self, step: int, parent_lineage: int, lineage: int) -> Healing:
        """Queue an update of the holders.

        It may happen that no group commits an update after its round. Then another round makes the
        same step again, and the second update replaces the queued one.

        Args:
            step: number of the update.
            parent_lineage: lineage of the state before the update.
            lineage: lineage of the state after the update.

        Raises:
            OutdatedError: this group missed an update, or has already applied an update that the
                holders did not commit.
        """
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        index = step - self.from_step - 1  # position of the update in the queue
        is_replayed = index < self.num_replayed
        is_gap_before = index > len(self.queued)
        if is_replayed or is_gap_before:
            raise OutdatedError(f"missed an update before update {step}")
        expected_parent = self.lineage
        if index > 0:
            expected_parent = self.queued[index - 1]
        if parent_lineage != expected_parent:
            raise OutdatedError(f"missed an update before update {step}")
        # Drop the update that this one replaces, and all updates after it.
        queued = (*self.queued[:index], lineage)
        return replace(self, queued=queued)

    def mark_replayed(self) -> Healing:
        """Record that the next queued update has been applied to the loaded state."""
        self._require_phase(Phase.REPLAYING)
        assert self.is_loaded, "the fetched state is loaded before an update is replayed"
        assert self.num_remaining > 0, "no update is left to replay"
        return replace(self, num_replayed=self.num_replayed + 1)

    def let_others_wait(self) -> Healing:
        """Ask the other groups to hold back their next update."""
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        return replace(self, others_wait=True)

    def let_others_go_on(self) -> Healing:
        """Let the other groups make the update that they hold back."""
        self._require_phase(Phase.REPLAYING)
        return replace(self, others_wait=False)

    def finish(self) -> Healing:
        """REPLAYING -> READY: this group holds the job's state."""
        assert self.may_finish, "the state is confirmed, loaded and replayed before it is the job's"
        assert self.num_remaining == 0, "an update is left to replay"
        return Healing(Phase.READY)

    def roll_back(self) -> Healing:
        """Any phase -> READY: keep this group's own state, because no group has a later state."""
        return Healing(Phase.READY)

    def drop_outdated(self) -> Healing:
        """Give up the fetched state, because the holders have another state by now.

        This does not count as a failure, so the next attempt begins without a pause.
        """
        self._require_phase(Phase.FETCHING, Phase.REPLAYING)
        return Healing(
            max_queued=self.max_queued,
            failures=self.failures,
            has_dropped_for_newer=self.has_dropped_for_newer,
            last_donor=self.last_donor,
        )

    def drop_for_newer(self) -> Healing:
        """Give up a fetch because the queue is full, in order to fetch a newer state instead."""
        return replace(self.drop_outdated(), has_dropped_for_newer=True)

    def drop_failed(self) -> Healing:
        """Give up a fetch that failed or brought wrong bytes."""
        return replace(self.drop_outdated(), failures=self.failures + 1)

    def _require_phase(self, *phases: Phase) -> None:
        assert self.phase in phases, f"not a transition of {self.phase.name}"
