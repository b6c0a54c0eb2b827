# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide which fault hits which target at which time.

The same plan and seed, with the same groups up, give the same decisions. Pure functions;
`ChaosRunner` calls them.
"""

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
    """Seconds since the start of the schedule."""
    fault: Fault
    seed: int
    """Seed of all random choices of this shot: its target, and in the worker the bit to flip."""
    replica: int | None = None
    """Slot of the target; None = the seed chooses."""
    rank: int | None = None
    """Rank of the target; None = the seed chooses."""

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """Fault, number and seed: the fields by which an agent's event names a shot."""
        return self.fault.name, self.number, self.seed


@dataclass(frozen=True)
class GroupView:
    """The known facts of a group."""

    replica: int
    num_ranks: int
    up: bool
    """True if the group contributes and no effect of a fault is left."""


@dataclass(frozen=True)
class View:
    """The known facts of the job."""

    groups: Mapping[int, GroupView]
    """All groups of the job by slot, also those that are down."""
    available: frozenset[Need]
    """Needs of faults that the job meets."""


@dataclass(frozen=True)
class Injection:
    """A shot with its targets."""

    shot: Shot
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class Refusal:
    """Why a shot cannot be injected now."""

    reason: str
    final: bool
    """True if the shot can never be injected in this job; False if a later attempt may succeed."""


def shots(plan: Plan) -> Iterator[Shot]:
    """Yield the plan's shots in the order of time, perhaps without end."""
    streams = [_shots_of_rule(plan.seed, index, rule) for index, rule in enumerate(plan.rules)]
    # heapq.merge is stable: of shots at the same time, that of the earlier rule comes first.
    in_order = heapq.merge(*streams, key=lambda shot: shot.time)
    for number, shot in enumerate(in_order):
        if plan.stop_after_seconds and shot.time > plan.stop_after_seconds:
            return
        yield replace(shot, number=number)


def _shots_of_rule(seed: int, index: int, rule: Rule | Listed) -> Iterator[Shot]:
    """Yield the shots of one rule, numbered within the rule, each with a seed of its own.

    The seed follows from the plan's seed, the rule's place in the plan and the shot's place in the
    rule. It depends neither on other rules nor on whether earlier shots were injected.
    """
    entries = rule.entries(lambda number: _random_source(seed, index, number, "when and what"))
    for number, entry in enumerate(entries):
        shot_seed = _random_source(seed, index, number).getrandbits(32)
        yield Shot(number, entry.at, entry.fault, shot_seed, entry.replica, entry.rank)


def _random_source(*parts: object) -> random.Random:
    """Return a source of random numbers that these parts determine on every host."""
    # Random hashes text with SHA-512. The hash() of other objects differs from process to process.
    return random.Random("/".join(map(str, parts)))


def aim(shot: Shot, view: View, limits: Limits) -> Injection | Refusal:
    """Choose the targets of a shot by its seed, or return why there are none."""
    for reason in _permanent_obstacles(shot, view, limits):
        return Refusal(reason, final=True)
    for reason in _current_obstacles(shot, view, limits):
        return Refusal(reason, final=False)
    if shot.fault.scope == "lighthouse":
        return Injection(shot, (Target(lighthouse=True),))
    groups = _choose_groups(shot, view, limits)
    targets = [Target(group.replica, _choose_rank(shot, group)) for group in groups]
    return Injection(shot, tuple(targets))


def _permanent_obstacles(shot: Shot, view: View, limits: Limits) -> Iterator[str]:
    """Yield reasons why the shot can never be injected in this job with these limits."""
    fault = shot.fault
    missing_needs = fault.needs - view.available
    for need in Need:
        if need in missing_needs:
            yield need.missing
    refusal = limits.refusal(fault, shot.replica)
    if refusal is not None:
        yield refusal
    if not view.groups:
        return  # no group has written an event yet
    if len(view.groups) < fault.required_up:
        yield f"it needs {fault.required_up} groups, the job has {len(view.groups)}"
    if len(view.groups.keys() - set(limits.exempt)) < fault.num_targets:
        yield "all other groups are exempt"
    for replica in fault.groups_given(shot.replica):
        if replica not in view.groups:
            known = ", ".join(map(str, sorted(view.groups)))
            yield f"the job has no group {replica}; it has {known}"
    if shot.rank is None:
        return
    if shot.replica is None:
        if all(shot.rank >= group.num_ranks for group in view.groups.values()):
            yield f"no group has a rank {shot.rank}"
        return
    num_ranks = view.groups[shot.replica].num_ranks
    if shot.rank >= num_ranks:
        yield f"group {shot.replica} has no rank {shot.rank}; it has ranks 0 to {num_ranks - 1}"


def _current_obstacles(shot: Shot, view: View, limits: Limits) -> Iterator[str]:
    """Yield reasons why the shot cannot be injected now."""
    fault = shot.fault
    num_up = sum(group.up for group in view.groups.values())
    num_down = len(view.groups) - num_up
    if num_up < fault.required_up:
        yield (
            f"it needs {fault.required_up} groups that are up, {num_up} of {len(view.groups)} are"
        )
    num_affected = num_down + fault.num_affected
    if fault.num_targets and num_affected > limits.max_down:
        yield (
            f"{num_affected} groups would be down or under a fault, limits.max_down is {limits.max_down}"
        )
    for replica in fault.groups_given(shot.replica):
        if not view.groups[replica].up:
            yield f"group {replica} is not up"
    if len(_choose_groups(shot, view, limits)) < fault.num_targets:
        yield "no group is up that may be a target"


def _choose_groups(shot: Shot, view: View, limits: Limits) -> list[GroupView]:
    """Return the groups to hit; fewer than the fault has targets if too few groups are allowed."""
    groups = _candidates(shot, view, limits)
    if not isinstance(shot.fault, CutLink):
        return groups[: shot.fault.num_targets]
    peer = shot.fault.peer
    first_ends = [group for group in groups if group.replica != peer][:1]
    others = _candidates(replace(shot, replica=peer), view, limits, draw="peer")
    second_ends = [group for group in others if group not in first_ends][:1]
    return [*first_ends, *second_ends]


def _candidates(shot: Shot, view: View, limits: Limits, draw: str = "replica") -> list[GroupView]:
    """Return the groups that may be targets now, the preferred ones first.

    Args:
        draw: name of the draw; each name gives an order of its own.
    """
    groups = [group for group in view.groups.values() if _is_allowed(shot, group, limits)]
    if Need.CHECKPOINT in shot.fault.needs:
        # Only the first group that contributes saves. In any other group nothing would happen.
        return sorted(groups, key=lambda group: group.replica)
    # Each group draws its own number. The order of two groups then does not depend on the other
    # groups that are up, so a replay with another group down agrees as far as possible.
    return sorted(groups, key=lambda group: _random_source(shot.seed, draw, group.replica).random())


def _is_allowed(shot: Shot, group: GroupView, limits: Limits) -> bool:
    """Return whether the group may be a target of the shot now."""
    if not group.up or group.replica in limits.exempt:
        return False
    if shot.replica is not None and shot.replica != group.replica:
        return False
    return shot.rank is None or shot.rank < group.num_ranks


def _choose_rank(shot: Shot, group: GroupView) -> int | None:
    """Return the rank of a group to hit; None = all ranks."""
    if shot.fault.scope != "rank" or shot.rank is not None:
        return shot.rank
    return _random_source(shot.seed, "rank").randrange(group.num_ranks)
