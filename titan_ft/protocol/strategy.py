# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How the steps of the groups become updates of the job: at every step, or in rounds of several.

A strategy answers every question of the protocol that depends on it. So no other code asks for `semi_sync_method`.
"""

from __future__ import annotations

from titan_ft.config import FaultTolerance
from titan_ft.round_settings import steps_per_round


class EveryStep:
    """Each step is an update of all groups, and its gradients are summed.

    Attributes:
        unit: name of an update in messages.
        steps: steps of a group in one update.
        sums_gradients: autograd makes what is summed, so that buckets leave during backward.
        is_long: an update takes many steps. Groups are in no quorum for long, and the latest state stays the latest.
        compares_before_sum: the groups compare their bytes before the sum of an update is used.
    """

    unit = "step"
    sums_gradients = True
    is_long = False
    compares_before_sum = False

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self.steps = steps_per_round(config)

    def limit_donors(self, num_holders: int) -> int:
        """Return how many of so many holders a joiner may fetch from at once: each gives a part of the same bytes."""
        return min(self._config.heal_donors or num_holders, num_holders)


class EveryRound(EveryStep):
    """A group makes a round of steps by itself, and the change of its weights is summed: LocalSGD, DiLoCo and
    Streaming DiLoCo, whose settings are in `titan_ft.round_settings`.
    """

    unit = "round"
    sums_gradients = False
    is_long = True
    # A bit of an anchor that has flipped in the midst of a round would be in this group's change, and so in
    # everybody's state.
    compares_before_sum = True

    def limit_donors(self, num_holders: int) -> int:
        """Return 1: a state has the moments of its group's own optimizer in it, and those of two groups do not fit."""
        return min(1, num_holders)


def strategy_of(config: FaultTolerance) -> EveryStep:
    """Return the job's strategy."""
    return EveryStep(config) if config.semi_sync_method is None else EveryRound(config)
