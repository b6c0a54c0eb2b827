# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's actions for an update of one step, without a model. tests/integration has whole
runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from titan_ft.config import FaultTolerance
from titan_ft.engine.strategy import Departure, StepStrategy
from titan_ft.engine.work import Work


def test_an_update_is_clipped_stepped_and_counted() -> None:
    """In this order, at the LR for the groups that took part.

    A background save has copied the weights before.
    """
    done: list[Any] = []
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    class Optimizers(list[torch.optim.Optimizer]):
        def step(self) -> None:
            done.append(f"step at {self[0].param_groups[0]['lr']}")

    strategy = StepStrategy.__new__(StepStrategy)
    vars(strategy).update(
        _config=FaultTolerance(group_size=4, lr_policy="linear"),
        _training=SimpleNamespace(
            beat=lambda: None,
            clip_gradients=lambda: done.append("clip") or torch.tensor(3.0),
            await_staging=lambda: done.append("await staging"),
            optimizers=Optimizers([optimizer]),
            lr_schedulers=SimpleNamespace(step=lambda: done.append("schedule")),
        ),
        _counters=SimpleNamespace(advance=lambda update: done.append(f"count {update.tokens}")),
        work=Work(3, lr=0.5),
    )
    sums: Any = SimpleNamespace(is_copy=False, write=lambda scale: done.append(f"write x {scale}"))
    update: Any = SimpleNamespace(sums=sums, scale=2.0, slots=[0, 1], tokens=7)
    assert strategy.apply(update)() == 3.0
    assert done == ["write x 2.0", "clip", "await staging", "step at 0.25", "schedule", "count 7"]
    assert strategy.work.lr == 0.25
    sums.is_copy = True  # a replay: the LR belongs to no update of this rank's work
    strategy.apply(update)
    assert strategy.work.lr == 0.25


def test_a_step_that_is_discarded_leaves_no_batches() -> None:
    """The batches stay in the feed.

    Another group has read them as well, or this group reads them again.
    """
    cleared: list[bool] = []
    strategy = StepStrategy.__new__(StepStrategy)
    readings: list[Any] = ["a batch"]
    vars(strategy).update(
        _training=SimpleNamespace(clear_gradients=lambda: cleared.append(True)),
        work=SimpleNamespace(readings=readings),
    )
    strategy.discard()
    assert (cleared, readings) == ([True], [])


def test_a_group_that_leaves_names_no_batches_of_a_step() -> None:
    """Another group reads the one batch of a step. Only rounds of several steps name theirs."""
    strategy = StepStrategy.__new__(StepStrategy)
    assert strategy.describe_departure() == Departure("SIGTERM", in_order=True)
    assert strategy.find_uncommitted() == []
