# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a transfer: serves a snapshot to joiners.

`wire.py` describes the messages. See docs/heal.md.
"""

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

_OFFER_SECONDS = 1.0
"""A question about an offer may wait this long for it. The joiner waits longer for the answer."""

_WAITING_SECONDS = 1.0
"""Pause between two lines {"waiting"} of a donor that has not taken the snapshot yet. It is well
below the silence that counts as a broken connection."""

_POLL_SECONDS = 1.0
"""Poll interval of the thread that listens. `close` wakes it, so a shorter one would only cost
CPU."""

_JOINER_SECONDS = 60.0
"""A joiner that takes no bytes for this time is dropped, because the snapshot's memory is needed."""

SendBytes = Callable[[socket.socket, memoryview], None]
"""Sends all of some bytes to a connection."""


class StateServer:
    """Serves the latest snapshot of this rank.

    `training/links.py` creates it, `engine/donor.py` publishes and offers states. Each connection
    has a thread of its own, and training never waits for one. Any thread may call the methods. A
    connection that fails ends alone; the joiner asks again.

    Args:
        host: address to listen on.
        token: the run's shared secret.
        wait_seconds: limit of a request's wait for a snapshot that is not offered.
        served: called as served(joiner, snapshot, bytes, copy_seconds, serve_seconds) when a joiner
            has the whole state; `bytes` of it came from here. `copy_seconds` is the time that the
            copy took the host or the GPU, whichever was longer.
        max_mbps: limit for all joiners together in 10**6 bits per second; 0 = no limit.
        certificate: for TLS; None = no TLS.

    Attributes:
        address: host:port that joiners dial. Their proof covers it.
        send: sends ranges of the payload. Fault injection replaces it.
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
        self.send: SendBytes = self._pace.send
        self._changed = threading.Condition()  # guards the fields below
        self._snapshot: Snapshot | None = None
        self._copy_seconds = 0.0
        self._num_readers = 0  # connections that read the snapshot
        self._is_pinned = False
        self._offer: Message | None = None
        self._offered_at = 0.0
        self._copy_offered: Callable[[int, Part], None] | None = None
        self._wanted: Part | None = None
        self._use_device = device.for_thread()
        self._unproven = _Unproven()
        self._server = _Server((host, 0), self._handle, self._unproven.close_late)
        self.address = join_address(host, self.port)
        threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="titan_ft_state_server",
            daemon=True,
        ).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def publish(self, snapshot: Snapshot, copy_seconds: float) -> None:
        """Serve a snapshot from now on.

        Args:
            copy_seconds: time that the host took for the copy, or to start the GPU's copy.
        """
        with self._changed:
            self._snapshot = snapshot
            self._copy_seconds = copy_seconds
            self._wanted = None
            self._is_pinned = True
            self._changed.notify_all()

    @property
    def is_pinned(self) -> bool:
        """True if the snapshot must stay; see `pin`."""
        return self._is_pinned

    def pin(self, is_pinned: bool) -> None:
        """Note whether the snapshot must stay for a joiner that has this donor only.

        While it must stay, no state that would replace it is offered. `publish` pins the new
        snapshot: it must stay until the next round shows which joiner fetches it.
        """
        self._is_pinned = is_pinned

    def withdraw(self) -> Snapshot | None:
        """Stop serving. Returns the snapshot for reuse, or None if a joiner still reads it."""
        with self._changed:
            snapshot = self._snapshot
            self._snapshot = None
            if self._num_readers > 0:
                return None
            return snapshot

    def offer(
        self,
        offer: Message | None,
        copy: Callable[[int, Part], None] | None = None,
    ) -> None:
        """Let joiners ask for a state that is not copied yet. See `wanted`.

        Args:
            offer: step, lineage and digest of the state. None withdraws the offer; a joiner that
                already waits for the state then waits at most `wait_seconds` longer.
            copy: publishes the offered state of a step, or a part of it, if that is still possible.
                The thread of the joiner's connection calls it.
        """
        with self._changed:
            self._offer = offer
            self._copy_offered = copy
            self._wanted = None
            self._offered_at = time.monotonic()
            self._changed.notify_all()

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that is served."""
        return self._snapshot

    @property
    def offered_step(self) -> int:
        """Committed updates of the offered state; -1 = no state is offered."""
        offer = self._offer
        return -1 if offer is None else offer["step"]

    @property
    def wanted(self) -> Part | None:
        """The part of the offered state that a joiner waits for; None = no joiner waits."""
        return self._wanted

    def close(self) -> None:
        """Stop listening, drop the snapshot, and end the answers under way."""
        self._pace.close()
        self.withdraw()
        with self._changed:
            self._changed.notify_all()
        # Wakes the thread that listens. macOS does not allow it: there the next poll ends the
        # thread.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()

    # On the thread of a connection

    def _handle(self, connection: socket.socket) -> None:
        self._use_device()
        connection.settimeout(_HANDSHAKE_SECONDS)
        # The end of an answer must not wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        user_timeout = int(_JOINER_SECONDS * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout)
        with self._unproven.holding(connection):
            stream = check_joiner(connection, self.address, self._token, self._certificate)
        with contextlib.closing(stream.connection):
            self._serve(stream)

    def _serve(self, stream: SealedStream) -> None:
        """Answer requests until the joiner closes the connection."""
        started = time.monotonic()
        while True:
            request = self._read_request(stream)
            if not request:
                return
            if "probe" in request:
                answer_probe(stream, request, self._token)
                continue
            if "offer" in request:
                offer = self._find_offer(request.get("step", 0))
                stream.write(offer or {"error": "this group offers no state"})
                continue
            snapshot = self._acquire(stream, request)
            if isinstance(snapshot, str):
                stream.write({"error": snapshot})
                continue
            try:
                snapshot.wait()  # a GPU may still be copying
                self._answer(stream, request, snapshot, self._choose_sender(request))
            finally:
                with self._changed:
                    self._num_readers -= 1
            joiner = request.get("done")
            if joiner:
                copy_seconds = max(self._copy_seconds, snapshot.copy_seconds)
                serve_seconds = time.monotonic() - started
                self._served(joiner, snapshot, request["bytes"], copy_seconds, serve_seconds)

    def _choose_sender(self, request: Message) -> SendBytes:
        """Return the function that sends the answer. Injected faults hit payload ranges only."""
        if "offset" in request:
            return self.send
        return self._pace.send

    def _find_offer(self, step: int) -> Message | None:
        """Return the offer, unless taking it would replace a snapshot that must stay.

        If this group offers fewer than `step` updates, it is about to make the next update. So wait
        for that a moment.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_offer(step), _OFFER_SECONDS)
            offer = self._offer
            if offer is None:
                return None
            held = self._snapshot
            if self._is_pinned and held is not None and held.step != offer["step"]:
                return None
            elapsed = int(1000 * (time.monotonic() - self._offered_at))
            return Message({**offer, "elapsed_milliseconds": elapsed})

    def _has_offer(self, step: int) -> bool:
        """True if the offer has this many updates, or if there is none."""
        return self._offer is None or self._offer["step"] >= step

    @staticmethod
    def _read_request(stream: SealedStream) -> Message:
        """Wait for a request without a limit, because a joiner may pause between two requests.

        The bytes that belong to a request follow at once.
        """
        stream.connection.settimeout(None)
        request = stream.read()
        if "probe" in request:
            stream.connection.settimeout(_HANDSHAKE_SECONDS)
        return request

    def _acquire(self, stream: SealedStream, request: Message) -> Snapshot | str:
        """Wait for the snapshot of a request, and become one of its readers.

        If the state is offered, have it copied, or let the training thread copy it between two
        steps (`wanted`). Returns a text with the reason if there is no such snapshot.
        """
        step = request["step"]
        lineage = request.get("lineage")  # None in a request for the header
        part = _read_part(request)
        deadline = time.monotonic() + self._wait_seconds
        # Locals: the training thread may withdraw both at any time.
        held, copy_offered = self._snapshot, self._copy_offered
        if "header" not in request:
            # This request goes on with the snapshot whose header the joiner has.
            if held is not None:
                part = held.part
        elif copy_offered is not None and not self._is_settled(step, part):
            copy_offered(step, part)
        while True:
            with self._changed:
                is_offered = self._offer is not None and self._offer["step"] == step
                if is_offered and not self._is_settled(step, part):
                    self._wanted = part
                # The training thread copies an offered state between two steps, which may be long.
                # So only the wait for a state that is not offered has a limit.
                remaining = math.inf if is_offered else deadline - time.monotonic()
                is_settled = self._changed.wait_for(
                    lambda: self._is_settled(step, part), min(_WAITING_SECONDS, remaining)
                )
                is_over = is_settled or remaining <= _WAITING_SECONDS
                found = self._snapshot
                if found is not None and (is_over or not is_offered):
                    is_right = found.step == step and lineage in (None, found.lineage)
                    if is_right:
                        self._num_readers += 1
                        return found
            if is_over:
                text = "none" if found is None else f"step {found.step} of lineage {found.lineage}"
                return f"the donor has no state of step {step} (it has {text})"
            stream.write({"waiting": step})

    def _is_settled(self, step: int, part: Part) -> bool:
        """True if a request for a part of the state of `step` need not wait any longer."""
        if self._pace.closed:
            return True
        held, offer = self._snapshot, self._offer  # locals: called without the lock as well
        if held is not None and held.step > step:
            return True  # that state is gone
        if offer is not None and offer["step"] > step:
            return True
        return held is not None and held.step == step and held.part in (WHOLE, part)

    @staticmethod
    def _answer(
        stream: SealedStream,
        request: Message,
        snapshot: Snapshot,
        send: SendBytes,
    ) -> None:
        held = snapshot.byte_range
        answer = Message()
        data = memoryview(b"")
        if "offset" in request:
            start = request["offset"]
            stop = start + request["bytes"]
            if start < held.start or stop > held.stop:
                text = f"the donor has bytes {held.start} to {held.stop} of the state only"
                stream.write({"error": text})
                return
            data = octets(snapshot.payload)[start - held.start : stop - held.start]
        elif request.get("header"):
            data = memoryview(snapshot.header)
            answer = Message(held=(held.start, held.stop))
        answer["bytes"] = data.nbytes
        answer["sha256"] = hashlib.sha256(data).hexdigest()
        stream.write(answer)
        send(stream.connection, data)


def _read_part(request: Message) -> Part:
    """Return the part of the state that a request asks for.

    Raises:
        ValueError: there is no such part.
    """
    index, count = request.get("part", (0, 1))
    if index >= count:
        raise ValueError(f"no part of a state: {index} of {count}")
    return Part(index, count)


class _Unproven:
    """The connections whose other end has not proved yet that it knows the token.

    The timeout of a socket starts anew with each byte. A stranger who sends a byte now and then
    would keep a thread and a descriptor for good, and many such connections would leave the worker
    without descriptors. Each connection's thread calls `holding`; the thread that listens calls
    `close_late`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # When each connection was accepted, the oldest first. The keys are duplicates: TLS takes
        # over the descriptor of the connection itself.
        self._accepted_at: dict[socket.socket, float] = {}

    @contextlib.contextmanager
    def holding(self, connection: socket.socket) -> Iterator[None]:
        """Count a connection during its handshake."""
        duplicate = connection.dup()
        with self._lock:
            self._accepted_at[duplicate] = time.monotonic()
            if len(self._accepted_at) > _MAX_UNPROVEN:
                self._shut_down(next(iter(self._accepted_at)))
        try:
            yield
        finally:
            with self._lock:
                self._accepted_at.pop(duplicate, None)
                duplicate.close()

    def close_late(self) -> None:
        """End the handshakes that have taken too long."""
        now = time.monotonic()
        with self._lock:
            for connection, accepted_at in list(self._accepted_at.items()):
                if now - accepted_at >= _HANDSHAKE_SECONDS:
                    self._shut_down(connection)

    def _shut_down(self, connection: socket.socket) -> None:
        """Wake the connection's thread with an end of file. That thread closes the connection."""
        del self._accepted_at[connection]
        with contextlib.suppress(OSError):  # the other end has gone
            connection.shutdown(socket.SHUT_RDWR)


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections, and handles each one on a thread of its own.

    Args:
        handle: serves a connection.
        look: called after each poll and each connection, on the thread that listens.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handle: Callable[[socket.socket], None],
        look: Callable[[], None],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._handle = handle
        self._look = look
        super().__init__(address, socketserver.BaseRequestHandler)

    def service_actions(self) -> None:
        self._look()

    def finish_request(self, request: Any, client_address: Any) -> None:
        # The joiner has gone, or speaks another protocol. A real joiner asks again, here or at
        # another donor.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._handle(request)
