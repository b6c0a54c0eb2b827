# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/test_cuda.sh: its choice of tests, and a machine that cannot have torch's CUDA build."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In place of the interpreter: it makes no environment, has no package, and notes what pytest is
# asked for.
STAND_IN = """#!/bin/bash
case "$*" in
*" -m venv "* | "-m venv "*)
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
"-m pip "*) exit "$PIP" ;;
*purelib*) mkdir -p "$PACKAGES" && echo "$PACKAGES" ;;
*'version("torch")'*) echo 2.13.0 ;;
"-m pytest "*)
    echo "$TITAN_FT_TEST_PROCESS_GROUP" >"$CALLS"
    echo "$0 $STAND_IN_LIB" >"$CALLS.folders"
    printf '%s\\n' "${@:3}" >>"$CALLS" ;;
*) echo "$@" >&2 && exit 9 ;;
esac
"""

Script = Callable[..., tuple["subprocess.CompletedProcess[str]", list[str]]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run the script in a copy of its files, which builds nothing; return its end, and pytest's
    arguments.
    """
    files = (
        "scripts/test_cuda.sh",
        "scripts/common.sh",
        "scripts/setup_env.sh",
        "tests/cuda_stand_in/setup.sh",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests/cuda_stand_in/build.sh").write_text('exit "$BUILD"\n')
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(
        *arguments: str, pip: int = 0, build: int = 0
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        given = {
            "TITAN_FT_PYTHON": str(python),
            "CALLS": str(calls),
            "PACKAGES": str(tmp_path / "packages"),
        }
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TITAN_FT_", "PYTHON"))
        }
        ended = subprocess.run(
            ["/bin/bash", str(tmp_path / "scripts" / "test_cuda.sh"), *arguments],
            env={**clean, **given, "PIP": str(pip), "BUILD": str(build)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ended, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.parametrize("arguments", [[], ["--quick"], ["tests/cuda/test_runs.py"]])
def test_without_the_wheel_a_line_says_so_and_nothing_fails(
    script: Script, tmp_path: Path, arguments: list[str]
) -> None:
    """A machine without a network, or of another architecture, passes everything else."""
    ended, asked = script(*arguments, pip=1)
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "the CUDA build of torch 2.13.0 cannot be had from here: nothing is tested"
    )
    assert asked == []
    assert not (
        tmp_path / ".venv-cuda"
    ).exists()  # half of an environment would be taken for a whole one


def test_a_build_that_fails_is_a_failure(script: Script) -> None:
    ended, asked = script("--quick", build=1)
    assert (ended.returncode, asked) == (1, [])


def test_the_quick_ones_are_tests_that_exist(script: Script) -> None:
    """The quick choice leaves out slow tests, and names single tests of tests/integration."""
    ended, asked = script("--quick")
    assert (ended.returncode, ended.stderr) == (0, "")
    process_group, *words = asked
    assert (process_group, words[0]) == ("nccl", "tests/cuda")
    assert words[-2] == "-m"
    assert "not slow" in words[-1]
    for name in words[1:-2]:
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name


def test_another_release_of_torch_has_folders_of_its_own(script: Script, tmp_path: Path) -> None:
    """A build for one release does not load with another."""
    ended, asked = script("--torch", "2.15.0", "tests/cuda/test_runs.py")
    assert (ended.returncode, asked[1:]) == (0, ["tests/cuda/test_runs.py"])
    python, lib = (tmp_path / "calls.folders").read_text().split()
    assert python == str(tmp_path / ".venv-cuda-2.15.0" / "bin" / "python")
    assert lib == str(tmp_path / "tests" / "cuda_stand_in" / "lib" / "2.15.0")
    ended, _ = script("--torch", "2.15.0", pip=1)
    assert ended.returncode == 0
    (tmp_path / ".venv-cuda-2.15.0" / "stamp").unlink()
    ended, _ = script("--torch", "2.15.0", pip=1)
    assert ended.stderr.startswith("the CUDA build of torch 2.15.0 cannot be had from here")


def test_an_option_without_its_value_is_refused(script: Script) -> None:
    ended, asked = script("--torch")
    assert (ended.returncode, asked) == (2, [])
    assert ended.stderr == "test_cuda.sh: --torch needs a release\n"
