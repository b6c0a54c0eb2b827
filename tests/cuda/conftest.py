# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the GPU paths on torch's CUDA build, over the stand-in for CUDA and NCCL: `bash
scripts/test_cuda.sh`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for the package `harness`

from harness.fixtures import make_job, pytest_runtest_makereport, runs, zygote  # noqa: F401

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that a default run leaves it out."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.stand_in)
