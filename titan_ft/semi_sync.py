# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer of a semi-synchronous method: `train_step` makes a round, `sync_steps` steps and an update of all groups.

torchtitan's `step` counts the steps of a group, as its LR schedule, logs and checkpoints do. What the groups count,
`Position.step`, are rounds: the updates of the outer model.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from titan_ft.config import TABLE, ConfigError, outer_optimizer, steps_per_round
from titan_ft.replica.decision import Update
from titan_ft.replica.errors import Leaving
from titan_ft.replica.feed import merge
from titan_ft.replica.outer import OuterModel, OuterState, join_norm, set_lr
from titan_ft.replica.round import NOTHING, Contribution
from titan_ft.replica.snapshot import Counters, TrainState
from titan_ft.replica.step import Opening, ReplicaDimension
from titan_ft.run.events import Drained
from titan_ft.trainer import ReplicaTrainer
from titan_ft.training import spec
from titan_ft.training.step_log import Work


class SemiSyncTrainer(ReplicaTrainer):
    """One rank of a replica group that trains `sync_steps` steps by itself before it meets the others."""

    _outer: OuterModel
    _made: Contribution  # what the steps of the round under way contribute

    def __init__(self, job_config: JobConfig) -> None:
        self._steps_per_round = steps_per_round(job_config.fault_tolerance)
        self._late = False  # whether the others wait at the end of a round that this group has not begun
        self._broken_off = ""  # why this group leaves in the midst of its steps
        super().__init__(job_config)
        if self.job_config.validation.enable:
            self._validate_behind_rounds()

    # What the groups agree on

    def _build_state(self, counters: Counters) -> TrainState:
        if spec.token_counts(self.model_parts):
            raise ConfigError(
                f"{TABLE}.semi_sync_method must be left out for a model that balances the load of its experts, got "
                f"{self.job_config.fault_tolerance.semi_sync_method!r}; it is {self.job_config.model.name!r}"
            )
        self._check_dtypes()
        self._outer = OuterModel(self.model_parts, outer_optimizer(self.job_config.fault_tolerance))
        return OuterState(
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            counters,
            outer=self._outer,
            on_load=self._take_state,
        )

    def _check_dtypes(self) -> None:
        """Refuse weights that could not hold what the groups agree on: a checkpoint has the model's, no anchors.

        Raises:
            ConfigError: says which field.
        """
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    raise ConfigError(
                        f'training.dtype must be "float32" with {TABLE}.semi_sync_method, got "{dtype}" for {name}; '
                        "training.mixed_precision_param lets the steps compute in another one"
                    )

    def _take_state(self) -> None:
        self._outer.restore_model()
        self._refresh_converters()

    def _take_checkpoint(self) -> None:
        self._outer.take_model()
        super()._take_checkpoint()

    def _agreed_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._outer.named_anchors())

    def _agreed_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._outer.optimizer]

    def _exchanged(self) -> Iterator[torch.nn.Parameter]:
        yield from self._outer.anchors

    @property
    def _gradient_scale(self) -> float:
        return 1.0  # the anchors' gradients are made to measure

    def _steps_of(self, updates: int) -> int:
        return min(updates * self._steps_per_round, int(self.job_config.training.steps))

    def _updates_of(self, step: int) -> int:
        return -(-step // self._steps_per_round)

    # A round

    def _train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make the steps of a round, or those that are left of it, and let the exchange have what came of all of them.

        A group that has asked for the exchange already makes as many as it can until the others are there.
        """
        if self._late:
            self._late = False
            return Contribution(early=True)
        assert self._replica is not None
        work, early, ended = self._work, self._replica.early, False
        last = self._steps_of(self._position.step + 1)
        if not work.inner_steps:
            self._made = NOTHING
            set_lr(self.lr_schedulers, work.first_step - 1)  # a donor's copy may be of the end of a round
        for step in range(work.first_step + work.inner_steps, last + 1):
            if early and self._replica.awaited():
                break
            if work.inner_steps:
                self._leave_if_told(last + 1 - step)
                self.gc_handler.run(step)
            self.step = step
            if step == last and not early:
                arm()  # the others need not wait for the quorum after the step; else it is asked for already
            try:
                self._make_step(slots)
            except DataloaderExhaustedError:
                if not work.inner_steps:
                    raise
                ended = True  # the round ends here; the next one finds no data, and training ends
                break
        self._outer.take_changes(self._made.valid_tokens / self._nominal_tokens)
        entries = tuple(reading.entry for reading in work.readings)
        is_whole = ended or work.first_step + work.inner_steps > last
        # The groups are compared by what a step takes: one that has made fewer is not the faster for it.
        seconds = self._made.seconds / max(work.inner_steps, 1)
        return replace(self._made, entries=entries, seconds=seconds, early=not is_whole)

    def _make_step(self, slots: Sequence[int]) -> None:
        """Make one step of this group by itself, as torchtitan would."""
        work, num_steps = self._work, self._work.inner_steps
        began, seconds = time.monotonic(), work.compute_seconds
        self._zero_gradients()
        contribution = super()._train(slots)
        # Local losses are divided by the tokens of all groups; this step has only those of its own.
        share = super()._gradient_scale * self._nominal_tokens / max(contribution.valid_tokens, 1)
        if share != 1.0:
            for part in self.model_parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(share)
        self._clip_gradients()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self._made = self._made.plus(contribution)
        work.inner_steps, work.readings = num_steps + 1, merge(work.readings)
        work.compute_seconds = seconds + time.monotonic() - began

    def _apply(self, update: Update) -> float:
        """Apply a round's update, live or replayed; returns the norm of the mean change, the same in all groups."""
        self._watchdog.beat()
        self._links.exchange.write_gradients(update.gradients, update.scale)
        self.checkpointer.maybe_wait_for_staging()
        squares = self._outer.step()
        self._refresh_converters()
        self.step = self._steps_of(update.step)
        set_lr(self.lr_schedulers, self.step - 1)
        if update.gradients is None:
            self._work.lr = self._lr  # of the round's last step, also where this group has made fewer
        set_lr(self.lr_schedulers, self.step)
        self.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)
        bits = struct.unpack("q", struct.pack("d", squares))[0]
        return join_norm([struct.unpack("d", struct.pack("q", part))[0] for part in self._group.gather(bits)])

    def _go_on(self, replica: ReplicaDimension) -> None:
        """Meet the others once more behind a round, and get another state if this group's moments are spoiled."""
        if self._position.step == 1:  # torchtitan does so after its step 1, which is in the midst of a round
            dist_utils.set_pg_timeouts(
                timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims
            )
        if self.step >= self.job_config.training.steps:
            return
        if self._position.exclusions:
            logger.warning("this group's change was not finite: it begins the next round with a peer's state")
            for optimizer in self.optimizers:
                optimizer.state.clear()  # should every peer be gone by then
            self._heal(replica)
        else:
            self._open(replica)

    def _open(self, replica: ReplicaDimension) -> None:
        match replica.open():
            case Opening.HEAL:
                self._heal(replica)
            case Opening.EXCHANGE:
                self._late = True

    def _heal(self, replica: ReplicaDimension) -> None:
        super()._heal(replica)
        if replica.opens and self.step < self.job_config.training.steps:
            self._open(replica)

    def _pauses_after(self, step: int) -> bool:
        return True  # no quorum is asked for ahead: the groups are at the same point only at the end of a round

    # Leaving in the midst of it

    def _leave_if_told(self, remaining: int) -> None:
        """Leave at once, if a rank of this group was told to and the round would take too long. All ranks.

        Raises:
            Leaving: they leave; the round's batches are void, and are trained when the group is back.
        """
        if not any(self._group.gather(self._drain.requested)):
            return
        needed = self._work.compute_seconds / self._work.inner_steps * remaining
        allowed = self.job_config.fault_tolerance.drain_timeout_seconds / 2
        if not any(self._group.gather(needed > allowed)):
            return
        self._broken_off = f"{remaining} steps of the round were left, too many for drain_timeout_seconds"
        self._position.leave()
        raise Leaving

    def _emit_drained(self) -> None:
        work: Work | None = vars(self).get("_work")
        readings = [] if work is None or work.seconds else merge(work.readings)
        if not readings:  # no round is under way
            super()._emit_drained()
            return
        reason = f"SIGTERM: {self._broken_off or 'the others were not there in time to exchange the round'}"
        entries = [reading.entry for reading in readings]
        void = (f"{entry.num_batches} from batch {entry.first_batch} of slot {entry.slot}" for entry in entries)
        logger.warning(f"{reason}; void: {', '.join(void)}")
        batches = [reading.describe() for reading in readings]
        self._events.emit(Drained(step=self._num_committed, reason=reason, in_order=False, void=batches))

    def _validate_behind_rounds(self) -> None:
        """Let torchtitan validate the outer model behind each round in which a validation falls due."""
        should_validate = self.validator.should_validate

        def is_due(step: int) -> bool:
            first = self._steps_of(self._updates_of(step) - 1) + 1
            return any(map(should_validate, range(first, step + 1)))

        self.validator.should_validate = is_due
