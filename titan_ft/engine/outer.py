# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The outer model of a semi-synchronous method, on which the groups agree between two rounds.

One round of LocalSGD and DiLoCo (arXiv 2311.08105):

1. All groups start with the same weights, the *anchors*.
2. Each group trains `sync_steps` steps by itself, with its *inner* optimizer.
3. The groups exchange their *changes*: anchors minus weights.
4. The *outer* optimizer updates the anchors, with the mean of the changes as the gradient.

With Streaming DiLoCo (arXiv 2501.18512), a round does steps 3 and 4 for one fragment of the model.

The job's state consists of the anchors, the state of the outer optimizer, and the counters. Each
group has its own moments of the inner optimizer, and its own weights during a round.

See docs/semi_sync.md.
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
from titan_ft.transfer.snapshot import Counters, TrainState, to_dtensor_like

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""In names of parameters: the wrappers of torch.compile and of activation checkpointing."""


class OuterModel:
    """This rank's shards of the anchors in host memory, and the outer optimizer over them.

    `RoundStrategy` calls it, on the training thread. The memory is pinned if there is a GPU.

    Args:
        model_parts: as torchtitan's Trainer holds them. Their weights are the first anchors.
        settings: of the outer optimizer.
        fragments: fragment of each trainable parameter; empty = all have fragment 0.

    Attributes:
        anchors: one for each trainable parameter, in the order of the model, in fp32.
        optimizer: steps the anchors by their gradients.
        fragments: fragment of each anchor.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        settings: OuterOptimizer,
        fragments: Sequence[int] = (),
    ) -> None:
        self._named = trained_parameters(model_parts)
        self.fragments = list(fragments) or [0] * len(self._named)
        self._changes: list[torch.Tensor] = []  # memory for the changes, from the first round on
        self.anchors = [nn.Parameter(_empty_like(parameter)) for _, parameter in self._named]
        self._anchor_of: dict[int, nn.Parameter] = {}  # by the parameter's id
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            self._anchor_of[id(parameter)] = anchor
        self.optimizer = torch.optim.SGD(
            self.anchors,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
        )
        if self.has_state:
            # The momentum exists from the start, as it does after a load. Zeros make the same first
            # update as no momentum.
            for anchor in self.anchors:
                zeros = torch.zeros_like(anchor, requires_grad=False)
                self.optimizer.state[anchor]["momentum_buffer"] = zeros
        self.adopt_model()

    @torch.no_grad()
    def adopt_model(self) -> None:
        """Set the anchors to the model's weights, for instance to those of a checkpoint."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            anchor.copy_(device.local_shard(parameter), non_blocking=True)
        device.synchronize()

    @torch.no_grad()
    def restore_model(self) -> None:
        """Set the model's weights to the anchors."""
        for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
            device.local_shard(parameter).copy_(anchor, non_blocking=True)
        device.synchronize()

    @contextlib.contextmanager
    @torch.no_grad()
    def lend_to_model(self) -> Iterator[None]:
        """Give the model the anchors inside the context, for a save or a validation."""
        own = []
        for _, parameter in self._named:
            own.append(device.local_shard(parameter).to("cpu", copy=True))
        self.restore_model()
        try:
            yield
        finally:
            for weights, (_, parameter) in zip(own, self._named, strict=True):
                device.local_shard(parameter).copy_(weights)

    @torch.no_grad()
    def compute_changes(self, weights: Mapping[int, float]) -> None:
        """Set the gradients of some anchors to their changes: anchor - weight of the model.

        Args:
            weights: factor of the change, by fragment. Other fragments get no gradient.
        """
        if not self._changes:
            self._changes = [_empty_like(parameter) for _, parameter in self._named]
        changed: list[tuple[nn.Parameter, torch.Tensor, float]] = []
        for anchor, change, fragment, (_, parameter) in zip(
            self.anchors,
            self._changes,
            self.fragments,
            self._named,
            strict=True,
        ):
            if fragment not in weights:
                anchor.grad = None
                continue
            anchor.grad = change
            change.copy_(device.local_shard(parameter), non_blocking=True)
            changed.append((anchor, change, weights[fragment]))
        device.synchronize()
        for anchor, change, weight in changed:
            torch.sub(anchor, change, out=change).mul_(weight)

    @torch.no_grad()
    def step(self, alpha: float = 0.0) -> float:
        """Update the anchors that have a gradient, and set the model's weights to them.

        Args:
            alpha: share of its own weights that the model keeps; 0 = none.

        Returns:
            The sum of squares of this rank's part of the gradients. If several ranks hold the same
            part, each returns its share of the sum.
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
                if alpha:
                    weights = torch.lerp(weights, shard, alpha)
                shard.copy_(weights)
        device.synchronize()
        return squares

    def named_anchors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name of each parameter, and its anchor."""
        for anchor, (name, _) in zip(self.anchors, self._named, strict=True):
            yield name, anchor

    def find_anchor(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the anchor of a parameter; the parameter itself if it is not trained."""
        return self._anchor_of.get(id(parameter), parameter)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the outer optimizer's state for a checkpoint, sharded as the model.

        The anchors are saved as the model's weights.
        """
        if not self.has_state:
            return {}
        state = {}
        for anchor, (name, parameter) in zip(self.anchors, self._named, strict=True):
            momentum = self.momentum(anchor).to(parameter.device, copy=True)
            state[f"momentum.{name}"] = to_dtensor_like(parameter, momentum)
        return state

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load a state that `state_dict` has returned."""
        for anchor, (name, _) in zip(self.anchors, self._named, strict=True):
            momentum = state_dict[f"momentum.{name}"]
            self.momentum(anchor).copy_(device.local_shard(momentum))

    @property
    def has_state(self) -> bool:
        """True if the outer optimizer has a state."""
        return self.optimizer.defaults["momentum"] > 0

    def momentum(self, anchor: nn.Parameter) -> torch.Tensor:
        """Return the outer optimizer's momentum of an anchor."""
        momentum: torch.Tensor = self.optimizer.state[anchor]["momentum_buffer"]
        return momentum


class OuterState(TrainState):
    """The state that a joiner gets under a semi-synchronous method.

    `RoundStrategy` builds it, and `Donor` and `Heal` call it as any `TrainState`. The digest covers
    the anchors and the state of the outer optimizer. A copy also has the moments of the donor's
    inner optimizer. They differ between groups, so they are not in the digest. The joiner needs
    some, and any finite ones will do.
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
        super().__init__(
            model_parts,
            [outer.optimizer, *optimizers],
            lr_schedulers,
            counters,
            on_load,
            num_ranks,
        )
        self._outer = outer
        self._inner = list(optimizers)

    @property
    def has_nonfinite_moments(self) -> bool:
        """True if a moment of this rank is not finite.

        Its gradients, or those of the donor's group, were not finite either.
        """
        for inner in self._inner:
            for state in inner.state.values():
                for moment in state.values():
                    if not device.local_shard(moment).isfinite().all():
                        return True
        return False

    def drop_moments(self) -> None:
        """Drop the moments of the inner optimizers. Their next step starts with new ones."""
        for inner in self._inner:
            inner.state.clear()

    @property
    def _agreed_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state is equal in all groups, and so is in the digest."""
        return [self._outer.optimizer]

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._model_tensors():
            yield name, self._outer.find_anchor(tensor)


def trained_parameters(model_parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters with the names that they have in a checkpoint."""
    named = []
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                named.append((_WRAPPERS.sub("", name), parameter))
    return named


def set_lr(lr_schedulers: Any, step: int) -> None:
    """Set torchtitan's LRSchedulersContainer to its state after `step` steps.

    This group may have made another number of steps itself.
    """
    for scheduler in lr_schedulers.schedulers:
        if scheduler.last_epoch == step:
            continue
        scheduler.last_epoch = step - 1
        # Before this group's first optimizer step, torch warns about the order of the two calls.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()


def norm_over_ranks(squares: float, gather: Callable[[int], list[int]]) -> float:
    """Return the norm of a vector whose parts lie on the ranks of a group. A collective.

    Args:
        squares: sum of squares of this rank's part.
        gather: gathers an integer of every rank.
    """
    # `gather` takes integers only, so send the bits of the float as an integer.
    (bits,) = struct.unpack("q", struct.pack("d", squares))
    parts = []
    for part_bits in gather(bits):
        (part,) = struct.unpack("d", struct.pack("q", part_bits))
        parts.append(part)
    return math.sqrt(math.fsum(parts))


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    shard = device.local_shard(parameter)
    return device.empty_host(shard.numel(), torch.float32).view(shard.shape)


def _num_copies(parameter: torch.Tensor) -> int:
    """Return how many ranks of the group hold this rank's part of a parameter."""
    number = 1
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Replicate):
                number *= parameter.device_mesh.size(dim)
    return number
