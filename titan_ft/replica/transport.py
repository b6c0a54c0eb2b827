# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Moves a snapshot from a donor's host memory to a joiner, in the background of both.

torchft's HTTP transport listens on every interface, asks nobody who he is and can unpickle what it is sent. This one
listens on one address, proves the run's token on both sides of each connection without sending it (HMAC over the
nonces of both), and moves nothing but a JSON header and raw tensor bytes.

A connection carries one request line after another: {"step", "offset", "bytes"} for a range of the payload, "header"
in place of "offset" for the header, "done" when the joiner has everything. Each answer is a JSON line
{"bytes": n} or {"error": text}, then n raw bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRWPair
from typing import Any

import torch

from titan_ft import device
from titan_ft.replica.errors import RefusedError
from titan_ft.replica.snapshot import Snapshot

_CHUNK = 8 << 20  # bytes of one request
_MAX_LINE = 4096  # a request or an answer line is far shorter; a stranger's may not be
_HANDSHAKE_SECONDS = 10.0
_TOKEN_REMEDY = "all groups of a run must have the same TITAN_FT_TOKEN in their environment"


class TransferError(RuntimeError):
    """The state could not be fetched; another donor may have it."""


class StateServer:
    """Serves the latest snapshot of this rank. One thread per connection; training never waits for it.

    Args:
        host: the address to listen on.
        token: the run's shared secret.
        wait_seconds: how long a request may wait for its snapshot to be taken.
        served: called as served(joiner, snapshot, copy_seconds, serve_seconds) when a joiner has everything.
    """

    def __init__(
        self, host: str, token: str, wait_seconds: float, served: Callable[[str, Snapshot, float, float], None]
    ) -> None:
        self._token = token
        self._wait_seconds = wait_seconds
        self._served = served
        self._snapshot: Snapshot | None = None
        self._copy_seconds = 0.0
        self._readers = 0
        self._changed = threading.Condition()
        self._server = _Server((host, 0), self._handle)
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="titan_ft_state_server", daemon=True
        ).start()

    @property
    def port(self) -> int:
        """Return the port that the system chose."""
        return int(self._server.server_address[1])

    def publish(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Serve `snapshot`, which took `copy_seconds` to copy, from now on."""
        with self._changed:
            self._snapshot, self._copy_seconds = snapshot, copy_seconds
            self._changed.notify_all()

    def withdraw(self) -> Snapshot | None:
        """Stop serving; returns the snapshot if its memory may be used again (nobody reads it)."""
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
            return snapshot if self._readers == 0 else None

    def close(self) -> None:
        """Stop listening and drop the snapshot."""
        self.withdraw()
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_SECONDS)
        stream = connection.makefile("rwb")
        nonce = secrets.token_hex(16)
        _write(stream, {"nonce": nonce})
        hello = _read(stream)
        expected = _proof(self._token, "joiner", nonce, str(hello.get("nonce")))
        if not _same(expected, hello.get("proof")):
            _write(stream, {"refused": f"the donor does not accept this group's token; {_TOKEN_REMEDY}"})
            return
        _write(stream, {"proof": _proof(self._token, "donor", nonce, str(hello["nonce"]))})
        connection.settimeout(None)
        started = time.monotonic()
        while request := _read(stream):
            with self._changed:
                wanted = int(request["step"])
                self._changed.wait_for(
                    lambda wanted=wanted: self._snapshot is not None and self._snapshot.step >= wanted,  # type: ignore[misc]  # bound by default
                    self._wait_seconds,
                )
                snapshot = self._snapshot
                if snapshot is None or snapshot.step != wanted:
                    held = "none" if snapshot is None else f"step {snapshot.step}"
                    _write(stream, {"error": f"the donor has no state of step {wanted} (it has {held})"})
                    continue
                self._readers += 1
            try:
                self._answer(stream, connection, request, snapshot)
            finally:
                with self._changed:
                    self._readers -= 1
            if request.get("done"):
                self._served(str(request["done"]), snapshot, self._copy_seconds, time.monotonic() - started)

    @staticmethod
    def _answer(stream: BufferedRWPair, connection: socket.socket, request: dict[str, Any], snapshot: Snapshot) -> None:
        if "offset" in request:
            start = int(request["offset"])
            data = _octets(snapshot.payload)[start : start + int(request["bytes"])]
        else:
            data = memoryview(snapshot.header if request.get("header") else b"")
        _write(stream, {"bytes": data.nbytes})
        connection.sendall(data)


def fetch(
    address: str,
    token: str,
    step: int,
    joiner: str,
    connections: int,
    timeout: float,
    cancelled: threading.Event | None = None,
) -> Snapshot:
    """Fetch a rank's state after `step` committed updates from the donor's StateServer at `address` (host:port).

    Args:
        connections: ranges fetched at the same time.
        timeout: seconds for the whole transfer.
        cancelled: ends the transfer when it is set.

    Raises:
        TransferError: the donor is gone, has no such state, or took too long; or the transfer was cancelled.
        RefusedError: one end does not know the other's token.
    """
    deadline = time.monotonic() + timeout
    cancelled = cancelled or threading.Event()
    try:
        with _Connection(address, token, deadline) as first:
            header = bytes(first.request({"step": step, "header": True}))
            facts = json.loads(header)
            size = int(facts["bytes"])
            payload = device.empty_host(size, torch.uint8)
            target = _octets(payload)
            offsets = list(range(0, size, _CHUNK))

            def fetch_share(number: int) -> None:
                share = offsets[number::connections]
                if share:
                    with _Connection(address, token, deadline) as connection:
                        for start in share:
                            if cancelled.is_set():
                                raise TransferError("cancelled")
                            part = target[start : start + _CHUNK]
                            connection.request({"step": step, "offset": start, "bytes": part.nbytes}, part)

            with ThreadPoolExecutor(connections, thread_name_prefix="titan_ft_fetch") as pool:
                list(pool.map(fetch_share, range(connections)))
            with contextlib.suppress(OSError, ValueError, TransferError):  # the state is complete, this is a courtesy
                first.request({"step": step, "done": joiner})
    except (OSError, ValueError, KeyError) as error:
        raise TransferError(f"state of step {step} from {address}: {type(error).__name__}: {error}") from error
    return Snapshot(step, int(facts["lineage"]), header, payload)


class _Connection:
    """The joiner's end of one connection."""

    def __init__(self, address: str, token: str, deadline: float) -> None:
        host, _, port = address.rpartition(":")
        self._deadline = deadline
        self._address = address
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=self._remaining())
        self._stream = self._socket.makefile("rwb")
        try:
            self._prove(address, token)
        except BaseException:
            self.__exit__()
            raise

    def _prove(self, address: str, token: str) -> None:
        """Show that this end knows the token, and make sure that the other one does."""
        nonce, their_nonce = secrets.token_hex(16), str(self._answer()["nonce"])
        _write(self._stream, {"nonce": nonce, "proof": _proof(token, "joiner", their_nonce, nonce)})
        if not _same(_proof(token, "donor", their_nonce, nonce), self._answer().get("proof")):
            raise RefusedError(f"the donor at {address} does not know this run's token; {_TOKEN_REMEDY}")

    def request(self, request: dict[str, Any], into: memoryview | None = None) -> memoryview:
        """Send `request` and return the bytes of the answer (written to `into` if given)."""
        _write(self._stream, request)
        size = int(self._answer()["bytes"])
        into = memoryview(bytearray(size)) if into is None else into
        if size != into.nbytes:
            raise TransferError(f"{self._address} sent {size} bytes where {into.nbytes} were asked for")
        done = 0
        while done < size:
            self._socket.settimeout(self._remaining())
            count = self._stream.readinto1(into[done:])  # one recv, so that the deadline holds within a chunk
            if not count:
                raise ConnectionError("the donor closed the connection")
            done += count
        return into

    def _answer(self) -> dict[str, Any]:
        self._socket.settimeout(self._remaining())
        answer = _read(self._stream)
        if not answer:
            raise ConnectionError("the donor closed the connection")
        if "refused" in answer:
            raise RefusedError(f"{self._address}: {answer['refused']}")
        if "error" in answer:
            raise TransferError(f"{self._address}: {answer['error']}")
        return answer

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("fault_tolerance.transfer_timeout_seconds is over")
        return remaining

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handle: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._handle = handle
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        # The joiner went away or does not speak the protocol: its loss, it asks again or elsewhere.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._handle(request)


def _same(expected: str, given: object) -> bool:
    return hmac.compare_digest(expected.encode(), str(given).encode())


def _octets(payload: torch.Tensor) -> memoryview:
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def _proof(token: str, role: str, donor_nonce: str, joiner_nonce: str) -> str:
    return hmac.new(token.encode(), f"{role}:{donor_nonce}:{joiner_nonce}".encode(), hashlib.sha256).hexdigest()


def _write(stream: BufferedRWPair, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _read(stream: BufferedRWPair) -> dict[str, Any]:
    """Read one line; an empty dict says that the other end closed the connection."""
    line = stream.readline(_MAX_LINE)
    message = json.loads(line) if line else {}
    if not isinstance(message, dict):
        raise ValueError("not a request")
    return message
