# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The loaders of the slots: which shard each reads, and what a loader's worker keeps of its rank."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.training.slot_loaders import SlotLoaders, _detach_from_rank


def loaders(slot: int, group_size: int, shard: int = 0, num_shards: int = 1, workers: int = 0) -> SlotLoaders:
    """Return loaders whose own slot was built; a loader is a record of what it was built with."""
    made = SlotLoaders(FaultTolerance(enable=True, group_size=group_size, replica_id=slot))

    def build(dp_world_size: int, dp_rank: int) -> Any:
        return SimpleNamespace(parts=dp_world_size, part=dp_rank, num_workers=workers, worker_init_fn=None)

    made.begin(build, shard, num_shards)
    return made


@pytest.mark.parametrize(("group_size", "num_shards"), [(1, 1), (2, 1), (3, 2), (2, 4)])
def test_all_slots_together_read_each_shard_once(group_size: int, num_shards: int) -> None:
    """Slot r and data rank i read what torchtitan's HSDP has rank r x degree + i read, whoever reads the slot."""
    for reader in range(group_size):
        opened = [
            loaders(reader, group_size, shard, num_shards).open(slot)
            for slot in range(group_size)
            for shard in range(num_shards)
        ]
        assert [loader.part for loader in opened] == list(range(group_size * num_shards))
        assert {loader.parts for loader in opened} == {group_size * num_shards}


def test_the_loader_that_torchtitan_has_built_is_used_first() -> None:
    """Once: a loader that was read from cannot go back to its beginning. Another slot never gets it."""
    made = loaders(1, 3)
    first = made._first
    assert made.open(1) is first
    again = made.open(1)
    assert again is not first
    assert again.part == 1
    other = loaders(1, 3)
    assert other.open(2).part == 2
    assert other.open(1).part == 1


@pytest.mark.parametrize(("workers", "expected"), [(0, None), (1, _detach_from_rank)])
def test_workers_are_detached(workers: int, expected: object) -> None:
    """Of loaders that have any, for the own slot and for others."""
    made = loaders(0, 2, workers=workers)
    for slot in (0, 1):
        assert made.open(slot).worker_init_fn is expected


def test_a_worker_keeps_no_connection_of_its_rank_open() -> None:
    """A peer sees at once that the rank has closed its connection, and SIGTERM leaves the worker alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    ready, report = os.pipe()
    stop, stay = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            _detach_from_rank(0)
            ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            os.write(report, b"1" if ignored else b"0")
            os.close(stay)
            os.read(stop, 1)  # until the test is over
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        own.close()
        peer.settimeout(20)
        assert peer.recv(1) == b""
    finally:
        peer.close()
        for end in (stay, stop, ready, report):
            os.close(end)
        os.waitpid(worker, 0)
