# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Who a process is, and which sockets are its own: what Linux tells of it in /proc.

Elsewhere than on Linux there is no /proc: a process then has no start time and lists no sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_START_SLACK_SECONDS = 1.0
"""A process's start is known in clock ticks."""


def node_name() -> str:
    """Return what people call this host: Slurm's name of the node, else the host's own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Process:
    """One process, that another with the same pid is not taken for.

    Attributes:
        host: where `pid` is valid: host since its boot, and PID namespace (containers may share the host's name).
        start: of the process, in ticks since boot, because pids are reused; empty where there is no /proc.
    """

    host: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Process:
        """Describe this process."""
        status = read_status(os.getpid())
        return cls(this_host("pid"), os.getpid(), "" if status is None else str(status.start))

    @classmethod
    def parse(cls, text: str) -> Process:
        """Read what `str` wrote."""
        host, pid, start = text.split(",")
        return cls(host, int(pid), start)

    def __str__(self) -> str:
        return f"{self.host},{self.pid},{self.start}"

    def is_gone(self) -> bool:
        """Say whether it has certainly ended; False if it cannot be looked at from here."""
        if self.host != this_host("pid"):
            return False
        if self.start:
            status = read_status(self.pid)
            return status is None or status.ended or str(status.start) != self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


@dataclass(frozen=True)
class Status:
    """What /proc/PID/stat says (proc(5), fields 3, 4 and 22).

    Attributes:
        state: one letter, such as R, S, T, Z.
        parent: its pid.
        start: in ticks (SC_CLK_TCK) since boot; suspended time counts.
    """

    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        """Say whether it has ended and only waits to be collected."""
        return self.state in "ZX"


def read_status(pid: int, thread: int | None = None) -> Status | None:
    """Return the status of a process, or of one of its threads; None if it is not there."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        # The name before it may hold anything, spaces and parentheses too.
        fields = Path(f"{folder}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Status(fields[0], int(fields[1]), int(fields[19]))


def read_command(pid: int) -> list[str]:
    """Return the command line of a process; none of one that is gone, has ended, or is somebody else's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def is_running_worker(pid: int, mark: str = "titan_ft", since: float | None = None) -> bool:
    """Say whether the process still is a worker; its pid may be another's by now.

    Args:
        mark: what is in a worker's command line.
        since: seconds of this host's monotonic clock at which the worker ran; a younger process is another one.
    """
    try:
        status = read_status(pid)
    except OSError:  # somebody else's, who hides it
        return False
    if status is None or not any(mark in argument for argument in read_command(pid)):
        return False
    if since is None:
        return True
    since_boot = status.start / os.sysconf("SC_CLK_TCK")
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # the one clock counts a suspend, the other not
    return since_boot - asleep <= since + _START_SLACK_SECONDS


def this_host(*namespaces: str) -> str:
    """Name this host since its boot, and its namespaces ("pid", "net"), in which pids and connections are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces)])
    except OSError:
        return socket.gethostname()


def own_sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket of this process, of any kind.

    A descriptor may be closed, and its number given away, at any time: compare the inode before touching it.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, such as the one that lists this folder
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    yield int(name), status.st_ino


def shut_listener(port: int) -> None:
    """Stop listening at a port of this process, for a server that has no such call of its own.

    Connections that are open stay open.
    """
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as borrowed:
            if borrowed is None or borrowed.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and borrowed.getsockname()[1] == port:
                borrowed.shutdown(socket.SHUT_RDWR)


def end_at_exit() -> None:
    """Let this process end at once where C code calls exit(), without the exit handlers of libraries.

    torchft's manager calls exit() on one of its threads when it is told to kill its process. The
    handlers of torch then wait for threads, and the process stays, without connections, for ever.
    Python's own end of a worker, os._exit, calls no handlers either.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # of glibc; the handler that is registered last is called first
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def sockets_of(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets; none of one that is gone or somebody else's."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(entry.path)
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino


@contextlib.contextmanager
def borrowed_socket(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Hold a socket of this process by a descriptor of one's own; None if the number is another file's by now.

    It is the same connection: shutting it down ends it for its owner too, closing this descriptor does not.

    Raises:
        OSError: the descriptor is closed.
    """
    own = os.dup(descriptor)
    try:
        if os.fstat(own).st_ino != inode:
            yield None
            return
        borrowed = socket.socket(fileno=own)
        own = -1
        with borrowed:
            yield borrowed
    finally:
        if own >= 0:
            os.close(own)
