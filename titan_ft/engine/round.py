# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A round: one exchange between the groups of a quorum, and a vote in each group on the exchange.

Groups act together in rounds only: they commit a step, heal and leave in them. So all groups of a
quorum always make the same collectives in the same order, even if one of them trains, another one
heals and a third one leaves. `protocol/decision.py` decides what a group does after a round.

Terms:

- A *quorum* is the list of the groups that take part in a round, its *members*. The lighthouse, a
  server for all groups, answers the quorum requests of the members at the same moment.
- In the *exchange*, each group gives its gradients, or nothing, to the sums. It sends one *row* of
  facts to all others.
- A round *works* if the exchange worked on all ranks of this group (`Round`). Otherwise it *broke*
  (`Broken`), and the group makes it again.
- The *verdict* is the meaning of the rows (`protocol/verdict.py`). A *holder* holds the job's
  state. A *stray* claims to hold the job's state, and differs from the majority.
- A *joiner* fetches the state from a holder, its *donor*. The *digest* is a hash of a state's
  bytes. The joiner compares the fetched bytes with the digest in the holders' rows.
- A *long round* has another meaning: `sync_steps` local steps and the exchange after them, with a
  semi-synchronous method. In an *opening round* right after an update, the groups only meet.

See docs/exchange.md.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain
from titan_ft.engine.waits import WaitLog
from titan_ft.engine.watchdog import Watchdog
from titan_ft.gradients.exchange import ExchangeResult, GradientExchange
from titan_ft.gradients.flight import ExchangeError
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.membership.membership import Membership
from titan_ft.protocol.decision import find_first_donors, is_update, is_update_near, may_leave
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import decode
from titan_ft.protocol.member import GroupProcess, Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution, GradientUse, RoundReport
from titan_ft.protocol.round import Broken, Round
from titan_ft.protocol.row import Row, Why, fold48
from titan_ft.protocol.strategy import strategy_of
from titan_ft.protocol.verdict import find_sum_spoilers, judge
from titan_ft.run.events import DigestMismatch, ExchangeFailed
from titan_ft.run.log import EventLog
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.snapshot import TrainState

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # between rounds in which a group can only wait for others


class Sign(enum.IntFlag):
    """Signs that a rank looks for between two local steps of a long round."""

    STATE_WANTED = enum.auto()  # a joiner waits for a copy of the state
    # The quorum is ready, which this group has requested before the end of its local steps.
    OTHERS_WAIT = enum.auto()
    LEAVE_REQUESTED = enum.auto()  # this group must leave
    OVERDUE = enum.auto()  # `sync_deadline_seconds` have passed


@dataclass(frozen=True)
class _ExchangeOutcome:
    """The outcome of an exchange on this rank, before the vote.

    Attributes:
        made: the round; None if the exchange broke, or if its sums are not finite.
        error: the reason if there is no round.
        gave_nonfinite: this rank gave gradients that are not finite.
    """

    made: Round | None
    error: str = ""
    gave_nonfinite: bool = False


class Rounds:
    """Makes rounds for one rank.

    `ReplicaDimension` calls it for a group that trains, and `Heal` for a group that heals. A round
    is `make`, which a launch may precede: `arm`, `launch_with` or `launch_without_gradients`.

    Threads: all methods run on the training thread, but `find_holders` and `find_addresses` may run
    on any thread. All ranks of a group call the same methods in the same order.

    After a broken round, the local gradients and the state are untouched, and the round can be made
    again.

    Args:
        membership: requests quorums from the lighthouse, and makes the votes.
        exchange: sums the gradients and sends the rows, on a thread of its own.
        position: this group's place in the job. The group's row shows it.
        donor: offers the state to joiners, and copies it for them.
        group: collectives among the ranks of this group.
        drain: knows whether the group must leave.

    Attributes:
        last_round: the last round that worked; None = there was none.
        waits: how long this rank waited for which group.
    """

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
        self._config = config
        self._membership = membership
        self._exchange = exchange
        self._position = position
        self._state = state
        self._donor = donor
        self._group = group
        self._events = events
        self._drain = drain
        self._watchdog = watchdog
        self._strategy = strategy_of(config)  # an update of one step, or of a long round
        self._last_members: frozenset[Member] = frozenset()  # members of the last round that worked
        self.last_round: Round | None = None
        self.waits = WaitLog()

    # The quorum

    def request_quorum(self, *, ahead: bool = False) -> None:
        """Request the next round's quorum, unless it is requested already.

        Args:
            ahead: this group computes a step before it needs the quorum. If it is alone in the
                quorum, other groups may come during the step.
        """
        if self._membership.quorum_requested:
            if not ahead:
                # If the quorum was requested ahead, the step has been computed now.
                self._membership.need_quorum()
            return
        if self._position.leaving:
            # The others would wait for a group that leaves.
            return
        # In a long round, a joiner needs no quorum to get the state (`copy_for_joiner`).
        can_grow = self._config.group_size > 1 and not self._strategy.has_long_rounds
        may_grow = ahead and can_grow
        # The other groups compare `claimed_step` with their own step, to find out who is behind.
        self._membership.request_quorum(self._position.claimed_step, may_grow=may_grow)

    @property
    def quorum_requested(self) -> bool:
        """True if the next round's quorum is requested."""
        return self._membership.quorum_requested

    @property
    def quorum_ready(self) -> bool:
        """True if this rank has the requested quorum: the others are at their next round."""
        return self._membership.quorum_ready

    def get_quorum(self) -> Quorum:
        """Request the next round's quorum and wait for it.

        Raises:
            Leaving: the group got a leave request, and the others will not come in time.
        """
        self.request_quorum()
        with self._watchdog.paused():
            return self._await_quorum()

    def _await_quorum(self) -> Quorum:
        """Wait for the requested quorum.

        The wait may be long: no group gets a quorum while one group is inside a long round, or
        hangs with heartbeats. A group that leaves waits only for a part of its time
        (`drain.WAITING_SHARE`). It needs the rest to save the state, because its ranks end when the
        time is over.

        Raises:
            Leaving: the group has waited long enough; on all ranks of the group.
        """
        if self._drain.wait_for_others(lambda: self._membership.quorum_ready, self._wait_briefly):
            return self._membership.await_quorum()
        self._position.mark_leaving()
        raise Leaving

    def _wait_briefly(self) -> None:
        self._membership.await_quorum_for(PAUSE_SECONDS)

    def wait_for_quorum(self, seconds: float = PAUSE_SECONDS) -> None:
        """Wait for the requested quorum, at most for this time. The watchdog does not count it."""
        with self.waiting():
            self._membership.await_quorum_for(seconds)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait for other groups. The watchdog does not count its time.

        Another group's step may take longer than `hang_timeout_seconds`, and is no hang of this
        group.
        """
        return self._watchdog.paused()

    @property
    def process(self) -> GroupProcess:
        """This group's process, as other groups know it."""
        return self._membership.member.process

    # Leave requests

    @property
    def leave_requested(self) -> bool:
        """True if this rank knows that its group is to leave."""
        return self._drain.requested

    @property
    def must_hurry(self) -> bool:
        """True if this group leaves, and must not wait for others any longer. A collective."""
        return any(self._group.gather(self._drain.is_urgent))

    def lacks_time(self, seconds: float, share: float) -> bool:
        """Return True if work of `seconds` would not end in time on some rank. A collective.

        Args:
            share: share of `drain_timeout_seconds` that may have passed at the end of the work.
        """
        timeout = self._config.drain_timeout_seconds
        spent_share = self._drain.spent_share + seconds / timeout
        return any(self._group.gather(spent_share > share))

    def mark_busy(self) -> None:
        """Note that this group trains, or takes part in a round.

        After this call, a leave request takes effect only after a round. Otherwise the group would
        leave at once, and break the round.
        """
        self._drain.mark_busy()

    @property
    def signs(self) -> Sign:
        """The signs that this rank sees now, except for OVERDUE."""
        signs = Sign(0)
        if self._donor.has_waiting_joiner:
            signs |= Sign.STATE_WANTED
        if self.quorum_ready:
            signs |= Sign.OTHERS_WAIT
        if self.leave_requested:
            signs |= Sign.LEAVE_REQUESTED
        return signs

    # Other groups

    def find_holders(self) -> dict[int, Peer]:
        """Return the ranks that can serve this rank's part of the state, by slot; any thread.

        They have this rank's index in other groups.
        """
        return self._membership.find_holders()

    def remember_donors(self, slots: Sequence[int]) -> None:
        """Remember which groups offered the fetched state: a quorum must include one of them."""
        self._membership.remember_donors(slots)

    def find_living(self, slots: Collection[int]) -> set[int]:
        """Return which of these groups were in the last round and live. A collective."""
        living: set[int] = set()
        if self._group.leads:
            members = [member for member in self._last_members if member.slot in slots]
            living = self._membership.find_living(members)
        return self._group.union(living)

    def find_outsiders(self, made: Round) -> list[int]:
        """Return the slots of groups that live and were not in a round.

        Rank 0 of the group finds them. On other ranks the list is empty.
        """
        return self._membership.find_outsiders(made.quorum, self._position.step)

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return the addresses (host:port) of the groups' state servers; any thread.

        Raises as `Membership.find_addresses` does.
        """
        return self._membership.find_addresses(slots)

    # The offer of this group's state

    def copy_for_joiner(self) -> None:
        """Copy the state for a joiner, between two local steps.

        All ranks of the group copy it after the same step, because the parts of a joiner's state
        must be of one step.
        """
        self._donor.copy(self._position)

    def offer_state(self) -> None:
        """Offer the state to joiners while the next step is computed."""
        if self._config.group_size > 1 and not self._strategy.has_long_rounds:
            self._donor.offer(self._position)

    def retract_offer(self) -> None:
        """Withdraw the offer, because this group does not hold the job's state."""
        self._donor.retract()

    def _offer_after(self, made: Round) -> None:
        """Offer the state after a round, or withdraw the offer."""
        if self._config.group_size == 1:
            return
        may_offer = made.quorum.rank in made.verdict.offering
        has_update = is_update(made, self._config)
        if self._strategy.has_long_rounds:
            self._offer_compared_after(made, may_offer and not has_update)
            return
        if not may_offer:
            self._donor.retract()
            return
        if has_update:
            # `offer_state` offers the new state when the update has been applied.
            return
        if self._donor.offered_step != self._position.step:
            self._donor.offer(self._position)

    def _offer_compared_after(self, made: Round, may_offer: bool) -> None:
        """Offer the state for the next long round, if all holders have compared its bytes.

        A joiner trains before the next exchange, so that exchange comes too late to confirm the
        fetched bytes.

        Args:
            may_offer: this group holds the job's state, and the round has no update to apply.
        """
        # If the next round may be an update, the state would be outdated soon.
        may_last = not is_update_near(made, self._config)
        if not (may_offer and made.verdict.verified and may_last):
            self._donor.end_offer()
            return
        self._donor.offer_compared(self._position, made.verdict.digest)
        # Copy for the joiners that will ask this group first. Their requests may come when this
        # group has begun a step, and would wait for the end of the step.
        if made.quorum.slots[made.quorum.rank] in find_first_donors(made):
            self._donor.copy_ahead(self._position)

    # The exchange

    def arm(self) -> None:
        """Let the next backward launch the exchange of the next round.

        Call this before the step's last backward.
        """
        # Not `ahead`, which would let a newcomer join the quorum in the middle of this step. If the
        # newcomer had the same state, the step would wait for it, although it has no gradients.
        if not self.quorum_requested:
            self.request_quorum()
        # If a member holds more updates than `newest_step`, this group is behind, and its gradients
        # do not count.
        self._exchange.launch_for_backward(self._position.newest_step)

    def launch_with(self, contribution: Contribution) -> None:
        """Launch the next round's exchange with this group's whole contribution; returns at once.

        The group makes local steps while the exchange is under way. `make` with the same
        contribution completes the round.
        """
        self.request_quorum()
        if self._compares_before_sum(contribution):
            self.compute_digest()
        self._donor.end_offer()
        never_idle = math.inf
        report = self._build_report(contribution, GradientUse.GIVE, never_idle)
        self._exchange.launch_with_facts(self._position.newest_step, report)

    def launch_without_gradients(self) -> None:
        """Launch the next round's exchange without gradients; returns at once.

        Then the exchange goes on by itself, and a group that heals has time until the others have
        computed their step. `make` completes the round.
        """
        if not self._position.leaving:
            self.request_quorum()
            self._exchange.launch()

    def make(
        self,
        contribution: Contribution = NOTHING,
        use: GradientUse = GradientUse.GIVE,
    ) -> Round | Broken:
        """Make one round.

        1. Request the quorum, unless it is requested already.
        2. Take the digest of the state, if the groups compare digests in this round.
        3. Wait for the quorum. Take the digest now if the quorum has joiners.
        4. Make the exchange, or complete it if it is launched already.
        5. Vote within the group on the exchange.
        6. Update the position. Copy the state for a joiner that fetches it from this group, and
           offer it, or withdraw the offer.

        Args:
            contribution: this group's part of the update, besides its gradients.
            use: what this group does with its gradients.

        Raises:
            Leaving: the group got a leave request, and the others will not come in time.
        """
        with self._watchdog.paused():
            self.request_quorum()
            started = time.monotonic()
            self._digest_for_comparison(contribution, use)
            quorum = self._await_quorum()
            gives = use.gives and not contribution.is_empty
            # After the local steps of a long round, the rows show no digest for joiners: a joiner
            # must not fetch the state that this round's update replaces. The opening round after
            # the update shows the digest of the new state.
            has_finished_steps = gives and not contribution.unfinished
            ends_long_round = self._strategy.compares_before_sum and has_finished_steps
            if not ends_long_round:
                self._digest_for_joiners(quorum)
            if not self._exchange.is_launched:
                self._launch(contribution, use, gives)
            outcome = self._finish_exchange(self._build_report(contribution, use, started))
            if use is GradientUse.OPEN:
                # This group computes nothing for an opening round. So it was ready when it
                # requested the quorum.
                self.waits.start_wait(quorum.requested_at)
            else:
                self.waits.start_wait(started)
            if not self._vote(outcome.made):
                reason = outcome.error or "broke on another rank of this group"
                return self._record_broken(reason, outcome.gave_nonfinite, started, quorum)
        assert outcome.made is not None, "the vote passed with this rank's no"
        self._record_success(outcome.made)
        return outcome.made

    def _launch(self, contribution: Contribution, use: GradientUse, gives: bool) -> None:
        """Launch an exchange that neither `arm` nor `launch_without_gradients` has launched.

        Args:
            gives: this group's gradients go into the sums.
        """
        # If all groups know that this round is no update, the exchange sums nothing.
        may_update = not contribution.unfinished and use is not GradientUse.OPEN
        newest_step = None  # no gradients
        if gives:
            newest_step = self._position.newest_step
        self._exchange.launch(newest_step, may_update=may_update)

    def _record_success(self, made: Round) -> None:
        """Update everything that depends on rounds after a round that worked."""
        quorum, verdict = made.quorum, made.verdict
        self.waits.record_success(
            made.rows,
            quorum.rank,
            quorum.answered_at,
            quorum.connected_at,
            quorum.processes,
            self._position.left,
        )
        self._last_members = frozenset(quorum.members)
        self.last_round = made
        self._position.observe(made)
        # With a tie, the bytes differ and there is no majority. A stray at the same step has other
        # bytes or another lineage. A stray at another step may be sound: the last exchange worked
        # for it and broke for others, or the other way round.
        has_mismatch = any(made.rows[rank].step == verdict.step for rank in verdict.strays)
        if verdict.tie or has_mismatch:
            self._report_mismatch(made)
        self._donor.copy_after_round(made, self._position, is_update=is_update(made, self._config))
        self._offer_after(made)

    def _finish_exchange(self, report: RoundReport) -> _ExchangeOutcome:
        """Complete the exchange, and judge its rows."""
        try:
            reduced = self._exchange.finish(report)
        except ExchangeError as error:
            return _ExchangeOutcome(None, str(error))
        made = _decode_round(reduced)
        gave_nonfinite = reduced.nonfinite[reduced.quorum.rank]
        # A NaN of one group is in the sum of all groups, so the sum must not be used. All members
        # read the same rows, so all of them vote no.
        slots = find_sum_spoilers(made.rows)
        if slots:
            reason = f"the gradients of groups {slots} are not finite"
            return _ExchangeOutcome(None, reason, gave_nonfinite)
        return _ExchangeOutcome(made, gave_nonfinite=gave_nonfinite)

    def _vote(self, made: Round | None) -> bool:
        """Return True if the round worked on all ranks of this group.

        The vote also settles whether the group leaves.

        Args:
            made: the round; None if it did not work on this rank.
        """
        self._drain.before_vote(lambda: self._may_leave(made))
        worked = self._membership.vote(self._position.step, made is not None)
        if self._drain.after_vote():
            self._position.mark_leaving()
        return worked

    def _may_leave(self, made: Round | None) -> bool:
        """Return True if this group may leave after this round, as this rank sees it."""
        if made is not None:
            return may_leave(made)
        # After a broken round, perhaps no group has read that this group leaves. So leave after the
        # next round, whose row shows it again. A group without the job's state may leave now, and a
        # group whose time is nearly over must.
        return self._drain.is_urgent or not self._position.standing.has_state

    def _record_broken(
        self,
        error: str,
        gave_nonfinite: bool,
        started: float,
        quorum: Quorum,
    ) -> Broken:
        step = self._position.step
        seconds = time.monotonic() - started
        self.waits.record_broken(quorum.processes, started + seconds)
        logger.warning("the exchange after %s %d broke: %s", self._strategy.unit, step, error)
        self._events.emit(ExchangeFailed(error=error, seconds=seconds, step=step))
        self._position.count_broken_round()
        return Broken(error, gave_nonfinite=any(self._group.gather(int(gave_nonfinite))))

    # Digests and the report

    def compute_digest(self) -> str:
        """Take the digest of the state. The rows show it until the next update.

        Returns:
            This rank's part of the digest, in hex.
        """
        digest = self._state.digest()
        # The digest of the group is a hash of the hashes of its ranks. A row carries 48 bits.
        hashes_of_ranks = self._group.gather(fold48(digest))
        self._position.set_digest(fold48(str(hashes_of_ranks)))
        return digest

    def _digest_for_comparison(self, contribution: Contribution, use: GradientUse) -> None:
        """Take the digest if the groups compare their states in this round."""
        if self._compares_before_sum(contribution) and not self._exchange.is_launched:
            self.compute_digest()
            return
        # If all groups show the same digest in an opening round, they may offer the state until the
        # next update.
        opens = use is GradientUse.OPEN
        if opens and self._config.digest_every and not self._position.digest:
            self.compute_digest()

    def _compares_before_sum(self, contribution: Contribution) -> bool:
        """Return True if the groups compare their states in this round, before they use its sum.

        They do so in the exchange after the local steps of a long round. A group that has made no
        local step, and has nothing to give, shows its digest as well: its vote may make the
        majority.
        """
        if not self._strategy.compares_before_sum or not self._config.digest_every:
            return False
        # A contribution is unfinished if the group exchanges before the end of its local steps.
        return contribution.unfinished or not contribution.is_empty

    def _digest_for_joiners(self, quorum: Quorum) -> None:
        """Take the digest if a joiner may fetch the state: the round confirms the fetched bytes."""
        if not self._position.standing.has_state:
            return
        has_askers = self.last_round is not None and self.last_round.has_askers
        has_newcomers = not self._last_members.issuperset(quorum.members)
        if has_askers or has_newcomers:
            self.compute_digest()

    def _build_report(
        self,
        contribution: Contribution,
        use: GradientUse,
        idle_since: float,
    ) -> RoundReport:
        """Return this group's report to the next round. It is valid until the position changes.

        Args:
            idle_since: since when this rank has only waited for others, in seconds of its clock;
                infinite if it trains while the exchange is under way.
        """
        position = self._position
        facts = Row(
            slot=self._config.replica_id,
            standing=position.standing,
            step=position.claimed_step,
            seen_step=max(position.seen_step, position.claimed_step),
            lineage=position.lineage,
            digest=position.digest,
            donor=position.donor,
            from_step=position.from_step,
            waited_seconds=position.waited_seconds,
            others_wait=position.others_wait,
            saved_step=position.saved_step,
            training=position.training,
        )
        # If this group heals: why the others wait for it.
        joining_reason = Why.CATCHING_UP
        if position.others_wait:
            joining_reason = Why.ASKED
        return RoundReport(
            facts,
            contribution,
            use,
            position.newest_step,
            idle_since,
            joining_reason,
            # The exchange's thread reads it after the sums, so that a late leave request is in the
            # row as well.
            leave=self._drain,
        )

    def _report_mismatch(self, made: Round) -> None:
        claims = [row for row in made.rows if row.has_state]
        minority = sorted(made.slots(made.verdict.strays))
        logger.error(
            "the groups' states differ after %s %d; minority: groups %s",
            self._strategy.unit,
            made.verdict.step,
            minority,
        )
        self._events.emit(
            DigestMismatch(
                step=made.verdict.step,
                digests={row.slot: f"{row.digest:012x}" for row in claims},
                lineages={row.slot: f"{row.lineage:012x}" for row in claims},
                minority=minority,
            ),
        )


def _decode_round(reduced: ExchangeResult) -> Round:
    """Decode the rows and messages of an exchange, and judge them."""
    rows = []
    for values, nonfinite in zip(reduced.rows, reduced.nonfinite, strict=True):
        rows.append(Row.decode(values, nonfinite))
    # A member's message has the ledger entries of the batches that it has trained.
    entries_of_members = [decode(message) for message in reduced.messages]
    slots_read = [[entry.slot for entry in entries] for entries in entries_of_members]
    verdict = judge(rows, slots_read)
    # The batches of all ready groups count as trained, and not only those of the contributors: a
    # batch whose labels are all masked has no weight.
    trained = []
    for rank in verdict.ready:
        trained += entries_of_members[rank]
    return Round(reduced.quorum, rows, verdict, trained, reduced.sums)
