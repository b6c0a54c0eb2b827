# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signal workers on other hosts through Slurm."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Collection, Sequence

from titan_ft.chaos.processes import LocalProcesses, Reach, Unreachable, Worker

TIMEOUT_SECONDS = 30.0


class SlurmProcesses:
    """Signal workers of this host directly and all others through Slurm.

    A job step all of whose workers are to be hit gets the signal as a whole, by scancel; otherwise it is sent to each
    worker by a `kill` that srun runs on its host. Whether such a worker still lives is known only when the command
    fails, and its pid is taken on trust.

    Args:
        local: how workers of this host are signalled.
        timeout_seconds: time for one command.
    """

    def __init__(self, local: LocalProcesses | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._local = LocalProcesses() if local is None else local
        self._timeout_seconds = timeout_seconds

    def reach(self, workers: Sequence[Worker], everyone: Collection[Worker]) -> Reach:
        """Prepare what signals the workers; those of this host must be alive."""
        remote = [worker for worker in workers if not self._local.has(worker)]
        for worker in remote:
            if worker.slurm is None:
                remedy = "run titan-ft chaos on that host"
                raise Unreachable(
                    f"{worker.name} runs on {worker.host}, not here, and not under Slurm; {remedy}", final=True
                )
        commands = _commands(remote, everyone)
        here = [worker for worker in workers if self._local.has(worker)]
        return _Remote(commands, self._timeout_seconds, self._local.reach(here, everyone) if here else None)


class _Remote:
    """Processes that commands signal, perhaps with some on this host.

    Args:
        commands: argument lists with {signal} in the place of the signal's name.
    """

    def __init__(self, commands: list[list[str]], timeout_seconds: float, here: Reach | None = None) -> None:
        self._commands = commands
        self._timeout_seconds = timeout_seconds
        self._here = here

    def send(self, signum: signal.Signals) -> None:
        problems = []
        num_hit = 0
        if self._here is not None:
            try:
                self._here.send(signum)
                num_hit += 1
            except Unreachable as error:
                problems.append(str(error))
        for command in self._commands:
            problem = self._run([word.format(signal=signum.name.removeprefix("SIG")) for word in command])
            if problem:
                problems.append(problem)
            else:
                num_hit += 1
        if not num_hit:
            raise Unreachable("; ".join(problems))

    def close(self) -> None:
        if self._here is not None:
            self._here.close()

    def _run(self, command: list[str]) -> str:
        """Run a command; return what went wrong, or nothing."""
        try:
            done = subprocess.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=self._timeout_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not end within {self._timeout_seconds:g} s"
        except OSError as error:
            return f"{command[0]} cannot be run ({error.strerror})"
        if done.returncode == 0:
            return ""
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"{command[0]} failed with exit status {done.returncode}{': ' + said[-1] if said else ''}"


def _commands(workers: Sequence[Worker], everyone: Collection[Worker]) -> list[list[str]]:
    """Return the fewest commands that signal the workers and nobody else."""
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
