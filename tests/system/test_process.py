# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which processes count as ended, and how a process ends and stops listening."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from titan_ft.system.process import Process, shut_listener


def test_processes_are_recognized() -> None:
    """This process lives.

    Another start time of its pid is another process. Processes of other hosts are unknown.
    """
    this = Process.parse(str(Process.this()))
    assert this == Process.this()
    assert not this.is_gone()
    assert replace(this, start="1").is_gone()
    assert not replace(this, start="1", host="elsewhere").is_gone()
    assert not replace(this, start="").is_gone(), "where there is no /proc"


def test_a_listener_that_is_shut() -> None:
    """Open connections and other listeners stay, also one with the same port at another address."""
    with socket.create_server(("127.0.0.1", 0)) as shut, contextlib.ExitStack() as stack:
        address = shut.getsockname()
        others = [("127.0.0.1", 0), ("127.0.0.2", address[1])]
        listeners = [stack.enter_context(socket.create_server(other)) for other in others]
        with socket.create_connection(address) as outside, shut.accept()[0] as inside:
            shut_listener(*address)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            outside.sendall(b"x")
            assert inside.recv(1) == b"x"
            for listener in listeners:
                socket.create_connection(listener.getsockname()).close()


EXITS = """
import ctypes, threading, time

from titan_ft.system.process import end_at_exit

libc = ctypes.CDLL(None)
hang = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda status, _: time.sleep(3600))
libc.on_exit(hang, None)
{call}
threading.Thread(target=libc.exit, args=(7,)).start()
time.sleep(3600)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="needs glibc")
def test_an_exit_on_a_thread_ends_the_process() -> None:
    """torchft's manager calls exit() on a thread. A library's handler would keep the process."""
    ended = subprocess.run(
        [sys.executable, "-c", EXITS.format(call="end_at_exit()")], timeout=60.0, check=False
    )
    assert ended.returncode == 7
    with subprocess.Popen(
        [sys.executable, "-c", EXITS.format(call="print('', flush=True)")]
    ) as stays:
        with pytest.raises(subprocess.TimeoutExpired):
            stays.wait(1.0)
        stays.kill()
