# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How local steps become updates of the job: one update each step, or one each round of steps.

A strategy answers every question of the protocol that depends on this. So no other code reads
`semi_sync_method`. `titan_ft/engine/strategy.py` acts on the answers.
"""

from __future__ import annotations

from titan_ft.config import FaultTolerance
from titan_ft.round_settings import steps_per_round


class EveryStep:
    """Each step is an update of all groups. The exchange sums the gradients of the step.

    Attributes:
        unit: name of an update in messages.
        steps: local steps in one update.
        sums_gradients: the exchange sums gradients of autograd, so buckets leave during backward.
        has_long_rounds: an update takes many local steps. So a group is in no quorum for a long
            time, and the latest state stays the latest for as long.
        compares_before_sum: the groups compare digests before they use the sum of an update.
    """

    unit = "step"
    sums_gradients = True
    has_long_rounds = False
    compares_before_sum = False

    def __init__(self, config: FaultTolerance) -> None:
        self._config = config
        self.steps = steps_per_round(config)

    def limit_donors(self, num_holders: int) -> int:
        """Return from how many holders a joiner may fetch at once, a part from each."""
        return min(self._config.heal_donors or num_holders, num_holders)


class EveryRound(EveryStep):
    """Each round of local steps is an update. The exchange sums the changes of the weights.

    LocalSGD, DiLoCo and Streaming DiLoCo. Their settings are in `titan_ft.round_settings`.
    """

    unit = "round"
    sums_gradients = False
    has_long_rounds = True
    # If a bit of an anchor flips during a round, this group's change is wrong. After the sum, the
    # state of every group would be wrong.
    compares_before_sum = True

    def limit_donors(self, num_holders: int) -> int:
        """Return 1: a state includes its group's own optimizer moments, and those of two groups
        do not fit together.
        """
        return min(1, num_holders)


def strategy_of(config: FaultTolerance) -> EveryStep:
    if config.semi_sync_method is None:
        return EveryStep(config)
    return EveryRound(config)
