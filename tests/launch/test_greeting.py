# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The first bytes of connections to the lighthouse: they tell members from strangers, and none do
harm.
"""

from __future__ import annotations

import random

import pytest

from titan_ft.launch.greeting import HOLD, MAX_BYTES, Greeting, Reception
from titan_ft.system.seal import lighthouse_secret

SECRET = lighthouse_secret("0123456789abcdef")
GREETING = Greeting(SECRET)
# Recorded: torchft's client asks for a heartbeat at http://SECRET@127.0.0.1:port. Its settings,
# then the headers.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000012040000000000000200000000000400200000000600004000")
WINDOW = bytes.fromhex("00000408000000000000200001")
CODES = {
    **{letter: f"{number:05b}" for number, letter in enumerate("012aceiost")},
    "3": "011001",
    "4": "011010",
    "5": "011011",
    "6": "011100",
    "7": "011101",
    "8": "011110",
    "9": "011111",
    "b": "100011",
    "d": "100100",
    "f": "100101",
    ".": "010111",
    ":": "1011100",
    "@": "1111111111010",
}
"""Huffman codes of RFC 7541, appendix B."""


def coded(text: str) -> bytes:
    bits = "".join(CODES[letter] for letter in text)
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def string(text: bytes, flag: int = 0) -> bytes:
    assert len(text) < 127
    return bytes([flag | len(text)]) + text


def headers(block: bytes, flags: int = 0x4, kind: int = 1) -> bytes:
    return len(block).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 1]) + block


def authority(secret: str, first: int = 0x41, huffman: bool = True) -> bytes:
    text = f"{secret}@127.0.0.1:29510"
    return bytes([first]) + (string(coded(text), 0x80) if huffman else string(text.encode()))


METHOD, SCHEME, PATH = b"\x83", b"\x86", b"\x44" + string(b"/torchft.LighthouseService/Heartbeat")


def hello(block: bytes, flags: int = 0x4) -> bytes:
    return PREFACE + SETTINGS + WINDOW + headers(block, flags)


@pytest.mark.parametrize("first", [0x41, 0x01, 0x11])
@pytest.mark.parametrize("huffman", [True, False])
def test_a_member_passes(first: int, huffman: bool) -> None:
    """The secret may be Huffman-coded or not, be put into the dynamic table or not, and stand
    anywhere in the block.
    """
    shown = authority(SECRET, first, huffman)
    for block in (METHOD + SCHEME + shown + PATH, shown, b"\x3f\xe1\x1f" + METHOD + PATH + shown):
        assert GREETING.judge(hello(block)) is Reception.PASS
        assert GREETING.judge(hello(block) + b"what follows") is Reception.PASS
    padded = bytes([3]) + bytes(5) + shown + bytes(3)
    assert GREETING.judge(hello(padded, 0x4 | 0x8 | 0x20)) is Reception.PASS


def test_a_member_passes_in_pieces_of_any_size() -> None:
    """No piece is judged too early."""
    whole = hello(METHOD + SCHEME + authority(SECRET) + PATH)
    for size in range(len(whole)):
        assert GREETING.judge(whole[:size]) is Reception.MORE
    assert GREETING.judge(whole) is Reception.PASS


@pytest.mark.parametrize(
    "shown",
    [
        authority("0" * 32),
        authority(SECRET[:-1] + ("0" if SECRET[-1] != "0" else "1")),
        authority(SECRET[:-1]),
        authority(SECRET[1:]),
        authority("1" + SECRET),
        b"\x41" + string(coded(SECRET), 0x80),  # without the @
        b"\x41" + string(b""),
        b"\x41" + string(b"", 0x80),
        b"\x41" + string(b"127.0.0.1:29510"),
        b"\x44" + authority(SECRET)[1:],  # as the path
        b"\x40" + string(b"x") + authority(SECRET)[1:],  # as a field of the stranger's
        b"\x81" * 20,
        authority("0" * 32) + authority(SECRET),
        b"",
    ],
)
def test_a_stranger_is_refused(shown: bytes) -> None:
    """Whatever is shown as :authority, and wherever the secret stands otherwise."""
    assert GREETING.judge(hello(METHOD + shown + PATH)) is Reception.REFUSE


@pytest.mark.parametrize(
    "received",
    [
        hello(authority(SECRET), flags=0),  # continued in another frame
        PREFACE + headers(b"x", kind=0),
        PREFACE + headers(b"x", kind=9),
        PREFACE + b"\x00\x40\x01\x04\x00" + bytes(MAX_BYTES),
        PREFACE + SETTINGS * 8,
        hello(METHOD * 8 + authority(SECRET)),  # pseudo-headers come first, and there are four
        hello(b"\x41\xff\xff\xff\xff\xff\xff\x7f"),
        hello(b"\x7f\xff\xff\xff\xff\xff\xff\xff"),
        hello(b"\x41\x82\x00"),
        hello(bytes([200]) + authority(SECRET), flags=0x4 | 0x8),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 24,
        b"PRI * HTTP/1.1\r\n",
        b"POST /replica/x/kill HTTP/1.1\r\n",
    ],
)
def test_no_greeting(received: bytes) -> None:
    """Frames that no client begins with, integers without an end, TLS, another protocol: refused at
    once.
    """
    assert GREETING.judge(received) is Reception.REFUSE


def request(
    line: str = "GET /status HTTP/1.1",
    bearer: str = SECRET,
    connection: str = "close",
    rest: str = "",
) -> bytes:
    fields = f"Host: h\r\nauthorization: Bearer {bearer}\r\nConnection: {connection}\r\n"
    return f"{line}\r\n{fields}\r\n{rest}".encode()


def test_readers_of_the_page() -> None:
    """With the secret a reader gets the page, or its connection is held; nothing else, and no
    second request.
    """
    assert GREETING.judge(request()) is Reception.PASS
    assert GREETING.judge(request("GET / HTTP/1.1")) is Reception.PASS
    assert GREETING.judge(request(f"GET {HOLD} HTTP/1.1")) is Reception.HOLD
    assert GREETING.judge(request()[:-1]) is Reception.MORE
    refused = [
        request(bearer="0" * 32),
        request(bearer=""),
        request(bearer=SECRET[:-1]),
        request(connection="keep-alive"),
        request("GET /replica/x/kill HTTP/1.1"),
        request("GET /status"),
        request("POST /replica/x/kill HTTP/1.1"),
        request("HEAD /status HTTP/1.1"),
        request(rest="POST /replica/x/kill HTTP/1.1\r\n\r\n"),
        b"GET /status HTTP/1.1\r\n\r\n",
        b"GET /status HTTP/1.1\r\nno field\r\n\r\n",
        b"GET /" + b"x" * MAX_BYTES,
    ]
    for received in refused:
        assert GREETING.judge(received) is Reception.REFUSE, received


def test_no_bytes_raise_or_pass() -> None:
    """10,000 first frames that are nearly right: no secret, no way through, no exception; nothing
    waits for ever.
    """
    chance = random.Random(38)
    block = METHOD + SCHEME + authority("0" * 32) + PATH
    for _ in range(10_000):
        fuzzed = bytearray(hello(block, chance.randrange(256)))
        for _ in range(chance.randrange(1, 12)):
            place = chance.randrange(len(PREFACE), len(fuzzed))
            match chance.randrange(3):
                case 0:
                    fuzzed[place] = chance.randrange(256)
                case 1:
                    del fuzzed[place : place + chance.randrange(1, 20)]
                case 2:
                    fuzzed[place:place] = chance.randbytes(chance.randrange(1, 20))
            if len(fuzzed) <= len(PREFACE) + 1:
                break
        reception = GREETING.judge(bytes(fuzzed))
        assert reception in (Reception.REFUSE, Reception.MORE)
        if reception is Reception.MORE:
            assert GREETING.judge(bytes(fuzzed) + bytes(MAX_BYTES)) is Reception.REFUSE
        judged = Greeting(SECRET).judge(chance.randbytes(chance.randrange(200)))
        assert judged is not Reception.PASS
