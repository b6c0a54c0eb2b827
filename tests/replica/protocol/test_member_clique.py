# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups that go on if some cannot reach each other. Compared with a trial of every subset."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import networkx  # type: ignore[import-untyped]  # it has no types of its own
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_ft.membership.partition import Partition
from titan_ft.protocol.independent import find_heaviest
from titan_ft.protocol.member import Admission, LostLinks, Member, admit, dead_links, largest_clique
from titan_ft.system.seal import seal

Link = tuple[int, int]


def members_with(steps: list[int], dead: set[Link]) -> list[Member]:
    """Make groups that hold `steps`. Both ends of each dead link report it."""
    plain = [
        Member(slot, 1.0, f"{slot:08x}-process", "c", "j", f"10.0.0.{slot}:7")
        for slot in range(len(steps))
    ]
    named: dict[int, set[int]] = {slot: set() for slot in range(len(steps))}
    for one, other in dead:
        named[one].add(other)
        named[other].add(one)
    return [
        member.reporting(steps[member.slot], [plain[slot] for slot in named[member.slot]])
        if named[member.slot]
        else member
        for member in plain
    ]


def brute_force(steps: list[int], dead: set[Link]) -> list[int]:
    """Return the best subset of slots, by a trial of all subsets."""
    links = {frozenset(link) for link in dead}
    cut_off = sorted({slot for link in dead for slot in link})
    latest = max((steps[slot] for slot in cut_off), default=0)

    def worth(slots: tuple[int, ...]) -> tuple[int, int, int, list[int]]:
        holders = [
            slot for slot in slots if steps[slot] >= latest - 1 and (steps[slot] > 0 or latest == 0)
        ]
        return (
            len(holders),
            len(slots),
            sum(steps[slot] == latest for slot in slots),
            [-slot for slot in slots],
        )

    subsets = (s for size in range(len(cut_off) + 1) for s in itertools.combinations(cut_off, size))
    cliques = [
        s
        for s in subsets
        if not any(frozenset(pair) in links for pair in itertools.combinations(s, 2))
    ]
    return sorted({*range(len(steps))} - {*cut_off} | {*max(cliques, key=worth)})


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], set[Link]]:
    """Draw the steps of up to 7 groups and the links between them that are dead."""
    steps = draw(st.lists(st.sampled_from([0, 1, 6, 7, 8]), min_size=1, max_size=7))
    pairs = list(itertools.combinations(range(len(steps)), 2))
    return steps, draw(st.sets(st.sampled_from(pairs))) if pairs else set()


@given(networks())
def test_the_best_subset_goes_on(network: tuple[list[int], set[Link]]) -> None:
    """Most holders of the state, then most groups, then most holders of the latest state.

    Then the lowest slots.
    """
    steps, dead = network
    members = members_with(steps, dead)
    admission = admit(members[0], [member.replica_id for member in members])
    assert [member.slot for member in admission.members] == brute_force(steps, dead)
    assert admission.settled


@given(networks(), st.randoms(use_true_random=False))
def test_all_groups_find_the_same_members(
    network: tuple[list[int], set[Link]], random: object
) -> None:
    """The order of the names in the reply makes no difference.

    Each group also knows the groups that it cannot reach.
    """
    steps, dead = network
    members = members_with(steps, dead)
    names = [member.replica_id for member in members]
    expected = admit(members[0], names).members
    for own in members:
        random.shuffle(names)  # type: ignore[attr-defined]
        admission = admit(own, names)
        assert admission.members == expected
        assert {member.slot for member in admission.cut_off} == {
            slot for link in dead for slot in link if own.slot in link
        } - {own.slot}
        assert own in expected or admission.cut_off, "a group that stays outside knows the reason"


@given(networks(), st.data())
def test_no_group_decides_before_both_ends_have_reported(
    network: tuple[list[int], set[Link]], data: st.DataObject
) -> None:
    """All groups are members and make no exchange.

    They wait for the step of a group that is cut off.
    """
    steps, dead = network
    if not dead:
        return
    members = members_with(steps, dead)
    silent = data.draw(st.sampled_from(sorted({slot for link in dead for slot in link})))
    accusers = tuple(
        members[slot] for slot in range(len(steps)) if {(slot, silent), (silent, slot)} & dead
    )
    members[silent] = replace(members[silent], report=None)
    names = [member.replica_id for member in members]
    for own in members:
        assert admit(own, names).members == tuple(members)
        assert not admit(own, names).settled
    assert admit(members[silent], names).accusers == accusers


def test_one_step_ahead_does_not_halt_the_others() -> None:
    """Group 0 alone has completed the exchange that broke for 1 and 2.

    These two go on. Of only two groups, the one ahead goes on.
    """
    assert brute_force([100, 99, 99], {(0, 1), (0, 2)}) == [1, 2]
    assert brute_force([99, 100], {(0, 1)}) == [1]
    for steps, dead in (([100, 99, 99], {(0, 1), (0, 2)}), ([99, 100], {(0, 1)})):
        members = members_with(steps, dead)
        assert [m.slot for m in largest_clique(members, dead_links(members))] == brute_force(
            steps, dead
        )


def test_a_group_that_comes_back_is_not_meant_by_old_reports() -> None:
    """Reports of its old name do not count for the new one, and its own report is dropped."""
    members = members_with([5, 5], {(0, 1)})
    back = members[1].renamed("ffffffff-process")
    both = (members[0], back)
    assert admit(back, [member.replica_id for member in both]) == Admission(both)
    assert back.age > members[1].age


def test_a_report_survives_its_name() -> None:
    """Step and processes come back from the name, and names still sort by slot."""
    member = members_with([5, 6, 7], {(0, 1), (0, 2)})[0]
    assert member.report == LostLinks(5, ("00000001", "00000002"))
    assert Member.parse(member.replica_id, member.token) == member
    assert Member.parse(member.reporting(8, [member]).replica_id, member.token).edition == 2


@pytest.mark.parametrize("said", ["x", "1:", "1:5", "1:x:a", "1:5:a:b", "01", "-1:"])
def test_a_report_that_is_none(said: str) -> None:
    """A malformed report makes a foreign name, and no crash."""
    text = Member(3, 1.0, "u", "c", "j", "h:1").replica_id.rpartition("/")[0]
    assert text.endswith("/0")
    text = text[:-1] + said
    with pytest.raises(ValueError, match="titan_ft replica group"):
        Member.parse(f"{text}/{seal('', 'member', text)}", "")


def ring(num_groups: int) -> set[Link]:
    return {(slot, (slot + 1) % num_groups) for slot in range(num_groups)}


def halves(num_groups: int) -> set[Link]:
    half = num_groups // 2
    return set(itertools.product(range(half), range(half, num_groups)))


def mesh(num_groups: int) -> set[Link]:
    return set(itertools.combinations(range(num_groups), 2))


def test_a_mesh_of_dead_links_is_no_deep_recursion() -> None:
    """No group of 500 reaches another one, as with a wrong firewall. The first one goes on alone.

    A recursion for each group exceeded Python's limit, in all groups at once.
    """
    groups = set(range(500))
    weights = dict.fromkeys(groups, 1)
    assert find_heaviest(weights, {group: groups - {group} for group in groups}) == [0]


@pytest.mark.parametrize(
    ("dead_of", "num_groups", "size"), [(ring, 300, 150), (halves, 60, 30), (mesh, 60, 1)]
)
def test_many_groups_decide_in_time(
    dead_of: Callable[[int], set[Link]], num_groups: int, size: int
) -> None:
    """A search that tries all sets would not end, nor would networkx's for the ring."""
    members = members_with([7] * num_groups, dead_of(num_groups))
    chosen = largest_clique(members, dead_links(members))
    assert len(chosen) == size
    assert chosen[0] == members[0]


@given(st.integers(2, 24), st.randoms(use_true_random=False), st.floats(0.02, 0.9))
def test_the_search_finds_the_set_that_networkx_finds(
    count: int, random: Random, density: float
) -> None:
    """For more groups, too, than all subsets can be tried of."""
    pairs = itertools.combinations(range(count), 2)
    alive = networkx.Graph(pair for pair in pairs if random.random() > density)
    weights = {place: random.choice([1, 50, 51]) for place in range(count)}
    for place, weight in weights.items():
        alive.add_node(place, weight=weight)
    dead = {place: {*alive} - {place} - {*alive[place]} for place in range(count)}
    found = find_heaviest(weights, dead)
    # A further digit, so that networkx prefers the lowest places.
    for place, weight in weights.items():
        alive.nodes[place]["weight"] = (weight << count) + (1 << (count - 1 - place))
    assert found == sorted(networkx.max_weight_clique(alive, "weight")[0])


def test_a_report_names_the_groups_that_report_this_one() -> None:
    """Otherwise three groups that lost each other for a moment would drop one in turn, without
    end.
    """
    own, one, two = (
        Member(slot, 1.0 + slot, f"{slot:08x}-process", "config", "job") for slot in range(3)
    )
    own, one, two = own.reporting(5, [one]), one.reporting(5, [own]), two.reporting(5, [own])
    this: Any = SimpleNamespace(
        _seat=SimpleNamespace(member=own, reopen=lambda member: member.replica_id),
        _find_living=lambda dead: set(dead),
        _members=(own, one, two),
        _accusers=admit(own, [own.replica_id, one.replica_id, two.replica_id]).accusers,
    )
    assert this._accusers == (two,)
    renamed = Member.parse(Partition._open_seat_with_report(this, [one, two], set(), 5), "")
    assert renamed.has_reported(one)
    assert renamed.has_reported(two)
