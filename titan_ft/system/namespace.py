# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces: a loopback interface that no other process of the host reaches.

On Linux root may make one, and so may every user within a user namespace. Some systems and
containers forbid that (Ubuntu's AppArmor rule, a seccomp profile).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _UP_AND_LOOPBACK = 0x8914, 0x41 | 0x8  # linux/sockios.h, linux/if.h
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # linux/capability.h
# _LINUX_CAPABILITY_VERSION_3, and 0 for this thread.
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
# Effective, permitted and inheritable bits of the capabilities 0 to 31, then of 32 to 63.
_CAPABILITY_DATA = struct.Struct("=6I")
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2  # linux/prctl.h


def allow_namespaces() -> str:
    """Give this process the right to enter network namespaces.

    Call it while the process has one thread: Linux moves no process with several threads into a
    user namespace. Files and processes keep their users.

    Returns:
        Why it is not possible; empty = the process has the right now.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    refusal = _try_in_child()
    if not refusal and not _have_rights():
        _enter_user_namespace()
    return refusal


def enter_network_namespace() -> None:
    """Move this thread to a new network namespace.

    Threads and processes that this thread starts later are in it as well. Open sockets stay in
    their namespace.

    Raises:
        OSError: the system does not allow it (see `allow_namespaces`).
    """
    _call("unshare", _NEW_NETWORK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_LOOPBACK))


def _try_in_child() -> str:
    """Enter both namespaces in a child process. Return why that failed; empty = it worked.

    In this process, a failure halfway would leave a user namespace in which its user does not
    exist.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if not _have_rights():
                _enter_user_namespace()
            enter_network_namespace()
            os._exit(0)
        except OSError as error:
            os.write(writes, os.fsencode(error.strerror or str(error)))
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads, encoding="utf-8", errors="replace") as answer:
        refusal = answer.read()
    _, status = os.waitpid(child, 0)
    if not refusal and status:
        return f"wait status {status}"  # a seccomp profile may end a process that calls unshare
    return refusal


def _enter_user_namespace() -> None:
    """Enter a user namespace in which this process's user and group keep their numbers."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _keep_rights_after_exec()


def has_rights(status: str) -> bool:
    """True if a process may make network namespaces.

    Args:
        status: text of its /proc/PID/status.
    """
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> _CAP_SYS_ADMIN & 1)
    raise ValueError("the status has no line CapEff")


def _have_rights() -> bool:
    return has_rights(Path("/proc/self/status").read_text())


def _keep_rights_after_exec() -> None:
    """Keep the right to make network namespaces when this process replaces itself by exec.

    Otherwise each replacement would enter one more user namespace inside the last one, and Linux
    allows 32 levels.
    """
    import ctypes  # not above: workers load this module, and need no foreign functions

    data = ctypes.create_string_buffer(_CAPABILITY_DATA.size)
    _call("capget", _CAPABILITY_HEADER, data)
    effective, permitted, inheritable, *later = _CAPABILITY_DATA.unpack(data.raw)
    inheritable |= 1 << _CAP_NET_ADMIN | 1 << _CAP_SYS_ADMIN
    changed = _CAPABILITY_DATA.pack(effective, permitted, inheritable, *later)
    _call("capset", _CAPABILITY_HEADER, changed)
    for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN):
        _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns 0 for success.

    Raises:
        OSError: the function failed.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
