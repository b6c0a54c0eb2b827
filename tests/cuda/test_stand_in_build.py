# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The build of the stand-in: a build without changes costs nothing, and missing tools are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BUILD = Path(__file__).parents[1] / "cuda_stand_in" / "build.sh"


def _build(out: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(_BUILD), sys.prefix, str(out)]
    return subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )


def _path_without_tools(folder: Path) -> str:
    """Return a PATH with the shell's own commands and without a compiler."""
    folder.mkdir()
    for command in ("bash", "dirname"):
        found = next(p for p in os.environ["PATH"].split(":") if (Path(p) / command).exists())
        (folder / command).symlink_to(Path(found) / command)
    return str(folder)


def test_an_unchanged_build_needs_no_compiler_and_prints_nothing(tmp_path: Path) -> None:
    done = _build(Path(os.environ["STAND_IN_LIB"]), _path_without_tools(tmp_path / "bin"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_compiler_is_named_in_one_line(tmp_path: Path) -> None:
    done = _build(tmp_path / "lib", _path_without_tools(tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stderr.startswith("the stand-in for CUDA cannot be built: g++ is missing")
    assert len(done.stderr.splitlines()) == 1
