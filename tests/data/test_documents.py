# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Cutting a book into documents."""

from __future__ import annotations

import gzip
from pathlib import Path

from titan_ft.data.assets import TRAIN_TEXT, VALIDATION_TEXT
from titan_ft.data.documents import DOCUMENT_CHARS, read_text, split_documents


def test_paragraphs_are_unwrapped_and_kept_apart() -> None:
    """Lines of a paragraph are joined, paragraphs are separated by one blank line."""
    assert list(split_documents("One\ntwo.\n\n\n  Three. \n")) == ["One two.\n\nThree."]


def test_a_document_ends_with_the_paragraph_that_fills_it() -> None:
    """No paragraph is cut."""
    assert list(split_documents("aaaa\n\nbbbb\n\ncccc", document_chars=5)) == [
        "aaaa\n\nbbbb",
        "cccc",
    ]


def test_a_heading_starts_a_document() -> None:
    """A chapter never begins inside another document; a sentence about a chapter is no heading."""
    text = "Title\n\nCHAPTER I\n\nText.\n\nChapter 2\n\nChapter 2 was short."
    assert list(split_documents(text)) == [
        "Title",
        "CHAPTER I\n\nText.",
        "Chapter 2\n\nChapter 2 was short.",
    ]


def test_no_word_of_the_corpus_is_lost() -> None:
    """The documents hold every word of the texts in order, and are enough for an even split over 8
    ranks.
    """
    for path in (TRAIN_TEXT, VALIDATION_TEXT):
        text = read_text(path)
        documents = list(split_documents(text))
        assert " ".join(documents).split() == text.split()
        assert len(documents) >= 8 * 12
        assert max(map(len, documents)) < 2 * DOCUMENT_CHARS


def test_plain_and_gzipped_text_read_the_same(tmp_path: Path) -> None:
    """A user's own text may be either."""
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é".encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.txt.gz") == "é"
