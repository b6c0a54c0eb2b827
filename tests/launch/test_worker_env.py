# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The environment of a worker: a user's script finds the variables that torchrun would set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_ft import device
from titan_ft.launch.group.worker_group import default_env

LEFT_OUT = {
    # torchtitan writes it when a group's process group is made, whatever it was; `device` says what
    # of it is refused.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    # For torchrun's own agent: the signals that it passes on. The agent's are SIGTERM and SIGINT,
    # always.
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""What torchrun gives and the agent does not, and why."""
OF_THE_RANK = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
)
OF_THE_GROUP = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def environments(run: Any, name: str, *command: str) -> list[dict[str, str]]:
    """Run a command that starts two workers; return the variables that only their environment
    has.
    """
    folder = Path(run.orders.parent / name)
    folder.mkdir()
    run.env |= {"ENV_FOLDER": str(folder)}
    process = run.start(*command)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    given = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return [
        {name: value for name, value in env.items() if run.env.get(name) != value} for env in given
    ]


def test_a_worker_has_the_variables_of_torchrun(run: Any) -> None:
    """All names but a few exist, and variables about ranks have the same values. The variables that
    torchrun sets by itself do not prevent NCCL.
    """
    run.use_torch()
    of_the_user = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "RUST_LOG")
    run.env = {
        name: value
        for name, value in run.env.items()
        if name not in of_the_user and not name.startswith(("TORCH", "NCCL"))
    }
    torchrun = environments(
        run,
        "torchrun",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "env_worker",
    )
    agent = [
        "titan_ft.launch.group.agent",
        f"--run-dir={run.paths.root}",
        "--ranks=2",
        "--module=env_worker",
    ]
    ours = environments(
        run, "agent", "-m", *agent, "--lighthouse=http://127.0.0.1:1", "--no-zygote", "--"
    )
    for theirs, own in zip(torchrun, ours, strict=True):
        assert theirs.keys() - own.keys() == LEFT_OUT
        for name in (*OF_THE_RANK, *OF_THE_GROUP):
            assert own[name] == theirs[name], name
        assert device.ASYNC_ERROR_HANDLING not in device.nccl_environment(theirs, 10000)


def test_the_new_backend_of_nccl_is_off_before_torch_is_imported() -> None:
    """Also in the environment of the zygote, whose forks have imported torch.distributed already. A
    user's value stays.
    """
    assert default_env({})["TORCH_DIST_USE_NCCL2"] == "0"
    assert default_env({"TORCH_DIST_USE_NCCL2": "1"})["TORCH_DIST_USE_NCCL2"] == "1"
