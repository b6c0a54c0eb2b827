# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Own every path of a run."""

from __future__ import annotations

from pathlib import Path

JOB_CURVE = "job"
"""Folder of the job's curves, beside those of its groups in TensorBoard's folder."""


class RunPaths:
    """Name the files and folders of one run directory; create none of them.

    Args:
        root: the run directory (torchtitan's job.dump_folder).
        events: name of the event folder below it (fault_tolerance.events_folder).
    """

    def __init__(self, root: Path | str, events: str = "events") -> None:
        self.root = Path(root)
        self._events = events

    @property
    def config(self) -> Path:
        """The TOML that the workers read."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """Folder of the event files, one per process."""
        return self.root / self._events

    @property
    def job_curve(self) -> Path:
        """Folder of the job's curves for TensorBoard, where its folder has the usual name."""
        return self.root / "tb" / JOB_CURVE

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def chaos_orders(self) -> Path:
        """What the agents in the workers are told to do to them, one order a line."""
        return self.root / "chaos" / "orders.jsonl"

    @property
    def lighthouse_log(self) -> Path:
        return self.root / "logs" / "lighthouse.log"

    def spare_log(self, spare: int) -> Path:
        """Output of the supervisor of one spare group, whatever group it takes over."""
        return self.root / "logs" / f"spare-{spare}.log"

    def supervisor_log(self, replica: int) -> Path:
        """Output of the supervisor of one group (not of its workers)."""
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

    def supervisor_events(self, replica: int, pid: int) -> Path:
        return self.events_file(f"supervisor-{replica}-{pid}")

    def launcher_events(self, pid: int) -> Path:
        return self.events_file(f"launcher-{pid}")

    @staticmethod
    def workers_pattern(replica: int | None = None, attempt: int | None = None, rank: int | None = None) -> str:
        """Return a pattern for the names of the workers' event files: of all, or of one attempt of a group.

        Args:
            rank: of the group; None stands for all of them.
        """
        if replica is None:
            return "replica-*.jsonl"
        return f"replica-{replica}-rank-{'*' if rank is None else rank}-attempt-{attempt}-*.jsonl"

    def has_events(self) -> bool:
        """Tell whether some process wrote an event; a launch that is refused leaves an empty file at most."""
        return any(path.stat().st_size > 0 for path in self.events.glob("*.jsonl"))

    def has_checkpoint(self) -> bool:
        """Tell whether a checkpoint was begun; whether one is whole is for the workers to find out."""
        return any(self.checkpoint.glob("step-*"))

    def next_attempt(self, replica: int) -> int:
        """Return the first attempt number of a group that nothing in the folder belongs to."""
        folders = self.logs(replica, 0, 0).parents[1].glob("attempt-*")
        numbers = [folder.name.removeprefix("attempt-") for folder in folders]
        return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)
