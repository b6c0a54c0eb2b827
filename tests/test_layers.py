# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What may import what, and what is not even loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomli

ROOT = Path(__file__).parents[1]


def test_the_layers_hold() -> None:
    """The contracts of pyproject.toml: imports go down only, and what must load without torch does.

    In a process of its own: import-linter sets up the logging of its process, and switches off loggers.
    """
    run("from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True, is_debug_mode=True))")


_BREAKERS = """
def breakers():
    return *(name for name in sys.modules if name.startswith(('titan_ft.chaos', 'titan_ft.faults'))),
"""
_LAUNCH = f"""
import sys, titan_ft.launch.local, titan_ft.launch.group.agent
from titan_ft.cli.main import main
{_BREAKERS}
flags = ['--replicas', '2', '--ranks-per-replica', '1', '--run-dir', 'none']
assert main(['launch', 'none.toml', *flags]) == 2
print('launch', *breakers())
"""
_TRAINER = """
import titan_ft.train, titan_ft.trainer
own = [module for name, module in sys.modules.items() if name.startswith('titan_ft') and 'launch' not in name]
print('trainer', *breakers())
print('ctypes', *(module.__name__ for module in own if sys.modules['ctypes'] in vars(module).values()))
"""
_FORKS = """
from importlib.util import find_spec
print('gone', *(name for name in titan_ft.train.IMPORTED_LATER if find_spec(name) is None))
"""


def test_what_is_loaded(tmp_path: Path) -> None:
    """Neither a launch nor a trainer loads code that injects faults, unless `chaos = true` asks for it.

    And each module exists that is loaded before the workers are forked. Else each worker would start as a process of
    its own, which takes seconds, and nothing would fail.
    """
    assert run(_LAUNCH + _TRAINER + _FORKS, cwd=tmp_path).splitlines() == ["launch", "trainer", "ctypes", "gone"]


def test_mutmut_changes_and_runs_files_that_exist() -> None:
    """A module or test that is moved would silently drop out of scripts/mutate.sh."""
    settings = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert all(list(ROOT.glob(pattern)) for pattern in settings["only_mutate"])
    assert all((ROOT / test).is_file() for test in settings["pytest_add_cli_args_test_selection"])


def run(code: str, cwd: Path = ROOT) -> str:
    """Return what Python code prints, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()
