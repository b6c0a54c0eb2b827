# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft chaos` on a job whose workers are real processes and whose events the test writes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build, named, untyped
from titan_ft.chaos.command import JobFollower, asked_plan, run_chaos
from titan_ft.chaos.plan import Listed
from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import FAULTS, describe
from titan_ft.options import Chaos
from titan_ft.run.log import encode, read_events
from titan_ft.run.paths import RunPaths

COMMAND = (
    "import json, sys; from pathlib import Path; from titan_ft.chaos.command import run_chaos; "
    "from titan_ft.options import Chaos; "
    "given = json.loads(sys.argv[1]); files = {name: Path(given.pop(name)) for name in ('run_dir', 'plan') "
    "if name in given}; code = run_chaos(Chaos(**files, **given)); "
    "assert not {'torch', 'torchtitan', 'torchft'} & set(sys.modules); sys.exit(code)"
)


class Job:
    """Sleeping processes for workers, and the events that workers would write."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.paths.events.mkdir(parents=True)
        self.processes: list[subprocess.Popen[Any]] = []
        self.workers: dict[tuple[int, int], subprocess.Popen[Any]] = {}
        self.step = 0

    def tell(self, name: str, **fields: Any) -> None:
        """Write an event as another process would."""
        event = build(named(name), **{"time": time.time(), "mono": time.monotonic(), **fields})
        with self.paths.events_file("test").open("ab") as file:
            file.write(encode(event))

    def start(self, *command: str) -> subprocess.Popen[Any]:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.processes.append(process)
        return process

    def launch(self, replicas: int = 2, ranks: int = 2, host: str = "") -> None:
        self.tell("launch_started", replicas=replicas, ranks_per_replica=ranks)
        for replica in range(replicas):
            for rank in range(ranks):
                worker = self.sleeper("titan_ft", f"{replica} {rank}")
                self.workers[replica, rank] = worker
                told = {"pid": worker.pid, "host": host or socket.gethostname(), "slurm": None}
                self.tell("worker_started", replica=replica, rank=rank, attempt=0, **told)

    def sleeper(self, *words: str) -> subprocess.Popen[Any]:
        process = self.start("-c", "import time; print('up', flush=True); time.sleep(600)", *words)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    def commit(self) -> None:
        self.step += 1
        replicas = sorted({replica for replica, _ in self.workers})
        for replica, rank in self.workers:
            told = {"step": self.step, "participants": replicas}
            self.tell("step_committed", replica=replica, rank=rank, attempt=0, **told)

    def chaos(self, **given: Any) -> subprocess.Popen[Any]:
        return self.start("-c", COMMAND, json.dumps({"run_dir": str(self.paths.root), **given}))

    def told(self, *names: str) -> list[dict[str, Any]]:
        return [untyped(event) for event in read_events(self.paths.events) if event.name in names]

    def state(self, replica: int, rank: int) -> str:
        return (
            Path(f"/proc/{self.workers[replica, rank].pid}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()[0]
        )

    def cleanup(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "run")
    yield made
    made.cleanup()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def takes(process: subprocess.Popen[Any], signum: signal.Signals) -> bool:
    """True if a process has a handler of its own for a signal."""
    caught = re.search(
        r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE
    )
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def output(process: subprocess.Popen[Any]) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed.decode()


def test_one_fault_now(job: Job) -> None:
    """One fault hits a running job, is printed and recorded, and the status is 0."""
    job.launch()
    job.commit()
    code, printed = output(job.chaos(fault="kill_group", replica=1))
    assert code == 0, printed
    assert "chaos: kill_group at group 1\n" in printed
    assert [job.workers[1, rank].wait(30) for rank in (0, 1)] == [-signal.SIGKILL] * 2
    assert job.state(0, 0) == "S"
    (told,) = job.told("fault_injected")
    assert told["target"] == {"replica": 1}
    assert [event["injected"] for event in job.told("chaos_finished")] == [1]
    assert list(job.paths.events.glob("chaos-*.jsonl"))


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ({"fault": "kill_group", "replica": 1}, 0, "cannot be written (No space left on device)"),
        pytest.param(
            {"fault": "segfault", "replica": 0, "rank": 1},
            1,
            "segfault skipped: the order could not be written",
            marks=pytest.mark.slow,  # it waits for room, as for everything that may come
        ),
    ],
)
def test_a_fault_on_a_full_disk(
    small_disk: Any, fault: dict[str, Any], code: int, told: str
) -> None:
    """A signal needs no room, and the delay of its event is reported. An order that cannot be
    written is a fault that is not injected.
    """
    job = Job(small_disk.folder / "run")
    try:
        job.launch()
        job.commit()
        small_disk.fill()
        chaos = job.chaos(**fault)
        assert chaos.stdout is not None
        printed = ""
        while told not in printed:
            line = chaos.stdout.readline().decode()
            assert line, printed
            printed += line
        small_disk.free()  # else it waits for room until its time is over
        status, rest = output(chaos)
        assert (status, "Traceback" in printed + rest) == (code, False), printed + rest
        if not code:
            assert [job.workers[1, rank].wait(30) for rank in (0, 1)] == [-signal.SIGKILL] * 2
    finally:
        job.cleanup()


def test_a_fault_that_cannot_be_injected(job: Job) -> None:
    """The status is 1 with the reason, and no process was hit."""
    job.launch()
    job.commit()
    code, printed = output(job.chaos(fault="kill_lighthouse"))
    assert code == 1, printed
    assert "kill_lighthouse skipped: the job's launcher keeps no lighthouse" in printed
    assert not job.told("fault_injected")


def test_a_stop_is_undone_at_its_time(job: Job) -> None:
    """The command stays until then."""
    job.launch()
    job.commit()
    chaos = job.chaos(fault="stop_rank", replica=0, rank=1, settings=["seconds=1"])
    wait_until(lambda: job.state(0, 1) == "T", "the rank stopped")
    code, printed = output(chaos)
    assert code == 0, printed
    wait_until(lambda: job.state(0, 1) == "S", "the rank going on")
    injected, undone = job.told("fault_injected", "fault_undone")
    assert undone["mono"] - injected["mono"] >= 1.0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_undone_when_the_command_is_ended(job: Job, signum: signal.Signals) -> None:
    """Ctrl-C leaves no process stopped."""
    job.launch()
    job.commit()
    chaos = job.chaos(fault="stop_group", replica=0, settings=["seconds=600"])
    wait_until(lambda: job.state(0, 0) + job.state(0, 1) == "TT", "the group stopped")
    chaos.send_signal(signum)
    code, printed = output(chaos)
    assert code == 128 + signum, printed
    wait_until(lambda: job.state(0, 0) + job.state(0, 1) == "SS", "the group going on")
    assert len(job.told("fault_undone")) == 1
    assert len(job.told("chaos_finished")) == 1


def test_a_plan_goes_on_until_the_job_ends(job: Job, tmp_path: Path) -> None:
    """The schedule starts with the first step of all groups, and ends with the job, even with
    stopped workers.
    """
    plan = tmp_path / "plan.toml"
    plan.write_text('seed = 3\n[[rule]]\nwhen = "every"\nseconds = 0.2\nfaults = ["stop_rank"]\n')
    job.launch()
    chaos = job.chaos(plan=str(plan), seed=4)
    wait_until(lambda: takes(chaos, signal.SIGTERM), "the command's start")
    assert not job.told("chaos_started")
    job.commit()
    wait_until(lambda: job.told("fault_injected"), "a fault")
    assert [event["seed"] for event in job.told("chaos_started")] == [4]
    job.tell("launch_finished", code=0, reason="all groups finished")
    code, printed = output(chaos)
    assert code == 0, printed
    assert "chaos ends: 1 injected" in printed
    assert all(job.state(*worker) == "S" for worker in job.workers)


def test_a_plan_ends_after_its_time(job: Job, tmp_path: Path) -> None:
    """--for-seconds ends an endless plan. Faults that are due later are not injected."""
    plan = tmp_path / "plan.toml"
    plan.write_text('[[rule]]\nwhen = "every"\nseconds = 600\nfaults = ["kill_group"]\n')
    job.launch()
    code, printed = output(job.chaos(plan=str(plan), for_seconds=0.5))
    assert code == 0, printed
    assert "chaos ends: 0 injected, 0 skipped" in printed
    assert not job.told("fault_injected")


def test_a_lighthouse_on_this_host(job: Job) -> None:
    """The launcher's newest running lighthouse is hit."""
    job.launch()
    lighthouse = job.sleeper("titan_ft", "lighthouse")
    job.tell("lighthouse_started", lighthouse_pid=lighthouse.pid, address="http://127.0.0.1:1")
    job.commit()
    code, printed = output(job.chaos(fault="kill_lighthouse"))
    assert code == 0, printed
    assert lighthouse.wait(30) == -signal.SIGKILL


def test_an_order_waits_for_its_agent(job: Job) -> None:
    """The command ends with the agent's event of the injection."""
    job.launch()
    job.commit()
    chaos = job.chaos(fault="segfault", replica=1, rank=0)
    wait_until(
        lambda: job.paths.chaos_orders.exists() and job.paths.chaos_orders.read_text(), "the order"
    )
    order = json.loads(job.paths.chaos_orders.read_text())
    assert chaos.poll() is None
    told = {name: order[name] for name in ("fault", "shot", "seed", "params")}
    job.tell(
        "fault_injected", replica=1, rank=0, attempt=0, target={"replica": 1, "rank": 0}, **told
    )
    code, printed = output(chaos)
    assert code == 0, printed
    assert "chaos: segfault at group 1 rank 0" in printed


def test_a_folder_without_a_running_job_is_refused(job: Job, tmp_path: Path) -> None:
    """No folder, no events, a finished job, and workers that are gone or elsewhere are refused in
    one line each.
    """
    with pytest.raises(ConfigError, match="there is no such folder"):
        JobFollower(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="it has no events"):
        JobFollower(job.paths.root).check()
    job.launch(replicas=1, ranks=1)
    JobFollower(job.paths.root).check()
    job.workers[0, 0].kill()
    job.workers[0, 0].wait(30)
    with pytest.raises(ConfigError, match="no worker of it is alive"):
        JobFollower(job.paths.root).check()
    job.tell("launch_finished", code=0, reason="")
    with pytest.raises(ConfigError, match="its training has ended"):
        JobFollower(job.paths.root).check()
    job.launch(replicas=1, ranks=1, host="node7")
    with pytest.raises(ConfigError, match="its workers run on node7: run titan-ft chaos there"):
        JobFollower(job.paths.root).check()
    slurm = {"job": "1", "step": "0"}
    job.tell("worker_started", replica=0, rank=0, attempt=1, pid=1, host="node7", slurm=slurm)
    JobFollower(job.paths.root).check()
    assert not job.told("chaos_started")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must get a FAULT or --plan FILE, got neither"),
        ({"fault": "kill_group", "plan": Path("x")}, "got both"),
        ({"plan": Path("x"), "rank": 1}, "--rank must come with a FAULT"),
        ({"plan": Path("x"), "settings": ["a=1"]}, "--set must come with a FAULT"),
        ({"fault": "stop_rank", "settings": ["seconds"]}, "--set must be NAME=NUMBER"),
        ({"fault": "stop_rank", "settings": ["seconds=soon"]}, "--set must be NAME=NUMBER"),
        (
            {"fault": "stop_rank", "settings": ["seconds=-1"]},
            "seconds must be a number > 0, got -1",
        ),
        ({"fault": "stop_rnk"}, "did you mean stop_rank"),
        (
            {"fault": "link_dead", "replica": 1, "settings": ["peer=1"]},
            "params.peer must be another group than the target",
        ),
        ({"fault": "kill_group", "rank": 1}, "rank must be left out with kill_group"),
        ({"fault": "kill_group", "for_seconds": 0.0}, "--for-seconds must be > 0"),
        ({"plan": Path("/nowhere/x.toml")}, "x.toml"),
    ],
)
def test_bad_usage(job: Job, given: dict[str, Any], message: str) -> None:
    """Refused before anything of the job is looked at."""
    with pytest.raises(ConfigError, match=message):
        run_chaos(Chaos(job.paths.root, **given))


def test_settings_are_numbers(job: Job) -> None:
    """A count stays a whole number."""
    (rule,) = asked_plan(Chaos(job.paths.root, "kill_groups", settings=("count=3",), seed=1)).rules
    assert isinstance(rule, Listed)
    assert repr(rule.listed[0].fault.params) == "{'count': 3}"


def test_catalogue_names_every_fault() -> None:
    """The catalogue has one line for each fault."""
    lines = describe().splitlines()
    assert [line.split()[0] for line in lines] == list(FAULTS)
    assert "seconds=10" in next(line for line in lines if line.startswith("stop_rank"))
    assert "(seconds=10, peer=random)" in next(
        line for line in lines if line.startswith("link_dead")
    )


def test_the_command_leaves_signal_handlers_alone(job: Job) -> None:
    """The signal handlers are afterwards as before."""
    before = signal.getsignal(signal.SIGINT)
    job.launch()
    job.commit()
    assert run_chaos(Chaos(job.paths.root, "kill_rank", 0, 0)) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert job.workers[0, 0].wait(30) == -signal.SIGKILL
    assert os.getpid() not in {worker.pid for worker in job.workers.values()}
