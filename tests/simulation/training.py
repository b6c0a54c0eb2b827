# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulated training: a few numbers with momentum.

Gradients follow from slot, batch, rank and weights. Weights and momentum are small tensors of the
engine's own kind, because their bytes count. `gradient` and `descend` are plain functions, so the
oracle can compute the same by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.lr_policy import lr_factor
from titan_ft.protocol.round import Update
from titan_ft.transfer.snapshot import WHOLE, Part, Snapshot

SHAPES = (3, 2)
"""Sizes of the parameters; each gets a bucket of its own."""
OTHER_SHAPES = (1, 4)
"""Those of a model that is another one."""
SIZE = sum(SHAPES)

_MOMENTUM = 0.5
_BASE = np.arange(SIZE, dtype=np.float32)


def initial(rank: int) -> np.ndarray:
    """Return weights and momentum before the first step: float32 [2, SIZE]."""
    return np.stack([_BASE / 4 + rank, np.zeros(SIZE, np.float32)]).astype(np.float32)


def valid_tokens(slot: int, batch: int) -> int:
    """Return the number of tokens with a label in a slot's batch."""
    return 6 + (3 * slot + 5 * batch) % 5


def gradient(slot: int, batch: int, rank: int, weights: np.ndarray, coupling: float) -> np.ndarray:
    """Return the mean gradient of one batch at these weights."""
    return np.sin(_BASE * 3 + slot * 7 + batch * 2.5 + rank) + coupling * weights


def learning_rate(step: int, share: float, lr_policy: str) -> float:
    """Return the LR of update `step`.

    Args:
        share: share of the global batch that is in the update.
    """
    return 0.1 * (1 - step / 1000) * lr_factor(lr_policy, share)


def descend(state: np.ndarray, mean: np.ndarray, rate: float) -> np.ndarray:
    """Return the state after an update with this mean gradient."""
    momentum = _MOMENTUM * state[1] + mean
    return np.stack([state[0] - state.dtype.type(rate) * momentum, momentum])


@dataclass
class Progress:
    steps: int = 0
    tokens: int = 0


class State:
    """Weights, momentum and counters of one rank.

    It has the interface of `titan_ft.transfer.snapshot.TrainState`.
    """

    fragments: Sequence[int] = ()  # fragment of each parameter
    buffers = False  # a forward may write a part of the state
    # True if the host is short of memory; see Options.scarce.
    is_scarce: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, rank: int, ledger: Ledger, shapes: tuple[int, ...] = SHAPES) -> None:
        self.rank, self.ledger, self._shapes = rank, ledger, shapes
        self.progress = Progress()
        self.held = (0, 0)  # step and lineage of the state
        # Known to the simulation only: a byte was changed from outside.
        self.tainted = False
        self.inherited = False  # the same of the state that was loaded
        self.shown = False  # the same of the state whose digest was taken last
        self.payload = torch.from_numpy(initial(rank).copy())
        self.array = self.payload.numpy()
        flat = self.payload[0]
        self.parameters = [nn.Parameter(part) for part in flat.split(self._shapes)]
        self._spare: torch.Tensor | None = None
        self.load_seconds = 0.0
        # step and lineage of the state that other threads may copy; (-1, 0) = none
        self._shared = (-1, 0)

    def copy(self, step: int, lineage: int, part: Part = WHOLE) -> Snapshot:
        """Copy the state, or a part, to new memory."""
        size = self.array.nbytes
        if part != WHOLE and not self.is_scarce():
            part = WHOLE
        held = part.byte_range([{"offset": offset} for offset in range(0, size, 4)], size)
        target, self._spare = self._spare, None
        if target is None or target.numel() != len(held):
            target = torch.empty(len(held), dtype=torch.uint8)
        np.copyto(target.numpy(), self.array.view(np.uint8).reshape(-1)[held.start : held.stop])
        header = {
            "bytes": size,
            "ledger": self.ledger.state_dict(),
            "steps": self.progress.steps,
            "tokens": self.progress.tokens,
            "tainted": self.tainted,
        }
        return Snapshot(
            step, lineage, json.dumps(header, sort_keys=True).encode(), target, part, held.start
        )

    def allow_copying(self, step: int, lineage: int) -> bool:
        """Let other threads copy the state until the next update.

        Returns:
            False if a forward may change the state before.
        """
        if self.buffers:
            return False
        self._shared = (step, lineage)
        return True

    def forbid_copying(self) -> None:
        """End the time of `share`."""
        self._shared = (-1, 0)

    def copy_if_allowed(self, step: int, part: Part = WHOLE) -> Snapshot | None:
        """Copy the state, or a part, if it is still shared."""
        return self.copy(*self._shared, part) if self._shared[0] == step else None

    def reuse_memory(self, snapshot: Snapshot) -> None:
        """Take the memory of a snapshot back."""
        self._spare = snapshot.payload

    def load(self, snapshot: Snapshot) -> None:
        """Replace this state by a fetched one."""
        self.forbid_copying()
        np.copyto(self.array, snapshot.payload.numpy().view(np.float32).reshape(2, SIZE))
        header: dict[str, Any] = json.loads(snapshot.header)
        self.ledger.load_state_dict(header["ledger"])
        self.progress = Progress(header["steps"], header["tokens"])
        self.tainted = self.inherited = header["tainted"]
        self.held = (snapshot.step, snapshot.lineage)

    def restore(self) -> None:
        """Do nothing: only updates change the weights."""

    def digest(self) -> str:
        """Hash the bytes of weights, momentum and LR for a comparison with other groups."""
        self.shown = self.tainted
        return self.peek()

    def peek(self) -> str:
        """Return the same digest for the world. No group sees it."""
        octets = self.array.tobytes() + str(self.progress.steps).encode()
        return hashlib.blake2b(octets, digest_size=16).hexdigest()

    def flip(self, momentum: bool, place: int, bit: int) -> None:
        """Flip a bit of a weight or of the momentum."""
        self.array[int(momentum)].view("uint32")[place] ^= 1 << bit

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def forget_hooks(self) -> None:
        """Remove the parameters' hooks.

        They form a cycle that the garbage collector cannot free, and the world would stay in
        memory.
        """
        for parameter in self.parameters:
            if parameter._post_accumulate_grad_hooks is not None:
                parameter._post_accumulate_grad_hooks.clear()

    def add_gradient(self, values: np.ndarray, between: Callable[[], None] = lambda: None) -> None:
        """Add to the gradients as a backward does: the last parameters first, each followed by its
        hooks.

        Args:
            between: called before each parameter.
        """
        grads = torch.from_numpy(values.astype(np.float32)).split(self._shapes)
        for parameter, grad in zip(self.parameters[::-1], grads[::-1], strict=True):
            between()
            if parameter.grad is None:
                parameter.grad = grad.clone()
            else:
                parameter.grad += grad
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)

    def descend(self, rate: float) -> None:
        """Make the optimizer's step with the gradients."""
        self.forbid_copying()
        mean = np.concatenate(
            [parameter.grad.numpy() for parameter in self.parameters if parameter.grad is not None]
        )
        np.copyto(self.array, descend(self.array, mean, rate))

    def advance(self, update: Update) -> None:
        """Count an update."""
        self.progress.steps += 1
        self.progress.tokens += update.tokens
        self.ledger.advance(update.entries, update.readers)
