# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A donor of small states, for tests of the transfer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import torch

from titan_ft.system.refusal import Refusal
from titan_ft.transfer import state_fetch
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.state_fetch import fetch
from titan_ft.transfer.state_server import CompletedTransfer, StateServer

DEADLINE = 10.0  # seconds; only a bug reaches it
CHUNK = 1000  # bytes of one request in these tests
TOKEN = "a shared secret"


def make_snapshot(step: int, num_bytes: int) -> Snapshot:
    """Return a snapshot whose bytes depend on its step."""
    payload = (torch.arange(num_bytes, dtype=torch.int64) * 7 + step).to(torch.uint8)
    header = {
        "step": step,
        "lineage": 1000 + step,
        "bytes": num_bytes,
        "tensors": [],
        "scalars": {},
    }
    return Snapshot(step, 1000 + step, json.dumps(header).encode(), payload)


class Donor:
    """A state server that records the calls of `served`, with a joiner's view of it."""

    def __init__(
        self, wait_seconds: float = DEADLINE, token: str = TOKEN, max_mbps: float = 0.0
    ) -> None:
        self.served: list[tuple[str, int]] = []
        self.given = 0  # bytes of the last complete transfer
        self.told = threading.Event()
        self.refusals: list[Refusal] = []
        self.server = StateServer(
            "127.0.0.1",
            token,
            wait_seconds,
            self._on_completed,
            max_mbps,
            on_refusal=self.refusals.append,
        )
        self.address = f"127.0.0.1:{self.server.port}"

    def _on_completed(self, transfer: CompletedTransfer) -> None:
        assert transfer.copy_seconds == 0.5
        assert transfer.serve_seconds >= 0
        self.served.append((transfer.joiner, transfer.snapshot.step))
        self.given = transfer.num_bytes
        self.told.set()

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Serve `snapshot`."""
        self.server.publish(snapshot, 0.5)
        return snapshot

    def fetch(
        self, step: int, token: str = TOKEN, connections: int = 2, timeout: float = DEADLINE
    ) -> Snapshot:
        """Fetch as group 4 does."""
        return fetch([self.address], token, step, "4", connections, timeout)

    def connect(self, token: str = TOKEN) -> state_fetch._DonorConnection:
        """Open a joiner's connection and prove the token."""
        return state_fetch._DonorConnection(
            self.address, token, state_fetch._TransferLimits(DEADLINE, threading.Event())
        )


def check_equal(fetched: Snapshot, sent: Snapshot) -> None:
    """Check that the received state equals the sent state, and has its own memory."""
    assert (fetched.step, fetched.lineage, fetched.header) == (sent.step, sent.lineage, sent.header)
    assert torch.equal(fetched.payload, sent.payload)
    if sent.payload.numel():
        assert fetched.payload.data_ptr() != sent.payload.data_ptr()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event shows."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)
