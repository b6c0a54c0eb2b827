# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The oracle: the tree of committed states.

It recomputes each state from its parent, and knows which groups hold it. A comparison of the groups
with each other would miss an error that all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.simulation import training
from titan_ft.protocol.ledger import Entry
from titan_ft.protocol.member import GroupProcess

ROUNDED = 2.0**-7 * (1 + 2.0**-8)
"""What a sum in bfloat16 may be off by, as a share of what is added up by size
(titan_ft/gradients/half.py).
"""
_TOLERANCE = 1e-3


@dataclass
class Committed:
    """One committed update, as reported by the first group that committed it.

    Attributes:
        states: weights and momentum after it, by rank.
        ends: number of trained batches of each slot after it.
        groups: slots that have committed or replayed it.
    """

    step: int
    parent: int
    participants: tuple[int, ...] | None
    batches: tuple[tuple[int, int, int], ...]
    readers: tuple[GroupProcess, ...]
    tokens: int
    ends: dict[int, int]
    states: dict[int, np.ndarray] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Rules:
    """Settings of the run that the oracle needs.

    Attributes:
        group_size, nominal_tokens, batch_policy, lr_policy: of the config.
        coupling: see `training.gradient`.
        not_finite: a batch may have a NaN gradient.
        rounding: largest error of a sum, as a share of the sum of the members' gradients'
            magnitudes.
    """

    group_size: int
    batch_policy: str
    lr_policy: str
    min_replica_size: int
    coupling: float
    not_finite: bool
    rounding: float


class Oracle:
    """Knows the tree of committed states.

    Args:
        report: called with promise and text if a promise is broken.
    """

    def __init__(self, rules: Rules, report: Callable[[str, str], None]) -> None:
        self._rules, self._report = rules, report
        root = Committed(0, -1, (), (), (), 0, dict.fromkeys(range(rules.group_size), 0))
        self.spoiled: set[tuple[int, int]] = set()
        """Slot and batch of those that were trained with a gradient that is not finite."""
        self.chain: dict[int, Committed] = {0: root}

    def committed(
        self,
        slot: int,
        lineage: int,
        parent: int,
        step: int,
        tokens: int,
        participants: list[int] | None,
        entries: list[Entry],
        readers: list[GroupProcess],
    ) -> None:
        """Check an update of one rank before it is applied. The first update of a lineage defines
        it.

        A group that replays may be the first one. Then the participants are unknown (None).
        """
        batches = tuple((entry.slot, entry.first_batch, entry.num_batches) for entry in entries)
        known = self.chain.get(lineage)
        slots = None if participants is None else tuple(participants)
        facts = (step, parent, slots, batches, tuple(readers), tokens)
        if known is not None:
            if known.participants is None:
                known.participants = facts[2]
            elif participants is None:
                facts = (*facts[:2], known.participants, *facts[3:])
            told = (
                known.step,
                known.parent,
                known.participants,
                known.batches,
                known.readers,
                known.tokens,
            )
            if told != facts:
                self._report(
                    "one trajectory",
                    f"g{slot} commits {facts} where another group committed {told}",
                )
            known.groups.add(slot)
            return
        base = self.chain.get(parent)
        if base is None:
            self._report(
                "one trajectory", f"g{slot} commits step {step} on a state that nobody committed"
            )
            return
        if step != base.step + 1:
            self._report("counters", f"g{slot} commits step {step} on a state of step {base.step}")
        if participants is not None:
            self._check_members(slot, step, participants, batches, readers)
        self.chain[lineage] = Committed(
            *facts, ends=self._advance(slot, step, base, batches), groups={slot}
        )

    def applied(self, slot: int, rank: int, lineage: int, state: training.State) -> None:
        """Check one rank's state after an update, live or replayed."""
        known = self.chain.get(lineage)
        if known is None:
            self._report("one trajectory", f"g{slot} replays an update that nobody committed")
            return
        known.groups.add(slot)
        self._check_counters(slot, known, lineage, state)
        there = known.states.get(rank)
        if state.tainted:
            # Rounding may drop a flipped bit. Then the state is as if no bit had flipped.
            state.tainted = there is None or not np.array_equal(there, state.array)
            return
        if there is not None:
            if not np.array_equal(there, state.array, equal_nan=True):
                self._report(
                    "one trajectory",
                    f"g{slot} r{rank} has other bytes after step {known.step} than others",
                )
            return
        known.states[rank] = state.array.copy()
        base = self._state_of(known.parent, rank)
        if base is None:
            return
        if not np.isfinite(base).all():
            return  # the model has diverged, in all groups alike
        expected = list(self._expect(known, base, rank))
        if not np.isfinite(state.array).all() and len(self._spoiled_in(lineage)) >= len(
            known.participants or [0]
        ):
            # no participant had a finite gradient, so the update is that of stock torchtitan
            return
        if expected and not any(_is_near(state.array, one, slack) for one, slack in expected):
            self._report(
                "exact average",
                f"g{slot} r{rank} after step {known.step} of groups {known.participants} has weights "
                f"{np.round(state.array[0], 4).tolist()}, their mean gives {np.round(expected[0][0][0], 4).tolist()}",
            )

    def is_corrupt(self, rank: int, state: training.State, otherwise: bool = False) -> bool:
        """Return True if a state is not that of its lineage.

        Args:
            otherwise: result if no sound rank has held the state of this lineage yet.
        """
        known = self.chain.get(state.held[1])
        there = None if known is None else known.states.get(rank)
        return state.tainted and (
            otherwise if there is None else not np.array_equal(there, state.array)
        )

    def path(self, lineage: int) -> list[Committed]:
        """Return the commits from the first one to `lineage`."""
        found = []
        while lineage > 0:
            found.append(self.chain[lineage])
            lineage = self.chain[lineage].parent
        return found[::-1]

    def _spoiled_in(self, lineage: int, updates: int = 1) -> set[int]:
        """Return the slots with a nonfinite gradient in the last `updates` updates up to this
        one.
        """
        trained = [
            batches for update in self.path(lineage)[-updates:] for batches in update.batches
        ]
        return {
            slot
            for slot, first, count in trained
            for n in range(count)
            if (slot, first + n) in self.spoiled
        }

    def _state_of(self, lineage: int, rank: int) -> np.ndarray | None:
        return training.initial(rank) if lineage == 0 else self.chain[lineage].states.get(rank)

    def _expect(
        self, update: Committed, base: np.ndarray, rank: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the possible states after the update of `base`, each with its tolerance.

        Yields nothing if they are unknown.
        """
        rules = self._rules
        total, sizes = np.zeros(training.SIZE), np.zeros(training.SIZE)
        weight = 0
        for slot, first, count in update.batches:
            for batch in range(first, first + count):
                tokens = training.valid_tokens(slot, batch)
                given = tokens * training.gradient(slot, batch, rank, base[0], rules.coupling)
                total, sizes, weight = total + given, sizes + np.abs(given), weight + tokens
        share = len({slot for slot, _, _ in update.batches}) / rules.group_size
        rate = training.learning_rate(update.step, share, rules.lr_policy)
        slack = rules.rounding * sizes / max(weight, 1)
        yield (
            training.descend(base.astype(np.float64), total / max(weight, 1), rate),
            np.stack([rate * slack, slack]),
        )

    def _advance(
        self, slot: int, step: int, base: Committed, batches: tuple[tuple[int, int, int], ...]
    ) -> dict[int, int]:
        ends = dict(base.ends)
        for of, first, count in batches:
            if first != ends[of]:
                what = "twice" if first < ends[of] else "not all"
                self._report(
                    "every batch once",
                    f"g{slot} commits step {step} with batch {first} of slot {of}, trained up to {ends[of]}: {what}",
                )
            ends[of] = first + count
        return ends

    def _check_members(
        self,
        slot: int,
        step: int,
        participants: list[int],
        batches: tuple[tuple[int, int, int], ...],
        readers: list[GroupProcess],
    ) -> None:
        rules = self._rules
        # All groups that hold the state count, even if another group has read their data in this
        # step.
        if len(readers) < rules.min_replica_size or not participants:
            self._report(
                "exact average",
                f"g{slot} commits step {step} of groups {participants}, with {readers} only",
            )
        slots = sorted({of for of, _, _ in batches})
        if rules.batch_policy == "shrink":
            if slots != sorted(participants):
                self._report(
                    "exact average",
                    f"g{slot}: step {step} of {participants} has the batches of {slots}",
                )
        elif not rules.not_finite and slots != list(range(rules.group_size)):
            self._report(
                "every batch once", f"g{slot}: step {step} has the batches of {slots} only"
            )

    def _check_counters(
        self, slot: int, known: Committed, lineage: int, state: training.State
    ) -> None:
        path = self.path(lineage)
        tokens, steps = sum(update.tokens for update in path), known.step
        ends = {of: state.ledger.count_committed(of) for of in range(self._rules.group_size)}
        if (state.progress.steps, state.progress.tokens) != (steps, tokens):
            self._report(
                "counters",
                f"g{slot} counts {state.progress.steps} steps and {state.progress.tokens} tokens after step {steps}, "
                f"of {tokens} tokens",
            )
        if ends != known.ends:
            self._report(
                "every batch once",
                f"g{slot} has trained {ends} after step {steps}, by its ledger, not {known.ends}",
            )


def _is_near(state: np.ndarray, expected: np.ndarray, slack: np.ndarray) -> bool:
    """Return True if a state equals the expected one up to rounding.

    Args:
        slack: rounding of the exchange.
    """
    both = np.isnan(state) & np.isnan(expected)
    with np.errstate(invalid="ignore"):
        return bool(
            (both | (np.abs(state - expected) <= _TOLERANCE * (1 + np.abs(state)) + slack)).all()
        )
