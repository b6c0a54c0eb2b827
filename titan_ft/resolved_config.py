# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Put a job's config together, from TOML, flags and defaults: for people, and for the launcher.

`titan-ft config` shows it. As a program (`python -m titan_ft.resolved_config`) this resolves the
flags of two launches for a `launch --resume`, which must not import torchtitan itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from titan_ft.config import TABLE, ConfigError, flat_values
from titan_ft.data.assets import find_config
from titan_ft.options import ShowConfig

# Of torchtitan's tables: what a run's arithmetic, length and memory follow from.
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


def show_config(asked: ShowConfig, worker_args: Sequence[str]) -> int:
    """Print the resolved config as TOML, where each field that is not its default says what that is; or as JSON.

    Raises:
        ConfigError: the first mistake in it.
    """
    from titan_ft.training.custom_import import working_folder_first
    from titan_ft.training.job_config import read_config

    args = [f"--job.config_file={find_config(asked.config)}"]
    if asked.replicas is not None:
        args += [f"--{TABLE}.enable", f"--{TABLE}.group_size={asked.replicas}"]
    with working_folder_first():
        config = read_config(*args, *worker_args)
    if asked.json:
        print(json.dumps(config.to_dict(), indent=2, ensure_ascii=False, default=str))
    else:
        print("\n".join(_lines(config)))
    return 0


def resolve(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values that these flags of torchtitan's lead to, by their full names; every rule is checked.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    from titan_ft.training.job_config import read_config

    return dict(flat_values(read_config(*flags).to_dict()))


def resolve_earlier(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of a launch that has trained with them.

    They are not checked again: the tokenizer that it names, for example, may lie elsewhere by now.

    Raises:
        ConfigError: a name or a type is wrong.
    """
    from titan_ft.training.job_config import parse_config

    toml = next(flag for flag in flags if flag.startswith("--job.config_file=")).partition("=")[2]
    try:
        config = parse_config(flags, toml)
    except ConfigError as error:
        raise ConfigError(f"--resume must be able to read the config of the earlier launch, got: {error}") from error
    method = config.fault_tolerance.semi_sync_method
    config.fault_tolerance.semi_sync_method = method and method.lower()  # as the check does
    return dict(flat_values(config.to_dict()))


def _lines(config: Any) -> Iterator[str]:
    if not config.fault_tolerance.enable:
        yield f"# {TABLE}.enable is false: this is plain torchtitan, and no rule about the table was checked"
    for table in (TABLE, *_SHOWN):
        values = getattr(config, table)
        yield f"[{table}]"
        for field in fields(values):
            if table == TABLE or field.name in _SHOWN[table]:
                yield _line(field.name, getattr(values, field.name), getattr(type(values)(), field.name))
        yield ""
    yield "# torchtitan's other tables and fields are as the TOML or their defaults have them"


def _line(name: str, value: Any, default: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    changed = "" if value == default else f"  # default {'not set' if default is None else _text(default)}"
    return f"{name} = {_text(value)}{changed}"


def _text(value: Any) -> str:
    """Return a value as TOML has it: for what configs hold that is what JSON has."""
    return json.dumps(value, ensure_ascii=False, default=str)


def main() -> None:
    """Read the flags of two launches from stdin, as JSON, and print the values of both, or the mistake in them."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports and the user's config module print is no answer
    earlier, now = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"now": resolve(now), "earlier": resolve_earlier(earlier)}
    except ConfigError as error:
        answer = {"error": str(error)}
    with open(answers, "w") as file:
        json.dump(answer, file, default=str)


if __name__ == "__main__":
    main()
