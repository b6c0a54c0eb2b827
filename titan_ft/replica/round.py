# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A round: one exchange of all groups, the vote on it, and the verdict on its rows.

Whatever a group does between the groups (commit a step, heal, leave) it does in rounds, so that all members always
make the same collectives in the same order, whatever each of them is up to.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import Update
from titan_ft.replica.errors import DivergedError
from titan_ft.replica.exchange import ExchangeError, GradientExchange
from titan_ft.replica.member import Quorum
from titan_ft.replica.membership import Membership
from titan_ft.replica.row import Row, Standing, Verdict, descend, judge
from titan_ft.replica.snapshot import Snapshot, TrainState
from titan_ft.replica.transport import StateServer

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # between rounds in which a group can only wait for others


@dataclass
class Position:
    """What this group holds, as its row tells the others. Equal on all ranks of the group."""

    step: int = 0
    lineage: int = 0
    standing: Standing = Standing.READY  # until training begins everybody's initial state is the job's
    seen: int = 0  # largest number of committed updates heard of
    digest: int = 0  # of the state now, if one is due at this step
    heals: int = 0  # attempts of the heal under way
    donor: int = -1  # slot that the heal fetches from
    waited: float = 0.0  # seconds, for the job's first step
    sound: bool = True  # False: the state is not one that the job went through, only a donor's will do


@dataclass(frozen=True)
class Contribution:
    """What this rank adds to the step besides gradients.

    Attributes:
        valid_tokens, tokens: of the whole group; see `Row`.
        loss: the group's loss sum / nominal tokens of a step of all groups.
        max_loss: largest mean loss of one of the group's ranks.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0


NOTHING = Contribution()


@dataclass(frozen=True)
class Round:
    """A round that worked on all ranks of this group: the quorum, its members' rows and the verdict on them."""

    quorum: Quorum
    rows: list[Row]
    verdict: Verdict

    @property
    def lineage(self) -> int:
        """Return the lineage of the holders' state."""
        return self.rows[self.verdict.holders[0]].lineage

    def slots(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the slots of `ranks`."""
        return [self.quorum.slots[rank] for rank in ranks]


class Rounds:
    """Makes rounds for one rank, and keeps its group's position. Training thread only; all ranks of a group alike.

    Args:
        nominal_tokens: tokens of a step with all groups present.
    """

    def __init__(
        self,
        config: FaultTolerance,
        membership: Membership,
        exchange: GradientExchange,
        state: TrainState,
        server: StateServer,
        events: EventLog,
        nominal_tokens: int,
    ) -> None:
        self.position = Position()
        self.membership = membership
        self._config, self._exchange, self._state, self._server = config, exchange, state, server
        self._events = events
        self._nominal_tokens = nominal_tokens
        self._served: Snapshot | None = None

    def ask(self) -> None:
        """Ask for the next round's quorum, unless it is asked for."""
        if not self.membership.asked:
            self.membership.begin(self.position.step if self.position.sound else 0)

    def arm(self) -> None:
        """Let the next backward launch the exchange of the next round."""
        self.ask()
        self._exchange.arm(self._contributes)

    def make(self, contribution: Contribution = NOTHING) -> Round | None:
        """Make one round; None if it broke on any rank of this group. Asks for a quorum unless one is asked for.

        Takes the group's standing back if the rows say that its state is not the job's, and copies the state for a
        joiner if they send one here.

        Raises:
            DivergedError: the groups' states differ without a majority.
        """
        self.ask()
        started = time.monotonic()
        reduced = None
        try:
            reduced = self._exchange.finish(self._contributes, lambda quorum: self._row(quorum, contribution).encode())
        except ExchangeError as error:
            self._tell_broken(str(error), started)
        if not self.membership.vote(self.position.step, reduced is not None):
            if reduced is not None:
                self._tell_broken("broke on another rank of this group", started)
            return None
        assert reduced is not None, "the vote passed with this rank's no"
        rows = [Row.decode(values) for values in reduced.rows.tolist()]
        made = Round(reduced.quorum, rows, judge(rows))
        self._take_position(made)
        self._serve(made)
        return made

    def commits(self, made: Round) -> bool:
        """Say whether the round is an update. With strays it is not: it is repeated without their gradients."""
        verdict = made.verdict
        enough = len(verdict.contributors) >= self._config.min_replica_size
        return not verdict.strays and verdict.valid_tokens > 0 and enough

    def update(self, made: Round, keep: bool = False) -> Update:
        """Turn the round's sums into the token-weighted mean over its contributors.

        Args:
            keep: copy the gradients into the update (else they stay in the exchange until the next round).
        """
        self._exchange.scale(self._nominal_tokens / made.verdict.valid_tokens)
        step = made.verdict.step + 1
        return Update(
            step=step,
            tokens=made.verdict.tokens,
            lineage=descend(made.lineage, made.quorum.key, step),
            gradients=self._exchange.reduced() if keep else None,
        )

    def advance(self, update: Update) -> None:
        """Count `update` as part of this group's state."""
        position = self.position
        position.step, position.lineage, position.digest = update.step, update.lineage, 0
        position.seen = max(position.seen, update.step)

    def _contributes(self, quorum: Quorum) -> bool:
        return self.position.standing is Standing.READY and not quorum.behind

    def _row(self, quorum: Quorum, contribution: Contribution) -> Row:
        position = self.position
        outdated = position.standing.has_state and quorum.behind
        facts = contribution if self._contributes(quorum) else NOTHING
        return Row(
            slot=self._config.replica_id,
            standing=Standing.BEHIND if outdated else position.standing,
            step=position.step if position.sound else 0,
            seen=max(position.seen, position.step),
            lineage=position.lineage,
            digest=position.digest,
            valid_tokens=facts.valid_tokens,
            tokens=facts.tokens,
            loss=facts.loss,
            max_loss=facts.max_loss,
            heals=position.heals,
            donor=position.donor,
            waited=position.waited,
        )

    def _take_position(self, made: Round) -> None:
        verdict, position = made.verdict, self.position
        position.seen = max(position.seen, *(row.seen for row in made.rows))
        if verdict.strays or verdict.tie:
            self._tell_differing(made)
        if verdict.tie:
            raise DivergedError(
                f"the groups' states differ after step {verdict.step} and no majority says which is right (digests "
                f"{ {row.slot: f'{row.digest:012x}' for row in made.rows} }); restart the job from a checkpoint"
            )
        if position.standing.has_state and made.quorum.rank not in verdict.holders:
            position.sound = made.quorum.rank not in verdict.strays
            position.standing = Standing.BEHIND

    def _serve(self, made: Round) -> None:
        """Copy the state to host memory if a joiner was sent to this group, before the optimizer writes it."""
        rank, position = made.quorum.rank, self.position
        sent = rank in made.verdict.donors.values()
        serving = rank in made.verdict.serving
        held = self._served is not None and (self._served.step, self._served.lineage) == (
            position.step,
            position.lineage,
        )
        # A joiner may fetch already although this group voted no in the round that named it the donor.
        if (sent and not held) or (serving and self._served is None):
            self._withdraw()
            started = time.monotonic()
            self._served = self._state.copy(position.step, position.lineage)
            self._server.publish(self._served, time.monotonic() - started)
        elif not sent and not serving:
            self._withdraw()

    def _withdraw(self) -> None:
        self._served = None
        if (snapshot := self._server.withdraw()) is not None:
            self._state.reuse(snapshot)

    def _tell_broken(self, error: str, started: float) -> None:
        step, seconds = self.position.step, time.monotonic() - started
        logger.warning("the exchange after step %d broke: %s", step, error)
        self._events.emit("exchange_failed", error=error, seconds=seconds, step=step)

    def _tell_differing(self, made: Round) -> None:
        claims = [row for row in made.rows if row.has_state]
        minority = sorted(made.slots(made.verdict.strays))
        logger.error("the groups' states differ after step %d; minority: groups %s", made.verdict.step, minority)
        self._events.emit(
            "digest_mismatch",
            step=made.verdict.step,
            digests={str(row.slot): f"{row.digest:012x}" for row in claims},
            lineages={str(row.slot): f"{row.lineage:012x}" for row in claims},
            minority=minority,
        )
