# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint folder that all groups share, and the manifest of each checkpoint.

Names in the folder:

- `step-10`: a published checkpoint.
- `partial-10-group-0`: a save that group 0 has not published yet. One rename makes it `step-10`
  (`publish`), so two writers never share files.
- `partial-10-group-0-replaced`: a checkpoint that a save of the same step has just replaced.
- `partial-10-purged-HEX`: a folder that is being deleted (`rename_for_deletion`).
- `aside-10-0`: a checkpoint of another branch, kept for the user. A *branch* is the sequence of
  saves of one job that began at one step.

A *manifest* is the file `titan_ft.json` in a checkpoint. A *table* is the file that says which
tensor is in which file of a checkpoint: DCP's `.metadata`, or the index of Hugging Face's format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import titan_ft
from titan_ft.config import TABLE, ConfigError
from titan_ft.system.ownership import no_follow

logger = logging.getLogger(__name__)

MANIFEST = "titan_ft.json"
METADATA = ".metadata"
"""DCP's table."""
INDEX = "model.safetensors.index.json"
"""The table of Hugging Face's format."""
OTHER_FOLDER_REMEDY = "give another checkpoint.folder or job.dump_folder"
LATEST = -1
"""`checkpoint.load_step` of a job that continues from the latest checkpoint."""
_TABLES = (METADATA, INDEX)
"""torchtitan treats either file as the sign of a complete checkpoint."""
_DATA_ENDINGS = (MANIFEST, ".distcp", ".safetensors")
"""Ends of the names of a checkpoint's other files."""
_STEP = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"partial-(\d+)-(.+)")
_ABANDONED_SECONDS = 3600.0
"""A partial folder without a change for this long has no writer any more. A file of 100 GB may take
20 minutes to sync."""
_OWN_DIGEST = "sha256"
"""Key of the digest of the manifest's other fields."""
_TYPES_BY_ANNOTATION: dict[str, type] = {
    "int": int,
    "str": str,
    "bool": bool,
    "dict[str, str]": dict,
}
"""Types of the fields of `Manifest`, whose annotations are strings at run time."""


class DamagedError(Exception):
    """The bytes of a checkpoint are wrong. Another read would not help."""


@dataclass(frozen=True)
class Manifest:
    """The origin and the digests of a checkpoint.

    A manifest of an earlier version may lack the fields that have a default here.

    Attributes:
        lineage: hash of the history of the state, 12 hex digits.
        model: torchtitan's name of the model, and its flavor.
        num_shards: shards of the data: group_size x the data-parallel degree of a group.
        model_only: True if the checkpoint holds no training state.
        version: version of titan_ft that wrote the checkpoint.
        writer: the group that wrote the checkpoint, as in "group-0".
        round_steps: steps of a group in a round; 1 without a semi-synchronous method, 0 if unknown.
        job_id: `fault_tolerance.job_id` of the writer.
        load_step: `checkpoint.load_step` of the writer.
        save_id: differs between any two saves, even of one step; hex digits.
        table: digest of the table as it was written, see `digest_table`; empty = unknown.
        digests: digest of each part of the state by name, see `digest.take_digests`.
    """

    step: int
    lineage: str
    model: str
    dataset: str
    seq_len: int
    num_shards: int
    model_only: bool
    version: str = titan_ft.__version__
    writer: str = ""
    round_steps: int = 0
    job_id: str = ""
    load_step: int = LATEST
    save_id: str = ""
    table: str = ""
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def branch(self) -> tuple[str, int]:
        """The job's id and the step from which the user let it begin."""
        return self.job_id, self.load_step

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """Read a checkpoint's manifest; None if it has none, like stock torchtitan's checkpoints.

        Raises:
            DamagedError: the file is no manifest.
            OSError: the file system does not answer.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            _check_own_digest(values)
            return _parse(values)
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise DamagedError(f"{MANIFEST} is a folder") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} is no manifest ({error!r})") from error

    def write(self, folder: Path) -> None:
        """Write the manifest into a checkpoint's folder.

        Adds the digest of the table there, and the digest of the manifest itself.

        Raises:
            OSError: the manifest cannot be written, or the table cannot be read.
        """
        values = dataclasses.asdict(self) | {"table": digest_table(folder)}
        values[_OWN_DIGEST] = _digest_values(values)
        with open(folder / MANIFEST, "w", opener=no_follow) as file:
            file.write(json.dumps(values, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())  # DCP syncs the data too.


def digest_table(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's table; empty if it has none.

    Raises:
        OSError: the file system does not answer.
    """
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):
            return hashlib.sha256((folder / table).read_bytes()).hexdigest()
    return ""


def _check_own_digest(values: Any) -> None:
    """Compare a manifest's fields with the digest that is one of them.

    Without the check, one flipped bit may name another dataset. The data would then begin again
    without need.

    Raises:
        ValueError: the fields are not as written.
    """
    # None: an earlier version wrote this manifest, without the digest.
    digest = values.get(_OWN_DIGEST)
    if digest is not None and digest != _digest_values(values):
        raise ValueError(f"its {_OWN_DIGEST} is another one")


def _digest_values(values: dict[str, Any]) -> str:
    fields = {name: value for name, value in values.items() if name != _OWN_DIGEST}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _parse(values: Any) -> Manifest:
    """Return a manifest with the known fields of `values`.

    Raises:
        TypeError: a field is missing, or has a value of another type.
        ValueError: the lineage is no hex number.
    """
    known: dict[str, Any] = {}
    for field_of_manifest in dataclasses.fields(Manifest):
        name = field_of_manifest.name
        if name not in values:
            continue
        value = values[name]
        if type(value) is not _TYPES_BY_ANNOTATION[str(field_of_manifest.type)]:
            raise TypeError(f"{name} is {value!r}")
        known[name] = value
    manifest = Manifest(**known)
    int(manifest.lineage, 16)
    return manifest


def check_model(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the checkpoint in `folder` holds this run's model.

    Args:
        earlier: the checkpoint's manifest; None if it has none, and then nothing is checked.
        now: the manifest that a save of this run would have.

    Raises:
        ConfigError: the checkpoint holds another model.
    """
    if earlier is not None and earlier.model != now.model:
        raise ConfigError(
            f"checkpoint: {folder} must be of the model {now.model} (model.name, model.flavor), "
            f"got {earlier.model}; {OTHER_FOLDER_REMEDY}"
        )


def check_rounds(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the checkpoint in `folder` comes from rounds of this run's length.

    An update has the number of its round. After a change of the length, the step of the checkpoint
    would belong to another round.

    Args:
        earlier: the checkpoint's manifest; None if it has none, and then nothing is checked.
        now: the manifest that a save of this run would have.

    Raises:
        ConfigError: the lengths differ.
    """
    if earlier is None or not earlier.round_steps:
        return
    length = earlier.round_steps
    if length != now.round_steps:
        raise ConfigError(
            f"{TABLE}.sync_steps (divided by num_fragments, or 1 without semi_sync_method) must be "
            f"{length}, as in the run that wrote {folder}, got {now.round_steps}; set it back, or "
            "begin with that model: as checkpoint.initial_load_path, with another "
            "checkpoint.folder"
        )


def find_data_change(earlier: Manifest | None, now: Manifest) -> str:
    """Return the reason why this run cannot continue the data of a checkpoint; empty if it can.

    The data can be continued with another number of groups and ranks, if the shards stay the same.
    """
    if earlier is None:
        return "the checkpoint is not of a fault-tolerant run"
    if earlier.dataset != now.dataset:
        return f"training.dataset was {earlier.dataset} and is {now.dataset}"
    if earlier.num_shards != now.num_shards:
        cut = f"it was cut into {earlier.num_shards} shards, now into {now.num_shards}"
        return f"{cut} (fault_tolerance.group_size x the data-parallel degree of a group)"
    return ""


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order."""
    return _find_steps(folder, is_complete)


def torn_steps(folder: str | Path) -> list[int]:
    """Return the steps of checkpoints that have a manifest or data, but have lost their table."""

    def is_torn(path: Path) -> bool:
        if is_complete(path):
            return False
        return any(child.name.endswith(_DATA_ENDINGS) for child in _children(path))

    return _find_steps(folder, is_torn)


def _find_steps(
    folder: str | Path, is_wanted: Callable[[Path], bool], after: int = -1
) -> list[int]:
    """Return the steps after `after` whose folders are wanted, in order."""
    steps = []
    for path in _children(Path(folder)):
        match = _STEP.fullmatch(path.name)
        if match is None:
            continue
        step = int(match[1])
        if step > after and is_wanted(path):
            steps.append(step)
    return sorted(steps)


def is_complete(folder: Path) -> bool:
    """Return True if a checkpoint's folder has a table."""
    return any((folder / table).is_file() for table in _TABLES)


def partial_folder(target: Path, step: int, name: str) -> Path:
    """Return the folder in which the writer `name` writes the checkpoint `target` of `step`."""
    return target.with_name(f"partial-{step}-{name}")


def partial_sizes(folder: Path, step: int, name: str) -> dict[str, int]:
    """Return the size of each file in the partial folders of `step`, by its path.

    The folder of the writer `name` is left out.
    """
    own = partial_folder(folder / f"step-{step}", step, name).name
    sizes: dict[str, int] = {}
    for path in folder.glob(f"partial-{step}-*/*"):
        if path.parent.name != own:
            # The file may be published or removed meanwhile.
            with contextlib.suppress(OSError):
                sizes[f"{path.parent.name}/{path.name}"] = path.stat().st_size
    return sizes


def publish(partial: Path, target: Path, manifest: Manifest) -> list[Path]:
    """Rename a complete partial folder, manifest included, to the checkpoint `target`.

    1. An earlier checkpoint of this step is replaced. If it is of another branch, it is set aside.
    2. Later checkpoints of other branches are set aside: this job went back before them, and has
       abandoned them. Left in place, they would be the latest checkpoints at the next launch, and
       torchtitan would purge the earlier steps of this branch first.

    Returns:
        The folders of checkpoints that were set aside.

    Raises:
        OSError: the folder could not be written or renamed.
    """
    replaced = partial.with_name(f"{partial.name}-replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if not is_complete(target):
            # Keep the earlier checkpoint rather than none.
            with contextlib.suppress(OSError):
                replaced.rename(target)
            raise
        # Another group has just published the same step, so no checkpoint is missing.
        shutil.rmtree(partial, ignore_errors=True)
    aside = []
    if is_complete(replaced) and _read_branch(replaced) != manifest.branch:
        aside.append(_set_aside(replaced, manifest.step))
    shutil.rmtree(replaced, ignore_errors=True)
    if manifest.load_step == LATEST:
        first_abandoned_after = manifest.step
    else:
        # Also steps between `load_step` and this save: if this save turns out to be damaged, the
        # next start must not resume from them.
        first_abandoned_after = manifest.load_step
    for step in _find_steps(target.parent, is_complete, after=first_abandoned_after):
        later = target.with_name(f"step-{step}")
        branch = _read_branch(later)
        is_of_other_branch = branch is not None and branch != manifest.branch
        if is_of_other_branch:
            aside.append(_set_aside(later, step))
    return [path for path in aside if path is not None]


def _read_branch(folder: Path) -> tuple[str, int] | None:
    """Return the branch of a checkpoint; None if the file system does not answer."""
    try:
        manifest = Manifest.read(folder)
    except DamagedError:
        manifest = None
    except OSError:
        return None
    if manifest is None:
        # Stock torchtitan's checkpoint, or a damaged one. No job of this project has this branch.
        return "", LATEST - 1
    return manifest.branch


def _set_aside(folder: Path, step: int) -> Path | None:
    """Rename a checkpoint so that neither this project nor torchtitan finds it any more.

    torchtitan treats every folder whose name contains "step-20" as a checkpoint.

    Returns:
        The new path; None if the rename failed.
    """
    for number in range(100):
        target = folder.with_name(f"aside-{step}-{number}")
        if target.exists():
            continue
        try:
            folder.rename(target)
        except FileNotFoundError:  # Another group was faster.
            return None
        except OSError as error:
            logger.warning("%s cannot be set aside as %s: %s", folder, target.name, error)
            continue
        return target
    return None


def rename_abandoned(folder: Path, name: str) -> list[Path]:
    """Rename partial folders without a living writer, so that they can be deleted.

    The caller is the group `name`, and is not writing now, so its own folders are abandoned. A
    folder of another group is abandoned if nothing in it has changed for an hour.

    Returns:
        The folders to delete.
    """
    renamed = []
    # The time of the file server: the clock of this host may differ.
    now = _latest_change([folder, *_children(folder)])
    for path in _children(folder):
        match = _PARTIAL.fullmatch(path.name)
        if not match:
            continue
        step = int(match[1])
        writer = match[2]
        is_own = writer in (name, f"{name}-replaced")
        if is_own or now - _latest_change(_walk(path)) > _ABANDONED_SECONDS:
            renamed.append(rename_for_deletion(path, step))
    return [path for path in renamed if path is not None]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield a folder and all files and folders below it; skips entries that vanish meanwhile."""
    for place, _, files in os.walk(folder):
        yield Path(place)
        yield from (Path(place, name) for name in files)


def _latest_change(paths: Iterable[Path]) -> float:
    """Return the time of the latest change of `paths`, in seconds; 0 if all of them are gone."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def find_writer(target: Path) -> str:
    """Return the writer of the checkpoint `target`; empty if it is gone or names no writer."""
    try:
        manifest = Manifest.read(target)
    except (DamagedError, OSError):
        return ""
    return "" if manifest is None else manifest.writer


def read_complete_manifest(target: Path) -> Manifest | None:
    """Return the manifest of the checkpoint `target`; None if it is not complete, or cannot be
    read.
    """
    try:
        return Manifest.read(target) if is_complete(target) else None
    except (DamagedError, OSError):
        return None


def rename_for_deletion(target: Path, step: int) -> Path | None:
    """Rename a folder before its deletion, so that a half-deleted folder never looks complete.

    Returns:
        The folder to delete; None if it is gone already.
    """
    # A new name each time: a deletion that was killed may have left any earlier name.
    renamed = partial_folder(target, step, f"purged-{secrets.token_hex(4)}")
    try:
        target.rename(renamed)
    except OSError:  # Another group was faster.
        return None
    return renamed


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
