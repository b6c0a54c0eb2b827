# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""The corpus and the tokenizer as torchtitan uses them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from titan_ft.data import assets
from titan_ft.data.datasets import (
    SHUFFLED,
    STREAMED,
    TRAIN,
    VALIDATION,
    load_documents,
    load_text,
    register_datasets,
)
from titan_ft.data.documents import read_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """torchtitan's registry with our names in it, put back afterwards."""
    from torchtitan.hf_datasets.text_datasets import DATASETS

    before = dict(DATASETS)
    register_datasets()
    yield DATASETS
    DATASETS.clear()
    DATASETS.update(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(assets.resolve("titan_ft://tokenizer"))


def stream(name: str, tokenizer: Any, rank: int = 0, world_size: int = 1, seq_len: int = 64) -> Any:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    return HuggingFaceTextDataset(
        name, None, tokenizer, seq_len=seq_len, dp_rank=rank, dp_world_size=world_size
    )


def test_registration_adds_names_and_keeps_the_others(registry: dict[str, Any]) -> None:
    """`c4` and its relatives work as before; registering again changes nothing."""
    assert {TRAIN, STREAMED, SHUFFLED, VALIDATION, "c4", "c4_test", "c4_validation"} == set(
        registry
    )
    register_datasets()
    assert len(registry) == 7


def test_streams_have_the_same_documents(registry: dict[str, Any]) -> None:
    """A stream has the text's documents, in order or shuffled; `training.dataset_path` may name
    another text.
    """
    documents, streamed, shuffled = (
        [sample["text"] for sample in registry[name].loader(registry[name].path)]
        for name in (TRAIN, STREAMED, SHUFFLED)
    )
    assert streamed == documents
    assert shuffled != documents
    assert sorted(shuffled) == sorted(documents)


def test_a_stream_of_a_short_text(registry: dict[str, Any], tmp_path: Path) -> None:
    """A short text is cut into at most as many shards as it has documents."""
    path = tmp_path / "short.txt"
    path.write_text("Chapter 1\n\nSome words.\n\nChapter 2\n\nMore words.\n")
    stream = registry[STREAMED].loader(str(path))
    assert [sample["text"] for sample in stream] == [
        "Chapter 1\n\nSome words.",
        "Chapter 2\n\nMore words.",
    ]
    assert stream.num_shards == 2


def test_training_and_validation_share_no_document(registry: dict[str, Any]) -> None:
    """The held-out part is another book."""
    train, validation = (
        set(registry[name].loader(registry[name].path)["text"]) for name in (TRAIN, VALIDATION)
    )
    assert train
    assert validation
    assert not train & validation


def test_loading_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents live in memory: two ranks that start at once cannot meet at a cache or a
    lock.
    """
    monkeypatch.chdir(tmp_path)
    dataset = load_documents(str(assets.VALIDATION_TEXT))
    assert dataset.cache_files == []
    assert not list(tmp_path.iterdir())


def test_a_missing_text_file_is_named() -> None:
    """The error names the field and the path."""
    with pytest.raises(
        FileNotFoundError, match=r"training\.dataset_path must be .*got '/no/such\.txt'"
    ):
        load_documents("/no/such.txt")


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_shards_of_the_ranks_are_disjoint_and_complete(
    registry: dict[str, Any], tokenizer: Any, world_size: int
) -> None:
    """Every document belongs to exactly one rank, and no rank goes without."""
    whole = list(load_documents(str(assets.TRAIN_TEXT))["text"])
    shards = [
        list(stream(TRAIN, tokenizer, rank, world_size)._data["text"]) for rank in range(world_size)
    ]
    assert [text for shard in shards for text in shard] == whole
    assert len(set(whole)) == len(whole)
    assert min(map(len, shards)) > 10


def test_a_stream_resumes_in_its_place(registry: dict[str, Any], tokenizer: Any) -> None:
    """A stream loaded from another one's state continues with the same sequences, twice."""
    original = stream(TRAIN, tokenizer, rank=1, world_size=2)
    iterator = iter(original)
    for _ in range(2):
        list(islice(iterator, 50))
        state = json.loads(json.dumps(original.state_dict()))
        resumed = stream(TRAIN, tokenizer, rank=1, world_size=2)
        resumed.load_state_dict(state)
        expected = [label.tolist() for _, label in islice(iterator, 20)]
        assert [label.tolist() for _, label in islice(iter(resumed), 20)] == expected
        resumed.load_state_dict(state)


def test_the_tokenizer_fits_the_debug_model(tokenizer: Any) -> None:
    """Every id is a row of the embedding of torchtitan's llama3 debug model."""
    from torchtitan.models.llama3 import llama3_args

    assert tokenizer.get_vocab_size() == llama3_args["debugmodel"].vocab_size == 2048
    assert set(tokenizer.get_vocab().values()) == set(range(2048))


def test_begin_and_end_are_added(tokenizer: Any) -> None:
    """Special tokens separate documents in the token stream."""
    ids = tokenizer.encode("Emma", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id == tokenizer.token_to_id("<|begin_of_text|>")
    assert ids[-1] == tokenizer.eos_id == tokenizer.token_to_id("<|end_of_text|>")
    assert tokenizer.encode("Emma", add_bos=False, add_eos=False) == ids[1:-1]


@pytest.mark.parametrize(
    "text", ["It is a truth universally acknowledged;", "naïve 漢字 🙂\n\n\t x=1", ""]
)
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    """The tokenizer is byte-level: no text is unknown, even if the corpus never contains it."""
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert tokenizer.decode(ids) == text


def test_the_corpus_survives_the_round_trip_and_is_compressed(tokenizer: Any) -> None:
    """All ids are in range, and a token stands for about three characters of English."""
    text = read_text(assets.VALIDATION_TEXT)
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert tokenizer.decode(ids) == text
    assert min(ids) >= 0
    assert max(ids) < 2048
    assert len(text) / len(ids) > 2.8


def test_the_packaged_tokenizer_is_what_the_script_trains(tmp_path: Path) -> None:
    """scripts/train_tokenizer.py reproduces the packaged files byte for byte."""
    runpy.run_path(str(ROOT / "scripts" / "train_tokenizer.py"))["train"](tmp_path)
    for path in assets.TOKENIZER.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_text_is_cut_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    """All slots, and forks of the process, share the documents of a file until the file changes."""
    file = tmp_path / "text.txt"
    file.write_text("One.\n")
    first = load_documents(str(file))
    assert load_documents(str(file)) is first
    file.write_text("Another one.\n")
    assert load_documents(str(file))["text"][:] == ["Another one."]
    load_text("austen", str(file))
    load_text("c4", "nowhere")  # nothing is known of it
    with pytest.raises(FileNotFoundError, match=r"training\.dataset_path"):
        load_text("austen", str(tmp_path / "none.txt"))
