# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The data of a simulated job: loaders that resume where their state was saved, and loaders that do
not.

The engine's own `Feed` reads them. Its reports on openings of slots are compared with the loaders'
real batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from titan_ft.run.events import DataOpened

_LOST = 1000  # number of batches that a forgetful loader skips when it is reopened

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
Report = Callable[[str, str], None]


class Loader:
    """Yields the batches of a slot; each batch knows its slot and its number.

    Args:
        forgets: a reopened loader continues at another batch.
    """

    def __init__(self, slot: int, *, forgets: bool) -> None:
        self._slot, self._forgets = slot, forgets
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._next += 1
            yield {"slot": torch.tensor([self._slot])}, torch.tensor([self._next - 1])

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved batch, or at another one if the loader forgets."""
        self._next = state["next"] + (_LOST if self._forgets else 0)


class DataJudge:
    """Compares the batches of a rank's feed, and the events about them, with the numbers of the
    ledger.

    Args:
        name: of the rank's process.
        report: called with a broken promise and its cause.
        forgets: the loaders may continue at another batch.
    """

    def __init__(self, name: str, report: Report, *, forgets: bool) -> None:
        self._name, self._report, self._forgets = name, report, forgets
        self._opened: dict[int, DataOpened] = {}

    def opened(self, event: DataOpened) -> None:
        """Record the event of an opening. The opened slot's first batch follows."""
        self._opened[event.slot] = event

    def read(self, slot: int, number: int, labels: torch.Tensor) -> None:
        """Judge a batch that the feed returned as batch `number`."""
        given, exact = int(labels), self._opened[slot].exact
        what = f"{self._name} reads batch {given} of slot {slot} as batch {number}"
        if given != number and not self._forgets:
            self._report("every batch once", what)
        if given != number and exact:
            self._report("nothing silent", f"{what}, and says that its data go on exactly")
        if given == number and exact is False:
            self._report("nothing silent", f"{what}, and says that its data do not go on")
