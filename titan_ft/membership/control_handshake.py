# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Handshake of a connection in the control tree: both ends prove the run's token. Bytes only.

After the handshake each frame has a seal. Its key is derived from the token and the nonces, so only
the two ends can make one.

    child to parent: HELLO   nonce (32 bytes), rank (4)
    parent to child: REPLY   nonce (32), proof of the parent (32)
    child to parent: ANSWER  proof of the child (32), its host's name (64), its process (76),
                             the address of its echo server (48)

A proof is an HMAC-SHA256 with the token as its key. It covers:

- both nonces, so a recorded proof is worth nothing on another connection;
- the role, so an end cannot send back the proof that it received;
- the ranks and the key of the tree, so neither a rank of another tree nor a rank of an earlier
  attempt of the group is taken for a neighbour.

All messages have a fixed length. The reader asks for exactly that many bytes, so a stranger fills
no memory. Before the proof an end says nothing about itself but its rank.

The connections of `control_sockets.py` use this module. Nothing here blocks or keeps a thread.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from titan_ft.system.seal import authenticate
from titan_ft.system.text import printable

_NONCE_BYTES, _RANK_BYTES = 32, 4
_HOST_BYTES, _PROCESS_BYTES, _ADDRESS_BYTES = 64, 76, 48
_PROOF_BYTES = hashlib.sha256().digest_size
_IDENTITY = struct.Struct(f"{_HOST_BYTES}s{_PROCESS_BYTES}s{_ADDRESS_BYTES}s")
HELLO_BYTES = _NONCE_BYTES + _RANK_BYTES
REPLY_BYTES = _NONCE_BYTES + _PROOF_BYTES
ANSWER_BYTES = _PROOF_BYTES + _IDENTITY.size

SEAL_BYTES = 16
"""A frame's seal is a keyed BLAKE2b of 128 bits. For a short frame an HMAC takes seven times as
long."""

_PARENT, _CHILD = b"parent", b"child"
_PURPOSE = "control tree 3"
_STRANGER = "the other end does not know this run's token, or has another version of titan_ft"


class HandshakeError(ValueError):
    """The other end is not a neighbour of this rank, or does not know the run's token."""


class FrameSeal:
    """Seals the frames that go one way over a connection, in their order.

    Without seals, a relay that passes the handshake on could then write votes and aborts of its
    own. A frame that was changed, left out, repeated or sent back has a wrong seal.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_BYTES)
        self._number = 0  # of the last frame

    def make(self, frame: bytes) -> bytes:
        """Return the seal of the next frame."""
        self._number += 1
        sealed = self._keyed.copy()
        sealed.update(self._number.to_bytes(8, "big") + frame)
        return sealed.digest()

    def is_seal(self, found: bytes, frame: bytes) -> bool:
        """True if `found` is the seal of the next frame."""
        return hmac.compare_digest(self.make(frame), found)


@dataclass(frozen=True)
class Secret:
    """The secret that the ranks of one tree share, and that a stranger lacks.

    Attributes:
        token: the run's shared secret.
        key: names the tree, unique to this attempt of the group.
    """

    token: str
    key: str

    def __repr__(self) -> str:
        return f"Secret(key={self.key!r})"  # a log line must not show the token

    def prove(self, role: bytes, parent: int, *said: bytes) -> bytes:
        """Return the proof of one end.

        Args:
            parent: rank of the parent.
            said: all messages so far, without this proof.
        """
        key = hashlib.sha256(self.key.encode()).digest()
        return authenticate(self.token.encode(), _PURPOSE, role, key, _pack_rank(parent), *said)

    def seal_frames(self, sender: bytes, parent: int, *said: bytes) -> FrameSeal:
        """Return the seal of the frames that one end sends; see `prove`."""
        return FrameSeal(self.prove(b"frames of the " + sender, parent, *said))


@dataclass(frozen=True)
class Identity:
    """Where a rank runs.

    Attributes:
        host: name of the rank's host, for people.
        process: text of a `titan_ft.system.process.Process`; empty = too long for the message.
        echo: host:port of the server that answers the parent's pings; empty = the rank has none.
    """

    host: str
    process: str
    echo: str = ""

    def pack(self) -> bytes:
        """Return the bytes of the handshake's last field."""
        process = self.process.encode()
        if len(process) > _PROCESS_BYTES:
            process = b""  # a text that is cut would name another process
        echo = self.echo.encode()
        if len(echo) > _ADDRESS_BYTES:
            echo = b""
        return _IDENTITY.pack(self.host.encode(), process, echo)  # cuts a long host name

    @classmethod
    def unpack(cls, packed: bytes) -> Identity:
        """Read the bytes that `pack` wrote."""
        host, process, echo = _IDENTITY.unpack(packed)
        return cls(_read_text(host), _read_text(process), _read_text(echo))


class ChildHandshake:
    """The child's end of one connection.

    Attributes:
        hello: the first message, which the child sends.
    """

    def __init__(self, secret: Secret, rank: int, parent: int, own: Identity) -> None:
        self._secret = secret
        self._parent = parent
        self._own = own.pack()
        self.hello = secrets.token_bytes(_NONCE_BYTES) + _pack_rank(rank)
        self._parent_nonce = b""  # known after `answer`

    def answer(self, reply: bytes) -> bytes:
        """Check the parent's proof, and return the child's answer.

        Raises:
            HandshakeError: the proof is wrong.
        """
        nonce, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
        expected = self._secret.prove(_PARENT, self._parent, self.hello, nonce)
        if not hmac.compare_digest(expected, proof):
            raise HandshakeError(_STRANGER)
        own_proof = self._secret.prove(_CHILD, self._parent, self.hello, nonce, self._own)
        self._parent_nonce = nonce
        return own_proof + self._own

    def seals(self) -> tuple[FrameSeal, FrameSeal]:
        """Return the seal of the child's frames, then of the parent's. Call `answer` before."""
        said = (self._parent, self.hello, self._parent_nonce)
        return self._secret.seal_frames(_CHILD, *said), self._secret.seal_frames(_PARENT, *said)


class ParentHandshake:
    """The parent's end of one connection.

    Attributes:
        child: rank that the other end claims. `check` confirms it.
        reply: the second message, which the parent sends.

    Raises:
        HandshakeError: the claimed rank is not a child of this rank.
    """

    def __init__(self, secret: Secret, rank: int, children: range, hello: bytes) -> None:
        self._secret = secret
        self._rank = rank
        self._hello = hello
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.child = int.from_bytes(hello[_NONCE_BYTES:], "big")
        if self.child not in children:
            raise HandshakeError(f"rank {self.child} is no child of rank {rank}")
        self.reply = self._nonce + secret.prove(_PARENT, rank, hello, self._nonce)

    def check(self, answer: bytes) -> Identity:
        """Check the child's proof, and return where the child runs.

        Raises:
            HandshakeError: the proof is wrong.
        """
        proof, identity = answer[:_PROOF_BYTES], answer[_PROOF_BYTES:]
        expected = self._secret.prove(_CHILD, self._rank, self._hello, self._nonce, identity)
        if not hmac.compare_digest(expected, proof):
            raise HandshakeError(_STRANGER)
        return Identity.unpack(identity)

    def seals(self) -> tuple[FrameSeal, FrameSeal]:
        """Return the seal of the parent's frames, then of the child's. Call `check` before."""
        said = (self._rank, self._hello, self._nonce)
        return self._secret.seal_frames(_PARENT, *said), self._secret.seal_frames(_CHILD, *said)


def _pack_rank(rank: int) -> bytes:
    return rank.to_bytes(_RANK_BYTES, "big")


def _read_text(packed: bytes) -> str:
    """Return a text that is safe to print: a terminal obeys control characters in it."""
    return printable(packed.rstrip(b"\0").decode(errors="replace"))
