# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/campaign.sh: what it refuses and runs; scripts/campaign_figures.py: its figures on short histories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where scripts find each other

from campaign_figures import ROWS, Digest, compare_digests, figures, stalls, table  # noqa: E402

from tests.event_builder import build  # noqa: E402
from titan_ft.run.events import Event, FaultInjected, StepCommitted, Target  # noqa: E402
from titan_ft.run.log import encode  # noqa: E402

# It only notes what it is asked to run, and ends as the variables of its environment say.
STAND_IN = """#!/bin/bash
echo "$@" >>"$CALLS"
case "$*" in
*launch*--chaos\\ *)
    [[ -z $HANG ]] || { echo $$ >"$HANG"; exec sleep 60; }
    exit "${LAUNCH:-0}" ;;
*launch*) exit "${REFERENCE:-0}" ;;
*check*) exit "${CHECK:-0}" ;;
*report*) exit "${REPORT:-0}" ;;
*--expect-faults*) exit "${FIGURES:-0}" ;;
esac
"""


def clean_environment(**environment: str) -> dict[str, str]:
    ours = ("TITAN_FT_", "PYTHON", "CALLS", "HANG", "LAUNCH", "CHECK", "REPORT", "REFERENCE", "FIGURES")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, **environment}


@pytest.fixture
def campaign(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]:
    """Run the script with a stand-in for the interpreter; returns how it ended, and the calls."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.write_text("")
        ended = subprocess.run(
            ["/bin/bash", str(SCRIPTS / "campaign.sh"), *arguments],
            env=clean_environment(TITAN_FT_PYTHON=str(python), CALLS=str(calls), HANG="", **environment),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended, calls.read_text().splitlines()

    return run


Campaign = Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]


def test_a_campaign_is_launched_checked_and_reported(campaign: Campaign, tmp_path: Path) -> None:
    """The seed is printed and handed on; the user's flags come last, so that they win."""
    plan = tmp_path / "plan.toml"
    plan.touch()
    arguments = ["--seed", "7", "--minutes", "3", "--groups", "5", "--run-dir", "run", "--plan", "plan.toml"]
    ended, calls = campaign(*arguments, "--", "--metrics.log_freq=5")
    assert ended.returncode == 0, ended.stderr
    assert "seed 7" in ended.stdout
    launch, check, report, shown = calls
    run_dir = tmp_path / "run"
    shape = f"--replicas 5 --ranks-per-replica 1 --run-dir {run_dir}"
    assert (
        f"-m titan_ft launch configs/llama3_debug.toml {shape} --chaos {plan} --chaos-seed 7 --minutes 3 --" in launch
    )
    assert launch.endswith("--training.steps=100000 --fault_tolerance.chaos --metrics.log_freq=5")
    assert "--lr_scheduler.total_steps=100000" in launch
    assert check == f"-m titan_ft check {run_dir}"
    assert report == f"-m titan_ft report {run_dir}"
    assert shown == f"scripts/campaign_figures.py --expect-faults {run_dir}"
    assert f"{run_dir}/report/index.html" in ended.stdout


def test_without_a_seed_one_is_drawn_and_printed(campaign: Campaign, tmp_path: Path) -> None:
    ended, calls = campaign("--run-dir", str(tmp_path / "run"))
    seed = calls[0].partition("--chaos-seed ")[2].split()[0]
    assert f"seed {seed}, 20 minutes, 4 groups x 1 ranks" in ended.stdout
    assert f"--chaos {ROOT}/configs/chaos/campaign.toml" in calls[0]


def test_the_reference_is_the_same_run_without_faults(campaign: Campaign, tmp_path: Path) -> None:
    """As long, no chaos, the same flags: so the same LR at each step and the same batches."""
    run_dir, reference = tmp_path / "run", tmp_path / "run-reference"
    ended, calls = campaign("--run-dir", str(run_dir), "--reference", "--", "--metrics.log_freq=5")
    assert ended.returncode == 0, ended.stderr
    first, second, check, _, shown = calls
    assert f"--run-dir {reference} --minutes 20 -- " in second
    flags = [call.partition(" -- ")[2].split() for call in (first, second)]
    assert set(flags[0]) - set(flags[1]) == {"--fault_tolerance.chaos"}
    assert set(flags[1]) < set(flags[0])
    assert check == f"-m titan_ft check {run_dir} --against {reference}"
    assert shown == f"scripts/campaign_figures.py --expect-faults {run_dir} {reference}"


@pytest.mark.parametrize(
    ("environment", "status", "message"),
    [
        ({"CHECK": "1"}, 1, ""),
        ({"REPORT": "1"}, 1, ""),
        ({"LAUNCH": "1"}, 1, "the run did not end in order (status 1); its logs are in"),
        ({"LAUNCH": "1", "CHECK": "1"}, 1, "did not end in order"),
        ({"FIGURES": "1"}, 1, ""),
    ],
)
def test_what_fails_is_told_and_still_judged_and_reported(
    campaign: Campaign, tmp_path: Path, environment: dict[str, str], status: int, message: str
) -> None:
    ended, calls = campaign("--run-dir", str(tmp_path / "run"), **environment)
    assert ended.returncode == status
    assert message in ended.stderr
    assert [call.split()[2] for call in calls[:3]] == ["launch", "check", "report"]


def test_a_wrong_config_is_not_judged(campaign: Campaign, tmp_path: Path) -> None:
    ended, calls = campaign("--run-dir", str(tmp_path / "run"), LAUNCH="2")
    assert (ended.returncode, len(calls)) == (2, 1)


def test_a_reference_that_fails_is_no_comparison(campaign: Campaign, tmp_path: Path) -> None:
    ended, calls = campaign("--run-dir", str(tmp_path / "run"), "--reference", REFERENCE="1")
    assert ended.returncode == 1
    assert "the run without faults failed" in ended.stderr
    assert f"-m titan_ft check {tmp_path / 'run'}" in calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "1"], "--minutes must be a whole number, at least 2, got '1'"),
        (["--minutes", "x"], "--minutes must be a whole number"),
        (["--groups", "1"], "--groups must be a whole number, at least 2, got '1'"),
        (["--ranks", "0"], "--ranks must be a whole number"),
        (["--seed", "-3"], "--seed must be a whole number"),
        (["--seed"], "--seed needs a value"),
        (["--plan", "/no/plan.toml"], "--plan must be a TOML file, got '/no/plan.toml'"),
        (["--run-dir", "."], "--run-dir must not hold another run"),
        (["--training.steps=3"], "no option '--training.steps=3' (torchtitan flags go after --)"),
    ],
)
def test_bad_usage_is_one_line(campaign: Campaign, arguments: list[str], message: str) -> None:
    ended, calls = campaign(*arguments)
    assert (ended.returncode, calls) == (2, [])
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_usage_names_every_option(campaign: Campaign) -> None:
    ended, _ = campaign("--help")
    assert ended.returncode == 0
    for name in ("minutes", "seed", "groups", "ranks", "run-dir", "plan", "reference"):
        assert f"--{name}" in ended.stdout


def test_a_campaign_that_is_stopped_ends_its_launch(tmp_path: Path) -> None:
    """SIGTERM to the script ends what it started."""
    python, pid_file = tmp_path / "python", tmp_path / "pid"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = clean_environment(TITAN_FT_PYTHON=str(python), CALLS=str(tmp_path / "calls"), HANG=str(pid_file))
    command = ["/bin/bash", str(SCRIPTS / "campaign.sh"), "--run-dir", str(tmp_path / "run")]
    script = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30.0
        while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(pid_file.read_text())
        script.send_signal(signal.SIGTERM)
        assert script.wait(30.0) == 130
        assert not Path(f"/proc/{pid}").exists()
    finally:
        script.kill()
        script.wait()


def commit(time: float, step: int, replica: int = 0, **fields: Any) -> Event:
    shape = {"rank": 0, "attempt": 0, "participants": [0, 1], "exchanges": 1, "forward_passes": 1}
    data = {"slot": replica, "first_batch": step - 1, "num_batches": 1}
    usual = {**shape, "data": data, "loss": 9.0 - step, "seconds": 1.0}
    return build(StepCommitted, time=time, replica=replica, step=step, **usual | fields)


def kill(time: float, replica: int) -> Event:
    return build(FaultInjected, time=time, fault="kill_groups", shot=0, target=Target(replica))


def test_figures_of_a_short_history() -> None:
    """Steps of 1 s, a fault that stalls one by 2 s and takes a retry; both groups end with the same weights."""
    times = {1: 1.0, 2: 2.0, 3: 5.0, 4: 6.0, 5: 7.0}
    events = [
        commit(time, step, replica, digest="aa" if step == 5 else f"{replica}", exchanges=2 if step == 3 else 1)
        for step, time in times.items()
        for replica in (0, 1)
    ]
    # One shot that hits two groups is one failure.
    events += [kill(2.1 + replica / 100, replica) for replica in (1, 2)]
    shown = figures(sorted(events, key=lambda event: event.time))
    assert list(shown) == list(ROWS)
    assert shown["failures injected"] == "1 of 1 kinds"
    assert shown["exchanges committed of attempted"] == "5 of 6 (83.3 %)"
    assert shown["forward passes for nothing"] == "0 of 10 (0.0 %)"
    # 4 steps of 1 s in 6 s.
    assert shown["effective training time"] == "66.7 %"
    assert shown["stall per failure (s), median (max)"] == "2.00 (2.00)"
    assert shown["weights after the last step that all have"] == "equal (step 5); differ in 4 of 5 comparisons"
    assert shown["loss of the last steps that all runs have"] == "6.000"
    assert figures(events, until=3)["loss of the last steps that all runs have"] == "7.000"


def digest(step: int, replica: int, value: str, life: int = 0, rank: int = 0, time: float = 0.0) -> Digest:
    return Digest(time or float(step), life, step, rank, replica, value)


def test_digests_are_compared_by_rank_and_step() -> None:
    same = [digest(5, 0, "a"), digest(5, 1, "a"), digest(5, 0, "b", rank=1), digest(5, 1, "b", rank=1)]
    assert str(compare_digests(same)) == "equal (step 5)"
    # At the last step only one group has one.
    assert str(compare_digests([*same, digest(10, 0, "c")])) == "equal (step 5)"
    differ = [*same, digest(10, 0, "c", rank=1), digest(10, 1, "d", rank=1), digest(10, 0, "e"), digest(10, 1, "e")]
    assert str(compare_digests(differ)) == "differ (step 10); differ in 1 of 4 comparisons"
    assert compare_digests([digest(5, 0, "a")]).last == "unknown"
    assert compare_digests([]).last == "unknown"


def test_the_last_step_is_the_last_in_time() -> None:
    """A job that went back has lower steps later."""
    late = [digest(5, 0, "x", life=1, time=90.0), digest(5, 1, "y", life=1, time=91.0)]
    assert compare_digests([digest(50, 0, "a"), digest(50, 1, "a"), *late]).last == "differ"


def test_a_stall_may_show_in_the_step_after_the_next() -> None:
    commits = [0.0, 1.0, 2.0, 3.0, 7.0, *(8.0 + step for step in range(9))]
    assert stalls(commits, [1.5]) == [3.0]
    assert stalls(commits, [7.5]) == [0.0]
    assert stalls(commits, [99.0]) == []
    assert stalls([], [1.0]) == []


def test_runs_without_a_figure_show_a_dash() -> None:
    lines = table({"a": {"length (min)": "1.0"}, "b": {"length (min)": "2.0", "failures injected": "3"}})
    assert [cell.strip() for cell in lines[-1].split("|")[1:-1]] == ["failures injected", "-", "3"]
    assert len(lines) == 4


def run_figures(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(PYTHONPATH=str(ROOT))
    command = [sys.executable, str(SCRIPTS / "campaign_figures.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_the_table_is_printed(tmp_path: Path) -> None:
    """A column for each run, with losses of the same steps; a folder without events is named."""
    for name, last in (("a", 3), ("b", 4)):
        events = tmp_path / name / "events"
        events.mkdir(parents=True)
        lines = [encode(commit(float(step), step)) for step in range(1, last + 1)]
        (events / "replica-0.jsonl").write_bytes(b"".join(lines))
    shown = run_figures(str(tmp_path / "a"), str(tmp_path / "b")).stdout
    assert "3 of 3 (100.0 %)" in shown
    assert "4 of 4 (100.0 %)" in shown
    assert [cell.strip() for cell in shown.splitlines()[-1].split("|")[2:4]] == ["7.000", "7.000"]
    unbroken = run_figures("--expect-faults", str(tmp_path / "a"))
    assert (unbroken.returncode, unbroken.stdout.splitlines()[-1][:4]) == (1, shown.splitlines()[-1][:4])
    assert "no fault was injected, so that this proves nothing; give it more --minutes" in unbroken.stderr
    (tmp_path / "a" / "events" / "chaos.jsonl").write_bytes(encode(kill(2.5, 0)))
    assert run_figures("--expect-faults", str(tmp_path / "a"), str(tmp_path / "b")).returncode == 0
    empty = run_figures(str(tmp_path / "c"))
    assert empty.returncode == 1
    assert "has no events" in empty.stderr
