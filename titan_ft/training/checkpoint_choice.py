# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which checkpoint a group loads: one choice for all of its ranks.

Rank 0 looks into the folder for all. Each rank for itself could find another checkpoint: an asynchronous save of
another group may be published between two looks, and a host may see a network folder as it was a while ago.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from titan_ft.config import ConfigError
from titan_ft.replica.errors import ReplicaError
from titan_ft.replica.row import fold48
from titan_ft.training.checkpoint_folder import (
    ELSEWHERE,
    LATEST,
    MANIFEST,
    DamagedError,
    Manifest,
    complete_steps,
    is_complete,
    torn_steps,
)

logger = logging.getLogger(__name__)

NONE = -1
"""Instead of a step: there is no checkpoint."""
_CHOICES = 3  # of checkpoints that vanish right after they were chosen
_SIGHT_SECONDS = 60.0  # NFS's default for how old a host's view of a folder may be
_LOOK_SECONDS = 0.05
_GONE, _UNREADABLE = 0, -1  # instead of a fingerprint
_PAUSE_SECONDS = 0.5  # before another choice, or another look at damage: a checkpoint may be replaced just now
_MAX_LOOKS_AT_DAMAGE = 10
_MAX_NAMED = 10  # steps that an error names

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""
T = TypeVar("T")


class LoadError(ReplicaError):
    """A checkpoint could not be read, or vanished; the group's next start may find one."""


class NoCheckpointError(ConfigError):
    """The job asks for a checkpoint, or has saved some, and none can be loaded.

    A group that heals needs none: damage on disk must not end a group while others train.
    """


@dataclass(frozen=True)
class Wish:
    """The checkpoint that a job asks for.

    Attributes:
        folder: of its checkpoints.
        inspect: returns the defect of the checkpoint in a folder, empty if it has none; may raise
            OSError.
        step: `checkpoint.load_step`: where the job begins.
        job_id: of the job. It goes on from what it has saved since it began at `step`.
        initial: folder of a model to begin with if there is no checkpoint; may be empty.
        damaged: steps that a load has just found damaged, with the reason.
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
        step: of it, or `NONE`.
        damaged: later steps that are damaged, with the reason; known to rank 0.
    """

    step: int
    damaged: Mapping[int, str] = field(default_factory=dict)


def agree_on_step(wish: Wish, rank: int, gather: Gather) -> Choice:
    """Return the checkpoint to load: the same step on all ranks. A collective.

    Raises:
        NoCheckpointError: the checkpoint that is asked for is not complete or is damaged, or no sound one is left. On
            all ranks.
        ConfigError: not all ranks see the checkpoint, or the model to begin with is damaged. On all ranks.
        LoadError: the folder cannot be read, or what was chosen there vanished. On all ranks.
    """
    folder = wish.folder
    for _ in range(_CHOICES):
        choice = together(lambda: _Search(wish).choose() if rank == 0 else Choice(NONE), folder, gather)
        step = gather(choice.step)[0]
        if step == NONE:
            if wish.initial:
                _check_initial(wish, Path(wish.initial), rank, gather)
            return Choice(NONE)
        if _all_see(Path(folder, f"step-{step}"), gather):
            return Choice(step, choice.damaged)
        logger.warning("the checkpoint of step %d vanished from %s right after it was chosen", step, folder)
        time.sleep(_PAUSE_SECONDS)
    raise LoadError(
        f"checkpoint.folder ({folder}) must keep a checkpoint for long enough to load it, got {_CHOICES} that vanished "
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
        ConfigError: `act` has raised it on some rank; of the same kind on all.
        LoadError: it has raised anything else on some rank.
    """
    error: Exception | None = None
    try:
        found = _past_stale_handles(act)
    except Exception as raised:  # noqa: BLE001  # also what unpickling half of a file raises; it is raised below
        error = raised
    kinds = [None, LoadError, ConfigError, NoCheckpointError]
    outcomes = gather(_number_of_kind(error))
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise LoadError(f"checkpoint: {folder} cannot be read: {error or type(error).__name__}") from error
    for rank, kind in enumerate(outcomes):
        if (kind_of_error := kinds[kind]) is not None:
            raise kind_of_error(f"checkpoint: rank {rank} of this group cannot load from {folder}; see why in its log")
    return found


def _number_of_kind(error: Exception | None) -> int:
    if error is None:
        return 0
    if isinstance(error, NoCheckpointError):
        return 3
    return 2 if isinstance(error, ConfigError) else 1


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


class _Search:
    """Rank 0's search in the folder, for all ranks."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._tries = _num_looks()
        """Looks that are left after errors of the file system, for all checkpoints together."""

    def choose(self) -> Choice:
        """Return the checkpoint to load.

        Raises:
            NoCheckpointError: the one that is asked for is not there or is damaged, or no sound one is.
        """
        wish = self._wish
        steps = self._list_steps()
        if wish.step == LATEST:
            return self._choose_latest(steps)
        own = [step for step in steps if step > wish.step and self._is_own(step)]
        choice = self._find_sound(own)
        if choice.step != NONE:
            return choice
        self._check_wished(steps)
        return Choice(wish.step, choice.damaged)

    def _list_steps(self) -> list[int]:
        """Return the steps of all checkpoints in the folder, the latest first.

        Raises:
            ConfigError: it is no folder that can be read, and waiting does not make it one.
        """
        folder = self._wish.folder
        if Path(folder).is_file():
            raise ConfigError(f"checkpoint.folder must be a folder, got the file {folder}; {ELSEWHERE}")
        try:
            return sorted({*complete_steps(folder), *torn_steps(folder)}, reverse=True)
        except PermissionError as error:
            raise ConfigError(
                f"checkpoint.folder must be a folder that this user may read, got: {error}; change its mode, or "
                f"{ELSEWHERE}"
            ) from error

    def _choose_latest(self, steps: list[int]) -> Choice:
        choice = self._find_sound(steps)
        if choice.step != NONE or not steps:
            return choice
        if choice.damaged:
            raise NoCheckpointError(
                f"checkpoint.folder ({self._wish.folder}) must hold a training state that can be "
                f"read, got {_list_damage(choice.damaged)}; mend one of them, or give another "
                "checkpoint.folder to begin anew"
            )
        return Choice(steps[0])  # of a model only; the load names the remedies

    def _find_sound(self, steps: Iterable[int]) -> Choice:
        """Return the first of `steps` that is a sound training state, with the damaged before it."""
        damaged: dict[int, str] = {}
        of_model = NONE
        for step in steps:
            if defect := self._find_defect(step):
                damaged[step] = defect
                continue
            manifest = Manifest.read(self._folder_of(step))
            if manifest is not None and manifest.model_only:
                of_model = max(of_model, step)
                continue
            if of_model != NONE:
                # The last save may be of the model only. A run that was killed after it must be
                # able to come back.
                logger.warning(
                    "the checkpoint of step %d is of the model only: loading that of step %d",
                    of_model,
                    step,
                )
            return Choice(step, damaged)
        return Choice(NONE, damaged)

    def _check_wished(self, steps: list[int]) -> None:
        """Check the checkpoint that the user has named, which no other one may replace.

        Raises:
            NoCheckpointError: it is not there, or damaged.
        """
        wish = self._wish
        if wish.step not in steps:
            complete = complete_steps(wish.folder)
            remedy = "" if complete else "; leave it out to begin anew"
            raise NoCheckpointError(
                f"checkpoint.load_step must name a complete checkpoint in {wish.folder}, got "
                f"{wish.step}; there are {_list(complete)}{remedy}"
            )
        defect = self._find_defect(wish.step)
        if not defect:
            return
        others = [step for step in steps if step != wish.step][:_MAX_NAMED]
        sound = [step for step in reversed(others) if not self._find_defect(step)]
        raise NoCheckpointError(
            f"checkpoint.load_step must name a sound checkpoint in {wish.folder}, got {wish.step}, "
            f"which is damaged: {defect}; sound ones are {_list(sound)}"
        )

    def _is_own(self, step: int) -> bool:
        """Say whether this job has saved `step` since it began at the step that it asks for.

        Later steps of others are of a branch that the user has turned away from.
        """
        try:
            manifest = Manifest.read(self._folder_of(step))
        except DamagedError:
            return False
        return manifest is not None and manifest.branch == (self._wish.job_id, self._wish.step)

    def _find_defect(self, step: int) -> str:
        """Return the defect of a checkpoint; empty if it has none, or has vanished.

        A defect counts when it is seen twice in the same checkpoint: during the first look another
        group may be replacing or purging it.
        """
        if step in self._wish.damaged:
            return self._wish.damaged[step]
        folder = self._folder_of(step)
        former, defect = None, ""
        for _ in range(_MAX_LOOKS_AT_DAMAGE):
            defect = self._inspect(folder)
            if not defect or not folder.is_dir():
                return ""
            seen = (defect, _look(folder))
            if seen == former:
                break
            former = seen
            time.sleep(_PAUSE_SECONDS)
        return defect

    def _inspect(self, folder: Path) -> str:
        """Return the defect of a checkpoint; an error of the file system is one only if it lasts.

        A file server may be away for a moment.
        """
        while True:
            try:
                return self._wish.inspect(folder)
            except OSError as error:
                # Waiting does not give a permission.
                if self._tries <= 0 or isinstance(error, PermissionError):
                    return f"it cannot be read ({error})"
            self._tries -= 1
            time.sleep(_LOOK_SECONDS)

    def check_initial(self, folder: Path) -> None:
        """Check the model to begin with.

        Raises:
            ConfigError: it is damaged.
        """
        defect = self._inspect(folder) if is_complete(folder) else ""
        if defect:
            raise ConfigError(
                f"checkpoint.initial_load_path must be a checkpoint that can be read, got {folder}, "
                f"which is damaged: {defect}; give another one"
            )

    def _folder_of(self, step: int) -> Path:
        return Path(self._wish.folder, f"step-{step}")


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _list_damage(damaged: Mapping[int, str]) -> str:
    named = [f"step {step} ({defect})" for step, defect in damaged.items()]
    hidden = len(named) - _MAX_NAMED
    more = f" and {hidden} more" if hidden > 0 else ""
    return ", ".join(named[:_MAX_NAMED]) + more


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


def _check_initial(wish: Wish, folder: Path, rank: int, gather: Gather) -> None:
    """Check that all ranks see the model to begin with, and that it is not damaged."""

    def look() -> int:
        if not folder.is_dir():
            return _GONE
        if rank == 0:
            _Search(wish).check_initial(folder)
        return _fingerprint(folder)

    seen = together(look, str(folder), gather)
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
