# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A replica group's name at the lighthouse, and which of a quorum's names belong together.

A lighthouse takes in whoever asks and believes the steps that they claim. Each group therefore picks its own kind out
of the reply by what the names say: the same job, the same config, the newest process of each slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titan_ft.replica.errors import ConfigMismatchError, ForeignMemberError, ReplacedError
from titan_ft.replica.shape import Difference, shape_differences

_ID_SEPARATOR = "/"


@dataclass(frozen=True)
class Member:
    """One replica group's name at the lighthouse.

    Attributes:
        slot: the group's replica id.
        started: when its process began, in Unix seconds.
        unique: differs for each process.
        config: hex hash of the settings that must be equal in all groups.
        job: the job's name; may be empty.
        store: host:port of the group's TCPStore.
        shape: what else must be equal (see `titan_ft.replica.shape`).
    """

    slot: int
    started: float
    unique: str
    config: str
    job: str = ""
    store: str = ""
    shape: str = ""

    @property
    def replica_id(self) -> str:
        """Encode as torchft's replica id; a fixed-width slot keeps torchft's order by id the order by slot."""
        slot, started = f"{self.slot:06d}", f"{self.started:.6f}"
        return _ID_SEPARATOR.join(
            ("titan_ft", slot, started, self.unique, self.config, self.job, self.store, self.shape)
        )

    @staticmethod
    def parse(replica_id: str) -> Member:
        """Decode `replica_id`.

        Raises:
            ValueError: it names no titan_ft replica group.
        """
        try:
            _, slot, started, unique, config, job, store, shape = replica_id.split(_ID_SEPARATOR)
            member = Member(int(slot), float(started), unique, config, job, store, shape)
        except ValueError:
            member = None
        if member is None or member.replica_id != replica_id or not math.isfinite(member.started):
            raise ValueError(f"not the name of a titan_ft replica group: {replica_id!r}")
        return member

    @property
    def age(self) -> tuple[float, str]:
        """Return a key that sorts the oldest process first."""
        return self.started, self.unique


@dataclass(frozen=True)
class Quorum:
    """The members of one exchange.

    Attributes:
        key: names this quorum among all of the job.
        rank, members: in the process group's order.
        max_step: largest number of committed updates that a member reported.
        behind: whether this group reported fewer. Without strangers only: what they report says nothing, and the
            exchange's rows settle it.
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


@dataclass(frozen=True)
class Admission:
    """Who of a lighthouse's quorum makes the exchange.

    Attributes:
        members: the groups of this job, in rank order; all of them come to the same list by themselves.
        strangers: names that are set aside, each with the reason. A process that was replaced is in neither.
    """

    members: tuple[Member, ...]
    strangers: dict[str, str] = field(default_factory=dict)


def admit(own: Member, replica_ids: Iterable[str]) -> Admission:
    """Pick the members that `own` exchanges with out of a quorum's names.

    The oldest process says which job, which config and which shape is right: newcomers do not outvote who has the
    state. Of two processes of one slot the newer one counts.

    Raises:
        ForeignMemberError: the lighthouse serves another job, which was there first.
        ConfigMismatchError: `own` runs another config than the oldest member of its job, or has another shape.
        ReplacedError: `own` was started again elsewhere.
    """
    groups, strangers = [], {}
    for replica_id in sorted(replica_ids):
        try:
            groups.append(Member.parse(replica_id))
        except ValueError:
            strangers[replica_id] = "it is not a titan_ft replica group"
    assert own in groups, f"{own} is not in its own quorum"
    first = min(groups, key=lambda member: member.age)
    _check_job(own, first, groups)
    alike = [member for member in groups if _kind(member) == _kind(first)]
    _check_kind(own, first, alike)
    for member in groups:
        if member.job != own.job:
            strangers[member.replica_id] = f"it belongs to job {member.job!r}, this group to {own.job!r}"
        elif differences := _shape_differences(own, member):
            theirs, ours = _list(d.other for d in differences), _list(d.own for d in differences)
            strangers[member.replica_id] = f"it has {theirs}, this group {ours}"
        elif member.config != own.config:
            strangers[member.replica_id] = f"it runs another config (digest {member.config}; ours is {own.config})"
    newest = {member.slot: member for member in sorted(alike, key=lambda member: member.age)}
    if newest[own.slot] != own:
        raise ReplacedError(
            f"replica group {own.slot} was started again elsewhere; this older process ends: "
            "fault_tolerance.replica_id must be unique among running groups"
        )
    return Admission(tuple(newest[slot] for slot in sorted(newest)), strangers)


def _check_job(own: Member, first: Member, groups: Sequence[Member]) -> None:
    """Two jobs at one lighthouse would wait for each other in every step: the later one ends."""
    if own.job != first.job:
        slots = _slots(member for member in groups if member.job == first.job)
        raise ForeignMemberError(
            f"the lighthouse serves job {first.job!r} (groups {slots}), which was there before this group of job "
            f"{own.job!r}; give each job its own lighthouse with fault_tolerance.lighthouse / TORCHFT_LIGHTHOUSE, or "
            "groups of one job the same fault_tolerance.job_id"
        )


def _kind(member: Member) -> tuple[str, str, str]:
    """Return what members must have in common to make an exchange."""
    return member.job, member.config, member.shape


def _check_kind(own: Member, right: Member, alike: Sequence[Member]) -> None:
    """A group of another config or shape must not exchange a byte with the others: it would end them, not itself."""
    if differences := _shape_differences(own, right):
        raise ConfigMismatchError(
            f"this group has {_list(d.own for d in differences)}; the job's groups {_slots(alike)} have "
            f"{_list(d.other for d in differences)}: start it with {_list(d.remedy for d in differences)}, or, if it "
            "belongs to another job, with another lighthouse"
        )
    if own.config != right.config:
        raise ConfigMismatchError(
            f"this group's config (digest {own.config}) must equal that of groups {_slots(alike)} ({right.config}); "
            "start it with their TOML and flags, or, if it belongs to another job, with another lighthouse"
        )


def _shape_differences(own: Member, other: Member) -> list[Difference]:
    return shape_differences(own.shape, other.shape, same_config=own.config == other.config)


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _slots(members: Iterable[Member]) -> list[int]:
    return sorted({member.slot for member in members})
