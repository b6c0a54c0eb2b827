# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The tests' end of the zygote: processes that are started, signalled and waited for."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parents[1]
POLL_SECONDS = 0.02


class Process:
    """A process forked from the zygote. `code` is its exit status after its end; a negative one is
    a signal.
    """

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self.log = log
        self.pid: int | None = None
        self.code: int | None = None

    @property
    def running(self) -> bool:
        return self.code is None

    def output(self) -> str:
        """Return everything that the process has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class ZygoteClient:
    """Starts the zygote, and processes from it."""

    def __init__(self, log: Path) -> None:
        self._processes: dict[int, Process] = {}
        self._number = 0
        self._pending = b""
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            # Stock torchtitan on all ranks of two groups has eight devices, where the stand-in for
            # CUDA is in use.
            env={"FAKE_CUDA_DEVICES": "8", **os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,  # Ctrl-C is for pytest, which then closes it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._ready = False
        self.wait_until(lambda: self._ready, 120, "the zygote has imported everything")

    def start(
        self, call: str, log: Path, argv: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Process:
        """Fork a process that calls `call` ("module:function") and writes its output to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._number += 1
        process = self._processes[self._number] = Process(self._number, log)
        self._send(
            {
                "id": self._number,
                "call": call,
                "argv": list(argv),
                "env": dict(env or {}),
                "log": str(log),
            }
        )
        return process

    def signal(self, process: Process, signum: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if process.running:
            self._send({"id": process.number, "signal": int(signum)})

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Read the zygote's answers (started, ended). Wait up to `seconds` for the first."""
        if not self._selector.select(seconds):
            return
        data = os.read(self._answers.fileno(), 1 << 16)
        if not data:
            pytest.fail(f"the zygote ended: {self._log.read_text()[-2000:]}")
        *lines, self._pending = (self._pending + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "ready" in answer:
                self._ready = True
                continue
            process = self._processes[answer["id"]]
            process.pid = answer.get("pid", process.pid)
            process.code = answer.get("code")

    def wait_until(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Return the first true value of `condition`; fails the test after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds:g} s: {what}")
            self.poll()
        return value

    def call(
        self,
        call: str,
        log: Path,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        seconds: float = 60,
    ) -> Process:
        """Fork a process and wait for its end."""
        process = self.start(call, log, argv, env)
        self.wait_until(lambda: not process.running, seconds, f"{call} ended")
        return process

    def close(self) -> None:
        """End the zygote, which ends the processes that it forked."""
        self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _send(self, request: dict[str, Any]) -> None:
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()


def python_path() -> str:
    """Return a PYTHONPATH with the package and the harness."""
    roots = [str(TESTS), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(root for root in roots if root)
