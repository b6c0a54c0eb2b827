# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a transfer: serves a copy of this rank's state to joiners.

A *joiner* is a group that lacks the job's state, and a *donor* is a group that serves it. Each rank
of a joiner fetches its state from the rank of the same number in each donor.

Terms:

- A *snapshot* is a copy of one rank's state in host memory (`snapshot.py`). Its *header* lists the
  tensors, and its *payload* has their bytes.
- An *offer* says which state this rank holds: its *step*, which is its number of committed updates,
  its *lineage*, which is a hash of the exchanges that made it, and its *digest*, which is a hash of
  its bytes. Two groups hold the same state if step and lineage are equal.
- A *part* of the state is copied instead of the whole if the memory of the donors is scarce. Each
  of several donors then serves another part.

In order of time:

1. After each update, the training thread offers the state (`StateServer.offer`).
2. A joiner connects, and proves that it knows the run's token. It asks for the offer.
3. The joiner requests the header of the offered state. Only now the state is copied: by the thread
   of the connection if the offer allows it, and otherwise by the training thread, which reads
   `wanted_part` between two steps. Either thread publishes the snapshot (`publish`).
4. The joiner requests ranges of the payload, on several connections. At the end it says farewell.
5. When no joiner needs the snapshot any more, the training thread withdraws it (`withdraw`).

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
from titan_ft.transfer.wire import Message, SealedStream, handshake_as_donor, octets

_HANDSHAKE_SECONDS = 10.0
_MAX_UNPROVED = 64
"""Limit of the connections whose other end has not proved yet that it knows the token. If one more
comes, one of them is closed (`_choose_one_to_close`)."""

_MAX_HANDSHAKES = 2 * _MAX_UNPROVED
"""Limit of the threads that make handshakes, those of closed connections included. While it is
reached, no connection is accepted. Otherwise a flood of connections would take all descriptors of
the process, because each closed connection keeps its descriptors until its thread runs and ends.
Gloo needs descriptors too, and a rank that gets none is aborted."""

_NEXT_UPDATE_SECONDS = 1.0
"""If a joiner asks for a later state than this donor has, the donor waits at most this long for its
next update. Then it answers with the offer that it has. The joiner waits longer for the answer
(`_OFFER_SECONDS` in `state_fetch.py`)."""

_WAITING_SECONDS = 1.0
"""Pause between two `waiting` messages to a joiner while its state is not copied yet. Without these
messages the joiner would take the silence for a broken connection (`_STALL_SECONDS` in
`state_fetch.py`)."""

_POLL_SECONDS = 1.0
"""Interval at which the thread that listens looks for overdue handshakes, and for `close` on macOS.
Elsewhere `close` wakes the thread."""

_UNREAD_SECONDS = 60.0
"""A joiner that takes no bytes for this long is dropped. While it reads, the memory of its snapshot
cannot be used for the next copy."""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Options of a connection. A joiner may be silent for long between two requests. After 60 s of
silence the kernel asks the joiner's host every 10 s. If three of these probes get no answer, the
host has vanished."""

_NO_DESCRIPTOR_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of `accept` if the process or the host has too many descriptors, or too little memory."""
_ACCEPT_PAUSE_SECONDS = 0.1
"""Pause before the next `accept` after such an error, and between two tries to begin a handshake
while `_MAX_HANDSHAKES` is reached."""

SendBytes = Callable[[socket.socket, memoryview], None]
"""Sends all bytes of a view to a connection."""


@dataclass(frozen=True)
class CompletedTransfer:
    """A transfer after which a joiner has its whole state.

    Attributes:
        joiner: the joiner's name, from its farewell.
        snapshot: the copy of the state that this donor served.
        num_bytes: bytes that the joiner got from this donor. Other donors sent the rest.
        copy_seconds: time that the copy took on the host or on the GPU, whichever was longer.
        serve_seconds: time since the start of the connection on which the farewell came.
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

    Threads: any thread may call the public methods. One thread listens. Each connection has a
    thread of its own, which runs `_handle` and the methods after it. Training never waits for a
    connection.

    If a connection fails, only its thread ends, and the joiner connects again.

    Args:
        host: address to listen on.
        token: the run's shared secret.
        wait_seconds: limit of a request's wait for a state that is neither offered nor copied. The
            training thread may be about to publish it. The wait for an offered state has no limit.
        on_completed: called when a joiner has its whole state, on the thread of the connection.
        max_mbps: limit for all joiners together in 10**6 bits per second; 0 = no limit.
        certificate: for TLS; None = no TLS.
        on_refusal: called with the first refused stranger of each kind, on a thread of this server.

    Attributes:
        address: host:port that joiners dial. A joiner's proof of the token includes this address,
            so the proof is worth nothing at another server.
        send: sends ranges of the payload. Fault injection replaces this function.
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
        # Each connection's thread calls this function first. Otherwise it would use GPU 0.
        self._select_device = device.thread_initializer()
        # The lock for changes of the fields from `_snapshot` to `_wanted_part`. A thread may read
        # one field without the lock. The condition is notified when the snapshot or the offer
        # changes, and by `close`.
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._offer: Message | None = None
        self._offered_at = 0.0  # monotonic seconds
        # Makes a copy of the offered state; see `offer`.
        self._copy_function: Callable[[int, Part], None] | None = None
        self._host_copy_seconds = 0.0  # duration of the snapshot's copy on the host
        self._num_readers = 0  # connections that read the snapshot
        self._wanted_part: Part | None = None
        # Without the lock: `engine/donor.py` calls `publish`, `withdraw` and `keep_snapshot` under
        # a lock of its own.
        self._is_snapshot_kept = False
        self._refusals = Refusals(_HANDSHAKE_SECONDS, on_refusal)
        self._unproved = _UnprovedConnections(self._refusals)
        self._server = _ConnectionServer(
            (host, 0),
            self._handle,
            on_poll=self._unproved.close_overdue,
            on_no_descriptor=self._unproved.close_one,
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
            # Only the next round shows which joiner fetches the snapshot. Keep it until then.
            self._is_snapshot_kept = True
            self._changed.notify_all()

    @property
    def is_snapshot_kept(self) -> bool:
        """True if no snapshot of another step may replace the present one; see `keep_snapshot`."""
        return self._is_snapshot_kept

    def keep_snapshot(self, is_kept: bool) -> None:
        """Set whether the present snapshot is kept for a joiner, whose row names this donor.

        While the snapshot is kept, joiners get no offer of another step: the copy of that state
        would replace the snapshot.
        """
        self._is_snapshot_kept = is_kept

    def withdraw(self) -> Snapshot | None:
        """Stop serving the snapshot. The offer stays.

        Returns:
            The snapshot, if the caller may use its memory again; None if there is no snapshot, or
            if a connection still reads it.
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
        """Let joiners request a state that is not copied yet.

        Args:
            offer: step, lineage and digest of the state. None withdraws the offer. A request that
                already waits for the state then fails `wait_seconds` after its arrival.
            copy: copy(step, part) copies the state and publishes the copy. It does nothing if the
                state has changed meanwhile. The threads of the connections call it. None = only the
                training thread may copy the state, when it sees `wanted_part`. This is so if a
                forward may write to the state, and if all ranks must copy after the same step.
        """
        with self._changed:
            self._offer = offer
            self._copy_function = copy
            self._wanted_part = None
            self._offered_at = time.monotonic()
            self._changed.notify_all()

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that is served; None = there is none."""
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
        # Ends the answers that are being sent. Requests that wait end too (`_is_wait_over`).
        self._pace.close()
        self.withdraw()
        with self._changed:
            self._changed.notify_all()
        # Wake the thread that listens. macOS does not allow it, and the thread ends at its next
        # poll.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()

    # On the thread of a connection

    def _handle(self, connection: socket.socket, source: str) -> None:
        """Serve one connection.

        Args:
            source: numeric address of the other end.
        """
        try:
            stream = self._shake_hands(connection, source)
        finally:
            self._server.end_handshake()
        with contextlib.closing(stream.connection):
            self._serve(stream)

    def _shake_hands(self, connection: socket.socket, source: str) -> SealedStream:
        """Wait until the other end has proved that it knows the token.

        Returns:
            A stream over the connection.
        """
        self._select_device()
        connection.settimeout(_HANDSHAKE_SECONDS)
        # Without this option, the end of an answer would wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {**_KEEPALIVE, "TCP_USER_TIMEOUT": int(1000 * _UNREAD_SECONDS)}
        for name, value in options.items():
            option = vars(socket).get(name)
            if option is not None:  # macOS does not have all of them
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._unproved.track(connection, source):
            try:
                return handshake_as_donor(connection, self.address, self._token, self._certificate)
            except StrangerError:
                self._refusals.add("no_secret", source)
                raise
            except TimeoutError:
                self._refusals.add("silent", source)
                raise

    def _serve(self, stream: SealedStream) -> None:
        """Answer requests until the joiner closes the connection.

        The fields of a request say what kind of request it is (`wire.py`).
        """
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

        Args:
            started: monotonic time in seconds at which the connection began.
        """
        try:
            # A farewell waits for the snapshot as well, because `CompletedTransfer` names it. If
            # another snapshot has replaced it, the joiner gets an error, and no transfer is
            # reported.
            snapshot = self._await_snapshot(stream, request)
        except _NoStateError as error:
            stream.write({"error": str(error)})
            return
        try:
            snapshot.wait()  # a GPU may still be copying
            self._answer(stream, request, snapshot, self._choose_sender(request))
        finally:
            with self._changed:
                self._num_readers -= 1
        joiner = request.get("done")  # a farewell has the joiner's name in this field
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
        """Return the function that sends the bytes of the answer.

        Injected faults delay or change ranges of the payload only, so only ranges use `send`.
        """
        if "offset" in request:
            return self.send
        return self._pace.send

    def _find_offer(self, least_step: int) -> Message | None:
        """Return the offer; None if there is none, or if its copy would replace a kept snapshot.

        If the offered state is older than `least_step`, this group is probably about to make the
        next update. So wait for it, at most `_NEXT_UPDATE_SECONDS`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._offers_at_least(least_step), _NEXT_UPDATE_SECONDS)
            offer = self._offer
            if offer is None:
                return None
            snapshot = self._snapshot
            if self._is_snapshot_kept and snapshot is not None and snapshot.step != offer["step"]:
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

    def _await_snapshot(self, stream: SealedStream, request: Message) -> Snapshot:
        """Wait for the snapshot of a request, and become one of its readers.

        1. If the request is for the header, the state may be offered and not copied yet. Copy it on
           this thread if the offer allows it. Otherwise set `wanted_part`, so that the training
           thread copies the state between two steps.
        2. Wait until the snapshot is here, or can no longer come. Meanwhile send the joiner
           `waiting` messages.

        Raises:
            _NoStateError: this donor does not have the state.
        """
        wanted = _WantedState.read(request)
        deadline = time.monotonic() + self._wait_seconds
        if wanted.has_header:
            # The joiner accepts any part, because it knows from the header which bytes are here.
            snapshot = self._snapshot  # a local: the training thread may withdraw the snapshot
            if snapshot is not None:
                wanted = replace(wanted, part=snapshot.part)
        else:
            copy_function = self._copy_function  # a local: another thread may end the offer
            if copy_function is not None and not self._is_wait_over(wanted):
                copy_function(wanted.step, wanted.part)
        while True:
            with self._changed:
                is_offered = self._is_offered(wanted)
                if is_offered and not self._is_wait_over(wanted):
                    self._wanted_part = wanted.part
                # The training thread copies an offered state after its step. The step may be long,
                # so the wait for an offered state has no limit.
                remaining_seconds = math.inf
                if not is_offered:
                    remaining_seconds = deadline - time.monotonic()
                is_last_wait = remaining_seconds <= _WAITING_SECONDS
                is_decided = self._changed.wait_for(
                    lambda: self._is_wait_over(wanted),
                    min(_WAITING_SECONDS, remaining_seconds),
                )
                is_over = is_decided or is_last_wait
                found = self._snapshot
                # While the state is offered, another part of it may still be copied. Otherwise the
                # joiner gets the present part, because nobody copies another one.
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

    def _is_offered(self, wanted: _WantedState) -> bool:
        """True if the wanted state is offered."""
        offer = self._offer
        return offer is not None and wanted.is_state(offer["step"], offer["lineage"])

    def _is_wait_over(self, wanted: _WantedState) -> bool:
        """True if the wanted part of the wanted state is here, or can no longer come.

        This method is also called without the lock, so it reads each field once.
        """
        if self._pace.closed:
            return True
        snapshot = self._snapshot
        offer = self._offer
        if offer is not None:
            # This group has gone on to another state, and can no longer copy the wanted one. A
            # state of the same step is another one if this group has healed: the other groups made
            # that update in another exchange.
            is_other = not wanted.is_state(offer["step"], offer["lineage"])
            if is_other and offer["step"] >= wanted.step:
                return True
        if snapshot is None or snapshot.step < wanted.step:
            return False
        if snapshot.step > wanted.step:
            return True  # a later snapshot has replaced the wanted one
        if not wanted.is_state(snapshot.step, snapshot.lineage):
            # Whether this snapshot is older or newer than the wanted one depends on the request. A
            # joiner with the header was served the wanted snapshot before, so this one has replaced
            # it. For the first request, the wanted state may still be copied, and replace this one.
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
        held = snapshot.byte_range  # the bytes of the state that the snapshot has
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


@dataclass(frozen=True)
class _WantedState:
    """The state that a joiner requests.

    Attributes:
        step: committed updates in the state.
        lineage: lineage of the state; None = any lineage.
        part: the part that suffices if the donors' memory is scarce.
        has_header: the joiner has got this donor's header of the state already.
    """

    step: int
    lineage: int | None
    part: Part
    has_header: bool

    @classmethod
    def read(cls, request: Message) -> _WantedState:
        """Return the state that a request is for.

        Raises:
            ValueError: the state has no such part.
        """
        part = WHOLE
        if "part" in request:
            index, count = request["part"]
            if not 0 <= index < count:
                raise ValueError(f"no part of a state: {index} of {count}")
            part = Part(index, count)
        # The request for the header is a joiner's first request for a state.
        has_header = "header" not in request
        return cls(request["step"], request.get("lineage"), part, has_header)

    def is_state(self, step: int, lineage: int) -> bool:
        """True if this step and lineage are those of the wanted state."""
        return step == self.step and self.lineage in (None, lineage)

    def __str__(self) -> str:
        if self.lineage is None:
            return f"step {self.step}"
        return f"step {self.step} of lineage {self.lineage}"


@dataclass(frozen=True)
class _Accepted:
    """A connection that was accepted.

    Attributes:
        accepted_at: monotonic seconds.
        source: numeric address of the other end.
    """

    accepted_at: float
    source: str


class _UnprovedConnections:
    """The connections whose other end has not proved yet that it knows the token.

    This class limits the duration of a handshake, and the number of these connections. The timeout
    of a socket cannot do it, because it starts anew with each byte. A stranger who sends a byte now
    and then would keep a thread and a descriptor for ever, and many such connections would leave
    the process without descriptors.

    Threads: the thread of each connection calls `track`. The thread that listens calls `close_one`
    and `close_overdue`.

    Args:
        refusals: counts the connections that this class ends.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._lock = threading.Lock()
        # The connections, the oldest first. The keys are duplicates of the sockets: TLS takes over
        # the descriptor of the socket itself.
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
        """Make room for a joiner, because no descriptor is left. Strangers may have taken them."""
        with self._lock:
            if self._accepted:
                self._shut_down(self._choose_one_to_close(), "no_descriptors")

    def _choose_one_to_close(self) -> socket.socket:
        """Return the oldest connection from the host that has most of them."""
        return find_crowded([*self._accepted], lambda connection: self._accepted[connection].source)

    def close_overdue(self) -> None:
        """End the handshakes that have taken too long."""
        now = time.monotonic()
        with self._lock:
            for connection, accepted in list(self._accepted.items()):
                if now - accepted.accepted_at >= _HANDSHAKE_SECONDS:
                    self._shut_down(connection, "silent")

    def _shut_down(self, connection: socket.socket, kind: RefusalKind) -> None:
        """Wake the connection's thread with an end of file. That thread closes the connection."""
        accepted = self._accepted.pop(connection)
        self._refusals.add(kind, accepted.source)
        with contextlib.suppress(OSError):  # the other end has gone
            connection.shutdown(socket.SHUT_RDWR)


class _ConnectionServer(socketserver.ThreadingTCPServer):
    """Accepts connections, and handles each one on a thread of its own.

    The thread that listens calls all methods but `end_handshake` and `finish_request`. The base
    class calls the methods that have no docstring.

    Args:
        handle: handle(connection, source) serves a connection on a thread of its own. `source` is
            the numeric address of the other end.
        on_poll: called after each poll and each connection, on the thread that listens.
        on_no_descriptor: called on the thread that listens when no descriptor is left for a
            connection.

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
        # One permit for each handshake. `get_request` takes it, and `end_handshake` returns it.
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
            self._on_poll()  # ends overdue handshakes
        try:
            return super().get_request()
        except OSError as error:
            self._handshakes.release()
            if error.errno in _NO_DESCRIPTOR_LEFT:
                self._on_no_descriptor()
                # The connection still waits in the kernel, so the next poll returns at once.
                # Without the pause this thread would spin, and take Python's lock from the training
                # thread.
                time.sleep(_ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the thread of the connection could not be started
            self._handshakes.release()
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        # OSError: the other end has gone, or was refused (`StrangerError`). The other errors: its
        # message is malformed. A real joiner connects again, here or at another donor.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            self._handle(request, client_address[0])
