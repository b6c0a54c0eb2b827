# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The LR follows the share of the global batch, for one update."""

from __future__ import annotations

import pytest
import torch

from titan_ft.config import CHOICES
from titan_ft.protocol.lr_policy import lr_factor, scaled_lr


@pytest.mark.parametrize(("policy", "factor"), [("none", 1.0), ("sqrt", 0.5), ("linear", 0.25)])
def test_factor(policy: str, factor: float) -> None:
    """With a quarter of the batch. With all of it, each policy gives 1."""
    assert lr_factor(policy, 0.25) == factor
    assert lr_factor(policy, 1.0) == 1.0
    assert policy in CHOICES["lr_policy"]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_rate_is_back_after_the_update(rate: float | torch.Tensor) -> None:
    """The update uses the scaled LR, to the bit.

    Afterwards the scheduler's own object is there again.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=rate)
    parameter.grad = torch.ones(3)
    with scaled_lr([optimizer], 0.5):
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3) - torch.tensor(0.1) * 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
