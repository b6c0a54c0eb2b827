# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether reopened data went on where they had ended.

The numbers of batches come from the ledger, and are correct whatever a data loader gives. So a run
without lost or repeated numbers may still have lost data: a loader may give other batches when it
is opened at a saved state. Two events show that. `loader_checked` compares a copy of the loader
with one that was never closed, at the job's start. `data_opened` compares the first batch of each
opening with an earlier reading of the same batch, if there was one.

Both compare some batches. A loader may give these and lose its place later, for example if it
shuffles its next epoch without the generator in its state. So they prove an opening only for a
loader that is *transparent*, see `LoaderChecked`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_ft.history.judgement import count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, once_per_record
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.run.events import DataOpened, LoaderChecked, StepCommitted

SEE_REREAD = "titan-ft check --reread reads the data again without a break"


@dataclass(frozen=True)
class Reopenings:
    """Openings of a slot's data after its first batch."""

    number: int
    num_unproved: int
    """Openings of which nothing proves that the data went on where they had ended."""
    reason: str
    """Why the first one is not proved; empty if all are."""

    @property
    def unproved(self) -> str:
        """The openings without a proof, in one line; empty if all are proved."""
        if not self.num_unproved:
            return ""
        reopenings = count(self.num_unproved, "reopening")
        return f"{reopenings} of data not proved ({self.reason}); {SEE_REREAD}"


@once_per_record
def find_reopenings(record: RunRecord) -> Reopenings:
    """Count all openings, and those without a proof."""
    doubt = _doubt_about_loaders(record.of(LoaderChecked))
    opened = [event for event in record.of(DataOpened) if event.first_batch > 0]
    reasons: list[str] = []
    for event in opened:
        where = f"slot {event.slot} at batch {event.first_batch}, by group {event.replica}"
        if event.exact is False:
            reasons.append(f"{where}: it was another batch than the one that follows there")
        elif doubt:
            first_batch = "; its first batch was right" if event.exact else ""
            reasons.append(f"{doubt}{first_batch}")
    num_openings = len(opened)
    for process in record.processes:
        for where in _find_unreported(process):
            num_openings += 1
            reasons.append(f"{where}: no event tells how it was opened")
    first_reason = reasons[0] if reasons else ""
    return Reopenings(num_openings, len(reasons), first_reason)


def _doubt_about_loaders(checks: Sequence[LoaderChecked]) -> str:
    """Return why a first batch that is right proves nothing of the later ones; empty if it does."""
    if not checks:
        return "no event tells of a check of the loader"
    for event in checks:
        if not event.exact:
            return f"{event.loader}: {event.reason}"
    for event in checks:
        if not event.transparent:
            return f"{event.loader} cannot be looked into"
    return ""


def _find_unreported(process: ProcessHistory) -> Iterator[str]:
    """Yield the places at which a process read on in a slot without an event of its opening."""
    ends: dict[int, int] = {}
    first_opened: dict[int, int] = {}
    for event in process.events:
        if isinstance(event, StepCommitted):
            for data in event.readings():
                first = data.first_batch
                reads_on = first <= ends.get(data.slot, 0)
                was_opened = data.slot in first_opened and first_opened[data.slot] <= first
                if not reads_on and not was_opened:
                    yield f"slot {data.slot} at batch {first}, by {process.name}"
                end = data.first_batch + data.num_batches
                ends[data.slot] = max(end, ends.get(data.slot, 0))
        elif isinstance(event, DataOpened):
            earliest = first_opened.get(event.slot, event.first_batch)
            first_opened[event.slot] = min(earliest, event.first_batch)
        elif isinstance(event, UsualSteps):
            ends[event.slot] = event.next_batch
