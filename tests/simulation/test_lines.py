# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One committed step stays short enough to be read in one sitting."""

from __future__ import annotations

import pytest

from tests.simulation.lines import STEP, main

TRAINER = 96
"""Lines of `trainer.py` in a step: the simulation does not run it, so they are counted by hand."""


def test_a_committed_step_is_at_most_600_lines_in_seven_files(capsys: pytest.CaptureFixture[str]) -> None:
    """The files that docs/design.md names for it come first, each of them is run, and their sum is small."""
    assert main(["--ranks", "2"]) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    total, counts = int(printed[0][0]), {file: int(lines) for lines, file in printed[1 : len(STEP) + 1]}
    assert tuple(counts) == STEP
    assert all(counts.values())
    assert total == sum(counts.values()) <= 600 - TRAINER
    assert len(STEP) + 1 <= 7
    assert printed[len(STEP) + 1][1] == "helpers"
