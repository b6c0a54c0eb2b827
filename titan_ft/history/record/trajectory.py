# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow the states of a job through its commits: what led to the final one, and what was thrown away.

Every commit names the state that it made (`lineage`) and the one that it changed (`parent`). The job's trajectory is
the chain of parents backwards from its final state; commits off the chain are void.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan_ft.run.events import (
    Batches,
    CheckpointLoaded,
    RolledBack,
    StartedAnew,
    StepCommitted,
    TrainingFinished,
)

ROOT = "000000000000"  # lineage of the initial state, the parent of step 1
Restart = CheckpointLoaded | RolledBack | StartedAnew  # the job says that it goes on from an earlier state


@dataclass(slots=True)
class JobState:
    """A state that some group committed; the events of all ranks that did so together."""

    lineage: str
    parent: str
    step: int
    time: float  # of its first event
    batches: dict[int, tuple[int, int]]  # slot -> first batch, number of batches
    # Nearly all states of a run have the same groups: they share one set, for a set of 30 takes 2 KB.
    participants: frozenset[int] = frozenset()
    read: dict[int, list[Batches]] = field(default_factory=dict)  # replica -> of all its ranks


def read_states(commits: Iterable[StepCommitted], usual: Collection[str]) -> tuple[dict[str, JobState], list[str]]:
    """Return the states that commits made, by lineage, and where events contradict each other.

    Args:
        usual: lineages of usual steps, of which nobody asks who read what.
    """
    states: dict[str, JobState] = {}
    disagreements: dict[str, str] = {}
    pool: dict[frozenset[int], frozenset[int]] = {}
    for event in commits:
        lineage, parent, step = event.lineage, event.parent, event.step
        state = states.get(lineage)
        if state is None:
            state = states[lineage] = JobState(lineage, parent, step, event.time, event.batches)
        if state.parent != parent or state.step != step:
            disagreements[lineage] = f"events disagree about what made the state {lineage}: step {state.step} or {step}"
        if event.batches is not state.batches and event.batches != state.batches:
            disagreements[lineage] = f"events disagree about the batches of step {step} ({lineage})"
        if event.contributed:
            if not state.participants.issuperset(event.participants):
                participants = state.participants.union(event.participants)
                state.participants = pool.setdefault(participants, participants)
            if lineage not in usual:
                state.read.setdefault(event.replica, []).extend(event.readings())
    return states, list(disagreements.values())


def final_states(
    states: Mapping[str, JobState],
    commits_of: Mapping[str, Sequence[StepCommitted]],
    restarts: Sequence[Restart],
    finished: Sequence[TrainingFinished],
    unknown: list[str],
) -> list[JobState]:
    """Return the states that the job may have ended with, the likeliest first; one, if the history is clear."""
    parents = {state.parent for state in states.values()}
    tips = [state for state in states.values() if state.lineage not in parents]

    def rank(tip: JobState) -> tuple[int, int, float]:
        groups = {commit.replica for commit in commits_of[tip.lineage]}
        return tip.step, len(groups), tip.time

    tips.sort(key=rank, reverse=True)
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
    ended = {event.lineage for event in finished}
    unknown += [
        f"no event tells of the commit of the final state {event.lineage}"
        for event in finished
        if event.lineage not in states and event.step >= likeliest.step
    ]
    return [final for final in finals if final.lineage in ended] or finals


def _supersedes(new: JobState, old: JobState, states: Mapping[str, JobState], restarts: Iterable[Restart]) -> bool:
    """Tell whether the job, after it made `old`, said that it went back to where `new` branches off."""
    restarts = [event for event in restarts if old.time < event.time <= new.time]
    if new is old or not restarts:
        return False
    before = {state.lineage for state in chain_to(states, old)} | {ROOT}
    first = next((state for state in reversed(chain_to(states, new)) if state.parent in before), None)
    return first is not None and any(
        event.time <= first.time
        # A checkpoint's step is torchtitan's, which is another number where the job counts rounds.
        and (event.lineage == first.parent if isinstance(event, CheckpointLoaded) else event.step == first.step - 1)
        for event in restarts
    )


def chain_to(states: Mapping[str, JobState], final: JobState) -> list[JobState]:
    """Return the states that led to a final one, that included, in order of step; as far as each parent is known."""
    chain = [final]
    while (parent := states.get(chain[-1].parent)) is not None and parent.step == chain[-1].step - 1:
        chain.append(parent)
    return chain[::-1]
