# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A module runs in a fork as it runs by `python -m`.

A new process makes the forks, because the process of the tests has threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

FORKER = """
import json, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)
from titan_ft.launch.group.forks import fork_module, prepare_forks
assert prepare_forks("subject", []) == "", "no fork may be made"
os.environ["STALE"] = "yes"
env = {name: value for name, value in os.environ.items() if name != "STALE"} | {"GIVEN": "yes"}
reads, writes = os.pipe()
codes, groups = [], []
for number, what in enumerate(sys.argv[1:]):
    with open(f"log-{number}", "wb") as log:
        output = log.fileno(), log.fileno()
        child = fork_module("subject", [what, "--flag"], env, output, title="titan-ft 7.0", close=[reads, writes])
    groups.append(os.getpgid(child.pid) == child.pid)
    codes.append(child.wait())
pipe = os.readlink(f"/proc/self/fd/{writes}")
print(json.dumps({"codes": codes, "groups": groups, "pid": os.getpid(), "pipe": pipe}))
"""

SUBJECT = """
import atexit, os, json, random, signal, sys, tempfile, threading, uuid
import numpy
PRELOADED = []
def preload(args): PRELOADED.append(os.getpid())
def tell():
    import subject
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__spec__.name, "env": dict(os.environ),
        "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
        "comm": open("/proc/self/comm").read().strip(), "preloaded": subject.PRELOADED, "parent": os.getppid(),
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "mask": len(signal.pthread_sigmask(0, [])),
        "drawn": [random.random(), float(numpy.random.rand()), uuid.uuid4().hex, tempfile.mktemp()],
        "open": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]],
    }))
if __name__ == "__main__":
    atexit.register(print, "at exit")
    match sys.argv[1]:
        case "tell": tell()
        case "raise": raise RuntimeError("told to fail")
        case "text": sys.exit("a text")
        case "status": sys.exit(3)
        case "true": sys.exit(True)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt": raise KeyboardInterrupt
        case "thread": threading.Timer(0.2, print, ["the thread ended"]).start()
"""


def run_forks(folder: Path, *what: str) -> dict[str, Any]:
    (folder / "subject.py").write_text(SUBJECT)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{folder}",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-c", FORKER, *what]
    result = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(json.loads(result.stdout))


def test_a_fork_is_as_a_new_process(tmp_path: Path) -> None:
    """The fork has its own session, stdin, environment, arguments, signals and main module. Its
    random numbers differ.
    """
    forker = run_forks(tmp_path, "tell", "tell")
    one, other = told = [
        json.loads((tmp_path / f"log-{n}").read_text().splitlines()[0]) for n in (0, 1)
    ]
    assert forker["codes"] == [0, 0]
    assert forker["groups"] == [True, True]
    for fork in told:
        assert fork["argv"] == [str(tmp_path / "subject.py"), "tell", "--flag"]
        assert (fork["name"], fork["main"]) == ("__main__", "subject")
        assert (fork["env"]["GIVEN"], fork["env"].get("STALE")) == ("yes", None)
        assert (fork["session"], fork["stdin"], fork["comm"]) == (True, "/dev/null", "titan-ft 7.0")
        assert (fork["parent"], fork["preloaded"]) == (forker["pid"], [forker["pid"]])
        assert (fork["term"], fork["mask"]) == (True, 0)
        assert forker["pipe"] not in fork["open"]
    assert not set(one["drawn"]) & set(other["drawn"])


@pytest.mark.parametrize(
    ("what", "output"),
    [
        ("raise", "RuntimeError: told to fail\nat exit\n"),
        ("text", "a text\nat exit\n"),
        ("status", "at exit\n"),
        ("true", "at exit\n"),
        ("kill", ""),
        ("thread", "the thread ended\nat exit\n"),
        ("interrupt", "KeyboardInterrupt\nat exit\n"),
    ],
)
def test_a_fork_ends_as_python_does(tmp_path: Path, what: str, output: str) -> None:
    """Status, output, exit functions and other threads, compared with `python -m`."""
    (code,) = run_forks(tmp_path, what)["codes"]
    command = [sys.executable, "-m", "subject", what, "--flag"]
    plain = subprocess.run(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    log = (tmp_path / "log-0").read_text()
    assert code == plain.returncode
    assert log.endswith(output)
    assert plain.stdout.endswith(output)


def preload_in(folder: Path, source: str) -> str:
    (folder / "subject.py").write_text(source)
    code = (
        "import os; from titan_ft.launch.group.forks import prepare_forks; "
        "print(prepare_forks('subject', []), flush=True); os._exit(0)"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("source", "obstacle"),
    [
        (
            "import threading; threading.Timer(600, print).start()",
            "threads were started",
        ),
        ("raise ValueError('no')", "subject could not be imported beforehand"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "CUDA is initialized"),
    ],
    ids=["thread", "error", "cuda"],
)
def test_what_keeps_a_process_from_forking(tmp_path: Path, source: str, obstacle: str) -> None:
    """A thread that a fork would lose, an import that fails, CUDA."""
    assert obstacle in preload_in(tmp_path, source)


def test_a_worker_is_preloaded_without_cuda_and_threads(tmp_path: Path) -> None:
    """Nothing that a training worker imports beforehand initializes CUDA, asks its driver, or
    starts a thread.
    """
    refuse = f"""
import os
import torch
def refuse(*args): raise AssertionError("CUDA was touched")
def ask(real=torch.cuda.is_available):
    assert os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1", "the driver would be asked, which initializes it"
    return real()
torch.cuda.is_available, torch.cuda._lazy_init = ask, refuse
if torch.cuda._is_compiled(): torch._C._cuda_init = refuse
from titan_ft.train import preload as real
def preload(args): real(["--job.config_file={ROOT}/configs/llama3_debug.toml", "--fault_tolerance.enable"])
"""
    assert preload_in(tmp_path, refuse) == ""


@pytest.mark.parametrize(
    "counter", ["torch.cuda._device_count_nvml", "torch._C._cuda_getDeviceCount"]
)
def test_gpus_are_counted_in_a_fork(tmp_path: Path, counter: str) -> None:
    """NVML and the driver start a thread in the process that asks them for the number of GPUs."""
    source = f"""
import threading
import torch
def count():
    threading.Timer(600, print).start()
    return 2
torch.cuda._is_compiled, torch.cuda._device_count_nvml = lambda: True, lambda: -1
{counter} = count
from titan_ft.train import _gpus_counted_in_fork
def preload(args):
    with _gpus_counted_in_fork():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda._cached_device_count is None, "the workers would not count anew"
"""
    assert preload_in(tmp_path, source) == ""
