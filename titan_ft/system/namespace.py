# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces of one's own: a loopback interface that no other process of the host reaches.

Linux allows them to root, and in a user namespace to everybody. Some systems and containers forbid
them (Ubuntu's AppArmor rule, a seccomp profile).
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
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3; 0 = this thread
_CAPABILITY_DATA = struct.Struct("=6I")  # effective, permitted, inheritable of 0 to 31; then those of 32 to 63
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2  # linux/prctl.h


def allow_namespaces() -> str:
    """Let threads of this process enter network namespaces; returns why they cannot, or nothing.

    Call it while the process has one thread: Linux moves no process with several into a user
    namespace. Files and processes stay those of the same user.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    refusal = _try_in_child()
    if not refusal and not _have_rights():
        _enter_user_namespace()
    return refusal


def enter_network_namespace() -> None:
    """Move this thread, and threads and processes that it starts, to a new network namespace.

    Sockets that are open stay where they are.

    Raises:
        OSError: the system does not allow it (see `allow_namespaces`).
    """
    _call("unshare", _NEW_NETWORK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_LOOPBACK))


def _try_in_child() -> str:
    """Enter both namespaces in a child: a half-made user namespace would leave this process without its user."""
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
    # A seccomp profile may end a process that calls unshare.
    return refusal or (f"wait status {status}" if status else "")


def _enter_user_namespace() -> None:
    """Enter a user namespace in which this process's user and group have their numbers."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _keep_rights_after_exec()


def has_rights(status: str) -> bool:
    """True if a process may make network namespaces, by the text of its /proc/PID/status."""
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _have_rights() -> bool:
    return has_rights(Path("/proc/self/status").read_text())


def _keep_rights_after_exec() -> None:
    """Keep the right to make network namespaces for when this process replaces itself by exec.

    Without it, each replacement would enter one more user namespace inside the last one, and Linux
    allows 32 levels.
    """
    import ctypes  # not above: workers load this module, and need no foreign functions

    data = ctypes.create_string_buffer(_CAPABILITY_DATA.size)
    _call("capget", _CAPABILITY_HEADER, data)
    effective, permitted, inheritable, *later = _CAPABILITY_DATA.unpack(data.raw)
    inheritable |= 1 << _CAP_NET_ADMIN | 1 << _CAP_SYS_ADMIN
    _call("capset", _CAPABILITY_HEADER, _CAPABILITY_DATA.pack(effective, permitted, inheritable, *later))
    for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN):
        _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library.

    Raises:
        OSError: it failed.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
