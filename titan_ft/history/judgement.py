# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a checker says of a promise: verdict, offending events, what is unknown, notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from titan_ft.run.events import Event

Verdict = Literal["holds", "does not hold", "unknown"]
_WORST_FIRST: tuple[Verdict, ...] = ("does not hold", "unknown", "holds")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts: "does not hold" beats "unknown", which beats "holds"; unknown without any."""
    given = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in given), "unknown")


@dataclass(frozen=True)
class Offence:
    """What breaks a promise, and the event that shows it, if one does."""

    text: str
    time: float | None = None
    """Unix seconds."""
    replica: int | None = None
    rank: int | None = None
    step: int | None = None

    def describe(self, start: float, noun: str = "step") -> str:
        """Return it in words: when (seconds since `start`), where, what; `noun` is what `step` counts."""
        where = [] if self.time is None else [f"{self.time - start:.2f} s"]
        places = (("group", self.replica), ("rank", self.rank), (noun, self.step))
        where += [f"{name} {value}" for name, value in places if value is not None]
        return f"{', '.join(where)}: {self.text}" if where else self.text


@dataclass
class Judgement:
    """What the history says of one promise."""

    name: str
    promise: int | None = None
    """Its number in the list of promises; None for what the others rest on."""
    asked: bool = True
    """Whether it counts for the verdict on the run."""
    verdict: Verdict = "unknown"
    statement: str = ""
    """What was verified, in one line."""
    reservation: str = ""
    """What stands beside the verdict on the run, although it breaks no promise; the statement begins with it."""
    offences: list[Offence] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Why there is no verdict."""
    notes: list[str] = field(default_factory=list)

    @property
    def shown_verdict(self) -> str:
        """Its verdict in words: "not asked" where it does not count."""
        return self.verdict if self.asked else "not asked"

    def details(self, start: float, noun: str = "step") -> list[str]:
        """Return what stands below it: offences, what is unknown, notes.

        Args:
            start: the run's, Unix seconds.
            noun: what the job commits, steps or rounds.
        """
        unknown = [f"unknown: {reason}" if self.asked else reason for reason in dict.fromkeys(self.unknown)]
        offences = [each.describe(start, noun) for each in self.offences]
        return [*offences, *unknown, *(f"note: {note}" for note in self.notes)]

    def object_to(self, text: str, event: Event | None = None) -> None:
        """Add an offence, where and when `event` was."""
        if event is None:
            self.offences.append(Offence(text))
            return
        self.offences.append(Offence(text, event.time, event.replica, event.rank, getattr(event, "step", None)))

    def decide(self) -> Judgement:
        """Set the verdict by what was found, the first offences in front; what objects counts whatever was asked."""
        self.offences.sort(key=lambda offence: offence.time or 0.0)
        self.verdict = "does not hold" if self.offences else "unknown" if self.unknown else "holds"
        self.asked = self.asked or bool(self.offences)
        return self


def count(value: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{value} {noun}" if value == 1 else f"{value} {plural or noun + 's'}"
