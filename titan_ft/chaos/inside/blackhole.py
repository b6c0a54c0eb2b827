# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lose incoming packets of this process's TCP connections, as with a pulled or damaged cable.

A socket filter (classic BPF, `SO_ATTACH_FILTER`) that accepts nothing drops each packet before TCP
sees it. Neither data nor acknowledgements arrive, and no end is notified. This process can still
send until the window is full. When the filter is removed, TCP sends the lost data again, so a short
outage costs only time. Linux only; needs no privilege.
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

# <asm-generic/socket.h>; Python's socket module has neither.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = (26, 27)
_LISTEN = 0x0A  # <net/tcp_states.h>
_MAX_LOOKS = 12  # looks at a socket before it is never looked at again; together 20 s
_FIRST_PAUSE_SECONDS = 0.005  # pause between the first two looks at a socket; doubles each time
# <linux/filter.h>: BPF_LD|BPF_W|BPF_ABS of the random number, BPF_JMP|BPF_JGE|BPF_K, BPF_RET|BPF_K
_LOAD, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
_WHOLE_PACKET = 0xFFFFFFFF


def supported() -> bool:
    """Return whether this system has socket filters."""
    return sys.platform == "linux"


@dataclass(frozen=True)
class Connection:
    """A TCP socket of this host."""

    local: Endpoint
    peer: Endpoint
    state: int
    inode: int


Choice = Callable[[Collection[Connection]], set[int]]
"""Maps the sockets of this host to inodes that lose packets. Those of other processes are
ignored.
"""


class Blackhole:
    """Loses incoming packets on chosen TCP sockets of this process.

    Threads may share it. A process uses one at a time, because `lift` removes the filters of all
    TCP sockets of the process.

    Args:
        loss: probability that a packet is lost; 1 = all packets.
        choose: chooses the sockets; called while there are new ones.
    """

    def __init__(self, loss: float, choose: Choice) -> None:
        self._program = _drop_program(loss)
        self._choose = choose
        self._filtered: set[int] = set()
        """Inodes of sockets with a filter."""
        self._settled: set[int] = set()
        """Inodes that need no further look: with a filter, never chosen, or no TCP."""
        self._looks: Counter[int] = Counter()
        """Number of looks in which a socket was not chosen, by inode."""
        self._next_look: dict[int, float] = {}
        """Monotonic seconds of the next look, by inode."""
        self._lifted = False
        self._lock = threading.Lock()

    def extend(self) -> int:
        """Give new sockets the filter. Returns the number of sockets that lose packets."""
        with self._lock:
            now = time.monotonic()
            new = [(fd, inode) for fd, inode in own_sockets() if self._is_due(inode, now)]
            # A thread may call this after `lift`, and no later call would remove its filters.
            if new and not self._lifted:
                self._attach(new)
            return len(self._filtered)

    @contextlib.contextmanager
    def looking_after(self, *methods: tuple[Any, str]) -> Iterator[None]:
        """Look for new sockets after each call of these methods, before their connections are used.

        Args:
            methods: pairs of an owner and the name of a method that it inherits.
        """

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
            # The owner inherits the method, so the original appears again.
            for owner, name in methods:
                delattr(owner, name)

    def lift(self) -> None:
        """Remove the filters for good, from all TCP sockets of this process.

        A connection in a listener's queue inherits the filter, and has no descriptor until it is
        accepted. Call `lift` again later to reach such a connection.
        """
        with self._lock:
            self._lifted = True
            tcp = {connection.inode for connection in connections_here()}
            for fd, inode in own_sockets():
                if inode in tcp or inode in self._filtered:
                    _set_option(fd, inode, _SO_DETACH_FILTER, struct.pack("i", 0))
            self._filtered.clear()

    def _is_due(self, inode: int, now: float) -> bool:
        return inode not in self._settled and now >= self._next_look.get(inode, now)

    def _attach(self, new: Collection[tuple[int, int]]) -> None:
        connections = {connection.inode: connection for connection in connections_here()}
        chosen = self._choose(connections.values())
        for fd, inode in new:
            if inode not in connections:
                # A TCP socket without a connection is in no table yet: look again.
                if not _is_tcp(fd, inode):
                    self._settled.add(inode)
            elif inode not in chosen:
                # The table may have missed the other end of the connection: look again later.
                pause = _FIRST_PAUSE_SECONDS * 2 ** self._looks[inode]
                self._next_look[inode] = time.monotonic() + pause
                self._looks[inode] += 1
                if self._looks[inode] == _MAX_LOOKS:
                    self._settled.add(inode)
            elif _set_option(fd, inode, _SO_ATTACH_FILTER, self._program):
                self._settled.add(inode)
                self._filtered.add(inode)


def all_but(own_pids: Collection[int] = (), spared: Collection[tuple[str, int]] = ()) -> Choice:
    """Choose all sockets, listening ones too, except those connected to this process's own group.

    Args:
        own_pids: processes of the group on this host.
        spared: endpoints (host and port) of the group on other hosts.
    """
    pids = {os.getpid(), *own_pids}
    endpoints: set[Endpoint] = set()
    for host, port in spared:
        endpoints.update(_resolve(host, port))

    def choose(connections: Collection[Connection]) -> set[int]:
        own = connected_to(pids, connections)
        return {c.inode for c in connections if c.inode not in own and c.peer not in endpoints}

    return choose


def connections_here() -> list[Connection]:
    """Return the TCP sockets of this network namespace that belong to processes."""
    # Linux returns the table a page at a time, and remembers its place as a bucket and a position
    # in the bucket. If another connection of the bucket closes between two pages, the next
    # connection is missed. With a table of 16 buckets, 2 to 4 reads of 100 missed a connection that
    # was open all the time. A missed connection to a peer would keep its packets. So the table is
    # read twice. Beside a process that opens and closes a thousand connections that is not enough:
    # see `_MAX_LOOKS`.
    found = dict.fromkeys(_read_table())
    found.update(dict.fromkeys(_read_table()))
    return list(found)


def _read_table() -> Iterator[Connection]:
    for name in ("tcp", "tcp6"):
        path = Path("/proc/self/net", name)
        # A kernel may be built without IPv6.
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            _, local, peer, state, _, _, _, _, _, inode, *_ = line.split()
            # Sockets in TIME_WAIT belong to no process. Parsing 13,000 of them delayed a fault by
            # 20 s.
            if inode == "0":
                continue
            yield Connection(_parse(local), _parse(peer), int(state, 16), int(inode))


def connected_to(pids: Collection[int], connections: Collection[Connection]) -> set[int]:
    """Return the inodes of the sockets whose other end is one of these processes of this host."""
    inodes: set[int] = set()
    for pid in pids:
        inodes.update(sockets_of(pid))
    ends = {(c.local, c.peer) for c in connections if c.inode in inodes}
    # A connection that a process has yet to accept has no descriptor. Its listener identifies it.
    listeners = {c.local for c in connections if c.inode in inodes and c.state == _LISTEN}
    ports_of_any_address = {port for address, port in listeners if address.is_unspecified}
    found = set()
    for c in connections:
        address, port = c.peer
        is_local = address.is_loopback or address == c.local[0]
        to_process = (c.peer, c.local) in ends
        to_listener = c.peer in listeners or (is_local and port in ports_of_any_address)
        if to_process or to_listener:
            found.add(c.inode)
    return found


def _drop_program(loss: float) -> bytes:
    """Return a filter's instructions: 16-bit code, two jump offsets, 32-bit operand each."""
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
    """Attach or remove the filter of a socket, if the descriptor is still the socket's.

    Returns:
        True if it was done.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError), borrowed_socket(fd, inode) as borrowed:
        if borrowed is not None:
            data = ctypes.create_string_buffer(value, len(value))
            if option == _SO_ATTACH_FILTER:
                # struct sock_fprog: number of instructions, and a pointer to the instructions.
                program = struct.pack("HP", len(value) // 8, ctypes.addressof(data))
                argument = ctypes.create_string_buffer(program, len(program))
            else:
                argument = data
            size = len(argument)
            result = libc.setsockopt(borrowed.fileno(), socket.SOL_SOCKET, option, argument, size)
            return int(result) == 0
    return False


def _is_tcp(fd: int, inode: int) -> bool:
    """Return whether the descriptor is a TCP socket; True also if that cannot be known."""
    with contextlib.suppress(OSError), borrowed_socket(fd, inode) as borrowed:
        if borrowed is not None:
            is_internet = borrowed.family in (socket.AF_INET, socket.AF_INET6)
            return is_internet and borrowed.proto == socket.IPPROTO_TCP
    return True


def _parse(endpoint: str) -> Endpoint:
    """Parse an endpoint such as "0100007F:1F90". An address is words of the host's byte order."""
    words, _, port = endpoint.partition(":")
    packed = b""
    for start in range(0, len(words), 8):
        packed += int(words[start : start + 8], 16).to_bytes(4, sys.byteorder)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IPv4-mapped IPv6 address as IPv4. One end may see the mapped form only."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _resolve(host: str, port: int) -> Iterator[Endpoint]:
    # A name that cannot be resolved has no endpoint.
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            yield _plain(ipaddress.ip_address(str(address[0]).partition("%")[0])), port
