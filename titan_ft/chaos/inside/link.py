# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the connections between this group and another group.

Each chaos agent publishes the location of its worker in a folder that the whole run shares.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from titan_ft.chaos.inside.blackhole import Connection, connected_to
from titan_ft.system.ownership import make_folder
from titan_ft.system.process import this_host
from titan_ft.system.whole_file import write_whole


class Location(msgspec.Struct, frozen=True):
    """The location of one worker: a file of the shared folder.

    Attributes:
        host: name of the host and its namespaces. Workers with the same name can look up each
            other's processes and connections.
        pids: the worker, and the process that serves the group's store.
        address: numeric address at which other groups reach the worker.
    """

    replica: int
    rank: int
    host: str
    pids: tuple[int, ...]
    address: str

    @classmethod
    def own(cls, replica: int, rank: int, address: str, store_pid: int) -> Location:
        """Make the location of this process."""
        return cls(replica, rank, this_host("net", "pid"), (os.getpid(), store_pid), address)

    def publish(self, folder: Path) -> None:
        """Write the location into the folder, in place of that of an earlier attempt.

        Raises:
            OSError: the file cannot be written.
        """
        make_folder(folder)
        path = folder / f"worker-{self.replica}-{self.rank}.json"
        write_whole(path, msgspec.json.encode(self))


def read_locations(folder: Path) -> list[Location]:
    """Return the location of the newest worker of each rank."""
    paths = sorted(folder.glob("worker-*-*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=Location) for path in paths]


class PeerConnections:
    """The connections of this host to another group.

    The thread of a link fault calls it. On this host the peer's processes identify a connection, on
    another host the peer's address.

    Args:
        folder: folder of the locations.
        peer: slot of the other group.
    """

    def __init__(self, folder: Path, peer: int) -> None:
        self._folder = folder
        self._peer = peer

    def obstacle(self) -> str:
        """Return why the peer's connections cannot be told from others; empty if they can."""
        workers = read_locations(self._folder)
        if not any(worker.replica == self._peer for worker in workers):
            return f"no worker of group {self._peer} has told where it is"
        remote = self._remote_addresses(workers)
        here = this_host("net", "pid")
        for worker in workers:
            if worker.replica == self._peer or worker.host == here:
                continue
            if worker.address in remote:
                return f"group {self._peer} shares {worker.address} with group {worker.replica}, which is not here"
        return ""

    def choose(self, connections: Collection[Connection]) -> set[int]:
        """Return the inodes of sockets that are connected to the peer: a `blackhole.Choice`."""
        # Read the locations at each call: a restarted peer has other processes.
        workers = read_locations(self._folder)
        here = this_host("net", "pid")
        pids: set[int] = set()
        for worker in workers:
            if worker.replica == self._peer and worker.host == here:
                pids.update(worker.pids)
        # A common parent of both groups also serves this group's own store.
        pids -= {os.getpid(), os.getppid()}
        remote = {ipaddress.ip_address(text) for text in self._remote_addresses(workers)}
        chosen = connected_to(pids, connections)
        chosen |= {connection.inode for connection in connections if connection.peer[0] in remote}
        return chosen

    def _remote_addresses(self, workers: Collection[Location]) -> set[str]:
        """Return the peer's addresses on other hosts, whose pids mean nothing here."""
        here = this_host("net", "pid")
        of_peer = [worker for worker in workers if worker.replica == self._peer]
        return {worker.address for worker in of_peer if worker.host != here}
