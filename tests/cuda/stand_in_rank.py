# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a communicator of the stand-in's NCCL, without torch: stand_in_rank.py.

Reads commands from standard input, one a line in JSON: a function of this file and its arguments.
Writes the function's result, one line of JSON each.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
_INT32, _FLOAT16, _FLOAT32, _BFLOAT16 = 2, 6, 7, 9
_SUM, _MAX, _AVERAGE = 0, 2, 4
_DEADLINE = 30.0  # seconds; only a bug reaches it

# The stand-in for NCCL takes streams from the one for CUDA.
_cuda = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
_nccl = ctypes.CDLL("libnccl.so.2")
_cuda.fakecuda_pending.restype = ctypes.c_uint64


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class Rank:
    """The communicator and the stream of this process."""

    def __init__(self) -> None:
        self.communicator = ctypes.c_void_p()
        self.stream = ctypes.c_void_p()
        self.rank = self.ranks = 0
        _cuda.cudaStreamCreate(ctypes.byref(self.stream))


_state = Rank()


def _device_zeros(kind: Any, count: int) -> Any:
    """Return an array in memory of the device, which the host can read here."""
    address = ctypes.c_void_p()
    _cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(ctypes.sizeof(kind) * count))
    return (kind * count).from_address(address.value or 0)


def _device_array(kind: Any, values: list[Any]) -> Any:
    array = _device_zeros(kind, len(values))
    array[:] = values
    return array


def connect(name: str, ranks: int, rank: int) -> int:
    """Begin to set a non-blocking communicator up."""
    _state.rank, _state.ranks = rank, ranks
    config = Config(ctypes.sizeof(Config), 0, 0, 0)
    identity = UniqueId(name.encode())
    _state.communicator = ctypes.c_void_p()
    return _nccl.ncclCommInitRankConfig(
        ctypes.byref(_state.communicator), ranks, identity, rank, ctypes.byref(config)
    )


def result() -> int:
    value = ctypes.c_int(-1)
    _nccl.ncclCommGetAsyncError(_state.communicator, ctypes.byref(value))
    return value.value


def wait_until_launched() -> int:
    """Poll as torch does, until the communicator's call is no longer in progress."""
    end = time.monotonic() + _DEADLINE
    while result() == IN_PROGRESS and time.monotonic() < end:
        time.sleep(0.001)
    return result()


def wait_for_result(expected: int) -> int:
    end = time.monotonic() + _DEADLINE
    while result() != expected and time.monotonic() < end:
        time.sleep(0.001)
    return result()


def results_of_polls(count: int) -> list[int]:
    """Return the different results of so many polls."""
    seen = set()
    for _ in range(count):
        seen.add(result())
        time.sleep(0.001)
    return sorted(seen)


def pending() -> int:
    return _cuda.fakecuda_pending(_state.stream)


def begin_sum() -> int:
    """Begin an all-reduce and return NCCL's immediate answer."""
    values = _device_array(ctypes.c_float, [1.0])
    return _all_reduce(values, _FLOAT32, _SUM)


def abort() -> float:
    """Abort the communicator; return the seconds that it took."""
    begin = time.monotonic()
    _nccl.ncclCommAbort(_state.communicator)
    return time.monotonic() - begin


def use_after_abort() -> int:
    value = ctypes.c_int(-1)
    return _nccl.ncclCommGetAsyncError(_state.communicator, ctypes.byref(value))


def resources() -> dict[str, int]:
    """Count the threads, the descriptors and the mapped communicators of this process."""
    with open("/proc/self/maps") as maps:
        mapped = sum("/dev/shm/" in line for line in maps)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "communicators": mapped,
    }


def _all_reduce(values: Any, data_type: int, operation: int) -> int:
    return _nccl.ncclAllReduce(
        values,
        values,
        ctypes.c_size_t(len(values)),
        data_type,
        operation,
        _state.communicator,
        _state.stream,
    )


def _finish() -> None:
    assert wait_until_launched() == SUCCESS
    _cuda.cudaStreamSynchronize(_state.stream)


def _reduced(kind: Any, values: list[Any], data_type: int, operation: int) -> list[Any]:
    array = _device_array(kind, values)
    assert _all_reduce(array, data_type, operation) == IN_PROGRESS
    _finish()
    return list(array)


def _collect(name: str, sent: list[int], received: int, *middle: Any) -> list[int]:
    """Call a collective that reads one array of numbers and writes another one."""
    source = _device_array(ctypes.c_int32, sent)
    target = _device_array(ctypes.c_int32, [0] * received)
    count = ctypes.c_size_t(min(len(sent), received))
    call = getattr(_nccl, name)
    answer = call(source, target, count, _INT32, *middle, _state.communicator, _state.stream)
    assert answer == IN_PROGRESS
    _finish()
    return list(target)


def collectives() -> dict[str, Any]:
    """Run each collective once; rank r gives 10 r, 10 r + 1, ..."""
    first = 10 * _state.rank
    return {
        "sum": _reduced(ctypes.c_float, [first + 0.5], _FLOAT32, _SUM),
        "max": _reduced(ctypes.c_int32, [first], _INT32, _MAX),
        "average": _reduced(ctypes.c_float, [first], _FLOAT32, _AVERAGE),
        # 1 + 2 ** -8 + 2 ** -8: rounded after each addition it would stay 1. Bits of 1.0 and 2 **
        # -8.
        "bfloat16": _reduced(
            ctypes.c_uint16, [0x3F80 if _state.rank == 0 else 0x3B80], _BFLOAT16, _SUM
        ),
        "float16": _reduced(
            ctypes.c_uint16, [0x3C00 if _state.rank == 0 else 0xC200], _FLOAT16, _SUM
        ),
        "gather": _collect("ncclAllGather", [first, first + 1], 2 * _state.ranks),
        "scatter": _collect("ncclReduceScatter", [first, first + 1], 1, _SUM),
        "all_to_all": _all_to_all(first),
        "broadcast": _collect("ncclBroadcast", [first], 1, 1),
        "reduce": _collect("ncclReduce", [first + 1], 1, _SUM, 0),
        "exchange": _exchange(first),
    }


def _all_to_all(first: int) -> list[int]:
    source = _device_array(ctypes.c_int32, [first, first + 1])
    target = _device_array(ctypes.c_int32, [0, 0])
    _nccl.ncclAlltoAll(
        source, target, ctypes.c_size_t(1), _INT32, _state.communicator, _state.stream
    )
    _finish()
    return list(target)


def _exchange(first: int) -> list[int]:
    """Send to the next rank and receive from the previous one, in one group."""
    source = _device_array(ctypes.c_int32, [first])
    target = _device_array(ctypes.c_int32, [0])
    one = ctypes.c_size_t(1)
    following, preceding = (_state.rank + 1) % _state.ranks, (_state.rank - 1) % _state.ranks
    _nccl.ncclGroupStart()
    _nccl.ncclSend(source, one, _INT32, following, _state.communicator, _state.stream)
    _nccl.ncclRecv(target, one, _INT32, preceding, _state.communicator, _state.stream)
    assert _nccl.ncclGroupEnd() == IN_PROGRESS
    _finish()
    return list(target)


def gather_large(count: int) -> bool:
    """Gather more than fits into one round, and compare all of it."""
    source = _device_zeros(ctypes.c_int32, count)
    target = _device_zeros(ctypes.c_int32, count * _state.ranks)
    expected = b""
    for rank in range(_state.ranks):
        block = bytes((index * 7 + rank) % 251 for index in range(4096)) * (count * 4 // 4096)
        expected += block
        if rank == _state.rank:
            ctypes.memmove(source, block, len(block))
    _nccl.ncclAllGather(
        source, target, ctypes.c_size_t(count), _INT32, _state.communicator, _state.stream
    )
    _finish()
    return ctypes.string_at(target, len(expected)) == expected


def main() -> None:
    commands: dict[str, Callable[..., Any]] = {
        function.__name__: function
        for function in (
            connect,
            wait_until_launched,
            wait_for_result,
            results_of_polls,
            pending,
            begin_sum,
            abort,
            use_after_abort,
            resources,
            collectives,
            gather_large,
        )
    }
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
