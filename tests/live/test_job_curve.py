# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's TensorBoard curves, from the events of a run: each committed step once, without lost
steps.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.event_builder import build
from titan_ft.cli.main import main
from titan_ft.live.job_curve import HOLD_SECONDS, JobCurve, JobSteps
from titan_ft.run.events import Drained, Event, LaunchStarted, StepCommitted, TrainingFinished
from titan_ft.run.log import EventLog

LOSS = "loss_metrics/global_avg_loss"


def step(
    number: int, replica: int = 0, name: str = "", parent: str = "", **fields: Any
) -> StepCommitted:
    """Make a commit; `name` and `parent` distinguish branches."""
    lineage, before = name or f"{number:012x}", parent or f"{number - 1:012x}"
    usual: dict[str, Any] = {
        "time": float(number),
        "participants": [0, 1],
        "tokens": 100,
        "loss": 10.0 - number,
    }
    return build(
        StepCommitted,
        replica=replica,
        step=number,
        lineage=lineage,
        parent=before,
        **{**usual, **fields},
    )


def write(folder: Path, *events: Event) -> None:
    """Write the curve of one launch, to its end."""
    curve = JobCurve(folder, report=lambda line: pytest.fail(line))
    for event in events:
        curve.observe(event)
    curve.close()


def read(folder: Path, tag: str = LOSS) -> list[tuple[int, float]]:
    """Return step and value of a curve's points as TensorBoard shows them."""
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    return [(point.step, point.value) for point in shown.Scalars(tag)]


def given(events: Iterable[Event]) -> list[int]:
    """Return the numbers of the steps that the fold emits for events, and then of those left at the
    end.
    """
    steps = JobSteps()
    return [commit.step for event in events for commit in steps.observe(event)] + [
        s.step for s in steps.finish()
    ]


def test_each_step_is_one_point(tmp_path: Path) -> None:
    """The curve has one point of each step, with its figures, however many groups and ranks report
    the step.
    """
    write(tmp_path, *(step(n, r, rank=k) for n in range(1, 6) for r in (0, 1) for k in (0, 1)))
    assert read(tmp_path) == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.0)]
    assert read(tmp_path, "ft/participants") == [(n, 2.0) for n in range(1, 6)]
    assert read(tmp_path, "job/tokens_per_second") == [(n, 100.0) for n in range(2, 6)]


def test_rounds_are_points_at_their_last_step(tmp_path: Path) -> None:
    """With a semi-synchronous method the curve is over torchtitan's steps, so that it compares with
    other runs.

    A step's seconds are those of one step. Repeated steps replace the lost ones.
    """
    rounds = [step(n, inner_step=min(10 * n, 35), time=20.0 * n) for n in range(1, 5)]
    again = step(4, name="b" * 12, parent=f"{3:012x}", time=100.0, loss=-1.0, inner_step=35)
    write(tmp_path, *rounds, again)
    assert read(tmp_path) == [(10, 9.0), (20, 8.0), (30, 7.0), (35, -1.0)]
    assert read(tmp_path, "job/step(s)")[:2] == [(20, 2.0), (30, 2.0)]
    assert read(tmp_path, "job/tokens_per_second")[:2] == [(20, 5.0), (30, 5.0)]


def test_no_gap_when_a_group_dies_behind_its_commit(tmp_path: Path) -> None:
    """If group 0 dies after a commit, the curve has that step exactly once, whoever else reported
    it.
    """
    others = [step(n, 1, participants=[1], time=n + 0.5) for n in range(3, 6)]
    events = [
        *(step(n, r) for n in (1, 2) for r in (0, 1)),
        step(3, 0),
        *others,
        step(6, 0, time=7.0),
        step(6, 1),
    ]
    write(tmp_path, *events)
    assert [number for number, _ in read(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_loss_that_was_not_finite(tmp_path: Path) -> None:
    """A commit without a loss had a nonfinite one, so its point is NaN."""
    write(tmp_path, step(1, loss=2.5), step(2, loss=None), step(3))
    (_, known), (_, unknown), _ = read(tmp_path)
    assert known == 2.5
    assert math.isnan(unknown)


def test_commit_that_nobody_goes_on_from_is_no_point(tmp_path: Path) -> None:
    """Of two commits of one step after a broken exchange, the curve has the job's, in
    either order.
    """
    own = step(3, 0, name="a" * 12, loss=99.0)
    job = step(3, 1, time=3.5)
    for number, pair in enumerate(([own, job], [job, own])):
        folder = tmp_path / str(number)
        write(folder, step(1), step(2), *pair, step(4, 1), step(5, 1))
        assert read(folder) == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 5.0)]


def test_steps_that_are_lost_are_dropped(tmp_path: Path) -> None:
    """After the loss of all groups training continues from a checkpoint: repeated steps are shown
    once, as made last.
    """
    lost = [step(n) for n in range(1, 9)]
    again = [step(5, name="b" * 12, parent=f"{4:012x}", time=20.0, loss=-1.0)]
    again += [step(6, name="c" * 12, parent="b" * 12, time=21.0, loss=-2.0)]
    write(tmp_path, *lost, *again)
    assert read(tmp_path) == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, -1.0), (6, -2.0)]


def test_second_launch_goes_on(tmp_path: Path) -> None:
    """A resumed run continues the curve after the step of its checkpoint."""
    write(tmp_path, *(step(n) for n in range(1, 9)))
    again = [
        step(6, name="b" * 12, time=20.0, loss=0.5),
        step(7, name="c" * 12, parent="b" * 12, time=21.0, loss=0.5),
    ]
    write(tmp_path, *again)
    assert read(tmp_path) == [*((n, 10.0 - n) for n in range(1, 6)), (6, 0.5), (7, 0.5)]


def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch's file is read after the first one's, even if the wall clock was
    set back.
    """
    monkeypatch.setattr("titan_ft.run.curve_file.time.time", lambda: 2_000_000_000.0)
    write(tmp_path, *(step(n) for n in range(1, 9)))
    monkeypatch.setattr("titan_ft.run.curve_file.time.time", lambda: 1_000_000_000.0)
    again = [
        step(6, name="b" * 12, time=20.0, loss=0.5),
        step(7, name="c" * 12, parent="b" * 12, time=21.0, loss=0.5),
    ]
    write(tmp_path, *again)
    assert read(tmp_path) == [*((n, 10.0 - n) for n in range(1, 6)), (6, 0.5), (7, 0.5)]


def test_step_is_given_once_another_one_goes_on_from_it() -> None:
    """A step is emitted once another step builds on it, or its group finishes or leaves; until then
    it may be void.
    """
    steps = JobSteps()
    assert steps.observe(step(1)) == []
    assert [commit.step for commit in steps.observe(step(2))] == [1]
    assert steps.observe(step(2, 1)) == []
    final = build(TrainingFinished, step=2, lineage=f"{2:012x}")
    assert [commit.step for commit in steps.observe(final)] == [2]
    assert steps.observe(build(Drained, step=2, lineage=f"{2:012x}")) == []
    assert steps.finish() == []


def test_events_that_come_late_are_waited_for() -> None:
    """Steps stay in order if a file is visible later than another one. A step that never comes is a
    gap.
    """
    assert given([step(1), step(2), step(4, 1), step(5, 1), step(3, time=3.0), step(6)]) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    late = step(6, time=4 + HOLD_SECONDS + 1)
    assert given([step(1), step(2), step(4), step(5), late, step(3), step(7, time=late.time)]) == [
        1,
        2,
        4,
        5,
        6,
        7,
    ]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The job trains on, and its points wait. One line reports the failure, and one the
    recovery.
    """
    (tmp_path / "tb").touch()
    lines: list[str] = []
    curve = JobCurve(tmp_path / "tb" / "job", lines.append)
    for number in range(1, 5):
        curve.observe(step(number))
    assert curve.has_outage
    assert lines == [
        f"{tmp_path}/tb/job cannot be written (Not a directory): its curves wait until it can"
    ]
    (tmp_path / "tb").unlink()
    curve.observe(step(5))
    assert lines[1:] == [f"{tmp_path}/tb/job can be written again"]
    assert curve.close() == 0
    assert [number for number, _ in read(tmp_path / "tb" / "job")] == [1, 2, 3, 4, 5]


def test_folder_that_can_never_be_written(tmp_path: Path) -> None:
    """At the end a line says how much of the curves is lost."""
    (tmp_path / "tb").touch()
    lines: list[str] = []
    curve = JobCurve(tmp_path / "tb" / "job", lines.append)
    for number in range(1, 5):
        curve.observe(step(number))
    assert curve.close() == 4
    assert len(lines) == 2
    assert lines[1].endswith("still cannot be written: the last 4 points of its curves are lost")


def test_nothing_is_made_without_a_step(tmp_path: Path) -> None:
    """A run that never commits leaves no folder."""
    write(tmp_path / "job", build(Drained, step=0))
    assert not (tmp_path / "job").exists()


def test_import_loads_no_tensorboard() -> None:
    """A launch without TensorBoard does not pay for it."""
    code = "import sys, titan_ft.live.job_curve; print('tensorboard' in sys.modules, 'torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert process.stdout.split() == ["False", "False"]


def tell(run_dir: Path, *events: Event) -> None:
    log = EventLog(run_dir / "events" / "replica-0.jsonl")
    for event in events:
        log.emit(event)
    log.close()


def test_curves_of_a_run_without_a_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes the curves from the events at every call, and ends with the run."""
    tell(tmp_path, *(step(n, r) for n in range(1, 5) for r in (0, 1)))
    tell(
        tmp_path, *(build(TrainingFinished, replica=r, step=4, lineage=f"{4:012x}") for r in (0, 1))
    )
    for _ in range(2):
        assert main(["curves", str(tmp_path)]) == 0
        assert read(tmp_path / "tb" / "job") == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]
        assert len(list((tmp_path / "tb" / "job").iterdir())) == 1
    assert f"tensorboard --logdir {tmp_path}/tb" in capsys.readouterr().out


def test_curves_that_the_launcher_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two writers in one folder would corrupt it: the command names the writer and the remedy."""
    tell(tmp_path, build(LaunchStarted, replicas=2, ranks_per_replica=1), step(1))
    (tmp_path / "tb" / "job").mkdir(parents=True)
    assert main(["curves", str(tmp_path)]) == 2
    assert "--out must be a folder that nobody else writes" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "no")]) == 2
    assert "RUN_DIR must be the folder of a run" in capsys.readouterr().err


def test_curves_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the failure and the remedy; the status is 2."""
    tell(tmp_path, step(1), step(2))
    (tmp_path / "tb").touch()
    assert main(["curves", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"titan-ft: --out must be a folder that can be written, got {tmp_path}/tb/job ("
    )
    assert line.endswith("; make room, or give another")
    tell(tmp_path, build(TrainingFinished, replica=0, step=2, lineage=f"{2:012x}"))
    assert main(["curves", str(tmp_path), "--out", str(tmp_path / "other")]) == 0
