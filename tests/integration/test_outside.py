# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run as an outside tool drives and reads it: by commands, flags, files, events and exit
statuses.

Nothing here is imported from the project. These names and meanings stay when internals are renamed,
because unknown tools depend on them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 120  # that only a bug reaches
Fields = dict[str, Any]

EVERY_FIELD: dict[str, type] = {"time": float, "mono": float, "event": str, "pid": int}
EVENT_FIELDS: dict[str, dict[str, type]] = {  # beside those of every line
    "launch_started": {"job_id": str},
    "lighthouse_started": {"lighthouse_pid": int, "address": str},
    "worker_started": {"replica": int, "rank": int, "attempt": int},
    "joined": {"replica": int, "rank": int, "attempt": int, "step": int, "participants": list},
    "step_committed": {
        "replica": int,
        "rank": int,
        "attempt": int,
        "step": int,
        "lineage": str,
        "parent": str,
        "participants": list,
        "batches": dict,
        "digest": str,
        "loss": float,
        "grad_norm": float,
        "forward_passes": int,
        "data": dict,
        "extra_data": list,
    },
    "drained": {"replica": int, "rank": int, "attempt": int, "step": int},
}
BATCH_FIELDS = {"slot": int, "first_batch": int, "num_batches": int, "checksum": str}
TORCHTITANS_SETTINGS = {
    "enable",
    "process_group",
    "process_group_timeout_ms",
    "replica_id",
    "group_size",
    "min_replica_size",
    "semi_sync_method",
    "sync_steps",
    "should_quantize",
    "fragment_sync_delay",
    "fragment_update_alpha",
    "module_fqns_per_model_fragment",
    "num_fragments",
}
OWN_SETTINGS = {
    "digest_every": "3",
    "batch_policy": "shrink",
    "lr_policy": "linear",
    "job_id": "run-7",
    "lighthouse": "http://127.0.0.1:29510",
    "start_timeout_seconds": "70",
    "hang_timeout_seconds": "80",
    "drain_timeout_seconds": "30",
}


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command of `titan-ft`, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "titan_ft", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.STDOUT),
        text=True,
        start_new_session=True,
        **options,
    )


def run(*words: str) -> tuple[int, str]:
    """Run a command to its end; return its exit status and its standard output."""
    process = start(*words, stderr=subprocess.DEVNULL)
    try:
        printed, _ = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    return process.returncode, printed


def read_events(folder: Path) -> list[Fields]:
    """Return the events of a run: each complete line of each file is one event."""
    events = []
    for path in sorted((folder / "events").glob("*.jsonl")):
        whole_lines, _, _ = path.read_text().rpartition("\n")
        events += [json.loads(line) for line in whole_lines.splitlines()]
    return events


def wait_for(folder: Path, launch: subprocess.Popen[str], found: Callable[[Fields], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any(found(event) for event in read_events(folder)):
        assert launch.poll() is None, launch.communicate()[0]
        assert time.monotonic() < deadline, read_events(folder)
        time.sleep(0.05)


def committed(event: Fields, replica: int, attempt: int, participants: list[int]) -> bool:
    who = (event.get("replica"), event.get("attempt"), event.get("participants"))
    return event["event"] == "step_committed" and who == (replica, attempt, participants)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a stopped run of two groups, one of which was killed and returned."""
    folder = tmp_path_factory.mktemp("outside") / "run"
    flags = ("seq_len=32", "local_batch_size=1", "steps=100000")
    launch = start(
        *(
            "launch",
            "llama3_debug",
            "--replicas",
            "2",
            "--ranks-per-replica",
            "1",
            "--run-dir",
            str(folder),
            "--",
        ),
        *(f"--training.{flag}" for flag in flags),
        *(
            "--fault_tolerance.chaos",
            "--fault_tolerance.digest_every=1",
            "--fault_tolerance.job_id=outside-1",
        ),
    )
    try:
        wait_for(folder, launch, lambda event: committed(event, 1, 0, [0, 1]))
        status, printed = run("chaos", str(folder), "kill_group", "--replica", "1")
        assert status == 0, printed
        wait_for(folder, launch, lambda event: committed(event, 1, 1, [0, 1]))
        launch.send_signal(signal.SIGTERM)
        printed, _ = launch.communicate(timeout=DEADLINE_SECONDS)
    finally:
        launch.kill()
    assert launch.returncode == 128 + signal.SIGTERM, printed
    return folder


def test_events_have_their_fields(finished: Path) -> None:
    events = read_events(finished)
    for event in events:
        kinds = EVENT_FIELDS.get(event["event"], {})
        for name, kind in {**EVERY_FIELD, **kinds}.items():
            assert type(event[name]) is kind, (name, event)
    assert set(EVENT_FIELDS) <= {event["event"] for event in events}
    (launch,) = (event for event in events if event["event"] == "launch_started")
    assert launch["job_id"] == "outside-1"
    (lighthouse,) = (event for event in events if event["event"] == "lighthouse_started")
    assert re.fullmatch(r"http://[\d.]+:\d+", lighthouse["address"])


def test_files_have_their_names(finished: Path) -> None:
    names = [path.name for path in (finished / "events").iterdir()]
    for group in (0, 1):
        assert any(re.fullmatch(rf"supervisor-{group}-\d+\.jsonl", name) for name in names), names
    assert all(name.endswith(".jsonl") for name in names)


def test_commits_are_one_chain_of_equal_states(finished: Path) -> None:
    """Lineage, parent, digests, batches: from these alone a tool follows a run over a failure."""
    commits = [event for event in read_events(finished) if event["event"] == "step_committed"]
    by_step: dict[int, list[Fields]] = {}
    for commit in commits:
        by_step.setdefault(commit["step"], []).append(commit)
    assert sorted(by_step) == list(range(1, len(by_step) + 1))
    parent, next_batch = "0" * 12, {"0": 0, "1": 0}
    for step in sorted(by_step):
        first, *others = by_step[step]
        assert first["parent"] == parent
        parent = first["lineage"]
        for other in others:
            assert all(
                other[name] == first[name]
                for name in ("lineage", "parent", "participants", "digest", "loss")
            )
        for slot, (first_batch, num_batches) in first["batches"].items():
            assert first_batch == next_batch[slot]
            next_batch[slot] += num_batches
    for commit in commits:
        for read in [commit["data"], *commit["extra_data"]]:
            if read is not None:
                assert {name: type(read[name]) for name in BATCH_FIELDS} == BATCH_FIELDS
    assert sum(commit["forward_passes"] for commit in commits) > 0
    together = {tuple(commit["participants"]) for commit in commits}
    # Either group may begin alone, if the other one comes to the lighthouse later.
    assert {(0,), (1,), (0, 1)} >= together >= {(0, 1)}


def test_a_group_that_leaves_in_order_ends_with_0(finished: Path) -> None:
    events = read_events(finished)
    assert {event["replica"] for event in events if event["event"] == "drained"} == {0, 1}
    # The last of each.
    ends = {event["replica"]: event for event in events if event["event"] == "worker_exited"}
    assert [ends[group]["code"] for group in (0, 1)] == [0, 0]
    started = [
        (event["replica"], event["attempt"])
        for event in events
        if event["event"] == "worker_started"
    ]
    assert sorted(started) == [(0, 0), (1, 0), (1, 1)]


def test_check_judges_by_rows_and_its_status(finished: Path, tmp_path: Path) -> None:
    """The exit status is 0 if every requested promise holds, and 1 if one does not."""
    status, printed = run("check", str(finished), "--json")
    assert status == 0, printed
    rows = {row["name"]: row["verdict"] for row in json.loads(printed)["judgements"]}
    assert rows["every batch once"] == "holds"

    damaged = tmp_path / "damaged"
    shutil.copytree(finished / "events", damaged / "events")
    path = next((damaged / "events").glob("replica-1-rank-0-attempt-1-*.jsonl"))
    path.write_text(
        re.sub(r'"digest": "[0-9a-f]+"', '"digest": "0123456789abcdef"', path.read_text())
    )
    status, printed = run("check", str(damaged), "--json")
    assert status == 1
    assert {row["name"]: row["verdict"] for row in json.loads(printed)["judgements"]}[
        "one trajectory"
    ] != "holds"


def test_report_and_top_read_the_run(finished: Path) -> None:
    status, printed = run("report", str(finished), "--json")
    assert status == 0
    report = json.loads(printed)
    steps = {event["step"] for event in read_events(finished) if event["event"] == "step_committed"}
    assert report["steps_committed"] == len(steps)
    assert report["num_restarts"] == 1
    status, printed = run("top", str(finished), "--once")
    assert status == 0
    assert "group" in printed


def test_config_prints_the_settings() -> None:
    """All settings of torchtitan, and this project's public ones, can be given as flags."""
    flags = [f"--fault_tolerance.{name}={value}" for name, value in OWN_SETTINGS.items()]
    status, printed = run("config", "llama3_debug", "--json", "--", *flags)
    assert status == 0, printed
    settings = json.loads(printed)["fault_tolerance"]
    assert set(settings) >= TORCHTITANS_SETTINGS
    for name, value in OWN_SETTINGS.items():
        assert str(settings[name]).removesuffix(".0") == value
    assert settings["chaos"] is False


def test_bad_usage_ends_with_2() -> None:
    for config, replicas in (("llama3_debug", "two"), ("no_such_config", "2")):
        command = (
            "launch",
            config,
            "--replicas",
            replicas,
            "--ranks-per-replica",
            "1",
            "--run-dir",
            "x",
        )
        assert run(*command) == (2, "")


def test_ctrl_c_ends_a_command_in_the_foreground_with_130() -> None:
    lighthouse = start("lighthouse", "--bind", "127.0.0.1:0")
    try:
        assert lighthouse.stdout is not None
        assert "http://" in lighthouse.stdout.readline()
        lighthouse.send_signal(signal.SIGINT)
        assert lighthouse.wait(DEADLINE_SECONDS) == 128 + signal.SIGINT
    finally:
        lighthouse.kill()


@pytest.mark.parametrize("script", ["quickstart", "test", "campaign", "explore"])
def test_scripts_are_there(script: str) -> None:
    help_of = subprocess.run(
        ["bash", f"scripts/{script}.sh", "--help"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert help_of.returncode == 0
    assert f"{script}.sh" in help_of.stdout
