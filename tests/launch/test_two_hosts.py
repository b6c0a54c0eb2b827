# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agents of a group on two hosts that can vanish; the workers' entry is real, training is not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Hosts, three_hosts

A, B = 0, 1
LOST = "rank 1 was lost with its host host-b, or with the agent there"
CRASH = """
import os, time
while not (paths.root / f"go-{attempt}").exists(): time.sleep(0.02)
os._exit(0)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with three_hosts() as made:
        yield made


class Group:
    """One group with a rank on host A, whose agent leads, and a rank on host B."""

    def __init__(self, run: Any, hosts: Hosts) -> None:
        self._run, self._hosts = run, hosts
        run.env |= {"CRASH": CRASH, "TITAN_FT_TOKEN": "secret"}

    def start(self, host: int) -> subprocess.Popen[str]:
        """Start the agent of a host."""
        command = [
            "-m",
            "titan_ft.launch.group.agent",
            "--cluster",
            f"--run-dir={self._run.paths.root}",
            "--replica=3",
        ]
        command += [
            "--ranks=1",
            "--module=crashing_worker",
            "--no-zygote",
            "--bind=::",
            "--hosts=2",
        ]
        command += [f"--rendezvous={self._hosts.address(A)}:29400", "--"]
        flags = [f"--job.dump_folder={self._run.paths.root}", "--fault_tolerance.replica_id=3"]
        return self._run.start(*command, *flags, prefix=self._hosts.command(host))

    def wait_for_workers(self, attempt: int) -> list[dict[str, Any]]:
        """Return both workers of an attempt, by rank, once they have begun."""

        def started() -> list[dict[str, Any]]:
            events = [event for event in self._run.events("worker_started") if event["attempt"] == attempt]
            return sorted(events, key=lambda event: event["rank"]) if len(events) == 2 else []

        return list(self._run.wait_until(started, 60.0, f"attempt {attempt} has begun"))

    def wait_for_cause(self, attempt: int) -> dict[str, Any]:
        """Return the event of the end that ended an attempt."""

        def ends() -> list[dict[str, Any]]:
            exits = [event for event in self._run.events("worker_exited") if event["attempt"] == attempt]
            return [event for event in exits if not event["stopped"]]

        return dict(self._run.wait_until(ends, 60.0, f"the end of attempt {attempt} is announced")[0])


@pytest.mark.slow
def test_what_the_agents_of_two_hosts_survive(run: Any, hosts: Hosts) -> None:
    """A rank dies, an agent dies, a host vanishes, the link between both breaks, the first rank's host vanishes."""
    group = Group(run, hosts)
    agents = {host: group.start(host) for host in (A, B)}
    workers = group.wait_for_workers(0)

    os.kill(workers[1]["pid"], signal.SIGKILL)
    assert (group.wait_for_cause(0)["reason"], group.wait_for_cause(0)["host"]) == (
        "rank 1 was killed by SIGKILL",
        "host-b",
    )
    workers = group.wait_for_workers(1)

    agents[B].kill()
    assert group.wait_for_cause(1)["reason"] == LOST
    agents[B] = group.start(B)
    workers = group.wait_for_workers(2)

    hosts.lose(B)
    assert group.wait_for_cause(2)["reason"] == LOST
    hosts.plug(B, "up")
    agents[B] = group.start(B)
    workers = group.wait_for_workers(3)

    hosts.plug(B, "down")  # nothing dies: both hosts are there, and do not reach each other
    assert group.wait_for_cause(3)["reason"] == LOST
    run.wait_until(lambda: not run.is_alive(workers[1]["pid"]), 60.0, "the rank without a leader ended")
    hosts.plug(B, "up")
    workers = group.wait_for_workers(4)

    hosts.lose(A)
    run.wait_until(lambda: not run.is_alive(workers[1]["pid"]), 60.0, "the rank without a leader ended")
    assert agents[B].poll() is None
    hosts.plug(A, "up")
    agents[A] = group.start(A)
    group.wait_for_workers(5)

    Path(run.paths.root, "go-5").touch()
    errors = [agents[host].communicate(timeout=60)[1] for host in (A, B)]
    assert [agents[host].returncode for host in (A, B)] == [0, 0], errors
    assert [event["attempt"] for event in run.events("replica_restarted")] == [1, 2, 3, 4, 5]
