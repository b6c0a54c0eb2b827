# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers' settings of this launch, which a checkpoint must not replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titan_ft.host.titan import logger

_OPTIMIZER_FIELDS = ("betas", "eps", "weight_decay", "foreach", "fused")
"""Entries of a param group that follow from torchtitan's `[optimizer]` table, beside the LR. An
optimizer of the user's may keep a state of its own in the other entries."""


class Hyperparameters:
    """Keeps the settings of this launch for optimizers and schedulers.

    The state of an optimizer, and that of an LR scheduler, contains its settings. torchtitan loads
    the settings from the checkpoint: a resumed run kept the LR, betas and weight decay of the
    earlier launch, whatever its config said.

    Args:
        optimizers: torchtitan's OptimizersContainer, as it was built from the config.
        schedulers: torchtitan's LRSchedulersContainer, likewise; one for each optimizer.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], schedulers: Iterable[LRScheduler]
    ) -> None:
        self._optimizers = list(optimizers)
        # torchtitan has this kind of scheduler only. The user's own scheduler of another kind keeps
        # the settings that it loads.
        self._schedulers = [each for each in schedulers if isinstance(each, LambdaLR)]
        # The settings of each optimizer's param groups.
        self._settings: list[list[dict[str, Any]]] = []
        for optimizer in self._optimizers:
            self._settings.append([_settings_of(group) for group in optimizer.param_groups])
        self._base_lrs = [list(scheduler.base_lrs) for scheduler in self._schedulers]

    def restore(self) -> None:
        """Replace the settings that came from a checkpoint by the settings of this launch."""
        changed = {}
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    if _as_tuple(group.get(name)) != _as_tuple(value):
                        changed[name] = group.get(name), value
                    group[name] = value
        for scheduler, base_lrs in zip(self._schedulers, self._base_lrs, strict=True):
            loaded = scheduler.get_last_lr()
            _set_base_lrs(scheduler, base_lrs)
            if scheduler.get_last_lr() != loaded:
                changed["lr"] = loaded[0], scheduler.get_last_lr()[0]
        for name, (before, now) in changed.items():
            logger.warning(
                f"optimizer: the checkpoint was made with {name} = {before}; from here on it is "
                f"{now}"
            )


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _OPTIMIZER_FIELDS if name in group}


def _set_base_lrs(scheduler: LambdaLR, base_lrs: list[Any]) -> None:
    """Continue a scheduler at its step, with the LRs and the schedule of this launch.

    Without a change, the LR of the next step is exactly the loaded LR.
    """
    scheduler.base_lrs = list(base_lrs)
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [base_lr * factor for base_lr, factor in zip(base_lrs, factors, strict=True)]
    for group, base_lr, rate in zip(scheduler.optimizer.param_groups, base_lrs, rates, strict=True):
        group["initial_lr"], group["lr"] = base_lr, rate
    scheduler._last_lr = rates


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
