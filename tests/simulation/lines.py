# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the lines of the package that one committed step runs: `python -m tests.simulation.lines [--ranks N]`.

Two groups train in the simulation and nothing happens to them. The lines are those of the first rank of group 0, in
all of its threads. A line counts if one of three steps in a row runs it: a thread asks for the quorum of the next step,
and may do so before or after the step under way is counted. `trainer.py` is not run: the simulation has its own rank.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from titan_ft import device

device.prepare()

from tests.simulation import standins  # noqa: E402
from tests.simulation.rank import Rank  # noqa: E402
from tests.simulation.world import Options, World  # noqa: E402

STEP = tuple(f"replica/{name}.py" for name in ("step", "round", "exchange", "bucket", "membership", "decision"))
"""The files that make a step, but for `trainer.py` (docs/design.md)."""
_STEPS = range(4, 7)  # ordinary ones: all groups are there, no digest is due


class _Traced(World):
    """A world that notes which lines of the package a rank runs."""

    def __init__(self, ranks: int) -> None:
        fault_tolerance = {"enable": True, "group_size": 2, "digest_every": 100}
        super().__init__(1, Options(2, ranks, 8, fault_tolerance, overlap=True), [])
        self.lines: dict[str, set[int]] = collections.defaultdict(set)
        self._counts = False

    def committed(self, rank: Rank, step: int, participants: list[int]) -> None:
        """Begin to count, and end."""
        if rank.node == (0, 0):
            self._counts = step + 1 in _STEPS
        super().committed(rank, step, participants)

    def see(self, frame: FrameType, event: str, _: object) -> Any:
        """Note a line; what `sys.settrace` takes."""
        _, package, file = frame.f_code.co_filename.rpartition("/titan_ft/")
        if event == "line" and self._counts and (task := self.kernel.task) and task.process.name == "g0r0":
            self.lines[file].add(frame.f_lineno)
        return self.see if package else None


def count(ranks: int = 1) -> dict[str, int]:
    """Return how many lines of each file a committed step runs, in groups of so many ranks."""
    world, before = _Traced(ranks), sys.gettrace()
    with standins.installed(), torch.set_grad_enabled(torch.is_grad_enabled()):
        sys.settrace(world.see)
        try:
            problems = world.run()
        finally:
            sys.settrace(before)
    assert not problems, problems
    return {file: len(lines) for file, lines in world.lines.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the files of a step first, then its helpers, each with their sum."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.lines")
    parser.add_argument("--ranks", type=int, default=1, help="of a group (1)")
    counts = count(parser.parse_args(arguments).ranks)
    helpers = sorted(counts.keys() - set(STEP), key=lambda file: (-counts[file], file))
    for what, files in (("the step, without trainer.py", STEP), ("helpers", helpers)):
        print(f"{sum(counts[file] for file in files):5} {what}")
        for file in files:
            print(f"      {counts[file]:5} {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
