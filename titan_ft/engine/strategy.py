# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The strategy of one update per step, and the interface to the group's own training.

A *strategy* says how a group makes an update and applies it: from one step (`StepStrategy`), or
from a round of local steps (`RoundStrategy`, for semi-synchronous methods). The trainer calls the
strategy for each update, each heal, and the end of the group.

The strategy calls the group's own training through the interface `GroupTraining` only. So the
simulation of the protocol (`tests/simulation`) runs the same strategies as a worker does.

See docs/design.md, "The rooms".
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
    """One rank's part in the training of its own group, in torchtitan or in the simulation.

    Training thread only.

    Attributes:
        step: torchtitan's number of the step under way; between two steps, that of the last step.
        data_ended: `compute` raises this error at the end of finite data.
    """

    step: int
    data_ended: type[Exception]

    @property
    def num_steps(self) -> int:
        """torchtitan's `training.steps`: the job's final step."""

    @property
    def model_parts(self) -> list[nn.Module]:
        """The modules that this rank trains."""

    @property
    def optimizers(self) -> Any:
        """torchtitan's OptimizersContainer."""

    @property
    def lr_schedulers(self) -> Any:
        """torchtitan's LRSchedulersContainer."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    @property
    def nominal_tokens(self) -> int:
        """Tokens of a step with all groups present. The losses are divided by this number."""

    @property
    def gradient_scale(self) -> float:
        """Factor from local gradients to gradients of the reported loss; 1 without a pipeline."""

    def compute(self, work: Work, slots: Sequence[int], arm: Callable[[], None]) -> Contribution:
        """Train one step's batch of each slot.

        Adds its gradients to the local ones, and records the step in `work`.

        Args:
            arm: called just before the last backward. That backward may then launch the exchange.
        """

    def beat(self) -> None:
        """Note that the training thread makes progress."""

    def clear_gradients(self) -> None:
        """Drop the local gradients."""

    def clip_gradients(self) -> torch.Tensor:
        """Clip the gradients; return their norm before clipping."""

    def refresh_converters(self) -> None:
        """Compute the values that the model's converters keep of the weights, as float8's scales.

        Call this after each change of the weights but the optimizer's own.
        """

    def await_staging(self) -> None:
        """Wait until a background save has copied the weights, which are about to change."""

    def collect_garbage(self, step: int) -> None:
        """Run Python's garbage collector after `step` if torchtitan's schedule says so."""

    def pauses_after(self, step: int) -> bool:
        """Return True if a save, a validation or the end of training follows `step`."""

    def lacks_state(self) -> bool:
        """Return True if the state after the last update must be saved, and is in no checkpoint."""


class CommitCounters(Counters, Protocol):
    """Counters that advance with each committed update: tokens and the ledger."""

    def advance(self, update: Update) -> None: ...


@dataclass(frozen=True)
class Departure:
    """How a group leaves on SIGTERM.

    Attributes:
        reason: for the event and the log.
        in_order: every trained batch is in an update. Steps that were made ahead, during the last
            update's exchange, do not count.
        void: the trained batches that are in no update; with `in_order`, those of steps made ahead.
    """

    reason: str
    in_order: bool
    void: Sequence[Reading] = ()


class StepStrategy:
    """Makes one update from each step.

    Gradients are exchanged during backward, and the optimizer applies their mean. `RoundStrategy`
    overrides the methods in which a round of local steps differs.

    The trainer calls all methods on the training thread. Only `find_uncommitted` may run on any
    thread. If `apply` fails, the process ends, because the model may have a part of the update.

    Args:
        counters: of tokens and batches. They are a part of the state that a joiner gets.
        num_ranks: number of the groups' ranks on this host, which share its memory.

    Attributes:
        state: the state that this group serves to joiners, and loads when it heals.
        outer: the outer model of a semi-synchronous method, on which the groups agree. None: the
            groups agree on the trained model.
        fragments: fragment number of each exchanged parameter; empty = each update exchanges all.
        work: this rank's work on the update under way.
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
        self._config = config
        self._training = training
        self._position = position
        self._group = group
        self._counters = counters
        self._replica: ReplicaDimension
        self._exchange: GradientExchange
        self.state = self._build_state(num_ranks)
        self.work = Work(0, lr=0.0)

    def attach(self, replica: ReplicaDimension, exchange: GradientExchange) -> None:
        """Connect this strategy to the other groups. Call this once, before training."""
        self._replica = replica
        self._exchange = exchange

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

    def adopt_checkpoint(self) -> None:
        """Go on from the weights of a checkpoint that was just loaded."""
        self._training.refresh_converters()

    def agreed_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are equal in all groups, by name."""
        parameters: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._training.model_parts):
            for name, parameter in part.named_parameters():
                parameters[f"{number}/{name}"] = parameter
        return parameters

    def agreed_optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Return the optimizers whose state is equal in all groups."""
        optimizers: Iterable[torch.optim.Optimizer] = self._training.optimizers
        return optimizers

    def lend_agreed_weights(self) -> AbstractContextManager[None]:
        """Give the model the weights on which all groups agree, inside the context.

        Saves and validations run inside it.
        """
        return contextlib.nullcontext()

    # The exchange

    def exchanged_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients are summed, in the same order in every group."""
        for part in self._training.model_parts:
            yield from part.parameters()

    @property
    def gradient_scale(self) -> float:
        """Factor by which the exchange multiplies local gradients."""
        return self._training.gradient_scale

    # Numbers

    def last_step_of(self, update: int) -> int:
        """Return torchtitan's number of the last step in an update; 0 for update 0."""
        return update

    def update_of(self, step: int) -> int:
        """Return the number of the update that has torchtitan's step `step`; 0 for step 0."""
        return step

    def pauses_after(self, update: int) -> bool:
        """Return True if this group pauses after an update, to save or to validate.

        It then requests the next quorum only after the pause, and the others wait for it at the
        lighthouse, until `join_timeout_ms`. If it requested the quorum before the pause, the others
        would wait in the exchange, which breaks after `process_group_timeout_ms`.
        """
        return self._training.pauses_after(update)

    # One update

    def start_update(self) -> Work:
        """Start the next update; return the record of this rank's work on it."""
        self.work = Work(self._training.step, lr=self._training.lr)
        return self.work

    def train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make this group's part of an update, or more of it; return the contribution.

        Args:
            slots: slots whose batches this group reads now.
            arm: called just before the last backward. That backward may then launch the exchange.
        """
        return self._training.compute(self.work, slots, arm)

    def discard(self) -> None:
        """Drop the gradients of the update under way. The batches stay in the feed."""
        self._training.clear_gradients()
        self.work.readings.clear()

    def apply(self, update: Update) -> Callable[[], float]:
        """Apply a committed update, live or replayed, and advance the counters of commits.

        Returns:
            A function that returns the norm of the mean gradient before clipping. It waits for the
            device.
        """
        self._training.beat()
        norm = self._apply_sums(update)
        self._counters.advance(update)
        return norm

    def replay(self, update: Update) -> None:
        """Apply a queued update, and wait for the device: the caller measures this call."""
        self.apply(update)
        device.synchronize([device.record_event()])

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        training, config = self._training, self._config
        update.sums.write(update.scale)
        norm = training.clip_gradients()
        training.await_staging()
        share_of_batch = len(update.slots) / config.group_size
        factor = lr_factor(config.lr_policy, share_of_batch)
        with scaled_lr(training.optimizers, factor):
            training.optimizers.step()
        training.lr_schedulers.step()
        is_replay = update.sums.is_copy
        if not is_replay:
            self.work.lr *= factor
        return device.read_later(norm)

    def meet_after_update(self) -> bool:
        """Meet the others once more after an update, if the next update is far away.

        A collective of the group.

        Returns:
            True if this group must heal first.
        """
        return False

    def resume_after_heal(self) -> bool:
        """Take up local work after a heal; return True if the group must heal again.

        A collective.
        """
        return False

    # Leaving

    def go_back_to_update(self) -> None:
        """Go back to the last update: the work on the one under way is void."""
        self._training.step = self.last_step_of(self._position.step)

    def describe_departure(self) -> Departure:
        """Return how this group leaves now."""
        return Departure("SIGTERM", in_order=True)

    def find_uncommitted(self) -> list[Reading]:
        """Return the batches of local steps that are in no update; any thread.

        There are none: another group trains the batch of an unfinished step.
        """
        return []
