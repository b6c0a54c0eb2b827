# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One save of a group: the step that must be saved, the save's progress, the reason of a failure.

`ReplicaCheckpoints` (`manager.py`) uses all of this on the training thread. DCP's thread of an
asynchronous save resolves `Save.done`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeGuard, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan_ft.host.titan import logger
from titan_ft.protocol.errors import FinalError
from titan_ft.system.ownership import no_follow
from titan_ft.training.checkpoint.damage import one_line
from titan_ft.training.checkpoint.export import ExportError
from titan_ft.training.checkpoint.reader import UnsafeValueError

_ELSEWHERE_IN_GROUP = "it failed on another rank of this group"
_ERRNOS_OF_A_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")
_PROBE_BYTES = 1 << 20
"""A write of this size fails on a disk that was full for a save: less room than this is left."""


class SaveError(FinalError):
    """The last step could not be saved as configured.

    Training is over. A restarted group would repeat the steps since its last checkpoint, and fail
    at the same save.
    """


class PartError(Exception):
    """A part of a save failed on a rank of this group; raised on all of them."""


class ElsewhereError(PartError):
    """The save failed on another rank of this group, which knows the reason."""

    def __init__(self) -> None:
        super().__init__(_ELSEWHERE_IN_GROUP)


class SaveState(IntEnum):
    """Progress of a save, as one rank sees it."""

    UNDER_WAY = 0
    COMPLETE = 1
    FAILED = 2


@dataclass
class Save:
    """A save of this group.

    Attributes:
        step: torchtitan's step after which the state is saved.
        updates: committed updates in the state.
        started: by this process's clock, in seconds.
        seconds: duration of the save.
        partial: the folder that the save fills; None before the first write.
        model_only: True if the save holds no training state.
        done: resolved once the checkpoint is published, as far as this rank knows; on rank 0 with
            the folders that were set aside.
    """

    step: int
    updates: int
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    partial: Path | None = None
    model_only: bool = False
    done: Future[list[Path]] = field(default_factory=Future)

    @property
    def state(self) -> SaveState:
        if not self.done.done():
            return SaveState.UNDER_WAY
        return SaveState.COMPLETE if self.done.exception() is None else SaveState.FAILED


def latest_due(step: int, interval: int, first: bool, last: bool) -> int:
    """Return the latest step up to `step` whose state torchtitan would save; 0 = none."""
    if last:
        return step
    due = step // interval * interval
    if first and step >= 1:
        due = max(due, 1)
    return due


def explain(error: BaseException) -> str:
    """Return the reason of a failure on one line."""
    for cause in _causes(error):
        if is_full(cause):
            return f"the disk is full ({os.strerror(cause.errno or 0)})"
    return one_line(error)


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """True if the disk, or the user's quota on it, has no room left."""
    return isinstance(error, OSError) and error.errno in _ERRNOS_OF_A_FULL_DISK


def agree_on_reason(error: BaseException | None, folder: Path) -> str:
    """Return the reason of a failed save, from the first rank that has one. A collective.

    torch's zip writer reports a full disk as "unexpected pos 704 vs 598", and DCP drops the cause.
    So rank 0 asks the file system, while the remains of the save still fill it.

    Args:
        error: this rank's error; None if its own part did not fail.
        folder: the folder of the checkpoints.
    """
    own = ""
    if error is not None and not isinstance(error, ElsewhereError):
        own = explain(error)
    if dist.get_rank() == 0 and isinstance(error, CheckpointException):
        full_disk_error = _probe(folder)
        if full_disk_error is not None:
            own = explain(full_disk_error)
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, own)
    known = {rank: reason for rank, reason in enumerate(reasons) if reason}
    if not known:
        return _ELSEWHERE_IN_GROUP
    first_rank = min(known)
    reason = known[first_rank]
    if dist.get_rank() in known:
        return reason
    # Name the rank whose log has the details.
    return f"{reason} (rank {first_rank})"


def describe_latest(step: int) -> str:
    """Describe the checkpoint that is left to go back to."""
    if not step:
        return "there is none to go back to"
    return f"the latest complete one is that of step {step}"


def on_all_ranks(act: Callable[[], T], gather: Callable[[int], list[int]]) -> T:
    """Return the result of `act`; if it fails on one rank of this group, raise on all.

    A collective.

    Raises:
        PartError: `act` has failed on this rank or on another one.
    """
    reason = ""
    try:
        result = act()
    except (OSError, ImportError, CheckpointException, ExportError, UnsafeValueError) as error:
        reason = explain(error)
    except Exception as error:  # noqa: BLE001
        # The other ranks must learn of any error. This one may be a bug, so the log gets the
        # traceback, with a mark in each line: it is not the end of this worker.
        reason = f"{type(error).__name__}: {error}"
        logger.error("while saving:\n%s", textwrap.indent(traceback.format_exc(), "| "))
    if any(gather(int(bool(reason)))):
        raise PartError(reason) if reason else ElsewhereError()
    return result


def _causes(error: BaseException) -> Iterable[BaseException]:
    if isinstance(error, CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]


def _probe(folder: Path) -> OSError | None:
    """Write a megabyte into `folder`; return the error if its disk is full."""
    path = folder / f".room-{os.getpid()}"
    try:
        file = open(path, "wb", opener=no_follow)  # noqa: SIM115, closed below
    except OSError as error:
        # Remove nothing here: `no_follow` may have refused a link to another user's file.
        return error if is_full(error) else None
    try:
        with file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error if is_full(error) else None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return None
