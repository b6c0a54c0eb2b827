# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's connection to the lighthouse in processes that are forked from the worker."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import gc, os, signal
from datetime import timedelta

from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

import titan_ft.membership.seat

class Garbage:
    pass

gc.disable()
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
second = timedelta(seconds=1)
server = ManagerServer("one", lighthouse.address(), "localhost", "127.0.0.1:0", "store", 1, second, second, 0)
garbage = Garbage()
garbage.own, garbage.client = garbage, ManagerClient(server.address(), connect_timeout=10 * second)
del garbage
if (child := os.fork()) == 0:
    signal.alarm(20)  # ends it if it hangs
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_client_that_is_garbage_does_not_hang_a_forked_child() -> None:
    """A data loader's worker collects inherited garbage.

    torchft's client would wait for threads that the worker lacks.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "7\n"
