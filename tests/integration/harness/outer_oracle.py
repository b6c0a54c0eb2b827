# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The result that replica groups must reach with a semi-synchronous method, computed by plain torch
loops.

`main` runs in a process of its own, with one JSON argument:
    flags, shards, mask, begin: as for `harness.oracle`
    groups: number of replica groups
    microbatches: microbatches of each shard in a step
    length: steps of a group in a round
    fragments: modules of each fragment; null for one fragment of the whole model
    delay, alpha: settings of Streaming DiLoCo
    outer: "lr", "momentum" and "nesterov" of the outer optimizer
    rounds: files with a group's parameters after each round, to compare with
    output: JSON file to write, one entry for each round: [{"loss", "norm", "valid_tokens",
        "difference", "change"}], with the norm of the groups' mean change, the largest difference
        to `rounds`, and the largest change of a parameter
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness import oracle
from harness.mask import mask_labels

Weights = dict[str, torch.Tensor]


class Group:
    """One replica group: a model, an optimizer and its own part of the data."""

    def __init__(self, task: dict[str, Any], config: Any, spec: Any, number: int) -> None:
        self._config = config
        self.model = oracle.build_model(spec, config)
        if task["begin"] is not None:
            self.model.load_state_dict(torch.load(task["begin"]))
        self._optimizer = oracle.build_optimizer(self.model, config)
        self._microbatches = task["microbatches"] * oracle.batches_per_microbatch(config)
        total = task["shards"]
        each = total // task["groups"]
        self._shards = [
            self._read(spec, rank, total, task["mask"])
            for rank in range(number * each, (number + 1) * each)
        ]
        # Trained on each fragment since its last exchange.
        self.tokens = [0] * len(task["fragments"] or [None])
        self.facts: list[tuple[int, float]] = []  # valid tokens and sum of the losses of each step

    def _read(self, spec: Any, rank: int, total: int, mask: bool) -> Iterator[oracle.Batch]:
        tokenizer = spec.build_tokenizer_fn(self._config)
        loader = spec.build_dataloader_fn(
            dp_world_size=total, dp_rank=rank, tokenizer=tokenizer, job_config=self._config
        )
        for batch, (inputs, labels) in enumerate(loader):
            yield inputs, mask_labels(labels, rank, batch) if mask else labels

    def train(self, until: int) -> None:
        """Make steps until so many are made."""
        for step in range(len(self.facts), until):
            batches = [next(shard) for shard in self._shards for _ in range(self._microbatches)]
            rate, max_norm = (
                oracle.learning_rate(self._config, step),
                self._config.training.max_norm,
            )
            made = oracle.train_step(self.model, self._optimizer, batches, rate, max_norm)
            self.tokens = [tokens + made["valid_tokens"] for tokens in self.tokens]
            self.facts.append((made["valid_tokens"], made["loss"] * made["valid_tokens"]))

    def weights(self) -> Weights:
        """Return the model's parameters themselves."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


class Nesterov:
    """The outer optimizer: v = momentum * v + d; x -= lr * (d + momentum * v), or without Nesterov
    x -= lr * v.
    """

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
    spec = oracle.find_spec(config)
    groups = [Group(task, config, spec, number) for number in range(task["groups"])]
    outer = Nesterov(**task["outer"])
    anchors = {name: value.clone() for name, value in groups[0].weights().items()}
    fragment_of = {name: _find(name, task["fragments"]) for name in anchors}
    total, length = config.training.steps, task["length"]
    rounds = []
    for number, path in enumerate(task["rounds"]):
        first, end = number * length, min((number + 1) * length, total)
        for group in groups:
            group.train(end)
        is_last = end == total
        exchanged = {number % len(group.tokens)} if not is_last else set(range(len(group.tokens)))
        sent = [group.tokens for group in groups]
        changes: Weights = {}
        for name in (name for name in anchors if fragment_of[name] in exchanged):
            weights = [tokens[fragment_of[name]] for tokens in sent]
            changes[name] = sum(
                (anchors[name] - group.weights()[name]) * (weight / sum(weights))
                for group, weight in zip(groups, weights, strict=True)
            )
        if not is_last:
            for group in groups:
                group.train(min(end + task["delay"], total))
        before, anchors = anchors, anchors | outer.step(anchors, changes)
        alpha = 0.0 if is_last else task["alpha"]
        for group, tokens in zip(groups, sent, strict=True):
            for name, value in group.weights().items():
                if name in changes:
                    value.copy_(alpha * value + (1 - alpha) * anchors[name])
            for fragment in exchanged:
                group.tokens[fragment] -= tokens[fragment]
        facts = [fact for group in groups for fact in group.facts[first:end]]
        valid_tokens = sum(tokens for tokens, _ in facts)
        theirs = torch.load(path)
        assert anchors.keys() == theirs.keys()
        rounds.append(
            {
                "loss": sum(loss for _, loss in facts) / valid_tokens,
                "norm": sum(change.double().square().sum().item() for change in changes.values())
                ** 0.5,
                "valid_tokens": valid_tokens,
                "difference": max(
                    (value - theirs[name]).abs().max().item() for name, value in anchors.items()
                ),
                "change": max(
                    (value - before[name]).abs().max().item() for name, value in anchors.items()
                ),
            }
        )
    Path(task["output"]).write_text(json.dumps(rounds))


def _find(name: str, fragments: list[list[str]] | None) -> int:
    if fragments is None:
        return 0
    known = {module: number for number, modules in enumerate(fragments) for module in modules}
    return known[max((module for module in known if f"{name}.".startswith(f"{module}.")), key=len)]
