# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrun for a replica group on a cluster: `python -m titan_ft.launch.torchrun`, with torchrun's own command line.

torchrun restarts workers whatever ended them. Here its agent restarts them by the rules of `restart_policy`, as the
supervisor of `titan-ft launch` does: not where the config is wrong or the group must not come back, not in a crash
loop, and --max-restarts counts the last 24 hours only. Ends and restarts are in the run's events.

The agent of each node judges the workers of its node. One that gives up closes the group's rendezvous, so that the
agents of its other nodes end as well, when they want to restart.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher import api

from titan_ft.config import TABLE, FaultTolerance, load_toml, read_flags
from titan_ft.launch.restart_policy import AttemptEnd, AttemptEvents, RestartPolicy, exit_status
from titan_ft.launch.supervisor import root_failure
from titan_ft.launch.worker_group import WorkerExit
from titan_ft.run.error_file import read_error
from titan_ft.run.events import ReplicaGaveUp, ReplicaRestarted
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths

UNLIMITED = 1_000_000
"""Restarts that torchrun itself may make: the policy counts them."""
NO_LOG = "the output of torchrun"


class GroupAgent(LocalElasticAgent):
    """torchrun's agent of one node, restarting by the policy."""

    status = 1
    """Exit status of this process where workers failed for good."""

    def __init__(self, spec: WorkerSpec, *args: Any, **settings: Any) -> None:
        self._policy = RestartPolicy(spec.max_restarts)
        spec.max_restarts = UNLIMITED
        super().__init__(spec, *args, **settings)
        self._paths, self._replica = _run_of([str(arg) for arg in spec.args])
        file = None if self._paths is None else self._paths.supervisor_events(self._replica, os.getpid())
        self._events = EventLog(file, replica=self._replica)
        self._started = 0.0
        self._restarted_because = ""
        """Why the workers are started again; empty at their first start, and where nodes come or go."""

    @property
    def _attempt(self) -> int:
        """Which start of the workers this is, as torchrun tells them."""
        return UNLIMITED - int(self._remaining_restarts)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node: Any = worker_group.group_rank
        if self._started and node == 0:  # of all nodes of the group one tells
            reason = self._restarted_because or "its nodes have changed, or workers failed on another one"
            self._events.emit(ReplicaRestarted(attempt=self._attempt, reason=reason, standby=False))
        self._started, self._restarted_because = time.monotonic(), ""
        return dict(super()._start_workers(worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Looked at before torchrun does: where one has failed it ends the others, and tells of all of them alike.
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        ended = {handler.proc.pid for handler in handlers if handler.proc.poll() is not None}
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and result.failures:
            self._judge(result, ended)
        return result

    def _judge(self, result: RunResult, ended: set[int]) -> None:
        """Let torchrun restart the workers when it is time, or keep it from that.

        Args:
            ended: processes that ended by themselves.
        """
        exits = [
            WorkerExit(rank, failure.pid, failure.exitcode, read_error(Path(failure.error_file)))
            for rank, failure in result.failures.items()
        ]
        first = root_failure([exit for exit in exits if exit.pid in ended]) or root_failure(exits)
        assert first is not None, "torchrun says that a worker failed"
        told = self._look_back(first.rank)
        committed, disturbed = (told.committed, told.disturbed) if told else (False, False)
        for exit in sorted(exits, key=lambda exit: exit is not first):
            why = "" if exit.pid in {first.pid, *ended} else first.describe()
            self._events.emit(exit.event(self._attempt, why, disturbed=disturbed, log=None))
        alive = time.monotonic() - self._started
        delay = self._policy.decide(AttemptEnd(first.code, alive, committed, first.error, disturbed))
        if isinstance(delay, float):
            self._restarted_because = first.describe()
            time.sleep(delay)
            return
        self._remaining_restarts, attempt = 0, self._attempt
        GroupAgent.status = exit_status(first.code)
        text = "see its output" if first.error is None else first.error.text
        reason = f"{first.describe()}; {delay}"
        self._events.emit(ReplicaGaveUp(attempt=attempt, rank=first.rank, reason=reason, log=NO_LOG, error=text))
        print(f"titan_ft: replica {self._replica}: {reason}; {text}", file=sys.stderr, flush=True)

    def _look_back(self, rank: int) -> AttemptEvents | None:
        """Return what this rank has announced of the attempt; None where it writes no events."""
        if self._paths is None:
            return None
        told = AttemptEvents(self._paths.events, self._paths.workers_pattern(self._replica, self._attempt, rank))
        told.poll()
        return told


def _run_of(worker_args: list[str]) -> tuple[RunPaths | None, int]:
    """Return the run and the group that a worker's command line names; None where it names no folder."""
    flags = dict(read_flags(worker_args))
    folder, replica = flags.get("job.dump_folder"), flags.get(f"{TABLE}.replica_id", "")
    if folder is None or not replica.isdigit():
        return None, 0
    table = load_toml(flags["job.config_file"]).get(TABLE, {}) if "job.config_file" in flags else {}
    events = flags.get(f"{TABLE}.events_folder", table.get("events_folder", FaultTolerance.events_folder))
    return RunPaths(folder, str(events)), int(replica)


def main() -> int:
    """Return 0 when the workers finished, 2 or 3 (see `restart_policy`) as a worker did, else 1."""
    api.LocalElasticAgent = GroupAgent  # type: ignore[attr-defined] # what `launch_agent` makes
    try:
        torch_run.run(torch_run.parse_args(sys.argv[1:]))
    except ChildFailedError:
        return GroupAgent.status  # told by the agent
    except RendezvousClosedError:
        print("titan_ft: another node of this replica group has given up; see its output", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
