# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainer of a semi-synchronous method does in a round, without a model; whole runs are in integration/."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft import device

device.prepare()  # before anything imports torchtitan, which reads the device at import

from torchtitan.components.dataloader import DataloaderExhaustedError  # noqa: E402

from titan_ft import semi_sync  # noqa: E402
from titan_ft.config import ConfigError  # noqa: E402
from titan_ft.replica.feed import Reading  # noqa: E402
from titan_ft.replica.ledger import Entry  # noqa: E402
from titan_ft.replica.round import Contribution  # noqa: E402
from titan_ft.semi_sync import SemiSyncTrainer  # noqa: E402
from titan_ft.trainer import ReplicaTrainer  # noqa: E402
from titan_ft.training.step_log import Work  # noqa: E402

TOKENS = 10  # of a step


class Round:
    """A trainer in a round of four steps, the third of its run: notes what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, early: bool = False, awaited: int = 99, data: int = 99):
        self.steps: list[int] = []
        self.changes: list[float] = []
        self.lr_steps: list[int] = []
        self.armed_at: list[int] = []
        monkeypatch.setattr(semi_sync, "set_lr", lambda schedulers, step: self.lr_steps.append(step))
        self.trainer = trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
        self.replica = SimpleNamespace(early=early, awaited=lambda: len(self.steps) >= awaited)
        self.data = data
        vars(trainer).update(
            _steps_per_round=4,
            _late=False,
            _replica=self.replica,
            _position=SimpleNamespace(step=2),
            _work=Work(9, lr=0.1),
            _nominal_tokens=100,
            _outer=SimpleNamespace(take_changes=self.changes.append),
            _leave_if_told=lambda remaining: None,
            _make_step=self._make_step,
            job_config=SimpleNamespace(training=SimpleNamespace(steps=100)),
            lr_schedulers=None,
            gc_handler=SimpleNamespace(run=lambda step: None),
        )

    def _make_step(self, slots: Any) -> None:
        trainer = self.trainer
        if len(self.steps) == self.data:
            raise DataloaderExhaustedError
        self.steps.append(trainer.step)
        made = len(self.steps)
        trainer._work.inner_steps = made
        trainer._work.readings = [Reading(Entry(0, 8, made, b"state"), [], "0")]
        trainer._made = trainer._made.plus(Contribution(TOKENS, TOKENS, seconds=0.5))

    def train(self) -> Contribution:
        return self.trainer._train([0], lambda: self.armed_at.append(len(self.steps)))


def test_a_round_is_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is armed before the last one; what all of them changed weighs their tokens; seconds are of one."""
    made = (this := Round(monkeypatch)).train()
    assert this.steps == [9, 10, 11, 12]
    assert (this.armed_at, this.changes, this.lr_steps) == ([3], [4 * TOKENS / 100], [8])
    assert made == Contribution(4 * TOKENS, 4 * TOKENS, seconds=0.5, entries=(Entry(0, 8, 4, b"state"),))


@pytest.mark.parametrize("made", [0, 2])
def test_a_group_that_is_awaited_breaks_off_and_trains_on_if_it_was_too_soon(
    monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """It says that steps are left; the rest of them follow on those that it has made, which count as well."""
    this = Round(monkeypatch, early=True, awaited=made)
    first = this.train()
    assert (first.early, first.valid_tokens, len(this.steps)) == (True, made * TOKENS, made)
    assert first.seconds == (0.5 if made else 0.0)
    this.replica.early = False
    whole = this.train()
    assert this.steps == [9, 10, 11, 12]
    assert (whole.early, whole.valid_tokens, whole.entries[0].num_batches) == (False, 4 * TOKENS, 4)
    assert this.changes == [made * TOKENS / 100, 4 * TOKENS / 100]


def test_a_group_that_came_late_has_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives nothing for the others' update; if they are gone it makes the round itself."""
    this = Round(monkeypatch)
    this.trainer._late = True
    assert this.train() == Contribution(early=True)
    assert not this.train().early
    assert len(this.steps) == 4


def test_a_round_without_more_data_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update ends the data; the next round finds none."""
    made = Round(monkeypatch, data=2).train()
    assert (made.early, made.valid_tokens) == (False, 2 * TOKENS)
    with pytest.raises(DataloaderExhaustedError):
        Round(monkeypatch, data=0).train()


def test_weights_that_cannot_hold_the_outer_model_are_refused() -> None:
    """A checkpoint has the model's weights, and would round what the groups agree on; frozen ones may be any."""
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    model.bias.data = model.bias.data.bfloat16()
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(model_parts=[model])
    trainer._check_dtypes()
    model.weight.data = model.weight.data.bfloat16()
    with pytest.raises(ConfigError, match=r'training\.dtype must be "float32" .* got "bfloat16" for weight'):
        trainer._check_dtypes()


@pytest.mark.parametrize(
    ("seconds", "read", "broken_off", "told"),
    [
        (0.0, 3, "one step was left", "SIGTERM: one step was left"),
        (0.0, 3, "", "SIGTERM: the others were not there in time to exchange the round"),
        (1.5, 3, "", "in order"),  # the round is in an update
        (0.0, 0, "", "in order"),  # it has come to the end of others' round, or has not begun one
        (0.0, None, "", "in order"),
    ],
)
def test_who_leaves_names_the_batches_that_are_in_no_update(
    seconds: float,
    read: int | None,
    broken_off: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether it broke its steps off, or nobody came to exchange them."""
    monkeypatch.setattr(semi_sync.logger, "propagate", True)
    monkeypatch.setattr(ReplicaTrainer, "_emit_drained", lambda trainer: found.append("in order"))
    found: list[Any] = []
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(
        _broken_off=broken_off,
        _position=SimpleNamespace(step=2),
        _events=SimpleNamespace(emit=found.append),
    )
    if read is not None:
        readings = [Reading(Entry(0, 8, read, b""), [], "0")] if read else []
        trainer._work = Work(9, lr=0.1, readings=readings, seconds=seconds)
    trainer._emit_drained()
    if told == "in order":
        assert found == [told]
    else:
        (event,) = found
        assert (event.reason, event.in_order, event.step) == (told, False, 2)
        assert [(batches.first_batch, batches.num_batches) for batches in event.void] == [(8, 3)]
        assert f"{told}; void: 3 from batch 8 of slot 0" in caplog.text


@pytest.mark.parametrize(
    ("step", "exclusions", "done"), [(8, 0, ["open"]), (8, 1, ["clear", "heal"]), (12, 0, []), (12, 1, [])]
)
def test_what_follows_an_update(step: int, exclusions: int, done: list[str]) -> None:
    """A group whose change was not finite gets other moments, and keeps none if nobody is left who has some.

    Behind the last update there is nothing to open, and no step for which moments would matter.
    """
    found: list[str] = []
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(
        step=step,
        job_config=SimpleNamespace(training=SimpleNamespace(steps=12)),
        optimizers=[SimpleNamespace(state=SimpleNamespace(clear=lambda: found.append("clear")))],
        _position=SimpleNamespace(step=step // 4, exclusions=exclusions),
        _open=lambda replica: found.append("open"),
        _heal=lambda replica: found.append("heal"),
    )
    trainer._go_on(None)  # type: ignore[arg-type]
    assert found == done
