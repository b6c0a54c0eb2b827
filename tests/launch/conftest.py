# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Give tests fake workers to command, and runs to put them in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import untyped
from titan_ft.launch import restart_policy
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

HERE = Path(__file__).parent
WITHOUT_TORCH = HERE / "without_torch"


class FakeRun:
    """A run directory with fake workers in it, and the processes a test starts for it."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / "run")
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.config = folder / "config.toml"
        self.config.write_text("[job]\n[fault_tolerance]\nenable = true\n")
        self.env = {**os.environ, "FAKE_WORKERS": str(self.orders)}
        roots = [
            str(WITHOUT_TORCH),
            str(HERE),
            str(HERE.parents[1]),
            os.environ.get("PYTHONPATH", ""),
        ]
        self.env["PYTHONPATH"] = os.pathsep.join(root for root in roots if root)
        self.processes: list[subprocess.Popen[str]] = []
        self.stdout: int = subprocess.PIPE

    def use_torch(self) -> None:
        """Let the processes import torch itself: their workers do, or meet at the group's store."""
        self.env["PYTHONPATH"] = self.env["PYTHONPATH"].removeprefix(f"{WITHOUT_TORCH}{os.pathsep}")

    @staticmethod
    def wait_until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
        """Return the first true value of `condition`, or fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        pytest.fail(f"not within {seconds} s: {what or condition}")

    @staticmethod
    def is_alive(pid: int) -> bool:
        """Tell whether a process runs; a zombie, which only waits to be collected, does not."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a Python command in a session of its own."""
        process = subprocess.Popen(
            [sys.executable, *command],
            env=self.env,
            stdout=self.stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def launch(self, replicas: int, ranks: int = 1, **settings: object) -> subprocess.Popen[str]:
        """Start a launcher of fake workers."""
        plan = {
            name: settings.pop(name)
            for name in ("module", "worker_args", "chaos")
            if name in settings
        }
        plan["module"] = plan.get("module", "fake_worker")
        options = {"replicas": replicas, "ranks_per_replica": ranks, **settings}
        code = (
            "import json, sys; from pathlib import Path; from titan_ft.launch.launch_plan import LaunchPlan; "
            "from titan_ft.launch.local import launch; from titan_ft.options import Launch; "
            f"options = Launch(Path({str(self.config)!r}), run_dir=Path({str(self.paths.root)!r}), "
            "**json.loads(sys.argv[1])); "
            "given = json.loads(sys.argv[2]); chaos = given.pop('chaos', None); "
            "load = lambda file: __import__('titan_ft.chaos.plan_file', fromlist=['x']).load_plan(Path(file)); "
            "code = launch(LaunchPlan(options, **given, chaos=chaos and load(chaos))); "
            "breaks = () if chaos else ('titan_ft.chaos', 'titan_ft.faults'); "
            "loaded = [name for name in sys.modules if name == 'torch' or name.startswith(breaks)]; "
            "assert not loaded, loaded; "
            "sys.exit(code)"
        )
        return self.start("-c", code, json.dumps(options), json.dumps(plan))

    def worker(
        self, replica: int, rank: int, attempt: int, seconds: float = 30.0
    ) -> dict[str, Any]:
        """Wait for a worker and return what it says about itself."""
        path = self.orders / f"{replica}-{rank}-{attempt}.json"
        self.wait_until(path.exists, seconds, f"worker {path.stem}")
        return json.loads(path.read_text())

    def order(self, replica: int, rank: int | str, attempt: int | str, what: str) -> None:
        """Tell a worker (or "any") what to do."""
        path = self.orders / f"{replica}-{rank}-{attempt}.do"
        path.with_suffix(".tmp").write_text(what)
        path.with_suffix(".tmp").rename(path)

    def finish(self, launcher: subprocess.Popen[str]) -> str:
        """Let both groups finish, and so the launch; returns the launch's output."""
        for replica in (0, 1):
            self.order(replica, "any", "any", "exit 0")
        printed, errors = launcher.communicate(timeout=30)
        assert (launcher.returncode, errors) == (0, "")
        return printed

    def wait_obeyed(self, replica: int, rank: int, attempt: int) -> None:
        path = self.orders / f"{replica}-{rank}-{attempt}.do"
        self.wait_until(lambda: not path.exists(), what=f"{path.stem} obeyed")

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [untyped(event) for event in read_events(self.paths.events) if event.name in names]

    def pids(self) -> list[int]:
        """List the processes of all workers so far, and what these started."""
        about = [json.loads(path.read_text()) for path in self.orders.glob("*.json")]
        return [worker[kind] for worker in about for kind in ("pid", "helper")]

    def all_gone(self) -> bool:
        return not any(self.is_alive(pid) for pid in self.pids())

    def cleanup(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.pids():
            if self.is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agents of this process start a group again without a pause."""
    monkeypatch.setattr(restart_policy, "backoff_seconds", lambda streak: 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    fake = FakeRun(tmp_path)
    yield fake
    fake.cleanup()


@pytest.fixture
def run_on_disk(small_disk: Any, tmp_path: Path) -> Iterator[FakeRun]:
    """A run directory on a disk that can be full; the fake workers' orders are elsewhere."""
    fake = FakeRun(tmp_path)
    fake.paths = RunPaths(small_disk.folder / "run")
    yield fake
    fake.cleanup()
