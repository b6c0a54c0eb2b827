# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Cut a plain-text book into documents."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

DOCUMENT_CHARS = 4000
"""A document ends after the paragraph with which it gets this long, or where a chapter ends."""

_HEADING = re.compile(r"(chapter|volume) [0-9ivxlc]+\Z", re.IGNORECASE)


def read_text(path: Path) -> str:
    """Read UTF-8 text, gzipped if the name ends in ``.gz``."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    return path.read_text(encoding="utf-8")


def split_documents(text: str, document_chars: int = DOCUMENT_CHARS) -> Iterator[str]:
    """Yield documents: each has some whole paragraphs of the text.

    Each paragraph is on one line, with a blank line between two paragraphs. A chapter heading
    starts a new document. All words of the text are in the documents, in their order.

    Args:
        document_chars: see `DOCUMENT_CHARS`.
    """
    paragraphs: list[str] = []
    num_chars = 0
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        if not paragraph:
            continue
        if paragraphs and (num_chars >= document_chars or _HEADING.match(paragraph)):
            yield "\n\n".join(paragraphs)
            paragraphs, num_chars = [], 0
        paragraphs.append(paragraph)
        num_chars += len(paragraph)
    if paragraphs:
        yield "\n\n".join(paragraphs)
