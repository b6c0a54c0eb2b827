# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Damage to a checkpoint: signs of it in the tables, and notes of loads that failed.

DCP detects a truncated file only during the load, and a changed byte in a tensor never. By then the
group has announced the step to the other groups and cannot take another one. So each failed load
leaves a note in the checkpoint's folder, and every later choice passes the checkpoint over.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from titan_ft.host.titan import TRAIN_STATE
from titan_ft.system.ownership import no_follow
from titan_ft.training.checkpoint.folder import (
    INDEX,
    MANIFEST,
    METADATA,
    DamagedError,
    Manifest,
    digest_table,
)
from titan_ft.training.checkpoint.reader import CheckpointReader, UnsafeValueError
from titan_ft.training.checkpoint.states import QUORUM_STATE

NOTES = "failed-load-*.json"
_UNREADABLE_LOADS = 3
"""A checkpoint counts as damaged after this many loads with an error of the file system."""
_ERRORS_OF_OTHER_STATE = (RuntimeError, ValueError)
"""DCP's errors for a missing key, and for another shape."""
_HEADER_BYTES = 8
"""A safetensors file begins with the length of its table, little-endian."""
_MAX_TABLE_BYTES = 100_000_000
"""safetensors has the same limit."""


class LoadFailure(enum.Enum):
    """Reason of a load that failed."""

    OTHER_STATE = enum.auto()
    """The checkpoint is sound, but belongs to another model or another run."""
    UNREADABLE = enum.auto()
    """The file system did not answer. The next try may succeed."""
    UNSAFE = enum.auto()
    """The bytes are sound, but hold a class that could run code."""
    DAMAGED = enum.auto()
    """The bytes are wrong."""


@dataclass(frozen=True)
class FailedLoad:
    """The note of a failed load, in the checkpoint's folder.

    Attributes:
        save_id: the manifest's. A checkpoint that replaces the damaged one has another id.
        damaged: True if the bytes were wrong; False if they could not be read.
        reason: the error on one line.
        by: name of the group.
        time: local time, for people.
    """

    save_id: str
    damaged: bool
    reason: str
    by: str
    time: str

    def write(self, folder: Path) -> None:
        """Write the note beside the data, where the choices of all groups find it.

        Each note is a file of its own, so that two groups never overwrite each other's.

        Raises:
            OSError: the note cannot be written.
        """
        path = folder / NOTES.replace("*", uuid.uuid4().hex[:12])
        with open(path, "w", opener=no_follow) as file:
            file.write(json.dumps(asdict(self), indent=2) + "\n")


def find_defect(folder: Path) -> str:
    """Return the defect that the tables of a checkpoint show; empty if they show none.

    Reads the manifest, the notes, the tables and the sizes of the files, but no data.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        manifest = Manifest.read(folder)
        _check_notes(folder, "" if manifest is None else manifest.save_id)
        _check_tables(folder, manifest)
    except DamagedError as error:
        return str(error)
    return ""


def is_model_only(folder: Path) -> bool:
    """Return True if a sound checkpoint holds a model only.

    Without a manifest, the table of the checkpoint shows it. Returns False if the checkpoint has
    vanished meanwhile: the choice notices that later, and begins anew.

    Raises:
        DamagedError: the manifest is damaged.
        OSError: the file system does not answer.
    """
    manifest = Manifest.read(folder)
    if manifest is not None:
        return manifest.model_only
    if (folder / METADATA).is_file():
        return not has_training_state(read_keys(folder))
    return (folder / INDEX).is_file()


def read_keys(folder: Path) -> Collection[str]:
    """Return the names of a checkpoint's entries; none for an export in Hugging Face's format."""
    if not (folder / METADATA).is_file():
        return ()
    return CheckpointReader(folder).read_metadata().state_dict_metadata


def has_training_state(keys: Collection[str]) -> bool:
    """Return True if a checkpoint with these entries holds more than a model."""
    return any(key.startswith(f"{TRAIN_STATE}.") for key in keys)


def classify(error: CheckpointException) -> tuple[LoadFailure, str]:
    """Return the kind of a failed load, and the reason of the first rank on one line.

    DCP compares names and shapes while it plans a load. After the plan it only reads bytes. Any
    other error of the plan comes from a table with changed bytes.
    """
    phase = error.args[0]
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, UnsafeValueError):
            return LoadFailure.UNSAFE, one_line(cause)
        # Before OSError, its base class: another start would fail in the same way.
        if isinstance(cause, PermissionError):
            return LoadFailure.DAMAGED, one_line(cause)
        # torch swallows the OSError of the table's file and raises a plain AssertionError, as it
        # does for changed bytes: torch/distributed/checkpoint/state_dict_loader.py,
        # _load_state_dict.
        if isinstance(cause, OSError) or "metadata is None" in str(cause):
            return LoadFailure.UNREADABLE, one_line(cause)
    is_other_state = all(type(cause) in _ERRORS_OF_OTHER_STATE for cause in causes)
    failure = LoadFailure.DAMAGED
    if phase == "plan" and is_other_state:
        failure = LoadFailure.OTHER_STATE
    return failure, one_line(causes[0])


def one_line(error: BaseException) -> str:
    """Return an error's message on one line. DCP's error has that of the first failed rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__


def _check_notes(folder: Path, save_id: str) -> None:
    """Check the notes of failed loads.

    Raises:
        DamagedError: a load found damage, or `_UNREADABLE_LOADS` loads could not read.
    """
    notes = [note for note in _read_notes(folder) if note.save_id == save_id]
    notes_of_damage = [note for note in notes if note.damaged]
    if notes_of_damage:
        note = notes_of_damage[0]
    elif len(notes) >= _UNREADABLE_LOADS:
        note = notes[-1]
    else:
        return
    raise DamagedError(
        f"{note.by} could not load it ({note.time}): {note.reason}; "
        f"to have it tried again, mend it and remove {NOTES} there"
    )


def _read_notes(folder: Path) -> Iterator[FailedLoad]:
    for path in sorted(folder.glob(NOTES)):
        # A full disk may have cut a note.
        with contextlib.suppress(ValueError, TypeError):
            yield FailedLoad(**json.loads(path.read_text()))


def _check_tables(folder: Path, manifest: Manifest | None) -> None:
    """Check the table of files, and the files that it names.

    Raises:
        DamagedError: the table or a file is damaged.
        OSError: the file system does not answer.
    """
    if (folder / METADATA).exists():
        table = METADATA
    elif (folder / INDEX).exists():
        table = INDEX
    else:
        raise DamagedError(f"{METADATA} is missing")
    try:
        # A manifest of an earlier version has no digest of the table.
        expected = "" if manifest is None else manifest.table
        if expected and digest_table(folder) != expected:
            raise DamagedError(f"{table} is not what was written (its digest is another one)")
        if table == METADATA:
            _check_data(folder, manifest)
        else:
            _check_export(folder)
    except IsADirectoryError as error:
        raise DamagedError(f"{Path(str(error.filename)).name} is a folder") from error
    except (OSError, DamagedError):
        raise
    except Exception as error:
        # A table with flipped bits may raise any exception.
        raise DamagedError(f"{table} cannot be read ({type(error).__name__}: {error})") from error


def _check_data(folder: Path, manifest: Manifest | None) -> None:
    """Check that all files that DCP's table names are there and long enough."""
    metadata = CheckpointReader(folder).read_metadata()
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA} is no table of a checkpoint")
    is_ours = any(key.startswith(f"{QUORUM_STATE}.") for key in metadata.state_dict_metadata)
    if is_ours and manifest is None:
        # Otherwise the checkpoint would count as stock torchtitan's: it would be loaded without a
        # check of its digests, and the data would begin again.
        raise DamagedError(f"{MANIFEST} is missing")
    min_bytes: dict[str, int] = defaultdict(int)
    for item in metadata.storage_data.values():
        end = item.offset + item.length
        min_bytes[item.relative_path] = max(min_bytes[item.relative_path], end)
    _check_files(folder, min_bytes)


def _check_export(folder: Path) -> None:
    """Check the files that an export's index names."""
    for name in set(json.loads((folder / INDEX).read_text())["weight_map"].values()):
        check_safetensors(folder / name)


def _check_files(folder: Path, min_bytes: Mapping[str, int]) -> None:
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    for name, expected in min_bytes.items():
        if sizes.get(name, -1) >= expected:
            continue
        # The listing may be old: ask again, in a slower way.
        size = _size_of(folder / name)
        if size is None:
            raise DamagedError(f"{name} is missing")
        if size < expected:
            raise DamagedError(f"{name} has {size:,} of {expected:,} bytes")


def _size_of(path: Path) -> int | None:
    """Return the size of a file as its server has it; None if it is missing.

    NFS may show a host an old listing for a minute. Opening a file asks the server.
    """
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return None


def check_safetensors(path: Path) -> None:
    """Check that a file of Hugging Face's format has all of its bytes.

    Raises:
        DamagedError: bytes are missing, or the table cannot be read.
        OSError: the file system does not answer.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_BYTES), "little")
            table: Any = json.loads(file.read(min(length, _MAX_TABLE_BYTES)))
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError as error:
        raise DamagedError(f"{path.name} is missing") from error
    except ValueError as error:
        raise DamagedError(f"{path.name} has no table of tensors ({error})") from error
    try:
        ends = [each["data_offsets"][1] for name, each in table.items() if name != "__metadata__"]
        expected = _HEADER_BYTES + length + max(ends, default=0)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedError(f"{path.name} has no place for a tensor ({error!r})") from error
    if size != expected:
        raise DamagedError(f"{path.name} has {size:,} of {expected:,} bytes")
