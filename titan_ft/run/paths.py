# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The paths of all files and folders of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

JOB_CURVE = "job"
"""Folder of the job's curves, beside those of its groups in TensorBoard's folder."""


class RunPaths:
    """Name the files and folders of one run directory; create none of them.

    Args:
        root: the run directory (torchtitan's job.dump_folder).
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    @property
    def config(self) -> Path:
        """The TOML that the workers read."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """Folder of the event files, one per process."""
        return self.root / "events"

    @property
    def job_curve(self) -> Path:
        """Folder of the job's curves for TensorBoard, where its folder has the usual name."""
        return self.root / "tb" / JOB_CURVE

    @property
    def finished(self) -> Path:
        """Mark of a finished job, with the job's hash; see `titan_ft.training.finished`."""
        return self.root / "finished.json"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def chaos_orders(self) -> Path:
        """The orders for the agents of chaos in the workers, one a line."""
        return self.root / "chaos" / "orders.jsonl"

    @property
    def launch_log(self) -> Path:
        """Lines of `titan-ft launch` itself, each with its date; a resumed run appends to it."""
        return self.root / "logs" / "launch.log"

    @property
    def lighthouse_log(self) -> Path:
        return self.root / "logs" / "lighthouse.log"

    @property
    def zygote_log(self) -> Path:
        """Output of the process that all groups of the launch are forked from."""
        return self.root / "logs" / "zygote.log"

    @property
    def record_log(self) -> Path:
        """Output of the processes that reduce the events of a long run. A short run has none."""
        return self.root / "logs" / "record.log"

    def agent_log(self, replica: int) -> Path:
        """Output of the agent of one group (not of its workers)."""
        return self.root / "logs" / f"replica-{replica}" / "supervisor.log"

    def logs(self, replica: int, attempt: int, rank: int) -> Path:
        """Output (stdout and stderr) of one worker process."""
        return self.root / "logs" / f"replica-{replica}" / f"attempt-{attempt}" / f"rank-{rank}.log"

    def latest_logs(self, replica: int) -> Path:
        """Link to the folder with the logs of a group's latest attempt."""
        return self.root / "logs" / f"replica-{replica}" / "latest"

    def events_file(self, name: str) -> Path:
        """Event file of the process called `name`, such as "launcher-4711"."""
        return self.events / f"{name}.jsonl"

    def worker_events(self, replica: int, rank: int, attempt: int, pid: int) -> Path:
        return self.events_file(f"replica-{replica}-rank-{rank}-attempt-{attempt}-{pid}")

    def agent_events(self, replica: int, pid: int) -> Path:
        return self.events_file(f"supervisor-{replica}-{pid}")

    @staticmethod
    def following(first: Path, number: int) -> Path:
        """Return the event file number `number` of a process; `first` is number 1."""
        return first if number == 1 else first.with_name(f"{first.stem}.{number}.jsonl")

    @staticmethod
    def process_of(name: str) -> str:
        """Return the name of the process that writes an event file of this name."""
        return name.partition(".")[0]

    @staticmethod
    def agents_pattern() -> str:
        """Return a pattern for the names of the event files of all groups' agents."""
        return "supervisor-*.jsonl"

    def launcher_events(self, pid: int) -> Path:
        return self.events_file(f"launcher-{pid}")

    def lighthouse_events(self, host: str, pid: int) -> Path:
        """Event file of a lighthouse. Lighthouses of two hosts may have the same process id."""
        return self.events_file(f"lighthouse-{host}-{pid}")

    @staticmethod
    def workers_pattern(
        replica: int | None = None,
        attempt: int | Literal["*"] | None = None,
        rank: int | None = None,
    ) -> str:
        """Return a pattern for the names of the workers' event files.

        Args:
            replica: slot of the group; None: the workers of all groups, and of all attempts.
            attempt: number of the attempt; "*": all attempts.
            rank: rank of the group; None: all ranks.
        """
        if replica is None:
            return "replica-*.jsonl"
        ranks = "*" if rank is None else str(rank)
        return f"replica-{replica}-rank-{ranks}-attempt-{attempt}-*.jsonl"

    @staticmethod
    def group_patterns(replica: int) -> tuple[str, ...]:
        """Return patterns for the names of a group's event files: workers, then agents."""
        return f"replica-{replica}-rank-*.jsonl", f"supervisor-{replica}-*.jsonl"

    def has_events(self) -> bool:
        """Return True if a process has written an event. A refused launch leaves empty files
        only."""
        return any(path.stat().st_size > 0 for path in self.events.glob("*.jsonl"))

    def has_checkpoint(self) -> bool:
        """Return True if the folder has a checkpoint. Only the workers check whether it is
        whole."""
        return any(self.checkpoint.glob("step-*"))

    def next_attempt(self, replica: int) -> int:
        """Return the first attempt number of a group that has no logs and no events yet."""
        group_logs = self.logs(replica, 0, 0).parents[1]
        logs = [path.name for path in group_logs.glob("attempt-*")]
        events = [path.name for path in self.events.glob(self.workers_pattern(replica, "*"))]
        number = 0
        for name in logs + events:
            match = re.search(r"attempt-(\d+)", name)
            if match:
                number = max(number, int(match[1]) + 1)
        return number
