# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads a checkpoint of DCP without running code from it.

DCP's table of files, `.metadata`, is a pickle, and so is each value that is not a tensor. Anyone
who can write to the folder could insert a call of any function. torch's own reader would make that
call. The classes here load the same checkpoints, and refuse every name that a checkpoint does not
need.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from titan_ft.engine.loader_state import find_refusal, find_refused_classes, load_value

_CLASSES = {
    metadata.__name__: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # Python 3.13 has the classes here.
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset"),
    "_codecs": ("encode",),  # Older protocols of pickle encode bytes by it.
}
"""Names that a table may contain, by module. A call of any of them only makes an object."""


def load_checkpoint(states: dict[str, Any], folder: Path | str) -> None:
    """Load all parts that `states` names from a checkpoint. A collective of the group.

    Raises:
        CheckpointException: a rank could not read the checkpoint, or a part is missing.
    """
    load(states, storage_reader=CheckpointReader(folder), planner=CheckpointPlanner())


class CheckpointReader(filesystem.FileSystemReader):
    """torch's reader of a checkpoint's files, with a list of what the table may contain."""

    def read_metadata(self, *_: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the table of files.

        Raises:
            UnpicklingError: the table contains a name that no table needs.
            OSError: the file cannot be read. Other exceptions: its bytes are wrong.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            table: metadata.Metadata = _TableUnpickler(file).load()
        facts = getattr(table, "storage_meta", None) or metadata.StorageMeta()
        facts.load_id = self.load_id
        table.storage_meta = facts
        return table


class CheckpointPlanner(DefaultLoadPlanner):
    """torch's plan of a load. Values that are not tensors are read without running their code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor.

        Raises:
            UnsafeValueError: the value has a class that is not registered by
                `torch.serialization.add_safe_globals`.
            UnpicklingError: the bytes are damaged.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = load_value(value)
        except pickle.UnpicklingError as error:
            value.seek(0)
            classes = find_refused_classes(value)
            if classes:
                raise UnsafeValueError(f"{', '.join(classes)} at {name}") from error
            raise
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def check_values(states: Mapping[str, Any]) -> None:
    """Refuse to save a state that `load_checkpoint` would refuse.

    DCP saves any value. Without this check a run would save for days, and no start after a failure
    could load any of its checkpoints.

    Args:
        states: this rank's states, as DCP saves them.

    Raises:
        UnsafeValueError: a state contains a class that could run code.
    """
    # The pieces that DCP writes.
    values, _ = flatten_state_dict(dict(states))
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            continue
        refusal = find_refusal(value)
        if refusal:
            raise UnsafeValueError(
                "a checkpoint must hold plain values beside its tensors, because a load runs no "
                f"code, got {refusal} at {name}; return a plain value in its state_dict, or give "
                "the class to torch.serialization.add_safe_globals in the module of "
                "experimental.custom_import"
            )


class UnsafeValueError(ValueError):
    """A value other than a tensor has a class that could run code. Its bytes are sound."""


class _TableUnpickler(pickle._Unpickler):
    """pickle's unpickler in Python, which takes 2.6 times as long as the unpickler in C.

    The C version cannot check BUILD, which sets attributes even of classes and functions. A table
    could set `PosixPath._str`, and so replace every path of this process by a path of its author.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return an object by its name.

        Raises:
            UnpicklingError: no table needs this object.
        """
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{module}.{name} is no part of a checkpoint's table; it would run as code"
        )

    def load_build(self) -> None:
        """Give an object its state.

        Raises:
            UnpicklingError: it is no object of one of DCP's classes. It may be a class itself.
        """
        target = self.stack[-2]  # type: ignore[attr-defined]  # typeshed lacks it
        # All of DCP's objects with a state belong to dataclasses. A class, or a member of an
        # enumeration, is shared by the whole process.
        if not is_dataclass(target) or isinstance(target, type):
            raise pickle.UnpicklingError(
                f"{target!r} has no state in a checkpoint's table; it would be changed for good"
            )
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch = pickle._Unpickler.dispatch | {  # type: ignore[assignment]
        pickle.BUILD[0]: load_build
    }
