# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The policy: how a replica group decides what to do after a round. All functions are pure.

A *round* is one exchange between the groups of a quorum, and one vote of each group's ranks on
whether the exchange worked. In the exchange, every member of the quorum sends one *row*: the facts
about its state and its gradients. `Rounds` (engine/round.py) makes the round:

1. `judge` (verdict.py) turns the rows into a `Verdict`: which members hold the job's state, and
   whose gradients count. *The job's state* is the state to which the next update is applied.
2. A `Round` contains the quorum, the rows and the verdict. If the exchange failed on a rank of the
   group, the outcome is a `Broken` instead, without rows.

Then `decide` makes a `Decision` from the outcome, the group's `Position` and the configuration. The
caller carries the decision out: `ReplicaDimension` in a group that has the job's state, `Heal` in a
group that lacks it.

A `Verdict` has a tuple of members for each of these terms:

    holder         has the job's state
    stray          claims to have the job's state, but its state differs from the majority's
    joiner         lacks the job's state, and fetches it from a holder
    ready          a holder that trains, or waits for the job's first step
    duplicate      a holder that trained the same data as another holder
    excluded       ready; gives no gradients, because its gradients are not finite
    holding back   ready; has gradients, and keeps them until the step can be committed
    opening        ready; has just applied an update, and is here only for groups that missed it
    unfinished     ready; has more local steps to make (semi-synchronous methods)

With a semi-synchronous method, such as DiLoCo, a group makes several *local steps* with its own
optimizer before each exchange. With the synchronous method, every step ends with an exchange.

A member is identified by its *rank* in the quorum in these tuples, and by its *slot* (its number in
the job) in texts and decisions.

Every rank calls these functions by itself, on its training thread. All ranks of a group decide the
same, because they have the same position and read the same rows. So nothing here reads a clock, a
folder or the network. The durations in a position are measured by a clock that the ranks share.

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

SIGN_TIMEOUT_SECONDS = 5.0
"""Wait this long for a sign of a group that holds the job's state. After that, the job continues
from the latest state that a member of the quorum has, even if updates are lost."""
MAX_EXCHANGE_RETRIES = 10
"""Broken rounds of one step in a row that the group with the highest slot accepts. After one more,
it restarts, because the cause may lie in this group. The other groups accept more
(`_find_retry_limit`). A passing failure breaks two or three rounds."""
MAX_EXCLUSIONS = 3
"""A group restarts after this many steps in a row in which its own gradients were not finite, while
other groups had finite ones."""


class Decision:
    """The next action of a group. Each subclass below is one possible action."""


# Decisions of a group that has the job's state


@dataclass(frozen=True)
class StartTraining(Decision):
    """Make the job's first step, without the `num_missing` groups that have not come in time."""

    num_missing: int


@dataclass(frozen=True)
class Commit(Decision):
    """Apply the update that this round has agreed on."""


@dataclass(frozen=True)
class Repeat(Decision):
    """Make one more round at once, with the gradients that this group has already.

    After a broken round, the next quorum may show that groups are gone. Then the caller first
    trains the batches of these groups, and adds the gradients (`ReplicaDimension.commit`).
    """


@dataclass(frozen=True)
class TrainOn(Decision):
    """Make the remaining local steps before the next exchange. Semi-synchronous methods only.

    No group has made all of its local steps. This round took place early because of a joiner.
    """


@dataclass(frozen=True)
class ExcludeGradients(Decision):
    """Make one more round without this group's gradients, because they are not finite."""


@dataclass(frozen=True)
class ForceGradients(Decision):
    """Make one more round with this group's gradients, although they are not finite.

    No group has finite ones, so the model diverges, as it would in stock torchtitan.
    """


@dataclass(frozen=True)
class TakeOverSlots(Decision):
    """Train the batches of `slots` as well, then make one more round.

    The groups that should have trained these batches are gone.
    """

    slots: list[int]


@dataclass(frozen=True)
class DiscardGradients(Decision):
    """Drop this group's gradients, because another group trained the same data. Then make one more
    round."""


@dataclass(frozen=True)
class Wait(Decision):
    """Make one more round after a pause, because this one cannot be committed.

    The group holds its gradients back until then.

    Attributes:
        message: the reason for the wait, for people.
        slots: the groups that the step waits for; empty if no group is the cause.
        why: the reason why the step waits for the groups in `slots`.
    """

    message: str
    slots: Sequence[int] = ()
    why: Why = Why.TOO_FEW


# Decisions of a group that heals, that has finished, or that leaves


@dataclass(frozen=True)
class StartHeal(Decision):
    """Fetch the job's state from a holder. This group lacks that state, so drop its gradients."""


@dataclass(frozen=True)
class RollBack(Decision):
    """End the heal with this group's own state, which is the latest state that a group has."""


@dataclass(frozen=True)
class Done(Decision):
    """End, because all groups hold the final state."""


@dataclass(frozen=True)
class Leave(Decision):
    """End in order: the ranks have agreed to leave after a leave request (SIGTERM)."""


@dataclass(frozen=True)
class GiveUp(Decision):
    """End this group's processes with `error`. The launcher may restart the group."""

    error: Exception


def decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    """Decide what a group does after a round.

    Args:
        position: the group's position after the round (`Position.observe` or `count_broken_round`).
    """
    decision = _decide(position, outcome, config)
    # A group that leaves still applies an update: the other groups apply it, too, and the group may
    # be the one that saves the state. An error must still be reported.
    if position.leaving and not isinstance(decision, Commit | GiveUp):
        return Leave()
    return decision


def _decide(position: Position, outcome: Round | Broken, config: FaultTolerance) -> Decision:
    if isinstance(outcome, Broken):
        return _decide_after_break(position, outcome, config)
    if outcome.verdict.tie:
        # Nobody knows the right bytes, so a joiner cannot heal from anybody either.
        return GiveUp(_diverged(outcome, strategy_of(config).unit))
    if not position.standing.has_state:
        return _decide_healing(position, outcome, config)
    if outcome.quorum.rank not in outcome.verdict.holders:
        # This group claimed to have the job's state, but is a stray.
        return StartHeal()
    if position.standing is Standing.FINISHED:
        return _decide_finished(position, outcome, config)
    has_job_started = position.training
    if has_job_started:
        return _decide_training(position, outcome, config)
    return _decide_start(outcome, config)


def _decide_after_break(position: Position, broken: Broken, config: FaultTolerance) -> Decision:
    has_job_started = position.training
    if not has_job_started or position.standing is not Standing.READY:
        # Only groups that train have a limit. A restart would cost a healing group its fetched
        # state.
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
        # A rank of this group has spoiled the sum.
        return ExcludeGradients()
    return Repeat()


def _find_retry_limit(position: Position, config: FaultTolerance) -> int | None:
    """Return how many broken rounds in a row this group accepts; None = any number.

    The rounds do not show which group causes the failure. So the groups restart one after the
    other, the group with the highest slot first. The group with the lowest slot never restarts. If
    all groups restarted at once, no group would hold the job's state any more.
    """
    own_slot = config.replica_id
    num_below = 0
    num_above = 0
    for slot in position.peers:
        if slot < own_slot:
            num_below += 1
        elif slot > own_slot:
            num_above += 1
    has_lowest_slot = num_below == 0
    if has_lowest_slot:
        return None
    return MAX_EXCHANGE_RETRIES * (1 + num_above)


def _diverged(round_: Round, unit: str) -> DivergedError:
    digests = {row.slot: f"{row.digest:012x}" for row in round_.rows}
    return DivergedError(
        f"the groups' states differ after {unit} {round_.verdict.step} and no majority says which "
        f"is right (digests {digests}); restart the job from a checkpoint",
    )


def _decide_start(round_: Round, config: FaultTolerance) -> Decision:
    """Decide for a group that waits for the job's first step.

    The group waits until all groups are present, or until `start_timeout_seconds` are over.
    """
    if is_update(round_, config):
        # The others have started without this group, and apply this round's update. This group does
        # not take part in the update, so it fetches the state after it.
        return StartHeal()
    num_present = len({row.slot for row in round_.rows})
    # Use the longest wait in the rows, not this group's own: all groups read the same rows, so all
    # of them end the wait in the same round.
    waited_seconds = max(row.waited_seconds for row in round_.rows)
    if num_present < config.group_size and waited_seconds < config.start_timeout_seconds:
        return Wait(f"{num_present} of {config.group_size} groups are here")
    # Do not give up beside a group that has made steps already, because that group waits for
    # `min_replica_size` without a limit. Before this rule, two groups restarted in turn: each found
    # the other one absent and gave up, and the job made no step.
    if num_present < config.min_replica_size and not _has_job_started(round_):
        return GiveUp(
            GaveUpError(
                f"fault_tolerance.min_replica_size must be reached within start_timeout_seconds "
                f"({config.start_timeout_seconds:g} s): it is {config.min_replica_size}, and "
                f"{num_present} group(s) came; start the others sooner",
            ),
        )
    return StartTraining(config.group_size - num_present)


def _has_job_started(round_: Round) -> bool:
    """Return True if a ready group of the round has begun the job's first step."""
    for row in round_.rows:
        if row.training and row.standing is Standing.READY:
            return True
    return False


def _decide_training(position: Position, round_: Round, config: FaultTolerance) -> Decision:
    """Decide for a holder that trains.

    Each test below finds one reason not to commit. Tests for a wrong sum come first, because a
    repeated round may settle the others. `is_update` tests the same conditions for joiners: both
    must agree, or a joiner would queue an update that the holders do not commit.
    """
    verdict, own_rank = round_.verdict, round_.quorum.rank
    if verdict.strays:
        # The sum contains gradients that strays computed from another state. In the next round the
        # strays are joiners, and give no gradients.
        return Repeat()
    if verdict.duplicates:
        # The sum contains gradients of the same data twice.
        if own_rank in verdict.duplicates:
            return DiscardGradients()
        return Repeat()
    if not verdict.may_update:
        # All ready groups are opening or unfinished.
        return TrainOn()
    if verdict.opening:
        # Some ready groups gave gradients, others came only for an opening round. In the next round
        # all of them give gradients.
        return Repeat()
    wait = _find_wait(round_, config)
    if wait is not None:
        return wait
    if verdict.holding_back:
        # The step needs to wait no longer, so these groups give their gradients in the next round.
        return Repeat()
    uncovered = find_uncovered(round_, config)
    if uncovered:
        return TakeOverSlots(_find_share(config.replica_id, uncovered, round_))
    has_gradients = verdict.valid_tokens > 0
    if not has_gradients:
        if not verdict.excluded:
            return Wait("no group has a gradient")
        # Every group that has gradients has non-finite ones.
        if own_rank in verdict.excluded:
            return ForceGradients()
        return Repeat()
    if own_rank in verdict.excluded:
        num_exclusions = position.exclusions + 1  # with this step, which is not counted yet
        if num_exclusions >= MAX_EXCLUSIONS:
            # Only a restart gives this group a peer's state. If its gradients are still not finite
            # after that, its data is the cause.
            return GiveUp(_nonfinite(num_exclusions, verdict.step + 1, strategy_of(config).unit))
    return Commit()


def _nonfinite(num_exclusions: int, last_step: int, unit: str) -> NonFiniteError:
    return NonFiniteError(
        f"the gradients of this group were not finite in {num_exclusions} {unit}s in a row, those "
        f"of others were; last at {unit} {last_step}: look at the memory and the GPUs of this "
        "host, and at the batches that its events name",
    )


def _find_wait(round_: Round, config: FaultTolerance) -> Wait | None:
    """Return a `Wait` if a joiner or too few groups delay the step; None = the step may go on."""
    verdict = round_.verdict
    if verdict.awaited_joiners:
        slots = round_.slots(verdict.awaited_joiners)
        return Wait(f"groups {slots} fetch the state", slots, Why.ASKED)
    # Do not count `verdict.ready`: a ready group may still wait for the job's first step.
    num_training = len(_find_training(round_))
    if num_training < config.min_replica_size:
        all_slots = set(range(config.group_size))
        missing = sorted(all_slots.difference(round_.slots(verdict.ready)))
        message = f"{num_training} group(s) hold the state, {config.min_replica_size} needed"
        return Wait(message, missing)
    return None


def _find_training(round_: Round) -> list[int]:
    """Return the ready ranks that have begun the job's first step."""
    return [rank for rank in round_.verdict.ready if round_.rows[rank].training]


def is_update(round_: Round, config: FaultTolerance) -> bool:
    """Return True if the round is an update: all holders apply it, and all joiners queue it."""
    verdict = round_.verdict
    if verdict.tie or verdict.strays or verdict.duplicates:
        return False
    if verdict.holding_back or verdict.opening or not verdict.may_update:
        return False
    has_gradients = verdict.valid_tokens > 0
    if not has_gradients:
        return False
    if _find_wait(round_, config) is not None:
        return False
    return not find_uncovered(round_, config)


def is_update_near(round_: Round, config: FaultTolerance) -> bool:
    """Return True if this round may be an update, or may become one when it is repeated.

    Unlike `is_update`, this is True also while strays, duplicates or missing gradients require a
    repetition.
    """
    if not _find_training(round_) or not round_.verdict.may_update:
        return False
    return _find_wait(round_, config) is None


def find_first_donors(round_: Round) -> set[int]:
    """Return the slots of the holders that the joiners of this round will ask for the state first.

    A joiner begins with the next slot after its own (`Healing.choose_donors`).
    """
    offering = round_.slots(round_.verdict.offering)
    if not offering:
        return set()
    donors = set()
    for row in round_.rows:
        if row.asks_for_state:
            in_turn = rotate(offering, row.slot)
            donors.add(in_turn[0])
    return donors


def ends_holding_back(round_: Round, config: FaultTolerance) -> bool:
    """Return True if the groups that hold their gradients back will give them in the next round."""
    verdict = round_.verdict
    if not verdict.holding_back or verdict.strays:
        return False
    return _find_wait(round_, config) is None


def find_uncovered(round_: Round, config: FaultTolerance) -> list[int]:
    """Return the slots whose data other groups must still train for this step.

    With `batch_policy` "shrink" there are none: the step has a smaller batch without these slots.
    """
    if config.batch_policy == "shrink":
        return []
    if round_.verdict.excluded:
        # Do not let another group train the data of an excluded group. If the data itself makes
        # NaNs, one group after the other would be excluded.
        return []
    trained = {entry.slot for entry in round_.entries}
    return sorted(set(range(config.group_size)) - trained)


def _find_share(own_slot: int, uncovered: Collection[int], round_: Round) -> list[int]:
    """Return which of the `uncovered` slots this group takes over.

    1. A ready group takes its own slot, if that slot is uncovered. This happens when the group has
       just come back, and the group that read the slot in its absence has died.
    2. The slots without a ready group are dealt out among all ready groups.
    """
    ready = round_.slots(round_.verdict.ready)
    without_ready_group = set(uncovered) - set(ready)
    shares = share_out(without_ready_group, ready)
    taken = list(shares[own_slot])
    if own_slot in uncovered:
        taken.insert(0, own_slot)
    return taken


def _decide_healing(position: Position, round_: Round, config: FaultTolerance) -> Decision:
    """Decide for a group that heals: go on, or end the heal because no holder is left."""
    if round_.verdict.holders:
        return Repeat()
    if position.no_holder_seconds < SIGN_TIMEOUT_SECONDS:
        # The holders may only be late. A transfer from one of them may also still complete.
        return Wait("no holder of the state is in the quorum")
    seen_step = max(row.seen_step for row in round_.rows)  # of any group, also of one that is gone
    latest_step = max(row.step for row in round_.rows)  # of a group in this round
    if latest_step == 0 and seen_step > 0:
        # Only initial or corrupt states are left. The job must not silently begin again.
        return GiveUp(_lost(seen_step))
    # `position.step` differs from this group's own row after a fetch: the row then has the step
    # that the replay of the queued updates leads to. The group must replay them before it may
    # continue from its state.
    if position.corrupt or position.step != latest_step:
        return Wait("another group's state is later")
    return RollBack()


def _lost(seen_step: int) -> JobLostError:
    return JobLostError(
        f"every group with the state after step {seen_step} is gone; "
        "restart the job from a checkpoint",
    )


def _decide_finished(position: Position, round_: Round, config: FaultTolerance) -> Decision:
    """Decide for a group with the final state. It stays until every group has that state."""
    if len(round_.verdict.holders) < len(round_.rows):
        return Wait("a group needs the final state")
    # A group that has left in order does not come back for the final state.
    accounted_for = {*round_.quorum.slots, *position.left}
    if len(accounted_for) < config.group_size:
        return Wait("groups are missing")
    return Done()


# Leaving


@dataclass(frozen=True)
class LastToLeave:
    """The last groups with the job's state, which leave now. One of them must save a checkpoint.

    Attributes:
        slots: slots of these groups, this group included. The first group saves. If it dies before
            it has saved, the next group saves, and so on.
        agreed: True if each of these groups knows that the others leave as well. If False, some of
            them may in fact train on.
    """

    slots: tuple[int, ...]
    agreed: bool


def may_leave(round_: Round) -> bool:
    """Return True if this group may leave after this round, in case it has a leave request.

    A holder may leave only if its own row, or the rows of all other holders, showed `leaving`.
    This rule prevents that nobody saves the state. Suppose that two groups get a leave request
    right after they have sent their rows. Without the rule both would leave at once, and each would
    believe that the other one trains on.
    """
    own = round_.quorum.rank
    if own not in round_.verdict.holders or round_.rows[own].leaving:
        return True
    for rank in round_.verdict.holders:
        if rank != own and not round_.rows[rank].leaving:
            return False
    return True


def find_last_to_leave(position: Position, left: Collection[int], own: int) -> LastToLeave | None:
    """Return the last groups with the job's state, if this group is one of them.

    Args:
        position: position of this group, which leaves now.
        left: slots of the groups whose rows showed `leaving`. The ranks of this group may have read
            different rows in their last round, so the caller passes the union over the ranks.
        own: slot of this group.

    Returns:
        None if this group need not save.
    """
    # The keepers are the groups that held the job's state in the last round, and had started to
    # train.
    keepers = set(position.keepers)
    if own not in keepers:
        return None
    if position.corrupt or not position.standing.has_state:
        return None
    staying = keepers.difference(left, {own})
    if own in left:
        # All keepers have read that this group leaves.
        if staying:
            return None  # The groups that stay keep the state.
        return LastToLeave(tuple(sorted(keepers)), agreed=True)
    if not staying:
        # All others leave, and believe that this group trains on. So this group saves.
        return LastToLeave((own,), agreed=True)
    # No round has shown this group's leave request, because the others hang or are in a long round.
    # This group cannot know which of them stay. So it saves in any case. If some of them stay, the
    # checkpoint is superfluous, and costs only the time of this group, which leaves anyway.
    return LastToLeave(tuple(sorted(staying | {own})), agreed=False)
