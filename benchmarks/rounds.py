# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Semi-synchronous training beside the synchronous mode, with equal tokens: the loss, and the
bytes.

All runs train the same model for the same number of steps with the same tokens in each, from the
same seed. Their loss at the end is compared, on the same validation text. That is the loss of the
model that all groups agree on. It is less noisy than training losses, which with rounds belong to
models that drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import read_run
from benchmarks.run import SURVIVOR, BenchError, Run, progress
from benchmarks.systems import OURS, Config, Job, derive_config
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import StepCommitted

STEPS = 300
SEQ_LEN = 128
GLOBAL_BATCH = 4
"""Sequences of a step, of all groups together."""
SYNC_STEPS = (30, 10, 100)  # the one that is published first, should the time not do for all
OUTER_LRS = (0.7, 0.4)
NUMS_GROUPS = (2, 4)
SEED = 42
OTHER_SEED = 43
VALIDATION = {"enable": True, "freq": STEPS, "steps": 8, "local_batch_size": 16, "seq_len": SEQ_LEN}
SETTINGS = f"{STEPS} steps of {GLOBAL_BATCH} x {SEQ_LEN} tokens"
TIMEOUT_SECONDS = 1800.0
_VALIDATED = re.compile(r"validate step:\s*(\d+)\s+(?:\x1b\[[\d;]*m)?loss:\s*([\d.]+)")
_SIZE = re.compile(r"size:\s*([\d,]+) total parameters")


@dataclass(frozen=True)
class Case:
    """How the groups of a run meet.

    Attributes:
        sync_steps: steps of a round; 1 = the synchronous mode.
        outer_lr: of DiLoCo; nothing with the synchronous mode.
    """

    num_groups: int
    sync_steps: int = 1
    outer_lr: float | None = None
    seed: int = SEED

    @property
    def name(self) -> str:
        """Return its name in the file of figures and of its folder."""
        how = "sync" if self.outer_lr is None else f"diloco-{self.sync_steps}-lr{self.outer_lr:g}"
        return f"{how}-groups{self.num_groups}" + ("" if self.seed == SEED else f"-seed{self.seed}")

    @property
    def reference(self) -> str:
        """Return the name of the synchronous case that it is compared with."""
        return Case(self.num_groups).name


CASES = (
    *(Case(num) for num in NUMS_GROUPS),
    *(Case(num, steps, lr) for steps in SYNC_STEPS for lr in OUTER_LRS for num in NUMS_GROUPS),
    Case(NUMS_GROUPS[0], seed=OTHER_SEED),
)
"""The last one says how much of a difference is noise."""


def configure(base: Mapping[str, Any], job: Job, case: Case, steps: int = STEPS) -> Config:
    """Return what the workers of a case read."""
    config = derive_config(base, job, steps, log_freq=10)
    # All groups from the first step on: one that trains alone would train with fewer tokens.
    config["fault_tolerance"] |= {"min_replica_size": case.num_groups}
    config["fault_tolerance"].pop("semi_sync_method", None)
    if case.outer_lr is not None:
        config["fault_tolerance"] |= {"semi_sync_method": "diloco", "sync_steps": case.sync_steps}
        if job.system == OURS:  # torchtitan's own has these fixed, lr 0.7 as well
            settings = {"outer_lr": case.outer_lr, "outer_momentum": 0.9}
            config["fault_tolerance"] |= {**settings, "digest_every": 1}
    ranks = job.num_groups * job.num_ranks
    config["training"] |= {"seq_len": SEQ_LEN, "local_batch_size": GLOBAL_BATCH // ranks}
    config["lr_scheduler"] = {**config.get("lr_scheduler", {}), "warmup_steps": 20}
    config["validation"] = {**config.get("validation", {}), **VALIDATION, "freq": steps}
    config["debug"] = {**config.get("debug", {}), "seed": case.seed}
    return config


def measure_losses(
    base: Mapping[str, Any],
    work_dir: Path,
    done: Mapping[str, Any],
    cases: Sequence[Case] = CASES,
    steps: int = STEPS,
) -> Iterator[tuple[str, Any]]:
    """Run each case that is not `done`; yields its name and figures."""
    for case in cases:
        if case.name in done:
            continue
        job = Job(OURS, work_dir / case.name, case.num_groups, num_ranks=1)
        with Run(job, configure(base, job, case, steps)) as run:
            run.wait(TIMEOUT_SECONDS)
        figures = describe(job.run_dir, case, steps)
        progress(f"{case.name}: {figures}")
        yield case.name, figures


def describe(run_dir: Path, case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Return the figures of a run that has ended.

    `loss` is the loss on the validation text at the end. `bytes_per_step` are the bytes that a
    group sends to others per training step. `tokens` are those of all groups.

    Raises:
        BenchError: the run did not train as planned.
    """
    record = read_run(run_dir)
    commits = [event for event in record.commits if (event.replica, event.rank) == (SURVIVOR, 0)]
    if not commits or commits[-1].titan_step != steps:
        raise BenchError(f"{case.name}: the run did not end with step {steps}; see {run_dir}")
    absent = [event.step for event in commits if len(event.participants) < case.num_groups]
    if absent:
        raise BenchError(f"{case.name}: not all groups were in step {absent[0]}; see {run_dir}")
    losses = final_losses(run_dir, steps)
    if len(losses) != case.num_groups or len(set(losses.values())) != 1:
        raise BenchError(
            f"{case.name}: the groups' losses at the end must be one, got {losses}; see {run_dir}"
        )
    return {
        "loss": losses[SURVIVOR],
        "tokens": sum(event.tokens for event in commits),
        "bytes_per_step": bytes_per_step(record, num_parameters(run_dir), case),
    }


def final_losses(run_dir: Path, step: int) -> dict[int, float]:
    """Return the validation loss after a step, for each group whose logs have it."""
    found = {}
    for folder in run_dir.glob("logs/replica-*"):
        for path in sorted(folder.rglob("*.log")):
            for told, loss in _VALIDATED.findall(path.read_text(errors="replace")):
                if int(told) == step:
                    found[int(folder.name.removeprefix("replica-"))] = float(loss)
    return dict(sorted(found.items()))


def num_parameters(run_dir: Path) -> int:
    """Return the number of the model's parameters, by torchtitan's log.

    Raises:
        BenchError: no log has it.
    """
    for path in run_dir.glob("logs/replica-0/**/*.log"):
        if told := _SIZE.search(path.read_text(errors="replace")):
            return int(told[1].replace(",", ""))
    raise BenchError(f"no log in {run_dir} tells the size of the model")


def bytes_per_step(record: RunRecord, parameters: int, case: Case) -> float:
    """Return the bytes that a group of one rank sends for each step of training.

    By `wire_bytes` of the events if they have it. Otherwise the bytes of a float32 all-reduce: each
    of n members sends 2 (n - 1) / n of the gradients.
    """
    commits = [
        event for event in record.of(StepCommitted) if (event.replica, event.rank) == (SURVIVOR, 0)
    ]
    told = [
        bytes_sent
        for event in commits
        if (bytes_sent := getattr(event, "wire_bytes", None)) is not None
    ]
    if told and len(told) == len(commits):
        return float(sum(told)) / commits[-1].titan_step
    return 2 * (case.num_groups - 1) / case.num_groups * 4 * parameters / case.sync_steps
