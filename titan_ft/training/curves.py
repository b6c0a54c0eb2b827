# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's curves in TensorBoard and W&B: one folder and one run of them, however often the group is started.

And its traces of torchtitan's profiler.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torchtitan.components.metrics as titan_metrics
import torchtitan.train
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, WandBLogger
from torchtitan.config import JobConfig
from torchtitan.tools import profiling
from torchtitan.tools.logging import logger


class GroupCurves(BaseLogger):
    """Write the curves of one rank of a group to its own folder of TensorBoard's.

    torchtitan's own logger takes another folder, named by the minute, at each start, so that a group's curves are as
    many fragments as it had attempts. The file is opened with the first point: where the curves go on is known only
    then. Points at that step or behind it, of a state that is lost, are dropped by TensorBoard.

    Args:
        folder: for this rank's files, those of earlier attempts included.
    """

    def __init__(self, folder: Path, log_dir: str = "", tag: str | None = None) -> None:
        self._folder, self._tag = folder, tag
        self._writer: SummaryWriter | None = None
        self._last: dict[str, int] = {}
        """The step of each curve's last point."""
        self._failed = False
        logger.info(f"TensorBoard logging enabled. Logs will be saved at {folder}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write a point of each curve, at once: a process that is killed leaves all that it has logged."""
        if self._failed:
            return
        try:
            self._write({name if self._tag is None else f"{self._tag}/{name}": metrics[name] for name in metrics}, step)
        except OSError as error:  # the disk is full, say: the group must train on
            self._failed = True
            logger.error(f"{self._folder} cannot be written ({error.strerror}): this group's curves end at step {step}")

    def _write(self, curves: dict[str, Any], step: int) -> None:
        writer = self._writer
        if writer is None or any(self._last.get(name, -1) >= step for name in curves):
            writer = self._open(step)
        for name, value in curves.items():
            writer.add_scalar(name, value, step)
            self._last[name] = step
        writer.flush()

    def close(self) -> None:
        if self._writer is not None and not self._failed:
            self._writer.close()

    def _open(self, step: int) -> SummaryWriter:
        """Go on at a step: what is in the folder of it and of later ones is of a state that is not the job's."""
        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=step)
        self._last.clear()
        return self._writer


def keep_curves(job_config: JobConfig, rank: int) -> None:
    """Let torchtitan's metrics processors, also a user's own, log to the folders of this group.

    They are TB_FOLDER/replica_N, with rank_M below it where all ranks save theirs.
    """
    metrics, replica = job_config.metrics, job_config.fault_tolerance.replica_id
    folder = Path(job_config.job.dump_folder, metrics.save_tb_folder, f"replica_{replica}")
    if metrics.save_for_all_ranks:
        folder /= f"rank_{rank}"
    # Both are module globals of torchtitan, called with the folder that is named by the minute.
    titan_metrics.TensorBoardLogger = partial(GroupCurves, folder)
    titan_metrics.WandBLogger = lambda log_dir, config, tag=None: WandBLogger(str(folder), config, tag)


def keep_traces(job_config: JobConfig) -> None:
    """Let torchtitan's profiler write each group's traces and memory snapshots to a folder of its own.

    That is FOLDER/iteration_N/replica_R, as in torchtitan's own fault-tolerant runs: all groups have a rank 0.
    """
    folder = f"replica_{job_config.fault_tolerance.replica_id}"
    for enable in (profiling.maybe_enable_profiling, profiling.maybe_enable_memory_snapshot):
        setattr(torchtitan.train, enable.__name__, partial(enable, leaf_folder=folder))


def wandb_environment(environ: Mapping[str, str], job_config: JobConfig, rank: int) -> dict[str, str]:
    """Return what makes all attempts of this group one run of W&B, in a group of runs that is the job's.

    The job is called as WANDB_RUN_ID says, or WANDB_RUN_GROUP (`titan-ft launch` sets it to the name of its first
    launch in the folder), or `job_id`; else by its folder.
    """
    config = job_config.fault_tolerance
    root = Path(job_config.job.dump_folder).absolute()
    by_folder = f"{root.name}-{hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()}"
    names = (environ.get("WANDB_RUN_ID"), environ.get("WANDB_RUN_GROUP"), config.job_id, by_folder)
    job = next(name for name in names if name)
    whose = f"replica-{config.replica_id}"
    if job_config.metrics.save_for_all_ranks:
        whose += f"-rank-{rank}"
    return {
        "WANDB_RUN_ID": re.sub(r"[^A-Za-z0-9_-]+", "-", f"{job}-{whose}"),  # W&B knows no other characters in ids
        "WANDB_RUN_NAME": f"{environ.get('WANDB_RUN_NAME') or job} {whose}",
        "WANDB_RUN_GROUP": environ.get("WANDB_RUN_GROUP") or job,
        "WANDB_RESUME": environ.get("WANDB_RESUME") or "allow",
    }
