# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Strangers at the job's lighthouse: they are named and left aside, whatever they claim, and the job goes on."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from harness.job import Job
from harness.trajectory import check, named

STOCK = "train_llama_0:7f3a"  # as torchft's Manager makes them; sorts before every group's name


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
    delays = [{"replica": replica, "step": step, "seconds": 1} for replica in (0, 1) for step in (4, 8)]
    job = make_job(groups=2, steps=12, hooks={"delays": delays})
    job.start()
    job.wait_until(lambda: any(e["step"] == 3 for e in job.events("step_committed")), 60, "step 3")
    stranger = come(job)
    job.wait_until(lambda: any(e["step"] == 7 for e in job.events("step_committed")), 60, "step 7")
    stranger.leave()
    job.finish()
    events = check(job, survivors=[0, 1])
    committed = named(events, "step_committed")
    assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {((0, 1), 1)}
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")
    assert any(len(ids) == 3 for ids in stranger.quorums), "the stranger was in no quorum with the groups"
    check_named(job, STOCK, "its name has no valid seal", {0, 1})
