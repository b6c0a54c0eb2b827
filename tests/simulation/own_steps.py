# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's own training in the simulation, in place of torchtitan's.

The engine's strategies drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tests.simulation import training
from titan_ft.engine.feed import Reading
from titan_ft.engine.strategy import StepStrategy
from titan_ft.engine.work import Work
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.protocol.round import Update

if TYPE_CHECKING:
    from tests.simulation.rank import Rank


class OwnSteps:
    """One rank's part of `titan_ft.engine.strategy.GroupTraining`; each step is an update."""

    data_ended: type[Exception] = StopIteration  # the simulated data never ends
    gradient_scale = 1.0
    lr = 0.0
    model_parts: list[nn.Module]
    optimizers: Any
    lr_schedulers: Any

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.step = 0
        self.num_steps = rank.world.options.steps
        self.nominal_tokens = rank.nominal_tokens
        self.optimizers, self.lr_schedulers = _Optimizers(rank), _Schedulers()

    def compute(self, work: Work, slots: Sequence[int], arm: Callable[[], None]) -> Contribution:
        """Add the gradients of a step's share of each slot."""
        if not slots:
            return NOTHING
        rank = self._rank
        kernel, options = rank.world.kernel, rank.world.options
        readings: list[Reading] = []
        valid, values = 0, np.zeros(training.SIZE)
        seconds = 0.0
        for number, slot in enumerate(slots, start=1):
            self.beat()
            if number == len(slots):
                arm()
            seconds += self._spend(options.compute_seconds)
            readings.append(rank.read_batch(slot, work.count_batches(slot)))
            batch = readings[-1].entry.first_batch
            tokens = training.valid_tokens(slot, batch)
            mean = training.gradient(
                slot, batch, rank.number, rank.state.array[0], options.coupling
            )
            values += mean * tokens / self.nominal_tokens
            valid += tokens
        work.inner_steps = 1
        work.readings += readings
        self._feed_ahead(readings, values)
        between = lambda: kernel.sleep(0.2 * options.compute_seconds * kernel.rng.random())  # noqa: E731
        rank.state.add_gradient(values, between if options.overlap else lambda: None)
        return self._contribute(readings, valid, 10 * len(slots), seconds)

    def _spend(self, seconds: float) -> float:
        """Let a backward take about this time; return how long it took."""
        rank, kernel = self._rank, self._rank.world.kernel
        spent = seconds * (0.8 + 0.4 * kernel.rng.random()) + rank.slowness
        kernel.sleep(spent)
        while rank.hangs:
            kernel.block()
        return spent

    def _feed_ahead(self, readings: Sequence[Reading], values: np.ndarray) -> None:
        """Read ahead, and corrupt the gradient if the schedule gives this rank a nonfinite one."""
        rank = self._rank
        rank.feed.read_ahead(readings)
        if rank.spoiled > 0:
            rank.spoiled -= 1
            rank.world.oracle.spoiled.update(
                (reading.entry.slot, reading.entry.first_batch) for reading in readings
            )
            values[rank.spoiled % training.SIZE] = float("nan")

    def _contribute(
        self, readings: Sequence[Reading], valid: int, tokens: int, seconds: float
    ) -> Contribution:
        facts = self._rank.gather_losses([valid, tokens, 0.1, 0.1, seconds])
        return Contribution(
            valid_tokens=valid,
            tokens=tokens,
            loss=0.1,
            max_loss=0.1,
            seconds=float(facts[:, 4].max()),
            entries=tuple(reading.entry for reading in readings),
        )

    def beat(self) -> None:
        """Note that the training thread makes progress."""
        self._rank.watchdog.beat()

    def clear_gradients(self) -> None:
        self._rank.state.zero_grad()

    def clip_gradients(self) -> torch.Tensor:
        """Return a norm without clipping: the oracle expects the mean as it is."""
        return torch.zeros(())

    def refresh_converters(self) -> None:
        """Do nothing: there are no converters."""

    def await_staging(self) -> None:
        """Do nothing: a save copies the state before it goes on in the background."""

    def collect_garbage(self, step: int) -> None:
        """Do nothing: the simulation collects no garbage explicitly."""

    def pauses_after(self, step: int) -> bool:
        """Return True if the training ends, or a group may save, after `step`."""
        return step >= self.num_steps or self._rank.saves.due_at(step)

    def lacks_state(self) -> bool:
        """Return True if no checkpoint has the state after the last update."""
        return self._rank.saves.lacks_state()


class _Optimizers(list[SimpleNamespace]):
    """Stands in for torchtitan's OptimizersContainer."""

    def __init__(self, rank: Rank) -> None:
        super().__init__([SimpleNamespace(param_groups=[{"lr": 0.0}])])
        self._rank = rank

    def step(self) -> None:
        """Update the state from the gradients."""
        self._rank.state.descend(self[0].param_groups[0]["lr"])


class _Schedulers:
    """Stand-in for torchtitan's LRSchedulersContainer: the LR follows from the number of the
    update.
    """

    def step(self) -> None:
        """Do nothing: there is no counter."""


class SteadyStrategy(StepStrategy):
    """The engine's strategy of one update per step, around the simulation's own kind of state."""

    def __init__(self, rank: Rank, own: OwnSteps) -> None:
        self._rank = rank
        rank_as: Any = rank  # the rank gathers as a group does
        no_counters: Any = None  # the state has the counters
        super().__init__(
            rank.config,
            own,
            position=rank.position,
            group=rank_as,
            counters=no_counters,
            num_ranks=1,
        )

    def _build_state(self, num_ranks: int) -> Any:
        state: Any = training.State(self._rank.number, self._rank.ledger, self._rank.shapes)
        self._counters = state
        return state

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        (optimizer,) = self._training.optimizers
        optimizer.param_groups[0]["lr"] = training.learning_rate(update.step, 1.0, "none")
        return super()._apply_sums(update)
