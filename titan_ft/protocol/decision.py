# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group does after a round, as pure functions.

    rows of a round          -> judge  -> Verdict (who holds the state, whose gradients count)
    position, round, config  -> decide -> one Decision

Every rank of every group reads the same rows, and every rank of a group has the same position. So
each rank comes to the same decision by itself. Nothing here reads a clock, a folder or the network.
The ranks of a group agree beforehand on facts that only one of them can know (see
`GroupCollectives.clock`).

See docs/exchange.md.
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
"""After this time without a holder of the latest state, older states count."""
MAX_EXCHANGE_RETRIES = 10
"""After this many broken exchanges of one step in a row the group with the highest slot restarts: it
may be at fault itself. The others restart later (see `_find_retry_limit`).

Exchanges that broke over a link that is known to be dead do not count. A failure that mends itself
is gone after two or three."""
MAX_EXCLUSIONS = 3
"""A group restarts after this many steps in a row in which only its gradients were not finite."""


class Decision:
    """What a group does after a round: one of the following."""


# A group that trains:


@dataclass(frozen=True)
class StartTraining(Decision):
    """Make the job's first step; `missing` groups did not come."""

    missing: int


@dataclass(frozen=True)
class Commit(Decision):
    """Apply the round's update."""


@dataclass(frozen=True)
class Repeat(Decision):
    """Make one more round at once, with the same gradients.

    After a broken round, the caller may first add the batches of groups that are gone: the next
    quorum shows them (`ReplicaDimension.commit`).
    """


@dataclass(frozen=True)
class TrainOn(Decision):
    """Make more local steps of the round. No group has made all of its steps yet; the other groups
    met only for the sake of groups that heal.
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

    The groups of these slots are gone with their share of the step.
    """

    slots: list[int]


@dataclass(frozen=True)
class Discard(Decision):
    """Drop this group's gradients and make one more round: another group read the same data."""


@dataclass(frozen=True)
class Wait(Decision):
    """Make one more round after a pause.

    The group keeps its gradients, and sends them only when the step can be committed.

    Attributes:
        slots, why: the groups that the step waits for, and why; empty if no group is the cause.
    """

    reason: str
    slots: Sequence[int] = ()
    why: Why = Why.TOO_FEW


# A group that heals, that has finished, or that ends:


@dataclass(frozen=True)
class StartHeal(Decision):
    """Fetch the job's state from a donor. This group lacks it, and its gradients are void."""


@dataclass(frozen=True)
class RollBack(Decision):
    """Go on from this group's own state: it is the latest that is left."""


@dataclass(frozen=True)
class Done(Decision):
    """All groups hold the final state."""


@dataclass(frozen=True)
class Leave(Decision):
    """End in order: the group got a leave request, and its ranks have agreed."""


@dataclass(frozen=True)
class GiveUp(Decision):
    """End with `error`."""

    error: Exception


def decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    """Decide what a group does after a round.

    Args:
        position: has taken the round in already (`Position.observe` or `note_broken`).
    """
    decision = _decide(position, outcome, config)
    # An update is applied, and an error is raised, even by a group that leaves.
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
    if limit and position.broken_rounds > limit:
        unit = strategy_of(config).unit
        return GiveUp(
            GaveUpError(
                f"the exchange of {unit} {position.step + 1} broke {position.broken_rounds} times "
                f"in a row, more often than this group tries again ({limit}); see why in this log",
            ),
        )
    return LeaveOut() if broken.gave_nonfinite else Repeat()


def _find_retry_limit(position: Position, config: FaultTolerance) -> int:
    """Return after how many broken rounds in a row this group gives up; 0 = never.

    The groups give up one after the other, the highest slot first, and the lowest slot never. Any
    of them may be at fault, so each gets its turn to restart. If all gave up at once, no group
    would hold the job's state any more.
    """
    num_above = sum(slot > config.replica_id for slot in position.peers)
    is_lowest = all(slot >= config.replica_id for slot in position.peers)
    return 0 if is_lowest else MAX_EXCHANGE_RETRIES * (1 + num_above)


def _diverged(made: Round, unit: str) -> DivergedError:
    digests = {row.slot: f"{row.digest:012x}" for row in made.rows}
    return DivergedError(
        f"the groups' states differ after {unit} {made.verdict.step} and no majority says which is "
        f"right (digests {digests}); restart the job from a checkpoint",
    )


def _decide_start(made: Round, config: FaultTolerance) -> Decision:
    """Wait for the job's first step until all groups are present, or until the time is over."""
    if is_update(made, config):
        return StartHeal()  # the others have started without this group: this round is their update
    present = len({row.slot for row in made.rows})
    # Each row has its group's own wait, equal on all of its ranks. So all groups end the wait in
    # the same round.
    waited_seconds = max(row.waited_seconds for row in made.rows)
    if present < config.group_size and waited_seconds < config.start_timeout_seconds:
        return Wait(f"{present} of {config.group_size} groups are here")
    # Beside a group that trains, this group waits without limit, as that group does. Two groups
    # that came by turns used to give up because each found the other absent, and the job never got
    # further.
    has_started = any(row.training and row.standing is Standing.READY for row in made.rows)
    if present < config.min_replica_size and not has_started:
        return GiveUp(
            GaveUpError(
                f"fault_tolerance.min_replica_size must be reached within start_timeout_seconds "
                f"({config.start_timeout_seconds:g} s): it is {config.min_replica_size}, and "
                f"{present} group(s) came; start the others sooner",
            ),
        )
    return StartTraining(config.group_size - present)


def _decide_training(position: Position, made: Round, config: FaultTolerance) -> Decision:
    verdict, own_rank = made.verdict, made.quorum.rank
    if verdict.strays:
        # The strays come back as joiners, and the next sum is without their gradients.
        return Repeat()
    if verdict.duplicates:
        return Discard() if own_rank in verdict.duplicates else Repeat()
    if not verdict.may_update:
        return TrainOn()
    if verdict.opening:
        # These groups could not apply an update in this round. In the next round they can.
        return Repeat()
    wait = _find_wait(made, config)
    if wait is not None:
        return wait
    if verdict.holding_back:
        return Repeat()  # the step can be committed now: these groups send their gradients
    lacking = find_uncovered(made, config)
    if lacking:
        return TakeOver(_find_share(config.replica_id, lacking, made))
    if verdict.valid_tokens == 0:
        if not verdict.excluded:
            return Wait("no group has a gradient")
        return Force() if own_rank in verdict.excluded else Repeat()
    exclusions = position.exclusions + 1
    is_excluded = config.replica_id in made.slots(verdict.excluded)
    if is_excluded and exclusions >= MAX_EXCLUSIONS:
        return GiveUp(_nonfinite(exclusions, verdict.step + 1, strategy_of(config).unit))
    return Commit()


def _nonfinite(number: int, last: int, unit: str) -> NonFiniteError:
    # The group restarts, and heals from a peer. If its gradients are not finite then either, the
    # data is wrong.
    return NonFiniteError(
        f"the gradients of this group were not finite in {number} {unit}s in a row, those of "
        f"others were; last at {unit} {last}: look at the memory and the GPUs of this host, and "
        "at the batches that its events name",
    )


def _find_wait(made: Round, config: FaultTolerance) -> Wait | None:
    """Return why the step cannot be committed yet, with any gradients; None if it can."""
    verdict = made.verdict
    if verdict.awaited_joiners:
        slots = made.slots(verdict.awaited_joiners)
        return Wait(f"groups {slots} fetch the state", slots, Why.ASKED)
    # A group that has not started makes no step.
    present = sum(made.rows[rank].training for rank in verdict.ready)
    if present < config.min_replica_size:
        missing = sorted({*range(config.group_size)}.difference(made.slots(verdict.ready)))
        reason = f"{present} group(s) hold the state, {config.min_replica_size} needed"
        return Wait(reason, missing)
    return None


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
    if blocked or not verdict.may_update or verdict.valid_tokens == 0:
        return False
    return _find_wait(made, config) is None and not find_uncovered(made, config)


def is_under_way(made: Round, config: FaultTolerance) -> bool:
    """Return True if this round or the next one is an update of the training members."""
    trains = any(made.rows[rank].training for rank in made.verdict.ready)
    return trains and made.verdict.may_update and _find_wait(made, config) is None


def find_first_donors(made: Round) -> set[int]:
    """Return the slots of the holders that the members which ask for the state will ask first."""
    offering = made.slots(made.verdict.offering)
    if not offering:
        return set()
    return {rotate(offering, row.slot)[0] for row in made.rows if row.asks_for_state}


def releases_held_back(made: Round, config: FaultTolerance) -> bool:
    """Return True if the groups that hold their gradients back send them in the next round."""
    verdict = made.verdict
    if not verdict.holding_back or verdict.strays:
        return False
    return _find_wait(made, config) is None


def find_uncovered(made: Round, config: FaultTolerance) -> list[int]:
    """Return the slots whose data `batch_policy` demands, and which the round's gradients lack."""
    # A group that took over a batch which makes NaNs would be excluded as well, one after the
    # other.
    if config.batch_policy == "shrink" or made.verdict.excluded:
        return []
    return sorted(set(range(config.group_size)) - {entry.slot for entry in made.entries})


def _find_share(slot: int, lacking: Collection[int], made: Round) -> list[int]:
    """Return which of the `lacking` slots this group takes over.

    A ready group always takes its own slot. So does a group that has just come back, and has read no
    data for this step: if the group that read the slot for it died, nobody else might take the slot.
    """
    ready = made.slots(made.verdict.ready)
    shares = share_out(set(lacking) - set(ready), ready)
    own = [slot] if slot in lacking else []
    return own + shares[slot]


def _decide_healing(position: Position, made: Round, config: FaultTolerance) -> Decision:
    if made.verdict.holders:
        return Repeat()
    if position.alone_seconds < ALONE_SECONDS:
        # The holders may only be late, and a transfer from one of them may still end.
        return Wait("no holder of the state is in the quorum")
    seen = max(row.seen_step for row in made.rows)
    latest_left = max(row.step for row in made.rows)
    if latest_left == 0 and seen > 0:
        return GiveUp(_lost(seen))
    # A group that has fetched a state replays its queue first. Its row shows the step after that.
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
    num_missing = config.group_size - len({*made.quorum.slots, *position.left})
    return Wait("groups are missing") if num_missing > 0 else Done()


# Leaving


@dataclass(frozen=True)
class LastToLeave:
    """The groups with which the job's state leaves. The first one that lives saves it.

    Attributes:
        slots: of these groups, in the order in which they are to save. This group is among them.
        agreed: these groups know of each other. If not, some of them may train on.
    """

    slots: tuple[int, ...]
    agreed: bool


def may_leave(made: Round) -> bool:
    """Return True if this group may leave after this round, should it have a leave request.

    One of the last groups to leave saves the state, so these groups must know of each other.
    Suppose that two groups get a leave request right after they have sent their rows, and both
    leave. Each believes that the other trains on, and no group saves. So a holder of the state
    leaves only if its own row, or the rows of all other holders, showed `leaving`.
    """
    own = made.quorum.rank
    if own not in made.verdict.holders or made.rows[own].leaving:
        return True
    return all(made.rows[rank].leaving for rank in made.verdict.holders if rank != own)


def find_last_to_leave(position: Position, left: Collection[int], own: int) -> LastToLeave | None:
    """Return the groups that leave with this one and save the state first.

    Args:
        position: of this group, which leaves.
        left: slots of the groups whose rows showed `leaving`, in any rank's last round.
        own: slot of this group.

    Returns:
        None if this group need not save.
    """
    keepers = set(position.keepers)
    if own not in keepers or position.corrupt or not position.standing.has_state:
        return None
    staying = keepers.difference(left, {own})
    if own in left:
        # All keepers have read that this group leaves. One that stays keeps the state.
        return None if staying else LastToLeave(tuple(sorted(keepers)), agreed=True)
    if not staying:
        # All others leave, and believe that this group trains on. So this group saves.
        return LastToLeave((own,), agreed=True)
    # The others hang, or are in a long round, and nobody knows which of them stay. The first group
    # that lives saves. If others train on, the save costs only time of the groups that leave.
    return LastToLeave(tuple(sorted(staying | {own})), agreed=False)
