# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What is inside a group survives what happens to it: each of torchtitan's parallelisms, killed, healed, resumed.

That they compute the right thing while nothing fails is in `test_arithmetic.py`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.events import Event
from harness.job import Job
from harness.trajectory import check, check_finished, check_killed, check_one_trajectory, named
from safetensors.torch import load_file

from titan_ft.training.checkpoint_folder import complete_steps

INTERVAL, LOST = 5, 13  # a checkpoint each; the step in which all groups are killed
STEPS = 16
VALIDATED = re.compile(r"validate step: *(\d+).*?loss: *([-\d.]+)")


def degrees(schedule: str = "", **values: int) -> list[str]:
    """Return the flags of a group's parallelism; what is not named has the degree 1."""
    names = {"shard": "data_parallel_shard", "tensor": "tensor_parallel", "pipeline": "pipeline_parallel"}
    flags = [f"--parallelism.{name}_degree={values.get(short, 1)}" for short, name in names.items()]
    if schedule:
        flags += [f"--parallelism.pipeline_parallel_schedule={schedule}", "--training.local_batch_size=4"]
    return flags


LAYOUTS = {
    "fsdp": (2, degrees(shard=2)),
    "tp": (2, degrees(tensor=2)),
    "pp": (2, degrees("1F1B", pipeline=2)),
    "pp-interleaved": (2, degrees("Interleaved1F1B", pipeline=2)),
    "pp-zbv": (2, degrees("ZBVZeroBubble", pipeline=2)),
    "fsdp-tp": (4, degrees(shard=2, tensor=2)),
    "pp-fsdp": (4, degrees("1F1B", pipeline=2, shard=2)),
    "pp-interleaved-fsdp": (4, degrees("Interleaved1F1B", pipeline=2, shard=2)),
    "pp-tp": (4, degrees("1F1B", pipeline=2, tensor=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_healed_and_resumed(make_job: Callable[..., Job], tmp_path: Path, layout: str) -> None:
    """One rank of one group dies and its group heals; then all die and go on from a checkpoint, to the same bytes."""
    ranks, flags = LAYOUTS[layout]
    faults = [
        {"replica": 1, "rank": ranks - 1, "point": "forward", "step": 4},
        {"replica": 0, "rank": 0, "point": "forward", "step": LOST},
        {"replica": 1, "rank": 0, "attempt": 1, "point": "forward", "step": LOST},
    ]
    saving = ["--checkpoint.enable", f"--checkpoint.folder={tmp_path / 'checkpoints'}"]
    saving += [f"--checkpoint.interval={INTERVAL}", "--checkpoint.no-last-save-model-only"]
    job = make_job(groups=2, ranks=ranks, steps=STEPS, flags=[*flags, *saving], hooks={"faults": faults, "hold": 2})
    job.run(240)  # many processes: minutes on a busy machine
    events = job.events()
    kind = "sigkill:forward"
    check_killed(job, events, [(1, 0, kind), (0, 0, kind), (1, 1, kind)])
    # Of all attempts: the steps that were made twice came out the same, in each rank's bytes.
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, STEPS)
    healed = named(events, "heal_finished")
    assert sorted((event["replica"], event["attempt"], event["rank"]) for event in healed) == [
        (1, 1, rank) for rank in range(ranks)
    ]
    loaded = named(events, "checkpoint_loaded")
    assert [event["step"] for event in loaded] == [LOST // INTERVAL * INTERVAL] * 2 * ranks
    made = [event["step"] for event in named(events, "step_committed") if (event["replica"], event["rank"]) == (0, 0)]
    assert made == [*range(1, LOST), *range(loaded[0]["step"] + 1, STEPS + 1)]
    assert complete_steps(tmp_path / "checkpoints")[-1] == STEPS
    assert not named(events, "started_anew", "data_reset", "digest_mismatch")
    check_losses(events)


def check_losses(events: list[Event]) -> None:
    """Every rank of every group tells one and the same loss of a step, that of a model that has hardly learnt."""
    told: dict[int, set[float]] = {}
    for event in named(events, "step_committed"):
        told.setdefault(event["step"], set()).add(event["loss"])
        assert event["own_loss"] is None or event["own_loss"] == pytest.approx(event["loss"], rel=0.2)
    for losses in told.values():
        (loss,) = losses
        assert 0.8 * math.log(2048) < loss < 1.2 * math.log(2048)


@pytest.mark.slow
def test_a_pipeline_validates_and_exports(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """All ranks log the validation's loss; Hugging Face's format has the layers of all stages."""
    folder = tmp_path / "checkpoints"
    pipeline = degrees("Interleaved1F1B", pipeline=2)
    flags = ["--checkpoint.enable", f"--checkpoint.folder={folder}", "--checkpoint.last_save_in_hf"]
    flags += ["--validation.enable", "--validation.freq=2", "--validation.steps=2", "--validation.seq_len=32"]
    flags += [
        "--validation.dataset=austen_validation",
        "--validation.local_batch_size=4",
        "--metrics.disable_color_printing",
    ]
    job = make_job(groups=2, ranks=2, steps=4, flags=[*pipeline, *flags])
    job.run()
    check(job, survivors=[0, 1])
    printed = [VALIDATED.findall(job.output(replica, rank)) for replica in range(2) for rank in range(2)]
    assert printed == [printed[0]] * 4
    assert [int(step) for step, _ in printed[0]] == [1, 2, 4]  # torchtitan validates after the first step, too
    for _, loss in printed[0]:
        assert 0.8 * math.log(2048) < float(loss) < 1.2 * math.log(2048)

    names = {name for path in (folder / "step-4").glob("*.safetensors") for name in load_file(path)}
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("pp-interleaved", "tp"), ("tp", "pp")])
def test_another_layout_goes_on(make_job: Callable[..., Job], tmp_path: Path, before: str, after: str) -> None:
    """A checkpoint has no trace of the stages: the same steps, with the same data and to rounding the same norms."""
    flags = ["--checkpoint.enable", f"--checkpoint.folder={tmp_path / 'checkpoints'}", "--checkpoint.interval=4"]
    flags += ["--checkpoint.no-last-save-model-only", "--training.local_batch_size=4", "--lr_scheduler.total_steps=8"]
    first = make_job(groups=2, ranks=2, steps=8, flags=[*LAYOUTS[before][1], *flags])
    first.run()
    straight = {
        (event["step"], event["replica"]): event for event in named(check(first, survivors=[0, 1]), "step_committed")
    }
    shutil.rmtree(tmp_path / "checkpoints" / "step-8")
    second = make_job(groups=2, ranks=2, steps=8, flags=[*LAYOUTS[after][1], *flags])
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
