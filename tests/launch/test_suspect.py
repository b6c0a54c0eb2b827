# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group leaves a host on which workers die again and again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from titan_ft.config import ConfigError
from titan_ft.launch.group.worker_exit import WorkerExit
from titan_ft.launch.suspect import HostDeaths, SuspectPolicy, counts_against_host
from titan_ft.run.events import WorkerExited
from titan_ft.run.log import EventLog


def ended(
    host: str = "n1",
    *,
    replica: int = 1,
    rank: int = 0,
    attempt: int = 0,
    stopped: bool = False,
    **more: Any,
) -> WorkerExited:
    return WorkerExited(
        rank=rank,
        attempt=attempt,
        replica=replica,
        worker_pid=7,
        reason="",
        stopped=stopped,
        host=host,
        **(more or {"signal": "SIGBUS"}),
    )


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (ended(signal="SIGKILL"), True),
        (ended(code=1), True),  # a library's exit: nobody knows why
        (
            ended(
                code=1, error="AcceleratorError: CUDA error: uncorrectable ECC error encountered"
            ),
            True,
        ),
        (ended(code=1, error="RuntimeError: No CUDA GPUs are available"), True),
        (
            ended(code=1, error="HungError: no progress", error_kind="HungError"),
            True,
        ),  # a GPU, or a disk
        (ended(code=1, error="HungError: of a library", error_kind="Error"), False),
        (
            ended(code=1, error="KeyError: 'tokens'"),
            False,
        ),  # would exclude every host that it comes to
        (ended(code=1, error="AcceleratorError: CUDA error: device-side assert triggered"), False),
        (ended(code=1, error="ConnectionError", transient=True), False),  # a network
        (ended(signal="SIGKILL", transient=True), False),  # by a fault that was injected
        (ended(stopped=True), False),
        (ended(code=0), False),
        (ended(code=2), False),
        (ended(code=3), False),
    ],
)
def test_which_ends_count(event: WorkerExited, counts: bool) -> None:
    """Only ends that the host may have caused."""
    assert counts_against_host(event) is counts


def test_deaths_are_counted_over_groups_and_restarts_within_the_window(tmp_path: Path) -> None:
    """Each agent reads the events of all agents, also of agents that have ended."""
    for number, host in enumerate(("n1", "n1", "n2")):
        EventLog(tmp_path / f"supervisor-{number}-1.jsonl", replica=number).emit(
            ended(host, replica=number)
        )
    # No agent's.
    EventLog(tmp_path / "replica-1-rank-0-attempt-0-7.jsonl", replica=1).emit(ended("n1"))
    now = time.time()
    deaths = HostDeaths(tmp_path, "supervisor-*.jsonl", "n1", 60.0, lambda: now)
    assert deaths.count() == 2
    EventLog(tmp_path / "supervisor-5-1.jsonl", replica=5).emit(ended("n1", replica=5))
    assert deaths.count() == 3
    now += 61.0
    assert deaths.count() == 0


def test_ranks_that_end_together_are_one_death(tmp_path: Path) -> None:
    """The first rank of an attempt that ended by itself has the cause. The ends of the others may
    be consequences.
    """
    log = EventLog(tmp_path / "supervisor-0-1.jsonl", replica=1)
    deaths = HostDeaths(tmp_path, "supervisor-*.jsonl", "n1", 60.0)
    for rank in range(8):
        log.emit(ended(rank=rank))
    assert deaths.count() == 1
    for rank in range(8):
        log.emit(ended(rank=rank, attempt=1))
    assert deaths.count() == 2
    log.emit(ended(attempt=2, code=1, error="KeyError: 'tokens'"))
    log.emit(ended(attempt=2, rank=1, signal="SIGABRT"))
    assert deaths.count() == 2
    log.emit(ended(attempt=3, rank=1, stopped=True))
    log.emit(ended(attempt=3))
    assert deaths.count() == 3


@pytest.mark.parametrize("code", [-9, 1])
def test_an_end_of_a_disturbed_attempt_is_not_the_hosts(code: int) -> None:
    """After an injected fault, neither a kill nor an exception counts against the host."""
    exit = WorkerExit(0, 7, code)
    assert counts_against_host(exit.to_event(0, disturbed=False, log=None))
    assert not counts_against_host(exit.to_event(0, disturbed=True, log=None))


def test_the_policy_comes_from_the_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's command gets host and reason. If the command fails, the group leaves all the
    same.
    """
    assert SuspectPolicy.from_environment({}).deaths_until_suspected == 0
    file = tmp_path / "exclude-7"
    policy = SuspectPolicy.from_environment(
        {
            "TITAN_FT_HOST_DEATHS": "3",
            "TITAN_FT_HOST_WINDOW": "600",
            "TITAN_FT_ON_HOST_SUSPECTED": "sh -c 'echo told: $1: $2$TITAN_FT_TOKEN; exit 5' x",
            "TITAN_FT_SUSPECTED_HOSTS": str(file),
        }
    )
    assert (policy.deaths_until_suspected, policy.window_seconds) == (3, 600.0)
    monkeypatch.setenv("TITAN_FT_TOKEN", "which it has no use for")
    begin = time.time() - 1.0  # it is written in whole seconds
    policy.act("n1", "3 workers died")
    out, errors = capfd.readouterr()
    assert out == "told: n1: 3 workers died\n"
    assert "the command for suspected hosts ended with exit status 5" in errors
    host, until = file.read_text().split()
    assert host == "n1"
    assert 0 < float(until) - begin - 600.0 < 60.0
    with pytest.raises(
        ConfigError, match=r"TITAN_FT_HOST_DEATHS must be a whole number, at least 0, got 'x'"
    ):
        SuspectPolicy.from_environment({"TITAN_FT_HOST_DEATHS": "x"})
