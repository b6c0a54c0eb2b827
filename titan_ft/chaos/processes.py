# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signal processes of a run and no others: local ones by pidfd, remote ones through Slurm.

Only workers, agents and the lighthouse are signalled, not the data-loader processes of a worker.
Those end with their worker. If their worker is stopped, they wait for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from titan_ft.system.process import is_running_worker

SLURM_SECONDS = 30.0
"""Time limit of one Slurm command."""


class Unreachable(Exception):  # noqa: N818 - a finding: the reason of a `fault_skipped`
    """No process could be signalled. The text is the reason.

    Args:
        final: True if no later attempt can succeed.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class RunProcess:
    """A process of the run that a fault may hit, as its event describes it."""

    name: str
    """Name in messages, such as "rank 0 of group 1"."""
    pid: int
    host: str
    """Host name. Empty means this host."""
    mono: float | None = None
    """`time.monotonic()` of its host at its event; None if not known."""
    slurm: Mapping[str, str] | None = None
    """Slurm's ids of its job and step; None outside Slurm."""


class Processes:
    """Finds processes of a run.

    Args:
        host: name of this host.
        slurm_seconds: time limit of one Slurm command.
    """

    def __init__(self, host: str | None = None, slurm_seconds: float = SLURM_SECONDS) -> None:
        self.host = socket.gethostname() if host is None else host
        self._slurm_seconds = slurm_seconds

    def is_local(self, process: RunProcess) -> bool:
        return process.host in ("", self.host)

    def is_alive(self, process: RunProcess) -> bool:
        """Return whether a local process still runs; False for a remote one."""
        return self.is_local(process) and is_running_worker(process.pid, since=process.mono)

    def hold(
        self, processes: Sequence[RunProcess], all_workers: Collection[RunProcess]
    ) -> HeldProcesses:
        """Hold the live ones of the processes. A remote one may turn out dead when it is signalled.

        Args:
            all_workers: all workers of the run, of which `processes` may be a part.

        Raises:
            Unreachable: no process can be signalled.
        """
        local = [process for process in processes if self.is_local(process)]
        remote = [process for process in processes if not self.is_local(process)]
        for process in remote:
            if process.slurm is None:
                raise Unreachable(
                    f"{process.name} runs on {process.host}, not on {self.host}, and not under "
                    "Slurm; run titan-ft chaos on that host",
                    final=True,
                )
        commands = _slurm_commands(remote, all_workers)
        if local and not hasattr(os, "pidfd_open"):
            raise Unreachable(
                "signals need pidfds, which this system does not have (Linux has, from 5.3)",
                final=True,
            )
        pidfds = []
        for process in local:
            pidfd = _open_pidfd(process)
            if pidfd is not None:
                pidfds.append(pidfd)
        names = ", ".join(process.name for process in processes)
        if not pidfds and not commands:
            verb = "does" if len(processes) == 1 else "do"
            raise Unreachable(f"{names} {verb} not run any more")
        return HeldProcesses(names, pidfds, commands, self._slurm_seconds)


class HeldProcesses:
    """Processes that are certain to be the right ones, held until `close`.

    Args:
        pidfds: pidfds of local processes. A pid that was reused meanwhile is not hit.
        commands: argument lists that signal remote processes; {signal} stands for the signal.
    """

    def __init__(
        self, names: str, pidfds: list[int], commands: list[list[str]], slurm_seconds: float
    ) -> None:
        self._names = names
        self._pidfds = pidfds
        self._commands = commands
        self._slurm_seconds = slurm_seconds

    def send(self, signum: signal.Signals) -> None:
        """Signal all processes.

        Raises:
            Unreachable: no process was left.
        """
        num_hit = 0
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signum)
                num_hit += 1
        problems = []
        for command in self._commands:
            words = [word.format(signal=signum.name.removeprefix("SIG")) for word in command]
            problem = _run(words, self._slurm_seconds)
            if problem:
                problems.append(problem)
            else:
                num_hit += 1
        if not num_hit:
            raise Unreachable("; ".join(problems) or f"{self._names} ended just now")

    def close(self) -> None:
        """Close the pidfds. A second call does nothing."""
        while self._pidfds:
            os.close(self._pidfds.pop())


def _open_pidfd(process: RunProcess) -> int | None:
    """Return a pidfd of a process; None if the process is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Check after opening: if the pid is reused from here on, the pidfd names the dead process.
    if is_running_worker(process.pid, since=process.mono):
        return pidfd
    os.close(pidfd)
    return None


# Slurm


def _slurm_commands(
    processes: Sequence[RunProcess], all_workers: Collection[RunProcess]
) -> list[list[str]]:
    """Return the fewest commands that signal the processes and nothing else.

    If all workers of a job step are hit, scancel signals the step. Otherwise srun runs a `kill` on
    the host of each worker, without a check that the pid is still the worker's.
    """
    commands = []
    for step in dict.fromkeys(_step(process) for process in processes):
        members = [process for process in processes if _step(process) == step]
        # Several groups may share a step, and the ranks of one group usually do.
        in_step = [w for w in all_workers if w.slurm is not None and _step(w) == step]
        if all(worker in members for worker in in_step):
            commands.append(["scancel", "--signal={signal}", ".".join(step)])
            continue
        for worker in members:
            node = worker.host.partition(".")[0]  # Slurm's node names have no domain
            srun = ["srun", f"--jobid={step[0]}", "--overlap", f"--nodelist={node}"]
            kill = ["kill", "-s", "{signal}", str(worker.pid)]
            commands.append([*srun, "--nodes=1", "--ntasks=1", *kill])
    return commands


def _step(process: RunProcess) -> tuple[str, str]:
    """Return Slurm's job and step of a process.

    Raises:
        Unreachable: an id that Slurm would not write; it must not get into a command line.
    """
    assert process.slurm is not None, "called for processes under Slurm only"
    job = str(process.slurm.get("job", ""))
    step = str(process.slurm.get("step", ""))
    for value in (job, step):
        if not re.fullmatch(r"\w+", value):
            got = dict(process.slurm)
            raise Unreachable(
                f"{process.name} must name its Slurm job and step, got {got}", final=True
            )
    if not re.fullmatch(r"\w[\w.-]*", process.host):
        raise Unreachable(f"{process.name} must name its host, got {process.host!r}", final=True)
    return job, step


def _run(command: list[str], seconds: float) -> str:
    """Run a command and return the error, or an empty text."""
    program = command[0]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program} did not end within {seconds:g} s"
    except OSError as error:
        return f"{program} cannot be run ({error.strerror})"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    detail = f": {lines[-1]}" if lines else ""
    return f"{program} failed with exit status {done.returncode}{detail}"
