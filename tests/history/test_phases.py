# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of a group on the report's page, folded from the fine ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.history.histories import calm_run, commit, killed_run, say
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.phases import StateSpan, add_up_spans, find_state_spans
from titan_ft.history.report.style import DETAILS, STATES
from titan_ft.run.events import Waited


def phases(events: list[Any], group: int) -> list[StateSpan]:
    """Return a group's phases, after checking that they cover the run."""
    record = RunRecord(events)
    found = list(find_state_spans(record)[group])
    assert (found[0].start_us, found[-1].end_us) == record.span_us
    assert all(before.end_us == after.start_us for before, after in pairwise(found))
    assert {each.state for each in found} <= STATES.keys()
    assert {each.fine_state for each in found} <= DETAILS.keys()
    return found


def spans(found: list[StateSpan]) -> list[tuple[str, float]]:
    """Return the states in their order, and how many seconds each lasted."""
    joined: list[tuple[str, float]] = []
    for each in found:
        seconds = each.num_us / 1e6
        if joined and joined[-1][0] == each.state:
            seconds += joined.pop()[1]
        joined.append((each.state, round(seconds, 3)))
    return joined


def test_calm_run_trains() -> None:
    """Exchanges of usual length are no waiting, so there is no stripe in every step."""
    assert spans(phases(calm_run(), 0)) == [("starting", 9.0), ("training", 10.0), ("ended", 1.0)]


def test_killed_group_is_lost_starts_and_recovers() -> None:
    """The group is lost until its next process appears, starts until it asks to join, then
    recovers.
    """
    found = spans(phases(killed_run(), 1))
    assert [state for state, _ in found] == [
        "starting",
        "training",
        "lost",
        "starting",
        "recovering",
        "training",
    ]
    assert dict(found)["lost"] == 0.2
    assert dict(found)["recovering"] == 2.0


def test_survivor_waits_because_of_the_killed_group() -> None:
    """The survivor's wait names the group and the fault."""
    waits = [each for each in phases(killed_run(), 0) if each.state == "waiting"]
    assert waits
    assert all("because of group 1 (kill_group)" in each.detail for each in waits)
    assert not [each for each in phases(killed_run(), 1) if "because of" in each.detail]


def test_commit_says_for_whom_a_group_waited() -> None:
    """A commit's own statement outranks the incidents' guess."""
    events = killed_run()
    for event in events:
        if event.name == "step_committed" and event.step == 4:
            event.waits = [Waited(slot=1, seconds=1.9, why="lost")]
    waits = [each for each in phases(events, 0) if each.state == "waiting"]
    assert waits
    assert all(each.detail.endswith("for group 1 (lost)") for each in waits)


def test_exchange_far_beyond_the_usual_is_waiting() -> None:
    """The others wait for a slow group, although no exchange broke."""
    events = calm_run(9)[:-1]
    events = [event for event in events if event.name != "training_finished"]
    events += [commit(24.0, 10, group, exchange_seconds=5.2, seconds=6.0) for group in (0, 1)]
    found = spans(phases(events, 0))
    assert ("waiting", 5.2) in found


def test_group_that_gave_up_is_lost() -> None:
    """A group that gave up is lost, and not "finished or left", to the end of the run."""
    events = [event for event in killed_run() if event.replica != 1 or event.time < 1e9 + 12.7]
    events += [say(12.7, "replica_gave_up", 1, reason="out of restarts", log="", error="")]
    events += [say(30.0, "launch_finished", code=0)]
    found = spans(phases(sorted(events, key=lambda event: event.time), 1))
    assert found[-1] == ("lost", 17.5)


def test_time_adds_up_by_state() -> None:
    """A state's time is the sum of its fine states'."""
    spent = add_up_spans(phases(killed_run(), 0))
    assert spent["training"].num_us == spent["training"].parts.total()
    assert set(spent["training"].parts) <= {"productive", "overhead", "exchange_wait", "wasted"}
