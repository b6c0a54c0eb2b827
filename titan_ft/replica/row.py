# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the groups tell each other with every exchange, and what follows from it.

Each member writes one row of facts; the exchange sums the zero-padded rows, so that every member reads all of them.
The decisions below are pure functions of these rows: every rank of every group comes to the same one by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_FLOATS = ("loss", "max_loss", "waited", "seconds")


class Standing(IntEnum):
    """A member's relation to the job's state."""

    BEHIND = 0  # has not the state and asks for a donor
    CATCHING_UP = 1  # fetches the state and queues the reduced gradients meanwhile
    READY = 2  # has the state and trains
    FINISHED = 3  # has the final state and stays for those that still need it

    @property
    def has_state(self) -> bool:
        """Say whether a member of this standing claims to hold the job's state."""
        return self >= Standing.READY


@dataclass(frozen=True)
class Row:
    """One member's facts. Every field travels as a float64, so integers must stay below 2**53.

    Attributes:
        slot: the member's replica id.
        standing: see `Standing`.
        step: committed updates that the member's state has.
        seen: largest number of committed updates that the member knows of.
        lineage: 48-bit hash of the exchanges that made the state (see `descend`).
        digest: 48-bit hash of the state's bytes on all ranks of the group; 0 = not taken at this step.
        valid_tokens: tokens with a label that the member's loss counts: its weight in the mean. 0 = no gradient.
        tokens: all tokens of its batches.
        loss: its loss sum, scaled by 1 / (nominal tokens of all groups together).
        max_loss: largest mean loss of one of its ranks.
        heals: heals that the member began since it has been behind; the next one asks the next donor.
        donor: slot that a member that is catching up fetches from; -1 = none at the moment.
        waited: seconds that the member has waited for the job's first step.
        awaited: whether the others must wait until the member has fetched the state; it queues no more updates.
        seconds: that the member's slowest rank spent on its own part of the step.
        saved: step of the latest checkpoint that the member knows to be complete.
        leaving: whether the member was told to leave and will be gone after this exchange, if it is committed.
        nonfinite: whether this rank's gradients, which are in the sum, have an inf or a NaN.
        insists: whether it adds them all the same, because nobody had finite ones.
        excluded: whether the member leaves its gradients out of this step because one of its ranks had such.
    """

    slot: int
    standing: Standing
    step: int
    seen: int = 0
    lineage: int = 0
    digest: int = 0
    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    heals: int = 0
    donor: int = -1
    waited: float = 0.0
    awaited: int = 0
    seconds: float = 0.0
    saved: int = 0
    leaving: int = 0
    nonfinite: int = 0
    excluded: int = 0
    insists: int = 0

    def encode(self) -> list[float]:
        """Return the row as floats, in field order."""
        return [float(value) for value in dataclasses.astuple(self)]

    @staticmethod
    def decode(values: Sequence[float]) -> Row:
        """Rebuild a row from `encode`'s floats."""
        fields: dict[str, Any] = {}
        for field, value in zip(dataclasses.fields(Row), values, strict=True):
            fields[field.name] = value if field.name in _FLOATS else int(value)
        fields["standing"] = Standing(fields["standing"])
        return Row(**fields)

    @property
    def has_state(self) -> bool:
        """Say whether the member claims to hold the job's state."""
        return self.standing.has_state


@dataclass(frozen=True)
class Verdict:
    """What the rows of one exchange mean. Ranks are those of the quorum.

    Attributes:
        step: committed updates that the holders' state has; the exchange makes the next one.
        holders: ranks that hold the job's state.
        strays: ranks that claim to hold it but differ from the majority; they must heal.
        tie: the bytes differ and no majority exists.
        ready: holders that train on.
        contributors: those of them whose gradient counts.
        excluded: those of them whose gradient does not, because it is not finite.
        donors: for each rank that is behind, the holder that serves it; without one if all holders serve others now.
        serving: holders that a member fetches from.
        awaited: members whose transfer must end before the next update.
        valid_tokens, tokens, loss, max_loss: sums (and the largest) over the contributors.
    """

    step: int
    holders: tuple[int, ...]
    strays: tuple[int, ...]
    tie: bool
    ready: tuple[int, ...]
    contributors: tuple[int, ...]
    excluded: tuple[int, ...]
    donors: dict[int, int]
    serving: tuple[int, ...]
    awaited: tuple[int, ...]
    valid_tokens: int
    tokens: int
    loss: float
    max_loss: float


def judge(rows: Sequence[Row], read: Sequence[Collection[int]] | None = None) -> Verdict:
    """Decide from all members' rows who holds the state, whose gradient counts and who serves whom.

    Args:
        read: slots whose data each member's gradients are made of. Holders of one state never read the same; of two
            that did, the lower rank is taken for a holder.
    """
    claims = [rank for rank, row in enumerate(rows) if row.has_state]
    step = max((rows[rank].step for rank in claims), default=max(row.step for row in rows))
    holders, tie = _find_holders(rows, [rank for rank in claims if rows[rank].step == step])
    holders = _without_doubles(holders, read or [()] * len(rows))
    ready = tuple(rank for rank in holders if rows[rank].standing == Standing.READY)
    contributors = tuple(rank for rank in ready if rows[rank].valid_tokens > 0)
    joiners = [rank for rank, row in enumerate(rows) if row.standing == Standing.CATCHING_UP]
    fetched_from = {rows[rank].donor for rank in joiners}
    return Verdict(
        step=step,
        holders=holders,
        strays=tuple(rank for rank in claims if rank not in holders),
        tie=tie,
        ready=ready,
        contributors=contributors,
        excluded=tuple(rank for rank in ready if rows[rank].excluded),
        donors=_send_to_donors(rows, [rank for rank in holders if rows[rank].slot not in fetched_from]),
        serving=tuple(rank for rank in holders if rows[rank].slot in fetched_from),
        awaited=tuple(rank for rank in joiners if rows[rank].awaited and rows[rank].donor >= 0),
        valid_tokens=sum(rows[rank].valid_tokens for rank in contributors),
        tokens=sum(rows[rank].tokens for rank in contributors),
        loss=sum(rows[rank].loss for rank in contributors),
        max_loss=max((rows[rank].max_loss for rank in contributors), default=0.0),
    )


def _find_holders(rows: Sequence[Row], claims: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return whose claim to the job's state is right, and whether nobody can tell.

    States of different lineage are all good ones, so that any choice that all make alike will do: the most common one,
    of equally common ones the lowest rank's. Different bytes of one lineage mean that some are corrupt: only a majority
    can tell which. At step 0 nothing is trained yet, so the lowest rank's initial state is as good as any.
    """
    lineage = _most_common([rows[rank].lineage for rank in claims]) if claims else 0
    camp = [rank for rank in claims if rows[rank].lineage == lineage]
    digests = [rows[rank].digest for rank in camp]
    digest = _most_common(digests) if camp else 0
    tie = any(other != digest and digests.count(other) == digests.count(digest) for other in digests)
    if tie and rows[camp[0]].step > 0:
        return (), True
    return tuple(rank for rank in camp if rows[rank].digest == digest), False


def _without_doubles(holders: Sequence[int], read: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Leave out holders that read data which a lower rank has read too."""
    taken: set[int] = set()
    single = []
    for rank in holders:
        if taken.isdisjoint(read[rank]):
            single.append(rank)
            taken.update(read[rank])
    return tuple(single)


def _most_common(values: list[int]) -> int:
    """Return the most common value; of equally common ones the first."""
    return max(values, key=values.count)  # max keeps the first of equals


def _send_to_donors(rows: Sequence[Row], free: Sequence[int]) -> dict[int, int]:
    """Pair each rank that is behind with a holder that serves nobody yet.

    A holder has one copy of its state: a joiner that came at a later step would take it from one that is fetching.
    """
    behind = [rank for rank, row in enumerate(rows) if row.standing == Standing.BEHIND]
    return {rank: free[(place + rows[rank].heals) % len(free)] for place, rank in enumerate(behind) if free}


def descend(lineage: int, quorum_key: str, step: int) -> int:
    """Return the lineage of the state that update `step`, exchanged in the quorum `quorum_key`, makes of `lineage`.

    Groups may decide differently about one exchange. If one that committed is then left out of the quorum, the others
    repeat the step without it and two states of the same step exist. Their lineages differ.
    """
    return fold48(f"{lineage}/{quorum_key}/{step}")


def fold48(text: str) -> int:
    """Hash `text` to 48 bits, which a float64 carries exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
