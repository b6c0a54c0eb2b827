# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group between the replica groups: torchft's reconfigurable ones, with a Gloo that breaks off.

Gloo has no abort: an operation that waits for a peer which lives, but is stopped or cannot be reached, waits for its
whole timeout. Its connections are ordinary sockets of this process, though: shutting them down under it ends it. A
peer sees it if it waits for this process, not if it waits for the same third one; and an operation in the middle of a
send may miss it, and then has its timeout. Elsewhere than on Linux no sockets are listed: all have their timeout.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from datetime import timedelta
from typing import Any

from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from titan_ft.run.process import borrowed_socket, own_sockets


def build_process_group(backend: str, timeout: timedelta) -> ProcessGroup:
    """Build the process group of a backend, "gloo" or "nccl"; it has no members until it is configured."""
    logging.getLogger("torchft_errors").setLevel(logging.WARNING)  # an empty line at every abort, for telemetry only
    return BreakableGloo(timeout=timeout) if backend == "gloo" else ProcessGroupNCCL(timeout=timeout)


class BreakableGloo(ProcessGroupGloo):
    """A reconfigurable Gloo process group whose `abort` ends operations that wait for a peer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sockets: set[int] = set()

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        before = _inodes()
        try:
            return super()._create_pg(*args, **kwargs)
        finally:
            # What another thread opened meanwhile is among them: a fetch of state, a request. Both are tried again.
            self._sockets = _inodes() - before

    def abort(self, errored: bool = True) -> None:
        """Break off all operations and drop the process group; not `errored`: drop it, nothing is under way."""
        sockets, self._sockets = self._sockets, set()
        if errored:
            for descriptor, inode in own_sockets():
                if inode in sockets:
                    _shut_down(descriptor, inode)
        super().abort(errored)


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
