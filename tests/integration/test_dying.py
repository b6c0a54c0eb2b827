# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Thirteen ways in which processes of a run die, and the report of each in five views of the run.

Training, processes and signals are real. The views are those of a person: the terminal of the
launch (or of the group), `titan-ft top`, `titan-ft report`, its page, and `titan-ft check` with its
exit status.
"""

from __future__ import annotations

import html
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from tests.conftest import mounted_disk
from titan_ft.run.events import Event, LighthouseStarted, StepCommitted, WorkerStarted
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

pytestmark = pytest.mark.slow

SECONDS = 240.0  # for whatever is waited for; only a bug takes so long
SMALL = (
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--fault_tolerance.digest_every=1",
)


@dataclass
class Views:
    """The text of the five views of a run."""

    terminal: str
    top: str
    report: str
    page: str
    check: str
    check_status: int


class Dying:
    """The processes of one run. Its folder is read to time the signals."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / "run")
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self._printed: list[str] = []

    # Starting

    def start(
        self, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a process whose output belongs to the terminal of the run."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": f"{self.folder}:{REPOSITORY}", **(env or {})},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def launch(
        self, replicas: int, *flags: str, options: Sequence[str] = (), steps: int = 100_000
    ) -> None:
        command = ["-m", "titan_ft", "launch", str(CONFIG), "--run-dir", str(self.paths.root)]
        command += ["--replicas", str(replicas), "--ranks-per-replica", "1", *options, "--"]
        self.start(*command, *SMALL, f"--training.steps={steps}", *flags)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._printed.extend(iter(process.stdout.readline, ""))

    @property
    def terminal(self) -> str:
        return "".join(self._printed)

    # Waiting

    def wait_for(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (value := found()):
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.terminal}"
            time.sleep(0.05)
        return value

    def events(self, *kinds: type[Event]) -> list[Any]:
        found = read_events(self.paths.events) if self.paths.events.is_dir() else []
        return [event for event in found if isinstance(event, kinds)]

    def wait_for_line(self, text: str) -> None:
        self.wait_for(lambda: text in self.terminal, text)

    def wait_for_all(self, replicas: int) -> None:
        """Wait until every group has written the commit of a new step in which all groups took
        part.

        A group that is killed before it wrote the commit has no digest of it to compare, and
        `check` says "unknown".
        """
        known = max((event.step for event in self.events(StepCommitted)), default=0)

        def together() -> bool:
            writers: dict[int, set[int]] = {}
            for event in self.events(StepCommitted):
                if event.step > known and len(event.participants) == replicas:
                    writers.setdefault(event.step, set()).add(event.replica)
            return any(len(groups) == replicas for groups in writers.values())

        self.wait_for(together, f"a step of {replicas} groups")

    def wait_for_end(self, process: subprocess.Popen[str]) -> int:
        code = process.wait(SECONDS)
        time.sleep(0.2)  # for the thread that reads what it printed last
        return code

    # Killing

    def worker(self, replica: int) -> int:
        """Return the pid of the latest worker of a group."""
        started = [event for event in self.events(WorkerStarted) if event.replica == replica]
        return max(started, key=lambda event: event.attempt).pid

    def agent(self, replica: int) -> int:
        """Return the pid of a group's agent, which is the parent of its workers."""
        status = Path(f"/proc/{self.worker(replica)}/status").read_text()
        found = re.search(r"^PPid:\s+(\d+)$", status, re.MULTILINE)
        assert found is not None
        return int(found[1])

    def end(self) -> None:
        """End the processes that still run. Workers end with their parents."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(SECONDS)

    # Looking

    def run_command(self, *arguments: str) -> tuple[int, str]:
        """Run `titan-ft` on the run's folder, in a terminal of a usual width."""
        name, *options = arguments
        done = subprocess.run(
            [sys.executable, "-m", "titan_ft", name, str(self.paths.root), *options],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def look(self) -> Views:
        top = self.run_command("top", "--once")[1]
        report = self.run_command("report")[1]
        page = (self.paths.report / "index.html").read_text() if self.paths.report.is_dir() else ""
        status, check = self.run_command("check")
        return Views(self.terminal, top, report, _text_of(page), check, status)


def _text_of(page: str) -> str:
    """Return the visible text of the page, with the charts' texts and without scripts and
    styles.
    """
    body = re.sub(r"<script[^>]*src.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Dying]]:
    """Make runs, and end their processes after the module."""
    made: list[Dying] = []

    def new(name: str) -> Dying:
        made.append(Dying(tmp_path_factory.mktemp(name)))
        return made[-1]

    yield new
    for run in made:
        run.end()


# One run in which six kinds of processes die, one after the other, and come back


@pytest.fixture(scope="module")
def recovered(make: Callable[[str], Dying]) -> Views:
    """Three groups; each death is over before the next one comes; then Ctrl-C."""
    run = make("recovered")
    run.launch(3)
    run.wait_for_all(3)
    for number in (signal.SIGKILL, signal.SIGSEGV):
        os.kill(run.worker(1), number)
        run.wait_for_line(f"group 1 died: rank 0 was killed by {number.name}")
        run.wait_for_all(3)
    os.kill(run.worker(2), signal.SIGTERM)
    run.wait_for_line("group 2 left after step")
    run.wait_for_all(3)
    os.kill(run.events(LighthouseStarted)[-1].lighthouse_pid, signal.SIGKILL)
    run.wait_for_line("it is back at the same address")
    run.wait_for_all(3)
    os.kill(run.agent(1), signal.SIGKILL)
    run.wait_for_line("group 1 died: its agent was killed by SIGKILL")
    run.wait_for_all(3)
    frozen = run.worker(2)
    os.kill(frozen, signal.SIGSTOP)
    run.wait_for_line("group 2 is lost")
    os.kill(frozen, signal.SIGCONT)
    run.wait_for_all(3)
    run.processes[0].send_signal(signal.SIGINT)
    assert run.wait_for_end(run.processes[0]) == 130
    return run.look()


# Runs that end because of it, or that lose a group for good

BUG = """
from torchtitan.train import Trainer

forward_backward_step = Trainer.forward_backward_step


def fail(self, *args, **kwargs):
    if self.step == 12:
        raise RuntimeError("boom")
    return forward_backward_step(self, *args, **kwargs)


Trainer.forward_backward_step = fail
"""


@pytest.fixture(scope="module")
def launcher_killed(make: Callable[[str], Dying]) -> Views:
    """The launcher is killed; its processes end by themselves."""
    run = make("launcher")
    run.launch(2)
    run.wait_for_all(2)
    workers = [run.worker(replica) for replica in (0, 1)]
    run.processes[0].kill()
    run.wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the end of all workers"
    )
    run.wait_for(
        lambda: "the launcher is gone" in run.run_command("top", "--once")[1], "top to notice it"
    )
    return run.look()


@pytest.fixture(scope="module")
def model_raises(make: Callable[[str], Dying]) -> Views:
    """The model of the user raises an exception in step 12."""
    run = make("bug")
    (run.folder / "mybug.py").write_text(BUG)
    run.launch(2, "--experimental.custom_import=mybug", steps=40)
    assert run.wait_for_end(run.processes[0]) == 1
    return run.look()


@pytest.fixture(scope="module")
def no_network(make: Callable[[str], Dying]) -> Views:
    """A run whose data set is on a hub that cannot be reached."""
    run = make("offline")
    run.launch(2, "--training.dataset=c4", steps=40)
    assert run.wait_for_end(run.processes[0]) == 1
    return run.look()


class ByHand(Dying):
    """Two groups that are started one by one, as on a cluster."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.token = {"TITAN_FT_TOKEN": secrets.token_hex(16)}
        self.address = f"http://127.0.0.1:{self.port}"
        self.start(
            "-m", "titan_ft", "lighthouse", "--bind", f"127.0.0.1:{self.port}", env=self.token
        )

    def start_group(self, replica: int, steps: int) -> subprocess.Popen[str]:
        command = [
            "-m",
            "titan_ft",
            "group",
            str(CONFIG),
            "--replica",
            str(replica),
            "--replicas",
            "2",
        ]
        command += [
            "--nproc-per-node",
            "1",
            "--lighthouse",
            self.address,
            "--run-dir",
            str(self.paths.root),
            "--",
        ]
        return self.start(*command, *SMALL, f"--training.steps={steps}", env=self.token)

    def start_torchrun(self, replica: int, steps: int) -> subprocess.Popen[str]:
        """Start a group as torchtitan's own run_train.sh does, with TRAIN_FILE=titan_ft.train."""
        command = ["-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        command += [
            "--rdzv-endpoint=localhost:0",
            "-m",
            "titan_ft.train",
            f"--job.config-file={CONFIG}",
        ]
        command += [
            f"--job.dump-folder={self.paths.root}",
            f"--fault_tolerance.replica-id={replica}",
        ]
        command += [
            "--fault_tolerance.enable",
            "--fault_tolerance.group-size=2",
            f"--training.steps={steps}",
        ]
        return self.start(*command, *SMALL, env={**self.token, "TORCHFT_LIGHTHOUSE": self.address})


@pytest.fixture(scope="module")
def host_lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    """The host of a group is lost: its agent and its workers are gone, and nothing starts them
    again.
    """
    run = ByHand(tmp_path_factory.mktemp("host"))
    try:
        survivor, lost = (run.start_group(replica, steps=150) for replica in (0, 1))
        run.wait_for_all(2)
        worker = run.worker(1)
        lost.kill()
        os.kill(worker, signal.SIGKILL)
        assert run.wait_for_end(survivor) == 0
        yield run.look()
    finally:
        run.end()


@pytest.fixture(scope="module")
def torchrun_worker_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    """A worker of plain torchrun, which starts nothing again, is killed."""
    run = ByHand(tmp_path_factory.mktemp("torchrun"))
    try:
        survivor, lost = (run.start_torchrun(replica, steps=150) for replica in (0, 1))
        run.wait_for_all(2)
        os.kill(run.worker(1), signal.SIGKILL)
        assert run.wait_for_end(lost) != 0
        assert run.wait_for_end(survivor) == 0
        yield run.look()
    finally:
        run.end()


@pytest.fixture(scope="module")
def disk_full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    """The disk is too small for a checkpoint of 70 MB; events, and everything else, have room."""
    with mounted_disk(tmp_path_factory.mktemp("small") / "disk") as disk:
        disk.resize("60m")
        run = Dying(disk.folder)
        try:
            run.launch(2, "--checkpoint.enable", "--checkpoint.interval=10", steps=25)
            run.wait_for_end(run.processes[0])
            yield run.look()
        finally:
            run.end()


@pytest.fixture(scope="module")
def disk_full_for_events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    """The disk is full in the middle of the run and stays so: no event can be written any more."""
    with mounted_disk(tmp_path_factory.mktemp("small") / "disk") as disk:
        run = Dying(disk.folder)
        try:
            run.launch(2, steps=60)
            run.wait_for_all(2)
            disk.fill()
            run.wait_for_end(run.processes[0])
            disk.resize("60m")  # for the report
            yield run.look()
        finally:
            run.end()


# The table: a row for each way of dying, and what each view has to say of it

FINISHED = "Finished at step"
BOOM = r"RuntimeError: boom, rank 0 of group \d, \S*mybug.py:9"
OFFLINE = r"ConnectionError: Couldn't reach 'allenai/c4'"
LOST = r"without group 1, lost since step \d+: not heard of for \d+ s"

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "a worker is killed": (
        "recovered",
        {
            "terminal": r"\[ *\d+\.\d s\] group 1 died: rank 0 was killed by SIGKILL",
            "top": r"restarts 4",
            "report": r"group 1, attempt 0 +SIGKILL, survivors stalled",
            "page": r"killed by SIGKILL\s+rank 0 of group 1",
            "check": r"6 exits of workers explained",
        },
    ),
    "a worker crashes": (
        "recovered",
        {
            "terminal": r"group 1 died: rank 0 was killed by SIGSEGV; see \S+rank-0.log",
            "top": r"restarts 4",
            "report": r"group 1, attempt 1 +SIGSEGV, survivors stalled",
            "page": r"killed by SIGSEGV\s+rank 0 of group 1",
            "check": r"6 exits of workers explained",
        },
    ),
    "a worker is told to leave": (
        "recovered",
        {
            "terminal": r"group 2 left after step \d+ \(SIGTERM\)",
            "top": r"group 2 left after step",
            "report": r"drained +4 \(group 2, attempt 0",
            "page": r"drained",
            "check": r"Stopped by Ctrl-C at step \d+ of 100000\n +verdict: holds",
        },
    ),
    "the lighthouse is killed": (
        "recovered",
        {
            "terminal": r"the lighthouse ended \(SIGKILL\); it is back at the same address after",
            "top": r"lighthouse restarts 1",
            "report": r"lighthouse +1 restart",
            "page": r"lighthouse",
            "check": r"lighthouse restarted: 1 time",
        },
    ),
    "an agent is killed": (
        "recovered",
        {
            "terminal": r"\[ *\d+\.\d s\] group 1 died: its agent was killed by SIGKILL; see \S+supervisor.log\n",
            "top": r" 1 +left +\d+ .* 3 ",  # three restarts
            "report": r"group 1, attempt 2 +agent: SIGKILL, survivors stalled .* contributing again after",
            "page": r"its agent was killed by SIGKILL\s+group 1",
            "check": r"agent ended: 1 time",
        },
    ),
    "a worker is frozen": (
        "recovered",
        {
            "terminal": r"group 2 is lost: silent for \d+ s, last in step \d+",
            "top": r"group 2 is lost: silent for \d+ s, last in step \d+",
            "report": r"group 2, attempt 1 +silent, survivors stalled",
            "page": r"silent",
            "check": r"fell behind and healed while it lived",
        },
    ),
    "the launcher is killed": (
        "launcher_killed",
        {
            "top": r"End unknown, the launcher is gone: last at step \d+",
            "report": r"! End unknown, the launcher is gone: last at step \d+",
            "page": r"! End unknown, the launcher is gone: last at step \d+",
            "check": r"! End unknown, the launcher is gone: last at step \d+.*\n +verdict: unknown",
        },
    ),
    "the model raises an exception": (
        "model_raises",
        {
            "terminal": r"titan-ft launch: all groups end with RuntimeError: boom",
            "top": rf"Failed at step 12 of 40: {BOOM}",
            "report": rf"✗ Failed at step 12 of 40: {BOOM}",
            "page": rf"✗ Failed at step 12 of 40: {BOOM}",
            "check": rf"✗ Failed at step 12 of 40: {BOOM}",
        },
    ),
    "the data are on a hub that nobody reaches": (
        "no_network",
        {
            "terminal": rf"{OFFLINE}.*check the network",
            "top": rf"Never began: {OFFLINE}",
            "report": rf"✗ Never began: {OFFLINE}",
            "page": rf"✗ Never began: {OFFLINE}",
            "check": rf"✗ Never began: {OFFLINE}",
        },
    ),
    "the host of a group is lost": (
        "host_lost",
        {
            "terminal": r"group 1 is lost: no heartbeat for",
            "top": rf"{FINISHED} 150 {LOST}",
            "report": rf"! {FINISHED} 150 {LOST}",
            "page": rf"! {FINISHED} 150 {LOST}",
            "check": rf"! {FINISHED} 150 {LOST}\n +verdict: holds",
        },
    ),
    "a worker of plain torchrun is killed": (
        "torchrun_worker_killed",
        {
            "terminal": r"group 1 is lost: no heartbeat for",
            "top": rf"{FINISHED} 150 {LOST}",
            "report": rf"! {FINISHED} 150 {LOST}",
            "page": rf"! {FINISHED} 150 {LOST}",
            "check": rf"! {FINISHED} 150 {LOST}\n +verdict: holds",
        },
    ),
    "the disk is too small for a checkpoint": (
        "disk_full",
        {
            "terminal": r"could not save the checkpoint of step 10: the disk is full \(No space left on device\)",
            "top": r"could not save the checkpoint of step 10: the disk is full",
            "report": r"checkpoints +\d saved, \d failed \(last: step \d+: the disk is full",
            "page": r"The checkpoint of step 10 could not be written: the disk is full",
            "check": r"checkpoint failed: \d time",
        },
    ),
    "the disk is full for events": (
        "disk_full_for_events",
        {
            "terminal": r"not all events of \d process.* can be written \(is the disk full\?\)",
            "top": r"Finished; the events after step \d+ of 60 are missing",
            "report": r"! Finished; the events after step \d+ of 60 are missing",
            "page": r"! Finished; the events after step \d+ of 60 are missing",
            "check": r"! Finished; the events after step \d+ of 60 are missing\n +verdict: unknown: the last events of",
        },
    ),
}
STATUSES = {
    "recovered": 0,
    "launcher_killed": 1,
    "model_raises": 1,
    "no_network": 1,
    "host_lost": 0,
    "torchrun_worker_killed": 0,
    "disk_full": 0,
    "disk_full_for_events": 1,
}
"""Exit status of `titan-ft check`: 1 where the run failed, and where nobody can tell."""


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=f"{name}: {way}") for way, (name, _) in WAYS.items()]
)
def test_every_view_names_it(way: str, request: pytest.FixtureRequest) -> None:
    """No view is silent about a death, and none contradicts another one."""
    name, expected = WAYS[way]
    views: Views = request.getfixturevalue(name)
    silent = [
        view
        for view, pattern in expected.items()
        if re.search(pattern, getattr(views, view)) is None
    ]
    assert not silent, {view: getattr(views, view)[-4000:] for view in silent}


@pytest.mark.parametrize("name", STATUSES)
def test_status_of_check(name: str, request: pytest.FixtureRequest) -> None:
    """Scripts decide by it."""
    views: Views = request.getfixturevalue(name)
    assert views.check_status == STATUSES[name], views.check
