# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulated lighthouse and manager give torchft's own answers to the same script of calls."""

from __future__ import annotations

import os

os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is loaded

import dataclasses
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import pytest

from tests.simulation import lighthouse as model
from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network
from titan_ft.membership.pulse import LighthouseStatus

_TICK, _HEARTBEAT_TIMEOUT, _JOIN_TIMEOUT, _INTERVAL = 0.02, 0.6, 1.2, 0.05
_SECONDS = timedelta(seconds=10)
_TRIES = 3  # on a busy machine, real requests may overtake each other, or heartbeats may come late


@dataclass(frozen=True)
class Answer:
    """A rank's answer about a quorum.

    Ids count from the first one, so that both worlds begin alike.
    """

    quorum_id: int
    members: tuple[str, ...]
    max_step: int
    rank: int
    heal: bool
    source: int | None
    store: str


class Lighthouses(Protocol):
    """A world that plays a script: torchft's or the model's."""

    def join(self, name: str, ranks: int = 1) -> None:
        """Start a group's manager and its ranks' clients."""

    def leave(self, name: str) -> None:
        """Stop a group's manager in order."""

    def ask(self, name: str, step: int, failures: int = 0, rank: int = 0) -> None:
        """Let a rank request a quorum; returns at once."""

    def answer(self, name: str, rank: int = 0) -> Answer | None:
        """Wait for the answer to that request; None if none comes within two join timeouts."""

    def answered(self, name: str, rank: int = 0) -> bool:
        """Return True if the answer has come already."""

    def vote(self, name: str, votes: list[bool]) -> list[bool]:
        """Let all ranks of a group vote, one after the other; return each rank's answer."""

    def restart_lighthouse(self, seconds: float) -> None:
        """Stop the lighthouse for some seconds. Then start one without any memory."""

    def page(self) -> str:
        """Return the lighthouse's status page."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


def _to_answer(result: Any) -> Answer:
    return Answer(
        result.quorum_id,
        tuple(result.replica_ids),
        result.max_step,
        result.replica_rank,
        result.heal,
        result.recover_src_replica_rank,
        result.store_address,
    )


class RealWorld:
    """torchft's servers and clients, in real time."""

    def __init__(self, min_replicas: int) -> None:
        self._min_replicas = min_replicas
        self._lighthouse = self._start_lighthouse(0)
        self._port = int(self._lighthouse.address().rsplit(":", 1)[1])
        self._address = f"http://127.0.0.1:{self._port}"
        self._managers: dict[str, Any] = {}
        self._clients: dict[tuple[str, int], Any] = {}
        self._asked: dict[tuple[str, int], tuple[threading.Thread, list[Any]]] = {}

    def _start_lighthouse(self, port: int) -> Any:
        from torchft.coordination import LighthouseServer

        return LighthouseServer(
            bind=f"127.0.0.1:{port}",
            min_replicas=self._min_replicas,
            join_timeout_ms=int(_JOIN_TIMEOUT * 1000),
            quorum_tick_ms=int(_TICK * 1000),
            heartbeat_timeout_ms=int(_HEARTBEAT_TIMEOUT * 1000),
        )

    def restart_lighthouse(self, seconds: float) -> None:
        self._lighthouse.shutdown()
        time.sleep(seconds)
        self._lighthouse = self._start_lighthouse(self._port)

    def join(self, name: str, ranks: int = 1) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        self._managers[name] = manager = ManagerServer(
            replica_id=name,
            lighthouse_addr=self._address,
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr=f"store-{name}",
            world_size=ranks,
            heartbeat_interval=timedelta(seconds=_INTERVAL),
            connect_timeout=_SECONDS,
            quorum_retries=1000,
        )
        for rank in range(ranks):
            self._clients[name, rank] = ManagerClient(manager.address(), connect_timeout=_SECONDS)

    def leave(self, name: str) -> None:
        self._managers.pop(name).shutdown()

    def ask(self, name: str, step: int, failures: int = 0, rank: int = 0) -> None:
        client, found = self._clients[name, rank], list[Any]()

        def run() -> None:
            try:
                found.append(
                    _to_answer(
                        client._quorum(
                            group_rank=rank,
                            step=step,
                            checkpoint_metadata="",
                            shrink_only=False,
                            timeout=timedelta(seconds=30),
                            init_sync=False,
                            commit_failures=failures,
                        )
                    )
                )
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._asked[name, rank] = (thread, found)
        time.sleep(0.03)  # the order of requests is a part of the script

    def answer(self, name: str, rank: int = 0) -> Answer | None:
        thread, found = self._asked[name, rank]
        thread.join(2 * _JOIN_TIMEOUT)
        return found[0] if found else None

    def answered(self, name: str, rank: int = 0) -> bool:
        return bool(self._asked[name, rank][1])

    def vote(self, name: str, votes: list[bool]) -> list[bool]:
        told: dict[int, bool] = {}

        def run(rank: int) -> None:
            told[rank] = self._clients[name, rank].should_commit(rank, 1, votes[rank], _SECONDS)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(votes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [told[rank] for rank in range(len(votes))]

    def page(self) -> str:
        with urllib.request.urlopen(
            f"{self._address}/status", timeout=_SECONDS.total_seconds()
        ) as answer:
            return str(answer.read().decode())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for manager in self._managers.values():
            manager.shutdown()
        self._lighthouse.shutdown()


class ModelWorld:
    """The model's servers and clients, in virtual time. The script is a task of its own."""

    def __init__(self, kernel: Kernel, min_replicas: int) -> None:
        self._kernel, self._network = kernel, Network(kernel, 0.0003)
        self._lighthouse = model.Lighthouse(
            kernel,
            min_replicas=min_replicas,
            join_timeout=_JOIN_TIMEOUT,
            tick=_TICK,
            heartbeat_timeout=_HEARTBEAT_TIMEOUT,
        )
        self._managers: dict[str, model.ManagerServer] = {}
        self._clients: dict[tuple[str, int], model.ManagerClient] = {}
        self._asked: dict[tuple[str, int], tuple[Any, list[Any]]] = {}

    def join(self, name: str, ranks: int = 1) -> None:
        node = (len(self._managers), 0)
        self._managers[name] = manager = model.ManagerServer(
            self._kernel,
            self._network,
            self._lighthouse,
            Process(self._kernel, name),
            node,
            address=f"http://{name}",
            replica_id=name,
            store_addr=f"store-{name}",
            world_size=ranks,
            heartbeat_interval=timedelta(seconds=_INTERVAL),
            quorum_retries=1000,
        )
        for rank in range(ranks):
            self._clients[name, rank] = model.ManagerClient((node[0], rank), manager)

    def leave(self, name: str) -> None:
        self._managers.pop(name).shutdown()

    def ask(self, name: str, step: int, failures: int = 0, rank: int = 0) -> None:
        found: list[Any] = []

        def run() -> None:
            seconds = timedelta(seconds=30)
            result = self._clients[name, rank]._quorum(
                rank, step, "", False, seconds, failures, init_sync=False
            )
            found.append(_to_answer(result))

        task = self._kernel.spawn(run, "ask")
        self._asked[name, rank] = (task, found)
        self._kernel.sleep(0.03)

    def answer(self, name: str, rank: int = 0) -> Answer | None:
        task, found = self._asked[name, rank]
        end = self._kernel.now + 2 * _JOIN_TIMEOUT
        while not task.done and self._kernel.now < end:
            self._kernel.sleep(0.01)
        return found[0] if found else None

    def answered(self, name: str, rank: int = 0) -> bool:
        return bool(self._asked[name, rank][1])

    def vote(self, name: str, votes: list[bool]) -> list[bool]:
        told: dict[int, bool] = {}

        def run(rank: int) -> None:
            told[rank] = self._clients[name, rank].should_commit(rank, 1, votes[rank], _SECONDS)

        tasks = [self._kernel.spawn(partial(run, rank), "vote") for rank in range(len(votes))]
        while not all(task.done for task in tasks):
            self._kernel.sleep(0.01)
        return [told[rank] for rank in range(len(votes))]

    def restart_lighthouse(self, seconds: float) -> None:
        self._lighthouse.die()
        self._kernel.sleep(seconds)
        self._lighthouse.start()

    def page(self) -> str:
        return self._lighthouse.status()

    def sleep(self, seconds: float) -> None:
        self._kernel.sleep(seconds)


Script = Callable[[Lighthouses], Iterator[Any]]


def _rounds(
    world: Lighthouses, names: str, steps: list[int], failures: list[int] | None = None
) -> list[Answer | None]:
    """Let groups request a quorum, and collect their answers."""
    for place, name in enumerate(names):
        world.ask(name, steps[place], failures[place] if failures else 0)
    return [world.answer(name) for name in names]


def all_ask(world: Lighthouses) -> Iterator[Any]:
    """Groups that all ask form a quorum.

    The same groups keep its id. A failed commit renews the id.
    """
    for name in "abc":
        world.join(name)
    world.sleep(0.2)
    yield _rounds(world, "abc", [0, 0, 0])
    yield _rounds(world, "bca", [1, 1, 1])
    yield _rounds(world, "abc", [2, 1, 2])
    yield _rounds(world, "abc", [2, 2, 2], [0, 1, 0])
    yield _rounds(world, "abc", [3, 3, 3])


def newcomer(world: Lighthouses) -> Iterator[Any]:
    """Members of the last quorum do not wait for a newcomer.

    A newcomer that asked first joins, and the id changes.
    """
    world.join("a")
    world.join("b")
    world.sleep(0.2)
    yield _rounds(world, "ab", [1, 1])
    world.join("c")
    world.sleep(0.2)
    yield _rounds(world, "ab", [2, 2])
    world.ask("c", 0)
    yield world.answered("c")
    yield _rounds(world, "ab", [3, 3])
    yield world.answer("c")


def gone(world: Lighthouses) -> Iterator[Any]:
    """The others wait for a group that has left until its heartbeats are too old."""
    for name in "abc":
        world.join(name)
    world.sleep(0.2)
    yield _rounds(world, "abc", [1, 1, 1])
    world.leave("c")
    world.ask("a", 2)
    world.ask("b", 2)
    yield world.answered("a"), world.answered("b")
    yield world.answer("a"), world.answer("b")


def half(world: Lighthouses) -> Iterator[Any]:
    """One of two live groups forms no quorum, however long it waits.

    It forms one when the other's heartbeats end.
    """
    world.join("a")
    world.join("b")
    world.sleep(0.2)
    yield _rounds(world, "ab", [1, 1])
    world.ask("a", 2)
    yield world.answer("a")
    world.leave("b")
    yield world.answer("a")


def join_timeout(world: Lighthouses) -> Iterator[Any]:
    """Two of three live groups wait for the third one for the join timeout only.

    Then the third one is alone.
    """
    for name in "abc":
        world.join(name)
    world.sleep(0.2)
    yield _rounds(world, "abc", [1, 1, 1])
    world.ask("a", 2)
    world.ask("b", 2)
    world.sleep(_JOIN_TIMEOUT / 2)
    yield world.answered("a"), world.answered("b")
    yield world.answer("a"), world.answer("b")
    world.ask("c", 1)
    yield world.answered("c")
    yield _rounds(world, "ab", [3, 3])
    yield world.answer("c")


def seat_renewed(world: Lighthouses) -> Iterator[Any]:
    """A group stops its manager, and starts another one under another name."""
    world.join("a")
    world.join("b")
    world.sleep(0.2)
    yield _rounds(world, "ab", [1, 1])
    world.leave("b")
    world.join("b2")
    world.sleep(0.1)
    world.ask("a", 2)
    world.ask("b2", 2)
    yield world.answer("a"), world.answer("b2")


def ranks(world: Lighthouses) -> Iterator[Any]:
    """All ranks of a group must ask, and the last rank's step counts.

    Votes are unanimous and independent.
    """
    world.join("a", ranks=2)
    world.join("b", ranks=1)
    world.sleep(0.2)
    yield world.vote("a", [True, True])  # both ranks are connected now
    world.ask("b", 4)
    world.ask("a", 3, rank=1)
    yield world.answered("b"), world.answered("a", 1)
    world.ask("a", 5, rank=0)
    yield world.answer("a", 0), world.answer("a", 1), world.answer("b")
    yield world.vote("a", [True, True])
    yield world.vote("a", [True, False])
    yield world.vote("a", [False, False])
    yield world.vote("a", [True, True])


def status_page(world: Lighthouses) -> Iterator[Any]:
    """The page shows every manager since the start, the last quorum, and the number of requests."""

    def look() -> tuple[list[str], tuple[str, ...], int]:
        status = LighthouseStatus.parse(world.page())
        assert all(0 <= seconds < 2 * _HEARTBEAT_TIMEOUT for seconds in status.heartbeats.values())
        return sorted(status.heartbeats), status.quorum, status.num_asking

    yield look()
    for name in "ab":
        world.join(name)
    world.sleep(0.2)
    yield look()
    yield _rounds(world, "ba", [1, 1]), look()
    world.join("c")
    world.sleep(0.2)
    world.ask("c", 0)
    world.sleep(0.2)
    yield look()
    world.leave("a")
    world.ask("b", 2)
    yield world.answer("b"), world.answer("c"), look()


def restarted(world: Lighthouses) -> Iterator[Any]:
    """A restarted lighthouse knows no quorum, counts from the start, and answers new requests."""
    for name in "abc":
        world.join(name)
    world.sleep(0.2)
    yield _rounds(world, "abc", [1, 1, 1])
    yield _rounds(world, "abc", [2, 2, 2], [0, 1, 0])
    world.restart_lighthouse(0.5)
    world.sleep(2 * _JOIN_TIMEOUT)  # all managers have found it again
    yield _rounds(world, "abc", [3, 3, 3])
    yield _rounds(world, "abc", [4, 4, 4], [0, 0, 1])


SCRIPTS = [all_ask, newcomer, gone, half, join_timeout, seat_renewed, ranks, status_page, restarted]


def _play_model(script: Script, min_replicas: int) -> list[Any]:
    kernel = Kernel(1)
    found: list[Any] = []

    def play() -> None:
        found.extend(script(ModelWorld(kernel, min_replicas)))
        kernel.stop()

    try:
        kernel.spawn(play, "script", Process(kernel, "script"))
        kernel.run(until=600.0)
    finally:
        kernel.close()
    assert not kernel.crashes, kernel.crashes
    return found


def _plain(answers: list[Any]) -> list[Any]:
    """Return answers with ids counted from the first one."""
    flat = [answer for answer in _flatten(answers) if isinstance(answer, Answer)]
    first = flat[0].quorum_id if flat else 0

    def plain(value: Any) -> Any:
        if isinstance(value, Answer):
            return dataclasses.replace(value, quorum_id=value.quorum_id - first)
        return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value

    return [plain(answer) for answer in answers]


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


@pytest.mark.parametrize("min_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_model_answers_as_torchft_does(script: Script, min_replicas: int) -> None:
    """The answers are equal: members, ids, the largest step, healing groups, the vote."""
    expected = _plain(_play_model(script, min_replicas))
    for number in range(_TRIES):
        world = RealWorld(min_replicas)
        try:
            real = _plain(list(script(world)))
        finally:
            world.close()
        if real == expected or number == _TRIES - 1:
            assert expected == real
            return


def test_a_manager_waits_for_its_lighthouse() -> None:
    """torchft's manager tries again within its timeout, and so does `World.manager_server`."""
    from torchft.coordination import LighthouseServer, ManagerServer

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started: list[LighthouseServer] = []
    later = threading.Timer(
        0.5, lambda: started.append(LighthouseServer(bind=address, min_replicas=1))
    )
    later.start()
    began = time.monotonic()
    manager = ManagerServer(
        replica_id="a",
        lighthouse_addr=f"http://{address}",
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="store-a",
        world_size=1,
        heartbeat_interval=timedelta(seconds=_INTERVAL),
        connect_timeout=_SECONDS,
        quorum_retries=0,
    )
    assert time.monotonic() - began < _SECONDS.total_seconds()
    later.join()
    manager.shutdown()
    started[0].shutdown()
