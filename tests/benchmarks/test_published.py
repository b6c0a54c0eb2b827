# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A campaign beside the published run that its plan repeats."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.figures import main
from benchmarks.published import BLOG, side_by_side
from tests.benchmarks.histories import commit, commits, killed, started
from tests.event_builder import build
from tests.history.test_rework import Loop
from titan_ft.chaos.plan_file import load_plan
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import ChaosStarted, Event
from titan_ft.run.log import encode

ROOT = Path(__file__).parents[2]


def history(plan: str = "blog_15s.toml") -> list[Event]:
    """Two groups; the second is killed twice and is back once; a step takes two votes."""
    return [
        build(ChaosStarted, time=0.0, seed=1, plan=plan, schedule="in words"),
        started(0.1, 0, pid=10),
        started(0.1, 1),
        *commits([1.0, 2.0], 0),
        *commits([1.0, 2.0], 1),
        *killed(2.5, shot=0),
        commit(4.0, 3, 0, exchanges=2, participants=[0]),
        started(5.0, 1, attempt=1, pid=2),
        *commits([6.0, 7.0], 0, first_step=4),
        *commits([6.0, 7.0], 1, first_step=4, attempt=1),
        *killed(17.5, attempt=1, shot=1),
    ]


def test_a_campaign_stands_beside_the_run_that_it_repeats() -> None:
    """The table has their count and ours, each named, and says what may be compared."""
    shown = "\n".join(side_by_side(RunRecord(history())))
    votes = re.search(
        r"^\| steps committed of attempted, .*votes *\| (.*?) *\| (.*?) *\|$", shown, re.M
    )
    assert votes, shown
    assert votes.groups() == ("268 of 888 (30.2 %)", "5 of 6 (83.3 %)")
    assert re.search(r"^\| a group is killed each *\| 15 s *\| 15 s \(2 in all\) *\|$", shown, re.M)
    assert re.search(
        r"^\| recoveries *\| over 1,200, in all their runs *\| 1 of 2 groups that died *\|$",
        shown,
        re.M,
    )
    assert re.search(
        r"^\| groups x ranks *\| 30 x 10 \(L40S\), Llama 3 1B *\| 2 x 1 *\|$", shown, re.M
    )
    assert re.search(r"^Comparable: .*\nNot comparable: ", shown, re.M)
    (milder,) = [
        line for line in side_by_side(RunRecord(history("blog_60s.toml"))) if ": votes" in line
    ]
    assert "5,145 of 6,249 (82.3 %)" in milder


def test_a_campaign_of_another_plan_stands_alone() -> None:
    """A folder whose launches have several plans repeats no published run either."""
    assert side_by_side(RunRecord(history("campaign.toml"))) == []
    assert side_by_side(RunRecord([*history("blog_15s.toml"), *history("blog_60s.toml")])) == []


def test_what_a_resumed_campaign_made_again_is_told() -> None:
    """Repeated steps count as attempted, and the table says so."""
    campaign = build(ChaosStarted, time=0.5, seed=1, plan="blog_15s.toml", schedule="in words")
    shown = "\n".join(side_by_side(RunRecord([campaign, *Loop().again(7, code=0).events])))
    assert "7 of 10 (70.0 %)" in shown
    assert (
        "\nCounted as attempted, and not as committed, in both rows: 3 steps were made again: training went"
        in shown
    )
    assert "Counted" not in "\n".join(side_by_side(RunRecord(history())))


def test_the_plans_do_what_was_published() -> None:
    """The plans kill one group at the published pace, or more often."""
    for name, published in BLOG.items():
        plan = load_plan(ROOT / "configs" / "chaos" / name, seed=1)
        (rule,) = plan.rules
        pace = rule.seconds if name == "every_5s.toml" else published.seconds  # type: ignore[union-attr]
        assert (plan.name, rule.seconds) == (name, pace)  # type: ignore[union-attr]
        assert pace <= published.seconds


def test_the_campaigns_figures_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    (folder / "launcher-1.jsonl").write_bytes(
        b"".join(encode(event) + b"\n" for event in history())
    )
    monkeypatch.setattr(sys, "argv", ["figures", "--expect-faults", str(tmp_path / "run")])
    assert main() == 0
    assert "268 of 888" in capsys.readouterr().out
