# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run's checkpoints: which of them are complete, and where each comes from.

A writer fills a folder of its own (`partial-10-group-0`), the manifest included, and one rename
makes it `step-10`. So a `step-` folder is complete, and two writers never share files.
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
"""DCP's table of what is in which file of a checkpoint."""
INDEX = "model.safetensors.index.json"
"""The table of an export in Hugging Face's format."""
OTHER_FOLDER_REMEDY = "give another checkpoint.folder or job.dump_folder"
LATEST = -1
"""`checkpoint.load_step` of a job that continues from the latest checkpoint."""
_SIGNS = (METADATA, INDEX)
"""torchtitan treats either file as the sign of a complete checkpoint."""
_CONTENTS = (MANIFEST, ".distcp", ".safetensors")
_STEP = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"partial-(\d+)-(.+)")
_ABANDONED_SECONDS = 3600.0
"""A partial folder without a change for this long has no writer any more. A file of 100 GB may take
20 minutes to sync."""
_OWN_DIGEST = "sha256"
"""Key of the digest of the manifest's other fields."""
_TYPES: dict[str, type] = {"int": int, "str": str, "bool": bool, "dict[str, str]": dict}


class DamagedError(Exception):
    """The bytes of a checkpoint are wrong. Another read would not help."""


@dataclass(frozen=True)
class Manifest:
    """The origin of a checkpoint; a file beside the data.

    Attributes:
        lineage: hash of the state, 12 hex digits.
        model: name and flavor.
        num_shards: shards of the data: group_size x the data-parallel degree of a group.
        writer: the group, as in "group-0".
        round_steps: steps of a group in a round; 1 without a semi-synchronous method, 0 if unknown.
        job_id: `fault_tolerance.job_id` of the writer.
        load_step: `checkpoint.load_step` of the writer.
        save_id: differs between any two saves, even of one step; hex digits.
        table: digest of the table of files as it was written, see `digest_table`; empty = unknown.
        digests: digests of the parts of the state by name, see `digest`.
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
        """The job and its first step. Saves of one branch follow on each other."""
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
    """Return the SHA-256 of a checkpoint's table of files; empty if it has none.

    Raises:
        OSError: the file system does not answer.
    """
    for sign in _SIGNS:
        with contextlib.suppress(FileNotFoundError):
            return hashlib.sha256((folder / sign).read_bytes()).hexdigest()
    return ""


def _check_own_digest(values: Any) -> None:
    """Compare a manifest's fields with the digest among them. Earlier versions wrote no digest.

    Without the check, one flipped bit may name another dataset. The data would then begin again
    without need.

    Raises:
        ValueError: the fields are not as written.
    """
    digest = values.get(_OWN_DIGEST)
    if digest is not None and digest != _digest_values(values):
        raise ValueError(f"its {_OWN_DIGEST} is another one")


def _digest_values(values: dict[str, Any]) -> str:
    fields = {name: value for name, value in values.items() if name != _OWN_DIGEST}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _parse(values: Any) -> Manifest:
    known = {}
    for each in dataclasses.fields(Manifest):
        if each.name not in values:
            continue
        value = known[each.name] = values[each.name]
        if type(value) is not _TYPES[str(each.type)]:
            raise TypeError(f"{each.name} is {value!r}")
    manifest = Manifest(**known)
    int(manifest.lineage, 16)
    return manifest


def check_model(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the checkpoint in `folder` holds this run's model, if its manifest names a model.

    Raises:
        ConfigError: the checkpoint holds another model.
    """
    if earlier is not None and earlier.model != now.model:
        raise ConfigError(
            f"checkpoint: {folder} must be of the model {now.model} (model.name, model.flavor), "
            f"got {earlier.model}; {OTHER_FOLDER_REMEDY}"
        )


def check_rounds(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the checkpoint in `folder` has rounds of this run's length, if its manifest gives
    a length.

    Updates are numbered by rounds. After a change of the length, a step would belong to two
    numbers.

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


def data_change(earlier: Manifest | None, now: Manifest) -> str:
    """Return the reason why the data of an earlier run cannot be continued; empty if they can.

    The numbers of groups and ranks may differ.
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
    return _steps(folder, is_complete)


def torn_steps(folder: str | Path) -> list[int]:
    """Return the steps of checkpoints that have a manifest or data, but have lost their table."""

    def is_torn(path: Path) -> bool:
        if is_complete(path):
            return False
        return any(child.name.endswith(_CONTENTS) for child in _children(path))

    return _steps(folder, is_torn)


def _steps(folder: str | Path, counts: Callable[[Path], bool], after: int = -1) -> list[int]:
    found = []
    for path in _children(Path(folder)):
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) > after and counts(path):
            found.append(int(match[1]))
    return sorted(found)


def is_complete(folder: Path) -> bool:
    """Return True if a checkpoint's folder has all of its data."""
    return any((folder / sign).is_file() for sign in _SIGNS)


def partial_folder(target: Path, step: int, name: str) -> Path:
    """Return the folder in which the writer `name` writes the checkpoint `target` of `step`."""
    return target.with_name(f"partial-{step}-{name}")


def partial_sizes(folder: Path, step: int, name: str) -> dict[str, int]:
    """Return the bytes of each file of `step` that writers other than `name` are writing now."""
    own = partial_folder(folder / f"step-{step}", step, name).name
    sizes: dict[str, int] = {}
    for path in folder.glob(f"partial-{step}-*/*"):
        if path.parent.name != own:
            # The file may be published or removed meanwhile.
            with contextlib.suppress(OSError):
                sizes[f"{path.parent.name}/{path.name}"] = path.stat().st_size
    return sizes


def publish(partial: Path, target: Path, manifest: Manifest) -> list[Path]:
    """Turn a folder with a whole checkpoint, manifest included, into the checkpoint `target`.

    A former checkpoint of this step and branch is replaced. One of another branch is set aside, and
    so are later steps of other branches, because a job that went back has abandoned them. Left in
    place, they would be the latest checkpoint of the next launch, and torchtitan would purge the
    new branch first, whose steps are earlier. A job that went back to `load_step` has abandoned all
    later steps: if its own first save is damaged, the next start must not resume from them.

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
            # Keep the former checkpoint rather than none.
            with contextlib.suppress(OSError):
                replaced.rename(target)
            raise
        # Another group has just published the same step, so no checkpoint is missing.
        shutil.rmtree(partial, ignore_errors=True)
    aside = []
    if is_complete(replaced) and _branch_of(replaced) != manifest.branch:
        aside.append(_set_aside(replaced, manifest.step))
    shutil.rmtree(replaced, ignore_errors=True)
    left_at = manifest.step if manifest.load_step == LATEST else manifest.load_step
    for step in _steps(target.parent, is_complete, after=left_at):
        later = target.with_name(f"step-{step}")
        if _branch_of(later) not in (manifest.branch, None):
            aside.append(_set_aside(later, step))
    return [path for path in aside if path is not None]


def _branch_of(folder: Path) -> tuple[str, int] | None:
    """Return the branch of a checkpoint; None if the file system does not answer."""
    try:
        manifest = Manifest.read(folder)
    except DamagedError:
        manifest = None
    except OSError:
        return None
    if manifest is None:
        return "", LATEST - 1  # A branch that no job has.
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


def take_abandoned(folder: Path, name: str) -> list[Path]:
    """Rename partial folders without a living writer, so that they can be deleted.

    The caller is the group `name`, and is not writing now, so its own folders are abandoned. A
    folder of another group is abandoned if nothing in it has changed for an hour.

    Returns:
        The folders to delete.
    """
    doomed = []
    # The time of the file server: the clock of this host may differ.
    now = _newest_change([folder, *_children(folder)])
    for path in _children(folder):
        match = _PARTIAL.fullmatch(path.name)
        if not match:
            continue
        is_own = match[2] in (name, f"{name}-replaced")
        if is_own or now - _newest_change(_all_in(path)) > _ABANDONED_SECONDS:
            doomed.append(discard(path, int(match[1])))
    return [path for path in doomed if path is not None]


def _all_in(folder: Path) -> Iterator[Path]:
    """Yield a folder and all files and folders below it; skips entries that vanish meanwhile."""
    for place, _, files in os.walk(folder):
        yield Path(place)
        yield from (Path(place, name) for name in files)


def _newest_change(paths: Iterable[Path]) -> float:
    """Return the time of the latest change of `paths`, in seconds; 0 if all of them are gone."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def writer_of(target: Path) -> str:
    """Return the writer of the checkpoint `target`; empty if it is gone or names no writer."""
    try:
        manifest = Manifest.read(target)
    except (DamagedError, OSError):
        return ""
    return "" if manifest is None else manifest.writer


def manifest_of(target: Path) -> Manifest | None:
    """Return the manifest of the checkpoint `target`; None if it is not complete, or cannot be
    read.
    """
    try:
        return Manifest.read(target) if is_complete(target) else None
    except (DamagedError, OSError):
        return None


def discard(target: Path, step: int) -> Path | None:
    """Rename a folder before its deletion, so that a half-deleted folder never looks complete.

    Returns:
        The folder to delete; None if it is gone already.
    """
    # A new name each time: the remains of a killed deletion may have any earlier name.
    doomed = partial_folder(target, step, f"purged-{secrets.token_hex(4)}")
    try:
        target.rename(doomed)
    except OSError:  # Another group was faster.
        return None
    return doomed


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
