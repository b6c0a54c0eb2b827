# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A round: one exchange of all groups and one vote on it.

Whatever a group does between the groups (commit a step, heal, leave) it does in rounds, so that all members always
make the same collectives in the same order, whatever each of them is up to. What follows from a round is in
`decision.py`.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain
from titan_ft.engine.waits import WaitLog
from titan_ft.engine.watchdog import Watchdog
from titan_ft.gradients.exchange import ExchangeError, GradientExchange, OwnFacts, Reduced
from titan_ft.membership.group import Group
from titan_ft.membership.membership import Membership
from titan_ft.protocol.decision import Broken, Round, find_donors, judge, may_leave, spoiled
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Entry, decode, encode
from titan_ft.protocol.member import Member, Process, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.row import Row, Standing, Why, fold48
from titan_ft.round_settings import unit_of
from titan_ft.run.events import DigestMismatch, ExchangeFailed
from titan_ft.run.log import EventLog
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.snapshot import TrainState

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # between rounds in which a group can only wait for others


@dataclass(frozen=True)
class Contribution:
    """What this rank adds to the step besides gradients.

    Attributes:
        valid_tokens, tokens: of the whole group; see `Row`.
        loss: the group's loss sum / nominal tokens of a step of all groups.
        max_loss: largest mean loss of one of the group's ranks.
        seconds: that the group's slowest rank spent on it.
        entries: the batches that it was made of, as this rank read them.
        early: whether it would rather make more steps of the round, with a semi-synchronous method.
        changed: whether there are gradients though none of these batches made them.
        doing: what the group spent most of the time on until they were there.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    seconds: float = 0.0
    entries: tuple[Entry, ...] = ()
    early: bool = False
    changed: bool = False
    doing: Why = Why.COMPUTING

    @property
    def empty(self) -> bool:
        """Say whether nothing was trained: what gradients there are, are others'."""
        return not (self.entries or self.tokens or self.changed)

    def plus(self, other: Contribution) -> Contribution:
        """Add what further microbatches contribute."""
        return Contribution(
            valid_tokens=self.valid_tokens + other.valid_tokens,
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            max_loss=max(self.max_loss, other.max_loss),
            seconds=self.seconds + other.seconds,
            entries=self.entries + other.entries,
            doing=self.doing,
        )


NOTHING = Contribution()


class GradientUse(enum.Enum):
    """What a group does with the gradients that it has computed. Equal on all its ranks."""

    GIVE = enum.auto()
    REST = enum.auto()  # keeps them back: the step cannot be committed now
    LEAVE_OUT = enum.auto()  # they are not finite
    FORCE = enum.auto()  # gives them although they are not finite, because nobody has others
    OPEN = enum.auto()  # has none yet: the round is for those that missed the update before it

    @property
    def gives(self) -> bool:
        """Whether they go into the exchange."""
        return self in (GradientUse.GIVE, GradientUse.FORCE)


class Sign(enum.IntFlag):
    """What the ranks of a group look out for between two steps of a round."""

    WANTED = enum.auto()  # a joiner waits for the state
    AWAITED = enum.auto()  # the others wait for this group, which has asked for the next round early
    TOLD = enum.auto()  # the group is to leave
    OVERDUE = enum.auto()  # `sync_deadline_seconds` are over


class Rounds:
    """Makes rounds for one rank. Training thread only; all ranks of a group call the same methods alike."""

    def __init__(
        self,
        config: FaultTolerance,
        membership: Membership,
        exchange: GradientExchange,
        *,
        position: Position,
        state: TrainState,
        donor: Donor,
        group: Group,
        events: EventLog,
        drain: Drain,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._membership, self._exchange = config, membership, exchange
        self._position, self._state, self._donor, self._group = position, state, donor, group
        self._events, self._drain, self._watchdog = events, drain, watchdog
        self._met: frozenset[Member] = frozenset()  # members of the last round that worked
        self._asked_for = False  # whether one of them asked for a donor
        self.waits = WaitLog()
        self._began = math.inf  # when `make` did, unless the exchange was under way

    def ask(self) -> None:
        """Ask for the next round's quorum, unless it is asked for."""
        if not self._membership.asked and not self._position.leaving:
            self._membership.begin(self._position.claim)

    @property
    def met(self) -> bool:
        """Say whether this group has made a round that worked: who was in it knows of it."""
        return bool(self._met)

    @property
    def asked(self) -> bool:
        """Say whether the next round's quorum is asked for."""
        return self._membership.asked

    @property
    def awaited(self) -> bool:
        """Say whether the quorum asked for is there, as this rank sees it: the others are at their next round."""
        return self._membership.answered

    @property
    def told_to_leave(self) -> bool:
        """Say whether this rank knows that its group is to leave."""
        return self._drain.requested

    @property
    def must_hurry(self) -> bool:
        """Say whether a group that leaves waits for others no longer. A collective of the group."""
        return any(self._group.gather(self._drain.is_urgent))

    @property
    def signs(self) -> Sign:
        """Return what this rank sees between two steps of a round."""
        seen = ((Sign.WANTED, self._donor.wanted), (Sign.AWAITED, self.awaited), (Sign.TOLD, self.told_to_leave))
        return Sign(sum(sign for sign, is_seen in seen if is_seen))

    def pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Wait a moment for the quorum asked for, which is no hang."""
        with self._watchdog.paused():
            self._membership.wait_briefly(seconds)

    @property
    def process(self) -> Process:
        """Return this group's process, as other groups know it."""
        return self._membership.member.process

    def meet(self) -> Quorum:
        """Ask for the next round's quorum and wait for it.

        Raises:
            Leaving: the group was told to leave, and the others will not be here in time.
        """
        self.ask()
        with self._watchdog.paused():
            return self._await_quorum()

    def peer_address(self, rank: int) -> str:
        """Return the state server's address (host:port) of the same group rank in member `rank`."""
        return self._membership.peer_address(rank)

    def find_holders(self) -> dict[int, Peer]:
        """Return the counterparts of this rank whose state a newcomer can use, by slot; any thread."""
        return self._membership.find_holders()

    def find_living(self, slots: Collection[int]) -> set[int]:
        """Return which groups of the last round live, of those in `slots`. A collective of the group."""
        members = [member for member in self._met if member.slot in slots]
        return self._group.union(self._membership.find_living(members) if self._group.leads else ())

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return the addresses (host:port) of their state servers; any thread. Raises as `Membership` does."""
        return self._membership.find_addresses(slots)

    def serve(self) -> None:
        """Copy the state for a joiner, between two steps of a round of several: all ranks behind the same one, since
        moments must fit together.
        """
        self._donor.copy(self._position)

    def offer(self) -> None:
        """Let a newcomer have the state while the next step is computed."""
        if self._config.group_size > 1 and not self._config.semi_sync_method:
            self._donor.offer(self._position)

    def retract(self) -> None:
        """Offer nothing any more: this group's state is not the others'."""
        self._donor.retract()

    def begin(self) -> None:
        """Note that this group trains, or is in a round of the others: told to leave, it has something to finish."""
        self._drain.begin()

    def find_outsiders(self, made: Round) -> list[int]:
        """Return the slots of groups that live and were not in a round, as rank 0 sees it; none on other ranks."""
        return self._membership.find_outsiders(made.quorum, self._position.step)

    def launch(self) -> None:
        """Let the next backward launch the exchange of the next round; call it before the step's last backward."""
        self.ask()
        self._exchange.arm(lambda quorum: not self._is_outdated(quorum))

    def send(self, contribution: Contribution) -> None:
        """Launch the next round's exchange with all that this group gives to it; returns at once.

        So a group makes steps of its own while the exchange is under way. `make` with the same completes it.
        """
        self.ask()
        if self._compares_changes(contribution):
            self.take_digest()
        self._donor.end_offer()
        self._began = math.inf
        self._exchange.send(
            lambda quorum: not self._is_outdated(quorum),
            lambda quorum: self._describe(quorum, contribution, GradientUse.GIVE),
        )

    def launch_empty(self) -> None:
        """Launch the exchange of the next round without gradients; returns at once, and `make` completes it.

        So a group that heals has time for itself until the others are done with their step.
        """
        if not self._position.leaving:
            self.ask()
            self._exchange.launch_empty()

    def make(self, contribution: Contribution = NOTHING, use: GradientUse = GradientUse.GIVE) -> Round | Broken:
        """Make one round. The position then has taken it in, and a joiner that it sends here finds a copy of the state.

        Asks for a quorum unless one is asked for.

        Raises:
            Leaving: the group was told to leave, and the others will not be here in time.
        """
        with self._watchdog.paused():
            self.ask()
            started = time.monotonic()
            self._began = math.inf if self._exchange.sent else started
            if self._compares_changes(contribution) and not self._exchange.sent:
                self.take_digest()
            elif use is GradientUse.OPEN and self._config.digest_every and not self._position.digest:
                self.take_digest()  # what all show alike here, each may serve until the next update
            quorum = self._await_quorum()
            ends = use.gives and not contribution.empty and not contribution.early
            if not (self._config.semi_sync_method and ends):
                self._digest_for_joiners(quorum)  # else in the round behind it: nobody need replay this one
            gives = use.gives and not contribution.empty and not self._is_outdated(quorum)
            made, error = self._exchange_once(gives, contribution, use)
            self.waits.start_wait(quorum.asked if use is GradientUse.OPEN else started)
            if not self._vote(made):
                error = error or "broke on another rank of this group"
                return self._break(error, started, quorum)
        assert made is not None, "the vote passed with this rank's no"
        self.waits.note_success(made.rows, quorum.rank, quorum.answered, quorum.processes, self._position.left)
        self._met, self._asked_for = frozenset(quorum.members), made.asked_for
        self._position.observe(made)
        # One that is a step ahead or behind saw a broken exchange differently: no state differs.
        alike = made.verdict.step
        if made.verdict.tie or any(made.rows[rank].step == alike for rank in made.verdict.strays):
            self._report_mismatch(made)
        self._donor.serve(made, self._position, find_donors(made, self._config))
        return made

    def _await_quorum(self) -> Quorum:
        """Wait for the quorum asked for.

        Another group may be in the midst of a long round, or hang and heartbeat: then nobody gets a quorum for
        as long as it does. A group that was told to leave waits for the others for a part of its time only:
        when all of that is over, its ranks end wherever they are, and nothing is saved.

        Raises:
            Leaving: it has waited long enough; on all ranks of the group.
        """
        if self._drain.wait_for_others(lambda: self._membership.answered, self._wait_briefly):
            return self._membership.wait()
        self._position.leave()
        raise Leaving

    def _wait_briefly(self) -> None:
        self._membership.wait_briefly(PAUSE_SECONDS)

    def take_digest(self) -> str:
        """Take the digest of the state; it travels with the rounds until the next update.

        Returns:
            This rank's part of it, in hex.
        """
        digest = self._state.digest()
        self._position.take_digest(fold48(str(self._group.gather(fold48(digest)))))
        return digest

    def _compares_changes(self, contribution: Contribution) -> bool:
        """Say whether the groups show their bytes at the end of a round of several steps, so before its sum is used.

        A bit of an anchor that has flipped in the midst of it would be in this group's change, and so in everybody's
        state. All that come to that end show theirs, also with nothing to give: each may be what makes the majority.
        """
        config = self._config
        at_end = not contribution.empty or contribution.early
        return bool(config.semi_sync_method and config.digest_every and at_end)

    def _digest_for_joiners(self, quorum: Quorum) -> None:
        """Take the digest if this round may name a donor: only who shows its bytes as they are now is one."""
        joiners = self._asked_for or not self._met.issuperset(quorum.members)
        if joiners and self._position.standing.has_state:
            self.take_digest()

    def _exchange_once(self, gives: bool, contribution: Contribution, use: GradientUse) -> tuple[Round | None, str]:
        """Make the exchange; returns the round, or why its sums are not to be used."""
        try:
            reduced = self._exchange.finish(
                gives,
                lambda quorum: self._describe(quorum, contribution, use),
                due=not contribution.early and use is not GradientUse.OPEN,
            )
        except ExchangeError as error:
            return None, str(error)
        made = _read(reduced)
        # The members read the same rows, so that each votes no by itself: a NaN in the weights of one group is bad
        # enough, one sum carries it into all.
        if slots := spoiled(made.rows):
            return None, f"the gradients of groups {slots} are not finite"
        return made, ""

    def _vote(self, made: Round | None) -> bool:
        """Say whether the round worked on all ranks of this group, and note whether the group leaves.

        Args:
            made: the round; None if it did not work on this rank.
        """
        self._drain.before_vote(lambda: self._may_leave(made))
        agreed = self._membership.vote(self._position.step, made is not None)
        if self._drain.after_vote():
            self._position.leave()
        return agreed

    def _may_leave(self, made: Round | None) -> bool:
        """Say whether this group, if it was told to leave, may do so after this round, as this rank sees it."""
        if made is not None:
            return may_leave(made)
        # Nobody may have read that this group leaves. It shows that in the next round, unless rounds
        # break until its time is nearly over.
        return self._drain.is_urgent or not self._position.standing.has_state

    def _break(self, error: str, started: float, quorum: Quorum) -> Broken:
        step, seconds = self._position.step, time.monotonic() - started
        self.waits.note_broken(quorum.processes, started + seconds)
        logger.warning("the exchange after %s %d broke: %s", unit_of(self._config), step, error)
        self._events.emit(ExchangeFailed(error=error, seconds=seconds, step=step))
        self._position.broke()
        return Broken(error, spoiled=any(self._group.gather(int(self._exchange.spoiled))))

    def _is_outdated(self, quorum: Quorum) -> bool:
        """Say whether this group's claim to the job's state is void, by the steps that the others report.

        One update more may be that of a group whose exchange was complete when it broke for the rest: the rows settle
        who goes back.
        """
        return quorum.max_step > self._position.step + (1 if self._position.training else 0)

    def _describe(self, quorum: Quorum, contribution: Contribution, use: GradientUse) -> OwnFacts:
        position, given = self._position, self._exchange.contributed
        claims = position.standing.has_state and not self._is_outdated(quorum)
        resting = claims and use is GradientUse.REST and not contribution.empty
        facts = contribution if given or resting else NOTHING
        came = max(quorum.ready, quorum.asked if use is GradientUse.OPEN else self._exchange.came)
        row = Row(
            slot=self._config.replica_id,
            standing=Standing.BEHIND if position.standing.has_state and not claims else position.standing,
            step=position.claim,
            seen=max(position.seen, position.claim),
            lineage=position.lineage,
            digest=position.digest,
            valid_tokens=facts.valid_tokens,
            tokens=facts.tokens,
            loss=facts.loss,
            max_loss=facts.max_loss,
            heals=position.heals,
            donor=position.donor,
            from_step=position.from_step,
            waited=position.waited,
            awaited=position.awaited,
            seconds=facts.seconds,
            saved=position.saved,
            leaving=self._drain.requested,
            forced=use is GradientUse.FORCE,
            excluded=use is GradientUse.LEAVE_OUT,
            resting=resting,
            training=position.training and claims,
            opening=claims and use is GradientUse.OPEN,
            early=claims and contribution.early,
            asked=quorum.answered - quorum.asked,
            came=came - quorum.answered,
            connecting=quorum.answered < quorum.ready and min(self._began, came) < quorum.ready,
            doing=contribution.doing if claims and position.training else self._find_joining(),
        )
        return row.encode(), encode(facts.entries)

    def _find_joining(self) -> Why:
        """Return how a group that lacks the state, or has yet to begin, keeps the others waiting."""
        return Why.ASKED if self._position.awaited else Why.CATCHING_UP

    def _report_mismatch(self, made: Round) -> None:
        claims = [row for row in made.rows if row.has_state]
        minority = sorted(made.slots(made.verdict.strays))
        text = "the groups' states differ after %s %d; minority: groups %s"
        logger.error(text, unit_of(self._config), made.verdict.step, minority)
        self._events.emit(
            DigestMismatch(
                step=made.verdict.step,
                digests={row.slot: f"{row.digest:012x}" for row in claims},
                lineages={row.slot: f"{row.lineage:012x}" for row in claims},
                minority=minority,
            )
        )


def _read(reduced: Reduced) -> Round:
    told = zip(reduced.rows, reduced.spoiled, strict=True)
    rows = [Row.decode(values, spoiled) for values, spoiled in told]
    entries = [decode(message) for message in reduced.messages]
    verdict = judge(rows, [[entry.slot for entry in own] for own in entries])
    # Not the contributors' only: a batch whose labels are all masked has no weight and is trained all the same.
    return Round(reduced.quorum, rows, verdict, [entry for rank in verdict.ready for entry in entries[rank]])
