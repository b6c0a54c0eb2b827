# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare replica groups with stock torchtitan by the files of `benchmarks.witness`;
without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run import BenchError
from titan_ft.history.against import MAX_ROUNDING, ROUNDING_PER_STEP

FLOAT32_ULP = 2.0**-23
MOST_EXACT_RANKS = 2
"""Of a group: the sum of two numbers does not depend on the order, that of more does, and NCCL
chooses it.
"""
_WAIT = re.compile(
    r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize(_\w+)?|cudaMemcpy(_v\d+)?|hipMemcpy(WithStream)?"
)
"""Calls in which the host waits for the GPU; a `cudaMemcpyAsync` that waits is followed by one of
them in torch.
"""


@dataclass(frozen=True)
class Witness:
    """The record of a rank about its run.

    Attributes:
        logged: by step, mean loss and gradient norm.
        digest: digest of its final state, hex.
        digest_seconds: duration of such a digest.
    """

    logged: dict[int, tuple[float, float]]
    digest: str
    digest_seconds: float


@dataclass(frozen=True)
class Parity:
    """Whether groups made the steps of stock torchtitan, and how near they are.

    Attributes:
        close: losses and gradient norms differ by no more than the order of additions may make.
    """

    holds: bool
    text: str
    close: bool = True


def witness_file(run_dir: Path, replica: int, rank: int) -> Path:
    """Return where a rank leaves what it has seen."""
    return run_dir / f"witness-{replica}-{rank}.json"


def read_witnesses(run_dir: Path, num_groups: int, num_ranks: int) -> list[Witness]:
    """Return what the ranks of a run have seen, group by group.

    Raises:
        BenchError: one has left nothing.
    """
    found = []
    for path in (
        witness_file(run_dir, replica, rank)
        for replica in range(num_groups)
        for rank in range(num_ranks)
    ):
        if not path.is_file():
            raise BenchError(f"a rank did not reach its end: there is no {path}")
        values = json.loads(path.read_text(encoding="utf-8"))
        logged = {int(step): (loss, norm) for step, (loss, norm) in values["logged"].items()}
        found.append(Witness(logged, values["digest"], values["digest_seconds"]))
    return found


def compare_with_stock(stock: list[Witness], ours: list[Witness], num_ranks: int) -> Parity:
    """Compare two groups with stock torchtitan.

    With up to two ranks in a group the final states (weights, optimizer) must be equal bit for bit.
    The losses must be equal except for their last bit: stock adds the ranks' losses in float32,
    replica groups in float64. With more ranks, loss and gradient norm may differ by as much as
    another order of additions causes.

    Args:
        stock: of HSDP with the same ranks, or of one rank that read the data of both groups.
        ours: all ranks, group by group.
        num_ranks: ranks of a group.

    Raises:
        BenchError: the runs did not log the same steps.
    """
    pairs = [(stock[index % len(stock)], witness) for index, witness in enumerate(ours)]
    loss = norm = excess = 0.0
    for theirs, mine in pairs:
        if theirs.logged.keys() != mine.logged.keys() or not mine.logged:
            raise BenchError(
                f"stock torchtitan logged {len(theirs.logged)} steps, the groups {len(mine.logged)}"
            )
        for step, values in mine.logged.items():
            differences = [
                _relative(*pair) for pair in zip(values, theirs.logged[step], strict=True)
            ]
            loss, norm = max(loss, differences[0]), max(norm, differences[1])
            excess = max(
                excess,
                *(each - min(ROUNDING_PER_STEP * step, MAX_ROUNDING) for each in differences),
            )
    num_differing = sum(theirs.digest != mine.digest for theirs, mine in pairs)
    equal = num_differing == 0 and loss <= 2 * FLOAT32_ULP
    how = f"loss to {loss:.1e}, gradient norm to {norm:.1e} at most"
    steps = f"{max(ours[0].logged)} steps"
    if equal:
        return Parity(True, f"bit for bit, {steps}")
    states = (
        f"the states of {num_differing} of {len(pairs)} ranks differ"
        if num_differing
        else "the states are equal"
    )
    return Parity(
        num_ranks > MOST_EXACT_RANKS and excess <= 0, f"{states} after {steps}; {how}", excess <= 0
    )


def _relative(mine: float, theirs: float) -> float:
    """Return the relative difference; infinite where one is not finite and the other is."""
    if mine == theirs:
        return 0.0
    difference = abs(mine - theirs) / max(abs(theirs), 1e-30)
    return difference if difference == difference else float("inf")


def read_host_waits(run_dir: Path) -> tuple[float, float]:
    """Return the host's waits for the GPU in a step of rank 0; see `host_waits`.

    Raises:
        BenchError: there is no trace of the run.
    """
    # Torchtitan's default; the first group's.
    found = sorted(run_dir.glob("profile_traces/**/rank0_trace.json"))
    if not found:
        raise BenchError(f"the profiler left no trace in {run_dir / 'profile_traces'}")
    return host_waits(json.loads(found[0].read_text(encoding="utf-8"))["traceEvents"])


def host_waits(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the host's waits for the GPU per step: on all threads, and on the training thread.

    Waits count from the begin of each marked step to its end: after the last one the profiler
    itself waits.

    Args:
        events: events of a Chrome trace, as torch's profiler writes it.

    Raises:
        BenchError: no step is marked, or there is no call of CUDA.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    steps = [
        s
        for s in spans
        if s.get("cat") == "user_annotation" and s["name"].startswith("ProfilerStep#")
    ]
    if not steps:
        raise BenchError("no step is marked in the profiler's trace")
    # It may lack the right to see them.
    if not any(span.get("cat") == "cuda_runtime" for span in spans):
        raise BenchError("no call of CUDA is in the profiler's trace")
    total = training = 0
    for span in spans:
        if _WAIT.fullmatch(span["name"]):
            for step in steps:
                if step["ts"] <= span["ts"] < step["ts"] + step["dur"]:
                    total += 1
                    training += span["tid"] == step["tid"]
    return total / len(steps), training / len(steps)
