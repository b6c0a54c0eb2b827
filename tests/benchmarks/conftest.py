# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs without training: benchmarks start Python one-liners in place of their systems."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import benchmarks.run
from benchmarks.systems import Command


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the programs which a run starts in place of its system."""

    def start(*codes: str, services: tuple[str, ...] = ()) -> None:
        started = [
            Command(f"worker-{index}", [sys.executable, "-c", code])
            for index, code in enumerate(codes)
        ]
        started += [
            Command("service", [sys.executable, "-c", code], service=True) for code in services
        ]
        monkeypatch.setattr(benchmarks.run, "commands", lambda job: started)

    return start
