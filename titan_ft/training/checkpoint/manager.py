# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's CheckpointManager for replica groups that share one checkpoint folder.

Every group holds the whole state of the job, so one group saves for all: the *writer*. After each
committed step, the writer is the group with the lowest slot of the groups that made this step. If
the writer is lost, the next commit makes another group the writer.

A save:

1. The trainer calls `save` in all groups after every step. The writer saves if this step or an
   earlier one must be saved, and no group has saved it.
2. torchtitan collects the state and calls `dcp_save`. All ranks of the writer write into the
   group's own folder, for example `partial-10-group-0`.
3. Rank 0 adds the manifest, reads the tables of the files back, and renames the folder to
   `step-10`. The rename *publishes* the checkpoint.
4. The writer's next call of `save` reports the result, and sets `position.saved_step`. The next
   exchange carries this number to the other groups.

With asynchronous saves, DCP (torch.distributed.checkpoint) writes on a thread of its own, and 3
follows on that thread. A writer that dies during a save leaves a partial folder. No load considers
it, and a writer deletes it later.

A load: the group joins the job. If other groups train, the group heals from them and loads nothing.
Otherwise rank 0 chooses a checkpoint, and all ranks load it and compare it with its manifest.

Terms:

- step: torchtitan's count of local steps, which names a checkpoint. An *update* is one commit of
  all groups. With LocalSGD or DiLoCo several steps make one update. `position.step` and
  `position.saved_step` count updates.
- manifest: the file `titan_ft.json` of a checkpoint, with its origin and digests of its contents.
- ledger: the record of the batches that the job has trained, with the loaders' states. Each
  data-parallel rank of the whole job has one shard of the data.
- lineage: a hash of the history of a state. Equal lineages mean equal states.

See docs/checkpoints.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from titan_ft.config import ConfigError
from titan_ft.host.hugging_face import merge_together
from titan_ft.host.titan import DATALOADER, TRAIN_STATE, AsyncMode, HostCheckpoints, logger, purge
from titan_ft.round_settings import steps_per_round
from titan_ft.run.events import (
    CheckpointFailed,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointSetAside,
    CheckpointSkipped,
    CheckpointWithdrawn,
    DataReset,
    SavingBeforeLeaving,
)
from titan_ft.system.ownership import check_links
from titan_ft.training.checkpoint.choice import (
    NO_STEP,
    Choice,
    LoadError,
    LoadRequest,
    NoCheckpointError,
    agree_on_step,
    check_same_state,
    check_still_there,
)
from titan_ft.training.checkpoint.damage import find_defect, one_line
from titan_ft.training.checkpoint.digest import MODEL, take_digests
from titan_ft.training.checkpoint.export import (
    Converted,
    Tensor,
    check_export,
    check_import,
    describe_tensors,
    gather_tensors,
)
from titan_ft.training.checkpoint.folder import (
    LATEST,
    DamagedError,
    Manifest,
    complete_steps,
    find_writer,
    partial_folder,
    partial_sizes,
    publish,
    read_complete_manifest,
    rename_abandoned,
    rename_for_deletion,
)
from titan_ft.training.checkpoint.load import OUTER_STATE, Load
from titan_ft.training.checkpoint.reader import check_values, load_checkpoint
from titan_ft.training.checkpoint.save import (
    PartError,
    Save,
    SaveError,
    SaveState,
    agree_on_reason,
    describe_latest,
    latest_due,
    on_all_ranks,
)
from titan_ft.training.checkpoint.states import (
    QUORUM_STATE,
    QuorumState,
    Shards,
    TrainCounters,
    stock_loaders,
)
from titan_ft.training.checkpoint.trainer_view import TrainerView


@dataclass(frozen=True)
class _Fallback:
    """A save in torchtitan's own format, tried if the configured save has failed.

    Attributes:
        model_only: False for the whole training state.
        content: the same in words, for messages.
    """

    model_only: bool
    content: str


class ReplicaCheckpoints(HostCheckpoints):
    """Saves and loads the checkpoints of one replica group.

    torchtitan's Trainer creates this object, and calls `load` and `save`. `ReplicaTrainer` calls
    `attach` before the first load, and the other public methods. All methods run on the training
    thread and on all ranks of a group. Exceptions are `_publish_files` and `_purge_remains`: during
    an asynchronous save they run on DCP's thread.

    A failed save does not end the training: the folder keeps its complete checkpoints, and a later
    step tries again. A failed load ends this process. Before that it writes a note into the
    checkpoint's folder, so that the next start of every group chooses another checkpoint.

    Raises:
        ConfigError: torchtitan refuses a setting.
    """

    folder: str
    purge_thread: threading.Thread | None
    sd_adapter: Any
    last_save_in_hf: bool
    last_save_model_only: bool

    def __init__(self, **kwargs: Any) -> None:
        self._trainer: TrainerView | None = None
        self._running_save: Save | None = None
        self._running_load: Load | None = None
        # For each step that this process has published: the number of updates in its state.
        self._updates_by_own_step: dict[int, int] = {}
        self._latest_failed_save: Save | None = None
        self._latest_failure_reason = ""
        # The failure of the last step's save. It is raised late, see `raise_error_of_last_step`.
        self._error_of_last_step: SaveError | None = None
        self._longest_save_seconds = 0.0
        # The step whose checkpoint this process has loaded; 0 = none.
        self._loaded_step = 0
        # Shards of the whole job's data; set by `attach`.
        self._num_shards = 0
        check_export(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        check_import(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        try:
            # No dataloader: torchtitan would save its state, which covers this rank's data only.
            # `attach` adds the ledger instead, which covers the data of the whole job.
            super().__init__(**{**kwargs, "dataloader": None})
        except ValueError as error:
            raise ConfigError(f"checkpoint: {one_line(error)}") from error
        if self.enable_staging and not torch.accelerator.is_available():
            raise ConfigError(
                'checkpoint.async_mode must be "disabled" or "async" without a GPU, got '
                f"{self.async_mode.value!r}; the staging of the other modes is for GPUs"
            )
        # torchtitan starts its purge thread only if keep_latest_k is set. Here the thread is always
        # needed: it also deletes the partial folders of dead writers.
        if self.enable and self.purge_thread is None:
            self.purge_queue: queue.Queue[Any] = queue.Queue()
            self.purge_thread = threading.Thread(
                target=purge, args=(self.purge_queue,), daemon=True
            )
            self.purge_thread.start()

    def attach(self, trainer: TrainerView) -> None:
        """Add this project's parts to the state that torchtitan saves. A collective of the group.

        Args:
            trainer: what checkpoints need from the trainer; it exists only after this manager.
        """
        self._trainer = trainer
        if not self.enable:
            return
        self.states[DATALOADER] = Shards(trainer.ledger)
        self.states[QUORUM_STATE] = QuorumState(trainer.position)
        outer_optimizer = trainer.strategy.outer
        if outer_optimizer is not None and outer_optimizer.has_state:
            self.states[OUTER_STATE] = outer_optimizer
        # The ledger of a rank has one shard of each slot. Shards are numbered from 0 through the
        # whole job, so one rank of this group has the shard with the largest number.
        largest_on_this_rank = max(int(number) for number in trainer.ledger.shards())
        self._num_shards = max(trainer.gather(largest_on_this_rank)) + 1
        counters = self.states[TRAIN_STATE]
        # A second call must not wrap the counters again.
        if not isinstance(counters, TrainCounters):
            self.states[TRAIN_STATE] = TrainCounters(counters, self._num_shards)

    @property
    def trainer(self) -> TrainerView:
        assert self._trainer is not None, "attach() comes first"
        return self._trainer

    @property
    def _writer_name(self) -> str:
        """Name of this group in its partial folders and manifests."""
        return f"group-{self.trainer.config.fault_tolerance.replica_id}"

    def load(self, step: int = LATEST) -> bool:
        """Join the job, and load a checkpoint unless this group must heal from other groups.

        Args:
            step: `checkpoint.load_step`, the checkpoint from which the user lets the job begin. If
                the job has saved later checkpoints since, the latest of them is loaded instead: a
                restart after a failure must not go back to `step`.

        Returns:
            True if a checkpoint was loaded; False if the group must heal, or if the job begins with
            its initial weights.

        Raises:
            ConfigError: the checkpoint is of another run, or incomplete, or no sound one is left.
            LoadError: the checkpoint cannot be read, is damaged, or has vanished. The next start
                may find another one.
        """
        if not self.enable:
            if step != LATEST:
                raise ConfigError(
                    f"checkpoint.load_step needs checkpoint.enable = true, got {step}; set it, or "
                    "leave load_step out"
                )
            return False
        request = LoadRequest(
            folder=self.folder,
            find_defect=find_defect,
            step=step,
            job_id=self._job_id,
            initial=self.initial_load_path,
        )
        gather = self.trainer.gather
        try:
            choice = agree_on_step(request, dist.get_rank(), gather)
        except NoCheckpointError:
            # The error matters only if no other group can give its state to this group.
            must_heal = self.trainer.join_before_load(0)
            if must_heal:
                return False
            raise
        if dist.get_rank() == 0 and not self.load_only:
            self._purge_remains()
        # Join, and so announce the step, before the load. Otherwise the group that loads first
        # would seem to be ahead of the groups that still load, and they would heal from it.
        has_checkpoint = choice.step != NO_STEP
        must_heal = self.trainer.join_before_load(choice.step if has_checkpoint else 0)
        if must_heal:
            return False
        self._report_choice(request, choice)
        if has_checkpoint:
            check_still_there(self.folder, choice.step, gather)
        try:
            if has_checkpoint:
                loaded = super().load(choice.step)
            else:
                with self._hide_incomplete_folder():
                    loaded = super().load(choice.step)
        except ConfigError:
            raise  # A ConfigError is a ValueError, and already has a message for the user.
        except (DamagedError, LoadError) as error:
            assert self._running_load is not None
            # Always raises.
            self._running_load.give_up(error, request, choice.step)
        except ValueError as error:
            # torchtitan raises this error for a setting that it cannot use.
            raise ConfigError(f"checkpoint: {one_line(error)}") from error
        if loaded:
            check_same_state(self.folder, choice.step, self.trainer.position.lineage, gather)
            self.trainer.on_load()
            self._report_loaded()
        return loaded

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save the state after `curr_step` if this group is the writer and the state must be saved.

        The training loop calls this in every group after every step. A failed save raises no error
        here. A failure of the last save is raised later, by `raise_error_of_last_step`.

        Args:
            last_step: True after the last step of the job.
        """
        if not self.enable or self.load_only:
            return
        self._conclude_ended_save(wait=last_step)
        # The latest step that the settings want saved: this one or an earlier one.
        wanted_step = latest_due(
            curr_step, self.interval, self.enable_first_step_checkpoint, last_step
        )
        if wanted_step == curr_step:
            wanted_updates = self.trainer.position.step
        else:
            wanted_updates = self.trainer.strategy.update_of(wanted_step)
        # An earlier step is still unsaved if its writer was lost, or if a save takes longer than
        # the interval. Then the writer saves the current state in its place.
        if not self.trainer.is_writer or self._running_save is not None:
            return
        if self._needs_save(wanted_updates):
            self._save_with_fallbacks(curr_step, last_step)

    def _needs_save(self, updates: int) -> bool:
        """Return True if a state of at least `updates` updates must be saved.

        False if a checkpoint has such a state, or if this group's save of such a state failed.
        """
        failed = self._latest_failed_save
        if failed is not None and updates <= failed.updates:
            return False
        return updates > self.trainer.position.saved_step

    def pauses_after(self, step: int) -> bool:
        """Return True if the writer may stop training after `step` for a save.

        Every group asks, because any group may become the writer. The engine then requests no
        quorum before the save, since the other groups would wait for this group in the exchange.
        """
        if not self.enable or self.load_only:
            return False
        wanted_step = latest_due(step, self.interval, self.enable_first_step_checkpoint, last=False)
        if wanted_step == step:
            return True
        if self.async_mode != AsyncMode.DISABLED:
            # An earlier step counts as unsaved during the whole asynchronous save of it. That is no
            # reason to pause.
            return False
        return self.trainer.strategy.update_of(wanted_step) > self.trainer.position.saved_step

    def finish(self, step: int) -> None:
        """Save the final state if no group has saved it, for example because the writer was lost.

        The trainer calls this in all groups after the last step `step`, when no group trains any
        more. All remaining groups call it, so at least one of them saves. A group whose save of
        this step has failed does not try again.
        """
        if not self.enable or self.load_only:
            return
        self._conclude_ended_save(wait=True)
        if self._needs_save(self.trainer.position.step):
            logger.warning("no group has saved step %d: saving it here", step)
            self._save_with_fallbacks(step, last_step=True)
            return
        # If all groups left after the last step, `save_on_leave` has saved the whole training state
        # of it, and this start has loaded that. A last save with other contents is still missing.
        differs_from_save_on_leave = self.last_save_in_hf or self.last_save_model_only
        if self._loaded_step == step and differs_from_save_on_leave:
            self._save_with_fallbacks(step, last_step=True)

    def lacks_state(self) -> bool:
        """Return True if no checkpoint holds this group's whole training state.

        Waits for a running save first. A collective of the group.
        """
        if not self.enable or self.load_only:
            return False
        self._conclude_ended_save(wait=True)
        updates = self.trainer.position.step
        if updates > self.trainer.position.saved_step:
            return True
        return self._holds_model_only(self.trainer.strategy.last_step_of(updates))

    def _holds_model_only(self, step: int) -> bool:
        """Return True if the checkpoint of `step` holds the model only, as torchtitan's last save
        does by default.

        A collective of the group: rank 0 reads the folder for all.
        """
        manifest = self._read_manifest_on_rank_0(step)
        return self._broadcast_from_rank_0(manifest is not None and manifest.model_only)

    def holds_state(self, step: int) -> bool:
        """Return True if the checkpoint of `step` holds this group's whole training state.

        Any group may have saved this checkpoint. A collective of the group: rank 0 reads the folder
        for all.
        """
        manifest = self._read_manifest_on_rank_0(step)
        if manifest is None or manifest.model_only:
            is_same = False
        else:
            is_same = manifest.lineage == f"{self.trainer.position.lineage:012x}"
        return self._broadcast_from_rank_0(is_same)

    def _read_manifest_on_rank_0(self, step: int) -> Manifest | None:
        """Return the manifest of the checkpoint of `step` on rank 0; None on other ranks.

        None on rank 0 as well if there is no complete checkpoint, or if it has no manifest.
        """
        if dist.get_rank() != 0:
            return None
        return read_complete_manifest(Path(self._create_checkpoint_id(step)))

    def _broadcast_from_rank_0(self, answer: bool) -> bool:
        """Return rank 0's answer on all ranks. A collective of the group."""
        return bool(self.trainer.gather(int(answer))[0])

    def watch_other_writers(self, step: int) -> Callable[[], bool]:
        """Return a function that checks whether another group has begun to save `step`.

        Groups that leave at the same time save in turn. A group waits for the group before it only
        as long as that group writes.

        The returned function is a collective of the group: rank 0 looks for all ranks. It returns
        True if a partial file of another group is new or larger than at the time of this call.
        """

        def measure_partial_files() -> dict[str, int]:
            if dist.get_rank() != 0:
                return {}
            return partial_sizes(Path(self.folder), step, self._writer_name)

        sizes_at_start = measure_partial_files()

        def has_begun() -> bool:
            # A vanished file does not count: a purge of a dead writer's files would look like a
            # save.
            has_grown = False
            for name, size in measure_partial_files().items():
                is_new = name not in sizes_at_start
                if is_new or size > sizes_at_start[name]:
                    has_grown = True
            return self._broadcast_from_rank_0(has_grown)

        return has_begun

    def save_on_leave(self, step: int, seconds: float) -> None:
        """Save the state after `step` before this group leaves. A collective of the group.

        The trainer calls this if no other group holds the state. The next start of the job must be
        able to resume, so the save has the whole training state in torchtitan's own format. The
        settings of the last save do not apply. A save is also tried if the time is probably too
        short: an interrupted save leaves no checkpoint, and does no harm.

        Args:
            seconds: time left for the save, by this rank's clock.
        """
        # `gather` takes integers only.
        longest_ms = max(self.trainer.gather(round(1000 * self._longest_save_seconds)))
        longest_seconds = longest_ms / 1000 if longest_ms else None
        event = SavingBeforeLeaving(
            step=step, seconds_left=seconds, longest_seconds=longest_seconds
        )
        if dist.get_rank() == 0:
            self.trainer.events.emit(event)
        if event.shortage:
            logger.warning(
                "the checkpoint of step %d may not be complete in time: %s", step, event.shortage
            )
        with self._use_own_format(model_only=False):
            self._save_now(step, last_step=True)

    def raise_error_of_last_step(self) -> None:
        """Raise the error of the last step's save, if this save failed.

        The trainer calls this at the very end. Raised earlier, the error would end this group while
        other groups may still need its state.

        Raises:
            SaveError: the last step could not be saved as configured. The message has the reason,
                and names what is saved instead.
        """
        if self._error_of_last_step is not None:
            raise self._error_of_last_step

    def withdraw_corrupt(self) -> None:
        """Remove this group's checkpoints that may hold a corrupt state.

        The exchange has shown that this group's state differs from the state of the other groups.
        Checkpoints that this group saved before the last agreement of all groups are sound. Later
        ones are removed, and another group saves at its next commit. Does nothing if the states do
        not differ.

        The trainer calls this on all ranks of the group before the group heals, leaves or ends.
        """
        position = self.trainer.position
        if not self.enable or not position.saved_corrupt:
            return
        self._conclude_ended_save(wait=True)
        # After the heal this group may save the failed step again.
        self._latest_failed_save = None
        position.withdraw_saved()
        for step, updates in sorted(self._updates_by_own_step.items()):
            # `agreed_step` counts updates too.
            if updates <= position.agreed_step:
                continue
            del self._updates_by_own_step[step]
            if dist.get_rank() == 0:
                self._remove_own_checkpoint(step)

    def _remove_own_checkpoint(self, step: int) -> None:
        target = Path(self._create_checkpoint_id(step))
        if find_writer(target) != self._writer_name:
            # Another group has replaced this checkpoint by its own, sound one.
            return
        renamed = rename_for_deletion(target, step)
        if renamed is None:  # Another group was faster.
            return
        shutil.rmtree(renamed, ignore_errors=True)
        logger.error("the checkpoint of step %d is withdrawn: this group's state was corrupt", step)
        self.trainer.events.emit(CheckpointWithdrawn(step=step))

    def close(self) -> None:
        """Wait for a running save, but no longer than `drain_timeout_seconds`, and close."""
        # torchtitan also calls this from __del__, perhaps of an object whose __init__ has failed.
        save: Save | None = getattr(self, "_running_save", None)
        if save is not None:
            self._running_save = None
            concurrent.futures.wait(
                [save.done], timeout=self.trainer.config.fault_tolerance.drain_timeout_seconds
            )
            if save.state is SaveState.COMPLETE:
                self._report_saved(save)
            else:
                logger.warning(
                    "the checkpoint of step %d remains incomplete: this group ends", save.step
                )
        super().close()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """Write the state into this group's partial folder, and publish it when it is complete.

        torchtitan's `save` calls this on all ranks of the group. With an asynchronous mode, DCP
        writes on a thread of its own, and publication follows on that thread.

        Args:
            state_dict: the parts of the state by name, with the model's tensors beside them.
            checkpoint_id: path of the published checkpoint, ending in `step-STEP`.
            to_hf: True to write the model in Hugging Face's format, which has no digests.

        Returns:
            DCP's result, which torchtitan keeps.

        Raises:
            PartError: a check or an export has failed on some rank. On all ranks.
            CheckpointException: DCP has failed. On all ranks.
        """
        assert self._running_save is not None
        save = self._running_save
        target = Path(checkpoint_id)
        is_rank_0 = dist.get_rank() == 0
        states = _resolve_stateful(state_dict)
        digests = {} if to_hf else take_digests(states, self.states, self.trainer.gather)
        if DATALOADER in states:
            # Stock torchtitan must be able to continue from this checkpoint. It reads the states of
            # the loaders in a form of its own.
            states[DATALOADER] |= stock_loaders(states[DATALOADER], self._num_shards)

        def check_before_write() -> None:
            check_links(target.parent)
            if not to_hf:
                check_values(states)

        on_all_ranks(check_before_write, self.trainer.gather)
        # torchtitan leaves out all parts but the model if the last save has the model only.
        save.model_only = TRAIN_STATE not in state_dict
        manifest = dataclasses.replace(
            self._describe_this_run(), step=save.step, model_only=save.model_only, digests=digests
        )
        save.partial = partial_folder(target, save.step, self._writer_name)
        if is_rank_0:
            # Other ranks write only after DCP's plan, which rank 0 makes later in this save. So
            # this removes files of an earlier attempt only.
            _remove_folder_or_link(save.partial)

        def publish_when_written(written: Future[Any] | None) -> None:
            try:
                if written is not None:
                    written.result()  # Raises the error of the write.
                # Rank 0's write ends after the writes of all ranks, because it coordinates DCP.
                set_aside = self._publish_files(save, target, manifest) if is_rank_0 else []
                save.done.set_result(set_aside)
            except BaseException as error:  # noqa: BLE001
                # DCP's errors are BaseExceptions. On DCP's thread any error would be lost here, so
                # the future carries the error to `_conclude_ended_save`, which reports it.
                save.done.set_exception(error)

        if to_hf:
            self._write_in_hf(states, save.partial, async_mode)
            publish_when_written(None)
            return None
        result = super().dcp_save(states, str(save.partial), async_mode, enable_garbage_collection)
        written = result.upload_completion if isinstance(result, AsyncSaveResponse) else result
        if isinstance(written, Future):
            written.add_done_callback(publish_when_written)
        else:
            # A synchronous save has written everything already.
            publish_when_written(None)
        return result

    def _write_in_hf(self, states: dict[str, Any], partial: Path, async_mode: AsyncMode) -> None:
        """Write the model in Hugging Face's format, and check the files. A collective of the group.

        Raises:
            PartError: it has failed on some rank. On all ranks.
        """
        gather = self.trainer.gather
        write = super().dcp_save

        def write_together() -> None:
            merge_together(lambda: write(states, str(partial), async_mode, to_hf=True))

        def check_files() -> None:
            if dist.get_rank() == 0:
                export.check(partial)

        with self._use_converted_state(states) as export:
            on_all_ranks(write_together, gather)
        on_all_ranks(check_files, gather)

    def _publish_files(self, save: Save, target: Path, manifest: Manifest) -> list[Path]:
        """Turn the partial folder, which all ranks have filled, into the checkpoint `target`.

        Runs on rank 0: on DCP's thread for an asynchronous save, or else on the training thread.

        Returns:
            Folders of other checkpoints that were set aside, see `publish`.

        Raises:
            OSError: the state is corrupt, the files cannot be read back, or the rename failed.
        """
        assert save.partial is not None
        # The state may have turned out to be corrupt during the save. Another group may have saved
        # this step since, and this save must not replace that one.
        if self.trainer.position.saved_corrupt:
            raise OSError("what this group saves is not the job's state any more")
        manifest.write(save.partial)
        defect = find_defect(save.partial)
        if defect:
            raise OSError(f"what was written cannot be read back: {defect}")
        set_aside = publish(save.partial, target, manifest)
        save.seconds = time.monotonic() - save.started
        self._purge_remains()
        return set_aside

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load the parts of `state_dict` that the checkpoint has, and compare their digests with
        the digests in the manifest.

        torchtitan's `load` calls this on all ranks of the group.

        Args:
            state_dict: the parts of the state by name, with the model's tensors beside them.
            from_hf: True if the checkpoint is in Hugging Face's format.

        Raises:
            ConfigError: the checkpoint is of another model, or no training state.
            LoadError: the checkpoint cannot be read.
            DamagedError: its bytes are wrong.
        """
        load = Load(Path(checkpoint_id), self._describe_this_run(), self.trainer.gather)
        self._running_load = load
        states = _resolve_stateful(state_dict)
        # Checks the manifest, and drops the parts that the checkpoint lacks.
        load.prepare(states, from_hf)
        try:
            if from_hf:
                super().dcp_load(states, checkpoint_id, from_hf, from_quantized)
            else:
                # Not torchtitan's `dcp_load`: it unpickles, which may run code of a stranger.
                load_checkpoint(states, checkpoint_id)
                if MODEL in self.states:
                    self.states[MODEL].load_state_dict(states)
        except CheckpointException as error:
            load.raise_failure(error, from_hf)  # Always raises.
        load.check_loaded(states, self.states)
        for name, part in state_dict.items():
            if isinstance(part, Stateful) and name in states:
                part.load_state_dict(states[name])

    # Methods that torchtitan's `save` and `load` call

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Answer torchtitan's `save`: `save` of this class has decided already."""
        return self._running_save is not None

    def _async_wait(self) -> None:
        """Only forget torchtitan's future.

        `_conclude_ended_save` has waited for this future, and has reported its errors. torchtitan
        would raise them.
        """
        self.save_future = None

    def _purge_stale_checkpoints(self) -> None:
        """Delete all but the latest `keep_latest_k` sound checkpoints, on the purge thread."""
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        # Steps after the latest one that counts belong to damaged checkpoints: the load skipped
        # them, and the job went on from an earlier step. They are neither kept nor deleted.
        latest = self._latest_step()
        steps = [step for step in complete_steps(self.folder) if step <= latest]
        if len(steps) <= self.keep_latest_k:
            return
        num_kept = 0
        for step in reversed(steps):
            target = Path(self._create_checkpoint_id(step))
            if num_kept == self.keep_latest_k:
                self._delete_later(rename_for_deletion(target, step))
            elif _is_sound_checkpoint(target):
                # Only sound checkpoints count. A damaged one would push the last sound one out.
                num_kept += 1

    # Methods that only this class calls

    def _delete_later(self, renamed: Path | None) -> None:
        """Let the purge thread delete a renamed folder; None if there is nothing to delete."""
        if renamed is not None:
            self.purge_queue.put(str(renamed))

    def _purge_remains(self) -> None:
        """Delete the partial folders of dead writers, on the purge thread.

        Call this on rank 0, on any thread, only while this group writes no files: all partial
        folders of this group are deleted.
        """
        for renamed in rename_abandoned(Path(self.folder), self._writer_name):
            self._delete_later(renamed)

    def _report_choice(self, request: LoadRequest, choice: Choice) -> None:
        """Report damaged checkpoints, and a load of another step than `checkpoint.load_step`."""
        if request.step not in (LATEST, choice.step):
            logger.warning(
                "checkpoint.load_step = %d counts no longer: this job (fault_tolerance.job_id = "
                "%r) has saved step %d since; to begin there again, give the job another name",
                request.step,
                request.job_id,
                choice.step,
            )
        for step, reason in choice.damaged.items():
            logger.error(
                "the checkpoint of step %d is damaged (%s): going on from step %d; "
                "checkpoint.load_step chooses another one",
                step,
                reason,
                choice.step,
            )
            self.trainer.events.emit(
                CheckpointSkipped(step=step, reason=reason, instead=choice.step)
            )

    @contextlib.contextmanager
    def _hide_incomplete_folder(self) -> Iterator[None]:
        """Let torchtitan's `load` believe that the checkpoint folder does not exist.

        The folder holds no complete checkpoint. torchtitan ignores `initial_load_path` if the
        folder exists, whatever the folder holds.
        """
        folder = self.folder
        self.folder = os.path.join(folder, "none")
        try:
            yield
        finally:
            self.folder = folder

    @contextlib.contextmanager
    def _use_converted_state(self, state_dict: dict[str, Any]) -> Iterator[Converted]:
        """Convert the model to Hugging Face's format, and give the result to torchtitan's save.

        Conversion may fail on one rank only. In the middle of torchtitan's save, the other ranks
        would then wait in a collective forever. So the conversion comes first, and fails on all
        ranks or on none. Inside the context, torchtitan's `sd_adapter` returns the converted state.
        """
        adapter = self.sd_adapter

        def convert() -> tuple[dict[str, Any], dict[str, Tensor]]:
            # Without this module torch would fail in the middle of the save.
            importlib.import_module("safetensors.torch")
            state = adapter.to_hf(state_dict)
            return state, describe_tensors(state)

        state, own_tensors = on_all_ranks(convert, self.trainer.gather)
        tensors = gather_tensors(own_tensors, self.trainer.gather)
        index = adapter.fqn_to_index_mapping
        export = on_all_ranks(lambda: Converted(state, index, tensors), self.trainer.gather)
        self.sd_adapter = export
        try:
            yield export
        finally:
            self.sd_adapter = adapter

    def _save_with_fallbacks(self, step: int, last_step: bool) -> None:
        """Save the state after `step`; try other formats if the last step cannot be saved.

        A user can remove the obstacle later, and convert a checkpoint of another format. Without a
        checkpoint of the last step, the training since the last checkpoint would be lost.
        """
        self._save_now(step, last_step)
        has_failed = self._latest_failed_step() >= step
        if not has_failed or not last_step:
            return
        reason = self._latest_failure_reason
        target = self._create_checkpoint_id(step)
        text = (
            f"checkpoint.folder ({self.folder}) must take the checkpoint of the last step, got: "
            f"{reason}; {describe_latest(self._latest_step())}; make room there, or give another "
            "one, and start the run again"
        )
        for fallback in self._list_fallbacks():
            logger.warning(
                "saving %s of step %d in torchtitan's own format instead", fallback.content, step
            )
            with self._use_own_format(fallback.model_only):
                self._save_now(step, last_step=True)
            is_published = step in self._updates_by_own_step
            if is_published:
                text = (
                    f"checkpoint: step {step} could not be saved as asked: {reason}. Nothing is "
                    f"lost of {fallback.content}, which is in {target}, in torchtitan's own format "
                    "(DCP); for Hugging Face's, convert it with torchtitan's "
                    "scripts/checkpoint_conversion/convert_to_hf.py"
                )
                break
        self._error_of_last_step = SaveError(text)

    def _list_fallbacks(self) -> list[_Fallback]:
        """Return the saves to try after the configured last save has failed, best first."""
        fallbacks = []
        if self.last_save_in_hf:
            fallbacks.append(_Fallback(model_only=False, content="the whole training state"))
        if self.last_save_in_hf or not self.last_save_model_only:
            # The model has a third of the training state's size, so the disk may have room for it.
            fallbacks.append(_Fallback(model_only=True, content="the model"))
        return fallbacks

    def _save_now(self, step: int, last_step: bool) -> None:
        """Start a save of the state after `step`; also wait for it if it is the last step."""
        self._running_save = save = Save(step, self.trainer.position.step)
        try:
            # With LocalSGD or DiLoCo the model has local weights. The checkpoint gets the weights
            # on which all groups agree.
            with self.trainer.strategy.lend_agreed_weights():
                super().save(step, last_step)
        except (CheckpointException, PartError) as error:
            # These errors come on all ranks, or on none. Any other error ends this rank, because
            # the other ranks are in a collective of the save.
            save.done.set_exception(error)
        self._conclude_ended_save(wait=last_step)

    @contextlib.contextmanager
    def _use_own_format(self, model_only: bool) -> Iterator[None]:
        """Let torchtitan save the last step in its own format, despite the settings."""
        in_hf = self.last_save_in_hf
        configured_model_only = self.last_save_model_only
        self.last_save_in_hf = False
        self.last_save_model_only = model_only
        try:
            yield
        finally:
            self.last_save_in_hf = in_hf
            self.last_save_model_only = configured_model_only

    def _conclude_ended_save(self, wait: bool = False) -> None:
        """Conclude the running save if it has ended on all ranks of this group. A collective.

        Args:
            wait: True to wait for this rank's end of the save first.
        """
        save = self._running_save
        if save is None:
            return
        if wait:
            concurrent.futures.wait([save.done])
        states = self.trainer.gather(save.state)
        if SaveState.UNDER_WAY in states:
            return
        self._running_save = None
        if SaveState.FAILED in states:
            self._conclude_failed(save)
        else:
            self._conclude_published(save)

    def _conclude_failed(self, save: Save) -> None:
        reason = agree_on_reason(save.done.exception(), Path(self.folder))
        latest = self._latest_step()
        if dist.get_rank() == 0 and save.partial is not None:
            # Now, not on the purge thread: the files take the room that the next save needs.
            shutil.rmtree(save.partial, ignore_errors=True)
        logger.error(
            "the checkpoint of step %d could not be written: %s; %s",
            save.step,
            reason,
            describe_latest(latest),
        )
        # The last step may be tried in several formats. Only the first failure makes an event.
        if self._latest_failed_step() < save.step:
            self._latest_failed_save = save
            self._latest_failure_reason = reason
            self.trainer.events.emit(CheckpointFailed(step=save.step, error=reason, latest=latest))

    def _conclude_published(self, save: Save) -> None:
        position = self.trainer.position
        # Another group may have saved a later state meanwhile.
        position.set_saved_step(max(position.saved_step, save.updates))
        self._updates_by_own_step[save.step] = save.updates
        self._longest_save_seconds = max(self._longest_save_seconds, save.seconds)
        self._report_saved(save)
        join_seconds = self.trainer.config.fault_tolerance.join_timeout_ms / 1000
        if self.async_mode == AsyncMode.DISABLED and save.seconds > join_seconds:
            logger.warning(
                "saving took %.0f s, and the other groups wait for this one no longer than "
                "fault_tolerance."
                'join_timeout_ms (%g s): raise it, or set checkpoint.async_mode = "async"',
                save.seconds,
                join_seconds,
            )
        self._purge_stale_checkpoints()

    def _latest_failed_step(self) -> int:
        """Return the step of the latest save of this group that failed; 0 = none."""
        return 0 if self._latest_failed_save is None else self._latest_failed_save.step

    def _latest_step(self) -> int:
        """Return the step of the latest complete checkpoint that this group knows of; 0 = none."""
        return self.trainer.strategy.last_step_of(self.trainer.position.saved_step)

    def _report_saved(self, save: Save) -> None:
        """Report a published checkpoint, and the checkpoints of other jobs that it set aside."""
        if dist.get_rank() != 0:
            return
        self.trainer.events.emit(
            CheckpointSaved(step=save.step, seconds=save.seconds, model_only=save.model_only)
        )
        for folder in save.done.result():
            logger.warning(
                "this job went back before a checkpoint of another one, which is %s now", folder
            )
            self.trainer.events.emit(CheckpointSetAside(step=save.step, folder=folder.name))

    def _report_loaded(self) -> None:
        """Note and report the loaded step, and whether the data begins anew."""
        trainer = self.trainer
        step = self.states[TRAIN_STATE].state_dict()["step"]
        trainer.position.set_saved_step(trainer.strategy.update_of(step))
        self._loaded_step = step
        trainer.events.emit(CheckpointLoaded(step=step, lineage=f"{trainer.position.lineage:012x}"))
        load = self._running_load
        assert load is not None
        if load.data_reset_reason:
            logger.warning(
                "training goes on after step %d, but its data begins anew: %s",
                step,
                load.data_reset_reason,
            )
            trainer.events.emit(
                DataReset(step=step, reason=load.data_reset_reason, asked=load.asks_for_reset)
            )

    @property
    def _job_id(self) -> str:
        """Name of this job, the same after a restart."""
        # Slurm keeps the id of an array when it requeues elements of the array.
        slurm_id = os.environ.get("SLURM_ARRAY_JOB_ID", "")
        return self.trainer.config.fault_tolerance.job_id or slurm_id

    def _describe_this_run(self) -> Manifest:
        """Return the manifest that a save would have now, but without step and digests."""
        config = self.trainer.config
        return Manifest(
            step=0,
            lineage=f"{self.trainer.position.lineage:012x}",
            model=f"{config.model.name} {config.model.flavor}",
            dataset=config.training.dataset,
            seq_len=config.training.seq_len,
            num_shards=self._num_shards,
            model_only=False,
            writer=self._writer_name,
            round_steps=steps_per_round(config.fault_tolerance),
            job_id=self._job_id,
            load_step=config.checkpoint.load_step,
            save_id=uuid.uuid4().hex,
        )


def _is_sound_checkpoint(folder: Path) -> bool:
    """Return True if the tables of a checkpoint can be read and show no defect."""
    try:
        return not find_defect(folder)
    except OSError:
        return False


def _remove_folder_or_link(path: Path) -> None:
    # Only another user could have put a link here. Through the link, a save would overwrite files
    # elsewhere, such as another checkpoint.
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _resolve_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace each object in `state_dict` by its own state; tensors stay as they are."""
    states = {}
    for name, part in state_dict.items():
        states[name] = part.state_dict() if isinstance(part, Stateful) else part
    return states
