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
from torchtitan.components.loss import IGNORE_INDEX

from harness import flavor
from harness.mask import mask_labels
from titan_ft import config as ft_config
from titan_ft.data.assets import resolve
from titan_ft.data.datasets import register_datasets
from titan_ft.host.release import series

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The inputs of a model, by their names, and the labels."""


def main() -> None:
    task = json.loads(sys.argv[1])
    config = read_config(task["flags"])
    spec = find_spec(config)
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
    reads = task["microbatches"] * batches_per_microbatch(config)
    for step in range(config.training.steps):
        batches: list[Batch] = []
        for rank, shard in enumerate(shards):
            for number in range(step * reads, (step + 1) * reads):
                inputs, labels = next(shard)
                batches.append(
                    (inputs, mask_labels(labels, rank, number) if task["mask"] else labels)
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
    batches: list[Batch],
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
            compute_logits(model, inputs).flatten(0, 1).float(),
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


def compute_logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits, [sequence, token, word].

    torchtitan 0.3 attends within a document only. Its loader gives the positions, of which its
    trainer makes the mask.
    """
    more = {}
    if series() != "0.2":
        positions = inputs["positions"]
        masks = model.get_attention_masks(positions=positions)
        more = {"positions": positions, "attention_masks": masks}
    logits: torch.Tensor = model(inputs["input"], **more)
    return logits


def batches_per_microbatch(config: Any) -> int:
    """Return the number of a loader's batches in one forward and backward of a data shard.

    With a pipeline, 0.3's loader gives the pipeline's microbatches.
    """
    if series() == "0.2" or config.parallelism.pipeline_parallel_degree == 1:
        return 1
    training, parallel = config.training, config.parallelism
    return int(training.local_batch_size // parallel.pipeline_parallel_microbatch_size)


def build_optimizer(model: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
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


def learning_rate(config: Any, step: int) -> float:
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
    config: Any
    if series() == "0.2":
        from torchtitan.config import ConfigManager, JobConfig

        merged = ConfigManager._merge_configs(JobConfig, ft_config.JobConfig)
        config = ConfigManager(merged).parse_args(flags)
    else:
        from titan_ft.training import job_config

        config = job_config.prepare_config(*flags)  # without the hooks of the groups
    config.model.hf_assets_path = str(resolve(config.model.hf_assets_path))
    return config


def find_spec(config: Any) -> Any:
    """Return torchtitan's description of the model; with 0.3, this package's in the same form."""
    if series() == "0.2":
        from torchtitan.protocols import train_spec

        return train_spec.get_train_spec(config.model.name)
    from titan_ft.host import titan

    return titan.get_train_spec(config.model.name)


def build_model(spec: Any, config: Any) -> torch.nn.Module:
    """Build the model with the weights that torchtitan begins with for `debug.seed`."""
    model: Any
    if series() == "0.2":
        arguments = spec.model_args[config.model.flavor]
        arguments.update_from_config(config)
        torch.manual_seed(config.debug.seed)
        with torch.device("meta"):
            model = spec.model_cls(arguments)
    else:
        from titan_ft.host import titan

        torch.manual_seed(config.debug.seed)
        model, _ = titan.build_model(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    return model
