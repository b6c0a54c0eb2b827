# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Throttle the connections between the groups of a run on this host, and measure tokens per second.

`SO_MAX_PACING_RATE` makes TCP itself send no faster, on loopback too. It needs no privilege and no
kernel module. The sockets are the workers' own: this process, which started the workers, sets the
option on copies of their descriptors (`pidfd_getfd`), so that nothing in the workers changes. A
link has a rate in each direction and no further delay. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.rounds import SYNC_STEPS, TIMEOUT_SECONDS, Case, configure
from benchmarks.run import SURVIVOR, BenchError, Run, progress
from benchmarks.systems import NUM_GROUPS, OURS, Job
from titan_ft.chaos.inside.blackhole import connected_to, connections_here
from titan_ft.run.events import StepCommitted
from titan_ft.system.process import sockets_of

RATES_MBPS = (1000.0, 100.0, 10.0)
UNTHROTTLED = 0.0
MODES = (Case(NUM_GROUPS), *(Case(NUM_GROUPS, steps, 0.7) for steps in sorted(SYNC_STEPS)))
MEASURE_SECONDS = 20.0
"""Of training at each rate, and one exchange at least."""
STEPS = 100_000
"""More than is measured."""

_SO_MAX_PACING_RATE = (
    47  # <asm-generic/socket.h>; bytes per second, 64 bits of them on 64-bit kernels
)
_NO_RATE = 2**64 - 1
_PIDFD_GETFD = 438  # the same on all architectures
# Of struct tcp_info, <linux/tcp.h>; what is sent again is counted again.
_BYTES_SENT = slice(200, 208)


class Links:
    """The TCP connections between the workers of different groups.

    Args:
        workers: pids of each group's workers, all on this host.
    """

    def __init__(self, workers: Mapping[int, Sequence[int]]) -> None:
        self._workers = workers

    def find(self) -> dict[int, tuple[int, int]]:
        """Return the group and the process of each end of a connection, by the inode of its
        socket.
        """
        connections, found = connections_here(), {}
        for group, pids in self._workers.items():
            others = {
                pid for other, theirs in self._workers.items() if other != group for pid in theirs
            }
            afar = connected_to(others, connections)
            found.update(
                {inode: (group, pid) for pid in pids for inode in sockets_of(pid) if inode in afar}
            )
        return found

    def throttle(self, mbps: float) -> None:
        """Limit each end to so many Mbit/s, or remove the limit.

        Raises:
            BenchError: there is no connection, or the system does not permit it.
        """
        rate = _NO_RATE if mbps == UNTHROTTLED else int(mbps * 1e6 / 8)
        found = self.find()
        for inode, (_, pid) in found.items():
            with socket_of(pid, inode) as borrowed:
                if borrowed is not None:
                    pace(borrowed, rate)
        if not found:
            raise BenchError("no connection between the groups was found")

    def bytes_sent(self, group: int) -> dict[int, int]:
        """Return the bytes that a group has sent to others on each present connection, by inode."""
        found = {}
        for inode, (sender, pid) in self.find().items():
            if sender == group:
                with socket_of(pid, inode) as borrowed:
                    if borrowed is not None:
                        told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        found[inode] = int.from_bytes(told[_BYTES_SENT], "little")
        return found


def pace(connection: socket.socket, bytes_per_second: int) -> None:
    """Let a socket send no faster."""
    connection.setsockopt(
        socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_second)
    )


@contextlib.contextmanager
def socket_of(pid: int, inode: int) -> Iterator[socket.socket | None]:
    """Hold a socket of another process for a moment, during which its connection does not close.

    None if the socket is closed already.

    Raises:
        BenchError: the system does not permit it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(entry.path).st_ino != inode:
                    continue
                copy = libc.syscall(_PIDFD_GETFD, pidfd, int(entry.name), 0)
                if copy < 0:
                    reason = os.strerror(ctypes.get_errno())
                    raise BenchError(
                        f"links cannot be throttled: {reason}; kernel.yama.ptrace_scope must be 0 or 1"
                    )
                with socket.socket(fileno=copy) as borrowed:
                    if os.fstat(copy).st_ino == inode:  # else the number was given away meanwhile
                        yield borrowed
                        return
    finally:
        os.close(pidfd)
    yield None


def measure_rate(mbps: float, seconds: float = 2.0) -> float:
    """Return the real Mbit/s of a paced connection of this host, which shows whether pacing works
    here.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        receiver, _ = server.accept()
        pace(sender, int(mbps * 1e6 / 8))
        deadline = time.monotonic() + seconds

        def send() -> None:
            with contextlib.suppress(OSError):  # the receiver has seen enough
                while time.monotonic() < deadline:
                    sender.sendall(bytes(65536))

        thread = threading.Thread(target=send)
        thread.start()
        with receiver:
            receiver.recv(2**20)
            # Behind the first bytes: a connection starts slowly.
            received, began = (0, time.monotonic())
            while time.monotonic() < deadline:
                received += len(receiver.recv(2**20))
            took = time.monotonic() - began
        thread.join()
    return received * 8 / 1e6 / took


def throughput(commits: Sequence[StepCommitted], since: float) -> list[tuple[float, int]]:
    """Return seconds and tokens between consecutive commits of a rank whose whole exchange came
    after `since`.

    In the synchronous mode an exchange begins in the backward, so a round's whole last step must
    come after `since`.
    """
    found = []
    for before, after in pairwise(commits):
        last_step = after.compute_seconds / max(after.inner_steps or 1, 1)
        if after.time - after.exchange_seconds - last_step >= since:
            found.append((after.time - before.time, after.tokens))
    return found


def measure_links(
    base: Mapping[str, Any], work_dir: Path, done: Mapping[str, Any], cases: Sequence[Case] = MODES
) -> Iterator[tuple[str, Any]]:
    """Measure each mode that is not `done` at all rates, from fast to slow; yields its name and
    figures.

    First, as `paced`, the real rates of paced connections.
    """
    if "paced" not in done:
        yield "paced", {f"{mbps:g}": measure_rate(mbps) for mbps in RATES_MBPS}
    for case in cases:
        if case.name in done:
            continue
        job = Job(OURS, work_dir / f"links-{case.name}", num_ranks=1)
        config = configure(base, job, case, STEPS)
        config["validation"]["enable"] = False
        with Run(job, config) as run:
            figures = [_measure(run, mbps) for mbps in (UNTHROTTLED, *RATES_MBPS)]
        progress(f"{case.name}: {figures}")
        yield case.name, {"sync_steps": case.sync_steps, "rates": figures}


def _measure(run: Run, mbps: float) -> dict[str, Any]:
    """Train at a rate for a while, starting right after a commit, in time for the next exchange.

    Raises:
        BenchError: the groups did not keep their connections.
    """
    run.wait_for(lambda _: _commits(run) or None, "commit", TIMEOUT_SECONDS)
    links = Links({group: run.workers(group) for group in range(run.job.num_groups)})
    links.throttle(mbps)
    since, sent_before, first = time.time(), links.bytes_sent(SURVIVOR), _commits(run)[-1]

    def enough(_: Any) -> list[tuple[float, int]] | None:
        links.throttle(mbps)  # connections that are new: a request, a probe
        samples = throughput(_commits(run), since)
        return samples if sum(seconds for seconds, _ in samples) >= MEASURE_SECONDS else None

    samples = run.wait_for(
        enough, f"{MEASURE_SECONDS:g} s of training at {mbps:g} Mbit/s", TIMEOUT_SECONDS
    )
    sent = links.bytes_sent(SURVIVOR)
    if max(sent, key=sent.__getitem__) not in sent_before:
        raise BenchError(
            "the groups changed the connection of their exchange while it was measured"
        )
    num_commits = sum(event.time > first.time for event in _commits(run))
    return {
        "mbps": mbps,
        "tokens_per_second": sum(tokens for _, tokens in samples)
        / sum(seconds for seconds, _ in samples),
        "exchanges": len(samples),
        "bytes_per_exchange": sum(
            number - sent_before.get(inode, 0) for inode, number in sent.items()
        )
        / num_commits,
        "load": os.getloadavg()[0],
    }


def _commits(run: Run) -> list[StepCommitted]:
    return [event for event in run.record().commits if (event.replica, event.rank) == (SURVIVOR, 0)]
