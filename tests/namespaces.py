# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that can vanish: network namespaces at one switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest


class Hosts:
    """Three network namespaces at a switch, which is a fourth one; each host has a name of its own.

    Args:
        network: the address of a host and the length of its prefix, with {} for the host's number.
    """

    def __init__(self, network: str) -> None:
        self._network = network
        mark = uuid.uuid4().hex[:6]
        self._switch = f"titan-ft-{mark}"
        self._names = [f"{self._switch}-{letter}" for letter in "abc"]

    def connect(self) -> None:
        """Make the namespaces, and connect them.

        Raises:
            OSError: this machine has no namespaces, or no bridge.
        """
        for name in (self._switch, *self._names):
            self._ip("netns", "add", name)
        self._in(self._switch, "link add br0 type bridge")
        self._in(self._switch, "link set br0 up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            self._ip(
                "link",
                "add",
                "eth7",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            self._in(self._switch, f"link set {port} master br0")
            self._in(self._switch, f"link set {port} up")
            self._in(name, "link set lo up")
            self._in(name, "link set eth7 up")
            usable_at_once = " nodad" if ":" in self._network else ""
            self._in(
                name, f"address add {self._network.format(number + 1)} dev eth7{usable_at_once}"
            )

    def address(self, host: int) -> str:
        return self._network.format(host + 1).partition("/")[0]

    def command(self, host: int) -> list[str]:
        """Return the words that run a command on a host."""
        name = self._names[host]
        renamed = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            f"host-{'abc'[host]}",
        ]
        return ["ip", "netns", "exec", name, *renamed]

    def plug(self, host: int, state: str) -> None:
        """Connect a host to the switch, or part it: "up" or "down"."""
        self._in(self._switch, f"link set port{host} {state}")

    def lose(self, host: int) -> None:
        """Let a host vanish: no other one hears how its processes end."""
        self.plug(host, "down")
        for pid in self._pids(self._names[host]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for name in (*self._names, self._switch):
            for pid in self._pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, timeout=60, check=False
            )

    def _pids(self, name: str) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=60, check=False
        )
        return [int(pid) for pid in done.stdout.split()]

    def _in(self, name: str, words: str) -> None:
        self._ip("-n", name, *words.split())

    @staticmethod
    def _ip(*words: str) -> None:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr}")


@contextlib.contextmanager
def three_hosts(network: str = "10.77.0.{}/24") -> Iterator[Hosts]:
    """Provide three hosts, or skip the test in one line where the machine has none."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("needs root, iproute2 and util-linux")
    hosts = Hosts(network)
    try:
        try:
            hosts.connect()
        except OSError as error:
            pytest.skip(f"needs network namespaces and a bridge ({error})")
        yield hosts
    finally:
        hosts.close()
