# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the cost of a job's control: agreements of a group's ranks, changes of membership,
quorums.

An agreement goes through the group's control tree, and through one TCPStore. `meeting.py` and
`lighthouse.py` measure the other two.

The ranks are threads of some processes (`control_ranks.py`), and run the real code of both without
a model. They agree again and again. The time of an agreement is the time between two decisions of
rank 0. All ranks share the cores of this machine.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from benchmarks.control_ranks import STORE, STORE_TIMEOUT, TREE, WARMUP
from benchmarks.lighthouse import measure_lighthouses
from benchmarks.meeting import measure_meetings
from benchmarks.run import BenchError, progress
from titan_ft.protocol.control.tree import FAN_OUT, find_depth

SIZES = (8, 64, 256, 1024)
DELAYS_MS = (0.0, 10.0)
"""Of each link of the tree, one way."""
AGREEMENTS = 60
LARGEST_STORE = 256
"""Ranks that agree through one TCPStore. Each has threads and connections of its own there."""
EXTRAPOLATED = 8192

_RANKS_OF_A_PROCESS = 64
"""More threads would spend their time on waiting for Python's lock, which real ranks do not share.
More processes would take the memory of more interpreters."""
_ROOT = Path(__file__).parents[1]


def measure_control() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of all parts."""
    yield from measure_agreements()
    yield from measure_meetings()
    yield from measure_lighthouses()


def measure_agreements(
    sizes: Sequence[int] = SIZES, delays_ms: Sequence[float] = DELAYS_MS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each number of ranks, by both ways, and the formula they follow."""
    found = []
    for size in sizes:
        for delay_ms in delays_ms:
            found.append(measure(TREE, size, delay_ms))
            yield f"{TREE}-{size}-{delay_ms:g}", found[-1]
        if size <= LARGEST_STORE:
            yield f"{STORE}-{size}", measure(STORE, size)
    yield "formula", fit(found)


def measure(
    kind: str,
    num_ranks: int,
    delay_ms: float = 0.0,
    num_agreements: int = AGREEMENTS,
) -> dict[str, Any]:
    """Let a group agree.

    Returns:
        Milliseconds of an agreement (`median`, `p90`), and microseconds of CPU that it takes: of
        all processes, for each rank (`rank_cpu`), and of rank 0 (`root_cpu`; None for the store).

    Raises:
        BenchError: a process has ended without figures.
    """
    num_processes = max(2, num_ranks // _RANKS_OF_A_PROCESS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    server_cpu = time.process_time()  # the store's server is in this process
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = []
        for process in range(num_processes):
            arguments = [kind, store.port, folder, process, num_processes]
            arguments += [num_ranks, delay_ms, num_agreements]
            command = [sys.executable, "-m", "benchmarks.control_ranks", *map(str, arguments)]
            pipe = subprocess.PIPE
            started = subprocess.Popen(command, cwd=_ROOT, stdout=pipe, text=True)
            stack.callback(started.wait)
            stack.callback(started.kill)
            processes.append(started)
        figures = [_read_figures(process) for process in processes]
    server_cpu = time.process_time() - server_cpu
    server_cpu *= num_agreements / (num_agreements + WARMUP)
    cpu = server_cpu + sum(each["cpu"] for each in figures)
    milliseconds = [1000 * seconds for seconds in figures[0]["seconds"]]
    root_cpu = figures[0]["root_cpu"] if kind == TREE else None  # the store has threads of its own
    summary = {
        "kind": kind,
        "ranks": num_ranks,
        "depth": find_depth(num_ranks),
        "delay_ms": delay_ms,
        "median": statistics.median(milliseconds),
        "p90": statistics.quantiles(milliseconds, n=10)[-1],
        "rank_cpu": 1e6 * cpu / num_agreements / num_ranks,
        "root_cpu": None if root_cpu is None else 1e6 * root_cpu / num_agreements,
    }
    progress(f"{kind}, {num_ranks} ranks, {delay_ms:g} ms a link: {summary['median']:.2f} ms")
    return summary


def _read_figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    printed = process.communicate()[0]
    try:
        return dict(json.loads(printed))
    except ValueError:
        status = process.returncode
        raise BenchError(f"ranks ended without figures, with exit status {status}") from None


def fit(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit `milliseconds = 2 x depth x delay + a x ranks` to the times of the tree.

    Returns:
        `a`, in milliseconds: the mean over the numbers of ranks, without delay. For `EXTRAPOLATED`
        ranks, without the links' delay: `depth`; `shared`, the milliseconds if all ranks share
        these cores; and `apart`, the milliseconds if each inner rank has a core of its own.
    """
    plain = [figures for figures in measured if figures["delay_ms"] == 0]
    a = statistics.mean(figures["median"] / figures["ranks"] for figures in plain)
    depth = find_depth(EXTRAPOLATED)
    # The levels of the tree work one after the other, and an inner rank has as much to do as rank 0
    # of the smallest group in which it has all its children. In larger groups it waits for cores.
    full = [figures["root_cpu"] for figures in plain if figures["ranks"] > FAN_OUT]
    return {
        "a": a,
        "ranks": EXTRAPOLATED,
        "depth": depth,
        "shared": a * EXTRAPOLATED,
        "apart": depth * full[0] / 1000,
    }
