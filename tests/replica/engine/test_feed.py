# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The feed reads on after the committed batches, and returns uncommitted ones again.

It does so with each kind of loader.
"""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from titan_ft.config import FaultTolerance
from titan_ft.data.assets import resolve
from titan_ft.engine.feed import Feed, Reading, mark, merge
from titan_ft.engine.loader_state import load_loader
from titan_ft.host import cpu
from titan_ft.protocol.ledger import Ledger
from titan_ft.training.slot_loaders import SlotLoaders

NUM_SLOTS = 2
Build = Callable[[int], Any]


KINDS = ("in memory", "shuffled, epochs", "shuffled, epochs, workers")
PLAINER_KINDS = ("streamed", "workers", "streamed, workers")


@pytest.fixture(
    scope="module",
    params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in PLAINER_KINDS)],
)
def build(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Build]:
    """Build torchtitan's own loader over a map-style or a streaming Hugging Face dataset.

    With and without workers. With "epochs", a slot has about as many batches as a step, so each
    batch is of another epoch.
    """
    cpu.prepare()
    import datasets
    from torchtitan.components.tokenizer import build_hf_tokenizer
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader

    folder = tmp_path_factory.mktemp("texts")
    count = 8 if "epochs" in request.param else 80
    texts = [
        f"The {number}th sentence, and {number * 7919} words more. " * (1 + number % 5)
        for number in range(count)
    ]
    for file in range(2 * NUM_SLOTS):  # a stream is cut by files; each worker of each slot has one
        lines = [json.dumps({"text": text}) + "\n" for text in texts[file :: 2 * NUM_SLOTS]]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    shuffled = "shuffled" in request.param
    streaming = shuffled or "streamed" in request.param

    def load(path: str) -> Any:
        data = datasets.load_dataset(
            "json", data_files=f"{path}/*.jsonl", split="train", streaming=streaming
        )
        return data.shuffle(seed=1, buffer_size=2) if shuffled else data

    DATASETS["titan_ft_test"] = DatasetConfig(
        path=str(folder), loader=load, sample_processor=lambda s: s["text"]
    )
    config = JobConfig()
    config.model.hf_assets_path = resolve("titan_ft://tokenizer")
    config.training.dataset, config.training.seq_len, config.training.local_batch_size = (
        "titan_ft_test",
        16,
        2,
    )
    config.training.dataloader.num_workers = 2 if "workers" in request.param else 0
    tokenizer = build_hf_tokenizer(config)
    loaders = SlotLoaders(FaultTolerance(enable=True, group_size=NUM_SLOTS))
    loaders.build_own(
        functools.partial(build_text_dataloader, tokenizer=tokenizer, job_config=config), 0, 1
    )
    yield loaders.open
    del DATASETS["titan_ft_test"]


def commit(ledger: Ledger, reading: Reading) -> str:
    ledger.advance([reading.entry], readers=[(0, 0.0)])
    return reading.checksum


def straight(build: Build, slot: int, num_steps: int) -> list[str]:
    """Return the checksums of the steps of an undisturbed run."""
    ledger = Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    return [commit(ledger, feed.read(slot, 2)) for _ in range(num_steps)]


def test_another_process_continues_after_the_last_commit(build: Build) -> None:
    """A restarted group that has healed reads the same batches as an undisturbed one."""
    ledger, healed = Ledger(NUM_SLOTS), Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    sums = [commit(ledger, feed.read(1, 2)) for _ in range(3)]
    feed.read(1, 2)  # a batch that was read and not committed, as at a kill
    healed.load_state_dict(ledger.state_dict())
    feed = Feed(healed, build, iter)
    sums += [commit(healed, feed.read(1, 2)) for _ in range(3)]
    assert sums == straight(build, 1, 6)
    assert len(set(sums)) == 6


def test_uncommitted_batches_are_used_again(build: Build) -> None:
    """A repeated step has the very same batches, and reads nothing."""
    ledger = Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    commit(ledger, feed.read(0, 2))
    reading = feed.read(0, 2)
    assert feed.read(0, 2) is reading
    commit(ledger, reading)
    following = feed.read(0, 2)
    assert following.entry.first_batch == reading.entry.end
    assert [reading.checksum, following.checksum] == straight(build, 0, 3)[1:]


def test_the_steps_of_a_round_read_consecutive_batches(build: Build) -> None:
    """A round is committed as a whole. A void round is read again from its beginning."""
    ledger = Ledger(NUM_SLOTS)
    whole, feed = Feed(Ledger(NUM_SLOTS), build, iter).read(0, 6), Feed(ledger, build, iter)
    for _ in range(2):
        readings: list[Reading] = []
        for behind in (0, 2, 4):
            readings = merge([*readings, feed.read(0, 2, behind)])
        (reading,) = readings
        assert (reading.entry.first_batch, reading.entry.num_batches) == (0, 6)
        assert reading.checksum == whole.checksum
        assert not reading.batches, "batches would fill the memory in a long round"
    commit(ledger, reading)
    assert [each.read(0, 2).checksum for each in (feed, Feed(ledger, build, iter))] == straight(
        build, 0, 4
    )[3:] * 2


def test_reading_ahead_changes_nothing(build: Build) -> None:
    """Reading ahead reads the next step's batches, in a round too.

    Another group continues after the commit. Batches that another group has trained are void.
    """
    sums = straight(build, 0, 6)
    ledger = Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    for steps in (1, 2):
        readings = []
        for behind in range(0, 2 * steps, 2):
            readings.append(feed.read(0, 2, behind))
            feed.read_ahead([readings[-1]])
            feed.read_ahead([readings[-1]])  # this many and no more
            assert feed.read(0, 2, behind) is readings[-1]
        assert [reading.checksum for reading in readings] == sums[steps - 1 :][:steps]
        (whole,) = merge(readings)
        commit(ledger, whole)
    other = Feed(ledger, build, iter)
    assert commit(ledger, other.read(0, 2)) == sums[3]
    assert commit(ledger, other.read(0, 2)) == sums[4]
    assert feed.read(0, 2).checksum == sums[5]


@pytest.mark.parametrize("ahead", [True, False])
def test_the_end_of_the_data_is_raised_by_the_read_that_meets_it(ahead: bool) -> None:
    """A step that has its data does not see the end.

    Each later read raises it. Batches read ahead are read once.
    """
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(5)]
    pulled: list[int] = []

    def iterate(loader: Any) -> Iterator[Any]:
        for inputs, labels in loader:
            pulled.append(int(labels))
            yield inputs, labels
        raise EOFError

    ledger = Ledger(1)
    feed = Feed(ledger, lambda slot: Listed(batches), iterate)
    for last in (3, 4) if ahead else (1, 3):
        reading = feed.read(0, 2)
        if ahead:
            feed.read_ahead([reading])
            feed.read_ahead([reading])  # this many and no more
        assert pulled == list(range(last + 1))
        commit(ledger, reading)
    for _ in range(2):
        with pytest.raises(EOFError):
            feed.read(0, 2)
    assert pulled == list(range(5))


def test_batches_of_a_loader_without_a_state_are_not_skipped() -> None:
    """Batches that were read ahead are lost. The batches after them must not take their numbers."""
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(6)]

    class Forgetful(Listed):
        def state_dict(self) -> dict[str, Any]:
            if self._read > 2:
                raise OSError("no state")
            return super().state_dict()

    ledger = Ledger(1)
    feed = Feed(ledger, lambda slot: Forgetful(batches), iter)
    reading = feed.read(0, 2)
    feed.read_ahead([reading])
    commit(ledger, reading)
    for _ in range(2):
        with pytest.raises(OSError, match="no state"):
            feed.read(0, 2)


def test_it_follows_a_ledger_that_others_moved(build: Build) -> None:
    """Batches that this group read while another group trained its slot are void.

    A ledger may also go back.
    """
    ledger, others = Ledger(NUM_SLOTS), Ledger(NUM_SLOTS)
    feed, other_feed = Feed(ledger, build, iter), Feed(others, build, iter)
    sums = straight(build, 0, 5)
    begin = ledger.state_dict()
    commit(ledger, feed.read(0, 2))
    feed.read(0, 2)
    for _ in range(4):
        commit(others, other_feed.read(0, 2))
    ledger.load_state_dict(others.state_dict())
    assert feed.read(0, 2).checksum == sums[4]
    ledger.load_state_dict(begin)
    assert feed.read(0, 2).checksum == sums[0]


def test_a_dropped_slot_is_opened_again_where_it_ends(build: Build) -> None:
    """A group reads the slot of an absent group for a while, drops it, and takes it up again."""
    ledger = Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    sums = [commit(ledger, feed.read(1, 2)) for _ in range(2)]
    feed.close_all_but({0})
    sums += [commit(ledger, feed.read(1, 2)) for _ in range(2)]
    assert sums == straight(build, 1, 4)


def read_round(feed: Feed, slot: int, num_steps: int) -> list[Reading]:
    """Read a group's batches of a round of several steps.

    None of them is committed before the round's end.
    """
    readings: list[Reading] = []
    for _ in range(num_steps):
        behind = sum(reading.entry.num_batches for reading in readings)
        readings.append(feed.read(slot, 2, behind))
    return readings


def test_a_round_reads_on_after_its_own_steps(build: Build) -> None:
    """Each step has the next batches, and the commit counts them all. No loader is opened again."""
    ledger, opened = Ledger(NUM_SLOTS), []

    def build_once(slot: int) -> Any:
        opened.append(slot)
        return build(slot)

    feed = Feed(ledger, build_once, iter)
    sums = []
    for num_steps in (3, 1, 2):
        readings = read_round(feed, 1, num_steps)
        sums += [reading.checksum for reading in readings]
        (whole,) = merge(readings)
        assert whole.entry.first_batch == ledger.count_committed(1)
        commit(ledger, whole)
        assert ledger.count_committed(1) == whole.entry.first_batch + 2 * num_steps
    assert sums == straight(build, 1, 6)
    assert opened == [1]


def test_merged_readings_are_like_one_reading(build: Build) -> None:
    """Numbers, checksum and loader state are those of a single reading of all these batches."""
    rounds, single = Feed(Ledger(NUM_SLOTS), build, iter), Feed(Ledger(NUM_SLOTS), build, iter)
    of_slots = [read_round(rounds, slot, 3) for slot in (0, 1)]
    merged = merge([reading for step in zip(*of_slots, strict=True) for reading in step])
    assert [reading.entry.slot for reading in merged] == [0, 1]
    for reading in merged:
        whole = single.read(reading.entry.slot, 6)
        assert reading.describe() == whole.describe()
        loaders = [build(reading.entry.slot) for _ in range(2)]
        for loader, state in zip(loaders, (reading.entry.state, whole.entry.state), strict=True):
            load_loader(loader, state)
        following = [next(iter(loader)) for loader in loaders]
        assert torch.equal(following[0][1], following[1][1])
    assert merge([]) == []
    alone = rounds.read(0, 2, 6)
    assert [reading.describe() for reading in merge([alone])] == [alone.describe()]
    assert alone.batches
    assert not any(reading.batches for reading in [*merged, *merge([alone])]), (
        "batches of a long round would fill the memory"
    )


class Listed:
    """A loader of the batches of a list, in memory."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches, self._read = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self._read < len(self._batches):
            self._read += 1
            yield self._batches[self._read - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._read = state_dict["read"]


def test_only_dropped_slots_are_closed() -> None:
    """A slot that is read on keeps its loader. The others free their files and processes."""
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(4)]
    loaders: list[weakref.ref[Listed]] = []

    def build(slot: int) -> Listed:
        loader = Listed(batches)
        loaders.append(weakref.ref(loader))
        return loader

    ledger = Ledger(NUM_SLOTS)
    feed = Feed(ledger, build, iter)
    for slot in range(NUM_SLOTS):
        commit(ledger, feed.read(slot, 1))
    feed.close_all_but({0})
    gc.collect()
    assert [loader() is not None for loader in loaders] == [True, False]
    feed.read(0, 1)
    assert len(loaders) == NUM_SLOTS


def test_the_checksum_covers_all_inputs_and_labels() -> None:
    """One other number in any of them gives another checksum."""

    def checksum(numbers: list[int]) -> str:
        tensors = [torch.tensor([number]) for number in numbers]
        batches = [({"input": a, "positions": b}, c) for a, b, c in (tensors[:3], tensors[3:])]
        return Feed(Ledger(1), lambda slot: Listed(batches), iter).read(0, 2).checksum

    numbers = [1, 2, 3, 4, 5, 6]
    changed = [
        [9 if place == at else number for place, number in enumerate(numbers)] for at in range(6)
    ]
    assert len({checksum(each) for each in (numbers, *changed)}) == 7
    assert checksum(numbers) == checksum(list(numbers))


def opened(events: list[Any]) -> list[tuple[int, int, bool | None]]:
    return [(event.slot, event.first_batch, event.exact) for event in events]


def test_an_opening_reports_whether_the_data_continue(build: Build) -> None:
    """The event compares the first batch with the one that was read ahead.

    Without one, the answer is unknown. The shard is that of the whole job.
    """
    ledger, events = Ledger(NUM_SLOTS), []  # type: ignore[var-annotated]
    feed = Feed(ledger, build, iter, events.append)
    for _ in range(2):
        reading = feed.read(1, 2)
        feed.read_ahead([reading])
        commit(ledger, reading)
    other = Feed(ledger, build, iter, events.append)
    commit(ledger, other.read(1, 2))
    Feed(ledger, build, iter, events.append).read(1, 2)
    assert opened(events) == [(1, 0, None), (1, 4, True), (1, 6, None)]
    assert [(event.shard, event.num_shards) for event in events] == [(1, NUM_SLOTS)] * 3


def test_another_batch_than_the_one_that_follows(caplog: pytest.LogCaptureFixture) -> None:
    """The log and the event name a loader that does not continue.

    The way in which the first reader was closed makes no difference.
    """
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(20)]

    class Skipping(Listed):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._read = state_dict["read"] + 1

    ledger, events = Ledger(1), []  # type: ignore[var-annotated]
    feed = Feed(ledger, lambda slot: Skipping(batches), iter, events.append)
    reading = feed.read(0, 2)
    feed.read_ahead([reading])
    commit(ledger, reading)
    joiner = Ledger(1)
    joiner.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    resumed = Ledger(1)
    resumed.load_shards(ledger.shards())
    for healed in (joiner, resumed):
        Feed(healed, lambda slot: Skipping(batches), iter, events.append).read(0, 1)
    assert opened(events) == [(0, 0, None), (0, 2, False), (0, 2, False)]
    assert (
        "slot 0 was opened at batch 2, and this batch is not the one that follows there"
        in caplog.text
    )


def test_batches_of_another_size_prove_nothing() -> None:
    """A resume may have another batch size or sequence length.

    It continues at the same place, with other batches.
    """
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(20)]
    pairs = [({"input": torch.tensor([n, n + 1])}, torch.tensor([n, n + 1])) for n in range(20)]
    ledger, events = Ledger(1), []  # type: ignore[var-annotated]
    feed = Feed(ledger, lambda slot: Listed(batches), iter)
    reading = feed.read(0, 2)
    feed.read_ahead([reading])
    commit(ledger, reading)
    Feed(ledger, lambda slot: Listed(pairs), iter, events.append).read(0, 2)
    assert opened(events) == [(0, 2, None)]


def test_a_round_has_the_mark_after_its_last_step() -> None:
    """Merged readings have the mark of the last one."""
    batches = [({"input": torch.tensor([number])}, torch.tensor([number])) for number in range(20)]
    feed = Feed(Ledger(1), lambda slot: Listed(batches), iter)
    readings: list[Reading] = []
    for behind in (0, 2, 4):
        reading = feed.read(0, 2, behind)
        feed.read_ahead([reading])
        readings = merge([*readings, reading])
    (whole,) = readings
    assert whole.entry.num_batches == 6
    assert whole.entry.following == mark(batches[6])
