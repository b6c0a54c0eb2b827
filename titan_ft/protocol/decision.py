# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group does next, as pure functions.

    rows of a round -> judge -> Verdict (who holds the job's state, and whose gradient counts; `verdict.py`)
    position, round, config -> decide -> one Decision

Every rank of every group knows the same rows, and every rank of a group the same position, so each comes to the same
decision by itself. Nothing here reads a clock, a folder or the network: what only one rank can know is agreed on in its
group before it gets here (see `GroupCollectives.clock`).

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

ALONE_SECONDS = 5.0  # without a holder of the latest state before older ones count
MAX_EXCHANGE_RETRIES = 10
"""Broken exchanges of one step in a row, all links of which are good, after which a group starts again: it may be at
fault itself. A link that is known to be dead does not count. A loss that mends itself is gone within two or three."""
MAX_EXCLUSIONS = 3  # steps in a row whose gradients only this group could not give, until it is started again


class Decision:
    """What a group does after a round: one of the following."""


# A group that trains:


@dataclass(frozen=True)
class Begin(Decision):
    """Make the job's first step; `missing` groups did not come."""

    missing: int


@dataclass(frozen=True)
class Commit(Decision):
    """Apply the round's update."""


@dataclass(frozen=True)
class Repeat(Decision):
    """Make a round again, at once, with the same gradients."""


@dataclass(frozen=True)
class TrainOn(Decision):
    """Make more steps of the round: nobody has made all of them yet, and the others only met for those that heal."""


@dataclass(frozen=True)
class LeaveOut(Decision):
    """Make it again without this group's gradients, which are not finite."""


@dataclass(frozen=True)
class Force(Decision):
    """Make it again with them: nobody has finite ones, so the model diverges, as it would in stock torchtitan."""


@dataclass(frozen=True)
class TakeOver(Decision):
    """Train the batches of `slots` as well, whose group went with its share of the step, and make the round again."""

    slots: list[int]


@dataclass(frozen=True)
class Discard(Decision):
    """Drop this group's gradients, and make the round again without: another group has read the same data."""


@dataclass(frozen=True)
class Wait(Decision):
    """Make a round again after a pause; the gradients are kept, and not sent until they are wanted.

    Attributes:
        slots, why: the groups that the step waits for, and why; none where no group is at fault.
    """

    reason: str
    slots: Sequence[int] = ()
    why: Why = Why.TOO_FEW


# A group that heals, that has finished, and that ends:


@dataclass(frozen=True)
class Heal(Decision):
    """This group does not hold the job's state: its gradients are void, a donor's state is needed."""


@dataclass(frozen=True)
class RollBack(Decision):
    """Go on from this group's own state: it is the latest that is left."""


@dataclass(frozen=True)
class Done(Decision):
    """All groups hold the final state."""


@dataclass(frozen=True)
class Leave(Decision):
    """End in order: the group was told to leave, and its ranks have agreed."""


@dataclass(frozen=True)
class GiveUp(Decision):
    """End with `error`."""

    error: Exception


def decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    """Say what a group does after a round; `position` is the one that has taken the round in."""
    decision = _decide(position, outcome, config)
    return Leave() if position.leaving and not isinstance(decision, Commit | GiveUp) else decision


def _decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    if isinstance(outcome, Broken):
        return _after_break(position, outcome, config)
    if outcome.verdict.tie:
        return GiveUp(_diverged(outcome, strategy_of(config).unit))
    if not position.standing.has_state:
        return _heal(position, outcome, config)
    if outcome.quorum.rank not in outcome.verdict.holders:
        return Heal()
    if position.standing is Standing.FINISHED:
        return _finish(position, outcome, config)
    return _train(position, outcome, config) if position.training else _start(outcome, config)


def _after_break(position: Position, broken: Broken, config: FaultTolerance) -> Decision:
    if not (position.training and position.standing is Standing.READY):
        return Repeat()
    if (limit := _retry_limit(position, config)) and position.failures > limit:
        return GiveUp(
            GaveUpError(
                f"the exchange of {strategy_of(config).unit} {position.step + 1} broke {position.failures} times in a "
                f"row, more often than this group tries again ({limit}); see why in this log"
            )
        )
    return LeaveOut() if broken.spoiled else Repeat()


def _retry_limit(position: Position, config: FaultTolerance) -> int:
    """Return after how many broken rounds in a row this group gives up; 0 = never.

    The groups give up one after the other, the highest slot first, and the lowest never: the group that is started
    again may be the one that was at fault; if all were at once, nobody would hold the job's state.
    """
    above = sum(slot > config.replica_id for slot in position.peers)
    is_last = all(slot >= config.replica_id for slot in position.peers)
    return 0 if is_last else MAX_EXCHANGE_RETRIES * (1 + above)


def _diverged(made: Round, unit: str) -> DivergedError:
    digests = {row.slot: f"{row.digest:012x}" for row in made.rows}
    return DivergedError(
        f"the groups' states differ after {unit} {made.verdict.step} and no majority says which is right (digests "
        f"{digests}); restart the job from a checkpoint"
    )


def _start(made: Round, config: FaultTolerance) -> Decision:
    """Wait for the job's first step until all groups are there, or the time is over."""
    if is_update(made, config):
        return Heal()  # the others have begun without this group: this very round is their next update
    present = len({row.slot for row in made.rows})
    # The rows tell each group's own wait, the same on all of its ranks, so that everybody ends the wait in this round.
    if present < config.group_size and max(row.waited for row in made.rows) < config.start_timeout_seconds:
        return Wait(f"{present} of {config.group_size} groups are here")
    # Beside groups that have begun there is nothing to give up: they wait, however long, and this one waits with them.
    # Two that came by turns used to be told each other's absence at once, and the job never got further.
    begun = any(row.training and row.standing == Standing.READY for row in made.rows)
    if present < config.min_replica_size and not begun:
        return GiveUp(
            GaveUpError(
                f"fault_tolerance.min_replica_size must be reached within start_timeout_seconds "
                f"({config.start_timeout_seconds:g} s): it is {config.min_replica_size}, and {present} group(s) came; "
                "start the others sooner"
            )
        )
    return Begin(config.group_size - present)


def _train(position: Position, made: Round, config: FaultTolerance) -> Decision:
    verdict = made.verdict
    if verdict.strays:
        return Repeat()  # they come back as joiners; what they sent is not in the next sum
    if verdict.doubled:
        return Discard() if made.quorum.rank in verdict.doubled else Repeat()
    if not verdict.due:
        return TrainOn()
    if verdict.opening:
        return Repeat()  # they could not apply an update in this round, and will be here in the next one
    if wait := _find_wait(made, config):
        return wait
    if verdict.resting:
        return Repeat()  # nobody has a reason to keep gradients back any more
    if lacking := uncovered(made, config):
        return TakeOver(_share_of(config.replica_id, lacking, made))
    if verdict.valid_tokens == 0:
        if not verdict.excluded:
            return Wait("no group has a gradient")
        return Force() if made.quorum.rank in verdict.excluded else Repeat()
    excluded = made.slots(verdict.excluded)
    if config.replica_id in excluded and position.exclusions + 1 >= MAX_EXCLUSIONS:
        return GiveUp(_nonfinite(position.exclusions + 1, verdict.step + 1, strategy_of(config).unit))
    return Commit()


def _nonfinite(number: int, last: int, unit: str) -> NonFiniteError:
    # Its state comes from a peer in the next attempt; if that cannot do better either, the data is what is wrong.
    return NonFiniteError(
        f"the gradients of this group were not finite in {number} {unit}s in a row, those of others were; last at "
        f"{unit} {last}: look at the memory and the GPUs of this host, and at the batches that its events name"
    )


def _find_wait(made: Round, config: FaultTolerance) -> Wait | None:
    """Return why the step cannot be committed yet, whatever the gradients; None if it can."""
    verdict = made.verdict
    if verdict.awaited:
        slots = made.slots(verdict.awaited)
        return Wait(f"groups {slots} fetch the state", slots, Why.ASKED)
    present = sum(made.rows[rank].training for rank in verdict.ready)  # one that has yet to begin makes no step
    if present < config.min_replica_size:
        missing = sorted({*range(config.group_size)}.difference(made.slots(verdict.ready)))
        return Wait(f"{present} group(s) hold the state, {config.min_replica_size} needed", missing)
    return None


def is_update(made: Round, config: FaultTolerance) -> bool:
    """Say whether the round is an update: all that hold the state apply it, all that catch up queue it."""
    verdict = made.verdict
    spoiled_sum = verdict.tie or verdict.strays or verdict.doubled or verdict.resting or verdict.opening
    if not verdict.due or spoiled_sum:
        return False
    return verdict.valid_tokens > 0 and not (_find_wait(made, config) or uncovered(made, config))


def is_under_way(made: Round, config: FaultTolerance) -> bool:
    """True if the members that train make an update now, though not in this round: in the next one."""
    trains = any(made.rows[rank].training for rank in made.verdict.ready)
    return trains and made.verdict.due and _find_wait(made, config) is None


def find_first_donors(made: Round) -> set[int]:
    """Return the slots of the holders that the members which ask for the state will ask to copy it first."""
    offering = made.slots(made.verdict.offering)
    asking = [row.slot for row in made.rows if not row.has_state and row.donor < 0]
    return {rotate(offering, slot)[0] for slot in asking} if offering else set()


def gives_next(made: Round, config: FaultTolerance) -> bool:
    """Say whether those that keep their gradients back send them in the next round."""
    return bool(made.verdict.resting) and not made.verdict.strays and not _find_wait(made, config)


def uncovered(made: Round, config: FaultTolerance) -> list[int]:
    """Return the slots whose data the round's gradients lack though `batch_policy` wants it in."""
    if config.batch_policy == "shrink" or made.verdict.excluded:
        return []  # each group that took over a batch which makes NaNs would be excluded in its turn
    return sorted(set(range(config.group_size)) - {entry.slot for entry in made.entries})


def _share_of(slot: int, lacking: Collection[int], made: Round) -> list[int]:
    """Return which of the `lacking` slots this group takes over.

    Ready groups take their own: one that is back reads nothing in its first step, and if the group that was to read its
    slot dies in that step, nobody else may be left to.
    """
    ready = made.slots(made.verdict.ready)
    others = share_out(set(lacking) - set(ready), ready)
    return ([slot] if slot in lacking else []) + others[slot]


def _heal(position: Position, made: Round, config: FaultTolerance) -> Decision:
    verdict = made.verdict
    if verdict.holders:
        return Repeat()
    if position.alone < ALONE_SECONDS:
        return Wait("no holder of the state is in the quorum")  # they may only be late, and a transfer may still end
    seen, best = max(row.seen for row in made.rows), max(row.step for row in made.rows)
    if best == 0 and seen > 0:
        return GiveUp(
            JobLostError(
                f"every group that held the state after step {seen} is gone; restart the job from a checkpoint"
            )
        )
    # A group that has fetched a state replays its queue first: its row shows the step that this leads to.
    return RollBack() if not position.corrupt and position.step == best else Wait("another group's state is later")


def _finish(position: Position, made: Round, config: FaultTolerance) -> Decision:
    missing = config.group_size - len({*made.quorum.slots, *position.left})
    if len(made.verdict.holders) < len(made.rows):
        return Wait("a group needs the final state")
    return Wait("groups are missing") if missing > 0 else Done()


# Leaving


@dataclass(frozen=True)
class LastToLeave:
    """The groups with which the job's state leaves; the first one that lives saves it.

    Attributes:
        slots: those groups, in the order in which they are to save. This one is among them.
        agreed: whether these groups know of each other. If not, others may train on.
    """

    slots: tuple[int, ...]
    agreed: bool


def may_leave(made: Round) -> bool:
    """Say whether this group, if it was told to leave, may do so after a round.

    The last groups to leave must know of each other, for one of them saves the state. Suppose that two
    groups are told right after they have sent their rows, and both leave. Each takes the other for one
    that trains on, and nobody saves. So a holder of the state leaves only once its row has said that it
    does, or if the rows of all other holders have.
    """
    own, holders = made.quorum.rank, set(made.verdict.holders)
    if own not in holders or made.rows[own].leaving:
        return True
    return all(made.rows[rank].leaving for rank in holders - {own})


def find_last_to_leave(position: Position, left: Collection[int], own: int) -> LastToLeave | None:
    """Return the groups that leave with this one and save the state first; None if this one need not.

    Args:
        position: that of this group, which leaves.
        left: slots of the groups whose row said that they leave, in any rank's last round.
        own: slot of this group.
    """
    keepers = set(position.keepers)
    if own not in keepers or position.corrupt or not position.standing.has_state:
        return None
    staying = keepers.difference(left, {own})
    if own in left:  # all keepers have read it
        return None if staying else LastToLeave(tuple(sorted(keepers)), agreed=True)
    if not staying:  # the others take this group for one that trains on
        return LastToLeave((own,), agreed=True)
    # The others hang, or are in a long round: nobody knows who stays. The first one that lives saves. If
    # others train on, that costs no more than the time of the groups that leave.
    return LastToLeave(tuple(sorted(staying | {own})), agreed=False)
