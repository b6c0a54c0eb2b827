# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Audit the data of a run: was every batch on the job's trajectory trained once?

Every commit names the state that it made (`lineage`), the one that it changed (`parent`) and the batches that all
groups trained for it. The job's trajectory is the chain of parents backwards from its final state. Commits off the
chain are void: their updates were thrown away and their batches are due again, so that they are no repeats. With a
semi-synchronous method a commit is a round of several steps, and a group may leave or die in the midst of one: what it
had trained of that is void too. A group that leaves tells its batches; of one that dies only the time is known. Where
each round exchanges a fragment of the model, a group that begins anew has batches that are partial: in the updates of
the fragments that were exchanged since they were trained, and in no other; in none of them twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from titan_ft.history.batches.reopenings import find_reopenings
from titan_ft.history.checks.foundation import find_gaps
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, view
from titan_ft.history.record.trajectory import ROOT, State, chain_to
from titan_ft.history.rounds import find_partial
from titan_ft.history.timing.timeline import timeline
from titan_ft.run.events import DataOpened, DataReset, Drained, LaunchStarted, StepCommitted

Verdict = Literal["holds", "does not hold", "unknown"]


@dataclass(frozen=True)
class Finding:
    """Consecutive batches of one slot, and what was found about them."""

    slot: int
    first_batch: int
    num_batches: int
    steps: tuple[int, ...]
    """Those that trained them, or that show that nobody did."""
    detail: str = ""

    def __str__(self) -> str:
        last = self.first_batch + self.num_batches - 1
        batches = f"batch {last}" if self.num_batches == 1 else f"batches {self.first_batch}-{last}"
        return f"slot {self.slot}, {batches}: {self.detail}"


@dataclass
class Audit:
    """What became of the batches of a run."""

    verdict: Verdict = "unknown"
    """Whether every batch was trained once: "does not hold" beats "unknown", which beats "holds"."""
    num_steps: int = 0
    """Steps, or rounds, on the job's trajectory, as far back as the history goes."""
    unit: Unit = STEP
    """What they are."""
    num_batches: int = 0
    """Different batches trained there."""
    lost: list[Finding] = field(default_factory=list)
    repeated: list[Finding] = field(default_factory=list)
    differing: list[Finding] = field(default_factory=list)
    """Batches that were other data when they were read again."""
    conflicts: list[str] = field(default_factory=list)
    """Events that contradict each other or the ledger."""
    void: list[Finding] = field(default_factory=list)
    """Batches whose step was thrown away, or whose round a group broke off and told so."""
    partial: list[Finding] = field(default_factory=list)
    """Batches that are in the updates of some fragments of the model only, because their group began anew before the
    turn of the others; they are counted as trained."""
    num_cut_short: int = 0
    """Batches of rounds that ended with their groups, untold: about so many, by the time that there was and the groups'
    pace. They are void as well, and trained again."""
    unknown: list[str] = field(default_factory=list)
    """Why there is no verdict."""
    unproved: str = ""
    """Which openings of data may have gone on elsewhere than where they had ended; empty if none may."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        return sum(finding.num_batches for finding in self.lost)

    @property
    def num_repeated(self) -> int:
        """Different batches that were trained more than once."""
        return len({(f.slot, f.first_batch + n) for f in self.repeated for n in range(f.num_batches)})

    @property
    def num_void(self) -> int:
        return sum(finding.num_batches for finding in self.void)

    @property
    def num_partial(self) -> int:
        return sum(finding.num_batches for finding in self.partial)

    def counts(self) -> str:
        """Return the counts in words.

        A number of lost batches that may be wrong is not among them: a reader would take it for a proof.
        """
        once = max(0, self.num_batches - self.num_repeated)
        partial = f" ({self.num_partial} of them partial)" if self.partial else ""
        if (self.unproved or self.differing) and not (self.lost or self.repeated):
            known = f"{once} trained{partial}, {self.num_void} void"
            return f"{known}; whether any were lost or repeated is not known"
        lost = f"{self.num_lost} lost, {self.num_repeated} repeated"
        return f"{once} trained once{partial}, {lost}, {self.num_void} void"

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain dictionaries, lists and numbers, for JSON."""
        counts = {name: getattr(self, name) for name in ("num_lost", "num_repeated", "num_void", "num_partial")}
        return asdict(self) | counts | {"unit": self.unit.noun}


@dataclass(frozen=True)
class Split:
    """How the data were cut while a state was made: a resume may cut the same shards into other slots."""

    parts: int
    """Shards of a slot."""
    of: int
    """Shards of the job."""

    def shards(self, slot: int) -> range:
        return range(slot * self.parts, (slot + 1) * self.parts)


@view
def find_splits(record: RunRecord) -> dict[str, Split]:
    """Return how the data were cut for each state, by lineage, as far as events say so; empty if always alike."""
    cuts: list[tuple[ProcessHistory, Split]] = []
    for process in record.processes:
        opened = next((event for event in process.events if isinstance(event, DataOpened)), None)
        if opened is None or process.config is None or not opened.num_shards:
            continue
        cuts.append((process, Split(opened.num_shards // process.config.group_size, opened.num_shards)))
    found: dict[str, Split] = {}
    if len({split for _, split in cuts}) > 1:
        for process, split in cuts:
            for commit in process.commits():
                found.setdefault(commit.lineage, split)
    return found


@dataclass(frozen=True, order=True)
class _Use:
    """Consecutive batches of a slot or a shard that a step trained."""

    first: int
    count: int
    step: int
    slot: int


@view
def audit(record: RunRecord) -> Audit:
    """Find the lost and the repeated batches of a run."""
    common = Audit(
        unit=record.unit,
        differing=_differing(record),
        conflicts=list(record.conflicts),
        unproved=find_reopenings(record).unproved,
    )
    _count_broken_off(record, common)
    common.unknown += [
        f"the data began anew at a resume ({event.reason}): nothing before it compares with it"
        for event in record.of(DataReset)
        if not event.asked
    ]
    asked = sorted({event.step for event in record.of(DataReset) if event.asked})
    common.notes += [
        f"the data began anew after step {step}, as checkpoint.exclude_from_loading asks for: batches count from there"
        for step in asked
    ]
    common.unknown += [
        f"the data was changed at a resume ({'; '.join(_data_changes(event))}): nothing before it compares with it"
        for event in record.of(LaunchStarted)
        if _data_changes(event)
    ]
    if not record.states:
        common.unknown.append(f"no event tells of a committed {record.unit.noun}")
        return decide(common)
    finals, unknown = record.finals
    common.unknown += [*unknown, *find_gaps(record)]
    audits = [decide(_audit_chain(record, final, common)) for final in finals]
    result = audits[0]
    if len(finals) > 1:
        names = ", ".join(f"{record.unit.noun} {final.step} ({final.lineage})" for final in finals)
        if len({each.verdict for each in audits}) > 1:
            result.verdict = "unknown"
            result.unknown.append(f"the history does not tell with which state the job ended: {names}")
        else:
            result.notes.append(f"the job ended with one of {names}; the verdict is the same for each")
    return result


def decide(found: Audit) -> Audit:
    """Set the verdict. Where nothing was found and something is missing, it is unknown."""
    if not found.num_batches and not found.unknown:
        found.unknown.append(f"no {found.unit.noun} tells of a batch")
    if found.lost or found.repeated or found.differing or found.conflicts:
        found.verdict = "does not hold"
    else:
        found.verdict = "unknown" if found.unknown or found.unproved else "holds"
    return found


def find_resets(record: RunRecord) -> list[float]:
    """Return the times from which on a number may stand for another batch, in order."""
    anew = [event.time for event in record.of(DataReset)]
    changed = [event.time for event in record.of(LaunchStarted) if _data_changes(event)]
    return sorted([*anew, *changed])


def _data_changes(launch: LaunchStarted) -> list[str]:
    """Return the changes of the data that a resume was allowed to make: a batch of twice the size, for example."""
    changed = (launch.changed or {}).items()
    return [change.describe(name) for name, change in changed if change.kind == "data"]


def _differing(record: RunRecord) -> list[Finding]:
    """Return the batches of which the same rank read other tokens at another time."""
    resets = find_resets(record)
    splits = find_splits(record)
    seen: dict[tuple[int, Split | None, int, int, int, int], tuple[str, int]] = {}
    differing: dict[tuple[int, Split | None, int, int, int, int], dict[str, int]] = {}
    for event in record.of(StepCommitted):
        # With another cut, the rank of the same number has another shard of the slot.
        split = splits.get(event.lineage)
        span = bisect_right(resets, event.time)
        for data in event.readings():
            key = span, split, data.slot, data.first_batch, data.num_batches, event.rank
            checksum, step = seen.setdefault(key, (data.checksum, event.step))
            if checksum != data.checksum:
                differing.setdefault(key, {checksum: step}).setdefault(data.checksum, event.step)
    found = []
    noun = record.unit.noun
    for key in filter(differing.__contains__, seen):
        _, _, slot, first, count, rank = key
        steps = differing[key]
        readings = ", ".join(f"checksum {checksum} at {noun} {step}" for checksum, step in steps.items())
        detail = f"differs when read again by rank {rank} ({readings})"
        found.append(Finding(slot, first, count, tuple(steps.values()), detail))
    return found


def _count_broken_off(record: RunRecord, found: Audit) -> None:
    """Count what groups had trained of rounds that they left in the midst of, and of those that ended with them."""
    told: dict[tuple[int, ...], Finding] = {}
    for event in record.of(Drained):
        for each in event.void or ():
            number = event.step + 1
            detail = f"void: group {event.replica} left in {record.unit.noun} {number}"
            finding = Finding(each.slot, each.first_batch, each.num_batches, (number,), detail)
            # Each rank of a group tells them; those that drain_timeout_seconds has ended may be a step apart.
            key = event.replica, event.attempt, each.slot, each.first_batch
            told[key] = max(told.get(key, finding), finding, key=lambda each: each.num_batches)
    found.void += told.values()
    cut = [one for one in timeline(record).unfinished if not (one.kept or one.told)] if record.unit.method else []
    found.num_cut_short = sum(one.forward_passes for one in cut)
    if found.num_cut_short:
        about = f"about {found.num_cut_short}, in {record.unit.count(len(cut))}, by the time that there was"
        found.notes.append(
            f"batches of rounds that ended with their groups: {about}; they are void too, and trained again"
        )


def _audit_chain(record: RunRecord, final: State, common: Audit) -> Audit:
    """Audit the trajectory that ends with a state, on top of what is known of all states."""
    chain = chain_to(record.states, final)
    on_chain = {state.lineage for state in chain}
    whole = chain[0].step == 1 and chain[0].parent == ROOT
    found = deepcopy(common)
    found.num_steps = len(chain)
    noun = record.unit.noun
    found.void += [
        Finding(slot, first, count, (state.step,), f"void at {noun} {state.step} ({state.lineage})")
        for state in sorted(record.states.values(), key=lambda state: state.step)
        if state.lineage not in on_chain and state.step >= chain[0].step  # below a cut of the history it is unknown
        for slot, (first, count) in state.batches.items()
    ]
    for part in find_partial(record, chain):
        state = part.state
        # A group that died behind its exchange tells no more what it had read: its own slot's, then.
        read = _batches_read(state, part.group)
        if not read:
            read = _batches_of({part.group: state.batches.get(part.group, (0, 0))})
        detail = f"partial: trained at {noun} {state.step} by group {part.group}, in {part.has} of {part.of} fragments"
        found.partial += [Finding(*batches, (state.step,), detail) for batches in _ranges(read)]
    if not whole:
        step, parent = chain[0].step, chain[0].parent
        text = f"the history is cut: no event tells how the state before {noun} {step} ({parent}) was made"
        found.unknown.append(text)
    resets = find_resets(record)
    splits = find_splits(record)
    is_cut_anew = len({splits[lineage] for lineage in on_chain & splits.keys()}) > 1
    split = next((splits[state.lineage] for state in chain if state.lineage in splits), Split(1, 1))
    for state in chain:
        if state.lineage not in record.usual:
            _compare_readings(state, found)

    def uses(states: Iterable[State]) -> Iterator[tuple[tuple[int, int], int, int, State, int]]:
        """Yield shard and span, first batch, number of batches, state and slot of all that some states trained."""
        cut = split
        for state in states:
            cut = splits.get(state.lineage, cut)
            # What follows a reset does not compare with what was before it.
            span = bisect_right(resets, state.time)
            for slot, (first, count) in state.batches.items():
                if count > 0:
                    for shard in cut.shards(slot) if is_cut_anew else (slot,):
                        yield (shard, span), first, count, state, slot

    if is_cut_anew:
        of = next((splits[state.lineage] for state in reversed(chain) if state.lineage in splits), split).of
        found.notes.append(f"the same {of} shards were cut into other slots at a resume: batches count by shard")
    # Of a long run nearly all shards are trained from batch to batch: these are only counted.
    begins: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    odd: dict[tuple[int, int], list[_Use]] = {}
    for key, first, count, state, _ in uses(_ends_of_usual(record, chain)):
        begin = begins.setdefault(key, 0 if whole and key[1] == 0 else first)
        # Each slot of a usual step goes on with the batch after those of the step before.
        if first != ends.get(key, begin) and state.lineage not in record.usual:
            odd[key] = []
        ends[key] = first + count
    if odd:
        for key, first, count, state, slot in uses(chain):
            if key in odd:
                odd[key].append(_Use(first, count, state.step, slot))
    for key in sorted(begins):
        shard, span = key
        if key not in odd:
            found.num_batches += ends[key] - begins[key]
            continue
        start = 0 if whole and span == 0 else min(odd[key]).first
        _count_uses(f"shard {shard} of {of}" if is_cut_anew else "", odd[key], start, found)
    return found


def _ends_of_usual(record: RunRecord, chain: Sequence[State]) -> Iterator[State]:
    """Yield the states of a trajectory, of usual ones in a row only the last."""
    for state, after in pairwise(chain):
        if state.lineage not in record.usual or after.lineage not in record.usual:
            yield state
    yield chain[-1]


def _count_uses(shard: str, uses: Sequence[_Use], start: int, found: Audit) -> None:
    """Find gaps and overlaps in what the steps, in this order, trained of a slot, or of a shard that has a name."""
    end, last = start, 0
    addition = f" ({shard})" if shard else ""
    for use in sorted(uses):
        first, count, step = use.first, use.count, use.step
        if first > end:
            detail = f"lost between {found.unit.noun}s {last} and {step}{addition}"
            found.lost.append(Finding(use.slot, end, first - end, (last, step), detail))
        elif first < end:
            once, again = sorted((last, step))
            detail = f"trained at {found.unit.noun} {once} and again at {found.unit.noun} {again}{addition}"
            found.repeated.append(Finding(use.slot, first, min(first + count, end) - first, (once, again), detail))
        found.num_batches += max(0, first + count - max(first, end))
        if first + count > end:
            end, last = first + count, step
    if list(uses) != sorted(uses):
        found.conflicts.append(f"{shard or f'slot {uses[0].slot}'}: the batches were not trained in their order")


def _compare_readings(state: State, found: Audit) -> None:
    """Compare the batches that a step counts with those that its groups read for it, as far as known."""
    if _reads_as_counted(state):
        return
    counted = _batches_of(state.batches)
    readers = Counter[tuple[int, int]]()
    for replica in sorted(state.read):
        read = _batches_read(state, replica)
        readers.update(read)
        for slot, first, count in _ranges(read - counted):
            wrong = Finding(slot, first, count, (state.step,), f"trained by group {replica}, not counted")
            found.conflicts.append(f"{found.unit.noun} {state.step}: {wrong}")
    for slot, first, count in _ranges({batch for batch, times in readers.items() if times > 1}):
        detail = f"trained by several groups at {found.unit.noun} {state.step}"
        found.repeated.append(Finding(slot, first, count, (state.step,), detail))
    if state.participants and state.participants <= state.read.keys():
        for slot, first, count in _ranges(counted - readers.keys()):
            detail = f"counted at {found.unit.noun} {state.step}, but read by no group"
            found.lost.append(Finding(slot, first, count, (state.step,), detail))
            found.num_batches -= count


def _reads_as_counted(state: State) -> bool:
    """Return whether each participant read one slot's batches, as the step counts them, and no two the same slot's."""
    slots = set()
    for read in state.read.values():
        own = {(data.slot, data.first_batch, data.num_batches) for data in read}
        if len(own) != 1:
            return False
        slot, first, count = own.pop()
        if state.batches.get(slot) != (first, count):
            return False
        slots.add(slot)
    return len(slots) == len(state.read) == len(state.batches) and state.participants <= state.read.keys()


def _batches_read(state: State, replica: int) -> set[tuple[int, int]]:
    """Return each (slot, batch) that a group read for a step."""
    return {
        (data.slot, batch)
        for data in state.read.get(replica, ())
        for batch in range(data.first_batch, data.first_batch + data.num_batches)
    }


def _batches_of(batches: Mapping[int, tuple[int, int]]) -> set[tuple[int, int]]:
    """Return each (slot, batch) of first batches and numbers of batches by slot."""
    return {(slot, batch) for slot, (first, count) in batches.items() for batch in range(first, first + count)}


def _ranges(batches: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Fold (slot, batch) into (slot, first batch, number of batches)."""
    ranges: list[tuple[int, int, int]] = []
    for slot, batch in sorted(batches):
        if ranges and ranges[-1][0] == slot and sum(ranges[-1][1:]) == batch:
            ranges[-1] = (slot, ranges[-1][1], ranges[-1][2] + 1)
        else:
            ranges.append((slot, batch, 1))
    return ranges
