# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Every batch once: after any kill, each slot's data is trained in order, without a lost or
repeated batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.client import ZygoteClient
from harness.events import Event, audit
from harness.job import Job
from harness.trajectory import check, check_killed, named

STEP = 4  # the step in which the second group is killed
NUM_FILES = 4  # of the stream: two for each of two slots, one for each of their loaders' workers
LOADERS = {
    "in memory": ["--training.seq_len=256"],  # a text lasts for about two batches
    "in memory, workers": ["--training.dataloader.num_workers=2"],
    "streamed": ["--training.dataset=stream"],
    "streamed, workers": ["--training.dataset=stream", "--training.dataloader.num_workers=2"],
    # A slot's texts last for about three steps: the second group is killed in a later epoch.
    "shuffled, epochs": ["--training.dataset=shuffled"],
    "shuffled, epochs, workers": [
        "--training.dataset=shuffled",
        "--training.dataloader.num_workers=2",
    ],
}
TEXTS_OF_AN_EPOCH = 5  # in each file
POINTS = (
    "forward",
    "backward",
    "exchange_first",
    "vote_before",
    "vote_after",
    "commit",
    "optimizer",
)


def kill(replica: int, point: str, step: int = STEP, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, "step": step, **more}


class Loaders:
    """Makes jobs of two groups for each kind of loader, and keeps the events of one undisturbed job
    of each kind.
    """

    def __init__(self, zygote: ZygoteClient, folder: Path) -> None:
        self._zygote, self._folder = zygote, folder
        self._undisturbed: dict[str, list[Event]] = {}
        self.jobs: list[Job] = []
        self._texts = [folder / f"texts-{number}.jsonl" for number in range(NUM_FILES)]
        self._few = [folder / f"few-{number}.jsonl" for number in range(NUM_FILES)]
        for paths, length in ((self._texts, 60), (self._few, TEXTS_OF_AN_EPOCH)):
            for number, path in enumerate(paths):
                texts = [
                    f"Sentence {n} of {number}, and {n * 7919} words more. " * (1 + n % 4)
                    for n in range(length)
                ]
                path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def settings(self, kind: str, **hooks: Any) -> dict[str, Any]:
        """Return the settings of a job."""
        files = {"streamed": self._texts, "shuffled": self._few}.get(kind.partition(",")[0])
        stream = {} if files is None else {"stream": list(map(str, files))}
        # A step takes 20 ms and a heal half a second where another test runs beside this one.
        return {"groups": 2, "steps": 28, "flags": LOADERS[kind], "hooks": {**stream, **hooks}}

    def undisturbed(self, kind: str) -> list[Event]:
        """Return the events of a job in which nothing fails."""
        if kind not in self._undisturbed:
            self.jobs.append(
                Job(self._zygote, self._folder / kind.replace(", ", "-"), **self.settings(kind))
            )
            self.jobs[-1].run()
            self._undisturbed[kind] = check(self.jobs[-1], survivors=[0, 1])
        return self._undisturbed[kind]


@pytest.fixture(scope="module")
def loaders(zygote: ZygoteClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaders]:
    loaders = Loaders(zygote, tmp_path_factory.mktemp("loaders"))
    yield loaders
    for job in loaders.jobs:
        job.close()


def check_audit(events: Iterable[Event]) -> None:
    """The audit of the events finds that every batch was trained once."""
    found = audit(events)
    assert (found.verdict, found.num_lost, found.num_repeated) == ("holds", 0, 0), found


def checksums(events: Iterable[Event]) -> dict[tuple[int, int, int], str]:
    """Map (slot, rank, first batch) to the checksum of the data read there, equal at every
    reading.
    """
    found: dict[tuple[int, int, int], str] = {}
    for event in named(events, "step_committed"):
        for data in filter(None, [event["data"], *event["extra_data"]]):
            key = (data["slot"], event["rank"], data["first_batch"])
            assert found.setdefault(key, data["checksum"]) == data["checksum"]
    return found


def check_same_data(events: Iterable[Event], undisturbed: Iterable[Event]) -> None:
    """Each batch equals the batch of an undisturbed job."""
    read, wanted = checksums(events), checksums(undisturbed)
    assert read
    assert read.items() <= wanted.items()


def trained(events: Iterable[Event], replica: int, slot: int) -> dict[int, list[int]]:
    """Map each step to first batch and number of batches of `slot`, as seen by `replica`."""
    own = [
        event
        for event in named(events, "step_committed")
        if event["replica"] == replica and event["rank"] == 0
    ]
    return {
        event["step"]: event["batches"][str(slot)] for event in own if str(slot) in event["batches"]
    }


def resumed(events: Iterable[Event]) -> list[Event]:
    """Return the commits of group 1's second attempt to which it contributed."""
    own = [
        event
        for event in named(events, "step_committed")
        if (event["replica"], event["attempt"]) == (1, 1)
    ]
    return [event for event in own if 1 in event["participants"]]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["backward", "exchange_first", "optimizer"])
def test_a_killed_group_goes_on_behind_its_last_commit(
    make_job: Callable[..., Job], loaders: Loaders, point: str
) -> None:
    """The batch of an uncommitted step is used again. A committed batch is not, although its group
    died.
    """
    job = make_job(**loaders.settings("in memory", faults=[kill(1, point)], hold=2))
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    check_audit(events)
    check_same_data(events, loaders.undisturbed("in memory"))
    committed = STEP if point == "optimizer" else STEP - 1
    first = resumed(events)[0]["data"]
    assert (first["slot"], first["first_batch"]) == (1, committed)
    assert [batch for batch, _ in trained(events, 0, slot=0).values()] == list(range(job.steps))
    assert [batch for batch, _ in trained(events, 0, slot=1).values()] == list(
        range(committed + len(resumed(events)))
    )


@pytest.mark.parametrize(
    "kind",
    [
        "shuffled, epochs",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in LOADERS
            if kind not in ("in memory", "shuffled, epochs")
        ),
    ],
)
def test_any_loader_goes_on_behind_the_last_commit(
    make_job: Callable[..., Job], loaders: Loaders, kind: str
) -> None:
    """Loaders with worker processes and streams resume at the right batch, without a timeout in the
    survivor.
    """
    job = make_job(**loaders.settings(kind, faults=[kill(1, "backward")], hold=2))
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    check_audit(events)
    check_same_data(events, loaders.undisturbed(kind))
    assert resumed(events)[0]["data"]["first_batch"] == STEP - 1
    assert [event["exact"] for event in named(events, "data_opened") if event["first_batch"]] == [
        True
    ]


@pytest.mark.slow
def test_loader_workers_hold_no_connection_open(make_job: Callable[..., Job]) -> None:
    """All groups notice a death at once, although forked loader workers hold copies of each rank's
    sockets.
    """
    flags = ["--training.dataloader.num_workers=1"]
    job = make_job(groups=4, flags=flags, hooks={"faults": [kill(1, "exchange_first")], "hold": 2})
    job.run()
    events = check(job, survivors=[0, 2, 3])
    check_killed(job, events, [(1, 0, "sigkill:exchange_first")])
    failed = named(events, "exchange_failed")
    assert failed
    # Workers outlive their rank for five seconds; Gloo waits for ten. Group 3 is no neighbour of
    # group 1: it learns of the death because the others close their connections.
    assert max(event["seconds"] for event in failed) < 3.0


@pytest.mark.parametrize("kind", ["in memory", pytest.param("streamed", marks=pytest.mark.slow)])
def test_resuming_reads_nothing_again(
    make_job: Callable[..., Job], loaders: Loaders, kind: str
) -> None:
    """A resumed loader tokenizes as many texts for the same batches as a loader that was never
    interrupted.
    """
    undisturbed = loaders.undisturbed(kind)
    steps = len({event["step"] for event in named(undisturbed, "step_committed")})
    # Behind the last backward of step n the next batch is read, number n; there is none behind the
    # last step.
    wanted = {
        event["step"]: event["samples"]
        for event in named(undisturbed, "computed")
        if event["replica"] == 1
    }
    step = steps // 2
    job = make_job(**loaders.settings(kind, faults=[kill(1, "forward", step)], hold=1))
    job.run()
    events = check(job, survivors=[0])
    begin = resumed(events)[0]["data"]["first_batch"]
    assert begin == step - 1
    drawn = {
        e["step"]: e["samples"]
        for e in named(events, "computed")
        if (e["replica"], e["attempt"]) == (1, 1)
    }
    assert wanted[begin - 1] > 1
    for event in resumed(events):
        last = event["data"]["first_batch"] + (event["step"] < job.steps)
        # torchtitan's dataset takes the next text before it looks at the tokens that are left of
        # the one before.
        assert drawn[event["step"]] == max(1, wanted[last] - wanted[begin - 1]), event["step"]


def test_kill_between_two_microbatches(make_job: Callable[..., Job]) -> None:
    """With gradient accumulation all batches of an interrupted step are used again."""
    # Two microbatches of two samples in each of two groups.
    flags = ["--training.global_batch_size=8"]
    job = make_job(
        groups=2, flags=flags, hooks={"faults": [kill(1, "forward", forwards=2)], "hold": 2}
    )
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_audit(events)
    contributed = [e for e in named(events, "step_committed") if e["replica"] in e["participants"]]
    assert {event["data"]["num_batches"] for event in contributed} == {2}
    assert {tuple(count for _, count in event["batches"].values()) for event in contributed} == {
        (2, 2),
        (2,),
    }
    assert resumed(events)[0]["data"]["first_batch"] == 2 * (STEP - 1)


def kills(num_kills: int, num_groups: int, seed: int) -> list[dict[str, Any]]:
    """Kill random groups at random points, each once the one before has healed."""
    dice = random.Random(seed)
    faults: list[dict[str, Any]] = []
    attempts = [0] * num_groups
    for _ in range(num_kills):
        victim = dice.randrange(num_groups)
        fault = kill(victim, dice.choice(POINTS), dice.randint(1, 3), attempt=attempts[victim])
        if faults:
            fault["after"] = [f"healed-{faults[-1]['replica']}-{faults[-1]['attempt'] + 1}"]
        attempts[victim] += 1
        faults.append(fault)
    return faults


@pytest.mark.parametrize(
    ("num_kills", "policy"),
    [
        (3, "shrink"),
        pytest.param(30, "shrink", marks=pytest.mark.slow),
        pytest.param(30, "constant", marks=pytest.mark.slow),
    ],
)
def test_many_kills(make_job: Callable[..., Job], num_kills: int, policy: str) -> None:
    """Groups die one after the other, each anywhere in a step: no batch is lost or repeated, no
    step is lost.
    """
    faults = kills(num_kills, num_groups=3, seed=num_kills)
    victims = {fault["replica"] for fault in faults}
    steps = 8 * num_kills + 12
    job = make_job(
        groups=3,
        steps=steps,
        flags=[f"--fault_tolerance.batch_policy={policy}"],
        hooks={"faults": faults, "hold": 1},
        max_restarts=num_kills,
    )
    job.run(seconds=10 * num_kills + 60)
    events = check(job, survivors=set(range(3)) - victims)
    check_killed(
        job, events, [(f["replica"], f["attempt"], f"sigkill:{f['point']}") for f in faults]
    )
    check_audit(events)
    found = checksums(events)
    assert {slot for slot, _, _ in found} == {0, 1, 2}
    if policy == "constant":
        assert all(
            set(event["batches"]) == {"0", "1", "2"} for event in named(events, "step_committed")
        )
    # A death costs an exchange or two; so may the return.
    exchanges: dict[int, int] = {}
    for event in named(events, "step_committed"):
        exchanges[event["step"]] = max(exchanges.get(event["step"], 1), event["exchanges"])
    assert sum(exchanges.values()) <= steps + 3 * num_kills
