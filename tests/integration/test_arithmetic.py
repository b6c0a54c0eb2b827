# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of replica groups is that of torchtitan's own data parallelism."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.biases import check_biases
from harness.client import ZygoteClient
from harness.job import Job
from harness.trajectory import check, named

STEPS = 10
SIZE = (
    "--model.flavor=tiny",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--fault_tolerance.bucket_size_mb=1",  # two buckets
    "--fault_tolerance.digest_every=1",
)
FLOAT32_ULP = 2.0**-23
ROUNDING = 1e-5
# torch adds up the squares of a large tensor in float32, with an error near 1e-4 for this model's embeddings; sharded
# tensors are smaller, and so is their error.
NORM_ROUNDING = 3e-4
EMPTY_BATCH = 3  # of group 1, see harness.mask
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PRINTED = re.compile(r"step: *(\d+) .*?loss: *([\d.]+) .*?grad_norm: *([\d.]+)")


def experts(model: str, degree: int) -> list[str]:
    return [f"--model.name={model}", f"--parallelism.expert_parallel_degree={degree}"]


class Runs:
    """Runs replica groups, stock torchtitan and the oracle on the same data, and reads what they logged."""

    def __init__(self, make_job: Callable[..., Job], zygote: ZygoteClient, folder: Path) -> None:
        self._make_job, self._zygote, self._folder = make_job, zygote, folder
        self.job: Job | None = None

    def groups(
        self, groups: int, ranks: int = 1, flags: Sequence[str] = (), **hooks: Any
    ) -> dict[str, list[dict[str, Any]]]:
        """Train in replica groups; returns the records of each rank, by "replica-rank"."""
        job = self.job = self._start("groups", groups, ranks, flags, hooks)
        check(job, survivors=range(groups))
        return self._read("groups", job)

    def stock(
        self, ranks: int, replicate: int, shard: int, flags: Sequence[str] = (), **hooks: Any
    ) -> list[list[dict[str, Any]]]:
        """Train with `enable = false`; returns the records of each rank."""
        degrees = {"replicate": replicate, "shard": shard}
        mesh = [f"--parallelism.data_parallel_{name}_degree={degree}" for name, degree in degrees.items()]
        job = self._start("stock", 1, ranks, ["--fault_tolerance.no-enable", *mesh, *flags], hooks)
        assert job.groups[0].finished, job.output(0)
        assert not job.events()
        return [records for _, records in sorted(self._read("stock", job).items())]

    def parameters(self, moment: str) -> Path:
        """Return the file with a group's parameters before or after training, if it ran with `dump`."""
        return self._folder / "groups" / f"{moment}-0-0.pt"

    def oracle(self, microbatches: int, mask: bool) -> dict[str, Any]:
        """Compute in one process what the groups (trained before, with `dump`) must have computed."""
        assert self.job is not None
        output = self._folder / "oracle.json"
        task = {
            "flags": [*self.job.flags, "--fault_tolerance.no-enable"],
            "shards": len(self.job.groups),
            "microbatches": microbatches,
            "mask": mask,
            "parameters": str(self.parameters("end")),
            "output": str(output),
        }
        process = self._zygote.call("harness.oracle:main", self._folder / "oracle.log", [json.dumps(task)])
        assert process.code == 0, process.output()
        result: dict[str, Any] = json.loads(output.read_text())
        return result

    def _start(self, name: str, groups: int, ranks: int, flags: Sequence[str], hooks: dict[str, Any]) -> Job:
        (self._folder / name).mkdir()
        job = self._make_job(
            groups=groups,
            ranks=ranks,
            steps=STEPS,
            tiny=False,
            flags=[*SIZE, *flags],
            hooks={"record": str(self._folder / name), **hooks},
            max_restarts=0,
        )
        job.run()
        return job

    def _read(self, name: str, job: Job) -> dict[str, list[dict[str, Any]]]:
        """Read the records of each rank: of each step, then the digest of the final state."""
        records = {}
        for path in sorted((self._folder / name).glob("*.jsonl")):
            records[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
            replica, rank = map(int, path.stem.split("-"))
            printed = PRINTED.findall(COLOUR.sub("", job.output(replica, rank)))
            *steps, digest = records[path.stem]
            assert [int(step) for step, _, _ in printed] == list(range(1, STEPS + 1))
            assert list(digest) == ["digest"]
            for record, (step, loss, grad_norm) in zip(steps, printed, strict=True):
                assert (record["step"], f"{record['loss']:.5f}") == (int(step), loss)  # what is logged is printed
                assert f"{record['grad_norm']:.4f}" == grad_norm
        return records


@pytest.fixture
def runs(make_job: Callable[..., Job], zygote: ZygoteClient, tmp_path: Path) -> Runs:
    return Runs(make_job, zygote, tmp_path)


def check_equal(groups: dict[str, list[dict[str, Any]]], stock: list[list[dict[str, Any]]]) -> None:
    """Compare 2 groups x 2 ranks with stock HSDP 2 x 2."""
    for replica in range(2):
        for rank in range(2):
            ours, theirs = groups[f"{replica}-{rank}"], stock[2 * replica + rank]
            assert column(ours, "loss") == pytest.approx(column(theirs, "loss"), rel=2 * FLOAT32_ULP, abs=0)
            for record in (*ours, *theirs):
                record.pop("loss", None)
            assert ours == theirs


def column(records: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if "step" in record]


def test_two_groups_equal_stock_hsdp(runs: Runs) -> None:
    """2 groups x 2 ranks are HSDP 2 x 2, bit for bit: gradient norm, largest loss, LR, tokens, and the final state.

    The logged mean loss is the same sum of the same float32 losses; stock adds them in float32, replica groups exactly.
    """
    check_equal(runs.groups(2, 2), runs.stock(4, replicate=2, shard=2))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_balanced"])
def test_experts_equal_stock_hsdp(runs: Runs, model: str, degree: int, checkpointing: str) -> None:
    """Load balancing, experts in parallel and recomputation (which counts tokens twice) are stock's, bit for bit.

    The biases are part of the state whose digest is compared.
    """
    flags = [*experts(model, degree), f"--activation_checkpoint.mode={checkpointing}"]
    check_equal(runs.groups(2, 2, flags, experts=True), runs.stock(4, replicate=2, shard=2, flags=flags, experts=True))
    assert runs.job is not None
    check_biases(runs.job)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_of_one_rank_against_stock_fsdp(runs: Runs, groups: int) -> None:
    """N groups x 1 rank are stock FSDP over N ranks, to rounding: another order of sums, norms of shards."""
    ours = runs.groups(groups, dump=True)["0-0"]
    stock = runs.stock(groups, replicate=1, shard=groups, begin=str(runs.parameters("begin")))[0]
    for name in ("loss", "max_loss", "lr", "tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=ROUNDING, abs=0), name
    assert column(ours, "grad_norm") == pytest.approx(column(stock, "grad_norm"), rel=NORM_ROUNDING, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_balanced"])
def test_experts_of_one_rank_against_stock_fsdp(runs: Runs, model: str) -> None:
    """2 groups x 1 rank are stock FSDP over 2 ranks, to rounding, as long as rounding sends no token elsewhere."""
    ours = runs.groups(2, flags=experts(model, 1), dump=True, experts=True)["0-0"]
    begin = str(runs.parameters("begin"))
    stock = runs.stock(2, replicate=1, shard=2, flags=experts(model, 1), begin=begin, experts=True)[0]
    for name in ("loss", "max_loss", "lr", "tokens"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=ROUNDING, abs=0), name
    assert column(ours, "grad_norm") == pytest.approx(column(stock, "grad_norm"), rel=NORM_ROUNDING, abs=0)


@pytest.mark.slow
def test_stock_ddp_averages_twice(runs: Runs) -> None:
    """torchtitan's DDP divides gradients by the number of ranks although the loss is that of all ranks' tokens.

    Replica groups follow its FSDP and HSDP, which do not; the first step's gradients are exactly twice those of DDP.
    """
    ours, stock = runs.groups(2)["0-0"], runs.stock(2, replicate=2, shard=1)[0]
    assert ours[0]["loss"] == pytest.approx(stock[0]["loss"], rel=2 * FLOAT32_ULP, abs=0)
    assert ours[0]["grad_norm"] == 2 * stock[0]["grad_norm"]


@pytest.mark.parametrize(
    ("microbatches", "mask"),
    [(1, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_token_weighted_mean(runs: Runs, microbatches: int, mask: bool) -> None:
    """The update is that of the mean over all valid tokens, however unequal the groups are and with accumulation."""
    flags = [f"--training.global_batch_size={2 * 2 * microbatches}"]
    ours = runs.groups(2, flags=flags, mask=mask, dump=True)["0-0"]
    oracle = runs.oracle(microbatches, mask)
    for name in ("loss", "grad_norm", "lr"):
        expected = [step[name] for step in oracle["steps"]]
        assert column(ours, name) == pytest.approx(expected, rel=ROUNDING, abs=0), name
    assert oracle["difference"] < 0.01 * oracle["change"]

    assert runs.job is not None
    events = runs.job.events()
    for event in named(events, "step_committed"):
        assert event["tokens"] == oracle["steps"][event["step"] - 1]["valid_tokens"]
        assert event["exchanges"] == 1
        assert event["forward_passes"] == microbatches
        empty = mask and microbatches == 1 and event["step"] - 1 == EMPTY_BATCH
        assert event["participants"] == ([0] if empty else [0, 1])
    # One exchange a step: each bucket and the row of facts travel once, whatever the number of microbatches.
    (reductions,) = {event["reductions"] for event in named(events, "computed") if event["step"] > 1}
    assert 4 <= reductions <= 5
