# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""NCCL between the groups on torch's own ProcessGroupNCCL: processes that sum, lose each other and
meet again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft import device

DEADLINE = 40.0  # seconds; only ever reached by a bug
SOON = 20.0  # as well, and well below TIMEOUT
TIMEOUT = 60.0  # of torch and of an exchange: who waits for it is found by SOON
FOR_EVER = "1000000"  # milliseconds, of the stand-in's: until an abort
PROGRAM = Path(__file__).with_name("nccl_member.py")


class Process:
    """A member, and its lines of output."""

    def __init__(self, rank: int, num_ranks: int, port: int, environ: dict[str, str]) -> None:
        timeout = float(environ.get("MEMBER_TIMEOUT", TIMEOUT))
        environment = {
            **os.environ,
            **device.nccl_environment({}, int(timeout * 1000)),
            "FAKE_CUDA_DEVICES": str(num_ranks),
            "FAKE_NCCL_TRACE": "1",
            "FAKE_NCCL_UNLINK_MS": "0",
            "MEMBER_TIMEOUT": str(timeout),
            **environ,
        }
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(num_ranks), str(port)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.errors: list[str] = []
        self._wrote = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._wrote:
                self.errors.append(line)
                self._wrote.notify_all()

    def send(self, name: str, *arguments: Any) -> None:
        """Begin a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            (name if name == "break_off" else json.dumps([name, *arguments])) + "\n"
        )
        self.process.stdin.flush()

    def take(self, name: str, seconds: float = DEADLINE) -> dict[str, Any]:
        """Wait for the next answer to a command of this name."""
        until = time.monotonic() + seconds
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"rank {self.rank}: no answer to {name}: {''.join(self.errors[-30:])}"
                ) from None
            if answer["command"] == name:
                return answer

    def do(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Carry out a command."""
        self.send(name, *arguments)
        return self.take(name)

    def await_trace(self, text: str, before: int = 0) -> None:
        """Wait until the stand-in has traced a line with this text, after the first `before`
        lines.
        """
        with self._wrote:
            found = self._wrote.wait_for(
                lambda: any(text in line for line in self.errors[before:]), DEADLINE
            )
        assert found, f"rank {self.rank} has not traced {text!r}"

    def await_thread(self, name: str) -> None:
        """Wait until the process has a thread of this name."""
        until = time.monotonic() + DEADLINE
        tasks = Path(f"/proc/{self.process.pid}/task")
        while not any(path.read_text().strip() == name for path in tasks.glob("*/comm")):
            assert time.monotonic() < until, f"rank {self.rank} has no thread {name}"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def members(
    num_ranks: int, environs: dict[int, dict[str, str]] | None = None, **environ: str
) -> Iterator[list[Process]]:
    """Start unconfigured members; `environs` has the variables of single members."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=DEADLINE))
    ranks = [
        Process(rank, num_ranks, store.port, {**environ, **(environs or {}).get(rank, {})})
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            rank.take("ready")
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def do_all(ranks: list[Process], name: str, *arguments: Any) -> list[dict[str, Any]]:
    """Carry out a command on several members at once."""
    for rank in ranks:
        rank.send(name, *arguments)
    return [rank.take(name) for rank in ranks]


def meet(ranks: list[Process], name: str, seconds: float = 20.0) -> None:
    """Build the communicator of these members."""
    for answer in do_all(ranks, "configure", name, [rank.rank for rank in ranks], seconds):
        assert not answer["error"], answer


def exchange_works(ranks: list[Process]) -> None:
    for answer in do_all(ranks, "exchange"):
        assert not answer["error"], answer
        assert answer["right"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("travels_in", ["float32", "bfloat16", "8 bits"])
def test_an_exchange_has_the_sums_of_the_cpu(travels_in: str, num_ranks: int) -> None:
    """Each collective works on a communicator that does not block; also the second time."""
    with members(num_ranks) as ranks:
        do_all(ranks, "travels_in", travels_in)
        meet(ranks, "a")
        exchange_works(ranks)
        exchange_works(ranks)


@pytest.mark.parametrize(
    ("travels_in", "collectives"),
    [
        ("float32", ["AllReduce"]),
        ("bfloat16", ["SendRecv", "AllGather"]),
        ("8 bits", ["AllGather"]),
    ],
)
def test_the_set_up_makes_each_collective_as_large_as_an_exchange_does(
    travels_in: str, collectives: list[str]
) -> None:
    """NCCL connects an algorithm when it is first used: nothing is left to connect in an
    exchange.
    """
    with members(2) as ranks:
        do_all(ranks, "travels_in", travels_in)
        meet(ranks, "a")
        rehearsed = largest(ranks[0].errors)
        exchange_works(ranks)
        exchanged = largest(ranks[0].errors)
        for name in collectives:
            assert rehearsed.get(name, 0) == exchanged[name] > 0
        assert rehearsed.keys() == exchanged.keys()


def without_name(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: fact for name, fact in answer.items() if name != "command"}


def largest(trace: list[str]) -> dict[str, int]:
    """Return the bytes of the largest collective of each kind in a trace of the stand-in."""
    found: dict[str, int] = {}
    for line in trace:
        traced = re.search(r"(\w+) [^ ]*? ?of (\d+) bytes on comm", line)
        if traced:
            name, size = traced[1], int(traced[2])
            found[name] = max(found.get(name, 0), size)
    return found


def test_forty_communicators_leave_nothing() -> None:
    """Forty communicators leave no thread, descriptor, mapping or GPU memory, and torch's watchdog
    sees no error.
    """
    with members(2) as ranks:
        do_all(ranks, "reconfigure", "a", 2, [0, 1])
        before = do_all(ranks, "settle", {"threads": [], "mapped": 0, "num_threads": 2}, SOON)
        for answer in do_all(ranks, "reconfigure", "b", 40, [0, 1]):
            assert answer["failed"] is None
        for rank, held in zip(ranks, before, strict=True):
            assert rank.do("settle", without_name(held), SOON) == held
            assert not [line for line in rank.errors if "watchdog" in line]


def test_what_a_set_up_without_its_peer_has_made_ends_by_itself() -> None:
    """A set-up without its peer costs its own time only; the next one works, and nothing stays
    afterwards.
    """
    with members(1, MEMBER_TIMEOUT="3") as (rank,):
        meet([rank], "a")
        exchange_works([rank])
        held = without_name(rank.do("count"))
        for name in ("b", "c"):
            answer = rank.do("configure", name, [0, 1], 0.5)
            assert answer["error"].startswith(
                "TimeoutError: NCCL has not connected the members within"
            ), answer
        assert not rank.do("configure", "d", [0])["error"]
        exchange_works([rank])
        assert without_name(rank.do("settle", held, SOON)) == held


@pytest.mark.parametrize("launched", ["a bucket's sum", "the rows' sum"])
def test_an_abort_while_a_collective_is_launched_ends_the_exchange(launched: str) -> None:
    """torch itself waits in the launch until its own timeout; the next exchange does not wait for
    that.
    """
    with members(2) as ranks:
        meet(ranks, "a")
        exchange_works(ranks)
        if launched == "a bucket's sum":
            ranks[0].do("knob", "FAKE_NCCL_LAUNCH_MS", FOR_EVER)
            traced = len(ranks[0].errors)
            ranks[0].send("exchange")
        else:
            traced = len(ranks[0].errors)
            for rank in ranks:
                rank.send("exchange", None, rank is ranks[0])
            ranks[0].await_trace("describes", traced)
            traced = next(n for n, line in enumerate(ranks[0].errors) if line == "describes\n")
        ranks[0].await_trace("AllReduce", traced)
        for rank in ranks:
            rank.send("break_off")
        assert ranks[0].take("exchange", SOON)["error"]
        ranks[0].do("knob", "FAKE_NCCL_LAUNCH_MS", "0")
        meet(ranks, "b")
        exchange_works(ranks)


def test_torch_ends_no_operation_by_itself() -> None:
    """torch does not time out an operation, which would dump flight records and hide later errors.

    Waiting exchange kernels leave most of the GPU to backward. Their stream has the highest
    priority, because torch's pool reuses the streams of the other priorities after 32
    communicators. The older name of a variable does not reach torch.
    """
    with members(1, NCCL_ASYNC_ERROR_HANDLING="1") as (rank,):
        meet([rank], "a")
        facts = rank.do("facts")
        assert facts["error_handling"] == "0"
        assert facts["timeout_minutes"] > 10  # torch's own limit, which ends the process
        assert 1 <= facts["max_ctas"] <= 8
        assert facts["high_priority"]


def test_any_error_that_torch_reports_ends_the_exchange() -> None:
    """torch keeps the first error alone: after a timeout it would never report a lost member."""
    with members(2) as ranks:
        meet(ranks, "a")
        ranks[0].do("shorten", 0.5)
        ranks[0].send("exchange")  # the other member does not come
        assert ranks[0].take("exchange", SOON)["error"]


def test_a_set_up_does_not_wait_for_what_torch_does_after_an_abort() -> None:
    """torch's watchdog imports torch._inductor for the stack of a failed operation, which takes
    seconds the first time.
    """
    with members(2, FAKE_NCCL_NET="1") as ranks:
        meet(ranks, "a")
        ranks[0].do("block_import", "torch._inductor")
        ranks[0].send("exchange")
        ranks[1].kill()
        assert ranks[0].take("exchange", SOON)["error"]
        meet(ranks[:1], "b")


LOST = 1  # the rank that is killed, of three


@pytest.mark.parametrize(
    ("when", "noticed"),
    [
        ("set-up", "by nobody"),
        ("launch", "by nobody"),
        ("kernel", "by NCCL"),
        ("kernel", "by nobody"),
        ("abort", "by NCCL"),
        ("abort", "by nobody"),
    ],
)
def test_a_member_is_killed(when: str, noticed: str) -> None:
    """The survivors' processes live, their exchange breaks off, and the two of them meet again and
    sum.

    Where NCCL does not notice a death, as on NVLink, the survivors are told to break off, as by a
    pulse.
    """
    slow = {LOST: {"FAKE_NCCL_CONNECT_MS": FOR_EVER}} if when == "set-up" else {}
    with members(3, slow, FAKE_NCCL_NET=str(int(noticed == "by NCCL"))) as ranks:
        survivors = [rank for rank in ranks if rank.rank != LOST]
        if when == "set-up":
            for rank in ranks:
                rank.send("configure", "a", [0, 1, 2], 2.0)
            for rank in ranks:
                rank.await_thread("fakenccl_init")
            ranks[LOST].kill()
            for rank in survivors:
                assert rank.take("configure", SOON)["error"]
        else:
            meet(ranks, "a")
            exchange_works(ranks)
            if when == "launch":
                do_all(survivors, "knob", "FAKE_NCCL_LAUNCH_MS", FOR_EVER)
            if when == "abort":
                do_all(survivors, "knob", "FAKE_NCCL_ABORT_MS", "1000")
            traced = [len(rank.errors) for rank in ranks]
            for rank in survivors:
                rank.send("exchange")
            for rank in survivors:
                rank.await_trace("AllReduce", traced[rank.rank])
            if when == "abort":  # one survivor is at it already when the member dies
                survivors[0].send("break_off")
                survivors[0].await_trace(" abort", traced[0])
            ranks[LOST].kill()
            if noticed == "by nobody" or when == "launch":
                for rank in survivors:
                    rank.send("break_off")
            for rank in survivors:
                assert rank.take("exchange", SOON)["error"]
            do_all(survivors, "knob", "FAKE_NCCL_LAUNCH_MS", "0")
        meet(survivors, "b")
        exchange_works(survivors)


def test_a_slow_abort_delays_the_next_set_up_and_no_more() -> None:
    """The next set-up waits for the abort; if that takes too long, the set-up fails, and a later
    one works.
    """
    with members(1) as (rank,):
        meet([rank], "a")
        rank.do("knob", "FAKE_NCCL_ABORT_MS", "5000")
        assert "still being aborted" in rank.do("configure", "b", [0])["error"]
        rank.do("knob", "FAKE_NCCL_ABORT_MS", "0")
        until = time.monotonic() + SOON
        while error := rank.do("configure", "c", [0])["error"]:
            assert "still being aborted" in error
            assert time.monotonic() < until
        exchange_works([rank])


def test_a_set_up_that_needs_longer_gets_more_time() -> None:
    """Each failed set-up doubles the time for the next one, until the members are connected."""
    with members(2, FAKE_NCCL_CONNECT_MS="1500") as ranks:
        errors = []
        for attempt in range(4):
            answers = do_all(ranks, "configure", f"a{attempt}", [0, 1], 0.5)
            errors.append([answer["error"] for answer in answers])
            if not any(errors[-1]):
                break
        assert errors[0] == ["TimeoutError: NCCL has not connected the members within 0.5 s"] * 2
        assert not any(errors[-1])
        exchange_works(ranks)


def test_an_exchange_that_takes_too_long_is_broken_off() -> None:
    """An exchange times out although nothing noticed that a member is gone."""
    with members(2) as ranks:
        meet(ranks, "a")
        ranks[0].send("exchange", 0.5)  # the other member does not come
        assert "not complete after 0.5 s" in ranks[0].take("exchange", SOON)["error"]
