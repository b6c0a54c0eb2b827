# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The wire of a heal: how a snapshot comes from a donor's host memory to a joiner, in the background of both.

torchft's HTTP transport listens on every interface, asks nobody who he is and can unpickle what it is sent. This one
(`state_server.py` is the donor's side, `state_fetch.py` the joiner's) listens on one address, proves the run's token on
both sides of each connection without sending it (HMAC over the nonces of both), and moves nothing but a JSON header and
raw tensor bytes.

A connection carries one request line after another: {"step", "lineage", "offset", "bytes"} for a range of the payload,
"header" in place of "offset" for the header, "done" when the joiner has everything, "bytes" of it from here. Each
answer is a JSON line {"bytes": n, "crc32": checksum} or {"error": text}, then n raw bytes. While the donor has yet to
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
from io import BufferedRWPair
from typing import Annotated, Any, TypedDict

import msgspec
import torch
from msgspec import Meta

from titan_ft.protocol.errors import RefusedError

TOKEN_REMEDY = "all groups of a run must have the same TITAN_FT_TOKEN in their environment"

_MAX_LINE = 4096  # a request or an answer line is far shorter; a stranger's may not be


Size = Annotated[int, Meta(ge=0)]


class Message(TypedDict, total=False):
    """One line, from either end; which fields come together is said above. One of another type is refused."""

    nonce: str
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
    crc32: int
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


def proof(token: str, role: str, donor_nonce: str, joiner_nonce: str) -> str:
    """Return what only who knows the token can say; `role` is "donor" or "joiner", so that no end can send it back."""
    return hmac.new(token.encode(), f"{role}:{donor_nonce}:{joiner_nonce}".encode(), hashlib.sha256).hexdigest()


def same(expected: str, given: object) -> bool:
    """Say whether `given` is the expected proof, in a time that reveals nothing about it."""
    return hmac.compare_digest(expected.encode(), str(given).encode())


def octets(payload: torch.Tensor) -> memoryview:
    """Return the bytes of a snapshot's payload, not copied."""
    return memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers


def write_line(stream: BufferedRWPair[Any, Any], message: Message) -> None:
    """Send one line."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def read_line(stream: BufferedRWPair[Any, Any]) -> Message:
    """Read one line; an empty message says that the other end closed the connection.

    Raises:
        ValueError: it is none, or a field of it has another type.
    """
    line = stream.readline(_MAX_LINE)
    return msgspec.json.decode(line, type=Message) if line else {}


def prove(stream: BufferedRWPair[Any, Any], address: str, token: str) -> None:
    """Show the state server at `address` that this end knows the token, and make sure that the server does.

    Raises:
        ConnectionError: it closed the connection.
        RefusedError: one end does not know the other's token.
    """
    nonce, their_nonce = secrets.token_hex(16), _read_answer(stream, address)["nonce"]
    write_line(stream, {"nonce": nonce, "proof": proof(token, "joiner", their_nonce, nonce)})
    if not same(proof(token, "donor", their_nonce, nonce), _read_answer(stream, address).get("proof")):
        raise RefusedError(f"the donor at {address} does not know this run's token; {TOKEN_REMEDY}")


def _read_answer(stream: BufferedRWPair[Any, Any], address: str) -> Message:
    line = read_line(stream)
    if not line:
        raise ConnectionError("the donor closed the connection")
    if "refused" in line:
        raise RefusedError(f"{address}: {line['refused']}")
    return line
