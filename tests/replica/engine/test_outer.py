# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outer model: its updates, the part on which the groups agree, and its checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.member_facts import exchange_with
from titan_ft.config import FaultTolerance
from titan_ft.engine.outer import OuterModel, OuterState, _num_copies, norm_over_ranks, set_lr
from titan_ft.gradients.exchange import ExchangeResult, GradientExchange
from titan_ft.membership.process_group import build_process_group
from titan_ft.protocol.member import Member, Quorum
from titan_ft.round_settings import OuterOptimizer, outer_optimizer

DEADLINE = 20.0  # seconds; only a bug reaches it
NOMINAL = 8  # tokens of a step of all groups
LOCAL_SGD = OuterOptimizer(1.0, 0.0, nesterov=False)
DILOCO = OuterOptimizer(0.7, 0.9, nesterov=True)


def model(*weights: float) -> nn.Module:
    """Return a model with a trained parameter for each of these weights, and one frozen
    parameter.
    """
    made = nn.Module()
    for number, weight in enumerate(weights):
        made.register_parameter(f"weight{number}", nn.Parameter(torch.tensor([weight])))
    made.register_parameter("frozen", nn.Parameter(torch.tensor([5.0]), requires_grad=False))
    return made


def weights(of: nn.Module) -> list[float]:
    """Return the trained weights."""
    return [parameter.item() for parameter in of.parameters() if parameter.requires_grad]


@torch.no_grad()
def move(of: nn.Module, *changes: float) -> None:
    """Take `changes` from the weights, as a round of a group's own steps does."""
    for parameter, change in zip(
        (p for p in of.parameters() if p.requires_grad), changes, strict=True
    ):
        parameter.sub_(change)


def make_round(outer: OuterModel, of: nn.Module, *changes: float) -> float:
    """Make a round of a lone group."""
    move(of, *changes)
    outer.compute_changes({0: 1.0})
    return outer.step()


# The update


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"),
    [(0.7, 0.9, True), (0.7, 0.9, False), (0.4, 0.0, False), (1.0, 0.0, False)],
)
def test_the_outer_optimizer_is_that_of_the_paper(
    lr: float, momentum: float, nesterov: bool
) -> None:
    """v = momentum * v + change; x = x - lr * (change + momentum * v).

    Without Nesterov x - lr * v. At the beginning v = 0.
    """
    group = model(3.0)
    outer = OuterModel([group], OuterOptimizer(lr, momentum, nesterov))
    anchor, velocity = 3.0, 0.0
    for change in (0.5, -0.25, 1.0, 0.0, 0.125):
        make_round(outer, group, change)
        velocity = momentum * velocity + change
        anchor -= lr * (change + momentum * velocity if nesterov else velocity)
        assert weights(group) == pytest.approx([anchor], abs=1e-6)
        assert [each.item() for each in outer.anchors] == weights(group)


def test_the_settings_are_those_of_the_method() -> None:
    """LocalSGD has no outer optimizer to set: it takes the mean unchanged."""
    values: dict[str, Any] = {"outer_lr": 0.4, "outer_momentum": 0.5}
    assert outer_optimizer(FaultTolerance(semi_sync_method="local_sgd", **values)) == LOCAL_SGD
    assert outer_optimizer(FaultTolerance(semi_sync_method="diloco", **values)) == (0.4, 0.5, True)
    without = outer_optimizer(
        FaultTolerance(semi_sync_method="diloco", **values | {"outer_momentum": 0.0})
    )
    OuterModel([model(1.0)], without)  # torch refuses Nesterov's momentum without a momentum


def test_only_trained_parameters_have_anchors() -> None:
    """A frozen parameter is equal in all groups. It is neither moved nor exchanged."""
    group = model(1.0, 2.0)
    outer = OuterModel([group], DILOCO)
    assert [anchor.item() for anchor in outer.anchors] == [1.0, 2.0]
    make_round(outer, group, 1.0, 1.0)
    assert group.get_parameter("frozen").item() == 5.0
    assert outer.find_anchor(group.get_parameter("frozen")) is group.get_parameter("frozen")
    assert outer.find_anchor(group.get_parameter("weight1")) is outer.anchors[1]


def test_a_retry_has_the_same_change() -> None:
    """The exchange only reads the changes. The model must not move before a retry."""
    group = model(1.0)
    outer = OuterModel([group], LOCAL_SGD)
    move(group, 0.25)
    outer.compute_changes({0: 2.0})
    outer.compute_changes({0: 2.0})
    assert outer.anchors[0].grad is not None
    assert outer.anchors[0].grad.item() == 0.5
    assert outer.anchors[0].item() == 1.0


def test_the_norm_is_that_of_the_whole_change() -> None:
    """Each rank has the sum of squares of its part. Together they give the norm."""
    group = model(0.0, 0.0)
    squares = make_round(OuterModel([group], LOCAL_SGD), group, 3.0, 4.0)
    assert squares == 25.0
    (others,) = struct.unpack("q", struct.pack("d", 144.0))
    assert norm_over_ranks(squares, lambda own: [own, others]) == 13.0
    for nan in (math.nan, -math.nan):  # as signed integers, which a processor makes of them
        assert math.isnan(norm_over_ranks(nan, lambda own: [own, others]))


def test_a_part_that_several_ranks_hold_counts_once(world: None) -> None:
    """Tensor parallelism leaves copies of a norm's weight on each rank.

    Data parallelism cuts all weights.
    """
    mesh = dist.init_device_mesh("cpu", (1,))
    assert _num_copies(torch.zeros(4)) == 1
    assert _num_copies(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)])) == 1
    assert _num_copies(DTensor.from_local(torch.zeros(4), mesh, [Replicate()])) == mesh.size()


# Fragments, and the share of its own weights that a group keeps


def test_a_fragment_is_updated_alone() -> None:
    """Its anchors and momentum change.

    The other fragments stay, and so does the group's distance from them.
    """
    group = model(1.0, 2.0, 3.0)
    outer = OuterModel([group], DILOCO, fragments=[0, 1, 0])
    move(group, 0.5, 0.25, 1.0)
    outer.compute_changes({1: 1.0})
    assert [anchor.grad is None for anchor in outer.anchors] == [True, False, True]
    assert outer.step() == 0.25**2
    first = 2.0 - 0.7 * 1.9 * 0.25
    assert [anchor.item() for anchor in outer.anchors] == pytest.approx([1.0, first, 3.0])
    assert weights(group) == pytest.approx([0.5, first, 2.0])
    assert [outer.momentum(anchor).item() for anchor in outer.anchors] == [0.0, 0.25, 0.0]
    move(group, 0.5, 0.0, 0.0)
    outer.compute_changes({0: 2.0, 1: 1.0})
    assert [anchor.grad.item() for anchor in outer.anchors if anchor.grad is not None] == [
        2.0,
        0.0,
        2.0,
    ]


def test_a_group_keeps_a_share_of_its_own_weights() -> None:
    """The anchors, on which the groups agree, have no such share."""
    group = model(1.0)
    outer = OuterModel([group], LOCAL_SGD)
    move(group, 0.5)
    outer.compute_changes({0: 1.0})
    move(group, 0.25)  # moved during the exchange
    outer.step(alpha=0.25)
    assert outer.anchors[0].item() == 0.5
    assert weights(group) == [0.25 * 0.25 + 0.75 * 0.5]


def test_the_anchors_are_lent() -> None:
    """A save or a validation borrows them.

    The group's own weights come back, even after an error.
    """
    group = model(1.0, 2.0)
    outer = OuterModel([group], LOCAL_SGD)
    move(group, 0.5, 0.25)
    with outer.lend_to_model():
        assert weights(group) == [1.0, 2.0]
    with pytest.raises(OSError, match="disk"), outer.lend_to_model():
        raise OSError("disk")
    assert weights(group) == [0.5, 1.75]


# The exchange of changes


class Seat:
    """Stands in for a Membership. The quorum is ready, and the process group is real."""

    def __init__(self, store: str, rank: int, members: int) -> None:
        self.timeout = timedelta(seconds=DEADLINE)
        self.process_group = build_process_group("gloo", self.timeout)
        self.process_group.configure(store, rank, members)
        everybody = tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in range(members))
        self._quorum = Quorum("1/test", rank, everybody, max_step=0)

    def await_quorum(self) -> Quorum:
        return self._quorum

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self) -> None:
        self.process_group.abort()


class Group:
    """A group of one rank in the exchange of a round.

    It has a model, its anchors, and the number of tokens that it has trained.
    """

    def __init__(
        self, store: str, rank: int, members: int, settings: OuterOptimizer, tokens: int
    ) -> None:
        self.model, self.tokens = model(10.0, -1.0), tokens
        self.outer = OuterModel([self.model], settings)
        self._exchange = GradientExchange(
            iter(self.outer.anchors),
            Seat(store, rank, members),  # type: ignore[arg-type]  # stands in for it
            bucket_bytes=4,
            where=torch.device("cpu"),
            overlap=False,
        )

    def make_round(self, change: float) -> None:
        """Move by `change`, and make the update of all groups' changes.

        As `RoundStrategy` and `Round` do.
        """
        if self.tokens:
            move(self.model, change, 2 * change)
            weights = {0: self.tokens / NOMINAL}
            self.outer.compute_changes(weights)
            self._exchange.set_fragment_weights(weights)
        self._finish().sums.write()
        self.outer.step()

    def _finish(self) -> ExchangeResult:
        return exchange_with(
            self._exchange, lambda quorum: ([float(self.tokens)], b""), gives=self.tokens > 0
        )


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time. Return their results in order."""

    def start(function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # handed to the test
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    return [future.result(DEADLINE) for future in [start(function) for function in functions]]


@pytest.mark.parametrize(
    ("tokens", "changes", "mean"),
    [
        (
            (4, 4),
            (4.0, 8.0),
            6.0,
        ),  # torchft takes the donor's change alone if the other group has just healed: 4
        (
            (4, 4, 0),
            (4.0, 8.0, 99.0),
            6.0,
        ),  # and it counts the donor twice for a joiner: (4 + 8 + 4) / 3
        ((0, 4, 4), (99.0, 4.0, 8.0), 6.0),
        ((6, 2), (4.0, 8.0), 5.0),  # by tokens, and not by groups
        ((8, 8), (4.0, 8.0), 6.0),  # twice the tokens of a step, because a round has several
        ((4, 0), (4.0, 99.0), 4.0),  # no other group has trained
    ],
)
def test_the_update_is_the_mean_of_the_groups_that_trained(
    tokens: tuple[int, ...], changes: tuple[float, ...], mean: float
) -> None:
    """Over real Gloo, weighted by tokens, over exactly the groups that have trained.

    A joiner's zeros weigh nothing.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, members = f"127.0.0.1:{server.port}/outer", len(tokens)
    makers = [lambda r=r, n=n: Group(store, r, members, LOCAL_SGD, n) for r, n in enumerate(tokens)]
    groups = together(*makers)
    together(*[lambda g=g, c=c: g.make_round(c) for g, c in zip(groups, changes, strict=True)])
    for group in groups:  # the group without tokens has the others' weights
        assert weights(group.model) == [10.0 - mean, -1.0 - 2 * mean]


def test_groups_stay_equal_whoever_takes_part() -> None:
    """In each of three rounds, another one of three groups gives nothing.

    All groups have the momentum of all rounds.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = f"127.0.0.1:{server.port}/outer"
    groups: list[Group] = together(*[lambda r=r: Group(store, r, 3, DILOCO, 0) for r in range(3)])
    anchor, velocity = 10.0, 0.0
    for absent in range(3):
        changes = [0.1 * (number + 1) for number in range(3)]
        for number, group in enumerate(groups):
            group.tokens = 0 if number == absent else 1 + number
        together(*[lambda g=g, c=c: g.make_round(c) for g, c in zip(groups, changes, strict=True)])
        change = sum(g.tokens * c for g, c in zip(groups, changes, strict=True)) / sum(
            g.tokens for g in groups
        )
        velocity = 0.9 * velocity + change
        anchor -= 0.7 * (change + 0.9 * velocity)
        assert weights(groups[0].model)[0] == pytest.approx(anchor, rel=1e-6)
        assert weights(groups[1].model) == weights(groups[2].model) == weights(groups[0].model)


# Checkpoints


def test_training_continues_exactly_after_a_save() -> None:
    """The checkpoint's weights become the anchors, and the momentum continues.

    After two more rounds the bytes are equal.
    """
    group, resumed = model(3.0, -2.0), model(0.0, 0.0)
    outer, again = OuterModel([group], DILOCO), OuterModel([resumed], DILOCO)
    for _ in range(2):
        make_round(outer, group, 0.1, 0.3)
    saved = {name: tensor.clone() for name, tensor in outer.state_dict().items()}
    resumed.load_state_dict(group.state_dict())
    again.load_state_dict(saved)
    again.adopt_model()
    for _ in range(2):
        make_round(outer, group, 0.7, -0.1)
        make_round(again, resumed, 0.7, -0.1)
    assert weights(resumed) == weights(group)
    assert {name: tensor.tolist() for name, tensor in again.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in outer.state_dict().items()
    }


def test_a_state_of_before_the_first_update_can_be_saved() -> None:
    """A momentum of zeros makes the same first update as no momentum. A save changes nothing."""
    group, resumed = model(3.0), model(3.0)
    outer, again = OuterModel([group], DILOCO), OuterModel([resumed], DILOCO)
    again.load_state_dict(outer.state_dict())
    make_round(outer, group, 0.3)
    make_round(again, resumed, 0.3)
    assert weights(resumed) == weights(group)


def test_without_momentum_there_is_no_state_to_save() -> None:
    """A checkpoint cannot lack a state that does not exist."""
    assert OuterModel([model(1.0)], DILOCO).has_state
    local_sgd = OuterModel([model(1.0)], LOCAL_SGD)
    assert not local_sgd.has_state
    assert local_sgd.state_dict() == {}


def test_names_are_those_of_the_model_without_wrappers() -> None:
    """A run with other settings of compile and activation checkpointing can continue from it."""
    group = nn.Module()
    group.add_module("_orig_mod", nn.Module())
    group.get_submodule("_orig_mod").add_module("_checkpoint_wrapped_module", model(1.0))
    assert set(OuterModel([group], DILOCO).state_dict()) == {"momentum.weight0"}


# The state of a heal


class Training:
    """A group with the tests' tiny model and an outer model."""

    def __init__(self, tiny: Any, seed: int, frozen: bool = False) -> None:
        self.inner = tiny(seed)
        self.inner.model.scale.requires_grad = not frozen
        self.outer = OuterModel([self.inner.model], DILOCO)
        self.loads = 0
        self.state = OuterState(
            [self.inner.model],
            self.inner.optimizers,
            self.inner.lr_schedulers,
            self.inner.counters,
            outer=self.outer,
            on_load=self._take_state,
        )

    def _take_state(self) -> None:
        self.loads += 1
        self.outer.restore_model()

    def make_round(self) -> None:
        self.inner.train(2)
        self.outer.compute_changes({0: 1.0})
        self.outer.step()


def test_moments_that_are_not_finite_are_dropped(tiny: Any) -> None:
    """They belong to the inner optimizer. The state that is equal in all groups stays."""
    group = Training(tiny, 1)
    group.make_round()
    digest = group.state.digest()
    assert not group.state.has_nonfinite_moments
    with torch.no_grad():
        next(iter(group.inner.optimizers.optimizers[0].state.values()))["exp_avg"].view(-1)[-1] = (
            float("nan")
        )
    assert group.state.has_nonfinite_moments
    group.state.drop_moments()
    assert not group.state.has_nonfinite_moments
    assert group.state.digest() == digest
    group.make_round()
    assert all(bool(anchor.isfinite().all()) for anchor in group.outer.anchors)


def test_a_joiner_has_all_of_its_donor(tiny: Any) -> None:
    """During a round, too: anchors, momentum and moments. The joiner's own training is gone."""
    donor, joiner = Training(tiny, 1), Training(tiny, 2)
    donor.make_round()
    digest = donor.state.digest()
    move(donor.inner.model, *[1.0] * len(donor.outer.anchors))
    assert donor.state.digest() == digest
    joiner.make_round()
    joiner.state.load(donor.state.copy(1, 7))
    joiner.inner.step = donor.inner.step
    assert joiner.loads == 1
    assert joiner.state.digest() == digest
    assert [anchor.tolist() for anchor in joiner.outer.anchors] == [
        anchor.tolist() for anchor in donor.outer.anchors
    ]
    for parameter, anchor in zip(
        joiner.inner.model.parameters(), joiner.outer.anchors, strict=True
    ):
        assert torch.equal(parameter, anchor)
    assert _moments(joiner) == _moments(donor)
    donor.outer.restore_model()
    for group in (donor, joiner):
        group.make_round()
    assert joiner.state.digest() == donor.state.digest() != digest


def test_the_digest_covers_the_state_on_which_the_groups_agree(tiny: Any) -> None:
    """Anchors, outer momentum, outer LR and frozen parameters count.

    A group's own weights and moments do not.
    """
    group, other = Training(tiny, 1), Training(tiny, 1)
    group.make_round()
    digest = group.state.digest()
    for parameter, state in group.inner.optimizers.optimizers[0].state.items():
        state["exp_avg"] += 1.0
        parameter.detach().add_(1.0)
    group.inner.lr_schedulers.step()
    assert group.state.digest() == digest
    (settings,) = group.outer.optimizer.param_groups
    settings["lr"] *= 2
    assert group.state.digest() != digest
    settings["lr"] /= 2
    momentum = group.outer.optimizer.state[group.outer.anchors[1]]["momentum_buffer"]
    momentum[0, 0] += 1e-3
    assert group.state.digest() != digest
    momentum[0, 0] -= 1e-3
    group.outer.anchors[1].detach()[0, 0] += 1e-3
    assert group.state.digest() != digest
    other.make_round()
    assert other.state.digest() == digest
    frozen = Training(tiny, 1, frozen=True)
    digest = frozen.state.digest()
    frozen.inner.model.scale.detach().add_(1.0)
    assert frozen.state.digest() != digest


def test_a_copy_names_each_tensor_once(tiny: Any) -> None:
    """Weights travel as anchors, and only once."""
    group = Training(tiny, 1)
    group.make_round()
    names = [entry["name"] for entry in json.loads(group.state.copy(1, 7).header)["tensors"]]
    assert len(set(names)) == len(names)
    number = len(list(group.inner.model.parameters()))
    kinds = [name.split("/")[0] + "/" + name.split("/")[1] for name in names]
    # Anchors, and outer momentum.
    assert kinds.count("model/0") == kinds.count("optimizer/0") == number
    assert kinds.count("optimizer/1") == 3 * number  # Adam's moments and step


def _moments(group: Training) -> list[list[Any]]:
    optimizer = group.inner.optimizers.optimizers[0]
    return [
        [value.tolist() for _, value in sorted(optimizer.state[parameter].items())]
        for parameter in optimizer.param_groups[0]["params"]
    ]


# The LR schedule


@pytest.mark.parametrize("begin", [1, 3, 7])
@pytest.mark.parametrize("end", [0, 1, 5])
def test_the_schedule_is_set_to_a_step(tiny: Any, begin: int, end: int) -> None:
    """The schedule goes forward or back, after any number of own steps.

    It is then as after `end` steps of an undisturbed run.
    """
    training, straight = tiny(1), tiny(1)
    training.train(begin)
    straight.train(end)
    set_lr(training.lr_schedulers, end)
    for found, expected in zip(
        training.lr_schedulers.schedulers, straight.lr_schedulers.schedulers, strict=True
    ):
        assert found.last_epoch == expected.last_epoch == end
        assert found.get_last_lr() == expected.get_last_lr()
    rates = [
        [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups]
        for made in (training, straight)
    ]
    assert rates[0] == rates[1]
    training.train(1)
    straight.train(1)
    assert (
        training.lr_schedulers.schedulers[0].get_last_lr()
        == straight.lr_schedulers.schedulers[0].get_last_lr()
    )
