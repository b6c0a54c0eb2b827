# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the settings of semi-synchronous training come to, and the rules about their values.

The fields themselves are in `titan_ft.config.FaultTolerance`, for torchtitan has them in one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from titan_ft.config import FaultTolerance, Rule

SEMI_SYNC_METHODS = ("local_sgd", "diloco")
ROUND_JOIN_TIMEOUT_MS = 24 * 3600 * 1000
"""Least `join_timeout_ms` of a semi-synchronous job's lighthouse: nobody goes on without a group in mid-round."""


class OuterOptimizer(NamedTuple):
    """SGD without dampening and weight decay, which makes a round's update from the groups' mean change."""

    lr: float
    momentum: float
    nesterov: bool


def outer_optimizer(ft: FaultTolerance) -> OuterOptimizer:
    """Return what makes a round's update. "local_sgd" takes the mean of the groups as it is: SGD with LR 1.

    The momentum is Nesterov's, as in DiLoCo, which compared optimizers and found it best (arXiv 2311.08105, 3.3).
    Without momentum it is off: torch.optim.SGD refuses that pair.
    """
    if ft.semi_sync_method == "diloco":
        return OuterOptimizer(ft.outer_lr, ft.outer_momentum, nesterov=ft.outer_momentum > 0)
    return OuterOptimizer(1.0, 0.0, nesterov=False)


def num_fragments(ft: FaultTolerance) -> int:
    """Return how many fragments the model is cut into: 1 without a semi-synchronous method."""
    return 1 if ft.semi_sync_method is None else len(ft.module_fqns_per_model_fragment) or ft.num_fragments


def quantizes(ft: FaultTolerance) -> bool:
    """Say whether the groups exchange their changes in 8 bits."""
    return ft.semi_sync_method is not None and ft.should_quantize


def steps_per_round(ft: FaultTolerance) -> int:
    """Return how many steps a group makes from one exchange to the next: 1 without a semi-synchronous method."""
    return 1 if ft.semi_sync_method is None else ft.sync_steps // num_fragments(ft)


def unit_of(ft: FaultTolerance) -> str:
    """Return what the groups count, and a line of the log names: "step", or with a semi-synchronous method "round"."""
    return "step" if ft.semi_sync_method is None else "round"


# What a semi-synchronous method wants of other fields, and why.
_SEMI_SYNC_WANTS = {
    "batch_policy": ("shrink", "who is absent is known at the end of a round only"),
    "lr_policy": ("none", "the steps of a round are each group's own"),
}
# What only DiLoCo reads.
_DILOCO_ONLY = (
    "outer_lr",
    "outer_momentum",
    "should_quantize",
    "num_fragments",
    "module_fqns_per_model_fragment",
    "fragment_sync_delay",
    "fragment_update_alpha",
)


def rules(ft: FaultTolerance) -> Iterator[Rule]:
    """Check what only a semi-synchronous method reads, and what it cannot do. Without one nothing of it is looked at,
    so that torchtitan's TOMLs, which may have these fields, mean the same here. Fields are named without their table.
    """
    method = ft.semi_sync_method
    if method is None:
        return
    yield ft.sync_steps >= 1, "sync_steps", "must be >= 1", ft.sync_steps, "1 exchanges at each step"
    if method == "diloco":
        name, remedy = "outer_lr", f"the default is {ft.__class__.outer_lr}"
        yield ft.outer_lr > 0, name, "must be > 0", ft.outer_lr, remedy
        name, remedy = "outer_momentum", f"the default is {ft.__class__.outer_momentum}, 0 keeps none"
        yield 0 <= ft.outer_momentum < 1, name, "must be >= 0 and < 1", ft.outer_momentum, remedy
        name, rule = "exchange_dtype", 'must be "float32" with should_quantize'
        yield not ft.should_quantize or ft.exchange_dtype == "float32", name, rule, ft.exchange_dtype, "leave one out"
        yield from _fragment_rules(ft)
    else:
        unused = type(ft)()
        for name in _DILOCO_ONLY:
            value, rule = getattr(ft, name), f'is not used with semi_sync_method = "{method}" and must be left out'
            remedy = 'remove it, or set semi_sync_method = "diloco"'
            yield value == getattr(unused, name), name, rule, value, remedy
    for name, (only, reason) in _SEMI_SYNC_WANTS.items():
        rule = f'must be "{only}" with semi_sync_method ({reason})'
        yield getattr(ft, name) == only, name, rule, getattr(ft, name), f'set it to "{only}"'
    # Whoever is done with its round waits at the lighthouse, for ROUND_JOIN_TIMEOUT_MS.
    hang = ft.hang_timeout_seconds
    rule, remedy = "must be > 0 with semi_sync_method", "without it a group that hangs is waited for without end"
    yield hang > 0, "hang_timeout_seconds", rule, hang, remedy


def _fragment_rules(ft: FaultTolerance) -> Iterator[Rule]:
    """Check what Streaming DiLoCo reads; that the model has such modules, the worker checks."""
    name = "num_fragments"
    yield ft.num_fragments >= 1, name, "must be >= 1", ft.num_fragments, "1 exchanges the whole model at once"
    modules, number = ft.module_fqns_per_model_fragment, num_fragments(ft)
    rule, remedy = f"must be {number}, or be left out, with as many lists of modules", "leave it out"
    yield not modules or ft.num_fragments in (1, number), name, rule, ft.num_fragments, remedy
    listed = [module for fragment in modules for module in fragment]
    rule = "must name a module or more in each list, and none twice"
    name = "module_fqns_per_model_fragment"
    yield all(modules) and len(set(listed)) == len(listed), name, rule, modules, "correct it, or use num_fragments"
    rule, remedy = f"must be a multiple of the number of fragments ({number})", "one is exchanged after so many steps"
    yield ft.sync_steps % number == 0, "sync_steps", rule, ft.sync_steps, remedy
    delay, most = ft.fragment_sync_delay, ft.sync_steps // number - 1
    rule, remedy = f"must be >= 0 and <= {most}, less than the steps between two exchanges", "0 waits for each"
    yield 0 <= delay <= most, "fragment_sync_delay", rule, delay, remedy
    name, alpha = "fragment_update_alpha", ft.fragment_update_alpha
    yield 0 <= alpha < 1, name, "must be >= 0 and < 1", alpha, "0 takes the global parameters"
