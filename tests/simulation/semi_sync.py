# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Semi-synchronous training in the simulation: what `titan_ft.semi_sync.SemiSyncTrainer` does, around the engine.

A round has some steps of each group by itself, with weights and moments of its own. What the groups agree on, the
anchors and the outer optimizer, is the engine's own `OuterModel`, and what heals its `OuterState`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tests.simulation import training
from tests.simulation.oracle import Committed, Oracle
from tests.simulation.rank import Rank
from titan_ft.config import FaultTolerance, OuterOptimizer, outer_optimizer, steps_per_round
from titan_ft.replica.decision import Update
from titan_ft.replica.errors import Leaving
from titan_ft.replica.ledger import Entry, Ledger
from titan_ft.replica.outer import OuterModel, OuterState, join_norm, set_lr
from titan_ft.replica.round import NOTHING, Contribution
from titan_ft.replica.snapshot import Snapshot
from titan_ft.replica.step import Opening

if TYPE_CHECKING:
    from tests.simulation.oracle import Rules

_MOMENTUM = 0.5  # of the inner optimizer
_RATE = 0.05


def _decay(step: int) -> float:
    """Return what the LR is multiplied with behind `step` steps."""
    return 1 - step / 1000


class _Schedulers:
    """Stands in for torchtitan's LRSchedulersContainer, around torch's own scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)]

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedulers[0].load_state_dict(dict(state_dict))


class State(OuterState):
    """The state of one rank, with what `training.State` has for the world and the oracle."""

    def __init__(self, rank: int, ledger: Ledger, shapes: tuple[int, ...], settings: OuterOptimizer) -> None:
        self.rank, self.ledger, self._shapes = rank, ledger, shapes
        self.progress = training.Progress()
        self.held = (0, 0)
        self.tainted = self.inherited = self.shown = False
        parts = torch.from_numpy(training.initial(rank)[0].copy()).split(shapes)
        self.model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        self.inner = torch.optim.SGD(self.model.parameters(), lr=_RATE, momentum=_MOMENTUM, foreach=False)
        self.schedulers = _Schedulers(self.inner)
        self.outer = OuterModel([self.model], settings)
        super().__init__(
            [self.model], [self.inner], self.schedulers, self, outer=self.outer, on_load=self.outer.restore_model
        )
        self.parameters = self.outer.anchors

    # The counters, as `titan_ft.trainer.Counters`

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted now, and what the simulation knows of the bytes."""
        return {**vars(self.progress), "ledger": self.ledger.state_dict(), "tainted": self.tainted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what another group has counted."""
        self.progress = training.Progress(state_dict["steps"], state_dict["tokens"])
        self.ledger.load_state_dict(state_dict["ledger"])
        self.tainted = self.inherited = state_dict["tainted"]

    def load(self, snapshot: Snapshot) -> None:
        """Overwrite it."""
        super().load(snapshot)
        self.held = (snapshot.step, snapshot.lineage)

    def digest(self) -> str:
        """Hash the bytes, to be shown to others."""
        self.shown = self.tainted
        return self.peek()

    def peek(self) -> str:
        """Return the same digest to the world, which shows it to nobody."""
        return super().digest()

    @property
    def array(self) -> np.ndarray:
        """Return a copy of anchors and outer momentum: float32 [2, SIZE]."""
        return np.stack([_flat(self.outer.anchors), _flat(map(self.outer._momentum, self.outer.anchors))])

    @property
    def weights(self) -> np.ndarray:
        """Return a copy of this group's own weights."""
        return _flat(self.model)

    @property
    def moments(self) -> np.ndarray:
        """Return a copy of those of the inner optimizer."""
        states = (self.inner.state.get(parameter, {}).get("momentum_buffer") for parameter in self.model)
        return _flat(
            torch.zeros_like(own) if state is None else state for state, own in zip(states, self.model, strict=True)
        )

    def flip(self, momentum: bool, place: int, bit: int) -> None:
        """Flip a bit of the anchors, or of the outer momentum if there is one."""
        tensors = [self.outer.optimizer.state[anchor].get("momentum_buffer") for anchor in self.outer.anchors]
        if not momentum or any(tensor is None for tensor in tensors):
            tensors = list(self.outer.anchors)
        for tensor in tensors:
            if place < tensor.numel():
                tensor.detach().numpy().view("uint32")[place] ^= 1 << bit
                return
            place -= tensor.numel()

    @torch.no_grad()
    def make_step(self, values: np.ndarray) -> None:
        """Make one step of the inner optimizer with these gradients."""
        for parameter, grad in zip(
            self.model, torch.from_numpy(values.astype(np.float32)).split(self._shapes), strict=True
        ):
            parameter.grad = grad.clone()
        self.inner.step()
        self.schedulers.schedulers[0].step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.inner.zero_grad()

    def forget_hooks(self) -> None:
        """There are none: nothing is sent while a backward goes on."""


def _flat(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.detach().numpy() for tensor in tensors]).copy()


class RoundRank(Rank):
    """One rank of a group that trains rounds."""

    state: Any  # a State: the engine's own kind

    def _make_state(self) -> Any:
        self._late = False  # whether the others wait at the end of a round that this group has not begun
        self._left = False  # whether it left in the midst of a round
        self._moments: np.ndarray | None = None  # those that it has ended its last round with
        return State(self.number, self.ledger, self.shapes, outer_optimizer(self.config))

    def _pauses_after(self, step: int) -> bool:
        return True

    def _steps_of(self, updates: int) -> int:
        return self.world.options.steps_of(updates)

    @property
    def _is_over(self) -> bool:
        return self._steps_of(self.position.step) >= self._steps_of(self.world.options.steps)

    def _backward(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make the steps of a round, as `SemiSyncTrainer._train`."""
        if self._late:
            self._late = False
            return Contribution(early=True)
        kernel, dimension, oracle = self.world.kernel, self.dimension, self.world.oracle
        began, early = kernel.now, dimension.early
        first, last = self._steps_of(self.position.step) + 1, self._steps_of(self.position.step + 1)
        assert isinstance(oracle, RoundOracle)
        if not self._num_steps:
            set_lr(self.state.schedulers, first - 1)
            oracle.began(self.slot, self.number, self.state, self._moments)
        for step in range(first + self._num_steps, last + 1):
            if early and dimension.awaited():
                break
            if self._num_steps:
                self._leave_if_told(began, self._num_steps, last + 1 - step)
            if step == last and not early:
                arm()
            self._made = self._made.plus(self._make_step(slots[0], self._num_steps))
            self._num_steps += 1
        self._moments = self.state.moments
        self.state.outer.take_changes(self._made.valid_tokens / self.nominal_tokens)
        oracle.ended(self.slot, self.number, self.state)
        made = replace(self._made, early=first + self._num_steps <= last)
        if not self._num_steps:
            return made
        entry = made.entries[0]
        whole = Entry(entry.slot, entry.first_batch, self._num_steps, _loader(entry, self._num_steps))
        return replace(made, entries=(whole,))

    def _step(self) -> None:
        self._num_steps, self._made = 0, NOTHING
        super()._step()

    def _make_step(self, slot: int, behind: int) -> Contribution:
        kernel, options = self.world.kernel, self.world.options
        self._watchdog.beat()
        spent = options.seconds_of(slot) * (0.8 + 0.4 * kernel.rng.random()) + self.slowness
        kernel.sleep(spent)
        while self.hangs:
            kernel.block()
        batch = self.ledger.end(slot) + behind
        if (slot, batch) in self._read:
            self.world.report("no work lost", f"{self.process.name} computes batch {batch} of slot {slot} twice")
        self._read.add((slot, batch))
        values = training.gradient(slot, batch, self.number, self.state.weights, options.coupling)
        if self.spoiled > 0:
            self.spoiled -= 1
            self.world.oracle.spoiled.add((slot, batch))
            values[self.spoiled % training.SIZE] = float("nan")
        self.state.make_step(values)
        tokens = training.valid_tokens(slot, batch)
        facts = self._group.gather_losses([tokens, 10, 0.1, 0.1, spent])
        seconds = float(facts[:, 4].max())
        return Contribution(tokens, 10, 0.1, 0.1, seconds, (Entry(slot, batch, 1, b""),))

    def _apply(self, update: Update) -> None:
        """Apply a round's update, live or replayed, as `SemiSyncTrainer._apply`."""
        world, state = self.world, self.state
        self._know(update, self.held[1], None)
        self._watchdog.beat()
        world.kernel.sleep(world.options.apply_seconds)
        self._exchange.write_gradients(update.gradients, update.scale)
        if update.step != state.progress.steps + 1:
            world.report("counters", f"{self.process.name} applies update {update.step} to a state of {self.held[0]}")
        squares = state.outer.step()
        set_lr(state.schedulers, self._steps_of(update.step))
        state.progress.steps += 1
        state.progress.tokens += update.tokens
        self.ledger.advance(update.entries, update.readers)
        join_norm([float(value) for value in self._group.gather(int(np.float64(squares).view(np.int64)))])
        self._hold(update.step, update.lineage)
        world.oracle.applied(self.slot, self.number, update.lineage, state)

    def _go_on(self) -> None:
        self._read.clear()
        if self._is_over:
            return
        if self.position.exclusions:
            self._heal(computed=False)
        else:
            self._open()

    def _open(self) -> None:
        match self.dimension.open():
            case Opening.HEAL:
                self._heal(computed=False)
            case Opening.EXCHANGE:
                self._late = True

    def _heal(self, computed: bool) -> None:
        trained, ahead = {batch for slot, batch in self._read if slot == self.slot}, self.ahead
        self._moments = None
        super()._heal(computed)
        lost = sum(batch >= self.ledger.end(self.slot) for batch in trained)
        if lost:
            self.world.lost_steps(self, lost, ahead)
        if self.dimension.opens and not self._is_over:
            self._open()

    def _leave_if_told(self, began: float, num_steps: int, remaining: int) -> None:
        """Leave at once if the round would take too long, as `SemiSyncTrainer._leave_if_told`."""
        assert self.drain is not None
        if not any(self._group.gather(self.drain.requested)):
            return
        needed = (self.world.kernel.now - began) / num_steps * remaining
        if any(self._group.gather(needed > self.config.drain_timeout_seconds / 2)):
            self.position.leave()
            raise Leaving


def _loader(entry: Entry, num_steps: int) -> bytes:
    return f"{entry.slot}:{entry.first_batch + num_steps}".encode()


# The oracle


@dataclass
class _Part:
    """A rank's part of a round: the moments that it began with, and whether bytes of it were changed from outside."""

    moments: np.ndarray
    tainted: bool


class RoundOracle(Oracle):
    """Recomputes rounds: what each group's steps make of the anchors that it began with, and the outer update."""

    def __init__(
        self, rules: Rules, report: Callable[[str, str], None], config: FaultTolerance, steps_of: Callable[[int], int]
    ) -> None:
        super().__init__(rules, report)
        self._outer, self._length, self._steps_of = outer_optimizer(config), steps_per_round(config), steps_of
        self._compares = config.digest_every > 0
        self._parts: dict[tuple[int, int, int], list[_Part]] = {}  # by lineage, slot and rank

    def began(self, slot: int, rank: int, state: State, moments: np.ndarray | None) -> None:
        """Check what a rank begins a round with; `moments` are those it must have, None = a donor's or none."""
        name = f"g{slot} r{rank} begins a round behind step {state.held[0]}"
        found = state.array
        if not np.array_equal(found[0], state.weights, equal_nan=True) and not state.tainted:
            self._report("one trajectory", f"{name} with other weights than the anchors")
        if moments is not None and not np.array_equal(moments, state.moments, equal_nan=True):
            self._report("one trajectory", f"{name} with other moments than it ended the last one with")
        parts = self._parts.setdefault((state.held[1], slot, rank), [])
        parts.append(_Part(state.moments, state.tainted))

    def ended(self, slot: int, rank: int, state: State) -> None:
        """Take note that a rank's change is made."""
        self._parts[state.held[1], slot, rank][-1].tainted |= state.tainted

    def _expect(self, update: Committed, base: np.ndarray, rank: int) -> Iterator[np.ndarray]:
        """Yield the states that the update may make of `base`: a group that began anew may have had other moments."""
        first = self._steps_of(update.step - 1)
        parts = [self._parts.get((update.parent, slot, rank), []) for slot, _, _ in update.batches]
        if not all(parts):
            self._report("exact average", f"step {update.step} has batches of groups that did not begin its round")
            return
        sound = [[part for part in found if not part.tainted] for found in parts]
        if not self._compares and any(part.tainted for found in parts for part in found):
            return  # its change is wrong, and nobody can tell
        if not all(sound):  # else it was found, has healed and trained the same round again
            self._report("one trajectory", f"step {update.step} has a change from an anchor in which a bit flipped")
            return
        for (_, start, count), _ in zip(update.batches, parts, strict=True):
            if count > self._steps_of(update.step) - first:
                self._report("counters", f"step {update.step} has a group's {count} steps from batch {start}")
        for chosen in itertools.product(*sound):
            total, weight = np.zeros(training.SIZE), 0
            for (slot, start, count), part in zip(update.batches, chosen, strict=True):
                weights, moments = base[0].astype(np.float64), part.moments.astype(np.float64)
                tokens = 0
                for number, batch in enumerate(range(start, start + count)):
                    mean = training.gradient(slot, batch, rank, weights, self._rules.coupling)
                    moments = _MOMENTUM * moments + mean
                    weights = weights - _RATE * _decay(first + number) * moments
                    tokens += training.valid_tokens(slot, batch)
                total += tokens * (base[0] - weights)
                weight += tokens
            yield self._update(base.astype(np.float64), total / max(weight, 1))

    def _update(self, base: np.ndarray, mean: np.ndarray) -> np.ndarray:
        outer = self._outer
        momentum = outer.momentum * base[1] + mean
        step = mean + outer.momentum * momentum if outer.nesterov else momentum
        return np.stack([base[0] - outer.lr * step, momentum if outer.momentum else np.zeros_like(mean)])
