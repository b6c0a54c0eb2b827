# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Workers that are started early, import all that training needs, and wait to be told which attempt they are.

Nearly all of a worker's start is Python imports. A standby has them behind it when its group dies.

A standby waits at a socket for one line of JSON that says "go" (command line, environment, log files). Until then it
prints to the supervisor's own log, writes no event and uses no GPU; it ends quietly when the socket's other end does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ft.launch.restart_policy import backoff_seconds
from titan_ft.run import error_file

if TYPE_CHECKING:
    from titan_ft.launch.worker_group import WorkerGroup

SOCKET_ENV = "TITAN_FT_STANDBY"
"""Descriptor of the socket, for workers that are started as standbys."""
MAX_FAILURES = 3
NICE = 5


class Standby:
    """The supervisor's end: one group of workers that waits.

    Args:
        module, args, env, max_restarts: as for `WorkerGroup`; `go` may replace args and add to env.
        num_ranks: of the group.
    """

    def __init__(self, module: str, args: list[str], env: Mapping[str, str], num_ranks: int, max_restarts: int) -> None:
        from titan_ft.launch.worker_group import WorkerGroup

        pairs = [socket.socketpair() for _ in range(num_ranks)]
        self._connections = [own for own, _ in pairs]
        try:
            sockets = [theirs for _, theirs in pairs]
            self.group: WorkerGroup = WorkerGroup(module, args, env, num_ranks, max_restarts, standby=sockets)
        except BaseException:
            self._close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    def go(self, args: list[str], env: Mapping[str, str], logs: Mapping[int, Path]) -> bool:
        """Let the workers begin, with this command line, further environment and log files.

        Returns False when one of them is gone; then the group is of no use any more, and is to be ended.
        """
        for log in logs.values():
            log.parent.mkdir(parents=True, exist_ok=True)
        message = {"args": args, "env": dict(env), "logs": [str(logs[rank]) for rank in sorted(logs)]}
        try:
            for connection in self._connections:
                connection.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            return False
        finally:
            self._close()
        return not self.group.exits()

    def end(self) -> None:
        """End the workers, which hold nothing that is worth a grace time."""
        self._close()
        self.group.end(0.0)

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()


class StandbyKeeper:
    """Keep one standby, and replace it when it dies, but not for ever: a run does without.

    Args:
        start: makes a standby.
    """

    def __init__(self, start: Callable[[], Standby]) -> None:
        self._start = start
        self._standby: Standby | None = None
        self._num_failures = 0
        self._not_before = 0.0

    def keep(self, due: bool) -> None:
        """Look after the standby; start one if there is none and it is `due`. To be called every now and then."""
        standby = self._standby
        if standby is not None:
            exits = standby.group.exits()
            if exits:
                self._standby = None
                standby.end()
                self._note_failure(exits[0].describe())
        elif due and self._num_failures < MAX_FAILURES and time.monotonic() >= self._not_before:
            try:
                self._standby = self._start()
            except OSError as error:  # out of processes or files: the run itself may still go on
                self._note_failure(str(error))

    def take(self) -> Standby | None:
        """Hand over the standby unless it has died; one that still imports is ahead of workers started now."""
        standby, self._standby = self._standby, None
        if standby is None:
            return None
        if standby.group.exits():
            standby.end()
            return None
        self._num_failures = 0
        return standby

    def end(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.end()

    def kill(self) -> None:
        """Kill the workers only; safe from another thread."""
        standby = self._standby
        if standby is not None:
            standby.group.kill()

    def _note_failure(self, what: str) -> None:
        self._num_failures += 1
        self._not_before = time.monotonic() + backoff_seconds(self._num_failures)
        more = self._num_failures < MAX_FAILURES
        rest = "another one follows" if more else "no other follows, so that restarts take longer"
        print(f"a standby failed: {what}; {rest}", file=sys.stderr, flush=True)


def wait_for_go(imports: Callable[[], None]) -> list[str]:
    """The worker's end: run `imports` in the background until told to go; return the command line to run with.

    Returns at once, with this process's own command line, in a worker that is no standby. Ends the process when the
    supervisor is gone or does not need it.
    """
    descriptor = os.environ.pop(SOCKET_ENV, "")
    if not descriptor:
        return sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    # A thread may be slow for as long as it lives; the process needs rights to become fast again.
    thread = threading.Thread(target=_import, args=(imports,), name="standby_imports", daemon=True)
    thread.start()
    line = b""
    with contextlib.suppress(ConnectionError), connection.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    _hurry()
    message: dict[str, Any] = json.loads(line)
    os.environ.update(message["env"])
    log = message["logs"][int(os.environ["RANK"])]
    os.environ[error_file.FILE_ENV] = str(error_file.beside(Path(log)))
    _redirect_output(log)
    thread.join()
    connection.close()
    return list(message["args"])


def _import(imports: Callable[[], None]) -> None:
    """Import at low priority, so that the group that trains is hardly slower."""
    _slow_down()
    try:
        imports()
    except BaseException:  # noqa: BLE001  # thread edge: its supervisor sees this process end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _slow_down() -> None:
    """Give this thread idle priority if that can be undone, else a somewhat lower one.

    Linux lets a thread leave the idle class only with CAP_SYS_NICE or RLIMIT_NICE. Without, a worker that is told to
    go before its imports are done would starve on a busy host.
    """
    if not hasattr(os, "sched_setscheduler"):
        return
    undone: list[bool] = []

    def probe() -> None:
        undone.append(_set_policy(0, os.SCHED_IDLE) and _set_policy(0, os.SCHED_OTHER))

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    if undone == [True]:
        _set_policy(0, os.SCHED_IDLE)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux of this thread only


def _hurry() -> None:
    """Take this process's threads out of the idle class, where they may have got to."""
    if hasattr(os, "sched_setscheduler"):
        for thread in os.listdir("/proc/self/task"):
            _set_policy(int(thread), os.SCHED_OTHER)


def _set_policy(thread_id: int, policy: int) -> bool:
    """Set the scheduling policy of a thread (0: this one); says whether it was allowed and the thread still there."""
    try:
        os.sched_setscheduler(thread_id, policy, os.sched_param(0))
    except OSError:
        return False
    return True


def _redirect_output(path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
