# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A process that imports everything a worker needs once, and forks workers on request, as `titan-ft
launch` does.

torch and torchtitan take about six seconds of CPU to import. A fork of a process that has imported
them takes 0.03 s. A forked worker runs `titan_ft.train.main()`.

Requests are JSON lines on stdin, and answers are JSON lines on stdout. The process ends with its
stdin:

- {"id": 1, "call": "module:function", "argv": [...], "env": {...}, "log": "path"} is answered by
  {"id": 1, "pid": 4711}.
- {"id": 1, "signal": 9} has no answer, and no effect after the end of process 1.
- The end of a process is reported by {"id": 1, "code": 0}.

A negative `code` is a signal.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan_ft.launch.group.forks import fork_module, prepare_forks
from titan_ft.launch.group.worker_group import open_log

CONFIG = Path(__file__).parents[3] / "configs" / "llama3_debug.toml"
HOOKS = Path(__file__).with_name("hooks.py")


class Zygote:
    """Forks, signals and reaps, on one thread."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._running: dict[int, int] = {}  # process id -> id of the request
        self._wakeup, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the select below
        signal.set_wakeup_fd(self._wakes)

    def serve(self) -> None:
        """Serve requests until stdin is closed, then kill the processes that still run."""
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._wakeup], [], [])
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)

    def _handle(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            for pid, number in self._running.items():
                if number == request["id"]:
                    os.kill(pid, request["signal"])
            return
        with open_log(Path(request["log"]), "ab") as log:
            child = fork_module(
                "harness.call",
                [request["call"], *request["argv"]],
                {**os.environ, **request["env"]},
                (log.fileno(), log.fileno()),
                close=[self._answers, self._wakeup, self._wakes],
            )
        self._running[child.pid] = request["id"]
        self._answer({"id": request["id"], "pid": child.pid})

    def _reap(self) -> None:
        for pid in list(self._running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._answer(
                    {"id": self._running.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                )

    def _answer(self, message: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(message).encode() + b"\n")


def lighthouse() -> None:
    """Run a lighthouse at the address in argv[1]. The JSON in argv[2] overrides defaults of
    `titan-ft launch`.
    """
    from titan_ft.launch.lighthouse import serve
    from titan_ft.options import Lighthouse

    settings = json.loads(sys.argv[2])
    for name in {"announce", "run_dir"} & settings.keys():
        settings[name] = Path(settings[name])
    serve(Lighthouse(bind=sys.argv[1], **settings))


def store() -> None:
    """Host the TCPStore of one attempt of a group, as the agent does. It outlives every worker of
    the group.
    """
    import torch.distributed as dist

    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    print(f"store listening at {server.port}", flush=True)
    while True:
        time.sleep(3600)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RUST_LOG", "warn")
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)  # what an import prints is no answer
    obstacle = prepare_forks("titan_ft.train", [f"--job.config_file={CONFIG}"])
    assert not obstacle, obstacle
    importlib.import_module("titan_ft.launch.lighthouse")
    for node in ast.parse(
        HOOKS.read_text()
    ).body:  # all that the hooks import: once, and not by each worker
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            importlib.import_module(node.module)
    zygote = Zygote(answers)
    os.write(answers, b'{"ready": true}\n')
    zygote.serve()


if __name__ == "__main__":
    main()
