# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent that injects faults, in a process with a model and an optimizer."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.event_builder import untyped
from titan_ft.chaos.inside import blackhole, network
from titan_ft.chaos.inside import task as task_module
from titan_ft.chaos.inside.agent import ChaosAgent
from titan_ft.chaos.inside.target_worker import TargetWorker
from titan_ft.chaos.orders import LIFETIME_SECONDS, Order
from titan_ft.host import cpu
from titan_ft.run.log import EventLog, read_events
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.state_fetch import fetch
from titan_ft.transfer.state_server import StateServer

cpu.prepare()

DEADLINE = 20.0  # seconds; only ever reached by a bug
TOKEN = "a shared secret"
_MARKERS = itertools.count(1000)


class ProcessGroup:
    """The exchange's."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.connection: socket.socket | None = None

    def abort(self) -> None:
        self.aborted.set()

    def configure(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), DEADLINE)


class Worker:
    """A worker with an agent."""

    def __init__(
        self, folder: Path, replica: int = 0, rank: int = 0, attempt: int = 0, hang: float = 60.0
    ) -> None:
        self.me = (replica, rank, attempt)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.process_group = ProcessGroup()
        self.server = StateServer("127.0.0.1", TOKEN, DEADLINE, lambda *_: None)
        self.folder = folder
        self.events = EventLog(
            folder / "events" / f"{replica}-{rank}-{attempt}.jsonl", replica=replica, rank=rank
        )
        parts = TargetWorker(
            model_parts=[self.model],
            parameters=dict(self.model.named_parameters()),
            optimizers=[self.optimizer],
            process_group=self.process_group,
            server=self.server,
            group_pids=(),
            store=("127.0.0.1", 1),
            hang_timeout_seconds=hang,
            folder=folder / "chaos",
        )
        self.orders = folder / "chaos" / "orders.jsonl"
        self.agent = ChaosAgent(
            self.orders, parts, self.events, replica=replica, rank=rank, attempt=attempt
        )
        self.steps = 0

    def order(self, fault: str, **fields: Any) -> None:
        params = fields.pop("params", {})
        values = {"replica": 0, "rank": 0, "seed": 3, "shot": 1, **fields}
        Order(fault=fault, params=params, **values).append_to(self.orders)

    def step(self) -> None:
        """Train one step."""
        self.steps += 1
        self.agent.at_step(self.steps)
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().sum().backward()
        self.optimizer.step()

    def step_until(self, *events: str) -> dict[str, Any]:
        """Train until one of these events is emitted, and return it."""
        return self.wait(*events, meanwhile=self.step)

    def wait(self, *events: str, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while not (found := self.told(*events)):
            assert time.monotonic() < deadline
            meanwhile()
            time.sleep(0.005)
        return found[-1]

    def told(self, *events: str) -> list[dict[str, Any]]:
        return [
            untyped(event) for event in read_events(self.folder / "events") if event.name in events
        ]

    def wait_until_read(self) -> None:
        """Wait until the agent has read all orders so far. It reads them one after the other."""
        marker = next(_MARKERS)
        self.order(
            "no such fault", replica=self.me[0], rank=self.me[1], attempt=self.me[2], shot=marker
        )
        deadline = time.monotonic() + DEADLINE
        while not any(event["shot"] == marker for event in self.told("fault_skipped")):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        self.agent.close()
        self.server.close()
        self.events.close()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Build workers of one run, and close them after the test."""
    workers: list[Worker] = []

    def start(**fields: Any) -> Worker:
        workers.append(Worker(tmp_path, **fields))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(start_worker: Callable[..., Worker]) -> Worker:
    return start_worker()


def bits(worker: Worker) -> dict[str, torch.Tensor]:
    """Copy the state as integers."""
    tensors = dict(worker.model.named_parameters())
    for index, state in enumerate(worker.optimizer.state.values()):
        tensors |= {f"{index}/{key}": value for key, value in state.items()}
    return {name: tensor.detach().clone().view(torch.int32) for name, tensor in tensors.items()}


def changed(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, list[int]]:
    """Return the differing bits of each tensor."""
    differences = {name: (before[name] ^ after[name]).view(-1) for name in before}
    return {name: d[d != 0].tolist() for name, d in differences.items() if d.any()}


def test_without_orders_nothing_is_touched(worker: Worker) -> None:
    """Without orders the agent adds no hook and no wrapper, and finished faults leave none
    behind.
    """
    untouched = (worker.server.send, FileSystem.create_stream)
    worker.step()
    model = worker.model
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    for fault in ("exception", "nan_gradient", "corrupt_chunk", "kill_donor", "disk_full"):
        worker.order(fault, shot=2)
    worker.wait_until_read()
    worker.agent.close()
    assert {e["fault"] for e in worker.told("fault_skipped") if e["shot"] == 2} == {
        *("exception", "nan_gradient", "corrupt_chunk", "kill_donor", "disk_full")
    }
    assert worker.server.send is untouched[0]
    assert FileSystem.create_stream is untouched[1]


def test_an_exception_strikes_once(worker: Worker) -> None:
    """An exception is reported before it is raised, and the next step succeeds."""
    worker.step()
    worker.order("exception", shot=4, seed=11)
    with pytest.raises(RuntimeError, match="fault injection"):
        worker.step_until("never")
    (event,) = worker.told("fault_injected")
    expected = {
        "fault": "exception",
        "target": {"replica": 0, "rank": 0},
        "seed": 11,
        "shot": 4,
        "params": {},
    }
    assert expected.items() <= event.items()
    assert event["step"] == worker.steps
    worker.step()


def test_out_of_memory_is_a_real_one(worker: Worker) -> None:
    """The allocator refuses it."""
    worker.order("out_of_memory")
    with pytest.raises(RuntimeError, match=r"alloc|memory"):
        worker.step_until("never")
    assert len(worker.told("fault_injected")) == 1


def test_a_deadlock_stops_the_training_thread_only(start_worker: Callable[..., Worker]) -> None:
    """A deadlock stops the training thread, and the agent continues."""
    worker = start_worker()
    worker.order("deadlock")
    training = threading.Thread(target=lambda: worker.step_until("never"), daemon=True)
    training.start()
    worker.wait("fault_injected")
    steps = worker.steps
    worker.wait_until_read()
    assert worker.steps == steps
    assert training.is_alive()


def test_a_deadlock_that_nobody_would_end_is_refused(start_worker: Callable[..., Worker]) -> None:
    """Without a watchdog."""
    worker = start_worker(hang=0.0)
    worker.order("deadlock")
    assert "hang_timeout_seconds" in worker.step_until("fault_skipped")["reason"]
    worker.step()


def test_a_nan_gradient_lasts_one_step(worker: Worker) -> None:
    """The gradients of one backward are NaN, and those of the next are not, with a validation in
    between.
    """
    worker.order("nan_gradient")
    worker.wait_until_read()
    worker.agent.at_step(1)
    with torch.no_grad():
        worker.model(torch.ones(2, 8))
    for expected in (True, False):
        worker.model(torch.ones(2, 8)).sum().backward()
        assert all(
            bool(p.grad.isnan().any()) == expected
            for p in worker.model.parameters()
            if p.grad is not None
        )
        worker.optimizer.zero_grad()
    assert len(worker.told("fault_injected")) == 1


@pytest.mark.parametrize(("fault", "bit"), [("flip_parameter", 3), ("flip_optimizer", 18)])
def test_one_bit_is_flipped(start_worker: Callable[..., Worker], fault: str, bit: int) -> None:
    """Exactly one bit of the right kind of state flips, at a place that depends on the seed
    only.
    """
    places = []
    for attempt, seed in enumerate((5, 5, 6)):
        worker = start_worker(attempt=attempt)
        worker.step()
        worker.order(fault, seed=seed, attempt=attempt)
        worker.wait_until_read()
        before = bits(worker)
        worker.agent.at_step(2)
        ((name, flipped),) = changed(before, bits(worker)).items()
        assert flipped == [1 << bit]
        assert (name in dict(worker.model.named_parameters())) == (fault == "flip_parameter")
        assert not name.endswith("step")
        event = worker.told("fault_injected")[-1]
        assert event["bit"] == bit
        places.append((name, event["element"]))
    assert places[0] == places[1] != places[2]


def test_a_flip_without_a_state_is_skipped(worker: Worker) -> None:
    """Before the first update an optimizer has none."""
    worker.order("flip_optimizer")
    worker.wait_until_read()
    worker.agent.at_step(1)
    assert (
        "nothing to flip"
        in next(e for e in worker.told("fault_skipped") if e["shot"] == 1)["reason"]
    )


def test_a_slow_rank(worker: Worker) -> None:
    """Each forward takes factor times as long, until the time is over; then no hook is left."""
    pause = nn.Module()
    pause.forward = lambda x: (time.sleep(0.05), x)[1]  # type: ignore[method-assign]
    worker.model.append(pause)
    worker.order("slow_rank", params={"factor": 4.0, "seconds": 0.5})
    worker.wait_until_read()
    worker.agent.at_step(1)
    assert worker.told("fault_injected")
    started = time.monotonic()
    worker.model(torch.ones(2, 8))
    assert time.monotonic() - started >= 4 * 0.05
    worker.step_until("fault_undone")
    assert not worker.model._forward_pre_hooks
    assert not worker.model._forward_hooks


def test_the_process_group_is_aborted_under_the_training_thread(worker: Worker) -> None:
    """The process group is aborted at once, whatever the training thread does."""
    worker.order("abort_process_group")
    assert worker.process_group.aborted.wait(DEADLINE)
    assert worker.told("fault_injected")


def test_a_corrupt_chunk_is_fetched_again(worker: Worker) -> None:
    """One chunk differs from its checksum. The joiner still gets the donor's bytes, and the donor
    keeps them.
    """
    payload = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
    header = json.dumps({"step": 3, "lineage": 8, "bytes": payload.numel()}).encode()
    worker.server.publish(Snapshot(3, 8, header, payload.clone()), 0.0)
    sent: list[bytes] = []
    send = worker.server.send
    worker.server.send = lambda connection, data: (
        sent.append(bytes(data)),
        send(connection, data),
    )[1]
    worker.order("corrupt_chunk")
    worker.wait_until_read()
    fetched = fetch([f"127.0.0.1:{worker.server.port}"], TOKEN, 3, "1", 2, DEADLINE)
    assert torch.equal(fetched.payload, payload)
    assert len(sent) == 2
    assert sum(a != b for a, b in zip(*sent, strict=True)) == 1
    assert worker.told("fault_injected")[0]["bytes"] == payload.numel()


def test_a_full_disk_fails_one_checkpoint(worker: Worker, tmp_path: Path) -> None:
    """The file writer of one checkpoint fails and the next checkpoint succeeds; events are written
    all along.
    """
    state = {"weights": torch.ones(4)}
    worker.order("disk_full")
    worker.wait_until_read()
    with pytest.raises(CheckpointException) as failed:
        dcp.save(state, checkpoint_id=tmp_path / "full", no_dist=True)
    (error, _) = failed.value.failures[0]
    assert "No space left" in str(error)
    assert len(worker.told("fault_injected")) == 1
    dcp.save(state, checkpoint_id=tmp_path / "fine", no_dist=True)


@pytest.mark.parametrize("field", ["replica", "rank", "attempt"])
def test_orders_for_others_are_not_obeyed(worker: Worker, field: str) -> None:
    """Another group's, another rank's, another attempt's."""
    worker.order("abort_process_group", **{field: 1})
    worker.wait_until_read()
    assert not worker.process_group.aborted.is_set()
    assert not worker.told("fault_injected")


@pytest.mark.parametrize("age", [LIFETIME_SECONDS + 1, 5.0])
def test_old_orders_are_not_obeyed(
    tmp_path: Path, start_worker: Callable[..., Worker], age: float
) -> None:
    """Orders from before the worker's start were for its predecessor."""
    path = tmp_path / "chaos" / "orders.jsonl"
    Order(fault="abort_process_group", replica=0, params={}, seed=1, shot=1).append_to(path)
    order = json.loads(path.read_text())
    path.write_text(json.dumps({**order, "time": time.time() - age}) + "\n")
    worker = start_worker()
    worker.wait_until_read()
    assert not worker.told("fault_injected")


@pytest.mark.parametrize("target", [{"replica": None, "rank": None}, {"replica": 0, "rank": None}])
def test_one_of_several_takes_an_order(
    start_worker: Callable[..., Worker], target: dict[str, Any]
) -> None:
    """Of several matching workers only the first one obeys an order."""
    workers = [start_worker(rank=rank) for rank in range(3)]
    workers[0].order("abort_process_group", **target)
    workers[0].wait("fault_injected")
    for worker in workers:
        worker.agent.close()
    assert len(workers[0].told("fault_injected")) == 1
    assert sum(worker.process_group.aborted.is_set() for worker in workers) == 1


def test_a_network_fault_is_the_whole_groups(start_worker: Callable[..., Worker]) -> None:
    """All ranks lose the network together and report the start and the end; the end of training
    ends the fault.
    """
    workers = [start_worker(rank=rank) for rank in range(2)]
    workers[0].order("network_slow", rank=None, params={"loss": 0.001, "seconds": 60.0})
    workers[0].wait("fault_injected", meanwhile=lambda: None)
    deadline = time.monotonic() + DEADLINE
    while len(workers[0].told("fault_injected")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for worker in workers:
        worker.agent.close()
    while len(workers[0].told("fault_undone")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_second_outage_waits_for_no_first(worker: Worker) -> None:
    """A second outage is skipped, because its filter would replace the first one's."""
    worker.order("network_slow", params={"loss": 0.001, "seconds": 60.0})
    worker.wait("fault_injected")
    worker.order("network_dead", params={"seconds": 60.0}, shot=2)
    assert "not over" in worker.wait("fault_skipped")["reason"]


def test_a_closed_agent_leaves_no_filters(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns after the last removal of filters: a later one would end the next outage in
    this process.
    """
    lift = blackhole.Blackhole.lift
    ends: list[str] = []

    def lift_late(hole: blackhole.Blackhole) -> None:
        closer.join(0.2)  # a `close` that does not wait returns within this time
        lift(hole)
        ends.append("lifted")

    def close() -> None:
        worker.agent.close()
        ends.append("closed")

    closer = threading.Thread(target=close)
    monkeypatch.setattr(blackhole.Blackhole, "lift", lift_late)
    worker.order("network_dead", params={"seconds": 600.0})
    worker.wait("fault_injected")
    closer.start()
    closer.join(DEADLINE)
    assert ends == ["lifted", "lifted", "closed"]


def falls_silent(connection: socket.socket) -> None:
    """Send until no answer comes. One look at the kernel's table may miss a connection, and the
    next finds it.
    """
    connection.settimeout(0.2)
    deadline = time.monotonic() + DEADLINE
    with contextlib.suppress(TimeoutError):
        while True:
            connection.sendall(b"x")
            connection.recv(1)
            assert time.monotonic() < deadline, "the link is not dead"


@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_a_dead_link(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing arrives from the peer, not even on a new process group's connections, until the fault
    ends.
    """
    passed = 0.0  # seconds of the fault that the test does not wait for
    monkeypatch.setattr(
        network, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed)
    )
    script = Path(__file__).with_name("member.py")
    command = [sys.executable, str(script), str(tmp_path / "chaos"), "1", "127.0.0.1"]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        print('["port"]', file=peer.stdin, flush=True)
        port = int(peer.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as old:
            worker.order("link_dead", rank=None, params={"seconds": 600.0, "peer": 1})
            assert worker.wait("fault_injected")["params"] == {"seconds": 600.0, "peer": 1}
            # The fault is announced before it strikes: a connection that is made now might come
            # before the filters.
            deadline = time.monotonic() + DEADLINE
            while "configure" not in vars(worker.process_group):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            worker.process_group.configure(port)
            new = worker.process_group.connection
            assert new is not None
            with new:
                for connection in (old, new):
                    falls_silent(connection)
                assert not worker.told("fault_undone")
                passed = 600.0
                for connection in (old, new):
                    connection.settimeout(DEADLINE)
                    assert connection.recv(1) == b"x"
        worker.wait("fault_undone")
        assert "configure" not in vars(worker.process_group)
        assert "connect" not in vars(socket.socket)
    finally:
        peer.kill()
        peer.communicate()


def test_a_link_to_nobody_is_left_alone(worker: Worker) -> None:
    """Connections to a group without an agent cannot be told from others, so its link is
    not cut.
    """
    worker.order("link_dead", rank=None, params={"seconds": 1.0, "peer": 1})
    assert worker.wait("fault_skipped")["reason"] == "no worker of group 1 has told where it is"


def test_what_has_no_occasion_is_given_up(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a donor that serves nobody is given up without a trace."""
    monkeypatch.setattr(task_module, "PATIENCE_SECONDS", 0.2)
    send = worker.server.send
    worker.order("kill_donor", replica=None, rank=None)
    assert "no occasion" in worker.wait("fault_skipped")["reason"]
    deadline = time.monotonic() + DEADLINE
    while worker.server.send is not send:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nonsense_in_the_file_is_passed_over(worker: Worker, tmp_path: Path) -> None:
    """Invalid lines are skipped, and the orders after them obeyed."""
    (tmp_path / "chaos").mkdir(exist_ok=True)
    with (tmp_path / "chaos" / "orders.jsonl").open("a") as file:
        file.write('no order\n[]\n{"fault": "segfault"}\n\n')
    worker.order("abort_process_group")
    assert worker.process_group.aborted.wait(DEADLINE)


def test_half_a_line_waits_for_its_rest(worker: Worker, tmp_path: Path) -> None:
    """A partial line, as a network file system may show it, waits for its rest."""
    path = tmp_path / "chaos" / "orders.jsonl"
    elsewhere = tmp_path / "elsewhere" / "orders.jsonl"
    Order(fault="abort_process_group", replica=0, rank=0, params={}, seed=1, shot=1).append_to(
        elsewhere
    )
    line = elsewhere.read_text()
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        time.sleep(0.2)  # several looks
        assert not worker.process_group.aborted.is_set()
        file.write(line[20:])
    assert worker.process_group.aborted.wait(DEADLINE)


def test_a_flip_is_small(worker: Worker) -> None:
    """Training stays sane: a parameter moves by no more than a millionth or so."""
    before = {name: p.detach().clone() for name, p in worker.model.named_parameters()}
    worker.order("flip_parameter")
    worker.wait_until_read()
    worker.agent.at_step(1)
    worst = max(
        float(((p.detach() - before[n]) / before[n]).abs().max())
        for n, p in worker.model.named_parameters()
    )
    assert 0 < worst <= 2e-6
    assert math.isfinite(worst)
