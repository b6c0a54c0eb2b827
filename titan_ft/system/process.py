# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes and their sockets, as Linux shows them in /proc.

Other systems have no /proc. There a process has no start time, and lists no sockets.
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
"""Tolerance for the start of a process, which Linux counts in clock ticks."""


def node_name() -> str:
    """Return the name of this host for people: Slurm's name of the node, else its own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Process:
    """Identifies one process for good. A later process with the same pid is another `Process`.

    Attributes:
        host: this boot of the host, and the PID namespace. `pid` is valid there. A host name would
            not do, because containers may share it.
        start: start of the process in ticks since boot; empty = there is no /proc.
    """

    host: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Process:
        """Return the identity of this process."""
        status = read_status(os.getpid())
        start = "" if status is None else str(status.start)
        return cls(this_host("pid"), os.getpid(), start)

    @classmethod
    def parse(cls, text: str) -> Process:
        """Read the text of `str(process)`.

        Raises:
            ValueError: it is no such text.
        """
        host, pid, start = text.split(",")
        return cls(host, int(pid), start)

    def __str__(self) -> str:
        return f"{self.host},{self.pid},{self.start}"

    def is_gone(self) -> bool:
        """True if the process has certainly ended; False if it runs on another host."""
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
class ProcessStatus:
    """Fields 3, 4 and 22 of /proc/PID/stat (proc(5)).

    Attributes:
        state: one letter, such as R, S, T, Z.
        parent: pid of the parent.
        start: in ticks (SC_CLK_TCK) since boot; suspended time counts.
    """

    state: str
    parent: int
    start: int

    @property
    def ended(self) -> bool:
        """True if the process has ended, and only waits for its parent to collect it."""
        return self.state in "ZX"


def read_status(pid: int, thread: int | None = None) -> ProcessStatus | None:
    """Return the status of a process, or of one of its threads; None if there is no such one."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        # Read after the last parenthesis: the name before it may contain spaces and parentheses.
        fields = Path(f"{folder}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessStatus(fields[0], int(fields[1]), int(fields[19]))


def read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended or is another user's."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def is_running_worker(pid: int, mark: str = "titan_ft", since: float | None = None) -> bool:
    """True if the process is still a worker. Its pid may belong to another process by now.

    Args:
        mark: text in a worker's command line.
        since: monotonic seconds at which the worker ran. A process that started later is another
            one.
    """
    try:
        status = read_status(pid)
    except OSError:  # the process of another user, hidden from this one
        return False
    if status is None or not any(mark in argument for argument in read_command(pid)):
        return False
    if since is None:
        return True
    # The start counts the time in which the host was suspended, the monotonic clock does not.
    started_at = status.start / os.sysconf("SC_CLK_TCK")
    suspended_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return started_at - suspended_seconds <= since + _START_SLACK_SECONDS


def this_host(*namespaces: str) -> str:
    """Return a name for this boot of the host and some of its namespaces.

    Args:
        namespaces: "pid" for a scope in which pids are valid, "net" for one of connections.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces)])
    except OSError:
        return socket.gethostname()


def own_sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket of this process, of any kind.

    Another thread may close a descriptor at any time, and its number may then belong to another
    file. So compare the inode before using the descriptor (see `borrowed_socket`).
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, as the listing's own descriptor
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    yield int(name), status.st_ino


def shut_listener(host: str, port: int) -> None:
    """Make a server of this process stop listening, if the server itself has no such call.

    Connections that are open stay open. Another listener of this process may have the same port at
    another address of this host, as that of a state server.

    Args:
        host: numeric address.
    """
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as borrowed:
            if borrowed is None or borrowed.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            is_listening = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and borrowed.getsockname()[:2] == (host, port):
                borrowed.shutdown(socket.SHUT_RDWR)


def end_at_exit() -> None:
    """Make exit() of the C library end this process at once, without handlers of other libraries.

    torchft's manager calls exit() on one of its threads when it is asked to kill its process. Then
    torch's handlers would wait for threads, and the process would stay for ever, without
    connections. A worker that ends by itself uses os._exit, which calls no handlers either.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc calls the handler that was registered last first
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def sockets_of(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets; none if it has ended or is another user's."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(entry.path)
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino


@contextlib.contextmanager
def borrowed_socket(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Use a socket that other code of this process owns, by a duplicate of its descriptor.

    Yields None if the descriptor's number belongs to another file by now. A shutdown of the
    borrowed socket ends the connection for its owner as well. The end of the block does not.

    Raises:
        OSError: the descriptor is closed.
    """
    duplicate = os.dup(descriptor)
    if os.fstat(duplicate).st_ino != inode:
        os.close(duplicate)
        yield None
        return
    try:
        borrowed = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with borrowed:  # owns the duplicate from now on
        yield borrowed
