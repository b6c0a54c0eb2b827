# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack the state of a data loader for other groups, and unpack theirs.

A state is sent in every exchange, in every heal and in checkpoints, so it comes from other processes.
It is unpacked without running code: `torch.load(weights_only=True)`, which allows NumPy's types and a
few of the standard library's in addition. A state that could not be unpacked would end each group that
heals, hours after it was saved. `save_loader` therefore reads back each new combination of types.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch.serialization import safe_globals
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.config import ConfigError
from titan_ft.host import streams

# Before any stream is opened: without the patches, its state lacks the position in the data.
streams.patch()

_NUMPY: list[Any] = [
    multiarray._reconstruct,
    multiarray.scalar,
    np.ndarray,
    np.dtype,
    # The class of every dtype, for instance np.dtypes.Float64DType: torch looks it up for each array.
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]
_STANDARD: list[Any] = [
    bytes,  # pickle writes b"" as a call of bytes(); torch allows all other bytes by itself
    frozenset,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
]
_checked: set[tuple[type, frozenset[object]]] = set()
"""(class of a loader, types in its state) that have been packed and unpacked once."""


class LoaderStateError(ConfigError, TypeError):
    """A loader's state holds a value that cannot be unpacked in another process."""


def save_loader(loader: Any) -> bytes:
    """Pack the state of a data loader.

    Raises:
        LoaderStateError: the state holds a value that other groups could not unpack; names the loader's
            class, the value's place in the state and its type.
    """
    # Call torchdata's method, not an override: torchtitan's pickles the state once more, under a key
    # with the rank. `weights_only` would not look into that pickle.
    is_torchdata = isinstance(loader, StatefulDataLoader)
    state = StatefulDataLoader.state_dict(loader) if is_torchdata else loader.state_dict()
    types = frozenset(_types_in(state))
    if (type(loader), types) in _checked:
        return _pack(state)
    try:
        packed = _pack(state)
        # A class whose `__reduce__` names a plain type is unpacked as that type, without an error.
        types_survive = types == frozenset(_types_in(_unpack(packed)))
    except Exception as error:  # pickle raises errors of many classes
        raise _refusal(loader, state) from error
    if not types_survive:
        raise _refusal(loader, state)
    _checked.add((type(loader), types))
    return packed


def load_loader(loader: Any, packed: bytes) -> None:
    """Resume a data loader at the position in `packed`, which another loader of the same data saved."""
    state = _unpack(packed)
    if isinstance(loader, StatefulDataLoader):
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)


def name_loader(loader: Any) -> str:
    """Return the classes of a data loader and of its dataset."""
    dataset = getattr(loader, "dataset", None)
    return _class_name(loader) + ("" if dataset is None else f" of {_class_name(dataset)}")


def _pack(state: Any) -> bytes:
    file = io.BytesIO()
    # The zip format would add 1.1 kB to each state.
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _unpack(packed: bytes) -> Any:
    with safe_globals([*_NUMPY, *_STANDARD]):
        return torch.load(io.BytesIO(packed), weights_only=True)


def _types_in(value: Any) -> Iterator[object]:
    """Yield the types of all values and keys in a state, and the dtypes of its arrays."""
    yield type(value)
    if isinstance(value, np.ndarray):
        yield value.dtype
        if value.dtype.hasobject:
            yield from _types_in(value.tolist())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _types_in(key)
            yield from _types_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        # A text dataset's state has a list of thousands of tokens and is saved with every batch, so
        # plain items are not walked one by one.
        types = set(map(type, value))
        yield from types
        if not types <= {int, float, str, bool}:
            for item in value:
                yield from _types_in(item)


def _refusal(loader: Any, state: Any) -> LoaderStateError:
    place, value = _find_refused("", state)
    return LoaderStateError(
        f"the state_dict of the data loader ({name_loader(loader)}) must hold plain values, lists, dicts, "
        "tensors and NumPy arrays only, because other groups unpack it without running code, got "
        f"{_class_name(value)} at {place or 'its top'}; return a plain value instead, for instance "
        "generator.bit_generator.state"
    )


def _find_refused(place: str, value: Any) -> tuple[str, Any]:
    """Return the innermost value that cannot be unpacked, and its place in the state."""
    for key, item in _children(value):
        if not _survives_packing(item):
            return _find_refused(f"{place}[{key!r}]", item)
    return place, value


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key or index, child) of each value directly inside `value`; keys are children too."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, key
            yield key, item
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)


def _survives_packing(value: Any) -> bool:
    try:
        return set(_types_in(_unpack(_pack(value)))) == set(_types_in(value))
    except Exception:  # noqa: BLE001  # pickle raises errors of many classes; each refuses the value
        return False


def _class_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
