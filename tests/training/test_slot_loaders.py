# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The loaders of the slots: the shard of each, and the parts of its rank that a loader's worker
keeps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.config import FaultTolerance
from titan_ft.engine.feed import load_loader, save_loader
from titan_ft.host.loader_workers import prepare_worker
from titan_ft.training.slot_loaders import SlotLoaders


def loaders(
    slot: int, group_size: int, shard: int = 0, num_shards: int = 1, workers: int = 0
) -> SlotLoaders:
    """Return loaders with the own slot built; a loader is a record of its build's arguments."""
    made = SlotLoaders(FaultTolerance(enable=True, group_size=group_size, replica_id=slot))

    def build(dp_world_size: int, dp_rank: int) -> Any:
        return SimpleNamespace(
            parts=dp_world_size, part=dp_rank, num_workers=workers, worker_init_fn=None
        )

    made.build_own(build, shard, num_shards)
    return made


@pytest.mark.parametrize(("group_size", "num_shards"), [(1, 1), (2, 1), (3, 2), (2, 4)])
def test_all_slots_together_read_each_shard_once(group_size: int, num_shards: int) -> None:
    """Slot r and data rank i read the shard of torchtitan's HSDP rank r x degree + i, whichever
    group reads it.
    """
    for reader in range(group_size):
        opened = [
            loaders(reader, group_size, shard, num_shards).open(slot)
            for slot in range(group_size)
            for shard in range(num_shards)
        ]
        assert [loader.part for loader in opened] == list(range(group_size * num_shards))
        assert {loader.parts for loader in opened} == {group_size * num_shards}


def test_the_loader_that_torchtitan_has_built_is_used_first() -> None:
    """Once: a read loader cannot go back to its beginning. Another slot never gets it."""
    made = loaders(1, 3)
    first = made._first
    assert made.open(1) is first
    again = made.open(1)
    assert again is not first
    assert again.part == 1
    other = loaders(1, 3)
    assert other.open(2).part == 2
    assert other.open(1).part == 1


class _Unhurried:
    """Part of a state: takes a moment to be written."""

    def __deepcopy__(self, memo: object) -> _Unhurried:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        time.sleep(0.1)
        return str, ()


class _Tokens(IterableDataset[int]):
    """Keeps changing the list that it has given as its state, as torchtitan's text dataset does."""

    def __init__(self) -> None:
        self._read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while True:
            self._read.append(len(self._read))
            yield self._read[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"first": _Unhurried(), "read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read = state["read"]


def _loaders_of_tokens(init: Any = None) -> SlotLoaders:
    made = SlotLoaders(FaultTolerance(enable=True, group_size=2, replica_id=0))
    made.build_own(
        lambda **_: StatefulDataLoader(_Tokens(), batch_size=2, num_workers=1, worker_init_fn=init),
        shard=0,
        num_shards=1,
    )
    return made


def test_a_worker_s_state_is_that_of_its_batch() -> None:
    """Whatever the worker has read since, when a thread of its queue comes to write the state."""
    made = _loaders_of_tokens()
    loader = made.open(0)
    batches = iter(loader)
    for first in (0, 2, 4):
        assert next(batches).tolist() == [first, first + 1]
        restored = made.open(1)
        load_loader(restored, save_loader(loader))
        assert next(iter(restored)).tolist() == [first + 2, first + 3]


def test_workers_are_made_ready_beside_what_the_user_s_loader_does_in_them(tmp_path: Path) -> None:
    """For the own slot and for others; a loader without workers is left alone."""

    def init(worker: int) -> None:
        ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        sockets = [
            number for number in os.listdir("/proc/self/fd") if _is_of_the_internet(int(number))
        ]
        (tmp_path / str(os.getpid())).write_text(f"{worker} {ignores} {sockets}")

    made = _loaders_of_tokens(init)
    with socket.create_server(("127.0.0.1", 0)):
        for slot in (0, 1):
            next(iter(made.open(slot)))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["0 True []"] * 2
    assert loaders(0, 2).open(0).worker_init_fn is None


def _is_of_the_internet(number: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
        return found.family in (socket.AF_INET, socket.AF_INET6)
    return False


def test_a_worker_keeps_no_connection_of_its_rank_open() -> None:
    """A peer sees at once that the rank has closed its connection, and SIGTERM leaves the worker
    alone.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    ready, report = os.pipe()
    stop, stay = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            prepare_worker(None, 0)
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
