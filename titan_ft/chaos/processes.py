# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signal the processes of a run, and never any other: those of this host by pidfd, all others through Slurm.

Only the workers themselves are signalled, not the data-loader processes that they started: those end with their worker,
and one whose worker is stopped just waits for it.
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
"""Time for one command of Slurm's."""


class Unreachable(Exception):  # noqa: N818 - a finding, which becomes the reason of a `fault_skipped`
    """No process could be signalled; the text says why.

    Args:
        final: it will never be possible.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(frozen=True)
class Worker:
    """One process that a fault may hit, as its event describes it."""

    name: str
    """What to call it in a message, such as "rank 0 of group 1"."""
    pid: int
    host: str
    """Empty where it is not known, which was so in older histories: then it is this one."""
    mono: float | None = None
    """`time.monotonic()` of its host at its event; None where it is not known."""
    slurm: Mapping[str, str] | None = None
    """Slurm's job and step that it runs in, if any."""


class Processes:
    """Finds the processes of workers.

    Args:
        host: name of this host.
        slurm_seconds: time for one command of Slurm's.
    """

    def __init__(self, host: str | None = None, slurm_seconds: float = SLURM_SECONDS) -> None:
        self.host = socket.gethostname() if host is None else host
        self._slurm_seconds = slurm_seconds

    def has(self, worker: Worker) -> bool:
        """Tell whether a worker runs on this host."""
        return worker.host in ("", self.host)

    def is_alive(self, worker: Worker) -> bool:
        """Tell whether a worker of this host still runs."""
        return self.has(worker) and is_running_worker(worker.pid, since=worker.mono)

    def reach(self, workers: Sequence[Worker], everyone: Collection[Worker]) -> Reach:
        """Hold those of the workers that are alive; of one on another host, that shows only when it is signalled.

        Args:
            everyone: the workers of the run, of which `workers` are some.

        Raises:
            Unreachable: none of them can be signalled.
        """
        here = [worker for worker in workers if self.has(worker)]
        elsewhere = [worker for worker in workers if not self.has(worker)]
        for worker in elsewhere:
            if worker.slurm is None:
                where = f"{worker.name} runs on {worker.host}, not on {self.host}, and not under Slurm"
                raise Unreachable(f"{where}; run titan-ft chaos on that host", final=True)
        commands = _commands(elsewhere, everyone)
        if here and not hasattr(os, "pidfd_open"):
            raise Unreachable("signals need pidfds, which this system does not have (Linux has, from 5.3)", final=True)
        fds = [fd for worker in here if (fd := _open(worker)) is not None]
        names = ", ".join(worker.name for worker in workers)
        if not fds and not commands:
            raise Unreachable(f"{names} {'does' if len(workers) == 1 else 'do'} not run any more")
        return Reach(names, fds, commands, self._slurm_seconds)


class Reach:
    """Processes that are certain to be the right ones; held until `close`.

    Args:
        fds: pidfds of those on this host. A pid that has gone to another process since is not hit.
        commands: argument lists that signal the others, with {signal} in the place of the signal's name.
    """

    def __init__(self, names: str, fds: list[int], commands: list[list[str]], slurm_seconds: float) -> None:
        self._names, self._fds, self._commands = names, fds, commands
        self._slurm_seconds = slurm_seconds

    def send(self, signum: signal.Signals) -> None:
        """Signal all of them. Raises Unreachable when none is left."""
        num_hit = 0
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)
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
        """Let go of them; a second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())


def _open(worker: Worker) -> int | None:
    """Return a pidfd of a worker, or None when it is gone."""
    try:
        fd = os.pidfd_open(worker.pid)
    except ProcessLookupError:
        return None
    # Looked at after the pidfd was taken: should the pid be another's by now, the pidfd is of a dead process.
    if is_running_worker(worker.pid, since=worker.mono):
        return fd
    os.close(fd)
    return None


# Slurm


def _commands(workers: Sequence[Worker], everyone: Collection[Worker]) -> list[list[str]]:
    """Return the fewest commands that signal the workers and nobody else.

    A job step all of whose workers are to be hit gets the signal as a whole, by scancel. Otherwise srun runs a `kill`
    on the host of each worker, whose pid is taken on trust.
    """
    commands = []
    for step in dict.fromkeys(_step(worker) for worker in workers):
        members = [worker for worker in workers if _step(worker) == step]
        # Several groups may share a step, and the ranks of one group do as a rule.
        if all(other in members for other in everyone if other.slurm is not None and _step(other) == step):
            commands.append(["scancel", "--signal={signal}", ".".join(step)])
            continue
        for worker in members:
            node = worker.host.partition(".")[0]  # as Slurm calls it, without the domain
            srun = ["srun", f"--jobid={step[0]}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
            commands.append([*srun, "kill", "-s", "{signal}", str(worker.pid)])
    return commands


def _step(worker: Worker) -> tuple[str, str]:
    """Return job and step of a worker; they go to a command line, so what Slurm would not write is refused."""
    assert worker.slurm is not None, "asked only for workers under Slurm"
    job, step = str(worker.slurm.get("job", "")), str(worker.slurm.get("step", ""))
    for value in (job, step):
        if not re.fullmatch(r"\w+", value):
            raise Unreachable(f"{worker.name} must name its Slurm job and step, got {dict(worker.slurm)}", final=True)
    if not re.fullmatch(r"\w[\w.-]*", worker.host):
        raise Unreachable(f"{worker.name} must name its host, got {worker.host!r}", final=True)
    return job, step


def _run(command: list[str], seconds: float) -> str:
    """Run a command; return what went wrong, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {seconds:g} s"
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return f"{command[0]} failed with exit status {done.returncode}{': ' + said[-1] if said else ''}"
