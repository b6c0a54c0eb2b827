# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The access of a relay between joiner and donor that lacks the token.

With real sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from io import BufferedRWPair
from random import Random
from typing import Any

import pytest
from state_donor import CHUNK, DEADLINE, TOKEN, Donor, check_equal, make_snapshot

from titan_ft.protocol.errors import RefusedError
from titan_ft.transfer.state_fetch import ask_offer, fetch
from titan_ft.transfer.wire import (
    VERSION,
    Handshake,
    SealedStream,
    SealError,
    TransferError,
    handshake_as_donor,
    handshake_as_joiner,
)

SECRET, FORGED = b"\xabthe weights\xcd", b"\xabevil bytes!\xcd"


class Relay:
    """Passes on the messages of joiner and donor, and changes the donor's.

    Args:
        change: returns the bytes that the joiner gets in place of some bytes of the donor.
    """

    def __init__(self, donor: Donor, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._port, self._change = donor.server.port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.read = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if select.select([self._listener], [], [], 0.02)[0]:
                joiner, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(joiner,), daemon=True).start()
        self._listener.close()

    def _pass(self, joiner: socket.socket) -> None:
        with (
            joiner,
            socket.create_connection(("127.0.0.1", self._port)) as donor,
            contextlib.suppress(OSError),
        ):
            while not self._closed.is_set():
                for source in select.select([joiner, donor], [], [], 0.1)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is donor:
                        self.read += data
                        joiner.sendall(self._change(data))
                    else:
                        donor.sendall(data)

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def start_relay() -> Iterator[Callable[..., Relay]]:
    """Provide the builder of relays, and close them."""
    relays: list[Relay] = []

    def start(*args: Any) -> Relay:
        relays.append(Relay(*args))
        return relays[-1]

    yield start
    for relay in relays:
        relay.close()


def publish_secret(donor: Donor) -> None:
    snapshot = make_snapshot(5, CHUNK)
    snapshot.payload[: len(SECRET)] = snapshot.payload.new_tensor(list(SECRET))
    donor.publish(snapshot)


def test_a_relay_at_another_address_reads_nothing(
    donor: Donor, start_relay: Callable[..., Relay]
) -> None:
    """A writer of the store sends joiners to a relay.

    The proofs that it passes on cover the address.
    """
    publish_secret(donor)
    relay = start_relay(donor)
    with pytest.raises(RefusedError):
        fetch([relay.address], TOKEN, 5, "4", 1, DEADLINE)
    assert SECRET not in relay.read
    assert b"tensors" not in relay.read, "the relay does not read the header either"
    with pytest.raises(RefusedError):
        ask_offer(relay.address, TOKEN)


def forge(data: bytes) -> bytes:
    """Change the weights, and their digest in the line before.

    The relay changes as much as it can without the token.
    """
    forged = data.replace(SECRET, FORGED)
    line, newline, payload = forged.partition(b"\n")
    if payload:
        line = re.sub(
            rb'"sha256":"\w+"',
            b'"sha256":"%s"' % hashlib.sha256(payload).hexdigest().encode(),
            line,
        )
    return line + newline + payload


def test_a_relay_on_the_wire_changes_nothing(
    donor: Donor, start_relay: Callable[..., Relay]
) -> None:
    """At the donor's own address, the relay passes the handshake on, and reads.

    Its changes are noticed.
    """
    publish_secret(donor)
    assert len(SECRET) == len(FORGED)
    relay = start_relay(donor, forge)
    # The joiner dials this address, as if the relay were on the donor's wire.
    donor.server.address = relay.address
    with pytest.raises(TransferError, match=r"SealError|checksums differ"):
        fetch([relay.address], TOKEN, 5, "4", 1, DEADLINE)
    assert SECRET in relay.read, "the relay had something to change"


def connect_ends() -> tuple[SealedStream, SealedStream, bytearray]:
    """Return a joiner and a donor over buffers, and the bytes that the joiner has sent."""
    handshake = Handshake(TOKEN, "a", "b", "10.0.0.1:1")
    sent = bytearray()
    connection = socket.socket()
    connection.close()

    class Pipe(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def writable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            count = min(len(buffer), len(sent))
            buffer[:count] = sent[:count]
            del sent[:count]
            return count

        def write(self, data: Any) -> int:
            sent.extend(data)
            return len(data)

    def end(role: str) -> SealedStream:
        return SealedStream(connection, BufferedRWPair(Pipe(), Pipe()), handshake, role)

    return end("joiner"), end("donor"), sent


def test_lines_arrive_in_their_order() -> None:
    """Each end reads the other end's lines in turn."""
    joiner, donor, _ = connect_ends()
    joiner.write({"step": 5})
    assert donor.read() == {"step": 5}
    donor.write({"waiting": 5})
    donor.write({"bytes": 0})
    assert [joiner.read(), joiner.read()] == [{"waiting": 5}, {"bytes": 0}]
    assert joiner.read() == {}


@pytest.mark.parametrize(
    "what", ["changed", "left out", "repeated", "reflected", "without a seal", "cut"]
)
def test_a_line_that_was_tampered_with_is_not_taken(what: str) -> None:
    """The seal covers sequence, direction and text."""
    joiner, donor, wire = connect_ends()
    joiner.write({"step": 5})
    first = bytes(wire)
    reader = donor
    if what == "changed":
        wire[:] = first.replace(b"5", b"6", 1)
    elif what == "left out":
        wire.clear()
        joiner.write({"step": 6})
    elif what == "repeated":
        assert donor.read() == {"step": 5}
        wire[:] = first
    elif what == "reflected":
        reader = joiner
    elif what == "without a seal":
        wire[:] = b'{"step":5}\n'
    else:
        wire[:] = first[:-10]
    with pytest.raises(SealError):
        reader.read()


def test_an_answer_to_another_request_is_not_taken() -> None:
    """A donor's answer is valid for the request that it has read, and for no other one."""
    joiner, donor, wire = connect_ends()
    joiner.write({"step": 5, "offset": 0})
    donor.read()
    donor.write({"bytes": 7})
    answer = bytes(wire)
    other, _, others_wire = connect_ends()
    other.write({"step": 5, "offset": 1000})
    others_wire[:] = answer
    with pytest.raises(SealError):
        other.read()


def test_an_older_donor_is_refused_in_one_line() -> None:
    """A donor of an earlier version has no version in its greeting."""
    donor, joiner = socket.socketpair()
    with donor, joiner:
        donor.sendall(b'{"nonce": "00"}\n')
        with pytest.raises(
            RefusedError, match=r"10\.0\.0\.1:1 speaks another version.*the same titan_ft"
        ) as caught:
            handshake_as_joiner(joiner, "10.0.0.1:1", TOKEN)
    assert "\n" not in str(caught.value)


def test_an_older_joiner_is_refused_in_one_line(donor: Donor) -> None:
    """It prints the text of a refusal, as before."""
    with (
        socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as joiner,
        joiner.makefile("rwb") as stream,
    ):
        stream.readline()
        stream.write(b'{"nonce": "00", "proof": "11"}\n')
        stream.flush()
        refused = json.loads(stream.readline())["refused"]
    assert "another version" in refused
    assert "\n" not in refused


def test_nonces_cannot_be_shifted_into_each_other() -> None:
    """Two pairs of nonces with the same concatenation have different proofs."""
    one, other = Handshake(TOKEN, "a:b", "c", "h:1"), Handshake(TOKEN, "a", "b:c", "h:1")
    assert one.proof("joiner") != other.proof("joiner")
    assert one.proof("joiner") != one.proof("donor")
    assert one.derive("key") not in (
        bytes.fromhex(one.proof("joiner")),
        bytes.fromhex(one.proof("donor")),
    )


def test_a_joiner_gets_what_the_relay_leaves_alone(
    donor: Donor, start_relay: Callable[..., Relay]
) -> None:
    """The control of the tests above: without a change the state arrives."""
    sent = donor.publish(make_snapshot(5, 3 * CHUNK))
    relay = start_relay(donor)
    donor.server.address = relay.address
    check_equal(fetch([relay.address], TOKEN, 5, "4", 1, DEADLINE), sent)


def fuzz(valid: bytes, random: Random) -> bytes:
    """Return a first line of a stranger: noise, or a true line with changes."""
    if random.random() < 0.3:
        return random.randbytes(random.randrange(300))
    line = bytearray(valid)
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(line))
        change = random.randrange(3)
        if change == 0:
            line[place] ^= 1 << random.randrange(8)
        elif change == 1:
            del line[place : place + random.randrange(1, 40)]
        else:
            line[place:place] = random.choice(
                [b"[" * 500, b'"', b"\\u0000", b"9" * 400, b"\n", bytes([place % 256])]
            )
        line = line or bytearray(b"{")
    return bytes(line)


def refuse(donor: socket.socket, address: str) -> None:
    """Let a donor take a connection. Keep no reference to its end, so that it is closed."""
    try:
        handshake_as_donor(donor, address, TOKEN)
    # the errors that its server expects
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        donor.close()
        return
    raise AssertionError("the donor has taken a stranger for a joiner")


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_first_lines_prove_nothing(seed: int) -> None:
    """A donor answers each with its greeting and a refusal, and raises only the expected errors."""
    random, address = Random(seed), "127.0.0.1:1"
    for _ in range(2500):
        donor, joiner = socket.socketpair()
        with donor, joiner:
            nonce = random.randbytes(16).hex()
            proof = Handshake("another token", nonce, nonce, address).proof("joiner")
            joiner.sendall(
                fuzz(
                    json.dumps({"nonce": nonce, "proof": proof, "version": VERSION}).encode()
                    + b"\n",
                    random,
                )
            )
            joiner.shutdown(socket.SHUT_WR)
            refuse(donor, address)
            heard = joiner.makefile("rb").readlines()
            assert [*json.loads(heard[0])] == ["nonce", "version"]
            assert all([*json.loads(line)] == ["refused"] for line in heard[1:])


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_changed_lines_are_none(seed: int) -> None:
    """After the handshake of a recorded conversation, each line but the next one is refused."""
    random = Random(seed)
    joiner, donor, wire = connect_ends()
    for number in range(2500):
        joiner.write({"step": number, "offset": number, "bytes": 7})
        true = bytes(wire)
        wire[:] = changed = fuzz(true, random)
        last = donor._last_seal
        if not changed.startswith(true):
            refused = pytest.raises(SealError) if changed else contextlib.nullcontext()
            with refused:
                assert donor.read() == {}
            wire.clear()
            donor._last_seal = last
            donor.stream.read()  # the rest in its buffer
        wire[:] = true
        assert donor.read()["step"] == number, "the true line still counts"
