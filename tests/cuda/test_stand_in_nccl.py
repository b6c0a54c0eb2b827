# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The stand-in's NCCL by itself: each collective, and the failures that other tests rely on."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).with_name("stand_in_rank.py")
_DEADLINE = 60.0  # seconds; only a bug reaches it
_SUCCESS, _REMOTE_ERROR, _IN_PROGRESS = 0, 6, 7
_INVALID_ARGUMENT = 4


class Rank:
    """A process with one rank. A deadline ends it, so that no read waits longer."""

    def __init__(self, knobs: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            env={**os.environ, **knobs},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._deadline = threading.Timer(_DEADLINE, self.process.kill)
        self._deadline.start()

    def send(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def take(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank has ended"
        return json.loads(line)

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.take()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> str:
        """End the process; return its standard error."""
        try:
            _, errors = self.process.communicate(timeout=_DEADLINE)
        finally:
            self._deadline.cancel()
        return errors


Start = Callable[..., Rank]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ranks with the given knobs; end them after the test."""
    ranks: list[Rank] = []

    def begin(**knobs: str) -> Rank:
        ranks.append(Rank(knobs))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.process.kill()
        rank.end()


def _call_all(ranks: list[Rank], name: str, *arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.send(name, *arguments)
    return [rank.take() for rank in ranks]


def _name() -> str:
    return f"fakenccl-{secrets.token_hex(16)}"


def _begin_to_connect(ranks: list[Rank], name: str) -> None:
    for number, rank in enumerate(ranks):
        assert rank.call("connect", name, len(ranks), number) == _IN_PROGRESS


def _connect(ranks: list[Rank]) -> None:
    name = _name()
    _begin_to_connect(ranks, name)
    assert _call_all(ranks, "wait_until_launched") == [_SUCCESS] * len(ranks)
    assert not (Path("/dev/shm") / name).exists()


def _wait_until_rank_0_has_come(name: str) -> None:
    """Wait until the shared memory begins with the process id of rank 0."""
    memory = Path("/dev/shm") / name
    end = time.monotonic() + _DEADLINE
    while time.monotonic() < end:
        if memory.exists() and any(memory.open("rb").read(4)):
            return
        time.sleep(0.01)
    raise AssertionError("rank 0 has not come")


def test_each_collective_of_a_non_blocking_communicator(start: Start) -> None:
    ranks = [start(), start()]
    _connect(ranks)
    first, second = _call_all(ranks, "collectives")
    for of_rank in (first, second):
        assert of_rank["sum"] == [11.0]
        assert of_rank["max"] == [10]
        assert of_rank["average"] == [5.0]
        assert of_rank["float16"] == [0xC000]  # 1 - 3
        assert of_rank["gather"] == [0, 1, 10, 11]
        assert of_rank["broadcast"] == [10]
    assert [first["scatter"], second["scatter"]] == [[10], [12]]
    assert [first["all_to_all"], second["all_to_all"]] == [[0, 10], [1, 11]]
    assert [first["exchange"], second["exchange"]] == [[10], [0]]
    assert first["reduce"] == [12]


def test_bfloat16_is_added_as_float_and_rounded_once(start: Start) -> None:
    ranks = [start(), start(), start()]
    _connect(ranks)
    one_and_two_steps = 0x3F81
    assert [of_rank["bfloat16"] for of_rank in _call_all(ranks, "collectives")] == [
        [one_and_two_steps]
    ] * 3


def test_a_collective_larger_than_the_shared_memory(start: Start) -> None:
    ranks = [start(), start()]
    _connect(ranks)
    more_than_a_slot = (64 << 20) // 4 + 1024
    assert _call_all(ranks, "gather_large", more_than_a_slot) == [True, True]


def test_a_launch_that_never_ends_is_in_progress_until_an_abort(start: Start) -> None:
    stuck, waiting = ranks = [start(FAKE_NCCL_LAUNCH_MS="never"), start()]
    _connect(ranks)
    assert _call_all(ranks, "begin_sum") == [_IN_PROGRESS, _IN_PROGRESS]
    assert waiting.call("wait_until_launched") == _SUCCESS
    assert stuck.call("results_of_polls", 100) == [_IN_PROGRESS]
    assert (stuck.call("pending"), waiting.call("pending")) == (0, 1)
    for rank in ranks:
        rank.call("abort")
        assert rank.call("pending") == 0


def test_a_set_up_that_never_ends_is_in_progress_until_an_abort(start: Start) -> None:
    stuck, waiting = ranks = [start(FAKE_NCCL_CONNECT_MS="never"), start()]
    name = _name()
    _begin_to_connect(ranks, name)
    assert _call_all(ranks, "results_of_polls", 100) == [[_IN_PROGRESS], [_IN_PROGRESS]]
    for rank in (stuck, waiting):
        rank.call("abort")
        assert rank.call("resources")["communicators"] == 0
    (Path("/dev/shm") / name).unlink()  # only a communicator that was set up removes it


def test_a_peer_that_vanishes_without_a_word(start: Start) -> None:
    lost, waiting = ranks = [start(), start()]
    _connect(ranks)
    lost.kill()
    waiting.call("begin_sum")
    assert waiting.call("wait_until_launched") == _SUCCESS
    assert waiting.call("results_of_polls", 100) == [_SUCCESS]
    assert waiting.call("pending") == 1
    waiting.call("abort")
    assert waiting.call("pending") == 0


def test_a_peer_whose_loss_nccl_reports(start: Start) -> None:
    lost, waiting = ranks = [start(FAKE_NCCL_NET="1"), start(FAKE_NCCL_NET="1")]
    _connect(ranks)
    waiting.call("begin_sum")
    lost.kill()
    assert waiting.call("wait_for_result", _REMOTE_ERROR) == _REMOTE_ERROR
    assert waiting.call("pending") == 1  # the kernel waits all the same
    waiting.call("abort")
    assert waiting.call("pending") == 0


def test_a_lost_peer_in_the_set_up_is_reported_where_nccl_notices(start: Start) -> None:
    lost, waiting = start(FAKE_NCCL_NET="1"), start(FAKE_NCCL_NET="1")
    name = _name()
    lost.call("connect", name, 3, 0)  # the third rank never comes
    waiting.call("connect", name, 3, 1)
    _wait_until_rank_0_has_come(name)
    lost.kill()
    assert waiting.call("wait_for_result", _REMOTE_ERROR) == _REMOTE_ERROR
    waiting.call("abort")
    (Path("/dev/shm") / name).unlink()


def test_an_abort_takes_its_time(start: Start) -> None:
    ranks = [start(FAKE_NCCL_ABORT_MS="300"), start()]
    _connect(ranks)
    assert ranks[0].call("abort") >= 0.3


def test_a_use_after_the_abort_is_reported(start: Start) -> None:
    rank = start()
    _connect([rank])
    rank.call("abort")
    assert rank.call("use_after_abort") == _INVALID_ARGUMENT
    assert "USE AFTER FREE" in rank.end()


def test_forty_communicators_leave_nothing(start: Start) -> None:
    ranks = [start(), start()]
    after_first = []
    for _ in range(40):
        _connect(ranks)
        _call_all(ranks, "begin_sum")
        _call_all(ranks, "abort")
        after_first.append(_call_all(ranks, "resources"))
    assert after_first[-1] == after_first[0]
    assert after_first[-1][0]["communicators"] == 0
