# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Two groups of one rank, each a thread with a device of its own, train, copy, heal and replay.

Each scenario returns tensors and texts that must not depend on the lateness of the streams. Nothing
here waits for a device except the engine and torch; `torch.Tensor.cpu` at the end of a scenario
does.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.member_facts import exchange_with
from tests.replica.conftest import TinyTraining
from titan_ft import device
from titan_ft.engine.outer import OuterModel
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.gradients.flight import ExchangeError
from titan_ft.gradients.sums import Sums
from titan_ft.membership.process_group import AbortableNccl, BreakableGloo
from titan_ft.protocol.member import Member, Quorum
from titan_ft.round_settings import OuterOptimizer
from titan_ft.transfer.snapshot import Part, Snapshot, _view
from titan_ft.transfer.state_fetch import fetch
from titan_ft.transfer.state_server import StateServer

DEADLINE = 30.0  # seconds; only ever reached by a bug
NUM_MEMBERS, NUM_STEPS = 2, 4
NEWEST, OUTDATED = 0, -1  # updates of a rank: no member of the quorum has more; a member has
BACKENDS = ("gloo", "nccl")
_SEEDING = threading.Lock()  # torch's generator is one for all threads


class _ProcessGroup:
    """The engine's process group, which can be aborted right before a certain operation.

    Args:
        backend: gloo or nccl.
        address: of the store at which the members meet.
    """

    def __init__(self, backend: str, rank: int, address: str) -> None:
        timeout = timedelta(seconds=DEADLINE)
        self._group: Any = AbortableNccl(timeout) if backend == "nccl" else BreakableGloo(timeout)
        self._rank, self._address, self._number = rank, address, 0
        self._changing, self._works = threading.Lock(), False
        self.breaks_at: int | None = None  # operations that it makes before

    def prepare(self) -> None:
        """Connect the members, unless they are."""
        with self._changing:
            if not self._works:
                self._number += 1
                self._group.configure(
                    f"{self._address}/{self._number}", self._rank, NUM_MEMBERS, self._number
                )
                self._works = True

    def abort(self) -> None:
        """Break off all operations; `prepare` connects the members anew."""
        with self._changing:
            self._works, self.breaks_at = False, None
        self._group.abort()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)
        if name not in ("errored", "deadline") and self.breaks_at is not None:
            if self.breaks_at == 0:
                self._group.abort()
            else:
                self.breaks_at -= 1
        return operation


class _Membership:
    """A Membership whose quorum has all members, always.

    Args:
        process_group: of this member.
    """

    timeout = timedelta(seconds=DEADLINE)

    def __init__(self, rank: int, process_group: _ProcessGroup) -> None:
        self._rank, self.process_group = rank, process_group
        self._use_device = device.thread_initializer()
        self.before_quorum: Callable[[], object] = lambda: None

    def await_quorum(self) -> Quorum:
        self._use_device()
        self.before_quorum()
        self.process_group.prepare()
        members = tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in range(NUM_MEMBERS))
        return Quorum("key", self._rank, members, max_step=0)

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self) -> None:
        self.process_group.abort()


class World:
    """The members' devices, and the store at which their process groups meet.

    Args:
        backend: nccl has the exchange's buckets on the devices, gloo has them in host memory.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._exchanges = [itertools.count() for _ in range(NUM_MEMBERS)]
        self.memberships: dict[int, _Membership] = {}  # by rank, that of its last exchange

    def place(self, rank: int) -> torch.device:
        """Return a rank's device, and make it the thread's; without a GPU, the CPU."""
        if device.on_cpu():
            return torch.device("cpu")
        torch.accelerator.set_device_index(rank)
        return torch.device("cuda", rank)

    def exchange(self, rank: int, parameters: Any, **options: Any) -> GradientExchange:
        """Build a rank's exchange, with several buckets."""
        here = self.place(rank)
        number = next(self._exchanges[rank])
        address = f"127.0.0.1:{self._store.port}/exchange{number}"
        membership = self.memberships[rank] = _Membership(
            rank, _ProcessGroup(self._backend, rank, address)
        )
        return GradientExchange(
            parameters,
            membership,  # type: ignore[arg-type]  # stands in for it
            where=here if self._backend == "nccl" else torch.device("cpu"),
            **{"bucket_bytes": 100, "overlap": True, **options},
        )


class SideStream:
    """A stream of a device; on a CPU there is none, and all is done at once."""

    def __init__(self, where: torch.device) -> None:
        self._stream = None if where.type == "cpu" else torch.Stream(where)

    @contextlib.contextmanager
    def use(self, after_current: bool = True) -> Iterator[None]:
        """Run the block on this stream, after the work of the current one."""
        if self._stream is None:
            yield
            return
        if after_current:
            self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def join(self) -> None:
        """Make the current stream wait for this one."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)


def exchange_goes_on(where: torch.device) -> None:
    """Run the exchange's stream to its end, and no other stream unless it waits for that one."""
    device._stream_of_its_own(where, "exchange").synchronize()


class Rank:
    """A rank that trains TinyTraining's model on its own batches.

    Args:
        weights: dtype of the model.
        scale: of the sums in each update.
        options: of its exchange.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        seed: int = 0,
        buffers: bool = True,
        weights: torch.dtype = torch.float32,
        scale: float = 1.0,
        **options: Any,
    ) -> None:
        self.where, self.rank, self.scale = world.place(rank), rank, scale
        with _SEEDING:
            self.training = TinyTraining(seed, weights, buffers=buffers)
        self.training.model.to(self.where)
        self.state = self.training.state
        self.exchange = world.exchange(rank, self.training.model.parameters(), **options)

    def queue(self) -> Sums:
        """Make a step as a healing group: contribute nothing, and keep the sums."""
        self.exchange.launch()
        self.exchange.copy_memory.prepare()
        self.finish(gives=False)
        return self.sums.copy()

    def step(self, number: int, gives: bool = True) -> Sums:
        """Make a step as the trainer does; returns the sums."""
        training = self.training
        training.optimizers.zero_grad()
        if gives:
            tokens = torch.randint(
                0, 11, (4, 3), generator=torch.Generator().manual_seed(10 * number + self.rank)
            )
            loss = training.model(tokens.to(self.where))
            self.exchange.launch_for_backward(NEWEST)
            loss.backward()
        else:
            self.exchange.launch()
        self.finish(gives)
        sums = self.sums.copy()
        self.apply(self.sums)
        return sums

    def finish(self, gives: bool) -> None:
        """Complete the exchange; all that is given is finite."""
        reduced = exchange_with(self.exchange, lambda quorum: ([1.0], b"x" * self.rank), gives)
        assert not reduced.nonfinite[reduced.quorum.rank]
        self.sums = reduced.sums

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters, the last ones first."""
        return list(self.training.model.parameters())[::-1]

    def give_gradients(self, factor: float) -> None:
        """Set every gradient to its parameter times a factor, as backward would, and call the
        exchange's hooks.
        """
        for parameter in self.parameters:
            parameter.grad = parameter.detach() * factor
            _call_hooks(parameter)

    def apply(self, sums: Sums) -> None:
        """Apply an update, live or replayed."""
        sums.write(self.scale)
        self.training.optimizers.step()
        self.training.lr_schedulers.step()

    def bytes(self) -> list[torch.Tensor]:
        """Return the state, waited for by torch alone."""
        tensors = [
            tensor.detach() for _, tensor, _ in self.state._tensors(self.training.optimizers)
        ]
        return [tensor.cpu().clone() for tensor in tensors]


def _call_hooks(parameter: nn.Parameter) -> None:
    """Call the hooks of a gradient that is final, as autograd and FSDP do."""
    for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]  # no public name
        hook(parameter)


def _together(function: Callable[[int], Any]) -> list[Any]:
    """Run a function for each rank, on threads of their own."""
    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        futures: list[Future[Any]] = [threads.submit(function, rank) for rank in range(NUM_MEMBERS)]
        return [future.result(2 * DEADLINE) for future in futures]


def train(world: World, **options: Any) -> Any:
    """Make steps one after the other; sometimes a rank contributes nothing."""

    def run(number: int) -> Any:
        rank = Rank(world, number, **options)
        for step in range(NUM_STEPS):
            rank.step(step, gives=number == 0 or step != 2)
        return rank.bytes()

    return _together(run)


def train_without_overlap(world: World) -> Any:
    """Fill the buckets at the end of each step."""
    return train(world, overlap=False)


def train_on_two_streams(world: World) -> Any:
    """Compute gradients on side streams, as FSDP does; some gradients never come."""

    def run(number: int) -> Any:
        rank = Rank(world, number)
        streams = [SideStream(rank.where) for _ in range(2)]
        for step in range(NUM_STEPS):
            rank.training.optimizers.zero_grad()
            rank.exchange.launch_for_backward(NEWEST)
            for index, parameter in enumerate(rank.parameters):
                if number == 0 and index % NUM_STEPS == step:
                    continue  # a step that does not use it
                with streams[index % 2].use():
                    parameter.grad = parameter.detach() * (1.0 + number + step)
                    _call_hooks(parameter)
            for stream in streams:
                stream.join()
            rank.finish(True)
            rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def train_in_8_bits(world: World) -> Any:
    """Quantize the gradients; each step adds the rounding residual of the previous step."""
    return train(world, quantize=True)


def train_in_bfloat16(world: World) -> Any:
    """Let the gradients travel in bfloat16."""
    return train(world, dtype=torch.bfloat16)


def train_over_broken_exchanges(world: World, **options: Any) -> Any:
    """Break each step's exchange at another operation, and repeat it with the same gradients.

    In one step a rank's state seemed outdated at first, so it sent zeros. The second quorum is
    late: by then the device has done all queued work of training.
    """

    def run(number: int) -> Any:
        rank = Rank(world, number, **options)
        membership = world.memberships[number]

        def be_late() -> None:
            while any(bucket.missing_parts for bucket in rank.exchange._buckets):
                time.sleep(0.001)
            rank.parameters[0].detach().cpu()

        for step in range(NUM_STEPS):
            rank.training.optimizers.zero_grad()
            membership.before_quorum = lambda: None
            membership.process_group.prepare()
            membership.process_group.breaks_at = 1 + step
            rank.exchange.launch_for_backward(NEWEST if number == 0 or step != 2 else OUTDATED)
            rank.give_gradients(1.0 + number + step)
            with pytest.raises(ExchangeError):
                rank.finish(True)
            membership.before_quorum = be_late
            rank.finish(True)
            rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def train_a_bfloat16_model(world: World) -> Any:
    """Apply updates, live and replayed, to bfloat16 weights: sums are scaled and then
    rounded once.
    """

    def run(number: int) -> Any:
        rank = Rank(world, number, weights=torch.bfloat16, scale=0.3)
        for step in range(NUM_STEPS):
            for parameter in rank.parameters:
                parameter.grad = parameter.detach() * (1.0 + number + step)
            rank.finish(True)
            sums = rank.sums.copy()
            rank.apply(rank.sums)
            rank.apply(sums)
        return rank.bytes()

    return _together(run)


def copy(world: World) -> Any:
    """Copy a donor's state right after an update, and compute its digest."""

    def run(number: int) -> Any:
        rank, found = Rank(world, number), list[Any]()
        for step in range(NUM_STEPS):
            rank.step(step)
            rank.state.reserve()
            if step == 1:
                snapshot = rank.state.copy(step, 0)
                found += _tensors(snapshot)
                rank.state.reuse_memory(snapshot)
            if step == 2:
                found.append(rank.state.digest())
        snapshot = rank.state.copy(step, 0)
        return [*found, *_tensors(snapshot)]

    return _together(run)


def copy_beside_training(world: World) -> Any:
    """Read copies only after the next update, or a load, is queued; each copy reuses the previous
    one's memory.
    """

    def run(number: int) -> Any:
        rank, found = Rank(world, number), list[Any]()
        rank.step(0)
        first = rank.state.copy(0, 0)
        rank.state.reserve()
        for step in range(1, NUM_STEPS):
            snapshots = [rank.state.copy(step, 0) for _ in range(2)]
            rank.step(step)
            # The training's stream has done the step, and does not stand still for the host.
            found += rank.bytes()
            for snapshot in snapshots:
                found += _tensors(snapshot)
                rank.state.reuse_memory(snapshot)
        last = rank.state.copy(NUM_STEPS, 0)
        rank.state.load(first)
        return [*found, *_tensors(last), *rank.bytes()]

    return _together(run)


def copy_over_a_copy(world: World) -> Any:
    """Return a copy's memory before the copy is complete; the host writes its part of the next copy
    there.
    """

    def run(number: int) -> Any:
        rank, found = Rank(world, number), list[Any]()
        rank.step(0)
        rank.state.reserve()
        rank.state.reuse_memory(rank.state.copy(0, 0))
        for state in rank.training.optimizers.optimizers[
            0
        ].state.values():  # in host memory from now on
            state["exp_avg"] = torch.full(state["exp_avg"].shape, 3.0)
        found += _tensors(rank.state.copy(1, 0))
        return [*found, *rank.bytes()]

    return _together(run)


def copy_on_another_thread(world: World) -> Any:
    """Copy as the state server does for a newcomer, while the training thread queues the next
    step.
    """

    def run(number: int) -> Any:
        rank, found = Rank(world, number, buffers=False), list[Any]()
        use_device = device.thread_initializer()

        def take(step: int) -> Snapshot | None:
            use_device()
            return rank.state.copy_if_allowed(step)

        with ThreadPoolExecutor(1) as thread:
            for step in range(NUM_STEPS):
                rank.step(step)
                assert rank.state.allow_copying(step, 0)
                snapshot = thread.submit(take, step).result(DEADLINE)
                assert snapshot is not None
                if step % 2:
                    found += _tensors(snapshot)  # before anything else waits for the update
                rank.step(step)
                found += [*rank.bytes(), *_tensors(snapshot)]
                rank.state.reuse_memory(snapshot)
        return found

    return _together(run)


def copy_a_state_that_ends(world: World) -> Any:
    """Drop a state right after its copy; its memory must not be reused yet."""
    rank, moments = _with_moments(world)
    expected = rank.bytes()
    snapshot = rank.state.copy(1, 0)
    shapes = [moment.shape for state in moments.values() for moment in state.values()]
    moments.clear()
    others = [torch.full(shape, 7.0, device=rank.where) for shape in shapes]
    torch.accelerator.current_stream().synchronize()
    found = _tensors(snapshot)
    del others
    return [*expected, *found]


def copy_parts(world: World) -> Any:
    """Copy a state in three parts while the next update is queued, where host memory is scarce."""
    from titan_ft.transfer import host_memory

    rank, _ = _with_moments(world)
    whole = rank.state.copy(1, 0)  # it has the memory that was at hand
    host_memory.free_bytes = lambda: 0  # type: ignore[assignment]  # of this process, which ends with the scenario
    parts = [rank.state.copy(1, 0, Part(place, 3)) for place in range(3)]
    rank.training.optimizers.step()
    for part in parts:
        part.wait()
    assert sum(len(part.byte_range) for part in parts) == len(whole.byte_range)
    joined = torch.cat([part.payload for part in parts])
    return [*_tensors(dataclasses.replace(whole, payload=joined)), *rank.bytes()]


def _with_moments(
    world: World, **options: Any
) -> tuple[Rank, dict[nn.Parameter, dict[str, torch.Tensor]]]:
    """Return a rank after its first update, with memory for copies, and its optimizer's state."""
    rank = Rank(world, 0, **options)
    for parameter in rank.parameters:
        parameter.grad = parameter.detach() * 2.0
    rank.training.optimizers.step()
    rank.state.reserve()
    rank.state.reuse_memory(rank.state.copy(1, 0))
    return rank, rank.training.optimizers.optimizers[0].state


def load_on_another_device(world: World) -> Any:
    """Load a copy that another device is still making, unknown to this device's streams."""
    donor = Rank(world, 0)
    joiner = Rank(world, 1, seed=1)
    world.place(0)
    snapshot = donor.state.copy(0, 0)
    world.place(1)
    joiner.state.load(snapshot)
    return joiner.bytes()


def serve(world: World) -> Any:
    """Send a copy to a joiner while the device still makes it."""
    donor = Rank(world, 0)
    server = StateServer("127.0.0.1", "token", DEADLINE, lambda *_: None)
    try:
        server.publish(donor.state.copy(0, 0), 0.0)
        fetched = fetch([f"127.0.0.1:{server.port}"], "token", 0, "joiner", 1, DEADLINE)
    finally:
        server.close()
    return _tensors(fetched)


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """Copy the tensors of a snapshot; between them there may be anything."""
    snapshot.wait()
    return [
        _view(snapshot.payload, entry).clone() for entry in json.loads(snapshot.header)["tensors"]
    ]


def heal(world: World, room: int = 0) -> Any:
    """Load a donor's copy in a joiner, replay its queued sums, and continue with the others.

    Args:
        room: number of copies of the sums that fit the joiner's device at a time.
    """
    snapshots: list[Snapshot] = []
    copied = threading.Event()

    def run(number: int) -> Any:
        rank = Rank(world, number, seed=number, scale=0.3)
        if number == 0:
            snapshots.append(rank.state.copy(0, 0))
            copied.set()
        else:
            trained = sum(parameter.numel() for parameter in rank.parameters)
            # Gradients and Adam's moments, and the room.
            free = 4 * trained * 3 + 2 * room * rank.exchange.num_bytes
            device.free_bytes = lambda where: free
            rank.exchange.copy_memory.keep_on_device()
        queued = [rank.queue() if number else rank.step(step) for step in range(2)]
        if number == 1:
            assert copied.wait(DEADLINE)
            rank.state.load(snapshots[0])
            snapshots[0].payload.fill_(7)  # its memory serves another purpose from now on
            while queued:
                rank.apply(queued.pop(0))
            rank.apply(rank.queue())  # while rank 0 applies it
            rank.exchange.copy_memory.drop()
        else:
            rank.step(2)
        for step in range(3, NUM_STEPS):
            rank.step(step)
        return [*rank.bytes(), rank.state.digest()]

    return _together(run)


def heal_with_room(world: World) -> Any:
    """Heal with device memory for one copy of the sums at a time."""
    return heal(world, room=1)


def queue_beside_the_next(world: World) -> Any:
    """Keep sums while compute copies them late: the exchange's stream has reached the next
    exchange's zeros.
    """

    def run(number: int) -> Any:
        rank, kept = Rank(world, number), list[Sums]()
        for step in range(NUM_STEPS):
            if number == 0:
                rank.step(step)
                continue
            if step:
                kept.append(rank.sums.copy())
            rank.exchange.launch()
            while rank.exchange.waits_for_members:
                time.sleep(0.001)
            exchange_goes_on(rank.where)
            rank.finish(gives=False)
        torch.accelerator.synchronize()
        return [
            *rank.bytes(),
            *(flat.cpu().clone() for sums in kept for flat in sums.flats if flat is not None),
        ]

    return _together(run)


def fill_beside_the_last(world: World) -> Any:
    """Apply sums late: the next step's gradients come on another stream, into the buckets of these
    sums.
    """

    def run(number: int) -> Any:
        rank = Rank(world, number)
        stream = SideStream(rank.where)
        for step in range(NUM_STEPS):
            rank.exchange.launch_for_backward(NEWEST)
            for parameter in rank.parameters:
                with stream.use(after_current=False):
                    parameter.grad = torch.full_like(parameter, 1.0 + number + step)
                    _call_hooks(parameter)
            stream.join()
            rank.finish(True)
            for parameter in rank.parameters:
                parameter.grad = torch.empty_like(parameter)
            rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def rounds(world: World, alpha: float = 0.0, **options: Any) -> Any:
    """Exchange the changes of the anchors after a rank's own steps. Rank 1 makes its updates from
    copies.
    """

    def run(number: int) -> Any:
        rank = Rank(world, number)
        outer = OuterModel([rank.training.model], OuterOptimizer(0.7, 0.9, nesterov=True))
        exchange = world.exchange(number, outer.anchors, overlap=False, **options)
        found = list[Any]()
        for step in range(NUM_STEPS):
            training = rank.training
            for inner in range(2):
                training.optimizers.zero_grad()
                tokens = torch.randint(
                    0, 11, (4, 3), generator=torch.Generator().manual_seed(20 * step + inner)
                )
                training.model(tokens.to(rank.where)).backward()
                training.optimizers.step()
            outer.compute_changes({0: 1.0 + number})
            exchange.set_fragment_weights({0: 1.0 + number})
            sums = exchange_with(exchange, lambda quorum: ([0.0], b"")).sums
            (sums.copy() if number else sums).write()
            squares = outer.step(alpha)
            found += [str(squares), *(anchor.detach().clone() for anchor in outer.anchors)]
            if step == 1:
                with outer.lend_to_model():
                    found += [
                        tensor.cpu().clone() for tensor in rank.training.model.state_dict().values()
                    ]
        with torch.no_grad():  # the host owns the anchors, whatever the device was to read of them
            for anchor in outer.anchors:
                anchor.zero_()
        return [*found, *rank.bytes()]

    return _together(run)


def rounds_in_bfloat16(world: World) -> Any:
    """Let the changes travel in bfloat16."""
    return rounds(world, dtype=torch.bfloat16)


def rounds_mixed(world: World) -> Any:
    """Continue with a share of the own weights."""
    return rounds(world, alpha=0.5)


def restore(world: World) -> Any:
    """Make the anchors the model's weights, and change the anchors at once."""
    where = world.place(0)
    model: nn.Module = TinyTraining(0).model.to(where)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    outer = OuterModel([model], OuterOptimizer(1.0, 0.0, nesterov=False))
    before = [anchor.detach().clone() for anchor in outer.anchors]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        outer.restore_model()
        for anchor in outer.anchors:
            anchor.zero_()
    return [*before, *(parameter.detach().cpu().clone() for parameter in model.parameters())]


def read_a_number(world: World) -> Any:
    """Bring a number to the host on another thread, as the log of a step does."""
    where = world.place(0)
    read = device.read_later(torch.full((), 3.0, device=where) * 2)
    with ThreadPoolExecutor(1) as thread:
        return [str(thread.submit(read).result(DEADLINE))]


def pin_again(world: World) -> Any:
    """Reuse pinned memory of a tensor that ended while the device copied to it; the host writes
    there at once.
    """
    where, numel = world.place(0), 1 << 20  # small blocks are torch's

    def take() -> torch.Tensor:
        return device.empty_host(numel, torch.uint8, keep=True)

    first = take()
    address = first.data_ptr()
    first.copy_(torch.full((numel,), 3, dtype=torch.uint8, device=where), non_blocking=True)
    del first
    others = list[torch.Tensor]()  # until the thread has the block back
    ends = time.monotonic() + DEADLINE
    while (second := take()).data_ptr() != address:
        assert time.monotonic() < ends
        others.append(second)
        time.sleep(0.01)
    second.fill_(5)
    torch.accelerator.synchronize()
    return [second.clone()]


def replay(world: World) -> Any:
    """Replay an update to its end: its duration determines how many updates fit into a step."""
    from titan_ft.engine.strategy import StepStrategy

    where = world.place(0)
    weights = torch.zeros(8, device=where)
    strategy: Any = SimpleNamespace(apply=lambda update: weights.add_(1))
    StepStrategy.replay(strategy, None)  # type: ignore[arg-type]  # stand in for both
    return [str(torch.accelerator.current_stream().query())]


@contextlib.contextmanager
def _busy(stream: torch.Stream) -> Iterator[None]:
    """Keep a stream busy until the block ends, which must not wait for the stream."""
    released, expired = threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: object) -> None:
        if not released.wait(DEADLINE / 3):
            expired.set()

    _kernels.append(wait)
    cudart = ctypes.CDLL("libcudart.so.13")
    cudart.fakecuda_enqueue_on(
        stream.device_index, ctypes.c_void_p(stream.native_handle), wait, None
    )
    try:
        yield
    finally:
        released.set()
    assert not expired.is_set(), "the host has waited for the stream"


_kernels: list[Any] = []  # a stream may run one at any time until the process ends


def host_waits_for_no_copy(world: World) -> Any:
    """Continue on the host between a copy and the optimizer's next step, before the device has
    begun the copy.
    """
    rank, _ = _with_moments(world)
    with _busy(torch.accelerator.current_stream()):
        snapshot = rank.state.copy(1, 0)
        rank.training.optimizers.step()
    return [*_tensors(snapshot), *rank.bytes()]


def newcomers_copy_waits_for_no_backward(world: World) -> Any:
    """Copy for a newcomer while the next step is queued, however long that takes: the copy follows
    the last update.
    """
    rank, _ = _with_moments(world, buffers=False)
    expected = rank.bytes()
    assert rank.state.allow_copying(1, 0)
    with _busy(torch.accelerator.current_stream()):
        snapshot = rank.state.copy_if_allowed(1)
        assert snapshot is not None
        found = _tensors(snapshot)
    return [*expected, *found]


def backward_waits_for_no_gradient(world: World, **options: Any) -> Any:
    """Finish gradients while the device is busy: no hook waits for a gradient's way into its
    bucket.
    """

    def run(number: int) -> Any:
        rank = Rank(world, number, **options)
        rank.exchange.launch_for_backward(NEWEST)
        with _busy(torch.accelerator.current_stream()):
            rank.give_gradients(2.0)
        rank.finish(True)
        rank.apply(rank.sums)
        return [*rank.bytes()]

    return _together(run)


def backward_waits_for_no_gradient_in_bfloat16(world: World) -> Any:
    """Send gradients in another dtype; a conversion on the way to host memory would make the host
    wait for each.
    """
    return backward_waits_for_no_gradient(world, dtype=torch.bfloat16)


def training_waits_for_no_member(world: World) -> Any:
    """Compute while a bucket's sum waits for a late member: the training's stream does not wait."""
    computed = threading.Event()

    def run(number: int) -> Any:
        rank = Rank(world, number)
        if number:
            assert computed.wait(DEADLINE)
        rank.exchange.launch_for_backward(NEWEST)
        rank.give_gradients(2.0)
        torch.accelerator.current_stream().synchronize()
        computed.set()
        rank.finish(True)
        rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def load_waits_for_no_member(world: World) -> Any:
    """Load a state while the exchange's kernel waits for members that still compute."""
    snapshots: list[Snapshot] = []
    copied, loaded = threading.Event(), threading.Event()

    def run(number: int) -> Any:
        rank = Rank(world, number, seed=number)
        world.memberships[number].process_group.prepare()
        if number == 0:
            snapshots.append(rank.state.copy(0, 0))
            copied.set()
            assert loaded.wait(DEADLINE)
            rank.step(0)
            return rank.bytes()
        assert copied.wait(DEADLINE)
        rank.exchange.launch()
        while device._stream_of_its_own(rank.where, "exchange").query():
            time.sleep(0.001)
        rank.state.load(snapshots[0])
        loaded.set()
        rank.finish(gives=False)
        rank.sums.copy()
        return rank.bytes()

    return _together(run)
