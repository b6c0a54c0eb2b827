# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether, and when, a replica group that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_ERROR_CODE = 2
"""Exit status of a worker whose configuration is wrong: starting it again cannot help."""
FINAL_CODE = 3
"""Exit status of a worker whose group must not come back by itself: its state diverged, or another took its place."""


def backoff_seconds(streak: int) -> float:
    """Return the wait before a restart that follows `streak` restarts none of which got the group going.

    0 for the first (a group that was killed should be back at once), then 0.5 s, doubling up to 10 s.
    """
    return 0.0 if streak == 0 else min(0.5 * 2.0 ** min(streak - 1, 30), 10.0)


@dataclass
class RestartPolicy:
    """Count the restarts of one group. A group that got going (see `decide`) is restarted without delay again."""

    max_restarts: int
    """Restarts in all, over the life of the supervisor."""
    healthy_seconds: float = 60.0
    """An attempt that lived this long had got going."""
    num_restarts: int = 0
    streak: int = 0
    """Restarts since the last attempt that had got going."""

    @property
    def restarts_left(self) -> bool:
        return self.num_restarts < self.max_restarts

    def decide(self, code: int, alive_seconds: float, committed: bool) -> float | str:
        """Return the seconds to wait before the group is started again, or why it is not.

        Args:
            code: exit status of the first worker that ended badly (negative: the signal).
            alive_seconds: how long the attempt lived.
            committed: whether it committed a step. A group that is killed again and again but works in between is
                no crash loop, however short its lives are.
        """
        if code == CONFIG_ERROR_CODE:
            return "the configuration is wrong (exit status 2); it is not started again"
        if code == FINAL_CODE:
            return "the group must not come back by itself (exit status 3); see its log"
        if not self.restarts_left:
            return f"no restart left (--max-restarts {self.max_restarts})"
        if committed or alive_seconds >= self.healthy_seconds:
            self.streak = 0
        delay = backoff_seconds(self.streak)
        self.num_restarts += 1
        self.streak += 1
        return delay
