# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The service of a donor: its content, its access, and its speed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import inspect
import json
import logging
import os
import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from state_donor import CHUNK, DEADLINE, TOKEN, Donor, check_equal, make_snapshot, wait_until

from tests import strangers
from titan_ft.protocol.errors import RefusedError
from titan_ft.transfer import pace, state_fetch, state_server, wire
from titan_ft.transfer.snapshot import Part, Snapshot
from titan_ft.transfer.state_fetch import fetch
from titan_ft.transfer.state_server import CompletedTransfer, StateServer
from titan_ft.transfer.wire import VERSION, Handshake, Message, SealedStream, TransferError


def test_a_wrong_token_is_refused_by_the_donor(donor: Donor) -> None:
    """A joiner with another token gets no byte, and an error that names the variable to set."""
    donor.publish(make_snapshot(5, 10))
    with pytest.raises(RefusedError, match="TITAN_FT_TOKEN"):
        donor.fetch(5, token="another secret")
    assert donor.served == []


@pytest.mark.parametrize("proof", ["", "not ascii: \xe9\u4e2d", 7, None, ["a"]])
def test_an_unproved_connection_learns_nothing(
    donor: Donor, proof: object, capfd: pytest.CaptureFixture[str]
) -> None:
    """For any wrong proof, the donor refuses, closes the connection, and prints no traceback."""
    donor.publish(make_snapshot(5, 10))
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rwb")
        assert set(json.loads(stream.readline())) == {"nonce", "version"}
        stream.write(
            json.dumps({"nonce": "00", "proof": proof, "version": VERSION}).encode() + b"\n"
        )
        stream.write(b'{"step": 5, "header": true}\n')
        stream.flush()
        answer = stream.readline()
        assert set(json.loads(answer)) == {"refused"}
        assert read_rest(stream) == b""
    assert TOKEN not in answer.decode()
    assert "Traceback" not in capfd.readouterr().err


class _Stream:
    """Stands in for an event of a GPU.

    A test ends its copy, two seconds later by the GPU's own clock.
    """

    def __init__(self) -> None:
        self.waited, self.done = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.waited.set()
        assert self.done.wait(DEADLINE)

    def elapsed_time(self, other: object) -> float:
        assert self.done.is_set()
        return 2000.0


def test_nothing_is_served_before_its_copy_is_complete(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The server's threads wait for the GPU, and `publish` does not.

    The event has the copy's duration.
    """
    sent, event = make_snapshot(5, CHUNK), _Stream()
    complete, told = sent.payload.clone(), []
    sent.payload.zero_()
    donor = start_donor()

    def note_completed(transfer: CompletedTransfer) -> None:
        told.append(transfer.copy_seconds)
        donor.told.set()

    donor.server._on_completed = note_completed
    donor.publish(dataclasses.replace(sent, copy_started=event, copy_ended=event))
    fetched = background.submit(donor.fetch, 5)
    assert event.waited.wait(DEADLINE)
    sent.payload.copy_(complete)
    event.done.set()
    check_equal(fetched.result(DEADLINE), sent)
    assert donor.told.wait(DEADLINE)
    assert told == [2.0], "longer than the half second that it took the host"


def read_rest(stream: Any) -> bytes:
    """Read until the other end closes, which may reset the connection."""
    try:
        return stream.read()
    except ConnectionResetError:
        return b""


def test_a_recorded_proof_is_worth_nothing(donor: Donor) -> None:
    """The proof depends on the donor's fresh nonce. A repeated one is refused."""
    said: list[bytes] = []
    for attempt in range(2):
        with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as connection:
            stream = connection.makefile("rwb")
            nonce = json.loads(stream.readline())["nonce"]
            if attempt == 0:
                said_proof = Handshake(TOKEN, nonce, "00", donor.address).proof("joiner")
                hello = {"nonce": "00", "proof": said_proof, "version": VERSION}
                said.append(json.dumps(hello).encode() + b"\n")
            stream.write(said[0])
            stream.flush()
            answer = json.loads(stream.readline())
            assert set(answer) == ({"proof"} if attempt == 0 else {"refused"})


def test_a_step_that_the_donor_never_has_is_an_error(start_donor: Callable[..., Donor]) -> None:
    """After the wait, the error names the requested step and the present one."""
    donor = start_donor(wait_seconds=0.05)
    with pytest.raises(TransferError, match=r"no state of step 5( of lineage \d+)? .it has none"):
        donor.fetch(5)
    donor.publish(make_snapshot(4, 10))
    with pytest.raises(TransferError, match=r"no state of step 5( of lineage \d+)? .it has step 4"):
        donor.fetch(5)


def test_a_step_that_is_over_is_an_error_at_once(donor: Donor) -> None:
    """A donor with a later step never has the earlier one again. So there is no wait."""
    donor.publish(make_snapshot(6, 10))
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"no state of step 5( of lineage \d+)? .it has step 6"):
        donor.fetch(5)
    assert time.monotonic() - started < DEADLINE / 2


def test_a_step_that_comes_while_the_joiner_waits_is_served(
    donor: Donor, background: ThreadPoolExecutor
) -> None:
    """The joiner may ask before the donor's copy is complete."""
    donor.publish(make_snapshot(4, 10))
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: bool(donor.server._changed._waiters))  # type: ignore[attr-defined]  # it asked and was put off
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    check_equal(fetched.result(DEADLINE), sent)


def test_a_withdrawn_snapshot_is_served_to_nobody(start_donor: Callable[..., Donor]) -> None:
    """The caller may use its memory again."""
    donor = start_donor(wait_seconds=0.05)
    sent = donor.publish(make_snapshot(5, 10))
    assert donor.server.withdraw() is sent
    assert donor.server.withdraw() is None
    with pytest.raises(TransferError, match="it has none"):
        donor.fetch(5)


def test_memory_under_a_reader_is_not_given_back(donor: Donor) -> None:
    """A snapshot that is withdrawn in the middle of an answer stays.

    It stays until the reader has all of it.
    """
    # More than the sockets hold, so that the answer waits for the reader.
    sent = make_snapshot(5, 32 << 20)
    donor.publish(sent)
    expected = sent.payload.clone()
    with donor.connect() as connection:
        connection._sealed.write({"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._num_readers == 1)
        assert donor.server.withdraw() is None
        donor.publish(make_snapshot(6, 10))
        assert connection._sealed.read()["bytes"] == sent.payload.numel()
        received = connection._sealed.stream.read(sent.payload.numel())
    assert received == expected.numpy().tobytes()
    wait_until(lambda: donor.server._num_readers == 0)
    last = donor.publish(make_snapshot(7, 10))
    assert donor.server.withdraw() is last


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95" * 50,
        b"[1, 2]\n",
        b"null\n",
        b"[" * 8000,
        b"x" * 100_000,
    ],
    ids=["nothing", "empty line", "http", "pickle", "list", "null", "nesting", "long line"],
)
def test_garbage_from_a_stranger_does_not_hurt_the_donor(
    donor: Donor, garbage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """The connection is closed, nothing is printed, and the next joiner is served."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rb")
        stream.readline()
        with contextlib.suppress(OSError):  # the donor may close the connection before the end
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
        assert b"bytes" not in read_rest(stream)
    check_equal(donor.fetch(5), sent)
    assert capfd.readouterr().err == ""


def test_requests_of_a_proven_joiner_may_be_wrong_too(
    donor: Donor, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bad request ends its connection, and not the server."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    for request in ({"step": "five"}, {"offset": 0}, {"step": 5, "offset": 0}, {"step": [5]}):
        with donor.connect() as connection:
            connection._sealed.write(request)
            assert b"bytes" not in read_rest(connection._sealed.stream)
    check_equal(donor.fetch(5), sent)
    assert "Traceback" not in capfd.readouterr().err


def test_a_range_beyond_the_state_is_no_other_memory(donor: Donor) -> None:
    """Memory beyond the snapshot is never sent."""
    donor.publish(make_snapshot(5, CHUNK))
    with (
        donor.connect() as connection,
        pytest.raises(TransferError, match="has bytes 0 to 1000 of the state only"),
    ):
        connection.request(
            {"step": 5, "offset": CHUNK - 10, "bytes": 50}, memoryview(bytearray(50))
        )


def test_nor_is_a_range_before_the_part_that_is_here(donor: Donor) -> None:
    """A donor with scarce memory has a part only, which does not start where the state does."""
    whole = make_snapshot(5, 4 * CHUNK)
    donor.publish(
        dataclasses.replace(
            whole, payload=whole.payload[CHUNK : 3 * CHUNK].clone(), first_byte=CHUNK
        )
    )
    with donor.connect() as connection:
        answer, _ = connection.request({"step": 5, "header": True})
        assert answer["held"] == (CHUNK, 3 * CHUNK)
        for offset in (0, CHUNK - 1, 3 * CHUNK - 49):
            with pytest.raises(TransferError, match="has bytes 1000 to 3000 of the state only"):
                connection.request(
                    {"step": 5, "offset": offset, "bytes": 50}, memoryview(bytearray(50))
                )
        _, found = connection.request(
            {"step": 5, "offset": CHUNK, "bytes": 50}, memoryview(bytearray(50))
        )
        assert bytes(found) == bytes(whole.payload[CHUNK : CHUNK + 50].numpy())


def test_a_slow_joiner_does_not_hold_up_another(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one joiner reads nothing, another one gets the whole state."""
    sent = donor.publish(make_snapshot(5, 32 << 20))
    with donor.connect() as slow:
        slow._sealed.write({"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._num_readers == 1)
        monkeypatch.setattr(state_fetch, "_SLICE_BYTES", 8 << 20)
        check_equal(donor.fetch(5), sent)


def test_idle_strangers_do_not_hold_up_a_joiner(donor: Donor) -> None:
    """Silent connections take no thread that a joiner would need."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    strangers = [
        socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) for _ in range(50)
    ]
    try:
        check_equal(donor.fetch(5), sent)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_says_nothing_is_dropped(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a handshake is closed after a while."""
    monkeypatch.setattr(state_server, "_HANDSHAKE_SECONDS", 0.1)
    donor = start_donor()
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        stream = stranger.makefile("rb")
        stream.readline()
        assert read_rest(stream) == b""


def test_a_stranger_who_says_little_is_dropped(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then passes the timeout of each read.

    It would hold a thread and a descriptor for good.
    """
    monkeypatch.setattr(state_server, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(state_server, "_POLL_SECONDS", 0.1)
    donor = start_donor()
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as stranger:
        deadline = time.monotonic() + DEADLINE
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < deadline, "the stranger is still connected"
                stranger.sendall(b" ")
                time.sleep(0.05)


def test_the_oldest_of_many_strangers_is_dropped(donor: Donor) -> None:
    """Their number is limited, and a later joiner is served."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    with contextlib.ExitStack() as strangers:
        streams = []
        for _ in range(state_server._MAX_UNPROVED + 1):
            stranger = socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE)
            strangers.callback(stranger.close)
            streams.append(stranger.makefile("rb"))
            streams[-1].readline()  # the stranger is counted
        assert read_rest(streams[0]) == b""
        check_equal(donor.fetch(5), sent)


def test_a_crowd_of_one_host_takes_no_place_of_another(donor: Donor) -> None:
    """A joiner's handshake takes several trips.

    A stranger's host connects many times meanwhile.
    """
    address = ("127.0.0.1", donor.server.port)
    with contextlib.ExitStack() as crowd:
        joiner = socket.create_connection(address, DEADLINE, source_address=("127.0.0.2", 0))
        crowd.callback(joiner.close)
        joiner.makefile("rb").readline()  # the joiner is counted, as the oldest
        streams = []
        for _ in range(state_server._MAX_UNPROVED + 5):
            stranger = socket.create_connection(address, DEADLINE)
            crowd.callback(stranger.close)
            streams.append(stranger.makefile("rb"))
            streams[-1].readline()
        assert all(read_rest(stream) == b"" for stream in streams[:5])
        joiner.sendall(b"no proof\n")
        wait_until(lambda: "no_secret" in [refusal.kind for refusal in donor.refusals])
        assert ("no_secret", "127.0.0.2") in [(each.kind, each.source) for each in donor.refusals]


def test_a_flood_starts_no_more_threads_than_handshakes_may_have(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that are late to close what was refused held all descriptors of the process."""
    sent = donor.publish(make_snapshot(5, CHUNK))
    judge, may_judge = state_server.handshake_as_donor, threading.Event()

    def judge_late(*arguments: Any) -> SealedStream:
        may_judge.wait(DEADLINE)
        return judge(*arguments)

    monkeypatch.setattr(state_server, "handshake_as_donor", judge_late)
    num_polls = 0
    poll = donor.server._server._on_poll

    def count_polls() -> None:
        nonlocal num_polls
        num_polls += 1
        poll()

    monkeypatch.setattr(donor.server._server, "_on_poll", count_polls)
    before = threading.active_count()
    address = ("127.0.0.1", donor.server.port)
    with contextlib.ExitStack() as flood:
        # As many as the kernel's queue takes beside those that are accepted.
        for _ in range(state_server._MAX_HANDSHAKES + 100):
            flood.enter_context(socket.create_connection(address, DEADLINE))
        wait_until(lambda: threading.active_count() - before >= state_server._MAX_HANDSHAKES)
        paused_at = num_polls
        wait_until(lambda: num_polls >= paused_at + 2)  # the thread that listens pauses
        assert threading.active_count() - before == state_server._MAX_HANDSHAKES
        may_judge.set()
        check_equal(donor.fetch(5), sent)
    wait_until(lambda: threading.active_count() <= before + 1)


def test_a_process_without_descriptors(donor: Donor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner waits in the kernel's queue. The thread that listens does not spin meanwhile, and
    closes a stranger, whose descriptor it needs.
    """
    sent = donor.publish(make_snapshot(5, CHUNK))
    stranger = socket.create_connection(("127.0.0.1", donor.server.port))
    wait_until(lambda: bool(donor.server._unproved._accepted))
    accept, num_refusals = donor.server._server.socket.accept, 0
    end = time.monotonic() + 0.3

    def fail(server: socketserver.TCPServer) -> Any:
        nonlocal num_refusals
        if time.monotonic() < end:
            num_refusals += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept()

    monkeypatch.setattr(socketserver.TCPServer, "get_request", fail)
    check_equal(donor.fetch(5), sent)
    assert 1 <= num_refusals < 10
    with stranger, stranger.makefile("rb") as stream:
        stream.readline()  # the server's hello
        assert read_rest(stream) == b"", "the stranger is closed"
    wait_until(lambda: "no_descriptors" in [refusal.kind for refusal in donor.refusals])


@strangers.numbers_of_strangers
def test_fuzzed_lines_cost_a_joiner_nothing(donor: Donor, number_of_strangers: int) -> None:
    """Joiners are served in between, whatever bytes come at the port.

    Each kind of refusal is reported once.
    """
    sent = donor.publish(make_snapshot(5, CHUNK))
    hello = json.dumps({"nonce": "00" * 16, "proof": "00" * 32, "version": VERSION}).encode()
    beginnings = (hello, hello[:40], b" " * 500, b"GET / HTTP/1.1\r\n", b'{"nonce": [[[[[[')
    chance = random.Random(38)
    with strangers.bounded_cost():
        for number in range(number_of_strangers):
            strangers.knock(("127.0.0.1", donor.server.port), beginnings, chance)
            if number % 100 == 0:
                check_equal(donor.fetch(5), sent)
        wait_until(lambda: not donor.server._unproved._accepted)
    kinds = [refusal.kind for refusal in donor.refusals]
    assert "no_secret" in kinds
    assert len(set(kinds)) == len(kinds), "one report of each kind"
    assert {refusal.source for refusal in donor.refusals} == {"127.0.0.1"}


def test_each_kind_of_stranger_is_reported_once(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joiners are no strangers, and neither is one that is killed before its first byte."""
    monkeypatch.setattr(state_server, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(state_server, "_POLL_SECONDS", 0.1)
    donor = start_donor()
    sent = donor.publish(make_snapshot(5, CHUNK))
    check_equal(donor.fetch(5), sent)
    for begun in (b"", b" " * 3000):  # the second one is a probe of the link
        with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as killed:
            killed.makefile("rb").readline()
            killed.sendall(begun)
            killed.shutdown(socket.SHUT_WR)
            read_rest(killed.makefile("rb"))
    assert donor.refusals == []
    for _ in range(2):
        with contextlib.ExitStack() as held:
            for _ in range(state_server._MAX_UNPROVED + 1):
                held.enter_context(
                    socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE)
                )
            wait_until(lambda: {each.kind for each in donor.refusals} >= {"crowd", "silent"})
        with pytest.raises(RefusedError):
            donor.fetch(5, token="another secret")
    assert sorted(each.kind for each in donor.refusals) == ["crowd", "no_secret", "silent"]


def test_a_throttled_donor_keeps_to_the_rate(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """Two joiners with three connections each share the rate, and both get every byte."""
    donor = start_donor(max_mbps=4.0)  # half a million bytes per second
    sent = donor.publish(make_snapshot(5, 100 * CHUNK))
    started = time.monotonic()
    for fetched in [background.submit(donor.fetch, 5, TOKEN, 3) for _ in range(2)]:
        check_equal(fetched.result(DEADLINE), sent)
    least = 200 * CHUNK / 500_000 - pace._CREDIT_SECONDS - pace._SLICE_SECONDS
    assert time.monotonic() - started >= least


@pytest.mark.slow
def test_a_throttled_donor_is_not_taken_for_dead(
    start_donor: Callable[..., Donor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A chunk may take longer than the silence that breaks a connection.

    Slow bytes are no silence.
    """
    monkeypatch.setattr(state_fetch, "_STALL_SECONDS", 3.0)
    donor = start_donor(max_mbps=0.008)  # 1000 bytes per second
    monkeypatch.setattr(state_fetch, "_SLICE_BYTES", 4000)
    sent = donor.publish(make_snapshot(5, 4000))
    check_equal(donor.fetch(5, connections=1), sent)
    assert not caplog.records


def test_a_throttled_answer_ends_with_its_joiner(start_donor: Callable[..., Donor]) -> None:
    """A slow donor soon notices that its joiner is gone, and its memory is free again."""
    donor = start_donor(max_mbps=0.01)
    sent = donor.publish(make_snapshot(5, 1 << 20))  # a quarter of an hour
    with donor.connect() as connection:
        connection._sealed.write({"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._num_readers == 1)
    wait_until(lambda: donor.server._num_readers == 0)
    assert donor.server.withdraw() is sent


def test_closing_ends_a_throttled_answer(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """A closed server stops sending, and its joiner notices at once."""
    donor = start_donor(max_mbps=0.001)
    donor.publish(make_snapshot(5, 10))
    donor.fetch(5)
    donor.publish(make_snapshot(6, 1 << 20))
    fetched = background.submit(fetch, [donor.address], TOKEN, 6, "4", 2, 60.0)
    wait_until(lambda: donor.server._num_readers > 0)
    donor.server.close()
    with pytest.raises(TransferError, match="state of step 6"):
        fetched.result(DEADLINE)
    wait_until(lambda: donor.server._num_readers == 0)


def test_a_joiner_that_takes_nothing_is_dropped(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging joiner does not keep the snapshot's memory for good."""
    monkeypatch.setattr(state_server, "_UNREAD_SECONDS", 0.2)
    donor = start_donor()
    sent = donor.publish(make_snapshot(5, 32 << 20))
    with donor.connect() as connection:
        connection._sealed.write({"step": 5, "offset": 0, "bytes": sent.payload.numel()})
        wait_until(lambda: donor.server._num_readers == 1)
        wait_until(lambda: donor.server._num_readers == 0)


def test_a_donor_that_has_yet_to_copy_says_so(
    start_donor: Callable[..., Donor],
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reports this again and again until the snapshot is there."""
    monkeypatch.setattr(state_server, "_WAITING_SECONDS", 0.02)
    said: list[int] = []

    write = SealedStream.write

    def note(stream: Any, message: dict[str, Any]) -> None:
        said.extend([message["waiting"]] if "waiting" in message else [])
        write(stream, message)

    monkeypatch.setattr(SealedStream, "write", note)
    donor = start_donor(wait_seconds=60.0)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: len(said) >= 3)
    sent = donor.publish(make_snapshot(5, CHUNK))
    check_equal(fetched.result(DEADLINE), sent)
    assert set(said) == {5}


@pytest.mark.slow
def test_a_donor_that_has_yet_to_copy_is_not_silent(
    start_donor: Callable[..., Donor],
    background: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A waiting joiner gets lines from the donor, and does not take it for dead."""
    monkeypatch.setattr(state_fetch, "_STALL_SECONDS", 3.0)
    monkeypatch.setattr(state_server, "_WAITING_SECONDS", 0.05)
    said: list[float] = []

    write = SealedStream.write

    def note(stream: Any, message: dict[str, Any]) -> None:
        said.extend([time.monotonic()] if "waiting" in message else [])
        write(stream, message)

    monkeypatch.setattr(SealedStream, "write", note)
    donor = start_donor(wait_seconds=60.0)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: bool(said) and said[-1] - said[0] > 4.0)
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    check_equal(fetched.result(DEADLINE), sent)
    assert not caplog.records


def test_states_of_two_lineages_are_never_mixed(
    donor: Donor, watch: Callable[..., list[Any]]
) -> None:
    """A donor's state of the same step is replaced.

    The donor does not serve the rest of the first one.
    """
    first = donor.publish(make_snapshot(5, 10 * CHUNK))

    def replace(place: object, _: int, pace: object) -> object:
        if place == 2 * CHUNK:
            donor.publish(Snapshot(5, 77, first.header, first.payload))
        return pace

    watch(replace)
    with pytest.raises(
        TransferError, match=r"no state of step 5( of lineage \d+)? .it has step 5 of lineage 77"
    ):
        # A second connection could fetch the whole rest before the donor replaces it.
        donor.fetch(5, connections=1)


def test_a_stale_state_of_the_same_step_is_not_served(donor: Donor) -> None:
    """The donor has healed: its state of step 5 is another one now, and it offers that one.

    Its former copy of step 5 is of a lineage that no other group has.
    """
    stale = donor.publish(make_snapshot(5, 3 * CHUNK))
    sent = Snapshot(5, 77, stale.header.replace(b"1005", b"77"), stale.payload + 1)

    def copy(step: int, part: Part) -> None:
        donor.publish(sent)

    donor.server.offer(Message(step=5, lineage=77, digest=0), copy)
    check_equal(fetch([donor.address], TOKEN, 5, "4", 1, DEADLINE, lineage=77), sent)
    with pytest.raises(TransferError, match="no state of step 5 of lineage 1005"):
        fetch([donor.address], TOKEN, 5, "4", 1, DEADLINE, lineage=1005)


def test_a_closed_server_listens_no_more(donor: Donor) -> None:
    """After close nobody can connect, and the snapshot is freed."""
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
        check_equal(fetch([f"[::1]:{server.port}"], TOKEN, 5, "4", 1, DEADLINE), sent)
    finally:
        server.close()


def test_it_listens_on_the_given_address_only(donor: Donor) -> None:
    """Bound to one loopback address, the server cannot be reached at another one."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", donor.server.port), DEADLINE).close()


def test_nothing_is_unpickled() -> None:
    """The transfer cannot create objects from received bytes: it reads JSON and raw bytes only."""
    tree = ast.parse(
        "\n".join(inspect.getsource(module) for module in (pace, state_fetch, state_server, wire))
    )
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {getattr(function, "attr", getattr(function, "id", "")) for function in called}
    assert not {name.partition(".")[0] for name in imported} & {
        "pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
    }
    assert not names & {"load", "eval", "exec", "compile", "__import__", "getattr", "import_module"}
    assert "decode" in names, "this test looks at the right module"


def test_the_token_is_in_no_log(donor: Donor, caplog: pytest.LogCaptureFixture) -> None:
    """Neither success nor refusal writes the token anywhere."""
    with caplog.at_level(logging.DEBUG):
        donor.publish(make_snapshot(5, 10))
        donor.fetch(5)
        with pytest.raises(RefusedError) as caught:
            donor.fetch(5, token="another secret")
    assert TOKEN not in caplog.text + str(caught.value)
