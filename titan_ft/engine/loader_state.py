# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Pack the state of a data loader for other groups, and unpack theirs.

The *state* of a loader is its position in the data. Replica groups send each other the states of
their loaders with every exchange and in every heal, and checkpoints hold them. So a state comes
from another process, and must be unpacked without running code: `torch.load(weights_only=True)`.
This module additionally allows NumPy's types (`_NUMPY`) and a few of the standard library's
(`_STANDARD`).

A state that could not be unpacked would end each group that heals, hours after the state was saved.
So `save_loader` unpacks each state once before it returns. Only a state of plain values is not
unpacked, because that takes time: 1.2 ms for 4 kB, where packing takes 0.3. The states of
torchtitan's text data are of this kind.
"""

from __future__ import annotations

import contextlib
import datetime
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.config import ConfigError
from titan_ft.host import streams
from titan_ft.protocol.errors import first_line

# At import, so before any stream of Hugging Face's `datasets` is opened: without the patches, the
# state of a stream lacks its position in the data.
streams.patch()

_NUMPY: list[Any] = [
    multiarray._reconstruct,
    multiarray.scalar,
    np.ndarray,
    np.dtype,
    # The class of every dtype, for instance np.dtypes.Float64DType: torch looks it up for each
    # array.
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]
_STANDARD: list[Any] = [
    bytes,  # for b"" only: pickle writes it as bytes(), and other bytes in a way that torch allows
    frozenset,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
]
_PLAIN: frozenset[object] = frozenset({type(None), bool, int, float, str, list, tuple, dict})
"""Kinds of values that can always be unpacked; see `_kinds_in`."""
_MAX_DEPTH = 200
"""Most levels of a state. pickle fails near a thousand levels, less the frames of its callers."""
_MAX_BITS = 2031
"""Most bits of an int. pickle writes longer ones with an opcode that `weights_only` lacks."""
_MAX_PLACE = 80
"""A message names the keys on the way to a value that is nested too deeply, up to this many
characters."""
_DEFAULT_REMEDY = "generator.bit_generator.state"  # example of a plain value, for a message


class LoaderStateError(ConfigError, TypeError):
    """A loader's state holds a value that cannot be unpacked in another process."""


def save_loader(loader: Any) -> bytes:
    """Pack the state of a data loader.

    Raises:
        LoaderStateError: the state holds a value that other groups could not unpack. The message
            names the loader's class, where the value is in the state, and its type.
    """
    # Call torchdata's method, not a subclass's override. torchtitan's override wraps the state in a
    # second pickle, under a key with the rank, and `weights_only` does not check what is inside.
    # So the additions of another subclass's override are not saved. `loader_check` finds such
    # loaders.
    if isinstance(loader, StatefulDataLoader):
        state = StatefulDataLoader.state_dict(loader)
    else:
        state = loader.state_dict()
    try:
        kinds = set(_kinds_in(state))
        packed = _pack(state)
        if kinds <= _PLAIN:
            return packed
        # A class whose `__reduce__` names a plain type is unpacked as that type, without an error.
        kinds_survive = kinds == set(_kinds_in(_unpack(packed)))
    except Exception as error:  # pickle raises errors of many classes
        raise _refusal(loader, state) from error
    if not kinds_survive:
        raise _refusal(loader, state)
    return packed


def load_loader(loader: Any, packed: bytes) -> None:
    """Resume a data loader at the position in `packed`, which another loader of the same data
    saved.

    Raises:
        ConfigError: the loader has another number of workers than the one that saved the state.
    """
    state = _unpack(packed)
    if isinstance(loader, StatefulDataLoader):
        _check_workers(loader, state)
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)


def _check_workers(loader: StatefulDataLoader[Any], state: Mapping[str, Any]) -> None:
    """Check that torchdata can load a state, which has a part for each worker.

    torchdata raised AssertionError at the first batch, and so each start of each group ended.
    """
    if "_snapshot" in state:
        saved_with = state["_snapshot"]["_main_snapshot"]["_num_workers"]
    elif "_num_yielded" in state:
        saved_with = 0
    else:
        return  # of another torchdata version, which checks by itself whether it can load this
    if loader.num_workers != saved_with:
        raise ConfigError(
            f"training.dataloader.num_workers must be {saved_with}, with which the place in the "
            f"data was saved, got {loader.num_workers}; set it back",
        )


def name_loader(loader: Any) -> str:
    """Return the classes of a data loader and of its dataset."""
    dataset = getattr(loader, "dataset", None)
    name = _class_name(loader)
    if dataset is None:
        return name
    return f"{name} of {_class_name(dataset)}"


def _pack(state: Any) -> bytes:
    file = io.BytesIO()
    # The zip format would add 1.1 kB to each state.
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def load_value(file: io.BytesIO) -> Any:
    """Read what `torch.save` has written, without running code from it.

    Raises:
        UnpicklingError: it contains a class that is neither torch's nor NumPy's nor in `_STANDARD`.
    """
    with safe_globals([*_NUMPY, *_STANDARD]):
        return torch.load(file, weights_only=True)


def find_refusal(value: Any) -> str:
    """Return why `load_value` refuses a value that `torch.save` wrote; empty = it does not."""
    try:
        if set(_kinds_in(value)) <= _PLAIN | {bytes}:
            return ""  # nearly always: 1.4 us a value, where a pickle to be read back takes 300
        file = io.BytesIO()
        torch.save(value, file)
    except Exception as error:  # noqa: BLE001  # pickle raises errors of many classes
        return f"a {_class_name(value)} that cannot be pickled ({first_line(error)})"
    file.seek(0)
    try:
        load_value(file)
    except Exception as error:  # noqa: BLE001
        file.seek(0)
        return ", ".join(find_refused_classes(file)) or first_line(error)
    return ""


def find_refused_classes(file: io.BytesIO) -> list[str]:
    """Return the classes and functions for which `load_value` refuses a value.

    The list is empty if the bytes are damaged.
    """
    # Damaged bytes raise anything.
    with safe_globals([*_NUMPY, *_STANDARD]), contextlib.suppress(Exception):
        return sorted(get_unsafe_globals_in_checkpoint(file))
    return []


def _unpack(packed: bytes) -> Any:
    return load_value(io.BytesIO(packed))


def _kinds_in(value: Any, depth: int = 0) -> Iterator[object]:
    """Yield the types of all values and keys in a state, and dtypes and sizes that matter.

    Together they decide whether the state can be unpacked.

    Raises:
        RecursionError: the state has more than `_MAX_DEPTH` levels, or contains itself.
    """
    if depth > _MAX_DEPTH:
        raise RecursionError
    yield from _kinds_of(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from _kinds_in(value.tolist(), depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _kinds_in(key, depth + 1)
            yield from _kinds_in(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        # A text dataset's state has a list of thousands of tokens and is saved with every batch, so
        # plain items are not walked one by one.
        if set(map(type, value)) == {int}:
            yield from _kinds_of(min(value))
            yield from _kinds_of(max(value))
            return
        for item in value:
            yield from _kinds_in(item, depth + 1)


def _kinds_of(value: Any) -> Iterator[object]:
    yield type(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        yield value.dtype
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        yield "long int"


def _refusal(loader: Any, state: Any) -> LoaderStateError:
    place, value = _find_refused("", state)
    what, remedy = _describe(value)
    return LoaderStateError(
        f"the state_dict of the data loader ({name_loader(loader)}) must hold plain values, "
        "lists, dicts, tensors and NumPy arrays only, because other groups unpack it without "
        f"running code, got {what} at {place or 'its top'}; return a plain value instead, for "
        f"instance {remedy}",
    )


def _describe(value: Any) -> tuple[str, str]:
    """Return which value this is, and a plain value that says the same."""
    if _is_too_deep(value):
        name = _class_name(value)
        what = f"a {name} that contains itself or is nested more than {_MAX_DEPTH} levels deep"
        return what, "a flat list"
    if isinstance(value, torch.Tensor):
        return (
            f"a {value.dtype} tensor",
            "tensor.to(torch.float32), tensor.to(torch.int64) or tensor.tolist()",
        )
    if type(value) is int:
        return f"an int of {value.bit_length():,} bits", "hex(value)"
    zone = getattr(value, "tzinfo", None)
    if zone is not None:
        return f"{_class_name(value)} with a {_class_name(zone)} as its tzinfo", "value.isoformat()"
    return _class_name(value), _DEFAULT_REMEDY


def _find_refused(place: str, value: Any) -> tuple[str, Any]:
    """Return the innermost value that cannot be unpacked, and its place in the state."""
    for key, item in _children(value):
        if not _survives_packing(item):
            found = f"{place}[{key!r}]"
            # Without this end, the place of a value that is nested too deeply would have thousands
            # of keys.
            ends_here = not isinstance(item, Mapping) or len(found) > _MAX_PLACE
            if ends_here and _is_too_deep(item):
                return found, item
            return _find_refused(found, item)
    return place, value


def _is_too_deep(value: Any) -> bool:
    try:
        for _ in _kinds_in(value):
            pass
    except RecursionError:
        return True
    return False


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
        return set(_kinds_in(_unpack(_pack(value)))) == set(_kinds_in(value))
    except Exception:  # noqa: BLE001  # pickle raises errors of many classes
        return False


def _class_name(value: Any) -> str:
    cls = type(value)
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"
