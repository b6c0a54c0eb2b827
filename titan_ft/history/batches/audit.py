# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Audit the data of a run: was every batch on the job's trajectory trained once?

The data of a job is cut into *shards*, and each replica group owns a share of them, its *slot*. The
batches of a slot are numbered from 0 on. If a group is away, another group may train the batches of
its slot, so a batch is known by its slot and its number, and not by its group. Groups that die,
come back or resume must neither skip a number nor train it twice.

Each commit of a step names the state that it made (`lineage`), the state that it changed (`parent`)
and the batches that all groups trained for it. The job's *trajectory* is the chain of parents from
its final state back to the first. With a semi-synchronous method, "step" below is a round of
several local steps.

`audit` works in this order:

1. Collect the findings that do not depend on the trajectory: readings of one batch that differ,
   contradictions between events, unfinished rounds, resets of the data.
2. Follow the trajectory from each state with which the job may have ended. Usually this is one.
3. On each trajectory, compare the batches that each step counts with the batches that its groups
   read, and find gaps and overlaps between the steps (`_BatchCounter`).
4. Decide the verdict. If the trajectories have different verdicts, it is "unknown".

Besides lost and repeated batches there are two kinds that break no promise:

- *Void* batches belong to commits off the trajectory. Their updates were thrown away and the job
  has to train their batches again, so this is no repetition. Batches of a round that a group left
  unfinished are void as well. A group that leaves on request reports these batches. For a group
  that dies, their number is estimated from the time.
- *Partial* batches exist if each round exchanges only one fragment of the model, in turn. A group
  that starts again loses its changes of the fragments that it has not exchanged yet. So its batches
  are in the updates of the other fragments only.

`titan-ft check` and `report` call `audit` after the run or while it goes on. See docs/data.md.
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
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, once_per_record
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
    """The steps that trained the batches; of lost ones the steps before and after them."""
    detail: str = ""
    """The finding in words."""

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
    """Estimated number of batches of rounds in which their group died, by the time and the group's
    pace. These batches are void, and other steps train them again.
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
        num_once = max(0, self.num_batches - self.num_repeated)
        partial = ""
        if self.partial:
            partial = f" ({self.num_partial} of them partial)"
        void = f"{self.num_void} void"
        has_offence = bool(self.lost) or bool(self.repeated)
        # A number may have stood for other data.
        may_be_wrong = bool(self.unproved) or bool(self.differing)
        if may_be_wrong and not has_offence:
            known = f"{num_once} trained{partial}, {void}"
            return f"{known}; whether any were lost or repeated is not known"
        lost = f"{self.num_lost} lost, {self.num_repeated} repeated"
        return f"{num_once} trained once{partial}, {lost}, {void}"

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
    """The division of the data into shards and slots.

    A resume with another number of groups divides the same shards into other slots. From then on
    batch 7 of slot 0 is other data.
    """

    shards_per_slot: int
    num_shards: int
    """Shards of the whole job."""

    def shards(self, slot: int) -> range:
        first = slot * self.shards_per_slot
        return range(first, first + self.shards_per_slot)


@once_per_record
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
    different_splits = {split for _, split in splits}
    if len(different_splits) <= 1:
        return {}
    split_of: dict[str, DataSplit] = {}
    for process, split in splits:
        for commit in process.commits():
            split_of.setdefault(commit.lineage, split)
    return split_of


def _find_split(process: ProcessHistory) -> DataSplit | None:
    """Return the division of the data for a process; None if its events do not have it."""
    if process.config is None:
        return None
    for event in process.events:
        if not isinstance(event, DataOpened):
            continue
        if not event.num_shards:
            return None
        shards_per_slot = event.num_shards // process.config.group_size
        return DataSplit(shards_per_slot, event.num_shards)
    return None


@once_per_record
def audit(record: RunRecord) -> Audit:
    """Find the lost and the repeated batches of a run; see the head of this module."""
    for_all_trajectories = Audit(
        unit=record.unit,
        differing=_find_differing(record),
        conflicts=list(record.conflicts),
        unproved=find_reopenings(record).unproved,
    )
    _add_unfinished_rounds(record, for_all_trajectories)
    _note_resets(record, for_all_trajectories)
    noun = record.unit.noun
    if not record.states:
        for_all_trajectories.unknown.append(f"no event tells of a committed {noun}")
        decide_verdict(for_all_trajectories)
        return for_all_trajectories
    for_all_trajectories.unknown += record.missing_finals
    for_all_trajectories.unknown += find_gaps(record)
    audits = []
    for final in record.finals:
        found = _audit_trajectory(record, final, for_all_trajectories)
        decide_verdict(found)
        audits.append(found)
    likeliest = audits[0]
    if len(audits) == 1:
        return likeliest
    # The history leaves open which state was the last. The job has a verdict only if the
    # trajectories of all these states have the same one.
    names = ", ".join(f"{noun} {final.step} ({final.lineage})" for final in record.finals)
    verdicts = {found.verdict for found in audits}
    if len(verdicts) == 1:
        note = f"the job ended with one of {names}; the verdict is the same for each"
        likeliest.notes.append(note)
    else:
        likeliest.verdict = "unknown"
        reason = f"the history does not tell with which state the job ended: {names}"
        likeliest.unknown.append(reason)
    return likeliest


def decide_verdict(found: Audit) -> None:
    """Set the verdict by the findings. Without a finding, anything missing makes it unknown."""
    if not found.num_batches and not found.unknown:
        found.unknown.append(f"no {found.unit.noun} tells of a batch")
    if found.lost or found.repeated or found.differing or found.conflicts:
        found.verdict = "does not hold"
    elif found.unknown or found.unproved:
        found.verdict = "unknown"
    else:
        found.verdict = "holds"


def _note_resets(record: RunRecord, found: Audit) -> None:
    """Note the resumes after which a number stands for another batch than before.

    A reset that the user asked for is only noted. After any other reset the verdict is unknown.
    """
    cannot_compare = "nothing before it compares with it"
    asked_steps = set()
    for event in record.of(DataReset):
        if event.asked:
            asked_steps.add(event.step)
        else:
            text = f"the data began anew at a resume ({event.reason}): {cannot_compare}"
            found.unknown.append(text)
    # Each rank has an event of the reset: one note for all of them.
    for step in sorted(asked_steps):
        asked = "as checkpoint.exclude_from_loading asks for"
        text = f"the data began anew after step {step}, {asked}: batches count from there"
        found.notes.append(text)
    for launch in record.of(LaunchStarted):
        changes = _find_data_changes(launch)
        if changes:
            text = f"the data was changed at a resume ({'; '.join(changes)}): {cannot_compare}"
            found.unknown.append(text)


def find_resets(record: RunRecord) -> list[float]:
    """Return the Unix seconds, in order, from which on a number may stand for another batch."""
    resets = [event.time for event in record.of(DataReset)]
    changes = [event.time for event in record.of(LaunchStarted) if _find_data_changes(event)]
    return sorted([*resets, *changes])


def _find_data_changes(launch: LaunchStarted) -> list[str]:
    """Return the changes of the data that a resume allowed, such as a larger batch."""
    found = []
    for name, change in (launch.changed or {}).items():
        if change.kind == "data":
            found.append(change.describe(name))
    return found


class _Reading(NamedTuple):
    """The identity of some batches that a rank read: equal readings must have equal tokens.

    Attributes:
        num_resets: resets of the data before the reading; a number stands for another batch then.
        split: after another division, a rank of the same number has another shard of the slot.
    """

    num_resets: int
    split: DataSplit | None
    slot: int
    first_batch: int
    num_batches: int
    rank: int


def _find_differing(record: RunRecord) -> list[Finding]:
    """Return the batches that had other tokens when the same rank read them again."""
    resets = find_resets(record)
    splits = find_splits(record)
    # For each reading its different checksums, each with the first step that reported it.
    checksums_of: dict[_Reading, dict[str, int]] = {}
    for event in record.of(StepCommitted):
        split = splits.get(event.lineage)
        num_resets = bisect_right(resets, event.time)
        for data in event.readings():
            reading = _Reading(
                num_resets, split, data.slot, data.first_batch, data.num_batches, event.rank
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


def _add_unfinished_rounds(record: RunRecord, found: Audit) -> None:
    """Add the void batches of rounds that a group did not finish, because it left or died."""
    found.void += _find_reported_void(record)
    if not record.unit.method:
        return  # without local steps, no update was made from the batches of an unfinished step
    num_rounds = 0
    for unfinished in build_timeline(record).unfinished:
        if unfinished.is_committed or unfinished.is_reported:
            continue
        num_rounds += 1
        found.num_cut_short += unfinished.forward_passes
    if found.num_cut_short:
        rounds = record.unit.count(num_rounds)
        about = f"about {found.num_cut_short}, in {rounds}, by the time that there was"
        subject = "batches of rounds that ended with their groups"
        found.notes.append(f"{subject}: {about}; they are void too, and trained again")


def _find_reported_void(record: RunRecord) -> list[Finding]:
    """Return the batches that groups had read for a step when they left on request."""
    noun = record.unit.noun
    # Every rank of a group reports the same batches: they count once.
    reported: dict[tuple[int, int, int, int], Finding] = {}
    for event in record.of(Drained):
        step = event.step + 1
        detail = f"void: group {event.replica} left in {noun} {step}"
        for data in event.void or ():
            finding = Finding(data.slot, data.first_batch, data.num_batches, (step,), detail)
            key = event.replica, event.attempt, data.slot, data.first_batch
            known = reported.get(key)
            # The timeout of the request (`drain_timeout_seconds`) ends ranks at any moment, so one
            # rank may have read more batches than another: take the longest report.
            if known is None or finding.num_batches > known.num_batches:
                reported[key] = finding
    return list(reported.values())


def _audit_trajectory(record: RunRecord, final: JobState, for_all_trajectories: Audit) -> Audit:
    """Return the audit of the trajectory that ends with the state `final`, without its verdict.

    Args:
        for_all_trajectories: the findings that do not depend on the trajectory.
    """
    chain = chain_to(record.states, final)
    found = deepcopy(for_all_trajectories)
    found.num_steps = len(chain)
    _add_void(record, chain, found)
    _add_partial(record, chain, found)
    first = chain[0]
    if not _begins_with_the_job(chain):
        before = f"the state before {record.unit.noun} {first.step} ({first.parent})"
        found.unknown.append(f"the history is cut: no event tells how {before} was made")
    for state in chain:
        # A usual step is one of many like it in a long run, of which the record keeps one commit.
        # Its readings were compared when the record was made.
        if state.lineage not in record.usual_lineages:
            _compare_readings(state, found)
    _BatchCounter(record, chain, found).run()
    return found


def _begins_with_the_job(chain: Sequence[JobState]) -> bool:
    """Return whether a trajectory begins with step 1 of the job; otherwise the history is cut."""
    return chain[0].step == 1 and chain[0].parent == ROOT


def _add_void(record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
    """Add the batches of the states off the trajectory."""
    on_chain = {state.lineage for state in chain}
    noun = record.unit.noun
    for state in sorted(record.states.values(), key=lambda state: state.step):
        if state.lineage in on_chain:
            continue
        if state.step < chain[0].step:
            continue  # before a cut of the history; this state may have been on the trajectory
        detail = f"void at {noun} {state.step} ({state.lineage})"
        for slot, (first, count) in state.batches.items():
            found.void.append(Finding(slot, first, count, (state.step,), detail))


def _add_partial(record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
    """Add the batches that are in the updates of some fragments of the model only."""
    noun = record.unit.noun
    for partial in find_partial(record, chain):
        state = partial.state
        batches = _batches_read(state, partial.group)
        if not batches and partial.group in state.batches:
            # A group that died after its exchange reports nothing. It had read its own slot, which
            # has the group's number.
            batches = _single_batches({partial.group: state.batches[partial.group]})
        where = f"trained at {noun} {state.step} by group {partial.group}"
        fragments = f"in {partial.num_exchanged} of {partial.num_fragments} fragments"
        detail = f"partial: {where}, {fragments}"
        for slot, first, count in _merge_into_ranges(batches):
            found.partial.append(Finding(slot, first, count, (state.step,), detail))


class _Stream(NamedTuple):
    """Batches that are numbered together.

    Attributes:
        part: a slot; or a shard, if a resume divided the shards into other slots.
        num_resets: resets of the data before; each one begins new streams.
    """

    part: int
    num_resets: int


class _TrainedRange(NamedTuple):
    """Consecutive batches that a step trained. Ranges sort by these fields, the first one first."""

    first: int
    num_batches: int
    step: int
    slot: int

    @property
    def end(self) -> int:
        """The number after the last batch."""
        return self.first + self.num_batches


class _BatchCounter:
    """Counts the batches of a trajectory, stream by stream, and finds gaps and overlaps.

    In a stream, each step should continue with the batch after the last one of the step before. If
    a resume divided the shards into other slots, a number in a slot stands for other data, so each
    shard is a stream of its own.

    `_audit_trajectory` makes one for each trajectory and calls `run` once.
    """

    def __init__(self, record: RunRecord, chain: Sequence[JobState], found: Audit) -> None:
        self._record = record
        self._chain = chain
        self._found = found
        self._resets = find_resets(record)
        self._splits = find_splits(record)
        known_lineages = [state.lineage for state in chain if state.lineage in self._splits]
        splits_of_chain = [self._splits[lineage] for lineage in known_lineages]
        self._counts_shards = len(set(splits_of_chain)) > 1
        # Without any known division the streams are slots, and these two values are never used.
        self._first_split = DataSplit(1, 1)
        self._num_shards = 1
        if splits_of_chain:
            self._first_split = splits_of_chain[0]
            self._num_shards = splits_of_chain[-1].num_shards

    def run(self) -> None:
        """Set the number of batches, and add the lost and the repeated ones to the audit."""
        if self._counts_shards:
            subject = f"the same {self._num_shards} shards were cut into other slots at a resume"
            self._found.notes.append(f"{subject}: batches count by shard")
        begins, ends, broken_streams = self._scan()
        ranges_of = self._collect_ranges(broken_streams)
        for stream in sorted(begins):
            if stream not in broken_streams:
                self._found.num_batches += ends[stream] - begins[stream]
                continue
            ranges = ranges_of[stream]
            if self._must_begin_with_0(stream):
                start = 0
            else:
                start = min(ranges).first
            shard_name = ""
            if self._counts_shards:
                shard_name = f"shard {stream.part} of {self._num_shards}"
            _add_gaps_and_overlaps(shard_name, ranges, start, self._found)

    def _must_begin_with_0(self, stream: _Stream) -> bool:
        """Return whether batch 0 of a stream must have been trained on this trajectory.

        After a cut of the history, or a reset of the data, a stream may begin with any batch.
        """
        return stream.num_resets == 0 and _begins_with_the_job(self._chain)

    def _scan(self) -> tuple[dict[_Stream, int], dict[_Stream, int], set[_Stream]]:
        """Return the first batch and the end of each stream, and the streams with a gap or overlap.

        Nearly all streams of a long run continue from batch to batch. For these streams the first
        batch and the end are enough. A list of all ranges would take too much memory.
        """
        begins: dict[_Stream, int] = {}
        ends: dict[_Stream, int] = {}
        broken_streams: set[_Stream] = set()
        states = _skip_usual_in_between(self._record, self._chain)
        for stream, state, trained in self._trained_ranges(states):
            if stream not in begins:
                first = trained.first
                if self._must_begin_with_0(stream):
                    first = 0
                begins[stream] = first
                ends[stream] = first
            # A usual step continues where the step before it ended, by the definition of a usual
            # step. The comparison below would not show that, because `states` has only the last of
            # several usual steps in a row.
            is_usual = state.lineage in self._record.usual_lineages
            if trained.first != ends[stream] and not is_usual:
                broken_streams.add(stream)
            ends[stream] = trained.end
        return begins, ends, broken_streams

    def _collect_ranges(self, streams: set[_Stream]) -> dict[_Stream, list[_TrainedRange]]:
        """Return all ranges of some streams, in the order of the steps."""
        found: dict[_Stream, list[_TrainedRange]] = {stream: [] for stream in streams}
        if not streams:
            return found
        for stream, _, trained in self._trained_ranges(self._chain):
            if stream in streams:
                found[stream].append(trained)
        return found

    def _trained_ranges(
        self, states: Iterable[JobState]
    ) -> Iterator[tuple[_Stream, JobState, _TrainedRange]]:
        """Yield the batches that the steps of some states trained, in order, with their stream."""
        split = self._first_split
        for state in states:
            # A state without an event about the division has the division of the state before.
            split = self._splits.get(state.lineage, split)
            num_resets = bisect_right(self._resets, state.time)
            for slot, (first, count) in state.batches.items():
                if count <= 0:
                    continue
                trained = _TrainedRange(first, count, state.step, slot)
                parts: Iterable[int] = (slot,)
                if self._counts_shards:
                    parts = split.shards(slot)
                for part in parts:
                    yield _Stream(part, num_resets), state, trained


def _skip_usual_in_between(record: RunRecord, chain: Sequence[JobState]) -> Iterator[JobState]:
    """Yield the states of a trajectory, but of several usual steps in a row only the last one."""
    for state, after in pairwise(chain):
        is_followed_by_usual = (
            state.lineage in record.usual_lineages and after.lineage in record.usual_lineages
        )
        if not is_followed_by_usual:
            yield state
    yield chain[-1]


def _add_gaps_and_overlaps(
    shard_name: str, ranges: Sequence[_TrainedRange], start: int, found: Audit
) -> None:
    """Add the lost and the repeated batches of a stream, and count its batches.

    Args:
        shard_name: empty if the stream is a slot.
        ranges: in the order of the steps.
        start: the first batch of the stream.
    """
    noun = found.unit.noun
    in_shard = ""
    if shard_name:
        in_shard = f" ({shard_name})"
    # All batches before `end` are trained or reported as lost; `last_step` trained the last one.
    end = start
    last_step = 0
    by_number = sorted(ranges)
    for trained in by_number:
        first, _, step, slot = trained
        if first > end:
            detail = f"lost between {noun}s {last_step} and {step}{in_shard}"
            found.lost.append(Finding(slot, end, first - end, (last_step, step), detail))
        elif first < end:
            earlier_step, later_step = sorted((last_step, step))
            once = f"trained at {noun} {earlier_step}"
            detail = f"{once} and again at {noun} {later_step}{in_shard}"
            num_repeated = min(trained.end, end) - first
            steps = (earlier_step, later_step)
            found.repeated.append(Finding(slot, first, num_repeated, steps, detail))
        if trained.end > end:
            found.num_batches += trained.end - max(first, end)
            end = trained.end
            last_step = step
    if list(ranges) != by_number:
        name = shard_name or f"slot {ranges[0].slot}"
        found.conflicts.append(f"{name}: the batches were not trained in their order")


class _Batch(NamedTuple):
    """One batch, by its slot and its number in the slot."""

    slot: int
    number: int


def _compare_readings(state: JobState, found: Audit) -> None:
    """Compare the batches that a step counts with those that its groups report to have read."""
    if _reads_as_counted(state):
        return
    noun = found.unit.noun
    steps = (state.step,)
    counted = _single_batches(state.batches)
    num_readers = Counter[_Batch]()
    for group in sorted(state.read):
        read = _batches_read(state, group)
        num_readers.update(read)
        for slot, first, count in _merge_into_ranges(read - counted):
            wrong = Finding(slot, first, count, steps, f"trained by group {group}, not counted")
            found.conflicts.append(f"{noun} {state.step}: {wrong}")
    read_twice = {batch for batch, number in num_readers.items() if number > 1}
    for slot, first, count in _merge_into_ranges(read_twice):
        detail = f"trained by several groups at {noun} {state.step}"
        found.repeated.append(Finding(slot, first, count, steps, detail))
    # A participant that died after the exchange reports nothing, and may have read the batches.
    all_have_reported = bool(state.participants) and state.participants <= state.read.keys()
    if not all_have_reported:
        return
    for slot, first, count in _merge_into_ranges(counted - num_readers.keys()):
        detail = f"counted at {noun} {state.step}, but read by no group"
        found.lost.append(Finding(slot, first, count, steps, detail))
        # `_BatchCounter` will count these batches, because the step counts them.
        found.num_batches -= count


def _reads_as_counted(state: JobState) -> bool:
    """Return whether each participant read the batches of one slot of its own, as the step counts.

    This is true for nearly all steps, and much faster than the comparison of single batches.
    """
    if not state.participants <= state.read.keys():
        return False
    slots = set()
    for readings in state.read.values():
        ranges = {(data.slot, data.first_batch, data.num_batches) for data in readings}
        # All ranks of the group must have read the same batches of one slot.
        if len(ranges) != 1:
            return False
        slot, first, count = ranges.pop()
        if state.batches.get(slot) != (first, count):
            return False
        slots.add(slot)
    has_slot_of_its_own = len(slots) == len(state.read)
    are_all_counted_read = len(slots) == len(state.batches)
    return has_slot_of_its_own and are_all_counted_read


def _batches_read(state: JobState, group: int) -> set[_Batch]:
    """Return each batch that a group read for a step."""
    found: set[_Batch] = set()
    for data in state.read.get(group, ()):
        for number in range(data.first_batch, data.first_batch + data.num_batches):
            found.add(_Batch(data.slot, number))
    return found


def _single_batches(ranges: Mapping[int, tuple[int, int]]) -> set[_Batch]:
    """Return each batch of some ranges.

    Args:
        ranges: the first number, and the number of batches, of each slot.
    """
    found: set[_Batch] = set()
    for slot, (first, count) in ranges.items():
        for number in range(first, first + count):
            found.add(_Batch(slot, number))
    return found


def _merge_into_ranges(batches: Iterable[_Batch]) -> list[tuple[int, int, int]]:
    """Return consecutive batches as (slot, first number, number of batches)."""
    ranges: list[tuple[int, int, int]] = []
    for slot, number in sorted(batches):
        if ranges:
            last_slot, first, count = ranges[-1]
            if slot == last_slot and number == first + count:
                ranges[-1] = (slot, first, count + 1)
                continue
        ranges.append((slot, number, 1))
    return ranges
