# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The processes that a launch starts, and the mistakes that it refuses."""

from __future__ import annotations

import errno
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import event
from titan_ft.cli.main import main
from titan_ft.config import MODULE_TOML_PREFIX, ConfigError
from titan_ft.launch.group.worker_group import open_log
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.local import launch
from titan_ft.launch.resume import Command, read_command, without_headers
from titan_ft.options import Launch
from titan_ft.run.events import LaunchStarted
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths

LIGHTHOUSE = "http://127.0.0.1:4711"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        "[fault_tolerance]\nenable = true\nmin_replica_size = 2\nheartbeat_timeout_ms = 750\n"
    )
    return path


def plan(
    config: Path, num_replicas: int = 3, worker_args: list[str] | None = None, **settings: Any
) -> LaunchPlan:
    return LaunchPlan(
        Launch(config, num_replicas, 2, config.parent / "run", **settings), worker_args or []
    )


def agent_args(made: LaunchPlan, replica: int) -> list[str]:
    return made.agent_args(replica, 0, LIGHTHOUSE)


def began(paths: RunPaths, *names: str) -> None:
    """Make a folder with the events of a launch."""
    tell(paths, "launch_started", *names)


def tell(paths: RunPaths, *names: str) -> None:
    log = EventLog(paths.launcher_events(1))
    for name in names:
        log.emit(event(name))
    log.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_folder_of_another_user_is_refused(config: Path) -> None:
    """That user decides about its content: the checkpoint to load, the target of a log that is a
    link.
    """
    root = config.parent / "run"
    root.mkdir()
    os.chown(root, 65534, 65534)
    with pytest.raises(ConfigError, match="--run-dir must be yours alone"):
        plan(config)
    assert (
        main(["launch", str(config), "--replicas=2", "--ranks-per-replica=1", f"--run-dir={root}"])
        == 2
    )
    assert not any(root.iterdir())


@pytest.mark.parametrize("name", ["config.toml", "logs/lighthouse.log"])
def test_nothing_is_written_through_a_link(config: Path, name: str) -> None:
    """Anyone who may write in the folder, such as its Unix group, could have this user's own files
    overwritten.
    """
    victim, link = config.parent / "bashrc", config.parent / "run" / name
    victim.write_text("mine\n")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    if name == "config.toml":
        with (
            pytest.raises(ConfigError, match=r"can be written, got .*symbolic links"),
            plan(config).locked(),
        ):
            pass
    else:
        with open_log(link) as log:
            log.write(b"a line that comes on stderr\n")
    assert victim.read_text() == "mine\n"


def test_command_lines(config: Path) -> None:
    """The lighthouse gets the TOML's settings; workers get their group, the run directory, last the
    user's flags.
    """
    made = plan(config, worker_args=["--training.steps", "5"])
    root = config.parent / "run"
    lighthouse = " ".join(made.lighthouse_command(4711)[2:])
    assert lighthouse == (
        f"titan_ft lighthouse --bind 127.0.0.1:4711 --run-dir {root} --min-replicas 1 --heartbeat-timeout-ms 750 "
        "--join-timeout-ms 60000"
    )
    command = agent_args(made, 1)
    assert command == [
        f"--run-dir={root}",
        "--replica=1",
        "--attempt=0",
        "--ranks=2",
        f"--lighthouse={LIGHTHOUSE}",
        "--max-restarts=100",
        "--module=titan_ft.train",
        "--drain-timeout=25",
        "--",
        *command[command.index("--") + 1 :],
    ]
    assert command[command.index("--") + 1 :] == [
        f"--job.config_file={root}/config.toml",
        f"--job.dump_folder={root}",
        "--metrics.save_tb_folder=tb",
        "--fault_tolerance.enable",
        "--fault_tolerance.replica_id=1",
        "--fault_tolerance.group_size=3",
        f"--fault_tolerance.job_id={made.job_id}",
        "--fault_tolerance.drain_timeout_seconds=25",
        "--training.steps",
        "5",
    ]


def test_options_reach_the_agent(config: Path) -> None:
    """--no-zygote, --drain-timeout, and the reason for the start of a spare."""
    made = plan(config, spares=1, no_zygote=True, drain_timeout=7.5)
    group, spare = agent_args(made, 2), made.agent_args(2, 0, LIGHTHOUSE, "a spare takes its place")
    assert "--restart-reason=a spare takes its place" in spare
    assert [flag for flag in spare if "restart-reason" not in flag] == group
    assert group.index("--no-zygote") < group.index("--")
    assert "--drain-timeout=7.5" in group
    assert "--fault_tolerance.drain_timeout_seconds=7.5" in group
    assert "--no-zygote" not in agent_args(plan(config), 2)


def test_drain_timeout_comes_from_option_flag_or_config(config: Path) -> None:
    """The option wins over the workers' flag, and that over the TOML."""
    flag = ["--fault_tolerance.drain_timeout_seconds", "9"]
    config.write_text(config.read_text() + "drain_timeout_seconds = 11\n")
    assert plan(config).drain_seconds == 11
    assert plan(config, worker_args=flag).drain_seconds == 9
    assert plan(config, drain_timeout=3.0).drain_seconds == 3


def test_each_run_has_a_job_id_of_its_own(config: Path) -> None:
    """The id contains the folder's name in plain characters, and differs from launch to launch. A
    user's id wins.
    """
    made = LaunchPlan(Launch(config, 3, 1, config.parent / "my run, é/"))
    assert re.fullmatch(r"my-run-[0-9a-f]{6}", made.job_id)
    assert agent_args(made, 0)[-2] == agent_args(made, 1)[-2]
    assert made.job_id != LaunchPlan(Launch(config, 3, 1, config.parent / "my run, é/")).job_id
    assert plan(config, worker_args=["--fault-tolerance.job-id", "mine"]).job_id == "mine"
    config.write_text(config.read_text() + 'job_id = "ours"\n')
    assert plan(config).job_id == "ours"


def test_worker_flags_reach_the_lighthouse(config: Path) -> None:
    """A setting that lighthouse and workers share can be given as a worker's flag, in each of
    tyro's spellings.
    """
    flags = ["--fault_tolerance.min_replica_size=1", "--fault-tolerance.join-timeout-ms", "300"]
    settings = plan(config, num_replicas=1, worker_args=flags).lighthouse
    assert (settings.min_replicas, settings.join_timeout_ms, settings.heartbeat_timeout_ms) == (
        1,
        300,
        750,
    )


def test_the_lighthouse_waits_for_groups_in_the_midst_of_a_round(config: Path) -> None:
    """A round may be longer than any step, and no group may go on without the groups that train in
    the round.
    """
    flags = ["--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.join_timeout_ms=300"]
    assert plan(config, worker_args=flags).lighthouse.join_timeout_ms == 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("table", "flags", "folder"),
    [
        ("", [], None),
        ("enable_tensorboard = true", [], "tb/job"),
        ('enable_tensorboard = true\nsave_tb_folder = "elsewhere"', [], "tb/job"),
        ("", ["--metrics.enable-tensorboard", "--metrics.save-tb-folder=curves"], "curves/job"),
        ("enable_tensorboard = true", ["--metrics.no-enable-tensorboard"], None),
    ],
)
def test_the_jobs_curves_stand_beside_its_groups(
    config: Path, table: str, flags: list[str], folder: str | None
) -> None:
    """In TensorBoard's folder as the workers read it from all flags. Without TensorBoard there are
    no curves.
    """
    config.write_text(f"{config.read_text()}\n[metrics]\n{table}\n")
    expected = None if folder is None else config.parent / "run" / folder
    assert plan(config, worker_args=flags).job_curve == expected


def test_a_resumed_run_keeps_the_name_of_its_first_launch(config: Path) -> None:
    """W&B continues the run under that name. The job ids differ, so that groups of two launches
    stay apart.
    """
    config.write_text(config.read_text() + "\n[checkpoint]\nenable = true\n")
    first = plan(config)
    first.write()
    assert first.first_job_id == first.job_id
    for pid, (time, made) in enumerate([(2.0, "later"), (1.0, "first")]):
        log = EventLog(first.paths.launcher_events(pid))
        event = LaunchStarted(replicas=3, ranks_per_replica=2, spares=0, job_id=made)
        log.emit(event)
        log.close()
        path = first.paths.launcher_events(pid)
        path.write_text(re.sub(r'"time":[^,]+', f'"time":{time}', path.read_text()))
    (first.paths.checkpoint / "step-5").mkdir(parents=True)
    resumed = plan(config, resume=True)
    assert resumed.first_job_id == "first"
    assert resumed.job_id not in ("first", "later")
    assert resumed.labels["job_id"] == resumed.job_id


def test_a_resumed_run_is_not_over(config: Path) -> None:
    """The mark of a finished job is removed. Its last save may have failed, and with the mark all
    groups would end at once with success.
    """
    config.write_text(config.read_text() + "\n[checkpoint]\nenable = true\n")
    first = plan(config)
    first.write()
    log = EventLog(first.paths.launcher_events(1))
    log.emit(LaunchStarted(replicas=3, ranks_per_replica=2, spares=0, job_id="first"))
    log.close()
    (first.paths.checkpoint / "step-5").mkdir(parents=True)
    first.paths.finished.write_text("{}")
    plan(config, resume=True).write()
    assert not first.paths.finished.exists()


def test_a_launch_that_is_refused_for_want_of_room_changes_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config and the mark of a finished job stay, so a later launch with room continues as it
    would have.
    """
    config.write_text(config.read_text() + "\n[checkpoint]\nenable = true\n")
    first = plan(config)
    first.write()
    began(first.paths)
    (first.paths.checkpoint / "step-5").mkdir(parents=True)
    first.paths.finished.write_text("{}")
    before = first.paths.config.read_text()
    resumed, written = plan(config, resume=True), []

    def replace(made: LaunchPlan, text: str) -> None:
        written.append(text)
        made.paths.config.write_text(text if text == before else text[:10])
        if text != before:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LaunchPlan, "_replace_config", replace)
    with pytest.raises(
        ConfigError, match=r"--run-dir must be a folder that can be written, got .*No space left"
    ):
        resumed.write()
    assert len(written) == 2
    assert first.paths.config.read_text() == before
    assert first.paths.finished.exists()


def test_config_is_copied_with_the_command(config: Path) -> None:
    """The run directory holds the TOML as given, below a comment with the command."""
    made = plan(config)
    made.write()
    header, record, *rest = made.paths.config.read_text().splitlines(keepends=True)
    assert header.startswith("# titan-ft launch ")
    assert "--replicas 3" in header
    assert record.startswith("# titan-ft launched: {")
    assert "".join(rest) == config.read_text()


def test_a_flag_with_a_line_break_stays_in_the_comment(config: Path) -> None:
    """The config is valid TOML, and the command is read back unchanged."""
    flag = "--job.description=two\nlines\rand \x85 \u2028 a 'quote', \\n and \N{SNOWMAN}"
    made = plan(config, worker_args=[flag])
    made.write()
    assert tomllib.loads(made.paths.config.read_text()) == tomllib.loads(config.read_text())
    assert read_command(made.paths.config) == Command(made.paths.config, 3, 2, (flag,), Path.cwd())
    assert "".join(without_headers(made.paths.config)) == config.read_text()


def test_what_is_not_utf_8_is_refused_in_one_line(config: Path, tmp_path: Path) -> None:
    """A path may have any bytes, but the run's config, which contains the path, must be UTF-8."""
    with pytest.raises(
        ConfigError, match=r"^--job.description must be UTF-8, got 'a\\udcff'; rename it"
    ):
        plan(config, worker_args=["--job.description=a\udcff"])
    with pytest.raises(ConfigError, match=r"^--run-dir must be UTF-8, got "):
        LaunchPlan(Launch(config, 3, 2, tmp_path / "run\udcff"))


def test_the_command_that_goes_on_names_the_copy_of_a_made_toml(config: Path) -> None:
    """The TOML that was made for --module is gone after the launch."""
    made = config.parent / f"{MODULE_TOML_PREFIX}x" / config.name
    made.parent.mkdir()
    made.write_text(config.read_text())
    command = shlex.split(plan(made).resume_command)
    assert command[2] == str(plan(made).paths.config)


def test_the_command_that_goes_on(config: Path) -> None:
    """The command is one for a shell, with the options and flags that hold for the whole run."""
    usual = plan(config, worker_args=["--training.dataset_path=a b"])
    assert shlex.split(usual.resume_command)[:3] == ["titan-ft", "launch", str(config)]
    assert usual.resume_command.endswith(
        f"--run-dir {usual.options.run_dir} --resume -- '--training.dataset_path=a b'"
    )
    more = plan(
        config,
        spares=1,
        drain_timeout=60.0,
        minutes=5.0,
        metrics_port="9464",
        no_zygote=True,
        chaos=Path("every_15s"),
    )
    own = more.resume_command.partition(f"--run-dir {more.options.run_dir} ")[2]
    assert own == "--spares 1 --drain-timeout 60.0 --no-zygote --metrics-port 9464 --resume"


@pytest.mark.parametrize(
    "flags",
    [
        ["--checkpoint.load_step=10"],
        ["--checkpoint.load_step", "10"],
        ["--checkpoint.load-step", "10"],
        ["--checkpoint.load-step=10", "--checkpoint.load_step=20"],
    ],
)
def test_the_command_that_goes_on_does_not_go_back(config: Path, flags: list[str]) -> None:
    """The command names the latest checkpoint, not the step at which this launch began."""
    made = plan(config, worker_args=["--training.steps=40", *flags, "--optimizer.lr=1e-3"])
    assert made.resume_command.endswith(
        "--resume -- --training.steps=40 --optimizer.lr=1e-3 --checkpoint.load_step=-1"
    )
    assert made.worker_flags([])[-len(flags) - 1 : -1] == flags
    made.write()
    assert flags[0] in made.paths.config.read_text().splitlines()[0]  # the command as it was given


def test_the_command_that_goes_on_wins_over_the_toml(config: Path) -> None:
    """Also if the TOML names a step."""
    config.write_text(config.read_text() + "[checkpoint]\nload_step = 10\n")
    assert plan(config).resume_command.endswith("--resume -- --checkpoint.load_step=-1")


@pytest.mark.parametrize(("flags", "saves"), [([], False), (["--checkpoint.enable"], True)])
def test_a_plan_knows_whether_the_run_saves(config: Path, flags: list[str], saves: bool) -> None:
    """By the TOML and the flags, as the workers read them."""
    assert plan(config, worker_args=flags).saves_checkpoints is saves
    config.write_text(config.read_text() + "[checkpoint]\nenable = true\n")
    assert plan(config, worker_args=flags).saves_checkpoints
    assert not plan(config, worker_args=["--checkpoint.no-enable"]).saves_checkpoints


def test_refusals(config: Path, tmp_path: Path) -> None:
    """Each mistake is one line with the field, the value and the remedy."""
    cases = [
        (lambda: plan(config, num_replicas=0), "--replicas must be >= 1, got 0"),
        (lambda: plan(config, max_restarts=-1), "--max-restarts must be >= 0, got -1"),
        (
            lambda: plan(config, lighthouse_port=70000),
            "--lighthouse-port must be <= 65535, got 70000",
        ),
        (
            lambda: plan(config, num_replicas=1),
            r"min_replica_size must be <= --replicas \(1\), got 2",
        ),
        (lambda: plan(tmp_path / "none.toml"), "none.toml"),
        (
            lambda: plan(config, worker_args=["--fault_tolerance.heartbeat_timeout_ms=x"]),
            "whole number, got 'x'",
        ),
        (
            lambda: plan(config, worker_args=["--fault_tolerance.join_timeout_ms=0"]),
            "join_timeout_ms must be > 0",
        ),
        (lambda: plan(config, spares=-1), "--spares must be >= 0, got -1"),
        (lambda: plan(config, drain_timeout=0.0), "--drain-timeout must be > 0, got 0.0"),
        (
            lambda: plan(config, worker_args=["--fault_tolerance.drain_timeout_seconds=x"]),
            "a number, got 'x'",
        ),
        (
            lambda: plan(config, worker_args=["--fault_tolerance.lighthouse=http://a:1"]),
            "its own lighthouse",
        ),
    ]
    for attempt, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    (events / "launcher-1.jsonl").touch()  # of a launch whose port was taken
    plan(config)
    began(plan(config).paths)
    with pytest.raises(ConfigError, match=r"no events of an earlier run.*with --resume"):
        plan(config)


def test_resume_needs_an_earlier_run_and_a_checkpoint(config: Path) -> None:
    """A used folder is accepted only if training continues from a checkpoint. `test_resume.py` has
    the allowed differences.
    """
    config.write_text(config.read_text() + "[checkpoint]\nenable = true\n[training]\nsteps = 60\n")
    with pytest.raises(
        ConfigError,
        match=r"--resume needs an earlier run in --run-dir, got .*/run, which holds none",
    ):
        plan(config, resume=True)
    first = plan(config)
    first.write()
    began(first.paths)
    with pytest.raises(ConfigError, match=r"needs a checkpoint in .*/run/checkpoint, got none"):
        plan(config, resume=True)
    (first.paths.checkpoint / "step-10").mkdir(parents=True)
    first.paths.logs(1, 4, 0).parent.mkdir(parents=True)
    again = plan(config, resume=True)
    assert [again.paths.next_attempt(replica) for replica in (0, 1)] == [0, 5]
    again.write()
    assert (
        LaunchPlan(Launch(first.paths.config, 3, 2, first.paths.root, resume=True)).num_replicas
        == 3
    )
    with pytest.raises(ConfigError, match=r"checkpoint.enable = true, got false; .* start anew"):
        plan(config, resume=True, worker_args=["--checkpoint.enable", "False"])


def test_fields_of_a_foreign_config_module_are_left_to_the_workers(config: Path) -> None:
    """Only the table of a known config module has keys that can be checked here."""
    text = config.read_text() + "mine = 1\n"
    config.write_text(text)
    with pytest.raises(ConfigError, match="mine"):
        plan(config)
    config.write_text('[job]\ncustom_config_module = "mine.config"\n' + text)
    assert plan(config).num_replicas == 3


def test_usage_errors_end_with_status_2(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong config or value is one line on stderr and status 2, and starts nothing."""
    monkeypatch.chdir(tmp_path)
    base = ["launch", str(config), "--ranks-per-replica", "1", "--run-dir", "run"]
    assert main([*base, "--replicas", "1"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("titan-ft: fault_tolerance.min_replica_size")
    assert not Path("run").exists()
    assert main(["lighthouse", "--bind", "nowhere"]) == 2
    assert "--bind must be HOST:PORT" in capsys.readouterr().err


def test_report_needs_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without events, and a missing folder, are usage errors."""
    assert main(["report", str(tmp_path)]) == 2
    assert "no events" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_failed_start_keeps_nobody_out(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ended before any step is set aside, with its logs, so that the next launch begins
    at attempt 0.
    """
    paths = plan(config).paths
    for number in (1, 2):
        began(paths, "worker_started", "launch_finished")
        paths.logs(0, 0, 0).parent.mkdir(parents=True)
        made = plan(config)
        made.write()
        assert capsys.readouterr().out == (
            f"a launch that ended before any step was in {paths.root}; it is in failed-start-{number} now\n"
        )
        assert "--attempt=0" in agent_args(plan(config), 0)
        assert not paths.has_events()
        assert RunPaths(paths.root / f"failed-start-{number}").has_events()


@pytest.mark.parametrize("resume", [False, True])
def test_two_launches_at_once(config: Path, resume: bool) -> None:
    """The second launch is refused and changes nothing, even if its plan was made before the first
    launch began.
    """
    config.write_text(config.read_text() + "[checkpoint]\nenable = true\n")
    made = plan(config)
    made.write()
    paths = made.paths
    began(paths, "launch_finished")
    if resume:
        (paths.checkpoint / "step-10").mkdir(parents=True)
    first, second = plan(config, resume=resume), plan(config, resume=resume)
    with first.locked():
        first.write()
        held = paths.config.read_text()
        with pytest.raises(
            ConfigError, match=r"must not be in use by another launch, got .*run, where one"
        ):
            launch(second)
        assert paths.config.read_text() == held
    with second.locked():
        second.write()
    assert paths.config.read_text() != held


@pytest.mark.parametrize(
    "names",
    [
        ["launch_started"],
        ["launch_started", "launch_finished", "step_committed"],
        ["worker_started"],
    ],
    ids=["may be going on", "has trained", "from torchrun"],
)
def test_other_runs_are_kept(config: Path, names: list[str]) -> None:
    """A launch that may be alive, or has made a step, keeps its folder; so does a run without a
    launcher.
    """
    paths = plan(config).paths
    tell(paths, *names)
    with pytest.raises(ConfigError, match="no events of an earlier run"):
        plan(config)


def test_a_checkpoint_is_kept(config: Path) -> None:
    """Whatever happened to the launches after the checkpoint."""
    paths = plan(config).paths
    began(paths, "launch_finished")
    plan(config)
    (paths.checkpoint / "step-10").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no events of an earlier run"):
        plan(config)
