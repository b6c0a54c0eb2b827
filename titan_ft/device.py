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
    """Return whether this machine has no accelerator that torch can use."""
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
"""torchtitan writes it, for the communicators of the group; `AbortableNccl` does for its own, which
come later.

So a value of the user's has no effect. Nor has NCCL_ASYNC_ERROR_HANDLING, the older name: torch
prefers this one. """

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
_DUMPS, _DUMP_TIME = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
# Before torch's watchdog ends a process in which a collective of the group hangs, it waits four
# times as long for the flight record. With 0, torch's monitor began two dumps into one file, and
# the process ended before the first one.
_DUMP_MS = 5000
NO_DUMPS = {_DUMPS: "0", _DUMP_TIME: "0"}
"""In the environment when torch makes the exchange's process group.

A lost group is no hang, and torch writes one flight record in the life of a process. The watchdog's
wait would also delay the end of a broken communicator. """

# Queues of a GPU: CUDA's own default, and the most there are.
_MIN_CONNECTIONS, _MAX_CONNECTIONS = (8, 32)


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
        for each in (name, name.removeprefix("TORCH_")):  # the older names of some
            if environ.get(each, "0").strip() != "0":
                raise refuse(each, "0", why)
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").strip().upper() == "DETAIL":
        raise refuse(
            "TORCH_DISTRIBUTED_DEBUG", "OFF or INFO", f"it turns {ASYNC_ERROR_HANDLING} on"
        )
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if (number := environ.get(name)) is not None and not (
        number.isdecimal() and int(number) >= _MIN_CONNECTIONS
    ):
        why = "the exchange and a collective of the group could wait for each other in one queue"
        raise refuse(name, f">= {_MIN_CONNECTIONS}", why)
    name = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
    least = math.ceil(timeout_ms / 1000)  # torch cuts fractions off
    seconds = environ.get(name)
    if seconds is not None and not (seconds.isdecimal() and int(seconds) >= least):
        why = "the set-up of a communicator may take process_group_timeout_ms"
        raise refuse(name, f"a whole number of seconds >= {least}", why)
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": str(_MAX_CONNECTIONS),
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(least),
        **{
            each: environ[each] for each in ("CUDA_DEVICE_MAX_CONNECTIONS", name) if each in environ
        },
        _DUMPS: environ.get(_DUMPS, "0"),  # torchtitan sets it with comm.trace_buf_size
        _DUMP_TIME: environ.get(_DUMP_TIME, str(_DUMP_MS)),
        **dict.fromkeys(_NCCL_OFF, "0"),
    }


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
        except (
            RuntimeError,
            OSError,
        ) as error:  # neither torch nor Python has a narrower one for it
            reason = str(error).split("\n", 1)[0]
            if reason not in _unpinned:  # each bucket of each queued update may fail alike
                _unpinned.add(reason)
                logger.warning(
                    "%.3g GB of host memory cannot be pinned (%s): copies between it and the GPU "
                    "take several times as long, and training waits for them",
                    numel * dtype.itemsize / 1e9,
                    reason,
                )
    return torch.empty(numel, dtype=dtype)


_unpinned: set[str] = set()  # why memory could not be pinned, as told


def _pin(numel: int, dtype: torch.dtype, keep: bool) -> torch.Tensor:
    num_bytes = numel * dtype.itemsize
    if num_bytes < _LARGE or not torch.cuda.is_available():
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    return _pinned.take(num_bytes, keep=keep).view(dtype)


_LARGE = 1 << 20  # bytes: what is smaller costs a host nothing, and torch keeps it
_pinned = PinnedMemory()


def release_host_memory() -> None:
    """Give back the memory that `empty_host` keeps; returns at once."""
    _pinned.release_kept()


def free_bytes(where: torch.device) -> int:
    """Return how much memory a device has left, with what torch keeps for later; 0 for a CPU."""
    if where.type == "cpu":
        return 0
    free, _ = torch.accelerator.get_memory_info(where)
    return int(
        free + torch.accelerator.memory_reserved(where) - torch.accelerator.memory_allocated(where)
    )


def in_background(make: Callable[[], _T], name: str) -> Future[_T]:
    """Run `make` on a thread of its own if there is an accelerator, where it takes a while; on a
    CPU at once.
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
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = (
        False  # which deterministic algorithms (torchtitan's `debug`) have torch do
    )
    try:
        return torch.empty(numel, dtype=dtype, device=device)
    finally:
        settings.fill_uninitialized_memory = fills


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
    # Not `with stream:`, which keeps the stream to go back to in the stream itself. The exchange's
    # thread may be left in this one: the training thread would go on on that thread's stream, and
    # the other way round.
    before = torch.accelerator.current_stream(where)
    torch.accelerator.set_stream(_stream_of_its_own(where, use))
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@functools.cache
def _stream_of_its_own(where: torch.device, use: str) -> torch.Stream:
    """Return the one stream of a use: memory that was freed on a stream is taken again only
    there.
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
    return torch.accelerator.current_stream().record_event(
        torch.Event(enable_timing=True) if timed else None
    )


def record_time() -> torch.Event | None:
    """Record when the current stream gets here, for `seconds_between`. Does not wait."""
    return record_event(timed=True)


def seconds_between(begun: torch.Event | None, done: torch.Event | None) -> float:
    """Return a stream's seconds between two timed events that it has passed; 0 without the
    events.
    """
    return 0.0 if begun is None or done is None else begun.elapsed_time(done) / 1000


def synchronize(events: Iterable[torch.Event | None] = ()) -> None:
    """Wait for `events`, or for everything queued on the device when none is given."""
    events = list(events)
    for event in events:
        if event is not None:
            event.synchronize()
    if not events and not on_cpu():
        torch.accelerator.synchronize()


def read_later(scalar: torch.Tensor) -> Callable[[], float]:
    """Start the copy of a number to the host; the returned function waits for it and returns the
    number.

    The returned function may be called on any thread.
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
    """Make the current stream wait for the work queued on `other`; returns the current stream, None
    on a CPU.
    """
    if on_cpu():
        return None
    current = torch.accelerator.current_stream()
    if other is not None and other != current:
        current.wait_stream(other)
    return current
