# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group between the replica groups: torchft's reconfigurable ones, with a Gloo that breaks off.

Gloo has no abort: an operation that waits for a peer which lives, but is stopped or cannot be reached, waits for its
whole timeout. Its connections are ordinary sockets of this process, though: shutting them down under it ends it, and
shows it to the peers that wait for this process.

Gloo does not tell an operation whose send is on its way that the connection is gone, not even when the peer has died:
that one waits for its whole timeout all the same. So nobody here waits for an operation once the process group is
aborted; it is left to itself, and may touch its tensors until it ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from titan_ft.run.process import borrowed_socket, own_sockets

_LOOK_SECONDS = 0.1  # between two looks whether an operation that takes long was broken off


def build_process_group(backend: str, timeout: timedelta) -> ProcessGroup:
    """Build the process group of a backend, "gloo" or "nccl"; it has no members until it is configured."""
    logging.getLogger("torchft_errors").setLevel(logging.WARNING)  # an empty line at every abort, for telemetry only
    return BreakableGloo(timeout=timeout) if backend == "gloo" else ProcessGroupNCCL(timeout=timeout)


class _Operation:
    """An operation under way: `wait` ends with it, or soon after its process group was aborted."""

    def __init__(self, work: Any, aborted: threading.Event) -> None:
        self._work, self._aborted = work, aborted

    def wait(self) -> bool:
        """Wait for the operation.

        Raises:
            RuntimeError: it failed, or was broken off.
        """
        while True:
            try:
                return bool(self._work.wait(timedelta(seconds=_LOOK_SECONDS)))
            except RuntimeError:
                if self._work.is_completed():
                    return bool(self._work.wait())  # it has failed, or worked just now
            if self._aborted.is_set():
                raise RuntimeError("broken off")


class BreakableGloo(ProcessGroupGloo):
    """A reconfigurable Gloo process group whose `abort` ends operations that wait for a peer, and waits for none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sockets: set[int] = set()
        self._aborted = threading.Event()  # of the process group in force

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        before, self._aborted = _inodes(), threading.Event()
        try:
            return super()._create_pg(*args, **kwargs)
        finally:
            # What another thread opened meanwhile is among them: a fetch of state, a request. Both are tried again.
            self._sockets = _inodes() - before

    def abort(self, errored: bool = True) -> None:
        """Break off all operations and drop the process group; not `errored`: drop it, nothing is under way."""
        sockets, self._sockets = self._sockets, set()
        dropped = [self._pg]
        if errored:
            self._aborted.set()
            for descriptor, inode in own_sockets():
                if inode in sockets:
                    _shut_down(descriptor, inode)
        super().abort(errored)
        if errored:  # whoever drops it last waits for its operations: a thread that nobody waits for
            threading.Thread(target=dropped.clear, name="titan_ft_gloo_drop", daemon=True).start()

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return _Operation(work, self._aborted)


def _inodes() -> set[int]:
    return {inode for _, inode in own_sockets()}


def _shut_down(descriptor: int, inode: int) -> None:
    """End a connection in both directions; its owner still has to close it."""
    with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:  # gone already
        if connection is not None:
            tcp = connection.proto == socket.IPPROTO_TCP
            # Gloo ends the process when its listening socket fails.
            if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
