# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Operators of the stand-in that CUDA computes otherwise than the CPU, and a job with the CPU's
bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_ft.run.events import StepCommitted
from titan_ft.run.log import read_events

_ROOT = Path(__file__).parents[2]
_BACKENDS = [
    (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
]


def _attend(backend: SDPBackend, dtype: torch.dtype, dropout: float) -> list[torch.Tensor]:
    """Return the output and the gradients of attention on inputs that depend on nothing else."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, 3, 8, 16, generator=generator).to("cuda", dtype).requires_grad_()
        for _ in range(3)
    ]
    with sdpa_kernel(backend):
        output = functional.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=True)
    # The gradient of the value shows which weights backward kept.
    output.float().sum().backward()
    gradients = [tensor.grad for tensor in inputs]
    return [
        output.detach().cpu(),
        *(gradient.cpu() for gradient in gradients if gradient is not None),
    ]


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
def test_backward_drops_the_same_weights_as_forward(
    backend: SDPBackend, dtype: torch.dtype
) -> None:
    """The output is linear in the value: the gradient of its sum, times the value, is that sum."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, 8, 16, generator=generator).to("cuda", dtype) for _ in range(3)
    )
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
        command,
        env={**os.environ, "STAND_IN_RNG": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_attention_in_bfloat16_does_not_choose_cudnn() -> None:
    """torchtitan's wrapper asks for cuDNN first, and the stand-in has none."""
    query, key, value = (
        torch.zeros(2, 3, 8, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        chosen = torch._fused_sdp_choice(query, key, value, is_causal=True)
    assert chosen == SDPBackend.FLASH_ATTENTION.value


_AS_CPU = {"STAND_IN_RNG": "cpu", "STAND_IN_FORMULAS": "cpu", "OMP_NUM_THREADS": "1"}
_STEPS = 3


def _digests(folder: Path, devices: int) -> dict[tuple[int, int, int], str | None]:
    """Train two groups of two ranks; return the digest of each rank's state by (step,
    group, rank).
    """
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        "configs/llama3_debug.toml",
        "--run-dir",
        str(folder),
    ]
    groups = ["--replicas", "2", "--ranks-per-replica", "2"]
    flags = [
        f"--training.steps={_STEPS}",
        "--training.seq_len=64",
        "--fault_tolerance.digest_every=1",
    ]
    environment = {**os.environ, **_AS_CPU, "FAKE_CUDA_DEVICES": str(devices)}
    done = subprocess.run(
        [*command, *groups, "--", *flags],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for event in read_events(folder / "events"):
        if isinstance(event, StepCommitted):
            found[event.step, event.replica, event.rank] = event.digest
    return found


@pytest.mark.slow
def test_a_job_has_the_bits_of_a_cpu_run(tmp_path: Path) -> None:
    """Weights, gradients, the norm and AdamW's state of two groups of two ranks, in each step."""
    on_stand_in = _digests(tmp_path / "stand_in", devices=2)
    on_cpu = _digests(tmp_path / "cpu", devices=0)
    assert len(on_cpu) == _STEPS * 4
    assert None not in on_cpu.values()
    assert on_stand_in == on_cpu
