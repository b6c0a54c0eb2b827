# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The result that replica groups must reach, computed by a plain torch loop in one process over all
groups' data.

`main` runs in a process of its own, with one JSON argument:
    flags: flags of the run, as the workers get them
    shards: number of data shards of all groups together
    microbatches: microbatches of each shard in a step
    mask: whether labels are masked (harness.mask)
    begin: file with the initial parameters; null for those that torchtitan draws for `debug.seed`.
        A pipeline needs a file, because each of its stages has a seed of its own
    parameters: file with a group's final parameters, to compare with
    output: JSON file to write: {"steps": [{"loss", "grad_norm", "lr", "valid_tokens"}],
        "difference", "change"}: the largest difference to `parameters`, and the largest change of a
        parameter in training
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import torchtitan.protocols.train_spec as train_spec
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import ConfigManager, JobConfig

from harness import flavor
from harness.mask import mask_labels
from titan_ft import config as ft_config
from titan_ft.data.assets import resolve
from titan_ft.data.datasets import register_datasets


def main() -> None:
    task = json.loads(sys.argv[1])
    config = read_config(task["flags"])
    spec = train_spec.get_train_spec(config.model.name)
    model = build_model(spec, config)
    if task["begin"] is not None:
        model.load_state_dict(torch.load(task["begin"]))
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokenizer = spec.build_tokenizer_fn(config)
    shards = [
        iter(
            spec.build_dataloader_fn(
                dp_world_size=task["shards"], dp_rank=rank, tokenizer=tokenizer, job_config=config
            )
        )
        for rank in range(task["shards"])
    ]
    optimizer = build_optimizer(model, config)
    steps = []
    for step in range(config.training.steps):
        batches = []
        for rank, shard in enumerate(shards):
            for number in range(task["microbatches"]):
                inputs, labels = next(shard)
                batch = step * task["microbatches"] + number
                batches.append(
                    (inputs["input"], mask_labels(labels, rank, batch) if task["mask"] else labels)
                )
        steps.append(
            train_step(
                model, optimizer, batches, learning_rate(config, step), config.training.max_norm
            )
        )
    theirs = torch.load(task["parameters"])
    parameters = dict(model.named_parameters())
    assert parameters.keys() == theirs.keys()
    result = {
        "steps": steps,
        "difference": max(
            (value - theirs[name]).abs().max().item() for name, value in parameters.items()
        ),
        "change": max(
            (value - begin[name]).abs().max().item() for name, value in parameters.items()
        ),
    }
    Path(task["output"]).write_text(json.dumps(result))


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    lr: float,
    max_norm: float,
) -> dict[str, Any]:
    """Make one update with the mean loss per valid token of all batches together."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    valid_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
    total = 0.0
    for inputs, labels in batches:
        loss = F.cross_entropy(
            model(inputs).flatten(0, 1).float(),
            labels.flatten(),
            reduction="sum",
            ignore_index=IGNORE_INDEX,
        )
        (loss / max(valid_tokens, 1)).backward()
        total += loss.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return {
        "loss": total / max(valid_tokens, 1),
        "grad_norm": grad_norm.item(),
        "lr": lr,
        "valid_tokens": valid_tokens,
    }


def build_optimizer(model: torch.nn.Module, config: JobConfig) -> torch.optim.Optimizer:
    """Build the optimizer of torchtitan's config."""
    settings = config.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=settings.implementation == "foreach",
        fused=settings.implementation == "fused",
    )


def learning_rate(config: JobConfig, step: int) -> float:
    """Return the LR of update number `step`, from 0: linear warm-up, then linear decay to a
    fraction.
    """
    schedule, total = config.lr_scheduler, config.training.steps
    assert schedule.decay_type == "linear"
    warmup, decay = schedule.warmup_steps, round(total * schedule.decay_ratio)
    assert warmup + decay == total
    if step < warmup:
        return config.optimizer.lr * (step + 1) / warmup
    return config.optimizer.lr * (1 - (1 - schedule.min_lr_factor) * (step - warmup) / decay)


def read_config(flags: list[str]) -> Any:
    flavor.register()
    register_datasets()
    config: Any = ConfigManager(
        ConfigManager._merge_configs(JobConfig, ft_config.JobConfig)
    ).parse_args(flags)
    config.model.hf_assets_path = str(resolve(config.model.hf_assets_path))
    return config


def build_model(spec: Any, config: Any) -> torch.nn.Module:
    """Build the model with the weights that torchtitan begins with for `debug.seed`."""
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    torch.manual_seed(config.debug.seed)
    with torch.device("meta"):
        model: torch.nn.Module = spec.model_cls(arguments)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model.train()
