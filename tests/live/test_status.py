# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fold of events into a live status, and its lines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.event_builder import build, named
from titan_ft.history.fold.group import GroupFold, GroupState
from titan_ft.history.fold.run import fold_events
from titan_ft.history.terminal import text_of
from titan_ft.live import status
from titan_ft.live.group_table import make_group_table
from titan_ft.live.run_status import RunStatus
from titan_ft.live.status_view import PlainView
from titan_ft.run.events import (
    Event,
    EventsDropped,
    GroupBack,
    GroupLost,
    LaunchStopping,
    ReplicaRestarted,
    SpareTookOver,
    StrangerRefused,
    WorkerStarted,
    kinds,
)


def event(name: str, replica: int = 0, rank: int = 0, attempt: int = 0, **fields: Any) -> Any:
    return build(named(name), replica=replica, rank=rank, attempt=attempt, **fields)


def step(
    number: int, replica: int = 0, participants: tuple[int, ...] = (0, 1), **fields: Any
) -> Any:
    return event(
        "step_committed", replica, step=number, loss=2.5, participants=list(participants), **fields
    )


def run_after(num_groups: int, *events: Any) -> RunStatus:
    run = RunStatus(num_groups)
    for each in events:
        run.observe(each)
    return run


STORY = [
    event("worker_started", 0),
    event("worker_started", 1),
    event("joined", 0, quorum=1, participants=[0, 1]),
    event("joined", 1, quorum=1, participants=[0, 1]),
    step(1),
    step(1, replica=1),
    event(
        "worker_exited",
        1,
        rank=1,
        signal="SIGKILL",
        reason="rank 1 was killed by SIGKILL",
        stopped=False,
    ),
    event("worker_exited", 1, rank=0, signal="SIGTERM", reason="stopped because ...", stopped=True),
    event("joined", 0, quorum=2, participants=[0]),
    step(2, participants=(0,)),
    build(ReplicaRestarted, replica=1, attempt=1, reason="rank 1 ..."),
    event("worker_started", 1, attempt=1),
    event("joined", 1, attempt=1, quorum=3, participants=[0, 1]),
    event("heal_started", 1, attempt=1, donor=0, from_step=2),
    event("heal_finished", 1, attempt=1, donor=0, from_step=2, bytes=10, seconds=0.25, replayed=0),
    step(3),
    step(3, replica=1, attempt=1),
    event("training_finished", 0, step=3),
    event("training_finished", 1, attempt=1, step=3),
    event("worker_exited", 1, rank=0, attempt=1, code=0, stopped=False),
]


def test_story_of_a_run() -> None:
    """Each relevant change has one line, and each group's state follows the events."""
    run, lines, states = RunStatus(2), [], []
    for each in STORY:
        line = run.observe(each)
        lines += [line] if line else []
        states.append(run.groups[1].state)
    assert lines == [
        "group 0 joined: 2 of 2 groups are there",
        "group 1 joined: 2 of 2 groups are there",
        "group 1 died: rank 1 was killed by SIGKILL",
        "group 1 restarting (attempt 1)",
        "group 1 joined: 2 of 2 groups are there",
        "group 1 healing from group 0 at step 2",
        "group 1 healed in 0.25 s",
        "group 0 finished at step 3",
        "group 1 finished at step 3",
    ]
    assert list(dict.fromkeys(states)) == [
        "waiting",
        "starting",
        "joined",
        "training",
        "died",
        "healing",
        "finished",
    ]
    assert run.groups[1] == status.GroupStatus(
        1, "finished", 3, 2.5, (0, 1), attempt=1, restarts=1, own_seconds=0.0, donor=0
    )


def test_late_events_of_an_old_attempt_are_ignored() -> None:
    """A dead worker's last events do not revive its group."""
    run = run_after(2, build(ReplicaRestarted, replica=0, attempt=1))
    before = run.groups
    run.observe(step(7))
    assert run.observe(event("training_finished", 0, step=3)) is None
    assert run.groups == before


@pytest.mark.parametrize(
    "late", [step(8), event("joined", participants=[0]), event("heal_started", donor=1)]
)
def test_late_events_of_a_dead_attempt_are_no_life(late: Any) -> None:
    """A line that a dead worker wrote may arrive after the agent's report through a network file
    system.

    Otherwise the group would be shown as training until its restart, and a launcher would take it
    for alive.
    """
    run = run_after(2, step(7), event("worker_exited", signal="SIGKILL", stopped=False), late)
    assert run.groups[0].state == "died"


def test_other_ranks_and_strangers_change_nothing() -> None:
    """Only rank 0 speaks for its group, and another group's commit does not change this one."""
    for each in (event("step_committed", rank=1, step=1), step(1, replica=5)):
        run = RunStatus(1)
        before = run.groups[0]
        assert run.observe(each) is None
        assert run.groups[0] == before


def test_group_given_up() -> None:
    """A group that failed for good says why and where to look, and stays failed."""
    run = RunStatus(1)
    given_up = event(
        "replica_gave_up",
        reason="rank 0 ended with exit status 1; no restart left",
        log="/l",
        error="E: x",
    )
    assert run.observe(given_up) == (
        "group 0 failed: rank 0 ended with exit status 1; no restart left; /l: E: x"
    )
    assert run.groups[0].state == "failed"
    run.observe(event("worker_exited", code=1))
    assert run.groups[0].state == "failed"


@pytest.mark.parametrize("worker_died", [False, True])
def test_end_of_an_agent_without_another(worker_died: bool) -> None:
    """If nothing restarts the group it has failed at once, and the reason is in one line only."""
    run = run_after(2, event("worker_started"), step(1))
    if worker_died:
        run.observe(event("worker_exited", signal="SIGKILL", stopped=False))
    ended = event(
        "agent_ended", reason="its agent was killed by SIGKILL", restarts=False, signal="SIGKILL"
    )
    run.observe(ended)
    assert run.groups[0].state == "failed"
    gave_up = event(
        "replica_gave_up", reason=f"{ended.reason}; no restart left", log="/l", error=ended.reason
    )
    if not worker_died:
        assert (
            run.observe(gave_up)
            == "group 0 failed: its agent was killed by SIGKILL; no restart left"
        )


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_event_has_a_line_or_none(kind: type[Event]) -> None:
    """Every event has at most one line."""
    run = run_after(3, step(7, 1))
    fields = {"replica": 1, "error": "E: gone", "reason": "full", "slots": [0, 2], "ranks": [1]}
    line = run.observe(
        build(
            kind, **{name: text for name, text in fields.items() if name in kind.__struct_fields__}
        )
    )
    assert line is None or (line and "\n" not in line)


@pytest.mark.parametrize(
    "name", ["straggler", "digest_mismatch", "gradient_excluded", "rolled_back", "waiting"]
)
def test_what_all_groups_see_is_told_once(name: str) -> None:
    """A finding that every group reports has one line, from the first training group."""
    run = run_after(3, step(7, 1), step(7, 2))
    lines = [run.observe(event(name, replica)) for replica in (1, 2)]
    assert lines[0]
    assert lines[1] is None


def chaos(name: str, fault: str, target: Any, **fields: Any) -> Any:
    return build(named(name), time=9.0, fault=fault, target=target, shot=1, **fields)


@pytest.mark.parametrize(
    ("told", "line", "hit"),
    [
        (
            chaos("fault_injected", "kill_group", {"replica": 2}),
            "fault: kill_group on group 2",
            [2],
        ),
        (
            chaos("fault_injected", "kill_rank", {"replica": 1, "rank": 0}),
            "fault: kill_rank on group 1, rank 0",
            [1],
        ),
        (
            chaos("fault_injected", "kill_lighthouse", {"lighthouse": True}),
            "fault: kill_lighthouse on the lighthouse",
            [],
        ),
        (chaos("fault_injected", "kill_group", {"replica": 7}), "fault: kill_group on group 7", []),
        (
            chaos(
                "fault_injected",
                "slow_rank",
                {"replica": 0, "rank": 1},
                params={"factor": 3, "seconds": 2.5},
            ),
            "fault: slow_rank on group 0, rank 1 (factor 3, seconds 2.5)",
            [0],
        ),
        (
            chaos("fault_undone", "stop_group", {"replica": 0}),
            "fault undone: stop_group on group 0",
            [],
        ),
        (
            chaos("fault_skipped", "kill_group", None, reason="too few"),
            "fault skipped: kill_group (too few)",
            [],
        ),
    ],
)
def test_faults_are_told_and_remembered(told: Any, line: str, hit: list[int]) -> None:
    """Each fault is one line, whoever writes it; its targets keep the last fault and its time."""
    run = run_after(3, event("replica_restarted", 0, attempt=5))
    assert run.observe(told) == line
    after = run.groups
    assert [replica for replica, group in after.items() if group.fault] == hit
    assert all(
        (after[replica].fault, after[replica].fault_time) == (told.fault, 9.0) for replica in hit
    )


@pytest.mark.parametrize("fault", ["network_dead", "link_dead"])
def test_fault_of_a_whole_group_is_told_once(fault: str) -> None:
    """A fault of a whole group has one line although all ranks report it; a fault of one rank is
    its own.
    """
    run = RunStatus(3)
    whole = [
        chaos(
            "fault_injected", fault, {"replica": 2, "rank": rank}, replica=2, rank=rank, attempt=0
        )
        for rank in (1, 0)
    ]
    assert [run.observe(each) for each in whole] == [None, f"fault: {fault} on group 2"]
    single = chaos(
        "fault_injected", "segfault", {"replica": 2, "rank": 1}, replica=2, rank=1, attempt=0
    )
    assert run.observe(single) == "fault: segfault on group 2, rank 1"


def test_own_part_of_a_step() -> None:
    """A group's own seconds exclude the exchange; after a death there are none until its next
    commit.
    """
    run = RunStatus(1)
    assert run.groups[0].own_seconds is None
    run.observe(
        step(
            2,
            seconds=2.0,
            exchange_seconds=0.5,
            compute_seconds=1.0,
            apply_seconds=0.25,
            own_loss=2.25,
        )
    )
    group = run.groups[0]
    assert (group.own_seconds, group.own_loss, group.loss) == (1.25, 2.25, 2.5)
    run.observe(event("worker_exited", signal="SIGKILL", stopped=False))
    assert run.groups[0].own_seconds is None
    run.observe(event("worker_started", attempt=1))
    run.observe(step(3, attempt=1, compute_seconds=1.0))
    assert run.groups[0].own_seconds == 1.0


@pytest.mark.parametrize(
    "begins",
    [
        event("worker_started", attempt=1, host="node1"),
        build(ReplicaRestarted, replica=0, attempt=1, reason=""),
        build(SpareTookOver, replica=0, attempt=1),
    ],
)
def test_group_that_starts_shows_no_stale_numbers(begins: Any) -> None:
    """A new attempt shows no step, loss, time or donor of the previous attempt."""
    run = run_after(
        2, event("heal_started", donor=1, from_step=6), step(7, own_loss=2.0, compute_seconds=1.0)
    )
    run.observe(event("worker_exited", signal="SIGKILL", stopped=False))
    died = run.groups[0]
    assert (died.step, died.loss, died.own_loss, died.own_seconds) == (7, None, None, None)
    run.observe(begins)
    starts = run.groups[0]
    assert (starts.step, starts.loss, starts.own_loss, starts.own_seconds, starts.donor) == (
        None,
    ) * 5
    assert (starts.state, starts.attempt, starts.participants) == ("starting", 1, ())


def test_step_of_a_group_that_is_back() -> None:
    """A fetched or loaded state gives the group its step again."""
    group = run_after(1, event("heal_finished", donor=1, step=12)).groups[0]
    assert (group.state, group.step) == ("joined", 12)
    assert run_after(1, event("checkpoint_loaded", step=40)).groups[0].step == 40


def test_worker_tells_its_host_and_attempt() -> None:
    """A run that is resumed starts with a later attempt; each attempt may be on another host."""
    group = run_after(1, event("worker_started", attempt=4, host="node03")).groups[0]
    assert (group.attempt, group.host, group.restarts) == (4, "node03", 0)


def test_a_group_starts_with_its_first_worker() -> None:
    """Rank 1 may start first; a rank 0 that starts after the group has joined is no second
    start.
    """
    run = run_after(1, event("worker_started", rank=1, attempt=2))
    assert (run.groups[0].state, run.groups[0].attempt) == ("starting", 2)
    run.observe(event("worker_started", rank=0, attempt=2))
    run.observe(event("joined", attempt=2, participants=[0]))
    run.observe(event("worker_started", rank=2, attempt=2))
    assert (run.groups[0].state, run.fold.groups[0].num_starts) == ("joined", 1)


def test_a_group_that_comes_when_all_is_over_has_finished() -> None:
    """No view shows a group that came after the end as starting, or as not having left in order."""
    assert run_after(2, event("came_too_late", 1, step=3)).groups[1].state == status.FINISHED


def test_drained_group_has_not_died() -> None:
    """A group that was asked to leave still commits its step; then it is drained, however its
    processes end.
    """
    run = run_after(2, event("training_finished", 1, step=3), build(LaunchStopping))
    assert [group.state for group in run.groups.values()] == ["draining", "finished"]
    run.observe(step(4))
    assert (run.groups[0].state, run.groups[0].step) == ("draining", 4)
    for each in (
        event("drained", step=4, reason="SIGTERM"),
        event("worker_exited", rank=0, code=0, stopped=True),
        event("worker_exited", rank=1, signal="SIGKILL", stopped=True),
    ):
        run.observe(each)
        assert run.groups[0].state == "drained"
    run.observe(event("worker_exited", rank=1, signal="SIGSEGV", stopped=False))
    assert run.groups[0].state == "died"


@pytest.mark.parametrize("asked", [False, True])
def test_group_whose_workers_the_agent_ends_is_stopped(asked: bool) -> None:
    """A group that its agent ends is stopped and not dead, whether the launcher or the agent was
    asked.
    """
    run = run_after(2, step(4), *([build(LaunchStopping)] if asked else []))
    run.observe(event("worker_exited", signal="SIGKILL", stopped=True))
    assert (run.groups[0].state, run.groups[0].loss) == ("stopped", None)


def test_spare_brings_a_lost_group_back() -> None:
    """A spare restarts a group that gave up; the attempt is the spare's, and one restart is
    counted.
    """
    run = run_after(1, event("replica_gave_up", reason="no restart left"))
    took = build(SpareTookOver, replica=0, attempt=4)
    assert run.observe(took) == "group 0: a spare takes its place (attempt 4)"
    run.observe(event("replica_restarted", attempt=4))
    group = run.groups[0]
    assert (group.state, group.attempt, group.restarts) == ("starting", 4, 1)


def test_plain_view_limits_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, progress is one line every few seconds, and changes have their lines at
    once.
    """
    view = PlainView(progress_seconds=1000.0)
    run = RunStatus(2)
    view.update(run)
    for number in (1, 2, 3):
        run.observe(step(number))
        view.update(run)
    view.line("group 0 joined")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in printed] == [
        "step 1  loss 2.50000  groups 2/2  restarts 0",
        "group 0 joined",
    ]


@pytest.mark.parametrize("end", ["training_finished", "drained"])
def test_plain_view_shows_the_last_step(capsys: pytest.CaptureFixture[str], end: str) -> None:
    """After all groups have left, the last step is shown once, without a remaining time."""
    view, run = PlainView(progress_seconds=1000.0), RunStatus(2)
    run.observe(event("worker_started", config={"group_size": 2, "steps": 100}))
    for number in (1, 2, 3):
        run.observe(step(number, time=2.0 * number, tokens=100))
        view.update(run)
    for replica in (0, 1):
        run.observe(event(end, replica, step=3))
        view.update(run)
    view.update(run)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in printed] == [
        "step 1  loss 2.50000  groups 2/2  restarts 0",
        "step 3  loss 2.50000  groups 2/2  restarts 0  tokens/s 50",
    ]


def test_the_exception_is_told_once() -> None:
    """The exception and its log are in the line of the first death only, not in later ones or in
    the giving up.
    """
    ends = [
        event(
            "worker_exited",
            code=1,
            reason="rank 1 ended with exit status 1",
            rank=1,
            error="E: x",
            log="/l",
        ),
        event(
            "worker_exited",
            code=1,
            reason="rank 0 ended with exit status 1",
            error="DistStoreError: y",
            log="/m",
        ),
        event("replica_gave_up", reason="no restart left", log="/l", error="E: x"),
    ]
    run = RunStatus(1)
    lines = [run.observe(each) for each in ends]
    assert lines == [
        "group 0 died: E: x; rank 1 ended with exit status 1; see /l",
        None,
        "group 0 failed: no restart left",
    ]


# Rounds of a semi-synchronous method

ROUNDS = {"group_size": 2, "steps": 95, "semi_sync_method": "diloco", "sync_steps": 10}


def test_rounds_are_told_with_the_steps_of_torchtitan() -> None:
    """Rounds are shown with torchtitan's step beside them. The last round may be short.

    A checkpoint is named by torchtitan's step in any case.
    """
    started = event("worker_started", config=ROUNDS)
    for told, line in [
        (
            event("heal_started", donor=1, from_step=3),
            "group 0 healing from group 1 at round 3 (step 30)",
        ),
        (
            event("drained", step=4, reason="SIGTERM"),
            "group 0 left after round 4 (step 40) (SIGTERM)",
        ),
        (event("training_finished", step=10), "group 0 finished at round 10 (step 95)"),
        (
            event("rolled_back", step=3, lost=1),
            "group 0 goes on from round 3 (step 30): rounds lost with their groups: 1",
        ),
        (
            event("checkpoint_saved", step=40, seconds=2.0),
            "group 0 saved the checkpoint of step 40 in 2.0 s",
        ),
    ]:
        assert run_after(2, started).observe(told) == line
    run = run_after(2, started, event("checkpoint_loaded", step=40))
    assert run.groups[0].step == 4
    unit = run.groups[0].unit
    run.observe(event("worker_started", attempt=1))  # of a trainer that tells no config
    assert run.groups[0].unit == unit


def test_progress_in_rounds() -> None:
    """Target and remaining time are in torchtitan's steps, the rate in tokens, a return in
    rounds.
    """
    run = RunStatus(2)
    run.observe(event("worker_started", time=0.0, config=ROUNDS))
    for number in (1, 2, 3):
        run.observe(step(number, time=10.0 * number, inner_step=10 * number, tokens=1000))
    told = run.progress(30.0)
    assert (
        told
        == "round 3 (step 30)  loss 2.50000  groups 2/2  restarts 0  tokens/s 100  ETA 1:05 (step 95)"
    )
    line = run.observe(step(2, time=40.0, lineage="other", inner_step=20))
    assert line == "training went back to round 1 (step 10): rounds 2 to 3 are made again"


def test_own_seconds_are_those_of_a_step() -> None:
    """A group that made few steps of a round is not faster; one that made none has no pace."""
    run = RunStatus(3)
    for replica, (made, seconds) in enumerate(((10, 5.0), (2, 1.0), (0, 0.0))):
        run.observe(step(4, replica, inner_step=40, inner_steps=made, compute_seconds=seconds))
    groups = run.groups
    assert [groups[replica].own_seconds for replica in range(3)] == [0.5, 0.5, None]


def test_files_that_are_cut_for_long_are_told() -> None:
    """A file read in the middle of a write is no full disk; a lasting one is reported once, and its
    end.
    """
    run = RunStatus(2)
    assert run.observe_cut({"a"}, 0.0) is None
    assert run.observe_cut(set(), 1.0) is None
    assert run.observe_cut({"a", "b"}, 2.0) is None
    assert run.observe_cut({"a", "b"}, 4.9) is None
    line = run.observe_cut({"a", "b"}, 5.0)
    assert line is not None
    assert line.startswith("not all events of 2 processes can be written (is the disk full?)")
    assert run.observe_cut({"a", "b"}, 60.0) is None
    assert run.num_cut == 2
    assert run.observe_cut(set(), 61.0) is None
    assert run.observe_cut(set(), 64.0) == "all events are written again"
    assert run.num_cut == 0


@pytest.mark.parametrize(
    "file", ["replica-1-rank-0-attempt-2-77.jsonl", "replica-1-rank-0-attempt-2-77.3.jsonl"]
)
def test_what_a_killed_worker_has_left_is_not_waited_for(file: str) -> None:
    """A killed worker's file stays cut, which does not mean that the disk is still full."""
    run, files = RunStatus(2), {file}
    run.observe_cut(files, 0.0)
    assert run.observe_cut(files, 10.0) is not None
    run.observe(event("worker_exited", 1, rank=0, attempt=2, worker_pid=77, signal="SIGKILL"))
    run.observe_cut(files, 11.0)
    assert run.observe_cut(files, 20.0) == "all events are written again"
    assert run.num_cut == 0


def test_steps_that_come_late_are_no_step_back() -> None:
    """Events that waited for disk room while other groups' events were read count, and are no
    return.
    """
    run = RunStatus(2)
    for number, time in ((1, 1.0), (2, 2.0), (5, 5.0)):
        assert run.observe(step(number, time=time, lineage=f"{number:012x}")) is None
    for number, time in ((3, 3.0), (4, 4.0)):
        assert run.observe(step(number, replica=1, time=time, lineage=f"{number:012x}")) is None
    assert (run.step, run.fold.steps.num_committed) == (5, 5)
    line = run.observe(step(4, time=6.0, lineage="feed"))
    assert line == "training went back to step 3: steps 4 to 5 are made again"


def test_lost_events_are_a_line() -> None:
    """Terminal, `top` and the launcher name the process that lost events, and the reason."""
    run = RunStatus(2)
    lost = {
        "error": "No space left on device",
        "events": 7,
        "kinds": {"hung": 7},
        "since": 1.0,
        "until": 2.0,
    }
    of_rank = build(EventsDropped, replica=1, rank=0, attempt=0, **lost)
    assert (
        run.observe(of_rank)
        == "group 1, rank 0, lost events that it could not write: No space left on device"
    )
    of_launcher = build(EventsDropped, **lost)
    assert (
        run.observe(of_launcher)
        == "the launcher lost events that it could not write: No space left on device"
    )
    assert len(run.lines) == 2


def test_a_stranger_at_many_ports_is_one_line() -> None:
    """Each rank has ports of its own. The first refusal of a kind has a line, and names its port;
    the next launch begins anew.
    """
    run = RunStatus(2)
    refused = {"kind": "crowd", "source": "10.6.6.6", "reason": "too many connections"}

    def refuse(rank: int, port: str, **others: Any) -> str | None:
        of_rank = {"replica": 1, "rank": rank, "attempt": 0, "port": port}
        return run.observe(build(StrangerRefused, **{**of_rank, **refused, **others}))

    first = "the state server of group 1, rank 0, refused too many connections, from 10.6.6.6; said once"
    assert refuse(0, "state server") == first
    assert refuse(1, "state server") is None
    assert refuse(0, "control tree") is not None
    assert refuse(0, "state server", kind="silent") is not None
    at_the_gate = run.observe(build(StrangerRefused, **refused))
    assert at_the_gate == "the lighthouse refused too many connections, from 10.6.6.6; said once"
    assert len(run.lines) == 4
    run.observe(build(named("launch_started"), time=9.0, replicas=2))
    assert refuse(1, "state server") is not None


def test_whom_a_group_waits_for() -> None:
    """The view shows the longest wait of a group's last step, or the group that its commit
    needs.
    """

    def waited(*told: Any) -> tuple[int, str] | None:
        wait = run_after(2, event("worker_started"), *told).groups[0].waited
        return None if wait is None else (wait.slot, wait.why)

    long, short = (
        {"slot": 1, "seconds": 0.5, "why": "lost"},
        {"slot": 1, "seconds": 0.1, "why": "computing"},
    )
    needs = event("waiting", step=1, slots=[1], why="too_few")
    assert waited(step(1, waits=[long, short])) == (1, "lost")
    assert waited(step(1, waits=[long]), needs) == (1, "too_few")
    assert waited(step(1, waits=[long]), needs, step(2, waits=[])) is None
    assert waited(step(1)) is None


def lost(time: float, slot: int = 1, seconds: float = 10.0, last_step: int | None = 1) -> Any:
    return build(GroupLost, time=time, replica=0, slot=slot, seconds=seconds, last_step=last_step)


@pytest.mark.parametrize(
    ("state", "quiet", "silent", "expected"),
    [
        ("training", 10.0, 10.0, True),
        ("healing", 10.0, 10.0, True),
        ("joined", 10.0, 10.0, True),
        ("training", 1.0, 10.0, False),  # it writes events: it is only cut off
        ("starting", 12.0, 10.0, False),  # its agent restarts it
        ("died", 12.0, 10.0, False),
        ("starting", 400.0, 400.0, True),  # its host was lost in the midst of that
        ("left", 400.0, 400.0, False),
        ("finished", 400.0, 400.0, False),
        ("given up", 400.0, 400.0, False),
    ],
)
def test_who_is_lost(state: GroupState, quiet: float, silent: float, expected: bool) -> None:
    """A survivor's report of silence is checked against the last event of the silent group."""
    group = GroupFold(1, state, last_event_time=100.0)
    assert (group.find_silence(lost(100.0 + quiet, seconds=silent)) is not None) == expected


def test_check_and_top_agree_on_who_is_lost() -> None:
    """A silent group is lost if it trained or waited for a quorum, and if the others ended without
    it.

    `top` and `check` had separate rules, and named different groups as lost.
    """
    joined = [event("worker_started", 1, time=1.0), event("joined", 1, time=2.0, participants=[1])]
    run = run_after(2, *joined, lost(12.0))
    assert (
        run.groups[1].state,
        fold_events([*joined, lost(12.0)]).groups[1].silence is not None,
    ) == ("lost", True)
    ended = event("ended_without", time=73.0, slots=[1], seconds=60.0)
    run = run_after(2, event("worker_started", 1, time=70.0), ended)
    assert (run.groups[1].state, run.fold.groups[1].silence is not None) == ("lost", True)


def test_lost_group_is_named_and_shown_until_it_is_back() -> None:
    """A lost group has one line, and its start in the table; after its return its events count
    again.
    """
    run = RunStatus(2)
    run.observe(build(WorkerStarted, time=1.0, replica=1))
    run.observe(step(1, time=2.0))
    run.observe(step(1, replica=1, time=2.0))
    told = [run.observe(event) for event in (lost(12.0), lost(42.0, seconds=40.0))]
    assert told == ["group 1 is lost: silent for 10 s, last in step 1", None]
    assert run.groups[1].state == status.LOST
    assert "lost since step 1" in text_of(make_group_table(run.groups, 50.0, 80))
    back = run.observe(build(GroupBack, time=50.0, replica=0, slot=1, seconds=48.0))
    assert (back, run.groups[1].state) == ("group 1 is back: it was silent for 48 s", status.JOINED)
    run.observe(step(9, replica=1, time=51.0))
    assert run.groups[1].state == status.TRAINING


def test_lost_group_whose_last_commit_is_not_written() -> None:
    """Table and line show the same step, because the other groups know of the lost group's
    participation.
    """
    run = RunStatus(2)
    run.observe(step(1, replica=1, time=2.0))
    assert (
        run.observe(lost(12.0, last_step=2)) == "group 1 is lost: silent for 10 s, last in step 2"
    )
    assert "lost since step 2" in text_of(make_group_table(run.groups, 50.0, 80))


def test_group_that_is_restarted_is_not_lost() -> None:
    """The agent's events are newer than the survivor's knowledge."""
    run = RunStatus(2)
    run.observe(step(1, replica=1, time=2.0))
    run.observe(
        event("worker_exited", 1, time=2.5, signal="SIGKILL", reason="killed", stopped=False)
    )
    run.observe(build(ReplicaRestarted, time=3.0, replica=1, attempt=1, reason="killed"))
    assert run.observe(lost(13.0)) is None
    assert run.groups[1].state == status.STARTING


def test_a_run_ends_without_a_lost_group() -> None:
    """Without a launcher the run ends once the other groups have finished, and not before."""
    run = RunStatus(2)
    for replica in (0, 1):
        run.observe(step(1, replica=replica, time=2.0))
    run.observe(lost(12.0))
    assert run.end == ""
    waits = run.observe(event("waiting_to_end", time=13.0, slots=[1], seconds=60.0))
    ends = run.observe(event("ended_without", time=73.0, slots=[1], seconds=60.0))
    run.observe(event("training_finished", time=73.1, step=1))
    assert waits == "the last step is made; waiting for group 1 for 60 s at most"
    assert ends == "ended without group 1: not heard of for 60 s"
    assert run.groups[1].state == status.LOST
    assert run.end
