# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack the state of a data loader for other groups, and unpack theirs.

A state travels in every exchange, in every heal and in checkpoints, and comes from other processes. So
it is unpacked without running code: `torch.load(weights_only=True)`, with NumPy's types and a few of the
standard library's allowed besides. A state that could not be unpacked would end each group that heals,
hours after it was saved. `save_loader` therefore reads back each new combination of types at once.
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

streams.patch()  # before anybody opens a stream: a state that was saved unpatched has no place in it

_NUMPY: list[Any] = [
    multiarray._reconstruct,
    multiarray.scalar,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]
_STANDARD: list[Any] = [
    bytes,  # the empty one: others are allowed by torch
    frozenset,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
]
_read_back: set[tuple[type, frozenset[object]]] = set()
"""Loaders' classes with the types in their states, of states that were unpacked already."""


class LoaderStateError(ConfigError, TypeError):
    """A loader's state holds a value that cannot be unpacked in another process."""


def save_loader(loader: Any) -> bytes:
    """Pack the state of a data loader.

    Raises:
        LoaderStateError: the state holds a value that other groups could not unpack; names the loader's
            class, the value's place in the state and its type.
    """
    # torchtitan's loader wraps the state in a pickle of its own, named after the rank. torchdata's is plain.
    is_torchdata = isinstance(loader, StatefulDataLoader)
    state = StatefulDataLoader.state_dict(loader) if is_torchdata else loader.state_dict()
    kind = (type(loader), frozenset(_types_in(state)))
    if kind in _read_back:
        return _pack(state)
    try:
        packed = _pack(state)
        same = set(_types_in(_unpack(packed))) == set(kind[1])
    except Exception as error:  # pickle raises errors of many classes
        raise _refusal(loader, state) from error
    if not same:
        raise _refusal(loader, state)
    _read_back.add(kind)
    return packed


def load_loader(loader: Any, packed: bytes) -> None:
    """Let a data loader go on where `save_loader` found another one of the same data."""
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
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _unpack(packed: bytes) -> Any:
    with safe_globals([*_NUMPY, *_STANDARD]):
        return torch.load(io.BytesIO(packed), weights_only=True)


def _types_in(value: Any) -> Iterator[object]:
    """Yield the types of all values in a state, its keys among them; of arrays the dtype as well."""
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
        # A text dataset's state has a list of thousands of tokens, and is saved with every batch.
        kinds = set(map(type, value))
        yield from kinds
        if not kinds <= {int, float, str, bool}:
            for item in value:
                yield from _types_in(item)


def _refusal(loader: Any, state: Any) -> LoaderStateError:
    place, value = _find_refused("", state)
    return LoaderStateError(
        f"the state_dict of the data loader ({name_loader(loader)}) must hold plain values, lists, dicts, "
        "tensors and NumPy arrays only, because other groups unpack it without running code, got "
        f"{_class_name(value)} at {place or 'its top'}; return such values in its place, for instance "
        "generator.bit_generator.state"
    )


def _find_refused(place: str, value: Any) -> tuple[str, Any]:
    """Return the innermost value that cannot be unpacked, and its place in the state."""
    for key, item in _items(value):
        if not _travels(item):
            return _find_refused(f"{place}[{key!r}]", item)
    return place, value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key, key
            yield key, item
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)


def _travels(value: Any) -> bool:
    try:
        return set(_types_in(_unpack(_pack(value)))) == set(_types_in(value))
    except Exception:  # noqa: BLE001  # whatever pickle says of it, it is the value that was looked for
        return False


def _class_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
