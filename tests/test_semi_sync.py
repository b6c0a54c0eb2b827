# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the trainer of a semi-synchronous method does in a round, without a model; whole runs are in integration/."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_ft import device

device.prepare()  # before anything imports torchtitan, which reads the device at import

from torchtitan.components.dataloader import DataloaderExhaustedError  # noqa: E402

from titan_ft import semi_sync  # noqa: E402
from titan_ft.config import ConfigError, FaultTolerance, num_fragments  # noqa: E402
from titan_ft.replica.decision import Update  # noqa: E402
from titan_ft.replica.feed import Reading  # noqa: E402
from titan_ft.replica.ledger import Entry  # noqa: E402
from titan_ft.replica.round import Contribution  # noqa: E402
from titan_ft.semi_sync import RoundWork, SemiSyncTrainer  # noqa: E402
from titan_ft.trainer import ReplicaTrainer  # noqa: E402

TOKENS = 10  # of a step


class Round:
    """A trainer in a round of four steps, the third of its run: notes what it does."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        early: bool = False,
        awaited: int = 99,
        data: int = 99,
        last: int = 100,
        **config: Any,
    ) -> None:
        self.steps: list[int] = []
        self.changes: list[dict[int, float]] = []
        self.given: list[dict[int, float]] = []
        self.lr_steps: list[int] = []
        self.asked_at: list[int] = []
        self.sent: list[tuple[int, Contribution]] = []
        monkeypatch.setattr(semi_sync, "set_lr", lambda schedulers, step: self.lr_steps.append(step))
        self.trainer = trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
        self.replica = SimpleNamespace(
            early=early,
            awaited=lambda: len(self.steps) >= awaited,
            ask=lambda: self.asked_at.append(len(self.steps)),
            send=lambda made: self.sent.append((len(self.steps), made)),
        )
        self.data = data
        vars(trainer).update(
            _steps_per_round=4,
            _trained=[0] * num_fragments(FaultTolerance(semi_sync_method="diloco", **config)),
            _late=False,
            _ahead=None,
            _sent={},
            _replica=self.replica,
            _position=SimpleNamespace(step=2),
            _work=RoundWork(9, lr=0.1),
            _nominal_tokens=100,
            _outer=SimpleNamespace(take_changes=self.changes.append),
            _links=SimpleNamespace(exchange=SimpleNamespace(give=self.given.append)),
            _group=SimpleNamespace(gather=lambda value: [value, False]),
            _leave_if_told=lambda remaining: None,
            _drain=SimpleNamespace(requested=False),
            _make_step=self._make_step,
            job_config=SimpleNamespace(training=SimpleNamespace(steps=last), fault_tolerance=FaultTolerance(**config)),
            lr_schedulers=SimpleNamespace(schedulers=[SimpleNamespace(get_last_lr=lambda: [0.1])]),
            gc_handler=SimpleNamespace(run=lambda step: None),
        )

    def _make_step(self, step: int, slots: Any) -> None:
        trainer, work = self.trainer, self.trainer._work
        if len(self.steps) == self.data:
            raise DataloaderExhaustedError
        first = 8 + work.read(0) - sum(reading.entry.num_batches for reading in work.readings)
        self.steps.append(step)
        work.inner_steps += 1
        work.readings = [Reading(Entry(0, first, work.inner_steps, b"state"), [], "0")]
        work.made = work.made.plus(Contribution(TOKENS, TOKENS, seconds=0.5))
        work.compute_seconds += 1.0
        trainer._trained = [tokens + TOKENS for tokens in trainer._trained]

    def train(self) -> Contribution:
        return self.trainer._train([0])


def test_a_round_is_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum is asked for before the last one; what all of them changed weighs their tokens; seconds are of one."""
    made = (this := Round(monkeypatch)).train()
    assert this.steps == [9, 10, 11, 12]
    assert (this.asked_at, this.changes, this.lr_steps) == ([3], [{0: 4 * TOKENS / 100}], [8])
    assert this.given == this.changes
    assert made == Contribution(4 * TOKENS, 4 * TOKENS, seconds=0.5, entries=(Entry(0, 8, 4, b"state"),))
    assert not this.sent


@pytest.mark.parametrize("made", [0, 2])
def test_a_group_that_is_awaited_breaks_off_and_trains_on_if_it_was_too_soon(
    monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """It says that steps are left; the rest of them follow on those that it has made, which count as well."""
    this = Round(monkeypatch, early=True, awaited=made)
    first = this.train()
    assert (first.early, first.valid_tokens, len(this.steps)) == (True, made * TOKENS, made)
    assert first.seconds == (0.5 if made else 0.0)
    this.replica.early = False
    whole = this.train()
    assert this.steps == [9, 10, 11, 12]
    assert (whole.early, whole.valid_tokens, whole.entries[0].num_batches) == (False, 4 * TOKENS, 4)
    assert this.changes == [{0: made * TOKENS / 100}, {0: 4 * TOKENS / 100}]
    assert this.lr_steps == [8, 8 + made]


def test_a_group_that_came_late_has_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives nothing for the others' update; if they are gone it makes the round itself."""
    this = Round(monkeypatch)
    this.trainer._late = True
    assert this.train() == Contribution(early=True)
    assert not this.train().early
    assert len(this.steps) == 4


def test_a_group_that_came_late_gives_what_it_has_of_former_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fragments it has come some way with this one, though it has made no step of this round."""
    this = Round(monkeypatch, sync_steps=8, num_fragments=2)
    this.trainer._late, this.trainer._trained = True, [30, 20]
    made = this.train()
    assert made == Contribution(early=True, changed=True)
    assert not made.empty
    assert this.changes == this.given == [{0: 0.3}]


def test_a_group_that_came_late_gives_the_batches_of_what_it_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens weigh in its change: in no update, they would be trained a second time."""
    this = Round(monkeypatch, fragment_sync_delay=2)
    this.train()
    trainer = this.trainer
    assert trainer._ahead is not None
    trainer._ahead.behind, trainer._trained, trainer._sent = None, [2 * TOKENS], {}  # committed
    trainer._work, trainer._position.step, trainer._late = trainer._begin_work(), 3, True
    made = this.train()
    assert (made.early, made.valid_tokens, made.entries) == (True, 2 * TOKENS, (Entry(0, 12, 2, b"state"),))
    assert this.changes[-1] == {0: 2 * TOKENS / 100}
    this.train()  # the others are gone
    assert this.steps == [*range(9, 19)]


def test_a_round_without_more_data_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update ends the data; the next round finds none."""
    made = (this := Round(monkeypatch, data=2, fragment_sync_delay=2)).train()
    assert (made.early, made.valid_tokens) == (False, 2 * TOKENS)
    assert not this.sent
    with pytest.raises(DataloaderExhaustedError):
        Round(monkeypatch, data=0).train()


# Fragments


def test_fragments_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weighs the tokens since its own last exchange. The last round has all, for nothing follows."""
    this = Round(monkeypatch, sync_steps=12, num_fragments=3, last=17)
    assert [this.trainer._fragments_of(update) for update in range(1, 6)] == [[0], [1], [2], [0], [0, 1, 2]]
    this.trainer._trained = [10, 20, 30]
    this.train()
    assert this.changes == [{2: (30 + 4 * TOKENS) / 100}]


def test_steps_are_made_while_the_exchange_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next round, whose batches follow on those that are not committed yet; what is sent has none of them."""
    this = Round(monkeypatch, fragment_sync_delay=2)
    made = this.train()
    assert this.sent == [(4, made)]
    assert (made.entries[0].num_batches, made.valid_tokens) == (4, 4 * TOKENS)
    assert this.steps == [9, 10, 11, 12, 13, 14]
    trainer = this.trainer
    done, ahead = trainer._work, trainer._ahead
    assert ahead is not None
    assert (done.inner_steps, done.overlapped_seconds) == (4, 2.0)
    assert (ahead.inner_steps, ahead.readings[0].entry) == (2, Entry(0, 12, 2, b"state"))
    ahead.behind = None  # committed
    trainer._work, trainer._position.step = trainer._begin_work(), 3
    assert trainer._ahead is None
    assert trainer._work is ahead
    more = this.train()
    assert this.steps == [9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert more.entries[0].num_batches == 4
    assert this.lr_steps == [8, 14]


def test_who_is_told_to_leave_makes_no_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be void, and take of the time that it has for the exchange."""
    this = Round(monkeypatch, fragment_sync_delay=3)
    this.trainer._drain.requested = True
    this.train()
    assert (len(this.steps), len(this.sent)) == (4, 1)


@pytest.mark.parametrize(("last", "steps"), [(13, 5), (12, 4)])
def test_no_step_is_made_behind_the_last_round(monkeypatch: pytest.MonkeyPatch, last: int, steps: int) -> None:
    """A next round may be shorter than the delay; behind the last one there is none."""
    this = Round(monkeypatch, fragment_sync_delay=3, last=last)
    this.train()
    assert len(this.steps) == steps
    assert len(this.sent) == (last > 12)


def test_a_group_that_is_awaited_makes_no_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round may not be over: the others may only have met for one that heals."""
    this = Round(monkeypatch, early=True, awaited=2, fragment_sync_delay=2)
    assert this.train().early
    assert not this.sent


def test_who_is_slow_asks_at_the_deadline_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the others are there; what it has then is all that it gives, and nobody waits for more."""
    this = Round(monkeypatch, sync_deadline_seconds=2.0, awaited=3)
    made = this.train()
    assert (this.asked_at, len(this.steps)) == ([2], 3)
    assert (made.early, made.valid_tokens) == (False, 3 * TOKENS)


def test_who_is_fast_makes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for those that are slower."""
    made = (this := Round(monkeypatch, sync_deadline_seconds=9.0, awaited=0)).train()
    assert (len(this.steps), made.early) == (4, False)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_fragments": 4}, r"num_fragments must be at most the number of blocks of the model \(3\), got 4"),
        (
            {"module_fqns_per_model_fragment": [["layers"], ["output", "norm"]]},
            r"must name modules of the model, got 'norm'; its blocks are layers\.0, layers\.1, output",
        ),
        (
            {"module_fqns_per_model_fragment": [["layers.0"], ["output"]]},
            r"must have each trained parameter in a fragment, got none for layers\.1\.weight; add their modules",
        ),
    ],
)
def test_fragments_that_do_not_fit_the_model_are_refused(config: dict[str, Any], error: str) -> None:
    """One that has nothing, a module that is not there, a parameter that would never be exchanged."""
    with pytest.raises(ConfigError, match=error):
        cut(**config)


def test_a_model_is_cut() -> None:
    """By blocks of about equal size, or as the config says; frozen parameters are in none."""
    assert cut(num_fragments=2) == [1, 1, 0]
    assert cut(module_fqns_per_model_fragment=[["layers"], ["output", "layers.1"]]) == [0, 1, 1]


def test_ranks_with_other_shards_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not sharded are the same on all ranks of a group, which must exchange them in the same round."""
    cuts = []
    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            model = torch.nn.Module()
            model.first = torch.nn.Linear(3, 2, bias=False)  # 2 and 1 of its columns
            model.first.weight = torch.nn.Parameter(distribute_tensor(model.first.weight.data, mesh, [Shard(1)]))
            model.second = torch.nn.Linear(3, 1, bias=False)
            cuts.append(cut(model, num_fragments=2))
        finally:
            dist.destroy_process_group()
    assert cuts == [[0, 1], [0, 1]]


def cut(model: torch.nn.Module | None = None, **config: Any) -> list[int]:
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    settings = FaultTolerance(semi_sync_method="diloco", **config)
    vars(trainer).update(
        model_parts=[model or layered()],
        job_config=SimpleNamespace(fault_tolerance=settings),
        _group=SimpleNamespace(gather=lambda value: [value]),
    )
    return trainer._cut_fragments()


def layered() -> torch.nn.Module:
    model = torch.nn.Module()
    layer = torch.nn.Linear(2, 2)
    layer.requires_grad_(False)
    layer.weight.requires_grad = True
    model.layers = torch.nn.ModuleList([layer, torch.nn.Linear(2, 2, bias=False)])
    model.output = torch.nn.Linear(3, 3, bias=False)
    return model


@pytest.mark.parametrize(
    ("sent", "last", "alpha"),
    [({0: 8}, 100, 0.5), ({0: 8}, 12, 0.0), ({0: 0}, 100, 0.0), ({}, 100, 0.0)],
)
def test_only_who_has_trained_a_fragment_keeps_a_share_of_it(sent: dict[int, int], last: int, alpha: float) -> None:
    """One that replays an update, or came late to it, would keep a share of the anchors before: its next change would
    take back what the others have made of them.
    """
    found: list[float] = []
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(
        _steps_per_round=4,
        _trained=[10],
        _sent=dict(sent),
        _ahead=None,
        _work=RoundWork(9, lr=0.1),
        _watchdog=SimpleNamespace(beat=lambda: None),
        _links=SimpleNamespace(exchange=SimpleNamespace(write_gradients=lambda gradients, scale: None)),
        _outer=SimpleNamespace(step=lambda alpha: found.append(alpha) or 0.0),
        _converters=SimpleNamespace(post_optimizer_hook=lambda parts: None),
        _ledger=SimpleNamespace(advance=lambda entries, readers: None),
        _group=SimpleNamespace(gather=lambda value: [value]),
        model_parts=[],
        ntokens_seen=0,
        checkpointer=SimpleNamespace(maybe_wait_for_staging=lambda: None),
        lr_schedulers=SimpleNamespace(schedulers=[]),
        job_config=SimpleNamespace(
            training=SimpleNamespace(steps=last), fault_tolerance=FaultTolerance(fragment_update_alpha=0.5)
        ),
    )
    trainer._apply(Update(step=3, tokens=1, lineage=1, scale=1.0, entries=[], readers=[], gradients=[]))
    assert found == [alpha]
    assert trainer._trained == [10 - sum(sent.values())]


def test_weights_that_cannot_hold_the_outer_model_are_refused() -> None:
    """A checkpoint has the model's weights, and would round what the groups agree on; frozen ones may be any."""
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    model.bias.data = model.bias.data.bfloat16()
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(model_parts=[model])
    trainer._check_dtypes()
    model.weight.data = model.weight.data.bfloat16()
    with pytest.raises(ConfigError, match=r'training\.dtype must be "float32" .* got "bfloat16" for weight'):
        trainer._check_dtypes()


@pytest.mark.parametrize(
    ("seconds", "read", "broken_off", "told"),
    [
        (0.0, 3, "one step was left", "SIGTERM: one step was left"),
        (0.0, 3, "", "SIGTERM: the others were not there in time to exchange the round"),
        (1.5, 3, "", "in order"),  # the round is in an update
        (0.0, 0, "", "in order"),  # it has come to the end of others' round, or has not begun one
        (0.0, None, "", "in order"),
    ],
)
def test_who_leaves_names_the_batches_that_are_in_no_update(
    seconds: float,
    read: int | None,
    broken_off: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether it broke its steps off, or nobody came to exchange them."""
    monkeypatch.setattr(semi_sync.logger, "propagate", True)
    monkeypatch.setattr(ReplicaTrainer, "_emit_drained", lambda trainer: found.append("in order"))
    found: list[Any] = []
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(
        _broken_off=broken_off,
        _ahead=None,
        _position=SimpleNamespace(step=2),
        _events=SimpleNamespace(emit=found.append),
    )
    if read is not None:
        readings = [Reading(Entry(0, 8, read, b""), [], "0")] if read else []
        trainer._work = RoundWork(9, lr=0.1, readings=readings, seconds=seconds)
    trainer._emit_drained()
    if told == "in order":
        assert found == [told]
    else:
        (event,) = found
        assert (event.reason, event.in_order, event.step) == (told, False, 2)
        assert [(batches.first_batch, batches.num_batches) for batches in event.void] == [(8, 3)]
        assert f"{told}; void: 3 from batch 8 of slot 0" in caplog.text


@pytest.mark.parametrize(
    ("step", "exclusions", "done"), [(8, 0, ["open"]), (8, 1, ["clear", "heal"]), (12, 0, []), (12, 1, [])]
)
def test_what_follows_an_update(step: int, exclusions: int, done: list[str]) -> None:
    """A group whose change was not finite gets other moments, and keeps none if nobody is left who has some.

    Behind the last update there is nothing to open, and no step for which moments would matter.
    """
    found: list[str] = []
    trainer = SemiSyncTrainer.__new__(SemiSyncTrainer)
    vars(trainer).update(
        step=step,
        job_config=SimpleNamespace(training=SimpleNamespace(steps=12)),
        optimizers=[SimpleNamespace(state=SimpleNamespace(clear=lambda: found.append("clear")))],
        _position=SimpleNamespace(step=step // 4, exclusions=exclusions),
        _open=lambda replica: found.append("open"),
        _heal=lambda replica: found.append("heal"),
    )
    trainer._go_on(None)  # type: ignore[arg-type]
    assert found == done
