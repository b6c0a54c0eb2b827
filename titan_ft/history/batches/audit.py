# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Audit the data of a run: was every batch on the job's trajectory trained once?

Each commit names the state that it made (`lineage`), the state that it changed (`parent`) and the
batches that all groups trained for it. The job's trajectory is the chain of parents from its final
state back to the first.

- *Void* batches belong to commits off the chain. Their updates were thrown away and their batches
  are due again, so training them again is no repetition. Batches of a round that a group left
  unfinished are void as well. A group that leaves reports these batches; of a group that dies only
  the time is known.
- *Partial* batches occur if each round exchanges one fragment of the model. A group that starts
  again loses the changes of the fragments whose turn had not come. Its batches are in the updates
  of the other fragments, once in each.

`titan-ft check` and `report` call `audit`. See docs/data.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from titan_ft.history.batches.reopenings import find_reopenings
from titan_ft.history.checks.foundation import find_gaps
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import Verdict
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, view
from titan_ft.history.record.trajectory import ROOT, JobState, chain_to
from titan_ft.history.rounds import find_partial
from titan_ft.history.timing.timeline import build_timeline
from titan_ft.run.events import DataOpened, DataReset, Drained, LaunchStarted, StepCommitted


@dataclass(frozen=True)
class Finding:
    """Consecutive batches of one slot, and the finding about them."""

    slot: int
    first_batch: int
    num_batches: int
    steps: tuple[int, ...]
    """The steps that trained the batches, or the steps between which the batches are missing."""
    detail: str = ""

    def __str__(self) -> str:
        last = self.first_batch + self.num_batches - 1
        batches = f"batches {self.first_batch}-{last}"
        if self.num_batches == 1:
            batches = f"batch {last}"
        return f"slot {self.slot}, {batches}: {self.detail}"


@dataclass
class Audit:
    """The result of an audit: the counts and the findings about the batches of a run."""

    verdict: Verdict = "unknown"
    """Whether every batch was trained once: "does not hold" beats "unknown" beats "holds"."""
    num_steps: int = 0
    """Steps, or rounds, on the job's trajectory, as far back as the history goes."""
    unit: Unit = STEP
    """The unit of `num_steps`."""
    num_batches: int = 0
    """Number of different batches that the trajectory trained."""
    lost: list[Finding] = field(default_factory=list)
    repeated: list[Finding] = field(default_factory=list)
    differing: list[Finding] = field(default_factory=list)
    """Batches that had other tokens when the same rank read them again."""
    conflicts: list[str] = field(default_factory=list)
    """Events that contradict each other or the ledger."""
    void: list[Finding] = field(default_factory=list)
    """Batches of commits off the trajectory, and reported batches of unfinished rounds."""
    partial: list[Finding] = field(default_factory=list)
    """Batches that are in the updates of some fragments of the model only; counted as trained."""
    num_cut_short: int = 0
    """Estimated batches of rounds whose group died within them, by the time and the group's pace.

    These batches are void, and other steps train them again.
    """
    unknown: list[str] = field(default_factory=list)
    """The reasons for an unknown verdict."""
    unproved: str = ""
    """The openings of data that may have continued at a wrong place; empty if all are proved."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        return _count_batches(self.lost)

    @property
    def num_repeated(self) -> int:
        """Number of different batches that were trained more than once."""
        batches: set[tuple[int, int]] = set()
        for finding in self.repeated:
            end = finding.first_batch + finding.num_batches
            batches.update((finding.slot, batch) for batch in range(finding.first_batch, end))
        return len(batches)

    @property
    def num_void(self) -> int:
        return _count_batches(self.void)

    @property
    def num_partial(self) -> int:
        return _count_batches(self.partial)

    def counts(self) -> str:
        """Return the counts in words.

        A count of lost batches that may be wrong is left out: a reader would take it for a proof.
        """
        once = max(0, self.num_batches - self.num_repeated)
        partial = f" ({self.num_partial} of them partial)" if self.partial else ""
        is_doubtful = bool(self.unproved or self.differing)
        has_found = bool(self.lost or self.repeated)
        if is_doubtful and not has_found:
            known = f"{once} trained{partial}, {self.num_void} void"
            return f"{known}; whether any were lost or repeated is not known"
        lost = f"{self.num_lost} lost, {self.num_repeated} repeated"
        return f"{once} trained once{partial}, {lost}, {self.num_void} void"

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain dictionaries, lists and numbers for JSON."""
        counts = {
            "num_lost": self.num_lost,
            "num_repeated": self.num_repeated,
            "num_void": self.num_void,
            "num_partial": self.num_partial,
        }
        return asdict(self) | counts | {"unit": self.unit.noun}


def _count_batches(findings: Iterable[Finding]) -> int:
    return sum(finding.num_batches for finding in findings)


@dataclass(frozen=True)
class DataSplit:
    """The division of the data into shards and slots, which a resume may change."""

    shards_per_slot: int
    num_shards: int
    """Shards of the whole job."""

    def shards(self, slot: int) -> range:
        first = slot * self.shards_per_slot
        return range(first, first + self.shards_per_slot)


@view
def find_splits(record: RunRecord) -> dict[str, DataSplit]:
    """Return the division of the data for each state, by lineage.

    States without an event about it are left out. The result is empty if the division never
    changed.
    """
    splits: list[tuple[ProcessHistory, DataSplit]] = []
    for process in record.processes:
        split = _find_split(process)
        if split is not None:
            splits.append((process, split))
    found: dict[str, DataSplit] = {}
    if len({split for _, split in splits}) > 1:
        for process, split in splits:
            for commit in process.commits():
                found.setdefault(commit.lineage, split)
    return found


def _find_split(process: ProcessHistory) -> DataSplit | None:
    if process.config is None:
        return None
    for event in process.events:
        if isinstance(event, DataOpened):
            if not event.num_shards:
                return None
            shards_per_slot = event.num_shards // process.config.group_size
            return DataSplit(shards_per_slot, event.num_shards)
    return None


@view
def audit(record: RunRecord) -> Audit:
    """Find the lost and the repeated batches of a run."""
    common = Audit(
        unit=record.unit,
        differing=_find_differing(record),
        conflicts=list(record.conflicts),
        unproved=find_reopenings(record).unproved,
    )
    _count_unfinished_rounds(record, common)
    _note_resets(record, common)
    if not record.states:
        common.unknown.append(f"no event tells of a committed {record.unit.noun}")
        return decide(common)
    finals, unknown = record.finals
    common.unknown += [*unknown, *find_gaps(record)]
    audits = [decide(_audit_chain(record, final, common)) for final in finals]
    result = audits[0]
    if len(finals) == 1:
        return result
    # The history leaves open which state was the last: only a verdict that all share is a verdict.
    noun = record.unit.noun
    names = ", ".join(f"{noun} {final.step} ({final.lineage})" for final in finals)
    if len({each.verdict for each in audits}) > 1:
        result.verdict = "unknown"
        result.unknown.append(f"the history does not tell with which state the job ended: {names}")
    else:
        result.notes.append(f"the job ended with one of {names}; the verdict is the same for each")
    return result


def decide(found: Audit) -> Audit:
    """Set the verdict of an audit. Without a finding, anything missing makes it unknown."""
    if not found.num_batches and not found.unknown:
        found.unknown.append(f"no {found.unit.noun} tells of a batch")
    if found.lost or found.repeated or found.differing or found.conflicts:
        found.verdict = "does not hold"
    elif found.unknown or found.unproved:
        found.verdict = "unknown"
    else:
        found.verdict = "holds"
    return found


def _note_resets(record: RunRecord, found: Audit) -> None:
    """Note the resumes after which the numbers of batches stand for other data."""
    resets = record.of(DataReset)
    cannot_compare = "nothing before it compares with it"
    for event in resets:
        if not event.asked:
            text = f"the data began anew at a resume ({event.reason}): {cannot_compare}"
            found.unknown.append(text)
    for step in sorted({event.step for event in resets if event.asked}):
        asked = "as checkpoint.exclude_from_loading asks for"
        text = f"the data began anew after step {step}, {asked}: batches count from there"
        found.notes.append(text)
    for launch in record.of(LaunchStarted):
        changes = _find_data_changes(launch)
        if changes:
            text = f"the data was changed at a resume ({'; '.join(changes)}): {cannot_compare}"
            found.unknown.append(text)


def find_resets(record: RunRecord) -> list[float]:
    """Return the times, in order, from which on a number may stand for another batch."""
    resets = [event.time for event in record.of(DataReset)]
    changes = [event.time for event in record.of(LaunchStarted) if _find_data_changes(event)]
    return sorted([*resets, *changes])


def _find_data_changes(launch: LaunchStarted) -> list[str]:
    """Return the changes of the data that a resume allowed, such as a larger batch."""
    changes = (launch.changed or {}).items()
    return [change.describe(name) for name, change in changes if change.kind == "data"]


class _Reading(NamedTuple):
    """The identity of some batches that a rank read: equal readings must have equal tokens.

    Attributes:
        span: number of resets of the data before the reading.
        split: after another division, a rank of the same number has another shard of the slot.
    """

    span: int
    split: DataSplit | None
    slot: int
    first_batch: int
    num_batches: int
    rank: int


def _find_differing(record: RunRecord) -> list[Finding]:
    """Return the batches that had other tokens when the same rank read them again."""
    resets = find_resets(record)
    splits = find_splits(record)
    # The step at which each reading had each checksum first.
    checksums_of: dict[_Reading, dict[str, int]] = {}
    for event in record.of(StepCommitted):
        split = splits.get(event.lineage)
        span = bisect_right(resets, event.time)
        for data in event.readings():
            reading = _Reading(
                span, split, data.slot, data.first_batch, data.num_batches, event.rank
            )
            checksums = checksums_of.setdefault(reading, {})
            checksums.setdefault(data.checksum, event.step)
    found = []
    noun = record.unit.noun
    for reading, checksums in checksums_of.items():
        if len(checksums) == 1:
            continue
        texts = [f"checksum {checksum} at {noun} {step}" for checksum, step in checksums.items()]
        detail = f"differs when read again by rank {reading.rank} ({', '.join(texts)})"
        steps = tuple(checksums.values())
        found.append(Finding(reading.slot, reading.first_batch, reading.num_batches, steps, detail))
    return found


def _count_unfinished_rounds(record: RunRecord, found: Audit) -> None:
    """Count the batches of rounds that groups left, or within which groups died."""
    reported: dict[tuple[int, int, int, int], Finding] = {}
    noun = record.unit.noun
    for event in record.of(Drained):
        number = event.step + 1
        for batches in event.void or ():
            detail = f"void: group {event.replica} left in {noun} {number}"
            finding = Finding(
                batches.slot, batches.first_batch, batches.num_batches, (number,), detail
            )
            # Each rank of the group reports them. Ranks that drain_timeout_seconds ended may be a
            # step apart: the rank that had read most counts.
            key = event.replica, event.attempt, batches.slot, batches.first_batch
            known = reported.get(key)
            if known is None or finding.num_batches > known.num_batches:
                reported[key] = finding
    found.void += reported.values()
    if not record.unit.method:
        return
    num_rounds = 0
    for step in build_timeline(record).unfinished:
        if not step.kept and not step.is_reported:
            num_rounds += 1
            found.num_cut_short += step.forward_passes
    if found.num_cut_short:
        rounds = record.unit.count(num_rounds)
        about = f"about {found.num_cut_short}, in {rounds}, by the time that there was"
        what = "batches of rounds that ended with their groups"
        found.notes.append(f"{what}: {about}; they are void too, and trained again")


def _audit_chain(record: RunRecord, final: JobState, common: Audit) -> Audit:
    """Audit the trajectory that ends with a state.

    Args:
        common: the findings that hold for every trajectory.
    """
    chain = chain_to(record.states, final)
    found = deepcopy(common)
    found.num_steps = len(chain)
    _find_void(record, chain, found)
    _find_partial_batches(record, chain, found)
    first = chain[0]
    if not _is_whole(chain):
        before = f"the state before {record.unit.noun} {first.step} ({first.parent})"
        found.unknown.append(f"the history is cut: no event tells how {before} was made")
    for state in chain:
        if state.lineage not in record.usual:
            _compare_readings(state, found)
    _ChainCount(record, chain, found).run()
    return found


def _is_whole(chain: Sequence[JobState]) -> bool:
    """Return whether a trajectory begins with step 1 of the job."""
    return chain[0].step == 1 and chain[0].parent == ROOT


def _find_void(record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
    """Add the batches of the states off the trajectory."""
    on_chain = {state.lineage for state in chain}
    noun = record.unit.noun
    for state in sorted(record.states.values(), key=lambda state: state.step):
        # Below a cut of the history it is unknown whether a state is on the trajectory.
        is_before_cut = state.step < chain[0].step
        if state.lineage in on_chain or is_before_cut:
            continue
        detail = f"void at {noun} {state.step} ({state.lineage})"
        for slot, (first, count) in state.batches.items():
            found.void.append(Finding(slot, first, count, (state.step,), detail))


def _find_partial_batches(record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
    """Add the batches that are in the updates of some fragments only."""
    noun = record.unit.noun
    for part in find_partial(record, chain):
        state = part.state
        read = _batches_read(state, part.group)
        if not read:
            # A group that died after its exchange reports nothing. It had read its own slot.
            read = _batches_of({part.group: state.batches.get(part.group, (0, 0))})
        where = f"trained at {noun} {state.step} by group {part.group}"
        detail = f"partial: {where}, in {part.num_exchanged} of {part.num_fragments} fragments"
        for slot, first, count in _ranges(read):
            found.partial.append(Finding(slot, first, count, (state.step,), detail))


_Stream = tuple[int, int]
"""Batches that are numbered together: a slot (or a shard, see `_ChainCount`), and its span."""


class _TrainedRange(NamedTuple):
    """Consecutive batches of a stream that a step trained; sorted by the fields in this order."""

    first: int
    num_batches: int
    step: int
    slot: int


class _ChainCount:
    """Counts the batches of a trajectory, stream by stream, and finds gaps and overlaps.

    In a stream, each step continues with the batch after the last one of the step before. If a
    resume divided the shards into other slots, the streams are the shards, because the numbers of a
    slot then stand for other data. After a reset of the data new streams begin (another span).

    `_audit_chain` makes one for each trajectory and calls `run` once.
    """

    def __init__(self, record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
        self._record = record
        self._chain = chain
        self._found = found
        self._is_whole = _is_whole(chain)
        self._resets = find_resets(record)
        self._splits = find_splits(record)
        known = [self._splits[state.lineage] for state in chain if state.lineage in self._splits]
        self._first_split = known[0] if known else DataSplit(1, 1)
        self._counts_shards = len(set(known)) > 1
        self._num_shards = known[-1].num_shards if known else 1

    def run(self) -> None:
        if self._counts_shards:
            what = f"the same {self._num_shards} shards were cut into other slots at a resume"
            self._found.notes.append(f"{what}: batches count by shard")
        begins, ends, odd = self._find_ends()
        trained = self._collect(odd)
        for stream in sorted(begins):
            if stream not in odd:
                self._found.num_batches += ends[stream] - begins[stream]
                continue
            shard, span = stream
            start = min(trained[stream]).first
            if self._begins_with_batch_0(span):
                start = 0
            name = f"shard {shard} of {self._num_shards}" if self._counts_shards else ""
            _find_gaps_and_overlaps(name, trained[stream], start, self._found)

    def _begins_with_batch_0(self, span: int) -> bool:
        return self._is_whole and span == 0

    def _find_ends(self) -> tuple[dict[_Stream, int], dict[_Stream, int], set[_Stream]]:
        """Return the first batch and the end of each stream, and the streams with a gap or overlap.

        Nearly all streams of a long run continue from batch to batch. Their batches are only
        counted, because a list of all ranges would take too much memory.
        """
        begins: dict[_Stream, int] = {}
        ends: dict[_Stream, int] = {}
        odd: set[_Stream] = set()
        for stream, state, trained in self._ranges_of(_skip_inner_usual(self._record, self._chain)):
            if stream not in begins:
                begins[stream] = 0 if self._begins_with_batch_0(stream[1]) else trained.first
            expected = ends.get(stream, begins[stream])
            # A usual step continues where the step before ended, by the definition of a usual step.
            # The steps between are skipped here, so that its first batch is not the expected one.
            if trained.first != expected and state.lineage not in self._record.usual:
                odd.add(stream)
            ends[stream] = trained.first + trained.num_batches
        return begins, ends, odd

    def _collect(self, streams: set[_Stream]) -> dict[_Stream, list[_TrainedRange]]:
        """Return all ranges of some streams, in the order of the steps."""
        found: dict[_Stream, list[_TrainedRange]] = {stream: [] for stream in streams}
        if streams:
            for stream, _, trained in self._ranges_of(self._chain):
                if stream in streams:
                    found[stream].append(trained)
        return found

    def _ranges_of(
        self, states: Iterable[JobState]
    ) -> Iterator[tuple[_Stream, JobState, _TrainedRange]]:
        """Yield the ranges that some states trained, in order."""
        split = self._first_split
        for state in states:
            split = self._splits.get(state.lineage, split)
            span = bisect_right(self._resets, state.time)
            for slot, (first, count) in state.batches.items():
                if count <= 0:
                    continue
                trained = _TrainedRange(first, count, state.step, slot)
                parts = split.shards(slot) if self._counts_shards else (slot,)
                for part in parts:
                    yield (part, span), state, trained


def _skip_inner_usual(record: RunRecord, chain: Sequence[JobState]) -> Iterator[JobState]:
    """Yield the states of a trajectory; of usual steps in a row only the last."""
    for state, after in pairwise(chain):
        is_inner = state.lineage in record.usual and after.lineage in record.usual
        if not is_inner:
            yield state
    yield chain[-1]


def _find_gaps_and_overlaps(
    shard: str, ranges: Sequence[_TrainedRange], start: int, found: Audit
) -> None:
    """Find the lost and the repeated batches of a stream.

    Args:
        shard: name of the stream if it is a shard; empty if it is a slot.
        ranges: in the order of the steps.
        start: the first batch of the stream.
    """
    noun = found.unit.noun
    in_shard = f" ({shard})" if shard else ""
    end = start
    last_step = 0
    for first, count, step, slot in sorted(ranges):
        if first > end:
            detail = f"lost between {noun}s {last_step} and {step}{in_shard}"
            found.lost.append(Finding(slot, end, first - end, (last_step, step), detail))
        elif first < end:
            once, again = sorted((last_step, step))
            detail = f"trained at {noun} {once} and again at {noun} {again}{in_shard}"
            num_repeated = min(first + count, end) - first
            found.repeated.append(Finding(slot, first, num_repeated, (once, again), detail))
        num_new = first + count - max(first, end)
        found.num_batches += max(0, num_new)
        if first + count > end:
            end = first + count
            last_step = step
    if list(ranges) != sorted(ranges):
        name = shard or f"slot {ranges[0].slot}"
        found.conflicts.append(f"{name}: the batches were not trained in their order")


def _compare_readings(state: JobState, found: Audit) -> None:
    """Compare the batches that a step counts with those that its groups read, as far as known."""
    if _reads_as_counted(state):
        return
    noun = found.unit.noun
    steps = (state.step,)
    counted = _batches_of(state.batches)
    num_readers = Counter[tuple[int, int]]()
    for group in sorted(state.read):
        read = _batches_read(state, group)
        num_readers.update(read)
        for slot, first, count in _ranges(read - counted):
            wrong = Finding(slot, first, count, steps, f"trained by group {group}, not counted")
            found.conflicts.append(f"{noun} {state.step}: {wrong}")
    read_twice = {batch for batch, number in num_readers.items() if number > 1}
    for slot, first, count in _ranges(read_twice):
        detail = f"trained by several groups at {noun} {state.step}"
        found.repeated.append(Finding(slot, first, count, steps, detail))
    all_have_reported = bool(state.participants) and state.participants <= state.read.keys()
    if all_have_reported:
        for slot, first, count in _ranges(counted - num_readers.keys()):
            detail = f"counted at {noun} {state.step}, but read by no group"
            found.lost.append(Finding(slot, first, count, steps, detail))
            found.num_batches -= count


def _reads_as_counted(state: JobState) -> bool:
    """Return whether each participant read the batches of one slot of its own, as the step counts.

    This is true for nearly all steps, and much faster than the comparison of single batches.
    """
    slots = set()
    for read in state.read.values():
        own = {(data.slot, data.first_batch, data.num_batches) for data in read}
        if len(own) != 1:
            return False
        slot, first, count = own.pop()
        if state.batches.get(slot) != (first, count):
            return False
        slots.add(slot)
    all_have_reported = state.participants <= state.read.keys()
    return all_have_reported and len(slots) == len(state.read) == len(state.batches)


def _batches_read(state: JobState, group: int) -> set[tuple[int, int]]:
    """Return each (slot, batch) that a group read for a step."""
    found: set[tuple[int, int]] = set()
    for data in state.read.get(group, ()):
        end = data.first_batch + data.num_batches
        found.update((data.slot, batch) for batch in range(data.first_batch, end))
    return found


def _batches_of(ranges: Mapping[int, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return each (slot, batch) of the first batch and the number of batches of each slot."""
    found: set[tuple[int, int]] = set()
    for slot, (first, count) in ranges.items():
        found.update((slot, batch) for batch in range(first, first + count))
    return found


def _ranges(batches: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Fold (slot, batch) into (slot, first batch, number of batches)."""
    ranges: list[tuple[int, int, int]] = []
    for slot, batch in sorted(batches):
        if ranges:
            last_slot, first, count = ranges[-1]
            if slot == last_slot and batch == first + count:
                ranges[-1] = (slot, first, count + 1)
                continue
        ranges.append((slot, batch, 1))
    return ranges
