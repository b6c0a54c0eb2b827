# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A mistake in a run's configuration ends the worker with status 2 and one line that names the
mistake.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.client import ZygoteClient, python_path
from harness.job import CONFIG, Job

LIGHTHOUSE = "http://127.0.0.1:1"  # nobody listens there: no mistake may get as far as that
RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHFT_LIGHTHOUSE": LIGHTHOUSE,
}
# What is put into the table [fault_tolerance] of a TOML, and what the line must say; all rules:
# tests/test_config.py.
MISTAKES = {
    "unknown key": ("min_replicas = 1", ["fault_tolerance.min_replicas", "min_replica_size"]),
    "misspelt key": ("grup_size = 2", ["fault_tolerance.grup_size", "did you mean group_size"]),
    "wrong type": ('group_size = "2"', ["fault_tolerance.group_size", "whole number"]),
    "wrong ordering": (
        "process_group_timeout_ms = 300",
        ["heartbeat_timeout_ms", "process_group_timeout_ms (300)"],
    ),
    "method, not its needs": (
        'semi_sync_method = "diloco"\nbatch_policy = "constant"',
        ['batch_policy must be "shrink" with semi_sync_method'],
    ),
    "host name": (
        'advertise_address = "node7"',
        ["fault_tolerance.advertise_address must be a numeric address"],
    ),
}
# The same for other tables and for flags.
FLAGS = {
    "update before the vote": (
        ["--optimizer.early_step_in_backward"],
        ["optimizer.early_step_in_backward"],
    ),
    "odd global batch": (
        ["--training.global_batch_size=7"],
        ["training.global_batch_size must be divisible by"],
    ),
    "unknown model": (["--model.name=llama"], ["model.name must be", "got 'llama'"]),
    "unknown flavor": (
        ["--model.flavor=debugmodl"],
        ["model.flavor must be one of", "did you mean debugmodel"],
    ),
    "unknown dataset": (
        ["--training.dataset=nope"],
        ["training.dataset must be one of", "austen", "got 'nope'"],
    ),
    # torchtitan's parser answers these in a box, of which the last line is only its border.
    "misspelt flag": (["--training.stepz=5"], ["training.stepz", "training.steps"]),
    "wrong value": (["--training.steps=x"], ["training.steps", "'x'"]),
    "removed flag": (
        ["--fault_tolerance.vote_timeout_seconds=9"],
        ["vote_timeout_seconds is no setting any more"],
    ),
}


def config(folder: Path, line: str) -> Path:
    """Write the debug config with another line in its table [fault_tolerance]."""
    name = line.partition(" = ")[0]
    kept = [old for old in CONFIG.read_text().splitlines() if not old.startswith(f"{name} = ")]
    place = kept.index("[fault_tolerance]") + 1
    path = folder / "config.toml"
    path.write_text("\n".join([*kept[:place], line, *kept[place:]]))
    return path


def check_line(output: str, parts: list[str]) -> None:
    """The output, apart from libraries' logs, is one line that contains all `parts`."""
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("titan_ft: ")]
    for part in parts:
        assert part in line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_the_table(zygote: ZygoteClient, tmp_path: Path, mistake: str) -> None:
    line, parts = MISTAKES[mistake]
    argv = [f"--job.config_file={config(tmp_path, line)}", f"--job.dump_folder={tmp_path / 'run'}"]
    worker = zygote.call("titan_ft.train:main", tmp_path / "worker.log", argv, RANK)
    assert worker.code == 2, worker.output()
    check_line(worker.output(), parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mistake", FLAGS)
def test_mistake_in_flags(zygote: ZygoteClient, tmp_path: Path, mistake: str) -> None:
    flags, parts = FLAGS[mistake]
    argv = [f"--job.config_file={CONFIG}", f"--job.dump_folder={tmp_path / 'run'}", *flags]
    worker = zygote.call("titan_ft.train:main", tmp_path / "worker.log", argv, RANK)
    assert worker.code == 2, worker.output()
    check_line(worker.output(), parts)


@pytest.mark.parametrize("variable", ["", "127.0.0.1:29510"])
def test_no_lighthouse(zygote: ZygoteClient, tmp_path: Path, variable: str) -> None:
    """Without a valid address of the lighthouse the line says where to set one."""
    argv = [f"--job.config_file={CONFIG}", f"--job.dump_folder={tmp_path / 'run'}"]
    env = {**RANK, "TORCHFT_LIGHTHOUSE": variable}
    worker = zygote.call("titan_ft.train:main", tmp_path / "worker.log", argv, env)
    assert worker.code == 2, worker.output()
    check_line(worker.output(), ["TORCHFT_LIGHTHOUSE", "http://host:port"])


@pytest.mark.parametrize("token", ["", "hunter2"])
def test_no_token_off_loopback(zygote: ZygoteClient, tmp_path: Path, token: str) -> None:
    """Without a strong token a worker that other hosts reach would give its weights to any peer, so
    it is refused.
    """
    argv = [f"--job.config_file={CONFIG}", f"--job.dump_folder={tmp_path / 'run'}"]
    env = {**RANK, "TORCHFT_LIGHTHOUSE": "http://192.0.2.1:29510", "TITAN_FT_TOKEN": token}
    worker = zygote.call("titan_ft.train:main", tmp_path / "worker.log", argv, env)
    assert worker.code == 2, worker.output()
    check_line(worker.output(), ["TITAN_FT_TOKEN must be set", "at least 16 bytes"])
    assert "hunter2" not in worker.output()


def test_nccl_without_a_gpu(make_job: Callable[..., Job]) -> None:
    """On a machine without a GPU the process group "nccl" is refused with the remedy."""
    job = make_job(groups=1, flags=["--fault_tolerance.process_group=nccl"], max_restarts=0)
    job.run()
    assert [worker.code for worker in job.groups[0].workers] == [2], job.output(0)
    check_line(
        job.output(0), ['fault_tolerance.process_group must be "gloo"', "without an NVIDIA GPU"]
    )


def test_lighthouse_is_not_there(make_job: Callable[..., Job]) -> None:
    """If no lighthouse answers, the worker ends with a line that names its address."""
    hooks = {"constants": {"titan_ft.membership.seat.CONNECT_SECONDS": 0.5}}
    job = make_job(
        groups=1, flags=[f"--fault_tolerance.lighthouse={LIGHTHOUSE}"], hooks=hooks, max_restarts=0
    )
    job.run()
    assert [worker.code for worker in job.groups[0].workers] == [1], job.output(0)
    check_line(job.output(0), [LIGHTHOUSE, "check that it runs"])


def test_groups_with_different_configs(make_job: Callable[..., Job]) -> None:
    """A group whose config differs in a relevant value is refused, with a line that says so."""
    job = make_job(
        groups=2,
        flags=["--fault_tolerance.start_timeout_seconds=2"],
        hooks={"constants": {"titan_ft.engine.step.FINISH_SECONDS": 1.0}},
        replica_flags={1: ["--optimizer.lr=1e-3"]},
        max_restarts=0,
        steps=4,
    )
    job.run()
    codes = {group.replica: [worker.code for worker in group.workers] for group in job.groups}
    # The one that was there first is right.
    assert sorted(codes.values()) == [[0], [3]], job.output(0) + job.output(1)
    (refused,) = [replica for replica, code in codes.items() if code == [3]]
    check_line(
        job.output(refused), [f"must equal that of groups [{1 - refused}]", "TOML and flags"]
    )


def test_the_worker_command_itself(tmp_path: Path) -> None:
    """`python -m titan_ft.train` reports the mistake before it imports torch."""
    argv = [f"--job.config_file={config(tmp_path, 'grup_size = 2')}"]
    env = {**os.environ, "PYTHONPATH": python_path(), **RANK}
    worker = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "titan_ft.train", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (worker.returncode, worker.stdout) == (2, "")
    lines = [line for line in worker.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1
    check_line(lines[0], ["did you mean group_size"])
    assert "| torch\n" not in worker.stderr


def test_a_launch_finds_it_before_it_starts_anything(tmp_path: Path) -> None:
    """A launch reports the mistake in one line, without a folder or a process, also with a user's
    own model.
    """
    (tmp_path / "mine.py").write_text(
        "import os, threading\n"
        "from torchtitan.protocols.train_spec import get_train_spec, register_train_spec\n"
        "assert os.environ['RANK'] == '0'\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()  # which no fork would bear\n"
        "register_train_spec('mine', get_train_spec('llama3'))\n"
    )
    command = ["launch", str(CONFIG), "--replicas=2", "--ranks-per-replica=1", "--run-dir=run"]
    flags = ["--experimental.custom_import=mine", "--model.name=mine", "--model.flavor=debugmodl"]
    launch = subprocess.run(
        [sys.executable, "-m", "titan_ft", *command, "--", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (launch.returncode, launch.stdout) == (2, "")
    assert re.fullmatch(
        r"titan-ft: model\.flavor must be one of .*, got 'debugmodl'; did you mean debugmodel\? set it\n",
        launch.stderr,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.slow
def test_a_mistake_that_only_training_finds(tmp_path: Path) -> None:
    """A user's own model fails in the first forward pass: each death names the exception, and the
    run ends after two.
    """
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def fail(module, inputs):\n"
        "    raise NotImplementedError('Operator mine.attend has no kernel for this device')\n"
        "torch.nn.modules.module.register_module_forward_pre_hook(fail)\n"
    )
    command = [
        "launch",
        str(CONFIG),
        "--replicas=1",
        "--ranks-per-replica=1",
        f"--run-dir={tmp_path / 'run'}",
    ]
    flags = ["--fault_tolerance.min_replica_size=1", "--experimental.custom_import=mine"]
    launch = subprocess.run(
        [sys.executable, "-m", "titan_ft", *command, "--", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert launch.returncode == 1
    cause = "NotImplementedError: Operator mine.attend has no kernel for this device"
    assert launch.stdout.count(f"group 0 died: {cause}") == 2, launch.stdout
    line = launch.stderr.splitlines()[-1]
    assert f"all groups end with {cause}" in line
    assert "(before any step, 2 times; see " in line
    assert str(tmp_path / "run" / "logs" / "replica-0" / "attempt-1") in line
