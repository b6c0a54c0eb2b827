# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a job's config as its workers do, from TOML and flags.

Every rule is checked before anything is built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from titan_ft import config as ft_config
from titan_ft.config import ConfigError, suggest_name
from titan_ft.host.release import check_torchtitan, expect_torchtitan
from titan_ft.training.checkpoint.folder import INDEX
from titan_ft.training.custom_import import import_custom
from titan_ft.training.divisions import check_model, num_experts
from titan_ft.training.module_config import read_tables, split_flags
from titan_ft.training.own_trainer import check_tables, check_trainer
from titan_ft.usage import find_values, refusing

_MAY_DIFFER = (
    "advertise_address",
    "chaos",
    "drain_timeout_seconds",
    "hang_timeout_seconds",
    "job_id",
    "lighthouse",
    "replica_id",
    "transfer_max_mbps",
)
"""Fields of [fault_tolerance] that may differ between groups. job_id is compared by itself."""


def read_config(*args: str) -> Any:
    """Read and validate the job's config. Nothing may import torchtitan before this call.

    Raises:
        ConfigError: the config has a mistake.
    """
    return _read_whole_config(args, *_find_toml(args))


def prepare_config(*args: str) -> Any:
    """Read the config as `read_config` does, but do not import the user's modules.

    For a process that forks workers. A user's module may start threads or use a GPU, which a fork
    does not support, and only the workers may know its model. Without such a module every rule is
    checked.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    toml, modified = _find_toml(args)
    job_config = _read_config(args, toml, modified)
    if job_config.experimental.custom_import:
        return job_config
    return _read_whole_config(args, toml, modified)


def _find_toml(args: Sequence[str]) -> tuple[str | None, int]:
    """Return the path of the TOML that the flags name, and the time of its last change in ns."""
    toml = None
    for name, value in ft_config.read_flags(args):
        if name == "job.config_file":
            toml = value
            break  # torchtitan's ConfigManager takes the first.
    if toml is None or not os.path.exists(toml):
        return toml, 0
    return toml, os.stat(toml).st_mtime_ns


@functools.cache  # A worker is a fork of a process that has read the config already.
def _read_config(args: tuple[str, ...], toml: str | None, modified: int) -> Any:
    """Read the config, without a check of its model and data.

    Args:
        modified: time of the TOML's last change, in ns. It is a part of the cache's key.
    """
    job_config = parse_config(args, toml)
    ft_config.validate(job_config)
    from titan_ft.host.titan import register_flavors

    register_flavors(job_config.model.name)
    return job_config


@functools.cache
def _read_whole_config(args: tuple[str, ...], toml: str | None, modified: int) -> Any:
    """Read the config, and check its model and data, which the user's module may register."""
    job_config = _read_config(args, toml, modified)
    import_custom(job_config.experimental.custom_import)
    _check_model(job_config)
    return job_config


def parse_config(args: Sequence[str], toml: str | None) -> Any:
    """Put TOML, flags and defaults together, as torchtitan does. Checks names and types only.

    Args:
        args: torchtitan's flags, `--job.config_file` among them, or `--module` and `--config`.
        toml: path of that file; None if the flags name none.

    Raises:
        ConfigError: a name or a type is wrong.
    """
    values: dict[str, Any] = {}
    flags = split_flags(args)
    if flags.module:
        values, args = read_tables(flags), flags.own
    elif toml is not None:
        values = ft_config.load_toml(toml)
        ft_config.check_toml(values)
    args = (*args, *_assets_flag(values, args))

    from titan_ft.host import cpu

    cpu.prepare()
    check_torchtitan()
    with expect_torchtitan():
        from titan_ft.data.datasets import register_datasets
        from titan_ft.host.titan import build_schema
        from titan_ft.training.validation import check_steps

    register_datasets()
    try:
        manager, schema = build_schema(ft_config.JobConfig, args, values)
    except (ImportError, AttributeError) as error:
        rule = "job.custom_config_module must be a module with a class JobConfig"
        raise ConfigError(
            f"{rule}, got one that cannot be used ({error}); install it, or correct the name"
        ) from error
    ft_config.check_table("", values, schema)
    check_steps(values, args)

    def unknown(flag: str) -> str:
        table, _, name = _as_in_toml(flag).removeprefix("--").partition(".")
        if table == ft_config.TABLE and name in ft_config.REMOVED:
            _, value = next(find_values(args, [flag]))
            return ft_config.describe_removed(_as_in_toml(flag), value)
        known_flags = [_as_in_toml(known) for known in _flags(schema)]
        hint = suggest_name(_as_in_toml(flag), known_flags)
        return f"{_as_in_toml(flag)} is no flag of torchtitan; {hint}correct or remove it"

    try:
        return refusing(lambda: manager.parse_args(list(args)), args, unknown)
    except ConfigError:
        raise
    except ValueError as error:
        # torchtitan has rules of its own.
        raise ConfigError(" ".join(str(error).split())) from error


def _flags(schema: type, prefix: str = "--") -> Iterator[str]:
    """Yield the flags of nested dataclasses, such as --training.steps, --checkpoint.no-enable."""
    for setting in fields(schema):
        name = setting.name
        if is_dataclass(setting.type):
            yield from _flags(setting.type, f"{prefix}{name}.")  # type: ignore[arg-type]  # a class
            continue
        yield f"{prefix}{name}"
        if setting.type is bool:
            yield f"{prefix}no-{name}"


def _as_in_toml(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")


def check_paths(job_config: Any) -> None:
    """Check the files that the workers need.

    Call this on a host of the job only: other hosts may lack the files.

    Raises:
        ConfigError: a file is missing.
    """
    from titan_ft.data.datasets import KNOWN

    training, checkpoint = job_config.training, job_config.checkpoint
    text = training.dataset_path
    if training.dataset in KNOWN and text and not os.path.isfile(text):
        raise ConfigError(
            f"training.dataset_path must be an existing .txt or .txt.gz file, got {text!r}; "
            "correct it, or leave it out"
        )
    own = os.path.join(job_config.job.dump_folder, checkpoint.folder)
    first = checkpoint.initial_load_path
    # torchtitan ignores initial_load_path once the run has checkpoints of its own.
    is_read = checkpoint.enable and first and not os.path.exists(own)
    if is_read and not os.path.isdir(first):
        raise ConfigError(
            f"checkpoint.initial_load_path must be the folder of a checkpoint, got {first!r}, "
            "which is none; correct it, or leave it out"
        )


def _check_model(job_config: Any) -> None:
    """Check the names that torchtitan would look up only later, in each rank and at each restart.

    Raises:
        ConfigError: a model, flavor, validator, dataset or tokenizer does not exist, or the table
            of Hugging Face's files is wrong.
    """
    from titan_ft.host import titan

    model = job_config.model
    _check_name("model.name", model.name, titan.model_names())
    check_trainer(model.name)
    try:
        spec = titan.get_train_spec(model.name)
    except ImportError as error:
        raise ConfigError(
            f"model.name must be a model whose modules are installed, got {model.name!r} "
            f"({error}); install what is missing, or take another model"
        ) from error
    check_tables(job_config)
    _check_name("model.flavor", model.flavor, spec.model_args)
    if job_config.validation.enable and spec.build_validator_fn is None:
        raise ConfigError(
            f"validation.enable must be false with model.name {model.name}, got true: torchtitan "
            "cannot validate that model; set it to false"
        )
    if spec.build_dataloader_fn is titan.build_text_dataloader:
        _check_name("training.dataset", job_config.training.dataset, titan.DATASETS)
    if spec.build_optimizers_fn in titan.ADAM_BUILDERS:
        _check_name("optimizer.name", job_config.optimizer.name, ("Adam", "AdamW"))
    needs_folder = spec.build_tokenizer_fn is titan.build_hf_tokenizer
    if needs_folder and not os.path.isdir(model.hf_assets_path):
        raise ConfigError(
            "model.hf_assets_path must be the folder of a tokenizer, got "
            f"{model.hf_assets_path!r}, which is none; "
            'download one, or set it to "titan_ft://tokenizer"'
        )
    if spec.state_dict_adapter and issubclass(spec.state_dict_adapter, titan.StateDictAdapter):
        _check_index(Path(model.hf_assets_path, INDEX))
    if job_config.fault_tolerance.enable:
        check_model(job_config, spec)
        _check_experts(job_config, spec.model_args[model.flavor])


def _check_index(path: Path) -> None:
    """Check the table of Hugging Face's files, which torchtitan reads at each start, even without
    an export.

    Raises:
        ConfigError: torchtitan cannot read a file number in the table, and would end with a
            traceback.
    """
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _index_error(path, f"cannot be read ({error})") from error
    if not table:  # torchtitan treats an empty table as a missing one.
        return
    files = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(files, dict):
        raise _index_error(path, 'has no table "weight_map"')
    for name, file in files.items():
        if not isinstance(file, str) or not re.search(r"\d", file):
            raise _index_error(path, f"has {file!r} for {name}")


def _index_error(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{INDEX} of model.hf_assets_path must name a file with a number for each tensor, as in "
        f'"model-00001-of-00002.safetensors", got {path}, which {found}; correct it, or remove '
        "it: an export is one file then"
    )


def _check_experts(job_config: Any, arguments: Any) -> None:
    """Refuse semi-synchronous training of a model that balances its experts' load.

    In each step of a round, each group alone would move the experts' biases.

    Args:
        arguments: arguments of the model's flavor.
    """
    method, model = job_config.fault_tolerance.semi_sync_method, job_config.model
    if method and num_experts(arguments) and arguments.moe_args.load_balance_coeff:
        raise ConfigError(
            f"{ft_config.TABLE}.semi_sync_method is not supported yet for a model that balances "
            f"the load of its experts and must be left out with {model.name} {model.flavor}, got "
            f"{method!r}; remove it, or take another model"
        )


def _check_name(field: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        hint = suggest_name(value, known)
        raise ConfigError(
            f"{field} must be one of {', '.join(sorted(known))}, got {value!r}; {hint}set it"
        )


def _assets_flag(values: dict[str, Any], args: Sequence[str]) -> list[str]:
    """Return a flag with the folder of a `titan_ft://` tokenizer; no flag for other tokenizers."""
    from titan_ft.data.assets import resolve

    table = values.get("model")
    path = ""
    if isinstance(table, dict):
        path = str(table.get("hf_assets_path", ""))
    for name, value in ft_config.read_flags(args):
        if name == "model.hf_assets_path":
            path = value
    resolved = resolve(path)
    return [] if resolved == path else [f"--model.hf_assets_path={resolved}"]


def digest_config(job_config: Any) -> str:
    """Hash the settings that must be equal in all groups of a job.

    The logging, the slot and the addresses of a group are left out.

    Returns:
        16 hex digits.
    """
    values = job_config.to_dict()
    for table in ("job", "metrics", "profiling", "comm"):
        values.pop(table, None)
    for key in _MAY_DIFFER:
        values["fault_tolerance"].pop(key, None)
    values["model"].pop("hf_assets_path", None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
