# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the rows of one exchange mean: who holds the job's state, and whose gradient counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titan_ft.protocol.row import Row, Standing


@dataclass(frozen=True)
class Verdict:
    """What the rows of one exchange mean. Ranks are those of the quorum.

    Attributes:
        step: committed updates that the holders' state has; the exchange makes the next one.
        holders: ranks that hold the job's state.
        strays: ranks that claim to hold it but differ from the majority; they must heal.
        corrupt: strays whose state has the holders' history and other bytes.
        tie: the bytes differ and no majority exists.
        digest: that of the holders' bytes; 0 = none of them has taken it.
        verified: whether all holders have taken it.
        doubled: holders that have read data for this step which another one has read too; theirs does not count.
        ready: holders that train on.
        contributors: those of them whose gradient counts.
        excluded: those of them whose gradient does not, because it is not finite.
        resting: those of them that keep theirs back, because the step could not be committed.
        opening: those of them that make the round for others, right behind an update (`Row.opening`).
        early: those of them that have steps of their round left (`Row.early`).
        offering: holders that may offer their state. A holder that has not begun may not do so beside groups that
            train: its ledger lists no readers.
        awaited: members whose transfer must end before the next update.
        valid_tokens, tokens, loss, max_loss: sums (and the largest) over the contributors.
    """

    step: int
    holders: tuple[int, ...]
    strays: tuple[int, ...]
    corrupt: tuple[int, ...]
    tie: bool
    digest: int
    verified: bool
    doubled: tuple[int, ...]
    ready: tuple[int, ...]
    contributors: tuple[int, ...]
    excluded: tuple[int, ...]
    resting: tuple[int, ...]
    opening: tuple[int, ...]
    early: tuple[int, ...]
    offering: tuple[int, ...]
    awaited: tuple[int, ...]
    valid_tokens: int
    tokens: int
    loss: float
    max_loss: float

    @property
    def due(self) -> bool:
        """Say whether a member has made all of its steps, so that an update may follow."""
        return not set(self.ready) <= {*self.opening, *self.early}


def judge(rows: Sequence[Row], read: Sequence[Collection[int]] | None = None) -> Verdict:
    """Decide from all members' rows who holds the state, and whose gradient counts.

    Args:
        read: slots whose data each member's gradients are made of.
    """
    claims = [rank for rank, row in enumerate(rows) if row.has_state]
    step = _find_step(rows, claims)
    same_lineage = _find_majority_lineage(rows, [rank for rank in claims if rows[rank].step == step])
    digest, tie = _find_digest(rows, same_lineage)
    alike = tuple(rank for rank in same_lineage if rows[rank].digest in (0, digest))
    holders = () if tie else alike
    sound = frozenset(holders)  # all members are looked up in it: there may be a thousand
    doubled = _find_doubled(holders, read or [()] * len(rows))
    ready = tuple(rank for rank in holders if rows[rank].standing == Standing.READY)
    contributors = tuple(rank for rank in ready if rows[rank].valid_tokens > 0 and rank not in doubled)
    joiners = [rank for rank, row in enumerate(rows) if row.standing == Standing.CATCHING_UP]
    train = max((rows[rank].training for rank in holders), default=0)
    verified = bool(holders) and all(rows[rank].digest for rank in holders)
    return Verdict(
        step=step,
        holders=holders,
        strays=tuple(rank for rank in claims if rank not in sound),
        corrupt=() if tie else tuple(rank for rank in same_lineage if rank not in sound),
        tie=tie,
        digest=digest,
        verified=verified,
        doubled=doubled,
        ready=ready,
        contributors=contributors,
        excluded=tuple(rank for rank in ready if rows[rank].excluded),
        resting=tuple(rank for rank in ready if rows[rank].resting),
        opening=tuple(rank for rank in ready if rows[rank].opening),
        early=tuple(rank for rank in ready if rows[rank].early),
        offering=tuple(rank for rank in holders if rows[rank].training == train),
        awaited=tuple(rank for rank in joiners if rows[rank].awaited and rows[rank].donor >= 0),
        valid_tokens=sum(rows[rank].valid_tokens for rank in contributors),
        tokens=sum(rows[rank].tokens for rank in contributors),
        loss=sum(rows[rank].loss for rank in contributors),
        max_loss=max((rows[rank].max_loss for rank in contributors), default=0.0),
    )


def spoiled(rows: Sequence[Row]) -> list[int]:
    """Return the slots whose gradients spoil the sum because they are not finite; none if it may be used.

    It may if all members with gradients have agreed to force theirs: one that does alone must not spoil the others'.
    """
    spoilers = [row.slot for row in rows if row.nonfinite]
    forced = all(row.forced for row in rows if row.valid_tokens or row.excluded)
    return [] if forced else spoilers


def _find_step(rows: Sequence[Row], claims: Sequence[int]) -> int:
    """Return how many updates the job's state has: the most that a member claims.

    Unless more members that train are exactly one update behind: an exchange was complete for the one ahead, and broke
    for them. They still have their gradients, so it is the one ahead that heals. Not after the last step: it has
    finished training by then, and would leave. Who has steps of its round left is not of those behind: it may have
    loaded a state that was offered while the exchange was under way, and what it gave to that is in the update.
    """
    if not claims:
        return max(row.step for row in rows)
    most = max(rows[rank].step for rank in claims)
    ahead = [rows[rank].standing for rank in claims if rows[rank].step == most]
    behind = [rows[rank] for rank in claims if rows[rank].step == most - 1]
    rear = sum(bool(row.training and not row.early) for row in behind)
    return most - 1 if rear > len(ahead) and Standing.FINISHED not in ahead else most


def _find_majority_lineage(rows: Sequence[Row], claims: Sequence[int]) -> list[int]:
    """Return those of `claims` with the most common lineage, of equally common ones the lowest rank's.

    States of different lineage are all good ones, so that any choice that all make alike will do.
    """
    usual = _most_common([rows[rank].lineage for rank in claims])
    return [rank for rank in claims if rows[rank].lineage == usual]


def _find_digest(rows: Sequence[Row], same_lineage: Sequence[int]) -> tuple[int, bool]:
    """Return the digest of the right bytes (0 = nobody has taken one), and whether there is no majority for any.

    Different bytes of one lineage mean that some are corrupt: only a majority of those that have looked at theirs can
    tell which. At step 0 nothing is trained yet, so the lowest rank's initial state is as good as any.

    One that has yet to begin has its state from a checkpoint, and beside groups that train it is no witness for bytes
    that one of them shows as well: that one may have written it.
    """
    shown = [rank for rank in same_lineage if rows[rank].digest]
    trained = [rows[rank].digest for rank in shown if rows[rank].training]
    loaded = [rows[rank].digest for rank in shown if not rows[rank].training]
    digests = trained + sorted({*loaded} - {*trained}) if trained else loaded
    if not digests:
        return 0, False
    (digest, most), *others = Counter(digests).most_common(2)
    tie = any(count == most for _, count in others)
    return digest, tie and rows[same_lineage[0]].step > 0


def _find_doubled(holders: Sequence[int], read: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Return the holders that have read what another one has read too, all but one of each such set.

    A group may come back to a step in which another one has taken its slot over and still waits to commit. The group
    that has read most keeps its gradients: the other one has read its own slot only.
    """
    taken: set[int] = set()
    doubled = []
    for rank in sorted(holders, key=lambda rank: (-len(read[rank]), rank)):
        if taken.isdisjoint(read[rank]):
            taken.update(read[rank])
        else:
            doubled.append(rank)
    return tuple(sorted(doubled))


def _most_common(values: list[int]) -> int:
    """Return the most common value, of equally common ones the first; 0 if there is none."""
    return Counter(values).most_common(1)[0][0] if values else 0
