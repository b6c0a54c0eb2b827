# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of real jobs: stopped, killed at the worst moment, and continued by other groups and
ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from harness.client import REPOSITORY, ZygoteClient
from harness.events import Event
from harness.job import CONFIG, Job
from harness.trajectory import (
    by_process,
    check,
    check_finished,
    check_killed,
    check_one_trajectory,
    exits,
    named,
)
from torch.distributed.checkpoint import FileSystemReader

from titan_ft.data.assets import TOKENIZER
from titan_ft.run.events import CheckpointFailed, ReplicaGaveUp, ReplicaRestarted, StepCommitted
from titan_ft.run.log import read_events
from titan_ft.training.checkpoint.folder import complete_steps

STEPS, STOP = 20, 10

Flags = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints that the jobs of a test share."""
    return tmp_path / "checkpoints"


@pytest.fixture
def flags(folder: Path) -> Flags:
    """Make the flags of jobs that save full checkpoints in `folder`, with an LR schedule
    independent of their length.
    """

    def make(interval: int = 5, mode: str = "disabled") -> list[str]:
        return [
            "--checkpoint.enable",
            f"--checkpoint.folder={folder}",
            f"--checkpoint.interval={interval}",
            f"--checkpoint.async_mode={mode}",
            "--checkpoint.no-last-save-model-only",
            *SCHEDULE,
        ]

    return make


SCHEDULE = [f"--lr_scheduler.total_steps={STEPS}"]


@pytest.fixture(scope="module")
def straight(zygote: ZygoteClient, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """Events of a job of two groups that makes all steps in one run without checkpoints."""
    job = Job(zygote, tmp_path_factory.mktemp("straight"), groups=2, steps=STEPS, flags=SCHEDULE)
    try:
        job.run()
        return check(job, survivors=[0, 1])
    finally:
        job.close()


def digests(events: Iterable[Event]) -> set[tuple[int, str]]:
    """The final state of each rank of a group."""
    return {(event["rank"], event["digest"]) for event in named(events, "training_finished")}


def batches(events: Iterable[Event]) -> dict[tuple[int, int], tuple[int, int, str]]:
    """Map (step, slot) to the batches trained there. A step that was made twice had the same
    batches.
    """
    found: dict[tuple[int, int], tuple[int, int, str]] = {}
    for event in named(events, "step_committed"):
        data = event["data"]
        fact = (data["first_batch"], data["num_batches"], data["checksum"])
        assert found.setdefault((event["step"], data["slot"]), fact) == fact
    return found


def saved(events: Iterable[Event]) -> list[tuple[int, int]]:
    """List (replica, step) of each saved checkpoint."""
    return [(event["replica"], event["step"]) for event in named(events, "checkpoint_saved")]


def check_resumed(job: Job, events: list[Event], step: int) -> None:
    """Every rank loaded the checkpoint of `step` and continued after it, together with its
    peers.
    """
    for own in by_process(events).values():
        (loaded,) = named(own, "checkpoint_loaded")
        first = named(own, "step_committed")[0]
        assert (loaded["step"], first["step"]) == (step, step + 1)
        assert first["parent"] == loaded["lineage"]
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)
    assert not named(events, "heal_started", "exchange_failed")


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_never_stopped(
    make_job: Callable[..., Job], flags: Flags, straight: list[Event], mode: str
) -> None:
    """10 steps, a stop and 10 more have the batches and bytes of 20 steps in one run. One group
    saves.
    """
    first = make_job(groups=2, steps=STOP, flags=flags(mode=mode))
    first.run()
    before = check(first, survivors=[0, 1])
    assert saved(before) == [(0, 5), (0, STOP)]
    second = make_job(groups=2, steps=STEPS, flags=flags(mode=mode))
    second.run()
    after = second.events()
    check_resumed(second, after, STOP)
    assert digests(after) == digests(straight)
    assert batches([*before, *after]) == batches(straight)
    assert saved(after)[-1] == (0, STEPS)
    assert not named(after, "data_reset")


def test_all_groups_killed_at_once(
    make_job: Callable[..., Job], flags: Flags, straight: list[Event], folder: Path
) -> None:
    """After the death of all groups the job continues from its last checkpoint and reaches the same
    bytes.
    """
    faults = [{"replica": replica, "point": "backward", "step": 13} for replica in (0, 1)]
    job = make_job(groups=2, steps=STEPS, flags=flags(), hooks={"faults": faults})
    job.run()
    events = job.events()
    check_killed(job, events, [(replica, 0, "sigkill:backward") for replica in (0, 1)])
    check_resumed(job, [event for event in events if event["attempt"] == 1], STOP)
    assert digests(events) == digests(straight)
    assert batches(events) == batches(straight)
    assert not named(events, "started_anew")
    assert complete_steps(folder) == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("mode", "interval"), [("disabled", 5), pytest.param("async", STOP, marks=pytest.mark.slow)]
)
def test_writer_killed_in_its_save(
    make_job: Callable[..., Job], flags: Flags, folder: Path, mode: str, interval: int
) -> None:
    """Another group saves at its next commit, and no group loads the dead group's incomplete
    folder.
    """
    faults = [{"replica": 0, "point": "save", "step": STOP}]
    job = make_job(
        groups=2, steps=STEPS, flags=flags(interval, mode), hooks={"faults": faults, "hold": 3}
    )
    job.run()
    events = check(job, survivors=[1])
    check_killed(job, events, [(0, 0, "sigkill:save")])
    alone = [
        event["step"] for event in named(events, "step_committed") if event["participants"] == [1]
    ]
    taken_over = [step for replica, step in saved(events) if replica == 1]
    assert taken_over[0] == alone[0]
    assert complete_steps(folder) == sorted(step for _, step in saved(events))
    assert STOP not in complete_steps(folder)
    assert complete_steps(folder)[-1] == STEPS
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def damage(folder: Path) -> None:
    """Zero a block in the midst of a checkpoint's largest tensor, of which DCP takes no notice."""
    items = FileSystemReader(folder).read_metadata().storage_data.values()
    item = max(items, key=lambda each: each.length)
    with (folder / item.relative_path).open("r+b") as file:
        file.seek(item.offset + item.length // 2)
        file.write(bytes(4096))


def test_bytes_that_changed_on_disk_cost_a_start_and_the_steps_since_the_one_before(
    make_job: Callable[..., Job], flags: Flags, straight: list[Event], folder: Path
) -> None:
    """Groups that find damage while loading restart from the older checkpoint, to the bytes of an
    unstopped run.

    A group that chooses its checkpoint after another group found the damage needs no second start.
    """
    make_job(groups=2, steps=STOP, flags=flags()).run()
    damage(folder / f"step-{STOP}")
    job = make_job(groups=2, steps=STEPS, flags=flags())
    job.run()
    events = job.events()
    failed = [group for group in job.groups if group.ended]
    assert [group.ended for group in failed] == [[[1]]] * len(failed), exits(job)
    assert failed
    said = "in it is not what was saved (its digest is another one); the next start goes on from step 5"
    assert all(said in job.output(group.replica) for group in failed)
    last = {group.replica: group.attempt for group in job.groups}
    check_resumed(job, [event for event in events if event["attempt"] == last[event["replica"]]], 5)
    skipped = named(events, "checkpoint_skipped")
    assert {(event["step"], event["instead"]) for event in skipped} == {(STOP, 5)}
    assert digests(events) == digests(straight)
    assert complete_steps(folder) == [5, 10, 15, 20]


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["data_parallel_shard", "tensor_parallel", "pipeline_parallel"])
def test_bytes_that_changed_are_found_however_a_group_is_sharded(
    make_job: Callable[..., Job], flags: Flags, folder: Path, degree: str
) -> None:
    """Each rank checks the digest of its own shards, so a rank whose shards did not change loads
    without error.
    """
    shape: dict[str, Any] = {
        "groups": 1,
        "ranks": 2,
        "flags": [*flags(), f"--parallelism.{degree}_degree=2"],
    }
    make_job(steps=STOP, **shape).run()
    damage(folder / f"step-{STOP}")
    job = make_job(steps=STOP + 2, **shape)
    job.run()
    (codes,) = job.groups[0].ended
    assert 1 in codes, exits(job)  # the other rank may have been ended with it
    assert any("is damaged: " in job.output(0, rank) for rank in (0, 1))
    check_resumed(job, [event for event in job.events() if event["attempt"] == 1], 5)


def test_a_group_that_leaves_when_it_is_found_corrupt(
    make_job: Callable[..., Job], flags: Flags, folder: Path
) -> None:
    """A group asked to leave in the round that finds its bytes corrupt leaves at once, and
    withdraws its checkpoint.
    """
    hooks = {
        "chaos": [{"replica": 0, "fault": "flip_parameter", "steps": [5]}],
        "gates": [{"name": "go", "replica": 0, "step": 6}],
        "hold": 1,
    }
    job = make_job(groups=3, flags=flags(), hooks=hooks)
    job.start()
    job.wait_for_gate("go", 0)
    job.send_signal(0, signal.SIGTERM)
    job.wait_until(lambda: (job.markers / "told-0-0").exists(), 30, "the group was told")
    job.mark("down-0-0")  # the others soon wait for the next attempt
    job.mark("go")
    assert job.wait_for_end(0) == [0]
    job.start_again(0)
    job.finish()
    events = job.events()
    (drained,) = named(events, "drained")
    assert (drained["replica"], drained["in_order"], drained["step"]) == (0, True, 5)
    assert {tuple(event["minority"]) for event in named(events, "digest_mismatch")} == {(0,)}
    assert [(e["replica"], e["step"]) for e in named(events, "checkpoint_withdrawn")] == [(0, 5)]
    assert saved(events)[:2] == [(0, 5), (1, 6)]
    assert complete_steps(folder) == [6, 10, 15, 16]
    healed = named(events, "heal_finished")
    assert [(e["replica"], e["attempt"]) for e in healed] == [(0, 1)]
    committed = named(events, "step_committed")
    # Its digest was of wrong bytes.
    check_one_trajectory(e for e in committed if (e["replica"], e["step"]) != (0, 5))
    check_finished(job, events, job.steps)


def test_a_drained_job_goes_on(
    make_job: Callable[..., Job], flags: Flags, straight: list[Event], folder: Path
) -> None:
    """All groups get SIGTERM during training (a preemption). One saves its last step, and a later
    job continues there.

    The config asks for a last save of the model only, torchtitan's default. This save must be
    complete all the same.
    """
    model_only = [flag for flag in flags(mode="async") if "last-save-model-only" not in flag]
    gates = [{"name": "go", "replica": replica, "step": STOP + 2} for replica in (0, 1)]
    job = make_job(groups=2, steps=STEPS, flags=model_only, hooks={"gates": gates})
    job.start()
    job.wait_until(lambda: STOP in complete_steps(folder), 60, "step 10 is saved")
    for replica in (0, 1):
        job.wait_for_gate("go", replica)
        job.send_signal(replica, signal.SIGTERM)
    job.wait_until(
        lambda: len(list(job.markers.glob("told-*-0"))) == 2, 30, "both groups were told"
    )
    job.mark("go")
    job.finish()
    assert [group.finished for group in job.groups] == [True, True], exits(job)
    drained = named(job.events(), "drained")
    assert [event["in_order"] for event in drained] == [True, True]
    last = max(event["step"] for event in drained)
    assert STOP < last < STEPS
    assert saved(job.events())[-1][1] == last
    assert complete_steps(folder)[-1] == last
    again = make_job(groups=2, steps=STEPS, flags=flags())
    again.run()
    check_resumed(again, again.events(), last)
    assert digests(again.events()) == digests(straight)
    assert batches([*job.events(), *again.events()]) == batches(straight)


@pytest.mark.slow
def test_other_ranks_and_other_groups_go_on(
    make_job: Callable[..., Job], flags: Flags, folder: Path
) -> None:
    """1 group of 2 ranks continues exactly in the data of 2 groups of 1. For 3 groups the data
    restarts, with an event.
    """
    straight = make_job(groups=2, steps=STOP + 4, flags=SCHEDULE)
    straight.run()
    expected = check(straight, survivors=[0, 1])
    make_job(groups=2, steps=STOP, flags=flags()).run()

    load = [f"--checkpoint.load_step={STOP}"]
    wide = make_job(groups=1, ranks=2, steps=STOP + 4, flags=[*flags(), *load])
    wide.run()
    events = wide.events()
    check_resumed(wide, events, STOP)
    assert not named(events, "data_reset")
    read = {
        (event["step"], event["rank"]): (event["data"]["first_batch"], 1, event["data"]["checksum"])
        for event in named(events, "step_committed")
    }
    assert read == {key: fact for key, fact in batches(expected).items() if key[0] > STOP}
    losses = {event["step"]: event["loss"] for event in named(expected, "step_committed")}
    for event in named(events, "step_committed"):
        assert event["loss"] == pytest.approx(losses[event["step"]], rel=1e-5)

    more = make_job(
        groups=3, steps=STOP + 4, flags=[*flags(), *load, "--fault_tolerance.job_id=another"]
    )
    more.run()
    events = more.events()
    check_resumed(more, events, STOP)
    reasons = {event["reason"] for event in named(events, "data_reset")}
    assert len(reasons) == 1
    assert "2 shards, now into 3" in reasons.pop()
    assert {
        event["data"]["first_batch"]
        for event in named(events, "step_committed")
        if event["step"] == STOP + 1
    } == {0}


def test_a_foreign_folder_is_refused(make_job: Callable[..., Job], flags: Flags) -> None:
    """Another flavor's checkpoints: one line, exit status 2, no restart."""
    make_job(groups=1, steps=2, flags=flags()).run()
    job = make_job(groups=1, steps=4, flags=[*flags(), "--model.flavor=debugmodel"])
    job.run()
    assert [worker.code for worker in job.groups[0].workers] == [2], exits(job)
    assert job.groups[0].attempt == 0
    lines = [line for line in job.output(0).splitlines() if line.startswith("titan_ft: ")]
    assert len(lines) == 1
    for part in ("step-2", "llama3 debugmodel", "llama3 tiny", "checkpoint.folder"):
        assert part in lines[0]
    assert "Traceback" not in job.output(0)


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["", "data_parallel_shard", "pipeline_parallel"])
def test_hugging_faces_format_there_and_back(
    make_job: Callable[..., Job], tmp_path: Path, degree: str
) -> None:
    """One group writes the final model in HF format; another job starts from it, heals, and writes
    it again.

    With an LR of 0 an update changes nothing, so both jobs hold the same weights, bit for bit.
    Groups of two ranks write two files by an index that also names weights that the model lacks.
    """
    ranks = 2 if degree else 1
    shape: dict[str, Any] = {"groups": 2, "ranks": ranks}
    save = ["--checkpoint.enable", "--checkpoint.interval=100", "--checkpoint.last_save_in_hf"]
    if degree:
        save.append(f"--parallelism.{degree}_degree=2")
        save.append(f"--model.hf_assets_path={write_assets(tmp_path / 'assets')}")
    first = make_job(steps=4, flags=[*save, f"--checkpoint.folder={tmp_path / 'first'}"], **shape)
    first.run()
    check(first, survivors=[0, 1])
    load = [
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={tmp_path / 'first' / 'step-4'}",
    ]
    faults = [{"replica": 1, "point": "backward", "step": 3}]
    second = make_job(
        steps=12,
        flags=[*save, *load, f"--checkpoint.folder={tmp_path / 'second'}", "--optimizer.lr=0"],
        hooks={"faults": faults, "hold": 2},
        **shape,
    )
    second.run()
    events = check(second, survivors=[0])
    check_killed(second, events, [(1, 0, "sigkill:backward")])
    assert {event["replica"] for event in named(events, "heal_finished")} == {1}
    for job, step in ((first, 4), (second, 12)):
        saved = named(job.events(), "checkpoint_saved")
        assert [event["step"] for event in saved] == [step]
    weights: list[dict[str, bytes]] = []
    for name in ("first", "second"):
        paths = list((tmp_path / name).glob("step-*/*.safetensors"))
        assert len(paths) == ranks
        files = [safetensors.numpy.load_file(path) for path in paths]
        weights.append({key: value.tobytes() for file in files for key, value in file.items()})
    assert weights[0] == weights[1]
    assert len(weights[0]) == 30  # of 3 layers


def write_assets(folder: Path) -> Path:
    """Write the tokenizer, and an index as that of an old export."""
    shutil.copytree(TOKENIZER, folder)
    files = {"model.embed_tokens.weight": "model-00001-of-00003.safetensors"}
    files |= {"model.norm.weight": "model-00003-of-00003.safetensors"}
    files |= {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": "model-00002-of-00003"
        for layer in range(3)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.slow
def test_a_last_save_that_cannot_be_made_as_asked(
    make_job: Callable[..., Job], tmp_path: Path, folder: Path
) -> None:
    """Without the HF format's module the run ends once, with status 1 and one line, and saves in
    the DCP format.
    """
    (tmp_path / "stub" / "safetensors").mkdir(parents=True)
    (tmp_path / "stub" / "safetensors" / "__init__.py").write_text(
        "raise ImportError(\"No module named 'safetensors'\")"
    )
    run_dir = tmp_path / "run"
    flags = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", f"--checkpoint.folder={folder}"]
    flags += ["--checkpoint.interval=2", "--training.steps=5", "--training.seq_len=32", *SCHEDULE]
    launch = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas=2",
        "--ranks-per-replica=1",
    ]
    launch += [f"--run-dir={run_dir}"]
    paths = [str(tmp_path / "stub"), str(REPOSITORY)]
    ended = subprocess.run(
        [*launch, "--", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "could not be saved as asked" in line]
    assert "No module named 'safetensors'" in line
    assert str(folder / "step-5") in line
    events = list(read_events(run_dir / "events"))
    assert not [event for event in events if isinstance(event, ReplicaRestarted)]
    assert [event.replica for event in events if isinstance(event, ReplicaGaveUp)] == [0]
    assert [
        (event.replica, event.step) for event in events if isinstance(event, CheckpointFailed)
    ] == [(0, 5)]
    commits = [(event.replica, event.step) for event in events if isinstance(event, StepCommitted)]
    assert sorted(commits) == [(replica, step) for replica in (0, 1) for step in range(1, 6)]
    assert complete_steps(folder) == [2, 4, 5]
    goes_on = [
        f"--checkpoint.folder={folder}",
        "--checkpoint.enable",
        "--training.seq_len=32",
        *SCHEDULE,
    ]
    second = make_job(groups=2, steps=7, flags=goes_on, tiny=False)
    second.run()
    check_resumed(second, second.events(), 5)


STOCK = [
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.data_parallel_shard_degree=2",
]


def records(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the records of each rank of HSDP 2 x 2, or of two groups of two ranks: steps, then the
    final digest.
    """
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        replica, rank = map(int, path.stem.split("-"))
        found[2 * replica + rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


@pytest.mark.slow
def test_stock_goes_on_from_a_checkpoint_of_ours(
    make_job: Callable[..., Job], flags: Flags, tmp_path: Path
) -> None:
    """Stock HSDP with as many data ranks continues our checkpoint, bit for bit as two groups that
    never stopped.
    """
    shape: dict[str, Any] = {"groups": 2, "ranks": 2}
    logs = {name: tmp_path / name for name in ("whole", "stock")}
    for path in logs.values():
        path.mkdir()
    make_job(steps=STOP, flags=SCHEDULE, hooks={"record": str(logs["whole"])}, **shape).run()
    make_job(steps=5, flags=flags(), **shape).run()
    job = make_job(
        groups=1,
        ranks=4,
        steps=STOP,
        flags=["--fault_tolerance.no-enable", *flags(100), *STOCK],
        hooks={"record": str(logs["stock"])},
    )
    job.run(120)
    assert job.groups[0].finished, job.output(0)
    whole, stock = (records(path) for path in logs.values())
    assert stock.keys() == whole.keys() == {0, 1, 2, 3}
    for rank, found in stock.items():
        assert [each.get("step") for each in found] == [6, 7, 8, 9, 10, None]
        for each in (*found, *whole[rank]):
            each.pop("loss", None)  # the same sum of the same losses, which stock adds in float32
        assert found == whole[rank][5:]


@pytest.mark.slow
def test_ours_goes_on_from_a_checkpoint_of_stock(
    make_job: Callable[..., Job], flags: Flags, folder: Path, tmp_path: Path
) -> None:
    """Our groups continue with stock's weights, moments and counters. The data restarts, with an
    event.
    """
    record = tmp_path / "record"
    record.mkdir()
    stock = make_job(
        groups=1,
        ranks=4,
        steps=5,
        flags=["--fault_tolerance.no-enable", *flags(), *STOCK],
        hooks={"record": str(record)},
    )
    stock.run(120)
    assert stock.groups[0].finished, stock.output(0)
    assert complete_steps(folder) == [5]
    job = make_job(groups=2, ranks=2, steps=7, flags=flags())
    job.run()
    events = job.events()
    check_resumed(job, events, 5)
    resets = {(event["step"], event["reason"]) for event in named(events, "data_reset")}
    assert resets == {(5, "the checkpoint is not of a fault-tolerant run")}
    first = [event for event in named(events, "step_committed") if event["step"] == 6]
    assert {event["data"]["first_batch"] for event in first} == {0}
    (last,) = {records(record)[rank][-2]["loss"] for rank in range(4)}
    assert all(event["loss"] < last + 0.5 for event in first)  # random weights are far above
