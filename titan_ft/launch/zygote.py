# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process of a launch that imports, once, what all groups of the host need: their supervisors are its forks.

Supervisors fork their workers themselves, so that nothing but the start of further groups depends on the zygote. Each
fork is handed to the launcher: it becomes the launcher's own child, whose end is waited for like any other's, and which
outlives the zygote.

Over a socket the launcher sends a line of JSON for each fork, and gets one back, the pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_ft.launch.children import Children
from titan_ft.launch.forks import ForkedProcess, fork_module, preload
from titan_ft.launch.worker_group import usual_env
from titan_ft.run.orphan import end_with_parent

SUPERVISOR = "titan_ft.launch.supervisor"
FORK_SECONDS = 30.0
"""Without an answer for so long the zygote counts as lost; a fork takes milliseconds."""


class Zygote:
    """The launcher's end.

    Args:
        children: where the process is started.
        module: Python module that the workers run.
        worker_args: their command line, as far as it is the same for all groups.
        log: gets the zygote's output.
    """

    def __init__(self, children: Children, module: str, worker_args: list[str], log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        self._children = children
        command = [sys.executable, "-m", "titan_ft.launch.zygote", str(theirs.fileno()), module, *worker_args]
        with theirs:
            self._child = children.start("the zygote", command, log, env=usual_env(), pass_fds=[theirs.fileno()])
        self._received = b""
        self.ready = False
        """Whether it has imported everything."""
        self.lost = ""
        """Why there is none any more; empty as long as there is."""

    def poll(self) -> None:
        """Notice that it is ready, or that it has ended; to be called every few moments."""
        if self.lost:
            return
        ended = self._child.code is not None
        if not self.ready:
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.ready = self._read_line() == b"ready"
        if ended:
            self._lose(self._child.describe_end())

    def fork(self, name: str, args: list[str], log: Path) -> ForkedProcess | None:
        """Fork a supervisor with this command line; None if there is no zygote any more, or it could not."""
        self.poll()
        if self.lost or not self.ready:
            return None
        request = {"args": args, "env": dict(self._children.env), "log": str(log), "title": name}
        try:
            with adopting():
                self._socket.settimeout(FORK_SECONDS)
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                pid = int(self._read_line())
                return ForkedProcess(pid) if pid else None
        except (OSError, ValueError) as error:
            self._lose(f"the zygote did not answer ({type(error).__name__})")
            return None

    def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            block = self._socket.recv(4096)
            if not block:
                raise ConnectionError("the zygote has ended")
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _lose(self, why: str) -> None:
        self.lost = why
        self._socket.close()


def is_possible() -> bool:
    """Tell whether processes can be forked and handed over here: it takes Linux."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError), adopting():
        return True
    return False


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of processes below this one whose own parent ends meanwhile.

    Not for ever: what the workers leave behind is for the system to collect.

    Raises:
        OSError: the system does not let it.
    """
    _set_subreaper(True)
    try:
        yield
    finally:
        _set_subreaper(False)


def _set_subreaper(value: bool) -> None:
    import ctypes

    set_child_subreaper = 36  # linux/prctl.h
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def serve(connection: socket.socket) -> None:
    """Fork as often as the launcher asks, until it is gone."""
    connection.sendall(b"ready\n")
    with connection.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            connection.sendall(b"%d\n" % _fork_away(request, connection))


def _fork_away(request: dict[str, Any], connection: socket.socket) -> int:
    """Fork a supervisor by way of a process that ends at once, so that it is not this one's child.

    Returns its pid, 0 if there are too many processes or too little memory.
    """
    reads, writes = os.pipe()
    try:
        between = os.fork()
    except OSError:
        traceback.print_exc()
        os.close(reads)
        os.close(writes)
        return 0
    if between == 0:
        try:
            os.close(reads)
            child = fork_module(
                SUPERVISOR,
                request["args"],
                request["env"],
                Path(request["log"]),
                append=True,
                title=request["title"],
                close=[connection.fileno(), writes],
                after_parent=True,
            )
            os.write(writes, b"%d" % child.pid)
        except BaseException:  # noqa: BLE001  # process edge: the launcher gets no pid, and the log says why
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writes)
    with open(reads, "rb", buffering=0) as pipe:
        pid = int(pipe.read() or 0)
    os.waitpid(between, 0)  # only then the fork is the launcher's
    return pid


def main() -> int:
    end_with_parent()
    descriptor, module, *worker_args = sys.argv[1:]
    obstacle = preload(module, worker_args)
    if obstacle:
        print(f"no process can be forked: {obstacle}", file=sys.stderr, flush=True)
        return 1
    with socket.socket(fileno=int(descriptor)) as connection:
        serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
