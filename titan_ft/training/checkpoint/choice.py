# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Choose the checkpoint that a group loads: one choice for all of its ranks.

`ReplicaCheckpoints.load` calls this module on the training thread, on all ranks of the group:

1. `agree_on_step`: rank 0 searches the checkpoint folder, and sends its choice to all ranks. If
   each rank searched, two ranks could choose differently: another group may publish a checkpoint
   between two searches, and a host may see an old listing of a network folder. Then all ranks wait
   until they see the chosen checkpoint.
2. `check_still_there`, after the group has joined the job and before the load.
3. `check_same_state`, after the load.

Any failure is raised on all ranks. Otherwise the other ranks would wait in a later collective that
the failed rank never joins.

A checkpoint is *damaged* if its tables show a defect (`damage.find_defect`), *torn* if it has lost
its table of files, and *sound* if it is neither. Later checkpoints may belong to another *branch*:
a job that the user sent back to an earlier step by `checkpoint.load_step` begins a new branch.
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
"""In place of a step: there is no checkpoint to load."""
_MAX_CHOICES = 3
"""Give up after this many chosen checkpoints that vanished before all ranks saw them."""
_MAX_STALE_SECONDS = 60.0
"""A host's view of a folder may be this old: NFS's default (acdirmax)."""
_POLL_SECONDS = 0.05
_GONE = 0
"""In place of a fingerprint (`_fingerprint`): this rank sees no complete checkpoint."""
_UNREADABLE = -1
"""In place of a fingerprint: this rank cannot read the checkpoint."""
_PAUSE_SECONDS = 0.5
"""Pause after a chosen checkpoint vanished, and between two looks at a damaged one. Another group
may be replacing the checkpoint, and is done after the pause."""
_MAX_LOOKS_AT_DAMAGE = 10
_MAX_NAMED = 10
"""Maximum number of steps that an error names."""

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""
T = TypeVar("T")


class LoadError(ReplicaError):
    """A checkpoint could not be read, or vanished. This process ends, and the group's next start
    may find another checkpoint.
    """


class NoCheckpointError(ConfigError):
    """No checkpoint can be loaded, although the job asks for one or has saved some.

    If other groups train, the group heals from them and ignores this error
    (`ReplicaCheckpoints.load`): damage on disk must not end a group then. Otherwise the error ends
    the group for good, because another start would find the same.
    """


@dataclass(frozen=True)
class LoadRequest:
    """The checkpoint that a job asks for.

    Attributes:
        folder: the job's checkpoint folder.
        find_defect: returns the defect of the checkpoint in a folder, empty if it has none; may
            raise OSError.
        step: `checkpoint.load_step`, from which the job began; `LATEST` for the latest checkpoint.
        job_id: the job's id. If this job has saved checkpoints after `step`, it resumes from the
            latest sound one of them instead.
        initial: folder of a model to begin with if there is no checkpoint; may be empty or None.
        damaged: steps that this process has tried to load and found damaged, with the reason.
    """

    folder: str
    find_defect: Callable[[Path], str]
    step: int = LATEST
    job_id: str = ""
    initial: str | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to load.

    Attributes:
        step: the step to load, or `NO_STEP`.
        damaged: later steps, which were skipped because they are damaged, with the reason; empty on
            all ranks but rank 0.
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
        if rank != 0:
            return Choice(NO_STEP)  # Not used: the choice of rank 0 counts.
        return _Search(request).choose()

    for _ in range(_MAX_CHOICES):
        choice = read_on_all_ranks(choose, folder, gather)
        step = gather(choice.step)[0]  # The step that rank 0 has chosen.
        if step == NO_STEP:
            if request.initial:
                _check_initial_on_all_ranks(request, Path(request.initial), rank, gather)
            return Choice(NO_STEP)
        if _await_same_view(Path(folder, f"step-{step}"), gather):
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
    """Refuse a folder behind another user's symbolic link.

    That user would choose the state that is loaded. And each save would fail
    (`ReplicaCheckpoints.dcp_save`), which the user would see only after hours of training.

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

    Called after the step has been announced to the other groups, so no other one can be chosen.

    Raises:
        LoadError: the checkpoint has vanished. On all ranks.
    """

    def look() -> None:
        target = Path(folder, f"step-{step}")
        if not is_complete(target):
            raise FileNotFoundError(
                f"{target} vanished after it was chosen; another start chooses anew"
            )

    read_on_all_ranks(look, folder, gather)


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


def read_on_all_ranks(act: Callable[[], T], folder: str, gather: Gather) -> T:
    """Return this rank's result of `act`; raise on all ranks if it fails on one. A collective.

    Args:
        act: reads something in `folder`. It is called again after a stale handle of NFS.

    Raises:
        ConfigError: `act` raised it on some rank. A failed rank raises its own error. The others
            raise the class of the first failed rank.
        NoCheckpointError: `act` raised it on every failed rank. After it the caller may go on to
            collectives, so either all ranks raise it or none does.
        LoadError: `act` raised any other error on some rank.
    """
    error: Exception | None = None
    try:
        found = _retry_stale_handles(act)
    except Exception as raised:  # noqa: BLE001
        # Any exception: `act` may unpickle a damaged file. Raised below, when all ranks know.
        error = raised
    failures = [
        _FAILURE_CLASSES[index]
        for index in gather(_FAILURE_CLASSES.index(_class_of_failure(error)))
    ]
    final = next((each for each in failures if each not in (None, NoCheckpointError)), None)
    if isinstance(error, NoCheckpointError) and final is not None:
        raise final(str(error)) from error
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise LoadError(
            f"checkpoint: {folder} cannot be read: {str(error) or type(error).__name__}"
        ) from error
    for rank, failure in enumerate(failures):
        if failure is not None:
            error_class = final or failure
            raise error_class(
                f"checkpoint: rank {rank} of this group cannot load from {folder}; see why in its "
                "log"
            )
    return found


_FAILURE_CLASSES = (None, LoadError, ConfigError, NoCheckpointError)
"""`gather` takes integers, so a rank sends the index of its failure in this tuple. None is no
failure."""


def _class_of_failure(error: Exception | None) -> type[Exception] | None:
    if error is None:
        return None
    if isinstance(error, NoCheckpointError):  # Before ConfigError, its base class.
        return NoCheckpointError
    if isinstance(error, ConfigError):
        return ConfigError
    return LoadError


def _retry_stale_handles(act: Callable[[], T]) -> T:
    """Return the result of `act`; call it again while it raises ESTALE.

    ESTALE on NFS is temporary: another host has just renamed or removed a path that this host had
    looked up. Without the repetition, the group would load an older checkpoint or restart.
    """
    for _ in range(_max_looks()):
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_POLL_SECONDS)
    return act()


def _max_looks() -> int:
    """Return the number of looks, at intervals of `_POLL_SECONDS`, until a view is up to date.

    All ranks count looks. With a deadline by its clock, one rank could stop earlier and leave the
    others in a collective.
    """
    return round(_MAX_STALE_SECONDS / _POLL_SECONDS)


class _Search:
    """Rank 0's search in the folder, for all ranks."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        # Number of times that a checkpoint may be inspected again after an error of the file
        # system. All checkpoints together, so that a search in a dead file system ends.
        self._looks_left = _max_looks()

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
        # The user has named a step. After a restart, the job resumes from its own later saves.
        own_later = [step for step in steps if step > request.step and self._is_of_this_job(step)]
        choice = self._find_sound(own_later)
        if choice.step == NO_STEP:
            self._check_requested(steps)
            choice = Choice(request.step, choice.damaged)
        later = [step for step in steps if step > choice.step]
        unknown = self._find_damaged_of_unknown_writer(later)
        return Choice(choice.step, {**unknown, **choice.damaged})

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
            # Torn checkpoints too: without a report, they would be skipped in silence.
            return sorted({*complete_steps(folder), *torn_steps(folder)}, reverse=True)
        except PermissionError as error:
            raise ConfigError(
                f"checkpoint.folder must be a folder that this user may read, got: {error}; change "
                f"its mode, or {OTHER_FOLDER_REMEDY}"
            ) from error

    def _choose_latest(self, steps: list[int]) -> Choice:
        choice = self._find_sound(steps)
        is_found = choice.step != NO_STEP
        is_folder_empty = not steps
        if is_found or is_folder_empty:
            return choice
        if choice.damaged:
            raise NoCheckpointError(
                f"checkpoint.folder ({self._request.folder}) must hold a training state that can "
                f"be read, got {_list_damage(choice.damaged)}; mend one of them, or give another "
                "checkpoint.folder to begin anew"
            )
        # All checkpoints hold a model only. The load of the latest one raises an error with
        # remedies (`Load.prepare`).
        return Choice(steps[0])

    def _find_sound(self, steps: Iterable[int]) -> Choice:
        """Return the first of `steps` that is a sound training state, and the damaged steps that
        were skipped.
        """
        damaged: dict[int, str] = {}
        latest_model_only = NO_STEP
        for step in steps:
            defect = self._find_defect(step)
            if defect:
                damaged[step] = defect
                continue
            # Step 0 is torchtitan's seed checkpoint. A job may begin with it, although it holds a
            # model only.
            if step != 0 and is_model_only(self._folder_of(step)):
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
        # Help the user to choose: name other sound checkpoints, the earliest first.
        latest_others = [step for step in steps if step != request.step][:_MAX_NAMED]
        sound = [step for step in reversed(latest_others) if not self._find_defect(step)]
        raise NoCheckpointError(
            f"checkpoint.load_step must name a sound checkpoint in {request.folder}, got "
            f"{request.step}, which is damaged: {defect}; sound ones are {_list(sound)}"
        )

    def _is_of_this_job(self, step: int) -> bool:
        """Return True if this job saved `step` after it began at the requested step.

        Later steps of other jobs belong to a branch that the user left by setting `load_step`.
        """
        try:
            manifest = Manifest.read(self._folder_of(step))
        except DamagedError:
            return False
        if manifest is None:
            return False
        return manifest.branch == (self._request.job_id, self._request.step)

    def _find_damaged_of_unknown_writer(self, steps: Iterable[int]) -> dict[int, str]:
        """Return the damaged checkpoints of `steps` without a readable manifest, with the reason.

        The manifest would name the writer, which may be this job. Without a report, this job would
        silently train those steps again.
        """
        defects = {}
        for step in steps:
            with contextlib.suppress(DamagedError):
                has_manifest = Manifest.read(self._folder_of(step)) is not None
                if has_manifest:
                    continue
            defect = self._find_defect(step)
            if defect:
                defects[step] = defect
        return defects

    def _find_defect(self, step: int) -> str:
        """Return the defect of a checkpoint; empty if it has none, or has vanished.

        Another group may be replacing or purging the checkpoint, so that one look may see half of
        it. A defect counts if two looks in a row find the same defect in the same checkpoint, or if
        the last of `_MAX_LOOKS_AT_DAMAGE` looks finds one.
        """
        if step in self._request.damaged:
            return self._request.damaged[step]
        folder = self._folder_of(step)
        defect = ""
        last_look = None
        for _ in range(_MAX_LOOKS_AT_DAMAGE):
            defect = self._inspect(folder)
            has_vanished = not folder.is_dir()
            if not defect or has_vanished:
                return ""
            look = (defect, _try_to_fingerprint(folder))
            if look == last_look:
                break
            last_look = look
            time.sleep(_PAUSE_SECONDS)
        return defect

    def _inspect(self, folder: Path) -> str:
        """Return the defect of a checkpoint; repeat the inspection after errors of the file system.

        A file server may be away for a moment. An error that lasts counts as a defect.
        """
        while True:
            try:
                return self._request.find_defect(folder)
            except OSError as error:
                is_lasting = isinstance(error, PermissionError)
                if is_lasting or self._looks_left <= 0:
                    return f"it cannot be read ({error})"
            self._looks_left -= 1
            time.sleep(_POLL_SECONDS)

    def check_initial_is_sound(self, folder: Path) -> None:
        """Check the model of `checkpoint.initial_load_path`.

        Raises:
            ConfigError: the model is damaged.
        """
        if not is_complete(folder):
            # No checkpoint of torchtitan, but for example files of Hugging Face. They have no
            # tables that could be checked.
            return
        defect = self._inspect(folder)
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


def _await_same_view(folder: Path, gather: Gather) -> bool:
    """Wait until all ranks see the same checkpoint in `folder`. A collective.

    Another host may see an old listing of a network folder, and needs time to catch up with rank 0.

    Returns:
        False if rank 0 no longer sees a checkpoint, so that another one must be chosen.

    Raises:
        ConfigError: some rank never sees the checkpoint. On all ranks.
        LoadError: a rank cannot read it. On all ranks.
    """
    for _ in range(_max_looks()):
        fingerprints = gather(_try_to_fingerprint(folder))
        if fingerprints[0] == _GONE:
            return False
        is_same = len(set(fingerprints)) == 1
        if is_same and fingerprints[0] != _UNREADABLE:
            return True
        time.sleep(_POLL_SECONDS)
    if _UNREADABLE in fingerprints:
        # Look once more, in a way that raises the error of the file system on all ranks.
        own = read_on_all_ranks(lambda: _fingerprint_or_gone(folder), str(folder), gather)
        fingerprints = gather(own)
    _check_same_view(fingerprints, folder, "checkpoint.folder")
    return True


def _check_initial_on_all_ranks(
    request: LoadRequest, folder: Path, rank: int, gather: Gather
) -> None:
    """Check that all ranks see the same initial model, and that it is not damaged. A collective.

    Raises:
        ConfigError: the ranks see different files, or the model is damaged. On all ranks.
        LoadError: a rank cannot read the folder. On all ranks.
    """

    def look() -> int:
        if not folder.is_dir():
            return _GONE
        if rank == 0:
            _Search(request).check_initial_is_sound(folder)
        return _fingerprint(folder)

    fingerprint = read_on_all_ranks(look, str(folder), gather)
    _check_same_view(gather(fingerprint), folder, "checkpoint.initial_load_path")


def _check_same_view(fingerprints: list[int], folder: Path, setting: str) -> None:
    """Check that all ranks see the same files. Otherwise the ranks would deadlock in the load.

    Args:
        fingerprints: what each rank sees in `folder`.
        setting: the option that names the folder.

    Raises:
        ConfigError: the ranks see different files.
    """
    differing = []
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            differing.append(rank)
    if not differing:
        return
    found = "none" if fingerprints[0] == _GONE else "a checkpoint"
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
