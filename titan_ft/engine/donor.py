# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's part in a heal: a copy of the state in host memory as long as a joiner fetches it.

The copy is made in the round in which a joiner is sent here, or to another group that this one is to help
(`find_donors`). For a joiner that has come meanwhile, and takes what this group offers (`offer.py`), it is made while
the step is computed; with a semi-synchronous method between two steps of a round of several.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from titan_ft.protocol.decision import Round
from titan_ft.protocol.position import Position
from titan_ft.protocol.row import Standing
from titan_ft.transfer.host_memory import size_text
from titan_ft.transfer.snapshot import WHOLE, Part, Snapshot, TrainState
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.wire import Message

logger = logging.getLogger(__name__)


class Donor:
    """Copies this rank's state when a joiner is sent here, or takes what is offered.

    Training thread only, but for what is copied while a step is computed: that, the state server's threads do.
    """

    def __init__(self, state: TrainState, server: StateServer) -> None:
        self._state, self._server = state, server
        self._served: Snapshot | None = None
        self._making = threading.Lock()  # of a copy of what is offered: one at a time
        self._publishing = threading.Lock()
        self._offered_at = 0.0
        self._joiners: set[int] = set()  # slots of the groups that it was copied for
        self._offers = False

    def serve(self, made: Round, position: Position, donors: Mapping[int, Sequence[int]]) -> None:
        """Copy the state to host memory if a joiner is to fetch it here, before the optimizer writes it.

        Args:
            donors: see `find_donors`.
        """
        if made.verdict.valid_tokens:  # an update follows: who is not in this round cannot use the state before
            self._state.unshare()  # or it would be copied for them, and the optimizer would wait for that
        rank, here = made.quorum.rank, (position.step, position.lineage)
        own = made.quorum.slots[rank]
        fetching = {row.slot: row for row in made.rows if row.standing == Standing.CATCHING_UP and row.donor >= 0}
        # A joiner may fetch already although this group voted no in the round that sent it here.
        sent = {slot for slot, row in fetching.items() if row.donor == own}
        readers = sent | (self._joiners & fetching.keys())
        with self._publishing:  # whoever has come for what was offered gets it, and is among those that fetch
            if self._served is None and (taken := self._server.snapshot) is not None:
                self._served, readers = taken, set(fetching)
        held = self._served is not None and (self._served.step, self._served.lineage) == here
        # Of a process that died in its heal, and whose successor wants a later state, nothing is left to be read.
        served = -1 if self._served is None else self._served.step
        reading = {slot for slot in readers if fetching[slot].from_step == served}
        coming = {made.quorum.slots[joiner]: found for joiner, found in donors.items() if rank in found}
        waiting = coming.keys() | {slot for slot in sent if fetching[slot].from_step == position.step}
        # While others fetch, some of the donors may have a copy for those, and none for who comes now.
        part = WHOLE if fetching else _find_part(rank, coming.values())
        if held and waiting and not self._serves(part):
            held, part = False, WHOLE  # whoever fetches the part that is here goes on with the whole
        # A joiner that is sent here comes before those that this group only helps: these have other donors.
        if waiting and not held and (rank in made.verdict.donors.values() or not reading):
            self.copy(position, part)
            self._joiners = waiting
        else:
            self._joiners = reading | coming.keys() if held else reading
            if not self._joiners:
                self._withdraw()
        self._offer(made, position)

    @property
    def wanted(self) -> bool:
        """Say whether a joiner waits for what this rank offers."""
        return self._server.wanted

    def copy(self, position: Position, part: Part = WHOLE) -> None:
        """Copy the state as it is now, and serve that; where memory is scarce no more than `part`."""
        self._withdraw()
        started = time.monotonic()
        self._served = self._state.copy(position.step, position.lineage, part)
        if (copied := self._served.part) != WHOLE:
            text = "the host's memory is scarce: a joiner gets part %d of %d of the state of step %d from here (%s)"
            size = size_text(self._served.payload.numel())
            logger.warning(text, copied.place + 1, copied.number, position.step, size)
        self._server.publish(self._served, time.monotonic() - started)

    def offer(self, position: Position) -> None:
        """Offer the state behind an update for as long as the next step is computed: a newcomer need not wait for that.

        What the digest is, the groups find out at the step's end.
        """
        now = time.monotonic()
        if self._state.share(position.step, position.lineage):
            # A step from now, as far as the last one tells, the state will be another.
            milliseconds = int(1000 * (now - self._offered_at)) if self._offered_at else 0
            offer = Message(step=position.step, lineage=position.lineage, digest=0, milliseconds=milliseconds)
            self._server.offer(offer, self._copy_shared)
        elif self._offered_at:
            self._server.offer(None)  # that of an earlier update
        self._offered_at = now

    def retract(self) -> None:
        """Offer nothing any more: what this group holds is not the job's state."""
        self._state.unshare()
        self._server.offer(None)
        self._offers = False

    def _copy_shared(self, step: int) -> None:
        """Copy the state that is offered, and serve that; any thread. One joiner's is not replaced by another's."""
        with self._making:
            started = time.monotonic()
            snapshot = None if self._server.snapshot else self._state.copy_shared(step)
            if snapshot is None:
                return
            with self._publishing:  # training may have published another one meanwhile
                if self._server.snapshot is None:
                    self._server.publish(snapshot, time.monotonic() - started)
                    return
            self._state.reuse(snapshot)

    def _offer(self, made: Round, position: Position) -> None:
        """Offer the state if the groups have compared its bytes right before the steps of a round, else none."""
        rank, verdict = made.quorum.rank, made.verdict
        offers = rank in verdict.opening and verdict.verified and not verdict.due
        if offers:
            self._server.offer(Message(step=position.step, lineage=position.lineage, digest=verdict.digest))
            self._offers = True
        else:
            self.end_offer()

    def end_offer(self) -> None:
        """Take the offer back: the exchange of the next update is under way.

        The state before it would be outdated on its way, and the joiner would fetch once more.
        """
        if self._offers:
            self._server.offer(None)
            self._offers = False

    def _serves(self, part: Part) -> bool:
        return self._served is not None and self._served.part in (WHOLE, part)

    def _withdraw(self) -> None:
        self._served = None
        if (snapshot := self._server.withdraw()) is not None:
            self._state.reuse(snapshot)


def _find_part(rank: int, donors: Iterable[Sequence[int]]) -> Part:
    """Return what a donor gives to joiners, by their donors: a part, if all have the same ones, which give the rest."""
    sets = {frozenset(found) for found in donors}
    if len(sets) != 1:
        return WHOLE
    (found,) = sets
    return Part(sorted(found).index(rank), len(found))
