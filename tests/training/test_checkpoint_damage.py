# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Damaged checkpoints: the job resumes from the latest sound one, and names the skipped ones."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_run import EXPORT, Exporter, Ranks, Run, assert_equal, write_as_earlier
from titan_ft.host import cpu

cpu.prepare()

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config import Checkpoint  # noqa: E402

from titan_ft.config import ConfigError  # noqa: E402
from titan_ft.training.checkpoint import choice as checkpoint_choice  # noqa: E402
from titan_ft.training.checkpoint import damage as checkpoint_damage  # noqa: E402
from titan_ft.training.checkpoint.choice import (  # noqa: E402
    LoadError,
    LoadRequest,
    NoCheckpointError,
    agree_on_step,
    read_on_all_ranks,
)
from titan_ft.training.checkpoint.damage import NOTES, find_defect  # noqa: E402
from titan_ft.training.checkpoint.folder import INDEX, MANIFEST, Manifest, complete_steps  # noqa: E402
from titan_ft.training.checkpoint.reader import CheckpointReader  # noqa: E402

Damage = Callable[[Path], None]
MakeRun = Callable[..., Run]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def data_of(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


def change_data(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: rewrite(data_of(folder), change)


def change_table(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: rewrite(folder / ".metadata", change)


def change_manifest(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: rewrite(folder / MANIFEST, change)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def change_index(act: Callable[[Any], object]) -> Damage:
    """Change the loaded table, and write it again."""

    def damage(folder: Path) -> None:
        table = FileSystemReader(folder).read_metadata()
        act(table)
        (folder / ".metadata").write_bytes(pickle.dumps(table))

    return damage


SHOWN_BY_TABLES: dict[str, tuple[Damage, str]] = {
    "data cut": (change_data(lambda data: data[: len(data) // 2]), "__0_0.distcp has"),
    "data cut by a byte": (change_data(lambda data: data[:-1]), "__0_0.distcp has"),
    "data empty": (change_data(lambda data: b""), "__0_0.distcp has 0 of"),
    "data missing": (lambda folder: data_of(folder).unlink(), "__0_0.distcp is missing"),
    "table cut": (change_table(lambda data: data[: len(data) // 2]), ".metadata cannot be read"),
    "table empty": (change_table(lambda data: b""), ".metadata cannot be read"),
    "table zeroed": (change_table(lambda data: bytes(len(data))), ".metadata cannot be read"),
    "table garbage": (change_table(lambda data: b"garbage" * 100), ".metadata cannot be read"),
    "table of another kind": (
        change_table(lambda data: pickle.dumps({})),
        ".metadata cannot be read",
    ),
    "table is a folder": (lambda folder: become_folder(folder / ".metadata"), ".metadata is"),
    "table missing": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "table without places": (
        change_index(lambda table: setattr(table, "storage_data", None)),
        ".metadata cannot be",
    ),
    "a place of no file": (
        change_index(
            lambda table: [delattr(item, "relative_path") for item in table.storage_data.values()]
        ),
        ".metadata cannot be read",
    ),
    "data is a folder": (lambda folder: become_folder(data_of(folder)), "__0_0.distcp is a folder"),
    "manifest is a folder": (
        lambda folder: become_folder(folder / MANIFEST),
        f"{MANIFEST} is a folder",
    ),
    "manifest missing": (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "manifest and table missing": (
        lambda folder: [(folder / name).unlink() for name in (MANIFEST, ".metadata")],
        ".metadata is missing",
    ),
    "manifest with another lineage": (
        change_manifest(lambda data: data.replace(b'"lineage": "0', b'"lineage": "p')),
        f"{MANIFEST} is no manifest",
    ),
    "manifest cut": (change_manifest(lambda data: data[:20]), f"{MANIFEST} is no manifest"),
    "manifest empty": (change_manifest(lambda data: b""), f"{MANIFEST} is no manifest"),
    "manifest of bytes": (change_manifest(lambda data: b"\xff\xfe"), f"{MANIFEST} is no manifest"),
    "manifest a list": (change_manifest(lambda data: b"[1]"), f"{MANIFEST} is no manifest"),
    "manifest without fields": (change_manifest(lambda data: b"{}"), f"{MANIFEST} is no manifest"),
    "manifest of another type": (
        change_manifest(lambda data: data.replace(b'"num_shards": 2', b'"num_shards": "2"')),
        f"{MANIFEST} is no manifest",
    ),
}


@pytest.mark.parametrize("by_earlier", [False, True], ids=["", "earlier version"])
@pytest.mark.parametrize("name", SHOWN_BY_TABLES)
def test_damage_that_tables_show_costs_no_start(
    make_run: MakeRun, name: str, by_earlier: bool
) -> None:
    """The older checkpoint is chosen before any is announced to the other groups; an event names
    both.
    """
    damage, reason = SHOWN_BY_TABLES[name]
    if reason.startswith(".metadata cannot") and not by_earlier:
        reason = ".metadata is not what was written"
    run = make_run().train(5)
    expected = run.values()
    run.train(10)
    if by_earlier:
        write_as_earlier(run.folder / "step-10")
    damage(run.folder / "step-10")
    for slot in (0, 1):
        other = make_run(slot=slot)
        assert other.load()
        assert other.claimed == 5
        assert_equal(other.values(), expected)
        (skipped,) = other.events.named("checkpoint_skipped")
        assert (skipped["step"], skipped["instead"]) == (10, 5)
        assert reason in skipped["reason"]


def flips(data: bytes, every: int = 1) -> Iterator[bytes]:
    """Yield copies of `data` with one flipped bit each, one of `every` so many bytes."""
    for place in range(0, len(data), every):
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


@pytest.mark.parametrize("name", [".metadata", MANIFEST])
def test_a_flipped_bit_in_a_table_is_damage(make_run: MakeRun, name: str) -> None:
    """It ended the job as another model's, was loaded with new data, or stopped each start without
    a note.
    """
    run = make_run().train(5)
    folder = run.folder / "step-5"
    before = (folder / name).read_bytes()
    manifest = Manifest.read(folder)
    for flipped in flips(before, every=1 if name == MANIFEST else 7):
        (folder / name).write_bytes(flipped)
        if not find_defect(folder):
            # Only the name of the digest itself is without one, and then all else is as it was.
            assert name == MANIFEST
            assert Manifest.read(folder) == manifest
            assert b'"sha256"' not in flipped
    (folder / name).write_bytes(before)
    assert find_defect(folder) == ""


def test_a_flipped_bit_in_an_earlier_versions_table_never_stops_the_search(
    make_run: MakeRun,
) -> None:
    """Whatever reading it raises is a defect, or none: the search goes on to the older ones."""
    run = make_run().train(5)
    folder = run.folder / "step-5"
    write_as_earlier(folder)
    before = (folder / ".metadata").read_bytes()
    defects = set()
    for flipped in flips(before, every=25):
        (folder / ".metadata").write_bytes(flipped)
        defects.add(find_defect(folder))
    assert len(defects) > 10


def test_a_flipped_bit_in_the_index_of_an_export_is_damage(make_run: MakeRun) -> None:
    """Its table has a digest as DCP's has."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    run.checkpoints.save(6, last_step=True)
    folder = run.folder / "step-6"
    assert find_defect(folder) == ""
    rewrite(folder / INDEX, lambda data: data.replace(b"model.weight", b"model.weighu"))
    assert find_defect(folder) == f"{INDEX} is not what was written (its digest is another one)"


@pytest.mark.parametrize(
    "error", [pickle.UnpicklingError("invalid load key"), AttributeError("no attribute 'size'")]
)
def test_a_table_that_breaks_the_plan_of_a_load_is_damage(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It counted as another model's, which ends the job."""
    make_run().train(10)
    other = make_run()

    def break_plan(*_: Any) -> None:
        raise error

    monkeypatch.setattr(
        "torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.create_local_plan",
        break_plan,
    )
    with pytest.raises(LoadError, match=r"step-10 is damaged: .*goes on from step 5"):
        other.load()


def test_a_folder_that_has_lost_its_tables_is_not_begun_anew(make_run: MakeRun) -> None:
    """Before, the folder was skipped silently, and training began at step 0."""
    run = make_run().train(5)
    for name in (MANIFEST, ".metadata"):
        (run.folder / "step-5" / name).unlink()
    with pytest.raises(
        ConfigError, match=r"must hold a training state .*got step 5 \(\.metadata is missing\)"
    ):
        make_run().load()


def test_a_group_that_heals_does_not_speak_of_damage(make_run: MakeRun) -> None:
    """It loads nothing, so it passes nothing over."""
    run = make_run().train(10)
    rewrite(data_of(run.folder / "step-10"), lambda data: b"")
    joiner = make_run(slot=1)
    joiner.heals = True
    assert not joiner.load()
    assert joiner.claimed == 5
    assert joiner.events.told == []


def weight_in(data: bytes, run: Run) -> int:
    """Return where the bytes of the model's weight are in a file."""
    place = data.index(run.model.weight.detach().numpy().tobytes())
    assert place > 0
    return place


def _flip(run: Run) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = weight_in(data, run) + 5
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]

    return change


def _zero(run: Run) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = weight_in(data, run)
        return data[:place] + bytes(16) + data[place + 16 :]

    return change


def _flip_counter(run: Run) -> Callable[[bytes], bytes]:
    """Change the number of tokens, which DCP has pickled."""
    tokens = run.progress.ntokens_seen
    return lambda data: data.replace(
        b"M" + tokens.to_bytes(2, "little"), b"M" + (tokens + 1).to_bytes(2, "little")
    )


def _flip_ledger(run: Run) -> Callable[[bytes], bytes]:
    """Change the place in the data that lies in a loader's state."""
    place = re.compile(rb"(place.{2,3}K)\x0a", re.DOTALL)
    return lambda data: place.sub(lambda found: found[1] + b"\x0b", data)


def _forge(run: Run) -> Callable[[bytes], bytes]:
    return lambda data: bytes(len(data))


FOUND_BY_THE_LOAD: dict[str, tuple[Callable[[Run], Callable[[bytes], bytes]], str]] = {
    "a flipped bit": (_flip, "the model in it is not what was saved"),
    "a zeroed block": (_zero, "the model in it is not what was saved"),
    "a counter": (_flip_counter, "the train_state in it is not what was saved"),
    "a place in the data": (_flip_ledger, "the dataloader in it is not what was saved"),
    "all zeroed": (_forge, ""),
}


@pytest.mark.parametrize("name", FOUND_BY_THE_LOAD)
def test_damage_that_a_load_finds_is_passed_over_by_the_next_start(
    make_run: MakeRun, name: str
) -> None:
    """Of every group: the step was announced already, so this start takes no other one, and leaves
    a note.
    """
    make, reason = FOUND_BY_THE_LOAD[name]
    run = make_run().train(5)
    expected = run.values()
    run.train(10)
    data = data_of(run.folder / "step-10")
    before = data.read_bytes()
    rewrite(data, make(run))
    assert data.read_bytes() != before
    other = make_run()
    with pytest.raises(LoadError) as raised:
        other.load()
    assert raised.value.restart
    text = str(raised.value)
    assert other.loaded == []
    assert "\n" not in text
    for part in (
        "step-10 is damaged",
        reason,
        "goes on from step 5, unless the group heals",
        "checkpoint.load_step",
    ):
        assert part in text
    for slot in (0, 1):
        again = make_run(slot=slot)
        assert again.load()
        assert again.claimed == 5
        assert_equal(again.values(), expected)
        (skipped,) = again.events.named("checkpoint_skipped")
        assert (skipped["step"], skipped["instead"]) == (10, 5)
        assert reason in skipped["reason"]
        assert "group-0 could not load it" in skipped["reason"]
    for note in (run.folder / "step-10").glob(NOTES):
        note.unlink()  # as the line says; once the bytes are mended
    data.write_bytes(before)
    mended = make_run()
    assert mended.load()
    assert mended.progress.step == 10


def test_a_note_does_not_hold_for_the_checkpoint_that_comes_in_its_place(make_run: MakeRun) -> None:
    """The job saves the step again, and the new checkpoint is sound. A late note refers to the
    former one.
    """
    run = make_run().train(10)
    rewrite(data_of(run.folder / "step-10"), _flip(run))
    with pytest.raises(LoadError):
        make_run().load()
    (note,) = (run.folder / "step-10").glob(NOTES)
    text = note.read_text()
    again = make_run()
    assert again.load()
    again.train(10)
    assert list((run.folder / "step-10").glob(NOTES)) == []
    (run.folder / "step-10" / note.name).write_text(text)
    last = make_run()
    assert last.load()
    assert last.progress.step == 10


@pytest.mark.parametrize("found_by", ["tables", "load"])
def test_without_a_sound_one_the_job_ends_with_one_line(make_run: MakeRun, found_by: str) -> None:
    """It neither starts over, nor restarts again and again."""
    run = make_run().train(10)
    rewrite(data_of(run.folder / "step-5"), lambda data: data[:-1])
    rewrite(
        data_of(run.folder / "step-10"),
        _flip(run) if found_by == "load" else lambda data: data[:-1],
    )
    if found_by == "load":
        with pytest.raises(LoadError, match=r"step-10 is damaged: .*no sound one is left"):
            make_run().load()
    with pytest.raises(ConfigError) as raised:
        make_run().load()
    text = str(raised.value)
    assert "\n" not in text
    for part in (str(run.folder), "step 10 (", "step 5 (__0_0.distcp has", "checkpoint.folder"):
        assert part in text


@pytest.mark.parametrize("found_by", ["tables", "load"])
def test_the_checkpoint_that_was_asked_for_is_not_replaced_by_another(
    make_run: MakeRun, found_by: str
) -> None:
    """checkpoint.load_step = 10: it is refused, and the sound ones are named."""
    run = make_run().train(15)
    rewrite(
        data_of(run.folder / "step-10"),
        lambda data: bytes(len(data)) if found_by == "load" else data[:-1],
    )
    if found_by == "load":
        with pytest.raises(
            LoadError, match=r"step-10 is damaged: .*load_step = 10 allows no other one"
        ):
            make_run(load_step=10).load()
    other = make_run(load_step=10)
    with pytest.raises(
        ConfigError, match=r"checkpoint\.load_step must name a sound .*got 10.*ones are 5, 15$"
    ):
        other.load()
    assert other.loaded == []


@pytest.mark.parametrize("step", [-1, 10, 99])
def test_a_group_that_comes_back_needs_no_checkpoint(make_run: MakeRun, step: int) -> None:
    """The disk was damaged while the job trained: that must not end the group that is started
    again, nor the run.
    """
    run = make_run().train(10)
    for path in run.folder.iterdir():
        rewrite(data_of(path), lambda data: data[:-1])
    joiner = make_run(slot=1, load_step=step)
    joiner.heals = True
    assert not joiner.load()
    assert joiner.claimed == 0
    with pytest.raises(ConfigError):
        make_run(load_step=step).load()  # nobody trains


def test_a_group_whose_load_fails_alone_heals_from_the_others(make_run: MakeRun) -> None:
    """Its memory may be bad. Without another checkpoint it must not end for good while the others
    train.
    """
    run = make_run().train(5)
    rewrite(data_of(run.folder / "step-5"), _flip(run))
    with pytest.raises(LoadError) as raised:
        make_run().load()
    assert raised.value.restart
    again = make_run()
    again.heals = True
    assert not again.load()


def test_what_stock_torchtitan_has_saved_is_looked_through_too(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """It has no manifest; DCP's table gives the lengths of its files."""
    run = make_run()
    stock = CheckpointManager(
        dataloader=None,
        model_parts=[run.model],
        optimizers=run.optimizers,
        lr_schedulers=run.schedulers,
        states={"train_state": run.progress},
        checkpoint_config=Checkpoint(enable=True, interval=1, last_save_model_only=False),
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    stock.states.pop("dataloader")
    for step in (1, 2):
        run.step()
        stock.save(step)
    rewrite(data_of(run.folder / "step-2"), lambda data: data[:-1])
    other = make_run()
    assert other.load()
    assert other.progress.step == 1
    (skipped,) = other.events.named("checkpoint_skipped")
    assert (skipped["step"], skipped["instead"]) == (2, 1)


@pytest.mark.parametrize("last", [{"last_save_model_only": True}, EXPORT])
def test_a_model_without_a_manifest_is_passed_over(make_run: MakeRun, last: dict[str, Any]) -> None:
    """As stock torchtitan's last save, which is of the model only too: the load ended the job."""
    run = make_run(adapter=Exporter(), **last).train(5)
    expected = run.values()
    run.train(7)
    run.checkpoints.save(7, last_step=True)
    (run.folder / "step-7" / MANIFEST).unlink()
    other = make_run()
    assert other.load()
    assert_equal(other.values(), expected)


def test_a_seed_checkpoint_is_what_a_job_begins_with(make_run: MakeRun) -> None:
    """torchtitan's `step-0` is of the model only. A damaged later step is no reason not to begin
    there.
    """
    run = make_run().train(5)
    dcp.save(run.model.state_dict(), checkpoint_id=str(run.folder / "step-0"))
    (run.folder / "step-5" / MANIFEST).write_text("{")
    choice = agree_on_step(LoadRequest(str(run.folder), find_defect), 0, lambda value: [value])
    assert choice.step == 0
    assert [*choice.damaged] == [5]


def test_more_bytes_than_the_table_names_are_no_damage(make_run: MakeRun) -> None:
    """DCP reads by place and length."""
    run = make_run().train(10)
    rewrite(data_of(run.folder / "step-10"), lambda data: data + b"more")
    other = make_run()
    assert other.load()
    assert other.progress.step == 10
    assert other.events.named("checkpoint_skipped") == []


def test_other_settings_are_no_damage(make_run: MakeRun) -> None:
    """A checkpoint without a key of this run's optimizer is refused, and left unchanged for
    others.
    """
    run = make_run().train(5)
    del run.checkpoints.states["optimizer"]
    run.train(10)
    with pytest.raises(ConfigError, match="Missing key in checkpoint state_dict: optimizer"):
        make_run().load()
    assert list(run.folder.glob(f"*/{NOTES}")) == []


def test_other_ranks_and_parts_are_not_compared(make_run: MakeRun) -> None:
    """A digest is of the ranks' shards; of the parts that are not loaded there is none."""
    run = make_run().train(5)
    names = json.loads((run.folder / "step-5" / MANIFEST).read_text())["digests"]
    digests = dict.fromkeys(names, f"{1:012x}{2:012x}")  # of another layout
    write_as_earlier(run.folder / "step-5", digests=digests)
    assert make_run().load()
    run.train(10)
    assert make_run(exclude_from_loading=["optimizer", "dataloader"]).load()
    assert make_run(slots=3).load()


@pytest.mark.parametrize("counter", ["step", "lineage"])
def test_counters_are_compared_with_the_manifest_for_any_number_of_ranks(
    make_run: MakeRun, counter: str
) -> None:
    """Also where the digest is of another layout."""
    run = make_run().train(10)
    value = {"step": 9, "lineage": "0" * 12}[counter]
    write_as_earlier(run.folder / "step-10", digests={}, **{counter: value})
    with pytest.raises(LoadError, match=f"the {counter} in it is "):
        make_run().load()


# File systems


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "step-10")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_server_that_is_away_for_a_moment_is_no_damage(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The newest one is loaded when it answers."""
    make_run().train(10)
    looks, read = itertools.count(), CheckpointReader.read_metadata

    def fail_at_first(reader: CheckpointReader, *args: Any, **more: Any) -> Any:
        if next(looks) < 5:
            raise _error(number)
        return read(reader, *args, **more)

    monkeypatch.setattr(CheckpointReader, "read_metadata", fail_at_first)
    other = make_run()
    assert other.load()
    assert other.progress.step == 10
    assert other.events.named("checkpoint_skipped") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_stays_unreadable_is_passed_over(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """For this start: it may be sound, so nothing is noted."""
    run = make_run().train(10)
    read = CheckpointReader.read_metadata

    def fail(reader: CheckpointReader, *args: Any, **more: Any) -> Any:
        if "step-10" in str(reader.path):
            raise _error(number)
        return read(reader, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointReader, "read_metadata", fail)
        patch.setattr(checkpoint_choice, "_MAX_STALE_SECONDS", 0.3)
        other = make_run()
        assert other.load()
    assert other.progress.step == 5
    (skipped,) = other.events.named("checkpoint_skipped")
    assert f"it cannot be read ({_error(number)})" in skipped["reason"]
    assert make_run().load()
    assert list(run.folder.glob(f"*/{NOTES}")) == []


def test_one_glance_does_not_make_damage(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group replaces the checkpoint during the inspection: the first look sees half of the
    files.
    """
    make_run().train(10)
    looks = itertools.count()

    def look(folder: Path) -> str:
        return "__0_0.distcp is missing" if next(looks) == 0 else find_defect(folder)

    monkeypatch.setattr("titan_ft.training.checkpoint.manager.find_defect", look)
    other = make_run()
    assert other.load()
    assert other.progress.step == 10


def test_loads_that_fail_for_the_file_system_are_tried_again_but_not_for_ever(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may be away for a moment. Three starts that could not read the data have an older
    one loaded.
    """
    make_run().train(10)

    def fail(*_: Any) -> None:
        raise _error(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", fail)
        for _ in range(3):
            with pytest.raises(
                LoadError, match=r"step-10 cannot be read: .*Input/output error"
            ) as raised:
                make_run().load()
            assert raised.value.restart
            assert "damaged" not in str(raised.value)
    other = make_run()
    assert other.load()
    assert other.progress.step == 5
    (skipped,) = other.events.named("checkpoint_skipped")
    assert "Input/output error" in skipped["reason"]


def test_a_file_without_permission_is_passed_over_at_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a minute nor a hundred starts give the permission; the reason is in the event."""
    make_run().train(10)

    def fail(*_: Any) -> None:
        raise _error(errno.EACCES)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", fail)
        with pytest.raises(LoadError, match=r"step-10 is damaged: .*Permission denied"):
            make_run().load()
    other = make_run()
    assert other.load()
    (skipped,) = other.events.named("checkpoint_skipped")
    assert "Permission denied" in skipped["reason"]


def test_a_file_that_vanishes_in_the_load_is_damage_if_it_stays_away(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To DCP that is an error of the file system; the tables tell."""
    run = make_run().train(10)
    other = make_run()
    monkeypatch.setattr(
        other, "join_before_load", lambda _: data_of(run.folder / "step-10").unlink() and False
    )
    with pytest.raises(LoadError, match=r"step-10 is damaged: __0_0\.distcp is missing; .* step 5"):
        other.load()


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_called_damaged(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are of two saves. The next start finds the new one, which has no note."""
    run = make_run().train(10)
    other = make_run()

    def replace_and_fail(*_: Any) -> None:
        run.position.set_step(11)
        run.checkpoints.save(10, last_step=True)
        raise RuntimeError("PytorchStreamReader failed reading zip archive")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", replace_and_fail)
        with pytest.raises(LoadError, match=r"step-10 was replaced while it was loaded"):
            other.load()
    last = make_run()
    assert last.load()
    assert last.progress.step == 10


def test_a_folder_that_is_for_reading_only_gets_no_note(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would choose the same one again: the line says what to set."""
    run = make_run().train(10)
    rewrite(data_of(run.folder / "step-10"), _flip(run))

    def refuse(*_: Any) -> None:
        raise _error(errno.EROFS)

    monkeypatch.setattr(checkpoint_damage.FailedLoad, "write", refuse)
    with pytest.raises(ConfigError, match=r"got a damaged one .*set checkpoint\.load_step = 5"):
        make_run().load()


def test_a_folder_that_will_never_do_is_refused_at_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred starts would not make a folder of a file, nor give a permission."""
    run = make_run()
    run.folder.write_text("no folder")
    with pytest.raises(
        ConfigError, match=rf"checkpoint\.folder must be a folder, got the file {run.folder}; give"
    ):
        run.load()
    run.folder.unlink()
    run.train(5)

    def fail(_: str) -> list[int]:
        raise _error(errno.EACCES)

    monkeypatch.setattr(checkpoint_choice, "complete_steps", fail)
    with pytest.raises(
        ConfigError, match=r"must be a folder that this user may read, got: .*Permission denied"
    ):
        make_run().load()


# Ranks of one group


def test_damage_that_one_rank_finds_ends_all(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks end in the same way, and one note is left."""
    run = make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    monkeypatch.setattr(
        "titan_ft.training.checkpoint.load.Load.check_loaded",
        lambda load, *_: load._gather(0) and ranks.rank is not None and _raise_damage(ranks),
    )
    for error in ranks.load():
        assert isinstance(error, LoadError)
        assert "step-10 is damaged" in str(error)
        assert "step 5" in str(error)
    assert len(list((run.folder / "step-10").glob(NOTES))) == 1
    monkeypatch.undo()
    again = make_run()
    assert again.load()
    assert again.claimed == 5


def _raise_damage(ranks: Ranks) -> None:
    from titan_ft.training.checkpoint.folder import DamagedError

    raise DamagedError(f"the model in it is not what was saved, says rank {ranks.rank}")


def test_what_rank_0_finds_damaged_is_passed_over_by_all(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others load rank 0's choice, whatever they see themselves."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    monkeypatch.setattr(
        "titan_ft.training.checkpoint.manager.find_defect",
        lambda folder: "cut" if folder.name == "step-10" and ranks.rank == 0 else "",
    )
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-5", "step-5"]
    told = [each.events.named("checkpoint_skipped") for each in ranks.runs]
    assert [len(each) for each in told] == [1, 0]


# Models to begin with


def test_a_damaged_model_to_begin_with_is_refused(make_run: MakeRun) -> None:
    """There is no other model: the line names it."""
    run = make_run().train(5)
    source = run.folder / "step-5"
    cut = shutil.copytree(source, run.folder.parent / "cut")
    rewrite(data_of(cut), lambda data: data[:-1])
    flipped = shutil.copytree(source, run.folder.parent / "flipped")
    rewrite(data_of(flipped), _flip(run))
    for path, reason in (
        (cut, "__0_0.distcp has"),
        (flipped, "the model in it is not what was saved"),
    ):
        other = make_run(folder="new", initial_load_path=str(path))
        with pytest.raises(
            ConfigError, match=rf"initial_load_path must be .*{path}.*damaged: {reason}"
        ):
            other.load()


def test_a_damaged_model_of_hugging_faces_format_is_refused(make_run: MakeRun) -> None:
    """The file is named, in place of what its parser says."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    run.checkpoints.save(6, last_step=True)
    folder = run.folder / "step-6"
    (path,) = folder.glob("*.safetensors")
    settings = {
        "initial_load_in_hf": True,
        "initial_load_model_only": True,
        "initial_load_path": str(folder),
    }
    for change in (
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: bytes(len(data)),
    ):
        before = path.read_bytes()
        rewrite(path, change)
        with pytest.raises(ConfigError, match=rf"{path.name} has "):
            make_run(folder="new", adapter=Exporter(), **settings).load()
        path.write_bytes(before)
    assert make_run(folder="new", adapter=Exporter(), **settings).load()


# What is written is read back


def test_a_save_that_cannot_be_read_back_is_not_published(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report a write error to no process."""
    run = make_run().train(5)
    finish = FileSystemWriter.finish

    def cut(writer: FileSystemWriter, **more: Any) -> None:
        finish(writer, **more)
        rewrite(data_of(Path(writer.path)), lambda data: data[:-1])

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", cut)
        run.train(10)
    (failed,) = run.events.named("checkpoint_failed")
    assert "cannot be read back: __0_0.distcp has" in failed["error"]
    assert run.names() == ["step-5"]
    assert complete_steps(run.folder) == [5]
    run.train(15)
    assert complete_steps(run.folder) == [5, 15]


def classes_raised(errors: list[Exception | None]) -> list[type[Exception] | None]:
    """Return what each rank raises if reading fails on the ranks by these errors."""
    sent: list[int] = []

    def run(rank: int, gather: Callable[[int], list[int]]) -> type[Exception] | None:
        def act() -> None:
            error = errors[rank]
            if error is not None:
                raise error

        try:
            read_on_all_ranks(act, "folder", gather)
        except Exception as raised:  # noqa: BLE001
            return type(raised)
        return None

    def note(value: int) -> list[int]:
        sent.append(value)
        return [value]

    for rank in range(len(errors)):
        run(rank, note)
    return [run(rank, lambda value: sent) for rank in range(len(errors))]


@pytest.mark.parametrize("other", [OSError("gone"), ConfigError("wrong")])
def test_all_ranks_of_a_group_say_that_there_is_no_checkpoint_or_none_does(
    other: Exception,
) -> None:
    """After NoCheckpointError a rank asks for a heal, with its group. Alone it would wait there."""
    missing = NoCheckpointError("a link")
    assert classes_raised([None, missing, None]) == [NoCheckpointError] * 3
    expected = ConfigError if isinstance(other, ConfigError) else LoadError
    for errors in ([missing, other, None], [other, missing, None], [None, missing, other]):
        assert classes_raised(errors) == [expected] * 3
