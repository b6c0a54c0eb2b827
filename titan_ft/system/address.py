# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Addresses as text, host:port; a numeric host of IPv6 stands in brackets. And those of this host."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

ALL_HOSTS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
"""Where a server listens that is to be reached at every address of its host."""
# Reserved for documentation, so that they lead through the default route, if there is one. Nothing is sent there.
_ELSEWHERE = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
_IPV6_ADDR_PREFERENCES, _PREFER_PUBLIC = 72, 2  # linux/in6.h; Python has no names for them
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MAX_PORT = 65535
_GLOBAL_SCOPE = "00"  # of a line in /proc/net/if_inet6


def bracketed(host: str) -> str:
    """Return a host as addresses have it."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Return host:port."""
    return f"{bracketed(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port or http://host:port.

    Raises:
        ValueError: the port is no number, or no port has it.
    """
    host, _, port = address.split("//", 1)[-1].rstrip("/").rpartition(":")
    # int() takes "+1", " 1" and "1_0" as well.
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"{address!r} has no port")
    return host.strip("[]"), int(port)


def is_unspecified(host: str) -> bool:
    """True for a numeric host that stands for all addresses of the host, such as :: or 0.0.0.0.

    Raises:
        ValueError: the host is no number.
    """
    return ipaddress.ip_address(host.strip("[]")).is_unspecified


def is_loopback(address: str) -> bool:
    """True if an address, http://HOST:PORT or HOST:PORT, is on this host only."""
    try:
        host, _ = split_address(address)
    except ValueError:  # a file: its lighthouse may be anywhere
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def usable_bind(host: str) -> str:
    """Return where a server listens that was asked to listen at `host`: 0.0.0.0 for :: on a host without IPv6."""
    if host == ALL_HOSTS[socket.AF_INET6] and not socket.has_dualstack_ipv6():
        return ALL_HOSTS[socket.AF_INET]
    return host


def find_source_address(host: str, port: int) -> str:
    """Return the numeric address of the interface of this host that leads to another host. Looks up no own name.

    Raises:
        OSError: the host's name is not known, or no route leads there.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            # A temporary address (RFC 8981) is gone after a day, and a run lasts longer.
            with contextlib.suppress(OSError):
                probe.setsockopt(socket.IPPROTO_IPV6, _IPV6_ADDR_PREFERENCES, _PREFER_PUBLIC)
        probe.connect(target)  # a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def find_own_address(bind: str) -> str:
    """Return the numeric address at which other hosts reach a server of this host that listens at all addresses.

    It is that of the interface which leads out. A cluster without a default route has none: then it is the first
    address of an interface. Only a host without a network is left with its loopback.

    Args:
        bind: where the server listens: :: takes IPv4 as well, 0.0.0.0 takes nothing else.
    """
    families = [socket.AF_INET]
    if is_unspecified(bind) and ":" in bind:
        families.append(socket.AF_INET6)
    for family in families:
        with contextlib.suppress(OSError):
            return find_source_address(_ELSEWHERE[family], 9)
    return next(_interface_addresses(families), "127.0.0.1")


def _interface_addresses(families: Sequence[socket.AddressFamily]) -> Iterator[str]:
    """Yield the addresses of this host that are neither the loopback nor of one link only."""
    if socket.AF_INET in families:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # an interface without an IPv4 address
                    found = ipaddress.ip_address(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])
                    if not (found.is_loopback or found.is_link_local):
                        yield str(found)
    if socket.AF_INET6 in families:
        with contextlib.suppress(OSError):  # a host without IPv6
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                number, _, _, scope, *_ = line.split()
                found = ipaddress.IPv6Address(int(number, 16))
                if scope == _GLOBAL_SCOPE and not found.is_loopback:
                    yield str(found)
