# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The store of a group's attempt, in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist


def test_a_store_serves_until_it_is_ended() -> None:
    """At its given socket. It sends no query to a name server, which torch would do for every
    connection.

    It takes more connections than the usual limit of descriptors allows.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    code = (
        "import os, resource, sys\n"
        "from titan_ft.launch import store_server\n"
        "serve = store_server.serve\n"
        "store_server.serve = lambda listener: (serve(listener), print(os.environ['RES_OPTIONS'], flush=True))[0]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "store_server.main()\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(listener.fileno())],
        env=environ,
        pass_fds=[listener.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = listener.getsockname()[1]
        listener.close()
        assert server.stdout is not None
        assert server.stdout.readline() == "attempts:0\n"
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        store.set("key", "value")
        assert store.get("key") == b"value"
        others = [
            dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30)) for _ in range(100)
        ]
        assert others[-1].get("key") == b"value"
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()


WITHOUT_IPV6 = """
import socket
from titan_ft.launch import store_server
listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
socket.create_connection(store_server.reachable(listener), timeout=10).close()
print("reached")
"""


def test_a_store_at_all_addresses_is_reached_where_ipv6_is_switched_off() -> None:
    """In many containers and clusters a socket can listen at ::, and no process can connect
    to ::1.
    """
    command = 'ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && exec "$@"'
    without = ["unshare", "--net", "sh", "-c", command, "sh"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*without, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no network namespace can be made here")
    done = subprocess.run(
        [*without, sys.executable, "-c", WITHOUT_IPV6],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "reached\n", done.stderr
