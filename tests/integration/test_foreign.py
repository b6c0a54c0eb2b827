# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Strangers at the job's lighthouse: they are named and left aside, whatever they claim, and the job goes on."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from harness.job import Job
from harness.trajectory import check, check_killed, named

STOCK = "train_llama_0:7f3a"  # as torchft's Manager makes them; sorts before every group's name
ALONE = ("--fault_tolerance.start_timeout_seconds=2",)
ENDS_SOON = {"constants": {"titan_ft.engine.step.FINISH_SECONDS": 1.0}}


class StockMember:
    """A replica of a job that uses torchft by itself, and claims to have made a million steps."""

    def __init__(self, lighthouse: str) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        self._server = ManagerServer(
            replica_id=STOCK,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr="127.0.0.1:1",  # who meets there meets nobody
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=50),
            connect_timeout=timedelta(seconds=10),
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=timedelta(seconds=10))
        self.quorums: list[list[str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                reply = self._client._quorum(
                    group_rank=0,
                    step=1_000_000,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=timedelta(seconds=60),
                    init_sync=False,
                    commit_failures=0,
                )
            except Exception:  # noqa: BLE001  # it has left, or the test's lighthouse has
                return
            self.quorums.append(reply.replica_ids)

    def leave(self) -> None:
        """Stop the heartbeats; the others then wait for it no longer."""
        self._stop.set()
        self._server.shutdown()


@pytest.fixture
def come() -> Iterator[Callable[[Job], StockMember]]:
    """Send a stranger to a job's lighthouse; it leaves with the test."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is loaded
    importlib.import_module("torchft.coordination")  # takes seconds, in which a small job would be over
    came: list[StockMember] = []

    def come(job: Job) -> StockMember:
        came.append(StockMember(job._address))
        return came[-1]

    yield come
    for stranger in came:
        stranger.leave()


def check_named(job: Job, name: str, reason: str, replicas: set[int]) -> None:
    """Check that these groups named the stranger, once in each process: in the history and in the log."""
    events = [event for event in job.events("foreign_member") if event["member"] == name]
    assert {event["replica"] for event in events} == replicas
    assert len({event["pid"] for event in events}) == len(events)
    for event in events:
        assert reason in event["reason"]
        log = job.output(event["replica"], attempt=event["attempt"])
        assert log.count(f"left aside at the lighthouse: member {name!r}") == 1


def test_a_claim_of_an_impossible_step(make_job: Callable[..., Job], come: Callable[[Job], StockMember]) -> None:
    """A stock torchft replica at step 1,000,000 comes amid training and leaves: no step is lost, repeated or healed."""
    delays = [{"replica": replica, "step": step, "seconds": 2} for replica in (0, 1) for step in (4, 12)]
    job = make_job(groups=2, steps=20, hooks={"delays": delays})
    job.start()
    job.wait_until(lambda: any(e["step"] == 3 for e in job.events("step_committed")), 60, "step 3")
    stranger = come(job)
    job.wait_until(lambda: any(e["step"] == 11 for e in job.events("step_committed")), 60, "step 11")
    stranger.leave()
    job.finish()
    events = check(job, survivors=[0, 1])
    committed = named(events, "step_committed")
    assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {((0, 1), 1)}
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")
    assert any(len(ids) == 3 for ids in stranger.quorums), "the stranger was in no quorum with the groups"
    check_named(job, STOCK, "not a titan_ft replica group", {0, 1})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_heal_beside_a_stranger(make_job: Callable[..., Job], come: Callable[[Job], StockMember], ranks: int) -> None:
    """A group that comes back at step 0 heals from its peer, not from who claims more, and is not taken for corrupt."""
    faults = [{"replica": 1, "point": "backward", "step": 4}]
    job = make_job(groups=2, ranks=ranks, steps=24, hooks={"faults": faults, "hold": 2})
    job.start()
    stranger = come(job)
    job.finish()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    assert {(event["replica"], event["donor"]) for event in named(events, "heal_finished")} == {(1, 0)}
    assert not named(events, "digest_mismatch")
    assert any(len(ids) == 3 for ids in stranger.quorums), "the stranger was in no quorum with the groups"
    check_named(job, STOCK, "not a titan_ft replica group", {0, 1})


@pytest.mark.slow
def test_a_group_with_another_config(make_job: Callable[..., Job]) -> None:
    """It ends for good with one line; the group that was there first names it and trains on to the end."""
    job = make_job(groups=2, flags=ALONE, hooks=ENDS_SOON, replica_flags={1: ["--optimizer.lr=1e-3"]}, steps=6)
    job.run()
    codes = {group.replica: [worker.code for worker in group.workers] for group in job.groups}
    assert sorted(codes.values()) == [[0], [3]], job.output(0) + job.output(1)
    (refused,) = [replica for replica, code in codes.items() if code == [3]]
    right = 1 - refused
    check_ended(job, refused, [f"must equal that of groups [{right}]"])
    committed = [event["step"] for event in job.events("step_committed") if event["replica"] == right]
    assert committed == list(range(1, 7))
    digests = {event["replica"]: event["config_digest"] for event in job.events("worker_started")}
    (event,) = job.events("foreign_member")
    assert event["replica"] == right
    assert f"digest {digests[refused]}; ours is {digests[right]}" in event["reason"]
    assert "left aside at the lighthouse" in job.output(right)


@pytest.mark.slow
def test_a_group_with_another_number_of_ranks(make_job: Callable[..., Job]) -> None:
    """It is refused with one line before it exchanges anything; the groups that were there lose no step over it.

    Its TOML and flags are the same: the degree of -1 means all ranks.
    """
    job = make_job(
        groups=3,
        replica_ranks={2: 2},
        steps=30,
        flags=[
            "--parallelism.data_parallel_shard_degree=-1",
            "--fault_tolerance.min_replica_size=2",
            "--fault_tolerance.start_timeout_seconds=0.5",
        ],
        # Every step takes long enough for the newcomer to ask for a quorum meanwhile.
        hooks={
            **ENDS_SOON,
            "gates": [{"name": "go", "replica": 0, "rank": 0, "step": 4}],
            "delays": [{"replica": 1, "rank": 0, "seconds": 0.05}],
        },
    )
    job.start(absent=[2])
    job.wait_for_gate("go", 0)
    job.start_again(2)
    job.wait_until(lambda: (job.markers / "ready-2-0").exists(), 60, "the newcomer has come")
    job.mark("go")
    job.finish()
    newcomer = job.groups.pop()  # what follows is about the others
    assert 3 in [worker.code for worker in newcomer.workers], job.output(2) + job.output(2, 1)
    check_ended(job, 2, ["this group has 2 ranks (dp_shard 2)", "the job's groups [0, 1] have 1 rank:"], num_ranks=2)
    assert not any(event["replica"] == 2 for event in job.events("joined", "step_committed"))
    events = check(job, survivors=[0, 1])
    committed = named(events, "step_committed")
    assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {((0, 1), 1)}
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")
    (name,) = {event["member"] for event in named(events, "foreign_member")}
    check_named(job, name, "it has 2 ranks (dp_shard 2), this group 1 rank", {0, 1})


@pytest.mark.slow
def test_two_jobs_at_one_lighthouse(make_job: Callable[..., Job]) -> None:
    """The job that comes later ends with one line that names both; the first one names it and loses nothing."""
    # The first job waits for the return of its dead group, which nobody starts before the other job has come.
    hooks: dict[str, Any] = {"faults": [{"replica": 1, "point": "backward", "step": 4}], "hold": 2}
    ours = make_job(groups=2, steps=24, flags=["--fault_tolerance.job_id=ours"], hooks=hooks)
    ours.start()
    flags = ["--fault_tolerance.job_id=theirs", f"--fault_tolerance.lighthouse={ours._address}", *ALONE]
    ours.wait_until(lambda: ours.events("step_committed"), 60, "the first step")
    theirs = make_job(groups=1, flags=flags)
    theirs.start()
    theirs.wait_until(lambda: (theirs.markers / "ready-0-0").exists(), 60, "the other job has come")
    ours.finish()
    theirs.finish()
    assert [worker.code for worker in theirs.groups[0].workers] == [3], theirs.output(0)
    check_ended(theirs, 0, ["serves job 'ours' (groups [", "job 'theirs'", "its own lighthouse"])
    assert not theirs.events("step_committed")
    events = check(ours, survivors=[0])
    check_killed(ours, events, [(1, 0, "sigkill:backward")])
    named_strangers = named(events, "foreign_member")
    assert named_strangers
    assert all("it belongs to job 'theirs'" in event["reason"] for event in named_strangers)


def check_ended(job: Job, replica: int, parts: list[str], num_ranks: int = 1) -> None:
    """Check that the worker said why it ended in one line, and said it once.

    Of several ranks the first says why; one that sees a sibling gone before it has heard may say just that.
    """
    reasons = []
    for rank in range(num_ranks):
        output = job.output(replica, rank)
        assert "Traceback" not in output
        (line,) = [line for line in output.splitlines() if line.startswith("titan_ft: ")]
        if not ("of this group is gone" in line and num_ranks > 1):
            reasons.append(line)
    assert reasons
    for line in reasons:
        for part in parts:
            assert part in line
