# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A replica group's name at the lighthouse, and what a set of such names means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_ft.replica.errors import ConfigMismatchError, ForeignMemberError, ReplacedError

_ID_SEPARATOR = "/"


@dataclass(frozen=True)
class Member:
    """One replica group's name at the lighthouse."""

    slot: int
    started: float
    unique: str
    config: str

    @property
    def replica_id(self) -> str:
        """Encode as torchft's replica id; a fixed-width slot keeps torchft's order by id the order by slot."""
        return _ID_SEPARATOR.join(("titan_ft", f"{self.slot:06d}", f"{self.started:.6f}", self.unique, self.config))

    @staticmethod
    def parse(replica_id: str) -> Member:
        """Decode `replica_id`.

        Raises:
            ForeignMemberError: another kind of job talks to this lighthouse.
        """
        try:
            name, slot, started, unique, config = replica_id.split(_ID_SEPARATOR)
            if name != "titan_ft":
                raise ValueError(name)
            return Member(int(slot), float(started), unique, config)
        except ValueError:
            raise ForeignMemberError(
                f"the lighthouse lists a member that is not a titan_ft replica group: {replica_id!r}; "
                "give each job its own lighthouse"
            ) from None


@dataclass(frozen=True)
class Quorum:
    """The members of one exchange.

    Attributes:
        key: names this quorum among all of the job.
        rank, members: in the process group's order.
        max_step: largest number of committed updates that a member reported.
        behind: whether this group reported fewer.
        error: why the process group could not be built (None when it stands): the exchange then fails at once and is
            repeated in the next quorum.
    """

    key: str
    rank: int
    members: tuple[Member, ...]
    max_step: int
    behind: bool
    error: str | None = None

    @property
    def slots(self) -> list[int]:
        """Return the members' slots in rank order."""
        return [member.slot for member in self.members]


def objection(own: Member, members: Sequence[Member]) -> str | None:
    """Find members that must not meet; they end by themselves. Returns why the quorum cannot be used, or None.

    Raises:
        ReplacedError: `own` was started again elsewhere.
        ConfigMismatchError: `own` runs another config than the oldest member. Newcomers do not outvote who has the
            state.
    """
    twice = []
    for member in members:
        if any(other.slot == member.slot and other.started > member.started for other in members):
            if member == own:
                raise ReplacedError(
                    f"replica group {own.slot} was started again elsewhere; this older process ends: "
                    "fault_tolerance.replica_id must be unique among running groups"
                )
            twice.append(member.slot)
    right = min(members, key=lambda member: member.started).config
    if own.config != right:
        others = [member.slot for member in members if member.config == right]
        raise ConfigMismatchError(
            f"this group's config (digest {own.config}) must equal that of groups {others} ({right}); start it with "
            "their TOML and flags"
        )
    wrong = [member.slot for member in members if member.config != right]
    if twice or wrong:
        return f"waiting for groups to leave: {twice} were started again, {wrong} run another config"
    return None
