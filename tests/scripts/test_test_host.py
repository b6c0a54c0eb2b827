# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/test_host.sh: which releases it installs, where, and what it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In place of the interpreter: it makes no environment, and notes what pip and pytest are asked for.
STAND_IN = """#!/bin/bash
case "$*" in
"-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
"-m pip "*) echo "pip ${*:4}" >>"$CALLS" && exit "$PIP" ;;
*purelib*) mkdir -p "$PACKAGES" && echo "$PACKAGES" ;;
"-m pytest "*) echo "$0 ${*:3}" >>"$CALLS" ;;
*) echo "$@" >&2 && exit 9 ;;
esac
"""

Script = Callable[..., tuple["subprocess.CompletedProcess[str]", list[str]]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run the script in a copy of its files; return its end, and the calls of pip and pytest."""
    for name in ("scripts/test_host.sh", "scripts/common.sh", "scripts/setup_env.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments: str, pip: int = 0) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.write_text("")
        given = {
            "TITAN_FT_PYTHON": str(python),
            "CALLS": str(calls),
            "PACKAGES": str(tmp_path / "packages"),
            "PIP": str(pip),
        }
        ended = subprocess.run(
            ["/bin/bash", str(tmp_path / "scripts" / "test_host.sh"), *arguments],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended, calls.read_text().splitlines()

    return run


def test_without_options_it_is_the_newer_torchtitan(script: Script, tmp_path: Path) -> None:
    """The tests that it names must exist: pytest would end with an error of usage."""
    ended, calls = script()
    assert (ended.returncode, ended.stderr) == (0, "")
    torchtitan, torch, tests = calls
    assert "--no-deps torchtitan==0.3.0 spmd_types==" in torchtitan
    assert torch.endswith("torch==2.14.1")
    python, *words = tests.split()
    assert python == str(tmp_path / ".venv-host" / "bin" / "python")
    for word in words:
        path, _, test = word.partition("::")
        if path.startswith("tests/"):
            assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text() or not test, word
    _, calls = script()
    assert len(calls) == 1  # nothing is installed again


def test_named_releases_have_a_folder_of_their_own(script: Script, tmp_path: Path) -> None:
    """Else each call with other releases would install 3 GB anew."""
    options = ("--torchtitan", "0.2.2", "--torch", "2.15.0")
    ended, calls = script(*options, "tests/host")
    assert (ended.returncode, ended.stderr) == (0, "")
    torchtitan, torch, tests = calls
    assert torchtitan.endswith("--no-deps torchtitan==0.2.2")
    assert torch.endswith("torch==2.15.0")
    assert tests == f"{tmp_path}/.venv-host-0.2.2-2.15.0/bin/python tests/host"


def test_without_the_release_a_line_says_so_and_nothing_fails(
    script: Script, tmp_path: Path
) -> None:
    """A machine without a network passes everything else."""
    ended, calls = script("--torch", "2.15.0", pip=1)
    assert ended.returncode == 0
    assert ended.stderr == (
        "torchtitan 0.3.0 or torch 2.15.0 cannot be had from here: it is not tested\n"
    )
    assert len(calls) == 1
    assert not (tmp_path / ".venv-host-0.3.0-2.15.0").exists()


def test_an_option_without_its_value_is_refused(script: Script) -> None:
    ended, calls = script("--torch")
    assert (ended.returncode, calls) == (2, [])
    assert ended.stderr == "test_host.sh: --torch needs a release\n"
