# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's part in a heal: offer the state, and copy it to host memory for a joiner.

The state is copied when a joiner asks for it. There are three cases:

- Usually a thread of the state server copies it, while the next step is computed.
- If a forward may write a part of the state, the training thread copies it in the next round,
  before the optimizer writes.
- With a semi-synchronous method, the training thread copies it between two local steps. All ranks
  of the group do so after the same step, because the parts of a joiner's state must be of one step.

The copy is kept while a joiner fetches it. If the host's memory is scarce, each of several donors
copies only a *part* of the state, and the joiner fetches one part from each.

See docs/heal.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from titan_ft.protocol.healing import NO_DIGEST
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import Row, Standing
from titan_ft.transfer.host_memory import size_text
from titan_ft.transfer.snapshot import WHOLE, Part, TrainState
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.wire import Message

logger = logging.getLogger(__name__)


class Donor:
    """Offers this rank's state to joiners, and copies it for them.

    `Rounds` calls all methods but `_copy_shared`, on the training thread. The state server calls
    `_copy_shared` on the thread of a joiner's connection. If that copy fails, only the connection
    ends.
    """

    def __init__(self, state: TrainState, server: StateServer) -> None:
        self._state = state
        self._server = server
        self._copying = threading.Lock()  # one copy at a time on the server's threads
        # Held while a thread replaces the server's snapshot.
        self._publishing = threading.Lock()
        self._updated_at: float | None = None  # time of the last `offer`

    # The offer

    def offer(self, position: Position) -> None:
        """Offer the state until the next update. The next exchange confirms its bytes."""
        now = time.monotonic()
        # The joiner takes the duration of the last step for that of the next one.
        milliseconds = 0
        if self._updated_at is not None:
            milliseconds = int(1000 * (now - self._updated_at))
        self._updated_at = now
        # False if a forward may write a part of the state. Then no other thread may copy it.
        may_copy_aside = self._state.allow_copying(position.step, position.lineage)
        offer = Message(
            step=position.step,
            lineage=position.lineage,
            digest=NO_DIGEST,
            milliseconds=milliseconds,
        )
        copy = partial(self._copy_shared, position.lineage) if may_copy_aside else None
        self._server.offer(offer, copy)

    def offer_compared(self, position: Position, digest: int) -> None:
        """Offer a state whose bytes all holders have compared, until the round's steps are made."""
        self._server.offer(Message(step=position.step, lineage=position.lineage, digest=digest))

    def end_offer(self) -> None:
        """Withdraw the offer: the next update is under way, and will replace the state."""
        self._server.offer(None)

    def retract(self) -> None:
        """Offer nothing: this group does not hold the job's state."""
        self._state.forbid_copying()
        self.end_offer()

    @property
    def offered_step(self) -> int | None:
        """Committed updates in the offered state; None = no state is offered."""
        return self._server.offered_step

    @property
    def has_waiting_joiner(self) -> bool:
        """True if a joiner waits for a copy of the offered state."""
        return self._server.wanted_part is not None

    # The copy

    def copy_after_round(self, made: Round, position: Position, *, is_update: bool) -> None:
        """Copy the state if a joiner waits for it, or drop a copy that no joiner can use.

        Call this after each round, before its update is applied.

        Args:
            is_update: the round is an update. A joiner outside of the round misses this update, so
                it cannot use the present state.
        """
        own_slot, step = made.quorum.slots[made.quorum.rank], position.step
        joiners = [row for row in made.rows if _names_donor(row)]
        if is_update:
            # From here on no thread of the server may copy the state: the optimizer would wait for
            # the copy, which may be for a joiner outside of the round.
            self._state.forbid_copying()
        with self._publishing:
            wanted_part, snapshot = self._server.wanted_part, self._server.snapshot
            if snapshot is not None:
                # Keep a copy that a joiner of this round fetches from this group.
                self._server.keep_snapshot(_is_fetched(joiners, snapshot.step, own_slot))
            # A joiner that names this group may not have sent its request yet. After the update it
            # would come too late.
            is_asked = wanted_part is not None or _is_fetched(joiners, step, own_slot)
            is_useful = not is_update or _is_fetched(joiners, step)
            is_holder = made.quorum.rank in made.verdict.holders
            may_copy = is_holder and is_asked and is_useful
            if may_copy and self._must_copy(step, position.lineage, wanted_part):
                self._copy(position, self._choose_part(step, wanted_part))
                return
            if snapshot is None:
                return
            is_present = (snapshot.step, snapshot.lineage) == (step, position.lineage)
            is_outdated = is_update or not is_present
            if is_outdated and not _is_fetched(joiners, snapshot.step):
                self._withdraw()

    def _must_copy(self, step: int, lineage: int, part: Part | None) -> bool:
        """Return True if a joiner needs another copy than the present one.

        Args:
            step: committed updates in the state that the joiner fetches.
            lineage: lineage of that state.
            part: the part that it waits for; None = any part.
        """
        snapshot = self._server.snapshot
        if snapshot is None:
            return True
        if snapshot.step != step:
            return not self._server.is_snapshot_kept
        if snapshot.lineage != lineage:
            # This group has healed since the copy: it and the copied state made the same step in
            # different exchanges. No group goes on from the copied state, even if it is kept.
            return True
        return part is not None and snapshot.part not in (WHOLE, part)

    def _choose_part(self, step: int, wanted_part: Part | None) -> Part:
        """Return the part of the state to copy.

        If there is a copy of another part of this state, two joiners want different parts. A copy
        of the whole state serves both.
        """
        snapshot = self._server.snapshot
        has_other_part = snapshot is not None and snapshot.step == step
        if wanted_part is None or has_other_part:
            return WHOLE
        return wanted_part

    def copy(self, position: Position) -> None:
        """Copy the state as it is now, and serve the copy."""
        with self._publishing:
            self._copy(position, self._choose_part(position.step, self._server.wanted_part))

    def copy_ahead(self, position: Position) -> None:
        """Copy the state before a joiner asks for it, unless there is a copy already."""
        if self._must_copy(position.step, position.lineage, None):
            self.copy(position)

    def _copy(self, position: Position, part: Part) -> None:
        self._withdraw()
        started = time.monotonic()
        snapshot = self._state.copy(position.step, position.lineage, part)
        _report_part(snapshot.part, snapshot.payload.numel(), position.step)
        self._server.publish(snapshot, time.monotonic() - started)

    def _copy_shared(self, lineage: int, step: int, part: Part) -> None:
        """Copy the offered state, and serve the copy; on a thread of the state server.

        Args:
            lineage: lineage of the offered state.
            step, part: the step and the part that the joiner requests.
        """
        with self._copying:
            started = time.monotonic()
            if not self._must_copy(step, lineage, part):
                return
            former = self._server.snapshot
            snapshot = self._state.copy_if_allowed(step, self._choose_part(step, part))
            if snapshot is None:
                return  # the state has changed
            with self._publishing:
                if self._server.snapshot is former:
                    self._withdraw()
                    _report_part(snapshot.part, snapshot.payload.numel(), step)
                    self._server.publish(snapshot, time.monotonic() - started)
                    return
            # The training thread has published another copy meanwhile.
            self._state.reuse_memory(snapshot)

    def _withdraw(self) -> None:
        snapshot = self._server.withdraw()
        if snapshot is not None:
            self._state.reuse_memory(snapshot)


def _names_donor(row: Row) -> bool:
    """Return True if a joiner fetches the state from a donor that its row names."""
    return row.standing is Standing.CATCHING_UP and row.donor >= 0


def _is_fetched(joiners: Sequence[Row], step: int, donor: int | None = None) -> bool:
    """Return True if a joiner fetches the state of `step`.

    Args:
        joiners: rows of joiners that name a donor.
        donor: slot of the donor that the row must name; None = any donor.
    """
    for row in joiners:
        is_from_donor = donor is None or row.donor == donor
        if is_from_donor and row.from_step == step:
            return True
    return False


def _report_part(part: Part, num_bytes: int, step: int) -> None:
    if part == WHOLE:
        return
    logger.warning(
        "the host's memory is scarce: a joiner gets part %d of %d of state %d from here (%s)",
        part.index + 1,
        part.count,
        step,
        size_text(num_bytes),
    )
