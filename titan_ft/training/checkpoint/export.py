# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in Hugging Face's format: their settings, exports, and the check of exported files.

torch writes each file by a table of names (`model.safetensors.index.json` of
`model.hf_assets_path`). A name without a tensor makes its whole file unreadable, and torch does not
check. Old Llama tables, for example, name `rotary_emb.inv_freq`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_ft.config import ConfigError
from titan_ft.host.titan import logger
from titan_ft.protocol.row import fold48
from titan_ft.training.checkpoint.choice import Gather
from titan_ft.training.checkpoint.damage import check_safetensors
from titan_ft.training.checkpoint.folder import INDEX, DamagedError

_MAX_NAMED = 3
"""Tensors that an error names."""


class ExportError(Exception):
    """An export does not hold the whole model, or would not."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the whole group, as the adapter gives it."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Converted:
    """Stands in for the adapter to Hugging Face's format, with an already converted state.

    Args:
        state: this rank's tensors by name.
        index: file number of each name, as the adapter has read it; None: all tensors in one file.
        tensors: tensors of all ranks, see `gather_tensors`.
    """

    def __init__(
        self, state: dict[str, Any], index: Mapping[str, int] | None, tensors: Mapping[str, Tensor]
    ) -> None:
        self._state, self._tensors = state, tensors
        for name, tensor in tensors.items():
            if not tensor.shape:
                raise ExportError(f"torch would write {name} as 0, for it has no dimensions")
        self.fqn_to_index_mapping = _assign_files(tensors, index) if index else None

    def to_hf(self, _: dict[str, Any]) -> dict[str, Any]:
        return self._state

    def check(self, folder: Path) -> None:
        """Check the files in `folder`: they must hold exactly the tensors of the model.

        The index must name exactly these files. Opens every file, but reads no data.

        Raises:
            ExportError: a file, a name, a shape or a dtype is wrong.
            OSError: the file system does not answer.
        """
        files = _read_weight_map(folder)
        _compare("model.safetensors.index.json", files, self._tensors)
        _compare("the folder", (path.name for path in folder.glob("*.safetensors")), files.values())
        for name in sorted(set(files.values())):
            expected = {key: self._tensors[key] for key, file in files.items() if file == name}
            _check_file(folder / name, expected)


def describe_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return shape and dtype of each tensor. A sharded tensor has the shape of the whole."""
    return {
        name: Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in state.items()
    }


def gather_tensors(own: dict[str, Tensor], gather: Gather) -> dict[str, Tensor]:
    """Return the tensors of all ranks. A collective.

    The ranks of a pipeline have different parts of the model.
    """
    fingerprint = fold48(repr(sorted(own.items(), key=str)))
    if len(set(gather(fingerprint))) == 1:
        return own
    every: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, own)
    union: dict[str, Tensor] = {}
    for tensors in every:
        union.update(tensors)
    return union


def _assign_files(tensors: Iterable[str], index: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the file of each tensor, from 1 on without gaps.

    A name without a tensor is left out. A tensor without a name goes into the last file.
    """
    tensors = list(tensors)
    absent = [name for name in index if name not in tensors]
    unnamed = [name for name in tensors if name not in index]
    if absent:
        logger.warning(
            f"{INDEX} of model.hf_assets_path names tensors that the model lacks; left out: "
            f"{_list(absent)}"
        )
    if unnamed:
        logger.warning(
            f"{INDEX} of model.hf_assets_path lacks tensors of the model; the last file gets them: "
            f"{_list(unnamed)}"
        )
    named = {name: number for name, number in index.items() if name not in absent}
    last = max(named.values(), default=1)
    files = {**named, **dict.fromkeys(unnamed, last)}
    numbers = {old: new for new, old in enumerate(sorted(set(files.values())), start=1)}
    return {name: numbers[old] for name, old in files.items()}


def _read_weight_map(folder: Path) -> dict[str, str]:
    try:
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
    except FileNotFoundError as error:
        raise ExportError(f"{INDEX} was not written") from error
    return {str(name): str(file) for name, file in weights.items()}


def _check_file(path: Path, expected: Mapping[str, Tensor]) -> None:
    # Imported here: only exports need this package.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            _compare(path.name, file.keys(), expected)
            found = {}
            for name in expected:
                part = file.get_slice(name)
                dtype = str(part[:0].dtype).removeprefix("torch.")
                found[name] = Tensor(tuple(part.get_shape()), dtype)
    except SafetensorError as error:
        raise ExportError(f"{path.name} cannot be read: {error}") from error
    for name, tensor in expected.items():
        if found[name] != tensor:
            raise ExportError(f"{path.name} holds {name} as {found[name]}, which is {tensor}")


def _compare(where: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Compare two sets of names.

    Raises:
        ExportError: the sets differ.
    """
    names = set(found)
    wanted = set(expected)
    missing = sorted(wanted - names)
    if missing:
        raise ExportError(f"{where} lacks {_list(missing)}")
    surplus = sorted(names - wanted)
    if surplus:
        raise ExportError(f"{where} has {_list(surplus)}, which the model lacks")


def _list(names: list[str]) -> str:
    hidden = len(names) - _MAX_NAMED
    more = f" and {hidden} more" if hidden > 0 else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def check_export(config: Any, adapter: object | None) -> None:
    """Check the conditions of `checkpoint.last_save_in_hf`.

    torchtitan asserts some of them only at the last step.

    Raises:
        ConfigError: the model cannot be exported, or the last save holds more than the model.
    """
    if not config.enable or not config.last_save_in_hf:
        return
    if adapter is None:
        raise ConfigError(
            "checkpoint.last_save_in_hf must be false for this model, which torchtitan cannot "
            "write in Hugging Face's format (its TrainSpec has no state_dict_adapter)"
        )
    if not config.last_save_model_only:
        raise ConfigError(
            "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only = true: that format "
            "holds a model only"
        )


def check_import(config: Any, adapter: object | None) -> None:
    """Check the conditions of `checkpoint.initial_load_in_hf`.

    torchtitan asserts them late, without the name of the setting.

    Raises:
        ConfigError: the model cannot be imported, or the load wants more than the model.
    """
    if not config.enable:
        return
    if config.initial_load_in_hf_quantized and not config.initial_load_in_hf:
        raise ConfigError(
            "checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf = true, "
            "got false; set it"
        )
    if not config.initial_load_in_hf:
        return
    if adapter is None:
        raise ConfigError(
            "checkpoint.initial_load_in_hf must be false for this model, which torchtitan cannot "
            "read in Hugging Face's format (its TrainSpec has no state_dict_adapter)"
        )
    if not config.initial_load_model_only:
        raise ConfigError(
            "checkpoint.initial_load_in_hf needs checkpoint.initial_load_model_only = true: that "
            "format holds a model only"
        )


def check_importable(folder: Path) -> None:
    """Check that `folder` holds a whole model in Hugging Face's format.

    Raises:
        ConfigError: there is no such model, or a file of it is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"checkpoint: {folder} must hold a model in Hugging Face's format (*.safetensors), got "
            "none; give its folder as checkpoint.initial_load_path, or set "
            "checkpoint.initial_load_in_hf = false"
        )
    try:
        for path in files:
            check_safetensors(path)
    except DamagedError as error:
        raise ConfigError(
            f"checkpoint: {folder} must hold a model that can be read, got: {error}; give another "
            "one as checkpoint.initial_load_path"
        ) from error
