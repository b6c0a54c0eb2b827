# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a launch starts, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ft.cli import main
from titan_ft.config import ConfigError
from titan_ft.launch.launch_plan import LaunchPlan


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[fault_tolerance]\nenable = true\nmin_replica_size = 2\nheartbeat_timeout_ms = 750\n")
    return path


def plan(config: Path, num_replicas: int = 3, worker_args: list[str] | None = None, **settings: int) -> LaunchPlan:
    return LaunchPlan(config, num_replicas, 2, config.parent / "run", worker_args=worker_args or [], **settings)


def test_command_lines(config: Path) -> None:
    """The lighthouse gets the TOML's settings; workers get their group, the run directory, last the user's flags."""
    made = plan(config, worker_args=["--training.steps", "5"])
    lighthouse = " ".join(made.lighthouse_command()[2:])
    assert lighthouse == (
        "titan_ft lighthouse --bind 127.0.0.1:0 --min-replicas 2 --heartbeat-timeout-ms 750 "
        "--quorum-tick-ms 20 --join-timeout-ms 60000"
    )
    root = config.parent / "run"
    assert made.worker_command_line(1) == [
        f"--job.config_file={root}/config.toml",
        f"--job.dump_folder={root}",
        "--metrics.save_tb_folder=tb",
        "--fault_tolerance.enable",
        "--fault_tolerance.replica_id=1",
        "--fault_tolerance.group_size=3",
        "--training.steps",
        "5",
    ]


def test_worker_flags_reach_the_lighthouse(config: Path) -> None:
    """A setting that lighthouse and workers share can be given as a worker's flag, in each of tyro's spellings."""
    flags = ["--fault_tolerance.min_replica_size=1", "--fault-tolerance.join-timeout-ms", "300"]
    settings = plan(config, num_replicas=1, worker_args=flags).lighthouse
    assert (settings.min_replicas, settings.join_timeout_ms, settings.heartbeat_timeout_ms) == (1, 300, 750)


def test_config_is_copied_with_the_command(config: Path) -> None:
    """The run directory holds the TOML as given, below a comment with the command."""
    made = plan(config)
    made.write()
    header, _, rest = made.paths.config.read_text().partition("\n")
    assert header.startswith("# titan-ft launch ")
    assert "--replicas 3" in header
    assert rest == config.read_text()


def test_refusals(config: Path, tmp_path: Path) -> None:
    """Each mistake is one line that names the field, the value and what to do."""
    cases = [
        (lambda: plan(config, num_replicas=0), "--replicas must be >= 1, got 0"),
        (lambda: plan(config, max_restarts=-1), "--max-restarts must be >= 0, got -1"),
        (lambda: plan(config, lighthouse_port=70000), "--lighthouse-port must be <= 65535, got 70000"),
        (lambda: plan(config, num_replicas=1), r"min_replica_size must be <= --replicas \(1\), got 2"),
        (lambda: plan(tmp_path / "none.toml"), "none.toml"),
        (lambda: plan(config, worker_args=["--fault_tolerance.quorum_tick_ms=x"]), "whole number, got 'x'"),
        (lambda: plan(config, worker_args=["--fault_tolerance.join_timeout_ms=0"]), "join_timeout_ms must be > 0"),
        (lambda: plan(config, worker_args=["--fault_tolerance.lighthouse=http://a:1"]), "its own lighthouse"),
        (lambda: plan(config, worker_args=["--fault_tolerance.events_folder="]), 'events_folder must be "events"'),
    ]
    for attempt, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    (events / "launcher-1.jsonl").touch()
    with pytest.raises(ConfigError, match=r"no events of an earlier run.*give another folder or remove it"):
        plan(config)


def test_fields_of_a_foreign_config_module_are_left_to_the_workers(config: Path) -> None:
    """Only a config module that is known here has a table whose keys can be checked here."""
    text = config.read_text() + "mine = 1\n"
    config.write_text(text)
    with pytest.raises(ConfigError, match="mine"):
        plan(config)
    config.write_text('[job]\ncustom_config_module = "mine.config"\n' + text)
    assert plan(config).num_replicas == 3


def test_usage_errors_end_with_status_2(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong config or value is one line on stderr and status 2, and starts nothing."""
    monkeypatch.chdir(tmp_path)
    base = ["launch", str(config), "--ranks-per-replica", "1", "--run-dir", "run"]
    assert main([*base, "--replicas", "1"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("titan-ft: fault_tolerance.min_replica_size")
    assert not Path("run").exists()
    for wrong in ([*base, "--replicas", "many"], ["launch"], [], ["nonsense"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    capsys.readouterr()
    assert main(["lighthouse", "--bind", "nowhere"]) == 2
    assert "--bind must be HOST:PORT" in capsys.readouterr().err


def test_report_needs_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without events is status 1; no folder is a usage error."""
    assert main(["report", str(tmp_path)]) == 1
    assert "no events" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
