# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The interface of a strategy, which makes updates with the other groups, and the strategy of one update per step.

The trainer drives a strategy through an update, a heal and a drain. The strategy drives the group's own training, and
knows it by the interface `GroupTraining` only. So the simulation runs the same strategies as a worker does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from titan_ft import device
from titan_ft.config import FaultTolerance
from titan_ft.engine.feed import Reading
from titan_ft.engine.outer import OuterModel
from titan_ft.engine.step import ReplicaDimension
from titan_ft.engine.work import Work
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.lr_policy import lr_factor, scaled_lr
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import Contribution
from titan_ft.protocol.round import Update
from titan_ft.transfer.snapshot import Counters, TrainState


class GroupTraining(Protocol):
    """One rank's part in the training of its own group: torchtitan's, or that of the simulation.

    Attributes:
        step: torchtitan's number of the step under way; between two steps, the number of the one just made.
        data_ended: raised by `compute` if the data is finite and at its end.
    """

    step: int
    data_ended: type[Exception]

    @property
    def num_steps(self) -> int:
        """Return torchtitan's `training.steps`: the job's final step."""

    @property
    def model_parts(self) -> list[nn.Module]:
        """Return the modules that this rank trains."""

    @property
    def optimizers(self) -> Any:
        """Return the optimizers, as torchtitan's OptimizersContainer."""

    @property
    def lr_schedulers(self) -> Any:
        """Return their schedulers, as torchtitan's LRSchedulersContainer."""

    @property
    def lr(self) -> float:
        """Return the LR of the next step."""

    @property
    def nominal_tokens(self) -> int:
        """Return the tokens of a step with all groups present: the losses are divided by them."""

    @property
    def gradient_scale(self) -> float:
        """Return the factor from local gradients to gradients of the reported loss; 1 without a pipeline."""

    def compute(self, work: Work, slots: Sequence[int], arm: Callable[[], None]) -> Contribution:
        """Read one step's batch for each slot, add its gradients to the local ones, and record it in `work`.

        Args:
            arm: called just before the last backward, which may then launch the exchange.
        """

    def beat(self) -> None:
        """Note that the training thread makes progress."""

    def clear_gradients(self) -> None:
        """Begin a gradient anew."""

    def clip_gradients(self) -> torch.Tensor:
        """Clip the gradients; returns their norm before that."""

    def refresh_converters(self) -> None:
        """Let the model's converters compute anew what they keep of the weights."""

    def await_staging(self) -> None:
        """Wait until a save in the background has copied the weights, which are about to change."""

    def collect_garbage(self, step: int) -> None:
        """Run Python's garbage collector after `step` if torchtitan's schedule says so."""

    def pauses_after(self, step: int) -> bool:
        """Say whether a save, a validation or the end of training follows `step`."""

    def lacks_state(self) -> bool:
        """Say whether the state after the last update is in no checkpoint, and is to be saved."""


class CommitCounters(Counters, Protocol):
    """Counts that advance with each committed update: tokens and the ledger."""

    def advance(self, update: Update) -> None: ...


@dataclass(frozen=True)
class Departure:
    """How a group leaves on SIGTERM.

    Attributes:
        in_order: every trained batch is in an update, except those of steps made ahead of the last update's exchange.
        void: the batches that are in no update; there may be some even if `in_order`.
    """

    reason: str
    in_order: bool
    void: Sequence[Reading] = ()


class StepStrategy:
    """Each step is an update: gradients leave during backward, and the optimizer applies their mean.

    `RoundStrategy` overrides the methods in which a round differs.

    Args:
        counters: of tokens, and the ledger (the batches of each update); part of the state that heals.
        num_ranks: of the groups' ranks on this host, which share its memory.

    Attributes:
        state: this group gives it to groups that heal, and loads it when it heals.
        outer: the outer model of a semi-synchronous method, on which the groups agree; None here: they agree on the
            trained model.
        fragments: for each exchanged parameter the number of its fragment; empty = all are exchanged in each update.
        work: on the update under way.
    """

    outer: OuterModel | None = None
    fragments: Sequence[int] = ()

    def __init__(
        self,
        config: FaultTolerance,
        training: GroupTraining,
        *,
        position: Position,
        group: GroupCollectives,
        counters: CommitCounters,
        num_ranks: int,
    ) -> None:
        self._config, self._training, self._position, self._group = config, training, position, group
        self._counters = counters
        self._replica: ReplicaDimension
        self._exchange: GradientExchange
        self.state = self._build_state(num_ranks)
        self.work = Work(0, lr=0.0)

    def attach(self, replica: ReplicaDimension, exchange: GradientExchange) -> None:
        """Train with these other groups from now on."""
        self._replica, self._exchange = replica, exchange

    # The groups' common state

    def _build_state(self, num_ranks: int) -> TrainState:
        training = self._training
        return TrainState(
            training.model_parts,
            training.optimizers,
            training.lr_schedulers,
            self._counters,
            on_load=training.refresh_converters,
            num_ranks=num_ranks,
        )

    def take_checkpoint(self) -> None:
        """Go on from the weights that a checkpoint had."""
        self._training.refresh_converters()

    def agreed_parameters(self) -> dict[str, torch.Tensor]:
        """Return by name the parameters that all groups have alike."""
        parts = enumerate(self._training.model_parts)
        return {f"{number}/{name}": parameter for number, part in parts for name, parameter in part.named_parameters()}

    def agreed_optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Return the optimizers whose state all groups have alike."""
        optimizers: Iterable[torch.optim.Optimizer] = self._training.optimizers
        return optimizers

    def lent(self) -> AbstractContextManager[None]:
        """Give the model the weights on which all groups agree, inside the context: to save or validate them."""
        return contextlib.nullcontext()

    # The exchange

    def exchanged(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients the exchange sums, in the same order in every group."""
        for part in self._training.model_parts:
            yield from part.parameters()

    @property
    def gradient_scale(self) -> float:
        """Return the factor that the exchange multiplies local gradients with."""
        return self._training.gradient_scale

    # Numbers

    def steps_of(self, updates: int) -> int:
        """Return torchtitan's step after so many committed updates."""
        return updates

    def updates_of(self, step: int) -> int:
        """Return the number of the update that torchtitan's step `step` is part of."""
        return step

    def pauses_after(self, update: int) -> bool:
        """Say whether no quorum is to be asked for right after an update.

        If a group asked for its quorum before such a pause, the others would wait for it in the exchange, until
        `process_group_timeout_ms`. Otherwise they wait at the lighthouse, until `join_timeout_ms`.
        """
        return self._training.pauses_after(update)

    # One update

    def begin_work(self) -> Work:
        """Begin the next update; returns the record of this rank's work on it."""
        self.work = Work(self._training.step, lr=self._training.lr)
        return self.work

    def train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make this group's part of an update, or go on with it; returns the contribution to the exchange.

        Args:
            slots: whose batches this group reads now.
            arm: called just before the last backward, which may then launch the exchange.
        """
        return self._training.compute(self.work, slots, arm)

    def discard(self) -> None:
        """Drop the gradients of the update under way; the batches stay in the feed."""
        self._training.clear_gradients()
        self.work.readings.clear()

    def apply(self, update: Update) -> Callable[[], float]:
        """Apply a committed update, live or replayed, and advance what counts commits.

        Returns:
            A function that returns the norm of the mean gradient before clipping; it waits for the device.
        """
        self._training.beat()
        norm = self._apply_sums(update)
        self._counters.advance(update)
        return norm

    def replay(self, update: Update) -> None:
        """Apply a queued update, and wait until the device is done: the caller times this call."""
        self.apply(update)
        device.synchronize([device.record_event()])

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        training, config = self._training, self._config
        update.sums.write(update.scale)
        norm = training.clip_gradients()
        training.await_staging()
        factor = lr_factor(config.lr_policy, len(update.slots) / config.group_size)
        with scaled_lr(training.optimizers, factor):
            training.optimizers.step()
        training.lr_schedulers.step()
        if not update.sums.is_kept:
            self.work.lr *= factor
        return device.read_later(norm)

    def meet_after_update(self) -> bool:
        """Meet the others once more after an update where the next one is far away, as between two rounds.

        Returns whether this group must heal first.

        A collective of the group.
        """
        return False

    def resume_after_heal(self) -> bool:
        """Take up this group's own work after a heal; returns whether it must heal once more. A collective."""
        return False

    # Leaving

    def go_back_to_update(self) -> None:
        """Let model and step be those of the last update again: the work on the one under way came to nothing."""
        self._training.step = self.steps_of(self._position.step)

    def describe_departure(self) -> Departure:
        """Return how this group leaves now."""
        return Departure("SIGTERM", in_order=True)

    def find_uncommitted(self) -> list[Reading]:
        """Return the batches that this rank has read and that are in no update; any thread.

        There are none here: another group reads the batch of an unfinished step.
        """
        return []
