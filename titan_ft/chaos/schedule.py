# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide when which fault hits whom; same plan, same seed, same groups up: same decisions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from titan_ft.chaos.plan import Limits, Listed, Plan, Rule
from titan_ft.faults.fault import Fault, Need
from titan_ft.faults.inside import CutLink
from titan_ft.run.events import Target


@dataclass(frozen=True)
class Shot:
    """One fault that the schedule wants injected."""

    number: int
    """Place in the schedule, from 0."""
    time: float
    """Seconds since the schedule's start."""
    fault: Fault
    seed: int
    """Source of all random choices about this shot: its target here, a bit to flip in the worker."""
    replica: int | None = None
    """The group to hit; None lets the seed choose."""
    rank: int | None = None
    """The rank to hit; None lets the seed choose."""

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """Return fault, number and seed, by which the events of agents name a shot."""
        return self.fault.name, self.number, self.seed


@dataclass(frozen=True)
class GroupView:
    """What is known of a group."""

    replica: int
    num_ranks: int
    up: bool
    """It contributes, and no fault is under way there."""


@dataclass(frozen=True)
class View:
    """What is known of the job."""

    groups: Mapping[int, GroupView]
    """All groups of the job by replica, those that are down too."""
    available: frozenset[Need]
    """The needs of faults that the job meets."""


@dataclass(frozen=True)
class Injection:
    """A shot with its targets."""

    shot: Shot
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class Refusal:
    """Why a shot must not be injected now."""

    reason: str
    final: bool
    """It never can be in this job; otherwise it can be tried again later."""


def shots(plan: Plan) -> Iterator[Shot]:
    """Yield the plan's shots in order of time, perhaps without end. The plan's seed decides all that is random."""
    streams = [_of_rule(plan.seed, index, rule) for index, rule in enumerate(plan.rules)]
    # Of shots at one time the earlier rule's comes first: heapq.merge is stable.
    for number, shot in enumerate(heapq.merge(*streams, key=lambda shot: shot.time)):
        if plan.stop_after_seconds and shot.time > plan.stop_after_seconds:
            return
        yield replace(shot, number=number)


def _of_rule(seed: int, index: int, rule: Rule | Listed) -> Iterator[Shot]:
    """Yield the shots of one rule, numbered within it, each with a seed of its own.

    That seed follows from the plan's seed, the place of the rule and the place within the rule: it depends neither on
    whether earlier shots were injected nor on other rules.
    """
    entries = rule.entries(lambda number: _source(seed, index, number, "when and what"))
    for number, entry in enumerate(entries):
        own = _source(seed, index, number).getrandbits(32)
        yield Shot(number, entry.at, entry.fault, own, entry.replica, entry.rank)


def _source(*parts: object) -> random.Random:
    """Return a source of random numbers that these parts determine, on each host and in each process."""
    # From text, because Python hashes text for this with SHA-512; the hash() of other objects differs by process.
    return random.Random("/".join(map(str, parts)))


def aim(shot: Shot, view: View, limits: Limits) -> Injection | Refusal:
    """Choose the targets of a shot, or say why there are none. The shot's seed decides all that is random."""
    impossible = next(_impossible(shot, view, limits), None)
    if impossible is not None:
        return Refusal(impossible, final=True)
    too_early = next(_too_early(shot, view, limits), None)
    if too_early is not None:
        return Refusal(too_early, final=False)
    if shot.fault.scope == "lighthouse":
        return Injection(shot, (Target(lighthouse=True),))
    return Injection(shot, tuple(Target(group.replica, _rank(shot, group)) for group in _choose(shot, view, limits)))


def _impossible(shot: Shot, view: View, limits: Limits) -> Iterator[str]:
    """Yield reasons for which the shot can never be injected in this job with these limits."""
    fault = shot.fault
    for need in Need:
        if need in fault.needs - view.available:
            yield need.missing
    beyond = limits.refusal(fault, shot.replica)
    if beyond is not None:
        yield beyond
    if not view.groups:
        return  # nothing of the job is known yet
    if len(view.groups) < fault.required_up:
        yield f"it needs {fault.required_up} groups, the job has {len(view.groups)}"
    if len(view.groups.keys() - set(limits.exempt)) < fault.num_targets:
        yield "all other groups are exempt"
    for replica in fault.groups_given(shot.replica):
        if replica not in view.groups:
            yield f"the job has no group {replica}; it has {', '.join(map(str, sorted(view.groups)))}"
    if shot.rank is None:
        return
    if shot.replica is None:
        if all(shot.rank >= group.num_ranks for group in view.groups.values()):
            yield f"no group has a rank {shot.rank}"
    elif shot.rank >= (num_ranks := view.groups[shot.replica].num_ranks):
        yield f"group {shot.replica} has no rank {shot.rank}; it has ranks 0 to {num_ranks - 1}"


def _too_early(shot: Shot, view: View, limits: Limits) -> Iterator[str]:
    """Yield reasons for which the shot cannot be injected as things are."""
    fault = shot.fault
    num_up = sum(group.up for group in view.groups.values())
    num_down = len(view.groups) - num_up
    if num_up < fault.required_up:
        yield f"it needs {fault.required_up} groups that are up, {num_up} of {len(view.groups)} are"
    num_under = num_down + fault.num_affected
    if fault.num_targets and num_under > limits.max_down:
        yield f"{num_under} groups would be down or under a fault, limits.max_down is {limits.max_down}"
    for replica in fault.groups_given(shot.replica):
        if not view.groups[replica].up:
            yield f"group {replica} is not up"
    if len(_choose(shot, view, limits)) < fault.num_targets:
        yield "no group is up that may be a target"


def _choose(shot: Shot, view: View, limits: Limits) -> list[GroupView]:
    """Return the groups to hit; fewer than the fault has targets when there are not enough that may be."""
    groups = _candidates(shot, view, limits)
    if not isinstance(shot.fault, CutLink):
        return groups[: shot.fault.num_targets]
    peer = shot.fault.peer
    ends = [group for group in groups if group.replica != peer][:1]
    others = _candidates(replace(shot, replica=peer), view, limits, draw="peer")
    return [*ends, *[group for group in others if group not in ends][:1]]


def _candidates(shot: Shot, view: View, limits: Limits, draw: str = "replica") -> list[GroupView]:
    """Return the groups that may be targets now, those to take first in front; each `draw` has an order of its own."""
    groups = [
        group
        for group in view.groups.values()
        if group.up
        and group.replica not in limits.exempt
        and shot.replica in (None, group.replica)
        and (shot.rank is None or shot.rank < group.num_ranks)
    ]
    if Need.CHECKPOINT in shot.fault.needs:
        # Only the first group that contributes saves; elsewhere the fault would do nothing.
        return sorted(groups, key=lambda group: group.replica)
    # Each group draws for itself: which others are up does not change the order of two groups, and so a replay that
    # finds another group down still agrees wherever it can.
    return sorted(groups, key=lambda group: _source(shot.seed, draw, group.replica).random())


def _rank(shot: Shot, group: GroupView) -> int | None:
    """Return the rank of a group to hit, or None for all of its ranks."""
    if shot.fault.scope != "rank" or shot.rank is not None:
        return shot.rank
    return _source(shot.seed, "rank").randrange(group.num_ranks)
