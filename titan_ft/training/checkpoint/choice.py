# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Choose the checkpoint that a group loads: one choice for all of its ranks.

Rank 0 reads the folder for all ranks. If each rank read it, two ranks could choose differently. An
asynchronous save of another group may be published between two reads, and a host may see an old
listing of a network folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from titan_ft.config import ConfigError
from titan_ft.protocol.errors import ReplicaError
from titan_ft.protocol.row import fold48
from titan_ft.system.ownership import check_links
from titan_ft.training.checkpoint.damage import is_model_only
from titan_ft.training.checkpoint.folder import (
    LATEST,
    MANIFEST,
    OTHER_FOLDER_REMEDY,
    DamagedError,
    Manifest,
    complete_steps,
    is_complete,
    torn_steps,
)

logger = logging.getLogger(__name__)

NO_STEP = -1
"""There is no checkpoint. Stands in place of a step."""
_MAX_CHOICES = 3
"""Give up after this many chosen checkpoints that vanished before all ranks saw them."""
_MAX_STALE_SECONDS = 60.0
"""A host's view of a folder may be this old: NFS's default (acdirmax)."""
_POLL_SECONDS = 0.05
# Codes in place of a fingerprint.
_GONE = 0
_UNREADABLE = -1
_PAUSE_SECONDS = 0.5
"""Pause before another choice, or another look at damage: a writer may be replacing the
checkpoint."""
_MAX_LOOKS_AT_DAMAGE = 10
_MAX_NAMED = 10
"""Steps that an error names."""

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""
T = TypeVar("T")


class LoadError(ReplicaError):
    """A checkpoint could not be read, or vanished; the group's next start may find one."""


class NoCheckpointError(ConfigError):
    """The job asks for a checkpoint, or has saved some, and none can be loaded.

    A group that can heal from another group ignores this error (`ReplicaCheckpoints.load`). Damage
    on disk must not end a group while others train.
    """


@dataclass(frozen=True)
class LoadRequest:
    """The checkpoint that a job asks for.

    Attributes:
        folder: the job's checkpoint folder.
        inspect: returns the defect of the checkpoint in a folder, empty if it has none; may raise
            OSError.
        step: `checkpoint.load_step`: where the job begins.
        job_id: the job's id. If this job has saved checkpoints after `step`, it resumes from the
            latest sound checkpoint of its own instead.
        initial: folder of a model to begin with if there is no checkpoint; may be empty.
        damaged: steps that an earlier load of this start found damaged, with the reason.
    """

    folder: str
    inspect: Callable[[Path], str]
    step: int = LATEST
    job_id: str = ""
    initial: str | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to load.

    Attributes:
        step: the step to load, or `NO_STEP`.
        damaged: later steps that are damaged, with the reason. Only rank 0 knows them.
    """

    step: int
    damaged: Mapping[int, str] = field(default_factory=dict)


def agree_on_step(request: LoadRequest, rank: int, gather: Gather) -> Choice:
    """Return the checkpoint to load: the same step on all ranks. A collective.

    Raises:
        NoCheckpointError: the requested checkpoint is incomplete or damaged, or no sound one is
            left, or another user's link leads to the folder. On all ranks.
        ConfigError: not all ranks see the checkpoint, or the initial model is damaged. On all
            ranks.
        LoadError: the folder cannot be read, or the chosen checkpoint vanished. On all ranks.
    """
    folder = request.folder

    def choose() -> Choice:
        _check_links(folder)
        return _Search(request).choose() if rank == 0 else Choice(NO_STEP)

    for _ in range(_MAX_CHOICES):
        choice = fail_together(choose, folder, gather)
        step = gather(choice.step)[0]
        if step == NO_STEP:
            if request.initial:
                _check_initial_on_all_ranks(request, Path(request.initial), rank, gather)
            return Choice(NO_STEP)
        if _all_see(Path(folder, f"step-{step}"), gather):
            return Choice(step, choice.damaged)
        logger.warning(
            "the checkpoint of step %d vanished from %s right after it was chosen", step, folder
        )
        time.sleep(_PAUSE_SECONDS)
    raise LoadError(
        f"checkpoint.folder ({folder}) must keep a checkpoint for long enough to load it, got "
        f"{_MAX_CHOICES} that vanished right after they were chosen; see what deletes them there"
    )


def _check_links(folder: str) -> None:
    """Refuse a folder behind another user's link.

    That user would choose the state. And each save would fail (`ReplicaCheckpoints.dcp_save`),
    which would be known only after hours of training.

    Raises:
        NoCheckpointError: there is such a link.
    """
    try:
        check_links(Path(folder))
    except OSError as error:
        if error.errno != errno.ELOOP:
            return  # The search reports it.
        raise NoCheckpointError(
            f"checkpoint.folder must not be behind another user's link, got {folder}, where "
            f"{error.filename} is {error.strerror}; make the link yourself, or "
            f"{OTHER_FOLDER_REMEDY}"
        ) from error


def check_still_there(folder: str, step: int, gather: Gather) -> None:
    """Check on all ranks that the chosen checkpoint still exists. A collective.

    The choice can no longer change: this checkpoint has been announced to the other groups.

    Raises:
        LoadError: the checkpoint has vanished. On all ranks.
    """

    def look() -> None:
        target = Path(folder, f"step-{step}")
        if not is_complete(target):
            raise FileNotFoundError(
                f"{target} vanished after it was chosen; another start chooses anew"
            )

    fail_together(look, folder, gather)


def check_same_state(folder: str, step: int, lineage: int, gather: Gather) -> None:
    """Check that all ranks have loaded the same state. A collective.

    If another checkpoint of the same step replaces the checkpoint during the load, some ranks read
    the old one and some the new one.

    Args:
        lineage: hash of the state that this rank has loaded; differs between states of one step.

    Raises:
        LoadError: the ranks have loaded different states. On all ranks.
    """
    if len(set(gather(lineage))) > 1:
        raise LoadError(
            f"checkpoint: the ranks of this group have loaded different states of step {step} from "
            f"{folder}: it was replaced while they did; another start chooses anew"
        )


def fail_together(act: Callable[[], T], folder: str, gather: Gather) -> T:
    """Return the result of `act` in `folder`; if it fails on one rank, raise on all. A collective.

    Otherwise the other ranks would wait in a later collective that the failed rank never joins.
    After a stale handle, `act` is called again.

    Raises:
        ConfigError: `act` raised it on some rank. A failed rank raises its own error. The others
            raise the class of the first failed rank.
        LoadError: `act` raised any other error on some rank.
    """
    error: Exception | None = None
    try:
        found = _retry_stale_handles(act)
    except Exception as raised:  # noqa: BLE001
        # Raised below, after all ranks know. Half of a pickle may raise any exception.
        error = raised
    failures = gather(_FAILURES.index(_class_of_failure(error)))
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise LoadError(
            f"checkpoint: {folder} cannot be read: {str(error) or type(error).__name__}"
        ) from error
    for rank, failure in enumerate(failures):
        error_class = _FAILURES[failure]
        if error_class is not None:
            raise error_class(
                f"checkpoint: rank {rank} of this group cannot load from {folder}; see why in its "
                "log"
            )
    return found


_FAILURES = (None, LoadError, ConfigError, NoCheckpointError)
"""Ranks send each other the index of their failure. None is no failure."""


def _class_of_failure(error: Exception | None) -> type[Exception] | None:
    if error is None:
        return None
    if isinstance(error, NoCheckpointError):  # Before ConfigError, its base class.
        return NoCheckpointError
    if isinstance(error, ConfigError):
        return ConfigError
    return LoadError


def _retry_stale_handles(act: Callable[[], T]) -> T:
    """Return the result of `act`; call it again after a stale handle.

    ESTALE on NFS is temporary: another host has just renamed or removed a path that this host had
    looked up. To fall back to an older checkpoint would lose work. To end the group would cost a
    restart.
    """
    for _ in range(_num_looks()):
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_POLL_SECONDS)
    return act()


def _num_looks() -> int:
    """Return the number of looks after which a host's view of a folder is surely up to date.

    All ranks count looks. With clocks, one rank could stop earlier and leave the others in a
    collective.
    """
    return round(_MAX_STALE_SECONDS / _POLL_SECONDS)


class _Search:
    """Rank 0's search in the folder, for all ranks."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._tries = _num_looks()
        """Looks that are left after errors of the file system, for all checkpoints together."""

    def choose(self) -> Choice:
        """Return the checkpoint to load.

        Raises:
            NoCheckpointError: the requested checkpoint is missing or damaged, or no checkpoint is
                sound.
        """
        request = self._request
        steps = self._list_steps()
        if request.step == LATEST:
            return self._choose_latest(steps)
        own = [step for step in steps if step > request.step and self._is_own(step)]
        choice = self._find_sound(own)
        if choice.step == NO_STEP:
            self._check_requested(steps)
            choice = Choice(request.step, choice.damaged)
        nameless = self._find_nameless([step for step in steps if step > choice.step])
        return Choice(choice.step, {**nameless, **choice.damaged})

    def _list_steps(self) -> list[int]:
        """Return the steps of all checkpoints in the folder, the latest first.

        Raises:
            ConfigError: the folder cannot be read, and waiting does not help.
        """
        folder = self._request.folder
        if Path(folder).is_file():
            raise ConfigError(
                f"checkpoint.folder must be a folder, got the file {folder}; {OTHER_FOLDER_REMEDY}"
            )
        try:
            # Torn checkpoints too: they are reported as damaged, not passed over in silence.
            return sorted({*complete_steps(folder), *torn_steps(folder)}, reverse=True)
        except PermissionError as error:
            raise ConfigError(
                f"checkpoint.folder must be a folder that this user may read, got: {error}; change "
                f"its mode, or {OTHER_FOLDER_REMEDY}"
            ) from error

    def _choose_latest(self, steps: list[int]) -> Choice:
        choice = self._find_sound(steps)
        if choice.step != NO_STEP or not steps:
            return choice
        if choice.damaged:
            raise NoCheckpointError(
                f"checkpoint.folder ({self._request.folder}) must hold a training state that can "
                f"be read, got {_list_damage(choice.damaged)}; mend one of them, or give another "
                "checkpoint.folder to begin anew"
            )
        # All checkpoints hold a model only. The load of the latest raises an error with remedies.
        return Choice(steps[0])

    def _find_sound(self, steps: Iterable[int]) -> Choice:
        """Return the first of `steps` that is a sound training state, with the damaged steps before
        it.
        """
        damaged: dict[int, str] = {}
        latest_model_only = NO_STEP
        for step in steps:
            defect = self._find_defect(step)
            if defect:
                damaged[step] = defect
                continue
            # A job may begin with torchtitan's seed checkpoint, `step-0`, which holds a model only.
            if step and is_model_only(self._folder_of(step)):
                latest_model_only = max(latest_model_only, step)
                continue
            if latest_model_only != NO_STEP:
                # The last save of a run holds a model only by default. A run that was killed after
                # that save must be able to resume.
                logger.warning(
                    "the checkpoint of step %d is of the model only: loading that of step %d",
                    latest_model_only,
                    step,
                )
            return Choice(step, damaged)
        return Choice(NO_STEP, damaged)

    def _check_requested(self, steps: list[int]) -> None:
        """Check the checkpoint that `load_step` names. No other checkpoint replaces it.

        Raises:
            NoCheckpointError: the checkpoint is missing or damaged.
        """
        request = self._request
        if request.step not in steps:
            complete = complete_steps(request.folder)
            remedy = "" if complete else "; leave it out to begin anew"
            raise NoCheckpointError(
                f"checkpoint.load_step must name a complete checkpoint in {request.folder}, got "
                f"{request.step}; there are {_list(complete)}{remedy}"
            )
        defect = self._find_defect(request.step)
        if not defect:
            return
        others = [step for step in steps if step != request.step][:_MAX_NAMED]
        sound = [step for step in reversed(others) if not self._find_defect(step)]
        raise NoCheckpointError(
            f"checkpoint.load_step must name a sound checkpoint in {request.folder}, got "
            f"{request.step}, which is damaged: {defect}; sound ones are {_list(sound)}"
        )

    def _is_own(self, step: int) -> bool:
        """Return True if this job saved `step` after it began at the requested step.

        Later steps of other jobs belong to a branch that the user left by setting `load_step`.
        """
        try:
            manifest = Manifest.read(self._folder_of(step))
        except DamagedError:
            return False
        return manifest is not None and manifest.branch == (
            self._request.job_id,
            self._request.step,
        )

    def _find_nameless(self, steps: Iterable[int]) -> dict[int, str]:
        """Return the damaged checkpoints of `steps` without a readable writer, with the reason.

        This job may have saved them. Without a report it would silently train those steps again.
        """
        found = {}
        for step in steps:
            with contextlib.suppress(DamagedError):
                if Manifest.read(self._folder_of(step)) is not None:
                    continue
            defect = self._find_defect(step)
            if defect:
                found[step] = defect
        return found

    def _find_defect(self, step: int) -> str:
        """Return the defect of a checkpoint; empty if it has none, or has vanished.

        A defect counts when two looks in a row find it in the same checkpoint, or at the last of
        `_MAX_LOOKS_AT_DAMAGE` looks: another group may be replacing or purging the checkpoint.
        """
        if step in self._request.damaged:
            return self._request.damaged[step]
        folder = self._folder_of(step)
        previous, defect = None, ""
        for _ in range(_MAX_LOOKS_AT_DAMAGE):
            defect = self._inspect(folder)
            if not defect or not folder.is_dir():
                return ""
            seen = (defect, _try_to_fingerprint(folder))
            if seen == previous:
                break
            previous = seen
            time.sleep(_PAUSE_SECONDS)
        return defect

    def _inspect(self, folder: Path) -> str:
        """Return the defect of a checkpoint; an error of the file system is one only if it lasts.

        A file server may be away for a moment.
        """
        while True:
            try:
                return self._request.inspect(folder)
            except OSError as error:
                # Waiting does not give a permission.
                if self._tries <= 0 or isinstance(error, PermissionError):
                    return f"it cannot be read ({error})"
            self._tries -= 1
            time.sleep(_POLL_SECONDS)

    def check_initial_is_sound(self, folder: Path) -> None:
        """Check the model to begin with.

        Raises:
            ConfigError: the model is damaged.
        """
        # Only a complete checkpoint has digests. Hugging Face's files, for example, have none.
        defect = self._inspect(folder) if is_complete(folder) else ""
        if defect:
            raise ConfigError(
                "checkpoint.initial_load_path must be a checkpoint that can be read, got "
                f"{folder}, which is damaged: {defect}; give another one"
            )

    def _folder_of(self, step: int) -> Path:
        return Path(self._request.folder, f"step-{step}")


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _list_damage(damaged: Mapping[int, str]) -> str:
    named = [f"step {step} ({defect})" for step, defect in damaged.items()]
    hidden = len(named) - _MAX_NAMED
    more = f" and {hidden} more" if hidden > 0 else ""
    return ", ".join(named[:_MAX_NAMED]) + more


def _all_see(folder: Path, gather: Gather) -> bool:
    """Wait until all ranks see the same checkpoint in `folder`; False if rank 0 no longer sees one.

    The wait gives another host's view of a network folder time to catch up with rank 0's.

    Raises:
        ConfigError: some rank never sees the checkpoint. On all ranks.
        LoadError: a rank cannot read it. On all ranks.
    """
    for _ in range(_num_looks()):
        seen = gather(_try_to_fingerprint(folder))
        if seen[0] == _GONE:
            return False
        if len(set(seen)) == 1 and seen[0] != _UNREADABLE:
            return True
        time.sleep(_POLL_SECONDS)
    if _UNREADABLE in seen:
        # Look once more, so that a rank which still cannot read raises its file system's error.
        seen = gather(fail_together(lambda: _fingerprint_or_gone(folder), str(folder), gather))
    _check_same(seen, folder, "checkpoint.folder")
    return True


def _check_initial_on_all_ranks(
    request: LoadRequest, folder: Path, rank: int, gather: Gather
) -> None:
    """Check that all ranks see the initial model, and that it is not damaged."""

    def look() -> int:
        if not folder.is_dir():
            return _GONE
        if rank == 0:
            _Search(request).check_initial_is_sound(folder)
        return _fingerprint(folder)

    seen = fail_together(look, str(folder), gather)
    _check_same(gather(seen), folder, "checkpoint.initial_load_path")


def _check_same(seen: list[int], folder: Path, setting: str) -> None:
    """Check that all ranks see the same files in `folder`. Otherwise the ranks would deadlock in
    the load.

    Args:
        setting: the option that names the folder.

    Raises:
        ConfigError: the ranks see different files.
    """
    differing = [rank for rank, fingerprint in enumerate(seen) if fingerprint != seen[0]]
    if not differing:
        return
    found = "none" if seen[0] == _GONE else "a checkpoint"
    raise ConfigError(
        f"{setting} must be a folder that all hosts of a group share: ranks {differing} of this "
        f"group do not see in {folder} what rank 0 does, which finds {found} there; put it on a "
        "shared file system"
    )


def _try_to_fingerprint(folder: Path) -> int:
    """Return the fingerprint of the checkpoint in `folder`, or `_GONE`, or `_UNREADABLE`."""
    try:
        return _fingerprint_or_gone(folder)
    except OSError:  # A stale handle, for example. The next look may succeed.
        return _UNREADABLE


def _fingerprint_or_gone(folder: Path) -> int:
    return _fingerprint(folder) if is_complete(folder) else _GONE


def _fingerprint(folder: Path) -> int:
    """Return a 48-bit hash of the manifest, by which two checkpoints of one step differ."""
    path = folder / MANIFEST
    if not path.is_file():  # Stock torchtitan writes no manifest.
        return fold48("none")
    return fold48(path.read_text(errors="replace"))
