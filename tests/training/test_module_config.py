# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that are given by `--module M --config F`: the flags apart, the TOML, and what is
refused.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import tomli

from titan_ft.cli import module_job
from titan_ft.cli.main import main
from titan_ft.cli.module_job import replace_module_by_toml
from titan_ft.config import ConfigError
from titan_ft.host.release import series
from titan_ft.training.job_config import read_config
from titan_ft.training.module_config import ModuleFlags, format_toml, split_flags

MODULE = ["--module", "llama3", "--config", "llama3_debugmodel"]


def test_flags_are_told_apart() -> None:
    """A value that follows its flag stays with it; names may have a dash."""
    args = [
        *MODULE,
        "--training.steps",
        "3",
        "--fault-tolerance.group_size",
        "2",
        "--job.dump_folder=x",
        "--debug.seed=1",
    ]
    own = ("--fault-tolerance.group_size", "2", "--job.dump_folder=x")
    expected = ModuleFlags(
        "llama3", "llama3_debugmodel", own, ("--training.steps", "3", "--debug.seed=1")
    )
    assert split_flags(args) == expected
    assert split_flags(["--module=llama3", "--config=llama3_debugmodel", *args[4:]]) == expected
    assert split_flags(["--job.config_file=x.toml", "--training.steps=3"]).module == ""


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["--module=llama3"],
            "--module and --config must come together, got --module llama3 alone",
        ),
        (
            ["--config=llama3_8b"],
            "--module and --config must come together, got --config llama3_8b alone",
        ),
        (
            [*MODULE, "--job.config-file=x.toml"],
            "--module must be left out with --job.config_file, got 'llama3'",
        ),
    ],
)
def test_a_job_is_given_once(args: list[str], line: str) -> None:
    """By a function or by a TOML, and whole."""
    with pytest.raises(ConfigError, match=line):
        split_flags(args)


def test_tables_are_written_as_toml() -> None:
    """Tables may hold tables, texts and names any letter; a None has no place in a TOML."""
    inner = {"num_workers": 2, "shares": [{"a b": 1}, {}]}
    training = {
        "steps": 10,
        "name": 'a "b" \\ ß\x7f\n',
        "lr": 8e-4,
        "max_norm": math.inf,
        "dataloader": inner,
    }
    tables = {"training": training, "comm": {}}
    assert tomli.loads(format_toml(tables)) == {"training": training}
    with pytest.raises(ConfigError, match=r"comm\.mode must have a value for a TOML, got None"):
        format_toml({"comm": {"mode": None}})


@pytest.mark.skipif(series() != "0.2", reason="needs torchtitan 0.2")
def test_torchtitan_0_2_has_no_such_functions() -> None:
    """One line, by a worker and by a command; it names the release."""
    for refused in (
        lambda: read_config(*MODULE),
        lambda: replace_module_by_toml(["config", *MODULE]),
    ):
        with pytest.raises(
            ConfigError,
            match=r"--module must come with torchtitan 0.3, got --module llama3 .* 0\.2\.2",
        ):
            refused()


def test_a_command_gets_a_toml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child makes it. Other words stay unchanged; without --module all of them do."""
    script = tmp_path / "reader.py"
    script.write_text(
        "import sys\nprint('[job]')\nprint(f'description = \"{sys.argv[1]}/{sys.argv[2]}\"')\n"
    )
    monkeypatch.setattr(module_job, "_READER", "reader")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    *words, last = replace_module_by_toml(["launch", "--replicas", "2", *MODULE, "--run-dir=x"])
    assert words == ["launch", "--replicas", "2", "--run-dir=x"]
    path = Path(last.removeprefix("--config="))
    assert tomli.loads(path.read_text()) == {"job": {"description": "llama3/llama3_debugmodel"}}
    assert replace_module_by_toml(["launch", "--config", "x.toml"]) == [
        "launch",
        "--config",
        "x.toml",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["launch", "--module", "llama3"],
            "--module must come with --config, got --module llama3 alone",
        ),
        (
            ["slurm", "submit", *MODULE],
            f"slurm, got 'llama3': each restart.*python -m {module_job._READER} llama3",
        ),
        (["group", *MODULE, "--replica=0"], "--module must be left out with titan-ft group, got"),
    ],
)
def test_a_command_that_cannot_have_it(
    words: list[str], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and one line."""
    with pytest.raises(ConfigError, match=line):
        replace_module_by_toml(words)
    assert main(words) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_reader_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a line of its own."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="ended with status 1"):
        replace_module_by_toml(["launch", *MODULE])
