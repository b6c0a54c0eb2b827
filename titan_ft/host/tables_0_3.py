# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the TOML of a job on torchtitan 0.3, which has no TOML, but configs written in Python.

1. `TABLES` has a dataclass for each table of the TOML: the tables of 0.2, with the fields and
   defaults of 0.3. `build_schema` joins them and this package's tables to the class `JobConfig`.
2. `Reader.parse_args` reads the TOML and the flags into a `JobConfig`. A field of 0.2 without a
   counterpart in 0.3 must have its default, so that one TOML serves both releases. Any other value
   is refused by its name.
3. `translate` turns a `JobConfig` into 0.3's Trainer.Config.

`titan_0_3.py` and the reader of configs (`training/job_config.py`) call this module.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Any, Literal, get_type_hints

import torch
import tyro
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.logging import logger
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from titan_ft.config import ConfigError, read_flags


def _table(
    name: str, source: Any = None, *more: tuple[str, Any, Any], without: Sequence[str] = ()
) -> Any:
    """Return a dataclass for a table, with the fields of one of torchtitan's configs.

    Args:
        source: torchtitan's config; None for a table with the fields of `more` alone.
        more: further fields, or other defaults, as (name, type, default). The default of a list or
            a table is a function that makes it.
        without: fields of `source` that a TOML does not set.
    """
    # Name, type and default of each field, as `make_dataclass` takes them, by name.
    table_fields: dict[str, tuple[str, Any, Any]] = {}
    if source is not None:
        types = get_type_hints(source)
        for source_field in fields(source):
            if source_field.name in without:
                continue
            copied: Any = field(default=source_field.default)
            if source_field.default_factory is not MISSING:
                copied = field(default_factory=source_field.default_factory)
            table_fields[source_field.name] = (source_field.name, types[source_field.name], copied)
    for field_name, kind, default in more:
        value = field(default_factory=default) if callable(default) else default
        table_fields[field_name] = (field_name, kind, value)
    table = make_dataclass(name, table_fields.values())
    # tyro parses the module of each class. For the module `types`, that would take 0.05 s.
    table.__module__ = __package__
    return table


_DataLoader = _table(
    "DataLoader", HuggingFaceTextDataLoader.Config, without=("dataset", "dataset_path", "infinite")
)
_EmptyTable = _table("Nothing")
TABLES: dict[str, Any] = {
    "job": _table(
        "Job",
        None,
        ("config_file", str | None, None),
        ("dump_folder", str, "./outputs"),
        ("description", str, "default job"),
        ("print_config", bool, False),
        ("save_config_file", str | None, None),
        ("custom_config_module", str, ""),
    ),
    "profiling": _table("Profiling", Profiler.Config, without=("trace_post_processor",)),
    "metrics": _table("Metrics", MetricsProcessor.Config),
    "model": _table(
        "Model",
        None,
        ("name", str, "llama3"),
        ("flavor", str, "debugmodel"),
        ("hf_assets_path", str, "./tests/assets/tokenizer"),
        ("tokenizer_path", str | None, None),
        ("converters", list[str], list),
        ("print_after_conversion", bool, False),
    ),
    "optimizer": _table(
        "Optimizer",
        None,
        ("name", str, "AdamW"),
        ("lr", float, 8e-4),
        ("beta1", float, 0.9),
        ("beta2", float, 0.95),
        ("eps", float, 1e-8),
        ("weight_decay", float, 0.1),
        ("implementation", get_type_hints(OptimizersContainer.Config)["implementation"], "fused"),
        ("early_step_in_backward", bool, False),
    ),
    "lr_scheduler": _table("LRScheduler", LRSchedulersContainer.Config),
    "training": _table(
        "Training",
        TrainingConfig,
        ("dataset", str, "c4_test"),
        ("dataset_path", str | None, None),
        ("dataloader", _DataLoader, _DataLoader),
        # 0.3's default is false. A replayed graph calls no hooks of gradients, so no gradient would
        # be exchanged.
        ("disable_cuda_graphs", bool, True),
    ),
    "parallelism": _table(
        "Parallelism",
        ParallelismConfig,
        ("disable_loss_parallel", bool, False),
        ("enable_async_tensor_parallel", bool, False),
        ("pipeline_parallel_expert_parallel_overlap", bool, True),
        ("context_parallel_rotate_method", str, "allgather"),
        ("expert_tensor_parallel_degree", int, 1),
        ("expert_parallel_comm_backend", str, "standard"),
    ),
    "checkpoint": _table(
        "Checkpoint", CheckpointManager.Config, ("enable_ft_dataloader_checkpoints", bool, True)
    ),
    "activation_checkpoint": _table(
        "ActivationCheckpoint",
        MemoryBudgetAC.Config,
        ("mode", Literal["selective", "full", "memory_budget", "none"], "selective"),
        ("selective_ac_option", str, "op"),
        ("per_op_sac_force_recompute_mm_shapes_by_fqns", list[str], lambda: ["moe.router.gate"]),
        ("early_stop", bool, False),
    ),
    "compile": _table("Compile", CompileConfig),
    "quantize": _EmptyTable,
    "comm": _table("Comm", CommConfig),
    "memory_estimation": _table(
        "MemoryEstimation", None, ("enable", bool, False), ("disable_fake_mode", bool, False)
    ),
    "experimental": _table(
        "Experimental", None, ("custom_import", str, ""), ("custom_args_module", str, "")
    ),
    "validation": _table(
        "Validation",
        Validator.Config,
        ("dataset", str, "c4_validation"),
        ("dataset_path", str | None, None),
        # None takes the value of [training], as in 0.3.
        ("local_batch_size", int | None, None),
        ("seq_len", int | None, None),
        ("dataloader", _DataLoader, _DataLoader),
    ),
    "debug": _table(
        "Debug",
        DebugConfig,
        # The files are named by the rank alone. All groups have a rank 0, and would write one file.
        ("enable_structured_logging", bool, False),
        # 0.2 has these fields in [job].
        without=("print_config", "save_config_file"),
    ),
}

_FIXED_VALUES = {
    "model.converters": "0.3 converts a model's config where its flavor is made",
    "model.print_after_conversion": "0.3 converts no built model",
    "model.tokenizer_path": "0.3 reads model.hf_assets_path",
    "optimizer.early_step_in_backward": "0.3 has none",
    "training.disable_cuda_graphs": (
        "a replayed graph calls no hooks, and no gradient would be exchanged"
    ),
    "parallelism.disable_loss_parallel": "0.3 decides by itself",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "0.3 decides by itself",
    "parallelism.context_parallel_rotate_method": "0.3 decides by itself",
    "parallelism.expert_tensor_parallel_degree": "0.3 has none",
    "parallelism.expert_parallel_comm_backend": "0.3 chooses it where the model's flavor is made",
    "checkpoint.enable_ft_dataloader_checkpoints": "checkpoints hold the place of all loaders",
    "activation_checkpoint.selective_ac_option": "0.3 selects by operation",
    "activation_checkpoint.early_stop": "0.3 has none",
    "memory_estimation.enable": "0.3 has none",
    "memory_estimation.disable_fake_mode": "0.3 has none",
    "experimental.custom_args_module": "0.3 has none",
    "debug.enable_structured_logging": "all groups would write to the same files",
}
"""Fields that must have their default on 0.3, with the reason."""
_ATTENTION_BLOCK_TOKENS = 128
"""Tokens of a block of the attention mask, which context parallelism deals out to ranks."""
_KNOWN_MODULES = ("", "titan_ft.config", "torchtitan.components.ft.config")
"""Values of `job.custom_config_module` that only add the table [fault_tolerance]."""


class _JobConfig:
    """Base class of the schema: the methods of 0.2's `JobConfig`."""

    def to_dict(self) -> dict[str, Any]:
        """Return all tables, as plain values."""
        # The schema, a dataclass, derives from this class.
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def maybe_log(self) -> None:
        """Log and save the config, as the table [job] asks for."""
        job: Any = vars(self)["job"]
        if job.print_config:
            logger.info(
                f"Running with configs: {json.dumps(self.to_dict(), indent=2, ensure_ascii=False)}"
            )
        if job.save_config_file is not None and torch.distributed.get_rank() == 0:
            path = os.path.join(job.dump_folder, job.save_config_file)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump(self.to_dict(), file, indent=2)


class Reader:
    """Reads a TOML and flags into the schema, as 0.2's ConfigManager does.

    Args:
        schema: the class `JobConfig`.
        values: the TOML's tables, which are checked already.
    """

    def __init__(self, schema: Any, values: Mapping[str, Any]) -> None:
        self._schema = schema
        self._values = values
        ConfigManager()  # Its constructor teaches tyro to read a list of names.

    def parse_args(self, args: list[str]) -> Any:
        """Return the config of the TOML's values; a flag overrides the TOML.

        Raises:
            ValueError: 0.3 refuses a value, or has no counterpart for it.
        """
        default = _fill_dataclass(self._schema, self._values)
        job_config = tyro.cli(self._schema, args=args, default=default, registry=custom_registry)
        training, validation = job_config.training, job_config.validation
        for name in ("local_batch_size", "seq_len"):
            if getattr(validation, name) is None:
                setattr(validation, name, getattr(training, name))
        _refuse_without_counterpart(job_config)
        translate(job_config)  # Raises if 0.3 refuses a value.
        return job_config


def build_schema(
    own: type, arguments: Sequence[str], values: Mapping[str, Any]
) -> tuple[Reader, type]:
    """Return the reader of configs with the tables of `own`, and the schema that it reads.

    Args:
        own: a dataclass whose fields are the tables that this package adds.
        arguments: torchtitan's flags.
        values: the TOML's tables.

    Raises:
        ConfigError: flags or tables name a module or a table without a counterpart in 0.3.
    """
    module = _find_value(values, arguments, "job", "custom_config_module")
    if module not in _KNOWN_MODULES:
        raise ConfigError(
            'job.custom_config_module must be "titan_ft.config" with torchtitan 0.3, '
            f"got {module!r}: 0.3 merges no tables; remove it"
        )
    if values.get("quantize"):
        raise ConfigError(
            "quantize must be left out with torchtitan 0.3, which converts a model's config where "
            f"its flavor is made, got {values['quantize']!r}; remove the table"
        )
    tables = [(name, table, field(default_factory=table)) for name, table in TABLES.items()]
    for each in fields(own):
        assert isinstance(each.type, type)
        tables.append((each.name, each.type, field(default_factory=each.type)))
    schema = make_dataclass("JobConfig", tables, bases=(_JobConfig,))
    schema.__module__ = __package__
    return Reader(schema, values), schema


def fill_tables(values: Mapping[str, Any]) -> Any:
    """Return a job with these torchtitan tables, which are checked already.

    The job has no tables of this package.
    """
    tables = [(name, table, field(default_factory=table)) for name, table in TABLES.items()]
    return _fill_dataclass(make_dataclass("Tables", tables, bases=(_JobConfig,)), values)


def _find_value(values: Mapping[str, Any], arguments: Sequence[str], table: str, name: str) -> Any:
    """Return a value from the flags, or else from the TOML, or else an empty text."""
    given = values.get(table)
    found = given.get(name, "") if isinstance(given, Mapping) else ""
    for flag, value in read_flags(arguments):
        if flag == f"{table}.{name}":
            found = value
    return found


def _fill_dataclass(schema: Any, values: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass with the values of a TOML, which are checked already."""
    kinds = {each.name: each.type for each in fields(schema)}
    made = {}
    for name, value in values.items():
        kind = kinds[name]
        if is_dataclass(kind):
            made[name] = _fill_dataclass(kind, value)
        elif kind is int and isinstance(value, float):  # A TOML may have 1e4 for 10000.
            made[name] = int(value)
        else:
            made[name] = value
    return schema(**made)


def _refuse_without_counterpart(job_config: Any) -> None:
    """Refuse by its name each value without a counterpart in torchtitan 0.3.

    Raises:
        ConfigError: the job has such a value.
    """
    for full, reason in _FIXED_VALUES.items():
        table, _, name = full.partition(".")
        value = getattr(getattr(job_config, table), name)
        only = getattr(TABLES[table](), name)
        if value != only:
            raise ConfigError(
                f"{full} must be {only!r} with torchtitan 0.3 ({reason}), got {value!r}; remove it"
            )
    _refuse_sequences(job_config)
    _refuse_validation(job_config)


def _refuse_sequences(job_config: Any) -> None:
    """Refuse sequences that context parallelism cannot split.

    torch reports this only in the first step.
    """
    cp = job_config.parallelism.context_parallel_degree
    tables = ("training", "validation") if job_config.validation.enable else ("training",)
    for table in tables:
        length = getattr(job_config, table).seq_len
        if cp > 1 and length % (_ATTENTION_BLOCK_TOKENS * cp):
            raise ConfigError(
                f"{table}.seq_len must be a multiple of {_ATTENTION_BLOCK_TOKENS} x "
                f"parallelism.context_parallel_degree ({cp}) with torchtitan 0.3, which deals out "
                f"blocks of attention, got {length}; change one of them"
            )


def _refuse_validation(job_config: Any) -> None:
    """Refuse a validation that a pipeline of 0.3 cannot run."""
    parallel = job_config.parallelism
    if not job_config.validation.enable or parallel.pipeline_parallel_degree == 1:
        return
    if parallel.pipeline_parallel_schedule == "ZBVZeroBubble":
        raise ConfigError(
            "validation.enable must be false with the schedule ZBVZeroBubble on torchtitan 0.3, "
            "got true: torch has no forward without a backward for it; set it to false, or take "
            "another schedule"
        )
    for name in ("local_batch_size", "seq_len"):
        value = getattr(job_config.validation, name)
        trained = getattr(job_config.training, name)
        if value != trained:
            raise ConfigError(
                f"validation.{name} must be training.{name} ({trained}) with a pipeline of "
                f"torchtitan 0.3, whose stages take batches of one size, got {value}; remove it"
            )


def translate(
    job_config: Any, model_spec: Any = None, vocab_size: int | None = None
) -> Trainer.Config:
    """Return 0.3's config of a job.

    Args:
        model_spec: the model. Without it, the values are checked, but nothing can be built.
        vocab_size: the model's number of tokens.

    Raises:
        ValueError: 0.3 refuses a value.
    """
    job, model, training = job_config.job, job_config.model, job_config.training
    return _TrainerConfig(
        job_config=job_config,
        model_spec=model_spec,
        hf_assets_path=model.hf_assets_path,
        dump_folder=job.dump_folder,
        profiler=_convert(Profiler.Config, job_config.profiling),
        metrics=_convert(MetricsProcessor.Config, job_config.metrics),
        dataloader=loader_config(training),
        optimizer=optimizer_config(job_config.optimizer),
        lr_scheduler=_convert(LRSchedulersContainer.Config, job_config.lr_scheduler),
        training=_convert(TrainingConfig, training),
        parallelism=_convert(ParallelismConfig, job_config.parallelism),
        checkpoint=_convert_checkpoint(job_config.checkpoint),
        activation_checkpoint=_convert_activation_checkpoint(job_config.activation_checkpoint),
        compile=_convert_compile(job_config),
        comm=_convert(CommConfig, job_config.comm),
        validator=_convert(
            Validator.Config, job_config.validation, dataloader=loader_config(job_config.validation)
        ),
        debug=_convert(DebugConfig, job_config.debug),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab_size)
        ),
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class _TrainerConfig(Trainer.Config):
    """0.3's config of a job. It prints and saves the job in the form of the TOML."""

    job_config: Any = None

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = self.job_config.to_dict()
        return values

    def maybe_log(self) -> None:
        self.job_config.maybe_log()


def _convert(kind: Any, table: Any, **others: Any) -> Any:
    """Return one of 0.3's configs with the values of a table.

    Args:
        kind: class of the config. Fields with names that the table lacks keep their defaults.
        others: values of further fields, which also override the table.
    """
    config_names = {each.name for each in fields(kind)}
    table_names = {each.name for each in fields(table)}
    values = {name: getattr(table, name) for name in config_names & table_names}
    return kind(**{**values, **others})


def loader_config(table: Any) -> HuggingFaceTextDataLoader.Config:
    """Return the config of the loader that a table with a dataset describes."""
    return _convert(
        HuggingFaceTextDataLoader.Config,
        table.dataloader,
        dataset=table.dataset,
        dataset_path=table.dataset_path,
    )


def optimizer_config(table: Any) -> OptimizersContainer.Config:
    """Return the config of the optimizers that the table [optimizer] describes."""
    settings = {
        "lr": table.lr,
        "betas": (table.beta1, table.beta2),
        "eps": table.eps,
        "weight_decay": table.weight_decay,
    }
    group = ParamGroupConfig(pattern=r".*", optimizer_name=table.name, optimizer_kwargs=settings)
    return OptimizersContainer.Config(param_groups=[group], implementation=table.implementation)


def _convert_checkpoint(table: Any) -> CheckpointManager.Config:
    # Without an initial load, `initial_load_model_only` has no effect. 0.3 would warn of it at each
    # start, although true is its default.
    has_initial_load = bool(table.initial_load_path or table.initial_load_in_hf)
    return _convert(
        CheckpointManager.Config,
        table,
        initial_load_model_only=table.initial_load_model_only and has_initial_load,
    )


def _convert_activation_checkpoint(table: Any) -> Any:
    if table.mode == "selective":
        shapes = table.per_op_sac_force_recompute_mm_shapes_by_fqns
        return _convert(SelectiveAC.Config, table, force_recompute_mm_shapes_by_fqns=shapes)
    if table.mode == "full":
        return _convert(FullAC.Config, table)
    if table.mode == "memory_budget":
        return _convert(MemoryBudgetAC.Config, table)
    return None


def _convert_compile(job_config: Any) -> CompileConfig:
    compile_config: CompileConfig = _convert(CompileConfig, job_config.compile)
    if job_config.parallelism.enable_async_tensor_parallel:
        compile_config = dataclasses.replace(compile_config, enable_async_tensor_parallel=True)
    return compile_config
