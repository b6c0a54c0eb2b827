# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Semi-synchronous training in the simulation: the engine's own `RoundStrategy`, with a small
model.

In a round each group makes some steps by itself, with its own weights and moments. This module has
those steps, a check of each of them, and an oracle that recomputes the updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tests.simulation import training
from tests.simulation.oracle import Committed, Oracle
from tests.simulation.own_steps import OwnSteps
from tests.simulation.rank import Rank
from titan_ft.config import FaultTolerance
from titan_ft.engine.outer import OuterModel, OuterState
from titan_ft.engine.round_strategy import RoundStrategy
from titan_ft.engine.work import Work
from titan_ft.protocol.report import Contribution
from titan_ft.protocol.round import Update
from titan_ft.round_settings import outer_optimizer, quantizes, steps_per_round
from titan_ft.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from tests.simulation.oracle import Rules

_MOMENTUM = 0.5  # momentum of the inner optimizer
_RATE = 0.05
# A block's largest value is rounded to this multiple of its scale (titan_ft/gradients/quantize.py).
_MULTIPLES = 127


def _decay(step: int) -> float:
    """Return the LR factor after `step` steps."""
    return 1 - step / 1000


class _Optimizers(list[torch.optim.Optimizer]):
    """Stands in for torchtitan's OptimizersContainer."""

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()


class _Schedulers:
    """Stands in for torchtitan's LRSchedulersContainer, around torch's own scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)]

    def step(self) -> None:
        """Advance to the LR of the next step."""
        self.schedulers[0].step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedulers[0].load_state_dict(dict(state_dict))


class RoundSteps(OwnSteps):
    """One rank's part in the group's own training."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.num_steps = rank.world.options.steps_of(rank.world.options.steps)
        parts = torch.from_numpy(training.initial(rank.number)[0].copy()).split(rank.shapes)
        self.model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        self.model_parts = [self.model]
        inner = torch.optim.SGD(
            self.model.parameters(), lr=_RATE, momentum=_MOMENTUM, foreach=False
        )
        self.optimizers, self.lr_schedulers = _Optimizers([inner]), _Schedulers(inner)
        self.expected = self.weights  # the weights with which the next step must begin
        # The moments after the last step; None = no step since the last heal.
        self.left: np.ndarray | None = None

    @property
    def lr(self) -> float:  # type: ignore[override]
        """The LR of the next step."""
        return float(self.lr_schedulers.schedulers[0].get_last_lr()[0])

    @property
    def weights(self) -> np.ndarray:
        """A copy of this group's own weights."""
        return _flat(self.model)

    @property
    def moments(self) -> np.ndarray:
        """A copy of the inner optimizer's moments."""
        states = (
            self.optimizers[0].state.get(parameter, {}).get("momentum_buffer")
            for parameter in self.model
        )
        return _flat(
            torch.zeros_like(own) if state is None else state
            for state, own in zip(states, self.model, strict=True)
        )

    def compute(self, work: Work, slots: Sequence[int], arm: Callable[[], None]) -> Contribution:
        """Make the gradient of one batch."""
        (slot,), rank = slots, self._rank
        options = rank.world.options
        self.beat()
        self._check_begin()
        spent = self._spend(options.seconds_of(slot))
        reading = rank.read_batch(slot, work.count_batches(slot))
        work.inner_steps = 1
        work.readings = [*work.readings, reading]
        batch = reading.entry.first_batch
        tokens = training.valid_tokens(slot, batch)
        values = training.gradient(slot, batch, rank.number, self.weights, options.coupling)
        self._feed_ahead([reading], values)
        grads = torch.from_numpy((values * tokens / self.nominal_tokens).astype(np.float32)).split(
            rank.shapes
        )
        for parameter, grad in zip(self.model, grads, strict=True):
            parameter.grad = grad.clone()
        return self._contribute([reading], tokens, 10, spent)

    def _check_begin(self) -> None:
        """Check the bytes with which a step begins.

        They are those of the last step, of the update after it, or of a load.
        """
        state, world = self._rank.state, self._rank.world
        if state.tainted:
            return
        name = f"{self._rank.process.name} makes a step behind update {state.held[0]}"
        if not np.array_equal(self.expected, self.weights, equal_nan=True):
            world.report("one trajectory", f"{name} with other weights than it should have")
        if self.left is not None and not np.array_equal(self.left, self.moments, equal_nan=True):
            world.report(
                "one trajectory", f"{name} with other moments than it has ended the last one with"
            )

    def clear_gradients(self) -> None:
        self.optimizers.zero_grad()


class State(OuterState):
    """The state of one rank.

    It has the parts of `training.State` that the world and the oracle use.
    """

    def __init__(
        self, rank: Rank, own: RoundSteps, outer: OuterModel, on_load: Callable[[], None]
    ) -> None:
        self.rank, self.ledger = rank.number, rank.ledger
        self.progress = training.Progress()
        self.held = (0, 0)
        self.tainted = self.inherited = self.shown = False
        self.outer, self._own = outer, own
        super().__init__(
            own.model_parts, own.optimizers, own.lr_schedulers, self, outer=outer, on_load=on_load
        )
        self.parameters = outer.anchors
        self.fragments = outer.fragments

    # The counters, as those of `titan_ft.engine.strategy.CommitCounters`

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the simulation's own knowledge of the bytes."""
        return {**vars(self.progress), "ledger": self.ledger.state_dict(), "tainted": self.tainted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from another group's counters."""
        self.progress = training.Progress(state_dict["steps"], state_dict["tokens"])
        self.ledger.load_state_dict(state_dict["ledger"])
        self.tainted = self.inherited = state_dict["tainted"]

    def advance(self, update: Update) -> None:
        """Count an update."""
        self.progress.steps += 1
        self.progress.tokens += update.tokens
        self.ledger.advance(update.entries, update.readers)

    def load(self, snapshot: Snapshot) -> None:
        """Replace this state by a fetched one."""
        super().load(snapshot)
        self.held = (snapshot.step, snapshot.lineage)

    def digest(self) -> str:
        """Hash the bytes for a comparison with other groups."""
        self.shown = self.tainted
        return self.peek()

    def peek(self) -> str:
        """Return the same digest for the world. No group sees it."""
        return super().digest()

    @property
    def array(self) -> np.ndarray:
        """A copy of anchors and outer momentum: float32 [2, SIZE]."""
        if not self.outer.has_state:
            return np.stack([_flat(self.outer.anchors), np.zeros(training.SIZE, np.float32)])
        return np.stack(
            [_flat(self.outer.anchors), _flat(map(self.outer.momentum, self.outer.anchors))]
        )

    def flip(self, momentum: bool, place: int, bit: int) -> None:
        """Flip a bit of the anchors, or of the outer momentum if there is one."""
        flips_momentum = momentum and self.outer.has_state
        for anchor in self.outer.anchors:
            tensor = self.outer.momentum(anchor) if flips_momentum else anchor
            if place < tensor.numel():
                tensor.detach().numpy().view("uint32")[place] ^= 1 << bit
                return
            place -= tensor.numel()

    def zero_grad(self) -> None:
        self._own.clear_gradients()

    def forget_hooks(self) -> None:
        """Do nothing: no gradient travels during a backward, so there are no hooks."""


def _flat(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.detach().numpy() for tensor in tensors]).copy()


class _WatchedRounds(RoundStrategy):
    """The engine's strategy.

    The world records the weights after each step, and the weights that the group gives.
    """

    def __init__(self, rank: RoundRank, own: RoundSteps) -> None:
        self._rank, self._own = rank, own
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

    def _build_state(self, num_ranks: int) -> OuterState:
        super()._build_state(num_ranks)  # checks the model, and builds the outer one
        self._counters = state = State(self._rank, self._own, self.outer, self._adopt_state)
        return state

    def _forget_work(self) -> None:
        super()._forget_work()
        self._own.expected = _flat(self.outer.anchors)

    def _make_step(self, step: int, slots: Sequence[int]) -> None:
        super()._make_step(step, slots)
        self._own.expected, self._own.left = self._own.weights, self._own.moments

    def _give_changes(self, update: int) -> None:
        super()._give_changes(update)
        oracle = self._rank.world.oracle
        assert isinstance(oracle, RoundOracle)
        oracle.gives(
            self._rank, self._own.weights, self._given_tokens, late=not self.work.inner_steps
        )

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        """Apply the update, and compute the weights with which the next step must begin."""
        is_last = update.step >= self._rank.world.options.steps
        number = len(self._trained_tokens)
        exchanged = range(number) if is_last else [(update.step - 1) % number]
        alpha = (
            self._config.fragment_update_alpha
            if any(self._given_tokens.values()) and not is_last
            else 0.0
        )
        norm = super()._apply_sums(update)
        owns = torch.from_numpy(self._own.expected).split(self._rank.shapes)
        parts = zip(owns, self.outer.anchors, self.fragments, strict=True)
        self._own.expected = _flat(
            (torch.lerp(anchor, own, alpha) if alpha else anchor) if fragment in exchanged else own
            for own, anchor, fragment in parts
        )
        return norm


class RoundRank(Rank):
    """One rank of a group that trains rounds."""

    own: RoundSteps
    strategy: _WatchedRounds

    def _make_own(self) -> RoundSteps:
        return RoundSteps(self)

    def _make_strategy(self) -> _WatchedRounds:
        return _WatchedRounds(self, self.own)

    def _go_on(self) -> None:
        self._read.clear()
        super()._go_on()

    def _heal_once(self, computed: bool) -> None:
        trained, ahead = {batch for slot, batch in self._read if slot == self.slot}, self.ahead
        self.own.left, before, strategy = None, self.held[1], self.strategy
        # Steps of the next round, made during the exchange, stand on weights that the group no
        # longer has.
        void = strategy._work_ahead.inner_steps if strategy._work_ahead is not None else 0
        super()._heal_once(computed)
        work = strategy._uncommitted_work
        # The group has gone back to its own state, and gives the same changes again.
        if work is not None and strategy._work_ahead is None:
            if work.inner_steps:
                self.world.say(self.process.name, f"keeps {work.inner_steps} steps of its round")
            return
        lost = sum(batch >= self.ledger.count_committed(self.slot) for batch in trained) - void
        if lost > 0:
            self.world.lost_steps(self, lost, ahead, before)


# The oracle


@dataclass
class _Part:
    """A rank's part of an update: its weights, and the tokens that count, by fragment.

    A late rank has made no step of the round. Only the sums show whether they include its change.
    """

    weights: np.ndarray
    tokens: dict[int, int]
    tainted: bool
    late: bool


class RoundOracle(Oracle):
    """Recomputes the outer update from each group's weights.

    Each rank checks by itself that its steps continue from the right weights
    (`RoundSteps._check_begin`).
    """

    def __init__(
        self,
        rules: Rules,
        report: Callable[[str, str], None],
        config: FaultTolerance,
        steps_of: Callable[[int], int],
    ) -> None:
        super().__init__(rules, report)
        self._outer, self._length, self._steps_of = (
            outer_optimizer(config),
            steps_per_round(config),
            steps_of,
        )
        self._compares = config.digest_every > 0
        self._rounds_of_a_change = max(config.num_fragments, 1) + bool(config.fragment_sync_delay)
        # For each lineage and rank, the parts of each slot.
        self._parts: dict[tuple[int, int], dict[int, list[_Part]]] = {}
        self._fragments: list[int] = []
        self._quantizes = quantizes(config)
        self._coarsest: dict[int, float] = {}
        """By rank: what rounding to 8 bits may leave of a value that a group gives, or has left of
        the one before, in tokens."""

    def gives(self, rank: RoundRank, weights: np.ndarray, sent: dict[int, int], late: bool) -> None:
        """Record a rank's weights, and the tokens that count, by fragment."""
        state, number = rank.state, rank.number
        self._fragments = np.repeat(state.fragments, rank.shapes).tolist()
        parts = self._parts.setdefault((state.held[1], number), {}).setdefault(rank.slot, [])
        # Rounding may have dropped a flipped bit.
        corrupt = self.is_corrupt(number, state, otherwise=True)
        parts.append(_Part(weights, dict(sent), corrupt, late))
        if self._quantizes:
            largest = np.abs(state.array[0] - weights).max() * max(sent.values())
            self._coarsest[number] = np.fmax(
                self._coarsest.get(number, 0.0), 1.01 * largest / _MULTIPLES
            )

    def _spoiled_in(self, lineage: int, updates: int = 0) -> set[int]:
        # A fragment's change covers all rounds since its last exchange. It has the data of the
        # participants only, because no group trains another group's slot.
        spoiled = super()._spoiled_in(lineage, updates or self._rounds_of_a_change)
        return spoiled.intersection(self.chain[lineage].participants or spoiled)

    def _expect(
        self, update: Committed, base: np.ndarray, rank: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the states that the update may make of `base`.

        There are several if a group may have given more than once.
        """
        first = self._steps_of(update.step - 1)
        given = self._parts.get((update.parent, rank), {})
        trained = {slot: count for slot, _, count in update.batches}
        if not given.keys() >= trained.keys():
            self._report(
                "exact average",
                f"step {update.step} has batches of groups that did not begin its round",
            )
            return
        if not self._compares and any(part.tainted for parts in given.values() for part in parts):
            return  # the change is wrong, and nobody can know
        sound = {
            slot: [part for part in parts if not part.tainted] for slot, parts in given.items()
        }
        # Otherwise the flipped bit was found, and the group has healed and trained the round again.
        if not all(sound[slot] for slot in trained):
            self._report(
                "one trajectory",
                f"step {update.step} has a change from an anchor in which a bit flipped",
            )
            return
        for slot, count in trained.items():
            if count > self._steps_of(update.step) - first:
                self._report("counters", f"step {update.step} has {count} steps of group {slot}")
        choices: list[list[_Part | None]] = [
            [part for part in parts if not part.late]
            if slot in trained
            else [None, *(p for p in parts if p.late)]
            for slot, parts in sound.items()
        ]
        for chosen in itertools.product(*choices):
            parts = [part for part in chosen if part is not None]
            total, sizes, weight = np.zeros((3, training.SIZE))
            for part in parts:
                tokens = np.array([part.tokens.get(fragment, 0) for fragment in self._fragments])
                given = tokens * (base[0].astype(np.float64) - part.weights)
                total, sizes, weight = total + given, sizes + np.abs(given), weight + tokens
            off = (
                len(parts) * self._coarsest.get(rank, 0.0)
                if self._quantizes
                else self._rules.rounding * sizes
            )
            mean, slack = total / np.maximum(weight, 1), off / np.maximum(weight, 1)
            state = self._update(base.astype(np.float64), mean, weight > 0)
            yield state, self._update(np.zeros_like(base), slack, weight > 0) * [[-1], [1]]

    def _update(self, base: np.ndarray, mean: np.ndarray, exchanged: np.ndarray) -> np.ndarray:
        outer = self._outer
        momentum = outer.momentum * base[1] + mean
        step = mean + outer.momentum * momentum if outer.nesterov else momentum
        after = np.stack(
            [base[0] - outer.lr * step, momentum if outer.momentum else np.zeros_like(mean)]
        )
        return np.where(exchanged, after, base)
