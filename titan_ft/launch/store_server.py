# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Serve the store at which the workers of one attempt of a group meet, in a process of its own.

A fork would lose torch's threads for the store, so a process that forks workers does not serve it.
The store outlives every worker of the attempt, and ends with the agent. Command line: the
descriptor of the listening socket.
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
"""Tells workers which process serves the store of their group: its connections are the group's,
too.
"""


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Return host and port at which this host's processes reach a socket that may listen at all
    addresses.

    A socket at :: answers IPv4 too. With IPv6 switched off (the sysctl disable_ipv6), a socket can
    still listen at ::, but ::1 cannot be reached.
    """
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host), port


def serve(listener: socket.socket) -> Any:
    """Serve the store as long as the returned reference lives."""
    import torch.distributed as dist

    host, port = reachable(listener)
    return dist.TCPStore(  # type: ignore[attr-defined] # torch exports it without listing it
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def main() -> None:
    end_with_parent()
    # torch looks up the name of every peer's address, for its log, and the store answers nobody
    # meanwhile. Its own is a number: it needs no name server, and none that is slow holds up a
    # rendezvous.
    os.environ["RES_OPTIONS"] = "attempts:0"
    # Each rank of the group has connections here, and so has each rank of a column that meets here.
    # With the usual limit of 1,024 descriptors a store accepts no more connections at some 500
    # ranks.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    store = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its agent ends it, after the workers
    while store is not None:
        time.sleep(3600.0)


if __name__ == "__main__":
    main()
