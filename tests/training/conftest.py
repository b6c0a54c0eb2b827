# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups whose checkpoints are tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint_run import Run
from titan_ft.training.checkpoint import choice


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make_run(
    world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Run]]:
    """Make groups that share a folder; closes their checkpoints with the test."""
    monkeypatch.setattr(choice, "_PAUSE_SECONDS", 0.01)
    runs: list[Run] = []

    def make(**more: Any) -> Run:
        runs.append(Run(tmp_path, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.checkpoints.close()
