# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signals through Slurm, with stand-ins that only record their calls."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_ft.chaos.processes import Processes, RunProcess, Unreachable
from titan_ft.train import _find_slurm_step

Calls = Callable[[], list[str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put only an scancel and an srun on PATH, which record their arguments and run `NAME.do`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scancel", "srun"):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n[ ! -e {folder}/{name}.do ] || . {folder}/{name}.do\n'
        )
        path.chmod(0o755)
    # No folder of the system's: on a Slurm host the real scancel would then signal somebody's job
    # 123.
    monkeypatch.setenv("PATH", str(folder))
    log = tmp_path / "calls"
    return lambda: log.read_text().splitlines() if log.exists() else []


def remote(replica: int, rank: int, step: str = "0", host: str = "node7.cluster") -> RunProcess:
    pid = 1000 + 10 * replica + rank
    return RunProcess(
        f"rank {rank} of group {replica}", pid, host, slurm={"job": "123", "step": step}
    )


def send(
    workers: list[RunProcess], everyone: list[RunProcess], signum: signal.Signals = signal.SIGKILL
) -> None:
    reach = Processes("login", slurm_seconds=20.0).hold(workers, everyone)
    reach.send(signum)
    reach.close()


def test_no_command_of_the_system_can_be_reached(calls: Calls, tmp_path: Path) -> None:
    """A real scancel would signal somebody's job; so a command without a stand-in must be
    missing.
    """
    assert shutil.which("scancel") == str(tmp_path / "bin" / "scancel")
    assert not [name for name in ("sh", "env", "kill", "sleep", "squeue") if shutil.which(name)]


def test_a_group_with_a_step_of_its_own_is_signalled_as_a_step(calls: Calls) -> None:
    """One scancel signals all ranks of a step, on any node; so does the SIGCONT after a SIGSTOP."""
    group = [remote(1, 0, "4"), remote(1, 1, "4", "node8")]
    send(group, [*group, remote(0, 0, "3")])
    send(group, group, signal.SIGCONT)
    assert calls() == ["scancel --signal=KILL 123.4", "scancel --signal=CONT 123.4"]


def test_one_rank_is_signalled_on_its_host(calls: Calls) -> None:
    """srun runs a kill beside the step, on the node of Slurm's name."""
    group = [remote(1, 0), remote(1, 1)]
    send(group[1:], group, signal.SIGSTOP)
    assert calls() == [
        "srun --jobid=123 --overlap --nodelist=node7 --nodes=1 --ntasks=1 kill -s STOP 1011",
    ]


def test_a_step_shared_by_groups_is_not_signalled_as_a_whole(calls: Calls) -> None:
    """If all groups share one step, an scancel would hit all of them."""
    groups = [remote(replica, rank) for replica in (0, 1) for rank in (0, 1)]
    send(groups[2:], groups)
    assert [call.rsplit(" ", 3)[1:] for call in calls()] == [
        ["-s", "KILL", "1010"],
        ["-s", "KILL", "1011"],
    ]


def test_what_fails_becomes_a_reason(calls: Calls, tmp_path: Path) -> None:
    """The reason has Slurm's last line. A target of which a part was hit counts as hit."""
    (tmp_path / "bin" / "scancel.do").write_text(
        "echo first >&2; echo scancel: error: Invalid job id >&2; exit 1\n"
    )
    group = [remote(1, 0)]
    with pytest.raises(
        Unreachable, match=r"^scancel failed with exit status 1: scancel: error: Invalid job id$"
    ):
        send(group, group)
    groups = [remote(replica, 0) for replica in (0, 1)]
    (tmp_path / "bin" / "srun.do").write_text('case "$*" in *1000) exit 1;; esac\n')
    third = remote(2, 0)
    send(groups, [*groups, third])
    with pytest.raises(Unreachable, match=r"srun failed with exit status 1$"):
        send(groups[:1], [*groups, third])


def test_a_command_that_hangs_or_is_missing_becomes_a_reason(calls: Calls, tmp_path: Path) -> None:
    """A job must not hang because Slurm does."""
    (tmp_path / "bin" / "scancel.do").write_text("exec /bin/sleep 60\n")
    group = [remote(1, 0)]
    reach = Processes("login", slurm_seconds=0.3).hold(group, group)
    with pytest.raises(Unreachable, match=r"scancel did not end within 0\.3 s"):
        reach.send(signal.SIGKILL)
    (tmp_path / "bin" / "scancel").unlink()
    with pytest.raises(Unreachable, match=r"scancel cannot be run \(No such file or directory\)"):
        send(group, group)


def test_what_no_host_reaches_is_refused(calls: Calls) -> None:
    """A worker elsewhere without Slurm, or with invalid Slurm names, is never put into a
    command.
    """
    bare = RunProcess("rank 0 of group 1", 7, "node7")
    for wrong in (
        bare,
        RunProcess("rank 0 of group 1", 7, "node7", slurm={"job": "--all", "step": "0"}),
        RunProcess("rank 0 of group 1", 7, "node7", slurm={"job": "123"}),
        RunProcess("rank 0 of group 1", 7, "--help", slurm={"job": "123", "step": "0"}),
    ):
        with pytest.raises(Unreachable, match="rank 0 of group 1") as caught:
            send([wrong], [wrong])
        assert caught.value.final
    assert calls() == []


def test_a_worker_of_this_host_is_signalled_directly(calls: Calls) -> None:
    """Here a pid can be checked, so that Slurm is not asked."""
    code = "import time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, "titan_ft"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        here = RunProcess(
            "rank 0 of group 1", process.pid, "login", slurm={"job": "123", "step": "0"}
        )
        send([here], [here, remote(0, 0)])
        assert process.wait(30) == -signal.SIGKILL
        assert calls() == []
    finally:
        process.kill()
        process.communicate()


def test_a_worker_tells_what_slurm_calls_its_step() -> None:
    """A worker in a step reports job, step and node, by which it can be signalled; outside a step,
    nothing.
    """
    environ = {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n7"}
    assert _find_slurm_step(environ) == {"job": "123", "step": "0", "node": "n7"}
    assert _find_slurm_step({"SLURM_JOB_ID": "123", "SLURMD_NODENAME": "n7"}) is None
