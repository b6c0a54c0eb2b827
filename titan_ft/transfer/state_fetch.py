# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The joiner's side of a transfer: fetches one rank's state from several donors at the same time.

1. Ask each donor for the *header*, which describes the state. All donors must give the same one.
2. Divide the *payload*, which has the bytes of the state, into *slices*.
3. Ask each donor for one slice after the other, as fast as it gives them.
4. Say farewell to the donors: tell each of them how many bytes it has given.

Threads: `fetch` runs on the thread of its caller. Each donor has a thread for steps 1 and 4. That
thread starts one more thread for each connection that fetches slices.

`wire.py` describes the messages. See docs/heal.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from io import BufferedRWPair
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch

from titan_ft import device
from titan_ft.protocol.errors import RefusedError
from titan_ft.system.address import split_address
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import Message, Size, Stream, TransferError, octets, prove

logger = logging.getLogger(__name__)

_SLICE_BYTES = 8 << 20

CONNECTIONS = 4
"""Connections of a rank to all its donors together; at least one to each. The rate of one
connection is limited by the core that checks its bytes. More than four do not make a transfer
faster (`bench.py --only transfer`)."""

SLICE_SECONDS = 300.0
"""A transfer is given up after this time without another slice. A whole transfer has no limit: a
large state over a slow link takes as long as it must. Silence ends a connection much earlier. This
limit ends a transfer from a donor that sends a byte now and then."""

_MAX_TRIES = 3
"""Tries of one request: so many broken connections, and so many wrong checksums, are allowed."""
_STALL_SECONDS = 10.0
"""A connection that is silent for this time counts as broken."""
_OFFER_SECONDS = 1.5
"""Limit of the wait for each line of a group that is asked for its offer."""
_LATE_SECONDS = 1.0
"""If a donor has owed a slice for less than this time, no other donor is asked for it as well."""
_FAREWELL_SECONDS = 1.0
"""Limit of the farewell to all donors. After it, their threads are abandoned."""
_TICK_SECONDS = 0.1  # pause between two checks whether the transfer is cancelled


_FAILURES = (TransferError, OSError, ValueError, KeyError, RefusedError)
"""Failures of a donor or of the network. Any other error is a bug."""


class OfferAnswer(NamedTuple):
    """A donor's offer.

    Attributes:
        step_milliseconds: duration of the donor's last step; 0 = the donor does not report it.
        elapsed_milliseconds: time since the offer began.
    """

    step: int
    lineage: int
    digest: int
    step_milliseconds: int
    elapsed_milliseconds: int


class _HeaderFields(msgspec.Struct):
    """The fields of a snapshot's header that a transfer needs."""

    lineage: int
    bytes: Size


class _IncompleteError(TransferError):
    """The remaining donors do not hold the whole state, because their hosts' memory is scarce."""


class _ChecksumError(TransferError):
    """The bytes of an answer differ from the bytes that the donor sent."""


def fetch(
    addresses: Sequence[str],
    token: str,
    step: int,
    joiner: str,
    connections: int,
    timeout: float,
    cancelled: threading.Event | None = None,
    report_lost: Callable[[int, str], None] = lambda index, error: None,
    report_share: Callable[[float], None] = lambda share: None,
    lineage: int | None = None,
) -> Snapshot:
    """Fetch a rank's state after `step` committed updates from StateServers.

    Each donor gives as many slices as it can. A connection that breaks or falls silent is made
    again, and asks for the missing slice only. A donor that cannot be reached again is given up at
    once, and the other donors give its slices.

    Args:
        addresses: host:port of each donor.
        joiner: name of this group, for the donors' events.
        connections: slices that are fetched at the same time, at least one from each donor.
        timeout: seconds without another slice after which the transfer is given up.
        cancelled: ends the transfer when it is set.
        report_lost: called as report_lost(index of the address, reason) if a donor is given up and
            others remain.
        report_share: called now and then with the share of the state that has arrived.
        lineage: lineage of the offered state; None = any lineage. A donor that has healed since its
            offer may hold another state of the same step.

    Raises:
        TransferError: all donors are gone, have no such state, or took too long; or the transfer
            was cancelled.
        RefusedError: a donor and this end do not know the same token, and no other donor has given
            the state.
    """
    cancelled = cancelled or threading.Event()
    transfer = _StateFetch(
        addresses,
        token,
        step,
        joiner,
        connections,
        timeout,
        cancelled,
        report_share,
        lineage,
    )
    failures: list[BaseException] = []
    pool = ThreadPoolExecutor(len(addresses), "titan_ft_donor", initializer=device.for_thread())
    donors = {pool.submit(transfer.fetch_from, index): index for index in range(len(addresses))}
    pool.shutdown(wait=False)
    for future in as_completed(donors):
        error = future.exception()
        if error is None:
            break
        if not isinstance(error, _FAILURES):
            transfer.stop()
            transfer.free_memory([error])
            raise error  # a bug, and no failure of a donor
        failures.append(error)
        index = donors[future]
        transfer.give_up(index)
        if isinstance(error, _IncompleteError):
            continue  # this donor has given all that it holds
        if len(failures) < len(addresses) and not cancelled.is_set():
            report_lost(index, _describe(error))
            logger.warning("state of step %d from %s: %s", step, addresses[index], _describe(error))
    else:
        transfer.free_memory(failures)
        for error in failures:
            if isinstance(error, RefusedError):
                raise error
        reasons = "; ".join(dict.fromkeys(_describe(error) for error in failures))
        text = f"state of step {step} from {', '.join(addresses)}: {reasons}"
        raise TransferError(text) from failures[0]
    transfer.stop()
    wait(donors, _FAREWELL_SECONDS)
    return transfer.snapshot()


def _describe(error: BaseException) -> str:
    if isinstance(error, TransferError | RefusedError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def ask_offer(address: str, token: str, step: int = 0) -> OfferAnswer | None:
    """Ask a StateServer which state it offers; None if it offers none.

    Args:
        address: host:port.
        step: committed updates that are wanted. A donor with fewer updates answers when it has so
            many, or after a second.

    Raises:
        OSError, ValueError, KeyError: the server cannot be reached, or speaks another protocol.
        RefusedError: one end does not know the other's token.
    """
    dialed = socket.create_connection(split_address(address), _OFFER_SECONDS)
    with contextlib.closing(dialed) as connection:
        sealed = prove(connection, address, token)
        with contextlib.closing(sealed.connection):
            sealed.write({"offer": True, "step": step})
            answer = sealed.read()
    if "error" in answer:
        return None
    return OfferAnswer(
        answer["step"],
        answer["lineage"],
        answer["digest"],
        answer.get("milliseconds", 0),
        answer.get("elapsed_milliseconds", 0),
    )


class _StateFetch:
    """One transfer from several donors.

    `fetch` creates it, and calls `fetch_from` once for each donor, on a thread of its own. It calls
    the other public methods on its own thread. A donor is an index of `addresses`. A donor's
    failure ends its own threads only.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        step: int,
        joiner: str,
        connections: int,
        timeout: float,
        cancelled: threading.Event,
        report_share: Callable[[float], None],
        offered_lineage: int | None,
    ) -> None:
        self._addresses = addresses
        self._token = token
        self._step = step
        self._joiner = joiner
        self._report_share = report_share
        self._offered_lineage = offered_lineage
        self._connections_per_donor = -(-connections // len(addresses))  # rounded up
        # For each donor, the limits of its connections for slices, and those of its connection for
        # the header and the farewell.
        self._slice_limits = [_TransferLimits(timeout, cancelled) for _ in addresses]
        self._main_limits = [_TransferLimits(timeout, cancelled) for _ in addresses]
        self._lock = threading.Lock()  # guards the fields below
        self._header = b""
        self._lineage = 0
        self._payload: torch.Tensor | None = None  # None before the first header
        self._is_dropped = False
        self._slices = _Slices(len(addresses))
        self._failed: dict[int, BaseException] = {}  # why a donor was given up

    def snapshot(self) -> Snapshot:
        """Return the state, after `fetch_from` has returned for one donor."""
        assert self._payload is not None, "no donor has given the header"
        return Snapshot(self._step, self._lineage, self._header, self._payload)

    def free_memory(self, failures: Sequence[BaseException]) -> None:
        """Free the memory of a transfer that has failed.

        The failures and their frames refer to each other, and to the memory. Without this method
        the memory would live until a garbage collection, while another attempt allocates gigabytes.
        """
        with self._lock:
            self._payload = None
            self._is_dropped = True
        for error in failures:
            traceback.clear_frames(error.__traceback__)

    def give_up(self, donor: int) -> None:
        """Let other donors give this donor's slices."""
        self._slices.release_donor(donor)

    def stop(self) -> None:
        """Fetch no more slices. Donors that have given none get no farewell."""
        for donor in range(len(self._addresses)):
            self._slice_limits[donor].cancel()
            if not self._slices.count_given_bytes(donor):
                self._main_limits[donor].cancel()

    def fetch_from(self, donor: int) -> None:
        """Fetch slices from a donor until all slices have arrived from any donors.

        Raises:
            TransferError, RefusedError: see `fetch`.
            OSError, ValueError, KeyError: the donor is gone, or speaks another protocol.
        """
        with _DonorLink(self._addresses[donor], self._token, self._main_limits[donor]) as link:
            part = (donor, len(self._addresses))
            request = Message(step=self._step, header=True, part=part)
            if self._offered_lineage is not None:
                request["lineage"] = self._offered_lineage
            answer, header = link.request(request)
            self._accept_header(bytes(header))
            self._slices.set_held(donor, range(*answer["held"]))
            with ThreadPoolExecutor(self._connections_per_donor, "titan_ft_fetch") as pool:
                for _ in range(self._connections_per_donor):
                    pool.submit(self._fetch_slices, donor)
            if not self._slices.are_complete:
                raise self._failed[donor]
            given = self._slices.count_given_bytes(donor)
            if given or len(self._addresses) == 1:
                # Ignore an error: the state is complete. A donor that does not get the farewell
                # only lacks an event.
                with contextlib.suppress(*_FAILURES):
                    link.request({"step": self._step, "done": self._joiner, "bytes": given})

    def _accept_header(self, header: bytes) -> None:
        """Allocate memory for the first header. All further headers must be equal to it."""
        with self._lock:
            if self._is_dropped:
                raise TransferError("the transfer is over")
            if self._payload is None:
                fields = msgspec.json.decode(header, type=_HeaderFields)
                self._payload = device.empty_host(fields.bytes, torch.uint8)
                self._header = header
                self._lineage = fields.lineage
                self._slices.divide(fields.bytes)
            elif header != self._header:
                raise TransferError(
                    "its state is not that of the other donors: their headers differ",
                )

    def _fetch_slices(self, donor: int) -> None:
        """Fetch slices over one connection to a donor; on the thread of the connection."""
        assert self._payload is not None, "the header comes first"
        target = octets(self._payload)
        limits = self._slice_limits[donor]
        request = Message(step=self._step, lineage=self._lineage)
        try:
            memory = memoryview(bytearray(min(_SLICE_BYTES, target.nbytes)))
            with _DonorLink(self._addresses[donor], self._token, limits) as link:
                while True:
                    wanted = self._slices.await_slice(donor, limits)
                    if wanted is None:
                        break
                    data = memory[: len(wanted)]
                    request_slice: Message = {
                        **request,
                        "offset": wanted.start,
                        "bytes": data.nbytes,
                    }
                    link.request(request_slice, data)
                    self._slices.accept_slice(wanted, donor, data, target)
                    # A connection without a slice to ask for waits for slices of other donors. So
                    # each slice restarts the limits of all connections.
                    for connection_limits in (*self._slice_limits, *self._main_limits):
                        connection_limits.restart()
                    self._report_share(self._slices.share)
        except BaseException as error:  # noqa: BLE001  # the donor's thread raises it again
            self._failed.setdefault(donor, error)
            limits.cancel()  # the donor's other connections need not go on
            self._slices.release_donor(donor)


class _Slices:
    """The slices of a payload: which are missing, and which donors are asked for them; any thread.

    A slice is a range of offsets in the payload. A donor *owes* a slice that it was asked for and
    has not given. If no slice is left to ask for, a donor is asked for a slice that another donor
    has owed for long, and the first answer counts. So a slow or silent donor does not delay the
    end. Each connection receives into memory of its own, because two may receive the same slice.
    """

    def __init__(self, num_donors: int) -> None:
        # Donors that have not reported yet which bytes they hold.
        self._unreported = set(range(num_donors))
        self._held: dict[int, range] = {}  # the bytes of each other donor
        self._unasked: deque[range] = deque()  # slices that no donor owes
        # For each slice that donors owe, the time at which each of them was asked.
        self._asked_at: dict[range, dict[int, float]] = {}
        self._size = 0  # bytes of the payload
        self._missing_bytes = 0
        self._num_arrived = 0  # slices
        self._arrived_seconds = 0.0  # sum of the times that they took
        self._given_bytes: Counter[int] = Counter()  # by donor
        self._is_incomplete = False  # no remaining donor holds some missing slice
        self._changed = threading.Condition()

    def divide(self, size: int) -> None:
        """Divide a payload of `size` bytes into slices."""
        with self._changed:
            self._size = size
            self._missing_bytes = size
            for start in range(0, size, _SLICE_BYTES):
                self._unasked.append(range(start, min(start + _SLICE_BYTES, size)))

    def set_held(self, donor: int, held: range) -> None:
        """Set which bytes a donor holds. Slices are cut where this range begins and ends."""
        with self._changed:
            self._unreported.discard(donor)
            self._held[donor] = held
            cut: deque[range] = deque()
            for wanted in self._unasked:
                cut.extend(self._cut(wanted))
            self._unasked = cut
            self._check_holders()

    @property
    def are_complete(self) -> bool:
        """True if all slices have arrived."""
        return self._missing_bytes == 0

    @property
    def share(self) -> float:
        """Share of the bytes that have arrived."""
        if self._size == 0:
            return 1.0
        return 1.0 - self._missing_bytes / self._size

    def count_given_bytes(self, donor: int) -> int:
        """Return the number of bytes that a donor has given."""
        with self._changed:
            return self._given_bytes[donor]

    def await_slice(self, donor: int, limits: _TransferLimits) -> range | None:
        """Wait for a slice that the donor can be asked for, and note that it owes the slice.

        Returns:
            None if all slices have arrived.

        Raises:
            TransferError: the time is over, the transfer is cancelled, nothing more is wanted from
                this donor, or no remaining donor holds a missing slice.
        """
        with self._changed:
            while self._missing_bytes:
                limits.check()
                if self._is_incomplete:
                    raise _IncompleteError("the donors that are left do not hold all of it")
                now = time.monotonic()
                wanted = self._pop_unasked(donor)
                if wanted is None:
                    wanted = self._find_late(donor, now)
                if wanted is not None:
                    self._asked_at.setdefault(wanted, {})[donor] = now
                    return wanted
                self._changed.wait(_TICK_SECONDS)
            return None

    def release_donor(self, donor: int) -> None:
        """Let other donors give the slices that this donor owes."""
        with self._changed:
            self._unreported.discard(donor)
            self._held.pop(donor, None)
            for wanted, asked_at in list(self._asked_at.items()):
                was_asked = asked_at.pop(donor, None) is not None
                if was_asked and not asked_at:
                    del self._asked_at[wanted]
                    self._unasked.extendleft(reversed(self._cut(wanted)))
            self._check_holders()

    def accept_slice(
        self,
        wanted: range,
        donor: int,
        data: memoryview,
        target: memoryview,
    ) -> None:
        """Copy a slice that a donor has given to `target`, unless another donor has been faster."""
        with self._changed:
            asked_at = self._asked_at.get(wanted, {}).get(donor)
            if asked_at is None:
                return
            del self._asked_at[wanted]
            self._num_arrived += 1
            self._arrived_seconds += time.monotonic() - asked_at
            self._given_bytes[donor] += data.nbytes
        target[wanted.start : wanted.stop] = data  # without the lock: copying takes a while
        with self._changed:
            self._missing_bytes -= data.nbytes
            self._changed.notify_all()

    def _pop_unasked(self, donor: int) -> range | None:
        for wanted in self._unasked:
            if self._is_held(wanted, donor):
                self._unasked.remove(wanted)
                return wanted
        return None

    def _find_late(self, donor: int, now: float) -> range | None:
        """Return the slice that other donors have owed for longest, if that is too long.

        Too long is twice the mean duration of a slice, and at least `_LATE_SECONDS`.
        """
        oldest: range | None = None
        oldest_at = now
        for wanted, asked_at in self._asked_at.items():
            if donor in asked_at or not self._is_held(wanted, donor):
                continue
            first_asked_at = min(asked_at.values())
            if oldest is None or first_asked_at < oldest_at:
                oldest = wanted
                oldest_at = first_asked_at
        mean_seconds = 0.0
        if self._num_arrived:
            mean_seconds = self._arrived_seconds / self._num_arrived
        if now - oldest_at < max(_LATE_SECONDS, 2 * mean_seconds):
            return None
        return oldest

    def _is_held(self, wanted: range, donor: int) -> bool:
        held = self._held.get(donor, range(0))
        return held.start <= wanted.start and wanted.stop <= held.stop

    def _check_holders(self) -> None:
        """Note whether a slice is held by no donor. Unknown until all donors have reported."""
        self._is_incomplete = not self._unreported and not all(
            any(self._is_held(wanted, donor) for donor in self._held) for wanted in self._unasked
        )
        self._changed.notify_all()

    def _cut(self, wanted: range) -> list[range]:
        """Cut a slice at each beginning and end of a donor's bytes that lies within it."""
        cuts = {wanted.start, wanted.stop}
        for held in self._held.values():
            if held.start in wanted:
                cuts.add(held.start)
            if held.stop in wanted:
                cuts.add(held.stop)
        return [range(start, stop) for start, stop in pairwise(sorted(cuts))]


class _TransferLimits:
    """Limits on how long some connections of a transfer wait; any thread.

    Args:
        timeout: seconds without another slice after which the transfer is given up.
        cancelled: ends the transfer when it is set.
    """

    def __init__(self, timeout: float, cancelled: threading.Event) -> None:
        self.stall_seconds = min(timeout, _STALL_SECONDS)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._cancelled = cancelled
        self._own_cancelled = threading.Event()

    def restart(self) -> None:
        """Start the time anew, because a slice has arrived."""
        self._deadline = time.monotonic() + self._timeout

    def cancel(self) -> None:
        """End all waits of these connections."""
        self._own_cancelled.set()

    def check(self) -> float:
        """Return the seconds that are left.

        Raises:
            TransferError: no time is left, the transfer is cancelled, or `cancel` was called.
        """
        if self._cancelled.is_set() or self._own_cancelled.is_set():
            raise TransferError("cancelled")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TransferError(f"no part of the state was whole within {self._timeout:g} s")
        return remaining


class _DonorLink:
    """Requests to one donor, over a connection that is made again after it breaks.

    One thread uses it.
    """

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address = address
        self._token = token
        self._limits = limits
        self._connection: _DonorConnection | None = None

    def request(
        self,
        request: Message,
        into: memoryview | None = None,
    ) -> tuple[Message, memoryview]:
        """Call `_DonorConnection.request`; again if the connection breaks or the checksum differs.

        An error while connecting is raised at once: the donor is gone.
        """
        num_breaks = 0
        num_mismatches = 0
        while True:
            if self._connection is None:
                self._connection = _DonorConnection(self._address, self._token, self._limits)
            try:
                return self._connection.request(request, into)
            except _ChecksumError as error:
                num_mismatches += 1
                logger.warning(
                    "fetching from %s, try %d of %d: %s",
                    self._address,
                    num_mismatches,
                    _MAX_TRIES,
                    error,
                )
                if num_mismatches == _MAX_TRIES:
                    raise
            except (OSError, ValueError, KeyError) as error:
                num_breaks += 1
                self.__exit__()
                logger.warning(
                    "the connection to %s broke, try %d of %d: %r",
                    self._address,
                    num_breaks,
                    _MAX_TRIES,
                    error,
                )
                if num_breaks == _MAX_TRIES:
                    raise

    def __enter__(self) -> _DonorLink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.__exit__()
        self._connection = None


class _DonorConnection:
    """The joiner's end of one connection to a donor. One thread uses it."""

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address = address
        timeout = min(limits.check(), limits.stall_seconds)
        self._socket = socket.create_connection(split_address(address), timeout)

        def open_stream(connection: socket.socket) -> Stream:
            incoming = _Incoming(connection, limits)
            return BufferedRWPair(incoming, connection.makefile("wb", buffering=0))

        try:
            self._sealed = prove(self._socket, address, token, open_stream)
        except BaseException:
            self._socket.close()
            raise

    def request(
        self,
        request: Message,
        into: memoryview | None = None,
    ) -> tuple[Message, memoryview]:
        """Send a request, and return the answer and its bytes.

        Args:
            into: memory that receives the bytes; None = new memory.

        Raises:
            TransferError: the donor refuses, or sends another number of bytes.
            _ChecksumError: the bytes differ from those that the donor sent.
            OSError, ValueError, KeyError: the connection broke.
        """
        self._sealed.write(request)
        answer = self._read_answer()
        size = answer["bytes"]
        if into is None:
            into = memoryview(bytearray(size))
        if size != into.nbytes:
            raise TransferError(f"the donor sent {size} bytes where {into.nbytes} were asked for")
        num_received = 0
        while num_received < size:
            count = self._sealed.stream.readinto1(into[num_received:])
            if not count:
                raise ConnectionError("the donor closed the connection")
            num_received += count
        if hashlib.sha256(into).hexdigest() != answer["sha256"]:
            what = "the header"
            if "offset" in request:
                what = f"the {size} bytes at {request['offset']}"
            raise _ChecksumError(f"{what} did not arrive as they were sent: the checksums differ")
        return answer, into

    def _read_answer(self) -> Message:
        while True:
            answer = self._sealed.read()
            # A donor that has not copied the state yet says "waiting" now and then.
            if "waiting" not in answer:
                break
        if not answer:
            raise ConnectionError("the donor closed the connection")
        if "refused" in answer:
            raise RefusedError(f"{self._address}: {answer['refused']}")
        if "error" in answer:
            raise TransferError(answer["error"])
        return answer

    def __enter__(self) -> _DonorConnection:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # unsent bytes of a request
            self._sealed.stream.close()
        self._sealed.connection.close()


class _Incoming(io.RawIOBase):
    """The bytes from a donor. Reading ends if the connection is silent, or the transfer is over."""

    def __init__(self, connection: socket.socket, limits: _TransferLimits) -> None:
        connection.settimeout(_TICK_SECONDS)
        self._socket = connection
        self._limits = limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        started = time.monotonic()
        while True:
            self._limits.check()
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                stall_seconds = self._limits.stall_seconds
                if time.monotonic() - started >= stall_seconds:
                    raise TimeoutError(f"nothing came for {stall_seconds:g} s") from None
