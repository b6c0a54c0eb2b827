# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A replica group's name at the lighthouse, and the choice of a quorum's members by their names.

A quorum from the lighthouse is a list of names. The lighthouse admits every process that asks, and
believes any step that a process claims. So each group chooses its peers from the list by itself: of
each slot the newest process, if it has the same job and the same config as this group. The name
contains all facts that this choice needs.

All members read the same list, even if some of them cannot reach each other. So a name also
contains a *report* of the groups that its own group cannot reach. From the reports, all members
compute the same largest set of groups that all reach each other.

A name ends with a seal, which only a process with the run's token can make. A name without a valid
seal is ignored: it may claim any age, job and slot, and could make every group end.

See docs/membership.md.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from titan_ft.protocol.errors import (
    ConfigMismatchError,
    ForeignMemberError,
    ReplacedError,
    UnknownTokenError,
)
from titan_ft.protocol.independent import find_heaviest
from titan_ft.protocol.shape import Difference, shape_differences
from titan_ft.system.seal import is_seal, seal
from titan_ft.system.text import printable

GroupProcess: TypeAlias = tuple[int, float]
"""One attempt of a replica group: its slot, and its start in Unix seconds. Unlike the name of the
group, it does not change during the attempt."""

_PREFIX = "titan_ft"  # prefix of all names
_ID_SEPARATOR = "/"
_NAME_LETTERS = 100  # number of letters of a name that an error shows
_SHORT_LENGTH = 8  # number of characters of a process's unique name in a report
_SEAL_PURPOSE = "member"
UNSEALED = "its name has no valid seal: a stranger's, or another TITAN_FT_TOKEN or titan_ft version"
"""The reason for which a name without a valid seal is ignored."""


@dataclass(frozen=True)
class LostLinks:
    """The report in a name: the groups that the name's group cannot reach.

    Attributes:
        step: committed updates in the group's state; 0 = the group must heal.
        dead: `Member.short` of the groups that cannot be reached, sorted.
    """

    step: int
    dead: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """One replica group's name at the lighthouse.

    Attributes:
        slot: the group's slot.
        started: start of the group's process, in Unix seconds.
        unique: a text that differs for each process. A process also gets another one when it comes
            back after dead links (`renamed`).
        config: hex hash of the settings that must be equal in all groups.
        job: the job's name; may be empty.
        store: host:port of the group's TCPStore.
        shape: everything else that must be equal in all groups (see `titan_ft.protocol.shape`).
        edition: number of times that this process has changed its name.
        report: the groups that this group cannot reach; None = it has nothing to report.
        token: the run's shared secret, which seals the name. It is not a part of the name.
    """

    slot: int
    started: float
    unique: str
    config: str
    job: str = ""
    store: str = ""
    shape: str = ""
    edition: int = 0
    report: LostLinks | None = None
    token: str = field(default="", compare=False, repr=False)  # a log line must not show it

    @functools.cached_property
    def replica_id(self) -> str:
        """The name in the form of torchft's replica id.

        The slot has a fixed width, so that torchft's order by id is the order by slot.
        """
        last = f"{self.edition}"
        if self.report is not None:
            last += f":{self.report.step}:{','.join(self.report.dead)}"
        parts = (
            _PREFIX,
            f"{self.slot:06d}",
            f"{self.started:.6f}",
            self.unique,
            self.config,
            self.job,
            self.store,
            self.shape,
            last,
        )
        text = _ID_SEPARATOR.join(parts)
        return _ID_SEPARATOR.join((text, seal(self.token, _SEAL_PURPOSE, text)))

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # Each step brings the same names, one for each group.
    def parse(replica_id: str, token: str) -> Member:
        """Decode `replica_id`.

        Raises:
            ValueError: the text does not name a replica group of the run with this token.
        """
        text, _, found = replica_id.rpartition(_ID_SEPARATOR)
        if not is_seal(found, token, _SEAL_PURPOSE, text):
            raise ValueError(f"not the name of a replica group of this run: {replica_id!r}")
        malformed = ValueError(f"not the name of a titan_ft replica group: {replica_id!r}")
        try:
            _, slot, started, unique, config, job, store, shape, last = text.split(_ID_SEPARATOR)
            edition, *facts = last.split(":")
            report = None
            if facts:
                step, dead = facts[0], facts[1]
                report = LostLinks(int(step), tuple(dead.split(",")))
            member = Member(
                int(slot),
                float(started),
                unique,
                config,
                job,
                store,
                shape,
                int(edition),
                report,
                token,
            )
        except (ValueError, IndexError):
            raise malformed from None
        # Refuse other spellings of the same values, and a start that is infinite or not a number.
        if member.replica_id != replica_id or not math.isfinite(member.started):
            raise malformed
        return member

    @property
    def age(self) -> tuple[float, int, str]:
        """Sort key: the oldest process first, and the older name of one process first."""
        return self.started, self.edition, self.unique

    @property
    def process(self) -> GroupProcess:
        """The slot and the start of this process, which stay when its name changes."""
        return self.slot, self.started

    @property
    def short(self) -> str:
        """The beginning of `unique`, by which other groups' reports name this process."""
        return self.unique[:_SHORT_LENGTH]

    def reporting(self, step: int, dead: Iterable[Member]) -> Member:
        """Return this process's next name, with a report of the groups that it cannot reach."""
        report = LostLinks(step, tuple(sorted({member.short for member in dead})))
        return replace(self, edition=self.edition + 1, report=report)

    def renamed(self, unique: str) -> Member:
        """Return this process's next name, without a report.

        Earlier reports of other groups do not apply to the new name.
        """
        return replace(self, unique=unique, edition=self.edition + 1, report=None)

    def has_reported(self, other: Member) -> bool:
        """Return True if this group's report names `other`."""
        return self.report is not None and other.short in self.report.dead


def known_members(replica_ids: Iterable[str], token: str) -> list[Member]:
    """Return the replica groups of the run with this token among `replica_ids`."""
    members = []
    for replica_id in replica_ids:
        with contextlib.suppress(ValueError):
            members.append(Member.parse(replica_id, token))
    return members


def members_of_job(own: Member, replica_ids: Iterable[str]) -> list[Member]:
    """Return the groups among `replica_ids` that could be in an exchange with `own`."""
    members = known_members(replica_ids, own.token)
    return [member for member in members if _kind(member) == _kind(own)]


@dataclass(frozen=True)
class Quorum:
    """The members of one exchange.

    Attributes:
        key: name of this quorum among all quorums of the job.
        rank: number of this group in the process group.
        members: the groups in the quorum, in the order of their ranks.
        max_step: largest number of committed updates that a member reported.
        error: why the process group could not be built; None = it was built. After an error the
            exchange fails at once, and is repeated in the next quorum.
        requested_at: time of this rank's request, in seconds of this process's clock.
        answered_at: time of the lighthouse's answer, by the same clock.
        connected_at: time at which the process group was built, by the same clock.
    """

    key: str
    rank: int
    members: tuple[Member, ...]
    max_step: int
    error: str | None = None
    requested_at: float = field(default=0.0, compare=False)
    answered_at: float = field(default=0.0, compare=False)
    connected_at: float = field(default=0.0, compare=False)

    @property
    def slots(self) -> list[int]:
        """The members' slots in rank order."""
        return [member.slot for member in self.members]

    @property
    def processes(self) -> list[GroupProcess]:
        """The members' processes in rank order."""
        return [member.process for member in self.members]


@dataclass(frozen=True)
class Admission:
    """The groups of a lighthouse's quorum that make the exchange, as each of them computes it.

    Attributes:
        members: the groups of this job, in rank order. If some groups cannot reach each other, this
            is the largest set of groups that all reach each other. Then this group may be missing.
        strangers: names of other jobs, configs or tokens, each with the reason. A process that was
            replaced by a newer one of its slot is neither a member nor a stranger.
        cut_off: the groups that this group cannot reach, by its own report or by theirs.
        accusers: the groups in `cut_off` that this group's own report does not name.
        settled: False if one end of a dead link has not reported its step yet. Then `members` are
            all groups, and they cannot make an exchange.
    """

    members: tuple[Member, ...]
    strangers: dict[str, str] = field(default_factory=dict)
    cut_off: tuple[Member, ...] = ()
    accusers: tuple[Member, ...] = ()
    settled: bool = True


def admit(own: Member, replica_ids: Iterable[str], *, is_first: bool = False) -> Admission:
    """Choose the members for an exchange of `own`, by the names in a quorum.

    The oldest process has the right job, config and shape. A majority does not decide, because many
    newcomers must not outvote the group that has the state. Of two processes of one slot, the newer
    one is chosen.

    Args:
        replica_ids: the names in the quorum.
        is_first: True if this is the first quorum of `own`.

    Raises:
        UnknownTokenError: in its first quorum, `own` would start alone beside groups of another
            token.
        ForeignMemberError: the lighthouse serves another job, which was there first.
        ConfigMismatchError: the oldest member of the job has another config or shape than `own`.
        ReplacedError: the group of `own` was started again elsewhere.
    """
    groups = []
    strangers = {}
    for replica_id in sorted(replica_ids):
        try:
            groups.append(Member.parse(replica_id, own.token))
        except ValueError:
            strangers[replica_id] = UNSEALED
    assert own in groups, f"{own} is not in its own quorum"
    if is_first:
        _check_token(own, groups, strangers)
    first = min(groups, key=lambda member: member.age)
    _check_job(own, first, groups)
    alike = [member for member in groups if _kind(member) == _kind(first)]
    _check_kind(own, first, alike)
    for member in groups:
        reason = _find_mismatch(own, member)
        if reason:
            strangers[member.replica_id] = reason
    newest: dict[int, Member] = {}
    for member in sorted(alike, key=lambda member: member.age):
        newest[member.slot] = member
    if newest[own.slot] != own:
        raise ReplacedError(
            f"replica group {own.slot} was started again elsewhere; this older process ends: "
            "fault_tolerance.replica_id must be unique among running groups",
        )
    members = tuple(newest[slot] for slot in sorted(newest))
    dead = dead_links(members)
    if not dead:
        return Admission(members, strangers)
    unreachable = dead.get(members.index(own), set())
    cut_off = tuple(members[index] for index in sorted(unreachable))
    accusers = tuple(member for member in cut_off if not own.has_reported(member))
    settled = _have_both_ends_reported(members, dead)
    if settled:
        members = largest_clique(members, dead)
    return Admission(members, strangers, cut_off, accusers, settled)


def _find_mismatch(own: Member, member: Member) -> str:
    """Return why `own` cannot exchange with a member; empty = it can."""
    if member.job != own.job:
        return f"it belongs to job {member.job!r}, this group to {own.job!r}"
    differences = _shape_differences(own, member)
    if differences:
        theirs = _list(difference.other for difference in differences)
        ours = _list(difference.own for difference in differences)
        return f"it has {theirs}, this group {ours}"
    if member.config != own.config:
        return f"it runs another config (digest {member.config}; ours is {own.config})"
    return ""


def _have_both_ends_reported(members: Sequence[Member], dead: Mapping[int, Set[int]]) -> bool:
    """Return True if both ends of each dead link have reported it.

    Before that, the groups cannot decide which of them continue: a group that has not reported its
    step yet may have the only state.
    """
    for index, others in dead.items():
        report = members[index].report
        if report is None:
            return False
        names = {members[other].short for other in others}
        if not names.issubset(report.dead):
            return False
    return True


def dead_links(members: Sequence[Member]) -> dict[int, set[int]]:
    """Return which members cannot reach each other, because one of the two has reported it.

    Returns:
        For the index of a member in `members`, the indices of those that it cannot reach. Members
        without a dead link have no entry. These are indices and not members, because 300 groups
        have 45,000 links, and it takes long to hash a member.
    """
    indices = {member.short: index for index, member in enumerate(members)}
    dead: dict[int, set[int]] = {}
    for index, member in enumerate(members):
        if member.report is None:
            continue
        for short in member.report.dead:
            other = indices.get(short)
            if other is None or other == index:
                continue
            dead.setdefault(index, set()).add(other)
            dead.setdefault(other, set()).add(index)
    return dead


def largest_clique(
    members: Sequence[Member],
    dead: Mapping[int, Set[int]],
) -> tuple[Member, ...]:
    """Return the best set of members that all reach each other.

    The rules for the best set. Each rule decides only if the rules before it leave several sets:

    1. Most members have the job's state. A state with one update less than the latest counts as the
       job's state as well. Suppose that an exchange worked for one group and broke for the others.
       Then this one group must not exclude all of the others.
    2. The set has most members.
    3. Most members have the very latest state.
    4. The members have the lowest slots.

    Args:
        members: in the order of their slots.
        dead: from `dead_links`. Each member with a dead link has a report.
    """
    steps: dict[int, int] = {}
    for index in sorted(dead):
        report = members[index].report
        assert report is not None, "both ends of each dead link have reported it"
        steps[index] = report.step
    latest = max(steps.values())
    # A member's weight is a number of three digits, one for each of the first three rules. The
    # weight of a set is the sum over its members. The base is so large that no digit overflows in
    # the sum. So of two sets, the first digit that differs decides.
    base = len(steps) + 1
    weights: dict[int, int] = {}
    for index, step in steps.items():
        holds = _holds_state(step, latest)
        is_latest = step == latest
        weights[index] = (holds * base + 1) * base + is_latest
    dropped = set(dead).difference(find_heaviest(weights, dead))
    return tuple(member for index, member in enumerate(members) if index not in dropped)


def _holds_state(step: int, latest: int) -> bool:
    """Return True if a state after `step` updates counts as the job's state.

    Args:
        latest: largest number of updates of a group.
    """
    # A group at step 0 must heal, unless the job has made no update.
    if step == 0 and latest > 0:
        return False
    return step >= latest - 1


def _check_token(own: Member, groups: Sequence[Member], unsealed: Iterable[str]) -> None:
    """Refuse to start alone beside groups whose names cannot be verified.

    These groups may belong to the same run, with another token. Then this group would train a
    second time, and save into the same folder of checkpoints. If this group meets another group of
    its job, it continues: a stranger without the token must not be able to end it.
    """
    if any(member.slot != own.slot for member in groups):
        return
    for name in unsealed:
        if not name.startswith(_PREFIX + _ID_SEPARATOR):
            continue
        raise UnknownTokenError(
            "this group and those at the lighthouse must have the same TITAN_FT_TOKEN and version "
            f"of titan_ft, got {printable(name, _NAME_LETTERS)} with a seal of another "
            "TITAN_FT_TOKEN or version; give all groups of a run the same ones, or each job a "
            "lighthouse of its own",
        )


def _check_job(own: Member, first: Member, groups: Sequence[Member]) -> None:
    """Refuse a lighthouse at which another job was first: the jobs would wait for each other."""
    if own.job != first.job:
        slots = _slots(member for member in groups if member.job == first.job)
        raise ForeignMemberError(
            f"the lighthouse serves job {first.job!r} (groups {slots}), which was there before "
            f"this group of job {own.job!r}; give each job its own lighthouse with "
            "fault_tolerance.lighthouse / TORCHFT_LIGHTHOUSE, or groups of one job the same "
            "fault_tolerance.job_id",
        )


def _kind(member: Member) -> tuple[str, str, str]:
    """Return the facts that members must have in common to make an exchange."""
    return member.job, member.config, member.shape


def _check_kind(own: Member, right: Member, alike: Sequence[Member]) -> None:
    """Refuse to exchange with groups of another config or shape.

    Such an exchange could end those groups instead of this one.
    """
    differences = _shape_differences(own, right)
    if differences:
        ours = _list(difference.own for difference in differences)
        theirs = _list(difference.other for difference in differences)
        remedies = _list(difference.remedy for difference in differences)
        raise ConfigMismatchError(
            f"this group has {ours}; the job's groups {_slots(alike)} have {theirs}: start it with "
            f"{remedies}, or, if it belongs to another job, with another lighthouse",
        )
    if own.config != right.config:
        raise ConfigMismatchError(
            f"this group's config (digest {own.config}) must equal that of groups {_slots(alike)} "
            f"({right.config}); start it with their TOML and flags, or, if it belongs to another "
            "job, with another lighthouse",
        )


def _shape_differences(own: Member, other: Member) -> list[Difference]:
    return shape_differences(own.shape, other.shape, same_config=own.config == other.config)


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _slots(members: Iterable[Member]) -> list[int]:
    return sorted({member.slot for member in members})
