# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Training on a disk that is full for a while, or for good, costs no step, no group and no
promise.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from titan_ft.cli.main import main
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.appender import any_is_cut
from titan_ft.run.events import (
    Drained,
    Event,
    EventsDelayed,
    EventsDropped,
    FaultInjected,
    HealFinished,
    LaunchFinished,
    ReplicaRestarted,
    StepCommitted,
    TrainingFinished,
    WorkerStarted,
)
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

SECONDS = 120.0  # for whatever is waited for; only a bug takes so long


class FullDiskRun:
    """A launch in a folder on a small disk. Its terminal output goes elsewhere."""

    def __init__(
        self, disk: Any, steps: int, *flags: str, replicas: int = 2, options: Sequence[str] = ()
    ) -> None:
        self.disk, self.steps, self.paths = disk, steps, RunPaths(disk.folder / "run")
        command = [
            sys.executable,
            "-m",
            "titan_ft",
            "launch",
            str(CONFIG),
            "--run-dir",
            str(self.paths.root),
        ]
        command += ["--replicas", str(replicas), "--ranks-per-replica", "1", *options, "--"]
        command += [
            "--training.seq_len=32",
            "--training.local_batch_size=1",
            f"--training.steps={steps}",
            *flags,
        ]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.printed.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (value := found()):
            assert self.process.poll() is None, f"ended before {what}: {self.text}"
            assert time.monotonic() < deadline, f"not in time: {what}: {self.text}"
            time.sleep(0.05)
        return value

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code

    @property
    def text(self) -> str:
        return "".join(self.printed)

    def of(self, *kinds: type[Event]) -> list[Any]:
        events = read_events(self.paths.events)
        return [event for event in events if isinstance(event, kinds)]

    def committed(self, replica: int) -> list[int]:
        return [event.step for event in self.of(StepCommitted) if event.replica == replica]

    def fill_after(self, step: int) -> None:
        """Fill the disk after a step of all groups, and wait until every group failed to write an
        event.
        """
        self.wait_for(
            lambda: all(step in self.committed(replica) for replica in (0, 1)), f"step {step}"
        )
        self.disk.fill()
        self.wait_for(
            lambda: all(self.is_cut(replica) for replica in (0, 1)), "events that cannot be written"
        )

    def is_cut(self, replica: int) -> bool:
        return any_is_cut(self.paths.events, RunPaths.workers_pattern(replica, "*"))


@pytest.fixture
def launch(small_disk: Any) -> Iterator[Callable[..., FullDiskRun]]:
    started: list[FullDiskRun] = []

    def start(steps: int, *flags: str, **settings: Any) -> FullDiskRun:
        started.append(FullDiskRun(small_disk, steps, *flags, **settings))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.send_signal(signal.SIGINT)
            run.process.wait(60)


def check_one_end(run: FullDiskRun) -> None:
    """Both groups finished at the last step with the same bytes, and committed each step once."""
    finished = run.of(TrainingFinished)
    assert {(event.replica, event.step) for event in finished} == {(0, run.steps), (1, run.steps)}
    assert len({event.digest for event in finished}) == 1
    assert finished[0].digest is not None


@pytest.mark.slow
def test_disk_that_is_full_for_a_while(
    launch: Callable[..., FullDiskRun], small_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues. After the disk has room again, all events, curves and lines arrive, and
    every promise holds.
    """
    run = launch(60)
    run.fill_after(5)
    full = time.time()
    times = [event.time for event in run.of(StepCommitted) if event.replica == 0]
    time.sleep(10 * (times[-1] - times[0]) / len(times))  # about ten steps
    small_disk.free()
    free = time.time()
    assert run.end() == 0, run.text
    check_one_end(run)
    for replica in (0, 1):
        assert run.committed(replica) == list(range(1, 61))
    assert any(full < event.time < free for event in run.of(StepCommitted))
    assert not run.of(ReplicaRestarted, EventsDropped)
    delayed = run.of(EventsDelayed)
    assert {event.replica for event in delayed} == {0, 1}
    assert {event.error for event in delayed} == {"No space left on device"}
    assert [event.code for event in run.of(LaunchFinished)] == [0]
    assert main(["check", str(run.paths.root)]) == 0, capsys.readouterr().out
    for replica in (0, 1):
        log = run.paths.logs(replica, 0, 0).read_text()
        assert "cannot be written (No space left on device)" in log
        assert "step: 60 " in log
    record = RunRecord.read(run.paths.events)
    assert [point.step for point in record.curve] == list(range(1, 61))


@pytest.mark.slow
def test_groups_that_leave_on_a_full_disk(
    launch: Callable[..., FullDiskRun], small_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups that are asked to leave finish their step, and the launch ends with the status of an
    orderly end. A group that is asked alone returns.
    """
    run = launch(100_000, options=["--minutes", "0.4"])
    run.fill_after(3)
    left = next(event for event in run.of(WorkerStarted) if event.replica == 1)
    os.kill(left.pid, signal.SIGTERM)
    run.wait_for(
        lambda: list(run.paths.events.glob(RunPaths.workers_pattern(1, 1))), "the next attempt"
    )
    run.wait_for(lambda: "draining" in run.text, "the end of its time")
    assert run.end() == 0, run.text
    assert "all groups left" in run.text
    assert not run.of(Drained)
    assert main(["check", str(run.paths.root)]) == 1
    text = capsys.readouterr().out
    assert "\n  verdict: unknown: " in text, text
    assert "does not hold" not in text


@pytest.mark.slow
def test_group_that_is_killed_while_its_events_wait(
    launch: Callable[..., FullDiskRun], small_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group restarts and heals on the full disk. Its lost events make a verdict unknown; no
    promise is broken.
    """
    run = launch(300)
    run.fill_after(3)
    time_of_kill = time.time()
    victim = next(event for event in run.of(WorkerStarted) if event.replica == 1)
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for(
        lambda: list(run.paths.events.glob(RunPaths.workers_pattern(1, 1))), "the next attempt"
    )
    small_disk.free()
    assert run.end() == 0, run.text
    check_one_end(run)
    assert [event.attempt for event in run.of(ReplicaRestarted)] == [1]
    assert any(event.replica == 1 and event.time > time_of_kill for event in run.of(HealFinished))
    assert run.committed(0) == list(range(1, 301))
    assert main(["check", str(run.paths.root)]) == 1
    text = capsys.readouterr().out
    assert "\n  verdict: unknown: " in text, text
    assert "does not hold" not in text
    assert f"replica-1-rank-0-attempt-0-{victim.pid}.jsonl are missing" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_campaign_on_a_disk_that_fills_and_empties(
    launch: Callable[..., FullDiskRun],
    small_disk: Any,
    seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault each 15 s of nearly every kind, on a disk that is full for a third of the time: the
    run ends in order, no promise is broken, and events lost by a kill make verdicts unknown.
    """
    small_disk.resize("500m")
    flags = ["--fault_tolerance.digest_every=5", "--fault_tolerance.hang_timeout_seconds=20"]
    flags += [
        "--fault_tolerance.batch_policy=constant",
        "--fault_tolerance.chaos",
        "--lr_scheduler.total_steps=100000",
    ]
    flags += ["--checkpoint.enable", "--checkpoint.interval=50", "--checkpoint.keep_latest_k=2"]
    plan = [
        "--chaos",
        str(REPOSITORY / "configs" / "chaos" / "campaign.toml"),
        "--chaos-seed",
        str(seed),
    ]
    run = launch(100_000, *flags, replicas=4, options=[*plan, "--minutes", "4"])
    run.wait_for(lambda: run.committed(0), "the first step")
    dice, times_full = random.Random(seed), 0
    while run.process.poll() is None:
        time.sleep(dice.uniform(10.0, 20.0))
        small_disk.fill()
        times_full += 1
        time.sleep(dice.uniform(4.0, 11.0))
        small_disk.free()
    assert run.end() == 0, run.text
    main(["check", str(run.paths.root), "--json"])
    report = json.loads(capsys.readouterr().out)
    figures = {
        "times full": times_full,
        "steps": len({event.lineage for event in run.of(StepCommitted)}),
        "faults": len(run.of(FaultInjected)),
        "restarts": len(run.of(ReplicaRestarted)),
        "late events": sum(event.events for event in run.of(EventsDelayed)),
        "verdict": report["verdict"],
        "audit": {
            name: report["audit"][name] for name in ("num_batches", "num_lost", "num_repeated")
        },
        "whole history": next(
            each for each in report["judgements"] if each["name"] == "whole history"
        )["unknown"],
    }
    with capsys.disabled():
        print(json.dumps(figures, indent=2))
    assert times_full > 5
    assert figures["late events"] > 0
    assert {
        each["name"]: each["offences"] for each in report["judgements"] if each["offences"]
    } == {}
