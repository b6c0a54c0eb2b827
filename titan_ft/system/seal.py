# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Seals: only a process with the run's token can make one, and every process with the token can check it.

The lighthouse and the groups' stores believe whoever reaches them. A seal shows that a name or an
address comes from a process of this run. It does not hide the text, and it does not show that the
text is new: a stranger can copy a sealed text from one place to another, so `purpose` names the
place.
"""

from __future__ import annotations

import hashlib
import hmac

SEAL_LETTERS = 32
"""Length of a seal: 128 bits in hex. A name carries one, and the lighthouse sends all names to all."""


def seal(token: str, purpose: str, text: str) -> str:
    """Return the seal of a text.

    Args:
        token: the run's shared secret.
        purpose: where the text stands; a seal made for one place is worth nothing at another.
    """
    # The length keeps two pairs of purpose and text from having the same bytes.
    covered = f"{len(purpose)}:{purpose}:{text}".encode(errors="surrogatepass")
    return hmac.new(token.encode(), covered, hashlib.sha256).hexdigest()[:SEAL_LETTERS]


def add_seal(token: str, key: str, text: str) -> str:
    """Return a text with its seal, to be stored under `key`."""
    return f"{text} {seal(token, key, text)}"


def remove_seal(token: str, key: str, sealed: str) -> str:
    """Return the text that `add_seal` was given.

    Raises:
        UnsealedError: the text was stored under another key, or by a process without the token.
    """
    text, _, found = sealed.rpartition(" ")
    if not is_seal(found, token, key, text):
        raise UnsealedError(
            f"{key} in the store has no valid seal: all groups of a run must have the same TITAN_FT_TOKEN in their "
            "environment, and no other process may write to their stores"
        )
    return text


def lighthouse_secret(token: str) -> str:
    """Return what members show to the lighthouse: not the token, because it travels in the clear; empty without one."""
    return seal(token, "lighthouse", "") if token else ""


def is_seal(found: str, token: str, purpose: str, text: str) -> bool:
    """True if `found` is the seal of a text; takes the same time for every wrong one."""
    return hmac.compare_digest(found.encode(errors="surrogatepass"), seal(token, purpose, text).encode())


class UnsealedError(OSError):
    """A text in a store does not come from a process of this run: whoever reads it goes on without it."""
