# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for a conftest.py: real jobs with processes, signals and a lighthouse."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.client import ZygoteClient
from harness.job import Job
from harness.runs import Runs


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    """The process that workers are forked from."""
    client = ZygoteClient(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield client
    client.close()


_JOBS = pytest.StashKey[list[Job]]()
_TELLING = (
    "step",
    "participants",
    "exchanges",
    "forwards",
    "slots",
    "donor",
    "fault",
    "reason",
    "error",
    "seconds",
)
_STORY_LINES = 400


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the events of a failed test's jobs to its report. The files may be gone when somebody
    reads it.
    """
    report = yield
    if report.when == "call" and report.failed:
        for job in item.stash.get(_JOBS, []):
            report.sections.append(
                (f"events of {job.paths.events}", "\n".join(_story(job)[-_STORY_LINES:]))
            )
    return report


def _story(job: Job) -> list[str]:
    events = sorted(job.events(), key=lambda event: event["time"])
    return [
        f"{event['time'] - events[0]['time']:8.3f} {event.get('replica', '-')}.{event.get('rank', '-')}"
        f" attempt {event.get('attempt', '-')} {event['event']:<18}"
        + " ".join(f"{name}={event[name]}" for name in _TELLING if name in event)
        for event in events
    ]


@pytest.fixture
def make_job(
    zygote: ZygoteClient, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Job]]:
    """Make jobs, each in a folder of its own, and end them after the test."""
    jobs: list[Job] = []
    request.node.stash[_JOBS] = jobs

    def make(**settings: Any) -> Job:
        jobs.append(Job(zygote, tmp_path / f"job-{len(jobs)}", **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def runs(make_job: Callable[..., Job], zygote: ZygoteClient, tmp_path: Path) -> Runs:
    """Run replica groups, stock torchtitan and the oracle on the same data."""
    return Runs(make_job, zygote, tmp_path)
