# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Small models for tests of the replica dimension, and groups that are threads of the test
process.
"""

from __future__ import annotations

import os

# torchft reads it when it is loaded: its servers log every refused heartbeat.
os.environ.setdefault("RUST_LOG", "error")

from titan_ft.host import cpu  # after the variable is set

cpu.prepare()  # before any import of torchtitan, which reads the device at import

import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from concurrent.futures import Future  # noqa: E402
from datetime import timedelta  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torchtitan.components.lr_scheduler import LRSchedulersContainer  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402

from tests.event_builder import untyped  # noqa: E402
from titan_ft.config import FaultTolerance  # noqa: E402
from titan_ft.membership.control_tree import ControlTree  # noqa: E402
from titan_ft.membership.membership import Membership, Quorum  # noqa: E402
from titan_ft.run.events import Event  # noqa: E402
from titan_ft.run.log import EventLog  # noqa: E402
from titan_ft.system.threads import call_for_each  # noqa: E402
from titan_ft.transfer.reach import Peer, Probe  # noqa: E402
from titan_ft.transfer.snapshot import TrainState  # noqa: E402

DEADLINE = 20.0  # seconds that anything in these tests may take; only a bug reaches it


class TinyModel(nn.Module):
    """A model with all that a state can consist of.

    It has matrices, a scalar parameter, and buffers of both kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.inner.register_buffer("mask", torch.tensor([True, True, False, True, True]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        self.passes += 1
        hidden = self.inner(self.embedding(tokens)) * self.inner.mask
        return (hidden * self.scale).float().square().sum()


class Counters:
    """A trainer's progress."""

    def __init__(self) -> None:
        self.tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]


class TinyTraining:
    """One rank's training with torchtitan's containers.

    The batch of a step depends on its number alone.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype = torch.float32,
        shard: bool = False,
        buffers: bool = True,
        **optimizer: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = TinyModel().to(dtype)
        if not buffers:  # without buffers in the state
            self.model._non_persistent_buffers_set.add("passes")
            self.model.inner._non_persistent_buffers_set.add("mask")
        if shard:
            self._shard()
        kwargs = {
            "lr": 1e-2,
            "betas": (0.9, 0.95),
            "weight_decay": 0.1,
            "foreach": True,
            **optimizer,
        }
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, kwargs)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers, lambda step: (step + 1) / 10)
        self.counters = Counters()
        self.state = TrainState([self.model], self.optimizers, self.lr_schedulers, self.counters)
        self.step = 0

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # FSDP2 cannot shard a scalar. torchtitan's models have none.
        self.model.scale = nn.Parameter(torch.ones(1, dtype=self.model.scale.dtype))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model.inner, mesh=mesh)
        cpu.adapt_model(fully_shard(self.model, mesh=mesh))

    def train(self, num_steps: int) -> list[float]:
        """Make steps; returns their losses."""
        losses = []
        for _ in range(num_steps):
            tokens = torch.randint(
                0, 11, (4, 3), generator=torch.Generator().manual_seed(self.step)
            )
            loss = self.model(tokens)
            self.optimizers.zero_grad()
            loss.backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.counters.tokens += tokens.numel()
            self.step += 1
            losses.append(loss.item())
        return losses


@pytest.fixture(scope="module")  # not longer, because other modules have worlds of their own
def world() -> Iterator[None]:
    """Make this process a world of one rank, as with one rank per group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tiny() -> type[TinyTraining]:
    """Provide the builder of a small training."""
    return TinyTraining


class RecordedEvents(EventLog):
    """An event log that tests can read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.all: list[dict[str, Any]] = []
        self._told = threading.Condition()

    def emit(self, event: Event) -> None:
        """Keep the event."""
        with self._told:
            self.all.append(untyped(event))
            self._told.notify_all()

    def named(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [fields for fields in self.all if fields["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> None:
        """Wait until there are `count` events of a kind."""
        with self._told:
            assert self._told.wait_for(lambda: len(self.named(event)) >= count, DEADLINE), (
                f"no {event}: {self.all}"
            )


LIGHTHOUSE = {"join_timeout_ms": 100, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 500}

NURSERY = f"""
import os, sys, time
from torchft.coordination import LighthouseServer
for line in sys.stdin:
    if os.fork() == 0:
        sys.stdin.close()
        deadline = time.monotonic() + {DEADLINE}
        while True:
            try:
                server = LighthouseServer(bind="127.0.0.1:" + line.strip(), min_replicas=1, **{LIGHTHOUSE!r})
                break
            except RuntimeError:  # the port is that of one that was killed, and is not free yet
                if time.monotonic() > deadline:
                    os.write(1, b"0 no-port:0" + bytes([10]))
                    os._exit(1)
                time.sleep(0.05)
        os.write(1, (str(os.getpid()) + " " + server.address() + chr(10)).encode())
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
"""


class MortalLighthouse:
    """A lighthouse in a process of its own, which can be killed and restarted at the same address.

    A lighthouse of this process cannot: after `shutdown` it still serves its connections.
    """

    def __init__(self, nursery: subprocess.Popen[str]) -> None:
        self._nursery = nursery
        self._port = "0"
        self.start()

    def start(self) -> None:
        """Listen, at the former port if there was one."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(self._port + "\n")
        self._nursery.stdin.flush()
        pid, address = self._nursery.stdout.readline().split()
        assert int(pid), f"no lighthouse at port {self._port}"
        self._pid, self._port = int(pid), address.rsplit(":", 1)[1]

    def kill(self) -> None:
        """End the lighthouse as a crash does. It forgets everything."""
        os.kill(self._pid, signal.SIGKILL)

    @property
    def address(self) -> str:
        """Return http://host:port."""
        return f"http://127.0.0.1:{self._port}"


TOKEN = "token of the run"


class FakeProbe(Probe):
    """Knows without a network which peers cannot be reached."""

    def __init__(self, is_lost: Callable[[Peer], bool] = lambda peer: False) -> None:
        super().__init__("", "", 0)
        self._is_lost = is_lost

    def _ask(self, peer: Peer) -> Exception | None:
        return OSError("no answer") if self._is_lost(peer) else None


class Trees:
    """Connects the control trees of groups whose ranks are threads of the test process."""

    def __init__(self) -> None:
        self._made: list[ControlTree] = []

    def connect(self, rank: int = 0, num_ranks: int = 1, port: int = 0) -> ControlTree:
        """Connect one rank by its group's store at this port. A collective.

        A group of one rank needs no store.
        """
        host = "127.0.0.1"
        store = (
            dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            if num_ranks > 1
            else None
        )
        name = f"node-{rank}"
        tree = ControlTree(
            rank, num_ranks, host=host, token="token", store=store, key="group/0", host_name=name
        )
        self._made.append(tree)
        return tree

    def connect_group(self, num_ranks: int) -> list[ControlTree]:
        """Connect all ranks of a group, by a store of its own."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connect = partial(self.connect, num_ranks=num_ranks, port=store.port)
        return call_for_each(connect, range(num_ranks), "connect", num_ranks)

    def close(self) -> None:
        """Close all trees."""
        for tree in self._made:
            tree.close()


class Seats:
    """Takes seats at a lighthouse.

    Each seat is one rank of a replica group in this process.
    """

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self._taken: list[Membership] = []
        self._trees = Trees()
        self.stores: dict[int, dist.TCPStore] = {}
        self._former_stores: list[dist.TCPStore] = []

    def config(self, slot: int, **changes: Any) -> FaultTolerance:
        """Return the config of group `slot`, with timeouts fit for tests."""
        values: dict[str, Any] = {
            "enable": True,
            "replica_id": slot,
            "group_size": 2,
            "process_group_timeout_ms": 5000,
            "start_timeout_seconds": 5.0,
            "bucket_size_mb": 1.0,
        }
        return FaultTolerance(**values | changes)

    def take(self, slot: int, *, rank: int = 0, world_size: int = 1, **options: Any) -> Membership:
        """Take the seat of one rank.

        All ranks of a group must do so at the same time (`take_group`).
        """
        from titan_ft.membership.process_group import build_process_group

        if rank == 0 and "store" not in options:
            self.open_store(slot)
        config = options.pop("config", None) or self.config(slot)
        arguments: dict[str, Any] = {
            "process_group": build_process_group(
                "gloo", timedelta(milliseconds=config.process_group_timeout_ms)
            ),
            "lighthouse": self.lighthouse,
            "host": "127.0.0.1",
            "group_rank": rank,
            "group_world_size": world_size,
            "store": ("127.0.0.1", self.stores[slot].port),
            "control": self._trees.connect(rank, world_size, self.stores[slot].port),
            "config_digest": "c0ffee",
            "address": f"127.0.0.1:{9000 + 10 * slot + rank}",
            "token": TOKEN,
            "events": RecordedEvents(),
            "probe": FakeProbe(),
            "leave_requested": lambda: False,
        }
        self._taken.append(Membership(config, **arguments | options))
        return self._taken[-1]

    def take_group(
        self,
        slot: int,
        world_size: int = 2,
        of_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
        **options: Any,
    ) -> list[Membership]:
        """Take the seats of all ranks of a group.

        Args:
            of_rank: options that differ between the ranks.
        """
        store = self.open_store(slot)

        def take(rank: int) -> Membership:
            return self.take(
                slot, rank=rank, world_size=world_size, **{"store": store} | options | of_rank(rank)
            )

        return self.together(*[partial(take, rank) for rank in range(world_size)])

    def open_store(self, slot: int) -> tuple[str, int]:
        """Open the store of a group; returns its host and port."""
        if slot in self.stores:
            # An older process of the slot may still use it.
            self._former_stores.append(self.stores[slot])
        self.stores[slot] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self.stores[slot].port

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a function on a thread of its own."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001  # handed to the test
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def together(self, *functions: Callable[[], Any]) -> list[Any]:
        """Run functions at the same time, each on a thread of its own.

        Returns:
            Their results, in order.
        """
        futures = [self.submit(function) for function in functions]
        return [future.result(DEADLINE) for future in futures]

    def meet(self, *seats: Membership, steps: list[int] | None = None) -> list[Quorum]:
        """Let all seats go from quorum to quorum until all are in one. Each holds `steps` updates.

        The lighthouse lets no member of the last quorum wait for a newcomer, so several quorums may
        be needed.

        Returns:
            This quorum, for each seat.
        """
        slots = sorted({seat.member.slot for seat in seats})
        deadline = time.monotonic() + DEADLINE

        def go_on(seat: Membership, step: int) -> Quorum:
            while True:
                if not seat.quorum_requested:
                    seat.request_quorum(step)
                quorum = seat.await_quorum()
                if quorum.slots == slots:
                    return quorum
                assert time.monotonic() < deadline, f"{quorum.slots} instead of {slots}"
                seat.vote(step, True)

        numbers = steps or [0] * len(seats)
        return self.together(
            *[lambda s=s, n=n: go_on(s, n) for s, n in zip(seats, numbers, strict=True)]
        )

    def close(self) -> None:
        """Give all seats back."""
        for seat in self._taken:
            seat.close()
        self._trees.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that no event shows."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.005)


@pytest.fixture
def start_lighthouse() -> Iterator[Callable[..., str]]:
    """Provide the start of lighthouses in this process; it returns their address."""
    from torchft.coordination import LighthouseServer

    servers = []

    def start(min_replicas: int = 1, **changes: int) -> str:
        servers.append(
            LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas, **LIGHTHOUSE | changes)
        )
        return f"http://127.0.0.1:{servers[-1].address().rsplit(':', 1)[1]}"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture
def seats(start_lighthouse: Callable[..., str]) -> Iterator[Seats]:
    """Provide seats at a lighthouse of the test's own."""
    seats = Seats(start_lighthouse())
    yield seats
    seats.close()


@pytest.fixture
def trees() -> Iterator[Trees]:
    """Provide control trees, which are closed at the end."""
    trees = Trees()
    yield trees
    trees.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Provide a process that forks lighthouses. It has made their imports already."""
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # ends the process, and the lighthouses that are left


@pytest.fixture
def mortal_lighthouse(nursery: subprocess.Popen[str]) -> MortalLighthouse:
    """Provide a lighthouse that can die."""
    return MortalLighthouse(nursery)


@pytest.fixture(name="wait_until")
def provide_wait_until() -> Callable[[Callable[[], bool], str], None]:
    """Provide `wait_until`."""
    return wait_until
