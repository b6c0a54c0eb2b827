# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What holds for all tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a test that is marked `alone` have the machine for itself, where several run at a time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent  # of all workers
    alone = request.node.get_closest_marker("alone") is not None
    with (folder / "door").open("w") as door, (folder / "machine").open("w") as machine:
        fcntl.flock(door, fcntl.LOCK_EX)  # kept by who waits to be alone, so that no further test begins
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        fcntl.flock(machine, fcntl.LOCK_UN)  # here, and not with the file: a forked child may have it open
