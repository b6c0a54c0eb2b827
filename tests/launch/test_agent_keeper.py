# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""When the launcher starts another agent for a group. The agents here are fakes that end when a
test says so.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import event
from titan_ft.history.fold.run import RunFold
from titan_ft.launch import agent_keeper
from titan_ft.launch.agent_keeper import FROZEN_SECONDS, AgentKeeper
from titan_ft.launch.group.children import Child
from titan_ft.launch.restart_policy import AGENT_CRASHED_CODE, AttemptEnd, NoRestart, RestartPolicy
from titan_ft.run.events import AgentEnded, Event
from titan_ft.run.paths import RunPaths


class Agent:
    """A process that ends when a test says so."""

    pid = 4711

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


class Policy(RestartPolicy):
    """A policy that records the questions it gets."""

    def decide(self, end: AttemptEnd) -> float | NoRestart:
        self.ends = [*getattr(self, "ends", []), end]
        return super().decide(end)


class Kept:
    """A keeper with a clock of its own."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.paths, self.now = RunPaths(folder), 0.0
        self.started: list[tuple[int, str]] = []
        self.announced: list[Event] = []
        self.agents: list[Agent] = []
        self.obstacle: OSError | None = None
        self.policy = Policy(**{"max_restarts": 100, **policy}, clock=lambda: self.now)
        self.fold = RunFold(2)
        self.keeper = AgentKeeper(
            1,
            self.paths,
            self.policy,
            lambda: self.fold.groups.get(1),
            self._start,
            self.announced.append,
            lambda: self.now,
        )

    def _start(self, attempt: int, reason: str) -> Child:
        if self.obstacle is not None:
            raise self.obstacle
        self.started.append((attempt, reason))
        self.agents.append(Agent())
        return Child("agent", self.agents[-1], self.paths.agent_log(1))  # type: ignore[arg-type]

    def end(self, code: int, after: float = 1.0) -> None:
        """Let the agent end after some seconds, and the keeper notice it."""
        self.now += after
        self.agents[-1].code = code
        for _ in range(3):
            self.keeper.poll()

    def events(self) -> list[tuple[Any, ...]]:
        return [
            (each.name, each.attempt, getattr(each, "restarts", None)) for each in self.announced
        ]


def test_agent_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    """The first time at once. Later the policy's back-off applies to agents as to workers."""
    kept = Kept(tmp_path)
    kept.end(-signal.SIGKILL)
    assert kept.started == [(0, ""), (1, "its agent was killed by SIGKILL")]
    assert kept.keeper.code is None
    kept.end(-signal.SIGKILL)
    assert len(kept.started) == 2, "the second death in a row is followed by a pause"
    assert kept.keeper.code is None, "the group is not over"
    kept.now += 0.6
    kept.keeper.poll()
    assert kept.started[2:] == [(2, "its agent was killed by SIGKILL")]
    assert kept.events() == [("agent_ended", 0, True), ("agent_ended", 1, True)]


def test_agent_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    """Restarts of agents count, and three crashes of an agent in a row are a crash loop."""
    kept = Kept(tmp_path, max_restarts=1)
    kept.end(-signal.SIGKILL)
    kept.end(-signal.SIGKILL)
    assert kept.events()[1:] == [("agent_ended", 1, False), ("replica_gave_up", 1, None)]
    assert (kept.announced[-1].cause, kept.keeper.code) == ("restarts", -signal.SIGKILL)  # type: ignore[attr-defined]
    kept.keeper.poll()
    assert len(kept.announced) == 3

    crashing = Kept(tmp_path)
    for _ in range(3):
        crashing.end(AGENT_CRASHED_CODE)
        crashing.now += 20.0
        crashing.keeper.poll()
    assert crashing.announced[-1].cause == "crash loop"  # type: ignore[attr-defined]
    assert len(crashing.started) == 3


def test_commits_of_its_group_are_progress(tmp_path: Path) -> None:
    """A group that contributes in between is restarted without a pause, as after deaths of
    workers.
    """
    kept = Kept(tmp_path)
    for attempt in range(4):
        step = event("step_committed", replica=1, attempt=attempt, step=attempt + 1, own_tokens=1)
        kept.fold.observe(event("worker_started", replica=1, attempt=attempt, pid=1 << 30))
        kept.fold.observe(step)
        kept.end(-signal.SIGKILL)
    assert [attempt for attempt, _ in kept.started] == [0, 1, 2, 3, 4]


def test_end_that_an_event_explains_is_no_death(tmp_path: Path) -> None:
    """A group that finished, failed or was given up is over. If no event came, the keeper reports
    that once.
    """
    for code in (0, 1, 2, 3):
        kept = Kept(tmp_path)
        kept.end(code)
        assert (kept.keeper.code, kept.announced, len(kept.started)) == (code, [], 1)
    kept.keeper.report_end()
    kept.keeper.report_end()
    assert kept.events() == [("agent_ended", 0, False)]


def test_only_an_exception_of_this_agent_is_its_reason(tmp_path: Path) -> None:
    """Neither the last line of the log nor an exception of an earlier agent is the reason of the
    end.
    """
    kept = Kept(tmp_path)
    log = kept.paths.agent_log(1)
    log.parent.mkdir(parents=True)
    log.write_text(
        "OSError: [Errno 28] No space left on device\n[c10d] The hostname cannot be retrieved\n"
    )
    kept.end(AGENT_CRASHED_CODE)
    assert (
        kept.started[-1][1]
        == "its agent ended with exit status 5: OSError: [Errno 28] No space left on device"
    )
    kept.end(AGENT_CRASHED_CODE)
    assert kept.announced[-1].reason == "its agent ended with exit status 5"  # type: ignore[attr-defined]


def test_agent_that_cannot_be_started(tmp_path: Path) -> None:
    """If the host has no room for a process, that is another death, for which the policy has
    pauses.
    """
    kept = Kept(tmp_path)
    kept.obstacle = OSError(11, "Resource temporarily unavailable")
    kept.end(-signal.SIGKILL)
    kept.keeper.poll()
    kept.keeper.poll()
    assert len(kept.announced) == 2
    reason = "its agent cannot be started (Resource temporarily unavailable)"
    assert kept.announced[-1].reason == reason  # type: ignore[attr-defined]
    kept.obstacle = None
    kept.now += 1.0
    kept.keeper.poll()
    assert [attempt for attempt, _ in kept.started] == [0, 2]


def test_failed_start_is_no_death_of_the_agent_before(tmp_path: Path) -> None:
    """The event has neither pid nor status of the previous agent, and the failed start is no part
    of a crash loop.
    """
    kept = Kept(tmp_path)
    kept.obstacle = OSError(11, "Resource temporarily unavailable")
    kept.end(AGENT_CRASHED_CODE)
    for _ in range(10):
        kept.keeper.poll()
        kept.now += 10.0
    first, *failed = kept.announced
    assert isinstance(first, AgentEnded)
    assert (first.agent_pid, first.code) == (Agent.pid, AGENT_CRASHED_CODE)
    assert len(failed) > 3
    for ended in failed:
        assert isinstance(ended, AgentEnded)
        facts = (ended.agent_pid, ended.code, ended.signal, ended.cause, ended.restarts)
        assert facts == (None, None, None, "agent: not started", True)


def test_spare_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """The error must not end the launcher, and the exit status of the previous agent must not end
    the run.
    """
    kept = Kept(tmp_path)
    kept.end(1)
    kept.keeper.report_end()
    kept.obstacle = OSError(11, "Resource temporarily unavailable")
    assert kept.keeper.take_over("a spare") == 1
    assert kept.keeper.code is None
    kept.keeper.poll()
    assert kept.keeper.code is None
    assert kept.events() == [("agent_ended", 0, False), ("agent_ended", 1, True)]
    kept.obstacle = None
    kept.keeper.poll()
    reason = "its agent cannot be started (Resource temporarily unavailable)"
    assert kept.started[1:] == [(2, reason)]


def test_report_of_the_end_cancels_the_restart(tmp_path: Path) -> None:
    """An agent that starts after that report would stay in a run that is being stopped."""
    kept = Kept(tmp_path)
    kept.end(-signal.SIGKILL)
    kept.end(-signal.SIGKILL)
    assert kept.keeper.code is None, "the pause before the third agent"
    kept.keeper.report_end()
    kept.now += 100.0
    kept.keeper.poll()
    assert len(kept.started) == 2
    assert kept.keeper.code == -signal.SIGKILL
    assert kept.events() == [("agent_ended", 0, True), ("agent_ended", 1, True)], (
        "one event for each death"
    )


def test_agent_that_takes_over_has_a_life_of_its_own(tmp_path: Path) -> None:
    """The death of the previous agent, reported before its judgement, is not a death of the next
    agent.
    """
    kept = Kept(tmp_path)
    kept.agents[-1].code = -signal.SIGKILL
    kept.keeper.poll()
    kept.keeper.report_end()
    kept.now += 50.0
    kept.keeper.take_over("a spare")
    kept.end(-signal.SIGKILL, after=7.0)
    assert [end.alive_seconds for end in kept.policy.ends] == [7.0]


def test_agent_that_is_stopped_while_its_workers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped agent does not notice the end of its workers, so its group would be lost for good.
    An agent with living workers is left alone.
    """
    living = True
    monkeypatch.setattr(agent_keeper, "_is_stopped", lambda pid: True)
    monkeypatch.setattr(agent_keeper, "is_running_worker", lambda pid, since: living)
    kept = Kept(tmp_path)
    kept.fold.observe(event("worker_started", replica=1, attempt=0, pid=1 << 30))
    for _ in range(3):
        kept.now += FROZEN_SECONDS
        kept.keeper.poll()
    assert kept.agents[0].code is None
    living = False
    kept.keeper.poll()
    kept.now += FROZEN_SECONDS - 1.0
    kept.keeper.poll()
    assert kept.agents[0].code is None
    kept.now += 1.0
    for _ in range(4):
        kept.keeper.poll()
    assert kept.started[1:] == [(1, "its workers ended while its agent was stopped (SIGSTOP)")]
    assert kept.events() == [("agent_ended", 0, True)]


def test_lost_group_is_killed_and_not_started_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.give_up_lost("it was silent")
    for _ in range(3):
        kept.keeper.poll()
    assert (kept.keeper.code, len(kept.started)) == (-signal.SIGKILL, 1)
    assert kept.events() == [("replica_gave_up", 0, None)]
