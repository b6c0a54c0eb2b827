# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent of one group, with fake workers, real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import event as make
from titan_ft.history.fold.hosts import HostsFold
from titan_ft.launch import restart_policy
from titan_ft.launch.group import agent as agent_module
from titan_ft.launch.group.agent import ASKED_TO_LEAVE, replace_link
from titan_ft.launch.group.worker_exit import WorkerExit, find_root_cause
from titan_ft.launch.group.worker_group import choose_devices
from titan_ft.run.error_file import WorkerError
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths

sys.path.insert(0, str(Path(__file__).parent))

from supervised import Supervised


def start(run: Any, ranks: int, *further: str, max_restarts: int = 100) -> subprocess.Popen[str]:
    options = [
        f"--run-dir={run.paths.root}",
        "--replica=0",
        f"--ranks={ranks}",
        f"--max-restarts={max_restarts}",
    ]
    options += further
    flags = [f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=0"]
    extra = ["--module=fake_worker", "--lighthouse=http://127.0.0.1:1"]
    return run.start("-m", "titan_ft.launch.group.agent", *options, *extra, "--", *flags)


def test_group_is_restarted_as_a_whole(run: Any) -> None:
    """When one rank is killed, the agent ends the others, even if they ignore SIGTERM, and restarts
    all.
    """
    agent = start(run, ranks=2)
    first = [run.worker(0, rank, 0) for rank in (0, 1)]
    env = first[1]["env"]
    assert {
        name: env[name]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TITAN_FT_ATTEMPT")
    } == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TITAN_FT_ATTEMPT": "0",
    }
    assert (env["TORCHFT_LIGHTHOUSE"], env["OMP_NUM_THREADS"]) == (
        "http://127.0.0.1:1",
        os.environ.get("OMP_NUM_THREADS", "1"),
    )

    killed = time.monotonic()
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = [run.worker(0, rank, 1) for rank in (0, 1)]
    assert time.monotonic() - killed < 2.0  # far below the 30 s that torchrun's agent would wait
    # What the workers started is gone with them, also that of the one that was killed.
    assert not any(run.is_alive(worker[kind]) for worker in first for kind in ("pid", "helper"))

    run.order(0, 0, 1, "ignore")
    run.wait_obeyed(0, 0, 1)
    killed = time.monotonic()
    os.kill(second[1]["pid"], signal.SIGKILL)
    for rank in (0, 1):
        run.worker(0, rank, 2)
    assert time.monotonic() - killed < 6.0
    assert not run.is_alive(second[0]["pid"])

    run.order(0, "any", "any", "exit 0")
    assert agent.wait(20) == 0
    story = [
        (
            event["event"],
            event.get("rank"),
            event["attempt"],
            event.get("signal", event.get("code")),
        )
        for event in run.events("worker_exited", "replica_restarted")
    ]
    assert story == [
        ("worker_exited", 1, 0, "SIGKILL"),
        ("worker_exited", 0, 0, "SIGTERM"),
        ("replica_restarted", None, 1, None),
        ("worker_exited", 1, 1, "SIGKILL"),
        ("worker_exited", 0, 1, "SIGKILL"),
        ("replica_restarted", None, 2, None),
        *[(name, rank, 2, 0) for name, rank in (("worker_exited", 0), ("worker_exited", 1))],
    ]
    exits = run.events("worker_exited")
    assert [event["stopped"] for event in exits] == [False, True, False, True, False, False]
    assert exits[0]["worker_pid"] == first[1]["pid"]
    assert run.events("replica_restarted")[0]["reason"] == "rank 1 was killed by SIGKILL"
    assert run.paths.logs(0, 1, 0).read_text().splitlines() == ["out 0-0-1", "err 0-0-1"]


@pytest.mark.parametrize(
    ("bind", "reached"), [("127.0.0.1", False), ("0.0.0.0", True), ("::", True)]
)
def test_a_store_that_other_hosts_reach(run: Any, bind: str, reached: bool) -> None:
    """The store listens on loopback alone, or at --bind's address. The group's workers get an
    address that they can reach.
    """
    agent = start(run, 1, f"--bind={bind}")
    env = run.worker(0, 0, 0)["env"]
    assert env["MASTER_ADDR"] == "127.0.0.1"
    with contextlib.ExitStack() as stack:
        if not reached:
            stack.enter_context(pytest.raises(ConnectionRefusedError))
        socket.create_connection(("127.0.0.2", int(env["MASTER_PORT"])), timeout=10).close()
    agent.kill()
    run.wait_until(
        lambda: not run.is_alive(int(env["TITAN_FT_STORE_PID"])),
        5.0,
        "the store gone with its agent",
    )


def test_bad_config_is_not_restarted(run: Any) -> None:
    """A worker that ends with status 2 ends its agent with status 2, at once, with the worker's
    last line.
    """
    run.order(0, "any", "any", "exit 2")
    agent = start(run, ranks=1)
    _, errors = agent.communicate(timeout=30)
    assert agent.returncode == 2
    assert not run.events("replica_restarted")
    assert errors.strip().endswith("leaving with 2")
    assert run.events("replica_gave_up")[0]["error"] == "leaving with 2"


def test_restarts_are_limited(run: Any) -> None:
    """After the last restart, the next failure ends the group, and the agent reports the
    exception.
    """
    run.order(0, "any", "any", "raise")
    agent = start(run, ranks=1, max_restarts=2)
    _, errors = agent.communicate(timeout=30)
    assert agent.returncode == 1
    restarts = run.events("replica_restarted")
    assert [event["attempt"] for event in restarts] == [1, 2]
    assert "RuntimeError: told to fail" in errors
    assert str(run.paths.logs(0, 2, 0)) in errors
    ends = run.events("worker_exited")
    # The second restart backs off, the first does not.
    assert restarts[1]["time"] - ends[1]["time"] >= 0.45
    assert restarts[0]["time"] - ends[0]["time"] < 0.45


def test_sigterm_ends_the_workers(run: Any) -> None:
    """SIGTERM to the agent ends the workers and then the agent, without a restart. The status is 1
    if they did not drain.
    """
    agent = start(run, ranks=2)
    for rank in (0, 1):
        run.worker(0, rank, 0)
    agent.terminate()
    assert agent.wait(10) == 1
    assert run.all_gone()
    assert not run.events("replica_restarted")
    assert [(event["stopped"], event["signal"]) for event in run.events("worker_exited")] == [
        (True, "SIGTERM")
    ] * 2


def tell_all(run: Any, what: str, ranks: int = 2) -> list[dict[str, Any]]:
    workers = [run.worker(0, rank, 0) for rank in range(ranks)]
    for rank in range(ranks):
        run.order(0, rank, 0, what)
        run.wait_obeyed(0, rank, 0)
    return workers


def test_workers_drain(run: Any) -> None:
    """If workers finish their step when the agent is asked to stop, the agent ends with
    status 0.
    """
    with Supervised(run, 2) as supervised:
        tell_all(run, "drain")
        supervised.stop()
        assert supervised.wait() == 0
    assert [(event["stopped"], event["code"]) for event in run.events("worker_exited")] == [
        (True, 0)
    ] * 2
    assert not run.events("replica_restarted")


def test_workers_that_do_not_drain_in_time_are_killed(run: Any) -> None:
    """Workers that still run after the drain timeout are killed, and the group counts as failed."""
    with Supervised(run, 2, drain_seconds=1.0) as supervised:
        tell_all(run, "ignore")
        asked = time.monotonic()
        supervised.stop()
        assert supervised.wait() == 1
        assert time.monotonic() - asked >= 1.0
    assert [event["signal"] for event in run.events("worker_exited")] == ["SIGKILL"] * 2


def test_second_request_kills_at_once(run: Any) -> None:
    """A second request to stop does not wait for the drain."""
    with Supervised(run, 2, drain_seconds=600.0) as supervised:
        workers = tell_all(run, "ignore")
        supervised.stop()
        run.wait_until((run.orders / "0-0-0.told").exists, what="SIGTERM")
        run.order(0, 0, 0, "step 1")  # still trains
        run.wait_obeyed(0, 0, 0)
        assert all(run.is_alive(worker["pid"]) for worker in workers)
        supervised.stop()
        assert supervised.wait() == 1
    assert [event["signal"] for event in run.events("worker_exited")] == ["SIGKILL"] * 2


def test_no_time_to_drain_kills_at_once(run: Any) -> None:
    """Without a drain timeout workers get no SIGTERM."""
    with Supervised(run, 2, drain_seconds=0.0) as supervised:
        tell_all(run, "drain")
        supervised.stop()
        assert supervised.wait() == 1
    assert [event["signal"] for event in run.events("worker_exited")] == ["SIGKILL"] * 2


def test_rank_that_dies_in_a_drain_ends_it(run: Any) -> None:
    """The other ranks cannot finish the step without it, so they get the short grace time only."""
    with Supervised(run, 2, drain_seconds=600.0, grace_seconds=0.5) as supervised:
        workers = tell_all(run, "ignore")
        supervised.stop()
        run.wait_until((run.orders / "0-1-0.told").exists, what="SIGTERM")
        os.kill(workers[1]["pid"], signal.SIGKILL)
        assert supervised.wait() == 1
    assert all(event["stopped"] for event in run.events("worker_exited"))


def test_a_stopped_rank_does_not_sit_out_the_grace_time(run: Any) -> None:
    """A stopped process does not see SIGTERM. The agent continues the process, so that the group
    restarts at once.
    """
    with Supervised(run, 2, grace_seconds=600.0) as supervised:
        workers = [run.worker(0, rank, 0) for rank in (0, 1)]
        os.kill(workers[0]["pid"], signal.SIGSTOP)
        os.kill(workers[1]["pid"], signal.SIGKILL)
        run.worker(0, 0, 1)  # of the next attempt, within the deadline
        supervised.stop()
        supervised.stop()
    first = [event for event in run.events("worker_exited") if event["attempt"] == 0]
    assert [(event["rank"], event["signal"]) for event in first] == [(1, "SIGKILL"), (0, "SIGTERM")]


def finish_elsewhere(run: Any) -> Path:
    """Record the finish of another group; return the file of its events."""
    path = run.paths.events_file("replica-1-x")
    log = EventLog(path, replica=1, rank=0)
    log.emit(make("training_finished", step=20))
    log.close()
    return path


def test_group_that_was_sent_away_comes_back(run: Any) -> None:
    """Workers that got a leave request, without a request to their agent, are restarted."""
    with Supervised(run, 1, module="draining_worker") as supervised:
        os.kill(run.worker(0, 0, 0)["pid"], signal.SIGTERM)
        run.worker(0, 0, 1)
        (restarted,) = run.events("replica_restarted")
        assert (restarted["attempt"], restarted["reason"]) == (1, "its workers were told to leave")
        # Where others have finished there is nothing to come back to.
        finish_elsewhere(run)
        os.kill(run.worker(0, 0, 1)["pid"], signal.SIGTERM)
        assert supervised.wait() == 0
    assert len(run.events("replica_restarted")) == 1


def test_group_that_comes_back_too_late_is_ended(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has no commit when the others have finished would train the whole job again. Its
    status is 0.
    """
    monkeypatch.setattr(agent_module, "LATE_RETURN_SECONDS", 0.2)
    with Supervised(run, 1, module="draining_worker", drain_seconds=600.0) as supervised:
        os.kill(run.worker(0, 0, 0)["pid"], signal.SIGTERM)
        back = run.worker(0, 0, 1)
        finish_elsewhere(run)
        assert supervised.wait() == 0
    assert not run.is_alive(back["pid"])
    assert [(event["attempt"], event["stopped"]) for event in run.events("worker_exited")] == [
        (0, False),
        (1, True),
    ]
    assert len(run.events("replica_restarted")) == 1
    assert not run.events("replica_gave_up")


def test_finish_of_an_earlier_run_keeps_nobody_away(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of an earlier run in the folder do not end a returning group, however often the group
    returns.
    """
    monkeypatch.setattr(agent_module, "LATE_RETURN_SECONDS", 0.0)
    an_hour_ago = time.time() - 3600.0
    os.utime(finish_elsewhere(run), (an_hour_ago, an_hour_ago))
    with Supervised(run, 1, module="draining_worker"):
        for attempt in (0, 1):
            os.kill(run.worker(0, 0, attempt)["pid"], signal.SIGTERM)
        run.worker(0, 0, 2)
    assert [event["reason"] for event in run.events("replica_restarted")] == [ASKED_TO_LEAVE] * 2


def test_group_that_finished_is_not_restarted(run: Any) -> None:
    """Workers that end with status 0 without a leave request have finished: status 0."""
    with Supervised(run, 2) as supervised:
        for worker in tell_all(run, "drain"):
            os.kill(worker["pid"], signal.SIGTERM)
        assert supervised.wait() == 0
    assert [(event["stopped"], event["code"]) for event in run.events("worker_exited")] == [
        (False, 0)
    ] * 2
    assert not run.events("replica_restarted")


def test_drain_through_the_command_line(run: Any) -> None:
    """--drain-timeout and --attempt reach the group. SIGTERM begins the drain, and a further signal
    ends the drain.
    """
    agent = start(run, 1, "--drain-timeout=600", "--attempt=4")
    os.kill(run.worker(0, 0, 4)["pid"], signal.SIGKILL)
    worker = run.worker(0, 0, 5)
    run.order(0, 0, 5, "ignore")
    run.wait_obeyed(0, 0, 5)
    agent.terminate()
    run.order(0, 0, 5, "step 1")
    run.wait_obeyed(0, 0, 5)
    assert run.is_alive(worker["pid"])
    agent.send_signal(signal.SIGINT)
    assert agent.wait(20) == 1
    assert [event["attempt"] for event in run.events("replica_restarted")] == [5]


def test_the_root_cause() -> None:
    """Of workers found dead at once, the cause is a wrong config, else a signal, else the lowest
    failed rank.
    """
    finished, failed, killed, refused = (
        WorkerExit(rank, 1, code) for rank, code in enumerate((0, 1, -9, 2))
    )
    assert find_root_cause([finished, failed, killed, refused]) == refused
    assert find_root_cause([finished, failed, killed]) == killed
    assert find_root_cause([finished, failed]) == failed
    assert find_root_cause([finished]) is None


def test_the_event_of_an_exit_names_the_line() -> None:
    """The event has the line that raised the exception. The event of a kill has none."""
    error = WorkerError("RuntimeError: boom", transient=False, time=1.0, where="mybug.py:15")
    told = WorkerExit(0, 1, 1, error).to_event(0, disturbed=False, log=Path("rank-0.log"))
    assert (told.error, told.where, told.log) == ("RuntimeError: boom", "mybug.py:15", "rank-0.log")
    assert told.error_kind == "RuntimeError"
    assert WorkerExit(0, 1, -9).to_event(0, disturbed=False, log=None).where is None


def test_a_peer_of_an_aborted_rank_is_not_the_cause() -> None:
    """Gloo and NCCL abort a rank that lost a peer, and peers of an aborted rank lose it."""
    aborted, crashed = WorkerExit(0, 1, -signal.SIGABRT), WorkerExit(3, 1, -signal.SIGSEGV)
    lost = WorkerExit(1, 1, 1, WorkerError("ConnectionError: x", transient=True, time=1.0))
    mistaken = WorkerExit(2, 1, 1, WorkerError("KeyError: x", transient=False, time=2.0))
    silent = WorkerExit(4, 1, 7)
    assert find_root_cause([lost, aborted]) == aborted
    told_to_end = WorkerExit(5, 1, 128 + signal.SIGTERM)
    assert find_root_cause([lost, silent, told_to_end]) == silent
    assert find_root_cause([told_to_end, lost]) == lost
    assert find_root_cause([silent, mistaken]) == mistaken
    assert find_root_cause([aborted, mistaken]) == mistaken
    assert find_root_cause([mistaken, aborted, crashed]) == crashed
    # A network error of the first rank may well be the cause of all that follows.
    assert find_root_cause([lost, mistaken]) == lost


def test_a_rank_that_reports_another_one_as_lost_is_not_the_cause() -> None:
    """The reporting rank's host may have a slow clock, so that the other rank's exception looks
    later.
    """
    reports = WorkerExit(
        0, 1, 1, WorkerError("RankLostError: rank 1 is lost", transient=True, time=1.0)
    )
    raised = WorkerExit(1, 1, 1, WorkerError("ConnectionError: x", transient=True, time=5.0))
    told_to_end = WorkerExit(2, 1, 128 + signal.SIGTERM)
    for cause in (raised, told_to_end, WorkerExit(3, 1, -signal.SIGABRT), WorkerExit(4, 1, 7)):
        assert find_root_cause([reports, cause]) == cause
    assert find_root_cause([reports]) == reports


def test_the_earliest_exception_is_the_cause() -> None:
    """Of ranks that ended with exceptions the earliest counts, whatever the rank's number. Ranks
    without an exception come last.
    """
    told = [
        WorkerExit(rank, 1, 1, WorkerError("E: x", transient=False, time=30.0 - rank))
        for rank in (1, 2)
    ]
    silent, refused = (
        WorkerExit(0, 1, 1),
        WorkerExit(3, 1, 2, WorkerError("E: x", transient=False, time=99.0)),
    )
    assert find_root_cause([silent, *told]) == told[1]
    assert find_root_cause([silent, *told, refused]) == refused


def test_a_rank_that_reports_a_loss_is_no_death_of_its_host(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event names the lost rank, and counts as the end of a stopped rank."""
    crash = """
import time
from titan_ft.protocol.errors import RankLostError
from titan_ft.run.error_file import find_file
cause = find_file().with_name("rank-1.error.json")
while rank == 0 and not (cause.exists() and cause.read_text()): time.sleep(0.01)
if rank == 0: raise RankLostError("rank 1 of this group is lost")
raise KeyError("nope")
"""
    monkeypatch.setenv("CRASH", crash)
    with Supervised(run, 2, module="crashing_worker", max_restarts=0) as supervised:
        assert supervised.wait(60.0) == 1
    exits = {event["rank"]: event for event in run.events("worker_exited")}
    assert [exits[rank]["stopped"] for rank in (0, 1)] == [True, False]
    assert exits[0]["reason"] == "stopped because rank 1 ended with exit status 1"
    hosts = HostsFold()
    for event in exits.values():
        hosts.note_exit(make(event.pop("event"), **event))
    assert [figures.deaths for figures in hosts.figures] == [1]


@pytest.mark.usefixtures("no_backoff")
def test_a_crash_loop_ends(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event of an end has the exception and the log. At the third end in a row the group is
    given up.
    """
    # Rank 0's exception follows from rank 1's, is earlier in the order of ranks, and ends its
    # process earlier.
    crash = """
import os, time, traceback
from titan_ft.run.error_file import find_file
if rank == 1: traceback.print_exception = lambda error: time.sleep(0.3)
cause = find_file().with_name("rank-1.error.json")
while rank == 0 and not (cause.exists() and cause.read_text()): time.sleep(0.01)
if rank == 0: raise RuntimeError("lost rank 1")
raise KeyError(f"nope {os.getpid()}")
"""
    monkeypatch.setenv("CRASH", crash)
    with Supervised(run, 2, module="crashing_worker", max_restarts=100) as supervised:
        assert supervised.wait(60.0) == 1
    causes = [event for event in run.events("worker_exited") if "nope" in event.get("error", "")]
    assert [event["attempt"] for event in causes] == [0, 1, 2]
    assert [event["log"] for event in causes] == [
        str(run.paths.logs(0, attempt, 1)) for attempt in range(3)
    ]
    assert next(event["rank"] for event in run.events("worker_exited") if not event["stopped"]) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert gave_up["reason"] == (
        "rank 1 ended with exit status 1; the same exception 3 times in a row, and no step committed between"
    )
    assert gave_up["error"].startswith("KeyError: 'nope ")


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize(
    ("crash", "end", "how"),
    [
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV", "was killed by SIGSEGV"),
        ("os._exit(7)", "exit status 7", "ended with exit status 7"),
        (
            "mark_training(); os._exit(0)",
            "exit status 0 before the last step",
            "ended with exit status 0 before the last step",
        ),
        (
            "mark_training(); raise SystemExit(0)",
            "exit status 0 before the last step",
            "ended with exit status 0 before the last step",
        ),
    ],
)
def test_a_crash_loop_without_an_exception(
    run: Any, monkeypatch: pytest.MonkeyPatch, crash: str, end: str, how: str
) -> None:
    """Three ends in a row that the rank caused itself, of any kind. The network error of its peer
    is not the cause.
    """
    crashes = """
import os, select, time
mark = paths.root / f"pid-{attempt}"
if rank == 1:
    mark.write_text(str(os.getpid()))
    CRASH
while not (mark.exists() and mark.read_text()): time.sleep(0.01)
# Not until /proc shows a zombie: that is the main thread alone, and other threads may take until the agent has looked.
select.select([os.pidfd_open(int(mark.read_text()))], [], [])
raise ConnectionResetError("Connection closed by peer")
"""
    monkeypatch.setenv("CRASH", crashes.replace("CRASH", crash))
    with Supervised(run, 2, module="crashing_worker", max_restarts=100) as supervised:
        assert supervised.wait(60.0) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert gave_up["reason"] == (
        f"rank 1 {how}; the same end ({end}) 3 times in a row, and no step committed between"
    )
    assert (gave_up["cause"], gave_up["rank"]) == ("crash loop", 1)
    causes = [event for event in run.events("worker_exited") if event["rank"] == 1]
    assert [event["attempt"] for event in causes] == [0, 1, 2]
    assert [event["log"] for event in causes] == [
        str(run.paths.logs(0, attempt, 1)) for attempt in range(3)
    ]


def test_an_end_in_order_is_none_before_the_last_step(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's entry returns and removes the mark that it trains, so no restart follows."""
    monkeypatch.setenv("CRASH", "import time\nmark_training()\ntime.sleep = lambda seconds: None")
    with Supervised(run, 2, module="crashing_worker") as supervised:
        assert supervised.wait(60.0) == 0
    assert not run.events("replica_restarted")
    assert [(event["code"], event.get("error")) for event in run.events("worker_exited")] == [
        (0, None)
    ] * 2
    assert not list(run.paths.logs(0, 0, 0).parent.glob("*.trains"))


@pytest.mark.usefixtures("no_backoff")
def test_kills_are_no_crash_loop(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is killed again and again has as many restarts as any other group."""
    monkeypatch.setenv("CRASH", "import os; os.kill(os.getpid(), 9)")
    with Supervised(run, 1, module="crashing_worker", max_restarts=3) as supervised:
        assert supervised.wait(60.0) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert gave_up["reason"].endswith(
        "was killed by SIGKILL; no restart left (--max-restarts 3 within 24 hours)"
    )
    assert gave_up["cause"] == "restarts"
    assert not any("log" in event for event in run.events("worker_exited"))


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize("trains", [False, True])
def test_a_dead_network(run: Any, monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """Before the run's first step, network errors end the group after three attempts. Later they
    never do.
    """
    monkeypatch.setattr(restart_policy, "NETWORK_SECONDS", 0.1)
    if trains:
        log = EventLog(run.paths.worker_events(1, 0, 0, 4711), replica=1, rank=0, attempt=0)
        log.emit(make("step_committed", step=1))
        log.close()
    monkeypatch.setenv("CRASH", "raise ConnectionError('Couldn\\'t reach the Hub')")
    with Supervised(run, 1, module="crashing_worker", max_restarts=3) as supervised:
        assert supervised.wait(60.0) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert gave_up["cause"] == ("restarts" if trains else "network")
    assert gave_up["attempt"] == (3 if trains else 2)
    assert gave_up["error"] == "ConnectionError: Couldn't reach the Hub"


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize(
    ("crash", "transient"),
    [
        (
            "from tests.event_builder import event; inject(event('fault_injected', fault='exception', seed=1))",
            True,
        ),
        ("commit(attempt + 1)", None),
    ],
    ids=["injected", "commits between"],
)
def test_no_crash_loop(
    run: Any, monkeypatch: pytest.MonkeyPatch, crash: str, transient: bool | None
) -> None:
    """Neither injected exceptions nor exceptions with a commit in between are a crash loop. Such a
    group has as many restarts as any other group.
    """
    monkeypatch.setenv("CRASH", f"{crash}\nraise RuntimeError('again')")
    with Supervised(run, 1, module="crashing_worker", max_restarts=3) as supervised:
        assert supervised.wait(60.0) == 1
    (gave_up,) = run.events("replica_gave_up")
    assert gave_up["reason"].endswith("no restart left (--max-restarts 3 within 24 hours)")
    assert [event.get("transient") for event in run.events("worker_exited")] == [transient] * 4


def test_gpus_are_dealt_out_in_turn() -> None:
    """Groups have their own GPUs while the host has enough, and share GPUs otherwise. With too few
    for one group, nothing changes.
    """
    four = ["0", "1", "2", "3"]
    assert [choose_devices(replica, 2, four) for replica in range(3)] == [
        ["0", "1"],
        ["2", "3"],
        ["0", "1"],
    ]
    assert choose_devices(1, 1, ["7"]) == ["7"]
    assert choose_devices(0, 2, ["7"]) is None
    assert choose_devices(0, 1, []) is None


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--no-such-flag", 2)])
def test_the_command_line_says_how_it_is_used(flag: str, status: int) -> None:
    """Also without the arguments of a worker, and without a traceback."""
    command = [sys.executable, "-m", "titan_ft.launch.group.agent", flag]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == status
    assert "Traceback" not in result.stderr


def test_link_to_the_latest_logs(tmp_path: Path) -> None:
    """The link leads to the newest attempt, whatever was there. On a file system without links
    there is no link, and no error.
    """
    paths = RunPaths(tmp_path)
    for attempt in (0, 1):
        folder = paths.logs(0, attempt, 0).parent
        folder.mkdir(parents=True)
        replace_link(folder, paths.latest_logs(0))
        assert paths.latest_logs(0).resolve() == folder
    assert sorted(path.name for path in paths.latest_logs(0).parent.iterdir()) == [
        "attempt-0",
        "attempt-1",
        "latest",
    ]
    assert paths.next_attempt(0) == 2
    (tmp_path / "file").touch()
    replace_link(tmp_path / "file" / "attempt-0", tmp_path / "file" / "latest")
