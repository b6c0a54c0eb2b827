# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Pinned host memory: other threads run during pinning and unpinning, and no copy uses unpinned
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for the package `harness`

from harness.job import Job

from tests.integration.conftest import make_job, zygote  # noqa: F401  # fixtures
from tests.replica.conftest import DEADLINE
from titan_ft import device, pinned
from titan_ft.transfer.host_memory import HostMemory

MB = 1 << 20
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def own_bytes() -> int:
    """Return the bytes of this process that no fork inherits (`MADV_DONTFORK`, which only this
    memory has).
    """
    total = 0
    for area in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    ):
        if re.search(r"^VmFlags:.* dc\b", area, flags=re.MULTILINE):
            begin, end = area.split(" ", 1)[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def wait_until(condition: Any) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.005)


class Gate:
    """Holds up the current stream until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._wait = _CALLBACK(lambda _: self._open.wait(DEADLINE) and None)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        ctypes.CDLL("libcudart.so.13").fakecuda_enqueue(stream, self._wait, None)

    def open(self) -> None:
        self._open.set()
        torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Check that each test returns all of its memory."""
    torch.cuda.set_device(0)
    yield
    gc.collect()
    device.release_host_memory()
    wait_until(lambda: own_bytes() == 0)


@contextlib.contextmanager
def longest_gap() -> Iterator[list[float]]:
    """Measure the longest time without another running Python thread; append it to the yielded list
    at the end.
    """
    ticks, stop, found = [time.monotonic()], threading.Event(), list[float]()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield found
    finally:
        ticks.append(time.monotonic())
        stop.set()
        thread.join()
    found.append(max(after - before for before, after in itertools.pairwise(ticks)))


@pytest.mark.parametrize("keep", [False, True])
def test_other_threads_run_while_memory_is_pinned_and_given_back(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """Each way takes 3 s here. With torch's allocator no thread ran in the 3 s of the way back."""
    monkeypatch.setenv("FAKE_PIN_MS_PER_MB", "30")
    began = time.monotonic()
    with longest_gap() as pinning:
        memory = device.empty_host(100 * MB, torch.uint8, keep=keep)
    pinned_at = time.monotonic()
    with longest_gap() as giving_back:
        del memory
        device.release_host_memory()
        returned = time.monotonic()
        wait_until(lambda: own_bytes() == 0)
    assert min(pinned_at - began, time.monotonic() - pinned_at) >= 3
    assert max(*pinning, *giving_back, returned - pinned_at) < 1


def test_copies_do_not_wait_while_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would hold a lock meanwhile, which every non-blocking copy takes."""
    there = torch.ones(8, device="cuda")
    device.read_later(there[0])()  # torch pins now
    memory = device.empty_host(100 * MB, torch.uint8)
    monkeypatch.setenv("FAKE_PIN_MS_PER_MB", "30")
    del memory
    device.release_host_memory()
    assert device.read_later(there[0])() == 1
    torch.zeros(8).to("cuda", non_blocking=True)
    assert own_bytes() >= 100 * MB, "the copies have waited"


def test_memory_is_pinned_to_the_byte_and_copies_are_asynchronous() -> None:
    numel = 5 * MB + 4
    source = torch.arange(numel, dtype=torch.int32, device="cuda")
    before = torch.cuda.host_memory_stats()
    host = device.empty_host(numel, torch.int32)
    back = torch.zeros_like(source)
    assert host.is_pinned()
    assert own_bytes() == -(-host.nbytes // 4096) * 4096
    gate = Gate()
    host.copy_(source, non_blocking=True)
    back.copy_(host, non_blocking=True)
    copied = device.record_event()
    assert copied is not None
    assert not copied.query(), "the host has waited for a copy"
    gate.open()
    assert torch.equal(host, torch.arange(numel, dtype=torch.int32))
    assert torch.equal(back, source)
    assert torch.cuda.host_memory_stats() == before, "torch's allocator knows of it"


def test_memory_is_given_back_only_after_copies_that_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA leaves a copy to unpinned memory undefined, and nothing else keeps the memory mapped."""
    seen: list[bool] = []
    unpin = pinned._unpin

    def look(block: Any) -> None:
        seen.append(copied.query())
        unpin(block)

    monkeypatch.setattr(pinned, "_unpin", look)
    source = torch.ones(4 * MB, dtype=torch.uint8, device="cuda")
    host = device.empty_host(4 * MB, torch.uint8)
    with torch.cuda.stream(torch.cuda.Stream()):  # not one that the ending tensor's thread knows
        gate = Gate()
        host.copy_(source, non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
    ended = threading.Thread(target=lambda tensors: tensors.clear(), args=([host],))
    del host
    ended.start()
    ended.join()
    time.sleep(0.1)  # for a thread that does not wait, to unpin
    assert not seen
    gate.open()
    wait_until(lambda: seen)
    assert seen == [True]


def test_memory_is_used_again_only_after_copies_that_are_under_way() -> None:
    """A replayed update and the next queued one are copied on different streams."""
    source = torch.ones(4 * MB, dtype=torch.uint8, device="cuda")
    first = device.empty_host(4 * MB, torch.uint8, keep=True)
    address = first.data_ptr()
    gate = Gate()
    first.copy_(source, non_blocking=True)
    del first
    time.sleep(0.1)  # for a thread that does not wait, to offer it
    second = device.empty_host(4 * MB, torch.uint8, keep=True)
    second.fill_(7)
    gate.open()
    assert second.unique().tolist() == [7]
    assert second.data_ptr() != address
    third = None
    deadline = time.monotonic() + DEADLINE
    while third is None or third.data_ptr() != address:  # it is kept
        third = None
        third = device.empty_host(4 * MB, torch.uint8, keep=True)
        assert time.monotonic() < deadline


def test_only_memory_of_the_same_size_is_used_again() -> None:
    kept = device.empty_host(4 * MB, torch.uint8, keep=True)
    address = kept.data_ptr()
    del kept
    wait_until(lambda: device._pinned._kept.get(4 * MB))
    other = device.empty_host(3 * MB, torch.uint8, keep=True)
    payload = device.empty_host(4 * MB, torch.uint8)  # goes back to the host by itself
    assert address not in (other.data_ptr(), payload.data_ptr())
    assert device.empty_host(MB, torch.float32, keep=True).data_ptr() == address


def test_a_refused_block_is_named_once_and_spoils_no_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error of a refused call; this thread's next kernel would end the training with
    it.
    """
    monkeypatch.setattr(device, "_unpinned", set())
    monkeypatch.setenv("FAKE_PIN_MOST_MB", "4")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            memory = device.empty_host(5 * MB, torch.uint8)
            assert torch.ones(4, device="cuda").sum().item() == 4
            assert not memory.is_pinned()
    (line,) = caplog.messages
    assert line.startswith("0.00524 GB of host memory cannot be pinned (")
    assert device.empty_host(4 * MB, torch.uint8).is_pinned()


def test_a_host_without_addresses_is_named_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kernel refuses to map a block, and torch's own allocation fails too, both errors are
    reported.
    """
    monkeypatch.setattr(device, "_unpinned", set())
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="memory"):
        device.empty_host(1 << 47, torch.uint8)
    (line,) = caplog.messages
    assert "cannot be pinned ([Errno 12]" in line


def test_memory_that_cannot_be_unpinned_is_never_used_for_something_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU may still reach it."""
    runtime = torch.cuda.cudart()
    unregister = runtime.cudaHostUnregister
    monkeypatch.setattr(pinned, "_lost", [])
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda _: 2)
    with caplog.at_level(logging.WARNING):
        address = device.empty_host(4 * MB, torch.uint8).data_ptr()
        wait_until(lambda: caplog.messages)
    (line,) = caplog.messages
    assert line.startswith("0.00419 GB of pinned memory cannot be given back to the host")
    assert own_bytes() == 4 * MB
    (block,) = pinned._lost
    unregister(address)
    block.memory.close()


def test_nothing_is_left_after_twenty_heals() -> None:
    """Each heal fetches a state, queues updates, and copies its own state for another group."""
    memory, before = HostMemory(), torch.cuda.host_memory_stats()
    there = torch.ones(3 * MB, dtype=torch.uint8, device="cuda")
    found = set()
    for number in range(20):
        payload = device.empty_host(3 * MB, torch.uint8)
        rooms = [
            [device.empty_host(2 * MB, torch.uint8, keep=True) for _ in range(2)] for _ in range(3)
        ]
        there.copy_(payload, non_blocking=True)
        rooms.clear()
        copy = memory.lend((4 + number % 2) * MB)
        copy[: there.numel()].copy_(there, non_blocking=True)
        del payload
        device.release_host_memory()
        memory.give_back(copy)
        size = copy.numel()
        del copy
        wait_until(lambda size=size: own_bytes() == size)
        found.add(threading.active_count())
    memory.close()
    assert len(found) == 1, "threads are left"
    wait_until(lambda: own_bytes() == 0)
    assert torch.cuda.host_memory_stats() == before


def test_a_fork_leaves_the_memory_alone() -> None:
    """A forked loader worker inherits none of the memory, and its end unpins none of its
    parent's.
    """
    kept = device.empty_host(2 * MB, torch.uint8, keep=True)
    del kept
    wait_until(lambda: device._pinned._kept.get(2 * MB))
    host = device.empty_host(4 * MB, torch.uint8)
    host.fill_(3)
    if (child := os.fork()) == 0:
        try:
            inherited = own_bytes()
            del host
            gc.collect()
            device.release_host_memory()
            os._exit(1 if inherited else 0)
        except BaseException:  # noqa: BLE001  # the child must not run the rest of the tests
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert host.is_pinned()
    assert host.unique().tolist() == [3]
    assert torch.equal(host.cuda(non_blocking=True).cpu(), host)


def test_all_is_done_on_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, where every rank of the host would open a context."""
    runtime, seen = torch.cuda.cudart(), list[tuple[str, int]]()
    register, unregister, synchronize = (
        runtime.cudaHostRegister,
        runtime.cudaHostUnregister,
        torch.cuda.synchronize,
    )

    def note(name: str, call: Any) -> Any:
        def noted(*args: Any) -> Any:
            seen.append((name, torch.cuda.current_device()))
            return call(*args)

        return noted

    # Of a rank that has pinned nothing yet.
    monkeypatch.setattr(device, "_pinned", pinned.PinnedMemory())
    monkeypatch.setattr(runtime, "cudaHostRegister", note("register", register))
    monkeypatch.setattr(runtime, "cudaHostUnregister", note("unregister", unregister))
    monkeypatch.setattr(torch.cuda, "synchronize", note("synchronize", synchronize))
    torch.cuda.set_device(1)
    made = device.in_background(lambda: device.empty_host(4 * MB, torch.uint8), "titan_ft_room")
    made.result()
    del made
    wait_until(lambda: own_bytes() == 0)
    assert dict(seen) == {"register": 1, "synchronize": 1, "unregister": 1}
    torch.cuda.set_device(0)


def test_no_group_waits_while_another_one_gives_memory_back(make_job: Callable[..., Job]) -> None:  # noqa: F811
    """A healed joiner returns the fetched state's memory during its own first steps.

    The other group's step after the heal took longer than all of that, because the joiner's threads
    stood still.
    """
    job = make_job(
        groups=2,
        steps=50,
        tiny=False,
        flags=[
            "--fault_tolerance.process_group=nccl",
            "--fault_tolerance.bucket_size_mb=4",
            "--training.seq_len=32",
            "--training.local_batch_size=2",
        ],
        hooks={"faults": [{"replica": 1, "point": "backward", "step": 4}], "hold": 2},
        env={"FAKE_PIN_MS_PER_MB": "60", "FAKE_CUDA_SLOW": "1000"},
    )
    job.run(150)
    (healed,) = job.events("heal_finished")
    times = [event["time"] for event in job.events("step_committed") if event["replica"] == 0]
    longest = max(
        after - before for before, after in itertools.pairwise(times) if after > healed["time"]
    )
    unpinned = re.findall(
        r"(?:cudaHostUnregister|cudaFreeHost) took (\d+) ms", job.output(1, attempt=1)
    )
    assert longest < max(map(int, unpinned)) / 1000 / 2
    print(
        f"longest step of the other group after the heal: {longest:.2f} s; unpinning took {unpinned} ms"
    )
