# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a transfer: serves a snapshot to joiners.

A *snapshot* is a copy of one rank's state in host memory (`snapshot.py`). An *offer* says which
state the rank holds now. The state of an offer is copied only when a joiner asks for it.

`wire.py` describes the messages. See docs/heal.md.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from titan_ft import device
from titan_ft.system.address import join_address
from titan_ft.system.refusal import (
    Refusal,
    RefusalKind,
    Refusals,
    StrangerError,
    find_crowded,
)
from titan_ft.transfer.pace import Pace
from titan_ft.transfer.reach import answer_probe
from titan_ft.transfer.snapshot import WHOLE, Part, Snapshot
from titan_ft.transfer.tls import Certificate
from titan_ft.transfer.wire import Message, SealedStream, check_joiner, octets

_HANDSHAKE_SECONDS = 10.0
_MAX_UNPROVED = 64
"""Limit of the connections whose other end has not yet proved that it knows the token. Beyond it,
one of them is closed (`_choose_one_to_close`)."""

_MAX_HANDSHAKES = 2 * _MAX_UNPROVED
"""Limit of the handshakes whose threads have not ended. While it is reached, nothing is accepted: a
flood of connections would take all descriptors before the threads of the closed ones have had their
turn with Python's lock. Gloo needs descriptors, too, and a rank without any is aborted."""

_NEXT_UPDATE_SECONDS = 1.0
"""If a joiner asks for a later state than this donor has, the donor waits at most this long for its
next update. Then it answers with the offer that it has. The joiner waits longer for the answer
(`_OFFER_SECONDS` in `state_fetch.py`)."""

_WAITING_SECONDS = 1.0
"""Pause between two `waiting` messages to a joiner whose state is not copied yet. A joiner takes a
longer silence (`_STALL_SECONDS` in `state_fetch.py`) for a broken connection."""

_POLL_SECONDS = 1.0
"""Poll interval of the thread that listens. `close` wakes the thread, so a shorter interval would
only cost CPU."""

_UNREAD_SECONDS = 60.0
"""A joiner that takes no bytes for this long is dropped. Until then its snapshot's memory cannot be
used for the next copy."""

_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Seconds, seconds, probes: how the kernel finds that a silent joiner's host has vanished. Between
two requests a joiner may be silent for long."""

_NO_DESCRIPTOR_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ACCEPT_PAUSE_SECONDS = 0.1  # after one of these errors

SendBytes = Callable[[socket.socket, memoryview], None]
"""Sends all bytes of a view to a connection."""


@dataclass(frozen=True)
class CompletedTransfer:
    """A transfer after which a joiner has its whole state.

    Attributes:
        joiner: the joiner's name, as its requests give it.
        snapshot: the copy of the state that this donor served.
        num_bytes: bytes that the joiner got from this donor; other donors gave the rest.
        copy_seconds: time that the copy took the host or the GPU, whichever was longer.
        serve_seconds: duration of the joiner's connection so far.
    """

    joiner: str
    snapshot: Snapshot
    num_bytes: int
    copy_seconds: float
    serve_seconds: float


class _NoStateError(Exception):
    """This donor cannot serve the requested state. The joiner gets the text as the answer."""


class StateServer:
    """Serves the latest snapshot of this rank.

    `training/links.py` creates it. `engine/donor.py` offers states and publishes snapshots.

    Threads: any thread may call the public methods. One thread listens, and each connection has a
    thread of its own (`_handle` and the methods after it). Training never waits for a connection.

    If a connection fails, only its thread ends. The joiner asks again.

    Args:
        host: address to listen on.
        token: the run's shared secret.
        wait_seconds: limit of a request's wait for a state that this rank neither offers nor has
            copied; the training thread may be about to publish it. A request for an offered state
            waits without limit.
        on_completed: called on the thread of the connection when a joiner has its whole state.
        max_mbps: limit for all joiners together in 10**6 bits per second; 0 = no limit.
        certificate: for TLS; None = no TLS.
        on_refusal: takes the first refused stranger of each kind, on a thread of this server.

    Attributes:
        address: host:port that joiners dial. A joiner's proof of the token includes it, so another
            donor refuses that proof.
        send: sends ranges of the payload. Fault injection replaces it.
    """

    def __init__(
        self,
        host: str,
        token: str,
        wait_seconds: float,
        on_completed: Callable[[CompletedTransfer], None],
        max_mbps: float = 0.0,
        certificate: Certificate | None = None,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        self._certificate = certificate
        self._token = token
        self._wait_seconds = wait_seconds
        self._on_completed = on_completed
        self._pace = Pace(max_mbps)
        self.send: SendBytes = self._pace.send
        # Called first on each connection's thread: a new thread would begin on GPU 0.
        self._select_device = device.for_thread()
        # Guards changes of the fields from here to `_wanted_part`. Reading one field needs no lock.
        # `pin` needs none: `engine/donor.py` holds its own lock around `publish`, `withdraw` and
        # `pin`. It is notified when the snapshot or the offer changes, and by `close`.
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._offer: Message | None = None
        self._offered_at = 0.0
        self._copy_offered: Callable[[int, Part], None] | None = None
        self._host_copy_seconds = 0.0  # that the host took to make the snapshot
        self._num_readers = 0  # connections that read the snapshot
        self._is_pinned = False
        self._wanted_part: Part | None = None
        self._refusals = Refusals(_HANDSHAKE_SECONDS, on_refusal)
        self._unproved = _UnprovedConnections(self._refusals)
        self._server = _ConnectionServer(
            (host, 0), self._handle, self._unproved.close_late, self._unproved.close_one
        )
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
            self._host_copy_seconds = copy_seconds
            self._wanted_part = None
            self._is_pinned = True
            self._changed.notify_all()

    @property
    def is_pinned(self) -> bool:
        """True if no other snapshot may replace the present one; see `pin`."""
        return self._is_pinned

    def pin(self, is_pinned: bool) -> None:
        """Set whether the snapshot must stay, because a joiner's row names this donor.

        This is not about page-locked memory. While the snapshot must stay, joiners get no offer of
        another state, whose copy would replace it. `publish` pins a new snapshot, because only the
        next round shows which joiner fetches it.
        """
        self._is_pinned = is_pinned

    def withdraw(self) -> Snapshot | None:
        """Drop the snapshot. The offer stays.

        Returns:
            The snapshot, whose memory is free; None if a joiner still reads it, or if there is
            none.
        """
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
        """Let joiners ask for a state that is not copied yet.

        Args:
            offer: step, lineage and digest of the state. None withdraws the offer. A request that
                already waits for the state then fails `wait_seconds` after its arrival.
            copy: copy(step, part) copies the state and publishes the copy. It does nothing if the
                state has changed meanwhile. The thread of a connection calls it. None = only the
                training thread may copy the state, because a forward may write a part of it, or
                because all ranks must copy after the same step. It copies when it sees
                `wanted_part`.
        """
        with self._changed:
            self._offer = offer
            self._copy_offered = copy
            self._wanted_part = None
            self._offered_at = time.monotonic()
            self._changed.notify_all()

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that is served."""
        return self._snapshot

    @property
    def offered_step(self) -> int | None:
        """Committed updates in the offered state; None = no state is offered."""
        offer = self._offer  # a local: another thread may withdraw the offer
        return None if offer is None else offer["step"]

    @property
    def wanted_part(self) -> Part | None:
        """The part of the offered state that a joiner waits for; None = no joiner waits."""
        return self._wanted_part

    def close(self) -> None:
        """Stop listening, drop the snapshot, and end the answers under way."""
        self._server.is_closing = True
        self._pace.close()  # ends the answers that are being sent; `_is_wait_over` reads it, too
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

    def _handle(self, connection: socket.socket, source: str) -> None:
        try:
            stream = self._shake_hands(connection, source)
        finally:
            self._server.end_handshake()
        with contextlib.closing(stream.connection):
            self._serve(stream)

    def _shake_hands(self, connection: socket.socket, source: str) -> SealedStream:
        """Return the connection's stream, once the other end has proved that it knows the token."""
        self._select_device()
        connection.settimeout(_HANDSHAKE_SECONDS)
        # The end of an answer must not wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", int(_UNREAD_SECONDS * 1000))):
            option = vars(socket).get(name)
            if option is not None:  # macOS does not have all of them
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._unproved.track(connection, source):
            try:
                return check_joiner(connection, self.address, self._token, self._certificate)
            except StrangerError:
                self._refusals.add("no_secret", source)
                raise
            except TimeoutError:
                self._refusals.add("silent", source)
                raise

    def _serve(self, stream: SealedStream) -> None:
        """Answer requests until the joiner closes the connection."""
        started = time.monotonic()
        while True:
            request = self._read_request(stream)
            is_closed = not request
            if is_closed:
                return
            if "probe" in request:
                answer_probe(stream, request, self._token)
            elif "offer" in request:
                offer = self._find_offer(least_step=request.get("step", 0))
                stream.write(offer or {"error": "this group offers no state"})
            else:
                self._serve_state(stream, request, started)

    def _serve_state(self, stream: SealedStream, request: Message, started: float) -> None:
        """Answer a request for the header or a range of a state, or the joiner's farewell.

        A farewell takes the snapshot as well, for `CompletedTransfer`. If the snapshot has been
        replaced meanwhile, the joiner gets an error, and nothing is reported.

        Args:
            started: monotonic time in seconds at which the connection began.
        """
        try:
            snapshot = self._acquire(stream, request)
        except _NoStateError as error:
            stream.write({"error": str(error)})
            return
        try:
            snapshot.wait()  # a GPU may still be copying
            self._answer(stream, request, snapshot, self._choose_sender(request))
        finally:
            with self._changed:
                self._num_readers -= 1
        joiner = request.get("done")  # a farewell holds the joiner's name here
        if joiner:
            completed = CompletedTransfer(
                joiner,
                snapshot,
                request["bytes"],
                copy_seconds=max(self._host_copy_seconds, snapshot.copy_seconds),
                serve_seconds=time.monotonic() - started,
            )
            self._on_completed(completed)

    def _choose_sender(self, request: Message) -> SendBytes:
        """Return the function that sends the answer. Injected faults hit payload ranges only."""
        if "offset" in request:
            return self.send
        return self._pace.send

    def _find_offer(self, least_step: int) -> Message | None:
        """Return the offer, unless its copy would replace a snapshot that must stay.

        If the offered state is older than `least_step`, this group is about to make the next
        update. Then wait `_NEXT_UPDATE_SECONDS` for it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._offers_at_least(least_step), _NEXT_UPDATE_SECONDS)
            offer = self._offer
            if offer is None:
                return None
            snapshot = self._snapshot
            would_replace = snapshot is not None and snapshot.step != offer["step"]
            if self._is_pinned and would_replace:
                return None
            elapsed = int(1000 * (time.monotonic() - self._offered_at))
            return Message({**offer, "elapsed_milliseconds": elapsed})

    def _offers_at_least(self, least_step: int) -> bool:
        """True if the offered state is of `least_step` or later, or if there is no offer."""
        return self._offer is None or self._offer["step"] >= least_step

    @staticmethod
    def _read_request(stream: SealedStream) -> Message:
        """Wait for a request. Returns an empty message if the joiner has closed the connection.

        There is no time limit, because a joiner may pause between two requests. After a probe's
        request there is one, because the probe's bytes follow at once.
        """
        stream.connection.settimeout(None)
        request = stream.read()
        if "probe" in request:
            stream.connection.settimeout(_HANDSHAKE_SECONDS)
        return request

    def _acquire(self, stream: SealedStream, request: Message) -> Snapshot:
        """Wait for the snapshot of a request, and become one of its readers.

        1. The request for the header is a joiner's first request for a state. If the state is only
           offered, copy it on this thread, or let the training thread copy it between two steps
           (`wanted_part`).
        2. Wait until the snapshot is there, or until it can come no more. Meanwhile tell the joiner
           now and then to wait.

        Raises:
            _NoStateError: this donor does not have the state.
        """
        wanted = _WantedState(
            request["step"],
            request.get("lineage"),
            _read_part(request),
            has_header="header" not in request,
        )
        deadline = time.monotonic() + self._wait_seconds
        # Locals: the training thread may withdraw both at any time.
        snapshot, copy_offered = self._snapshot, self._copy_offered
        if wanted.has_header:
            # Only the request for the header names a part. A later one takes what the snapshot
            # has: the joiner has its header.
            if snapshot is not None:
                wanted = replace(wanted, part=snapshot.part)
        elif copy_offered is not None and not self._is_wait_over(wanted):
            copy_offered(wanted.step, wanted.part)
        while True:
            with self._changed:
                offer = self._offer
                is_offered = offer is not None and wanted.is_state(offer["step"], offer["lineage"])
                if is_offered and not self._is_wait_over(wanted):
                    self._wanted_part = wanted.part
                # Between two steps the training thread copies an offered state. A step may be long,
                # so the wait for an offered state has no limit.
                remaining_seconds = math.inf
                if not is_offered:
                    remaining_seconds = deadline - time.monotonic()
                is_decided = self._changed.wait_for(
                    lambda: self._is_wait_over(wanted),
                    min(_WAITING_SECONDS, remaining_seconds),
                )
                is_late = remaining_seconds <= _WAITING_SECONDS  # that was the last wait
                is_over = is_decided or is_late
                found = self._snapshot
                # While the state is offered, the wanted part may still be copied. Otherwise nobody
                # copies it: the present snapshot of this state must do, even of another part.
                may_serve = is_over or not is_offered
                if found is not None and may_serve and wanted.is_state(found.step, found.lineage):
                    self._num_readers += 1
                    return found
            if is_over:
                present = "none"
                if found is not None:
                    present = f"step {found.step} of lineage {found.lineage}"
                raise _NoStateError(f"the donor has no state of {wanted} (it has {present})")
            stream.write({"waiting": wanted.step})

    def _is_wait_over(self, wanted: _WantedState) -> bool:
        """True if the wanted part of the wanted state is here, or can no longer come."""
        if self._pace.closed:
            return True
        snapshot, offer = self._snapshot, self._offer  # locals: called without the lock as well
        if offer is not None:
            # The state has changed, and can no longer be copied. If the step is the same, the group
            # has healed: all other groups made that step's update in another exchange.
            is_other = not wanted.is_state(offer["step"], offer["lineage"])
            if offer["step"] > wanted.step or (offer["step"] == wanted.step and is_other):
                return True
        if snapshot is None or snapshot.step < wanted.step:
            return False
        if snapshot.step > wanted.step:
            return True  # the state has been replaced
        if not wanted.is_state(snapshot.step, snapshot.lineage):
            # This copy has replaced the wanted state if the joiner has got the header. Before that,
            # a copy of the wanted state may still replace this one.
            return wanted.has_header
        return snapshot.part in (WHOLE, wanted.part)

    @staticmethod
    def _answer(
        stream: SealedStream,
        request: Message,
        snapshot: Snapshot,
        send: SendBytes,
    ) -> None:
        """Send a range of the payload or the header. The answer to a farewell has no bytes."""
        copied = snapshot.byte_range
        answer = Message()
        data = memoryview(b"")
        if "offset" in request:
            start = request["offset"]
            stop = start + request["bytes"]
            if start < copied.start or stop > copied.stop:
                text = f"the donor has bytes {copied.start} to {copied.stop} of the state only"
                stream.write({"error": text})
                return
            data = octets(snapshot.payload)[start - copied.start : stop - copied.start]
        elif request.get("header"):
            data = memoryview(snapshot.header)
            answer = Message(held=(copied.start, copied.stop))
        answer["bytes"] = data.nbytes
        answer["sha256"] = hashlib.sha256(data).hexdigest()
        stream.write(answer)
        send(stream.connection, data)


@dataclass(frozen=True)
class _WantedState:
    """The state that a joiner requests.

    Attributes:
        step: committed updates in the state.
        lineage: None = any lineage.
        part: the part that suffices if this host's memory is scarce.
        has_header: the joiner has got this donor's header of the state already.
    """

    step: int
    lineage: int | None
    part: Part
    has_header: bool

    def is_state(self, step: int, lineage: int) -> bool:
        """True if this step and lineage are those of the wanted state."""
        return step == self.step and self.lineage in (None, lineage)

    def __str__(self) -> str:
        if self.lineage is None:
            return f"step {self.step}"
        return f"step {self.step} of lineage {self.lineage}"


def _read_part(request: Message) -> Part:
    """Return the part of the state that a request asks for; without one, the whole state.

    Raises:
        ValueError: there is no such part.
    """
    if "part" not in request:
        return WHOLE
    index, count = request["part"]
    if not 0 <= index < count:
        raise ValueError(f"no part of a state: {index} of {count}")
    return Part(index, count)


@dataclass(frozen=True)
class _Accepted:
    """When a connection was accepted (monotonic seconds), and the address of its other end."""

    at: float
    source: str


class _UnprovedConnections:
    """The connections whose other end has not proved yet that it knows the token.

    The timeout of a socket starts anew with each byte. So a stranger who sends a byte now and then
    would keep a thread and a descriptor for good. Many such connections would leave the process
    without descriptors. This class limits the duration of a handshake and the number of
    connections.

    The thread of each connection calls `track`. The thread that listens calls `close_late`.

    Args:
        refusals: counts the connections that this class ends.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._lock = threading.Lock()
        # When and from where each connection was accepted, the oldest first. The keys are
        # duplicates: TLS takes over the descriptor of the connection itself.
        self._accepted: dict[socket.socket, _Accepted] = {}

    @contextlib.contextmanager
    def track(self, connection: socket.socket, source: str) -> Iterator[None]:
        """Count a connection as unproved during its handshake."""
        duplicate = connection.dup()
        with self._lock:
            self._accepted[duplicate] = _Accepted(time.monotonic(), source)
            if len(self._accepted) > _MAX_UNPROVED:
                self._shut_down(self._choose_one_to_close(), "crowd")
        try:
            yield
        finally:
            with self._lock:
                self._accepted.pop(duplicate, None)
                duplicate.close()

    def close_one(self) -> None:
        """Make room after a descriptor could not be had, because strangers may hold them."""
        with self._lock:
            if self._accepted:
                self._shut_down(self._choose_one_to_close(), "no_descriptors")

    def _choose_one_to_close(self) -> socket.socket:
        return find_crowded([*self._accepted], lambda connection: self._accepted[connection].source)

    def close_late(self) -> None:
        """End the handshakes that have taken too long."""
        now = time.monotonic()
        with self._lock:
            for connection, accepted in list(self._accepted.items()):
                if now - accepted.at >= _HANDSHAKE_SECONDS:
                    self._shut_down(connection, "silent")

    def _shut_down(self, connection: socket.socket, kind: RefusalKind) -> None:
        """Wake the connection's thread with an end of file. That thread closes the connection."""
        accepted = self._accepted.pop(connection)
        self._refusals.add(kind, accepted.source)
        with contextlib.suppress(OSError):  # the other end has gone
            connection.shutdown(socket.SHUT_RDWR)


class _ConnectionServer(socketserver.ThreadingTCPServer):
    """Accepts connections, and handles each one on a thread of its own.

    Args:
        handle: serves a connection; gets it with the numeric address of its other end.
        on_poll: called after each poll and each connection, on the thread that listens.
        on_no_descriptor: called there when a connection cannot be accepted for want of one.

    Attributes:
        is_closing: True makes the thread that listens accept nothing more.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handle: Callable[[socket.socket, str], None],
        on_poll: Callable[[], None],
        on_no_descriptor: Callable[[], None],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._handle = handle
        self._on_poll = on_poll
        self._on_no_descriptor = on_no_descriptor
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self.is_closing = False
        super().__init__(address, socketserver.BaseRequestHandler)

    def service_actions(self) -> None:
        self._on_poll()

    def end_handshake(self) -> None:
        """Make room for another handshake; the thread of a connection calls this once."""
        self._handshakes.release()

    def get_request(self) -> tuple[socket.socket, Any]:
        while not self._handshakes.acquire(timeout=_ACCEPT_PAUSE_SECONDS):
            if self.is_closing:
                raise OSError("the state server is closed")
            self._on_poll()  # may end a handshake
        try:
            return super().get_request()
        except OSError as error:
            self._handshakes.release()
            if error.errno in _NO_DESCRIPTOR_LEFT:
                self._on_no_descriptor()
                # The listening socket stays readable. Without the pause this thread would spin, and
                # hold Python's lock against the training thread.
                time.sleep(_ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._handshakes.release()
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        # OSError: the joiner has gone, or was refused (`StrangerError` is one). The others: its
        # message is malformed. A real joiner asks again, here or at another donor.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._handle(request, client_address[0])
