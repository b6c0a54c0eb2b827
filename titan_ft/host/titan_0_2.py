# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan 0.2.2, as the rest of the package sees it. No other module imports torchtitan.

`titan_ft.host.cpu.prepare` comes first: torchtitan reads the device when it is imported. The import takes two
seconds, so modules that also run without torchtitan import this one inside their functions.

The first part re-exports classes and functions as they are. The second part holds the seams: each
function there replaces something inside torchtitan, and its docstring gives the file, the reason, and
the test that fails once torchtitan no longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torchtitan
import torchtitan.components.metrics as _metrics
import torchtitan.train as _train
from torchtitan.components import checkpoint as _checkpoint
from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, WandBLogger
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset, build_text_dataloader
from torchtitan.models import _supported_models
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.moe import kernels as expert_kernels
from torchtitan.protocols import train_spec as _specs
from torchtitan.protocols.model_converter import ModelConvertersContainer, build_model_converters
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import profiling as _profiling
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype
from torchtitan.train import Trainer

if TYPE_CHECKING:
    from queue import Queue

__all__ = [
    "DATALOADER",
    "DATASETS",
    "IGNORE_INDEX",
    "TORCH_DTYPE_MAP",
    "TRAIN_STATE",
    "AsyncMode",
    "BaseLogger",
    "CheckpointManager",
    "ConfigManager",
    "DataloaderExhaustedError",
    "DatasetConfig",
    "HuggingFaceTextDataset",
    "JobConfig",
    "MetricsProcessor",
    "ModelConvertersContainer",
    "ParallelAwareDataloader",
    "ParallelDims",
    "RoPEScalingArgs",
    "ScaledDotProductAttentionWrapper",
    "StateDictAdapter",
    "TrainSpec",
    "Trainer",
    "TransformerModelArgs",
    "Validator",
    "WandBLogger",
    "build_hf_tokenizer",
    "build_model_converters",
    "build_text_dataloader",
    "clip_grad_norm_",
    "expert_kernels",
    "get_train_spec",
    "llama3_args",
    "logger",
    "set_default_dtype",
    "set_pg_timeouts",
]

ADAM_BUILDERS = (build_optimizers, build_optimizers_with_moe_load_balancing)
"""Builders of optimizers that know the names Adam and AdamW, and no other."""


def model_names() -> set[str]:
    """Return every name that `get_train_spec` knows, those of the user's own models included."""
    return {*_specs._extra_train_specs, *_supported_models, *_supported_experiments}


def packages_of_model(name: str) -> list[str]:
    """Return the packages of torchtitan that may belong to a model; none for a model of the user's.

    The experiment simple_fsdp, for example, belongs to the model simple_fsdp.llama3.
    """
    if name in _specs._extra_train_specs:
        return []
    if name in _supported_models:
        return [f"torchtitan.models.{name}"]
    if name in _supported_experiments:
        return [f"torchtitan.experiments.{part}" for part in dict.fromkeys((name.partition(".")[0], name))]
    return []


def file_in_package(package: str, file: str) -> Path | None:
    """Return a file of one of torchtitan's packages, without an import of the package; None if there is none."""
    for folder in torchtitan.__path__:
        path = Path(folder, *package.split(".")[1:], file)
        if path.is_file():
            return path
    return None


def build_schema(own: type, arguments: Sequence[str], values: Mapping[str, Any]) -> tuple[ConfigManager, type]:
    """Return torchtitan's reader of configs with the tables of `own`, and the schema that it reads.

    Args:
        own: a dataclass whose fields are the tables that this package adds.
        arguments: torchtitan's flags.
        values: the TOML's tables. Either may name `job.custom_config_module`.

    Raises:
        ImportError, AttributeError: of that module.
    """
    manager = ConfigManager(ConfigManager._merge_configs(JobConfig, own))
    schema = manager._maybe_add_custom_config(list(arguments), dict(values))
    _name_small_module(schema, schema.__module__)
    manager._maybe_add_custom_config = lambda *_: schema  # else `parse_args` merges them once more
    return manager, schema


def _name_small_module(schema: type, module: str) -> None:
    """Let tyro look for the help of a merged table in a small module, which has none.

    ConfigManager makes these classes with `make_dataclass`, so that they belong to the module `types`. tyro parses
    the module of each class to find the comments of its fields: 0.05 s of each command's start. Test:
    test_contract.py, `test_torchtitan_merges_into_a_class_of_another_module`.
    """
    schema.__module__ = __package__
    for table in fields(schema):
        if is_dataclass(table.type) and table.type.__module__ == module:
            _name_small_module(cast(type, table.type), module)


# Seams: what this package replaces inside torchtitan


def register_spec(name: str, spec: TrainSpec) -> None:
    """Let `get_train_spec(name)` return `spec`, also where torchtitan or the user has registered that name.

    protocols/train_spec.py: `register_train_spec` refuses a name twice. Its table is read before the built-in
    models. Test: test_contract.py, `test_torchtitan_train_specs`.
    """
    _specs._extra_train_specs[name] = spec


def use_checkpoints(manager: type[CheckpointManager]) -> None:
    """Let torchtitan's Trainer build `manager`.

    train.py: `Trainer.__init__` names the class as a module global, and has no hook for another one. Test:
    test_contract.py, `test_torchtitan_checkpoints`.
    """
    _train.CheckpointManager = manager


def use_model_converters(build: Callable[..., ModelConvertersContainer]) -> None:
    """Let torchtitan's Trainer build its model converters by `build`.

    train.py: the container is a local variable of `Trainer.__init__`, and a heal must refresh it. Test:
    test_trainer.py, the tests of converters.
    """
    _train.build_model_converters = build


def silence_pipeline_loss_warning() -> None:
    """Drop torchtitan's warning that most ranks of a pipeline do not know the loss: here all of them do.

    train.py: `ensure_pp_loss_visible`.
    """
    _train.ensure_pp_loss_visible = lambda *_: None


def use_curve_loggers(tensorboard: Callable[..., BaseLogger], wandb: Callable[..., BaseLogger]) -> None:
    """Let torchtitan's metrics processors, also a user's own, log by these.

    components/metrics.py: `_build_metric_logger` names both classes as module globals, and gives them a folder
    that is named by the minute. Test: training/test_curves.py.
    """
    _metrics.TensorBoardLogger = tensorboard
    _metrics.WandBLogger = wandb


def wrap_profilers(wrap: Callable[[Callable[..., Any]], Callable[..., AbstractContextManager[Any]]]) -> None:
    """Let torchtitan's training loop profile by `wrap(f)` in place of `f`, for traces and for memory snapshots.

    train.py: imports both functions by name. An OSError inside them ended the group. Test: training/test_curves.py.
    """
    _train.maybe_enable_profiling = wrap(_profiling.maybe_enable_profiling)
    _train.maybe_enable_memory_snapshot = wrap(_profiling.maybe_enable_memory_snapshot)


def take_off_record() -> None:
    """Call torchtitan's `Trainer.train` without torch elastic's `record`.

    train.py: `record` takes a SystemExit(0) of a user's loader for a return from training. A wrapper that the user
    has put around it stays.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    method: Any = Trainer.train
    if method.__globals__ is record.__globals__:
        Trainer.train = method.__wrapped__


def purge(folders: Queue[Any]) -> None:
    """Remove folders of checkpoints until the queue gives a `Terminate`; for a thread of its own.

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
