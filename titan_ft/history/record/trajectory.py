# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of a job by its commits: the trajectory to the final state, and the states off it.

A *state* means the parameters and the optimizer state after a step, which all groups share. Each
commit names the state that it made (`lineage`) and the state that it changed (`parent`). The
job's trajectory is the chain of parents from its final state back to the first. Commits off the
chain are void. `titan_ft.history.record.run_record` calls this module.
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

ROOT = "000000000000"
"""Lineage of the initial state, which is the parent of the state after step 1."""
Restart = CheckpointLoaded | RolledBack | StartedAnew
"""Events in which the job announces that it goes on from an earlier state."""


@dataclass(slots=True)
class JobState:
    """A state that some group committed, by the events of all ranks that committed it."""

    lineage: str
    parent: str
    step: int
    time: float
    """Unix seconds of the first of these events."""
    batches: dict[int, tuple[int, int]]
    """First batch and number of batches of each slot."""
    # Nearly all states of a run have the same groups. They share one set, because a set of 30
    # groups takes 2 KB.
    participants: frozenset[int] = frozenset()
    read: dict[int, list[Batches]] = field(default_factory=dict)
    """The batches that all ranks of each group read for it."""


def read_states(
    commits: Iterable[StepCommitted], usual: Collection[str]
) -> tuple[dict[str, JobState], list[str]]:
    """Return the states by lineage, and the contradictions between events.

    Args:
        usual: lineages of usual steps. Their readings are left out, because no checker needs them.
    """
    states: dict[str, JobState] = {}
    disagreements: dict[str, str] = {}
    shared_sets: dict[frozenset[int], frozenset[int]] = {}
    for event in commits:
        lineage, parent, step = event.lineage, event.parent, event.step
        state = states.get(lineage)
        if state is None:
            state = JobState(lineage, parent, step, event.time, event.batches)
            states[lineage] = state
        if state.parent != parent or state.step != step:
            steps = f"step {state.step} or {step}"
            text = f"events disagree about what made the state {lineage}: {steps}"
            disagreements[lineage] = text
        # A long run has millions of commits that share one object of batches. Comparing the objects
        # first makes reading fast.
        are_same_object = event.batches is state.batches
        if not are_same_object and event.batches != state.batches:
            text = f"events disagree about the batches of step {step} ({lineage})"
            disagreements[lineage] = text
        if not event.contributed:
            continue
        if not state.participants.issuperset(event.participants):
            participants = state.participants.union(event.participants)
            state.participants = shared_sets.setdefault(participants, participants)
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
    """Return the states with which the job may have ended, the likeliest first.

    If the history is clear, this is one state. The candidates are the *tips*: states that no commit
    changed. A tip is dropped if the job announced that it went back and then made another tip.

    Args:
        commits_of: the commits of each lineage.
        unknown: gets the reasons for which a final state is missing.
    """
    parents = {state.parent for state in states.values()}
    tips = [state for state in states.values() if state.lineage not in parents]

    def rate_likelihood(tip: JobState) -> tuple[int, int, float]:
        groups = {commit.replica for commit in commits_of[tip.lineage]}
        return tip.step, len(groups), tip.time

    tips.sort(key=rate_likelihood, reverse=True)
    if tips:
        likeliest = tips[0]
    else:
        # A damaged history may have a cycle, in which each state is the parent of another.
        likeliest = max(states.values(), key=lambda state: state.step)
    newer = _find_newer(likeliest, tips, states, restarts)
    while newer is not None:
        likeliest = newer
        newer = _find_newer(likeliest, tips, states, restarts)
    finals = [likeliest]
    for tip in tips:
        if tip is likeliest or _supersedes(likeliest, tip, states, restarts):
            continue
        # A lower step that was committed last, without an announcement, may be the state of a job
        # that went back, or of a process that was frozen and woke up.
        if tip.step == likeliest.step or tip.time > likeliest.time:
            finals.append(tip)
    finished_lineages = set()
    for event in finished:
        finished_lineages.add(event.lineage)
        if event.lineage not in states and event.step >= likeliest.step:
            unknown.append(f"no event tells of the commit of the final state {event.lineage}")
    # A group that finished names its last state.
    announced = [final for final in finals if final.lineage in finished_lineages]
    if announced:
        return announced
    return finals


def _find_newer(
    state: JobState,
    tips: Iterable[JobState],
    states: Mapping[str, JobState],
    restarts: Sequence[Restart],
) -> JobState | None:
    """Return the likeliest tip to which the job went on after it had thrown `state` away."""
    for tip in tips:
        if _supersedes(tip, state, states, restarts):
            return tip
    return None


def _supersedes(
    new: JobState,
    old: JobState,
    states: Mapping[str, JobState],
    restarts: Iterable[Restart],
) -> bool:
    """Return whether the job announced, after it made `old`, a restart where `new` branches off."""
    if new is old:
        return False
    restarts_between = [event for event in restarts if old.time < event.time <= new.time]
    if not restarts_between:
        return False
    lineages_to_old = {state.lineage for state in chain_to(states, old)}
    lineages_to_old.add(ROOT)
    # The first state on the way to `new` that is not on the way to `old`.
    branch: JobState | None = None
    for state in chain_to(states, new):
        if state.parent in lineages_to_old:
            branch = state
    if branch is None:
        return False
    for event in restarts_between:
        if event.time > branch.time:
            continue
        if isinstance(event, CheckpointLoaded):
            # The step of a checkpoint is torchtitan's, also if the job counts rounds: compare
            # lineages.
            is_at_branch = event.lineage == branch.parent
        else:
            is_at_branch = event.step == branch.step - 1
        if is_at_branch:
            return True
    return False


def chain_to(states: Mapping[str, JobState], final: JobState) -> list[JobState]:
    """Return the states that led to a final one, and this one, in order of step.

    The chain begins where the parent is unknown.
    """
    chain = [final]
    while True:
        last = chain[-1]
        parent = states.get(last.parent)
        # A damaged history may name a parent of another step, and even a cycle.
        if parent is None or parent.step != last.step - 1:
            break
        chain.append(parent)
    chain.reverse()
    return chain
