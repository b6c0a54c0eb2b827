# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Strangers in great numbers at one port of the process under test."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

LIMIT = 10.0  # seconds for one call; only ever reached by a bug
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER
GROWTH_BYTES = 32 << 20
"""Memory that strangers may cost for good: allocators and Python keep some of what was freed."""

numbers_of_strangers = pytest.mark.parametrize(
    "number_of_strangers", [300, pytest.param(10_000, marks=pytest.mark.slow)]
)


def knock(address: tuple[str, int], beginnings: Sequence[bytes], chance: random.Random) -> None:
    """Connect, send a line that is nearly valid or noise, and go, by a reset or in order.

    Args:
        beginnings: what a peer sends first, in several versions.
    """
    sent = bytearray(chance.choice([b"", *beginnings]))
    for _ in range(chance.randrange(4) if sent else 0):
        sent[chance.randrange(len(sent))] = chance.randrange(256)
    sent += chance.randbytes(chance.choice((0, 1, 300, 20_000)))
    if chance.random() < 0.5:
        sent += b"\n"
    with contextlib.suppress(OSError), socket.create_connection(address, LIMIT) as stranger:
        if chance.random() < 0.5:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        for piece in (sent[:50], sent[50:]):
            stranger.sendall(piece)


@contextlib.contextmanager
def bounded_cost() -> Iterator[None]:
    """Check that strangers leave neither memory nor threads behind in this process."""
    resident, threads = _resident_bytes(), threading.active_count()
    yield
    assert _resident_bytes() - resident < GROWTH_BYTES
    assert threading.active_count() < threads + 100


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
