# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Mixtures of experts for tests (the hook `experts`): torchtitan's own debug models, narrower."""

from __future__ import annotations

import dataclasses

from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.train_spec import register_train_spec


def register() -> None:
    """Register the flavors "tiny" and "tiny_unbalanced" (no load balancing) of qwen3 and
    deepseek_v3.

    The model "qwen3_balanced" is qwen3 with the optimizer that balances the load; torchtitan 0.2.2
    omits that optimizer.
    """
    for coeff, flavor in ((1e-3, "tiny"), (None, "tiny_unbalanced")):
        qwen3.qwen3_args[flavor] = Qwen3ModelArgs(
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            hidden_dim=128,
            vocab_size=2048,
            moe_enabled=True,
            moe_inter_dim=32,
            moe_args=dataclasses.replace(
                qwen3.qwen3_args["debugmodel_moe"].moe_args,
                num_experts=8,
                top_k=2,
                load_balance_coeff=coeff,
            ),
        )
        deepseek_v3.deepseekv3_args[flavor] = DeepSeekV3ModelArgs(
            dim=64,
            n_layers=3,
            n_dense_layers=1,
            n_heads=4,
            inter_dim=128,
            moe_inter_dim=32,
            vocab_size=2048,
            q_lora_rank=0,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            mscale=0.70,
            moe_args=dataclasses.replace(
                deepseek_v3.deepseekv3_args["debugmodel"].moe_args, load_balance_coeff=coeff
            ),
        )
    register_train_spec(
        "qwen3_balanced",
        dataclasses.replace(
            qwen3.get_train_spec(), build_optimizers_fn=build_optimizers_with_moe_load_balancing
        ),
    )
