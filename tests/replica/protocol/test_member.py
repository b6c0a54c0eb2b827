# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Names at the lighthouse, and the choice of those that make an exchange together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from titan_ft.protocol.errors import (
    ConfigMismatchError,
    ForeignMemberError,
    ReplacedError,
    ReplicaError,
    UnknownTokenError,
)
from titan_ft.protocol.member import UNSEALED, Admission, Member, admit
from titan_ft.protocol.shape import describe_shape
from titan_ft.system.seal import seal


def member(slot: int, started: float = 0.0, **more: Any) -> Member:
    values = {
        "unique": f"u{slot}-{started}",
        "config": "c",
        "job": "j",
        "store": f"10.0.0.{slot}:7",
    }
    return Member(slot, started, **values | more)


def names(*members: Member) -> list[str]:
    return [member.replica_id for member in members]


VERSIONS = {"torch": "2.13.0+cpu", "torchtitan": "0.2.2", "titan_ft": "0.1.0"}


def shape(
    num_ranks: int = 1, layout: int = 0xAB, *, torch: str = VERSIONS["torch"], **degrees: int
) -> str:
    return describe_shape(
        num_ranks, {"dp_replicate": 1, **degrees}, {**VERSIONS, "torch": torch}, layout
    )


# Names


@pytest.mark.parametrize("job", ["", "a-job"])
@pytest.mark.parametrize("store", ["10.0.0.1:29500", "[fd00::1]:29500"])
def test_a_member_survives_its_name(job: str, store: str) -> None:
    """All of a member comes back from its name, with its start to the microsecond."""
    one = Member(12, 1_700_000_000.123457, "abc", "c0ffee", job, store, shape(4, dp_shard=2, tp=2))
    assert Member.parse(one.replica_id, one.token) == one
    assert not any(char.isspace() for char in one.replica_id), (
        "words of the lighthouse's page are separated by spaces"
    )


def test_ids_sort_by_slot() -> None:
    """torchft orders members by id as text.

    This must be the order of the slots, even with ten groups and more.
    """
    members = [member(slot, 5.0) for slot in (0, 2, 9, 10, 100, 99_999)]
    assert sorted(names(*members)) == names(*members)


FOREIGN = [
    "",
    "train_llama_0",
    "train_llama_0:7f3a",
    "titan_ft/000001/1.000000/u/c",  # without job and store
    "titan_ft/000001/1.000000/u/c/j/h:1",  # without shape
    "titan_ft/x/1.000000/u/c/j/h:1/s/0",
    "titan_ft/000001/soon/u/c/j/h:1/s/0",
    "titan_ft/000001/nan/u/c/j/h:1/s/0",
    "titan_ft/000001/-inf/u/c/j/h:1/s/0",
    "titan_ft/1/1.000000/u/c/j/h:1/s/0",  # would not sort by slot
    "titan_ft/000001/1.0/u/c/j/h:1/s/0",
    "other/000001/1.000000/u/c/j/h:1/s/0",
    "titan_ft/000001/1.000000/u/c/j/h:1/s/0/more",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_name_is_no_member(name: str) -> None:
    """The error names an id that is not of this run, even if its seal is right."""
    with pytest.raises(ValueError, match="titan_ft replica group") as caught:
        Member.parse(f"{name}/{seal('', 'member', name)}", "")
    assert name in str(caught.value)


TOKEN = "0123456789abcdef"
FORGED = [
    lambda own: own.replica_id.rpartition("/")[0],  # a name of an older version
    lambda own: own.replica_id[:-1] + ("0" if own.replica_id[-1] != "0" else "1"),
    lambda own: replace(own, token="").replica_id,
    lambda own: replace(own, token="another").replica_id,
    lambda own: own.replica_id.replace("/000001/", "/000000/"),
    lambda own: own.replica_id.replace(f"/{own.started:.6f}/", "/0.500000/"),
    lambda own: f"{own.replica_id}/{own.replica_id.rpartition('/')[2]}",
    lambda own: f"x\n{own.replica_id}",
    lambda own: "\ud800",
    lambda own: "x" * (4 << 20),
]
"""What somebody without the token can make of the name of a member."""


@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_name_ends_no_group(forge: Callable[[Member], str]) -> None:
    """The oldest member decides on the job, and the newest of a slot stays.

    A forged name is neither.
    """
    ours = member(0, 2.0, token=TOKEN), member(1, 3.0, token=TOKEN)
    claims = (
        member(1, 1.0, token=TOKEN),
        member(1, 9.0, token=TOKEN),
        member(1, 1.0, token=TOKEN, job="evil"),
    )
    for claim in claims:
        name = forge(claim)
        with pytest.raises(ValueError, match="not the name of"):
            Member.parse(name, TOKEN)
        for own in ours:
            assert admit(own, [name, *names(*ours)]) == Admission(ours, {name: UNSEALED})


def test_a_seal_shows_nothing_of_the_token() -> None:
    """Neither a member's name nor its text in a log line contains the token."""
    own = member(0, 2.0, token=TOKEN)
    assert TOKEN not in own.replica_id
    assert TOKEN not in repr(own)
    assert TOKEN not in repr(own.renamed("new"))
    assert Member.parse(own.renamed("new").replica_id, TOKEN).unique == "new"


def test_a_group_with_another_token_is_set_aside_by_both() -> None:
    """Two processes without a common token or version set each other aside.

    Both give one reason.
    """
    one, other = member(0, 1.0, token=TOKEN), member(1, 2.0, token="another")
    assert admit(one, names(one, other)) == Admission((one,), {other.replica_id: UNSEALED})
    assert admit(other, names(one, other)) == Admission((other,), {one.replica_id: UNSEALED})


def test_a_newcomer_beside_groups_of_another_token_only_ends() -> None:
    """It would train a second job alone, and save into the folder of the first one."""
    first, other = member(0, 1.0, token=TOKEN), member(1, 2.0, token="another")
    earlier_version = first.replica_id.rpartition("/")[0]
    for name in (first.replica_id, earlier_version, first.replica_id + "\x1b" * 10_000):
        with pytest.raises(UnknownTokenError, match="another TITAN_FT_TOKEN") as caught:
            admit(other, [name, other.replica_id], is_first=True)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("forge", FORGED)
def test_a_forged_name_does_not_end_a_newcomer_of_a_living_job(
    forge: Callable[[Member], str],
) -> None:
    """A group that comes back meets the others. So it knows that they have its token."""
    ours = member(0, 2.0, token=TOKEN), member(1, 3.0, token=TOKEN)
    name = forge(member(1, 1.0, token=TOKEN))
    for own in ours:
        assert admit(own, [name, *names(*ours)], is_first=True).members == ours
    assert admit(ours[0], [name, ours[0].replica_id]).members == ours[:1], (
        "a group that trains goes on"
    )


def test_a_newcomer_beside_other_kinds_of_jobs_goes_on() -> None:
    """These jobs need no token, and do not claim to be this job."""
    own = member(0, token=TOKEN)
    assert admit(own, ["somebody_elses_llama_0", own.replica_id], is_first=True).members == (own,)


# Admission


def test_members_of_one_kind_are_taken_by_slot() -> None:
    """In any order of the reply, each member computes the same list, in the order of the slots."""
    members = [member(0, 3.0), member(1, 1.0), member(2, 2.0)]
    for order in itertools.permutations(members):
        for own in members:
            assert admit(own, names(*order)) == Admission(tuple(members))


def test_a_group_alone_takes_itself() -> None:
    """A quorum of one has one member."""
    assert admit(member(4), names(member(4))) == Admission((member(4),))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_name_is_set_aside(name: str) -> None:
    """Another kind of job is left out with the reason, at any place in the order."""
    ours = member(0), member(1)
    assert admit(ours[1], [name, *names(*ours)]) == Admission(ours, {name: UNSEALED})


def test_a_newer_job_is_set_aside() -> None:
    """The older job goes on with its own groups, and reports the job of the others."""
    ours, theirs = (member(0, 1.0), member(2, 9.0)), member(1, 5.0, job="k")
    admission = admit(ours[1], names(*ours, theirs))
    assert admission.members == ours
    assert list(admission.strangers) == [theirs.replica_id]
    assert "job 'k'" in admission.strangers[theirs.replica_id]
    assert "'j'" in admission.strangers[theirs.replica_id]


def test_a_newer_job_ends() -> None:
    """The error names both jobs, the groups that were first, and the remedy."""
    ours, theirs = (member(0, 1.0), member(2, 9.0)), member(1, 5.0, job="")
    with pytest.raises(ForeignMemberError, match="its own lighthouse") as caught:
        admit(theirs, names(*ours, theirs))
    for part in (
        "job 'j' (groups [0, 2])",
        "job ''",
        "fault_tolerance.lighthouse",
        "fault_tolerance.job_id",
    ):
        assert part in str(caught.value)


def test_a_newer_process_of_the_first_job_is_no_newcomer() -> None:
    """The job's oldest group counts. A group that was restarted later stays in the job."""
    old, restarted, other = member(0, 1.0), member(1, 100.0), member(1, 50.0, job="k")
    assert admit(restarted, names(old, restarted, other)).members == (old, restarted)
    with pytest.raises(ForeignMemberError):
        admit(other, names(old, restarted, other))


def test_another_config_is_set_aside() -> None:
    """Groups with the oldest group's config go on, for any number of other groups."""
    right, wrong = (
        (member(2, 1.0), member(3, 8.0)),
        (member(0, 2.0, config="d"), member(1, 3.0, config="d")),
    )
    admission = admit(right[1], names(*right, *wrong))
    assert admission.members == right
    assert set(admission.strangers) == set(names(*wrong))
    for reason in admission.strangers.values():
        assert "digest d; ours is c" in reason


def test_a_group_with_another_config_ends() -> None:
    """The error has both digests, and the groups with the right config."""
    right, wrong = (
        (member(2, 1.0), member(3, 8.0)),
        (member(0, 2.0, config="d"), member(1, 3.0, config="d")),
    )
    for own in wrong:
        with pytest.raises(ConfigMismatchError, match="TOML and flags") as caught:
            admit(own, names(*right, *wrong))
        assert "digest d" in str(caught.value)
        assert "groups [2, 3] (c)" in str(caught.value)


SHAPES = [
    (
        shape(4, dp_shard=4),
        shape(2, dp_shard=2),
        "4 ranks (dp_shard 4)",
        "2 ranks (dp_shard 2)",
        "as many ranks and the same [parallelism] degrees",
    ),
    # As many ranks, cut in another way. The layout follows from it, and is not reported.
    (
        shape(4, 0xCD, dp_shard=2, tp=2),
        shape(4, 0xAB, dp_shard=4),
        "4 ranks (dp_shard 2, tp 2)",
        "4 ranks (dp_shard 4)",
        "as many ranks and the same [parallelism] degrees",
    ),
    (
        shape(),
        shape(torch="2.12.0"),
        "torch 2.13.0+cpu",
        "torch 2.12.0",
        "the same version of torch",
    ),
    (
        shape(layout=0xCD),
        shape(layout=0xAB),
        "parameters of layout 0000000000cd (names, sizes, dtypes and order on all ranks)",
        "parameters of layout 0000000000ab",
        "the same code of the model",
    ),
]


@pytest.mark.parametrize(("own", "theirs", "said", "said_of_theirs", "remedy"), SHAPES)
def test_a_group_of_another_shape_ends(
    own: str, theirs: str, said: str, said_of_theirs: str, remedy: str
) -> None:
    """The error names the difference and the remedy. The other groups name the group and go on."""
    right, wrong = (
        (member(0, 1.0, shape=theirs), member(1, 2.0, shape=theirs)),
        member(2, 3.0, shape=own),
    )
    with pytest.raises(ConfigMismatchError) as caught:
        admit(wrong, names(*right, wrong))
    told = f"this group has {said}; the job's groups [0, 1] have {said_of_theirs}: start it with {remedy}, or, if"
    assert str(caught.value).startswith(told)
    for own_member in right:
        admission = admit(own_member, names(*right, wrong))
        assert admission.members == right
        (reason,) = admission.strangers.values()
        assert reason.startswith(f"it has {said.partition(' (names')[0]}")
        assert said_of_theirs in reason


def test_several_differences_are_reported_at_once() -> None:
    """A user need not start a group twice to learn of both."""
    right, wrong = (
        member(0, 1.0, shape=shape()),
        member(1, 2.0, shape=shape(2, torch="2.12.0", dp_shard=2)),
    )
    with pytest.raises(ConfigMismatchError) as caught:
        admit(wrong, names(right, wrong))
    assert (
        "has 2 ranks (dp_shard 2), torch 2.12.0; the job's groups [0] have 1 rank, torch 2.13.0+cpu"
        in str(caught.value)
    )


def test_another_config_makes_another_layout() -> None:
    """A model of another flavor has other parameters. The remedy names the config."""
    right = member(0, 1.0, shape=shape(layout=1))
    wrong = member(1, 2.0, shape=shape(layout=2), config="d")
    with pytest.raises(ConfigMismatchError, match="TOML and flags"):
        admit(wrong, names(right, wrong))
    (reason,) = admit(right, names(right, wrong)).strangers.values()
    assert "digest d; ours is c" in reason


def test_a_newer_process_of_another_shape_replaces_no_group() -> None:
    """A group that was restarted with another number of ranks does not end the running one."""
    old, other, new = (
        member(0, 1.0, shape=shape()),
        member(1, 2.0, shape=shape()),
        member(0, 3.0, shape=shape(2)),
    )
    for own in (old, other):
        assert admit(own, names(old, other, new)).members == (old, other)
    with pytest.raises(ConfigMismatchError):
        admit(new, names(old, other, new))


def test_the_config_of_another_job_says_nothing() -> None:
    """The config of a stranger does not count."""
    ours, theirs = member(0, 2.0, config="d"), member(1, 3.0, config="c", job="k")
    assert admit(ours, names(ours, theirs)).members == (ours,)


def test_the_newest_process_of_a_slot_is_taken() -> None:
    """The others need not wait until the older process leaves. It is no stranger."""
    other, old, new = member(1, 1.0), member(0, 2.0), member(0, 3.0)
    for own in (other, new):
        assert admit(own, names(old, new, other)) == Admission((new, other))


def test_an_older_process_of_a_slot_ends() -> None:
    """The error reports that it was replaced, and names the field."""
    old, older, new = member(0, 2.0), member(0, 1.0), member(0, 3.0)
    for own in (old, older):
        with pytest.raises(
            ReplacedError, match=r"replica group 0 .*fault_tolerance.replica_id must be unique"
        ):
            admit(own, names(old, older, new))


def test_a_newer_process_of_another_kind_replaces_no_group() -> None:
    """Only a process with the right job and config takes a slot over."""
    old = member(0, 1.0)
    strangers = member(0, 2.0, config="d"), member(0, 3.0, job="k")
    admission = admit(old, names(old, *strangers))
    assert admission.members == (old,)
    assert set(admission.strangers) == set(names(*strangers))


def test_processes_started_in_the_same_microsecond() -> None:
    """One of them counts as older nevertheless. It ends, and both agree on it."""
    one, two = member(0, 1.0, unique="a"), member(0, 1.0, unique="b")
    assert admit(two, names(one, two)).members == (two,)
    with pytest.raises(ReplacedError):
        admit(one, names(one, two))


def test_every_quorum_has_a_way_on() -> None:
    """In all small quorums, the members that go on compute one list and are all in it.

    The oldest group is alive.
    """
    kinds = [
        member(slot, 0.0, config=config, job=job)
        for slot in (0, 1)
        for config in ("c", "d")
        for job in ("j", "k")
    ]
    for chosen in itertools.permutations(kinds, 3):
        quorum = [
            member(one.slot, float(age), config=one.config, job=one.job, unique=f"{age}")
            for age, one in enumerate(chosen)
        ]
        admitted: dict[Member, Admission] = {}
        for own in quorum:
            with contextlib.suppress(ReplicaError):
                admitted[own] = admit(own, ["stranger", *names(*quorum)])
        lists = {admission.members for admission in admitted.values()}
        assert lists == {tuple(sorted(admitted, key=lambda one: one.slot))}
        left = {(one.config, one.job) for one in admitted}
        assert left == {(quorum[0].config, quorum[0].job)}
        assert "stranger" in admitted[next(iter(admitted))].strangers


def test_a_group_is_in_its_own_quorum() -> None:
    """A reply without the group itself is a bug."""
    with pytest.raises(AssertionError):
        admit(member(0), names(member(1)))
