# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A checkout of torchtitan in the working folder, which `python -m` takes before the installed
package.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

from titan_ft.config import ConfigError
from titan_ft.host import release
from titan_ft.host.release import RELEASES

ROOT = Path(__file__).parents[2]


def config(folder: Path) -> subprocess.CompletedProcess[str]:
    """Resolve the debug config in a folder, in a process of its own: this one has torchtitan
    imported.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "titan_ft", "config", "llama3_debug", "--replicas=2"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_checkout_that_lacks_what_is_needed_is_named(tmp_path: Path) -> None:
    """One line has the release, the folder, the reason and the remedy; it was an ImportError of
    each worker.
    """
    package = tmp_path / "torchtitan" / "config"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    # And no JobConfig, as later versions.
    (package / "__init__.py").write_text("class ConfigManager: pass\n")
    ended = config(tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"titan-ft: torchtitan must be release {' or '.join(RELEASES)}, got that in {package.parent} "
        "(module 'torchtitan.config' has no attribute 'JobConfig'); start from another folder: Python looks in the "
        "working folder first\n"
    )


def test_a_torch_that_is_too_old_for_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3.0 trains a step with torch 2.13, and each worker ended after that with an
    AttributeError.
    """
    monkeypatch.setattr(release, "series", lambda: "0.3")
    monkeypatch.delattr(torch.distributed, "set_timeout", raising=False)
    with pytest.raises(
        ConfigError, match=r"torch must be release 2\.14 with torchtitan 0\.3\.0, got"
    ):
        release.check_torchtitan()


def test_a_checkout_that_has_it_works(tmp_path: Path) -> None:
    """It is judged by what it offers, not by being there."""
    installed = importlib.util.find_spec("torchtitan")
    assert installed is not None
    assert installed.origin is not None
    (tmp_path / "torchtitan").symlink_to(Path(installed.origin).parent, target_is_directory=True)
    ended = config(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[fault_tolerance]" in ended.stdout
