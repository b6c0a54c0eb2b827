# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compute gradients in one replica group, by torchtitan's Trainer, as the engine needs them.

The engine (`titan_ft/engine/`) decides about updates of the whole job. It knows neither torchtitan
nor the model. `LocalTraining` is its view of the group's own training: it reads batches, runs
forward and backward, clips, and reports tokens, loss and times. Nothing here knows other groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from titan_ft.engine.feed import Batch, Feed, Reading
from titan_ft.engine.watchdog import Watchdog
from titan_ft.engine.work import Work
from titan_ft.host.titan import (
    IGNORE_INDEX,
    PIPELINES_SUM_LOSSES,
    DataloaderExhaustedError,
    HostTrainer,
    HuggingFaceTextDataset,
    ParallelDims,
    batches_per_call,
    build_dummy_batches,
    clip_grad_norm_,
    compiles_attention,
    forward_backward,
)
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.training import spec
from titan_ft.transfer.snapshot import TrainState

_WARM_UP_TOKENS = 32


class LocalTraining:
    """The worker's implementation of `titan_ft.engine.strategy.GroupTraining`.

    The engine's strategies and the trainer call it, on the training thread only. If `compute`
    fails, the local gradients are incomplete, and the process ends.

    Args:
        trainer: torchtitan's trainer, with its model built.
        feed: reads the batches of any slot. A slot is a share of the data; each group has one, and
            may read the slots of absent groups too.
        group: gathers over the ranks of `loss_group`.
        watchdog: ends this process if it gets no beat for too long.

    Attributes:
        nominal_tokens: tokens of a step with all groups present and every label valid.
    """

    data_ended: type[Exception] = DataloaderExhaustedError

    def __init__(
        self,
        trainer: HostTrainer,
        *,
        feed: Feed,
        group: GroupCollectives,
        watchdog: Watchdog,
    ) -> None:
        self._trainer = trainer
        self._feed = feed
        self._group = group
        self._watchdog = watchdog
        self.nominal_tokens = count_nominal_tokens(trainer)

    @property
    def step(self) -> int:
        """torchtitan's number of the step under way."""
        return int(self._trainer.step)

    @step.setter
    def step(self, step: int) -> None:
        self._trainer.step = step

    @property
    def num_steps(self) -> int:
        """Number of torchtitan's last step."""
        return int(self._trainer.job_config.training.steps)

    @property
    def model_parts(self) -> list[nn.Module]:
        """Modules that this rank trains. With a pipeline, these may be several stages."""
        return list(self._trainer.model_parts)

    @property
    def optimizers(self) -> Any:
        """torchtitan's OptimizersContainer."""
        return self._trainer.optimizers

    @property
    def lr_schedulers(self) -> Any:
        """torchtitan's LRSchedulersContainer."""
        return self._trainer.lr_schedulers

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._trainer.lr_schedulers.schedulers[0].get_last_lr()[0])

    @property
    def gradient_scale(self) -> float:
        """Factor from local gradients to gradients of the reported loss; 1 without a pipeline.

        Pipelines of torchtitan 0.2 run the backward of the sum of the losses, and divide only the
        reported loss. Without the factor, these large gradients would be clipped in every step.
        """
        sums_losses = PIPELINES_SUM_LOSSES and self._trainer.parallel_dims.pp_enabled
        return 1 / self.nominal_tokens if sums_losses else 1.0

    def compute(self, work: Work, slots: Sequence[int], arm: Callable[[], None]) -> Contribution:
        """Train one step's batch of each slot, and add its gradients to the model's gradients.

        Args:
            work: this method adds the batches that it reads, and its times.
            slots: slots whose batches this group reads.
            arm: called before the last backward. From then on, complete gradients travel to the
                other groups.

        Returns:
            The batches, tokens and loss of this group; the same on all of its ranks.

        Raises:
            DataloaderExhaustedError: the data of a slot have ended.
        """
        if not slots:
            return NOTHING
        started_at = time.monotonic()
        trainer = self._trainer
        per_call = batches_per_call(trainer)
        num_batches = trainer.gradient_accumulation_steps * per_call
        readings = []
        for slot in slots:
            num_read_before = work.count_batches(slot)
            readings.append(self._feed.read(slot, num_batches, num_read_before))
        loading_seconds = time.monotonic() - started_at
        # Only now: if the data have ended, `read` has raised, and there is no step.
        work.inner_steps = 1
        microbatches = [batch for reading in readings for batch in reading.batches]
        tokens = 0
        valid_tokens = 0
        for _inputs, labels in microbatches:
            tokens += labels.numel()
            valid_tokens += int((labels != IGNORE_INDEX).sum())
        losses = []
        for first in range(0, len(microbatches), per_call):
            self._watchdog.beat()
            end = first + per_call
            is_last_call = end == len(microbatches)
            if is_last_call:
                arm()
            losses.append(self._forward_backward(microbatches[first:end]).detach())
        work.readings += readings
        trainer.metrics_processor.ntokens_since_last_log += tokens
        # Read the next batches now, while the device computes and the exchange is under way.
        # `item` below makes the host wait for the device.
        read_ahead_started_at = time.monotonic()
        has_next_step = self.step < self.num_steps
        self._feed.read_ahead(readings if has_next_step else [])
        loading_seconds += time.monotonic() - read_ahead_started_at
        loss_sum = torch.sum(torch.stack(losses)).item()
        seconds = time.monotonic() - started_at
        contribution = self._gather_contribution(
            work, valid_tokens, tokens, loss_sum, seconds, loading_seconds, readings
        )
        work.compute_seconds += time.monotonic() - started_at
        return contribution

    def beat(self) -> None:
        """Note that the training thread makes progress."""
        self._watchdog.beat()

    def clear_gradients(self) -> None:
        """Clear the gradients, and the model's counts of its batches."""
        self._trainer.optimizers.zero_grad()
        for count in spec.token_counts(self._trainer.model_parts):
            # Validation and the warm-up count tokens too. They must not move the experts' biases.
            count.zero_()

    def clip_gradients(self) -> torch.Tensor:
        """Clip the gradients; return their norm before clipping."""
        trainer = self._trainer
        parameters: list[nn.Parameter] = []
        for part in trainer.model_parts:
            parameters += part.parameters()
        return clip_grad_norm_(
            parameters,
            trainer.job_config.training.max_norm,
            foreach=True,
            pp_mesh=trainer.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=trainer.parallel_dims.ep_enabled,
        )

    def refresh_converters(self) -> None:
        """Let converters recompute their caches of the weights. A forward would otherwise use old
        weights.

        Call on all ranks of a group.
        """
        self._trainer.refresh_converters()

    def await_staging(self) -> None:
        """Wait until a save in the background has copied the weights."""
        self._trainer.checkpointer.maybe_wait_for_staging()

    def collect_garbage(self, step: int) -> None:
        """Let Python's collector run at the steps at which torchtitan lets it."""
        self._trainer.gc_handler.run(step)

    def pauses_after(self, step: int) -> bool:
        """Return True if torchtitan ends, saves or validates after `step`."""
        trainer = self._trainer
        if step >= self.num_steps or trainer.checkpointer.pauses_after(step):
            return True
        return trainer.job_config.validation.enable and trainer.validator.should_validate(step)

    def lacks_state(self) -> bool:
        """Return True if the state after the last update must be saved, and is in no checkpoint."""
        lacks: bool = self._trainer.checkpointer.lacks_state()
        return lacks

    def warm_up(self, state: TrainState) -> None:
        """Make a step and undo it, before the other groups wait for this group.

        A process's first step takes several times as long as its second, because of compilation,
        sharding propagation and memory. The batch is made up: real batches would be read for
        nothing. So only models of text are warmed up.

        Args:
            state: the state to restore, with its counters.
        """
        trainer = self._trainer
        if not isinstance(getattr(trainer.dataloader, "dataset", None), HuggingFaceTextDataset):
            return
        before = state.copy(0, 0)
        tokens = torch.zeros(self._warm_up_shape(), dtype=torch.long)
        with torch.random.fork_rng():
            self._forward_backward(build_dummy_batches(trainer, tokens))
            self.clip_gradients()
            trainer.optimizers.step()
        trainer.optimizers.zero_grad()
        state.load(before)

    def _warm_up_shape(self) -> tuple[int, int]:
        """Return the number of sequences of the warm-up's batch, and the tokens of each.

        A small batch is enough, unless the first step depends on shapes:

        - Compiled code does. Flex attention is always compiled.
        - torch caches the shardings between layers by shape (TP, CP).
        - A pipeline cuts its microbatches from a whole batch.
        - An accelerator chooses and loads kernels by shape. cuDNN's attention makes a plan for each
          shape, and the allocator keeps the memory of a whole batch.
        """
        trainer = self._trainer
        training, dims = trainer.job_config.training, trainer.parallel_dims
        compiles = trainer.job_config.compile.enable or compiles_attention(trainer)
        splits = dims.tp_enabled or dims.cp_enabled or dims.pp_enabled
        if trainer.device.type != "cpu" or compiles or splits:
            return training.local_batch_size, training.seq_len
        return 1, min(_WARM_UP_TOKENS, training.seq_len)

    def _forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Add the gradients of these microbatches; return their loss divided by nominal tokens."""
        device = self._trainer.device

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # A blocking copy would wait for all queued work, such as the previous microbatch.
            return value.to(device, non_blocking=True)

        moved = []
        for inputs, labels in batches:
            moved_inputs = {key: move(value) for key, value in inputs.items()}
            moved.append((moved_inputs, move(labels)))
        return forward_backward(self._trainer, moved, self.nominal_tokens)

    def _gather_contribution(
        self,
        work: Work,
        valid_tokens: int,
        tokens: int,
        loss: float,
        seconds: float,
        loading_seconds: float,
        readings: Sequence[Reading],
    ) -> Contribution:
        """Sum this group's counts and losses, as torchtitan does for its logs, in one
        collective.
        """
        if knows_loss(self._trainer):
            local_mean = loss * self.nominal_tokens / max(valid_tokens, 1)
            own = [valid_tokens, tokens, loss, local_mean]
        else:
            own = [0, 0, 0.0, -math.inf]
        # One row for each rank, with these six numbers.
        rows = self._group.gather_losses([*own, seconds, loading_seconds])
        valid_tokens_by_rank, tokens_by_rank, losses, means, times, loading_times = rows.unbind(1)
        work.loading_seconds += float(loading_times.max())
        cp = self._trainer.parallel_dims.cp
        return Contribution(
            # The ranks of a context-parallel group all count the same tokens, but each has its own
            # part of the loss.
            valid_tokens=int(valid_tokens_by_rank.sum()) // cp,
            tokens=int(tokens_by_rank.sum()) // cp,
            loss=float(losses.sum()),
            max_loss=float(means.max()),
            seconds=float(times.max()),
            entries=tuple(reading.entry for reading in readings),
        )


def count_nominal_tokens(trainer: HostTrainer) -> int:
    """Count the tokens of a step with all groups present and every label valid."""
    training = trainer.job_config.training
    degree = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard
    batch = training.local_batch_size * degree * trainer.gradient_accumulation_steps
    return int(batch * training.seq_len * trainer.job_config.fault_tolerance.group_size)


def loss_group(dims: ParallelDims) -> torch.distributed.ProcessGroup | None:
    """Return the ranks that sum their losses; None if each rank knows the whole loss."""
    if dims.pp_enabled:
        # Only the last stage of a pipeline computes a loss. Rank 0, whose loss most views show, is
        # of the first stage. So all ranks of the group take part.
        return torch.distributed.group.WORLD
    mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
    return None if mesh is None else mesh.get_group()


def knows_loss(trainer: HostTrainer) -> bool:
    """Return True if this rank's tokens and loss count in the sum over `loss_group`."""
    dims = trainer.parallel_dims
    if not dims.pp_enabled:
        return True
    if not trainer.pp_has_last_stage:
        return False
    # All ranks of a tensor-parallel group hold the same loss, so one of them counts.
    tensor_parallel = dims.get_optional_mesh("tp")
    return tensor_parallel is None or tensor_parallel.get_local_rank() == 0
