# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""NCCL between the groups when a peer is lost: on a stand-in for torch, and with two GPUs on NCCL.

This file is also the program of the ranks on GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.distributed_c10d import AllreduceOptions

from benchmarks.member_facts import exchange_with
from titan_ft import device
from titan_ft.gradients import operations
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.gradients.flight import ExchangeError
from titan_ft.membership.process_group import AbortableNccl, build_process_group
from titan_ft.membership.rendezvous import Rendezvous
from titan_ft.protocol.errors import LighthouseError
from titan_ft.protocol.member import Member, Quorum

DEADLINE = 20.0  # seconds; only a bug reaches it
TIMEOUT = timedelta(seconds=90)  # timeout of operations, well above the deadline


# exchanges of the running test: they are watched until they are aborted
OPEN: list[AbortableNccl] = []


class Communicator:
    """One of torch's communicators. If a peer is lost, its sums do not end by themselves.

    Attributes:
        lost: a peer is lost. Present and later operations wait for an abort, and leave garbage.
        stuck: an abort waits for this event, as for a lock of torch.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lost = False
        self.error = ErrorType.SUCCESS
        self.aborted, self.stuck, self.waiting = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.stuck.set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Communicator:
        self.tensor = tensors[0]
        return self

    def wait(self, timeout: Any = None) -> bool:
        if self.lost:
            self.waiting.set()
            assert self.aborted.wait(DEADLINE), "no thread has aborted"
            self.tensor.fill_(7)
        else:
            self.tensor.mul_(self.world_size)
        return True

    def abort(self) -> None:
        assert self.stuck.wait(DEADLINE)
        self.aborted.set()

    def _get_backend(self, _: torch.device) -> Communicator:
        return self

    def get_error(self) -> ErrorType:
        return self.error

    def is_completed(self) -> bool:
        return not self.lost

    def _wait_for_pending_works(self) -> None:
        """Wait for torch's watchdog, which this stand-in lacks."""


class Nccl(AbortableNccl):
    """The process group under test, over stand-ins.

    All peers of a new one are there unless `prepare` changes that.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        super().__init__(timeout)
        self.made: list[Communicator] = []
        OPEN.append(self)
        self.prepare: Callable[[Communicator], None] = lambda _: None

    @staticmethod
    def _connect_pg(pg: Any) -> None:
        """Connect at once."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        made = Communicator(world_size)
        self.made.append(made)
        self.prepare(made)
        return made


class Seat:
    """Stands in for a Membership of three groups.

    Attributes:
        there: set when the quorum is ready.
        asked: released by each thread that waits for the quorum.
        error: the reason if there is no quorum.
    """

    def __init__(self, nccl: AbortableNccl, timeout: timedelta = TIMEOUT) -> None:
        self.process_group, self.timeout = nccl, timeout
        self.there, self.asked = threading.Event(), threading.Semaphore(0)
        self.there.set()
        self.error: Exception | None = None

    def await_quorum(self) -> Quorum:
        self.asked.release()
        assert self.there.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        return Quorum(
            "key", 0, tuple(Member(slot, 1.0, f"u{slot}", "c") for slot in range(3)), max_step=0
        )

    def watch_exchange(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def abort(self) -> None:
        self.process_group.abort()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu_path: None) -> None:
    """Take a GPU's path through the exchange. Only its threads matter here."""
    monkeypatch.setattr(device, "side_stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(device, "record_event", lambda *_: None)


def build_exchange(seat: Seat) -> GradientExchange:
    """Build the exchange of one parameter.

    Its bucket is on a device whose tensors have no bytes.
    """
    where = torch.device("meta")
    parameter = torch.nn.Parameter(torch.ones(3, device=where))
    return GradientExchange([parameter], seat, bucket_bytes=100, where=where, overlap=False)  # type: ignore[arg-type]


def lose(communicator: Communicator) -> None:
    communicator.lost = True


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # as torchtitan leaves the gradient
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 0))
        monkeypatch.setattr(device, "exchange_device", lambda _: torch.device("cpu"))
    yield
    while OPEN:
        OPEN.pop().abort()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def configure(
    nccl: AbortableNccl, store: TCPStore, name: str, seconds: float = 2.0, world_size: int = 3
) -> None:
    """Build a communicator as `Rendezvous.configure` does."""
    nccl.set_timeout(timedelta(seconds=seconds))
    try:
        nccl.configure(f"127.0.0.1:{store.port}/{name}", 0, world_size, 1, 0, 1, [])
    finally:
        nccl.set_timeout(TIMEOUT)


def exchange(nccl: Nccl) -> threading.Thread:
    """Start a sum that waits for a lost peer. Its thread ends with the sum."""
    nccl.made[-1].lost = True
    thread = threading.Thread(
        target=lambda: nccl.made[-1].allreduce([torch.ones(1)], None).wait(), daemon=True
    )
    thread.start()
    assert nccl.made[-1].waiting.wait(DEADLINE)
    return thread


def test_a_set_up_that_hangs_before_the_first_sum_is_left_to_itself(store: TCPStore) -> None:
    """The limit covers the whole set-up. A late communicator is aborted, and changes nothing."""
    nccl, hung, goes_on = Nccl(), threading.Event(), threading.Event()

    def hang(made: Communicator) -> None:
        hung.set()
        assert goes_on.wait(DEADLINE)

    nccl.prepare = hang
    with pytest.raises(TimeoutError, match=r"NCCL has not connected the members within 0.2 s"):
        configure(nccl, store, "a", seconds=0.2)
    assert hung.is_set()
    assert nccl.errored() is not None
    nccl.prepare = lambda _: None
    configure(nccl, store, "b")
    goes_on.set()
    assert nccl.made[0].aborted.wait(DEADLINE), "no thread aborts the late communicator"
    nccl.allreduce([torch.ones(1)], AllreduceOptions()).wait()
    assert nccl.made[1].tensor.tolist() == [3.0], "another communicator is in use"
    assert not nccl.made[1].aborted.is_set()


def test_a_set_up_that_hung_does_not_make_a_broken_sum_sound(store: TCPStore) -> None:
    """A thread that comes too late does not change the error of the communicator in use.

    That one was broken off.
    """
    nccl, goes_on = Nccl(), threading.Event()
    nccl.prepare = lambda _: goes_on.wait(DEADLINE)  # type: ignore[assignment, return-value]
    with pytest.raises(TimeoutError):
        configure(nccl, store, "a", seconds=0.1)
    nccl.prepare = lambda _: None
    configure(nccl, store, "b")
    nccl.abort()
    goes_on.set()
    assert nccl.made[0].aborted.wait(DEADLINE)
    assert nccl.errored() is not None


def test_a_set_up_that_comes_too_late_connects_nobody(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store answers late, no communicator is made: the others wait in another one."""
    nccl, goes_on, threads = Nccl(), threading.Event(), list[threading.Thread]()

    def answer_late(*_: Any, **__: Any) -> TCPStore:
        threads.append(threading.current_thread())
        assert goes_on.wait(DEADLINE)
        return store

    monkeypatch.setattr(nccl, "_connect_to_store", answer_late)
    with pytest.raises(TimeoutError):
        configure(nccl, store, "a", seconds=0.1)
    goes_on.set()
    threads[0].join(DEADLINE)
    assert not threads[0].is_alive()
    assert nccl.made == []


def test_a_set_up_that_is_aborted_is_over(store: TCPStore) -> None:
    """Even before there is a communicator, for example if the group leaves meanwhile."""
    nccl = Nccl()
    nccl.prepare = lambda _: nccl.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        configure(nccl, store, "a")
    assert nccl.made[0].aborted.is_set()
    assert nccl.errored() is not None
    nccl.prepare = lambda _: None
    configure(nccl, store, "b")
    assert nccl.errored() is None


def test_a_communicator_is_made_on_the_device_of_the_thread_that_asks(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread makes the communicator, and a new thread starts on the first device."""
    asked, on_device, made_on = (list[threading.Thread]() for _ in range(3))

    def thread_initializer() -> Callable[[], None]:
        asked.append(threading.current_thread())
        return lambda: on_device.append(threading.current_thread())

    monkeypatch.setattr(device, "thread_initializer", thread_initializer)
    nccl = Nccl()
    nccl.prepare = lambda _: made_on.append(threading.current_thread())
    configure(nccl, store, "a")
    assert asked == [threading.current_thread()]
    assert on_device == made_on != asked


def test_garbage_of_an_aborted_set_up_is_no_connection(store: TCPStore) -> None:
    """An abort by another thread ends the set-up with an error, whatever the sum is."""
    nccl = Nccl()

    def abort(made: Communicator) -> None:
        made.lost = True
        threading.Thread(
            target=lambda: made.waiting.wait(DEADLINE) and nccl.abort(), daemon=True
        ).start()

    nccl.prepare = abort
    with pytest.raises(RuntimeError, match="aborted"):
        configure(nccl, store, "a")
    with pytest.raises(RuntimeError, match="aborted"):  # even if the sum happens to be right
        configure(nccl, store, "b", world_size=7)


def test_a_lost_member_that_nccl_notices_ends_the_exchange(store: TCPStore) -> None:
    """NCCL only records an error. The sum ends, and the error is set before."""
    nccl = Nccl()
    configure(nccl, store, "a")
    waiting = exchange(nccl)
    assert nccl.errored() is None
    nccl.made[0].error = ErrorType.COMM_ERROR
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert "lost a member" in str(nccl.errored())
    configure(nccl, store, "b")
    assert nccl.errored() is None


def test_an_error_of_a_former_communicator_ends_only_that(store: TCPStore) -> None:
    """The current communicator goes on.

    The error may have been set while torch was asked for it.
    """
    nccl = Nccl()
    asked, replaced, told = threading.Event(), threading.Event(), threading.Event()

    class Late(Communicator):
        def get_error(self) -> ErrorType:
            asked.set()
            assert replaced.wait(DEADLINE)
            told.set()
            return ErrorType.COMM_ERROR

    before = set(threading.enumerate())
    configure(nccl, store, "a")
    (watch,) = (
        each for each in set(threading.enumerate()) - before if each.name == "titan_ft_nccl_watch"
    )
    nccl.made[0].__class__ = Late
    assert asked.wait(DEADLINE)
    configure(nccl, store, "b")
    replaced.set()
    assert told.wait(DEADLINE)
    watch.join(DEADLINE)
    assert nccl.errored() is None
    assert not nccl.made[1].aborted.is_set()


def test_who_learns_of_a_dead_member_ends_its_own_exchange(store: TCPStore, trees: Any) -> None:
    """`Membership` calls this when heartbeats end.

    The exchange of that quorum breaks off, and the next one works.
    """
    nccl = Nccl()
    own = Member(0, 1.0, "own", "c", "j", f"127.0.0.1:{store.port}")
    rendezvous = Rendezvous(
        nccl,
        TIMEOUT,
        control=trees.connect(),
        group_rank=0,
        group_world_size=1,
        address="127.0.0.1:1",
    )
    assert rendezvous.configure("first", 1, (own,), own, 0) is None
    waiting = exchange(nccl)
    rendezvous.abort("another quorum")
    assert nccl.errored() is None
    rendezvous.abort(rendezvous.prefix)
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert nccl.errored() is not None
    assert rendezvous.configure("second", 2, (own,), own, 0) is None
    assert nccl.errored() is None


def test_what_takes_too_long_is_broken_off(store: TCPStore) -> None:
    """No member has noticed the loss. A new communicator has the whole time again."""
    nccl = Nccl()
    configure(nccl, store, "a")
    with nccl.deadline(timedelta(seconds=0.2)):
        waiting = exchange(nccl)
        waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert str(nccl.errored()) == "the exchange is not complete after 0.2 s"
    configure(nccl, store, "b")
    assert nccl.errored() is None


def test_what_is_over_in_time_is_not_broken_off_later(store: TCPStore) -> None:
    """So it is after a failed exchange: by then the communicator may be another one."""
    nccl, looks = Nccl(), threading.Semaphore(0)

    class Watched(Communicator):
        def get_error(self) -> ErrorType:
            looks.release()
            return ErrorType.SUCCESS

    configure(nccl, store, "a")
    with contextlib.suppress(ExchangeError), nccl.deadline(timedelta(seconds=0.1)):
        raise ExchangeError
    time.sleep(0.1)
    nccl.made[0].__class__ = Watched
    for _ in range(2):
        assert looks.acquire(timeout=DEADLINE), "no thread watches it any more"
    assert nccl.errored() is None


def test_a_thread_that_was_left_launches_nothing_in_the_next_quorum(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, on_a_gpu: None
) -> None:
    """The thread goes on only when the next communicator is in place."""
    at_launch, goes_on = threading.Event(), threading.Event()
    threads, begin = list[threading.Thread](), operations.all_reduce

    def begin_late(group: Any, tensor: torch.Tensor, timeout: timedelta) -> Any:
        threads.append(threading.current_thread())
        at_launch.set()
        assert goes_on.wait(DEADLINE)
        return begin(group, tensor, timeout)

    nccl = Nccl()
    configure(nccl, store, "a")
    monkeypatch.setattr(operations, "all_reduce", begin_late)
    own = build_exchange(Seat(nccl))
    threading.Thread(target=lambda: at_launch.wait(DEADLINE) and nccl.abort(), daemon=True).start()
    with pytest.raises(ExchangeError, match="still being launched"):
        exchange_with(own, lambda quorum: ([0.0], b""))
    configure(nccl, store, "b")
    of_set_up = nccl.made[1].tensor
    goes_on.set()
    threads[0].join(DEADLINE)
    assert not threads[0].is_alive()
    assert nccl.made[1].tensor is of_set_up, "the thread launched on another communicator"


def test_the_time_of_an_exchange_begins_with_its_quorum(on_a_gpu: None) -> None:
    """A quorum may wait for computing groups for longer than an exchange may take."""
    begun: list[timedelta] = []

    class Noted(Nccl):
        def deadline(self, timeout: timedelta) -> contextlib.AbstractContextManager[None]:
            begun.append(timeout)
            return contextlib.nullcontext()

    seat = Seat(Noted())
    seat.there.clear()
    seat.error = LighthouseError("no quorum")
    exchange, errors = build_exchange(seat), list[Exception]()

    def finish() -> None:
        try:
            exchange_with(exchange, lambda quorum: ([1.0], b""))
        except LighthouseError as error:
            errors.append(error)

    training = threading.Thread(target=finish, daemon=True)
    training.start()
    for _ in range(2):  # the exchange's thread, and this one
        assert seat.asked.acquire(timeout=DEADLINE)
    assert begun == []
    seat.there.set()
    training.join(DEADLINE)
    assert begun == [TIMEOUT]
    assert errors == [seat.error]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("when", ["in a sum", "in the set-up"])
def test_a_peer_is_killed(when: str) -> None:
    """After SIGKILL of a peer, the survivor breaks off, and sums with a communicator of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = [sys.executable, __file__, str(store.port), when]
    environment = {**os.environ, **device.nccl_environment({}, int(TIMEOUT.total_seconds() * 1000))}
    ranks = [
        subprocess.Popen([*program, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        store.wait(["survivor", "victim"], timedelta(seconds=120))
        if when == "in a sum":
            time.sleep(1.0)  # the survivor's kernel is on its GPU by then, and waits
        ranks[1].send_signal(signal.SIGKILL)
        store.set("killed", "1")
        output, _ = ranks[0].communicate(timeout=120)
        assert (ranks[0].returncode, output.split()[-1:]) == (0, ["lives"]), output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_rank(port: int, when: str, rank: int) -> None:
    """Act as the rank on the GPU of its number. Rank 1 is killed."""
    torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    nccl = build_process_group("nccl", TIMEOUT)
    ones = torch.ones(1 << 20, device="cuda")
    if when == "in the set-up":
        store.set("victim" if rank else "survivor", "1")
        if rank:
            signal.pause()  # the killed rank never comes
        store.wait(["killed"])
        began = time.monotonic()
        try:
            configure(nccl, store, "both", world_size=2)
        except Exception as error:  # noqa: BLE001  # NCCL and torch have many kinds
            print(f"set-up: {error}", flush=True)
        else:
            raise AssertionError("a communicator without its peer")
        assert time.monotonic() - began < DEADLINE
    else:
        nccl.set_timeout(timedelta(seconds=60))
        nccl.configure(f"127.0.0.1:{port}/both", rank, 2, 1, 0, 1, [])
        with device.side_stream(ones.device):
            nccl.allreduce([ones], AllreduceOptions()).wait()
            assert ones.sum().item() == 2 * ones.numel()
            assert nccl.errored() is None
        store.set("victim" if rank else "survivor", "1")
        if rank:
            signal.pause()  # the survivor is alone in the next quorum
        # A pulse does this when the heartbeats end. NCCL may notice first.
        threading.Thread(
            target=lambda: (store.wait(["killed"]), time.sleep(2), nccl.abort()), daemon=True
        ).start()
        with device.side_stream(ones.device):
            nccl.allreduce([ones], AllreduceOptions()).wait()
            ones.sum().item()
        assert nccl.errored() is not None
    nccl.set_timeout(timedelta(seconds=60))
    nccl.configure(f"127.0.0.1:{port}/alone", 0, 1, 2, 0, 1, [])
    with device.side_stream(ones.device):
        again = torch.ones(1 << 20, device="cuda")
        nccl.allreduce([again], AllreduceOptions()).wait()
        assert again.sum().item() == again.numel()
    assert nccl.errored() is None
    print("lives", flush=True)
    os._exit(0)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
