# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Stock torchtitan goes on from a checkpoint of ours, in the very next batches, and we from one of
its.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.checkpoint_run import Run, assert_equal
from titan_ft.host import cpu

cpu.prepare()

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.config import Checkpoint  # noqa: E402

from titan_ft.engine.feed import Feed  # noqa: E402
from titan_ft.training.checkpoint import states as checkpoint_states  # noqa: E402

MakeRun = Callable[..., Run]


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """Every `step`-th number from `first` on, with a place to go on from, as torchtitan's
    datasets.
    """

    def __init__(self, first: int, step: int) -> None:
        self._next, self._step = first, step

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            number = self._next
            self._next += self._step
            yield {"input": torch.tensor([number])}, torch.tensor([number + 1])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]


def make_loader(rank: int, world: int = 2) -> ParallelAwareDataloader:
    return ParallelAwareDataloader(
        Numbers(rank, world), dp_rank=rank, dp_world_size=world, batch_size=2
    )


def inputs(batches: Iterator[Any], number: int) -> list[list[int]]:
    return [next(batches)[0]["input"].flatten().tolist() for _ in range(number)]


def read(run: Run, feed: Feed, slot: int, number: int) -> list[list[int]]:
    """Train batches of a slot."""
    reading = feed.read(slot, number)
    run.ledger.advance([reading.entry], [])
    return [batch["input"].flatten().tolist() for batch, _ in reading.batches]


def make_stock(
    run: Run, base: Path, loader: ParallelAwareDataloader, **more: Any
) -> CheckpointManager:
    """Return stock torchtitan's checkpoints with the state of `run`."""
    return CheckpointManager(
        dataloader=loader,
        model_parts=[run.model],
        optimizers=run.optimizers,
        lr_schedulers=run.schedulers,
        states={"train_state": run.progress},
        checkpoint_config=Checkpoint(enable=True, interval=1, last_save_model_only=False, **more),
        sd_adapter=None,
        base_folder=str(base),
    )


def save_in_mid_data(make_run: MakeRun, read_of: dict[int, int]) -> tuple[Run, Feed]:
    """Save step 5, with so many batches read of each slot."""
    run = make_run()
    feed = Feed(run.ledger, make_loader, iter)
    for slot, number in read_of.items():
        read(run, feed, slot, number)
    run.progress.step = 5
    run.position.set_step(5)
    run.checkpoints.save(5)
    return run, feed


def test_stock_goes_on_with_the_very_next_batches(make_run: MakeRun, tmp_path: Path) -> None:
    """On as many data ranks as there are shards; all other state continues, too."""
    run, feed = save_in_mid_data(make_run, {0: 3, 1: 4})
    for slot in (0, 1):
        other = make_run(slot=slot)
        with torch.no_grad():
            other.model.weight.fill_(7.0)
        loader = make_loader(slot)
        stock = make_stock(other, tmp_path, loader)
        assert stock.load()
        stock.close()
        assert_equal(other.model.weight, run.model.weight)
        assert other.progress.step == 5
        assert inputs(iter(loader), 3) == read(run, feed, slot, 3)


def test_stock_begins_the_data_of_a_slot_that_was_never_read(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Its group has been absent from the beginning."""
    save_in_mid_data(make_run, {0: 3})
    loader = make_loader(1)
    stock = make_stock(make_run(), tmp_path, loader)
    assert stock.load()
    stock.close()
    assert inputs(iter(loader), 2) == [[1, 3], [5, 7]]


def test_stock_refuses_another_number_of_data_ranks(make_run: MakeRun, tmp_path: Path) -> None:
    """As it does with checkpoints of its own; without the loader it continues."""
    run, _ = save_in_mid_data(make_run, {0: 3, 1: 3})
    stock = make_stock(make_run(), tmp_path, make_loader(0, 4))
    with pytest.raises(AssertionError, match="dp_degree is inconsistent"):
        stock.load()
    stock.close()
    other = make_run()
    stock = make_stock(other, tmp_path, make_loader(3, 4), exclude_from_loading=["dataloader"])
    assert stock.load()
    stock.close()
    assert_equal(other.model.weight, run.model.weight)


def test_ours_reads_no_pickle(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The author of a stock checkpoint could run code here with it; our own keys have the same
    states.
    """
    run, feed = save_in_mid_data(make_run, {0: 3, 1: 4})

    class Mine:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("the pickle was read",))

    pickled = pickle.dumps(Mine())
    monkeypatch.setattr(checkpoint_states, "pickle", SimpleNamespace(dumps=lambda _: pickled))
    run.progress.step = 10
    run.position.set_step(10)
    run.checkpoints.save(10)
    other = make_run()
    assert other.load()
    again = Feed(other.ledger, make_loader, iter)
    for slot in (0, 1):
        assert read(other, again, slot, 3) == read(run, feed, slot, 3)


def test_a_loader_that_stock_cannot_have_fails_no_save(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the user's that cannot be unpacked: one line, and our own keys are there."""
    said: list[str] = []
    monkeypatch.setattr(checkpoint_states.logger, "warning", said.append)

    def refuse(*_: Any) -> None:
        raise TypeError("of another kind\nwith a second line")

    monkeypatch.setattr(checkpoint_states, "load_loader", refuse)
    run, feed = save_in_mid_data(make_run, {0: 3, 1: 4})
    assert (
        said[0] == "stock torchtitan will not find its place in shard 0: TypeError: of another kind"
    )
    monkeypatch.undo()
    other = make_run()
    assert other.load()
    assert read(other, Feed(other.ledger, make_loader, iter), 1, 2) == read(run, feed, 1, 2)


def test_ours_goes_on_from_stock_with_new_data(make_run: MakeRun, tmp_path: Path) -> None:
    """State yes, data no, and it is said: its pickles are not read."""
    run = make_run()
    for _ in range(3):
        run.step()
    loader = make_loader(0)
    inputs(iter(loader), 3)
    stock = make_stock(run, tmp_path, loader)
    stock.save(3, last_step=True)
    stock.close()
    other = make_run()
    assert other.load()
    assert_equal(other.model.weight, run.model.weight)
    assert other.progress.step == 3
    (reset,) = other.events.named("data_reset")
    assert "not of a fault-tolerant run" in reset["reason"]


def test_tokens_are_counted_as_each_of_them_counts(make_run: MakeRun, tmp_path: Path) -> None:
    """Stock counts those of a data rank, we those of the job: each would have the other's count,
    times its ranks.
    """
    run, _ = save_in_mid_data(make_run, {0: 3, 1: 3})
    run.progress.ntokens_seen = 1001
    run.position.set_step(10)
    run.progress.step = 10
    run.checkpoints.save(10)
    other = make_run()
    loader = make_loader(0)
    inputs(iter(loader), 1)
    stock = make_stock(other, tmp_path, loader, folder="checkpoint")
    assert stock.load()
    assert other.progress.ntokens_seen == 500
    assert make_run_and_load(make_run).progress.ntokens_seen == 1001
    other.progress.step = 11
    stock.save(11, last_step=True)
    stock.close()
    assert make_run_and_load(make_run).progress.ntokens_seen == 1000


def make_run_and_load(make_run: MakeRun) -> Run:
    run = make_run()
    assert run.load()
    return run
