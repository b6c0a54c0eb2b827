# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that hold for every run, with any failures."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from harness.events import Event
from harness.job import Job
from titan_ft.engine.drain import TERMINATED

# Clearly below process_group_timeout_ms (10000): who waits for a dead peer's timeout waits longer.
LONGEST_GAP_SECONDS = 7.0


def check(
    job: Job,
    *,
    survivors: Collection[int],
    steps: int | None = None,
    longest_gap: float = LONGEST_GAP_SECONDS,
    ahead: int = 0,
) -> list[Event]:
    """Check a run that has ended, and return its events.

    Every group finished. All groups followed one trajectory, bit for bit. No process skipped a step
    or committed one twice. The `survivors` never failed, computed each batch once and never waited
    for a timeout.
    """
    events = job.events()
    steps = steps or job.steps
    assert [group.finished for group in job.groups] == [True] * len(job.groups), exits(job)
    for replica in survivors:
        assert job.groups[replica].attempt == 0, exits(job)
    committed = named(events, "step_committed")
    check_one_trajectory(committed)
    check_finished(job, events, steps)
    assert {event["step"] for event in committed} == set(range(1, steps + 1))
    of_groups = [event for event in events if "replica" in event]  # not the lighthouse's
    for process in by_process(of_groups).values():
        check_order(process)
        if process[0]["replica"] in survivors:
            check_survivor(process, steps, longest_gap, ahead)
    return events


def named(events: Iterable[Event], *names: str) -> list[Event]:
    return [event for event in events if event["event"] in names]


def by_process(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Group events by the process that wrote them."""
    processes: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        processes[event["pid"]].append(event)
    return processes


def exits(job: Job) -> str:
    """Describe, for an assertion, how each attempt of each group ended, with the end of rank 0's
    output.
    """
    return "; ".join(
        f"group {group.replica}: {[*group.ended, [worker.code for worker in group.workers]]}: "
        f"{job.output(group.replica)[-500:]}"
        for group in job.groups
    )


def check_one_trajectory(committed: Iterable[Event]) -> None:
    """All groups agree on each step: participants, loss, norm, LR, and the bytes of each rank's
    state.
    """
    facts: dict[Any, dict[str, Any]] = {}
    for event in committed:
        fact = {key: event[key] for key in ("participants", "tokens", "loss", "grad_norm", "lr")}
        fact["digest"] = event.get("digest")
        first = facts.setdefault((event["step"], event["rank"]), fact)
        assert fact == first, (
            f"step {event['step']}, rank {event['rank']}: group {event['replica']} differs"
        )


def check_finished(job: Job, events: Iterable[Event], steps: int) -> None:
    """Each rank of each group finished once, at the last step, with the same state as its peers."""
    finished = named(events, "training_finished")
    ranks = [(event["replica"], event["rank"]) for event in finished]
    assert sorted(ranks) == [
        (group.replica, rank) for group in job.groups for rank in range(group.num_ranks)
    ]
    assert {event["step"] for event in finished} == {steps}
    assert len({event["tokens"] for event in finished}) == 1
    for rank in range(job.groups[0].num_ranks):
        digests = {event["replica"]: event["digest"] for event in finished if event["rank"] == rank}
        assert len(set(digests.values())) == 1, f"final digests of rank {rank} differ: {digests}"


def check_order(process: list[Event]) -> None:
    """A process commits consecutive steps, and continues after the step of its last heal."""
    last = 0
    for event in named(process, "step_committed", "heal_finished"):
        if event["event"] == "heal_finished":
            assert event["step"] >= last, f"healed from step {last} back to {event['step']}"
        else:
            assert event["step"] == last + 1, f"step {event['step']} committed after {last}"
        last = event["step"]


def check_survivor(
    process: list[Event], steps: int, longest_gap: float = LONGEST_GAP_SECONDS, ahead: int = 0
) -> None:
    """A survivor made all steps, computed each batch exactly once, and never stood still for long.

    Args:
        ahead: batches of the next step that the survivor may compute before it commits a step.
    """
    committed = named(process, "step_committed")
    made = [event["step"] for event in committed]
    assert made == list(range(1, steps + 1)), f"committed {made} of {steps}"
    computed = {event["step"]: event for event in named(process, "computed")}
    batches = forwards = 0
    for event in committed:
        read = [event["data"], *event["extra_data"]]  # of its own slot, then of absent groups'
        assert event["forward_passes"] == sum(data["num_batches"] for data in read)
        # Counted by a hook on the model.
        forwards += computed[event["step"]]["forwards"] - event["forward_passes"]
        most = ahead if event["step"] < steps else 0
        assert 0 <= forwards <= most, f"step {event['step']} was recomputed"
        assert event["data"]["first_batch"] == batches
        batches += event["data"]["num_batches"]
    for earlier, event in itertools.pairwise(committed):
        gap = event["time"] - earlier["time"] - computed[event["step"]]["held_seconds"]
        assert gap < longest_gap, f"{gap:.1f} s between steps {earlier['step']} and {event['step']}"


def check_killed(job: Job, events: Iterable[Event], kills: Sequence[tuple[int, int, str]]) -> None:
    """Exactly these kills (replica, attempt, fault) happened, and no other attempt failed."""
    injected = named(events, "fault_injected")
    assert sorted((e["replica"], e["attempt"], e["fault"]) for e in injected) == sorted(kills)
    for group in job.groups:
        assert len(group.ended) == sum(replica == group.replica for replica, _, _ in kills), exits(
            job
        )
        for codes in group.ended:
            assert -signal.SIGKILL in codes, exits(job)
            # The rest of the group is told to end, or ends by itself because it lost its peer.
            assert set(codes) <= {-signal.SIGKILL, -signal.SIGTERM, TERMINATED, 1}, exits(job)
