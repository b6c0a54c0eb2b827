# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of one rank: its copy in host memory, its digest, and its replacement in a heal.

A group that lacks the job's state (a *joiner*) heals: each of its ranks gets the state of the rank
of the same number in another group (a *donor*). The state of one rank consists of

- its local shards of parameters, persistent buffers and optimizer state;
- the scalars that steer an update: the hyperparameters of the param groups, the LR schedulers, and
  the trainer's counters.

In order of time:

1. The donor copies its state to host memory (`TrainState.copy`, or `copy_if_allowed` on another
   thread, while training goes on). The copy is a `Snapshot`. Its *header* lists the tensors and has
   the scalars. Its *payload* has the bytes of the tensors, one after the other.
2. The joiner fetches the snapshot (`state_server.py`, `state_fetch.py`), and overwrites its own
   state with it (`TrainState.load`).
3. Both groups hash their state on their devices (`TrainState.digest`), and compare the digests in
   the next exchange.

No method is a collective. See docs/heal.md, and docs/gpu.md for the streams.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.protocol.errors import StateMismatchError
from titan_ft.transfer.host_memory import HostMemory

_BUFFER_PREFIX = "buffer/"
"""Prefix of a buffer's name in a state."""
_ALIGNMENT = 64
"""In a payload, each tensor begins at a multiple of this number of bytes, which suits any dtype."""
_LANE_BYTES = 8
"""A digest reads the bytes of a tensor as 64-bit integers, the *lanes*."""
_HASH_CHUNK = 1 << 20
"""Lanes that are hashed at once. So a digest needs at most 16 MB of extra memory."""


class Counters(Protocol):
    """The trainer's own progress apart from the step, such as tokens seen."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """One of `count` parts of a state.

    With scarce memory, each of `count` donors copies one part. The parts have about equal sizes.
    Each tensor is in one part only.

    Attributes:
        index: 0 to count - 1.
    """

    index: int
    count: int

    def byte_range(self, entries: list[dict[str, Any]], size: int) -> range:
        """Return the offsets of this part's bytes in the payload; the same on all donors.

        Args:
            entries: the header's entries of all tensors, by their offsets.
            size: bytes of the whole payload.
        """
        start = self._find_start(entries, size, self.index)
        stop = self._find_start(entries, size, self.index + 1)
        return range(start, stop)

    def _find_start(self, entries: list[dict[str, Any]], size: int, index: int) -> int:
        """Return the offset at which part `index` starts: that of its first tensor."""
        for entry in entries:
            if entry["offset"] >= size * index // self.count:
                return int(entry["offset"])
        return size


WHOLE = Part(0, 1)
"""The whole state."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of one rank's state, or of a part of it, in host memory.

    Attributes:
        step: committed updates in the state.
        header: JSON text: step, lineage, scalars, and the name, dtype, shape and offset of each
            tensor. The header of a part also lists all tensors.
        payload: flat uint8. A GPU may still be copying into it. Call `wait` before reading or
            overwriting it.
        part: the part of the state whose bytes are in the payload.
        first_byte: offset of the payload's first byte in the payload of the whole state.
        copy_started, copy_ended: events on the GPU's stream before and after the copy; None if the
            copy was complete when this object was made.
    """

    step: int
    lineage: int
    header: bytes
    payload: torch.Tensor
    part: Part = WHOLE
    first_byte: int = 0
    copy_started: torch.Event | None = None
    copy_ended: torch.Event | None = None

    def wait(self) -> None:
        """Block until the payload is complete; any thread."""
        device.synchronize([self.copy_ended])

    @property
    def byte_range(self) -> range:
        """Offsets of the payload's bytes in the payload of the whole state."""
        return range(self.first_byte, self.first_byte + self.payload.numel())

    @property
    def copy_seconds(self) -> float:
        """Duration of the copy on the GPU; 0 if the host made the copy. Call `wait` first."""
        return device.seconds_between(self.copy_started, self.copy_ended)


class _StateTensor(NamedTuple):
    """One tensor of a state.

    Attributes:
        on_host: the tensor is in host memory although its parameter is on a GPU, as torch's
            optimizers keep their step. `load` puts it there again.
    """

    name: str
    tensor: torch.Tensor
    on_host: bool


@dataclass(frozen=True)
class _CurrentState:
    """References to the tensors and scalars of the state after `step` updates.

    Attributes:
        computed_event: event after which the device has computed the state. A copy waits for this
            event, and not for later work of the device, such as the next forward.
    """

    step: int
    lineage: int
    tensors: list[_StateTensor]
    scalars: dict[str, Any]
    computed_event: torch.Event | None


@dataclass(frozen=True)
class _RunningCopy:
    """A copy that a GPU may not have completed.

    Attributes:
        ended_event: event on the GPU's stream after the copy; None = the copy was complete at once.
        sources: the tensors that the copy reads. This reference keeps torch from giving their
            memory to other tensors before the copy ends.
    """

    ended_event: torch.Event | None
    sources: list[torch.Tensor]


class TrainState:
    """Copies, hashes and overwrites the state of one rank.

    `engine/donor.py` copies the state for joiners. `engine/heal.py` loads a fetched state.
    `engine/round.py` takes digests.

    Threads: the training thread calls all methods but `copy_if_allowed`. The threads of the state
    server's connections call `copy_if_allowed`, between `allow_copying` and `forbid_copying`.

    If `load` raises, the state is a mixture of the old and the new one. The process must end, or
    load another snapshot.

    Args:
        model_parts: as torchtitan's Trainer holds them.
        optimizers: torchtitan's OptimizersContainer.
        lr_schedulers: torchtitan's LRSchedulersContainer.
        counters: the trainer's progress.
        on_load: called after each load, on all ranks of a group. It must drop values that were
            computed from the former weights, such as float8 scales.
        num_ranks: number of ranks that share this host's memory.

    Attributes:
        load_seconds: duration of the last load; 0 = there was none.
    """

    def __init__(
        self,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        counters: Counters,
        on_load: Callable[[], None] = lambda: None,
        num_ranks: int = 1,
    ) -> None:
        self._model_parts = model_parts
        self._optimizers = optimizers
        self._lr_schedulers = lr_schedulers
        self._counters = counters
        self._on_load = on_load
        self._memory = HostMemory(num_ranks)
        self._is_reserved = False
        # The last copy, until the training's stream waits for it.
        self._running_copy: _RunningCopy | None = None
        # The state that other threads may copy; None = they may copy nothing.
        self._allowed: _CurrentState | None = None
        self._copy_lock = threading.Lock()  # held during each copy
        self.load_seconds = 0.0
        for optimizer in optimizers:
            # An optimizer's step overwrites the state, so it must wait for a copy under way.
            optimizer.register_step_pre_hook(lambda *_: self._await_running_copy())

    def reserve(self) -> None:
        """Start to pin host memory for a copy. Later calls do nothing.

        Call this after the first step of the optimizers. Before it, they have no state, and the
        size of the copy is not known.
        """
        if not self._is_reserved:
            self._is_reserved = True
            self._memory.reserve(self.payload_bytes)

    def close(self) -> None:
        """Free the host memory. Waits for a copy under way."""
        with self._copy_lock:
            self._memory.close()

    def allow_copying(self, step: int, lineage: int) -> bool:
        """Let other threads copy the present state, until `forbid_copying`.

        Returns:
            False if the model has buffers. A forward may write to them at any time, so only the
            training thread may copy the state.
        """
        # Look the tensors up now, not at the copy: during a forward, FSDP replaces the shards by
        # whole parameters.
        current = self._find_current(step, lineage)
        if any(each.name.startswith(_BUFFER_PREFIX) for each in current.tensors):
            return False
        self._allowed = current
        return True

    def forbid_copying(self) -> None:
        """End `allow_copying`, because the state is about to change. Waits for a copy under way."""
        if self._allowed is not None:
            with self._copy_lock:
                self._allowed = None

    def copy_if_allowed(self, step: int, part: Part = WHOLE) -> Snapshot | None:
        """Copy the state of `step` while training computes with it; any thread.

        Args:
            part: the part that suffices if the host's memory is scarce.

        Returns:
            None if no state of `step` may be copied, or no longer.
        """
        state = self._allowed
        if state is None or state.step != step:
            return None
        # Without the lock: pinning memory may take seconds, and `forbid_copying`, which training
        # calls, waits for the lock.
        part, payload = self._allocate(state, part)
        with self._copy_lock:
            is_still_allowed = self._allowed is state
            if is_still_allowed:
                return self._copy(state, payload, part)
        self._memory.give_back(payload)
        return None

    def copy(self, step: int, lineage: int, part: Part = WHOLE) -> Snapshot:
        """Copy the present state to host memory, after all work that training has queued.

        A GPU copies on a stream of its own, and this method returns at once. Call `Snapshot.wait`
        before using the payload. The next step of an optimizer waits for the copy on the GPU, and
        so does a load. On a CPU, and into memory that is not pinned, the copy is complete when this
        method returns.

        Args:
            part: the part that suffices if the host's memory is scarce.
        """
        current = self._find_current(step, lineage)
        part, payload = self._allocate(current, part)
        with self._copy_lock:
            return self._copy(current, payload, part)

    def _allocate(self, state: _CurrentState, part: Part) -> tuple[Part, torch.Tensor]:
        """Return the part to copy, and memory for it.

        Args:
            part: the part that suffices. The whole state is copied unless the host's memory is
                scarce.
        """
        entries, size = _lay_out(state.tensors)
        if part != WHOLE and not self._memory.is_scarce(size):
            part = WHOLE
        return part, self._memory.lend(len(part.byte_range(entries, size)))

    def _find_current(self, step: int, lineage: int) -> _CurrentState:
        """Return references to the present state."""
        tensors = list(self._tensors(self._optimizers))
        return _CurrentState(step, lineage, tensors, self._scalars(), device.record_event())

    @torch.no_grad()
    def _copy(self, state: _CurrentState, payload: torch.Tensor, part: Part = WHOLE) -> Snapshot:
        """Copy a part of the state into `payload`; with `_copy_lock` held."""
        entries, size = _lay_out(state.tensors)
        byte_range = part.byte_range(entries, size)
        buffer_copies: list[_TensorCopy] = []
        other_copies: list[_TensorCopy] = []
        for entry, (name, tensor, _) in zip(entries, state.tensors, strict=True):
            if entry["offset"] not in byte_range:
                continue
            target = _view(payload, entry, byte_range.start)
            copies = buffer_copies if name.startswith(_BUFFER_PREFIX) else other_copies
            copies.append(_TensorCopy(device.local_shard(tensor), target))
        # The next forward may write to the buffers (the statistics of a norm). So they are copied
        # on the training's stream, before that forward. The other tensors do not change before the
        # next step of an optimizer, which waits for the copy.
        _queue_copies(buffer_copies)
        computed_event = device.record_event() if buffer_copies else state.computed_event
        where = device.current()
        with device.side_stream(where, "copy"):
            device.wait_for(computed_event, where)
            started = device.record_time()
            _queue_copies(other_copies)
            ended = device.record_event(timed=True)
        sources = [each.source for each in buffer_copies + other_copies]
        self._running_copy = _RunningCopy(ended, sources)
        header = {
            "step": state.step,
            "lineage": state.lineage,
            "scalars": state.scalars,
            "tensors": entries,
            "bytes": size,
        }
        # Sort the keys: a joiner with several donors compares the bytes of their headers.
        text = json.dumps(header, default=torch.Tensor.item, sort_keys=True)
        return Snapshot(
            state.step,
            state.lineage,
            text.encode(),
            payload,
            part,
            byte_range.start,
            started,
            ended,
        )

    def _await_running_copy(self) -> None:
        """Make the training's later work wait for the last copy, whose source it may overwrite.

        Other threads may copy the state no more. On a GPU, the host does not wait.
        """
        self.forbid_copying()
        if self._running_copy is not None:
            device.wait_for(self._running_copy.ended_event, device.current())
            self._running_copy = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of a copy of this rank's state."""
        _, size = _lay_out(list(self._tensors(self._optimizers)))
        return size

    def reuse_memory(self, snapshot: Snapshot) -> None:
        """Use the memory of a snapshot for the next copy. Nobody may read the snapshot any more."""
        # Wait for the GPU. A late copy into this memory would overwrite the next copy.
        snapshot.wait()
        self._memory.give_back(snapshot.payload)

    def load(self, snapshot: Snapshot) -> None:
        """Overwrite this rank's state with a snapshot of the whole state.

        Raises:
            StateMismatchError: the donor's state has other tensors or shapes than this rank's state
                (another model, other parallel degrees or another optimizer).
        """
        snapshot.wait()
        started = time.monotonic()
        self._await_running_copy()
        self._load(snapshot)
        # Wait for the load only. The whole device may be busy for long, with an exchange that waits
        # for other groups.
        device.synchronize([device.record_event()])
        self._on_load()
        self.load_seconds = time.monotonic() - started

    @torch.no_grad()
    def _load(self, snapshot: Snapshot) -> None:
        header = json.loads(snapshot.header)
        entries = {entry["name"]: entry for entry in header["tensors"]}
        for name, tensor in self._model_tensors():
            entry = entries.pop(name, None)  # the optimizers' entries are left at the end
            if entry is None:
                raise StateMismatchError(
                    f"the donor's state has no {name}; all groups must run the same config",
                )
            self._check(entry, tensor)
            device.local_shard(tensor).copy_(_view(snapshot.payload, entry), non_blocking=True)
        self._load_optimizers(entries, snapshot.payload)
        self._load_scalars(header["scalars"])

    def restore(self) -> None:
        """Undo the changes that training has made to the weights since the last update.

        All ranks of a group call this method. `OuterState` overrides it. Here, only an update
        changes the weights, so only the values that were computed from them are dropped.
        """
        self._on_load()

    @torch.no_grad()
    def digest(self) -> str:
        """Hash the bytes of parameters, buffers, optimizer state and LR of this rank.

        Each tensor is hashed on its device, so that only 8 bytes per tensor leave the device. Its
        bytes are read as 64-bit integers (lanes). Each lane is multiplied by an odd weight that
        depends on its position, and the products are added modulo 2**64. Any single changed bit
        changes the sum.

        Returns:
            32 hex digits, equal on CPU and GPU for equal bytes.
        """
        tensors = self._tensors(self._agreed_optimizers)
        names, values = hash_tensors((name, tensor) for name, tensor, _ in tensors)
        groups: list[dict[str, Any]] = []
        for optimizer in self._agreed_optimizers:
            groups.extend(_list_hyperparameters(optimizer))
        text = json.dumps([names, values, groups], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def _agreed_optimizers(self) -> Any:
        """The optimizers whose state is equal in all groups: the first ones of `_optimizers`.

        With DiLoCo, the inner optimizers are not among them (`OuterState`).
        """
        return self._optimizers

    def _tensors(self, optimizers: Any) -> Iterator[_StateTensor]:
        """Yield the tensors of the state in a fixed order."""
        for name, tensor in self._model_tensors():
            yield _StateTensor(name, tensor, on_host=False)
        for number, optimizer in enumerate(optimizers):
            for index, parameter in enumerate(_parameters(optimizer)):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    assert isinstance(value, torch.Tensor), f"optimizer state {key} is no tensor"
                    on_host = value.device.type == "cpu" and parameter.device.type != "cpu"
                    yield _StateTensor(f"optimizer/{number}/{index}/{key}", value, on_host)

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and persistent buffers, with names that are unique in the state."""
        for number, part in enumerate(self._model_parts):
            for name, parameter in part.named_parameters():
                yield f"model/{number}/{name}", parameter
            for prefix, module in part.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        yield f"{_BUFFER_PREFIX}{number}/{prefix}.{name}", buffer

    def _scalars(self) -> dict[str, Any]:
        """Return the scalars of the state for the header, where JSON has their values."""
        return {
            "param_groups": [_list_hyperparameters(each) for each in self._optimizers],
            "lr_schedulers": self._lr_schedulers.state_dict(),
            "counters": self._counters.state_dict(),
        }

    def _load_scalars(self, scalars: dict[str, Any]) -> None:
        # The schedulers first: they write LRs, and the param groups have the LR of the next update.
        self._lr_schedulers.load_state_dict(scalars["lr_schedulers"])
        for optimizer, groups in zip(self._optimizers, scalars["param_groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    if isinstance(group[key], torch.Tensor):
                        group[key].fill_(value)
                    elif isinstance(group[key], tuple):
                        group[key] = tuple(value)  # JSON has no tuples
                    else:
                        group[key] = value
        self._counters.load_state_dict(scalars["counters"])

    def _load_optimizers(self, entries: dict[str, dict[str, Any]], payload: torch.Tensor) -> None:
        """Replace each optimizer's state.

        The tensors are new. They cannot be overwritten in place, because an optimizer has no state
        before its first step.

        Args:
            entries: the header's entries of the optimizers' tensors, by name.
        """
        # The entries of each parameter, by the key in its optimizer's state, such as "exp_avg".
        by_parameter: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for name, entry in entries.items():
            # A name is "optimizer/NUMBER/INDEX/KEY"; see `_tensors`.
            prefix, _, key = name.rpartition("/")
            by_parameter[prefix][key] = entry
        for number, optimizer in enumerate(self._optimizers):
            for index, parameter in enumerate(_parameters(optimizer)):
                state = {}
                for key, entry in by_parameter.pop(f"optimizer/{number}/{index}", {}).items():
                    where = "cpu" if entry["on_host"] else parameter.device
                    shard = _view(payload, entry).to(where, copy=True, non_blocking=True)
                    state[key] = to_dtensor_like(parameter, shard)
                if state:
                    optimizer.state[parameter] = state
                else:
                    # Leave no empty entry: torch's checkpoints would take it for a state.
                    optimizer.state.pop(parameter, None)
        if by_parameter:  # this rank has no such parameters
            prefix, keys = min(by_parameter.items())
            name = f"{prefix}/{min(keys)}"
            raise StateMismatchError(
                f"the donor's state has {name}, which this rank lacks; "
                "all groups must run the same config"
            )

    @staticmethod
    def _check(entry: dict[str, Any], tensor: torch.Tensor) -> None:
        """Check that a tensor of the donor fits into a tensor of this rank.

        Raises:
            StateMismatchError: the dtype or the shape differs.
        """
        shard = device.local_shard(tensor)
        found = (entry["dtype"], entry["shape"])
        expected = (str(shard.dtype).removeprefix("torch."), list(shard.shape))
        if found != expected:
            raise StateMismatchError(
                f"the donor's {entry['name']} is {found}, this rank's is {expected}; all groups "
                "must run the same config with the same number of ranks"
            )


def _lay_out(tensors: list[_StateTensor]) -> tuple[list[dict[str, Any]], int]:
    """Return the header's entry of each tensor, and the size of the payload in bytes."""
    entries = []
    size = 0
    for name, tensor, on_host in tensors:
        shard = device.local_shard(tensor)
        entries.append(
            {
                "name": name,
                "dtype": str(shard.dtype).removeprefix("torch."),
                "shape": list(shard.shape),
                "offset": size,
                "on_host": on_host,
            }
        )
        size += math.ceil(shard.nbytes / _ALIGNMENT) * _ALIGNMENT
    return entries, size


class _TensorCopy(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor


def _queue_copies(copies: list[_TensorCopy]) -> None:
    """Queue copies on the current stream."""
    for copy in copies:
        copy.target.copy_(copy.source, non_blocking=True)


def _view(payload: torch.Tensor, entry: dict[str, Any], first_byte: int = 0) -> torch.Tensor:
    """Return a view of one tensor in a payload.

    Args:
        entry: the header's entry of the tensor.
        first_byte: offset of the payload's first byte in the payload of the whole state.
    """
    dtype = getattr(torch, entry["dtype"])
    num_bytes = dtype.itemsize
    for length in entry["shape"]:
        num_bytes *= length
    start = entry["offset"] - first_byte
    return payload[start : start + num_bytes].view(dtype).view(entry["shape"])


def to_dtensor_like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a shard of an optimizer's state as a DTensor with the sharding of its parameter.

    A tensor of another shape than the parameter's shard is returned as it is: it is a scalar, such
    as Adam's step. So is a shard of a parameter that is no DTensor.
    """
    if not isinstance(parameter, DTensor) or shard.shape != parameter.to_local().shape:
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _list_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each param group."""
    return [_hyperparameters(group) for group in optimizer.param_groups]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group's hyperparameters as JSON values."""
    values = {}
    for key, value in group.items():
        if key == "params":
            continue
        values[key] = value.item() if isinstance(value, torch.Tensor) else value
    return values


def _read_scalars(scalars: list[torch.Tensor]) -> list[int]:
    """Return the values of scalars. One copy from each device brings all of its scalars."""
    result = [0] * len(scalars)
    for where in {scalar.device for scalar in scalars}:
        indices = [index for index, scalar in enumerate(scalars) if scalar.device == where]
        values = torch.stack([scalars[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            result[index] = value
    return result


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[list[Any]], list[int]]:
    """Hash the bytes of this rank's shards on their devices.

    Returns:
        Name, dtype and shape of each shard, and the 64-bit hash of its bytes; see
        `TrainState.digest`.
    """
    names = []
    shards = []
    for name, tensor in tensors:
        shard = device.local_shard(tensor)
        names.append([name, str(shard.dtype), list(shard.shape)])
        shards.append(shard)
    return names, _read_scalars(_lane_sums(shards))


def _lane_sums(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the hash of each shard, an int64 on its device; see `TrainState.digest`."""
    weights = _make_weights_on_devices(shards)
    sums = _sum_scalars(shards, weights)
    for number, shard in enumerate(shards):
        if number not in sums:
            sums[number] = _lane_sum(shard, weights[shard.device])
    return [sums[number] for number in range(len(shards))]


def _make_weights_on_devices(
    shards: Sequence[torch.Tensor],
) -> dict[torch.device, torch.Tensor]:
    """Return the weights of the lanes for each device.

    There are as many as the largest shard of the device needs, but at most `_HASH_CHUNK`.
    """
    max_lanes: dict[torch.device, int] = {}
    for shard in shards:
        num_lanes = math.ceil(shard.nbytes / _LANE_BYTES)
        max_lanes[shard.device] = max(num_lanes, max_lanes.get(shard.device, 1))
    weights = {}
    for where, number in max_lanes.items():
        weights[where] = _make_weights(min(number, _HASH_CHUNK), where)
    return weights


def _sum_scalars(
    shards: Sequence[torch.Tensor],
    weights: dict[torch.device, torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Return the hashes of the scalars among the shards, by their index in `shards`.

    Adam has a step for each parameter. Hashed one by one, these scalars would take as long as all
    large tensors. So all scalars of one device and dtype are hashed together.
    """
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for number, shard in enumerate(shards):
        if shard.numel() == 1 and shard.element_size() <= _LANE_BYTES:
            alike[shard.device, shard.dtype].append(number)
    sums: dict[int, torch.Tensor] = {}
    for (where, _), numbers in alike.items():
        # One row of octets per scalar. Pad each row to one lane.
        octets = torch.stack([shards[number].reshape(()) for number in numbers]).view(torch.uint8)
        octets = octets.view(len(numbers), -1)
        padded = torch.nn.functional.pad(octets, (0, _LANE_BYTES - octets.shape[1]))
        products = padded.view(torch.int64).view(-1) * weights[where][0]
        sums.update(zip(numbers, products.unbind(), strict=True))
    return sums


def _lane_sum(shard: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the hash of one shard.

    Args:
        weights: at least as many as the shard has lanes, or `_HASH_CHUNK`.
    """
    octets = shard.contiguous().view(-1).view(torch.uint8)
    # Pad the octets to whole lanes.
    num_odd_bytes = octets.numel() % _LANE_BYTES
    if num_odd_bytes:
        padding = octets.new_zeros(_LANE_BYTES - num_odd_bytes)
        octets = torch.cat([octets, padding])
    if octets.data_ptr() % _LANE_BYTES != 0:
        octets = octets.clone()  # a view as int64 needs an aligned address
    lanes = octets.view(torch.int64)
    if lanes.numel() <= _HASH_CHUNK:
        return _weigh(lanes, weights)
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for number, chunk in enumerate(lanes.split(_HASH_CHUNK)):
        # All chunks use the same weights. An odd factor for each chunk makes its position count.
        chunk_weight = 2 * number + 1
        total += _weigh(chunk, weights) * chunk_weight
    return total


def _weigh(lanes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of the lanes times their weights."""
    weights = weights[: lanes.numel()]
    if lanes.device.type == "cpu":
        # In one pass over the lanes. On a GPU, torch has no dot product of integers.
        return torch.dot(lanes, weights)
    return (lanes * weights).sum()


def _make_weights(number: int, where: torch.device) -> torch.Tensor:
    """Return odd 64-bit numbers without a pattern.

    They are one step of Knuth's MMIX generator from 0, 1, 2 ..., with the lowest bit set.
    """
    weights = torch.arange(number, device=where)
    return weights.mul_(0x5851F42D4C957F2D).add_(0x14057B7EF767814F).bitwise_or_(1)
