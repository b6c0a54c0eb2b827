# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The cost of faults and failures: one definition of a stall, and the same number in every view."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import figures
from tests.history.histories import calm_run, commit, fault, killed_run, say
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.cards import find_cards
from titan_ft.history.report.facts import report_figures
from titan_ft.history.report.page import write_report
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.incidents import (
    Incident,
    StallCause,
    TimedCommit,
    attribute_stalls,
    find_drains,
    find_failures,
    find_incidents,
)
from titan_ft.run.events import Event, StepCommitted


def stalls(events: Iterable[Event]) -> list[Incident]:
    """Return the faults and failures of a run."""
    return [incident for incident in find_incidents(RunRecord(events)) if incident.is_listed]


def test_every_view_shows_the_same_stall(tmp_path: Path) -> None:
    """Terminal, page, JSON, goodput and the campaign's table show the same seconds of one
    failure.
    """
    events = sorted(killed_run(), key=lambda event: event.time)
    record = RunRecord(events)
    (incident,) = find_incidents(record)
    assert incident.stall_seconds == pytest.approx(2.0)
    shown = report_figures(record)
    assert shown["stalls"][0]["stall_seconds"] == incident.stall_seconds
    assert shown["failures"][0]["stall_seconds"] == incident.stall_seconds
    assert (
        shown["goodput"]["mean_stall_seconds"]
        == measure_goodput(record).mean_stall_seconds
        == incident.stall_seconds
    )
    assert shown["failures"][0]["rejoin_seconds"] == shown["stalls"][0]["rejoin_seconds"] == 6.5
    assert shown["failures"][0]["heal"] == shown["stalls"][0]["heal"]
    text = text_of(make_summary_table(summarize(record)))
    assert "survivors stalled 2.00 s, contributing again after 6.50 s" in text
    page = write_report(record, tmp_path).read_text(encoding="utf-8")
    assert '<div class="value">2.00 s</div>' in page
    assert '<td class="number">2.00</td><td class="number">6.50</td>' in page
    assert figures(record)["stall per failure (s), median (max)"] == "2.00 (2.00)"


def test_stall_of_a_kill() -> None:
    """A fault's stall is the survivors' wait beyond a usual step; its group returns with its
    contribution.
    """
    (stall,) = stalls(killed_run())
    assert (stall.fault, stall.injected, stall.replicas, stall.ended) == (
        "kill_group",
        True,
        (1,),
        True,
    )
    assert stall.stall_seconds == pytest.approx(2.0)
    assert stall.rejoin_seconds == pytest.approx(19.0 - 12.5)
    assert stall.heal is not None
    assert (stall.heal.donor, stall.heal.replayed) == (0, 2)


def test_death_without_a_fault() -> None:
    """A group that dies by itself is a failure too, named by what ended it."""
    (stall,) = stalls(event for event in killed_run() if event.name != "fault_injected")
    assert (stall.fault, stall.injected, stall.replicas) == ("SIGKILL", False, (1,))
    assert stall.stall_seconds == pytest.approx(2.0)


def test_stall_counts_once() -> None:
    """Of two faults the one before the stall's beginning has it; one during the stall has none of
    its own.
    """
    events = killed_run()
    events += [fault(10.5, "slow_rank", 1, shot=7), fault(14.5, "kill_lighthouse", shot=8)]
    found = {stall.fault: stall.stall_seconds for stall in stalls(events)}
    assert found == {"slow_rank": 0.0, "kill_group": pytest.approx(2.0), "kill_lighthouse": 0.0}


def test_fault_that_comes_while_a_step_is_late() -> None:
    """A stall that no fault precedes belongs to the first fault during it."""
    events = [event for event in killed_run() if event.name != "fault_injected"]
    events = [
        e for e in events if e.name not in ("worker_exited", "replica_restarted", "exchange_failed")
    ]
    for event in events:
        if event.name == "step_committed":
            event.participants = [0, 1]  # nobody dropped out
    events.append(fault(13.5, "kill_lighthouse", shot=1))
    (stall,) = stalls(events)
    assert stall.stall_seconds == pytest.approx(2.0)
    assert stall.replicas == ()


def test_one_shot_that_hits_several_groups_is_one_incident() -> None:
    """Two groups killed by one shot are one incident, which ends when both are back."""
    events = [
        *killed_run(),
        fault(12.52, "kill_group", 2, shot=0),
        say(12.8, "worker_exited", 2, signal="SIGKILL"),
    ]
    (stall,) = stalls(events)
    assert stall.replicas == (1, 2)
    assert stall.rejoin_seconds is None


def test_no_survivor_no_stall() -> None:
    """Without another group's commits before and after a fault its stall is unknown, not zero."""
    events = [event for event in killed_run() if event.replica != 0]
    (stall,) = stalls(events)
    assert stall.stall_seconds is None
    assert measure_goodput(RunRecord(events)).mean_stall_seconds is None


def begun_run() -> list[Event]:
    """Return the first three steps of a run of two groups."""
    return [
        event for event in calm_run(3) if event.name not in ("training_finished", "launch_finished")
    ]


STOP = fault(12.5, "stop_group", 1, shot=0, params={"seconds": 4})


def test_group_that_is_waited_for_has_not_failed() -> None:
    """The others wait while a group stands still. It was never away, so it has no time to
    return.
    """
    events = [*begun_run(), STOP, *(commit(17.0, 4, replica, seconds=5.0) for replica in (0, 1))]
    (stall,) = stalls(events)
    assert (stall.ended, stall.failures) == (False, ())
    assert stall.stall_seconds == pytest.approx(4.0)
    assert (stall.rejoin_seconds, stall.heal) == (None, None)
    assert (find_failures(RunRecord(events)), measure_goodput(RunRecord(events)).num_failures) == (
        [],
        0,
    )


@pytest.mark.parametrize(("cause", "name"), [(STOP, "stop_group"), (None, "dropped out")])
def test_group_that_the_others_go_on_without_has_failed(cause: Event | None, name: str) -> None:
    """A live group without participation is away from its last step, or from the fault, until it
    contributes.
    """
    events = [
        *begun_run(),
        *(commit(14.5 + step, 4 + step, 0, participants=[0]) for step in range(4)),
    ]
    events += [say(18.0, "heal_finished", 1, donor=0, from_step=7, step=7, bytes=9, seconds=1.0)]
    events += [
        *(commit(19.0, 8, replica) for replica in (0, 1)),
        *([] if cause is None else [cause]),
    ]
    (incident,) = stalls(events)
    (failure,) = find_failures(RunRecord(events))
    assert (incident.fault, incident.injected, incident.replicas) == (name, cause is not None, (1,))
    assert (failure.replica, failure.cause, failure.away) == (1, name, True)
    assert (
        failure.rejoin_seconds
        == incident.rejoin_seconds
        == pytest.approx(7.0 if cause is None else 6.5)
    )
    assert failure.stall_seconds == incident.stall_seconds == pytest.approx(1.5)
    assert failure.heal is not None
    assert failure.heal == incident.heal


@pytest.mark.parametrize(
    ("told", "name", "category"),
    [
        ({"event": "peer_silent", "slots": [1], "seconds": 2.0}, "silent", "network"),
        ({"event": "link_dead", "slots": [1]}, "out of reach", "network"),
        ({"event": "digest_mismatch", "step": 3, "minority": [1]}, "other digest", "wrong numbers"),
    ],
)
def test_what_was_seen_of_a_group_that_dropped_out(
    told: dict[str, Any], name: str, category: str
) -> None:
    """A failure without a fault is named by the others' observation."""
    kind = told.pop("event")
    events = [*begun_run(), say(14.0, kind, 0, **told), commit(14.5, 4, 0, participants=[0])]
    (failure,) = find_failures(RunRecord(events))
    assert (failure.cause, failure.rejoin_seconds) == (name, None)
    (incident,) = stalls(events)
    assert incident.category == category


@pytest.mark.parametrize(
    ("end", "category"),
    [
        (say(12.6, "agent_ended", 1, signal="SIGKILL"), "process killed"),
        (say(12.6, "agent_ended", 1, code=1), "error raised"),
        (say(12.6, "worker_exited", 1, signal="SIGSEGV"), "process killed"),
        (say(12.6, "worker_exited", 1, code=7), "error raised"),
        (say(12.6, "worker_exited", 1, code=1, error="SIGNAL: lost"), "error raised"),
        (say(12.6, "worker_exited", 1, code=1, error="Boom"), "error raised"),
    ],
)
def test_category_of_an_end_that_nobody_injected(end: Event, category: str) -> None:
    """The category follows from the signal or the exit code, whatever the exception's name is."""
    away = commit(14.5, 4, 0, participants=[0])
    (incident,) = stalls([*begun_run(), end, away])
    assert incident.category == category


def test_an_exchange_that_broke_is_a_failure_of_no_group() -> None:
    """A fault in a connection has failed where an exchange had to be repeated with the same
    groups.
    """
    events = [*begun_run(), *(commit(14.0, 4, replica, exchanges=2) for replica in (0, 1))]
    events += [
        say(13.2, "exchange_failed", replica, error="closed", seconds=0.1, step=3)
        for replica in (0, 1)
    ]
    (failure,) = find_failures(RunRecord(events))
    assert (failure.replica, failure.cause, failure.away, failure.rejoin_seconds) == (
        None,
        "exchange broke",
        False,
        None,
    )
    (incident,) = stalls([*events, fault(13.1, "link_reset", 1, shot=0)])
    assert (incident.fault, [each.cause for each in incident.failures]) == (
        "link_reset",
        ["link_reset"],
    )
    assert incident.rejoin_seconds is None


def test_terminal_page_and_figures_count_the_same_failures() -> None:
    """A fault without a failure is among the faults, and in no count of failures."""
    record = RunRecord([*killed_run(), fault(10.5, "slow_rank", 1, shot=7)])
    (failure,) = find_failures(record)
    shown = report_figures(record)
    assert (len(shown["failures"]), shown["goodput"]["num_failures"], shown["num_faults"]) == (
        1,
        1,
        2,
    )
    assert text_of(make_summary_table(summarize(record))).count("failures  ") == 1
    cards = {card.name: card for card in find_cards(record)}
    assert cards["time between failures"].detail == "1 failure, 2 faults injected"
    assert cards["stall per failure"].text == "2.00 s"
    (card,) = (stall for stall in stalls(record.events) if stall.fault == "slow_rank")
    assert (card.failures, card.rejoin_seconds, failure.cause) == ((), None, "SIGKILL")


def test_step_under_way_may_still_pass() -> None:
    """A group that is killed after its part of a step is complete stalls the others in the next
    step.
    """
    events = [event for event in killed_run() if event.name != "exchange_failed"]
    for event in events:
        if event.name == "step_committed" and event.step == 4:
            event.time, event.participants, event.exchanges = 1e9 + 13.0, [0, 1], 1
        elif event.name == "step_committed" and event.step >= 5:
            event.time += 1.0
    (stall,) = stalls(events)
    assert stall.stall_seconds == pytest.approx(3.0)


def test_death_that_is_noted_late() -> None:
    """An agent may report a death late; the stall began with the dead group's last event."""
    events = [
        event for event in killed_run() if event.name not in ("fault_injected", "replica_restarted")
    ]
    for event in events:
        if event.name == "worker_exited":
            event.time = 1e9 + 16.5
    (stall,) = stalls(events)
    assert (stall.time, stall.stall_seconds) == (1e9 + 16.5, pytest.approx(2.0))


def test_stall_begins_with_the_rank_that_fell_silent_first() -> None:
    """A worker dies and its rank 0 continues until the group is ended: that wait is part of the
    stall.
    """
    events = [event for event in killed_run() if event.name != "fault_injected"]
    events.append(say(16.2, "exchange_failed", 1, error="peer", step=3))
    for event in events:
        if event.name in ("worker_exited", "replica_restarted"):
            event.time = 1e9 + 16.3
    events += [commit(9.0 + step, step, 1, rank=1) for step in (1, 2, 3)]
    (stall,) = stalls(events)
    assert stall.stall_seconds == pytest.approx(2.0)


def test_lighthouse_that_is_away() -> None:
    """A lighthouse that dies in one step and is missed in the next has the stall until its
    successor listens.
    """
    events = [*calm_run(3), fault(11.5, "kill_lighthouse", shot=1)]
    events += [say(15.0, "lighthouse_restarted", reason="SIGKILL", seconds=3.4)]
    events += [commit(15.5 + step - 4, step, replica) for step in (4, 5, 6) for replica in (0, 1)]
    (stall,) = stalls(events)
    assert stall.stall_seconds == pytest.approx(2.5)


def leaving_run(*more: Any) -> RunRecord:
    """Return a run in which group 1 leaves after step 3, at 12.1 s, and step 4 comes 1.5 s late."""
    events = begun_run()
    events += [say(12.1, "drained", 1, step=3, reason="SIGTERM", in_order=True)]
    events += [say(12.3, "worker_exited", 1, signal="SIGTERM", stopped=False)]
    events += [commit(14.5 + step - 4, step, 0, participants=[0]) for step in (4, 5, 6)]
    return RunRecord([*events, *more])


def test_drain_is_no_failure() -> None:
    """A group that leaves on request has its own cost, and is no failure."""
    record = leaving_run()
    assert (
        find_failures(record),
        measure_goodput(record).num_failures,
        report_figures(record)["stalls"],
    ) == ([], 0, [])
    (drain,) = find_drains(record)
    assert (drain.replica, drain.in_order, drain.stall_seconds) == (1, True, pytest.approx(1.5))
    (incident,) = find_incidents(record)
    assert (incident.fault, incident.injected, incident.ended) == ("drained", False, True)


def test_fault_that_asks_to_leave() -> None:
    """A fault that makes a group leave has the stall, shown once among the faults and with the
    drain.
    """
    record = leaving_run(fault(11.9, "term_group", 1, shot=0))
    (incident,) = find_incidents(record)
    assert (incident.fault, incident.ended, incident.stall_seconds) == (
        "term_group",
        True,
        pytest.approx(1.5),
    )
    assert [drain.stall_seconds for drain in find_drains(record)] == [incident.stall_seconds]


def test_own_computing_for_a_round_is_no_stall() -> None:
    """Rounds vary in length, and a survivor's own steps are no wait, however long they took."""
    config = {"group_size": 2, "steps": 100, "semi_sync_method": "diloco", "sync_steps": 10}
    for own, stall in ((1.8, 0.9), (2.7, 0.0), (0.2, 2.0)):
        events = [say(0.5, "worker_started", 0, config=config), *killed_run()]
        for event in events:
            if isinstance(event, StepCommitted) and event.step == 4:
                event.compute_seconds = own
        (incident,) = stalls(events)
        assert incident.stall_seconds == pytest.approx(stall, abs=1e-6)


def test_two_groups_of_one_shot_are_two_failures() -> None:
    """Each death is a failure with the stall of their shot."""
    events = [
        *killed_run(),
        fault(12.52, "kill_group", 2, shot=0),
        say(12.8, "worker_exited", 2, signal="SIGKILL"),
    ]
    (incident,) = find_incidents(RunRecord(events))
    failures = find_failures(RunRecord(events))
    assert [(each.replica, each.cause, each.stall_seconds) for each in failures] == [
        (1, "SIGKILL", incident.stall_seconds),
        (2, "SIGKILL", incident.stall_seconds),
    ]
    assert [each.rejoin_seconds for each in failures] == [pytest.approx(6.5), None]


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([StallCause(2.5, 2.6, {1})], [4.0]),
        ([StallCause(2.5, 2.6, {0})], [None]),
        ([StallCause(0.5, 0.5, {1})], [None]),
        ([StallCause(1.5, 1.5, {1})], [0.0]),
        ([StallCause(1.5, 2.0, {1})], [4.0]),
        ([StallCause(1.5, 2.0, {1}), StallCause(2.5, 2.5, {1})], [0.0, 4.0]),
        ([StallCause(4.0, 4.0, {1})], [4.0]),
        ([StallCause(4.0, 4.0, {1}), StallCause(5.0, 5.0, set())], [4.0, 0.0]),
        ([StallCause(8.5, 9.0, {1})], [0.0]),
        ([StallCause(9.5, 9.9, {1})], [None]),
    ],
)
def test_stalls_of_plain_numbers(causes: list[StallCause], expected: list[float | None]) -> None:
    """One group commits at 1, 2, 7, 8 and 9; a usual step takes 1."""
    commits = {
        0: [TimedCommit(time, 0) for time in (1.0, 2.0, 7.0, 8.0, 9.0)],
        1: [TimedCommit(1.0, 0)],
    }
    assert attribute_stalls(causes, commits, 1.0) == expected


def test_gap_of_a_group_that_was_restarted_is_no_stall() -> None:
    """Between two attempts of a group no wait counts, because the group was away."""
    made = [TimedCommit(1.0, 0), TimedCommit(2.0, 0), TimedCommit(9.0, 1), TimedCommit(10.0, 1)]
    assert attribute_stalls([StallCause(2.5, 3.0, {1})], {0: made}, 1.0) == [None]


def test_incidents_are_json() -> None:
    """Incidents are plain values, without their failures and drains, which have their own lists."""
    (told,) = [incident.to_dict() for incident in find_incidents(RunRecord(killed_run()))]
    assert json.loads(json.dumps(told))["heal"]["donor"] == 0
    assert not {"failures", "drains"} & told.keys()


def test_dead_agent_is_a_failure_of_its_group() -> None:
    """A dead agent's workers end without an event: one failure, with its stall and its return."""
    events = [
        event for event in killed_run() if event.name not in ("fault_injected", "worker_exited")
    ]
    events.append(
        say(
            12.6,
            "agent_ended",
            1,
            signal="SIGKILL",
            restarts=True,
            reason="its agent was killed by SIGKILL",
        )
    )
    (failure,) = find_failures(RunRecord(events))
    assert (failure.replica, failure.attempt, failure.cause) == (1, 0, "agent: SIGKILL")
    assert failure.stall_seconds == pytest.approx(2.0)
    assert failure.rejoin_seconds == pytest.approx(19.0 - 12.6)
    both = [*events, say(12.5, "worker_exited", 1, signal="SIGSEGV", stopped=False)]
    assert [failure.cause for failure in find_failures(RunRecord(both))] == ["SIGSEGV"]
