# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Stand-ins for the real world's time, threads and sockets, and their installation in the engine.

Modules are not listed one by one. Every reference to the standard library's `time`, `threading`,
`queue` and so on in a loaded module of `PACKAGES` is replaced. So a new module of a package is
covered. A stand-in raises on any attribute that it does not know, so nothing uses real time by
accident. `real_names` finds a package that `PACKAGES` lacks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import functools
import logging
import os
import pathlib
import queue
import signal
import socket
import sys
import threading
import time
import urllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torchft.coordination

from tests.simulation import kernel as kernels
from tests.simulation.kernel import Kernel, Killed, NotSimulatedError, Process, Task
from titan_ft import device

PACKAGES = (
    "titan_ft.protocol",
    "titan_ft.transfer",
    "titan_ft.membership",
    "titan_ft.gradients",
    "titan_ft.engine",
    "titan_ft.run",
    "titan_ft.system",
    "titan_ft.training.checkpoint.choice",
    "titan_ft.training.checkpoint.folder",
)
"""The engine's packages and modules."""


class Module:
    """Stand-in for a module.

    It has the given attributes, lacks the `absent` ones, and raises on any other.
    """

    def __init__(self, name: str, absent: Collection[str] = (), **members: Any) -> None:
        self.__dict__.update(members)
        self.__dict__["_module"], self.__dict__["_absent"] = name, absent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dict__["_absent"]:
            raise AttributeError(name)
        raise kernels.missing(f"{self.__dict__['_module']}.{name}")


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise kernels.missing(name)

    return refuse


# time


def _monotonic() -> float:
    kernel = kernels.current()
    kernel.pause()
    process = kernel.current.process
    return kernel.now * process.rate + process.clock


def _wall() -> float:
    kernel = kernels.current()
    kernel.pause()
    return 1.7e9 + kernel.now + kernel.process.wall


def _sleep(seconds: float) -> None:
    kernel = kernels.current()
    kernel.pause()
    kernel.sleep(seconds)


TIME = Module("time", monotonic=_monotonic, perf_counter=_monotonic, time=_wall, sleep=_sleep)


# threading


class Lock:
    """Stands in for threading.Lock and RLock. Correct code works with either."""

    def __init__(self) -> None:
        self._kernel = kernels.current()
        self._owner: Task | None = None
        self._depth = 0
        self._entry: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self._kernel
        kernel.pause()
        me = kernel.current
        if self._owner is not None and self._owner is not me:
            if not blocking:
                return False
            end = None if timeout < 0 else kernel.now + timeout
            while self._owner is not None:
                if end is not None and kernel.now >= end:
                    return False
                self._entry.append(me)
                kernel.block(None if end is None else end - kernel.now)
                if me in self._entry:
                    self._entry.remove(me)
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            for task in self._entry:
                self._kernel.wake(task)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Stands in for threading.Condition."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._kernel = kernels.current()
        self._lock = lock or Lock()
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel, lock = self._kernel, self._lock
        if lock._owner is not kernel.current:
            raise RuntimeError("cannot wait on an un-acquired lock")
        depth, lock._depth = lock._depth, 1
        lock.release()
        me = kernel.current
        self._waiting.append(me)
        kernel.block(timeout)
        told = me not in self._waiting
        if not told:
            self._waiting.remove(me)
        lock.acquire()
        lock._depth = depth
        return told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._kernel.now + timeout
        while not (value := predicate()):
            rest = None if end is None else end - self._kernel.now
            if rest is not None and rest <= 0:
                break
            self.wait(rest)
        return value

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._kernel.wake(task)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """Stands in for threading.Event.

    `on_set` has functions of the world that are called when the event is set.
    """

    def __init__(self) -> None:
        self._kernel = kernels.current()
        self._set = False
        self._waiting: list[Task] = []
        self.on_set: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        self._kernel.pause()
        return self._set

    def set(self) -> None:
        self._kernel.pause()
        self._set = True
        for task in self._waiting:
            self._kernel.wake(task)
        for act in self.on_set:
            act()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = self._kernel
        kernel.pause()
        end = None if timeout is None else kernel.now + timeout
        while not self._set and (end is None or kernel.now < end):
            self._waiting.append(kernel.current)
            kernel.block(None if end is None else end - kernel.now)
            self._waiting.remove(kernel.current)
        return self._set


class Thread:
    """Stands in for threading.Thread."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._run = (
            functools.partial(target, *args, **(kwargs or {}))
            if target is not None
            else lambda: None
        )
        self.name, self.daemon = name or "thread", daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = kernels.current().spawn(self._run, self.name)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None, "a thread is started before it is joined"
        _join(task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


def _join(task: Task, timeout: float | None = None) -> None:
    kernel = kernels.current()
    kernel.pause()
    end = None if timeout is None else kernel.now + timeout
    while not task.done and (end is None or kernel.now < end):
        task.joiners.append(kernel.current)
        kernel.block(None if end is None else end - kernel.now)


THREADING = Module(
    "threading",
    Condition=Condition,
    Event=Event,
    Lock=Lock,
    RLock=Lock,
    Thread=Thread,
    get_ident=lambda: id(kernels.current().current),
)


# queue


class SimpleQueue:
    """Stands in for queue.SimpleQueue, and for an unbounded Queue."""

    @classmethod
    def __class_getitem__(cls, item: Any) -> type[SimpleQueue]:
        return cls

    def __init__(self) -> None:
        self._kernel = kernels.current()
        self._items: list[Any] = []
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._kernel.wake(self._waiting.pop(0))
        self._kernel.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        kernel = self._kernel
        kernel.pause()
        end = None if timeout is None else kernel.now + timeout
        while not self._items:
            if not block or (end is not None and kernel.now >= end):
                raise queue.Empty
            me = kernel.current
            self._waiting.append(me)
            kernel.block(None if end is None else end - kernel.now)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._items.pop(0)

    def empty(self) -> bool:
        self._kernel.pause()
        return not self._items


QUEUE = Module("queue", SimpleQueue=SimpleQueue, Queue=SimpleQueue, Empty=queue.Empty)


# concurrent.futures


class Future:
    """Stands in for concurrent.futures.Future, as far as the engine uses it."""

    @classmethod
    def __class_getitem__(cls, item: Any) -> type[Future]:
        return cls

    def __init__(self) -> None:
        self._kernel = kernels.current()
        self._done = self._cancelled = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Task] = []
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        self._kernel.pause()
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if not self._done:
            self._cancelled = True
            self._settle(None, concurrent.futures.CancelledError())
        return self._cancelled

    def set_result(self, value: Any) -> None:
        self._settle(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._settle(None, error)

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        kernel = self._kernel
        kernel.pause()
        end = None if timeout is None else kernel.now + timeout
        while not self._done:
            if end is not None and kernel.now >= end:
                raise TimeoutError
            self._waiting.append(kernel.current)
            kernel.block(None if end is None else end - kernel.now)
            if not self._done:
                self._waiting.remove(kernel.current)
        return self._error

    def add_done_callback(self, act: Callable[[Any], object]) -> None:
        if self._done:
            act(self)
        else:
            self._callbacks.append(act)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._done:
            return
        self._value, self._error, self._done = value, error, True
        for task in self._waiting:
            self._kernel.wake(task)
        self._waiting.clear()
        for act in self._callbacks:
            act(self)


class ThreadPoolExecutor:
    """Stands in for concurrent.futures.ThreadPoolExecutor."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._kernel = kernels.current()
        self._max_workers, self._name = max_workers or 4, thread_name_prefix or "pool"
        self._workers = 0
        self._work: list[tuple[Future, Callable[[], Any]]] = []
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._work.append((future, functools.partial(fn, *args, **kwargs)))
        if self._workers < self._max_workers:
            self._workers += 1
            self._kernel.spawn(self._run, self._name)
        self._kernel.pause()
        return future

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(fn, *args) for args in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            for future, _ in self._work:
                future.cancel()
            self._work.clear()
        while wait and self._workers:
            self._kernel.sleep(0.001)

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while self._work:
            future, work = self._work.pop(0)
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  # the future carries it
                future.set_exception(error)
        self._workers -= 1


FUTURES = Module(
    "concurrent.futures",
    Future=Future,
    ThreadPoolExecutor=ThreadPoolExecutor,
    CancelledError=concurrent.futures.CancelledError,
    TimeoutError=TimeoutError,
)


# os and the like, as other simulated processes see them


class World:
    """The part of the simulated world that stand-ins call; see `tests.simulation.world.World`."""

    processes: dict[int, Process]

    def connect_store(self, host: str, port: int, timeout: float) -> Any:
        raise NotImplementedError

    def prefix_store(self, prefix: str, store: Any) -> Any:
        raise NotImplementedError

    def manager_server(self, **options: Any) -> Any:
        raise NotImplementedError

    def manager_client(self, address: str) -> Any:
        raise NotImplementedError

    def connect(self, host: str, port: int, timeout: float) -> None:
        raise NotImplementedError

    def round_trip(
        self, address: str, token: str, seconds: float, size: int, back: str = ""
    ) -> None:
        raise NotImplementedError

    def read_status(self, timeout: float) -> str:
        raise NotImplementedError

    def group_collective(self) -> Any:
        raise NotImplementedError

    def fetch(self, *args: Any) -> Any:
        raise NotImplementedError

    def ask_offer(self, *args: Any) -> Any:
        raise NotImplementedError

    def host_of(self, process: Process) -> str:
        raise NotImplementedError

    def decided(self, position: Any, outcome: Any, decision: Any) -> None:
        raise NotImplementedError

    def files(self) -> dict[str, str]:
        raise NotImplementedError


_world: World | None = None


def world() -> World:
    """Return the world of the simulation under way."""
    if _world is None:
        raise NotSimulatedError("no simulated world is there")
    return _world


def enter(kernel: Kernel | None, of: World | None) -> None:
    """Make `kernel` and `of` the current ones of the stand-ins."""
    global _world
    kernels.use(kernel)
    _world = of


def _exit(status: int) -> None:
    process = kernels.current().process
    process.exited = True
    process.end()
    raise Killed


def _readlink(path: Any) -> str:
    if str(path) == "/proc/self/ns/pid":
        return "pid:[1]"
    raise kernels.missing(f"os.readlink({path!r})")


def _listdir(path: Any) -> list[str]:
    raise FileNotFoundError(path)  # a simulated process has no descriptors


OS = Module(
    "os",
    listdir=_listdir,
    absent=("memfd_create",),
    _exit=_exit,
    getpid=lambda: kernels.current().process.pid,
    write=lambda descriptor, data: len(data),
    readlink=_readlink,
    path=Module("os.path"),
    environ={},  # no agent has named an error file
)
FAULTHANDLER = Module(
    "faulthandler",
    dump_traceback_later=lambda *args, **kwargs: None,
    cancel_dump_traceback_later=lambda: None,
    dump_traceback=lambda *args, **kwargs: None,
)


class ProcPath:
    """Stands in for pathlib.Path, for some files in /proc and for the checkpoint folder."""

    def __init__(self, *parts: Any) -> None:
        self._path = "/".join(map(str, parts))

    def __str__(self) -> str:
        return self._path

    def __truediv__(self, name: str) -> ProcPath:
        return ProcPath(self._path, name)

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parents(self) -> tuple[ProcPath, ...]:
        return ()  # No schedule has a checkpoint folder behind a link.

    def is_symlink(self) -> bool:
        return False

    def read_text(self, errors: str = "") -> str:
        if not self._path.startswith("/proc/"):
            if (text := world().files().get(self._path)) is None:
                raise FileNotFoundError(self._path)
            return text
        kernel = kernels.current()
        kernel.pause()
        if self._path == "/proc/sys/kernel/random/boot_id":
            return world().host_of(kernel.process)
        parts = self._path.split("/")
        if parts[1] == "proc" and parts[3] == "stat":
            process = world().processes.get(int(parts[2]))
            if process is None or process.dead:
                raise FileNotFoundError(self._path)
            return f"{process.pid} (python) S " + " ".join(["0"] * 18) + f" {process.pid * 7}"
        raise kernels.missing(self._path)

    def is_file(self) -> bool:
        return self._path in world().files()

    def is_dir(self) -> bool:
        return not self._path.startswith("/proc/") and any(self._children())

    def iterdir(self) -> Iterator[ProcPath]:
        return (ProcPath(self._path, name) for name in sorted(self._children()))

    def _children(self) -> set[str]:
        prefix = f"{self._path}/"
        return {
            path.removeprefix(prefix).split("/")[0]
            for path in world().files()
            if path.startswith(prefix)
        }


class _Connection:
    """A socket that only shows that the other end can be reached."""

    def close(self) -> None:
        """Do nothing."""

    def setsockopt(self, *option: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        raise kernels.missing(f"socket.socket.{name}")


def _create_connection(address: tuple[str, int], timeout: float = 60.0) -> _Connection:
    world().connect(address[0], address[1], timeout)
    return _Connection()


SOCKET = Module(
    "socket",
    create_connection=_create_connection,
    socket=_unknown("socket.socket"),
    IPPROTO_TCP=socket.IPPROTO_TCP,
    TCP_NODELAY=socket.TCP_NODELAY,
)


class _Page:
    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> _Page:
        return self

    def __exit__(self, *_: object) -> None:
        return

    length = 0  # number of bytes that are still to come

    def read(self, most: int) -> bytes:
        return self._text.encode()[:most]


class _Opener:
    addheaders: ClassVar[list[tuple[str, str]]] = []

    def open(self, address: str, timeout: float) -> _Page:
        assert address.endswith("/status"), address
        return _Page(world().read_status(timeout))


URLLIB_REQUEST = Module(
    "urllib.request",
    build_opener=lambda *handlers: _Opener(),
    ProxyHandler=lambda proxies: None,
    Request=None,
)
UUID = Module(
    "uuid", uuid4=lambda: SimpleNamespace(hex=f"{kernels.current().rng.getrandbits(64):016x}")
)


# torch.distributed


def _all_gather_into_tensor(output: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
    world().group_collective().gather(output, own)


DIST = Module(
    "torch.distributed",
    group=SimpleNamespace(WORLD="world"),
    ProcessGroup=dist.ProcessGroup,
    get_world_size=lambda group=None: world().group_collective().size,
    get_rank=lambda group=None: world().group_collective().rank,
    is_initialized=lambda: True,
    all_gather_into_tensor=_all_gather_into_tensor,
)


def _tcp_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(seconds=300),
    wait_for_workers: bool = True,
    **options: Any,
) -> Any:
    assert not is_master, "the engine joins stores that others serve"
    return world().connect_store(host_name, port, timeout.total_seconds())


def _prefix_store(prefix: str, store: Any) -> Any:
    return world().prefix_store(prefix, store)


def _manager_server(**options: Any) -> Any:
    return world().manager_server(**options)


def _manager_client(address: str, connect_timeout: timedelta = timedelta(seconds=10)) -> Any:
    return world().manager_client(address)


def _fetch(*args: Any, **kwargs: Any) -> Any:
    return world().fetch(*args, **kwargs)


def _free_bytes() -> int:
    return world().free_bytes()


def _ask_offer(*args: Any, **kwargs: Any) -> Any:
    return world().ask_offer(*args, **kwargs)


def _round_trip(*args: Any, **kwargs: Any) -> None:
    world().round_trip(*args, **kwargs)


# Installation


def _watched(decide: Callable[..., Any]) -> Callable[..., Any]:
    def decide_and_tell(position: Any, outcome: Any, config: Any) -> Any:
        decision = decide(position, outcome, config)
        world().decided(position, outcome, decision)
        return decision

    return decide_and_tell


def _replacements() -> dict[int, Any]:
    """Map the identity of each replaced object to its stand-in."""
    from tests.simulation.control import SimulatedEcho, SimulatedSockets
    from titan_ft.membership import control_pings, control_sockets
    from titan_ft.protocol import decision
    from titan_ft.transfer import host_memory, reach, state_fetch

    modules: list[tuple[Any, Any]] = [
        (time, TIME),
        (threading, THREADING),
        (queue, QUEUE),
        (concurrent.futures, FUTURES),
        (concurrent, Module("concurrent", futures=FUTURES)),
        (os, OS),
        (socket, SOCKET),
        (urllib, Module("urllib", request=URLLIB_REQUEST, error=urllib.error)),
        (urllib.request, URLLIB_REQUEST),
        (uuid, UUID),
        (faulthandler, FAULTHANDLER),
        (signal, Module("signal")),
        (dist, DIST),
    ]
    found: dict[int, Any] = {}
    for real, standin in modules:
        # Most names of torch.distributed do not belong to the world: tensors, types, options.
        if real is not dist:
            # Names that were imported from the module, as by `from time import monotonic`.
            own = {real.__name__, f"_{real.__name__}", "builtins"}
            for name in getattr(real, "__all__", None) or vars(real):
                member = getattr(real, name, None)
                native = hasattr(real, "__all__") or getattr(member, "__module__", "") in own
                if (
                    callable(member)
                    and native
                    and not name.startswith("__")
                    and not _is_error(member)
                ):
                    found[id(member)] = standin.__dict__.get(name) or _unknown(
                        f"{real.__name__}.{name}"
                    )
        found[id(real)] = standin
    found[id(pathlib.Path)] = ProcPath
    found[id(vars(dist)["TCPStore"])] = _tcp_store
    found[id(vars(dist)["PrefixStore"])] = _prefix_store
    found[id(decision.decide)] = _watched(decision.decide)
    found[id(state_fetch.fetch)] = _fetch
    found[id(state_fetch.ask_offer)] = _ask_offer
    found[id(control_pings.EchoServer)] = SimulatedEcho
    found[id(control_sockets.ControlSockets)] = SimulatedSockets
    found[id(host_memory.free_bytes)] = _free_bytes
    found[id(reach.round_trip)] = _round_trip
    found[id(torchft.coordination.ManagerServer)] = _manager_server
    found[id(torchft.coordination.ManagerClient)] = _manager_client
    return found


def _is_error(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, BaseException)


def real_names() -> list[str]:
    """Return "module.name" of each real clock, thread and socket in the loaded modules of a
    package.

    A package that moved out of `PACKAGES` would silently use real time, and the exploration would
    test less.
    """
    real = {id(concurrent.futures)}
    for module in (time, threading, socket, queue):
        public = getattr(module, "__all__", None) or vars(module)
        real.add(id(module))
        real.update(id(getattr(module, name)) for name in public if callable(getattr(module, name)))
    found = []
    for module_name, module in sorted(sys.modules.items()):
        if not module_name.startswith("titan_ft."):
            continue
        found += [
            f"{module_name}.{name}" for name, value in vars(module).items() if id(value) in real
        ]
    return found


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins into the engine's modules, and remove them afterwards."""

    replacements, changed = _replacements(), []
    targets = [
        module
        for name, module in sys.modules.items()
        if name.startswith(PACKAGES) and module is not None
    ]
    for module in [*targets, torchft.coordination]:
        for name, value in list(vars(module).items()):
            standin = replacements.get(id(value))
            if standin is not None and not name.startswith("__"):
                changed.append((module, name, value))
                setattr(module, name, standin)
    changed.append((device, "on_cpu", device.on_cpu))
    device.on_cpu = lambda: True
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
        torch.set_num_threads(threads)
        logging.disable(level)
