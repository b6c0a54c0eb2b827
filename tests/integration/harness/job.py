# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A job of several replica groups on this host: a lighthouse and groups of workers, restarted as an
agent would.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.client import REPOSITORY, Process, ZygoteClient
from harness.events import Event, read
from titan_ft.run.paths import RunPaths

CONFIG = REPOSITORY / "configs" / "llama3_debug.toml"
TINY = (
    "--model.flavor=tiny",  # see harness.flavor
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--fault_tolerance.bucket_size_mb=0.1",  # several buckets even so
    "--fault_tolerance.digest_every=1",
)
CONSTANTS = {
    # Each worker reads five times as many batches before its first step: a fifth of the CPU that a
    # short job takes.
    "titan_ft.training.loader_check._MOST": 8,
}
# Between the groups of all jobs where torch's CUDA build runs (scripts/test_cuda.sh): "nccl" or
# "gloo".
PROCESS_GROUP = os.environ.get("TITAN_FT_TEST_PROCESS_GROUP", "")
TOKEN = "a secret of this run"
_NEVER_RESTARTED = (2, 3)  # exit statuses that say so, see titan_ft.train


class Group:
    """The workers of one replica group. One start of all of them is an attempt."""

    def __init__(self, replica: int, ranks: int) -> None:
        self.replica, self.num_ranks = replica, ranks
        self.attempt = -1
        self.workers: list[Process] = []
        self.ended: list[list[int]] = []  # exit statuses of the attempts before
        self.store: Process | None = None
        self.stopping_since: float | None = None

    @property
    def failed(self) -> bool:
        """Say whether a worker of this attempt failed."""
        return any(worker.code not in (None, 0) for worker in self.workers)

    @property
    def gone(self) -> bool:
        """Say whether all workers of this attempt have ended."""
        return not any(worker.running for worker in self.workers)

    @property
    def finished(self) -> bool:
        return bool(self.workers) and all(worker.code == 0 for worker in self.workers)


class Job:
    """Starts a job and supervises it.

    Args:
        folder: for all files of the job.
        groups, ranks: number of replica groups, and of ranks in each.
        replica_ranks: number of ranks of single groups, if it differs.
        flags: torchtitan flags that override `CONFIG`, after `TINY` if `tiny`.
        replica_flags: further flags of single groups; `{rank}` in a flag stands for the rank's
            number.
        hooks: settings of `harness.hooks` for every worker.
        max_restarts: restarts of each group after failures.
        late: whether a restart waits until the other groups made `hold` steps without the group
            (see `harness.hooks`) or finished. If False, the group may return before the lighthouse
            notices its absence.
        lighthouse: settings of the lighthouse that differ from its defaults.
        env: further environment variables of the workers.
        grace_seconds: time between SIGTERM and SIGKILL for a worker.
        heartbeat_timeout_ms: for the workers and the lighthouse; 0 takes their default. A test
            which requires that no step is repeated needs a long one: with the default, a machine
            that pauses for half a second is a failure.
    """

    def __init__(
        self,
        zygote: ZygoteClient,
        folder: Path,
        *,
        groups: int,
        ranks: int = 1,
        steps: int = 16,
        flags: Sequence[str] = (),
        replica_flags: Mapping[int, Sequence[str]] | None = None,
        replica_ranks: Mapping[int, int] | None = None,
        tiny: bool = True,
        hooks: Mapping[str, Any] | None = None,
        max_restarts: int = 3,
        late: bool = True,
        lighthouse: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 2.0,
        heartbeat_timeout_ms: int = 0,
    ) -> None:
        self.paths = RunPaths(folder / "run")
        self.markers = folder / "markers"
        self.markers.mkdir(parents=True)
        self.groups = [
            Group(replica, (replica_ranks or {}).get(replica, ranks)) for replica in range(groups)
        ]
        self.steps = steps
        self._max_restarts, self._late, self._grace_seconds = max_restarts, late, grace_seconds
        self._zygote = zygote
        self._replica_flags = dict(replica_flags or {})
        self._hooks = {
            **(hooks or {}),
            "constants": {**CONSTANTS, **(hooks or {}).get("constants", {})},
        }
        self.env = dict(env or {})
        self.flags = [
            f"--job.config_file={CONFIG}",
            f"--job.dump_folder={self.paths.root}",
            f"--training.steps={steps}",
            "--metrics.no-enable-tensorboard",
            "--experimental.custom_import=harness.hooks",
            f"--fault_tolerance.group_size={groups}",
            *(TINY if tiny else ()),
            *([f"--fault_tolerance.process_group={PROCESS_GROUP}"] if PROCESS_GROUP else []),
            *flags,
        ]
        settings = {"run_dir": str(self.paths.root), **(lighthouse or {})}
        if heartbeat_timeout_ms:
            self.flags.append(f"--fault_tolerance.heartbeat_timeout_ms={heartbeat_timeout_ms}")
            settings["heartbeat_timeout_ms"] = heartbeat_timeout_ms
        self._lighthouse_settings = json.dumps(settings)
        self._lighthouse: Process | None = None
        self._num_lighthouses = 0
        self._address = ""

    # What a test does with it

    def run(self, seconds: float = 60) -> None:
        """Start the job and wait until every group has ended for good."""
        self.start()
        self.finish(seconds)

    def finish(self, seconds: float = 60) -> None:
        """Wait until every group has ended for good."""
        self.wait_until(
            lambda: all(map(self._is_over, self.groups)), seconds, "every group has ended"
        )

    def start(self, absent: Collection[int] = ()) -> None:
        """Start the lighthouse and all groups except `absent` ones, which `start_again` starts
        later.
        """
        self._start_lighthouse("127.0.0.1:0")
        for group in self.groups:
            if group.replica not in absent:
                self._start_group(group)

    def send_signal(self, replica: int, signum: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank of a group, or to all."""
        workers = self.groups[replica].workers
        for worker in workers if rank is None else [workers[rank]]:
            self._zygote.signal(worker, signum)

    def mark(self, name: str) -> None:
        """Leave a mark for the workers' hooks; opens the gate of that name."""
        (self.markers / name).touch()

    def wait_for_gate(
        self, name: str, replica: int, ranks: Sequence[int] = (0,), attempt: int = 0
    ) -> None:
        """Wait until these ranks of a group have reached a gate (see `harness.hooks`)."""
        marks = [self.markers / f"reached-{name}-{replica}-{attempt}-{rank}" for rank in ranks]
        self.wait_until(
            lambda: all(mark.exists() for mark in marks), 60, f"group {replica} reached gate {name}"
        )

    def wait_for_end(self, replica: int) -> list[int | None]:
        """Wait until all ranks of a group have ended; returns their exit statuses."""
        group = self.groups[replica]
        self.wait_until(lambda: group.gone, 30, f"group {replica} has ended")
        return [worker.code for worker in group.workers]

    def start_again(self, replica: int) -> None:
        """Start a group that left, that has no restarts left, or that was absent from the start."""
        assert self.groups[replica].gone
        self._end_attempt(self.groups[replica])
        self._start_group(self.groups[replica])

    def wait_until(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Supervise the job until `condition` is true. Fail with the workers' stacks and logs after
        `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                self._fail(f"not within {seconds:g} s: {what}")
            self._zygote.poll()
            for group in self.groups:
                self._watch(group)
        return value

    def events(self, *names: str) -> list[Event]:
        """Return the events of the run so far; with `names`, only the events of these names."""
        events = read(self.paths.events)
        return [event for event in events if event["event"] in names] if names else events

    def output(self, replica: int, rank: int = 0, attempt: int = 0) -> str:
        """Return the output of a worker."""
        path = self.paths.logs(replica, attempt, rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Kill all processes that still run."""
        processes = [worker for group in self.groups for worker in (*group.workers, group.store)]
        for process in (*processes, self._lighthouse):
            if process is not None:
                self._zygote.signal(process, signal.SIGKILL)

    def _start_lighthouse(self, bind: str) -> None:
        self._num_lighthouses += 1
        log = self.paths.root / f"lighthouse-{self._num_lighthouses}.log"
        self._lighthouse = self._zygote.start(
            "harness.zygote:lighthouse",
            log,
            [bind, self._lighthouse_settings],
            {"TITAN_FT_TOKEN": TOKEN},
        )
        self._address = self._announced(self._lighthouse, "lighthouse listening at ")

    # The agent of each group

    def _start_group(self, group: Group) -> None:
        group.attempt += 1
        group.stopping_since = None
        folder = self.paths.logs(group.replica, group.attempt, 0).parent
        group.store = self._zygote.start("harness.zygote:store", folder / "store.log")
        port = self._announced(group.store, "store listening at ")
        group.workers = []
        for rank in range(group.num_ranks):
            hooks = {
                **self._hooks,
                "replica": group.replica,
                "rank": rank,
                "attempt": group.attempt,
                "markers": str(self.markers),
            }
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(group.num_ranks),
                "LOCAL_WORLD_SIZE": str(group.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(group.attempt),
                "TITAN_FT_ATTEMPT": str(group.attempt),
                "TITAN_FT_TOKEN": TOKEN,
                "TORCHFT_LIGHTHOUSE": self._address,
                "TITAN_FT_TEST_HOOKS": json.dumps(hooks),
                **self.env,
            }
            flags = [
                flag.replace("{rank}", str(rank))
                for flag in self._replica_flags.get(group.replica, ())
            ]
            argv = [*self.flags, *flags, f"--fault_tolerance.replica_id={group.replica}"]
            log = self.paths.logs(group.replica, group.attempt, rank)
            group.workers.append(self._zygote.start("titan_ft.train:main", log, argv, env))

    def _watch(self, group: Group) -> None:
        """Restart a group as the agent does: the failure of one worker ends the group first."""
        if not group.failed:
            return
        if not group.gone:
            if group.stopping_since is None:
                group.stopping_since = time.monotonic()
                self._signal(group, signal.SIGTERM)
            elif time.monotonic() > group.stopping_since + self._grace_seconds:
                self._signal(group, signal.SIGKILL)
            return
        self._end_attempt(group)
        if self._restarts(group) and (not self._late or self._is_missed(group)):
            self._start_group(group)

    def _end_attempt(self, group: Group) -> None:
        if len(group.ended) == group.attempt:
            group.ended.append([worker.code for worker in group.workers if worker.code is not None])
            if group.store is not None:
                self._zygote.signal(group.store, signal.SIGKILL)

    def _restarts(self, group: Group) -> bool:
        final = any(worker.code in _NEVER_RESTARTED for worker in group.workers)
        return group.attempt < self._max_restarts and not final

    def _is_missed(self, group: Group) -> bool:
        """True if another group waits for this one, in training or at the end, or if no group has
        the job's state.
        """
        waiting = self.markers.glob(f"waiting-{group.replica}-{group.attempt}-*")
        holders = [
            other
            for other in self.groups
            if not other.failed
            and (self.markers / f"trained-{other.replica}-{other.attempt}").exists()
        ]
        return not holders or any(waiting) or any(self.markers.glob("finishing-*"))

    def _is_over(self, group: Group) -> bool:
        return group.finished or (group.failed and group.gone and not self._restarts(group))

    def _signal(self, group: Group, signum: signal.Signals) -> None:
        for worker in group.workers:
            self._zygote.signal(worker, signum)

    def _announced(self, process: Process, text: str) -> str:
        def find() -> str | None:
            lines = [
                line for line in process.output().splitlines(keepends=True) if line.endswith("\n")
            ]
            return next(
                (line.strip().removeprefix(text) for line in lines if line.startswith(text)), None
            )

        found: str = self._zygote.wait_until(find, 30, f"{text!r} in {process.log}")
        return found

    def _fail(self, reason: str) -> None:
        for group in self.groups:
            self._signal(group, signal.SIGUSR1)  # prints the stacks of all threads
        until = time.monotonic() + 1
        while time.monotonic() < until:
            self._zygote.poll()
        logs = sorted(self.paths.root.glob("logs/*/*/rank-*.log"))
        tails = "\n".join(
            f"--- {path}\n{path.read_text(errors='replace')[-4000:]}" for path in logs
        )
        pytest.fail(f"{reason}\n{tails}")
