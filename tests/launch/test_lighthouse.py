# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft lighthouse` forgets the names of ended processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torchft.coordination import LighthouseClient

from titan_ft.launch import lighthouse
from titan_ft.launch.lighthouse import ANNOUNCEMENT, ENDED_SECONDS, MAX_ENDED_NAMES, RenewalPolicy
from titan_ft.membership.pulse import LighthouseStatus, StatusPage
from titan_ft.options import Lighthouse
from titan_ft.run.events import LighthouseRenewed
from titan_ft.run.tail import EventTail

DEADLINE = 30.0  # seconds; only ever reached by a bug
CONNECT = timedelta(seconds=10)
LIMITS = (
    "lighthouse.MAX_ENDED_NAMES, lighthouse.ENDED_SECONDS, lighthouse._LOOK_SECONDS = 20, 0.5, 0.1"
)


class Page(StatusPage):
    """A status page whose content a test sets."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.status: LighthouseStatus | None = None

    def read(self, timeout: float) -> LighthouseStatus | None:
        return self.status


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(lighthouse, "_LOOK_SECONDS", 0.0)
    return Page()


def names(former: int, living: int) -> dict[str, float]:
    return {f"former {n}": 2 * ENDED_SECONDS for n in range(former)} | {
        f"living {n}": 0.1 for n in range(living)
    }


@pytest.mark.parametrize(
    ("former", "living", "num_asking", "due"),
    [
        (MAX_ENDED_NAMES + 1, 4, 0, True),
        (
            MAX_ENDED_NAMES + 1,
            4,
            1,
            False,
        ),  # a group waits for its quorum: a step waits for the lighthouse
        (MAX_ENDED_NAMES, 4, 0, False),
        (4, MAX_ENDED_NAMES + 1, 0, False),
    ],
)
def test_when_a_lighthouse_starts_anew(
    page: Page, former: int, living: int, num_asking: int, due: bool
) -> None:
    """With too many ended processes, while no group waits for a quorum."""
    page.status = LighthouseStatus(names(former, living), (), num_asking)
    assert RenewalPolicy(page).is_due() == due


def test_a_page_that_cannot_be_read_says_nothing(page: Page) -> None:
    """The lighthouse continues, because it may only be slow."""
    assert not RenewalPolicy(page).is_due()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A lighthouse at a free port, which restarts as soon as it knows 20 ended processes.

    The new process has no such limit, but it does not know the names either.
    """
    code = f"import sys; from titan_ft.launch import lighthouse; {LIMITS}; from titan_ft.cli.main import main; main()"
    options = ["--bind", "127.0.0.1:0", "--run-dir", str(tmp_path)]
    command = [sys.executable, "-c", code, "lighthouse", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANNOUNCEMENT):
            return line.removeprefix(ANNOUNCEMENT).strip()
    raise AssertionError("the lighthouse has ended")


def test_a_lighthouse_forgets_ended_processes(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The address and the process id stay, and an event reports the new start. Before, quorums
    became slower with each restart of a group.
    """
    address = read_address(process)
    page = StatusPage(address)
    client = LighthouseClient(address, CONNECT)
    for number in range(30):
        client.heartbeat(f"group-{number}")
    assert read_address(process) == address
    status: list[LighthouseStatus] = []

    def is_empty() -> bool:
        status[:] = [found for found in [page.read(1.0)] if found is not None]
        return bool(status) and not status[0].heartbeats

    wait_until(is_empty)
    LighthouseClient(address, CONNECT).heartbeat("group-30")
    wait_until(
        lambda: (found := page.read(1.0)) is not None and list(found.heartbeats) == ["group-30"]
    )
    assert process.poll() is None
    (event,) = EventTail(tmp_path / "events", from_start=True).poll()
    assert isinstance(event, LighthouseRenewed)
    assert event.address == address
    assert 20 < event.num_ended <= 30


class NoStop:
    status = 0

    def __bool__(self) -> bool:
        return False


def test_a_lighthouse_that_starts_anew_keeps_its_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inside the user namespace, a token file of root's belongs to an unknown user, and would be
    refused.
    """
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o400)
    monkeypatch.setenv("TITAN_FT_TOKEN_FILE", str(file))
    monkeypatch.setenv("TITAN_FT_TOKEN", "")  # and taken away at the end
    monkeypatch.setattr(lighthouse, "allow_namespaces", lambda: "")
    monkeypatch.setattr(lighthouse, "_serve_once", lambda *_: "127.0.0.1:1")
    tokens: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: tokens.append(os.environ.get("TITAN_FT_TOKEN")))
    # None asked to stop. Signals of the process that runs the tests stay as they are.
    monkeypatch.setattr(lighthouse, "StopRequests", lambda *_: NoStop())
    lighthouse.serve(Lighthouse(bind="127.0.0.1:0"))
    assert tokens == ["0123456789abcdef"]
