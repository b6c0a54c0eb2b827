# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outcome of a run: its headline, the lost groups, and the reasons."""

from __future__ import annotations

import random
from typing import Any

import pytest

from titan_ft.history.check import check
from titan_ft.history.fold.run import fold_events
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.outcomes.outcome import Outcome, decide_outcome, find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import make_headline
from titan_ft.live.run_status import RunStatus

BOOM = {
    "reason": "rank 0 ended with exit status 1",
    "signal": None,
    "code": 1,
    "error": "RuntimeError: boom",
}
BOOM |= {"where": "mybug.py:15", "log": "logs/replica-1/attempt-0/rank-0.log"}


def outcome(run: Any, *, is_live: bool = False) -> Outcome:
    return find_outcome(RunRecord(run.events, is_live=is_live))


def started(synthetic_run: Any, steps: int = 0, num_groups: int = 2, **config: Any) -> Any:
    run = synthetic_run(num_groups, steps=40, **config)
    run.begin()
    run.steps(steps)
    return run


def end_launch(run: Any, code: int, reason: str, **fields: Any) -> None:
    run.tell("launch_finished", 1, code=code, reason=reason, **fields)


def without_launcher(run: Any) -> None:
    run.events = [event for event in run.events if not event.name.startswith("launch_")]


def test_finished(good_run: Any) -> None:
    """A run that recovered from all its failures is green, in any order of events."""
    random.Random(0).shuffle(good_run.events)
    found = outcome(good_run)
    assert (found.kind, found.colour, found.lost, found.reason) == ("finished", "green", (), None)
    assert found.headline == f"Finished at step {good_run.step_number}"


def test_a_live_view_says_the_same(good_run: Any) -> None:
    """`top` folds the events one by one to the result that `check` and `report` read at once."""
    status = RunStatus()
    for event in RunRecord(good_run.events).events:
        status.observe(event)
        assert status.outcome.kind == ("finished" if event.name == "launch_finished" else "running")
    assert status.outcome == outcome(good_run)
    assert len(status.fold.failures) == 1


def test_finished_without_a_group(synthetic_run: Any) -> None:
    """A group that is given up while the others finish is named first, with its last step and the
    exception.
    """
    run = started(synthetic_run, 7)
    run.exit(1, **BOOM)
    told = {
        "rank": 0,
        "reason": "the same exception 3 times",
        "log": "",
        "error": "RuntimeError: boom",
    }
    run.tell("replica_gave_up", 11, replica=1, attempt=0, **told)
    run.steps(33, [0])
    run.num_groups = 1
    run.finish()
    run.named("launch_finished")[0].code = 1
    found = outcome(run)
    why = "RuntimeError: boom, rank 0, mybug.py:15"
    assert found.headline == f"Finished at step 40 without group 1, lost since step 7: {why}"
    (lost,) = found.lost
    assert lost.reason is not None
    assert (found.kind, found.colour, lost.slot, lost.reason.step) == ("finished", "amber", 1, 7)
    assert found.to_dict()["lost"][0]["reason"]["where"] == "mybug.py:15"


def test_a_group_that_fell_silent_is_lost(synthetic_run: Any) -> None:
    """A group whose agent died with it has no last event; if its launch failed, it is lost."""
    run = started(synthetic_run, 7)
    run.steps(3, [0])
    run.num_groups = 1
    run.finish()
    run.named("launch_finished")[0].code = 1
    assert (
        outcome(run).headline
        == "Finished at step 10 without group 1, lost since step 7: no event says why"
    )
    run.named("launch_finished")[0].code = 0  # its agent says that it ended well
    assert outcome(run).headline == "Finished at step 10"


def test_a_group_whose_agent_died(synthetic_run: Any) -> None:
    """An agent's death is a failure of its group, and the reason for its loss if nothing replaces
    it.
    """
    run = started(synthetic_run, 7)
    told = {"replica": 1, "attempt": 0, "agent_pid": 11, "signal": "SIGKILL", "restarts": False}
    run.tell("agent_ended", 1, reason="its agent was killed by SIGKILL", **told)
    run.tell(
        "replica_gave_up",
        1,
        replica=1,
        attempt=0,
        rank=0,
        reason="no restart left",
        log="",
        error="",
    )
    run.steps(3, [0])
    run.num_groups = 1
    run.finish()
    run.named("launch_finished")[0].code = 1
    text = "Finished at step 10 without group 1, lost since step 7: its agent was killed by SIGKILL"
    assert outcome(run).headline == text
    assert [failure.slot for failure in fold_events(run.events).failures] == [1]


def test_a_group_that_died_before_it_wrote_its_first_commit(synthetic_run: Any) -> None:
    """The other groups' commits show that it took part."""
    run = started(synthetic_run, 1)
    run.events = [
        each for each in run.events if not (each.name == "step_committed" and each.replica == 1)
    ]
    run.tell(
        "replica_gave_up",
        1,
        replica=1,
        attempt=0,
        rank=0,
        reason="no restart left",
        log="",
        error="",
    )
    assert outcome(run, is_live=True).lost[0].since_step == 1


def test_last_events_that_are_missing(synthetic_run: Any) -> None:
    """On a full disk the launcher saw all groups end well, and the last steps have no events."""
    run = started(synthetic_run, 7)
    # Again, once the disk has room, while the workers' events are lost.
    for agents_write in (False, True):
        for group in (0, 1) if agents_write else ():
            run.exit(group, reason="rank 0 ended with exit status 0", signal=None, code=0)
        end_launch(run, 0, "all groups finished")
        found = outcome(run)
        assert found.headline == "Finished; the events after step 7 of 40 are missing"
        assert (found.kind, found.colour) == ("finished", "amber")


def test_each_death_of_an_agent_counts(synthetic_run: Any) -> None:
    """Agents' deaths at the same moment, or one after the other, are separate failures."""
    run = started(synthetic_run, 7)
    for replica, attempt in ((0, 0), (1, 0), (1, 1)):
        told = {
            "replica": replica,
            "attempt": attempt,
            "agent_pid": 11,
            "signal": "SIGKILL",
            "restarts": True,
        }
        run.tell("agent_ended", 1, reason="its agent was killed by SIGKILL", **told)
    (note,) = find_notes(RunRecord(run.events))
    assert (note.where, note.text, note.count) == (
        "groups 0, 1",
        "ended: its agent was killed by SIGKILL",
        3,
    )


@pytest.mark.parametrize("seed", range(5))
def test_any_history_has_an_outcome(good_run: Any, seed: int) -> None:
    """A history without its beginning, its end or any part, or with differing clocks, has an
    outcome.
    """
    draw = random.Random(seed)
    whole = RunRecord(good_run.events).events
    for number in range(len(whole)):
        events = draw.sample(whole, draw.randrange(len(whole)))
        for history in (whole[number:], whole[:number], events):
            for is_live in (False, True):
                assert decide_outcome(fold_events(history), is_live=is_live).headline


def test_a_failed_end_alone(synthetic_run: Any) -> None:
    """If only the end of a history is left, no group is known."""
    run = started(synthetic_run, 7)
    end_launch(run, 1, "the launcher failed")
    last = fold_events(run.events[-1:])
    assert decide_outcome(last, is_live=True).reason == decide_outcome(last, is_live=False).reason


def test_groups_without_a_launcher(synthetic_run: Any) -> None:
    """The outcome of groups that were started by hand follows from their own events."""
    run = started(synthetic_run, 7)
    without_launcher(run)
    assert outcome(run).headline == "End unknown, the groups are gone: last at step 7 of 40"
    assert outcome(run).colour == "amber"
    assert outcome(run, is_live=True).headline == "Running: at step 7 of 40"
    run.steps(30, [0])
    assert outcome(run, is_live=True).lost == ()  # it may be back any moment
    run.steps(40, [0])
    (lost,) = outcome(run, is_live=True).lost
    assert (lost.slot, lost.since_step, lost.reason) == (1, 7, None)
    run.num_groups = 1
    run.finish()
    without_launcher(run)
    found = outcome(run)
    assert (
        found.headline
        == "Finished at step 40 without group 1, lost since step 7: no event says why"
    )
    assert found.colour == "amber"


def test_a_group_that_others_do_not_hear_of(synthetic_run: Any) -> None:
    """Survivors' reports make a group lost until it is back; a group that its agent restarts is not
    lost.
    """
    run = started(synthetic_run, 7)
    run.steps(20, [0])
    told = {"slot": 1, "seconds": 20.0, "step": 27, "last_step": 7}
    run.of("group_lost", 0, **told)
    found = outcome(run, is_live=True)
    why = "group 1, lost since step 7: not heard of for 20 s"
    assert (found.headline, found.colour) == (f"Running: at step 27 of 40 without {why}", "amber")
    events = list(run.events)
    run.of("group_back", 0, slot=1, seconds=25.0, step=27)
    assert outcome(run, is_live=True).lost == ()
    run.events = events
    run.of("joined", 1, quorum=2, participants=[0, 1], step=7)  # its own word counts more
    assert outcome(run, is_live=True).lost == ()
    run.restart(1)
    run.of("group_lost", 0, **told)
    assert outcome(run, is_live=True).lost == ()
    run.steps(30, [0])
    run.of("ended_without", 0, step=57, slots=[1], seconds=40.0)
    run.num_groups = 1
    run.finish()
    without_launcher(run)
    why = "group 1, lost since step 7: not heard of for 40 s"
    assert outcome(run).headline == f"Finished at step 40 without {why}"
    verdicts = check(RunRecord(run.events))
    assert (verdicts[8].verdict, why in verdicts[8].notes) == ("holds", True)
    run.of("came_too_late", 1, step=57)
    assert outcome(run).headline == "Finished at step 40"


def test_groups_that_left(synthetic_run: Any) -> None:
    """Groups without a launcher that all left were stopped by whoever asked them."""
    run = started(synthetic_run, 7)
    for group in (0, 1):
        run.of(
            "drained",
            group,
            step=7,
            reason="SIGTERM",
            in_order=True,
            digest=None,
            lineage=run.state,
        )
    without_launcher(run)
    found = outcome(run)
    assert (found.kind, found.headline) == ("stopped", "Stopped by SIGTERM at step 7 of 40")


@pytest.mark.parametrize(
    ("code", "signal", "by"),
    [
        (130, "SIGINT", "Ctrl-C"),
        (143, "SIGTERM", "SIGTERM"),
        (0, None, "--minutes"),
        (1, None, "--minutes"),  # not all groups left in order
    ],
)
def test_stopped(synthetic_run: Any, code: int, signal: str | None, by: str) -> None:
    """A stopped run is amber, whatever its exit status, and names the cause; no group is lost."""
    run = started(synthetic_run, 7)
    run.tell("launch_stopping", 1, reason="a signal", drain_seconds=25.0)
    run.exit(0, stopped=True)
    end_launch(run, code, "stopped", signal=signal)
    found = outcome(run)
    assert (found.kind, found.colour, found.lost, found.stopped_by) == ("stopped", "amber", (), by)
    assert found.headline == f"Stopped by {by} at step 7 of 40"


def test_failed(synthetic_run: Any) -> None:
    """The exception that ended the run comes first, before its consequences."""
    run = started(synthetic_run, 11)
    run.exit(0, signal="SIGABRT", reason="rank 0 was killed by SIGABRT")
    run.exit(1, **BOOM)
    end_launch(run, 1, "all groups end with RuntimeError: boom")
    found = outcome(run)
    assert (found.kind, found.colour, found.lost) == ("failed", "red", ())
    assert (
        found.headline
        == "Failed at step 12 of 40: RuntimeError: boom, rank 0 of group 1, mybug.py:15"
    )
    assert found.reason is not None
    assert (found.reason.attempt, found.reason.step, found.reason.log) == (0, 11, BOOM["log"])


def test_lines_for_the_terminal(synthetic_run: Any) -> None:
    """The headline in its colour, its reason's log, and each other end of an absent group once."""
    run = started(synthetic_run, 11, num_groups=4)
    run.exit(0, signal="SIGABRT", reason="rank 0 was killed by SIGABRT")
    run.exit(1, **BOOM)
    run.exit(2, **{**BOOM, "log": "another"})
    run.exit(3, **{**BOOM, "error": "KeyError: 'x'", "log": "", "transient": True})
    end_launch(run, 1, "all groups end with RuntimeError: boom")
    assert [reason.slot for reason in outcome(run).reasons] == [1, 3, 0]
    head, *more = make_headline(outcome(run), "red")
    assert (head.plain, head.style) == (f"\u2717 {outcome(run).headline}", "red")
    assert [line.plain for line in more] == [
        "  see logs/replica-1/attempt-0/rank-0.log",
        "  not back: KeyError: 'x', rank 0 of group 3, mybug.py:15",
        "  not back: killed by SIGABRT, rank 0 of group 0",
    ]


def test_a_later_cause(synthetic_run: Any) -> None:
    """A run that its lighthouse ended did not fail because of a group's earlier death."""
    run = started(synthetic_run, 5)
    run.exit(1, **BOOM)
    end_launch(run, 1, "the lighthouse ended 3 times (SIGKILL)", own_failure=True)
    assert outcome(run).headline == "Failed at step 6 of 40: the lighthouse ended 3 times (SIGKILL)"
    assert [reason.text for reason in outcome(run).reasons] == [
        "the lighthouse ended 3 times (SIGKILL)",
        "RuntimeError: boom",
    ]


def test_never_began(synthetic_run: Any) -> None:
    """Without a step the reason is the headline, also if the run was then stopped."""
    run = started(synthetic_run)
    offline = {
        "error": "ConnectionError: no route",
        "where": "datasets/load.py:7",
        "transient": True,
    }
    run.exit(0, **{**BOOM, **offline})
    why = "ConnectionError: no route, rank 0 of group 0, datasets/load.py:7"
    assert outcome(run, is_live=True).headline == f"Running: no step yet: {why}"
    assert outcome(run).headline == f"No step, and the launcher is gone: {why}"
    run.tell("launch_stopping", 1, reason="a signal", drain_seconds=25.0)
    end_launch(run, 130, "stopped by Ctrl-C", signal="SIGINT")
    assert outcome(run).headline == f"Never began: {why}; stopped by Ctrl-C"
    assert (outcome(run).kind, outcome(run).colour) == ("never began", "red")


def test_failures_before_the_first_step_are_counted_by_group(synthetic_run: Any) -> None:
    """The number beside the reason belongs to the group with that reason."""
    run = started(synthetic_run)
    for _attempt in range(3):
        run.exit(1, signal="SIGKILL", code=None, reason="rank 0 was killed by SIGKILL")
        run.restart(1)
    run.exit(0, **BOOM)
    why = "RuntimeError: boom, rank 0 of group 0, mybug.py:15"
    assert outcome(run, is_live=True).headline == f"Running: no step yet: {why}"
    run.restart(0)
    run.exit(0, **BOOM)
    assert outcome(run, is_live=True).headline == f"Running: no step yet: {why}, 2 times"


def test_stopped_before_the_first_step(synthetic_run: Any) -> None:
    """A run that was stopped early has not failed."""
    run = started(synthetic_run)
    run.tell("launch_stopping", 1, reason="a signal", drain_seconds=25.0)
    end_launch(run, 130, "stopped by Ctrl-C", signal="SIGINT")
    assert outcome(run).headline == "Stopped by Ctrl-C before the first step"


def test_the_launcher_is_gone(synthetic_run: Any) -> None:
    """A killed launcher writes no event; while it holds the run's folder, the run continues."""
    run = started(synthetic_run, 7)
    assert (outcome(run, is_live=True).kind, outcome(run, is_live=True).colour) == (
        "running",
        "green",
    )
    assert outcome(run).headline == "End unknown, the launcher is gone: last at step 7 of 40"
    end_launch(run, 1, "the launcher failed")
    # The lock on the folder lasts a moment longer.
    assert outcome(run, is_live=True).kind == "failed"


def test_another_launch_begins_anew(good_run: Any) -> None:
    """A resumed run has the outcome of its latest launch."""
    steps = good_run.step_number
    good_run.begin()
    assert outcome(good_run, is_live=True).headline == "Running: no step yet"
    good_run.step([0, 1, 2])
    good_run.tell("launch_stopping", 1, reason="its time is up", drain_seconds=25.0)
    end_launch(good_run, 0, "all groups left when the time was up")
    assert outcome(good_run).headline == f"Stopped by --minutes at step {steps + 1}"


def test_rounds(synthetic_run: Any) -> None:
    """With rounds of several steps the headline has torchtitan's step, as `training.steps`
    counts.
    """
    run = started(synthetic_run, 3, semi_sync_method="diloco", sync_steps=10)
    assert outcome(run, is_live=True).headline == "Running: at step 30 of 40"


def test_failures(good_run: Any) -> None:
    """A group that dies has failed once for all its ranks; a group with an excluded gradient has
    not failed.
    """
    fold = fold_events(RunRecord(good_run.events).events)
    (failure,) = fold.failures
    assert (failure.slot, failure.attempt, failure.died, failure.away) == (2, 0, True, True)
    back = min(
        event.time
        for event in good_run.named("step_committed", replica=2, attempt=1)
        if event.own_tokens
    )
    assert failure.back == back


def test_a_living_group_that_drops_out(synthetic_run: Any) -> None:
    """A live group that the others leave out has failed; one that left on request has not.

    A group that dies while it is away has failed once.
    """
    run = started(synthetic_run, 3, num_groups=3)
    run.steps(2, [0, 1])
    run.steps(2, [0, 1, 2])
    run.steps(2, [0, 1])
    run.exit(2)
    run.of("drained", 1, step=9, reason="SIGTERM", in_order=True, digest=None, lineage=run.state)
    run.steps(2, [0])
    first, second = fold_events(run.events).failures
    assert (first.slot, first.died, second.slot, second.died, second.back) == (
        2,
        False,
        2,
        True,
        None,
    )
    assert first.back is not None


def test_an_exchange_that_broke(synthetic_run: Any) -> None:
    """An exchange that is repeated with the same groups is one failure without an absent group."""
    run = started(synthetic_run, 3)
    for group in (0, 1):
        run.of("exchange_failed", group, error="closed", seconds=0.1, step=3)
    run.steps(2, num_exchanges=2)
    (failure,) = fold_events(run.events).failures
    assert (failure.slot, failure.away) == (None, False)


def test_all_groups_leave(synthetic_run: Any) -> None:
    """Groups that are all asked to leave make their last steps at different times: none of them
    failed.
    """
    run = started(synthetic_run, 3)
    run.tell("launch_stopping", 1, reason="a signal", drain_seconds=25.0)
    run.step([0])
    fold = fold_events(run.events)
    assert fold.failures == []
    assert decide_outcome(fold, is_live=True).stopped_by == ""


def test_who_stopped_groups_without_a_launcher(synthetic_run: Any) -> None:
    """The groups that left name the cause, also if a dead group wrote the last event."""
    run = started(synthetic_run, 7)
    run.of("drained", 0, step=7, reason="SIGTERM", in_order=True, digest=None, lineage=run.state)
    run.now += 1.0
    run.exit(1, **BOOM)
    without_launcher(run)
    assert outcome(run).headline.startswith("Stopped by SIGTERM at step 7 of 40")
