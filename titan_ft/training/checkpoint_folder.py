# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a run's checkpoints: which are complete, and what each was made of.

A checkpoint is written in a folder of its writer (`partial-10-group-0`), which becomes `step-10` by one rename once all
of it is there, the manifest included. So a `step-` folder is complete, and two writers never share files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import titan_ft
from titan_ft.config import TABLE, ConfigError

MANIFEST = "titan_ft.json"
ELSEWHERE = "give another checkpoint.folder or job.dump_folder"
_SIGNS = (".metadata", "model.safetensors.index.json")  # what torchtitan takes for the sign of a whole checkpoint
_STEP = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"partial-(\d+)-.*")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint was made of; lies beside its data."""

    step: int
    lineage: str  # 12 hex digits
    model: str  # name and flavor
    dataset: str
    seq_len: int
    num_shards: int  # that the data was cut into: group_size x the data-parallel degree of a group
    model_only: bool
    version: str = titan_ft.__version__
    writer: str = ""  # the group, as in "group-0"
    round_steps: int = 0  # of a group in a round, 1 without a semi-synchronous method; 0 = it does not say

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """Read a checkpoint's manifest; None if it has none, as stock torchtitan's.

        Raises:
            ConfigError: it is damaged.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text())
            return Manifest(**{f.name: values[f.name] for f in dataclasses.fields(Manifest) if f.name in values})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"checkpoint: {path} must be a manifest, got {error!r}; remove it to begin the data anew, or give "
                "another checkpoint.folder"
            ) from error

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        with (folder / MANIFEST).open("w") as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())  # as DCP does with the data


def check_model(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the checkpoint in `folder` is one of this run's model, if it says of which.

    Raises:
        ConfigError: it is another's.
    """
    if earlier is not None and earlier.model != now.model:
        raise ConfigError(
            f"checkpoint: {folder} must be of the model {now.model} (model.name, model.flavor), got {earlier.model}; "
            f"{ELSEWHERE}"
        )


def check_rounds(earlier: Manifest | None, now: Manifest, folder: str) -> None:
    """Check that the rounds of the checkpoint in `folder` are as long as this run's, if it says how long.

    Rounds are counted by their length: one that goes on in the midst of another would have another's number.

    Raises:
        ConfigError: they are not.
    """
    length = now.round_steps if earlier is None else earlier.round_steps or now.round_steps
    if length != now.round_steps:
        raise ConfigError(
            f"{TABLE}.sync_steps (divided by num_fragments, or 1 without semi_sync_method) must be {length}, as in "
            f"the run that wrote {folder}, got {now.round_steps}; set it back, or begin with that model: as "
            "checkpoint.initial_load_path, with another checkpoint.folder"
        )


def data_change(earlier: Manifest | None, now: Manifest) -> str:
    """Say why the data of an earlier run cannot be continued; empty if it can, however groups and ranks share it."""
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
    found = ((_STEP.fullmatch(path.name), path) for path in _children(Path(folder)))
    return sorted(int(match[1]) for match, path in found if match and is_complete(path))


def is_complete(folder: Path) -> bool:
    """Say whether a checkpoint's folder has all of its data."""
    return any((folder / sign).is_file() for sign in _SIGNS)


def partial_folder(target: Path, step: int, name: str) -> Path:
    """Return where the checkpoint `target` of `step` is written by the writer called `name`."""
    return target.with_name(f"partial-{step}-{name}")


def publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Turn a folder that holds all of a checkpoint into the checkpoint `target`, in place of one that is there.

    Partial folders of earlier steps are removed: what they hold is of no use any more.

    Raises:
        OSError: it could not be written or renamed.
    """
    manifest.write(partial)
    replaced = partial.with_name(f"{partial.name}-replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if not is_complete(target):
            raise
        # Another group has published the same step in this very moment: nothing is lacking.
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    for path in _children(target.parent):
        match = _PARTIAL.fullmatch(path.name)
        if match and int(match[1]) < manifest.step:
            shutil.rmtree(path, ignore_errors=True)


def writer_of(target: Path) -> str:
    """Return the writer of the checkpoint `target`; empty if it is gone, or does not say it."""
    try:
        manifest = Manifest.read(target)
    except (ConfigError, OSError):
        return ""
    return "" if manifest is None else manifest.writer


def discard(target: Path, step: int) -> Path | None:
    """Rename a checkpoint that is to be deleted, so that half of it never looks complete; None if it is gone already.

    Returns:
        What to delete.
    """
    doomed = partial_folder(target, step, "purged")
    try:
        target.rename(doomed)
    except OSError:  # another group was faster
        return None
    return doomed


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
