# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: files are read once, facts are computed once, clocks are aligned."""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build
from titan_ft.cli.main import main
from titan_ft.history.batches.audit import audit
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record import kept
from titan_ft.history.record import run_record as record
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.summary import summarize
from titan_ft.history.timing import timeline as timelines
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.incidents import find_incidents
from titan_ft.history.timing.timeline import build_timeline
from titan_ft.run.events import Event, LaunchEvent, LaunchStarted, StepCommitted, WorkerStarted
from titan_ft.run.held import hold
from titan_ft.run.log import encode
from titan_ft.run.paths import RunPaths


@pytest.fixture
def run_dir(good_run: Any, tmp_path: Path) -> Path:
    """The folder of a run, with a file for each process."""
    (tmp_path / "events").mkdir()
    for event in good_run.events:
        with (tmp_path / "events" / f"{event.pid}.jsonl").open("ab") as file:
            file.write(encode(event))
    return tmp_path


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str]
) -> None:
    """Count the calls of a function, by its name."""
    original: Callable[..., Any] = getattr(owner, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counting)


def write_events(run_dir: Path, events: list[Event], newest: float) -> None:
    """Write events into one file, the last of them at time `newest`."""
    (run_dir / "events").mkdir(exist_ok=True)
    shift = newest - max(event.time for event in events)
    for event in events:
        event.time += shift
    (run_dir / "events" / "all.jsonl").write_bytes(b"".join(map(encode, events)))


def test_a_run_goes_on_while_its_launch_lives(good_run: Any, tmp_path: Path) -> None:
    """The lock on the run's folder shows it. Events written during a reading come with the next
    reading.
    """
    begun = [event for event in good_run.events if good_run.events.index(event) < 200]
    write_events(tmp_path, begun, newest=time.time() + 5.0)
    paths = RunPaths(tmp_path)
    with paths.config.open("a", encoding="utf-8") as config:
        assert hold(config)
        with paths.config.open(encoding="utf-8") as another:
            assert not hold(another)
        read = RunRecord.read(paths.events)
        assert read.is_live
        assert 0 < len(read.events) < len(begun)
        assert read.events[-1].time <= time.time() - kept.SETTLED_SECONDS
    assert RunRecord.read(
        paths.events
    ).is_live  # the lock may be known on the launcher's own host only
    write_events(tmp_path, begun, newest=time.time() - record.SILENT_SECONDS)
    assert not RunRecord.read(paths.events).is_live
    with paths.config.open("a", encoding="utf-8") as config:
        assert hold(config)  # as of a launch that has said its last word
        write_events(tmp_path, good_run.events, newest=time.time())
        assert not RunRecord.read(paths.events).is_live


def test_a_run_whose_groups_are_all_frozen_is_not_green(good_run: Any, tmp_path: Path) -> None:
    """No group is left to report the others as lost; the launcher lives, and no event comes."""
    begun = [event for event in good_run.events if good_run.events.index(event) < 200]
    paths = RunPaths(tmp_path)
    for age, colour in ((3.0, "green"), (60.0, "amber")):
        write_events(tmp_path, begun, newest=time.time() - age)
        with paths.config.open("a", encoding="utf-8") as config:
            assert hold(config)
            found = find_outcome(RunRecord.read(paths.events))
        assert (found.kind, found.colour, "; no event for 6" in found.headline) == (
            "running",
            colour,
            age > 10,
        )


def test_a_look_refuses_no_launch(tmp_path: Path) -> None:
    """A look at the lock takes it for a moment; a launch at that moment waits for it."""
    paths = RunPaths(tmp_path)
    with (
        paths.config.open("a", encoding="utf-8") as config,
        paths.config.open(encoding="utf-8") as look,
    ):
        fcntl.flock(look, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (look, fcntl.LOCK_UN)).start()
        assert hold(config)


@pytest.mark.parametrize(("age", "is_live"), [(30.0, True), (90.0, False)])
def test_groups_without_a_launcher_go_on_while_they_announce_something(
    good_run: Any, tmp_path: Path, age: float, is_live: bool
) -> None:
    """They have no lock. After all have ended, the run does not continue, however recent the end
    is.
    """
    groups = [event for event in good_run.events if not isinstance(event, LaunchEvent)]
    write_events(tmp_path, groups[:200], newest=time.time() - age)
    assert RunRecord.read(tmp_path / "events").is_live is is_live
    write_events(tmp_path, groups, newest=time.time() - age)
    assert not RunRecord.read(tmp_path / "events").is_live


@pytest.mark.parametrize(
    "command", [["report"], ["report", "--json"], ["check"], ["check", "--json"]]
)
def test_command_reads_each_file_once(
    command: list[str],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command opens each event file of the run once, and works its facts out once."""
    opened: Counter[str] = Counter()

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name != "open":
            return
        path, mode, _ = arguments
        # An opener's own call of the system has no mode.
        if mode is not None and str(path).endswith(".jsonl"):
            opened[str(path)] += 1

    calls: Counter[str] = Counter()
    for name in ("read_reduced", "read_states", "final_states"):
        count_calls(monkeypatch, record, name, calls)
    count_calls(monkeypatch, timelines.GroupCutter, "run", calls)
    _watch(note)
    monkeypatch.setattr(sys, "argv", ["titan-ft", *command[:1], str(run_dir), *command[1:]])
    try:
        with pytest.raises(SystemExit) as ended:
            sys.exit(main())
    finally:
        _watch(None)
    assert ended.value.code == 0, capsys.readouterr()
    assert opened == dict.fromkeys(map(str, (run_dir / "events").glob("*.jsonl")), 1)
    assert calls.pop("run", 3) == 3  # once for each group
    assert set(calls.values()) == {1}, calls
    assert calls.keys() >= {"read_reduced", "read_states", "final_states"}


_WATCHER: list[Callable[[str, tuple[Any, ...]], None] | None] = []


def _watch(note: Callable[[str, tuple[Any, ...]], None] | None) -> None:
    """Pass the interpreter's audit events, such as the opening of files, to a function; None ends
    it.
    """
    if not _WATCHER:
        _WATCHER.append(None)
        # It cannot be taken away again, so that there is one for all tests.
        sys.addaudithook(
            lambda name, arguments: _WATCHER[0](name, arguments) if _WATCHER[0] else None
        )
    _WATCHER[0] = note


@pytest.mark.parametrize(
    "view", [audit, find_incidents, measure_goodput, summarize, build_timeline]
)
def test_view_is_worked_out_once(good_run: Any, view: Callable[[RunRecord], object]) -> None:
    """A second request to a record gets the computed value; another record has its own."""
    one, other = RunRecord(good_run.events), RunRecord(good_run.events)
    assert view(one) is view(one)
    assert view(other) is not view(one)
    assert view(other) == view(one)


def test_wall_clock_that_was_set() -> None:
    """On one host the monotonic clock places the events; with several hosts the wall clocks do."""

    def events(host: str) -> list[Event]:
        whole: list[Event] = [build(LaunchStarted, time=100.0, mono=10.0)]
        whole += [build(WorkerStarted, time=101.0, mono=11.0, host=name) for name in ("here", host)]
        return [*whole, build(StepCommitted, time=42.0, mono=12.0)]

    assert [event.time for event in RunRecord(events("here")).events] == [
        100.0,
        101.0,
        101.0,
        102.0,
    ]
    assert [event.time for event in RunRecord(events("here")).written] == [
        42.0,
        100.0,
        101.0,
        101.0,
    ]
    assert [event.time for event in RunRecord(events("there")).events] == [
        42.0,
        100.0,
        101.0,
        101.0,
    ]


def commit(time: float, step: int, replica: int, **fields: Any) -> Event:
    return build(
        StepCommitted, time=time, step=step, replica=replica, **{"participants": [0, 1], **fields}
    )


def test_makers_of_a_step_that_only_a_group_without_weight_tells_of() -> None:
    """The groups that made the step died after the exchange. Their work is in the surviving
    state.
    """
    told = commit(14.0, 4, 2)
    record = RunRecord([*(commit(10.0 + step, step, 0) for step in (1, 2, 3)), told])
    assert record.contributors_of_step == {step: {0, 1} for step in (1, 2, 3, 4)}


def test_usual_step() -> None:
    """The usual step is the median between steps of all groups with one exchange each, or else of
    all steps.
    """
    calm = [commit(float(step), step, replica) for step in range(1, 4) for replica in (0, 1)]
    assert RunRecord(calm).usual_step_seconds == 1.0
    alone = [commit(3.0 + 9.0 * n, 3 + n, 0, participants=[0]) for n in range(1, 6)]
    retried = [commit(50.0 + 7.0 * n, 9 + n, 0, exchanges=2) for n in range(6)]
    assert RunRecord([*calm, *alone, *retried]).usual_step_seconds == 1.0
    assert RunRecord(retried).usual_step_seconds == 7.0
    assert RunRecord(calm[:2]).usual_step_seconds is None
