# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer's own work around an update, without a model. tests/integration has whole runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.host import cpu

cpu.prepare()  # before anything imports torchtitan, which reads the device at import

from torchtitan.train import Trainer  # noqa: E402

import titan_ft.trainer as trainer_module  # noqa: E402
from titan_ft.config import FaultTolerance  # noqa: E402
from titan_ft.engine.feed import Reading  # noqa: E402
from titan_ft.engine.strategy import Departure  # noqa: E402
from titan_ft.engine.work import Work  # noqa: E402
from titan_ft.protocol.decision import LastToLeave  # noqa: E402
from titan_ft.protocol.errors import Leaving  # noqa: E402
from titan_ft.protocol.ledger import Entry  # noqa: E402
from titan_ft.protocol.position import Position  # noqa: E402
from titan_ft.protocol.report import NOTHING  # noqa: E402
from titan_ft.run.error_file import FILE_ENV, read_error  # noqa: E402
from titan_ft.run.events import Event, Hung  # noqa: E402
from titan_ft.trainer import ReplicaTrainer  # noqa: E402


def trainer(**parts: Any) -> Any:
    """Return a stand-in for `self` with the parts of a trainer that a method uses."""
    return SimpleNamespace(**parts)


def test_the_links_are_closed_although_the_watchdog_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training may end at any time, even while the replica dimension is being built. The other
    groups must stop waiting.
    """
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
        _strategy=SimpleNamespace(state=SimpleNamespace(close=lambda: closed.append("memory"))),
        _replica=None,
    )
    with pytest.raises(RuntimeError, match="cannot join it"):
        this.train()
    assert closed == ["watchdog", "chaos", "links", "memory"]


def test_a_hang_is_reported_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hangs in a row are a crash loop. The agent's line about it names the hang."""
    path = tmp_path / "rank-0.error.json"
    monkeypatch.setenv(FILE_ENV, str(path))
    emitted: list[Event] = []
    config = SimpleNamespace(fault_tolerance=FaultTolerance(hang_timeout_seconds=20))
    this = trainer(
        job_config=config,
        _events=SimpleNamespace(emit=emitted.append),
        _position=SimpleNamespace(step=7),
    )
    ReplicaTrainer._report_hang(this)
    read = read_error(path)
    assert read is not None
    assert (
        read.text
        == "HungError: no progress of the training thread for 20 s; its log has the stacks"
    )
    assert not read.transient
    assert emitted == [Hung(step=7)]


class Step:
    """A trainer in its step, which records its actions in order."""

    def __init__(
        self,
        committed: Any,
        leaving: bool = False,
        heals: Sequence[bool] = (),
        step: int = 4,
        **settings: int,
    ) -> None:
        self.done: list[str] = []
        self.dropped: list[set[int]] = []
        note = lambda what, result=None: lambda *_: self.done.append(what) or result  # noqa: E731
        self.heals, self.work = list(heals), Work(4, 0.1)
        strategy = SimpleNamespace(
            start_update=lambda: self.work,
            train=lambda slots, arm: NOTHING,
            discard=None,
            apply=note("apply", 1.0),
            state=SimpleNamespace(reserve=note("reserve")),
            last_step_of=lambda updates: updates,
            meet_after_update=lambda: (
                self.done.append("meet") or bool(self.heals and self.heals.pop(0))
            ),
            resume_after_heal=lambda: (
                self.done.append("resume") or bool(self.heals and self.heals.pop(0))
            ),
        )
        replica = SimpleNamespace(
            commit=lambda contribution, train, discard: committed,
            slots_to_read=lambda: [0],
            arm=None,
            digest_if_due=lambda: None,
            offer_state=lambda: self.done.append("offer"),
            heal=note("heal", 6),
            heal_seconds=0.0,
        )
        self.this = ReplicaTrainer.__new__(ReplicaTrainer)
        vars(self.this).update(
            _replica=replica,
            _strategy=strategy,
            _has_started=True,
            _chaos=None,
            _update_ended_at=None,
            step=step,
            _local=SimpleNamespace(clear_gradients=lambda: None),
            optimizers=SimpleNamespace(zero_grad=lambda: None),
            checkpointer=SimpleNamespace(
                maybe_wait_for_staging=lambda: None, withdraw_corrupt=lambda: None
            ),
            metrics_processor=SimpleNamespace(ntokens_since_last_log=1),
            parallel_dims=None,
            _checkpoint_view=SimpleNamespace(participants=None),
            _links=SimpleNamespace(
                exchange=SimpleNamespace(pop_sent_bytes=lambda: 7), note_commit=note("note commit")
            ),
            _step_log=SimpleNamespace(emit=note("emit"), log=note("log"), flush=lambda: None),
            ntokens_seen=0,
            _position=SimpleNamespace(leaving=leaving, step=3),
            _group=SimpleNamespace(gather=None),
            setup=SimpleNamespace(ranks_on_host=2),
            _feed=SimpleNamespace(close_all_but=self.dropped.append),
            job_config=SimpleNamespace(
                comm=SimpleNamespace(train_timeout_seconds=7),
                fault_tolerance=SimpleNamespace(
                    **{"replica_id": 0, "group_size": 2, "heal_donors": 8, **settings}
                ),
            ),
        )

    def make(self) -> None:
        self.this.train_step(iter(()))


COMMITTED = SimpleNamespace(update=SimpleNamespace(step=4), participants=[0, 1])


def test_a_commit_is_applied_and_recorded() -> None:
    """The state has the update before the event says so."""
    step = Step(COMMITTED)
    step.make()
    assert step.done == ["apply", "note commit", "emit", "log", "reserve", "offer", "meet"]
    assert step.this._checkpoint_view.participants == [0, 1]
    assert step.work.wire_bytes == 7
    assert step.dropped == [{0}]


@pytest.mark.parametrize(
    "settings", [{"heal_donors": 1}, {"group_size": 1}], ids=["shared host", "nobody to serve"]
)
def test_no_memory_is_reserved_where_it_may_be_too_much(settings: dict[str, int]) -> None:
    """A host may have no room for a copy of each of its groups. A single group never serves its
    state.
    """
    step = Step(COMMITTED, **settings)
    step.make()
    assert step.done == ["apply", "note commit", "emit", "log", "offer", "meet"]


def test_without_a_commit_nothing_is_applied() -> None:
    """The gradients are void, and the step ends with a donor's state."""
    step = Step(None)
    step.make()
    assert step.done == ["heal", "resume"]
    assert step.this.step == 6


def test_a_group_heals_until_it_has_the_state_of_the_others() -> None:
    """A group with rounds meets the others after its update, and again after each heal."""
    step = Step(COMMITTED, heals=[True, True, False])
    step.make()
    assert step.done[-5:] == ["meet", "heal", "resume", "heal", "resume"]


@pytest.mark.parametrize(
    ("first", "heals", "shortened"), [(1, [True], True), (1, [], False), (4, [True], False)]
)
def test_the_timeouts_are_shortened_after_the_first_update(
    first: int, heals: list[bool], shortened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan does so at the end of its step 1. A group that heals, or makes rounds, ends its
    first update on a later step.
    """
    seconds: list[float] = []
    monkeypatch.setattr(
        "titan_ft.trainer.set_pg_timeouts",
        lambda timeout, dims: seconds.append(timeout.total_seconds()),
    )
    Step(COMMITTED, heals=heals, step=first).make()
    assert seconds == [7.0] * shortened


def test_a_group_that_leaves_applies_its_last_step() -> None:
    """The group has committed that step with the others, so its event is due as well."""
    step = Step(COMMITTED, leaving=True)
    with pytest.raises(Leaving):
        step.make()
    assert step.done == ["apply", "note commit", "emit", "log"]


class Leave:
    """A trainer that leaves after update 3, and records its actions in order.

    Args:
        last: the groups with which the job's state leaves.
        lacks: the state is not saved yet.
        turn: it is this group's turn to save the state.
    """

    def __init__(self, last: LastToLeave | None, lacks: bool = True, turn: bool = True):
        self.done: list[str] = []
        self.this = this = ReplicaTrainer.__new__(ReplicaTrainer)
        note = lambda what, result=None: lambda *_: self.done.append(what) or result  # noqa: E731
        vars(this).update(
            _replica=SimpleNamespace(
                find_last_to_leave=lambda: last, await_turn_to_save=note("turn", turn)
            ),
            _links=SimpleNamespace(membership=SimpleNamespace(close=note("close"))),
            checkpointer=SimpleNamespace(
                lacks_state=lambda: lacks,
                watch_other_writers=lambda step: lambda: False,
                holds_state=lambda step: False,
                withdraw_corrupt=note("withdraw"),
                save_on_leave=lambda step, seconds: self.done.append(f"save {step} in {seconds}"),
            ),
            _watchdog=SimpleNamespace(paused=contextlib.nullcontext),
            _drain=SimpleNamespace(seconds_left=17.0),
            _position=SimpleNamespace(step=3),
            _strategy=SimpleNamespace(
                last_step_of=lambda updates: updates, go_back_to_update=note("go back")
            ),
            _emit_drained=note("report"),
            step=4,
            job_config=SimpleNamespace(fault_tolerance=FaultTolerance()),
        )
        this._leave()


LAST = LastToLeave((0, 1), agreed=True)


@pytest.mark.parametrize(
    ("last", "lacks", "turn", "done"),
    [
        # Other groups train on, and must not wait.
        (None, True, True, ["close", "withdraw", "report"]),
        # The state is saved, or checkpoints are off.
        (LAST, False, True, ["close", "withdraw", "report"]),
        # Another group has saved the state.
        (LAST, True, False, ["withdraw", "turn", "close", "report"]),
        (LAST, True, True, ["withdraw", "turn", "go back", "save 3 in 17.0", "close", "report"]),
        (
            LastToLeave((0,), agreed=False),
            True,
            True,
            ["close", "withdraw", "turn", "go back", "save 3 in 17.0", "close", "report"],
        ),
    ],
)
def test_the_last_groups_to_leave_save_before_they_go(
    last: LastToLeave | None, lacks: bool, turn: bool, done: list[str]
) -> None:
    """If other groups may train on, heartbeats end first. If all groups leave, they end last, so
    that the others see that this group lives.
    """
    assert Leave(last, lacks, turn).done == done


def test_a_group_that_has_saved_saves_no_more() -> None:
    """Otherwise the drain's timer would later report an incomplete checkpoint."""
    assert Leave(LAST).this._saving_step is None


def test_a_rank_that_the_timeout_ends_in_its_save_says_so() -> None:
    """The reason names the incomplete checkpoint: the step itself was finished."""
    emitted: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    events = SimpleNamespace(emit=emitted.append, has_outage=False)
    vars(this).update(_events=events, _position=SimpleNamespace(step=3), _saving_step=3)
    this._report_abandon("the time is over")
    assert emitted[0].reason == "the time is over, before the checkpoint of step 3 was complete"


@pytest.mark.parametrize(
    ("departure", "in_order", "void"),
    [
        (Departure("SIGTERM", True), True, []),
        (Departure("SIGTERM", True, [Reading(Entry(1, 30, 1, b""), [], "c5")]), True, [(1, 30, 1)]),
        (
            Departure("SIGTERM: too late", False, [Reading(Entry(1, 8, 3, b""), [], "c5")]),
            False,
            [(1, 8, 3)],
        ),
    ],
)
def test_a_group_that_leaves_says_which_batches_are_void(
    departure: Departure,
    in_order: bool,
    void: list[tuple[int, int, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that leaves in order reports its digest. A group that does not logs a warning."""
    monkeypatch.setattr(trainer_module.logger, "propagate", True)
    emitted: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        _events=SimpleNamespace(emit=emitted.append, has_outage=False),
        _position=SimpleNamespace(step=3, lineage=5),
        _strategy=SimpleNamespace(
            describe_departure=lambda: departure, state=SimpleNamespace(digest=lambda: "d1ge57")
        ),
    )
    this._emit_drained()
    (event,) = emitted
    assert (event.step, event.reason, event.in_order) == (3, departure.reason, in_order)
    assert (event.digest, event.lineage) == (
        ("d1ge57", "000000000005") if in_order else (None, None)
    )
    assert [(each.slot, each.first_batch, each.num_batches) for each in event.void or ()] == void
    assert ("too late; void: 3 from batch 8 of slot 1" in caplog.text) is not in_order


@pytest.mark.parametrize(
    ("readings", "line"),
    [
        ([], ""),
        (
            [Reading(Entry(1, 8, 6, b""), [], "c5")],
            "titan_ft: SIGTERM: void: 6 from batch 8 of slot 1\n",
        ),
    ],
)
def test_a_rank_that_the_timeout_ends_names_its_void_batches(
    readings: list[Reading], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line goes to the terminal as well, because the log may be lost with the rank."""
    emitted: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        _events=SimpleNamespace(emit=emitted.append, has_outage=False),
        _position=SimpleNamespace(step=3),
        _strategy=SimpleNamespace(find_uncommitted=lambda: readings),
    )
    this._report_abandon("too late")
    (event,) = emitted
    assert (event.step, event.reason, event.in_order) == (3, "too late", False)
    assert [batches.first_batch for batches in event.void or ()] == [8] * len(readings)
    assert capfd.readouterr().err == line


def test_a_rank_that_the_timeout_ends_before_it_trains_names_no_batches() -> None:
    """The rank may have no model yet."""
    emitted: list[Any] = []
    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        _events=SimpleNamespace(emit=emitted.append, has_outage=False), _position=Position()
    )
    this._report_abandon("too early")
    assert [(event.step, event.void) for event in emitted] == [(0, None)]


@pytest.mark.parametrize(("healed", "goes_on"), [(5, True), (7, False)])
def test_a_group_that_heals_at_the_end_trains_on_from_an_earlier_state(
    healed: int, goes_on: bool
) -> None:
    """All groups with the final state may have died, and the others have started anew."""
    digests = ["d1ge57", None]
    finished: list[str] = []

    def heal(replica: object) -> None:
        this.step = healed

    this: Any = ReplicaTrainer.__new__(ReplicaTrainer)
    vars(this).update(
        step=7,
        ntokens_seen=0,
        setup=SimpleNamespace(rank=1),  # rank 0 would write a mark to the run's folder
        job_config=SimpleNamespace(training=SimpleNamespace(steps=7)),
        _replica=SimpleNamespace(finish=digests.pop),
        _links=SimpleNamespace(end_roll_call=lambda: finished.append("roll call ended")),
        _position=SimpleNamespace(step=7, lineage=0),
        _heal=heal,
        checkpointer=SimpleNamespace(
            withdraw_corrupt=lambda: None,
            finish=lambda step: None,
            raise_error_of_last_step=lambda: finished.append("raised"),
        ),
        _events=SimpleNamespace(emit=lambda event: finished.append(event.digest)),
        _step_log=SimpleNamespace(flush=lambda: None),
    )
    assert this.should_continue_training() is goes_on
    assert finished == ([] if goes_on else ["roll call ended", "d1ge57", "raised"])
