# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""titan-ft slurm submit with an sbatch that only records its calls. tests/slurm has a real one."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ft.cluster.slurm import BATCH
from titan_ft.run.held import hold

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "llama3_debug.toml"


def submit(
    folder: Path, *options: str, refused: str = "nothing of the kind"
) -> subprocess.CompletedProcess[str]:
    """Run it with a stand-in that gives jobs the ids 101, 102, ..."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    stand_in = tools / "sbatch"
    stand_in.write_text(f"""#!/bin/bash
[[ "$*" != *"$REFUSED"* ]] || exit 1
printf "%q " "$@" >> {folder}/calls
echo >> {folder}/calls
echo $((100 + $(wc -l < {folder}/calls)))
""")
    (tools / "scancel").write_text(f'#!/bin/bash\necho "$@" > {folder}/cancelled\n')
    (tools / "scancel").chmod(0o755)
    stand_in.chmod(0o755)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH"))
    }
    return subprocess.run(
        ["/bin/bash", str(ROOT / "slurm" / "submit.sh"), *options],
        env={
            **clean,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "REFUSED": refused,
            "TITAN_FT_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def full(folder: Path) -> list[str]:
    return [
        "--config",
        str(CONFIG),
        "--run-dir",
        str(folder / "run"),
        "--groups",
        "4",
        "--ranks-per-node",
        "8",
    ]


def calls(folder: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    "script", [ROOT / "slurm" / "submit.sh", *sorted(BATCH.iterdir())], ids=lambda path: path.name
)
def test_scripts_are_valid_bash(script: Path) -> None:
    """Each script at least parses."""
    subprocess.run(["/bin/bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_that_of_the_command(tmp_path: Path, option: str) -> None:
    """The script of the old name has no options of its own."""
    done = submit(tmp_path, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: titan-ft slurm submit")


def test_what_differs_in_the_config_is_told_to_the_lighthouse(tmp_path: Path) -> None:
    """The lighthouse does not read the config; its defaults would cut short a round of several
    steps.
    """
    config = tmp_path / "mine.toml"
    config.write_text(
        "[fault_tolerance]\nheartbeat_timeout_ms = 900\nsemi_sync_method = 'diloco'\n"
    )
    options = [
        "--config=mine.toml",
        "--run-dir=run",
        "--replicas=2",
        "--ranks-per-replica=4",
        "--nodes=2",
        "--dry-run",
    ]
    with contextlib.chdir(tmp_path):
        done = submit(tmp_path, *options, "--", "--fault_tolerance.heartbeat_timeout_ms=750")
    assert done.returncode == 0, done.stderr
    lighthouse, groups = map(shlex.split, done.stdout.splitlines())
    assert lighthouse[lighthouse.index(str(tmp_path / "run")) + 1 :] == [
        *("--heartbeat-timeout-ms", "750", "--join-timeout-ms", str(24 * 3600 * 1000))
    ]
    assert groups[groups.index("--ranks-per-node") + 1] == "2"


def test_one_command_submits_a_run(tmp_path: Path) -> None:
    """A lighthouse, its standby, and groups that start after it are submitted; only the user can
    read the token.
    """
    options = [
        "--nodes",
        "2",
        "--time",
        "60",
        "--standby",
        "--no-zygote",
        "--host-window",
        "600",
        "--group-options",
        "--gpus-per-node=8 --partition=gpu",
    ]
    done = submit(tmp_path, *full(tmp_path), *options, "--", "--training.steps=7")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    first, second, groups = calls(tmp_path)
    assert first == second
    assert first[-4:] == [str(BATCH / "lighthouse.sbatch"), str(BATCH), sys.executable, str(run)]
    assert groups[1:7] == [
        *(
            "--dependency=after:101",
            "--array=0-3",
            "--nodes=2",
            "--gpus-per-node=8",
            "--partition=gpu",
            "--time=60",
        )
    ]
    assert groups[groups.index(str(BATCH / "replicas.sbatch")) + 1 :][:7] == [
        *(str(BATCH), sys.executable, str(run), "--config", str(CONFIG), "--ranks-per-node", "8")
    ]
    assert groups[-3:] == ["--no-zygote", "--", "--training.steps=7"]
    assert groups[groups.index("--host-deaths") :][:4] == [
        "--host-deaths",
        "5",
        "--host-window",
        "600",
    ]
    assert (run / "slurm" / "jobs").read_text() == "103 101 102\n"
    token = run / "token"
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert f"titan-ft top {run}" in done.stdout
    assert "scancel 103 101 102" in done.stdout


def test_each_submission_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Each submission has a new token, so names recorded from an earlier one are useless. A user's
    own token stays.
    """
    token = tmp_path / "run" / "token"
    tokens = []
    for options in ((), (), ("--token-file", str(token))):
        done = submit(tmp_path, *full(tmp_path), *options)
        assert done.returncode == 0, done.stderr
        tokens.append(token.read_text())
        (tmp_path / "run" / "slurm" / "jobs").unlink()
    assert tokens[0] != tokens[1] == tokens[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_token_file_or_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """The owner of a token file or folder knows the token, or can replace it."""
    token, run = tmp_path / "secret", tmp_path / "run"
    token.write_text("a secret of mine, long enough")
    token.chmod(0o600)
    os.chown(token, 65534, 65534)
    done = submit(tmp_path, *full(tmp_path), "--token-file", str(token))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--token-file must be readable by you alone" in done.stderr
    assert "belongs to user 65534" in done.stderr
    run.mkdir(exist_ok=True)
    os.chown(run, 65534, 65534)
    done = submit(tmp_path, *full(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--run-dir must be yours alone" in done.stderr


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    """A donor without the token could find a short one offline."""
    token = tmp_path / "secret"
    token.write_text("hunter2\n")
    token.chmod(0o600)
    done = submit(tmp_path, *full(tmp_path), "--token-file", str(token))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "at least 16 bytes, got 7 bytes" in done.stderr


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file or directory"), (b"\xff" * 32, "it is no text")]
)
def test_a_token_file_without_a_token_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    """The refusal is one line, before anything is submitted."""
    token = tmp_path / "secret"
    if content is not None:
        token.write_bytes(content)
        token.chmod(0o600)
    done = submit(tmp_path, *full(tmp_path), "--token-file", str(token))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--token-file must name a file with the token, got {token} ({reason})" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_a_token_of_the_users_is_taken_if_nobody_else_can_read_it(tmp_path: Path) -> None:
    """A token file that others can read is refused with its mode, and nothing is submitted."""
    token = tmp_path / "secret"
    token.write_text("a secret of mine, long enough")
    token.chmod(0o640)
    done = submit(tmp_path, *full(tmp_path), "--token-file", str(token))
    assert done.returncode == 2
    assert "--token-file must be readable by you alone, got mode 640" in done.stderr
    assert not (tmp_path / "calls").exists()
    token.chmod(0o600)
    assert submit(tmp_path, *full(tmp_path), "--token-file", str(token)).returncode == 0
    assert (tmp_path / "run" / "token").read_text() == "a secret of mine, long enough"
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--config": "none.toml"}, "config must be the path of a TOML file or one of llama3_1b, "),
        ({"--groups": "0"}, "--replicas must be >= 1, got 0"),
        ({"--nodes": "0"}, "--nodes must be >= 1, got 0"),
        ({"--host-window": "0"}, "--host-window must be >= 1, got 0"),
        ({"--ranks-per-node": "x"}, "--ranks-per-node must be a whole number, got 'x'"),
        (
            {"--replicas": "5"},
            "--replicas must be the same as --groups (4), got 5; give one of the two",
        ),
        (
            {"--group-options": "--comment='x"},
            "--group-options must be options as a shell reads them, got",
        ),
        (
            {"--stand-by": "x"},
            "--stand-by is no option of titan-ft slurm submit; did you mean --standby?",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    """Before anything is submitted."""
    given = full(tmp_path)
    options = {**dict(zip(given[::2], given[1::2], strict=True)), **change}
    done = submit(tmp_path, *(word for pair in options.items() for word in pair))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "calls").exists()


_FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
_NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo '103_1 titan_ft RUNNING'", "must not be in use by another job"),
        (_NO_ANSWER, "squeue must say whether job 102 of --run-dir is over, got no answer"),
        (_FORGOTTEN, ""),
        ("", ""),
    ],
    ids=["running", "no answer", "forgotten", "over"],
)
def test_the_folder_of_a_run_that_goes_on_is_refused(
    tmp_path: Path, answer: str, message: str
) -> None:
    """A running run's token, lighthouse and jobs stay as they are, also while Slurm gives no
    answer.

    The files of a finished run are replaced.
    """
    assert submit(tmp_path, *full(tmp_path)).returncode == 0
    jobs = (tmp_path / "run" / "slurm" / "jobs").read_text()
    (tmp_path / "run" / "lighthouse.json").touch()
    queue = tmp_path / "bin" / "squeue"
    queue.write_text(f"#!/bin/bash\n{answer}\n")
    queue.chmod(0o755)
    token = (tmp_path / "run" / "token").read_text()
    done = submit(tmp_path, *full(tmp_path))
    is_refused = bool(message)
    assert done.returncode == (2 if is_refused else 0), done.stderr
    assert (tmp_path / "run" / "lighthouse.json").exists() == is_refused
    assert ((tmp_path / "run" / "slurm" / "jobs").read_text() == jobs) == is_refused
    assert ((tmp_path / "run" / "token").read_text() == token) == is_refused
    assert message in done.stderr


def test_the_folder_of_a_launch_that_goes_on_is_refused(tmp_path: Path) -> None:
    """Two jobs would write into one folder."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "config.toml").open("w") as config:
        assert hold(config)
        done = submit(tmp_path, *full(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "titan-ft launch is going on" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_a_run_is_submitted_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """A lighthouse alone would wait for ever."""
    done = submit(tmp_path, *full(tmp_path), "--standby", refused="--array")
    assert done.returncode == 1
    assert (tmp_path / "cancelled").read_text() == "101 102\n"


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    """A dry run prints the submissions and creates nothing."""
    done = submit(tmp_path, *full(tmp_path), "--dry-run")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 2)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "calls").exists()


def stand_in(folder: Path, name: str, body: str) -> None:
    """Put a stand-in for a command of Slurm into folder/bin that records its calls, one to
    a line.
    """
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
    (tools / name).chmod(0o755)


def noted(folder: Path, *verbs: str) -> list[str]:
    """Return the calls of scontrol with these verbs."""
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [line for line in lines if line.startswith(tuple(f"scontrol {verb} " for verb in verbs))]


def hasten(folder: Path, reason: str, exclude: str = "", own: str = "(null)") -> list[str]:
    """Run `hasten_requeued` for an array's last job, whose id is the array's; return its
    changes.
    """
    stand_in(folder, "squeue", f"echo '7 7_2 2020-01-01T00:00:00 {reason}'")
    stand_in(
        folder,
        "scontrol",
        f"[[ $1 != show ]] || echo 'JobId=7 ReqNodeList=(null) ExcNodeList={own}'",
    )
    (folder / "slurm").mkdir()
    (folder / "slurm" / "jobs").write_text("7 8\n")
    if exclude:
        (folder / "slurm" / "exclude-7").write_text(exclude)
    script = (
        f"run_dir={folder}; source {BATCH}/common.sh; save_own_exclusion 7 7_2; hasten_requeued"
    )
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(
        ["/bin/bash", "-c", script], env={**os.environ, "PATH": path}, check=True, timeout=60
    )
    return noted(folder, "update", "release")


SUSPECTS = "n5 99999999999\nn2 1000\nn5 99999999999\n"
HELD = "job requeued in held state"


@pytest.mark.parametrize(
    ("own", "hosts"),
    [("n[1-3,7]", "n[1-3,7],n5"), ("(null)", "n5")],
    ids=["with the user's own", "alone"],
)
def test_hosts_are_excluded_as_long_as_they_are_suspected(
    tmp_path: Path, own: str, hosts: str
) -> None:
    """Suspected hosts are excluded for one job of the array, in addition to the user's
    exclusions.
    """
    assert hasten(tmp_path, HELD, SUSPECTS, own) == [
        f"scontrol update JobId=7_2 ExcNodeList={hosts}",
        "scontrol release 7_2",
    ]


def test_a_host_may_be_used_again(tmp_path: Path) -> None:
    """A host may be used again at the first requeue after the window."""
    assert hasten(tmp_path, "BeginTime", "n5 1000\n", "n9") == [
        "scontrol update JobId=7_2 ExcNodeList=n9",
        "scontrol update JobId=7_2 StartTime=now",
    ]


@pytest.mark.parametrize(
    "reason", ["JobHeldUser", "JobHeldAdmin", "launch failed requeued held", "Resources"]
)
def test_what_others_hold_stays_held(tmp_path: Path, reason: str) -> None:
    """Only jobs that replicas.sbatch holds are released."""
    assert hasten(tmp_path, reason, SUSPECTS) == []


def end_group(folder: Path, status: int, *, leaving: bool) -> list[str]:
    """Run replicas.sbatch with a step that ends with `status`, at the time limit or before; return
    the job's changes.
    """
    text = "JobId=7 ExcNodeList=(null)"
    stand_in(folder, "scontrol", f"[[ $1 != show ]] || echo '{text}'")
    stand_in(folder, "scancel", "")
    stand_in(folder, "sleep", "")
    # The signal is there before the step ends: the script waits for the step, and is told
    # meanwhile.
    tell = f"kill -USR1 $PPID; until grep -q scancel {folder}/calls; do :; done" if leaving else ""
    stand_in(folder, "srun", f"{tell}\nexit {status}")
    (folder / "slurm").mkdir()
    (folder / "token").write_text("secret")
    (folder / "slurm" / "exclude-7").write_text("n5 99999999999\n")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    done = subprocess.run(
        ["/bin/bash", str(BATCH / "replicas.sbatch"), str(BATCH), sys.executable, str(folder)],
        env={**os.environ, **slurm, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    if leaving:
        assert "scancel --signal=TERM 7_2.0" in (folder / "calls").read_text()
    return noted(folder, "requeue", "requeuehold")


@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize(
    ("status", "early", "late"),
    [
        (0, [], ["scontrol requeue 7_2"]),
        (1, [], ["scontrol requeue 7_2"]),
        (2, [], []),
        (3, [], []),
        (4, ["scontrol requeuehold 7_2"], ["scontrol requeuehold 7_2"]),
        (137, ["scontrol requeue 7_2"], ["scontrol requeue 7_2"]),
    ],
)
def test_what_becomes_of_a_group_that_ended(
    tmp_path: Path, status: int, early: list[str], late: list[str], leaving: bool
) -> None:
    """The time limit requeues no group that must not return, and no group on a host that it
    leaves.
    """
    assert end_group(tmp_path, status, leaving=leaving) == (late if leaving else early)
