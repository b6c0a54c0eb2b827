# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The zygote: a process that imports, once for the host, everything that agents and workers need.

A launcher has one zygote for all groups. The agents are forks of the zygote, and fork their workers
themselves. So if the zygote is lost, only the start of further agents takes longer.

The launcher (class `Zygote`) and the zygote (`main`) talk over a socket pair, in lines:

1. The zygote checks the config, which takes most of the imports. It sends "checked", or "wrong"
   with the mistake, and then ends.
2. The zygote waits. The launcher makes the run's folder only for a config without a mistake, and
   then sends a line with the descriptor of the zygote's log.
3. The zygote imports the rest, and sends "ready".
4. For each agent, the launcher sends a request: a line of JSON, with two descriptors for the fork's
   output and one of a pipe. The zygote forks, and sends the pid.
5. The launcher writes a byte to the pipe, and the fork begins. If the pid never reached the
   launcher, the pipe is closed without a byte and the fork ends. The launcher starts a new process
   instead.

Each fork is handed over: it becomes a child of the launcher, which waits for the fork as for any
other child. So the fork outlives the zygote.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from titan_ft.config import ConfigError
from titan_ft.launch.group.forks import ForkedProcess, check_worker_args, fork_module, prepare_forks
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE
from titan_ft.run.orphan import end_with_parent
from titan_ft.run.output import protect_output

FORK_SECONDS = 30.0
"""A zygote that has not answered for this long counts as lost; a fork takes milliseconds."""
IMPORT_SECONDS = 600.0
"""Time for the imports, in the worst case from a cold network file system."""
NO_FORKS = "no process can be forked: "
"""Prefix of the line in the zygote's log with the reason."""


class ZygoteProcess(Protocol):
    """What the launcher needs of the zygote's process."""

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or None while the process runs."""

    def kill(self) -> None:
        """Send SIGKILL if the process runs."""


class Zygote:
    """The launcher's end of the zygote.

    The launcher makes the object, and calls all methods on its main thread. If the zygote is lost,
    `fork` returns None, and the launcher starts new processes instead. The forks live on.

    Args:
        start: starts the zygote's process. Gets the command line, and a descriptor of this process
            that the zygote inherits.
        module: Python module of the workers, which the zygote imports.
        args: the part of the workers' command line that is the same for all groups.

    Raises:
        OSError: there are too many processes or files, or too little memory.
    """

    def __init__(
        self, start: Callable[[list[str], int], ZygoteProcess], module: str, args: Sequence[str]
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self._socket.close)
            command = [
                sys.executable,
                "-m",
                "titan_ft.launch.group.zygote",
                str(theirs.fileno()),
                module,
                *args,
            ]
            self._process = start(command, theirs.fileno())
            on_failure.pop_all()
        self._received = b""
        self.checked = False
        """Whether the zygote has checked the config and found no mistake."""
        self.mistake = ""
        """The mistake in the config, in one line; empty if none was found."""
        self.ready = False
        """Whether the zygote has imported everything."""
        self.loss_reason = ""
        """Why the zygote is gone; empty while it runs."""

    @property
    def is_lost(self) -> bool:
        return bool(self.loss_reason)

    def poll(self) -> None:
        """Read the zygote's progress, and notice its end. Call this every few moments."""
        if self.is_lost:
            return
        code = self._process.poll()
        if not self.ready:
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._read_progress()
        if code is not None:
            how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            self._lose(f"the zygote ended ({how})")

    def proceed(self, log: int) -> None:
        """Let the zygote import the rest, after it has checked the config.

        Args:
            log: descriptor of the file that gets its output from now on.
        """
        if self.is_lost:
            return
        try:
            self._socket.settimeout(FORK_SECONDS)
            socket.send_fds(self._socket, [b"\n"], [log])
        except OSError as error:
            self._lose(f"the zygote did not answer ({type(error).__name__})")

    def close(self) -> None:
        """End the zygote. Its forks live on."""
        if not self.is_lost:
            self._lose("closed")

    def fork(
        self,
        module: str,
        args: Sequence[str],
        env: Mapping[str, str],
        output: tuple[int, int],
        title: str,
    ) -> ForkedProcess | None:
        """Run a module as `fork_module` does. The fork becomes a child of this process.

        Args:
            output: descriptors for the output and the errors of the fork.

        Returns:
            The fork; None if the zygote is not ready, is lost, or cannot fork.
        """
        self.poll()
        if self.is_lost or not self.ready:
            return None
        request = {"module": module, "args": args, "env": dict(env), "title": title}
        line = json.dumps(request).encode() + b"\n"
        reads, writes = os.pipe()
        with open(reads, "rb", buffering=0), open(writes, "wb", buffering=0) as begin:
            try:
                with adopting_orphans():
                    self._socket.settimeout(FORK_SECONDS)
                    sent = socket.send_fds(self._socket, [line], [*output, reads])
                    self._socket.sendall(line[sent:])
                    pid = int(self._read_line())
            except (OSError, ValueError) as error:
                self._lose(f"the zygote did not answer ({type(error).__name__})")
                return None
            if pid:
                begin.write(b"1")
        return ForkedProcess(pid) if pid else None

    def _read_progress(self) -> None:
        while not (self.ready or self.mistake):
            word, _, text = self._read_line().partition(b" ")
            if word == b"checked":
                self.checked = True
            elif word == b"ready":
                self.ready = True
            elif word == b"wrong":
                self.mistake = json.loads(text)

    def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            block = self._socket.recv(4096)
            if not block:
                raise ConnectionError("the zygote has ended")
            self._received += block
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _lose(self, why: str) -> None:
        self.loss_reason = why
        self._socket.close()
        self._process.kill()  # a frozen zygote does not notice the closed socket
        self._process.poll()


def can_hand_over_forks() -> bool:
    """True if this system can hand forks over to another parent. Only Linux can."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError), adopting_orphans():
        return True
    return False


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process, within the context, the new parent of descendants whose own parent ends.

    The context lasts for one fork only. Orphans that workers leave later must go to the system,
    which reaps them.

    Raises:
        OSError: the system does not permit it.
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
    """Fork at each request of the launcher, until it closes the connection or ends."""
    connection.sendall(b"ready\n")
    while True:
        line = b""
        descriptors: list[int] = []
        while not line.endswith(b"\n"):
            block, received, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not block:
                return
            line += block
            descriptors += received
        pid = _fork_for_launcher(json.loads(line), descriptors, connection)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)


def _fork_for_launcher(
    request: dict[str, Any], descriptors: Sequence[int], connection: socket.socket
) -> int:
    """Fork through a process that ends at once, so that the launcher inherits the fork.

    Args:
        request: arguments for `fork_module`.
        descriptors: the output of the fork, its errors, and the pipe that lets it begin.
        connection: socket to the launcher, which the fork must not keep.

    Returns:
        The fork's pid; 0 if there are too many processes or too little memory.
    """
    reads, writes = os.pipe()
    output, errors, start_pipe = descriptors
    try:
        middle_pid = os.fork()
    except OSError:
        traceback.print_exc()
        os.close(reads)
        os.close(writes)
        return 0
    is_middle_process = middle_pid == 0
    if is_middle_process:
        try:
            os.close(reads)
            child = fork_module(
                request["module"],
                request["args"],
                request["env"],
                (output, errors),
                title=request["title"],
                close=[connection.fileno(), writes],
                start_pipe=start_pipe,
            )
            os.write(writes, b"%d" % child.pid)
        except BaseException:  # noqa: BLE001  # process edge
            # The zygote gets no pid, and this traceback in its log says why.
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writes)
    with open(reads, "rb", buffering=0) as pipe:
        pid = int(pipe.read() or 0)
    # The fork becomes the launcher's child at the end of the middle process. With an earlier
    # answer, the launcher could wait for a process that is not its child yet.
    os.waitpid(middle_pid, 0)
    return pid


def main() -> int:
    protect_output()
    end_with_parent()
    # The starter's process may ignore SIGCHLD, which is inherited: `waitpid` would then fail.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor, module, *worker_args = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            check_worker_args(module, worker_args)
        except ConfigError as error:
            connection.sendall(b"wrong " + json.dumps(str(error)).encode() + b"\n")
            return CONFIG_ERROR_CODE
        connection.sendall(b"checked\n")
        if not _wait_for_log(connection):
            return 0
        obstacle = prepare_forks(module, worker_args)
        if obstacle:
            print(f"{NO_FORKS}{obstacle}", file=sys.stderr, flush=True)
            return 1
        serve(connection)
    return 0


def _wait_for_log(connection: socket.socket) -> bool:
    """Wait for the launcher's permission to proceed, and print to the log that comes with it.

    Returns:
        False if the launcher is gone, or wants no forks.
    """
    block, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not block:
        return False
    for descriptor in descriptors:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    return True


if __name__ == "__main__":
    sys.exit(main())
