# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of a transfer: how the copy of a state travels from a donor to a joiner.

A *joiner* is a group that lacks the job's state, and a *donor* is a group that has it. The donor's
side is `state_server.py`, the joiner's side is `state_fetch.py`. Both make the handshake with a
function of this module, and get a `SealedStream`.

torchft's HTTP transport is not used: it listens on every interface, authenticates nobody, and can
unpickle the bytes that it receives. This protocol listens on one address, and moves only JSON and
raw tensor bytes.

**Handshake.** Both ends prove that they know the run's token, without sending it:

    donor to joiner: {"nonce", "version"}; with {"tls": true}, TLS starts after this line (`tls.py`)
    joiner to donor: {"nonce", "proof", "version"}
    donor to joiner: {"proof"}, or {"refused": text}

A proof is an HMAC. It covers:

- both nonces, so a recorded proof is worth nothing;
- the address that the joiner has dialed, so a relay at another address gets no proof that the donor
  accepts;
- the fingerprint of the donor's certificate, so neither another certificate nor a connection
  without TLS passes for the donor's.

**Lines.** After the handshake both ends have a key that nobody else can compute. Each line ends
with its HMAC (`SealedStream`). So a relay cannot change, omit or repeat a line, and cannot answer
another request. Without TLS, the bytes can be read on the network.

**Requests.** A connection carries one request after the other. Each answer is a line {"bytes": n,
"sha256": digest of the bytes}, followed by n raw bytes, or a line {"error": text}. While the donor
has not copied the state yet, it sends a line {"waiting": step} now and then before the answer. So
silence always means a failure. A copy of a state consists of a *header*, which lists the tensors,
and a *payload*, which has their bytes. `step` and `lineage` name the state. The requests are:

- {"step", "lineage", "offset", "bytes"}: a range of the payload.
- {"step", "lineage", "header", "part": [index, count]}: the header. The part says which of the
  joiner's donors this one is: a donor whose host has scarce memory copies that part of the state
  only. In the answer, {"held"} has the beginning and end of the donor's bytes in the payload.
- {"step", "done": joiner, "bytes"}: the joiner has the whole state, and so many bytes of it came
  from this donor.
- {"offer": true, "step"}: which state does the donor offer? The answer is {"step", "lineage",
  "digest"}, with the duration of the donor's last step in {"milliseconds"} and the time since the
  offer began in {"elapsed_milliseconds"}; or {"error": text}. A donor with fewer than `step`
  updates answers when it has so many, or after a second with its present offer (`engine/offer.py`).
- {"probe": n, "back": address}, followed by n bytes: the donor answers {"bytes": n} and sends the
  bytes back (`reach.py`). On such a connection blanks precede the joiner's first line.

A line with a field of another type is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedRWPair
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec
import torch
from msgspec import Meta

from titan_ft.protocol.errors import RefusedError
from titan_ft.system.refusal import StrangerError
from titan_ft.system.seal import authenticate
from titan_ft.transfer import tls

TOKEN_REMEDY = "all groups of a run must have the same TITAN_FT_TOKEN in their environment"
VERSION = 3
"""Version of this protocol. Ends with different versions refuse each other."""
_VERSION_REMEDY = "all groups of a run must have the same titan_ft"

_MAX_LINE = 4096
"""Most bytes of a line that are read. The lines of this protocol are far shorter, but a stranger
may send a long one."""
_SEAL_BYTES = 2 * hashlib.sha256().digest_size
"""Length of a line's HMAC, in hex digits."""


Size = Annotated[int, Meta(ge=0)]
Stream: TypeAlias = "BufferedRWPair[Any, Any]"


class Message(TypedDict, total=False):
    """One line, from either end. The module's docstring says which fields belong together."""

    nonce: str
    version: int
    tls: bool
    proof: Any  # any type: a wrong proof must get the answer `refused`, not a broken connection
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
    """The state could not be fetched. Another donor may have it."""


class SealError(ValueError):
    """The other end has not sent this line, or not at this place of the conversation."""


@dataclass(frozen=True)
class Handshake:
    """The values that the proofs of one connection cover.

    Attributes:
        address: host:port that the joiner dials.
        fingerprint: fingerprint of the donor's certificate; empty = no TLS.
    """

    token: str = field(repr=False)  # a log line must not show it
    donor_nonce: str
    joiner_nonce: str
    address: str
    fingerprint: str = ""

    def derive(self, purpose: str) -> bytes:
        """Return a secret value for one purpose. Only a process with the token can compute it."""
        covered = (
            purpose,
            self.donor_nonce,
            self.joiner_nonce,
            self.address,
            self.fingerprint,
        )
        parts = [each.encode() for each in covered]
        return authenticate(self.token.encode(), f"transfer {VERSION}", *parts)

    def proof(self, role: str) -> str:
        """Return the proof of one end.

        Args:
            role: "donor" or "joiner". Because of the role, an end cannot send the other end's proof
                back as its own.
        """
        return self.derive(role).hex()


class SealedStream:
    """One end of a connection after the handshake. One thread uses it.

    Each line ends with its *seal*: an HMAC over the line, its sender, and the seal of the line
    before, whichever end has sent that line. So the HMAC is right only if both ends have seen the
    same lines so far.

    Attributes:
        connection: the socket. The owner of this object closes it.
        stream: for the raw bytes that follow a line. They have no seal, but the line has their
            digest.
    """

    def __init__(
        self,
        connection: socket.socket,
        stream: Stream,
        handshake: Handshake,
        role: str,
    ) -> None:
        self.connection = connection
        self.stream = stream
        self._key = handshake.derive("key")
        self._own_role = role.encode()
        self._others_role = b"donor" if role == "joiner" else b"joiner"
        self._last_seal = b""  # seal of the last line that either end has sent

    def write(self, message: Message) -> None:
        """Send one line."""
        line = msgspec.json.encode(message)
        self.stream.write(line + self._seal(self._own_role, line) + b"\n")
        self.stream.flush()

    def read(self) -> Message:
        """Read one line, and check its seal.

        Returns:
            The message; empty if the other end has closed the connection.

        Raises:
            SealError: the other end has not sent this line, or not at this place.
            ValueError: the line is no message, or a field has another type.
        """
        line = self.stream.readline(_MAX_LINE)
        if not line:
            return {}
        text = line[: -_SEAL_BYTES - 1]
        found = line[-_SEAL_BYTES - 1 :]
        expected = self._seal(self._others_role, text) + b"\n"
        if not hmac.compare_digest(expected, found):
            raise SealError("a line is not what the other end has sent")
        return msgspec.json.decode(text, type=Message)

    def _seal(self, sender: bytes, line: bytes) -> bytes:
        """Return the seal of the next line."""
        found = authenticate(self._key, "line", sender, self._last_seal, line)
        self._last_seal = found.hex().encode()
        return self._last_seal


def is_proof(expected: str, given: object) -> bool:
    """True if `given` is the expected proof.

    The comparison always takes the same time, so a stranger learns nothing from its duration.
    """
    return hmac.compare_digest(expected.encode(), str(given).encode())


def octets(payload: torch.Tensor) -> memoryview:
    """Return the bytes of a snapshot's payload, without copying them."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def write_line(stream: Stream, message: Message) -> None:
    """Send one line without a seal."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def read_line(stream: Stream) -> Message:
    """Read one line without a seal.

    Returns:
        The message; empty if the other end has closed the connection. A probe (`reach.py`) sends
        blanks before its line. If it ends early, only the blanks arrive.

    Raises:
        ValueError: the line is no message, or a field has another type.
    """
    line = stream.readline(_MAX_LINE)
    if not line.strip():
        return {}
    return msgspec.json.decode(line, type=Message)


def open_stream(connection: socket.socket) -> Stream:
    """Return a stream over a connection, with the connection's timeout."""
    return connection.makefile("rwb")


def handshake_as_joiner(
    connection: socket.socket,
    address: str,
    token: str,
    open_stream: Callable[[socket.socket], Stream] = open_stream,
) -> SealedStream:
    """Make the handshake as the joiner.

    Args:
        connection: connection to the state server at `address`. If the donor uses TLS, only the
            connection of the result can be used and closed afterwards.
        open_stream: opens a stream over a connection. A transfer passes a function whose streams
            raise when the transfer is given up.

    Raises:
        ConnectionError: the server closed the connection.
        RefusedError: one end does not know the other's token, or has another version.
    """
    timeout = connection.gettimeout()
    fingerprint = ""
    stream = open_stream(connection)  # may change the timeout of the connection
    greeting = _read_answer(stream, address)
    if greeting.get("version") != VERSION:
        raise RefusedError(
            f"the donor at {address} speaks another version of the transfer; {_VERSION_REMEDY}",
        )
    secured: socket.socket | None = None
    if greeting.get("tls"):
        # The timeout of the stream may be too short for the start of TLS.
        connection.settimeout(timeout)
        secured, fingerprint = tls.connect(connection)
        connection = secured
        stream = open_stream(connection)
    try:
        handshake = Handshake(token, greeting["nonce"], secrets.token_hex(16), address, fingerprint)
        hello = Message(
            nonce=handshake.joiner_nonce,
            proof=handshake.proof("joiner"),
            version=VERSION,
        )
        write_line(stream, hello)
        answer = _read_answer(stream, address)
        if not is_proof(handshake.proof("donor"), answer.get("proof")):
            raise RefusedError(
                f"the donor at {address} does not know this run's token; {TOKEN_REMEDY}",
            )
    except BaseException:
        # The caller closes `connection`, whose descriptor TLS has taken over.
        if secured is not None:
            secured.close()
        raise
    return SealedStream(connection, stream, handshake, "joiner")


def handshake_as_donor(
    connection: socket.socket,
    address: str,
    token: str,
    certificate: tls.Certificate | None = None,
) -> SealedStream:
    """Make the handshake as the donor.

    Args:
        address: host:port that joiners dial.
        certificate: the donor's certificate; None = no TLS.

    Raises:
        StrangerError: the other end was refused. It got an answer with the reason if it speaks this
            protocol.
        OSError: the other end has closed the connection, or was silent for too long.
    """
    greeting = Message(nonce=secrets.token_hex(16), version=VERSION)
    if certificate is not None:
        greeting["tls"] = True
    connection.sendall(msgspec.json.encode(greeting) + b"\n")
    fingerprint = ""
    try:
        if certificate is not None:
            _skip_blanks(connection)
            connection = certificate.accept(connection)
            fingerprint = certificate.fingerprint
        return _check_hello(connection, greeting["nonce"], address, token, fingerprint)
    except tls.CLOSED:
        connection.close()
        raise
    except (ValueError, RecursionError, ssl.SSLError) as error:
        connection.close()
        raise StrangerError("the other end speaks another protocol") from error
    except BaseException:
        connection.close()
        raise


def _check_hello(
    connection: socket.socket,
    nonce: str,
    address: str,
    token: str,
    fingerprint: str,
) -> SealedStream:
    """Read the joiner's first line, and answer it.

    Raises:
        StrangerError, OSError: see `handshake_as_donor`.
        ValueError, RecursionError: the line is no message.
    """
    stream = open_stream(connection)
    hello = read_line(stream)
    handshake = Handshake(token, nonce, hello.get("nonce", ""), address, fingerprint)
    reason = ""
    if not is_proof(handshake.proof("joiner"), hello.get("proof")):
        rule = "the donor does not accept this group's token, or not at this address"
        reason = f"{rule}; {TOKEN_REMEDY}"
    if hello.get("version") != VERSION:
        # This reason replaces the one above. Another version has another proof, so the token may be
        # right.
        reason = f"the donor speaks another version of the transfer; {_VERSION_REMEDY}"
    if reason:
        write_line(stream, {"refused": reason})
        if not hello:
            # The other end may be a joiner that was killed, so this is no refusal of a stranger.
            raise ConnectionError("the other end closed the connection before it said anything")
        raise StrangerError(reason)
    write_line(stream, {"proof": handshake.proof("donor")})
    return SealedStream(connection, stream, handshake, "donor")


def _skip_blanks(connection: socket.socket) -> None:
    """Read the blanks that a probe sends before TLS starts (`reach.py`)."""
    while True:
        ahead = connection.recv(_MAX_LINE, socket.MSG_PEEK)  # leaves the bytes in the kernel
        num_blanks = len(ahead) - len(ahead.lstrip(b" "))
        if num_blanks == 0:
            return
        connection.recv(num_blanks)


def _read_answer(stream: Stream, address: str) -> Message:
    line = read_line(stream)
    if not line:
        raise ConnectionError("the donor closed the connection")
    if "refused" in line:
        raise RefusedError(f"{address}: {line['refused']}")
    return line
