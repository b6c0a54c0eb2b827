# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank's links to the other groups: the shape of its group, its address, its end with silent
ranks.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import titan_ft
from titan_ft.host import cpu

cpu.prepare()

from torchtitan.distributed import ParallelDims  # noqa: E402

from titan_ft.config import FaultTolerance  # noqa: E402
from titan_ft.gradients.exchange import HookCalls  # noqa: E402
from titan_ft.membership.control_tree import ControlTree  # noqa: E402
from titan_ft.membership.group_collectives import GroupCollectives  # noqa: E402
from titan_ft.protocol.control.node import LostRank  # noqa: E402
from titan_ft.run.error_file import FILE_ENV, read_error  # noqa: E402
from titan_ft.run.events import Event, RankSilent  # noqa: E402
from titan_ft.run.log import EventLog  # noqa: E402
from titan_ft.system.threads import call_aside  # noqa: E402
from titan_ft.training import links  # noqa: E402
from titan_ft.training.links import _describe_group  # noqa: E402

DEADLINE = 20.0  # seconds; only ever reached by a bug


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TwoRanks(GroupCollectives):
    """A group whose other rank reports `other`."""

    def __init__(self, other: int) -> None:
        self.other = other

    def gather(self, value: int) -> list[int]:
        return [value, self.other]


def shape(*parts: nn.Module, group: GroupCollectives | None = None, **degrees: int) -> str:
    dims = ParallelDims(
        **{
            "dp_replicate": 1,
            "dp_shard": 1,
            "cp": 1,
            "tp": 1,
            "pp": 1,
            "ep": 1,
            "etp": 1,
            "world_size": 1,
            **degrees,
        }
    )
    return _describe_group(dims, parts, group or GroupCollectives(torch.device("cpu"), None))


def test_the_same_model_has_the_same_shape() -> None:
    """The shape includes the number of ranks, their arrangement and the model."""
    one, other = shape(nn.Linear(2, 3)), shape(nn.Linear(2, 3))
    assert one == other
    ranks, *facts = one.split(";")
    assert ranks == "1r"
    assert {
        f"torch={metadata.version('torch')}",
        "torchtitan=0.2.2",
        f"titan_ft={titan_ft.__version__}",
    } < set(facts)


def test_the_mesh_is_told() -> None:
    """Without degrees of 1; with the resolved value of a -1."""
    assert shape(nn.Linear(2, 3), dp_shard=-1, tp=2, world_size=4).startswith("1r.dp_shard2.tp2;")


@pytest.mark.parametrize(
    "other",
    [
        nn.ModuleDict(
            {"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)}
        ),  # another order of parameters of the same sizes
        nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(2, 2)}),  # as many numbers in all
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).bfloat16()}),
        nn.ModuleDict(
            {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).requires_grad_(requires_grad=False)}
        ),
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)}),
    ],
)
def test_another_model_has_another_shape(other: nn.Module) -> None:
    """Order, sizes, dtypes and which parameters are trained: whatever decides the exchange's
    buffers.
    """
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert shape(model) != shape(other)


def test_load_balancing_is_part_of_the_shape() -> None:
    """Its counts travel with the gradients: a group without it would send shorter buckets."""

    def experts(coeff: float | None) -> nn.Module:
        model = nn.Linear(2, 3)
        model.load_balance_coeff = coeff  # type: ignore[assignment]
        model.register_buffer("tokens_per_expert", torch.zeros(4))
        return model

    assert shape(experts(None)) == shape(nn.Linear(2, 3)) != shape(experts(1e-3))


def test_every_rank_counts() -> None:
    """Two groups with equal ranks 0 differ if their ranks 1 do."""
    model = nn.Linear(2, 3)
    assert (
        shape(model, group=TwoRanks(1))
        == shape(model, group=TwoRanks(1))
        != shape(model, group=TwoRanks(2))
    )


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("method", "overlap"), [(None, True), ("diloco", False)])
@pytest.mark.parametrize("microbatches", [0, 4])
def test_the_exchange_overlaps_with_the_backward(
    monkeypatch: pytest.MonkeyPatch,
    method: str | None,
    overlap: bool,
    microbatches: int,
    quantize: bool,
) -> None:
    """A pipeline calls autograd's hooks for each microbatch; what a semi-synchronous method
    exchanges has none.
    """
    built: dict[str, Any] = {}
    monkeypatch.setattr(links, "GradientExchange", lambda *_, **settings: built.update(settings))
    config = FaultTolerance(enable=True, semi_sync_method=method, should_quantize=quantize)
    this: Any = SimpleNamespace(_config=config, membership=None)
    model = nn.Linear(2, 3)

    def build(model: nn.Module) -> None:
        links.Links._build_exchange(this, model.parameters(), [0, 1], [model], 0.5, microbatches)

    build(model)
    assert (built["fragments"], built["gradient_scale"], built["overlap"]) == ([0, 1], 0.5, overlap)
    assert built["hook_calls"] == (microbatches or HookCalls.ONE)
    monkeypatch.setattr(links, "FSDPModule", nn.Linear)
    build(model)
    expected = 1 if microbatches else HookCalls.ONE
    assert built["hook_calls"] == expected, "FSDP reduces the sum over all microbatches"
    assert built["quantize"] == (quantize and method == "diloco")
    assert built["dtype"] is torch.float32
    config.exchange_dtype = "bfloat16"
    build(model)
    assert built["dtype"] is torch.bfloat16


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_state_is_encrypted_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """What the setting says is what a joiner meets at the port."""
    monkeypatch.setattr(links, "_describe_group", lambda *_: "")
    for name in ("_build_membership", "_build_exchange"):
        monkeypatch.setattr(links.Links, name, lambda *_: None)
    config = FaultTolerance(enable=True, transfer_tls=is_asked, advertise_address="127.0.0.1")
    no: Any = None
    launch: Any = SimpleNamespace(token="a shared secret", rank=1)
    what: dict[str, Any] = {
        "exchanged": [],
        "fragments": [],
        "gradient_scale": 1.0,
        "num_microbatches": 0,
    }
    server = links.Links(config, launch, no, [], no, no, no, no, **what).server
    try:
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as joiner:
            assert (b'"tls":true' in joiner.recv(4096)) == is_asked
    finally:
        server.close()


def test_ranks_of_a_later_attempt_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store outlives an attempt: a rank must not find the former attempt's rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    config = FaultTolerance(enable=True, replica_id=3)

    def connect(rank: int, attempt: int) -> Future[ControlTree]:
        launch: Any = SimpleNamespace(
            rank=rank, store=("127.0.0.1", store.port), token="token", attempt=attempt
        )
        return call_aside(partial(links.connect_control, config, launch, EventLog(None)), "connect")

    trees = [connect(rank, 0).result(DEADLINE) for rank in range(2)]
    rank_one = connect(1, 1)
    trees += [connect(0, 1).result(DEADLINE), rank_one.result(DEADLINE)]
    answers = [
        call_aside(partial(tree.rank0_decides, (), lambda _: "decided"), "decide")
        for tree in trees[2:]
    ]
    assert [answer.result(DEADLINE) for answer in answers] == ["decided", "decided"]
    for tree in trees:
        tree.close()


def test_all_links_are_closed_although_one_cannot_be() -> None:
    """Otherwise heartbeats would continue, or the port stay open, in a process that takes long to
    end.
    """
    closed: list[str] = []

    def part(name: str) -> Any:
        def close() -> None:
            closed.append(name)
            raise RuntimeError(f"{name} is gone")

        return SimpleNamespace(close=close)

    this: Any = SimpleNamespace(membership=part("membership"), server=part("server"))
    this.end_roll_call = lambda: closed.append("roll call")
    with pytest.raises(RuntimeError, match="is gone"):
        links.Links.close(this)
    assert closed == ["roll call", "membership", "server"]


def test_a_group_with_a_silent_rank_says_why_before_it_falls_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without heartbeats the training thread's vote fails, and that may end the process first.

    For the agent this end is transient: the host of the silent rank is frozen.
    """
    error_file = tmp_path / "rank-0.error.json"
    monkeypatch.setenv(FILE_ENV, str(error_file))
    ended: list[Any] = []
    monkeypatch.setattr(links, "end_process", lambda status, *words: ended.extend((status, *words)))
    emitted: list[Event] = []
    membership = SimpleNamespace(stop_heartbeats=lambda: None)
    gone = LostRank(2, "its process has ended", "node6")
    control = SimpleNamespace(
        losses=[LostRank(3, "", "node7", 1.5), gone, LostRank(1, "", "node5", 1.25)]
    )
    this: Any = SimpleNamespace(
        _config=FaultTolerance(enable=True),
        _control=control,
        membership=membership,
        _events=SimpleNamespace(emit=emitted.append),
    )
    this._end_without_silent_ranks = partial(links.Links._end_without_silent_ranks, this)
    links.Links._end_if_silent(this, gone)
    assert not ended, "its connections have closed: nobody waits for it"
    links.Links._end_if_silent(this, control.losses[0])
    status, tell, emit, _, last = ended
    tell()
    emit()
    read = read_error(error_file)
    assert read is not None
    assert (read.transient, read.network) == (True, False)
    assert read.text.startswith(
        "RankSilentError: no heartbeat from rank 1 on node5, rank 3 on node7 for 1.5 s"
    )
    assert "fault_tolerance.heartbeat_timeout_ms (500)" in read.text
    assert status == 1
    assert emitted == [RankSilent(ranks=[1, 3], hosts=["node5", "node7"], seconds=1.5)]
    assert last is membership.stop_heartbeats
