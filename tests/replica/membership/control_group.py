# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group whose ranks are threads of the test process.

Relays are on the links of its control tree.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from titan_ft.membership.control_tree import ControlTree
from titan_ft.system.address import join_address, split_address
from titan_ft.system.refusal import Refusal
from titan_ft.system.seal import add_seal, remove_seal

T = TypeVar("T")
DEADLINE = 20.0  # seconds that anything in these tests may take; only a bug reaches it
HOST, TOKEN = "127.0.0.1", "the run's token"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a RST, and drops all bytes on their way


class Store:
    """Stands in for a group's TCPStore. `get` waits for the key."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, DEADLINE)
            return self._values[key].encode()


class Relay:
    """Passes on the connections of a parent's children, and resets them.

    Args:
        reset_at: resets all connections at this chunk, counted from 0; None = at no chunk.
        loses: drops that chunk. Otherwise it is passed on right before the reset.

    Attributes:
        connections: pairs of sockets, the child's first.
        chunks: bytes that the children have sent and received, in this order.
        change: returns the bytes that are passed on in place of a chunk.
        open: while it is cleared, all chunks are kept back.
    """

    def __init__(self, address: str, reset_at: int | None = None, loses: bool = True) -> None:
        self._reset_at, self._loses = reset_at, loses
        self._parent = split_address(address)
        self._server = socket.create_server((HOST, 0))
        self.address = join_address(*self._server.getsockname())
        self.connections: list[tuple[socket.socket, socket.socket]] = []
        self.chunks: list[bytes] = []
        self.change: Callable[[bytes], bytes] = lambda chunk: chunk
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Reset all connections, at both ends."""
        for ends in self.connections:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from the socket
                end.close()
        self.connections = []

    def close(self) -> None:
        """Refuse connections from now on, and reset the present ones."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.open.set()
        self.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                child, _ = self._server.accept()
                parent = socket.socket()
                parent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                parent.connect(self._parent)
                self.connections.append((child, parent))
                for ends in ((child, parent), (parent, child)):
                    threading.Thread(target=self._hand_on, args=ends, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.open.wait()
                with self._lock:
                    self.chunks.append(data)
                    resets = len(self.chunks) - 1 == self._reset_at
                if not (resets and self._loses):
                    target.sendall(self.change(data))
                if resets:
                    self.reset()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class RelayedStore(Store):
    """Puts a relay with these options before each parent."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.relays: dict[int, Relay] = {}

    def set(self, key: str, value: str) -> None:
        address, _, name = remove_seal(TOKEN, key, value).partition(" ")
        relay = Relay(address, **self._options)
        self.relays[int(key.rpartition("/")[2])] = relay
        super().set(key, add_seal(TOKEN, key, f"{relay.address} {name}"))


class ControlGroup:
    """The control trees of all ranks of a group. A context manager closes them.

    Attributes:
        trees: by rank.
        notes: topics that each rank has heard, in order.
        losses: ranks that each rank has lost.
        refusals: reports of all ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        store: Store | None = None,
        key: str = "group/0",
        fan_out: int = 16,
        patience: float = math.inf,
    ) -> None:
        self.store = Store() if store is None else store
        self.notes: list[list[str]] = [[] for _ in range(num_ranks)]
        self.losses: list[list[int]] = [[] for _ in range(num_ranks)]
        self.refusals: list[Refusal] = []
        self._pool = ThreadPoolExecutor(num_ranks + 4)

        def build(rank: int) -> ControlTree:
            tree = make_tree(
                rank,
                num_ranks,
                self.store,
                key=key,
                fan_out=fan_out,
                patience=patience,
                on_refusal=self.refusals.append,
            )
            tree.listen_for_notes("", self.notes[rank].append)
            tree.listen_for_losses(lambda loss: self.losses[rank].append(loss.rank))
            return tree

        self.trees = self.on_each(build, range(num_ranks))

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_each(ControlTree.close, self.trees)
        self._pool.shutdown(wait=False)
        if isinstance(self.store, RelayedStore):
            for relay in self.store.relays.values():
                relay.close()

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make a call on a thread."""
        return self._pool.submit(call, *arguments)

    def on_each(self, call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Make a call for each item at the same time. Return the results in order."""
        calls = [self._pool.submit(call, item) for item in items]
        return [made.result(DEADLINE) for made in calls]

    def agree(self, *without: int) -> list[Future[str]]:
        """Start an agreement on all ranks but those in `without`.

        Each gives a word, and rank 0 joins the words.
        """
        trees = [tree for rank, tree in enumerate(self.trees) if rank not in without]
        return [self.submit(self._agree, self.trees.index(tree), tree) for tree in trees]

    def check_agreements(self, number: int) -> None:
        """Let all ranks agree several times. Check that each rank gets the words of all ranks."""
        expected = join_words({f"w{rank}" for rank in range(len(self.trees))})
        for _ in range(number):
            assert [answer.result(DEADLINE) for answer in self.agree()] == [expected] * len(
                self.trees
            )

    @staticmethod
    def _agree(rank: int, tree: ControlTree) -> str:
        return tree.rank0_decides([f"w{rank}"], join_words)


def join_words(words: set[str]) -> str:
    """Return a text that shows all words."""
    return ",".join(sorted(words))


def make_tree(rank: int, num_ranks: int, store: Any, **options: Any) -> ControlTree:
    """Return a rank's tree."""
    return ControlTree(
        rank,
        num_ranks,
        store=store,
        **{"host": HOST, "token": TOKEN, "key": "group/0", "host_name": f"node-{rank}", **options},
    )


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait for a condition that no future shows."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.005)
