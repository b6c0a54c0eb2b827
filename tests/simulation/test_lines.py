# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One committed step stays short enough to be read in one sitting."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

import pytest

import titan_ft
from tests.simulation.lines import STEP, main

TRAINER = 106
"""Lines of `trainer.py` in a step: the simulation does not run it, so they are counted by hand."""
COUNTED = {
    "train_step": 36,
    "_begin_work": 1,
    "_lr": 1,
    "_join_job": 8,
    "_train": 25,
    "_zero_gradients": 3,
    "_forward_backward": 6,
    "_gather_contribution": 11,
    "_tells_loss": 4,
    "_apply": 10,
    "_clip_gradients": 6,
    "_gradient_scale": 1,
    "_lr_factor": 2,
}
"""The functions that a step goes through, with all of their lines, as they were when those of a step were counted."""


def test_a_committed_step_is_at_most_655_lines_in_seven_files(capsys: pytest.CaptureFixture[str]) -> None:
    """The files that docs/design.md names for it come first, each of them is run, and their sum is small."""
    assert main(["--ranks", "2"]) == 0
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    total, counts = int(printed[0][0]), {file: int(lines) for lines, file in printed[1 : len(STEP) + 1]}
    assert tuple(counts) == STEP
    assert all(counts.values())
    assert total == sum(counts.values()) <= 655 - TRAINER
    assert len(STEP) + 1 <= 7
    assert printed[len(STEP) + 1][1] == "helpers"


def test_the_lines_of_the_trainer_are_those_that_were_counted() -> None:
    """Where this fails, count again which lines of `trainer.py` a step runs: `TRAINER`, and docs/design.md."""
    source = Path(titan_ft.__file__).with_name("trainer.py").read_text()
    lines: dict[str, int] = {}
    blocks = [compile(source, "trainer.py", "exec")]
    for block in blocks:
        blocks += [constant for constant in block.co_consts if isinstance(constant, CodeType)]
        lines[block.co_name] = len({line for *_, line in block.co_lines() if line not in (None, block.co_firstlineno)})
    assert {name: lines[name] for name in COUNTED} == COUNTED
