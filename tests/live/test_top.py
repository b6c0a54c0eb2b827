# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run live in a terminal: the fold of the whole run, its layout, and the terminal itself."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.event_builder import build, like, named
from titan_ft.config import ConfigError
from titan_ft.history.fold.faults import InjectedFaults
from titan_ft.history.fold.steps import CommittedSteps
from titan_ft.live.run_status import MAX_POINTS, LossCurve, RunStatus
from titan_ft.live.top import FollowedRun, top
from titan_ft.live.top_view import Screen, frame, make_sparkline
from titan_ft.run.events import ChangedField, Event, Target
from titan_ft.run.held import hold
from titan_ft.run.log import EventLog

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the terminal's other screen
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"  # its cursor


def event(
    name: str, replica: int | None = 0, rank: int | None = 0, moment: float = 0.0, **fields: Any
) -> Any:
    whose = {"replica": replica, "rank": rank}
    return build(
        named(name), time=moment, **{k: v for k, v in whose.items() if v is not None}, **fields
    )


def launched(replicas: int, moment: float = 0.0) -> Any:
    return event(
        "launch_started", None, None, moment, replicas=replicas, ranks_per_replica=2, spares=0
    )


def step(number: int, replica: int = 0, moment: float = 0.0, rank: int = 0, **fields: Any) -> Any:
    usual = {
        "lineage": f"{number:012x}",
        "participants": [0, 1],
        "tokens": 100,
        "loss": 9.0 - number,
        "exchanges": 1,
    }
    usual |= {"seconds": 1.0, "exchange_seconds": 0.25, "compute_seconds": 0.75}
    return event("step_committed", replica, rank, moment, step=number, **{**usual, **fields})


def fold(*events: Event) -> RunStatus:
    run = RunStatus()
    for each in events:
        run.observe(each)
    return run


def shown(
    run: RunStatus, width: int = 80, height: int | None = None, now: float = 0.0, **options: Any
) -> list[str]:
    """Return the lines that a terminal of this size shows."""
    console = Console(width=width, height=height or 1000, file=io.StringIO(), color_system=None)
    rendered = console.render_lines(
        frame(run, "/runs/a", now, Screen(width, height, **options)), pad=False
    )
    assert all(cell_len("".join(segment.text for segment in line)) <= width for line in rendered)
    return ["".join(segment.text for segment in line).rstrip() for line in rendered][:height]


def test_what_a_resume_changed_is_said() -> None:
    """A resume with another LR is shown; a harmless change is not."""
    run = fold(launched(2))
    assert [line.text for line in run.lines] == ["launched: 2 groups x 2 ranks"]
    start = launched(2)
    start.changed = {
        "optimizer.lr": ChangedField(before=8e-4, now=1e-3, kind="arithmetic"),
        "metrics.log_freq": ChangedField(before=1, now=10, kind="harmless"),
    }
    run = fold(start)
    said = "launched: 2 groups x 2 ranks; optimizer.lr = 0.001 (was 0.0008, of the arithmetic)"
    assert [line.text for line in run.lines] == [said]


def story(replicas: int = 4, steps: int = 30) -> RunStatus:
    """Fold a run in which group 1 is killed and heals."""
    events = [launched(replicas)]
    events += [
        event("worker_started", replica, host=f"node{replica:02}") for replica in range(replicas)
    ]
    for number in range(1, steps + 1):
        events += [
            step(number, replica, float(number), own_loss=2.0) for replica in range(replicas)
        ]
    target = {"replica": 1, "rank": 0}
    events += [
        event(
            "fault_injected",
            None,
            None,
            31.0,
            fault="abort_process_group",
            target=target,
            seed=1,
            shot=1,
        ),
        event(
            "worker_exited",
            1,
            0,
            32.0,
            signal="SIGABRT",
            reason="rank 0 was killed by SIGABRT",
            stopped=False,
        ),
        event("replica_restarted", 1, None, 33.0, attempt=1, reason="", standby=True),
        event("heal_started", 1, 0, 34.0, attempt=1, donor=3, from_step=30),
        event("lighthouse_renewed", None, None, 34.5, num_ended=1001, address="[::]:1"),
        event(
            "lighthouse_restarted",
            None,
            None,
            35.0,
            reason="the lighthouse ended (SIGKILL)",
            seconds=0.5,
        ),
    ]
    return fold(*events)


def test_step_is_counted_once() -> None:
    """A step counts once for all groups; its exchanges are those of the group with most."""
    steps = CommittedSteps()
    told = [
        steps.observe(step(1, replica, exchanges=count)) for replica, count in enumerate((2, 1, 3))
    ]
    assert told == [True, False, False]
    assert (steps.num_committed, steps.num_attempted) == (1, 3)
    assert steps.observe(step(1, lineage="another"))
    assert (steps.num_committed, steps.num_attempted) == (2, 4)


def test_fault_is_counted_once() -> None:
    """A fault of several groups or ranks counts once; a second run of the plan counts again."""
    told = event("fault_injected", None, None, fault="kill_groups", seed=5, shot=1)
    faults = InjectedFaults()
    for each in (
        msgspec.structs.replace(told, target=Target(0)),
        msgspec.structs.replace(told, target=Target(1)),
        msgspec.structs.replace(told, shot=2),
        msgspec.structs.replace(told, fault="kill_rank"),
        like(told, "fault_undone", fault=told.fault, shot=1),
    ):
        faults.observe(each)
    assert faults.num_injected == 3
    faults.observe(event("chaos_started", None, None, seed=1))
    assert faults.observe(told)
    old = event("fault_injected", None, None, fault="kill_group", target={"replica": 1}, seed=0)
    assert [faults.observe(old), faults.observe(old)] == [True, True]


def on_hosts(replicas: int, num_hosts: int) -> RunStatus:
    """Fold a run on hosts n0, n1, ...: n1 has two deaths and was left, n0 has one death."""
    starts = [
        event("worker_started", r, 0, 1.0, host=f"n{r % num_hosts}.cluster")
        for r in range(replicas)
    ]
    return fold(
        *starts,
        event("worker_exited", 0, 0, 2.0, signal="SIGKILL", stopped=False, host="n0"),
        *(
            event("worker_exited", 1, 0, 2.0 + n, signal="SIGBUS", stopped=False, host="n1")
            for n in range(2)
        ),
        event("worker_exited", 0, 1, 2.0, signal="SIGTERM", stopped=True, host="n0"),
        event("host_left", 1, None, 4.0, host="n1", deaths=2, reason=""),
    )


def hosts_table(lines: list[str]) -> list[list[str]]:
    """Return the table by host, from its head to the next empty line, as words."""
    start = next(
        (number for number, line in enumerate(lines) if line.startswith("host ")), len(lines)
    )
    end = next((number for number in range(start, len(lines)) if not lines[number]), len(lines))
    return [line.split() for line in lines[start:end]]


def test_hosts_have_a_table() -> None:
    """The table has groups, starts, deaths and departures, the worst host first. A worker that was
    stopped is no death.
    """
    assert hosts_table(shown(on_hosts(8, 2), 100, now=5.0)) == [
        ["host", "starts", "deaths", "left", "groups"],
        ["n1", "4", "2", "1", "1,", "3,", "5,", "7"],
        ["n0", "4", "1", "0", "0,", "2,", "4,", "6"],
    ]


def test_one_host_has_a_table_once_it_has_a_death() -> None:
    """On one host without failures only the groups are shown."""
    calm = [launched(2), *(event("worker_started", replica, host="laptop") for replica in (0, 1))]
    assert hosts_table(shown(fold(*calm), 100, now=5.0)) == []
    death = event("worker_exited", 1, 0, 2.0, signal="SIGKILL", stopped=False, host="laptop")
    assert hosts_table(shown(fold(*calm, death), 100, now=5.0))[1:] == [
        ["laptop", "2", "1", "0", "0,", "1"]
    ]


@pytest.mark.parametrize(
    ("height", "rows"), [(24, ["n1", "and"]), (60, ["n1", "n0", "n2", "and"]), (12, [])]
)
def test_hosts_leave_room_for_the_groups(height: int, rows: list[str]) -> None:
    """Of many hosts those with deaths are shown while there is room; the others are counted."""
    lines = shown(on_hosts(40, 20), 80, height, now=5.0)
    table = hosts_table(lines)
    assert [row[0] for row in table[1:]] == rows
    hidden = 20 - len(rows) + 1
    assert not rows or table[-1] == f"and {hidden} more hosts, with no more deaths".split()
    assert len(lines) <= height


def test_figures_of_the_run() -> None:
    """The head shows the run's position and its failures."""
    lines = shown(story(), 100, now=36.0)
    text = " ".join(lines)
    assert lines[1] == "running for 0:36; 4 groups x 2 ranks"
    for figure in (
        "step 30",
        "loss -21.00000",
        "contributing 2/4",
        "committed 30/30 (100.0 %)",
        "faults 1",
        "restarts 1",
        "lighthouse restarts 1",
    ):
        assert figure in text
    assert lines[-5:] == [
        "    0:32  group 1 died: rank 0 was killed by SIGABRT",
        "    0:33  group 1 restarting (attempt 1)",
        "    0:34  group 1 healing from group 3 at step 30",
        "    0:34  the lighthouse starts anew, and forgets 1,001 ended processes",
        "    0:35  the lighthouse ended (SIGKILL); it is back at the same address after 0.50 s",
    ]


def test_row_of_a_group() -> None:
    """A row shows state, own time as a multiple of the others', last fault and donor."""
    run = story(replicas=3)
    run.observe(step(31, 0, 36.0, seconds=3.25, compute_seconds=3.0))
    head, *rows = shown(run, width=160, now=41.0)[5:9]
    columns = "group state step own loss own s x others restarts donor attempt host last fault"
    assert head.split() == columns.split()
    assert rows[0].split() == [
        "0",
        "training",
        "31",
        "-22.0000",
        "3.000",
        "4.00",
        "0",
        "-",
        "0",
        "node00",
        "-",
    ]
    fault = ["-0:10", "abort_process_group"]
    assert rows[1].split() == [
        "1",
        "recovering",
        "-",
        "-",
        "-",
        "-",
        "1",
        "3",
        "1",
        "node01",
        *fault,
    ]


@pytest.mark.parametrize("replicas", [1, 4, 40])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 12), (30, 5), (10, 1)])
def test_fits_any_terminal(size: tuple[int, int], replicas: int) -> None:
    """No line is wider and no frame higher than the terminal."""
    for run in (RunStatus(), RunStatus(replicas), story(max(2, replicas))):
        lines = shown(run, *size, now=40.0, hint="q leaves")
        assert len(lines) <= size[1]
        assert max(map(len, lines)) <= size[0]


def test_group_in_trouble_is_never_left_out() -> None:
    """If not all groups fit, those that do not train come first; the others are counted."""
    lines = shown(story(replicas=40), 80, 20, now=36.0)
    rows = [line.split()[:2] for line in lines if line[:7].strip().isdigit() and "  " in line]
    assert ["1", "recovering"] in rows
    assert len(rows) < 40
    assert f"and {40 - len(rows)} more: {40 - len(rows)} training" in lines


def test_narrow_terminal_keeps_what_matters() -> None:
    """Columns go by importance; of a fault that is cut, the age stays."""
    wide, narrow = (
        next(line for line in shown(story(), width) if "state" in line) for width in (160, 52)
    )
    assert "host" in wide
    assert "host" not in narrow
    assert [
        name for name in ("group", "state", "step", "restarts", "last fault") if name not in narrow
    ] == []
    row = next(line for line in shown(story(), 52, now=41.0) if "recovering" in line)
    assert "-0:10 abort" in row


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_reason_of_a_death_is_whole(size: tuple[int, int]) -> None:
    """Exception, rank and log are readable in any terminal: a long line continues in the
    next one.
    """
    log = f"/scratch/{40 * 'x'}/{40 * 'y'}/logs/replica-1/attempt-0/rank-0.log"
    error = "ValueError: the batch has the wrong shape: expected (8, 2048), got (8, 2047), from the packed loader"
    run = story()
    run.observe(
        event(
            "worker_exited",
            0,
            0,
            36.0,
            code=1,
            error=error,
            reason="rank 0 failed",
            log=log,
            stopped=False,
        )
    )
    told = " ".join(line[10:] for line in shown(run, *size, now=37.0))
    assert error in told
    assert log in told.replace(" ", "")


def test_for_whom_a_group_waits() -> None:
    """A row names the group waited for, with duration and reason; a group that cannot commit now is
    waiting.
    """
    run = story(replicas=3, steps=5)
    run.observe(step(6, 0, 36.0, waits=[{"slot": 1, "seconds": 1.4, "why": "lost"}]))
    run.observe(
        event(
            "waiting", 2, 0, 36.5, step=5, participants=[0, 2], reason="x", slots=[1], why="too_few"
        )
    )
    lines = shown(run, 120, now=37.0)
    rows = [line for line in lines if line.split()[:1] in (["0"], ["2"])]
    assert "training" in rows[0]
    assert "1 1.40 s lost" in rows[0]
    assert "waiting" in rows[1]
    assert "1 too few" in rows[1]
    assert "waits for" not in " ".join(shown(story(), 120, now=37.0))  # nobody waited


def test_ranks_are_shown_on_demand() -> None:
    """A row has step, process, memory, host and last event. With too many ranks, the late and ended
    ones have rows.
    """
    run = RunStatus()
    events = [launched(2)]
    events += [
        event("worker_started", group, rank, 1.0, host="n1", pid=70)
        for group in (0, 1)
        for rank in range(4)
    ]
    events += [
        step(9, g, 2.0, rank=r, memory_bytes=3 * 2**30, pid=70)
        for g in (0, 1)
        for r in range(4)
        if (g, r) != (1, 2)
    ]
    events += [event("worker_exited", 1, 3, 3.0, signal="SIGBUS", reason="", stopped=False)]
    for each in events:
        run.observe(each)
    assert "last event" not in " ".join(shown(run, 100, 50, now=12.0))
    lines = shown(run, 100, 50, now=12.0, ranks=True)
    table = next(place for place, line in enumerate(lines) if line.endswith("last event"))
    rows = [line.split() for line in lines[table + 1 : table + 9]]
    assert rows[0] == ["0", "0", "9", "70", "3.0", "GiB", "n1", "step_committed", "0:10", "ago"]
    assert rows[6] == ["1", "2", "-", "70", "-", "n1", "worker_started", "0:11", "ago"]
    assert rows[7][-1] == "SIGBUS"
    few = shown(run, 100, 20, now=12.0, ranks=True)
    assert len(few) <= 20
    assert any(line.endswith("SIGBUS") for line in few)
    assert any(
        line.startswith("and ") and line.endswith("more ranks, not behind these") for line in few
    )


def test_the_columns_are_explained_on_a_small_terminal_too() -> None:
    """Rows of groups make room: of two columns in three nothing was said on 24 lines."""
    text = shown(story(), 80, 24, now=36.0, help=True)
    for explained in (
        "x others    own s, as a multiple",
        "restarts    how often",
        "host        host of its rank 0",
    ):
        assert any(line.startswith(explained) for line in text)
    assert len(text) <= 24


def test_terminal_without_unicode() -> None:
    """On an ASCII terminal only ASCII is drawn."""
    assert "".join(shown(story(), 60, 24, ascii_only=True)).isascii()


def test_rate_falls_when_no_step_comes() -> None:
    """The rate is that of the last steps; it falls while a run stands still, but not after
    its end.
    """
    events = [launched(2), *(step(number, moment=float(number)) for number in range(1, 11))]
    run = fold(*events)
    assert run.tokens_per_second(10.5) == pytest.approx(100.0)
    assert run.tokens_per_second(19.0) == pytest.approx(50.0)
    run.observe(event("launch_finished", None, None, 11.0, code=0, reason="all groups finished"))
    assert run.tokens_per_second(1000.0) == pytest.approx(100.0)
    assert fold(step(1)).tokens_per_second(5.0) is None


def test_rate_leaves_out_what_is_long_ago() -> None:
    """A slow beginning is forgotten after a minute."""
    slow = [step(number, moment=50.0 * number) for number in range(1, 5)]
    fast = [step(number, moment=200.0 + number) for number in range(5, 90)]
    assert fold(*slow, *fast).tokens_per_second(289.5) == pytest.approx(100.0, rel=0.05)


def test_target_and_time_to_go() -> None:
    """The final step of the config is shown beside the step, and the remaining time at the rate of
    the last steps; without a config, and after the end, neither is guessed.
    """
    steps = [step(number, moment=2.0 * number) for number in range(1, 11)]
    run = fold(launched(2), event("worker_started", config={"group_size": 2, "steps": 100}), *steps)
    assert run.seconds_left(20.0) == pytest.approx(180.0)
    assert "step 10/100" in shown(run, 120, now=20.0)[2]
    assert "ETA 3:00" in shown(run, 120, now=20.0)[2]
    assert (
        run.progress(20.0)
        == "step 10  loss -1.00000  groups 2/2  restarts 0  tokens/s 50  ETA 3:00 (step 100)"
    )
    run.observe(event("launch_finished", None, None, 21.0, code=0))
    assert run.seconds_left(21.0) is None
    unknown = fold(launched(2), *steps)
    assert (unknown.seconds_left(20.0), unknown.progress(20.0)) == (
        None,
        "step 10  loss -1.00000  groups 2/2  restarts 0  tokens/s 50",
    )


def test_a_run_in_rounds() -> None:
    """Rounds have their own figure; steps are torchtitan's, also those of each group. A round may
    be long, and two of them without an event do not mean that the run is stuck.
    """
    config = {"group_size": 2, "steps": 100, "semi_sync_method": "diloco", "sync_steps": 10}
    rounds = [step(number, moment=30.0 * number, inner_step=10 * number) for number in range(1, 4)]
    run = fold(launched(2), event("worker_started", config=config), *rounds)
    lines = shown(run, 120, now=140.0)
    assert lines[1].startswith("running for 2:20; 2 groups"), lines[1]
    assert "no event" not in lines[1]
    assert lines[2].startswith("round 3  step 30/100  ")
    assert "ETA 3:30" in shown(run, 120, now=90.0)[2]
    assert next(line for line in lines if line.split()[:2] == ["0", "training"]).split()[2] == "30"
    assert "no event for 1:10" in shown(run, 120, now=160.0)[1]


def test_going_back_is_announced() -> None:
    """After the loss of all groups the loaded checkpoint and the repeated steps are shown."""
    run = fold(
        launched(2), *(step(number, replica) for number in range(1, 9) for replica in (0, 1))
    )
    told = [
        run.observe(event("checkpoint_loaded", 0, attempt=1, step=4)),
        run.observe(step(5, 0, attempt=1, lineage="0a")),
        run.observe(step(5, 1, attempt=1, lineage="0a")),
        run.observe(step(6, 0, attempt=1, lineage="0b")),
    ]
    assert told == [
        "group 0 goes on from the checkpoint of step 4",
        "training went back to step 4: steps 5 to 8 are made again",
        None,
        None,
    ]
    assert [line.text for line in run.lines][-2:] == told[:2]
    assert run.observe(event("started_anew", 0, attempt=1)).startswith(
        "group 0 starts anew from step 0"
    )


def test_launcher_shows_what_top_shows() -> None:
    """The launcher's table has top's figures, without the lines that the launcher prints above, and
    fits the terminal.
    """
    run, console = story(), Console(width=100, height=1000, file=io.StringIO(), color_system=None)
    lines = console.render_lines(frame(run, "", 36.0, Screen(100, 24), history=False), pad=False)
    text = ["".join(segment.text for segment in line).rstrip() for line in lines]
    assert (
        text
        == [line for line in shown(run, 100, 24, now=36.0)[1:] if "  group 1 " not in line][
            : len(text)
        ]
    )
    assert any("tokens/s" in line for line in text)
    assert not any("died" in line for line in text)
    crowded = console.render_lines(
        frame(story(40), "", 36.0, Screen(100, 12), history=False), pad=False
    )
    assert len(crowded) <= 12


def test_run_that_is_over() -> None:
    """The outcome stands in the head, as `check` and `report` have it, with the time up to the
    end.
    """
    run = story()
    run.observe(
        event("launch_finished", None, None, 65.0, code=1, reason="1 of 4 groups failed: 1")
    )
    text = "Failed at step 31: killed by SIGABRT, rank 0 of group 1; over after 1:05; 4 groups x 2 ranks"
    assert shown(run, now=9999.0, width=120)[1] == text
    # Whole in a narrow terminal, too.
    assert " ".join(shown(run, now=9999.0, width=40)[1:4]) == text


def test_silence_is_told() -> None:
    """A silent run shows since when: it may hang, or its launcher may be gone."""
    assert "no event" not in shown(story(), now=36.0)[1]
    assert shown(story(), now=95.0)[1].endswith("no event for 1:00")


def test_run_without_a_launcher() -> None:
    """Groups that were started one by one are found by their events; the run ends when all of them
    have.
    """
    run = fold(event("worker_started", 2, config={"group_size": 4}), step(1, 2), step(1, 5))
    assert list(run.groups) == [0, 1, 2, 3, 5]
    run = fold(step(1, 0), step(1, 1), event("training_finished", 0, step=1))
    assert not run.end
    run.observe(event("training_finished", 1, step=1))
    assert run.end


def test_second_launch_in_the_folder() -> None:
    """A resumed run starts anew with the earlier loss curve, and is running again."""
    run = story()
    run.observe(
        event(
            "launch_finished",
            None,
            None,
            65.0,
            code=130,
            reason="stopped by Ctrl-C",
            signal="SIGINT",
        )
    )
    run.observe(launched(4, 100.0))
    run.observe(event("worker_started", 1, 0, 101.0, attempt=2))
    run.observe(step(31, 1, 102.0, attempt=2))
    assert not run.end
    fold = run.fold
    assert (
        run.restarts,
        fold.faults.num_injected,
        fold.steps.num_committed,
        run.elapsed(105.0),
    ) == (0, 0, 1, 5.0)
    assert (run.groups[1].state, run.groups[1].attempt) == ("training", 2)
    assert run.losses.points == [9.0 - number for number in range(1, 32)]


def test_asked_to_leave() -> None:
    """When the launcher was asked to stop, its groups are seen to leave."""
    run = fold(
        launched(2), step(1, 0), step(1, 1), event("launch_stopping", None, None, reason="Ctrl-C")
    )
    assert [group.state for group in run.groups.values()] == ["draining", "draining"]
    assert run.lines[-1][1] == "all groups are asked to leave: Ctrl-C"


def test_stopped_before_it_began() -> None:
    """The last frame of a stopped run does not show groups without time to leave as "draining"."""
    run = fold(launched(2), step(1, 0), event("launch_stopping", None, None, reason="Ctrl-C"))
    run.observe(
        event("worker_exited", 0, 0, signal="SIGKILL", reason="stopped because ...", stopped=True)
    )
    run.observe(
        event(
            "launch_finished",
            None,
            None,
            9.0,
            code=130,
            reason="stopped by Ctrl-C",
            signal="SIGINT",
        )
    )
    assert [group.state for group in run.groups.values()] == ["stopped", "stopped"]
    assert run.end == "stopped by Ctrl-C"


def test_course_of_the_loss_over_a_long_run() -> None:
    """A frame of a long run costs as much as of a short one; the first and the last value are
    exact.
    """
    course = LossCurve()
    for number in range(10 * MAX_POINTS):
        course.add(float(number))
    assert len(course.points) <= MAX_POINTS
    assert (course.first, course.last) == (0.0, 10.0 * MAX_POINTS - 1)
    assert all(before < after for before, after in pairwise(course.points))
    assert make_sparkline(course.points, 4) == ["▁▃▆█"]


def write_run(folder: Path, *events: Event, name: str = "launcher-1") -> EventLog:
    log = EventLog(folder / "events" / f"{name}.jsonl")
    for each in events:
        log.emit(each)
    return log


def test_one_snapshot_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe the run is shown once, completely, without control characters, although it
    continues.
    """
    write_run(tmp_path, launched(30), *(step(1, replica) for replica in range(30)))
    assert top(tmp_path) == 0
    printed, errors = capsys.readouterr()
    assert "\x1b" not in printed
    assert errors == ""
    assert len([line for line in printed.splitlines() if "training" in line]) == 30


def test_folder_without_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that was just submitted has one line and status 0; on a terminal the view waits
    for it.
    """
    assert top(tmp_path, once=True) == 0
    assert capsys.readouterr() == (f"{tmp_path}: nothing has started yet (no events/*.jsonl)\n", "")
    assert "nothing has started yet" in shown(RunStatus())


def test_launcher_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process holds the folder's lock, and no event has come since: the launcher was killed."""
    write_run(tmp_path, launched(2), step(1), step(1, 1))
    (tmp_path / "config.toml").touch()
    run = FollowedRun(tmp_path).poll()
    assert not run.launcher_gone  # the lock may be known on the launcher's own host only
    later = run.fold.last_event_time + 120
    monkeypatch.setattr(time, "time", lambda: later)
    gone = FollowedRun(tmp_path).poll()
    line = (
        "End unknown, the launcher is gone: last at step 1; no event for 2:00; 2 groups x 2 ranks"
    )
    assert line in shown(gone, 120, now=later)
    with (tmp_path / "config.toml").open("a") as config:
        assert hold(config)
        lives = FollowedRun(tmp_path).poll()
    assert not any("the launcher is gone" in line for line in shown(lives, now=later))


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    """One line names the argument, its rule, and its value."""
    with pytest.raises(
        ConfigError,
        match=r"^RUN_DIR must be the folder of a run, got .*/no; there is no such folder$",
    ):
        top(tmp_path / "no")


def test_folder_that_vanishes(tmp_path: Path) -> None:
    """A run whose folder is removed meanwhile says so."""
    folder = tmp_path / "run"
    write_run(folder, launched(1))
    run = FollowedRun(folder)
    assert len(run.poll().groups) == 1
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="it has been removed"):
        run.poll()


class Terminal:
    """A terminal of 80x24 in which `titan-ft top` runs."""

    def __init__(self, folder: Path) -> None:
        self.output = b""
        self._keyboard, self.screen = pty.openpty()
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self.screen)
        code = (
            "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            # As a shell starts it in the foreground, also where these tests run in the background
            # and ignore it.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from titan_ft.cli.main import main; sys.exit(main(['top', sys.argv[1]]))\n"
        )
        env = {
            name: text
            for name, text in os.environ.items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            stdin=self.screen,
            stdout=self.screen,
            stderr=self.screen,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def read_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Read the output until the condition holds, or fail."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output.decode(errors="replace")
            if select.select([self._keyboard], [], [], 0.05)[0]:
                self.output += os.read(self._keyboard, 65536)

    def wait(self) -> int:
        """Read to the end of the process and return its exit status."""
        self.read_until(lambda: self.process.poll() is not None)
        while select.select([self._keyboard], [], [], 0)[0]:
            self.output += os.read(self._keyboard, 65536)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._keyboard)
        os.close(self.screen)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    write_run(tmp_path / "run", launched(2))
    opened = Terminal(tmp_path / "run")
    yield opened
    opened.close()


def assert_as_before(terminal: Terminal) -> None:
    """The other screen is left, the cursor is back, and keys are handled as before."""
    assert terminal.output.count(ENTER) == terminal.output.count(LEAVE) == 1
    assert terminal.output.rfind(SHOW) > terminal.output.rfind(HIDE)
    assert termios.tcgetattr(terminal.screen) == terminal.settings


@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 130)], ids=["q", "Ctrl-C"])
def test_leaving(terminal: Terminal, key: bytes, status: int) -> None:
    """q and Ctrl-C leave the terminal as it was, without a traceback."""
    terminal.read_until(lambda: b"q leaves" in terminal.output)
    terminal.press(key)
    assert terminal.wait() == status
    assert b"Traceback" not in terminal.output
    assert_as_before(terminal)


def test_keys_show_ranks_and_columns(terminal: Terminal, tmp_path: Path) -> None:
    """r shows the ranks, and hides them again; ? explains the columns."""
    write_run(tmp_path / "run", event("worker_started", 0, 0, host="n1"), name="replica-0")
    terminal.read_until(lambda: b"q leaves" in terminal.output)
    terminal.press(b"r")
    terminal.read_until(lambda: b"last event" in terminal.output)
    terminal.press(b"?")
    terminal.read_until(lambda: b"number of the replica group" in terminal.output)
    terminal.press(b"q")
    assert terminal.wait() == 0


def test_ended_from_outside(terminal: Terminal) -> None:
    """SIGTERM, too, leaves the terminal as it was."""
    terminal.read_until(lambda: b"q leaves" in terminal.output)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait() == 128 + signal.SIGTERM
    assert_as_before(terminal)


def test_followed_to_its_end(terminal: Terminal, tmp_path: Path) -> None:
    """Later files are followed too; the last frame stays on the ordinary screen, with status 0."""
    terminal.read_until(lambda: b"q leaves" in terminal.output)
    write_run(tmp_path / "run", step(7, loss=1.25), name="replica-0")
    terminal.read_until(lambda: b"1.25000" in terminal.output)
    write_run(
        tmp_path / "run", event("launch_finished", None, None, code=0, reason="all groups finished")
    )
    assert terminal.wait() == 0
    assert_as_before(terminal)
    end = terminal.output[terminal.output.rfind(LEAVE) :]
    assert b"all groups finished (exit status 0)" in end
    assert b"1.25000" in end
    assert b"q leaves" not in end


def test_watched_folder_vanishes(terminal: Terminal, tmp_path: Path) -> None:
    """When the run is removed, the terminal is put in order before the line that says so."""
    terminal.read_until(lambda: b"q leaves" in terminal.output)
    shutil.rmtree(tmp_path / "run")
    assert terminal.wait() == 2
    assert_as_before(terminal)
    assert b"it has been removed" in terminal.output[terminal.output.rfind(LEAVE) :]


def test_finished_run_is_shown_once(tmp_path: Path) -> None:
    """A finished run has one frame on the ordinary screen, and status 0."""
    ended = event(
        "launch_finished", None, None, code=130, reason="stopped by Ctrl-C", signal="SIGINT"
    )
    write_run(tmp_path, launched(2), step(7), ended)
    terminal = Terminal(tmp_path)
    try:
        assert terminal.wait() == 0
        assert ENTER not in terminal.output
        assert terminal.output.count(b"titan-ft top") == 1
        assert termios.tcgetattr(terminal.screen) == terminal.settings
    finally:
        terminal.close()
