# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in Hugging Face's format: what can be loaded and saved, and how a save fails on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import _consolidate_hf_safetensors

from titan_ft.config import ConfigError

MERGING = ("_consolidate_safetensors_files", "_write_overall_metadata_file")
"""What may fail on one rank between torch's collectives when files of Hugging Face's format are merged."""


def merge_together(save: Callable[[], Any]) -> None:
    """Save in Hugging Face's format; a rank that cannot merge its files still meets the others in torch's collectives.

    Each rank merges files of its own after DCP's part, and torch lets one that fails leave the others waiting for it.

    Raises:
        Exception: that of the merging.
    """
    failures: list[Exception] = []

    def carry_on(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # raised below
                failures.append(error)
                return {}

        return wrapped

    acts = {name: getattr(_consolidate_hf_safetensors, name) for name in MERGING}
    try:
        for name, act in acts.items():
            setattr(_consolidate_hf_safetensors, name, carry_on(act))
        save()
    finally:
        for name, act in acts.items():
            setattr(_consolidate_hf_safetensors, name, act)
    if failures:
        raise failures[0]


class Converted:
    """In place of an adapter to Hugging Face's format: what it has made of the state."""

    def __init__(self, fqn_to_index_mapping: dict[Any, int] | None, state: dict[str, Any]) -> None:
        self.fqn_to_index_mapping, self._state = fqn_to_index_mapping, state

    def to_hf(self, _: dict[str, Any]) -> dict[str, Any]:
        return self._state


def check_export(config: Any, adapter: object | None) -> None:
    """Check what torchtitan asserts of `checkpoint.last_save_in_hf`, some of it only at the last step.

    Raises:
        ConfigError: the model cannot be exported, or more than the model is to be saved.
    """
    if not (config.enable and config.last_save_in_hf):
        return
    if adapter is None:
        raise ConfigError(
            "checkpoint.last_save_in_hf must be false for this model, which torchtitan cannot write in Hugging Face's "
            "format (its TrainSpec has no state_dict_adapter)"
        )
    if not config.last_save_model_only:
        raise ConfigError(
            "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only = true: that format holds a model only"
        )


def check_import(config: Any, adapter: object | None) -> None:
    """Check what torchtitan asserts of `checkpoint.initial_load_in_hf`, in mid-start and without a name.

    Raises:
        ConfigError: the model cannot be imported, or more than a model is asked for.
    """
    if not config.enable:
        return
    if config.initial_load_in_hf_quantized and not config.initial_load_in_hf:
        raise ConfigError(
            "checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf = true, got false; set it"
        )
    if not config.initial_load_in_hf:
        return
    if adapter is None:
        raise ConfigError(
            "checkpoint.initial_load_in_hf must be false for this model, which torchtitan cannot read in Hugging "
            "Face's format (its TrainSpec has no state_dict_adapter)"
        )
    if not config.initial_load_model_only:
        raise ConfigError(
            "checkpoint.initial_load_in_hf needs checkpoint.initial_load_model_only = true: that format holds a model "
            "only"
        )


def check_importable(folder: str) -> None:
    """Check that there is a model in Hugging Face's format in `folder`.

    Raises:
        ConfigError: there is none.
    """
    if not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(
            f"checkpoint: {folder} must hold a model in Hugging Face's format (*.safetensors), got none; give its "
            "folder as checkpoint.initial_load_path, or set checkpoint.initial_load_in_hf = false"
        )
