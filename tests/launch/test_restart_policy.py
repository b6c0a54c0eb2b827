# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Restart decisions: of one group, and of all groups of a run together."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build
from titan_ft.history.fold.run import RunFold
from titan_ft.launch.group.own_end import OWN_SIGNALS, cause_of_end
from titan_ft.launch.restart_policy import (
    CAUSE_CRASH_LOOP,
    CAUSE_NETWORK,
    CAUSE_RESTARTS,
    MAX_ENDS_OF_ONE_CAUSE,
    NETWORK_SECONDS,
    NO_RESTART_CODE,
    WINDOW_SECONDS,
    AttemptEnd,
    NoRestart,
    RestartPolicy,
    RunStopPolicy,
    agent_exit_status,
    backoff_seconds,
    has_run_committed,
)
from titan_ft.protocol.errors import TokenRefusedError, first_line
from titan_ft.run.error_file import WorkerError
from titan_ft.run.events import (
    Event,
    LaunchStarted,
    ReplicaGaveUp,
    ReplicaRestarted,
    StepCommitted,
    WorkerExited,
    WorkerStarted,
)
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths

KILLED = AttemptEnd(-9, alive_seconds=5.0)
FAILED = AttemptEnd(1, alive_seconds=5.0)
AWAY = replace(
    FAILED, error=WorkerError("ConnectionError: away", transient=True, time=0.0, network=True)
)
ALONE = replace(FAILED, error=WorkerError("GaveUpError: too few came", transient=True, time=0.0))


def raised(text: str, **fields: Any) -> AttemptEnd:
    return replace(FAILED, error=WorkerError(text, transient=False, time=0.0), **fields)


def reason(decision: float | NoRestart) -> str:
    """Return why a group is given up."""
    assert isinstance(decision, NoRestart)
    return decision.reason


def test_backoff_starts_at_once_and_is_capped() -> None:
    """The first restart waits for nothing, the next ones for twice as long each, up to a cap."""
    assert [backoff_seconds(streak) for streak in range(8)] == [
        0.0,
        0.5,
        1.0,
        2.0,
        4.0,
        8.0,
        10.0,
        10.0,
    ]
    assert backoff_seconds(10_000) == 10.0


def test_backoff_grows_in_a_crash_loop() -> None:
    """A group that dies young each time waits longer and longer."""
    policy = RestartPolicy(max_restarts=10)
    assert [policy.decide(KILLED) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]


def test_backoff_is_reset_by_health() -> None:
    """A group that committed a step, or lived long, is restarted at once when it dies."""
    policy = RestartPolicy(max_restarts=10)
    for _ in range(3):
        policy.decide(KILLED)
    assert policy.decide(replace(KILLED, committed=True)) == 0.0
    assert policy.decide(KILLED) == 0.5
    assert policy.decide(replace(KILLED, alive_seconds=61.0)) == 0.0


def test_restarts_are_limited() -> None:
    """After max_restarts, healthy or not, the group has failed."""
    policy = RestartPolicy(max_restarts=2)
    decisions = [
        policy.decide(replace(KILLED, alive_seconds=100.0, committed=True)) for _ in range(3)
    ]
    assert decisions[:2] == [0.0, 0.0]
    assert decisions[2] == NoRestart(
        CAUSE_RESTARTS, "no restart left (--max-restarts 2 within 24 hours)"
    )


def test_restarts_long_ago_do_not_count() -> None:
    """A run of weeks does not end of restarts that were few at any time."""
    now = 0.0
    policy = RestartPolicy(max_restarts=2, clock=lambda: now)
    for day in range(30):
        for hour in (0, 12):
            now = day * WINDOW_SECONDS + hour * 3600.0
            assert isinstance(policy.decide(replace(KILLED, committed=True)), float), (day, hour)
    now += 1.0
    assert isinstance(policy.decide(replace(KILLED, committed=True)), NoRestart)


def test_restarts_without_a_commit_come_to_an_end() -> None:
    """Also where each attempt waits so long for what never comes that there are few restarts a
    day.
    """
    now = 0.0
    waits = replace(
        FAILED,
        alive_seconds=WINDOW_SECONDS,
        error=WorkerError("Timeout: away", transient=True, time=0.0),
    )
    policy = RestartPolicy(max_restarts=3, clock=lambda: now)
    for _ in range(3):
        now += WINDOW_SECONDS
        assert isinstance(policy.decide(waits), float)
    now += WINDOW_SECONDS
    assert reason(policy.decide(waits)) == "no restart left (--max-restarts 3 within 24 hours)"


def test_bad_config_is_never_restarted() -> None:
    """Exit status 2 says that the configuration is wrong, which another start would find again."""
    decision = RestartPolicy(max_restarts=5).decide(replace(FAILED, code=2))
    assert reason(decision) == "the configuration is wrong (exit status 2); it is not started again"


def test_a_group_whose_token_was_refused_is_given_up() -> None:
    """Its worker has waited for another answer. Two more starts would wait as long."""
    error = first_line(TokenRefusedError("the lighthouse refuses it"))
    given_up = RestartPolicy(max_restarts=100).decide(raised(error))
    assert "another start would be refused as well" in reason(given_up)
    assert agent_exit_status(raised(error).code) == 1, "a scheduler may start it again"


def test_the_same_exception_again_and_again() -> None:
    """Three ends with it, whatever numbers are in it, and kills between: the group is not started a
    fourth time.
    """
    policy = RestartPolicy(max_restarts=100)
    assert policy.decide(raised("KeyError: 'nope' at 0x7f30 of pid 12")) == 0.0
    assert isinstance(policy.decide(KILLED), float)
    assert isinstance(policy.decide(raised("KeyError: 'nope' at 0x7f9c of pid 4711")), float)
    decision = policy.decide(raised("KeyError: 'nope' at 0x1 of pid 7"))
    assert decision == NoRestart(
        CAUSE_CRASH_LOOP, "the same exception 3 times in a row, and no step committed between"
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *((-signum, signum.name) for signum in sorted(OWN_SIGNALS)),
        (128 + signal.SIGSEGV, "SIGSEGV"),  # of a worker that is the child of a shell
        (1, "exit status 1"),
        (7, "exit status 7"),
        (255, "exit status 255"),
    ],
)
def test_the_same_end_without_an_exception(code: int, name: str) -> None:
    """However a process ends of itself: a crash in native code, an assertion, `os._exit`. Kills
    change nothing.
    """
    policy = RestartPolicy(max_restarts=100)
    end = replace(FAILED, code=code)
    for between in (end, KILLED, end):
        assert isinstance(policy.decide(between), float)
    expected = f"the same end ({name}) 3 times in a row, and no step committed between"
    assert policy.decide(end) == NoRestart(CAUSE_CRASH_LOOP, expected)


@pytest.mark.parametrize(
    "code", [0, *(-s for s in signal.valid_signals() - OWN_SIGNALS if s < signal.SIGRTMIN)]
)
def test_an_end_from_outside_never_counts(code: int) -> None:
    """Kills by a person, Slurm, the OOM killer, chaos: such a group has all of its restarts, and no
    row is ended.
    """
    assert cause_of_end(code, None) == ""
    policy = RestartPolicy(max_restarts=1000)
    assert all(isinstance(policy.decide(replace(KILLED, code=code)), float) for _ in range(1000))
    assert isinstance(policy.decide(replace(KILLED, code=code)), NoRestart)


@pytest.mark.parametrize("status", [128 + signal.SIGKILL, 128 + signal.SIGTERM])
def test_a_status_that_tells_of_a_kill(status: int) -> None:
    """Of a rank that could not leave in order (143), or of a shell between."""
    policy = RestartPolicy(max_restarts=1000)
    assert all(isinstance(policy.decide(replace(FAILED, code=status)), float) for _ in range(100))


@pytest.mark.parametrize(
    "end", [replace(FAILED, code=-signal.SIGABRT), replace(FAILED, code=7), raised("E: a")]
)
def test_the_same_step_again_and_again(end: AttemptEnd) -> None:
    """Steps that lead to the same end each time are no progress: on a cluster no launcher sees
    that.
    """
    policy = RestartPolicy(max_restarts=100)
    ends = [replace(end, committed=True, step=80), end, replace(end, committed=True, step=80)]
    assert [isinstance(policy.decide(one), float) for one in ends] == [True, True, False]
    policy = RestartPolicy(max_restarts=100)
    for step in (80, 81, 82, 81, 80):
        assert isinstance(policy.decide(replace(end, committed=True, step=step)), float)
    policy = RestartPolicy(max_restarts=100)
    decisions = [policy.decide(replace(end, committed=True, step=80)) for _ in range(3)]
    assert reason(decisions[-1]).endswith(" 3 times in a row, each time after step 80")


def test_a_suspected_host_is_left_before_a_group_is_given_up() -> None:
    """Crashes in native code may be the host's: with --host-deaths the group goes elsewhere.
    Exceptions are not.
    """
    crash = replace(FAILED, code=-signal.SIGSEGV)
    for deaths, most in ((0, MAX_ENDS_OF_ONE_CAUSE), (1, MAX_ENDS_OF_ONE_CAUSE), (5, 6)):
        policy = RestartPolicy(max_restarts=100, deaths_until_suspected=deaths)
        number = next(number for number in count(1) if isinstance(policy.decide(crash), NoRestart))
        assert number == most
    policy = RestartPolicy(max_restarts=100, deaths_until_suspected=5)
    assert [isinstance(policy.decide(raised("E: a")), float) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    policy = RestartPolicy(max_restarts=100, deaths_until_suspected=5)
    assert [isinstance(policy.decide(raised("HungError: x")), float) for _ in range(6)] == [
        True
    ] * 5 + [False]


@pytest.mark.parametrize(
    "ends",
    [
        [raised("ValueError: a", committed=True)] * 9,
        [raised("ValueError: a", disturbed=True)] * 9,
        [replace(FAILED, error=WorkerError("DistStoreError: a", transient=True, time=0.0))] * 9,
        [KILLED] * 9,
        [
            FAILED,
            replace(FAILED, code=7),
            FAILED,
            replace(FAILED, code=7),
            replace(FAILED, committed=True),
        ]
        * 2,
        [
            raised("a"),
            AWAY,
            raised("b"),
            KILLED,
            raised("a"),
            replace(FAILED, code=-signal.SIGTERM),
            raised("b"),
            AWAY,
        ],
        [replace(FAILED, committed=True)] * 9,
        [replace(FAILED, code=-signal.SIGSEGV, disturbed=True)] * 9,
    ],
    ids=[
        "commits between",
        "injected",
        "may go by itself",
        "kills",
        "causes in turn, commits between",
        "few causes in turn, among others",
        "a status, commits between",
        "an injected crash",
    ],
)
def test_no_crash_loop(ends: list[AttemptEnd]) -> None:
    """What is no row of the same cause is left to the number of restarts."""
    policy = RestartPolicy(max_restarts=9)
    assert all(isinstance(policy.decide(end), float) for end in ends[:9])


@pytest.mark.parametrize(
    "causes",
    [
        [raised("ValueError: a"), raised("ValueError: b")],
        [FAILED, replace(FAILED, code=7)],
        [replace(FAILED, code=-signal.SIGABRT), replace(FAILED, code=-signal.SIGSEGV)],
        [raised("ValueError: a"), FAILED],
        [raised("E: a"), FAILED, replace(FAILED, code=-signal.SIGSEGV), raised("E: b")],
    ],
    ids=["exceptions", "statuses", "signals", "an exception and a status", "four causes"],
)
@pytest.mark.parametrize(
    "between", [None, KILLED, AWAY], ids=["nothing", "kills", "a network error"]
)
def test_causes_in_turn(causes: list[AttemptEnd], between: AttemptEnd | None) -> None:
    """Twice as many ends as with one cause, with any causes in a row; kills neither count
    nor help.
    """
    policy = RestartPolicy(max_restarts=100, has_run_committed=lambda: True)
    for number, end in zip(range(5), cycle(causes), strict=False):
        assert isinstance(policy.decide(end), float), number
        assert between is None or isinstance(policy.decide(between), float)
    decision = policy.decide(causes[5 % len(causes)])
    assert decision == NoRestart(CAUSE_CRASH_LOOP, "6 ends of its own in a row, without progress")


def test_causes_in_turn_after_the_same_step() -> None:
    """The group goes on from the same checkpoint each time; another step is progress."""
    policy = RestartPolicy(max_restarts=100)
    first, other = raised("E: a", committed=True, step=80), raised("E: b", committed=True, step=80)
    decisions = [policy.decide(end) for end in (first, other, first, other, first, other)]
    assert all(isinstance(decision, float) for decision in decisions[:5])
    assert reason(decisions[5]) == "6 ends of its own in a row, without progress"
    policy = RestartPolicy(max_restarts=100)
    for step in range(20):
        assert isinstance(policy.decide(replace(first, step=step)), float)
        assert isinstance(policy.decide(replace(other, step=step)), float)


def test_a_commit_begins_the_row_anew() -> None:
    """Also a commit of an attempt that ended otherwise; the end after it is the first of the next
    row.
    """
    policy = RestartPolicy(max_restarts=100)
    for end in (
        raised("E: a"),
        raised("E: a"),
        replace(KILLED, committed=True),
        raised("E: a"),
        raised("E: a"),
    ):
        assert isinstance(policy.decide(end), float)
    assert isinstance(policy.decide(raised("E: a")), NoRestart)


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("ends_at", "given_up_at"),
    [
        # Seconds from the start of the first attempt; three of them were over soon.
        ([5, 6, 7, 65, 119, 120], 120),
        # Attempts that wait for long: three of them.
        ([300, 600, 900], 900),
    ],
)
def test_a_dead_network_before_the_first_step(ends_at: list[float], given_up_at: float) -> None:
    """Three attempts and two minutes from the start of the first one, and not before both."""
    clock = Clock()
    policy = RestartPolicy(max_restarts=100, clock=clock)
    begin = clock.now
    for moment in ends_at:
        clock.now = begin + moment
        decision = policy.decide(replace(AWAY, alive_seconds=ends_at[0]))
        assert isinstance(decision, NoRestart) == (moment == given_up_at), moment
    assert isinstance(decision, NoRestart)
    assert decision.cause == CAUSE_NETWORK
    assert (
        decision.reason
        == f"{len(ends_at)} network errors within {given_up_at} s, and no step committed"
    )


@pytest.mark.parametrize(
    ("ends", "trains"),
    [
        ([AWAY] * 50, True),
        ([replace(AWAY, committed=True, step=1), *[AWAY] * 50], False),
        ([replace(KILLED, committed=True, step=1), *[AWAY] * 50], False),
        ([ALONE] * 50, False),
        ([replace(AWAY, disturbed=True)] * 50, False),
        ([AWAY, AWAY, *[KILLED] * 50], False),
    ],
    ids=[
        "others train",
        "it has trained",
        "it was killed",
        "groups are missing",
        "injected",
        "kills",
    ],
)
def test_no_dead_network(ends: list[AttemptEnd], trains: bool) -> None:
    """Once the run has made a step a network error ends nothing, and what is no network error never
    does.

    Groups that are missing may be in a queue for hours.
    """
    clock = Clock()
    policy = RestartPolicy(max_restarts=1000, clock=clock, has_run_committed=lambda: trains)
    for end in ends:
        clock.now += NETWORK_SECONDS
        assert isinstance(policy.decide(end), float)


def test_a_run_that_began_to_train_meanwhile() -> None:
    """Another group's first step comes just before this group would be given up; there is no later
    look.
    """
    clock, answers = Clock(), iter([False, False, True])
    policy = RestartPolicy(max_restarts=100, clock=clock, has_run_committed=lambda: next(answers))
    for _ in range(9):
        clock.now += NETWORK_SECONDS
        assert isinstance(policy.decide(AWAY), float)


def write(path: Path, *events: Event, time: float) -> None:
    """Write events that happened at `time`."""
    log = EventLog(path)
    for event in events:
        log.emit(event)
    log.close()
    path.write_text(re.sub(r'"time": [^,]+', f'"time": {time}', path.read_text()))


@pytest.mark.parametrize(
    ("launched", "committed", "trains"),
    [
        ((), (), False),
        ((), (5.0,), True),  # groups that were started one by one
        ((10.0,), (), False),
        ((10.0,), (5.0,), False),  # the launch before
        ((10.0,), (5.0, 11.0), True),
        ((1.0, 10.0), (5.0,), False),
        ((1.0, 10.0), (12.0,), True),
    ],
)
def test_whether_the_run_trains(
    tmp_path: Path, launched: tuple[float, ...], committed: tuple[float, ...], trains: bool
) -> None:
    """By the events of any group, of this launch."""
    paths = RunPaths(tmp_path)
    paths.events.mkdir()
    for pid, moment in enumerate(launched):
        event = LaunchStarted(replicas=2, ranks_per_replica=1, spares=0, job_id="x")
        write(paths.launcher_events(pid), event, time=moment)
    for pid, moment in enumerate(committed):
        started = build(WorkerStarted, replica=1, rank=0, attempt=pid)
        step = build(StepCommitted, replica=1, rank=0, attempt=pid, step=7)
        write(paths.worker_events(1, 0, pid, pid), started, step, time=moment)
    paths.worker_events(0, 0, 0, 99).write_text('{"event":"worker_started"\ndamaged\n')
    assert has_run_committed(paths) == trains


def exited(
    replica: int, error: str | None = "KeyError: 'nope'", attempt: int = 0, **fields: Any
) -> WorkerExited:
    fields = {"log": f"rank-{replica}.log", **fields}
    if "signal" not in fields:
        fields.setdefault("code", 1)
    return build(WorkerExited, replica=replica, attempt=attempt, error=error, **fields)


def rounds(*ends: tuple[WorkerExited, int], groups: tuple[int, ...] = (0, 1)) -> list[str]:
    """Take the ends as the launcher does: through the fold of the run, which knows the first end of
    each attempt.
    """
    common, fold, reasons = RunStopPolicy(), RunFold(3), []
    for event, step in ends:
        if event.attempt > fold.groups[event.replica].attempt:
            fold.observe(build(ReplicaRestarted, replica=event.replica, attempt=event.attempt))
        fold.observe(event)
        is_cause = fold.groups[event.replica].failed_by is event
        reasons.append(common.observe_exit(event, step, groups) if is_cause else "")
    return reasons


def test_all_groups_end_alike_twice() -> None:
    """The same exception in all groups at the same step, and again when they are back there, stops
    the run.
    """
    again = [(exited(replica, attempt=attempt), 80) for attempt in (0, 1) for replica in (0, 1)]
    *before, reason = rounds(*again)
    assert before == ["", "", ""]
    assert reason == "all groups end with KeyError: 'nope' (after step 80, 2 times; see rank-1.log)"


@pytest.mark.parametrize(
    ("fields", "name"), [({"signal": "SIGABRT"}, "SIGABRT"), ({"code": 7}, "exit status 7")]
)
def test_all_groups_end_alike_without_an_exception(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    """Gloo aborted a rank of each group at the same step, again and again."""
    log = tmp_path / "rank-1.log"
    log.write_text(
        "  what():  [enforce fail at pair.cc] 8 vs 4\nFatal Python error: Aborted\n\nThread 0x1:\n"
    )
    again = [
        (exited(replica, None, attempt, log=str(log), **fields), 80)
        for attempt in (0, 1)
        for replica in (0, 1)
    ]
    *before, reason = rounds(*again)
    assert before == ["", "", ""]
    assert reason == (
        f"all groups end with {name} (what():  [enforce fail at pair.cc] 8 vs 4) (after step 80, 2 times; see {log})"
    )


def test_groups_that_are_gone_do_not_count() -> None:
    """A group that was given up earlier, with another exception, does not hide the others' common
    cause.
    """
    gone = (exited(2, "E: its own"), 3)
    again = [(exited(replica, attempt=attempt), 80) for attempt in (0, 1) for replica in (0, 1)]
    assert rounds(gone, *again)[-1]
    assert not any(rounds(gone, *again, groups=(0, 1, 2)))


@pytest.mark.parametrize(
    "ends",
    [
        [(exited(0, attempt=attempt), 80) for attempt in range(9)],
        [(exited(replica, attempt=attempt), attempt) for attempt in range(9) for replica in (0, 1)],
        [
            (exited(replica, f"E: {'ab'[replica]}", attempt), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, None, attempt, signal="SIGKILL"), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, None, attempt, signal="SIGTERM"), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, None, attempt, code=7 + replica), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, None, attempt, signal="SIGSEGV", transient=True), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, attempt=attempt, transient=True), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, attempt=attempt, stopped=True), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
        [
            (exited(replica, attempt=attempt, code=NO_RESTART_CODE), 80)
            for attempt in range(9)
            for replica in (0, 1)
        ],
    ],
    ids=[
        "one group",
        "other steps",
        "other exceptions",
        "killed",
        "terminated",
        "other statuses",
        "an injected crash",
        "may go by itself",
        "stopped",
        "final",
    ],
)
def test_no_common_end(ends: list[tuple[WorkerExited, int]]) -> None:
    """What is not the same for all groups twice says nothing about the run."""
    assert not any(rounds(*ends))


def test_the_first_rank_counts() -> None:
    """The end of a group is that of its first rank; other ranks end as a consequence."""
    ends = [
        (exited(replica, error, attempt, rank=rank), 0)
        for attempt in (0, 1)
        for replica in (0, 1)
        for rank, error in enumerate(("E: cause", f"E: lost a peer of group {'ab'[replica]}"))
    ]
    assert [bool(reason) for reason in rounds(*ends)] == [False] * 6 + [True, False]


@pytest.mark.parametrize("cause", [CAUSE_CRASH_LOOP, CAUSE_NETWORK])
def test_a_group_that_is_given_up_before_any_step_stops_the_run(cause: str) -> None:
    """Later on the other groups train on; and a group that is out of restarts does not stop them at
    any time.
    """
    loss = build(
        ReplicaGaveUp,
        replica=1,
        cause=cause,
        reason="x; the same exception 3 times in a row",
        error="E: a",
        log="a.log",
    )
    assert RunStopPolicy.observe_give_up(loss, may_have_committed=False) == (
        "group 1 ends with E: a (x; the same exception 3 times in a row by any group; see a.log)"
        + (
            "; check the network, or name data that are on this host (training.dataset_path)"
            if cause == CAUSE_NETWORK
            else ""
        )
    )
    assert not RunStopPolicy.observe_give_up(loss, may_have_committed=True)
    out = build(ReplicaGaveUp, cause=CAUSE_RESTARTS, reason="no restart left")
    assert not RunStopPolicy.observe_give_up(out, may_have_committed=False)
