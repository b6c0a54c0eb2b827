# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lose what comes in on this process's TCP connections, as if somebody had pulled the cable, or had damaged it.

A socket filter (classic BPF, `SO_ATTACH_FILTER`) that takes nothing drops each packet before TCP sees it: neither data
nor the acknowledgements of our own data arrive, and nobody is told. What this process sends leaves it as long as the
window allows; no answer comes back. When the filter is gone TCP sends again what was lost, so that a short outage costs
time only. Linux only; needs no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # <asm-generic/socket.h>; Python's socket module has neither
_LISTEN = 0x0A  # <net/tcp_states.h>
# <linux/filter.h>: BPF_LD|BPF_W|BPF_ABS of the random number, BPF_JMP|BPF_JGE|BPF_K, BPF_RET|BPF_K
_LOAD, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
_WHOLE_PACKET = 0xFFFFFFFF


def supported() -> bool:
    """Say whether this system has socket filters."""
    return sys.platform == "linux"


@dataclass(frozen=True)
class Connection:
    """A TCP socket of this host."""

    local: Endpoint
    peer: Endpoint
    state: int
    inode: int  # 0 = none of a process


class Blackhole:
    """Loses packets that come in on this process's TCP sockets, listening ones too; all but those of its own kind.

    Args:
        loss: probability that a packet is lost; 1 = all of them.
        friends: processes of this host, connections to which are spared.
        spared: remote endpoints, host and port, connections to which are spared as well.
    """

    def __init__(self, loss: float, friends: Collection[int] = (), spared: Collection[tuple[str, int]] = ()) -> None:
        self._program = _drop_program(loss)
        self._friends = {os.getpid(), *friends}
        self._spared = {endpoint for host, port in spared for endpoint in _resolve(host, port)}
        self._filtered: set[int] = set()  # inodes

    def extend(self) -> int:
        """Take in the sockets that are new; returns the number of sockets that lose packets now."""
        connections = {connection.inode: connection for connection in _connections()}
        spared: set[int] | None = None
        for fd, inode in _own_sockets():
            connection = connections.get(inode)
            if inode in self._filtered or connection is None:
                continue
            if spared is None:  # found only when there is something new: it looks through other processes
                spared = self._find_spared(connections.values())
            if inode not in spared and _set_option(fd, inode, _SO_ATTACH_FILTER, self._program):
                self._filtered.add(inode)
        return len(self._filtered)

    def lift(self) -> None:
        """Let everything through again; also on the connections that a listening socket has taken meanwhile.

        A connection waits in its listener's queue until it is accepted, and has the filter too: call it again later.
        """
        tcp = {connection.inode for connection in _connections()}
        for fd, inode in _own_sockets():
            if inode in tcp or inode in self._filtered:
                _set_option(fd, inode, _SO_DETACH_FILTER, struct.pack("i", 0))
        self._filtered.clear()

    def _find_spared(self, connections: Collection[Connection]) -> set[int]:
        """Return the inodes of the sockets whose other end is one of the friends, or spared."""
        theirs = {inode for pid in self._friends for inode in _inodes(pid)}
        ends = {(c.local, c.peer) for c in connections if c.inode in theirs}
        listeners = {c.local for c in connections if c.inode in theirs and c.state == _LISTEN}
        spared = set()
        for c in connections:
            here = c.peer[0].is_loopback or c.peer[0] == c.local[0]
            # By the listener: what a friend has not accepted yet, or is accepting just now, is no file of its own.
            answered = c.peer in listeners or (
                here and any(port == c.peer[1] and address.is_unspecified for address, port in listeners)
            )
            if (c.peer, c.local) in ends or answered or c.peer in self._spared:
                spared.add(c.inode)
        return spared


def _drop_program(loss: float) -> bytes:
    """Return the instructions of a filter that loses packets: 16-bit code, 2 jump offsets, 32-bit operand each."""
    if loss >= 1:
        return struct.pack("HBBI", _RETURN, 0, 0, 0)
    return b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, _RANDOM),
            (_JUMP_IF_AT_LEAST, 0, 1, int(loss * 2**32)),
            (_RETURN, 0, 0, _WHOLE_PACKET),
            (_RETURN, 0, 0, 0),
        )
    )


def _set_option(fd: int, inode: int, option: int, value: bytes) -> bool:
    """Set or remove the filter of the socket, if the descriptor is still its own; says whether it was done."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        copy = os.dup(fd)  # the number may be closed and given away at any time
    except OSError:
        return False
    try:
        if os.fstat(copy).st_ino != inode:
            return False
        data = ctypes.create_string_buffer(value, len(value))
        if option == _SO_ATTACH_FILTER:  # it takes a struct sock_fprog: number of instructions, pointer to them
            program = struct.pack("HP", len(value) // 8, ctypes.addressof(data))
            argument = ctypes.create_string_buffer(program, len(program))
        else:
            argument = data
        return int(libc.setsockopt(copy, socket.SOL_SOCKET, option, argument, len(argument))) == 0
    finally:
        os.close(copy)


def _own_sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of this process's sockets of any kind."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the one that lists this folder
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _inodes(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets; none of one that is gone or somebody else's."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(entry.path)
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino


def _connections() -> list[Connection]:
    """Return the TCP sockets of this network namespace."""
    found = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/self/net", name)
        lines = path.read_text().splitlines()[1:] if path.exists() else []  # a kernel may be without IPv6
        for line in lines:
            _, local, peer, state, _, _, _, _, _, inode, *_ = line.split()
            found.append(Connection(_parse(local), _parse(peer), int(state, 16), int(inode)))
    return found


def _parse(text: str) -> Endpoint:
    """Return the endpoint of "0100007F:1F90"; an address is 32-bit words of the host's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IPv4 address that is mapped into IPv6 as what it is: the two ends may see it in different ways."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _resolve(host: str, port: int) -> Iterator[Endpoint]:
    with contextlib.suppress(OSError):  # a name that nobody knows is no endpoint
        for *_, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            yield _plain(ipaddress.ip_address(str(address[0]).partition("%")[0])), port
