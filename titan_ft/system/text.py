# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Text of others, made safe to show: no character of it moves a terminal's cursor or sets its title."""

from __future__ import annotations


def printable(text: str, longest: int | None = None) -> str:
    """Return a text in which control characters are escaped, as `\\x1b`.

    Names at a lighthouse, texts of exceptions and names of hosts come from outside. A terminal obeys
    the escape sequences in them.

    Args:
        longest: length at which the text is cut; None = as long as it is.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}..."
    if text.isprintable():  # nearly always
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
