# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes in 8 bits: their rounding error, which the next exchange sends."""

from __future__ import annotations

import math

import pytest
import torch

from titan_ft.gradients.quantize import (
    BLOCK,
    Residual,
    add_up,
    decode,
    encode,
    find_rounding_error,
    payload_bytes,
)

TINY = torch.finfo(torch.float32).tiny
# Of a scale: the nearest multiple, with the rounding of the scale and of the quotient.
HALF = 0.5 * (1 + 2**-15)


def draw(numel: int, seed: int = 0) -> torch.Tensor:
    """Return values whose sizes differ by up to six orders of magnitude from block to block."""
    dice = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 1, (-(-numel // BLOCK),), generator=dice)
    return torch.randn(numel, generator=dice) * sizes.repeat_interleave(BLOCK)[:numel]


def travel(values: torch.Tensor) -> torch.Tensor:
    """Return the values that arrive."""
    return decode(encode(values, 0), 0)[0][: values.numel()]


def scales_of(values: torch.Tensor) -> torch.Tensor:
    """Return the scale of each value's block, for each value."""
    scales = [max(block.abs().max().item() / 127, TINY) for block in values.split(BLOCK)]
    return torch.tensor(scales, dtype=torch.float64).repeat_interleave(BLOCK)[: values.numel()]


@pytest.mark.parametrize(
    "numel", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7, 40 * BLOCK + 255]
)
def test_no_value_is_off_by_more_than_half_of_its_blocks_scale(numel: int) -> None:
    """For values of any size, in full blocks and in the last one."""
    values = draw(numel)
    off = (travel(values).double() - values.double()).abs()
    assert bool((off <= HALF * scales_of(values)).all())
    assert encode(values, 0).numel() == payload_bytes(numel, 0)


def test_a_large_value_spoils_its_own_block_only() -> None:
    """The first value of a block does not depend on the block before."""
    values = torch.full((2 * BLOCK,), 1e-3)
    values[BLOCK - 1] = 1e3
    arrived = travel(values)
    assert arrived[:BLOCK].tolist() == [0.0] * (BLOCK - 1) + [1e3]
    assert torch.allclose(arrived[BLOCK:], values[BLOCK:], rtol=1e-6)


def test_the_largest_values_of_a_block_are_sent_as_they_are() -> None:
    """Apart from the rounding of the scale, with either sign. None of them wraps around."""
    values = torch.tensor([3.7, -3.7, 0.0, 3.7 / 127])
    assert torch.allclose(travel(values), values, rtol=1e-6, atol=0)


def test_zeros_are_zeros() -> None:
    """A block of zeros has no largest value to divide by."""
    values = torch.zeros(BLOCK + 5)
    values[-1] = 2.0
    assert torch.equal(travel(values), values)


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-140, 2.0**-127, TINY, 100 * TINY])
def test_subnormal_values_are_off_by_a_subnormal_number(size: float) -> None:
    """Their scale would have a few bits, or be zero.

    No value becomes an inf, or changes its sign.
    """
    values = torch.tensor([size, -size, size / 2, 0.0])
    off = (travel(values).double() - values.double()).abs()
    assert off.max().item() <= min(size, 0.5 * max(size / 127, TINY) * (1 + 2**-15))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_arrives_as_nans(bad: float) -> None:
    """Other blocks arrive unchanged. No finite number takes the place of an inf or a NaN."""
    values = draw(3 * BLOCK)
    values[BLOCK + 3] = bad
    arrived = travel(values)
    assert bool(arrived[BLOCK : 2 * BLOCK].isnan().all())
    assert torch.equal(arrived[:BLOCK], travel(values[:BLOCK]))
    assert torch.equal(arrived[2 * BLOCK :], travel(values[2 * BLOCK :]))


@pytest.mark.parametrize("numel", [0, 1, BLOCK + 3])
def test_exact_values_are_not_rounded(numel: int) -> None:
    """The values at the end of a bucket arrive bit for bit."""
    exact = torch.tensor([1 / 3, 0.0, 1e-30])
    payload = encode(torch.cat([torch.full((numel,), 1e20), exact]), 3)
    assert payload.dtype == torch.uint8
    assert payload.numel() == payload_bytes(numel, 3)
    assert torch.equal(decode(payload, 3)[1], exact)


def test_a_payload_is_a_quarter() -> None:
    """One byte for each value and four for each block, without the padding of the last block."""
    assert payload_bytes(1000 * BLOCK, 10) == 1000 * BLOCK + 4000 + 40


def test_payloads_are_added_up_in_their_order() -> None:
    """In fp32, exact values too: 1 + 2**24 - 2**24 is 0 in one order and 1 in another."""
    flats = [torch.tensor([number, number]) for number in (1.0, 2.0**24, -(2.0**24))]
    total = torch.full((2,), 9.0)
    for order, expected in [((0, 1, 2), 0.0), ((1, 2, 0), 1.0)]:
        add_up(torch.stack([encode(flats[place], 1) for place in order]), 1, total)
        assert total[1].item() == expected
        assert total[0].item() == pytest.approx(expected, abs=2.0)  # its scale is rounded


# Error feedback


def exchange(residual: Residual, change: torch.Tensor) -> torch.Tensor:
    """Send a change once. Return the values that arrive."""
    residual.start_exchange()
    given = change.clone()
    residual.add_to(given)
    payload = encode(given, 0)
    residual.set_error(find_rounding_error(given, payload, 0))
    return decode(payload, 0)[0][: change.numel()]


def test_the_rounding_error_arrives_later() -> None:
    """The sum over many exchanges is exact up to the last rounding.

    Without feedback, errors add up.
    """
    rounds, numel = 300, 2 * BLOCK + 9
    residual, exact = Residual(), torch.zeros(numel, dtype=torch.float64)
    with_feedback, without = (
        torch.zeros(numel, dtype=torch.float64),
        torch.zeros(numel, dtype=torch.float64),
    )
    drift = draw(numel, seed=1) * 0.01
    largest = torch.zeros(numel, dtype=torch.float64)
    for number in range(rounds):
        change = (
            drift
            + torch.randn(numel, generator=torch.Generator().manual_seed(number))
            * drift.abs().max()
        )
        exact += change.double()
        with_feedback += exchange(residual, change).double()
        without += travel(change).double()
        residual.commit()
        largest = torch.maximum(largest, scales_of(change))
    off = (with_feedback - exact).abs()
    assert bool((off <= 0.6 * largest).all()), "half a scale, of the last exchange"
    assert (without - exact).abs().max() > 5 * off.max()


def test_a_change_below_half_a_scale_arrives_after_some_exchanges() -> None:
    """Without feedback, a small change beside a large one would never arrive."""
    residual, change = Residual(), torch.tensor([127.0, 0.25])
    arrived = []
    for _ in range(8):
        arrived.append(exchange(residual, change)[1].item())
        residual.commit()
    assert sum(arrived) == 2.0
    assert set(arrived) == {0.0, 1.0}


def test_a_repeated_exchange_sends_the_same_bytes() -> None:
    """For any number of repetitions. The rounding error counts once, when the update is applied."""
    residual, change = Residual(), torch.tensor([127.0, 0.4])
    exchange(residual, change)
    residual.commit()
    sent = [exchange(residual, change) for _ in range(3)]
    assert all(torch.equal(each, sent[0]) for each in sent)
    residual.commit()
    third = exchange(residual, change)
    assert third[1].item() == 0.0, "0.4 + 0.4 was sent as 1, which leaves -0.2"


def test_an_exchange_without_this_groups_change_keeps_its_rounding_error() -> None:
    """A change that was left out, or is void, was not sent.

    So its error neither counts nor is corrected.
    """
    residual, change = Residual(), torch.tensor([127.0, 0.4])
    exchange(residual, change)
    residual.commit()
    # The exchange broke. In the next one, this group gives nothing, and the update is made.
    exchange(residual, change)
    residual.start_exchange()
    residual.commit()
    assert exchange(residual, change)[1].item() == 1.0


def test_a_group_alone_has_no_rounding_error() -> None:
    """The group takes its change unrounded, with the error of earlier ones."""
    residual = Residual()
    exchange(residual, torch.tensor([127.0, 0.4]))
    residual.commit()
    residual.start_exchange()
    alone = torch.tensor([127.0, 0.25])
    residual.add_to(alone)
    residual.set_error(None)
    residual.commit()
    assert alone[1].item() == pytest.approx(0.65)
    assert exchange(residual, torch.tensor([127.0, 0.25]))[1].item() == 0.0


def test_the_rounding_error_is_dropped_with_the_state() -> None:
    """The error does not belong to another state."""
    residual = Residual()
    for _ in range(2):
        exchange(residual, torch.tensor([127.0, 0.4]))
    residual.commit()
    residual.drop()
    residual.commit()
    assert exchange(residual, torch.tensor([127.0, 0.2]))[1].item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_change_that_is_not_finite_has_no_rounding_error(bad: float) -> None:
    """If the change was applied nevertheless, the next one is finite again."""
    residual, change = Residual(), torch.tensor([127.0, 0.4, bad])
    assert bool(exchange(residual, change).isnan().all())
    residual.commit()
    change = torch.tensor([127.0, 0.4, 1.0])
    assert exchange(residual, change).tolist() == [127.0, 0.0, 1.0]
