# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Addresses as text, and the addresses of this host."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

from titan_ft.system.address import (
    find_source_address,
    is_unspecified,
    join_address,
    split_address,
    usable_bind,
)


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("fe80::1", "[fe80::1]:80"), ("n1", "n1:80")]
)
def test_an_address_is_what_it_was_made_of(host: str, text: str) -> None:
    """IPv6 hosts have brackets, also after http:// and before a slash."""
    assert join_address(host, 80) == text
    assert split_address(text) == split_address(f"http://{text}/") == (host, 80)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:+80", "host:8_0", "host: 80", "host:80a", "host:65536"]
)
def test_a_port_is_a_plain_number(text: str) -> None:
    """Texts that int() would accept are refused."""
    with pytest.raises(ValueError, match="has no port"):
        split_address(text)


@pytest.mark.parametrize(
    ("url", "host"), [("http://127.0.0.1:29510", "127.0.0.1"), ("http://[::1]:29510/", "::1")]
)
def test_the_source_is_the_interface_that_leads_there(url: str, host: str) -> None:
    """The result is numeric, and no packet is sent."""
    try:
        assert find_source_address(*split_address(url)) == host
    except OSError:
        assert ":" in host, "IPv4 must work"
        pytest.skip("this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "unspecified"),
    [("::", True), ("[::]", True), ("0.0.0.0", True), ("0::0", True), ("::1", False)],
)
def test_all_addresses_are_written_in_several_ways(host: str, unspecified: bool) -> None:
    """Each spelling of "all addresses" needs an address for other hosts."""
    assert is_unspecified(host) == unspecified


@pytest.mark.parametrize(("has_ipv6", "bind"), [(True, "::"), (False, "0.0.0.0")])
def test_a_host_without_ipv6_listens_all_the_same(
    has_ipv6: bool, bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default address is [::], which a kernel without IPv6 refuses."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    assert usable_bind("::") == bind
    assert usable_bind("127.0.0.1") == "127.0.0.1"


@pytest.fixture
def host() -> Iterator[Callable[..., str]]:
    """Provide a network namespace: `host(*commands)` sets it up and returns the address found
    there.
    """
    name = f"titan-ft-{uuid.uuid4().hex[:8]}"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=60, check=False
        )

    try:
        made = run("netns", "add", name)
    except FileNotFoundError:
        pytest.skip("needs iproute2")
    if made.returncode:
        pytest.skip(f"needs root and network namespaces: {made.stderr.strip()}")

    def find(bind: str, *commands: str) -> str:
        setup = [
            "link add eth7 type veth peer name eth8",
            "link set lo up",
            "link set eth8 up",
            "link set eth7 up",
            *commands,
        ]
        for command in setup:
            done = run("-n", name, *command.split())
            assert done.returncode == 0, done.stderr
        code = f"from titan_ft.system.address import find_own_address; print(find_own_address({bind!r}))"
        done = run("netns", "exec", name, sys.executable, "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    yield find
    run("netns", "del", name)


V4, V6 = "address add 192.0.2.7/24 dev eth7", "address add 2001:db8:7::7/64 dev eth7 nodad"
V4_ROUTE, V6_ROUTE = "route add default via 192.0.2.1", "-6 route add default via 2001:db8:7::1"


@pytest.mark.parametrize(
    ("bind", "commands", "found"),
    [
        ("::", (V4, V6, V4_ROUTE, V6_ROUTE), "192.0.2.7"),
        ("::", (V6, V6_ROUTE), "2001:db8:7::7"),
        ("::", (V6,), "2001:db8:7::7"),
        ("::", (V4, V6, V6_ROUTE), "2001:db8:7::7"),
        ("0.0.0.0", (V4, V6, V6_ROUTE), "192.0.2.7"),
        ("0.0.0.0", (V4, V4_ROUTE), "192.0.2.7"),
        ("::", (), "127.0.0.1"),
    ],
    ids=[
        "both",
        "IPv6 only",
        "IPv6 only, no route",
        "IPv4 leads nowhere",
        "IPv4 asked for",
        "IPv4 only",
        "no network",
    ],
)
def test_what_others_reach_is_announced(
    host: Callable[..., str], bind: str, commands: tuple[str, ...], found: str
) -> None:
    """The announced address is that of the interface that leads out; IPv6 if there is no IPv4;
    loopback at last.
    """
    assert host(bind, *commands) == found
