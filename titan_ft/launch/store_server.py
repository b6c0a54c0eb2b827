# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Serve the store at which the workers of one attempt of a group meet, in a process of its own.

The agent starts this process before the workers of the attempt. An agent that forks its workers
cannot serve the store itself, because a process that forks must not have torch's threads. The store
outlives every worker of the attempt, and ends with the agent.

Command line: the descriptor of the listening socket.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from titan_ft.run.orphan import end_with_parent

PID_ENV = "TITAN_FT_STORE_PID"
"""Environment variable of the workers: pid of the process that serves the store of their group.

The connections of that process belong to the group, too.
"""


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Return the host and the port at which processes of this host reach a socket.

    A socket that listens at all addresses is reached at 127.0.0.1, also if it listens at ::, which
    answers IPv4 too. With IPv6 switched off (the sysctl disable_ipv6), a socket can still listen at
    ::, but ::1 cannot be reached.
    """
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return host, port


def serve(listener: socket.socket) -> Any:
    """Serve the store as long as the returned reference lives."""
    import torch.distributed as dist

    host, port = reachable(listener)
    return dist.TCPStore(  # type: ignore[attr-defined] # torch exports it without listing it
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def main() -> None:
    end_with_parent()
    # For its log, torch looks up the name of every peer's address, and the store answers nobody
    # meanwhile. Without attempts, a slow name server cannot delay a rendezvous. The store itself
    # has a numeric address and needs no name server.
    os.environ["RES_OPTIONS"] = "attempts:0"
    # Each rank of the group has connections to this store, and so has each rank of a column that
    # meets here. With the usual limit of 1,024 descriptors the store would refuse the connections
    # of more than about 500 ranks.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    store = serve(socket.socket(fileno=int(sys.argv[1])))
    # No SIGTERM may end the store before the workers. The agent kills the store after them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while store is not None:
        time.sleep(3600.0)


if __name__ == "__main__":
    main()
