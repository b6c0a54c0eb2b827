# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint by another author is data, and runs no code."""

from __future__ import annotations

import collections
import datetime
import importlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from titan_ft.training.checkpoint.damage import LoadFailure, classify, find_defect
from titan_ft.training.checkpoint.reader import (
    CheckpointPlanner,
    CheckpointReader,
    UnsafeValueError,
    check_values,
)


class Payload:
    """Its pickle is a call that makes a folder in the unpickling process."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def save(folder: Path, **more: Any) -> dict[str, Any]:
    state = {
        "weight": torch.randn(4, 3),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "channels": torch.randn(2, 2, 2, 2).to(memory_format=torch.channels_last),
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.95), "state": [1, None, "text", b"bytes"]},
        **more,
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(
        state, storage_reader=CheckpointReader(folder), planner=CheckpointPlanner(), no_dist=True
    )
    return state


def test_a_checkpoint_of_dcp_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    """Tensors of all kinds, and what is no tensor."""
    saved = save(tmp_path / "step-1")
    found = load(
        tmp_path / "step-1",
        {
            "weight": torch.zeros(4, 3),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "channels": torch.zeros(2, 2, 2, 2),
            "optimizer": {"lr": 0.0, "betas": (0.0, 0.0), "state": [0, 0, "", b""]},
        },
    )
    assert found["optimizer"] == saved["optimizer"]
    for name in ("weight", "half", "channels"):
        assert torch.equal(found[name], saved[name])
    assert CheckpointReader(tmp_path / "step-1").read_metadata().state_dict_metadata.keys() >= {
        "weight",
        "half",
    }


def poison_table(folder: Path, mark: Path) -> None:
    """Put a call into the table, in the place of its storage's facts: the rest stays as it was."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.storage_meta = Payload(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def test_a_poisoned_table_runs_nothing(tmp_path: Path) -> None:
    """It counts as a damaged checkpoint, whose reason names the call."""
    folder, mark = tmp_path / "step-10", tmp_path / "mark"
    save(folder)
    poison_table(folder, mark)
    assert "posix.mkdir is no part of a checkpoint's table" in find_defect(folder)
    assert not mark.exists()
    with pytest.raises(CheckpointException):
        load(folder, {"weight": torch.zeros(4, 3)})
    assert not mark.exists()
    dcp.FileSystemReader(folder).read_metadata()
    assert mark.exists(), "torch's own reader runs it: the test attacks"


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value",
    [
        collections.deque([1]),
        Point(1),
        [Point(1)],
        {"deep": (Point(1),)},
        1 << 3000,
        Payload(Path("mark")),
    ],
    ids=["deque", "named tuple", "list", "dict", "long int", "class of a test"],
)
def test_a_save_refuses_what_a_load_refuses(tmp_path: Path, value: Any) -> None:
    """In each place of a state, and whatever the reason."""
    save(tmp_path / "step-1", extra=value)
    with pytest.raises((CheckpointException, KeyError)):
        load(tmp_path / "step-1", {"extra": None})
    with pytest.raises(UnsafeValueError, match="at extra"):
        check_values({"extra": value})


@pytest.mark.parametrize(
    "value",
    [b"bytes", None, 1 << 2000, {}, np.float64(0.5), datetime.timedelta(1)],
    ids=lambda value: type(value).__name__,
)
def test_a_save_takes_what_a_load_takes(tmp_path: Path, value: Any) -> None:
    """No plain value is refused."""
    save(tmp_path / "step-1", extra=value)
    load(tmp_path / "step-1", {"extra": value})
    check_values(
        {"extra": value, "tensor": torch.zeros(1), "more": [torch.zeros(1), {"text": "a"}]}
    )


@pytest.mark.parametrize(
    "target",
    [
        "pathlib PosixPath",
        "torch.distributed.checkpoint.metadata MetadataIndex",
        "torch.serialization _get_layout",
    ],
)
def test_a_table_changes_no_class_and_no_function(tmp_path: Path, target: str) -> None:
    """BUILD sets attributes of whatever is below it: `PosixPath._str` would replace every path of
    the process.
    """
    module, name = target.split()
    folder = tmp_path / "step-10"
    save(folder)
    state = b"N}\x8c\x05mark_\x8c\x04evils\x86b."  # (None, {"mark_": "evil"}), given to what is before it
    (folder / ".metadata").write_bytes(f"\x80\x04c{module}\n{name}\n".encode("latin-1") + state)
    assert "would be changed for good" in find_defect(folder)
    assert not hasattr(getattr(importlib.import_module(module), name), "mark_")


def test_a_poisoned_value_runs_nothing(tmp_path: Path) -> None:
    """What is no tensor is a pickle of its own."""
    folder, mark = tmp_path / "step-10", tmp_path / "mark"
    save(folder, extra=Payload(mark))
    with pytest.raises(CheckpointException, match="mkdir"):
        load(folder, {"extra": None})
    assert not mark.exists()
    dcp.load({"extra": None}, checkpoint_id=folder, no_dist=True)
    assert mark.exists(), "torch's own planner runs it: the test attacks"


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.arange(3), datetime.timedelta(1), range(3), frozenset({1})],
    ids=lambda v: type(v).__name__,
)
def test_plain_values_of_numpy_and_the_standard_library_are_read(
    tmp_path: Path, value: Any
) -> None:
    """Optimizers and schedulers keep such values."""
    save(tmp_path / "step-1", extra=[value])
    (found,) = load(tmp_path / "step-1", {"extra": [None]})["extra"]
    assert type(found) is type(value)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_a_class_that_is_refused_is_no_damage(tmp_path: Path) -> None:
    """A checkpoint that counts as damaged is passed over, and each older one holds such a value as
    well.
    """
    save(tmp_path / "step-1", extra=[collections.deque([1])])
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "step-1", {"extra": [None]})
    assert classify(caught.value) == (LoadFailure.UNSAFE, "collections.deque at extra")


@pytest.mark.parametrize(
    "name",
    [
        ("builtins", "eval"),
        ("os", "system"),
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("pathlib", "os.system"),
    ],
    ids=".".join,
)
def test_a_name_that_is_no_part_of_a_table_is_refused(
    tmp_path: Path, name: tuple[str, str]
) -> None:
    """The reader does not look the name up: neither a function, nor an attribute of an allowed
    name.
    """
    module, attribute = name
    pickled = pickle.PROTO + b"\x04"
    for text in (module, attribute):
        pickled += pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()
    (tmp_path / ".metadata").write_bytes(pickled + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(pickle.UnpicklingError, match="is no part of a checkpoint's table"):
        CheckpointReader(tmp_path).read_metadata()


@pytest.mark.parametrize("make", [lambda: Metadata({}), lambda: Metadata({}, storage_meta=None)])
def test_a_table_of_an_older_torch_is_read(tmp_path: Path, make: Callable[[], Metadata]) -> None:
    """Its storage's facts are missing."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(make(), protocol=2))
    reader = CheckpointReader(tmp_path)
    found = reader.read_metadata()
    assert found.storage_meta is not None
    assert found.storage_meta.load_id == reader.load_id
