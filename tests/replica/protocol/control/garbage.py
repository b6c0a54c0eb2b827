# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Bad frames, made from a good one. A node must refuse each of them, whatever its state."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from titan_ft.protocol.control.message import (
    MAX_BYTES,
    AnswerMessage,
    Frame,
    LossMessage,
    Message,
    NoteMessage,
    WordsMessage,
    decode,
    encode,
)

_FAR = 10**6


def _random_bytes(good: bytes) -> bytes:
    return bytes((byte * 7 + 13) % 256 for byte in good)


def _nothing(good: bytes) -> bytes:
    return b""


def _truncated(good: bytes) -> bytes:
    return good[:-1]


def _too_long(good: bytes) -> bytes:
    return encode(Frame(1, 0, NoteMessage("garbage", "x" * MAX_BYTES)))


def _nested(good: bytes) -> bytes:
    """An unknown field: an array in an array, and so on. A decoder that recurses overflows."""
    return b"\x94\x01\x00\xc0" + b"\x91" * 100_000


def _unknown_kind(good: bytes) -> bytes:
    return msgspec.msgpack.encode([1, 0, ["verdict", 1]])


def _unknown_field(good: bytes) -> bytes:
    return msgspec.msgpack.encode([1, 0, ["leave", 1]])


def _negative_number(good: bytes) -> bytes:
    return msgspec.msgpack.encode([-1, 0, ["leave"]])


def _number_without_message(good: bytes) -> bytes:
    return msgspec.msgpack.encode([1, 0, None])


def _number_from_the_future(good: bytes) -> bytes:
    return encode(Frame(decode(good).number + _FAR, 0, NoteMessage("garbage", "")))


def _acknowledges_the_future(good: bytes) -> bytes:
    return encode(Frame(0, _FAR))


def _with(message: Message) -> Callable[[bytes], bytes]:
    """Put a message that nobody can send into a frame whose number is as it should be."""

    def make(good: bytes) -> bytes:
        frame = decode(good)
        return encode(Frame(frame.number or _FAR, frame.acknowledged, message))

    return make


BAD_BYTES: tuple[Callable[[bytes], bytes], ...] = (
    _random_bytes,
    _nothing,
    _truncated,
    _too_long,
    _nested,
    _unknown_kind,
    _unknown_field,
    _negative_number,
    _number_without_message,
    _number_from_the_future,
    _acknowledges_the_future,
)

BAD_MESSAGES = (
    _with(WordsMessage(0, frozenset({"garbage"}))),
    _with(WordsMessage(_FAR, frozenset({"garbage"}))),
    _with(AnswerMessage(0, "garbage")),
    _with(AnswerMessage(_FAR, "garbage")),
    _with(LossMessage(_FAR, "garbage", "")),
)
