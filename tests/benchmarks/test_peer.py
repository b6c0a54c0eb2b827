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
    """What `observed` derives from: a torchtitan trainer with an optimizer that steps when the vote passes."""

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
    """One try is lost; equal weights have equal digests, which come only with a commit at each second step."""
    log = EventLog(tmp_path / "events.jsonl", replica=0, rank=0, attempt=0)
    trainer = peer.observed(FakeTrainer, log, 2)([True, False, True, True])
    for _ in range(4):
        trainer.train_step(None)
    events = [untyped(event) for event in read_events(tmp_path)]
    assert [(event["step"], event["committed"]) for event in events] == [(1, True), (2, False), (2, True), (3, True)]
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
