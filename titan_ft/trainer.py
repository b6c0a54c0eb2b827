# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's Trainer as one rank of a replica group.

A *replica group* is a torchtitan job that trains one replica of the model. The groups train
together: in an *exchange* they sum their gradients, and each group applies the same *update*. An
update is *committed* when the groups have agreed that its exchange worked.

torchtitan's own loop runs unchanged, but `train_step` is replaced: it makes one update.

1. The first call joins the other groups (`_join_job`). A group that comes to a running job heals:
   it fetches the job's state from another group.
2. The strategy computes this group's gradients (`StepStrategy.train`). With a semi-synchronous
   method, it makes a round of local steps instead (`RoundStrategy.train`).
3. `ReplicaDimension.commit` exchanges them with the other groups until the update is committed.
4. The strategy applies the update, and the trainer logs it and offers the new state.

`train_step` returns only after an update or a heal. So torchtitan's counters count commits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
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
from titan_ft.engine.step import Committed, ReplicaDimension
from titan_ft.engine.strategy import StepStrategy
from titan_ft.engine.watchdog import Watchdog
from titan_ft.engine.work import Work
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
from titan_ft.training.checkpoint.manager import ReplicaCheckpoints
from titan_ft.training.checkpoint.trainer_view import TrainerView
from titan_ft.training.curves import keep_curves, keep_going_without_config_file, keep_traces
from titan_ft.training.finished import finished_step, mark_finished
from titan_ft.training.hyperparameters import Hyperparameters
from titan_ft.training.links import Links, connect_control
from titan_ft.training.local_training import LocalTraining, loss_group
from titan_ft.training.step_log import StepLog
from titan_ft.training.validation import share_loss, validate_together, validate_updates
from titan_ft.training.worker import WorkerSetup, open_events

if TYPE_CHECKING:
    from titan_ft.chaos.inside.agent import ChaosAgent


class ReplicaTrainer(HostTrainer):
    """torchtitan's trainer of one rank of a replica group.

    torchtitan's own loop calls `train_step` and `should_continue_training`. `titan_ft.train` makes
    the class and calls `train`, on the main thread, which is the training thread. Two methods run
    on other threads, because the training thread may hang: `_report_hang` on the thread of the
    watchdog, which ends a hanging process, and `_report_abandon` on a thread of the drain, which
    ends the process after SIGTERM.

    If `train_step` raises, no further step is made: `train` closes the links, so that the other
    groups notice at once, and the process ends. The state after the last commit is then in the
    other groups and in the checkpoints.

    See docs/design.md, "One step".

    Attributes:
        setup: settings from the environment. `titan_ft.train` sets them on a subclass.
        step: torchtitan's number of the step under way. Between two steps, that of the last one.
        ntokens_seen: tokens of all committed updates, of all groups.

    Raises:
        ReplicaError: a known end of this group. The message says what to do.
    """

    setup: WorkerSetup
    step: int
    ntokens_seen: int
    _links: Links
    _strategy: StepStrategy
    _saving_step: int | None = None
    """Step of the checkpoint that this group saves before it leaves; None while it saves none."""

    def __init__(self, job_config: JobConfig) -> None:
        config = job_config.fault_tolerance
        self._events = open_events(job_config, self.setup)
        # From now on, torchtitan finds the model with this package's additions. `loaders` opens the
        # data loader of any slot: a group may train the data of a missing group.
        loaders = spec.register(
            job_config.model.name, config, job_config.experimental.custom_import
        )
        self._adapt_config(job_config)
        # Set before init_distributed, which starts the drain: the drain may end this rank at any
        # time, and then reports the position.
        self._position = Position()
        super().__init__(job_config, ReplicaCheckpoints)
        self._hyperparameters = Hyperparameters(self.optimizers, self.lr_schedulers)
        self._ledger = Ledger(config.group_size, loaders.shard, loaders.num_shards)
        self._group = GroupCollectives(self.device, loss_group(self.parallel_dims))
        self._loaders = loaders
        self._feed = Feed(
            self._ledger, loaders.open, partial(read_batches, self), self._events.emit
        )
        self._step_log = StepLog(self._events, self.metrics_processor, config.replica_id)
        # Started only now: the time to build a model has no bound, and would count as a hang.
        self._watchdog = Watchdog(config.hang_timeout_seconds, self._report_hang)
        self._local = LocalTraining(
            self, feed=self._feed, group=self._group, watchdog=self._watchdog
        )
        with self._watchdog.paused():
            self._strategy = self._build_strategy()
        if job_config.validation.enable:
            self._share_validation()
        # The group joins the others when it is ready to train, see `_join_job`.
        self._replica: ReplicaDimension | None = None
        self._must_heal = False  # the other groups were further when this group joined
        self._has_started = False  # this group has tried to start its first step, or has healed
        # Monotonic seconds at the end of the last update; None after a heal, and at the start.
        self._update_ended_at: float | None = None
        self._chaos: ChaosAgent | None = None
        self._checkpoint_view = TrainerView(
            job_config,
            self._ledger,
            self._position,
            self._events,
            self._group.gather,
            self._join_before_load,
            self._adopt_checkpoint,
            self._strategy,
        )
        self.checkpointer.attach(self._checkpoint_view)

    def _adapt_config(self, job_config: JobConfig) -> None:
        """Change the fields of the config that torchtitan would read as those of a whole job."""
        if job_config.debug.seed is None:
            # Groups start at different times, and all must begin with the same weights. torchtitan
            # would draw another seed in each group.
            job_config.debug.seed = int(self.setup.config_digest[:8], 16)
            logger.info(
                f"debug.seed is not set: using {job_config.debug.seed}, the same in all groups of "
                "this config"
            )
        # The configured batch is that of all groups. torchtitan's Trainer sees one group only.
        if job_config.training.global_batch_size > 0:
            job_config.training.global_batch_size //= job_config.fault_tolerance.group_size
        # All groups write to the same folder, so curves and traces go to a folder for each group.
        keep_curves(job_config, self.setup.rank)
        keep_traces(job_config, self.setup.attempt)
        # torchtitan would end this group if it could not write a copy of the config.
        keep_going_without_config_file(job_config)

    def _share_validation(self) -> None:
        """Validate the weights on which all groups agree, with all ranks of this group."""
        validate_together(self, self._group, self._watchdog)
        validate_updates(self, self._strategy)
        if self.parallel_dims.pp_enabled:
            share_loss(self, self._group)

    def init_distributed(self) -> ParallelDims:
        """Set up the group as torchtitan does, and let SIGTERM end the group in order from now on.

        Raises:
            ConfigError: the parallel degrees leave no room for replica groups.
            JobFinished: the job is finished.
        """
        dims = super().init_distributed()
        check_replicate(dims.dp_replicate, dims.dp_shard, dims.cp)
        self._end_if_finished()
        config = self.job_config.fault_tolerance
        self._control = connect_control(config, self.setup, self._events)
        self._drain = Drain(
            self._control,
            num_ranks=torch.distributed.get_world_size(),
            timeout_seconds=config.drain_timeout_seconds,
            on_abandon=self._report_abandon,
        )
        self._drain.install()
        return dims

    def _end_if_finished(self) -> None:
        """End here if the job is finished. No other group would come, and this group would train
        all steps again.

        Raises:
            JobFinished: the job is finished; on all ranks of the group.
        """
        group = GroupCollectives(self.device, None)
        config = self.job_config
        mark = RunPaths(config.job.dump_folder).finished
        # Rank 0 looks for all ranks: two ranks may see different files on a shared file system.
        not_finished = -1
        last_of_rank = not_finished
        if self.setup.rank == 0:
            step = finished_step(mark, self.setup.config_digest)
            if step is not None:
                last_of_rank = step
        last = group.gather(last_of_rank)[0]
        if last == not_finished:
            return
        self._events.emit(CameTooLate(step=last))
        # A rank that closed its connections now could break the gather above on a slower rank.
        # After this second gather every rank has the result of the first.
        with contextlib.suppress(RuntimeError):
            group.gather(last)
        unit = strategy_of(config.fault_tolerance).unit
        raise JobFinished(
            f"the job has finished: {unit} {last}, its last, was made before this group came (so "
            f"says {mark}); this group ends. To train it once more, take another run folder"
        )

    def _mark_finished(self) -> None:
        """Leave a mark in the run's folder: a group that comes back later ends at once."""
        if self.setup.rank != 0:
            return
        mark = RunPaths(self.job_config.job.dump_folder).finished
        try:
            mark_finished(mark, self.setup.config_digest, self._position.step)
        except OSError as error:
            logger.warning(
                f"{mark} cannot be written ({error}): a group that comes back would begin the job "
                "anew"
            )

    def _build_strategy(self) -> StepStrategy:
        config = self.job_config.fault_tolerance
        model = self.job_config.model
        has_long_rounds = strategy_of(config).has_long_rounds
        # A model has token counts if it balances the load of its experts.
        if has_long_rounds and spec.token_counts(self.model_parts):
            raise ConfigError(
                f"{TABLE}.semi_sync_method must be left out for a model that balances the load of "
                f"its experts, got {config.semi_sync_method!r}; it is {model.name!r}"
            )
        strategy_class = RoundStrategy if has_long_rounds else StepStrategy
        return strategy_class(
            config,
            self._local,
            position=self._position,
            group=self._group,
            counters=_TrainerCounters(self, self._ledger),
            num_ranks=self.setup.ranks_on_host,
        )

    def _adopt_checkpoint(self) -> None:
        """Continue from the weights of a checkpoint, with this config's hyperparameters."""
        self._strategy.adopt_checkpoint()
        self._hyperparameters.restore()

    def train(self) -> None:
        """Train as torchtitan does, and leave the other groups however the training ends."""
        try:
            try:
                super().train()
            except Leaving:
                self._step_log.flush()
                self._leave()
            self._drain.leave()
        finally:
            self._close()

    def _close(self) -> None:
        """Close all parts. An error in one part does not keep the other parts open."""
        with contextlib.ExitStack() as stack:
            # The stack calls its last entry first.
            stack.callback(self._strategy.state.close)
            has_joined = "_links" in vars(self)
            if has_joined:
                stack.callback(self._links.close)
            if self._chaos is not None:
                stack.callback(self._chaos.close)
            stack.callback(self._watchdog.close)
            # First, while the watchdog still runs: this waits for the device, which may hang.
            stack.callback(self._flush_last_event)

    def _report_hang(self) -> None:
        """Report to the run and to the agent that this rank ends because of a hang.

        Runs on the watchdog's thread.
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
        # The groups that hold the job's state and leave now. One of them must save the state.
        last_groups = self._replica.find_last_to_leave()
        if last_groups is not None and not self.checkpointer.lacks_state():
            last_groups = None
        others_may_stay = last_groups is None or not last_groups.agreed
        if others_may_stay:
            # Groups that stay wait for this group until its heartbeats end. So end the heartbeats
            # before a slow save. If all groups leave, this group keeps its heartbeats during the
            # save: a group that has not healed yet must not begin from an older checkpoint, and the
            # other groups that leave must see that this group lives.
            self._links.membership.close()
        # If the last round showed that this group's state is corrupt, remove its checkpoints.
        self.checkpointer.withdraw_corrupt()
        if last_groups is not None:
            self._save_before_leaving(self._replica, last_groups)
            self._links.membership.close()
        self._emit_drained()
        unit = strategy_of(self.job_config.fault_tolerance).unit
        logger.info(f"SIGTERM: this group leaves after {unit} {self._position.step}")

    def _save_before_leaving(self, replica: ReplicaDimension, last_groups: LastToLeave) -> None:
        """Save the state after the last update, unless another group that leaves has done so."""
        step = self._strategy.last_step_of(self._position.step)
        # The drain's timeout ends a group that hangs from here on.
        with self._watchdog.paused():
            is_saved = partial(self.checkpointer.holds_state, step)
            is_save_under_way = self.checkpointer.watch_other_writers(step)
            if replica.await_turn_to_save(last_groups, is_saved, is_save_under_way):
                self._strategy.go_back_to_update()
                self._saving_step = step
                self.checkpointer.save_on_leave(step, self._drain.seconds_left)
                self._saving_step = None

    def _flush_last_event(self) -> None:
        """Emit the event of the last step; log an error, because another one may end this rank."""
        try:
            self._step_log.flush()
        except Exception:  # noqa: BLE001
            logger.exception("the event of the last step is not written")

    def _emit_drained(self) -> None:
        """Report that this group leaves, in order or with batches that are in no update."""
        departure = self._strategy.describe_departure()
        event = Drained(
            step=self._position.step,
            reason=departure.reason,
            in_order=departure.in_order,
            void=[reading.describe() for reading in departure.void] or None,
        )
        if departure.in_order:
            event.digest = self._strategy.state.digest()
            event.lineage = f"{self._position.lineage:012x}"
        else:
            logger.warning(f"{departure.reason}; {_describe_void(departure.void)}")
        announce_left(self._events, event)

    def _report_abandon(self, reason: str) -> None:
        """Report that this rank ends out of order, because the time to drain is over.

        Runs on the drain's thread: the training thread may hang.
        """
        void: Sequence[Reading] = []
        if "_strategy" in vars(self):
            void = self._strategy.find_uncommitted()
        if self._saving_step is not None:
            reason = f"{reason}, before the checkpoint of step {self._saving_step} was complete"
        batches = [reading.describe() for reading in void] or None
        announce_left(
            self._events,
            Drained(step=self._position.step, reason=reason, in_order=False, void=batches),
        )
        if void:
            print_line(f"SIGTERM: {_describe_void(void)}")

    def should_continue_training(self) -> bool:
        """Return True if a step is left.

        After its last step, this group stays until every group holds the final state. If that shows
        that this group lacks the state, the group heals, and trains on from an earlier state.
        """
        if super().should_continue_training():
            return True
        if self._replica is None:
            return False
        digest = self._replica.finish()
        if digest is None:
            self._heal(self._replica)
            return self.should_continue_training()
        self._finish(digest)
        return False

    def _finish(self, digest: str) -> None:
        """Save and report the final state, which every group holds.

        Args:
            digest: this rank's digest of the final state, in hex.

        Raises:
            ReplicaError: the last checkpoint could not be saved.
        """
        # From now on, a group that is gone has finished, and is not reported as lost.
        self._links.end_roll_call()
        self._step_log.flush()
        self.checkpointer.withdraw_corrupt()  # if this group's state was corrupt
        self.checkpointer.finish(self.step)
        self._events.emit(
            TrainingFinished(
                step=self._position.step,
                tokens=self.ntokens_seen,
                digest=digest,
                lineage=f"{self._position.lineage:012x}",
            )
        )
        self._mark_finished()
        self.checkpointer.raise_error_of_last_step()

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        """Make one committed update, even if other groups fail meanwhile.

        A heal counts too: it ends with an update that another group committed.

        Args:
            data_iterator: torchtitan's own, and unused. The feed reads the batches.

        Raises:
            Leaving: this group leaves in order, after SIGTERM.
            ReplicaError: this group cannot go on.
        """
        is_first = self.step == 1
        self._make_update()
        # torchtitan shortens the timeouts at the end of its step 1. A group that heals, or makes a
        # round of local steps, ends its first update on a later step, so do it here.
        if is_first and self.step != 1:
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            set_pg_timeouts(timeout, self.parallel_dims)

    def _make_update(self) -> None:
        """Train and commit an update with the other groups, or heal."""
        started_at = time.monotonic()
        strategy = self._strategy
        replica = self._join_job()
        if not self._has_started and not self._start(replica):
            self._heal(replica)
            return
        if self._chaos is not None:
            self._chaos.at_step(self._position.step + 1)
        self._local.clear_gradients()
        work = strategy.start_update()
        if self._update_ended_at is not None:
            work.between_seconds = started_at - self._update_ended_at
        self._update_ended_at = None
        # A semi-synchronous method has made steps of this update while the last exchange was under
        # way. Their time belongs to this update.
        started_at -= work.compute_seconds
        contribution = strategy.train(replica.slots_to_read(), replica.arm)
        # If other groups wait for this one, they log this activity as the reason.
        contribution = replace(contribution, activity=work.main_activity)
        committed = replica.commit(contribution, strategy.train, strategy.discard)
        if committed is None:
            self._heal(replica)
            return
        exchanged_at = time.monotonic()
        work.grad_norm = strategy.apply(committed.update)
        self._checkpoint_view.participants = committed.participants
        work.seconds = time.monotonic() - started_at
        own_seconds = work.compute_seconds + work.overlapped_seconds
        work.exchange_seconds = exchanged_at - started_at - own_seconds
        self._log_update(replica, committed, work)
        if self._position.leaving:
            raise Leaving
        self._serve_update(replica)
        if strategy.meet_after_update():
            self._heal(replica)
        # Keep the loaders that the next step will probably need: those of this group's slot, and of
        # the slots that it has read for missing groups.
        read_slots = {reading.entry.slot for reading in work.readings}
        self._feed.close_all_but({self.job_config.fault_tolerance.replica_id, *read_slots})
        self._update_ended_at = time.monotonic()

    def _log_update(self, replica: ReplicaDimension, committed: Committed, work: Work) -> None:
        """Log an applied update: its event, and torchtitan's metrics."""
        work.wire_bytes = self._links.exchange.pop_sent_bytes()
        digest = replica.digest_if_due()
        self._links.note_commit(committed.update.step, committed.participants, work.inner_steps)
        self._step_log.emit(committed, work, self.step, digest)
        self._step_log.log(committed, work, self.step, self.ntokens_seen, replica.heal_seconds)

    def _serve_update(self, replica: ReplicaDimension) -> None:
        """Offer the state after an applied update to newcomers."""
        config = self.job_config.fault_tolerance
        # Reserve host memory for a copy of the state now, so that the first copy is fast. A job of
        # one group never serves its state. Groups with heal_donors = 1 may share a host that has no
        # room for a copy of each group's state.
        if config.group_size > 1 and config.heal_donors != 1:
            self._strategy.state.reserve()
        replica.offer_state()

    def _join_before_load(self, step: int) -> bool:
        """Join the job before a checkpoint is loaded; return True if the other groups are further.

        Args:
            step: torchtitan's step of the checkpoint that this group can load.
        """
        self._join_job(self._strategy.update_of(step))
        return self._must_heal

    def _join_job(self, updates: int = 0) -> ReplicaDimension:
        """Meet the other groups, the first time; return the replica dimension.

        Args:
            updates: committed updates in the state that this group can load; 0 = none.
        """
        if self._replica is None:
            is_restarted = self.setup.attempt > 0
            if is_restarted:
                # The other groups train already, and must not wait for this process's slow first
                # step. So make one before they know of this group.
                self._local.warm_up(self._strategy.state)
            self._replica = self._build_replica()
            self._strategy.attach(self._replica, self._links.exchange)
            if self.job_config.fault_tolerance.chaos:
                self._chaos = self._build_chaos_agent()
            self._must_heal = self._replica.join(updates)
        return self._replica

    def _start(self, replica: ReplicaDimension) -> bool:
        """Start with the job's first step, or from a checkpoint; False if this group must heal."""
        self._has_started = True
        if self._must_heal:
            return False
        self._check_loader()
        if not replica.start(self._strategy.update_of(self.step - 1)):
            return False
        if self.setup.attempt > 0 and self.step == 1:
            # All groups were lost, and there is no checkpoint. The work is lost, which a person
            # must be able to see.
            logger.warning(
                "no group holds the state of the earlier attempt: training starts anew from step 0"
            )
            self._events.emit(StartedAnew(step=0))
        return True

    def _check_loader(self) -> None:
        """Check that this rank's loader, opened at a saved state, goes on exactly where that state
        was saved.
        """
        # A slow loader would look like a hang to the watchdog.
        with self._watchdog.paused():
            found = self._loaders.check()
        if not found.exact:
            logger.warning(
                f"training.dataset {self.job_config.training.dataset}: the data loader "
                f"({found.loader}) does not go on exactly where its state was saved: "
                f"{found.reason}. Whenever a group comes back, batches will be lost or repeated; "
                "see docs/operations.md, Data"
            )
        self._events.emit(found)

    def _heal(self, replica: ReplicaDimension) -> None:
        """Fetch the job's state from other groups, until this group trains from the same state."""
        self._has_started = True
        self._step_log.flush()
        is_behind = True
        while is_behind:
            self._checkpoint_view.participants = []
            self.optimizers.zero_grad()
            # A background save may still copy the weights that the heal replaces.
            self.checkpointer.maybe_wait_for_staging()
            # If this group's state was corrupt, so are its checkpoints.
            self.checkpointer.withdraw_corrupt()
            self.step = self._strategy.last_step_of(replica.heal())
            self.metrics_processor.ntokens_since_last_log = 0
            is_behind = self._strategy.resume_after_heal()

    def _build_replica(self) -> ReplicaDimension:
        """Open the links to the other groups, and build the engine on top of them."""
        config = self.job_config.fault_tolerance
        num_microbatches = 0
        if self.parallel_dims.pp_enabled:
            num_microbatches = self.pp_schedule._n_microbatches
        links = self._links = Links(
            config,
            self.setup,
            self._events,
            self.model_parts,
            self.parallel_dims,
            self._group,
            self._drain,
            self._control,
            exchanged=self._strategy.exchanged_parameters(),
            fragments=self._strategy.fragments,
            gradient_scale=self._strategy.gradient_scale,
            num_microbatches=num_microbatches,
        )
        position = self._position
        state = self._strategy.state

        def find_left() -> Collection[int] | None:
            """Return the slots that left in order; None if this group leaves. Another thread."""
            if position.leaving:
                return None
            # The training thread may change the set meanwhile, so the caller gets a copy.
            return tuple(position.left)

        # From now on, report groups that are lost.
        links.start_roll_call(find_left)
        rounds = Rounds(
            config,
            links.membership,
            links.exchange,
            position=position,
            state=state,
            donor=Donor(state, links.server),
            group=self._group,
            events=self._events,
            drain=self._drain,
            watchdog=self._watchdog,
        )
        heal = Heal(
            config,
            position=position,
            rounds=rounds,
            exchange=links.exchange,
            state=state,
            ledger=self._ledger,
            group=self._group,
            events=self._events,
            nominal_tokens=self._local.nominal_tokens,
            token=self.setup.token,
            ranks_on_host=self.setup.ranks_on_host,
            apply=self._strategy.replay,
        )
        return ReplicaDimension(
            config,
            position=position,
            rounds=rounds,
            heal=heal,
            ledger=self._ledger,
            group=self._group,
            events=self._events,
            nominal_tokens=self._local.nominal_tokens,
            pauses_after=self._strategy.pauses_after,
        )

    def _build_chaos_agent(self) -> ChaosAgent:
        # Imported on demand: a run without chaos loads no code that can break a worker.
        from titan_ft.chaos.inside.agent import start_agent

        return start_agent(
            self.job_config,
            self.setup,
            self._links,
            self._events,
            group_pids=self._group.gather(os.getpid()),
            model_parts=self.model_parts,
            parameters=self._strategy.agreed_parameters(),
            optimizers=self._strategy.agreed_optimizers(),
        )


class _TrainerCounters:
    """The count of committed tokens, and the ledger: a part of the state that a joiner gets."""

    def __init__(self, trainer: ReplicaTrainer, ledger: Ledger) -> None:
        self._trainer = trainer
        self._ledger = ledger

    def state_dict(self) -> dict[str, Any]:
        """Return the present counts."""
        return {"ntokens_seen": self._trainer.ntokens_seen, "ledger": self._ledger.state_dict()}

    def advance(self, update: Update) -> None:
        """Count a committed update."""
        self._trainer.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the counts of another group, or of a checkpoint."""
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]
        self._ledger.load_state_dict(state_dict["ledger"])


def _describe_void(readings: Sequence[Reading]) -> str:
    """Return one line with the batches that are in no update."""
    batches = []
    for reading in readings:
        entry = reading.entry
        batches.append(f"{entry.num_batches} from batch {entry.first_batch} of slot {entry.slot}")
    return f"void: {', '.join(batches)}"
