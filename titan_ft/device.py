# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The device of this process, and the calls that differ between CPU and GPU.

The rest of the package calls these functions, and does not ask whether there is a GPU. On a machine
without an accelerator, streams and events are None, and all work is done when a call returns.

- What this machine has: `on_cpu`, `name`, `memory_bytes`, `current`, `check_machine`.
- The environment of NCCL between the groups: `nccl_environment`.
- Host memory for copies, and the memory of the exchange: `empty_host`, `empty_bucket`.
- Threads: `in_background`, `thread_initializer`.
- Streams and events: `side_stream`, `record_event`, `wait_for`, `synchronize`. See docs/gpu.md.
"""

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
    """Return this rank's shard of `tensor`, without a copy."""
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
    """Return the bytes of memory that this process uses; None if the machine does not report it.

    On an accelerator, this is the peak of torch's allocator since torchtitan's last line of
    metrics, as in that line. On a CPU, it is the present resident memory.
    """
    if not on_cpu():
        return int(torch.accelerator.max_memory_reserved())
    try:
        with open("/proc/self/statm", encoding="utf-8") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def exchange_device(process_group: str) -> torch.device:
    """Return the device of the exchange's buckets: Gloo sums in host memory, NCCL on the GPU.

    Args:
        process_group: the setting `fault_tolerance.process_group`, "gloo" or "nccl".
    """
    if process_group == "gloo":
        return torch.device("cpu")
    where = current()
    assert where.type != "cpu", "`check_machine` refuses nccl without a GPU"
    return where


def current() -> torch.device:
    """Return the accelerator's device that this thread uses; without an accelerator, the CPU."""
    if on_cpu():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def check_machine(process_group: str, local_rank: int) -> None:
    """Check that this machine can run the config.

    Args:
        process_group: the setting `fault_tolerance.process_group`, "gloo" or "nccl".
        local_rank: number of this process among its group's processes on this machine. The GPU of
            this process has the same number.

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
"""A variable that tells torch what to do with NCCL's errors.

torchtitan sets it for the communicators inside a group, and `AbortableNccl` for those between the
groups. So a user's value has no effect. The older name NCCL_ASYNC_ERROR_HANDLING has no effect
either, because torch prefers the new name.
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
"""Variables of NCCL and torch that must be 0, and the harm that another value does."""
_DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMP_TIME = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_DUMP_MS = 5000
"""Default of `_DUMP_TIME`. If a collective inside a group hangs, torch's watchdog dumps a flight
record (the last collectives), waits four times this long for the dump, and ends the process. With
0, torch began two dumps into one file, and the process ended before the first dump was complete."""
NO_DUMPS = {_DUMPS: "0", _DUMP_TIME: "0"}
"""The environment while torch makes the process group of the exchange.

A lost group is no hang inside this group, and torch dumps only one flight record in the life of a
process. The watchdog's wait would also delay the end of a broken communicator.
"""
_MIN_CONNECTIONS = 8
"""CUDA's default for the number of a GPU's hardware queues."""
_MAX_CONNECTIONS = 32
"""Largest number of a GPU's hardware queues."""


def nccl_environment(environ: Mapping[str, str], timeout_ms: int) -> dict[str, str]:
    """Return the environment variables for NCCL between the groups.

    They must be set before the first communicator is made. By default, torch ends the process when
    another group is lost, or lets the process wait. torch reads the variables for all
    communicators, also for those inside the group (docs/gpu.md, "NCCL between the groups").

    Args:
        environ: the user's environment. Values that do no harm stay.
        timeout_ms: the setting `process_group_timeout_ms`.

    Raises:
        ConfigError: the user has set a value that does harm.
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
    least_seconds = math.ceil(timeout_ms / 1000)  # torch ignores fractions of a second
    seconds = environ.get(name, str(least_seconds))
    if not _is_at_least(seconds, least_seconds):
        why = "the set-up of a communicator may take process_group_timeout_ms"
        raise refuse(name, f"a whole number of seconds >= {least_seconds}", why)
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": seconds,
        _DUMPS: environ.get(_DUMPS, "0"),  # torchtitan sets it to 1 with comm.trace_buf_size
        _DUMP_TIME: environ.get(_DUMP_TIME, str(_DUMP_MS)),
        **dict.fromkeys(_NCCL_OFF, "0"),
    }


def _is_at_least(text: str, least: int) -> bool:
    """True if a text is a whole number, and not less than `least`."""
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
            # Log each reason once: each bucket of each queued update may fail in the same way.
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
"""Reasons why memory could not be pinned, which are logged already."""


def _pin(numel: int, dtype: torch.dtype, keep: bool) -> torch.Tensor:
    """Allocate a pinned tensor; see `empty_host`."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < _LARGE_BYTES or not torch.cuda.is_available():
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    return _pinned.take(num_bytes, keep=keep).view(dtype)


_LARGE_BYTES = 1 << 20
"""Smaller tensors are allocated by torch, which keeps their memory. That costs a host little."""
_pinned = PinnedMemory()


def release_host_memory() -> None:
    """Give back the memory that `empty_host` keeps; returns at once."""
    _pinned.release_kept()


def free_bytes(where: torch.device) -> int:
    """Return the free bytes of a GPU; 0 for a CPU.

    The unused memory that torch's allocator keeps counts as free.
    """
    if where.type == "cpu":
        return 0
    free, _ = torch.accelerator.get_memory_info(where)
    unused = torch.accelerator.memory_reserved(where) - torch.accelerator.memory_allocated(where)
    return int(free + unused)


def in_background(make: Callable[[], _T], name: str) -> Future[_T]:
    """Run `make` on a thread of its own, so that the caller does not wait for the accelerator.

    On a CPU, `make` runs on the caller's thread.

    Args:
        name: name of the thread.
    """
    if on_cpu():
        made: Future[_T] = Future()
        made.set_result(make())
        return made
    thread = ThreadPoolExecutor(1, name, initializer=thread_initializer())
    made = thread.submit(make)
    thread.shutdown(wait=False)  # the thread ends after `make`
    return made


def empty_bucket(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a bucket for the exchange on `device` (see `exchange_device`).

    This function writes nothing to the bucket. So the stream that uses the bucket first need not
    wait for the present stream.
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
    """Run the block on a stream of its own, so that its work does not wait for the training's.

    On a CPU, this has no effect.

    Args:
        use: name of the stream. Each use has its own stream, so that no use waits for another.
    """
    if where.type == "cpu":
        yield
        return
    torch.accelerator.set_device_index(where.index or 0)
    # Do not use `with stream:`. It stores the former stream in the stream object, which all threads
    # share. The exchange's thread and the training thread would return to each other's streams.
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


def thread_initializer() -> Callable[[], None]:
    """Return a function for the start of a new thread: it selects the device of the present thread.

    By default, a new thread uses GPU 0. Without the function, GPU 0 would hold a CUDA context for
    every rank of the host.
    """
    if on_cpu():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


def record_event(timed: bool = False) -> torch.Event | None:
    """Return an event after the work that is queued on the current stream so far.

    Args:
        timed: record the time as well, for `seconds_between`.

    Returns:
        None on a CPU, where the work is done already.
    """
    if on_cpu():
        return None
    event = torch.Event(enable_timing=True) if timed else None
    return torch.accelerator.current_stream().record_event(event)


def record_time() -> torch.Event | None:
    """Return an event that records when the current stream gets here, for `seconds_between`."""
    return record_event(timed=True)


def seconds_between(begun: torch.Event | None, done: torch.Event | None) -> float:
    """Return the seconds between two timed events, which must have happened; 0 on a CPU."""
    if begun is None or done is None:
        return 0.0
    return begun.elapsed_time(done) / 1000


def synchronize(events: Iterable[torch.Event | None] = ()) -> None:
    """Block until all `events` have happened. Without events, wait for all work of the device."""
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
    """Make later operations on memory of `where` wait for `event`, if there is one.

    If `where` is a GPU, its current stream waits, and the host does not. If `where` is the host,
    this call blocks.
    """
    if event is None:
        return
    if where.type == "cpu":
        event.synchronize()
    else:
        torch.accelerator.current_stream(where).wait_event(event)


def join_stream(other: torch.Stream | None) -> torch.Stream | None:
    """Make the current stream wait for the work that is queued on `other`.

    Returns:
        The current stream; None on a CPU.
    """
    if on_cpu():
        return None
    current = torch.accelerator.current_stream()
    if other is not None and other != current:
        current.wait_stream(other)
    return current
