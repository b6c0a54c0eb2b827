# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a round: `Round` if it worked on all ranks of this group, else `Broken`.

A round is one exchange between the groups, and one vote of each group on whether it worked. Some
rounds are made only for other groups, for example to tell a joiner the holders' digests. If
`decision.is_update` returns True, the round is an update: `Round.update` returns it, and all groups
apply it. See docs/exchange.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from titan_ft.protocol.ledger import Entry
from titan_ft.protocol.member import GroupProcess, Quorum
from titan_ft.protocol.row import Row, descend
from titan_ft.protocol.verdict import Verdict


class UpdateSums(Protocol):
    """The gradient sums of an exchange (`titan_ft.gradients.sums`)."""

    @property
    def is_copy(self) -> bool:
        """True if this is a copy for a group that heals and applies the update later."""

    def copy(self) -> UpdateSums:
        """Return a copy, which outlives the next exchange."""

    def write(self, scale: float | None = None) -> None:
        """Set the gradients to the sums times `scale`; None = to the groups' weighted means."""


class NoSums:
    """Stands for missing sums: the update is applied already, or no gradients were exchanged."""

    is_copy = False

    def copy(self) -> UpdateSums:
        """Return this object: there is nothing to copy."""
        return self

    def write(self, scale: float | None = None) -> None:
        """Refuse: an update without its sums would leave other gradients in place."""
        raise AssertionError("this update has no sums")


NO_SUMS = NoSums()


@dataclass(frozen=True)
class Update:
    """A committed update, which a group applies at once, or later during a heal.

    Attributes:
        step: number of the update, from 1.
        tokens: number of tokens in the update's batches.
        lineage: lineage of the state after the update (`row.descend`).
        scale: factor by which the sums are multiplied to get the token-weighted mean.
        entries: the batches that the gradients were computed from.
        readers: the groups that were ready at the update (see `Ledger.readers`).
        sums: the sums of the gradients. Unless they are a copy, they are valid until the next
            exchange is launched.
    """

    step: int
    tokens: int
    lineage: int
    scale: float
    entries: list[Entry]
    readers: list[GroupProcess]
    sums: UpdateSums = field(default=NO_SUMS, compare=False)

    def with_copied_sums(self) -> Update:
        """Return this update with a copy of its sums, for a group that applies it later."""
        return replace(self, sums=self.sums.copy())

    def without_sums(self) -> Update:
        """Return this update without its sums, so that their memory can be freed."""
        return replace(self, sums=NO_SUMS)

    @property
    def slots(self) -> list[int]:
        """Slots whose data the gradients were computed from."""
        return sorted({entry.slot for entry in self.entries})


@dataclass(frozen=True)
class Round:
    """A round that worked on all ranks of this group.

    Attributes:
        quorum: the members.
        rows: the members' rows, in the order of their ranks in the quorum.
        verdict: which members have the job's state, and whose gradients count.
        entries: the batches that the ready groups have trained.
        sums: the sums of the gradients.
    """

    quorum: Quorum
    rows: Sequence[Row]
    verdict: Verdict
    entries: list[Entry]
    sums: UpdateSums = field(default=NO_SUMS, compare=False)

    @property
    def lineage(self) -> int:
        """Lineage of the holders' state."""
        return self.rows[self.verdict.holders[0]].lineage

    @property
    def has_askers(self) -> bool:
        """True if a member asks for the state. Then the holders show their digests in the next
        round."""
        return any(row.asks_for_state for row in self.rows)

    def slots(self, ranks: Sequence[int]) -> list[int]:
        """Return the slots of these ranks."""
        return [self.quorum.slots[rank] for rank in ranks]

    @property
    def readers(self) -> list[GroupProcess]:
        """The groups that train on."""
        return [self.quorum.processes[rank] for rank in self.verdict.ready]

    def update(self, nominal_tokens: int) -> Update:
        """Return the round's update. Call this only if `is_update` returns True.

        Args:
            nominal_tokens: tokens of a step with all groups. Each group has divided its loss by
                this number.
        """
        step = self.verdict.step + 1
        batches = [(entry.slot, entry.first_batch, entry.num_batches) for entry in self.entries]
        made_of = f"{self.slots(self.verdict.contributors)}{batches}"
        return Update(
            step=step,
            tokens=self.verdict.tokens,
            lineage=descend(self.lineage, self.quorum.key, step, made_of),
            scale=nominal_tokens / self.verdict.valid_tokens,
            entries=self.entries,
            readers=self.readers,
            sums=self.sums,
        )


@dataclass(frozen=True)
class Broken:
    """A round that did not work on all ranks of this group.

    Attributes:
        error: the reason.
        gave_nonfinite: True if a rank of this group has given non-finite gradients.
    """

    error: str
    gave_nonfinite: bool = False
