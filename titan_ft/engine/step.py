# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: the trainer's view of the other groups.

One step:

    quorum (requested at the last commit) -> forward, backward -> round (exchange, vote) -> decision
                                                                  ^                            |
                                                                  +------ same gradients ------+

See docs/exchange.md.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import operator
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
_LOOKS_PER_TURN = 2
"""How often a group that leaves looks whether another group has begun to save, for each group
before it in the order of saving."""
_LOOK_SECONDS = 0.5  # between two such looks
_SILENT_WAIT_SECONDS = 1.0
"""A group with the final state names the groups it waits for only after this time: the others may
be a moment late."""
_MAX_OPENING_ROUNDS = 5
"""Rounds after an update that are made for groups which missed it. After these rounds, such groups
must wait for the next update."""
_OPENING_SECONDS = 5.0
"""How long a group waits for the others to come to an opening round. A group that trains already
comes only at the end of its round."""
_WAITS_FOR_OUTSIDERS = (
    "groups %s live and are in no quorum, in a long step perhaps: waiting for them"
)


class Opening(enum.Enum):
    """The next action of a group after the opening rounds of a semi-synchronous method."""

    TRAIN = enum.auto()
    # The others are at the end of the next round: exchange at once, with nothing to give.
    EXCHANGE = enum.auto()
    HEAL = enum.auto()


@dataclass(frozen=True)
class Committed:
    """A committed step: its update, and the facts about it that are logged.

    Attributes:
        parent: lineage of the state before the step.
        participants: slots of the groups that contributed weight.
        valid_tokens: tokens that the mean is taken over.
        loss: mean per valid token over all participants.
        max_loss: largest mean loss of one rank.
        own_tokens, own_loss: this group's part of these; None = the group has no part.
        exchanges: number of rounds for the step; 1 = no retry.
        slowest: seconds of the slowest group's own part of the step / median of the others'
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
    exchanges: int
    slowest: float
    waits: Sequence[Waited] = ()


class ReplicaDimension:
    """One rank's side of the protocol between the groups.

    The trainer and the strategies call it, on the training thread. All ranks of a group call the
    same methods in the same order. If a method raises, the state is that of the last committed
    update, and the local gradients are untouched.

    Args:
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
        self._strategy = strategy_of(config)
        self._stragglers = Stragglers(straggler.FACTOR, straggler.STEPS)
        self._wait_is_reported = False  # of the step under way
        # Slots of the groups that the last report about the wait for the end named.
        self._reported_unfinished: list[int] = []
        self._outsiders = OutsiderWatch(rounds, group, _WAITS_FOR_OUTSIDERS)
        self.heal_seconds = 0.0

    # The start

    def join(self, step: int = 0) -> bool:
        """Meet the other groups.

        Args:
            step: committed updates that this group can load from a checkpoint; 0 = it has none.

        Returns:
            True if the others are further, so that this group must `heal`.
        """
        self._position.set_step(step)
        if self._heal.await_offer(step):
            self._position.set_step(0)
            return True
        # A rank that could not reach the others may know their steps only in part.
        latest = max(self._group.gather(self._rounds.get_quorum().max_step))
        if latest <= step:
            return False
        # Remember the others' step. If they die before a round shows it, the job's state is lost,
        # and the job must not silently start over.
        self._position.raise_seen_step(latest)
        self._position.set_step(0)
        return True

    def start(self, step: int) -> bool:
        """Start to train together with the other groups.

        The job's first step, also after a checkpoint, waits for `group_size` groups, up to
        `start_timeout_seconds`. It waits longer while groups live that are not in the quorum: a
        group inside a long step is in no quorum, and its state would be given up.

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
            is_soon_over = waited >= self._config.start_timeout_seconds - SIGN_TIMEOUT_SECONDS
            # All ranks of the group look, or none: they have the same clock and the same outcome.
            if is_soon_over and isinstance(outcome, Round) and self._outsiders.has_any(outcome):
                outsiders_seen_at = now
            if now - outsiders_seen_at < SIGN_TIMEOUT_SECONDS:
                self._position.set_waited_seconds(0.0)
            else:
                self._position.set_waited_seconds(waited)
            outcome = self._rounds.make()
            match decide(self._position, outcome, self._config):
                case decisions.StartTraining(num_missing) if isinstance(outcome, Round):
                    self._start_training(outcome, num_missing)
                    return True
                case decisions.StartHeal():
                    return False
                case decisions.Wait():
                    time.sleep(PAUSE_SECONDS)
                case other:
                    _raise_end(other)

    def _start_training(self, made: Round, num_missing: int) -> None:
        if num_missing:
            text = "start_timeout_seconds is over: beginning without %d groups"
            logger.warning(text, num_missing)
        self._position.mark_training()
        self._rounds.waits.discard()
        self._ledger.readers = tuple(made.readers)
        self.offer_state()  # the readers are a part of the offered state

    # One update

    def arm(self) -> None:
        """Let the next backward launch the exchange. Call this before the step's last backward."""
        self._rounds.arm()

    def launch_with(self, contribution: Contribution) -> None:
        """Launch the exchange, which goes on while this group makes steps of the next round.

        `commit` with the same contribution completes it.
        """
        self._rounds.launch_with(contribution)

    def gather_signs(self, *, overdue: bool = False) -> Sign:
        """Return all signs that a rank of the group sees, the same on all ranks. A collective.

        It is the only collective between two local steps, because on a GPU each collective makes
        the host wait.

        Args:
            overdue: this rank finds that `sync_deadline_seconds` are over.
        """
        own = self._rounds.signs
        if overdue:
            own |= Sign.OVERDUE
        return functools.reduce(operator.or_, map(Sign, self._group.gather(own)))

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
            train: adds the gradients of one more step's share of each given slot to the local ones.
                With a semi-synchronous method, it goes on with the round, and returns the
                contribution of all of the round's steps.
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
        use = GradientUse.GIVE
        use_after_wait = GradientUse.GIVE
        exchanges = 0
        # Which slots each reader trains in this step; empty = the rows settle it.
        shares: dict[GroupProcess, list[int]] = {}
        if self._config.batch_policy != "shrink":
            shares = self._ledger.shares()
        while True:
            outcome = self._rounds.make(contribution, use)
            exchanges += 1
            match decide(self._position, outcome, self._config):
                case decisions.Commit() if isinstance(outcome, Round):
                    return self._commit(outcome, exchanges)
                case decisions.Repeat():
                    use = use_after_wait
                    if isinstance(outcome, Broken):
                        slots = self._take_over_after_break(shares)
                        if slots:
                            contribution = contribution.plus(train(slots))
                case decisions.ExcludeGradients():
                    use = use_after_wait = GradientUse.EXCLUDE
                case decisions.ForceGradients():
                    use = use_after_wait = GradientUse.FORCE
                case decisions.TakeOverSlots(slots):
                    shares.clear()  # the rows show which slots are read
                    contribution = contribution.plus(train(slots))
                case decisions.TrainOn() if isinstance(outcome, Round):
                    if outcome.verdict.opening:
                        # The others may make one more opening round. They must not wait for this
                        # group's steps.
                        self._rounds.request_quorum()
                    contribution = train(self.slots_to_read())
                case decisions.DiscardGradients():
                    discard()
                    shares.clear()
                    contribution = NOTHING
                    use = use_after_wait = GradientUse.GIVE
                case decisions.Wait() as wait:
                    self._wait(outcome, wait)
                    use = use_after_wait
                    if use.gives:
                        use = GradientUse.HOLD_BACK
                case decisions.StartHeal():
                    return None
                case other:
                    _raise_end(other)

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

    def _commit(self, made: Round, exchanges: int) -> Committed:
        """Count the round's update as a part of the state, and request the next quorum."""
        self._wait_is_reported = False
        update, verdict = made.update(self._nominal_tokens), made.verdict
        own = made.rows[made.quorum.rank]
        own_loss = None
        if own.valid_tokens:
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
        self._compare_speeds(made)
        if not self._pauses_after(update.step):
            # All groups are at the same point now, so none comes late to this quorum.
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
            exchanges=exchanges,
            slowest=max(self._stragglers.ratios.values(), default=0.0),
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

    def _compare_speeds(self, made: Round) -> None:
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

    def open_round(self) -> Opening:
        """Meet the others once more right after an update, before the steps of the next round.

        A group that missed the update, or has just come, finds a donor in these rounds. Otherwise
        it would find one only at the end of the next round.

        If no other group comes within `_OPENING_SECONDS`, this group starts to train. The others
        may have seen another end of the last opening round. The groups meet again at the end of the
        round.
        """
        for _ in range(_MAX_OPENING_ROUNDS):
            if not self._await_opening():
                break
            outcome = self._rounds.make(use=GradientUse.OPEN)
            decision = decide(self._position, outcome, self._config)
            if isinstance(decision, decisions.StartHeal):
                return Opening.HEAL
            _raise_end(decision)
            if isinstance(outcome, Broken):
                continue
            if outcome.verdict.may_update:
                return Opening.EXCHANGE
            # Holders offer only compared bytes. If they have not compared them, one more round
            # follows. If they have, one more round would find the joiner healed, without time for a
            # step of its own.
            is_unserved = outcome.has_askers and not outcome.verdict.verified
            if not is_unserved and not outcome.verdict.strays:
                break
        return Opening.TRAIN

    def _await_opening(self) -> bool:
        """Wait a while for the others to come to an opening round; return True if they do."""
        deadline = self._group.clock() + _OPENING_SECONDS
        return self.await_others(lambda: self._group.clock() >= deadline)

    def await_others(self, is_over: Callable[[], bool]) -> bool:
        """Request the next round's quorum and wait for it. A collective.

        Args:
            is_over: returns True if this group waits no longer. A collective as well.

        Returns:
            True if the quorum is there.
        """
        self._rounds.request_quorum()
        while not any(self._group.gather(self._rounds.quorum_ready)):
            if is_over():
                return False
            self._rounds.wait_for_quorum()
        return True

    def lacks_time(self, seconds: float, share: float) -> bool:
        """Return True if so many more seconds exceed a share of the time to leave, on any rank.

        A collective.
        """
        return self._rounds.lacks_time(seconds, share)

    # The state

    def digest_if_due(self) -> str | None:
        """Take the digest of the state if one is due at this step. The next round shows it.

        Returns:
            This rank's part of the digest (hex) on steps that are multiples of `digest_every`.
            After a round of several steps: if one of its steps is such a multiple. Otherwise None.
        """
        every = self._config.digest_every
        if not every:
            return None
        steps_since_due = self._position.step * self._strategy.steps % every
        if steps_since_due >= self._strategy.steps:
            return None
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
    def others_open(self) -> bool:
        """True if the others make opening rounds after the update with which this heal ended."""
        return self._heal.ended_on_update

    # The end of the job

    def finish(self) -> str | None:
        """Stay until every group holds the final state, or until `FINISH_SECONDS` pass without
        news.

        This group stays longer while groups live that are not in the quorum: a group inside a long
        step is in none.

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
            _raise_end(decision)
            # The ranks may have seen different rows of a group that leaves. So they agree here.
            is_done = isinstance(decision, decisions.Done)
            is_complete = all(self._group.gather(int(is_done)))
            now = self._group.clock()
            if self._is_needed(outcome):
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

    def _is_needed(self, outcome: Round | Broken) -> bool:
        """Return True if a group may be present that lacks the final state.

        A round that broke was made with another group. If this group left right after it, perhaps
        after a long time without a lighthouse, it would take the final state from a group that has
        just come back.
        """
        if isinstance(outcome, Round):
            return len(outcome.verdict.holders) < len(outcome.rows)
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
        """Return the groups with which the job's state leaves; None if another group keeps it.

        A collective. A group outside of the largest clique holds an older state than the others.
        """
        if not self._position.leaving:
            return None
        left = self._group.union(self._position.left)
        return find_last_to_leave(self._position, left, self._config.replica_id)

    def await_turn(
        self,
        last: LastToLeave,
        is_saved: Callable[[], bool],
        is_begun: Callable[[], bool],
    ) -> bool:
        """Wait while other groups that leave may save the state. A collective.

        The first of these groups saves. The others stay until the state is saved, because the first
        group may die during its save. They stay no longer than a group that leaves may wait for
        others. If the first group has not begun to save by then, it hangs, and the next group
        saves.

        Args:
            is_saved: returns True if the state is saved. A collective as well.
            is_begun: returns True if another group writes the state. A collective as well.

        Returns:
            True if this group must save.
        """
        own = last.slots.index(self._config.replica_id)
        groups_before = set(last.slots[:own])
        looks = 0
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
                if is_begun():
                    return False
                if looks >= _LOOKS_PER_TURN * len(groups_before):
                    return True
                looks += 1
            time.sleep(min(_LOOK_SECONDS, self._config.heartbeat_timeout_ms / 1000))


def _raise_end(decision: Decision) -> None:
    """Raise if the decision ends this group's part in the run.

    Raises:
        Leaving: the group leaves in order.
        Exception: the error of a decision to give up.
    """
    match decision:
        case decisions.Leave():
            raise Leaving
        case decisions.GiveUp(error):
            raise error
