# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The facts that the groups send each other in every round.

Each member of an exchange writes one row of facts. The exchange gathers the rows, so every member
reads all of them. `verdict.py` judges the rows, and `decision.py` decides what a group does next.

The facts identify the member's state by its *step* (number of committed updates), its *lineage*
(hash of the exchanges that made it) and its *digest* (hash of its bytes). A *joiner* is a member
that lacks the job's state, and fetches it from a *donor*.

See docs/exchange.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_FLOAT_FIELDS = frozenset(
    (
        "loss",
        "max_loss",
        "waited_seconds",
        "seconds",
        "asked_before_seconds",
        "ready_after_seconds",
    ),
)


class Standing(IntEnum):
    """A member's relation to the job's state."""

    BEHIND = 0  # lacks the state and asks holders for it
    CATCHING_UP = 1  # fetches the state, and queues the updates that the others make meanwhile
    READY = 2  # has the state, and trains or waits for the job's first step
    FINISHED = 3  # has the final state and stays for the groups that still need it

    @property
    def has_state(self) -> bool:
        """True if a member with this standing claims to have the job's state."""
        return self >= Standing.READY


class Why(IntEnum):
    """Why the other groups waited for a group: what it did before the exchange, or its absence."""

    COMPUTING = 0  # forward and backward
    LOADING = 1  # reading its batches
    BETWEEN_STEPS = 2  # saving, validating, or other work between two steps
    CONNECTING = 3  # building its process group
    CATCHING_UP = 4  # fetching, loading or replaying the state
    ASKED = 5  # catching up, and the group asked the others to wait, because its queue is full
    LOST = 6  # its process is gone
    LEFT = 7  # it left in order
    TOO_FEW = 8  # without the group, fewer than `min_replica_size` are present

    @property
    def joins(self) -> bool:
        """True if the group was a joiner."""
        return self in (Why.CATCHING_UP, Why.ASKED)


@dataclass(frozen=True)
class Row:
    """One member's facts.

    Every field but `nonfinite` travels as a float64, which is exact for integers below 2**53. The
    fields from `leaving` to `unfinished`, `others_wait` and `connecting` are flags: 1 = true.

    Attributes:
        slot: number of the member's group in the job.
        standing: the member's relation to the job's state.
        step: committed updates in the member's state. After a fetch, this is the number that the
            replay leads to.
        seen_step: largest number of committed updates that the member has heard of.
        lineage: 48-bit hash of the exchanges that made the state (see `descend`).
        digest: 48-bit hash of the state's bytes on all ranks of the group; 0 = not taken since the
            last update.
        valid_tokens: number of the member's tokens that have a label and count in its loss. It is
            the member's weight in the mean. 0 = the member gives no gradient.
        tokens: number of all tokens of the member's batches.
        loss: sum of the member's losses, divided by the tokens of a step with all groups.
        max_loss: largest mean loss of one of the member's ranks.
        donor: slot of the donor from which the member fetches the state; -1 (`healing.NO_DONOR`) =
            the member fetches from no donor.
        from_step: committed updates in the state that the member fetches.
        waited_seconds: how long the member has waited for the job's first step.
        others_wait: the others must hold back their next update until the member has fetched the
            state, or has replayed its queue of updates.
        seconds: time that the member's slowest rank spent on its own computation in the step.
        saved_step: step of the latest complete checkpoint that the member knows of.
        leaving: the member got a leave request, and leaves after this round if the round works.
        forced: the member adds its gradients although they are not finite, because no member has
            finite ones.
        excluded: the member leaves its gradients out of this step, because they are not finite on
            one of its ranks.
        holding_back: the member has gradients, and keeps them until the step can be committed.
        training: the member has begun to train. Without it, the member waits for the job's first
            step.
        opening: the member has just applied an update. It makes this round for groups that missed
            the update, and gives no gradients. Semi-synchronous methods only.
        unfinished: the member has local steps left. It makes them, unless other members have made
            all of theirs. Semi-synchronous methods only.
        asked_before_seconds: time from the member's quorum request to the lighthouse's answer. All
            members get the answer at the same moment. So this field and the next one can be
            compared between members without a common clock.
        ready_after_seconds: time from this answer until both the member's gradients and its process
            group were ready.
        connecting: the member's gradients were ready before its process group was.
        activity: what the member did until its gradients were ready (`Why`).
        nonfinite: the gradients that the member gave to the sum contain an inf or a NaN. This field
            is not sent as a float. The exchange adds it (`ExchangeResult.nonfinite`). If it were
            sent, the host would have to wait for the GPU once more.
    """

    slot: int
    standing: Standing
    step: int
    seen_step: int = 0
    lineage: int = 0
    digest: int = 0
    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    donor: int = -1
    from_step: int = 0
    waited_seconds: float = 0.0
    others_wait: int = 0
    seconds: float = 0.0
    saved_step: int = 0
    leaving: int = 0
    forced: int = 0
    excluded: int = 0
    holding_back: int = 0
    training: int = 0
    opening: int = 0
    unfinished: int = 0
    asked_before_seconds: float = 0.0
    ready_after_seconds: float = 0.0
    connecting: int = 0
    activity: int = Why.COMPUTING
    nonfinite: bool = False

    def encode(self) -> list[float]:
        """Return the fields as floats, in their order, without `nonfinite`."""
        return [float(value) for value in _read_fields(self)]

    @staticmethod
    def decode(values: Sequence[float], nonfinite: bool) -> Row:
        """Rebuild a row from the floats of `encode`.

        Args:
            nonfinite: True if the exchange found an inf or a NaN in the member's gradients.
        """
        facts: list[Any] = [kind(value) for kind, value in zip(_KINDS, values, strict=True)]
        slot, standing, *other_facts = [*facts, nonfinite]
        return Row(slot, Standing(standing), *other_facts)

    @property
    def has_state(self) -> bool:
        """True if the member claims to hold the job's state."""
        return self.standing.has_state

    @property
    def asks_for_state(self) -> bool:
        """True if the member lacks the state and fetches it from no donor yet."""
        return not self.has_state and self.donor < 0

    @property
    def reason(self) -> Why:
        """Why the others wait for the member, if they do."""
        return Why(self.activity)


_NAMES = tuple(field.name for field in dataclasses.fields(Row))[:-1]  # all but `nonfinite`
_KINDS: tuple[type, ...] = tuple(float if name in _FLOAT_FIELDS else int for name in _NAMES)
_read_fields = operator.attrgetter(*_NAMES)


def descend(lineage: int, quorum_key: str, step: int, made_of: str = "") -> int:
    """Return the lineage of the state after update `step`.

    Why there may be several states of one step: suppose that an exchange worked for one group, and
    broke for the others. This group commits the step, and dies before the next quorum. The other
    groups repeat the step without it. Then the lineages of the two states must differ. They must
    differ even if the quorum of the repetition has the same number, because a restarted lighthouse
    numbers its quorums from the beginning. So `made_of` is a part of the hash as well.

    Args:
        lineage: lineage of the state before the update.
        quorum_key: name of the update's quorum among all quorums of the job.
        made_of: the contributors and their batches.
    """
    return fold48(f"{lineage}/{quorum_key}/{step}/{made_of}")


def fold48(text: str) -> int:
    """Hash `text` to 48 bits, which a float64 carries exactly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
