# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The device of this process, and the calls that differ between CPU and GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_ft.config import ConfigError
from titan_ft.pinned import PinnedMemory

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_cpu() -> bool:
    """Return True if this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def name() -> str:
    """Return the name of this machine's accelerator; without an accelerator, of its processor."""
    if not on_cpu():
        return str(torch.get_device_module().get_device_name(0))
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Return the memory of this process, in bytes; None if the machine does not report it.

    On an accelerator: the peak of the allocator since torchtitan's last line of metrics, as
    torchtitan reports it. On a CPU: the resident memory now.
    """
    if not on_cpu():
        return int(torch.accelerator.max_memory_reserved())
    try:
        with open("/proc/self/statm", encoding="utf-8") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def exchange_device(process_group: str) -> torch.device:
    """Return where the exchange's buckets live: Gloo reduces in host memory, NCCL on the GPU."""
    if process_group == "gloo":
        return torch.device("cpu")
    where = current()
    assert where.type != "cpu", "`require` refuses nccl without a GPU"
    return where


def current() -> torch.device:
    """Return the accelerator's device that this thread uses; without an accelerator, the CPU."""
    if on_cpu():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def require(process_group: str, local_rank: int) -> None:
    """Refuse a config that this machine cannot run.

    Args:
        local_rank: number of this process among its group's processes on this machine, and of its
            GPU.

    Raises:
        ConfigError: `process_group` is nccl and there is no NVIDIA GPU, or there are more ranks
            than GPUs.
    """
    num_gpus = 0 if on_cpu() else torch.accelerator.device_count()
    if num_gpus and local_rank >= num_gpus:
        raise ConfigError(
            f"LOCAL_RANK must be < the GPUs that this process sees ({num_gpus}), got {local_rank}; "
            "start fewer ranks (--ranks-per-replica, torchrun's --nproc-per-node)"
        )
    if process_group == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(
            'fault_tolerance.process_group must be "gloo" on a machine without an NVIDIA GPU, '
            'got "nccl"; set it to "gloo"'
        )


ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""A variable that torchtitan sets for the group's communicators. `AbortableNccl` sets it later, for
its own communicators.

So a user's value has no effect. The older name NCCL_ASYNC_ERROR_HANDLING has none either, because
torch prefers the new name.
"""

_NCCL_OFF = {
    "TORCH_NCCL_ENABLE_MONITORING": (
        "torch's heartbeat monitor would end this process when a peer is lost"
    ),
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": (
        "all threads would stop for their stacks when a peer is lost"
    ),
    "TORCH_NCCL_PROPAGATE_ERROR": (
        "torch's watchdog would wait for the store of a peer that is lost"
    ),
    "TORCH_NCCL_DESYNC_DEBUG": f"it turns {ASYNC_ERROR_HANDLING} on",
    "TORCH_NCCL_BLOCKING_WAIT": "nobody would notice NCCL's errors",
    "TORCH_NCCL_HIGH_PRIORITY": "the group's communicators would take streams of the exchange's",
    "NCCL_LAUNCH_ORDER_IMPLICIT": (
        "the order of a group's and the exchange's kernels differs between ranks"
    ),
}
"""NCCL's variables that must be 0, with the harm that another value does."""
_DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMP_TIME = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_DUMP_MS = 5000
"""If a collective of the group hangs, torch's watchdog waits four times this long for the flight
record, and then ends the process. With 0, torch's monitor began two dumps into one file, and the
process ended before the first dump was complete."""
NO_DUMPS = {_DUMPS: "0", _DUMP_TIME: "0"}
"""The environment while torch makes the exchange's process group.

A lost group is no hang, and torch writes one flight record in the life of a process. The watchdog's
wait would also delay the end of a broken communicator.
"""
_MIN_CONNECTIONS = 8
"""Queues of a GPU by CUDA's default."""
_MAX_CONNECTIONS = 32
"""The most queues that a GPU has."""


def nccl_environment(environ: Mapping[str, str], timeout_ms: int) -> dict[str, str]:
    """Return the environment variables that NCCL between the groups needs before its first
    communicator.

    By default, torch ends the process when a peer is lost, or lets the process wait. torch reads
    the variables for all communicators, also for those inside the group (docs/gpu.md, "NCCL between
    the groups").

    Args:
        environ: the user's environment. A variable that does not contradict a needed value stays.
        timeout_ms: `process_group_timeout_ms`.

    Raises:
        ConfigError: the user has set a contradicting value.
    """

    def refuse(name: str, rule: str, why: str) -> ConfigError:
        return ConfigError(
            f'{name} must be {rule} with fault_tolerance.process_group = "nccl", '
            f"got {environ[name]!r}: {why}; unset it"
        )

    for name, why in _NCCL_OFF.items():
        older_name = name.removeprefix("TORCH_")
        for each in (name, older_name):
            if environ.get(each, "0").strip() != "0":
                raise refuse(each, "0", why)
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").strip().upper() == "DETAIL":
        raise refuse(
            "TORCH_DISTRIBUTED_DEBUG", "OFF or INFO", f"it turns {ASYNC_ERROR_HANDLING} on"
        )
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    connections = environ.get(name, str(_MAX_CONNECTIONS))
    if not _is_at_least(connections, _MIN_CONNECTIONS):
        why = "the exchange and a collective of the group could wait for each other in one queue"
        raise refuse(name, f">= {_MIN_CONNECTIONS}", why)
    name = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
    least_seconds = math.ceil(timeout_ms / 1000)  # torch cuts fractions of a second off.
    seconds = environ.get(name, str(least_seconds))
    if not _is_at_least(seconds, least_seconds):
        why = "the set-up of a communicator may take process_group_timeout_ms"
        raise refuse(name, f"a whole number of seconds >= {least_seconds}", why)
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": seconds,
        _DUMPS: environ.get(_DUMPS, "0"),  # torchtitan sets this one with comm.trace_buf_size.
        _DUMP_TIME: environ.get(_DUMP_TIME, str(_DUMP_MS)),
        **dict.fromkeys(_NCCL_OFF, "0"),
    }


def _is_at_least(text: str, least: int) -> bool:
    return text.isdecimal() and int(text) >= least


def empty_host(numel: int, dtype: torch.dtype, *, keep: bool = False) -> torch.Tensor:
    """Allocate a flat host tensor, pinned if there is a GPU, so that copies can be asynchronous.

    If the host cannot pin more memory, the log says so once, and the tensor is not pinned. The host
    then waits for each copy from and to the tensor.

    Args:
        keep: after the tensor is freed, keep its memory for the next tensor of this size, until
            `release_host_memory`. Without it the memory is returned to the host.
    """
    if not on_cpu():
        try:
            return _pin(numel, dtype, keep)
        except (RuntimeError, OSError) as error:
            # torch and Python have no narrower error for this failure.
            reason = str(error).split("\n", 1)[0]
            # One line: each bucket of each queued update may fail in the same way.
            if reason not in _unpinned:
                _unpinned.add(reason)
                logger.warning(
                    "%.3g GB of host memory cannot be pinned (%s): copies between it and the GPU "
                    "take several times as long, and training waits for them",
                    numel * dtype.itemsize / 1e9,
                    reason,
                )
    return torch.empty(numel, dtype=dtype)


_unpinned: set[str] = set()
"""Reasons of failures to pin memory that are logged already."""


def _pin(numel: int, dtype: torch.dtype, keep: bool) -> torch.Tensor:
    num_bytes = numel * dtype.itemsize
    if num_bytes < _LARGE or not torch.cuda.is_available():
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    return _pinned.take(num_bytes, keep=keep).view(dtype)


_LARGE = 1 << 20
"""Bytes. Smaller tensors cost a host little, so torch may keep their memory."""
_pinned = PinnedMemory()


def release_host_memory() -> None:
    """Give back the memory that `empty_host` keeps; returns at once."""
    _pinned.release_kept()


def free_bytes(where: torch.device) -> int:
    """Return the free bytes of a device, with the memory that torch's allocator keeps unused.

    0 for a CPU.
    """
    if where.type == "cpu":
        return 0
    free, _ = torch.accelerator.get_memory_info(where)
    unused = torch.accelerator.memory_reserved(where) - torch.accelerator.memory_allocated(where)
    return int(free + unused)


def in_background(make: Callable[[], _T], name: str) -> Future[_T]:
    """Run `make` on a thread of its own, so that the caller need not wait for the accelerator.

    On a CPU, `make` runs at once.
    """
    if on_cpu():
        made: Future[_T] = Future()
        made.set_result(make())
        return made
    thread = ThreadPoolExecutor(1, name, initializer=for_thread())
    made = thread.submit(make)
    thread.shutdown(wait=False)
    return made


def empty_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a bucket for the exchange on `device` (see `exchange_device`).

    Nothing is written to the bucket. So its first stream need not wait for the stream that
    allocates it.
    """
    if device.type == "cpu":
        return empty_host(numel, dtype, keep=True)
    # With deterministic algorithms (torchtitan's `debug`) torch would fill the new memory.
    settings: Any = torch.utils.deterministic
    fills_memory = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        return torch.empty(numel, dtype=dtype, device=device)
    finally:
        settings.fill_uninitialized_memory = fills_memory


@contextlib.contextmanager
def side_stream(where: torch.device, use: str = "exchange") -> Iterator[None]:
    """Run the block on a stream of its own, so that it never queues behind compute; no effect on a
    CPU.

    Args:
        use: name of the stream. Each use has its own stream, so that no use waits for another.
    """
    if where.type == "cpu":
        yield
        return
    torch.accelerator.set_device_index(where.index or 0)
    # `with stream:` would store the stream to return to in the stream object, which all threads
    # share. The exchange's thread and the training thread would return to each other's stream.
    before = torch.accelerator.current_stream(where)
    torch.accelerator.set_stream(_stream_of_its_own(where, use))
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@functools.cache
def _stream_of_its_own(where: torch.device, use: str) -> torch.Stream:
    """Return the one stream of a use.

    torch's allocator gives memory that was freed on a stream to the same stream only. A new stream
    each time would leave that memory unused.
    """
    return torch.Stream(where)


def for_thread() -> Callable[[], None]:
    """Return a function that a new thread calls first, to use the device of the calling thread.

    A CUDA thread begins on device 0. Without the call, device 0 would hold a context for every rank
    of the host.
    """
    if on_cpu():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


def record_event(timed: bool = False) -> torch.Event | None:
    """Mark the work queued so far on the current stream; None on a CPU, where that work is already
    done.

    Args:
        timed: record the time as well, for `seconds_between`.
    """
    if on_cpu():
        return None
    event = torch.Event(enable_timing=True) if timed else None
    return torch.accelerator.current_stream().record_event(event)


def record_time() -> torch.Event | None:
    """Record when the current stream gets here, for `seconds_between`. Does not wait."""
    return record_event(timed=True)


def seconds_between(begun: torch.Event | None, done: torch.Event | None) -> float:
    """Return the seconds between two timed events that have happened; 0 without the events."""
    if begun is None or done is None:
        return 0.0
    return begun.elapsed_time(done) / 1000


def synchronize(events: Iterable[torch.Event | None] = ()) -> None:
    """Wait for `events`, or for everything queued on the device when none is given."""
    events = list(events)
    for event in events:
        if event is not None:
            event.synchronize()
    if not events and not on_cpu():
        torch.accelerator.synchronize()


def read_later(scalar: torch.Tensor) -> Callable[[], float]:
    """Start the copy of a number to the host, and return a function that returns the number.

    The function waits for the copy. It may be called on any thread.
    """
    if scalar.device.type == "cpu":
        value = scalar.item()
        return lambda: value
    there = empty_host(1, scalar.dtype)
    there.copy_(scalar.detach().reshape(1), non_blocking=True)
    copied = record_event()

    def read() -> float:
        synchronize([copied])
        return there.item()

    return read


def wait_for(event: torch.Event | None, where: torch.device) -> None:
    """Make the next operations on memory of `where` wait for `event`, if there is one.

    For a device, its current stream waits, and the host does not. For host memory, the host waits.
    """
    if event is None:
        return
    if where.type == "cpu":
        event.synchronize()
    else:
        torch.accelerator.current_stream(where).wait_event(event)


def join_stream(other: torch.Stream | None) -> torch.Stream | None:
    """Make the current stream wait for the work queued on `other`.

    Returns:
        The current stream; None on a CPU.
    """
    if on_cpu():
        return None
    current = torch.accelerator.current_stream()
    if other is not None and other != current:
        current.wait_stream(other)
    return current
