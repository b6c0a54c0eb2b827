# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs in the form of torchtitan 0.3: `--module M --config F`, a function that returns a config.

The rest of this package reads the tables of a TOML. So `read_module` returns such tables, and
`tables_0_3.translate` turns them back into the config that F returned. Both configs are compared,
field by field. A value that the tables cannot hold is refused by its name. Nothing changes
silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from titan_ft.config import ConfigError
from titan_ft.host.tables_0_3 import TABLES, fill_tables, translate

_SAME_FIELDS = {
    "profiling": "profiler",
    "metrics": "metrics",
    "lr_scheduler": "lr_scheduler",
    "training": "training",
    "parallelism": "parallelism",
    "checkpoint": "checkpoint",
    "compile": "compile",
    "comm": "comm",
    "debug": "debug",
    "validation": "validator",
}
"""Tables whose fields have the names of a part of the config, and that part."""
_OURS = ("training.disable_cuda_graphs", "debug.enable_structured_logging")
"""Fields that keep this package's value, even if F has another. `tables_0_3` has the reasons."""
_IGNORED = (*_OURS, "validator.dataloader.infinite", "checkpoint.initial_load_model_only")
"""Fields that are not compared. A validator of 0.3 sets its `infinite` itself. `translate` leaves
the last one out where it has no effect, because 0.3 would warn of it."""
_MAX_CHARACTERS = 120
"""Most characters of a value in a message."""
_AC_MODES = {
    SelectiveAC.Config: "selective",
    FullAC.Config: "full",
    MemoryBudgetAC.Config: "memory_budget",
}


def read_module(
    module: str, function: str, flags: Sequence[str], spec_of: Callable[[str, str], Any]
) -> dict[str, Any]:
    """Return the tables of a TOML that describe the job of `--module M --config F` and 0.3's flags.

    Args:
        module: M, such as "llama3".
        function: F, a function of M's config_registry.
        flags: 0.3's own flags, such as "--training.steps=10".
        spec_of: returns the ModelSpec of a model's flavor.

    Raises:
        ConfigError: there is no such function, or the tables cannot hold a value of its config.
        ValueError: 0.3 refuses a value.
    """
    given = f"--module {module} --config {function}"
    try:
        config = ConfigManager().parse_args([f"--module={module}", f"--config={function}", *flags])
    except ImportError as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{given} must be a function whose imports are installed, got {why}; install them"
        ) from error
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"{given} must return a Trainer.Config, got a {type(config).__qualname__}: "
            "torchtitan's other trainers cannot be replica groups; take another function"
        )
    tables = _read_tables(config)
    spec = spec_of(config.model_spec.name, config.model_spec.flavor)
    made = translate(fill_tables(tables), spec, getattr(spec.model, "vocab_size", None))
    for part in fields(Trainer.Config):
        value = getattr(config, part.name)
        kept = getattr(made, part.name)
        try:
            found = _find_difference(part.name, value, kept)
        except RecursionError:
            # A function refers to itself. No comparison can show that both copies are equal.
            found = part.name, "a value that contains itself", "another one"
        if found is not None:
            name, value, kept = found
            raise ConfigError(
                f"{given} must be a job that a TOML can describe, got {name} = {_shorten(value)}, "
                f"where the TOML would have {_shorten(kept)}; take another function, or change the "
                "field by its flag"
            )
    return tables


def _read_tables(config: Trainer.Config) -> dict[str, Any]:
    """Return the tables, without the values that are their defaults."""
    tables = {
        table: _read_table(TABLES[table], getattr(config, part))
        for table, part in _SAME_FIELDS.items()
    }
    for full in _OURS:
        table, _, name = full.partition(".")
        tables[table].pop(name, None)
    tables["training"] |= _read_loader("training", config.dataloader)
    tables["validation"] |= _read_loader("validation", config.validator.dataloader)
    tables["optimizer"] = _read_optimizer(config.optimizer)
    tables["activation_checkpoint"] = _read_activation_checkpoint(config.activation_checkpoint)
    spec = config.model_spec
    tables["model"] = {
        "name": spec.name,
        "flavor": spec.flavor,
        "hf_assets_path": config.hf_assets_path,
    }
    tables["job"] = {"dump_folder": config.dump_folder}
    return {name: table for name, table in tables.items() if table}


def _read_table(table: type, source: Any) -> dict[str, Any]:
    """Return the values of a config that differ from a table's defaults."""
    if source is None:
        return {}
    default = table()
    found = {}
    names = {each.name for each in fields(source)}
    for each in fields(table):
        if each.name not in names or each.name == "dataloader":
            continue
        value = getattr(source, each.name)
        if value != getattr(default, each.name):
            found[each.name] = value
    return found


def _read_loader(table: str, config: Any) -> dict[str, Any]:
    """Return the data fields of a table. The later comparison refuses other kinds of loaders."""
    found = {name: getattr(config, name, None) for name in ("dataset", "dataset_path")}
    if isinstance(config, HuggingFaceTextDataLoader.Config):
        found["dataloader"] = _read_table(type(TABLES[table]().dataloader), config)
    return {name: value for name, value in found.items() if value}


def _read_optimizer(config: Any) -> dict[str, Any]:
    """Return the settings of the first group of parameters; the comparison refuses other groups."""
    group = config.param_groups[0]
    settings = dict(group.optimizer_kwargs)
    beta1, beta2 = settings.pop("betas", (None, None))
    known = {each.name for each in fields(TABLES["optimizer"])}
    found = {
        "name": group.optimizer_name,
        "implementation": config.implementation,
        "beta1": beta1,
        "beta2": beta2,
    }
    found |= {name: value for name, value in settings.items() if name in known}
    return {name: value for name, value in found.items() if value is not None}


def _read_activation_checkpoint(config: Any) -> dict[str, Any]:
    if config is None:
        return {"mode": "none"}
    found = _read_table(TABLES["activation_checkpoint"], config)
    shapes = getattr(config, "force_recompute_mm_shapes_by_fqns", None)
    if shapes is not None:
        found["per_op_sac_force_recompute_mm_shapes_by_fqns"] = shapes
    return {"mode": _AC_MODES.get(type(config), "none"), **found}


def _find_difference(name: str, given: Any, made: Any) -> tuple[str, Any, Any] | None:
    """Return the first difference of two configs: field, first value, second value. None if equal.

    Each call of F makes new functions, so functions are compared by their names, code, defaults and
    closures.
    """
    if name in _IGNORED or given is made:
        return None
    if is_dataclass(given) and type(given) is type(made):
        for each in fields(given):
            found = _find_difference(
                f"{name}.{each.name}", getattr(given, each.name), getattr(made, each.name)
            )
            if found is not None:
                return found
        return None
    if isinstance(given, Mapping) and isinstance(made, Mapping) and given.keys() == made.keys():
        for key in given:
            found = _find_difference(f"{name}.{key}", given[key], made[key])
            if found is not None:
                return found
        return None
    if isinstance(given, list | tuple) and type(given) is type(made) and len(given) == len(made):
        for place, (one, other) in enumerate(zip(given, made, strict=True)):
            found = _find_difference(f"{name}[{place}]", one, other)
            if found is not None:
                return found
        return None
    if isinstance(given, functools.partial) and isinstance(made, functools.partial):
        given_parts = [given.func, given.args, given.keywords]
        made_parts = [made.func, made.args, made.keywords]
        return _find_difference(name, given_parts, made_parts)
    if callable(given) and callable(made):
        if _name_of(given) != _name_of(made) or _code_of(given) != _code_of(made):
            return name, _name_of(given), _name_of(made)
        # Functions of one factory have the same name and code, but other captured values.
        return _find_difference(f"{name}()", _captured_by(given), _captured_by(made))
    equal = given == made
    if not isinstance(equal, bool):
        # Tensors and arrays compare each element.
        equal = repr(given) == repr(made)
    return None if equal else (name, given, made)


def _code_of(function: Any) -> tuple[bytes, str]:
    """Return a function's code and constants. The result is equal for all functions in C."""
    code = getattr(function, "__code__", None)
    if code is None:
        return b"", ""
    plain = [constant for constant in code.co_consts if not hasattr(constant, "co_code")]
    return code.co_code, repr(plain)


def _captured_by(function: Any) -> list[Any]:
    """Return the values of a function's defaults and closure."""
    cells = getattr(function, "__closure__", None) or ()
    defaults = getattr(function, "__defaults__", None) or ()
    return [*defaults, *(cell.cell_contents for cell in cells)]


def _shorten(value: Any) -> str:
    text = repr(value)
    if len(text) > _MAX_CHARACTERS:
        return f"{text[:_MAX_CHARACTERS]}..."
    return text


def _name_of(function: Any) -> str:
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", repr(function))
    return f"{module}.{name}"
