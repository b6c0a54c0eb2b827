# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge a run by its history: its outcome, and which of the promises hold, which do not, and what is unknown.

As in Jepsen: a history goes in, small checkers that know nothing of each other judge it, their verdicts are merged
("does not hold" beats "unknown", which beats "holds"). A checker that crashes gives unknown, and so does a history that
is empty, damaged or cut: nothing that was not verified ever holds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ft.history.against import check_against
from titan_ft.history.batches.audit import audit
from titan_ft.history.batches.reread import Reread
from titan_ft.history.checks.arithmetic import check_arithmetic
from titan_ft.history.checks.average import check_average
from titan_ft.history.checks.counters import check_counters
from titan_ft.history.checks.digests import check_digests
from titan_ft.history.checks.foundation import check_clock, check_whole, find_gaps
from titan_ft.history.checks.joiner import check_joiner
from titan_ft.history.checks.silence import check_silence
from titan_ft.history.checks.work import check_work
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import Judgement, Offence, Verdict, count, merge
from titan_ft.history.outcomes.outcome import Colour, Outcome, find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import coloured, grid, headline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

EVERY_BATCH_ONCE = "every batch once"
MAX_SHOWN = 5
SYMBOLS: dict[Verdict, str] = {"holds": "\u2713", "does not hold": "\u2717", "unknown": "?"}

Checker = Callable[[RunRecord, Judgement], None]


@dataclass
class Verdicts:
    """What the history of a run says of each promise."""

    judgements: list[Judgement] = field(default_factory=list)
    """The promises in their order, then what all of them rest on: whole history, clocks."""
    start: float = 0.0
    """Unix seconds of the first event."""
    unit: Unit = STEP
    """What `step` of an offence counts: steps, or rounds."""
    outcome: Outcome | None = None
    """What became of the run; None where its history cannot be read."""

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of what was asked; a run that has just been started has broken no promise."""
        worst = merge(judgement.verdict for judgement in self.judgements if judgement.asked)
        return "holds" if worst == "unknown" and self._starts else worst

    @property
    def _starts(self) -> bool:
        """Whether the run goes on, and nothing has kept it from its first step so far."""
        outcome = self.outcome
        return outcome is not None and outcome.kind == "running" and not outcome.step and outcome.reason is None

    @property
    def colour(self) -> Colour:
        """Return the colour of run and promises together."""
        outcome = "amber" if self.outcome is None else self.outcome.colour
        if outcome == "red" or self.verdict == "does not hold":
            return "red"
        noted = any(each.reservation for each in self.judgements)
        return "amber" if outcome == "amber" or noted or self.verdict == "unknown" else "green"

    @property
    def exit_status(self) -> int:
        """Return that of `titan-ft check`: 1 for a run that failed, or of which a promise is broken or unknown."""
        return 0 if self.verdict == "holds" and self.colour != "red" else 1

    @property
    def promises(self) -> str:
        """Return the verdict on the promises in one line, with what stands beside it."""
        asked = [each for each in self.judgements if each.asked]
        named = ", ".join(each.name for each in asked if each.verdict == self.verdict)
        if self.verdict == "unknown" and (why := self["whole history"].unknown):
            named = f"{why[0]}; what there is breaks no promise"  # all the others are unknown for that alone
        number = count(sum(each.promise is not None for each in asked), "promise")
        goes_on = self.outcome is not None and self.outcome.kind == "running"
        texts = {
            "holds": f"holds{' so far' if goes_on else ''} ({'no step yet' if self._starts else f'{number} checked'})",
            "does not hold": f"does not hold: {named}",
            "unknown": f"unknown: {named}",
        }
        return "; ".join([texts[self.verdict], *(each.reservation for each in self.judgements if each.reservation)])

    def __getitem__(self, promise: int | str) -> Judgement:
        """Return the judgement of a promise by its number, or of anything by its name."""
        return next(each for each in self.judgements if promise in (each.promise, each.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain dictionaries, lists and numbers, for JSON."""
        return {
            "outcome": None if self.outcome is None else self.outcome.to_dict(),
            "verdict": self.verdict,
            "promises": self.promises,
            "colour": self.colour,
            "start": self.start,
            "unit": self.unit.noun,
            "judgements": list(map(asdict, self.judgements)),
        }


def check(record: RunRecord, against: RunRecord | None = None, reread: Reread | None = None) -> Verdicts:
    """Judge a run.

    Args:
        against: a run without failures, of the same config, whose loss curve it must follow.
        reread: what came of reading the data of the run again.
    """
    whole = _judge("whole history", None, check_whole, record)
    promises = [_judge_arithmetic(record, against)]
    checkers = {name: checker for _, name, checker in _CHECKERS}
    checkers[EVERY_BATCH_ONCE] = partial(_check_batches, reread=reread)
    promises += [_judge(name, promise, checkers[name], record) for promise, name, _ in _CHECKERS]
    for each in promises:
        # What is not in the history may be what breaks a promise.
        if whole.unknown and each.asked and not each.offences:
            each.unknown.append("the history is not whole, see there")
        each.verdict = "unknown" if each.unknown and not each.offences else each.verdict
    clock = _judge("clocks", None, check_clock, record)
    times = [event.time for event in record.events]
    return Verdicts([*promises, whole, clock], min(times, default=0.0), record.unit, find_outcome(record))


def nothing_known(reason: str) -> Verdicts:
    """Return the verdicts of a history that cannot be read."""
    names = [(1, "same arithmetic"), *((promise, name) for promise, name, _ in _CHECKERS), (None, "whole history")]
    return Verdicts([Judgement(name, promise, unknown=[reason]) for promise, name in names])


def _judge(name: str, promise: int | None, checker: Checker, record: RunRecord) -> Judgement:
    """Let a checker judge; one that crashes gives unknown."""
    found = Judgement(name, promise)
    try:
        checker(record, found)
    except Exception as error:  # noqa: BLE001  # whatever a damaged history does to one checker, the others go on
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"the checker crashed: {type(error).__name__}: {error}{where}"
        return Judgement(name, promise, unknown=[text]).decide()
    if found.reservation:
        found.statement = f"{found.reservation}; {found.statement}"
    return found.decide()


def _judge_arithmetic(record: RunRecord, reference: RunRecord | None) -> Judgement:
    """Judge the promise that only another run can prove; without one it is asked only where it is broken."""
    found = _judge("same arithmetic", 1, check_arithmetic, record)
    if reference is None:
        if found.verdict != "does not hold":
            found.asked = False
            found.unknown.append("a run without failures tells more (--against RUN_DIR2)")
        return found.decide()
    other = _judge("same arithmetic", 1, lambda run, judgement: check_against(run, reference, judgement), record)
    other.offences += found.offences
    other.unknown += found.unknown
    other.statement = f"{other.statement}; {found.statement}" if other.statement else found.statement
    return other.decide()


def _check_batches(record: RunRecord, found: Judgement, reread: Reread | None = None) -> None:
    """Check that every batch was trained once (see `titan_ft.history.batches.audit`)."""
    audited = audit(record)
    if reread is not None:
        audited = reread.apply(audited)
    found.statement = f"{audited.counts()}, in {audited.unit.count(audited.num_steps)}"
    for finding in (*audited.lost, *audited.repeated, *audited.differing):
        step = finding.steps[-1] if finding.steps else None
        found.offences.append(Offence(str(finding), step=step))
    found.offences += [Offence(text) for text in audited.conflicts]
    gaps = find_gaps(record)  # see "whole history"
    found.unknown += [reason for reason in audited.unknown if reason not in gaps]
    found.unknown += [audited.unproved] if audited.unproved else []
    found.notes += audited.notes


_CHECKERS: tuple[tuple[int, str, Checker], ...] = (
    (2, "one trajectory", check_digests),
    (3, "exact average", check_average),
    (4, "no work lost", check_work),
    (5, "no stall for a joiner", check_joiner),
    (6, EVERY_BATCH_ONCE, _check_batches),
    (7, "counters follow commits", check_counters),
    (8, "nothing silent", check_silence),
)


_COLOURS: dict[Verdict, Colour] = {"holds": "green", "does not hold": "red", "unknown": "amber"}


def check_table(verdicts: Verdicts) -> Group:
    """Return the verdicts for the terminal: the outcome, the verdict, and a row for each promise with its grounds."""
    from rich.console import Group
    from rich.text import Text

    rows: list[tuple[str | Text, str | Text, str]] = []
    for each in verdicts.judgements:
        symbol, number = SYMBOLS[each.verdict] if each.asked else "-", each.promise or " "
        name, verdict = Text(f"{symbol} {number} {each.name}", style="dim"), Text(each.shown_verdict, style="dim")
        if each.asked:
            name, verdict = (coloured(cell.plain, _COLOURS[each.verdict]) for cell in (name, verdict))
        rows.append((name, verdict, each.statement))
        details = each.details(verdicts.start, verdicts.unit.noun)
        rows += [("", "", text) for text in details[:MAX_SHOWN]]
        if len(details) > MAX_SHOWN:
            rows.append(("", "", f"... {len(details) - MAX_SHOWN} more (--json names them all)"))
    head = [] if verdicts.outcome is None else headline(verdicts.outcome, verdicts.colour)
    head.append(Text(f"  verdict: {verdicts.promises}"))
    return Group(*head, "", grid(rows), "", *head)
