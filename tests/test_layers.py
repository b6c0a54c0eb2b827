# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What may import what, and what is not even loaded."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import tomli

ROOT = Path(__file__).parents[1]


def test_the_layers_hold() -> None:
    """The contracts of pyproject.toml: imports go down only, and what must load without torch does.

    In a process of its own: import-linter sets up the logging of its process, and switches off
        loggers.
    """
    run(
        "from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True, is_debug_mode=True))"
    )


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
    """Neither a launch nor a trainer loads code that injects faults, unless `chaos = true` asks for
    it.

    And each module exists that is loaded before the workers are forked. Else each worker would
    start as a process of its own, which takes seconds, and nothing would fail."""
    assert run(_LAUNCH + _TRAINER + _FORKS, cwd=tmp_path).splitlines() == [
        "launch",
        "trainer",
        "ctypes",
        "gone",
    ]


def test_mutmut_changes_and_runs_files_that_exist() -> None:
    """A module or test that is moved would silently drop out of scripts/mutate.sh."""
    settings = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert all(list(ROOT.glob(pattern)) for pattern in settings["only_mutate"])
    assert all((ROOT / test).is_file() for test in settings["pytest_add_cli_args_test_selection"])


_SENTENCES = {"reason", "error", "text", "message", "statement"}
"""Names of fields and variables that hold a sentence for people."""
_PARTS = {"startswith", "endswith", "removeprefix", "partition", "find", "index"}
_PATTERNS = {"search", "match", "fullmatch", "findall"}
_MAY_READ = {
    "titan_ft/faults/schema.py",  # msgspec names the field in its text only
    "titan_ft/host/release.py",  # cuts the path of a module off an ImportError's text
    "titan_ft/launch/group/own_end.py",  # PyTorch raises one class for all errors of CUDA
    "titan_ft/run/error_file.py",  # Gloo's RuntimeError, and a DataLoader's error, which is made of a text
    "titan_ft/run/events.py",  # "TYPE: message", the form of `WorkerError.text`
    "titan_ft/training/checkpoint/damage.py",  # DCP swallows the error of the table's file
}


def test_no_code_reads_sentences() -> None:
    """Facts are in types, codes and fields: whoever words a sentence anew changes no decision."""
    readers = set()
    for path in (ROOT / "titan_ft").rglob("*.py"):
        if any(map(_reads_a_sentence, ast.walk(ast.parse(path.read_text())))):
            readers.add(str(path.relative_to(ROOT)))
    assert readers == _MAY_READ


def _reads_a_sentence(node: ast.AST) -> bool:
    match node:
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]):
            return _is_sentence(right) or (_is_sentence(left) and _is_given(right))
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
            return any(_is_sentence(a) and _is_given(b) for a, b in ((left, right), (right, left)))
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=arguments):
            is_cut = name in _PARTS and _is_sentence(value)
            return is_cut or (name in _PATTERNS and any(map(_is_sentence, arguments)))
    return False


def _is_sentence(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _SENTENCES
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
            return name in {"error", "cause"}
    return False


def _is_given(node: ast.AST) -> bool:
    """Return whether an expression is a text, or some of them, that is written in the code."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.Tuple() | ast.List() | ast.Set():
            return True
        case ast.Name(id=name):
            return name.isupper()
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return module.islower() and name.isupper()
    return False


def run(code: str, cwd: Path = ROOT) -> str:
    """Return what Python code prints, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.strip()
