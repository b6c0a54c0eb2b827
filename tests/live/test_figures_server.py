# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The server of a run's figures, and clients that mean no good."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from titan_ft.live import figures_server
from titan_ft.live.figures_server import MAX_CLIENTS, FiguresServer

DEADLINE = 30.0  # seconds; only ever reached by a bug


def app(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"figures"]


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[FiguresServer]:
    try:
        made = FiguresServer(request.param, 0, app)
    except OSError:
        pytest.skip(f"this host has no {request.param}")
    yield made
    made.close()


def read(server: FiguresServer) -> bytes:
    host = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
    with urllib.request.urlopen(
        f"http://{host}:{server.server_port}/metrics", timeout=DEADLINE
    ) as answer:
        text: bytes = answer.read()
    return text


def test_idle_connections_take_no_threads(server: FiguresServer) -> None:
    """A thousand idle connections once used up the launcher's descriptors. The server stays
    reachable.
    """
    before = threading.active_count()
    with contextlib.ExitStack() as idle:
        where = server.server_name, server.server_port
        strangers = [
            idle.enter_context(socket.create_connection(where, DEADLINE)) for _ in range(300)
        ]
        for _ in range(3):
            assert read(server) == b"figures"
        first = strangers[0]
        with contextlib.suppress(ConnectionResetError):
            assert first.recv(1) == b"", "the oldest was closed"
        assert len(server._clients) <= MAX_CLIENTS
        deadline = time.monotonic() + DEADLINE
        while threading.active_count() > before + MAX_CLIENTS:
            assert time.monotonic() < deadline, "threads of closed connections stay"
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["127.0.0.1"], indirect=True)
def test_ten_thousand_lines_of_garbage(server: FiguresServer) -> None:
    """After nearly valid requests, endless headers and noise the server answers, and no thread
    stays.
    """
    before = threading.active_count()
    chance = random.Random(38)
    starts = (
        b"GET /metrics HTTP/1.1\r\n",
        b"GET ",
        b"POST / HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n",
        b"",
    )
    for _ in range(10_000):
        noise = chance.choice(starts) + chance.randbytes(chance.randrange(300)) + b"\n"
        stranger = socket.create_connection((server.server_name, server.server_port), DEADLINE)
        with stranger, contextlib.suppress(OSError):  # closed, because so many others came
            stranger.sendall(noise)
    deadline = time.monotonic() + DEADLINE
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "threads of closed connections stay"
        time.sleep(0.01)
    assert read(server) == b"figures"


def test_a_client_that_says_nothing_is_closed(
    server: FiguresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent client is closed even if no other client connects."""
    assert figures_server._Handler.timeout == figures_server.CLIENT_SECONDS
    monkeypatch.setattr(figures_server._Handler, "timeout", 0.05)
    with socket.create_connection((server.server_name, server.server_port), DEADLINE) as stranger:
        assert stranger.recv(1) == b""
    assert read(server) == b"figures"
