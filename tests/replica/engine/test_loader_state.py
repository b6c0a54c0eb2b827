# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""States of data loaders arrive unchanged.

A state that cannot travel is refused when it is saved.
"""

from __future__ import annotations

import collections
import datetime
import enum
import pathlib
import pickle
import random
import threading
import zoneinfo
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.config import ConfigError
from titan_ft.engine import loader_state
from titan_ft.engine.loader_state import load_loader, save_loader


class Loader:
    """A user's own loader."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Color(enum.IntEnum):
    RED = 1


def round_trip(state: Any) -> Any:
    other = Loader()
    load_loader(other, save_loader(Loader(state)))
    return other.state


TRAVELS = {
    "plain": {"a": [1, 2.5, True, None, "x", b"", b"xx", 1j, 1 << 200], ("t", 1): {3, 4}},
    "NumPy's generator": np.random.RandomState(0).get_state(),
    "NumPy's newer generator": np.random.default_rng(0).bit_generator.state,
    "Mersenne Twister": np.random.Generator(np.random.MT19937(1)).bit_generator.state,
    "Python's generator": random.Random(1).getstate(),
    "torch's generator": torch.get_rng_state(),
    "scalars": [
        np.int64(3),
        np.float32(0.5),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2026-11-26"),
    ],
    "key": {np.int32(3): 1},
    "empty": np.zeros((0, 3)),
    "structured": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "texts": np.array(["a", "bc"]),
    "objects": np.array([1, "a", None], dtype=object),
    "tensors": {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)},
    "standard": [frozenset({1}), range(3), datetime.datetime(2026, 11, 26), datetime.timedelta(1)],
    "collections": [collections.OrderedDict(a=1), collections.Counter("aab")],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("name", TRAVELS)
def test_what_travels_arrives_as_it_was(name: str) -> None:
    state = {"deep": [TRAVELS[name]]}
    assert same(round_trip(state), state)


REFUSED = {
    "a generator": (np.random.default_rng(0), "numpy.random._generator.Generator"),
    "a path": (pathlib.PurePosixPath("/"), "pathlib.PurePosixPath"),
    "an enum": (Color.RED, "Color"),
    "a lambda": (lambda: 1, "function"),
    "a lock": (threading.Lock(), "_thread.lock"),
    "an iterator": (iter([1]), "list_iterator"),
    "a default dict": (collections.defaultdict(int), "collections.defaultdict"),
    "torch's generator itself": (torch.Generator(), "torch._C.Generator"),
    "an array of paths": (np.array([pathlib.PurePosixPath("/")], dtype=object), "numpy.ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused_at_once(name: str) -> None:
    """The error has one line: the loader's class, the place, the type, the remedy.

    Otherwise a heal would fail hours later.
    """
    value, kind = REFUSED[name]
    with pytest.raises(TypeError) as told:
        save_loader(Loader({"step": 1, "deep": [{"value": value}]}))
    assert isinstance(told.value, ConfigError), "the run ends with exit status 2"
    line = str(told.value)
    assert "\n" not in line
    for part in (
        "test_loader_state.Loader",
        "['deep'][0]['value']",
        kind,
        "return a plain value instead",
    ):
        assert part in line


def test_a_key_that_cannot_travel_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"got pathlib\.PurePosixPath at \['seen'\]\[PurePosixPath\('/'\)\]"
    ):
        save_loader(Loader({"seen": {pathlib.PurePosixPath("/"): 1}}))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def containing_itself() -> Any:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


ZONE = zoneinfo.ZoneInfo("UTC")
LATER = {
    "a longer int": (1, 1 << 2999, "an int of 3,000 bits"),
    "a longer int among others": ([3, 4], [3, -(1 << 2999)], "an int of 3,000 bits"),
    "another dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.uint16), "a torch.uint16 tensor"),
    "float8": (
        torch.zeros(2),
        torch.zeros(2).to(torch.float8_e4m3fn),
        "a torch.float8_e4m3fn tensor",
    ),
    "another time zone": (
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2026, 1, 1, tzinfo=ZONE),
        "datetime.datetime with a zoneinfo.ZoneInfo as its tzinfo",
    ),
    "nested": (
        nested(3),
        nested(3000),
        "a list that contains itself or is nested more than 200 levels deep",
    ),
    "nested mappings": (
        0,
        containing_itself(),
        "a dict that contains itself or is nested more than 200 levels deep",
    ),
    "objects": (np.zeros(3), np.array([pathlib.PurePosixPath("/")], dtype=object), "numpy.ndarray"),
    "text": ("a", "\ud800", None),
}


@pytest.mark.parametrize("name", LATER)
def test_a_state_whose_value_cannot_travel_later_is_refused_then(name: str) -> None:
    """The types are the same as before. A heal with such a state ended in UnpicklingError."""
    good, bad, what = LATER[name]
    loader = Loader({"at": {"value": good}, "tokens": [1, 2]})
    for _ in range(2):
        save_loader(loader)
    loader.state = {"at": {"value": bad}, "tokens": [1, 2]}
    if what is None:
        assert same(round_trip(loader.state), loader.state)
        return
    for _ in range(2):
        with pytest.raises(ConfigError) as told:
            save_loader(loader)
        line = str(told.value)
        assert f"got {what} at ['at']['value']" in line
        assert len(line) < 500
        assert "return a plain value instead, for instance" in line


def test_what_is_just_short_enough_travels() -> None:
    for value in ((1 << 2031) - 1, -(1 << 2031) + 1, nested(195)):
        assert same(round_trip({"value": value}), {"value": value})


def test_a_plain_state_is_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a text dataset is saved with each batch. Reading it back would take five times
    as long.
    """
    monkeypatch.delattr(loader_state, "_unpack")
    save_loader(
        Loader(
            {"at": 1, "tokens": list(range(1000)), "data": [None, True, 0.5, ("x", {"epoch": 0})]}
        )
    )
    with pytest.raises(ConfigError):
        save_loader(Loader({"at": np.zeros(3)}))


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(100)


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0), (1, 2), (0, 0), (1, 1)])
def test_a_state_is_of_a_number_of_workers(before: int, now: int) -> None:
    """With another number of workers, torchdata raised AssertionError at the first batch of each
    start.
    """
    saved = StatefulDataLoader(Numbers(), batch_size=2, num_workers=before)
    next(iter(saved))
    packed = save_loader(saved)
    loader = StatefulDataLoader(Numbers(), batch_size=2, num_workers=now)
    if before == now:
        load_loader(loader, packed)
        assert next(iter(loader)).tolist() == [2, 3]
        return
    rule = f"training.dataloader.num_workers must be {before}, with which .* got {now}; set it back"
    with pytest.raises(ConfigError, match=rule):
        load_loader(loader, packed)


def test_a_state_that_runs_code_is_not_loaded() -> None:
    """A state comes from another process, and may have been forged."""

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("attacked",)

    for packed in (pickle.dumps(Attack(), protocol=2), loader_state._pack({"a": Attack()})):
        with pytest.raises(pickle.UnpicklingError):
            load_loader(Loader(), packed)
