# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/smoke_single_gpu.sh, on one GPU of the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_groups_share_one_gpu() -> None:
    """A group is killed and contributes again, and all digests are equal; otherwise the script
    fails.
    """
    env = {**os.environ, "TITAN_FT_PYTHON": sys.executable, "FAKE_CUDA_DEVICES": "1"}
    command = ["bash", str(ROOT / "scripts" / "smoke_single_gpu.sh"), "--training.steps=60"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
