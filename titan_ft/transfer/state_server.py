# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a transfer: serves a snapshot to joiners; see `wire.py` for what is said."""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from titan_ft import device
from titan_ft.system.address import join_address
from titan_ft.transfer.pace import Pace
from titan_ft.transfer.reach import answer_probe
from titan_ft.transfer.snapshot import WHOLE, Part, Snapshot
from titan_ft.transfer.tls import Certificate
from titan_ft.transfer.wire import Message, SealedStream, check_joiner, octets

_HANDSHAKE_SECONDS = 10.0
_MAX_UNPROVEN = 64
"""Connections without a proof of the token. The next one closes the oldest."""
_OFFER_SECONDS = 1.0  # that a newcomer's question may wait for the offer; less than it waits for the answer
_WAITING_SECONDS = 1.0  # between two lines of a donor that has yet to take the snapshot; well below a joiner's stall
_POLL_SECONDS = 1.0  # of the thread that listens. `close` wakes it: a shorter time would only cost each step
_JOINER_SECONDS = 60.0  # until a donor drops a joiner that takes nothing: its snapshot's memory is wanted


Send = Callable[[socket.socket, memoryview], None]
"""Sends all of some bytes to a connection."""


class StateServer:
    """Serves the latest snapshot of this rank. One thread per connection; training never waits for it.

    Args:
        host: the address to listen on.
        token: the run's shared secret.
        wait_seconds: how long a request may wait for its snapshot to be taken.
        served: called as served(joiner, snapshot, bytes, copy_seconds, serve_seconds) when a joiner has everything, so
            many bytes of it from here; `copy_seconds` is what the copy took the host or the GPU, whichever took longer.
        max_mbps: 10**6 bits per second that all joiners together get at most; 0 = as fast as it goes.
        certificate: for TLS; None = without.
    """

    def __init__(
        self,
        host: str,
        token: str,
        wait_seconds: float,
        served: Callable[[str, Snapshot, int, float, float], None],
        max_mbps: float = 0.0,
        certificate: Certificate | None = None,
    ) -> None:
        self._certificate = certificate
        self._token = token
        self._wait_seconds = wait_seconds
        self._served = served
        self._pace = Pace(max_mbps)
        self.send: Send = self._pace.send
        """Sends ranges of the payload; fault injection puts another one here."""
        self._snapshot: Snapshot | None = None
        self._copy_seconds = 0.0
        self._offer: Message | None = None
        self._offered_at = 0.0
        self._copy: Callable[[int, Part], None] | None = None
        self._wanted: Part | None = None
        self._is_pinned = False
        self._readers = 0
        self._changed = threading.Condition()
        self._use_device = device.for_thread()
        self._unproven = _Unproven()
        self._server = _Server((host, 0), self._handle, self._unproven.close_late)
        self.address = join_address(host, int(self._server.server_address[1]))
        """host:port that joiners dial; their proof covers it."""
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="titan_ft_state_server", daemon=True
        ).start()

    @property
    def port(self) -> int:
        """Return the port that the system chose."""
        return int(self._server.server_address[1])

    def publish(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Serve `snapshot`, which took the host `copy_seconds` to copy, or to let a GPU copy, from now on."""
        with self._changed:
            self._snapshot, self._copy_seconds = snapshot, copy_seconds
            self._wanted, self._is_pinned = None, True
            self._changed.notify_all()

    @property
    def is_pinned(self) -> bool:
        """True if the snapshot must stay; see `pin`."""
        return self._is_pinned

    def pin(self, is_pinned: bool) -> None:
        """Note whether the snapshot must stay for a joiner that has this donor only.

        Then no state that would take its place is offered. A snapshot that was published just now must stay until it is
        known whose it is.
        """
        self._is_pinned = is_pinned

    def withdraw(self) -> Snapshot | None:
        """Stop serving; returns the snapshot if its memory may be used again (nobody reads it)."""
        with self._changed:
            snapshot, self._snapshot = self._snapshot, None
            return snapshot if self._readers == 0 else None

    def offer(self, offer: Message | None, copy: Callable[[int, Part], None] | None = None) -> None:
        """Let joiners ask for a state of this step, lineage and digest, which is published once it is `wanted`.

        None takes the offer back; a joiner that waits for it then does so for `wait_seconds` only.

        Args:
            copy: publishes the state of a step, or a part of it, at once if it still can; called on the thread of the
                joiner's connection.
        """
        with self._changed:
            self._offer, self._copy, self._wanted = offer, copy, None
            self._offered_at = time.monotonic()
            self._changed.notify_all()

    @property
    def snapshot(self) -> Snapshot | None:
        """Return what is served."""
        return self._snapshot

    @property
    def offered_step(self) -> int:
        """Return the committed updates of the state that is offered; -1 = none is."""
        offer = self._offer
        return -1 if offer is None else offer["step"]

    @property
    def wanted(self) -> Part | None:
        """Return the part of the offered state that a joiner waits for; None = no joiner waits."""
        return self._wanted

    def close(self) -> None:
        """Stop listening, drop the snapshot and end the answers under way."""
        self._pace.close()
        self.withdraw()
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # It is not allowed on macOS: there the next poll ends the thread.
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, connection: socket.socket) -> None:
        self._use_device()
        connection.settimeout(_HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an answer's end waits for no delayed ACK
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_JOINER_SECONDS * 1000))
        with self._unproven.holding(connection):
            stream = check_joiner(connection, self.address, self._token, self._certificate)
        with contextlib.closing(stream.connection):
            self._serve(stream)

    def _serve(self, stream: SealedStream) -> None:
        connection = stream.connection
        started = time.monotonic()
        while request := self._next_request(connection, stream):
            if "probe" in request:
                answer_probe(stream, request, self._token)
                continue
            if "offer" in request:
                stream.write(self._find_offer(request.get("step", 0)) or {"error": "this group offers no state"})
                continue
            snapshot = self._acquire(stream, request)
            if isinstance(snapshot, str):
                stream.write({"error": snapshot})
                continue
            try:
                snapshot.wait()  # a GPU may still be copying it
                send = self.send if "offset" in request else self._pace.send
                self._answer(stream, connection, request, snapshot, send)
            finally:
                with self._changed:
                    self._readers -= 1
            if request.get("done"):
                copied = max(self._copy_seconds, snapshot.copy_seconds)
                self._served(request["done"], snapshot, request["bytes"], copied, time.monotonic() - started)

    def _find_offer(self, step: int) -> Message | None:
        """Return what is offered; nothing that would take the place of a snapshot which must stay.

        A group that offers fewer than `step` updates is about to make the next one: it is waited for, for a moment.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._offer is None or self._offer["step"] >= step, _OFFER_SECONDS)
            offer, held = self._offer, self._snapshot
            is_taken = self._is_pinned and offer is not None and held is not None and held.step != offer["step"]
            if offer is None or is_taken:
                return None
            return Message({**offer, "elapsed_milliseconds": int(1000 * (time.monotonic() - self._offered_at))})

    @staticmethod
    def _next_request(connection: socket.socket, stream: SealedStream) -> Message:
        """Wait for a request for as long as it takes; what belongs to it follows at once."""
        connection.settimeout(None)
        request = stream.read()
        if "probe" in request:
            connection.settimeout(_HANDSHAKE_SECONDS)
        return request

    def _acquire(self, stream: SealedStream, request: Message) -> Snapshot | str:
        """Wait for the snapshot of `request` and become one of its readers; the reason if there is none."""
        step, ends = request["step"], time.monotonic() + self._wait_seconds
        part = _read_part(request)

        def is_fit() -> bool:
            held = self._snapshot
            return held is not None and held.step == step and held.part in (WHOLE, part)

        def is_settled() -> bool:
            held, offer = self._snapshot, self._offer
            is_past = (held is not None and held.step > step) or (offer is not None and offer["step"] > step)
            return self._pace.closed or is_past or is_fit()

        if "header" not in request:  # it goes on with what is here
            part = self._snapshot.part if self._snapshot is not None else part
        elif (copy := self._copy) is not None and not is_settled():
            copy(step, part)
        while True:
            with self._changed:
                is_offered = self._offer is not None and self._offer["step"] == step
                if is_offered and not is_settled():
                    self._wanted = part
                # The training thread copies it between two steps, which may be long.
                rest = math.inf if is_offered else ends - time.monotonic()
                over = self._changed.wait_for(is_settled, min(_WAITING_SECONDS, rest)) or rest <= _WAITING_SECONDS
                found = self._snapshot
                is_here = found and (found.step, found.lineage) == (step, request.get("lineage", found.lineage))
                if found and is_here and (over or not is_offered):
                    self._readers += 1
                    return found
            if over:
                held = f"step {found.step} of lineage {found.lineage}" if found else "none"
                return f"the donor has no state of step {step} (it has {held})"
            stream.write({"waiting": step})

    @staticmethod
    def _answer(
        stream: SealedStream,
        connection: socket.socket,
        request: Message,
        snapshot: Snapshot,
        send: Send,
    ) -> None:
        held, answer = snapshot.byte_range, Message()
        if "offset" in request:
            if not held.start <= request["offset"] <= request["offset"] + request["bytes"] <= held.stop:
                stream.write({"error": f"the donor has bytes {held.start} to {held.stop} of the state only"})
                return
            data = octets(snapshot.payload)[request["offset"] - held.start :][: request["bytes"]]
        elif request.get("header"):
            data, answer = memoryview(snapshot.header), Message(held=(held.start, held.stop))
        else:
            data = memoryview(b"")
        stream.write({**answer, "bytes": data.nbytes, "sha256": hashlib.sha256(data).hexdigest()})
        send(connection, data)


def _read_part(request: Message) -> Part:
    """Return the part of the state that a request is for.

    Raises:
        ValueError: there is no such part.
    """
    place, number = request.get("part", (0, 1))
    if place >= number:
        raise ValueError(f"no part of a state: {place} of {number}")
    return Part(place, number)


class _Unproven:
    """The connections whose other end has yet to prove that it knows the token.

    The timeout of a socket begins anew with each byte. A stranger who sends a byte now and then would keep a thread
    and a descriptor for good, and enough of them would leave the worker without descriptors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}  # a copy of each connection, the oldest one first

    @contextlib.contextmanager
    def holding(self, connection: socket.socket) -> Iterator[None]:
        """Count a connection for the time of its handshake."""
        own = connection.dup()  # TLS takes the connection's own descriptor away
        with self._lock:
            self._since[own] = time.monotonic()
            if len(self._since) > _MAX_UNPROVEN:
                self._shut_down(next(iter(self._since)))
        try:
            yield
        finally:
            with self._lock:
                self._since.pop(own, None)
                own.close()

    def close_late(self) -> None:
        """End the handshakes that have taken too long."""
        now = time.monotonic()
        with self._lock:
            for connection, since in list(self._since.items()):
                if now - since >= _HANDSHAKE_SECONDS:
                    self._shut_down(connection)

    def _shut_down(self, connection: socket.socket) -> None:
        """Wake the thread of a connection with an end of file; the thread closes it."""
        del self._since[connection]
        with contextlib.suppress(OSError):  # the other end has gone
            connection.shutdown(socket.SHUT_RDWR)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handle: Callable[[socket.socket], None], look: Callable[[], None]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._handle, self._look = handle, look
        super().__init__(address, socketserver.BaseRequestHandler)

    def service_actions(self) -> None:
        """Look at the handshakes; the thread that listens calls this after each poll and each connection."""
        self._look()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # The joiner went away, or does not speak the protocol. A real one asks again, here or elsewhere.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._handle(request)
