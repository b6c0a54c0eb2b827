# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fold of events into a live status, and the lines that tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_ft.history.events import EventLog
from titan_ft.launch import status
from titan_ft.launch.event_tail import EventTail
from titan_ft.launch.status_view import PlainView, _table


def event(name: str, replica: int = 0, rank: int = 0, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "event": name, "pid": 1, "replica": replica, "rank": rank, "attempt": attempt, **fields}


def step(number: int, replica: int = 0, participants: tuple[int, ...] = (0, 1), **fields: Any) -> dict[str, Any]:
    return event("step_committed", replica, step=number, loss=2.5, participants=list(participants), **fields)


STORY = [
    event("worker_started", 0),
    event("worker_started", 1),
    event("joined", 0, quorum=1, participants=[0, 1]),
    event("joined", 1, quorum=1, participants=[0, 1]),
    step(1),
    step(1, replica=1),
    event("worker_exited", 1, rank=1, signal="SIGKILL", reason="rank 1 was killed by SIGKILL", stopped=False),
    event("worker_exited", 1, rank=0, signal="SIGTERM", reason="stopped because ...", stopped=True),
    event("joined", 0, quorum=2, participants=[0]),
    step(2, participants=(0,)),
    {"time": 0.0, "event": "replica_restarted", "pid": 1, "replica": 1, "attempt": 1, "reason": "rank 1 ..."},
    event("worker_started", 1, attempt=1),
    event("joined", 1, attempt=1, quorum=3, participants=[0, 1]),
    event("heal_started", 1, attempt=1, donor=0, from_step=2),
    event("heal_finished", 1, attempt=1, donor=0, from_step=2, bytes=10, seconds=0.25, replayed=0),
    step(3),
    step(3, replica=1, attempt=1),
    event("training_finished", 0, step=3),
    event("training_finished", 1, attempt=1, step=3),
    event("worker_exited", 1, rank=0, attempt=1, code=0, stopped=False),
]


def test_story_of_a_run() -> None:
    """One line per change worth telling, and the state of each group follows."""
    groups, lines, states = status.initial(2), [], []
    for each in STORY:
        before, groups = groups, status.fold(groups, each)
        line = status.describe(before, groups, each)
        lines += [line] if line else []
        states.append(groups[1].state)
    assert lines == [
        "replica 0 joined (groups 0, 1)",
        "replica 1 joined (groups 0, 1)",
        "replica 1 died: rank 1 was killed by SIGKILL",
        "replica 1 restarting (attempt 1)",
        "replica 1 joined (groups 0, 1)",
        "replica 1 healing from replica 0 at step 2",
        "replica 1 healed in 0.25 s",
        "replica 0 finished at step 3",
        "replica 1 finished at step 3",
    ]
    assert list(dict.fromkeys(states)) == ["waiting", "starting", "joined", "training", "died", "healing", "finished"]
    assert groups[1] == status.GroupStatus(1, "finished", 3, 2.5, (0, 1), attempt=1, restarts=1)
    assert status.describe_progress(groups) == "step 3  loss 2.50000  groups 2/2  restarts 1"


def test_late_events_of_an_old_attempt_are_ignored() -> None:
    """What a dead worker wrote last cannot bring its group back to life."""
    groups = status.initial(2)
    restarted = {"time": 0.0, "event": "replica_restarted", "pid": 1, "replica": 0, "attempt": 1}
    groups = status.fold(groups, restarted)
    assert status.fold(groups, step(7)) == groups
    assert status.describe(groups, groups, event("training_finished", 0, step=3)) is None


def test_other_ranks_and_strangers_change_nothing() -> None:
    """Only rank 0 speaks for its group; events without a known replica are not about a group."""
    groups = status.initial(1)
    for each in (step(1) | {"rank": 1}, step(1, replica=5), {"time": 0.0, "event": "launch_started", "pid": 1}):
        assert status.fold(groups, each) == groups
        assert status.describe(groups, groups, each) is None


def test_group_given_up() -> None:
    """A group that failed for good says why and where to look, and stays failed."""
    groups = status.initial(1)
    given_up = event(
        "replica_gave_up", reason="rank 0 ended with exit status 1; no restart left", log="/l", error="E: x"
    )
    after = status.fold(groups, given_up)
    assert after[0].state == "failed"
    assert status.describe(groups, after, given_up) == (
        "replica 0 failed: rank 0 ended with exit status 1; no restart left; /l: E: x"
    )
    assert status.fold(after, event("worker_exited", code=1))[0].state == "failed"


def test_lines_of_single_events() -> None:
    """Each event worth knowing is one plain line."""
    groups = status.initial(3)
    for replica in (1, 2):
        groups = status.fold(groups, step(7, replica))
    cases = [
        (
            event("waiting", 1, step=7, reason="1 group(s) have a gradient, 2 needed"),
            "replica 1 waits after step 7: 1 ",
        ),
        (event("straggler", 1, slot=2, factor=2.25, step=7), "replica 2 is slow: 2.2 times the others' step time"),
        (event("straggler_recovered", 1, slot=2, factor=1.0), "replica 2 is as fast as the others again"),
        (event("hung", 2, rank=3), "replica 2 hangs: rank 3 made no progress"),
        (event("foreign_member", 1, member="j/4", reason="another job"), "replica 1 leaves j/4 aside (another job)"),
        (event("refused", 1, member="1:5", reason="wrong token"), "replica 1 refused 1:5 (wrong token)"),
        (event("checkpoint_saved", 2, step=50), "replica 2 saved the checkpoint of step 50"),
        (event("data_reset", 2, reason="no position"), "replica 2 starts its data anew (no position)"),
        (
            event("catch_up_waiting", 2, step=9),
            "replica 2 cannot queue more updates: the others wait until it has step 9",
        ),
        (event("drained", 2, step=9, reason="SIGTERM"), "replica 2 left after step 9 (SIGTERM)"),
        (
            {"time": 0.0, "event": "lighthouse_restarted", "pid": 1, "reason": "the lighthouse ended", "seconds": 0.25},
            "the lighthouse ended; it is back at the same address after 0.25 s",
        ),
    ]
    for each, line in cases:
        told = status.describe(groups, status.fold(groups, each), each)
        assert told is not None
        assert told.startswith(line)
        assert "\n" not in told


def test_what_all_groups_see_is_told_once() -> None:
    """Of the groups that train, the first one tells what each of them finds."""
    groups = status.initial(3)
    for replica in (1, 2):
        groups = status.fold(groups, step(7, replica))
    lines = [status.describe(groups, groups, event("straggler", replica, slot=0, factor=3.0)) for replica in (1, 2)]
    assert lines == ["replica 0 is slow: 3.0 times the others' step time", None]


def test_drained_group_has_not_died() -> None:
    """Asked to leave, a group still commits its step; then it is drained, whatever its processes' ends are."""
    groups = status.draining(status.fold(status.initial(2), event("training_finished", 1, step=3)))
    assert [group.state for group in groups.values()] == ["draining", "finished"]
    groups = status.fold(groups, step(4))
    assert (groups[0].state, groups[0].step) == ("draining", 4)
    for each in (
        event("drained", step=4, reason="SIGTERM"),
        event("worker_exited", rank=0, code=0, stopped=True),
        event("worker_exited", rank=1, signal="SIGKILL", stopped=True),
    ):
        groups = status.fold(groups, each)
        assert groups[0].state == "drained"
    died = status.fold(groups, event("worker_exited", rank=1, signal="SIGSEGV", stopped=False))
    assert died[0].state == "died"


def test_spare_brings_a_lost_group_back() -> None:
    """A group that gave up starts again when a spare takes over; the attempt is the spare's, one restart is counted."""
    groups = status.fold(status.initial(1), event("replica_gave_up", reason="no restart left"))
    took = {"time": 0.0, "event": "spare_took_over", "pid": 1, "replica": 0, "attempt": 4}
    after = status.fold(groups, took)
    assert status.describe(groups, after, took) == "replica 0: a spare takes its place (attempt 4)"
    after = status.fold(after, event("replica_restarted", attempt=4))
    assert (after[0].state, after[0].attempt, after[0].restarts) == ("starting", 4, 1)


def test_events_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    """What the folder holds when the tail is made was told by the earlier run; the rest of such a file is new."""
    log = EventLog(tmp_path / "a.jsonl")
    log.emit("old")
    tail = EventTail(tmp_path)
    EventLog(tmp_path / "b.jsonl").emit("new")
    log.emit("newer")
    assert [each["event"] for each in tail.poll()] == ["new", "newer"]


def test_unfinished_lines_are_read_later(tmp_path: Path) -> None:
    """The tail returns each whole line once, in the order of time over all files, and skips damage."""
    tail = EventTail(tmp_path / "events")
    assert tail.poll() == []
    first, second = (EventLog(tmp_path / "events" / f"{name}.jsonl", replica=0) for name in "ba")
    first.emit("one")
    second.emit("two")
    assert [each["event"] for each in tail.poll()] == ["one", "two"]
    path = tmp_path / "events" / "a.jsonl"
    with path.open("a") as file:
        file.write('broken\n{"time": 1.0, "event"')
        file.flush()
        assert tail.poll() == []
        file.write(': "three"}\n')
    assert [each["event"] for each in tail.poll()] == ["three"]
    assert tail.poll() == []


def test_plain_view_limits_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, progress is one line every few seconds, and changes are told at once."""
    view = PlainView(progress_seconds=1000.0)
    groups = status.initial(2)
    view.update(groups)
    for number in (1, 2, 3):
        groups = status.fold(groups, step(number))
        view.update(groups)
    view.line("replica 0 joined")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in printed] == [
        "step 1  loss 2.50000  groups 2/2  restarts 0",
        "replica 0 joined",
    ]


def test_table_has_a_row_per_group() -> None:
    """On a terminal, each group has a row."""
    assert _table(status.fold(status.initial(3), step(1)), 1.0).row_count == 3
