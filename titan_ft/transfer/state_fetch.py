# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The joiner's side of a transfer: fetches a snapshot from donors; see `wire.py` for what is said."""

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
from typing import Any

import msgspec
import torch

from titan_ft import device
from titan_ft.protocol.errors import RefusedError
from titan_ft.system.address import split_address
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import Message, Size, Stream, TransferError, octets, prove

logger = logging.getLogger(__name__)

_CHUNK = 8 << 20  # bytes of one slice

CONNECTIONS = 4
"""Of a rank to its donors at once, divided among them, at least one to each. One connection is bounded by a core that
checks its bytes; more than a few bring nothing (`bench.py --only transfer`)."""
SLICE_SECONDS = 300.0
"""Without another slice, until a transfer is given up. A whole transfer has no limit: a large state over a slow link
takes as long as it must. Silence ends a connection much earlier; this ends a donor that sends a byte now and then."""
_MAX_TRIES = 3  # of one request, when connections break, and as many when checksums differ
_STALL_SECONDS = 10.0  # of silence until a connection counts as broken
_OFFER_SECONDS = 1.5  # for each thing that a group which is asked for an offer does
_LATE_SECONDS = 1.0  # for a slice at least, until another donor is asked for it as well
_FAREWELL_SECONDS = 1.0  # for donors to be told that all is there, or to be left
_TICK_SECONDS = 0.1  # until a silent connection notices that its transfer is cancelled


class _Facts(msgspec.Struct):
    """What a transfer needs of a snapshot's header."""

    lineage: int
    bytes: Size


class _IncompleteError(TransferError):
    """The donors that are left do not hold all of the state: the memory of their hosts is scarce."""


class _ChecksumError(TransferError):
    """An answer is not what the donor sent."""


def fetch(
    addresses: Sequence[str],
    token: str,
    step: int,
    joiner: str,
    connections: int,
    timeout: float,
    cancelled: threading.Event | None = None,
    lose: Callable[[int, str], None] = lambda place, error: None,
    note_share: Callable[[float], None] = lambda share: None,
) -> Snapshot:
    """Fetch a rank's state after `step` committed updates from the StateServers at `addresses` (host:port).

    Each gives slices of it, as many as it can. A connection that breaks or falls silent is made again, and only what is
    missing is asked for; a donor that cannot be reached again is given up at once, and the others give its part.

    Args:
        connections: slices fetched at the same time, from each donor at least one.
        timeout: seconds without another slice until the transfer is given up.
        cancelled: ends the transfer when it is set.
        lose: called as lose(place of its address, reason) when a donor is given up and others are left.
        note_share: called now and then with the share of the state that is there.

    Raises:
        TransferError: all donors are gone, have no such state, or took too long; or the transfer was cancelled.
        RefusedError: a donor and this end do not know the same token, and no other donor has given the state.
    """
    cancelled = cancelled or threading.Event()
    transfer = _Transfer(addresses, token, step, joiner, connections, timeout, cancelled, note_share)
    failures: list[BaseException] = []
    pool = ThreadPoolExecutor(len(addresses), "titan_ft_donor", initializer=device.for_thread())
    places = {pool.submit(transfer.fetch_from, place): place for place in range(len(addresses))}
    pool.shutdown(wait=False)
    for future in as_completed(places):
        if (error := future.exception()) is None:
            break
        if not isinstance(error, TransferError | OSError | ValueError | KeyError | RefusedError):
            transfer.end()
            transfer.drop([error])
            raise error
        failures.append(error)
        transfer.give_up(places[future])
        if isinstance(error, _IncompleteError):
            continue
        if len(failures) < len(addresses) and not cancelled.is_set():
            lose(places[future], _describe(error))
            logger.warning("state of step %d from %s: %s", step, addresses[places[future]], _describe(error))
    else:
        transfer.drop(failures)
        if refused := next((error for error in failures if isinstance(error, RefusedError)), None):
            raise refused
        reasons = "; ".join(dict.fromkeys(_describe(error) for error in failures))
        raise TransferError(f"state of step {step} from {', '.join(addresses)}: {reasons}") from failures[0]
    transfer.end()
    wait(places, _FAREWELL_SECONDS)
    return transfer.snapshot()


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, TransferError | RefusedError) else f"{type(error).__name__}: {error}"


def ask_offer(address: str, token: str, step: int = 0) -> tuple[int, int, int, int, int] | None:
    """Return step, lineage and digest of the state that the StateServer at `address` offers; None if it offers none.

    And the milliseconds that its last step took, 0 if it does not tell, and those since the offer began.

    Args:
        step: committed updates that are wanted; who has fewer is waited for, for a second at most.

    Raises:
        OSError, ValueError, KeyError: it cannot be reached, or does not speak the protocol.
        RefusedError: one end does not know the other's token.
    """
    with contextlib.closing(socket.create_connection(split_address(address), _OFFER_SECONDS)) as connection:
        sealed = prove(connection, address, token)
        with contextlib.closing(sealed.connection):
            sealed.write({"offer": True, "step": step})
            answer = sealed.read()
        if "error" in answer:
            return None
        duration, elapsed = answer.get("milliseconds", 0), answer.get("elapsed_milliseconds", 0)
        return answer["step"], answer["lineage"], answer["digest"], duration, elapsed


class _Transfer:
    """One state on its way from several donors. Each donor has a thread, and one for each of its connections."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        step: int,
        joiner: str,
        connections: int,
        timeout: float,
        cancelled: threading.Event,
        note_share: Callable[[float], None],
    ) -> None:
        self._note_share = note_share
        self._addresses, self._token, self._step, self._joiner = addresses, token, step, joiner
        self._connections = -(-connections // len(addresses))  # to each donor
        # By donor: of its connections for slices, and of the one for the first and the last word.
        self._limits = [_TransferLimits(timeout, cancelled) for _ in addresses]
        self._farewell = [_TransferLimits(timeout, cancelled) for _ in addresses]
        self._lock = threading.Lock()
        self._header = b""
        self._lineage = 0
        self._payload: torch.Tensor | None = None
        self._is_dropped = False
        self._slices = _Slices(len(addresses))
        self._failed: dict[int, BaseException] = {}  # why a donor was given up

    def snapshot(self) -> Snapshot:
        """Return the state, once `fetch_from` has returned for a donor."""
        assert self._payload is not None, "no donor has given the header"
        return Snapshot(self._step, self._lineage, self._header, self._payload)

    def drop(self, failures: Sequence[BaseException]) -> None:
        """Let go of what has come, which `failures` were the end of.

        They and their frames refer to each other, and so to the memory, until the next time that garbage is collected:
        that may be after gigabytes for another attempt were taken.
        """
        with self._lock:
            self._payload, self._is_dropped = None, True
        for error in failures:
            traceback.clear_frames(error.__traceback__)

    def give_up(self, place: int) -> None:
        """Expect nothing more of a donor."""
        self._slices.drop(place)

    def end(self) -> None:
        """Fetch no more slices; wait for no word of who has given none."""
        for place in range(len(self._addresses)):
            self._limits[place].end()
            if not self._slices.given_by(place):
                self._farewell[place].end()

    def fetch_from(self, place: int) -> None:
        """Fetch slices from a donor until all are there, whoever gave them.

        Raises as `fetch`, and OSError, ValueError, KeyError: it is gone or does not speak the protocol.
        """
        with _Link(self._addresses[place], self._token, self._farewell[place]) as first:
            part = (place, len(self._addresses))
            answer, header = first.request({"step": self._step, "header": True, "part": part})
            self._lay_out(bytes(header))
            self._slices.note_held(place, range(*answer["held"]))
            with ThreadPoolExecutor(self._connections, "titan_ft_fetch") as pool:
                for _ in range(self._connections):
                    pool.submit(self._fetch_slices, place)
            if not self._slices.whole:
                raise self._failed[place]
            if (given := self._slices.given_by(place)) or len(self._addresses) == 1:
                with contextlib.suppress(OSError, ValueError, KeyError, TransferError, RefusedError):
                    # The state is complete, this is a courtesy.
                    first.request({"step": self._step, "done": self._joiner, "bytes": given})

    def _lay_out(self, header: bytes) -> None:
        """Take in the header that a donor has sent."""
        with self._lock:
            if self._is_dropped:
                raise TransferError("the transfer is over")
            if self._payload is None:
                facts = msgspec.json.decode(header, type=_Facts)
                self._payload = device.empty_host(facts.bytes, torch.uint8)
                self._header, self._lineage = header, facts.lineage
                self._slices.lay_out(facts.bytes)
            elif header != self._header:
                raise TransferError("its state is not that of the other donors: their headers differ")

    def _fetch_slices(self, place: int) -> None:
        assert self._payload is not None, "the header comes first"
        target, slices, limits = octets(self._payload), self._slices, self._limits[place]
        request = Message(step=self._step, lineage=self._lineage)
        try:
            memory = memoryview(bytearray(min(_CHUNK, target.nbytes)))
            with _Link(self._addresses[place], self._token, limits) as link:
                while (wanted := slices.take(place, limits)) is not None:
                    part = memory[: len(wanted)]
                    link.request({**request, "offset": wanted.start, "bytes": part.nbytes}, part)
                    slices.finish(wanted, place, part, target)
                    for each in (*self._limits, *self._farewell):
                        each.note_slice()  # also of a donor that has given all: it waits for the others' slices
                    self._note_share(slices.share)
        except BaseException as error:  # noqa: BLE001  # raised again by the donor's thread
            self._failed.setdefault(place, error)
            limits.end()  # one of its connections failed: the others need not go on
            slices.drop(place)


class _Slices:
    """Which slices of a payload are missing, and who is fetching them. A slice is the range of its bytes' offsets.

    A donor that is slow or silent must not hold up the end: who has nothing left to do fetches what it owes as well,
    and the first answer counts. So each connection receives into memory of its own.
    """

    def __init__(self, num_donors: int) -> None:
        self._untold = set(range(num_donors))  # donors that have yet to say what they hold
        self._held: dict[int, range] = {}  # what the others do
        self._missing: deque[range] = deque()  # nobody fetches these
        self._under_way: dict[range, dict[int, float]] = {}  # since when each donor is asked for it
        self._left = self._size = 0  # bytes
        self._finished, self._seconds = 0, 0.0  # slices, and what they took in sum
        self._given: Counter[int] = Counter()  # bytes, by donor
        self._is_lost = False  # nobody holds some of what is missing
        self._changed = threading.Condition()

    def lay_out(self, size: int) -> None:
        """Take in how many bytes there are."""
        with self._changed:
            self._left = self._size = size
            self._missing.extend(range(start, min(start + _CHUNK, size)) for start in range(0, size, _CHUNK))

    def note_held(self, place: int, held: range) -> None:
        """Take in what a donor holds: slices end where that begins and ends."""
        with self._changed:
            self._untold.discard(place)
            self._held[place] = held
            self._missing = deque(part for missing in self._missing for part in self._cut(missing))
            self._look_for_holders()

    @property
    def whole(self) -> bool:
        """Say whether all are there."""
        return not self._left

    @property
    def share(self) -> float:
        """Return the share of the bytes that is there."""
        return 1.0 - self._left / self._size if self._size else 1.0

    def given_by(self, place: int) -> int:
        """Return the bytes that a donor has given."""
        with self._changed:
            return self._given[place]

    def take(self, place: int, limits: _TransferLimits) -> range | None:
        """Wait for a slice to fetch from a donor; None when all are there.

        Raises:
            TransferError: the time is over, or no more is wanted from this donor, or nobody holds what is missing.
        """
        with self._changed:
            while self._left:
                limits.remaining()
                if self._is_lost:
                    raise _IncompleteError("the donors that are left do not hold all of it")
                now = time.monotonic()
                wanted = self._find_missing(place) or self._find_late(place, now)
                if wanted is not None:
                    self._under_way.setdefault(wanted, {})[place] = now
                    return wanted
                self._changed.wait(_TICK_SECONDS)
            return None

    def drop(self, place: int) -> None:
        """Let other donors give what this one owes."""
        with self._changed:
            self._untold.discard(place)
            self._held.pop(place, None)
            for part, asked in list(self._under_way.items()):
                if asked.pop(place, None) is not None and not asked:
                    del self._under_way[part]
                    self._missing.extendleft(reversed(self._cut(part)))
            self._look_for_holders()

    def finish(self, wanted: range, place: int, part: memoryview, target: memoryview) -> None:
        """Keep a slice that a donor has given, unless another one has been faster."""
        with self._changed:
            since = self._under_way.get(wanted, {}).get(place)
            if since is None:
                return
            del self._under_way[wanted]
            self._finished += 1
            self._seconds += time.monotonic() - since
            self._given[place] += part.nbytes
        target[wanted.start : wanted.stop] = part
        with self._changed:
            self._left -= part.nbytes
            self._changed.notify_all()

    def _find_missing(self, place: int) -> range | None:
        wanted = next((part for part in self._missing if self._is_held(part, place)), None)
        if wanted is not None:
            self._missing.remove(wanted)
        return wanted

    def _find_late(self, place: int, now: float) -> range | None:
        """Return the slice that another donor has owed for longest, if that is too long."""
        mean = self._seconds / self._finished if self._finished else 0.0
        asked = {
            part: min(by.values())
            for part, by in self._under_way.items()
            if place not in by and self._is_held(part, place)
        }
        late = min(asked, key=asked.__getitem__, default=None)
        return None if late is None or now - asked[late] < max(_LATE_SECONDS, 2 * mean) else late

    def _is_held(self, part: range, place: int) -> bool:
        held = self._held.get(place, range(0))
        return held.start <= part.start and part.stop <= held.stop

    def _look_for_holders(self) -> None:
        """Find out whether somebody holds all that is missing, as far as all have told."""
        held = (any(self._is_held(part, place) for place in self._held) for part in self._missing)
        self._is_lost = not self._untold and not all(held)
        self._changed.notify_all()

    def _cut(self, part: range) -> list[range]:
        """Cut a slice where what a donor holds begins or ends."""
        ends = {end for held in self._held.values() for end in (held.start, held.stop) if end in part}
        return [range(start, stop) for start, stop in pairwise(sorted({part.start, *ends, part.stop}))]


class _TransferLimits:
    """How long the connections of one transfer wait for the donor.

    Args:
        timeout: seconds without another slice until the transfer is given up.
        cancelled: ends it when it is set.
    """

    def __init__(self, timeout: float, cancelled: threading.Event) -> None:
        self.stall_seconds = min(timeout, _STALL_SECONDS)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._cancelled = cancelled
        self._ended = threading.Event()

    def note_slice(self) -> None:
        """Count the time anew: some donor has given a slice."""
        self._deadline = time.monotonic() + self._timeout

    def end(self) -> None:
        """Stop waiting."""
        self._ended.set()

    def remaining(self) -> float:
        """Return the seconds that are left.

        Raises:
            TransferError: no time is left, or the transfer is not wanted any more.
        """
        if self._cancelled.is_set() or self._ended.is_set():
            raise TransferError("cancelled")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TransferError(f"no part of the state was whole within {self._timeout:g} s")
        return remaining


class _Link:
    """The joiner's way to the donor: one connection after another, until what was asked for is there and unharmed."""

    def __init__(self, address: str, token: str, limits: _TransferLimits) -> None:
        self._address, self._token, self._limits = address, token, limits
        self._connection: _Connection | None = None

    def request(self, request: Message, into: memoryview | None = None) -> tuple[Message, memoryview]:
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

        def open_stream(connection: socket.socket) -> Stream:
            return BufferedRWPair(_Incoming(connection, limits), connection.makefile("wb", buffering=0))

        try:
            self._sealed = prove(self._socket, address, token, open_stream)
        except BaseException:
            self._socket.close()
            raise

    def request(self, request: Message, into: memoryview | None = None) -> tuple[Message, memoryview]:
        """Send `request` and return the answer and its bytes (written to `into` if given)."""
        self._sealed.write(request)
        answer = self._answer()
        size = answer["bytes"]
        into = memoryview(bytearray(size)) if into is None else into
        if size != into.nbytes:
            raise TransferError(f"the donor sent {size} bytes where {into.nbytes} were asked for")
        done = 0
        while done < size:
            count = self._sealed.stream.readinto1(into[done:])
            if not count:
                raise ConnectionError("the donor closed the connection")
            done += count
        if hashlib.sha256(into).hexdigest() != answer["sha256"]:
            what = f"the {size} bytes at {request['offset']}" if "offset" in request else "the header"
            raise _ChecksumError(f"{what} did not arrive as they were sent: the checksums differ")
        return answer, into

    def _answer(self) -> Message:
        while "waiting" in (answer := self._sealed.read()):
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
            self._sealed.stream.close()
        self._sealed.connection.close()


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
