# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""The shell scripts: their refusals, and the commands that they build."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tomli

from titan_ft.cli.main import main
from titan_ft.run.held import hold

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "llama3_debug.toml"
LIGHTHOUSE = "http://10.0.0.1:29510"
# How names of variables begin.
OURS = ("SLURM_", "TITAN_FT_", "TORCHFT_", "PYTHON", "OMP_", "RUST_LOG")
FULL = {
    "config": str(CONFIG),
    "run-dir": "/shared/run",
    "replica": "1",
    "lighthouse": LIGHTHOUSE,
    "ranks-per-node": "8",
}


def run(
    script: str, *arguments: str, path: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with no variable of Slurm or of this project except the given ones."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    clean["PATH"] = path or clean["PATH"]
    return subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / script), *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def options(**changes: str | None) -> list[str]:
    """A full set of options for replica_group.sh, with changes; None leaves one out."""
    merged = {**FULL, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return [
        word for name, value in merged.items() if value is not None for word in (f"--{name}", value)
    ]


def group(
    *arguments: str, path: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run replica_group.sh, which must end by itself, with this interpreter and this source."""
    python = {"TITAN_FT_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return run("replica_group.sh", "--dry-run", *arguments, path=path, **python, **environment)


def dry_run(*arguments: str, **environment: str) -> list[str]:
    """The words of the command that replica_group.sh would run, on a host without Slurm's
    commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "dirname").symlink_to("/usr/bin/dirname")
        environment = {"TITAN_FT_TOKEN": "a secret of this run", **environment}
        result = group(*arguments, path=folder, **environment)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_scripts_are_valid_bash(script: str) -> None:
    """Each script at least parses."""
    subprocess.run(["/bin/bash", "-n", str(ROOT / "scripts" / script)], check=True)


def test_ci_runs_no_code_that_can_be_replaced() -> None:
    """An action's tag can be moved to other code, a commit cannot. An extra index may serve any
    package's name.
    """
    workflows = [
        path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    ]
    used = re.findall(r"uses: *(\S+)", "\n".join(workflows))
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each)] == []
    assert not any("extra-index" in text.lower().replace("_", "-") for text in workflows)


def test_a_group_on_one_node_needs_no_rendezvous() -> None:
    """The agent gets the ranks, the worker gets torchtitan's flags, the user's come last."""
    words = dry_run(*options(replicas="4"), "--", "--training.steps=7")
    assert words[:5] == [
        f"TORCHFT_LIGHTHOUSE={LIGHTHOUSE}",
        "OMP_NUM_THREADS=1",
        "PYTHONUNBUFFERED=1",
        "RUST_LOG=warn",
        "TORCH_DIST_USE_NCCL2=0",
    ]
    assert words[6 : words.index("--")] == [
        *("-m", "titan_ft.launch.group.agent", "--cluster"),
        *("--run-dir=/shared/run", "--replica=1", "--ranks=8", "--bind=::"),
        *("--max-restarts=100", "--drain-timeout=25"),
    ]
    assert words[words.index("--") + 1 :] == [
        f"--job.config_file={CONFIG}",
        "--job.dump_folder=/shared/run",
        "--metrics.save_tb_folder=tb",
        "--fault_tolerance.enable",
        "--fault_tolerance.replica_id=1",
        "--fault_tolerance.group_size=4",
        "--training.steps=7",
    ]


def test_workers_that_are_no_forks_are_a_wish() -> None:
    """The agent has an option for it."""
    assert "--no-zygote" in dry_run(*options(), "--no-zygote")
    assert "--no-zygote" not in dry_run(*options())


@pytest.mark.parametrize(
    ("table", "flags", "expected"),
    [
        ("", [], ["--drain-timeout=25"]),
        ("drain_timeout_seconds = 90", [], ["--drain-timeout=90"]),
        (
            "drain_timeout_seconds = 90",
            ["--fault_tolerance.drain-timeout-seconds", "40"],
            ["--drain-timeout=40"],
        ),
        ("", ["--fault_tolerance.drain_timeout_seconds=inf"], ["--drain-timeout=25"]),
    ],
)
def test_the_agent_knows_how_long_its_workers_may_take_to_leave(
    tmp_path: Path, table: str, flags: list[str], expected: list[str]
) -> None:
    """The agent gets the drain timeout as the workers read it."""
    config = tmp_path / "own.toml"
    config.write_text(f"[fault_tolerance]\n{table}\n")
    words = dry_run(*options(config=str(config)), "--", *flags)
    assert [word for word in words if word.startswith("--drain-timeout")] == expected


def test_the_number_of_groups_may_come_from_the_config() -> None:
    """Without --replicas and without a Slurm array, group_size is left to the TOML."""
    assert not [word for word in dry_run(*options()) if "group_size" in word]


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[003-004,009]", "gpu003"),
        ("gpu7,gpu8", "gpu7"),
        ("a-[1,4]-x,b2", "a-1-x"),
        ("solo", "solo"),
    ],
)
def test_slurm_gives_what_is_not_named(nodelist: str, first: str) -> None:
    """Replica id, group count, ranks, nodes and rendezvous come from an array job's environment."""
    words = dry_run(
        *options(replica=None, ranks_per_node=None, lighthouse=None),
        TORCHFT_LIGHTHOUSE=LIGHTHOUSE,
        SLURM_ARRAY_TASK_ID="2",
        SLURM_ARRAY_TASK_COUNT="8",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="4",
        SLURM_JOB_ID="1234567",
        SLURM_JOB_NODELIST=nodelist,
    )
    assert f"TORCHFT_LIGHTHOUSE={LIGHTHOUSE}" in words
    assert {"--hosts=2", "--ranks=4", f"--rendezvous={first}:24567"} < set(words)
    assert {"--fault_tolerance.replica_id=2", "--fault_tolerance.group_size=8"} < set(words)


def test_a_scontrol_that_fails_is_done_without(tmp_path: Path) -> None:
    """In a container of a compute node Slurm's commands may be installed without its
    configuration.
    """
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho scontrol: fatal: no configuration >&2\nexit 1\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    words = options(nodes="2", lighthouse="http://127.0.0.1:1")
    environment = {
        "SLURM_JOB_NODELIST": "gpu[003-004]",
        "SLURM_JOB_ID": "7",
        "TITAN_FT_TOKEN": "a secret of this run",
    }
    result = group(*words, path=str(tmp_path), **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--rendezvous=gpu003:20007" in shlex.split(result.stdout)


@pytest.mark.parametrize("value", ["h100:8", "8", "8(x2)"])
def test_slurm_counts_are_understood(value: str) -> None:
    """Slurm writes a count with a type before it or a repetition after it."""
    assert "--ranks=8" in dry_run(*options(ranks_per_node=None), SLURM_GPUS_PER_NODE=value)


def test_arguments_win_over_slurm() -> None:
    """The user's arguments override Slurm's variables."""
    words = dry_run(
        *options(nodes="3", rendezvous="10.0.0.7:555"), SLURM_NNODES="2", SLURM_ARRAY_TASK_ID="5"
    )
    assert {"--hosts=3", "--rendezvous=10.0.0.7:555", "--fault_tolerance.replica_id=1"} < set(words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (options(config=None), "CONFIG must be given, got nothing"),
        (
            options(config="/no/such.toml"),
            "config file must be readable, got /no/such.toml (No such file or directory)",
        ),
        (options(config="llama3_debig"), "did you mean llama3_debug?"),
        (options(run_dir=None), "--run-dir must be given, got nothing"),
        (
            options(replica=None),
            "--replica must be given, got nothing, and SLURM_ARRAY_TASK_ID is not set",
        ),
        (
            options(lighthouse=None),
            "--lighthouse must be given, got nothing, and TORCHFT_LIGHTHOUSE is not set",
        ),
        (
            options(lighthouse="10.0.0.1"),
            "--lighthouse must look like http://host:port, got '10.0.0.1'",
        ),
        (
            options(lighthouse="file:x"),
            "--lighthouse must have an absolute path behind file:, got 'file:x'",
        ),
        (
            options(ranks_per_node=None),
            "--ranks-per-node must be given, got nothing, and Slurm names no GPUs",
        ),
        (options(ranks_per_node="0"), "--ranks-per-node must be >= 1, got 0"),
        (
            options(ranks_per_replica="12"),
            "--ranks-per-replica must be --ranks-per-node (8) x --nodes (1), got 12",
        ),
        (
            options(ranks_per_node=None, ranks_per_replica="9", nodes="2", rendezvous="a:1"),
            "--ranks-per-replica must be divisible by --nodes (2), got 9",
        ),
        (options(replica="-1"), "--replica must be >= 0, got -1"),
        (options(replica="4", replicas="4"), "--replica must be below --replicas (4), got 4"),
        (
            options(nodes="2"),
            "--rendezvous must be given for 2 nodes, got nothing, and SLURM_JOB_NODELIST is not set",
        ),
        (options(nodes="2", rendezvous="host"), "--rendezvous must be HOST:PORT, got 'host'"),
        (
            options(nodes="2", rendezvous="host:70000"),
            "--rendezvous must be HOST:PORT, got 'host:70000'",
        ),
        (options(nodes="2", rendezvous="host:0"), "--rendezvous must be HOST:PORT, got 'host:0'"),
        (options(host_deaths="-1"), "--host-deaths must be >= 0, got -1"),
        (
            options(metrics_port="x"),
            "--metrics-port must be PORT (this host only) or HOST:PORT, got 'x'",
        ),
        ([*options(), "--steps", "3"], "--steps is no option of titan-ft group"),
        ([*options(), "--nodes"], "--nodes must be followed by a whole number, got nothing"),
        ([*options(), "--training.steps=3"], "--training.steps must come after a --"),
        (
            [*options(), "--group=0"],
            "--group must be the same as --replica (1), got 0; give one of the two",
        ),
        (
            [*options(), "--", "--fault_tolerance.replica_id=3"],
            "--fault_tolerance.replica_id must not come after the --, got '3'; --replica says it",
        ),
        (
            [*options(), "--", "--job.dump_folder", "/tmp/x"],
            "--job.dump_folder must not come after the --, got '/tmp/x'; --run-dir says it",
        ),
        (
            [*options(), "--", "training.steps=3"],
            "torchtitan's flags must begin with --, got 'training.steps=3'",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line names the option, the rule and the value; the status is that of bad usage.

    The test calls the command of the script directly.
    """
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TITAN_FT_TOKEN", "a secret of this run")
    assert main(["group", "--dry-run", *arguments]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1


def test_the_lighthouse_of_the_option_counts_before_that_of_the_config(tmp_path: Path) -> None:
    """A worker prefers the config's address to its environment's, so the option must be one of its
    flags.
    """
    config = tmp_path / "own.toml"
    config.write_text('[fault_tolerance]\nlighthouse = "http://10.0.0.9:1"\n')
    words = dry_run(*options(config=str(config)))
    assert f"--fault_tolerance.lighthouse={LIGHTHOUSE}" in words
    words = dry_run(
        *options(config=str(config), lighthouse=None), TORCHFT_LIGHTHOUSE="http://127.0.0.1:1"
    )
    assert "TORCHFT_LIGHTHOUSE=http://10.0.0.9:1" in words


def test_the_folder_of_a_launch_that_goes_on_is_refused(tmp_path: Path) -> None:
    """The events of two jobs would be in one folder."""
    with (tmp_path / "config.toml").open("w") as config:
        assert hold(config)
        result = group(*options(run_dir=str(tmp_path)), TITAN_FT_TOKEN="a secret of this run")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--run-dir must not be in use by titan-ft launch" in result.stderr


def test_a_token_is_required_off_this_host() -> None:
    """State is sent over the network only to processes with the secret."""
    result = group(*options())
    assert result.returncode == 2
    assert "TITAN_FT_TOKEN must be set" in result.stderr


def test_a_short_token_is_refused_off_this_host() -> None:
    """An impostor of a donor could try all short tokens."""
    result = group(*options(), TITAN_FT_TOKEN="hunter2")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "at least 16 bytes, got 7 bytes" in result.stderr
    assert "hunter2" not in result.stderr


def test_a_token_may_be_in_a_file(tmp_path: Path) -> None:
    """The workers read it there, too."""
    token = tmp_path / "token"
    token.write_text("a secret of this run\n")
    token.chmod(0o644)
    result = group(*options(), TITAN_FT_TOKEN="", TITAN_FT_TOKEN_FILE=str(token))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "TITAN_FT_TOKEN_FILE must be readable by you alone, got mode 644" in result.stderr
    token.chmod(0o600)
    assert group(*options(), TITAN_FT_TOKEN="", TITAN_FT_TOKEN_FILE=str(token)).returncode == 0


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:29510", "http://localhost:1", "http://[::1]:29510"]
)
def test_no_token_is_needed_on_this_host(address: str) -> None:
    """A first try on one machine needs no secret."""
    assert group(*options(lighthouse=address)).returncode == 0


def test_no_token_but_a_rendezvous_elsewhere_is_refused() -> None:
    """A loopback lighthouse does not make a group of two nodes local."""
    arguments = options(lighthouse="http://127.0.0.1:29510", nodes="2", rendezvous="10.0.0.7:555")
    result = group(*arguments)
    assert result.returncode == 2
    assert "TITAN_FT_TOKEN" in result.stderr


@pytest.mark.parametrize(
    ("script", "instead"),
    [("smoke_single_gpu.sh", "scripts/quickstart.sh"), ("check_gpu.sh", "--cpu")],
)
def test_what_needs_a_gpu_refuses_a_machine_without_one(
    script: str, instead: str, tmp_path: Path
) -> None:
    """The script refuses at once, in a line, before it installs anything, and names the
    alternative.
    """
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has a GPU")
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    nvidia_smi.chmod(0o755)
    result = run(script, path=f"{tmp_path}:{os.environ['PATH']}", TITAN_FT_PYTHON="/no/python")
    assert result.returncode == 2
    assert result.stderr.startswith(f"{script}: needs a GPU")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    assert instead in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpus", "0"), "--gpus must be a whole number, at least 1, got '0'"),
        (("--gpus", "two"), "--gpus must be a whole number, at least 1, got 'two'"),
        (("--gpus", "-1"), "--gpus must be a whole number, at least 1, got '-1'"),
        (("--gpus",), "--gpus needs a value"),
        (("--config", "none.toml"), "--config must be a TOML file, got 'none.toml'"),
        (("--work-dir", "/tmp"), "--work-dir must not exist yet, got '/tmp'"),
        (("--", "--training.steps=9"), "takes no torchtitan flags, got '--training.steps=9'"),
    ],
)
def test_the_gpu_check_refuses_what_it_cannot_do(arguments: tuple[str, ...], told: str) -> None:
    """The check refuses in one line before the set-up, also with --cpu."""
    result = run("check_gpu.sh", "--cpu", *arguments, TITAN_FT_PYTHON="/no/python")
    assert result.returncode == 2
    assert result.stderr.startswith(f"check_gpu.sh: {told}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "script",
    [
        "quickstart",
        "smoke_single_gpu",
        "test",
        "explore",
        "campaign",
        "check_gpu",
        "kill_and_rejoin",
        "mutate",
    ],
)
def test_help_comes_before_anything_is_installed(script: str, tmp_path: Path) -> None:
    """Help is printed at once, even without Python."""
    for tool in ("dirname", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    result = run(f"{script}.sh", "--help", path=str(tmp_path), PYTHON="/no/python")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: {script}.sh")


def test_a_value_may_follow_an_equals_sign(tmp_path: Path) -> None:
    """Options accept --name=value, as titan-ft's commands do; an option without a value
    does not.
    """
    result = run("campaign.sh", "--minutes=1")
    assert "--minutes must be a whole number, at least 2, got '1'" in result.stderr
    assert "no option '--resume=yes'" in run("campaign.sh", "--resume=yes").stderr


def test_the_set_up_names_the_python_it_needs(tmp_path: Path) -> None:
    """Without a Python from 3.11 to 3.13 there is one clear line."""
    for tool in ("dirname", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("setup_env.sh", path=str(tmp_path), PYTHON="/opt/py39/bin/python")
    assert result.returncode == 2
    assert (
        "Python 3.11, 3.12 or 3.13 is needed, and none of /opt/py39/bin/python, python3.11,"
        in result.stderr
    )
    assert result.stderr.count("\n") == 1


def test_the_set_up_takes_a_later_python(tmp_path: Path) -> None:
    """If python3.11 and python3.12 do not work, python3.13 makes the environment."""
    root, tools, calls = tmp_path / "root", tmp_path / "tools", tmp_path / "calls"
    (root / "scripts").mkdir(parents=True)
    tools.mkdir()
    for name in ("scripts/setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    for name, status in (("python3.11", 1), ("python3.12", 1), ("python3.13", 0), ("python3", 1)):
        (tools / name).write_text(
            f"""#!/bin/bash
echo "{name} $1 $2" >>{calls}
if [[ $2 == venv ]]; then mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python"; fi
exit {status}
"""
        )
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    subprocess.run(
        ["/bin/bash", str(root / "scripts" / "setup_env.sh")], env=environment, check=True
    )
    assert "python3.13 -m venv" in calls.read_text().splitlines()


def test_the_set_up_leaves_an_environment_of_the_users_alone() -> None:
    """With TITAN_FT_PYTHON nothing is created or installed; a wrong value is named."""
    assert run("setup_env.sh", TITAN_FT_PYTHON=sys.executable).returncode == 0
    result = run("setup_env.sh", TITAN_FT_PYTHON="/no/python")
    assert result.returncode == 2
    assert "TITAN_FT_PYTHON must be a Python interpreter, got '/no/python'" in result.stderr


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """An interpreter that only records its commands, and ends as variables of its
    environment say.
    """
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/bash
echo "$@" >>"$CALLS"
case "$*" in
*launch*) sleep 0.3; exit "$LAUNCH" ;;
*kill_group.py*) [[ -z $HANG ]] || { echo $$ >"$HANG"; exec sleep 60; } ;;
*expect_rejoin.py*) exit "$EXPECT" ;;
esac
"""
    )
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("launch", "hang", "expect", "status", "message"),
    [
        ("0", False, "0", 0, ""),
        ("0", False, "1", 1, ""),
        ("1", True, "0", 1, "the job failed with status 1; its logs are in {run}/logs"),
        ("0", True, "0", 1, "the job ended before group 1 was killed"),
    ],
)
def test_the_quickstart_succeeds_only_with_a_kill_a_rejoin_and_equal_digests(
    stand_in: Path, tmp_path: Path, launch: str, hang: bool, expect: str, status: int, message: str
) -> None:
    """Launch, kill and report run with the user's flags; any failure fails the script, and no
    process stays.
    """
    pid_file = tmp_path / "killer.pid"
    result = run(
        "kill_and_rejoin.sh",
        str(tmp_path / "run"),
        "--training.steps=9",
        TITAN_FT_PYTHON=str(stand_in),
        CALLS=str(tmp_path / "calls"),
        LAUNCH=launch,
        HANG=str(pid_file) if hang else "",
        EXPECT=expect,
    )
    assert result.returncode == status
    assert message.format(run=tmp_path / "run") in result.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    flags = f"--replicas 2 --ranks-per-replica 1 --run-dir {tmp_path / 'run'} -- --training.steps=9"
    assert f"-m titan_ft launch configs/llama3_debug.toml {flags}" in calls
    assert (f"-m titan_ft report {tmp_path / 'run'}" in calls) == (launch == "0" and not hang)
    if hang:
        assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_the_debug_config_is_complete() -> None:
    """The quickstart's config enables everything that it shows, and names only shipped files."""
    config = tomli.loads(CONFIG.read_text(encoding="utf-8"))
    assert config["job"]["custom_config_module"] == "titan_ft.config"
    assert config["fault_tolerance"]["enable"] is True
    assert config["model"]["hf_assets_path"] == "titan_ft://tokenizer"
    assert config["training"]["dataset"] == "austen"
