# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Transfers of state between simulated ranks, in virtual time.

They stand in for `StateServer` and `fetch`. A state travels in two parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.simulation.kernel import Kernel, Process, Task
from tests.simulation.network import Network, Node
from titan_ft.transfer.snapshot import WHOLE, Part, Snapshot
from titan_ft.transfer.wire import Message, TransferError

# As in titan_ft.transfer.state_fetch.
_STALL_SECONDS, _LATE_SECONDS, _OFFER_SECONDS = (10.0, 1.0, 1.5)
_SLICE_SECONDS = 20.0  # the engine has 300; shorter here, as all waits of a schedule are
_SERVER_OFFER_SECONDS = 1.0  # as in titan_ft.transfer.state_server
# In a header: knowledge of the simulation alone.
_SOUND, _TAINTED = (b'"tainted": false', b'"tainted": true')


class _NothingLeftError(Exception):
    """A donor has none of the missing bytes."""


def _take(missing: list[range], held: range) -> range:
    """Remove and return the first missing range that a donor has."""
    for place, part in enumerate(missing):
        start, stop = max(part.start, held.start), min(part.stop, held.stop)
        if start < stop:
            missing[place : place + 1] = filter(
                len, [range(part.start, start), range(stop, part.stop)]
            )
            return range(start, stop)
    raise _NothingLeftError


class SnapshotServer:
    """Stands in for titan_ft.transfer.state_server.StateServer."""

    def __init__(self, kernel: Kernel, process: Process, node: Node, wait_seconds: float) -> None:
        self._kernel, self.process, self.node, self.wait_seconds = (
            kernel,
            process,
            node,
            wait_seconds,
        )
        self.snapshot: Snapshot | None = None
        self.offered: Message | None = None
        self.offered_at = 0.0
        self.copy: Callable[[int, Part], None] | None = None
        self.wanted_part: Part | None = None
        self.is_snapshot_kept = False
        self.readers = 0
        self.closed = False
        self._waiting: list[Task] = []
        process.on_change.append(self.tell)

    def publish(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Serve `snapshot` from now on."""
        self._kernel.pause()
        self.snapshot, self.wanted_part, self.is_snapshot_kept = snapshot, None, True
        self.tell()

    def keep_snapshot(self, is_kept: bool) -> None:
        """Keep the snapshot for its joiners, or release it."""
        self.is_snapshot_kept = is_kept

    @property
    def offered_step(self) -> int | None:
        """Return the committed updates in the offered state; None = no state is offered."""
        return None if self.offered is None else self.offered["step"]

    def offer(self, offer: Message | None, copy: Callable[[int, Part], None] | None = None) -> None:
        """Offer the state of a step to joiners."""
        self._kernel.pause()
        self.offered, self.copy, self.wanted_part = offer, copy, None
        self.offered_at = self._kernel.now
        self.tell()

    def withdraw(self) -> Snapshot | None:
        """Stop serving; return the snapshot if no request reads it."""
        self._kernel.pause()
        snapshot, self.snapshot = self.snapshot, None
        return snapshot if self.readers == 0 else None

    def close(self) -> None:
        self.closed, self.snapshot = True, None
        self.tell()

    def tell(self) -> None:
        """Wake the tasks that wait for a snapshot, or for the process to continue."""
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting.clear()

    def wait(self, timeout: float) -> None:
        """Block the caller until `tell`, or until the time is over."""
        self._waiting.append(self._kernel.current)
        self._kernel.block(timeout)


class Transfers:
    """All transfers of the world.

    Args:
        seconds: shortest and longest duration of a transfer.
    """

    def __init__(self, kernel: Kernel, network: Network, seconds: tuple[float, float]) -> None:
        self._kernel, self._network, self._seconds = kernel, network, seconds
        self.servers: dict[str, SnapshotServer] = {}
        self.node_of: Callable[[Process], Node] = lambda process: (0, 0)
        self.on_moment: Callable[[str, Node], None] = lambda moment, node: None

    def fetch(
        self,
        addresses: Sequence[str],
        token: str,
        step: int,
        joiner: str,
        num_connections: int,
        progress_timeout: float,
        cancelled: Any = None,
        report_lost: Callable[[int, str], None] = lambda place, error: None,
        report_share: Callable[[float], None] = lambda share: None,
        lineage: int | None = None,
    ) -> Snapshot:
        """Fetch the state of `step` from the servers at `addresses`.

        Each part comes from a server that has it.

        Raises:
            TransferError: no donor is left, the time is over, or the fetch was cancelled.
        """
        kernel = self._kernel
        me = kernel.current
        node = self.node_of(me.process)
        if cancelled is not None:
            cancelled.on_set.append(lambda: kernel.wake(me))
        donors = {place: self.servers.get(address) for place, address in enumerate(addresses)}
        found: Snapshot | None = None
        missing: list[range] = []
        parts: dict[int, torch.Tensor] = {}  # by the number of their first byte
        tainted = False  # known to the simulation only: a part has changed bytes
        while found is None or missing:
            place = self._choose(donors, node, step)
            end = kernel.now + min(progress_timeout, _SLICE_SECONDS)
            # With other donors, a silent donor is given up sooner: they send its part.
            patience = _STALL_SECONDS if len(donors) == 1 else _LATE_SECONDS
            try:
                server = donors[place]
                if server is None:
                    raise TransferError("connection refused")
                if found is None:  # each request is one of its own
                    part_wanted = Part(place, len(addresses))
                    found = self._acquire(
                        server, node, step, lineage, end, cancelled, patience, part_wanted
                    )
                    server.readers -= 1
                    size = json.loads(found.header)["bytes"]
                    missing = [range(size // 2), range(size // 2, size)]
                start, part, header = self._fetch_part(
                    server, node, found, missing, end, cancelled, patience
                )
                parts[start] = part
                report_share(sum(map(len, parts.values())) / size)
                tainted = tainted or _TAINTED in header
            except _NothingLeftError as error:
                del donors[place]
                if not donors:
                    raise TransferError(
                        f"state of step {step}: the donors that are left do not hold it"
                    ) from error
            except TransferError as error:
                del donors[place]
                if not donors:
                    raise TransferError(
                        f"state of step {step} from {addresses[place]}: {error}"
                    ) from error
                if cancelled is None or not cancelled._set:
                    report_lost(place, str(error))
        self.on_moment("fetched", node)
        assert found is not None, "the header comes first"
        header = found.header.replace(_SOUND, _TAINTED) if tainted else found.header
        return Snapshot(
            step, found.lineage, header, torch.cat([parts[start] for start in sorted(parts)])
        )

    def _choose(self, donors: dict[int, SnapshotServer | None], node: Node, step: int) -> int:
        """Return the place of the next donor to ask.

        It can send the next part at once, or else is the first donor.
        """
        at_once = [
            place
            for place, server in donors.items()
            if server is not None
            and server.snapshot is not None
            and server.snapshot.step == step
            and not (server.process.dead or server.process.frozen or server.closed)
            and self._network.usable(node, server.node)
        ]
        return (
            self._kernel.rng.choice(at_once) if len(at_once) > 1 else (at_once or list(donors))[0]
        )

    def _fetch_part(
        self,
        server: SnapshotServer,
        node: Node,
        found: Snapshot,
        missing: list[range],
        end: float,
        cancelled: Any,
        patience: float,
    ) -> tuple[int, torch.Tensor, bytes]:
        """Fetch the first missing bytes that the donor has; return their offset as well."""
        snapshot = self._acquire(server, node, found.step, found.lineage, end, cancelled, patience)
        try:
            if snapshot.header.replace(_TAINTED, _SOUND) != found.header.replace(_TAINTED, _SOUND):
                raise TransferError(
                    "its state is not that of the other donors: their headers differ"
                )
            _take(list(missing), snapshot.byte_range)
            least, most = self._seconds
            took = least + (most - least) * self._kernel.rng.random() ** 2
            self._spend(took / 2, server, node, end, cancelled, patience)
            self.on_moment("serving", server.node)
            self.on_moment("fetching", node)
            wanted = _take(missing, snapshot.byte_range)
            # The bytes are those in the donor's memory at this time.
            return (
                wanted.start,
                snapshot.payload[wanted.start - snapshot.first_byte :][: len(wanted)].clone(),
                snapshot.header,
            )
        finally:
            server.readers -= 1

    def ask_offer(
        self, address: str, token: str, step: int = 0
    ) -> tuple[int, int, int, int, int] | None:
        """Ask the server at `address` for its offer.

        Raises:
            OSError: the server cannot be reached.
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
        end = kernel.now + _SERVER_OFFER_SECONDS
        while (
            (rest := end - kernel.now) > 0
            and server.offered is not None
            and server.offered["step"] < step
        ):
            server.wait(rest)
            if server.process.dead or server.closed:
                raise ConnectionResetError(f"{address}: connection reset")
        offer = server.offered
        if offer is None or (
            server.is_snapshot_kept
            and server.snapshot is not None
            and server.snapshot.step != offer["step"]
        ):
            return None
        elapsed = int(1000 * (kernel.now - server.offered_at))
        return (
            offer["step"],
            offer["lineage"],
            offer["digest"],
            offer.get("milliseconds", 0),
            elapsed,
        )

    def _acquire(
        self,
        server: SnapshotServer,
        node: Node,
        step: int,
        lineage: int | None,
        end: float,
        cancelled: Any,
        patience: float,
        part: Part | None = None,
    ) -> Snapshot:
        """Wait for the snapshot as a donor's request does, and become one of its readers.

        Args:
            part: the part that a header request is for; None for another request.
        """
        kernel = self._kernel
        waits, asked = kernel.now + server.wait_seconds, False
        while True:
            self._reach(server, node, end, cancelled, patience)
            found = server.snapshot
            offered = -1 if server.offered is None else server.offered["step"]
            is_of_lineage = found is not None and lineage in (None, found.lineage)
            is_fit = (
                found is not None
                and found.step == step
                # With the header, a copy of another lineage has replaced the wanted state.
                and (part is None or (is_of_lineage and found.part in (WHOLE, part)))
            )
            is_past = (found is not None and found.step > step) or offered > step
            if server.offered is not None and offered == step:
                # The donor has healed: its state of this step is another one now.
                is_past = is_past or lineage not in (None, server.offered["lineage"])
            settled = (
                server.closed or is_past or is_fit or (kernel.now >= waits and offered != step)
            )
            if not settled and server.copy is not None and part is not None and not asked:
                asked = True  # a thread of the donor copies the state, and ends with the donor
                kernel.spawn(
                    functools.partial(server.copy, step, part),
                    "titan_ft_state_server",
                    server.process,
                )
            is_here = found is not None and found.step == step and is_of_lineage
            if found is not None and is_here and (settled or offered != step):
                server.readers += 1
                return found
            if settled:
                held = "none" if found is None else f"step {found.step} of lineage {found.lineage}"
                raise TransferError(f"the donor has no state of step {step} (it has {held})")
            if offered == step:
                server.wanted_part = part or WHOLE
            server.wait(server.wait_seconds if offered == step else waits - kernel.now)

    def _spend(
        self,
        seconds: float,
        server: SnapshotServer,
        node: Node,
        end: float,
        cancelled: Any,
        patience: float,
    ) -> None:
        """Let the time pass that the bytes need."""
        until = self._kernel.now + seconds
        while self._kernel.now < until:
            self._reach(server, node, end, cancelled, patience)
            server.wait(max(0.0, until - self._kernel.now))
        self._reach(server, node, end, cancelled, patience)

    def _reach(
        self,
        server: SnapshotServer,
        node: Node,
        end: float,
        cancelled: Any,
        patience: float = _STALL_SECONDS,
    ) -> None:
        """Return when the donor answers.

        Ends the transfer if the donor is silent for too long.
        """
        kernel, network = self._kernel, self._network
        silent = kernel.now + patience
        while True:
            if cancelled is not None and cancelled._set:
                raise TransferError("cancelled")
            if server.process.dead or server.closed:
                raise TransferError("the donor closed the connection")
            if kernel.now >= end:
                raise TransferError(f"no part of the state was whole within {_SLICE_SECONDS:g} s")
            if kernel.now >= silent:
                raise TransferError(f"nothing came for {patience:g} s")
            if not server.process.frozen and network.usable(node, server.node):
                return
            rest = min(silent, end) - kernel.now
            network.wait(rest) if not server.process.frozen else server.wait(rest)
