# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker that the faults act on: its parts, and the actions of faults that need torch."""

from __future__ import annotations

import contextlib
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
from titan_ft.chaos.inside.link import PeerConnections
from titan_ft.chaos.inside.network import Outages
from titan_ft.chaos.inside.task import Task
from titan_ft.device import local_shard
from titan_ft.transfer.state_server import StateServer

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_MAX_DRAWS = 100  # draws of an element until one is not zero
_RESCAN_SECONDS = 0.05
_LINK_RESCAN_SECONDS = 0.005


@dataclass
class TargetWorker:
    """The parts of a worker that faults act on.

    `ChaosAgent` makes it. The faults (`titan_ft.faults.inside`) call it on the agent's thread, on
    the training thread and on threads of their own.

    Attributes:
        parameters, optimizers: those with equal values in all groups; parameters by name.
        process_group: process group of the exchange between the groups.
        group_pids: processes of this group on this host. A lost network leaves them connected.
        store: host and port of the group's store, which also stays connected.
        hang_timeout_seconds: limit of the watchdog; 0 = there is no watchdog.
        folder: folder that the run's chaos agents share.
        between_steps: actions of the training thread before its next step.
        step: the current step.
        closing: set when the worker leaves the run.
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
    _wrapped: dict[tuple[int, str], tuple[Any, list[Callable[[Any], Any]]]] = field(
        default_factory=dict
    )
    _wrapping: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._outages = Outages(self.closing)

    # Threads and hooks

    def run_aside(self, act: Callable[[], None]) -> None:
        """Call `act` on a daemon thread of its own."""
        threading.Thread(target=act, name="titan_ft_fault", daemon=True).start()

    def at_next_forward(self, act: Callable[[], None]) -> None:
        """Make the training thread call `act` at the start of its next forward."""

        def install() -> None:
            def hook(*_: Any) -> None:
                handle.remove()
                act()

            handle = self.model_parts[0].register_forward_pre_hook(hook)

        self.between_steps.append(install)

    def at_next_gradient(self, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Change the gradient of the next forward's output on the training thread.

        All gradients of the step follow from that gradient.
        """

        def install() -> None:
            def hook(_: Any, __: Any, output: Any) -> None:
                first = output if isinstance(output, torch.Tensor) else output[0]
                # The forward of a validation has no gradient.
                if first.requires_grad:
                    handle.remove()
                    first.register_hook(change)

            handle = self.model_parts[0].register_forward_hook(hook)

        self.between_steps.append(install)

    def wrap(self, task: Task, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace the attribute by `wrapper(attribute)` until the task has started or was skipped.

        Several tasks may wrap one attribute, and end in any order. So the attribute is composed of
        the original and the current wrappers at each change.
        """
        key = (id(owner), name)

        def compose(change_wrappers: Callable[[list[Callable[[Any], Any]]], None]) -> None:
            with self._wrapping:
                original, wrappers = self._wrapped.setdefault(key, (getattr(owner, name), []))
                change_wrappers(wrappers)
                value = original
                for wrap_value in wrappers:
                    value = wrap_value(value)
                setattr(owner, name, value)
                if not wrappers:
                    del self._wrapped[key]

        compose(lambda wrappers: wrappers.append(wrapper))
        task.on_settled(lambda: compose(lambda wrappers: wrappers.remove(wrapper)))

    # The device

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        device.synchronize()

    def allocate(self, num_bytes: int) -> None:
        """Allocate memory on the device, and free it."""
        where = next(self.model_parts[0].parameters()).device
        torch.empty(num_bytes, dtype=torch.uint8, device=where)

    # The state

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of parameters of floating point, by name."""
        shards = {}
        for name, parameter in self.parameters.items():
            shard = local_shard(parameter.detach())
            if _has_bits(shard):
                shards[name] = shard
        return shards

    def moment_shards(self) -> dict[str, torch.Tensor]:
        """Return the local shards of the optimizers' moments, by name; no step counters."""
        return {name: shard for name, shard in self._moments() if _has_bits(shard)}

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self.optimizers):
            for index, (parameter, state) in enumerate(optimizer.state.items()):
                for key, value in state.items():
                    if key == "step" or not isinstance(value, torch.Tensor):
                        continue
                    if value.shape == parameter.shape:
                        yield f"{number}/{index}/{key}", local_shard(value.detach())

    @torch.no_grad()
    def flip_bit(self, task: Task, shards: Mapping[str, torch.Tensor], significance: int) -> None:
        """Flip one bit in one of the shards. The order's seed chooses shard and element.

        Args:
            significance: the bit's weight is 2**-significance of the mantissa, or that of the
                lowest bit if the type has fewer.
        """
        if not shards:
            task.skip("there is nothing to flip a bit of: this rank holds no such state yet")
            return
        source = random.Random(task.order.seed)
        for _ in range(_MAX_DRAWS):
            name = source.choice(sorted(shards))
            index = tuple(source.randrange(size) for size in shards[name].shape)
            element = shards[name][index]
            # A flipped bit of zero gives a tiny number, which the next addition would round away.
            if element != 0:
                break
        mantissa_bits = round(-math.log2(torch.finfo(element.dtype).eps))
        bit = max(0, mantissa_bits - significance)
        if task.try_start(step=self.step, tensor=name, element=list(index), bit=bit):
            element.view(_INTEGERS[element.element_size()]).bitwise_xor_(1 << bit)

    # The network

    def lose_packets(self, task: Task, seconds: float, loss: float) -> None:
        """Lose a share of the packets from other groups and the lighthouse.

        TCP sends lost packets again, after growing pauses.

        Args:
            loss: probability that a packet is lost.
        """

        def run_outage() -> None:
            hole = Blackhole(loss, all_but(self.group_pids, [self.store]))
            self._outages.run(task, seconds, hole, _RESCAN_SECONDS, contextlib.nullcontext())

        self.run_aside(run_outage)

    def wait_for_network(self) -> None:
        """Wait until no socket of this process loses packets; set `closing` first."""
        self._outages.wait_until_over()

    def cut_link(self, task: Task, seconds: float, peer: int) -> None:
        """Lose all packets from a group. The peer does the same, so no data passes at all."""

        def run_outage() -> None:
            connections = PeerConnections(self.folder, peer)
            obstacle = connections.obstacle()
            if obstacle:
                task.skip(obstacle)
                return
            hole = Blackhole(1.0, connections.choose)
            # A process group and a fetch connect to the peer. A small exchange could be over before
            # the next look at the sockets.
            before_use = hole.looking_after(
                (self.process_group, "configure"), (socket.socket, "connect")
            )
            self._outages.run(task, seconds, hole, _LINK_RESCAN_SECONDS, before_use)

        self.run_aside(run_outage)


def _has_bits(shard: torch.Tensor) -> bool:
    return shard.numel() > 0 and shard.is_floating_point() and shard.element_size() in _INTEGERS
