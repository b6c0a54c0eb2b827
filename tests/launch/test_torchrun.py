# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrun itself, which starts workers again only where that can help; the workers' entry is real, training is not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forked import zygote_of
from titan_ft.launch.torchrun import _drain_seconds


def torchrun(
    run: Any,
    crash: str,
    *options: str,
    ranks: int = 2,
    module: str = "crashing_worker",
    flags: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    run.env["CRASH"] = crash
    flags = (f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=3", *flags)
    command = ["-m", "titan_ft.launch.torchrun", f"--nproc-per-node={ranks}", "--max-restarts=9", *options]
    return run.start(*command, "-m", module, *flags)


def test_a_wrong_config_is_not_started_again(run: Any) -> None:
    """The status is that of the worker, and one line says why; the events have it too."""
    crash = "from titan_ft.config import ConfigError\nif rank == 1: raise ConfigError('x must be y, got z')"
    process = torchrun(run, crash, "--standalone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (
        "titan_ft: group 3: rank 1 ended with exit status 2; the configuration is wrong (exit status 2); it is not "
        "started again; ConfigError: x must be y, got z\n"
    ) in errors
    ends = {(event["rank"], event["stopped"], event.get("error")) for event in run.events("worker_exited")}
    assert ends == {(1, False, "ConfigError: x must be y, got z"), (0, True, None)}
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["replica"], gave_up["attempt"]) == (3, 0)
    assert "Traceback" not in errors


def test_a_mistake_ends_the_agent_before_any_worker(run: Any) -> None:
    """One line, of the process that imports what the workers need; each rank found it by itself."""
    (run.orders.parent / "mistaken.py").write_text(
        "from titan_ft.config import ConfigError\n"
        "def check(args): raise ConfigError('x must be y, got z')\n"
        "if __name__ == '__main__': print('a worker')\n"
    )
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    run.env["TITAN_FT_ZYGOTE"] = "1"
    process = torchrun(run, "", "--standalone", module="mistaken")
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert [line for line in errors.splitlines() if "titan_ft" in line] == ["titan_ft: x must be y, got z"]
    assert "Traceback" not in errors
    assert printed == ""
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["error"]) == ("config", "ConfigError: x must be y, got z")


@pytest.mark.parametrize(("files", "slurm", "attempt"), [((0, 4), None, 5), ((), "2", 2), ((), None, 0)])
def test_a_group_that_is_started_again_counts_on(
    run: Any, files: tuple[int, ...], slurm: str | None, attempt: int
) -> None:
    """A requeued group is a restart like any other, whatever torchrun, which has just begun, counts."""
    for number in files:
        path = run.paths.worker_events(3, 0, number, 4711)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run.env.pop("SLURM_RESTART_COUNT", None)
    if slurm is not None:
        run.env["SLURM_RESTART_COUNT"] = slurm
    process = torchrun(run, "if attempt == 0: raise KeyError('first')\nraise SystemExit(2)", "--standalone", ranks=1)
    process.communicate(timeout=60)
    (last,) = run.events("replica_gave_up")
    assert last["attempt"] == max(attempt, 1)
    told = {5: "started by hand", 2: "Slurm requeued it", 0: "rank 0 ended with exit status 1"}[attempt]
    assert [event["reason"] for event in run.events("replica_restarted")] == [told]
    assert {event["attempt"] for event in run.events("worker_started")} == set(range(attempt, last["attempt"] + 1))


def test_workers_are_forks(run: Any) -> None:
    """Children of the agent that import nothing, print where torchrun has them print, and outlive what they are of.

    A restart is a fork too, also after that process was killed.
    """
    crash = """
import os, signal, time
command = open("/proc/self/cmdline").read().split(chr(0))
print("out", attempt, open("/proc/self/comm").read().strip(), command[2], os.getppid(), flush=True)
print("err", attempt, file=sys.stderr, flush=True)
if attempt == 0: os.kill(os.getpid(), signal.SIGKILL)
while not (paths.root / f"go-{attempt}").exists(): time.sleep(0.02)
if attempt == 2: raise SystemExit(2)
raise KeyError("again")
"""
    run.env["TITAN_FT_ZYGOTE"] = "1"  # the module is not ours
    logs = run.paths.root / "torchrun"
    options = ["--standalone", "--redirects=3", f"--log-dir={logs}"]
    process = torchrun(run, "import sys" + crash, *options, ranks=1)

    def printed(name: str) -> str:
        return "".join(path.read_text() for path in sorted(logs.glob(f"*/attempt_*/0/{name}.log")))

    run.wait_until(lambda: "out 1" in printed("stdout"), 60.0, "the group is back")
    zygote = zygote_of(process.pid)
    assert zygote is not None
    os.kill(zygote, signal.SIGKILL)
    (run.paths.root / "go-1").touch()
    run.wait_until(lambda: "out 2" in printed("stdout"), 60.0, "the group is back once more")
    renewed = zygote_of(process.pid)
    assert renewed is not None
    assert renewed != zygote
    (run.paths.root / "go-2").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.count("group 3: the zygote ended (SIGKILL); another one is started") == 1
    told = [f"out {attempt} titan-ft 3.0 titan_ft.launch.zygote {process.pid}" for attempt in range(3)]
    assert printed("stdout").splitlines() == told
    assert [line for line in printed("stderr").splitlines() if line.startswith("err")] == ["err 0", "err 1", "err 2"]
    assert [event["standby"] for event in run.events("replica_restarted")] == [True, True]
    run.wait_until(lambda: not run.is_alive(renewed), 10.0, "it takes the process that it forked from along")


@pytest.mark.parametrize(
    "obstacle",
    ["off", pytest.param("foreign", marks=pytest.mark.slow), pytest.param("threads", marks=pytest.mark.slow)],
)
def test_workers_that_cannot_be_forks_are_new_processes(run: Any, obstacle: str) -> None:
    """By wish, where a module is not ours, or starts threads when it is imported: one line says so, once."""
    run.env["TITAN_FT_ZYGOTE"] = {"off": "0", "foreign": "", "threads": "1"}[obstacle]
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    source += "from crashing_worker import train\nif __name__ == '__main__': train.main()\n"
    (run.orders.parent / "threaded.py").write_text(source)
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    run.env["TITAN_FT_PARENT_PID"] = "1"  # inherited; a foreign worker may start one of ours, whose parent it is then
    crash = """
import os
print(open("/proc/self/cmdline").read().split(chr(0))[3], attempt, os.environ.get("TITAN_FT_PARENT_PID"), flush=True)
raise KeyError("x")
"""
    process = torchrun(run, crash, "--standalone", ranks=1, module="threaded")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 1  # a crash loop
    assert printed.split() == ["threaded", "0", "None", "threaded", "1", "None", "threaded", "2", "None"]
    said = errors.count("group 3: the zygote ended (exit status 1); workers import everything themselves from now on")
    assert (said, errors.count("threads were started")) == ((1, 1) if obstacle == "threads" else (0, 0))
    assert [event["standby"] for event in run.events("replica_restarted")] == [False, False]


def test_a_group_that_is_sent_away_while_it_imports(run: Any) -> None:
    """The agent ends as torchrun's does when its workers are told, and takes the zygote along."""
    run.env["TITAN_FT_ZYGOTE"] = "1"
    mark = run.orders.parent / "imports"
    source = f"import pathlib, time; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)\n"
    (run.orders.parent / "slow_module.py").write_text(source)
    run.env["PYTHONPATH"] += os.pathsep + str(run.orders.parent)
    process = torchrun(run, "", "--standalone", ranks=1, module="slow_module")
    run.wait_until(mark.exists, 60.0, "the zygote imports")
    zygote = zygote_of(process.pid)
    assert zygote is not None
    run.wait_until(lambda: handles_sigterm(process.pid), 60.0, "the agent is ready")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1
    run.wait_until(lambda: not run.is_alive(zygote), 10.0, "the zygote is gone")


def test_workers_have_the_time_to_leave_that_their_config_gives_them(run: Any) -> None:
    """torchrun's own patience, none here, is not for those that finish a step, and save what they hold."""
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
    flags = ("--fault_tolerance.drain_timeout_seconds=50",)
    process = torchrun(run, crash, "--standalone", "--shutdown-timeout=0", ranks=1, flags=flags)
    run.wait_until((run.paths.root / "trains").exists, 60.0, "the worker trains")
    process.terminate()
    run.wait_until((run.paths.root / "told").exists, 60.0, "the worker is told to leave")
    (run.paths.root / "go").touch()
    process.communicate(timeout=60)
    assert (run.paths.root / "left").exists()


@pytest.mark.parametrize(
    ("toml", "flags", "seconds"),
    [
        ("", [], 25.0),
        ("[fault_tolerance]\ndrain_timeout_seconds = 90", [], 90.0),
        ("[fault_tolerance]\ndrain_timeout_seconds = 90", ["--fault_tolerance.drain-timeout-seconds", "40"], 40.0),
        ("", ["--fault_tolerance.drain_timeout_seconds=soon"], 25.0),
        ("", ["--fault_tolerance.drain_timeout_seconds=inf"], 25.0),
        ("no toml", [], 25.0),
    ],
)
def test_how_long_workers_may_take_to_leave(tmp_path: Path, toml: str, flags: list[str], seconds: float) -> None:
    """As the workers themselves read it; what is wrong is theirs to refuse."""
    config = tmp_path / "config.toml"
    config.write_text(toml)
    assert _drain_seconds([f"--job.config_file={config}", *flags]) == seconds


def test_an_agent_that_is_killed_takes_zygote_and_workers_along(run: Any) -> None:
    """Nobody could end them later: they would hold the host's GPUs and ports."""
    run.env["TITAN_FT_ZYGOTE"] = "1"
    process = torchrun(run, "import time; time.sleep(600)", "--standalone", ranks=2)
    run.wait_until(lambda: len(run.events("worker_started")) == 2, 60.0, "both ranks have begun")
    workers, zygote = [event["pid"] for event in run.events("worker_started")], zygote_of(process.pid)
    assert zygote is not None
    process.kill()
    process.communicate(timeout=60)
    run.wait_until(lambda: not any(map(run.is_alive, [zygote, *workers])), 10.0, "all of them are gone")


def handles_sigterm(pid: int) -> bool:
    """Say whether a process has a handler for SIGTERM."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_group_leaves_a_host_on_which_workers_die(run: Any) -> None:
    """Its exit status is one of its own, and the events say which host it is."""
    run.env |= {"TITAN_FT_HOST_DEATHS": "2", "SLURMD_NODENAME": "gpu7"}
    run.env.pop("SLURM_RESTART_COUNT", None)
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    process = torchrun(run, crash, "--standalone", ranks=1)
    process.communicate(timeout=60)
    assert process.returncode == 4
    (event,) = run.events("host_left")
    assert (event["replica"], event["host"], event["deaths"]) == (3, "gpu7", 2)
    assert [end["host"] for end in run.events("worker_exited")] == ["gpu7"] * 2


@pytest.mark.slow
def test_nodes_of_a_group_count_alike(run: Any) -> None:
    """A node whose workers did not fail has restarted nothing by its own count; what a start is called is node 0's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    crash = """
if attempt == 0 and rank == 1: raise KeyError("one node alone")
if attempt > 0:
    import pathlib, time
    pathlib.Path(paths.root, f"{attempt}-{rank}").touch()
    time.sleep(600)
import time; time.sleep(600)
"""
    nodes = [torchrun(run, crash, *options, ranks=1) for _ in range(2)]
    marks = [run.paths.root / f"1-{rank}" for rank in range(2)]
    run.wait_until(lambda: all(mark.exists() for mark in marks), 60.0, "both ranks are of attempt 1")
    for node in nodes:
        node.kill()


@pytest.mark.slow
def test_a_group_serves_its_figures_and_is_not_finished_when_it_is_sent_away(run: Any) -> None:
    """The agent says where. At SIGTERM its status is not 0: Kubernetes would take the group for finished."""
    run.env["TITAN_FT_METRICS_PORT"] = "0"
    crash = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    ready = "(paths.root / 'ready').touch()\ntime.sleep(60)"
    process = torchrun(run, f"import sys\n{crash}\n{ready}", "--standalone", ranks=1)
    said = ""
    while "metrics at " not in said:
        said = process.stderr.readline()
        assert said, "it ended without a word of metrics"
    url = said.partition("metrics at ")[2].strip()
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as response:
        assert 'titan_ft_run_info{replica="3"' in response.read().decode()
    run.wait_until(lambda: (run.paths.root / "ready").exists(), 60.0, "the worker would leave in order")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_group_that_is_stopped_says_so_in_one_line(run: Any, signum: signal.Signals, status: int) -> None:
    """It was a traceback of thirty lines, and status 1 for Ctrl-C."""
    crash = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    crash += "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n(paths.root / 'ready').touch()\ntime.sleep(60)"
    process = torchrun(run, crash, "--standalone", ranks=1)
    run.wait_until(lambda: (run.paths.root / "ready").exists(), 60.0, "the worker would leave in order")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"titan_ft: this group was stopped by {signum.name}\n" in errors
    assert "Traceback" not in errors


def test_ctrl_c_among_the_imports_is_no_traceback(run: Any) -> None:
    """They take seconds."""
    process = run.start("-v", "-m", "titan_ft.launch.torchrun", "--help")
    for line in process.stderr:
        if line.startswith("import 'torch'") or "import torch._" in line or "import 'torch." in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # which a shell calls 130
    assert "Traceback" not in errors


def test_a_place_for_metrics_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with one line, before anything is started."""
    from titan_ft.launch.torchrun import main

    monkeypatch.setenv("TITAN_FT_METRICS_PORT", "host:")
    assert main() == 2
    assert capsys.readouterr().err.startswith(
        "titan_ft: --metrics-port must be PORT (this host only) or HOST:PORT, got"
    )


@pytest.mark.slow
def test_a_crash_loop_ends(run: Any) -> None:
    """Kills and steps are no part of one; what torchrun itself ends is not the cause."""
    crash = """
import os, signal, time
if attempt == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2 and rank == 1: commit(1)
if rank == 1: raise KeyError("nope")
"""
    process = torchrun(run, crash, "--standalone")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the same exception 3 times in a row, and no step committed between; KeyError: 'nope'" in errors
    restarts = [(event["attempt"], event["reason"]) for event in run.events("replica_restarted")]
    failed = "rank 1 ended with exit status 1"
    # The exception of attempt 2 came after a commit: the row begins with it.
    assert restarts == [(1, "rank 1 was killed by SIGKILL"), (2, failed), (3, failed), (4, failed)]
    assert {(event["rank"], event["stopped"]) for event in run.events("worker_exited")} == {(1, False), (0, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "end"),
    [
        ("os.abort()", "SIGABRT"),
        ("os._exit(7)", "exit status 7"),
        ("mark_training(); os._exit(0)", "exit status 0 before the last step"),
    ],
)
def test_a_crash_loop_without_an_exception(run: Any, crash: str, end: str) -> None:
    """At the same step each time: on a cluster nobody sees all groups, and each notices it by itself."""
    code = f"import os\nfor step in (1, 2, 3): commit(step)\nif rank == 1: {crash}"
    process = torchrun(run, code, "--standalone")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"the same end ({end}) 3 times in a row, each time after step 3; see its output" in errors
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["attempt"], gave_up["rank"]) == ("crash loop", 2, 1)


@pytest.mark.slow
def test_a_suspected_host_comes_before_a_crash_loop(run: Any) -> None:
    """With --host-deaths 4 the fourth crash sends the group elsewhere; the third one has not given it up."""
    run.env["TITAN_FT_HOST_DEATHS"] = "4"
    process = torchrun(run, "import os; os.abort()", "--standalone", ranks=1)
    process.communicate(timeout=120)
    assert process.returncode == 4
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["cause"], gave_up["attempt"]) == ("host", 3)


@pytest.mark.slow
def test_all_nodes_of_a_group_end(run: Any) -> None:
    """Where the group must not come back, the agent of the other node ends as well."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    crash = """
import os, pathlib
from titan_ft.protocol.errors import DivergedError
if rank == 1: raise DivergedError("two states")
while not (paths.events.parent / "logs").exists(): __import__("time").sleep(0.05)
raise ConnectionError("lost rank 1")
"""
    nodes = [torchrun(run, crash, *options, ranks=1) for _ in range(2)]
    run.wait_until(lambda: any(node.poll() == 3 for node in nodes), 60.0, "the node of rank 1 ended")
    (run.paths.root / "logs").mkdir()
    errors = [node.communicate(timeout=60)[1] for node in nodes]
    assert sorted(node.returncode for node in nodes) == [1, 3], errors
    assert any("DivergedError: two states" in text for text in errors)
