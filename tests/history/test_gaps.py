# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Events that could not be written: missing events prove nothing, and break nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build
from titan_ft.cli.main import main
from titan_ft.history import check as check_module
from titan_ft.history.batches.audit import audit
from titan_ft.history.check import Verdicts, make_check_table
from titan_ft.history.checks.foundation import find_gaps
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import text_of
from titan_ft.run.events import Event, EventsDelayed, EventsDropped, StepCommitted
from titan_ft.run.log import EventLog, encode

ASKED = {2, 3, 4, 5, 6, 7, 8}


def check(events: Iterable[Event], cut: Iterable[str] = ()) -> Verdicts:
    return check_module.check(RunRecord(events, cut))


def assert_unknown(report: Verdicts) -> None:
    """Nothing that was asked holds, and nothing is objected to."""
    verdicts = {
        each.promise: each.verdict for each in report.judgements if each.asked and each.promise
    }
    assert verdicts == dict.fromkeys(ASKED, "unknown"), text_of(make_check_table(report))
    assert report.verdict == "unknown"


def pids(run: Any) -> list[int]:
    return sorted({event.pid for event in run.events})


@pytest.mark.parametrize("seed", range(20))
def test_tail_of_one_process(good_run: Any, seed: int) -> None:
    """A process was killed while its events waited in memory: its file is cut at any place."""
    dice = random.Random(seed)
    pid = dice.choice(pids(good_run))
    own = [event for event in good_run.events if event.pid == pid]
    lost = own[dice.randrange(len(own)) :]
    report = check([event for event in good_run.events if event not in lost], [f"{pid}.jsonl"])
    assert_unknown(report)
    assert any(f"{pid}.jsonl" in reason for reason in report["whole history"].unknown)


@pytest.mark.parametrize("seed", range(20))
def test_dropped_amid_a_process(good_run: Any, seed: int) -> None:
    """A process continued to write when there was room, and reported the missing number."""
    dice = random.Random(seed)
    pid = dice.choice(pids(good_run))
    own = [event for event in good_run.events if event.pid == pid]
    first, last = sorted(dice.choices(range(len(own)), k=2))
    lost, where = own[first : last + 1], own[last]
    told = build(
        EventsDropped,
        time=where.time,
        mono=where.mono,
        pid=pid,
        replica=where.replica if pid > 2 else None,
        rank=where.rank if pid >= 1000 else None,
        attempt=where.attempt if pid > 2 else None,
        error="No space left on device",
        events=len(lost),
        kinds={"step_committed": len(lost)},
        since=lost[0].time,
        until=lost[-1].time,
    )
    events = [
        told if event is where else event
        for event in good_run.events
        if event is where or event not in lost
    ]
    report = check(events)
    assert_unknown(report)
    (reason,) = [each for each in report["whole history"].unknown if "dropped" in each]
    assert "No space left on device" in reason
    assert str(len(lost)) in reason


def test_several_files_are_cut_at_once(good_run: Any) -> None:
    """The disk was full for all of them to the end; the launcher could still report the end."""
    for moment in range(5, 60, 5):
        kept = [
            event
            for event in good_run.events
            if event.pid == 1 or event.time < 1_700_000_000.0 + moment
        ]
        assert_unknown(check(kept, [f"{pid}.jsonl" for pid in pids(good_run) if pid != 1]))


def test_late_events_are_whole(good_run: Any) -> None:
    """Late events that were written are no gap. A note says that they came late."""
    good_run.of(
        "events_delayed", 0, error="No space left on device", events=3, since=1_700_000_010.0
    )
    good_run.events.sort(key=lambda event: event.time)
    report = check(good_run.events)
    assert report.verdict == "holds", text_of(make_check_table(report))
    assert "events delayed: 1 time" in report[8].notes
    (note,) = [
        each for each in find_notes(RunRecord(good_run.events)) if each.event == "events_delayed"
    ]
    assert (
        note.text
        == "could not write its events for a while (No space left on device): they came late"
    )


def lose_commits(
    run: Any, group: int, steps: Iterable[int], rank: int | None = None
) -> list[Event]:
    """Return the events without commits of a group, as after a SIGKILL that no file shows."""
    return [
        event
        for event in run.events
        if not (
            isinstance(event, StepCommitted)
            and event.replica == group
            and rank in (None, event.rank)
            and event.step in steps
        )
    ]


def test_steps_that_only_others_tell_of(good_run: Any) -> None:
    """Vanished storage marks no file, but others report the group's steps; one missing step is
    normal.
    """
    # Killed between the exchange and its event.
    assert find_gaps(RunRecord(lose_commits(good_run, 2, [6]))) == []
    events = lose_commits(good_run, 2, [5, 6])
    assert find_gaps(RunRecord(events)) == [
        "group 2 took part in steps 5 to 6, and no event of it says so"
    ]
    assert_unknown(check(events))


def test_steps_on_both_sides_of_a_restart(good_run: Any) -> None:
    """A group that dies right after an exchange, twice, has reported everything it could."""
    back = next(event.step for event in good_run.named("step_committed", replica=2, attempt=1))
    assert find_gaps(RunRecord(lose_commits(good_run, 2, [6, back]))) == []


def test_steps_that_one_rank_does_not_tell_of(good_run: Any) -> None:
    """A group's ranks make each step together, so a rank with two steps fewer lacks events."""
    assert find_gaps(RunRecord(lose_commits(good_run, 2, [6], rank=1))) == []
    events = lose_commits(good_run, 2, [5, 6], rank=1)
    (gap,) = find_gaps(RunRecord(events))
    assert (
        gap
        == "group 2, attempt 0, rank 1 tells nothing of 2 steps that other ranks of its group made"
    )
    assert_unknown(check(events))


def test_what_is_there_still_counts(good_run: Any) -> None:
    """A difference that two groups' own events show counts, whatever else is missing."""
    event = good_run.named("step_committed", replica=1, step=4)[0]
    event.tokens += 1
    report = check(good_run.events, ["replica-2-rank-0-attempt-0-7.jsonl"])
    assert report.verdict == "does not hold"
    assert report[1].verdict == "does not hold"


def test_audit_is_not_fooled(good_run: Any) -> None:
    """The part of the check that can be asked alone says so, too."""
    assert audit(RunRecord(good_run.events)).verdict == "holds"
    found = audit(RunRecord(good_run.events, ["a.jsonl"]))
    assert found.verdict == "unknown"
    assert found.unknown == [
        "the last events of a.jsonl are missing: they waited for room on the disk when its process ended"
    ]


@pytest.mark.parametrize("left", [b"", b'{"time": 1, "eve', b'{"time": 1.0}'])
def test_command_sees_a_file_that_is_cut(
    good_run: Any, tmp_path: Path, left: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, half a line and a line without newline show that their writer had more."""
    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "all.jsonl").write_bytes(b"".join(map(encode, good_run.events)))
    assert main(["check", str(tmp_path)]) == 0
    capsys.readouterr()
    (folder / "supervisor-1-7.jsonl").write_bytes(left)
    assert main(["check", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(
        "! Finished at step 31\n  verdict: unknown: the last events of supervisor-1-7.jsonl"
    )
    assert "the last events of supervisor-1-7.jsonl are missing" in text


def test_what_a_log_writes_is_what_the_check_reads(good_run: Any, tmp_path: Path) -> None:
    """An event of the log itself belongs to its process, and breaks no history."""
    (tmp_path / "all.jsonl").write_bytes(b"".join(map(encode, good_run.events)))
    log = EventLog(tmp_path / "own.jsonl", replica=0, rank=1, attempt=0)
    log.emit(build(EventsDelayed, error="x", events=1, since=1.0))
    log.close()
    record = RunRecord.read(tmp_path)
    assert record.cut == ()
    assert any(
        isinstance(event, EventsDelayed) for process in record.processes for event in process.events
    )
