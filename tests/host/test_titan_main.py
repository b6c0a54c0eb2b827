# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the modules of the host import of torchtitan: that it is there, and how much of it a
checkout of main still has.

    TORCHTITAN_MAIN=FOLDER bash scripts/test.sh tests/host/test_titan_main.py -rx

reads the checkout in FOLDER, of which nothing is imported. That test may fail, as expected failures
do: it names what a module for the next release has to change. docs/parallelism.md has the list that
was made by hand."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ft.host import release

HOST = Path(release.__file__).parent
MAIN = os.environ.get("TORCHTITAN_MAIN", "")
MODULES = {
    "0.2": ("titan_0_2.py",),
    "0.3": ("titan_0_3.py", "tables_0_3.py", "configs_0_3.py", "cpu_0_3.py"),
}


def imported(series: str) -> Iterator[tuple[str, str]]:
    """Yield the names that the modules of a release import, as (module of torchtitan, name)."""
    for file in MODULES[series]:
        for node in ast.walk(ast.parse((HOST / file).read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "torchtitan"
            ):
                for alias in node.names:
                    yield node.module or "", alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("torchtitan."):
                        package, _, name = alias.name.rpartition(".")
                        yield package, name


def defined(source: str) -> set[str]:
    """Return the names that a module's text defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def missing(series: str, folder: Path) -> list[str]:
    """Return the names that the modules of a release import and that the torchtitan in a folder
    lacks.
    """
    found = []
    for module, name in sorted(set(imported(series))):
        path = folder.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        names = defined(file.read_text()) if file.exists() else set()
        is_module = (path / name).is_dir() or (path / f"{name}.py").exists()
        if name not in names and not is_module:
            found.append(f"{module}.{name}")
    return found


def installed() -> Path:
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def test_the_installed_release_has_all_that_is_imported() -> None:
    series = release.series()
    assert len(list(imported(series))) > 10
    assert missing(series, installed()) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    """The releases have other modules: the check tells them apart."""
    (other,) = set(MODULES) - {release.series()}
    assert missing(other, installed())


@pytest.mark.skipif(
    not MAIN, reason="TORCHTITAN_MAIN names no checkout of torchtitan's main branch"
)
def test_main_has_all_that_the_module_of_0_3_imports() -> None:
    """No failure: main is no release, and titan_ft has no module for it."""
    gone = missing("0.3", Path(MAIN))
    if gone:
        pytest.xfail(f"gone from torchtitan's main branch: {', '.join(gone)}")
