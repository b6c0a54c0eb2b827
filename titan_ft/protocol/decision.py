# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The policy: how a group decides what to do after a round. All functions are pure.

    rows of a round          -> `judge`  -> a Verdict (which groups hold the job's state, ...)
    position, round, config  -> `decide` -> one Decision

`verdict.py` defines the words for the members of a round: holder, stray, duplicate, ready, opening,
excluded, holding back. `Position` is the group's own place in the job.

Each rank decides by itself. All ranks of a group come to the same decision, because they have the
same position and read the same rows. Nothing here reads a clock, a folder or the network. A time
in a position is that of the group's common clock (`GroupCollectives.clock`).

`Rounds`, `ReplicaDimension` and `Heal` call these functions. See docs/exchange.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.protocol.errors import DivergedError, GaveUpError, JobLostError, NonFiniteError
from titan_ft.protocol.healing import rotate
from titan_ft.protocol.ledger import share_out
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Broken, Round
from titan_ft.protocol.row import Standing, Why
from titan_ft.protocol.strategy import strategy_of

ALONE_SECONDS = 5.0
"""After this time without a holder of the job's state, the job goes on from the latest state that
is left, even if it is an older one."""
MAX_EXCHANGE_RETRIES = 10
"""After more than this many broken rounds of one step in a row, the group with the highest slot
restarts, because it may be at fault itself. The others restart later (`_find_retry_limit`). A
passing failure breaks two or three rounds."""
MAX_EXCLUSIONS = 3
"""A group restarts after this many steps in a row in which its gradients were not finite, and those
of others were."""


class Decision:
    """The next action of a group. Each class below is one."""


# A group that trains:


@dataclass(frozen=True)
class StartTraining(Decision):
    """Make the job's first step, without the groups that did not come."""

    num_missing: int


@dataclass(frozen=True)
class Commit(Decision):
    """Apply the round's update."""


@dataclass(frozen=True)
class Repeat(Decision):
    """Make one more round at once, with the same gradients.

    After a broken round, the caller may add gradients first: the next quorum shows which groups are
    gone, and their batches must be trained by others (`ReplicaDimension.commit`).
    """


@dataclass(frozen=True)
class TrainOn(Decision):
    """Make the remaining local steps. Only with rounds of several steps.

    No group has made all of its local steps. The groups met early, for groups that heal.
    """


@dataclass(frozen=True)
class LeaveOut(Decision):
    """Make one more round without this group's gradients, which are not finite."""


@dataclass(frozen=True)
class Force(Decision):
    """Make one more round with this group's gradients, although they are not finite.

    No group has finite ones, so the model diverges, as it would in stock torchtitan.
    """


@dataclass(frozen=True)
class TakeOver(Decision):
    """Train the batches of `slots` too, then make one more round.

    The groups that were to train them are gone.
    """

    slots: list[int]


@dataclass(frozen=True)
class Discard(Decision):
    """Drop this group's gradients and make one more round: another group trained the same data."""


@dataclass(frozen=True)
class Wait(Decision):
    """Make one more round after a pause, because this one cannot be committed.

    The group holds its gradients back until then.

    Attributes:
        reason: the cause, as a text.
        slots: the groups that the step waits for; empty if no group is the cause.
        why: why the step waits for these groups.
    """

    reason: str
    slots: Sequence[int] = ()
    why: Why = Why.TOO_FEW


# A group that heals, that has finished, or that ends:


@dataclass(frozen=True)
class StartHeal(Decision):
    """Fetch the job's state. This group does not hold it, so its gradients are void."""


@dataclass(frozen=True)
class RollBack(Decision):
    """End the heal with this group's own state. It is the latest one that is left."""


@dataclass(frozen=True)
class Done(Decision):
    """All groups hold the final state."""


@dataclass(frozen=True)
class Leave(Decision):
    """End in order. The group got a leave request, and its ranks have agreed to leave."""


@dataclass(frozen=True)
class GiveUp(Decision):
    """End with `error`."""

    error: Exception


def decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    """Decide what a group does after a round.

    Args:
        position: the group's position after the round (`Position.observe` or `count_broken_round`).
    """
    decision = _decide(position, outcome, config)
    # A group that leaves still applies an update, and still ends with an error.
    if position.leaving and not isinstance(decision, Commit | GiveUp):
        return Leave()
    return decision


def _decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    if isinstance(outcome, Broken):
        return _decide_after_break(position, outcome, config)
    if outcome.verdict.tie:
        return GiveUp(_diverged(outcome, strategy_of(config).unit))
    if not position.standing.has_state:
        return _decide_healing(position, outcome, config)
    if outcome.quorum.rank not in outcome.verdict.holders:
        return StartHeal()
    if position.standing is Standing.FINISHED:
        return _decide_finished(position, outcome, config)
    if position.training:
        return _decide_training(position, outcome, config)
    return _decide_start(outcome, config)


def _decide_after_break(position: Position, broken: Broken, config: FaultTolerance) -> Decision:
    trains = position.training and position.standing is Standing.READY
    if not trains:
        return Repeat()
    limit = _find_retry_limit(position, config)
    if limit is not None and position.broken_rounds > limit:
        unit = strategy_of(config).unit
        return GiveUp(
            GaveUpError(
                f"the exchange of {unit} {position.step + 1} broke {position.broken_rounds} times "
                f"in a row, more often than this group tries again ({limit}); see why in this log",
            ),
        )
    if broken.gave_nonfinite:
        return LeaveOut()
    return Repeat()


def _find_retry_limit(position: Position, config: FaultTolerance) -> int | None:
    """Return after how many broken rounds in a row this group gives up; None = never.

    Any group may be at fault, so each gets its turn to restart: the group with the highest slot
    first. The group with the lowest slot never gives up. If all gave up at once, no group would
    hold the job's state any more.
    """
    own_slot = config.replica_id
    num_below = 0
    num_above = 0
    for slot in position.peers:
        if slot < own_slot:
            num_below += 1
        elif slot > own_slot:
            num_above += 1
    if num_below == 0:
        return None
    return MAX_EXCHANGE_RETRIES * (1 + num_above)


def _diverged(made: Round, unit: str) -> DivergedError:
    digests = {row.slot: f"{row.digest:012x}" for row in made.rows}
    return DivergedError(
        f"the groups' states differ after {unit} {made.verdict.step} and no majority says which is "
        f"right (digests {digests}); restart the job from a checkpoint",
    )


def _decide_start(made: Round, config: FaultTolerance) -> Decision:
    """Decide for a group that waits for the job's first step.

    It waits until all groups are present, or until `start_timeout_seconds` are over.
    """
    if is_update(made, config):
        # The others have started without this group, and apply this round's update.
        return StartHeal()
    num_present = len({row.slot for row in made.rows})
    # The longest wait in the rows counts. All groups read the same rows, so all of them end the
    # wait in the same round.
    waited_seconds = max(row.waited_seconds for row in made.rows)
    if num_present < config.group_size and waited_seconds < config.start_timeout_seconds:
        return Wait(f"{num_present} of {config.group_size} groups are here")
    # Do not give up if a group of the round has made steps already. That group waits for
    # `min_replica_size` without a limit. Without this rule, two groups that restarted in turn each
    # found the other one absent and gave up, and the job made no step.
    if num_present < config.min_replica_size and not _has_started(made):
        return GiveUp(
            GaveUpError(
                f"fault_tolerance.min_replica_size must be reached within start_timeout_seconds "
                f"({config.start_timeout_seconds:g} s): it is {config.min_replica_size}, and "
                f"{num_present} group(s) came; start the others sooner",
            ),
        )
    return StartTraining(config.group_size - num_present)


def _has_started(made: Round) -> bool:
    """Return True if a ready group of the round has made steps already."""
    for row in made.rows:
        if row.training and row.standing is Standing.READY:
            return True
    return False


def _decide_training(position: Position, made: Round, config: FaultTolerance) -> Decision:
    """Decide for a holder that trains: commit the round, unless something is in the way.

    `is_update` tests the same conditions, for groups that do not train.
    """
    verdict, own_rank = made.verdict, made.quorum.rank
    if verdict.strays:
        # The sum has gradients of strays. In the next round the strays are joiners, and give none.
        return Repeat()
    if verdict.duplicates:
        # The sum has gradients of the same data twice.
        if own_rank in verdict.duplicates:
            return Discard()
        return Repeat()
    if not verdict.may_update:
        return TrainOn()
    if verdict.opening:
        # The opening groups have no gradients in this round yet, and will have them in the next.
        return Repeat()
    wait = _find_wait(made, config)
    if wait is not None:
        return wait
    if verdict.holding_back:
        # The reason to wait is over. In the next round these groups give their gradients.
        return Repeat()
    uncovered = find_uncovered(made, config)
    if uncovered:
        return TakeOver(_find_share(config.replica_id, uncovered, made))
    if verdict.valid_tokens == 0:
        if not verdict.excluded:
            return Wait("no group has a gradient")
        # No group has finite gradients.
        if own_rank in verdict.excluded:
            return Force()
        return Repeat()
    num_exclusions = position.exclusions + 1  # with this round
    is_excluded = own_rank in verdict.excluded
    if is_excluded and num_exclusions >= MAX_EXCLUSIONS:
        return GiveUp(_nonfinite(num_exclusions, verdict.step + 1, strategy_of(config).unit))
    return Commit()


def _nonfinite(number: int, last: int, unit: str) -> NonFiniteError:
    # After the restart the group has a peer's state. If its gradients are still not finite, its
    # data is at fault.
    return NonFiniteError(
        f"the gradients of this group were not finite in {number} {unit}s in a row, those of "
        f"others were; last at {unit} {last}: look at the memory and the GPUs of this host, and "
        "at the batches that its events name",
    )


def _find_wait(made: Round, config: FaultTolerance) -> Wait | None:
    """Return why the step must wait, whatever the gradients are; None if it need not wait."""
    verdict = made.verdict
    if verdict.awaited_joiners:
        slots = made.slots(verdict.awaited_joiners)
        return Wait(f"groups {slots} fetch the state", slots, Why.ASKED)
    # A ready group may still wait for the job's first step. It does not count.
    num_training = len(_find_training(made))
    if num_training < config.min_replica_size:
        all_slots = set(range(config.group_size))
        missing = sorted(all_slots.difference(made.slots(verdict.ready)))
        reason = f"{num_training} group(s) hold the state, {config.min_replica_size} needed"
        return Wait(reason, missing)
    return None


def _find_training(made: Round) -> list[int]:
    """Return the ready ranks that have begun to train."""
    return [rank for rank in made.verdict.ready if made.rows[rank].training]


def is_update(made: Round, config: FaultTolerance) -> bool:
    """Return True if the round is an update: all holders apply it, and all joiners queue it."""
    verdict = made.verdict
    blocked = any(
        (
            verdict.tie,
            verdict.strays,
            verdict.duplicates,
            verdict.holding_back,
            verdict.opening,
        ),
    )
    if blocked or not verdict.may_update:
        return False
    if verdict.valid_tokens == 0:
        return False
    if _find_wait(made, config) is not None:
        return False
    return not find_uncovered(made, config)


def is_under_way(made: Round, config: FaultTolerance) -> bool:
    """Return True if an update may be near: this round is one, or the next round may be one."""
    if not _find_training(made) or not made.verdict.may_update:
        return False
    return _find_wait(made, config) is None


def find_first_donors(made: Round) -> set[int]:
    """Return the slots of the donors that the joiners of a round will choose first.

    A joiner begins with the first slot after its own (`Healing.choose_donors`).
    """
    offering = made.slots(made.verdict.offering)
    if not offering:
        return set()
    donors = set()
    for row in made.rows:
        if row.asks_for_state:
            donors.add(rotate(offering, row.slot)[0])
    return donors


def releases_held_back(made: Round, config: FaultTolerance) -> bool:
    """Return True if the groups that hold their gradients back give them in the next round."""
    verdict = made.verdict
    if not verdict.holding_back or verdict.strays:
        return False
    return _find_wait(made, config) is None


def find_uncovered(made: Round, config: FaultTolerance) -> list[int]:
    """Return the slots whose data is missing in the round's gradients although `batch_policy`
    requires it.
    """
    # Do not let another group train the data of an excluded group. If the data itself makes NaNs,
    # one group after the other would be excluded.
    if config.batch_policy == "shrink" or made.verdict.excluded:
        return []
    trained = {entry.slot for entry in made.entries}
    return sorted(set(range(config.group_size)) - trained)


def _find_share(own_slot: int, uncovered: Collection[int], made: Round) -> list[int]:
    """Return which of the `uncovered` slots this group takes over.

    1. A ready group takes its own slot. It may be uncovered if the group has just come back:
       another group has read the slot for it, and died.
    2. The slots without a ready group are dealt out among all ready groups.
    """
    ready = made.slots(made.verdict.ready)
    shares = share_out(set(uncovered) - set(ready), ready)
    taken = list(shares[own_slot])
    if own_slot in uncovered:
        taken.insert(0, own_slot)
    return taken


def _decide_healing(position: Position, made: Round, config: FaultTolerance) -> Decision:
    """Decide for a group that heals: go on, or end the heal because no holder is left."""
    if made.verdict.holders:
        return Repeat()
    if position.alone_seconds < ALONE_SECONDS:
        # The holders may only be late. Or a transfer from one of them may still end well.
        return Wait("no holder of the state is in the quorum")
    seen = max(row.seen_step for row in made.rows)
    latest_left = max(row.step for row in made.rows)
    if latest_left == 0 and seen > 0:
        return GiveUp(_lost(seen))
    # A group that has fetched a state shows the step that its replay leads to. Its own step may be
    # lower, and then it must replay its queue first.
    if position.corrupt or position.step != latest_left:
        return Wait("another group's state is later")
    return RollBack()


def _lost(seen: int) -> JobLostError:
    return JobLostError(
        f"every group with the state after step {seen} is gone; restart the job from a checkpoint",
    )


def _decide_finished(position: Position, made: Round, config: FaultTolerance) -> Decision:
    if len(made.verdict.holders) < len(made.rows):
        return Wait("a group needs the final state")
    seen_or_left = {*made.quorum.slots, *position.left}
    if len(seen_or_left) < config.group_size:
        return Wait("groups are missing")
    return Done()


# Leaving


@dataclass(frozen=True)
class LastToLeave:
    """The last groups with the job's state, which leave now. One of them must save the state.

    Attributes:
        slots: slots of these groups, in the order in which they are to save. If a group dies before
            it has saved, the next one does. This group is among them.
        agreed: each of these groups knows that the others leave. If False, some of them may train
            on.
    """

    slots: tuple[int, ...]
    agreed: bool


def may_leave(made: Round) -> bool:
    """Return True if this group may leave after this round, if it has a leave request.

    A holder may leave only if its own row, or the rows of all other holders, showed `leaving`.
    Without this rule no group might save the state: suppose that two groups get a leave request
    right after they have sent their rows, and both leave. Each would believe that the other one
    trains on.
    """
    own = made.quorum.rank
    if own not in made.verdict.holders or made.rows[own].leaving:
        return True
    for rank in made.verdict.holders:
        if rank != own and not made.rows[rank].leaving:
            return False
    return True


def find_last_to_leave(position: Position, left: Collection[int], own: int) -> LastToLeave | None:
    """Return the last groups with the job's state, if this group is one of them.

    Args:
        position: this group's position. The group leaves.
        left: slots of the groups whose rows showed `leaving`. The ranks of this group may have read
            different rows in their last round; this is the union.
        own: slot of this group.

    Returns:
        None if this group need not save.
    """
    # The keepers are the groups that had the job's state after the last round, and had started.
    keepers = set(position.keepers)
    if own not in keepers:
        return None
    if position.corrupt or not position.standing.has_state:
        return None
    staying = keepers.difference(left, {own})
    if own in left:
        # All keepers have read that this group leaves.
        if staying:
            return None  # they keep the state
        return LastToLeave(tuple(sorted(keepers)), agreed=True)
    if not staying:
        # All others leave, and believe that this group trains on. So this group saves.
        return LastToLeave((own,), agreed=True)
    # This group leaves without a round that shows its request: the others hang, or are in a long
    # round. Nobody knows which of them stay. If some do, a save is superfluous, and costs only time
    # of the groups that leave.
    return LastToLeave(tuple(sorted(staying | {own})), agreed=False)
