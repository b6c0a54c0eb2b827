# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outer model: changes, updates, checkpoints, and what of it is in the state that heals."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan_ft import device
from titan_ft.config import OuterOptimizer
from titan_ft.replica.outer import OuterModel, OuterState, set_lr

DILOCO = OuterOptimizer(0.7, 0.9, nesterov=True)
MEAN = OuterOptimizer(1.0, 0.0, nesterov=False)


class Rank:
    """One rank with a small model, one parameter of which is frozen, and its inner optimizer."""

    def __init__(self, settings: OuterOptimizer = DILOCO, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        self.model[1].bias.requires_grad = False
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda step: 1 / (step + 1))
        self.outer = OuterModel([self.model], settings)
        self.counters: dict[str, Any] = {}
        stand_ins: dict[str, Any] = {
            "lr_schedulers": self.scheduler,
            "counters": SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None),
        }
        self.state = OuterState(
            [self.model], [self.inner], **stand_ins, outer=self.outer, on_load=self.outer.restore_model
        )

    def train(self, steps: int = 1) -> None:
        """Make steps of its own."""
        for number in range(steps):
            self.inner.zero_grad()
            self.model(torch.full((4, 3), 1.0 + number)).square().sum().backward()
            self.inner.step()
            self.scheduler.step()

    def update(self) -> None:
        """Make an outer update of its own change alone."""
        self.outer.take_changes(1.0)
        self.outer.step()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_the_mean_of_one_group_is_what_it_has_trained() -> None:
    """LocalSGD with one group is training: nothing is lost on the way through the anchors."""
    rank = Rank(MEAN)
    rank.train(3)
    trained = rank.weights()
    rank.update()
    for weight, expected in zip(rank.weights(), trained, strict=True):
        torch.testing.assert_close(weight, expected)


def test_an_update_waits_for_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange copies them from the device without waiting."""
    rank = Rank(MEAN)
    rank.outer.take_changes(1.0)
    before = rank.weights()

    def arrive() -> None:
        for anchor in rank.outer.anchors:
            assert anchor.grad is not None
            anchor.grad.fill_(1.0)
        monkeypatch.undo()

    monkeypatch.setattr(device, "synchronize", arrive)
    rank.outer.step()
    assert torch.equal(rank.weights()[0], before[0] - 1.0)


def test_the_digest_is_of_what_all_groups_have_alike() -> None:
    """Weights and moments of its own steps change nothing of it; an update does, and so does a frozen parameter."""
    rank = Rank()
    digests = [rank.state.digest()]
    rank.train(2)
    assert rank.state.digest() == digests[0]
    rank.update()
    digests.append(rank.state.digest())
    rank.model[1].bias.data.add_(1.0)
    digests.append(rank.state.digest())
    assert len(set(digests)) == 3


def test_a_joiner_begins_its_round_where_its_donor_began() -> None:
    """Whatever steps the donor has made since, and the joiner before; and it has the donor's moments."""
    donor, joiner = Rank(), Rank(seed=1)
    donor.train(2)
    donor.update()
    began = donor.weights()
    donor.train(2)
    joiner.train(3)
    joiner.state.load(donor.state.copy(1, 7))
    assert same(joiner.weights(), began)
    assert joiner.state.digest() == donor.state.digest()
    for mine, its in zip(joiner.inner.state.values(), donor.inner.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


@pytest.mark.parametrize("updates", [0, 2])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(updates: int) -> None:
    """The model's weights are the anchors; before the first update there is no momentum yet."""
    first, second = Rank(), Rank(seed=1)
    for _ in range(updates):
        first.train()
        first.update()
    saved, weights = copy.deepcopy(first.outer.state_dict()), first.weights()
    with torch.no_grad():
        for parameter, weight in zip(second.model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    second.outer.take_model()
    second.outer.load_state_dict(saved)
    for rank in (first, second):
        rank.inner.state.clear()
        set_lr(SimpleNamespace(schedulers=[rank.scheduler]), updates)
        rank.train()
        rank.update()
    assert same(first.weights(), second.weights())
    assert first.state.digest() == second.state.digest()


def test_without_momentum_there_is_no_state_to_save() -> None:
    """Nor one that a checkpoint could be said to lack."""
    assert Rank(DILOCO).outer.has_state
    assert not Rank(MEAN).outer.has_state


def test_the_schedule_stands_where_the_round_does() -> None:
    """Whether the group made fewer steps than the others, or holds a copy of the end of a round."""
    rank = Rank()
    rank.train(3)
    schedulers = SimpleNamespace(schedulers=[rank.scheduler])
    for step in (3, 10, 2):
        set_lr(schedulers, step)
        assert rank.scheduler.get_last_lr() == [pytest.approx(0.1 / (step + 1))]
        assert rank.inner.param_groups[0]["lr"] == pytest.approx(0.1 / (step + 1))
