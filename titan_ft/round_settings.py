# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Values derived from the settings of semi-synchronous training, and the rules about the settings.

The fields are in `titan_ft.config.FaultTolerance`, because torchtitan has one table for all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from titan_ft.config import FaultTolerance, Rule

SEMI_SYNC_METHODS = ("local_sgd", "diloco")
ROUND_JOIN_TIMEOUT_MS = 24 * 3600 * 1000
"""Smallest `join_timeout_ms` of a semi-synchronous job, so that no quorum leaves out a group in
mid-round.
"""


class OuterOptimizer(NamedTuple):
    """SGD without dampening and weight decay. It turns the groups' mean change into a round's
    update.
    """

    lr: float
    momentum: float
    nesterov: bool


def outer_optimizer(ft: FaultTolerance) -> OuterOptimizer:
    """Return the outer optimizer. "local_sgd" uses the groups' mean unchanged: SGD with LR 1.

    The momentum is Nesterov's, which DiLoCo found best of several (arXiv 2311.08105, 3.3). Without
    momentum nesterov is False, because torch.optim.SGD refuses nesterov without momentum.
    """
    if ft.semi_sync_method == "diloco":
        return OuterOptimizer(ft.outer_lr, ft.outer_momentum, nesterov=ft.outer_momentum > 0)
    return OuterOptimizer(1.0, 0.0, nesterov=False)


def num_fragments(ft: FaultTolerance) -> int:
    """Return the number of fragments of the model: 1 without a semi-synchronous method."""
    if ft.semi_sync_method is None:
        return 1
    return len(ft.module_fqns_per_model_fragment) or ft.num_fragments


def quantizes(ft: FaultTolerance) -> bool:
    """Return whether the groups exchange their changes in 8 bits."""
    return ft.semi_sync_method is not None and ft.should_quantize


def steps_per_round(ft: FaultTolerance) -> int:
    """Return a group's local steps between two exchanges: 1 without a semi-synchronous method."""
    return 1 if ft.semi_sync_method is None else ft.sync_steps // num_fragments(ft)


def unit_of(ft: FaultTolerance) -> str:
    """Return the unit of commits in log lines: "step", or "round" with a semi-synchronous
    method.
    """
    return "step" if ft.semi_sync_method is None else "round"


# Values of other fields that a semi-synchronous method requires, with the reason.
_SEMI_SYNC_WANTS = {
    "batch_policy": ("shrink", "absent groups are known only at the end of a round"),
    "lr_policy": ("none", "the steps of a round are each group's own"),
}
# Fields that only DiLoCo reads.
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
    """Yield the rules for a semi-synchronous method. Fields are named without their table.

    Without a method the fields are not checked, because torchtitan's own TOMLs may set them.
    """
    method = ft.semi_sync_method
    if method is None:
        return
    yield (
        ft.sync_steps >= 1,
        "sync_steps",
        "must be >= 1",
        ft.sync_steps,
        "1 exchanges at each step",
    )
    if method == "diloco":
        name, remedy = "outer_lr", f"the default is {ft.__class__.outer_lr}"
        yield ft.outer_lr > 0, name, "must be > 0", ft.outer_lr, remedy
        name, remedy = (
            "outer_momentum",
            f"the default is {ft.__class__.outer_momentum}, 0 keeps none",
        )
        yield 0 <= ft.outer_momentum < 1, name, "must be >= 0 and < 1", ft.outer_momentum, remedy
        name, rule = "exchange_dtype", 'must be "float32" with should_quantize'
        yield (
            not ft.should_quantize or ft.exchange_dtype == "float32",
            name,
            rule,
            ft.exchange_dtype,
            "leave one out",
        )
        yield from _fragment_rules(ft)
    else:
        unused = type(ft)()
        for name in _DILOCO_ONLY:
            value, rule = (
                getattr(ft, name),
                f'is not used with semi_sync_method = "{method}" and must be left out',
            )
            remedy = 'remove it, or set semi_sync_method = "diloco"'
            yield value == getattr(unused, name), name, rule, value, remedy
    for name, (only, reason) in _SEMI_SYNC_WANTS.items():
        rule = f'must be "{only}" with semi_sync_method ({reason})'
        yield getattr(ft, name) == only, name, rule, getattr(ft, name), f'set it to "{only}"'
    # A group that has finished its round waits at the lighthouse for up to ROUND_JOIN_TIMEOUT_MS.
    hang = ft.hang_timeout_seconds
    rule, remedy = (
        "must be > 0 with semi_sync_method",
        "without a limit the others would wait forever for a group that hangs",
    )
    yield hang > 0, "hang_timeout_seconds", rule, hang, remedy


def _fragment_rules(ft: FaultTolerance) -> Iterator[Rule]:
    """Yield the rules for Streaming DiLoCo. The worker checks that the model has such modules."""
    name = "num_fragments"
    yield (
        ft.num_fragments >= 1,
        name,
        "must be >= 1",
        ft.num_fragments,
        "1 exchanges the whole model at once",
    )
    modules, number = ft.module_fqns_per_model_fragment, num_fragments(ft)
    rule, remedy = (
        f"must be {number}, or be left out, with as many lists of modules",
        "leave it out",
    )
    yield not modules or ft.num_fragments in (1, number), name, rule, ft.num_fragments, remedy
    listed = [module for fragment in modules for module in fragment]
    rule = "must name a module or more in each list, and none twice"
    name = "module_fqns_per_model_fragment"
    yield (
        all(modules) and len(set(listed)) == len(listed),
        name,
        rule,
        modules,
        "correct it, or use num_fragments",
    )
    rule, remedy = (
        f"must be a multiple of the number of fragments ({number})",
        "one is exchanged after so many steps",
    )
    yield ft.sync_steps % number == 0, "sync_steps", rule, ft.sync_steps, remedy
    delay, most = ft.fragment_sync_delay, ft.sync_steps // number - 1
    rule, remedy = (
        f"must be >= 0 and <= {most}, less than the steps between two exchanges",
        "0 waits for each",
    )
    yield 0 <= delay <= most, "fragment_sync_delay", rule, delay, remedy
    name, alpha = "fragment_update_alpha", ft.fragment_update_alpha
    yield 0 <= alpha < 1, name, "must be >= 0 and < 1", alpha, "0 takes the global parameters"
