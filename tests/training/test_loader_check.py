# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rehearsal of a data loader's openings: exact, or why not, and nothing of the run is changed
by it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from datasets.iterable_dataset import ExamplesIterable
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from titan_ft.config import ConfigError
from titan_ft.run.events import LoaderChecked
from titan_ft.training import loader_check
from titan_ft.training.loader_check import check_loader, is_transparent

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def batch(number: int) -> Batch:
    return {"input": torch.tensor([number])}, torch.tensor([number])


class Counting:
    """Gives the batches 0, 1, 2, ..."""

    length = 1000

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.next < self.length:
            self.next += 1
            yield batch(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Forgetful(Counting):
    """Has no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Skipping(Counting):
    """Loses a batch at each opening."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"] + 1


class LosesTheSecondTime(Counting):
    """Goes on exactly once: its state is then counted from where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self._opened_at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next - self._opened_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = self._opened_at = state["next"]


class Unseeded(Counting):
    """Has its own order each time it is built."""

    def __iter__(self) -> Iterator[Batch]:
        order = list(range(self.length))
        random.Random().shuffle(order)
        for number in order[self.next :]:
            self.next += 1
            yield batch(number)


class Augmented(Counting):
    """Draws from the process's generator, whose state is not in its own."""

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in super().__iter__():
            yield {"input": inputs["input"] + torch.rand(1)}, labels


class Nothing(Counting):
    length = 2


class Short(Counting):
    """Ends while two loaders are compared."""

    length = 5


class Reshuffling(Counting):
    """Shuffles each epoch of 12 batches; its state has the order and the place in it, but no
    generator.

    If it is opened in its first epoch, its generator happens to be right.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._order = self._random.sample(range(12), 12)
        self._place = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self._place == len(self._order):
                self._order, self._place = self._random.sample(range(12), 12), 0
            self._place += 1
            yield batch(self._order[self._place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self._order), "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._place = list(state["order"]), state["place"]


class LosesLaterEpochs(Counting):
    """Starts over with its first batch if its state is of a later epoch than the first one, of 12
    batches.
    """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"] if state["next"] < 12 else 0


@pytest.mark.parametrize(("loader", "batches"), [(Counting, 130), (Short, 3)])
def test_an_exact_loader(loader: type[Counting], batches: int) -> None:
    found = check_loader(loader)
    assert (found.exact, found.batches, found.reason) == (True, batches, "")
    assert found.loader.endswith(loader.__name__)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (Forgetful, "opened again after batch 2, it gave another batch 3"),
        (Skipping, "opened again after batch 2, it gave another batch 3"),
        (LosesTheSecondTime, "opened again after batch 4, it gave another batch 5"),
        (Reshuffling, "opened again after batch 68, it gave another batch 73"),
        (LosesLaterEpochs, "opened again after batch 68, it gave another batch 69"),
        (Unseeded, "opened again after batch 2, it gave another batch 3"),
        (Augmented, "opened again after batch 2, it gave another batch 3"),
        (Nothing, "its data end with batch 2, before anything could be compared"),
    ],
)
def test_a_loader_that_does_not_go_on_exactly(loader: type[Counting], reason: str) -> None:
    """The first batch that differs is named; the second opening counts as well."""
    found = check_loader(loader)
    assert (found.exact, found.reason) == (False, reason)


class Stateless(torch.utils.data.IterableDataset[Any]):
    """A data set without a state of its own."""

    def __iter__(self) -> Iterator[Any]:
        return map(batch, itertools.count())


class Stateful(Stateless):
    """A data set with one."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count(self._next):
            self._next = number + 1
            yield batch(number)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_of_torchdata(workers: int) -> None:
    """torchdata 0.11 skips too much of a data set without a state when it is opened for the second
    time.
    """

    def check(data: type[Stateless]) -> LoaderChecked:
        return check_loader(lambda: StatefulDataLoader(data(), batch_size=2, num_workers=workers))

    found = check(Stateful)
    assert found.exact
    assert found.loader.startswith(
        "torchdata.stateful_dataloader.stateful_dataloader.StatefulDataLoader of "
    )
    assert found.loader.endswith("Stateful")
    assert check(Stateless).reason == "opened again after batch 4, it gave another batch 5"


def test_a_slow_loader_is_compared_as_far_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches at least. A loader of 20 ms a batch would delay each start by 6 s otherwise."""
    now = 0.0
    number_read = 0
    monkeypatch.setattr(loader_check.time, "monotonic", lambda: now)

    def check(seconds: float) -> int:
        class Slow(Counting):
            def __iter__(self) -> Iterator[Batch]:
                nonlocal now, number_read
                for each in super().__iter__():
                    now += seconds
                    number_read += 1
                    yield each

        found = check_loader(Slow)
        assert found.exact
        return found.batches

    assert check(10.0) == 4
    assert number_read == 10
    begin, number_read = now, 0
    assert 4 < check(0.02) < 20
    assert now - begin < 1.1


class Opaque(IterableDataset):
    """A stream of a user's own class."""


def text_loader(
    data: Any, of: type[HuggingFaceTextDataset] = HuggingFaceTextDataset, **options: Any
) -> Any:
    """Return torchtitan's unread loader of text over `data`."""
    dataset = of.__new__(of)
    dataset._data = data
    return ParallelAwareDataloader(dataset, dp_rank=0, dp_world_size=1, batch_size=1, **options)


def test_only_text_over_known_classes_is_transparent() -> None:
    """Of any other loader the first batches prove nothing of the later ones."""
    documents = Dataset.from_dict({"text": ["a", "b", "c"]})
    stream = documents.to_iterable_dataset()
    mixed = interleave_datasets(
        [stream.shuffle(seed=1, buffer_size=2).map(dict), stream.filter(bool)]
    )
    for data in (documents, stream, mixed, split_dataset_by_node(mixed, 0, 2)):
        assert is_transparent(text_loader(data))

    class OwnText(HuggingFaceTextDataset):
        pass

    class OwnStep(ExamplesIterable):
        pass

    own_step = IterableDataset(OwnStep(lambda: iter([("key", {"text": "a"})]), {}))
    for number, loader in enumerate(
        [
            text_loader(Opaque(stream._ex_iterable)),
            text_loader(own_step),
            text_loader(own_step.map(dict)),
            text_loader(interleave_datasets([stream, own_step])),
            text_loader(documents, of=OwnText),
            text_loader(documents, collate_fn=list),
            StatefulDataLoader(Stateful(), batch_size=1),
            Counting(),
        ]
    ):
        assert not is_transparent(loader), number
    assert check_loader(Counting).transparent is False


def test_generators_are_as_before() -> None:
    """Stock torchtitan draws the same numbers afterwards, although the loaders have drawn some."""

    class Drawing(Counting):
        def __iter__(self) -> Iterator[Batch]:
            for each in super().__iter__():
                torch.rand(1), random.random(), np.random.rand()
                yield each

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    expected = draw()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    check_loader(Drawing)
    assert draw() == expected


class CannotSave(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class CannotLoad(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epoch")


class HoldsGenerator(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"rng": np.random.default_rng(0)}


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (CannotSave, r"CannotSave\) must save its state, .* got NotImplementedError"),
        (
            CannotLoad,
            r"CannotLoad\) must go on from a state that it has saved, .* got KeyError: 'epoch'",
        ),
        (HoldsGenerator, r"got numpy.random._generator.Generator at \['rng'\]"),
    ],
)
def test_a_loader_that_no_group_could_come_back_with_is_refused(
    loader: type[Counting], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as told:
        check_loader(loader)
    assert "\n" not in str(told.value)
