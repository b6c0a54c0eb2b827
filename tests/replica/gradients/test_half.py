# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in bfloat16: the payloads, their sum, and its error."""

from __future__ import annotations

import pytest
import torch

from titan_ft.gradients import half


def exchange(flats: list[torch.Tensor], num_exact: int) -> list[torch.Tensor]:
    """Let members exchange. Return each member's sum."""
    number = len(flats)
    numel = flats[0].numel() - num_exact
    rows = [half.cut(flat[:numel].to(torch.bfloat16), flat[numel:], number) for flat in flats]
    summed = [
        half.add_up(torch.stack([own[member] for own in rows]), num_exact)
        for member in range(number)
    ]
    parts = torch.stack([part for part, _ in summed])
    sent = (
        sum(len(rows[0][member]) for member in range(1, number)) + (number - 1) * 2 * parts.shape[1]
    )
    assert sent == half.count_sent_bytes(numel, num_exact, number)
    return [torch.cat([parts.view(-1)[:numel].float(), exact]) for _, exact in summed]


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 6, 601])
def test_sums_are_equal_everywhere_and_as_exact_as_promised(number: int, numel: int) -> None:
    """The error is less than 1/127 of the magnitudes. Whole numbers up to 2**24 are exact."""
    generator = torch.Generator().manual_seed(numel)
    flats = [torch.randn(numel + 3, generator=generator) for _ in range(number)]
    for flat in flats:
        flat[numel:] = torch.tensor([2.0**23 // number, 1.0, 0.0])
    results = exchange(flats, 3)
    assert all(result.numpy().tobytes() == results[0].numpy().tobytes() for result in results)
    assert results[0][numel:].tolist() == [2.0**23 // number * number, float(number), 0.0]
    exact = torch.stack(flats).double()[:, :numel]
    off = (results[0][:numel].double() - exact.sum(0)).abs()
    assert bool((off <= exact.abs().sum(0) / 127).all())


def test_terms_are_added_up_before_they_are_rounded_again() -> None:
    """A ring in bfloat16 would lose each of the small terms."""
    flats = [torch.tensor([256.0 if member == 0 else 0.75]) for member in range(5)]
    # 259, between 258 and 260, is rounded to the even one.
    assert exchange(flats, 0)[0].tolist() == [260.0]


def test_values_that_are_not_finite_stay_so() -> None:
    """A value that is not finite stays in its place, and others stay finite."""
    flats = [torch.tensor([1.0, float("nan"), float("inf"), 2.0]), torch.ones(4)]
    found = exchange(flats, 1)[0]
    assert found[[0, 3]].tolist() == [2.0, 3.0]
    assert found[1].isnan()
    assert found[2].isinf()


def test_half_of_the_bytes_are_sent() -> None:
    """A ring sends 2 (n - 1) / n times 4 bytes for a value. This sends as many times 2 bytes."""
    for number in (2, 4, 30):
        assert half.count_sent_bytes(12000, 0, number) == 2 * (number - 1) * 12000 * 2 // number
