# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker that the faults act on: its parts, and the means to break them that need torch."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from titan_ft import device
from titan_ft.chaos.inside.blackhole import Blackhole, all_but
from titan_ft.chaos.inside.link import Link
from titan_ft.chaos.inside.network import Outages
from titan_ft.chaos.inside.task import Task
from titan_ft.device import local_shard
from titan_ft.transfer.state_server import StateServer

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_TRIES = 100  # to find an element that is not zero
_RESCAN_SECONDS = 0.05
_LINK_RESCAN_SECONDS = 0.005


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
        checkpoint_files: the class that writes the files of checkpoints.
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
    checkpoint_files: type = FileSystem
    _wrapped: dict[tuple[int, str], tuple[Any, list[Callable[[Any], Any]]]] = field(default_factory=dict)
    _wrapping: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._outages = Outages(self.closing)

    # Threads and hooks

    def run_aside(self, act: Callable[[], None]) -> None:
        """Call `act` on a thread of its own, for which nobody waits."""
        threading.Thread(target=act, name="titan_ft_fault", daemon=True).start()

    def at_next_forward(self, act: Callable[[], None]) -> None:
        """Let the training thread call `act` when its next forward begins."""

        def install() -> None:
            def hook(*_: Any) -> None:
                handle.remove()
                act()

            handle = self.model_parts[0].register_forward_pre_hook(hook)

        self.between_steps.append(install)

    def at_next_gradient(self, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Let the training thread change the gradient of the next forward's output, and so all gradients before it."""

        def install() -> None:
            def hook(_: Any, __: Any, output: Any) -> None:
                first = output if isinstance(output, torch.Tensor) else output[0]
                if first.requires_grad:  # else it is a validation
                    handle.remove()
                    first.register_hook(change)

            handle = self.model_parts[0].register_forward_hook(hook)

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

    # The device

    def synchronize(self) -> None:
        """Wait until the device has computed all that was queued."""
        device.synchronize()

    def allocate(self, num_bytes: int) -> None:
        """Ask the device for memory, and give it back."""
        where = next(self.model_parts[0].parameters()).device
        torch.empty(num_bytes, dtype=torch.uint8, device=where)

    # The state

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the parameters that have bits to flip."""
        shards = {name: local_shard(parameter.detach()) for name, parameter in self.parameters.items()}
        return {name: shard for name, shard in shards.items() if _has_bits(shard)}

    def moment_shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the optimizers' state that have bits to flip; not their counters."""
        return {name: shard for name, shard in self._moments() if _has_bits(shard)}

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self.optimizers):
            for index, (parameter, state) in enumerate(optimizer.state.items()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step":
                        yield f"{number}/{index}/{key}", local_shard(value.detach())

    @torch.no_grad()
    def flip_bit(self, task: Task, shards: Mapping[str, torch.Tensor], significance: int) -> None:
        """Flip one bit, of weight 2**-significance or the lowest, in one of the shards; the order's seed chooses it."""
        if not shards:
            task.skip("there is nothing to flip a bit of: this rank holds no such state yet")
            return
        chance = random.Random(task.order.seed)
        for _ in range(_TRIES):
            name = chance.choice(sorted(shards))
            place = tuple(chance.randrange(size) for size in shards[name].shape)
            element = shards[name][place]
            if element != 0:  # the smallest of all numbers would be lost in the next addition
                break
        mantissa_bits = round(-math.log2(torch.finfo(element.dtype).eps))
        bit = max(0, mantissa_bits - significance)
        if task.begin(step=self.step, tensor=name, element=list(place), bit=bit):
            element.view(_INTEGERS[element.element_size()]).bitwise_xor_(1 << bit)

    # The network

    def lose_packets(self, task: Task, seconds: float, loss: float) -> None:
        """Lose a share of all that comes from other groups and the lighthouse; TCP sends it again, later and later."""

        def lose() -> None:
            hole = Blackhole(loss, all_but(self.group_pids, [self.store]))
            self._outages.run(task, seconds, hole, _RESCAN_SECONDS, contextlib.nullcontext())

        self.run_aside(lose)

    def wait_for_network(self) -> None:
        """Wait until no socket of this process loses packets; set `closing` first."""
        self._outages.wait_until_over()

    def cut_link(self, task: Task, seconds: float, peer: int) -> None:
        """Lose all that comes from a group; that group does the same, so that nothing gets through either way."""

        def lose() -> None:
            link = Link(self.folder, peer)
            if obstacle := link.obstacle():
                task.skip(obstacle)
                return
            hole = Blackhole(1.0, link.choose)
            # These connect to the group: a process group, which could make a small exchange at once, and a fetch.
            before_use = hole.looking_after((self.process_group, "configure"), (socket.socket, "connect"))
            self._outages.run(task, seconds, hole, _LINK_RESCAN_SECONDS, before_use)

        self.run_aside(lose)


def _has_bits(shard: torch.Tensor) -> bool:
    return shard.numel() > 0 and shard.is_floating_point() and shard.element_size() in _INTEGERS
