# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Saves without room: they report it, and leave no remains that take the room of the next save."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint_run import EXPORT, Exporter, Run
from titan_ft.host import cpu

cpu.prepare()

from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter  # noqa: E402

from titan_ft.training.checkpoint import save as checkpoint_save  # noqa: E402
from titan_ft.training.checkpoint.folder import Manifest, complete_steps  # noqa: E402
from titan_ft.training.checkpoint.save import ElsewhereError, PartError, agree_on_reason  # noqa: E402

MakeRun = Callable[..., Run]


def fail_half(writer: FileSystemWriter, *_: Any) -> None:
    """Write a part of the data, as a disk does that becomes full."""
    (Path(writer.path) / "__0_0.distcp").write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_in_torch(writer: FileSystemWriter, *_: Any) -> None:
    """Fail as torch's zip writer does on a full disk: the cause does not arrive."""
    (Path(writer.path) / "__0_0.distcp").write_bytes(b"half")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def refuse(number: int) -> Callable[..., None]:
    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_a_failed_save_has_written_is_removed_at_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It would keep the disk full, so that all later saves failed."""
    run = make_run(async_mode=mode).train(4)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fail_half)
        run.train(5)
        run.settle()
        run.train(6)
    assert run.names() == []
    (failed,) = run.events.named("checkpoint_failed")
    assert failed["error"] == "the disk is full (No space left on device)"
    run.train(10)
    run.settle()
    run.train(11)
    assert run.names() == ["step-10"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full (No space left on device)"),
        (errno.EDQUOT, "the disk is full (Disk quota exceeded)"),
        (errno.EIO, "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        (0, "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
    ],
)
def test_the_file_system_is_asked_for_what_torch_does_not_say(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    """Its zip writer speaks of positions; another reason is left as it is."""
    run = make_run().train(4)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail_in_torch)
    if number:
        monkeypatch.setattr(checkpoint_save.os, "fsync", refuse(number))
    run.train(5)
    (failed,) = run.events.named("checkpoint_failed")
    assert failed["error"] == said
    assert run.names() == []


def test_a_manifest_that_finds_no_room_fails_the_save(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data had just enough: nothing is published, and nothing left."""
    run = make_run().train(5)

    def write(_: Manifest, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", write)
        run.train(10)
    (failed,) = run.events.named("checkpoint_failed")
    assert (failed["error"], failed["latest"]) == ("the disk is full (No space left on device)", 5)
    assert run.names() == ["step-5"]


def test_the_last_save_is_tried_in_another_way_with_all_room_there_is(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an export is gone before the whole training state is written."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    write, seen = FileSystemWriter.write_data, []

    def look_and_write(writer: FileSystemWriter, *args: Any) -> Any:
        seen.append([path.name for path in Path(writer.path).rglob("*.distcp")])
        return write(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", look_and_write)
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail_half)
    run.checkpoints.save(6, last_step=True)
    assert seen == [[]]
    assert run.names() == ["step-5", "step-6"]
    assert [path.name for path in (run.folder / "step-6").rglob("sharded")] == []


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([None, OSError("full")], ["full (rank 1)", "full"]),
        ([OSError("one"), OSError("another")], ["one", "one"]),
        ([ElsewhereError(), OSError("another")], ["another (rank 1)", "another"]),
        (
            [ElsewhereError(), PartError(str(ElsewhereError()))],
            [f"{ElsewhereError()} (rank 1)", str(ElsewhereError())],
        ),
        ([None, ElsewhereError()], [str(ElsewhereError())] * 2),
    ],
)
def test_all_ranks_tell_the_same_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, errors: list[Exception | None], told: list[str]
) -> None:
    """The reason of the first rank that has one: each rank's line may be the shown one."""
    given: list[str] = []

    def collect(_: list[str], own: str) -> None:
        given.append(own)

    def gather(every: list[str], _: str) -> None:
        every[:] = given

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for answer in (collect, gather):
        monkeypatch.setattr(dist, "all_gather_object", answer)
        said = []
        for rank, error in enumerate(errors):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            said.append(agree_on_reason(error, tmp_path))
    assert said == told


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_real_disk_that_is_full(make_run: MakeRun, small_disk: Path, mode: str) -> None:
    """One checkpoint fits and two do not: each save reports it, the first one stays, and freed room
    is used.
    """
    run = make_run(folder=str(small_disk / "checkpoints"), async_mode=mode)
    run.model.extra = torch.nn.Parameter(torch.zeros(600_000))  # 2.4 MB
    run.checkpoints.states["model"].cache_state_dict = dict(run.model.state_dict())
    run.train(5)
    run.settle()
    run.train(10)
    run.settle()
    run.train(11)
    assert run.names() == ["step-5"]
    (failed,) = run.events.named("checkpoint_failed")
    assert (failed["step"], failed["latest"]) == (10, 5)
    assert failed["error"] == "the disk is full (No space left on device)"
    for path in sorted((run.folder / "step-5").iterdir()):
        path.unlink()
    (run.folder / "step-5").rmdir()
    run.train(15)
    run.settle()
    run.train(16)
    assert run.names() == ["step-15"]


# What a group left that died


@pytest.mark.parametrize("heals", [False, True])
def test_a_start_removes_what_its_group_left(make_run: MakeRun, heals: bool) -> None:
    """Of any step. What another group is writing stays."""
    run = make_run().train(5)
    for name in (
        "partial-3-group-0",
        "partial-10-group-0",
        "partial-10-group-0-replaced",
        "partial-10-group-1",
    ):
        (run.folder / name / "sharded").mkdir(parents=True)
    again = make_run()
    again.heals = heals
    again.load()
    again.wait_for_purge()
    assert again.names() == ["partial-10-group-1", "step-5"]


def test_a_job_that_only_loads_removes_nothing(make_run: MakeRun) -> None:
    """The folder is another job's, which may be writing."""
    run = make_run().train(5)
    (run.folder / "partial-10-group-0").mkdir()
    assert make_run(load_only=True).load()
    assert run.names() == ["partial-10-group-0", "step-5"]


def test_a_save_under_way_is_not_taken_for_what_was_left(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group publishes, however much later, while this one still writes."""
    run, other = make_run(async_mode="async"), make_run(slot=1)
    go_on, write = threading.Event(), FileSystemWriter.write_data

    def write_late(writer: FileSystemWriter, *args: Any) -> Any:
        assert "group-0" not in str(writer.path) or go_on.wait(60)
        return write(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    run.train(5)
    other.position.set_step(7)
    other.checkpoints.save(7, last_step=True)
    other.wait_for_purge()
    assert other.names() == ["partial-5-group-0", "step-7"]
    go_on.set()
    run.settle()
    assert complete_steps(run.folder) == [5, 7]
