# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What replica groups must compute with a semi-synchronous method, as plain torch loops in one process.

Called as `main` in a process of its own, with one JSON argument:
    flags, shards, mask, begin   as for `harness.oracle`
    groups         number of them
    microbatches   of each shard in a step
    sync_steps     steps of a group in a round
    outer          "lr", "momentum" and "nesterov" of the outer optimizer
    rounds         files with a group's parameters behind each round, to compare with
    output         JSON file to write: [{"loss", "norm", "valid_tokens", "difference", "change"}] of the rounds: norm
                   of the groups' mean change; the largest difference to `rounds`, and the largest change of a parameter
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchtitan.protocols.train_spec as train_spec

from harness import oracle
from harness.mask import mask_labels

Weights = dict[str, torch.Tensor]


class Group:
    """One replica group: a model, an optimizer and data of its own."""

    def __init__(self, task: dict[str, Any], config: Any, spec: Any, number: int) -> None:
        self._config = config
        self.model = oracle.build_model(spec, config)
        if task["begin"] is not None:
            self.model.load_state_dict(torch.load(task["begin"]))
        self._optimizer = oracle.build_optimizer(self.model, config)
        self._microbatches = task["microbatches"]
        total = task["shards"]
        each = total // task["groups"]
        self._shards = [
            self._read(spec, rank, total, task["mask"]) for rank in range(number * each, (number + 1) * each)
        ]

    def _read(self, spec: Any, rank: int, total: int, mask: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokenizer = spec.build_tokenizer_fn(self._config)
        loader = spec.build_dataloader_fn(
            dp_world_size=total, dp_rank=rank, tokenizer=tokenizer, job_config=self._config
        )
        for batch, (inputs, labels) in enumerate(loader):
            yield inputs["input"], mask_labels(labels, rank, batch) if mask else labels

    def train(self, steps: range) -> tuple[int, float]:
        """Make these steps; returns valid tokens and the sum of their losses."""
        tokens, loss = 0, 0.0
        for step in steps:
            batches = [next(shard) for shard in self._shards for _ in range(self._microbatches)]
            rate, max_norm = oracle.learning_rate(self._config, step), self._config.training.max_norm
            made = oracle.train_step(self.model, self._optimizer, batches, rate, max_norm)
            tokens += made["valid_tokens"]
            loss += made["loss"] * made["valid_tokens"]
        return tokens, loss

    def weights(self) -> Weights:
        """Return the model's parameters themselves."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


class Nesterov:
    """The outer optimizer: v = momentum * v + d, then x = x - lr * (d + momentum * v), or without it x - lr * v."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._velocity: Weights = {}

    def step(self, anchors: Weights, changes: Weights) -> Weights:
        """Return the next anchors."""
        after = {}
        for name, change in changes.items():
            velocity = self._momentum * self._velocity.get(name, torch.zeros_like(change)) + change
            self._velocity[name] = velocity
            direction = change + self._momentum * velocity if self._nesterov else velocity
            after[name] = anchors[name] - self._lr * direction
        return after


def main() -> None:
    task = json.loads(sys.argv[1])
    config = oracle.read_config(task["flags"])
    spec = train_spec.get_train_spec(config.model.name)
    groups = [Group(task, config, spec, number) for number in range(task["groups"])]
    outer = Nesterov(**task["outer"])
    anchors = {name: value.clone() for name, value in groups[0].weights().items()}
    rounds = []
    for number, path in enumerate(task["rounds"]):
        first = number * task["sync_steps"]
        steps = range(first, min(first + task["sync_steps"], config.training.steps))
        made = [group.train(steps) for group in groups]
        valid_tokens = sum(tokens for tokens, _ in made)
        changes = {name: torch.zeros_like(anchor) for name, anchor in anchors.items()}
        for group, (tokens, _) in zip(groups, made, strict=True):
            for name, value in group.weights().items():
                changes[name] += (anchors[name] - value) * (tokens / valid_tokens)
        before, anchors = anchors, outer.step(anchors, changes)
        for group in groups:
            for name, value in group.weights().items():
                value.copy_(anchors[name])
        theirs = torch.load(path)
        assert anchors.keys() == theirs.keys()
        rounds.append(
            {
                "loss": sum(loss for _, loss in made) / valid_tokens,
                "norm": sum(change.double().square().sum().item() for change in changes.values()) ** 0.5,
                "valid_tokens": valid_tokens,
                "difference": max((value - theirs[name]).abs().max().item() for name, value in anchors.items()),
                "change": max((value - before[name]).abs().max().item() for name, value in anchors.items()),
            }
        )
    Path(task["output"]).write_text(json.dumps(rounds))
