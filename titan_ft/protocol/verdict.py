# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The meaning of one exchange's rows: which groups hold the job's state, whose gradients count.

All functions are pure. All members judge the same rows, and come to the same verdict. See
docs/exchange.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ft.protocol.row import Row, Standing


@dataclass(frozen=True)
class Verdict:
    """The meaning of the rows of one exchange.

    A rank here is a member's number in the quorum. Each tuple has the ranks of some members.

    Attributes:
        step: committed updates in the holders' state. The exchange is for the next update.
        holders: ranks that hold the job's state.
        strays: ranks that claim to hold the state, and differ from the majority. They must heal.
        corrupt: the strays whose state has the holders' lineage and other bytes.
        tie: the bytes differ, and there is no majority.
        digest: of the holders' bytes; 0 = no holder has taken it.
        verified: all holders have taken the digest.
        duplicates: holders that have trained data which another holder has trained too. Their
            gradients do not count.
        ready: holders that train on.
        contributors: the ready ranks whose gradients count.
        excluded: the ready ranks that leave their gradients out, because they are not finite.
        holding_back: the ready ranks that keep their gradients, because the step could not be
            committed.
        opening: the ready ranks that have just applied an update, and make this round for groups
            that missed it (`Row.opening`).
        unfinished: the ready ranks that have local steps left (`Row.unfinished`).
        offering: holders that may offer their state. A holder that has not started may not offer
            while others train: its ledger lists no readers.
        awaited_joiners: joiners that asked the others to hold their next update.
        valid_tokens, tokens, loss: sums over the contributors.
        max_loss: the largest over the contributors.
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
        """True if a ready member is neither opening nor unfinished, so this may be an update."""
        without_update = {*self.opening, *self.unfinished}
        return any(rank not in without_update for rank in self.ready)


def judge(rows: Sequence[Row], slots_read: Sequence[Collection[int]] | None = None) -> Verdict:
    """Judge the rows of all members.

    Args:
        slots_read: for each member, the slots whose data its gradients are made of.
    """
    claims = [rank for rank, row in enumerate(rows) if row.has_state]
    step = _find_step(rows, claims)
    same_step = [rank for rank in claims if rows[rank].step == step]
    same_lineage = _find_majority_lineage(rows, same_step)
    digest, tie = _find_digest(rows, same_lineage)
    holders: list[int] = []
    corrupt: list[int] = []
    if not tie:  # in a tie, nobody knows which bytes are right
        # A rank without a digest counts as one with the right bytes.
        holders = [rank for rank in same_lineage if rows[rank].digest in (0, digest)]
        corrupt = _without(same_lineage, holders)
    digests = [rows[rank].digest for rank in holders]
    duplicates = _find_duplicates(holders, slots_read or [()] * len(rows))
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
    counting = _without(ready, duplicates)
    contributors = [rank for rank in counting if rows[rank].valid_tokens > 0]
    contributed = [rows[rank] for rank in contributors]
    return Verdict(
        step=step,
        holders=tuple(holders),
        strays=tuple(_without(claims, holders)),
        corrupt=tuple(corrupt),
        tie=tie,
        digest=digest,
        verified=bool(digests) and all(digests),
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
    """Return the slots whose gradients make the sum useless, because they are not finite.

    The sum may be used if all members with gradients have agreed to force theirs. One member that
    forces alone must not spoil the gradients of the others.
    """
    for row in rows:
        has_gradients = row.valid_tokens or row.excluded
        if has_gradients and not row.forced:
            return [other.slot for other in rows if other.nonfinite]
    return []


def _find_step(rows: Sequence[Row], claims: Sequence[int]) -> int:
    """Return the number of updates in the job's state: the largest number that a member claims.

    There is one exception. An exchange may be complete for some members, and break for the others.
    Then some members are one update ahead. If more training members are behind than ahead, the
    state of those behind is the job's: they have kept their gradients, and the members ahead heal.
    """
    if not claims:
        return max(row.step for row in rows)
    latest = max(rows[rank].step for rank in claims)
    num_ahead = 0
    num_behind = 0
    for rank in claims:
        row = rows[rank]
        # An unfinished member does not count as behind: it may have loaded a state that was offered
        # during the exchange. Its gradients are in the update already.
        keeps_gradients = row.training and not row.unfinished
        if row.step == latest:
            # A group ahead that has made the job's last step has finished training, and would
            # leave.
            if row.standing is Standing.FINISHED:
                return latest
            num_ahead += 1
        elif row.step == latest - 1 and keeps_gradients:
            num_behind += 1
    if num_behind > num_ahead:
        return latest - 1
    return latest


def _find_majority_lineage(rows: Sequence[Row], ranks: Sequence[int]) -> list[int]:
    """Return the ranks with the most common lineage; in a tie, with the lowest rank's lineage.

    States of different lineages are all sound, so the choice only has to be the same on all
    members.
    """
    if not ranks:
        return []
    lineages = Counter(rows[rank].lineage for rank in ranks)
    [(usual, _)] = lineages.most_common(1)
    return [rank for rank in ranks if rows[rank].lineage == usual]


def _find_digest(rows: Sequence[Row], same_lineage: Sequence[int]) -> tuple[int, bool]:
    """Return the digest of the right bytes, and whether there is a tie.

    If states of one lineage have different bytes, some are corrupt. The digest of the majority is
    right; without a majority there is a tie. At step 0 there is no tie, because nothing is trained
    yet: the lowest rank's initial state is as good as any other. The digest is 0 if no rank has
    taken one.

    A group that has not trained yet loaded a checkpoint, perhaps one that a corrupt group wrote. So
    its digest is no independent vote for bytes that a training group shows as well.
    """
    trained: list[int] = []
    loaded: list[int] = []
    for rank in same_lineage:
        row = rows[rank]
        if not row.digest:
            continue
        if row.training:
            trained.append(row.digest)
        else:
            loaded.append(row.digest)
    votes = loaded
    if trained:
        # Each loaded digest has one vote, and only if no trained group shows it.
        votes = trained + sorted({*loaded} - {*trained})
    if not votes:
        return 0, False
    most_common = Counter(votes).most_common(2)
    digest, num_votes = most_common[0]
    is_tied = False
    if len(most_common) == 2:
        _other, num_votes_of_other = most_common[1]
        is_tied = num_votes_of_other == num_votes
    is_initial = rows[same_lineage[0]].step == 0
    return digest, is_tied and not is_initial


def _find_duplicates(
    holders: Sequence[int],
    slots_read: Sequence[Collection[int]],
) -> tuple[int, ...]:
    """Return the holders that have read a slot which another holder has read too.

    A group may come back during a step in which another group has taken over its slot. The group
    with most slots keeps its gradients, because the group that came back has read its own slot
    only.
    """
    taken: set[int] = set()
    duplicates = []
    most_slots_first = sorted(holders, key=lambda rank: (-len(slots_read[rank]), rank))
    for rank in most_slots_first:
        if taken.isdisjoint(slots_read[rank]):
            taken.update(slots_read[rank])
        else:
            duplicates.append(rank)
    return tuple(sorted(duplicates))


def _without(ranks: Sequence[int], others: Collection[int]) -> list[int]:
    """Return `ranks` without `others`, in their order."""
    dropped = frozenset(others)  # a set, because there may be a thousand look-ups
    return [rank for rank in ranks if rank not in dropped]


def _find_offering(rows: Sequence[Row], holders: Sequence[int]) -> tuple[int, ...]:
    """Return the holders that train; if none does, all holders."""
    training = tuple(rank for rank in holders if rows[rank].training)
    return training or tuple(holders)


def _find_awaited_joiners(rows: Sequence[Row]) -> tuple[int, ...]:
    awaited = []
    for rank, row in enumerate(rows):
        fetches = row.standing is Standing.CATCHING_UP and row.donor >= 0
        if fetches and row.others_wait:
            awaited.append(rank)
    return tuple(awaited)
