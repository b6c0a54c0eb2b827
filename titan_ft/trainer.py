# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's Trainer with a replica dimension: `train_step` returns with a committed step, and only then."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.fsdp import FSDPModule

from titan_ft import device
from titan_ft.config import check_replicate
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain
from titan_ft.engine.feed import Feed, Reading
from titan_ft.engine.heal import Heal
from titan_ft.engine.outer import OuterModel
from titan_ft.engine.round import Rounds
from titan_ft.engine.step import ReplicaDimension
from titan_ft.engine.watchdog import Watchdog
from titan_ft.host.titan_0_2 import (
    IGNORE_INDEX,
    HuggingFaceTextDataset,
    JobConfig,
    ModelConvertersContainer,
    ParallelDims,
    Trainer,
    Validator,
    build_model_converters,
    clip_grad_norm_,
    logger,
    set_pg_timeouts,
    silence_pipeline_loss_warning,
    use_checkpoints,
    use_model_converters,
)
from titan_ft.membership.group import Group
from titan_ft.protocol.decision import LastToLeave, Update
from titan_ft.protocol.errors import HungError, JobFinished, Leaving
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.lr_policy import lr_factor, scaled_lr
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.error_file import write_error
from titan_ft.run.events import Batches, CameTooLate, Drained, Hung, StartedAnew, TrainingFinished
from titan_ft.run.marks import announce_left
from titan_ft.run.paths import RunPaths
from titan_ft.training import spec
from titan_ft.training.checkpoint.host import CheckpointHost
from titan_ft.training.checkpoint.manager import ReplicaCheckpoints
from titan_ft.training.curves import keep_curves, keep_going_without_config_file, keep_traces
from titan_ft.training.finished import finished_step, mark_finished
from titan_ft.training.hyperparameters import Hyperparameters
from titan_ft.training.links import Links
from titan_ft.training.slot_loaders import iterate
from titan_ft.training.step_log import StepLog, Work
from titan_ft.training.validation import ValidationBatches
from titan_ft.training.worker import Launch, begin_events
from titan_ft.transfer.snapshot import Counters, TrainState

if TYPE_CHECKING:
    from titan_ft.chaos.inside.agent import ChaosAgent


_WARM_UP_TOKENS = 32


class ReplicaTrainer(Trainer):
    """One rank of a replica group.

    Raises:
        ReplicaError: a known end of this group's part in the run; the message says what to do.
    """

    launch: Launch  # set by titan_ft.train on the subclass that it runs
    step: int
    ntokens_seen: int
    _links: Links
    _work: Work  # on the step under way
    _outer: OuterModel | None = None  # with a semi-synchronous method
    _saving: int | None = None  # step of the checkpoint that this group saves before it leaves

    def __init__(self, job_config: JobConfig) -> None:
        config = job_config.fault_tolerance
        self._events = begin_events(job_config, self.launch)
        loaders = spec.register(job_config.model.name, config, job_config.experimental.custom_import)
        if job_config.debug.seed is None:
            # All groups must begin with the same weights, whenever they come; torchtitan would draw a seed in each.
            job_config.debug.seed = int(self.launch.config_digest[:8], 16)
            logger.info(f"debug.seed is not set: using {job_config.debug.seed}, the same in all groups of this config")
        if job_config.training.global_batch_size > 0:  # counts all groups; torchtitan's Trainer sees only this one
            job_config.training.global_batch_size //= config.group_size
        use_checkpoints(ReplicaCheckpoints)
        silence_pipeline_loss_warning()  # all ranks know the loss, see `_find_loss_group`
        use_model_converters(self._build_model_converters)
        keep_curves(job_config, self.launch.rank)
        keep_traces(job_config, self.launch.attempt)
        keep_going_without_config_file(job_config)
        super().__init__(job_config)
        self._nominal_tokens = self._count_nominal_tokens()
        self._hyperparameters = Hyperparameters(self.optimizers, self.lr_schedulers)
        self._ledger = Ledger(config.group_size, loaders.shard, loaders.num_shards)
        self._group = Group(self.device, self._find_loss_group())
        self._state = self._build_state(_Counters(self, self._ledger))
        self._loaders = loaders
        self._feed = Feed(self._ledger, loaders.open, partial(iterate, self), self._events.emit)
        self._step_log = StepLog(self._events, self.metrics_processor, config.replica_id)
        # Made after the model is built: how long that may take is unknown, and it must not count as a hang.
        self._watchdog = Watchdog(config.hang_timeout_seconds, self._tell_hang)
        if job_config.validation.enable:
            self._validate_together()
            self._shard_after_validation()
            if self.parallel_dims.pp_enabled:
                self._share_validation_loss()
        self._position = Position()
        self._replica: ReplicaDimension | None = None  # joined when the group is ready to train, see _join_job
        self._behind = self._begun = False
        self._stepped = 0.0  # when the last step was over; 0 if something else than a step was last
        self._chaos: ChaosAgent | None = None
        self._checkpoint_host = CheckpointHost(
            job_config,
            self._ledger,
            self._position,
            self._events,
            self._group.gather,
            self._heals_instead,
            self._take_checkpoint,
            self._updates_of,
            self._steps_of,
            self._outer,
        )
        self.checkpointer.attach(self._checkpoint_host)

    def init_distributed(self) -> ParallelDims:
        """Set up the group as torchtitan does; from then on SIGTERM lets the group leave in order."""
        dims = super().init_distributed()
        check_replicate(dims.dp_replicate, dims.dp_shard, dims.cp)
        self._end_if_finished()
        num_ranks = torch.distributed.get_world_size()
        host, port = self.launch.store
        self._drain = Drain(
            (lambda: TCPStore(host, port, is_master=False, wait_for_workers=False)) if num_ranks > 1 else None,
            key=f"titan_ft/drain/{self.launch.attempt}",
            rank=self.launch.rank,
            num_ranks=num_ranks,
            timeout_seconds=self.job_config.fault_tolerance.drain_timeout_seconds,
            on_abandon=self._abandon,
        )
        self._drain.install()
        return dims

    def _end_if_finished(self) -> None:
        """End here if the job is over: nobody would come any more, and this group would train all of it again.

        Raises:
            JobFinished: it is; on all ranks of the group.
        """
        group, config = Group(self.device, None), self.job_config
        mark = RunPaths(config.job.dump_folder).finished
        # Rank 0 looks for all: on a shared file system two ranks may see different things.
        step = finished_step(mark, self.launch.config_digest) if self.launch.rank == 0 else None
        last = group.gather(-1 if step is None else step)[0]
        if last < 0:
            return
        self._events.emit(CameTooLate(step=last))
        with contextlib.suppress(RuntimeError):  # all know it from here on
            group.gather(last)  # no rank closes its connections before its siblings have heard
        raise JobFinished(
            f"the job has finished: {strategy_of(config.fault_tolerance).unit} {last}, its last, was made before "
            f"this group came (so says {mark}); this group ends. To train it once more, take another run folder"
        )

    def _mark_finished(self) -> None:
        """Let a group that comes back from now on see that the job is over."""
        if self.launch.rank != 0:
            return
        mark = RunPaths(self.job_config.job.dump_folder).finished
        try:
            mark_finished(mark, self.launch.config_digest, self._position.step)
        except OSError as error:
            logger.warning(f"{mark} cannot be written ({error}): a group that comes back would begin the job anew")

    def _build_model_converters(self, *args: Any) -> ModelConvertersContainer:
        self._converters = build_model_converters(*args)
        return self._converters

    def _refresh_converters(self) -> None:
        """Let converters compute anew what they keep of the weights; else a forward would use that of other weights.

        torchtitan calls this hook after each optimizer step: float8 computes the scales of all weights in it. All ranks
        of a group.
        """
        self._converters.post_optimizer_hook(self.model_parts)

    def _build_state(self, counters: Counters) -> TrainState:
        return TrainState(
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            counters,
            on_load=self._refresh_converters,
            num_ranks=self.launch.ranks_on_host,
        )

    def _take_checkpoint(self) -> None:
        """Go on from the weights that a checkpoint had."""
        self._hyperparameters.restore()
        self._refresh_converters()

    def _agreed_parameters(self) -> dict[str, torch.Tensor]:
        """Return by name the parameters that all groups have alike."""
        parts = enumerate(self.model_parts)
        return {f"{number}/{name}": parameter for number, part in parts for name, parameter in part.named_parameters()}

    def _agreed_optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Return the optimizers whose state they have alike."""
        return self.optimizers

    def _exchanged(self) -> Iterator[torch.nn.Parameter]:
        """Yield what the exchange sums the gradients of, in the same order in every group."""
        for part in self.model_parts:
            yield from part.parameters()

    def _steps_of(self, updates: int) -> int:
        """Return torchtitan's step after so many committed updates."""
        return updates

    def _updates_of(self, step: int) -> int:
        """Return how many updates are committed when torchtitan's step `step` is."""
        return step

    @property
    def _num_committed(self) -> int:
        """Return the number of committed steps; torchtitan's `step` is that of the step under way."""
        position: Position | None = getattr(self, "_position", None)  # a signal may come before it is there
        return 0 if position is None else position.step

    def train(self) -> None:
        """Train as torchtitan does, and leave the other groups however it ends."""
        try:
            try:
                super().train()
            except Leaving:
                self._step_log.flush()
                self._leave()
            self._drain.leave()
        finally:
            with contextlib.ExitStack() as rest:  # an error of one keeps none of the others open
                rest.callback(self._state.close)
                if "_links" in vars(self):
                    rest.callback(self._links.close)
                if self._chaos is not None:
                    rest.callback(self._chaos.close)
                rest.callback(self._watchdog.close)
                rest.callback(self._end_step_log)  # first: what it waits for may hang

    def _tell_hang(self) -> None:
        """Say that this rank ends because of a hang, to the run and to whoever may start it again."""
        seconds = self.job_config.fault_tolerance.hang_timeout_seconds
        write_error(HungError(f"no progress of the training thread for {seconds:g} s; its log has the stacks"))
        self._events.emit(Hung(step=self._num_committed))

    def _leave(self) -> None:
        """Leave the other groups. If the job's state leaves with this group, it is saved first."""
        assert self._replica is not None, "a group that has met no other one has nothing to leave"
        last = self._replica.find_last_to_leave()
        if last is not None and not self.checkpointer.lacks_state():
            last = None
        if last is None or not last.agreed:
            # Before all that takes a while: groups that train on must not wait for it. Where none does,
            # this group heartbeats meanwhile: a group that has yet to heal must not begin from an older
            # checkpoint, and the others that leave must see that this one lives.
            self._links.membership.close()
        self.checkpointer.withdraw()  # found corrupt in the very round that it left in
        if last is not None:
            self._save_before_leaving(self._replica, last)
            self._links.membership.close()
        self._emit_drained()
        unit = strategy_of(self.job_config.fault_tolerance).unit
        logger.info(f"SIGTERM: this group leaves after {unit} {self._num_committed}")

    def _save_before_leaving(self, replica: ReplicaDimension, last: LastToLeave) -> None:
        """Save the state after the last update, unless another group that leaves has done so."""
        step = self._steps_of(self._num_committed)
        with self._watchdog.paused():  # the timer of the drain ends a group that hangs from here on
            is_saved = partial(self.checkpointer.holds_state, step)
            if replica.await_turn(last, is_saved, self.checkpointer.watch_others(step)):
                self._go_back_to_update()
                self._saving = step
                self.checkpointer.save_on_leave(step, self._drain.seconds_left)
                self._saving = None

    def _go_back_to_update(self) -> None:
        """Let torchtitan's step be that of the last update again; the one under way came to nothing."""
        self.step = self._steps_of(self._num_committed)

    def _end_step_log(self) -> None:
        try:
            self._step_log.flush()
        except Exception:  # noqa: BLE001  # another one may have ended the training: that is the one to tell of
            logger.exception("the event of the last step is not written")

    def _emit_drained(self) -> None:
        event = Drained(
            step=self._num_committed,
            reason="SIGTERM",
            in_order=True,
            digest=self._state.digest(),
            lineage=f"{self._position.lineage:012x}",
            void=self._void_batches(),
        )
        announce_left(self._events, event)

    def _void_batches(self) -> list[Batches] | None:
        """Return what this rank has read behind the step that the group leaves after."""
        return None

    def _abandon(self, reason: str, void: list[Batches] | None = None) -> None:
        """Tell that this rank ends without having left in order; on another thread, and the training thread may hang.

        Args:
            void: what it has read of the round under way.
        """
        if self._saving is not None:
            reason = f"{reason}, before the checkpoint of step {self._saving} was complete"
        announce_left(self._events, Drained(step=self._num_committed, reason=reason, in_order=False, void=void))

    def should_continue_training(self) -> bool:
        """Say whether a step is left; after the last one stay until every group holds the final state."""
        if super().should_continue_training():
            return True
        if self._replica is not None:
            digest = self._replica.finish()
            if digest is None:
                self._heal(self._replica)
                return self.should_continue_training()
            self._links.end_roll_call()
            self._step_log.flush()
            self.checkpointer.withdraw()
            self.checkpointer.finish(self.step)
            lineage = f"{self._position.lineage:012x}"
            self._events.emit(
                TrainingFinished(step=self._position.step, tokens=self.ntokens_seen, digest=digest, lineage=lineage)
            )
            self._mark_finished()
            self.checkpointer.raise_last_failure()
        return False

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Make one committed step, whatever happens to the other groups; or heal, which ends on one too."""
        started, config = time.monotonic(), self.job_config.fault_tolerance
        replica = self._join_job()
        if not self._begun and not self._begin(replica):
            self._heal(replica)
            return
        if self._chaos is not None:
            self._chaos.at_step(self._position.step + 1)
        self._zero_gradients()
        work = self._work = self._begin_work()
        stepped, self._stepped = self._stepped, 0.0
        work.between_seconds = started - stepped if stepped else 0.0
        started -= work.compute_seconds  # of what was made of it while the last exchange was under way
        made = self._train(replica.slots_to_read(), replica.arm)
        committed = replica.commit(replace(made, doing=work.most), self._train, self._discard)
        if committed is None:
            self._heal(replica)
            return
        exchanged = time.monotonic()
        work.grad_norm = self._apply(committed.update)
        self._checkpoint_host.participants = committed.participants
        work.seconds = time.monotonic() - started
        work.exchange_seconds = exchanged - started - work.compute_seconds - work.overlapped_seconds
        work.wire_bytes = self._links.exchange.take_wire_bytes()
        work.lr *= self._lr_factor(committed.update)
        digest = replica.digest_if_due()
        self._links.note_commit(committed.update.step, committed.participants, work.inner_steps)
        self._step_log.emit(committed, work, self.step, digest)
        self._step_log.log(committed, work, self.step, self.ntokens_seen, replica.heal_seconds)
        if self._position.leaving:
            raise Leaving
        if config.group_size > 1 and config.heal_donors != 1:  # with 1, groups may share a host without room for it
            self._state.reserve(self._group.gather)
        replica.offer()
        self._go_on(replica)
        self._feed.drop({config.replica_id, *(r.entry.slot for r in work.readings)})
        self._stepped = time.monotonic()

    def _begin_work(self) -> Work:
        return Work(self.step, lr=self._lr)

    def _go_on(self, replica: ReplicaDimension) -> None:
        """Do what is to be done behind an update before the next step."""

    @property
    def _lr(self) -> float:
        """Return the LR of the next step."""
        return float(self.lr_schedulers.schedulers[0].get_last_lr()[0])

    def _heals_instead(self, step: int) -> bool:
        """Join the job as a group that can load the state after `step`; says whether others are further."""
        self._join_job(self._updates_of(step))
        return self._behind

    def _join_job(self, updates: int = 0) -> ReplicaDimension:
        """Meet the other groups, now that this one is ready to train, or to load the state after so many updates."""
        if self._replica is None:
            if self.launch.attempt > 0:
                self._warm_up()
            self._replica = self._build_replica()
            if self.job_config.fault_tolerance.chaos:
                self._chaos = self._build_chaos_agent()
            self._behind = self._replica.join(updates)
        return self._replica

    def _warm_up(self) -> None:
        """Make a step and take it back, before the others wait for this group.

        A process's first step takes several times as long as its second: compilation, sharding propagation, memory.
        Only for models of text, whose batches can be made up; real ones would be read for nothing.
        """
        if not isinstance(getattr(self.dataloader, "dataset", None), HuggingFaceTextDataset):
            return
        before = self._state.copy(0, 0)
        tokens = torch.zeros(self._warm_up_shape(), dtype=torch.long)
        with torch.random.fork_rng():
            self._forward_backward({"input": tokens}, tokens)
            self._clip_gradients()
            self.optimizers.step()
        self.optimizers.zero_grad()
        self._state.load(before)  # the counters too

    def _warm_up_shape(self) -> tuple[int, int]:
        """Return sequences and tokens of each in the batch of the warm-up: few, where nothing is made ready by shape.

        Compiled code is, so flex attention always, and the shardings of what layers hand on to each other, which torch
        keeps by shape; a pipeline cuts its microbatches from a whole batch. On an accelerator kernels are chosen and
        loaded by shape (cuDNN's attention makes a plan for each), and the allocator keeps what a whole batch takes.
        """
        training, dims = self.job_config.training, self.parallel_dims
        compiles = self.job_config.compile.enable or getattr(self.model_args, "attn_type", "sdpa") == "flex"
        splits = dims.tp_enabled or dims.cp_enabled or dims.pp_enabled
        if self.device.type != "cpu" or compiles or splits:
            return training.local_batch_size, training.seq_len
        return 1, min(_WARM_UP_TOKENS, training.seq_len)

    def _begin(self, replica: ReplicaDimension) -> bool:
        """Begin with the job's first step, or go on behind a checkpoint; False if this group must heal."""
        self._begun = True
        if self._behind:
            return False
        self._check_loader()
        if not replica.start(self._updates_of(self.step - 1)):
            return False
        if self.launch.attempt > 0 and self.step == 1:
            # Without checkpoints there is nothing to come back to when every group is lost; but not silently.
            logger.warning("no group holds the state of the earlier attempt: training starts anew from step 0")
            self._events.emit(StartedAnew(step=0))
        return True

    def _check_loader(self) -> None:
        """Say whether this rank's data go on exactly where a group that comes back opens them."""
        with self._watchdog.paused():  # nobody beats while batches are read, and a slow loader would be killed
            found = self._loaders.check()
        if not found.exact:
            logger.warning(
                f"training.dataset {self.job_config.training.dataset}: the data loader ({found.loader}) does not go "
                f"on exactly where its state was saved: {found.reason}. Whenever a group comes back, batches will be "
                "lost or repeated; see docs/operations.md, Data"
            )
        self._events.emit(found)

    def _heal(self, replica: ReplicaDimension) -> None:
        self._begun = True
        self._step_log.flush()
        first = self.step == 1
        self._checkpoint_host.participants = []
        self.optimizers.zero_grad()
        self.checkpointer.maybe_wait_for_staging()
        self.checkpointer.withdraw()
        self.step = self._steps_of(replica.heal())
        self.metrics_processor.ntokens_since_last_log = 0
        if first:  # torchtitan shortens the timeouts after step 1, which this group never makes
            set_pg_timeouts(timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims)

    def _train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Add the gradients of a step's share of each slot to the local ones; calls `arm` before the last backward."""
        if not slots:
            return NOTHING
        started = time.monotonic()
        readings = [self._feed.read(slot, self.gradient_accumulation_steps, self._work.read(slot)) for slot in slots]
        loading = time.monotonic() - started
        self._work.inner_steps = 1  # only now: without data it is none
        microbatches = [batch for reading in readings for batch in reading.batches]
        valid_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in microbatches)
        tokens = sum(labels.numel() for _, labels in microbatches)
        losses = []
        for number, (inputs, labels) in enumerate(microbatches, start=1):
            self._watchdog.beat()
            if number == len(microbatches):
                arm()
            losses.append(self._forward_backward(inputs, labels).detach())
        self._work.readings += readings
        self.metrics_processor.ntokens_since_last_log += tokens
        # Before the host waits for the device, and while the exchange is under way.
        reading = time.monotonic()
        self._feed.read_ahead(readings if self.step < self.job_config.training.steps else [])
        loading += time.monotonic() - reading
        loss_sum = torch.sum(torch.stack(losses)).item()
        seconds = time.monotonic() - started
        contribution = self._gather_contribution(valid_tokens, tokens, loss_sum, seconds, loading, readings)
        self._work.compute_seconds += time.monotonic() - started
        return contribution

    def _discard(self) -> None:
        """Drop the gradients of the step under way; the batches stay in the feed."""
        self._zero_gradients()
        self._work.readings.clear()

    def _zero_gradients(self) -> None:
        """Begin a gradient anew, and with it what the model counts of its batches."""
        self.optimizers.zero_grad()
        for count in spec.token_counts(self.model_parts):
            count.zero_()  # validation and the warm-up have counted too, and no update may be made of theirs

    def _forward_backward(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        # Not blocking: the host would wait for all that is queued, such as the microbatch before this one.
        inputs = {
            key: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        return self.forward_backward_step(
            input_dict=inputs,
            labels=labels.to(self.device, non_blocking=True),
            global_valid_tokens=self._nominal_tokens,  # only ever a divisor
        )

    def _clip_gradients(self) -> torch.Tensor:
        return clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def _find_loss_group(self) -> torch.distributed.ProcessGroup | None:
        """Return the ranks that add up their losses; None if each rank knows the whole.

        Only a pipeline's last stage computes a loss. All ranks of the group add up what it knows: rank 0, which speaks
        for the group in most views, is of the first stage.
        """
        dims = self.parallel_dims
        if dims.pp_enabled:
            return torch.distributed.group.WORLD
        mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        return None if mesh is None else mesh.get_group()

    def _tells_loss(self) -> bool:
        """Say whether this rank's tokens and loss count in the sum over `_find_loss_group`."""
        if not self.parallel_dims.pp_enabled:
            return True
        tensor_parallel = self.parallel_dims.get_optional_mesh("tp")  # whose ranks all hold the same loss
        return self.pp_has_last_stage and (tensor_parallel is None or tensor_parallel.get_local_rank() == 0)

    def _validate_together(self) -> None:
        """Let all ranks of the group validate equally many batches."""
        config = self.job_config.validation
        loader = getattr(self.validator, "validation_dataloader", None)
        if loader is None:
            return  # a validator of the user's with data of its own
        self.validator.validation_dataloader = ValidationBatches(
            loader,
            steps=config.steps,
            gather=self._group.gather,
            beat=self._watchdog.beat,
            whole=config.local_batch_size if self.parallel_dims.pp_enabled else None,
        )

    def _shard_after_validation(self) -> None:
        """Let FSDP shard the weights again after a validation: without a backward its root keeps whole copies.

        Until the next step a digest and a donor's copy would be of those, and a heal would change the shards alone.
        """
        validate = self.validator.validate

        def validate_and_shard(*args: Any, **kwargs: Any) -> None:
            validate(*args, **kwargs)
            for part in self.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

        self.validator.validate = validate_and_shard

    def _share_validation_loss(self) -> None:
        """Log a validation's loss on all ranks; torchtitan logs -1 / tokens where a pipeline's last stage is not."""
        if type(self.validator).validate is not Validator.validate:
            return  # a user's own, of which nobody knows which ranks log
        log = self.metrics_processor.log_validation

        def log_everywhere(loss: float, step: int) -> None:
            known = self._group.gather_losses([loss if self._tells_loss() else -math.inf])
            log(loss=float(known.max()), step=step)

        self.metrics_processor.log_validation = log_everywhere

    def _gather_contribution(
        self,
        valid_tokens: int,
        tokens: int,
        loss: float,
        seconds: float,
        loading: float,
        readings: Sequence[Reading],
    ) -> Contribution:
        """Add up this group's facts, as torchtitan does for its logs, in one collective."""
        local_mean = loss * self._nominal_tokens / max(valid_tokens, 1)
        own = [valid_tokens, tokens, loss, local_mean] if self._tells_loss() else [0, 0, 0.0, -math.inf]
        facts = self._group.gather_losses([*own, seconds, loading])
        self._work.loading_seconds += float(facts[:, 5].max())
        return Contribution(
            # Ranks of one context-parallel group hold the same tokens but different parts of the loss.
            valid_tokens=int(facts[:, 0].sum()) // self.parallel_dims.cp,
            tokens=int(facts[:, 1].sum()) // self.parallel_dims.cp,
            loss=float(facts[:, 2].sum()),
            max_loss=float(facts[:, 3].max()),
            seconds=float(facts[:, 4].max()),
            entries=tuple(reading.entry for reading in readings),
        )

    def _apply(self, update: Update) -> Callable[[], float]:
        """Apply a committed update, live or replayed, and advance what counts commits; returns what tells its norm."""
        self._watchdog.beat()
        update.sums.write(update.scale)
        grad_norm = self._clip_gradients()
        self.checkpointer.maybe_wait_for_staging()
        with scaled_lr(self.optimizers, self._lr_factor(update)):
            self.optimizers.step()
        self.lr_schedulers.step()
        self.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)
        return device.read_later(grad_norm)

    def _replay(self, update: Update) -> None:
        """Apply an update that was queued, to the end: the time it takes says how many may be replayed in a step."""
        self._apply(update)
        device.synchronize([device.record_event()])

    def _lr_factor(self, update: Update) -> float:
        """Return what `lr_policy` multiplies the LR of an update with, by its share of the global batch."""
        config = self.job_config.fault_tolerance
        return lr_factor(config.lr_policy, len(update.slots) / config.group_size)

    @property
    def _gradient_scale(self) -> float:
        """Return what local gradients are yet to be multiplied with to be those of the losses that are told.

        torchtitan's pipelines go backward from the sum of the losses, and divide only the loss that they tell: every
        step would be a clipped one.
        """
        return 1 / self._nominal_tokens if self.parallel_dims.pp_enabled else 1.0

    def _count_nominal_tokens(self) -> int:
        """Count the tokens of a step with all groups present and every label valid."""
        training = self.job_config.training
        degree = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
        batch = training.local_batch_size * degree * self.gradient_accumulation_steps
        return batch * training.seq_len * self.job_config.fault_tolerance.group_size

    def _build_replica(self) -> ReplicaDimension:
        config = self.job_config.fault_tolerance
        links = self._links = Links(
            config,
            self.launch,
            self._events,
            self.model_parts,
            self.parallel_dims,
            self._group,
            self._drain,
            exchanged=self._exchanged(),
            fragments=self._outer.fragments if self._outer else (),
            gradient_scale=self._gradient_scale,
            num_microbatches=self.pp_schedule._n_microbatches if self.parallel_dims.pp_enabled else 0,
        )
        position = self._position
        links.call_roll(lambda: None if position.leaving else tuple(position.left))
        shared: dict[str, Any] = {"position": position, "group": self._group, "events": self._events}
        rounds = Rounds(
            config,
            links.membership,
            links.exchange,
            state=self._state,
            donor=Donor(self._state, links.server),
            drain=self._drain,
            watchdog=self._watchdog,
            **shared,
        )
        heal = Heal(
            config,
            rounds=rounds,
            exchange=links.exchange,
            state=self._state,
            ledger=self._ledger,
            nominal_tokens=self._nominal_tokens,
            token=self.launch.token,
            ranks_on_host=self.launch.ranks_on_host,
            apply=self._replay,
            **shared,
        )
        return ReplicaDimension(
            config,
            rounds=rounds,
            heal=heal,
            ledger=self._ledger,
            nominal_tokens=self._nominal_tokens,
            pauses_after=self._pauses_after,
            **shared,
        )

    def _build_chaos_agent(self) -> ChaosAgent:
        from titan_ft.chaos.inside.agent import start_agent  # what breaks a worker is loaded where it is asked for

        return start_agent(
            self.job_config,
            self.launch,
            self._links,
            self._events,
            group_pids=self._group.gather(os.getpid()),
            model_parts=self.model_parts,
            parameters=self._agreed_parameters(),
            optimizers=self._agreed_optimizers(),
        )

    def _pauses_after(self, step: int) -> bool:
        """Say whether torchtitan ends, saves or validates after `step`.

        A group that asked for its quorum before such a pause would keep the others waiting in the exchange, which
        `process_group_timeout_ms` bounds, and not at the lighthouse, where `join_timeout_ms` does.
        """
        config = self.job_config
        saves = self.checkpointer.pauses_after(step)
        validates = config.validation.enable and self.validator.should_validate(step)
        return step >= config.training.steps or saves or validates


class _Counters:
    """The trainer's count of committed tokens and the ledger, as part of the state that heals."""

    def __init__(self, trainer: ReplicaTrainer, ledger: Ledger) -> None:
        self._trainer, self._ledger = trainer, ledger

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted now."""
        return {"ntokens_seen": self._trainer.ntokens_seen, "ledger": self._ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what another group, or this one before, has counted."""
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]
        self._ledger.load_state_dict(state_dict["ledger"])
