# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainer does around a step, without a model; whole runs of it are in tests/integration."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ft.host import cpu

cpu.prepare()  # before anything imports torchtitan, which reads the device at import

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torchtitan.components.dataloader import DataloaderExhaustedError  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX  # noqa: E402
from torchtitan.components.validate import BaseValidator, Validator  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from titan_ft.config import FaultTolerance  # noqa: E402
from titan_ft.engine.feed import Reading  # noqa: E402
from titan_ft.protocol.decision import LastToLeave  # noqa: E402
from titan_ft.protocol.errors import Leaving  # noqa: E402
from titan_ft.protocol.ledger import Entry  # noqa: E402
from titan_ft.protocol.report import NOTHING, Contribution  # noqa: E402
from titan_ft.run.error_file import FILE_ENV, read_error  # noqa: E402
from titan_ft.run.events import Event, Hung  # noqa: E402
from titan_ft.semi_sync import RoundWork, SemiSyncTrainer  # noqa: E402
from titan_ft.trainer import ReplicaTrainer  # noqa: E402
from titan_ft.training.slot_loaders import iterate  # noqa: E402
from titan_ft.training.step_log import Work  # noqa: E402

LABELS = torch.tensor([[1, 2, IGNORE_INDEX], [3, 4, 5]])


def trainer(**parts: Any) -> Any:
    """Return a stand-in for `self` with the parts of a trainer that a method uses."""
    return SimpleNamespace(**parts)


def test_the_links_are_closed_although_the_watchdog_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """However training ends, also while the replica dimension is still being built: the others stop waiting."""
    closed: list[str] = []

    def end() -> None:
        closed.append("watchdog")
        raise RuntimeError("cannot join it")

    def train(self: Trainer) -> None:
        raise ValueError("training failed")

    monkeypatch.setattr(Trainer, "train", train)
    this = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        _watchdog=SimpleNamespace(close=end),
        _chaos=SimpleNamespace(close=lambda: closed.append("chaos")),
        _links=SimpleNamespace(close=lambda: closed.append("links")),
        _state=SimpleNamespace(close=lambda: closed.append("memory")),
        _replica=None,
    )
    with pytest.raises(RuntimeError, match="cannot join it"):
        this.train()
    assert closed == ["watchdog", "chaos", "links", "memory"]


def test_a_gradient_begins_without_counts_of_other_batches() -> None:
    """What validation, the warm-up or a void step has counted must not move the experts' biases."""
    layer = torch.nn.Module()
    layer.load_balance_coeff = 1e-3
    layer.register_buffer("tokens_per_expert", torch.ones(4), persistent=False)
    zeroed: list[str] = []
    readings = ["a batch"]
    this = trainer(
        model_parts=[torch.nn.Sequential(layer)],
        optimizers=SimpleNamespace(zero_grad=lambda: zeroed.append("gradients")),
        _work=SimpleNamespace(readings=readings),
    )
    this._zero_gradients = lambda: ReplicaTrainer._zero_gradients(this)
    ReplicaTrainer._discard(this)
    assert (layer.tokens_per_expert.tolist(), zeroed, readings) == ([0.0] * 4, ["gradients"], [])


def test_nominal_tokens_are_those_of_all_groups() -> None:
    """Local losses are divided by them, so that the sum over all groups is the mean."""
    config = SimpleNamespace(
        training=SimpleNamespace(local_batch_size=2, seq_len=8), fault_tolerance=SimpleNamespace(group_size=5)
    )
    this = trainer(
        job_config=config,
        parallel_dims=SimpleNamespace(dp_replicate=2, dp_shard=3),
        gradient_accumulation_steps=4,
    )
    assert ReplicaTrainer._count_nominal_tokens(this) == 2 * 8 * (2 * 3) * 4 * 5


@pytest.mark.parametrize("cp", [1, 2])
def test_a_group_s_contribution_is_the_sum_over_its_ranks(cp: int) -> None:
    """Ranks of one context-parallel group share their tokens, and each has a part of the loss."""
    facts = torch.tensor([[8.0, 10.0, 0.25, 1.0, 0.5, 0.2], [8.0, 10.0, 0.5, 3.0, 0.1, 0.3]], dtype=torch.float64)
    told: list[list[float]] = []

    def gather(values: list[float]) -> torch.Tensor:
        told.append(values)
        return facts

    this = trainer(
        _nominal_tokens=100,
        _group=SimpleNamespace(gather_losses=gather),
        parallel_dims=SimpleNamespace(cp=cp),
        _tells_loss=lambda: True,
        _work=Work(1, lr=0.1, loading_seconds=1.0),
    )
    reading = Reading(Entry(0, 0, 1, b""), [], "0")
    made = ReplicaTrainer._gather_contribution(this, 8, 10, 0.25, 0.5, 0.2, [reading])
    assert made == Contribution(16 // cp, 20 // cp, 0.75, 3.0, 0.5, (reading.entry,))
    assert told == [[8, 10, 0.25, 0.25 * 100 / 8, 0.5, 0.2]]
    assert this._work.loading_seconds == 1.0 + 0.3  # the group comes to the exchange with its slowest rank


class Mesh:
    def __init__(self, local_rank: int) -> None:
        self._local_rank = local_rank

    def get_local_rank(self) -> int:
        return self._local_rank


def test_a_pipeline_s_loss_is_known_to_all_its_ranks() -> None:
    """Only the last stage has one, all of whose tensor-parallel ranks hold the same; its tokens count once."""
    losses = {(0, 0): -2.0, (0, 1): -2.0, (1, 0): 0.25, (1, 1): 0.25}  # of (stage, tensor-parallel rank)
    told: list[list[float]] = []

    def make(stage: int, tensor_rank: int) -> Any:
        dims = SimpleNamespace(cp=1, pp_enabled=True, get_optional_mesh=lambda name: Mesh(tensor_rank))
        this = trainer(
            _nominal_tokens=100,
            _group=SimpleNamespace(gather_losses=lambda values: told.append(values) or torch.tensor(told)),
            parallel_dims=dims,
            pp_has_last_stage=stage == 1,
            _work=Work(1, lr=0.1),
        )
        this._tells_loss = lambda: ReplicaTrainer._tells_loss(this)
        return ReplicaTrainer._gather_contribution(this, 8, 10, losses[stage, tensor_rank], 0.1 * stage, 0.0, ())

    made = [make(*rank) for rank in losses][-1]  # the last one to gather sees all
    assert made == Contribution(8, 10, 0.25, 0.25 * 100 / 8, pytest.approx(0.1), ())


def test_a_pipeline_s_validation_loss_is_known_to_all_its_ranks() -> None:
    """torchtitan calls -1 / tokens the loss on ranks without the last stage."""
    logged: list[tuple[float, int]] = []
    told: list[list[float]] = []

    def make(own: Any, last_stage: bool) -> Any:
        metrics = SimpleNamespace(log_validation=lambda loss, step: logged.append((loss, step)))
        this = trainer(
            validator=own,
            metrics_processor=metrics,
            _group=SimpleNamespace(gather_losses=lambda values: told.append(values) or torch.tensor(told)),
            _tells_loss=lambda: last_stage,
        )
        ReplicaTrainer._share_validation_loss(this)
        return metrics

    class Own(Validator):
        def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
            """Log on the ranks that it likes."""

    for last_stage, loss in ((True, 7.5), (False, -0.01)):
        make(Validator.__new__(Validator), last_stage).log_validation(loss=loss, step=3)
    assert logged == [(7.5, 3), (7.5, 3)]
    make(Own.__new__(Own), False).log_validation(loss=-0.01, step=4)
    assert logged[-1] == (-0.01, 4)
    assert len(told) == 2  # nobody is waited for


@pytest.fixture
def world() -> Iterator[None]:
    """Make this process a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_hang_is_told_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reason of the end: three hangs in a row are a crash loop, whose line names them."""
    path = tmp_path / "rank-0.error.json"
    monkeypatch.setenv(FILE_ENV, str(path))
    emitted: list[Event] = []
    config = SimpleNamespace(fault_tolerance=FaultTolerance(hang_timeout_seconds=20))
    this = trainer(job_config=config, _events=SimpleNamespace(emit=emitted.append), _num_committed=7)
    ReplicaTrainer._tell_hang(this)
    read = read_error(path)
    assert read is not None
    assert read.text == "HungError: no progress of the training thread for 20 s; its log has the stacks"
    assert not read.transient
    assert emitted == [Hung(step=7)]


def test_the_state_after_a_validation_is_the_one_before_it(world: None) -> None:
    """A forward without a backward leaves FSDP's root whole: a digest then, and a copy, would be of other tensors."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = [type(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def validate(model_parts: list[torch.nn.Module], step: int) -> None:
        model_parts[0](torch.ones(2, 4))
        assert [type(parameter) for parameter in model.parameters()] != before

    this = trainer(validator=SimpleNamespace(validate=validate), model_parts=[model])
    ReplicaTrainer._shard_after_validation(this)
    this.validator.validate([model], 3)
    assert [type(parameter) for parameter in model.parameters()] == before


def test_the_exchange_is_armed_before_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before an earlier one, whose gradients are not final.

    The next batch is read while the device is at the last backward: before the host waits for the loss.
    """
    order: list[str] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: order.append("wait") or item(tensor))
    readings = {
        slot: SimpleNamespace(batches=[({}, LABELS), ({}, LABELS)], entry=Entry(slot, 0, 2, b"")) for slot in (0, 2)
    }

    def read(slot: int, count: int, behind: int) -> Any:
        assert (count, behind) == (2, 0)
        return readings[slot]

    def backward(inputs: Any, labels: torch.Tensor) -> torch.Tensor:
        order.append("backward")
        return torch.tensor(0.5)

    def read_ahead(last: Any) -> None:
        order.append(f"read ahead of {len(last)}")

    given: list[tuple[Any, ...]] = []
    this = trainer(
        ntokens_seen=70,
        step=3,
        job_config=SimpleNamespace(training=SimpleNamespace(steps=4)),
        metrics_processor=SimpleNamespace(ntokens_since_last_log=7),
        gradient_accumulation_steps=2,
        _feed=SimpleNamespace(read=read, read_ahead=read_ahead),
        _watchdog=SimpleNamespace(beat=lambda: None),
        _forward_backward=backward,
        _work=Work(1, lr=0.1),
        _gather_contribution=lambda *facts: given.append(facts) or NOTHING,
    )
    ReplicaTrainer._train(this, [0, 2], lambda: order.append("arm"))
    assert order == ["backward"] * 3 + ["arm", "backward", "read ahead of 2", "wait"]
    assert (this.ntokens_seen, this.metrics_processor.ntokens_since_last_log) == (70, 7 + 4 * 6)
    ((valid, tokens, loss, _, _, trained),) = given
    assert (valid, tokens, loss) == (4 * 5, 4 * 6, 4 * 0.5)
    assert trained == [readings[0], readings[2]]
    assert this._work.readings == [readings[0], readings[2]]
    assert ReplicaTrainer._train(this, []) is NOTHING
    this.step, this._work = 4, Work(4, lr=0.1)
    ReplicaTrainer._train(this, [0])
    assert order[-2:] == ["read ahead of 0", "wait"], "nothing follows on the last step"


def test_tokens_count_when_they_are_trained() -> None:
    """Not when torchtitan's generator reads them, which is a step earlier, or for nothing."""
    counts = SimpleNamespace(ntokens_since_last_log=7, data_loading_times=[])
    this = trainer(ntokens_seen=70, metrics_processor=counts)
    this.batch_generator = lambda loader: Trainer.batch_generator(this, loader)
    read = iterate(this, [({}, LABELS)] * 2)
    assert [labels is LABELS for _, labels in itertools.islice(read, 2)] == [True, True]
    assert (this.ntokens_seen, counts.ntokens_since_last_log) == (70, 7)
    with pytest.raises(DataloaderExhaustedError):
        next(read)


def test_without_data_no_step_is_made() -> None:
    """A round of a semi-synchronous method would count one that it has not, and wait for a gradient of it for ever."""

    def read(slot: int, count: int, behind: int) -> Any:
        raise DataloaderExhaustedError

    this = trainer(gradient_accumulation_steps=2, _feed=SimpleNamespace(read=read), _work=Work(1, lr=0.1))
    with pytest.raises(DataloaderExhaustedError):
        ReplicaTrainer._train(this, [0])
    assert this._work.inner_steps == 0


@pytest.mark.parametrize(("pp", "scale"), [(False, 1.0), (True, 1 / 80)])
def test_a_pipeline_s_gradients_are_divided_by_the_tokens(pp: bool, scale: float) -> None:
    """torchtitan does that before backward, but for pipelines, which go backward from the sum of the losses."""
    this = trainer(_nominal_tokens=80, parallel_dims=SimpleNamespace(pp_enabled=pp))
    assert ReplicaTrainer._gradient_scale.fget(this) == scale  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step", "saves", "pauses"),
    [(1, False, True), (3, False, False), (4, False, True), (5, True, True), (10, False, True)],
)
def test_no_quorum_is_asked_for_before_a_pause(step: int, saves: bool, pauses: bool) -> None:
    """torchtitan validates (after the first step, too), saves or ends: the others would wait in the exchange."""
    config: Any = SimpleNamespace(validation=SimpleNamespace(enable=True, freq=4), training=SimpleNamespace(steps=10))
    validator, saver = BaseValidator(config), SimpleNamespace(pauses_after=lambda step: saves)
    this = trainer(job_config=config, checkpointer=saver, validator=validator)
    assert ReplicaTrainer._pauses_after(this, step) is pauses


class Step:
    """A trainer in its step: notes what it does, in order."""

    def __init__(self, committed: Any, leaving: bool = False, **settings: int) -> None:
        self.done: list[str] = []
        self.dropped: list[set[int]] = []
        replica = SimpleNamespace(
            commit=lambda contribution, train, discard: committed,
            slots_to_read=lambda: [0],
            arm=None,
            digest_if_due=lambda: None,
            offer=lambda: self.done.append("offer"),
            heal_seconds=0.0,
        )
        note = lambda what, result=None: lambda *_: self.done.append(what) or result  # noqa: E731
        self.this = trainer(
            _join_job=lambda: replica,
            _begun=True,
            _chaos=None,
            _stepped=0.0,
            step=4,
            _zero_gradients=lambda: None,
            _begin_work=lambda: Work(4, 0.1),
            _train=lambda slots, arm: NOTHING,
            _discard=None,
            _heal=note("heal"),
            _apply=note("apply", 1.0),
            _checkpoint_host=SimpleNamespace(participants=None),
            _links=SimpleNamespace(
                exchange=SimpleNamespace(take_wire_bytes=lambda: 7), note_commit=note("note commit")
            ),
            _lr_factor=lambda update: 1.0,
            _step_log=SimpleNamespace(emit=note("emit"), log=note("log")),
            ntokens_seen=0,
            _position=SimpleNamespace(leaving=leaving, step=3),
            _state=SimpleNamespace(reserve=note("reserve")),
            _group=SimpleNamespace(gather=None),
            launch=SimpleNamespace(ranks_on_host=2),
            _go_on=note("go on"),
            _feed=SimpleNamespace(drop=self.dropped.append),
            job_config=SimpleNamespace(
                fault_tolerance=SimpleNamespace(**{"replica_id": 0, "group_size": 2, "heal_donors": 8, **settings})
            ),
        )

    def make(self) -> None:
        ReplicaTrainer.train_step(self.this, iter(()))


COMMITTED = SimpleNamespace(update=SimpleNamespace(step=4), participants=[0, 1])


def test_a_commit_is_applied_and_recorded() -> None:
    """In this order: what is recorded is in the state."""
    step = Step(COMMITTED)
    step.make()
    assert step.done == ["apply", "note commit", "emit", "log", "reserve", "offer", "go on"]
    assert step.this._checkpoint_host.participants == [0, 1]
    assert step.this._work.wire_bytes == 7
    assert step.dropped == [{0}]


@pytest.mark.parametrize("settings", [{"heal_donors": 1}, {"group_size": 1}], ids=["shared host", "nobody to serve"])
def test_no_memory_is_reserved_where_it_may_be_too_much(settings: dict[str, int]) -> None:
    """A host may have no room for a copy of each of its groups; and a group alone never serves one."""
    step = Step(COMMITTED, **settings)
    step.make()
    assert step.done == ["apply", "note commit", "emit", "log", "offer", "go on"]


def test_without_a_commit_nothing_is_applied() -> None:
    """The gradients are void; the step ends on the state of a donor."""
    step = Step(None)
    step.make()
    assert step.done == ["heal"]


def test_a_group_that_leaves_applies_its_last_step() -> None:
    """It has committed the step with the others: its event and its last digest are those of that state."""
    step = Step(COMMITTED, leaving=True)
    with pytest.raises(Leaving):
        step.make()
    assert step.done == ["apply", "note commit", "emit", "log"]


class Leave:
    """A trainer that leaves behind update 3: notes what it does, in order.

    Args:
        last: the groups that leave with it and save the state first.
        lacks: whether that is not saved yet.
        turn: whether it is this group's turn to save.
    """

    def __init__(self, last: LastToLeave | None, lacks: bool = True, turn: bool = True, kind: type = ReplicaTrainer):
        self.done: list[str] = []
        self.this = this = kind.__new__(kind)
        note = lambda what, result=None: lambda *_: self.done.append(what) or result  # noqa: E731
        vars(this).update(
            _replica=SimpleNamespace(find_last_to_leave=lambda: last, await_turn=note("turn", turn)),
            _links=SimpleNamespace(membership=SimpleNamespace(close=note("close"))),
            checkpointer=SimpleNamespace(
                lacks_state=lambda: lacks,
                watch_others=lambda step: lambda: False,
                holds_state=lambda step: False,
                withdraw=note("withdraw"),
                save_on_leave=lambda step, seconds: self.done.append(f"save {step} in {seconds}"),
            ),
            _watchdog=SimpleNamespace(paused=contextlib.nullcontext),
            _drain=SimpleNamespace(seconds_left=17.0),
            _position=SimpleNamespace(step=3),
            _emit_drained=note("tell"),
            step=4,
            job_config=SimpleNamespace(fault_tolerance=FaultTolerance()),
        )
        this._leave()


LAST = LastToLeave((0, 1), agreed=True)


@pytest.mark.parametrize(
    ("last", "lacks", "turn", "done"),
    [
        (None, True, True, ["close", "withdraw", "tell"]),  # others train on: they wait for nothing
        (LAST, False, True, ["close", "withdraw", "tell"]),  # the state is saved, or checkpoints are off
        (LAST, True, False, ["withdraw", "turn", "close", "tell"]),  # another group has saved it
        (LAST, True, True, ["withdraw", "turn", "save 3 in 17.0", "close", "tell"]),
        (LastToLeave((0,), agreed=False), True, True, ["close", "withdraw", "turn", "save 3 in 17.0", "close", "tell"]),
    ],
)
def test_the_last_groups_to_leave_save_before_they_go(
    last: LastToLeave | None, lacks: bool, turn: bool, done: list[str]
) -> None:
    """Heartbeats end first where others may train on, and last where this group must be seen to live."""
    assert Leave(last, lacks, turn).done == done


def test_what_is_saved_by_who_leaves_has_the_number_of_its_update() -> None:
    """torchtitan has begun to count the next step, which came to nothing."""
    assert Leave(LAST).this.step == 3
    assert Leave(LAST).this._saving is None


def test_a_rank_that_the_timeout_ends_in_its_save_says_so() -> None:
    """What is missing then is the time, and not that the step could not be finished."""
    told: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    events = SimpleNamespace(emit=told.append, is_stalled=False)
    vars(this).update(_events=events, _position=SimpleNamespace(step=3), _saving=3)
    this._abandon("the time is over")
    assert told[0].reason == "the time is over, before the checkpoint of step 3 was complete"


def test_a_group_that_leaves_in_the_midst_of_a_round_tells_its_batches() -> None:
    """They are void and trained again: an audit must be able to count them. Those of a slot are one stretch."""
    told: list[Any] = []
    batch = ({"input": torch.zeros(1, 3)}, LABELS)
    readings = [Reading(Entry(1, first, 1, b""), [batch], "c5") for first in (30, 31)]
    this = leaving_trainer(told, RoundWork(31, 0.1, readings), None)
    this._emit_drained()
    ((event,), (void,)) = told, told[0].void
    assert (event.step, event.in_order) == (3, False)
    assert (void.slot, void.first_batch, void.num_batches) == (1, 30, 2)


def leaving_trainer(told: list[Any], work: RoundWork, ahead: RoundWork | None) -> SemiSyncTrainer:
    this = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(this).update(
        _broken_off="",
        _events=SimpleNamespace(emit=told.append, is_stalled=False),
        _work=work,
        _ahead=ahead,
        _position=SimpleNamespace(step=3, lineage=5),
        _state=SimpleNamespace(digest=lambda: "d1ge57"),
    )
    return this


@pytest.mark.parametrize("made_ahead", [False, True])
def test_a_group_that_leaves_behind_a_round_tells_what_it_has_made_of_the_next(made_ahead: bool) -> None:
    """While the exchange was under way: it is void, though the group leaves in order."""
    told: list[Any] = []
    ahead = RoundWork(31, 0.1, [Reading(Entry(1, 30, 1, b""), [({"input": torch.zeros(1, 3)}, LABELS)], "c5")])
    this = leaving_trainer(told, RoundWork(27, 0.1, seconds=1.0), ahead if made_ahead else None)
    this._emit_drained()
    (event,) = told
    assert (event.step, event.in_order, event.digest) == (3, True, "d1ge57")
    assert [(void.slot, void.first_batch, void.num_batches) for void in event.void or ()] == [(1, 30, 1)] * made_ahead


def test_a_rank_that_the_timeout_ends_tells_no_batches_of_a_step() -> None:
    """A step is one batch of each group, which another one reads; only rounds of several name theirs."""
    told: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(_events=SimpleNamespace(emit=told.append, is_stalled=False), _position=SimpleNamespace(step=3))
    this._abandon("too late")
    (event,) = told
    assert (event.step, event.reason, event.in_order, event.void) == (3, "too late", False, None)


@pytest.mark.parametrize(
    ("committed", "void"),
    [
        (2, [(1, 8, 6)]),  # of both rounds
        (3, [(1, 12, 2)]),  # the first one has just come into an update
        (4, None),
    ],
)
def test_a_rank_that_the_timeout_ends_tells_the_batches_of_its_rounds(
    committed: int, void: list[tuple[int, int, int]] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also those of steps that it has made while the exchange was under way; what is in an update is not void."""
    told: list[Any] = []
    work = RoundWork(9, 0.1, [Reading(Entry(1, 8, 4, b""), [], "c5")])
    ahead = RoundWork(13, 0.1, [Reading(Entry(1, 12, 2, b""), [], "c5")], behind=work)
    this = leaving_trainer(told, ahead, ahead)  # it is in the midst of them
    vars(this).update(_steps_per_round=4, _under_way=work, _position=SimpleNamespace(step=committed))
    this._abandon("too late")
    (event,) = told
    assert (event.step, event.reason, event.in_order) == (committed, "too late", False)
    found = event.void and [(each.slot, each.first_batch, each.num_batches) for each in event.void]
    assert found == void
    first, number = (void[0][1], void[0][2]) if void else (0, 0)
    line = f"titan_ft: SIGTERM: void: {number} from batch {first} of slot 1\n" if void else ""
    assert capfd.readouterr().err == line


def test_a_rank_that_the_timeout_ends_before_it_trains_tells_no_batches() -> None:
    """It may have no position yet."""
    told: list[Any] = []
    this: Any = leaving_trainer(told, RoundWork(1, 0.1), None)
    this._under_way = None
    del this._position, this._work
    this._abandon("too early")
    assert [(event.step, event.void) for event in told] == [(0, None)]


@pytest.mark.parametrize(("healed", "goes_on"), [(5, True), (7, False)])
def test_a_group_that_heals_at_the_end_trains_on_from_an_earlier_state(healed: int, goes_on: bool) -> None:
    """All that held the final state may have died meanwhile, and the others have begun anew."""
    digests = ["d1ge57", None]
    finished: list[str] = []

    def heal(replica: object) -> None:
        this.step = healed

    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        step=7,
        ntokens_seen=0,
        launch=SimpleNamespace(rank=1),  # rank 0 marks the end in the folder of the run
        job_config=SimpleNamespace(training=SimpleNamespace(steps=7)),
        _replica=SimpleNamespace(finish=digests.pop),
        _links=SimpleNamespace(end_roll_call=lambda: finished.append("roll call ended")),
        _position=SimpleNamespace(step=7, lineage=0),
        _heal=heal,
        checkpointer=SimpleNamespace(
            withdraw=lambda: None, finish=lambda step: None, raise_last_failure=lambda: finished.append("raised")
        ),
        _events=SimpleNamespace(emit=lambda event: finished.append(event.digest)),
        _step_log=SimpleNamespace(flush=lambda: None),
    )
    assert this.should_continue_training() is goes_on
    assert finished == ([] if goes_on else ["roll call ended", "d1ge57", "raised"])


@pytest.mark.parametrize(
    ("facts", "shape"),
    [
        ({}, (1, 32)),
        ({"seq_len": 16}, (1, 16)),
        ({"attn_type": "varlen"}, (1, 32)),
        ({"device": "cuda"}, (4, 256)),
        ({"attn_type": "flex"}, (4, 256)),
        ({"compile": True}, (4, 256)),
        ({"tp_enabled": True}, (4, 256)),
        ({"cp_enabled": True}, (4, 256)),
        ({"pp_enabled": True}, (4, 256)),
    ],
)
def test_a_warm_up_is_short_where_no_shape_counts(facts: dict[str, Any], shape: tuple[int, int]) -> None:
    """The others make steps meanwhile; but what is compiled for another shape would be compiled again in the first."""
    degrees = {name: facts.get(name, False) for name in ("tp_enabled", "cp_enabled", "pp_enabled")}
    this = trainer(
        device=torch.device(facts.get("device", "cpu")),
        parallel_dims=SimpleNamespace(**degrees),
        model_args=SimpleNamespace(attn_type=facts.get("attn_type", "sdpa")),
        job_config=SimpleNamespace(
            training=SimpleNamespace(local_batch_size=4, seq_len=facts.get("seq_len", 256)),
            compile=SimpleNamespace(enable=facts.get("compile", False)),
        ),
    )
    assert ReplicaTrainer._warm_up_shape(this) == shape


@pytest.mark.parametrize("text", [True, False])
def test_a_warm_up_is_taken_back(text: bool) -> None:
    """Weights, moments and counters are those of before, and no gradient or random number is left of it."""
    done: list[str] = []
    drawn = torch.random.get_rng_state()
    this = trainer(
        dataloader=SimpleNamespace(dataset=HuggingFaceTextDataset.__new__(HuggingFaceTextDataset) if text else None),
        _state=SimpleNamespace(copy=lambda *_: "before", load=lambda state: done.append(f"load {state}")),
        _warm_up_shape=lambda: (1, 8),
        _forward_backward=lambda inputs, labels: done.append(f"step {[*inputs['input'].shape]}, {torch.rand(1) < 2}"),
        _clip_gradients=lambda: None,
        optimizers=SimpleNamespace(step=lambda: done.append("update"), zero_grad=lambda: done.append("zero")),
    )
    ReplicaTrainer._warm_up(this)
    assert done == (["step [1, 8], tensor([True])", "update", "zero", "load before"] if text else [])
    assert torch.equal(torch.random.get_rng_state(), drawn)
