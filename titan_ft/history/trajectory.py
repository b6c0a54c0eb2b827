# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow the states of a job through its commits: what led to the final one, and what was thrown away.

Every commit names the state that it made (`lineage`) and the one that it changed (`parent`). The job's trajectory is
the chain of parents backwards from its final state; commits off the chain are void.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_ft.history.events import Event
from titan_ft.history.failures import contributed, integer, number

ROOT = "000000000000"  # lineage of the initial state, the parent of step 1
RESTARTS = ("checkpoint_loaded", "rolled_back", "started_anew")  # the job says that it goes on from an earlier state


@dataclass
class State:
    """A state that some group committed; the events of all ranks that did so together."""

    lineage: str
    parent: str
    step: int
    time: float  # of its first event
    batches: dict[int, tuple[int, int]] | None = None  # slot -> first batch, number of batches
    participants: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)  # replicas
    read: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # replica -> (slot, batch)


def read_states(history: Iterable[Event], conflicts: list[str], unknown: list[str]) -> dict[str, State]:
    """Return the states that commits made, by lineage; note what is missing from the events or contradicts itself."""
    states: dict[str, State] = {}
    vague: list[Event] = []
    disagreements: dict[str, str] = {}
    raw: dict[str, object] = {}
    for event in history:
        if event["event"] != "step_committed":
            continue
        lineage, parent, step = event.get("lineage"), event.get("parent"), integer(event, "step")
        if not isinstance(lineage, str) or not isinstance(parent, str) or step < 1:
            vague.append(event)
            continue
        state = states.setdefault(lineage, State(lineage, parent, step, event["time"]))
        told = event.get("batches")
        # Nearly always what the first rank told: not parsed again.
        batches = state.batches if raw.setdefault(lineage, told) == told and state.committed else _parse_batches(told)
        if (state.parent, state.step) != (parent, step):
            disagreements[lineage] = f"events disagree about what made the state {lineage}: step {state.step} or {step}"
        if state.batches is not None and batches is not None and batches != state.batches:
            disagreements[lineage] = f"events disagree about the batches of step {step} ({lineage})"
        state.batches = batches if state.batches is None else state.batches
        state.committed.add(integer(event, "replica", -1))
        if contributed(event) and not {"data", "extra_data"}.isdisjoint(event):
            state.participants.update(slot for slot in event["participants"] if isinstance(slot, int))
            read = state.read.setdefault(integer(event, "replica"), set())
            for slot, first, count, _ in readings(event):
                read.update((slot, batch) for batch in range(first, first + count))
    conflicts += disagreements.values()
    if vague:
        where = f"first: step {vague[0].get('step')} of replica {vague[0].get('replica')}"
        unknown.append(f"{len(vague)} commits do not name the state that they made ({where})")
    return states


def _parse_batches(value: object) -> dict[int, tuple[int, int]] | None:
    """Return first batch and number of batches per slot, or None where the value tells no such thing."""
    try:
        items = value.items()  # type: ignore[attr-defined]
        batches = {int(slot): (int(first), int(count)) for slot, (first, count) in items}
    except (AttributeError, TypeError, ValueError):
        return None
    return batches if all(first >= 0 and count >= 0 for first, count in batches.values()) else None


def readings(event: Event) -> Iterator[tuple[int, int, int, object]]:
    """Yield slot, first batch, number of batches and checksum of what a rank read for its step."""
    extra = event.get("extra_data")
    for data in [event.get("data"), *(extra if isinstance(extra, list) else [])]:
        if isinstance(data, Mapping):
            fields = [number(data, name) for name in ("slot", "first_batch", "num_batches")]
            if None not in fields:
                slot, first, count = (int(value or 0) for value in fields)
                yield slot, first, count, data.get("checksum")


def final_states(states: Mapping[str, State], history: Sequence[Event], unknown: list[str]) -> list[State]:
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
            unknown.append(f"no event tells of the commit of the final state {event['lineage']}")
    return [final for final in finals if final.lineage in ended] or finals


def _supersedes(new: State, old: State, states: Mapping[str, State], restarts: Iterable[Event]) -> bool:
    """Tell whether the job, after it made `old`, said that it went back to where `new` branches off."""
    restarts = [event for event in restarts if old.time < event["time"] <= new.time]
    if new is old or not restarts:
        return False
    before = {state.lineage for state in chain_to(states, old)} | {ROOT}
    first = next((state for state in reversed(chain_to(states, new)) if state.parent in before), None)
    return first is not None and any(
        integer(event, "step", -1) == first.step - 1
        and event["time"] <= first.time
        and event.get("lineage") in (None, first.parent)
        for event in restarts
    )


def chain_to(states: Mapping[str, State], final: State) -> list[State]:
    """Return the states that led to a final one, that included, in order of step; as far as each parent is known."""
    chain = [final]
    while (parent := states.get(chain[-1].parent)) is not None and parent.step == chain[-1].step - 1:
        chain.append(parent)
    return chain[::-1]
