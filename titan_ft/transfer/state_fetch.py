# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The joiner's side of a transfer: fetches one rank's state from several donors at the same time.

A *joiner* is a group that lacks the job's state, and a *donor* is a group that has it. Each rank of
the joiner fetches its state from the ranks of the same number in the donors, from their state
servers (`state_server.py`).

In order of time:

1. Request the *header* from each donor. It lists the tensors of the state. The donors' headers must
   be equal: a donor whose header differs from the first one is given up.
2. After the first header, allocate memory for the *payload*, which has the bytes of all tensors.
   Divide it into *slices* of 8 MiB.
3. Request slices from each donor, one after the other on each connection. So a fast donor sends
   more slices than a slow one.
4. If a donor fails, give it up. The other donors send its slices. If no donor is left, `fetch`
   raises an error, and `engine/heal.py` tries again.
5. When all slices are here, send each donor a farewell, with the number of bytes that it has sent.

Threads: `fetch` runs on the thread of its caller, which is `CatchUp`'s in a heal. `fetch` starts a
thread for each donor, for the header and the farewell. That thread starts a thread for each
connection that fetches slices.

`wire.py` describes the messages. See docs/heal.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
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
from titan_ft.transfer.wire import Message, Size, Stream, TransferError, handshake_as_joiner, octets

logger = logging.getLogger(__name__)

_SLICE_BYTES = 8 << 20

NUM_CONNECTIONS = 4
"""Connections of a rank to all its donors together; at least one to each donor. The rate of one
connection is limited by the core that computes the checksums of its bytes. More than four
connections do not make a transfer faster (`bench.py --only transfer`)."""

PROGRESS_TIMEOUT_SECONDS = 300.0
"""A transfer is given up if no slice arrives for this time. It guards against a donor that sends a
byte now and then. A silent connection ends much earlier (`_STALL_SECONDS`). A whole transfer has no
limit: a large state over a slow link takes as long as it must."""

_MAX_TRIES = 3
"""The third broken connection in one request ends the request, and so does the third wrong
checksum."""
_STALL_SECONDS = 10.0
"""A connection that is silent for this time counts as broken."""
_OFFER_SECONDS = 1.5
"""Limit of the wait for each line in `ask_offer`. It must be longer than the server's own wait for
its next update (`_NEXT_UPDATE_SECONDS` in `state_server.py`)."""
_LATE_SECONDS = 1.0
"""A slice may be requested from a second donor if the first donor has not sent it for this time."""
_FAREWELL_SECONDS = 1.0
"""Limit of the farewell to all donors. After it, their threads are abandoned."""
_TICK_SECONDS = 0.1
"""Interval at which a waiting thread looks whether the transfer is cancelled or out of time."""

_DONOR_FAILURES = (TransferError, OSError, ValueError, KeyError, RefusedError)
"""Errors if a donor or the network fails. Any other error is a bug."""


class OfferAnswer(NamedTuple):
    """A donor's offer.

    Attributes:
        step, lineage, digest: of the offered state; see `Offer` in `protocol/healing.py`.
        step_milliseconds: duration of the donor's last step; 0 = the donor does not report it.
        elapsed_milliseconds: time since the offer began, which is when that step ended.
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
    """The remaining donors do not hold the whole state.

    With scarce memory, each donor has copied only a part of the state, and the donor of another
    part was given up.
    """


class _ChecksumError(TransferError):
    """The bytes of an answer were changed on the way: they do not match the donor's checksum."""


def fetch(
    addresses: Sequence[str],
    token: str,
    step: int,
    joiner: str,
    num_connections: int,
    progress_timeout: float,
    cancelled: threading.Event | None = None,
    report_lost: Callable[[int, str], None] = lambda index, error: None,
    report_share: Callable[[float], None] = lambda share: None,
    lineage: int | None = None,
) -> Snapshot:
    """Fetch a rank's state after `step` committed updates from state servers.

    A connection that breaks or falls silent is made again, and fetches the missing slice only. A
    donor that cannot be reached again is given up at once, and the other donors send its slices.

    Args:
        addresses: host:port of each donor.
        joiner: name of this group, for the donors' events.
        num_connections: slices that are fetched at the same time, at least one from each donor.
        progress_timeout: seconds without another slice after which the transfer is given up.
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
        num_connections,
        progress_timeout,
        cancelled,
        report_share,
        lineage,
    )
    pool = ThreadPoolExecutor(
        len(addresses), "titan_ft_donor", initializer=device.thread_initializer()
    )
    donors = {pool.submit(transfer.fetch_from, index): index for index in range(len(addresses))}
    pool.shutdown(wait=False)  # ends its threads when they have nothing left to do
    failures: list[BaseException] = []
    for future in as_completed(donors):
        error = future.exception()
        if error is None:
            # The first thread without an error shows that all slices are here.
            transfer.stop()
            wait(donors, _FAREWELL_SECONDS)
            return transfer.snapshot()
        if not isinstance(error, _DONOR_FAILURES):
            transfer.stop()
            transfer.free_memory([error])
            raise error  # a bug, and no failure of a donor
        failures.append(error)
        index = donors[future]
        transfer.give_up(index)
        has_given_all = isinstance(error, _IncompleteError)
        others_remain = len(failures) < len(addresses)
        if others_remain and not has_given_all and not cancelled.is_set():
            report_lost(index, _describe(error))
            logger.warning("state of step %d from %s: %s", step, addresses[index], _describe(error))
    transfer.free_memory(failures)
    for error in failures:
        if isinstance(error, RefusedError):
            raise error
    reasons = "; ".join(dict.fromkeys(_describe(error) for error in failures))
    text = f"state of step {step} from {', '.join(addresses)}: {reasons}"
    raise TransferError(text) from failures[0]


def _describe(error: BaseException) -> str:
    if isinstance(error, TransferError | RefusedError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def ask_offer(address: str, token: str, step: int = 0) -> OfferAnswer | None:
    """Ask a StateServer which state it offers; None if it offers none.

    Args:
        address: host:port.
        step: number of committed updates that the offered state should have. A server with fewer
            updates waits for its next update, at most a second, and answers with the offer that it
            has then.

    Raises:
        OSError, ValueError, KeyError: the server cannot be reached, or speaks another protocol.
        RefusedError: one end does not know the other's token.
    """
    dialed = socket.create_connection(split_address(address), _OFFER_SECONDS)
    with contextlib.closing(dialed) as connection:
        sealed = handshake_as_joiner(connection, address, token)
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

    In all methods, `donor` is an index of `addresses`.

    Threads: `fetch` makes a thread for each donor, which calls `fetch_from`. It calls the other
    public methods on its own thread. If a donor fails, only the threads of this donor end.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        step: int,
        joiner: str,
        num_connections: int,
        progress_timeout: float,
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
        self._connections_per_donor = math.ceil(num_connections / len(addresses))
        # Limits of each donor's connections. The connection for the header and the farewell has
        # limits of its own: it must outlive the connections for slices.
        self._slice_limits = [_TransferLimits(progress_timeout, cancelled) for _ in addresses]
        self._main_limits = [_TransferLimits(progress_timeout, cancelled) for _ in addresses]
        self._lock = threading.Lock()  # guards the fields below
        self._header = b""
        self._lineage = 0
        self._payload: torch.Tensor | None = None  # None before the first header
        self._is_dropped = False  # the transfer has failed, and its memory is free
        self._slices = _Slices(len(addresses))
        # The first error of each donor's connections for slices.
        self._slice_errors: dict[int, BaseException] = {}

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
        """Let other donors send the slices that this donor owes."""
        self._slices.release_donor(donor)

    def stop(self) -> None:
        """End the connections that fetch slices. A donor that has sent none gets no farewell."""
        for donor in range(len(self._addresses)):
            self._slice_limits[donor].cancel()
            has_sent_slices = self._slices.count_given_bytes(donor) > 0
            if not has_sent_slices:
                self._main_limits[donor].cancel()

    def fetch_from(self, donor: int) -> None:
        """Fetch slices from a donor until all slices are here, from this donor or from others.

        Raises:
            TransferError, RefusedError: see `fetch`.
            OSError, ValueError, KeyError: the donor is gone, or speaks another protocol.
        """
        with _DonorLink(self._addresses[donor], self._token, self._main_limits[donor]) as link:
            # If the donors' memory is scarce, the k-th of n donors copies part k of n.
            part = (donor, len(self._addresses))
            request = Message(step=self._step, header=True, part=part)
            if self._offered_lineage is not None:
                request["lineage"] = self._offered_lineage
            answer, header = link.request(request)
            self._accept_header(bytes(header))
            self._slices.set_held(donor, range(*answer["held"]))
            # The block ends when all threads of the pool have ended.
            with ThreadPoolExecutor(self._connections_per_donor, "titan_ft_fetch") as pool:
                for _ in range(self._connections_per_donor):
                    pool.submit(self._fetch_slices, donor)
            if not self._slices.are_complete:
                raise self._slice_errors[donor]
            given_bytes = self._slices.count_given_bytes(donor)
            # A payload without bytes has no slices. Its only donor gets a farewell nevertheless.
            if given_bytes or len(self._addresses) == 1:
                # Ignore an error: the state is complete, and without a farewell the donor only
                # emits one event less.
                with contextlib.suppress(*_DONOR_FAILURES):
                    link.request({"step": self._step, "done": self._joiner, "bytes": given_bytes})

    def _accept_header(self, header: bytes) -> None:
        """Take a donor's header. The first header gives the sizes of the payload and its slices.

        Raises:
            TransferError: the header differs from the first one, or the transfer is over.
        """
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
        try:
            # Two connections may receive the same slice, so each one receives into its own memory.
            memory = memoryview(bytearray(min(_SLICE_BYTES, target.nbytes)))
            with _DonorLink(self._addresses[donor], self._token, limits) as link:
                while True:
                    wanted = self._slices.await_slice(donor, limits)
                    if wanted is None:
                        break
                    data = memory[: len(wanted)]
                    request = Message(
                        step=self._step,
                        lineage=self._lineage,
                        offset=wanted.start,
                        bytes=data.nbytes,
                    )
                    link.request(request, data)
                    self._slices.accept_slice(wanted, donor, data, target)
                    # Another connection may have no slice to request, and wait for this one. So
                    # each slice restarts the time limits of all connections.
                    for connection_limits in (*self._slice_limits, *self._main_limits):
                        connection_limits.restart()
                    self._report_share(self._slices.share)
        except BaseException as error:  # noqa: BLE001  # `fetch_from` raises it again
            self._slice_errors.setdefault(donor, error)
            limits.cancel()  # end the donor's other connections as well
            self._slices.release_donor(donor)


class _Slices:
    """The slices of a payload: which are missing, and which donors were asked for them.

    A slice is a range of offsets in the payload. It is in one of three states:

    - *unasked*: no donor was asked for it.
    - *owed*: one or more donors were asked for it, and none has sent it.
    - arrived.

    A donor gets the first unasked slice that it holds. If there is none, it gets the slice that
    another donor has owed for longest, if that is too long; then the first answer counts. So a slow
    or silent donor does not delay the end of the transfer.

    Any thread may call the methods.
    """

    def __init__(self, num_donors: int) -> None:
        # Guards all fields. It is notified when a slice arrives, and when a donor comes or goes.
        self._changed = threading.Condition()
        # Donors that have not reported yet which bytes they hold.
        self._unreported = set(range(num_donors))
        # The bytes that each donor holds. A donor that was given up has no entry.
        self._held: dict[int, range] = {}
        self._unasked: deque[range] = deque()
        # For each owed slice, the donors that owe it, and the times at which they were asked.
        self._asked_at: dict[range, dict[int, float]] = {}
        self._size = 0  # bytes of the payload
        self._missing_bytes = 0
        self._num_arrived = 0  # number of slices
        self._arrived_seconds = 0.0  # sum of the times between request and arrival
        self._given_bytes: Counter[int] = Counter()  # by donor
        self._is_incomplete = False  # no remaining donor holds some unasked slice

    def divide(self, size: int) -> None:
        """Divide a payload of `size` bytes into slices."""
        with self._changed:
            self._size = size
            self._missing_bytes = size
            for start in range(0, size, _SLICE_BYTES):
                self._unasked.append(range(start, min(start + _SLICE_BYTES, size)))

    def set_held(self, donor: int, held: range) -> None:
        """Set which bytes a donor holds.

        A slice at the beginning or end of this range is cut there, so that each donor holds either
        all of a slice or nothing of it.
        """
        with self._changed:
            self._unreported.discard(donor)
            self._held[donor] = held
            slices: deque[range] = deque()
            for wanted in self._unasked:
                slices.extend(self._cut(wanted))
            self._unasked = slices
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
        """Return the number of bytes that a donor has sent, apart from those that came too late."""
        with self._changed:
            return self._given_bytes[donor]

    def await_slice(self, donor: int, limits: _TransferLimits) -> range | None:
        """Wait for a slice that this donor can be asked for. The donor owes the slice then.

        Returns:
            The slice; None if all slices have arrived.

        Raises:
            TransferError: the time is over, or the transfer or this donor's connections are
                cancelled.
            _IncompleteError: no remaining donor holds a missing slice.
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
        """Let other donors send the slices that this donor owes."""
        with self._changed:
            self._unreported.discard(donor)
            self._held.pop(donor, None)
            for wanted, asked_at in list(self._asked_at.items()):
                was_asked = asked_at.pop(donor, None) is not None
                no_other_owes = not asked_at
                if was_asked and no_other_owes:
                    del self._asked_at[wanted]
                    # Cut the slice, because other donors may hold only a part of it. Put its parts
                    # in front, in their order.
                    self._unasked.extendleft(reversed(self._cut(wanted)))
            self._check_holders()

    def accept_slice(
        self,
        wanted: range,
        donor: int,
        data: memoryview,
        target: memoryview,
    ) -> None:
        """Copy a slice from a donor to its place in `target`.

        Nothing is copied if another donor has sent the slice earlier.

        Args:
            data: the bytes of the slice.
            target: the whole payload.
        """
        with self._changed:
            asked_at = self._asked_at.get(wanted, {}).get(donor)
            if asked_at is None:
                return  # the slice has arrived already
            del self._asked_at[wanted]
            self._num_arrived += 1
            self._arrived_seconds += time.monotonic() - asked_at
            self._given_bytes[donor] += data.nbytes
        # Copy without the lock: the copy takes a while. Only then the slice counts as arrived.
        target[wanted.start : wanted.stop] = data
        with self._changed:
            self._missing_bytes -= data.nbytes
            self._changed.notify_all()

    def _pop_unasked(self, donor: int) -> range | None:
        """Return the first unasked slice that the donor holds."""
        for wanted in self._unasked:
            if self._is_held(wanted, donor):
                self._unasked.remove(wanted)
                return wanted
        return None

    def _find_late(self, donor: int, now: float) -> range | None:
        """Return the slice that other donors have owed for longest; None if that is not too long.

        Too long is twice the mean duration of a slice, and at least `_LATE_SECONDS`. Only slices
        count that `donor` holds and does not owe itself.
        """
        oldest: range | None = None
        oldest_asked_at = now
        for wanted, asked_at in self._asked_at.items():
            if donor in asked_at or not self._is_held(wanted, donor):
                continue
            first_asked_at = min(asked_at.values())
            if oldest is None or first_asked_at < oldest_asked_at:
                oldest = wanted
                oldest_asked_at = first_asked_at
        mean_seconds = 0.0
        if self._num_arrived:
            mean_seconds = self._arrived_seconds / self._num_arrived
        is_late = now - oldest_asked_at >= max(_LATE_SECONDS, 2 * mean_seconds)
        return oldest if is_late else None

    def _is_held(self, wanted: range, donor: int) -> bool:
        """True if the donor holds the whole slice."""
        held = self._held.get(donor, range(0))
        return held.start <= wanted.start and wanted.stop <= held.stop

    def _check_holders(self) -> None:
        """Find out whether an unasked slice is held by no remaining donor.

        This is not known before all donors have reported which bytes they hold.
        """
        self._is_incomplete = False
        if not self._unreported:
            for wanted in self._unasked:
                if not any(self._is_held(wanted, donor) for donor in self._held):
                    self._is_incomplete = True
        self._changed.notify_all()

    def _cut(self, wanted: range) -> list[range]:
        """Cut a slice where the bytes of a donor begin or end within it."""
        cuts = {wanted.start, wanted.stop}
        for held in self._held.values():
            if held.start in wanted:
                cuts.add(held.start)
            if held.stop in wanted:
                cuts.add(held.stop)
        return [range(start, stop) for start, stop in pairwise(sorted(cuts))]


class _TransferLimits:
    """Limits how long some connections of a transfer may wait. Any thread may call the methods.

    Args:
        progress_timeout: seconds without another slice after which the transfer is given up.
        cancelled: ends the transfer when it is set.

    Attributes:
        stall_seconds: a connection that is silent for this time counts as broken.
    """

    def __init__(self, progress_timeout: float, cancelled: threading.Event) -> None:
        self.stall_seconds = min(progress_timeout, _STALL_SECONDS)
        self._progress_timeout = progress_timeout
        self._deadline = time.monotonic() + progress_timeout
        self._cancelled = cancelled
        self._connections_cancelled = threading.Event()

    def restart(self) -> None:
        """Start the time anew, because a slice has arrived."""
        self._deadline = time.monotonic() + self._progress_timeout

    def cancel(self) -> None:
        """End all waits of these connections."""
        self._connections_cancelled.set()

    def check(self) -> float:
        """Return the seconds that are left.

        Raises:
            TransferError: no time is left, the transfer is cancelled, or `cancel` was called.
        """
        if self._cancelled.is_set() or self._connections_cancelled.is_set():
            raise TransferError("cancelled")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            timeout = self._progress_timeout
            raise TransferError(f"no part of the state was whole within {timeout:g} s")
        return remaining


class _DonorLink:
    """Sends requests to one donor. If the connection breaks, repeats the request on a new one.

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
        """Send a request, and return the answer and its bytes; see `_DonorConnection.request`.

        Raises:
            TransferError, OSError, ValueError, KeyError, RefusedError: the donor is gone or
                refuses, or the request has failed `_MAX_TRIES` times. A connection that cannot be
                made is not tried again.
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
                self._close()
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
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _DonorConnection:
    """The joiner's end of one connection to a donor. One thread uses it."""

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address = address
        timeout = min(limits.check(), limits.stall_seconds)
        self._socket = socket.create_connection(split_address(address), timeout)

        # Called again after the start of TLS, which replaces the connection.
        def open_stream(connection: socket.socket) -> Stream:
            incoming = _Incoming(connection, limits)
            return BufferedRWPair(incoming, connection.makefile("wb", buffering=0))

        try:
            self._sealed = handshake_as_joiner(self._socket, address, token, open_stream)
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
            TransferError: the donor answers with an error, or sends another number of bytes.
            RefusedError: the donor does not accept this rank's token.
            _ChecksumError: the bytes were changed on the way.
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
            name = "the header"
            if "offset" in request:
                name = f"the {size} bytes at {request['offset']}"
            raise _ChecksumError(f"{name} did not arrive as they were sent: the checksums differ")
        return answer, into

    def _read_answer(self) -> Message:
        """Read the next answer, and raise the error that it may contain."""
        answer = self._sealed.read()
        while "waiting" in answer:  # the donor has not copied the state yet
            answer = self._sealed.read()
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
        self.close()

    def close(self) -> None:
        """Close the connection."""
        # Closing the stream sends the rest of a request, which fails if the donor is gone.
        with contextlib.suppress(OSError):
            self._sealed.stream.close()
        self._sealed.connection.close()


class _Incoming(io.RawIOBase):
    """The bytes from a donor, as a stream.

    Reading raises an error if the connection is silent for too long, and soon after the transfer is
    cancelled. So the socket has a short timeout, after which the limits are checked again.
    """

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
