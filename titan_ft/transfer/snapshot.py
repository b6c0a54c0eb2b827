# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state that a group heals from: what it is made of, its digest, its copy in host memory.

The state of one rank is its local shards of parameters, persistent buffers and optimizer state, plus the scalars that
steer an update: param groups (LR among them), LR schedulers and the trainer's counters. No collective is involved:
rank r of a joiner takes over the bytes of rank r of its donor.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.protocol.errors import StateMismatchError
from titan_ft.transfer.host_memory import HostMemory

_BUFFER = "buffer/"  # a buffer's name in a state begins with it
_ALIGNMENT = 64  # bytes; keeps every tensor of a payload aligned for any dtype
_LANE_BYTES = 8
_HASH_CHUNK = 1 << 20  # lanes hashed at once: bounds the hash's extra memory to 16 MB


class Counters(Protocol):
    """The trainer's own progress besides the step, such as tokens seen."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """One of `number` parts of a state, of about the same size; each tensor is in one of them."""

    place: int
    number: int

    def of(self, entries: list[dict[str, Any]], size: int) -> range:
        """Return its bytes in a payload of `size` bytes that is laid out so; the same on all donors."""
        offsets = [entry["offset"] for entry in entries]
        start, stop = (
            next((offset for offset in offsets if offset >= size * cut // self.number), size)
            for cut in (self.place, self.place + 1)
        )
        return range(start, stop)


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Snapshot:
    """One rank's state after `step` committed updates, in host memory; or a part of it.

    Attributes:
        header: JSON text: step, lineage, scalars, and name, dtype, shape, offset of each tensor; of a part, too.
        payload: flat uint8. A GPU may still copy into it: who reads or overwrites it waits first (`wait`).
        part: what of the state is here.
        first: offset in the state of the payload's first byte.
        begun, copied: on the GPU's stream, around the copy; None = it was complete when it was made.
    """

    step: int
    lineage: int
    header: bytes
    payload: torch.Tensor
    part: Part = WHOLE
    first: int = 0
    begun: torch.Event | None = None
    copied: torch.Event | None = None

    def wait(self) -> None:
        """Let the host wait until the payload is complete; any thread."""
        device.synchronize([self.copied])

    @property
    def held(self) -> range:
        """Return the offsets in the state of the bytes that are here."""
        return range(self.first, self.first + self.payload.numel())

    @property
    def copy_seconds(self) -> float:
        """Return how long the GPU has copied, once it has; what is copied when it was made counts for the host."""
        return device.seconds_between(self.begun, self.copied)


@dataclass(frozen=True)
class _Parts:
    """What a copy is made of: the tensors with their names, and whether an optimizer has them on the host.

    `final` is when the device has made the state; what it computes with it since is nothing that a copy waits for.
    """

    step: int
    lineage: int
    tensors: list[tuple[str, torch.Tensor, bool]]
    scalars: dict[str, Any]
    final: torch.Event | None


class TrainState:
    """Reads, copies, hashes and overwrites the state of one rank. On the training thread, but for `copy_shared`.

    Args:
        model_parts: as torchtitan's Trainer holds them.
        optimizers: torchtitan's OptimizersContainer.
        lr_schedulers: torchtitan's LRSchedulersContainer.
        counters: the trainer's progress.
        on_load: called after each load, on all ranks of a group; what was computed from the weights is that of others.
        num_ranks: that share this host's memory.
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
        # The last copy, until training comes behind it, and what it reads: memory that nothing else may take yet.
        self._under_way: tuple[torch.Event | None, list[torch.Tensor]] | None = None
        # What another thread may copy, as it is behind the last update.
        self._shared: _Parts | None = None
        self._copying = threading.Lock()
        self.load_seconds = 0.0  # that the last load took; 0 = there was none
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._come_behind_copy())

    def reserve(self) -> None:
        """Have host memory for a copy pinned in the background, once; to be called when the optimizers have a state."""
        if not self._is_reserved:
            self._is_reserved = True
            self._memory.reserve(self.payload_bytes)

    def close(self) -> None:
        """Let go of the host memory; waits for a copy under way."""
        with self._copying:
            self._memory.close()

    def share(self, step: int, lineage: int) -> bool:
        """Let `copy_shared` copy the state, as it is now, until `unshare`; False if it may change before.

        A forward may write buffers, whenever it likes. And FSDP puts whole parameters in the place of shards meanwhile:
        what is to be copied is looked up now.
        """
        parts = self._parts(step, lineage)
        if any(name.startswith(_BUFFER) for name, _, _ in parts.tensors):
            return False
        self._shared = parts
        return True

    def unshare(self) -> None:
        """End that, for the state is about to change; waits for a copy under way."""
        if self._shared is not None:
            with self._copying:
                self._shared = None

    def copy_shared(self, step: int, part: Part = WHOLE) -> Snapshot | None:
        """Copy the state of `step` while training computes with it; None if it is not shared. Any thread.

        Training comes behind the copy, and not behind the memory for it, which may take seconds to pin.
        """
        shared = self._shared
        if shared is None or shared.step != step:
            return None
        part, payload = self._take_memory(shared, part)
        with self._copying:
            if self._shared is shared:
                return self._copy(shared, payload, part)
        self._memory.give_back(payload)
        return None

    def copy(self, step: int, lineage: int, part: Part = WHOLE) -> Snapshot:
        """Copy the state to host memory, as it is behind all that the training has queued.

        A GPU does so on a stream of its own, and the host goes on: the snapshot is to be waited for. An optimizer's
        next step waits on the GPU, and so does a load. On a CPU, and into memory that is not pinned, the copy is
        complete when this returns.

        Args:
            part: what is enough where the host's memory is scarce.
        """
        parts = self._parts(step, lineage)
        part, payload = self._take_memory(parts, part)
        with self._copying:
            return self._copy(parts, payload, part)

    def _take_memory(self, state: _Parts, part: Part) -> tuple[Part, torch.Tensor]:
        """Return what of the state is to be copied, and memory for it: `part` where memory is scarce, else all."""
        entries, size = _lay_out(state.tensors)
        if part != WHOLE and not self._memory.is_scarce(size):
            part = WHOLE
        return part, self._memory.take(len(part.of(entries, size)))

    def _parts(self, step: int, lineage: int) -> _Parts:
        tensors = list(self._tensors(self._optimizers))
        return _Parts(step, lineage, tensors, self._scalars(), device.record_event())

    @torch.no_grad()
    def _copy(self, state: _Parts, payload: torch.Tensor, part: Part = WHOLE) -> Snapshot:
        entries, size = _lay_out(state.tensors)
        held = part.of(entries, size)
        chosen = [number for number, entry in enumerate(entries) if entry["offset"] in held]
        shards = [device.local_shard(state.tensors[number][1]) for number in chosen]
        targets = [_view(payload, entries[number], held.start) for number in chosen]
        # A forward may write buffers (statistics of a norm), long before the optimizer's step: they are copied on the
        # training's stream.
        buffers = [entries[number]["name"].startswith(_BUFFER) for number in chosen]
        _copy_all(targets, shards, buffers)
        where, final = device.current(), device.record_event() if any(buffers) else state.final
        with device.side_stream(where, "copy"):
            device.wait_for(final, where)
            begun = device.record_time()
            _copy_all(targets, shards, [not buffer for buffer in buffers])
            copied = device.record_event(timed=True)
        self._under_way = (copied, shards)
        header = {
            "step": state.step,
            "lineage": state.lineage,
            "scalars": state.scalars,
            "tensors": entries,
            "bytes": size,
        }
        text = json.dumps(header, default=torch.Tensor.item, sort_keys=True)  # of equal states the same bytes
        return Snapshot(state.step, state.lineage, text.encode(), payload, part, held.start, begun, copied)

    def _come_behind_copy(self) -> None:
        """Let what the training queues from now on wait for the last copy: it may write what that reads."""
        self.unshare()
        if self._under_way is not None:
            copied, _ = self._under_way
            device.wait_for(copied, device.current())
            self._under_way = None

    @property
    def payload_bytes(self) -> int:
        """Return how large a copy of this rank's state is: what a joiner's rank fetches."""
        return _lay_out(list(self._tensors(self._optimizers)))[1]

    def reuse(self, snapshot: Snapshot) -> None:
        """Take back a snapshot that nobody reads any more: its memory serves the next copy."""
        snapshot.wait()  # the host writes there too, and a GPU that copies late would do so behind it
        self._memory.give_back(snapshot.payload)

    def load(self, snapshot: Snapshot) -> None:
        """Overwrite this rank's state with `snapshot`.

        Raises:
            StateMismatchError: the donor's state has other tensors or shapes than this rank's (another model, other
                parallel degrees or another optimizer).
        """
        snapshot.wait()
        began = time.monotonic()
        self._come_behind_copy()
        self._load(snapshot)
        # Not for the whole device: an exchange that waits for the other groups may be under way on it.
        device.synchronize([device.record_event()])
        self._on_load()
        self.load_seconds = time.monotonic() - began

    @torch.no_grad()
    def _load(self, snapshot: Snapshot) -> None:
        header = json.loads(snapshot.header)
        entries = {entry["name"]: entry for entry in header["tensors"]}
        for name, tensor in self._model_tensors():
            if (entry := entries.pop(name, None)) is None:
                raise StateMismatchError(f"the donor's state has no {name}; all groups must run the same config")
            self._check(entry, tensor)
            device.local_shard(tensor).copy_(_view(snapshot.payload, entry), non_blocking=True)
        self._load_optimizers(entries, snapshot.payload)
        self._load_scalars(header["scalars"])

    def restore(self) -> None:
        """Undo what training has made of the weights since the last update, if it has; on all ranks of a group."""
        self._on_load()

    @torch.no_grad()
    def digest(self) -> str:
        """Hash the bytes of parameters, buffers, optimizer state and LR of this rank.

        Each tensor is hashed where it lives, as a sum of its 64-bit lanes times odd position-dependent weights modulo
        2**64: any single changed bit changes the sum, and nothing but 8 bytes per tensor leaves the device.

        Returns:
            32 hex digits, equal on CPU and GPU for equal bytes.
        """
        names, values = hash_tensors((name, tensor) for name, tensor, _ in self._tensors(self._agreed))
        groups = [_plain(group) for optimizer in self._agreed for group in optimizer.param_groups]
        text = json.dumps([names, values, groups], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def _agreed(self) -> Any:
        """Return the first ones of the optimizers, those whose state all groups have alike."""
        return self._optimizers

    def _tensors(self, optimizers: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield (name, tensor, lives in host memory by choice of the optimizer) in a fixed order."""
        for name, tensor in self._model_tensors():
            yield name, tensor, False
        for number, optimizer in enumerate(optimizers):
            for index, parameter in enumerate(_parameters(optimizer)):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    assert isinstance(value, torch.Tensor), f"optimizer state {key} is no tensor"
                    on_host = value.device.type == "cpu" and parameter.device.type != "cpu"
                    yield f"optimizer/{number}/{index}/{key}", value, on_host

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, part in enumerate(self._model_parts):
            for name, parameter in part.named_parameters():
                yield f"model/{number}/{name}", parameter
            for prefix, module in part.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        yield f"{_BUFFER}{number}/{prefix}.{name}", buffer

    def _scalars(self) -> dict[str, Any]:
        return {
            "param_groups": [[_plain(group) for group in optimizer.param_groups] for optimizer in self._optimizers],
            "lr_schedulers": self._lr_schedulers.state_dict(),
            "counters": self._counters.state_dict(),
        }

    def _load_scalars(self, scalars: dict[str, Any]) -> None:
        # The schedulers first: the param groups then say what LR the next update really uses.
        self._lr_schedulers.load_state_dict(scalars["lr_schedulers"])
        for optimizer, groups in zip(self._optimizers, scalars["param_groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    if isinstance(group[key], torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(group[key], tuple) else value
        self._counters.load_state_dict(scalars["counters"])

    def _load_optimizers(self, entries: dict[str, dict[str, Any]], payload: torch.Tensor) -> None:
        """Rebuild each optimizer's state from what is left in `entries`: a fresh optimizer has none of its own yet."""
        by_parameter: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for name, entry in entries.items():
            prefix, _, key = name.rpartition("/")
            by_parameter[prefix][key] = entry
        for number, optimizer in enumerate(self._optimizers):
            for index, parameter in enumerate(_parameters(optimizer)):
                state = {
                    key: like(
                        parameter,
                        _view(payload, entry).to(
                            "cpu" if entry["on_host"] else parameter.device, copy=True, non_blocking=True
                        ),
                    )
                    for key, entry in by_parameter.pop(f"optimizer/{number}/{index}", {}).items()
                }
                if state:
                    optimizer.state[parameter] = state
                else:  # an empty entry would look like a state to torch's checkpoints
                    optimizer.state.pop(parameter, None)
        if by_parameter:
            name = min(f"{prefix}/{key}" for prefix, keys in by_parameter.items() for key in keys)
            raise StateMismatchError(
                f"the donor's state has {name}, which this rank lacks; all groups must run the same config"
            )

    @staticmethod
    def _check(entry: dict[str, Any], tensor: torch.Tensor) -> None:
        shard = device.local_shard(tensor)
        found = (entry["dtype"], entry["shape"])
        expected = (str(shard.dtype).removeprefix("torch."), list(shard.shape))
        if found != expected:
            raise StateMismatchError(
                f"the donor's {entry['name']} is {found}, this rank's is {expected}; all groups must run the same "
                "config with the same number of ranks"
            )


def _lay_out(tensors: list[tuple[str, torch.Tensor, bool]]) -> tuple[list[dict[str, Any]], int]:
    """Return where each tensor of a state is in its payload, and the payload's bytes."""
    entries, size = [], 0
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
        size += -(-shard.numel() * shard.element_size() // _ALIGNMENT) * _ALIGNMENT
    return entries, size


def _copy_all(targets: list[torch.Tensor], shards: list[torch.Tensor], chosen: list[bool]) -> None:
    """Queue copies of those shards that are chosen."""
    for target, shard in zip(compress(targets, chosen), compress(shards, chosen), strict=True):
        target.copy_(shard, non_blocking=True)


def _view(payload: torch.Tensor, entry: dict[str, Any], first: int = 0) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    size = dtype.itemsize
    for length in entry["shape"]:
        size *= length
    return payload[entry["offset"] - first :][:size].view(dtype).view(entry["shape"])


def like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Give a state shard the sharding of its parameter; scalars such as Adam's step are no DTensors."""
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


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group's hyperparameters as JSON values."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _to_host(scalars: list[torch.Tensor]) -> list[int]:
    """Bring scalars to the host with one copy per device."""
    result = [0] * len(scalars)
    for where in {scalar.device for scalar in scalars}:
        places = [place for place, scalar in enumerate(scalars) if scalar.device == where]
        values = torch.stack([scalars[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            result[place] = value
    return result


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[list[Any]], list[int]]:
    """Hash the bytes of this rank's shards where they live.

    Returns:
        Name, dtype and shape of each shard, and the 64-bit hash of its bytes; see `TrainState.digest`.
    """
    names, shards = [], []
    for name, tensor in tensors:
        shard = device.local_shard(tensor)
        names.append([name, str(shard.dtype), list(shard.shape)])
        shards.append(shard)
    return names, _to_host(_lane_sums(shards))


def _lane_sums(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each shard the sum of its 64-bit lanes times odd weights, modulo 2**64: an int64 on its device."""
    sums: dict[int, torch.Tensor] = {}
    weights: dict[torch.device, torch.Tensor] = {}
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for number, shard in enumerate(shards):
        if shard.numel() == 1 and shard.element_size() <= _LANE_BYTES:
            alike[shard.device, shard.dtype].append(number)
    for where in {shard.device for shard in shards}:
        lanes = max(-(-shard.nbytes // _LANE_BYTES) for shard in shards if shard.device == where)
        weights[where] = _make_weights(min(max(lanes, 1), _HASH_CHUNK), where)
    for (where, _), numbers in alike.items():
        # Adam has a step for each parameter. One by one they would take as long as all that is large.
        octets = torch.stack([shards[number].reshape(()) for number in numbers]).view(torch.uint8)
        octets = octets.view(len(numbers), -1)
        padded = torch.nn.functional.pad(octets, (0, _LANE_BYTES - octets.shape[1]))
        products = padded.view(torch.int64).view(-1) * weights[where][0]
        sums.update(zip(numbers, products.unbind(), strict=True))
    for number, shard in enumerate(shards):
        if number not in sums:
            sums[number] = _lane_sum(shard, weights[shard.device])
    return [sums[number] for number in range(len(shards))]


def _lane_sum(shard: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of one shard; `weights` are those of its lanes, or of a whole chunk."""
    octets = shard.contiguous().view(-1).view(torch.uint8)
    if odd := octets.numel() % _LANE_BYTES:
        octets = torch.cat([octets, octets.new_zeros(_LANE_BYTES - odd)])
    lanes = octets.view(torch.int64) if octets.data_ptr() % _LANE_BYTES == 0 else octets.clone().view(torch.int64)
    if lanes.numel() <= _HASH_CHUNK:
        return _weigh(lanes, weights)
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for number, chunk in enumerate(lanes.split(_HASH_CHUNK)):
        total += _weigh(chunk, weights) * (2 * number + 1)
    return total


def _weigh(lanes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights[: lanes.numel()]
    if lanes.device.type == "cpu":
        return torch.dot(lanes, weights)  # in one pass; a GPU has no such product of integers
    return (lanes * weights).sum()


def _make_weights(number: int, where: torch.device) -> torch.Tensor:
    weights = torch.arange(number, device=where)
    return weights.mul_(0x5851F42D4C957F2D).add_(0x14057B7EF767814F).bitwise_or_(1)  # Knuth's MMIX multiplier, made odd
