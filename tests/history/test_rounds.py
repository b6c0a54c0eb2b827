# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of a run with a semi-synchronous method: their names, and groups that made fewer steps
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from tests.event_builder import change
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.cards import find_cards
from titan_ft.history.report.facts import list_goodput_terms, report_figures
from titan_ft.history.rounds import ShortRound, find_rounds
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of
from titan_ft.history.timing.goodput import effective_training_time
from titan_ft.run.events import WorkerConfig

DILOCO = {"semi_sync_method": "diloco", "sync_steps": 10, "steps": 306}
"""Of the run with 31 rounds: the last one has six steps."""


@pytest.fixture
def run(run_builder: Callable[..., Any]) -> Any:
    """A run of three groups in rounds: group 2 is away in rounds 7 to 21, and makes 8 of 10 steps
    in round 22.
    """
    run = run_builder(**DILOCO)
    for event in run.named("step_committed", step=22, replica=2):
        event.inner_steps = 8
    for event in run.named("step_committed", step=31):
        change(event, inner_step=306, inner_steps=6)
    return run


def test_names_of_what_is_committed() -> None:
    """A commit is a step, or a round with torchtitan's step after it; the last round may be
    short.
    """
    unit = Unit("diloco", 10, 95)
    assert (STEP.name(1234), STEP.name(1234, ","), STEP.count(1)) == (
        "step 1234",
        "step 1,234",
        "1 step",
    )
    assert (unit.name(4), unit.name(10), unit.count(2)) == (
        "round 4 (step 40)",
        "round 10 (step 95)",
        "2 rounds",
    )
    assert [unit.commits_after(step) for step in (0, 1, 10, 11, 95)] == [0, 1, 1, 2, 10]
    assert [STEP.step_after(7), STEP.commits_after(7)] == [7, 7]


def test_unit_of_an_older_history() -> None:
    """A config without a method, and a missing config, mean that each step is committed."""
    assert Unit.of(None) == STEP
    known = {"steps": 9, "semi_sync_method": None, "sync_steps": None}
    config = WorkerConfig(**{name: known.get(name, 0) for name in WorkerConfig.__struct_fields__})  # type: ignore[arg-type]
    assert Unit.of(config) == Unit(last=9)


def test_who_made_fewer_steps(run: Any) -> None:
    """A joiner is named with its steps, an absent or excluded group with none; a last round may be
    short for all.
    """
    rounds = find_rounds(RunRecord(run.events))
    assert rounds is not None
    assert rounds.committed == 31
    assert rounds.short[0] == ShortRound(7, 70, rounds.short[0].time, 10, {2: 0})
    assert [(each.number, each.fewer) for each in rounds.short[-2:]] == [(22, {2: 8}), (26, {1: 0})]
    assert len(rounds.short) == 17
    assert rounds.steps == ((0, 306), (1, 296), (2, 154))
    assert rounds.short[-2].describe() == "group 2: 8 of 10"


def test_steps_of_a_group_that_died_behind_its_exchange(run: Any) -> None:
    """The group's change is in the state, and no event has its number of steps: it is unknown, not
    zero.
    """
    for event in run.named("step_committed", step=6, replica=2):
        run.events.remove(event)
    rounds = find_rounds(RunRecord(run.events))
    assert rounds is not None
    assert rounds.short[0].fewer == {2: None}
    assert rounds.short[0].describe() == "group 2: unknown of 10"


def test_report_speaks_of_rounds(run: Any) -> None:
    """Terminal and JSON have rounds; a run that commits each step has neither the word nor the
    figure.
    """
    record = RunRecord(run.events)
    text = text_of(make_summary_table(summarize(record)))
    assert (
        "rounds committed               31, of 10 steps each (diloco); 154 to 306 steps of a group; not all"
        in text
    )
    assert " s a round (median)" in text
    figures = report_figures(record)
    assert figures["unit"] == "round"
    assert figures["rounds"]["committed"] == 31
    assert figures["rounds"]["short"][-1]["fewer"] == {1: 0}
    first = find_cards(record)[0]
    assert (first.name, first.text) == ("rounds", "31 of 31")
    assert first.detail.endswith(" a round")
    assert "Usual round" in [term for term, _, _ in list_goodput_terms(record)]


def test_a_joiner_counts_by_its_part_of_a_round(run_builder: Callable[..., Any]) -> None:
    """A group with 2 of 10 steps of a round was away for the rest, which is no effective training
    time.
    """
    shares = []
    for made in (10, 2):
        run = run_builder(semi_sync_method="diloco", sync_steps=10)
        for event in run.named("step_committed", step=22, replica=2):
            event.inner_steps = made
        record = RunRecord(run.events)
        share, _ = effective_training_time(record)
        assert share is not None
        begin, end = record.span_us
        shares.append(share * (end - begin) / record.usual_step_us)
    assert shares[0] - shares[1] == pytest.approx(0.8 / 3, rel=0.05)


def test_a_resume_may_lower_the_number_of_steps(run: Any) -> None:
    """Rounds beyond the new last step have no step of their own by the new config; their groups
    count.
    """
    share, _ = effective_training_time(RunRecord(run.events))
    last = max(run.named("worker_started"), key=lambda event: event.time)
    last.config = structs.replace(last.config, steps=100)
    record = RunRecord(run.events)
    assert record.unit.last == 100
    lowered, _ = effective_training_time(record)
    assert lowered is not None
    assert lowered >= share


def test_a_round_of_fragments_has_a_part_of_the_steps(run_builder: Callable[..., Any]) -> None:
    """Each of three fragments is exchanged once in 30 steps, one of them in 10; an older history
    has only the 30.
    """
    for told, length in ((10, 10), (None, 30)):
        run = run_builder(semi_sync_method="diloco", sync_steps=30)
        for event in run.named("worker_started"):
            event.config.round_steps = told
        unit = RunRecord(run.events).unit
        assert (unit.steps, unit.name(2)) == (length, f"round 2 (step {2 * length})")


def test_a_run_without_rounds_has_none(good_run: Any) -> None:
    record = RunRecord(good_run.events)
    assert find_rounds(record) is None
    assert report_figures(record)["rounds"] is None
    assert "round" not in text_of(make_summary_table(summarize(record)))
