# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outer model of a semi-synchronous method: what the groups agree on between two rounds of steps of their own.

LocalSGD and DiLoCo (arXiv 2311.08105): each group trains `sync_steps` steps by itself. Then the groups exchange how far
each has moved from the anchors, the weights that all began the round with, and the outer optimizer makes one update of
the anchors from the mean of that. The job's state is the anchors, the outer optimizer's and the counters; the inner
optimizer's moments are each group's own.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titan_ft import device
from titan_ft.config import OuterOptimizer
from titan_ft.replica.exchange import local
from titan_ft.replica.snapshot import Counters, TrainState, like

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # compile's and activation checkpointing's


class OuterModel:
    """This rank's shards of the anchors in host memory (pinned on GPU), and the outer optimizer over them.

    Args:
        model_parts: as torchtitan's Trainer holds them; their weights are those that training begins with.
        settings: of the outer optimizer.

    Attributes:
        anchors: one for each trainable parameter, in the order of the model's, in fp32.
        optimizer: steps them by their gradients.
    """

    def __init__(self, model_parts: list[nn.Module], settings: OuterOptimizer) -> None:
        self._named = [
            (_WRAPPERS.sub("", name), parameter)
            for part in model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]
        self.anchors = [nn.Parameter(_empty_like(parameter)) for _, parameter in self._named]
        self._anchor_of = {
            id(parameter): anchor for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True)
        }
        self.optimizer = torch.optim.SGD(
            self.anchors, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
        )
        self.take_model()

    @torch.no_grad()
    def take_model(self) -> None:
        """Make the model's weights the anchors: those of a checkpoint, for instance."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            anchor.copy_(local(parameter), non_blocking=True)
        device.synchronize()

    @torch.no_grad()
    def restore_model(self) -> None:
        """Make the anchors the model's weights."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            local(parameter).copy_(anchor, non_blocking=True)
        device.synchronize()

    @torch.no_grad()
    def take_changes(self, weight: float) -> None:
        """Make (anchor - weight of the model) times `weight` the anchors' gradients: how far this group has moved."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            if anchor.grad is None:
                anchor.grad = _empty_like(parameter)
            anchor.grad.copy_(local(parameter), non_blocking=True)
        device.synchronize()
        for anchor in self.anchors:
            assert anchor.grad is not None
            torch.sub(anchor, anchor.grad, out=anchor.grad).mul_(weight)

    def step(self) -> float:
        """Make the outer update by the anchors' gradients, and let the model go on from it.

        Returns:
            The sum of squares of this rank's part of the gradients; ranks that hold the same part share it.
        """
        device.synchronize()  # the exchange's sums are copied to host memory without waiting
        squares = 0.0
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            if anchor.grad is not None:
                squares += anchor.grad.double().square().sum().item() / _num_copies(parameter)
        self.optimizer.step()
        self.restore_model()
        return squares

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the anchor of a parameter; itself if it is not trained."""
        return self._anchor_of.get(id(parameter), parameter)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the outer optimizer's state for a checkpoint, sharded as the model; the model itself is the anchors.

        Before the first update there is none; then it is zeros, which make the same first update.
        """
        if not self.has_state:
            return {}
        return {
            f"momentum.{name}": like(parameter, self._momentum(anchor).to(parameter.device, copy=True))
            for anchor, (name, parameter) in zip(self.anchors, self._named, strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        for anchor, (name, _) in zip(self.anchors, self._named, strict=True):
            momentum = self._momentum(anchor)
            momentum.copy_(local(state_dict[f"momentum.{name}"]))
            self.optimizer.state[anchor]["momentum_buffer"] = momentum

    @property
    def has_state(self) -> bool:
        """Say whether the outer optimizer keeps a state."""
        return self.optimizer.defaults["momentum"] > 0

    def _momentum(self, anchor: nn.Parameter) -> torch.Tensor:
        momentum = self.optimizer.state[anchor].get("momentum_buffer")
        return torch.zeros_like(anchor, requires_grad=False) if momentum is None else momentum


class OuterState(TrainState):
    """The state that a group heals from under a semi-synchronous method.

    The digest is of the anchors and the outer optimizer; a copy has the inner optimizer's moments as well: those of the
    donor's group are as good as any, and better than none.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        counters: Counters,
        *,
        outer: OuterModel,
        on_load: Callable[[], None],
    ) -> None:
        super().__init__(model_parts, [outer.optimizer, *optimizers], lr_schedulers, counters, on_load)
        self._outer = outer

    @property
    def _agreed(self) -> list[torch.optim.Optimizer]:
        return [self._outer.optimizer]

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._model_tensors():
            yield name, self._outer.of(tensor)


def set_lr(lr_schedulers: Any, step: int) -> None:
    """Let torchtitan's LRSchedulersContainer stand where it is after `step` steps, however many this group made."""
    for scheduler in lr_schedulers.schedulers:
        if scheduler.last_epoch != step:
            scheduler.last_epoch = step - 1
            with warnings.catch_warnings():  # torch's, if this group has yet to make its first step
                warnings.simplefilter("ignore")
                scheduler.step()


def join_norm(squares: list[float]) -> float:
    """Return the norm of a vector whose parts have these sums of squares."""
    return math.sqrt(math.fsum(squares))


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    shard = local(parameter)
    return device.empty_host(shard.numel(), torch.float32).view(shard.shape)


def _num_copies(parameter: torch.Tensor) -> int:
    """Return how many ranks of the group hold this rank's part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(dim) for dim, place in enumerate(parameter.placements) if isinstance(place, Replicate))
