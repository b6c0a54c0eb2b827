# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out, before an import, whether a torchtitan model needs more than the stock trainer.

The trainer of flux, for example, encodes text and images in its own `forward_backward_step`. Such a
model passed every check, and ended in the first step with a KeyError.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path
from typing import Any

from titan_ft.config import ConfigError

_HARMLESS = {"close"}
"""Methods of a trainer that only release resources: a worker ends without them."""


def check_trainer(name: str) -> None:
    """Refuse a model that the stock trainer cannot train.

    Raises:
        ConfigError: torchtitan has a trainer for this model alone.
    """
    from titan_ft.host.titan import TRAINER_FILE, file_in_package, packages_of_model

    for package in packages_of_model(name):
        path = file_in_package(package, TRAINER_FILE)
        trainer = "" if path is None else _find_trainer(path)
        if trainer:
            raise ConfigError(
                f"model.name must be a model that torchtitan's own trainer trains, got {name!r}, "
                f"which has a trainer of its own ({trainer}); take another model, or train this "
                f"one without titan_ft: torchrun ... -m {package}.{Path(TRAINER_FILE).stem}"
            )


def check_tables(job_config: Any) -> None:
    """Check that the config has the tables that the model's own package reads.

    Raises:
        ConfigError: a table is missing.
    """
    from titan_ft.host.titan import file_in_package, packages_of_model

    for package in packages_of_model(job_config.model.name):
        if file_in_package(package, "job_config.py") is None:
            continue
        module = f"{package}.job_config"
        schema = importlib.import_module(module).JobConfig
        missing = [
            field.name
            for field in dataclasses.fields(schema)
            if not hasattr(job_config, field.name)
        ]
        if missing:
            name = job_config.model.name
            raise ConfigError(
                f'job.custom_config_module must be "{module}" with model.name {name}, which reads '
                f"[{missing[0]}], got {job_config.job.custom_config_module!r}; set it"
            )


def _find_trainer(path: Path) -> str:
    """Return the name of a trainer class that overrides more than `close`; empty without one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        is_trainer = any(
            isinstance(base, ast.Name) and base.id.endswith("Trainer") for base in node.bases
        )
        methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        if is_trainer and methods - _HARMLESS:
            return node.name
    return ""
