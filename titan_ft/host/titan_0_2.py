# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.2.2, as the rest of the package uses it; `titan_ft.host.titan` chooses this module.

The first part re-exports classes and functions unchanged. The second part holds the functions that
differ between the releases. The third part holds the seams. Each function there replaces something
inside torchtitan. Its docstring gives the file, the reason, and the test that fails once torchtitan
no longer needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torchtitan
import torchtitan.components.metrics as _metrics
import torchtitan.train as _train
from torchtitan.components import checkpoint as _checkpoint
from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, WandBLogger
from torchtitan.components.optimizer import (
    build_optimizers,
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HuggingFaceTextDataset,
    build_text_dataloader,
)
from torchtitan.models import _supported_models
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols import train_spec as _specs
from torchtitan.protocols.model_converter import ModelConvertersContainer, build_model_converters
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import profiling as _profiling
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype
from torchtitan.train import Trainer

from titan_ft.config import ConfigError
from titan_ft.host.cpu import adapt_attention

if TYPE_CHECKING:
    from queue import Queue

__all__ = [
    "ADAM_BUILDERS",
    "DATALOADER",
    "DATASETS",
    "DEGREES",
    "FORWARD_RUNS_LOSS_BACKWARD",
    "IGNORE_INDEX",
    "LOADERS",
    "PIPELINES_SUM_LOSSES",
    "TOKEN_COUNTS",
    "TORCH_DTYPE_MAP",
    "TRAINER_FILE",
    "TRAIN_STATE",
    "AsyncMode",
    "BaseLogger",
    "DataloaderExhaustedError",
    "DatasetConfig",
    "HostCheckpoints",
    "HostTrainer",
    "HuggingFaceTextDataset",
    "JobConfig",
    "MetricsProcessor",
    "ParallelDims",
    "StateDictAdapter",
    "TrainSpec",
    "Trainer",
    "Validator",
    "WandBLogger",
    "adapt_attention",
    "batches_per_call",
    "build_dummy_batches",
    "build_hf_tokenizer",
    "build_model",
    "build_parts_on_meta",
    "build_schema",
    "build_text_dataloader",
    "clip_grad_norm_",
    "compiles_attention",
    "file_in_package",
    "forward_backward",
    "get_train_spec",
    "logger",
    "model_names",
    "packages_of_model",
    "purge",
    "read_batches",
    "read_module",
    "register_flavors",
    "register_spec",
    "run",
    "set_pg_timeouts",
    "unwrap_elastic_record",
    "use_curve_loggers",
    "use_validation_loader",
    "validation_batch_size",
    "wrap_profilers",
]

ADAM_BUILDERS = (build_optimizers, build_optimizers_with_moe_load_balancing)
"""Builders of optimizers that know the names Adam and AdamW, and no other."""
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
"""The dimensions of `ParallelDims`."""
LOADERS = (ParallelAwareDataloader,)
"""torchtitan's data loaders. Each of them only adds a format of its state to torchdata's loader."""
FORWARD_RUNS_LOSS_BACKWARD = False
"""False: the backward begins only after the forward."""
PIPELINES_SUM_LOSSES = True
"""True: a pipeline runs the backward of the sum of the losses, and divides only the loss that it
reports."""
TOKEN_COUNTS = "tokens_per_expert"
"""Name of the buffer in which a mixture of experts counts tokens."""
TRAINER_FILE = "train.py"
"""File of a model's package that may define a trainer of its own."""


class HostTrainer(Trainer):
    """torchtitan's Trainer, as a replica group uses it.

    Args:
        checkpoints: the class of the checkpoint manager, with the arguments of `HostCheckpoints`.
    """

    _converters: ModelConvertersContainer

    def __init__(self, job_config: JobConfig, checkpoints: type[CheckpointManager]) -> None:
        _use_checkpoints(checkpoints)
        _silence_pipeline_loss_warning()
        _use_model_converters(self._build_model_converters)
        super().__init__(job_config)

    def _build_model_converters(self, *args: Any) -> ModelConvertersContainer:
        self._converters = build_model_converters(*args)
        return self._converters

    def refresh_converters(self) -> None:
        """Let converters recompute their caches of the weights.

        torchtitan calls this hook after each optimizer step: float8 computes the scales of all
        weights in it.
        """
        self._converters.post_optimizer_hook(self.model_parts)


class HostCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, with the keywords `checkpoint_config` and `sd_adapter` in
    both releases.
    """


def model_names() -> set[str]:
    """Return every name that `get_train_spec` knows, those of the user's own models included."""
    return {*_specs._extra_train_specs, *_supported_models, *_supported_experiments}


def read_module(module: str, function: str, flags: Sequence[str]) -> dict[str, Any]:
    """Refuse a job that is given as on 0.3.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"--module must come with torchtitan 0.3, got --module {module} --config {function} with "
        f"{version('torchtitan')}; give a TOML by --job.config_file"
    )


def packages_of_model(name: str) -> list[str]:
    """Return the packages of torchtitan that may belong to a model; none for a model of the user's.

    The experiment simple_fsdp, for example, belongs to the model simple_fsdp.llama3.
    """
    if name in _specs._extra_train_specs:
        return []
    if name in _supported_models:
        return [f"torchtitan.models.{name}"]
    if name in _supported_experiments:
        return [
            f"torchtitan.experiments.{part}"
            for part in dict.fromkeys((name.partition(".")[0], name))
        ]
    return []


def file_in_package(package: str, file: str) -> Path | None:
    """Return the path of a file of one of torchtitan's packages; None if there is no such file.

    Does not import the package.
    """
    for folder in torchtitan.__path__:
        path = Path(folder, *package.split(".")[1:], file)
        if path.is_file():
            return path
    return None


def build_schema(
    own: type, arguments: Sequence[str], values: Mapping[str, Any]
) -> tuple[ConfigManager, type]:
    """Return torchtitan's reader of configs with the tables of `own`, and the schema that it reads.

    Args:
        own: a dataclass whose fields are the tables that this package adds.
        arguments: torchtitan's flags.
        values: the TOML's tables. Flags and tables may both name `job.custom_config_module`.

    Raises:
        ImportError, AttributeError: that module cannot be imported, or lacks a JobConfig.
    """
    manager = ConfigManager(ConfigManager._merge_configs(JobConfig, own))
    schema = manager._maybe_add_custom_config(list(arguments), dict(values))
    _name_small_module(schema, schema.__module__)
    # `parse_args` would merge the tables once more.
    manager._maybe_add_custom_config = lambda *_: schema
    return manager, schema


def _name_small_module(schema: type, module: str) -> None:
    """Let tyro look for the help of a merged table in a small module, which has none.

    ConfigManager makes these classes with `make_dataclass`, so they belong to the module `types`.
    tyro parses the module of each class to find the comments of its fields, which took 0.05 s of
    each command's start. Test: test_contract.py,
    `test_torchtitan_merges_into_a_class_of_another_module`.
    """
    schema.__module__ = __package__
    for table in fields(schema):
        if is_dataclass(table.type) and table.type.__module__ == module:
            _name_small_module(cast(type, table.type), module)


# Functions that differ between the releases


def read_batches(
    trainer: Trainer, loader: Iterable[Any]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield a loader's batches as torchtitan does, without counting their tokens.

    Tokens count when the batches are trained.
    """
    for inputs, labels in trainer.batch_generator(loader):
        trainer.ntokens_seen -= labels.numel()
        trainer.metrics_processor.ntokens_since_last_log -= labels.numel()
        yield inputs, labels


def batches_per_call(trainer: Trainer) -> int:
    """Return how many of a loader's batches one `forward_backward` takes."""
    return 1


def forward_backward(
    trainer: Trainer, batches: Sequence[tuple[dict[str, Any], torch.Tensor]], tokens: int
) -> torch.Tensor:
    """Add the gradients of the batches; return their summed loss divided by `tokens`.

    Args:
        batches: `batches_per_call` batches, on the device.
    """
    ((inputs, labels),) = batches
    return trainer.forward_backward_step(
        input_dict=inputs, labels=labels, global_valid_tokens=tokens
    )


def build_dummy_batches(
    trainer: Trainer, tokens: torch.Tensor
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return batches for one `forward_backward` with these tokens, [sequence, token]."""
    return [({"input": tokens}, tokens)]


def compiles_attention(trainer: Trainer) -> bool:
    """True if the model's attention is compiled for each shape."""
    return getattr(trainer.model_args, "attn_type", "sdpa") == "flex"


def use_validation_loader(validator: Any, wrap: Callable[[Any], Any]) -> None:
    """Let a validator read from `wrap(loader)`.

    A user's validator with data of its own stays unchanged.
    """
    loader = getattr(validator, "validation_dataloader", None)
    if loader is not None:
        validator.validation_dataloader = wrap(loader)


def validation_batch_size(job_config: JobConfig) -> int:
    """Return the sequences in a batch of a validation's loader."""
    return int(job_config.validation.local_batch_size)


def build_model(job_config: JobConfig) -> tuple[torch.nn.Module, Any]:
    """Return the whole model of `job_config`, on the meta device, and its arguments."""
    spec = get_train_spec(job_config.model.name)
    # A copy, because a run writes its sequence length into the arguments.
    arguments = copy.deepcopy(spec.model_args[job_config.model.flavor])
    arguments.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(arguments), arguments


def build_parts_on_meta(
    job_config: JobConfig, num_ranks: int
) -> tuple[ParallelDims, int, list[torch.nn.Module], Any]:
    """Build the parts of the model that this rank of `num_ranks` would train, on the meta device.

    Returns:
        The group's dimensions, the number of the whole model's parameters, the parts, their
        optimizers.
    """
    job_config = copy.deepcopy(job_config)
    job_config.activation_checkpoint.mode = "none"
    job_config.compile.enable = job_config.parallelism.enable_async_tensor_parallel = False
    # The other implementations need real memory. All of them have the same state.
    job_config.optimizer.implementation = "for-loop"
    job_config.model.converters = []
    parallel, spec = job_config.parallelism, get_train_spec(job_config.model.name)
    dims = ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree,
        dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree,
        etp=parallel.expert_tensor_parallel_degree,
        world_size=num_ranks,
    )
    dims.build_mesh()
    model, arguments = build_model(job_config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if dims.pp_enabled:
        assert spec.pipelining_fn is not None, "`check_divisions` comes first"
        _, parts, _, _ = spec.pipelining_fn(
            model,
            dims,
            job_config,
            torch.device("meta"),
            arguments,
            spec.parallelize_fn,
            torch.nn.CrossEntropyLoss(),
        )
    else:
        parts = [spec.parallelize_fn(model, dims, job_config)]
    return dims, num_parameters, parts, spec.build_optimizers_fn(parts, job_config.optimizer, dims)


def register_flavors(model: str) -> None:
    """Add the flavors of a torchtitan model that this release lacks. An existing flavor stays."""
    if model != "llama3":
        return
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json. That model uses its
    # embedding as its output layer as well. torchtitan's class has a separate output layer.
    flavor = TransformerModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,  # The hidden dimension is then 8192.
        multiple_of=1024,
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
    )
    llama3_args.setdefault("1B", flavor)
    # Half of torchtitan's debug model: thirty groups of it train on two cores in steps of a second.
    half = replace(llama3_args["debugmodel"], dim=128, n_layers=3, n_heads=8)
    llama3_args.setdefault("debugmodel_half", half)


# Seams: what this package replaces inside torchtitan


def register_spec(name: str, spec: TrainSpec) -> None:
    """Let `get_train_spec(name)` return `spec`, even if torchtitan or the user has registered that
    name.

    protocols/train_spec.py: `register_train_spec` refuses a name twice. Its table is read before
    the built-in models. Test: test_contract.py, `test_torchtitan_train_specs`.
    """
    _specs._extra_train_specs[name] = spec


def _use_checkpoints(manager: type[CheckpointManager]) -> None:
    """Let torchtitan's Trainer build `manager`.

    train.py: `Trainer.__init__` names the class as a module global, without a hook to replace it.
    Test: test_contract.py, `test_torchtitan_checkpoints`.
    """
    _train.CheckpointManager = manager


def _use_model_converters(build: Callable[..., ModelConvertersContainer]) -> None:
    """Let torchtitan's Trainer build its model converters by `build`.

    train.py: the container is a local variable of `Trainer.__init__`, and a heal must refresh it.
    Test: test_trainer.py, the tests of converters.
    """
    _train.build_model_converters = build


def _silence_pipeline_loss_warning() -> None:
    """Drop torchtitan's warning that most ranks of a pipeline do not know the loss.

    Here all ranks know it. train.py: `ensure_pp_loss_visible`.
    """
    _train.ensure_pp_loss_visible = lambda *_: None


def use_curve_loggers(
    tensorboard: Callable[..., BaseLogger], wandb: Callable[..., BaseLogger]
) -> None:
    """Let torchtitan's metrics processors, also a user's own, log by these loggers.

    components/metrics.py: `_build_metric_logger` names both classes as module globals, and gives
    them a folder named by the minute. Test: training/test_curves.py.
    """
    _metrics.TensorBoardLogger = tensorboard
    _metrics.WandBLogger = wandb


def wrap_profilers(
    wrap: Callable[[Callable[..., Any]], Callable[..., AbstractContextManager[Any]]],
) -> None:
    """Let torchtitan's training loop profile by `wrap(f)` in place of `f`.

    `f` is the function for traces, then the function for memory snapshots. train.py imports both by
    name. An OSError inside them ended the group. Test: training/test_curves.py.
    """
    _train.maybe_enable_profiling = wrap(_profiling.maybe_enable_profiling)
    _train.maybe_enable_memory_snapshot = wrap(_profiling.maybe_enable_memory_snapshot)


def unwrap_elastic_record() -> None:
    """Remove the decorator `record` of torch elastic from torchtitan's `Trainer.train`.

    train.py: `record` takes a SystemExit(0), which a user's loader may raise, for a return from
    training. The group would then seem to have finished. A user's own wrapper around `train` stays.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    method: Any = Trainer.train
    is_decorated = method.__globals__ is record.__globals__
    if is_decorated:
        Trainer.train = method.__wrapped__


def purge(folders: Queue[Any]) -> None:
    """Remove folders of checkpoints until the queue gives a `Terminate`. A thread runs this.

    components/checkpoint.py: `purge_thread`, which torchtitan starts with `keep_latest_k` only.
    """
    _checkpoint.purge_thread(folders)


def run(trainer: type[Trainer], job_config: JobConfig) -> None:
    """Train by torchtitan's own main function, with a config that has been read.

    train.py: `main` builds a `ConfigManager` of its own. Test: test_contract.py,
    `test_torchtitan_main_builds_its_config_manager_from_a_module_global`.
    """

    class ParsedConfig:
        """Hands out the config that was read."""

        def parse_args(self) -> JobConfig:
            return job_config

    _train.ConfigManager = ParsedConfig
    _train.main(trainer)
