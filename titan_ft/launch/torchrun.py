# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrun for a replica group on a cluster: `python -m titan_ft.launch.torchrun`, with torchrun's own command line.

torchrun restarts workers whatever ended them. Here its agent restarts them by the rules of `restart_policy`, as the
supervisor of `titan-ft launch` does: not where the config is wrong or the group must not come back, not in a crash
loop, and --max-restarts counts the last 24 hours only. Ends and restarts are in the run's events.

Workers that run `titan_ft.train` are forks of a process of the node that has imported everything (`zygote`), so that a
restart takes no imports. With TITAN_FT_ZYGOTE=0, and where no fork can be made, they are new processes, as torchrun
starts them; with TITAN_FT_ZYGOTE=1 those of other modules are forks, too.

The agent of each node judges the workers of its node. One that gives up closes the group's rendezvous, so that the
agents of its other nodes end as well, when they want to restart.
"""

from __future__ import annotations

import signal

# A Ctrl-C among the imports, which take seconds, was a traceback of torch's. A job in a shell's background ignores it.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # exported at run time
from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher import api

from titan_ft.config import TABLE, ConfigError, FaultTolerance, load_toml, read_flags
from titan_ft.launch.restart_policy import (
    CONFIG,
    CONFIG_ERROR_CODE,
    HOST,
    HOST_SUSPECTED_CODE,
    AttemptEnd,
    AttemptEvents,
    GiveUp,
    RestartPolicy,
    exit_status,
    has_trained,
)
from titan_ft.launch.supervisor import DEFAULT_MODULE, GRACE_SECONDS, root_failure
from titan_ft.launch.suspect import HostDeaths, SuspectPolicy
from titan_ft.launch.worker_group import ENDED_EARLY, WorkerExit
from titan_ft.launch.zygote import Zygote, is_possible
from titan_ft.live.group_metrics import PORT_ENV, GroupMetrics
from titan_ft.live.metrics import split_address
from titan_ft.run.appender import retry_waiting
from titan_ft.run.error_file import read_error
from titan_ft.run.events import HostLeft, ReplicaGaveUp, ReplicaRestarted
from titan_ft.run.log import EventLog
from titan_ft.run.marks import remove_training_mark
from titan_ft.run.orphan import PARENT_PID_ENV
from titan_ft.run.output import protect_output
from titan_ft.run.paths import RunPaths
from titan_ft.run.process import node_name

UNLIMITED = 1_000_000
"""Restarts that torchrun itself may make: the policy counts them."""
NO_LOG = "the output of torchrun"
ZYGOTE_ENV = "TITAN_FT_ZYGOTE"
"""0: every worker is a new process, which imports everything itself; 1: of a module other than ours is a fork, too.

Such a module must bear to be imported before it is run, once, for all ranks.
"""
_PLAIN = "workers import everything themselves from now on"
_ATTEMPT_KEY = "titan_ft/attempt"  # in the store of a rendezvous


class GroupAgent(LocalElasticAgent):
    """torchrun's agent of one node, restarting by the policy."""

    status = 1
    """Exit status of this process where workers failed for good."""

    def __init__(self, spec: WorkerSpec, *args: Any, **settings: Any) -> None:
        self._suspects, self._host = SuspectPolicy.of(os.environ), node_name()
        self._policy = RestartPolicy(
            spec.max_restarts,
            run_trains=self._run_trains,
            host_deaths=self._suspects.deaths,
        )
        spec.max_restarts = UNLIMITED
        super().__init__(spec, *args, **settings)
        worker_args = [str(arg) for arg in spec.args]
        # torchrun kills workers 30 s after it has told them to leave: in the midst of a save, perhaps, for which
        # they have drain_timeout_seconds. They end by themselves when that is over.
        self._shutdown_timeout = max(self._shutdown_timeout, math.ceil(_drain_seconds(worker_args) + GRACE_SECONDS))
        self._paths, self._replica = _run_of(worker_args)
        file = None if self._paths is None else self._paths.supervisor_events(self._replica, os.getpid())
        self._events = EventLog(file, replica=self._replica)
        self._zygotes = _Zygotes([str(word) for word in (spec.entrypoint, *spec.args)], self._say)
        self._metrics: GroupMetrics | None = None
        self._deaths = None
        if self._paths is not None and self._suspects.deaths:
            pattern, window = self._paths.supervisors_pattern(), self._suspects.window_seconds
            self._deaths = HostDeaths(self._paths.events, pattern, self._host, window)
        self._started = 0.0
        self._attempt = -1
        """How often the group was started before, as node 0 counts; what torchrun counts begins anew with its agent."""
        self._restarted_because = ""
        """Why the workers are started again; empty at their first start, and where nodes come or go."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the group to its end, as torchrun's agent does."""
        # As torchrun does when it starts workers; here that is after the imports.
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
            signum = getattr(signal, name.strip(), None)
            if signum is not None and signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, elastic_processes._terminate_process_handler)
        try:
            return super().run(role)
        finally:
            self._zygotes.close()

    def _count_attempt(self, node: int, store: Store) -> int:
        """Return how often the group was started before, the same on all of its nodes.

        A node whose workers did not fail counts no restart, and an agent that Slurm has requeued none at all: the ranks
        of a group would take each other for other attempts, and a restarted group itself for one that never was.

        Args:
            store: of this rendezvous.
        """
        if node > 0:
            return int(store.get(_ATTEMPT_KEY))
        number = self._attempt + 1
        if number == 0:
            requeued = os.environ.get("SLURM_RESTART_COUNT", "")
            known = 0 if self._paths is None else self._paths.next_attempt(self._replica)
            number = max(known, int(requeued) if requeued.isdigit() else 0)
        store.set(_ATTEMPT_KEY, str(number))
        return number

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node: Any = worker_group.group_rank
        store: Any = worker_group.store  # set by the rendezvous, which has just been
        self._attempt = self._count_attempt(node, store)
        os.environ["TITAN_FT_ATTEMPT"] = str(self._attempt)
        forks = self._zygotes.wait()
        if self._zygotes.mistake:
            self._refuse(self._zygotes.mistake)
        if node == 0:  # of all nodes of the group one tells
            self._serve_metrics()
        if self._attempt > 0 and node == 0:
            reason = self._restarted_because
            if not reason and self._started:
                reason = "its nodes have changed, or workers failed on another one"
            elif not reason:
                reason = "Slurm requeued it" if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else "started by hand"
            self._events.emit(ReplicaRestarted(attempt=self._attempt, reason=reason, standby=forks))
        self._started, self._restarted_because = time.monotonic(), ""
        handler = functools.partial(_Worker, self._zygotes, f"titan-ft {self._replica}")
        elastic_processes.get_subprocess_handler = handler  # type: ignore[attr-defined] # is called for each worker
        return dict(super()._start_workers(worker_group))

    def _refuse(self, mistake: str) -> None:
        """End this agent for a mistake in the config, before any worker is started. Those of other nodes find it too.

        Raises:
            SystemExit: always.
        """
        self._events.emit(
            ReplicaGaveUp(
                attempt=self._attempt,
                rank=0,
                cause=CONFIG,
                reason="the configuration is wrong",
                log=NO_LOG,
                error=f"ConfigError: {mistake}",
            )
        )
        print(f"titan_ft: {mistake}", file=sys.stderr, flush=True)
        raise SystemExit(CONFIG_ERROR_CODE)

    def _say(self, text: str) -> None:
        print(f"titan_ft: group {self._replica}: {text}", file=sys.stderr, flush=True)

    def _serve_metrics(self) -> None:
        """Serve the group's figures from now on, if that is asked for; training goes on without where it fails."""
        place = os.environ.get(PORT_ENV, "")
        if not place or self._metrics or self._paths is None:
            return
        try:
            self._metrics = GroupMetrics(place, self._paths, self._replica)
            self._say(f"metrics at {self._metrics.url}")
        except ConfigError as error:
            print(f"titan_ft: group {self._replica} serves no metrics: {error}", file=sys.stderr, flush=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        retry_waiting()
        # Looked at before torchrun does: where one has failed it ends the others, and tells of all of them alike.
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        ended = {handler.proc.pid for handler in handlers if handler.proc.poll() is not None}
        self._find_early_ends()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:  # one may have ended between the two looks
            result = self._fail_early_ends(worker_group, result)
        if result.state == WorkerState.FAILED and result.failures:
            self._judge(result, ended)
        return result

    def _find_early_ends(self) -> None:
        """Let workers that ended with status 0 in mid-training be failures to torchrun, which ends the others then."""
        processes: Any = self._pcontext
        for local_rank, handler in getattr(processes, "subprocess_handlers", {}).items():
            code, file = handler.proc.poll(), processes.error_files[local_rank]
            if code == 0 and remove_training_mark(Path(file)):
                processes._failures[local_rank] = ProcessFailure(local_rank, handler.proc.pid, code, file)

    def _fail_early_ends(self, worker_group: WorkerGroup, result: RunResult) -> RunResult:
        """Return a failure if a worker has the mark that it trains, though all have ended with status 0."""
        processes: Any = self._pcontext
        failures = {}
        for local_rank, file in processes.error_files.items():
            if remove_training_mark(Path(file)):
                worker = worker_group.workers[local_rank]
                failures[worker.global_rank] = ProcessFailure(local_rank, worker.id, 0, file)
        return RunResult(WorkerState.FAILED, failures=failures) if failures else result

    def _judge(self, result: RunResult, ended: set[int]) -> None:
        """Let torchrun restart the workers when it is time, or keep it from that.

        Args:
            ended: processes that ended by themselves.
        """
        exits = []
        for rank, failure in result.failures.items():
            error = read_error(Path(failure.error_file)) if failure.exitcode else ENDED_EARLY
            exits.append(WorkerExit(rank, failure.pid, failure.exitcode, error))
        first = root_failure([exit for exit in exits if exit.pid in ended]) or root_failure(exits)
        assert first is not None, "torchrun says that a worker failed"
        end = self._describe_end(first)
        for exit in sorted(exits, key=lambda exit: exit is not first):
            why = "" if exit.pid in {first.pid, *ended} else first.describe()
            self._events.emit(exit.event(self._attempt, why, disturbed=end.disturbed, log=None))
        decision = self._policy.decide(end)
        status = exit_status(first.code)
        if isinstance(decision, float) and (suspicion := self._suspect()):
            decision, status = GiveUp(HOST, suspicion), HOST_SUSPECTED_CODE
        if isinstance(decision, float):
            self._restarted_because = first.describe()
            time.sleep(decision)
            return
        self._remaining_restarts, attempt = 0, self._attempt
        GroupAgent.status = status
        text = "see its output" if first.error is None or first.is_early else first.error.text
        reason = f"{first.describe()}; {decision.reason}"
        self._events.emit(
            ReplicaGaveUp(
                attempt=attempt,
                rank=first.rank,
                cause=decision.cause,
                reason=reason,
                log=NO_LOG,
                error=text,
            )
        )
        self._say(f"{reason}; {text}")

    def _describe_end(self, first: WorkerExit) -> AttemptEnd:
        """Return how the attempt has ended, by the worker that was the cause."""
        alive = time.monotonic() - self._started
        told = self._look_back(first.rank)
        if told is None:
            # Workers that write no events say nothing of their steps. Three crashes in a month would end them.
            return AttemptEnd(first.code, alive, alive >= self._policy.healthy_seconds, first.error)
        return AttemptEnd(first.code, alive, told.committed, first.error, told.disturbed, told.step)

    def _run_trains(self) -> bool:
        """Tell whether the run has made a step; one that writes no events may have."""
        return self._paths is None or has_trained(self._paths)

    def _suspect(self) -> str:
        """Return why this host is suspected, after whoever is to know was told; nothing if it is not."""
        deaths = 0 if self._deaths is None else self._deaths.count()
        if deaths < self._suspects.deaths or not deaths:
            return ""
        seconds = self._suspects.window_seconds
        reason = (
            f"{deaths} deaths of workers on host {self._host} within {seconds:g} s: the group is to go on elsewhere"
        )
        self._events.emit(HostLeft(attempt=self._attempt, host=self._host, deaths=deaths, reason=reason))
        self._suspects.act(self._host, reason)
        return reason

    def _look_back(self, rank: int) -> AttemptEvents | None:
        """Return what this rank has announced of the attempt; None where it writes no events."""
        if self._paths is None:
            return None
        told = AttemptEvents(self._paths.events, self._paths.workers_pattern(self._replica, self._attempt, rank))
        told.poll()
        return told


class _Zygotes:
    """The zygote of this node, and after its death another one; none where no fork can be made.

    Args:
        command: that of a worker.
        say: prints a line.
    """

    def __init__(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._say = say
        wish, preloaded = os.environ.get(ZYGOTE_ENV, ""), _module_of(command)
        bears_it = preloaded is not None and (preloaded[0] == DEFAULT_MODULE or wish == "1")
        self._preloaded = preloaded if bears_it and wish != "0" and is_possible() else None
        """What is imported beforehand, and its command line; None: there is to be no zygote (any more)."""
        self._zygote: Zygote | None = None
        self.mistake = ""
        """The mistake in the config that a zygote has found; empty without one."""
        self._start()  # it imports while the nodes meet

    def wait(self) -> bool:
        """Say, when all is imported, whether workers can be forked; where there is no zygote any more, of a new one."""
        self._judge()
        self._start()
        able = self._zygote is not None and self._zygote.wait()
        self._judge()
        return able

    def fork(self, args: Sequence[str], env: Mapping[str, str], output: tuple[int, int], title: str) -> Any:
        """Fork a worker; None if that is not possible."""
        preloaded = _module_of(args)
        if self._zygote is None or preloaded is None:
            return None
        return self._zygote.fork(*preloaded, env, output, title)

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()

    def _start(self) -> None:
        if self._preloaded is not None and self._zygote is None:
            try:
                self._zygote = Zygote(_start_zygote, *self._preloaded)
            except OSError as error:
                self._say(f"no zygote can be started ({error.strerror}); workers import everything themselves")

    def _judge(self) -> None:
        """Let go of one that is lost; one that was lost before it could fork is the last."""
        if self._zygote is None:
            return
        self._zygote.poll()
        if self._zygote.mistake:
            self.mistake, self._zygote, self._preloaded = self._zygote.mistake, None, None
        elif self._zygote.lost:
            again = self._zygote.ready
            self._say(f"{self._zygote.lost}; {'another one is started' if again else _PLAIN}")
            self._zygote = None
            if not again:
                self._preloaded = None


class _Worker(SubprocessHandler):
    """A worker as torchrun keeps it; its process is a fork of the zygote, if there is one.

    Args:
        title: what its process is called in `ps`, before its rank.
    """

    def __init__(self, zygotes: _Zygotes, title: str, **settings: Any) -> None:
        self._zygotes, self._title = zygotes, title
        super().__init__(**settings)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        env.pop(PARENT_PID_ENV, None)
        if (_module_of(args) or ("",))[0] == DEFAULT_MODULE:  # else a worker of ours may be a child of this process
            env[PARENT_PID_ENV] = str(os.getpid())
        files = (self._stdout or sys.stdout).fileno(), (self._stderr or sys.stderr).fileno()
        forked = self._zygotes.fork(args, env, files, f"{self._title}.{env['RANK']}")
        return forked or super()._popen(args, env)


def _start_zygote(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", PARENT_PID_ENV: str(os.getpid())}  # the first as by torchrun's -u
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdin=nothing, pass_fds=[descriptor], start_new_session=True)


def _module_of(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the module that a worker's command runs, and its command line; None where it runs something else."""
    match list(command):
        case [sys.executable, "-u", "-m", module, *args]:
            return module, args
    return None


def _run_of(worker_args: list[str]) -> tuple[RunPaths | None, int]:
    """Return the run and the group that a worker's command line names; None where it names none."""
    flags = dict(read_flags(worker_args))
    folder, replica = flags.get("job.dump_folder"), flags.get(f"{TABLE}.replica_id", "")
    if folder is None or not replica.isdigit():
        return None, 0
    return RunPaths(folder), int(replica)


def _drain_seconds(worker_args: list[str]) -> float:
    """Return how long the workers may take to leave; what is no number is for them to refuse."""
    usual = FaultTolerance.drain_timeout_seconds
    try:
        seconds = float(_setting(dict(read_flags(worker_args)), "drain_timeout_seconds", usual))
    except (TypeError, ValueError, ConfigError):
        return usual
    return seconds if math.isfinite(seconds) else usual


def _setting(flags: Mapping[str, str], name: str, usual: Any) -> Any:
    """Return a field of the [fault_tolerance] table: a worker's flag for it wins over its TOML."""
    table = load_toml(flags["job.config_file"]).get(TABLE, {}) if "job.config_file" in flags else {}
    return flags.get(f"{TABLE}.{name}", table.get(name, usual))


def main() -> int:
    """Run torchrun with the agent of this module.

    Returns:
        0 when the workers finished, 2 or 3 as a worker did, 4 on a suspected host (`restart_policy`), 130 after Ctrl-C,
        else 1. So also after SIGTERM: Kubernetes would take a pod that ends with 0 for a group that has finished, and
        Slurm's script would requeue a job that the user cancelled for a status above 128.
    """
    protect_output()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as who started this may leave it, no worker's end is seen
    try:
        split_address(os.environ.get(PORT_ENV, "0") or "0")
        SuspectPolicy.of(os.environ)
    except ConfigError as error:
        print(f"titan_ft: {error}", file=sys.stderr)
        return CONFIG_ERROR_CODE
    api.LocalElasticAgent = GroupAgent  # type: ignore[attr-defined] # what `launch_agent` makes
    try:
        torch_run.run(torch_run.parse_args(sys.argv[1:]))
    except ChildFailedError:
        return GroupAgent.status  # told by the agent
    except SignalException as stopped:  # the agent has passed it on to the workers, and waited for them
        signum = signal.Signals(stopped.sigval)
        print(f"titan_ft: this group was stopped by {signum.name}", file=sys.stderr)
        return 128 + signum if signum == signal.SIGINT else 1
    except RendezvousClosedError:
        print("titan_ft: another node of this replica group has given up; see its output", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
