# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Seals of texts that others may write, and texts that are safe to show."""

from __future__ import annotations

import pytest

from titan_ft.system.seal import UnsealedError, add_seal, authenticate, remove_seal, seal
from titan_ft.system.text import printable

TOKEN = "0123456789abcdef"


def test_a_sealed_text_comes_back() -> None:
    """Token and key are the same. The text may contain spaces."""
    assert remove_seal(TOKEN, "key", add_seal(TOKEN, "key", "10.0.0.1:7 a b")) == "10.0.0.1:7 a b"


@pytest.mark.parametrize(
    ("token", "key", "sealed"),
    [
        ("another", "key", add_seal(TOKEN, "key", "text")),
        ("", "key", add_seal(TOKEN, "key", "text")),
        (TOKEN, "other", add_seal(TOKEN, "key", "text")),
        (TOKEN, "key", add_seal(TOKEN, "key", "text")[1:]),
        (TOKEN, "key", add_seal(TOKEN, "key", "text")[:-1]),
        (TOKEN, "key", f"text {'0' * 32}"),
        (TOKEN, "key", "text"),
        (TOKEN, "key", ""),
        (TOKEN, "key", "text \ud800"),
    ],
)
def test_a_text_without_its_seal_is_refused(token: str, key: str, sealed: str) -> None:
    """The error names what all groups must have in common."""
    with pytest.raises(UnsealedError, match="TITAN_FT_TOKEN"):
        remove_seal(token, key, sealed)


def test_purpose_and_text_do_not_run_into_each_other() -> None:
    """A seal for one place is not valid at another."""
    assert len({seal(TOKEN, "a", "b:c"), seal(TOKEN, "a:b", "c"), seal(TOKEN, "", "a:b:c")}) == 3


def test_one_kind_of_message_is_not_taken_for_another() -> None:
    """A stranger may get chosen text authenticated in one protocol; that must not be valid in
    another protocol.
    """
    key = TOKEN.encode()
    said = [(), (b"a",), (b"a", b""), (b"", b"a"), (b"a1:b",), (b"a", b"b"), (b"1:a",), (b"ab",)]
    found = {authenticate(key, purpose, *parts) for purpose in ("seal", "agents") for parts in said}
    assert len(found) == 2 * len(said)
    assert len({authenticate(key, "a1:b"), authenticate(key, "a", b"b")}) == 2


def test_nothing_of_a_shown_text_moves_the_terminal() -> None:
    """Control characters and characters that reverse the direction of text are escaped."""
    assert printable("replica 2, größer") == "replica 2, größer"
    assert (
        printable("a\x1b]0;title\x07\x9b2J\u202e\ud800\nb")
        == "a\\x1b]0;title\\x07\\x9b2J\\u202e\\ud800\\nb"
    )
    assert printable("x" * 10, 4) == "xxxx..."
