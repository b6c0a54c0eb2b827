# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What may import what, and what is not even loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tomli


def test_the_layers_hold() -> None:
    """The contracts of pyproject.toml: imports go down only, and what must load without torch does.

    In a process of its own: import-linter sets up the logging of its process, and switches off loggers.
    """
    run("from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True, is_debug_mode=True))")


def test_a_trainer_without_chaos_loads_nothing_that_breaks_things() -> None:
    """What injects faults into a worker is imported when `chaos = true` asks for it, and not before."""
    code = (
        "import sys, titan_ft.train\n"
        "import titan_ft.trainer\n"
        "print(*(name for name in sys.modules if name.startswith(('titan_ft.chaos', 'titan_ft.faults'))))\n"
        "own = [module for name, module in sys.modules.items() if name.startswith('titan_ft')]\n"
        "print(*(module.__name__ for module in own if sys.modules['ctypes'] in vars(module).values()))"
    )
    assert run(code) == ""


def test_a_launch_without_chaos_loads_nothing_that_breaks_things(tmp_path: Path) -> None:
    """Neither the command line nor the launcher; tests of whole launches assert it at their end as well."""
    code = (
        "import sys, titan_ft.launch.local, titan_ft.launch.group.agent\n"
        "from titan_ft.cli.main import main\n"
        "flags = ['--replicas', '2', '--ranks-per-replica', '1', '--run-dir', 'none']\n"
        f"assert main(['launch', '{tmp_path}/none.toml', *flags]) == 2\n"
        "print(*(name for name in sys.modules if name.startswith(('titan_ft.chaos', 'titan_ft.faults'))))"
    )
    assert run(code) == ""


def test_what_is_loaded_before_the_workers_are_forked_exists() -> None:
    """Else each worker starts as a process of its own, which takes seconds, and nothing fails."""
    code = (
        "from importlib.util import find_spec\n"
        "from titan_ft.train import IMPORTED_LATER\n"
        "print(*(name for name in IMPORTED_LATER if find_spec(name) is None))"
    )
    assert run(code) == ""


def test_mutmut_changes_and_runs_files_that_exist() -> None:
    """A module or test that is moved would silently drop out of scripts/mutate.sh."""
    root = Path(__file__).parents[1]
    settings = tomli.loads((root / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert all(list(root.glob(pattern)) for pattern in settings["only_mutate"])
    assert all((root / test).is_file() for test in settings["pytest_add_cli_args_test_selection"])


def run(code: str) -> str:
    """Return what Python code prints."""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()
