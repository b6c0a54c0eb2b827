# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the stand-in that CUDA computes otherwise than the CPU: attention's dropout, AMP, float8."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = [(SDPBackend.EFFICIENT_ATTENTION, torch.float32), (SDPBackend.FLASH_ATTENTION, torch.bfloat16)]


def _attend(backend: SDPBackend, dtype: torch.dtype, dropout: float) -> list[torch.Tensor]:
    """Return the output and the gradients of attention on inputs that depend on nothing else."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, 8, 16, generator=generator).to("cuda", dtype).requires_grad_() for _ in range(3)]
    with sdpa_kernel(backend):
        output = functional.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=True)
    # The gradient of the value shows which weights backward kept.
    output.float().sum().backward()
    gradients = [tensor.grad for tensor in inputs]
    return [output.detach().cpu(), *(gradient.cpu() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(("backend", "dtype"), _BACKENDS)
def test_attention_drops_by_the_generator(backend: SDPBackend, dtype: torch.dtype) -> None:
    torch.cuda.manual_seed(1)
    first = _attend(backend, dtype, 0.5)
    following = _attend(backend, dtype, 0.5)
    torch.cuda.manual_seed(1)
    again = _attend(backend, dtype, 0.5)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], following[0])
    assert not torch.equal(first[0], _attend(backend, dtype, 0.0)[0])


@pytest.mark.parametrize(("backend", "dtype"), _BACKENDS)
def test_backward_drops_the_same_weights_as_forward(backend: SDPBackend, dtype: torch.dtype) -> None:
    """The output is linear in the value: the gradient of its sum, times the value, is that sum."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 8, 16, generator=generator).to("cuda", dtype) for _ in range(3))
    value.requires_grad_()
    with sdpa_kernel(backend):
        output = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    output.float().sum().backward()
    assert value.grad is not None
    by_gradient = (value.grad.float() * value.detach().float()).sum()
    close = 1e-4 if dtype == torch.float32 else 0.5
    assert abs(by_gradient - output.detach().float().sum()).item() < close


@pytest.mark.parametrize("overflows", [False, True])
def test_a_gradient_scaler_steps_and_skips(overflows: bool) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale((parameter * 3).sum()).backward()
    if overflows:
        assert parameter.grad is not None
        parameter.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    expected = [1.0, 2.0] if overflows else [-2.0, -1.0]
    assert parameter.tolist() == expected
    assert scaler.get_scale() == (4.0 if overflows else 8.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_to_float8_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20
    on_device = values.cuda().to(dtype)
    assert torch.equal(on_device.view(torch.uint8).cpu(), values.to(dtype).view(torch.uint8))
    assert torch.equal(on_device.float().cpu(), values.to(dtype).float())


_DRAW_IN_DTENSOR = """
import torch
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
drawn = []
for device in ("cpu", "cuda"):
    mesh = init_device_mesh(device, (1,))
    torch.manual_seed(3)
    sharded = distribute_tensor(torch.empty(64, 8, device=device), mesh, [Shard(0)])
    torch.nn.init.trunc_normal_(sharded, std=1.0, a=-1.0, b=1.0)
    drawn.append((sharded.to_local().cpu(), torch.rand(4)))
assert all(map(torch.equal, *drawn)), drawn
"""


def test_dtensor_draws_in_the_order_of_the_cpu() -> None:
    """A deadline ends the program: with the CPU's generator restored, trunc_normal_ never ends."""
    command = [sys.executable, "-c", _DRAW_IN_DTENSOR]
    done = subprocess.run(
        command, env={**os.environ, "STAND_IN_RNG": "cpu"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
