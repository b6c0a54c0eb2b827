# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The joiner's side of a transfer: fetches a snapshot from a donor; see `wire.py` for what is said."""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import socket
import threading
import time
import zlib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from io import BufferedRWPair
from typing import Any

import msgspec
import torch

from titan_ft import device
from titan_ft.replica.errors import RefusedError
from titan_ft.replica.snapshot import Snapshot
from titan_ft.replica.wire import Message, Size, TransferError, octets, prove, read_line, write_line
from titan_ft.run.address import split_address

logger = logging.getLogger(__name__)

_CHUNK = 8 << 20  # bytes of one request

_MAX_TRIES = 3  # of one request, when connections break, and as many when checksums differ
_STALL_SECONDS = 10.0  # of silence until a connection counts as broken
_OFFER_SECONDS = 1.5  # for each thing that a group which is asked for an offer does
_TICK_SECONDS = 0.1  # until a silent connection notices that its transfer is cancelled


class _Facts(msgspec.Struct):
    """What a transfer needs of a snapshot's header."""

    lineage: int
    bytes: Size


class _ChecksumError(TransferError):
    """An answer is not what the donor sent."""


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
    limits = _TransferLimits(timeout, cancelled or threading.Event())
    try:
        with _Link(address, token, limits) as first:
            header = bytes(first.request({"step": step, "header": True}))
            facts = msgspec.json.decode(header, type=_Facts)
            lineage, payload = facts.lineage, device.empty_host(facts.bytes, torch.uint8)
            target = octets(payload)
            missing: queue.SimpleQueue[int | None] = queue.SimpleQueue()
            for place in [*range(0, target.nbytes, _CHUNK), *[None] * connections]:
                missing.put(place)

            def fetch_chunks() -> None:
                with _Link(address, token, limits) as link:
                    for start in iter(missing.get, None):
                        part = target[start : start + _CHUNK]
                        link.request({"step": step, "lineage": lineage, "offset": start, "bytes": part.nbytes}, part)

            with ThreadPoolExecutor(connections, thread_name_prefix="titan_ft_fetch") as pool:
                tasks = [pool.submit(fetch_chunks) for _ in range(connections)]
                done, unfinished = wait(tasks, return_when=FIRST_EXCEPTION)
                if unfinished:  # one failed: the others need not go on
                    limits.end()
                for future in done:
                    future.result()
            with contextlib.suppress(OSError, ValueError, KeyError, TransferError, RefusedError):
                first.request({"step": step, "done": joiner})  # the state is complete, this is a courtesy
    except (TransferError, OSError, ValueError, KeyError) as error:
        reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        raise TransferError(f"state of step {step} from {address}: {reason}") from error
    return Snapshot(step, lineage, header, payload)


def ask_offer(address: str, token: str) -> tuple[int, int, int] | None:
    """Return step, lineage and digest of the state that the StateServer at `address` offers; None if it offers none.

    Raises:
        OSError, ValueError, KeyError: it cannot be reached, or does not speak the protocol.
        RefusedError: one end does not know the other's token.
    """
    with (
        contextlib.closing(socket.create_connection(split_address(address), _OFFER_SECONDS)) as connection,
        connection.makefile("rwb") as stream,
    ):
        prove(stream, address, token)
        write_line(stream, {"offer": True})
        answer = read_line(stream)
        return None if "error" in answer else (answer["step"], answer["lineage"], answer["digest"])


class _TransferLimits:
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

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address, self._token, self._limits = address, token, limits
        self._connection: _Connection | None = None

    def request(self, request: Message, into: memoryview | None = None) -> memoryview:
        """Do as `_Connection.request`, again if the connection breaks or the checksum differs.

        A connection that cannot be made, the first one or another, is an error at once: the donor is gone.
        """
        breaks = mismatches = 0
        while True:
            if self._connection is None:
                self._connection = _Connection(self._address, self._token, self._limits)
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

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address = address
        timeout = min(limits.remaining(), limits.stall_seconds)
        self._socket = socket.create_connection(split_address(address), timeout)
        self._stream = BufferedRWPair(_Incoming(self._socket, limits), self._socket.makefile("wb", buffering=0))
        try:
            prove(self._stream, address, token)
        except BaseException:
            self.__exit__()
            raise

    def request(self, request: Message, into: memoryview | None = None) -> memoryview:
        """Send `request` and return the bytes of the answer (written to `into` if given)."""
        write_line(self._stream, request)
        answer = self._answer()
        size = answer["bytes"]
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

    def _answer(self) -> Message:
        while "waiting" in (answer := read_line(self._stream)):
            pass
        if not answer:
            raise ConnectionError("the donor closed the connection")
        if "refused" in answer:
            raise RefusedError(f"{self._address}: {answer['refused']}")
        if "error" in answer:
            raise TransferError(answer["error"])
        return answer

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a line that could not be sent
            self._stream.close()
        self._socket.close()


class _Incoming(io.RawIOBase):
    """What comes from the donor; reading ends when the connection is silent, or the transfer lasts, too long."""

    def __init__(self, connection: socket.socket, limits: _TransferLimits) -> None:
        connection.settimeout(_TICK_SECONDS)
        self._socket, self._limits = connection, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        started = time.monotonic()
        while True:
            self._limits.remaining()
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - started >= self._limits.stall_seconds:
                    raise TimeoutError(f"nothing came for {self._limits.stall_seconds:g} s") from None
