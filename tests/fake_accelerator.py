# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An accelerator for tests, whose streams run late and in any order that is legal.

Its tensors say that they are on `cuda:N` and have their bytes in host memory. An operation on them is queued on the
current stream of the thread, as on a GPU, and runs when somebody waits for it, or earlier if the seed wants it so. Code
that reads before the event that it must wait for reads NaN, or what was there before; code that lets memory go while
another stream still uses it finds it overwritten. What differs from a GPU: a kernel is one step, and copies to
pageable memory are complete when they return (as CUDA says of the way to the host).

Stands beneath `titan_ft.device`, whose code for GPUs is what runs: it takes the place of `torch.accelerator`
and `torch.Stream` there, and of factories with a device everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_ft import device

DEADLINE = 20.0  # seconds that anything may wait; only ever reached by a bug
_ATEN = torch.ops.aten
_EMPTY = (_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default)
_READS = (_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default)
_ON_DEVICE = "cuda"
_HOST = torch.device("cpu")


class Event:
    """Marks a place in a stream."""

    def __init__(self, accelerator: FakeAccelerator, stream: Stream) -> None:
        self._accelerator, self.stream, self.done = accelerator, stream, False
        self._time = 0.0

    def reach(self) -> bool:
        """Let the stream come here."""
        self.done, self._time = True, time.monotonic()
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds from here to another event, both of which must have been reached."""
        assert self.done
        assert other.done
        return (other._time - self._time) * 1000

    def synchronize(self) -> None:
        """Let the host wait until the stream has come here."""
        self._accelerator.host_waits[threading.current_thread().name] += 1
        self._accelerator.run_until(lambda: self.done, self.stream)


class Stream:
    """A queue of operations, which run one after the other."""

    def __init__(self, accelerator: FakeAccelerator, where: torch.device) -> None:
        self._accelerator, self.where = accelerator, where
        self.queue: deque[Callable[[], bool]] = deque()  # each says whether it could run
        accelerator.streams.append(self)
        self._outer: list[Stream] = []

    def record_event(self, event: Callable[[Stream], Event] | None = None) -> Event:
        """Mark what is queued so far."""
        recorded = event(self) if event else Event(self._accelerator, self)
        self._accelerator.enqueue(self, recorded.reach)
        return recorded

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for an event of another stream; the host goes on."""

        def pass_by() -> bool:
            if not event.done:
                self._accelerator.advance(event.stream)
            return event.done

        self._accelerator.enqueue(self, pass_by)

    def wait_stream(self, other: Stream) -> None:
        """Wait for what another stream has queued so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait for everything that is queued."""
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._outer.append(self._accelerator.current_stream())
        self._accelerator.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._accelerator.use(self._outer.pop())


class _Block:
    """Memory of the device. Freed, it is taken again by the next one of its size on the stream that it was taken on."""

    def __init__(self, accelerator: FakeAccelerator, octets: torch.Tensor, stream: Stream) -> None:
        self.octets = octets
        self._accelerator, self._stream = accelerator, stream
        self.users: set[Stream] = set()  # other streams, which the allocator was told of

    def __del__(self) -> None:
        self._accelerator.free(self.octets, self._stream, self.users)


class Late(torch.Tensor):
    """A tensor on the device."""

    memory: torch.Tensor
    block: _Block
    where: torch.device

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: _Block, where: torch.device) -> Late:
        shape = torch.empty_strided(memory.size(), memory.stride(), dtype=memory.dtype, device="meta")
        tensor = torch.Tensor._make_subclass(cls, shape, False, dispatch_device=True, device_for_backend_keys=where)
        tensor.memory, tensor.block, tensor.where = memory, block, where
        return tensor

    @property
    def device(self) -> torch.device:
        return self.where

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.users.add(stream)

    def to(self, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        where, dtype = kwargs.get("device"), kwargs.get("dtype")
        for argument in args:
            if isinstance(argument, torch.dtype):
                dtype = argument
            else:
                where = torch.device(argument)
        if where is None or where.type == _ON_DEVICE:
            return super().to(dtype or self.dtype, copy=copy)
        return _ATEN._to_copy.default(self.detach(), dtype=dtype, device=_HOST, non_blocking=non_blocking)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _HOST
        raise AssertionError(f"{func} on a thread that does not know the accelerator")

    def __repr__(self, **_: Any) -> str:
        return f"Late({list(self.shape)}, {self.dtype}, {self.where})"


class _Mode(TorchDispatchMode):
    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._accelerator.call(func, args, kwargs or {})


class FakeAccelerator:
    """As much of `torch.accelerator` as this project uses.

    Args:
        seed: decides what runs when.
        num_devices: that the host has.
    """

    def __init__(self, seed: int, num_devices: int = 2) -> None:
        self._random = random.Random(seed)
        self._eager = self._random.choice((0.0, 0.0, 0.1, 0.5))  # chance that something runs before it must
        self._num_devices = num_devices
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.local()
        self._free: dict[tuple[Stream, int], list[torch.Tensor]] = {}
        self._pinned: set[int] = set()  # addresses of storages
        self.streams: list[Stream] = []
        self.defaults = [Stream(self, torch.device(_ON_DEVICE, index)) for index in range(num_devices)]
        self.host_waits: Counter[str] = Counter()  # by thread: how often it has waited itself
        self.free_bytes = 0  # what each device says that it has left

    # torch.accelerator

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._num_devices

    def current_accelerator(self) -> torch.device:
        return torch.device(_ON_DEVICE)

    def current_device_index(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device_index(self, index: int) -> None:
        self._thread.index = index

    def current_stream(self, where: torch.device | None = None) -> Stream:
        index = self.current_device_index() if where is None or where.index is None else where.index
        streams: dict[int, Stream] = self._thread.__dict__.setdefault("streams", {})
        return streams.get(index, self.defaults[index])

    def set_stream(self, stream: Stream) -> None:
        self.use(stream)

    def get_memory_info(self, where: torch.device) -> tuple[int, int]:
        return self.free_bytes, 1 << 40

    def memory_reserved(self, where: torch.device) -> int:
        return 0

    def memory_allocated(self, where: torch.device) -> int:
        return 0

    def max_memory_reserved(self) -> int:
        return 0

    def empty_host_cache(self) -> None:
        """Keep what was pinned."""

    def synchronize(self) -> None:
        """Wait for all streams of the thread's device."""
        index = self.current_device_index()
        for stream in [stream for stream in self.streams if stream.where.index == index]:
            stream.synchronize()

    def use(self, stream: Stream) -> None:
        """Make a stream the thread's current one, and its device the thread's."""
        self._thread.index = stream.where.index
        self._thread.__dict__.setdefault("streams", {})[stream.where.index] = stream

    # Queues

    def enqueue(self, stream: Stream, operation: Callable[[], bool]) -> None:
        """Queue an operation; perhaps something runs."""
        with self._changed:
            stream.queue.append(operation)
            while self._random.random() < self._eager:
                self.advance(self._random.choice(self.streams))
            self._changed.notify_all()

    def advance(self, stream: Stream) -> bool:
        """Run a stream's next operation; says whether it could."""
        with self._changed:
            if not stream.queue or not stream.queue[0]():
                return False
            stream.queue.popleft()
            self._changed.notify_all()
            return True

    def run_until(self, reached: Callable[[], bool], stream: Stream) -> None:
        """Run a stream, and what it waits for, but nothing else, until it has come to a place."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while not reached():
                # A collective waits for other members: for their streams, or for threads that are to queue their part.
                if self.advance(stream) or any(map(self.advance, self._shuffled())):
                    continue
                if not self._changed.wait(0.01):
                    assert time.monotonic() < deadline, f"nothing ends the wait for {stream.where}"

    def _shuffled(self) -> list[Stream]:
        return self._random.sample(self.streams, len(self.streams))

    # Memory

    def take(self, numel: int, dtype: torch.dtype, where: torch.device) -> tuple[torch.Tensor, _Block]:
        """Allocate on the current stream, as a caching allocator does."""
        stream, size = self.current_stream(where), max(numel * dtype.itemsize, 1)
        with self._changed:
            reused = self._free.get((stream, size))
            octets = reused.pop() if reused else torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN, -1
        return octets[: numel * dtype.itemsize].view(dtype), _Block(self, octets, stream)

    def free(self, octets: torch.Tensor, stream: Stream, users: set[Stream]) -> None:
        """Take memory back; it is given away again when the streams that are known to use it have come here."""
        with self._changed:
            waits = [user.record_event() for user in users]

            def give() -> bool:
                if not all(event.done for event in waits):
                    return False
                self._free.setdefault((stream, octets.numel()), []).append(octets)
                return True

            if waits:
                self.enqueue(Stream(self, stream.where), give)
            else:
                give()

    def empty(self, like: torch.Tensor, where: torch.device) -> Late:
        """Return a tensor with shape, strides and dtype of a (meta) tensor."""
        numel = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        memory, block = self.take(numel if like.numel() else 0, like.dtype, where)
        shaped = memory.as_strided(like.shape, like.stride()) if like.numel() else memory.view(like.shape)
        return Late(shaped, block, where)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Say whether a host tensor is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    # Operations

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the host, or queue one of the device."""
        late = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Late)]
        where = kwargs.get("device")
        if func is torch.ops.prim.device.default:
            return _HOST  # to autograd's C++, which has no device of another kind
        if not late:
            if where is None or where.type == "cpu":
                return self._on_host(func, args, kwargs)
            return self._make(func, args, {**kwargs, "device": _HOST, "pin_memory": False}, where)
        if func is _ATEN.copy_.default:
            return self._copy(*args, **kwargs)
        if func is _ATEN._foreach_copy_.default:
            return self._copy_each(*args, **kwargs)
        if func is _ATEN._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if func in _READS:
            self.current_stream(late[0].where).synchronize()
            return func(*_memories(args), **_memories(kwargs))
        schema = func._schema
        if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
            base = late[0]
            return tree_map_only(
                torch.Tensor, lambda memory: Late(memory, base.block, base.where), func(*_memories(args))
            )
        own = late[0].where
        assert all(tensor.where == own for tensor in late), f"{func}: of several devices"
        run = functools.partial(func, *_frozen(args), **_frozen({**kwargs, **_no_device(kwargs)}))
        if any(argument.alias_info is not None for argument in schema.arguments):
            self._queue(run, own)
            if not schema.returns:
                return None
            return kwargs["out"] if "out" in kwargs else args[0]
        with torch.no_grad():
            shapes = func(*_metas(args), **_metas({**kwargs, **({"device": "meta"} if where is not None else {})}))
        results = tree_map_only(torch.Tensor, lambda shape: self.empty(shape, own), shapes)
        if func not in _EMPTY:
            self._queue(functools.partial(_run_into, _memories(results), run), own)
        return results

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        if pinned:
            self._pinned.add(result.untyped_storage().data_ptr())
        return result

    def _make(self, func: Any, args: Any, kwargs: Any, where: torch.device) -> Late:
        """Run a factory, or copy a host tensor to the device."""
        if func is _ATEN._to_copy.default:
            kwargs.pop("pin_memory")
            result = self.empty(torch.empty_like(args[0], dtype=kwargs.get("dtype"), device="meta"), where)
            self._copy(result, args[0], kwargs.get("non_blocking", False))
            return result
        values = func(*args, **kwargs)
        result = self.empty(values.to("meta"), where)
        if func not in _EMPTY:
            self._queue(functools.partial(_run_into, result.memory, lambda: values), where)
        return result

    def _to_copy(self, source: Late, **kwargs: Any) -> torch.Tensor:
        where = kwargs.pop("device", None)
        shape = torch.empty_like(source.memory, dtype=kwargs.get("dtype"), device="meta")
        if where is None or where.type == _ON_DEVICE:
            result: torch.Tensor = self.empty(shape, where or source.where)
        else:
            result = torch.empty_like(shape, device="cpu")
            if kwargs.get("non_blocking"):  # torch pins it then
                self._pinned.add(result.untyped_storage().data_ptr())
        self._copy(result, source, kwargs.get("non_blocking", False))
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        from_host, to_host = (not isinstance(tensor, Late) for tensor in (source, target))
        if from_host and not self.is_pinned(source):
            source = source.clone()  # the driver stages it before the call returns
        to, of = _memories((target, source))
        where = source.where if isinstance(source, Late) else target.where  # type: ignore[attr-defined]  # one of them
        self._queue(lambda: to.copy_(of), where)
        if from_host:
            waits = not non_blocking and source.dim() > 0  # for a GPU torch makes a scalar there
        else:
            waits = to_host and (not non_blocking or not self.is_pinned(target))
        if waits:
            self.current_stream(where).synchronize()
        return target

    def _copy_each(self, targets: Any, sources: Any, non_blocking: bool = False) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source, non_blocking)

    def _queue(self, run: Callable[[], object], where: torch.device) -> None:
        def operate() -> bool:
            run()
            return True

        self.enqueue(self.current_stream(where), operate)


def _memories(tree: Any) -> Any:
    return tree_map_only(Late, lambda late: late.memory, tree)


def _frozen(tree: Any) -> Any:
    """Let an operation have the values that host tensors, which are its parameters, have now."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.memory if isinstance(tensor, Late) else tensor.clone(), tree
    )


def _metas(tree: Any) -> Any:
    return tree_map_only(
        torch.Tensor,
        lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"),
        _memories(tree),
    )


def _no_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _run_into(results: Any, run: Callable[[], Any]) -> None:
    for result, value in zip(tree_leaves(results), tree_leaves(run()), strict=True):
        result.copy_(value)


class _Torch:
    """torch, as `titan_ft.device` sees it; to torch itself there is no accelerator."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self.accelerator, self.Stream = accelerator, functools.partial(Stream, accelerator)

    def Event(self, enable_timing: bool) -> Callable[[Stream], Event]:  # noqa: N802
        """Make an event that is yet to be recorded on a stream."""
        return functools.partial(Event, self.accelerator)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def installed(seed: int, num_devices: int = 2) -> Iterator[FakeAccelerator]:
    """Give this process an accelerator, for all threads that begin within the context too."""
    accelerator = FakeAccelerator(seed, num_devices)
    torch._C._ensureCUDADeviceGuardSet()
    with pytest.MonkeyPatch.context() as patch, _Mode(accelerator):
        plain_run, plain_tensor = threading.Thread.run, torch.tensor

        def run(thread: threading.Thread) -> None:
            with _Mode(accelerator):
                plain_run(thread)

        def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
            made = plain_tensor(data, **kwargs)
            return made if device is None else made.to(device)

        patch.setattr(threading.Thread, "run", run)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(device, "torch", _Torch(accelerator))
        device._stream_of_its_own.cache_clear()
        try:
            yield accelerator
        finally:
            device._stream_of_its_own.cache_clear()
