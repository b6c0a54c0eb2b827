# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: how the trainer of one group works together with the other groups.

Terms:

- A *quorum* is the list of the groups that take part in the next round. The *lighthouse* gives it:
  torchft's server for all groups.
- In a *round* (`Rounds.make`), these groups sum their gradients and exchange one *row* of facts
  each. Then the ranks of each group vote whether this worked on all of them. If not, the round
  *broke*.
- A *decision* (`protocol/decision.py`) is the next action of this group after a round.
- A *holder* is a group that holds the job's state: the state after the latest update. A *stray*
  claims to hold it, and differs from the majority. The *digest* of a state is a hash of its bytes.
- An *outsider* is a living group that was not in the round, perhaps because it is in a long step.
- The data is cut into *slots*, one for each group. A *reader* is a group that trains on. It reads
  its own slot and, unless `batch_policy` is "shrink", its share of the slots of missing groups.
- With a semi-synchronous method, a group makes many local steps between two updates. Right after an
  update, the groups then make *opening rounds* without gradients. They serve groups that missed the
  update.

One update, as the trainer makes it:

1. The quorum was requested at the last commit, so the groups find each other while they compute.
2. Forward and backward of the batches of `slots_to_read`. After `arm`, the backward launches the
   exchange.
3. `commit` makes a round, and follows the decision: one more round with the same gradients, after
   more batches or after a pause, until the decision is to commit.
4. The trainer applies the update. `offer_state` offers the new state to joiners.

If a decision is to heal, the trainer calls `heal`. After the last step it calls `finish`.

See docs/exchange.md.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.engine.heal import Heal
from titan_ft.engine.outsiders import OutsiderWatch
from titan_ft.engine.round import PAUSE_SECONDS, Rounds, Sign
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol import decision as decisions
from titan_ft.protocol import straggler
from titan_ft.protocol.decision import (
    SIGN_TIMEOUT_SECONDS,
    Decision,
    LastToLeave,
    decide,
    find_last_to_leave,
)
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Ledger, deal_anew
from titan_ft.protocol.member import GroupProcess
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution, GradientUse
from titan_ft.protocol.round import Broken, Round, Update
from titan_ft.protocol.straggler import Stragglers
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.events import (
    EndedWithout,
    GradientExcluded,
    Straggler,
    StragglerRecovered,
    Waited,
    Waiting,
    WaitingToEnd,
)
from titan_ft.run.log import EventLog

logger = logging.getLogger(__name__)


FINISH_SECONDS = 60.0
"""How long groups with the final state wait for a missing group without a sign of life. They wait
longer for a group that shows one. A group that comes too late has lost nothing: it finds that the
job has finished, and ends as a success."""
_SAVE_CHECKS_PER_GROUP = 2
"""A leaving group whose time is nearly over checks whether another group has begun to save. It
makes this many checks for each group before it in the order of saving. Then it saves itself."""
_SAVE_CHECK_SECONDS = 0.5  # between two such checks
_SILENT_WAIT_SECONDS = 1.0
"""A group with the final state names the groups it waits for only after this time: the others may
be a moment late."""
_MAX_OPENING_ROUNDS = 5
"""Limit of the opening rounds after an update. A group that has found no donor by then must wait
for the end of the others' local steps."""
_OPENING_SECONDS = 5.0
"""How long a group waits for the others to come to an opening round. A group that trains already
comes only after its local steps."""
_OUTSIDERS_MESSAGE = "groups %s live and are in no quorum, in a long step perhaps: waiting for them"


class AfterOpening(enum.Enum):
    """The next action of a group after the opening rounds of a semi-synchronous method."""

    TRAIN = enum.auto()
    # The others have made their local steps already, and wait in the exchange after them. So go
    # there at once, without local steps of this group.
    EXCHANGE_AT_ONCE = enum.auto()
    HEAL = enum.auto()


@dataclass(frozen=True)
class Committed:
    """A committed step: its update, and the facts about it that are logged.

    Attributes:
        parent: lineage of the state before the step. A lineage is a hash of the exchanges that made
            a state.
        participants: slots of the groups that contributed weight.
        valid_tokens: tokens that the mean is taken over.
        loss: mean per valid token over all participants.
        max_loss: largest mean loss of one rank.
        own_tokens: this group's part of `valid_tokens`.
        own_loss: mean per valid token of this group; None = the group has no valid tokens.
        num_exchanges: number of rounds for the step; 1 = no retry.
        slowest_ratio: seconds of the slowest group's own part of the step / median of the others'
            (0 = this group is alone).
        waits: how long this rank waited for other groups, the longest wait first.
    """

    update: Update
    parent: int
    participants: list[int]
    valid_tokens: int
    loss: float
    max_loss: float
    own_tokens: int
    own_loss: float | None
    num_exchanges: int
    slowest_ratio: float
    waits: Sequence[Waited] = ()


class ReplicaDimension:
    """One rank's side of the protocol between the groups.

    The trainer and the strategies call it, on the training thread. All ranks of a group call the
    same methods in the same order. If a method raises, the state is that of the last committed
    update, and the local gradients are untouched.

    Args:
        position: this group's place in the job. The group's next row shows it.
        rounds: makes the rounds.
        heal: gets the job's state if this group lacks it.
        ledger: says which slots of the data each group reads next.
        group: collectives among the ranks of this group.
        nominal_tokens: tokens of a step with all groups present. Local losses are divided by it.
        pauses_after: returns True for a step after which the group saves, validates or ends before
            it trains on.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        position: Position,
        rounds: Rounds,
        heal: Heal,
        ledger: Ledger,
        group: GroupCollectives,
        events: EventLog,
        nominal_tokens: int,
        pauses_after: Callable[[int], bool],
    ) -> None:
        self._config = config
        self._position = position
        self._rounds = rounds
        self._heal = heal
        self._ledger = ledger
        self._group = group
        self._events = events
        self._nominal_tokens = nominal_tokens
        self._pauses_after = pauses_after
        self._strategy = strategy_of(config)  # an update of one step, or of many
        self._stragglers = Stragglers(straggler.FACTOR, straggler.STEPS)
        self._wait_is_reported = False  # the wait of the step under way
        # Slots of the groups that the last report about the wait for the end named.
        self._reported_unfinished: list[int] = []
        self._outsiders = OutsiderWatch(rounds, group, _OUTSIDERS_MESSAGE)
        self.heal_seconds = 0.0  # duration of the last heal

    # The start

    def join(self, step: int = 0) -> bool:
        """Meet the other groups, before a checkpoint is loaded.

        Args:
            step: committed updates that this group can load from a checkpoint; 0 = it has none.

        Returns:
            True if the others are further, so that this group must `heal`.
        """
        self._position.set_step(step)
        if self._heal.await_offer(step):
            self._position.set_step(0)  # it loads no checkpoint
            return True
        # A rank that could not reach the others may not know all of their steps. So the largest
        # step that any rank of the group knows counts.
        latest = max(self._group.gather(self._rounds.get_quorum().max_step))
        if latest <= step:
            return False
        # Remember the others' step. If they die before a round shows it, the job's state is lost,
        # and the job must not silently start over.
        self._position.raise_seen_step(latest)
        self._position.set_step(0)  # it loads no checkpoint
        return True

    def start(self, step: int) -> bool:
        """Start to train together with the other groups.

        The job's first step, also after a checkpoint, waits for `group_size` groups, up to
        `start_timeout_seconds`. It waits longer while outsiders live. An outsider may hold a later
        state, which the job would lose if it started without that group.

        Args:
            step: committed updates in this group's state.

        Returns:
            False if this group must `heal` first.

        Raises:
            GaveUpError: fewer than `min_replica_size` groups came.
        """
        started_at = self._group.clock()
        outsiders_seen_at = -math.inf
        outcome: Round | Broken | None = None
        self._position.set_step(step)
        self.digest_if_due()
        while True:
            now = self._group.clock()
            waited = now - started_at
            # Look for outsiders before the timeout is over: right after it, the job would start.
            is_nearly_over = waited >= self._config.start_timeout_seconds - SIGN_TIMEOUT_SECONDS
            # `has_any` is a collective. All ranks of the group call it, or none: they have the same
            # clock and the same outcome.
            if is_nearly_over and isinstance(outcome, Round) and self._outsiders.has_any(outcome):
                outsiders_seen_at = now
            if now - outsiders_seen_at < SIGN_TIMEOUT_SECONDS:
                # The group's row shows no wait. So no group ends the wait for the first step.
                self._position.set_waited_seconds(0.0)
            else:
                self._position.set_waited_seconds(waited)
            outcome = self._rounds.make()
            match decide(self._position, outcome, self._config):
                # Only a round that worked leads to this decision. mypy needs the check.
                case decisions.StartTraining(num_missing) if isinstance(outcome, Round):
                    self._start_training(outcome, num_missing)
                    return True
                case decisions.StartHeal():
                    return False
                case decisions.Wait():
                    time.sleep(PAUSE_SECONDS)
                case other:
                    _raise_if_final(other)

    def _start_training(self, made: Round, num_missing: int) -> None:
        if num_missing:
            text = "start_timeout_seconds is over: beginning without %d groups"
            logger.warning(text, num_missing)
        self._position.mark_training()
        # The wait for the first step is no part of the first step's own waits.
        self._rounds.waits.discard()
        # The readers share the data of the next step. They are a part of the offered state.
        self._ledger.readers = tuple(made.readers)
        self.offer_state()

    # One update

    def arm(self) -> None:
        """Let the next backward launch the exchange. Call this before the step's last backward."""
        self._rounds.arm()

    def launch_with(self, contribution: Contribution) -> None:
        """Launch the exchange of a semi-synchronous method; returns at once.

        The exchange goes on while this group makes local steps for the next update. `commit` with
        the same contribution completes it.
        """
        self._rounds.launch_with(contribution)

    def gather_signs(self, *, overdue: bool = False) -> Sign:
        """Return the signs that any rank of the group sees. A collective.

        A *sign* is a reason to do something between two local steps, such as a leave request. This
        is the only collective between two local steps, because on a GPU each collective makes the
        host wait.

        Args:
            overdue: `sync_deadline_seconds` have passed on this rank.
        """
        own = self._rounds.signs
        if overdue:
            own |= Sign.OVERDUE
        signs = Sign(0)
        for signs_of_rank in self._group.gather(own):
            signs |= Sign(signs_of_rank)
        return signs

    def serve_joiner(self) -> None:
        """Copy the state for a joiner that came during this round.

        All ranks copy after the same step.
        """
        self._rounds.copy_for_joiner()

    def request_quorum(self) -> None:
        """Request the next round's quorum. From now on, the others wait for this group."""
        self._rounds.request_quorum()

    @property
    def quorum_requested(self) -> bool:
        """True if this group has requested the next round's quorum.

        It does so early if it has just healed, or has made an opening round without the others.
        """
        return self._rounds.quorum_requested

    def slots_to_read(self) -> list[int]:
        """Return the slots whose data this group trains in the next step.

        The list is empty if another group still reads this group's slot.
        """
        # With "shrink", nobody trains the data of a missing group.
        if self._config.batch_policy == "shrink" or not self._ledger.readers:
            return [self._config.replica_id]
        # A group that is no reader has no share. The others dealt its slot out before they knew
        # that it is back.
        return self._ledger.shares().get(self._rounds.process, [])

    def commit(
        self,
        contribution: Contribution,
        train: Callable[[list[int]], Contribution],
        discard: Callable[[], None],
    ) -> Committed | None:
        """Make rounds until the step is committed. The caller then applies its update at once.

        Args:
            contribution: the batches and tokens of this group's gradients.
            train: trains the batches of the given slots in this step, and adds their gradients to
                the local ones. With a semi-synchronous method, it makes the remaining local steps,
                and returns the contribution of all local steps.
            discard: drops the local gradients.

        Returns:
            None if this group turns out not to hold the job's state. Its gradients are void, and it
            must `heal`.

        Raises:
            GaveUpError: too many exchanges in a row broke (`MAX_EXCHANGE_RETRIES`).
            DivergedError: the groups' states differ without a majority.
            NonFiniteError: only this group's gradients were not finite, several steps in a row.
            Leaving: the group got a leave request, and the step could not be committed.
        """
        # How the gradients are used while the step need not wait. It depends on whether they are
        # finite.
        normal_use = GradientUse.GIVE
        # How they are used in the next round: as `normal_use`, or held back.
        use = normal_use
        num_exchanges = 0
        # Which slots each reader trains in this step. It is empty with "shrink", and once only the
        # rows of a round show the slots.
        shares: dict[GroupProcess, list[int]] = {}
        if self._config.batch_policy != "shrink":
            shares = self._ledger.shares()
        while True:
            outcome = self._rounds.make(contribution, use)
            num_exchanges += 1
            match decide(self._position, outcome, self._config):
                # Only a round that worked leads to this decision. mypy needs the check.
                case decisions.Commit() if isinstance(outcome, Round):
                    return self._record_commit(outcome, num_exchanges)
                case decisions.Repeat():
                    use = normal_use
                    if isinstance(outcome, Broken):
                        slots = self._take_over_after_break(shares)
                        if slots:
                            contribution = contribution.plus(train(slots))
                case decisions.ExcludeGradients():
                    normal_use = GradientUse.EXCLUDE
                    use = normal_use
                case decisions.ForceGradients():
                    normal_use = GradientUse.FORCE
                    use = normal_use
                case decisions.TakeOverSlots(slots):
                    # The groups that were to read these slots are gone.
                    shares.clear()
                    contribution = contribution.plus(train(slots))
                case decisions.TrainOn() if isinstance(outcome, Round):
                    if outcome.verdict.opening:
                        # The others may make one more opening round. Because the quorum is
                        # requested, this group breaks off its local steps when they do.
                        self._rounds.request_quorum()
                    contribution = train(self.slots_to_read())
                case decisions.DiscardGradients():
                    # Another group gives the gradients of the same batches.
                    discard()
                    shares.clear()
                    contribution = NOTHING
                    normal_use = GradientUse.GIVE
                    use = normal_use
                case decisions.Wait() as wait:
                    self._wait(outcome, wait)
                    use = normal_use
                    if use.gives:
                        # Exchange only rows until the wait is over. Sums could not be used, and
                        # would slow down the transfer of a state to a joiner.
                        use = GradientUse.HOLD_BACK
                case decisions.StartHeal():
                    return None
                case other:
                    _raise_if_final(other)

    def _take_over_after_break(self, shares: dict[GroupProcess, list[int]]) -> list[int]:
        """Meet the others again after a round broke, and take over slots of groups that are gone.

        The next quorum shows which groups are gone. Without this step, the next round would only
        show that their slots are missing. The rows of that round still have the last word
        (`decisions.TakeOverSlots`): a group that is merely late may look gone.

        Args:
            shares: which slots each reader trains in this step. This call updates it.

        Returns:
            The slots that this group trains in addition.
        """
        present: list[GroupProcess] = []
        if shares:
            present = self._rounds.get_quorum().processes
        # With too few groups the step must wait, and the missing groups may be back after that.
        if len(present) < self._config.min_replica_size:
            return []
        return deal_anew(shares, present).get(self._rounds.process, [])

    def _record_commit(self, made: Round, num_exchanges: int) -> Committed:
        """Count the round's update as a part of the state, and request the next quorum."""
        self._wait_is_reported = False
        update, verdict = made.update(self._nominal_tokens), made.verdict
        own = made.rows[made.quorum.rank]
        own_loss = None
        if own.valid_tokens:
            # `own.loss` is the sum of the group's losses / nominal tokens.
            own_loss = own.loss * (self._nominal_tokens / own.valid_tokens)
        excluded = made.slots(verdict.excluded)
        if excluded:
            logger.warning(
                "%s %d is made without the gradients of groups %s: not finite",
                self._strategy.unit,
                update.step,
                excluded,
            )
            self._events.emit(GradientExcluded(step=update.step, slots=excluded))
        self._position.count_exclusion(excluded, self._config.replica_id)
        self._position.advance(update)
        self._report_stragglers(made)
        if not self._pauses_after(update.step):
            # All groups are at the same point now, so none comes late to this quorum. `ahead`: this
            # group computes before it needs the quorum.
            self._rounds.request_quorum(ahead=True)
        return Committed(
            update=update,
            parent=made.lineage,
            participants=made.slots(verdict.contributors),
            valid_tokens=verdict.valid_tokens,
            loss=verdict.loss * update.scale,
            max_loss=verdict.max_loss,
            own_tokens=own.valid_tokens,
            own_loss=own_loss,
            num_exchanges=num_exchanges,
            slowest_ratio=max(self._stragglers.ratios.values(), default=0.0),
            waits=self._rounds.waits.pop_waits(),
        )

    def _wait(self, outcome: Round | Broken, wait: decisions.Wait) -> None:
        """Pause before the next round, because the step cannot be committed now."""
        self._rounds.waits.record_hold(wait.slots, wait.why)
        if not self._wait_is_reported and isinstance(outcome, Round):
            self._wait_is_reported = True
            number = self._position.step + 1
            logger.warning("%s %d waits: %s", self._strategy.unit, number, wait.message)
            self._events.emit(
                Waiting(
                    step=self._position.step,
                    participants=outcome.slots(outcome.verdict.contributors),
                    reason=wait.message,
                    slots=list(wait.slots),
                    why=wait.why.name.lower(),
                ),
            )
        time.sleep(PAUSE_SECONDS)

    def _report_stragglers(self, made: Round) -> None:
        """Report each group that has become a straggler, or has stopped being one."""
        seconds = {}
        for rank in made.verdict.contributors:
            seconds[made.quorum.slots[rank]] = made.rows[rank].seconds
        for change in self._stragglers.observe(seconds):
            kind: type[Straggler | StragglerRecovered] = Straggler
            if change.recovered:
                kind = StragglerRecovered
                logger.warning("group %d is as fast as the others again", change.slot)
            else:
                logger.warning("group %d is %.1f times slower", change.slot, change.ratio)
            self._events.emit(kind(slot=change.slot, factor=change.ratio, step=self._position.step))

    # Between two rounds of a semi-synchronous method

    def make_opening_rounds(self) -> AfterOpening:
        """Meet the others right after an update, before the local steps for the next one.

        A group that missed the update, or has just come, finds a donor in these rounds. Otherwise
        it would find one only after the local steps of the others.

        If no other group comes within `_OPENING_SECONDS`, this group starts to train. This happens
        if the last opening round broke for this group and worked for the others, so that they train
        already. The groups meet again in the exchange after their local steps.
        """
        for _ in range(_MAX_OPENING_ROUNDS):
            if not self._await_opening():
                break
            outcome = self._rounds.make(use=GradientUse.OPEN)
            decision = decide(self._position, outcome, self._config)
            if isinstance(decision, decisions.StartHeal):
                return AfterOpening.HEAL
            _raise_if_final(decision)
            if isinstance(outcome, Broken):
                continue
            if outcome.verdict.may_update:
                # A group in this round has finished its local steps, and repeats the round now.
                return AfterOpening.EXCHANGE_AT_ONCE
            # A holder offers its state only if all holders have compared their bytes (`verified`).
            # If they have not, a joiner could not be served, and one more round follows. If they
            # have, train: in one more round the joiner would be healed already, and would have no
            # time for a local step of its own.
            is_joiner_unserved = outcome.has_askers and not outcome.verdict.verified
            # In the next round, a stray is a joiner.
            if not is_joiner_unserved and not outcome.verdict.strays:
                break
        return AfterOpening.TRAIN

    def _await_opening(self) -> bool:
        """Wait a while for the others to come to an opening round; return True if they do."""
        deadline = self._group.clock() + _OPENING_SECONDS
        return self.await_others(lambda: self._group.clock() >= deadline)

    def await_others(self, is_too_late: Callable[[], bool]) -> bool:
        """Request the next round's quorum and wait for it. A collective.

        Args:
            is_too_late: returns True if this group waits no longer. A collective as well.

        Returns:
            True if the quorum is there.
        """
        self._rounds.request_quorum()
        while not any(self._group.gather(self._rounds.quorum_ready)):
            if is_too_late():
                return False
            self._rounds.wait_for_quorum()
        return True

    def lacks_time(self, seconds: float, share: float) -> bool:
        """Return True if work of `seconds` would not end in time on some rank. A collective.

        Args:
            share: share of `drain_timeout_seconds` that may have passed at the end of the work.
        """
        return self._rounds.lacks_time(seconds, share)

    # The state

    def digest_if_due(self) -> str | None:
        """Take the digest of the state if one is due at this step. The next round shows it.

        Returns:
            This rank's part of the digest (hex) if the step, or a local step of the last round, is
            a multiple of `digest_every`. Otherwise None.
        """
        every = self._config.digest_every
        if not every:
            return None
        num_local_steps = self._position.step * self._strategy.steps
        steps_since_multiple = num_local_steps % every
        if steps_since_multiple >= self._strategy.steps:
            return None  # the last multiple was in an earlier round
        return self._rounds.compute_digest()

    def offer_state(self) -> None:
        """Offer the state after this update to newcomers while the next step is computed."""
        self._rounds.offer_state()

    def heal(self) -> int:
        """Get the job's state from donors while the others train on.

        Returns:
            Committed updates in the state that this group then holds.

        Raises:
            JobLostError: no group that has the state is left.
        """
        self.heal_seconds = self._heal.run()
        self._rounds.waits.discard()
        self.digest_if_due()
        self.offer_state()
        return self._position.step

    @property
    def others_make_opening_rounds(self) -> bool:
        """True if the last heal ended with an update: the others make opening rounds after it."""
        return self._heal.ended_on_update

    # The end of the job

    def finish(self) -> str | None:
        """Stay until every group holds the final state, or until `FINISH_SECONDS` pass without
        news.

        This group stays longer while outsiders live: they may need the final state.

        Returns:
            This rank's digest of the final state, in hex. None if this group turns out not to hold
            the state: it must `heal`, and train on if the state that it gets is an earlier one. All
            groups that held the final state may have died.
        """
        digest = self._rounds.compute_digest()
        self._position.mark_finished()
        started_at = self._group.clock()
        deadline = started_at + FINISH_SECONDS
        is_complete = False
        while True:
            outcome = self._rounds.make()
            if is_complete:
                # All groups had finished in the round before. This last round showed it to the
                # slowest group as well.
                return digest
            decision = decide(self._position, outcome, self._config)
            if isinstance(decision, decisions.StartHeal):
                return None
            _raise_if_final(decision)
            # The ranks may have seen different rows of a group that leaves. So they agree here.
            is_done = isinstance(decision, decisions.Done)
            is_complete = all(self._group.gather(int(is_done)))
            now = self._group.clock()
            if self._may_have_joiner(outcome):
                deadline = now + FINISH_SECONDS
            if now >= deadline and isinstance(outcome, Round) and self._outsiders.has_any(outcome):
                deadline = now + SIGN_TIMEOUT_SECONDS
            if now >= deadline:
                self._end_without(outcome, now - started_at)
                return digest
            if is_complete:
                continue
            if now - started_at >= _SILENT_WAIT_SECONDS:
                self._report_unfinished(outcome, deadline - now)
            time.sleep(PAUSE_SECONDS)

    def _may_have_joiner(self, outcome: Round | Broken) -> bool:
        """Return True if a group that lacks the final state may have been in the round.

        A broken round shows no rows, so any other group in it may lack the state. Suppose that the
        lighthouse was away for longer than `FINISH_SECONDS`, and that the other group has just come
        back. If this group ended after the broken round, the other group could get the state from
        nobody.
        """
        if isinstance(outcome, Round):
            return len(outcome.verdict.holders) < len(outcome.rows)
        # If every round breaks, this group must end at some time.
        return self._position.broken_rounds <= decisions.MAX_EXCHANGE_RETRIES

    def _report_unfinished(self, outcome: Round | Broken, seconds: float) -> None:
        """Report which groups this group waits for with the final state, once for each set."""
        slots = self._find_unfinished(outcome)
        if not slots:
            return
        if slots != self._reported_unfinished:
            text = "holding the final state: waiting for groups %s for %.0f s at most"
            logger.warning(text, slots, seconds)
            self._events.emit(WaitingToEnd(step=self._position.step, slots=slots, seconds=seconds))
        self._reported_unfinished = slots

    def _end_without(self, outcome: Round | Broken, seconds: float) -> None:
        slots = self._find_unfinished(outcome) or self._reported_unfinished
        logger.warning(
            "ending without groups %s: they did not come for the final state within %g s",
            slots,
            FINISH_SECONDS,
        )
        self._events.emit(EndedWithout(step=self._position.step, slots=slots, seconds=seconds))

    def _find_unfinished(self, outcome: Round | Broken) -> list[int]:
        """Return the groups that lack the final state and have not left in order."""
        if isinstance(outcome, Broken):
            return []
        holders = {outcome.rows[rank].slot for rank in outcome.verdict.holders}
        return sorted({*range(self._config.group_size)} - holders - self._position.left)

    # Leaving

    def find_last_to_leave(self) -> LastToLeave | None:
        """Return the last groups with the job's state, one of which must save it now.

        A collective.

        Returns:
            None if a group that stays keeps the state.
        """
        if not self._position.leaving:
            # This group left while a broken network kept it out of the quorums
            # (`Partition.stay_outside`). The groups in the quorums hold a later state.
            return None
        left = self._group.union(self._position.left)
        return find_last_to_leave(self._position, left, self._config.replica_id)

    def await_turn_to_save(
        self,
        last: LastToLeave,
        is_saved: Callable[[], bool],
        is_save_under_way: Callable[[], bool],
    ) -> bool:
        """Wait while other groups that leave may save the state. A collective.

        The first of these groups saves. The others stay until the state is saved, because the first
        group may die during its save. They stay no longer than a group that leaves may wait for
        others (`Rounds.must_hurry`). If the first group has not begun to save by then, it hangs,
        and the next group saves.

        Args:
            last: the groups that leave, in the order of saving.
            is_saved: returns True if the state is saved. A collective as well.
            is_save_under_way: returns True if another group writes the state. A collective as well.

        Returns:
            True if this group must save.
        """
        own = last.slots.index(self._config.replica_id)
        groups_before = set(last.slots[:own])
        num_checks = 0
        while True:
            # Look for living groups before `is_saved`: a group that is gone now saved before this
            # moment, or never will.
            if groups_before:
                groups_before = self._rounds.find_living(groups_before)
            if is_saved():
                return False
            if not groups_before:
                return True
            if self._rounds.must_hurry:
                if is_save_under_way():
                    return False
                if num_checks >= _SAVE_CHECKS_PER_GROUP * len(groups_before):
                    return True
                num_checks += 1
            time.sleep(min(_SAVE_CHECK_SECONDS, self._config.heartbeat_timeout_ms / 1000))


def _raise_if_final(decision: Decision) -> None:
    """Raise if the decision ends this group's part in the run. Otherwise do nothing.

    Raises:
        Leaving: the group leaves in order.
        Exception: the error of a decision to give up.
    """
    match decision:
        case decisions.Leave():
            raise Leaving
        case decisions.GiveUp(error):
            raise error
