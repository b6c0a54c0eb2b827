# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A round: one exchange of all groups, the vote on it, and the verdict on its rows.

Whatever a group does between the groups (commit a step, heal, leave) it does in rounds, so that all members always
make the same collectives in the same order, whatever each of them is up to.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import Update
from titan_ft.replica.drain import Drain
from titan_ft.replica.errors import DivergedError
from titan_ft.replica.exchange import ExchangeError, GradientExchange, Reduced, Told
from titan_ft.replica.ledger import Entry, decode, encode
from titan_ft.replica.member import Quorum
from titan_ft.replica.membership import Membership
from titan_ft.replica.row import Row, Standing, Verdict, descend, judge
from titan_ft.replica.snapshot import Snapshot, TrainState
from titan_ft.replica.state_server import StateServer
from titan_ft.replica.watchdog import Watchdog

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # between rounds in which a group can only wait for others


class Leaving(Exception):  # noqa: N818  # no error, but an end in order
    """This group was told to leave, and all of its ranks have agreed."""


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
    awaited: bool = False  # the others wait for the transfer under way
    saved: int = 0  # step of the latest complete checkpoint heard of
    agreed: int = 0  # step of the latest digest that all holders had alike
    corrupt: bool = False  # its bytes are not the others': what was saved of it is to be withdrawn
    left: set[int] = field(default_factory=set)  # slots of groups that left in order
    sound: bool = True  # False: the state is not one that the job went through, only a donor's will do


@dataclass(frozen=True)
class Contribution:
    """What this rank adds to the step besides gradients.

    Attributes:
        valid_tokens, tokens: of the whole group; see `Row`.
        loss: the group's loss sum / nominal tokens of a step of all groups.
        max_loss: largest mean loss of one of the group's ranks.
        seconds: that the group's slowest rank spent on it.
        entries: the batches that it was made of, as this rank read them.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    seconds: float = 0.0
    entries: tuple[Entry, ...] = ()

    def plus(self, other: Contribution) -> Contribution:
        """Add what further microbatches contribute."""
        return Contribution(
            valid_tokens=self.valid_tokens + other.valid_tokens,
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            max_loss=max(self.max_loss, other.max_loss),
            seconds=self.seconds + other.seconds,
            entries=self.entries + other.entries,
        )


NOTHING = Contribution()


@dataclass(frozen=True)
class Round:
    """A round that worked on all ranks of this group: the quorum, its members' rows and the verdict on them.

    `entries` are the batches that the ready groups' gradients are made of.
    """

    quorum: Quorum
    rows: list[Row]
    verdict: Verdict
    entries: list[Entry]

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
        drain: Drain,
        watchdog: Watchdog,
    ) -> None:
        self.position = Position()
        self.membership = membership
        self._drain, self._watchdog = drain, watchdog
        self.nonfinite = False
        """Whether the gradients that this rank added to the last exchange have an inf or a NaN."""
        self.excluded = False
        """Whether this group leaves its gradients out of the step under way; equal on all its ranks."""
        self.insists = False
        """Whether it adds them all the same, because nobody has finite ones; equal on all its ranks."""
        self.leaving = False
        """Whether all ranks of this group have agreed to leave: it asks for no quorum any more."""
        self._config, self._exchange, self._state, self._server = config, exchange, state, server
        self._events = events
        self._nominal_tokens = nominal_tokens
        self._served: Snapshot | None = None

    def meet(self) -> Quorum:
        """Ask for the next round's quorum and wait for it."""
        self.ask()
        with self._watchdog.paused():
            return self.membership.wait()

    def ask(self) -> None:
        """Ask for the next round's quorum, unless it is asked for."""
        if not self.membership.asked and not self.leaving:
            self.membership.begin(self.position.step if self.position.sound else 0)

    def arm(self) -> None:
        """Let the next backward launch the exchange of the next round."""
        self.ask()
        self.excluded = self.insists = False  # of the step before, if this group healed since
        self._exchange.arm(self._contributes)

    def offer_nothing(self) -> None:
        """Launch the exchange of the next round without gradients; returns at once. What `make` does then is the rest.

        So a group that heals has time for itself until the others are done with their step.
        """
        if not self.leaving:
            self.ask()
            self._exchange.offer_nothing()

    def make(self, contribution: Contribution = NOTHING) -> Round | None:
        """Make one round; None if it broke on any rank of this group. Asks for a quorum unless one is asked for.

        Takes the group's standing back if the rows say that its state is not the job's, and copies the state for a
        joiner if they send one here.

        Raises:
            DivergedError: the groups' states differ without a majority.
            Leaving: the group agreed to leave in the round before.
        """
        if self.leaving:
            raise Leaving
        with self._watchdog.paused():
            reduced = self._exchange_and_vote(contribution)
        if reduced is None:
            return None
        rows = [Row.decode(values) for values in reduced.rows.tolist()]
        entries = [decode(message) for message in reduced.messages]
        verdict = judge(rows, [[entry.slot for entry in own] for own in entries])
        # Not the contributors' only: a batch whose labels are all masked has no weight and is trained all the same.
        made = Round(reduced.quorum, rows, verdict, [entry for rank in verdict.ready for entry in entries[rank]])
        self._take_position(made)
        self._serve(made)
        return made

    def _exchange_and_vote(self, contribution: Contribution) -> Reduced | None:
        """Return what the members told, or None if it broke on any rank of this group."""
        self.ask()
        started = time.monotonic()
        reduced = None
        try:
            reduced = self._exchange.finish(self._contributes, lambda quorum: self._tell(quorum, contribution))
            reduced = self._refuse_nonfinite(reduced, started)
        except ExchangeError as error:
            self._tell_broken(str(error), started)
        self._drain.before_vote()
        agreed = self.membership.vote(self.position.step, reduced is not None)
        self.leaving = self._drain.after_vote()
        if agreed:
            assert reduced is not None, "the vote passed with this rank's no"
            return reduced
        if reduced is not None:
            self._tell_broken("broke on another rank of this group", started)
        return None

    def _refuse_nonfinite(self, reduced: Reduced, started: float) -> Reduced | None:
        """Return the exchange if its sums may be used; None if a member says that it spoiled them.

        The members read the same rows, so that each votes no by itself, and the exchange is repeated without that
        group's gradients: a NaN in the weights of one group is bad enough, one sum carries it into all.
        """
        rows = [Row.decode(values) for values in reduced.rows.tolist()]
        spoilers = [row.slot for row in rows if row.nonfinite]
        # Unless all of them had such and agreed on it: one that insists must not spoil the others' sum.
        if not spoilers or all(row.insists for row in rows if row.valid_tokens or row.excluded):
            return reduced
        self._tell_broken(f"the gradients of groups {spoilers} are not finite", started)
        return None

    def commits(self, made: Round) -> bool:
        """Say whether the round is an update. With strays it is not: it is repeated without their gradients."""
        verdict = made.verdict
        enough = len(verdict.contributors) + len(verdict.excluded) >= self._config.min_replica_size
        return not verdict.strays and not verdict.awaited and verdict.valid_tokens > 0 and enough

    def uncovered(self, made: Round) -> list[int]:
        """Return the slots whose data the round's gradients lack though `batch_policy` wants it in."""
        if self._config.batch_policy == "shrink" or made.verdict.excluded:
            return []  # whoever reads a batch that makes NaNs is excluded too, one after the other
        return sorted(set(range(self._config.group_size)) - {entry.slot for entry in made.entries})

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
            entries=made.entries,
            readers=made.slots(made.verdict.ready),
            gradients=self._exchange.reduced() if keep else None,
        )

    def advance(self, update: Update) -> None:
        """Count `update` as part of this group's state."""
        position, self.excluded, self.insists = self.position, False, False
        position.step, position.lineage, position.digest = update.step, update.lineage, 0
        position.seen = max(position.seen, update.step)

    def _contributes(self, quorum: Quorum) -> bool:
        return self.position.standing is Standing.READY and not quorum.behind and not self.excluded

    def _tell(self, quorum: Quorum, contribution: Contribution) -> Told:
        position = self.position
        outdated = position.standing.has_state and quorum.behind
        contributes = self._exchange.contributed
        facts = contribution if contributes else NOTHING
        self.nonfinite = contributes and not self._exchange.finite
        row = Row(
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
            awaited=position.awaited,
            seconds=facts.seconds,
            saved=position.saved,
            leaving=self._drain.requested,
            nonfinite=self.nonfinite,
            excluded=self.excluded,
            insists=contributes and self.insists,
        )
        return row.encode(), encode(facts.entries)

    def _take_position(self, made: Round) -> None:
        verdict, position = made.verdict, self.position
        position.seen = max(position.seen, *(row.seen for row in made.rows))
        position.saved = max(position.saved, *(row.saved for row in made.rows))
        position.left -= {row.slot for row in made.rows}
        position.left |= {row.slot for row in made.rows if row.leaving}
        self._compare_digests(made)
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

    def _compare_digests(self, made: Round) -> None:
        """Note up to which step the holders' bytes are the same, and who is found to have others.

        What a group with other bytes saved since then is not to be trusted: another one saves again.
        """
        verdict, position = made.verdict, self.position
        digest = made.rows[verdict.holders[0]].digest if verdict.holders else 0
        lineage = made.rows[verdict.holders[0]].lineage if verdict.holders else 0
        corrupt = [rank for rank in verdict.strays if digest and made.rows[rank].lineage == lineage]
        if corrupt:
            position.saved = min(position.saved, position.agreed)
            position.corrupt |= made.quorum.rank in corrupt
        elif digest and not verdict.tie:
            position.agreed = verdict.step

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
