# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the connections between this group and another one, by where each worker says that it is.

Each agent publishes the location of its worker in a folder that all of the run share.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from titan_ft.chaos.inside.blackhole import Connection, connected_to
from titan_ft.system.process import this_host
from titan_ft.system.whole_file import write_whole


class Location(msgspec.Struct, frozen=True):
    """Where one worker is; a file of the shared folder.

    Attributes:
        host: names the host and its namespaces: with the same name, process ids and connections can be looked up.
        pids: the worker, and the process that serves the group's store.
        address: numeric address that other groups reach it at.
    """

    replica: int
    rank: int
    host: str
    pids: tuple[int, ...]
    address: str

    @classmethod
    def own(cls, replica: int, rank: int, address: str, store_pid: int) -> Location:
        """Return the location of this process."""
        return cls(replica, rank, this_host("net", "pid"), (os.getpid(), store_pid), address)

    def publish(self, folder: Path) -> None:
        """Write the location into the folder; it replaces that of this rank's earlier worker.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"worker-{self.replica}-{self.rank}.json"
        write_whole(path, msgspec.json.encode(self))


def read_locations(folder: Path) -> list[Location]:
    """Return where the newest worker of each rank is."""
    return [msgspec.json.decode(path.read_bytes(), type=Location) for path in sorted(folder.glob("worker-*-*.json"))]


class Link:
    """What this host's connections have to do with another group.

    Args:
        folder: where the locations are published.
        peer: the other group.
    """

    def __init__(self, folder: Path, peer: int) -> None:
        self._folder, self._peer = folder, peer

    def obstacle(self) -> str:
        """Return why the group's connections cannot be told from others', or nothing."""
        workers = read_locations(self._folder)
        if not any(worker.replica == self._peer for worker in workers):
            return f"no worker of group {self._peer} has told where it is"
        afar = self._afar(workers)
        for worker in workers:
            if worker.replica != self._peer and worker.address in afar and worker.host != this_host("net", "pid"):
                return f"group {self._peer} shares {worker.address} with group {worker.replica}, which is not here"
        return ""

    def choose(self, connections: Collection[Connection]) -> set[int]:
        """Choose the sockets that are connected to the group: see `titan_ft.chaos.inside.blackhole.Choice`."""
        workers = read_locations(self._folder)  # anew each time: a group that was started again is elsewhere
        here = this_host("net", "pid")
        pids = {pid for w in workers if (w.replica, w.host) == (self._peer, here) for pid in w.pids}
        pids -= {os.getpid(), os.getppid()}  # a parent of both groups has this group's store as well
        afar = {ipaddress.ip_address(address) for address in self._afar(workers)}
        return connected_to(pids, connections) | {c.inode for c in connections if c.peer[0] in afar}

    def _afar(self, workers: Collection[Location]) -> set[str]:
        """Return the addresses of the group's workers on other hosts, whose processes cannot be looked up."""
        return {w.address for w in workers if w.replica == self._peer and w.host != this_host("net", "pid")}
