# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: what the trainer sees of the other groups.

quorum (asked for at the last commit) -> forward and backward -> round (exchange, vote) -> decision -> the act
                                                                 ^                            |
                                                                 +---- same gradients --------+

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
from titan_ft.engine.round import PAUSE_SECONDS, Rounds, Sign
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol import decision as decisions
from titan_ft.protocol import straggler
from titan_ft.protocol.decision import ALONE_SECONDS, Decision, LastToLeave, decide, find_last_to_leave
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Ledger, deal_anew
from titan_ft.protocol.member import Process
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
"""That groups with the final state wait for a missing group which shows no sign of life; they wait longer for one that
does. A group that comes later has lost nothing: it finds that the job has finished, and ends as a success."""
_LOOKS_PER_TURN = 2  # at whether a group that is to save has begun to; `_LOOK_SECONDS` apart
_LOOK_SECONDS = 0.5
_SAY_SECONDS = 1.0  # of waiting with the final state, before the group says for whom: the others may be a moment late
_MAX_OPENINGS = 5  # rounds behind an update, for those that missed it; after these they wait for the next one
_OPENING_SECONDS = 5.0  # for the others to come to one of them; who trains already comes at the end of its round


class Opening(enum.Enum):
    """What a group does behind an update of a semi-synchronous method."""

    TRAIN = enum.auto()
    EXCHANGE = enum.auto()  # at once, with nothing of its own: the others are at the end of the next round
    HEAL = enum.auto()


@dataclass(frozen=True)
class Committed:
    """A committed step: its update, and what is logged of it.

    Attributes:
        participants: slots of the groups that contributed weight.
        valid_tokens: tokens that the mean is taken over.
        loss, max_loss: mean per valid token over all participants, and the largest mean of one rank.
        own_tokens, own_loss: this group's part of them; None = it has none.
        exchanges: rounds that the step took; 1 = no retry.
        parent: lineage of the state before the step.
        slowest: seconds of the slowest group's own part of the step / median of the others' (0 = alone).
        waits: how long this rank waited for other groups, the longest first.
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
    """One rank's side of the protocol. Training thread only; all ranks of a group call the same methods alike.

    Args:
        nominal_tokens: tokens of a step with all groups present; local losses are scaled by its inverse.
        pauses_after: says of a step whether training goes on after it only when something else is done.
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
        self._config, self._position, self._rounds, self._heal = config, position, rounds, heal
        self._ledger, self._group, self._events = ledger, group, events
        self._strategy = strategy_of(config)
        self._stragglers = Stragglers(straggler.FACTOR, straggler.STEPS)
        self._nominal_tokens, self._pauses_after = nominal_tokens, pauses_after
        self._waiting = False
        self._waits_to_end_for: list[int] = []  # slots of the groups that were last said to be waited for at the end
        self._outsiders: list[int] = []  # slots of groups that lived outside of the last round, as rank 0 has seen it
        self.heal_seconds = 0.0

    def join(self, step: int = 0) -> bool:
        """Meet the other groups as one that can load `step` committed updates, or has none.

        Returns:
            Whether they are further, so that this one must `heal`.
        """
        self._position.start_at(step)
        if self._heal.await_offer(step):
            self._position.start_at(0)
            return True
        # A rank that could not reach the others may have heard of their steps only in part.
        most = max(self._group.gather(self._rounds.meet().max_step))
        if most > step:
            # They may be gone before they have shown it in a round: then it is lost, and not to be begun anew silently.
            self._position.hear(most)
            self._position.start_at(0)
        return most > step

    def start(self, step: int) -> bool:
        """Begin to train together, holding `step` committed updates; returns False if this group must `heal` first.

        The job's first step, also behind a checkpoint, waits for `group_size` groups, up to `start_timeout_seconds`,
        and longer while groups live that are not in the quorum: in the midst of a long step they are in none, and what
        they hold would be given up.

        Raises:
            GaveUpError: fewer than `min_replica_size` groups came.
        """
        began, seen = self._group.clock(), -math.inf
        outcome: Round | Broken | None = None
        self._position.start_at(step)
        self.digest_if_due()
        while True:
            now = self._group.clock()
            is_soon_over = now - began >= self._config.start_timeout_seconds - ALONE_SECONDS
            if is_soon_over and isinstance(outcome, Round) and self._look_for_outsiders(outcome):
                seen = now
            self._position.wait(now - began if now - seen >= ALONE_SECONDS else 0.0)
            outcome = self._rounds.make()
            match decide(self._position, outcome, self._config):
                case decisions.Begin(missing) if isinstance(outcome, Round):
                    if missing:
                        logger.warning("start_timeout_seconds is over: beginning without %d groups", missing)
                    self._position.begin()
                    self._rounds.waits.discard()
                    self._ledger.readers = tuple(outcome.readers)
                    self.offer()  # again: the ledger is part of the state
                    return True
                case decisions.Heal():
                    return False
                case decisions.Wait():
                    time.sleep(PAUSE_SECONDS)
                case other:
                    _end_if_decided(other)

    def arm(self) -> None:
        """Let the next backward launch the exchange; call it before the step's last backward."""
        self._rounds.launch()

    def send(self, contribution: Contribution) -> None:
        """Let the exchange go on while this group makes steps of the next round; `commit` completes it."""
        self._rounds.send(contribution)

    def look(self, *, overdue: bool = False) -> Sign:
        """Return what any rank of the group sees between two steps of a round, the same on all. A collective: the only
        one there, for on a GPU each is a wait of the host.

        Args:
            overdue: whether this rank finds that `sync_deadline_seconds` are over.
        """
        own = self._rounds.signs | (Sign.OVERDUE if overdue else Sign(0))
        return functools.reduce(operator.or_, map(Sign, self._group.gather(own)))

    def serve(self) -> None:
        """Let a joiner that has come in the midst of this round have the state, behind the same step on all ranks."""
        self._rounds.serve()

    def ask(self) -> None:
        """Ask for the next round's quorum: from then on the others wait for this group no longer than for its step."""
        self._rounds.ask()

    def slots_to_read(self) -> list[int]:
        """Return the slots whose data this group trains in the next step; none if another group still reads its own."""
        if self._config.batch_policy == "shrink" or not self._ledger.readers:
            return [self._config.replica_id]
        # Not a reader: the others dealt out this group's slot before they knew that it is back.
        return self._ledger.shares().get(self._rounds.process, [])

    def commit(
        self, contribution: Contribution, train: Callable[[list[int]], Contribution], discard: Callable[[], None]
    ) -> Committed | None:
        """Make rounds until the step is committed; its update is then to be applied at once.

        Args:
            contribution: what this group's gradients are made of.
            train: adds the gradients of one more step's share of each of these slots to the local ones; with a
                semi-synchronous method goes on with the round and returns what all of its steps contribute.
            discard: drops the local gradients.

        Returns:
            None if this group turns out not to hold the job's state: it must `heal`, its gradients are void.

        Raises:
            GaveUpError: too many exchanges in a row broke (`MAX_EXCHANGE_RETRIES`).
            DivergedError: the groups' states differ without a majority.
            NonFiniteError: this group's gradients, and no others', were not finite in several steps in a row.
            Leaving: the group was told to leave, and the step could not be committed.
        """
        use = given = GradientUse.GIVE
        exchanges = 0
        shares = {} if self._config.batch_policy == "shrink" else self._ledger.shares()
        while True:
            outcome = self._rounds.make(contribution, use)
            exchanges += 1
            match decide(self._position, outcome, self._config):
                case decisions.Commit() if isinstance(outcome, Round):
                    return self._commit(outcome, exchanges)
                case decisions.Repeat():
                    use = given
                    if isinstance(outcome, Broken) and (slots := self._meet_and_deal(shares)):
                        contribution = contribution.plus(train(slots))
                case decisions.LeaveOut():
                    use = given = GradientUse.LEAVE_OUT
                case decisions.Force():
                    use = given = GradientUse.FORCE
                case decisions.TakeOver(slots):
                    shares.clear()  # the rows know better who has read what
                    contribution = contribution.plus(train(slots))
                case decisions.TrainOn() if isinstance(outcome, Round):
                    if outcome.verdict.opening:
                        self._rounds.ask()  # they may meet again: nobody is to wait for this group's steps
                    contribution = train(self.slots_to_read())
                case decisions.Discard():
                    discard()
                    shares.clear()
                    contribution, use, given = NOTHING, GradientUse.GIVE, GradientUse.GIVE
                case decisions.Wait() as wait:
                    self._wait(outcome, wait)
                    use = GradientUse.REST if given.gives else given
                case decisions.Heal():
                    return None
                case other:
                    _end_if_decided(other)

    def _meet_and_deal(self, shares: dict[Process, list[int]]) -> list[int]:
        """Meet the others again when a round has broken; returns the slots that this group takes over from who is gone.

        The next quorum says who that is. Without this a whole round would be made to find in its rows what it lacks;
        the rows still have the last word (`decisions.TakeOver`), for a group may look gone that is only late.

        Args:
            shares: which slots each reader trains in this step; brought up to date.
        """
        present = self._rounds.meet().processes if shares else []
        if len(present) < self._config.min_replica_size:  # the step has to wait, and they may be back by then
            return []
        return deal_anew(shares, present).get(self._rounds.process, [])

    def open(self) -> Opening:
        """Meet the others once more right behind an update, before a round of steps begins.

        A group that missed the update, or has just come, gets a donor here; else it would know at the end of the round.
        Who is alone in this, because the others saw another end of the last such round, does not wait for them: it
        begins to train, and meets them when they are there.
        """
        for _ in range(_MAX_OPENINGS):
            if not self._await_opening():
                break
            outcome = self._rounds.make(use=GradientUse.OPEN)
            decision = decide(self._position, outcome, self._config)
            if isinstance(decision, decisions.Heal):
                return Opening.HEAL
            _end_if_decided(decision)
            if isinstance(outcome, Round) and outcome.verdict.due:
                return Opening.EXCHANGE
            # Once more with compared bytes on offer would find a joiner healed, and without time for a step of its own.
            is_unserved = isinstance(outcome, Round) and outcome.asked_for and not outcome.verdict.verified
            if isinstance(outcome, Round) and not (is_unserved or outcome.verdict.strays):
                break
        return Opening.TRAIN

    def _await_opening(self) -> bool:
        """Wait a while for the others to come to a round right behind the update."""
        deadline = self._group.clock() + _OPENING_SECONDS
        return self.await_others(lambda: self._group.clock() >= deadline)

    def await_others(self, is_over: Callable[[], bool]) -> bool:
        """Ask for the next round's quorum and wait for it; says whether it is there. A collective.

        Args:
            is_over: says whether this group waits no longer. A collective as well.
        """
        self._rounds.ask()
        while not any(self._group.gather(self._rounds.awaited)):
            if is_over():
                return False
            self._rounds.pause()
        return True

    def lacks_time(self, seconds: float, share: float) -> bool:
        """Say whether so many more seconds exceed a share of the time to leave, on any rank. A collective."""
        return self._rounds.lacks_time(seconds, share)

    @property
    def early(self) -> bool:
        """Say whether this group has asked for the next round already: it has just healed, or opened without others."""
        return self._rounds.asked

    def digest_if_due(self) -> str | None:
        """Take the digest of the state if one is due at this step; it travels with the next round.

        Returns:
            This rank's part of it (hex) on steps that are multiples of `digest_every`, else None.
        """
        every, length = self._config.digest_every, self._strategy.steps
        due = every and self._position.step * length % every < length  # a round in which it falls due counts
        return self._rounds.take_digest() if due else None

    def offer(self) -> None:
        """Let a newcomer have the state behind this update while the next step is computed."""
        self._rounds.offer()

    def heal(self) -> int:
        """Get the job's state from a donor while the others train on; returns the step that this group then holds.

        Raises:
            JobLostError: nobody is left who has it.
        """
        self.heal_seconds = self._heal.run()
        self._rounds.waits.discard()
        self.digest_if_due()
        self.offer()
        return self._position.step

    @property
    def opens(self) -> bool:
        """Say whether the others `open` a round behind the update that this group's heal has ended with."""
        return self._heal.ended_on_update

    def finish(self) -> str | None:
        """Stay until every group holds the final state, or `FINISH_SECONDS` passed without news; then leave.

        Not while groups live that are not in the quorum: in the midst of a long step they are in none.

        Returns:
            This rank's digest of the final state, in hex. None if this group turns out not to hold it: it must `heal`,
            and train on if the state that it gets is an earlier one, for all that held the final one may have died.
        """
        digest = self._rounds.take_digest()
        self._position.finish()
        began = self._group.clock()
        deadline = began + FINISH_SECONDS
        complete = False
        while True:
            outcome = self._rounds.make()
            if complete:  # everybody was seen to have finished; this last round only let the slowest see it too
                return digest
            decision = decide(self._position, outcome, self._config)
            if isinstance(decision, decisions.Heal):
                return None
            _end_if_decided(decision)
            # Ranks may have seen different rows of a group that is leaving: they must agree here.
            complete = all(self._group.gather(int(isinstance(decision, decisions.Done))))
            now = self._group.clock()
            if self._is_needed(outcome):
                deadline = now + FINISH_SECONDS
            if now >= deadline and isinstance(outcome, Round) and self._look_for_outsiders(outcome):
                deadline = now + ALONE_SECONDS
            if now >= deadline:
                self._end_without(outcome, now - began)
                return digest
            if not complete and now - began >= _SAY_SECONDS:
                self._wait_to_end(outcome, deadline - now)
            if not complete:
                time.sleep(PAUSE_SECONDS)

    def _wait_to_end(self, outcome: Round | Broken, seconds: float) -> None:
        """Say for whom this group waits with the final state, once for each set of groups."""
        slots = self._find_unfinished(outcome)
        if slots and slots != self._waits_to_end_for:
            logger.warning("holding the final state: waiting for groups %s for %.0f s at most", slots, seconds)
            self._events.emit(WaitingToEnd(step=self._position.step, slots=slots, seconds=seconds))
        self._waits_to_end_for = slots or self._waits_to_end_for

    def _end_without(self, outcome: Round | Broken, seconds: float) -> None:
        slots = self._find_unfinished(outcome) or self._waits_to_end_for
        logger.warning(
            "ending without groups %s: they did not come for the final state within %g s",
            slots,
            FINISH_SECONDS,
        )
        self._events.emit(EndedWithout(step=self._position.step, slots=slots, seconds=seconds))

    def _find_unfinished(self, outcome: Round | Broken) -> list[int]:
        """Return the groups that the job misses: those outside of a round that have not left, and those that heal."""
        if isinstance(outcome, Broken):
            return []
        holders = {outcome.rows[rank].slot for rank in outcome.verdict.holders}
        return sorted({*range(self._config.group_size)} - holders - self._position.left)

    def find_last_to_leave(self) -> LastToLeave | None:
        """Return the groups with which the job's state leaves; None if another group has it. A collective.

        A group that is outside of the largest clique holds an older state than the others do.
        """
        if not self._position.leaving:
            return None
        left = self._group.union(self._position.left)
        return find_last_to_leave(self._position, left, self._config.replica_id)

    def await_turn(self, last: LastToLeave, is_saved: Callable[[], bool], is_begun: Callable[[], bool]) -> bool:
        """Wait while other groups that leave may save the state; says whether this one is to. A collective.

        The first of them saves. The others stay until the state is saved, for the first one may die
        in its save; but no longer than a group that leaves may wait for others. If the first one has not
        begun by then it hangs, and the next one saves.

        Args:
            is_saved: says whether the state is saved. A collective as well.
            is_begun: says whether another group writes it. A collective as well.
        """
        own = last.slots.index(self._config.replica_id)
        before = set(last.slots[:own])
        looks = 0
        while True:
            # In this order: a group that is gone now has saved before, or has not.
            before = self._rounds.find_living(before) if before else before
            if is_saved():
                return False
            if not before:
                return True
            if self._rounds.must_hurry:
                if is_begun():
                    return False
                if looks >= _LOOKS_PER_TURN * len(before):
                    return True
                looks += 1
            time.sleep(min(_LOOK_SECONDS, self._config.heartbeat_timeout_ms / 1000))

    def _look_for_outsiders(self, made: Round) -> bool:
        """Say whether groups live that were not in a round, to people once; the same on all ranks. A collective."""
        slots = self._rounds.find_outsiders(made)
        if slots and slots != self._outsiders:
            logger.warning("groups %s live and are in no quorum, in a long step perhaps: waiting for them", slots)
        self._outsiders = slots
        return any(self._group.gather(len(slots)))

    def _is_needed(self, outcome: Round | Broken) -> bool:
        """Say whether a group may be there that lacks the final state.

        A round that broke, perhaps after a long time without a lighthouse, was made with somebody: to leave right after
        it would take the final state from a group that has just come back.
        """
        if isinstance(outcome, Round):
            return len(outcome.verdict.holders) < len(outcome.rows)
        return self._position.failures <= decisions.MAX_EXCHANGE_RETRIES

    def _commit(self, made: Round, exchanges: int) -> Committed:
        """Count the round's update as part of the state, and ask for the next quorum."""
        self._waiting = False
        update, verdict, own = made.update(self._nominal_tokens), made.verdict, made.rows[made.quorum.rank]
        excluded = made.slots(verdict.excluded)
        if excluded:
            text = "%s %d is made without the gradients of groups %s: not finite"
            logger.warning(text, self._strategy.unit, update.step, excluded)
            self._events.emit(GradientExcluded(step=update.step, slots=excluded))
        self._position.exclude(excluded, self._config.replica_id)
        self._position.advance(update)
        self._compare_speeds(made)
        if not self._pauses_after(update.step):
            # Asked for now, when all groups are at the same point, the next quorum finds everybody on time.
            self._rounds.ask(ahead=True)
        return Committed(
            update=update,
            parent=made.lineage,
            participants=made.slots(verdict.contributors),
            valid_tokens=verdict.valid_tokens,
            loss=verdict.loss * update.scale,
            max_loss=verdict.max_loss,
            own_tokens=own.valid_tokens,
            own_loss=own.loss * (self._nominal_tokens / own.valid_tokens) if own.valid_tokens else None,
            exchanges=exchanges,
            slowest=max(self._stragglers.ratios.values(), default=0.0),
            waits=self._rounds.waits.take_waits(),
        )

    def _wait(self, outcome: Round | Broken, wait: decisions.Wait) -> None:
        """Pause before the next round: the step cannot be committed now."""
        self._rounds.waits.note_held_back(wait.slots, wait.why)
        if not self._waiting and isinstance(outcome, Round):
            self._waiting = True
            logger.warning("%s %d waits: %s", self._strategy.unit, self._position.step + 1, wait.reason)
            self._events.emit(
                Waiting(
                    step=self._position.step,
                    participants=outcome.slots(outcome.verdict.contributors),
                    reason=wait.reason,
                    slots=list(wait.slots),
                    why=wait.why.name.lower(),
                )
            )
        time.sleep(PAUSE_SECONDS)

    def _compare_speeds(self, made: Round) -> None:
        """Tell when a group has become a straggler, or is none any more."""
        seconds = {made.quorum.slots[rank]: made.rows[rank].seconds for rank in made.verdict.contributors}
        for change in self._stragglers.observe(seconds):
            what = "is as fast as the others again" if change.recovered else f"is {change.ratio:.1f} times slower"
            logger.warning("group %d %s", change.slot, what)
            kind = StragglerRecovered if change.recovered else Straggler
            self._events.emit(kind(slot=change.slot, factor=change.ratio, step=self._position.step))


def _end_if_decided(decision: Decision) -> None:
    """End the phase under way if that is the decision.

    Raises:
        Leaving: the group was told to leave.
        Exception: that of a decision to give up.
    """
    match decision:
        case decisions.Leave():
            raise Leaving
        case decisions.GiveUp(error):
            raise error
