# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parallelisms inside a group: parity with stock torchtitan, a kill and a heal, and a resume for
each.

Each entry of `CASES` is a `Case`. A new one needs the groups' flags, the ranks of a group, and the
run that its arithmetic is compared with.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.events import Event
from harness.job import Job
from harness.runs import COLOUR, FLOAT32_ULP, SECONDS, Runs, column
from harness.trajectory import check, check_finished, check_killed, check_one_trajectory, named
from safetensors.torch import load_file

from titan_ft.host.release import series

VALIDATION = (
    "--validation.enable",
    "--validation.freq=5",
    "--validation.steps=2",
    "--validation.local_batch_size=2",
    "--validation.seq_len=64",
)
# Something that is made of the weights after each step must be made again after each load of
# others; see harness.hooks. 0.3 converts no built model.
SCALES = ("--model.converters=scales",) if series() == "0.2" else ()
VALIDATED = re.compile(r"validate step: *(\d+) .*?loss: *([\d.]+)")


@dataclass(frozen=True)
class Case:
    """One way to train inside a group.

    Attributes:
        flags: torchtitan flags, for the groups and for stock.
        ranks: of a group.
        stages: of a pipeline.
        replicate, shard: degrees of the stock run on all ranks of both groups that the groups are
            compared with.
        rounding: largest relative difference of the losses to stock's, and a tenth of that of
            gradient norms; 0 compares all bytes.
        counted: how often stock counts each token.
        compared: whether stock trains this case, and correctly. Otherwise another test compares it
            with an oracle.
        validated: whether stock can validate it. torch's ZBV has no forward without a backward.
        quick: tests of this case that are part of the default run.
    """

    flags: tuple[str, ...] = ()
    ranks: int = 2
    stages: int = 1
    replicate: int = 2
    shard: int = 2
    rounding: float = 0.0
    counted: int = 1
    compared: bool = True
    validated: bool = True
    quick: frozenset[str] = frozenset()


def parallel(**degrees: Any) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}={value}" for name, value in degrees.items())


def pipeline(schedule: str) -> tuple[str, ...]:
    """Return the flags of two stages, or of four, two a rank, with a microbatch for each."""
    return (
        *parallel(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule),
        *(f"--{table}.local_batch_size=4" for table in ("training", "validation")),
    )


TENSOR = parallel(tensor_parallel_degree=2)
# 0.3 deals out a mask of blocks of 128 tokens.
LONG = () if series() == "0.2" else ("--training.seq_len=256", "--validation.seq_len=256")
CONTEXT = (*parallel(context_parallel_degree=2), *LONG)
SHARD = parallel(data_parallel_shard_degree=2)
# Stock 0.2's pipelines go backward from the sum of the losses: their arithmetic is compared in
# test_arithmetic.
COUNTED = 2 if series() == "0.2" else 1  # 0.3 counts what is dealt out to each rank
DIVIDES = series() != "0.2"
CASES = {
    "fsdp": Case(quick=frozenset({"resume"})),
    "tp": Case(TENSOR, replicate=1, rounding=1e-5, quick=frozenset({"heal"})),
    "cp": Case(CONTEXT, shard=1, counted=COUNTED, quick=frozenset({"parity"})),
    "cp_unbalanced": Case(
        (*CONTEXT, "--parallelism.context_parallel_load_balancer=None"), shard=1, counted=COUNTED
    ),
    "fsdp_tp": Case((*TENSOR, *SHARD), ranks=4),
    "pp": Case(pipeline("1F1B"), stages=2, shard=1, rounding=1e-5, compared=DIVIDES),
    "pp_interleaved": Case(
        pipeline("Interleaved1F1B"), stages=2, shard=1, rounding=1e-5, compared=DIVIDES
    ),
    "pp_zbv": Case(
        pipeline("ZBVZeroBubble"),
        stages=2,
        shard=1,
        rounding=1e-5,
        compared=DIVIDES,
        validated=False,
    ),
    "pp_fsdp": Case(
        (*pipeline("1F1B"), *SHARD), ranks=4, stages=2, rounding=1e-5, compared=DIVIDES
    ),
    "pp_interleaved_fsdp": Case(
        (*pipeline("Interleaved1F1B"), *SHARD), ranks=4, stages=2, rounding=1e-5, compared=DIVIDES
    ),
    "pp_tp": Case(
        (*pipeline("1F1B"), *TENSOR), ranks=4, stages=2, shard=1, rounding=1e-5, compared=DIVIDES
    ),
    "replicate": Case(
        (*SHARD, *parallel(data_parallel_replicate_degree=2)), ranks=4, replicate=4, rounding=1e-4
    ),
    "ac_full": Case(("--activation_checkpoint.mode=full",)),
    "ac_selective": Case(("--activation_checkpoint.mode=selective",)),
    "bf16_mixed": Case(("--training.mixed_precision_param=bfloat16",)),
    "bf16": Case(
        ("--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"), rounding=1e-3
    ),
    # All other rows have torchtitan's default, fused.
    "foreach": Case(("--optimizer.implementation=foreach",)),
    "for_loop": Case(("--optimizer.implementation=for-loop",)),
    "compile": Case(
        ("--compile.enable", "--compile.backend=aot_eager")
    ),  # all of it but the minutes of g++
}
if series() != "0.2":
    # Its chunked loss goes backward through that weight by itself: autograd's hook for it runs
    # twice. In a bucket of its own the first half of the gradient would leave. Stock sums both
    # halves over all ranks, and then adds them.
    CASES["tied"] = Case(
        ("--model.flavor=tiny_tied", "--fault_tolerance.bucket_size_mb=0.1"), rounding=1e-5
    )
    # FSDP wraps the model of a single rank too. 0.2's DDP averages twice: no stock to compare with.
    CASES["one_rank"] = Case(ranks=1, shard=1)


def rows(test: str) -> list[Any]:
    """Return the cases of a test. A case that is not quick for the test is marked `slow`."""
    return [
        pytest.param(case, id=name, marks=() if test in case.quick else pytest.mark.slow)
        for name, case in CASES.items()
        if test != "parity" or case.compared
    ]


@pytest.mark.parametrize("case", rows("parity"))
def test_parity(runs: Runs, case: Case) -> None:
    """Two groups equal stock torchtitan on the same seed and data, with validations in between."""
    flags = [*(VALIDATION if case.validated else ()), *case.flags]
    groups = runs.groups(2, case.ranks, flags, dump=case.rounding > 0)
    assert runs.job is not None
    if case.validated:
        check_validated(runs.job)
    begin = {"begin": str(runs.parameters("begin"))} if case.rounding else {}
    stock = runs.stock(2 * case.ranks, case.replicate, case.shard, flags, **begin)
    inner = case.ranks // case.stages
    for replica in range(2):
        for rank in range(case.ranks):
            stage, place = divmod(rank, inner)
            ours, theirs = groups[f"{replica}-{rank}"], stock[(2 * stage + replica) * inner + place]
            for record in theirs:
                if "tokens" in record:
                    record["tokens"] //= case.counted
            if theirs[0]["loss"] < 0:  # stock knows the loss in the last stage only
                for record in (*ours, *theirs):
                    record.update(dict.fromkeys({"loss", "max_loss"} & set(record), 1.0))
            compare(ours, theirs, case.rounding)


def compare(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], rounding: float
) -> None:
    """Compare the records of one rank. The mean loss is the same sum, which stock computes in
    float32.
    """
    loss = pytest.approx(column(theirs, "loss"), rel=rounding or 2 * FLOAT32_ULP, abs=0)
    assert column(ours, "loss") == loss
    if rounding:
        assert column(ours, "grad_norm") == pytest.approx(
            column(theirs, "grad_norm"), rel=10 * rounding, abs=0
        )
        for name in ("lr", "tokens"):
            assert column(ours, name) == column(theirs, name), name
        return
    for record in (*ours, *theirs):
        record.pop("loss", None)
    assert list(ours) == list(theirs)


def check_validated(job: Job) -> None:
    """Each group has validated after the same steps, with the same result."""
    printed = [VALIDATED.findall(COLOUR.sub("", job.output(group.replica))) for group in job.groups]
    assert printed[0] == printed[1]
    assert [int(step) for step, _ in printed[0]] == [1, 5, 10]


@pytest.mark.parametrize("case", rows("heal"))
def test_heal(make_job: Callable[..., Job], case: Case) -> None:
    """After the kill of a rank its group returns to the bytes of the other group, which made each
    step once.
    """
    kill = {"replica": 1, "rank": case.ranks - 1, "point": "backward", "step": 4}
    job = make_job(
        groups=2,
        ranks=case.ranks,
        flags=[*case.flags, *SCALES],
        hooks={"faults": [kill], "hold": 2},
    )
    job.run(SECONDS)
    events = check(job, survivors=[0], longest_gap=SECONDS)
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    healed = named(events, "heal_finished")
    assert sorted((event["replica"], event["rank"]) for event in healed) == [
        (1, rank) for rank in range(case.ranks)
    ]
    assert named(events, "step_committed")[-1]["participants"] == [0, 1]
    check_losses(events)


def check_losses(events: list[Event]) -> None:
    """All ranks of all groups report the same loss of a step, near that of an untrained model."""
    told: dict[int, set[float]] = {}
    for event in named(events, "step_committed"):
        told.setdefault(event["step"], set()).add(event["loss"])
        assert event["own_loss"] is None or event["own_loss"] == pytest.approx(
            event["loss"], rel=0.2
        )
    for losses in told.values():
        (loss,) = losses
        assert 0.8 * math.log(2048) < loss < 1.2 * math.log(2048)


@pytest.mark.parametrize("case", rows("resume"))
def test_resume(make_job: Callable[..., Job], case: Case) -> None:
    """After the death of all groups the checkpoint leads through the same steps to the same
    bytes.
    """
    faults = [{"replica": replica, "point": "forward", "step": 7} for replica in (0, 1)]
    flags = [
        *case.flags,
        *SCALES,
        "--checkpoint.enable",
        "--checkpoint.interval=4",
        "--checkpoint.no-last-save-model-only",
    ]
    job = make_job(groups=2, ranks=case.ranks, steps=10, flags=flags, hooks={"faults": faults})
    job.run(SECONDS)
    events = job.events()
    check_killed(job, events, [(replica, 0, "sigkill:forward") for replica in (0, 1)])
    assert {event["step"] for event in named(events, "checkpoint_loaded")} == {4}
    committed = named(events, "step_committed")
    made = [event["step"] for event in committed if event["replica"] == event["rank"] == 0]
    assert made == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    check_one_trajectory(committed)  # the second 5 and 6 have the bytes of the first
    check_finished(job, events, job.steps)
    assert not named(events, "heal_started", "started_anew", "data_reset")


def test_copies_that_nothing_shards_are_refused(make_job: Callable[..., Job]) -> None:
    """Two ranks with two copies resolve the shard degree -1 to 1, which only a worker can notice
    and refuse.
    """
    job = make_job(groups=1, ranks=2, flags=parallel(data_parallel_replicate_degree=2))
    job.run()
    codes = {worker.code for worker in job.groups[0].workers}
    # Once one has refused, the other is ended, maybe on its way to the line.
    assert 2 in codes <= {2, -signal.SIGTERM}
    (line,) = [line for line in job.output(0).splitlines() if line.startswith("titan_ft: ")]
    assert line.startswith(
        "titan_ft: parallelism.data_parallel_replicate_degree must be 1 in a group that does not "
    )


@pytest.mark.slow
def test_context_parallelism_attends_to_the_whole_sequence(runs: Runs) -> None:
    """Stock with each sequence split over two ranks equals groups with whole sequences, up to
    rounding.
    """
    ours = runs.groups(2, flags=LONG, dump=True)["0-0"]
    stock = runs.stock(4, replicate=2, shard=1, flags=CONTEXT, begin=str(runs.parameters("begin")))[
        0
    ]
    for name in ("loss", "grad_norm"):
        assert column(stock, name) == pytest.approx(column(ours, name), rel=3e-4, abs=0), name


@pytest.mark.slow
def test_a_pipeline_validates_and_exports(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """All ranks log the validation's loss; Hugging Face's format has the layers of all stages."""
    folder = tmp_path / "checkpoints"
    stages = pipeline("Interleaved1F1B")
    flags = ["--checkpoint.enable", f"--checkpoint.folder={folder}", "--checkpoint.last_save_in_hf"]
    flags += [
        "--validation.enable",
        "--validation.freq=2",
        "--validation.steps=2",
        "--validation.seq_len=32",
    ]
    flags += [
        "--validation.dataset=austen_validation",
        "--validation.local_batch_size=4",
        "--metrics.disable_color_printing",
    ]
    job = make_job(groups=2, ranks=2, steps=4, flags=[*stages, *flags])
    job.run()
    check(job, survivors=[0, 1])
    printed = [
        VALIDATED.findall(job.output(replica, rank)) for replica in range(2) for rank in range(2)
    ]
    assert printed == [printed[0]] * 4
    # Torchtitan validates after the first step, too.
    assert [int(step) for step, _ in printed[0]] == [1, 2, 4]
    for _, loss in printed[0]:
        assert 0.8 * math.log(2048) < float(loss) < 1.2 * math.log(2048)

    names = {name for path in (folder / "step-4").glob("*.safetensors") for name in load_file(path)}
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("pp_interleaved", "tp"), ("tp", "pp")])
def test_another_layout_goes_on(
    make_job: Callable[..., Job], tmp_path: Path, before: str, after: str
) -> None:
    """A checkpoint does not depend on pipeline stages: another layout trains the same data, up to
    rounding.
    """
    flags = [
        "--checkpoint.enable",
        f"--checkpoint.folder={tmp_path / 'checkpoints'}",
        "--checkpoint.interval=4",
    ]
    flags += [
        "--checkpoint.no-last-save-model-only",
        "--training.local_batch_size=4",
        "--lr_scheduler.total_steps=8",
    ]
    first = make_job(groups=2, ranks=2, steps=8, flags=[*CASES[before].flags, *flags])
    first.run()
    straight = {
        (event["step"], event["replica"]): event
        for event in named(check(first, survivors=[0, 1]), "step_committed")
    }
    shutil.rmtree(tmp_path / "checkpoints" / "step-8")
    second = make_job(groups=2, ranks=2, steps=8, flags=[*CASES[after].flags, *flags])
    second.run()
    events = second.events()
    check_finished(second, events, 8)
    assert {event["step"] for event in named(events, "checkpoint_loaded")} == {4}
    made = named(events, "step_committed")
    assert {event["step"] for event in made} == {5, 6, 7, 8}
    for event in made:
        other = straight[event["step"], event["replica"]]
        assert event["data"]["checksum"] == other["data"]["checksum"]
        for name in ("loss", "grad_norm"):
            assert event[name] == pytest.approx(other[name], rel=1e-3, abs=0), name
