# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Give tests real jobs: processes, signals, a lighthouse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the package `harness`, which the workers import too

from harness.client import ZygoteClient
from harness.job import Job


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    """The process that workers are forked from."""
    client = ZygoteClient(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield client
    client.close()


@pytest.fixture
def make_job(zygote: ZygoteClient, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs, each in a folder of its own; ends them with the test."""
    jobs: list[Job] = []

    def make(**settings: Any) -> Job:
        jobs.append(Job(zygote, tmp_path / f"job-{len(jobs)}", **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
