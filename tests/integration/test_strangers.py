# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Attacks on runs by peers without the token. tests/README.md lists the findings that the names
count.

The attacks come from this process. Another user of the host reaches the same ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import strangers
from harness.client import REPOSITORY, ZygoteClient
from harness.job import CONFIG, TOKEN, Job
from harness.trajectory import check, named
from torch.distributed import TCPStore

from titan_ft.membership.pulse import StatusPage
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.run.log import read_events
from titan_ft.system.address import split_address

pytestmark = pytest.mark.slow
DEADLINE = 60.0  # seconds; only ever reached by a bug
ATTACKED_STEP = 4


@pytest.fixture
def attack(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """Run a job of two groups, attack it during some of its steps, and check that the attack cost
    nothing.
    """

    def attack(make: Callable[[Job, int], None], ranks: int = 1, num_steps: int = 1) -> Job:
        delays = [
            {"replica": replica, "step": ATTACKED_STEP + number, "seconds": 2}
            for replica in (0, 1)
            for number in range(num_steps)
        ]
        job = make_job(groups=2, ranks=ranks, steps=10, hooks={"delays": delays})
        job.start()
        job.wait_until(
            lambda: any(e["step"] == ATTACKED_STEP - 1 for e in job.events("step_committed")),
            DEADLINE,
            "the step",
        )
        make(job, split_address(job._address)[1])
        job.finish()
        events = check(job, survivors=[0, 1])
        committed = named(events, "step_committed")
        assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {
            ((0, 1), 1)
        }
        assert not named(
            events, "exchange_failed", "heal_started", "digest_mismatch", "foreign_member"
        )
        return job

    return attack


def workers(job: Job) -> list[int]:
    return [worker.pid for group in job.groups for worker in group.workers]


def test_f1_kill(attack: Callable[..., Job]) -> None:
    """Kill requests through the lighthouse's page, and torchft's own at every port of the workers,
    have no effect.
    """

    def make(job: Job, port: int) -> None:
        status = StatusPage(LighthouseAddress(job._address, TOKEN)).read(DEADLINE)
        assert status is not None
        for name in status.heartbeats:
            assert strangers.refuses_kill(port, name.replace("/", "%2F"))
        ports = [own for pid in workers(job) for own in strangers.listening_ports(pid)]
        assert len(ports) >= len(job.groups), "each worker has a state server"
        for own in ports:
            strangers.kill(own)

    attack(make)


MANAGED = """
import ctypes, time
from datetime import timedelta
from torchft.coordination import LighthouseServer, ManagerServer
from titan_ft.system.process import end_at_exit

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
port = lighthouse.address().rsplit(":", 1)[1]
limit = timedelta(seconds=30)
manager = ManagerServer(
    replica_id="x", lighthouse_addr=f"http://127.0.0.1:{port}", hostname="127.0.0.1", bind="127.0.0.1:0",
    store_addr="x", world_size=1, heartbeat_interval=limit, connect_timeout=limit, quorum_retries=0,
)
libc = ctypes.CDLL(None)
hang = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda status, _: time.sleep(3600))
libc.on_exit(hang, None)  # as torch's handlers do, which wait for threads
end_at_exit()
print(manager.address().rsplit(":", 1)[1], flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="needs glibc")
def test_f1_a_killed_manager_ends_its_process() -> None:
    """torchft's manager, killed while its port is open, calls exit() on a thread. No exit handler
    keeps the process, so its agent sees the end.
    """
    environ = {**os.environ, "RUST_LOG": "warn"}
    with subprocess.Popen(
        [sys.executable, "-c", MANAGED], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            assert process.stdout is not None
            strangers.kill(int(process.stdout.readline()))
            assert process.wait(DEADLINE) == 1
        finally:
            process.kill()


def test_f3_an_impostor(attack: Callable[..., Job], zygote: ZygoteClient, tmp_path: Path) -> None:
    """The product's own worker without the run's token: it ends with a line, and was in no step."""

    def make(job: Job, port: int) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        hooks = {"replica": 1, "rank": 0, "attempt": 0, "markers": str(tmp_path)}
        environ = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHFT_LIGHTHOUSE": job._address,
            "TITAN_FT_TEST_HOOKS": json.dumps(hooks),
        }
        flags = [flag for flag in job.flags if "dump_folder" not in flag]
        for token in ("", secrets.token_hex(16)):
            folder = tmp_path / f"impostor-{token}"
            argv = [*flags, f"--job.dump_folder={folder}", "--fault_tolerance.replica_id=1"]
            argv.append("--fault_tolerance.start_timeout_seconds=1")  # it waits so long
            env = {**environ, "TITAN_FT_TOKEN": token}
            impostor = zygote.call("titan_ft.train:main", folder / "log", argv, env)
            assert impostor.code == 1, impostor.output()
            assert "refuses this group's TITAN_FT_TOKEN" in impostor.output()

    attack(make)


def test_f4_f5_f10_heartbeats_idle_connections_and_long_names(attack: Callable[..., Job]) -> None:
    """More strangers than groups, more connections than descriptors and names of a megabyte delay
    no group.
    """

    def make(job: Job, port: int) -> None:
        with strangers.idle_connections(port, 1100):
            for number in range(4):
                assert not strangers.heartbeat(port, f"ghost {number}")
        assert not strangers.heartbeat(port, "<" * 1_000_000)
        assert b"seen" not in strangers.read_page(port)
        status = StatusPage(LighthouseAddress(job._address, TOKEN)).read(DEADLINE)
        assert status is not None
        assert len(status.heartbeats) == len(job.groups)

    job = attack(make)
    refused = [event["kind"] for event in job.events("stranger_refused")]
    assert len(set(refused)) == len(refused), "one event for each kind"
    assert {"crowd", "no_secret"} <= set(refused)


def test_f19_half_open_connections_at_all_ports_of_the_workers(attack: Callable[..., Job]) -> None:
    """Hundreds of silent connections, noise and replayed bytes at the state servers and the control
    trees slow no step. Each kind of refusal is one event of each port.
    """

    def make(job: Job, port: int) -> None:
        chance = random.Random(19)
        ports = [own for pid in workers(job) for own in strangers.listening_ports(pid)]
        with contextlib.ExitStack() as held:
            for own in ports:
                held.enter_context(strangers.idle_connections(own, 200))
                strangers.replay(own)
                for _ in range(50):
                    strangers.send_garbage(own, chance)

    job = attack(make, ranks=2, num_steps=5)
    refused = [
        (event["replica"], event["rank"], event["port"], event["kind"])
        for event in job.events("stranger_refused")
    ]
    assert len(set(refused)) == len(refused), "one event for each kind"
    for replica in (0, 1):
        for rank in (0, 1):
            assert (replica, rank, "state server", "crowd") in refused
        assert (replica, 0, "control tree", "crowd") in refused
        assert (replica, 0, "control tree", "no_secret") in refused


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


ORDINARY_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""Before a command: it runs without any right of root, and reads the files of the test's user."""
MAY_RUN = (
    "import sys; from titan_ft.system.namespace import allow_namespaces as a; sys.exit(a() or 0)"
)


@pytest.mark.parametrize("user", ["own", "ordinary"])
def test_f6_f7_a_private_network_and_a_flood_at_its_metrics(tmp_path: Path, user: str) -> None:
    """A real run of two groups of two ranks, whose launcher may have 256 descriptors: only its
    metrics port can be reached, and 400 idle connections there do not disturb the run.

    A user who is not root enters a user namespace first.
    """
    prefix = ORDINARY_USER if user == "ordinary" else ()
    try:
        allowed = subprocess.run(
            [*prefix, sys.executable, "-c", MAY_RUN],
            capture_output=True,
            check=False,
            text=True,
            cwd=REPOSITORY,
        )
    except FileNotFoundError:
        pytest.skip("needs the command unshare")
    if allowed.returncode:
        pytest.skip(f"this system allows no network namespaces: {allowed.stderr.strip()}")
    port, folder = free_port(), tmp_path / "run"
    command = [
        *prefix,
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas=2",
        "--ranks-per-replica=2",
    ]
    command += [
        "--run-dir",
        str(folder),
        "--private-network",
        f"--metrics-port={port}",
        "--no-zygote",
        "--",
    ]
    command += [
        "--model.flavor=debugmodel_half",
        "--training.seq_len=32",
        "--training.local_batch_size=1",
    ]
    command += ["--training.steps=100000"]

    def limit() -> None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, preexec_fn=limit
    ) as run:
        try:

            def wait_for_step(step: int) -> None:
                deadline = time.monotonic() + 3 * DEADLINE
                while steps(folder) < step:
                    assert run.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.1)

            wait_for_step(3)
            events = read_events(folder / "events")
            lighthouse = next(
                event.address for event in events if event.name == "lighthouse_started"
            )
            pids = [event.pid for event in events if event.name == "worker_started"]
            outside = os.readlink("/proc/self/ns/net")
            assert all(os.readlink(f"/proc/{pid}/ns/net") != outside for pid in pids)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(split_address(lighthouse), DEADLINE)
            with strangers.idle_connections(port, 400):
                last_step = steps(folder)
                wait_for_step(last_step + 3)
            figures = strangers.ask(port, b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert re.search(rb"\ntitan_ft_\w+", figures)
        finally:
            run.terminate()
            run.communicate(timeout=DEADLINE)
    assert run.returncode == 143


def steps(folder: Path) -> int:
    """Return the last committed step of a run, or 0."""
    events: list[Any] = list(read_events(folder / "events")) if (folder / "events").exists() else []
    return max((event.step for event in events if event.name == "step_committed"), default=0)
