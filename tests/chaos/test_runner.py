# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The runner with simulated parts: events for a job, a number for a clock, and recorded signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build, named, untyped
from titan_ft.chaos.agents import WAIT_SECONDS
from titan_ft.chaos.effect import SETTLE_SECONDS
from titan_ft.chaos.job import RunningJob
from titan_ft.chaos.orders import Order
from titan_ft.chaos.plan import Every, Limits, Listed, ListedFault, Plan, single
from titan_ft.chaos.processes import RunProcess, Unreachable
from titan_ft.chaos.runner import ChaosRunner
from titan_ft.run.events import LaunchStarted, TrainingFinished, WorkerExited, WorkerStarted
from titan_ft.run.log import EventLog, read_events

LIGHTHOUSE = 99
START = 1000.0


class FakeProcesses:
    """Records the held processes and the sent signals."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.sent: list[tuple[str, list[int]]] = []
        self.num_held = 0

    def hold(self, workers: Sequence[RunProcess], everyone: Collection[RunProcess]) -> FakeReach:
        pids = [worker.pid for worker in workers if worker.pid not in self.gone]
        if not pids:
            raise Unreachable("nobody is there")
        self.num_held += 1
        return FakeReach(self, pids)


class FakeReach:
    def __init__(self, processes: FakeProcesses, pids: list[int]) -> None:
        self.processes, self.pids = processes, pids
        self.open = True

    def send(self, signum: signal.Signals) -> None:
        assert self.open
        pids = [pid for pid in self.pids if pid not in self.processes.gone]
        if not pids:
            raise Unreachable("gone meanwhile")
        self.processes.sent.append((signum.name, pids))

    def close(self) -> None:
        self.processes.num_held -= self.open
        self.open = False


class Harness:
    """A job of `replicas` groups of `ranks` ranks, and the runner of a plan for it.

    The pid of rank i of group r in attempt k is 1000 k + 10 r + i.
    """

    def __init__(
        self, plan: Plan, folder: Path, replicas: int = 4, ranks: int = 2, **settings: Any
    ) -> None:
        self.replicas, self.ranks = replicas, ranks
        self.folder = folder
        self.now = START
        self.step = 0
        self.attempts = dict.fromkeys(range(replicas), 1)
        self.processes = FakeProcesses()
        self.lines: list[str] = []
        self.log = EventLog(folder / "events" / "chaos.jsonl")
        self.runner = ChaosRunner(
            plan,
            processes=self.processes,
            orders=folder / "chaos" / "orders.jsonl",
            events=self.log,
            find_lighthouse_pid=lambda: LIGHTHOUSE,
            clock=lambda: self.now,
            wall=lambda: self.now,
            show=self.lines.append,
            **settings,
        )

    def event(self, name: str, **fields: Any) -> None:
        self.now += 0.001
        self.runner.observe(build(named(name), time=self.now, **fields))

    def says(self, replica: int, name: str, rank: int = 0, **fields: Any) -> None:
        """Write an event of a worker."""
        self.event(name, replica=replica, rank=rank, attempt=self.attempts[replica], **fields)

    def launch(self, **config: Any) -> None:
        self.event("launch_started", replicas=self.replicas, ranks_per_replica=self.ranks)
        for replica in range(self.replicas):
            self.start(replica, **config)

    def start(self, replica: int, **config: Any) -> None:
        for rank in range(self.ranks):
            pid = 1000 * self.attempts[replica] + 10 * replica + rank
            told = {"chaos": True, "checkpoint": True, **config}
            self.says(replica, "worker_started", rank, pid=pid, host="here", config=told)

    def exit(self, replica: int, rank: int, attempt: int, **how: Any) -> None:
        pid = 1000 * attempt + 10 * replica + rank
        self.event(
            "worker_exited", replica=replica, rank=rank, attempt=attempt, worker_pid=pid, **how
        )

    def restart(self, replica: int) -> None:
        """Let the agent note a death and start the group anew."""
        attempt = self.attempts[replica]
        self.exit(replica, 1, attempt, signal="SIGKILL")
        self.attempts[replica] += 1
        self.event("replica_restarted", replica=replica, attempt=attempt + 1)
        self.start(replica)

    def commit(self, *absent: int, digests: dict[int, str] | None = None) -> None:
        """Let all groups but the absent ones commit a step, and let the runner react."""
        self.step += 1
        present = [replica for replica in range(self.replicas) if replica not in absent]
        for replica in present:
            for rank in range(self.ranks):
                digest = {"digest": digests.get(replica, "same")} if digests is not None else {}
                self.says(
                    replica, "step_committed", rank, step=self.step, participants=present, **digest
                )
        self.runner.poll()

    def at(self, seconds: float) -> None:
        """Let the runner act so many seconds after the start of the test."""
        self.now = START + seconds
        self.runner.poll()

    def up(self) -> list[int]:
        return [group.replica for group in self.runner.job.view().groups.values() if group.up]

    def told(self, *names: str) -> list[dict[str, Any]]:
        return [
            untyped(event) for event in read_events(self.folder / "events") if event.name in names
        ]

    def orders(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / "chaos" / "orders.jsonl").read_text().splitlines()
        ]

    def agent(
        self,
        order: dict[str, Any],
        name: str = "fault_injected",
        replica: int | None = None,
        **more: Any,
    ) -> None:
        """Write an agent's event about an order."""
        replica = order["replica"] if replica is None else replica
        rank = order["rank"] or 0
        facts = {
            "fault": order["fault"],
            "shot": order["shot"],
            "target": {"replica": replica, "rank": rank},
        }
        if name != "fault_undone":
            facts["seed"] = order["seed"]
        self.says(replica, name, rank, **facts, **more)


def listed(*entries: tuple[float, str, int | None], seed: int = 1, **limits: Any) -> Plan:
    made = tuple(ListedFault(at, name, {}, replica) for at, name, replica in entries)
    return Plan("test", seed, limits=Limits(**limits), rules=(Listed(made),))


def under_way(plan: Plan, folder: Path) -> Harness:
    """Return a job whose groups have committed a step together, with which the schedule starts."""
    harness = Harness(plan, folder)
    harness.launch()
    harness.commit()
    return harness


def test_the_schedule_starts_when_all_groups_train_together(tmp_path: Path) -> None:
    """A part of the groups does not start the schedule, nor does time; after the start
    `start_seconds` pass.
    """
    plan = Plan(
        "test", 5, start_seconds=10.0, rules=(Listed((ListedFault(2.0, "kill_group", {}, 1),)),)
    )
    harness = Harness(plan, tmp_path)
    harness.launch()
    harness.commit(3)
    harness.at(100)
    harness.commit()
    started = harness.now - START
    harness.at(started + 9.9)
    assert not harness.told("chaos_started")
    harness.at(started + 10.1)
    (told,) = harness.told("chaos_started")
    assert (told["seed"], told["plan"], told["schedule"]) == (5, "test", str(plan))
    assert not harness.processes.sent
    harness.at(started + 12.1)
    assert harness.processes.sent == [("SIGKILL", [1010, 1011])]
    assert harness.runner.done
    harness.runner.close()
    harness.runner.close()
    (told,) = harness.told("chaos_finished")
    assert (told["injected"], told["skipped"]) == (1, 0)


def test_what_is_told_of_a_fault(tmp_path: Path) -> None:
    """The event names fault, target, seed, shot and parameters, and is written before the
    signal.
    """
    harness = Harness(single("stop_rank", 2, 1, {"seconds": 5.0}, seed=3), tmp_path)
    harness.launch()
    at_signal: list[int] = []
    send = FakeReach.send

    def noting(reach: FakeReach, signum: signal.Signals) -> None:
        at_signal.append(len(harness.told("fault_injected")))
        send(reach, signum)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeReach, "send", noting)
        harness.commit()
    assert at_signal == [1]
    (told,) = harness.told("fault_injected")
    assert {"replica", "rank", "attempt"}.isdisjoint(told)  # as agents would write
    assert told["target"] == {"replica": 2, "rank": 1}
    assert (told["fault"], told["shot"], told["params"]) == ("stop_rank", 0, {"seconds": 5.0})
    assert isinstance(told["seed"], int)
    assert harness.processes.sent == [("SIGSTOP", [1021])]
    assert harness.lines[-1] == "chaos: stop_rank at group 2 rank 1"


def test_a_stopped_group_goes_on_in_time(tmp_path: Path) -> None:
    """SIGCONT follows after `seconds`. The group is up again only after it has contributed."""
    harness = under_way(listed((0, "stop_group", 2)), tmp_path)
    stopped = harness.now - START
    harness.commit(2)
    harness.at(stopped + 9.9)
    assert harness.processes.sent == [("SIGSTOP", [1020, 1021])]
    assert not harness.runner.done
    harness.at(stopped + 10.0)
    assert harness.processes.sent[1:] == [("SIGCONT", [1020, 1021])]
    assert harness.told("fault_undone")[0]["target"] == {"replica": 2}
    assert harness.runner.done
    harness.commit(2)
    assert harness.up() == [0, 1, 3]
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]
    assert harness.processes.num_held == 0


@pytest.mark.parametrize("end", ["close", "interrupt", "the job"])
def test_a_stop_is_always_undone(tmp_path: Path, end: str) -> None:
    """A stop is undone at the end of the runner or of the job, and if an interrupt arrives with the
    signal.
    """
    harness = Harness(listed((0, "stop_group", 1)), tmp_path)
    harness.launch()
    if end == "interrupt":
        send = FakeReach.send

        def interrupted(reach: FakeReach, signum: signal.Signals) -> None:
            send(reach, signum)
            if signum == signal.SIGSTOP:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeReach, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                harness.commit()
    else:
        harness.commit()
    assert [name for name, _ in harness.processes.sent] == ["SIGSTOP"]
    if end == "the job":
        harness.event("launch_stopping")
        harness.runner.poll()
        assert harness.runner.done
    else:
        harness.runner.close()
    assert [name for name, _ in harness.processes.sent] == ["SIGSTOP", "SIGCONT"]
    assert len(harness.told("fault_undone")) == 1
    assert harness.processes.num_held == 0


def test_a_killed_group_is_down_until_a_new_start_of_it_contributes(tmp_path: Path) -> None:
    """Late events of dead workers do not count. The next fault waits for the group, as max_down
    requires.
    """
    harness = under_way(listed((0, "kill_group", 1), (1, "kill_rank", 2)), tmp_path)
    assert harness.up() == [0, 2, 3]
    harness.says(1, "step_committed", step=harness.step + 1, participants=[0, 1, 2, 3])
    harness.at(5)
    harness.restart(1)
    harness.commit(1)
    assert harness.up() == [0, 2, 3]
    assert len(harness.processes.sent) == 1
    harness.commit()
    assert [name for name, _ in harness.processes.sent] == ["SIGKILL", "SIGKILL"]
    assert harness.told("fault_injected")[1]["target"]["replica"] == 2
    harness.restart(2)
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]


def test_a_shot_that_waits_too_long_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """A shot that a limit blocks for `patience_seconds` is skipped; the later shots are not."""
    harness = under_way(
        listed((0, "kill_group", 1), (1, "kill_group", 2), (20, "kill_lighthouse", None)), tmp_path
    )
    begin = harness.now - START
    harness.at(begin + 20.5)
    assert harness.processes.sent[1:] == [("SIGKILL", [LIGHTHOUSE])]
    assert harness.told("fault_injected")[1]["target"] == {"lighthouse": True}
    harness.at(begin + 30.9)
    assert not harness.told("fault_skipped")
    harness.at(begin + 31.1)
    (told,) = harness.told("fault_skipped")
    assert (told["fault"], told["shot"], told["target"]) == ("kill_group", 1, None)
    assert "max_down" in told["reason"]
    assert harness.runner.done
    assert (harness.runner.outcomes.num_injected, harness.runner.outcomes.num_skipped) == (2, 1)


def test_what_can_never_be_is_skipped_at_once(tmp_path: Path) -> None:
    """A job without agents gets no orders."""
    harness = Harness(single("nan_gradient"), tmp_path)
    harness.launch(chaos=False)
    harness.commit()
    assert "chaos = true" in harness.told("fault_skipped")[0]["reason"]
    assert harness.runner.done
    assert not (tmp_path / "chaos").exists()


def test_nobody_hit_is_no_injection(tmp_path: Path) -> None:
    """A shot without live targets is postponed. Targets that vanish meanwhile are reported as
    missed.
    """
    harness = Harness(listed((0, "kill_group", 1)), tmp_path)
    harness.processes.gone = {1010, 1011}
    harness.launch()
    harness.commit()
    assert not harness.told("fault_injected", "fault_skipped")
    harness.at(100)
    assert harness.told("fault_skipped")[0]["reason"] == "nobody is there"
    harness.runner.close()
    assert harness.told("chaos_finished")[0]["injected"] == 0
    assert harness.up() == [0, 1, 2, 3]


def test_an_agent_is_killed_alone(tmp_path: Path) -> None:
    """The signal hits the group's agent only; a group without a known agent is left alone."""
    harness = Harness(
        listed((0, "kill_agent", 1), (5, "kill_agent", 2), patience_seconds=1), tmp_path
    )
    harness.launch()
    for rank in range(harness.ranks):
        told = {"pid": 1010 + rank, "host": "here", "config": {"chaos": True}, "agent_pid": 77}
        harness.says(1, "worker_started", rank, **told)
    harness.commit()
    harness.at(1)
    assert harness.processes.sent == [("SIGKILL", [77])]
    assert harness.up() == [0, 2, 3]
    harness.event(
        "agent_ended", replica=1, attempt=1, signal="SIGKILL", restarts=True, agent_pid=77
    )
    harness.attempts[1] += 1
    harness.start(1)
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]
    for seconds in (6, 8):
        harness.at(seconds)
    (skipped,) = harness.told("fault_skipped")
    assert skipped["reason"] == "the agent of group 2 is not known"
    assert len(harness.processes.sent) == 1


def test_several_groups_at_once(tmp_path: Path) -> None:
    """Each has an event of the same shot, which counts once."""
    harness = under_way(listed((0, "kill_groups", None), max_down=2), tmp_path)
    told = harness.told("fault_injected")
    assert [event["shot"] for event in told] == [0, 0]
    hit = {event["target"]["replica"] for event in told}
    assert len(hit) == 2
    assert harness.up() == [replica for replica in range(4) if replica not in hit]
    assert harness.runner.outcomes.num_injected == 1


def test_an_order_goes_to_this_start_of_the_group(tmp_path: Path) -> None:
    """The agent reports the injection, not the runner. Without a restart the group counts as up
    after a while.
    """
    harness = under_way(single("segfault", 3, 1, seed=4), tmp_path)
    (order,) = harness.orders()
    assert [order[name] for name in ("replica", "rank", "attempt", "shot")] == [3, 1, 1, 0]
    assert not harness.told("fault_injected")
    harness.commit()
    assert harness.up() == [0, 1, 2]
    assert not harness.runner.done
    harness.agent(order)
    assert harness.runner.done
    assert harness.lines[-1] == "chaos: segfault at group 3 rank 1"
    harness.commit()
    assert harness.up() == [0, 1, 2]
    harness.now += SETTLE_SECONDS
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("happening", "reason"),
    [
        ("restart", "the group was started anew before its agent acted"),
        ("agent", "there was no occasion"),
        ("silence", f"no agent has acted within {WAIT_SECONDS:g} s"),
        ("end", "the job's training ended first"),
    ],
)
def test_an_order_that_comes_to_nothing_is_skipped(
    tmp_path: Path, happening: str, reason: str
) -> None:
    """The runner does not wait forever for an order, whatever happens, and reports nothing
    twice.
    """
    harness = under_way(single("exception", 1), tmp_path)
    (order,) = harness.orders()
    if happening == "restart":
        harness.restart(1)
    elif happening == "agent":
        harness.agent(order, "fault_skipped", reason=reason)
    elif happening == "silence":
        harness.now += WAIT_SECONDS
    else:
        harness.says(0, "training_finished")
    harness.runner.poll()
    assert harness.runner.done
    assert [event["reason"] for event in harness.told("fault_skipped")] == (
        [] if happening == "agent" else [reason]
    )
    assert harness.runner.outcomes.last_reason == reason
    assert harness.runner.outcomes.num_skipped == 1
    harness.commit()
    finished = {0} if happening == "end" else set()
    assert harness.up() == sorted({0, 1, 2, 3} - finished)


def test_a_slow_rank_is_disturbed_until_it_was_undone(tmp_path: Path) -> None:
    """Though its group contributes all the time."""
    harness = under_way(single("slow_rank", 0), tmp_path)
    (order,) = harness.orders()
    harness.agent(order)
    harness.now += 60
    harness.commit()
    assert harness.up() == [1, 2, 3]
    harness.agent(order, "fault_undone")
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]


def test_both_ends_of_a_link_are_ordered_and_disturbed(tmp_path: Path) -> None:
    """Each end gets an order naming the other. Both are one shot; each end is up after its own
    agent's undoing.
    """
    harness = under_way(single("link_dead", 2, params={"peer": 0}), tmp_path)
    orders = harness.orders()
    assert [(order["replica"], order["rank"], order["params"]) for order in orders] == [
        (2, None, {"seconds": 10.0, "peer": 0}),
        (0, None, {"seconds": 10.0, "peer": 2}),
    ]
    for order in orders:
        harness.agent(order, params=order["params"])
    assert harness.runner.done
    assert harness.runner.outcomes.num_injected == 1
    assert harness.lines[-1] == "chaos: link_dead at group 2 rank 0, to group 0"
    for order, up in zip(orders, ([1, 2, 3], [0, 1, 2, 3]), strict=True):
        harness.commit()
        harness.agent(order, "fault_undone")
        harness.commit()
        assert harness.up() == up


def test_a_link_of_which_one_order_is_not_written_affects_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full between the two orders, the shot is retried, and both groups stay
    available.
    """
    num_given = 0

    def give_first(order: Order, path: Path) -> None:
        nonlocal num_given
        num_given += 1
        if num_given > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Order, "append_to", give_first)
    harness = under_way(single("link_dead", 2, params={"peer": 0}), tmp_path)
    assert num_given == 2
    assert harness.up() == [0, 1, 2, 3]
    assert not harness.runner.done


def test_a_link_that_one_end_does_not_cut_is_cut_by_the_other(tmp_path: Path) -> None:
    """The end that skipped its order does not count as disturbed."""
    harness = under_way(single("link_dead", 2, params={"peer": 0}), tmp_path)
    orders = harness.orders()
    harness.agent(orders[0], params=orders[0]["params"])
    harness.agent(orders[1], "fault_skipped", reason="another fault")
    harness.commit()
    assert harness.up() == [0, 1, 3]
    assert (harness.runner.outcomes.num_injected, harness.runner.outcomes.num_skipped) == (1, 0)


def test_a_nan_is_over_when_it_was_left_out(tmp_path: Path) -> None:
    """Any group may report the exclusion; a group that is not named stays disturbed."""
    harness = under_way(single("nan_gradient", 2), tmp_path)
    harness.agent(harness.orders()[0])
    harness.says(0, "gradient_excluded", slots=[1])
    harness.commit()
    assert harness.up() == [0, 1, 3]
    harness.says(0, "gradient_excluded", slots=[2])
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]


def test_a_flip_is_over_after_a_heal_or_an_equal_digest(tmp_path: Path) -> None:
    """A digest from before the flip, or one that no other group shares, proves nothing."""
    for healed in (True, False):
        harness = under_way(single("flip_parameter", 2, 1), tmp_path / str(healed))
        harness.agent(harness.orders()[0], step=harness.step + 1)
        harness.commit(digests={})  # of the step that was under way
        harness.commit(digests={2: "flipped"})
        assert harness.up() == [0, 1, 3]
        if healed:
            harness.says(2, "heal_finished")
            harness.commit()
        else:
            harness.commit(digests={})
            harness.commit()
        assert harness.up() == [0, 1, 2, 3]


def test_a_full_disk_keeps_nobody_from_contributing(tmp_path: Path) -> None:
    """The order may wait for the next checkpoint, and other faults come meanwhile."""
    harness = under_way(listed((0, "disk_full", None), (0.5, "kill_group", 3)), tmp_path)
    harness.at(1)
    assert harness.processes.sent == [("SIGKILL", [1030, 1031])]
    assert not harness.runner.done


def test_a_donor_is_killed_in_a_heal_that_is_provoked(tmp_path: Path) -> None:
    """The order is open to any donor, then a kill provokes the heal. No other fault comes until the
    donor is known.
    """
    harness = under_way(listed((0, "kill_donor", 1), (1, "kill_rank", 3), max_down=2), tmp_path)
    (order,) = harness.orders()
    assert [order[name] for name in ("fault", "replica", "rank", "attempt")] == [
        "kill_donor",
        None,
        None,
        None,
    ]
    (told,) = harness.told("fault_injected")
    assert (told["fault"], told["target"], told["params"]) == (
        "kill_group",
        {"replica": 1},
        {"provokes": "kill_donor"},
    )
    assert harness.processes.sent == [("SIGKILL", [1010, 1011])]
    harness.at(5)
    harness.restart(1)
    harness.commit(1)
    harness.agent(order, replica=0)
    harness.commit(0, 1)
    assert harness.up() == [2, 3]
    assert len(harness.processes.sent) == 1
    harness.restart(0)
    harness.commit(0)
    assert [pids for _, pids in harness.processes.sent[1:]] in ([[1030]], [[1031]])
    assert harness.up() == [1, 2]
    # Two shots; the kill that provokes the heal is a fault of its own, as in every view of the run.
    assert (harness.runner.outcomes.num_hit, harness.runner.outcomes.num_injected) == (2, 3)
    harness.runner.close()
    assert harness.told("chaos_finished")[0]["injected"] == 3


def test_an_order_that_was_given_up_and_is_carried_out_after_all_counts(tmp_path: Path) -> None:
    """A late agent's act counts as a fault, although the shot was reported as skipped."""
    harness = under_way(single("slow_rank", 0), tmp_path)
    (order,) = harness.orders()
    harness.at(WAIT_SECONDS + 10)
    assert (harness.runner.outcomes.num_hit, harness.runner.outcomes.num_skipped) == (0, 1)
    harness.agent(order)
    harness.agent(order)
    assert (harness.runner.outcomes.num_hit, harness.runner.outcomes.num_injected) == (0, 1)


def test_nothing_is_ordered_when_no_heal_can_be_provoked(tmp_path: Path) -> None:
    """Without the group to kill there is no order that could strike later."""
    harness = Harness(listed((0, "corrupt_chunk", 1)), tmp_path)
    harness.processes.gone = {1010, 1011}
    harness.launch()
    harness.commit()
    assert not (tmp_path / "chaos").exists()
    harness.at(100)
    assert harness.runner.outcomes.last_reason == "nobody is there"


def test_a_group_left_out_by_the_others_is_not_up(tmp_path: Path) -> None:
    """A group that the others left out is not up, nor is one whose workers end, leave or hang."""
    harness = under_way(listed((1e6, "kill_group", 1)), tmp_path)
    harness.commit(2)
    assert harness.up() == [0, 1, 3]
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]
    harness.says(0, "drained", 1)
    harness.says(1, "hung", 0)
    harness.exit(2, 0, attempt=0, code=1)  # of an earlier start
    harness.exit(3, 0, attempt=1, code=1)
    assert harness.up() == [2]


def test_another_runners_fault_disturbs_the_group(tmp_path: Path) -> None:
    """Two runners on one job do not both hit the same group unseen."""
    harness = under_way(listed((1e6, "kill_group", 1)), tmp_path)
    harness.event("fault_injected", fault="kill_group", target={"replica": 1}, seed=9, shot=0)
    harness.event("fault_injected", fault="sigkill_group", target={"replica": 2}, seed=None)
    harness.event(
        "fault_injected", fault="kill_lighthouse", target={"lighthouse": True}, seed=9, shot=1
    )
    assert harness.up() == [0, 3]


def test_a_second_launch_in_the_folder_is_another_job(tmp_path: Path) -> None:
    """Events of an earlier launch neither start nor end the schedule."""
    harness = Harness(listed((0, "kill_group", 1)), tmp_path)
    harness.launch()
    for replica in range(4):
        harness.says(replica, "training_finished")
    assert harness.runner.job.ended
    harness.attempts = dict.fromkeys(range(4), 2)
    harness.launch()
    assert not harness.runner.job.ended
    harness.runner.poll()
    assert not harness.processes.sent
    harness.commit()
    assert harness.processes.sent == [("SIGKILL", [2010, 2011])]


def test_workers_that_come_back_under_the_same_attempt_are_a_new_start(tmp_path: Path) -> None:
    """Where a scheduler restarts the whole job, the pid shows a new start of the same attempt."""
    harness = under_way(listed((0, "kill_group", 1)), tmp_path)
    for rank in range(2):
        harness.says(1, "worker_started", rank, pid=77 + rank)
    harness.commit()
    assert harness.up() == [0, 1, 2, 3]
    assert [worker.pid for worker in harness.runner.job.all_workers()][2:4] == [77, 78]


def replay(folder: Path, seed: int) -> list[tuple[object, ...]]:
    """Run a campaign in which every hit group returns a second later; return the injections."""
    faults = {"kill_rank": 1.0, "kill_group": 1.0, "stop_group": 1.0, "kill_lighthouse": 1.0}
    rule = Every(5.0, faults=faults, params={"stop_group": {"seconds": 2.0}})
    plan = Plan("test", seed, stop_after_seconds=100.0, rules=(rule,))
    harness = under_way(plan, folder)
    for second in range(120):
        harness.at(second)
        down = [replica for replica in range(4) if replica not in harness.up()]
        harness.commit(*down)
        for replica in down:
            harness.restart(replica)
        harness.commit()
    harness.runner.close()
    assert harness.runner.done
    told = harness.told("fault_injected", "fault_skipped")
    return [
        (event["event"], event["fault"], str(event["target"]), event["shot"], event.get("seed"))
        for event in told
    ]


def test_the_same_seed_injects_the_same(tmp_path: Path) -> None:
    """A replay agrees fault by fault and target by target; another seed does not."""
    first = replay(tmp_path / "1", seed=11)
    assert len(first) == 21
    assert {name for name, *_ in first} == {"fault_injected"}
    assert replay(tmp_path / "2", seed=11) == first
    assert replay(tmp_path / "3", seed=12) != first


def test_a_worker_that_ends_early_does_not_end_the_schedule() -> None:
    """A worker that ends with status 0, as a loader may cause, does not end the job: the others
    train on.
    """
    job = RunningJob()
    for event in (
        build(LaunchStarted, replicas=2, ranks_per_replica=1),
        build(WorkerStarted, replica=0),
        build(WorkerExited, replica=0, rank=0, code=0, worker_pid=1, stopped=False),
    ):
        job.observe(event)
    assert not job.ended
    job.observe(build(WorkerStarted, replica=1))
    job.observe(build(TrainingFinished, replica=1))
    assert job.ended
