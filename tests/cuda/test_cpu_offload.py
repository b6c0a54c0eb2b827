# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU offload (`training.enable_cpu_offload`): FSDP keeps weights, gradients and optimizer in host
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from harness.job import Job
from harness.runs import SECONDS

from tests.cuda.test_host_waits import STEADY, STEPS, waits
from tests.cuda.test_runs import digests

Wait = tuple[str, str]
COMMON: dict[Wait, int] = {
    ("MainThread", "strategy.py:train local_training.py:compute"): 1,
    ("MainThread", "group_collectives.py:gather_losses group_collectives.py:_gather"): 1,
    (
        "MainThread",
        "group_collectives.py:gather group_collectives.py:_gather",
    ): 1,  # the digest, which each step of the harness has
}
OF_NCCL: dict[Wait, int] = {
    ("titan_ft_exchange", "flight.py:_gather operations.py:read"): 1,
    ("titan_ft_exchange", "flight.py:_gather_messages operations.py:read"): 1,
    ("titan_ft_exchange", "flight.py:_agree_on_fragments operations.py:read"): 1,
}


def train(make_job: Callable[..., Job], flags: Sequence[str]) -> Job:
    """Train 2 groups of 2 ranks, from weights that do not depend on the device."""
    flags = [
        "--metrics.log_freq=100",
        "--experimental.custom_import=tests.cuda.initial_weights",
        *flags,
    ]
    job = make_job(groups=2, ranks=2, steps=STEPS, flags=flags)
    job.run(SECONDS)
    assert all(group.finished for group in job.groups)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("process_group", ["nccl", "gloo"])
def test_cpu_offload_waits_for_no_single_gradient(
    make_job: Callable[..., Job], process_group: str
) -> None:
    """The host waits as often as without offload, not once a parameter, and the updates have the
    same bytes.
    """
    backend = f"--fault_tolerance.process_group={process_group}"
    offloaded = train(make_job, [backend, "--training.enable_cpu_offload"])
    on_device = train(make_job, [backend])
    assert digests(offloaded.events()) == digests(on_device.events())
    expected = Counter(COMMON)
    if process_group == "nccl":
        expected.update(OF_NCCL)
    for step in (STEADY, STEADY + 1):
        for rank in range(2):
            assert waits(offloaded, step, rank) == expected
