# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Streams of `datasets`: a state that is loaded goes on with the very next example, in every epoch.

`upstream` is an unpatched copy of the library's module. Each patch has a test that fails when the
library does not need it any more.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import datasets.iterable_dataset as patched
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import (
    Dataset,
    IterableDataset,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
)
from datasets.distributed import split_dataset_by_node

from titan_ft.host import streams

streams.patch()

NUM_EPOCHS = 3
Place = tuple[int, str]  # epoch, text


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    """The library's module of streams without the patches."""
    found = importlib.util.find_spec("datasets.iterable_dataset")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 11 and 5 texts as JSON lines, and the same as Parquet with several row groups
    each.
    """
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("texts")
    for number, length in enumerate((11, 5)):
        texts = Dataset.from_dict({"text": [f"{number}.{each}" for each in range(length)]})
        texts.to_json(str(folder / f"{number}.jsonl"))
        texts.to_parquet(str(folder / f"{number}.parquet"), batch_size=5)
    return folder


def generate(files: list[int]) -> Iterator[dict[str, str]]:
    for file in files:
        for number in range(4):
            yield {"text": f"g{file}.{number}"}


def mark(example: dict[str, str]) -> dict[str, str]:
    return {"text": f"{example['text']}!"}


def number(example: dict[str, str], index: int) -> dict[str, str]:
    return {"text": f"{example['text']}#{index}"}


def double(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": [f"{text}{half}" for text in batch["text"] for half in "ab"]}


def mark_arrays(batch: dict[str, Any]) -> dict[str, list[str]]:
    return {"text": [f"{text}^" for text in batch["text"]]}


def mark_table(table: pa.Table) -> pa.Table:
    return pa.table({"text": [f"{text}@" for text in table["text"].to_pylist()]})


async def mark_later(example: dict[str, str]) -> dict[str, str]:
    return {"text": f"{example['text']}&"}


async def double_later(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return double(batch)


async def is_kept_later(example: dict[str, str]) -> bool:
    return is_kept(example)


def is_kept(example: dict[str, str]) -> bool:
    return zlib.crc32(example["text"].encode()) % 3 != 0


class Pipelines:
    """Builds streams."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, kind: str) -> IterableDataset:
        if kind == "generated":
            return IterableDataset.from_generator(generate, gen_kwargs={"files": list(range(6))})
        if kind == "memory":
            return Dataset.from_dict(
                {"text": [f"m{each}" for each in range(21)]}
            ).to_iterable_dataset(num_shards=4)
        pattern = {"json": "*.jsonl", "one file": "0.jsonl", "parquet": "*.parquet"}[kind]
        loader = "parquet" if kind == "parquet" else "json"
        return load_dataset(
            loader, data_files=str(self.folder / pattern), split="train", streaming=True
        )

    def draw(self, seed: int) -> IterableDataset:
        """Return a source with one to four drawn steps behind it."""
        dice = random.Random(seed)
        kinds = ("generated", "memory", "json", "one file", "parquet")
        stream = self.source(dice.choice(kinds))
        for left in reversed(range(dice.randint(1, 4))):
            stream = self._step(stream, dice, kinds, is_last=left == 0)
        nodes = dice.choice([1, 1, 2, 3])
        return split_dataset_by_node(stream, dice.randrange(nodes), nodes) if nodes > 1 else stream

    def _step(
        self, stream: IterableDataset, dice: random.Random, kinds: tuple[str, ...], is_last: bool
    ) -> IterableDataset:
        def other() -> IterableDataset:
            found = self.source(dice.choice(kinds))
            return found.shuffle(seed=3, buffer_size=4) if dice.random() < 0.4 else found

        def until() -> str:
            return dice.choice(["first_exhausted", "all_exhausted"])

        steps: dict[str, Callable[[], IterableDataset]] = {
            "map": lambda: stream.map(mark),
            "map with indices": lambda: stream.map(number, with_indices=True),
            "map batches": lambda: stream.map(
                double, batched=True, batch_size=dice.choice([1, 3, 5])
            ),
            "filter": lambda: stream.filter(is_kept),
            "map arrays": lambda: (
                stream.with_format("numpy")
                .map(mark_arrays, batched=True, batch_size=dice.choice([1, 4, 5, 16]))
                .with_format(None)
            ),
            "map tables": lambda: (
                stream.with_format("arrow")
                .map(mark_table, batched=True, batch_size=dice.choice([1, 4, 5, 16]))
                .with_format(None)
            ),
            "shuffle": lambda: stream.shuffle(
                seed=dice.randint(0, 99), buffer_size=dice.choice([2, 5, 16, 100])
            ),
            "take": lambda: stream.take(dice.randint(5, 40)),
            "skip": lambda: stream.skip(dice.randint(1, 10)),
            "repeat": lambda: stream.repeat(2),
            "select": lambda: stream.select_columns(["text"]),
            "interleave": lambda: interleave_datasets([stream, other()], stopping_strategy=until()),
            "mix": lambda: interleave_datasets(
                [stream, other()], probabilities=[0.6, 0.4], seed=5, stopping_strategy=until()
            ),
            "concatenate": lambda: concatenate_datasets([stream, other()]),
        }
        if is_last:  # `datasets` cannot interleave or concatenate what an async function gives
            steps |= {
                "map later": lambda: stream.map(mark_later),
                "map batches later": lambda: stream.map(
                    double_later, batched=True, batch_size=dice.choice([1, 3, 5])
                ),
                "filter later": lambda: stream.filter(is_kept_later),
            }
        return steps[dice.choice([*steps, "shuffle"])]()


def read_on(
    stream: IterableDataset, first_epoch: int, most: int = 10**6
) -> tuple[list[Place], list[dict[str, Any]]]:
    """Read a stream to the end of the last epoch, as torchtitan does; return what it gave, each
    with its state.
    """
    found: list[Place] = []
    states: list[dict[str, Any]] = []
    for epoch in range(first_epoch, NUM_EPOCHS):
        if epoch > first_epoch:
            stream.set_epoch(stream.epoch + 1)
        for example in stream:
            found.append((epoch, example["text"]))
            states.append(copy.deepcopy(stream.state_dict()))
            if len(found) >= most:
                return found, states
    return found, states


def check_resumed(build: Callable[[], IterableDataset], most_places: int = 10**6) -> None:
    """A stream goes on exactly from each of its states, and once more from a state that it had
    then.
    """
    expected, states = read_on(build(), 0)
    places = range(len(states))
    for place in (
        places if len(places) <= most_places else random.Random(0).sample(places, most_places)
    ):
        again = build()
        again.load_state_dict(copy.deepcopy(states[place]))
        found, later = read_on(again, states[place]["epoch"], most=24)
        assert found == expected[place + 1 : place + 25], f"opened after example {place}"
        if len(later) < 5:
            continue
        third = build()
        third.load_state_dict(later[4])
        found, _ = read_on(third, later[4]["epoch"], most=8)
        assert found == expected[place + 6 : place + 14], (
            f"opened after example {place}, and 5 later again"
        )


PIPELINES: dict[str, Callable[[Pipelines], IterableDataset]] = {
    "files": lambda build: build.source("json"),
    "tables": lambda build: build.source("parquet"),
    "shuffled": lambda build: build.source("parquet").shuffle(seed=1, buffer_size=5),
    "buffer of all": lambda build: build.source("json").shuffle(seed=1, buffer_size=100),
    "shuffled twice": lambda build: (
        build.source("json").shuffle(seed=1, buffer_size=4).shuffle(seed=2, buffer_size=3)
    ),
    "shuffled, mapped": lambda build: build.source("json").shuffle(seed=1, buffer_size=5).map(mark),
    "mapped, shuffled": lambda build: (
        build.source("memory").map(number, with_indices=True).shuffle(1, buffer_size=5)
    ),
    "shuffled, in batches": lambda build: (
        build.source("generated")
        .shuffle(seed=1, buffer_size=5)
        .map(double, batched=True, batch_size=3)
    ),
    "shuffled, cut": lambda build: build.source("json").shuffle(seed=1, buffer_size=5).take(15),
    "mixed": lambda build: interleave_datasets(
        [build.source("json").shuffle(seed=1, buffer_size=4), build.source("parquet")],
        probabilities=[0.7, 0.3],
        seed=3,
    ),
    "filtered": lambda build: build.source("one file").filter(is_kept),
    "NumPy's arrays in batches": lambda build: (
        build.source("parquet").with_format("numpy").map(mark_arrays, batched=True, batch_size=4)
    ),
    "tensors of JSON in batches": lambda build: (
        build.source("json").with_format("torch").map(mark_arrays, batched=True, batch_size=4)
    ),
    "tables in batches": lambda build: (
        build.source("parquet")
        .with_format("arrow")
        .map(mark_table, batched=True, batch_size=5)
        .with_format(None)
    ),
    "async": lambda build: build.source("parquet").map(mark_later),
    "async, in batches": lambda build: build.source("json").map(
        double_later, batched=True, batch_size=3
    ),
    "async filter": lambda build: build.source("json").filter(is_kept_later),
    "async, shuffled": lambda build: (
        build.source("parquet").map(mark_later).shuffle(seed=1, buffer_size=5)
    ),
    "one of three nodes": lambda build: split_dataset_by_node(
        build.source("json").shuffle(1, buffer_size=3), 1, 3
    ),
}


LONG = ("async, in batches", "async, shuffled", "buffer of all", "tables in batches")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in PIPELINES],
)
def test_it_goes_on_after_every_example_of_every_epoch(folder: Path, name: str) -> None:
    """Also when it is opened twice; with the buffer full, being filled, and being emptied at the
    end.
    """
    check_resumed(lambda: PIPELINES[name](Pipelines(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_drawn_pipelines_go_on(folder: Path, first: int) -> None:
    """Steps in any order and nesting."""
    for seed in range(first, first + 50):
        check_resumed(lambda seed=seed: Pipelines(folder).draw(seed), most_places=40)


def test_the_order_is_upstreams(upstream: ModuleType) -> None:
    """Shuffled with the patch or without, an uninterrupted stream gives the same; a thousand
    indices are one draw.
    """

    def shuffle(module: ModuleType, size: int) -> list[int]:
        source = module.ExamplesIterable(lambda: ((each, {"x": each}) for each in range(2500)), {})
        stream = module.BufferShuffledExamplesIterable(source, size, np.random.default_rng(4))
        stream._init_state_dict()
        return [example["x"] for _, example in stream]

    for size in (1, 7, 100, 5000):
        assert shuffle(patched, size) == shuffle(upstream, size)


def test_what_is_read_again_does_not_grow() -> None:
    """A shuffled stream is opened near its place: the further it has come, the more it leaves
    out.
    """
    size, length = 20, 4000
    reads = 0

    def examples(files: list[int]) -> Iterator[dict[str, int]]:
        nonlocal reads
        for each in range(length):
            reads += 1
            yield {"x": each}

    def build() -> IterableDataset:
        return IterableDataset.from_generator(examples, gen_kwargs={"files": [0]}).shuffle(
            seed=1, buffer_size=size
        )

    whole = iter(build())
    stream = build()
    for _ in zip(range(length - 100), stream, strict=False):
        next(whole)
    state = stream.state_dict()
    # B (ln B + 2) is 5 B here, and it varies.
    assert state["examples_iterable"]["since_anchor"] < 12 * size
    again = build()
    again.load_state_dict(state)
    assert next(iter(again))["x"] == next(whole)["x"]


def test_a_state_is_small_and_plain(folder: Path) -> None:
    """It travels with each step: neither examples nor the generator's words are in it."""
    stream = Pipelines(folder).source("json").shuffle(seed=1, buffer_size=10)
    for _ in stream:
        pass
    assert len(repr(stream.state_dict())) < 1500


# Each patch is still needed


def tables(module: ModuleType) -> Any:
    """Return a stream over tables of several rows, as a file of Parquet or JSON gives."""

    def give(first: list[int]) -> Iterator[tuple[int, pa.Table]]:
        for start in first:
            yield start, pa.table({"text": [f"{start + each}" for each in range(10)]})

    source = module.ArrowExamplesIterable(give, {"first": [0, 10]})
    info = datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("string")}))
    return module.IterableDataset(source, info=info)


def resumed_after_three(build: Callable[[], Any], epoch: int = 0) -> tuple[list[str], list[str]]:
    """Return what follows on three examples in an epoch, and what a stream gives that is opened
    there.
    """
    stream = build()
    stream.set_epoch(epoch)
    iterator = iter(stream)
    for _ in range(3):
        next(iterator)
    state = copy.deepcopy(stream.state_dict())
    again = build()
    again.load_state_dict(state)
    return [example["text"] for example in iterator], [example["text"] for example in again]


@pytest.mark.parametrize(
    ("build", "epoch"),
    [
        pytest.param(
            lambda module: tables(module).shuffle(seed=1, buffer_size=4), 0, id="shuffle buffer"
        ),
        pytest.param(tables, 1, id="epoch"),
        pytest.param(lambda module: tables(module).map(mark), 0, id="rows of a table"),
    ],
)
def test_upstream_loses_the_place(
    upstream: ModuleType, build: Callable[[ModuleType], Any], epoch: int
) -> None:
    """It does so without the patch, and not with it. If the first fails, the patch can go."""
    expected, found = resumed_after_three(lambda: build(upstream), epoch)
    assert found != expected
    expected, found = resumed_after_three(lambda: build(patched), epoch)
    assert found == expected


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda module: (
                tables(module).with_format("numpy").map(mark_arrays, batched=True, batch_size=4)
            ),
            id="chunks of a table",
        ),
        pytest.param(lambda module: tables(module).map(mark_later), id="async function"),
    ],
)
def test_upstream_loses_the_place_at_the_second_opening(
    upstream: ModuleType, build: Callable[[ModuleType], Any]
) -> None:
    """The first opening is right, and the state that it leaves is not."""

    def opened_twice(module: ModuleType, first: int) -> tuple[list[str], list[str]]:
        stream = build(module)
        expected = [example["text"] for example in stream]
        for number in (first, 4):
            for _ in zip(range(number), stream, strict=False):
                state = copy.deepcopy(stream.state_dict())
            stream = build(module)
            stream.load_state_dict(state)
        return expected[first + 4 :], [example["text"] for example in stream]

    results = [opened_twice(upstream, first) for first in range(1, 15)]
    assert any(found != expected for expected, found in results)
    for first in range(1, 15):
        expected, found = opened_twice(patched, first)
        assert found == expected


def test_upstream_shifts_the_seeds_of_what_was_opened_before(upstream: ModuleType) -> None:
    """Without the patch the third epoch of a stream that was cut depends on how often it was
    opened.
    """

    def third_epoch(module: ModuleType, opened: int) -> list[str]:
        stream = tables(module).shuffle(seed=1, buffer_size=4).take(15)
        for epoch in (1, 2)[-opened:]:
            stream.set_epoch(epoch)
            found = [example["text"] for example in stream]
        return found

    assert third_epoch(upstream, 1) != third_epoch(upstream, 2)
    assert third_epoch(patched, 1) == third_epoch(patched, 2)


class Looped(torch.utils.data.IterableDataset[tuple[int, int]]):
    """Reads pass after pass, as torchtitan's text dataset does; gives the worker's number and the
    pass's epoch.
    """

    def __init__(self, data: IterableDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[int, int]]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        while True:
            epoch = self._data.epoch
            for _ in self._data:
                yield worker.id, epoch
            self._data.set_epoch(self._data.epoch + 1)


def epochs_of(found: list[tuple[int, int]], worker: int) -> list[int]:
    return list(dict.fromkeys(epoch for each, epoch in found if each == worker))


@pytest.mark.parametrize("needed", [True, False])
def test_a_workers_epoch_is_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    """Without the patch each worker leaves out the epochs that the other one has counted.

    The two workers share the epoch's memory, as forks do, and read in turns, one example each. In
    the processes of a real loader the epochs that are left out depend on the workers' pace."""
    if needed:
        monkeypatch.setattr(IterableDataset, "set_epoch", streams._upstream_set_epoch)
    streams_read = [Pipelines(folder).source("json") for _ in range(2)]
    streams_read[1]._epoch = streams_read[0]._epoch
    readers = [iter(Looped(each)) for each in streams_read]
    found: list[tuple[int, int]] = []
    for turn in range(180):
        info = SimpleNamespace(id=turn % 2, num_workers=2, dataset=None, seed=0)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
        found.append(next(readers[turn % 2]))
    for worker in (0, 1):
        seen = epochs_of(found, worker)
        assert len(seen) > 2
        assert (seen == list(range(len(seen)))) is not needed


def test_each_process_of_a_loader_reads_every_epoch(folder: Path) -> None:
    loader = torch.utils.data.DataLoader(
        Looped(Pipelines(folder).source("json")), batch_size=None, num_workers=2
    )
    found = [
        (int(worker), int(epoch)) for (worker, epoch), _ in zip(loader, range(180), strict=False)
    ]
    for worker in (0, 1):
        seen = epochs_of(found, worker)
        assert len(seen) > 2
        assert seen == list(range(len(seen)))
