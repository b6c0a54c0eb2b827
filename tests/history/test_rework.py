# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Repeated work of a run: its amount, its cause, and when it breaks a promise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.history.histories import calm_run, commit, fault, killed_run, say
from titan_ft.history.check import Verdicts, check, make_check_table
from titan_ft.history.checks.work import check_work
from titan_ft.history.judgement import Judgement
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of
from titan_ft.history.timing.rework import Rework, find_rework
from titan_ft.run.events import Event

SAVED, REACHED = 2, 5
"""Of the runs below: the step of the checkpoint, and the step that is reached before all groups
end.
"""


class Loop:
    """A job of two groups that loses both at `REACHED` and continues from the checkpoint of
    `SAVED`.
    """

    def __init__(self) -> None:
        self.events: list[Event] = [say(0.0, "launch_started", replicas=2)]
        self.now, self.life = 1.0, 0
        self._train(1, REACHED)

    def _train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.now += 1.0
            parent = self.name(step - 1) if step > first or self.life == 0 else f"{step - 1:012x}"
            for replica in (0, 1):
                made = {
                    "lineage": self.name(step),
                    "parent": parent,
                    "attempt": self.life,
                    "forward_passes": 0,
                }
                self.events.append(commit(self.now, step, replica, **made))

    def name(self, step: int) -> str:
        """The lineage of a step in this life."""
        return f"{self.life * 256 + step:012x}"

    def end(self, **how: Any) -> None:
        """End both groups, by a failure of their own unless `how` says otherwise, and
        restart them.
        """
        self.now += 0.5
        for replica in (0, 1):
            told = how or {"code": 1, "reason": "rank 0 ended with exit status 1"}
            self.events.append(say(self.now, "worker_exited", replica, attempt=self.life, **told))
        self.life += 1
        for replica in (0, 1):
            self.events.append(say(self.now, "replica_restarted", replica, attempt=self.life))

    def load(self) -> None:
        """Let both groups load the checkpoint."""
        self.now += 1.0
        for replica in (0, 1):
            loaded = {"step": SAVED, "lineage": f"{SAVED:012x}", "attempt": self.life}
            self.events.append(say(self.now, "checkpoint_loaded", replica, **loaded))

    def again(self, last: int = REACHED, **how: Any) -> Loop:
        """Lose all groups and train from the checkpoint up to `last`."""
        self.end(**how)
        self.load()
        self._train(SAVED + 1, last)
        return self

    def rework(self) -> Rework:
        return find_rework(RunRecord(self.events))

    def work(self) -> Judgement:
        """Return promise 4's verdict for a complete history."""
        found = Judgement("no work lost", 4)
        check_work(RunRecord(self.events), found)
        return found.decide()

    def verdicts(self) -> Verdicts:
        return check(RunRecord(self.events))


def test_a_run_without_rework_says_nothing_of_it() -> None:
    """A calm run has no rework, nor has one in which a group died and healed."""
    for events in (calm_run(), killed_run()):
        record = RunRecord(events)
        assert find_rework(record) == Rework()
        assert check(record)[4].reservation == ""
        assert "made again" not in text_of(make_summary_table(summarize(record)))


def test_going_back_once_is_told_beside_the_verdict() -> None:
    """If all groups are lost, the cost in steps and the cause stand beside a "holds"."""
    run = Loop().again()
    rework = run.rework()
    (setback,) = rework.setbacks
    assert (setback.step, setback.reached, setback.again) == (SAVED, REACHED, (3, 4, 5))
    assert not setback.explained
    text = "3 steps were made again: training went back from step 5 to 2 (groups 0, 1: exit code 1)"
    assert rework.describe() == text
    verdicts = run.verdicts()
    work = run.work()
    assert work.verdict == "holds"
    assert verdicts[4].statement.startswith(text)
    shown = text_of(make_check_table(verdicts)).splitlines()
    assert text in shown[1]
    assert "made again" in text_of(make_summary_table(summarize(RunRecord(run.events))))


@pytest.mark.parametrize(
    ("verdict", "joined"),
    [("holds", "holds (1 promise checked); "), ("unknown", "breaks no promise; ")],
)
def test_the_verdict_is_no_plain_one(verdict: str, joined: str) -> None:
    """The repeated steps stand beside any verdict."""
    verdicts = Loop().again().verdicts()
    for each in verdicts.judgements:
        each.asked = each.promise == 4
    verdicts[4].verdict = verdict  # type: ignore[assignment]
    assert f"{joined}3 steps were made again" in verdicts.promises
    assert verdicts.colour == "amber"
    assert json.loads(json.dumps(verdicts.to_dict()))["promises"] == verdicts.promises


def test_a_step_that_is_made_three_times_breaks_a_promise() -> None:
    """The same failure at the same place, again and again: the steps before it are made in vain."""
    run = Loop().again().again(last=4)
    verdicts = run.verdicts()
    (offence,) = verdicts[4].offences
    assert offence.text == "steps 3 to 4 were made 3 times: groups 0, 1: exit code 1"
    assert verdicts[4].shown_verdict == "does not hold"
    assert verdicts.promises.startswith("does not hold: ")
    assert (
        "no work lost; 6 steps were thrown away, 5 made again: training went back 2"
        in verdicts.promises
    )


def test_going_back_without_getting_anywhere_breaks_a_promise() -> None:
    """Though no step was made three times: the job dies earlier each time."""
    run = Loop().again(last=4).again(last=3)
    assert [each for each in run.verdicts()[4].offences if "in a row" in each.text] == []
    run = run.again(last=2)
    run.end()
    texts = [text for _, text in run.rework().offences]
    assert (
        "training went back 3 times in a row without getting beyond step 5 (groups 0, 1: exit code 1)"
        in texts
    )


def test_setbacks_that_lead_on_are_no_loop() -> None:
    """A job that is lost again and again and gets further each time breaks nothing."""
    run = Loop()
    for further in range(1, 5):
        run.again(last=REACHED + further)
    texts = [text for _, text in run.rework().offences]
    assert not [text for text in texts if "in a row" in text]


def test_what_was_injected_or_asked_for_breaks_no_promise() -> None:
    """Injected kills of all groups, and a user's load of an old checkpoint, are reported and break
    nothing.
    """
    killed = Loop()
    for _ in range(4):
        for replica in (0, 1):
            killed.events.append(fault(killed.now + 0.4, "kill_group", replica, shot=killed.life))
        killed.again(signal="SIGKILL")
    assert {setback.cause for setback in killed.rework().setbacks} == {
        "groups 0, 1: kill_group (SIGKILL)"
    }
    assert killed.rework().offences == ()
    resumed = Loop()
    for _ in range(4):
        resumed.events.append(say(resumed.now + 0.9, "launch_started", replicas=2))
        resumed.again()
    assert {setback.cause for setback in resumed.rework().setbacks} == {"a new launch"}
    assert resumed.rework().offences == ()
    assert resumed.rework().num_again == 4 * 3
    assert resumed.work().verdict == "holds"


def test_a_late_clock_makes_no_second_setback() -> None:
    """A group's load event may seem later than the others' first commit after it."""
    run = Loop()
    run.end()
    run.load()
    late = run.events.pop()
    run._train(SAVED + 1, REACHED)
    first = next(event for event in run.events if event.time > late.time)
    late.time = first.time + 0.2
    run.events.append(late)
    (setback,) = run.rework().setbacks
    assert setback.again == (3, 4, 5)


def test_a_step_that_only_some_groups_had_committed() -> None:
    """Its exchange broke for the others, who repeated it without that group, which is
    reported too.
    """
    events = calm_run()
    stray = commit(12.1, 4, 1, lineage="abc", parent=f"{3:012x}", participants=[0, 1])
    rework = find_rework(RunRecord([*events, stray]))
    assert rework.parted == (4,)
    assert rework.describe() == "1 step was made again that only some groups had committed"


def test_for_json() -> None:
    """The figures are plain values, with the sentence that views show."""
    run = Loop().again().again()
    told = json.loads(json.dumps(summarize(RunRecord(run.events)).to_dict()))["rework"]
    assert (told["num_lost"], told["num_again"]) == (6, 6)
    assert told["text"] == run.rework().describe()
    assert len(told["offences"]) == 1
    assert told["setbacks"][0]["cause"] == "groups 0, 1: exit code 1"
