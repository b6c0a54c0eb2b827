# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the rate at which an exchange sums gradients over Gloo, beside bare Gloo.

Bare Gloo is torch's `ProcessGroupGloo` with all-reduces of existing buckets, four of them in
flight. Ours is a whole exchange of the same bytes: the agreement on its members, gradients into
buckets, sums, rows. Each member is a process of its own. In it both ways take turns, behind equally
slow links.

    python -m benchmarks.bandwidth PORT RANK MEMBERS MBPS BUCKETS BYTES

is a member. The members meet in the store at that port. Member 0 prints the seconds.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.distributed_c10d import AllreduceOptions

from benchmarks.links import UNTHROTTLED, pace
from benchmarks.member_facts import exchange_with
from benchmarks.run import BenchError, progress
from titan_ft.config import FaultTolerance
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.process_group import build_process_group
from titan_ft.protocol.member import Member, Quorum
from titan_ft.system.process import borrowed_socket, own_sockets

NUMS_MEMBERS = (2, 4)
CASES = ((UNTHROTTLED, 8), (1000.0, 8), (100.0, 2))
"""Mbit/s in which each connection sends, and buckets of an exchange."""
IN_FLIGHT = 4
"""All-reduces of bare Gloo."""
ROUNDS = 7
"""Of both ways, in turn; the first is none."""

_ROOT = Path(__file__).parents[1]
_TIMEOUT = timedelta(seconds=120)
_BUCKET_BYTES = int(FaultTolerance.bucket_size_mb * (1 << 20))


def measure_bandwidth(
    cases: Sequence[tuple[float, int]] = CASES,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each number of members at each rate."""
    for number in NUMS_MEMBERS:
        for mbps, num_buckets in cases:
            yield f"{number}-{mbps:g}", measure(number, mbps, num_buckets)


def measure(
    num_members: int, mbps: float, num_buckets: int, bucket_bytes: int = _BUCKET_BYTES
) -> dict[str, Any]:
    """Let so many members sum so many buckets.

    Returns:
        MB of gradients that one member has summed in a second, by bare Gloo and by an exchange of
        ours (medians), and the median, lowest and highest ratio of both in the same round.

    Raises:
        BenchError: a member has ended without figures.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = [str(number) for number in (num_members, mbps, num_buckets, bucket_bytes)]
    with contextlib.ExitStack() as stack:
        members = []
        for rank in range(num_members):
            command = [
                sys.executable,
                "-m",
                "benchmarks.bandwidth",
                str(store.port),
                str(rank),
                *common,
            ]
            members.append(subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(members[-1].wait)
            stack.callback(members[-1].kill)
        told = members[0].communicate()[0]
    try:
        rounds = json.loads(told)
    except ValueError:
        raise BenchError(
            f"member 0 ended without figures, with exit status {members[0].returncode}"
        ) from None
    megabytes = num_buckets * bucket_bytes / 1e6
    ratios = [bare / ours for bare, ours in rounds]
    figures = {
        "members": num_members,
        "mbps": mbps,
        "buckets": num_buckets,
        "bare": megabytes / statistics.median(bare for bare, _ in rounds),
        "ours": megabytes / statistics.median(ours for _, ours in rounds),
        "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
    }
    progress(
        f"{num_members} members at {mbps:g} Mbit/s: {figures['ours']:.1f} of {figures['bare']:.1f} MB/s"
    )
    return figures


class _Membership:
    """What an exchange needs of one: the same quorum each time, with no failures."""

    def __init__(self, process_group: Any, quorum: Quorum) -> None:
        self.process_group, self._quorum, self.timeout = process_group, quorum, _TIMEOUT

    def await_quorum(self) -> Quorum:
        """Return the quorum."""
        return self._quorum

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        """Watch no member: the process of a member ends if another one fails."""
        return contextlib.nullcontext()

    def abort(self) -> None:
        """Break off."""
        self.process_group.abort()


def take_part(
    port: int, rank: int, num_members: int, mbps: float, num_buckets: int, bucket_bytes: int
) -> None:
    """Be a member; the first one prints the seconds of each round, those of bare Gloo and ours."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    before = set(own_sockets())
    bare: Any = ProcessGroupGloo(PrefixStore("bare", store), rank, num_members, _TIMEOUT)
    group = build_process_group("gloo", _TIMEOUT)
    group.configure(f"127.0.0.1:{port}/ours", rank, num_members)
    if mbps != UNTHROTTLED:
        for link in set(own_sockets()) - before:
            with borrowed_socket(*link) as connection:
                if connection is not None:
                    pace(connection, int(mbps * 1e6 / 8))
    members = tuple(Member(slot, 1.0, f"{slot}", "same") for slot in range(num_members))
    parameters = [nn.Parameter(torch.zeros(bucket_bytes // 4)) for _ in range(num_buckets)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    exchange = GradientExchange(
        parameters,
        _Membership(group, Quorum("bench", rank, members, max_step=0)),  # type: ignore[arg-type]  # stands in for it
        bucket_bytes=bucket_bytes,
        where=torch.device("cpu"),
        overlap=False,
    )
    buckets = [torch.zeros(bucket_bytes // 4) for _ in range(num_buckets)]

    def sum_bare() -> None:
        works: list[Any] = []
        for bucket in buckets:
            if len(works) == IN_FLIGHT:
                works.pop(0).wait()
            works.append(bare.allreduce([bucket], AllreduceOptions()))
        for work in works:
            work.wait()

    def time_it(act: Callable[[], object]) -> float:
        bare.allreduce([torch.zeros(1)], AllreduceOptions()).wait()  # all begin together
        began = time.monotonic()
        act()
        return time.monotonic() - began

    rounds = [
        (time_it(sum_bare), time_it(lambda: exchange_with(exchange, lambda _: ([0.0], b""))))
        for _ in range(ROUNDS)
    ]
    bare.allreduce(
        [torch.zeros(1)], AllreduceOptions()
    ).wait()  # nobody leaves before all have ended
    if rank == 0:
        print(json.dumps(rounds[1:]), flush=True)


def main(argv: Sequence[str]) -> None:
    """Be a member."""
    port, rank, num_members, mbps, num_buckets, bucket_bytes = argv
    take_part(
        int(port), int(rank), int(num_members), float(mbps), int(num_buckets), int(bucket_bytes)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
