# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a rank computes in a step of its own group, without a model; whole runs are in
integration/.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.host import cpu

cpu.prepare()  # before anything imports torchtitan, which reads the device at import

from torchtitan.components.dataloader import DataloaderExhaustedError  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.validate import BaseValidator  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from titan_ft.engine.feed import Reading  # noqa: E402
from titan_ft.engine.work import Work  # noqa: E402
from titan_ft.host.titan import read_batches  # noqa: E402
from titan_ft.protocol.ledger import Entry  # noqa: E402
from titan_ft.protocol.report import NOTHING, Contribution  # noqa: E402
from titan_ft.training.local_training import LocalTraining, count_nominal_tokens  # noqa: E402

LABELS = torch.tensor([[1, 2, IGNORE_INDEX], [3, 4, 5]])


def local(feed: Any = None, group: Any = None, watchdog: Any = None, **parts: Any) -> LocalTraining:
    """Return the training of a trainer that has these parts."""
    training = LocalTraining.__new__(LocalTraining)
    trainer: Any = SimpleNamespace(**parts)
    vars(training).update(
        _trainer=trainer, _feed=feed, _group=group, _watchdog=watchdog, nominal_tokens=100
    )
    return training


def test_a_gradient_begins_without_counts_of_other_batches() -> None:
    """The counts of validation, the warm-up or a void step must not move the experts' biases."""
    layer = torch.nn.Module()
    layer.load_balance_coeff = 1e-3
    layer.register_buffer("tokens_per_expert", torch.ones(4), persistent=False)
    zeroed: list[str] = []
    this = local(
        model_parts=[torch.nn.Sequential(layer)],
        optimizers=SimpleNamespace(zero_grad=lambda: zeroed.append("gradients")),
    )
    this.clear_gradients()
    assert (layer.tokens_per_expert.tolist(), zeroed) == ([0.0] * 4, ["gradients"])


def test_nominal_tokens_are_those_of_all_groups() -> None:
    """Local losses are divided by them, so that the sum over all groups is the mean."""
    config = SimpleNamespace(
        training=SimpleNamespace(local_batch_size=2, seq_len=8),
        fault_tolerance=SimpleNamespace(group_size=5),
    )
    trainer: Any = SimpleNamespace(
        job_config=config,
        parallel_dims=SimpleNamespace(dp_replicate=2, dp_shard=3),
        gradient_accumulation_steps=4,
    )
    assert count_nominal_tokens(trainer) == 2 * 8 * (2 * 3) * 4 * 5


@pytest.mark.parametrize("cp", [1, 2])
def test_a_group_s_contribution_is_the_sum_over_its_ranks(cp: int) -> None:
    """Ranks of one context-parallel group share their tokens, and each has a part of the loss."""
    facts = torch.tensor(
        [[8.0, 10.0, 0.25, 1.0, 0.5, 0.2], [8.0, 10.0, 0.5, 3.0, 0.1, 0.3]], dtype=torch.float64
    )
    told: list[list[float]] = []

    def gather(values: list[float]) -> torch.Tensor:
        told.append(values)
        return facts

    this = local(
        group=SimpleNamespace(gather_losses=gather),
        parallel_dims=SimpleNamespace(cp=cp, pp_enabled=False),
    )
    work = Work(1, lr=0.1, loading_seconds=1.0)
    reading = Reading(Entry(0, 0, 1, b""), [], "0")
    made = this._gather_contribution(work, 8, 10, 0.25, 0.5, 0.2, [reading])
    assert made == Contribution(16 // cp, 20 // cp, 0.75, 3.0, 0.5, (reading.entry,))
    assert told == [[8, 10, 0.25, 0.25 * 100 / 8, 0.5, 0.2]]
    # The group comes to the exchange with its slowest rank.
    assert work.loading_seconds == 1.0 + 0.3


class Mesh:
    def __init__(self, local_rank: int) -> None:
        self._local_rank = local_rank

    def get_local_rank(self) -> int:
        return self._local_rank


def test_a_pipeline_s_loss_is_known_to_all_its_ranks() -> None:
    """Only the last stage has one, the same on all of its tensor-parallel ranks; its tokens count
    once.
    """
    # Of (stage, tensor-parallel rank).
    losses = {(0, 0): -2.0, (0, 1): -2.0, (1, 0): 0.25, (1, 1): 0.25}
    told: list[list[float]] = []

    def make(stage: int, tensor_rank: int) -> Any:
        dims = SimpleNamespace(
            cp=1, pp_enabled=True, get_optional_mesh=lambda name: Mesh(tensor_rank)
        )
        this = local(
            group=SimpleNamespace(
                gather_losses=lambda values: told.append(values) or torch.tensor(told)
            ),
            parallel_dims=dims,
            pp_has_last_stage=stage == 1,
        )
        loss = losses[stage, tensor_rank]
        return this._gather_contribution(Work(1, lr=0.1), 8, 10, loss, 0.1 * stage, 0.0, ())

    made = [make(*rank) for rank in losses][-1]  # the last one to gather sees all
    assert made == Contribution(8, 10, 0.25, 0.25 * 100 / 8, pytest.approx(0.1), ())


def test_the_exchange_is_armed_before_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before an earlier one, whose gradients are not final.

    The next batch is read while the device is at the last backward: before the host waits for the
    loss.
    """
    order: list[str] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: order.append("wait") or item(tensor))
    readings = {
        slot: SimpleNamespace(batches=[({}, LABELS), ({}, LABELS)], entry=Entry(slot, 0, 2, b""))
        for slot in (0, 2)
    }

    def read(slot: int, count: int, behind: int) -> Any:
        assert (count, behind) == (2, 0)
        return readings[slot]

    def backward(batches: Any) -> torch.Tensor:
        assert len(batches) == 1
        order.append("backward")
        return torch.tensor(0.5)

    def read_ahead(last: Any) -> None:
        order.append(f"read ahead of {len(last)}")

    given: list[tuple[Any, ...]] = []
    metrics, work = SimpleNamespace(ntokens_since_last_log=7), Work(1, lr=0.1)
    this = local(
        feed=SimpleNamespace(read=read, read_ahead=read_ahead),
        watchdog=SimpleNamespace(beat=lambda: None),
        ntokens_seen=70,
        step=3,
        job_config=SimpleNamespace(training=SimpleNamespace(steps=4)),
        metrics_processor=metrics,
        gradient_accumulation_steps=2,
    )
    vars(this).update(
        _forward_backward=backward,
        _gather_contribution=lambda *facts: given.append(facts) or NOTHING,
    )
    this.compute(work, [0, 2], lambda: order.append("arm"))
    assert order == ["backward"] * 3 + ["arm", "backward", "read ahead of 2", "wait"]
    assert (this._trainer.ntokens_seen, metrics.ntokens_since_last_log) == (70, 7 + 4 * 6)
    ((_, valid, tokens, loss, _, _, trained),) = given
    assert (valid, tokens, loss) == (4 * 5, 4 * 6, 4 * 0.5)
    assert trained == [readings[0], readings[2]]
    assert work.readings == [readings[0], readings[2]]
    assert this.compute(work, [], lambda: None) is NOTHING
    this.step = 4
    this.compute(Work(4, lr=0.1), [0], lambda: None)
    assert order[-2:] == ["read ahead of 0", "wait"], "nothing follows on the last step"


def test_tokens_count_when_they_are_trained() -> None:
    """Not when torchtitan's generator reads them, which is a step earlier, or for nothing."""
    counts = SimpleNamespace(ntokens_since_last_log=7, data_loading_times=[])
    this: Any = SimpleNamespace(ntokens_seen=70, metrics_processor=counts)
    this.batch_generator = lambda loader: Trainer.batch_generator(this, loader)
    read = read_batches(this, [({}, LABELS)] * 2)
    assert [labels is LABELS for _, labels in itertools.islice(read, 2)] == [True, True]
    assert (this.ntokens_seen, counts.ntokens_since_last_log) == (70, 7)
    with pytest.raises(DataloaderExhaustedError):
        next(read)


def test_without_data_no_step_is_made() -> None:
    """A round of a semi-synchronous method would count a missing step, and wait for its gradient
    for ever.
    """

    def read(slot: int, count: int, behind: int) -> Any:
        raise DataloaderExhaustedError

    this, work = (
        local(feed=SimpleNamespace(read=read), gradient_accumulation_steps=2),
        Work(1, lr=0.1),
    )
    with pytest.raises(this.data_ended):
        this.compute(work, [0], lambda: None)
    assert work.inner_steps == 0


@pytest.mark.parametrize(("pp", "scale"), [(False, 1.0), (True, 1 / 100)])
def test_a_pipeline_s_gradients_are_divided_by_the_tokens(pp: bool, scale: float) -> None:
    """torchtitan does that before backward, but for pipelines, which go backward from the sum of
    the losses.
    """
    assert local(parallel_dims=SimpleNamespace(pp_enabled=pp)).gradient_scale == scale


@pytest.mark.parametrize(
    ("step", "saves", "pauses"),
    [(1, False, True), (3, False, False), (4, False, True), (5, True, True), (10, False, True)],
)
def test_no_quorum_is_asked_for_before_a_pause(step: int, saves: bool, pauses: bool) -> None:
    """torchtitan validates (after the first step, too), saves or ends: the others would wait in the
    exchange.
    """
    config: Any = SimpleNamespace(
        validation=SimpleNamespace(enable=True, freq=4), training=SimpleNamespace(steps=10)
    )
    validator, saver = BaseValidator(config), SimpleNamespace(pauses_after=lambda step: saves)
    this = local(job_config=config, checkpointer=saver, validator=validator)
    assert this.pauses_after(step) is pauses


@pytest.mark.parametrize(
    ("facts", "shape"),
    [
        ({}, (1, 32)),
        ({"seq_len": 16}, (1, 16)),
        ({"attn_type": "varlen"}, (1, 32)),
        ({"device": "cuda"}, (4, 256)),
        ({"attn_type": "flex"}, (4, 256)),
        ({"compile": True}, (4, 256)),
        ({"tp_enabled": True}, (4, 256)),
        ({"cp_enabled": True}, (4, 256)),
        ({"pp_enabled": True}, (4, 256)),
    ],
)
def test_a_warm_up_is_short_where_no_shape_counts(
    facts: dict[str, Any], shape: tuple[int, int]
) -> None:
    """The others make steps meanwhile; but what is compiled for another shape would be compiled
    again in the first.
    """
    degrees = {name: facts.get(name, False) for name in ("tp_enabled", "cp_enabled", "pp_enabled")}
    this = local(
        device=torch.device(facts.get("device", "cpu")),
        parallel_dims=SimpleNamespace(**degrees),
        model_args=SimpleNamespace(attn_type=facts.get("attn_type", "sdpa")),
        job_config=SimpleNamespace(
            training=SimpleNamespace(local_batch_size=4, seq_len=facts.get("seq_len", 256)),
            compile=SimpleNamespace(enable=facts.get("compile", False)),
        ),
    )
    assert this._warm_up_shape() == shape


@pytest.mark.parametrize("text", [True, False])
def test_a_warm_up_is_taken_back(text: bool) -> None:
    """Weights, moments and counters are as before, and no gradient or random number is left."""
    done: list[str] = []
    drawn = torch.random.get_rng_state()
    this = local(
        dataloader=SimpleNamespace(
            dataset=HuggingFaceTextDataset.__new__(HuggingFaceTextDataset) if text else None
        ),
        optimizers=SimpleNamespace(
            step=lambda: done.append("update"), zero_grad=lambda: done.append("zero")
        ),
    )
    vars(this).update(
        _warm_up_shape=lambda: (1, 8),
        _forward_backward=lambda made: done.append(
            f"step {[*made[0][1].shape]}, {torch.rand(1) < 2}"
        ),
        clip_gradients=lambda: None,
    )
    state: Any = SimpleNamespace(
        copy=lambda *_: "before", load=lambda state: done.append(f"load {state}")
    )
    this.warm_up(state)
    assert done == (
        ["step [1, 8], tensor([True])", "update", "zero", "load before"] if text else []
    )
    assert torch.equal(torch.random.get_rng_state(), drawn)
