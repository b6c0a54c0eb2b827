# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/campaign.sh: its refusals, and the commands that it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

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
    ours = (
        "TITAN_FT_",
        "PYTHON",
        "CALLS",
        "HANG",
        "LAUNCH",
        "CHECK",
        "REPORT",
        "REFERENCE",
        "FIGURES",
    )
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        **environment,
    }


@pytest.fixture
def campaign(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]:
    """Run the script with a stand-in for the interpreter; returns how it ended, and the calls."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(
        *arguments: str, **environment: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.write_text("")
        ended = subprocess.run(
            ["/bin/bash", str(SCRIPTS / "campaign.sh"), *arguments],
            env=clean_environment(
                TITAN_FT_PYTHON=str(python), CALLS=str(calls), HANG="", **environment
            ),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended, calls.read_text().splitlines()

    return run


Campaign = Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]


def test_a_campaign_is_launched_checked_and_reported(campaign: Campaign, tmp_path: Path) -> None:
    """The seed is printed and passed on. The user's flags come last, so that they win."""
    plan = tmp_path / "plan.toml"
    plan.touch()
    arguments = [
        "--seed",
        "7",
        "--minutes",
        "3",
        "--groups",
        "5",
        "--run-dir",
        "run",
        "--plan",
        "plan.toml",
    ]
    ended, calls = campaign(*arguments, "--", "--metrics.log_freq=5")
    assert ended.returncode == 0, ended.stderr
    assert "seed 7" in ended.stdout
    launch, check, report, shown = calls
    run_dir = tmp_path / "run"
    shape = f"--replicas 5 --ranks-per-replica 1 --run-dir {run_dir}"
    assert (
        f"-m titan_ft launch configs/llama3_debug.toml {shape} --chaos {plan} --chaos-seed 7 --minutes 3 --"
        in launch
    )
    assert launch.endswith(
        "--fault_tolerance.batch_policy=constant --fault_tolerance.chaos --metrics.log_freq=5"
    )
    assert "--lr_scheduler.total_steps=100000" in launch
    assert check == f"-m titan_ft check {run_dir}"
    assert report == f"-m titan_ft report {run_dir}"
    assert shown == f"-m benchmarks.figures --expect-faults {run_dir}"
    assert f"{run_dir}/report/index.html" in ended.stdout


def test_above_eight_groups_the_model_is_halved(campaign: Campaign, tmp_path: Path) -> None:
    """More than eight groups share the cores with a small model and longer timeouts; a user's
    config stays as it is.
    """
    small = "--model.flavor=debugmodel_half --training.seq_len=128"
    _, calls = campaign("--run-dir", str(tmp_path / "many"), "--groups", "30")
    assert "--replicas 30 " in calls[0]
    assert small in calls[0]
    assert "--fault_tolerance.hang_timeout_seconds=120" in calls[0]
    _, calls = campaign("--run-dir", str(tmp_path / "few"), "--groups", "8")
    assert small not in calls[0]
    assert "--fault_tolerance.hang_timeout_seconds=20" in calls[0]
    config = ROOT / "configs" / "llama3_debug.toml"
    _, calls = campaign(
        "--run-dir", str(tmp_path / "own"), "--groups", "30", "--config", str(config)
    )
    assert f" launch {config} --replicas 30 " in calls[0]
    assert small not in calls[0]


def test_a_campaign_that_was_cut_goes_on(campaign: Campaign, tmp_path: Path) -> None:
    """--resume in the campaign's folder keeps all options that are not given, and draws new
    faults.
    """
    plan, run_dir = tmp_path / "plan.toml", tmp_path / "run"
    plan.touch()
    arguments = ["--seed", "7", "--groups", "5", "--plan", str(plan), "--run-dir", str(run_dir)]
    campaign(*arguments, "--", "--metrics.log_freq=5")
    ended, calls = campaign("--resume", "--run-dir", str(run_dir), "--minutes", "9")
    assert ended.returncode == 0, ended.stderr
    assert f"--replicas 5 --ranks-per-replica 1 --run-dir {run_dir} " in calls[0]
    assert f"--chaos {plan} --chaos-seed 8 --minutes 9 --resume -- " in calls[0]
    assert calls[0].endswith(" --metrics.log_freq=5")
    ended, calls = campaign(
        "--resume", "--run-dir", str(run_dir), "--groups", "6", "--", "--metrics.log_freq=1"
    )
    assert "--replicas 6 " in calls[0]
    assert "--chaos-seed 9 " in calls[0]
    assert calls[0].endswith(" --metrics.log_freq=5 --metrics.log_freq=1")


def test_a_resume_that_was_refused_changes_nothing(campaign: Campaign, tmp_path: Path) -> None:
    """Another number of groups is refused unless it is named; the next resume keeps the original
    campaign.
    """
    run_dir = tmp_path / "run"
    campaign("--seed", "7", "--groups", "5", "--run-dir", str(run_dir))
    more = ["--resume", "--run-dir", str(run_dir), "--groups", "6"]
    ended, calls = campaign(*more, LAUNCH="2")
    assert (ended.returncode, len(calls)) == (2, 1)
    ended, calls = campaign("--resume", "--run-dir", str(run_dir))
    assert ended.returncode == 0, ended.stderr
    assert "--replicas 5 " in calls[0]
    assert "--chaos-seed 8 " in calls[0]
    ended, calls = campaign(*more, "--resume-with", "replicas,lr")
    assert "--replicas 6 " in calls[0]
    assert "--resume --resume-with replicas,lr -- " in calls[0]


def test_a_command_that_was_refused_can_be_corrected_in_the_same_folder(
    campaign: Campaign, tmp_path: Path
) -> None:
    ended, _ = campaign("--run-dir", str(tmp_path / "run"), LAUNCH="2")
    assert ended.returncode == 2
    ended, _ = campaign("--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr


def test_semi_synchronous(campaign: Campaign, tmp_path: Path) -> None:
    """A method replaces a policy that conflicts with it; an unknown method is refused here."""
    ended, calls = campaign("--run-dir", str(tmp_path / "run"), "--semi-sync", "diloco")
    assert ended.returncode == 0, ended.stderr
    assert "--fault_tolerance.semi_sync_method=diloco --fault_tolerance.sync_steps=5" in calls[0]
    assert "batch_policy" not in calls[0]
    ended, calls = campaign("--run-dir", str(tmp_path / "other"), "--semi-sync", "hourly")
    assert (ended.returncode, calls) == (2, [])
    assert "--semi-sync must be diloco or local_sgd, got 'hourly'" in ended.stderr


def test_without_a_seed_one_is_drawn_and_printed(campaign: Campaign, tmp_path: Path) -> None:
    ended, calls = campaign("--run-dir", str(tmp_path / "run"))
    seed = calls[0].partition("--chaos-seed ")[2].split()[0]
    assert f"seed {seed}, 20 minutes, 4 groups x 1 ranks" in ended.stdout
    assert f"--chaos {ROOT}/configs/chaos/campaign.toml" in calls[0]


def test_the_reference_is_the_same_run_without_faults(campaign: Campaign, tmp_path: Path) -> None:
    """The reference is as long, without chaos and with the same flags, so it has the same LR and
    batches at each step.
    """
    run_dir, reference = tmp_path / "run", tmp_path / "run-reference"
    ended, calls = campaign("--run-dir", str(run_dir), "--reference", "--", "--metrics.log_freq=5")
    assert ended.returncode == 0, ended.stderr
    first, second, check, _, shown = calls
    assert f"--run-dir {reference} --minutes 20 -- " in second
    flags = [call.partition(" -- ")[2].split() for call in (first, second)]
    assert set(flags[0]) - set(flags[1]) == {"--fault_tolerance.chaos"}
    assert set(flags[1]) < set(flags[0])
    assert check == f"-m titan_ft check {run_dir} --against {reference}"
    assert shown == f"-m benchmarks.figures --expect-faults {run_dir} {reference}"


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
        (["--config", "/no/job.toml"], "--config must be a TOML file, got '/no/job.toml'"),
        (["--run-dir", "."], "--run-dir must not hold another run"),
        (["--resume"], "--resume needs --run-dir: the folder of the campaign that is to go on"),
        (
            ["--resume", "--run-dir", "."],
            "--resume needs a campaign in --run-dir, got '.', which holds none",
        ),
        (
            ["--resume", "--run-dir", ".", "--reference"],
            "--reference must be left out with --resume",
        ),
        (["--resume-with", "lr"], "--resume-with must come with --resume, got 'lr' alone"),
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
    names = (
        "minutes",
        "seed",
        "groups",
        "ranks",
        "run-dir",
        "plan",
        "config",
        "resume",
        "resume-with",
        "reference",
    )
    for name in names:
        assert f"--{name}" in ended.stdout


def test_a_campaign_that_is_stopped_ends_its_launch(tmp_path: Path) -> None:
    """SIGTERM to the script ends its processes."""
    python, pid_file = tmp_path / "python", tmp_path / "pid"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = clean_environment(
        TITAN_FT_PYTHON=str(python), CALLS=str(tmp_path / "calls"), HANG=str(pid_file)
    )
    command = ["/bin/bash", str(SCRIPTS / "campaign.sh"), "--run-dir", str(tmp_path / "run")]
    script = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30.0
        while (
            not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        pid = int(pid_file.read_text())
        script.send_signal(signal.SIGTERM)
        assert script.wait(30.0) == 130
        assert not Path(f"/proc/{pid}").exists()
    finally:
        script.kill()
        script.wait()
