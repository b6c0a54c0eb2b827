# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's config, which the process that workers are forked from has read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from titan_ft.config import ConfigError
from titan_ft.train import check
from titan_ft.training.checkpoint.folder import INDEX
from titan_ft.training.job_config import check_paths, read_config

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_debug.toml"


def test_a_config_is_read_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """A fork inherits it; a worker that starts after a change of the file gets the new values."""
    file = tmp_path / "run.toml"
    text = CONFIG.read_text()
    file.write_text(text.replace("seed = 42", "seed = 1"))
    flag = f"--job.config_file={file}"
    first = read_config(flag)
    assert first.debug.seed == 1
    assert read_config(flag) is first
    file.write_text(text.replace("seed = 42", "seed = 2"))
    changed = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(changed, changed))
    assert read_config(flag).debug.seed == 2


@pytest.mark.parametrize("name", ["llama3_debug", "llama3_debug_diloco"])
def test_debug_runs_have_a_flight_recorder(name: str) -> None:
    """They had none, so no test ran with torchtitan's default, and all groups wrote to one path."""
    assert read_config(f"--job.config_file={CONFIG.with_stem(name)}").comm.trace_buf_size > 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '{"weight_map": {"lm_head.weight": "model.safetensors"}}',
            "has 'model.safetensors' for lm_head.weight",
        ),
        ('{"weight_map": {"lm_head.weight": 1}}', "has 1 for lm_head.weight"),
        ('{"weight_map": ["model-00001-of-00001.safetensors"]}', 'has no table "weight_map"'),
        ('{"metadata": {}}', 'has no table "weight_map"'),
        ("[1]", 'has no table "weight_map"'),
        ("1", 'has no table "weight_map"'),
        ('{"weight_map": {"lm_head', "cannot be read (Unterminated string"),
        ("", "cannot be read (Expecting value"),
    ],
)
def test_a_table_of_files_that_torchtitan_cannot_read_is_refused(
    tmp_path: Path, text: str, found: str
) -> None:
    """It ended the first start and the second one with a traceback, although nothing is
    exported.
    """
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_config(f"--job.config_file={CONFIG}", f"--model.hf_assets_path={tmp_path}")
    line = str(raised.value)
    assert "\n" not in line
    for part in (
        f"{INDEX} of model.hf_assets_path must",
        f"got {tmp_path / INDEX}, which {found}",
        "remove it",
    ):
        assert part in line


def test_a_table_of_files_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"{INDEX}, which cannot be read (")):
        read_config(f"--job.config_file={CONFIG}", f"--model.hf_assets_path={tmp_path}")


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}']
)
def test_a_table_of_files_that_torchtitan_reads_is_taken(tmp_path: Path, text: str) -> None:
    """Also an empty one, which torchtitan takes for none."""
    (tmp_path / INDEX).write_text(text)
    config = read_config(f"--job.config_file={CONFIG}", f"--model.hf_assets_path={tmp_path}")
    assert config.model.hf_assets_path == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--training.dataset_path=nowhere"],
            "training.dataset_path must be an existing .txt or .txt.gz file, got 'no",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path=nowhere"],
            "checkpoint.initial_load_path must be the folder of a checkpoint, got 'nowhere', which is none",
        ),
    ],
)
def test_paths_that_lead_nowhere_are_found_before_a_worker_is_started(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    """Other hosts may lack them: `titan-ft config` reads the config all the same."""
    own = f"--job.dump_folder={tmp_path}"
    config = read_config(f"--job.config_file={CONFIG}", own, *flags)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_paths(config)


def test_a_path_that_is_not_looked_at_may_lead_nowhere(tmp_path: Path) -> None:
    """A run with checkpoints of its own does not load the first one again."""
    (tmp_path / "checkpoint").mkdir()
    own = [f"--job.dump_folder={tmp_path}", "--checkpoint.folder=checkpoint", "--checkpoint.enable"]
    check_paths(
        read_config(f"--job.config_file={CONFIG}", *own, "--checkpoint.initial_load_path=nowhere")
    )


@pytest.mark.parametrize("end", ["_exit(0)", "_exit(3)"])
def test_a_module_that_ends_the_process_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Each worker ended with status 0 in the import, which counted as a job that had finished."""
    (tmp_path / f"ends_{end[6]}.py").write_text(f"import os\nos.{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = [f"--job.config_file={CONFIG}", f"--experimental.custom_import=ends_{end[6]}"]
    with pytest.raises(ConfigError, match="which ends the process"):
        check(flags)
