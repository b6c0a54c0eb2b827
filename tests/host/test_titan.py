# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The modules of torchtitan's releases offer the same names, of which only one module can be
imported here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from titan_ft.host import cpu, release

HOST = Path(cpu.__file__).parent


def offered(name: str) -> list[str]:
    """Return `__all__` of a module of the host."""
    for node in ast.parse((HOST / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError(f"{name} has no __all__")


def test_both_releases_offer_the_same_names() -> None:
    """What one module lacks would be an ImportError, in each worker of the other release."""
    assert offered("titan_0_2") == offered("titan_0_3")


def test_the_installed_release_is_chosen() -> None:
    """And it has what it offers."""
    cpu.prepare()
    from titan_ft.host import titan

    module = f"titan_ft.host.titan_{release.series().replace('.', '_')}"
    assert titan.HostTrainer.__module__ == module
    assert not [name for name in offered(module.rpartition(".")[2]) if not hasattr(titan, name)]


@pytest.mark.parametrize(
    ("files", "series"), [(["train.py"], "0.2"), (["train.py", "trainer.py"], "0.3")]
)
def test_a_release_is_known_by_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], series: str
) -> None:
    """Not by its version, which a checkout shares with many others; and without an import of two
    seconds.
    """
    package = tmp_path / "torchtitan"
    package.mkdir()
    for file in ("__init__.py", *files):
        (package / file).touch()

    class Spec:
        submodule_search_locations = (str(package),)

    monkeypatch.setattr(release.importlib.util, "find_spec", lambda name: Spec)
    assert release.series() == series
