# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A process of ranks that agree again and again; see `control.py`.

    python -m benchmarks.control_ranks KIND PORT FOLDER PROCESS PROCESSES RANKS DELAY_MS AGREEMENTS

Its ranks are PROCESS, PROCESS + PROCESSES, and so on. Ranks of a control tree find each other by
the folder, and need no torch, so there may be many such processes. Ranks of a store meet at the
TCPStore at that port. The process prints its figures as a JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan_ft.membership import control_tree
from titan_ft.membership.control_sockets import ControlSockets
from titan_ft.membership.control_tree import ControlTree

TREE, STORE = "tree", "store"
WARMUP = 10
"""Agreements before those that are measured."""
STORE_TIMEOUT = timedelta(seconds=300)
_LEAVE_SECONDS = 10.0


class FolderStore:
    """Keeps the addresses of a group's ranks in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        path = self._folder / key.replace("/", "-")
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        path = self._folder / key.replace("/", "-")
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()


class DelayedSockets(ControlSockets):
    """Sends each frame some time after the node has asked for it, as a long link would.

    Attributes:
        delay: seconds.
    """

    delay = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._late: deque[tuple[float, Any, bytes]] = deque()  # in the order of their times
        super().__init__(*arguments, **options)

    def _flush(self, connection: Any) -> None:
        if connection.peer is None:
            super()._flush(connection)
            return
        due = time.monotonic() + self.delay
        self._late.append((due, connection, bytes(connection.unsent)))
        connection.unsent.clear()
        if due < self._wait_ends_at:
            self.wake()

    def _find_wake_time(self) -> float:
        next_time = super()._find_wake_time()
        return min(next_time, self._late[0][0]) if self._late else next_time

    def _act_on_time(self, now: float) -> None:
        super()._act_on_time(now)
        while self._late and self._late[0][0] <= now:
            _, connection, data = self._late.popleft()
            connection.unsent += data
            super()._flush(connection)


class Ranks:
    """The ranks of this process.

    Args:
        groups: each rank's control tree, or `Agreement`.
    """

    def __init__(self, groups: dict[int, Any], num_agreements: int) -> None:
        self._groups, self._num_agreements = groups, num_agreements
        self._first = min(groups)
        self._decided: list[float] = []
        self._cpu: list[tuple[float, float]] = []  # of the process, and of the first rank

    def measure(self) -> dict[str, Any]:
        """Measure the agreements after the warm-up.

        Returns:
            `seconds` of each agreement, `cpu` seconds of this process, and `root_cpu` of its first
            rank.
        """
        self._on_each(self._agree)
        (cpu, root_cpu), (cpu_end, root_cpu_end) = self._cpu
        return {
            "seconds": [after - before for before, after in itertools.pairwise(self._decided)],
            "cpu": cpu_end - cpu,
            "root_cpu": root_cpu_end - root_cpu,
        }

    def leave(self) -> None:
        """End in order."""
        self._on_each(lambda rank: self._groups[rank].leave(_LEAVE_SECONDS))

    def _agree(self, rank: int) -> None:
        group, is_first = self._groups[rank], rank == self._first
        for number in range(WARMUP + self._num_agreements):
            if is_first and number == WARMUP:
                self._note_cpu(group)
            group.rank0_decides([f"word {rank % 4}"], lambda _: "yes")
            if is_first and number >= WARMUP - 1:
                self._decided.append(time.monotonic())
        if is_first:
            self._note_cpu(group)

    def _note_cpu(self, group: Any) -> None:
        seconds = time.thread_time()
        sockets = getattr(group, "_sockets", None)
        if sockets is not None:
            seconds += time.clock_gettime(time.pthread_getcpuclockid(sockets._thread.ident))
        self._cpu.append((time.process_time(), seconds))

    def _on_each(self, act: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=act, args=(rank,)) for rank in self._groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def take_part(
    kind: str,
    port: int,
    folder: Path,
    process: int,
    num_processes: int,
    num_ranks: int,
    delay_ms: float,
    num_agreements: int,
) -> None:
    """Be the ranks of one process, and print the figures."""
    # On several cores the threads of a process would wait for each other's turn with Python's lock
    # for longer than they work. A real rank has its process for itself.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[process % len(cores)]})
    make = _make_tree if kind == TREE else _make_agreement
    if delay_ms:
        DelayedSockets.delay = delay_ms / 1000
        vars(control_tree)["ControlSockets"] = DelayedSockets
    # A parent comes before its children, which wait for it.
    ranks = range(process, num_ranks, num_processes)
    members = Ranks({rank: make(port, folder, rank, num_ranks) for rank in ranks}, num_agreements)
    print(json.dumps(members.measure()), flush=True)
    if kind == TREE:
        members.leave()


def _make_tree(_: int, folder: Path, rank: int, num_ranks: int) -> ControlTree:
    store: Any = FolderStore(folder)
    return ControlTree(rank, num_ranks, host="127.0.0.1", token="t", store=store, key="tree")


def _make_agreement(port: int, _: Path, rank: int, num_ranks: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

    from benchmarks.store_agreement import StoreAgreement

    def connect() -> TCPStore:
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
        )

    return StoreAgreement(connect, "agreed", group_rank=rank, group_world_size=num_ranks)


def main(argv: Sequence[str]) -> None:
    """Be one of the processes."""
    kind, port, folder, process, num_processes, num_ranks, delay_ms, num_agreements = argv
    take_part(
        kind,
        int(port),
        Path(folder),
        int(process),
        int(num_processes),
        int(num_ranks),
        float(delay_ms),
        int(num_agreements),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
