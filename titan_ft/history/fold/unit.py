# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The unit of a run's commits, which `step` of its events counts: torchtitan's steps, or rounds of
several.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.judgement import count
from titan_ft.run.events import WorkerConfig


@dataclass(frozen=True)
class Unit:
    """The meaning of one commit.

    Attributes:
        method: the semi-synchronous method; empty if the groups meet at each step.
        steps: torchtitan's steps per commit.
        last: torchtitan's last step; 0 if unknown.
        fragments: parts of the model. Each commit exchanges one of them in turn, and the last one
            all.
    """

    method: str = ""
    steps: int = 1
    last: int = 0
    fragments: int = 1

    @classmethod
    def of(cls, config: WorkerConfig | None) -> Unit:
        """Return the unit by a worker's config; a step for an older history without that field."""
        if config is None:
            return cls()
        between = config.sync_steps or 1
        length = config.round_steps or between
        method = config.semi_sync_method or ""
        return cls(method, length, config.steps, fragments=between // length)

    @property
    def noun(self) -> str:
        return "round" if self.method else "step"

    def step_after(self, commits: int) -> int:
        """Return torchtitan's step after so many commits."""
        step = commits * self.steps
        if self.last:
            return min(step, self.last)
        return step

    def steps_of(self, commit: int) -> int:
        """Return the number of torchtitan's steps of one commit; the last round may be shorter.

        0 for a round beyond the last step, as after a resume that lowered the number of steps.
        """
        return self.step_after(commit) - self.step_after(commit - 1)

    def commits_after(self, step: int) -> int:
        """Return the number of commits up to a step of torchtitan's, such as the step of a
        checkpoint.
        """
        return -(-step // self.steps)

    def name(self, number: int, form: str = "") -> str:
        """Return a commit's name with its number, formatted by `form`: "step 4", or "round 4 (step
        40)".
        """
        step = f"step {self.step_after(number):{form}}"
        if not self.method:
            return step
        return f"round {number:{form}} ({step})"

    def count(self, number: int) -> str:
        """Return so many of them in words: "4 steps", "1 round"."""
        return count(number, self.noun)


STEP = Unit()
