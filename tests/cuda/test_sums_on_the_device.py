# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's queued sums stay on the device as far as there is room, and else go to host memory."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from tests.cuda.stream_scenarios import NUM_MEMBERS, Rank, World, _together
from titan_ft import device
from titan_ft.gradients.sums import Sums


@pytest.fixture(autouse=True)
def nccl_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set NCCL's environment as a worker does, for one test.

    torchft sets a default timeout. It stayed in the environment of this process, and the jobs of
    later tests refused it.
    """
    for name, value in device.nccl_environment(os.environ, timeout_ms=10_000).items():
        monkeypatch.setenv(name, value)


def kinds_of(sums: Sums) -> set[str]:
    return {flat.device.type for flat in sums.flats if flat is not None}


def leave_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let each device report so many bytes that are left."""
    monkeypatch.setattr(device, "free_bytes", lambda where: num_bytes)


def test_sums_stay_on_the_device_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums stay up to half of the free memory. Later sums go to host memory until a replay frees
    some.
    """
    world = World("nccl")
    ranks = [Rank(world, number) for number in range(NUM_MEMBERS)]
    # Its gradients, and Adam's moments.
    needed = 4 * sum(parameter.numel() for parameter in ranks[0].parameters) * 3
    leave_room(monkeypatch, needed - 1)
    assert [rank.exchange.copy_memory.keep_on_device() for rank in ranks] == [0] * NUM_MEMBERS
    leave_room(monkeypatch, needed + 5 * ranks[0].exchange.num_bytes)
    assert [rank.exchange.copy_memory.keep_on_device() for rank in ranks] == [2] * NUM_MEMBERS

    def run(number: int) -> list[set[str]]:
        rank = ranks[number]
        world.place(number)
        queued = [rank.queue() if number else rank.step(step) for step in range(4)]
        found = [kinds_of(sums) for sums in queued]
        while queued:
            rank.apply(queued.pop(0))
        found.append(kinds_of(rank.queue() if number else rank.step(4)))
        rank.exchange.copy_memory.drop()
        found.append(kinds_of(rank.queue() if number else rank.step(5)))
        return found

    expected = [{"cuda"}, {"cuda"}, {"cpu"}, {"cpu"}, {"cuda"}, {"cpu"}]
    assert _together(run) == [expected] * NUM_MEMBERS


def test_sums_go_to_host_memory_when_the_device_has_no_room_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something else has taken the memory since: no heal ends by that."""
    empty_like = torch.empty_like

    def refuse(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if sys._getframe(1).f_code.co_name in ("_allocate_on_device", "<listcomp>"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty_like(like, *args, **kwargs)

    world = World("nccl")
    leave_room(monkeypatch, 1 << 30)

    def run(number: int) -> set[str]:
        rank = Rank(world, number)
        assert rank.exchange.copy_memory.keep_on_device() > 1
        sums = rank.queue() if number else rank.step(0)
        rank.apply(sums)
        return kinds_of(sums)

    monkeypatch.setattr(torch, "empty_like", refuse)
    assert _together(run) == [{"cpu"}] * NUM_MEMBERS
