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
from contextlib import AbstractContextManager

from titan_ft.config import FaultTolerance
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain
from titan_ft.engine.waits import WaitLog
from titan_ft.engine.watchdog import Watchdog
from titan_ft.gradients.exchange import GradientExchange, Reduced
from titan_ft.gradients.flight import ExchangeError
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.membership.membership import Membership
from titan_ft.protocol.decision import find_first_donors, is_under_way, is_update, may_leave
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import decode
from titan_ft.protocol.member import Member, Process, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution, GradientUse, RoundReport
from titan_ft.protocol.round import Broken, Round
from titan_ft.protocol.row import Row, Why, fold48
from titan_ft.protocol.strategy import strategy_of
from titan_ft.protocol.verdict import judge, spoiled
from titan_ft.run.events import DigestMismatch, ExchangeFailed
from titan_ft.run.log import EventLog
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.snapshot import TrainState

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # between rounds in which a group can only wait for others


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
        group: GroupCollectives,
        events: EventLog,
        drain: Drain,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._membership, self._exchange = config, membership, exchange
        self._position, self._state, self._donor, self._group = position, state, donor, group
        self._events, self._drain, self._watchdog = events, drain, watchdog
        self._strategy = strategy_of(config)
        self._met: frozenset[Member] = frozenset()  # members of the last round that worked
        self.last: Round | None = None  # the last round that worked
        self.waits = WaitLog()

    def ask(self, *, ahead: bool = False) -> None:
        """Ask for the next round's quorum, unless it is asked for.

        Args:
            ahead: this group computes a step before it waits for the quorum. Until then a lone group's quorum may grow.
        """
        if self._membership.quorum_requested:
            if not ahead:
                self._membership.need_quorum()
        elif not self._position.leaving:
            may_grow = ahead and self._config.group_size > 1 and not self._strategy.is_long
            self._membership.request_quorum(self._position.claim, may_grow=may_grow)

    @property
    def asked(self) -> bool:
        """Say whether the next round's quorum is asked for."""
        return self._membership.quorum_requested

    @property
    def awaited(self) -> bool:
        """Say whether the quorum asked for is there, as this rank sees it: the others are at their next round."""
        return self._membership.quorum_ready

    @property
    def told_to_leave(self) -> bool:
        """Say whether this rank knows that its group is to leave."""
        return self._drain.requested

    @property
    def must_hurry(self) -> bool:
        """Say whether a group that leaves waits for others no longer. A collective of the group."""
        return any(self._group.gather(self._drain.is_urgent))

    def lacks_time(self, seconds: float, share: float) -> bool:
        """Say whether so many more seconds exceed a share of the time to leave, on any rank. A collective."""
        timeout = self._config.drain_timeout_seconds
        return any(self._group.gather(self._drain.spent + seconds / timeout > share))

    @property
    def signs(self) -> Sign:
        """Return what this rank sees between two steps of a round."""
        seen = ((Sign.WANTED, self._donor.wanted), (Sign.AWAITED, self.awaited), (Sign.TOLD, self.told_to_leave))
        return Sign(sum(sign for sign, is_seen in seen if is_seen))

    def pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Wait a moment for the quorum asked for, which is no hang."""
        with self.waiting():
            self._membership.await_quorum_for(seconds)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait for other groups: their step may be longer than `hang_timeout_seconds`."""
        return self._watchdog.paused()

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

    def find_holders(self) -> dict[int, Peer]:
        """Return the counterparts of this rank whose state a joiner can use, by slot; any thread."""
        return self._membership.find_holders()

    def expect(self, slots: Sequence[int]) -> None:
        """Note which groups offered the state that this group fetches; see `Membership.note_donors`."""
        self._membership.note_donors(slots)

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
        """Let a joiner have the state while the next step is computed."""
        if self._config.group_size > 1 and not self._strategy.is_long:
            self._donor.offer(self._position)

    def _offer_after(self, made: Round) -> None:
        """Offer the state after a round that makes no update, if this group may and a joiner has time to fetch it.

        In a round of several steps a joiner is to train before the next exchange, which therefore cannot confirm its
        bytes: holders offer only bytes that they have compared.
        """
        if self._config.group_size == 1:
            return
        ends, may_offer = is_update(made, self._config), made.quorum.rank in made.verdict.offering
        if self._strategy.is_long:
            if may_offer and made.verdict.verified and not (ends or is_under_way(made, self._config)):
                self._donor.offer_compared(self._position, made.verdict.digest)
                # The joiner's request may come after this group has begun a step, and would wait for the step's end.
                if made.quorum.slots[made.quorum.rank] in find_first_donors(made):
                    self._donor.copy_ahead(self._position)
            else:
                self._donor.end_offer()
        elif not may_offer:
            self._donor.retract()
        elif not ends and self._donor.offers != self._position.step:
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
        # Not ahead: a newcomer that holds as much as this group has not heard of the step, and would keep it waiting.
        if not self.asked:
            self.ask()
        self._exchange.arm(self._position.newest_step)

    def send(self, contribution: Contribution) -> None:
        """Launch the next round's exchange with all that this group gives to it; returns at once.

        So a group makes steps of its own while the exchange is under way. `make` with the same completes it.
        """
        self.ask()
        if self._compares_changes(contribution):
            self.take_digest()
        self._donor.end_offer()
        self._exchange.send(self._position.newest_step, self._report(contribution, GradientUse.GIVE, math.inf))

    def launch_empty(self) -> None:
        """Launch the exchange of the next round without gradients; returns at once, and `make` completes it.

        So a group that heals has time for itself until the others are done with their step.
        """
        if not self._position.leaving:
            self.ask()
            self._exchange.launch()

    def make(self, contribution: Contribution = NOTHING, use: GradientUse = GradientUse.GIVE) -> Round | Broken:
        """Make one round. The position then has taken it in, and a joiner that fetches from here finds a copy.

        Asks for a quorum unless one is asked for.

        Raises:
            Leaving: the group was told to leave, and the others will not be here in time.
        """
        with self._watchdog.paused():
            self.ask()
            started = time.monotonic()
            if self._compares_changes(contribution) and not self._exchange.sent:
                self.take_digest()
            elif use is GradientUse.OPEN and self._config.digest_every and not self._position.digest:
                self.take_digest()  # what all show alike here, each may serve until the next update
            quorum = self._await_quorum()
            ends = use.gives and not contribution.empty and not contribution.early
            if not (self._strategy.compares_before_sum and ends):
                self._digest_for_joiners(quorum)  # else in the round behind it: nobody need replay this one
            if not self._exchange.sent:
                gives = use.gives and not contribution.empty
                due = not contribution.early and use is not GradientUse.OPEN
                self._exchange.launch(self._position.newest_step if gives else None, due=due)
            made, error, is_spoiled = self._exchange_once(self._report(contribution, use, started))
            self.waits.start_wait(quorum.asked if use is GradientUse.OPEN else started)
            if not self._vote(made):
                error = error or "broke on another rank of this group"
                return self._break(error, is_spoiled, started, quorum)
        assert made is not None, "the vote passed with this rank's no"
        self.waits.note_success(
            made.rows,
            quorum.rank,
            quorum.answered,
            quorum.ready,
            quorum.processes,
            self._position.left,
        )
        self._met, self.last = frozenset(quorum.members), made
        self._position.observe(made)
        # One that is a step ahead or behind saw a broken exchange differently: no state differs.
        alike = made.verdict.step
        if made.verdict.tie or any(made.rows[rank].step == alike for rank in made.verdict.strays):
            self._report_mismatch(made)
        self._donor.serve(made, self._position, is_update=is_update(made, self._config))
        self._offer_after(made)
        return made

    def _await_quorum(self) -> Quorum:
        """Wait for the quorum asked for.

        Another group may be in the midst of a long round, or hang and heartbeat: then nobody gets a quorum for
        as long as it does. A group that was told to leave waits for the others for a part of its time only:
        when all of that is over, its ranks end wherever they are, and nothing is saved.

        Raises:
            Leaving: it has waited long enough; on all ranks of the group.
        """
        if self._drain.wait_for_others(lambda: self._membership.quorum_ready, self._wait_briefly):
            return self._membership.await_quorum()
        self._position.leave()
        raise Leaving

    def _wait_briefly(self) -> None:
        self._membership.await_quorum_for(PAUSE_SECONDS)

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

        All that come to that end show theirs, also with nothing to give: each may be what makes the majority.
        """
        at_end = not contribution.empty or contribution.early
        return bool(self._strategy.compares_before_sum and self._config.digest_every and at_end)

    def _digest_for_joiners(self, quorum: Quorum) -> None:
        """Take the digest if a joiner may fetch the state: the round confirms the bytes that it fetches."""
        is_asked = self.last is not None and self.last.asked_for
        joiners = is_asked or not self._met.issuperset(quorum.members)
        if joiners and self._position.standing.has_state:
            self.take_digest()

    def _exchange_once(self, report: RoundReport) -> tuple[Round | None, str, bool]:
        """Complete the exchange.

        Returns:
            The round, or why its sums are not to be used; and whether this rank gave gradients that are not finite.
        """
        try:
            reduced = self._exchange.finish(report)
        except ExchangeError as error:
            return None, str(error), False
        made, is_spoiled = _read(reduced), reduced.spoiled[reduced.quorum.rank]
        # The members read the same rows, so that each votes no by itself: a NaN in the weights of one group is bad
        # enough, one sum carries it into all.
        if slots := spoiled(made.rows):
            return None, f"the gradients of groups {slots} are not finite", is_spoiled
        return made, "", is_spoiled

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

    def _break(self, error: str, is_spoiled: bool, started: float, quorum: Quorum) -> Broken:
        step, seconds = self._position.step, time.monotonic() - started
        self.waits.note_broken(quorum.processes, started + seconds)
        logger.warning("the exchange after %s %d broke: %s", self._strategy.unit, step, error)
        self._events.emit(ExchangeFailed(error=error, seconds=seconds, step=step))
        self._position.broke()
        return Broken(error, spoiled=any(self._group.gather(int(is_spoiled))))

    def _report(self, contribution: Contribution, use: GradientUse, began: float) -> RoundReport:
        """Return this group's report to the next round, which holds until the position changes.

        Args:
            began: see `RoundReport`.
        """
        position = self._position
        facts = Row(
            slot=self._config.replica_id,
            standing=position.standing,
            step=position.claim,
            seen=max(position.seen, position.claim),
            lineage=position.lineage,
            digest=position.digest,
            donor=position.donor,
            from_step=position.from_step,
            waited=position.waited,
            awaited=position.awaited,
            saved=position.saved,
            training=position.training,
        )
        joining = Why.ASKED if position.awaited else Why.CATCHING_UP
        return RoundReport(facts, contribution, use, position.newest_step, began, joining, self._drain)

    def _report_mismatch(self, made: Round) -> None:
        claims = [row for row in made.rows if row.has_state]
        minority = sorted(made.slots(made.verdict.strays))
        text = "the groups' states differ after %s %d; minority: groups %s"
        logger.error(text, self._strategy.unit, made.verdict.step, minority)
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
    trained = [entry for rank in verdict.ready for entry in entries[rank]]
    return Round(reduced.quorum, rows, verdict, trained, reduced.sums)
