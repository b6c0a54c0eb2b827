# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The settings of optimizers and LR schedules after a checkpoint of a launch with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ft.host import cpu

cpu.prepare()

from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.config import LRScheduler  # noqa: E402

from titan_ft.training import hyperparameters  # noqa: E402
from titan_ft.training.hyperparameters import Hyperparameters  # noqa: E402

STEPS = 5


class Training:
    """A model of two parts with torchtitan's optimizers and schedule."""

    def __init__(self, *, steps: int = 20, warmup_steps: int = 2, **settings: Any) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.parts = [
            torch.nn.ModuleDict({f"layer{number}": layer}) for number, layer in enumerate(layers)
        ]
        given = {
            "lr": 1e-3,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "foreach": True,
            "fused": False,
        }
        self.optimizers = OptimizersContainer(self.parts, torch.optim.AdamW, {**given, **settings})
        self.schedulers: LRSchedulersContainer = build_lr_schedulers(
            self.optimizers, LRScheduler(warmup_steps=warmup_steps), steps
        )
        self.hyperparameters = Hyperparameters(self.optimizers, self.schedulers)

    def step(self) -> None:
        """Make a step."""
        first, last = (next(part.children()) for part in self.parts)
        last(first(torch.ones(1, 3))).sum().backward()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()

    @property
    def states(self) -> dict[str, Any]:
        """Its states in a checkpoint beside the weights."""
        return {"optimizer": self.optimizers, "lr_scheduler": self.schedulers}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, without the parameters."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ]


def resume(tmp_path: Path, **settings: Any) -> tuple[Training, Training]:
    """Return a training after a few steps, and one with other settings that has loaded its
    state.
    """
    earlier, now = Training(), Training(**settings)
    for _ in range(STEPS):
        earlier.step()
    dcp.save(earlier.states, checkpoint_id=tmp_path)
    dcp.load(now.states, checkpoint_id=tmp_path)
    return earlier, now


def test_settings_of_this_launch_count(tmp_path: Path) -> None:
    """torchtitan goes on with those of the checkpoint. The moments, and the place in the schedule,
    are its.
    """
    settings = {"lr": 5e-3, "betas": (0.5, 0.6), "eps": 1e-6, "weight_decay": 0.0, "foreach": False}
    earlier, now = resume(tmp_path, **settings)
    assert [group["lr"] for group in now.groups] == [group["lr"] for group in earlier.groups]
    now.hyperparameters.restore()
    for group, before in zip(now.groups, earlier.groups, strict=True):
        assert {name: group[name] for name in settings if name != "lr"} == {
            name: value for name, value in settings.items() if name != "lr"
        }
        assert group["lr"] == pytest.approx(5 * before["lr"])
        assert group["initial_lr"] == 5e-3
    assert now.schedulers.schedulers[0].get_last_lr() == [now.groups[0]["lr"]]
    assert {scheduler.last_epoch for scheduler in now.schedulers} == {STEPS}
    first = next(iter(now.optimizers)).state_dict()["state"][0]
    assert float(first["step"]) == STEPS
    whole = Training(**settings)
    for _ in range(STEPS + 1):
        whole.step()
    now.step()
    assert [group["lr"] for group in now.groups] == [group["lr"] for group in whole.groups]


def test_a_longer_run_has_its_own_schedule_at_once(tmp_path: Path) -> None:
    """Not from the second step on: the LR of the first one was computed by the schedule of the
    earlier launch.
    """
    _, now = resume(tmp_path, steps=40)
    now.hyperparameters.restore()
    whole = Training(steps=40)
    for _ in range(STEPS):
        whole.step()
    assert now.groups == whole.groups


def test_nothing_changes_without_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is made with the very numbers of the checkpoint, and no line is logged."""
    lines: list[str] = []
    monkeypatch.setattr(hyperparameters.logger, "warning", lines.append)
    earlier, now = resume(tmp_path)
    loaded = now.groups
    now.hyperparameters.restore()
    assert now.groups == loaded == earlier.groups
    assert lines == []


def test_each_change_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without --resume, as on a cluster."""
    lines: list[str] = []
    monkeypatch.setattr(hyperparameters.logger, "warning", lines.append)
    _, now = resume(tmp_path, weight_decay=0.5)
    now.hyperparameters.restore()
    assert lines == [
        "optimizer: the checkpoint was made with weight_decay = 0.1; from here on it is 0.5"
    ]


def test_what_an_optimizer_of_the_user_s_keeps_stays_loaded() -> None:
    """Entries of a param group that are none of torchtitan's settings may be a state."""
    made = Training()
    (group, *_) = [group for optimizer in made.optimizers for group in optimizer.param_groups]
    group["weight_sum"] = 7.0
    made.hyperparameters.restore()
    assert group["weight_sum"] == 7.0


def test_a_scheduler_of_the_user_s_keeps_what_it_has_loaded() -> None:
    """Without torchtitan's function of the step, the origin of its LR is unknown."""
    made = Training()
    optimizer = next(iter(made.optimizers))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    kept = Hyperparameters(made.optimizers, [scheduler])
    scheduler.base_lrs = [7.0]
    kept.restore()
    assert scheduler.base_lrs == [7.0]
