# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The memory that copies of a state go to: pinned early and once, beside training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.fake_accelerator import FakeAccelerator, installed
from tests.replica.conftest import DEADLINE
from titan_ft import device
from titan_ft.replica.host_memory import HostMemory

NUM_BYTES = 1000


class Host:
    """What a host gives as pinned memory, and to which thread."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator = accelerator
        self.gives = threading.Event()
        self.gives.set()
        self.asked: list[bool] = []  # whether the training thread did
        self.is_short = False
        self._training, self._empty = threading.current_thread(), device.empty_host

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Stands in for `device.empty_host`."""
        self.asked.append(threading.current_thread() is self._training)
        assert self.gives.wait(DEADLINE)
        if self.is_short:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return self._empty(numel, dtype)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Provide a host with a GPU."""
    with installed(0) as accelerator:
        host = Host(accelerator)
        monkeypatch.setattr(device, "empty_host", host.empty)
        yield host


def threads() -> list[str]:
    """Return the names of the threads that pin memory."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("titan_ft_pinning")]


def test_memory_is_pinned_once_and_not_by_the_training_thread(host: Host) -> None:
    """However often it is reserved, lent and taken back."""
    memory, addresses = HostMemory(), set()
    for _ in range(3):
        memory.reserve(lambda: NUM_BYTES)
        lent = memory.take(NUM_BYTES)
        assert host.accelerator.is_pinned(lent)
        assert lent.numel() == NUM_BYTES
        addresses.add(lent.data_ptr())
        memory.give_back(lent)
    assert host.asked == [False]
    assert len(addresses) == 1


def test_whoever_reserves_does_not_wait(host: Host) -> None:
    """Who wants the memory before it is there waits for it: to pin it himself would take as long."""
    host.gives.clear()
    memory = HostMemory()
    memory.reserve(lambda: NUM_BYTES)
    threading.Timer(0.05, host.gives.set).start()
    assert host.accelerator.is_pinned(memory.take(NUM_BYTES))
    assert host.asked == [False]


def test_a_copy_that_nothing_was_reserved_for_has_pinned_memory_too(host: Host) -> None:
    """As the first copy of a group whose host may have no room for a reserve; or while another copy is read still."""
    memory = HostMemory()
    lent = [memory.take(NUM_BYTES), memory.take(NUM_BYTES)]
    assert all(map(host.accelerator.is_pinned, lent))
    assert lent[0].data_ptr() != lent[1].data_ptr()
    memory.give_back(lent[0])
    assert memory.take(NUM_BYTES).data_ptr() == lent[0].data_ptr()
    assert host.asked == [True, True]


def test_a_host_without_memory_to_pin_is_named(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """One line, with the bytes and torch's reason; the copies go to other memory, and nobody tries to pin again."""
    host.is_short = True
    memory = HostMemory()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            memory.reserve(lambda: 12_340_000)
            lent = memory.take(12_340_000)
            assert not host.accelerator.is_pinned(lent)
            memory.give_back(lent)
    (line,) = caplog.messages
    assert "0.0123 GB of host memory cannot be pinned (RuntimeError: CUDA error: out of memory)" in line
    assert host.asked == [False]


def test_what_is_kept_is_told(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """How much of the host's memory is gone for good."""
    memory = HostMemory()
    with caplog.at_level(logging.INFO):
        memory.reserve(lambda: 12_340_000)
        memory.take(12_340_000)
    (line,) = caplog.messages
    assert line.startswith("0.0123 GB of host memory are kept for copies of this rank's state")


def test_nothing_is_left_behind(host: Host) -> None:
    """Closing waits for the thread that pins, and lets go of what it has pinned."""
    host.gives.clear()
    memory = HostMemory()
    memory.reserve(lambda: NUM_BYTES)
    assert threads()
    threading.Timer(0.05, host.gives.set).start()
    memory.close()
    for thread in threading.enumerate():
        if thread.name.startswith("titan_ft_pinning"):
            thread.join(DEADLINE)
    assert not threads()
    assert memory._spare is None
    memory.reserve(lambda: NUM_BYTES)
    assert host.asked == [False]


def test_on_a_cpu_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes its memory when it is made: there is nothing to pin, and not twice the memory without a joiner."""
    memory = HostMemory()
    memory.reserve(lambda: pytest.fail("counted for nothing"))
    lent = memory.take(NUM_BYTES)
    assert not threads()
    memory.give_back(lent)
    assert memory.take(NUM_BYTES).data_ptr() == lent.data_ptr()
