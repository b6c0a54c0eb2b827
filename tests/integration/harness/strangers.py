# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Attacks at a run's ports by peers without the run's token, for tests and beside a campaign of
`titan-ft launch`:

cd tests/integration && python -m harness.strangers RUN_DIR SECONDS SEED
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from titan_ft.run.events import LighthouseStarted, WorkerExited, WorkerStarted
from titan_ft.run.tail import EventTail
from titan_ft.system.address import split_address

HOST = "127.0.0.1"
LIMIT = 5.0  # seconds for one call
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LISTENS = "0A"  # of /proc/net/tcp
_HEADERS, _SETTINGS = 1, 4  # types of HTTP/2 frames


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports of IPv4 at which a process listens; an empty list for a process that has
    ended.
    """
    own: set[int] = set()
    ports: list[int] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                own.add(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[9]) in own:
                ports.append(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def call(port: int, path: str, message: bytes) -> bytes:
    """Make a gRPC call without the secret; return the bytes that arrive within a second."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "h"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return ask(
        port,
        PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, 0x4, 1, block)
        + _frame(0, 0x1, 1, data),
    )


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _string(text: str) -> bytes:
    """Return a string as HPACK has it, of fewer than 127 letters."""
    return bytes([len(text)]) + text.encode()


def text_field(number: int, text: str) -> bytes:
    """Return a field of a protobuf message."""
    data = text.encode()
    length, size = b"", len(data)
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def kill(port: int) -> None:
    """Ask torchft's manager at a port to end its process."""
    call(port, "/torchft.ManagerService/Kill", text_field(1, "a stranger"))


def heartbeat(port: int, name: str) -> bytes:
    """Send a heartbeat under a name to torchft's lighthouse at a port; returns the answer."""
    return call(port, "/torchft.LighthouseService/Heartbeat", text_field(1, name))


def ask(port: int, request: bytes) -> bytes:
    """Send bytes; return the answer until the connection ends or is silent for a second."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), LIMIT) as connection:
        connection.settimeout(1.0)
        connection.sendall(request)
        while block := connection.recv(65536):
            answer += block
    return answer


def is_refused(port: int, request: bytes) -> bool:
    """True if the other end closes the connection without an answer.

    Raises:
        TimeoutError: the other end does neither.
    """
    with socket.create_connection((HOST, port), LIMIT) as connection:
        try:
            connection.sendall(request)
            return not connection.recv(1)
        except ConnectionError:
            return True


def refuses_kill(port: int, name: str) -> bool:
    """Press the button of torchft's page that ends a group's process; see `is_refused`."""
    request = f"POST /replica/{name}/kill HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
    return is_refused(port, request.encode())


def read_page(port: int) -> bytes:
    """Return the answer to a request for torchft's page."""
    return ask(port, b"GET /status HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")


@contextlib.contextmanager
def idle_connections(port: int, number: int) -> Iterator[None]:
    """Hold connections that say nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(number):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_connection((HOST, port), LIMIT))
        yield


def replay(port: int) -> None:
    """Send the server's first bytes back to it on a second connection, and end that with a
    reset.
    """
    with contextlib.suppress(OSError):
        with socket.create_connection((HOST, port), LIMIT) as first:
            first.settimeout(0.2)
            said = b""
            with contextlib.suppress(TimeoutError):
                said = first.recv(4096)
        with socket.create_connection((HOST, port), LIMIT) as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            second.sendall(said or PREFACE)
            second.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                second.recv(4096)


def send_garbage(port: int, chance: random.Random) -> None:
    """Send one line or frame: nearly valid, or noise."""
    start = chance.choice((b"", PREFACE, b'{"nonce": "00", "proof": ', b"GET / HTTP/1.1\r\n"))
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), LIMIT) as connection:
        connection.sendall(start + chance.randbytes(chance.randrange(300)) + b"\n")


class Campaign:
    """Strangers at the ports of a run: they knock, greet, flood and replay.

    Attributes:
        counts: connections by attack.
    """

    def __init__(self, run_dir: Path, seed: int) -> None:
        self._tail = EventTail(
            run_dir / "events", LighthouseStarted, WorkerStarted, WorkerExited, from_start=True
        )
        self._chance = random.Random(seed)
        self._workers: set[int] = set()
        self._lighthouse = 0  # its port
        self.counts: dict[str, int] = {}

    def attack(self) -> None:
        """Make one attack of a randomly drawn kind."""
        for event in self._tail.poll():
            match event:
                case LighthouseStarted():
                    self._lighthouse = split_address(event.address)[1]
                case WorkerStarted():
                    self._workers.add(event.pid)
                case WorkerExited():
                    self._workers.discard(event.worker_pid)
        if not self._lighthouse:
            return
        kinds = (self._knock, self._greet, self._flood, self._replay, self._write)
        kind: Callable[[], int] = self._chance.choice(kinds)
        name = kind.__name__.strip("_")
        self.counts[name] = self.counts.get(name, 0) + kind()

    def _knock(self) -> int:
        assert b"seen" not in read_page(self._lighthouse)
        with contextlib.suppress(OSError):  # the lighthouse may be away
            assert refuses_kill(self._lighthouse, "0")
        ports = self._ports_of_workers()
        for port in ports:
            kill(port)
        return 2 + len(ports)

    def _greet(self) -> int:
        for number in range(4):
            assert not heartbeat(self._lighthouse, f"ghost {number}")
        return 4

    def _flood(self) -> int:
        with contextlib.ExitStack() as held:
            held.enter_context(idle_connections(self._lighthouse, 600))
            ports = self._ports_of_workers()
            for port in ports:
                held.enter_context(idle_connections(port, 100))
            time.sleep(1.0)
        return 600 + 100 * len(ports)

    def _replay(self) -> int:
        ports = [self._lighthouse, *self._ports_of_workers()]
        for port in ports:
            replay(port)
        return len(ports)

    def _write(self) -> int:
        ports = [self._lighthouse, *self._ports_of_workers()]
        for port in ports:
            for _ in range(10):
                send_garbage(port, self._chance)
        return 10 * len(ports)

    def _ports_of_workers(self) -> list[int]:
        return [port for pid in sorted(self._workers) for port in listening_ports(pid)]


def main() -> None:
    folder, seconds, seed = sys.argv[1:]
    campaign = Campaign(Path(folder), int(seed))
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        campaign.attack()
        time.sleep(0.5)
    print(f"seed {seed}: connections by attack: {campaign.counts}")


if __name__ == "__main__":
    main()
