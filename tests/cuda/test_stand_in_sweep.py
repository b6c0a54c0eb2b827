# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's own operator samples: the stand-in's results and gradients equal those of the CPU."""

from __future__ import annotations

import sys
import types
import unittest
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

# The operators of titan_ft and of torchtitan's Llama, and one whose backward stood still:
# masked_select.
_OPERATORS = (
    *(
        "_foreach_add",
        "_foreach_addcdiv",
        "_foreach_lerp",
        "_foreach_mul",
        "_foreach_norm",
        "_foreach_sqrt",
    ),
    *(
        "add",
        "addmm",
        "bmm",
        "cat",
        "clamp",
        "cumsum",
        "gather",
        "index_add",
        "index_put",
        "index_select",
        "isfinite",
    ),
    *(
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "matmul",
        "mean",
        "mm",
        "mul",
        "nn.functional.cross_entropy",
        "nn.functional.embedding",
    ),
    *("nn.functional.linear", "nn.functional.rms_norm"),
    *(
        "nn.functional.silu",
        "nonzero",
        "pow",
        "rsqrt",
        "scatter_add",
        "softmax",
        "sort",
        "sum",
        "topk",
        "where",
    ),
)
_SAMPLES = 4


@pytest.fixture(scope="module")
def samples_of() -> dict[str, Any]:
    """Return torch's descriptions of operators, by name."""
    # torch's test package imports it for a base class that is not needed here.
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", absent)
    from torch.testing._internal.common_methods_invocations import (
        foreach_binary_op_db,
        foreach_other_op_db,
        foreach_pointwise_op_db,
        foreach_reduce_op_db,
        foreach_unary_op_db,
        op_db,
    )

    foreach = (
        foreach_binary_op_db,
        foreach_other_op_db,
        foreach_pointwise_op_db,
        foreach_reduce_op_db,
    )
    databases = (op_db, *foreach, foreach_unary_op_db)
    found: dict[str, Any] = {}
    for database in databases:
        for operator in database:
            found.setdefault(operator.name, operator)
    return found


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to("cuda").requires_grad_(value.requires_grad)
    return value


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _gradients(result: Any, inputs: Any) -> list[Any]:
    """Differentiate the sum of all results by all inputs."""
    outputs = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    leaves = [
        leaf
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not outputs or not leaves:
        return []
    total = torch.stack([output.sum() for output in outputs]).sum()
    return [
        gradient
        for gradient in torch.autograd.grad(total, leaves, allow_unused=True)
        if gradient is not None
    ]


def _compute(operator: Any, arguments: Any) -> list[Any]:
    first, others, options = arguments
    result = operator(first, *others, **options)
    values = [result, _gradients(result, arguments)]
    return list(tree_leaves(tree_map(_to_host, values)))


@pytest.mark.parametrize("name", _OPERATORS)
def test_an_operator_agrees_with_the_cpu(samples_of: dict[str, Any], name: str) -> None:
    torch.manual_seed(0)  # of the samples
    operator = samples_of[name]
    count = 0
    # Training differentiates no foreach operator, and torch's own gradient of empty samples fails.
    is_differentiated = operator.supports_autograd and not name.startswith("_foreach")
    samples = operator.sample_inputs("cpu", torch.float32, requires_grad=is_differentiated)
    for sample in islice(samples, _SAMPLES):
        arguments = (sample.input, sample.args, sample.kwargs)
        on_device = tree_map(_to_device, arguments)
        expected, computed = _compute(operator, arguments), _compute(operator, on_device)
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        count += 1
    assert count
