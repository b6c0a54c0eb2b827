# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Give tests real jobs: processes, signals, a lighthouse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# For the package `harness`, which the workers import too.
sys.path.insert(0, str(Path(__file__).parent))

from harness.fixtures import make_job, pytest_runtest_makereport, runs, zygote  # noqa: F401
from harness.job import PROCESS_GROUP

NOT_OVER_NCCL = {
    "test_config_mistakes.py::test_nccl_without_a_gpu": "a GPU is there",
    "test_experts.py::test_a_healed_group_balances_as_its_peers_do[deepseek_v3-1-1]": "torch's histogram of whole "
    "numbers has kernels for CUDA, and none for a CPU, which the stand-in computes with",
    "test_parallelism.py::test_parity[cp]": "torchtitan's attention has no kernel for float32 that a ring can use",
}
"""Tests of the default run that fail with TITAN_FT_TEST_PROCESS_GROUP=nccl, and why. One that
passes is an error.
"""


@pytest.hookimpl(tryfirst=True)  # before -k and -m leave tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Over NCCL, expect the failures listed in `NOT_OVER_NCCL`, and leave out tests that start
    their own jobs.
    """
    folder = Path(__file__).parent
    ours = {
        str(item.path.relative_to(folder)) + item.nodeid[item.nodeid.index("::") :]: item
        for item in items
        if item.path.is_relative_to(folder)
    }
    if not any("::" in argument for argument in config.args):
        files = {name.partition("::")[0] for name in ours}
        unknown = [
            name for name in NOT_OVER_NCCL if name.partition("::")[0] in files and name not in ours
        ]
        if unknown:
            raise pytest.UsageError(
                f"tests/integration/conftest.py: NOT_OVER_NCCL names no test: {unknown}"
            )
    if PROCESS_GROUP != "nccl":
        return
    for name, item in ours.items():
        if name in NOT_OVER_NCCL:
            item.add_marker(pytest.mark.xfail(strict=True, reason=NOT_OVER_NCCL[name]))
    left_out = [
        item
        for item in ours.values()
        if not {"make_job", "zygote"} & set(getattr(item, "fixturenames", ()))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
