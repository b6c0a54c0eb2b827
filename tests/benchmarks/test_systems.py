# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Configs and commands of each system."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
import tomli_w

from benchmarks.peer import OBSERVE_FLAG
from benchmarks.systems import (
    OURS,
    PEER,
    PEER_MODULE,
    STOCK,
    Job,
    commands,
    derive_config,
    first_log,
)
from titan_ft.config import load_toml

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_debug.toml"


@pytest.mark.parametrize("system", [STOCK, OURS, PEER])
def test_all_systems_train_the_same(system: str, tmp_path: Path) -> None:
    """Only the form of the parallelism differs, and fields unknown to torchtitan's own schema are
    left out.
    """
    base = load_toml(CONFIG)
    config = tomli.loads(tomli_w.dumps(derive_config(base, Job(system, tmp_path), 40, 10)))
    for table in ("optimizer", "lr_scheduler", "activation_checkpoint", "compile", "debug"):
        assert config[table] == base[table]
    assert config["training"] == {**base["training"], "steps": 40}
    assert Path(config["model"]["hf_assets_path"]).is_dir()
    degrees = (
        config["parallelism"]["data_parallel_replicate_degree"],
        config.get("fault_tolerance", {}).get("enable"),
    )
    assert degrees == ((2, None) if system == STOCK else (1, True))
    if system == PEER:
        assert "digest_every" not in config["fault_tolerance"]
    assert base == load_toml(CONFIG)


def test_the_log_of_the_first_attempt_is_found(tmp_path: Path) -> None:
    for name in (
        "attempt-0/rank-0.log",
        "attempt-2/rank-0.log",
        "x/attempt_0/0/stdout.log",
        "x/attempt_1/0/stdout.log",
    ):
        path = tmp_path / "logs" / "replica-0" / name
        path.parent.mkdir(parents=True)
        path.touch()
    found = [first_log(Job(system, tmp_path)).parts[-4:] for system in (OURS, PEER, STOCK)]
    assert found == [
        ("logs", "replica-0", "attempt-0", "rank-0.log"),
        *[("x", "attempt_0", "0", "stdout.log")] * 2,
    ]
    with pytest.raises(FileNotFoundError, match="no log of rank 0"):
        first_log(Job(OURS, tmp_path / "other"))


def test_the_peer_has_torchfts_own_lighthouse_and_each_group_its_own_id_and_logs(
    tmp_path: Path,
) -> None:
    lighthouse, *groups = commands(
        Job(PEER, tmp_path, 3, 4, max_restarts=7, flags=(f"{OBSERVE_FLAG}5",))
    )
    assert lighthouse.service
    assert Path(lighthouse.args[0]).name == "torchft_lighthouse"
    address = lighthouse.args[lighthouse.args.index("--bind") + 1]
    assert [group.name for group in groups] == ["group-0", "group-1", "group-2"]
    for replica, group in enumerate(groups):
        assert group.env["TORCHFT_LIGHTHOUSE"] == f"http://{address}"
        assert f"--log-dir={tmp_path / 'logs' / f'replica-{replica}'}" in group.args
        assert {"--nproc-per-node=4", "--max-restarts=7"} < set(group.args)
        worker = group.args[group.args.index(PEER_MODULE) - 1 :]
        # The flag that is not torchtitan's comes first.
        assert worker[:3] == ["-m", PEER_MODULE, f"{OBSERVE_FLAG}5"]
        assert worker[-1] == f"--fault_tolerance.replica_id={replica}"


def test_a_launch_has_the_ranks_and_the_flags_that_are_asked_for(tmp_path: Path) -> None:
    (command,) = commands(Job(OURS, tmp_path, num_ranks=1, flags=("--no-zygote",)))
    assert "--ranks-per-replica=1" in command.args
    assert command.args[-1] == "--no-zygote"
