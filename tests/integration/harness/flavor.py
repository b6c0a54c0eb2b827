# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The model of the tests: `--model.flavor=tiny`, and `tiny_tied` on torchtitan 0.3."""

from __future__ import annotations

from functools import partial
from typing import Any

from torchtitan.models import llama3

from titan_ft.host.release import series


def register() -> None:
    """Register the flavor "tiny": steps of a few milliseconds, with enough layers to interrupt a
    pass in its middle.
    """
    if series() == "0.2":
        llama3.llama3_args["tiny"] = llama3.TransformerModelArgs(
            dim=64, n_layers=3, n_heads=4, vocab_size=2048
        )
    else:
        llama3.llama3_configs["tiny"] = _build
        llama3.llama3_configs["tiny_tied"] = partial(_build, tied=True)


def _build(attn_backend: str, *, tied: bool = False, **_: Any) -> Any:
    """Build the config of 0.3's model, with its own rules for the initial weights.

    Args:
        tied: the output layer has the weight of the embedding.
    """
    dim, vocab_size = 64, 2048
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        enable_weight_tying=tied,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=3,
            dim=dim,
            n_heads=4,
            hidden_dim=llama3.compute_ffn_hidden_dim(dim, multiple_of=256),
            rope=llama3.ComplexRoPE.Config(
                dim=dim // 4, max_seq_len=131072, theta=500000, scaling="llama"
            ),
            attn_backend=attn_backend,
        ),
    )
