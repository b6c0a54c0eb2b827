# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.3.0: the parts of it that the code leans on, the way of a TOML into it, its
attention on a CPU.

`scripts/test_host.sh` runs these tests, in an environment with that release.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.config import ConfigError
from titan_ft.host import cpu
from titan_ft.host.release import series

if series() != "0.3":
    pytest.skip("torchtitan 0.3 is not installed", allow_module_level=True)
cpu.prepare()

import torchtitan.trainer  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config.manager import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from titan_ft import trainer  # noqa: E402
from titan_ft.host import titan  # noqa: E402
from titan_ft.host.configs_0_3 import _find_difference  # noqa: E402
from titan_ft.host.tables_0_3 import loader_config, translate  # noqa: E402
from titan_ft.training.checkpoint import manager  # noqa: E402
from titan_ft.training.job_config import digest_config, read_config  # noqa: E402
from titan_ft.training.spec import token_counts  # noqa: E402

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_debug.toml"


def read(*flags: str) -> Any:
    return read_config(f"--job.config_file={CONFIG}", *flags)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# What the code leans on


def test_the_trainer_has_the_seams() -> None:
    """train() increments the step before train_step, and the trainer's parts are built by their
    configs.
    """
    train, init = inspect.getsource(Trainer.train), inspect.getsource(Trainer.__init__)
    loop, step, call = (
        "while self.should_continue_training()",
        "self.step += 1",
        "self.train_step(data_iterator)",
    )
    assert train.index(loop) < train.index(step) < train.index(call)
    assert "with config.profiler.build(" in train
    for part in ("dataloader", "checkpoint", "metrics", "validator"):
        assert f"config.{part}.build(" in init
    assert parameters(Trainer.forward_backward_step) == [
        "self",
        "input_dict",
        "labels",
        "global_valid_tokens",
    ]
    assert "ensure_pp_loss_visible(\n" in init


def test_tokens_are_counted_in_the_forward() -> None:
    """`forward_backward` takes that back: a token counts once its update is committed."""
    assert "self.ntokens_seen += labels.numel()" in inspect.getsource(
        Trainer.post_dataloading_process
    )
    assert "ntokens_seen" not in inspect.getsource(Trainer.batch_generator)
    dims = SimpleNamespace(pp_enabled=False)
    this: Any = SimpleNamespace(ntokens_seen=70, parallel_dims=dims)

    def step(**given: Any) -> torch.Tensor:
        this.ntokens_seen += 8
        assert given == {"input_dict": {"input": "i"}, "labels": "l", "global_valid_tokens": 5}
        return torch.tensor(0.5)

    this.forward_backward_step = step
    batch: Any = ({"input": "i"}, "l")
    assert titan.forward_backward(this, [batch], 5) == 0.5
    assert this.ntokens_seen == 70


def test_a_pipeline_takes_lists_of_microbatches() -> None:
    """0.3's loader reads them one by one."""
    given: dict[str, Any] = {}
    this: Any = SimpleNamespace(
        ntokens_seen=0,
        parallel_dims=SimpleNamespace(pp_enabled=True),
        num_pipeline_parallel_microbatches=2,
        forward_backward_step=lambda **what: given.update(what) or torch.tensor(1.0),
    )
    tokens = torch.arange(12).view(4, 3)
    titan.forward_backward(this, titan.build_dummy_batches(this, tokens), 9)
    assert [part.tolist() for part in given["labels"]] == [tokens[:2].tolist(), tokens[2:].tolist()]
    assert [part["positions"].tolist() for part in given["input_dict"]] == [[[0, 1, 2]] * 2] * 2
    assert titan.batches_per_call(this) == 2


def test_layers_of_experts_count_tokens_under_the_new_name() -> None:
    """Under another name the exchange would carry no counts, and the groups' biases would drift
    apart.
    """
    model, _ = titan.build_model(read("--model.name=deepseek_v3", "--model.flavor=debugmodel"))
    layers = [module for module in model.modules() if hasattr(module, "expert_bias_E")]
    assert layers
    assert all(layer.load_balance_coeff for layer in layers)
    assert [id(count) for count in token_counts([model])] == [
        id(layer.tokens_per_expert_E) for layer in layers
    ]


def test_the_checkpoint_manager_has_the_seams() -> None:
    """Its guards call methods with an underscore; those below are overridden."""
    assert parameters(CheckpointManager.save) == ["self", "curr_step", "last_step"]
    assert parameters(CheckpointManager.load) == ["self", "step"]
    assert parameters(CheckpointManager._should_save) == ["self", "curr_step", "last_step"]
    for name in (
        "_purge_stale_checkpoints",
        "_wait_for_saving",
        "_create_checkpoint_id",
        "dcp_save",
        "dcp_load",
    ):
        assert callable(getattr(CheckpointManager, name))
    assert "self._wait_for_saving()" in inspect.getsource(CheckpointManager.maybe_wait_for_saving)
    assert "self._purge_stale_checkpoints()" in inspect.getsource(CheckpointManager._save)


@pytest.mark.parametrize(
    ("module", "theirs"),
    [(manager, CheckpointManager), (trainer, Trainer), (trainer, titan.HostTrainer)],
)
def test_no_attribute_of_ours_hides_a_method_of_torchtitans(
    module: ModuleType, theirs: type
) -> None:
    """`_load`, which both had, ended each start of a group that had a checkpoint."""
    assigned = {
        target.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }
    assert not {name for name in assigned if callable(getattr(theirs, name, None))}


# The TOML's way in


def test_the_toml_of_0_2_becomes_a_config_of_0_3() -> None:
    """Each table reaches the config that has its settings."""
    config = translate(
        read("--activation_checkpoint.mode=full", "--checkpoint.enable", "--checkpoint.interval=7")
    )
    assert (
        config.training.seq_len,
        config.training.steps,
        config.training.disable_cuda_graphs,
    ) == (256, 80, True)
    (group,) = config.optimizer.param_groups
    assert (
        group.optimizer_name,
        group.optimizer_kwargs["lr"],
        group.optimizer_kwargs["betas"],
    ) == (
        "AdamW",
        8e-4,
        (0.9, 0.95),
    )
    assert (config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor) == (2, 0.1)
    assert (config.dataloader.dataset, config.validator.dataloader.dataset) == (
        "austen",
        "austen_validation",
    )
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert (config.checkpoint.enable, config.checkpoint.interval) == (True, 7)
    assert config.debug.enable_structured_logging is False, (
        "its files are named by the rank, which all groups have"
    )


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--training.no-disable_cuda_graphs",
            "training.disable_cuda_graphs must be True with torchtitan 0.3",
        ),
        (
            "--model.converters=float8",
            r"model.converters must be \[\] with torchtitan 0.3 .* got \['float8'\]",
        ),
        (
            "--parallelism.expert_tensor_parallel_degree=2",
            "parallelism.expert_tensor_parallel_degree must be 1 with",
        ),
        (
            "--debug.enable_structured_logging",
            "debug.enable_structured_logging must be False with torchtitan 0.3",
        ),
        (
            "--job.custom_config_module=mine",
            'job.custom_config_module must be "titan_ft.config" with torchtitan 0.3',
        ),
        (
            "--parallelism.context_parallel_degree=4",
            r"training.seq_len must be a multiple of 128 x .* \(4\) with",
        ),
        ("--checkpoint.keep_latest_k=1", "at least 2 checkpoint replicas"),
        (
            "--training.sequence=1",
            "--training.sequence is no flag of torchtitan; did you mean --training.seq_len",
        ),
        ("--model.flavor=9B", "model.flavor must be one of 1B, .* got '9B'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(flag: str, line: str) -> None:
    """In one line, before a worker starts."""
    with pytest.raises(ConfigError, match=line) as refused:
        read(flag)
    assert "\n" not in str(refused.value)


def test_a_validation_has_its_own_batches_or_those_of_the_training() -> None:
    """0.3 knows the latter only; a pipeline's stages take no others."""
    validation = read("--validation.enable").validation
    assert (validation.local_batch_size, validation.seq_len) == (4, 256)
    stages = ("--validation.enable", "--parallelism.pipeline_parallel_degree=2")
    with pytest.raises(
        ConfigError, match=r"validation.local_batch_size must be training.local_batch_size \(2\)"
    ):
        read(*stages)
    assert read(*stages, "--validation.local_batch_size=2").validation.seq_len == 256
    with pytest.raises(ConfigError, match="must be false with the schedule ZBVZeroBubble"):
        read(*stages, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble")
    with pytest.raises(
        ConfigError, match=r"validation.seq_len must be <= training.seq_len \(128\)"
    ):
        read("--validation.enable", "--training.seq_len=128")


def test_every_process_reads_the_same_digest() -> None:
    """0.3's own text of a config has addresses of functions: groups would refuse each other."""
    values = str(read().to_dict())
    assert " at 0x" not in values
    assert digest_config(read()) == digest_config(read("--job.dump_folder=/elsewhere"))
    assert digest_config(read()) != digest_config(read("--training.seq_len=128"))


def test_a_loader_s_state_is_that_after_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan asks torchdata for a state at each checkpoint only, and a group would read on from
    there.
    """
    built: dict[str, Any] = {}
    job_config = read()
    monkeypatch.setattr(
        type(loader_config(job_config.training)), "build", lambda self, **parts: built.update(parts)
    )
    titan.build_text_dataloader(dp_world_size=4, dp_rank=1, tokenizer=None, job_config=job_config)
    assert built["snapshot_every_n_steps"] == 1
    assert (built["dp_world_size"], built["dp_rank"], built["local_batch_size"]) == (4, 1, 2)


# Attention on a CPU


def positions() -> torch.Tensor:
    """Return the places of two documents and a half."""
    return torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def document_mask(places: torch.Tensor) -> Any:
    """Return the mask that torchtitan makes of the places: causal, and within a document."""
    config = SimpleNamespace(inner_attention=FlexAttention.Config())
    model: Any = SimpleNamespace(_create_flex_attention_mask=Decoder._create_flex_attention_mask)
    model._create_flex_attention_mask = lambda *given: Decoder._create_flex_attention_mask(
        model, *given
    )
    return Decoder._create_flex_attention_mask_for_document(model, places, config)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="attends by flex_attention itself")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_cpu_attends_as_flex_attention_does(kv_heads: int) -> None:
    """Forward as torch's own, which has no backward on a CPU: no token sees another document."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 8, heads, 16) for heads in (4, kv_heads, kv_heads))
    mask = document_mask(positions())
    attention = FlexAttention(FlexAttention.Config())
    grouped = kv_heads != 4
    found = attention(query, key, value, attention_masks=mask, enable_gqa=grouped)
    expected = flex_attention(
        *(part.transpose(1, 2) for part in (query, key, value)), block_mask=mask, enable_gqa=grouped
    )
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)
    weighted = attention(
        query,
        key,
        value,
        attention_masks=mask,
        enable_gqa=grouped,
        out_transform=lambda out, lse: out * lse.sigmoid().unsqueeze(-1),
    )
    _, lse = flex_attention(
        *(part.transpose(1, 2) for part in (query, key, value)),
        block_mask=mask,
        enable_gqa=grouped,
        return_lse=True,
    )
    assert torch.allclose(weighted, found * lse.transpose(1, 2).sigmoid().unsqueeze(-1), atol=1e-6)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="attends by varlen_attn itself")
def test_packed_documents_attend_as_blocks_do() -> None:
    """The other kind of attention says the same by the lengths of the documents; it may also have a
    window.
    """
    query, key, value = (torch.randn(2, 8, 4, 16) for _ in range(3))
    by_blocks = FlexAttention(FlexAttention.Config())(
        query, key, value, attention_masks=document_mask(positions())
    )
    packed = VarlenAttention(VarlenAttention.Config())
    lengths = create_varlen_metadata_for_document(positions())
    assert torch.allclose(packed(query, key, value, attention_masks=lengths), by_blocks, atol=1e-6)
    alone = VarlenAttention(VarlenAttention.Config(window_size=(0, 0)))
    assert torch.allclose(alone(query, key, value, attention_masks=lengths), value, atol=1e-6)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="attends by flex_attention itself")
def test_a_cpu_goes_backward_through_attention() -> None:
    """And the gradient of a document is none of another document's."""
    query, key, value = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))
    out = FlexAttention(FlexAttention.Config())(
        query, key, value, attention_masks=document_mask(positions())
    )
    out[0, 3:7].sum().backward()  # the second document of the first sequence
    assert key.grad is not None
    reached = key.grad.abs().sum(dim=(2, 3)) > 0
    assert reached.tolist() == [[False] * 3 + [True] * 4 + [False], [False] * 8]


def test_masks_are_made_without_a_compiler() -> None:
    """A CPU would compile them for minutes, for each shape."""
    if not torch.accelerator.is_available():
        assert torchtitan.models.common.attention._compiled_create_block_mask is create_block_mask


# Jobs by --module and --config

MODULE = ("--module=llama3", "--config=llama3_debugmodel", "--hf_assets_path=titan_ft://tokenizer")
OWN = ("--fault_tolerance.enable", "--fault_tolerance.group_size=2")


def test_a_module_describes_the_job_that_it_returns() -> None:
    """With 0.3's flags, and with [fault_tolerance] beside them; the rest is what 0.3 itself
    reads.
    """
    flags = (
        "--training.steps=7",
        "--optimizer.implementation=for-loop",
        "--training.seq_len",
        "128",
    )
    job = read_config(*MODULE, *flags, *OWN)
    table = job.fault_tolerance
    assert (table.enable, table.group_size) == (True, 2)
    assert (job.training.steps, job.training.seq_len, job.optimizer.implementation) == (
        7,
        128,
        "for-loop",
    )
    assert (job.training.local_batch_size, job.lr_scheduler.warmup_steps) == (8, 2)
    assert (job.model.name, job.model.flavor) == ("llama3", "debugmodel")
    assert job.training.disable_cuda_graphs, "a replayed graph calls no hooks"
    stock = ConfigManager().parse_args([*MODULE, *flags])
    made = translate(job)
    for part in (
        "training",
        "optimizer",
        "lr_scheduler",
        "parallelism",
        "dataloader",
        "compile",
        "comm",
        "metrics",
    ):
        expected = getattr(stock, part)
        if part == "training":
            expected = dataclasses.replace(expected, disable_cuda_graphs=True)
        assert getattr(made, part) == expected, part


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ("--config=llama3_debugmodel_varlen_attn",),
            "model.layers.0..attention.inner_attention = Varlen",
        ),
        (
            ("--config=sft_debugmodel",),
            "sft_debugmodel must be a job that a TOML can describe, got dataloader",
        ),
        (("--config=nope",), "Config function 'nope' not found"),
        (
            ("--config=llama3_debugmodel", "--training.stepz=3"),
            "--training.stepz is no flag of --module llama3",
        ),
        (
            ("--config=llama3_debugmodel", "--training.steps=x"),
            "--training.steps must be a whole number, got 'x'",
        ),
        (
            ("--module=qwen3", "--config=qwen3_debugmodel_moe_param_groups"),
            "got optimizer.param_groups = ",
        ),
    ],
)
def test_a_module_that_is_refused(given: tuple[str, ...], line: str) -> None:
    """By the name of what the tables cannot hold, in one line."""
    module = () if given[0].startswith("--module") else ("--module=llama3",)
    with pytest.raises(ConfigError, match=line) as caught:
        read_config(*module, *given, *OWN)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_launch_by_module(tmp_path: Path) -> None:
    """Two groups train to the end, and every promise holds."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "titan_ft"]
    shape = ["--replicas", "2", "--ranks-per-replica", "1", f"--run-dir={run}"]
    sizes = ["--training.seq_len=64", "--training.local_batch_size=1", "--training.steps=40"]
    flags = ["--model.hf_assets_path=titan_ft://tokenizer", "--training.dataset=austen", *sizes]
    launch = [*command, "launch", *MODULE[:2], *shape, "--", *flags]
    made = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    checked = subprocess.run(
        [*command, "check", run], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout
    assert "every batch once         holds" in checked.stdout
    assert "Finished at step 40" in checked.stdout


def test_functions_of_one_factory_are_told_apart() -> None:
    """The initializers of a fused projection are such functions: their names and code are equal."""

    def make(deviation: float) -> Any:
        def init() -> float:
            return deviation

        return init

    assert _find_difference("init", make(0.02), make(0.02)) is None
    assert _find_difference("init", make(0.02), make(0.04)) == ("init()[0]", 0.02, 0.04)
    name, _, _ = _find_difference("init", lambda: 1, lambda: 2) or ("", "", "")
    assert name == "init"


def test_values_of_any_kind_are_compared() -> None:
    """A function that refers to itself, and a tensor, whose comparison is no bool."""

    def make() -> Any:
        def count(number: int) -> int:
            return count(number - 1) if number else 0

        return count

    assert _find_difference("count", same := make(), same) is None
    with pytest.raises(RecursionError):
        _find_difference("count", make(), make())
    assert _find_difference("tensor", torch.ones(2), torch.ones(2)) is None
    assert _find_difference("tensor", torch.ones(2), torch.zeros(2)) is not None
