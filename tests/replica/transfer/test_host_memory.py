# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Host memory for copies of a state: pinned early, once, and beside training.

And a host's free memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replica.conftest import DEADLINE
from titan_ft import device
from titan_ft.config import FaultTolerance
from titan_ft.transfer import host_memory
from titan_ft.transfer.host_memory import HostMemory, free_bytes, most_updates

NUM_BYTES = 1000
GB = 2**30


class Host:
    """Records who pins memory: the sizes, and the names of the threads."""

    def __init__(self) -> None:
        self.gives = threading.Event()
        self.gives.set()
        self.asked: list[bool] = []  # True if the training thread pinned it
        self.is_short = False
        self._training = threading.current_thread()
        self._pinned = set[int]()  # addresses

    def pin(self, numel: int, dtype: torch.dtype, keep: bool) -> torch.Tensor:
        """Stands in for `device._pin`."""
        self.asked.append(threading.current_thread() is self._training)
        assert self.gives.wait(DEADLINE)
        if self.is_short:
            raise RuntimeError(
                "CUDA error: out of memory\nCUDA kernel errors might be reported later"
            )
        memory = torch.empty(numel, dtype=dtype)
        self._pinned.add(memory.data_ptr())
        return memory

    def is_pinned(self, memory: torch.Tensor) -> bool:
        return memory.data_ptr() in self._pinned


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, gpu_path: None) -> Host:
    """Provide a host with a GPU."""
    host = Host()
    monkeypatch.setattr(device, "_pin", host.pin)
    monkeypatch.setattr(device, "_unpinned", set())
    return host


def threads() -> list[str]:
    """Return the names of the threads that pin memory."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("titan_ft_pinning")
    ]


def test_memory_is_pinned_once_and_not_by_the_training_thread(host: Host) -> None:
    """The same memory is taken and given back many times."""
    memory, addresses = HostMemory(), set()
    memory.reserve(NUM_BYTES)
    for _ in range(3):
        lent = memory.lend(NUM_BYTES)
        assert host.is_pinned(lent)
        assert lent.numel() == NUM_BYTES
        addresses.add(lent.data_ptr())
        memory.give_back(lent)
    assert host.asked == [False]
    assert len(addresses) == 1


def test_whoever_reserves_does_not_wait(host: Host) -> None:
    """`take` waits for the thread that pins.

    It would take as long to pin the memory a second time.
    """
    host.gives.clear()
    memory = HostMemory()
    memory.reserve(NUM_BYTES)
    threading.Timer(0.05, host.gives.set).start()
    assert host.is_pinned(memory.lend(NUM_BYTES))
    assert host.asked == [False]


def test_a_copy_that_nothing_was_reserved_for_has_pinned_memory_too(host: Host) -> None:
    """Such copies are the first copy on a host with scarce memory, and a copy while another is
    read.
    """
    memory = HostMemory()
    lent = [memory.lend(NUM_BYTES), memory.lend(NUM_BYTES)]
    assert all(map(host.is_pinned, lent))
    assert lent[0].data_ptr() != lent[1].data_ptr()
    memory.give_back(lent[0])
    assert memory.lend(NUM_BYTES).data_ptr() == lent[0].data_ptr()
    assert host.asked == [True, True]


def test_a_host_without_memory_to_pin_is_named(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has the bytes and torch's reason.

    Copies use other memory, and nothing is pinned again.
    """
    host.is_short = True
    memory = HostMemory()
    with caplog.at_level(logging.WARNING):
        memory.reserve(12_340_000)
        for _ in range(3):
            lent = memory.lend(12_340_000)
            assert not host.is_pinned(lent)
            memory.give_back(lent)
    (line,) = caplog.messages
    assert "0.0123 GB of host memory cannot be pinned (CUDA error: out of memory)" in line
    assert host.asked == [False]


def test_a_joiner_has_other_memory_too(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """A joiner fetches into unpinned memory, and queues there. It may be slow, but needs no
    pinning.
    """
    pinned = device.empty_host(1000, torch.float32)
    assert host.is_pinned(pinned)
    host.is_short = True
    for _ in range(3):  # for example the buckets of an update
        found = device.empty_host(1000, torch.float32)
        assert (found.numel(), found.dtype, host.is_pinned(found)) == (1000, torch.float32, False)
    (line,) = caplog.messages
    assert "4e-06 GB of host memory cannot be pinned" in line


@pytest.mark.parametrize(("num_ranks", "reserves"), [(4, True), (5, False)])
def test_a_reserve_leaves_half_of_the_host_alone(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_ranks: int,
    reserves: bool,
) -> None:
    """All ranks of a host look before any of them allocates. So each counts the memory of all."""
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 2 * 4 * NUM_BYTES)
    memory = HostMemory(num_ranks)
    with caplog.at_level(logging.INFO):
        memory.reserve(NUM_BYTES)
        assert host.is_pinned(memory.lend(NUM_BYTES))
    (line,) = caplog.messages
    assert ("are kept for copies" in line) is reserves
    assert ("is taken when a joiner comes" in line) is not reserves
    assert host.asked == [not reserves]


def test_memory_that_is_at_hand_is_not_scarce(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is being pinned, or was given back, is at hand. Memory that was taken is not."""
    memory = HostMemory(num_ranks=4)
    memory.reserve(NUM_BYTES)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 2 * 4 * NUM_BYTES - 1)
    assert not memory.is_scarce(NUM_BYTES)
    lent = memory.lend(NUM_BYTES)
    assert memory.is_scarce(NUM_BYTES)
    assert not memory.is_scarce(NUM_BYTES // 2)
    memory.give_back(lent)
    assert not memory.is_scarce(NUM_BYTES)
    part = memory.lend(NUM_BYTES // 2)
    memory.give_back(part)
    assert memory.is_scarce(NUM_BYTES)
    assert memory.lend(NUM_BYTES // 2).data_ptr() == part.data_ptr()


def test_memory_of_another_size_is_let_go_of_before_more_is_taken(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with scarce memory has no room for both."""
    memory = HostMemory()
    lent = memory.lend(NUM_BYTES)
    left, gone = weakref.ref(lent), list[bool]()
    empty_host = device.empty_host

    def note(*args: Any) -> torch.Tensor:
        gone.append(left() is None)
        return empty_host(*args)

    monkeypatch.setattr(device, "empty_host", note)
    memory.give_back(lent)
    del lent
    memory.lend(NUM_BYTES // 2)
    assert gone == [True]


def test_what_is_kept_is_told(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """One line reports how much host memory is kept for good."""
    memory = HostMemory()
    with caplog.at_level(logging.INFO):
        memory.reserve(12_340_000)
        memory.lend(12_340_000)
    (line,) = caplog.messages
    assert line.startswith("0.0123 GB of host memory are kept for copies of this rank's state")


def test_nothing_is_left_behind(host: Host) -> None:
    """`close` waits for the thread that pins, and frees its memory."""
    host.gives.clear()
    memory = HostMemory()
    memory.reserve(NUM_BYTES)
    assert threads()
    threading.Timer(0.05, host.gives.set).start()
    memory.close()
    for thread in threading.enumerate():
        if thread.name.startswith("titan_ft_pinning"):
            thread.join(DEADLINE)
    assert not threads()
    assert memory._spare is None
    assert host.asked == [False]


def test_on_a_cpu_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy allocates its memory when it is made.

    Nothing is pinned, or allocated without a joiner.
    """
    memory = HostMemory()
    assert memory.reserve(NUM_BYTES)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 2 * NUM_BYTES - 1)
    assert not memory.reserve(NUM_BYTES)
    lent = memory.lend(NUM_BYTES)
    assert not threads()
    memory.give_back(lent)
    assert memory.lend(NUM_BYTES).data_ptr() == lent.data_ptr()


# Free memory


def write(root: Path, **files: str) -> None:
    """Write files below `root`. In their names __ stands for a slash, and _DOT_ for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(free: int) -> str:
    return f"MemTotal:  {2 * free // 1024} kB\nMemFree: 1 kB\nMemAvailable:  {free // 1024} kB\n"


def test_this_machine_tells() -> None:
    """On Linux the result is a part of this machine's memory."""
    free = free_bytes()
    assert free is not None
    assert 0 < free < 2**50


def test_without_cgroups_it_is_what_the_host_has(tmp_path: Path) -> None:
    """Caches that the kernel would drop count as free. Without /proc the result is None."""
    assert free_bytes(tmp_path) is None
    write(tmp_path, proc__meminfo=meminfo(5 * GB))
    assert free_bytes(tmp_path) == 5 * GB
    write(tmp_path, proc__self__cgroup="0::/\n")
    assert free_bytes(tmp_path) == 5 * GB


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ("max", "max", 50),
        (str(10 * GB), "max", 7),
        (str(10 * GB), str(12 * GB), 2),
        (str(GB), "max", 0),
    ],
)
def test_a_cgroup_and_those_above_it_bound_it(
    tmp_path: Path, own: str, above: str, expected: int
) -> None:
    """Each cgroup has a limit and a usage. Cached files that nobody uses any more do not count."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="0::/slice/job\n",
        sys__fs__cgroup__slice__job__memory_DOT_max=f"{own}\n",
        sys__fs__cgroup__slice__job__memory_DOT_current=f"{4 * GB}\n",
        sys__fs__cgroup__slice__job__memory_DOT_stat=f"anon {3 * GB}\ninactive_file {GB}\n",
        sys__fs__cgroup__slice__memory_DOT_max=f"{above}\n",
        sys__fs__cgroup__slice__memory_DOT_current=f"{10 * GB}\n",
    )
    assert free_bytes(tmp_path) == expected * GB


def test_a_container_sees_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    """The path of its cgroup may be the host's, which does not exist in the container."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="0::/kubepods/pod7\n",
        sys__fs__cgroup__memory_DOT_max=f"{8 * GB}\n",
        sys__fs__cgroup__memory_DOT_current=f"{2 * GB}\n",
    )
    assert free_bytes(tmp_path) == 6 * GB


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    """Memory has a tree of its own there. Without a limit it shows a huge number."""
    write(
        tmp_path,
        proc__meminfo=meminfo(50 * GB),
        proc__self__cgroup="5:cpu,cpuacct:/job\n4:memory:/job\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=f"{2**63 - 4096}\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=f"{30 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes=f"{16 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_usage_in_bytes=f"{12 * GB}\n",
        sys__fs__cgroup__memory__job__memory_DOT_stat=f"inactive_file 1\ntotal_inactive_file {3 * GB}\n",
    )
    assert free_bytes(tmp_path) == 7 * GB


def test_a_full_cgroup_leaves_nothing_and_one_update_is_queued(tmp_path: Path) -> None:
    """Without any queue a joiner could never catch up."""
    assert most_updates(FaultTolerance(), 0, 8, 4 * GB) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, 12), ({"catch_up_max_gb": 20.0}, 5)],
)
def test_half_of_it_is_shared_out_among_the_ranks(config: dict[str, float], expected: int) -> None:
    """Of 800 GB, 8 ranks may queue 50 GB each: 12 updates of 4 GB."""
    settings = FaultTolerance()
    for name, value in config.items():
        setattr(settings, name, value)
    assert most_updates(settings, 800 * GB, 8, 4 * GB) == expected
