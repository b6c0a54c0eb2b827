# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs on a GPU waits for what it reads: the same training on an accelerator whose streams run late.

Two groups of one rank train, copy, heal and replay on `tests.fake_accelerator`; every byte must be what the same code
makes on a CPU. `tests/cuda/test_late_streams.py` removes each wait, with torch's own streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.member_facts import exchange_with
from tests.fake_accelerator import FakeAccelerator, LateNccl, Stream, installed, move
from tests.replica.conftest import TinyTraining
from titan_ft import device
from titan_ft.engine.feed import checksum
from titan_ft.engine.outer import OuterModel
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.gradients.flight import ExchangeError
from titan_ft.gradients.sums import Sums
from titan_ft.protocol.member import Member, Quorum
from titan_ft.round_settings import OuterOptimizer
from titan_ft.transfer import host_memory
from titan_ft.transfer.snapshot import Part, Snapshot, _view

DEADLINE = 30.0  # seconds; only ever reached by a bug
NUM_MEMBERS, NUM_STEPS = 2, 4
NEWEST, OUTDATED = 0, -1  # updates of a rank: no member of the quorum has more; a member has
SEEDS = range(3)
BACKENDS = ("gloo", "nccl")
CPU = torch.device("cpu")
_SEEDING = threading.Lock()  # torch's generator is one for all threads


class _Sum:
    """A process group between threads over host memory: the call returns with the sum, added in the members' order."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self._rank = rank
        self._parts = shared.setdefault("parts", [None] * NUM_MEMBERS)
        self._barrier = shared.setdefault("barrier", threading.Barrier(NUM_MEMBERS, timeout=DEADLINE))

    def errored(self) -> None:
        """Say that nothing went wrong."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Future[bool]:
        """Sum a tensor."""
        self._gather(tensors[0], lambda parts: tensors[0].copy_(functools.reduce(torch.add, parts)))
        return _done()

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Future[bool]:
        """Gather the members' tensors."""

        def spread(parts: list[torch.Tensor]) -> None:
            for output, part in zip(outputs[0], parts, strict=True):
                output.copy_(part)

        self._gather(tensors[0], spread)
        return _done()

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *_: Any) -> Future[bool]:
        """Give each member its row."""
        self._gather(given, lambda parts: output.copy_(torch.stack([part[self._rank] for part in parts])))
        return _done()

    def _gather(self, own: torch.Tensor, act: Callable[[list[torch.Tensor]], object]) -> None:
        self._parts[self._rank] = own.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        act(parts)


def _done() -> Any:
    work: Future[bool] = Future()
    work.set_result(True)
    work.wait = work.result  # type: ignore[attr-defined]  # as torch's have it
    return work


class _Seat:
    """Stands in for a Membership whose quorum is always there."""

    timeout = timedelta(seconds=DEADLINE)

    def __init__(self, rank: int, process_group: Any) -> None:
        self._rank, self.process_group = rank, process_group
        self.before_quorum: Callable[[], object] = lambda: None

    def wait(self) -> Quorum:
        self.before_quorum()
        members = tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in range(NUM_MEMBERS))
        return Quorum("key", self._rank, members, max_step=0)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self) -> None:
        """Break off what is under way, if the process group is one that breaks; the next one has the same members."""
        if isinstance(self.process_group, _Breaking):
            self.process_group.renew()


class _Breaking:
    """A process group that is aborted at one of its operations, the same one on all members; then it is another one.

    Args:
        build: makes one, whose members meet by a number.
    """

    def __init__(self, build: Callable[[int], Any]) -> None:
        self._build, self._built = build, 0
        self.breaks_at: int | None = None  # how many operations it makes before
        self._group = build(0)

    def renew(self) -> None:
        self._built += 1
        self._group, self.breaks_at = self._build(self._built), None

    def __getattr__(self, name: str) -> Any:
        if name not in ("errored", "deadline") and self.breaks_at is not None:
            if self.breaks_at == 0:
                if isinstance(self._group, LateNccl):
                    self._group.abort()
                raise AssertionError("process group not initialized")
            self.breaks_at -= 1
        return getattr(self._group, name)


class _Behind:
    """A stream that comes behind the current one where its context begins."""

    def __init__(self, accelerator: FakeAccelerator, stream: Stream) -> None:
        self._accelerator, self.stream = accelerator, stream

    def __enter__(self) -> None:
        self.stream.wait_stream(self._accelerator.current_stream())
        self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        self.stream.__exit__()


class _World:
    """Where a scenario runs: on a CPU, or on a fake accelerator with buckets on the host (gloo) or on it (nccl)."""

    def __init__(self, backend: str, accelerator: Any = None) -> None:
        self._backend, self._accelerator = backend, accelerator
        self._shared: dict[Any, Any] = {}
        self.seats: dict[int, _Seat] = {}  # by rank, that of its last exchange

    def place(self, rank: int) -> torch.device:
        """Return a rank's device, which becomes that of the thread."""
        if self._accelerator is None:
            return CPU
        self._accelerator.set_device_index(rank)
        return torch.device("cuda", rank)

    @contextlib.contextmanager
    def compute_is_late(self, where: torch.device) -> Iterator[None]:
        """Let the default stream of a device stand still; in the end all others go on as far as they can."""
        if self._accelerator is None:
            yield
            return
        late = [True]
        self._accelerator.enqueue(self._accelerator.defaults[where.index], lambda: not late)
        yield
        others = [stream for stream in self._accelerator.streams if stream not in self._accelerator.defaults]
        while any(map(self._accelerator.advance, others)):
            pass
        late.clear()

    def leave_room(self, num_bytes: int) -> None:
        """Let each device have so much memory left, if there is one."""
        if self._accelerator is not None:
            self._accelerator.free_bytes = num_bytes

    def streams(self, where: torch.device, number: int) -> list[contextlib.AbstractContextManager[Any]]:
        """Return so many streams, each of which comes behind the current one where it is entered."""
        if self._accelerator is None:
            return [contextlib.nullcontext()] * number
        return [_Behind(self._accelerator, Stream(self._accelerator, where)) for _ in range(number)]

    def join(self, streams: list[Any]) -> None:
        """Let the current stream come behind some."""
        if self._accelerator is not None:
            for stream in streams:
                self._accelerator.current_stream().wait_stream(stream.stream)

    def exchange(self, rank: int, parameters: Any, **options: Any) -> GradientExchange:
        """Build a rank's exchange, with several buckets."""
        on_device = self._backend == "nccl" and self._accelerator is not None

        def build(number: int) -> Any:
            shared = self._shared.setdefault(("quorum", number), {})
            return LateNccl(self._accelerator, rank, NUM_MEMBERS, shared) if on_device else _Sum(rank, shared)

        seat = self.seats[rank] = _Seat(rank, _Breaking(build))
        where = self.place(rank) if on_device else CPU
        return GradientExchange(
            parameters,
            seat,  # type: ignore[arg-type]  # stands in for it
            where=where,
            **{"bucket_bytes": 100, "overlap": True, **options},
        )


class _Rank:
    """A rank that trains TinyTraining's model; its batches are its own.

    Args:
        weights: dtype of the model.
        scale: of the sums in each update.
        options: of its exchange.
    """

    def __init__(
        self,
        world: _World,
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
        move(self.training.model, self.where)
        for optimizer in self.training.optimizers:  # made over the parameters that were
            optimizer.param_groups[0]["params"] = list(self.training.model.parameters())
        self.state = self.training.state
        self.exchange = world.exchange(rank, self.training.model.parameters(), **options)

    def queue(self) -> Sums:
        """Make a step as a group that heals does: it gives nothing, and keeps the sums."""
        self.exchange.launch()
        self.exchange.room.prepare()
        self.finish(gives=False)
        return self.sums.keep()

    def step(self, number: int, gives: bool = True, describe: Any = None) -> Sums:
        """Make a step as the trainer does, without a wait that the engine does not have; returns the sums."""
        training = self.training
        training.optimizers.zero_grad()
        if gives:
            tokens = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(10 * number + self.rank))
            loss = training.model(tokens.to(self.where))
            self.exchange.arm(NEWEST)
            loss.backward()
        else:
            self.exchange.launch()
        self.finish(gives)
        sums = self.sums.keep()
        self.apply(self.sums)
        return sums

    def finish(self, gives: bool) -> None:
        """Complete the exchange; all that is given is finite."""
        reduced = exchange_with(self.exchange, lambda quorum: ([1.0], b"x" * self.rank), gives)
        assert not reduced.spoiled[reduced.quorum.rank]
        self.sums = reduced.sums

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's, the last ones first."""
        return list(self.training.model.parameters())[::-1]

    def apply(self, sums: Sums) -> None:
        """Apply an update, live or replayed."""
        sums.write(self.scale)
        self.training.optimizers.step()
        self.training.lr_schedulers.step()

    def bytes(self) -> list[torch.Tensor]:
        """Return the state, waited for by torch alone."""
        tensors = [tensor.detach() for _, tensor, _ in self.state._tensors(self.training.optimizers)]
        return [tensor.cpu().clone() for tensor in tensors]


def numel_of(rank: _Rank) -> int:
    """Return how many numbers a rank trains."""
    return sum(parameter.numel() for parameter in rank.parameters)


def _together(function: Callable[[int], Any]) -> list[Any]:
    """Run a function for each rank, on threads of their own."""
    futures: list[Future[Any]] = [Future() for _ in range(NUM_MEMBERS)]

    def run(rank: int) -> None:
        try:
            futures[rank].set_result(function(rank))
        except BaseException as error:  # noqa: BLE001  # handed to the test
            futures[rank].set_exception(error)

    for rank in range(NUM_MEMBERS):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    return [future.result(2 * DEADLINE) for future in futures]


# Scenarios: each returns tensors and texts that must not depend on where it runs.


def train(world: _World, **options: Any) -> Any:
    """Steps one after the other; now and then a rank has nothing to give."""

    def run(number: int) -> Any:
        rank = _Rank(world, number, **options)
        for step in range(NUM_STEPS):
            rank.step(step, gives=number == 0 or step != 2)
        return rank.bytes()

    return _together(run)


def train_without_overlap(world: _World) -> Any:
    """The same, with buckets that are filled at the end."""
    return train(world, overlap=False)


def train_on_two_streams(world: _World) -> Any:
    """The same, with gradients that become final on streams beside compute, as FSDP's do, and some that do not come."""

    def run(number: int) -> Any:
        rank = _Rank(world, number)
        streams = world.streams(rank.where, 2)
        for step in range(NUM_STEPS):
            rank.training.optimizers.zero_grad()
            rank.exchange.arm(NEWEST)
            for index, parameter in enumerate(rank.parameters):
                if number == 0 and index % NUM_STEPS == step:
                    continue  # a step that does not use it
                with streams[index % 2]:
                    parameter.grad = parameter.detach() * (1.0 + number + step)
                    for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]  # as FSDP
                        hook(parameter)
            world.join(streams)
            rank.finish(True)
            rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def train_in_8_bits(world: _World) -> Any:
    """The same, with quantized sums and what they leave behind."""
    return train(world, quantize=True)


def train_in_bfloat16(world: _World) -> Any:
    """The same, with sums that travel in bfloat16."""
    return train(world, dtype=torch.bfloat16)


def train_over_broken_exchanges(world: _World) -> Any:
    """Each step's exchange breaks, each at another operation, and is repeated with the same gradients.

    In one of them a rank's state seemed outdated at first, so that it gave zeros. The quorum after it is late: the
    device is through with all that training has queued by then.
    """

    def run(number: int) -> Any:
        rank, seat = _Rank(world, number), world.seats[number]

        def be_late() -> None:
            while any(bucket.missing for bucket in rank.exchange._buckets):
                time.sleep(0.001)
            rank.parameters[0].detach().cpu()

        for step in range(NUM_STEPS):
            rank.training.optimizers.zero_grad()
            seat.before_quorum = lambda: None
            seat.process_group.breaks_at = 1 + step
            rank.exchange.arm(NEWEST if number == 0 or step != 2 else OUTDATED)
            for parameter in rank.parameters:
                parameter.grad = parameter.detach() * (1.0 + number + step)
                for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]  # as autograd
                    hook(parameter)
            with pytest.raises(ExchangeError):
                rank.finish(True)
            seat.before_quorum = be_late
            rank.finish(True)
            rank.apply(rank.sums)
        return rank.bytes()

    return _together(run)


def train_a_bfloat16_model(world: _World) -> Any:
    """Updates, live and replayed, of weights in bfloat16: sums are rounded to it once, when they have been scaled."""

    def run(number: int) -> Any:
        rank = _Rank(world, number, weights=torch.bfloat16, scale=0.3)
        for step in range(NUM_STEPS):
            for parameter in rank.parameters:
                parameter.grad = parameter.detach() * (1.0 + number + step)
            rank.finish(True)
            sums = rank.sums.keep()
            rank.apply(rank.sums)
            rank.apply(sums)
        return rank.bytes()

    return _together(run)


def copy(world: _World) -> Any:
    """A donor's copies right behind an update, and the digest."""

    def run(number: int) -> Any:
        rank, found = _Rank(world, number), []
        for step in range(NUM_STEPS):
            rank.step(step)
            rank.state.reserve()
            if step == 1:
                snapshot = rank.state.copy(step, 0)
                found += _tensors(snapshot)
                rank.state.reuse(snapshot)
            if step == 2:
                found.append(rank.state.digest())
        snapshot = rank.state.copy(step, 0)
        return [*found, *_tensors(snapshot)]

    return _together(run)


def copy_beside_training(world: _World) -> Any:
    """Copies that are read only when the next update is queued, or a load; each takes the memory of the one before."""

    def run(number: int) -> Any:
        rank, found = _Rank(world, number), []
        rank.step(0)
        first = rank.state.copy(0, 0)
        rank.state.reserve()
        for step in range(1, NUM_STEPS):
            snapshots = [rank.state.copy(step, 0) for _ in range(2)]
            rank.step(step)
            found += rank.bytes()  # the training's stream is through with the step, and not for want of the host
            for snapshot in snapshots:
                found += _tensors(snapshot)
                rank.state.reuse(snapshot)
        last = rank.state.copy(NUM_STEPS, 0)
        rank.state.load(first)
        return [*found, *_tensors(last), *rank.bytes()]

    return _together(run)


def copy_on_another_thread(world: _World) -> Any:
    """As one of the state server's does for a newcomer, while the training thread queues the next step."""

    def run(number: int) -> Any:
        rank, found = _Rank(world, number, buffers=False), []
        use_device = device.for_thread()

        def take(step: int) -> Snapshot | None:
            use_device()
            return rank.state.copy_shared(step)

        with ThreadPoolExecutor(1) as thread:
            for step in range(NUM_STEPS):
                rank.step(step)
                assert rank.state.share(step, 0)
                snapshot = thread.submit(take, step).result(DEADLINE)
                assert snapshot is not None
                rank.step(step)
                found += [*rank.bytes(), *_tensors(snapshot)]
                rank.state.reuse(snapshot)
        return found

    return _together(run)


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """Copy what is in a snapshot; between its tensors there may be anything."""
    snapshot.wait()
    return [_view(snapshot.payload, entry).clone() for entry in json.loads(snapshot.header)["tensors"]]


def heal(world: _World, room: int = 0) -> Any:
    """A joiner loads a donor's copy, replays the sums that it has queued, and goes on with the others.

    Args:
        room: copies of the sums that may stay on the joiner's device at a time.
    """
    snapshots: list[Snapshot] = []
    copied = threading.Event()

    def run(number: int) -> Any:
        rank = _Rank(world, number, seed=number, scale=0.3)
        if number == 0:
            snapshots.append(rank.state.copy(0, 0))
            copied.set()
        else:
            world.leave_room(4 * numel_of(rank) * 3 + 2 * room * rank.exchange.num_bytes)
            rank.exchange.room.keep_on_device()
        queued = [rank.queue() if number else rank.step(step) for step in range(2)]
        if number == 1:
            assert copied.wait(DEADLINE)
            rank.state.load(snapshots[0])
            snapshots[0].payload.fill_(7)  # its memory is another one's from now on
            while queued:
                rank.apply(queued.pop(0))
            rank.apply(rank.queue())  # while rank 0 applies it
            rank.exchange.room.drop()
        else:
            rank.step(2)
        for step in range(3, NUM_STEPS):
            rank.step(step)
        return [*rank.bytes(), rank.state.digest()]

    return _together(run)


def queue_beside_the_next(world: _World) -> Any:
    """Sums that a joiner keeps, and compute is late to copy: the exchange's stream has come to the next one's zeros."""

    def run(number: int) -> Any:
        rank, kept = _Rank(world, number), list[Sums]()
        for step in range(NUM_STEPS):
            if number == 0:
                rank.step(step)
                continue
            with world.compute_is_late(rank.where):
                if step:
                    kept.append(rank.sums.keep())
                rank.exchange.launch()
                while rank.exchange.under_way:
                    time.sleep(0.001)
            rank.finish(gives=False)
        return [*rank.bytes(), *(flat.clone() for sums in kept for flat in sums.flats if flat is not None)]

    return _together(run)


def heal_with_room(world: _World) -> Any:
    """The same, with sums of which one at a time has room on the device."""
    return heal(world, room=1)


def rounds(world: _World, alpha: float = 0.0, **options: Any) -> Any:
    """Rounds of steps of a rank's own, exchanged as changes of the anchors. Rank 1 makes the updates of copies."""

    def run(number: int) -> Any:
        rank = _Rank(world, number)
        outer = OuterModel([rank.training.model], OuterOptimizer(0.7, 0.9, nesterov=True))
        exchange = world.exchange(number, outer.anchors, overlap=False, **options)
        found = []
        for step in range(NUM_STEPS):
            training = rank.training
            for inner in range(2):
                training.optimizers.zero_grad()
                tokens = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(20 * step + inner))
                training.model(tokens.to(rank.where)).backward()
                training.optimizers.step()
            outer.take_changes({0: 1.0 + number})
            exchange.give({0: 1.0 + number})
            sums = exchange_with(exchange, lambda quorum: ([0.0], b"")).sums
            (sums.keep() if number else sums).write()
            squares = outer.step(alpha)
            found += [str(squares), *(anchor.detach().clone() for anchor in outer.anchors)]
            if step == 1:
                with outer.lent():
                    found += [tensor.cpu().clone() for tensor in rank.training.model.state_dict().values()]
        with torch.no_grad():  # they are the host's, whatever the device was told to read
            for anchor in outer.anchors:
                anchor.zero_()
        return [*found, *rank.bytes()]

    return _together(run)


def rounds_in_bfloat16(world: _World) -> Any:
    """Changes that travel in bfloat16."""
    return rounds(world, dtype=torch.bfloat16)


def rounds_mixed(world: _World) -> Any:
    """Rounds that go on with a share of the own weights."""
    return rounds(world, alpha=0.5)


def restore(world: _World) -> Any:
    """The anchors become the model's weights, and are changed at once."""
    where = world.place(0)
    model: nn.Module = TinyTraining(0).model
    move(model, where)
    outer = OuterModel([model], OuterOptimizer(1.0, 0.0, nesterov=False))
    before = [anchor.detach().clone() for anchor in outer.anchors]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        outer.restore_model()
        for anchor in outer.anchors:
            anchor.zero_()
    return [*before, *(parameter.detach().cpu().clone() for parameter in model.parameters())]


def read(world: _World) -> Any:
    """The checksum of a batch that a loader has put on the device."""
    where = world.place(0)
    inputs = torch.arange(12).to(where) * 3
    return [checksum([({"input": inputs}, inputs + 1)])]


SCENARIOS = {
    "exchange.py": (
        heal,
        heal_with_room,
        queue_beside_the_next,
        train,
        train_without_overlap,
        train_on_two_streams,
        train_over_broken_exchanges,
        train_in_8_bits,
        train_in_bfloat16,
        train_a_bfloat16_model,
        rounds,
        rounds_in_bfloat16,
    ),
    "snapshot.py": (copy, copy_beside_training, copy_on_another_thread, heal),
    "outer.py": (rounds, rounds_mixed, rounds_in_bfloat16, restore),
    "feed.py": (read,),
}
"""By the module whose waits they need."""


@functools.cache
def on_cpu(scenario: Callable[[_World], Any]) -> Any:
    """Return what a scenario comes to on a CPU."""
    return scenario(_World("gloo"))


def same(found: Any, expected: Any) -> bool:
    """Compare bit for bit."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    octets = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and torch.equal(*octets)


def agrees(scenario: Callable[[_World], Any], backend: str, seed: int) -> bool:
    """Say whether a scenario comes to the same on an accelerator that runs late."""
    expected = on_cpu(scenario)
    with installed(seed, NUM_MEMBERS) as accelerator:
        found = scenario(_World(backend, accelerator))
    return same(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", dict.fromkeys(sum(SCENARIOS.values(), ())), ids=lambda scenario: scenario.__name__)
def test_late_streams_change_nothing(scenario: Callable[[_World], Any], backend: str) -> None:
    """Whatever runs when: every byte is what it is on a CPU."""
    for seed in SEEDS:
        assert agrees(scenario, backend, seed), f"seed {seed}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queued", [False, True], ids=["live", "replayed"])
def test_sums_go_to_the_device_as_they_are(queued: bool, backend: str) -> None:
    """Those in host memory are scaled on the device: scaled on the host they would take as much memory again, which
    nobody has pinned, so that the host would wait for each copy of it."""
    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World(backend, accelerator)

        def run(number: int) -> int:
            rank, thread = _Rank(world, number, scale=0.3), threading.current_thread().name
            for parameter in rank.parameters:
                parameter.grad = parameter.detach() * 2.0
            rank.finish(True)
            sums = rank.sums.keep() if queued else rank.sums
            before = accelerator.pageable[thread]
            sums.write(0.3)
            return accelerator.pageable[thread] - before

        assert _together(run) == [0] * NUM_MEMBERS


def with_moments(
    accelerator: FakeAccelerator, **options: Any
) -> tuple[_Rank, dict[nn.Parameter, dict[str, torch.Tensor]]]:
    """Return a rank behind its first update, with memory for copies, and its optimizer's state."""
    rank = _Rank(_World("nccl", accelerator), 0, **options)
    for parameter in rank.parameters:
        parameter.grad = parameter.detach() * 2.0
    rank.training.optimizers.step()
    rank.state.reserve()
    rank.state.reuse(rank.state.copy(1, 0))
    return rank, rank.training.optimizers.optimizers[0].state


def test_memory_that_a_copy_reads_is_nobody_elses() -> None:
    """A state that is dropped behind its copy, as a spoiled one is, gives no memory to what training does next."""
    for seed in range(12):
        with installed(seed, NUM_MEMBERS) as accelerator:
            rank, moments = with_moments(accelerator)
            expected = rank.bytes()
            snapshot = rank.state.copy(1, 0)
            shapes = [moment.shape for state in moments.values() for moment in state.values()]
            moments.clear()
            others = [torch.full(shape, 7.0, device=rank.where) for shape in shapes]
            found = _tensors(snapshot)
            assert same(found, expected), f"seed {seed}"
            del others


def test_parts_of_a_state_are_copied_beside_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all of it is: each byte is that behind the update, although the next one is queued at once."""
    for seed in range(12):
        with installed(seed, NUM_MEMBERS) as accelerator:
            rank, _ = with_moments(accelerator)
            expected = rank.bytes()
            whole = rank.state.copy(1, 0)  # it has the memory that was at hand
            monkeypatch.setattr(host_memory, "free_bytes", lambda: 0)
            parts = [rank.state.copy(1, 0, Part(place, 3)) for place in range(3)]
            rank.training.optimizers.step()
            for part in parts:
                part.wait()
            assert sum(len(part.held) for part in parts) == len(whole.held)
            joined = torch.cat([part.payload for part in parts])
            found = _tensors(dataclasses.replace(whole, payload=joined))
            assert same(found, expected), f"seed {seed}"


def test_a_copy_is_complete_when_it_is_loaded() -> None:
    """Also into a state on another device, whose streams know nothing of the copy's."""
    for seed in SEEDS:
        with installed(seed, NUM_MEMBERS) as accelerator:
            world = _World("nccl", accelerator)
            donor, joiner = _Rank(world, 0, seed=0), _Rank(world, 1, seed=1)
            world.place(0)
            snapshot = donor.state.copy(0, 0)
            world.place(1)
            joiner.state.load(snapshot)
            assert same(joiner.bytes(), donor.bytes()), f"seed {seed}"


def test_a_load_waits_for_no_other_group() -> None:
    """The joiner has launched its part of the exchange, whose kernel waits for members that still compute."""
    snapshots: list[Snapshot] = []
    copied, loaded = threading.Event(), threading.Event()

    def run(number: int) -> None:
        rank = _Rank(world, number, seed=number)
        if number == 0:
            snapshots.append(rank.state.copy(0, 0))
            copied.set()
            assert loaded.wait(DEADLINE / 3)
            rank.step(0)
            return
        assert copied.wait(DEADLINE)
        rank.exchange.launch()
        while not accelerator.host_waits["titan_ft_exchange"]:
            time.sleep(0.001)
        rank.state.load(snapshots[0])
        loaded.set()
        rank.finish(gives=False)

    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World("nccl", accelerator)
        _together(run)


def test_a_newcomers_copy_waits_for_no_backward() -> None:
    """It is behind the update, however much of the next step is queued by then: the next update waits for its end."""
    with installed(0, NUM_MEMBERS) as accelerator:
        rank, _ = with_moments(accelerator, buffers=False)
        assert rank.state.share(1, 0)
        done: list[None] = []
        accelerator.enqueue(accelerator.defaults[0], lambda: bool(done))  # a backward that takes its time
        snapshot = rank.state.copy_shared(1)
        assert snapshot is not None
        found = _tensors(snapshot)
        done.append(None)
        assert same(found, rank.bytes())


def test_the_host_writes_nothing_below_a_copy_that_comes_late() -> None:
    """Memory is lent again when its last copy is complete: of the next one, what is in host memory comes at once."""
    for seed in SEEDS:
        with installed(seed, NUM_MEMBERS) as accelerator:
            rank, moments = with_moments(accelerator)
            rank.state.reuse(rank.state.copy(1, 0))
            for state in moments.values():  # as large as before, but in host memory from now on
                state["exp_avg"] = torch.full(state["exp_avg"].shape, 3.0)
            found = _tensors(rank.state.copy(1, 0))
            assert same(found, rank.bytes()), f"seed {seed}"


def test_the_host_waits_for_no_copy() -> None:
    """Between a copy and the optimizer's next step the training thread goes on; the step waits on the device."""
    for seed in SEEDS:
        with installed(seed, NUM_MEMBERS) as accelerator:
            rank, thread = with_moments(accelerator)[0], threading.current_thread().name
            before = accelerator.host_waits[thread], len(accelerator.waits[thread])
            rank.state.copy(1, 0)
            rank.training.optimizers.step()
            # The copy's stream for the training's, and the training's for the copy: once, not for each parameter.
            assert (accelerator.host_waits[thread], len(accelerator.waits[thread])) == (before[0], before[1] + 2)
            assert accelerator.waits[thread][-1] is accelerator.defaults[0]
            rank.training.optimizers.step()
            assert len(accelerator.waits[thread]) == before[1] + 2


def test_training_waits_for_no_other_member() -> None:
    """While buckets are summed, no stream but the exchange's own waits for the other members: backward goes on."""
    for seed in SEEDS:
        with installed(seed, NUM_MEMBERS) as accelerator:
            train(_World("nccl", accelerator))
        assert accelerator.waits["titan_ft_exchange"], "nobody waits at all"
        assert not set(accelerator.defaults) & set(accelerator.waits["titan_ft_exchange"])


def test_the_next_exchange_waits_for_the_copy_of_the_last() -> None:
    """A joiner queues the sums and goes on: its next exchange writes into a bucket only when that has been copied."""

    def count_waits(copies: bool) -> int:
        with installed(0, NUM_MEMBERS) as accelerator:
            world = _World("nccl", accelerator)

            def run(number: int) -> int:
                rank = _Rank(world, number)
                for step in range(2):
                    if number == 0:
                        rank.step(step)
                    elif copies:
                        rank.queue()
                    else:
                        rank.exchange.launch()
                        rank.finish(gives=False)
                return len(rank.exchange._buckets)

            buckets = _together(run)[1]
            waits = [stream for stream in accelerator.waits["titan_ft_exchange"] if stream.where.index == 1]
            return len(waits) - copies * buckets

    assert count_waits(copies=True) == count_waits(copies=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_waits_for_no_gradient_on_its_way(backend: str, dtype: torch.dtype) -> None:
    """Also where it travels in another dtype: changed on the way to host memory, each would make the host wait."""
    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World(backend, accelerator)

        def run(number: int) -> int:
            rank, thread = _Rank(world, number, dtype=dtype), threading.current_thread().name
            rank.exchange.arm(NEWEST)
            before = accelerator.host_waits[thread]
            for parameter in rank.parameters:
                parameter.grad = parameter.detach() * 2.0
                for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
                    hook(parameter)
            waited = accelerator.host_waits[thread] - before
            rank.finish(True)
            return waited

        assert _together(run) == [0] * NUM_MEMBERS


def test_sums_stay_on_the_device_where_they_fit() -> None:
    """As many as half of its memory takes; the others go to host memory, until one that stayed is replayed."""
    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World("nccl", accelerator)

        def kind(sums: Sums) -> set[str]:
            return {flat.device.type for flat in sums.flats if flat is not None}

        def run(number: int) -> list[set[str]]:
            rank = _Rank(world, number)
            needed = 4 * numel_of(rank) * 3  # its gradients, and Adam's moments
            world.leave_room(needed - 1)
            assert rank.exchange.room.keep_on_device() == 0
            world.leave_room(needed + 5 * rank.exchange.num_bytes)
            assert rank.exchange.room.keep_on_device() == 2
            queued = [rank.queue() if number else rank.step(step) for step in range(4)]
            found = [kind(sums) for sums in queued]
            before = accelerator.host_waits[threading.current_thread().name]
            while queued:
                rank.apply(queued.pop(0))
            assert accelerator.host_waits[threading.current_thread().name] == before, "the weights are known"
            found.append(kind(rank.queue() if number else rank.step(4)))
            rank.exchange.room.drop()
            found.append(kind(rank.queue() if number else rank.step(5)))
            return found

        expected = [{"cuda"}, {"cuda"}, {"cpu"}, {"cpu"}, {"cuda"}, {"cpu"}]
        assert _together(run) == [expected] * NUM_MEMBERS


def test_sums_go_to_host_memory_when_the_device_has_no_room_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else has taken it since: no heal ends by that."""
    empty_like = torch.empty_like

    def refuse(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if sys._getframe(1).f_code.co_name in ("_allocate_on_device", "<listcomp>"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty_like(like, *args, **kwargs)

    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World("nccl", accelerator)

        def run(number: int) -> set[str]:
            rank = _Rank(world, number)
            world.leave_room(100 * rank.exchange.num_bytes)
            assert rank.exchange.room.keep_on_device() > 1
            sums = rank.queue() if number else rank.step(0)
            rank.apply(sums)
            return {flat.device.type for flat in sums.flats if flat is not None}

        monkeypatch.setattr(torch, "empty_like", refuse)
        assert _together(run) == [{"cpu"}] * NUM_MEMBERS


@pytest.mark.parametrize("bucket_bytes", [4, 1 << 20], ids=["many buckets", "one"])
def test_a_step_waits_for_the_device_as_rarely_as_it_must(bucket_bytes: int) -> None:
    """However many buckets there are: the exchange's thread for the number of givers, the rows and the messages."""
    with installed(0, NUM_MEMBERS) as accelerator:
        world = _World("nccl", accelerator)

        def run(number: int) -> int:
            rank, thread = _Rank(world, number, bucket_bytes=bucket_bytes), threading.current_thread().name
            before = accelerator.host_waits[thread]
            for _ in range(NUM_STEPS):
                rank.exchange.arm(NEWEST)
                for parameter in rank.parameters:
                    parameter.grad = parameter.detach() * 2.0
                    for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
                        hook(parameter)
                rank.finish(True)
                rank.sums.write(0.5)
            return accelerator.host_waits[thread] - before

        assert _together(run) == [0] * NUM_MEMBERS
        assert accelerator.host_waits["titan_ft_exchange"] == 3 * NUM_STEPS * NUM_MEMBERS
