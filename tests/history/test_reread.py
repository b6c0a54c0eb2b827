# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's batches held against those of an uninterrupted reader."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import pytest

from tests.event_builder import event
from titan_ft.history.batches.audit import Audit, audit
from titan_ft.history.batches.reread import Reread, Shard, TrainedBatches, collect, compare
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event

SHARD = Shard(0, 3, 4)
SETUP: dict[str, Any] = {
    "dataset": "texts",
    "seq_len": 8,
    "local_batch_size": 2,
    "parallelism": {},
    "versions": {},
}


def extend(batch: int, former: str) -> str:
    return f"{zlib.crc32(str(batch).encode(), int(former, 16)):08x}"


def trained(
    first: int, number: int, step: int, content: Iterable[int] | None = None
) -> TrainedBatches:
    checksum = "0"
    for batch in range(first, first + number) if content is None else content:
        checksum = extend(batch, checksum)
    return TrainedBatches(first, number, checksum, step, 1, 1)


def read(all_trained: Iterable[TrainedBatches], length: int = 1000) -> Reread:
    found = Reread()
    compare(SHARD, all_trained, iter(range(length)), extend, found)
    return found


def test_the_same_batches() -> None:
    """Batches of steps and of rounds compare in any order, also those that were trained twice."""
    found = read([trained(4, 3, 5), trained(0, 1, 1), trained(1, 3, 2), trained(1, 3, 3)])
    assert (found.num_compared, found.differing, found.unknown, found.num_shards) == (10, [], [], 1)


def test_other_batches_are_named() -> None:
    """A finding has slot, range and steps; consecutive batches are one finding."""
    wrong = [trained(3, 1, 4, [50]), trained(4, 1, 5, [51]), trained(8, 2, 9, [8, 10])]
    found = read([trained(0, 3, 1), *wrong, trained(5, 3, 6)])
    assert [
        (each.slot, each.first_batch, each.num_batches, each.steps) for each in found.differing
    ] == [
        (1, 3, 2, (4, 5)),
        (1, 8, 2, (9, 9)),
    ]
    assert (
        "not the batches of an uninterrupted reader (shard 3 of 4, from step 4 on, by group 1)"
        in str(found.differing[0])
    )


def test_data_that_differ_from_their_first_batch_on_prove_nothing() -> None:
    """If data differ before any reopening, they have changed, or have no fixed order."""
    found = read([trained(0, 1, 1, [7]), trained(1, 1, 2, [9])])
    assert found.differing == []
    assert "differ from the very first batch on" in found.unknown[0]


def test_data_that_end_early_are_unknown() -> None:
    found = read([trained(0, 2, 1), trained(2, 2, 2)], length=3)
    assert "end with batch 3, and batches from 2 on were trained" in found.unknown[0]


def job(*openings: int, arguments: list[str] | None = None, **second: Any) -> list[Event]:
    """Make the events of a group whose second process continued with batch 2."""
    arguments = ["--a"] if arguments is None else arguments
    events = []
    for attempt, first in enumerate((0, 2)):
        who = {"pid": attempt, "attempt": attempt, "replica": 1}
        setup = {**SETUP, **(second if attempt else {})}
        events.append(
            event("worker_started", time=10.0 * attempt, setup=setup, arguments=arguments, **who)
        )
        if first in openings:
            told = {"slot": 1, "shard": 3, "num_shards": 4, "first_batch": first, "exact": None}
            events.append(event("data_opened", time=10.0 * attempt + 1, **told, **who))
        events += [commit(batch, **who) for batch in (first, first + 1)]
    return events


def commit(batch: int, step: int = 0, **who: Any) -> Event:
    data = {"slot": 1, "first_batch": batch, "num_batches": 1, "checksum": extend(batch, "0")}
    time = 2.0 + batch + 10.0 * who["attempt"]
    fields = {
        "step": step or batch + 1,
        "participants": [1],
        "batches": {"1": [batch, 1]},
        "data": data,
    }
    return event("step_committed", time=time, forward_passes=1, **fields, **who)


def test_what_is_collected() -> None:
    """The collection has all trained batches of each shard, and the command line that reads it
    again.
    """
    found = collect(RunRecord(job(0, 2)))
    assert found.unknown == []
    assert found.shards == {SHARD: {trained(batch, 1, batch + 1) for batch in range(4)}}
    assert found.readers[0].arguments == ["--a"]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (job(2), "nothing tells which shard of slot 1 group 1, attempt 0, rank 0 read"),
        (
            job(0, 2, seq_len=16),
            "attempt 0, rank 0 read with settings that are not those of the last launch",
        ),
    ],
)
def test_what_cannot_be_compared_is_unknown(events: list[Event], reason: str) -> None:
    assert reason in collect(RunRecord(events)).unknown[0]


def test_a_void_step_is_not_compared() -> None:
    """A void step's batches were trained again, so its reading does not matter."""
    events = job(0, 2)
    void = commit(1, pid=0, attempt=0, replica=1)
    void.lineage, void.time = "abcdefabcdef", 2.5  # type: ignore[attr-defined]
    assert len(collect(RunRecord([*events, void])).shards[SHARD]) == 4


def test_after_a_reset_the_data_begin_anew() -> None:
    """Each part of the run is read from the beginning of its own data."""
    who = {"pid": 1, "attempt": 1, "replica": 1}
    shard = {"slot": 1, "shard": 3, "num_shards": 4, "first_batch": 0}
    events = [each for each in job(0, 2) if each.attempt == 0]
    events.append(event("data_reset", time=9.0, step=2, reason="asked for", **who))
    events.append(event("worker_started", time=10.0, setup=SETUP, arguments=["--b"], **who))
    events.append(event("data_opened", time=11.0, **shard, **who))
    events += [commit(batch, step=batch + 3, **who) for batch in (0, 1)]
    found = collect(RunRecord(events))
    assert sorted(found.shards) == [Shard(0, 3, 4), Shard(1, 3, 4)]
    assert [found.readers[span].arguments for span in (0, 1)] == [["--a"], ["--b"]]


def test_a_shard_that_became_another_slot_s_is_read_once() -> None:
    """A resume may cut the same shards into other slots; the former slot's loader read
    other data.
    """
    who = {"pid": 1, "attempt": 1, "replica": 3}
    events = [each for each in job(0, 2) if each.attempt == 0]
    events.append(event("worker_started", time=10.0, setup=SETUP, arguments=["--b"], **who))
    events.append(
        event("data_opened", time=11.0, slot=3, shard=3, num_shards=4, first_batch=2, **who)
    )
    for batch in (2, 3):
        made = commit(batch, **who)
        made.participants, made.batches, made.data.slot = [3], {3: (batch, 1)}, 3  # type: ignore[attr-defined]
        events.append(made)
    found = collect(RunRecord(events))
    assert found.unknown == []
    assert {
        shard: sorted((each.first_batch, each.slot) for each in its)
        for shard, its in found.shards.items()
    } == {SHARD: [(0, 1), (1, 1), (2, 3), (3, 3)]}


def test_what_was_read_after_a_change_of_the_data_is_not_compared() -> None:
    """The loader continues in the middle of other data, which no reader from the beginning
    reproduces.
    """
    events = job(0, 2)
    change = {"training.dataset_path": {"before": "a", "now": "b", "kind": "data"}}
    events.append(event("launch_started", time=9.0, changed=change))
    found = collect(RunRecord(events))
    assert "after a resume had changed the data" in found.unknown[0]
    assert {each.first_batch for each in found.shards[SHARD]} == {0, 1}


def proved(found: Reread) -> Audit:
    events = [each for each in job(0, 2) if each.name != "loader_checked"]
    unproved = audit(RunRecord(events))
    assert unproved.verdict == "unknown"
    return found.apply(unproved)


def test_the_audit_with_what_was_read_again() -> None:
    """Equal batches prove the reopenings; others break the promise; uncompared ones leave
    it open.
    """
    good = proved(read([trained(0, 2, 1), trained(2, 2, 2)]))
    assert (good.verdict, good.unproved) == ("holds", "")
    assert "4 batches of 1 shard compared" in good.notes[-1]
    bad = proved(read([trained(0, 2, 1), trained(2, 2, 2, [5, 6])]))
    assert bad.verdict == "does not hold"
    assert "0 lost" not in bad.counts()
    assert proved(read([trained(0, 2, 1), trained(2, 2, 2)], length=3)).verdict == "unknown"
    assert proved(Reread()).verdict == "unknown"
