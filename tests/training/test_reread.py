# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Data of a run that are read again: with the config of the given folder, and by the shard's own
number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchtitan.protocols.train_spec import get_train_spec

from tests.event_builder import event
from titan_ft.history.batches.reread import Reread, Shard
from titan_ft.training.checkpoint.reread import _arguments_here, _prepare
from titan_ft.training.job_config import digest_config, read_config

CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "titan_ft://tokenizer"
[training]
dataset = "austen"
local_batch_size = 1
seq_len = 32
[fault_tolerance]
enable = true
group_size = 2
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    "form", [["--job.config_file=/gone/a.toml"], ["--job.config-file", "/gone/a.toml"]]
)
def test_the_config_is_that_of_the_given_folder(run_dir: Path, form: list[str]) -> None:
    """Of two flags torchtitan takes the first: a folder that had been moved was never read."""
    mine = f"--job.config_file={run_dir}/config.toml"
    assert _arguments_here(["--a=1", *form, "--b", "2"], run_dir) == [mine, "--a=1", "--b", "2"]
    (run_dir / "other.toml").write_text(CONFIG)
    assert _arguments_here([f"--job.config_file={run_dir}/other.toml"], run_dir) == [mine]
    assert read_config(*_arguments_here(form, run_dir)).training.seq_len == 32


def started(run_dir: Path) -> Any:
    arguments = ["--job.config_file=/gone/config.toml", "--fault_tolerance.replica_id=1"]
    digest = digest_config(read_config(*_arguments_here(arguments, run_dir)))
    return event("worker_started", arguments=arguments, config_digest=digest, replica=1)


def test_a_config_that_has_changed_is_not_blamed_on_the_data(run_dir: Path) -> None:
    event_then = started(run_dir)
    (run_dir / "config.toml").write_text(CONFIG.replace("seq_len = 32", "seq_len = 64"))
    found = Reread()
    assert _prepare(event_then, run_dir, found) is None
    assert found.unknown == ["the config has changed since group 1, attempt 0 read its data"]


def test_a_shard_is_read_by_its_own_number(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of groups in the config is: a resume may have cut the same shards into
    other slots.
    """
    found = Reread()
    build = _prepare(started(run_dir), run_dir, found)
    assert build is not None
    assert found.unknown == []
    for number in range(3):
        batch = next(iter(build(Shard(0, number, 3))))
        spec = get_train_spec("llama3")
        config = read_config(f"--job.config_file={run_dir}/config.toml")
        tokenizer = spec.build_tokenizer_fn(config)
        expected = spec.build_dataloader_fn(
            dp_world_size=3, dp_rank=number, tokenizer=tokenizer, job_config=config
        )
        assert batch[1].equal(next(iter(expected))[1])
