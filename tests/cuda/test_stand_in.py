# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's CUDA build runs here, and its kernels compute."""

from __future__ import annotations

import torch


def test_a_product_on_the_gpu_is_that_of_the_cpu() -> None:
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    assert torch.equal((left.cuda() @ right.cuda()).cpu(), left @ right)
