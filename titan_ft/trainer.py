# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's Trainer with a replica dimension: `train_step` returns only with a committed
step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from titan_ft.config import TABLE, ConfigError, check_replicate
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain, print_line
from titan_ft.engine.feed import Feed, Reading
from titan_ft.engine.heal import Heal
from titan_ft.engine.round import Rounds
from titan_ft.engine.round_strategy import RoundStrategy
from titan_ft.engine.step import ReplicaDimension
from titan_ft.engine.strategy import StepStrategy
from titan_ft.engine.watchdog import Watchdog
from titan_ft.host.titan import (
    HostTrainer,
    JobConfig,
    ParallelDims,
    logger,
    read_batches,
    set_pg_timeouts,
)
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.decision import LastToLeave
from titan_ft.protocol.errors import HungError, JobFinished, Leaving
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Update
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.error_file import write_error
from titan_ft.run.events import CameTooLate, Drained, Hung, StartedAnew, TrainingFinished
from titan_ft.run.marks import announce_left
from titan_ft.run.paths import RunPaths
from titan_ft.training import spec
from titan_ft.training.checkpoint.host import CheckpointHost
from titan_ft.training.checkpoint.manager import ReplicaCheckpoints
from titan_ft.training.curves import keep_curves, keep_going_without_config_file, keep_traces
from titan_ft.training.finished import finished_step, mark_finished
from titan_ft.training.hyperparameters import Hyperparameters
from titan_ft.training.links import Links, connect_control
from titan_ft.training.local_training import LocalTraining, loss_group
from titan_ft.training.step_log import StepLog
from titan_ft.training.validation import share_loss, validate_together, validate_updates
from titan_ft.training.worker import WorkerSetup, begin_events

if TYPE_CHECKING:
    from titan_ft.chaos.inside.agent import ChaosAgent


class ReplicaTrainer(HostTrainer):
    """One rank of a replica group.

    Raises:
        ReplicaError: a known end of this group; the message says what to do.
    """

    launch: WorkerSetup  # set by titan_ft.train on the subclass that it runs
    step: int
    ntokens_seen: int
    _links: Links
    _strategy: StepStrategy
    _saving: int | None = None  # step of the checkpoint that this group saves before it leaves

    def __init__(self, job_config: JobConfig) -> None:
        config = job_config.fault_tolerance
        self._events = begin_events(job_config, self.launch)
        loaders = spec.register(
            job_config.model.name, config, job_config.experimental.custom_import
        )
        if job_config.debug.seed is None:
            # All groups must begin with the same weights, whenever they come; torchtitan would draw
            # a seed in each.
            job_config.debug.seed = int(self.launch.config_digest[:8], 16)
            logger.info(
                f"debug.seed is not set: using {job_config.debug.seed}, the same in all groups of this config"
            )
        # Counts all groups; torchtitan's Trainer sees only this one.
        if job_config.training.global_batch_size > 0:
            job_config.training.global_batch_size //= config.group_size
        keep_curves(job_config, self.launch.rank)
        keep_traces(job_config, self.launch.attempt)
        keep_going_without_config_file(job_config)
        self._position = Position()  # before the drain, which may end this rank at any time
        super().__init__(job_config, ReplicaCheckpoints)
        self._hyperparameters = Hyperparameters(self.optimizers, self.lr_schedulers)
        self._ledger = Ledger(config.group_size, loaders.shard, loaders.num_shards)
        self._group = GroupCollectives(self.device, loss_group(self.parallel_dims))
        self._loaders = loaders
        self._feed = Feed(
            self._ledger, loaders.open, partial(read_batches, self), self._events.emit
        )
        self._step_log = StepLog(self._events, self.metrics_processor, config.replica_id)
        # Made after the model is built: how long that may take is unknown, and it must not count as
        # a hang.
        self._watchdog = Watchdog(config.hang_timeout_seconds, self._tell_hang)
        self._local = LocalTraining(
            self, feed=self._feed, group=self._group, watchdog=self._watchdog
        )
        with self._watchdog.paused():
            self._strategy = self._build_strategy()
        if job_config.validation.enable:
            validate_together(self, self._group, self._watchdog)
            validate_updates(self, self._strategy)
            if self.parallel_dims.pp_enabled:
                share_loss(self, self._group)
        self._replica: ReplicaDimension | None = (
            None  # joined when the group is ready to train, see _join_job
        )
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
            self._strategy,
        )
        self.checkpointer.attach(self._checkpoint_host)

    def init_distributed(self) -> ParallelDims:
        """Set up the group as torchtitan does; from then on SIGTERM lets the group leave in
        order.
        """
        dims = super().init_distributed()
        check_replicate(dims.dp_replicate, dims.dp_shard, dims.cp)
        self._end_if_finished()
        config = self.job_config.fault_tolerance
        self._control = connect_control(config, self.launch)
        self._drain = Drain(
            self._control,
            rank=self.launch.rank,
            num_ranks=torch.distributed.get_world_size(),
            timeout_seconds=config.drain_timeout_seconds,
            on_abandon=self._abandon,
        )
        self._drain.install()
        return dims

    def _end_if_finished(self) -> None:
        """End here if the job is finished. No other group would come, and this group would train
        all steps again.

        Raises:
            JobFinished: the job is finished; on all ranks of the group.
        """
        group, config = GroupCollectives(self.device, None), self.job_config
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
            logger.warning(
                f"{mark} cannot be written ({error}): a group that comes back would begin the job anew"
            )

    def _build_strategy(self) -> StepStrategy:
        config, model = self.job_config.fault_tolerance, self.job_config.model
        has_long_rounds = strategy_of(config).has_long_rounds
        if has_long_rounds and spec.token_counts(self.model_parts):
            raise ConfigError(
                f"{TABLE}.semi_sync_method must be left out for a model that balances the load of its experts, got "
                f"{config.semi_sync_method!r}; it is {model.name!r}"
            )
        return (RoundStrategy if has_long_rounds else StepStrategy)(
            config,
            self._local,
            position=self._position,
            group=self._group,
            counters=_Counters(self, self._ledger),
            num_ranks=self.launch.ranks_on_host,
        )

    def _take_checkpoint(self) -> None:
        """Go on from the weights that a checkpoint had."""
        self._strategy.take_checkpoint()
        self._hyperparameters.restore()

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
                rest.callback(self._strategy.state.close)
                if "_links" in vars(self):
                    rest.callback(self._links.close)
                if self._chaos is not None:
                    rest.callback(self._chaos.close)
                rest.callback(self._watchdog.close)
                rest.callback(self._end_step_log)  # first: what it waits for may hang

    def _tell_hang(self) -> None:
        """Report that this rank ends because of a hang, to the run and to the group's
        supervisor.
        """
        seconds = self.job_config.fault_tolerance.hang_timeout_seconds
        write_error(
            HungError(
                f"no progress of the training thread for {seconds:g} s; its log has the stacks"
            )
        )
        self._events.emit(Hung(step=self._position.step))

    def _leave(self) -> None:
        """Leave the other groups. If no other group holds the job's state, save the state first."""
        assert self._replica is not None, "a group that has met no other one has nothing to leave"
        last = self._replica.find_last_to_leave()
        if last is not None and not self.checkpointer.lacks_state():
            last = None
        if last is None or not last.agreed:
            # Before all that takes a while: groups that train on must not wait for it. Where none
            # does, this group heartbeats meanwhile: a group that has yet to heal must not begin
            # from an older checkpoint, and the others that leave must see that this one lives.
            self._links.membership.close()
        self.checkpointer.withdraw()  # found corrupt in the very round that it left in
        if last is not None:
            self._save_before_leaving(self._replica, last)
            self._links.membership.close()
        self._emit_drained()
        unit = strategy_of(self.job_config.fault_tolerance).unit
        logger.info(f"SIGTERM: this group leaves after {unit} {self._position.step}")

    def _save_before_leaving(self, replica: ReplicaDimension, last: LastToLeave) -> None:
        """Save the state after the last update, unless another group that leaves has done so."""
        step = self._strategy.steps_of(self._position.step)
        with self._watchdog.paused():  # the timer of the drain ends a group that hangs from here on
            is_saved = partial(self.checkpointer.holds_state, step)
            if replica.await_turn(last, is_saved, self.checkpointer.watch_others(step)):
                self._strategy.go_back_to_update()
                self._saving = step
                self.checkpointer.save_on_leave(step, self._drain.seconds_left)
                self._saving = None

    def _end_step_log(self) -> None:
        try:
            self._step_log.flush()
        except Exception:  # noqa: BLE001  # another one may have ended the training: that is the one to tell of
            logger.exception("the event of the last step is not written")

    def _emit_drained(self) -> None:
        departure = self._strategy.describe_departure()
        event = Drained(
            step=self._position.step,
            reason=departure.reason,
            in_order=departure.in_order,
            void=[reading.describe() for reading in departure.void] or None,
        )
        if departure.in_order:
            event.digest, event.lineage = (
                self._strategy.state.digest(),
                f"{self._position.lineage:012x}",
            )
        else:
            logger.warning(f"{departure.reason}; {_name_void(departure.void)}")
        announce_left(self._events, event)

    def _abandon(self, reason: str) -> None:
        """Report that this rank ends out of order. Runs on another thread: the training thread may
        hang.
        """
        void = self._strategy.find_uncommitted() if "_strategy" in vars(self) else []
        if self._saving is not None:
            reason = f"{reason}, before the checkpoint of step {self._saving} was complete"
        batches = [reading.describe() for reading in void] or None
        announce_left(
            self._events,
            Drained(step=self._position.step, reason=reason, in_order=False, void=batches),
        )
        if void:
            print_line(f"SIGTERM: {_name_void(void)}")

    def should_continue_training(self) -> bool:
        """Return whether a step is left; after the last one stay until every group holds the final
        state.
        """
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
                TrainingFinished(
                    step=self._position.step,
                    tokens=self.ntokens_seen,
                    digest=digest,
                    lineage=lineage,
                )
            )
            self._mark_finished()
            self.checkpointer.raise_last_failure()
        return False

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Make one committed update, whatever happens to the other groups. A heal also ends with an
        update.
        """
        first = self.step == 1
        self._make_update()
        # Torchtitan shortens the timeouts after step 1: in the midst of a round or heal.
        if first and self.step != 1:
            set_pg_timeouts(
                timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims
            )

    def _make_update(self) -> None:
        started, config, strategy = (
            time.monotonic(),
            self.job_config.fault_tolerance,
            self._strategy,
        )
        replica = self._join_job()
        if not self._begun and not self._begin(replica):
            self._heal(replica)
            return
        if self._chaos is not None:
            self._chaos.at_step(self._position.step + 1)
        self._local.clear_gradients()
        work = strategy.start_update()
        stepped, self._stepped = self._stepped, 0.0
        work.between_seconds = started - stepped if stepped else 0.0
        # Of what was made of it while the last exchange was under way.
        started -= work.compute_seconds
        made = strategy.train(replica.slots_to_read(), replica.arm)
        committed = replica.commit(
            replace(made, activity=work.main_activity), strategy.train, strategy.discard
        )
        if committed is None:
            self._heal(replica)
            return
        exchanged = time.monotonic()
        work.grad_norm = strategy.apply(committed.update)
        self._checkpoint_host.participants = committed.participants
        work.seconds = time.monotonic() - started
        work.exchange_seconds = exchanged - started - work.compute_seconds - work.overlapped_seconds
        work.wire_bytes = self._links.exchange.take_wire_bytes()
        digest = replica.digest_if_due()
        self._links.note_commit(committed.update.step, committed.participants, work.inner_steps)
        self._step_log.emit(committed, work, self.step, digest)
        self._step_log.log(committed, work, self.step, self.ntokens_seen, replica.heal_seconds)
        if self._position.leaving:
            raise Leaving
        # With 1, groups may share a host without room for it.
        if config.group_size > 1 and config.heal_donors != 1:
            strategy.state.reserve()
        replica.offer()
        if strategy.meet_after_update():
            self._heal(replica)
        self._feed.drop({config.replica_id, *(r.entry.slot for r in work.readings)})
        self._stepped = time.monotonic()

    def _heals_instead(self, step: int) -> bool:
        """Join the job as a group that can load the state after `step`; says whether others are
        further.
        """
        self._join_job(self._strategy.updates_of(step))
        return self._behind

    def _join_job(self, updates: int = 0) -> ReplicaDimension:
        """Meet the other groups. This group can now train, or load the state after `updates`
        updates.
        """
        if self._replica is None:
            if self.launch.attempt > 0:
                self._local.warm_up(self._strategy.state)
            self._replica = self._build_replica()
            self._strategy.attach(self._replica, self._links.exchange)
            if self.job_config.fault_tolerance.chaos:
                self._chaos = self._build_chaos_agent()
            self._behind = self._replica.join(updates)
        return self._replica

    def _begin(self, replica: ReplicaDimension) -> bool:
        """Begin with the job's first step, or resume from a checkpoint; False if this group must
        heal.
        """
        self._begun = True
        if self._behind:
            return False
        self._check_loader()
        if not replica.start(self._strategy.updates_of(self.step - 1)):
            return False
        if self.launch.attempt > 0 and self.step == 1:
            # Without checkpoints there is nothing to come back to when every group is lost; but not
            # silently.
            logger.warning(
                "no group holds the state of the earlier attempt: training starts anew from step 0"
            )
            self._events.emit(StartedAnew(step=0))
        return True

    def _check_loader(self) -> None:
        """Check that this rank's loader, opened at a saved state, goes on exactly where that state
        was saved.
        """
        # Nobody beats while batches are read, and a slow loader would be killed.
        with self._watchdog.paused():
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
        is_behind = True
        while is_behind:
            self._checkpoint_host.participants = []
            self.optimizers.zero_grad()
            self.checkpointer.maybe_wait_for_staging()
            self.checkpointer.withdraw()
            self.step = self._strategy.steps_of(replica.heal())
            self.metrics_processor.ntokens_since_last_log = 0
            is_behind = self._strategy.resume_after_heal()

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
            self._control,
            exchanged=self._strategy.exchanged(),
            fragments=self._strategy.fragments,
            gradient_scale=self._strategy.gradient_scale,
            num_microbatches=self.pp_schedule._n_microbatches
            if self.parallel_dims.pp_enabled
            else 0,
        )
        position, state = self._position, self._strategy.state
        links.call_roll(lambda: None if position.leaving else tuple(position.left))
        shared: dict[str, Any] = {
            "position": position,
            "group": self._group,
            "events": self._events,
        }
        rounds = Rounds(
            config,
            links.membership,
            links.exchange,
            state=state,
            donor=Donor(state, links.server),
            drain=self._drain,
            watchdog=self._watchdog,
            **shared,
        )
        heal = Heal(
            config,
            rounds=rounds,
            exchange=links.exchange,
            state=state,
            ledger=self._ledger,
            nominal_tokens=self._local.nominal_tokens,
            token=self.launch.token,
            ranks_on_host=self.launch.ranks_on_host,
            apply=self._strategy.replay,
            **shared,
        )
        return ReplicaDimension(
            config,
            rounds=rounds,
            heal=heal,
            ledger=self._ledger,
            nominal_tokens=self._local.nominal_tokens,
            pauses_after=self._strategy.pauses_after,
            **shared,
        )

    def _build_chaos_agent(self) -> ChaosAgent:
        # What breaks a worker is loaded where it is asked for.
        from titan_ft.chaos.inside.agent import start_agent

        return start_agent(
            self.job_config,
            self.launch,
            self._links,
            self._events,
            group_pids=self._group.gather(os.getpid()),
            model_parts=self.model_parts,
            parameters=self._strategy.agreed_parameters(),
            optimizers=self._strategy.agreed_optimizers(),
        )


class _Counters:
    """The trainer's count of committed tokens and the ledger, as part of the state that heals."""

    def __init__(self, trainer: ReplicaTrainer, ledger: Ledger) -> None:
        self._trainer, self._ledger = trainer, ledger

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted now."""
        return {"ntokens_seen": self._trainer.ntokens_seen, "ledger": self._ledger.state_dict()}

    def advance(self, update: Update) -> None:
        """Count an update."""
        self._trainer.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the counts of another group, or of an earlier attempt of this group."""
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]
        self._ledger.load_state_dict(state_dict["ledger"])


def _name_void(readings: Sequence[Reading]) -> str:
    entries = [reading.entry for reading in readings]
    void = (
        f"{entry.num_batches} from batch {entry.first_batch} of slot {entry.slot}"
        for entry in entries
    )
    return f"void: {', '.join(void)}"
