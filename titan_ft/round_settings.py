# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Values derived from the settings of semi-synchronous training, and the rules about the settings.

The fields are in `titan_ft.config.FaultTolerance`, because torchtitan has one table for all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from titan_ft.setting_rule import SettingRule

if TYPE_CHECKING:
    from titan_ft.config import FaultTolerance

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
    """Return True if the groups exchange their changes in 8 bits."""
    return ft.semi_sync_method is not None and ft.should_quantize


def steps_per_round(ft: FaultTolerance) -> int:
    """Return a group's local steps between two exchanges: 1 without a semi-synchronous method."""
    return 1 if ft.semi_sync_method is None else ft.sync_steps // num_fragments(ft)


def unit_of(ft: FaultTolerance) -> str:
    """Return the unit of commits in log lines: "step", or "round" with a semi-synchronous
    method.
    """
    return "step" if ft.semi_sync_method is None else "round"


_SEMI_SYNC_WANTS = {
    "batch_policy": ("shrink", "absent groups are known only at the end of a round"),
    "lr_policy": ("none", "the steps of a round are each group's own"),
}
"""Values of other fields that a semi-synchronous method requires, with the reason."""
_DILOCO_ONLY = (
    "outer_lr",
    "outer_momentum",
    "should_quantize",
    "num_fragments",
    "module_fqns_per_model_fragment",
    "fragment_sync_delay",
    "fragment_update_alpha",
)


def rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules for a semi-synchronous method. Fields are named without their table.

    Without a method the fields are not checked, because torchtitan's own TOMLs may set them.
    """
    method = ft.semi_sync_method
    if method is None:
        return
    yield SettingRule(
        holds=ft.sync_steps >= 1,
        field="sync_steps",
        rule="must be >= 1",
        value=ft.sync_steps,
        remedy="1 exchanges at each step",
    )
    if method == "diloco":
        yield from _diloco_rules(ft)
        yield from _fragment_rules(ft)
    else:
        yield from _unused_rules(ft, method)
    for name, (only, reason) in _SEMI_SYNC_WANTS.items():
        yield SettingRule(
            holds=getattr(ft, name) == only,
            field=name,
            rule=f'must be "{only}" with semi_sync_method ({reason})',
            value=getattr(ft, name),
            remedy=f'set it to "{only}"',
        )
    # A group that has finished its round waits at the lighthouse for up to ROUND_JOIN_TIMEOUT_MS.
    yield SettingRule(
        holds=ft.hang_timeout_seconds > 0,
        field="hang_timeout_seconds",
        rule="must be > 0 with semi_sync_method",
        value=ft.hang_timeout_seconds,
        remedy="without a limit the others would wait forever for a group that hangs",
    )


def _diloco_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules for the outer optimizer and the type of the changes."""
    defaults = type(ft)
    yield SettingRule(
        holds=ft.outer_lr > 0,
        field="outer_lr",
        rule="must be > 0",
        value=ft.outer_lr,
        remedy=f"the default is {defaults.outer_lr}",
    )
    yield SettingRule(
        holds=0 <= ft.outer_momentum < 1,
        field="outer_momentum",
        rule="must be >= 0 and < 1",
        value=ft.outer_momentum,
        remedy=f"the default is {defaults.outer_momentum}, 0 keeps none",
    )
    yield SettingRule(
        holds=not ft.should_quantize or ft.exchange_dtype == "float32",
        field="exchange_dtype",
        rule='must be "float32" with should_quantize',
        value=ft.exchange_dtype,
        remedy="leave one out",
    )


def _unused_rules(ft: FaultTolerance, method: str) -> Iterator[SettingRule]:
    """Refuse settings that only DiLoCo reads: with another method they would have no effect."""
    unset = type(ft)()
    for name in _DILOCO_ONLY:
        yield SettingRule(
            holds=getattr(ft, name) == getattr(unset, name),
            field=name,
            rule=f'is not used with semi_sync_method = "{method}" and must be left out',
            value=getattr(ft, name),
            remedy='remove it, or set semi_sync_method = "diloco"',
        )


def _fragment_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules for Streaming DiLoCo. The worker checks that the model has such modules."""
    yield SettingRule(
        holds=ft.num_fragments >= 1,
        field="num_fragments",
        rule="must be >= 1",
        value=ft.num_fragments,
        remedy="1 exchanges the whole model at once",
    )
    modules = ft.module_fqns_per_model_fragment
    number = num_fragments(ft)
    yield SettingRule(
        holds=not modules or ft.num_fragments in (1, number),
        field="num_fragments",
        rule=f"must be {number}, or be left out, with as many lists of modules",
        value=ft.num_fragments,
        remedy="leave it out",
    )
    listed = [module for fragment in modules for module in fragment]
    yield SettingRule(
        holds=all(modules) and len(set(listed)) == len(listed),
        field="module_fqns_per_model_fragment",
        rule="must name a module or more in each list, and none twice",
        value=modules,
        remedy="correct it, or use num_fragments",
    )
    yield SettingRule(
        holds=ft.sync_steps % number == 0,
        field="sync_steps",
        rule=f"must be a multiple of the number of fragments ({number})",
        value=ft.sync_steps,
        remedy="one is exchanged after so many steps",
    )
    most = ft.sync_steps // number - 1
    yield SettingRule(
        holds=0 <= ft.fragment_sync_delay <= most,
        field="fragment_sync_delay",
        rule=f"must be >= 0 and <= {most}, less than the steps between two exchanges",
        value=ft.fragment_sync_delay,
        remedy="0 waits for each",
    )
    yield SettingRule(
        holds=0 <= ft.fragment_update_alpha < 1,
        field="fragment_update_alpha",
        rule="must be >= 0 and < 1",
        value=ft.fragment_update_alpha,
        remedy="0 takes the global parameters",
    )
