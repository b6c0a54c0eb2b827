# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judges the rows of one exchange: which groups have the job's state, and whose gradients count.

In an exchange, the groups of a quorum (its *members*) sum their gradients, and every member sends
one `Row` of facts about itself. `Rounds` calls `judge` with the rows of all members, on the
training thread of each rank. All members judge the same rows, so they come to the same verdict. All
functions are pure.

*The job's state* is the state to which the next update is applied. Members may hold different
states after a failure. Three numbers in each row identify the member's state:

1. The *step*: the number of committed updates in the state.
2. The *lineage*: a hash of the exchanges that made the state. Two states with the same step and
   different lineages come from different updates. Both are valid.
3. The *digest*: a hash of the state's bytes, 0 if the member has not computed one. Two states with
   the same lineage must have the same bytes. If their digests differ, one of them is corrupt.

`judge` chooses the job's step, lineage and digest in this order. The *holders* are the members
whose state has all three.

The job's data is cut into one share for each group. A share is called a *slot*, and has the number
of its group. A group may also train slots of absent groups.

See docs/exchange.md, "Verdict".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ft.protocol.healing import NO_DIGEST, NO_DONOR
from titan_ft.protocol.row import Row, Standing


@dataclass(frozen=True)
class Verdict:
    """Which members have the job's state, and whose gradients count.

    Each tuple contains the *ranks* of some members. Here a rank is a member's index in the quorum.

    Attributes:
        step: committed updates in the job's state. The exchange is for the next update.
        holders: members that have the job's state.
        strays: members that claim to have the job's state, but have another one. They must heal.
        corrupt: strays whose state has the job's lineage, but other bytes.
        tie: True if the digests of one lineage differ, and no digest has a majority.
        digest: digest of the job's state; `NO_DIGEST` = no holder has computed it.
        verified: True if all holders have computed the digest.
        duplicates: holders that have trained data which another holder has trained as well. The
            other holder's gradients count, theirs do not.
        ready: holders that train, or wait for the job's first step. The other holders have
            finished.
        contributors: the ready members whose gradients count.
        excluded: the ready members that give no gradients, because theirs are not finite.
        holding_back: the ready members that have gradients, and keep them until the step can be
            committed.
        opening: the ready members that have just applied an update, and make this round only for
            groups that missed the update. Semi-synchronous methods only.
        unfinished: the ready members that have more local steps to make. Semi-synchronous methods
            only.
        offering: holders that may offer their state to joiners.
        awaited_joiners: members that fetch the state, and need the others to hold back the next
            update meanwhile.
        valid_tokens: number of the contributors' tokens that have a label and count in the loss.
        tokens: number of all tokens of the contributors.
        loss: sum of the contributors' losses.
        max_loss: largest loss of a contributor's rank.
    """

    step: int
    holders: tuple[int, ...]
    strays: tuple[int, ...]
    corrupt: tuple[int, ...]
    tie: bool
    digest: int
    verified: bool
    duplicates: tuple[int, ...]
    ready: tuple[int, ...]
    contributors: tuple[int, ...]
    excluded: tuple[int, ...]
    holding_back: tuple[int, ...]
    opening: tuple[int, ...]
    unfinished: tuple[int, ...]
    offering: tuple[int, ...]
    awaited_joiners: tuple[int, ...]
    valid_tokens: int
    tokens: int
    loss: float
    max_loss: float

    @property
    def may_update(self) -> bool:
        """True if a ready member came to this round to make an update.

        Opening and unfinished members came for other reasons.
        """
        without_update = {*self.opening, *self.unfinished}
        return any(rank not in without_update for rank in self.ready)


def judge(rows: Sequence[Row], slots_read: Sequence[Collection[int]] | None = None) -> Verdict:
    """Judge the rows of all members.

    Args:
        rows: one row for each member, in the order of their ranks.
        slots_read: for each member, the slots whose data it has trained for this exchange; None =
            no member has trained any.
    """
    if slots_read is None:
        slots_read = [()] * len(rows)
    claimants = [rank for rank, row in enumerate(rows) if row.has_state]
    step = _find_step(rows, claimants)
    same_step = [rank for rank in claimants if rows[rank].step == step]
    same_lineage = _find_majority_lineage(rows, same_step)
    digest, tie = _find_digest(rows, same_lineage)
    holders: list[int] = []
    corrupt: list[int] = []
    if not tie:  # In a tie nobody knows which bytes are right, so there are no holders.
        # Most rounds compare no bytes. So a member without a digest counts as a holder.
        holders = [rank for rank in same_lineage if rows[rank].digest in (NO_DIGEST, digest)]
        corrupt = _without(same_lineage, holders)
    have_all_computed = all(rows[rank].digest != NO_DIGEST for rank in holders)
    duplicates = _find_duplicates(holders, slots_read)
    ready = [rank for rank in holders if rows[rank].standing is Standing.READY]
    excluded = []
    holding_back = []
    opening = []
    unfinished = []
    for rank in ready:
        row = rows[rank]
        if row.excluded:
            excluded.append(rank)
        if row.holding_back:
            holding_back.append(rank)
        if row.opening:
            opening.append(rank)
        if row.unfinished:
            unfinished.append(rank)
    contributors = []
    for rank in _without(ready, duplicates):
        gives_gradients = rows[rank].valid_tokens > 0
        if gives_gradients:
            contributors.append(rank)
    contributed = [rows[rank] for rank in contributors]
    return Verdict(
        step=step,
        holders=tuple(holders),
        strays=tuple(_without(claimants, holders)),
        corrupt=tuple(corrupt),
        tie=tie,
        digest=digest,
        verified=bool(holders) and have_all_computed,
        duplicates=duplicates,
        ready=tuple(ready),
        contributors=tuple(contributors),
        excluded=tuple(excluded),
        holding_back=tuple(holding_back),
        opening=tuple(opening),
        unfinished=tuple(unfinished),
        offering=_find_offering(rows, holders),
        awaited_joiners=_find_awaited_joiners(rows),
        valid_tokens=sum(row.valid_tokens for row in contributed),
        tokens=sum(row.tokens for row in contributed),
        loss=sum(row.loss for row in contributed),
        max_loss=max((row.max_loss for row in contributed), default=0.0),
    )


def find_sum_spoilers(rows: Sequence[Row]) -> list[int]:
    """Return the slots of members whose non-finite gradients spoil the sum; empty = use the sum.

    `Rounds` calls it before it uses the sum of an exchange.

    If no member has finite gradients, all of them *force* theirs: they give them all the same, and
    the sum counts. If only some members force theirs, they must not spoil the finite gradients of
    the others.
    """
    all_forced = True
    for row in rows:
        has_gradients = row.valid_tokens or row.excluded
        if has_gradients and not row.forced:
            all_forced = False
    if all_forced:
        return []
    return [row.slot for row in rows if row.nonfinite]


def _find_step(rows: Sequence[Row], claimants: Sequence[int]) -> int:
    """Return the number of updates in the job's state: the largest number of a claimant.

    There is one exception. An exchange may work for some members, and break for the others. Then
    the first are ahead by one update. If more members are behind than ahead, the job continues from
    the state of the members behind: they still have their gradients for the update, and fewer
    members must heal.

    Args:
        claimants: ranks of the members that claim to have the job's state.
    """
    if not claimants:
        return max(row.step for row in rows)
    latest = max(rows[rank].step for rank in claimants)
    num_ahead = 0
    num_behind = 0
    for rank in claimants:
        row = rows[rank]
        if row.step == latest:
            if row.standing is Standing.FINISHED:
                # The update was the job's last one. The members ahead have finished training and
                # would leave, so nobody could heal.
                return latest
            num_ahead += 1
        elif row.step == latest - 1:
            # An unfinished member does not count: it may have loaded a state that was offered
            # during the exchange, and its gradients are in the update already.
            can_repeat_update = row.training and not row.unfinished
            if can_repeat_update:
                num_behind += 1
    if num_behind > num_ahead:
        return latest - 1
    return latest


def _find_majority_lineage(rows: Sequence[Row], ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` whose state has the most common lineage.

    In a tie, the lineage of the lowest rank is chosen. States of different lineages are all valid,
    so all members only have to make the same choice.
    """
    if not ranks:
        return []
    lineages = Counter(rows[rank].lineage for rank in ranks)
    # In a tie, `most_common` returns the lineage that it met first.
    [(majority_lineage, _count)] = lineages.most_common(1)
    return [rank for rank in ranks if rows[rank].lineage == majority_lineage]


def _find_digest(rows: Sequence[Row], same_lineage: Sequence[int]) -> tuple[int, bool]:
    """Return the digest of the right bytes, and True if there is a tie.

    If states of one lineage have different bytes, some of them are corrupt. The digest of the
    majority is right. Without a majority there is a tie. At step 0 there is no tie, because nothing
    is trained yet: any initial state is right, and the lowest rank's is chosen. The digest is
    `NO_DIGEST` if no rank has computed one.

    A member that has not trained yet has loaded a checkpoint, perhaps from a corrupt group. So its
    digest is no independent vote for a digest that a training member shows as well.
    """
    trained: list[int] = []
    loaded: list[int] = []
    for rank in same_lineage:
        row = rows[rank]
        if row.digest == NO_DIGEST:
            continue
        if row.training:
            trained.append(row.digest)
        else:
            loaded.append(row.digest)
    votes = loaded
    if trained:
        # A digest that only loaded states have gets one vote, however many members have loaded it:
        # they may all have loaded the same checkpoint.
        only_loaded = set(loaded) - set(trained)
        votes = trained + sorted(only_loaded)
    if not votes:
        return NO_DIGEST, False
    most_common = Counter(votes).most_common(2)
    digest, num_votes = most_common[0]
    is_tied = False
    if len(most_common) == 2:
        _second_digest, num_votes_of_second = most_common[1]
        is_tied = num_votes_of_second == num_votes
    is_initial = rows[same_lineage[0]].step == 0
    return digest, is_tied and not is_initial


def _find_duplicates(
    holders: Sequence[int],
    slots_read: Sequence[Collection[int]],
) -> tuple[int, ...]:
    """Return the holders whose gradients do not count, because another holder has read their data.

    This happens when a group comes back during a step in which another group has taken over its
    slot. Of the two, the group with more slots keeps its gradients: the other one has read only its
    own slot.
    """

    def by_number_of_slots(rank: int) -> tuple[int, int]:
        return -len(slots_read[rank]), rank

    counted: set[int] = set()  # slots whose gradients count
    duplicates = []
    most_slots_first = sorted(holders, key=by_number_of_slots)
    for rank in most_slots_first:
        if counted.isdisjoint(slots_read[rank]):
            counted.update(slots_read[rank])
        else:
            duplicates.append(rank)
    return tuple(sorted(duplicates))


def _without(ranks: Sequence[int], others: Collection[int]) -> list[int]:
    """Return `ranks` without `others`, in their order."""
    dropped = frozenset(others)  # A set, because a job may have a thousand members.
    return [rank for rank in ranks if rank not in dropped]


def _find_offering(rows: Sequence[Row], holders: Sequence[int]) -> tuple[int, ...]:
    """Return the holders that may offer their state: those that train, or all if none trains.

    A holder that has not trained yet does not know which groups read the data of absent groups: the
    list of these groups (`Ledger.readers`) is empty. A joiner must not get such a list.
    """
    training = tuple(rank for rank in holders if rows[rank].training)
    return training or tuple(holders)


def _find_awaited_joiners(rows: Sequence[Row]) -> tuple[int, ...]:
    awaited = []
    for rank, row in enumerate(rows):
        is_fetching = row.standing is Standing.CATCHING_UP and row.donor != NO_DONOR
        if is_fetching and row.others_wait:
            awaited.append(rank)
    return tuple(awaited)
