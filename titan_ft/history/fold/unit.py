# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run commits, and what `step` of its events therefore counts: torchtitan's steps, or rounds of several."""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.judgement import count
from titan_ft.run.events import WorkerConfig


@dataclass(frozen=True)
class Unit:
    """What one commit stands for.

    Attributes:
        method: the semi-synchronous method; empty where the groups meet at each step.
        steps: torchtitan's steps of one.
        last: torchtitan's last step; 0 if unknown.
        fragments: parts of the model of which each commit exchanges one, in turn, and the last one all.
    """

    method: str = ""
    steps: int = 1
    last: int = 0
    fragments: int = 1

    @classmethod
    def of(cls, config: WorkerConfig | None) -> Unit:
        """Return that of a worker's config; of an older history, which does not tell, it is the step."""
        if config is None:
            return cls()
        between = config.sync_steps or 1
        length = config.round_steps or between
        return cls(config.semi_sync_method or "", length, config.steps, fragments=between // length)

    @property
    def noun(self) -> str:
        return "round" if self.method else "step"

    def step_after(self, commits: int) -> int:
        """Return torchtitan's step after so many commits."""
        step = commits * self.steps
        return min(step, self.last) if self.last else step

    def commits_after(self, step: int) -> int:
        """Return how many commits there are after a step of torchtitan's, such as the one that names a checkpoint."""
        return -(-step // self.steps)

    def name(self, number: int, form: str = "") -> str:
        """Name a commit by its number, which is written in that format: "step 4", or "round 4 (step 40)"."""
        step = f"step {self.step_after(number):{form}}"
        return f"round {number:{form}} ({step})" if self.method else step

    def count(self, number: int) -> str:
        """Return so many of them in words: "4 steps", "1 round"."""
        return count(number, self.noun)


STEP = Unit()
