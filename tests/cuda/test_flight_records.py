# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's flight records: a hang inside a group leaves one for each of its ranks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for the package `harness`

from harness.job import Job
from harness.trajectory import check

from tests.integration.conftest import make_job, zygote  # noqa: F401  # fixtures

pytestmark = pytest.mark.usefixtures("zygote")


def records(job: Job) -> dict[str, Any]:
    """Return torch's flight records, by their places below the run directory."""
    folder = job.paths.root / "comm_traces"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_hang_inside_a_group_leaves_a_record_for_each_rank(make_job: Callable[..., Job]) -> None:  # noqa: F811
    """torch's watchdog ends the waiting rank after both ranks have written their records.

    The other group has the same rank numbers, and so has the next attempt: neither overwrites the
    records.
    """
    gate = {"name": "never", "replica": 1, "rank": 1, "attempt": 0, "step": 4}
    job = make_job(
        groups=2,
        ranks=2,
        steps=8,
        flags=["--fault_tolerance.process_group=nccl", "--comm.train_timeout_seconds=4"],
        hooks={"gates": [gate], "hold": 2},
        env={
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1500"
        },  # the watchdog waits four times as long
    )
    job.run(120)
    check(job, survivors=[0], longest_gap=60)
    found = records(job)
    assert sorted(found) == ["replica_1/attempt_0/rank_0", "replica_1/attempt_0/rank_1"]
    for rank in range(2):
        record = pickle.loads(found[f"replica_1/attempt_0/rank_{rank}"])
        assert any(
            "fsdp" in frame["filename"] for entry in record["entries"] for frame in entry["frames"]
        )
        waits = [
            entry["profiling_name"] for entry in record["entries"] if entry["state"] != "completed"
        ]
        assert bool(waits) == (rank == 0), "rank 0 waits for rank 1, which has launched nothing"
        assert (
            job.output(1, rank, attempt=0).count("ProcessGroupNCCL preparing to dump debug info")
            == 1
        )
