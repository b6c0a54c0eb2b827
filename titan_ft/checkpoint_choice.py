# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which checkpoint a group loads: one choice for all of its ranks.

Rank 0 looks into the folder for all. Each rank for itself could find another checkpoint: an asynchronous save of
another group may be published between two looks, and a host may see a network folder as it was a while ago.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.checkpoint_folder import MANIFEST, Manifest, complete_steps, is_complete
from titan_ft.config import ConfigError
from titan_ft.replica.row import fold48

logger = logging.getLogger(__name__)

NONE = -1
"""Instead of a step: there is no checkpoint."""
_REFUSED = -2
_SIGHT_SECONDS = 60.0  # NFS's default for how old a host's view of a folder may be
_LOOK_SECONDS = 0.05

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""


def agree_on_step(folder: str, wanted: int, initial: str | None, rank: int, gather: Gather) -> int:
    """Return the step of the checkpoint in `folder` to load, or `NONE`: the same on all ranks. A collective.

    Args:
        wanted: the step to load; -1 = the latest.
        initial: folder of a model to begin with if there is no checkpoint yet; may be empty.

    Raises:
        ConfigError: the checkpoint is not complete, or not all ranks see it. On all ranks.
    """
    refusal: ConfigError | None = None
    step = NONE
    if rank == 0:
        try:
            step = _choose(folder, wanted)
        except ConfigError as error:
            step, refusal = _REFUSED, error
    step = gather(step)[0]
    if step == _REFUSED:
        raise refusal or ConfigError("checkpoint: rank 0 of this group cannot load one; see why in its log")
    if step != NONE:
        target = Path(folder, f"step-{step}")
        _wait_for(target)
        _check_all_see(target, is_complete(target), "checkpoint.folder", gather)
    elif initial:
        _check_all_see(Path(initial), Path(initial).is_dir(), "checkpoint.initial_load_path", gather)
    return step


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
        # The last save may be of the model only. Whoever was killed behind it must be able to come back.
        logger.warning("the checkpoint of step %d is of the model only: loading that of step %d", steps[-1], full)
    return full


def _wait_for(folder: Path) -> None:
    """Give this host's view of a network folder the time to catch up with rank 0's."""
    deadline = time.monotonic() + _SIGHT_SECONDS
    while not is_complete(folder) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _check_all_see(folder: Path, there: bool, setting: str, gather: Gather) -> None:
    """Check that all ranks see the same in `folder`, named by `setting`: else they wait for each other in the load."""
    seen = gather(_fold(folder) if there else 0)
    if apart := [rank for rank, look in enumerate(seen) if look != seen[0]]:
        found = "a checkpoint" if seen[0] else "none"
        raise ConfigError(
            f"{setting} must be a folder that all hosts of a group share: ranks {apart} of this group do not see in "
            f"{folder} what rank 0 does, which finds {found} there; put it on a shared file system"
        )


def _fold(folder: Path) -> int:
    """Return 48 bits that tell a checkpoint from another one of the same step."""
    path = folder / MANIFEST
    return fold48(path.read_text(errors="replace") if path.is_file() else "none")
