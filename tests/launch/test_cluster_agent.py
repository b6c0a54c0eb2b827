# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent of a group without a launcher. The workers start as real workers do, but do not
train.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request
from typing import Any

import pytest

from tests.launch.forked import children


def start(
    run: Any,
    crash: str,
    *options: str,
    ranks: int = 2,
    module: str = "crashing_worker",
    flags: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Start an agent as `titan-ft group` does."""
    run.env["CRASH"] = crash
    command = [
        "-m",
        "titan_ft.launch.group.agent",
        "--cluster",
        f"--run-dir={run.paths.root}",
        "--replica=3",
    ]
    command += [f"--ranks={ranks}", "--max-restarts=9", f"--module={module}", *options, "--"]
    return run.start(
        *command, f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=3", *flags
    )


def test_a_wrong_config_is_not_started_again(run: Any) -> None:
    """The agent ends with the worker's exit status. A line and an event give the reason."""
    crash = "from titan_ft.config import ConfigError\nif rank == 1: raise ConfigError('x must be y, got z')"
    process = start(run, crash)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (
        "titan_ft: group 3: rank 1 ended with exit status 2; the configuration is wrong (exit status 2); it is not "
        "started again; ConfigError: x must be y, got z\n"
    ) in errors
    ends = {
        (event["rank"], event["stopped"], event.get("error"))
        for event in run.events("worker_exited")
    }
    assert ends == {(1, False, "ConfigError: x must be y, got z"), (0, True, None)}
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["replica"], gave_up["attempt"]) == (3, 0)
    assert "Traceback" not in errors


def test_a_mistake_ends_the_agent_before_any_worker(run: Any) -> None:
    """The agent imports for the workers, and prints one line. Before, each rank reported the
    mistake.
    """
    (run.orders.parent / "mistaken.py").write_text(
        "from titan_ft.config import ConfigError\n"
        "def check(args): raise ConfigError('x must be y, got z')\n"
        "if __name__ == '__main__': print('a worker')\n"
    )
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    process = start(run, "", module="mistaken")
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert [line for line in errors.splitlines() if "titan_ft" in line] == [
        "titan_ft: x must be y, got z"
    ]
    assert "Traceback" not in errors
    assert printed == ""
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["error"]) == ("config", "ConfigError: x must be y, got z")
    assert gave_up["error_kind"] == "ConfigError"


@pytest.mark.parametrize(
    ("files", "slurm", "attempt"), [((0, 4), None, 5), ((), "2", 2), ((), None, 0)]
)
def test_a_group_that_is_started_again_counts_on(
    run: Any, files: tuple[int, ...], slurm: str | None, attempt: int
) -> None:
    """The start of a requeued group is a restart like any other, although its agent is new."""
    for number in files:
        path = run.paths.worker_events(3, 0, number, 4711)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run.env.pop("SLURM_RESTART_COUNT", None)
    if slurm is not None:
        run.env["SLURM_RESTART_COUNT"] = slurm
    process = start(run, "if attempt == 0: raise KeyError('first')\nraise SystemExit(2)", ranks=1)
    process.communicate(timeout=60)
    (last,) = run.events("replica_gave_up")
    assert last["attempt"] == max(attempt, 1)
    told = {5: "started by hand", 2: "Slurm requeued it", 0: "rank 0 ended with exit status 1"}[
        attempt
    ]
    assert [event["reason"] for event in run.events("replica_restarted")] == [told]
    assert {event["attempt"] for event in run.events("worker_started")} == set(
        range(attempt, last["attempt"] + 1)
    )


def test_workers_are_forks(run: Any) -> None:
    """The workers are children of the agent that import nothing, with the agent's output. After a
    restart they are forks, too.
    """
    crash = """
import os, signal
command = open("/proc/self/cmdline").read().split(chr(0))
print("out", attempt, open("/proc/self/comm").read().strip(), command[2], os.getppid(), flush=True)
print("err", attempt, file=sys.stderr, flush=True)
if attempt == 0: os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(2)
"""
    process = start(run, "import sys" + crash, ranks=1)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    shown = [
        f"out {attempt} titan-ft 3.0 titan_ft.launch.group.agent {process.pid}"
        for attempt in range(2)
    ]
    assert printed.splitlines() == shown
    assert [line for line in errors.splitlines() if line.startswith("err")] == ["err 0", "err 1"]
    assert [event["standby"] for event in run.events("replica_restarted")] == [True]


@pytest.mark.parametrize(
    "obstacle", ["off", "by the environment", pytest.param("threads", marks=pytest.mark.slow)]
)
def test_workers_that_cannot_be_forks_are_new_processes(run: Any, obstacle: str) -> None:
    """By option, or if their module starts threads at its import. A line reports it, once."""
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    source += "from crashing_worker import train\nif __name__ == '__main__': train.main()\n"
    (run.orders.parent / "threaded.py").write_text(source)
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    options = {"off": ["--no-zygote"]}.get(obstacle, [])
    if obstacle == "by the environment":
        run.env["TITAN_FT_ZYGOTE"] = "0"
    crash = """
print(open("/proc/self/cmdline").read().split(chr(0))[2], attempt, flush=True)
raise KeyError("x")
"""
    process = start(run, crash, *options, ranks=1, module="threaded")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 1  # a crash loop
    assert printed.split() == ["threaded", "0", "threaded", "1", "threaded", "2"]
    said = errors.count("titan_ft: group 3: threads were started, which a fork would lose")
    assert said == (1 if obstacle == "threads" else 0)
    assert [event["standby"] for event in run.events("replica_restarted")] == [False, False]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_group_that_is_stopped_while_it_imports(
    run: Any, signum: signal.Signals, status: int
) -> None:
    """The agent ends at once, with one line. The imports of a large model from a slow file server
    take minutes.
    """
    mark = run.orders.parent / "imports"
    source = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)\n"
    (run.orders.parent / "slow_module.py").write_text(source)
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    process = start(run, "", ranks=1, module="slow_module")
    run.wait_until(mark.exists, 60.0, "the agent imports")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (
        status,
        f"titan_ft: this group was stopped by {signum.name}\n",
    )


def test_workers_have_the_time_to_leave_that_their_config_gives_them(run: Any) -> None:
    """The workers finish a step, and save the state. The agent does not kill them meanwhile."""
    crash = """
import signal, sys, time
def leave(*_):
    (paths.root / "told").touch()
    while not (paths.root / "go").exists(): time.sleep(0.02)
    (paths.root / "left").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(paths.root / "trains").touch()
time.sleep(600)
"""
    process = start(run, crash, "--drain-timeout=50", ranks=1)
    run.wait_until((run.paths.root / "trains").exists, 60.0, "the worker trains")
    process.terminate()
    run.wait_until((run.paths.root / "told").exists, 60.0, "the worker is told to leave")
    (run.paths.root / "go").touch()
    process.communicate(timeout=60)
    assert (run.paths.root / "left").exists()


def test_an_agent_that_is_killed_takes_its_processes_along(run: Any) -> None:
    """No other process could end the workers later, and they would hold the host's GPUs and
    ports.
    """
    run.env["TITAN_FT_METRICS_PORT"] = "0"
    process = start(run, "import time; time.sleep(600)", ranks=2)
    run.wait_until(lambda: len(run.events("worker_started")) == 2, 60.0, "both ranks have begun")
    started = children(process.pid)
    assert len(started) == 4  # workers, store, metrics
    process.kill()
    process.communicate(timeout=60)
    run.wait_until(lambda: not any(map(run.is_alive, started)), 10.0, "all of them are gone")


@pytest.mark.slow
def test_a_group_leaves_a_host_on_which_workers_die(run: Any) -> None:
    """The group ends with a special exit status, and the events name the host."""
    run.env |= {"TITAN_FT_HOST_DEATHS": "2", "SLURMD_NODENAME": "gpu7"}
    run.env.pop("SLURM_RESTART_COUNT", None)
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    process = start(run, crash, ranks=1)
    process.communicate(timeout=60)
    assert process.returncode == 4
    (event,) = run.events("host_left")
    assert (event["replica"], event["host"], event["deaths"]) == (3, "gpu7", 2)
    assert [end["host"] for end in run.events("worker_exited")] == ["gpu7"] * 2


@pytest.mark.slow
def test_a_group_serves_its_figures_and_is_not_finished_when_it_is_sent_away(run: Any) -> None:
    """The agent prints the address of the metrics. After SIGTERM its status is not 0: Kubernetes
    would take the group for finished.
    """
    run.env["TITAN_FT_METRICS_PORT"] = "0"
    crash = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    ready = "(paths.root / 'ready').touch()\ntime.sleep(60)"
    process = start(run, f"import sys\n{crash}\n{ready}", ranks=1)
    said = ""
    while "metrics at " not in said:
        said = process.stderr.readline()
        assert said, "it ended without a word of metrics"
    url = said.partition("metrics at ")[2].strip()
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        url, timeout=30
    ) as response:
        assert 'titan_ft_run_info{replica="3"' in response.read().decode()
    run.wait_until(
        lambda: (run.paths.root / "ready").exists(), 60.0, "the worker would leave in order"
    )
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_group_that_is_stopped_says_so_in_one_line(
    run: Any, signum: signal.Signals, status: int
) -> None:
    """Before, it printed a traceback of thirty lines, with status 1 for Ctrl-C."""
    crash = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    crash += "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n(paths.root / 'ready').touch()\ntime.sleep(60)"
    process = start(run, crash, ranks=1)
    run.wait_until(
        lambda: (run.paths.root / "ready").exists(), 60.0, "the worker would leave in order"
    )
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"titan_ft: this group was stopped by {signum.name}\n" in errors
    assert "Traceback" not in errors


def test_ctrl_c_among_the_imports_is_no_traceback(run: Any) -> None:
    """The imports take seconds."""
    process = run.start("-v", "-m", "titan_ft.launch.group.agent", "--help")
    for line in process.stderr:
        if line.startswith("import 'tyro"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # which a shell calls 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "TITAN_FT_METRICS_PORT",
            "--metrics-port must be PORT (this host only) or HOST:PORT, got 'host:'",
        ),
        (
            "TITAN_FT_HOST_DEATHS",
            "TITAN_FT_HOST_DEATHS must be a whole number, at least 0, got 'host:'",
        ),
    ],
)
def test_a_variable_that_is_wrong_is_refused(run: Any, variable: str, message: str) -> None:
    """The agent refuses it at once, with one line, before it starts anything."""
    run.env[variable] = "host:"
    process = start(run, "", ranks=1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith(f"titan_ft: {message}")
    assert not run.events("worker_started")


@pytest.mark.slow
def test_a_suspected_host_comes_before_a_crash_loop(run: Any) -> None:
    """With --host-deaths 4 the fourth crash makes the group leave the host. The third crash does
    not give the group up.
    """
    run.env["TITAN_FT_HOST_DEATHS"] = "4"
    process = start(run, "import os; os.abort()", ranks=1)
    process.communicate(timeout=120)
    assert process.returncode == 4
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["attempt"]) == ("host", 3)
