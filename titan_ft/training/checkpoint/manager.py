# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a fault-tolerant run: torchtitan's own, with the ledger inside.

All groups share one folder. After each commit, one group of those that made the step is the writer.

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
    discard,
    manifest_of,
    partial_folder,
    partial_sizes,
    publish,
    take_abandoned,
    writer_of,
)
from titan_ft.training.checkpoint.host import CheckpointHost
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


class ReplicaCheckpoints(HostCheckpoints):
    """torchtitan's checkpoints, for groups that share one folder.

    torchtitan's Trainer builds it, and calls `load` and `save`; `ReplicaTrainer` calls the other
    methods. All of them run on the training thread, and on all ranks of a group. Only `_publish`
    and `_purge_abandoned` may run on the thread of an asynchronous save. Call `attach` before the
    first load.

    A failed save ends nothing: the folder keeps its complete checkpoints, and a later step tries
    again. After a failed load this process ends, with a note for the next start.

    Raises:
        ConfigError: torchtitan refuses a setting.
    """

    folder: str
    purge_thread: threading.Thread | None
    sd_adapter: Any
    last_save_in_hf: bool
    last_save_model_only: bool

    def __init__(self, **kwargs: Any) -> None:
        self._host: CheckpointHost | None = None
        self._under_way: Save | None = None
        self._loading: Load | None = None
        # Steps that this process has saved, with the number of updates in each state.
        self._published: dict[int, int] = {}
        # The latest save of this group that failed, with the reason.
        self._failed: Save | None = None
        self._failure = ""
        # Raised when the other groups no longer need this one, see `raise_last_failure`.
        self._last_failure: SaveError | None = None
        self._longest_seconds = 0.0  # of this group's saves
        self._loaded_step = 0  # the checkpoint that this process continues from; 0 = none
        self._num_shards = 0
        check_export(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        check_import(kwargs["checkpoint_config"], kwargs["sd_adapter"])
        try:
            # The checkpoint has the ledger's shards instead of the state of one loader.
            super().__init__(**{**kwargs, "dataloader": None})
        except ValueError as error:
            raise ConfigError(f"checkpoint: {one_line(error)}") from error
        if self.enable_staging and not torch.accelerator.is_available():
            raise ConfigError(
                'checkpoint.async_mode must be "disabled" or "async" without a GPU, got '
                f"{self.async_mode.value!r}; the staging of the other modes is for GPUs"
            )
        # torchtitan has a purge thread with keep_latest_k only. Here it also deletes the remains of
        # dead writers.
        if self.enable and self.purge_thread is None:
            self.purge_queue: queue.Queue[Any] = queue.Queue()
            self.purge_thread = threading.Thread(
                target=purge, args=(self.purge_queue,), daemon=True
            )
            self.purge_thread.start()

    def attach(self, host: CheckpointHost) -> None:
        """Connect to the replica dimension. A collective of the group."""
        self._host = host
        if not self.enable:
            return
        self.states[DATALOADER] = Shards(host.ledger)
        self.states[QUORUM_STATE] = QuorumState(host.position)
        outer = host.strategy.outer
        if outer is not None and outer.has_state:
            self.states[OUTER_STATE] = outer
        # Shards are numbered from 0 through the whole job. The last data rank of a group has the
        # largest number.
        own_largest = max(int(number) for number in host.ledger.shards())
        self._num_shards = max(host.gather(own_largest)) + 1
        counters = self.states[TRAIN_STATE]
        if not isinstance(counters, TrainCounters):  # The first call of `attach`.
            self.states[TRAIN_STATE] = TrainCounters(counters, self._num_shards)

    @property
    def host(self) -> CheckpointHost:
        """The attached host."""
        assert self._host is not None, "attach() comes first"
        return self._host

    @property
    def _name(self) -> str:
        """Name of this group as a writer of checkpoints."""
        return f"group-{self.host.config.fault_tolerance.replica_id}"

    def load(self, step: int = LATEST) -> bool:
        """Load the latest sound checkpoint, or that of `step`.

        Loads nothing if other groups train the job already: this group then heals from them.

        A job that began at `step` resumes from its own later saves: a restart after a failure must
        not go back to `step`.

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
        request = LoadRequest(self.folder, find_defect, step, self._job_id, self.initial_load_path)
        try:
            choice = agree_on_step(request, dist.get_rank(), self.host.gather)
        except NoCheckpointError:
            if self.host.join_before_load(0):
                return False
            raise
        found = choice.step
        if dist.get_rank() == 0 and not self.load_only:
            self._purge_abandoned()
        # Announce the step before the load. Otherwise the group that loads first would seem to be
        # ahead of the groups that still load.
        if self.host.join_before_load(max(found, 0)):
            return False
        self._report_choice(request, choice)
        if found != NO_STEP:
            check_still_there(self.folder, found, self.host.gather)
        try:
            with contextlib.ExitStack() as stack:
                if found == NO_STEP:
                    stack.enter_context(self._hide_folder())
                loaded = super().load(found)
        except ConfigError:
            raise
        except (DamagedError, LoadError) as error:
            assert self._loading is not None
            self._loading.give_up(error, request, found)
        except ValueError as error:
            # torchtitan raises this error for a setting that it cannot use.
            raise ConfigError(f"checkpoint: {one_line(error)}") from error
        if loaded:
            check_same_state(self.folder, found, self.host.position.lineage, self.host.gather)
            self.host.on_load()
            self._emit_loaded()
        return loaded

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save the state after `curr_step` if this group is the writer.

        Every group calls this method after every step.

        A failed save is reported and ends nothing here: the next due step tries again. A failure of
        the last save takes effect when all groups have finished (see `raise_last_failure`).
        """
        if not self.enable or self.load_only:
            return
        self._settle(wait=last_step)
        due = latest_due(curr_step, self.interval, self.enable_first_step_checkpoint, last_step)
        if due == curr_step:
            updates = self.host.position.step
        else:
            # A save is due since an earlier step: its writer was lost, or a save takes longer than
            # the interval.
            updates = self.host.strategy.updates_of(due)
        if self.host.is_writer and self._under_way is None and self._lacks(updates):
            self._write(curr_step, last_step)

    def _lacks(self, updates: int) -> bool:
        """Return True if no checkpoint has the state after `updates`, or a later one, and no save
        of it failed.
        """
        if self._failed is not None and updates <= self._failed.updates:
            return False
        return updates > self.host.position.saved_step

    def pauses_after(self, step: int) -> bool:
        """Return True if a group may stop after `step` to save, even if it replaces a lost
        writer."""
        if not self.enable or self.load_only:
            return False
        due = latest_due(step, self.interval, self.enable_first_step_checkpoint, last=False)
        if due == step:
            return True
        # An overdue save stops a group only if saves are synchronous. During an asynchronous save
        # its step remains due.
        is_overdue = self.host.strategy.updates_of(due) > self.host.position.saved_step
        return self.async_mode == AsyncMode.DISABLED and is_overdue

    def finish(self, step: int) -> None:
        """Save the final state if its writer was lost.

        Call this when all groups have finished, or were given up.
        """
        if not self.enable or self.load_only:
            return
        self._settle(wait=True)
        # All remaining groups come here, so at least one of them saves. A group whose save of this
        # step has failed does not try again.
        if self._lacks(self.host.position.step):
            logger.warning("no group has saved step %d: saving it here", step)
            self._write(step, last_step=True)
        elif self._loaded_step == step and (self.last_save_in_hf or self.last_save_model_only):
            # The groups left with the last step, and saved the whole training state
            # (`save_on_leave`). The configured last save is still missing.
            self._write(step, last_step=True)

    def lacks_state(self) -> bool:
        """Return True if no checkpoint has this group's state, once the running save has ended.

        A collective of the group.
        """
        if not self.enable or self.load_only:
            return False
        self._settle(wait=True)
        updates = self.host.position.step
        return updates > self.host.position.saved_step or self._holds_model_only(
            self.host.strategy.steps_of(updates)
        )

    def _holds_model_only(self, step: int) -> bool:
        """Return True if the checkpoint of `step` holds the model only, as torchtitan's last save
        does by default.

        A collective of the group: rank 0 reads the folder for all.
        """
        manifest = self._read_manifest(step)
        return self._as_rank_0_sees(manifest is not None and manifest.model_only)

    def holds_state(self, step: int) -> bool:
        """Return True if the checkpoint of `step` holds this group's state, whichever group saved
        it.

        A collective of the group: rank 0 reads the folder for all.
        """
        manifest = self._read_manifest(step)
        if manifest is None or manifest.model_only:
            found = False
        else:
            found = manifest.lineage == f"{self.host.position.lineage:012x}"
        return self._as_rank_0_sees(found)

    def _read_manifest(self, step: int) -> Manifest | None:
        """Return the manifest of the complete checkpoint of `step`, on rank 0; None on other ranks.

        None on rank 0: there is no complete checkpoint, or it has no manifest.
        """
        if dist.get_rank() != 0:
            return None
        return manifest_of(Path(self._create_checkpoint_id(step)))

    def _as_rank_0_sees(self, found: bool) -> bool:
        return bool(self.host.gather(int(found))[0])

    def watch_others(self, step: int) -> Callable[[], bool]:
        """Return a function that detects another group's save of `step` from now on.

        The function returns True if another group has written files of that save since this call.
        Each of its calls is a collective of the group: rank 0 looks for all ranks.
        """

        def look() -> dict[str, int]:
            if dist.get_rank() != 0:
                return {}
            return partial_sizes(Path(self.folder), step, self._name)

        earlier = look()

        def has_begun() -> bool:
            # A vanished file is no sign of a writer: the remains of dead writers are deleted at
            # times.
            has_grown = False
            for name, size in look().items():
                if size > earlier.get(name, -1):
                    has_grown = True
            return self._as_rank_0_sees(has_grown)

        return has_begun

    def save_on_leave(self, step: int, seconds: float) -> None:
        """Save the state after `step`, which no other group holds. A collective of the group.

        The save is a whole training state in torchtitan's own format, whatever the last save is set
        to, because the job is to resume from it. A save that may take too long is tried all the
        same: a checkpoint is published whole or not at all, so an interrupted save does no harm.

        Args:
            seconds: time left for the save, by this rank's clock.
        """
        longest_ms = max(self.host.gather(round(1000 * self._longest_seconds)))
        longest = longest_ms / 1000 if longest_ms else None
        event = SavingBeforeLeaving(step=step, seconds_left=seconds, longest_seconds=longest)
        if dist.get_rank() == 0:
            self.host.events.emit(event)
        if event.shortage:
            logger.warning(
                "the checkpoint of step %d may not be complete in time: %s", step, event.shortage
            )
        with self._in_own_format(model_only=False):
            self._write_once(step, last_step=True)

    def raise_last_failure(self) -> None:
        """End this group if it could not save the last step as configured.

        Call this when the other groups no longer need this group.

        Raises:
            SaveError: gives the reason, and what is saved instead.
        """
        if self._last_failure is not None:
            raise self._last_failure

    def withdraw(self) -> None:
        """Remove the checkpoints of a corrupt state: this group's saves since its state diverged
        from the other groups' state.

        Does nothing if the state is not corrupt. Another group then saves at its next commit. Call
        this on all ranks of a group, before it heals.
        """
        host = self.host
        if not self.enable or not host.position.saved_corrupt:
            return
        self._settle(wait=True)
        self._failed = None  # After the heal this group may save these steps again.
        host.position.withdraw_saved()
        for step in sorted(self._published):
            if self._published[step] <= host.position.agreed_step:
                continue
            del self._published[step]
            target = Path(self._create_checkpoint_id(step))
            # Another group may have replaced this checkpoint by its own, sound one.
            is_own = dist.get_rank() == 0 and writer_of(target) == self._name
            doomed = discard(target, step) if is_own else None
            if doomed is not None:
                shutil.rmtree(doomed, ignore_errors=True)
                logger.error(
                    "the checkpoint of step %d is withdrawn: this group's state was corrupt", step
                )
                host.events.emit(CheckpointWithdrawn(step=step))

    def close(self) -> None:
        """Wait for a save under way, as long as a group may take to leave."""
        # torchtitan also calls this from __del__, perhaps of an object whose __init__ has failed.
        save: Save | None = getattr(self, "_under_way", None)
        if save is not None:
            self._under_way = None
            concurrent.futures.wait(
                [save.done], timeout=self.host.config.fault_tolerance.drain_timeout_seconds
            )
            if save.state is SaveState.COMPLETE:
                self._emit_saved(save)
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
        """Save to a folder of this group, and publish the folder when it is complete.

        torchtitan's `save` calls this on all ranks of the group.

        Args:
            checkpoint_id: path under which the complete folder is published.
        """
        assert self._under_way is not None
        save, target = self._under_way, Path(checkpoint_id)
        states = _read_states(state_dict)
        digests = {} if to_hf else take_digests(states, self.states, self.host.gather)
        if DATALOADER in states:
            states[DATALOADER] |= stock_loaders(states[DATALOADER], self._num_shards)

        def check_before_write() -> None:
            check_links(target.parent)
            if not to_hf:
                check_values(states)

        on_all_ranks(check_before_write, self.host.gather)
        save.model_only = TRAIN_STATE not in state_dict
        manifest = dataclasses.replace(
            self._describe(), step=save.step, model_only=save.model_only, digests=digests
        )
        partial = save.partial = partial_folder(target, save.step, self._name)
        # DCP's coordinator: its part of the save ends when all ranks have written theirs.
        coordinates = dist.get_rank() == 0
        if coordinates:
            # Remove the remains of an earlier attempt. No other rank writes before the coordinator
            # has planned. A link here was planted by another user: through it, this save would
            # overwrite another checkpoint.
            if partial.is_symlink():
                partial.unlink()
            shutil.rmtree(partial, ignore_errors=True)

        def conclude(written: Future[Any] | None) -> None:
            try:
                if written is not None:
                    written.result()
                aside = self._publish(save, target, manifest) if coordinates else []
                save.done.set_result(aside)
            except BaseException as error:  # noqa: BLE001
                # `_settle` reports the error. DCP's errors are BaseExceptions, and an error that
                # left this thread would be lost.
                save.done.set_exception(error)

        save_in = super().dcp_save
        if to_hf:
            gather = self.host.gather

            def save_in_hf() -> None:
                merge_together(lambda: save_in(states, str(partial), async_mode, to_hf=True))

            with self._converted(states) as export:
                on_all_ranks(save_in_hf, gather)
            on_all_ranks(lambda: export.check(partial) if coordinates else None, gather)
            conclude(None)
            return None
        result = save_in(states, str(partial), async_mode, enable_garbage_collection)
        written = result.upload_completion if isinstance(result, AsyncSaveResponse) else result
        if isinstance(written, Future):
            written.add_done_callback(conclude)
        else:
            conclude(None)
        return result

    def _publish(self, save: Save, target: Path, manifest: Manifest) -> list[Path]:
        """Publish the parts that all ranks have written; return the folders set aside.

        Runs on rank 0, on any thread.

        Raises:
            OSError: the checkpoint must not be published, cannot be read back, or could not be
                renamed.
        """
        assert save.partial is not None
        # Another group may have saved this step meanwhile. A corrupt state must not replace it.
        if self.host.position.saved_corrupt:
            raise OSError("what this group saves is not the job's state any more")
        manifest.write(save.partial)
        defect = find_defect(save.partial)
        if defect:
            raise OSError(f"what was written cannot be read back: {defect}")
        aside = publish(save.partial, target, manifest)
        save.seconds = time.monotonic() - save.started
        self._purge_abandoned()
        return aside

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load the parts of `state_dict` that the checkpoint has, and compare them with the saved
        digests.

        Raises:
            ConfigError: the checkpoint is of another model, or no training state.
            LoadError: the checkpoint cannot be read.
            DamagedError: its bytes are wrong.
        """
        load = self._loading = Load(Path(checkpoint_id), self._describe(), self.host.gather)
        states = _read_states(state_dict)
        load.prepare(states, from_hf)
        try:
            if from_hf:
                super().dcp_load(states, checkpoint_id, from_hf, from_quantized)
            else:
                load_checkpoint(states, checkpoint_id)
                # torchtitan puts the model's tensors beside the other parts.
                if MODEL in self.states:
                    self.states[MODEL].load_state_dict(states)
        except CheckpointException as error:
            load.fail(error, from_hf)
        load.check(states, self.states)
        for name, part in state_dict.items():
            if isinstance(part, Stateful) and name in states:
                part.load_state_dict(states[name])

    # Methods that torchtitan's `save` and `load` call

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Return True if `save` has decided to save."""
        return self._under_way is not None

    def _async_wait(self) -> None:
        """Forget torchtitan's future: `_settle` has waited for it, and reported its errors."""
        self.save_future = None

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        # Later steps are damaged: the job went back to a step before them. They do not count.
        latest = self._latest_step()
        steps = [step for step in complete_steps(self.folder) if step <= latest]
        if len(steps) <= self.keep_latest_k:
            return
        num_kept = 0
        for step in reversed(steps):
            target = Path(self._create_checkpoint_id(step))
            if num_kept == self.keep_latest_k:
                self._purge(discard(target, step))
            elif _is_sound(target):  # A damaged checkpoint must not push a sound one out.
                num_kept += 1

    # Methods of this class alone

    def _purge(self, doomed: Path | None) -> None:
        """Let the purge thread delete a folder."""
        if doomed is not None:
            self.purge_queue.put(str(doomed))

    def _purge_abandoned(self) -> None:
        """Delete the remains of dead writers, while this group writes nothing.

        Runs on rank 0, on any thread.
        """
        for doomed in take_abandoned(Path(self.folder), self._name):
            self._purge(doomed)

    def _report_choice(self, request: LoadRequest, choice: Choice) -> None:
        """Report a checkpoint that replaces the requested one, and all damaged ones."""
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
            self.host.events.emit(CheckpointSkipped(step=step, reason=reason, instead=choice.step))

    @contextlib.contextmanager
    def _hide_folder(self) -> Iterator[None]:
        """Hide a folder without a complete checkpoint from torchtitan.

        Otherwise torchtitan would ignore initial_load_path.
        """
        folder, self.folder = self.folder, os.path.join(self.folder, "none")
        try:
            yield
        finally:
            self.folder = folder

    @contextlib.contextmanager
    def _converted(self, state_dict: dict[str, Any]) -> Iterator[Converted]:
        """Convert each rank's state for a save in Hugging Face's format; if it fails on one rank,
        it fails on all.

        Otherwise the other ranks would wait in a collective of the save that the failed rank never
        joins.
        """
        adapter = self.sd_adapter

        def convert() -> Any:
            # Without this module torch would fail in the middle of the save.
            importlib.import_module("safetensors.torch")
            state = adapter.to_hf(state_dict)
            return state, describe_tensors(state)

        state, own = on_all_ranks(convert, self.host.gather)
        tensors = gather_tensors(own, self.host.gather)
        index = adapter.fqn_to_index_mapping
        export = on_all_ranks(lambda: Converted(state, index, tensors), self.host.gather)
        self.sd_adapter = export
        try:
            yield export
        finally:
            self.sd_adapter = adapter

    def _write(self, step: int, last_step: bool) -> None:
        """Save the state after `step`.

        If the last step cannot be saved as configured, it is saved in another way.
        """
        self._write_once(step, last_step)
        if not last_step or self._failed_at() < step:
            return
        reason, target = self._failure, self._create_checkpoint_id(step)
        text = (
            f"checkpoint.folder ({self.folder}) must take the checkpoint of the last step, got: "
            f"{reason}; {describe_latest(self._latest_step())}; make room there, or give another "
            "one, and start the run again"
        )
        # A person can mend the obstacle and convert the checkpoint later. The training cannot be
        # made up for.
        for model_only, what in self._other_ways():
            logger.warning("saving %s of step %d in torchtitan's own format instead", what, step)
            with self._in_own_format(model_only):
                self._write_once(step, last_step=True)
            if step in self._published:
                text = (
                    f"checkpoint: step {step} could not be saved as asked: {reason}. Nothing is "
                    f"lost of {what}, which is in {target}, in torchtitan's own format (DCP); for "
                    "Hugging Face's, convert it with torchtitan's "
                    "scripts/checkpoint_conversion/convert_to_hf.py"
                )
                break
        self._last_failure = SaveError(text)

    def _other_ways(self) -> Iterator[tuple[bool, str]]:
        """Yield the other ways to save the last step, best first: whether the model only, and a
        description.
        """
        if self.last_save_in_hf:
            yield False, "the whole training state"
        if self.last_save_in_hf or not self.last_save_model_only:
            # A third of the training state's size, for which there may be room.
            yield True, "the model"

    def _write_once(self, step: int, last_step: bool) -> None:
        self._under_way = save = Save(step, self.host.position.step)
        try:
            with self.host.strategy.lend_agreed_weights():
                super().save(step, last_step)
        except (CheckpointException, PartError) as error:
            # These errors come on all ranks, or on none. Any other error ends this rank, because
            # the other ranks are in a collective of the save.
            save.done.set_exception(error)
        self._settle(wait=last_step)

    @contextlib.contextmanager
    def _in_own_format(self, model_only: bool) -> Iterator[None]:
        """Let torchtitan save the last step in its own format, whatever is configured."""
        in_hf = self.last_save_in_hf
        configured_model_only = self.last_save_model_only
        self.last_save_in_hf = False
        self.last_save_model_only = model_only
        try:
            yield
        finally:
            self.last_save_in_hf = in_hf
            self.last_save_model_only = configured_model_only

    def _settle(self, wait: bool = False) -> None:
        """Conclude the save under way if it has ended on all ranks of this group."""
        save = self._under_way
        if save is None:
            return
        if wait:
            concurrent.futures.wait([save.done])
        states = self.host.gather(save.state)
        if SaveState.UNDER_WAY in states:
            return
        self._under_way = None
        if SaveState.FAILED in states:
            reason = agree_on_reason(save.done.exception(), Path(self.folder))
            latest = self._latest_step()
            if dist.get_rank() == 0 and save.partial is not None:
                # At once: the remains take the room that the next save needs.
                shutil.rmtree(save.partial, ignore_errors=True)
            logger.error(
                "the checkpoint of step %d could not be written: %s; %s",
                save.step,
                reason,
                describe_latest(latest),
            )
            # One event, even if the last step is tried in several ways.
            if self._failed_at() < save.step:
                self._failed = save
                self._failure = reason
                self.host.events.emit(CheckpointFailed(step=save.step, error=reason, latest=latest))
            return
        self.host.position.set_saved_step(max(self.host.position.saved_step, save.updates))
        self._published[save.step] = save.updates
        self._longest_seconds = max(self._longest_seconds, save.seconds)
        self._emit_saved(save)
        join_seconds = self.host.config.fault_tolerance.join_timeout_ms / 1000
        if self.async_mode == AsyncMode.DISABLED and save.seconds > join_seconds:
            logger.warning(
                "saving took %.0f s, and the other groups wait for this one no longer than "
                "fault_tolerance."
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
        return self.host.strategy.steps_of(self.host.position.saved_step)

    def _emit_saved(self, save: Save) -> None:
        if dist.get_rank() != 0:
            return
        self.host.events.emit(
            CheckpointSaved(step=save.step, seconds=save.seconds, model_only=save.model_only)
        )
        for folder in save.done.result():
            logger.warning(
                "this job went back before a checkpoint of another one, which is %s now", folder
            )
            self.host.events.emit(CheckpointSetAside(step=save.step, folder=folder.name))

    def _emit_loaded(self) -> None:
        host = self.host
        step = self.states[TRAIN_STATE].state_dict()["step"]
        host.position.set_saved_step(host.strategy.updates_of(step))
        self._loaded_step = step
        host.events.emit(CheckpointLoaded(step=step, lineage=f"{host.position.lineage:012x}"))
        assert self._loading is not None
        reset = self._loading.reset
        if reset:
            logger.warning(
                "training goes on after step %d, but its data begins anew: %s", step, reset
            )
            host.events.emit(DataReset(step=step, reason=reset, asked=self._loading.asks_for_reset))

    @property
    def _job_id(self) -> str:
        """Name of this job. The id of a Slurm array stays the same when elements are requeued."""
        return self.host.config.fault_tolerance.job_id or os.environ.get("SLURM_ARRAY_JOB_ID", "")

    def _describe(self) -> Manifest:
        """Return the manifest of a save of this run as it is now; the step is the caller's."""
        config = self.host.config
        return Manifest(
            step=0,
            lineage=f"{self.host.position.lineage:012x}",
            model=f"{config.model.name} {config.model.flavor}",
            dataset=config.training.dataset,
            seq_len=config.training.seq_len,
            num_shards=self._num_shards,
            model_only=False,
            writer=self._name,
            round_steps=steps_per_round(config.fault_tolerance),
            job_id=self._job_id,
            load_step=config.checkpoint.load_step,
            save_id=uuid.uuid4().hex,
        )


def _is_sound(folder: Path) -> bool:
    """True if the tables of a checkpoint can be read and show no defect."""
    try:
        return not find_defect(folder)
    except OSError:
        return False


def _read_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the states of objects in their place; tensors stay as they are."""
    return {
        name: part.state_dict() if isinstance(part, Stateful) else part
        for name, part in state_dict.items()
    }
