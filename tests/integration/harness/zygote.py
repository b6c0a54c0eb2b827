# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A process that imports everything a worker needs, once, and forks workers on request.

torch and torchtitan take about six seconds of CPU to import. A fork of a process that has them takes 0.03 s. What a
forked worker runs is `titan_ft.train.main()`, as `python -m titan_ft.train` would.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout; the process ends with its stdin:
    {"id": 1, "call": "module:function", "argv": [...], "env": {...}, "log": "path"}   ->   {"id": 1, "pid": 4711}
    {"id": 1, "signal": 9}                                            (no answer; nothing happens once 1 has ended)
    a process has ended                                               ->   {"id": 1, "code": 0}  (negative: its signal)
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[3] / "configs" / "llama3_debug.toml"


def import_all() -> None:
    """Import what a worker imports; start no thread that a fork would lose."""
    from titan_ft import device

    device.prepare()
    for name in (
        "datasets",
        "tensorboard",
        "titan_ft.data.assets",
        "titan_ft.data.datasets",
        "titan_ft.launch.lighthouse",
        "titan_ft.semi_sync",
        "titan_ft.train",
        "titan_ft.trainer",
        "torch.utils.tensorboard",
        "torchft.process_group",
        "torchtitan.hf_datasets.text_datasets",
        "torchtitan.models.llama3",
        "torchtitan.train",
    ):
        importlib.import_module(name)


def warm_up() -> None:
    """Do once what every worker would do for itself: tyro reads the sources of all config classes, half a second."""
    from titan_ft import train
    from titan_ft.data import assets
    from titan_ft.data import datasets as data

    data.load_documents = functools.cache(data.load_documents)
    data.load_documents(str(assets.TRAIN_TEXT))
    train.read_config(f"--job.config_file={CONFIG}")


class Zygote:
    """Forks, signals and reaps, on one thread."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._running: dict[int, int] = {}  # process id -> id of the request
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the select below
        signal.set_wakeup_fd(wakeup)

    def serve(self) -> None:
        """Serve requests until stdin is closed; then end what still runs."""
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
        pid = os.fork()
        if pid == 0:
            _become(request, close=[self._answers, self._wakeup])
        self._running[pid] = request["id"]
        self._answer({"id": request["id"], "pid": pid})

    def _reap(self) -> None:
        for pid in list(self._running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._answer({"id": self._running.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, message: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(message).encode() + b"\n")


def _become(request: dict[str, Any], close: list[int]) -> None:
    """Turn the forked process into what was asked for; never returns."""
    code = 1
    try:
        wakeup = signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # as torchrun's workers: each leads a session of its own
        for fd in (*close, wakeup):
            os.close(fd)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(request["env"])
        faulthandler.register(signal.SIGUSR1)  # a test that ran out of time asks where its workers hang
        module, _, function = request["call"].partition(":")
        sys.argv = [module, *request["argv"]]
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # process edge: what went wrong is in the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def lighthouse() -> None:
    """Run a lighthouse on the address given as argument, with the defaults of `titan-ft launch` but for some (JSON)."""
    from titan_ft.launch.lighthouse import LighthouseSettings, serve

    serve(sys.argv[1], LighthouseSettings(**json.loads(sys.argv[2])))


def store() -> None:
    """Host the TCPStore of one attempt of a group, as torchrun's agent does; it outlives every worker of the group."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    print(f"store listening at {server.port}", flush=True)
    while True:
        time.sleep(3600)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RUST_LOG", "warn")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as titan_ft.train does for workers
    answers = os.dup(1)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)  # what an import prints is no answer
    import_all()
    warm_up()
    gc.collect()
    gc.freeze()  # collections in the workers need not touch what all of them share
    zygote = Zygote(answers)
    os.write(answers, b'{"ready": true}\n')
    zygote.serve()


if __name__ == "__main__":
    main()
