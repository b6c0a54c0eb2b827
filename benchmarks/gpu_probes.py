# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The probes of scripts/check_gpu.sh without training: NCCL's collectives, reconfigurations, pinned
memory.

Each probe runs in processes of its own, one per rank, so that a crash or a hang of CUDA ends
nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.distributed_c10d import AllreduceOptions

from benchmarks.member_facts import exchange_with
from benchmarks.run import BenchError
from titan_ft import device
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.collectives import all_gather, all_to_all
from titan_ft.membership.process_group import build_process_group
from titan_ft.protocol.member import Member, Quorum

ROOT = Path(__file__).parents[1]
PROBE_SECONDS = 180.0
"""A deadline that only a hang reaches."""
POOL = 32
"""Communicators until each stream of torch's pool has been used once: only from then on must
nothing new be taken.
"""
_TIMEOUT = timedelta(seconds=30)
_SETTLE_SECONDS = 10.0
_TICK_SECONDS = 0.005
_QUANTIZED = 0.02
"""Relative error that 8 bits may leave in a sum of equal numbers."""


def run_probe(name: str, num_ranks: int, *sizes: int) -> list[dict[str, Any]]:
    """Run a probe with so many ranks, each on its GPU; returns the figures of each rank.

    Raises:
        BenchError: a rank failed, or took too long.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = []
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            command = [
                sys.executable,
                "-m",
                "benchmarks.gpu_probes",
                name,
                str(store.port),
                str(rank),
                str(num_ranks),
            ]
            process = subprocess.Popen(
                [*command, *map(str, sizes)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        deadline = time.monotonic() + PROBE_SECONDS
        for rank, process in enumerate(ranks):
            try:
                output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchError(f"rank {rank} was not done after {PROBE_SECONDS:g} s") from None
            if process.returncode != 0:
                said = [line for line in (errors + output).splitlines() if line.strip()] or [
                    "no word"
                ]
                raise BenchError(f"rank {rank} ended with status {process.returncode}: {said[-1]}")
            found.append(json.loads(output.splitlines()[-1]))
    return found


class _Membership:
    """The part of a membership that an exchange needs: the same quorum each time, with no
    failures.
    """

    def __init__(self, process_group: Any, quorum: Quorum) -> None:
        self.process_group, self._quorum, self.timeout = process_group, quorum, _TIMEOUT

    def await_quorum(self) -> Quorum:
        """Return the quorum."""
        return self._quorum

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Watch over nobody: the probe has a deadline."""
        return contextlib.nullcontext()

    def abort(self) -> None:
        """Break off."""
        self.process_group.abort()


def check_collectives(port: int, rank: int, num_ranks: int, numel: int) -> dict[str, Any]:
    """Exchange gradients of `numel` numbers in each wire format, on one communicator, and check the
    sums.

    A communicator of one rank has no peer. There, and everywhere else too, each collective of the
    exchange is called by itself as well.

    Raises:
        BenchError: a collective failed, or has a wrong result; names it.
    """
    group = build_process_group("nccl", _TIMEOUT)
    began = time.monotonic()
    _configure(group, port, 0, rank, num_ranks)
    seconds = {"set-up": time.monotonic() - began}
    members = tuple(Member(slot, 1.0, f"{slot}", "same") for slot in range(num_ranks))
    membership: Any = _Membership(group, Quorum("probe", rank, members, max_step=0))
    where = device.exchange_device("nccl")
    forms: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bfloat16": {"dtype": torch.bfloat16},
        "8 bits": {"quantize": True},
    }
    for form, settings in forms.items():
        parameter = nn.Parameter(torch.zeros(numel, device=where))
        parameter.grad = torch.full_like(parameter, rank + 1.0)
        exchange = GradientExchange(
            [parameter], membership, bucket_bytes=4 * numel, where=where, overlap=False, **settings
        )
        with _named(f"an exchange in {form}"):
            began = time.monotonic()
            reduced = exchange_with(exchange, lambda _: ([float(rank)], b"message"))
            reduced.sums.write(1.0)
            device.synchronize()
            seconds[form] = time.monotonic() - began
            expected = num_ranks * (num_ranks + 1) / 2
            error = float((parameter.grad / expected - 1).abs().max())
            _expect(
                error <= (_QUANTIZED if form == "8 bits" else 0.0), f"sums are wrong by {error:.2g}"
            )
            _expect(
                reduced.rows == [[float(other)] for other in range(num_ranks)],
                f"rows are {reduced.rows}",
            )
            _expect(
                reduced.messages == [b"message"] * num_ranks, f"messages are {reduced.messages}"
            )
    own = torch.full((numel,), float(rank), device=where)
    with _named("all-reduce"):
        summed = own.clone()
        group.allreduce([summed], AllreduceOptions()).wait()
        _expect(bool((summed == num_ranks * (num_ranks - 1) / 2).all()), "the sum is wrong")
    with _named("all-gather"):
        gathered = all_gather(group, own, num_ranks, _TIMEOUT)
        wanted = torch.arange(num_ranks, device=where, dtype=own.dtype)
        _expect(bool((gathered == wanted[:, None]).all()), "a part is wrong")
    with _named("all-to-all"):
        rows = torch.stack([own * num_ranks + other for other in range(num_ranks)])
        received = all_to_all(group, rows, _TIMEOUT)
        expected_rows = (wanted * num_ranks + rank)[:, None]
        _expect(bool((received == expected_rows).all()), "a row is wrong")
    if (failure := group.errored()) is not None:
        raise failure
    return {"seconds": seconds}


def reconfigure(port: int, rank: int, num_ranks: int, times: int) -> dict[str, Any]:
    """Build communicators one after the other; returns GPU memory, threads and descriptors before
    and after.
    """
    group = build_process_group("nccl", _TIMEOUT)
    for number in range(POOL):
        _configure(group, port, number, rank, num_ranks)
    before = _usage()
    seconds = []
    for number in range(POOL, POOL + times):
        began = time.monotonic()
        _configure(group, port, number, rank, num_ranks)
        seconds.append(time.monotonic() - began)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        after = _usage()
        if all(after[name] <= before[name] for name in before) or time.monotonic() > deadline:
            return {"seconds": seconds, "before": before, "after": after}
        time.sleep(0.1)


def pin_memory(port: int, rank: int, num_ranks: int, mebibytes: int) -> dict[str, float]:
    """Pin memory and release it as the product does, beside a thread that ticks.

    Returns:
        For each, its seconds, and the longest time without a tick of the other thread.
    """
    device.synchronize()  # opens the context
    num_bytes = mebibytes << 20
    at_rest = _resident_bytes()
    found: dict[str, float] = {}
    with _ticking(found, "pin"):
        memory = device.empty_host(num_bytes, torch.uint8)
    if not memory.is_pinned():
        raise BenchError("the memory is not pinned")
    memory.fill_(1)  # resident: that it goes back can be seen
    with _ticking(found, "give back"):
        del memory
        device.release_host_memory()
        deadline = time.monotonic() + _TIMEOUT.total_seconds()
        while _resident_bytes() > at_rest + num_bytes / 2:
            if time.monotonic() > deadline:
                raise BenchError("the memory was not given back")
            time.sleep(_TICK_SECONDS)
    return found


@contextlib.contextmanager
def _ticking(found: dict[str, float], what: str) -> Iterator[None]:
    """Enter the seconds of what follows, and the longest time between two ticks of another thread
    meanwhile.
    """
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(_TICK_SECONDS)
        ticks.append(time.monotonic())

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    while not ticks:
        time.sleep(_TICK_SECONDS)
    began = time.monotonic()
    try:
        yield
    finally:
        found[what] = time.monotonic() - began
        done.set()
        thread.join()
        found[f"{what}, still"] = max(after - before for before, after in itertools.pairwise(ticks))


def _configure(group: Any, port: int, number: int, rank: int, num_ranks: int) -> None:
    ranks = list(range(num_ranks))
    group.configure(f"127.0.0.1:{port}/{number}", rank, num_ranks, number, 0, 1, ranks)


def _usage() -> dict[str, int]:
    gc.collect()
    device.synchronize()
    free, total = torch.cuda.mem_get_info()
    threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return {"MiB": (total - free) >> 20, "threads": threads, "descriptors": descriptors}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise BenchError(
            f"{what}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error


def _expect(right: bool, otherwise: str) -> None:
    if not right:
        raise BenchError(otherwise)


_PROBES: dict[str, Callable[..., Any]] = {
    "collectives": check_collectives,
    "reconfigure": reconfigure,
    "pin": pin_memory,
}


def main(argv: Sequence[str]) -> None:
    """Be a rank of a probe, and print its figures."""
    name, port, rank, num_ranks, *sizes = argv
    # Before CUDA begins, as in a worker: it reads some of this only once.
    os.environ.update(device.nccl_environment(os.environ, int(_TIMEOUT.total_seconds() * 1000)))
    torch.accelerator.set_device_index(int(rank))
    status = 0
    try:
        print(
            json.dumps(_PROBES[name](int(port), int(rank), int(num_ranks), *map(int, sizes))),
            flush=True,
        )
    except Exception as error:  # noqa: BLE001  # process edge: the caller reports the last line
        traceback.print_exc()
        print((str(error).strip() or type(error).__name__).splitlines()[0], flush=True)
        status = 1
    # Threads of NCCL may still wait for a peer that failed.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
