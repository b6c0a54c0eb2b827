# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The transfer of a snapshot from a donor to a joiner over sockets."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import logging
import socket
import threading
import time
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

    def __init__(self, wait_seconds: float = DEADLINE, token: str = TOKEN) -> None:
        self.served: list[tuple[str, int]] = []
        self.told = threading.Event()
        self.server = StateServer("127.0.0.1", token, wait_seconds, self._on_served)
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
        return transport._Connection(self.address, token, time.monotonic() + DEADLINE)


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
        assert json.loads(connection._stream.readline()) == {"bytes": sent.payload.numel()}
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
        stream.write(json.dumps({"bytes": len(header)}).encode() + b"\n" + header[:-1])
        stream.flush()

    address, _ = serve_once(talk)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"state of step 5 from 127\.0\.0\.1:.*closed"):
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
