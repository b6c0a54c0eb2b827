# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Addresses as text, host:port, and the addresses of this host.

A numeric IPv6 host stands in brackets: [::1]:8080.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

ALL_HOSTS = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
"""Addresses at which a server listens on every interface of its host."""
# Addresses that are reserved for documentation. The way to them is the default route, if there is
# one. Nothing is sent to them.
_ELSEWHERE = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
_IPV6_ADDR_PREFERENCES, _PREFER_PUBLIC = 72, 2  # linux/in6.h; Python has no names for them
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MAX_PORT = 65535
_GLOBAL_SCOPE = "00"  # in a line of /proc/net/if_inet6


def bracketed(host: str) -> str:
    """Return a host in the form that it has in an address."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Return host:port as text."""
    return f"{bracketed(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port or http://host:port.

    Raises:
        ValueError: the port is missing, is no number, or is too large.
    """
    host, _, port = address.split("//", 1)[-1].rstrip("/").rpartition(":")
    # int() would also accept "+1", " 1" and "1_0".
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"{address!r} has no port")
    return host.strip("[]"), int(port)


def is_unspecified(host: str) -> bool:
    """True for :: and 0.0.0.0, which stand for all addresses of a host.

    Raises:
        ValueError: the host is not numeric.
    """
    return ipaddress.ip_address(host.strip("[]")).is_unspecified


def is_loopback(address: str) -> bool:
    """True if other hosts cannot reach an address, http://HOST:PORT or HOST:PORT."""
    try:
        host, _ = split_address(address)
    except ValueError:  # the name of a file: the lighthouse that it names may be anywhere
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def usable_bind(host: str) -> str:
    """Return the address to listen at: `host`, but 0.0.0.0 for :: on a host without IPv6."""
    if host == ALL_HOSTS[socket.AF_INET6] and not socket.has_dualstack_ipv6():
        return ALL_HOSTS[socket.AF_INET]
    return host


def find_source_address(host: str, port: int) -> str:
    """Return the numeric address of this host's interface that leads to another host.

    The name of this host is not looked up.

    Raises:
        OSError: the other host's name is not known, or no route leads there.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        if family == socket.AF_INET6:
            # A temporary address (RFC 8981) is gone after a day, and a run may last longer.
            with contextlib.suppress(OSError):
                probe.setsockopt(socket.IPPROTO_IPV6, _IPV6_ADDR_PREFERENCES, _PREFER_PUBLIC)
        probe.connect(target)  # on a datagram socket this chooses the route, and sends nothing
        return str(probe.getsockname()[0])


def find_own_address(bind: str) -> str:
    """Return the numeric address at which other hosts reach this host.

    This is the address of the interface with the default route. In a cluster without a default
    route it is the first address of an interface. On a host without a network it is the loopback.

    Args:
        bind: address at which the server listens. With ::, an IPv6 address may be returned; with
            0.0.0.0, only an IPv4 address.
    """
    families = [socket.AF_INET]
    if is_unspecified(bind) and ":" in bind:
        families.append(socket.AF_INET6)
    for family in families:
        with contextlib.suppress(OSError):
            return find_source_address(_ELSEWHERE[family], 9)
    return next(_interface_addresses(families), "127.0.0.1")


def _interface_addresses(families: Sequence[socket.AddressFamily]) -> Iterator[str]:
    """Yield this host's addresses, without loopback and link-local ones."""
    if socket.AF_INET in families:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # the interface has no IPv4 address
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                    found = ipaddress.ip_address(answer[20:24])
                    if not (found.is_loopback or found.is_link_local):
                        yield str(found)
    if socket.AF_INET6 in families:
        with contextlib.suppress(OSError):  # the host has no IPv6
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                number, _, _, scope, *_ = line.split()
                found = ipaddress.IPv6Address(int(number, 16))
                if scope == _GLOBAL_SCOPE and not found.is_loopback:
                    yield str(found)
