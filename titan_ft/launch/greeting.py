# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge whether the first bytes of a connection to the lighthouse show the run's secret. Pure.

A member shows the secret in one of two ways:

- torchft's client speaks HTTP/2. It sends no headers of the caller and has no TLS, but it keeps the
  user information of its URL. With `http://SECRET@host:port` the first HEADERS frame of a
  connection (RFC 9113) has the pseudo-header `:authority: SECRET@host:port`. The frame is encoded
  by HPACK (RFC 7541), so the text may be Huffman-coded.
- Readers of the status page send an HTTP/1 request with `Authorization: Bearer SECRET`.

The gate calls `Greeting.judge` for each connection, with all bytes so far, whenever bytes arrive.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterator

MAX_BYTES = 8192
"""Limit of the bytes that a connection may send before it has shown the secret.

torchft's client needs 220.
"""
HOLD = "/hold"
"""Path of a request that gets no answer: the open connection shows that the lighthouse is there."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER_BYTES = 9
_MAX_FRAMES = 8
"""Limit of the frames up to the first HEADERS. torchft's client sends two frames before HEADERS."""
_MAX_FIELDS = 8
"""Limit of the fields up to :authority. RFC 9113 has at most four pseudo-headers, at the start."""
# Types of frames.
_HEADERS = 1
_SETTINGS = 4
_PING = 6
_WINDOW_UPDATE = 8
# Flags of a HEADERS frame.
_END_HEADERS = 0x4
_PADDED = 0x8
_PRIORITY = 0x20
_PRIORITY_BYTES = 5
_AUTHORITY = 1
"""Index of :authority in HPACK's static table."""
_MAX_SHIFT = 21
"""Shift of an integer's last byte. No length within `MAX_BYTES` needs a higher one."""
# Huffman codes of a secret's digits and of the @ after the secret (RFC 7541, appendix B).
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
    """The first bytes are not complete: wait for more."""
    PASS = "pass"
    """A member's connection: its bytes go to the lighthouse."""
    HOLD = "hold"
    """A member's connection that stays open without an answer, see the constant `HOLD`."""
    REFUSE = "refuse"
    """A stranger's connection."""


class Greeting:
    """Judges the first bytes of connections. No state of a connection is kept.

    Args:
        secret: the run's secret in hex digits.
    """

    def __init__(self, secret: str) -> None:
        self._plain = f"{secret}@".encode()
        bits = "".join(_HUFFMAN[letter] for letter in f"{secret}@")
        # The code ends within a byte. The other bits of that byte belong to the host after the @.
        num_whole_bytes = len(bits) // 8
        self._coded = int(bits[: 8 * num_whole_bytes], 2).to_bytes(num_whole_bytes, "big")
        self._last_bits = bits[8 * num_whole_bytes :]
        self._bearer = f"Bearer {secret}".encode()

    def judge(self, received: bytes) -> Reception:
        """Judge all bytes that a connection has sent until now."""
        begins_http2 = _PREFACE.startswith(received[: len(_PREFACE)])
        begins_request = b"GET ".startswith(received[:4])
        try:
            if begins_http2:
                reception = self._judge_frames(received)
            elif begins_request:
                reception = self._judge_request(received)
            else:
                return Reception.REFUSE
        except (IndexError, ValueError):  # malformed
            return Reception.REFUSE
        if reception is Reception.MORE and len(received) >= MAX_BYTES:
            return Reception.REFUSE
        return reception

    def _judge_request(self, received: bytes) -> Reception:
        """Judge an HTTP/1 request.

        A connection may send one GET of a few paths. A POST to the lighthouse would kill a group.
        """
        head, end, rest = received.partition(b"\r\n\r\n")
        if not end:
            return Reception.MORE
        request, *lines = head.split(b"\r\n")
        _, path, _ = request.split(b" ")
        fields = dict(_split_field(line) for line in lines)
        if not hmac.compare_digest(fields.get(b"authorization", b""), self._bearer):
            return Reception.REFUSE
        if path not in _PATHS:
            return Reception.REFUSE
        # A second request on the connection would pass unseen.
        if rest or fields.get(b"connection", b"").lower() != b"close":
            return Reception.REFUSE
        if path == HOLD.encode():
            return Reception.HOLD
        return Reception.PASS

    def _judge_frames(self, received: bytes) -> Reception:
        """Judge HTTP/2: the preface, settings, then the headers of a request."""
        start = len(_PREFACE)
        # Without a limit, a stranger's many empty frames would be read again for each byte that
        # arrives, and the members would wait meanwhile.
        for _ in range(_MAX_FRAMES):
            body_start = start + _FRAME_HEADER_BYTES
            if len(received) < body_start:
                return Reception.MORE
            length = int.from_bytes(received[start : start + 3], "big")
            kind = received[start + 3]
            flags = received[start + 4]
            if length > MAX_BYTES or kind not in (_HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE):
                return Reception.REFUSE
            body = received[body_start : body_start + length]
            if len(body) < length:
                return Reception.MORE
            if kind == _HEADERS:
                return Reception.PASS if self._is_member(body, flags) else Reception.REFUSE
            start = body_start + length
        return Reception.REFUSE

    def _is_member(self, body: bytes, flags: int) -> bool:
        """True if a HEADERS frame shows the secret in its first :authority.

        Raises:
            IndexError, ValueError: the frame is malformed.
        """
        if not flags & _END_HEADERS:
            return False
        if flags & _PADDED:
            padding = body[0]
            body = body[1 : len(body) - padding]
        if flags & _PRIORITY:
            body = body[_PRIORITY_BYTES:]
        for text, is_coded in _find_authorities(body):
            return self._shows_secret(text, is_coded)  # only the first one counts
        return False

    def _shows_secret(self, text: bytes, is_coded: bool) -> bool:
        if not is_coded:
            return hmac.compare_digest(text[: len(self._plain)], self._plain)
        num_whole_bytes = len(self._coded)
        if not hmac.compare_digest(text[:num_whole_bytes], self._coded):
            return False
        last_byte = f"{text[num_whole_bytes]:08b}"
        return last_byte.startswith(self._last_bits)


def _split_field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon:
        raise ValueError("a line of the head is no field")
    return name.lower(), value.strip()


def _find_authorities(block: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield each literal value of :authority in a connection's first header block, and whether the
    value is Huffman-coded.

    A value from HPACK's dynamic table (RFC 7541) needs no second look: the table is empty before
    the first block, so the value was a literal of the same block. Only the first fields are read.

    Raises:
        IndexError, ValueError: the block is malformed.
    """
    offset = 0
    for _ in range(_MAX_FIELDS):
        if offset >= len(block):
            return
        first = block[offset]
        is_indexed_field = bool(first & 0x80)
        if is_indexed_field:  # its value is in a table
            _, offset = _read_integer(block, offset, prefix_bits=7)
            continue
        is_table_size = first & 0xE0 == 0x20
        if is_table_size:
            _, offset = _read_integer(block, offset, prefix_bits=5)
            continue
        is_added_to_table = bool(first & 0x40)
        name_index, offset = _read_integer(block, offset, prefix_bits=6 if is_added_to_table else 4)
        has_literal_name = name_index == 0
        if has_literal_name:
            _, _, offset = _read_string(block, offset)
        text, is_coded, offset = _read_string(block, offset)
        if name_index == _AUTHORITY:
            yield text, is_coded


def _read_string(block: bytes, offset: int) -> tuple[bytes, bool, int]:
    """Return a string of HPACK, whether it is Huffman-coded, and the offset after it."""
    is_coded = bool(block[offset] & 0x80)
    length, offset = _read_integer(block, offset, prefix_bits=7)
    text = block[offset : offset + length]
    if len(text) < length:
        raise ValueError("a string is longer than its block")
    return text, is_coded, offset + length


def _read_integer(block: bytes, offset: int, prefix_bits: int) -> tuple[int, int]:
    """Return an integer of HPACK, and the offset after it.

    A small number fits in the low `prefix_bits` of the first byte. If these bits are all 1, further
    bytes follow, with 7 bits each. The high bit of such a byte says that another one follows.
    """
    max_in_prefix = (1 << prefix_bits) - 1
    number = block[offset] & max_in_prefix
    offset += 1
    if number < max_in_prefix:
        return number, offset
    for shift in range(0, _MAX_SHIFT + 1, 7):
        byte = block[offset]
        offset += 1
        number += (byte & 0x7F) << shift
        is_last = byte < 0x80
        if is_last:
            return number, offset
    raise ValueError("an integer is too large")
