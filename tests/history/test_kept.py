# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A long run's events are reduced once and kept: all verdicts and figures stay, and changed files
are reread.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.history.conftest import RANKS, START, SyntheticRun
from titan_ft.history.batches.audit import audit
from titan_ft.history.check import check
from titan_ft.history.record import kept
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.record.trajectory import ROOT
from titan_ft.history.record.usual_steps import MARGIN, UsualSteps
from titan_ft.history.report.facts import report_figures
from titan_ft.history.timing.rework import find_rework
from titan_ft.live.run_status import RunStatus
from titan_ft.live.top import FollowedRun
from titan_ft.run.events import StepCommitted
from titan_ft.run.log import encode

NUM_STEPS = 80


@pytest.fixture(autouse=True)
def reduce_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MIN_BYTES", 1)


def write(run: SyntheticRun, run_dir: Path) -> Path:
    """Write the events of a run, a file for each process; return their folder."""
    folder = run_dir / "events"
    folder.mkdir(exist_ok=True)
    for event in run.events:
        with (folder / f"{event.pid}.jsonl").open("ab") as file:
            file.write(encode(event))
    run.events.clear()
    return folder


def plain_run() -> SyntheticRun:
    run = SyntheticRun(digest_every=20)
    run.begin()
    run.steps(NUM_STEPS)
    return run


def with_a_death() -> SyntheticRun:
    run = plain_run()
    run.kill(1)
    run.step([0, 2], num_exchanges=2)
    run.restart(1)
    run.heal(1, lambda: run.steps(2, [0, 2]))
    run.steps(NUM_STEPS)
    run.finish()
    return run


def figures(record: RunRecord) -> dict[str, Any]:
    return {
        "check": check(record).to_dict(),
        "audit": audit(record).to_dict(),
        "report": report_figures(record),
    }


def test_every_figure_of_a_reduced_run_is_that_of_the_whole_one(tmp_path: Path) -> None:
    folder = write(with_a_death(), tmp_path)
    whole = RunRecord.read(folder, whole=True)
    reduced = RunRecord.read(folder)
    again = RunRecord.read(folder)  # from what is kept
    assert len(reduced.written) < len(whole.written) / 1.5
    assert len(reduced.usual_commits) > NUM_STEPS / 2
    assert figures(whole)["check"]["verdict"] == "holds"
    assert figures(reduced) == figures(whole)
    assert figures(again) == figures(whole)


def test_the_steps_around_a_death_keep_their_events(tmp_path: Path) -> None:
    folder = write(with_a_death(), tmp_path)
    told = {event.step for event in RunRecord.read(folder).of(StepCommitted)}
    assert set(range(NUM_STEPS - MARGIN, NUM_STEPS + 3 + MARGIN)) <= told


def test_digests_that_agree_keep_no_events(tmp_path: Path) -> None:
    """Equal digests are counted; a differing one keeps the step's events, because `check` names the
    groups.
    """
    run = SyntheticRun(digest_every=2)
    run.begin()
    run.steps(NUM_STEPS)
    run.finish()
    odd = next(e for e in run.events if isinstance(e, StepCommitted) and e.step == NUM_STEPS // 2)
    for name, digest in (("equal", odd.digest), ("differ", "0dd")):
        odd.digest = digest
        (tmp_path / name).mkdir()
        events = list(run.events)
        folder = write(run, tmp_path / name)
        run.events = events
        reduced, whole = RunRecord.read(folder), RunRecord.read(folder, whole=True)
        told = {event.step for event in reduced.of(StepCommitted)}
        assert (odd.step in told) is (name == "differ")
        assert odd.step + 2 not in told
        assert figures(reduced) == figures(whole)
        assert figures(reduced)["report"]["step_digests"] == name
        assert figures(reduced)["report"]["num_step_digests"] == RANKS * NUM_STEPS // 2


def test_what_came_since_is_added_to_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain_run()
    folder = write(run, tmp_path)
    before = RunRecord.read(folder)
    run.steps(NUM_STEPS)
    run.finish()
    write(run, tmp_path)
    monkeypatch.setattr(kept, "_is_unchanged", lambda path, source: True)
    later = RunRecord.read(folder)
    assert len(later.usual_commits) > len(before.usual_commits)
    assert figures(later) == figures(RunRecord.read(folder, whole=True))
    monkeypatch.setattr(kept, "MIN_BYTES", 1 << 30)
    run.tell("launch_stopping", 1, reason="late", drain_seconds=1.0)
    write(run, tmp_path)
    assert (
        RunRecord.read(folder).of(type(RunRecord.read(folder, whole=True).events[-1]))[-1].name
        == "launch_stopping"
    )


def test_a_launcher_keeps_the_record_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call adds a frame; a command reads at the end what it would have reduced itself."""
    run = plain_run()
    folder = write(run, tmp_path)
    sizes = []
    for _ in range(3):
        kept.keep(folder)
        sizes.append((folder / kept.FILE).stat().st_size)
        run.steps(NUM_STEPS)
        write(run, tmp_path)
    run.finish()
    write(run, tmp_path)
    kept.keep(folder)
    assert sizes == sorted(set(sizes))
    assert (inode := (folder / kept.FILE).stat().st_ino)
    kept.keep(folder)
    assert (folder / kept.FILE).stat().st_ino == inode

    def refuse(*args: Any) -> None:
        raise AssertionError("the events are reduced already")

    monkeypatch.setattr(kept, "_reduce", refuse)
    found = RunRecord.read(folder)
    assert found.usual_commits
    assert figures(found) == figures(RunRecord.read(folder, whole=True))


def test_the_process_beside_a_launcher_decodes_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding all events would take a time that grows with the run."""
    run = plain_run()
    folder = write(run, tmp_path)
    kept.keep(folder)
    run.steps(NUM_STEPS)
    write(run, tmp_path)
    decoder = kept._part_decoder
    monkeypatch.setattr(kept, "_part_decoder", None)
    kept.keep(folder)
    monkeypatch.setattr(kept, "_part_decoder", decoder)
    assert max(event.step for event in RunRecord.read(folder).usual_commits) > NUM_STEPS


@pytest.mark.parametrize("num_bytes", [1, 50, 1000])
def test_a_frame_of_a_process_that_was_killed_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    """The frames before a partial one stay, and the next one replaces it."""
    run = plain_run()
    folder = write(run, tmp_path)
    kept.keep(folder)
    first = (folder / kept.FILE).stat().st_size
    run.steps(NUM_STEPS)
    run.finish()
    write(run, tmp_path)
    kept.keep(folder)
    os.truncate(folder / kept.FILE, (folder / kept.FILE).stat().st_size - num_bytes)
    loaded = kept._load(folder)
    assert loaded is not None
    assert loaded.num_bytes == first
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))
    loaded = kept._load(folder)
    assert loaded is not None
    assert loaded.num_bytes == (folder / kept.FILE).stat().st_size > first


@pytest.mark.parametrize("is_anew", [False, True])
def test_two_processes_that_reduce_the_same_events_keep_them_once(
    tmp_path: Path, is_anew: bool
) -> None:
    """A command and the launcher's process reduce the same frames; the second writer finds the
    first one's work.
    """
    run = plain_run()
    folder = write(run, tmp_path)
    kept.keep(folder)
    loaded = kept._load(folder)
    assert loaded is not None
    run.steps(NUM_STEPS)
    run.finish()
    write(run, tmp_path)
    late = kept._reduce(sorted(folder.glob("*.jsonl")), loaded)
    if is_anew:
        (folder / kept.FILE).rename(folder / "old")
    kept.keep(folder)
    written = (folder / kept.FILE).read_bytes()
    kept._store(folder, late)
    assert (folder / kept.FILE).read_bytes() == written
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))


def rewrite(folder: Path) -> None:
    """Change one figure in the middle of a file without a change of size and date."""
    path = folder / "1000.jsonl"
    status = path.stat()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[40] = lines[40].replace(b'"tokens": 1536', b'"tokens": 1535')
    path.write_bytes(b"".join(lines))
    assert path.stat().st_size == status.st_size


def cut(folder: Path) -> None:
    path = folder / "1000.jsonl"
    os.truncate(path, path.stat().st_size // 2)


def remove(folder: Path) -> None:
    (folder / "1000.jsonl").unlink()


def damage_record(folder: Path) -> None:
    path = folder / kept.FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_record(folder: Path) -> None:
    os.truncate(folder / kept.FILE, 100)


def other_version(folder: Path) -> None:
    path = folder / kept.FILE
    path.write_bytes(msgspec.msgpack.encode({"version": "0.0.1"}) + path.read_bytes()[20:])


@pytest.mark.parametrize("damage", [rewrite, cut, remove, damage_record, cut_record, other_version])
def test_what_is_kept_is_not_used_where_it_may_not_fit(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = write(with_a_death(), tmp_path)
    RunRecord.read(folder)
    assert (folder / kept.FILE).exists()
    damage(folder)
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))


def test_a_folder_that_cannot_be_written_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_whole", refuse)
    folder = write(with_a_death(), tmp_path)
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))
    assert not (folder / kept.FILE).exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", 1.0),
        ("own_loss", 1.0),
        ("tokens", 1),
        ("lr", 0.5),
        ("grad_norm", 9.0),
        ("parent", "bad"),
        ("forward_passes", 2),
        ("participants", [0, 2]),
        ("exchanges", 2),
        ("batches", {0: (30, 1), 1: (31, 1), 2: (30, 1)}),
        ("waits", [{"slot": 1, "seconds": 9.0, "why": "catching_up"}]),
    ],
)
def test_a_step_that_breaks_a_promise_is_judged_as_before(
    tmp_path: Path, field: str, value: Any
) -> None:
    run = with_a_death()
    broken = run.named("step_committed", step=31, replica=1)[0]
    at = run.events.index(broken)
    raw = msgspec.to_builtins(broken) | {field: value}
    run.events[at] = msgspec.convert(
        msgspec.to_builtins(raw, str_keys=True), type(broken), strict=False
    )
    folder = write(run, tmp_path)
    reduced = RunRecord.read(folder)
    assert 31 in {event.step for event in reduced.of(StepCommitted)}
    assert figures(reduced) == figures(RunRecord.read(folder, whole=True))


def test_training_that_goes_back_over_usual_steps_keeps_their_events(tmp_path: Path) -> None:
    run = plain_run()
    states = {event.step: event.lineage for event in run.named("step_committed")}
    for group in range(3):
        run.kill(group)
        run.restart(group)
        run.of("checkpoint_loaded", group, step=20, lineage=states[20])
    run.step_number, run.state = 20, states[20]
    run.ends = dict.fromkeys(range(3), 20)
    run.steps(NUM_STEPS + 40)
    run.finish()
    folder = write(run, tmp_path)
    reduced = RunRecord.read(folder)
    assert reduced.usual_commits
    assert {event.step for event in reduced.usual_commits}.isdisjoint(range(21, NUM_STEPS + 1))
    assert figures(reduced) == figures(RunRecord.read(folder, whole=True))


def test_steps_that_are_made_again_as_usual_are_made_again(tmp_path: Path) -> None:
    """Repeated steps are found, although their first events were kept because a fault was near."""
    run = SyntheticRun(digest_every=20)
    run.begin()
    run.tell(
        "fault_injected",
        2,
        fault="slow_rank",
        target={"replica": 1, "rank": 0},
        seed=1,
        shot=0,
        params={},
    )
    run.step([0, 1])  # so that these states are others
    run.steps(39)
    for group in range(3):
        run.exit(group)
        run.restart(group)
        run.of("started_anew", group, step=0)
    run.step_number, run.state = 0, ROOT
    run.ends = dict.fromkeys(range(3), 0)
    run.now += 60.0
    run.steps(60)
    run.finish()
    folder = write(run, tmp_path)
    reduced = RunRecord.read(folder)
    assert {event.step for event in reduced.usual_commits} >= set(range(20, 40))
    assert find_rework(reduced).num_again == 40
    assert find_rework(reduced) == find_rework(RunRecord.read(folder, whole=True))


def test_steps_during_a_fault_that_lasts_are_not_usual(tmp_path: Path) -> None:
    run = plain_run()
    fault = {"fault": "slow_rank", "target": {"replica": 1, "rank": 0}, "shot": 3}
    run.tell("fault_injected", 2, **fault, seed=1)
    run.steps(NUM_STEPS + 90)
    run.tell("fault_undone", 2, **fault)
    run.steps(20)
    run.finish()
    folder = write(run, tmp_path)
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))


def test_top_shows_a_reduced_run_as_the_whole_one(tmp_path: Path) -> None:
    run = with_a_death()
    whole = RunStatus()
    for event in run.events:
        whole.observe(event)
    folder = write(run, tmp_path)
    shown = FollowedRun(folder.parent).poll()
    assert RunRecord.read(folder).of(UsualSteps)
    assert shown.groups == whole.groups
    assert list(shown.lines) == list(whole.lines)
    assert shown.losses.points == whole.losses.points
    assert (shown.fold.steps.num_committed, shown.fold.steps.num_attempted) == (
        NUM_STEPS * 2 + 3,
        whole.fold.steps.num_attempted,
    )
    assert shown.outcome == whole.outcome


def test_a_fault_that_is_undone_and_whose_beginning_nobody_told_ends_no_reading(
    tmp_path: Path,
) -> None:
    run = plain_run()
    run.tell("fault_undone", 2, fault="slow_rank", target={"replica": 1, "rank": 0}, shot=3)
    run.steps(NUM_STEPS)
    run.finish()
    folder = write(run, tmp_path)
    reduced = RunRecord.read(folder)
    assert {event.step for event in reduced.usual_commits}.isdisjoint(range(NUM_STEPS + 1))
    assert figures(reduced) == figures(RunRecord.read(folder, whole=True))


def test_a_reader_that_goes_on_knows_the_faults_and_clocks_of_what_is_kept(tmp_path: Path) -> None:
    run = plain_run()
    fault = {"fault": "slow_rank", "target": {"replica": 1, "rank": 0}, "shot": 3}
    run.tell("fault_injected", 2, **fault, seed=1)
    folder = write(run, tmp_path)
    RunRecord.read(folder)
    assert (remembered := kept._load(folder)) is not None
    assert remembered.memory.fault_steps == {"slow_rank 3": NUM_STEPS}
    assert len(remembered.memory.offsets) == run.num_groups * RANKS
    run.steps(NUM_STEPS)
    run.tell("fault_undone", 2, **fault)
    run.steps(NUM_STEPS)
    run.finish()
    write(run, tmp_path)
    later = RunRecord.read(folder)
    (folder / kept.FILE).unlink()
    anew = RunRecord.read(folder)
    assert [event.step for event in later.usual_commits] == [
        event.step for event in anew.usual_commits
    ]
    assert figures(later) == figures(anew)


def test_what_is_announced_while_the_files_are_read_is_not_taken_for_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault's file may be read before the fault is in it, and the groups' files after it."""
    folder = write(plain_run(), tmp_path)
    monkeypatch.setattr(kept.time, "time", lambda: START + 50.0)
    usual_commits = RunRecord.read(folder).usual_commits
    assert usual_commits
    assert max(event.step for event in usual_commits) < 50


def test_a_planted_record_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 4 GiB, by another writer of the folder, ended `check`."""
    run = plain_run()
    run.finish()
    folder = write(run, tmp_path)
    kept.keep(folder)
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", (folder / kept.FILE).stat().st_size)
    assert kept._load(folder) is not None
    head = kept._head()
    for start in (b"", head, (folder / kept.FILE).read_bytes()):
        (folder / kept.FILE).write_bytes(start)
        os.truncate(folder / kept.FILE, 1 << 30)
        tracemalloc.start()
        assert kept._load(folder) is None
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20
        assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))
        assert (folder / kept.FILE).stat().st_size < 1 << 30


def test_a_record_that_has_its_full_size_stays_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than a reader takes, it would be made anew at each look at the run."""
    run = plain_run()
    folder = write(run, tmp_path)
    kept.keep(folder)
    full = (folder / kept.FILE).read_bytes()
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", len(full))
    run.steps(NUM_STEPS)
    run.finish()
    write(run, tmp_path)
    kept.keep(folder)
    assert (folder / kept.FILE).read_bytes() == full
    assert kept._load(folder) is not None
    assert figures(RunRecord.read(folder)) == figures(RunRecord.read(folder, whole=True))
