# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The wire of a heal: how a snapshot comes from a donor's host memory to a joiner, in the background of both.

torchft's HTTP transport listens on every interface, asks nobody who he is and can unpickle what it is sent. This one
(`state_server.py` is the donor's side, `state_fetch.py` the joiner's) listens on one address and moves nothing but a
JSON header and raw tensor bytes.

A connection begins with a handshake, in which both ends prove the run's token without sending it:

    donor to joiner: {"nonce", "version"}, with {"tls": true} TLS begins after it (`tls.py`)
    joiner to donor: {"nonce", "proof", "version"}
    donor to joiner: {"proof"}, or {"refused": text}

A proof is an HMAC over both nonces, so a recorded one is worth nothing. It covers the address that the joiner has
dialed, so a relay at another address gets no proof that the donor accepts. It covers the fingerprint of the donor's
certificate, so that neither another certificate nor a connection without TLS passes for the donor's.

After the handshake both ends have a key that nobody else can compute, and each line ends with its HMAC
(`SealedStream`): a relay on the wire can neither change a line, nor leave one out, nor repeat one, nor answer another
request. Without TLS the bytes are readable on the wire.

A connection carries one request line after another: {"step", "lineage", "offset", "bytes"} for a range of the payload,
"header" in place of "offset" for the header, "done" when the joiner has everything, "bytes" of it from here. Each
answer is a line {"bytes": n, "sha256": their digest} or {"error": text}, then n raw bytes. While the donor has yet to
take the snapshot, a line {"waiting": step} now and then comes before it, so that silence always means that something is
wrong.

A request for the header says by "part": [place, number] which of the joiner's donors this one is: where its host's
memory is scarce, it copies that part of the state only. The answer says by "held" where the donor's bytes of the
payload begin and end.

A request {"offer": true, "step"} is answered by {"step", "lineage", "digest"} of the state that the donor lets joiners
have until its next update (`offer.py`), with {"milliseconds"} that its last step took and {"elapsed_milliseconds"}
since the offer began; or by {"error": text} if it is none. A donor that has yet to make so many updates answers when it
has, or after a second with what it offers then.

A request {"probe": n, "back": address} is followed by n bytes, which come back behind {"bytes": n}: whether two ranks
reach each other at all (`reach.py`); the joiner's first line has blanks before it then.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedRWPair
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec
import torch
from msgspec import Meta

from titan_ft.protocol.errors import RefusedError
from titan_ft.transfer import tls

TOKEN_REMEDY = "all groups of a run must have the same TITAN_FT_TOKEN in their environment"
VERSION = 2
"""Of the handshake and of the lines after it. Ends of two versions refuse each other."""
_VERSION_REMEDY = "all groups of a run must have the same titan_ft"

_MAX_LINE = 4096  # a request or an answer line is far shorter; a stranger's may not be
_SEAL_BYTES = 2 * hashlib.sha256().digest_size  # in hex


Size = Annotated[int, Meta(ge=0)]
Stream: TypeAlias = "BufferedRWPair[Any, Any]"


class Message(TypedDict, total=False):
    """One line, from either end; which fields come together is said above. One of another type is refused."""

    nonce: str
    version: int
    tls: bool
    proof: Any  # of any type: a wrong proof gets the answer `refused`, not a broken connection
    refused: str
    step: int
    lineage: int
    digest: int
    milliseconds: int
    elapsed_milliseconds: int
    offer: bool
    offset: Size
    bytes: Size
    sha256: str
    header: bool
    part: tuple[Size, Size]
    held: tuple[Size, Size]
    done: str
    error: str
    waiting: int
    probe: Size
    back: str


class TransferError(RuntimeError):
    """The state could not be fetched; another donor may have it."""


class SealError(ValueError):
    """A line is not what the other end has sent in this place of the conversation."""


@dataclass(frozen=True)
class Handshake:
    """What the proofs of one connection cover.

    Attributes:
        address: host:port that the joiner dials, and that the donor is known by.
        fingerprint: of the donor's certificate; empty = no TLS.
    """

    token: str = field(repr=False)  # a log line must not show it
    donor_nonce: str
    joiner_nonce: str
    address: str
    fingerprint: str = ""

    def derive(self, purpose: str) -> bytes:
        """Return what only who knows the token can compute; each purpose gives another value."""
        nonces = (self.donor_nonce, self.joiner_nonce)
        said = ["titan_ft transfer", VERSION, purpose, *nonces, self.address, self.fingerprint]
        return hmac.digest(self.token.encode(), msgspec.json.encode(said), "sha256")

    def proof(self, role: str) -> str:
        """Return the proof of an end; `role` is "donor" or "joiner", so that no end can send it back."""
        return self.derive(role).hex()


class SealedStream:
    """One end of a connection whose handshake is over.

    Each line ends with an HMAC that covers the line, its sender and the HMAC of the line before, whoever has sent that.
    So all of the conversation so far must be the same at both ends.

    Attributes:
        connection: its socket, to be closed.
        stream: raw bytes after a line; the line says how to check them.
    """

    def __init__(self, connection: socket.socket, stream: Stream, handshake: Handshake, role: str) -> None:
        self.connection, self.stream = connection, stream
        self._key = handshake.derive("key")
        self._own, self._others = (b"joiner", b"donor") if role == "joiner" else (b"donor", b"joiner")
        self._last = b""

    def write(self, message: Message) -> None:
        """Send one line."""
        line = msgspec.json.encode(message)
        self.stream.write(line + self._seal(self._own, line) + b"\n")
        self.stream.flush()

    def read(self) -> Message:
        """Read one line; an empty message says that the other end closed the connection.

        Raises:
            SealError: the other end has not sent it, or not here.
            ValueError: it is none, or a field of it has another type.
        """
        line = self.stream.readline(_MAX_LINE)
        if not line:
            return {}
        text, end = line[: -_SEAL_BYTES - 1], line[-_SEAL_BYTES - 1 :]
        if not hmac.compare_digest(self._seal(self._others, text) + b"\n", end):
            raise SealError("a line is not what the other end has sent")
        return msgspec.json.decode(text, type=Message)

    def _seal(self, sender: bytes, line: bytes) -> bytes:
        self._last = hmac.digest(self._key, b"%s:%s:%s" % (sender, self._last, line), "sha256").hex().encode()
        return self._last


def same(expected: str, given: object) -> bool:
    """Say whether `given` is the expected proof, in a time that reveals nothing about it."""
    return hmac.compare_digest(expected.encode(), str(given).encode())


def octets(payload: torch.Tensor) -> memoryview:
    """Return the bytes of a snapshot's payload, not copied."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def write_line(stream: Stream, message: Message) -> None:
    """Send one line."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def read_line(stream: Stream) -> Message:
    """Read one line; an empty message says that the other end closed the connection.

    Raises:
        ValueError: it is none, or a field of it has another type.
    """
    line = stream.readline(_MAX_LINE)
    return msgspec.json.decode(line, type=Message) if line else {}


def open_stream(connection: socket.socket) -> Stream:
    """Return a stream of the bytes of a connection."""
    return connection.makefile("rwb")


def prove(
    connection: socket.socket,
    address: str,
    token: str,
    open_stream: Callable[[socket.socket], Stream] = open_stream,
) -> SealedStream:
    """Show the state server at `address` that this end knows the token, and make sure that the server does.

    Args:
        connection: is of no use any more if TLS has begun; close that of what is returned.

    Raises:
        ConnectionError: it closed the connection.
        RefusedError: one end does not know the other's token, or is of another version.
    """
    timeout, fingerprint = connection.gettimeout(), ""
    stream = open_stream(connection)  # whose reads may have a shorter timeout than TLS needs to begin
    greeting = _read_answer(stream, address)
    if greeting.get("version") != VERSION:
        raise RefusedError(f"the donor at {address} speaks another version of the transfer; {_VERSION_REMEDY}")
    secured: socket.socket | None = None
    if greeting.get("tls"):
        connection.settimeout(timeout)
        connection, fingerprint = tls.connect(connection)
        secured, stream = connection, open_stream(connection)
    try:
        handshake = Handshake(token, greeting["nonce"], secrets.token_hex(16), address, fingerprint)
        write_line(stream, {"nonce": handshake.joiner_nonce, "proof": handshake.proof("joiner"), "version": VERSION})
        if not same(handshake.proof("donor"), _read_answer(stream, address).get("proof")):
            raise RefusedError(f"the donor at {address} does not know this run's token; {TOKEN_REMEDY}")
    except BaseException:
        if secured is not None:  # the caller closes the other one, and may ask its kernel why it was silent
            secured.close()
        raise
    return SealedStream(connection, stream, handshake, "joiner")


def check_joiner(
    connection: socket.socket, address: str, token: str, certificate: tls.Certificate | None = None
) -> SealedStream:
    """Do the donor's part of `prove`.

    Args:
        address: host:port that joiners dial.
        certificate: of this donor; None = without TLS.

    Raises:
        ConnectionError: the joiner is refused, and has been answered why.
    """
    greeting = Message(nonce=secrets.token_hex(16), version=VERSION)
    if certificate is not None:
        greeting["tls"] = True
    connection.sendall(msgspec.json.encode(greeting) + b"\n")
    fingerprint = ""
    if certificate is not None:
        _skip_blanks(connection)
        connection, fingerprint = certificate.accept(connection), certificate.fingerprint
    try:
        stream = open_stream(connection)
        hello = read_line(stream)
        handshake = Handshake(token, greeting["nonce"], hello.get("nonce", ""), address, fingerprint)
        reason = ""
        if not same(handshake.proof("joiner"), hello.get("proof")):
            reason = f"the donor does not accept this group's token, or not at this address; {TOKEN_REMEDY}"
        if hello.get("version") != VERSION:  # a process before version 2 says none, and reports this line
            reason = f"the donor speaks another version of the transfer; {_VERSION_REMEDY}"
        if reason:
            write_line(stream, {"refused": reason})
            raise ConnectionError(reason)
        write_line(stream, {"proof": handshake.proof("donor")})
    except BaseException:
        connection.close()
        raise
    return SealedStream(connection, stream, handshake, "donor")


def _skip_blanks(connection: socket.socket) -> None:
    """Read the blanks that a probe sends ahead (`reach.py`): they come before TLS begins."""
    while (ahead := connection.recv(_MAX_LINE, socket.MSG_PEEK))[:1] == b" ":
        connection.recv(len(ahead) - len(ahead.lstrip(b" ")))


def _read_answer(stream: Stream, address: str) -> Message:
    line = read_line(stream)
    if not line:
        raise ConnectionError("the donor closed the connection")
    if "refused" in line:
        raise RefusedError(f"{address}: {line['refused']}")
    return line
