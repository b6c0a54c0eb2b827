# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether groups made the steps of stock torchtitan, and the waits in a trace of the profiler."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import (
    FLOAT32_ULP,
    Witness,
    compare_with_stock,
    host_waits,
    read_host_waits,
    read_witnesses,
    witness_file,
)
from benchmarks.run import BenchError

STOCK = Witness({1: (8.0, 0.5), 2: (7.5, 0.25)}, "aa", 0.01)
OTHER = replace(STOCK, digest="bb")


def test_groups_of_one_rank_are_compared_with_the_rank_that_did_the_work_of_both() -> None:
    found = compare_with_stock([STOCK], [STOCK, STOCK], 1)
    assert found.holds
    assert found.text == "bit for bit, 2 steps"


def test_ranks_are_compared_one_by_one() -> None:
    """Rank i of group g is rank 2 g + i of stock HSDP; the last bit of a loss may differ."""
    last_bit = replace(OTHER, logged={1: (8.0 * (1 + FLOAT32_ULP), 0.5), 2: (7.5, 0.25)})
    assert compare_with_stock(
        [STOCK, OTHER, STOCK, OTHER], [STOCK, OTHER, STOCK, last_bit], 2
    ).holds
    found = compare_with_stock([STOCK, OTHER, STOCK, OTHER], [STOCK, OTHER, OTHER, OTHER], 2)
    assert not found.holds
    assert found.text.startswith("the states of 1 of 4 ranks differ after 2 steps")


@pytest.mark.parametrize(("loss", "norm"), [(1e-6, 0.0), (math.nan, 0.0)])
def test_equal_states_with_other_losses_are_not_equal(loss: float, norm: float) -> None:
    near = replace(STOCK, logged={1: (8.0, 0.5), 2: (7.5 * (1 + loss), 0.25 * (1 + norm))})
    found = compare_with_stock([STOCK], [STOCK, near], 1)
    assert not found.holds
    assert "the states are equal" in found.text


@pytest.mark.parametrize(
    ("loss", "norm", "holds"), [(1e-5, 1e-5, True), (1e-2, 0.0, False), (0.0, 1e-2, False)]
)
def test_more_ranks_may_add_in_another_order(loss: float, norm: float, holds: bool) -> None:
    """With more than two ranks weights may differ, and losses and norms up to rounding; with two,
    nothing may.
    """
    near = replace(OTHER, logged={1: (8.0, 0.5), 2: (7.5 * (1 + loss), 0.25 * (1 + norm))})
    assert compare_with_stock([STOCK] * 6, [near] * 6, 3).holds == holds
    assert not compare_with_stock([STOCK] * 4, [near] * 4, 2).holds


def test_other_steps_are_not_compared() -> None:
    short = replace(STOCK, logged={1: (8.0, 0.5)})
    with pytest.raises(BenchError, match="stock torchtitan logged 2 steps, the groups 1"):
        compare_with_stock([STOCK], [STOCK, short], 1)


def test_what_ranks_leave_is_read_group_by_group(tmp_path: Path) -> None:
    for replica, witness in enumerate((STOCK, OTHER)):
        witness_file(tmp_path, replica, 0).write_text(json.dumps(asdict(witness)))
    assert read_witnesses(tmp_path, 2, 1) == [STOCK, OTHER]
    with pytest.raises(BenchError, match=r"did not reach its end.*witness-0-1"):
        read_witnesses(tmp_path, 2, 2)


def span(
    name: str, ts: float, dur: float = 1.0, tid: int = 7, cat: str = "cuda_runtime"
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


TRACE = [
    {"ph": "M", "name": "process_name", "args": {}},
    span("ProfilerStep#12", 100.0, 50.0, cat="user_annotation"),
    span("ProfilerStep#13", 150.0, 50.0, cat="user_annotation"),
    span("ProfilerStep#12", 100.0, 90.0, tid=0, cat="gpu_user_annotation"),
    span("cudaStreamSynchronize", 99.0),  # in the step before
    span("cudaStreamSynchronize", 110.0),
    span("cudaMemcpyAsync", 111.0),
    span("cudaLaunchKernel", 112.0),
    span("cudaStreamWaitEvent", 113.0),
    span("cudaEventQuery", 114.0),
    span("cudaEventSynchronize", 120.0, tid=9),
    span("cudaMemcpy", 150.0),
    span("cudaDeviceSynchronize", 199.0),
    span("cudaDeviceSynchronize", 200.0),  # the profiler's own
    span("Stream Synchronize", 120.0, cat="cuda_sync"),
]


def test_waits_of_the_marked_steps_are_counted() -> None:
    """Host waits are counted on all threads and on the training thread; queued work and GPU waits
    are not.
    """
    assert host_waits(TRACE) == (2.0, 1.5)
    with pytest.raises(BenchError, match="no step is marked"):
        host_waits(TRACE[3:])


def test_a_trace_of_torch_s_profiler_is_read(tmp_path: Path) -> None:
    """A trace as torchtitan writes it is read. A trace without the GPU does not count as zero
    waits.
    """
    folder = tmp_path / "profile_traces" / "iteration_5" / "replica_0"
    folder.mkdir(parents=True)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(
            str(folder / "rank0_trace.json")
        ),
    ) as profiler:
        for _ in range(6):
            torch.ones(8).sum()
            profiler.step()
    path = folder / "rank0_trace.json"
    trace = json.loads(path.read_text())
    steps = [
        event for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")
    ]
    assert len(steps) == 3
    with pytest.raises(BenchError, match="no call of CUDA"):
        read_host_waits(tmp_path)
    trace["traceEvents"].append(span("cudaStreamSynchronize", steps[1]["ts"], tid=steps[1]["tid"]))
    path.write_text(json.dumps(trace))
    assert read_host_waits(tmp_path) == (1 / 3, 1 / 3)


def test_a_trace_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"the profiler left no trace in .*profile_traces"):
        read_host_waits(tmp_path)
