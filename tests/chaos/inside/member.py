# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A process that stands for a worker of a group: it echoes what it receives, and obeys commands on
standard input.

Arguments: shared folder, replica, address. Each line of input is a JSON list of a command and its
arguments. Each line of output is the command's result.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.chaos.inside.link import Location, PeerConnections

DEADLINE = 20.0  # only ever reached by a bug


class Member:
    """The process's connections, by name."""

    def __init__(self, folder: Path, replica: int, address: str) -> None:
        self._folder, self._address = folder, address
        self._connections: dict[str, socket.socket] = {}
        self._over = threading.Event()
        self._hole: Blackhole | None = None
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=50
        )
        threading.Thread(target=self._serve, daemon=True).start()
        Location.own(replica, 0, address, os.getppid()).publish(folder)

    def port(self) -> int:
        """Return the port of its listener."""
        return int(self._listener.getsockname()[1])

    def connect(self, name: str, port: int, seconds: float) -> bool:
        """Connect to another process; return whether it answers a greeting in time."""
        try:
            self._connections[name] = socket.create_connection((self._address, port), seconds)
        except TimeoutError:
            return False
        return self.ask(name, "hello", seconds)

    def ask(self, name: str, text: str, seconds: float) -> bool:
        """Send a text and return whether it comes back in time."""
        self._connections[name].sendall(text.encode())
        return self._receive(name, len(text), seconds) == text

    def receive(self, name: str, length: int) -> str:
        """Receive an answer of `length` bytes."""
        return self._receive(name, length, DEADLINE)

    def cut(self, peer: int) -> str:
        """Drop everything that arrives from the group from now on; return the obstacle, if it
        cannot.
        """
        link = PeerConnections(self._folder, peer)
        self._hole = hole = Blackhole(1.0, link.choose)
        hole.extend()
        self._over.clear()

        def follow() -> None:
            with hole.looking_after((socket.socket, "connect")):
                ready.set()
                while not self._over.wait(0.005):
                    hole.extend()

        ready = threading.Event()
        threading.Thread(target=follow, daemon=True).start()
        ready.wait()
        return link.obstacle()

    def mend(self) -> None:
        """Lose nothing any more."""
        assert self._hole is not None, "it was cut before"
        self._over.set()
        self._hole.lift()

    def _receive(self, name: str, length: int, seconds: float) -> str:
        connection, received = self._connections[name], b""
        connection.settimeout(seconds)
        try:
            while len(received) < length and (data := connection.recv(length - len(received))):
                received += data
        except TimeoutError:
            pass
        return received.decode()

    def _serve(self) -> None:
        while True:
            threading.Thread(target=_echo, args=(self._listener.accept()[0],), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def main(folder: str, replica: str, address: str) -> None:
    """Execute each line of input."""
    member = Member(Path(folder), int(replica), address)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(member, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
