# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a heal: its copy, its digest, and loads that give the same bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.protocol.errors import StateMismatchError
from titan_ft.transfer import host_memory
from titan_ft.transfer import snapshot as snapshots
from titan_ft.transfer.snapshot import _HASH_CHUNK, Part, Snapshot, TrainState, hash_tensors

Tiny = Callable[..., Any]

KINDS = [
    pytest.param({}, id="float32"),
    pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
    pytest.param({"shard": True}, id="fsdp"),
    pytest.param({"amsgrad": True, "foreach": False}, id="amsgrad"),
]


def bytes_of(training: Any) -> list[bytes]:
    """Return the bytes of parameters, persistent buffers and optimizer state.

    Without the code under test.
    """
    tensors: list[torch.Tensor] = [*training.model.parameters()]
    tensors += [b for n, b in training.model.named_buffers() if n != "scratch"]
    for optimizer in training.optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [
        device.local_shard(t).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]


def header_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot's header as values."""
    return json.loads(snapshot.header)


def with_header(snapshot: Snapshot, header: dict[str, Any]) -> Snapshot:
    """Return the snapshot under another header."""
    return dataclasses.replace(snapshot, header=json.dumps(header).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_group_becomes_the_donor(tiny: Tiny, world: None, kind: dict[str, Any]) -> None:
    """A fresh model whose optimizer has no state yet takes over everything.

    Bytes, digest, LR and counters are equal. Three further steps on each side then give equal
    losses and bytes. So no value that controls an update is missing.
    """
    donor, joiner = tiny(seed=1, **kind), tiny(seed=2, **kind)
    donor.train(4)
    assert joiner.state.digest() != donor.state.digest()

    joiner.state.load(donor.state.copy(4, 77))
    joiner.step = 4

    assert bytes_of(joiner) == bytes_of(donor)
    assert joiner.state.digest() == donor.state.digest()
    assert joiner.counters.tokens == donor.counters.tokens == 48
    assert joiner.lr_schedulers.state_dict() == donor.lr_schedulers.state_dict()
    before = joiner.state.digest()
    assert joiner.train(3) == donor.train(3)
    assert bytes_of(joiner) == bytes_of(donor)
    assert joiner.state.digest() == donor.state.digest() != before
    group, donors = (
        joiner.optimizers.optimizers[0].param_groups[0],
        donor.optimizers.optimizers[0].param_groups[0],
    )
    assert {key: group[key] for key in group if key != "params"} == {
        key: donors[key] for key in group if key != "params"
    }


def test_a_group_that_has_trained_becomes_the_donor(tiny: Tiny) -> None:
    """A group that already has a state, such as a stray, loses every byte of it."""
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.train(2)
    joiner.train(6)
    joiner.state.load(donor.state.copy(2, 0))
    joiner.step = 2
    assert joiner.state.digest() == donor.state.digest()
    assert joiner.train(3) == donor.train(3)
    assert bytes_of(joiner) == bytes_of(donor)


def test_what_depends_on_the_weights_is_made_again_from_those_that_were_loaded(tiny: Tiny) -> None:
    """`on_load` is called once for each load, after it.

    Otherwise float8's scales would be outdated.
    """
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.train(2)
    seen: list[str] = []
    state = TrainState(
        [joiner.model],
        joiner.optimizers,
        joiner.lr_schedulers,
        joiner.counters,
        on_load=lambda: seen.append(joiner.state.digest()),
    )
    state.load(donor.state.copy(2, 0))
    assert seen == [donor.state.digest()]


def test_a_state_before_the_first_update_can_be_loaded(tiny: Tiny) -> None:
    """The donor has no optimizer state, and the joiner drops its own."""
    donor, joiner = tiny(seed=1), tiny(seed=2)
    joiner.train(2)
    joiner.state.load(donor.state.copy(0, 0))
    joiner.step = 0
    assert joiner.state.digest() == donor.state.digest()
    assert joiner.train(2) == donor.train(2)


def test_a_hyperparameter_that_is_a_tensor_stays_one(tiny: Tiny) -> None:
    """Capturable optimizers have tensors in param groups.

    The joiner's tensor gets the donor's value.
    """
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.train(3)
    values = [torch.tensor(0.25, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)]
    for training, value in zip((donor, joiner), values, strict=True):
        training.optimizers.optimizers[0].param_groups[0]["lr"] = value
    joiner.state.load(donor.state.copy(3, 0))
    assert joiner.optimizers.optimizers[0].param_groups[0]["lr"] is values[1]
    assert values[1] == values[0] == 0.25
    assert joiner.state.digest() == donor.state.digest()


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_is_no_alias(tiny: Tiny, world: None, kind: dict[str, Any]) -> None:
    """Later training does not change the copy: the donor trains on while the copy is served."""
    donor = tiny(seed=1, **kind)
    donor.train(2)
    digest, state = donor.state.digest(), bytes_of(donor)
    snapshot = donor.state.copy(2, 0)
    payload = snapshot.payload.clone()
    donor.train(2)
    assert bytes_of(donor) != state
    assert torch.equal(snapshot.payload, payload)
    joiner = tiny(seed=2, **kind)
    joiner.state.load(snapshot)
    assert joiner.state.digest() == digest


def test_what_was_loaded_is_no_alias(tiny: Tiny) -> None:
    """Overwriting a loaded snapshot changes nothing, because its memory may be used again."""
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.train(2)
    snapshot = donor.state.copy(2, 0)
    joiner.state.load(snapshot)
    snapshot.payload.fill_(255)
    assert joiner.state.digest() == donor.state.digest()


def test_the_copy_says_what_it_is(tiny: Tiny) -> None:
    """Step and lineage are in the snapshot and in the header that travels with it."""
    snapshot = tiny(seed=1).state.copy(12, 2**48 - 1)
    header = header_of(snapshot)
    assert (
        (snapshot.step, snapshot.lineage) == (header["step"], header["lineage"]) == (12, 2**48 - 1)
    )
    assert header["bytes"] == snapshot.payload.numel()
    assert snapshot.payload.dtype == torch.uint8


def test_buffers_that_are_not_saved_do_not_heal(tiny: Tiny) -> None:
    """A non-persistent buffer, at any depth, is neither copied nor overwritten.

    It is no part of the digest.
    """
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.train(1)
    snapshot = donor.state.copy(1, 0)
    names = [entry["name"] for entry in header_of(snapshot)["tensors"]]
    assert not [name for name in names if "scratch" in name]
    assert [name for name in names if name.endswith(("passes", "mask"))] == [
        "buffer/0/.passes",
        "buffer/0/inner.mask",
    ]
    digest = donor.state.digest()
    donor.model.scratch.fill_(5.0)
    joiner.model.scratch.fill_(3.0)
    joiner.state.load(snapshot)
    assert joiner.model.scratch.tolist() == [3.0] * 3
    assert joiner.state.digest() == donor.state.digest() == digest


def test_tensors_are_aligned_for_every_dtype(tiny: Tiny) -> None:
    """Each tensor starts at a multiple of 64 bytes, so that a view of any dtype is possible."""
    donor = tiny(seed=1, dtype=torch.bfloat16)
    donor.train(1)
    entries = header_of(donor.state.copy(1, 0))["tensors"]
    assert {entry["dtype"] for entry in entries} >= {"bfloat16", "float32", "int64", "bool"}
    assert [entry["offset"] % 64 for entry in entries] == [0] * len(entries)


def test_memory_of_a_returned_copy_is_used_again(tiny: Tiny) -> None:
    """The next copy uses the memory of a returned copy, and never that of another one."""
    donor = tiny(seed=1)
    donor.train(1)
    first = donor.state.copy(1, 0)
    second = donor.state.copy(1, 0)
    assert second.payload.data_ptr() != first.payload.data_ptr()
    donor.state.reuse_memory(first)
    donor.train(1)
    third = donor.state.copy(2, 0)
    assert third.payload.data_ptr() == first.payload.data_ptr()
    joiner = tiny(seed=2)
    joiner.state.load(third)
    assert joiner.state.digest() == donor.state.digest()
    assert donor.state.copy(2, 0).payload.data_ptr() != third.payload.data_ptr()


def leave(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    """Give the host this much free memory."""
    monkeypatch.setattr(host_memory, "free_bytes", lambda: num_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 2, 3, 7, 50])
def test_where_memory_is_scarce_donors_copy_parts(
    tiny: Tiny, world: None, kind: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts together are the state, each byte once, with one header.

    They have about equal sizes.
    """
    donor, joiner = tiny(seed=1, **kind), tiny(seed=2, **kind)
    donor.train(2)
    whole = donor.state.copy(2, 77)
    size = whole.payload.numel()
    leave(monkeypatch, 2 * size - 2)
    parts = [donor.state.copy(2, 77, Part(place, number)) for place in range(number)]
    assert {part.header for part in parts} == {whole.header}
    assert [part.byte_range.start for part in parts] == [
        0,
        *(part.byte_range.stop for part in parts[:-1]),
    ]
    offsets = [entry["offset"] for entry in header_of(whole)["tensors"]]
    largest = max(after - before for before, after in pairwise([*offsets, size]))
    assert all(len(part.byte_range) <= size / number + largest for part in parts)
    joined = torch.cat([part.payload for part in parts])
    joiner.state.load(dataclasses.replace(whole, payload=joined))
    assert joiner.state.digest() == donor.state.digest()
    assert bytes_of(joiner) == bytes_of(donor)


def test_where_memory_is_not_scarce_a_donor_copies_all(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so if half of the free memory suffices for all ranks, is unknown, or is at hand."""
    donor = tiny(seed=1)
    donor.train(1)
    size = donor.state.payload_bytes
    for free in (2 * size, None):
        leave(monkeypatch, free)
        copied = donor.state.copy(1, 0, Part(1, 3))
        assert copied.byte_range == range(size)
    donor.state.reuse_memory(copied)
    leave(monkeypatch, 0)
    assert donor.state.copy(1, 0, Part(1, 3)).byte_range == range(size)


def test_a_shared_state_is_copied_in_parts_where_memory_is_scarce(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a joiner's donors copies its own part."""
    donor = tiny(seed=1, buffers=False)
    donor.train(1)
    size = donor.state.payload_bytes
    for free, whole in ((2 * size, True), (2 * size - 1, False)):
        leave(monkeypatch, free)
        assert donor.state.allow_copying(1, 0)
        parts = [donor.state.copy_if_allowed(1, Part(place, 2)) for place in range(2)]
        held = [None if part is None else part.byte_range for part in parts]
        if whole:
            assert held == [range(size)] * 2
        else:
            first, second = held
            assert first is not None
            assert second is not None
            assert (first.start, first.stop, second.stop) == (0, second.start, size)
            assert 0 < len(first) < size


def test_a_shared_state_is_copied_by_another_thread_until_the_next_update(tiny: Tiny) -> None:
    """The bytes, counters and parameters are those at the time of sharing.

    Reading counts tokens for a moment, and FSDP replaces its shards by whole parameters.
    """
    donor, joiner = tiny(seed=1, buffers=False), tiny(seed=2, buffers=False)
    donor.train(1)
    before, digest = donor.state.copy(1, 55), donor.state.digest()
    assert donor.state.copy_if_allowed(1) is None
    assert donor.state.allow_copying(1, 55)
    donor.counters.tokens += 1000
    weight = donor.model.inner[0].weight
    donor.model.inner[0].weight = torch.nn.Parameter(torch.zeros(7, 7))
    with ThreadPoolExecutor(1) as thread:
        shared = thread.submit(donor.state.copy_if_allowed, 1).result()
        assert thread.submit(donor.state.copy_if_allowed, 2).result() is None
        assert (shared.step, shared.lineage, shared.header) == (1, 55, before.header)
        joiner.state.load(shared)
        assert joiner.state.digest() == digest
        donor.model.inner[0].weight = weight
        donor.train(1)
        assert thread.submit(donor.state.copy_if_allowed, 1).result() is None
        assert donor.state.allow_copying(2, 56)
        donor.state.load(before)
        assert thread.submit(donor.state.copy_if_allowed, 2).result() is None


def test_an_update_waits_for_no_memory_that_another_threads_copy_takes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning takes seconds. There is no copy in this case, and the next copy gets the memory."""
    donor = tiny(seed=1, buffers=False)
    donor.train(1)
    donor.state.allow_copying(1, 55)
    begun, goes_on, taken = threading.Event(), threading.Event(), list[torch.Tensor]()

    def slowly(numel: int, dtype: torch.dtype) -> torch.Tensor:
        begun.set()
        assert goes_on.wait(20)
        taken.append(torch.empty(numel, dtype=dtype))
        return taken[-1]

    monkeypatch.setattr(device, "empty_host", slowly)
    with ThreadPoolExecutor(1) as thread:
        copied = thread.submit(donor.state.copy_if_allowed, 1)
        assert begun.wait(20)
        donor.train(1)  # returns
        goes_on.set()
        assert copied.result() is None
    assert donor.state.copy(2, 56).payload is taken[0]
    assert len(taken) == 1


def test_an_update_waits_for_another_threads_copy(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the copy would contain half of the update."""
    donor, joiner = tiny(seed=1, buffers=False), tiny(seed=2, buffers=False)
    donor.train(1)
    digest = donor.state.digest()
    donor.state.allow_copying(1, 55)
    begun, goes_on = threading.Event(), threading.Event()
    queue_copies = snapshots._queue_copies

    def slowly(*args: Any) -> None:
        begun.set()
        assert goes_on.wait(20)
        queue_copies(*args)

    monkeypatch.setattr(snapshots, "_queue_copies", slowly)
    with ThreadPoolExecutor(2) as threads:
        copied = threads.submit(donor.state.copy_if_allowed, 1)
        assert begun.wait(20)
        trained = threads.submit(donor.train, 1)
        time.sleep(0.2)  # longer than the step takes
        assert not trained.done()
        goes_on.set()
        joiner.state.load(copied.result(20))
        trained.result(20)
    assert joiner.state.digest() == digest


def test_a_state_with_buffers_is_not_shared(tiny: Tiny) -> None:
    """A forward may write buffers at any time."""
    donor = tiny(seed=1)
    donor.train(1)
    assert not donor.state.allow_copying(1, 55)
    assert donor.state.copy_if_allowed(1) is None


def test_memory_of_another_size_is_not_used_again(tiny: Tiny) -> None:
    """A copy from before the optimizer had state is too small for the next one."""
    donor, joiner = tiny(seed=1), tiny(seed=2)
    donor.state.reuse_memory(donor.state.copy(0, 0))
    donor.train(1)
    joiner.state.load(donor.state.copy(1, 0))
    assert joiner.state.digest() == donor.state.digest()


# The digest


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    """Flip one bit of a tensor's bytes."""
    octets = device.local_shard(tensor).detach().view(-1).view(torch.uint8)
    octets[byte % octets.numel()] ^= 1 << bit


def adam(training: Any, key: str) -> torch.Tensor:
    """Return a part of the last parameter's optimizer state."""
    optimizer = training.optimizers.optimizers[0]
    return optimizer.state[optimizer.param_groups[0]["params"][-1]][key]


CHANGES: dict[str, Callable[[Any], None]] = {
    "lowest bit of a parameter": lambda t: flip(t.model.embedding.weight, 0, 0),
    "highest bit of a parameter": lambda t: flip(t.model.embedding.weight, -1, 7),
    "bit of a scalar parameter": lambda t: flip(t.model.scale, 2, 3),
    "bit of exp_avg": lambda t: flip(adam(t, "exp_avg"), 1, 1),
    "bit of exp_avg_sq": lambda t: flip(adam(t, "exp_avg_sq"), 3, 0),
    "bit of Adam's step": lambda t: flip(adam(t, "step"), 0, 0),
    "bit of a buffer": lambda t: flip(t.model.passes, 5, 2),
    "element of a mask": lambda t: t.model.inner.mask.logical_not_(),
    "LR": lambda t: t.optimizers.optimizers[0].param_groups[0].update(lr=0.0020000000000000005),
    "beta": lambda t: t.optimizers.optimizers[0].param_groups[0].update(betas=(0.9, 0.951)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("kind", KINDS[:3])
def test_one_bit_changes_the_digest(
    tiny: Tiny, world: None, kind: dict[str, Any], change: Callable[[Any], None]
) -> None:
    """A flipped bit anywhere in the state changes the digest.

    Flipped back, the digest is the former one.
    """
    training = tiny(seed=1, **kind)
    training.train(1)
    digest = training.state.digest()
    assert training.state.digest() == digest
    change(training)
    assert training.state.digest() != digest


def test_the_digest_knows_positions(tiny: Tiny) -> None:
    """Two swapped elements, and two swapped tensors of the same shape, give other digests."""
    training = tiny(seed=1)
    training.train(1)
    digest = training.state.digest()
    with torch.no_grad():
        weight = training.model.embedding.weight
        weight[:, :2] = weight[:, :2].flip(1)
        swapped = training.state.digest()
        weight[:, :2] = weight[:, :2].flip(1)
        assert training.state.digest() == digest != swapped
        norm, bias = training.model.inner[1].weight, training.model.inner[1].bias
        norm.data, bias.data = bias.data, norm.data
    assert training.state.digest() != digest


def test_the_digest_does_not_know_the_order_of_optimizer_state(tiny: Tiny) -> None:
    """Two groups may have created the parts of an optimizer state in different orders."""
    training = tiny(seed=1)
    training.train(1)
    digest = training.state.digest()
    optimizer = training.optimizers.optimizers[0]
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = dict(reversed(state.items()))
    assert training.state.digest() == digest


def lane_sum(tensor: torch.Tensor) -> int:
    """Return the hash of one tensor's bytes."""
    return hash_tensors([("name", tensor)])[1][0]


def test_the_digest_is_of_bytes_not_of_values() -> None:
    """Zero and minus zero compare equal, but are different states."""
    zeros = torch.zeros(3)
    assert lane_sum(zeros) != lane_sum(-zeros)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 64, 8 * _HASH_CHUNK - 1, 8 * _HASH_CHUNK + 9])
def test_every_byte_of_any_length_counts(numel: int) -> None:
    """For sizes that fill no lane or no chunk, the first, last and middle byte change the sum."""
    octets = torch.arange(numel, dtype=torch.int64).mul_(31).to(torch.uint8)
    total = lane_sum(octets)
    for place in {0, numel // 2, numel - 1} if numel else set():
        octets[place] ^= 0x10
        assert lane_sum(octets) != total
        octets[place] ^= 0x10
    assert lane_sum(octets) == total


def test_chunks_cannot_be_swapped() -> None:
    """Two chunks in another order give another sum."""
    lanes = torch.randint(2**62, (3 * _HASH_CHUNK,), generator=torch.Generator().manual_seed(0))
    first, second, third = lanes.split(_HASH_CHUNK)
    orders = [
        (first, second, third),
        (second, first, third),
        (first, third, second),
        (third, second, first),
    ]
    assert len({lane_sum(torch.cat(order)) for order in orders}) == len(orders)


def test_the_lane_sum_is_what_its_docstring_says() -> None:
    """It equals the sum of lanes times odd position-dependent weights modulo 2**64, made in
    Python.
    """
    lanes = [3, 2**63 - 1, -5, 2**40 + 1]
    weights = [(n * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1 for n in range(4)]
    expected = sum(lane * weight for lane, weight in zip(lanes, weights, strict=True)) % 2**64
    assert lane_sum(torch.tensor(lanes)) % 2**64 == expected


def test_the_sum_of_a_tensor_does_not_depend_on_those_beside_it() -> None:
    """Scalars are hashed together, and all tensors share the weights of the largest one."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float32]
    tensors = [torch.tensor(number + 0.5).to(dtype) for number, dtype in enumerate(dtypes)]
    tensors += [torch.arange(9.0), torch.empty(0), torch.tensor([1 + 2j], dtype=torch.complex128)]
    together = hash_tensors((str(number), tensor) for number, tensor in enumerate(tensors))[1]
    assert together == [lane_sum(tensor) for tensor in tensors]
    weight = 0x14057B7EF767814F
    assert together[0] % 2**64 == int.from_bytes(struct.pack("<f", 0.5), "little") * weight % 2**64


def test_memory_layout_does_not_matter() -> None:
    """Equal elements at unaligned addresses or in another memory layout give equal sums."""
    matrix = torch.arange(35, dtype=torch.int16).view(5, 7)
    unaligned = torch.zeros(36, dtype=torch.int16)[1:].view(5, 7)
    unaligned.copy_(matrix)
    assert unaligned.data_ptr() % 8 != 0
    assert (lane_sum(unaligned)) == (lane_sum(matrix))
    assert (lane_sum(matrix.t().contiguous().t())) == (lane_sum(matrix))


# Shards


def test_sharded_optimizer_state_gets_the_sharding_of_its_parameter(
    tiny: Tiny, world: None
) -> None:
    """On a fresh FSDP model, moments arrive as DTensors like their parameter.

    Adam's step arrives as a plain scalar.
    """
    donor, joiner = tiny(seed=1, shard=True), tiny(seed=2, shard=True)
    donor.train(1)
    joiner.state.load(donor.state.copy(1, 0))
    optimizer = joiner.optimizers.optimizers[0]
    for parameter in optimizer.param_groups[0]["params"]:
        assert isinstance(parameter, DTensor)
        state = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor)
            assert state[key].placements == parameter.placements
            assert state[key].shape == parameter.shape
        assert not isinstance(state["step"], DTensor)
        assert state["step"].shape == ()


# States that do not fit


def check_refused(tiny: Tiny, snapshot: Snapshot, *fragments: str) -> None:
    """Check that a load is refused with a message that contains all fragments."""
    with pytest.raises(StateMismatchError) as caught:
        tiny(seed=2).state.load(snapshot)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.fixture
def snapshot(tiny: Tiny) -> Snapshot:
    """Provide the state of a donor after a step."""
    donor = tiny(seed=1)
    donor.train(1)
    return donor.state.copy(1, 0)


def test_a_tensor_of_another_shape_is_named(tiny: Tiny, snapshot: Snapshot) -> None:
    """Another width of the model is refused, with name and both shapes."""
    header = header_of(snapshot)
    entry = next(
        entry for entry in header["tensors"] if entry["name"] == "model/0/embedding.weight"
    )
    entry["shape"] = [11, 3]
    check_refused(
        tiny, with_header(snapshot, header), "model/0/embedding.weight", "[11, 3]", "[11, 6]"
    )


def test_a_tensor_of_another_dtype_is_named(tiny: Tiny) -> None:
    """Another training dtype is refused, with name and both dtypes."""
    check_refused(
        tiny, tiny(seed=1, dtype=torch.bfloat16).state.copy(0, 0), "model/0/", "bfloat16", "float32"
    )


def test_a_tensor_that_the_donor_lacks_is_named(tiny: Tiny, snapshot: Snapshot) -> None:
    """A parameter that the donor's model lacks is named."""
    header = header_of(snapshot)
    header["tensors"] = [
        entry for entry in header["tensors"] if entry["name"] != "model/0/inner.0.bias"
    ]
    check_refused(tiny, with_header(snapshot, header), "model/0/inner.0.bias")


def test_a_tensor_that_the_joiner_lacks_is_named(tiny: Tiny, snapshot: Snapshot) -> None:
    """A parameter that the joiner's model lacks is named."""
    header = header_of(snapshot)
    header["tensors"].append({**header["tensors"][0], "name": "model/0/extra.weight"})
    check_refused(tiny, with_header(snapshot, header), "model/0/extra.weight")


def test_a_part_that_the_joiner_lacks_is_named(tiny: Tiny, snapshot: Snapshot) -> None:
    """The donor has one more optimizer, as with another pipeline degree. Its state is named."""
    header = header_of(snapshot)
    header["tensors"].append({**header["tensors"][-1], "name": "optimizer/1/0/exp_avg"})
    check_refused(tiny, with_header(snapshot, header), "optimizer/1/0")


def test_optimizer_state_that_is_no_tensor_is_our_bug() -> None:
    """Such state would not heal. So the copy fails."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["mood"] = "good"
    state = TrainState([model], [optimizer], None, None)  # type: ignore[arg-type]  # not reached
    with pytest.raises(AssertionError, match="mood"):
        state.copy(0, 0)
