# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's part in a heal: it offers its state, and keeps a copy in host memory as long as a joiner fetches it.

The copy is made when a joiner asks for it: by the state server's thread while a step is computed, or, if a forward may
write a part of the state, by the training thread in the next round, before the optimizer writes. In a round of several
steps the training thread makes it between two of them, after the same step on all ranks of the group: the inner
optimizer's moments must fit together.

See docs/heal.md.
"""

from __future__ import annotations

import logging
import threading
import time

from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import Standing
from titan_ft.transfer.host_memory import size_text
from titan_ft.transfer.snapshot import WHOLE, Part, TrainState
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.wire import Message

logger = logging.getLogger(__name__)


class Donor:
    """Offers this rank's state to joiners. Training thread only, but for `_copy_shared`."""

    def __init__(self, state: TrainState, server: StateServer) -> None:
        self._state, self._server = state, server
        self._making = threading.Lock()  # of a copy on a server's thread: one at a time
        self._publishing = threading.Lock()
        self._updated_at = 0.0  # when the state of the last `offer` was made

    # The offer

    def offer(self, position: Position) -> None:
        """Offer the state after an update until the next one. The next exchange confirms its bytes."""
        now = time.monotonic()
        # The state changes one step from now, if that takes as long as the last one.
        milliseconds = int(1000 * (now - self._updated_at)) if self._updated_at else 0
        self._updated_at = now
        copy = self._copy_shared if self._state.share(position.step, position.lineage) else None
        offer = Message(step=position.step, lineage=position.lineage, digest=0, milliseconds=milliseconds)
        self._server.offer(offer, copy)

    def offer_compared(self, position: Position, digest: int) -> None:
        """Offer a state whose bytes all holders have compared, for as long as the steps of a round take."""
        self._server.offer(Message(step=position.step, lineage=position.lineage, digest=digest))

    def end_offer(self) -> None:
        """Take the offer back: the next update is under way, and this state would be outdated before it arrives."""
        self._server.offer(None)

    def retract(self) -> None:
        """Offer nothing: this group does not hold the job's state."""
        self._state.unshare()
        self.end_offer()

    @property
    def offers(self) -> int:
        """Return the committed updates of the state that is offered; -1 = none is."""
        return self._server.offered_step

    @property
    def wanted(self) -> bool:
        """True if a joiner waits for the state that this rank offers."""
        return self._server.wanted is not None

    # The copy

    def serve(self, made: Round, position: Position, *, is_update: bool) -> None:
        """Copy the state if a joiner waits for it, and let go of a copy that no joiner can use; in each round.

        Args:
            is_update: the round makes an update. Only members of the round can use the state before it: the others miss
                the update.
        """
        own, step = made.quorum.slots[made.quorum.rank], position.step
        is_holder = made.quorum.rank in made.verdict.holders
        joiners = [row for row in made.rows if row.standing == Standing.CATCHING_UP and row.donor >= 0]
        if is_update:
            self._state.unshare()  # a copy for a group that misses the update would hold up the optimizer
        with self._publishing:
            wanted, held = self._server.wanted, self._server.snapshot
            if held is not None:
                self._server.pin(any(row.donor == own and row.from_step == held.step for row in joiners))
            # A joiner that names this group may have sent no request yet, and no later one can be served.
            is_asked = wanted is not None or any(row.donor == own and row.from_step == step for row in joiners)
            is_useful = not is_update or any(row.from_step == step for row in joiners)
            if is_holder and is_asked and is_useful and self._must_copy(step, wanted):
                self._copy(position, self._find_part(step, wanted))
                return
            is_read = held is not None and any(row.from_step == held.step for row in joiners)
            is_outdated = held is not None and (is_update or held.step != step)
            if is_outdated and not is_read:
                self._withdraw()

    def _must_copy(self, step: int, part: Part | None) -> bool:
        """True if what is served does not do for a joiner that waits for `part` of the state of `step`."""
        held = self._server.snapshot
        if held is None:
            return True
        if held.step != step:
            return not self._server.is_pinned
        return part is not None and held.part not in (WHOLE, part)

    def _find_part(self, step: int, wanted: Part | None) -> Part:
        """Return the part to copy. A joiner that fetches another part, which is here, goes on with the whole."""
        held = self._server.snapshot
        is_part_here = held is not None and held.step == step
        return WHOLE if wanted is None or is_part_here else wanted

    def copy(self, position: Position) -> None:
        """Copy the state as it is now, and serve that."""
        with self._publishing:
            self._copy(position, self._find_part(position.step, self._server.wanted))

    def copy_ahead(self, position: Position) -> None:
        """Copy the state before a joiner asks for it, unless a copy of it is here."""
        if self._must_copy(position.step, None):
            self.copy(position)

    def _copy(self, position: Position, part: Part) -> None:
        self._withdraw()
        started = time.monotonic()
        snapshot = self._state.copy(position.step, position.lineage, part)
        _report_part(snapshot.part, snapshot.payload.numel(), position.step)
        self._server.publish(snapshot, time.monotonic() - started)

    def _copy_shared(self, step: int, part: Part) -> None:
        """Copy the state that is offered, and serve that; any thread."""
        with self._making:
            started = time.monotonic()
            if not self._must_copy(step, part):
                return
            held = self._server.snapshot
            snapshot = self._state.copy_shared(step, self._find_part(step, part))
            if snapshot is None:
                return
            with self._publishing:
                if self._server.snapshot is held:
                    self._withdraw()
                    _report_part(snapshot.part, snapshot.payload.numel(), step)
                    self._server.publish(snapshot, time.monotonic() - started)
                    return
            self._state.reuse(snapshot)  # the training thread has published another one meanwhile

    def _withdraw(self) -> None:
        if (snapshot := self._server.withdraw()) is not None:
            self._state.reuse(snapshot)


def _report_part(part: Part, num_bytes: int, step: int) -> None:
    if part != WHOLE:
        text = "the host's memory is scarce: a joiner gets part %d of %d of the state of step %d from here (%s)"
        logger.warning(text, part.index + 1, part.count, step, size_text(num_bytes))
