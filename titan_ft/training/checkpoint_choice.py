# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which checkpoint a group loads: one choice for all of its ranks.

Rank 0 looks into the folder for all. Each rank for itself could find another checkpoint: an asynchronous save of
another group may be published between two looks, and a host may see a network folder as it was a while ago.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from titan_ft.config import ConfigError
from titan_ft.replica.errors import ReplicaError
from titan_ft.replica.row import fold48
from titan_ft.training.checkpoint_folder import MANIFEST, Manifest, complete_steps, is_complete

logger = logging.getLogger(__name__)

NONE = -1
"""Instead of a step: there is no checkpoint."""
_CHOICES = 3  # of checkpoints that vanish right after they were chosen
_SIGHT_SECONDS = 60.0  # NFS's default for how old a host's view of a folder may be
_LOOK_SECONDS = 0.05
_GONE, _UNREADABLE = 0, -1  # instead of a fingerprint
_PAUSE_SECONDS = 0.5  # before another choice: what vanished may be replaced just now

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""
T = TypeVar("T")


class LoadError(ReplicaError):
    """A checkpoint could not be read, or vanished; the group's next start may find one."""


def agree_on_step(folder: str, wanted: int, initial: str | None, rank: int, gather: Gather) -> int:
    """Return the step of the checkpoint in `folder` to load, or `NONE`: the same on all ranks. A collective.

    Args:
        wanted: the step to load; -1 = the latest.
        initial: folder of a model to begin with if there is no checkpoint yet; may be empty.

    Raises:
        ConfigError: the checkpoint is not complete, or not all ranks see it. On all ranks.
        LoadError: the folder cannot be read, or what was chosen there vanished. On all ranks.
    """
    choices = _CHOICES if wanted == -1 else 1
    for _ in range(choices):
        step = gather(together(lambda: _choose(folder, wanted) if rank == 0 else NONE, folder, gather))[0]
        if step == NONE:
            if initial:
                _check_all_see_model(Path(initial), gather)
            return NONE
        if _all_see(Path(folder, f"step-{step}"), gather):
            return step
        logger.warning("the checkpoint of step %d vanished from %s right after it was chosen", step, folder)
        time.sleep(_PAUSE_SECONDS)
    raise LoadError(
        f"checkpoint.folder ({folder}) must keep a checkpoint for long enough to load it, got {choices} that vanished "
        "right after they were chosen; see what deletes them there"
    )


def check_still_there(folder: str, step: int, gather: Gather) -> None:
    """Check on all ranks that nothing has removed the checkpoint since it was chosen. A collective.

    It is too late to take another one: this one has been announced to the other groups.

    Raises:
        LoadError: it has vanished. On all ranks.
    """

    def look() -> None:
        target = Path(folder, f"step-{step}")
        if not is_complete(target):
            raise FileNotFoundError(f"{target} vanished after it was chosen; another start chooses anew")

    together(look, folder, gather)


def check_same_state(folder: str, step: int, lineage: int, gather: Gather) -> None:
    """Check that all ranks have loaded the same state. A collective.

    One that another checkpoint of its step replaces meanwhile can be the old one to some ranks, the new one to others.

    Raises:
        LoadError: they have not. On all ranks.
    """
    if len(set(gather(lineage))) > 1:
        raise LoadError(
            f"checkpoint: the ranks of this group have loaded different states of step {step} from {folder}: it was "
            "replaced while they did; another start chooses anew"
        )


def together(act: Callable[[], T], folder: str, gather: Gather) -> T:
    """Return what `act` finds in `folder`; if it fails on one rank, it fails on all. A collective.

    The others would go on into a collective in which the one that failed never comes. `act` may be called again.

    Raises:
        ConfigError: `act` has raised it on some rank.
        LoadError: it has raised anything else on some rank.
    """
    error: Exception | None = None
    try:
        found = _past_stale_handles(act)
    except Exception as raised:  # noqa: BLE001  # also what unpickling half of a file raises; it is raised below
        error = raised
    kinds = {0: None, 1: LoadError, 2: ConfigError}
    outcomes = gather(0 if error is None else 2 if isinstance(error, ConfigError) else 1)
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise LoadError(f"checkpoint: {folder} cannot be read: {error or type(error).__name__}") from error
    for rank, kind in enumerate(outcomes):
        if (kind_of_error := kinds[kind]) is not None:
            raise kind_of_error(f"checkpoint: rank {rank} of this group cannot load from {folder}; see why in its log")
    return found


def _past_stale_handles(act: Callable[[], T]) -> T:
    """Return what `act` finds, trying again when a handle is stale.

    On NFS that is no lasting error: it says that another host has just renamed or removed what this one had looked up.
    To take an older checkpoint for it would lose work, and to end the group would cost it a restart.
    """
    for _ in range(_num_looks()):
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_LOOK_SECONDS)
    return act()


def _num_looks() -> int:
    """Return how many looks it takes until a host's view is up to date. By their clocks ranks might stop apart."""
    return round(_SIGHT_SECONDS / _LOOK_SECONDS)


def _choose(folder: str, wanted: int) -> int:
    """Return the step to load by a look into the folder."""
    steps = complete_steps(folder)
    if wanted == -1:
        return _latest(folder, steps)
    if wanted in steps:
        return wanted
    if not os.path.isdir(folder):
        return NONE  # the run's first start, with its flags complete
    raise ConfigError(
        f"checkpoint.load_step must name a complete checkpoint in {folder}, got {wanted}; "
        f"there are {', '.join(map(str, steps)) or 'none'}"
    )


def _latest(folder: str, steps: list[int]) -> int:
    """Return the latest of `steps` that is of a training state; if none is, the latest."""
    manifests = ((step, Manifest.read(Path(folder, f"step-{step}"))) for step in reversed(steps))
    full = next((step for step, manifest in manifests if manifest is None or not manifest.model_only), None)
    if full is None:
        return max(steps, default=NONE)
    if full < steps[-1]:
        # The last save may be of the model only. A run that was killed behind it must be able to come back.
        logger.warning("the checkpoint of step %d is of the model only: loading that of step %d", steps[-1], full)
    return full


def _all_see(folder: Path, gather: Gather) -> bool:
    """Wait until all ranks see the same checkpoint in `folder`; returns False if rank 0 sees none any more.

    Another host's view of a network folder is given the time to catch up with rank 0's.

    Raises:
        ConfigError: not all ranks come to see it. On all ranks.
        LoadError: a rank cannot read it. On all ranks.
    """
    for _ in range(_num_looks()):
        seen = gather(_look(folder))
        if seen[0] == _GONE:
            return False
        if len(set(seen)) == 1 and seen[0] != _UNREADABLE:
            return True
        time.sleep(_LOOK_SECONDS)
    if _UNREADABLE in seen:
        seen = gather(together(lambda: _see(folder), str(folder), gather))  # raises what the file system says
    _check_same(seen, folder, "checkpoint.folder")
    return True


def _check_all_see_model(folder: Path, gather: Gather) -> None:
    seen = together(lambda: _fingerprint(folder) if folder.is_dir() else _GONE, str(folder), gather)
    _check_same(gather(seen), folder, "checkpoint.initial_load_path")


def _check_same(seen: list[int], folder: Path, setting: str) -> None:
    """Check that all ranks see the same in `folder`, named by `setting`: else they wait for each other in the load."""
    if apart := [rank for rank, look in enumerate(seen) if look != seen[0]]:
        found = "a checkpoint" if seen[0] else "none"
        raise ConfigError(
            f"{setting} must be a folder that all hosts of a group share: ranks {apart} of this group do not see in "
            f"{folder} what rank 0 does, which finds {found} there; put it on a shared file system"
        )


def _look(folder: Path) -> int:
    """Return the fingerprint of the checkpoint in `folder`, or why there is none: gone, or unreadable just now."""
    try:
        return _see(folder)
    except OSError:  # a stale handle, for instance, which the next look may not meet
        return _UNREADABLE


def _see(folder: Path) -> int:
    return _fingerprint(folder) if is_complete(folder) else _GONE


def _fingerprint(folder: Path) -> int:
    """Return a 48-bit hash of the manifest, by which two checkpoints of one step differ."""
    path = folder / MANIFEST
    return fold48(path.read_text(errors="replace") if path.is_file() else "none")
