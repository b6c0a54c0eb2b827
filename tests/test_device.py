# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The one place that knows CPU from GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titan_ft import device
from titan_ft.config import ConfigError
from titan_ft.host import cpu

cpu_only = pytest.mark.skipif(not device.on_cpu(), reason="needs a machine without an accelerator")


@cpu_only
def test_prepare_twice_is_prepare_once() -> None:
    """The barrier is wrapped once, however often the seam is asked for."""
    cpu.prepare()
    barrier = dist.barrier
    cpu.prepare()
    assert dist.barrier is barrier


@cpu_only
def test_torchtitan_finds_a_cpu_and_its_memory_monitor_works() -> None:
    """torchtitan's own modules see the device "cpu", and its metrics get numbers."""
    cpu.prepare()
    from torchtitan.components.metrics import build_device_memory_monitor
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"
    monitor = build_device_memory_monitor()
    assert monitor.device_capacity_gib > 0
    assert monitor.get_peak_stats().num_ooms <= 0


@cpu_only
def test_experts_train() -> None:
    """torchtitan's mixture of experts routes, computes and counts without its kernels."""
    cpu.prepare()
    from torchtitan.models.moe import MoE, MoEArgs
    from torchtitan.models.moe.kernels import generate_permute_indices

    layer = MoE(MoEArgs(num_experts=4, top_k=2, load_balance_coeff=1e-3), dim=8, hidden_dim=8)
    with torch.no_grad():
        layer.init_weights(0.02, torch.device("cpu"))
    for _ in range(2):  # a model of several parts is adapted part by part
        cpu.adapt_model(layer)
    out = layer(torch.randn(3, 5, 8))
    out.sum().backward()
    assert layer.tokens_per_expert.sum() == 3 * 5 * 2
    assert layer.experts.w1.grad is not None
    indices, sizes, _ = generate_permute_indices(torch.tensor([3, 2]), 2, 1, 16, 8)
    assert [sizes.tolist(), indices.tolist()] == [[8, 8], [0, 1, 2, *[-1] * 5, 3, 4, *[-1] * 6]]


@cpu_only
def test_barrier_takes_device_ids() -> None:
    """Gloo refuses device_ids; the wrapped barrier drops them."""
    cpu.prepare()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.barrier(device_ids=[0])
    finally:
        dist.destroy_process_group()


@cpu_only
def test_nccl_without_a_gpu_is_refused_in_one_line() -> None:
    """The message names field, rule, value and remedy."""
    device.check_machine("gloo", local_rank=7)
    with pytest.raises(
        ConfigError, match=r'process_group must be "gloo".*got "nccl"; set it to "gloo"'
    ) as caught:
        device.check_machine("nccl", local_rank=0)
    assert "\n" not in str(caught.value)


def test_torch_leaves_a_lost_peer_to_us() -> None:
    """Everything by which torch ends a process, or keeps it waiting, is off; what does no harm
    stays the user's.
    """
    made = device.nccl_environment({"HOME": "/"}, 10500)
    # Torch looks once a second whether to dump.
    assert int(made.pop("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")) > 1000
    assert made.pop("TORCH_NCCL_NONBLOCKING_TIMEOUT") == "11"
    assert made.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "32"
    assert set(made.values()) == {"0"}
    assert {
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_PROPAGATE_ERROR",
    } <= set(made)
    assert device.ASYNC_ERROR_HANDLING not in made  # torchtitan would write over it, with a warning
    own = {
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
    }
    made = device.nccl_environment(own, 10000)
    assert "TORCH_DISTRIBUTED_DEBUG" not in made
    assert {**own, **made} == {**made, **own}


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize("value", ["1", "2", "3"])
def test_error_handling_that_is_overwritten_is_not_refused(name: str, value: str) -> None:
    """torchrun and many scripts set it; torchtitan overwrites it for its communicators,
    `AbortableNccl` for its own.
    """
    assert (
        device.nccl_environment({name: value}, 10000)
        .keys()
        .isdisjoint({name, device.ASYNC_ERROR_HANDLING})
    )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("TORCH_NCCL_ENABLE_MONITORING", "1", "0"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "1", "0"),
        ("NCCL_DESYNC_DEBUG", "1", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "OFF or INFO"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", ">= 8"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", ">= 8"),
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "10.5", "a whole number of seconds >= 10"),
        ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "9", "a whole number of seconds >= 10"),
    ],
)
def test_a_setting_that_ends_survivors_is_refused_in_one_line(
    name: str, value: str, rule: str
) -> None:
    """It names the variable, the rule, the value, the reason and the remedy."""
    with pytest.raises(ConfigError) as caught:
        device.nccl_environment({name: value}, 10000)
    line = str(caught.value)
    assert line.startswith(
        f'{name} must be {rule} with fault_tolerance.process_group = "nccl", got {value!r}: '
    )
    assert line.endswith("; unset it")
    assert "\n" not in line


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a GPU of its own would end with an error of CUDA's, and again after each
    restart.
    """
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    device.check_machine("gloo", local_rank=1)
    with pytest.raises(
        ConfigError, match=r"^LOCAL_RANK must be < the GPUs .* \(2\), got 2; start fewer ranks"
    ):
        device.check_machine("gloo", local_rank=2)


def test_gloo_buckets_live_in_host_memory() -> None:
    """Also on a machine with a GPU, where they are pinned."""
    where = device.exchange_device("gloo")
    bucket = device.empty_bucket(5, torch.float32, where)
    assert bucket.device.type == "cpu"
    assert bucket.shape == (5,)
    assert bucket.is_pinned() is not device.on_cpu()


def test_nothing_is_written_into_a_bucket_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic algorithms torch fills new memory on the current stream. The exchange uses
    another stream, which would not wait for that.
    """
    seen: list[bool] = []

    def empty(*_: object, **__: object) -> None:
        seen.append(torch.utils.deterministic.fill_uninitialized_memory)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    device.empty_bucket(5, torch.float32, torch.device("cuda", 0))
    assert seen == [False]
    assert torch.utils.deterministic.fill_uninitialized_memory


@cpu_only
def test_events_and_threads_need_nothing_on_cpu() -> None:
    """Work on CPU is done when the call returns."""
    assert device.record_event() is None
    assert device.join_stream(None) is None
    device.wait_for(None, torch.device("cpu"))
    device.synchronize([None])
    device.synchronize()
    device.thread_initializer()()
    with device.side_stream(torch.device("cpu")):
        pass


@pytest.mark.gpu
def test_a_thread_uses_the_device_of_its_maker() -> None:
    """A fresh CUDA thread would begin on device 0."""
    from concurrent.futures import ThreadPoolExecutor

    last = torch.accelerator.device_count() - 1
    torch.accelerator.set_device_index(last)
    with ThreadPoolExecutor(1, initializer=device.thread_initializer()) as thread:
        assert thread.submit(torch.accelerator.current_device_index).result() == last


@pytest.mark.gpu
def test_side_stream_is_not_the_default_stream() -> None:
    """The exchange's collectives must not queue behind compute."""
    where = device.exchange_device("nccl")
    before = torch.accelerator.current_stream()
    with device.side_stream(where):
        assert torch.accelerator.current_stream() != before
    assert torch.accelerator.current_stream() == before


@cpu_only
def test_a_processor_has_a_name_and_a_process_its_memory() -> None:
    """What a run's history tells of its machine: a name for people, and the bytes that this process
    holds.
    """
    assert device.name().strip() not in ("", "cpu")
    before = device.memory_bytes()
    held = bytearray(b"x" * 2**26)
    after = device.memory_bytes()
    assert before is not None
    assert after is not None
    assert before + 2**25 < after < 2**45
    del held


@cpu_only
def test_context_parallelism_on_cpu_needs_an_attention_that_it_knows() -> None:
    """Any other would end with an error about a missing sharding strategy in the first step."""
    from torchtitan.models.attention import FlexAttentionWrapper, ScaledDotProductAttentionWrapper

    cpu.adapt_attention(torch.nn.Sequential(ScaledDotProductAttentionWrapper()), "headtail")
    with pytest.raises(
        ConfigError,
        match=r"context_parallel_degree must be 1 on CPU .* got Sequential; use a flavor",
    ):
        cpu.adapt_attention(torch.nn.Sequential(FlexAttentionWrapper()), "headtail")
