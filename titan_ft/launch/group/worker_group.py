# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start, watch and end the workers of one attempt of a replica group on one host, as one unit.

An *attempt* is one start of all workers of the group. For each attempt, the group's agent

1. serves a store for it (`AttemptStore`), at which the workers of all hosts meet, as workers of
   torchrun do at MASTER_ADDR and MASTER_PORT;
2. starts the workers of this host (`LocalWorkers`), each with its part of torchrun's environment;
3. polls their ends (`LocalWorkers.exits`), and ends them.

The agent chooses one of two ways to start processes: `ForkStarter` forks the agent, which has
imported everything that workers need, and `PlainStarter` starts new Python processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from titan_ft.launch import store_server
from titan_ft.launch.gpus import listed_gpus, num_gpus
from titan_ft.launch.group.forks import ForkedProcess, fork_module
from titan_ft.launch.group.worker_exit import EARLY_END_ERROR, WorkerExit
from titan_ft.run import error_file
from titan_ft.run.error_file import read_error
from titan_ft.run.marks import has_left, remove_training_mark
from titan_ft.run.orphan import PARENT_PID_ENV
from titan_ft.run.output import choose_native_log
from titan_ft.system.address import is_unspecified, usable_bind
from titan_ft.system.ownership import make_folder, no_follow
from titan_ft.system.process import node_name

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.01
_KILL_SECONDS = 10.0
"""Time for killed workers to end."""


class Starter(Protocol):
    """A way to start the processes of a group; the agent calls all methods on its only thread."""

    forks: bool
    """Whether the started processes are forks, which have imported everything when they begin."""

    def start(
        self, module: str, args: list[str], env: Mapping[str, str], log: Path | None, title: str
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start a process that runs a Python module.

        The process leads a session of its own. A signal to its process group then reaches it with
        all processes that it started, and no others.

        Args:
            env: the whole environment of the process.
            log: file for the output; None: the process shares the output of this process.
            title: name of a fork in `ps`; a new process has no title.

        Raises:
            OSError: there are too many processes, or too little memory.
        """

    def serve_store(self, listener: socket.socket) -> Store:
        """Serve a store for the workers of one attempt at a socket, which the store will close."""


class Store(Protocol):
    """The store at which the workers of one attempt meet."""

    pid: int
    """Process that serves the store."""

    def close(self) -> None: ...


class PlainStarter:
    """Starts new Python processes. Serves the store by threads of this process."""

    forks = False

    def start(
        self, module: str, args: list[str], env: Mapping[str, str], log: Path | None, title: str
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *args]
        if log is None:
            return subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True
            )
        with open_log(log) as output:
            return subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def serve_store(self, listener: socket.socket) -> Store:
        return _InProcessStore(store_server.serve(listener))


class _InProcessStore:
    """A store that threads of torch serve in this process."""

    def __init__(self, store: Any) -> None:
        self._torch_store = store
        self.pid = os.getpid()

    def close(self) -> None:
        self._torch_store = None  # torch ends the threads with the last reference


class ForkStarter:
    """Forks this process, which has imported everything (see `forks`).

    Args:
        private_descriptors: lists descriptors of this process that no fork may keep: its
            connections to other agents. A worker that held such a connection open would hide this
            process's death from the other agent.
    """

    forks = True

    def __init__(self, private_descriptors: Callable[[], list[int]] = list) -> None:
        self._private_descriptors = private_descriptors

    def start(
        self, module: str, args: list[str], env: Mapping[str, str], log: Path | None, title: str
    ) -> ForkedProcess:
        close = self._private_descriptors()
        if log is None:
            return fork_module(module, args, env, None, title=title, close=close)
        with open_log(log) as output:
            files = (output.fileno(), output.fileno())
            return fork_module(module, args, env, files, title=title, close=close)

    def serve_store(self, listener: socket.socket) -> Store:
        with listener:  # the fork has its own copy of the socket
            process = fork_module(
                store_server.__name__,
                args=[str(listener.fileno())],
                env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
                output=None,
                title="titan-ft store",
                close=self._private_descriptors(),
            )
            return _ForkedStore(process)


class _ForkedStore:
    """A store that a fork serves. Its threads must not be in a process that forks workers."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Share:
    """The ranks of a group that run on one host.

    Attributes:
        num_ranks: number of ranks on the host.
        world_size: number of ranks of the whole group.
        first_rank: first rank on the host; the other ranks follow without a gap.
        host_index: number of the host in the group, from 0.
        num_hosts: number of hosts of the group.
    """

    num_ranks: int
    world_size: int
    first_rank: int = 0
    host_index: int = 0
    num_hosts: int = 1

    @classmethod
    def whole(cls, num_ranks: int) -> Share:
        """Return the share of a host that has all ranks of the group."""
        return cls(num_ranks, num_ranks)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class MeetingPoint:
    """Address of the store at which the workers of one attempt meet.

    Attributes:
        pid: process of this host that serves the store; 0 if another host does.
    """

    host: str
    port: int
    pid: int = 0


class AttemptStore:
    """The store of one attempt, served from this host.

    The constructor binds a port that the system chooses. If the port were only chosen here, and
    rank 0 served the store, rank 0 would bind the port after seconds of imports, and another
    process could have taken it by then.

    Each attempt has its own store. In the store of a former attempt, the workers would read the
    addresses of their dead predecessors (pytorch issue 135712).

    Args:
        bind: numeric address at which the store listens. The ranks of other groups connect to it as
            well, to exchange gradients. 0.0.0.0 and :: mean all addresses.
        address: numeric address at which the group's own workers reach the store; empty if all of
            them are on this host.
    """

    def __init__(self, starter: Starter, bind: str, address: str = "") -> None:
        bind = usable_bind(bind)
        is_ipv6 = ":" in bind
        listener = socket.create_server(
            (bind, 0),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            # Without it, a store at :: would not answer groups that have IPv4 addresses.
            dualstack_ipv6=is_ipv6 and is_unspecified(bind),
        )
        host, port = store_server.reachable(listener)
        self._store = starter.serve_store(listener)
        self.meeting_point = MeetingPoint(address or host, port, self._store.pid)

    def close(self) -> None:
        self._store.close()


class LocalWorkers:
    """The workers of one attempt on this host: started together, and ended together.

    The constructor starts the workers. If a worker cannot be started, it ends those that were
    started, and raises. `GroupWorkers` (of a leading agent) or `Follower` owns the object, and
    calls all methods on the agent's only thread. `kill` is safe from any thread.

    A worker that ended is not reaped before `end`. Until then its process group keeps its id, so
    that a signal never reaches a younger process with the same id.

    Args:
        starter: starts the processes.
        module: Python module that the workers run.
        args: command line of the module.
        env: variables for all workers, in addition to this process's environment. torchrun's
            variables are added by this class.
        share: the group's ranks on this host.
        meeting_point: address at which all workers of the attempt meet.
        attempt: number of the attempt, from 0 (see `attempt_env`).
        max_restarts: value of TORCHELASTIC_MAX_RESTARTS for the workers.
        logs: path of a log for each rank.
        has_logs: whether the workers write to their logs. If not, they share the output of this
            process, and only their error files are beside the paths of the logs.
        title: name of a forked worker in `ps`, before its rank.
    """

    def __init__(
        self,
        starter: Starter,
        module: str,
        args: list[str],
        env: Mapping[str, str],
        share: Share,
        meeting_point: MeetingPoint,
        *,
        attempt: int,
        max_restarts: int,
        logs: Mapping[int, Path],
        has_logs: bool = True,
        title: str = "titan-ft ",
    ) -> None:
        self.num_ranks = share.num_ranks
        shared_env = {
            **os.environ,
            **env,
            **_shared_env(share, meeting_point, max_restarts),
            **attempt_env(attempt),
        }
        self._error_files = {rank: error_file.beside(logs[rank]) for rank in share.ranks}
        self._exits: dict[int, WorkerExit] = {}
        """The ends that `exits` has seen, by rank. They are kept, because the mark that a worker
        trains (`run.marks`) can be read only once.
        """
        self._workers: dict[int, subprocess.Popen[bytes] | ForkedProcess] = {}
        """The workers, by rank."""
        self._have_been_reaped = False
        self._were_asked_to_leave = False
        try:
            for local_rank, rank in enumerate(share.ranks):
                rank_env = {
                    "RANK": str(rank),
                    "ROLE_RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    error_file.FILE_ENV: str(self._error_files[rank]),
                }
                log = None
                if has_logs:
                    log = logs[rank]
                else:
                    # Made here for the error file, because no log is opened in the folder. Without
                    # the folder, the worker's exception is in its output only.
                    with contextlib.suppress(OSError):
                        make_folder(self._error_files[rank].parent)
                self._workers[rank] = starter.start(
                    module, args, {**shared_env, **rank_env}, log, f"{title}{rank}"
                )
        except BaseException:
            self.end(0.0)
            raise

    @property
    def pids(self) -> dict[int, int]:
        """Processes of the workers, by rank."""
        return {rank: worker.pid for rank, worker in self._workers.items()}

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended, by rank. They are not reaped."""
        look_without_reaping = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for rank, worker in self._workers.items():
            if rank in self._exits:
                continue
            info = os.waitid(os.P_PID, worker.pid, look_without_reaping)
            if info is None:
                continue
            code = info.si_status
            if info.si_code != os.CLD_EXITED:
                code = -info.si_status  # the signal
            self._exits[rank] = self._read_exit(rank, worker.pid, code)
        return [self._exits[rank] for rank in sorted(self._exits)]

    def _read_exit(self, rank: int, pid: int, code: int) -> WorkerExit:
        """Return how a worker ended, by its exit status and the files that it left."""
        file = self._error_files[rank]
        was_training = remove_training_mark(file)
        error = None
        if code > 0:
            error = read_error(file)
        elif code == 0 and was_training:
            error = EARLY_END_ERROR
        return WorkerExit(rank, pid, code, error, has_left(file), node_name())

    def ranks_that_raised(self) -> list[int]:
        """List the ranks that still run although an exception has ended their training.

        Such a rank has written its error file, and has yet to end its process.
        """
        ended = {exit.rank for exit in self.exits()}
        return [
            rank for rank, file in self._error_files.items() if rank not in ended and file.exists()
        ]

    def ask_to_leave(self) -> None:
        """Ask all workers to finish their step and leave (SIGTERM). Further calls do nothing.

        On a cluster, the group's leader and the scheduler of this host may both ask, seconds apart.
        A second SIGTERM would end the workers at once.
        """
        if not self._were_asked_to_leave:
            self._were_asked_to_leave = True
            self._signal_running(signal.SIGTERM)

    def end(self, grace_seconds: float) -> list[WorkerExit]:
        """End the running workers, reap all, and return how each ended.

        Workers get SIGTERM, and SIGKILL after `grace_seconds`; with 0 they get SIGKILL at once.
        """
        if grace_seconds > 0:
            self._signal_running(signal.SIGTERM)
            # A stopped worker (SIGSTOP) would not see SIGTERM before the grace time is over.
            self._signal_running(signal.SIGCONT)
            self._wait(grace_seconds)
        self.kill()
        # A process in uninterruptible sleep (a hung driver) cannot be killed. Without a limit, this
        # wait would last for ever.
        self._wait(_KILL_SECONDS)
        exits = self.exits()
        self._have_been_reaped = True
        for worker in self._workers.values():
            worker.poll()  # reaps the worker
        return exits

    def kill(self) -> None:
        """Kill every worker together with the processes that it started."""
        if not self._have_been_reaped:
            for worker in self._workers.values():
                _signal_process_group(worker.pid, signal.SIGKILL)

    def _signal_running(self, signum: signal.Signals) -> None:
        ended = {exit.pid for exit in self.exits()}
        for worker in self._workers.values():
            if worker.pid not in ended:
                _signal_process_group(worker.pid, signum)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.exits()) < len(self._workers) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _shared_env(share: Share, meeting_point: MeetingPoint, max_restarts: int) -> dict[str, str]:
    """Return the variables that all ranks of a host share: torchrun's, and the agent's pid."""
    env = {
        PARENT_PID_ENV: str(os.getpid()),
        "MASTER_ADDR": meeting_point.host,
        "MASTER_PORT": str(meeting_point.port),
        "WORLD_SIZE": str(share.world_size),
        "LOCAL_WORLD_SIZE": str(share.num_ranks),
        "ROLE_WORLD_SIZE": str(share.world_size),
        "GROUP_WORLD_SIZE": str(share.num_hosts),
        "GROUP_RANK": str(share.host_index),
        "ROLE_NAME": "titan_ft",
        "TORCHELASTIC_RUN_ID": "titan_ft",
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    if meeting_point.pid:
        env[store_server.PID_ENV] = str(meeting_point.pid)
    return env


def attempt_env(attempt: int) -> dict[str, str]:
    """Return the variables that tell a worker the number of earlier starts of its group."""
    return {"TITAN_FT_ATTEMPT": str(attempt), "TORCHELASTIC_RESTART_COUNT": str(attempt)}


def choose_devices(slot: int, num_ranks: int, devices: list[str]) -> list[str] | None:
    """Choose the GPUs of a group among the GPUs of the host, in the order of the slots.

    If the host has too few GPUs for all groups, several groups share a GPU.

    Returns:
        The chosen GPUs; None (the workers choose) if the host has fewer GPUs than a group has
        ranks.
    """
    if num_ranks > len(devices):
        return None
    first = slot * num_ranks
    return [devices[(first + rank) % len(devices)] for rank in range(num_ranks)]


def worker_env(slot: int, num_ranks: int, lighthouse: str) -> dict[str, str]:
    """Return the variables of a group's workers under a launcher, which all attempts share.

    Each group gets GPUs of its own, because all groups are on this host.
    """
    env = {"TORCHFT_LIGHTHOUSE": lighthouse, **default_env()}
    # Not counted by torch, which would initialize CUDA. No fork of this process could then use it.
    devices = listed_gpus()
    if devices is None:
        devices = [str(index) for index in range(num_gpus() or 0)]
    chosen = choose_devices(slot, num_ranks, devices)
    if chosen is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return env


def default_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return defaults for the workers' environment, or the values that the user set instead."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # By default torch 2.15 uses its new NCCL backend, for which the settings of
        # `device.nccl_environment` are not tested. torch reads the variable when torch.distributed
        # is imported. Set in a forked worker, it would come too late.
        "TORCH_DIST_USE_NCCL2": "0",
    }
    chosen = {name: environ.get(name, value) for name, value in defaults.items()}
    chosen["RUST_LOG"] = choose_native_log(environ)
    return chosen


def open_log(path: Path, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
    """Open a log for writing or appending. No link is followed: others may write to the folder.

    If the log cannot be opened, a line says so, and the returned file is this process's stderr.
    """
    try:
        make_folder(path.parent)
        return open(path, mode, opener=no_follow)
    except OSError as error:
        print(
            f"{path} cannot be written ({error.strerror}): its lines come here",
            file=sys.stderr,
            flush=True,
        )
        return open(os.dup(2), mode)


def _signal_process_group(pid: int, signum: signal.Signals) -> None:
    """Signal the process group that a worker leads."""
    # Errors: the group is gone, or only a zombie is left (macOS).
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
