# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge a run by its history: its outcome, and whether each promise holds.

As in Jepsen, independent checkers judge a recorded history. Each gives a verdict for one promise:
"holds", "does not hold" or "unknown". The worst verdict counts for the run.

Nothing unverified holds. A checker that crashes gives "unknown". If the history is empty, damaged
or cut, every promise without an offence is "unknown".

`titan-ft check` and `report` call `check`. See docs/observing.md, "The history".
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
from titan_ft.history.terminal import colour_text, make_grid, make_headline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

EVERY_BATCH_ONCE = "every batch once"
MAX_SHOWN = 5
"""Number of details of a promise that the terminal shows; `--json` has all."""
SYMBOLS: dict[Verdict, str] = {"holds": "\u2713", "does not hold": "\u2717", "unknown": "?"}
_COLOURS: dict[Verdict, Colour] = {"holds": "green", "does not hold": "red", "unknown": "amber"}

Checker = Callable[[RunRecord, Judgement], None]


@dataclass
class Verdicts:
    """The judgements of all promises, and the outcome of the run."""

    judgements: list[Judgement] = field(default_factory=list)
    """The promises in their order, then their basis: the whole history, and the clocks."""
    start: float = 0.0
    """Unix seconds of the first event."""
    unit: Unit = STEP
    """The unit of the steps of an offence: steps, or rounds."""
    outcome: Outcome | None = None
    """None if the history cannot be read."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the promises that count."""
        worst = merge(judgement.verdict for judgement in self._asked)
        if worst == "unknown" and self._has_just_started:
            return "holds"  # a run without a step has broken no promise
        return worst

    @property
    def _asked(self) -> list[Judgement]:
        """The judgements that count for the verdict."""
        return [judgement for judgement in self.judgements if judgement.asked]

    @property
    def _is_running(self) -> bool:
        return self.outcome is not None and self.outcome.kind == "running"

    @property
    def _has_just_started(self) -> bool:
        """True if the run goes on, has made no step, and nothing has failed."""
        if self.outcome is None or not self._is_running:
            return False
        return not self.outcome.step and self.outcome.reason is None

    @property
    def colour(self) -> Colour:
        """The colour of the run and its promises together."""
        run_colour: Colour = "amber"
        if self.outcome is not None:
            run_colour = self.outcome.colour
        if run_colour == "red" or self.verdict == "does not hold":
            return "red"
        if run_colour == "amber" or self.verdict == "unknown":
            return "amber"
        for judgement in self.judgements:
            if judgement.reservation:
                return "amber"
        return "green"

    @property
    def exit_status(self) -> int:
        """The exit status of `titan-ft check`: 0 if the run did not fail and the promises hold."""
        if self.verdict == "holds" and self.colour != "red":
            return 0
        return 1

    @property
    def promises(self) -> str:
        """The verdict in one line, with the reservations."""
        parts = [self._describe_verdict()]
        parts += [judgement.reservation for judgement in self.judgements if judgement.reservation]
        return "; ".join(parts)

    def _describe_verdict(self) -> str:
        if self.verdict == "holds":
            promises = [judgement for judgement in self._asked if judgement.promise is not None]
            checked = f"{count(len(promises), 'promise')} checked"
            if self._has_just_started:
                checked = "no step yet"
            if self._is_running:
                return f"holds so far ({checked})"
            return f"holds ({checked})"
        if self.verdict == "unknown":
            missing = self["whole history"].unknown
            if missing:
                # All other promises are unknown for this reason alone.
                return f"unknown: {missing[0]}; what there is breaks no promise"
        names = [judgement.name for judgement in self._asked if judgement.verdict == self.verdict]
        return f"{self.verdict}: {', '.join(names)}"

    def __getitem__(self, promise: int | str) -> Judgement:
        """Return the judgement of a promise by its number, or any judgement by its name."""
        for judgement in self.judgements:
            if promise in (judgement.promise, judgement.name):
                return judgement
        raise KeyError(promise)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain dictionaries, lists and numbers for JSON."""
        return {
            "outcome": None if self.outcome is None else self.outcome.to_dict(),
            "verdict": self.verdict,
            "promises": self.promises,
            "colour": self.colour,
            "start": self.start,
            "unit": self.unit.noun,
            "judgements": [asdict(judgement) for judgement in self.judgements],
        }


def check(
    record: RunRecord, against: RunRecord | None = None, reread: Reread | None = None
) -> Verdicts:
    """Judge a run.

    Args:
        against: a run of the same config without failures, whose loss curve this run must follow.
        reread: the result of reading the data of the run again.
    """
    whole = _judge("whole history", None, check_whole, record)
    promises = [_judge_arithmetic(record, against)]
    for number, name, checker in _CHECKERS:
        if name == EVERY_BATCH_ONCE:
            checker = partial(_check_batches, reread=reread)
        promises.append(_judge(name, number, checker, record))
    for judgement in promises:
        if judgement.offences:
            continue
        if whole.unknown and judgement.asked:
            # The missing part of the history may break the promise.
            judgement.unknown.append("the history is not whole, see there")
        if judgement.unknown:
            judgement.verdict = "unknown"
    clock = _judge("clocks", None, check_clock, record)
    start = min((event.time for event in record.events), default=0.0)
    return Verdicts([*promises, whole, clock], start, record.unit, find_outcome(record))


def nothing_known(reason: str) -> Verdicts:
    """Return the verdicts of a history that cannot be read: everything is unknown."""
    judgements = [Judgement("same arithmetic", 1, unknown=[reason])]
    for number, name, _ in _CHECKERS:
        judgements.append(Judgement(name, number, unknown=[reason]))
    judgements.append(Judgement("whole history", None, unknown=[reason]))
    return Verdicts(judgements)


def _judge(name: str, promise: int | None, checker: Checker, record: RunRecord) -> Judgement:
    """Return the judgement of one checker; "unknown" if the checker crashes."""
    found = Judgement(name, promise)
    try:
        checker(record, found)
    except Exception as error:  # noqa: BLE001
        # A damaged history must not keep the other checkers from judging.
        frames = traceback.extract_tb(error.__traceback__)
        where = ""
        if frames:
            where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        text = f"the checker crashed: {type(error).__name__}: {error}{where}"
        return Judgement(name, promise, unknown=[text]).decide()
    if found.reservation:
        found.statement = f"{found.reservation}; {found.statement}"
    return found.decide()


def _judge_arithmetic(record: RunRecord, reference: RunRecord | None) -> Judgement:
    """Judge promise 1, which only a comparison with another run can prove.

    Without such a run the promise counts only if this run alone breaks it.
    """
    name = "same arithmetic"
    found = _judge(name, 1, check_arithmetic, record)
    if reference is None:
        if found.verdict != "does not hold":
            found.asked = False
            found.unknown.append("a run without failures tells more (--against RUN_DIR2)")
        return found.decide()

    def compare(run: RunRecord, judgement: Judgement) -> None:
        check_against(run, reference, judgement)

    compared = _judge(name, 1, compare, record)
    compared.offences += found.offences
    compared.unknown += found.unknown
    if compared.statement:
        compared.statement = f"{compared.statement}; {found.statement}"
    else:
        compared.statement = found.statement
    return compared.decide()


def _check_batches(record: RunRecord, found: Judgement, reread: Reread | None = None) -> None:
    """Check that every batch was trained once (see `titan_ft.history.batches.audit`)."""
    audited = audit(record)
    if reread is not None:
        audited = reread.apply(audited)
    found.statement = f"{audited.counts()}, in {audited.unit.count(audited.num_steps)}"
    for finding in (*audited.lost, *audited.repeated, *audited.differing):
        last_step: int | None = None
        if finding.steps:
            last_step = finding.steps[-1]
        found.offences.append(Offence(str(finding), step=last_step))
    for text in audited.conflicts:
        found.offences.append(Offence(text))
    # The judgement of the whole history already names the gaps.
    gaps = find_gaps(record)
    for reason in audited.unknown:
        if reason not in gaps:
            found.unknown.append(reason)
    if audited.unproved:
        found.unknown.append(audited.unproved)
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
"""Number, name and checker of each promise that one history can prove."""


def make_check_table(verdicts: Verdicts) -> Group:
    """Return the verdicts for the terminal: the outcome, the verdict, and a row for each
    promise.
    """
    from rich.console import Group
    from rich.text import Text

    rows: list[tuple[str | Text, str | Text, str]] = []
    for judgement in verdicts.judgements:
        name = f"{judgement.promise or ' '} {judgement.name}"
        verdict = judgement.shown_verdict
        if judgement.asked:
            colour = _COLOURS[judgement.verdict]
            shown_name = colour_text(f"{SYMBOLS[judgement.verdict]} {name}", colour)
            shown_verdict = colour_text(verdict, colour)
        else:
            shown_name = Text(f"- {name}", style="dim")
            shown_verdict = Text(verdict, style="dim")
        rows.append((shown_name, shown_verdict, judgement.statement))
        details = judgement.details(verdicts.start, verdicts.unit.noun)
        rows += [("", "", text) for text in details[:MAX_SHOWN]]
        num_hidden = len(details) - MAX_SHOWN
        if num_hidden > 0:
            rows.append(("", "", f"... {num_hidden} more (--json names them all)"))
    head: list[Text] = []
    if verdicts.outcome is not None:
        head = make_headline(verdicts.outcome, verdicts.colour)
    head.append(Text(f"  verdict: {verdicts.promises}"))
    return Group(*head, "", make_grid(rows), "", *head)
