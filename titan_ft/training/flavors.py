# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Flavors of models that torchtitan 0.2.2 does not have: of its recipes elsewhere, and one for many groups."""

from __future__ import annotations

from dataclasses import replace


def register_flavors(model: str) -> None:
    """Add the flavors that titan_ft brings for this model of torchtitan's; one that is there already stays."""
    if model != "llama3":
        return
    from titan_ft.host.titan_0_2 import RoPEScalingArgs, TransformerModelArgs, llama3_args

    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json. torchtitan's class has an output layer where
    # that model uses its embedding once more.
    flavor = TransformerModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,  # 8192 wide
        multiple_of=1024,
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
    )
    llama3_args.setdefault("1B", flavor)
    # torchtitan's debug model halved: thirty groups of it train on two cores, with a step of a second.
    llama3_args.setdefault("debugmodel_half", replace(llama3_args["debugmodel"], dim=128, n_layers=3, n_heads=8))
