# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft config`: print the config that workers would train with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from titan_ft.config import TABLE
from titan_ft.data.assets import find_config
from titan_ft.options import ShowConfig
from titan_ft.training.custom_import import working_folder_first
from titan_ft.training.job_config import read_config

_SHOWN = {
    "model": ("name", "flavor", "hf_assets_path"),
    "training": (
        "dataset",
        "dataset_path",
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "steps",
        "max_norm",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
    ),
    "optimizer": ("name", "lr", "beta1", "beta2", "weight_decay", "eps"),
    "lr_scheduler": ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor"),
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
    ),
    "activation_checkpoint": ("mode",),
    "compile": ("enable",),
    "checkpoint": ("enable", "folder", "interval", "keep_latest_k", "async_mode"),
    "metrics": ("log_freq", "enable_tensorboard", "enable_wandb"),
    "debug": ("seed", "deterministic"),
}
"""Tables and fields of torchtitan that determine the arithmetic, length and memory of a run."""


def run(command: ShowConfig, worker_args: Sequence[str]) -> int:
    """Print the resolved config as TOML, with the default beside each changed field, or as JSON.

    Raises:
        ConfigError: the first mistake in the config.
    """
    args = [f"--job.config_file={find_config(command.config)}"]
    if command.replicas is not None:
        args += [f"--{TABLE}.enable", f"--{TABLE}.group_size={command.replicas}"]
    with working_folder_first():
        config = read_config(*args, *worker_args)
    if command.json:
        print(json.dumps(config.to_dict(), indent=2, ensure_ascii=False, default=str))
    else:
        print("\n".join(_lines(config)))
    return 0


def _lines(config: Any) -> Iterator[str]:
    if not config.fault_tolerance.enable:
        yield (
            f"# {TABLE}.enable is false: this is plain torchtitan, and no rule about the table was "
            "checked"
        )
    for table in (TABLE, *_SHOWN):
        values = getattr(config, table)
        defaults = type(values)()
        yield f"[{table}]"
        for field in fields(values):
            if table == TABLE or field.name in _SHOWN[table]:
                value = getattr(values, field.name)
                yield _line(field.name, value, getattr(defaults, field.name))
        yield ""
    yield "# torchtitan's other tables and fields are as the TOML or their defaults have them"


def _line(name: str, value: Any, default: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    line = f"{name} = {_to_toml(value)}"
    if value == default:
        return line
    shown_default = "not set" if default is None else _to_toml(default)
    return f"{line}  # default {shown_default}"


def _to_toml(value: Any) -> str:
    """Return a value as TOML, which equals JSON for the types in configs."""
    return json.dumps(value, ensure_ascii=False, default=str)
