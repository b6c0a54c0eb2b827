# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The messages between a rank and its neighbours in the control tree, and their encoding."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_BYTES = 1 << 20
"""Length of the longest frame."""

_MAX_MESSAGE_BYTES = MAX_BYTES - 64
"""Length of the longest message. It is shorter than the longest frame, because the frame adds
numbers, which may take more bytes when another node passes the message on."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Refuses unknown fields: the decoder would skip them by recursion, and a deeply nested one
    would overflow the stack."""


class WordsMessage(_Struct, frozen=True, tag="words"):
    """To the parent: the words of all ranks of the sender's subtree for an agreement.

    Attributes:
        number: number of the agreement.
        too_long: the words together do not fit into a message, and are left out.
    """

    number: _Count
    words: frozenset[str]
    too_long: bool = False


class AnswerMessage(_Struct, frozen=True, tag="answer"):
    """To a child: the decision of rank 0 in an agreement.

    Attributes:
        number: number of the agreement.
        announced: rank 0 has decided without waiting for words.
    """

    number: _Count
    text: str
    announced: bool = False


class NoteMessage(_Struct, frozen=True, tag="note"):
    """To the parent: a rank's text for a topic. To a child: the text that rank 0 has taken."""

    topic: str
    text: str


class ShareMessage(_Struct, frozen=True, tag="share"):
    """To the parent: all ranks of the sender's subtree have sent this note
    (`Node.send_note_with_all`)."""

    topic: str


class LossMessage(_Struct, frozen=True, tag="loss"):
    """To all neighbours: a rank is lost.

    Attributes:
        host: name of the lost rank's host, for people; empty = not known.
        silent_seconds: time without a heartbeat of this rank; 0 = it is lost for another reason.
    """

    rank: _Count
    reason: str
    host: str
    silent_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class LeaveMessage(_Struct, frozen=True, tag="leave"):
    """To all neighbours: the sender leaves in order, so the end of its connection is no loss."""


class EndMessage(_Struct, frozen=True, tag="end"):
    """To all neighbours, after `LeaveMessage`: the sender ends now, and needs no answer."""


_OfAgreements = WordsMessage | AnswerMessage
Message = _OfAgreements | NoteMessage | ShareMessage | LossMessage | LeaveMessage | EndMessage


class Frame(_Struct, frozen=True):
    """A message on its way over one link.

    Attributes:
        number: ordinal of the message on this link, in this direction, from 1; 0 = no message.
        acknowledged: number of the last message that the sender has received.
        message: None = the frame only acknowledges.
    """

    number: _Count
    acknowledged: _Count
    message: Message | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Encode a frame whose message `check_length` has accepted."""
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """Decode a frame.

    Raises:
        ValueError: the bytes are no frame, or too many.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"a frame has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        frame = _decoder.decode(data)
    except ValueError as error:
        raise ValueError(f"not a frame: {error}") from error
    if (frame.number == 0) != (frame.message is None):
        raise ValueError("not a frame: only a frame without a message has the number 0")
    return frame


def fits(message: Message) -> bool:
    """True if a message fits into a frame."""
    return len(_encoder.encode(message)) <= _MAX_MESSAGE_BYTES


def check_length(message: Message) -> None:
    """Check that a message fits into a frame.

    Raises:
        ValueError: the message is too long.
    """
    if not fits(message):
        found = f"{type(message).__name__}: {len(_encoder.encode(message))} bytes"
        raise ValueError(f"{found}; at most {_MAX_MESSAGE_BYTES} are allowed; shorten its text")
