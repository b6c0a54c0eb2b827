# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The observed trainer of the peer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import peer
from tests.event_builder import untyped
from titan_ft.run.log import EventLog, read_events


class FakeTrainer:
    """Base class for `observed`: a torchtitan trainer whose optimizer steps if the vote passes."""

    def __init__(self, job_config: list[bool]) -> None:
        self.votes = iter(job_config)
        self.step = 0
        weight = torch.nn.Parameter(torch.ones(4))
        self.model_parts = [torch.nn.ParameterList([weight])]
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.SGD([weight], lr=0.5)])
        manager = SimpleNamespace(current_step=lambda: self.step, is_participating=lambda: True)
        self.ft_manager = SimpleNamespace(manager=manager)

    def forward_backward_step(self, scale: float) -> torch.Tensor:
        loss = scale * self.model_parts[0][0].sum()
        loss.backward()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self.optimizers.optimizers[0].zero_grad()
        for scale in (1.0, 2.0):
            self.forward_backward_step(scale)
        if next(self.votes):
            self.optimizers.optimizers[0].step()
            self.step += 1


def test_the_observed_trainer_tells_votes_losses_and_digests(tmp_path: Path) -> None:
    """One attempt is lost. Equal weights have equal digests, which are reported at every second
    committed step.
    """
    log = EventLog(tmp_path / "events.jsonl", replica=0, rank=0, attempt=0)
    trainer = peer.observed(FakeTrainer, log, 2)([True, False, True, True])
    for _ in range(4):
        trainer.train_step(None)
    events = [untyped(event) for event in read_events(tmp_path)]
    assert [(event["step"], event["committed"]) for event in events] == [
        (1, True),
        (2, False),
        (2, True),
        (3, True),
    ]
    assert [event["contributed"] for event in events] == [True, False, True, True]
    assert [event["own_loss"] for event in events][:2] == [12.0, pytest.approx(-6.0)]
    assert ["digest" in event for event in events] == [False, False, True, False]
    equal, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    equal.load_state_dict(other.state_dict())
    assert peer.digest([equal]) == peer.digest([other])
    assert peer.digest([equal]) != peer.digest([torch.nn.Linear(2, 2)])


def test_the_observe_flag_is_not_torchtitans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peer.py", "--observe-every=5", "--job.config_file=x"])
    assert peer._take_observe_flag() == 5
    assert sys.argv == ["peer.py", "--job.config_file=x"]
    assert peer._take_observe_flag() == 0


class FakeSemiSyncTrainer(FakeTrainer):
    """A trainer with torchft's DiLoCo: it votes after each second step, and may heal before."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config.votes)
        self.job_config, self.heals, self.made = job_config, iter(job_config.heals), 0
        manager = self.ft_manager.manager
        manager.register_state_dict_fn = lambda name, load, save: setattr(self, "load", load)
        manager.should_commit = lambda: next(self.votes)

    def train_step(self, data_iterator: Any) -> None:
        self.made += 1
        if self.made % 2 == 0:
            if next(self.heals):
                self.load({})  # type: ignore[attr-defined]
            self.step += self.ft_manager.manager.should_commit()


def test_the_observed_trainer_tells_of_rounds(tmp_path: Path) -> None:
    """A round that healed is committed without this rank's own training."""
    log = EventLog(tmp_path / "events.jsonl", replica=0, rank=0, attempt=0)
    config = SimpleNamespace(votes=[True, False, True], heals=[True, False, False])
    config.fault_tolerance, config.validation = (
        SimpleNamespace(sync_steps=2),
        SimpleNamespace(enable=False),
    )
    trainer = peer.observed_rounds(FakeSemiSyncTrainer, log, 2)(config)
    for _ in range(7):
        trainer.train_step(None)
    events = [untyped(event) for event in read_events(tmp_path)]
    assert sum(event["event"] == "inner_step_made" for event in events) == 7
    tries = [event for event in events if event["event"] == "step_tried"]
    assert [(e["step"], e["committed"], e["contributed"]) for e in tries] == [
        (1, True, False),
        (2, False, False),
        (2, True, True),
    ]
    assert [event["inner_steps"] for event in tries] == [2, 2, 2]
    assert ["digest" in event for event in tries] == [False, False, True]
