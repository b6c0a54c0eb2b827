# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Moves a snapshot from a donor's host memory to a joiner, in the background of both.

torchft's HTTP transport listens on every interface, asks nobody who he is and can unpickle what it is sent. This one
listens on one address, proves the run's token on both sides of each connection without sending it (HMAC over the
nonces of both), and moves nothing but a JSON header and raw tensor bytes.

A connection carries one request line after another: {"step", "lineage", "offset", "bytes"} for a range of the payload,
"header" in place of "offset" for the header, "done" when the joiner has everything. Each answer is a JSON line
{"bytes": n, "crc32": checksum} or {"error": text}, then n raw bytes; while the donor has yet to take the snapshot, a
line {"waiting": step} now and then comes before it, so that silence always means that something is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import logging
import queue
import secrets
import socket
import socketserver
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from io import BufferedRWPair
from typing import Any, Protocol

import torch

from titan_ft import device
from titan_ft.replica.errors import RefusedError
from titan_ft.replica.snapshot import Snapshot

logger = logging.getLogger(__name__)

_CHUNK = 8 << 20  # bytes of one request
_MAX_LINE = 4096  # a request or an answer line is far shorter; a stranger's may not be
_HANDSHAKE_SECONDS = 10.0
_TOKEN_REMEDY = "all groups of a run must have the same TITAN_FT_TOKEN in their environment"

_MAX_TRIES = 3  # of one request, when connections break, and as many when checksums differ
_STALL_SECONDS = 10.0  # of silence until a connection counts as broken
_WAITING_SECONDS = 1.0  # between two lines of a donor that has yet to take the snapshot; well below a stall
_JOINER_SECONDS = 60.0  # until a donor drops a joiner that takes nothing: its snapshot's memory is wanted
_TICK_SECONDS = 0.1  # until a silent connection notices that its transfer is cancelled

_SLICE_SECONDS = 0.02  # of the rate in one slice: many connections take turns well within a stall
_MAX_SLICE = 256 << 10  # bytes
_CREDIT_SECONDS = 0.05  # of the rate that a thread which woke up late may make up for


class TransferError(RuntimeError):
    """The state could not be fetched; another donor may have it."""


class _ChecksumError(TransferError):
    """An answer is not what the donor sent."""


class _Pace:
    """Keeps what all connections send together to a rate.

    Args:
        max_mbps: 10**6 bits per second; 0 = as fast as it goes.
        clock: seconds that only grow.
    """

    def __init__(self, max_mbps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = max_mbps * 1e6 / 8  # bytes per second
        self._clock = clock
        self._next = float("-inf")  # when the next slice may go
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.slice = max(1, min(int(self._rate * _SLICE_SECONDS), _MAX_SLICE)) if self._rate else sys.maxsize

    def book(self, num_bytes: int) -> float:
        """Return the seconds until `num_bytes` more may be sent; they count as sent from now on."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._next, now - _CREDIT_SECONDS)
            self._next = start + num_bytes / self._rate
            return max(0.0, start - now)

    def send(self, connection: socket.socket, data: memoryview) -> None:
        """Send `data` no faster than allowed; ends with an OSError when the peer goes away or the pace is closed."""
        for start in range(0, data.nbytes, self.slice):
            part = data[start : start + self.slice]
            if self._closed.wait(self.book(part.nbytes)):
                raise ConnectionAbortedError("the server is closed")
            connection.sendall(part)

    def close(self) -> None:
        """End all sending."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        """Say whether sending has ended."""
        return self._closed.is_set()


class Sender(Protocol):
    """What sends the bytes of an answer."""

    def send(self, connection: socket.socket, data: memoryview) -> None:
        """Send all of `data`."""


class StateServer:
    """Serves the latest snapshot of this rank. One thread per connection; training never waits for it.

    Args:
        host: the address to listen on.
        token: the run's shared secret.
        wait_seconds: how long a request may wait for its snapshot to be taken.
        served: called as served(joiner, snapshot, copy_seconds, serve_seconds) when a joiner has everything.
        max_mbps: 10**6 bits per second that all joiners together get at most; 0 = as fast as it goes.
    """

    def __init__(
        self,
        host: str,
        token: str,
        wait_seconds: float,
        served: Callable[[str, Snapshot, float, float], None],
        max_mbps: float = 0.0,
    ) -> None:
        self._token = token
        self._wait_seconds = wait_seconds
        self._served = served
        self._pace = _Pace(max_mbps)
        self.sender: Sender = self._pace
        """Sends ranges of the payload; fault injection puts another one here."""
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
        """Stop listening, drop the snapshot and end the answers under way."""
        self._pace.close()
        self.withdraw()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer's end waits for no delayed ACK
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_JOINER_SECONDS * 1000))
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
            snapshot = self._acquire(stream, request)
            if isinstance(snapshot, str):
                _write(stream, {"error": snapshot})
                continue
            try:
                sender = self.sender if "offset" in request else self._pace
                self._answer(stream, connection, request, snapshot, sender)
            finally:
                with self._changed:
                    self._readers -= 1
            if request.get("done"):
                self._served(str(request["done"]), snapshot, self._copy_seconds, time.monotonic() - started)

    def _acquire(self, stream: BufferedRWPair[Any, Any], request: dict[str, Any]) -> Snapshot | str:
        """Wait for the snapshot of `request` and become one of its readers; the reason if there is none."""
        step, ends = int(request["step"]), time.monotonic() + self._wait_seconds

        def settled() -> bool:
            return self._pace.closed or (self._snapshot is not None and self._snapshot.step >= step)

        while True:
            with self._changed:
                rest = ends - time.monotonic()
                over = self._changed.wait_for(settled, min(_WAITING_SECONDS, rest)) or rest <= _WAITING_SECONDS
                found = self._snapshot
                if found and (found.step, found.lineage) == (step, request.get("lineage", found.lineage)):
                    self._readers += 1
                    return found
            if over:
                held = f"step {found.step} of lineage {found.lineage}" if found else "none"
                return f"the donor has no state of step {step} (it has {held})"
            _write(stream, {"waiting": step})

    @staticmethod
    def _answer(
        stream: BufferedRWPair[Any, Any],
        connection: socket.socket,
        request: dict[str, Any],
        snapshot: Snapshot,
        sender: Sender,
    ) -> None:
        if "offset" in request:
            start = int(request["offset"])
            data = _octets(snapshot.payload)[start : start + int(request["bytes"])]
        else:
            data = memoryview(snapshot.header if request.get("header") else b"")
        _write(stream, {"bytes": data.nbytes, "crc32": zlib.crc32(data)})
        sender.send(connection, data)


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

    A connection that breaks or falls silent is made again, and only what is missing is asked for; a donor that cannot
    be reached again is given up at once.

    Args:
        connections: ranges fetched at the same time.
        timeout: seconds for the whole transfer.
        cancelled: ends the transfer when it is set.

    Raises:
        TransferError: the donor is gone, has no such state, or took too long; or the transfer was cancelled.
        RefusedError: one end does not know the other's token.
    """
    patience = _Patience(timeout, cancelled or threading.Event())
    try:
        with _Link(address, token, patience) as first:
            header = bytes(first.request({"step": step, "header": True}))
            facts = json.loads(header)
            lineage, payload = int(facts["lineage"]), device.empty_host(int(facts["bytes"]), torch.uint8)
            target = _octets(payload)
            missing: queue.SimpleQueue[int | None] = queue.SimpleQueue()
            for place in [*range(0, target.nbytes, _CHUNK), *[None] * connections]:
                missing.put(place)

            def fetch_chunks() -> None:
                with _Link(address, token, patience) as link:
                    for start in iter(missing.get, None):
                        part = target[start : start + _CHUNK]
                        link.request({"step": step, "lineage": lineage, "offset": start, "bytes": part.nbytes}, part)

            with ThreadPoolExecutor(connections, thread_name_prefix="titan_ft_fetch") as pool:
                tasks = [pool.submit(fetch_chunks) for _ in range(connections)]
                done, unfinished = wait(tasks, return_when=FIRST_EXCEPTION)
                if unfinished:  # one failed: the others need not go on
                    patience.end()
                for future in done:
                    future.result()
            with contextlib.suppress(OSError, ValueError, KeyError, TransferError, RefusedError):
                first.request({"step": step, "done": joiner})  # the state is complete, this is a courtesy
    except (TransferError, OSError, ValueError, KeyError) as error:
        reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        raise TransferError(f"state of step {step} from {address}: {reason}") from error
    return Snapshot(step, lineage, header, payload)


class _Patience:
    """How long the connections of one transfer wait for the donor.

    Args:
        timeout: seconds for the whole transfer.
        cancelled: ends it when it is set.
    """

    def __init__(self, timeout: float, cancelled: threading.Event) -> None:
        self.stall_seconds = min(timeout, _STALL_SECONDS)
        self._deadline = time.monotonic() + timeout
        self._cancelled = cancelled
        self._ended = threading.Event()

    def end(self) -> None:
        """Stop waiting."""
        self._ended.set()

    def remaining(self) -> float:
        """Return the seconds that are left.

        Raises:
            TransferError: none is, or the transfer is not wanted any more.
        """
        if self._cancelled.is_set() or self._ended.is_set():
            raise TransferError("cancelled")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TransferError("fault_tolerance.transfer_timeout_seconds is over")
        return remaining


class _Link:
    """The joiner's way to the donor: one connection after another, until what was asked for is there and unharmed."""

    def __init__(self, address: str, token: str, patience: _Patience) -> None:
        self._address, self._token, self._patience = address, token, patience
        self._connection: _Connection | None = None

    def request(self, request: dict[str, Any], into: memoryview | None = None) -> memoryview:
        """Do as `_Connection.request`, again if the connection breaks or the checksum differs.

        A connection that cannot be made, the first one or another, is an error at once: the donor is gone.
        """
        breaks = mismatches = 0
        while True:
            if self._connection is None:
                self._connection = _Connection(self._address, self._token, self._patience)
            try:
                return self._connection.request(request, into)
            except _ChecksumError as error:
                mismatches += 1
                logger.warning("fetching from %s, try %d of %d: %s", self._address, mismatches, _MAX_TRIES, error)
                if mismatches == _MAX_TRIES:
                    raise
            except (OSError, ValueError, KeyError) as error:
                breaks += 1
                self.__exit__()
                logger.warning("the connection to %s broke, try %d of %d: %r", self._address, breaks, _MAX_TRIES, error)
                if breaks == _MAX_TRIES:
                    raise

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.__exit__()
        self._connection = None


class _Connection:
    """The joiner's end of one connection."""

    def __init__(self, address: str, token: str, patience: _Patience) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        timeout = min(patience.remaining(), patience.stall_seconds)
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout)
        self._stream = BufferedRWPair(_Incoming(self._socket, patience), self._socket.makefile("wb", buffering=0))
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
        answer = self._answer()
        size = int(answer["bytes"])
        into = memoryview(bytearray(size)) if into is None else into
        if size != into.nbytes:
            raise TransferError(f"the donor sent {size} bytes where {into.nbytes} were asked for")
        done = 0
        while done < size:
            count = self._stream.readinto1(into[done:])
            if not count:
                raise ConnectionError("the donor closed the connection")
            done += count
        if zlib.crc32(into) != answer["crc32"]:
            what = f"the {size} bytes at {request['offset']}" if "offset" in request else "the header"
            raise _ChecksumError(f"{what} did not arrive as they were sent: the checksums differ")
        return into

    def _answer(self) -> dict[str, Any]:
        while "waiting" in (answer := _read(self._stream)):
            pass
        if not answer:
            raise ConnectionError("the donor closed the connection")
        if "refused" in answer:
            raise RefusedError(f"{self._address}: {answer['refused']}")
        if "error" in answer:
            raise TransferError(str(answer["error"]))
        return answer

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a line that could not be sent
            self._stream.close()
        self._socket.close()


class _Incoming(io.RawIOBase):
    """What comes from the donor; reading ends when the connection is silent for too long or patience is over."""

    def __init__(self, connection: socket.socket, patience: _Patience) -> None:
        connection.settimeout(_TICK_SECONDS)
        self._socket, self._patience = connection, patience

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        started = time.monotonic()
        while True:
            self._patience.remaining()
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - started >= self._patience.stall_seconds:
                    raise TimeoutError(f"nothing came for {self._patience.stall_seconds:g} s") from None


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


def _write(stream: BufferedRWPair[Any, Any], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _read(stream: BufferedRWPair[Any, Any]) -> dict[str, Any]:
    """Read one line; an empty dict says that the other end closed the connection."""
    line = stream.readline(_MAX_LINE)
    message = json.loads(line) if line else {}
    if not isinstance(message, dict):
        raise ValueError("not a request")
    return message
