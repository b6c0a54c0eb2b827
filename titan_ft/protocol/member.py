# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A replica group's name at the lighthouse, and which of a quorum's names belong together.

A lighthouse admits every process that asks, and believes the step that it claims. Each group therefore picks its peers
out of the reply by their names: the same job, the same config, the newest process of each slot. All members read the
same reply, even if they cannot reach each other: so a name also lists whom its group cannot reach, and each member
computes the same largest set of groups that all reach each other.

A name ends with a seal, which only a process with the run's token can make. A name with another seal, or without one,
is set aside: it may claim any age, job and slot, and could otherwise end every group.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from titan_ft.protocol.errors import ConfigMismatchError, ForeignMemberError, ReplacedError
from titan_ft.protocol.shape import Difference, shape_differences
from titan_ft.system.seal import is_seal, seal

Process: TypeAlias = tuple[int, float]
"""A replica group's process: its slot, and when it began, in Unix seconds. What it is called may change."""

_ID_SEPARATOR = "/"
_SHORT = 8  # characters of a process's unique name that a report gives
_PURPOSE = "member"  # of a name's seal
UNSEALED = (
    "its name has no valid seal: it is a stranger's, or it has another TITAN_FT_TOKEN or another version of titan_ft"
)
"""Why a name is set aside without a look at what it says. It is one reason for all such names."""


@dataclass(frozen=True)
class LostLinks:
    """What a group adds to its name when it cannot reach others.

    Attributes:
        step: committed updates that it holds; 0 = it has to heal.
        dead: `Member.short` of those that it cannot reach, sorted.
    """

    step: int
    dead: tuple[str, ...]


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
        shape: what else must be equal (see `titan_ft.protocol.shape`).
        edition: how often this process has changed its name.
        report: whom the group cannot reach; None = it has nothing to report.
        token: the run's shared secret, which seals the name. It is no part of the name.
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
        """Encode as torchft's replica id; a fixed-width slot keeps torchft's order by id the order by slot."""
        slot, started, last = f"{self.slot:06d}", f"{self.started:.6f}", f"{self.edition}"
        if self.report is not None:
            last += f":{self.report.step}:{','.join(self.report.dead)}"
        text = _ID_SEPARATOR.join(
            ("titan_ft", slot, started, self.unique, self.config, self.job, self.store, self.shape, last)
        )
        return _ID_SEPARATOR.join((text, seal(self.token, _PURPOSE, text)))

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # the same names come with each step, one of every group
    def parse(replica_id: str, token: str) -> Member:
        """Decode `replica_id`.

        Raises:
            ValueError: it names no titan_ft replica group of the run with this token.
        """
        text, _, found = replica_id.rpartition(_ID_SEPARATOR)
        if not is_seal(found, token, _PURPOSE, text):
            raise ValueError(f"not the name of a replica group of this run: {replica_id!r}")
        try:
            _, slot, started, unique, config, job, store, shape, last = text.split(_ID_SEPARATOR)
            edition, *facts = last.split(":")
            report = LostLinks(int(facts[0]), tuple(facts[1].split(","))) if facts else None
            member = Member(int(slot), float(started), unique, config, job, store, shape, int(edition), report, token)
        except (ValueError, IndexError):
            member = None
        if member is None or member.replica_id != replica_id or not math.isfinite(member.started):
            raise ValueError(f"not the name of a titan_ft replica group: {replica_id!r}")
        return member

    @property
    def age(self) -> tuple[float, int, str]:
        """Return a key that sorts the oldest process first, and of one process the older name."""
        return self.started, self.edition, self.unique

    @property
    def process(self) -> Process:
        """Return which process of which slot this is, whatever its name is by now."""
        return self.slot, self.started

    @property
    def short(self) -> str:
        """Return what reports call this process."""
        return self.unique[:_SHORT]

    def reporting(self, step: int, dead: Iterable[Member]) -> Member:
        """Return this process's next name, with a report of whom it cannot reach."""
        report = LostLinks(step, tuple(sorted({member.short for member in dead})))
        return replace(self, edition=self.edition + 1, report=report)

    def renamed(self, unique: str) -> Member:
        """Return this process's next name, without a report; earlier reports of others do not mean it."""
        return replace(self, unique=unique, edition=self.edition + 1, report=None)

    def has_reported(self, other: Member) -> bool:
        """Say whether this group's report names `other`."""
        return self.report is not None and other.short in self.report.dead


def known_members(replica_ids: Iterable[str], token: str) -> list[Member]:
    """Return those of `replica_ids` that name replica groups of the run with this token."""
    members = []
    for replica_id in replica_ids:
        with contextlib.suppress(ValueError):
            members.append(Member.parse(replica_id, token))
    return members


def members_of_job(own: Member, replica_ids: Iterable[str]) -> list[Member]:
    """Return those of `replica_ids` that could be in an exchange with `own`."""
    return [member for member in known_members(replica_ids, own.token) if _kind(member) == _kind(own)]


@dataclass(frozen=True)
class Quorum:
    """The members of one exchange.

    Attributes:
        key: names this quorum among all of the job.
        rank, members: in the process group's order.
        max_step: largest number of committed updates that a member reported.
        error: why the process group could not be built (None when it stands): the exchange then fails at once and is
            repeated in the next quorum.
        asked, answered, ready: when this rank asked for it, when the answer came, and when the process group stood;
            seconds of this process's clock.
    """

    key: str
    rank: int
    members: tuple[Member, ...]
    max_step: int
    error: str | None = None
    asked: float = field(default=0.0, compare=False)
    answered: float = field(default=0.0, compare=False)
    ready: float = field(default=0.0, compare=False)

    @property
    def slots(self) -> list[int]:
        """Return the members' slots in rank order."""
        return [member.slot for member in self.members]

    @property
    def processes(self) -> list[Process]:
        """Return the members' processes in rank order."""
        return [member.process for member in self.members]


@dataclass(frozen=True)
class Admission:
    """Which members of a lighthouse's quorum make the exchange.

    Attributes:
        members: the groups of this job, in rank order; all of them come to the same list by themselves. Of groups that
            cannot all reach each other it is the largest part that can; this group may not be in it.
        strangers: names that are set aside, each with the reason. A process that was replaced is in neither.
        cut_off: those that this group cannot reach, by its own report or theirs.
        accusers: those of them that this group's own report does not name.
        settled: False: a group that another one cannot reach has yet to report the step that it holds. `members` are
            all of them then, and make no exchange.
    """

    members: tuple[Member, ...]
    strangers: dict[str, str] = field(default_factory=dict)
    cut_off: tuple[Member, ...] = ()
    accusers: tuple[Member, ...] = ()
    settled: bool = True


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
            groups.append(Member.parse(replica_id, own.token))
        except ValueError:
            strangers[replica_id] = UNSEALED
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
    members = tuple(newest[slot] for slot in sorted(newest))
    dead = dead_links(members)
    if not dead:
        return Admission(members, strangers)
    cut_off = tuple(member for member in members if frozenset((own, member)) in dead)
    accusers = tuple(member for member in cut_off if not own.has_reported(member))
    # Both ends report before anybody decides who goes on: the one that has not may hold the only state.
    settled = all(one.has_reported(other) and other.has_reported(one) for one, other in map(tuple, dead))
    return Admission(largest_clique(members, dead) if settled else members, strangers, cut_off, accusers, settled)


def dead_links(members: Sequence[Member]) -> set[frozenset[Member]]:
    """Return the pairs of `members` of which one has reported that it cannot reach the other."""
    reporters = [member for member in members if member.report is not None]
    known = {member.short: member for member in members} if reporters else {}
    return {
        frozenset((reporter, known[short]))
        for reporter in reporters
        for short in (reporter.report.dead if reporter.report is not None else ())
        if short in known and known[short] != reporter
    }


def largest_clique(members: Sequence[Member], dead: set[frozenset[Member]]) -> tuple[Member, ...]:
    """Return those that go on when the links `dead` are: all of them reach each other.

    As many as possible hold the job's state, then as many as possible are there at all, then as many as possible hold
    the very latest state, then the lower slots. One update less counts as the state as well: a group that has completed
    an exchange which broke for the others must not bring all of those to a halt.

    Args:
        members: in the order of their slots.
        dead: both members of each have a report.
    """
    # Here: it takes a tenth of a second, and nearly no run ever needs it.
    import networkx  # type: ignore[import-untyped]  # it has no types of its own

    cut_off = [member for member in members if any(member in link for link in dead)]
    steps: Mapping[Member, int] = {member: member.report.step for member in cut_off if member.report is not None}
    latest, count = max(steps.values()), len(cut_off)
    links = networkx.Graph()
    for place, member in enumerate(cut_off):
        step = steps[member]
        holds = step >= latest - 1 and (step > 0 or latest == 0)
        # Digits of one number, each with room for the sum over all members, so that the first that differs decides.
        weight = ((holds * (count + 1) + 1) * (count + 1) + (step == latest)) << count
        links.add_node(member, weight=weight + (1 << (count - 1 - place)))
    links.add_edges_from(tuple(link) for link in dead)
    chosen: set[Member] = set()
    for part in networkx.connected_components(links):  # of groups far apart each pair would be looked at
        reach = networkx.complement(links.subgraph(part))
        reach.add_nodes_from(links.subgraph(part).nodes(data=True))
        chosen.update(networkx.max_weight_clique(reach, "weight")[0])
    return tuple(member for member in members if member in chosen or member not in links)


def _check_job(own: Member, first: Member, groups: Sequence[Member]) -> None:
    """Refuse a lighthouse at which another job was first: the two would wait for each other in every step."""
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
    """Refuse to exchange with groups of another config or shape: that could end those groups instead of this one."""
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
