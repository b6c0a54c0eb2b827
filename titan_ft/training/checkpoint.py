# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a fault-tolerant run: torchtitan's own, written by one group on commit, with the ledger inside."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import os
import shutil
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger

from titan_ft.config import ConfigError
from titan_ft.replica.errors import FinalError
from titan_ft.replica.ledger import Ledger
from titan_ft.round_settings import steps_per_round
from titan_ft.run.events import CheckpointFailed, CheckpointLoaded, CheckpointSaved, CheckpointWithdrawn, DataReset
from titan_ft.training.checkpoint_choice import (
    NONE,
    agree_on_step,
    check_same_state,
    check_still_there,
    together,
)
from titan_ft.training.checkpoint_export import (
    Converted,
    check_export,
    check_import,
    check_importable,
    merge_together,
)
from titan_ft.training.checkpoint_folder import (
    ELSEWHERE,
    Manifest,
    check_model,
    check_rounds,
    complete_steps,
    data_change,
    discard,
    partial_folder,
    publish,
    writer_of,
)
from titan_ft.training.checkpoint_host import CheckpointHost

QUORUM_STATE = "titan_ft"  # our key beside torchtitan's "model", "optimizer", ...
OUTER_STATE = "outer"  # the outer optimizer's, with a semi-synchronous method
T = TypeVar("T")


ELSEWHERE_IN_GROUP = "it failed on another rank of this group"


class SaveError(FinalError):
    """The last step could not be saved as it was asked for.

    Training is over. A group that was started again would make the steps since its last checkpoint once more, only to
    fail at the same save.
    """


class _PartError(Exception):
    """A part of a save failed on a rank of this group; raised on all of them."""


class _State(IntEnum):
    UNDER_WAY = 0
    COMPLETE = 1
    FAILED = 2


@dataclass
class _Save:
    """A save of this group; `done` once its checkpoint is published, as far as this rank knows."""

    step: int
    updates: int  # committed ones in its state
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    done: Future[None] = field(default_factory=Future)

    @property
    def state(self) -> _State:
        if not self.done.done():
            return _State.UNDER_WAY
        return _State.COMPLETE if self.done.exception() is None else _State.FAILED


class ReplicaCheckpoints(CheckpointManager):
    """torchtitan's checkpoints, for groups that share one folder; `attach` comes before the first load.

    Raises:
        ConfigError: a setting that torchtitan refuses.
    """

    folder: str
    sd_adapter: Any
    last_save_in_hf: bool
    last_save_model_only: bool

    def __init__(self, **kwargs: Any) -> None:
        self._host: CheckpointHost | None = None
        self._under_way: _Save | None = None
        self._published: dict[int, int] = {}  # steps that this process saved, with the updates in their state
        self._failed: _Save | None = None  # the latest save of this group that did
        self._failure = ""  # why it did
        self._last_failure: SaveError | None = None
        self._num_shards = 0
        self._reset = ""  # why the data begins anew after the load under way
        check_export(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        check_import(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        try:
            # In place of the loaders' states the ledger's shards are saved.
            super().__init__(**{**kwargs, "dataloader": None})
        except ValueError as error:
            raise ConfigError(f"checkpoint: {_one_line(error)}") from error
        if self.enable_staging and not torch.accelerator.is_available():
            raise ConfigError(
                f'checkpoint.async_mode must be "disabled" or "async" without a GPU, got {self.async_mode.value!r}; '
                "the staging of the other modes is for GPUs"
            )

    def attach(self, host: CheckpointHost) -> None:
        """Connect to the replica dimension. All ranks of a group."""
        self._host = host
        if self.enable:
            self.states[DATALOADER] = _Shards(host.ledger)
            self.states[QUORUM_STATE] = _QuorumState(host)
            if host.outer is not None and host.outer.has_state:
                self.states[OUTER_STATE] = host.outer
            # Shards are numbered from 0 through the whole job; the last data rank of a group has the largest number.
            self._num_shards = max(host.gather(max(map(int, host.ledger.shards())))) + 1

    @property
    def host(self) -> CheckpointHost:
        """Return what was attached."""
        assert self._host is not None, "attach() comes first"
        return self._host

    @property
    def _name(self) -> str:
        """Return what this group is called as a writer of checkpoints."""
        return f"group-{self.host.config.fault_tolerance.replica_id}"

    def load(self, step: int = -1) -> bool:
        """Load the latest complete checkpoint (or that of `step`), unless the job goes on in other groups.

        Raises:
            ConfigError: the checkpoint is not one of this run, or not complete.
            LoadError: it cannot be read, or has vanished.
        """
        if not self.enable:
            return False
        found = agree_on_step(self.folder, step, self.initial_load_path, dist.get_rank(), self.host.gather)
        # Said before it is loaded: else a group that is first with its own load would seem to be ahead.
        if self.host.heals_instead(max(found, 0)):
            return False
        if found != NONE:
            check_still_there(self.folder, found, self.host.gather)
        try:
            with self._as_without_folder() if found == NONE else contextlib.nullcontext():
                loaded = super().load(found)
        except ConfigError:
            raise
        except ValueError as error:  # torchtitan's answer to a setting that it cannot use
            raise ConfigError(f"checkpoint: {_one_line(error)}") from error
        if loaded:
            check_same_state(self.folder, found, self.host.position.lineage, self.host.gather)
            self.host.on_load()
            self._emit_loaded()
        return loaded

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save the state after `curr_step` if it is this group's turn. Every group calls it after every step.

        A save that fails is told and ends nothing here: the next due step tries again, and what follows from a failure
        of the last one is for when all groups have finished (see `raise_last_failure`).
        """
        if not self.enable or self.load_only:
            return
        self._settle(wait=last_step)
        due = latest_due(curr_step, self.interval, self.enable_first_step_checkpoint, last_step)
        # Due since an earlier step, if a writer was lost with its save or was slower than the interval.
        updates = self.host.position.step if due == curr_step else self.host.updates(due)
        if self.host.is_writer and self._under_way is None and self._lacks(updates):
            self._write(curr_step, last_step)

    def _lacks(self, updates: int) -> bool:
        """Say whether a state of so many updates, or a later one, is neither saved nor tried in vain."""
        return updates > max(self.host.position.saved, 0 if self._failed is None else self._failed.updates)

    def pauses_after(self, step: int) -> bool:
        """Say whether a group may stop for a while after `step` to save, if only to take over from a lost writer."""
        if not self.enable or self.load_only:
            return False
        due = latest_due(step, self.interval, self.enable_first_step_checkpoint, last=False)
        # Asynchronous saves stop nobody for long; while one is under way its step remains due.
        behind = self.host.updates(due) > self.host.position.saved
        return due == step or (self.async_mode == AsyncMode.DISABLED and behind)

    def finish(self, step: int) -> None:
        """Save the final state if its writer was lost; when all groups have finished, or were given up."""
        if not self.enable or self.load_only:
            return
        self._settle(wait=True)
        # In all groups that are left: then at least one of them saves. Not again in one that could not.
        if self._lacks(self.host.position.step):
            logger.warning("no group has saved step %d: saving it here", step)
            self._write(step, last_step=True)

    def raise_last_failure(self) -> None:
        """End this group if it could not save the last step as asked; when there is nothing left to do for others.

        Raises:
            SaveError: says why, and what is saved instead.
        """
        if self._last_failure is not None:
            raise self._last_failure

    def withdraw(self) -> None:
        """Take back what this group has saved since its bytes were last the others', if they are not any more.

        Another group saves then at its next commit. All ranks of a group, before it heals.
        """
        host = self.host
        if not (self.enable and host.position.saved_corrupt):
            return
        self._settle(wait=True)
        self._failed = None  # this group may save these steps again, from the state that it gets
        host.position.withdraw_saved()
        for step in sorted(step for step, updates in self._published.items() if updates > host.position.agreed):
            del self._published[step]
            target = Path(self._create_checkpoint_id(step))
            # Another group may have saved its own state of this step in its place.
            is_own = dist.get_rank() == 0 and writer_of(target) == self._name
            doomed = discard(target, step) if is_own else None
            if doomed is not None:
                shutil.rmtree(doomed, ignore_errors=True)
                logger.error("the checkpoint of step %d is withdrawn: this group's state was corrupt", step)
                host.events.emit(CheckpointWithdrawn(step=step))

    def close(self) -> None:
        """Wait for a save under way, as long as a group may take to leave."""
        save: _Save | None = getattr(self, "_under_way", None)  # torchtitan calls this from __del__, too
        if save is not None:
            self._under_way = None
            concurrent.futures.wait([save.done], timeout=self.host.config.fault_tolerance.drain_timeout_seconds)
            if save.state is _State.COMPLETE:
                self._emit_saved(save)
            else:
                logger.warning("the checkpoint of step %d remains incomplete: this group ends", save.step)
        super().close()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """Save in a folder of this group, and publish that as `checkpoint_id` once it is complete."""
        assert self._under_way is not None
        save, target = self._under_way, Path(checkpoint_id)
        manifest = self._describe(save.step, model_only=TRAIN_STATE not in state_dict)
        partial = partial_folder(target, save.step, self._name)
        coordinates = dist.get_rank() == 0  # in DCP: its part ends when all ranks have written theirs
        if coordinates:
            # What an earlier attempt left. The other ranks write nothing before this one has planned.
            shutil.rmtree(partial, ignore_errors=True)

        def conclude(written: Future[Any] | None) -> None:
            try:
                if written is not None:
                    written.result()
                if coordinates:
                    # Another group may have saved this step in the meantime, and that is not to be replaced.
                    if self.host.position.saved_corrupt:
                        raise OSError("what this group saves is not the job's state any more")
                    publish(partial, target, manifest)
                save.seconds = time.monotonic() - save.started
                save.done.set_result(None)
            except BaseException as error:  # noqa: BLE001  # a thread's edge; DCP's are BaseExceptions. _settle reports it
                save.done.set_exception(error)

        save_in = super().dcp_save
        if to_hf:
            with self._converted(state_dict):
                self._on_all_ranks(
                    lambda: merge_together(lambda: save_in(state_dict, str(partial), async_mode, to_hf=True))
                )
            conclude(None)
            return None
        result = save_in(state_dict, str(partial), async_mode, enable_garbage_collection)
        written = result.upload_completion if isinstance(result, AsyncSaveResponse) else result
        if isinstance(written, Future):
            written.add_done_callback(conclude)
        else:
            conclude(None)
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load what the checkpoint has of `state_dict`.

        Raises:
            ConfigError: it is another model's, or no training state.
            LoadError: what it is made of cannot be read.
        """
        self._reset = ""
        if from_hf:
            together(lambda: check_importable(checkpoint_id), checkpoint_id, self.host.gather)
        else:
            together(lambda: self._prepare(state_dict, checkpoint_id), checkpoint_id, self.host.gather)
        try:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        except CheckpointException as error:
            holds = "weights of this run's model" if from_hf else "state of this run's model and optimizer"
            remedy = "give those of model.flavor as checkpoint.initial_load_path" if from_hf else ELSEWHERE
            raise ConfigError(
                f"checkpoint: {checkpoint_id} must hold the {holds}, got: {_one_line(error)}; {remedy}"
            ) from error

    # torchtitan's steps of a save and a load

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._under_way is not None  # `save` has decided

    def _async_wait(self) -> None:
        self.save_future = None  # `_settle` has waited for it and reported its errors

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k > 0 and dist.get_rank() == 0:
            for step in complete_steps(self.folder)[: -self.keep_latest_k]:
                doomed = discard(Path(self._create_checkpoint_id(step)), step)
                if doomed is not None:
                    self.purge_queue.put(str(doomed))

    # Ours

    @contextlib.contextmanager
    def _as_without_folder(self) -> Iterator[None]:
        """Hide a folder without any complete checkpoint, for which torchtitan would pass over initial_load_path."""
        folder, self.folder = self.folder, os.path.join(self.folder, "none")
        try:
            yield
        finally:
            self.folder = folder

    @contextlib.contextmanager
    def _converted(self, state_dict: dict[str, Any]) -> Iterator[None]:
        """Make what a save in Hugging Face's format needs of each rank; if it fails on one, it fails on all.

        Else the others would go on into collectives of the save, in which that one never comes.
        """
        adapter = self.sd_adapter

        def convert() -> Any:
            importlib.import_module("safetensors.torch")  # torch would miss it in mid-save
            return adapter.to_hf(state_dict)

        self.sd_adapter = Converted(adapter.fqn_to_index_mapping, self._on_all_ranks(convert))
        try:
            yield
        finally:
            self.sd_adapter = adapter

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        """Return what `act` returns; if it fails on one rank of this group, it fails on all. A collective.

        Raises:
            _PartError: it has failed, here or elsewhere.
        """
        reason = ""
        try:
            done = act()
        except (OSError, ImportError, CheckpointException) as error:
            reason = _one_line(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the others must know
            reason = f"{type(error).__name__}: {error}"
            # Perhaps a bug, and where it is would be lost. Marked, for it is not what this worker ends of.
            logger.error("while saving:\n%s", textwrap.indent(traceback.format_exc(), "| "))
        if any(self.host.gather(int(bool(reason)))):
            raise _PartError(reason or ELSEWHERE_IN_GROUP)
        return done

    def _write(self, step: int, last_step: bool) -> None:
        """Save the state after `step`; the last one in another way if it cannot be saved as asked."""
        self._write_once(step, last_step)
        if not last_step or self._failed_at() < step:
            return
        reason, target = self._failure, self._create_checkpoint_id(step)
        text = (
            f"checkpoint.folder ({self.folder}) must take the checkpoint of the last step, got: {reason}; "
            f"{_latest(self._latest_step())}; make room there, or give another one, and start the run again"
        )
        # What keeps it from being saved as asked may be mended, and that save made up for: not the training.
        for model_only, what in self._other_ways():
            logger.warning("saving %s of step %d in torchtitan's own format instead", what, step)
            with self._in_own_format(model_only):
                self._write_once(step, last_step=True)
            if step in self._published:
                text = (
                    f"checkpoint: step {step} could not be saved as asked: {reason}. Nothing is lost of {what}, which "
                    f"is in {target}, in torchtitan's own format (DCP); for Hugging Face's, convert it with "
                    "torchtitan's scripts/checkpoint_conversion/convert_to_hf.py"
                )
                break
        self._last_failure = SaveError(text)

    def _other_ways(self) -> Iterator[tuple[bool, str]]:
        """Yield how else the last step can be saved: whether the model only, and what that is. The best one first."""
        if self.last_save_in_hf:
            yield False, "the whole training state"
        if self.last_save_in_hf or not self.last_save_model_only:
            yield True, "the model"  # a third of the size: there may be room for that

    def _write_once(self, step: int, last_step: bool) -> None:
        self._under_way = save = _Save(step, self.host.position.step)
        try:
            with self.host.lent():
                super().save(step, last_step)
        except (CheckpointException, _PartError) as error:
            # On all ranks, or on none. What one rank alone meets ends it: the others are in a collective of the save.
            save.done.set_exception(error)
        self._settle(wait=last_step)

    @contextlib.contextmanager
    def _in_own_format(self, model_only: bool) -> Iterator[None]:
        """Let torchtitan save the last step in its own format, whatever was asked for."""
        asked = self.last_save_in_hf, self.last_save_model_only
        self.last_save_in_hf, self.last_save_model_only = False, model_only
        try:
            yield
        finally:
            self.last_save_in_hf, self.last_save_model_only = asked

    def _settle(self, wait: bool = False) -> None:
        """Conclude the save under way if it has ended on all ranks of this group."""
        save = self._under_way
        if save is None:
            return
        if wait:
            concurrent.futures.wait([save.done])
        states = self.host.gather(save.state)
        if _State.UNDER_WAY in states:
            return
        self._under_way = None
        if _State.FAILED in states:
            reason, latest = _reason_of_all(save.done.exception()), self._latest_step()
            logger.error("the checkpoint of step %d could not be written: %s; %s", save.step, reason, _latest(latest))
            if self._failed_at() < save.step:  # once, in however many ways the last step is tried
                self._failed, self._failure = save, reason
                self.host.events.emit(CheckpointFailed(step=save.step, error=reason, latest=latest))
            return
        self.host.position.note_saved(max(self.host.position.saved, save.updates))
        self._published[save.step] = save.updates
        self._emit_saved(save)
        join_seconds = self.host.config.fault_tolerance.join_timeout_ms / 1000
        if self.async_mode == AsyncMode.DISABLED and save.seconds > join_seconds:
            logger.warning(
                "saving took %.0f s, and the other groups wait for this one no longer than fault_tolerance."
                'join_timeout_ms (%g s): raise it, or set checkpoint.async_mode = "async"',
                save.seconds,
                join_seconds,
            )
        self._purge_stale_checkpoints()

    def _failed_at(self) -> int:
        """Return the step of the latest save of this group that failed; 0 = none."""
        return 0 if self._failed is None else self._failed.step

    def _latest_step(self) -> int:
        """Return the step of the latest complete checkpoint that this group knows of; 0 = none."""
        return self.host.steps(self.host.position.saved)

    def _emit_saved(self, save: _Save) -> None:
        if dist.get_rank() == 0:
            self.host.events.emit(CheckpointSaved(step=save.step, seconds=save.seconds))

    def _emit_loaded(self) -> None:
        host, step = self.host, self.states[TRAIN_STATE].state_dict()["step"]
        host.position.note_saved(host.updates(step))
        host.events.emit(CheckpointLoaded(step=step, lineage=f"{host.position.lineage:012x}"))
        if self._reset:
            logger.warning("training goes on after step %d, but its data begins anew: %s", step, self._reset)
            host.events.emit(DataReset(step=step, reason=self._reset))

    def _describe(self, step: int = 0, model_only: bool = False) -> Manifest:
        config = self.host.config
        return Manifest(
            step=step,
            lineage=f"{self.host.position.lineage:012x}",
            model=f"{config.model.name} {config.model.flavor}",
            dataset=config.training.dataset,
            seq_len=config.training.seq_len,
            num_shards=self._num_shards,
            model_only=model_only,
            writer=self._name,
            round_steps=steps_per_round(config.fault_tolerance),
        )

    def _prepare(self, state_dict: dict[str, Any], folder: str) -> None:
        """Check that the checkpoint is of this run's model, and leave out of `state_dict` what it cannot give."""
        manifest = Manifest.read(Path(folder))
        check_model(manifest, self._describe(), folder)
        if QUORUM_STATE in state_dict:  # else only the model is wanted
            self._choose(state_dict, manifest, folder)

    def _choose(self, state_dict: dict[str, Any], manifest: Manifest | None, folder: str) -> None:
        """Leave out of `state_dict` what the checkpoint cannot give: DCP takes a missing key for an error."""
        has_data = Path(folder, ".metadata").is_file()
        keys = FileSystemReader(folder).read_metadata().state_dict_metadata if has_data else ()
        if not any(key.startswith(f"{TRAIN_STATE}.") for key in keys):
            raise ConfigError(
                f"checkpoint: {folder} must hold a training state, got a model only (checkpoint.last_save_model_only); "
                "give the step of a full one as checkpoint.load_step, or begin with this model: as "
                "checkpoint.initial_load_path, with another checkpoint.folder"
            )
        check_rounds(manifest, self._describe(), folder)
        if manifest is None:
            del state_dict[QUORUM_STATE]
        if OUTER_STATE in state_dict and not any(key.startswith(f"{OUTER_STATE}.") for key in keys):
            logger.warning("%s has no outer optimizer: it begins without momentum", folder)
            del state_dict[OUTER_STATE]
        self._reset = "" if DATALOADER in state_dict else "checkpoint.exclude_from_loading names it"
        self._reset = self._reset or data_change(manifest, self._describe())
        if self._reset:
            state_dict.pop(DATALOADER, None)


class _Shards(Stateful):
    """The ledger in a checkpoint, by shards of the whole job; each rank gives and takes its own."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def state_dict(self) -> dict[str, Any]:
        return dict(self._ledger.shards())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ledger.load_shards(state_dict)


class _QuorumState(Stateful):
    """What the groups must agree on about the state, in a checkpoint."""

    def __init__(self, host: CheckpointHost) -> None:
        self._host = host

    def state_dict(self) -> dict[str, Any]:
        return {"lineage": self._host.position.lineage}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._host.position.restore(int(state_dict["lineage"]))


def latest_due(step: int, interval: int, first: bool, last: bool) -> int:
    """Return the latest step up to `step` whose state torchtitan would save; 0 = none."""
    return step if last else max(step // interval * interval, int(first and step >= 1))


def _reason_of_all(error: BaseException | None) -> str:
    """Return why a save failed on this rank, or else on the first that knows. A collective of the group.

    Each rank may be the one whose line is shown for all.
    """
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, "" if error is None else _one_line(error))
    own = reasons[dist.get_rank()]
    known = (f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason not in ("", ELSEWHERE_IN_GROUP))
    return own if own not in ("", ELSEWHERE_IN_GROUP) else next(known, ELSEWHERE_IN_GROUP)


def _latest(step: int) -> str:
    """Say what there is to go back to, in words."""
    return f"the latest complete one is that of step {step}" if step else "there is none to go back to"


def _one_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__
