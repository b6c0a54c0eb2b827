# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker that the faults act on."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ft.chaos.inside.task import Task
from titan_ft.transfer.state_server import StateServer


@dataclass
class TargetWorker:
    """What the faults need of the worker that they hit.

    Attributes:
        parameters, optimizers: those whose values all groups have alike, the parameters by name.
        process_group: of the exchange between the groups.
        group_pids: processes of this group on this host; a lost network leaves them connected.
        store: host and port of the group's store, to which the same applies.
        hang_timeout_seconds: of the watchdog; 0 = it never ends anything.
        folder: shared by the agents of the run; each has published its location there.
        between_steps: what the training thread does before its next step.
        step: the step under way.
        closing: set when the worker's part in the run ends.
        outage: held by the fault of the network that is in force.
    """

    model_parts: list[torch.nn.Module]
    parameters: Mapping[str, torch.Tensor]
    optimizers: Iterable[torch.optim.Optimizer]
    process_group: Any
    server: StateServer
    group_pids: Collection[int]
    store: tuple[str, int]
    hang_timeout_seconds: float
    folder: Path
    between_steps: deque[Callable[[], None]] = field(default_factory=deque)
    step: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    outage: threading.Lock = field(default_factory=threading.Lock)
    _wrapped: dict[tuple[int, str], tuple[Any, list[Callable[[Any], Any]]]] = field(default_factory=dict)
    _wrapping: threading.Lock = field(default_factory=threading.Lock)

    def at_next_forward(self, act: Callable[[], None]) -> None:
        """Let the training thread call `act` when its next forward begins."""

        def install() -> None:
            def hook(*_: Any) -> None:
                handle.remove()
                act()

            handle = self.model_parts[0].register_forward_pre_hook(hook)

        self.between_steps.append(install)

    def wrap(self, task: Task, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put `wrapper(owner.name)` in place of that attribute until the task has begun or is given up."""
        key = (id(owner), name)

        def change(with_it: bool) -> None:
            with self._wrapping:
                original, wrappers = self._wrapped.setdefault(key, (getattr(owner, name), []))
                if with_it:
                    wrappers.append(wrapper)
                else:
                    wrappers.remove(wrapper)
                setattr(owner, name, functools.reduce(lambda inner, outer: outer(inner), wrappers, original))
                if not wrappers:
                    del self._wrapped[key]

        change(with_it=True)
        task.at_end(lambda: change(with_it=False))
