# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs whose arithmetic is compared: replica groups, stock torchtitan and the oracle on the same
seed and data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.client import ZygoteClient
from harness.job import PROCESS_GROUP, Job
from harness.trajectory import check

STEPS = 10
SECONDS = 120  # for a run of several processes per core, which compile
SIZE = (
    "--model.flavor=tiny",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--fault_tolerance.bucket_size_mb=1",  # two buckets
    "--fault_tolerance.digest_every=1",
)
FLOAT32_ULP = 2.0**-23
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PRINTED = re.compile(r"step: *(\d+) .*?loss: *(-?[\d.]+) .*?grad_norm: *([\d.]+)")


class Runs:
    """Runs replica groups, stock torchtitan and the oracle on the same data, and reads the values
    that they logged.
    """

    def __init__(self, make_job: Callable[..., Job], zygote: ZygoteClient, folder: Path) -> None:
        self._make_job, self._zygote, self._folder = make_job, zygote, folder
        self.job: Job | None = None

    def groups(
        self,
        groups: int,
        ranks: int = 1,
        flags: Sequence[str] = (),
        *,
        method: str | None = None,
        sync_steps: int = 1,
        num_fragments: int = 1,
        ahead: int = 0,
        name: str = "groups",
        **hooks: Any,
    ) -> dict[str, list[dict[str, Any]]]:
        """Train in replica groups; return the records of each rank, by "replica-rank".

        Args:
            method: the semi-synchronous method, or None.
            sync_steps, num_fragments: settings that determine the length of the method's rounds.
            ahead: steps that a group makes while an exchange is under way.
            name: of the run, if a test makes several.
        """
        if method is not None:
            flags = [
                *flags,
                f"--fault_tolerance.semi_sync_method={method}",
                f"--fault_tolerance.sync_steps={sync_steps}",
            ]
        job = self.job = self._start(name, groups, ranks, flags, hooks)
        ends = ends_of_rounds(sync_steps // num_fragments)
        check(job, survivors=range(groups), steps=len(ends), longest_gap=SECONDS, ahead=ahead)
        return self._read(name, job, ends)

    def stock(
        self, ranks: int, replicate: int, shard: int, flags: Sequence[str] = (), **hooks: Any
    ) -> list[list[dict[str, Any]]]:
        """Train with `enable = false`; returns the records of each rank."""
        degrees = {"replicate": replicate, "shard": shard}
        mesh = [
            f"--parallelism.data_parallel_{name}_degree={degree}"
            for name, degree in degrees.items()
        ]
        job = self._start("stock", 1, ranks, ["--fault_tolerance.no-enable", *flags, *mesh], hooks)
        assert job.groups[0].finished, job.output(0)
        assert not job.events()
        return [
            records for _, records in sorted(self._read("stock", job, ends_of_rounds(1)).items())
        ]

    def parameters(self, moment: str, name: str = "groups") -> Path:
        """Return a file with all parameters of a group at `moment`: "begin", "end" or "round-N".
        The run needs `dump`.
        """
        merged = self._folder / f"{name}-{moment}.pt"
        if not merged.exists():  # the stages of a pipeline have different ones
            values: dict[str, torch.Tensor] = {}
            for path in sorted((self._folder / name).glob(f"{moment}-0-*.pt")):
                values.update(torch.load(path))
            torch.save(values, merged)
        return merged

    def oracle(
        self, microbatches: int, mask: bool, *, shards: int = 1, same_begin: bool = False
    ) -> dict[str, Any]:
        """Compute in one process the result of the groups that were trained before with `dump`.

        Args:
            shards: data shards of each group.
            same_begin: begin with the groups' parameters, not with those of `debug.seed`; always
                true on a GPU.
        """
        task = {"microbatches": microbatches, "parameters": str(self.parameters("end"))}
        result: dict[str, Any] = self._compute(
            "harness.oracle:main", task, mask, shards, same_begin
        )
        return result

    def outer_oracle(
        self,
        sync_steps: int,
        outer: dict[str, Any],
        microbatches: int,
        mask: bool,
        *,
        fragments: list[list[str]] | None = None,
        delay: int = 0,
        alpha: float = 0.0,
        shards: int = 1,
        same_begin: bool = False,
    ) -> list[dict[str, Any]]:
        """Compute the result of groups that were trained with a semi-synchronous method; see
        `harness.outer_oracle`.
        """
        assert self.job is not None
        length = sync_steps // len(fragments or [[]])
        numbers = range(1, len(ends_of_rounds(length)) + 1)
        task = {
            "groups": len(self.job.groups),
            "length": length,
            "fragments": fragments,
            "delay": delay,
            "alpha": alpha,
            "microbatches": microbatches,
            "outer": outer,
            "rounds": [str(self.parameters(f"round-{number}")) for number in numbers],
        }
        result: list[dict[str, Any]] = self._compute(
            "harness.outer_oracle:main", task, mask, shards, same_begin
        )
        return result

    def _compute(
        self, call: str, task: dict[str, Any], mask: bool, shards: int, same_begin: bool
    ) -> Any:
        assert self.job is not None
        output = self._folder / "oracle.json"
        # A GPU's generator draws other parameters than a CPU's.
        same_begin = same_begin or bool(PROCESS_GROUP)
        task |= {
            "flags": [*self.job.flags, "--fault_tolerance.no-enable"],
            "shards": shards * len(self.job.groups),
            "mask": mask,
            "begin": str(self.parameters("begin")) if same_begin else None,
            "output": str(output),
        }
        process = self._zygote.call(call, self._folder / "oracle.log", [json.dumps(task)])
        assert process.code == 0, process.output()
        return json.loads(output.read_text())

    def _start(
        self, name: str, groups: int, ranks: int, flags: Sequence[str], hooks: dict[str, Any]
    ) -> Job:
        (self._folder / name).mkdir()
        job = self._make_job(
            groups=groups,
            ranks=ranks,
            steps=STEPS,
            tiny=False,
            flags=[*SIZE, *flags],
            hooks={"record": str(self._folder / name), **hooks},
            max_restarts=0,
            heartbeat_timeout_ms=5000,
        )
        job.run(SECONDS)
        return job

    def _read(self, name: str, job: Job, logged: list[int]) -> dict[str, list[dict[str, Any]]]:
        """Read the records of each rank: one for each step in `logged`, then the digest of the
        final state.
        """
        records = {}
        for path in sorted((self._folder / name).glob("*.jsonl")):
            records[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
            replica, rank = map(int, path.stem.split("-"))
            printed = PRINTED.findall(COLOUR.sub("", job.output(replica, rank)))
            *steps, digest = records[path.stem]
            assert [int(step) for step, _, _ in printed] == logged
            assert list(digest) == ["digest"]
            for record, (step, loss, grad_norm) in zip(steps, printed, strict=True):
                # What is logged is printed.
                assert (record["step"], f"{record['loss']:.5f}") == (int(step), loss)
                assert f"{record['grad_norm']:.4f}" == grad_norm
        return records


def ends_of_rounds(sync_steps: int) -> list[int]:
    """Return the last step of each round."""
    return [min(first + sync_steps, STEPS) for first in range(0, STEPS, sync_steps)]


def column(records: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if "step" in record]


def check_equal(groups: dict[str, list[dict[str, Any]]], stock: list[list[dict[str, Any]]]) -> None:
    """Compare 2 groups x 2 ranks with stock HSDP 2 x 2."""
    for replica in range(2):
        for rank in range(2):
            ours, theirs = groups[f"{replica}-{rank}"], stock[2 * replica + rank]
            assert column(ours, "loss") == pytest.approx(
                column(theirs, "loss"), rel=2 * FLOAT32_ULP, abs=0
            )
            for record in (*ours, *theirs):
                record.pop("loss", None)
            assert ours == theirs
