# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare a run's trained batches with those of an uninterrupted reader.

`collect` lists what the events say of each shard. `compare` takes the batches of a shard, read from
its beginning without a break, and finds differences. `titan_ft.training.checkpoint.reread` does the
reading.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar

from titan_ft.history.batches.audit import Audit, Finding, decide_verdict, find_resets
from titan_ft.history.judgement import count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord
from titan_ft.run.events import Batches, DataOpened, DataReset, StepCommitted, WorkerStarted

T = TypeVar("T")
Settings = tuple[str, int, int]
"""Dataset, tokens of a sequence, sequences of a batch: with others a reader gets other batches."""


@dataclass(frozen=True, order=True)
class Shard:
    """The part of the data that one data rank reads; a resume may make it a part of another slot.

    Attributes:
        span: number of earlier resets or changes of the data, which a resume asked for.
        number: number of the part in the whole job.
        num_shards: parts of the whole job.
    """

    span: int
    number: int
    num_shards: int

    @property
    def name(self) -> str:
        return f"shard {self.number} of {self.num_shards}"


@dataclass(frozen=True, order=True)
class TrainedBatches:
    """Consecutive batches of a shard that were trained for one update, as batches of a slot."""

    first_batch: int
    num_batches: int
    checksum: str
    step: int
    replica: int
    slot: int


@dataclass
class TrainedData:
    """The data that a run trained, by its events."""

    shards: dict[Shard, set[TrainedBatches]] = field(default_factory=lambda: defaultdict(set))
    readers: dict[int, WorkerStarted] = field(default_factory=dict)
    """For each span, the start of a worker that read in it; the event has the config."""
    unknown: list[str] = field(default_factory=list)
    """The reasons for which some batches cannot be compared."""

    def add_unknown(self, reason: str) -> None:
        """Add a reason, once: many processes may have the same."""
        if reason not in self.unknown:
            self.unknown.append(reason)


@dataclass
class Reread:
    """The result of reading the data of a run again."""

    num_compared: int = 0
    """Number of trained batches that were compared."""
    num_shards: int = 0
    """Number of shards that were read again."""
    differing: list[Finding] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def apply(self, found: Audit) -> Audit:
        """Return the audit with the findings of the comparison."""
        result = deepcopy(found)
        result.differing += self.differing
        result.unknown += self.unknown
        if self.num_compared and not self.unknown:
            result.unproved = ""
        shards = count(self.num_shards, "shard")
        batches = count(self.num_compared, "batch", "batches")
        result.notes.append(
            f"read again without a break: {batches} of {shards} compared with what was trained"
        )
        decide_verdict(result)
        return result


def collect(record: RunRecord) -> TrainedData:
    """Return the batches on the job's trajectory, by shard."""
    found = TrainedData()
    resets = find_resets(record)
    anew = {bisect_right(resets, event.time) for event in record.of(DataReset)}
    # After a change of the data, such as other batches, a loader goes on in the midst of them.
    changed = set(range(1, len(resets) + 1)) - anew
    settings: dict[int, Settings] = {}
    # The latest ones first: their config is the one at hand.
    for process in reversed(record.processes):
        _collect_process(process, record, resets, changed, settings, found)
    return found


def _collect_process(
    process: ProcessHistory,
    record: RunRecord,
    resets: list[float],
    changed: set[int],
    settings: dict[int, Settings],
    found: TrainedData,
) -> None:
    started: WorkerStarted | None = None
    shards: dict[int, tuple[int, int]] = {}
    for event in process.events:
        if isinstance(event, WorkerStarted):
            started = event
        elif isinstance(event, DataOpened):
            shards[event.slot] = event.shard, event.num_shards
        elif isinstance(event, StepCommitted):
            is_on_trajectory = event.contributed and event.lineage in record.chain_lineages
            readings = [data for data in event.readings() if data.slot in event.batches]
            if not is_on_trajectory or not readings:
                continue
            span = bisect_right(resets, event.time)
            if span in changed:
                change = "what was read after a resume had changed the data"
                found.add_unknown(f"no reader from the beginning reads {change}")
                return
            if not _is_comparable(span, started, settings, found):
                settings_read = "settings that are not those of the last launch, or not known"
                found.add_unknown(f"{process.name} read with {settings_read}")
                return
            for data in readings:
                _take(event, data, span, shards, process, found)


def _is_comparable(
    span: int, started: WorkerStarted | None, settings: dict[int, Settings], found: TrainedData
) -> bool:
    """Tell whether a process read with the config that the data of its span are read again with."""
    if started is None or started.setup is None or started.arguments is None:
        return False
    setup = started.setup
    own: Settings = (setup.dataset, setup.seq_len, setup.local_batch_size)
    found.readers.setdefault(span, started)
    return settings.setdefault(span, own) == own


def _take(
    event: StepCommitted,
    data: Batches,
    span: int,
    shards: dict[int, tuple[int, int]],
    process: ProcessHistory,
    found: TrainedData,
) -> None:
    if data.slot not in shards:
        found.add_unknown(f"nothing tells which shard of slot {data.slot} {process.name} read")
        return
    shard = Shard(span, *shards[data.slot])
    trained = TrainedBatches(
        data.first_batch, data.num_batches, data.checksum, event.step, event.replica, data.slot
    )
    found.shards[shard].add(trained)


def compare(
    shard: Shard,
    trained: Iterable[TrainedBatches],
    batches: Iterator[T],
    extend: Callable[[T, str], str],
    result: Reread,
) -> None:
    """Compare a shard with its batches, read in order from the first one; adds to `result`.

    Args:
        extend: returns the checksum (hex) of a series of batches, by the checksum before its last
            batch.
    """
    waiting = sorted(trained, reverse=True)
    open_: list[tuple[TrainedBatches, str]] = []
    wrong: list[TrainedBatches] = []
    number = 0
    while waiting or open_:
        batch = next(batches, None)
        if batch is None:
            rest = [each for each, _ in open_] + waiting
            first = min(each.first_batch for each in rest)
            end = f"the data, read again, end with batch {number}"
            result.unknown.append(f"{shard.name}: {end}, and batches from {first} on were trained")
            break
        while waiting and waiting[-1].first_batch == number:
            open_.append((waiting.pop(), "0"))
        number += 1
        still_open: list[tuple[TrainedBatches, str]] = []
        for each, former in open_:
            checksum = extend(batch, former)
            if each.first_batch + each.num_batches > number:
                still_open.append((each, checksum))
                continue
            result.num_compared += each.num_batches
            if checksum != each.checksum:
                wrong.append(each)
        open_ = still_open
    result.num_shards += 1
    if any(each.first_batch == 0 for each in wrong):
        # No slot was opened again before its first batch: the reference is wrong, and proves
        # nothing.
        why = "they have changed since, or are in another order each time they are opened"
        result.unknown.append(
            f"{shard.name}: the data, read again, differ from the very first batch on: {why}"
        )
    else:
        result.differing += _findings(shard, sorted(wrong))


def _findings(shard: Shard, wrong: list[TrainedBatches]) -> Iterator[Finding]:
    """Yield what differs, consecutive batches together."""
    place = 0
    while place < len(wrong):
        first = last = wrong[place]
        steps = [first.step]
        place += 1
        while (
            place < len(wrong) and wrong[place].first_batch <= last.first_batch + last.num_batches
        ):
            last = wrong[place]
            steps.append(last.step)
            place += 1
        number = last.first_batch + last.num_batches - first.first_batch
        where = f"{shard.name}, from step {first.step} on, by group {first.replica}"
        detail = f"not the batches of an uninterrupted reader ({where})"
        yield Finding(first.slot, first.first_batch, number, (min(steps), max(steps)), detail)
