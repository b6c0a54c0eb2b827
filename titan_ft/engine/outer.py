# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outer model of a semi-synchronous method: what the groups agree on between two rounds of steps of their own.

LocalSGD and DiLoCo (arXiv 2311.08105): each group trains `sync_steps` steps by itself. Then the groups exchange how far
each has moved from the anchors, the weights that all began the round with, and the outer optimizer makes one update of
the anchors from the mean of that. With Streaming DiLoCo (arXiv 2501.18512) they do so for one fragment of the model
after the other. The job's state is the anchors, the outer optimizer's and the counters; the inner optimizer's moments,
and how far a group has moved from the anchors, are each group's own.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from titan_ft import device
from titan_ft.round_settings import OuterOptimizer
from titan_ft.transfer.snapshot import Counters, TrainState, like

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # compile's and activation checkpointing's


class OuterModel:
    """This rank's shards of the anchors in host memory (pinned on GPU), and the outer optimizer over them.

    Args:
        model_parts: as torchtitan's Trainer holds them; their weights are those that training begins with.
        settings: of the outer optimizer.
        fragments: of each trainable parameter; all are of fragment 0 if there is none.

    Attributes:
        anchors: one for each trainable parameter, in the order of the model's, in fp32.
        optimizer: steps them by their gradients.
        fragments: of each anchor.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        settings: OuterOptimizer,
        fragments: Sequence[int] = (),
    ) -> None:
        self._named = trained_parameters(model_parts)
        self.fragments = list(fragments) or [0] * len(self._named)
        self._changes: list[torch.Tensor] = []  # of the anchors; from the first round on
        self.anchors = [nn.Parameter(_empty_like(parameter)) for _, parameter in self._named]
        self._anchor_of = {
            id(parameter): anchor for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True)
        }
        self.optimizer = torch.optim.SGD(
            self.anchors, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
        )
        if self.has_state:  # from the beginning, as after a load: zeros make the same first update as none
            for anchor in self.anchors:
                self.optimizer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor, requires_grad=False)
        self.take_model()

    @torch.no_grad()
    def take_model(self) -> None:
        """Make the model's weights the anchors: those of a checkpoint, for instance."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            anchor.copy_(device.local_shard(parameter), non_blocking=True)
        device.synchronize()

    @torch.no_grad()
    def restore_model(self) -> None:
        """Make the anchors the model's weights."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            device.local_shard(parameter).copy_(anchor, non_blocking=True)
        device.synchronize()

    @contextlib.contextmanager
    @torch.no_grad()
    def lent(self) -> Iterator[None]:
        """Make the anchors the model's weights for as long as the context lasts: to save it, or to validate."""
        own = [device.local_shard(parameter).to("cpu", copy=True) for _, parameter in self._named]
        self.restore_model()
        try:
            yield
        finally:
            for weights, (_, parameter) in zip(own, self._named, strict=True):
                device.local_shard(parameter).copy_(weights)

    @torch.no_grad()
    def take_changes(self, weights: Mapping[int, float]) -> None:
        """Make how far this group has moved, anchor - weight of the model, the gradients of some fragments' anchors.

        Args:
            weights: for each of these fragments, what the change is multiplied with. The others get no gradient.
        """
        self._changes = self._changes or [_empty_like(parameter) for _, parameter in self._named]
        for anchor, change, fragment, (_, parameter) in self._all():
            anchor.grad = change if fragment in weights else None
            if fragment in weights:
                change.copy_(device.local_shard(parameter), non_blocking=True)
        device.synchronize()
        for anchor, change, fragment, _ in self._all():
            if fragment in weights:
                torch.sub(anchor, change, out=change).mul_(weights[fragment])

    def _all(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int, tuple[str, nn.Parameter]]]:
        return zip(self.anchors, self._changes, self.fragments, self._named, strict=True)

    @torch.no_grad()
    def step(self, alpha: float = 0.0) -> float:
        """Make the outer update of the anchors that have a gradient, and let the model go on from them.

        Args:
            alpha: share of the model's own weights in those that it goes on with.

        Returns:
            The sum of squares of this rank's part of the gradients; ranks that hold the same part share it.
        """
        squares = 0.0
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            if anchor.grad is not None:
                squares += anchor.grad.double().square().sum().item() / _num_copies(parameter)
        self.optimizer.step()
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            if anchor.grad is not None:
                weights = anchor.to(parameter.device, non_blocking=True)
                shard = device.local_shard(parameter)
                shard.copy_(torch.lerp(weights, shard, alpha) if alpha else weights)
        device.synchronize()
        return squares

    def named_anchors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the anchors by the names of their parameters."""
        for anchor, (name, _) in zip(self.anchors, self._named, strict=True):
            yield name, anchor

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the anchor of a parameter; itself if it is not trained."""
        return self._anchor_of.get(id(parameter), parameter)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the outer optimizer's state for a checkpoint, sharded as the model, which is saved as the anchors."""
        if not self.has_state:
            return {}
        return {
            f"momentum.{name}": like(parameter, self.momentum(anchor).to(parameter.device, copy=True))
            for anchor, (name, parameter) in zip(self.anchors, self._named, strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` returned."""
        for anchor, (name, _) in zip(self.anchors, self._named, strict=True):
            self.momentum(anchor).copy_(device.local_shard(state_dict[f"momentum.{name}"]))

    @property
    def has_state(self) -> bool:
        """Say whether the outer optimizer keeps a state."""
        return self.optimizer.defaults["momentum"] > 0

    def momentum(self, anchor: nn.Parameter) -> torch.Tensor:
        """Return the outer optimizer's for an anchor."""
        momentum: torch.Tensor = self.optimizer.state[anchor]["momentum_buffer"]
        return momentum


class OuterState(TrainState):
    """The state that a group heals from under a semi-synchronous method.

    The digest is of the anchors and the outer optimizer; a copy has the inner optimizer's moments as well: those of the
    donor's group are as good as any, and better than none, unless they are `spoiled`.
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
        num_ranks: int = 1,
    ) -> None:
        super().__init__(model_parts, [outer.optimizer, *optimizers], lr_schedulers, counters, on_load, num_ranks)
        self._outer, self._inner = outer, list(optimizers)

    @property
    def spoiled(self) -> bool:
        """Say whether this rank's moments are not finite: as its gradients were, or those of the donor's group."""
        moments = (value for inner in self._inner for state in inner.state.values() for value in state.values())
        return not all(bool(device.local_shard(moment).isfinite().all()) for moment in moments)

    def drop_moments(self) -> None:
        """Let the next step begin them anew."""
        for inner in self._inner:
            inner.state.clear()

    @property
    def _agreed(self) -> list[torch.optim.Optimizer]:
        return [self._outer.optimizer]

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._model_tensors():
            yield name, self._outer.of(tensor)


def trained_parameters(model_parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return those that are trained, by the names that a checkpoint has for them."""
    return [
        (_WRAPPERS.sub("", name), parameter)
        for part in model_parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    ]


def set_lr(lr_schedulers: Any, step: int) -> None:
    """Let torchtitan's LRSchedulersContainer stand where it is after `step` steps, however many this group made."""
    for scheduler in lr_schedulers.schedulers:
        if scheduler.last_epoch != step:
            scheduler.last_epoch = step - 1
            with warnings.catch_warnings():  # torch's, if this group has yet to make its first step
                warnings.simplefilter("ignore")
                scheduler.step()


def join_norm(squares: float, gather: Callable[[int], list[int]]) -> float:
    """Return the norm of a vector that the ranks of a group have in parts, each the sum of squares of its own.

    Args:
        gather: an integer of every rank.
    """
    (bits,) = struct.unpack("q", struct.pack("d", squares))
    return math.sqrt(math.fsum(struct.unpack("d", struct.pack("q", part))[0] for part in gather(bits)))


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    shard = device.local_shard(parameter)
    return device.empty_host(shard.numel(), torch.float32).view(shard.shape)


def _num_copies(parameter: torch.Tensor) -> int:
    """Return how many ranks of the group hold this rank's part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(dim) for dim, place in enumerate(parameter.placements) if isinstance(place, Replicate))
