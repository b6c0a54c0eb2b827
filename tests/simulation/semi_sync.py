# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Semi-synchronous training in the simulation: what `titan_ft.semi_sync.SemiSyncTrainer` does, around the engine.

A round has some steps of each group by itself, with weights and moments of its own. What the groups agree on, the
anchors and the outer optimizer, is the engine's own `OuterModel`, and what heals its `OuterState`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tests.simulation import training
from tests.simulation.oracle import Committed, Oracle
from tests.simulation.rank import Rank
from titan_ft.config import FaultTolerance
from titan_ft.engine.drain import OWN_SHARE, WAITING_SHARE
from titan_ft.engine.feed import Reading, merge
from titan_ft.engine.outer import OuterModel, OuterState, join_norm, set_lr
from titan_ft.engine.round import Sign
from titan_ft.engine.step import Opening
from titan_ft.protocol.decision import Update
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.round_settings import num_fragments, outer_optimizer, quantizes, steps_per_round
from titan_ft.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from tests.simulation.oracle import Rules

_MOMENTUM = 0.5  # of the inner optimizer
_RATE = 0.05
_MULTIPLES = 127  # of a block's scale, which its largest value is rounded to (titan_ft/gradients/quantize.py)


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

    def __init__(
        self,
        rank: int,
        ledger: Ledger,
        shapes: tuple[int, ...],
        config: FaultTolerance,
        gather: Callable[[int], list[int]],
    ) -> None:
        self.rank, self.ledger, self._shapes, self.gather = rank, ledger, shapes, gather
        self.progress = training.Progress()
        self.held = (0, 0)
        self.tainted = self.inherited = self.shown = False
        parts = torch.from_numpy(training.initial(rank)[0].copy()).split(shapes)
        self.model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        self.inner = torch.optim.SGD(self.model.parameters(), lr=_RATE, momentum=_MOMENTUM, foreach=False)
        self.schedulers = _Schedulers(self.inner)
        self.fragments = [number % num_fragments(config) for number in range(len(shapes))]
        self.outer = OuterModel([self.model], outer_optimizer(config), self.fragments)
        super().__init__([self.model], [self.inner], self.schedulers, self, outer=self.outer, on_load=self._take_state)
        self.parameters = self.outer.anchors
        self.begin_anew()

    def expect(self, fragments: Sequence[int], alpha: float) -> None:
        """Note what the next step must begin with behind an update of these fragments."""
        owns = torch.from_numpy(self.expected).split(self._shapes)
        parts = zip(owns, self.outer.anchors, self.fragments, strict=True)
        self.expected = _flat(
            (torch.lerp(anchor, own, alpha) if alpha else anchor) if fragment in fragments else own
            for own, anchor, fragment in parts
        )

    def begin_anew(self) -> None:
        """Go on from the anchors, with nothing trained on top of them."""
        self.trained, self.sent = [0] * (max(self.fragments) + 1), dict[int, int]()
        self.ahead: Work | None = None
        self.under_way: Work | None = None
        self.expected = _flat(self.outer.anchors)  # the weights that the next step must begin with

    def _take_state(self) -> None:
        if any(self.gather(self.spoiled)):
            self.drop_moments()
        self.outer.restore_model()
        self.begin_anew()

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
        if not self.outer.has_state:
            return np.stack([_flat(self.outer.anchors), np.zeros(training.SIZE, np.float32)])
        return np.stack([_flat(self.outer.anchors), _flat(map(self.outer.momentum, self.outer.anchors))])

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
        flips_momentum = momentum and self.outer.has_state
        for anchor in self.outer.anchors:
            tensor = self.outer.momentum(anchor) if flips_momentum else anchor
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


@dataclass
class Work:
    """What `titan_ft.semi_sync.RoundWork` keeps of a rank's steps of one round."""

    steps: int = 0
    made: Contribution = NOTHING
    seconds: float = 0.0
    overdue: bool = False
    behind: int = 0  # batches that it has read before and that are not committed yet
    readings: list[Reading] = field(default_factory=list)


class RoundRank(Rank):
    """One rank of a group that trains rounds."""

    state: Any  # a State: the engine's own kind

    def _make_state(self) -> Any:
        self._late = False  # whether the others wait at the end of a round that this group has not begun
        self._work = Work()
        self._moments: np.ndarray | None = None  # those that it has made its last step with
        return State(self.number, self.ledger, self.shapes, self.config, self.gather)

    def _pauses_after(self, step: int) -> bool:
        return True

    def _steps_of(self, updates: int) -> int:
        return self.world.options.steps_of(updates)

    @property
    def _last_step(self) -> int:
        return self._steps_of(self.world.options.steps)

    @property
    def _is_over(self) -> bool:
        return self._steps_of(self.position.step) >= self._last_step

    def _fragments_of(self, update: int) -> list[int]:
        number = num_fragments(self.config)
        is_last = self._steps_of(update) >= self._last_step
        return list(range(number)) if is_last else [(update - 1) % number]

    def _backward(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make the steps of a round, as `SemiSyncTrainer._train`."""
        update, work, dimension = self.position.step + 1, self._work, self.dimension
        if self._late:
            self._late = False
            self._take_changes(update, late=not work.steps)
            return replace(self._describe_work(work), early=True, changed=any(self.state.trained))
        early, first, last = dimension.early, self._steps_of(update - 1) + 1, self._steps_of(update)
        set_lr(self.state.schedulers, first + work.steps - 1)
        for step in range(first + work.steps, last + 1):
            signs = dimension.look(overdue=self._is_overdue)
            if early and Sign.AWAITED in signs:
                break
            if Sign.WANTED in signs:
                dimension.serve()
            if Sign.OVERDUE in signs:
                work.overdue = early = True
                dimension.ask()
            if work.steps and Sign.TOLD in signs and self._meets_to_leave(work, 0 if early else last + 1 - step):
                early = True
                break
            if step == last and not early:
                dimension.ask()
            self._make_step(slots[0], work)
        self._take_changes(update, late=not work.steps)
        is_whole = work.overdue or first + work.steps > last
        changed = not work.steps and any(self.state.trained)
        made = replace(self._describe_work(work), early=not is_whole, changed=changed)
        if not made.early:
            self._make_steps_ahead(update, made, slots)
        return made

    def _describe_work(self, work: Work) -> Contribution:
        if not work.steps:
            return work.made
        return replace(work.made, entries=tuple(reading.entry for reading in work.readings))

    def _take_changes(self, update: int, late: bool = False) -> None:
        state, oracle = self.state, self.world.oracle
        assert isinstance(oracle, RoundOracle)
        state.sent = {fragment: state.trained[fragment] for fragment in self._fragments_of(update)}
        weights = {fragment: tokens / self.nominal_tokens for fragment, tokens in state.sent.items()}
        state.outer.take_changes(weights)
        self._exchange.give(weights)
        oracle.gives(self.slot, self.number, state, late)

    @property
    def _is_overdue(self) -> bool:
        limit = self.config.sync_deadline_seconds
        return bool(limit and self._work.steps and self._work.seconds >= limit)

    def _make_steps_ahead(self, update: int, made: Contribution, slots: Sequence[int]) -> None:
        """Make steps while the exchange is under way, as `SemiSyncTrainer._make_steps_ahead`."""
        first, last = self._steps_of(update) + 1, self._steps_of(update + 1)
        if not self.config.fragment_sync_delay or last < first:
            return
        self.dimension.send(made)
        self.state.ahead = ahead = Work(behind=self._work.steps)
        for _ in range(first, min(first + self.config.fragment_sync_delay, last + 1)):
            signs = self.dimension.look()
            if Sign.TOLD in signs:
                break
            if Sign.WANTED in signs:
                self.dimension.serve()
            self._make_step(slots[0], ahead)

    def _step(self) -> None:
        self._work, self.state.ahead = self.state.ahead or Work(), None
        self.state.under_way = self._work
        super()._step()

    def _make_step(self, slot: int, work: Work) -> None:
        kernel, options = self.world.kernel, self.world.options
        self._watchdog.beat()
        self._check_begin()
        spent = options.seconds_of(slot) * (0.8 + 0.4 * kernel.rng.random()) + self.slowness
        kernel.sleep(spent)
        while self.hangs:
            kernel.block()
        reading = self._read_batch(slot, work.behind + work.steps)
        batch = reading.entry.first_batch
        values = training.gradient(slot, batch, self.number, self.state.weights, options.coupling)
        if self.spoiled > 0:
            self.spoiled -= 1
            self.world.oracle.spoiled.add((slot, batch))
            values[self.spoiled % training.SIZE] = float("nan")
        self.state.make_step(values)
        tokens = training.valid_tokens(slot, batch)
        facts = self._group.gather_losses([tokens, 10, 0.1, 0.1, spent])
        seconds = float(facts[:, 4].max())
        self._feed.read_ahead([reading])
        work.made = work.made.plus(Contribution(tokens, 10, 0.1, 0.1, seconds))
        work.readings = merge([*work.readings, reading])
        work.steps, work.seconds = work.steps + 1, work.seconds + spent
        self.state.trained = [sum_ + tokens for sum_ in self.state.trained]
        self.state.expected, self._moments = self.state.weights, self.state.moments

    def _check_begin(self) -> None:
        """Look whether a step begins with what the last one has left, or the update behind it, or a load."""
        state = self.state
        if state.tainted:
            return
        name = f"{self.process.name} makes a step behind update {state.held[0]}"
        if not np.array_equal(state.expected, state.weights, equal_nan=True):
            self.world.report("one trajectory", f"{name} with other weights than it should have")
        if self._moments is not None and not np.array_equal(self._moments, state.moments, equal_nan=True):
            self.world.report("one trajectory", f"{name} with other moments than it has ended the last one with")

    def _apply(self, update: Update) -> None:
        """Apply a round's update, live or replayed, as `SemiSyncTrainer._apply`."""
        world, state = self.world, self.state
        self._know(update, self.held[1], None)
        self._watchdog.beat()
        world.kernel.sleep(world.options.apply_seconds)
        update.sums.write()
        if update.step != state.progress.steps + 1:
            world.report("counters", f"{self.process.name} applies update {update.step} to a state of {self.held[0]}")
        exchanged, is_last = self._fragments_of(update.step), self._steps_of(update.step) >= self._last_step
        mixes = any(state.sent.values()) and not is_last
        alpha = self.config.fragment_update_alpha if mixes else 0.0
        squares = state.outer.step(alpha)
        state.expect(exchanged, alpha)
        for fragment, tokens in state.sent.items():
            state.trained[fragment] -= tokens
        state.sent, state.under_way = {}, None
        if state.ahead is not None:
            state.ahead.behind = 0
        set_lr(state.schedulers, self._steps_of(update.step))
        state.progress.steps += 1
        state.progress.tokens += update.tokens
        self.ledger.advance(update.entries, update.readers)
        join_norm(squares, self._group.gather)
        self._hold(update.step, update.lineage)
        world.oracle.applied(self.slot, self.number, update.lineage, state)

    def _go_on(self) -> None:
        self._read.clear()
        if self._is_over:
            return
        if self.position.exclusions:
            self.state.restore()
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
        self._moments, before = None, self.held[1]
        # Those of the next round, made while the exchange was under way, are on top of weights that it has no more.
        void = self.state.ahead.steps if self.state.ahead is not None else 0
        super()._heal(computed)
        work = self.state.under_way
        if work is not None and self.state.ahead is None:  # it has gone back to its own state, and gives the same again
            self.state.ahead = work
            if work.steps:
                self.world.say(self.process.name, f"keeps {work.steps} steps of its round")
            return
        if work is not None:
            self.state.restore()
        lost = sum(batch >= self.ledger.end(self.slot) for batch in trained) - void
        if lost > 0:
            self.world.lost_steps(self, lost, ahead, before)
        if self.dimension.opens and not self._is_over:
            self._open()

    def _meets_to_leave(self, work: Work, remaining: int) -> bool:
        """Leave, or meet the others, if the round would take too long, as `SemiSyncTrainer._meets_to_leave`."""
        step = work.seconds / work.steps
        needed, share = (step * remaining, OWN_SHARE) if remaining else (step, WAITING_SHARE)
        if not self._exceeds(needed, share):
            return False
        is_over = lambda: self._exceeds(0.0, OWN_SHARE)  # noqa: E731
        if remaining and self.saves.lacks_state() and self.dimension.await_others(is_over):
            return True
        self.position.leave()
        raise Leaving

    def _exceeds(self, seconds: float, share: float) -> bool:
        assert self.drain is not None
        return any(self._group.gather(self.drain.spent + seconds / self.config.drain_timeout_seconds > share))


# The oracle


@dataclass
class _Part:
    """What a rank gives to an update: its weights, and the tokens that count, by fragment.

    A late one has made no step of the round: nobody knows of its change but the sums, if it came to be in them.
    """

    weights: np.ndarray
    tokens: dict[int, int]
    tainted: bool
    late: bool


class RoundOracle(Oracle):
    """Recomputes the outer update from what each group has come to. That a rank's steps go on from what they should, it
    looks at itself (`RoundRank._check_begin`).
    """

    def __init__(
        self, rules: Rules, report: Callable[[str, str], None], config: FaultTolerance, steps_of: Callable[[int], int]
    ) -> None:
        super().__init__(rules, report)
        self._outer, self._length, self._steps_of = outer_optimizer(config), steps_per_round(config), steps_of
        self._compares = config.digest_every > 0
        self._rounds_of_a_change = max(config.num_fragments, 1) + bool(config.fragment_sync_delay)
        self._parts: dict[tuple[int, int], dict[int, list[_Part]]] = {}  # by lineage and rank; of each slot
        self._fragments: list[int] = []
        self._quantizes = quantizes(config)
        self._coarsest: dict[int, float] = {}
        """By rank: what rounding to 8 bits may leave of a value that a group gives, or has left of the one before, in
        tokens."""

    def gives(self, slot: int, rank: int, state: State, late: bool) -> None:
        """Take note of what a rank has come to."""
        self._fragments = np.repeat(state.fragments, state._shapes).tolist()
        parts = self._parts.setdefault((state.held[1], rank), {}).setdefault(slot, [])
        corrupt = self.is_corrupt(rank, state, otherwise=True)  # a bit may have been lost in rounding since it flipped
        parts.append(_Part(state.weights, dict(state.sent), corrupt, late))
        if self._quantizes:
            largest = np.abs(state.array[0] - state.weights).max() * max(state.sent.values())
            self._coarsest[rank] = np.fmax(self._coarsest.get(rank, 0.0), 1.01 * largest / _MULTIPLES)

    def _spoiled_in(self, lineage: int, updates: int = 0) -> set[int]:
        # A fragment's change is of all since its last exchange, and of the participants: nobody trains another's slot.
        spoiled = super()._spoiled_in(lineage, updates or self._rounds_of_a_change)
        return spoiled.intersection(self.chain[lineage].participants or spoiled)

    def _expect(self, update: Committed, base: np.ndarray, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the states that the update may make of `base`: a group may have given more than once."""
        first = self._steps_of(update.step - 1)
        given = self._parts.get((update.parent, rank), {})
        trained = {slot: count for slot, _, count in update.batches}
        if not given.keys() >= trained.keys():
            self._report("exact average", f"step {update.step} has batches of groups that did not begin its round")
            return
        if not self._compares and any(part.tainted for parts in given.values() for part in parts):
            return  # its change is wrong, and nobody can tell
        sound = {slot: [part for part in parts if not part.tainted] for slot, parts in given.items()}
        if not all(sound[slot] for slot in trained):  # else it was found, has healed and trained the same round again
            self._report("one trajectory", f"step {update.step} has a change from an anchor in which a bit flipped")
            return
        for slot, count in trained.items():
            if count > self._steps_of(update.step) - first:
                self._report("counters", f"step {update.step} has {count} steps of group {slot}")
        choices: list[list[_Part | None]] = [
            [part for part in parts if not part.late] if slot in trained else [None, *(p for p in parts if p.late)]
            for slot, parts in sound.items()
        ]
        for chosen in itertools.product(*choices):
            parts = [part for part in chosen if part is not None]
            total, sizes, weight = np.zeros((3, training.SIZE))
            for part in parts:
                tokens = np.array([part.tokens.get(fragment, 0) for fragment in self._fragments])
                given = tokens * (base[0].astype(np.float64) - part.weights)
                total, sizes, weight = total + given, sizes + np.abs(given), weight + tokens
            off = len(parts) * self._coarsest.get(rank, 0.0) if self._quantizes else self._rules.rounding * sizes
            mean, slack = total / np.maximum(weight, 1), off / np.maximum(weight, 1)
            state = self._update(base.astype(np.float64), mean, weight > 0)
            yield state, self._update(np.zeros_like(base), slack, weight > 0) * [[-1], [1]]

    def _update(self, base: np.ndarray, mean: np.ndarray, exchanged: np.ndarray) -> np.ndarray:
        outer = self._outer
        momentum = outer.momentum * base[1] + mean
        step = mean + outer.momentum * momentum if outer.nesterov else momentum
        after = np.stack([base[0] - outer.lr * step, momentum if outer.momentum else np.zeros_like(mean)])
        return np.where(exchanged, after, base)
