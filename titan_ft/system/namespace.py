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

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _UP_AND_LOOPBACK = 0x8914, 0x41 | 0x8  # linux/sockios.h, linux/if.h
_SYS_ADMIN = 1 << 21  # linux/capability.h: CAP_SYS_ADMIN


def allow_namespaces() -> str:
    """Let threads of this process enter network namespaces; returns why they cannot, or nothing.

    Call it while the process has one thread: Linux moves no process with several into a user
    namespace. Files and processes stay those of the same user.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    refusal = _try_in_child()
    if not refusal and not _has_rights():
        _enter_user_namespace()
    return refusal


def enter_network_namespace() -> None:
    """Move this thread, and threads and processes that it starts, to a new network namespace.

    Sockets that are open stay where they are.

    Raises:
        OSError: the system does not allow it (see `allow_namespaces`).
    """
    _unshare(_NEW_NETWORK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_LOOPBACK))


def _try_in_child() -> str:
    """Enter both namespaces in a child: a half-made user namespace would leave this process without its user."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if not _has_rights():
                _enter_user_namespace()
            enter_network_namespace()
        except OSError as error:
            os.write(writes, os.fsencode(error.strerror or str(error)))
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8", errors="replace") as answer:
        refusal = answer.read()
    os.waitpid(child, 0)
    return refusal


def _enter_user_namespace() -> None:
    """Enter a user namespace in which this process's user and group have their numbers."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _has_rights() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & _SYS_ADMIN)


def _unshare(flags: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
