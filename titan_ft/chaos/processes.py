# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signal the processes of a run on this host, and never any other.

Only the workers themselves are signalled, not the data-loader processes that they started: those end with their worker,
and one whose worker is stopped just waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_ft.run.process import is_running_worker


class Unreachable(Exception):  # noqa: N818 - a finding, which becomes the reason of a `fault_skipped`
    """Say why no process could be signalled.

    Args:
        final: it will never be possible.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class Worker:
    """One process that a fault may hit, as its event tells."""

    name: str
    """What to call it in a message, such as "rank 0 of group 1"."""
    pid: int
    host: str
    """Empty where it is not known, which was so in older histories: then it is this one."""
    mono: float | None = None
    """`time.monotonic()` of its host at its event; None where it is not known."""
    slurm: Mapping[str, str] | None = None
    """Slurm's job and step that it runs in, if any."""


class Reach(Protocol):
    """Processes that are certain to be the right ones; held until `close`."""

    def send(self, signum: signal.Signals) -> None:
        """Signal all of them. Raises Unreachable when none is left."""

    def close(self) -> None:
        """Let go of them; a second call does nothing."""


class Processes(Protocol):
    """How signals get to workers."""

    def reach(self, workers: Sequence[Worker], everyone: Collection[Worker]) -> Reach:
        """Find the processes of some of `everyone`, the workers of the run.

        Raises:
            Unreachable: none of them can be signalled.
        """


class LocalProcesses:
    """Signal workers of this host through pidfds: a pid that has gone to another process since is not hit.

    Args:
        host: name of this host.
    """

    def __init__(self, host: str | None = None) -> None:
        self.host = socket.gethostname() if host is None else host

    def has(self, worker: Worker) -> bool:
        """Tell whether a worker runs on this host."""
        return worker.host in ("", self.host)

    def is_alive(self, worker: Worker) -> bool:
        """Tell whether a worker of this host still runs."""
        return self.has(worker) and is_running_worker(worker.pid, since=worker.mono)

    def reach(self, workers: Sequence[Worker], everyone: Collection[Worker]) -> Reach:
        """Hold those of the workers that are alive."""
        for worker in workers:
            if not self.has(worker):
                remedy = "run titan-ft chaos on that host"
                raise Unreachable(f"{worker.name} runs on {worker.host}, not on {self.host}; {remedy}", final=True)
        if not hasattr(os, "pidfd_open"):
            raise Unreachable("signals need pidfds, which this system does not have (Linux has, from 5.3)", final=True)
        fds = [fd for worker in workers if (fd := _open(worker)) is not None]
        if not fds:
            raise Unreachable(f"{_names(workers)} {'does' if len(workers) == 1 else 'do'} not run any more")
        return _Held(fds, _names(workers))


class _Held:
    """Processes on this host, by pidfd."""

    def __init__(self, fds: list[int], names: str) -> None:
        self._fds = fds
        self._names = names

    def send(self, signum: signal.Signals) -> None:
        num_hit = 0
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)
                num_hit += 1
        if not num_hit:
            raise Unreachable(f"{self._names} ended just now")

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _open(worker: Worker) -> int | None:
    """Return a pidfd of a worker, or None when it is gone."""
    try:
        fd = os.pidfd_open(worker.pid)
    except ProcessLookupError:
        return None
    # Looked at after the pidfd was taken: should the pid be another's by now, the pidfd is of a dead process.
    if is_running_worker(worker.pid, since=worker.mono):
        return fd
    os.close(fd)
    return None


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(worker.name for worker in workers) or "nobody"
