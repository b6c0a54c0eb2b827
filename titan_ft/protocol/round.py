# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group knows after an exchange: a round that worked, with the update that it may be, or a broken one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from titan_ft.protocol.ledger import Entry
from titan_ft.protocol.member import Process, Quorum
from titan_ft.protocol.row import Row, descend
from titan_ft.protocol.verdict import Verdict


class UpdateSums(Protocol):
    """The sums that an exchange has made (`titan_ft.gradients.sums`)."""

    @property
    def is_kept(self) -> bool:
        """True for a copy, which a group that heals applies later."""

    def keep(self) -> UpdateSums:
        """Return a copy, which outlives the next exchange."""

    def write(self, scale: float | None = None) -> None:
        """Make the sums times `scale` the parameters' gradients; None = the means by the weights of the groups."""


class NoSums:
    """The sums of an update that is applied already, and of rows that no exchange has sent."""

    is_kept = False

    def keep(self) -> UpdateSums:
        """Return nothing to copy."""
        return self

    def write(self, scale: float | None = None) -> None:
        """Refuse: an update without its sums would leave other gradients in place."""
        raise AssertionError("this update has no sums")


NO_SUMS = NoSums()


@dataclass(frozen=True)
class Update:
    """A committed update, ready to be applied: its sums and what the trainer counts of it.

    Attributes:
        step: number of the update, from 1.
        tokens: trained by it.
        lineage: of the state after it.
        scale: factor that makes the token-weighted mean of the sums.
        entries: the batches that it was made of.
        readers: the groups that were ready at it (see `Ledger.readers`).
        sums: the update's own; they last until the next exchange begins, unless the update is `kept`.
    """

    step: int
    tokens: int
    lineage: int
    scale: float
    entries: list[Entry]
    readers: list[Process]
    sums: UpdateSums = field(default=NO_SUMS, compare=False)

    def kept(self) -> Update:
        """Return this update with a copy of its sums, for a group that applies it later."""
        return replace(self, sums=self.sums.keep())

    def applied(self) -> Update:
        """Return this update without its sums, whose memory is free then."""
        return replace(self, sums=NO_SUMS)

    @property
    def slots(self) -> list[int]:
        """Return the slots whose data it was made of."""
        return sorted({entry.slot for entry in self.entries})


@dataclass(frozen=True)
class Round:
    """A round that worked on all ranks of this group: the quorum, its members' rows and the verdict on them.

    `entries` are the batches that the ready groups' gradients are made of, `sums` those of the gradients.
    """

    quorum: Quorum
    rows: Sequence[Row]
    verdict: Verdict
    entries: list[Entry]
    sums: UpdateSums = field(default=NO_SUMS, compare=False)

    @property
    def lineage(self) -> int:
        """Return the lineage of the holders' state."""
        return self.rows[self.verdict.holders[0]].lineage

    @property
    def asked_for(self) -> bool:
        """True if a member asks for the state: the holders show their digests in the next round."""
        return any(not row.has_state and row.donor < 0 for row in self.rows)

    def slots(self, ranks: Sequence[int]) -> list[int]:
        """Return the slots of `ranks`."""
        return [self.quorum.slots[rank] for rank in ranks]

    @property
    def readers(self) -> list[Process]:
        """Return the groups that train on."""
        return [self.quorum.processes[rank] for rank in self.verdict.ready]

    def update(self, nominal_tokens: int) -> Update:
        """Return the update that the round is, if `is_update` says that it is one.

        Args:
            nominal_tokens: tokens of a step with all groups present, by which local losses are divided.
        """
        step = self.verdict.step + 1
        batches = [(entry.slot, entry.first_batch, entry.num_batches) for entry in self.entries]
        return Update(
            step=step,
            tokens=self.verdict.tokens,
            lineage=descend(self.lineage, self.quorum.key, step, f"{self.slots(self.verdict.contributors)}{batches}"),
            scale=nominal_tokens / self.verdict.valid_tokens,
            entries=self.entries,
            readers=self.readers,
            sums=self.sums,
        )


@dataclass(frozen=True)
class Broken:
    """A round that did not work on all ranks of this group.

    `spoiled` says that a rank of this group had put gradients into it that are not finite.
    """

    error: str
    spoiled: bool = False
