# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's curves in TensorBoard and W&B: one folder and one run for all starts of the group.

Also its traces of torchtitan's profiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from titan_ft.host.titan import (
    BaseLogger,
    JobConfig,
    WandBLogger,
    logger,
    use_curve_loggers,
    wrap_profilers,
)
from titan_ft.run.curve_file import CurveFile


class GroupCurves(BaseLogger):
    """Write the curves of one rank of a group to its own folder of TensorBoard's.

    At each start torchtitan's own logger takes another folder, named by the minute. So a group's
    curves would be in as many fragments as it had attempts. The file is opened with the first
    point, because only that point shows where the curves continue. TensorBoard then drops later
    points of a lost state.

    Args:
        folder: for this rank's files, also those of earlier attempts.
    """

    def __init__(self, folder: Path, log_dir: str = "", tag: str | None = None) -> None:
        self._tag = tag
        self._file = CurveFile(folder, logger.warning)
        self._last: dict[str, int] = {}
        """The step of each curve's last point."""
        logger.info(f"TensorBoard logging enabled. Logs will be saved at {folder}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write a point of each curve at once, so that a killed process leaves all points that it
        has logged.
        """
        prefix = "" if self._tag is None else f"{self._tag}/"
        values = {prefix + name: float(value) for name, value in metrics.items()}
        # An earlier step than the last one: this group has gone back to an earlier state.
        has_gone_back = any(self._last.get(name, -1) >= step for name in values)
        anew = not self._last or has_gone_back
        if anew:
            self._last.clear()
        self._last.update(dict.fromkeys(values, step))
        self._file.add(step, values, time.time(), anew=anew)

    def close(self) -> None:
        """Do nothing. Points that wait for room on the disk are written until the process ends."""


def keep_curves(job_config: JobConfig, rank: int) -> None:
    """Let torchtitan's metrics processors, also a user's own, log to the folders of this group.

    The folders are TB_FOLDER/replica_N, with rank_M below if all ranks save their curves.
    """
    metrics, replica = job_config.metrics, job_config.fault_tolerance.replica_id
    folder = Path(job_config.job.dump_folder, metrics.save_tb_folder, f"replica_{replica}")
    if metrics.save_for_all_ranks:
        folder /= f"rank_{rank}"
    use_curve_loggers(
        tensorboard=partial(GroupCurves, folder),
        wandb=lambda log_dir, config, tag=None: WandBLogger(str(folder), config, tag),
    )


def keep_traces(job_config: JobConfig, attempt: int) -> None:
    """Let torchtitan write each group's traces, memory snapshots and flight records to a folder of
    its own.

    All groups have a rank 0. Traces are in FOLDER/iteration_N/replica_R, as in torchtitan's own
    fault-tolerant runs. Flight records are in FOLDER/replica_R/attempt_A, so that a restarted group
    does not overwrite the last record.
    """
    comm = job_config.comm
    folder = f"replica_{job_config.fault_tolerance.replica_id}"
    comm.save_traces_folder = f"{comm.save_traces_folder}/{folder}/attempt_{attempt}"
    wrap_profilers(lambda enable: partial(_trace, enable, leaf_folder=folder))


def keep_going_without_config_file(job_config: JobConfig) -> None:
    """Log a config that cannot be saved (`job.save_config_file`), instead of ending the group."""
    log = job_config.maybe_log

    def log_or_warn() -> None:
        try:
            log()
        except OSError as error:
            logger.warning(f"the config is not saved: {error}")

    job_config.maybe_log = log_or_warn


@contextlib.contextmanager
def _trace(enable: Callable[..., Any], config: Any, **settings: Any) -> Iterator[_Profiler | None]:
    """Profile as torchtitan does; log a trace that cannot be written, instead of ending the group.

    torchtitan writes the trace in a call of the training thread.
    """
    with contextlib.ExitStack() as stack:
        profiler = None
        with _warned():
            profiler = stack.enter_context(enable(config, **settings))
        yield None if profiler is None else _Profiler(profiler)
        with _warned():
            stack.close()


class _Profiler:
    """torchtitan's profiler, as far as its training loop calls it."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler

    def step(self, *args: Any, **settings: Any) -> None:
        """Count a step. A trace may be due after it."""
        with _warned():
            self._profiler.step(*args, **settings)


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning(f"a trace of the profiler is not written: {error}")


def wandb_environment(
    environ: Mapping[str, str], job_config: JobConfig, rank: int
) -> dict[str, str]:
    """Return the environment variables that make all attempts of this group one run of W&B.

    The runs of all groups form one W&B group, named after the job. The job's name is WANDB_RUN_ID,
    or WANDB_RUN_GROUP (`titan-ft launch` sets it to the name of its first launch in the folder), or
    `job_id`, or the name of its folder.
    """
    config = job_config.fault_tolerance
    root = Path(job_config.job.dump_folder).absolute()
    by_folder = f"{root.name}-{hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()}"
    given = environ.get("WANDB_RUN_ID") or environ.get("WANDB_RUN_GROUP")
    job = given or config.job_id or by_folder
    writer = f"replica-{config.replica_id}"
    if job_config.metrics.save_for_all_ranks:
        writer += f"-rank-{rank}"
    return {
        # W&B allows no other characters in an id.
        "WANDB_RUN_ID": re.sub(r"[^A-Za-z0-9_-]+", "-", f"{job}-{writer}"),
        "WANDB_RUN_NAME": f"{environ.get('WANDB_RUN_NAME') or job} {writer}",
        "WANDB_RUN_GROUP": environ.get("WANDB_RUN_GROUP") or job,
        "WANDB_RESUME": environ.get("WANDB_RESUME") or "allow",
    }
