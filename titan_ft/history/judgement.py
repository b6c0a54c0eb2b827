# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The judgement of one promise: verdict, offences, reasons for "unknown", notes.

Each checker of `titan_ft.history.checks` gets a `Judgement` from `titan_ft.history.check` and fills
it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from titan_ft.run.events import Event

Verdict = Literal["holds", "does not hold", "unknown"]
_WORST_FIRST: tuple[Verdict, ...] = ("does not hold", "unknown", "holds")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict: "does not hold" beats "unknown" beats "holds"; unknown if empty."""
    given = set(verdicts)
    for verdict in _WORST_FIRST:
        if verdict in given:
            return verdict
    return "unknown"


@dataclass(frozen=True)
class Offence:
    """A breach of a promise, and the place of the event that shows it, if known."""

    text: str
    time: float | None = None
    """Unix seconds."""
    replica: int | None = None
    rank: int | None = None
    step: int | None = None

    def describe(self, start: float, noun: str = "step") -> str:
        """Return the offence in words: the time, the place, the text.

        Args:
            start: the begin of the run, in Unix seconds.
            noun: the unit of `step`.
        """
        place = []
        if self.time is not None:
            place.append(f"{self.time - start:.2f} s")
        if self.replica is not None:
            place.append(f"group {self.replica}")
        if self.rank is not None:
            place.append(f"rank {self.rank}")
        if self.step is not None:
            place.append(f"{noun} {self.step}")
        if not place:
            return self.text
        return f"{', '.join(place)}: {self.text}"


@dataclass
class Judgement:
    """The verdict on one promise, and its grounds."""

    name: str
    promise: int | None = None
    """The number of the promise; None for the basis of all promises."""
    asked: bool = True
    """False if the judgement does not count for the verdict on the run."""
    verdict: Verdict = "unknown"
    statement: str = ""
    """One line about the facts that were verified."""
    reservation: str = ""
    """A remark on the run that breaks no promise; the statement begins with it."""
    offences: list[Offence] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """The reasons for "unknown"."""
    notes: list[str] = field(default_factory=list)

    @property
    def shown_verdict(self) -> str:
        """The verdict in words; "not asked" if it does not count."""
        return self.verdict if self.asked else "not asked"

    def details(self, start: float, noun: str = "step") -> list[str]:
        """Return the lines below the statement: offences, reasons for "unknown", notes.

        Args:
            start: the begin of the run, in Unix seconds.
            noun: the unit of the steps: step or round.
        """
        lines = [offence.describe(start, noun) for offence in self.offences]
        prefix = "unknown: " if self.asked else ""
        lines += [f"{prefix}{reason}" for reason in dict.fromkeys(self.unknown)]
        lines += [f"note: {note}" for note in self.notes]
        return lines

    def object_to(self, text: str, event: Event | None = None) -> None:
        """Add an offence at the time and place of `event`."""
        if event is None:
            self.offences.append(Offence(text))
            return
        step = getattr(event, "step", None)
        self.offences.append(Offence(text, event.time, event.replica, event.rank, step))

    def decide(self) -> Judgement:
        """Set the verdict, and put the offences in order of time. An offence always counts."""
        self.offences.sort(key=lambda offence: offence.time or 0.0)
        if self.offences:
            self.verdict = "does not hold"
            self.asked = True
        elif self.unknown:
            self.verdict = "unknown"
        else:
            self.verdict = "holds"
        return self


def count(value: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 step", "3 batches"."""
    if value == 1:
        return f"{value} {noun}"
    return f"{value} {plural or noun + 's'}"
