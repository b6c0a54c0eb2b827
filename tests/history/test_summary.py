# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fold of a run's events into figures, and their text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.event_builder import build, named
from titan_ft.history import summary as summaries
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.facts import list_goodput_terms
from titan_ft.history.summary import RunSummary, make_summary_table
from titan_ft.history.terminal import text_of
from titan_ft.run.events import Event

STEP_SECONDS = 0.3


def summarize(events: list[Event]) -> RunSummary:
    return summaries.summarize(RunRecord(events))


def format_summary(summary: RunSummary) -> str:
    return text_of(make_summary_table(summary))


def event(
    name: str, time: float, replica: int, rank: int | None = 0, attempt: int = 0, **fields: Any
) -> Any:
    """Make an event as a worker or an agent (rank None) writes it."""
    context = {"replica": replica, "attempt": attempt} | ({} if rank is None else {"rank": rank})
    return build(named(name), time=time, **context | fields)


def commit(
    time: float, step: int, replica: int, rank: int = 0, attempt: int = 0, **fields: Any
) -> Any:
    """Return a commit of two groups without any trouble, with the given fields changed."""
    usual = {
        "participants": [0, 1],
        "loss": 8.0 - step / 10,
        "seconds": STEP_SECONDS,
        "exchanges": 1,
        "forward_passes": 2,
        "data": {"slot": replica, "first_batch": 2 * (step - 1), "num_batches": 2},
    }
    return event("step_committed", time, replica, rank, attempt, step=step, **(usual | fields))


def finish(
    time: float, replica: int, rank: int = 0, attempt: int = 0, digest: str | None = "ff"
) -> Event:
    return event(
        "training_finished", time, replica, rank, attempt, step=12, tokens=4096, digest=digest
    )


def killed_run() -> list[Event]:
    """Make a history of two groups of two ranks: group 1 dies by SIGKILL after step 4 of 12, and
    returns at step 10.

    The commit of step 5 comes 0.8 s after that of step 4, with a second exchange. The agent notices
    the death only 2 s after it, when the survivor has made many steps.
    """
    events = []
    times = {step: STEP_SECONDS * step for step in range(1, 5)} | {
        step: 1.2 + 0.8 + STEP_SECONDS * (step - 5) for step in range(5, 13)
    }
    for step, time in times.items():
        for rank in range(2):
            alone = 5 <= step < 10
            fields: dict[str, Any] = {"participants": [0] if alone else [0, 1]}
            if step % 4 == 0:
                fields["digest"] = f"d{step}r{rank}"
            slow: dict[str, Any] = {"exchanges": 2, "seconds": 0.8} if step == 5 else {}
            events.append(commit(time, step, 0, rank, **(fields | slow)))
            if step < 5 or step >= 10:
                events.append(commit(time + 0.001, step, 1, rank, 0 if step < 5 else 1, **fields))
    for rank in range(2):
        events.append(
            event(
                "heal_finished",
                3.2 + rank / 10,
                1,
                rank,
                1,
                donor=0,
                from_step=9,
                bytes=2**20,
                seconds=0.4,
            )
        )
        events += [
            finish(5.0, 0, rank, digest=f"end{rank}"),
            finish(5.0, 1, rank, 1, digest=f"end{rank}"),
        ]
    events.append(event("worker_exited", 3.2, 1, None, 0, signal="SIGKILL"))
    events.append(event("replica_restarted", 3.3, 1, None, 1, reason="SIGKILL"))
    return events


def test_clean_run() -> None:
    """A run without failures counts groups, steps and exchanges, and finds equal digests."""
    events = [
        commit(step + replica / 100, step, replica, rank, digest=f"{step}.{rank}")
        for step in range(1, 9)
        for replica in range(3)
        for rank in range(2)
    ]
    events += [
        finish(9.0, replica, rank, digest=f"end{rank}") for replica in range(3) for rank in range(2)
    ]
    summary = summarize(events)
    assert (summary.num_groups, summary.ranks_per_group, summary.steps_committed) == (3, 2, 8)
    assert (summary.exchanges_attempted, summary.exchanges_committed) == (8, 8)
    assert (summary.recomputed_forward_passes, summary.failures, summary.num_restarts) == (0, [], 0)
    assert (summary.final_digests, summary.finished_replicas) == ("equal", [0, 1, 2])
    assert (summary.step_digests, summary.num_step_digests, summary.differing_steps) == (
        "equal",
        16,
        [],
    )
    assert (summary.seconds, summary.tokens, summary.step_seconds) == (8.0, 4096, 1.0)


def test_killed_and_healed_group() -> None:
    """A kill is one failure, with the survivors' stall, the group's return and its heal; nothing is
    recomputed.
    """
    summary = summarize(killed_run())
    assert (summary.num_groups, summary.ranks_per_group, summary.steps_committed) == (2, 2, 12)
    assert (summary.exchanges_attempted, summary.exchanges_committed) == (13, 12)
    assert (summary.recomputed_forward_passes, summary.num_restarts) == (0, 1)
    (failure,) = summary.failures
    assert (failure.replica, failure.attempt, failure.cause) == (1, 0, "SIGKILL")
    assert failure.stall_seconds == pytest.approx(0.8 - STEP_SECONDS)
    assert failure.rejoin_seconds == pytest.approx(3.501 - 2.0), (
        "its death was noted late: it was missing since step 5"
    )
    assert failure.heal is not None
    assert (failure.heal.donor, failure.heal.num_bytes, failure.heal.seconds) == (0, 2 * 2**20, 0.4)
    assert (failure.heal.replica, failure.heal.attempt, failure.heal.from_step) == (1, 1, 9)
    assert (summary.final_digests, summary.step_digests, summary.num_step_digests) == (
        "equal",
        "equal",
        4,
    )


def test_bytes_of_gradients() -> None:
    """The bytes are those of all ranks, and of each step of a group; an older history has none."""
    assert summarize(killed_run()).wire_bytes is None
    assert "gradients sent" not in format_summary(summarize(killed_run()))
    events = [
        commit(
            0.1 * step,
            step,
            replica,
            rank,
            wire_bytes=3_000_000,
            inner_steps=4 if replica == 0 else 2,
        )
        for step in (1, 2)
        for replica in range(2)
        for rank in range(2)
    ]
    summary = summarize(events)
    assert (summary.wire_bytes, summary.wire_bytes_per_step) == (24_000_000, 24_000_000 / 12)
    told = "24.0 MB, 2.00 MB by a group for each of its steps"
    assert told in format_summary(summary)
    assert (
        "Gradients sent",
        "24.0 MB",
        f"To other groups, by all ranks: {told}.",
    ) in list_goodput_terms(RunRecord(events))


def test_order_of_events_does_not_matter() -> None:
    """The fold sorts by time itself."""
    events = killed_run()
    random.Random(0).shuffle(events)
    assert summarize(events) == summarize(killed_run())


def test_empty_history_is_unknown() -> None:
    """Without events all figures are zero, empty or unknown, and the text still comes."""
    summary = summarize([])
    assert summary == RunSummary(find_outcome(RunRecord([])))
    assert (summary.final_digests, summary.step_digests, summary.step_seconds) == (
        "unknown",
        "unknown",
        None,
    )
    assert "unknown" in format_summary(summary)
    json.dumps(summary.to_dict(), allow_nan=False)


def test_workers_that_died_before_their_first_event_are_ranks_too() -> None:
    """After a failed import, for example, only the agent's events show them."""
    exits = [event("worker_exited", 4.0, 0, rank, signal=None, code=1) for rank in (0, 1)]
    assert summarize(exits).ranks_per_group == 2


def test_events_of_zeros_never_crash() -> None:
    """A history of empty events folds to zeros and unknowns."""
    names = [
        "step_committed",
        "worker_exited",
        "heal_finished",
        "training_finished",
        "replica_restarted",
        "joined",
    ]
    events: list[Event] = [build(named(name), time=time) for time in (1.0, 2.0) for name in names]
    events += [event("worker_exited", 4.0, 0, None, signal=None, code=None)]
    summary = summarize(events)
    assert (summary.steps_committed, summary.failures, summary.final_digests) == (0, [], "unknown")
    format_summary(summary)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"signal": "SIGTERM"}, "SIGTERM"),
        ({"code": 1}, "exit code 1"),
        ({"code": 1, "signal": None}, "exit code 1"),
    ],
)
def test_cause_of_a_failure(fields: dict[str, Any], cause: str) -> None:
    """A failure is named by its signal, or by its exit code."""
    (failure,) = summarize([event("worker_exited", 1.0, 0, None, **fields)]).failures
    assert failure.cause == cause


def test_a_long_exception_is_whole_in_one_place() -> None:
    """Each failure has the beginning of its exception; the headline and one line have all of it."""
    error = f"RuntimeError: {'long ' * 30}end"
    events = [event("worker_exited", float(k), 1, None, k, code=1, error=error) for k in (1, 2)]
    text = format_summary(summarize(events))
    assert text.count(error) == 2
    assert text.count("RuntimeError: long long") == 4


def test_exits_of_one_attempt_are_one_failure() -> None:
    """Only the first bad exit of an attempt counts; a good exit is none."""
    events = [
        event("worker_exited", 2.0, 1, 0, signal="SIGTERM"),
        event("worker_exited", 1.0, 1, 1, signal="SIGKILL"),
        event("worker_exited", 3.0, 1, 0, attempt=1, code=1),
        event("worker_exited", 4.0, 0, 0, code=0),
    ]
    failures = summarize(events).failures
    assert [(f.replica, f.attempt, f.cause) for f in failures] == [
        (1, 0, "SIGKILL"),
        (1, 1, "exit code 1"),
    ]


def test_workers_stopped_by_their_agent_did_not_fail() -> None:
    """Ranks that were stopped because of another death or an interrupt are no failures."""
    events = [
        event("worker_exited", 1.0, 0, 0, signal="SIGTERM", stopped=True),
        event("worker_exited", 1.0, 1, 0, signal="SIGTERM", stopped=True),
        event("worker_exited", 1.1, 1, 1, signal="SIGKILL", stopped=False),
    ]
    failures = summarize(events).failures
    assert [(f.replica, f.cause) for f in failures] == [(1, "SIGKILL")]


def test_injected_fault_dates_the_failure() -> None:
    """The time to rejoin counts from the fault, if the history has it, for the attempt that
    it hit.
    """
    events = [commit(float(t), t, 1, attempt=0) for t in range(1, 4)]
    events += [
        build(named("fault_injected"), time=t, target={"replica": r})
        for t, r in ((3.5, 1), (3.6, 0))
    ]
    events += [
        event("worker_exited", 6.0, 1, None, 0, signal="SIGKILL"),
        commit(9.5, 9, 1, attempt=1),
    ]
    events += [event("worker_exited", 12.0, 1, None, 1, signal="SIGKILL")]
    first, second = summarize(events).failures
    assert (first.time, first.rejoin_seconds) == (3.5, 6.0)
    assert second.time == 12.0


def test_group_that_never_contributes_again() -> None:
    """A returned group's commits without a contribution are no return; without survivors no stall
    is known.
    """
    events = [
        commit(1.0, 1, 1),
        event("worker_exited", 1.5, 1, None, signal="SIGKILL"),
        commit(2.0, 2, 1, attempt=1, participants=[0]),
    ]
    (failure,) = summarize(events).failures
    assert (failure.stall_seconds, failure.rejoin_seconds, failure.heal) == (None, None, None)
    assert "never contributed again" in format_summary(summarize(events))


def test_second_death_before_the_return() -> None:
    """Two deaths in a row both wait for the attempt that contributes at last."""
    events = [
        commit(1.0, 1, 1),
        event("worker_exited", 2.0, 1, None, 0, signal="SIGKILL"),
        event("heal_finished", 4.0, 1, 0, 1, donor=0, from_step=3, bytes=1, seconds=1.0),
        event("worker_exited", 5.0, 1, None, 1, signal="SIGKILL"),
        event(
            "heal_finished", 8.0, 1, 0, 2, donor=2, from_step=7, bytes=3, seconds=1.0, replayed=4
        ),
        commit(9.0, 8, 1, attempt=2),
    ]
    first, second = summarize(events).failures
    assert (first.rejoin_seconds, second.rejoin_seconds) == (7.0, 4.0)
    assert first.heal is not None
    assert first.heal == second.heal
    assert (first.heal.donor, first.heal.num_bytes, first.heal.replayed) == (2, 3, 4)
    assert len(summarize(events).heals) == 2


def test_stall_is_never_negative_and_ignores_other_dead_groups() -> None:
    """A failure without a delay stalls 0 s; a dead group's own gap belongs to its restart."""
    events = [commit(t / 10, t, 0, seconds=0.5) for t in range(1, 20)]
    events += [commit(0.1, 1, 2), commit(9.0, 19, 2, attempt=1)]
    events += [commit(1.0, 10, 1), event("worker_exited", 1.05, 1, None, signal="SIGKILL")]
    assert summarize(events).failures[0].stall_seconds == 0.0


def test_stall_of_a_group_whose_single_rank_died() -> None:
    """The window of a failure opens with the last sign of the rank that fell silent first."""
    events = [
        commit(t, step, 0, seconds=1.0)
        for step, t in enumerate((1.0, 2.0, 6.0, 7.0, 8.0, 9.0), start=1)
    ]
    events += [commit(2.0, 2, 1, rank) for rank in range(2)]
    events.append(event("exchange_failed", 7.5, 1, 0, error="peer"))
    events.append(event("worker_exited", 7.6, 1, None, signal="SIGKILL"))
    assert summarize(events).failures[0].stall_seconds == pytest.approx(3.0)


def test_recomputed_forward_passes_are_counted() -> None:
    """Passes beyond one per batch count for groups with weight, once per group and not per rank."""
    events = [commit(1.0, 1, 0, rank, forward_passes=5) for rank in range(2)]
    events += [commit(1.0, 1, 1, forward_passes=9, participants=[0])]
    assert summarize(events).recomputed_forward_passes == 3


def test_loss_is_shown_at_quartiles() -> None:
    """The curve shows first, quartiles and last from any rank that knows the loss, and names a
    missing loss.
    """
    events = [
        commit(step, step, 1, loss=None if step == 9 else float(step)) for step in range(1, 10)
    ]
    events += [commit(step, step, 0, loss=float(step)) for step in range(1, 6)]
    summary = summarize(events)
    assert summary.losses == [(1, 1.0), (3, 3.0), (5, 5.0), (7, 7.0), (9, None)]
    assert "not finite (step 9)" in format_summary(summary)
    assert summarize([commit(1.0, 1, 0, loss=2.0)]).losses == [(1, 2.0)]


def test_loss_of_a_pipeline_comes_from_its_last_stage() -> None:
    """Rank 0 of a pipeline does not know the loss; the curve takes it from the rank that does."""
    events = [
        commit(step, step, 0, rank, loss=float(step) if rank else None)
        for step in (1, 2)
        for rank in (0, 1)
    ]
    assert summarize(events).losses == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("finished", "verdict"),
    [
        ([], "unknown"),
        ([finish(1, 0), finish(1, 0, 1)], "unknown"),
        ([finish(1, 0), finish(1, 1, 1)], "unknown"),
        ([finish(1, 0), finish(1, 1, digest=None)], "unknown"),
        ([finish(1, 0), finish(1, 1)], "equal"),
        (
            [finish(1, 0, digest="a"), finish(1, 0, 1, digest="b"), finish(1, 1, digest="a")],
            "equal",
        ),
        ([finish(1, 0, digest="a"), finish(1, 1, digest="b")], "differ"),
        (
            [finish(1, 0), finish(1, 1), finish(1, 0, 1, digest="a"), finish(1, 1, 1, digest="b")],
            "differ",
        ),
        ([finish(1, 0), finish(1, 1, digest="old"), finish(2, 1, attempt=1)], "equal"),
    ],
)
def test_final_digests(finished: list[Event], verdict: str) -> None:
    """Ranks of the same index must end equal in all groups; with fewer than two groups nothing is
    known.
    """
    assert summarize(finished).final_digests == verdict


def test_differing_step_digests_are_named() -> None:
    """Digests on the way are compared at equal step and rank, and the steps that differ are
    listed.
    """
    events = [
        commit(float(step), step, replica, rank, digest="x" if step != 20 else f"x{replica}")
        for step in (10, 20, 30)
        for replica in range(2)
        for rank in range(2)
    ]
    events.append(commit(40.0, 40, 0, digest="only here"))
    summary = summarize(events)
    assert (summary.step_digests, summary.num_step_digests, summary.differing_steps) == (
        "differ",
        6,
        [20],
    )
    assert "differ at 1 step, first 20" in format_summary(summary)


def test_drained_group_did_not_fail() -> None:
    """A group that left in order is drained, with its cost to the others, whatever ended its last
    ranks.
    """
    events = [commit(float(step), step, 0, seconds=1.0) for step in range(1, 4)]
    events += [commit(4.5, 4, 0, seconds=1.5), commit(3.0, 3, 1)]
    events += [event("drained", 3.2 + rank / 10, 1, rank, reason="SIGTERM") for rank in range(2)]
    events += [
        event("worker_exited", 3.5, 1, 0, code=0),
        event("worker_exited", 3.5, 1, 1, signal="SIGTERM"),
    ]
    summary = summarize(events)
    (drain,) = summary.drains
    assert (drain.replica, drain.attempt, drain.time, drain.in_order, summary.failures) == (
        1,
        0,
        3.2,
        True,
        [],
    )
    assert drain.stall_seconds == pytest.approx(0.5)
    assert "1 (group 1, attempt 0), survivors stalled 0.50 s" in format_summary(summary)
    crash = event("worker_exited", 3.6, 1, 1, signal="SIGSEGV")
    assert [failure.cause for failure in summarize([*events, crash]).failures] == ["SIGSEGV"]


def test_restarts_without_imports_and_of_the_lighthouse() -> None:
    """Restarts without imports, and those of the lighthouse, are counted."""
    events = [
        event("replica_restarted", 1.0, 1, None, 1, standby=True),
        event("replica_restarted", 2.0, 1, None, 2),
    ]
    events += [build(named("lighthouse_restarted"), time=3.0)]
    summary = summarize(events)
    assert (
        summary.num_restarts,
        summary.num_standby_restarts,
        summary.num_lighthouse_restarts,
    ) == (2, 1, 1)
    assert "2 restarts (1 without imports)" in format_summary(summary)
    assert "lighthouse" in format_summary(summary)


def test_batches_are_audited() -> None:
    """The report says whether every batch was trained once; a history without its beginning is
    unknown.
    """
    events = [
        commit(float(step), step, 0, participants=[0], batches={"0": [2 * (step - 1), 2]})
        for step in range(1, 4)
    ]
    assert "6 trained once, 0 lost, 0 repeated, 0 void: every batch once holds" in format_summary(
        summarize(events)
    )
    assert summarize(events[1:]).every_batch_once == "unknown"


def test_checkpoints_that_failed_are_counted_with_their_reason() -> None:
    """A full disk costs no step, so no other line shows that there is no checkpoint to
    return to.
    """
    assert "checkpoints" not in format_summary(summarize(killed_run()))
    events = [
        *killed_run(),
        event("checkpoint_failed", 5.0, 0, step=10, error="No space left on device"),
    ]
    assert "0 saved, 1 failed (last: step 10: No space left on device)" in format_summary(
        summarize(events)
    )
    events += [event("checkpoint_saved", 6.0 + rank, 0, step=12, seconds=0.1) for rank in (0, 1)]
    assert "1 saved, 1 failed (last: step 10: No space left on device)" in format_summary(
        summarize(events)
    )
