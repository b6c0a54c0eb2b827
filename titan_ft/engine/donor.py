# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's part in a heal: offer the state, and keep a copy in host memory while a joiner
fetches it.

The copy is made when a joiner asks for it. The state server's thread makes it while a step is
computed. If a forward may write a part of the state, the training thread makes it in the next
round, before the optimizer writes. In a round of several steps, the training thread makes it
between two steps, after the same step on all ranks of the group: the inner optimizer's moments must
fit together.

See docs/heal.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import Row, Standing
from titan_ft.transfer.host_memory import size_text
from titan_ft.transfer.snapshot import WHOLE, Part, TrainState
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.wire import Message

logger = logging.getLogger(__name__)


class Donor:
    """Offers this rank's state to joiners.

    `Rounds` calls it, on the training thread. The state server calls `_copy_shared` on one of its
    threads. A copy that fails ends the joiner's request only.
    """

    def __init__(self, state: TrainState, server: StateServer) -> None:
        self._state = state
        self._server = server
        self._making = threading.Lock()  # one copy at a time on the server's threads
        self._publishing = threading.Lock()
        self._updated_at = 0.0  # when the state of the last `offer` was made

    # The offer

    def offer(self, position: Position) -> None:
        """Offer the state until the next update. The next exchange confirms its bytes."""
        now = time.monotonic()
        # The next update follows after one step, if that takes as long as the last one.
        milliseconds = int(1000 * (now - self._updated_at)) if self._updated_at else 0
        self._updated_at = now
        is_shared = self._state.share(position.step, position.lineage)
        offer = Message(
            step=position.step,
            lineage=position.lineage,
            digest=0,
            milliseconds=milliseconds,
        )
        self._server.offer(offer, self._copy_shared if is_shared else None)

    def offer_compared(self, position: Position, digest: int) -> None:
        """Offer a state whose bytes all holders have compared, until the round's steps are made."""
        self._server.offer(Message(step=position.step, lineage=position.lineage, digest=digest))

    def end_offer(self) -> None:
        """Take the offer back: the next update is under way, and would make the state outdated."""
        self._server.offer(None)

    def retract(self) -> None:
        """Offer nothing: this group does not hold the job's state."""
        self._state.unshare()
        self.end_offer()

    @property
    def offers(self) -> int:
        """Committed updates in the offered state; -1 = no state is offered."""
        return self._server.offered_step

    @property
    def wanted(self) -> bool:
        """True if a joiner waits for the state that this rank offers."""
        return self._server.wanted is not None

    # The copy

    def serve(self, made: Round, position: Position, *, is_update: bool) -> None:
        """Copy the state if a joiner waits for it, or drop a copy that no joiner can use.

        Called after each round.

        Args:
            is_update: the round makes an update. Then only members of the round can use the state
                before it: other groups miss the update.
        """
        own, step = made.quorum.slots[made.quorum.rank], position.step
        joiners = [row for row in made.rows if _fetches(row)]
        if is_update:
            # A copy on a server's thread, for a group that misses the update, would delay the
            # optimizer.
            self._state.unshare()
        with self._publishing:
            wanted, held = self._server.wanted, self._server.snapshot
            if held is not None:
                self._server.pin(_is_fetched(joiners, held.step, own))
            # A joiner that names this group may not have sent its request yet. A later request
            # cannot be served.
            is_asked = wanted is not None or _is_fetched(joiners, step, own)
            is_useful = not is_update or _is_fetched(joiners, step)
            is_holder = made.quorum.rank in made.verdict.holders
            may_copy = is_holder and is_asked and is_useful
            if may_copy and self._must_copy(step, wanted):
                self._copy(position, self._choose_part(step, wanted))
                return
            if held is None:
                return
            is_outdated = is_update or held.step != step
            if is_outdated and not _is_fetched(joiners, held.step):
                self._withdraw()

    def _must_copy(self, step: int, part: Part | None) -> bool:
        """Return True if a joiner that waits for `part` of state `step` needs another copy."""
        held = self._server.snapshot
        if held is None:
            return True
        if held.step != step:
            return not self._server.is_pinned
        return part is not None and held.part not in (WHOLE, part)

    def _choose_part(self, step: int, wanted: Part | None) -> Part:
        """Return the part of the state to copy.

        If another part of this state is held already, its joiner goes on with the copy of the
        whole.
        """
        held = self._server.snapshot
        holds_part = held is not None and held.step == step
        if wanted is None or holds_part:
            return WHOLE
        return wanted

    def copy(self, position: Position) -> None:
        """Copy the state as it is now, and serve the copy."""
        with self._publishing:
            self._copy(position, self._choose_part(position.step, self._server.wanted))

    def copy_ahead(self, position: Position) -> None:
        """Copy the state before a joiner asks for it, unless a copy is held already."""
        if self._must_copy(position.step, None):
            self.copy(position)

    def _copy(self, position: Position, part: Part) -> None:
        self._withdraw()
        started = time.monotonic()
        snapshot = self._state.copy(position.step, position.lineage, part)
        _report_part(snapshot.part, snapshot.payload.numel(), position.step)
        self._server.publish(snapshot, time.monotonic() - started)

    def _copy_shared(self, step: int, part: Part) -> None:
        """Copy the offered state, and serve the copy; on a thread of the state server."""
        with self._making:
            started = time.monotonic()
            if not self._must_copy(step, part):
                return
            held = self._server.snapshot
            snapshot = self._state.copy_shared(step, self._choose_part(step, part))
            if snapshot is None:
                return
            with self._publishing:
                if self._server.snapshot is held:
                    self._withdraw()
                    _report_part(snapshot.part, snapshot.payload.numel(), step)
                    self._server.publish(snapshot, time.monotonic() - started)
                    return
            # The training thread has published another copy meanwhile.
            self._state.reuse(snapshot)

    def _withdraw(self) -> None:
        snapshot = self._server.withdraw()
        if snapshot is not None:
            self._state.reuse(snapshot)


def _fetches(row: Row) -> bool:
    return row.standing is Standing.CATCHING_UP and row.donor >= 0


def _is_fetched(joiners: Sequence[Row], step: int, donor: int | None = None) -> bool:
    """Return True if a joiner fetches the state of `step`, from this donor if one is given."""
    steps = [row.from_step for row in joiners if donor is None or row.donor == donor]
    return step in steps


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
