# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Audit the data of a run: was every batch on the job's trajectory trained once?

Every commit names the state that it made (`lineage`), the one that it changed (`parent`) and the batches that all
groups trained for it. The job's trajectory is the chain of parents backwards from its final state. Commits off the
chain are void: their updates were thrown away and their batches are due again, so that they are no repeats.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from titan_ft.history.events import Event
from titan_ft.history.failures import contributed, integer, number

Verdict = Literal["holds", "does not hold", "unknown"]
ROOT = "000000000000"  # lineage of the initial state, the parent of step 1
RESTARTS = ("checkpoint_loaded", "rolled_back", "started_anew")  # the job says that it goes on from an earlier state
MAX_FINDINGS_SHOWN = 10


@dataclass(frozen=True)
class Finding:
    """Consecutive batches of one slot, and what is said about them."""

    slot: int
    first_batch: int
    num_batches: int
    steps: tuple[int, ...]
    """Those that trained them, or that tell that nobody did."""
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
    """Steps on the job's trajectory, as far back as the history tells it."""
    num_batches: int = 0
    """Different batches trained there."""
    lost: list[Finding] = field(default_factory=list)
    repeated: list[Finding] = field(default_factory=list)
    differing: list[Finding] = field(default_factory=list)
    """Batches that were other data when they were read again."""
    conflicts: list[str] = field(default_factory=list)
    """Events that contradict each other or the ledger."""
    void: list[Finding] = field(default_factory=list)
    """Batches whose step was thrown away."""
    unknown: list[str] = field(default_factory=list)
    """Why it cannot be told."""
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

    def counts(self) -> str:
        """Return the counts in words."""
        once = max(0, self.num_batches - self.num_repeated)
        return f"{once} trained once, {self.num_lost} lost, {self.num_repeated} repeated, {self.num_void} void"

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain dictionaries, lists and numbers, for JSON."""
        counts = {"num_lost": self.num_lost, "num_repeated": self.num_repeated, "num_void": self.num_void}
        return asdict(self) | counts


@dataclass
class _State:
    """A state that some group committed; the events of all ranks that did so together."""

    lineage: str
    parent: str
    step: int
    time: float  # of its first event
    batches: dict[int, tuple[int, int]] | None = None  # slot -> first batch, number of batches
    participants: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)  # replicas
    read: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # replica -> (slot, batch)


def audit(events: Iterable[Event]) -> Audit:
    """Find the lost and the repeated batches of a run in its events, given in any order."""
    history = sorted(events, key=lambda event: event["time"])
    common = Audit(differing=_differing(history))
    states = _read_states(history, common)
    for event in history:
        if event["event"] == "data_reset":
            reason = event.get("reason") or "no reason given"
            common.unknown.append(f"the data began anew at a resume ({reason}): nothing before it compares with it")
    if not states:
        common.unknown.append("no event tells of a committed step")
        return _decide(common)
    finals = _final_states(states, history, common)
    audits = [_decide(_audit_chain(states, final, history, common)) for final in finals]
    result = audits[0]
    if len(finals) > 1:
        names = ", ".join(f"step {final.step} ({final.lineage})" for final in finals)
        if len({each.verdict for each in audits}) > 1:
            result.verdict = "unknown"
            result.unknown.append(f"the history does not tell with which state the job ended: {names}")
        else:
            result.notes.append(f"the job ended with one of {names}; the verdict is the same for each")
    return result


def _decide(found: Audit) -> Audit:
    """Set the verdict. Nothing found in a history that cannot tell is unknown."""
    if not found.num_batches and not found.unknown:
        found.unknown.append("no step tells of a batch")
    failed = found.lost or found.repeated or found.differing or found.conflicts
    found.verdict = "does not hold" if failed else "unknown" if found.unknown else "holds"
    return found


def _read_states(history: Iterable[Event], found: Audit) -> dict[str, _State]:
    """Return the states that commits made, by lineage; note what is missing from the events or contradicts itself."""
    states: dict[str, _State] = {}
    vague: list[Event] = []
    conflicts: dict[str, str] = {}
    for event in history:
        if event["event"] != "step_committed":
            continue
        lineage, parent, step = event.get("lineage"), event.get("parent"), integer(event, "step")
        if not isinstance(lineage, str) or not isinstance(parent, str) or step < 1:
            vague.append(event)
            continue
        state = states.setdefault(lineage, _State(lineage, parent, step, event["time"]))
        batches = _parse_batches(event.get("batches"))
        if (state.parent, state.step) != (parent, step):
            conflicts[lineage] = f"events disagree about what made the state {lineage}: step {state.step} or {step}"
        if state.batches is not None and batches is not None and batches != state.batches:
            conflicts[lineage] = f"events disagree about the batches of step {step} ({lineage})"
        state.batches = batches if state.batches is None else state.batches
        state.committed.add(integer(event, "replica", -1))
        if contributed(event) and not {"data", "extra_data"}.isdisjoint(event):
            state.participants.update(slot for slot in event["participants"] if isinstance(slot, int))
            read = state.read.setdefault(integer(event, "replica"), set())
            for slot, first, count, _ in _readings(event):
                read.update((slot, batch) for batch in range(first, first + count))
    found.conflicts += conflicts.values()
    if vague:
        where = f"first: step {vague[0].get('step')} of replica {vague[0].get('replica')}"
        found.unknown.append(f"{len(vague)} commits do not name the state that they made ({where})")
    return states


def _parse_batches(value: object) -> dict[int, tuple[int, int]] | None:
    """Return first batch and number of batches per slot, or None where the value tells no such thing."""
    try:
        items = value.items()  # type: ignore[attr-defined]
        batches = {int(slot): (int(first), int(count)) for slot, (first, count) in items}
    except (AttributeError, TypeError, ValueError):
        return None
    return batches if all(first >= 0 and count >= 0 for first, count in batches.values()) else None


def _readings(event: Event) -> Iterator[tuple[int, int, int, object]]:
    """Yield slot, first batch, number of batches and checksum of what a rank read for its step."""
    extra = event.get("extra_data")
    for data in [event.get("data"), *(extra if isinstance(extra, list) else [])]:
        if isinstance(data, Mapping):
            fields = [number(data, name) for name in ("slot", "first_batch", "num_batches")]
            if None not in fields:
                slot, first, count = (int(value or 0) for value in fields)
                yield slot, first, count, data.get("checksum")


def _resets(history: Iterable[Event]) -> list[float]:
    """Return the times at which batches began to be numbered anew."""
    return [event["time"] for event in history if event["event"] == "data_reset"]


def _differing(history: Sequence[Event]) -> list[Finding]:
    """Return the batches of which the same rank read other tokens at another time."""
    resets = _resets(history)
    seen: dict[tuple[int, int, int, int, int], dict[str, int]] = defaultdict(dict)
    for event in history:
        for slot, first, count, checksum in _readings(event):
            if checksum is not None:
                key = (bisect_right(resets, event["time"]), slot, first, count, integer(event, "rank"))
                seen[key].setdefault(str(checksum), integer(event, "step"))
    return [
        Finding(slot, first, count, tuple(sums.values()), f"differs when read again by rank {rank} ({_listed(sums)})")
        for (_, slot, first, count, rank), sums in seen.items()
        if len(sums) > 1
    ]


def _listed(sums: Mapping[str, int]) -> str:
    return ", ".join(f"checksum {checksum} at step {step}" for checksum, step in sums.items())


def _final_states(states: Mapping[str, _State], history: Sequence[Event], found: Audit) -> list[_State]:
    """Return the states that the job may have ended with, the likeliest first; one, unless the history cannot tell."""
    parents = {state.parent for state in states.values()}
    tips = [state for state in states.values() if state.lineage not in parents]
    tips.sort(key=lambda state: (state.step, len(state.committed), state.time), reverse=True)
    restarts = [event for event in history if event["event"] in RESTARTS]
    likeliest = tips[0] if tips else max(states.values(), key=lambda state: state.step)
    while later := [tip for tip in tips if _supersedes(tip, likeliest, states, restarts)]:
        likeliest = later[0]
    finals = [likeliest] + [
        tip
        for tip in tips
        if tip is not likeliest
        # A lower step that is committed last, unannounced, may be a job that went back, or a process that woke up.
        and (tip.step == likeliest.step or tip.time > likeliest.time)
        and not _supersedes(likeliest, tip, states, restarts)
    ]
    ended = {event["lineage"] for event in history if event["event"] == "training_finished" and event.get("lineage")}
    for event in history:
        unseen = event["event"] == "training_finished" and event.get("lineage") not in (None, *states)
        if unseen and integer(event, "step") >= likeliest.step:
            found.unknown.append(f"no event tells of the commit of the final state {event['lineage']}")
    return [final for final in finals if final.lineage in ended] or finals


def _supersedes(new: _State, old: _State, states: Mapping[str, _State], restarts: Iterable[Event]) -> bool:
    """Tell whether the job, after it made `old`, said that it went back to where `new` branches off."""
    restarts = [event for event in restarts if old.time < event["time"] <= new.time]
    if new is old or not restarts:
        return False
    before = {state.lineage for state in _chain(states, old)} | {ROOT}
    first = next((state for state in reversed(_chain(states, new)) if state.parent in before), None)
    return first is not None and any(
        integer(event, "step", -1) == first.step - 1
        and event["time"] <= first.time
        and event.get("lineage") in (None, first.parent)
        for event in restarts
    )


def _chain(states: Mapping[str, _State], final: _State) -> list[_State]:
    """Return the states that led to a final one, that included, in order of step; as far as each parent is known."""
    chain = [final]
    while (parent := states.get(chain[-1].parent)) is not None and parent.step == chain[-1].step - 1:
        chain.append(parent)
    return chain[::-1]


def _audit_chain(states: Mapping[str, _State], final: _State, history: Iterable[Event], common: Audit) -> Audit:
    """Audit the trajectory that ends with a state, on top of what is known of all states."""
    chain = _chain(states, final)
    on_chain = {state.lineage for state in chain}
    whole = chain[0].step == 1 and chain[0].parent == ROOT
    found = Audit(
        num_steps=len(chain),
        differing=list(common.differing),
        conflicts=list(common.conflicts),
        unknown=list(common.unknown),
        void=[
            Finding(slot, first, count, (state.step,), f"void at step {state.step} ({state.lineage})")
            for state in sorted(states.values(), key=lambda state: state.step)
            if state.lineage not in on_chain and state.step >= chain[0].step  # below a cut nobody can tell
            for slot, (first, count) in (state.batches or {}).items()
        ],
    )
    if not whole:
        step, parent = chain[0].step, chain[0].parent
        found.unknown.append(f"the history is cut: no event tells how the state before step {step} ({parent}) was made")
    silent = [state.step for state in chain if state.batches is None]
    if silent:
        found.unknown.append(f"{len(silent)} steps do not tell what they trained (first: step {silent[0]})")
    resets = _resets(history)
    uses: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for state in chain:
        _compare_readings(state, found)
        for slot, (first, count) in (state.batches or {}).items():
            if count > 0:
                # What follows a reset, or a step that tells nothing, does not compare with what was before it.
                span = bisect_right(resets, state.time) + bisect_right(silent, state.step)
                uses[slot, span].append((first, count, state.step))
    for (slot, span), slot_uses in sorted(uses.items()):
        start = 0 if whole and span == 0 else min(slot_uses)[0]
        _count_uses(slot, slot_uses, start, found)
    return found


def _count_uses(slot: int, uses: Sequence[tuple[int, int, int]], start: int, found: Audit) -> None:
    """Find gaps and overlaps in the (first batch, number, step) that the steps, in this order, trained of a slot."""
    end, last = start, 0
    for first, count, step in sorted(uses):
        if first > end:
            detail = f"lost between steps {last} and {step}"
            found.lost.append(Finding(slot, end, first - end, (last, step), detail))
        elif first < end:
            once, again = sorted((last, step))
            detail = f"trained at step {once} and again at step {again}"
            found.repeated.append(Finding(slot, first, min(first + count, end) - first, (once, again), detail))
        found.num_batches += max(0, first + count - max(first, end))
        if first + count > end:
            end, last = first + count, step
    if list(uses) != sorted(uses):
        found.conflicts.append(f"slot {slot}: the batches were not trained in their order")


def _compare_readings(state: _State, found: Audit) -> None:
    """Compare the batches that a step counts with those that its groups read for it, as far as they told."""
    if state.batches is None:
        return
    counted = {(slot, batch) for slot, (first, count) in state.batches.items() for batch in range(first, first + count)}
    for replica, read in sorted(state.read.items()):
        for slot, first, count in _ranges(read - counted):
            wrong = Finding(slot, first, count, (state.step,), f"trained by replica {replica}, not counted")
            found.conflicts.append(f"step {state.step}: {wrong}")
    readers = Counter(batch for read in state.read.values() for batch in read)
    for slot, first, count in _ranges({batch for batch, times in readers.items() if times > 1}):
        detail = f"trained by several groups at step {state.step}"
        found.repeated.append(Finding(slot, first, count, (state.step,), detail))
    if state.participants and state.participants <= state.read.keys():
        for slot, first, count in _ranges(counted - readers.keys()):
            detail = f"counted at step {state.step}, but read by no group"
            found.lost.append(Finding(slot, first, count, (state.step,), detail))
            found.num_batches -= count


def _ranges(batches: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Fold (slot, batch) into (slot, first batch, number of batches)."""
    ranges: list[tuple[int, int, int]] = []
    for slot, batch in sorted(batches):
        if ranges and ranges[-1][0] == slot and sum(ranges[-1][1:]) == batch:
            ranges[-1] = (slot, ranges[-1][1], ranges[-1][2] + 1)
        else:
            ranges.append((slot, batch, 1))
    return ranges


def format_audit(audit: Audit) -> str:
    """Return the audit as a few aligned lines of text."""
    rows = [
        ("every batch once", audit.verdict),
        ("batches", f"{audit.counts()}, in {audit.num_steps} steps"),
    ]
    groups: list[tuple[str, Sequence[Finding | str]]] = [
        ("lost", audit.lost),
        ("repeated", audit.repeated),
        ("differing", audit.differing),
        ("conflict", audit.conflicts),
        ("unknown", audit.unknown),
        ("note", audit.notes),
        ("void", audit.void),
    ]
    for label, findings in groups:
        rows += [(label, str(finding)) for finding in findings[:MAX_FINDINGS_SHOWN]]
        if len(findings) > MAX_FINDINGS_SHOWN:
            rows.append(("", f"... {len(findings) - MAX_FINDINGS_SHOWN} more (--json names them all)"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
