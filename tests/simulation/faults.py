# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What happens to the simulated world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.world import World


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time.

    Attributes:
        at: virtual seconds.
    """

    at: float
    spoils = False

    @property
    def ends(self) -> float:
        return self.at

    def inject(self, world: World) -> None:
        raise NotImplementedError

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        return False
