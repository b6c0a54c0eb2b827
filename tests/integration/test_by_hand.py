# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that are started by hand, as in docs/cluster.md: on two hosts, and by torchtitan's
run_train.sh.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Hosts, three_hosts
from titan_ft.launch.lighthouse import ANNOUNCEMENT
from titan_ft.run.log import read_events
from titan_ft.system.seal import lighthouse_secret
from titan_ft.system.token import TOKEN_ENV

ROOT = Path(__file__).parents[2]
SECONDS = 150
FLAGS = ("--model.flavor=debugmodel_half", "--training.seq_len=32", "--training.steps=6")
TITAN_FT = (sys.executable, "-m", "titan_ft")
# How run_train.sh of torchtitan 0.2.2 starts a job.
RUN_TRAIN = """torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \\
    --local-ranks-filter ${LOG_RANK} --role rank --tee 3 \\
    -m ${TRAIN_FILE} --job.config_file ${CONFIG_FILE} "$@"
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes, and end the running ones after the test."""
    processes: list[subprocess.Popen[str]] = []

    def run(*command: str, **environment: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of torchrun
        env = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        log = (tmp_path / f"{len(processes)}.log").open("w")
        with log:
            process = subprocess.Popen(
                command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True
            )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        process.communicate(timeout=60)


def announced(lighthouse: subprocess.Popen[str]) -> str:
    """Return the address that a lighthouse prints."""
    assert lighthouse.stdout is not None
    return lighthouse.stdout.readline().strip().removeprefix(ANNOUNCEMENT)


def expect_success(groups: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Wait for the end of the groups. They must have trained one trajectory together."""
    for group in groups:
        group.communicate(timeout=SECONDS)
    logs = {path.name: path.read_text()[-3000:] for path in folder.glob("*.log")}
    assert [group.returncode for group in groups] == [0] * len(groups), logs
    check = subprocess.run(
        [*TITAN_FT, "check", str(folder / "run")], capture_output=True, text=True, cwd=ROOT
    )
    assert check.returncode == 0, check.stdout
    events = "".join(path.read_text() for path in (folder / "run" / "events").glob("*.jsonl"))
    assert events.count('"participants": [0, 1]') >= 2 * 6


def wait_for(condition: Callable[[], Any], group: subprocess.Popen[str], log: Path) -> None:
    """Wait for a condition, while a group must run."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert group.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no gate"])
def test_a_group_with_another_token_trains_no_second_job(
    start: Start, tmp_path: Path, has_gate: bool
) -> None:
    """Both groups would save into one folder. Each refuses the other in one line."""
    tokens = ("the token of the run", "a token of another run")
    given = tokens[0] if has_gate else ""
    address = announced(
        start(*TITAN_FT, "lighthouse", "--bind", "127.0.0.1:0", **{TOKEN_ENV: given})
    )
    run_dir = tmp_path / "run"

    def start_group(replica: int) -> subprocess.Popen[str]:
        place = ["--replica", str(replica), "--replicas", "2", "--ranks-per-node", "1"]
        place += ["--lighthouse", address, "--run-dir", str(run_dir)]
        # The first group waits so long for the second one.
        flags = [*FLAGS, "--training.steps=100000", "--fault_tolerance.start_timeout_seconds=2"]
        # Nobody reads the pipe of its output while it trains: a full pipe would stop it.
        command = ["sh", "-c", 'exec "$@" >&2', "sh"]
        command += [*TITAN_FT, "group", "llama3_debug", *place, "--", *flags]
        return start(*command, **{TOKEN_ENV: tokens[replica]})

    def events(name: str) -> list[Any]:
        return [event for event in read_events(run_dir / "events") if event.name == name]

    log, other_log = tmp_path / "1.log", tmp_path / "2.log"
    first = start_group(0)
    wait_for(lambda: events("step_committed"), first, log)
    other = start_group(1)
    other.communicate(timeout=SECONDS)
    said = other_log.read_text()
    assert other.returncode == (1 if has_gate else 3), said
    refusal = (
        "refuses this group's TITAN_FT_TOKEN" if has_gate else "must have the same TITAN_FT_TOKEN"
    )
    assert refusal in said
    if not has_gate:
        wait_for(lambda: events("foreign_member"), first, log)
        assert log.read_text().count("left aside at the lighthouse: member") == 1
    last = len(events("step_committed"))
    wait_for(lambda: len(events("step_committed")) > last, first, log)
    assert {tuple(event.participants) for event in events("step_committed")} == {(0,)}
    assert not events("exchange_failed")
    assert lighthouse_secret(tokens[0]) not in log.read_text() + said
    assert [event.replica for event in events("worker_exited")] == [1], "it is started once"


@pytest.mark.slow
def test_torchtitans_own_script_starts_groups(start: Start, tmp_path: Path) -> None:
    """With TRAIN_FILE=titan_ft.train, run_train.sh starts groups that meet at the lighthouse and
    train together.
    """
    (tmp_path / "run_train.sh").write_text(RUN_TRAIN)
    address = announced(start(*TITAN_FT, "lighthouse", "--bind", "127.0.0.1:0"))
    environment = {
        "TORCHFT_LIGHTHOUSE": address,
        "TRAIN_FILE": "titan_ft.train",
        "NGPU": "1",
        "LOG_RANK": "0",
        "CONFIG_FILE": str(ROOT / "configs" / "llama3_debug.toml"),
    }
    own = (
        f"--job.dump_folder={tmp_path / 'run'}",
        "--fault_tolerance.enable",
        "--fault_tolerance.group_size=2",
    )
    groups = [
        start(
            "bash",
            "run_train.sh",
            *own,
            f"--fault_tolerance.replica_id={replica}",
            *FLAGS,
            **environment,
        )
        for replica in range(2)
    ]
    expect_success(groups, tmp_path)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Provide hosts with IPv6 alone."""
    with three_hosts("fd00:77::{}/64") as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])
def test_two_hosts(start: Start, hosts: Hosts, tmp_path: Path, shared: bool) -> None:
    """Two hosts that know only the lighthouse's printed address train together."""
    address = announced(
        start(*hosts.command(0), *TITAN_FT, "lighthouse", TITAN_FT_TOKEN="a secret of this run")
    )
    assert address == "http://[fd00:77::1]:29510"
    folders = [tmp_path / "run" if shared else tmp_path / f"run{replica}" for replica in range(2)]
    groups = []
    for replica, folder in enumerate(folders):
        options = [
            "--replica",
            str(replica),
            "--replicas",
            "2",
            "--ranks-per-node",
            "1",
            "--lighthouse",
            address,
        ]
        command = [
            *TITAN_FT,
            "group",
            "llama3_debug",
            *options,
            "--run-dir",
            str(folder),
            "--",
            *FLAGS,
        ]
        groups.append(
            start(*hosts.command(replica), *command, TITAN_FT_TOKEN="a secret of this run")
        )
    for group in groups:
        group.communicate(timeout=SECONDS)
    if not shared:
        (tmp_path / "run" / "events").mkdir(parents=True)
        for file in tmp_path.glob("run?/events/*.jsonl"):
            shutil.copy(file, tmp_path / "run" / "events")
    expect_success(groups, tmp_path)
