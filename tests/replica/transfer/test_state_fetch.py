# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's fetch of a state, while connections and donors fail."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from state_donor import CHUNK, DEADLINE, TOKEN, Donor, check_equal, make_snapshot, wait_until

from titan_ft.protocol.errors import RefusedError
from titan_ft.transfer import state_fetch
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.state_fetch import fetch
from titan_ft.transfer.wire import (
    VERSION,
    SealedStream,
    TransferError,
    handshake_as_donor,
    write_line,
)


@pytest.mark.parametrize("connections", [1, 3, 16])
@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 13])
def test_every_byte_arrives(donor: Donor, num_bytes: int, connections: int) -> None:
    """Sizes are no multiple of a chunk, or zero, or smaller than one chunk for each connection."""
    sent = donor.publish(make_snapshot(5, num_bytes))
    check_equal(donor.fetch(5, connections=connections), sent)
    assert donor.told.wait(DEADLINE)
    assert donor.served == [("4", 5)]


def test_a_header_longer_than_a_line_arrives(donor: Donor) -> None:
    """The header of a large model has thousands of entries, and is longer than a line may be."""
    snapshot = make_snapshot(5, 10)
    header = {
        **json.loads(snapshot.header),
        "tensors": [{"name": f"model/0/layers.{n}.weight"} for n in range(20_000)],
    }
    sent = donor.publish(
        Snapshot(5, snapshot.lineage, json.dumps(header).encode(), snapshot.payload)
    )
    check_equal(donor.fetch(5), sent)


def serve_once(talk: Callable[[socket.socket], None]) -> tuple[str, Future[None]]:
    """Listen for one connection, and let `talk` answer it. Return the address and the thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended: Future[None] = Future()

    def run() -> None:
        with listener:
            connection, _ = listener.accept()
            try:
                with connection:
                    talk(connection)
                ended.set_result(None)
            except BaseException as error:  # noqa: BLE001  # handed to the test
                ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}", ended


def test_a_donor_without_the_token_is_refused_by_the_joiner() -> None:
    """A server that cannot prove the token is refused, and never gets the token."""
    heard: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        stream = connection.makefile("rwb")
        write_line(stream, {"nonce": "00", "version": VERSION})
        heard.append(stream.readline())
        # Without the token, its best attempt is to send the joiner's own proof back.
        stream.write(json.dumps({"proof": json.loads(heard[0])["proof"]}).encode() + b"\n")
        stream.flush()
        heard.append(stream.read())

    address, ended = serve_once(talk)
    with pytest.raises(RefusedError, match="TITAN_FT_TOKEN"):
        fetch([address], TOKEN, 5, "4", 1, DEADLINE)
    ended.result(DEADLINE)
    assert TOKEN.encode() not in heard[0]
    assert heard[1] == b"", "nothing is asked of a server without a proof"


def test_a_donor_that_dies_in_mid_transfer_is_noticed_at_once() -> None:
    """The connection ends within a chunk.

    The joiner gets an error, and does not wait for the timeout.
    """

    def talk(connection: socket.socket) -> None:
        sealed = prove(connection)
        header = make_snapshot(5, 10 * CHUNK).header
        sealed.read()
        sealed.write({"bytes": len(header), "sha256": ""})
        sealed.stream.write(header[:-1])
        sealed.stream.flush()

    address, _ = serve_once(talk)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"state of step 5 from 127\.0\.0\.1:.*Connection"):
        fetch([address], TOKEN, 5, "4", 1, DEADLINE)
    assert time.monotonic() - started < DEADLINE / 2


def prove(connection: socket.socket) -> SealedStream:
    """Answer a joiner as a donor with the token does."""
    host, port = connection.getsockname()
    return handshake_as_donor(connection, f"{host}:{port}", TOKEN)


def test_a_donor_that_closes_ends_all_connections_of_a_fetch(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor publishes a later step. The fetch ends with the donor's error."""
    donor.publish(make_snapshot(5, 10 * CHUNK))
    request = state_fetch._DonorConnection.request
    replaced = threading.Event()

    def replace_at_the_third_chunk(self: Any, message: dict[str, Any], *into: Any) -> Any:
        if message.get("offset", 0) >= 2 * CHUNK and not replaced.is_set():
            replaced.set()
            donor.publish(make_snapshot(6, 10 * CHUNK))
        return request(self, message, *into)

    monkeypatch.setattr(state_fetch._DonorConnection, "request", replace_at_the_third_chunk)
    with pytest.raises(TransferError, match=r"no state of step 5( of lineage \d+)? .it has step 6"):
        donor.fetch(5)
    assert donor.served == []


def test_nobody_listens() -> None:
    """No donor is at the address any more. The error of the transfer names it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match=rf"127\.0\.0\.1:{port}.*ConnectionRefused"):
        fetch([f"127.0.0.1:{port}"], TOKEN, 5, "4", 2, DEADLINE)


@pytest.mark.parametrize("pause", [None, 0.02], ids=["silent", "trickling"])
def test_a_donor_that_gives_no_whole_slice_is_given_up(pause: float | None) -> None:
    """A donor that is silent, or sends a byte now and then, is given up after the timeout."""
    stop = threading.Event()

    def talk(connection: socket.socket) -> None:
        sealed = prove(connection)
        sealed.read()
        sealed.write({"bytes": 1000000})
        while not stop.wait(DEADLINE if pause is None else pause) and pause is not None:
            try:
                connection.sendall(b"x")
            except OSError:
                return

    address, _ = serve_once(talk)
    started = time.monotonic()
    try:
        with pytest.raises(TransferError, match=r"timed out|no part of the state"):
            fetch([address], TOKEN, 5, "4", 1, progress_timeout=0.3)
        assert time.monotonic() - started < 2.0
    finally:
        stop.set()


def test_a_cancelled_transfer_ends(donor: Donor) -> None:
    """A cancelled fetch stops at the next chunk, and is not counted as served."""
    donor.publish(make_snapshot(5, 10 * CHUNK))
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetch([donor.address], TOKEN, 5, "4", 2, DEADLINE, cancelled)
    assert donor.served == []


def test_the_state_is_complete_without_the_last_word(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A donor that dies right after the last byte has given the state.

    It only misses the farewell.
    """
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    request = state_fetch._DonorConnection.request

    def withdraw_at_the_end(self: Any, message: dict[str, Any], *into: Any) -> Any:
        if "done" in message:
            raise ConnectionResetError("the donor died")
        return request(self, message, *into)

    monkeypatch.setattr(state_fetch._DonorConnection, "request", withdraw_at_the_end)
    check_equal(donor.fetch(5), sent)
    assert donor.served == []


def send_corrupted(connection: socket.socket, data: memoryview) -> None:
    """Send data with one flipped bit, after its checksum was made."""
    connection.sendall(bytes(data[:-1]) + bytes([data[-1] ^ 16]))


@pytest.mark.parametrize("place", ["header", 0, 2 * CHUNK, 4 * CHUNK])
@pytest.mark.parametrize("times", [1, 2])
def test_what_arrives_corrupted_is_fetched_again(
    donor: Donor,
    watch: Callable[..., list[Any]],
    caplog: pytest.LogCaptureFixture,
    place: object,
    times: int,
) -> None:
    """A flipped bit in the header or in a chunk is noticed and logged.

    That part is fetched again.
    """
    asked = watch(
        lambda where, count, send: send_corrupted if where == place and count <= times else send
    )
    sent = donor.publish(make_snapshot(5, 4 * CHUNK + 1))
    check_equal(donor.fetch(5), sent)
    assert Counter(asked) == {
        "header": 1,
        **dict.fromkeys(range(0, 5 * CHUNK, CHUNK), 1),
        place: times + 1,
    }
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    what = "the header" if place == "header" else f"bytes at {place} "
    assert len(warnings) == times
    assert all(what in warning and donor.address in warning for warning in warnings)


def test_what_always_arrives_corrupted_fails_the_transfer(
    donor: Donor, watch: Callable[..., list[Any]]
) -> None:
    """After three tries of one chunk the transfer fails, and the error names the chunk."""
    asked = watch(lambda where, _, send: send_corrupted if where == 2 * CHUNK else send)
    donor.publish(make_snapshot(5, 5 * CHUNK))
    with pytest.raises(TransferError, match=r"state of step 5 .* 1000 bytes at 2000 .*checksum"):
        donor.fetch(5)
    assert asked.count(2 * CHUNK) == 3
    assert donor.served == []


class Proxy:
    """Stands between joiners and a donor, and breaks connections.

    Args:
        cuts: for each connection, by its number in order of arrival, the number of the donor's
            bytes after which it breaks.
        how: the kind of break: "reset", "close", "silence", or "gone" (a close, and no further
            connection is accepted).
    """

    def __init__(self, donor: Donor, cuts: dict[int, int], how: str) -> None:
        self._port, self._cuts, self._how = donor.server.port, cuts, how
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        donor.server.address = self.address  # as of a donor whose network forwards a port to it
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if select.select([self._listener], [], [], 0.02)[0]:
                joiner, _ = self._listener.accept()
                threading.Thread(
                    target=self._relay, args=(joiner, self._cuts.get(self.accepted, 1 << 60))
                ).start()
                self.accepted += 1
        self._listener.close()

    def _relay(self, joiner: socket.socket, left: int) -> None:
        with (
            joiner,
            socket.create_connection(("127.0.0.1", self._port)) as donor,
            contextlib.suppress(OSError),
        ):
            while left:
                ready, _, _ = select.select([joiner, donor], [], [], 0.1)
                if self._closed.is_set():
                    return
                for source in ready:
                    data = source.recv(min(left, 1 << 16))
                    if not data:
                        return
                    (donor if source is joiner else joiner).sendall(data)
                    left -= len(data) if source is donor else 0
            if self._how == "silence":
                self._closed.wait()
            elif self._how == "reset":
                joiner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif self._how == "gone":
                self.close()
                wait_until(lambda: self._listener.fileno() == -1)

    def close(self) -> None:
        """Break all connections."""
        self._closed.set()


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., Proxy]]:
    """Provide the builder of proxies, and close them."""
    proxies: list[Proxy] = []

    def start(*args: Any) -> Proxy:
        proxies.append(Proxy(*args))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("how", ["reset", "close", "silence"])
def test_a_broken_connection_is_made_again(
    donor: Donor,
    start_proxy: Callable[..., Proxy],
    watch: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A connection that breaks or falls silent within a chunk costs that chunk only.

    It costs no timeout.
    """
    monkeypatch.setattr(state_fetch, "_STALL_SECONDS", 1.5)
    # Connection 0 is the header's. Within: 4 chunks and their lines.
    asked, proxy = (watch(), start_proxy(donor, {1: 5300}, how))
    sent = donor.publish(make_snapshot(5, 10 * CHUNK))
    check_equal(fetch([proxy.address], TOKEN, 5, "4", 1, 600.0), sent)
    assert Counter(asked) == {
        "header": 1,
        **dict.fromkeys(range(0, 10 * CHUNK, CHUNK), 1),
        4 * CHUNK: 2,
    }
    assert proxy.accepted == 3
    assert donor.told.wait(DEADLINE)


def test_all_connections_may_break(
    donor: Donor, start_proxy: Callable[..., Proxy], watch: Callable[..., list[Any]]
) -> None:
    """Each break costs one chunk at most, even if all connections break again and again."""
    cuts = dict.fromkeys(range(1, 13), 3000)
    asked, proxy = watch(), start_proxy(donor, cuts, "reset")
    sent = donor.publish(make_snapshot(5, 60 * CHUNK))
    check_equal(fetch([proxy.address], TOKEN, 5, "4", 4, DEADLINE), sent)
    assert set(asked) == {"header", *range(0, 60 * CHUNK, CHUNK)}
    assert len(asked) <= 61 + len(cuts)


def test_the_donor_is_told_even_if_the_first_connection_broke(
    donor: Donor, start_proxy: Callable[..., Proxy]
) -> None:
    """The header's connection is idle during the transfer. It may break meanwhile."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    digest = hashlib.sha256(sent.header).hexdigest()
    answer = {"held": [0, CHUNK], "bytes": len(sent.header), "sha256": digest}
    lines = ({"nonce": "0" * 32, "version": VERSION}, {"proof": "0" * 64}, answer)
    # Bytes of the seal.
    num_bytes = sum(len(msgspec.json.encode(line)) + 1 for line in lines) + len(digest)
    proxy = start_proxy(donor, {0: num_bytes + len(sent.header)}, "close")
    check_equal(fetch([proxy.address], TOKEN, 5, "4", 1, DEADLINE), sent)
    assert donor.told.wait(DEADLINE)
    assert donor.served == [("4", 5)]
    assert proxy.accepted == 3


def test_connections_that_always_break_fail_the_transfer(
    donor: Donor, start_proxy: Callable[..., Proxy], watch: Callable[..., list[Any]]
) -> None:
    """A donor that accepts connections and never gives a chunk is given up after three tries."""
    asked, proxy = watch(), start_proxy(donor, dict.fromkeys(range(1, 100), 600), "close")
    donor.publish(make_snapshot(5, 10 * CHUNK))
    with pytest.raises(TransferError, match="closed the connection"):
        fetch([proxy.address], TOKEN, 5, "4", 1, 600.0)
    assert Counter(asked) == {"header": 1, 0: 3}


def test_a_donor_that_is_gone_is_given_up_at_once(
    donor: Donor, start_proxy: Callable[..., Proxy]
) -> None:
    """After a break the address is closed. Another donor can be asked without a wait."""
    proxy = start_proxy(donor, {1: 5300}, "gone")
    donor.publish(make_snapshot(5, 10 * CHUNK))
    started = time.monotonic()
    with pytest.raises(TransferError, match="ConnectionRefused"):
        fetch([proxy.address], TOKEN, 5, "4", 1, 600.0)
    assert time.monotonic() - started < DEADLINE


@pytest.mark.parametrize("how", ["gone", "cancelled", "bug"])
def test_what_has_come_of_a_state_is_let_go_of_at_once(
    donor: Donor,
    start_proxy: Callable[..., Proxy],
    monkeypatch: pytest.MonkeyPatch,
    background: ThreadPoolExecutor,
    how: str,
) -> None:
    """The memory must not wait for a garbage collection, because the next attempt needs it."""
    taken: list[weakref.ref[Any]] = []
    cancelled, some = threading.Event(), threading.Event()

    def empty_host(numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = np.empty(numel, np.uint8)
        taken.append(weakref.ref(memory))  # a view of the tensor holds it too
        return torch.from_numpy(memory)

    def report_share(share: float) -> None:
        some.set()
        if how == "cancelled":
            cancelled.set()
        elif how == "bug":
            raise ZeroDivisionError

    monkeypatch.setattr(state_fetch.device, "empty_host", empty_host)
    address = start_proxy(donor, {1: 5300}, "gone").address if how == "gone" else donor.address
    donor.publish(make_snapshot(5, 10 * CHUNK))
    gc.disable()
    try:
        fetched = background.submit(
            fetch,
            [address],
            TOKEN,
            5,
            "4",
            1,
            600.0,
            cancelled,
            lambda place, error: None,
            report_share,
        )
        assert isinstance(
            fetched.exception(DEADLINE), ZeroDivisionError if how == "bug" else TransferError
        )
        assert some.is_set()
        (state,) = taken
        del fetched
        wait_until(lambda: state() is None)
    finally:
        gc.enable()


def test_a_stopped_donor_is_given_up_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor's kernel still accepts connections.

    The silence costs a stall, and not the whole timeout.
    """
    monkeypatch.setattr(state_fetch, "_STALL_SECONDS", 0.2)
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransferError, match=r"nothing came for 0\.2 s"):
            fetch([address], TOKEN, 5, "4", 1, 600.0)
    assert time.monotonic() - started < DEADLINE


def test_cancelling_ends_a_chunk_under_way(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """A cancelled transfer ends within a chunk, even while the donor waits for its snapshot."""
    donor, cancelled = start_donor(max_mbps=0.001, wait_seconds=60.0), threading.Event()
    fetched = background.submit(fetch, [donor.address], TOKEN, 5, "4", 2, 600.0, cancelled)
    wait_until(lambda: bool(donor.server._changed._waiters))  # type: ignore[attr-defined]
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetched.result(DEADLINE)
    cancelled.clear()
    donor.publish(make_snapshot(5, 1 << 20))
    fetched = background.submit(fetch, [donor.address], TOKEN, 5, "4", 2, 600.0, cancelled)
    wait_until(lambda: donor.server._num_readers > 0)
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetched.result(DEADLINE)


def test_a_slow_connection_does_not_hold_up_the_others(
    donor: Donor, watch: Callable[..., list[Any]]
) -> None:
    """The other connection fetches all chunks but the one that is stuck."""
    others = set(range(CHUNK, 10 * CHUNK, CHUNK))

    def hold_first(place: object, _: int, send: object) -> object:
        if place == 0:
            wait_until(lambda: others <= set(asked))
        return send

    asked = watch(hold_first)
    sent = donor.publish(make_snapshot(5, 10 * CHUNK))
    check_equal(donor.fetch(5, connections=2, timeout=2 * DEADLINE), sent)
    assert asked.count(0) == 1


def test_one_failure_ends_the_other_connections(
    donor: Donor, watch: Callable[..., list[Any]]
) -> None:
    """A transfer that can no longer succeed does not wait for its other connections."""
    release, stuck = threading.Event(), threading.Event()

    def interfere(place: object, _: int, send: object) -> object:
        if place == CHUNK:
            stuck.set()
            release.wait(60.0)
        elif place == 0:
            stuck.wait(DEADLINE)
            return send_corrupted
        return send

    watch(interfere)
    donor.publish(make_snapshot(5, 10 * CHUNK))
    started = time.monotonic()
    try:
        with pytest.raises(TransferError, match=r"1000 bytes at 0 .*checksum"):
            donor.fetch(5, connections=2, timeout=600.0)
        assert time.monotonic() - started < state_fetch._STALL_SECONDS
    finally:
        release.set()


# Several donors


def start_donors(start_donor: Callable[..., Donor], number: int, **options: Any) -> list[Donor]:
    return [start_donor(**options) for _ in range(number)]


def test_a_transfer_may_last_as_long_as_bytes_arrive(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice of any donor restarts the timeout. At the end each donor gets the farewell."""
    clock, finish = [0.0], state_fetch._Slices.accept_slice

    def finish_late(*args: Any) -> None:
        clock[0] += 200.0
        finish(*args)

    monkeypatch.setattr(state_fetch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(state_fetch._Slices, "accept_slice", finish_late)
    # By this clock no slice is late.
    monkeypatch.setattr(state_fetch._Slices, "_find_late", lambda *_: None)
    donors = start_donors(start_donor, 2)
    snapshot = make_snapshot(5, 10 * CHUNK)
    for donor in donors:
        donor.publish(snapshot)
    check_equal(fetch([donor.address for donor in donors], TOKEN, 5, "4", 2, 300.0), snapshot)
    assert clock[0] == 2000.0
    wait_until(lambda: sum(donor.given for donor in donors) == 10 * CHUNK)


def fetch_from(donors: list[Donor], **more: Any) -> Snapshot:
    """Fetch as group 4 does."""
    return fetch([donor.address for donor in donors], TOKEN, 5, "4", 2, DEADLINE, **more)


@pytest.mark.parametrize("number", [2, 4, 8])
def test_several_donors_give_a_part(start_donor: Callable[..., Donor], number: int) -> None:
    """Each byte comes once, from any donor that is quick enough.

    Donors learn how much they gave.
    """
    donors = start_donors(start_donor, number, max_mbps=1.0)
    snapshot = make_snapshot(5, 60 * CHUNK + 1)
    for donor in donors:
        donor.publish(snapshot)
    check_equal(fetch_from(donors), snapshot)
    wait_until(lambda: sum(donor.given for donor in donors) == 60 * CHUNK + 1)
    assert sum(donor.given > 0 for donor in donors) > 1
    assert all(donor.given > 0 for donor in donors if donor.told.is_set())


def test_a_joiner_without_memory_has_no_state(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no connection can allocate memory for a slice, nothing counts as fetched."""
    donors = start_donors(start_donor, 2)
    for donor in donors:
        donor.publish(make_snapshot(5, 3 * CHUNK))

    def no_room(size: int) -> bytearray:
        if size == CHUNK:
            raise MemoryError(f"{size} bytes")
        return bytearray(size)

    monkeypatch.setattr(state_fetch, "bytearray", no_room, raising=False)
    with pytest.raises(MemoryError, match="1000 bytes"):
        fetch_from(donors)


def test_a_donor_that_dies_costs_its_slices(
    start_donor: Callable[..., Donor], start_proxy: Callable[..., Proxy]
) -> None:
    """The others give its missing slices. Its earlier slices are not fetched again."""
    donors = start_donors(start_donor, 3, max_mbps=1.0)
    snapshot, lost = make_snapshot(5, 200 * CHUNK), []
    for donor in donors:
        donor.publish(snapshot)
    proxy = start_proxy(donors[1], {1: 5300}, "gone")
    addresses = [donors[0].address, proxy.address, donors[2].address]
    fetched = fetch(
        addresses, TOKEN, 5, "4", 3, DEADLINE, report_lost=lambda *what: lost.append(what)
    )
    check_equal(fetched, snapshot)
    ((place, reason),) = lost
    assert place == 1
    assert "ConnectionRefused" in reason
    assert donors[0].told.wait(DEADLINE)
    assert donors[2].told.wait(DEADLINE)
    given = donors[0].given + donors[2].given
    assert 0 < 200 * CHUNK - given < 5 * CHUNK, "slices from before its death count"


def test_a_donor_that_falls_silent_holds_nothing_up(
    start_donor: Callable[..., Donor],
    watch: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are asked for its slices long before its connection counts as broken."""
    monkeypatch.setattr(state_fetch, "_LATE_SECONDS", 0.1)
    release, held = threading.Event(), set[int]()

    def hold_some(place: Any, times: int, send: Any) -> Any:
        if place == 3 * CHUNK and times == 1:
            held.add(place)
            release.wait(60.0)
        return send

    asked = watch(hold_some)
    donors = start_donors(start_donor, 2)
    snapshot, lost = make_snapshot(5, 20 * CHUNK), []
    for donor in donors:
        donor.publish(snapshot)
    started = time.monotonic()
    try:
        check_equal(fetch_from(donors, report_lost=lambda *what: lost.append(what)), snapshot)
        assert held, "no donor was silent"
        assert asked.count(3 * CHUNK) == 2
        assert time.monotonic() - started < state_fetch._STALL_SECONDS / 2
        assert lost == [], "the donor may only have been slow"
    finally:
        release.set()


def test_what_comes_too_late_is_not_kept(
    start_donor: Callable[..., Donor],
    watch: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice that two donors give counts once. The later one does not write into the state."""
    monkeypatch.setattr(state_fetch, "_LATE_SECONDS", 0.05)
    release = threading.Event()

    def hold_first(place: Any, times: int, send: Any) -> Any:
        if place == 0 and times == 1:
            release.wait(DEADLINE)
        elif (
            place == 0
        ):  # the other donor's answer is on its way: delay the first donor's a moment longer
            threading.Timer(0.05, release.set).start()
        return send

    watch(hold_first)
    donors = start_donors(start_donor, 2)
    snapshot = make_snapshot(5, 6 * CHUNK)
    for donor in donors:
        donor.publish(snapshot)
    check_equal(fetch_from(donors), snapshot)
    wait_until(lambda: sum(donor.given for donor in donors) == 6 * CHUNK)


def test_donors_whose_headers_differ_are_not_mixed(start_donor: Callable[..., Donor]) -> None:
    """A state has one header. A donor with another header gives nothing."""
    donors, lost = start_donors(start_donor, 2), []
    snapshot = make_snapshot(5, 10 * CHUNK)
    other = json.loads(snapshot.header) | {"scalars": {"lr": 2.0}}
    donors[0].publish(snapshot)
    donors[1].publish(
        Snapshot(
            5, snapshot.lineage, json.dumps(other).encode(), torch.zeros_like(snapshot.payload)
        )
    )
    fetched = fetch_from(donors, report_lost=lambda *what: lost.append(what))
    first = 0 if fetched.header == snapshot.header else 1
    assert torch.equal(
        fetched.payload, snapshot.payload if first == 0 else torch.zeros_like(snapshot.payload)
    )
    wait_until(lambda: donors[first].given == 10 * CHUNK)
    # the other header may come when all bytes are there
    assert [place for place, _ in lost] in ([], [1 - first])


def test_a_donor_that_has_yet_to_copy_is_not_waited_for(start_donor: Callable[..., Donor]) -> None:
    """A donor that serves another joiner, and lacks this state, delays nothing."""
    donors = start_donors(start_donor, 2, wait_seconds=60.0)
    snapshot = donors[1].publish(make_snapshot(5, 10 * CHUNK))
    started = time.monotonic()
    check_equal(fetch_from(donors), snapshot)
    assert time.monotonic() - started < DEADLINE / 2
    assert donors[1].given == 10 * CHUNK
    assert donors[0].served == []


def test_no_donor_is_lost_when_the_transfer_is_not_wanted(
    start_donor: Callable[..., Donor],
) -> None:
    """After a cancel no donor is reported as lost."""
    donors, lost, cancelled = start_donors(start_donor, 3), [], threading.Event()
    for donor in donors:
        donor.publish(make_snapshot(5, 10 * CHUNK))
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetch_from(donors, cancelled=cancelled, report_lost=lambda *what: lost.append(what))
    assert lost == []


def test_without_any_donor_left_the_error_names_all(start_donor: Callable[..., Donor]) -> None:
    """The error has each reason.

    A refusal is raised as it is: no other attempt would help.
    """
    donors, lost = start_donors(start_donor, 2), []
    for donor in donors:
        donor.publish(make_snapshot(6, CHUNK))
    with pytest.raises(
        TransferError, match=rf"{donors[0].address}, {donors[1].address}: the donor has no state of"
    ):
        fetch_from(donors, report_lost=lambda *what: lost.append(what))
    assert len(lost) == 1, "the second loss ends the attempt, which has an event of its own"
    with pytest.raises(RefusedError, match="TITAN_FT_TOKEN"):
        fetch([donor.address for donor in donors], "another", 6, "4", 2, DEADLINE)


# Donors whose hosts have no memory for a whole state


def publish_parts(donors: list[Donor], sent: Snapshot, *held: tuple[int, int]) -> None:
    """Let each donor hold the bytes of its range."""
    for donor, (first, end) in zip(donors, held, strict=True):
        donor.publish(
            dataclasses.replace(sent, payload=sent.payload[first:end].clone(), first_byte=first)
        )


@pytest.mark.parametrize(
    "held",
    [
        [(0, 2500), (2500, 2501), (2501, 9001)],
        [(0, 9001), (1, 8999)],  # one of them has room for the whole state
        [(0, 5200), (4100, 9001)],
        [(0, 0), (0, 9001), (9001, 9001)],
        [(0, 300), (300, 700), (700, 9001)],  # several parts in one slice
    ],
)
def test_parts_that_donors_hold_become_one_state(
    start_donor: Callable[..., Donor], held: list[tuple[int, int]]
) -> None:
    """The cuts make no difference. No donor is asked for bytes that it lacks, or twice."""
    donors, sent, lost = start_donors(start_donor, len(held)), make_snapshot(5, 9 * CHUNK + 1), []
    publish_parts(donors, sent, *held)
    shares: list[float] = []
    check_equal(
        fetch_from(donors, report_lost=lambda *what: lost.append(what), report_share=shares.append),
        sent,
    )
    wait_until(lambda: sum(donor.given for donor in donors) == sent.payload.numel())
    assert all(donor.given <= end - first for donor, (first, end) in zip(donors, held, strict=True))
    assert lost == []
    assert max(shares) == 1.0
    assert min(shares) > 0.0


def test_a_donor_that_alone_held_its_part_costs_the_attempt(
    start_donor: Callable[..., Donor], start_proxy: Callable[..., Proxy]
) -> None:
    """The attempt fails at once.

    The others, which can give all their bytes, are not reported as lost.
    """
    donors, sent, lost = (
        start_donors(start_donor, 3, max_mbps=0.01),
        make_snapshot(5, 30 * CHUNK),
        [],
    )
    publish_parts(donors, sent, (0, 10 * CHUNK), (10 * CHUNK, 20 * CHUNK), (20 * CHUNK, 30 * CHUNK))
    proxy = start_proxy(donors[1], {1: 300}, "gone")
    addresses = [donors[0].address, proxy.address, donors[2].address]
    started = time.monotonic()  # 8 s that each of the others would take
    with pytest.raises(
        TransferError, match="the donors that are left do not hold all of it"
    ) as raised:
        fetch(addresses, TOKEN, 5, "4", 3, DEADLINE, report_lost=lambda *what: lost.append(what))
    assert time.monotonic() - started < DEADLINE / 2
    assert "ConnectionRefused" in str(raised.value)
    assert {place for place, _ in lost} <= {1}, "its end may be reported as that of the attempt"


def test_what_a_dead_donor_owes_is_cut_to_what_the_others_hold() -> None:
    """This includes a slice that was under way when they reported their bytes. The order stays."""
    slices, limits = (
        state_fetch._Slices(3),
        state_fetch._TransferLimits(DEADLINE, threading.Event()),
    )
    slices.divide(3 * CHUNK)
    slices.set_held(0, range(3 * CHUNK))
    assert slices.await_slice(0, limits) == range(CHUNK)
    slices.set_held(1, range(300))
    slices.set_held(2, range(300, 3 * CHUNK))
    slices.release_donor(0)
    assert slices.await_slice(2, limits) == range(300, CHUNK)
    assert slices.await_slice(1, limits) == range(300)
    assert slices.await_slice(2, limits) == range(CHUNK, 2 * CHUNK)


def test_who_has_yet_to_say_what_it_holds_is_waited_for(start_donor: Callable[..., Donor]) -> None:
    """The donor may have the missing bytes. Meanwhile the others go on with their slices."""
    donors, sent = start_donors(start_donor, 2, max_mbps=0.1), make_snapshot(5, 10 * CHUNK)
    publish_parts(donors[:1], sent, (0, 5 * CHUNK))
    timer = threading.Timer(0.5, publish_parts, (donors[1:], sent, (5 * CHUNK, 10 * CHUNK)))
    timer.start()
    check_equal(fetch([donor.address for donor in donors], TOKEN, 5, "4", 4, DEADLINE), sent)
    timer.join()


def test_a_donor_that_says_nonsense_of_what_it_holds_gives_nothing(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor claims more bytes than there are, or a negative range. The joiner does not wait for
    it.
    """
    donors, sent = start_donors(start_donor, 2), make_snapshot(5, 10 * CHUNK)
    publish_parts(donors, sent, (0, 5 * CHUNK), (5 * CHUNK, 10 * CHUNK))
    monkeypatch.setattr(
        Snapshot, "byte_range", property(lambda each: range(each.first_byte + 5, each.first_byte))
    )
    started = time.monotonic()
    with pytest.raises(TransferError, match="the donors that are left do not hold all of it"):
        fetch_from(donors)
    assert time.monotonic() - started < DEADLINE / 2
