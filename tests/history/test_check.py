# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The verdict on a run: a good history holds, and each broken one is objected to by the broken
promise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.event_builder import change, like, untyped
from tests.event_builder import event as make
from titan_ft.cli.main import main
from titan_ft.history import check as check_module
from titan_ft.history.check import Verdicts, make_check_table
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import text_of
from titan_ft.history.timing.incidents import find_failures
from titan_ft.run.events import Event, LaunchEvent, RankEvent, Target, Waited


def check(events: list[Event]) -> Verdicts:
    return check_module.check(RunRecord(events))


def write_lines(run_dir: Path, lines: Iterable[str]) -> None:
    """Write a file of events."""
    (run_dir / "events").mkdir(exist_ok=True)
    (run_dir / "events" / "all.jsonl").write_text("".join(f"{line}\n" for line in lines))


def format_check(report: Verdicts) -> str:
    return text_of(make_check_table(report))


OTHERS_ASKED = {2, 3, 4, 5, 6, 7, 8}


def failed(report: Verdicts) -> set[int | str]:
    """Return the numbers of promises, or names of rows, that do not hold."""
    return {
        each.promise or each.name for each in report.judgements if each.verdict == "does not hold"
    }


def unknown(report: Verdicts) -> set[int | str]:
    """Return the numbers or names of the rows that were asked and are unknown."""
    return {
        each.promise or each.name
        for each in report.judgements
        if each.asked and each.verdict == "unknown"
    }


def test_good_run_holds(good_run: Any) -> None:
    """A run with a death, a heal and a nonfinite gradient keeps all promises, in any order of
    events.
    """
    report = check(good_run.events)
    assert (failed(report), unknown(report), report.verdict) == (set(), set(), "holds"), (
        format_check(report)
    )
    assert not report[1].asked
    assert (
        report[5].statement
        == "others waited 0.00 s in all for 1 joiner, 0.00 s at most for one (a step takes 1.01 s)"
    )
    assert "2 forward passes wasted: gradients that were not finite" in report[4].notes
    random.Random(0).shuffle(good_run.events)
    assert check(good_run.events).verdict == "holds"


def test_format_and_json(good_run: Any) -> None:
    """The text names all promises with their verdicts, aligned; the JSON has the same."""
    good_run.named("worker_exited", code=0)[0].reason = ""
    report = check(good_run.events)
    text = format_check(report)
    head = ["\u2717 Finished at step 31", "  verdict: does not hold: nothing silent"]
    assert text.splitlines()[:2] == text.splitlines()[-2:] == head  # no need to scroll
    lines = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert len(lines) == 1 + 8 + 2 + 1
    assert (
        len({line.index(word) for line, word in zip(lines[2:8], ["holds"] * 6, strict=True)}) == 1
    )
    assert lines[1].startswith("- 1 same arithmetic")
    assert "group 0, rank 0: a worker ended without a reason" in text
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["verdict"], told["colour"], told["outcome"]["kind"]) == (
        "does not hold",
        "red",
        "finished",
    )
    assert [each["promise"] for each in told["judgements"]] == [1, 2, 3, 4, 5, 6, 7, 8, None, None]


def test_an_agent_that_could_not_be_started_has_no_exit_status(good_run: Any) -> None:
    """The reason in words suffices for promise 8; an agent that was started needs an exit
    status.
    """
    facts = {"replica": 2, "attempt": 0, "reason": "its agent cannot be started", "restarts": True}
    good_run.tell("agent_ended", 1, agent_pid=None, code=None, signal=None, **facts)
    assert check(good_run.events)[8].verdict == "holds"
    good_run.named("agent_ended")[0].agent_pid = 11
    assert check(good_run.events)[8].verdict == "does not hold"


# Broken histories: what is done to the good one, and the promise that must object.


def _lose_batch(run: Any) -> None:
    for event in run.named("step_committed"):
        if event.step >= 5 and 0 in event.batches:
            event.batches[0] = (event.batches[0][0] + 1, 1)
            if event.replica == 0:
                event.data.first_batch += 1


def _repeat_batch(run: Any) -> None:
    for event in run.named("step_committed"):
        if event.step >= 5 and 0 in event.batches:
            event.batches[0] = (event.batches[0][0] - 1, 1)
            if event.replica == 0:
                event.data.first_batch -= 1


def _survivor_skips_step(run: Any) -> None:
    for event in run.named("step_committed", replica=0, step=10):
        run.events.remove(event)


def _recompute(run: Any) -> None:
    for event in run.named("step_committed", replica=0, step=7):
        event.forward_passes = 2


def _differ_unnamed(run: Any) -> None:
    for event in run.named("step_committed", replica=1, step=4):
        event.digest = "bad"


def _differ_at_the_end(run: Any) -> None:
    run.named("training_finished", replica=1, rank=1)[0].digest = "bad"


def _finish_elsewhere(run: Any) -> None:
    for event in run.named("training_finished", replica=1):
        event.lineage, event.step = (
            run.named("step_committed", step=run.step_number - 1)[0].lineage,
            29,
        )


def _finish_elsewhere_untold(run: Any) -> None:
    """A group finished with another state of the same step, without a digest."""
    run.named("training_finished", replica=1, rank=1)[0].lineage = "ab" * 6
    run.named("training_finished", replica=1, rank=1)[0].digest = None


def _compute_again(run: Any) -> None:
    """A batch was computed again, and no event says that its gradient was left out."""
    for event in run.named("gradient_excluded"):
        run.events.remove(event)


def _tell_other_batches(run: Any) -> None:
    for event in run.named("step_committed", replica=1, step=4):
        event.batches = {slot: batch for slot, batch in event.batches.items() if slot != 0}


def _tell_other_loss(run: Any) -> None:
    for event in run.named("step_committed", replica=1, step=4):
        event.loss += 1e-9


def _tell_other_lr(run: Any) -> None:
    for event in run.named("step_committed", replica=1, step=4):
        event.lr *= 1.01


def _wrong_tokens(run: Any) -> None:
    for event in run.named("step_committed", step=4):
        event.tokens += 1
    for event in run.named("training_finished"):
        event.tokens += 1


def _wrong_mean(run: Any) -> None:
    for event in run.named("step_committed", step=4):
        event.loss *= 1.5


def _weight_without_part(run: Any) -> None:
    for event in run.named("step_committed", step=26, replica=1):
        event.own_tokens = 512


def _excluded_counts(run: Any) -> None:
    for event in run.named("gradient_excluded"):
        event.slots = [0, 1]


def _other_participants(run: Any) -> None:
    for event in run.named("step_committed", step=4, replica=1):
        event.participants = [1, 2]


def _too_few(run: Any) -> None:
    for event in run.named("worker_started"):
        event.config.min_replica_size = 3


def _schedule_runs_ahead(run: Any) -> None:
    """The step after a failed exchange is repeated by others with the next step's LR."""
    copies = [
        msgspec.structs.replace(event, lineage="feed", lr=0.5)
        for event in run.named("step_committed", step=7)
    ]
    for event in copies:
        change(
            event, replica=2, attempt=0, participants=[0, 1], own_tokens=0, own_loss=None, data=None
        )
        change(
            event,
            forward_passes=0,
            pid=event.pid + 20,
            mono=event.mono - 0.9,
            time=event.time - 0.9,
        )
    run.events += [event for event in copies if event.pid < 1022]


def _finished_tokens(run: Any) -> None:
    for event in run.named("training_finished"):
        event.tokens += 512


def _finished_step(run: Any) -> None:
    for event in run.named("training_finished"):
        event.step += 1


def _save_ahead(run: Any) -> None:
    event = run.named("step_committed", step=4, replica=0, rank=0)[0]
    run.events.append(like(event, "checkpoint_saved", step=5, mono=event.mono + 0.1))


def _exit_without_reason(run: Any) -> None:
    run.named("worker_exited", replica=2, signal="SIGKILL")[0].reason = ""


def _nobody_restarts(run: Any) -> None:
    """A group dies in the middle of the run and never returns."""
    events = [event for event in run.events if event.replica == 2 and event.attempt == 1]
    for event in events:
        run.events.remove(event)
    for event in run.named("step_committed"):
        if event.step > 21:
            change(event, participants=[0, 1], tokens=1024)
    for event in run.named("launch_finished"):
        change(event, time=event.time + 100, mono=event.mono + 100)


def _heal_without_end(run: Any) -> None:
    for event in run.named("heal_finished", replica=2):
        run.events[run.events.index(event)] = like(event, "checkpoint_loaded", step=event.step)


def _fault_without_end(run: Any) -> None:
    first = run.named("step_committed", step=3)[0]
    fault = {
        "fault": "segfault",
        "target": {"replica": 1, "rank": 0},
        "seed": 1,
        "shot": 2,
        "pid": 2,
    }
    run.events.append(make("fault_injected", time=first.time, mono=first.mono, **fault))
    for event in (
        run.named("worker_exited", replica=1)
        + run.named("launch_finished")
        + run.named("training_finished")
    ):
        shift = -40 if event.replica == 1 and event.name == "worker_exited" else 100
        change(event, time=event.time + shift, mono=event.mono + shift)


def _fell_silent(run: Any) -> None:
    for event in run.named("worker_exited", replica=1) + run.named("training_finished", replica=1):
        run.events.remove(event)


@pytest.mark.parametrize(
    ("damage", "promise"),
    [
        (_tell_other_loss, 1),
        (_tell_other_lr, 1),
        (_differ_unnamed, 2),
        (_differ_at_the_end, 2),
        (_finish_elsewhere_untold, 2),
        (_wrong_tokens, 3),
        (_wrong_mean, 3),
        (_weight_without_part, 3),
        (_excluded_counts, 3),
        (_other_participants, 3),
        (_recompute, 4),
        (_compute_again, 4),
        (_survivor_skips_step, 4),
        (_lose_batch, 6),
        (_repeat_batch, 6),
        (_tell_other_batches, 6),
        (_too_few, 7),
        (_finished_tokens, 7),
        (_finished_step, 7),
        (_save_ahead, 7),
        (_exit_without_reason, 8),
        (_heal_without_end, 8),
        (_fault_without_end, 8),
        (_fell_silent, 8),
    ],
)
def test_exactly_one_promise_objects(
    good_run: Any, damage: Callable[[Any], None], promise: int
) -> None:
    """A defect that breaks one promise is objected to by that promise only, with an event."""
    damage(good_run)
    report = check(good_run.events)
    assert failed(report) == {promise}, format_check(report)
    assert report.verdict == "does not hold"
    assert report[promise].asked
    assert report[promise].offences[0].text


@pytest.mark.parametrize(
    ("damage", "promise"),
    [(_finish_elsewhere, 2), (_schedule_runs_ahead, 7), (_nobody_restarts, 8)],
)
def test_promise_objects(good_run: Any, damage: Callable[[Any], None], promise: int) -> None:
    """A defect that breaks several promises is objected to by them."""
    damage(good_run)
    assert promise in failed(check(good_run.events))
    if promise == 8:
        assert promise not in failed(
            check_module.check(RunRecord(good_run.events, ["supervisor-2-1.jsonl"]))
        )


@pytest.mark.parametrize(
    "damage",
    [
        _differ_unnamed,
        _differ_at_the_end,
        _too_few,
        _save_ahead,
        _heal_without_end,
        _fault_without_end,
        _fell_silent,
    ],
)
def test_what_may_be_among_missing_events_is_unknown(
    good_run: Any, damage: Callable[[Any], None]
) -> None:
    """In a cut file the absence of a restart, a heal, an end or a finding proves nothing."""
    damage(good_run)
    report = check_module.check(RunRecord(good_run.events, ["supervisor-0-1.jsonl"]))
    assert failed(report) == set(), format_check(report)
    assert unknown(report) >= OTHERS_ASKED


def test_step_that_nobody_made(synthetic_run: Any) -> None:
    """A step number that all groups skip is objected to as a counter that ran ahead."""
    run = synthetic_run()
    run.begin()
    run.steps(5)
    run.step_number += 1
    run.steps(5)
    run.finish()
    report = check(run.events)
    assert failed(report) == {7}, format_check(report)
    assert "steps must go up by one" in report[7].offences[0].text
    assert report[7].offences[0].step == 7


def test_commit_of_too_few_is_named(good_run: Any) -> None:
    """A commit below min_replica_size names group, step and both numbers; excluded gradients count
    as present.
    """
    for event in good_run.named("worker_started"):
        event.config.min_replica_size = 3
    offences = check(good_run.events)[7].offences
    assert {offence.step for offence in offences} == set(range(7, 22))
    assert "2 groups; min_replica_size is 3" in offences[0].text


def _mismatch(run: Any, minority: list[int], step: int) -> None:
    last = run.named("step_committed", step=step)[-1]
    for group in (0, 1, 2):
        run.of("digest_mismatch", group, step=step, digests={}, lineages={}, minority=minority)
        for event in run.events[-2:]:
            change(event, time=last.time + 0.01, mono=last.mono + 0.01)


@pytest.mark.parametrize("heals", [True, False])
def test_named_difference(synthetic_run: Any, heals: bool) -> None:
    """A differing digest that was named and then healed is no offence; one that was trained
    on is.
    """
    run = synthetic_run()
    run.begin()
    run.steps(4)
    for event in run.named("step_committed", step=4, replica=1):
        event.digest = "bad"
    _mismatch(run, [1], 4)
    if heals:
        run.heal(1, lambda: run.steps(2, [0, 2]))
    run.steps(4)
    run.finish()
    report = check(run.events)
    assert failed(report) == (set() if heals else {2}), format_check(report)
    if heals:
        assert report.verdict == "holds"
        assert "the digest of group 1 differed" in "".join(report[2].notes)
        assert "digest mismatch: 1 time" in report[8].notes


def test_wrong_group_named(good_run: Any) -> None:
    """A difference for which another group was blamed does not hold."""
    _differ_unnamed(good_run)
    _mismatch(good_run, [2], 4)
    assert 2 in failed(check(good_run.events))


def test_difference_of_a_group_that_died_at_once(good_run: Any) -> None:
    """A group that died before its differing digest was compared harmed no other group."""
    for event in good_run.named("step_committed", step=6, replica=2):
        event.digest = "bad"
    report = check(good_run.events)
    assert report.verdict == "holds", format_check(report)
    assert report[2].notes


def test_nothing_compared_is_unknown(good_run: Any) -> None:
    """Without digests the groups' agreement is unknown."""
    for event in good_run.events:
        if hasattr(event, "digest"):
            event.digest = None
    report = check(good_run.events)
    assert (failed(report), unknown(report)) == (set(), {2})


def test_a_run_before_its_first_digest(good_run: Any) -> None:
    """A running run without any digest so far holds so far."""
    end = min(each.time for each in good_run.named("training_finished"))
    events = [each for each in good_run.events if each.time < end]
    for event in events:
        if hasattr(event, "digest"):
            event.digest = None
    running = check_module.check(RunRecord(events, is_live=True))
    assert (running[2].shown_verdict, running.verdict, running.exit_status) == (
        "not asked",
        "holds",
        0,
    )
    assert check(events).exit_status == 1


def test_participant_that_died_untold_is_not_counted(good_run: Any) -> None:
    """A step without the report of a dead participant is left out of the average's check."""
    for event in good_run.named("step_committed", step=6, replica=2):
        good_run.events.remove(event)
    report = check(good_run.events)
    assert report.verdict == "holds", format_check(report)
    assert "of 30 of 31 states" in report[3].statement


@pytest.mark.parametrize("weighted", [True, False])
def test_the_mean_is_weighted(good_run: Any, weighted: bool) -> None:
    """A group with half of the tokens counts half in the loss; the plain mean is another number."""
    events = good_run.named("step_committed", step=4)
    weights = {0: 512, 1: 256, 2: 512}
    losses = {event.replica: event.own_loss for event in events}
    for event in events:
        event.own_tokens, event.tokens = weights[event.replica], 1280
        if weighted:
            event.loss = sum(weights[group] * loss for group, loss in losses.items()) / 1280
    for event in good_run.named("training_finished"):
        event.tokens -= 256
    report = check(good_run.events)
    assert failed(report) == (set() if weighted else {3}), format_check(report)


def _wait(run: Any, seconds: float, why: str = "catching_up", steps: int = 12) -> None:
    """Add steps in which the others wait for the joiner for `seconds` in total."""
    run.steps(steps, [0, 1], waits=[(2, seconds / steps, why)])


@pytest.mark.parametrize(("seconds", "holds"), [(3.9, True), (6.8, True), (7.2, False)])
def test_a_wait_for_a_joiner(run_builder: Callable[..., Any], seconds: float, holds: bool) -> None:
    """The others may wait for a few steps, or for half of the joiner's time: 14 s here."""
    report = check(run_builder(lambda run: _wait(run, seconds)).events)
    assert failed(report) == (set() if holds else {5}), format_check(report)
    assert report[5].statement.startswith(
        f"others waited {seconds:.2f} s in all for 1 joiner, {seconds:.2f} s at most"
    )
    if not holds:
        assert (
            report[5].offences[0].text.startswith("others waited 7.20 s for it to catch up, 7.03")
        )
        assert report[5].offences[0].replica == 2


def test_a_stall_is_the_one_of_the_rank_that_waited_longest(
    run_builder: Callable[..., Any],
) -> None:
    run = run_builder(lambda run: _wait(run, 3.0))
    (first, *_) = run.named("step_committed", step=12, replica=1, rank=1)
    first.waits = [Waited(slot=2, seconds=9.0, why="catching_up")]
    assert failed(check(run.events)) == {5}


@pytest.mark.parametrize("why", ["computing", "lost", "connecting", "asked"])
def test_what_the_others_waited_for_another_reason_is_no_stall(
    run_builder: Callable[..., Any], why: str
) -> None:
    """Other failures' waits do not count; an inference from the rate of commits could not separate
    them.
    """

    def during_heal(run: Any) -> None:
        _wait(run, 9.0, why, steps=2)
        run.of("exchange_failed", 0, error="closed", seconds=0.1, step=run.step_number)
        run.now += 12.0
        _wait(run, 0.5)

    report = check(run_builder(during_heal).events)
    assert (report[5].verdict, failed(report)) == ("holds", set()), format_check(report)


def test_a_group_that_a_fault_hits_while_it_joins_is_the_faults_matter(
    run_builder: Callable[..., Any],
) -> None:
    """The lost time is reported all the same."""
    run = run_builder(lambda run: _wait(run, 9.0))
    heal = run.named("heal_started")[0]
    fault = like(heal, "fault_injected", fault="freeze", target=Target(replica=2), seed=1, shot=1)
    report = check([*run.events, fault])
    assert failed(report) == set(), format_check(report)
    assert report[5].notes == [
        "group 2: others waited 9.00 s for it to catch up, 7.03 s are the most; freeze was injected into it meanwhile"
    ]
    other = like(fault, "fault_injected", fault="freeze", target=Target(replica=1), seed=1, shot=1)
    assert failed(check([*run.events, other])) == {5}


def test_commits_that_do_not_say_what_they_waited_for(run_builder: Callable[..., Any]) -> None:
    """Older commits without waits are unknown, in one line; without a joiner nothing is asked."""
    run = run_builder()
    run.named("step_committed", replica=0, rank=0, step=3)[0].waits = None
    report = check(run.events)
    assert (failed(report), unknown(report)) == (set(), {5}), format_check(report)
    assert report[5].unknown == ["1 commit of an older version do not say what they waited for"]


def test_a_stall_in_a_history_that_is_cut_is_a_stall(run_builder: Callable[..., Any]) -> None:
    """An observed stall counts; an unobserved one may be among the missing events."""
    for seconds, found in ((9.0, {5}), (0.5, set())):
        run = run_builder(lambda run, seconds=seconds: _wait(run, seconds))
        cut = check_module.check(RunRecord(run.events, ["replica-0-rank-0-attempt-0-1.jsonl"]))
        assert failed(cut) == found
        assert cut[5].verdict == ("does not hold" if found else "unknown")


def test_wait_that_nobody_asked_for(good_run: Any) -> None:
    """A wait for a joiner that did not request it breaks the promise."""
    event = good_run.named("step_committed", step=12, replica=0, rank=0)[0]
    wait = {
        "reason": "groups [2] fetch the state",
        "participants": [0, 1],
        "step": 11,
        "slots": [2],
        "why": "asked",
    }
    good_run.events.append(like(event, "waiting", **wait))
    assert failed(check(good_run.events)) == {5}
    asks = good_run.named("heal_started", replica=2, rank=0)[0]
    good_run.events.append(like(asks, "catch_up_waiting"))
    event.waits = [Waited(slot=2, seconds=9.0, why="asked")]
    report = check(good_run.events)
    assert report.verdict == "holds"
    assert report[5].notes == ["groups [2] asked the others to wait, for 1 step and 9.00 s"]


@pytest.mark.parametrize("seconds", [100.0, -100.0, 5.0, -5.0])
@pytest.mark.parametrize("who", ["all", "one"])
def test_clock_that_jumps(good_run: Any, seconds: float, who: str) -> None:
    """A wall clock that was set has its own line; verdicts that rest on times are unknown, the
    others hold.
    """
    middle = good_run.named("step_committed", step=12)[0].mono
    for event in good_run.events:
        if event.mono >= middle and (who == "all" or event.replica == 0):
            event.time += seconds
    report = check(good_run.events)
    assert failed(report) == {"clocks"}, format_check(report)
    # Waits are measured where they happen, by a clock that nobody sets.
    assert unknown(report) == {8}
    assert report.verdict == "does not hold"


def test_hosts_with_other_clocks(good_run: Any) -> None:
    """Clocks of different hosts may differ, and their monotonic clocks begin anywhere."""
    for event in good_run.named("worker_started", replica=1):
        event.host = "there"
    for event in good_run.events:
        if isinstance(event, RankEvent) and event.replica == 1:
            event.mono += 5000
            event.time += 0.3
    report = check(good_run.events)
    assert report.verdict == "holds", format_check(report)


def test_empty_history_is_unknown() -> None:
    """A history without events holds nothing."""
    report = check([])
    assert failed(report) == set()
    assert unknown(report) == {*OTHERS_ASKED, "whole history", "clocks"}
    assert report.verdict == "unknown"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_cut_history_is_unknown(good_run: Any, share: float) -> None:
    """A history that ends anywhere in the middle is unknown in every respect and objects to
    nothing.
    """
    report = check(good_run.events[: int(share * len(good_run.events))])
    assert failed(report) == set(), format_check(report)
    assert unknown(report) >= {*OTHERS_ASKED, "whole history"}


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_history_without_beginning_is_unknown(good_run: Any, share: float) -> None:
    """A history that begins in mid-run is unknown in every respect."""
    report = check(good_run.events[int(share * len(good_run.events)) :])
    assert failed(report) == set(), format_check(report)
    assert unknown(report) >= OTHERS_ASKED


def test_history_without_one_group_is_unknown(good_run: Any) -> None:
    """A history without the file of a participating group never holds."""
    report = check([e for e in good_run.events if e.replica != 1 or e.name == "worker_exited"])
    assert report.verdict == "unknown"
    assert "groups [1] took part in steps and have no events of their own" in "".join(
        report["whole history"].unknown
    )


def test_lost_batch_in_a_cut_history(good_run: Any) -> None:
    """A known defect outweighs unknown parts."""
    _lose_batch(good_run)
    report = check(good_run.events[:-1])
    assert failed(report) == {6}
    assert report.verdict == "does not hold"


def test_workers_without_a_config_are_unknown_where_it_is_needed(good_run: Any) -> None:
    """Without the workers' config the needed number of groups is unknown; the rest holds."""
    for event in good_run.named("worker_started"):
        event.config = None
    report = check(good_run.events)
    assert (failed(report), unknown(report)) == (set(), {7}), format_check(report)


def test_checker_that_crashes_says_unknown(good_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crashed checker is unknown, with error and place; the others continue."""

    def crash(record: object, found: object) -> None:
        raise KeyError("no such thing")

    checkers = [
        (n, name, crash if n == 3 else checker) for n, name, checker in check_module._CHECKERS
    ]
    monkeypatch.setattr(check_module, "_CHECKERS", checkers)
    report = check(good_run.events)
    assert (failed(report), unknown(report), report.verdict) == (set(), {3}, "unknown")
    assert "the checker crashed: KeyError: 'no such thing' (test_check.py:" in report[3].unknown[0]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"participants": 5},
        {"participants": None},
        {"batches": [1]},
        {"data": 7},
        {"tokens": "many"},
        {"lineage": 3},
        {"step": "x"},
        {"replica": "x"},
        {"own_tokens": [1]},
    ],
)
def test_nonsense_never_holds_nor_crashes(
    good_run: Any, nonsense: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An event with a field of a wrong type is named in the report, which does not hold."""
    lines = [untyped(event) for event in good_run.events]
    wrong = next(
        number for number, line in enumerate(lines) if line.get("step") == 9 and "lr" in line
    )
    lines[wrong] |= nonsense
    write_lines(tmp_path, map(json.dumps, lines))
    assert main(["check", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["judgements"]) == 9
    assert report["verdict"] == "unknown"
    (name,) = nonsense
    reason = report["judgements"][1]["unknown"][0]
    assert f"all.jsonl:{wrong + 1} must have the fields of step_committed" in reason
    assert f"$.{name}" in reason


def test_damaged_file_is_unknown(
    good_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with a line that is no event makes everything unknown, and is named with the line."""
    lines = [json.dumps(untyped(event)) for event in good_run.events]
    write_lines(tmp_path, lines)
    assert main(["check", str(tmp_path)]) == 0
    capsys.readouterr()
    write_lines(tmp_path, [*lines[:3], "{broken", *lines[3:]])
    assert main(["check", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {each["verdict"] for each in report["judgements"]} == {"unknown"}
    assert "all.jsonl:4" in report["judgements"][0]["unknown"][0]


def test_void_steps_of_a_job_that_went_back(synthetic_run: Any) -> None:
    """A job that lost every group and started anew holds; its void steps are no survivors' work."""
    run = synthetic_run()
    run.begin()
    run.steps(4)
    for group in range(3):
        run.kill(group)
    run.state, run.step_number, run.tokens = "000000000000", 0, 0
    run.ends = dict.fromkeys(range(3), 0)
    for group in range(3):
        run.restart(group)
        run.of("started_anew", group, step=0)
    run.now += 1
    run.step([0, 1])
    run.steps(0)
    run.heal(2, lambda: run.steps(2, [0, 1]))
    run.steps(3)
    run.finish()
    report = check(run.events)
    assert report.verdict == "holds", format_check(report)
    assert "started anew: 1 time" in report[8].notes


def test_cut_anywhere_never_holds_nor_objects(good_run: Any) -> None:
    """A history that ends anywhere before its last event neither holds nor is objected to."""
    for length in range(0, len(good_run.events) - 1, 7):
        report = check(good_run.events[:length])
        assert failed(report) == set(), f"cut at {length}: {format_check(report)}"
        assert unknown(report) >= OTHERS_ASKED


@pytest.mark.parametrize(
    ("target", "hit"),
    [(Target(2), True), (Target(2, 1), True), (Target(0), False), (Target(lighthouse=True), False)],
)
def test_fault_dates_the_failure(good_run: Any, target: Target, hit: bool) -> None:
    """A failure began when a fault was aimed at its group."""
    (fault,) = good_run.named("fault_injected")
    fault.target = target
    (failure,) = find_failures(RunRecord(good_run.events))
    assert (failure.time == fault.time) == hit


@pytest.mark.parametrize(("leavers", "broken"), [([1], set()), ([0, 1, 2], {2})])
def test_group_that_left_with_another_digest(
    synthetic_run: Any, leavers: list[int], broken: set[int]
) -> None:
    """A group that left before it was named harmed none; if all left so, the right bytes are
    unknown.
    """
    run = synthetic_run()
    run.begin()
    run.steps(4)
    for group in leavers:
        run.of(
            "drained",
            group,
            step=4,
            reason="SIGTERM",
            in_order=True,
            digest=None,
            lineage=run.state,
        )
    for event in run.events:
        if event.replica == 1 and event.name in ("step_committed", "drained") and event.step == 4:
            event.digest = "bad"
    for group in leavers:
        run.exit(group, reason="ended", signal=None, code=0)
    if len(leavers) < 3:
        run.steps(2, [0, 2])
        for group in (0, 2):
            run.of(
                "training_finished",
                group,
                step=6,
                tokens=run.tokens,
                digest=None,
                lineage=run.state,
            )
            run.exit(group, reason="ended", signal=None, code=0)
    run.tell("launch_finished", 1, code=0, reason="all groups finished or left")
    report = check(run.events)
    assert failed(report) == broken, format_check(report)
    assert unknown(report) == set()


def test_group_whose_agent_was_killed(good_run: Any) -> None:
    """A launch that ended badly and says so explains a group's silence."""
    _fell_silent(good_run)
    change(good_run.named("launch_finished")[0], code=1, reason="1 of 3 groups failed: 1")
    report = check(good_run.events)
    assert report[8].verdict == "holds", format_check(report)
    assert "the launch says: 1 of 3 groups failed: 1" in report[8].notes[0]


def test_a_state_that_could_not_be_saved_is_told_beside_the_verdict(good_run: Any) -> None:
    """A run whose last checkpoint is missing keeps its promises, and is not plainly fine."""
    good_run.of("checkpoint_failed", 0, step=8, error="No space left on device", latest=5)
    good_run.events.sort(key=lambda event: event.time)
    report = check(good_run.events)
    text = "the checkpoint of step 8 could not be saved (No space left on device): there is none"
    assert report.promises == f"holds (7 promises checked); {text}"
    assert (report.colour, report.exit_status, report[8].shown_verdict) == ("amber", 0, "holds")
    assert format_check(report).splitlines()[:2] == [
        "! Finished at step 31",
        f"  verdict: {report.promises}",
    ]
    good_run.tell("checkpoint_saved", 1001, replica=0, rank=0, attempt=0, step=8, seconds=1.0)
    assert check(good_run.events)[8].reservation == ""


# What became of the run


def _fail(run: Any) -> None:
    """Let both ranks of both groups end with the same exception, and the launch with them."""
    for group in (0, 1):
        run.exit(group, signal=None, code=1, error="RuntimeError: boom", where="mybug.py:15")
    run.tell("launch_finished", 1, code=1, reason="all groups end with RuntimeError: boom")


def test_a_run_that_failed_is_red_although_its_promises_hold(synthetic_run: Any) -> None:
    """The exception comes first, and the exit status is that of a failure."""
    run = synthetic_run(2)
    run.begin()
    run.steps(11)
    _fail(run)
    report = check(run.events)
    assert (failed(report), unknown(report), report.verdict) == (set(), set(), "holds"), (
        format_check(report)
    )
    assert (report.colour, report.exit_status) == ("red", 1)
    lines = format_check(report).splitlines()
    assert (
        lines[0] == "\u2717 Failed at step 12: RuntimeError: boom, rank 0 of group 0, mybug.py:15"
    )
    assert lines[1] == "  verdict: holds (7 promises checked)"


def test_a_run_that_never_began_is_red(synthetic_run: Any) -> None:
    """The reason comes before what is unknown for lack of a step."""
    run = synthetic_run(2)
    run.begin()
    _fail(run)
    report = check(run.events)
    assert format_check(report).startswith(
        "\u2717 Never began: RuntimeError: boom, rank 0 of group 0"
    )
    assert (report.colour, report.exit_status) == ("red", 1)


def test_a_run_that_was_stopped_holds(synthetic_run: Any) -> None:
    """A run that was stopped in order broke nothing: amber, and no failure."""
    run = synthetic_run(2)
    run.begin()
    run.steps(5)
    run.tell("launch_stopping", 1, reason="Ctrl-C", drain_seconds=25.0)
    for group in (0, 1):
        run.of(
            "drained",
            group,
            step=5,
            reason="SIGTERM",
            in_order=True,
            digest=None,
            lineage=run.state,
        )
        run.exit(group, reason="rank 0 ended with exit status 0", signal=None, code=0)
    run.tell("launch_finished", 1, code=130, reason="stopped by Ctrl-C", signal="SIGINT")
    report = check(run.events)
    assert (report.verdict, report.colour, report.exit_status) == ("holds", "amber", 0), (
        format_check(report)
    )


@pytest.mark.parametrize("launched", [True, False])
def test_a_run_that_goes_on_holds_so_far(good_run: Any, launched: bool) -> None:
    """A running run's missing end makes nothing unknown; without a sign of life it does."""
    end = next(event.time for event in good_run.named("heal_finished"))
    started = [event for event in good_run.events if launched or not isinstance(event, LaunchEvent)]
    for until in (end - 0.5, end + 2.5):  # while a group heals, and after it
        events = [event for event in started if event.time < until]
        report = check_module.check(RunRecord(events, is_live=True))
        assert (failed(report), unknown(report)) == (set(), set()), format_check(report)
        head = format_check(report).splitlines()[:3]
        assert ("  not back: killed by SIGKILL, rank 0 of group 2" in head) is (until < end)
        assert "  verdict: holds so far (7 promises checked)" in head
        assert (report.colour, report.exit_status) == ("green", 0)
        assert check(events).exit_status == 1


def test_a_run_that_has_just_been_started_holds_so_far(synthetic_run: Any) -> None:
    """A run without a step has broken nothing; a run that cannot begin is another matter."""
    run = synthetic_run(2)
    run.begin()
    report = check_module.check(RunRecord(run.events, is_live=True))
    assert (report.verdict, report.exit_status) == ("holds", 0)
    assert "  verdict: holds so far (no step yet)" in format_check(report).splitlines()
    assert check(run.events).exit_status == 1
    run.exit(
        0, reason="rank 0 ended with exit status 1", signal=None, code=1, error="OSError: no data"
    )
    assert check_module.check(RunRecord(run.events, is_live=True)).exit_status == 1


def test_a_group_that_is_lost_without_a_word(synthetic_run: Any) -> None:
    """A group that was started by hand and fell silent for good breaks promise 8 if no event says
    so.
    """
    run = synthetic_run(2)
    run.begin()
    run.steps(5)
    run.steps(5, [0])
    run.num_groups = 1
    run.finish()
    events = [event for event in run.events if not isinstance(event, LaunchEvent)]
    report = check(events)
    assert (failed(report), unknown(report)) == ({8}, set()), format_check(report)
    text = "Finished at step 10 without group 1, lost since step 5: no event says why"
    assert format_check(report).startswith(f"\u2717 {text}")
    told = {
        "worker_pid": 1010,
        "reason": "rank 0 was killed by SIGKILL",
        "signal": "SIGKILL",
        "stopped": False,
    }
    (last, *_) = run.named("step_committed", replica=1, step=5, rank=0)
    report = check([*events, like(last, "worker_exited", **told)])
    assert (report.verdict, report.colour, report.exit_status) == ("holds", "amber", 0), (
        format_check(report)
    )
    assert "group 1, lost since step 5: killed by SIGKILL, rank 0" in report[8].notes


# Rounds of a semi-synchronous method

ROUNDS = {"semi_sync_method": "diloco", "sync_steps": 10}


def test_a_run_in_rounds_holds_and_says_so(run_builder: Callable[..., Any]) -> None:
    """The committed unit is called a round, with its length beside it. A checkpoint has
    torchtitan's step in its name, and belongs to a round of its writer.
    """
    run = run_builder(**ROUNDS)
    event = run.named("step_committed", step=4, replica=0, rank=0)[0]
    run.events.append(like(event, "checkpoint_saved", step=40, mono=event.mono + 0.1))
    report = check(run.events)
    assert report.verdict == "holds", format_check(report)
    assert report[7].statement.startswith("31 rounds of 10 steps (diloco) by one each, LR of ")
    assert report[6].statement.endswith("in 31 rounds")
    assert report.to_dict()["unit"] == "round"


def test_what_breaks_a_promise_is_dated_by_its_round(run_builder: Callable[..., Any]) -> None:
    """Offences are dated by the round's number, in their text too."""
    run = run_builder(**ROUNDS)
    event = run.named("step_committed", step=4, replica=0, rank=0)[0]
    run.events.append(like(event, "checkpoint_saved", step=50, mono=event.mono + 0.1))
    _finished_step(run)
    report = check(run.events)
    assert failed(report) == {7}
    text = format_check(report)
    assert "saved a checkpoint of a step that it had not committed" in text
    assert ", round 32: finished with round 32 in the state of round 31" in text


def test_a_job_that_goes_on_from_a_checkpoint_goes_back_by_rounds(synthetic_run: Any) -> None:
    """The checkpoint's step is torchtitan's; discarded and repeated units are rounds."""
    run = synthetic_run(**ROUNDS)
    run.begin()
    run.steps(4)
    saved = run.state
    run.steps(3)
    for group in range(3):
        run.exit(group)
    run.state, run.step_number = saved, 4
    run.ends = dict.fromkeys(range(3), 4)
    run.tokens = 4 * 3 * 512
    for group in range(3):
        run.restart(group)
        run.of("checkpoint_loaded", group, step=40, lineage=saved)
    run.steps(5, [2, 1, 0])
    run.finish()
    report = check(run.events)
    assert report.verdict == "holds", format_check(report)
    assert report[4].statement.startswith(
        "3 rounds were made again: training went back from round 7 to 4 ("
    )


@pytest.mark.parametrize(("seconds", "holds"), [(0.3, True), (0.35, False)])
def test_wait_for_a_joiner_in_a_round(
    run_builder: Callable[..., Any], seconds: float, holds: bool
) -> None:
    """However short a heal is beside a round, the others must not wait for more than four of its
    steps.
    """
    report = check(run_builder(lambda run: _wait(run, seconds, steps=1), **ROUNDS).events)
    assert failed(report) == (set() if holds else {5}), format_check(report)


def test_steps_that_a_group_skipped_are_told(run_builder: Callable[..., Any]) -> None:
    """A joiner's first round may have fewer steps; fewer steps of any other group are reported."""
    run = run_builder(**ROUNDS)
    for event in run.named("step_committed", step=22, replica=2):
        event.inner_steps = 7
    assert not any("fewer steps" in note for note in check(run.events)[4].notes)
    for event in run.named("step_committed", step=10, replica=1):
        event.inner_steps = 3
    (note,) = (note for note in check(run.events)[4].notes if "fewer steps" in note)
    assert note.endswith("by a group that had not healed: group 1 made 3 of 10 of round 10")
