# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge the first bytes of a connection to the lighthouse: do they show the run's secret? Pure.

torchft's client sends no headers of the caller and has no TLS. But it keeps the user information of
its URL: with `http://SECRET@host:port` the first HEADERS frame of a connection (RFC 9113) has the
pseudo-header `:authority: SECRET@host:port`. Readers of the status page send an HTTP/1 request with
`Authorization: Bearer SECRET`.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterator

MAX_BYTES = 8192
"""Of a connection that has not shown the secret. torchft's client needs 220."""
HOLD = "/hold"
"""Path of a request that gets no answer: the open connection shows that the lighthouse is there."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = 9  # bytes
_MAX_FRAMES = 8  # up to the first HEADERS. torchft's client sends two before it
_MAX_FIELDS = 8  # up to :authority. RFC 9113 has at most four pseudo-headers, and they come first
_HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 1, 4, 6, 8  # types of frames
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20  # flags of a HEADERS frame
_PRIORITY_BYTES = 5
_AUTHORITY = 1  # place of :authority in HPACK's static table
_MAX_SHIFT = 21  # of an integer's last byte: no length in a frame of MAX_BYTES needs more
# RFC 7541, appendix B, as far as a secret and the @ after it need it.
_HUFFMAN = {
    "0": "00000",
    "1": "00001",
    "2": "00010",
    "3": "011001",
    "4": "011010",
    "5": "011011",
    "6": "011100",
    "7": "011101",
    "8": "011110",
    "9": "011111",
    "a": "00011",
    "b": "100011",
    "c": "00100",
    "d": "100100",
    "e": "00101",
    "f": "100101",
    "@": "1111111111010",
}
_PATHS = (b"/", b"/status", HOLD.encode())


class Reception(enum.Enum):
    """Decision on a connection."""

    MORE = "more"
    """Its first bytes are not complete."""
    PASS = "pass"
    """It is a member's: its bytes go to the lighthouse."""
    HOLD = "hold"
    """It is a member's, which only wants to see when the connection ends."""
    REFUSE = "refuse"


class Greeting:
    """Judges first bytes.

    Args:
        secret: hex digits.
    """

    def __init__(self, secret: str) -> None:
        self._plain = f"{secret}@".encode()
        bits = "".join(_HUFFMAN[letter] for letter in f"{secret}@")
        # The last byte of the code holds bits of the host that follows.
        whole = len(bits) // 8
        self._coded = int(bits[: 8 * whole], 2).to_bytes(whole, "big")
        self._last_bits = bits[8 * whole :]
        self._bearer = f"Bearer {secret}".encode()

    def judge(self, received: bytes) -> Reception:
        """Judge all bytes that a connection has sent until now."""
        begins_http2 = _PREFACE.startswith(received[: len(_PREFACE)])
        if not begins_http2 and not b"GET ".startswith(received[:4]):
            return Reception.REFUSE
        try:
            reception = (
                self._judge_frames(received) if begins_http2 else self._judge_request(received)
            )
        except (IndexError, ValueError):  # no HTTP
            return Reception.REFUSE
        if reception is Reception.MORE and len(received) >= MAX_BYTES:
            return Reception.REFUSE
        return reception

    def _judge_request(self, received: bytes) -> Reception:
        """Judge an HTTP/1 request. Only GET of a few paths passes, once a connection: the
        lighthouse's POST kills.
        """
        head, end, rest = received.partition(b"\r\n\r\n")
        if not end:
            return Reception.MORE
        request, *lines = head.split(b"\r\n")
        _, path, _ = request.split(b" ")
        fields = dict(_split_field(line) for line in lines)
        shown = hmac.compare_digest(fields.get(b"authorization", b""), self._bearer)
        if (
            not shown
            or rest
            or path not in _PATHS
            or fields.get(b"connection", b"").lower() != b"close"
        ):
            return Reception.REFUSE
        return Reception.HOLD if path == HOLD.encode() else Reception.PASS

    def _judge_frames(self, received: bytes) -> Reception:
        """Judge HTTP/2: the preface, settings, then the headers of a request."""
        start = len(_PREFACE)
        # Without a limit, a stranger's many empty frames would be read again for each byte that
        # arrives, and the members would wait meanwhile.
        for _ in range(_MAX_FRAMES):
            if len(received) < start + _FRAME_HEADER:
                return Reception.MORE
            length = int.from_bytes(received[start : start + 3], "big")
            kind, flags = received[start + 3], received[start + 4]
            if length > MAX_BYTES or kind not in (_HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE):
                return Reception.REFUSE
            body = received[start + _FRAME_HEADER : start + _FRAME_HEADER + length]
            if len(body) < length:
                return Reception.MORE
            if kind == _HEADERS:
                return Reception.PASS if self._is_member(body, flags) else Reception.REFUSE
            start += _FRAME_HEADER + length
        return Reception.REFUSE

    def _is_member(self, body: bytes, flags: int) -> bool:
        if not flags & _END_HEADERS:
            return False
        if flags & _PADDED:
            padding = body[0]
            body = body[1 : len(body) - padding]
        if flags & _PRIORITY:
            body = body[_PRIORITY_BYTES:]
        for text, is_coded in _find_authorities(body):
            return self._shows_secret(text, is_coded)
        return False

    def _shows_secret(self, text: bytes, is_coded: bool) -> bool:
        if not is_coded:
            return hmac.compare_digest(text[: len(self._plain)], self._plain)
        whole = len(self._coded)
        if not hmac.compare_digest(text[:whole], self._coded):
            return False
        return f"{text[whole]:08b}".startswith(self._last_bits)


def _split_field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon:
        raise ValueError("a line of the head is no field")
    return name.lower(), value.strip()


def _find_authorities(block: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield each literal value of :authority in a connection's first header block, and if it is
    Huffman-coded.

    The dynamic table of HPACK (RFC 7541) is empty before the first block, and a value in the table
    comes from an earlier literal of the same block. Only the first fields are read.

    Raises:
        IndexError, ValueError: the block is malformed.
    """
    place = 0
    for _ in range(_MAX_FIELDS):
        if place >= len(block):
            return
        first = block[place]
        if first & 0x80:  # an indexed field
            _, place = _read_integer(block, place, 7)
            continue
        if first & 0xE0 == 0x20:  # a new size of the dynamic table
            _, place = _read_integer(block, place, 5)
            continue
        name, place = _read_integer(block, place, 6 if first & 0x40 else 4)
        if name == 0:
            _, _, place = _read_string(block, place)
        text, is_coded, place = _read_string(block, place)
        if name == _AUTHORITY:
            yield text, is_coded


def _read_string(block: bytes, place: int) -> tuple[bytes, bool, int]:
    is_coded = bool(block[place] & 0x80)
    length, place = _read_integer(block, place, 7)
    text = block[place : place + length]
    if len(text) < length:
        raise ValueError("a string is longer than its block")
    return text, is_coded, place + length


def _read_integer(block: bytes, place: int, prefix_bits: int) -> tuple[int, int]:
    """Return an integer of HPACK, and the place after it."""
    most = (1 << prefix_bits) - 1
    number = block[place] & most
    place += 1
    if number < most:
        return number, place
    for shift in range(0, _MAX_SHIFT + 1, 7):
        byte = block[place]
        place += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    raise ValueError("an integer is too large")
