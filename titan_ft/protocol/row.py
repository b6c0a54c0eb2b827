# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The facts that the groups exchange in every round.

Each member writes one row of facts; the exchange gathers them, so that every member reads all of them.
What follows from them is in `decision.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_FLOATS = frozenset(("loss", "max_loss", "waited", "seconds", "asked", "came"))


class Standing(IntEnum):
    """A member's relation to the job's state."""

    BEHIND = 0  # lacks the state and asks holders for it
    CATCHING_UP = 1  # fetches the state and queues the reduced gradients meanwhile
    READY = 2  # has the state and trains
    FINISHED = 3  # has the final state and stays for those that still need it

    @property
    def has_state(self) -> bool:
        """Say whether a member of this standing claims to hold the job's state."""
        return self >= Standing.READY


class Why(IntEnum):
    """Why the others waited for a group: what it did before it came to the exchange, or why it did not come."""

    COMPUTING = 0  # forward and backward
    LOADING = 1  # reading its batches
    BETWEEN_STEPS = 2  # saving, validating, or whatever else stands between two steps
    CONNECTING = 3  # building its process group
    CATCHING_UP = 4  # fetching, loading or replaying the state
    ASKED = 5  # the same, and it asked the others to wait: its queue is full
    LOST = 6  # its process is gone
    LEFT = 7  # it left in order
    TOO_FEW = 8  # without it there are fewer than `min_replica_size`

    @property
    def joins(self) -> bool:
        """True for a group that lacks the state and gets it."""
        return self in (Why.CATCHING_UP, Why.ASKED)


@dataclass(frozen=True)
class Row:
    """One member's facts. Every field travels as a float64, so integers must stay below 2**53.

    Attributes:
        slot: the member's replica id.
        standing: see `Standing`.
        step: committed updates that the member's state has, or will have after the replay of what it has fetched.
        seen: largest number of committed updates that the member knows of.
        lineage: 48-bit hash of the exchanges that made the state (see `descend`).
        digest: 48-bit hash of the state's bytes on all ranks of the group; 0 = not taken at this step.
        valid_tokens: tokens with a label that the member's loss counts: its weight in the mean. 0 = no gradient.
        tokens: all tokens of its batches.
        loss: its loss sum, scaled by 1 / (nominal tokens of all groups together).
        max_loss: largest mean loss of one of its ranks.
        donor: slot of the donor that a member which is catching up names; -1 = none at the moment.
        from_step: committed updates in the state that it fetches there.
        waited: seconds that the member has waited for the job's first step.
        awaited: whether the others must wait until the member has fetched the state, or replayed what it has queued; it
            queues no more updates.
        seconds: that the member's slowest rank spent on its own part of the step.
        saved: step of the latest checkpoint that the member knows to be complete.
        leaving: whether the member was told to leave and will be gone after this exchange, if it is committed.
        forced: whether it adds them all the same, because nobody had finite ones.
        excluded: whether the member leaves its gradients out of this step because one of its ranks had such.
        resting: whether the member has gradients and keeps them back until the step can be committed.
        training: whether the member has begun to train; one that has not waits for the job's first step.
        opening: whether the member has just made an update and gives nothing in this round, which is for those that
            missed it; only with a semi-synchronous method.
        early: whether the member has steps of its round left, which it makes unless others are at the end of theirs.
        asked: seconds from the member's request for the quorum to its answer. The answer comes to all members at once,
            so that these seconds and the next compare without a common clock.
        came: seconds from that answer until the member's part of the exchange and its process group were there.
        connecting: whether it had to wait for its process group.
        doing: what it did until its part was there (`Why`).
        nonfinite: whether this rank's gradients, which are in the sum, have an inf or a NaN. It is not among
            the floats: the exchange looks at the sums (`Reduced.spoiled`), the host would have to wait for that alone.
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
    donor: int = -1
    from_step: int = 0
    waited: float = 0.0
    awaited: int = 0
    seconds: float = 0.0
    saved: int = 0
    leaving: int = 0
    forced: int = 0
    excluded: int = 0
    resting: int = 0
    training: int = 0
    opening: int = 0
    early: int = 0
    asked: float = 0.0
    came: float = 0.0
    connecting: int = 0
    doing: int = Why.COMPUTING
    nonfinite: bool = False

    def encode(self) -> list[float]:
        """Return the row as floats, in field order; without `nonfinite`."""
        return [float(value) for value in _read_fields(self)]

    @staticmethod
    def decode(values: Sequence[float], nonfinite: bool) -> Row:
        """Rebuild a row from `encode`'s floats, and from what the exchange saw in the gradients."""
        facts: list[Any] = [kind(value) for kind, value in zip(_KINDS, values, strict=True)]
        slot, standing, *rest = *facts, nonfinite
        return Row(slot, Standing(standing), *rest)

    @property
    def has_state(self) -> bool:
        """Say whether the member claims to hold the job's state."""
        return self.standing.has_state

    @property
    def reason(self) -> Why:
        """Return why others wait for the member, if they do: its activity until its part was there."""
        return Why(self.doing)


_NAMES = tuple(field.name for field in dataclasses.fields(Row))[:-1]  # those that travel
_KINDS: tuple[type, ...] = tuple(float if name in _FLOATS else int for name in _NAMES)
_read_fields = operator.attrgetter(*_NAMES)


def descend(lineage: int, quorum_key: str, step: int, made_of: str = "") -> int:
    """Return the lineage of the state that update `step`, exchanged in the quorum `quorum_key`, makes of `lineage`.

    Groups may decide differently about one exchange. If one that committed is then left out of the quorum, the others
    repeat the step without it and two states of the same step exist. Their lineages differ: also if they repeat it with
    all of them, in a quorum of the same number, for a lighthouse that starts again counts from the beginning.

    Args:
        made_of: who has given what to the update.
    """
    return fold48(f"{lineage}/{quorum_key}/{step}/{made_of}")


def fold48(text: str) -> int:
    """Hash `text` to 48 bits, which a float64 carries exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
