# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The README's commands, from a wheel, in an empty folder.

The commands are taken from the README itself, so that it cannot drift from what works.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ft.config import load_toml

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
INDEX_PROBE = "docstring_parser"
"""A small package, which pip downloads to find out whether it reaches an index."""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _commands() -> Iterator[list[str]]:
    """Yield the words of each command of `titan-ft` in the README's blocks, in their order."""
    for block in _blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["titan-ft"]:
                yield words


def _environment() -> dict[str, str]:
    """Return this process's environment without what names this checkout, and without conftest's
    rule for names.

    With that rule (RES_OPTIONS) pip would resolve no name.
    """
    dropped = ("PYTHON", "TITAN_FT_", "TORCHFT_", "RES_OPTIONS")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def _run(*words: str, folder: Path, timeout: float = 150) -> str:
    """Run a command in an empty folder, without this checkout on its path; return what it
    prints.
    """
    result = subprocess.run(
        words,
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-4000:]}"
    return result.stdout


def _index_answers(folder: Path) -> bool:
    """Say whether pip reaches a package index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--dest",
        str(folder),
    ]
    try:
        probe = subprocess.run(
            [*command, INDEX_PROBE], env=_environment(), capture_output=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy: a build leaves its folders beside the
    sources.
    """
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in ("titan_ft", "configs"):
        shutil.copytree(
            ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    (sources / "docs").mkdir()
    for name in ("pyproject.toml", "docs/pypi.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", str(folder), str(sources), folder=folder)
    (built,) = folder.glob("titan_ft-*.whl")
    return built


def _install(wheel: Path, folder: Path, *, with_dependencies: bool) -> Path:
    """Install a wheel into an environment of its own, and return where its commands are.

    Without its dependencies it sees the packages of this environment, but not this checkout: a line
    of a .pth file puts their folder on the path, and does not read the .pth file of an editable
    install there.
    """
    environment = folder / "environment"
    _run(
        sys.executable,
        "-m",
        "venv",
        *([] if with_dependencies else ["--without-pip"]),
        str(environment),
        folder=folder,
    )
    python = environment / "bin" / "python"
    if with_dependencies:
        pip = (
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(ROOT / "constraints.txt"),
        )
        _run(*pip, str(wheel), folder=folder, timeout=1500)
    else:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = environment / "lib" / version / "site-packages" / "others.pth"
        packages.write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = (
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
        )
        _run(*pip, str(wheel), folder=folder)
    return environment / "bin"


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_dependencies", [False, True], ids=["beside-these-packages", "in-an-empty-environment"]
)
def test_the_readme_works_from_a_wheel(
    wheel: Path, tmp_path: Path, with_dependencies: bool
) -> None:
    """Every `titan-ft` command of the README succeeds as it stands, and so does its TOML with a
    stock config.
    """
    if with_dependencies and not _index_answers(tmp_path):
        pytest.skip("no package index is reached")
    bin_folder = _install(wheel, tmp_path, with_dependencies=with_dependencies)
    folder = tmp_path / "empty"
    folder.mkdir()
    where = "import pathlib, titan_ft; print(pathlib.Path(titan_ft.__file__).parents[4])"
    assert _run(str(bin_folder / "python"), "-c", where, folder=folder).strip() == str(
        bin_folder.parent
    )

    commands = list(_commands())
    assert {words[1] for words in commands} >= {"launch", "check", "report"}
    for words in commands:
        _run(str(bin_folder / words[0]), *words[1:], folder=folder)
    assert list(folder.glob("runs/*/report/index.html"))

    (table,) = _blocks("toml")
    config = folder / "mine.toml"
    config.write_text(f"{_stock_config()}\n{table}")
    groups = load_toml(config)["fault_tolerance"]["group_size"]
    launch = next(words for words in commands if words[1] == "launch")
    # The README has one set of numbers.
    assert launch[launch.index("--replicas") + 1] == str(groups)
    options = (
        "--replicas",
        str(groups),
        "--ranks-per-replica",
        "1",
        "--run-dir",
        "runs/mine",
        "--dry-run",
    )
    assert "group 1" in _run(
        str(bin_folder / "titan-ft"), "launch", str(config), *options, folder=folder
    )


def _stock_config() -> str:
    """Return a config of torchtitan's own: that of the debug model, without anything of this
    project's but the text.
    """
    text = (ROOT / "configs" / "llama3_debug.toml").read_text()
    text = re.sub(r"^\[fault_tolerance\]\n(.+\n)*", "", text, flags=re.MULTILINE)
    return re.sub(r"^custom_config_module = .*\n", "", text, flags=re.MULTILINE)
