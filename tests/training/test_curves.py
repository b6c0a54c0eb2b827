# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's curves are in one place, however often the group is started."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_ft.config import FaultTolerance
from titan_ft.host import cpu

cpu.prepare()

import torchtitan.components.metrics as titan_metrics  # noqa: E402  # after the seam
import torchtitan.train  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.tools import profiling  # noqa: E402

from titan_ft.run.appender import retry_waiting  # noqa: E402
from titan_ft.training.curves import (  # noqa: E402
    GroupCurves,
    keep_curves,
    keep_going_without_config_file,
    keep_traces,
    wandb_environment,
)


def config(
    folder: Path,
    replica: int = 1,
    *,
    wandb: bool = False,
    all_ranks: bool = False,
    job_id: str = "",
) -> Any:
    metrics = SimpleNamespace(
        enable_tensorboard=not wandb,
        enable_wandb=wandb,
        save_tb_folder="tb",
        save_for_all_ranks=all_ranks,
    )
    return SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(folder)),
        metrics=metrics,
        fault_tolerance=FaultTolerance(
            enable=True, replica_id=replica, group_size=4, job_id=job_id
        ),
        to_dict=lambda: {"a": 1},
    )


def build_logger(
    monkeypatch: pytest.MonkeyPatch, job_config: Any, rank: int = 0
) -> titan_metrics.BaseLogger:
    """Return what torchtitan builds in a worker."""
    for name in ("TensorBoardLogger", "WandBLogger"):
        monkeypatch.setattr(titan_metrics, name, getattr(titan_metrics, name))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    keep_curves(job_config, rank)
    return titan_metrics._build_metric_logger(job_config, SimpleNamespace(pp_enabled=False))  # type: ignore[arg-type]


def read(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    return [(point.step, point.value) for point in shown.Scalars(tag)]


def attempt(folder: Path, *points: tuple[int, float]) -> None:
    """Log points in a process that does not end in order."""
    child = os.fork()
    if child == 0:
        try:
            curves = GroupCurves(folder)
            for step, loss in points:
                curves.log({"loss": loss, "lr": 0.5}, step)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(("all_ranks", "below"), [(False, ""), (True, "rank_0")])
def test_folder_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_ranks: bool, below: str
) -> None:
    """Whenever torchtitan builds its logger, the folder is that of the group; with every rank's, of
    the rank.
    """
    for step in (1, 2):
        logger = build_logger(monkeypatch, config(tmp_path, all_ranks=all_ranks))
        logger.log({"loss": 1.0 / step}, step)
        logger.close()
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["replica_1"]
    assert read(tmp_path / "tb" / "replica_1" / below) == [(1, 1.0), (2, 0.5)]


def test_attempt_that_is_killed_leaves_all_its_points(tmp_path: Path) -> None:
    """The next attempt continues at the step of its heal; points of a lost state are dropped."""
    attempt(tmp_path, (1, 5.0), (10, 4.0), (20, 3.0))
    assert read(tmp_path) == [(1, 5.0), (10, 4.0), (20, 3.0)]
    attempt(tmp_path, (40, 2.0), (50, 1.0))
    assert [step for step, _ in read(tmp_path)] == [1, 10, 20, 40, 50]
    attempt(tmp_path, (20, 2.5), (30, 2.25))
    assert read(tmp_path) == [(1, 5.0), (10, 4.0), (20, 2.5), (30, 2.25)]
    assert read(tmp_path, "lr") == [(1, 0.5), (10, 0.5), (20, 0.5), (30, 0.5)]


def test_step_that_is_made_again_by_one_process(tmp_path: Path) -> None:
    """A group that healed back to a step shows its last values; validation at a step does not drop
    its training.
    """
    curves = GroupCurves(tmp_path)
    for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (3, 1.0), (4, 0.5)):
        curves.log({"loss": loss}, step)
        curves.log({"validation_metrics/loss": loss}, step)
    curves.close()
    assert read(tmp_path) == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)]
    assert read(tmp_path, "validation_metrics/loss") == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)]


def test_nothing_is_made_before_the_first_point(tmp_path: Path) -> None:
    """An attempt that dies during its heal leaves no file that would show as a restart."""
    GroupCurves(tmp_path / "folder").close()
    assert not (tmp_path / "folder").exists()


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group trains on; its points wait, and are all there once the folder can be written. Two
    lines say so.
    """
    said: list[str] = []
    monkeypatch.setattr(
        "titan_ft.training.curves.logger", SimpleNamespace(info=str, warning=said.append)
    )
    folder = tmp_path / "file" / "replica_0"
    folder.parent.touch()
    curves = GroupCurves(folder)
    for step in (1, 2):
        curves.log({"loss": 1.0 / step}, step)
    curves.close()
    assert said == [f"{folder} cannot be written (Not a directory): its curves wait until it can"]
    folder.parent.unlink()
    retry_waiting()
    assert said[1:] == [f"{folder} can be written again"]
    assert read(folder) == [(1, 1.0), (2, 0.5)]


def test_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """A point of which half is in the file is completed first; TensorBoard reads all of them."""
    curves, before = GroupCurves(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    curves.log({"loss": 4.0, "lr": 0.5}, 1)
    (file,) = tmp_path.iterdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 30, before[1]))
        for step in (2, 3, 3):
            curves.log({"loss": 1.0 * step, "lr": 0.5}, step)
        assert read(tmp_path) == [(1, 4.0)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    curves.log({"loss": 9.0, "lr": 0.5}, 4)
    assert read(tmp_path) == [(1, 4.0), (2, 2.0), (3, 3.0), (4, 9.0)]
    assert [step for step, _ in read(tmp_path, "lr")] == [1, 2, 3, 4]


def test_training_has_no_thread_for_its_curves(tmp_path: Path) -> None:
    """torch's writer has one, which hands the error of a full disk to the training thread."""
    threads = threading.active_count()
    GroupCurves(tmp_path).log({"loss": 1.0}, 1)
    assert threading.active_count() == threads


def test_wandb_run_is_the_same_for_every_attempt(tmp_path: Path) -> None:
    """By the first existing name: the user's, the launcher's, the job's, the folder's; groups and
    jobs differ.
    """
    first = wandb_environment({}, config(tmp_path / "a"), 0)
    assert first == wandb_environment({}, config(tmp_path / "a"), 0)
    assert first["WANDB_RESUME"] == "allow"
    assert first["WANDB_RUN_ID"] == f"{first['WANDB_RUN_GROUP']}-replica-1"
    other = wandb_environment({}, config(tmp_path / "b"), 0)
    assert other["WANDB_RUN_GROUP"] != first["WANDB_RUN_GROUP"]
    peer = wandb_environment({}, config(tmp_path / "a", replica=2), 0)
    assert (peer["WANDB_RUN_GROUP"], peer["WANDB_RUN_ID"][-1]) == (first["WANDB_RUN_GROUP"], "2")
    launched = {"WANDB_RUN_GROUP": "run-1a2b"}
    named = config(tmp_path / "a", job_id="my.job")
    assert wandb_environment(launched, named, 0)["WANDB_RUN_ID"] == "run-1a2b-replica-1"
    assert wandb_environment({}, named, 0)["WANDB_RUN_ID"] == "my-job-replica-1"
    users = wandb_environment(
        {**launched, "WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, named, 0
    )
    assert (users["WANDB_RUN_ID"], users["WANDB_RUN_GROUP"], users["WANDB_RESUME"]) == (
        "mine-replica-1",
        "run-1a2b",
        "must",
    )
    ranks = [
        wandb_environment({}, config(tmp_path / "a", all_ranks=True), rank)["WANDB_RUN_ID"]
        for rank in (0, 1)
    ]
    assert ranks[0] != ranks[1]


@pytest.mark.slow  # it starts a service of its own
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts of a group are one run of W&B, in the job's group of runs."""
    wandb = pytest.importorskip("wandb")
    job_config = config(tmp_path, wandb=True)
    environ = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_RUN_GROUP": "the-job"}
    for name, text in {**environ, **wandb_environment(environ, job_config, 0)}.items():
        monkeypatch.setenv(name, text)
    for step in (1, 2):
        logger = build_logger(monkeypatch, job_config)
        assert (wandb.run.id, wandb.run.group) == ("the-job-replica-1", "the-job")
        logger.log({"loss": 1.0}, step)
        logger.close()
        wandb.teardown()
    runs = sorted(
        path.name for path in (tmp_path / "tb" / "replica_1" / "wandb").glob("offline-run-*")
    )
    assert runs
    assert all(name.endswith("-the-job-replica-1") for name in runs)


def test_each_group_has_its_own_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All groups have a rank 0, and would write to the same file."""
    profile = torch.profiler.profile
    # torchtitan asks for a GPU's activities, also where there is none.
    monkeypatch.setattr(
        torch.profiler,
        "profile",
        lambda activities, **options: profile(
            activities=[each for each in activities if each], **options
        ),
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for name in ("maybe_enable_profiling", "maybe_enable_memory_snapshot"):
        monkeypatch.setattr(torchtitan.train, name, getattr(torchtitan.train, name))
    for replica in (0, 1):
        job_config = JobConfig()
        job_config.fault_tolerance = FaultTolerance(enable=True, replica_id=replica, group_size=2)
        settings = job_config.profiling
        settings.enable_profiling, settings.profile_freq = True, 3
        settings.profiler_warmup, settings.profiler_active = 1, 1
        keep_traces(job_config, attempt=2)
        assert job_config.comm.save_traces_folder == f"comm_traces/replica_{replica}/attempt_2"
        with torchtitan.train.maybe_enable_profiling(
            settings, base_folder=str(tmp_path)
        ) as profiler:
            for _ in range(3):
                profiler.step()
    traces = tmp_path / "profile_traces" / "iteration_3"
    assert sorted(path.relative_to(traces) for path in traces.rglob("*.json")) == [
        Path("replica_0/rank0_trace.json"),
        Path("replica_1/rank0_trace.json"),
    ]
    assert torchtitan.train.maybe_enable_memory_snapshot.keywords == {"leaf_folder": "replica_1"}


@pytest.mark.parametrize("begins", [True, False])
def test_trace_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begins: bool
) -> None:
    """The group trains on, with a line in its log; an error of the training itself is none of the
    profiler's.
    """
    said: list[str] = []
    monkeypatch.setattr("titan_ft.training.curves.logger", SimpleNamespace(warning=said.append))

    def no_space(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @contextlib.contextmanager
    def enable(config: object, **settings: object) -> Iterator[Any]:
        if not begins:
            no_space()
        yield SimpleNamespace(step=no_space)
        no_space()

    monkeypatch.setattr(profiling, "maybe_enable_profiling", enable)
    for name in ("maybe_enable_profiling", "maybe_enable_memory_snapshot"):
        monkeypatch.setattr(torchtitan.train, name, getattr(torchtitan.train, name))
    job_config = JobConfig()
    job_config.fault_tolerance = FaultTolerance(enable=True, replica_id=0, group_size=2)
    keep_traces(job_config, attempt=0)
    with torchtitan.train.maybe_enable_profiling(job_config.profiling) as profiler:
        assert (profiler is not None) == begins
        if profiler:
            profiler.step()
    assert len(said) == (2 if begins else 1)
    assert all("No space left on device" in line for line in said)
    with (
        pytest.raises(OSError, match="of the training"),
        torchtitan.train.maybe_enable_profiling(job_config.profiling),
    ):
        raise OSError("of the training")


def test_config_that_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group trains all the same, with a line in its log."""
    said: list[str] = []
    monkeypatch.setattr("titan_ft.training.curves.logger", SimpleNamespace(warning=said.append))

    def no_space() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job_config: Any = SimpleNamespace(maybe_log=no_space)
    keep_going_without_config_file(job_config)
    job_config.maybe_log()
    assert said == ["the config is not saved: [Errno 28] No space left on device"]
