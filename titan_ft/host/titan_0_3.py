# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Everything that the package uses of torchtitan 0.3.0, in the terms of torchtitan 0.2.

The package is written for 0.2: a job is a `JobConfig` with the tables of a TOML, and a model is a
`TrainSpec`, a set of functions that build the model, its loader, its optimizer and so on. 0.3 has
neither. There a job is a tree of configs, and each config has a method `build` that returns its
component. This module translates:

1. `tables_0_3.build_schema` makes the class `JobConfig`, and `tables_0_3.translate` turns a
   `JobConfig` into 0.3's tree of configs.
2. `get_train_spec` wraps a model of 0.3 in a `TrainSpec`.
3. `HostTrainer` is 0.3's Trainer, created from a `JobConfig`. `_to_trainer_config` replaces configs
   in the tree, so that their `build` calls the functions of the `TrainSpec`.

`titan_ft.host.titan` imports this module or `titan_0_2`, by the installed release. Both define the
names in `__all__`. All of it runs on the main thread of a worker, except `purge`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torchtitan
import torchtitan.components.metrics as _metrics
import torchtitan.train as _train
import torchtitan.trainer as _trainer
from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import BaseLogger, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts, set_spmd_backend
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HuggingFaceTextDataLoader,
    HuggingFaceTextDataset,
)
from torchtitan.models import _supported_models
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.profiler import Profiler
from torchtitan.tools.utils import set_default_dtype
from torchtitan.trainer import Trainer

from titan_ft import device
from titan_ft.config import ConfigError
from titan_ft.host.tables_0_3 import build_schema, loader_config, optimizer_config, translate

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

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
"""Names of the parallel degrees: attributes of `ParallelDims`."""
LOADERS = (ParallelAwareDataloader, HuggingFaceTextDataLoader)
"""torchtitan's data loaders. Each of them only adds a format of its state to torchdata's loader."""
FORWARD_RUNS_LOSS_BACKWARD = True
"""True: the forward already runs the backward of the loss and of the output layer, in chunks."""
PIPELINES_SUM_LOSSES = False
"""False: a pipeline divides the loss of each microbatch before the backward, so the gradients are
those of the mean loss."""
TOKEN_COUNTS = "tokens_per_expert_E"
"""Name of the buffer in which a mixture of experts counts tokens."""
TRAINER_FILE = "trainer.py"
"""File of a model's package that may define a trainer of its own."""
JobConfig = Any
"""A job's config; `build_schema` makes its class."""


# The description of a model


@dataclass(frozen=True)
class ModelArguments:
    """The sizes of a model, with the names of 0.2's model arguments.

    A model has several *flavors*, for example "debugmodel" and "8B", each with its own arguments.

    Attributes:
        spec: 0.3's ModelSpec of this flavor.
        moe_args: 0.3's config of a layer's experts; None for a dense model.
        max_seq_len: maximum number of positions; a run builds as many as its own sequence length.
    """

    spec: Any
    n_layers: int | None
    n_heads: int | None
    n_kv_heads: int | None
    moe_args: Any
    max_seq_len: int | None


@dataclass(frozen=True)
class TrainSpec:
    """A model in the terms of 0.2's TrainSpec. Each function takes the arguments that 0.2's
    function takes.
    """

    model_args: Mapping[str, ModelArguments]
    parallelize_fn: Callable[..., torch.nn.Module]
    pipelining_fn: Callable[..., Any] | None
    build_optimizers_fn: Callable[..., Any]
    build_dataloader_fn: Callable[..., Any]
    build_tokenizer_fn: Callable[[Any], Any]
    build_metrics_processor_fn: Callable[..., Any] | None
    build_validator_fn: Callable[..., Any] | None
    state_dict_adapter: Any


class _FlavorsOfModule(Mapping[str, ModelArguments]):
    """The flavors of a model of torchtitan. Each lookup builds a new ModelSpec.

    Args:
        module: the package of the model. Its function `model_registry` returns the ModelSpec of a
            flavor, and its table `..._configs` has the names of all flavors.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._names: list[str] = []
        for name, table in vars(module).items():
            if name.endswith("_configs") and isinstance(table, dict):
                self._names = list(table)
                break

    def __getitem__(self, flavor: str) -> ModelArguments:
        spec = self._module.model_registry(flavor)
        # Models differ in their configs, so any of these attributes may be missing.
        layers = getattr(spec.model, "layers", None)
        attention = getattr(spec.model, "first_attention", None)
        heads = getattr(attention, "n_heads", None)
        # Without grouped queries, there are as many heads of keys as of queries.
        kv_heads = getattr(attention, "n_kv_heads", None) or heads
        rope = getattr(attention, "rope", None)
        # `traverse` yields a path, the config, its parent and the field there.
        expert_configs = [config for _, config, _, _ in spec.model.traverse(MoE.Config)]
        return ModelArguments(
            spec=spec,
            n_layers=None if layers is None else len(layers),
            n_heads=heads,
            n_kv_heads=kv_heads,
            moe_args=expert_configs[0] if expert_configs else None,
            max_seq_len=getattr(rope, "max_seq_len", None),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_specs: dict[str, TrainSpec] = {}


def register_spec(name: str, spec: TrainSpec) -> None:
    """Let `get_train_spec(name)` return `spec`."""
    _specs[name] = spec


def get_train_spec(name: str) -> TrainSpec:
    """Return the description of a model.

    Raises:
        ImportError: a module of the model is not installed.
    """
    if name in _specs:
        return _specs[name]
    flavors = _FlavorsOfModule(importlib.import_module(f"torchtitan.models.{name}"))
    # All flavors of a model have the same pipelining function and the same adapter.
    first_name = next(iter(flavors))
    first = flavors[first_name].spec
    return TrainSpec(
        model_args=flavors,
        parallelize_fn=_parallelize,
        pipelining_fn=first.pipelining_fn,
        build_optimizers_fn=_build_optimizers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_metrics_processor_fn=None,
        build_validator_fn=_build_validator,
        state_dict_adapter=first.state_dict_adapter,
    )


def model_names() -> set[str]:
    """Return every name that `get_train_spec` knows."""
    return {*_specs, *_supported_models}


def read_module(module: str, function: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the tables of a TOML for the job of `--module M --config F`.

    See `configs_0_3.read_module`.
    """
    from titan_ft.host import configs_0_3

    return configs_0_3.read_module(module, function, flags, _find_spec)


def _find_spec(name: str, flavor: str) -> Any:
    """Return the ModelSpec of a model's flavor."""
    if name not in model_names():
        raise ConfigError(
            f"--module must name one of torchtitan's models ({', '.join(sorted(model_names()))}), "
            f"got the model {name!r}; take one of them"
        )
    return get_train_spec(name).model_args[flavor].spec


def packages_of_model(name: str) -> list[str]:
    """Return the packages of torchtitan that may belong to a model."""
    return [f"torchtitan.models.{name}"] if name in _supported_models else []


def file_in_package(package: str, file: str) -> Path | None:
    """Return the path of a file of one of torchtitan's packages; None if there is no such file.

    Does not import the package.
    """
    for folder in torchtitan.__path__:
        path = Path(folder, *package.split(".")[1:], file)
        if path.is_file():
            return path
    return None


def register_flavors(model: str) -> None:
    """Do nothing. On 0.2 this adds the flavor 1B to llama3, which 0.3 has."""


def _new_model_spec(job_config: Any) -> Any:
    """Return a new ModelSpec of the job's model and flavor, which the caller may change."""
    return get_train_spec(job_config.model.name).model_args[job_config.model.flavor].spec


def _parallelize(
    model: torch.nn.Module, parallel_dims: ParallelDims, job_config: Any
) -> torch.nn.Module:
    config = translate(job_config)
    parallelized: torch.nn.Module = _new_model_spec(job_config).parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    return parallelized


def build_text_dataloader(
    *, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, **_: Any
) -> Any:
    """Build the loader of one data-parallel rank. With a pipeline, it yields microbatches."""
    training = job_config.training
    parallel = job_config.parallelism
    sequences_per_batch = training.local_batch_size
    if parallel.pipeline_parallel_degree > 1:
        sequences_per_batch = parallel.pipeline_parallel_microbatch_size
    return loader_config(training).build(
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        local_batch_size=sequences_per_batch,
        # The ledger takes a state after each batch. torchtitan takes one at each checkpoint only,
        # and torchdata would return an older state in between.
        snapshot_every_n_steps=1,
    )


def build_hf_tokenizer(job_config: Any) -> Any:
    """Build the tokenizer of `model.hf_assets_path`."""
    return HuggingFaceTokenizer.Config().build(tokenizer_path=job_config.model.hf_assets_path)


def _build_optimizers(
    model_parts: list[torch.nn.Module], config: Any, parallel_dims: ParallelDims
) -> Any:
    return optimizer_config(config).build(model_parts=model_parts)


ADAM_BUILDERS = (_build_optimizers,)
"""Builders of optimizers that know the names Adam and AdamW, and no other."""


def _build_validator(*, job_config: Any, **parts: Any) -> Any:
    """Build the validator, with batches of the sizes in the TOML.

    0.3 itself would give it batches of the training's sizes.
    """
    sizes = {
        "seq_len": job_config.validation.seq_len,
        "local_batch_size": job_config.validation.local_batch_size,
    }
    return translate(job_config).validator.build(**{**parts, **sizes})


class MetricsProcessor(_metrics.MetricsProcessor):
    """0.3's MetricsProcessor, created with the arguments of 0.2's MetricsProcessor."""

    def __init__(
        self, job_config: Any, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        super().__init__(
            translate(job_config).metrics,
            parallel_dims=parallel_dims,
            dump_folder=job_config.job.dump_folder,
            pp_schedule=job_config.parallelism.pipeline_parallel_schedule,
            config_dict=job_config.to_dict(),
            tag=tag,
        )


def build_model(job_config: Any) -> tuple[torch.nn.Module, ModelArguments]:
    """Return the whole model of `job_config`, on the meta device, and its arguments."""
    arguments = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    arguments.spec.model.update_from_config(config=translate(job_config, arguments.spec))
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return arguments.spec.model.build(), arguments


def build_parts_on_meta(
    job_config: Any, num_ranks: int
) -> tuple[ParallelDims, int, list[torch.nn.Module], Any]:
    """Build the parts of the model that this rank would train, without memory for their values.

    Only their sizes are wanted (`training/sizes.py`). Call this in a fake process group of
    `num_ranks` ranks.

    Returns:
        The group's parallel degrees, the number of the whole model's parameters, the parts of this
        rank, and their optimizers.
    """
    job_config = copy.deepcopy(job_config)
    # These settings change no size of the state, and some of them need a real device.
    job_config.activation_checkpoint.mode = "none"
    job_config.compile.enable = False
    job_config.compile.enable_async_tensor_parallel = False
    job_config.parallelism.enable_async_tensor_parallel = False
    job_config.optimizer.implementation = "for-loop"
    spec = get_train_spec(job_config.model.name)
    config = translate(job_config)
    dims = ParallelDims.from_config(config.parallelism, num_ranks)
    set_spmd_backend(config.parallelism.spmd_backend)
    model, arguments = build_model(job_config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if dims.pp_enabled:
        assert spec.pipelining_fn is not None, "`check_divisions` comes first"
        _, parts, _, _ = spec.pipelining_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder=config.dump_folder,
            device=torch.device("meta"),
            model_config=arguments.spec.model,
            parallelize_fn=arguments.spec.parallelize_fn,
            loss_fn=torch.nn.CrossEntropyLoss(),
        )
    else:
        parts = [spec.parallelize_fn(model, dims, job_config)]
    optimizers = spec.build_optimizers_fn(parts, job_config.optimizer, dims)
    return dims, num_parameters, parts, optimizers


# The trainer


class HostTrainer(Trainer):
    """torchtitan's Trainer with the constructor that `ReplicaTrainer` needs on both releases.

    Args:
        job_config: the job in the form of 0.2.
        checkpoints: creates the checkpoint manager, with the arguments of `HostCheckpoints`.
    """

    job_config: Any

    def __init__(self, job_config: Any, checkpoints: Callable[..., CheckpointManager]) -> None:
        self.job_config = job_config
        # torchtitan would warn that most ranks of a pipeline do not know the loss. Here the trainer
        # sends the loss to all ranks.
        _trainer.ensure_pp_loss_visible = lambda **_: None
        super().__init__(_to_trainer_config(job_config, checkpoints))

    def refresh_converters(self) -> None:
        """Do nothing: 0.3 converts a model's config, and its float8 caches no weights."""


class HostCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager, with 0.2's keywords, attributes and methods."""

    def __init__(self, *, checkpoint_config: Any, **parts: Any) -> None:
        super().__init__(checkpoint_config, **parts)

    @property
    def enable_staging(self) -> bool:
        """True if saves are copied to pinned memory first."""
        return self.enable and self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM

    # 0.2 calls this method `_async_wait`, and `ReplicaCheckpoints` overrides it. 0.3's own `save`
    # calls `_wait_for_saving`, so that name must lead to the override.

    def _async_wait(self) -> None:
        super()._wait_for_saving()

    def _wait_for_saving(self) -> None:
        self._async_wait()


def _to_trainer_config(
    job_config: Any, checkpoints: Callable[..., Any] | None = None
) -> Trainer.Config:
    """Return the Trainer.Config of a job, which builds the components of the job's `TrainSpec`.

    Args:
        checkpoints: creates the checkpoint manager; None for torchtitan's own.
    """
    spec = get_train_spec(job_config.model.name)
    model_spec = _new_model_spec(job_config)

    def parallelize(
        model: torch.nn.Module, *, parallel_dims: ParallelDims, **_: Any
    ) -> torch.nn.Module:
        return spec.parallelize_fn(model, parallel_dims, job_config)

    model_spec = dataclasses.replace(model_spec, parallelize_fn=parallelize)
    config = translate(
        job_config, model_spec, vocab_size=getattr(model_spec.model, "vocab_size", None)
    )

    def build_loader(*, dp_world_size: int, dp_rank: int, tokenizer: Any, **_: Any) -> Any:
        return spec.build_dataloader_fn(
            dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config
        )

    def build_metrics(*, parallel_dims: ParallelDims, **_: Any) -> Any:
        build = spec.build_metrics_processor_fn
        assert build is not None
        return build(job_config, parallel_dims, model_spec.model)

    config.dataloader = _with_builder(config.dataloader, build_loader)
    if spec.build_metrics_processor_fn is not None:
        config.metrics = _with_builder(config.metrics, build_metrics)
    if spec.build_validator_fn is not None:
        config.validator = _with_builder(
            config.validator, functools.partial(spec.build_validator_fn, job_config=job_config)
        )
    if checkpoints is not None:
        config.checkpoint = _with_builder(
            config.checkpoint, functools.partial(checkpoints, checkpoint_config=config.checkpoint)
        )
    profiler = config.profiler
    config.profiler = _with_builder(
        profiler, lambda **settings: _run_profiler(profiler, **settings)
    )
    return config


def _with_builder(config: Any, build: Callable[..., Any]) -> Any:
    """Return a copy of one of 0.3's configs whose method `build` calls the function `build`.

    The copy has a subclass of the config's class, because torchtitan checks the class. 0.3's
    configs have slots, so an instance cannot get another method.
    """

    def build_component(self: Any, **arguments: Any) -> Any:
        return build(**arguments)

    subclass = type("Config", (type(config),), {"__slots__": (), "build": build_component})
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return subclass(**values)


def read_batches(
    trainer: Trainer, loader: Iterable[Any]
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield a loader's batches as torchtitan does, but do not count their tokens.

    The trainer counts the tokens of a batch when the batch is trained. A batch that is read may be
    trained later, or by another group.
    """
    for inputs, labels in trainer.batch_generator(loader):
        # `batch_generator` has just added the tokens.
        trainer.metrics_processor.ntokens_since_last_log -= labels.numel()
        yield inputs, labels


def batches_per_call(trainer: Trainer) -> int:
    """Return the number of batches of a loader that one `forward_backward` takes.

    More than 1 only with a pipeline: its loader yields microbatches.
    """
    return int(trainer.num_pipeline_parallel_microbatches)


def forward_backward(
    trainer: Trainer, batches: Sequence[tuple[dict[str, Any], torch.Tensor]], tokens: int
) -> torch.Tensor:
    """Add the gradients of the batches to the model's; return their summed loss / `tokens`.

    Args:
        batches: `batches_per_call` batches of inputs and labels, on the device.
    """
    # 0.3 counts the tokens of each forward. Here tokens count when their update is committed.
    ntokens_seen = trainer.ntokens_seen
    inputs: Any
    labels: Any
    if trainer.parallel_dims.pp_enabled:
        inputs = [inputs for inputs, _ in batches]
        labels = [labels for _, labels in batches]
    else:
        ((inputs, labels),) = batches
    try:
        return trainer.forward_backward_step(
            input_dict=inputs, labels=labels, global_valid_tokens=tokens
        )
    finally:
        trainer.ntokens_seen = ntokens_seen


def build_dummy_batches(
    trainer: Trainer, tokens: torch.Tensor
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return batches of these tokens for one `forward_backward`, which warms up the model.

    Args:
        tokens: of shape [sequence, position]; used as inputs and as labels.
    """
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    num_batches = batches_per_call(trainer)
    batches = []
    for batch_tokens, batch_positions in zip(
        tokens.chunk(num_batches), positions.chunk(num_batches), strict=True
    ):
        batches.append(({"input": batch_tokens, "positions": batch_positions}, batch_tokens))
    return batches


def compiles_attention(trainer: Trainer) -> bool:
    """Return True if the model's attention is compiled, again for each shape of the inputs."""
    return not device.on_cpu() and any(trainer.model_config.traverse(FlexAttention.Config))


def adapt_attention(model: torch.nn.Module, load_balancer: str | None) -> None:
    """Do nothing. 0.2's context parallelism must be adapted to the CPU, but not 0.3's."""


@dataclass
class _WrappingLoaderConfig:
    """Stands in for the config of a validator's loader, and wraps each loader that it builds.

    Each validation builds a new loader.
    """

    config: Any
    wrap: Callable[[Any], Any]

    def build(self, **arguments: Any) -> Any:
        return self.wrap(self.config.build(**arguments))


def use_validation_loader(validator: Any, wrap: Callable[[Any], Any]) -> None:
    """Let a validator read from `wrap(loader)` instead of its loader.

    A user's validator that has data of its own stays unchanged.
    """
    config = getattr(validator, "dl_config", None)
    if config is not None:
        validator.dl_config = _WrappingLoaderConfig(config, wrap)


def validation_batch_size(job_config: Any) -> int:
    """Return the number of sequences in a batch, or a pipeline's microbatch, of the validation."""
    parallel = job_config.parallelism
    if parallel.pipeline_parallel_degree > 1:
        return int(parallel.pipeline_parallel_microbatch_size)
    return int(job_config.validation.local_batch_size)


# Patches of torchtitan. Each docstring names the patched file, and the behaviour that makes the
# patch necessary.


def use_curve_loggers(
    tensorboard: Callable[..., BaseLogger], wandb: Callable[..., BaseLogger]
) -> None:
    """Let torchtitan's metrics processors, also a user's own, create these loggers.

    components/metrics.py: `_build_metric_logger` creates both loggers by the names of module
    globals. Its own loggers write into a folder that is named by the minute, so a restarted group
    would begin a new curve.
    """
    _metrics.TensorBoardLogger = tensorboard
    _metrics.WandBLogger = lambda log_dir, config_dict=None, tag=None: wandb(
        log_dir, config_dict, tag
    )


@contextmanager
def _stock_profiler(config: Any, **settings: Any) -> Iterator[Any]:
    with Profiler(config, **settings) as profiler:
        yield profiler


_run_profiler: Callable[..., AbstractContextManager[Any]] = _stock_profiler


def wrap_profilers(
    wrap: Callable[[Callable[..., Any]], Callable[..., AbstractContextManager[Any]]],
) -> None:
    """Replace the training loop's profiler, a context manager's function, by `wrap` of it."""
    global _run_profiler
    _run_profiler = wrap(_stock_profiler)


def unwrap_elastic_record() -> None:
    """Remove the decorator `record` of torch elastic from torchtitan's `Trainer.train`.

    trainer.py: `record` takes a SystemExit(0), which a user's loader may raise, for a return from
    training. The group would then seem to have finished. A user's own wrapper around `train` stays.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    method: Any = Trainer.train
    is_decorated = method.__globals__ is record.__globals__
    if is_decorated:
        Trainer.train = method.__wrapped__


def purge(folders: Queue[Any]) -> None:
    """Remove folders of checkpoints until the queue gives None. A thread runs this.

    components/checkpointer/base.py: `purge_thread`, which torchtitan starts with `keep_latest_k`
    only.
    """
    purge_thread(folders, filesystem.rmtree)


class _ConfigForMain:
    """Stands in for the Trainer.Config in `main`: the same values, but `build` is replaced."""

    def __init__(self, config: Any, build: Callable[[], Any]) -> None:
        self._config = config
        self.build = build

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def run(trainer: type[Trainer], job_config: Any) -> None:
    """Call torchtitan's own main function, with a config that this package has read already.

    train.py: `main` creates a `ConfigManager`, parses the command line with it, and lets the parsed
    config build the trainer. So the patch replaces `ConfigManager`.

    Args:
        trainer: `HostTrainer` or a subclass takes a `JobConfig`. Any other class takes 0.3's
            Trainer.Config.
    """

    class ConfigManagerWithoutParsing:
        def parse_args(self) -> _ConfigForMain:
            config = _to_trainer_config(job_config)

            def build() -> Any:
                takes_job_config = issubclass(trainer, HostTrainer)
                return trainer(job_config if takes_job_config else config)

            return _ConfigForMain(config, build)

    _train.ConfigManager = ConfigManagerWithoutParsing
    _train.main()


if device.on_cpu():
    from titan_ft.host import cpu_0_3

    cpu_0_3.attend_densely()
