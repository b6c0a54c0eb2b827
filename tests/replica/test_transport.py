# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The transfer of a snapshot from a donor to a joiner over sockets."""

from __future__ import annotations

import ast
import contextlib
import heapq
import inspect
import json
import logging
import select
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from titan_ft.replica import transport
from titan_ft.replica.errors import RefusedError
from titan_ft.replica.snapshot import Snapshot
from titan_ft.replica.transport import StateServer, TransferError, fetch

DEADLINE = 10.0  # seconds; only ever reached by a bug
CHUNK = 1000  # bytes of one request in these tests
TOKEN = "a shared secret"


def make_snapshot(step: int, num_bytes: int) -> Snapshot:
    """Return a snapshot whose bytes depend on its step."""
    payload = (torch.arange(num_bytes, dtype=torch.int64) * 7 + step).to(torch.uint8)
    header = {"step": step, "lineage": 1000 + step, "bytes": num_bytes, "tensors": [], "scalars": {}}
    return Snapshot(step, 1000 + step, json.dumps(header).encode(), payload)


class Donor:
    """A state server that notes what it is told, with a joiner's view of it."""

    def __init__(self, wait_seconds: float = DEADLINE, token: str = TOKEN, max_mbps: float = 0.0) -> None:
        self.served: list[tuple[str, int]] = []
        self.told = threading.Event()
        self.server = StateServer("127.0.0.1", token, wait_seconds, self._on_served, max_mbps)
        self.address = f"127.0.0.1:{self.server.port}"

    def _on_served(self, joiner: str, snapshot: Snapshot, copy_seconds: float, serve_seconds: float) -> None:
        assert copy_seconds == 0.5
        assert serve_seconds >= 0
        self.served.append((joiner, snapshot.step))
        self.told.set()

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Serve `snapshot`."""
        self.server.publish(snapshot, 0.5)
        return snapshot

    def fetch(self, step: int, token: str = TOKEN, connections: int = 2, timeout: float = DEADLINE) -> Snapshot:
        """Fetch as group 4 does."""
        return fetch(self.address, token, step, "4", connections, timeout)

    def connect(self, token: str = TOKEN) -> transport._Connection:
        """Open a joiner's connection and prove the token."""
        return transport._Connection(self.address, token, transport._Patience(DEADLINE, threading.Event()))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_CHUNK", CHUNK)


@pytest.fixture
def start_donor() -> Iterator[Callable[..., Donor]]:
    """Provide the builder of donors; closes them."""
    donors: list[Donor] = []

    def start(**kwargs: Any) -> Donor:
        donors.append(Donor(**kwargs))
        return donors[-1]

    yield start
    for donor in donors:  # closing waits for the server's poll, which need not hold up the next test
        threading.Thread(target=donor.server.close).start()


@pytest.fixture
def donor(start_donor: Callable[..., Donor]) -> Donor:
    """Provide a donor without a snapshot yet."""
    return start_donor()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Provide threads for joiners."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def check_equal(fetched: Snapshot, sent: Snapshot) -> None:
    """Check that what arrived is what was sent, in memory of its own."""
    assert (fetched.step, fetched.lineage, fetched.header) == (sent.step, sent.lineage, sent.header)
    assert torch.equal(fetched.payload, sent.payload)
    if sent.payload.numel():
        assert fetched.payload.data_ptr() != sent.payload.data_ptr()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event tells of."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


@pytest.mark.parametrize("connections", [1, 3, 16])
@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 13])
def test_every_byte_arrives(donor: Donor, num_bytes: int, connections: int) -> None:
    """Sizes that are no multiple of a chunk, no bytes at all, and more connections than chunks: all bytes arrive."""
    sent = donor.publish(make_snapshot(5, num_bytes))
    check_equal(donor.fetch(5, connections=connections), sent)
    assert donor.told.wait(DEADLINE)
    assert donor.served == [("4", 5)]


def test_a_header_longer_than_a_line_arrives(donor: Donor) -> None:
    """The header of a large model has thousands of entries: it is no line of the protocol."""
    snapshot = make_snapshot(5, 10)
    header = {**json.loads(snapshot.header), "tensors": [{"name": f"model/0/layers.{n}.weight"} for n in range(20_000)]}
    sent = donor.publish(Snapshot(5, snapshot.lineage, json.dumps(header).encode(), snapshot.payload))
    check_equal(donor.fetch(5), sent)


def test_a_wrong_token_is_refused_by_the_donor(donor: Donor) -> None:
    """A joiner with another token gets no byte, and a message that names the variable to set."""
    donor.publish(make_snapshot(5, 10))
    with pytest.raises(RefusedError, match="TITAN_FT_TOKEN"):
        donor.fetch(5, token="another secret")
    assert donor.served == []


@pytest.mark.parametrize("proof", ["", "not ascii: \xe9\u4e2d", 7, None, ["a"]])
def test_an_unproven_connection_learns_nothing(donor: Donor, proof: object, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever stands in for the proof, the donor answers with a refusal, closes, and prints no traceback."""
    donor.publish(make_snapshot(5, 10))
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rwb")
        assert set(json.loads(stream.readline())) == {"nonce"}
        stream.write(json.dumps({"nonce": "00", "proof": proof}).encode() + b"\n")
        stream.write(b'{"step": 5, "header": true}\n')
        stream.flush()
        answer = stream.readline()
        assert set(json.loads(answer)) == {"refused"}
        assert read_rest(stream) == b""
    assert TOKEN not in answer.decode()
    assert "Traceback" not in capfd.readouterr().err


def read_rest(stream: Any) -> bytes:
    """Read until the other end closes, which may be abrupt when it left something unread."""
    try:
        return stream.read()
    except ConnectionResetError:
        return b""


def test_a_recorded_proof_is_worth_nothing(donor: Donor) -> None:
    """The proof depends on the donor's fresh nonce: repeating what another joiner said is refused."""
    said: list[bytes] = []
    for attempt in range(2):
        with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as connection:
            stream = connection.makefile("rwb")
            nonce = json.loads(stream.readline())["nonce"]
            if attempt == 0:
                proof = transport._proof(TOKEN, "joiner", nonce, "00")
                said.append(json.dumps({"nonce": "00", "proof": proof}).encode() + b"\n")
            stream.write(said[0])
            stream.flush()
            answer = json.loads(stream.readline())
            assert set(answer) == ({"proof"} if attempt == 0 else {"refused"})


def serve_once(talk: Callable[[socket.socket], None]) -> tuple[str, Future[None]]:
    """Listen for one connection and let `talk` answer it; returns the address and the end of the talk."""
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
    """A server that cannot prove the token is not believed, and the token is never sent to it."""
    heard: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        stream = connection.makefile("rwb")
        stream.write(b'{"nonce": "00"}\n')
        stream.flush()
        heard.append(stream.readline())
        # The best it can do without the token: send the joiner's own proof back.
        stream.write(json.dumps({"proof": json.loads(heard[0])["proof"]}).encode() + b"\n")
        stream.flush()
        heard.append(stream.read())

    address, ended = serve_once(talk)
    with pytest.raises(RefusedError, match="TITAN_FT_TOKEN"):
        fetch(address, TOKEN, 5, "4", 1, DEADLINE)
    ended.result(DEADLINE)
    assert TOKEN.encode() not in heard[0]
    assert heard[1] == b"", "nothing is asked of a server that proved nothing"


def test_a_step_that_the_donor_never_has_is_an_error(start_donor: Callable[..., Donor]) -> None:
    """After waiting in vain, the error names the step asked for and what the donor has."""
    donor = start_donor(wait_seconds=0.05)
    with pytest.raises(TransferError, match=r"no state of step 5 .it has none"):
        donor.fetch(5)
    donor.publish(make_snapshot(4, 10))
    with pytest.raises(TransferError, match=r"no state of step 5 .it has step 4"):
        donor.fetch(5)


def test_a_step_that_is_over_is_an_error_at_once(donor: Donor) -> None:
    """A donor with a later step will never have the earlier one again: no waiting."""
    donor.publish(make_snapshot(6, 10))
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"no state of step 5 .it has step 6"):
        donor.fetch(5)
    assert time.monotonic() - started < DEADLINE / 2


def test_a_step_that_comes_while_the_joiner_waits_is_served(donor: Donor, background: ThreadPoolExecutor) -> None:
    """The joiner may ask before the donor's copy is complete."""
    donor.publish(make_snapshot(4, 10))
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: bool(donor.server._changed._waiters))  # type: ignore[attr-defined]  # it asked and was put off
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    check_equal(fetched.result(DEADLINE), sent)


def test_a_withdrawn_snapshot_is_served_to_nobody(start_donor: Callable[..., Donor]) -> None:
    """What was withdrawn cannot be fetched any more; its memory is the caller's."""
    donor = start_donor(wait_seconds=0.05)
    sent = donor.publish(make_snapshot(5, 10))
    assert donor.server.withdraw() is sent
    assert donor.server.withdraw() is None
    with pytest.raises(TransferError, match="it has none"):
        donor.fetch(5)


def test_memory_under_a_reader_is_not_given_back(donor: Donor) -> None:
    """Withdrawn in the middle of an answer, the snapshot stays as it is until the reader has all of it."""
    sent = make_snapshot(5, 32 << 20)  # more than the sockets hold, so that the answer waits for the reader
    donor.publish(sent)
    expected = sent.payload.clone()
    with donor.connect() as connection:
        transport._write(connection._stream, {"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._readers == 1)
        assert donor.server.withdraw() is None
        donor.publish(make_snapshot(6, 10))
        assert json.loads(connection._stream.readline())["bytes"] == sent.payload.numel()
        received = connection._stream.read(sent.payload.numel())
    assert received == expected.numpy().tobytes()
    wait_until(lambda: donor.server._readers == 0)
    last = donor.publish(make_snapshot(7, 10))
    assert donor.server.withdraw() is last


def test_a_donor_that_dies_in_mid_transfer_is_noticed_at_once() -> None:
    """When the connection ends within a chunk, the joiner gets an error, not a wait for the timeout."""

    def talk(connection: socket.socket) -> None:
        stream = connection.makefile("rwb")
        prove(stream)
        header = make_snapshot(5, 10 * CHUNK).header
        stream.readline()
        stream.write(json.dumps({"bytes": len(header), "crc32": 0}).encode() + b"\n" + header[:-1])
        stream.flush()

    address, _ = serve_once(talk)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"state of step 5 from 127\.0\.0\.1:.*Connection"):
        fetch(address, TOKEN, 5, "4", 1, DEADLINE)
    assert time.monotonic() - started < DEADLINE / 2


def prove(stream: Any) -> None:
    """Answer a joiner's handshake as a donor with the token does."""
    transport._write(stream, {"nonce": "00"})
    hello = json.loads(stream.readline())
    transport._write(stream, {"proof": transport._proof(TOKEN, "donor", "00", hello["nonce"])})


def test_a_donor_that_closes_ends_all_connections_of_a_fetch(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step on the donor ends a fetch that is half done with the donor's words."""
    donor.publish(make_snapshot(5, 10 * CHUNK))
    request = transport._Connection.request
    replaced = threading.Event()

    def replace_at_the_third_chunk(self: Any, message: dict[str, Any], *into: Any) -> Any:
        if message.get("offset", 0) >= 2 * CHUNK and not replaced.is_set():
            replaced.set()
            donor.publish(make_snapshot(6, 10 * CHUNK))
        return request(self, message, *into)

    monkeypatch.setattr(transport._Connection, "request", replace_at_the_third_chunk)
    with pytest.raises(TransferError, match=r"no state of step 5 .it has step 6"):
        donor.fetch(5)
    assert donor.served == []


def test_nobody_listens() -> None:
    """An address where no donor is any more is a failed transfer that names it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match=rf"127\.0\.0\.1:{port}.*ConnectionRefused"):
        fetch(f"127.0.0.1:{port}", TOKEN, 5, "4", 2, DEADLINE)


@pytest.mark.parametrize("pause", [None, 0.02], ids=["silent", "trickling"])
def test_the_timeout_holds_for_the_whole_transfer(pause: float | None) -> None:
    """A donor that is silent, or that sends a byte now and then within one chunk, does not outlast the timeout."""
    stop = threading.Event()

    def talk(connection: socket.socket) -> None:
        stream = connection.makefile("rwb")
        prove(stream)
        stream.readline()
        stream.write(b'{"bytes": 1000000}\n')
        stream.flush()
        while not stop.wait(DEADLINE if pause is None else pause) and pause is not None:
            try:
                connection.sendall(b"x")
            except OSError:
                return

    address, _ = serve_once(talk)
    started = time.monotonic()
    try:
        with pytest.raises(TransferError, match=r"timed out|transfer_timeout_seconds"):
            fetch(address, TOKEN, 5, "4", 1, timeout=0.3)
        assert time.monotonic() - started < 2.0
    finally:
        stop.set()


def test_a_cancelled_transfer_ends(donor: Donor) -> None:
    """A fetch that is not wanted any more stops at the next chunk and is not counted as served."""
    donor.publish(make_snapshot(5, 10 * CHUNK))
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetch(donor.address, TOKEN, 5, "4", 2, DEADLINE, cancelled)
    assert donor.served == []


def test_the_state_is_complete_without_the_last_word(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor that dies right after the last byte has served the state: telling it so is a courtesy."""
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    request = transport._Connection.request

    def withdraw_at_the_end(self: Any, message: dict[str, Any], *into: Any) -> Any:
        if "done" in message:
            raise ConnectionResetError("the donor died")
        return request(self, message, *into)

    monkeypatch.setattr(transport._Connection, "request", withdraw_at_the_end)
    check_equal(donor.fetch(5), sent)
    assert donor.served == []


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 50, b"[1, 2]\n", b"null\n", b"[" * 8000, b"x" * 100_000],
    ids=["nothing", "empty line", "http", "pickle", "list", "null", "nesting", "long line"],
)
def test_garbage_from_a_stranger_does_not_hurt_the_donor(
    donor: Donor, garbage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever a stranger sends, the connection is closed, nothing is printed, and the next joiner is served."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rb")
        stream.readline()
        with contextlib.suppress(OSError):  # the donor may have had enough before the end
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
        assert b"bytes" not in read_rest(stream)
    check_equal(donor.fetch(5), sent)
    assert capfd.readouterr().err == ""


def test_requests_of_a_proven_joiner_may_be_wrong_too(donor: Donor, capfd: pytest.CaptureFixture[str]) -> None:
    """A bad request from a joiner of another version ends its connection, not the server."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    for request in ({"step": "five"}, {"offset": 0}, {"step": 5, "offset": 0}, {"step": [5]}):
        with donor.connect() as connection:
            transport._write(connection._stream, request)
            assert b"bytes" not in read_rest(connection._stream)
    check_equal(donor.fetch(5), sent)
    assert "Traceback" not in capfd.readouterr().err


def test_a_range_beyond_the_state_is_no_other_memory(donor: Donor) -> None:
    """What lies behind the snapshot in memory is never sent."""
    donor.publish(make_snapshot(5, CHUNK))
    with donor.connect() as connection, pytest.raises(TransferError, match="sent 10 bytes where 50 were asked for"):
        connection.request({"step": 5, "offset": CHUNK - 10, "bytes": 50}, memoryview(bytearray(50)))


def test_a_slow_joiner_does_not_hold_up_another(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one joiner reads nothing of a large answer, another gets the whole state."""
    sent = donor.publish(make_snapshot(5, 32 << 20))
    with donor.connect() as slow:
        transport._write(slow._stream, {"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._readers == 1)
        monkeypatch.setattr(transport, "_CHUNK", 8 << 20)
        check_equal(donor.fetch(5), sent)


def test_idle_strangers_do_not_hold_up_a_joiner(donor: Donor) -> None:
    """Connections that say nothing take no thread that a joiner would need."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    strangers = [socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) for _ in range(50)]
    try:
        check_equal(donor.fetch(5), sent)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_says_nothing_is_dropped(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a handshake is closed after a while."""
    monkeypatch.setattr(transport, "_HANDSHAKE_SECONDS", 0.1)
    donor = start_donor()
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rb")
        stream.readline()
        assert read_rest(stream) == b""


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("connections", [1, 5, 64])
@pytest.mark.parametrize("max_mbps", [0.01, 1.0, 100.0, 10_000.0])
def test_the_rate_holds_over_all_connections(max_mbps: float, connections: int) -> None:
    """Whatever their number, connections together send at the rate, no faster and hardly slower, in equal parts."""
    clock = Clock()
    pace = transport._Pace(max_mbps, clock)
    rate, begin = max_mbps * 1e6 / 8, clock.now
    sent: Counter[int] = Counter()
    turns = [(begin, number) for number in range(connections)]  # when who has sent a slice and wants to send another
    for _ in range(2000):
        clock.now, number = heapq.heappop(turns)
        delay = pace.book(pace.slice)
        assert delay < transport._STALL_SECONDS / 2, "a connection that waits for its turn does not look dead"
        heapq.heappush(turns, (clock.now + delay, number))
        sent[number] += pace.slice
        allowed = rate * (clock.now + delay - begin + transport._CREDIT_SECONDS) + pace.slice
        assert sent.total() <= allowed * (1 + 1e-9)
    assert sent.total() >= rate * (clock.now - begin)
    assert max(sent.values()) - min(sent.values()) <= rate * transport._CREDIT_SECONDS + 2 * pace.slice


def test_idle_time_earns_no_credit() -> None:
    """After a pause, however long, sending goes on at the rate and not at once."""
    clock = Clock()
    pace = transport._Pace(8.0, clock)  # a million bytes per second
    pace.book(1000)
    clock.now += 1000.0
    total = 0
    while pace.book(1000) == 0.0:
        total += 1000
    assert total <= 1_000_000 * transport._CREDIT_SECONDS + 1000


def test_without_a_rate_nothing_waits() -> None:
    """0 is unlimited, and what is sent is not cut to slices."""
    pace = transport._Pace(0.0)
    assert [pace.book(1 << 40) for _ in range(3)] == [0.0] * 3
    assert pace.slice > 1 << 40


def test_a_throttled_donor_keeps_to_the_rate(start_donor: Callable[..., Donor], background: ThreadPoolExecutor) -> None:
    """Two joiners with three connections each share what the donor may send, and both get every byte."""
    donor = start_donor(max_mbps=4.0)  # half a million bytes per second
    sent = donor.publish(make_snapshot(5, 100 * CHUNK))
    started = time.monotonic()
    for fetched in [background.submit(donor.fetch, 5, TOKEN, 3) for _ in range(2)]:
        check_equal(fetched.result(DEADLINE), sent)
    least = 200 * CHUNK / 500_000 - transport._CREDIT_SECONDS - transport._SLICE_SECONDS
    assert time.monotonic() - started >= least


@pytest.mark.slow
def test_a_throttled_donor_is_not_taken_for_dead(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A chunk may take longer than the silence that makes a connection count as broken: a trickle is no silence."""
    monkeypatch.setattr(transport, "_STALL_SECONDS", 3.0)
    donor = start_donor(max_mbps=0.008)  # 1000 bytes per second
    monkeypatch.setattr(transport, "_CHUNK", 4000)
    sent = donor.publish(make_snapshot(5, 4000))
    check_equal(donor.fetch(5, connections=1), sent)
    assert not caplog.records


def test_a_throttled_answer_ends_with_its_joiner(start_donor: Callable[..., Donor]) -> None:
    """A donor that sends slowly notices soon that nobody listens any more, and its memory is free again."""
    donor = start_donor(max_mbps=0.01)
    sent = donor.publish(make_snapshot(5, 1 << 20))  # a quarter of an hour
    with donor.connect() as connection:
        transport._write(connection._stream, {"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._readers == 1)
    wait_until(lambda: donor.server._readers == 0)
    assert donor.server.withdraw() is sent


def test_closing_ends_a_throttled_answer(start_donor: Callable[..., Donor], background: ThreadPoolExecutor) -> None:
    """A closed server does not go on sending, and its joiner hears of it at once."""
    donor = start_donor(max_mbps=0.001)
    donor.publish(make_snapshot(5, 10))
    donor.fetch(5)
    donor.publish(make_snapshot(6, 1 << 20))
    fetched = background.submit(fetch, donor.address, TOKEN, 6, "4", 2, 60.0)
    wait_until(lambda: donor.server._readers > 0)
    donor.server.close()
    with pytest.raises(TransferError, match="state of step 6"):
        fetched.result(DEADLINE)
    wait_until(lambda: donor.server._readers == 0)


def test_a_joiner_that_takes_nothing_is_dropped(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner that hangs, or whose host is gone, does not keep the snapshot's memory for good."""
    monkeypatch.setattr(transport, "_JOINER_SECONDS", 0.2)
    donor = start_donor()
    sent = donor.publish(make_snapshot(5, 32 << 20))
    with donor.connect() as connection:
        transport._write(connection._stream, {"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._readers == 1)
        wait_until(lambda: donor.server._readers == 0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Provide a view on what donors are asked for: offsets, and "header" for the header.

    `watch(interfere)` calls interfere(place, times it was asked for, pace) before each answer and answers at the pace
    that it returns.
    """

    def start(interfere: Callable[[Any, int, Any], Any] = lambda place, times, pace: pace) -> list[Any]:
        asked: list[Any] = []
        answer = StateServer._answer

        def watched(stream: Any, connection: Any, request: dict[str, Any], snapshot: Snapshot, pace: Any) -> None:
            if "done" not in request:
                place = request.get("offset", "header")
                asked.append(place)
                pace = interfere(place, asked.count(place), pace)
            answer(stream, connection, request, snapshot, pace)

        monkeypatch.setattr(StateServer, "_answer", staticmethod(watched))
        return asked

    return start


class Corrupting:
    """Sends data with one bit flipped, after its checksum was made."""

    @staticmethod
    def send(connection: socket.socket, data: memoryview) -> None:
        """Send all but the truth."""
        connection.sendall(bytes(data[:-1]) + bytes([data[-1] ^ 16]))


@pytest.mark.parametrize("place", ["header", 0, 2 * CHUNK, 4 * CHUNK])
@pytest.mark.parametrize("times", [1, 2])
def test_what_arrives_corrupted_is_fetched_again(
    donor: Donor, watch: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture, place: object, times: int
) -> None:
    """A flipped bit in the header or in a chunk is noticed, warned of, and cured by asking for that part again."""
    asked = watch(lambda where, count, pace: Corrupting() if where == place and count <= times else pace)
    sent = donor.publish(make_snapshot(5, 4 * CHUNK + 1))
    check_equal(donor.fetch(5), sent)
    assert Counter(asked) == {"header": 1, **dict.fromkeys(range(0, 5 * CHUNK, CHUNK), 1), place: times + 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    what = "the header" if place == "header" else f"bytes at {place} "
    assert len(warnings) == times
    assert all(what in warning and donor.address in warning for warning in warnings)


def test_what_always_arrives_corrupted_fails_the_transfer(donor: Donor, watch: Callable[..., list[Any]]) -> None:
    """After three tries of one chunk the transfer fails, and the error names the chunk."""
    asked = watch(lambda where, _, pace: Corrupting() if where == 2 * CHUNK else pace)
    donor.publish(make_snapshot(5, 5 * CHUNK))
    with pytest.raises(TransferError, match=r"state of step 5 .* 1000 bytes at 2000 .*checksum"):
        donor.fetch(5)
    assert asked.count(2 * CHUNK) == 3
    assert donor.served == []


class Proxy:
    """Stands between joiners and a donor and breaks connections in the middle.

    Args:
        cuts: bytes from the donor after which a connection breaks, by its number in the order of arrival.
        how: what then happens: "reset", "close", "silence", or "gone" (a close, and nobody listens any more).
    """

    def __init__(self, donor: Donor, cuts: dict[int, int], how: str) -> None:
        self._port, self._cuts, self._how = donor.server.port, cuts, how
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if select.select([self._listener], [], [], 0.02)[0]:
                joiner, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(joiner, self._cuts.get(self.accepted, 1 << 60))).start()
                self.accepted += 1
        self._listener.close()

    def _relay(self, joiner: socket.socket, left: int) -> None:
        with joiner, socket.create_connection(("127.0.0.1", self._port)) as donor, contextlib.suppress(OSError):
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
        """Break everything."""
        self._closed.set()


@pytest.fixture
def start_proxy() -> Iterator[Callable[..., Proxy]]:
    """Provide the builder of proxies; closes them."""
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
    """A connection that breaks or falls silent within the fifth chunk costs that chunk only, and no timeout."""
    monkeypatch.setattr(transport, "_STALL_SECONDS", 3.0)
    asked, proxy = watch(), start_proxy(donor, {1: 4700}, how)  # 0 is the header's; within: 4 chunks and their lines
    sent = donor.publish(make_snapshot(5, 10 * CHUNK))
    check_equal(fetch(proxy.address, TOKEN, 5, "4", 1, 600.0), sent)
    assert Counter(asked) == {"header": 1, **dict.fromkeys(range(0, 10 * CHUNK, CHUNK), 1), 4 * CHUNK: 2}
    assert proxy.accepted == 3
    assert donor.told.wait(DEADLINE)


def test_all_connections_may_break(
    donor: Donor, start_proxy: Callable[..., Proxy], watch: Callable[..., list[Any]]
) -> None:
    """Each break costs at most the one chunk that was under way, also when all connections break again and again."""
    cuts = dict.fromkeys(range(1, 13), 3000)
    asked, proxy = watch(), start_proxy(donor, cuts, "reset")
    sent = donor.publish(make_snapshot(5, 60 * CHUNK))
    check_equal(fetch(proxy.address, TOKEN, 5, "4", 4, DEADLINE), sent)
    assert set(asked) == {"header", *range(0, 60 * CHUNK, CHUNK)}
    assert len(asked) <= 61 + len(cuts)


def test_the_donor_is_told_even_if_the_first_connection_broke(donor: Donor, start_proxy: Callable[..., Proxy]) -> None:
    """The connection of the header lies idle during the transfer; that it broke meanwhile does not matter."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    answer = {"bytes": len(sent.header), "crc32": zlib.crc32(sent.header)}
    lines = ({"nonce": "0" * 32}, {"proof": "0" * 64}, answer)
    proxy = start_proxy(donor, {0: sum(len(json.dumps(line)) + 1 for line in lines) + len(sent.header)}, "close")
    check_equal(fetch(proxy.address, TOKEN, 5, "4", 1, DEADLINE), sent)
    assert donor.told.wait(DEADLINE)
    assert donor.served == [("4", 5)]
    assert proxy.accepted == 3


def test_connections_that_always_break_fail_the_transfer(
    donor: Donor, start_proxy: Callable[..., Proxy], watch: Callable[..., list[Any]]
) -> None:
    """A donor that can be reached but never delivers a chunk is given up after three tries."""
    asked, proxy = watch(), start_proxy(donor, dict.fromkeys(range(1, 100), 600), "close")
    donor.publish(make_snapshot(5, 10 * CHUNK))
    with pytest.raises(TransferError, match="closed the connection"):
        fetch(proxy.address, TOKEN, 5, "4", 1, 600.0)
    assert Counter(asked) == {"header": 1, 0: 3}


def test_a_donor_that_is_gone_is_given_up_at_once(donor: Donor, start_proxy: Callable[..., Proxy]) -> None:
    """When nobody listens any more after a break, another donor can be asked without any wait."""
    proxy = start_proxy(donor, {1: 4700}, "gone")
    donor.publish(make_snapshot(5, 10 * CHUNK))
    started = time.monotonic()
    with pytest.raises(TransferError, match="ConnectionRefused"):
        fetch(proxy.address, TOKEN, 5, "4", 1, 600.0)
    assert time.monotonic() - started < DEADLINE


def test_a_stopped_donor_is_given_up_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor whose kernel still takes connections but which says nothing costs a stall, not the whole timeout."""
    monkeypatch.setattr(transport, "_STALL_SECONDS", 0.2)
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransferError, match=r"nothing came for 0\.2 s"):
            fetch(address, TOKEN, 5, "4", 1, 600.0)
    assert time.monotonic() - started < DEADLINE


@pytest.mark.slow
def test_a_donor_that_has_yet_to_copy_is_not_silent(
    start_donor: Callable[..., Donor],
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A joiner that waits for the snapshot hears of the donor, and does not take it for dead."""
    monkeypatch.setattr(transport, "_STALL_SECONDS", 3.0)
    monkeypatch.setattr(transport, "_WAITING_SECONDS", 0.05)
    said: list[float] = []
    write = transport._write

    def note(stream: Any, message: dict[str, Any]) -> None:
        said.extend([time.monotonic()] if "waiting" in message else [])
        write(stream, message)

    monkeypatch.setattr(transport, "_write", note)
    donor = start_donor(wait_seconds=60.0)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: bool(said) and said[-1] - said[0] > 4.0)
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    check_equal(fetched.result(DEADLINE), sent)
    assert not caplog.records


def test_cancelling_ends_a_chunk_under_way(start_donor: Callable[..., Donor], background: ThreadPoolExecutor) -> None:
    """A transfer that is not wanted any more ends within a chunk, also while the donor waits for its snapshot."""
    donor, cancelled = start_donor(max_mbps=0.001, wait_seconds=60.0), threading.Event()
    fetched = background.submit(fetch, donor.address, TOKEN, 5, "4", 2, 600.0, cancelled)
    wait_until(lambda: bool(donor.server._changed._waiters))  # type: ignore[attr-defined]
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetched.result(DEADLINE)
    cancelled.clear()
    donor.publish(make_snapshot(5, 1 << 20))
    fetched = background.submit(fetch, donor.address, TOKEN, 5, "4", 2, 600.0, cancelled)
    wait_until(lambda: donor.server._readers > 0)
    cancelled.set()
    with pytest.raises(TransferError, match="cancelled"):
        fetched.result(DEADLINE)


def test_a_slow_connection_does_not_hold_up_the_others(donor: Donor, watch: Callable[..., list[Any]]) -> None:
    """All chunks but the one that is stuck are fetched by the other connection."""
    others = set(range(CHUNK, 10 * CHUNK, CHUNK))

    def hold_first(place: object, _: int, pace: object) -> object:
        if place == 0:
            wait_until(lambda: others <= set(asked))
        return pace

    asked = watch(hold_first)
    sent = donor.publish(make_snapshot(5, 10 * CHUNK))
    check_equal(donor.fetch(5, connections=2, timeout=2 * DEADLINE), sent)
    assert asked.count(0) == 1


def test_one_failure_ends_the_other_connections(donor: Donor, watch: Callable[..., list[Any]]) -> None:
    """A transfer that cannot succeed any more does not wait for answers that other connections wait for."""
    release, stuck = threading.Event(), threading.Event()

    def interfere(place: object, _: int, pace: object) -> object:
        if place == CHUNK:
            stuck.set()
            release.wait(60.0)
        elif place == 0:
            stuck.wait(DEADLINE)
            return Corrupting()
        return pace

    watch(interfere)
    donor.publish(make_snapshot(5, 10 * CHUNK))
    started = time.monotonic()
    try:
        with pytest.raises(TransferError, match=r"1000 bytes at 0 .*checksum"):
            donor.fetch(5, connections=2, timeout=600.0)
        assert time.monotonic() - started < transport._STALL_SECONDS
    finally:
        release.set()


def test_states_of_two_lineages_are_never_mixed(donor: Donor, watch: Callable[..., list[Any]]) -> None:
    """A donor whose state of the same step became another one meanwhile does not serve the rest of the first."""
    first = donor.publish(make_snapshot(5, 10 * CHUNK))

    def replace(place: object, _: int, pace: object) -> object:
        if place == 2 * CHUNK:
            donor.publish(Snapshot(5, 77, first.header, first.payload))
        return pace

    watch(replace)
    with pytest.raises(TransferError, match=r"no state of step 5 .it has step 5 of lineage 77"):
        donor.fetch(5)


def test_a_closed_server_listens_no_more(donor: Donor) -> None:
    """After close nobody can connect, and the snapshot is let go."""
    donor.publish(make_snapshot(5, 10))
    donor.server.close()
    assert donor.server.withdraw() is None
    with pytest.raises(TransferError, match="ConnectionRefused"):
        donor.fetch(5)


def test_ipv6(background: ThreadPoolExecutor) -> None:
    """An IPv6 address works, in brackets."""
    try:
        server = StateServer("::1", TOKEN, DEADLINE, lambda *_: None)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    try:
        sent = make_snapshot(5, 10)
        server.publish(sent, 0.0)
        check_equal(fetch(f"[::1]:{server.port}", TOKEN, 5, "4", 1, DEADLINE), sent)
    finally:
        server.close()


def test_it_listens_on_the_given_address_only(donor: Donor) -> None:
    """Bound to one loopback address, the server cannot be reached at another one of the same host."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", donor.server.port), DEADLINE).close()


def test_nothing_is_unpickled() -> None:
    """The module has no means to make objects of what it is sent: JSON and bytes only."""
    tree = ast.parse(inspect.getsource(transport))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {getattr(function, "attr", getattr(function, "id", "")) for function in called}
    assert not {name.partition(".")[0] for name in imported} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    assert not names & {"load", "eval", "exec", "compile", "__import__", "getattr", "import_module"}
    assert "loads" in names, "this test looks at the right module"


def test_the_token_is_in_no_log(donor: Donor, caplog: pytest.LogCaptureFixture) -> None:
    """Neither success nor refusal writes the token anywhere."""
    with caplog.at_level(logging.DEBUG):
        donor.publish(make_snapshot(5, 10))
        donor.fetch(5)
        with pytest.raises(RefusedError) as caught:
            donor.fetch(5, token="another secret")
    assert TOKEN not in caplog.text + str(caught.value)
