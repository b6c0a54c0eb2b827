# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The accelerator for tests: it must show what a GPU would do to code that does not wait."""

from __future__ import annotations

import pytest
import torch

from tests.fake_accelerator import Stream, installed

SEEDS = range(8)


def _pinned(numel: int) -> torch.Tensor:
    return torch.empty(numel, pin_memory=True).zero_()


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_those_of_the_host(seed: int) -> None:
    """Operations of one stream need no waiting: forward, backward and an optimizer's step give what a CPU gives."""
    losses = []
    for where in ("cpu", "cuda:0"):
        with installed(seed):
            torch.manual_seed(1)
            weight = torch.randn(4, 3).to(where).requires_grad_()
            optimizer = torch.optim.AdamW([weight], lr=0.1)
            for step in range(3):
                loss = torch.tanh(torch.full((2, 4), step + 1.0).to(where) @ weight).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append((loss.item(), weight.detach().cpu().clone()))
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])


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


def test_streams_do_not_wait_for_each_other() -> None:
    """Another stream reads what has not been written yet, unless it waits for the event."""
    early = 0
    for seed in SEEDS:
        for waits in (False, True):
            with installed(seed) as accelerator:
                values = torch.ones(3).to("cuda:0") * 2
                written = accelerator.current_stream().record_event()
                with Stream(accelerator, torch.device("cuda", 0)) as stream:
                    if waits:
                        stream.wait_event(written)
                    total = values.sum().item()
                assert total == 6.0 or not waits
                early += total != 6.0
    assert early


def test_memory_that_is_let_go_is_taken_again() -> None:
    """Memory that another stream still reads is overwritten, unless the allocator was told of that stream."""
    spoiled = 0
    for seed in SEEDS:
        for told in (False, True):
            with installed(seed) as accelerator:
                side = Stream(accelerator, torch.device("cuda", 0))
                values = torch.ones(5).to("cuda:0")
                accelerator.current_stream().synchronize()
                with side:
                    total = values.sum()
                if told:
                    values.record_stream(side)
                del values
                torch.zeros(5).to("cuda:0").sum().item()
                with side:
                    assert total.item() == 5.0 or not told
                    spoiled += total.item() != 5.0
    assert spoiled
