# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a fault-tolerant run, in one process: writers, times, contents, loads."""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint_run import (
    EXPORT,
    LINEAGE,
    Exporter,
    Gate,
    Ranks,
    Run,
    assert_equal,
    fail,
    loader_state,
    write_as_earlier,
)
from titan_ft.host import cpu

cpu.prepare()

import safetensors.torch  # noqa: E402
from torch.distributed.checkpoint import (  # noqa: E402
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
    _consolidate_hf_safetensors,
)
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config import Checkpoint  # noqa: E402

from titan_ft.config import ConfigError  # noqa: E402
from titan_ft.engine.outer import OuterModel  # noqa: E402
from titan_ft.engine.round_strategy import RoundStrategy  # noqa: E402
from titan_ft.host.hugging_face import MERGING  # noqa: E402
from titan_ft.protocol.ledger import Entry, Ledger  # noqa: E402
from titan_ft.round_settings import OuterOptimizer  # noqa: E402
from titan_ft.training.checkpoint import choice as checkpoint_choice  # noqa: E402
from titan_ft.training.checkpoint.choice import LoadError, NoCheckpointError  # noqa: E402
from titan_ft.training.checkpoint.folder import (  # noqa: E402
    MANIFEST,
    Manifest,
    complete_steps,
    find_writer,
    publish,
)
from titan_ft.training.checkpoint.manager import SaveError, latest_due  # noqa: E402

# What is saved and loaded


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_brings_everything_back(make_run: Callable[..., Run], mode: str) -> None:
    """Model, optimizer, scheduler, counters, ledger and lineage of the saved step, whatever was
    trained meanwhile.
    """
    run = make_run(async_mode=mode).train(4)
    run.step()
    expected = run.values()
    run.checkpoints.save(5)
    run.step()  # overwrites the state, perhaps while the save is under way
    if mode == "async":
        run.settle()
        run.checkpoints.save(6)
    assert run.position.saved_step == 5
    (told,) = run.events.named("checkpoint_saved")
    assert told["step"] == 5
    assert told["seconds"] > 0

    other = make_run(slot=1, async_mode=mode)
    assert other.checkpoints.load()
    assert_equal(other.values(), expected)
    assert other.loaded == [5]
    assert other.position.saved_step == 5
    assert other.events.told == [
        ("checkpoint_loaded", {"step": 5, "lineage": f"{LINEAGE + 5:012x}"})
    ]


def test_the_folder_tells_what_the_checkpoint_was_made_of(make_run: Callable[..., Run]) -> None:
    """A manifest lies beside the data; the data has the ledger, and what stock torchtitan reads in
    its place.
    """
    run = make_run().train(5)
    manifest = json.loads((run.folder / "step-5" / MANIFEST).read_text())
    assert len(manifest.pop("save_id")) == 32
    assert len(manifest.pop("table")) == len(manifest.pop("sha256")) == 64
    digests = manifest.pop("digests")
    assert digests.keys() == {
        "model",
        "optimizer",
        "lr_scheduler",
        "train_state",
        "dataloader",
        "titan_ft",
    }
    assert manifest | {"version": ""} == {
        "step": 5,
        "lineage": f"{LINEAGE + 5:012x}",
        "model": "llama3 tiny",
        "dataset": "austen",
        "seq_len": 32,
        "num_shards": 2,
        "model_only": False,
        "writer": "group-0",
        "round_steps": 1,
        "job_id": "",
        "load_step": -1,
        "version": "",
    }
    keys = FileSystemReader(run.folder / "step-5").read_metadata().state_dict_metadata
    ledger = {
        f"dataloader.{slot}.{name}" for slot in (0, 1) for name in ("batches", "state", "following")
    }
    stock = {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"}
    assert {key for key in keys if key.startswith("dataloader")} == ledger | stock
    assert [path.name for path in run.folder.iterdir()] == ["step-5"]


def test_a_group_that_heals_loads_nothing(make_run: Callable[..., Run]) -> None:
    """When the job goes on in other groups, the disk's older state is left alone."""
    make_run().train(5)
    joiner = make_run(slot=1)
    joiner.heals = True
    assert not joiner.checkpoints.load()
    assert joiner.claimed == 5
    assert joiner.progress.step == 0
    assert joiner.events.told == []


def test_without_checkpoints_nothing_happens(make_run: Callable[..., Run]) -> None:
    """checkpoint.enable = false: no file, no question to the host."""
    run = make_run(enable=False)
    run.heals = True
    assert not run.checkpoints.load()
    run.train(5)
    run.checkpoints.maybe_wait_for_staging()
    run.checkpoints.finish(5)
    assert not run.folder.exists()
    assert run.gathered == []


def test_rounds_are_saved_behind_the_steps_that_fall_due_in_them(
    make_run: Callable[..., Run],
) -> None:
    """Once each: a checkpoint is called after torchtitan's step, what the groups tell each other
    counts rounds.
    """
    run = make_run(interval=15, keep_latest_k=0)
    run.per_round = 10
    run.train(60)
    assert complete_steps(run.folder) == [20, 30, 50, 60]
    assert run.position.saved_step == 6


def test_the_last_round_is_saved_where_a_shorter_one_was_resumed_from(
    make_run: Callable[..., Run],
) -> None:
    """A run of 25 steps goes on to 30: its third round ended at step 25, and the fourth at 30,
    where a third would.
    """
    run = make_run()
    run.per_round = 10
    run.position.set_step(3)
    run.position.set_saved_step(3)
    run.progress.step = 30
    run.position.set_step(4)
    run.checkpoints.save(30, last_step=True)
    assert complete_steps(run.folder) == [30]
    assert run.position.saved_step == 4


def test_a_failed_save_names_the_step_that_is_left_and_not_its_round(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the number of a folder."""
    run = make_run(interval=10)
    run.per_round = 10
    run.train(10)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fail)
        run.train(20)
    (failed,) = run.events.named("checkpoint_failed")
    assert (failed["step"], failed["latest"]) == (20, 10)


def test_load_only_saves_nothing(make_run: Callable[..., Run]) -> None:
    """checkpoint.load_only loads, and that is all."""
    make_run().train(5)
    run = make_run(load_only=True)
    assert run.checkpoints.load()
    run.train(12)
    run.checkpoints.finish(12)
    assert complete_steps(run.folder) == [5]


# Who saves when


@pytest.mark.parametrize(
    ("step", "first", "last", "due"),
    [
        (0, True, False, 0),
        (1, False, False, 0),
        (1, True, False, 1),
        (4, True, False, 1),
        (5, False, False, 5),
        (9, False, False, 5),
        (10, True, False, 10),
        (12, False, True, 12),
    ],
)
def test_latest_due(step: int, first: bool, last: bool, due: int) -> None:
    """Multiples of the interval, the first step if asked for, and the last one."""
    assert latest_due(step, 5, first, last) == due


def test_only_the_writer_saves(make_run: Callable[..., Run]) -> None:
    """A group that is not the writer writes nothing, and asks its ranks nothing."""
    run = make_run(slot=1)
    run.is_writer = False
    run.gathered.clear()
    run.train(11)
    assert not run.folder.exists()
    assert run.gathered == []


def test_what_another_group_saved_is_not_saved_again(make_run: Callable[..., Run]) -> None:
    """The new writer goes on with the interval when the old one's checkpoint is complete."""
    run = make_run()
    run.position.saved_step = 5
    run.train(9)
    assert complete_steps(run.folder) == []
    run.train(10)
    assert complete_steps(run.folder) == [10]


def test_the_next_writer_takes_over_at_once(make_run: Callable[..., Run]) -> None:
    """When the writer was lost in its save, the next commit's writer saves the state of that
    step.
    """
    run = make_run(slot=1)
    run.is_writer = False
    run.train(6)
    run.is_writer = True
    run.train(9)
    assert complete_steps(run.folder) == [7]
    assert run.position.saved_step == 7


def test_pauses_are_foreseen(make_run: Callable[..., Run]) -> None:
    """Steps of the interval, and those after them until a checkpoint is reported."""
    run = make_run(slot=1)
    run.is_writer = False
    assert [step for step in range(1, 8) if run.checkpoints.pauses_after(step)] == [5, 6, 7]
    run.position.saved_step = 5
    assert [step for step in range(5, 12) if run.checkpoints.pauses_after(step)] == [5, 10, 11]
    run = make_run(async_mode="async", enable_first_step_checkpoint=True)
    assert [step for step in range(1, 12) if run.checkpoints.pauses_after(step)] == [1, 5, 10]
    assert not make_run(load_only=True).checkpoints.pauses_after(5)
    assert not make_run(enable=False).checkpoints.pauses_after(5)


def test_one_save_at_a_time(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """No save begins during another one. A save counts when it is complete; a step due meanwhile
    follows.
    """
    gate = Gate(monkeypatch)
    run = make_run(async_mode="async").train(11)
    assert run.position.saved_step == 0
    assert complete_steps(run.folder) == []
    gate.open.set()
    run.settle()
    assert complete_steps(run.folder) == [5]
    run.train(12)
    run.settle()
    run.train(13)
    assert run.position.saved_step == 12
    assert complete_steps(run.folder) == [5, 12]


def test_a_save_is_over_when_it_is_on_all_ranks(make_run: Callable[..., Run]) -> None:
    """A rank that has written its part waits for the others: until then the checkpoint may be
    incomplete.
    """
    run = make_run(async_mode="async")
    run.gather = lambda value: [value, 0]  # type: ignore[method-assign]  # the other rank's is under way
    run.train(5)
    run.settle()
    run.train(6)
    assert run.position.saved_step == 0
    assert not run.events.named("checkpoint_saved")
    run.gather = lambda value: [value, value]  # type: ignore[method-assign]
    run.train(7)
    assert run.position.saved_step == 5
    assert [told["step"] for told in run.events.named("checkpoint_saved")] == [5]


def test_a_save_that_ends_late_does_not_hide_a_later_one(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group has saved a later step meanwhile: that remains the latest one."""
    gate = Gate(monkeypatch)
    run = make_run(async_mode="async").train(5)
    run.position.saved_step = 10
    gate.open.set()
    run.settle()
    run.train(6)
    assert [told["step"] for told in run.events.named("checkpoint_saved")] == [5]
    assert run.position.saved_step == 10


def test_the_last_step_is_complete_when_save_returns(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous save under way is waited for, and the last one is synchronous."""
    gate = Gate(monkeypatch)
    run = make_run(async_mode="async").train(5)
    threading.Timer(0.2, gate.open.set).start()
    run.step()
    run.checkpoints.save(6, last_step=True)
    assert complete_steps(run.folder) == [5, 6]
    assert run.position.saved_step == 6
    run.checkpoints.finish(6)
    assert [told["step"] for told in run.events.named("checkpoint_saved")] == [5, 6]


def test_the_final_state_is_saved_when_its_writer_was_lost(make_run: Callable[..., Run]) -> None:
    """A group that finished and heard of no final checkpoint writes it."""
    run = make_run(slot=1)
    run.is_writer = False
    run.train(6)
    run.checkpoints.finish(6)
    assert complete_steps(run.folder) == [6]


# Leaving


def leave(run: Run, seconds: float = 20.0) -> bool:
    """Let a group leave as the last one, as the trainer does; says whether it has saved."""
    lacks = run.checkpoints.lacks_state()
    if lacks:
        run.checkpoints.save_on_leave(run.progress.step, seconds)
    return lacks


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("last", [{}, {"last_save_model_only": True}, {"last_save_in_hf": True}])
def test_the_last_group_to_leave_saves_the_whole_state(
    make_run: Callable[..., Run], mode: str, last: dict[str, Any]
) -> None:
    """Whatever the last save is set to, because training resumes from this save; it is complete at
    once.
    """
    adapter = Exporter() if "last_save_in_hf" in last else None
    run = make_run(
        async_mode=mode, adapter=adapter, **{"last_save_model_only": True, **last}
    ).train(7)
    expected = run.values()
    assert leave(run)
    assert complete_steps(run.folder) == [5, 7]
    assert run.position.saved_step == 7
    assert [told["step"] for told in run.events.named("checkpoint_saved")] == [5, 7]
    (told,) = run.events.named("saving_before_leaving")
    assert (told["step"], told["seconds_left"]) == (7, 20.0)
    assert 0 < told["longest_seconds"] < 60
    assert not leave(run), "it is saved"
    other = make_run(slot=1, async_mode=mode)
    assert other.checkpoints.load()
    assert_equal(other.values(), expected)


@pytest.mark.parametrize("settings", [{"enable": False}, {"load_only": True}])
def test_a_group_that_saves_nothing_saves_nothing_when_it_leaves(
    make_run: Callable[..., Run], settings: dict[str, Any]
) -> None:
    """Its ranks need not even ask each other."""
    run = make_run(**settings).train(2)
    run.gathered.clear()
    assert not run.checkpoints.lacks_state()
    assert run.gathered == []


@pytest.mark.parametrize("newer", [0, 1])
def test_a_group_that_leaves_waits_for_the_save_under_way(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, newer: int
) -> None:
    """And saves again only if its state is a newer one."""
    gate = Gate(monkeypatch)
    run = make_run(async_mode="async").train(5)
    for _ in range(newer):
        run.step()
    threading.Timer(0.2, gate.open.set).start()
    assert leave(run) == bool(newer)
    assert complete_steps(run.folder) == [5, 6][: 1 + newer]


def test_a_state_that_could_not_be_saved_before_is_tried_again_by_who_leaves(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no next step: the disk may have room by now."""
    run = make_run()
    with monkeypatch.context() as full:
        full.setattr(FileSystemWriter, "write_data", fail)
        run.train(5)
    assert leave(run)
    assert complete_steps(run.folder) == [5]


def test_a_save_of_a_group_that_leaves_may_fail(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported, with the step of the last checkpoint; a model alone would be of no
    use.
    """
    run = make_run().train(6)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    assert leave(run)
    (told,) = run.events.named("checkpoint_failed")
    assert (told["step"], told["latest"]) == (6, 5)
    assert complete_steps(run.folder) == [5]
    run.checkpoints.raise_error_of_last_step()


@pytest.mark.parametrize(("seconds", "warns"), [(3.0, False), (2.0, True)])
def test_a_save_that_may_be_too_long_for_who_leaves_is_told_and_tried(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture, seconds: float, warns: bool
) -> None:
    """By the longest one that a rank of the group knows of."""
    run = make_run().train(6)
    slowest = iter([2500])
    run.gather = lambda value: [value, next(slowest, value)]  # type: ignore[method-assign]
    assert leave(run, seconds)
    assert complete_steps(run.folder) == [5, 6]
    (told,) = run.events.named("saving_before_leaving")
    assert told["longest_seconds"] == 2.5
    said = [text for text in caplog.messages if "may not be complete in time" in text]
    assert len(said) == warns
    assert all("raise fault_tolerance.drain_timeout_seconds" in text for text in said)


def test_the_last_save_is_made_up_for_by_who_goes_on_from_the_last_step(
    make_run: Callable[..., Run],
) -> None:
    """The groups left with it: the state is whole, and the format that was asked for is yet to
    come.
    """
    left = make_run(adapter=Exporter(), last_save_in_hf=True, last_save_model_only=True).train(6)
    assert leave(left)
    run = make_run(slot=1, adapter=Exporter(), last_save_in_hf=True, last_save_model_only=True)
    assert run.checkpoints.load()
    assert run.loaded == [6]
    run.position.set_step(6)
    run.checkpoints.finish(6)
    assert complete_steps(run.folder) == [5, 6]
    assert (run.folder / "step-6" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("last", [{"last_save_model_only": True}, {"last_save_in_hf": True}])
def test_a_last_save_of_the_model_only_is_no_state_to_go_on_from(
    make_run: Callable[..., Run], last: dict[str, Any]
) -> None:
    """Finished groups with a leave request save the whole state. Before, the next launch repeated
    steps.
    """
    settings: dict[str, Any] = {"adapter": Exporter(), "last_save_model_only": True, **last}
    run, other = make_run(**settings), make_run(slot=1, **settings)
    for each in (run, other):
        each.is_writer = each is run
        each.train(6)
        each.checkpoints.save(6, last_step=True)
        each.position.set_saved_step(6)  # as the other one hears it
    assert ["model_only" in told for told in run.events.named("checkpoint_saved")] == [False, True]
    assert not other.checkpoints.holds_state(6)
    assert leave(run)
    assert other.checkpoints.holds_state(6)
    assert not leave(other)
    later = make_run(slot=1, **settings)
    assert later.checkpoints.load()
    assert_equal(later.values(), run.values())


def test_the_same_state_by_whoever_is_found(make_run: Callable[..., Run]) -> None:
    """By its lineage: another state of that step, or half of a checkpoint, will not do."""
    run, other = make_run(), make_run(slot=1)
    for each in (run, other):
        each.step()
    assert not other.checkpoints.holds_state(1)
    assert leave(run)
    assert other.checkpoints.holds_state(1)
    other.position.set_lineage(7)
    assert not other.checkpoints.holds_state(1)
    other.position.set_lineage(run.position.lineage)
    (run.folder / "step-1" / MANIFEST).write_text("{")
    assert not other.checkpoints.holds_state(1)


def test_who_leaves_sees_whether_another_group_has_begun_to_save(
    make_run: Callable[..., Run],
) -> None:
    """The group's own folder does not count, nor earlier files of a hanging writer, nor other
    steps.
    """
    run = make_run()
    run.folder.mkdir(parents=True, exist_ok=True)

    def write(step: int, writer: str, text: str) -> None:
        folder = run.folder / f"partial-{step}-{writer}"
        folder.mkdir(exist_ok=True)
        (folder / "__0_0.distcp").write_text(text)

    write(5, "group-1", "hangs")
    is_begun = run.checkpoints.watch_other_writers(5)
    write(5, "group-0", "own")
    write(10, "group-1", "another step")
    assert not is_begun()
    write(5, "group-1", "goes on")
    assert is_begun()
    is_begun = run.checkpoints.watch_other_writers(5)
    shutil.rmtree(run.folder / "partial-5-group-1")  # what a dead writer had left is deleted
    assert not is_begun()
    write(5, "group-2", "")
    assert is_begun()


def test_close_waits_for_the_save_under_way(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that leaves in order completes its running save."""
    gate = Gate(monkeypatch)
    run = make_run(async_mode="async").train(5)
    threading.Timer(0.2, gate.open.set).start()
    run.checkpoints.close()
    assert complete_steps(run.folder) == [5]
    assert [told["step"] for told in run.events.named("checkpoint_saved")] == [5]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_is_told_and_training_goes_on(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """An error while writing costs this checkpoint; the next due step tries again."""
    run = make_run(async_mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fail)
        run.train(5)
        if mode == "async":
            run.settle()
        run.train(9)
    assert run.position.saved_step == 0
    failed = {"step": 5, "error": "No space left on device", "latest": 0}
    assert run.events.named("checkpoint_failed") == [failed]
    assert complete_steps(run.folder) == []
    run.train(10)
    if mode == "async":
        run.settle()
        run.train(11)
    assert run.position.saved_step == 10
    # What was left of step 5 is gone.
    assert [path.name for path in run.folder.iterdir()] == ["step-10"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_class_that_a_load_refuses_is_not_saved(
    make_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    """No start after a failure could load such a checkpoint, nor any other one of that run."""
    run = make_run(async_mode=mode)
    counters = run.progress.state_dict
    with monkeypatch.context() as patch:
        patch.setattr(
            run.progress, "state_dict", lambda: {**counters(), "recent": [collections.deque([1])]}
        )
        run.train(5)
        run.settle()
    (failed,) = run.events.named("checkpoint_failed")
    assert "got collections.deque at train_state.recent; return a plain value" in failed["error"]
    assert "Traceback" not in caplog.text
    assert complete_steps(run.folder) == []
    run.train(10)
    run.settle()
    assert complete_steps(run.folder) == [10]


def test_each_save_that_fails_says_what_is_left(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, and each failure names the step that there is to go back to."""
    run = make_run().train(5)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    run.train(15)
    told = [
        (each["step"], each["error"], each["latest"])
        for each in run.events.named("checkpoint_failed")
    ]
    assert told == [(step, "No space left on device", 5) for step in (10, 15)]
    run.checkpoints.raise_error_of_last_step()  # of the last step there is none


def test_a_last_save_that_fails_ends_the_group_once_the_others_need_it_no_more(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes after the last rounds, without another try there, and prevents a restart of
    the group.
    """
    run = make_run().train(5)
    run.step()
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    run.checkpoints.save(6, last_step=True)
    run.checkpoints.finish(6)
    assert [told["step"] for told in run.events.named("checkpoint_failed")] == [6]
    with pytest.raises(
        SaveError, match=r"checkpoint\.folder .*No space left on device; .* step 5; make room"
    ) as raised:
        run.checkpoints.raise_error_of_last_step()
    assert not raised.value.restart


def test_the_last_save_in_hugging_faces_format(make_run: Callable[..., Run]) -> None:
    """The save holds the model, converted once, as one file of that format."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    run.checkpoints.save(6, last_step=True)
    run.checkpoints.finish(6)
    run.checkpoints.raise_error_of_last_step()
    assert run.checkpoints.sd_adapter.calls == 1
    assert complete_steps(run.folder) == [5, 6]
    weights: dict[str, torch.Tensor] = {}
    for path in (run.folder / "step-6").glob("*.safetensors"):
        weights |= safetensors.torch.load_file(path)
    assert_equal(weights["model.weight"], run.model.weight.detach())
    manifest = Manifest.read(run.folder / "step-6")
    assert manifest is not None
    assert manifest.model_only


IMPORT: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_model_only": True}


def test_a_model_of_hugging_faces_format_is_begun_with(make_run: Callable[..., Run]) -> None:
    """The model of one run's last save is the first of another run, whose optimizer and counters
    start over.
    """
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    run.checkpoints.save(6, last_step=True)
    other = make_run(
        folder="elsewhere",
        adapter=Exporter(),
        initial_load_path=str(run.folder / "step-6"),
        **IMPORT,
    )
    assert other.checkpoints.load()
    assert_equal(other.model.weight.detach(), run.model.weight.detach())
    assert (other.position.saved_step, other.progress.step) == (0, 0)


def test_an_import_that_cannot_be_is_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Where torchtitan asserts, or fails with a traceback in mid-load: one line, with the setting
    and what to do.
    """
    with pytest.raises(ConfigError, match=r"initial_load_in_hf must be false for this model"):
        make_run(**IMPORT)
    with pytest.raises(
        ConfigError, match=r"initial_load_in_hf needs checkpoint\.initial_load_model_only = true"
    ):
        make_run(adapter=Exporter(), **{**IMPORT, "initial_load_model_only": False})
    with pytest.raises(
        ConfigError,
        match=r"initial_load_in_hf_quantized needs checkpoint\.initial_load_in_hf = true",
    ):
        make_run(adapter=Exporter(), initial_load_in_hf_quantized=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ConfigError, match=r"empty must hold a model in Hugging Face's format .* got none; "
    ):
        make_run(
            folder="a", adapter=Exporter(), initial_load_path=str(empty), **IMPORT
        ).checkpoints.load()
    safetensors.torch.save_file({"other.weight": torch.zeros(2)}, empty / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"empty must hold the weights of this run's model, .*Missing key .* model\.",
    ):
        make_run(
            folder="b", adapter=Exporter(), initial_load_path=str(empty), **IMPORT
        ).checkpoints.load()


def _no_module(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "safetensors.torch", None)  # as if it were not installed


def _no_export(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.checkpoints.sd_adapter.refuses = True


def _no_merging(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HuggingFaceStorageWriter, "finish", fail)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [(_no_module, "safetensors"), (_no_export, "router"), (_no_merging, "No space left")],
)
def test_a_last_save_that_fails_in_one_format_is_made_in_the_other(
    make_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[Run, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    """The save holds the whole training state, to resume or to convert. The failure is reported
    once, and the run has not succeeded.
    """
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    with monkeypatch.context() as patch:
        breaks(run, patch)
        run.checkpoints.save(6, last_step=True)
    run.checkpoints.finish(6)
    (failed,) = run.events.named("checkpoint_failed")
    assert (failed["step"], failed["latest"]) == (6, 5)
    assert reason in failed["error"]
    assert run.position.saved_step == 6  # so that the other groups save nothing
    with pytest.raises(
        SaveError, match=rf"step 6 could not be saved as asked: .*{reason}.*training state.*step-6"
    ):
        run.checkpoints.raise_error_of_last_step()
    other = make_run()
    assert other.checkpoints.load()
    assert_equal(other.values(), run.values())


def test_a_disk_that_stays_full_ends_both_formats(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be saved: what was saved before is named."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail)
    run.checkpoints.save(6, last_step=True)
    run.checkpoints.finish(6)
    assert len(run.events.named("checkpoint_failed")) == 1
    with pytest.raises(SaveError, match=r"checkpoint\.folder .*No space left on device; .* step 5"):
        run.checkpoints.raise_error_of_last_step()
    assert complete_steps(run.folder) == [5]


@pytest.mark.parametrize("fails", [None, *MERGING])
def test_a_rank_that_cannot_merge_its_files_still_meets_the_others(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, fails: str | None
) -> None:
    """All ranks merge a model in several files. torch lets them wait for a failed rank."""
    exporter = Exporter()
    exporter.fqn_to_index_mapping = {"model.weight": 1, "model.bias": 2}
    run = make_run(adapter=exporter, **EXPORT).train(6)
    met: list[str] = []
    barrier = dist.barrier
    monkeypatch.setattr(
        dist,
        "barrier",
        lambda **options: met.append("at the end of the merging") or barrier(**options),
    )
    if fails is not None:
        monkeypatch.setattr(_consolidate_hf_safetensors, fails, fail)
    run.checkpoints.save(6, last_step=True)
    assert met == ["at the end of the merging"]
    assert complete_steps(run.folder) == [5, 6]
    if fails is None:
        run.checkpoints.raise_error_of_last_step()
        assert len(list((run.folder / "step-6").glob("*.safetensors"))) == 2
    else:
        assert getattr(_consolidate_hf_safetensors, fails) is fail
        with pytest.raises(SaveError, match=r"No space left on device.*training state"):
            run.checkpoints.raise_error_of_last_step()


@pytest.mark.parametrize("asked", [EXPORT, {"last_save_model_only": False}])
def test_a_disk_with_room_for_the_model_gets_that(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """What can be saved of the last step is saved, if not to go on from then to begin with."""
    run = make_run(adapter=Exporter(), **asked).train(6)
    write = FileSystemWriter.write_data

    def write_what_fits(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
        return fail() if len(plan.items) > 2 else write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_what_fits)
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail)
    run.checkpoints.save(6, last_step=True)
    with pytest.raises(
        SaveError,
        match=r"No space left on device\. Nothing is lost of the model, which is in .*step-6",
    ):
        run.checkpoints.raise_error_of_last_step()
    manifest = Manifest.read(run.folder / "step-6")
    assert manifest is not None
    assert manifest.model_only


def test_what_cannot_be_exported_is_told_at_the_start(make_run: Callable[..., Run]) -> None:
    """Not by an assertion of torchtitan, which would have the group started again and again, or at
    the last step.
    """
    with pytest.raises(
        ConfigError, match=r"checkpoint\.last_save_in_hf must be false for this model"
    ):
        make_run(**EXPORT)
    with pytest.raises(ConfigError, match=r"needs checkpoint\.last_save_model_only = true"):
        make_run(adapter=Exporter(), last_save_in_hf=True)


def test_an_export_that_fails_on_another_rank_fails_on_this_one(
    make_run: Callable[..., Run],
) -> None:
    """Otherwise this rank would enter a collective that the other one never joins."""
    run = make_run(adapter=Exporter(), **EXPORT).train(6)
    flags = [1]  # the other rank's, at the first agreement of the save: it could not convert

    def gather(value: int) -> list[int]:
        return [value, flags.pop() if flags else value]

    run.gather = gather  # type: ignore[method-assign]
    run.checkpoints.save(6, last_step=True)
    (failed,) = run.events.named("checkpoint_failed")
    assert "another rank" in failed["error"]
    assert complete_steps(run.folder) == [5, 6]
    with pytest.raises(SaveError, match="another rank"):
        run.checkpoints.raise_error_of_last_step()


def test_a_save_that_keeps_the_others_waiting_too_long_is_warned_of(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronous save longer than join_timeout_ms costs the writer its place in the quorum: say
    what to change.
    """
    said: list[str] = []
    monkeypatch.setattr(
        "titan_ft.training.checkpoint.manager.logger.warning", lambda text, *_: said.append(text)
    )
    run = make_run().train(5)
    assert said == []
    run.config.fault_tolerance.join_timeout_ms = 0.001
    run.train(10)
    (text,) = said
    assert "join_timeout_ms" in text
    assert "checkpoint.async_mode" in text


# Which folders count


def test_an_incomplete_checkpoint_is_never_loaded(make_run: Callable[..., Run]) -> None:
    """Neither the remains of a dead writer, nor a step folder of stock torchtitan without its
    metadata.
    """
    make_run().train(5)
    folder = make_run().folder
    (folder / "partial-10-group-0").mkdir()
    (folder / "partial-10-group-0" / ".metadata").touch()
    (folder / "step-15").mkdir()
    (folder / "step-15" / "__0_0.distcp").touch()
    (folder / "copy-of-step-20").mkdir()
    (folder / "copy-of-step-20" / ".metadata").touch()
    run = make_run()
    assert run.checkpoints.load()
    assert run.progress.step == 5
    with pytest.raises(
        ConfigError,
        match=r"load_step must name a sound .*got 15.*damaged: \.metadata is missing; sound ones are 5",
    ):
        make_run().checkpoints.load(15)
    with pytest.raises(
        ConfigError, match=r"load_step must name a complete checkpoint in .*, got 20; there are 5"
    ):
        make_run().checkpoints.load(20)


def test_partial_folders_are_overwritten_and_cleaned(make_run: Callable[..., Run]) -> None:
    """A save removes the remains of its own group, and those without a writer for a long time."""
    run = make_run()
    for name in (
        "partial-3-group-0",
        "partial-3-group-1",
        "partial-5-group-0",
        "partial-5-group-1",
        "step-5",
    ):
        (run.folder / name).mkdir(parents=True)
        (run.folder / name / "__7_0.distcp").touch()
    run.train(5)
    run.wait_for_purge()
    # Another group may be writing just now, also of an earlier step: its save takes as long as it
    # takes.
    assert run.names() == ["partial-3-group-1", "partial-5-group-1", "step-5"]
    assert not (run.folder / "step-5" / "__7_0.distcp").exists()
    long_ago = time.time() - 3700
    for path in (
        run.folder / "partial-3-group-1",
        run.folder / "partial-3-group-1" / "__7_0.distcp",
    ):
        os.utime(path, (long_ago, long_ago))
    # But not the file that is written in it.
    os.utime(run.folder / "partial-5-group-1", (long_ago, long_ago))
    run.train(10)
    run.wait_for_purge()
    assert run.names() == ["partial-5-group-1", "step-10", "step-5"]


def test_a_planted_link_overwrites_no_other_checkpoint(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Another user who may write the folder links the place of the next save to a folder of
    ours.
    """
    run, precious = make_run(), tmp_path / "precious"
    precious.mkdir()
    (precious / ".metadata").write_text("mine")
    run.folder.mkdir(parents=True)
    (run.folder / "partial-5-group-0").symlink_to(precious)
    run.train(5)
    assert [path.name for path in precious.iterdir()] == [".metadata"]
    assert (precious / ".metadata").read_text() == "mine"
    assert complete_steps(run.folder) == [5]
    assert not (run.folder / "step-5").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_nothing_is_saved_through_a_folder_that_is_anothers_link(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The save fails with a reason, and training goes on."""
    run, home = make_run(), tmp_path / "home"
    home.mkdir()
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.folder.symlink_to(home)
    os.chown(run.folder, 65534, 65534, follow_symlinks=False)
    before = home.stat().st_mtime_ns
    run.train(5)
    assert home.stat().st_mtime_ns == before, "no file was made there, not even for a while"
    (failed,) = run.events.named("checkpoint_failed")
    assert "a link that belongs to user 65534" in failed["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("owner", [0, 65534])
def test_a_folder_behind_anothers_link_is_refused_at_the_start(
    make_run: Callable[..., Run], tmp_path: Path, owner: int
) -> None:
    """Such as a link that an administrator has made. Every save failed, after hours of training."""
    run, storage = make_run(), tmp_path / "storage"
    storage.mkdir()
    run.folder.symlink_to(storage)
    os.chown(run.folder, owner, owner, follow_symlinks=False)
    if owner == 0:
        assert not run.checkpoints.load()
        return
    with pytest.raises(
        NoCheckpointError,
        match=rf"checkpoint\.folder must not .* {run.folder} is a link that belongs to user "
        rf"{owner}; make",
    ):
        run.checkpoints.load()


def test_a_step_can_be_saved_again(make_run: Callable[..., Run]) -> None:
    """After a run went back to an earlier checkpoint, its own state of a step takes the place of
    the old one.
    """
    make_run().train(10)
    run = make_run()
    assert run.checkpoints.load(5)
    assert run.position.saved_step == 5
    with torch.no_grad():
        run.model.weight.fill_(7.0)
    run.train(10)
    other = make_run()
    assert other.checkpoints.load()
    assert_equal(other.model.weight, run.model.weight)
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-10", "step-5"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_was_saved_of_a_corrupt_state_is_withdrawn(
    make_run: Callable[..., Run], mode: str
) -> None:
    """Only saves after the last digest on which all agreed are removed, also one that is not
    settled yet.
    """
    run = make_run(async_mode=mode).train(5)
    run.checkpoints._conclude_ended_save(wait=True)
    run.position.agreed_step = 5
    run.train(10)
    run.settle()
    run.checkpoints.withdraw_corrupt()
    assert complete_steps(run.folder) == [5, 10]  # nothing is wrong yet
    run.position.saved_corrupt = True
    run.checkpoints.withdraw_corrupt()
    assert complete_steps(run.folder) == [5]
    assert run.position.saved_step == 5
    assert [told["step"] for told in run.events.named("checkpoint_withdrawn")] == [10]
    assert not run.position.saved_corrupt
    run.checkpoints.withdraw_corrupt()
    assert len(run.events.named("checkpoint_withdrawn")) == 1


def test_a_withdrawal_spares_what_another_group_has_saved(make_run: Callable[..., Run]) -> None:
    """Another group has replaced the withdrawn save by its own state of the step."""
    run, other = make_run(), make_run(slot=1)
    run.train(5)
    run.position.saved_corrupt = True
    other.position.set_step(5)
    other.checkpoints.save(5)
    run.checkpoints.withdraw_corrupt()
    assert complete_steps(run.folder) == [5]
    assert find_writer(run.folder / "step-5") == "group-1"
    assert not run.events.named("checkpoint_withdrawn")


def test_a_slow_save_of_a_corrupt_state_replaces_nothing(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group has saved the step when the save ends; this group may save it again after its
    heal.
    """
    run, other = make_run(async_mode="async"), make_run(slot=1)
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        run.train(5)
    run.position.saved_corrupt = True
    other.position.set_step(5)
    other.checkpoints.save(5)
    gate.open.set()
    run.checkpoints.withdraw_corrupt()
    assert find_writer(run.folder / "step-5") == "group-1"
    assert run.position.saved_step == 0
    (told,) = run.events.named("checkpoint_failed")
    assert "not the job's state" in told["error"]
    run.checkpoints.save(6)
    run.settle()
    assert complete_steps(run.folder) == [5, 6]


def test_two_groups_publish_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them wins, whole."""
    manifest = Manifest(5, "0" * 12, "llama3 tiny", "austen", 32, 2, False)
    target = tmp_path / "step-5"
    for name in ("a", "b"):
        (tmp_path / f"partial-5-{name}").mkdir()
        (tmp_path / f"partial-5-{name}" / ".metadata").write_text(name)
    rename = Path.rename

    def race(path: Path, to: Path) -> Path:
        if path.name == "partial-5-a":
            monkeypatch.setattr(Path, "rename", rename)
            publish(tmp_path / "partial-5-b", target, manifest)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", race)
    publish(tmp_path / "partial-5-a", target, manifest)
    assert (target / ".metadata").read_text() == "b"
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_purge_counts_complete_checkpoints(make_run: Callable[..., Run]) -> None:
    """keep_latest_k keeps that many complete ones, however many partial folders there are."""
    run = make_run(keep_latest_k=2).train(10)
    for step in (11, 12, 13):
        (run.folder / f"step-{step}").mkdir()
    run.train(13)
    assert complete_steps(run.folder) == [5, 10]
    run.train(20)
    assert complete_steps(run.folder) == [15, 20]
    run.checkpoints.close()
    left = {path.name for path in run.folder.iterdir()}
    assert not {name for name in left if name.startswith("partial")}


# Ranks of one group


def test_a_checkpoint_that_comes_between_two_looks(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of another group is published when one rank has looked into the folder, and the other
    has not.
    """
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    first: list[int] = []
    order = threading.Lock()

    def look(folder: str) -> list[int]:
        with order:
            first.append(ranks.rank)
        return [step for step in complete_steps(folder) if step != 10 or ranks.rank != first[0]]

    monkeypatch.setattr(checkpoint_choice, "complete_steps", look)
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-5", "step-5"]
    assert [run.claimed for run in ranks.runs] == [5, 5]


def test_a_rank_waits_for_a_checkpoint_that_it_does_not_see_yet(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's cache of a network folder may be a minute old."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    looks = itertools.count()
    ranks.see(monkeypatch, lambda folder: next(looks) > 2)
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-10", "step-10"]


def test_a_checkpoint_that_one_rank_never_sees_is_refused_by_all(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names these ranks, and the remedy; no rank loads another checkpoint, or waits for
    the others.
    """
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    ranks.see(monkeypatch, lambda folder: False)
    monkeypatch.setattr(checkpoint_choice, "_MAX_STALE_SECONDS", 0.3)
    for error in ranks.load():
        assert isinstance(error, ConfigError)
        for part in (str(ranks.runs[0].folder / "step-10"), "ranks [1]", "shared file system"):
            assert part in str(error)
    assert ranks.loaded == [None, None]


def test_another_checkpoint_of_the_same_step_is_refused_by_all(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders on each host's own disk may hold the same step of different runs."""
    make_run().train(5)
    other = make_run(folder="elsewhere")
    other.lineage = LINEAGE * 2
    other.train(5)
    ranks = Ranks(monkeypatch, make_run)
    manifest = other.folder / "step-5" / MANIFEST
    manifest.write_text(manifest.read_text().replace("austen", "another"))
    ranks.runs[1].checkpoints.folder = str(other.folder)
    monkeypatch.setattr(checkpoint_choice, "_MAX_STALE_SECONDS", 0.3)
    for error in ranks.load():
        assert isinstance(error, ConfigError)
        assert "ranks [1]" in str(error)
    assert ranks.loaded == [None, None]


def test_a_rank_waits_for_the_checkpoint_that_has_replaced_another(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that went back saves a step again; a host may see the former one for a while."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    looks, fingerprint = itertools.count(), checkpoint_choice._fingerprint
    monkeypatch.setattr(
        checkpoint_choice,
        "_fingerprint",
        lambda folder: 4711 if ranks.rank == 1 and next(looks) < 3 else fingerprint(folder),
    )
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-10", "step-10"]
    assert next(looks) > 3


def test_what_rank_0_refuses_is_refused_by_all(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks end with it, instead of waiting in the load."""
    make_run().train(5)
    errors = Ranks(monkeypatch, make_run).load(step=15)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "load_step" in str(errors[0])
    assert "rank 0" in str(errors[1])


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), EOFError("Ran out of input")], ids=repr
)
def test_a_folder_that_rank_0_cannot_read_ends_all(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An error, also of what is read half, is no reason for the others to wait: all end, may start
    again, say why.
    """
    make_run().train(5)
    ranks = Ranks(monkeypatch, make_run)

    def fail(folder: str) -> list[int]:
        raise error

    monkeypatch.setattr(checkpoint_choice, "complete_steps", fail)
    errors = ranks.load()
    assert all(isinstance(ended, LoadError) and ended.restart for ended in errors), errors
    assert error.args[-1] in str(errors[0])
    assert "rank 0" in str(errors[1])
    for ended in errors:
        assert str(ranks.runs[0].folder) in str(ended)
        assert "\n" not in str(ended)


@pytest.mark.parametrize("moment", ["chosen", "joined"])
def test_a_checkpoint_that_vanishes_is_never_loaded(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another group purges the checkpoint right after the choice: the next one is taken, at once;
    or all restart.

    When the group joined the job it announced the checkpoint to the others, so it cannot take
    another one.
    """
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    vanish = functools.partial(shutil.rmtree, ranks.runs[0].folder / "step-10", ignore_errors=True)

    def choose(folder: str) -> list[int]:
        steps = complete_steps(folder)
        vanish()
        return steps

    def join(step: int) -> bool:
        ranks._gather(0)
        vanish()
        return False

    if moment == "chosen":
        monkeypatch.setattr(checkpoint_choice, "complete_steps", choose)
        assert ranks.load() == [None, None]
        assert ranks.loaded == ["step-5", "step-5"]
        assert [run.claimed for run in ranks.runs] == [5, 5]
    else:
        for run in ranks.runs:
            run.join_before_load = join  # type: ignore[method-assign]
        for error in ranks.load():
            assert isinstance(error, LoadError)
            assert error.restart
            assert "step-10" in str(error)
        assert ranks.loaded == [None, None]


def test_checkpoints_that_keep_vanishing_end_the_group(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are chosen; then the line names the folder, and what to look for."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    monkeypatch.setattr(checkpoint_choice, "complete_steps", lambda folder: [5, 10, 15])
    for error in ranks.load():
        assert isinstance(error, LoadError)
        assert str(ranks.runs[0].folder) in str(error)
        assert "delete" in str(error)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that have loaded different states of the same step do not train: all of them end and
    start again.
    """
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)

    def load(state_dict: dict[str, Any], _: str) -> None:
        state_dict["titan_ft"]["lineage"] = 7 + ranks.rank

    monkeypatch.setattr("titan_ft.training.checkpoint.manager.load_checkpoint", load)
    for error in ranks.load():
        assert isinstance(error, LoadError)
        assert "different states of step 10" in str(error)


def stale(path: object = "") -> OSError:
    """Return NFS's error for an open file that the server has replaced."""
    return OSError(errno.ESTALE, "Stale file handle", str(path))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stale_handle_is_no_checkpoint_that_vanished(
    make_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
) -> None:
    """On NFS a handle goes stale when another group renames or purges beside it; later looks find
    what is there.
    """
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    looks, fingerprint = itertools.count(), checkpoint_choice._fingerprint

    def read_stale(folder: Path) -> int:
        if ranks.rank == rank and next(looks) < 5:
            raise stale(folder)
        return fingerprint(folder)

    monkeypatch.setattr(checkpoint_choice, "_fingerprint", read_stale)
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-10", "step-10"]
    assert next(looks) > 5
    assert "vanished" not in caplog.text


def test_a_stale_handle_in_the_listing_is_looked_at_again(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No older checkpoint is taken for it, and the group need not be started again."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    looks = itertools.count()

    def look(folder: str) -> list[int]:
        if next(looks) < 3:
            raise stale(folder)
        return complete_steps(folder)

    monkeypatch.setattr(checkpoint_choice, "complete_steps", look)
    assert ranks.load() == [None, None]
    assert ranks.loaded == ["step-10", "step-10"]


@pytest.mark.parametrize("rank", [0, 1])
def test_handles_that_stay_stale_end_all(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """After a minute the line has the file system's message, on the rank that got it."""
    make_run().train(10)
    ranks = Ranks(monkeypatch, make_run)
    fingerprint = checkpoint_choice._fingerprint

    def read_stale(folder: Path) -> int:
        if ranks.rank == rank:
            raise stale(folder)
        return fingerprint(folder)

    monkeypatch.setattr(checkpoint_choice, "_fingerprint", read_stale)
    monkeypatch.setattr(checkpoint_choice, "_MAX_STALE_SECONDS", 0.3)
    errors = ranks.load()
    assert all(isinstance(error, LoadError) for error in errors), errors
    assert "Stale file handle" in str(errors[rank])
    assert f"rank {rank}" in str(errors[1 - rank])


def test_a_rank_that_cannot_read_what_was_chosen_ends_all(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's host fails to read the folder: the others do not wait for that rank in the
    load.
    """
    make_run().train(5)
    ranks = Ranks(monkeypatch, make_run)
    read = Manifest.read

    def fail(folder: Path) -> Manifest | None:
        if ranks.rank == 1:
            raise stale(folder)
        return read(folder)

    monkeypatch.setattr(Manifest, "read", fail)
    monkeypatch.setattr(checkpoint_choice, "_MAX_STALE_SECONDS", 0.3)
    errors = ranks.load()
    assert all(isinstance(error, LoadError) for error in errors), errors
    assert "rank 1" in str(errors[0])
    assert "Stale file handle" in str(errors[1])
    assert ranks.loaded == [None, None]


def test_a_model_to_begin_with_that_one_rank_lacks(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """checkpoint.initial_load_path, too, must be there for all; on one line that names the
    ranks.
    """
    make_run().train(5)
    ranks = Ranks(monkeypatch, lambda: make_run(folder="new"))
    ranks.runs[0].checkpoints.initial_load_path = str(tmp_path / "checkpoint" / "step-5")
    ranks.runs[1].checkpoints.initial_load_path = str(tmp_path / "nowhere")
    for error in ranks.load():
        assert isinstance(error, ConfigError)
        assert "checkpoint.initial_load_path" in str(error)
        assert "ranks [1]" in str(error)


# Folders of other runs


def test_another_model_is_refused(make_run: Callable[..., Run]) -> None:
    """One line names the folder, both models and the remedy."""
    make_run().train(5)
    run = make_run(flavor="8B")
    with pytest.raises(ConfigError) as error:
        run.checkpoints.load()
    text = str(error.value)
    assert "\n" not in text
    for part in (
        str(run.folder / "step-5"),
        "llama3 8B",
        "llama3 tiny",
        "checkpoint.folder",
        "job.dump_folder",
    ):
        assert part in text


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_between_rounds_is_the_anchors(
    make_run: Callable[..., Run], mode: str
) -> None:
    """Also at the end of a round in which the save fell due, and whether or not the others wait for
    the save.
    """
    run = make_run(async_mode=mode, method={"semi_sync_method": "diloco", "sync_steps": 4})
    run.per_round = 4
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _config=SimpleNamespace(fragment_sync_delay=1, fragment_update_alpha=0.0),
        _trained_tokens=[0],
        _training=SimpleNamespace(
            await_staging=run.checkpoints.maybe_wait_for_staging, refresh_converters=lambda: None
        ),
        outer=OuterModel([run.model], OuterOptimizer(1.0, 0.0, nesterov=False)),
    )
    run.lend_agreed_weights = strategy.lend_agreed_weights
    anchor = run.model.weight.detach().clone()
    run.train(8)  # the save is due at step 5
    run.settle()
    own = run.model.weight.detach().clone()
    run.train(12)
    assert not torch.equal(own, anchor)
    other = make_run(slot=1, method={"semi_sync_method": "diloco", "sync_steps": 4})
    assert other.checkpoints.load(8)
    assert torch.equal(other.model.weight, anchor)


@pytest.mark.parametrize(
    ("earlier", "now", "lengths"),
    [
        (
            {"semi_sync_method": "diloco", "sync_steps": 5},
            {"semi_sync_method": "diloco", "sync_steps": 4},
            (5, 4),
        ),
        ({}, {"semi_sync_method": "local_sgd", "sync_steps": 5}, (1, 5)),
        ({"semi_sync_method": "diloco", "sync_steps": 5}, {}, (5, 1)),
        (
            {"semi_sync_method": "diloco", "sync_steps": 5},
            {"semi_sync_method": "local_sgd", "sync_steps": 5},
            None,
        ),
        ({"sync_steps": 5}, {"sync_steps": 4}, None),  # of no method
    ],
)
def test_rounds_of_another_length_are_refused(
    make_run: Callable[..., Run],
    earlier: dict[str, Any],
    now: dict[str, Any],
    lengths: tuple[int, int] | None,
) -> None:
    """Round 3 would get another number, and a round begin in the middle of one. One line gives the
    remedy.
    """
    make_run(method=earlier).train(5)
    run = make_run(method=now)
    if lengths is None:
        assert run.checkpoints.load()
        return
    with pytest.raises(ConfigError) as error:
        run.checkpoints.load()
    line = str(error.value)
    assert "\n" not in line
    for part in (
        "sync_steps",
        f"must be {lengths[0]},",
        f"{run.folder / 'step-5'}, got {lengths[1]};",
        "initial_load_path",
    ):
        assert part in line


def test_a_checkpoint_that_does_not_tell_its_rounds_is_taken(make_run: Callable[..., Run]) -> None:
    """It is of an earlier version; a model to begin with may be of any rounds."""
    run = make_run(method={"semi_sync_method": "diloco", "sync_steps": 5}).train(5)
    write_as_earlier(run.folder / "step-5", round_steps=0)
    assert make_run().checkpoints.load()


def test_another_number_of_shards_resets_the_data(make_run: Callable[..., Run]) -> None:
    """The state continues, the data starts over, and both are reported."""
    make_run().train(5)
    run = make_run(slots=3)
    assert run.checkpoints.load()
    assert run.progress.step == 5
    assert run.position.lineage == LINEAGE + 5
    assert [run.ledger.count_committed(slot) for slot in range(3)] == [0, 0, 0]
    (reset,) = run.events.named("data_reset")
    assert reset["step"] == 5
    assert "2 shards, now into 3" in reset["reason"]


def test_the_same_shards_in_other_groups_go_on(make_run: Callable[..., Run]) -> None:
    """Four groups of one data rank and two groups of two read the same four shards."""
    run = make_run(slots=4).train(5)
    for slot in (0, 1, 2, 3):
        run.ledger.advance([Entry(slot, 5, slot, loader_state(slot))], [])
    run.progress.step = 9
    run.train(10)
    for rank in (0, 1):
        other = make_run(slots=2)
        ledger = other.ledger = Ledger(2, rank, 2)
        other.gather = lambda value: [2, 3]  # type: ignore[method-assign]  # the largest shard of each rank
        other.checkpoints.attach(other)  # type: ignore[arg-type]
        other.gather = lambda value: [value, value]  # type: ignore[method-assign]
        assert other.checkpoints.load()
        assert [ledger.count_committed(slot) for slot in (0, 1)] == [6 + rank, 8 + rank]
        assert other.events.named("data_reset") == []


def test_another_dataset_resets_the_data(make_run: Callable[..., Run]) -> None:
    """A place in one text means nothing in another."""
    make_run().train(5)
    run = make_run(dataset="c4")
    assert run.checkpoints.load()
    (reset,) = run.events.named("data_reset")
    assert "austen" in reset["reason"]
    assert "c4" in reset["reason"]


def test_a_stock_checkpoint_is_taken_without_its_data(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """torchtitan's own checkpoint: state yes, loader state no, and a warning."""
    run = make_run()
    for _ in range(3):
        run.step()
    stock = CheckpointManager(
        dataloader=None,
        model_parts=[run.model],
        optimizers=run.optimizers,
        lr_schedulers=run.schedulers,
        states={"train_state": run.progress},
        checkpoint_config=Checkpoint(enable=True, last_save_model_only=False),
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    stock.states.pop("dataloader")
    stock.save(3, last_step=True)
    other = make_run()
    assert other.checkpoints.load()
    assert_equal(other.model.weight, run.model.weight)
    assert other.progress.step == 3
    assert other.events.named("checkpoint_loaded") == [{"step": 3, "lineage": "0" * 12}]
    (reset,) = other.events.named("data_reset")
    assert "not of a fault-tolerant run" in reset["reason"]


def test_a_model_alone_is_no_training_state(make_run: Callable[..., Run]) -> None:
    """A checkpoint of last_save_model_only is refused as a training state, with the ways out; and
    loads as a model.
    """
    run = make_run(last_save_model_only=True).train(6)
    run.checkpoints.save(6, last_step=True)
    with pytest.raises(
        ConfigError, match=r"step-6 must hold a training state, got a model only.*load_step"
    ):
        make_run().checkpoints.load(6)
    other = make_run(folder="elsewhere", initial_load_path=str(run.folder / "step-6"))
    assert other.checkpoints.load()
    assert_equal(other.model.weight, run.model.weight)
    assert (other.progress.step, other.position.saved_step) == (0, 0)
    assert other.events.named("data_reset") == []


def test_a_run_that_was_lost_behind_its_last_save_comes_back(make_run: Callable[..., Run]) -> None:
    """By torchtitan's default that save holds the model only. The save before is loaded; alone it
    is refused.
    """
    run = make_run(last_save_model_only=True, keep_latest_k=2).train(6)
    run.checkpoints.save(6, last_step=True)
    other = make_run()
    assert other.checkpoints.load()
    assert other.progress.step == 5
    run.position.set_step(7)
    run.checkpoints.save(7, last_step=True)  # purges step 5
    with pytest.raises(ConfigError, match="got a model only"):
        make_run().checkpoints.load()


def test_initial_load_path_counts_until_there_is_a_complete_checkpoint(
    make_run: Callable[..., Run],
) -> None:
    """A run whose first writer died in its first save begins with the given model again, not with a
    random one.
    """
    run = make_run().train(5)
    other = make_run(
        folder="elsewhere",
        initial_load_path=str(run.folder / "step-5"),
        initial_load_model_only=False,
    )
    (run.folder.parent / "elsewhere" / "partial-5-group-0").mkdir(parents=True)
    assert other.checkpoints.load()
    assert other.claimed == 0  # another folder's step is known when it is loaded
    assert other.progress.step == 5


def test_what_is_missing_in_a_checkpoint_is_told_in_one_line(make_run: Callable[..., Run]) -> None:
    """A checkpoint that lacks a key of the optimizer: no traceback of DCP's."""
    run = make_run()
    del run.checkpoints.states["optimizer"]
    run.train(5)
    with pytest.raises(
        ConfigError, match=r"step-5 must hold .*Missing key in checkpoint state_dict: optimizer"
    ) as error:
        make_run().checkpoints.load()
    assert "\n" not in str(error.value)


def test_excluded_data_begins_anew(make_run: Callable[..., Run]) -> None:
    """checkpoint.exclude_from_loading keeps torchtitan's meaning, also for what is ours."""
    make_run().train(5)
    run = make_run(exclude_from_loading=["dataloader", "lr_scheduler"])
    assert run.checkpoints.load()
    assert run.progress.step == 5
    assert run.schedulers.state_dict()["last_epoch"] == 0
    (reset,) = run.events.named("data_reset")
    assert "exclude_from_loading" in reset["reason"]
    assert reset["asked"] is True
    with pytest.raises(ConfigError, match="nonsense not found"):
        make_run(exclude_from_loading=["nonsense"]).checkpoints.load()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"async_mode": "sometimes"}, "async_mode"),
        ({"keep_latest_k": 1}, "at least 2"),
        ({"async_mode": "async_with_pinned_mem"}, "async_mode"),
    ],
)
def test_bad_settings_are_told_in_one_line(
    make_run: Callable[..., Run], settings: dict[str, Any], part: str
) -> None:
    """What torchtitan refuses with a traceback, and what fails at the first save on a CPU."""
    if "pinned" in str(settings) and torch.accelerator.is_available():
        pytest.skip("an accelerator stages in pinned memory")
    with pytest.raises(ConfigError, match=part):
        make_run(**settings)


def test_a_manifest_of_a_later_version_may_say_more(tmp_path: Path) -> None:
    """Unknown fields are passed over."""
    manifest = Manifest(5, "0" * 12, "llama3 tiny", "austen", 32, 2, False)
    (tmp_path / MANIFEST).write_text(json.dumps({**dataclasses.asdict(manifest), "more": 1}))
    assert Manifest.read(tmp_path) == manifest
