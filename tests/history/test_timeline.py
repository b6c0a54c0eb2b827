# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fold of a run's events into each group's activities, without gaps and overlaps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from tests.event_builder import build, named
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing import timeline as timelines
from titan_ft.history.timing.intervals import STATES, Interval
from titan_ft.history.timing.timeline import Timeline
from titan_ft.run.events import Event


def build_timeline(events: Iterable[Event]) -> Timeline:
    return timelines.build_timeline(RunRecord(events))


class Run:
    """Write the history of a run; times are seconds since its begin."""

    def __init__(self, replicas: int = 2) -> None:
        self.replicas = replicas
        self.events: list[Any] = []
        self.say(0.0, "launch_started", replicas=replicas, ranks_per_replica=1, spares=0)

    def say(self, time: float, event: str, **fields: Any) -> None:
        self.events.append(build(named(event), time=1e9 + time, **fields))

    def rank(self, time: float, event: str, replica: int, attempt: int = 0, **fields: Any) -> None:
        """Let rank 0 of a group speak."""
        self.say(time, event, replica=replica, rank=0, attempt=attempt, **fields)

    def join(
        self, time: float, replica: int, attempt: int = 0, quorum: float = 0.2, rebuild: float = 0.1
    ) -> None:
        everybody = list(range(self.replicas))
        seconds = {"quorum_seconds": quorum, "rebuild_seconds": rebuild}
        self.rank(
            time, "joined", replica, attempt, participants=everybody, quorum=1, step=0, **seconds
        )

    def commit(self, time: float, step: int, replica: int, attempt: int = 0, **fields: Any) -> None:
        """Commit a step of one second: 0.6 s of computing, 0.2 s of exchange, 0.1 s of update, 0.1
        s before them.
        """
        usual = {
            "participants": list(range(self.replicas)),
            "lineage": f"{step:012x}",
            "parent": f"{step - 1:012x}",
            "tokens": 512 * self.replicas,
            "seconds": 0.9,
            "compute_seconds": 0.6,
            "exchange_seconds": 0.2,
            "apply_seconds": 0.1,
            "exchanges": 1,
            "forward_passes": 2,
        }
        self.rank(time, "step_committed", replica, attempt, step=step, **(usual | fields))

    def train(
        self,
        begin: float,
        steps: Iterable[int],
        replicas: Iterable[int] | None = None,
        **fields: Any,
    ) -> None:
        """Commit a step each second, the first a second after `begin`."""
        for place, step in enumerate(steps, start=1):
            for replica in range(self.replicas) if replicas is None else replicas:
                self.commit(begin + place, step, replica, **fields)

    def exit(self, time: float, replica: int, attempt: int = 0, **fields: Any) -> None:
        self.say(
            time,
            "worker_exited",
            replica=replica,
            rank=0,
            attempt=attempt,
            **({"stopped": False} | fields),
        )

    def begin(self) -> None:
        """Start all groups: ready at 10 s, first step at 12 s."""
        for replica in range(self.replicas):
            self.rank(
                8.0, "worker_started", replica, config={"hang_timeout_seconds": 5.0}, host="h"
            )
            self.join(10.3, replica)
            self.commit(12.0, 1, replica)

    def finish(self, time: float) -> None:
        self.say(time, "launch_finished", code=0, reason="all groups finished")


def seconds(line: Timeline, replica: int) -> dict[str, float]:
    """Return a group's seconds in each of its states."""
    return {state: us / 1e6 for state, us in line.totals_us(replica).items()}


def spans(line: Timeline, replica: int, state: str) -> list[tuple[float, float]]:
    """Return when a group was in a state, in seconds since the begin."""
    return [
        (
            round((one.start_us - line.begin_us) / 1e6, 4),
            round((one.end_us - line.begin_us) / 1e6, 4),
        )
        for one in line.groups[replica]
        if one.state == state
    ]


def check_whole(line: Timeline) -> None:
    """Require that each group's intervals cover the run in order, and have known states."""
    for intervals in line.groups.values():
        place = line.begin_us
        for interval in intervals:
            assert isinstance(interval, Interval)
            assert interval.start_us == place < interval.end_us
            assert interval.state in STATES
            place = interval.end_us
        assert place == line.end_us
    total = sum(sum(line.totals_us(replica).values()) for replica in line.groups)
    assert total == line.wall_us * len(line.groups)


def test_calm_run() -> None:
    """An undisturbed run is start, first meeting, steps by their parts, and idle after the last
    one.
    """
    run = Run()
    run.begin()
    run.train(12.0, range(2, 6))
    for replica in range(2):
        run.rank(16.5, "training_finished", replica, step=5)
        run.exit(17.0, replica, code=0)
    run.finish(18.0)
    line = build_timeline(run.events)
    check_whole(line)
    assert seconds(line, 0) == pytest.approx(
        {
            "start": 10.0,
            "wait_for_groups": 1.0,  # from 10 to 11.1 s, of which the process group took 0.1 s
            "rebuild": 0.1,
            "productive": 5 * 0.7,
            "exchange_wait": 5 * 0.2,
            "overhead": 4 * 0.1,
            "idle": 2.0,
        }
    )
    assert spans(line, 0, "idle") == [(16.0, 16.5), (16.5, 18.0)]


def killed_run() -> Run:
    """Make a run in which group 1 is killed at 14.4 s, returns at 20 s, and heals from 20.5 to 22.5
    s.
    """
    run = Run()
    run.begin()
    run.train(12.0, [2, 3])
    run.say(14.4, "fault_injected", fault="kill_group", target={"replica": 1}, seed=1, shot=0)
    run.exit(14.6, 1, signal="SIGKILL")
    run.say(14.7, "replica_restarted", replica=1, attempt=1, reason="SIGKILL", standby=True)
    # The survivor: waits from 14.7 s on, notices at 14.9 s, has a quorum at 15.4 s and a process
    # group at 15.5 s.
    run.rank(14.9, "exchange_failed", 0, error="Connection closed by peer", seconds=0.2, step=3)
    run.join(15.5, 0, quorum=0.5, rebuild=0.1)
    alone = {"participants": [0]}
    slow = {"exchanges": 2, "seconds": 1.7, "exchange_seconds": 1.0}
    run.commit(15.8, 4, 0, **alone, **slow)
    run.train(15.8, range(5, 12), [0], **alone)
    run.rank(19.0, "worker_started", 1, 1, host="h")
    run.join(20.4, 1, 1, quorum=0.3, rebuild=0.1)
    run.rank(20.5, "heal_started", 1, 1, donor=0, from_step=8, step=8)
    run.rank(
        21.5, "state_served", 0, joiner=1, step=8, bytes=1, copy_seconds=0.1, serve_seconds=1.0
    )
    times = {"seconds": 2.0, "fetch_seconds": 1.0}
    run.rank(
        22.5, "heal_finished", 1, 1, donor=0, from_step=8, step=11, bytes=1, replayed=3, **times
    )
    run.train(22.8, range(12, 14), [0])
    run.train(22.8, range(12, 14), [1], attempt=1)
    return run


def test_killed_group() -> None:
    """A killed group wastes its current step, is dead from the fault on, joins, heals and
    replays.
    """
    run = killed_run()
    run.finish(25.0)
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 1, "wasted") == [(14.0, 14.4)]
    assert spans(line, 1, "restart") == [(14.4, 20.0)]
    assert spans(line, 1, "quorum") == [(20.0, 20.3)]
    assert spans(line, 1, "rebuild")[-1] == (20.3, 20.4)
    assert spans(line, 1, "heal") == [(20.5, 21.5)]
    assert spans(line, 1, "replay") == [(21.5, 22.5)]
    (unfinished,) = line.unfinished
    assert (unfinished.forward_passes, unfinished.is_committed) == (2, False)


def test_survivor_of_a_kill() -> None:
    """A survivor detects, asks for a quorum, rebuilds and repeats the exchange; its computation
    counts.
    """
    line = build_timeline(killed_run().events)
    assert spans(line, 0, "detection") == [(14.7, 14.9)]
    assert spans(line, 0, "quorum") == [(14.9, 15.4)]
    assert spans(line, 0, "rebuild")[-1] == (15.4, 15.5)
    assert "wasted" not in seconds(line, 0)


def test_gradient_of_a_dead_group_counts_if_the_others_committed_it() -> None:
    """A group that dies after the others have its gradient has not wasted its work."""
    run = killed_run()
    for event in run.events:
        if event.name == "step_committed" and event.step == 4:
            event.participants = [0, 1]
    line = build_timeline(run.events)
    assert line.unfinished[0].is_committed
    assert "wasted" not in seconds(line, 1)


def test_cut_history_is_unknown() -> None:
    """After a group's last event its time is unknown, never productive."""
    run = Run()
    run.begin()
    run.train(12.0, range(2, 4))
    run.train(14.0, range(4, 30), [0])
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 1, "unknown") == [(14.0, 40.0)]
    assert spans(line, 0, "unknown") == []


def test_group_without_events_is_unknown() -> None:
    """A launched group without any event is counted, and its state is unknown."""
    run = Run(replicas=3)
    run.replicas = 2
    run.begin()
    line = build_timeline(run.events)
    assert seconds(line, 2) == {"unknown": 12.0}


def test_stopped_group_hangs() -> None:
    """The time under SIGSTOP is no computing, whatever the group's own clock says."""
    run = Run()
    run.begin()
    run.say(
        12.5,
        "fault_injected",
        fault="stop_group",
        target={"replica": 1},
        shot=0,
        params={"seconds": 9},
    )
    run.say(16.5, "fault_undone", fault="stop_group", target={"replica": 1}, shot=0)
    run.commit(17.0, 2, 1, seconds=4.9, compute_seconds=4.6)
    run.commit(17.0, 2, 0, seconds=4.9, exchange_seconds=4.2)
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 1, "hung") == [(12.5, 16.5)]
    assert seconds(line, 1)["productive"] == pytest.approx(0.7 + 0.7)
    assert seconds(line, 0)["exchange_wait"] == pytest.approx(0.2 + 4.2)


@pytest.mark.parametrize("injected", [True, False])
def test_deadlocked_group_hangs(injected: bool) -> None:
    """A deadlock lasts from the fault, or from the watchdog's period before its event, to the
    process's end.
    """
    run = Run()
    run.begin()
    if injected:
        run.say(12.3, "fault_injected", fault="deadlock", target={"replica": 1, "rank": 0}, shot=0)
    run.rank(18.0, "hung", 1, step=1)
    run.exit(18.1, 1, code=1)
    run.say(18.2, "replica_restarted", replica=1, attempt=1, reason="exit code 1")
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 1, "hung") == [(12.3 if injected else 13.0, 18.1)]
    assert spans(line, 1, "restart") == [(18.1, 18.2)]


def test_too_few_groups() -> None:
    """Below min_replica_size a group waits for others from the first such exchange to its
    commit.
    """
    run = Run()
    run.begin()
    run.rank(12.8, "exchange_failed", 0, error="closed", seconds=0.1, step=1)
    run.join(13.0, 0, quorum=0.1, rebuild=0.1)
    run.rank(
        13.1, "waiting", 0, step=1, participants=[0], reason="1 group(s) have a gradient, 2 needed"
    )
    run.commit(33.0, 2, 0, seconds=20.9, exchange_seconds=20.2, exchanges=180)
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 0, "wait_for_groups")[-1] == (13.1, 32.9)
    assert seconds(line, 0)["detection"] == pytest.approx(0.1)


def test_lighthouse_down() -> None:
    """The wait for an exchange without a lighthouse belongs to the quorum, from its death to the
    wait's end.
    """
    run = Run()
    run.begin()
    run.say(12.3, "fault_injected", fault="kill_lighthouse", target={"lighthouse": True}, shot=0)
    run.say(14.0, "lighthouse_restarted", reason="SIGKILL", seconds=1.6, address="a")
    run.commit(15.0, 2, 0, seconds=2.9, exchange_seconds=2.2)
    run.train(15.0, [3], [0])
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 0, "quorum") == [(12.7, 14.9)]


def test_left_out_and_void_work_is_wasted() -> None:
    """A computation is wasted if its gradient was excluded, or if its state was discarded."""
    run = Run()
    run.begin()
    run.commit(13.0, 2, 0, participants=[1])
    run.commit(13.0, 2, 1, participants=[1])
    run.commit(14.0, 3, 0, lineage="f" * 12, participants=[0])
    run.commit(14.0, 3, 1)
    run.rank(14.5, "heal_started", 0, donor=1, from_step=3, step=3)
    run.rank(
        14.6, "heal_finished", 0, donor=1, from_step=3, step=3, bytes=1, seconds=0.1, replayed=0
    )
    run.train(14.6, [4])
    line = build_timeline(run.events)
    check_whole(line)
    assert seconds(line, 0)["wasted"] == pytest.approx(0.6 + 0.7 + 0.5)
    assert "wasted" not in seconds(line, 1)


def test_drained_and_given_up_groups_are_idle() -> None:
    """A group that left in order, or may not be started again, is idle until the job ends."""
    run = Run(replicas=3)
    run.begin()
    run.rank(12.1, "drained", 1, step=1, reason="SIGTERM", in_order=True)
    run.exit(12.5, 1, code=0)
    run.exit(12.5, 2, code=1)
    run.say(12.6, "replica_gave_up", replica=2, rank=0, attempt=0, reason="too often")
    run.train(12.0, range(2, 5), [0])
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 1, "idle") == [(12.1, 15.0)]
    assert spans(line, 2, "idle") == [(12.6, 15.0)]


def test_stopped_run() -> None:
    """Groups that are ended because the run is stopped are idle from then on."""
    run = Run()
    run.begin()
    run.say(12.4, "launch_stopping", reason="a signal")
    for replica in range(2):
        run.exit(12.5, replica, stopped=True, signal="SIGTERM")
    run.finish(13.0)
    line = build_timeline(run.events)
    check_whole(line)
    assert spans(line, 0, "idle") == [(12.5, 13.0)]


def test_wall_clock_that_is_set() -> None:
    """On one host the monotonic clock measures the time, not a wall clock that was set."""
    run = killed_run()
    run.finish(25.0)
    straight = build_timeline(run.events)
    for event in run.events:
        event.mono = event.time - 1e9 + 50.0
        if event.time > 1e9 + 16.0:
            event.time -= 3600.0
    turned = build_timeline(run.events)
    check_whole(turned)
    assert turned.wall_us == pytest.approx(straight.wall_us, abs=5)
    for replica in (0, 1):
        assert seconds(turned, replica) == pytest.approx(seconds(straight, replica), abs=1e-4)


def test_no_events() -> None:
    """No history is no groups and no time."""
    assert build_timeline([]) == Timeline(0, 0, {}, ())


NAMES = (
    *(
        "launch_started",
        "launch_stopping",
        "launch_finished",
        "worker_started",
        "joined",
        "step_committed",
    ),
    *(
        "exchange_failed",
        "waiting",
        "heal_started",
        "heal_finished",
        "heal_failed",
        "state_served",
        "drained",
        "hung",
    ),
    *(
        "rolled_back",
        "training_finished",
        "worker_exited",
        "replica_restarted",
        "replica_gave_up",
        "fault_injected",
    ),
    *("fault_undone", "lighthouse_restarted", "gradient_excluded"),
)


def random_event(dice: random.Random) -> Event:
    """Make an event of any kind, with fields that may be zero, senseless, or contradictory."""
    fault = dice.choice(["kill_rank", "stop_group", "deadlock", "kill_lighthouse", "slow_rank"])
    values: dict[str, Any] = {
        "replica": dice.randrange(3),
        "rank": dice.randrange(2),
        "attempt": dice.randrange(3),
        "step": dice.randrange(8),
        "lineage": f"{dice.randrange(8):012x}",
        "parent": f"{dice.randrange(8):012x}",
        "participants": dice.sample(range(3), dice.randrange(4)),
        "forward_passes": dice.randrange(3),
        "exchanges": dice.randrange(1, 4),
        "fault": fault,
        "shot": dice.randrange(3),
        "target": dice.choice(
            [{"replica": 0}, {"replica": 1}, {"lighthouse": True}, {}, {"replica": 2, "rank": 0}]
        ),
        "joiner": dice.randrange(3),
        "from_step": dice.randrange(8),
        "replicas": dice.randrange(4),
        "signal": "SIGKILL",
        "code": dice.randrange(2),
        "stopped": dice.random() < 0.3,
        "in_order": dice.random() < 0.5,
        "tokens": dice.randrange(512),
        "params": {"seconds": dice.uniform(0, 9)},
        "config": {"hang_timeout_seconds": dice.uniform(0, 9)},
        "mono": dice.uniform(0, 99),
        "host": "h",
    }
    for name in (
        "seconds",
        "compute_seconds",
        "exchange_seconds",
        "apply_seconds",
        "quorum_seconds",
        "rebuild_seconds",
    ):
        values[name] = dice.choice([0.0, dice.uniform(-1, 9)])
    kind = named(dice.choice(NAMES))
    kept = {
        n: value
        for n, value in values.items()
        if n in kind.__struct_fields__ and dice.random() < 0.8
    }
    return build(kind, time=dice.uniform(0, 50), **kept)


@pytest.mark.parametrize("seed", range(200))
def test_random_histories_add_up(seed: int) -> None:
    """For any events each group's intervals cover the job's time exactly once."""
    dice = random.Random(seed)
    check_whole(build_timeline(random_event(dice) for _ in range(dice.randrange(1, 150))))


@pytest.mark.parametrize("seed", range(60))
def test_cut_and_thinned_histories_add_up(seed: int) -> None:
    """A real history with missing lines, or without its end, adds up, and is not more
    productive.
    """
    dice = random.Random(seed)
    run = killed_run()
    whole = sum(build_timeline(run.events).totals_us(replica)["productive"] for replica in range(2))
    cut = run.events[: dice.randrange(1, len(run.events))]
    line = build_timeline(cut)
    check_whole(line)
    assert sum(line.totals_us(replica)["productive"] for replica in line.groups) <= whole
    check_whole(build_timeline(event for event in run.events if dice.random() < 0.7))
