# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The model of the tests: `--model.flavor=tiny`."""

from __future__ import annotations

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args


def register() -> None:
    """Make it known to torchtitan. Steps of a few milliseconds; deep enough that forward and backward have a middle."""
    llama3_args["tiny"] = TransformerModelArgs(dim=64, n_layers=3, n_heads=4, vocab_size=2048)
