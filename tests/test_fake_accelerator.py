# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The accelerator for tests: it must show what a GPU would do to code that does not wait."""

from __future__ import annotations

import torch

from tests.fake_accelerator import installed

SEEDS = range(8)


def _pinned(numel: int) -> torch.Tensor:
    return torch.empty(numel, pin_memory=True).zero_()


def test_copy_that_is_not_waited_for_has_not_come() -> None:
    """Pinned memory is filled when the stream comes to the copy; what the host reads before is old."""
    early = 0
    for seed in SEEDS:
        with installed(seed) as accelerator:
            host, values = _pinned(3), torch.ones(3).to("cuda:0")
            host.copy_(values * 2, non_blocking=True)
            early += host.tolist() != [2.0] * 3
            accelerator.current_stream().record_event().synchronize()
            assert host.tolist() == [2.0] * 3
    assert early


def test_host_memory_that_is_overwritten_too_early_comes_late() -> None:
    """A copy from pinned memory reads it when the stream comes there; one from pageable memory has read it at once."""
    spoiled = 0
    for seed in SEEDS:
        with installed(seed):
            pinned, pageable = _pinned(3).fill_(1.0), torch.ones(3)
            copies = [host.to("cuda:0", non_blocking=True) for host in (pinned, pageable)]
            pinned.zero_()
            pageable.zero_()
            spoiled += copies[0].tolist() != [1.0] * 3
            assert copies[1].tolist() == [1.0] * 3
    assert spoiled
