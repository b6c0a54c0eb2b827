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
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ft.system.process import borrowed_socket, own_sockets, sockets_of

Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # <asm-generic/socket.h>; Python's socket module has neither
_LISTEN = 0x0A  # <net/tcp_states.h>
_LOOKS = 12  # at a new socket, until it is left alone for good: 20 s
_FIRST_PAUSE_SECONDS = 0.005  # between two looks at a socket; doubles
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
    inode: int


Choice = Callable[[Collection[Connection]], set[int]]
"""Given the sockets of this host, returns the inodes of those that lose packets; others' among them do not matter."""


class Blackhole:
    """Loses packets that come in on those of this process's TCP sockets that it chooses. Threads may share it.

    Args:
        loss: probability that a packet is lost; 1 = all of them.
        choose: says which sockets; asked about each while it is new.
    """

    def __init__(self, loss: float, choose: Choice) -> None:
        self._program, self._choose = _drop_program(loss), choose
        self._filtered: set[int] = set()  # inodes, as below
        self._judged: set[int] = set()  # all that need no further look: also those left alone, and no TCP at all
        self._looks: Counter[int] = Counter()  # in which a socket was not chosen
        self._next_look: dict[int, float] = {}  # monotonic seconds, by inode
        self._lifted = False
        self._lock = threading.Lock()

    def extend(self) -> int:
        """Take in the sockets that are new; returns the number of sockets that lose packets now."""
        with self._lock:
            now = time.monotonic()
            new = [(fd, inode) for fd, inode in own_sockets() if self._is_due(inode, now)]
            # A thread may call this after `lift`: nobody would remove a filter that was attached then.
            if new and not self._lifted:
                self._take(new)
            return len(self._filtered)

    @contextlib.contextmanager
    def looking_after(self, *methods: tuple[Any, str]) -> Iterator[None]:
        """Look for new sockets after each call of these methods (owner, name), before what they opened is used."""

        def look_after(act: Callable[..., Any]) -> Callable[..., Any]:
            def act_and_look(*args: Any, **kwargs: Any) -> Any:
                try:
                    return act(*args, **kwargs)
                finally:
                    self.extend()

            return act_and_look

        for owner, name in methods:
            setattr(owner, name, look_after(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in methods:  # inherited ones, which the owner itself had not
                delattr(owner, name)

    def lift(self) -> None:
        """Let everything through again for good; also on the connections that a listening socket has taken meanwhile.

        A connection waits in its listener's queue until it is accepted, and has the filter too: call it again later.
        """
        with self._lock:
            self._lifted = True
            tcp = {connection.inode for connection in connections_here()}
            for fd, inode in own_sockets():
                if inode in tcp or inode in self._filtered:
                    _set_option(fd, inode, _SO_DETACH_FILTER, struct.pack("i", 0))
            self._filtered.clear()

    def _is_due(self, inode: int, now: float) -> bool:
        return inode not in self._judged and now >= self._next_look.get(inode, now)

    def _take(self, new: Collection[tuple[int, int]]) -> None:
        connections = {connection.inode: connection for connection in connections_here()}
        chosen = self._choose(connections.values())
        for fd, inode in new:
            if inode not in connections:
                # A TCP socket that is not connected yet is in no list, and is one to look at again.
                if not _is_tcp(fd, inode):
                    self._judged.add(inode)
            elif inode not in chosen:
                # The table may have passed over the other end of its connection.
                self._next_look[inode] = time.monotonic() + _FIRST_PAUSE_SECONDS * 2 ** self._looks[inode]
                self._looks[inode] += 1
                if self._looks[inode] == _LOOKS:
                    self._judged.add(inode)
            elif _set_option(fd, inode, _SO_ATTACH_FILTER, self._program):
                self._judged.add(inode)
                self._filtered.add(inode)


def all_but(own_pids: Collection[int] = (), spared: Collection[tuple[str, int]] = ()) -> Choice:
    """Choose all sockets, listening ones too, except those connected to this process's own group.

    Args:
        own_pids: processes of the group on this host.
        spared: remote endpoints (host and port) of the group, whose connections stay as well.
    """
    pids = {os.getpid(), *own_pids}
    endpoints = {endpoint for host, port in spared for endpoint in _resolve(host, port)}

    def choose(connections: Collection[Connection]) -> set[int]:
        left_alone = connected_to(pids, connections)
        left_alone |= {c.inode for c in connections if c.peer in endpoints}
        return {c.inode for c in connections} - left_alone

    return choose


def connections_here() -> list[Connection]:
    """Return the TCP sockets of this network namespace that processes have."""
    # Linux gives the table a page at a time, and finds its place again by a bucket and a position in the bucket. If
    # another connection of that bucket closes between two pages, the next one is passed over: with a table of 16
    # buckets, 2 to 4 reads of 100 missed a connection that was open all the time. A connection to a group that is
    # passed over would be taken for one that keeps its packets. So the table is read twice. Beside a process that opens
    # and closes a thousand connections that is not enough: see `_LOOKS`.
    found = {connection: None for _ in range(2) for connection in _read_table()}
    return list(found)


def _read_table() -> Iterator[Connection]:
    for name in ("tcp", "tcp6"):
        path = Path("/proc/self/net", name)
        lines = path.read_text().splitlines()[1:] if path.exists() else []  # a kernel may be without IPv6
        for line in lines:
            _, local, peer, state, _, _, _, _, _, inode, *_ = line.split()
            # Sockets in TIME_WAIT belong to no process. Parsing 13,000 of them delayed a fault by 20 s.
            if inode == "0":
                continue
            yield Connection(_parse(local), _parse(peer), int(state, 16), int(inode))


def connected_to(pids: Collection[int], connections: Collection[Connection]) -> set[int]:
    """Return the inodes of the sockets whose other end is one of these processes of this host."""
    theirs = {inode for pid in pids for inode in sockets_of(pid)}
    ends = {(c.local, c.peer) for c in connections if c.inode in theirs}
    listeners = {c.local for c in connections if c.inode in theirs and c.state == _LISTEN}
    found = set()
    for c in connections:
        here = c.peer[0].is_loopback or c.peer[0] == c.local[0]
        # A connection that they have yet to accept has no descriptor of theirs: their listening socket shows it.
        answered = c.peer in listeners or (
            here and any(port == c.peer[1] and address.is_unspecified for address, port in listeners)
        )
        if (c.peer, c.local) in ends or answered:
            found.add(c.inode)
    return found


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
    with contextlib.suppress(OSError), borrowed_socket(fd, inode) as borrowed:
        if borrowed is not None:
            data = ctypes.create_string_buffer(value, len(value))
            if option == _SO_ATTACH_FILTER:  # it takes a struct sock_fprog: number of instructions, pointer to them
                program = struct.pack("HP", len(value) // 8, ctypes.addressof(data))
                argument = ctypes.create_string_buffer(program, len(program))
            else:
                argument = data
            return int(libc.setsockopt(borrowed.fileno(), socket.SOL_SOCKET, option, argument, len(argument))) == 0
    return False


def _is_tcp(fd: int, inode: int) -> bool:
    """Say whether the descriptor's socket is one of TCP; true as well if that cannot be known."""
    with contextlib.suppress(OSError), borrowed_socket(fd, inode) as borrowed:
        if borrowed is not None:
            return borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.proto == socket.IPPROTO_TCP
    return True


def _parse(endpoint: str) -> Endpoint:
    """Return the endpoint of "0100007F:1F90"; an address is 32-bit words of the host's byte order."""
    words, _, port = endpoint.partition(":")
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
