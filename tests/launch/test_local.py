# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The launcher of a run, with fake workers, real processes and real signals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore

from tests.launch.forked import children, zygote_of
from titan_ft.launch.lighthouse_keeper import MAX_DEATHS
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, NO_RESTART_CODE, can_spare_help
from titan_ft.run.events import GroupLost
from titan_ft.run.log import EventLog
from titan_ft.run.output import choose_native_log
from titan_ft.system.address import split_address
from titan_ft.system.namespace import allow_namespaces


def agents_of(pid: int) -> list[int]:
    """List the agents of a launcher, by group."""
    found = {Path(f"/proc/{child}/comm").read_text().strip(): child for child in children(pid)}
    return [found[name] for name in sorted(found) if name.startswith("titan-ft ")]


def own_memory(pid: int) -> int:
    """Return the MiB of a process that it shares with no other process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) // 1024


def test_killed_group_is_restarted_alone(run: Any) -> None:
    """One group dies and comes back, and the other is not touched. Plain lines report it, with the
    log; the job's curve has its step; status 0 when all finished.
    """
    launcher = run.launch(
        replicas=2, worker_args=["--metrics.enable-tensorboard", "--training.steps=3"]
    )
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    assert first[0]["argv"][-1] == "--training.steps=3"
    tokens = {worker["env"]["TITAN_FT_TOKEN"] for worker in first}
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 32
    assert first[0]["env"]["TORCHFT_LIGHTHOUSE"].startswith("http://127.0.0.1:")
    assert first[0]["env"]["WANDB_RUN_GROUP"].startswith("run-")
    assert first[0]["env"]["RUST_LOG"] == choose_native_log(os.environ)

    run.order(0, 0, 0, "step 7")
    run.wait_obeyed(0, 0, 0)
    os.kill(first[1]["pid"], signal.SIGKILL)
    run.worker(1, 0, 1)
    assert run.is_alive(first[0]["pid"])
    printed = run.finish(launcher)
    assert [event["standby"] for event in run.events("replica_restarted")] == [True]
    lines = [line.split("] ", 1)[1] for line in printed.splitlines()]
    assert lines[0].startswith("lighthouse at http://127.0.0.1:")
    root = run.paths.root
    assert f"watch it: titan-ft top {root}; logs: {root}/logs/replica-*/latest/" in lines
    assert f"curves: tensorboard --logdir {root}/tb" in lines
    assert [os.readlink(run.paths.latest_logs(replica)) for replica in (0, 1)] == [
        "attempt-0",
        "attempt-1",
    ]
    curve = EventAccumulator(str(run.paths.job_curve)).Reload()
    assert [
        (point.step, point.value) for point in curve.Scalars("loss_metrics/global_avg_loss")
    ] == [(7, 3.25)]
    assert "group 1 died: rank 0 was killed by SIGKILL" in lines
    assert "group 1 restarting (attempt 1)" in lines
    # 2/2, or 1/2 already.
    assert any(line.startswith("step 7  loss 3.25000  groups ") for line in lines)
    assert lines[-1].startswith("all groups finished")
    assert not any("group 0 died" in line for line in lines)
    kept = [line[20:] for line in run.paths.launch_log.read_text().splitlines()]  # after the date
    assert kept == [line for line in lines if not line.startswith("step 7")]
    assert run.events("launch_finished")[0]["code"] == 0
    assert run.all_gone()


def test_terminal_is_left_with_the_end(run: Any) -> None:
    """The last lines on the terminal describe the end of the run, not a running run."""
    terminal, run.stdout = pty.openpty()
    run.order(0, "any", "any", "exit 0")
    launcher = run.launch(replicas=1)
    os.close(run.stdout)
    shown = ""
    with contextlib.suppress(OSError):  # its end is closed
        while block := os.read(terminal, 65536):
            shown += block.decode(errors="replace")
    os.close(terminal)
    assert launcher.wait(timeout=20) == 0
    assert "over after" in shown.rpartition("running for")[2]
    assert "1 group x 1 rank" in shown


def test_signal_stops_everything_it_started(run: Any) -> None:
    """Ctrl-C (SIGINT to the launcher's process group) ends lighthouse, agents and workers, and
    nothing else.
    """
    launcher = run.launch(replicas=2)
    stranger = run.start("-c", "import time; time.sleep(600)")
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    started = children(launcher.pid)
    assert len(started) == 4
    os.killpg(launcher.pid, signal.SIGINT)
    printed, _ = launcher.communicate(timeout=15)
    assert launcher.returncode == 130
    assert "checkpoints are off (checkpoint.enable)" in printed
    assert "stopping all groups" in printed
    assert "died" not in printed
    assert (
        printed.splitlines()[-1]
        == "stopped before the first step; the same command starts it again"
    )
    assert run.all_gone()
    assert not any(run.is_alive(pid) for pid in started)
    assert stranger.poll() is None


def test_a_plan_of_faults_is_carried_out(run: Any, tmp_path: Path) -> None:
    """The runner injects a fault of the plan once all groups have trained together. The group comes
    back, and the status is 0.
    """
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'seed = 1\n[[rule]]\nwhen = "script"\nshots = [{at = 0, fault = "kill_group", replica = 1}]\n'
    )
    mark = ["--job.description=titan_ft"]  # as a real worker's command line has it
    launcher = run.launch(replicas=2, worker_args=mark, chaos=str(plan))
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    for replica in (0, 1):
        run.order(replica, 0, 0, "step 1")
    run.worker(1, 0, 1)
    assert run.is_alive(first[0]["pid"])
    assert not run.is_alive(first[1]["pid"])
    printed = run.finish(launcher)
    assert "fault: kill_group on group 1" in printed
    assert [(e["fault"], e["target"]) for e in run.events("fault_injected")] == [
        ("kill_group", {"replica": 1})
    ]


def test_killed_launcher_leaves_no_orphans(run: Any) -> None:
    """After SIGKILL of the launcher all of its processes end within seconds, even workers that
    ignore SIGTERM.
    """
    launcher = run.launch(replicas=2)
    stores = [int(run.worker(replica, 0, 0)["env"]["TITAN_FT_STORE_PID"]) for replica in (0, 1)]
    run.order(0, 0, 0, "ignore")
    run.wait_obeyed(0, 0, 0)
    started = children(launcher.pid) + stores
    launcher.kill()
    run.wait_until(
        lambda: run.all_gone() and not any(run.is_alive(pid) for pid in started), 5.0, "all gone"
    )


def test_a_group_takes_little_memory_beside_its_workers(run: Any) -> None:
    """The group's agent and store are forks of the zygote, and share its memory.

    A store that answers has imported torch. Before, it could still be about to import torch itself.
    """
    run.use_torch()
    launcher = run.launch(replicas=2, module="torch_worker")
    workers = [run.worker(replica, 0, 0)["env"] for replica in (0, 1)]
    for agent, worker in zip(agents_of(launcher.pid), workers, strict=True):
        TCPStore(worker["MASTER_ADDR"], int(worker["MASTER_PORT"]), is_master=False)
        own = own_memory(agent) + own_memory(int(worker["TITAN_FT_STORE_PID"]))
        assert 0 < own < 20
    run.finish(launcher)
    assert run.all_gone()


def test_a_run_outlives_its_zygote(run: Any) -> None:
    """After the zygote is killed, a killed group still comes back, as a fork. A spare then imports
    everything itself.

    The launcher reports it once, and ends with success.
    """
    launcher = run.launch(replicas=2, spares=1, max_restarts=1)
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    zygote = zygote_of(launcher.pid)
    assert zygote is not None
    assert {worker["parent"] for worker in first} == set(agents_of(launcher.pid))
    os.kill(zygote, signal.SIGKILL)
    os.kill(first[1]["pid"], signal.SIGKILL)
    assert "zygote" in run.worker(1, 0, 1)["command"][2]
    assert run.is_alive(first[0]["pid"])
    run.order(1, 0, 1, "exit 1")
    # Of which it is a fork.
    assert run.worker(1, 0, 2)["command"][2] == "titan_ft.launch.group.agent"
    printed = run.finish(launcher)
    assert (
        printed.count(
            "the zygote ended (SIGKILL); groups started from now on import everything themselves"
        )
        == 1
    )
    assert run.all_gone()


def test_a_zygote_that_cannot_import_is_done_without(run: Any) -> None:
    """The workers are new processes then, which meet the same error and report it."""
    (run.orders.parent / "broken.py").write_text("raise ImportError('told to fail')\n")
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    launcher = run.launch(replicas=1, module="broken", max_restarts=0)
    printed, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "the zygote ended (exit status 1)" in printed
    assert "ImportError: told to fail" in printed


def test_workers_without_a_zygote_are_new_processes(run: Any) -> None:
    """With --no-zygote each worker has its own command line, and the event of a restart says that
    the worker imports.
    """
    launcher = run.launch(replicas=1, no_zygote=True)
    assert zygote_of(launcher.pid) is None
    for attempt in (0, 1):
        worker = run.worker(0, 0, attempt)
        assert worker["command"][2] == "fake_worker"
        if attempt == 0:
            os.kill(worker["pid"], signal.SIGKILL)
    run.order(0, 0, 1, "exit 0")
    assert launcher.wait(timeout=20) == 0
    assert [event["standby"] for event in run.events("replica_restarted")] == [False]
    assert run.all_gone()


@pytest.mark.skipif(bool(allow_namespaces()), reason="this system allows no network namespaces")
def test_a_private_network_is_reached_by_nobody_else(run: Any) -> None:
    """Another user of the host reaches neither the lighthouse nor a group's store. The metrics stay
    outside the network.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = run.launch(replicas=1, private_network=True, metrics_port=str(port))
    run.worker(0, 0, 0)
    (started,) = run.events("lighthouse_started")
    assert os.readlink(f"/proc/{started['lighthouse_pid']}/ns/net") != os.readlink(
        "/proc/self/ns/net"
    )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_address(started["address"]), 5.0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as figures:
        assert b"titan_ft_groups 1.0" in figures.read()
    run.order(0, 0, 0, "exit 0")
    assert launcher.wait(timeout=30) == 0


def lighthouse_of(pid: int) -> int | None:
    """Return the process of a launcher's lighthouse, if it has one."""
    for child in children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"lighthouse" in command:
            return child
    return None


@pytest.mark.slow
def test_killed_agent_fails_only_its_group(run: Any) -> None:
    """A killed agent leaves no workers. The other group trains on, and so does the zygote: a spare
    is its next fork.

    Without a restart or a spare, the launcher reports the death.
    """
    launcher = run.launch(replicas=2, spares=1, max_restarts=0)
    workers = [run.worker(replica, 0, 0) for replica in (0, 1)]
    zygote = zygote_of(launcher.pid)
    assert zygote is not None
    os.kill(agents_of(launcher.pid)[0], signal.SIGKILL)
    run.wait_until(
        lambda: not run.is_alive(workers[0]["pid"]), 10.0, "workers of the killed agent gone"
    )
    spare = run.worker(0, 0, 1)
    assert "zygote" in spare["command"][2]
    assert zygote_of(launcher.pid) == zygote
    os.kill(agents_of(launcher.pid)[0], signal.SIGKILL)
    run.wait_until(lambda: not run.is_alive(spare["pid"]), 10.0, "workers of the spare gone")
    assert run.is_alive(workers[1]["pid"])
    assert run.is_alive(zygote)
    run.order(1, "any", "any", "exit 0")
    printed, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert printed.count("group 0 died: its agent was killed by SIGKILL") == 2
    assert (
        printed.count(
            "group 0 failed: its agent was killed by SIGKILL; no restart left (--max-restarts 0"
        )
        == 2
    )
    assert "1 of 2 groups failed: 0" in errors
    ended = run.events("agent_ended")
    assert [(event["replica"], event["attempt"], event["restarts"]) for event in ended] == [
        (0, 0, False),
        (0, 1, False),
    ]
    assert run.all_gone()


@pytest.mark.parametrize("zygote", [True, False])
def test_killed_agent_is_replaced(run: Any, zygote: bool) -> None:
    """The group restarts with the next attempt once its workers have ended, also a stopped
    worker.
    """
    launcher = run.launch(replicas=2, no_zygote=not zygote)
    old, other = run.worker(0, 0, 0), run.worker(1, 0, 0)
    run.order(0, 0, 0, "step 1")
    run.wait_obeyed(0, 0, 0)
    os.kill(old["pid"], signal.SIGSTOP)
    killed = old["parent"]
    os.kill(killed, signal.SIGKILL)
    new = run.worker(0, 0, 1)
    assert not run.is_alive(old["pid"])
    assert new["parent"] != killed
    assert run.is_alive(other["pid"])
    (ended,) = run.events("agent_ended")
    assert ended == ended | {
        "replica": 0,
        "attempt": 0,
        "agent_pid": killed,
        "signal": "SIGKILL",
        "restarts": True,
    }
    (restarted,) = run.events("replica_restarted")
    assert (restarted["attempt"], restarted["reason"]) == (1, "its agent was killed by SIGKILL")
    printed = run.finish(launcher)
    (line,) = [line for line in printed.splitlines() if "died" in line]
    assert re.fullmatch(
        r"\[ *\d+\.\d s\] group 0 died: its agent was killed by SIGKILL; see .*supervisor.log", line
    )
    assert "group 0 restarting (attempt 1)" in printed
    assert run.all_gone()


@pytest.mark.slow
def test_stopped_agent_does_not_keep_its_group_away(run: Any) -> None:
    """An agent that is stopped (SIGSTOP) when its worker ends is killed, and the next one restarts
    the group.
    """
    launcher = run.launch(replicas=2)
    old = run.worker(0, 0, 0)
    os.kill(old["parent"], signal.SIGSTOP)
    os.kill(old["pid"], signal.SIGKILL)
    new = run.worker(0, 0, 1)
    assert new["parent"] != old["parent"]
    printed = run.finish(launcher)
    assert "group 0 died: its workers ended while its agent was stopped (SIGSTOP); see " in printed
    assert run.all_gone()


@pytest.mark.slow
def test_launch_does_not_wait_for_ever_for_a_lost_group(run: Any) -> None:
    """A frozen group is killed once all others have finished. The launch names the awaited group,
    and then fails.
    """
    launcher = run.launch(replicas=2)
    frozen = run.worker(1, 0, 0)
    run.order(1, 0, 0, "step 1")
    run.wait_obeyed(1, 0, 0)
    os.kill(frozen["pid"], signal.SIGSTOP)
    run.worker(0, 0, 0)
    time.sleep(1.0)
    with contextlib.closing(
        EventLog(run.paths.worker_events(0, 0, 0, 1), replica=0, rank=0, attempt=0)
    ) as log:
        log.emit(GroupLost(slot=1, seconds=1.0, step=3))
    run.order(0, "any", "any", "exit 0")
    printed, errors = launcher.communicate(timeout=40)
    assert launcher.returncode == 1
    assert "group 1 is lost: silent for 1 s, last in step 1" in printed
    assert "all others have ended; waiting for group 1 (lost) for 10 s at most" in printed
    assert (
        "group 1 failed: it was silent, and was killed when all others had ended; see " in printed
    )
    assert "1 of 2 groups failed: 1" in errors
    assert run.all_gone()


def test_agent_that_dies_while_all_groups_leave(run: Any) -> None:
    """The agent is not restarted, but the launcher reports its death."""
    launcher = run.launch(replicas=2, drain_timeout=60)
    for replica in (0, 1):
        run.worker(replica, 0, 0)
        run.order(replica, 0, 0, "ignore")
        run.wait_obeyed(replica, 0, 0)
    launcher.send_signal(signal.SIGINT)
    run.wait_until(
        lambda: len(list(run.orders.glob("*.told"))) == 2, what="both groups asked to leave"
    )
    os.kill(agents_of(launcher.pid)[0], signal.SIGKILL)
    run.wait_until(lambda: run.events("agent_ended"), what="the event of the death")
    run.order(1, 0, 0, "exit 0")
    printed, _ = launcher.communicate(timeout=40)
    assert launcher.returncode == 130
    assert "group 0 died: its agent was killed by SIGKILL; see " in printed
    (ended,) = run.events("agent_ended")
    assert (ended["replica"], ended["restarts"]) == (0, False)
    assert run.all_gone()


def test_killed_lighthouse_comes_back_at_its_address(run: Any) -> None:
    """After each kill a lighthouse listens at the same address within moments, and no group is
    restarted.
    """
    launcher = run.launch(replicas=2)
    workers = [run.worker(replica, 0, 0) for replica in (0, 1)]
    address = workers[0]["env"]["TORCHFT_LIGHTHOUSE"]
    port = int(address.rpartition(":")[2])
    for restarts in (1, 2):
        killed = lighthouse_of(launcher.pid)
        os.kill(killed, signal.SIGKILL)
        run.wait_until(
            lambda count=restarts: len(run.events("lighthouse_restarted")) == count,
            what="lighthouse back",
        )
        assert lighthouse_of(launcher.pid) != killed
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    assert all(run.is_alive(worker["pid"]) for worker in workers)
    printed = run.finish(launcher)
    assert (
        printed.count("the lighthouse ended (SIGKILL); it is back at the same address after") == 2
    )
    assert not run.events("replica_restarted")
    for event in run.events("lighthouse_restarted"):
        assert event["address"] == address
        assert event["reason"] == "the lighthouse ended (SIGKILL)"
        assert event["seconds"] > 0


@pytest.mark.slow
def test_lighthouse_that_keeps_dying_ends_the_run(run: Any) -> None:
    """After several deaths within moments of the start, the launcher gives up and ends all
    processes.
    """
    launcher = run.launch(replicas=1)
    run.worker(0, 0, 0)
    for restarts in range(1, MAX_DEATHS):
        os.kill(lighthouse_of(launcher.pid), signal.SIGKILL)
        run.wait_until(
            lambda count=restarts: len(run.events("lighthouse_restarted")) == count,
            what="lighthouse back",
        )
    os.kill(lighthouse_of(launcher.pid), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert f"the lighthouse ended (SIGKILL), {MAX_DEATHS} times in a row" in errors
    assert "so all groups are stopped" in errors
    (end,) = run.events("launch_finished")
    assert end["own_failure"] is True
    assert run.all_gone()


def test_first_signal_drains(run: Any) -> None:
    """At Ctrl-C the launcher lets all groups leave in order, and says so. The status is that of an
    interrupted command.
    """
    launcher = run.launch(replicas=2, module="draining_worker", drain_timeout=60)
    about = [run.worker(replica, 0, 0) for replica in (0, 1)]
    assert "--fault_tolerance.drain_timeout_seconds=60" in about[0]["argv"]
    launcher.send_signal(signal.SIGINT)
    printed, errors = launcher.communicate(timeout=40)
    assert (launcher.returncode, errors) == (130, "")
    assert "stopping all groups: draining for 60 s at most" in printed
    for replica in (0, 1):
        assert f"group {replica} left after step 12 (SIGTERM)" in printed
    assert run.events("launch_stopping")[0]["reason"] == "Ctrl-C"
    (finished,) = run.events("launch_finished")
    assert (finished["code"], finished["signal"], finished["reason"]) == (
        130,
        "SIGINT",
        "stopped by Ctrl-C",
    )
    assert run.all_gone()


@pytest.mark.slow
def test_second_signal_ends_at_once(run: Any) -> None:
    """The launch waits for workers that do not leave until a second signal, which ends them at
    once.
    """
    launcher = run.launch(replicas=1, drain_timeout=600)
    worker = run.worker(0, 0, 0)
    run.order(0, 0, 0, "ignore")
    run.wait_obeyed(0, 0, 0)
    launcher.send_signal(signal.SIGTERM)
    run.wait_until(lambda: run.events("launch_stopping"), what="the first signal noticed")
    assert run.is_alive(worker["pid"])
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    (finished,) = run.events("launch_finished")
    assert (finished["code"], finished["signal"], finished["reason"]) == (
        143,
        "SIGTERM",
        "stopped by SIGTERM",
    )
    run.wait_until(run.all_gone, 10.0, "all gone")


def test_group_drained_from_outside_has_not_failed(run: Any) -> None:
    """A group whose agent gets SIGTERM leaves; when the others finish, the run has succeeded."""
    launcher = run.launch(replicas=2, module="draining_worker")
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    os.kill(agents_of(launcher.pid)[1], signal.SIGTERM)
    run.wait_until(lambda: run.events("drained"), what="group 1 drained")
    run.order(0, "any", "any", "exit 0")
    printed, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, errors) == (0, "")
    assert "group 1 left after step 12 (SIGTERM)" in printed
    assert "all groups finished or left (left: 1)" in printed


def test_spare_takes_the_place_of_a_lost_group(run: Any) -> None:
    """A spare takes over a group without restarts left, with the next attempt. Without a spare, the
    group has failed.
    """
    launcher = run.launch(replicas=2, spares=1, max_restarts=0)
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    run.order(1, 0, 0, "exit 1")
    spare = run.worker(1, 0, 1)
    assert [flag for flag in spare["argv"] if "replica_id" in flag] == [
        "--fault_tolerance.replica_id=1"
    ]
    took = run.events("spare_took_over")
    assert [(event["replica"], event["attempt"]) for event in took] == [(1, 1)]
    run.order(1, 0, 1, "exit 1")
    run.wait_until(lambda: len(run.events("replica_gave_up")) == 2, what="the spare's end")
    run.order(0, "any", "any", "exit 0")
    printed, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "group 1: a spare takes its place (attempt 1)" in printed
    assert "1 of 2 groups failed: 1" in errors
    assert run.all_gone()


def test_what_a_spare_may_replace() -> None:
    """A group without restarts left, of its workers or of its agent. Not a group that must not come
    back, has a wrong config, was stopped, or lives.
    """
    assert can_spare_help(1, gave_up=True)
    assert can_spare_help(-signal.SIGKILL, gave_up=True)
    assert not can_spare_help(1, gave_up=False)
    assert not any(
        can_spare_help(code, gave_up=True) for code in (None, 0, CONFIG_ERROR_CODE, NO_RESTART_CODE)
    )


@pytest.mark.slow
def test_run_with_a_spare_succeeds(run: Any) -> None:
    """If the spare finishes in place of the lost group, the run has succeeded. A spare that was not
    needed just ends.
    """
    launcher = run.launch(replicas=1, spares=2, max_restarts=0)
    run.worker(0, 0, 0)
    run.order(0, 0, 0, "exit 1")
    run.worker(0, 0, 1)
    run.order(0, 0, 1, "exit 0")
    _, errors = launcher.communicate(timeout=40)
    assert (launcher.returncode, errors) == (0, "")


def test_resume_goes_on_counting_and_tells_only_what_is_new(run: Any) -> None:
    """A second launch in the folder starts with the next attempt, keeps logs and events, and
    repeats no old line.
    """
    run.config.write_text(run.config.read_text() + "[checkpoint]\nenable = true\n")
    for attempt in (0, 1):
        launcher = run.launch(replicas=1, resume=attempt > 0)
        run.worker(0, 0, attempt)
        run.order(0, 0, attempt, f"step {7 + attempt}")
        run.wait_obeyed(0, 0, attempt)
        run.order(0, 0, attempt, "exit 0")
        printed, errors = launcher.communicate(timeout=30)
        assert (launcher.returncode, errors) == (0, "")
        (run.paths.checkpoint / "step-7").mkdir(parents=True, exist_ok=True)
    assert "step 7" not in printed
    assert len(run.events("launch_started")) == 2
    assert len({event["job_id"] for event in run.events("launch_started")}) == 2
    assert all(run.paths.logs(0, attempt, 0).exists() for attempt in (0, 1))
    headers = run.paths.config.read_text().splitlines()[:5]
    assert [line.startswith("# titan-ft launch ") for line in headers] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert [line.startswith("# titan-ft launched: {") for line in headers] == [
        False,
        True,
        False,
        True,
        False,
    ]


def crashing(run: Any, crash: str, replicas: int = 2, **settings: Any) -> tuple[int, str, str]:
    """Launch workers that end as `crash` says; return status, output, and the lines about
    errors.
    """
    run.env["CRASH"] = crash
    launcher = run.launch(replicas=replicas, module="crashing_worker", **settings)
    printed, errors = launcher.communicate(timeout=60)
    return launcher.returncode, printed, errors


def test_a_mistake_that_only_a_worker_finds(run: Any) -> None:
    """The launcher prints one line, as if it had found the mistake: no group "died", and none is
    "not started again".

    A group that has not found the mistake ends as well.
    """
    mistake = "training.dataset must have a batch for each rank, got 3; take fewer ranks"
    crash = f"""
import time
from titan_ft.config import ConfigError
if replica == 1: raise ConfigError({mistake!r})
time.sleep(600)
"""
    code, printed, errors = crashing(run, crash)
    assert (code, errors) == (2, f"titan-ft: {mistake}\n")
    assert mistake not in printed
    assert "died" not in printed
    assert "failed" not in printed
    (finished,) = run.events("launch_finished")
    assert (finished["code"], finished["reason"]) == (2, mistake)
    assert run.all_gone()


def test_a_mistake_is_found_before_anything_is_started(run: Any) -> None:
    """The zygote finds the mistake before the run has a folder, an event, a lighthouse or a
    group.
    """
    (run.orders.parent / "mistaken.py").write_text(
        "from titan_ft.config import ConfigError\n"
        "def check(args): raise ConfigError(f'{args[0]} must be better; mend it')\n"
    )
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    for settings in ({}, {"no_zygote": True}):
        launcher = run.launch(replicas=2, module="mistaken", **settings)
        printed, errors = launcher.communicate(timeout=30)
        assert (launcher.returncode, printed) == (1, "")
        # `titan-ft launch` makes one line of it, see test_cli.py; the function that is called here
        # raises it.
        assert errors.endswith(
            f"ConfigError: --job.config_file={run.config} must be better; mend it\n"
        )
        assert not run.paths.root.exists()


def test_a_launch_stopped_during_its_check_leaves_nothing(run: Any) -> None:
    """At Ctrl-C during the check of the config, which takes the time of the imports, only the check
    has to end.
    """
    mark = run.orders / "checks"
    (run.orders.parent / "slow.py").write_text(
        f"import os, time; from pathlib import Path\n"
        f"def check(args): Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(600)\n"
    )
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    launcher = run.launch(replicas=2, module="slow")
    pid = int(run.wait_until(lambda: mark.exists() and mark.read_text(), what="the check"))
    launcher.send_signal(signal.SIGINT)
    printed, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, errors) == (130, "")
    assert printed == "stopped by Ctrl-C before anything was started\n"
    run.wait_until(lambda: not run.is_alive(pid), 10.0, "the end of the zygote")
    assert not run.paths.root.exists()


def test_all_groups_crash_alike(run: Any) -> None:
    """The first line of a death has the exception and the log. The second time all groups crash
    alike, the run stops with the reason.
    """
    code, printed, errors = crashing(run, "raise KeyError('nope')")
    assert code == 1
    log = run.paths.logs(0, 0, 0)
    assert f"group 0 died: KeyError: 'nope'; rank 0 ended with exit status 1; see {log}" in printed
    assert "all groups end with KeyError: 'nope' (before any step, 2 times; see " in errors
    # Each group twice at most: an agent may have started again what the launcher is about to stop.
    assert len(run.events("replica_restarted")) <= 4
    (finished,) = run.events("launch_finished")
    assert finished["code"] == 1
    assert "KeyError: 'nope'" in finished["reason"]
    assert run.all_gone()


@pytest.mark.slow
def test_one_group_crashes_while_others_train(run: Any) -> None:
    """Only that group is given up, and the others train to their end."""
    # Group 0 goes on until group 1 has been given up.
    crash = """
import time
def told(event, files):
    return any(event in path.read_text() for path in paths.events.glob(files))
if replica == 0:
    commit(1)
    while not told("replica_gave_up", "supervisor-1-*"): time.sleep(0.05)
    raise SystemExit(0)
while not told("step_committed", "replica-0-*"): time.sleep(0.05)
time.sleep(0.3)
raise KeyError("nope")
"""
    code, printed, errors = crashing(run, crash)
    assert (code, "1 of 2 groups failed: 1" in errors) == (1, True)
    assert "starting again does not help" not in errors
    assert (
        "group 1 failed: rank 0 ended with exit status 1; the same exception 3 times in a row"
        in printed
    )
    assert not [
        event for event in run.events("worker_exited") if event["replica"] == 0 and event["stopped"]
    ]


def test_all_groups_abort(run: Any) -> None:
    """A native crash of all groups stops the run as an exception does, and its line has the last
    line of the log that names an error.
    """
    words = "  what():  [enforce fail at pair.cc] 8 vs 4\nFatal Python error: Aborted\n"
    code, printed, errors = crashing(run, f"import os; print({words!r}, flush=True); os.abort()")
    assert code == 1
    log = run.paths.logs(0, 0, 0)
    assert f"group 0 died: rank 0 was killed by SIGABRT; see {log}" in printed
    assert (
        "all groups end with SIGABRT (what():  [enforce fail at pair.cc] 8 vs 4) (before any step, 2 times"
        in errors
    )
    assert run.all_gone()
