# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Seals: only a process with the run's token can make one, and each such process can check it.

The lighthouse and the groups' stores accept texts from anybody. A seal shows that a name or an
address comes from a process of this run. The seal does not hide the text, and does not show that
the text is new. A stranger could copy a sealed text from one place to another, so `purpose` names
the place. See docs/security.md.
"""

from __future__ import annotations

import hmac

SEAL_LETTERS = 32
"""Length of a seal: 128 bits in hex. It is short because each name has a seal, and the lighthouse
sends all names to all groups."""


def authenticate(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of some parts. All proofs and seals of the project begin here.

    Args:
        key: the run's token, or a key that was made with it.
        purpose: keeps the HMAC of one kind of message from being shown as that of another kind.
        parts: each is covered with its length. So no two lists of parts have the same bytes.
    """
    covered = b"".join(b"%d:%s" % (len(part), part) for part in (purpose.encode(), *parts))
    return hmac.digest(key, covered, "sha256")


def seal(token: str, purpose: str, text: str) -> str:
    """Return the seal of a text.

    Args:
        token: the run's shared secret.
        purpose: names the place of the text. A seal for one place is not valid at another.
    """
    # A stranger's text may contain surrogates, which are no Unicode.
    parts = [each.encode(errors="surrogatepass") for each in (purpose, text)]
    return authenticate(token.encode(), "seal", *parts).hex()[:SEAL_LETTERS]


def add_seal(token: str, key: str, text: str) -> str:
    """Return a text with its seal, for a store. The seal is valid under `key` only."""
    return f"{text} {seal(token, key, text)}"


def remove_seal(token: str, key: str, sealed: str) -> str:
    """Return a text without the seal of `add_seal`.

    Raises:
        UnsealedError: the seal is for another key, or from a process without the token.
    """
    text, _, found = sealed.rpartition(" ")
    if not is_seal(found, token, key, text):
        raise UnsealedError(
            f"{key} in the store has no valid seal: all groups of a run must have the same "
            "TITAN_FT_TOKEN in their environment, and no other process may write to their stores"
        )
    return text


def lighthouse_secret(token: str) -> str:
    """Return the secret that members show to the lighthouse; empty if the run has no token.

    It travels in clear text. So it is not the token, and does not reveal the token.
    """
    if not token:
        return ""
    return seal(token, "lighthouse", "")


def is_seal(found: str, token: str, purpose: str, text: str) -> bool:
    """True if `found` is the seal of a text. The comparison always takes the same time."""
    return hmac.compare_digest(
        found.encode(errors="surrogatepass"),
        seal(token, purpose, text).encode(),
    )


class UnsealedError(OSError):
    """A text in a store has no valid seal. The reader goes on as if the text were not there."""
