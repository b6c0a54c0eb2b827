# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --campaign-peer: its choice of victims, and its figures on short histories."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import command
from benchmarks.campaign import describe, format_campaign, groups_up
from benchmarks.run import BenchError
from benchmarks.systems import PEER, Job
from benchmarks.tries import translate
from tests.benchmarks.histories import commit, started
from tests.benchmarks.test_tries import LOST, tried
from tests.event_builder import build
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event, FaultInjected, Target
from titan_ft.run.log import encode
from titan_ft.run.workers import latest_workers

JOB = Job(PEER, Path("unused"), 2, 2)


def test_only_a_group_that_lives_and_has_contributed_is_up() -> None:
    """A starting group, and a group with a dead rank, are not up."""
    events = [started(0.0, replica, pid=10 + replica) for replica in (0, 1, 2)]
    events += [tried(1.0, 1, replica) for replica in (0, 1, 2)]
    events += [started(2.0, 1, attempt=1, pid=21), tried(3.0, 2, 1, attempt=1, contributed=False)]

    def up(*dead: int) -> dict[int, int]:
        def workers(replica: int) -> list[int]:
            return [pid for pid in latest_workers(events, replica) if pid not in dead]

        return groups_up(SimpleNamespace(workers=workers), RunRecord(translate(events)))  # type: ignore[arg-type]

    assert up() == {0: 0, 2: 0}
    assert up(12) == {0: 0}
    events += [tried(4.0, 3, 1, attempt=1)]
    assert up() == {0: 0, 1: 1, 2: 0}


def campaign_of(*events: Event, span: tuple[float, float] = (0.0, 120.0)) -> dict[str, Any]:
    told = {"seed": 7, "ended": "group-0 ended with status 1"}
    return describe(JOB, RunRecord(translate(events)), span, skipped=1) | told


def test_steps_before_the_campaign_do_not_count() -> None:
    events = [
        started(0.5, 0),
        tried(1.0, 1, **LOST),
        tried(1.2, 1),
        tried(2.0, 2, **LOST),
        tried(3.0, 2),
    ]
    assert (
        campaign_of(*events, span=(1.5, 9.0))["figures"]["exchanges committed of attempted"]
        == "1 of 2 (50.0 %)"
    )
    with pytest.raises(BenchError, match="nothing was committed"):
        campaign_of(*events, span=(3.5, 9.0))


def test_the_table_stands_beside_a_run_of_ours(tmp_path: Path) -> None:
    tries = [tried(float(step), step, replica, digest="x") for step in (1, 2) for replica in (0, 1)]
    kill = build(FaultInjected, time=2.5, fault="sigkill_group", target=Target(1), shot=0)
    campaign = campaign_of(*tries, kill, tried(3.0, 3, **LOST))
    (tmp_path / "events").mkdir()
    ours = [commit(float(step), step) for step in (1, 2, 3)]
    (tmp_path / "events" / "a.jsonl").write_bytes(b"".join(map(encode, ours)))
    text = "\n".join(format_campaign(campaign, tmp_path))
    assert "torchtitan.experiments.ft, 2 groups x 2 ranks" in text
    assert "1 SIGKILLs of a group (1 skipped), 0 crashes of its own" in text
    assert "2 of 3 (66.7 %)" in text
    assert "equal (step 2)" in text
    assert "3 of 3 (100.0 %)" in text
    assert "the job ended early: group-0 ended with status 1" in text
    assert "3 of 3" not in "\n".join(format_campaign(campaign, None))


@pytest.mark.parametrize(
    "arguments",
    [["--minutes", "0.5"], ["--peer-groups", "1"], ["--peer-ranks", "0"], ["--against", "/no/run"]],
)
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--campaign-peer", *arguments])
    assert ended.value.code == 2


def test_the_campaign_is_all_that_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Only the campaign runs. Its figures are saved, and its table and seed are printed."""
    calls = []

    def run_campaign(
        base: Any, work_dir: Path, minutes: float, seed: int, groups: int, ranks: int
    ) -> dict[str, Any]:
        calls.append((minutes, seed, groups, ranks))
        return campaign_of(tried(1.0, 1))

    monkeypatch.setattr(command, "run_campaign", run_campaign)
    figures = tmp_path / "figures.json"
    arguments = [
        "--campaign-peer",
        "--minutes",
        "2",
        "--seed",
        "9",
        "--peer-groups",
        "3",
        "--peer-ranks",
        "1",
    ]
    assert (
        command.main([*arguments, "--json", str(figures), "--work-dir", str(tmp_path / "work")])
        == 0
    )
    assert calls == [(2.0, 9, 3, 1)]
    output = capsys.readouterr()
    assert "seed 9" in output.err
    assert "1 of 1 (100.0 %)" in output.out
    assert json.loads(figures.read_text())["campaign_peer"]["steps_committed"] == 1
