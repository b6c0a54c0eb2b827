# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's seat at the lighthouse: in processes that are forked from the worker, and while it
waits for another lighthouse.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.membership.seat import Seat
from titan_ft.protocol.errors import TokenRefusedError

FORKS = """
import gc, os, signal
from datetime import timedelta

from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

import titan_ft.membership.seat

class Garbage:
    pass

gc.disable()
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
second = timedelta(seconds=1)
server = ManagerServer("one", lighthouse.address(), "localhost", "127.0.0.1:0", "store", 1, second, second, 0)
garbage = Garbage()
garbage.own, garbage.client = garbage, ManagerClient(server.address(), connect_timeout=10 * second)
del garbage
if (child := os.fork()) == 0:
    signal.alarm(20)  # ends it if it hangs
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_client_that_is_garbage_does_not_hang_a_forked_child() -> None:
    """A data loader's worker collects inherited garbage.

    torchft's client would wait for threads that the worker lacks.
    """
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "7\n"


def open_first(lighthouse: Any, check_token: Callable[[], None]) -> str:
    """Open a group's first seat, with a stand-in for all but the wait for a lighthouse."""
    this: Any = SimpleNamespace(
        _config=SimpleNamespace(start_timeout_seconds=30.0),
        _lighthouse=lighthouse,
        open=lambda member: "opened",
        _check_token=check_token,
    )
    member: Any = None
    return Seat._open_first(this, member)


def test_a_group_that_waits_for_another_lighthouse_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file still names a lighthouse of another run, twice. A wrong token would wait without a
    word until the limit.
    """
    refusals = [TokenRefusedError("it refuses"), TokenRefusedError("it refuses")]

    def check_token() -> None:
        if refusals:
            raise refusals.pop()

    lighthouse = SimpleNamespace(place=None, look=lambda: None, is_file=True, may_change=False)
    assert open_first(lighthouse, check_token) == "opened"
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["waiting up to 30 s for another lighthouse: it refuses"]


def test_a_lighthouse_that_announces_itself_in_a_pause_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After many refusals the pauses are seconds long, and a group must not lose them."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("titan_ft.membership.seat.time", clock)
    lighthouse = SimpleNamespace(place="old", is_file=True, may_change=False)
    lighthouse.look = lambda: "new" if now >= 20.3 else "old"

    def check_token() -> None:
        if lighthouse.place == "old":
            raise TokenRefusedError("it refuses")

    assert open_first(lighthouse, check_token) == "opened"
    assert now == pytest.approx(20.3, abs=0.2)
