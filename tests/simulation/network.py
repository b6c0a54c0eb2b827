# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulated network, and torch's TCPStore on it.

The network has links between nodes. A link may be cut in one direction, slow or flapping. A
connection needs both directions, as with TCP. A cut link closes nothing: frames in flight arrive
when the link is back, and a waiting task waits until then or until its timeout.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from tests.simulation.kernel import Kernel, Process, Task

Node = tuple[int, int]
"""Slot and rank of a process; processes come and go, a node stays."""

LIGHTHOUSE: Node = (-1, 0)
# TCP's shortest time until it sends a lost packet again; doubles with each loss
_RESEND_SECONDS = 0.2
_RESENDS = 5  # of one packet, at most: 6.2 s in total
_SLOW_SETS = 0.1  # share of writes to a store on the same host that are slow


class Network:
    """Reachability and speed of links between nodes.

    Args:
        latency: seconds of one way between groups; nearly none within a group.
    """

    def __init__(self, kernel: Kernel, latency: float) -> None:
        self._kernel, self._latency = kernel, latency
        self._cuts: Counter[tuple[Node, Node]] = Counter()
        self._slow: dict[tuple[Node, Node], float] = {}
        self._losses: dict[tuple[Node, Node], float] = {}  # probability that a packet is lost
        self._waiting: list[Task] = []
        self.resets: Counter[Node] = Counter()
        """How often the connections of a rank to its own group's server and store were reset."""
        self._calling: dict[Node, list[Task]] = {}
        self.on_reset: dict[Node, list[Callable[[], None]]] = {}
        """Called when the connections of a rank within its group are reset."""
        self.on_change: dict[object, Callable[[], None]] = {}
        """Called when a link is cut or comes back; by a key, in order."""

    def cut(self, source: Node, target: Node) -> None:
        """Lose all messages from `source` to `target`. Each `mend` takes back one `cut`."""
        self._cuts[source, target] += 1
        self._tell()

    def mend(self, source: Node, target: Node) -> None:
        """Take one cut back."""
        self._cuts[source, target] -= 1
        if self._cuts[source, target] <= 0:
            del self._cuts[source, target]
        self._tell()

    def slow(self, source: Node, target: Node, seconds: float) -> None:
        """Add `seconds` to each message; 0 = none."""
        self._slow[source, target] = seconds

    @property
    def calm(self) -> bool:
        """True if no link is cut, slow or lossy."""
        return not self._cuts and not self._losses and not any(self._slow.values())

    def lose(self, source: Node, target: Node, chance: float) -> None:
        """Lose packets with a probability; 0 ends it.

        A lost packet is sent again, after a longer pause with each further loss.
        """
        if chance:
            self._losses[source, target] = chance
        else:
            self._losses.pop((source, target), None)

    def resend(self, source: Node, target: Node) -> float:
        """Return the seconds by which a message is late because packets were lost."""
        chance = self._losses.get((source, target), 0.0) if self._losses else 0.0
        times = 0
        while chance and times < _RESENDS and self._kernel.rng.random() < chance:
            times += 1
        return _RESEND_SECONDS * (2**times - 1)

    def sound(self, a: Node, b: Node) -> bool:
        """Return True if a connection between the two nodes works, and loses no packet."""
        return self.usable(a, b) and (a, b) not in self._losses and (b, a) not in self._losses

    def usable(self, a: Node, b: Node) -> bool:
        """Return True if a connection between the two nodes works."""
        cuts = self._cuts
        return not cuts or a == b or ((a, b) not in cuts and (b, a) not in cuts)

    def all_usable(self, nodes: Sequence[Node]) -> bool:
        """Return True if the connections between all of these nodes work."""
        return not self._cuts or all(self.usable(a, b) for a, b in itertools.combinations(nodes, 2))

    def passes(self, source: Node, target: Node) -> bool:
        """Return True if a message arrives."""
        return (source, target) not in self._cuts

    def delay(self, source: Node, target: Node) -> float:
        """Return the seconds that a message takes."""
        base = self._latency if source[0] != target[0] else self._latency / 10
        seconds = base * (0.5 + self._kernel.rng.random()) + self.resend(source, target)
        return seconds + self._slow.get((source, target), 0.0) if self._slow else seconds

    def call(self, source: Node, target: Node, server: Process | None, timeout: float) -> None:
        """Make a round trip to a server. Waits while the link is cut.

        Raises:
            ConnectionError: the server is gone, or the time is over.
        """
        kernel = self._kernel
        end = kernel.now + timeout
        if source[0] == target[0]:
            kernel.pause()  # within a group, a message takes nearly no time
        else:
            kernel.sleep(min(self.delay(source, target) + self.delay(target, source), timeout))
            if self._losses and kernel.now >= end:
                raise ConnectionError(f"no answer from {target} within {timeout:g} s")
        while not self.usable(source, target):
            if kernel.now >= end:
                raise ConnectionError(f"no answer from {target} within {timeout:g} s")
            self.wait(end - kernel.now)
        if server is not None and server.dead:
            raise ConnectionError("connection refused")

    def wait(self, timeout: float) -> None:
        """Block the caller until a link changes."""
        self._waiting.append(self._kernel.current)
        self._kernel.block(timeout)

    def reset(self, node: Node) -> None:
        """Reset the connections on which a rank waits for an answer within its group.

        The rank's requests have arrived.
        """
        self.resets[node] += 1
        for task in self._calling.pop(node, ()):
            self._kernel.wake(task)
        for act in self.on_reset.get(node, ()):
            act()

    @contextlib.contextmanager
    def calling(self, node: Node) -> Iterator[Callable[[], bool]]:
        """Wait for an answer within the group.

        Yields a function that returns True if the connection is lost.
        """
        before, task = self.resets[node], self._kernel.current
        self._calling.setdefault(node, []).append(task)
        try:
            yield lambda: self.resets[node] != before
        finally:
            if task in (waiting := self._calling.get(node, [])):
                waiting.remove(task)

    def when_usable(self, a: Node, b: Node, act: Callable[[], None]) -> None:
        """Call `act` now, or as soon as the link works."""
        if self.usable(a, b):
            act()
            return
        key = object()

        def look() -> None:
            if self.usable(a, b):
                del self.on_change[key]
                act()

        self.on_change[key] = look

    def _tell(self) -> None:
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting.clear()
        for act in list(self.on_change.values()):
            act()


class StoreServer:
    """The contents of one group's TCPStore.

    Args:
        owner: the process with which the store ends. None = the group's agent, which outlives its
            workers.
    """

    def __init__(self, kernel: Kernel, node: Node, owner: Process | None) -> None:
        self.kernel, self.node, self.owner = kernel, node, owner
        self.values: dict[str, bytes] = {}
        self._waiting: list[Task] = []
        if owner is not None:
            owner.on_end.append(self.tell)

    @property
    def gone(self) -> bool:
        """True if the server no longer answers."""
        return self.owner is not None and self.owner.dead

    def put(self, key: str, value: bytes) -> None:
        """Write a key, and wake the tasks that wait for it."""
        self.values[key] = value
        self.tell()

    def tell(self) -> None:
        """Wake all waiting tasks."""
        for task in self._waiting:
            self.kernel.wake(task)
        self._waiting.clear()

    def wait(self, timeout: float) -> None:
        """Block the caller until a key is written, or until the time is over."""
        self._waiting.append(self.kernel.current)
        self.kernel.block(timeout)


class Store:
    """Client of a simulated torch.distributed.TCPStore.

    Raises:
        RuntimeError: as the real client's errors: the server is gone, or a wait took longer than
            the timeout.
    """

    def __init__(
        self, network: Network, node: Node, server: StoreServer | None, timeout: float
    ) -> None:
        self._network, self._node, self._timeout = network, node, timeout
        if server is None:
            raise DistNetworkError("connection refused")
        self._server = server
        self._sent: list[tuple[str, bytes]] = []  # writes on their way to the server
        self._lost = False  # a connection that was reset stays lost
        self._call(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Send a write without waiting for it.

        A request on another connection may be answered before the write arrives.
        """
        server, kernel = self._server, self._server.kernel
        kernel.pause()
        if server.gone or self._lost:
            raise DistNetworkError("broken pipe")
        self._sent.append((key, value.encode() if isinstance(value, str) else value))
        if self._node[0] != server.node[0] or kernel.rng.random() < _SLOW_SETS:
            delay = self._network.delay(self._node, server.node)
            kernel.after(
                delay, lambda: self._network.when_usable(self._node, server.node, self._arrive)
            )
        else:
            self._network.when_usable(self._node, server.node, self._arrive)

    def get(self, key: str) -> bytes:
        """Return a key's value. Waits until the key is there."""
        self._wait([key], self._timeout)
        return self._server.values[key]

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are there."""
        self._call(self._timeout)
        return all(key in self._server.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait(keys, self._timeout if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the keys' values. Waits until all keys are there."""
        self._wait(keys, self._timeout)
        return [self._server.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        self._call(self._timeout)
        value = int(self._server.values.get(key, b"0")) + amount
        self._server.put(key, str(value).encode())
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key if it has the expected value, or if it is missing and "" is expected.

        Returns:
            The key's value afterwards.
        """
        self._call(self._timeout)
        if self._server.values.get(key, b"") == expected.encode():
            self._server.put(key, desired.encode())
        return self._server.values[key]

    def delete_key(self, key: str) -> bool:
        self._call(self._timeout)
        return self._server.values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def _call(self, timeout: float) -> None:
        self._server.kernel.pause()
        if self._lost:
            raise DistNetworkError("broken pipe")
        try:
            self._network.call(self._node, self._server.node, self._server.owner, timeout)
        except ConnectionError as error:
            raise DistNetworkError(f"{error}") from None
        self._arrive()  # earlier writes on this connection arrive first

    def _arrive(self) -> None:
        while self._sent and not self._server.gone:
            self._server.put(*self._sent.pop(0))

    def _wait(self, keys: list[str], timeout: float) -> None:
        network = self._network
        self._call(timeout)
        with network.calling(self._node) as is_lost:
            self._wait_for(keys, timeout, is_lost)

    def _wait_for(self, keys: list[str], timeout: float, is_lost: Callable[[], bool]) -> None:
        server, network = self._server, self._network
        kernel = server.kernel
        end = kernel.now + timeout
        while True:
            if server.gone or is_lost():
                self._lost = True
                raise DistNetworkError("connection reset")
            there = all(key in server.values for key in keys)
            if there and network.usable(self._node, server.node):
                return
            if kernel.now >= end:
                raise DistStoreError(f"wait timeout after {timeout:g} s, keys: {', '.join(keys)}")
            if there:
                network.wait(end - kernel.now)
            else:
                server.wait(end - kernel.now)


class PrefixStore:
    """Stands in for torch.distributed.PrefixStore."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._name(key)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._name(key) for key in keys]))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._store.multi_get([self._name(key) for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._name(key) for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._name(key), amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._name(key)))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
