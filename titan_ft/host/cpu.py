# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torch and torchtitan on a machine without an accelerator.

torchtitan assumes an accelerator. `prepare` makes it run, unmodified, on a machine that has
none. `prepare` comes before the first import of a torchtitan module, because
`torchtitan.tools.utils` reads the device at import.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan_ft import device
from titan_ft.config import ConfigError


def prepare() -> None:
    """Make torchtitan importable and runnable on a CPU. No effect with an accelerator."""
    if not device.on_cpu():
        return
    torch._utils._get_available_device_type = lambda: "cpu"
    # torchtitan's memory monitor calls these five functions of its device module. torch.cpu has
    # none of them.
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", total_memory=memory_bytes
    )
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {
        "active_bytes.all.peak": 0,
        "reserved_bytes.all.peak": 0,
    }
    if not hasattr(dist.barrier, "without_device_ids"):
        dist.barrier = _barrier_without_device_ids(dist.barrier)


def _barrier_without_device_ids(barrier: Any) -> Any:
    """Drop `device_ids`, which torchtitan's `set_pg_timeouts` passes and Gloo refuses."""

    def wrapped(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    # The mark keeps a second `prepare` from wrapping the wrapper.
    wrapped.without_device_ids = True  # type: ignore[attr-defined]
    return wrapped


def adapt_model(model: torch.nn.Module) -> torch.nn.Module:
    """Let a parallelized model train on this machine's device.

    On a CPU, FSDP reduces by a plain sum: Gloo has no pre-multiplied sum for the divide factor that
    torchtitan sets. Mixtures of experts use torchtitan's code paths without its kernels.
    """
    if not device.on_cpu():
        return model
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "use_grouped_mm"):
            module.use_grouped_mm = False  # type: ignore[assignment]  # a bool, no module
            _replace_expert_kernels()
    return model


def adapt_attention(model: torch.nn.Module, load_balancer: str | None) -> None:
    """Let context parallelism work on a CPU.

    torch's ring attention does not support the CPU's attention kernel. So each rank gathers the
    keys and values of the whole sequence. No effect with an accelerator.

    Args:
        load_balancer: `parallelism.context_parallel_load_balancer`, by which torchtitan splits the
            sequence.

    Raises:
        ConfigError: the model does not use torchtitan's SDPA module.
    """
    if not device.on_cpu():
        return
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    modules = [
        module for module in model.modules() if isinstance(module, ScaledDotProductAttentionWrapper)
    ]
    if not modules:
        raise ConfigError(
            "parallelism.context_parallel_degree must be 1 on CPU for a model whose attention is "
            f"not torchtitan's ScaledDotProductAttentionWrapper, got {type(model).__name__}; use a "
            "flavor with SDPA, or GPUs"
        )
    for module in modules:
        module.forward = functools.partial(_attend_gathered, balanced=load_balancer == "headtail")


def _attend_gathered(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    *,
    balanced: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
) -> DTensor:
    """Attend as ScaledDotProductAttentionWrapper does, with sequences sharded over the ranks.

    Shapes are [batch, head, seq, dim].

    Args:
        balanced: True if rank i of n holds the pieces i and 2n-1-i of 2n; False for the i-th piece
            of n.
    """
    mesh = q.device_mesh

    def gather(shard: DTensor) -> torch.Tensor:
        # Each rank's loss depends on all keys and values, so the gradients are partial sums.
        return shard.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    keys = gather(k)
    values = gather(v)
    mask = None
    if is_causal:
        size = mesh.size()
        positions = torch.arange(keys.shape[2])
        if balanced:
            pieces = positions.chunk(2 * size)
            order: list[torch.Tensor] = []
            for number in range(size):
                order += [pieces[number], pieces[2 * size - 1 - number]]
            positions = torch.cat(order)
        own_positions = positions.chunk(size)[mesh.get_local_rank()]
        mask = own_positions[:, None] >= positions
    out = F.scaled_dot_product_attention(
        q.to_local(), keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return DTensor.from_local(out, mesh, q.placements, run_check=False)


def _replace_expert_kernels() -> None:
    """Route tokens to experts without CUDA."""
    from torchtitan.models.moe import kernels as expert_kernels

    # torchtitan's wrapper calls a Triton kernel.
    expert_kernels.fill_indices_wrapper = expert_kernels.fill_indices_cpu
    if not hasattr(torch.histc, "counts_integers"):
        torch.histc = _histc_of_integers(torch.histc)


def _histc_of_integers(histc: Any) -> Any:
    """Let `histc` count integers too, as torch does on GPUs only.

    A router counts the tokens of each expert in this way.
    """

    def wrapped(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if values.is_floating_point():
            return histc(values, *args, **kwargs)
        return histc(values.double(), *args, **kwargs).to(values.dtype)

    # The mark keeps a second call from wrapping the wrapper.
    wrapped.counts_integers = True  # type: ignore[attr-defined]
    return wrapped
