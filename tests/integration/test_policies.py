# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The global batch and the LR while groups are absent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from harness.client import ZygoteClient
from harness.events import Event, audit
from harness.job import Job
from harness.trajectory import check, check_killed, named

STEP = 4  # the step in which the first group is killed
CONSTANT = "--fault_tolerance.batch_policy=constant"
BATCH_TOKENS = 2 * 32  # of one rank
ROUNDING = 1e-4  # relative: what other orders of addition make of it in a few steps

Undisturbed = Callable[[int, int], dict[int, Event]]


@pytest.fixture(scope="module")
def undisturbed(
    zygote: ZygoteClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Undisturbed]:
    """Steps of jobs without failures. Their commits do not depend on the policies."""
    jobs: dict[tuple[int, int], Job] = {}

    def run(groups: int, ranks: int) -> dict[int, Event]:
        if (groups, ranks) not in jobs:
            job = jobs[groups, ranks] = Job(
                zygote, tmp_path_factory.mktemp("job"), groups=groups, ranks=ranks
            )
            job.run()
            check(job, survivors=range(groups))
        return steps_of(jobs[groups, ranks].events())

    yield run
    for job in jobs.values():
        job.close()


def kill(replica: int, point: str, step: int = STEP, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, "step": step, **more}


def steps_of(events: Iterable[Event]) -> dict[int, Event]:
    """Return one commit of each step; `check` has compared those of the other groups."""
    return {event["step"]: event for event in named(events, "step_committed") if event["rank"] == 0}


def absences(events: Iterable[Event], groups: int) -> dict[int, int]:
    """Map each step without all groups to its number of contributing groups."""
    present = {step: len(event["participants"]) for step, event in steps_of(events).items()}
    return {step: number for step, number in present.items() if number < groups}


def check_full_batches(
    events: list[Event], undisturbed: dict[int, Event], groups: int, ranks: int
) -> None:
    """Each step trained exactly the batches of an undisturbed job, each batch in one group."""
    found = audit(events)
    assert (found.verdict, found.num_lost, found.num_repeated) == ("holds", 0, 0), found
    for step, event in steps_of(events).items():
        assert event["tokens"] == groups * ranks * BATCH_TOKENS
        assert event["batches"] == {str(slot): [step - 1, 1] for slot in range(groups)}
        wanted = undisturbed[step]
        assert event["lr"] == wanted["lr"]
        for value in ("loss", "grad_norm"):
            assert event[value] == pytest.approx(wanted[value], rel=ROUNDING), (
                f"{value} of step {step}"
            )


def check_readers(events: list[Event], groups: int, final_step: int) -> None:
    """The present groups make all forward passes of a step. At the end each group reads only its
    own slot.
    """
    contributed: dict[int, list[Event]] = defaultdict(list)
    for event in named(events, "step_committed"):
        if event["replica"] in event["participants"] and event["rank"] == 0:
            contributed[event["step"]].append(event)
    for own in contributed.values():
        if len(own) == len(own[0]["participants"]):  # else one died with its own event unwritten
            assert sum(event["forward_passes"] for event in own) == groups
            assert all(event["data"]["slot"] == event["replica"] for event in own)
    final = {event["replica"]: event for event in contributed[final_step]}
    assert sorted(final) == list(range(groups))
    assert [event["extra_data"] for event in final.values()] == [[]] * groups
    assert {event["forward_passes"] for event in final.values()} == {1}


@pytest.mark.parametrize("point", ["backward", pytest.param("commit", marks=pytest.mark.slow)])
def test_the_global_batch_holds(
    make_job: Callable[..., Job], undisturbed: Undisturbed, point: str
) -> None:
    """From the step of a group's death on, the others train its batches in extra microbatches."""
    job = make_job(groups=3, flags=[CONSTANT], hooks={"faults": [kill(1, point)], "hold": 4})
    job.run()
    events = check(job, survivors=[0, 2])
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    check_full_batches(events, undisturbed(3, 1), groups=3, ranks=1)
    check_readers(events, 3, job.steps)
    absent = absences(events, 3)
    assert min(absent) == (STEP if point == "backward" else STEP + 1)
    assert steps_of(events)[min(absent)]["exchanges"] == 2, (
        "the quorum behind the broken one says who is gone"
    )
    survivors = [
        e for e in named(events, "step_committed") if e["replica"] == 0 and e["step"] in absent
    ]
    assert {event["forward_passes"] for event in survivors} == {2}  # slot 1 is dealt to group 0


@pytest.mark.slow
def test_the_global_batch_holds_with_two_ranks(
    make_job: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    """Each rank of the remaining group reads the data of the dead group's rank with the
    same index.
    """
    hooks = {"faults": [kill(1, "backward", rank=1)], "hold": 3}
    job = make_job(groups=2, ranks=2, flags=[CONSTANT], hooks=hooks)
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    check_full_batches(events, undisturbed(2, 2), groups=2, ranks=2)
    check_readers(events, 2, job.steps)
    assert absences(events, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "factor"), [("sqrt", math.sqrt), ("linear", float)])
def test_lr_follows_the_share(
    make_job: Callable[..., Job],
    undisturbed: Undisturbed,
    policy: str,
    factor: Callable[[float], float],
) -> None:
    """An update of k of n groups uses the share's LR in all groups, live and replayed; later
    updates the full LR.
    """
    flags = [f"--fault_tolerance.lr_policy={policy}"]
    job = make_job(groups=3, flags=flags, hooks={"faults": [kill(1, "backward")], "hold": 3})
    job.run()
    events = check(job, survivors=[0, 2])  # LR and digests of the groups are compared step by step
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    (healed,) = named(events, "heal_finished")
    absent = absences(events, 3)
    assert STEP in absent
    assert healed["replayed"] > 0
    assert set(range(healed["from_step"] + 1, healed["step"] + 1)) <= absent.keys()
    applied = {
        (event["replica"], event["step"]): event["rate"] for event in named(events, "computed")
    }
    for event in named(events, "step_committed"):
        wanted = undisturbed(3, 1)[event["step"]]["lr"] * factor(absent.get(event["step"], 3) / 3)
        assert event["lr"] == pytest.approx(wanted, rel=1e-12)
        assert applied[event["replica"], event["step"]] == event["lr"]
    assert steps_of(events)[job.steps]["lr"] == undisturbed(3, 1)[job.steps]["lr"]
