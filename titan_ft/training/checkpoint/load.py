# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One load of a checkpoint: checks of the checkpoint before the load, and of the state after it.

`ReplicaCheckpoints.dcp_load` creates a `Load`, and calls its methods on the training thread, on all
ranks of the group. `ReplicaCheckpoints.load` calls the last one after an error:

1. `prepare`: check the manifest, and drop the parts of the state that the checkpoint lacks.
2. DCP loads. `raise_failure` turns an error of DCP into an error that names the cause.
3. `check_loaded`: compare the loaded state with the digests in the manifest.
4. `give_up`, after a failed load: write a note into the checkpoint's folder, and raise. The next
   start of every group reads the note, and chooses another checkpoint (`choice.py`).

If any of these methods raises, the loaded state must not be used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan_ft.config import ConfigError
from titan_ft.host.titan import DATALOADER, TRAIN_STATE
from titan_ft.training.checkpoint.choice import (
    NO_STEP,
    Gather,
    LoadError,
    LoadRequest,
    NoCheckpointError,
    agree_on_step,
    read_on_all_ranks,
)
from titan_ft.training.checkpoint.damage import (
    FailedLoad,
    LoadFailure,
    classify,
    find_defect,
    has_training_state,
    read_keys,
)
from titan_ft.training.checkpoint.digest import find_change, take_digests
from titan_ft.training.checkpoint.export import check_importable
from titan_ft.training.checkpoint.folder import (
    LATEST,
    OTHER_FOLDER_REMEDY,
    DamagedError,
    Manifest,
    check_model,
    check_rounds,
    find_data_change,
)
from titan_ft.training.checkpoint.states import JOB_TOKENS, QUORUM_STATE

OUTER_STATE = "outer"
"""Key of the outer optimizer's state, with a semi-synchronous method."""
STOCK_RANKS = f"{DATALOADER}.world_size"
"""Key of the number of stock torchtitan's data ranks."""

logger = logging.getLogger(__name__)


class Load:
    """A load from one folder; see the head of this file.

    Args:
        folder: folder of the checkpoint.
        this_run: the manifest that a save of this run would have now.
        gather: gathers an integer of every rank of the group.

    Attributes:
        data_reset_reason: the reason why the data begins again; empty if the data continues.
        asks_for_reset: True if the config asks for new data.
    """

    def __init__(self, folder: Path, this_run: Manifest, gather: Gather) -> None:
        self._folder = folder
        self._this_run = this_run
        self._gather = gather
        self._manifest: Manifest | None = None
        self.data_reset_reason = ""
        self.asks_for_reset = False

    def prepare(self, state: dict[str, Any], from_hf: bool) -> None:
        """Check that the checkpoint fits this run, and drop the parts of `state` that the
        checkpoint lacks. A collective.

        Args:
            state: the parts by name, and the tensors of the model. DCP then loads all that is left
                in it.
            from_hf: True if the checkpoint is in Hugging Face's format.

        Raises:
            ConfigError: the checkpoint is of another model, or no training state.
            LoadError: the checkpoint cannot be read.
        """

        def check() -> None:
            if from_hf:
                check_importable(self._folder)
                return
            self._manifest = Manifest.read(self._folder)
            check_model(self._manifest, self._this_run, str(self._folder))
            loads_model_only = QUORUM_STATE not in state
            if not loads_model_only:
                self._drop_missing(state)

        read_on_all_ranks(check, str(self._folder), self._gather)

    def _drop_missing(self, state: dict[str, Any]) -> None:
        """Drop the parts of `state` that the checkpoint lacks. DCP would fail on a missing key."""
        folder = self._folder
        manifest = self._manifest
        keys = read_keys(folder)
        if not has_training_state(keys):
            raise ConfigError(
                f"checkpoint: {folder} must hold a training state, got a model only "
                "(checkpoint.last_save_model_only); give the step of a full one as "
                "checkpoint.load_step, or begin with this model: as checkpoint.initial_load_path, "
                "with another checkpoint.folder"
            )
        check_rounds(manifest, self._this_run, str(folder))
        if manifest is None:
            # Stock torchtitan wrote this checkpoint, without a lineage.
            del state[QUORUM_STATE]
        if TRAIN_STATE in state and f"{TRAIN_STATE}.{JOB_TOKENS}" not in keys:
            del state[TRAIN_STATE][JOB_TOKENS]
        if STOCK_RANKS in keys and manifest is None:
            # Load this number as well: `_count_tokens_of_stock` needs it.
            state[STOCK_RANKS] = 0
        has_outer_state = any(key.startswith(f"{OUTER_STATE}.") for key in keys)
        if OUTER_STATE in state and not has_outer_state:
            logger.warning("%s has no outer optimizer: it begins without momentum", folder)
            del state[OUTER_STATE]
        self.asks_for_reset = DATALOADER not in state
        if self.asks_for_reset:
            self.data_reset_reason = "checkpoint.exclude_from_loading names it"
        else:
            self.data_reset_reason = find_data_change(manifest, self._this_run)
        if self.data_reset_reason:
            state.pop(DATALOADER, None)

    def raise_failure(self, error: CheckpointException, from_hf: bool) -> NoReturn:
        """Raise the cause of an error of DCP, which is the same on all ranks. A collective.

        Raises:
            ConfigError: the checkpoint holds another state.
            LoadError: the file system did not answer.
            DamagedError: the bytes are wrong.
        """
        failure, reason = classify(error)
        if failure is LoadFailure.OTHER_STATE:
            if from_hf:
                holds = "weights of this run's model"
                remedy = "give those of model.flavor as checkpoint.initial_load_path"
            else:
                holds = "state of this run's model and optimizer"
                remedy = OTHER_FOLDER_REMEDY
            raise ConfigError(
                f"checkpoint: {self._folder} must hold the {holds}, got: {reason}; {remedy}"
            ) from error
        if failure is LoadFailure.UNSAFE:
            raise ConfigError(
                f"checkpoint: {self._folder} must hold plain values beside its tensors, because a "
                f"load runs no code, got {reason}; if you trust it, give it to "
                "torch.serialization.add_safe_globals in the module of experimental.custom_import"
            ) from error
        if failure is LoadFailure.UNREADABLE:
            # DCP also reports a missing file, or a table that it cannot parse, as an error of the
            # file system.
            defect = read_on_all_ranks(self._find_defect, str(self._folder), self._gather)
            if not any(self._gather(int(bool(defect)))):
                raise LoadError(f"checkpoint: {self._folder} cannot be read: {reason}") from error
            reason = defect or reason
        raise DamagedError(reason) from error

    def _find_defect(self) -> str:
        return find_defect(self._folder) if dist.get_rank() == 0 else ""

    def check_loaded(self, state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        """Compare the loaded state with the manifest. A collective.

        Args:
            state: the state that DCP has loaded.
            parts: the names of all parts.

        Raises:
            DamagedError: the states differ. On all ranks.
        """
        if self._manifest is None:
            # Stock torchtitan wrote this checkpoint, without digests.
            _count_tokens_of_stock(state)
            return
        change = find_change(self._manifest.digests, take_digests(state, parts, self._gather))
        if change:
            reason = f"the {change} in it is not what was saved (its digest is another one)"
        else:
            reason = self._find_other_counters(state)
        if any(self._gather(int(bool(reason)))):
            raise DamagedError(
                reason or "another rank of this group has loaded another state than was saved"
            )

    def _find_other_counters(self, state: Mapping[str, Any]) -> str:
        """Return the contradiction between the counters and the manifest; empty if they agree.

        Unlike the digests, this check works with another number of ranks as well.
        """
        assert self._manifest is not None
        expected = {
            (TRAIN_STATE, "step"): self._manifest.step,
            (QUORUM_STATE, "lineage"): int(self._manifest.lineage, 16),
        }
        for (part, name), value in expected.items():
            if part in state and state[part][name] != value:
                return f"the {name} in it is {state[part][name]}, not {value} as in its manifest"
        return ""

    def give_up(self, error: DamagedError | LoadError, request: LoadRequest, step: int) -> NoReturn:
        """Note a failed load, and raise. A collective.

        The note lets the next start of every group choose another checkpoint. This start cannot
        choose again: it has announced the step to the other groups.

        Args:
            request: the request that chose the checkpoint.
            step: the checkpoint's step; `NO_STEP` for the initial model.

        Raises:
            ConfigError: another start would fail in the same way.
            LoadError: another start may succeed.
        """
        reason = str(error)
        if step == NO_STEP:
            if isinstance(error, LoadError):
                raise error
            raise ConfigError(
                "checkpoint.initial_load_path must be a checkpoint that can be read, got "
                f"{self._folder}, which is damaged: {reason}; give another one"
            ) from error
        self._check_not_replaced()
        is_noted = self._write_note(error)
        if isinstance(error, LoadError):
            raise error
        try:
            # The step from which the next start will go on, for the message.
            without_this_step = replace(request, damaged={step: reason})
            other = agree_on_step(without_this_step, dist.get_rank(), self._gather).step
        except NoCheckpointError:
            if not is_noted:
                raise
            # Another group may have loaded this checkpoint. The next start then heals from that
            # group, or else ends for good.
            if request.step == LATEST:
                lack = "no sound one is left"
            else:
                lack = f"load_step = {request.step} allows no other one"
            raise LoadError(f"checkpoint: {self._folder} is damaged: {reason}; {lack}") from error
        if not is_noted:
            raise ConfigError(
                f"checkpoint: {self._folder} must be sound, got a damaged one ({reason}) that "
                "cannot be marked for all groups, for its folder is not writable; set "
                f"checkpoint.load_step = {other}, or mend it"
            ) from error
        raise LoadError(
            f"checkpoint: {self._folder} is damaged: {reason}; the next start goes on from step "
            f"{other}, unless the group heals from another one (checkpoint.load_step chooses "
            "another step)"
        ) from error

    def _check_not_replaced(self) -> None:
        """Check that the folder still holds the checkpoint that the load began with.

        If another group has saved the step again meanwhile, the bytes may be of two checkpoints.

        Raises:
            LoadError: the folder holds another checkpoint, or is gone. On all ranks.
        """

        def check() -> None:
            id_at_begin = _save_id(self._manifest)
            id_now = _save_id(Manifest.read(self._folder))
            is_same = id_at_begin == id_now and self._folder.is_dir()
            if dist.get_rank() == 0 and not is_same:
                raise LoadError(
                    f"{self._folder} was replaced while it was loaded; another start chooses anew"
                )

        read_on_all_ranks(check, str(self._folder), self._gather)

    def _write_note(self, error: DamagedError | LoadError) -> bool:
        """Write a note of the failure; return False if the folder is not writable."""
        is_noted = False
        if dist.get_rank() == 0:
            note = FailedLoad(
                save_id=_save_id(self._manifest),
                damaged=isinstance(error, DamagedError),
                reason=str(error),
                by=self._this_run.writer,
                time=time.strftime("%Y-%m-%d %H:%M:%S"),
            )
            with contextlib.suppress(OSError):  # The folder may be read-only.
                note.write(self._folder)
                is_noted = True
        return bool(self._gather(int(is_noted))[0])


def _count_tokens_of_stock(state: Mapping[str, Any]) -> None:
    """Compute the job's tokens from a checkpoint of stock torchtitan.

    Stock torchtitan saves the tokens of one data rank, and the number of its data ranks.
    """
    counters = state.get(TRAIN_STATE)
    if counters is not None:
        counters[JOB_TOKENS] = counters["ntokens_seen"] * state.get(STOCK_RANKS, 1)


def _save_id(manifest: Manifest | None) -> str:
    return "" if manifest is None else manifest.save_id
