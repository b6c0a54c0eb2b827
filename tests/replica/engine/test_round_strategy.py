# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's actions in a round, without a model. tests/integration has whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.engine import round_strategy
from titan_ft.engine.feed import Reading
from titan_ft.engine.round import Sign
from titan_ft.engine.round_strategy import RoundStrategy, RoundWork
from titan_ft.engine.step import AfterOpening
from titan_ft.engine.strategy import Departure
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Entry
from titan_ft.protocol.report import Contribution
from titan_ft.protocol.round import Update
from titan_ft.round_settings import num_fragments

TOKENS = 10  # nominal tokens of a step


class DataEndedError(Exception):
    pass


class Round:
    """A group in a round of four steps, the third one of its run.

    Records the group's actions.
    """

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
        self.served_at: list[int] = []
        self.awaited, self.wanted, self.told, self.lacks = awaited, -1, False, False
        monkeypatch.setattr(
            round_strategy, "set_lr", lambda schedulers, step: self.lr_steps.append(step)
        )
        self.strategy = strategy = RoundStrategy.__new__(RoundStrategy)
        self.replica = SimpleNamespace(
            quorum_requested=early,
            gather_signs=self._look,
            request_quorum=lambda: self.asked_at.append(len(self.steps)),
            serve_joiner=lambda: self.served_at.append(len(self.steps)),
            launch_with=lambda made: self.sent.append((len(self.steps), made)),
            lacks_time=self._lacks_time,
        )
        self.data, self.spent = data, 0.0
        self.training = SimpleNamespace(
            step=9,
            num_steps=last,
            nominal_tokens=100,
            lr=0.1,
            lr_schedulers=None,
            data_ended=DataEndedError,
            collect_garbage=lambda step: None,
            lacks_state=lambda: self.lacks,
        )
        vars(strategy).update(
            _config=FaultTolerance(**config),
            _training=self.training,
            _steps_per_round=4,
            _trained_tokens=[0]
            * num_fragments(FaultTolerance(semi_sync_method="diloco", **config)),
            _exchanges_at_once=False,
            _uncommitted_work=None,
            _work_ahead=None,
            _given_tokens={},
            _break_off_reason="",
            _replica=self.replica,
            _exchange=SimpleNamespace(set_fragment_weights=self.given.append),
            _position=SimpleNamespace(step=2, mark_leaving=lambda: None),
            _group=SimpleNamespace(gather=lambda value: [value, False]),
            work=RoundWork(9, lr=0.1),
            outer=SimpleNamespace(compute_changes=self.changes.append),
            _make_step=self._make_step,
        )

    def _lacks_time(self, seconds: float, share: float) -> bool:
        return self.spent + seconds / self.strategy._config.drain_timeout_seconds > share

    def _look(self, overdue: bool = False) -> Sign:
        number = len(self.steps)
        seen = (number == self.wanted, number >= self.awaited, self.told, overdue)
        return Sign(sum(sign for sign, is_seen in zip(Sign, seen, strict=True) if is_seen))

    def _make_step(self, step: int, slots: Any) -> None:
        strategy, work = self.strategy, self.strategy.work
        if len(self.steps) == self.data:
            raise DataEndedError
        first = (
            8 + work.count_batches(0) - sum(reading.entry.num_batches for reading in work.readings)
        )
        self.steps.append(step)
        work.inner_steps += 1
        work.readings = [Reading(Entry(0, first, work.inner_steps, b"state"), [], "0")]
        work.contribution = work.contribution.plus(Contribution(TOKENS, TOKENS, seconds=0.5))
        work.compute_seconds += 1.0
        strategy._trained_tokens = [tokens + TOKENS for tokens in strategy._trained_tokens]

    def train(self) -> Contribution:
        return self.strategy.train([0])


def test_a_round_is_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum is requested before the last step.

    The tokens of all steps weight the change. The seconds are those of one step.
    """
    made = (this := Round(monkeypatch)).train()
    assert this.steps == [9, 10, 11, 12]
    assert (this.asked_at, this.changes, this.lr_steps) == ([3], [{0: 4 * TOKENS / 100}], [8])
    assert this.given == this.changes
    assert made == Contribution(
        4 * TOKENS, 4 * TOKENS, seconds=0.5, entries=(Entry(0, 8, 4, b"state"),)
    )
    assert not this.sent


@pytest.mark.parametrize("made", [0, 2])
def test_a_group_that_is_awaited_breaks_off_and_trains_on_if_it_was_too_soon(
    monkeypatch: pytest.MonkeyPatch, made: int
) -> None:
    """The group reports that steps are left.

    If no update follows, it makes the remaining ones, and the first ones count as well.
    """
    this = Round(monkeypatch, early=True, awaited=made)
    first = this.train()
    assert (first.unfinished, first.valid_tokens, len(this.steps)) == (True, made * TOKENS, made)
    assert first.seconds == (0.5 if made else 0.0)
    this.replica.quorum_requested = False
    whole = this.train()
    assert this.steps == [9, 10, 11, 12]
    assert (whole.unfinished, whole.valid_tokens, whole.entries[0].num_batches) == (
        False,
        4 * TOKENS,
        4,
    )
    assert this.changes == [{0: made * TOKENS / 100}, {0: 4 * TOKENS / 100}]
    assert this.lr_steps == [8, 8 + made]


def test_a_group_that_came_late_has_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives nothing to the others' update. If the others are gone, it makes the round itself."""
    this = Round(monkeypatch)
    this.strategy._exchanges_at_once = True
    assert this.train() == Contribution(unfinished=True)
    assert not this.train().unfinished
    assert len(this.steps) == 4


def test_a_group_that_came_late_gives_its_changes_of_earlier_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fragments, it has moved since the fragment's last exchange, even without a step in this
    round.
    """
    this = Round(monkeypatch, sync_steps=8, num_fragments=2)
    this.strategy._exchanges_at_once, this.strategy._trained_tokens = True, [30, 20]
    made = this.train()
    assert made == Contribution(unfinished=True, has_earlier_changes=True)
    assert not made.is_empty
    assert this.changes == this.given == [{0: 0.3}]


def test_a_group_that_is_awaited_at_once_gives_its_changes_of_earlier_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are ready before its first step.

    A change that it does not give would be overwritten.
    """
    this = Round(monkeypatch, early=True, awaited=0, sync_steps=8, num_fragments=2)
    this.strategy._trained_tokens = [30, 20]
    assert this.train() == Contribution(unfinished=True, has_earlier_changes=True)
    assert (this.steps, this.changes, this.given) == ([], [{0: 0.3}], [{0: 0.3}])


def test_a_group_that_came_late_gives_the_batches_of_steps_made_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokens are in the weight of its change.

    Without the batches in the update, they would be trained twice.
    """
    this = Round(monkeypatch, fragment_sync_delay=2)
    this.train()
    strategy = this.strategy
    assert strategy._work_ahead is not None
    # Commit the round.
    strategy._work_ahead.previous, strategy._trained_tokens, strategy._given_tokens = (
        None,
        [2 * TOKENS],
        {},
    )
    strategy.start_update()
    strategy._position.step, strategy._exchanges_at_once = 3, True
    made = this.train()
    assert (made.unfinished, made.valid_tokens, made.entries) == (
        True,
        2 * TOKENS,
        (Entry(0, 12, 2, b"state"),),
    )
    assert this.changes[-1] == {0: 2 * TOKENS / 100}
    this.train()  # the others are gone
    assert this.steps == [*range(9, 19)]


def test_a_round_without_more_data_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update has the last batches. The next round finds no data."""
    made = (this := Round(monkeypatch, data=2, fragment_sync_delay=2)).train()
    assert (made.unfinished, made.valid_tokens) == (False, 2 * TOKENS)
    assert not this.sent
    with pytest.raises(DataEndedError):
        Round(monkeypatch, data=0).train()


# Fragments


def test_fragments_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens since its last exchange weight each fragment.

    The last round exchanges all fragments.
    """
    this = Round(monkeypatch, sync_steps=12, num_fragments=3, last=17)
    assert [this.strategy._fragments_of(update) for update in range(1, 6)] == [
        [0],
        [1],
        [2],
        [0],
        [0, 1, 2],
    ]
    this.strategy._trained_tokens = [10, 20, 30]
    this.train()
    assert this.changes == [{2: (30 + 4 * TOKENS) / 100}]


def test_steps_are_made_while_the_exchange_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are steps of the next round.

    Their batches follow the uncommitted ones, and are not in the exchange.
    """
    this = Round(monkeypatch, fragment_sync_delay=2)
    made = this.train()
    assert this.sent == [(4, made)]
    assert (made.entries[0].num_batches, made.valid_tokens) == (4, 4 * TOKENS)
    assert this.steps == [9, 10, 11, 12, 13, 14]
    strategy = this.strategy
    done, ahead = strategy.work, strategy._work_ahead
    assert ahead is not None
    assert (done.inner_steps, done.overlapped_seconds) == (4, 2.0)
    assert (ahead.inner_steps, ahead.readings[0].entry) == (2, Entry(0, 12, 2, b"state"))
    ahead.previous = None  # the round is committed
    strategy.start_update()
    strategy._position.step = 3
    assert strategy._work_ahead is None
    assert strategy.work is ahead
    more = this.train()
    assert this.steps == [9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert more.entries[0].num_batches == 4
    assert this.lr_steps == [8, 14]


def test_a_group_that_leaves_makes_no_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps would be void, and would take time from the exchange."""
    this = Round(monkeypatch, fragment_sync_delay=3)
    this.told = True
    this.train()
    assert (len(this.steps), len(this.sent)) == (4, 1)


@pytest.mark.parametrize(
    ("timeout", "spent", "early", "steps", "broken_off"),
    [
        (6.1, 0.0, False, 4, ""),  # three steps of one second fit into half of the time
        (5.9, 0.0, False, 1, "3 steps of the round were left, too many for drain_timeout_seconds"),
        (7.9, 0.1, False, 4, ""),
        (7.9, 0.13, False, 1, "3 steps of the round were left, too many for drain_timeout_seconds"),
        (1.5, 0.0, True, 4, ""),  # the group has asked: the others take its steps when they come
        (8.0, 0.6, True, 4, ""),
        (8.0, 0.63, True, 1, ""),  # after another step, three quarters of the time would be over
    ],
)
def test_a_group_that_leaves_finishes_the_round_if_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
    timeout: float,
    spent: float,
    early: bool,
    steps: int,
    broken_off: str,
) -> None:
    """Half of the time is for local steps.

    Up to three quarters may pass while the group only waits for others.
    """
    this = Round(monkeypatch, early=early, drain_timeout_seconds=timeout)
    this.told, this.spent = True, spent
    make = this._make_step

    def make_step(step: int, slots: Any) -> None:
        make(step, slots)
        if len(this.steps) > 1 and not early:
            this.spent += 1 / timeout

    this.strategy._make_step = make_step
    if steps == 4:
        assert not this.train().unfinished
    else:
        with pytest.raises(Leaving):
            this.train()
    assert len(this.steps) == steps
    assert this.strategy._break_off_reason == broken_off


BROKEN_OFF = "3 steps of the round were left, too many for drain_timeout_seconds"


@pytest.mark.parametrize("they_come", [True, False])
def test_a_group_that_leaves_with_an_unsaved_state_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, they_come: bool
) -> None:
    """If the others leave as well, one of them saves.

    If they are at the end of their round, they get the steps of this group. It waits for half of
    its time, without further steps. The other half is for the save.
    """
    this = Round(monkeypatch, drain_timeout_seconds=5.9)
    this.told = this.lacks = True
    this.spent = 0.3

    def await_others(is_over: Any) -> bool:
        assert not is_over()
        this.spent = 0.49
        assert not is_over()
        this.spent = 0.51
        assert is_over()
        return they_come

    this.replica.await_others = await_others
    if they_come:
        assert this.train().unfinished
    else:
        with pytest.raises(Leaving):
            this.train()
    assert len(this.steps) == 1
    assert this.strategy._break_off_reason == BROKEN_OFF


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_save_during_a_round_has_the_model_of_the_last_update(
    monkeypatch: pytest.MonkeyPatch, spoiled: bool
) -> None:
    """The save also has the step and LR of that update. Moments that are not finite are dropped."""
    this, done = Round(monkeypatch), list[str]()
    vars(this.strategy).update(
        outer=SimpleNamespace(restore_model=lambda: done.append("restore")),
        state=SimpleNamespace(
            has_nonfinite_moments=spoiled, drop_moments=lambda: done.append("drop")
        ),
    )
    this.training.step = 11
    this.strategy.go_back_to_update()
    assert done == ["drop", "restore"][not spoiled :]
    assert (this.training.step, this.lr_steps) == (8, [8])


def test_an_overdue_group_need_not_finish_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the deadline it requests the quorum. From then on it only waits for the others."""
    this = Round(monkeypatch, sync_deadline_seconds=1.0, awaited=2, drain_timeout_seconds=3.0)
    this.told = True
    assert not this.train().unfinished
    assert len(this.steps) == 2


@pytest.mark.parametrize("wanted", [2, 5])
def test_a_joiner_is_served_between_two_steps(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    """Also between two steps that are made during the exchange."""
    this = Round(monkeypatch, fragment_sync_delay=3)
    this.wanted = wanted
    this.train()
    assert this.served_at == [wanted]


@pytest.mark.parametrize(("last", "steps"), [(13, 5), (12, 4)])
def test_no_step_is_made_after_the_last_round(
    monkeypatch: pytest.MonkeyPatch, last: int, steps: int
) -> None:
    """The last round may be shorter than the delay. No steps follow it."""
    this = Round(monkeypatch, fragment_sync_delay=3, last=last)
    this.train()
    assert len(this.steps) == steps
    assert len(this.sent) == (last > 12)


def test_a_group_that_is_awaited_makes_no_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its round may not be over: the others may have met only for a group that heals."""
    this = Round(monkeypatch, early=True, awaited=2, fragment_sync_delay=2)
    assert this.train().unfinished
    assert not this.sent


def test_a_slow_group_requests_the_quorum_at_the_deadline_and_trains_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group trains until the others are ready, and gives the steps made so far.

    No group waits for more steps.
    """
    this = Round(monkeypatch, sync_deadline_seconds=2.0, awaited=3)
    made = this.train()
    assert (this.asked_at, len(this.steps)) == ([2], 3)
    assert (made.unfinished, made.valid_tokens) == (False, 3 * TOKENS)


def test_a_fast_group_makes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for slower groups."""
    made = (this := Round(monkeypatch, sync_deadline_seconds=9.0, awaited=0)).train()
    assert (len(this.steps), made.unfinished) == (4, False)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            {"num_fragments": 4},
            r"num_fragments must be at most the number of blocks of the model \(3\), got 4",
        ),
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
def test_fragments_that_do_not_fit_the_model_are_refused(
    config: dict[str, Any], error: str
) -> None:
    """An empty fragment, a module that the model lacks, or a parameter in no fragment."""
    with pytest.raises(ConfigError, match=error):
        cut(**config)


def test_a_model_is_cut() -> None:
    """The fragments have blocks of about equal size, or are as the config says.

    Frozen parameters are in no fragment.
    """
    assert cut(num_fragments=2) == [1, 1, 0]
    assert cut(module_fqns_per_model_fragment=[["layers"], ["output", "layers.1"]]) == [0, 1, 1]


def test_ranks_with_other_shards_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights without shards are equal on all ranks of a group.

    The ranks must exchange them in the same round.
    """
    cuts = []
    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            model = torch.nn.Module()
            model.first = torch.nn.Linear(3, 2, bias=False)  # 2 and 1 of its columns
            model.first.weight = torch.nn.Parameter(
                distribute_tensor(model.first.weight.data, mesh, [Shard(1)])
            )
            model.second = torch.nn.Linear(3, 1, bias=False)
            cuts.append(cut(model, num_fragments=2))
        finally:
            dist.destroy_process_group()
    assert cuts == [[0, 1], [0, 1]]


def cut(model: torch.nn.Module | None = None, **config: Any) -> list[int]:
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _config=FaultTolerance(semi_sync_method="diloco", **config),
        _training=SimpleNamespace(model_parts=[model or layered()]),
        _group=SimpleNamespace(gather=lambda value: [value]),
    )
    return strategy._assign_fragments()


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
def test_only_a_group_with_own_steps_keeps_a_share_of_its_weights(
    sent: dict[int, int], last: int, alpha: float
) -> None:
    """A group that replays an update, or came late to it, would keep a share of the former anchors.

    Its next change would undo a part of the others' update.
    """
    found: list[float] = []
    counted: list[int] = []
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _config=FaultTolerance(fragment_update_alpha=0.5),
        _training=SimpleNamespace(
            num_steps=last,
            lr_schedulers=SimpleNamespace(schedulers=[]),
            beat=lambda: None,
            await_staging=lambda: None,
            refresh_converters=lambda: None,
        ),
        _steps_per_round=4,
        _trained_tokens=[10],
        _given_tokens=dict(sent),
        _work_ahead=None,
        _group=SimpleNamespace(gather=lambda value: [value]),
        _counters=SimpleNamespace(advance=lambda update: counted.append(update.tokens)),
        outer=SimpleNamespace(step=lambda alpha: found.append(alpha) or 0.0),
        work=RoundWork(9, lr=0.1),
    )
    sums = SimpleNamespace(is_copy=True, write=lambda scale=None: None)
    strategy.apply(
        Update(step=3, tokens=1, lineage=1, scale=1.0, entries=[], readers=[], sums=sums)
    )
    assert (found, counted) == ([alpha], [1])
    assert strategy._trained_tokens == [10 - sum(sent.values())]


def test_weights_that_cannot_hold_the_outer_model_are_refused() -> None:
    """A checkpoint has the model's weights, and would round the anchors.

    Frozen weights may have any dtype.
    """
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad = False
    model.bias.data = model.bias.data.bfloat16()
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(_training=SimpleNamespace(model_parts=[model]))
    strategy._check_dtypes()
    model.weight.data = model.weight.data.bfloat16()
    with pytest.raises(
        ConfigError, match=r'training\.dtype must be "float32" .* got "bfloat16" for weight'
    ):
        strategy._check_dtypes()


@pytest.mark.parametrize(
    ("seconds", "read", "broken_off", "reason"),
    [
        (0.0, 3, "one step was left", "SIGTERM: one step was left"),
        (0.0, 3, "", "SIGTERM: the others were not there in time to exchange the round"),
        (1.5, 3, "", ""),  # the round is in an update
        (0.0, 0, "", ""),  # the group came to the end of others' round, or has not begun one
    ],
)
def test_a_departure_names_the_batches_that_are_in_no_update(
    seconds: float, read: int, broken_off: str, reason: str
) -> None:
    """The group broke its round off, or no other group came to exchange it."""
    readings = [Reading(Entry(0, 8, read, b""), [], "0")] if read else []
    departure = leaving(
        RoundWork(9, lr=0.1, readings=readings, seconds=seconds), broken_off=broken_off
    )
    assert departure == Departure(
        reason or "SIGTERM", in_order=not reason, void=readings if reason else []
    )


def leaving(work: RoundWork, ahead: RoundWork | None = None, broken_off: str = "") -> Departure:
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(_break_off_reason=broken_off, _work_ahead=ahead, work=work)
    return strategy.describe_departure()


def test_the_batches_of_a_slot_are_one_stretch() -> None:
    """The batches are void, and trained again. An audit must be able to count them."""
    readings = [Reading(Entry(1, first, 1, b""), [], "c5") for first in (30, 31)]
    (void,) = leaving(RoundWork(31, 0.1, readings)).void
    assert (void.entry.slot, void.entry.first_batch, void.entry.num_batches) == (1, 30, 2)


@pytest.mark.parametrize("made_ahead", [False, True])
def test_a_group_that_leaves_after_a_round_names_the_steps_of_the_next(made_ahead: bool) -> None:
    """These steps were made during the exchange.

    They are void, although the group leaves in order.
    """
    ahead = RoundWork(31, 0.1, [Reading(Entry(1, 30, 1, b""), [], "c5")])
    departure = leaving(RoundWork(27, 0.1, seconds=1.0), ahead if made_ahead else None)
    assert departure.in_order
    assert [reading.entry.first_batch for reading in departure.void] == [30] * made_ahead


@pytest.mark.parametrize(
    ("committed", "void"),
    [
        (2, [(1, 8, 6)]),  # of both rounds
        (3, [(1, 12, 2)]),  # the first one has just become an update
        (4, []),
    ],
)
def test_a_rank_that_the_timeout_ends_names_the_batches_of_its_rounds(
    committed: int, void: list[tuple[int, int, int]]
) -> None:
    """Steps made ahead count as well. A batch in an update is not void."""
    work = RoundWork(9, 0.1, [Reading(Entry(1, 8, 4, b""), [], "c5")])
    ahead = RoundWork(13, 0.1, [Reading(Entry(1, 12, 2, b""), [], "c5")], previous=work)
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _steps_per_round=4,
        _uncommitted_work=work,
        _work_ahead=ahead,
        _position=SimpleNamespace(step=committed),
    )
    found = [reading.entry for reading in strategy.find_uncommitted()]
    assert [(entry.slot, entry.first_batch, entry.num_batches) for entry in found] == void


@pytest.mark.parametrize(
    ("step", "exclusions", "opening", "done", "heals"),
    [
        (8, 0, AfterOpening.TRAIN, ["open"], False),
        (8, 0, AfterOpening.EXCHANGE_AT_ONCE, ["open"], False),
        (8, 0, AfterOpening.HEAL, ["open"], True),
        (8, 1, None, ["anchors"], True),
        (12, 0, None, [], False),
        (12, 1, None, [], False),
    ],
)
def test_what_follows_an_update(
    step: int, exclusions: int, opening: AfterOpening | None, done: list[str], heals: bool
) -> None:
    """A group whose change was not finite heals. If no peer is left, it has the anchors.

    Otherwise it opens the next round. After the last update there is none.
    """
    found: list[str] = []
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _training=SimpleNamespace(step=step, num_steps=12),
        _position=SimpleNamespace(exclusions=exclusions),
        _replica=SimpleNamespace(make_opening_rounds=lambda: found.append("open") or opening),
        _exchanges_at_once=False,
        state=SimpleNamespace(restore=lambda: found.append("anchors")),
    )
    assert strategy.meet_after_update() is heals
    assert found == done
    assert strategy._exchanges_at_once is (opening is AfterOpening.EXCHANGE_AT_ONCE)


@pytest.mark.parametrize(("own", "sibling"), [(False, False), (True, False), (False, True)])
def test_moments_are_dropped_on_all_ranks_or_on_none(own: bool, sibling: bool) -> None:
    """A donor may not know yet that its gradients were not finite.

    The shard of one rank may show it.
    """
    dropped: list[None] = []
    strategy = RoundStrategy.__new__(RoundStrategy)
    vars(strategy).update(
        _group=SimpleNamespace(gather=lambda value: [value, sibling]),
        _training=SimpleNamespace(refresh_converters=lambda: None),
        _trained_tokens=[1],
        outer=SimpleNamespace(restore_model=lambda: None),
        state=SimpleNamespace(has_nonfinite_moments=own, drop_moments=lambda: dropped.append(None)),
    )
    strategy._adopt_state()
    assert bool(dropped) == (own or sibling)


@pytest.mark.parametrize(
    ("loads", "ahead", "keeps"), [(False, 0, True), (True, 0, False), (False, 2, False)]
)
def test_a_group_that_rolls_back_keeps_its_round(
    monkeypatch: pytest.MonkeyPatch, loads: bool, ahead: int, keeps: bool
) -> None:
    """The missed update is lost with its holders.

    The group gives the same change, and makes no step again.
    """
    this = Round(monkeypatch, fragment_sync_delay=ahead)
    strategy, restored = this.strategy, []
    work = strategy.start_update()
    first = this.train()
    assert len(this.steps) == 4 + ahead

    def take_other_weights() -> None:
        restored.append(True)
        strategy._forget_work()

    strategy.state = SimpleNamespace(restore=take_other_weights)  # type: ignore[assignment]  # a stand-in
    if loads:
        strategy._forget_work()
    this.replica.others_make_opening_rounds = False
    assert not strategy.resume_after_heal()
    assert bool(restored) == bool(ahead)
    assert (strategy.start_update() is work) == keeps
    if keeps:
        assert this.train() == first
        assert this.steps == [9, 10, 11, 12]
        assert this.changes == [{0: 4 * TOKENS / 100}] * 2
        strategy._forget_work()
        strategy.resume_after_heal()
        assert strategy._work_ahead is None  # a load of a state ends it


@pytest.mark.parametrize(
    ("groups", "quantize", "told"),
    [(7, True, ""), (8, True, "sends 1 times"), (12, True, "1.5 times"), (12, False, "")],
)
def test_useless_quantization_is_reported(
    groups: int,
    quantize: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With many groups, each one would send more in 8 bits than in fp32."""
    round_strategy._warn_if_quantizing_sends_more(
        FaultTolerance(group_size=groups, semi_sync_method="diloco", should_quantize=quantize)
    )
    assert bool(caplog.text) == bool(told)
    assert told in caplog.text
