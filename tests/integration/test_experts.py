# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixtures of experts: experts in parallel inside a group, and load balancing over all groups."""
from __future__ import annotations
from collections.abc import Callable
from typing import Any
import pytest
from harness.job import Job
from harness.trajectory import check

@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_balanced"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_probe(make_job, model, ranks):
    job = make_job(groups=2, ranks=ranks, steps=6, hooks={"experts": True}, max_restarts=0, flags=[f"--model.name={model}", f"--parallelism.expert_parallel_degree={ranks}"])
    job.run()
    check(job, survivors=[0,1])
    for p in sorted(job.markers.glob("biases*")): print(p.name, p.read_text())
