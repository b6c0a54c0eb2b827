# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run torchft's lighthouse: the process where groups meet to form quorums."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from dataclasses import fields
from importlib.machinery import PathFinder
from typing import Any

from titan_ft.config import ConfigError
from titan_ft.options import LighthouseSettings
from titan_ft.run.orphan import PARENT_PID_ENV, exit_with_parent
from titan_ft.run.stop import StopRequests

ANNOUNCEMENT = "lighthouse listening at "


def check_settings(settings: LighthouseSettings) -> None:
    """Raise ConfigError for a value that torchft would take and never work with."""
    for field in fields(LighthouseSettings):
        value = getattr(settings, field.name)
        if value <= 0:
            raise ConfigError(f"the lighthouse's {field.name} must be > 0, got {value}; the default is {field.default}")


def split_bind(bind: str) -> tuple[str, int]:
    """Split HOST:PORT, where HOST may be an IPv6 address in brackets.

    Raises:
        ConfigError: it does not have that form.
    """
    host, separator, port = bind.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--bind must be HOST:PORT, got {bind!r}; for example [::]:29510, port 0 to have one chosen")
    return host, int(port)


def _native_torchft() -> Any:
    """Load torchft's native module alone, in milliseconds: the package around it imports torch, which takes seconds.

    Training pauses for as long as a lighthouse that died takes to be back.

    Raises:
        ConfigError: torchft is not installed.
    """
    package = importlib.util.find_spec("torchft")
    folders = package.submodule_search_locations if package is not None else None
    spec = PathFinder.find_spec("torchft._torchft", folders)
    if spec is None or spec.loader is None:
        raise ConfigError("the lighthouse needs torchft, got no such package; install torchft")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(bind: str, settings: LighthouseSettings) -> int:
    """Run a lighthouse until SIGTERM or SIGINT; announce its address on stdout once it is up.

    Raises:
        ConfigError: it cannot listen at `bind`.
    """
    host, _ = split_bind(bind)
    check_settings(settings)
    if PARENT_PID_ENV in os.environ:  # started by a launcher; by hand, it may outlive the shell that started it
        exit_with_parent()
    # The Rust side reads it when it is loaded; its own default, info, doubles the cost of a quorum.
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        server = _native_torchft().LighthouseServer(
            bind=bind,
            min_replicas=settings.min_replicas,
            join_timeout_ms=settings.join_timeout_ms,
            quorum_tick_ms=settings.quorum_tick_ms,
            heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
        )
    except RuntimeError as error:
        raise ConfigError(f"the lighthouse cannot listen at {bind}: {error}; choose another --bind") from error
    # torchft's address() holds the host's name, which others would have to resolve.
    reachable = "127.0.0.1" if host in ("[::]", "0.0.0.0") else host
    port = server.address().rsplit(":", 1)[1]
    # One write: print makes two when unbuffered, and a log line of torchft's could come between.
    sys.stdout.write(f"{ANNOUNCEMENT}http://{reachable}:{port}\n")
    sys.stdout.flush()
    stop = StopRequests(signal.SIGTERM, signal.SIGINT)
    while not stop:
        time.sleep(0.1)
    server.shutdown()
    return 0
