# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exact number of host waits for the GPU in a step on each thread, by torch's sync
debug mode.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for the package `harness`

from harness.job import Job

from tests.integration.conftest import make_job, zygote  # noqa: F401  # fixtures

STEPS = 8
STEADY = 5  # no first time of anything, and torchtitan does not log it


def waits(job: Job, step: int, rank: int = 0) -> Counter[tuple[str, str]]:
    """Count a step's waits by thread and function."""
    found = Counter[tuple[str, str]]()
    for line in job.output(0, rank).splitlines():
        if line.startswith(f"WAIT|{step}|"):
            _, _, thread, where = line.split("|")
            found[thread, where] += 1
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("process_group", ["nccl", "gloo"])
def test_host_waits_of_a_step(make_job: Callable[..., Job], process_group: str, ranks: int) -> None:  # noqa: F811
    job = make_job(
        groups=2,
        ranks=ranks,
        steps=STEPS,
        flags=[
            f"--fault_tolerance.process_group={process_group}",
            "--fault_tolerance.digest_every=100",
            "--metrics.log_freq=100",
            "--experimental.custom_import=tests.cuda.host_waits",
        ],
    )
    job.run(120)
    assert all(group.finished for group in job.groups)
    expected = Counter({("MainThread", "strategy.py:train local_training.py:compute"): 1})
    if ranks > 1:
        expected[
            "MainThread", "group_collectives.py:gather_losses group_collectives.py:_gather"
        ] = 1
    # With Gloo the buckets are in host memory: events, which torch does not count.
    if process_group == "nccl":
        for method in ("_gather", "_gather_messages"):
            expected["titan_ft_exchange", f"flight.py:{method} operations.py:read"] = 1
        expected["titan_ft_exchange", "flight.py:_agree_on_fragments operations.py:read"] = 1
    for step in (STEADY, STEADY + 1):
        for rank in range(ranks):
            assert waits(job, step, rank) == expected
