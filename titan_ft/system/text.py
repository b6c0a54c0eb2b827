# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Text from outside, made safe to print.

A terminal obeys escape sequences: they move its cursor, or set its title.
"""

from __future__ import annotations


def printable(text: str, longest: int | None = None) -> str:
    """Return a text with escaped control characters, such as `\\x1b`.

    Names at a lighthouse, texts of exceptions and names of hosts come from outside.

    Args:
        longest: a longer text is cut to this length; None = no limit.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    if text.isprintable():  # nearly always
        return text
    return "".join(_escape(letter) for letter in text)


def _escape(letter: str) -> str:
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape").decode()
