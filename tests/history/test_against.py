# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's loss curve against that of a run without failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import change
from titan_ft.cli.main import main
from titan_ft.history import check as check_module
from titan_ft.history.check import Verdicts, make_check_table
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import text_of
from titan_ft.run.events import Event, LaunchFinished
from titan_ft.run.log import EventLog


def check(events: list[Event], against: list[Event] | None = None) -> Verdicts:
    return check_module.check(RunRecord(events), None if against is None else RunRecord(against))


def format_check(report: Verdicts) -> str:
    return text_of(make_check_table(report))


def clean(
    run_class: Any, num_groups: int = 2, steps: int = 60, loss_scale: float = 1.0, **fields: Any
) -> Any:
    """Return a run without failures."""
    run = run_class(num_groups)
    run.loss_scale = loss_scale
    run.begin(**fields)
    run.steps(steps)
    run.finish()
    return run


def failing(run_class: Any, loss_scale: float = 1.0, steps: int = 30) -> Any:
    """Make a run of two groups, one of which is away for a while; from then on its losses are
    scaled.
    """
    run = run_class(2)
    run.begin()
    run.steps(10)
    run.kill(1)
    run.loss_scale = loss_scale
    run.steps(10, [0])
    run.restart(1)
    run.heal(1, lambda: run.steps(6, [0]))
    run.steps(steps)
    run.finish()
    return run


def judge(run: Any, reference: Any) -> Verdicts:
    return check(run.events, reference.events)


def test_equal_runs_agree_bit_for_bit(synthetic_run: Any) -> None:
    """Two runs of the same losses agree, and the promise is asked then."""
    report = judge(clean(synthetic_run), clean(synthetic_run))
    assert report.verdict == "holds", format_check(report)
    assert report[1].asked
    assert "the first 60 steps agree bit for bit" in report[1].statement
    assert "final loss" in report[1].statement


@pytest.mark.parametrize(("num_groups", "verdict"), [(2, "does not hold"), (4, "holds")])
def test_one_bit(synthetic_run: Any, num_groups: int, verdict: str) -> None:
    """Up to two groups must agree in every bit; with more the order of additions may differ, which
    is reported.
    """
    run = clean(synthetic_run, num_groups)
    for event in run.named("step_committed", step=7):
        event.loss += 1e-12
    report = judge(run, clean(synthetic_run, num_groups))
    assert report[1].verdict == verdict, format_check(report)
    if verdict == "holds":
        assert "agree to" in report[1].statement
    else:
        assert report[1].offences[0].step == 7


def test_first_steps_that_differ_by_much(synthetic_run: Any) -> None:
    """Rounding does not explain a percent in the first steps, for any number of groups."""
    report = judge(clean(synthetic_run, 4, loss_scale=1.01), clean(synthetic_run, 4))
    assert report[1].verdict == "does not hold"


@pytest.mark.parametrize("steps", [30, 60])
def test_run_with_failures_follows_the_curve(synthetic_run: Any, steps: int) -> None:
    """A run that lost a group is compared step by step before the loss, and at equal tokens after
    it.
    """
    report = judge(failing(synthetic_run, steps=steps), clean(synthetic_run))
    assert report[1].verdict == "holds", format_check(report)
    assert "the first 10 steps agree bit for bit" in report[1].statement
    assert "mean of the last 10%" in report[1].statement


def test_run_that_left_the_curve(synthetic_run: Any) -> None:
    """A loss above the undisturbed run's by more than its own scatter does not hold."""
    report = judge(failing(synthetic_run, loss_scale=1.1), clean(synthetic_run))
    assert report[1].verdict == "does not hold", format_check(report)
    assert "above that of the run without failures" in report[1].offences[0].text


def test_lower_loss_is_a_note(synthetic_run: Any) -> None:
    """A lower loss at equal tokens is no offence: smaller batches make more steps."""
    report = judge(failing(synthetic_run, loss_scale=0.9), clean(synthetic_run))
    assert report[1].verdict == "holds"
    assert "below that of the run without failures" in report[1].notes[0]


def test_too_short_for_a_verdict(synthetic_run: Any) -> None:
    """A few steps after the first failure prove nothing."""
    report = judge(failing(synthetic_run, steps=3), clean(synthetic_run, steps=16))
    assert report[1].verdict == "unknown"
    assert "5 are needed" in report[1].unknown[0]


def test_other_config_is_unknown(synthetic_run: Any) -> None:
    """Runs of different configs are not compared; their final losses are shown."""
    report = judge(clean(synthetic_run), clean(synthetic_run, config_digest="other"))
    assert (report[1].verdict, report.verdict) == ("unknown", "unknown")
    assert "different configs" in report[1].unknown[0]
    assert "final loss" in report[1].statement


def test_reference_without_commits_is_unknown(synthetic_run: Any) -> None:
    """An empty history to compare with proves nothing."""
    assert check(clean(synthetic_run).events, [])[1].verdict == "unknown"
    assert check([], clean(synthetic_run).events)[1].verdict == "unknown"


def test_reference_that_is_cut_is_unknown(synthetic_run: Any) -> None:
    """A reference whose beginning is missing is not compared."""
    reference = clean(synthetic_run)
    events = [event for event in reference.events if getattr(event, "step", 9) > 5]
    assert check(clean(synthetic_run).events, events)[1].verdict == "unknown"


def test_groups_that_tell_different_figures(synthetic_run: Any) -> None:
    """Differing figures of one run's groups are an offence, with and without another run."""
    run = clean(synthetic_run)
    run.named("step_committed", step=5, replica=1)[0].grad_norm += 0.1
    for report in (check(run.events), judge(run, clean(synthetic_run))):
        assert report[1].verdict == "does not hold"
        assert report[1].asked


def test_damaged_reference_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged file of the other run is named."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder, text in (
        (good, '{"time": 1.0, "event": "of_a_newer_version"}\n'),
        (bad, "{}\n{}\n"),
    ):
        (folder / "events").mkdir(parents=True)
        (folder / "events" / "a.jsonl").write_text(text)
    EventLog(good / "events" / "b.jsonl").emit(LaunchFinished(code=0, reason="all groups finished"))
    assert main(["check", str(good), "--against", str(bad)]) == 1
    assert "bad/events/a.jsonl:1 must be a JSON object" in capsys.readouterr().out


def test_a_round_that_a_group_joined_in_the_midst_of_is_not_compared_bit_for_bit(
    synthetic_run: Any,
) -> None:
    """A group may die and return within one round: all groups take part, and that one with fewer
    batches.
    """

    def rounds() -> Any:
        run = synthetic_run(2, semi_sync_method="diloco", sync_steps=10)
        run.begin()
        run.steps(60)
        run.finish()
        return run

    run = rounds()
    for event in run.named("step_committed", step=20):
        change(event, loss=event.loss + 1e-6, inner_steps=10 - 3 * event.replica)
    report = judge(run, rounds())
    assert report.verdict == "holds", format_check(report)
    assert report[1].statement.startswith("the first 19 rounds agree bit for bit")
