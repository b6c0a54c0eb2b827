# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Foreign members at the job's lighthouse are named and ignored, whatever they claim, and the job
continues.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from harness.job import TOKEN, Job
from harness.trajectory import check, named

from titan_ft.membership.pulse import StatusPage
from titan_ft.protocol.member import Member
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.system.address import split_address

STOCK = "train_llama_0:7f3a"  # as torchft's Manager makes them; sorts before every group's name


class StockMember:
    """A replica of a job that uses torchft without titan_ft, and claims to have made a million
    steps.

    It has this run's secret; otherwise the gate would refuse it.
    """

    def __init__(self, lighthouse: str, name: str = STOCK) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        self._server = ManagerServer(
            replica_id=name,
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
        """Stop the heartbeats, so that the other members no longer wait for this one."""
        self._stop.set()
        self._server.shutdown()


@pytest.fixture
def come() -> Iterator[Callable[[Job], StockMember]]:
    """Send a stranger to a job's lighthouse; it leaves with the test."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is loaded
    # Takes seconds, in which a small job would be over.
    importlib.import_module("torchft.coordination")
    came: list[StockMember] = []

    def come(job: Job) -> StockMember:
        came.append(
            StockMember(LighthouseAddress(job._address, TOKEN).url_for_client(job._address))
        )
        return came[-1]

    yield come
    for stranger in came:
        stranger.leave()


def lighthouse_client(address: str) -> Any:
    from torchft.coordination import LighthouseClient

    return LighthouseClient(address, connect_timeout=timedelta(seconds=10))


def kill(replica: int, point: str, step: int) -> dict[str, Any]:
    return {"replica": replica, "point": point, "step": step}


def check_named(job: Job, name: str, reason: str, replicas: set[int]) -> None:
    """These groups named the foreign member once in each process, in the history and in the log."""
    events = [event for event in job.events("foreign_member") if event["member"] == name]
    assert {event["replica"] for event in events} == replicas
    assert len({event["pid"] for event in events}) == len(events)
    for event in events:
        assert reason in event["reason"]
        log = job.output(event["replica"], attempt=event["attempt"])
        assert log.count(f"left aside at the lighthouse: member {name}, because") == 1


def test_a_claim_of_an_impossible_step(
    make_job: Callable[..., Job], come: Callable[[Job], StockMember]
) -> None:
    """A stock torchft replica at step 1,000,000 joins during training and leaves: no step is lost,
    repeated or healed.
    """
    delays = [
        {"replica": replica, "step": step, "seconds": 1} for replica in (0, 1) for step in (4, 8)
    ]
    job = make_job(groups=2, steps=12, hooks={"delays": delays})
    job.start()
    job.wait_until(lambda: any(e["step"] == 3 for e in job.events("step_committed")), 60, "step 3")
    stranger = come(job)
    job.wait_until(lambda: any(e["step"] == 7 for e in job.events("step_committed")), 60, "step 7")
    stranger.leave()
    job.finish()
    events = check(job, survivors=[0, 1])
    committed = named(events, "step_committed")
    assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {
        ((0, 1), 1)
    }
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")
    assert any(len(ids) == 3 for ids in stranger.quorums), (
        "the stranger was in no quorum with the groups"
    )
    check_named(job, STOCK, "its name has no valid seal", {0, 1})


def test_strangers_of_all_kinds_at_once(make_job: Callable[..., Job]) -> None:
    """Under forged names, heartbeats and idle connections all groups train on, and a killed group
    returns.

    The heartbeats and connections lack the run's secret. The forged names have it, as if their
    sender had listened on the network, and lack the seal: one claims to be the oldest process of
    all, one a newer process of group 1.
    """
    delays = [
        {"replica": replica, "step": step, "seconds": 1} for replica in (0, 1) for step in (4, 8)
    ]
    job = make_job(
        groups=2,
        steps=14,
        hooks={"delays": delays, "faults": [kill(1, "backward", step=10)], "hold": 2},
    )
    job.start()
    job.wait_until(lambda: any(e["step"] == 3 for e in job.events("step_committed")), 60, "step 3")
    address = LighthouseAddress(job._address, TOKEN)
    status = StatusPage(address).read(10.0)
    assert status is not None
    (group1,) = (Member.parse(name, TOKEN) for name in status.heartbeats if "/000001/" in name)
    forged = [
        replace(group1, token="", **change)
        for change in ({"started": 1.0, "job": "evil"}, {"started": 4e9})
    ]
    with contextlib.ExitStack() as attack:
        for _ in range(1100):  # 1,030 closed torchft's port for good
            attack.enter_context(socket.create_connection(split_address(job._address), 10.0))
        for number in range(4):
            with pytest.raises(RuntimeError, match="transport error"):
                lighthouse_client(job._address).heartbeat(f"ghost {number}", timedelta(seconds=10))
        strangers = [
            StockMember(address.url_for_client(job._address), one.replica_id) for one in forged
        ]
        job.wait_until(
            lambda: any(e["step"] == 7 for e in job.events("step_committed")), 60, "step 7"
        )
        for stranger in strangers:
            stranger.leave()
        job.finish()
    events = check(job, survivors=[0])
    assert any(len(ids) > 2 for stranger in strangers for ids in stranger.quorums), (
        "no stranger was in a quorum"
    )
    assert {tuple(event["participants"]) for event in named(events, "step_committed")} == {
        (0, 1),
        (0,),
    }
    assert not named(events, "digest_mismatch")
    assert [event["replica"] for event in named(events, "heal_finished")] == [1]
    refused = [event["kind"] for event in job.events("stranger_refused")]
    assert sorted(refused) == ["crowd", "no_secret", "silent"], "one event for each kind"
    for event in named(events, "foreign_member"):
        assert "its name has no valid seal" in event["reason"]
    foreign = [event["pid"] for event in named(events, "foreign_member")]
    assert foreign
    assert len(set(foreign)) == len(foreign), "one event a process for all of them"
