# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heals with further failures: the joiner dies, the donor dies, or the others finish meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from harness.job import Job
from harness.trajectory import check, check_finished, check_killed, check_one_trajectory, named

from titan_ft.training.job_config import read_config
from titan_ft.transfer.host_memory import free_bytes

STEP = 4


def kill(replica: int, point: str, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, **more}


@pytest.mark.parametrize("point", ["fetch", "replay"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_joiner_during_its_heal(make_job: Callable[..., Job], ranks: int, point: str) -> None:
    """A joiner that dies half way starts again from nothing; the survivor trains on."""
    faults = [kill(1, "backward", step=STEP), kill(1, point, attempt=1, rank=ranks - 1)]
    job = make_job(groups=2, ranks=ranks, steps=24, hooks={"faults": faults, "hold": 2})
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward"), (1, 1, f"sigkill:{point}")])
    started = [(e["replica"], e["attempt"], e["rank"]) for e in named(events, "heal_started")]
    assert sorted(started) == [(1, attempt, rank) for attempt in (1, 2) for rank in range(ranks)]
    finished = named(events, "heal_finished")
    assert sorted((e["attempt"], e["rank"]) for e in finished) == [
        (2, rank) for rank in range(ranks)
    ]
    assert all(event["replayed"] > 0 for event in finished)
    expected = predict(job, ranks)
    assert {event["bytes"] for event in named(events, "state_served")} == {expected}


def predict(job: Job, ranks: int) -> int:
    """Return the bytes that `launch --dry-run` says each rank's heal moves."""
    config = read_config(
        *(flag for flag in job.flags if "custom_import" not in flag and "flavor" not in flag)
    )
    # Torchtitan's model, which must not be imported before its config is read.
    from harness import flavor

    flavor.register()
    config.model.flavor = "tiny"

    from titan_ft.training.sizes import measure

    return measure(config, ranks).largest.state


@pytest.mark.parametrize("donors", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_donor_during_the_heal(make_job: Callable[..., Job], donors: int) -> None:
    """Another donor sends a dead donor's part; with one donor at a time, in a new heal.

    Both dead groups return to the trajectory of the third.
    """
    # The first group that sends a piece of its state dies; of one donor, the groups decide which
    # one that is.
    unless = ["down-0-0", "down-2-0"]
    serving = (
        [kill(0, "serve")]
        if donors == 2
        else [kill(donor, "serve", unless=unless) for donor in (0, 2)]
    )
    hooks = {"faults": [kill(1, "backward", step=STEP), *serving], "hold": 2}
    flags = [f"--fault_tolerance.heal_donors={donors}"]
    if donors == 2:  # else the other donor may have given all before this one is asked
        flags.append("--fault_tolerance.transfer_max_mbps=20")
    job = make_job(groups=3, steps=24, hooks=hooks, flags=flags)
    job.run()
    (dead,) = {event["replica"] for event in job.events("fault_injected")} - {1}
    events = check(job, survivors=[2 - dead])
    check_killed(job, events, [(1, 0, "sigkill:backward"), (dead, 0, "sigkill:serve")])
    started = [e for e in named(events, "heal_started") if e["replica"] == 1]
    lost = [(e["donor"], e["from_step"]) for e in named(events, "donor_lost") if e["replica"] == 1]
    failed = [e["donor"] for e in named(events, "heal_failed") if e["replica"] == 1]
    finished = next(e for e in named(events, "heal_finished") if e["replica"] == 1)
    if any("missed an update" in e["error"] for e in named(events, "heal_failed")):
        return  # the donor died in the tail of an exchange, which only the survivor completed: the heal begins anew
    if donors == 1:
        assert [e["donors"] for e in started] == [[dead], [2 - dead]]
        assert (lost, failed, finished["donor"]) == ([], [dead], 2 - dead)
        return
    assert [sorted(e["donors"]) for e in started] == [[0, 2]]
    assert (lost, failed) == ([(dead, started[0]["from_step"])], [])
    (given,) = [
        e["bytes"]
        for e in named(events, "state_served")
        if (e["replica"], e["joiner"]) == (2 - dead, 1)
    ]
    assert 0 < given <= finished["bytes"], "what the dead one had given counts"


@pytest.mark.parametrize(
    "dies", ["donor", *(pytest.param(who, marks=pytest.mark.slow) for who in (None, "joiner"))]
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_newcomer_has_the_state_before_a_quorum(
    make_job: Callable[..., Job], ranks: int, dies: str | None
) -> None:
    """A newcomer fetches the whole offered state while the others are still in the step in which it
    died.

    If a donor or the newcomer dies meanwhile, the next attempt succeeds in the same way.
    """
    faults = [kill(1, "exchange_first", step=STEP)]
    flags = []
    if dies == "donor":
        faults.append(kill(0, "serve"))
        # Else the other one may have given all before it is asked.
        flags.append("--fault_tolerance.transfer_max_mbps=50")
    elif dies == "joiner":
        faults.append(kill(1, "fetch", attempt=1))
    last = 2 if dies == "joiner" else 1
    waits = [(replica, rank) for replica in (0, 2) for rank in range(ranks)]
    gates = [
        {"name": f"whole-1-{last}", "replica": g, "rank": r, "attempt": 0, "step": STEP}
        for g, r in waits
    ]
    job = make_job(
        groups=3,
        ranks=ranks,
        steps=20,
        hooks={"faults": faults, "gates": gates},
        late=False,
        flags=flags,
    )
    job.run()
    events = check(job, survivors=[2] if dies == "donor" else [0, 2])
    kills = [(1, 0, "sigkill:exchange_first")]
    kills += {"donor": [(0, 0, "sigkill:serve")], "joiner": [(1, 1, "sigkill:fetch")]}.get(
        dies or "", []
    )
    check_killed(job, events, kills)
    newcomer = [
        e for e in events if (e["replica"], e.get("attempt"), e.get("rank")) == (1, last, 0)
    ]
    begun, joined, finished = (
        named(newcomer, name)[0] for name in ("heal_started", "joined", "heal_finished")
    )
    assert (sorted(begun["donors"]), begun["from_step"]) == ([0, 2], STEP - 1)
    assert begun["mono"] < joined["mono"], "it has begun before there was a quorum"
    assert (finished["from_step"], named(newcomer, "heal_failed")) == (STEP - 1, [])
    assert 1 <= finished["replayed"] <= 2, (
        "the update of that step, and the next one if it was not loaded in time"
    )


def run_until_both_offer(make: Callable[[], Job]) -> Job:
    """Run a job of three groups whose group 1 dies. Run it again unless both holders keep their
    offers for the joiner.

    A holder has no offer between two of its steps. With steps of a twentieth of a second, half of
    the joiners find one offer only, and a holder may also commit its next step between the joiner's
    search and its fetch.
    """
    for _ in range(8):
        job = make()
        job.run()
        events = job.events()
        both_offered = sorted(named(events, "heal_started")[0]["donors"]) == [0, 2]
        one_withdrew = any(
            "has no state of step" in event["error"] for event in named(events, "donor_lost")
        )
        if both_offered and not one_withdrew:
            return job
    pytest.fail("both holders never offered their state at once")


def test_each_holder_gives_a_part(make_job: Callable[..., Job]) -> None:
    """A joiner fetches from all holders of the state: together they send every byte once.

    The state is complete: LR, Adam's step, scheduler and token count equal those of its peers,
    while the LR changes.
    """
    flags = [
        "--fault_tolerance.transfer_max_mbps=50",
        "--lr_scheduler.warmup_steps=6",
        "--lr_scheduler.decay_type=cosine",
    ]
    hooks = {"faults": [kill(1, "backward", step=STEP)], "hold": 2}
    job = run_until_both_offer(lambda: make_job(groups=3, steps=20, hooks=hooks, flags=flags))
    # LR, loss and digest (Adam's step is in it) are compared step by step.
    events = check(job, survivors=[0, 2])
    rates = [e["lr"] for e in named(events, "step_committed") if e["replica"] == 0]
    assert len(set(rates)) > job.steps // 2
    (finished,) = named(events, "heal_finished")
    assert finished["step"] < job.steps
    given = {e["replica"]: e["bytes"] for e in named(events, "state_served")}
    assert sorted(given) == [0, 2]
    assert sum(given.values()) == finished["bytes"]
    assert named(events, "donor_lost") == []


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.slow), True])
def test_holders_whose_hosts_are_short_of_memory_copy_a_part(
    make_job: Callable[..., Job], dies: bool
) -> None:
    """With little memory each holder copies half of the state. If one dies while serving, the other
    one has room to copy all.
    """
    faults = [kill(1, "backward", step=STEP), *([kill(2, "serve")] if dies else [])]
    flags = ["--fault_tolerance.transfer_max_mbps=50", "--fault_tolerance.catch_up_max_gb=1"]

    def make() -> Job:
        job = make_job(groups=3, steps=24, hooks={"faults": faults, "hold": 2}, flags=flags)
        free = free_bytes()
        assert free is not None
        # So many ranks that they would take seven tenths of what is free: more than half, and less
        # than all.
        job.env["TITAN_FT_RANKS_ON_HOST"] = str(int(0.7 * free / predict(job, 1)))
        return job

    job = run_until_both_offer(make)
    events = check(job, survivors=[0] if dies else [0, 2])
    check_killed(
        job, events, [(1, 0, "sigkill:backward"), *([(2, 0, "sigkill:serve")] if dies else [])]
    )
    served = [(e["replica"], e["bytes"]) for e in named(events, "state_served") if e["joiner"] == 1]
    finished = next(e for e in named(events, "heal_finished") if e["replica"] == 1)
    copied = [
        job.paths.logs(replica, 0, 0).read_text().count("memory is scarce: a joiner gets")
        for replica in (0, 2)
    ]
    assert copied[0] >= 1
    if dies:
        assert [
            error
            for e in named(events, "heal_failed")
            if "do not hold all of it" in (error := e["error"])
        ]
        assert served == [(0, finished["bytes"])]
    else:
        assert copied[1] >= 1
        assert sorted(replica for replica, _ in served) == [0, 2]
        assert sum(given for _, given in served) == finished["bytes"]


def test_nobody_leaves_while_a_laggard_needs_the_state(make_job: Callable[..., Job]) -> None:
    """A group that dies just before the end and returns after the other has finished heals from
    that one.
    """
    steps = 6
    job = make_job(
        groups=2, steps=steps, hooks={"faults": [kill(1, "backward", step=steps - 1)], "hold": 99}
    )
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    (finished,) = named(events, "heal_finished")
    assert (finished["replica"], finished["step"], finished["replayed"]) == (1, steps, 0)


def test_finished_groups_leave_when_nobody_comes(make_job: Callable[..., Job]) -> None:
    """After `FINISH_SECONDS` a job that lost a group for good ends without it, successfully."""
    hooks = {
        "faults": [kill(1, "backward", step=STEP)],
        "constants": {"titan_ft.engine.step.FINISH_SECONDS": 1.0},
    }
    job = make_job(groups=2, steps=6, hooks=hooks, max_restarts=0)
    job.run()
    assert job.groups[0].finished
    assert "did not come for the final state within 1 s" in job.output(0)
    assert [(e["replica"], e["step"]) for e in job.events("training_finished")] == [(0, 6)]

    # One that comes back now ends too: it would wait for company, and then train all of it again.
    job.start_again(1)
    assert job.wait_for_end(1) == [0]
    assert "the job has finished: step 6, its last, was made before this group came" in job.output(
        1, attempt=1
    )
    assert [(e["replica"], e["step"]) for e in job.events("came_too_late")] == [(1, 6)]
    assert not [event for event in job.events("step_committed") if event["attempt"] == 1]


def test_last_holder_dies(make_job: Callable[..., Job]) -> None:
    """If the only donor dies during a heal, the state is lost: the joiner says so and ends, and the
    job restarts.
    """
    faults = [kill(1, "backward", step=STEP), kill(0, "serve")]
    constants = {"titan_ft.protocol.decision.SIGN_TIMEOUT_SECONDS": 1.0}
    job = make_job(
        groups=2, hooks={"faults": faults, "hold": 2, "constants": constants}, max_restarts=0
    )
    job.start()
    assert job.wait_for_end(1) == [-signal.SIGKILL]
    job.start_again(1)
    assert job.wait_for_end(0) == [-signal.SIGKILL]
    assert job.wait_for_end(1) == [1]
    assert "every group with the state after step" in job.output(1, attempt=1)

    lost = next(event["time"] for event in job.events() if event.get("fault") == "sigkill:serve")
    for replica in (0, 1):
        job.start_again(replica)
    job.finish()
    anew = [event for event in job.events() if event["time"] > lost]
    assert {event["replica"] for event in named(anew, "started_anew")} == {0, 1}
    for replica in (0, 1):
        assert "no group holds the state of the earlier attempt" in job.output(
            replica, attempt=replica + 1
        )
    check_one_trajectory(named(anew, "step_committed"))
    check_finished(job, anew, job.steps)
    assert {event["step"] for event in named(anew, "step_committed")} == set(
        range(1, job.steps + 1)
    )
