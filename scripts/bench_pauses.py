# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long the groups that go on stand still when another one leaves or returns, or their lighthouse is away.

All is read from one run's events. A usual step is the median of the survivor's last steps before the disturbance, in
which all groups trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench_commits import from_events
from bench_kills import NUM_GAPS, SURVIVOR, VICTIM, Kill, first_return
from bench_run import BenchError

from titan_ft.run.events import Drained, Event, HealFinished, HealStarted, LighthouseRestarted, ReplicaRestarted

Gap = tuple[float, float]
USUAL_STEPS = 20
"""Steps of which the median is the usual step."""
MIN_STEPS = 5
"""Fewest whole steps within a transfer of which a median says something."""


@dataclass(frozen=True)
class Pause:
    """How long a group's commits stood still.

    Attributes:
        seconds: the longest gap between two of them, less a usual step.
        steps: the same in usual steps.
        usual_seconds: of a usual step.
    """

    seconds: float
    steps: float
    usual_seconds: float


@dataclass(frozen=True)
class Rejoin:
    """What the return of a group cost the survivor.

    Attributes:
        transfer_seconds: from the start of the fetch until the joiner has the state, with the replay.
        transfer_steps: the same in usual steps.
        steps_made: that the survivor committed meanwhile.
        step_ratio: median step meanwhile / usual step; None with too few whole steps for a median.
        stall: from the start of the fetch until the joiner contributes.
        return_stall: of this, around the moment at which the joiner has the state, and later.
        replayed: updates that the joiner replayed.
    """

    transfer_seconds: float
    transfer_steps: float
    steps_made: int
    step_ratio: float | None
    stall: Pause
    return_stall: Pause
    replayed: int


@dataclass(frozen=True)
class Drain:
    """What a group that was asked to leave cost the survivor.

    Attributes:
        leave_seconds: from the signal until the group had finished its last step.
        in_order: whether it finished that step.
    """

    stall: Pause
    leave_seconds: float
    in_order: bool


@dataclass(frozen=True)
class Outage:
    """What the death of the lighthouse cost the group hit hardest.

    Attributes:
        away_seconds: that the launcher was without a lighthouse that listens.
        num_restarts: of groups meanwhile.
    """

    stall: Pause
    away_seconds: float
    num_restarts: int


def commit_times(events: Sequence[Event], replica: int) -> list[float]:
    """Return when a group committed."""
    return [commit.time for commit in from_events(events, replica).commits]


def usual_seconds(times: Sequence[float], until: float) -> float:
    """Return the seconds of a usual step before a moment.

    Raises:
        BenchError: there was none.
    """
    before = [time for time in times if time <= until][-USUAL_STEPS - 1 :]
    if len(before) < 2:
        raise BenchError("no step was committed before what was to be measured")
    return median(after - before for before, after in pairwise(before))


def pause(gaps: Sequence[Gap], usual: float) -> Pause:
    """Return how much longer than usual the longest gap is.

    Raises:
        BenchError: there is no gap, because the group never committed again.
    """
    if not gaps:
        raise BenchError("the survivor committed nothing after what was to be measured")
    seconds = max(after - before for before, after in gaps) - usual
    return Pause(seconds, seconds / usual, usual)


def pause_around(times: Sequence[float], begin: float, end: float) -> Pause:
    """Return the pause of what happened from `begin` to `end`.

    As at a kill, it may show only some steps later: the step under way may still pass.
    """
    gaps = list(pairwise(times))
    later = [gap for gap in gaps if gap[0] > end][: NUM_GAPS - 1]
    return pause([gap for gap in gaps if gap[1] >= begin and gap[0] <= end] + later, usual_seconds(times, begin))


def measure_rejoin(events: Sequence[Event], kill: Kill) -> Rejoin:
    """Return what the victim's return after a kill cost the survivor.

    Raises:
        BenchError: it did not return.
    """
    victim = [e for e in events if e.replica == VICTIM and e.rank == 0 and (e.attempt or 0) > kill.attempt]
    done = next((event for event in victim if isinstance(event, HealFinished)), None)
    back = first_return(from_events(victim, VICTIM).commits, kill)
    if done is None or back is None:
        raise BenchError("the group that was killed did not contribute again")
    # Of several fetches (the first donor may fail) the last is the one that finished.
    begin = max(event.time for event in victim if isinstance(event, HealStarted) and event.time <= done.time)
    end = done.time
    times = commit_times(events, SURVIVOR)
    usual, gaps = usual_seconds(times, kill.time), list(pairwise(times))
    around = [gap for gap in gaps if gap[1] >= begin and gap[0] <= back.time]
    whole = [after - before for before, after in gaps if before >= begin and after <= end]
    return Rejoin(
        transfer_seconds=end - begin,
        transfer_steps=(end - begin) / usual,
        steps_made=sum(begin <= time <= end for time in times),
        step_ratio=median(whole) / usual if len(whole) >= MIN_STEPS else None,
        stall=pause(around, usual),
        return_stall=pause([gap for gap in around if gap[1] > end and not _waited_through(gap, begin, end)], usual),
        replayed=done.replayed,
    )


def _waited_through(gap: Gap, begin: float, end: float) -> bool:
    """Tell whether a gap is a wait for the transfer, though its commit may come a moment after the transfer's end."""
    return min(gap[1], end) - max(gap[0], begin) > (end - begin) / 2


def measure_drain(events: Sequence[Event], signalled: float) -> Drain:
    """Return what it cost the survivor that the victim was asked to leave.

    Raises:
        BenchError: it did not say that it left.
    """
    drained = next((e for e in events if isinstance(e, Drained) and e.replica == VICTIM), None)
    if drained is None:
        raise BenchError("the group that was asked to leave did not")
    stall = pause_around(commit_times(events, SURVIVOR), signalled, drained.time)
    return Drain(stall, drained.time - signalled, drained.in_order)


def measure_outage(events: Sequence[Event], killed: float) -> Outage:
    """Return what the death of the lighthouse at a moment cost the group hit hardest.

    Raises:
        BenchError: the lighthouse did not come back.
    """
    back = next((e for e in events if isinstance(e, LighthouseRestarted) and e.time > killed), None)
    if back is None:
        raise BenchError("the lighthouse did not come back")
    stalls = [pause_around(commit_times(events, group), killed, back.time) for group in (SURVIVOR, VICTIM)]
    restarts = [e for e in events if isinstance(e, ReplicaRestarted) and killed <= e.time <= back.time + 5.0]
    return Outage(max(stalls, key=lambda stall: stall.seconds), back.seconds, len(restarts))
