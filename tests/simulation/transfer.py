# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Transfers of state between simulated ranks: what `StateServer` and `fetch` do, in virtual time and in two parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.simulation.kernel import Kernel, Process, Task
from tests.simulation.network import Network, Node
from titan_ft.replica.snapshot import Snapshot
from titan_ft.replica.wire import Message, TransferError

_STALL_SECONDS, _OFFER_SECONDS = 10.0, 1.5  # as in titan_ft.replica.state_fetch


class SnapshotServer:
    """Stands in for titan_ft.replica.state_server.StateServer."""

    def __init__(self, kernel: Kernel, process: Process, node: Node, wait_seconds: float) -> None:
        self._kernel, self.process, self.node, self.wait_seconds = kernel, process, node, wait_seconds
        self.snapshot: Snapshot | None = None
        self.offered: Message | None = None
        self.wanted = False
        self.readers = 0
        self.closed = False
        self._waiting: list[Task] = []
        process.on_change.append(self.tell)

    def publish(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Serve `snapshot` from now on."""
        self._kernel.pause()
        self.snapshot, self.wanted = snapshot, False
        self.tell()

    def offer(self, offer: Message | None) -> None:
        """Let joiners ask for a state of this step."""
        self._kernel.pause()
        self.offered, self.wanted = offer, False
        self.tell()

    def withdraw(self) -> Snapshot | None:
        """Stop serving; returns the snapshot if nobody reads it."""
        self._kernel.pause()
        snapshot, self.snapshot = self.snapshot, None
        return snapshot if self.readers == 0 else None

    def close(self) -> None:
        """Stop listening."""
        self.closed, self.snapshot = True, None
        self.tell()

    def tell(self) -> None:
        """Wake who waits for a snapshot, or for the process to go on."""
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting.clear()

    def wait(self, timeout: float) -> None:
        """Block the caller until there is news."""
        self._waiting.append(self._kernel.current)
        self._kernel.block(timeout)


class Transfers:
    """All transfers of the world.

    Args:
        seconds: that one takes, at least and at most.
    """

    def __init__(self, kernel: Kernel, network: Network, seconds: tuple[float, float]) -> None:
        self._kernel, self._network, self._seconds = kernel, network, seconds
        self.servers: dict[str, SnapshotServer] = {}
        self.node_of: Callable[[Process], Node] = lambda process: (0, 0)
        self.on_moment: Callable[[str, Node], None] = lambda moment, node: None

    def fetch(
        self, address: str, token: str, step: int, joiner: str, connections: int, timeout: float, cancelled: Any = None
    ) -> Snapshot:
        """Fetch what the server at `address` holds of `step`.

        Raises:
            TransferError: the donor is gone or has no such state, the time is over, or it was cancelled.
        """
        kernel = self._kernel
        me, server = kernel.current, self.servers.get(address)
        node, end = self.node_of(me.process), kernel.now + timeout
        if server is None:
            raise TransferError(f"state of step {step} from {address}: connection refused")
        if cancelled is not None:
            cancelled.on_set.append(lambda: kernel.wake(me))
        snapshot = self._acquire(server, node, step, None, end, cancelled)
        header, lineage, half, parts = snapshot.header, snapshot.lineage, snapshot.payload.numel() // 2, []
        server.readers -= 1
        for part in (slice(0, half), slice(half, None)):  # each is a request of its own
            snapshot = self._acquire(server, node, step, lineage, end, cancelled)
            try:
                least, most = self._seconds
                took = least + (most - least) * kernel.rng.random() ** 2
                self._spend(took / 2, server, node, end, cancelled)
                self.on_moment("serving", server.node)
                self.on_moment("fetching", node)
                parts.append(snapshot.payload[part].clone())  # the bytes as they are in the donor's memory now
            finally:
                server.readers -= 1
        self.on_moment("fetched", node)
        return Snapshot(step, lineage, header, torch.cat(parts))

    def ask_offer(self, address: str, token: str) -> tuple[int, int, int] | None:
        """Ask the server at `address` what it offers.

        Raises:
            OSError: it cannot be reached.
        """
        kernel = self._kernel
        server, node = self.servers.get(address), self.node_of(kernel.current.process)
        if server is None or server.process.dead or server.closed:
            raise ConnectionRefusedError(f"{address}: connection refused")
        try:
            self._reach(server, node, kernel.now + _OFFER_SECONDS, None)
        except TransferError as error:
            raise TimeoutError(f"{address}: {error}") from error
        kernel.sleep(0.01 * kernel.rng.random())
        offer = server.offered
        return None if offer is None else (offer["step"], offer["lineage"], offer["digest"])

    def _acquire(
        self, server: SnapshotServer, node: Node, step: int, lineage: int | None, end: float, cancelled: Any
    ) -> Snapshot:
        """Wait for the snapshot as a donor lets a request wait, and become one of its readers."""
        kernel = self._kernel
        patience = kernel.now + server.wait_seconds
        while True:
            self._reach(server, node, end, cancelled)
            found = server.snapshot
            if found is not None and found.step == step and lineage in (None, found.lineage):
                server.readers += 1
                return found
            offered = server.offered is not None and server.offered["step"] == step
            settled = found is not None and found.step >= step
            server.wanted = server.wanted or (offered and not settled)
            if server.closed or settled or (kernel.now >= patience and not offered):
                held = "none" if found is None else f"step {found.step} of lineage {found.lineage}"
                raise TransferError(f"the donor has no state of step {step} (it has {held})")
            server.wait(server.wait_seconds if offered else patience - kernel.now)

    def _spend(self, seconds: float, server: SnapshotServer, node: Node, end: float, cancelled: Any) -> None:
        """Let time go by in which bytes come."""
        until = self._kernel.now + seconds
        while self._kernel.now < until:
            self._reach(server, node, end, cancelled)
            server.wait(max(0.0, until - self._kernel.now))
        self._reach(server, node, end, cancelled)

    def _reach(self, server: SnapshotServer, node: Node, end: float, cancelled: Any) -> None:
        """Return when the donor answers; a silence breaks the transfer off after a while."""
        kernel, network = self._kernel, self._network
        silent = kernel.now + _STALL_SECONDS
        while True:
            if cancelled is not None and cancelled._set:
                raise TransferError("cancelled")
            if server.process.dead or server.closed:
                raise TransferError("the donor closed the connection")
            if kernel.now >= end:
                raise TransferError("fault_tolerance.transfer_timeout_seconds is over")
            if kernel.now >= silent:
                raise TransferError(f"nothing came for {_STALL_SECONDS:g} s")
            if not server.process.frozen and network.usable(node, server.node):
                return
            rest = min(silent, end) - kernel.now
            network.wait(rest) if not server.process.frozen else server.wait(rest)
