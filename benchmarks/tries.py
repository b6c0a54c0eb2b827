# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The peer's events of tried steps, and their translation to this project's own events.

After the translation the same code reads runs of the peer and ours, with one definition of a stall,
of an attempted exchange, and of effective training time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from titan_ft.run.events import (
    Event,
    ExchangeFailed,
    RankEvent,
    StartedAnew,
    StepCommitted,
    WorkerExited,
    WorkerStarted,
)


class StepTried(RankEvent, kw_only=True):
    """The peer has tried a step: one forward and backward pass, and a vote. With DiLoCo, a round of
    passes.

    Attributes:
        step: its number, from 1.
        committed: True if the step was committed.
        contributed: True if it was committed with this group's gradients: the group was not
            healing.
        inner_steps: passes of a round.
        own_loss: this rank's share of the mean loss of its group; torchtitan logs the sum over all
            groups.
        digest: hash of this rank's part of the weights, hex; only for some steps.
    """

    step: int
    committed: bool
    contributed: bool
    own_loss: float | None
    digest: str | None = None
    inner_steps: int = 1


class InnerStepMade(RankEvent, kw_only=True):
    """The peer has made one of the steps of a round, whatever becomes of the round."""


State = tuple[int, int]
"""How often the job's state had been lost before, and the step after which it is."""


def translate(events: Sequence[Event]) -> list[Event]:
    """Return events, in order of time, with a peer's tries and restarts translated to this
    project's events.

    A try without a commit becomes a failed exchange. The peer's launcher reports nothing, so a
    group's attempt ends at the start of the next one.
    """
    tries = [event for event in events if isinstance(event, StepTried)]
    if not tries:
        return list(events)
    states = _states(tries)
    makers: dict[State, set[int]] = defaultdict(set)
    for event, state in zip(tries, states, strict=True):
        if event.contributed:
            makers[state].add(event.replica)
    losses = _losses(tries, states)
    found = [*events, *_ends(events)]
    begun, failed = {0}, defaultdict[tuple[int, int, int], int](int)
    for event, state in zip(tries, states, strict=True):
        who, head = (event.replica, event.rank, event.step), _header(event)
        if not event.committed:
            failed[who] += 1
            found.append(
                ExchangeFailed(**head, error="not committed", seconds=0.0, step=event.step - 1)
            )
            continue
        if state[0] not in begun:
            begun.add(state[0])
            found.append(StartedAnew(**head, step=0))
        found.append(
            _commit(event, state, sorted(makers[state]), losses.get(state), 1 + failed.pop(who, 0))
        )
    return sorted(found, key=lambda event: event.time)


def _states(tries: Sequence[StepTried]) -> list[State]:
    """Return the state that each try made, or would have made.

    A group that returns heals to the others' step before it commits. So a commit far below the
    committed steps means that no group was left to heal from, and the job began again.
    """
    lost, top, states = 0, 0, []
    for event in tries:
        if event.committed:
            if event.step < top - 2:
                lost, top = lost + 1, 0
            top = max(top, event.step)
        states.append((lost, event.step))
    return states


def _losses(tries: Sequence[StepTried], states: Sequence[State]) -> dict[State, float]:
    """Return the mean loss of each state over the groups with the shares of all ranks."""
    shares: dict[State, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event, state in zip(tries, states, strict=True):
        if event.contributed and event.own_loss is not None:
            shares[state][event.replica].append(event.own_loss)
    num_ranks = max(event.rank for event in tries) + 1
    whole = {
        state: [sum(g) for g in groups.values() if len(g) == num_ranks]
        for state, groups in shares.items()
    }
    return {state: fmean(losses) for state, losses in whole.items() if losses}


def _ends(events: Sequence[Event]) -> list[Event]:
    """Return the end of each attempt of a group that was followed by another one."""
    latest: dict[int, WorkerStarted] = {}
    found: list[Event] = []
    for event in events:
        if isinstance(event, WorkerStarted):
            last = latest.setdefault(event.replica, event)
            if event.attempt > last.attempt:
                head = {**_header(event), "rank": last.rank, "attempt": last.attempt}
                end: dict[str, Any] = {
                    "reason": "the next attempt started",
                    "stopped": False,
                    "signal": "SIGKILL",
                }
                found.append(WorkerExited(**head, worker_pid=last.pid, **end))
                latest[event.replica] = event
    return found


def _commit(
    event: StepTried, state: State, participants: list[int], loss: float | None, tries: int
) -> StepCommitted:
    lost, step = state
    absent: dict[str, Any] = dict.fromkeys(("tokens", "own_tokens"), 0) | dict.fromkeys(
        ("grad_norm", "lr", "data")
    )
    absent |= dict.fromkeys(
        ("seconds", "exchange_seconds", "compute_seconds", "apply_seconds"), 0.0
    )
    return StepCommitted(
        **_header(event),
        **absent,
        step=step,
        lineage=_lineage(state),
        parent=_lineage((lost, step - 1) if step > 1 else (0, 0)),
        participants=participants,
        loss=loss,
        own_loss=event.own_loss,
        exchanges=tries,
        forward_passes=1,
        extra_data=[],
        batches={},
        digest=event.digest,
    )


def _lineage(state: State) -> str:
    lost, step = state
    return f"{lost:04x}{step:08x}"  # of the initial state all zeros, as in this project


def _header(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Event.__struct_fields__}
