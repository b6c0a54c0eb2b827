# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A real Slurm on loopback: munge, slurmctld and several slurmd, started and ended by the tests.

It runs as root in a plain container, without systemd. All its files are in one folder, with ports
and sockets of its own, so that the host's Slurm is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "srun")
_PATH = "/usr/sbin:/sbin"

_CONF = """\
ClusterName=drill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU,CR_LLN
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SlurmdParameters=config_overrides
PriorityType=priority/basic
ReturnToService=2
SlurmdTimeout=300
SlurmctldTimeout=20
KillWait=30
OverTimeLimit=0
JobRequeue=1
MailProg=/bin/true
{nodes}
PartitionName=drill Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no Slurm can be started here; empty if one can."""
    missing = [
        name
        for name in NEEDED
        if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}") is None
    ]
    if missing:
        return f"no {', '.join(missing)} (Debian's packages slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "a Slurm of the test's own needs root"


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [server.getsockname()[1] for server in held]


class Cluster:
    """The cluster. `close` ends all its processes.

    Args:
        folder: for all its files; its path must be short, because it contains sockets.
        nodes, cpus: number of nodes, and of the CPUs that each claims.
    """

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 2) -> None:
        self.folder, self.nodes = folder, [f"n{number}" for number in range(nodes)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.env["PATH"] = f"{self.env['PATH']}:{_PATH}"
        ports = _free_ports(nodes + 1)
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        for name in ("state", *(f"spool-{name}" for name in self.nodes)):
            (folder / name).mkdir()
        text = _CONF.format(
            host=host, controller_port=ports[0], folder=folder, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        folder.chmod(0o755)

    def start(self) -> None:
        """Start the cluster, and wait until its nodes are up."""
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start(
            "munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}", *files
        )
        self.wait_until(munge.exists, 20, "munge listens")
        self._start("slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        self.wait_until(lambda: set(self.states().values()) == {"idle"}, 60, "all nodes are idle")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", "-D", "-N", name, key=name)

    def lose_node(self, name: str) -> None:
        """Kill a node's slurmd and processes, and tell the controller, which a power cut would show
        it later.
        """
        slurmd = self._processes.pop(name)
        pids = [*self.pids_on(name), slurmd.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        slurmd.wait()
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=drill")

    def pids_on(self, name: str) -> list[int]:
        """List the job processes on a node; the steps' daemons come first, so that none reports an
        end.
        """
        mark = f"SLURMD_NODENAME={name}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                ours = f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in environ
                if mark in environ and ours:
                    found.append(int(entry.name))
        daemons = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"slurmstepd" in (entry / "cmdline").read_bytes().split(b" ")[0]:
                    children = (entry / "task" / entry.name / "children").read_text().split()
                    if any(int(child) in found for child in children):
                        daemons.append(int(entry.name))
        return [*daemons, *found]

    def run(self, *command: str, **more: Any) -> str:
        """Run a command of Slurm; return its output."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False, **more
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        done = subprocess.run(
            ["sinfo", "-N", "-h", "-o", "%N %t"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def jobs(self) -> list[dict[str, str]]:
        """Return all jobs, each element of an array by itself, that are not over."""
        lines = self.run("squeue", "-h", "-r", "-o", "%A|%F|%K|%T|%N|%j|%r").splitlines()
        names = ("id", "array", "element", "state", "node", "name", "reason")
        return [dict(zip(names, line.split("|"), strict=True)) for line in lines]

    @staticmethod
    def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Return the first true value of `condition`."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.2)
        return value

    def close(self) -> None:
        """End all processes: first the daemons, which would start others, then those of jobs."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        while pids := [pid for name in self.nodes for pid in self.pids_on(name)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _start(self, program: str, *arguments: str, key: str = "") -> None:
        path = shutil.which(program, path=self.env["PATH"])
        assert path is not None
        log = (self.folder / f"{key or program}.out").open("ab")
        self._processes[key or program] = subprocess.Popen(
            [path, *arguments],
            env=self.env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
