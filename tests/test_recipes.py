# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The configs of models that users train: each resolves, builds its model, and trains one with
narrower layers.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli

from titan_ft.round_settings import outer_optimizer, steps_per_round
from titan_ft.run.events import StepCommitted
from titan_ft.run.log import read_events
from titan_ft.training.divisions import check_ranks
from titan_ft.training.job_config import read_config

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


class Recipe(NamedTuple):
    name: str
    ranks: int
    """Of a group, as the recipe says."""
    parameters: int
    """As published: the sum over the tensors of the model's files on the Hugging Face hub."""
    not_tied: int = 0
    """Parameters that torchtitan's class has twice."""


RECIPES = [
    Recipe("llama3_1b", 10, 1_235_814_400, not_tied=128_256 * 2048),
    Recipe("llama3_8b", 8, 8_030_261_248),
    Recipe("llama3_70b", 64, 70_553_706_496),
    Recipe("llama3_405b", 128, 405_853_388_800),
    Recipe("qwen3_30b_a3b", 8, 30_532_122_624),
]
parametrize = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def resolve(recipe: Recipe) -> Any:
    """Return the config as workers read it, with a tokenizer that is here."""
    return read_config(
        f"--job.config_file={CONFIGS / recipe.name}.toml",
        "--model.hf_assets_path=titan_ft://tokenizer",
    )


DEBUG = {"llama3_debug", "llama3_debug_diloco"}


def test_every_config_but_the_debug_model_is_a_recipe() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {
        *DEBUG,
        *(recipe.name for recipe in RECIPES),
    }


def test_the_debug_model_with_diloco_trains_the_same() -> None:
    """It differs from the synchronous one only in how the groups exchange, so that the two can be
    compared.
    """
    plain, diloco = (tomli.loads((CONFIGS / f"{name}.toml").read_text()) for name in sorted(DEBUG))
    ft = read_config(f"--job.config_file={CONFIGS / 'llama3_debug_diloco.toml'}").fault_tolerance
    assert (ft.semi_sync_method, steps_per_round(ft)) == ("diloco", 10)
    assert diloco["training"]["steps"] % steps_per_round(ft) == 0
    assert outer_optimizer(ft) == (0.7, 0.9, True)
    for values in (plain, diloco):
        del values["job"], values["fault_tolerance"]
    assert plain == diloco


@parametrize
def test_a_recipe_resolves_and_builds_the_published_model(recipe: Recipe) -> None:
    """Every key is one of torchtitan's or ours, its group can be cut as it says, and the model is
    the one it names.
    """
    config = resolve(recipe)
    check_ranks(config, recipe.ranks)
    assert config.fault_tolerance.enable
    from titan_ft.host.titan import build_model

    model, _ = build_model(config)
    assert (
        sum(parameter.numel() for parameter in model.parameters()) - recipe.not_tied
        == recipe.parameters
    )


@parametrize
def test_a_recipe_says_where_each_hyperparameter_comes_from(recipe: Recipe) -> None:
    """A comment in brackets on its line names one of the sources that the head of the file
    lists.
    """
    text = (CONFIGS / f"{recipe.name}.toml").read_text()
    head = text.partition("\n[")[0]
    sources = {
        line.split("[")[1].split("]")[0] for line in head.splitlines() if line.startswith("#   [")
    }
    assert {"ours"} < sources
    values = tomli.loads(text)
    for table in ("optimizer", "lr_scheduler", "training"):
        lines = text.partition(f"\n[{table}]\n")[2].partition("\n[")[0].splitlines()
        for key in values[table]:
            line = next(line for line in lines if line.startswith(f"{key} "))
            assert any(f"# [{source}]" in line for source in sources), line


@parametrize
def test_a_recipe_saves_what_can_be_gone_on_from(recipe: Recipe) -> None:
    """A run that costs weeks outlives the loss of all its groups, and a stop; the published one has
    no checkpoints.
    """
    checkpoint = resolve(recipe).checkpoint
    if recipe.name == "llama3_1b":
        assert not checkpoint.enable
        return
    assert (checkpoint.enable, checkpoint.last_save_model_only) == (True, False)
    assert checkpoint.async_mode == "async", "valid with GPUs and without, and nobody waits for it"
    assert 2 <= checkpoint.keep_latest_k <= 3
    assert checkpoint.interval == 500


def test_the_debug_models_save_nothing() -> None:
    """They are for a quick look."""
    for name in DEBUG:
        assert not tomli.loads((CONFIGS / f"{name}.toml").read_text())["checkpoint"]["enable"]


def test_a_narrow_llama_learns() -> None:
    """One step in this process with the recipe's optimizer: a finite loss, which the same batch
    then has less of.
    """
    config = resolve(RECIPES[1])
    config.optimizer.implementation = "foreach"
    import torch
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.models.llama3 import Transformer, llama3_args

    narrow = {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "max_seq_len": 16,
    }
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(llama3_args[config.model.flavor], **narrow))
    with torch.no_grad():
        model.init_weights()
    optimizers = build_optimizers([model], config.optimizer, None)
    tokens = torch.arange(16)[None]

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    before = loss()
    before.backward()
    optimizers.step()
    assert loss().item() < before.item()


NARROW = """
import dataclasses
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.qwen3 import qwen3_args

small = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048}
for name in llama3_args:
    llama3_args[name] = dataclasses.replace(llama3_args[name], **small, multiple_of=32)
experts = dataclasses.replace(qwen3_args["30B-A3B"].moe_args, num_experts=8, top_k=2)
qwen3_args["30B-A3B"] = dataclasses.replace(
    qwen3_args["30B-A3B"], **small, head_dim=16, hidden_dim=128, moe_inter_dim=32, moe_args=experts
)
"""
ON_CPU = (
    "--experimental.custom_import=narrow --model.hf_assets_path=titan_ft://tokenizer "
    "--training.dataset=austen --training.seq_len=64 --training.steps=1 --fault_tolerance.process_group=gloo "
    "--compile.no-enable --parallelism.no-enable-async-tensor-parallel --parallelism.tensor_parallel_degree=1 "
    "--parallelism.expert_parallel_degree=1 --fault_tolerance.min_replica_size=1 --profiling.no-enable-profiling"
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.slow
def test_a_narrow_model_of_a_recipe_trains(recipe: Recipe, tmp_path: Path) -> None:
    """One step of two groups, with the recipe's optimizer, schedule, batch and activation
    checkpointing.
    """
    (tmp_path / "narrow.py").write_text(NARROW)
    config = tmp_path / "recipe.toml"
    config.write_text(
        (CONFIGS / f"{recipe.name}.toml").read_text().replace('converters = ["float8"]', "")
    )
    launch = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(config),
        "--replicas=2",
        "--ranks-per-replica=1",
    ]
    ended = subprocess.run(
        [*launch, f"--run-dir={tmp_path / 'run'}", "--", *ON_CPU.split()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    commits = [
        event
        for event in read_events(tmp_path / "run" / "events")
        if isinstance(event, StepCommitted)
    ]
    assert sorted((event.replica, event.step) for event in commits) == [(0, 1), (1, 1)]
