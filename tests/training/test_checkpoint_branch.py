# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""checkpoint.load_step: where a job begins and resumes, and the fate of the steps that it
abandons.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint_run import Run, assert_equal
from titan_ft.config import ConfigError
from titan_ft.training.checkpoint import folder as checkpoint_folder
from titan_ft.training.checkpoint.folder import MANIFEST, Manifest, complete_steps, publish

MakeRun = Callable[..., Run]


def begin(make_run: MakeRun, **settings: object) -> Run:
    """Start a group and load, as the trainer does."""
    run = make_run(**settings)
    run.heals = False
    run.load()
    run.position.set_step(run.progress.step)
    return run


def test_a_job_begins_at_load_step_once(make_run: MakeRun) -> None:
    """Both groups die at 18 with 15 saved: they go on from there, and not from 10 again."""
    make_run(job_id="first").train(20)
    branch = {"job_id": "second", "load_step": 10}
    run = begin(make_run, **branch)
    assert run.progress.step == 10
    run.train(15)
    expected = run.values()
    run.train(18)
    for slot in (0, 1):
        assert_equal(begin(make_run, slot=slot, **branch).values(), expected)


def test_a_job_without_a_name_says_that_it_goes_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job started by hand may or may not be the same one; the line gives the remedy if it
    is not.
    """
    said: list[str] = []
    monkeypatch.setattr(
        "titan_ft.training.checkpoint.manager.logger.warning",
        lambda text, *values: said.append(text % values),
    )
    make_run(job_id="first").train(10)
    begin(make_run, load_step=5).train(10)
    assert not any("load_step" in line for line in said)
    assert begin(make_run, load_step=5).progress.step == 10
    (line,) = [line for line in said if "load_step" in line]
    for part in (
        "checkpoint.load_step = 5 counts no longer",
        "job_id = ''",
        "step 10",
        "another name",
    ):
        assert part in line


def test_a_job_that_dies_before_its_first_save_begins_at_load_step_again(make_run: MakeRun) -> None:
    """Later steps in the folder are of the branch that the user has turned away from."""
    make_run(job_id="first").train(20)
    branch = {"job_id": "second", "load_step": 10}
    begin(make_run, **branch).train(13)
    assert begin(make_run, **branch).progress.step == 10
    assert complete_steps(make_run().folder) == [5, 10, 15, 20]


def test_another_launch_with_load_step_goes_back_again(make_run: MakeRun) -> None:
    """It is another job, and its user has asked for it."""
    make_run(job_id="first").train(20)
    begin(make_run, job_id="second", load_step=10).train(15)
    third = begin(make_run, job_id="third", load_step=10)
    assert third.progress.step == 10
    assert begin(make_run, job_id="second", load_step=5).progress.step == 5


def test_a_requeued_array_of_slurm_is_the_same_job(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fault_tolerance.job_id: elements keep their array's number when they are requeued."""
    make_run().train(20)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    begin(make_run, load_step=10).train(16)
    assert begin(make_run, load_step=10).progress.step == 15
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4712")
    assert begin(make_run, load_step=10).progress.step == 10


def test_steps_that_a_job_has_turned_away_from_are_set_aside(make_run: MakeRun) -> None:
    """With its first save of its own: nothing is deleted, and the latest is the new branch's from
    then on.
    """
    first = make_run(job_id="first").train(20)
    weights = first.model.weight.detach().clone()
    run = begin(make_run, job_id="second", load_step=10)
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    run.train(15)
    assert run.names() == ["aside-15-0", "aside-20-0", "step-10", "step-15", "step-5"]
    told = {each["folder"] for each in run.events.named("checkpoint_set_aside")}
    assert told == {"aside-15-0", "aside-20-0"}
    later = begin(make_run, job_id="third")
    assert later.progress.step == 15
    assert torch.equal(later.model.weight, run.model.weight)
    # A user who wants the former branch back renames it.
    (run.folder / "aside-20-0").rename(run.folder / "step-20")
    back = begin(make_run, job_id="fourth")
    assert back.progress.step == 20
    assert torch.equal(back.model.weight, weights)


def test_steps_before_the_first_save_of_the_new_branch_are_set_aside(make_run: MakeRun) -> None:
    """If that save is damaged, the next launch went on from step 12 of the branch that was turned
    away from.
    """
    first = make_run(job_id="first").train(12)
    first.checkpoints.save(12, last_step=True)
    run = begin(make_run, job_id="second", load_step=10)
    run.train(15)
    assert run.names() == ["aside-12-0", "step-10", "step-15", "step-5"]
    (run.folder / "step-15" / "__0_0.distcp").write_bytes(b"")
    assert begin(make_run, job_id="third").progress.step == 10


def test_torchtitan_itself_takes_nothing_that_is_set_aside(make_run: MakeRun) -> None:
    """It searches for "step-" and a number anywhere in a name."""
    make_run(job_id="first").train(20)
    run = begin(make_run, job_id="second", load_step=10)
    run.train(15)
    assert run.checkpoints._find_load_step() == 15


def test_a_name_that_is_taken_is_passed_over(make_run: MakeRun) -> None:
    """A user turns away from step 20 twice."""
    make_run(job_id="first").train(20)
    begin(make_run, job_id="second", load_step=15).train(20)
    run = begin(make_run, job_id="third", load_step=15)
    run.train(20)
    assert run.names() == ["aside-20-0", "aside-20-1", "step-10", "step-15", "step-20", "step-5"]


def test_the_new_branch_is_not_purged_before_the_old_one(make_run: MakeRun) -> None:
    """keep_latest_k counts the steps of this branch: the later ones of the other are none of the
    latest.
    """
    make_run(job_id="first").train(30)
    run = begin(make_run, job_id="second", load_step=10, keep_latest_k=2)
    run.train(15)
    assert complete_steps(run.folder) == [10, 15]
    run.train(20)
    assert complete_steps(run.folder) == [15, 20]


def test_damaged_later_steps_do_not_count_for_keep_latest_k(make_run: MakeRun) -> None:
    """A job that went back before them keeps the requested number of sound ones."""
    run = make_run(job_id="first").train(20)
    for step in (15, 20):
        (run.folder / f"step-{step}" / "__0_0.distcp").write_bytes(b"")
    again = begin(make_run, job_id="first", keep_latest_k=2)
    assert again.progress.step == 10
    again.train(12)
    again.checkpoints.save(12, last_step=True)
    assert complete_steps(again.folder) == [10, 12, 15, 20]


def test_a_damaged_step_pushes_out_no_sound_one(make_run: MakeRun) -> None:
    """Of 5, 10, 12 (damaged) and 15 it kept 12 and 15, and deleted the step that the job had gone
    on from.
    """
    run = make_run().train(12)
    run.checkpoints.save(12, last_step=True)
    (run.folder / "step-12" / "__0_0.distcp").write_bytes(b"")
    again = begin(make_run, keep_latest_k=2)
    assert again.progress.step == 10
    again.train(15)
    again.wait_for_purge()
    assert complete_steps(again.folder) == [10, 12, 15]
    again.train(20)
    again.wait_for_purge()
    assert complete_steps(again.folder) == [15, 20]


def test_a_step_that_cannot_be_read_just_now_pushes_out_no_sound_one(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be damaged."""
    run = make_run(keep_latest_k=2).train(10)

    def look(folder: Path) -> str:
        if folder.name == "step-10":
            raise OSError(5, "Input/output error")
        return ""

    monkeypatch.setattr("titan_ft.training.checkpoint.manager.find_defect", look)
    run.train(15)
    run.wait_for_purge()
    assert complete_steps(run.folder) == [5, 10, 15]


def test_a_group_that_comes_back_when_load_step_is_purged_heals(make_run: MakeRun) -> None:
    """The group was refused, and with it the run, although the job's own later steps exist and the
    others train.
    """
    make_run(job_id="first").train(10)
    branch = {"job_id": "second", "load_step": 10, "keep_latest_k": 2}
    run = begin(make_run, **branch)
    run.train(20)
    assert complete_steps(run.folder) == [15, 20]
    joiner = make_run(slot=1, **branch)
    joiner.heals = True
    assert not joiner.load()
    assert joiner.claimed == 20


def test_a_damaged_step_of_the_branch_leaves_the_one_before(make_run: MakeRun) -> None:
    """And finally the job's first step; never one of the other branch."""
    make_run(job_id="first").train(20)
    branch = {"job_id": "second", "load_step": 10}
    run = begin(make_run, **branch)
    run.train(20)
    for step, expected in ((20, 15), (15, 10)):
        (run.folder / f"step-{step}" / "__0_0.distcp").write_bytes(b"")
        again = begin(make_run, **branch)
        assert again.progress.step == expected
        assert {told["instead"] for told in again.events.named("checkpoint_skipped")} == {expected}


@pytest.mark.parametrize("damage", ["manifest cut", "manifest missing", "tables missing"])
def test_a_step_that_has_lost_its_branch_is_not_passed_over_without_a_word(
    make_run: MakeRun, damage: str
) -> None:
    """The step may be this job's own; steps of the other branch are sound and not used."""
    make_run(job_id="first").train(20)
    branch = {"job_id": "second", "load_step": 10}
    run = begin(make_run, **branch)
    run.train(15)
    folder = run.folder / "step-15"
    if damage == "manifest cut":
        (folder / MANIFEST).write_text("{")
    else:
        (folder / MANIFEST).unlink()
    if damage == "tables missing":
        (folder / ".metadata").unlink()
    (run.folder / "aside-20-0").rename(run.folder / "step-20")
    again = begin(make_run, **branch)
    assert again.progress.step == 10
    assert [
        (told["step"], told["instead"]) for told in again.events.named("checkpoint_skipped")
    ] == [(15, 10)]


@pytest.mark.parametrize("initial", ["", "some/model"])
def test_load_step_in_a_new_folder_is_refused(make_run: MakeRun, initial: str) -> None:
    """Before, the run silently trained from random weights."""
    run = make_run(load_step=50, initial_load_path=initial)
    with pytest.raises(
        ConfigError, match=r"load_step must name a complete .*got 50; there are none; leave it out"
    ):
        run.load()
    run.folder.mkdir()
    with pytest.raises(ConfigError, match="got 50; there are none"):
        run.load()


def test_load_step_without_checkpoints_is_refused(make_run: MakeRun) -> None:
    """checkpoint.enable = false would pass over it as silently."""
    with pytest.raises(
        ConfigError, match=r"checkpoint\.load_step needs checkpoint\.enable = true, got 50"
    ):
        make_run(load_step=50, enable=False).load()


# The folder


def read_complete_manifest(step: int, **more: object) -> Manifest:
    return Manifest(step, "0" * 12, "llama3 tiny", "austen", 32, 2, False, **more)  # type: ignore[arg-type]


def write_checkpoint(folder: Path, manifest: Manifest | None) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_text(folder.name)
    if manifest is not None:
        manifest.write(folder)
    return folder


def test_a_slow_save_sets_nothing_of_its_own_job_aside(tmp_path: Path) -> None:
    """Another group has published a later step meanwhile."""
    write_checkpoint(tmp_path / "step-15", read_complete_manifest(15, job_id="a"))
    partial = write_checkpoint(tmp_path / "partial-10-group-0", read_complete_manifest(10))
    assert publish(partial, tmp_path / "step-10", read_complete_manifest(10, job_id="a")) == []
    assert complete_steps(tmp_path) == [10, 15]


@pytest.mark.parametrize("damage", ["", "{"])
def test_later_steps_of_nobody_are_set_aside(tmp_path: Path, damage: str) -> None:
    """Steps of stock torchtitan, or with a damaged manifest: a job that began before them does not
    resume from them.
    """
    later = write_checkpoint(tmp_path / "step-15", None)
    if damage:
        (later / MANIFEST).write_text(damage)
    partial = write_checkpoint(tmp_path / "partial-10-group-0", read_complete_manifest(10))
    assert [
        path.name for path in publish(partial, tmp_path / "step-10", read_complete_manifest(10))
    ] == ["aside-15-0"]
    assert complete_steps(tmp_path) == [10]


def test_a_step_whose_manifest_cannot_be_read_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be this job's own."""
    write_checkpoint(tmp_path / "step-15", read_complete_manifest(15))
    partial = write_checkpoint(tmp_path / "partial-10-group-0", read_complete_manifest(10))
    read = Manifest.read

    def fail(folder: Path) -> Manifest | None:
        if folder.name == "step-15":
            raise OSError(5, "Input/output error")
        return read(folder)

    monkeypatch.setattr(checkpoint_folder.Manifest, "read", fail)
    assert publish(partial, tmp_path / "step-10", read_complete_manifest(10)) == []
    assert complete_steps(tmp_path) == [10, 15]


def test_a_publication_that_fails_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was out of the way already."""
    write_checkpoint(tmp_path / "step-10", read_complete_manifest(10, save_id="former"))
    partial = write_checkpoint(tmp_path / "partial-10-group-0", read_complete_manifest(10))
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == partial:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        publish(partial, tmp_path / "step-10", read_complete_manifest(10))
    found = Manifest.read(tmp_path / "step-10")
    assert found is not None
    assert found.save_id == "former"


def test_the_remains_of_a_deletion_are_in_nobodys_way(make_run: MakeRun) -> None:
    """A purge that was killed left half of step 5, and the job saves step 5 again, and purges
    it.
    """
    run = make_run(keep_latest_k=2).train(5)
    shutil.copytree(run.folder / "step-5", run.folder / "partial-5-purged")
    run.train(15)
    run.checkpoints.close()
    assert complete_steps(run.folder) == [10, 15]
