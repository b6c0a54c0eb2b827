# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The event of a step: written after its commit, by a thread if a GPU still makes the update."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from titan_ft.host import cpu

cpu.prepare()

from titan_ft.engine.step import Committed  # noqa: E402
from titan_ft.engine.work import Work  # noqa: E402
from titan_ft.protocol.round import Update  # noqa: E402
from titan_ft.training.step_log import StepLog  # noqa: E402

STEPS = 4
DEADLINE = 20.0  # seconds; only ever reached by a bug


class Written:
    """Stands in for an EventLog and for torchtitan's metrics; every second step is logged."""

    def __init__(self, fails_at: int = 0) -> None:
        self.events: list[tuple[int, float | None]] = []
        self.logged: list[tuple[int, float]] = []
        self.threads: set[str] = set()
        self.times: list[float] = []
        self.data_loading_times = [0.0]
        self._fails_at = fails_at

    def emit(self, event: Any, *, is_stamped: bool) -> None:
        """Take an event."""
        assert is_stamped
        if event.step == self._fails_at:
            raise OSError("the disk is full")
        self.threads.add(threading.current_thread().name)
        self.times.append(event.time)
        self.events.append((event.step, event.grad_norm))

    def should_log(self, step: int) -> bool:
        """Return True if a step is logged."""
        return step % 2 == 0

    def log(self, step: int, loss: float, max_loss: float, grad_norm: float, **_: Any) -> None:
        """Take a line of metrics."""
        self.logged.append((step, grad_norm))


class Norm:
    """A number that the device computes later; reading it waits."""

    def __init__(self, value: float, is_there: bool = True) -> None:
        self.value, self.there = value, threading.Event()
        if is_there:
            self.there.set()

    def read(self) -> float:
        assert self.there.wait(DEADLINE)
        return self.value


def commit(log: StepLog, step: int, norm: Norm) -> None:
    """Tell of a step as the trainer does."""
    update = Update(step=step, tokens=1, lineage=step, scale=1.0, entries=[], readers=[])
    facts: dict[str, Any] = {
        "valid_tokens": 1,
        "loss": 2.0,
        "max_loss": 2.0,
        "own_tokens": 1,
        "own_loss": 2.0,
    }
    committed = Committed(
        update=update,
        parent=step - 1,
        participants=[0],
        num_exchanges=1,
        slowest_ratio=1.0,
        **facts,
    )
    work = Work(step, lr=0.1, grad_norm=norm.read)
    log.emit(committed, work, step, None)
    log.log(committed, work, step, step, 0.0)


def make_steps(written: Written) -> StepLog:
    """Make steps with the norms 1.0, 2.0, and so on."""
    log = StepLog(written, written, 0)  # type: ignore[arg-type]  # stands in for both
    for step in range(1, STEPS + 1):
        commit(log, step, Norm(float(step)))
    return log


def test_on_a_cpu_it_is_there_at_once() -> None:
    """A process's commit is in its file at once, whatever happens to the process then."""
    written = Written()
    make_steps(written)
    assert written.events == [(step, float(step)) for step in range(1, STEPS + 1)]
    assert written.threads == {threading.current_thread().name}
    assert written.logged == [(2, 2.0), (4, 4.0)]


def test_on_a_gpu_each_is_there_in_its_order(gpu_path: None) -> None:
    """With the norm that its own step has come to."""
    written = Written()
    make_steps(written).flush()
    assert written.events == [(step, float(step)) for step in range(1, STEPS + 1)]
    assert written.threads == {"titan_ft_step_log_0"}
    assert written.logged == [(2, 2.0), (4, 4.0)]


def test_training_waits_for_the_norm_of_a_step_that_is_logged_only(gpu_path: None) -> None:
    """It queues the next step's kernels meanwhile."""
    written, late = Written(), Norm(1.0, is_there=False)
    log = StepLog(written, written, 0)  # type: ignore[arg-type]  # stands in for both
    commit(log, 1, late)  # or it would wait here for ever
    assert written.events == []
    committed = time.time()
    late.there.set()
    commit(log, 2, Norm(2.0))
    assert written.logged == [(2, 2.0)]
    log.flush()
    assert [step for step, _ in written.events] == [1, 2]
    assert written.times[0] <= committed <= written.times[1], "it says when it was committed"


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_one_that_cannot_be_written_ends_the_worker(
    where: str, request: pytest.FixtureRequest
) -> None:
    """At once, or with the next step where a thread writes it."""
    if where == "gpu":
        request.getfixturevalue("gpu_path")
    written = Written(fails_at=2)
    with pytest.raises(OSError, match="the disk is full"):
        make_steps(written)
    assert written.events == [(1, 1.0)]
