# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py: its parsing and its figures on short histories, and one short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where scripts find each other

import bench  # noqa: E402
import bench_processes  # noqa: E402
import bench_recovery  # noqa: E402
import bench_run  # noqa: E402
from bench_commits import Commit, GroupHistory, from_events, from_torchft_logs  # noqa: E402
from bench_kills import Kill, measure  # noqa: E402
from bench_pauses import (  # noqa: E402
    Pause,
    commit_times,
    measure_drain,
    measure_outage,
    measure_rejoin,
    pause_around,
    usual_seconds,
)
from bench_processes import children, pin_groups, split_cores, wait_for_standby  # noqa: E402
from bench_run import BenchError, Run  # noqa: E402
from bench_steps import Spread, compare, logged_steps, parse_stamp, step_seconds  # noqa: E402
from bench_systems import OURS, PEER, STOCK, Command, commands, derive_config, rank_logs  # noqa: E402
from bench_table import format_report, markdown  # noqa: E402

from tests.event_builder import build, named  # noqa: E402
from titan_ft.config import load_toml  # noqa: E402
from titan_ft.run.events import Event, LaunchStarted, LighthouseRestarted, RolledBack, StepCommitted  # noqa: E402

CONFIG = ROOT / "configs" / "llama3_debug.toml"


def line(seconds: float, name: str, message: str) -> str:
    """One line of a torchtitan log."""
    whole, part = divmod(round(seconds * 1000), 1000)
    return f"[titan] 2026-01-02 03:04:{whole:02d},{part:03d} - {name} - INFO - {message}"


def step_line(seconds: float, step: int) -> str:
    return line(seconds, "root", f"\x1b[31mstep: {step:2}  \x1b[32mloss:  8.05838  \x1b[38;2;180;60;0mgrad_norm:  0.5")


def vote_line(seconds: float, what: str, rank: int = 0) -> str:
    return line(seconds, "torchft.manager", f"[torchtitan_ft_1:3fa2-77/{rank} - step 4] {what} enough_replicas=True")


def test_step_times_come_from_the_lines_with_a_loss_and_leave_out_the_warmup() -> None:
    log = "\n".join(
        [
            "Traceback (most recent call last):",
            step_line(1.0, 1),
            step_line(10.0, 10),
            line(10.0, "root", "step: 10  ft/participants: 2"),
            step_line(15.0, 20),
            step_line(21.5, 30),
        ]
    )
    steps = logged_steps(log)
    assert [step for step, _ in steps] == [1, 10, 20, 30]
    assert step_seconds(steps, warmup=10) == pytest.approx([0.5, 0.65])
    assert step_seconds(steps, warmup=30) == []


def test_ratios_compare_runs_of_the_same_round() -> None:
    """A machine that gets twice as slow between the rounds changes no ratio."""
    figures = compare({STOCK: [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], OURS: [[1.1, 1.1, 2.0], [2.2, 2.2, 4.0]]}, STOCK)
    assert figures[OURS].ratio == Spread(*[pytest.approx(1.1)] * 3)
    assert figures[OURS].mean_ratio == Spread(*[pytest.approx(1.4)] * 3)
    assert figures[OURS].seconds == Spread(pytest.approx(1.65), 1.1, 2.2)
    assert figures[STOCK].ratio == Spread(1.0, 1.0, 1.0)


def test_torchft_logs_tell_votes_heals_and_steps_thrown_away() -> None:
    first = [vote_line(1.0, "should_commit=True"), vote_line(2.0, "should_commit=False"), step_line(2.1, 2)]
    # Rank 1 votes too; what rank 0 says counts.
    first += [vote_line(3.0, "should_commit=True", rank=1)]
    second = [vote_line(7.0, "healing required, fetching"), vote_line(8.0, "should_commit=True")]
    second += [vote_line(9.0, "should_commit=True")]
    history = from_torchft_logs([(0, "\n".join(first)), (2, "\n".join(second))])
    start = parse_stamp("2026-01-02 03:04:00,000")
    assert history.commits == [
        Commit(start + 1.0, 0, True),
        Commit(start + 8.0, 2, False),
        Commit(start + 9.0, 2, True),
    ]
    assert history.thrown_away == [start + 2.0]


def commit_event(time: float, rank: int = 0, forward_passes: int = 1, **fields: Any) -> Event:
    data = {"slot": 0, "first_batch": 0, "num_batches": 1}
    shape = {"rank": rank, "attempt": 0, "forward_passes": forward_passes, "data": data}
    return build(StepCommitted, time=time, **{"replica": 0, "participants": [0, 1], **shape, **fields})


def test_events_tell_commits_and_steps_thrown_away() -> None:
    events = [
        build(LaunchStarted),
        commit_event(1.0),
        commit_event(1.0, rank=1),
        commit_event(2.0, participants=[1]),
        commit_event(3.0, forward_passes=2),
        build(RolledBack, time=4.0),
        commit_event(5.0, replica=1),
    ]
    history = from_events(events, replica=0)
    assert history.commits == [Commit(1.0, 0, True), Commit(2.0, 0, False), Commit(3.0, 0, True)]
    assert history.thrown_away == [3.0, 4.0]


def test_the_cost_of_a_kill() -> None:
    """Steps of 1 s, a kill at 3.2 that stalls the next step but one, a return at 12 that costs half a second."""
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0, 11.5, 12.5, 13.5]
    survivor = GroupHistory([Commit(time, 0, True) for time in times], thrown_away=[0.5, 5.0])
    back = [Commit(10.5, 2, False), Commit(12.0, 2, True)]
    # A line of the dead attempt that was written as it died is no return.
    victim = GroupHistory([Commit(3.0, 0, True), Commit(3.3, 0, True), *back])
    (cost,) = measure([Kill(3.2, attempt=0)], survivor, victim)
    assert cost.stall_seconds == pytest.approx(3.0)
    assert cost.steps_lost == 1
    assert cost.rejoin_seconds == pytest.approx(8.8)
    assert cost.rejoin_stall_seconds == pytest.approx(0.5)
    assert cost.num_starts == 2


def test_lost_steps_belong_to_the_kill_before_them() -> None:
    survivor = GroupHistory([Commit(float(time), 0, True) for time in range(20)], thrown_away=[2.5, 12.5, 12.7])
    victim = GroupHistory([Commit(8.0, 1, True)])
    first, second = measure([Kill(2.1, 0), Kill(12.1, 1)], survivor, victim)
    assert (first.steps_lost, second.steps_lost) == (1, 2)
    assert first.rejoin_seconds == pytest.approx(5.9)
    assert second.rejoin_seconds is None
    assert second.num_starts is None


def test_a_survivor_that_never_commits_again_is_no_figure() -> None:
    survivor = GroupHistory([Commit(0.0, 0, True), Commit(1.0, 0, True)])
    with pytest.raises(BenchError, match="committed nothing"):
        measure([Kill(5.0, 0)], survivor, GroupHistory())


@pytest.mark.parametrize("system", [STOCK, OURS, PEER])
def test_all_systems_train_the_same(system: str, tmp_path: Path) -> None:
    """Only the form of the parallelism differs, and what torchtitan's own schema does not know is left out."""
    base = load_toml(CONFIG)
    config = tomli.loads(tomli_w.dumps(derive_config(base, system, tmp_path, 40, 10)))
    for table in ("optimizer", "lr_scheduler", "activation_checkpoint", "compile", "debug"):
        assert config[table] == base[table]
    assert config["training"] == {**base["training"], "steps": 40}
    assert Path(config["model"]["hf_assets_path"]).is_dir()
    degrees = config["parallelism"]["data_parallel_replicate_degree"], config.get("fault_tolerance", {}).get("enable")
    assert degrees == ((2, None) if system == STOCK else (1, True))
    if system == PEER:
        assert "digest_every" not in config["fault_tolerance"]
    assert base == load_toml(CONFIG)


def test_logs_are_found_in_order_of_attempts(tmp_path: Path) -> None:
    for attempt in (10, 2):
        for name in (f"attempt-{attempt}/rank-0.log", f"none_x/attempt_{attempt}/0/stdout.log"):
            path = tmp_path / "logs" / "replica-1" / name
            path.parent.mkdir(parents=True)
            path.touch()
    for system in (OURS, PEER):
        assert [attempt for attempt, _ in rank_logs(system, tmp_path, 1)] == [2, 10]
        assert rank_logs(system, tmp_path, 0) == []


def test_the_peer_has_torchfts_own_lighthouse(tmp_path: Path) -> None:
    lighthouse, *groups = commands(PEER, tmp_path, max_restarts=0)
    assert lighthouse.service
    assert Path(lighthouse.args[0]).name == "torchft_lighthouse"
    address = lighthouse.args[lighthouse.args.index("--bind") + 1]
    assert [group.env["TORCHFT_LIGHTHOUSE"] for group in groups] == [f"http://{address}"] * 2


def test_a_launch_has_the_ranks_and_the_flags_that_are_asked_for(tmp_path: Path) -> None:
    (command,) = commands(OURS, tmp_path, 3, num_ranks=1, flags=["--no-standby"])
    assert "--ranks-per-replica=1" in command.args
    assert command.args[-1] == "--no-standby"


class FakeSystem:
    """Stands in for `bench_run.commands`: Python one-liners."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def runs(self, *codes: str, services: tuple[str, ...] = ()) -> None:
        started = [Command(f"worker-{index}", [sys.executable, "-c", code]) for index, code in enumerate(codes)]
        started += [Command("service", [sys.executable, "-c", code], service=True) for code in services]
        self._monkeypatch.setattr(bench_run, "commands", lambda *shape: started)


@pytest.fixture
def fake_system(monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    return FakeSystem(monkeypatch)


WAIT = "import signal; signal.pause()"


def test_a_run_ends_with_its_training_and_takes_the_services_along(fake_system: FakeSystem, tmp_path: Path) -> None:
    fake_system.runs("pass", "pass", services=(WAIT,))
    with Run(OURS, tmp_path / "run", {"job": {}}) as run:
        run.wait(30.0)
        processes = [process for _, process in run._started]
        assert processes[-1].poll() is None
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(("codes", "services"), [((WAIT, "raise ValueError('no')"), ()), ((WAIT,), ("pass",))])
def test_a_process_that_ends_early_ends_the_run(
    codes: tuple[str, ...], services: tuple[str, ...], fake_system: FakeSystem, tmp_path: Path
) -> None:
    fake_system.runs(*codes, services=services)
    with pytest.raises(BenchError, match="ended with status"), Run(OURS, tmp_path / "run", {}) as run:
        run.wait(30.0)
    assert all(process.poll() is not None for _, process in run._started)


def test_a_run_that_takes_too_long_is_stopped(fake_system: FakeSystem, tmp_path: Path) -> None:
    fake_system.runs(WAIT)
    with pytest.raises(BenchError, match="did not finish within"), Run(OURS, tmp_path / "run", {}) as run:
        run.wait(0.0)
    assert all(process.poll() is not None for _, process in run._started)


def test_the_report_is_a_table_per_part() -> None:
    spread = {"median": 1.0, "low": 0.9, "high": 1.25}
    steady = {OURS: {"seconds": spread, "ratio": spread, "mean_ratio": spread, "rounds": [[1.0]]}}
    names = ("stall_seconds", "rejoin_seconds", "rejoin_stall_seconds")
    kills = {PEER: [{**dict.fromkeys(names, 4.0), "steps_lost": 1}, {**dict.fromkeys(names), "stall_seconds": 5.0}]}
    kills[PEER][1]["steps_lost"] = 0
    machine = bench.describe_machine()
    report = {"command": "python scripts/bench.py", "machine": machine, "steady": steady, "kills": kills}
    text = format_report(report, bench.PARTS)
    assert str(machine["torch"]) in text
    assert "1.000 (0.900 to 1.250)" in text
    assert "4.500 (4.000 to 5.000) | 1 " in text
    assert "4.000 (4.000 to 4.000), 1 never" in text
    assert "kill to contributing" not in format_report(report, ["failure"])
    assert "survivors' stall" not in format_report(report, ["rejoin"])


def survivor_commits(*times: float) -> list[Event]:
    return [commit_event(time) for time in times]


def victim_event(time: float, event: str, attempt: int = 1, **fields: Any) -> Event:
    return build(named(event), time=time, **{"replica": 1, "rank": 0, "attempt": attempt, **fields})


def victim_commit(time: float, attempt: int = 1, **fields: Any) -> Event:
    return commit_event(time, replica=1, attempt=attempt, **fields)


def in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)


def test_the_usual_step_is_of_the_last_steps_before() -> None:
    """Neither slow first steps count nor what comes after the moment."""
    times = [0.0, 9.0, 18.0, *(20.0 + step for step in range(21)), 45.0, 50.0]
    assert usual_seconds(times, 40.5) == 1.0
    with pytest.raises(BenchError, match="no step"):
        usual_seconds(times, 5.0)


def test_a_pause_counts_in_the_step_after_too_and_not_later() -> None:
    """The step under way passes, the next one stalls for two seconds; a slow one ten steps on is another matter."""
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 7.0, *(8.0 + step for step in range(10)), 30.0]
    assert pause_around(times, begin=3.5, end=3.9) == Pause(seconds=2.0, steps=2.0, usual_seconds=1.0)
    assert pause_around(times, begin=8.5, end=8.6).seconds == 0.0
    with pytest.raises(BenchError, match="committed nothing"):
        pause_around(times, begin=31.0, end=32.0)


def test_a_rejoin_with_replay() -> None:
    """Steps of 1 s; a kill; the survivor alone is faster; steps of 1.1 s during the transfer; 3 s at the return."""
    before = [float(step) for step in range(11)]
    alone = [12.0, 12.5, 13.0]
    during = [13.0 + 1.1 * step for step in range(1, 11)]
    events = survivor_commits(*before, *alone, *during, 27.0, 28.0)
    events += [
        victim_commit(9.9, attempt=0),
        victim_event(12.8, "heal_started", attempt=0),
        victim_event(12.9, "heal_started", from_step=9),
        victim_event(13.0, "heal_started", from_step=10),
        victim_event(24.1, "heal_finished", replayed=10),
        victim_commit(24.5, participants=[0]),
        victim_commit(27.0),
    ]
    rejoin = measure_rejoin(in_order(events), Kill(10.2, attempt=0))
    assert rejoin.transfer_seconds == pytest.approx(11.1)
    assert rejoin.transfer_steps == pytest.approx(11.1)
    assert rejoin.steps_made == 11
    assert rejoin.step_ratio == pytest.approx(1.1)
    assert rejoin.stall.seconds == rejoin.return_stall.seconds == pytest.approx(2.0)
    assert rejoin.replayed == 10


@pytest.mark.parametrize("done", [21.9, 22.2])
def test_a_rejoin_with_wait(done: float) -> None:
    """The survivor stands still for the whole transfer, and the few steps of it make no median.

    Its commit at the end comes a moment before or after the joiner's word.
    """
    events = survivor_commits(*(float(step) for step in range(11)), 12.0, 22.0, 23.0, 24.0)
    events += [
        victim_event(12.1, "heal_started"),
        victim_event(done, "heal_finished", replayed=1),
        victim_commit(23.0),
    ]
    rejoin = measure_rejoin(in_order(events), Kill(10.2, attempt=0))
    assert (rejoin.stall.seconds, rejoin.stall.steps) == (9.0, 9.0)
    assert rejoin.step_ratio is None
    assert rejoin.steps_made == (done > 22.0)
    assert rejoin.return_stall.seconds == 0.0


def test_a_group_that_does_not_return_is_no_figure() -> None:
    events = [*survivor_commits(0.0, 1.0, 2.0), victim_event(1.5, "heal_started"), victim_commit(0.5, attempt=0)]
    with pytest.raises(BenchError, match="did not contribute again"):
        measure_rejoin(in_order(events), Kill(0.8, attempt=0))


def test_a_drain_stalls_in_the_step_after_the_one_that_is_finished() -> None:
    events = [*survivor_commits(0.0, 1.0, 2.0, 3.0, 4.0, 6.5, 7.0), victim_event(3.95, "drained", attempt=0)]
    events.append(victim_event(3.96, "drained", attempt=0, rank=1))
    drain = measure_drain(in_order(events), signalled=3.2)
    assert drain.stall == Pause(seconds=1.5, steps=1.5, usual_seconds=1.0)
    assert drain.leave_seconds == pytest.approx(0.75)
    assert drain.in_order
    with pytest.raises(BenchError, match="asked to leave"):
        measure_drain(survivor_commits(0.0, 1.0, 2.0), signalled=1.5)


def test_an_outage_is_the_pause_of_the_group_hit_hardest() -> None:
    events = survivor_commits(0.0, 1.0, 2.0, 3.0, 5.0, 6.0)
    events += [victim_commit(time) for time in (0.0, 1.0, 2.0, 3.0, 5.5, 6.0)]
    events += [
        build(LighthouseRestarted, time=1.5, seconds=9.0),
        build(LighthouseRestarted, time=4.0, seconds=0.7),
        victim_event(0.5, "replica_restarted"),
    ]
    outage = measure_outage(in_order(events), killed=3.2)
    assert outage.stall.seconds == pytest.approx(1.5)
    assert (outage.away_seconds, outage.num_restarts) == (0.7, 0)
    with pytest.raises(BenchError, match="did not come back"):
        measure_outage(in_order(events), killed=4.5)


def test_the_throttle_makes_the_transfer_last_its_steps() -> None:
    """2.5 MB in 20 steps of half a second are 2 Mbit/s; steps after the failure do not count."""
    events = [*survivor_commits(0.0, 0.5, 1.0, 1.5, 5.0, 9.0), victim_event(1.6, "replica_restarted")]
    events.append(victim_event(8.0, "heal_finished", bytes=2_500_000))
    assert bench_recovery.throttle(in_order(events)) == pytest.approx(2.0)
    with pytest.raises(BenchError, match="no group fetched"):
        bench_recovery.throttle(survivor_commits(0.0, 1.0))


def test_commits_of_all_attempts_count() -> None:
    events = [commit_event(1.0), commit_event(2.0, rank=1), commit_event(3.0, attempt=2), victim_commit(4.0)]
    assert commit_times(events, 0) == [1.0, 3.0]


def test_recovery_has_a_table_per_kind() -> None:
    pause = {"seconds": 0.5, "steps": 2.0, "usual_seconds": 0.25}
    rejoin = {"transfer_steps": 20.0, "steps_made": 19, "step_ratio": 1.02, "stall": pause, "return_stall": pause}
    kill = {"rejoin_seconds": 2.0, "stall_seconds": 0.1, "rejoin_stall_seconds": 0.3}
    recovery = {
        "returns": [
            {"num_ranks": 1, "standby": False, "standby_ready_seconds": [], "kills": [kill]},
            {"num_ranks": 2, "standby": True, "standby_ready_seconds": [3.0, None], "kills": [kill, kill]},
        ],
        "rejoins": {"transfer_max_mbps": 12.34, "replay": [rejoin], "wait": [{**rejoin, "step_ratio": None}]},
        "drains": [{"stall": pause, "leave_seconds": 0.2, "in_order": True}],
        "outages": [{"stall": pause, "away_seconds": 0.75, "num_restarts": 0}],
    }
    report = {"command": "python scripts/bench.py", "machine": bench.describe_machine(), "recovery": recovery}
    text = format_report(report, ["recovery"])
    rows = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("|")}
    assert "2.000 (2.000 to 2.000)" in rows["1 rank a group, no standby"]
    assert "2 ranks a group, a standby (1 of them not ready)" in rows
    assert "12.3 Mbit/s" in text
    assert "1.020 (1.020 to 1.020)" in rows["replay, 1 times"]
    assert rows["wait, 1 times"].split("|")[4].strip() == "-"
    assert "0.200 (0.200 to 0.200)" in rows["1 drains, 1 in order"]
    assert rows["1 times"].split("|")[-2].strip() == "0"
    # What is measured is shown, even when the run ends before the rest.
    del recovery["drains"], recovery["outages"], recovery["rejoins"]["wait"]
    assert "drains" not in format_report(report, ["recovery"])


def test_no_core_goes_to_two_groups() -> None:
    assert split_cores([5, 3, 4, 0, 1], 2) == [{0, 1}, {3, 4}]
    with pytest.raises(BenchError, match="a core for each"):
        split_cores([0], 2)


@pytest.fixture
def started() -> Iterator[Callable[..., int]]:
    """Start Python programs, and end them."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@needs_proc
def test_children_are_found_with_their_command_lines(started: Callable[..., int]) -> None:
    pid = started("print(flush=True); import time; time.sleep(60)", "titan_ft.launch.supervisor", "--replica=7")
    assert children(os.getpid())[pid][-2:] == ["titan_ft.launch.supervisor", "--replica=7"]
    assert bench_processes.supervisors(os.getpid()) == {7: pid}
    assert bench_processes.lighthouse(os.getpid()) is None


@needs_proc
def test_a_standby_is_ready_when_it_sleeps(started: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that imports wants the CPU; the workers that train are not taken for it."""
    monkeypatch.setattr(bench_processes, "LOOK_SECONDS", 0.01)
    busy = started("print(flush=True)\nwhile True: pass")
    asleep = started("print(flush=True); import time; time.sleep(60)")
    # Other tests of this process may have children too.
    monkeypatch.setattr(bench_processes, "children", lambda parent: {busy: [], asleep: []})
    assert wait_for_standby(os.getpid(), lambda: {busy}, 1, 60.0) is not None
    assert wait_for_standby(os.getpid(), lambda: {asleep}, 1, 0.5) is None
    assert wait_for_standby(os.getpid(), lambda: {busy}, 2, 0.5) is None


LAUNCHER = """
import subprocess, sys
code = "import sys; sys.stdin.read()"
for replica in (1, 0):
    arguments = [sys.executable, "-c", code, "titan_ft.launch.supervisor", f"--replica={replica}"]
    subprocess.Popen(arguments, stdin=subprocess.PIPE)
import signal; signal.pause()
"""


@needs_proc
@pytest.mark.skipif(os.cpu_count() == 1, reason="needs a core for each of two groups")
def test_groups_are_pinned_to_different_cores(fake_system: FakeSystem, tmp_path: Path) -> None:
    fake_system.runs(LAUNCHER)
    with Run(OURS, tmp_path / "run", {}) as run:
        shares = pin_groups(run, 2)
        assert shares[0].isdisjoint(shares[1])
        found = bench_processes.supervisors(run.pid)
        assert {replica: os.sched_getaffinity(pid) for replica, pid in found.items()} == dict(enumerate(shares))


@needs_proc
def test_a_launch_without_supervisors_cannot_be_pinned(
    fake_system: FakeSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_processes, "START_SECONDS", 0.2)
    fake_system.runs(WAIT)
    with pytest.raises(BenchError, match="0 of 1 supervisors"), Run(OURS, tmp_path / "run", {}) as run:
        pin_groups(run, 1)


def test_a_markdown_table_is_aligned() -> None:
    assert markdown([["a", "bb"], ["ccc", "d"]]) == ["| a   | bb |", "| --- | -- |", "| ccc | d  |"]


@pytest.mark.parametrize(
    "arguments", [["--steps", "15"], ["--kills", "0"], ["--recoveries", "0"], ["--rounds", "x"], ["--only", "all"]]
)
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2


def test_a_config_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def processes_with(text: str) -> list[str]:
    """List the command lines that hold a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.slow
def test_a_short_run_compares_step_times(tmp_path: Path) -> None:
    """Two real jobs, one after the other; nothing is left running."""
    work_dir, figures = tmp_path / "work", tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPTS / "bench.py"), "--only", "steady", "--skip-peer", "--rounds", "1"]
    command += ["--steps", "20", "--work-dir", str(work_dir), "--json", str(figures)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(figures.read_text())
    assert set(report["steady"]) == {STOCK, OURS}
    assert report["steady"][STOCK]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    # Wide enough for a machine that does something else meanwhile.
    assert 0.2 < report["steady"][OURS]["ratio"]["median"] < 5.0
    assert "titan_ft, 2 groups x 2 ranks" in ended.stdout
    deadline = time.monotonic() + 10.0
    while processes_with(str(work_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(work_dir)) == []
