# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An exchange is broken off when the lighthouse has not heard of one of its members for too long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from titan_ft.replica.pulse import Pulse, Watch, read_heartbeats

DEADLINE = 20.0  # seconds; only ever reached by a bug
SILENCE_SECONDS = 0.3  # of listening for what must not come: many looks

PAGE = """
<h2>Heartbeats</h2>
<ul>
  <li class="heartbeat ">
    0:a&#x2F;b: seen 0.021028435s ago
  </li>
  <li class="heartbeat recovering">
    1:c: seen 3.5s ago
  </li>
</ul>
"""


class Lighthouse:
    """Answers with a status page that tests set, and counts how often it was asked."""

    def __init__(self) -> None:
        self.page = PAGE
        self.promised: int | None = None  # bytes that its answer is said to have; it ends with the page all the same
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the name that the base class calls
                told.asked.put(self.path)
                self.send_response(200)
                if told.promised is not None:
                    self.send_header("Content-Length", str(told.promised))
                self.end_headers()
                self.wfile.write(told.page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    lighthouse = Lighthouse()
    yield lighthouse
    lighthouse.server.shutdown()
    lighthouse.server.server_close()


@pytest.fixture
def watch(lighthouse: Lighthouse) -> Iterator[Callable[..., tuple[Pulse, queue.SimpleQueue[dict[str, float]]]]]:
    made: list[Pulse] = []

    def make(members: list[str], address: str = "") -> tuple[Pulse, queue.SimpleQueue[dict[str, float]]]:
        silences: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()
        made.append(Pulse(address or lighthouse.address, 0.02, 1.0, lambda: "3:own", lambda: members, silences.put))
        return made[-1], silences

    yield make
    for pulse in made:
        pulse.close()


def test_heartbeats_are_read_from_the_status_page() -> None:
    """Each line of the page gives a replica id, unescaped, and the seconds since it was heard of."""
    assert read_heartbeats(PAGE) == {"0:a/b": 0.021028435, "1:c": 3.5}
    assert read_heartbeats("") == {}


def test_a_silent_member_is_told_once(lighthouse: Lighthouse, watch: Callable[..., tuple]) -> None:
    """The silent ones among the members are named, once for an exchange, and again for the next one."""
    pulse, silences = watch(["0:a/b", "1:c"])
    for _ in range(2):
        with pulse.watching():
            assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}
            with pytest.raises(queue.Empty):
                silences.get(timeout=SILENCE_SECONDS)
    assert lighthouse.asked.get() == "/status"


@pytest.mark.parametrize("members", [["0:a/b"], ["0:a/b", "2:new"], []])
def test_members_that_live_or_are_new_are_waited_for(
    lighthouse: Lighthouse, watch: Callable[..., tuple], members: list[str]
) -> None:
    """A member that is heard of, and one that the lighthouse does not know yet, are no reason; nor is a stranger."""
    pulse, silences = watch(members)
    with pulse.watching():
        for _ in range(3 if members else 0):
            lighthouse.asked.get(timeout=DEADLINE)
    assert silences.empty()


def test_it_is_not_asked_between_exchanges(lighthouse: Lighthouse, watch: Callable[..., tuple]) -> None:
    """The lighthouse hears nothing from exchanges that end before the first look, and from none afterwards."""
    pulse, silences = watch(["1:c"])
    for _ in range(50):
        with pulse.watching():
            pass
    with pulse.watching():
        silences.get(timeout=DEADLINE)
    assert lighthouse.asked.get() == "/status"
    assert lighthouse.asked.empty()


def test_a_lighthouse_that_is_away_breaks_nothing_off(lighthouse: Lighthouse, watch: Callable[..., tuple]) -> None:
    """While the lighthouse cannot be asked nobody counts as silent; when it is back, looking goes on."""
    lighthouse.page = ""
    pulse, silences = watch(["1:c"])
    with pulse.watching():
        lighthouse.asked.get(timeout=DEADLINE)
        lighthouse.page = PAGE
        assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}
    gone, nothing = watch(["1:c"], "http://127.0.0.1:9")
    with gone.watching():
        threading.Event().wait(0.2)
    assert nothing.empty()


def test_a_lighthouse_that_dies_in_mid_answer_ends_no_watching(
    lighthouse: Lighthouse, watch: Callable[..., tuple]
) -> None:
    """What came of an answer that is cut says nothing; the next whole one does."""
    lighthouse.promised = 2 * len(PAGE)
    pulse, silences = watch(["1:c"])
    with pulse.watching():
        for _ in range(3):
            lighthouse.asked.get(timeout=DEADLINE)
        assert silences.empty()
        lighthouse.promised = len(PAGE.encode())
        assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}


@pytest.mark.parametrize(("own", "silent"), [(0.4, True), (0.6, False)])
def test_a_lighthouse_that_hears_late_breaks_nothing_off(
    lighthouse: Lighthouse, watch: Callable[..., tuple], own: float, silent: bool
) -> None:
    """By a page on which this group's own heartbeat is older than half of the patience, nobody is gone."""
    lighthouse.page = f"  1:c: seen 3.5s ago\n  3:own: seen {own}s ago\n"
    pulse, silences = watch(["1:c"])
    with pulse.watching():
        for _ in range(1 if silent else 3):
            lighthouse.asked.get(timeout=DEADLINE)
        if silent:
            assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}
    assert silences.empty()


def test_an_exchange_that_ends_meanwhile_is_the_one_that_is_broken_off() -> None:
    """Who has found something wrong acts while that exchange lasts, and not on the next one of the same members."""
    found, over = threading.Event(), threading.Event()
    went_on: list[bool] = []

    def act(wrong: dict[str, str]) -> None:
        found.set()
        went_on.append(over.wait(SILENCE_SECONDS))

    watch = Watch("test_watch", lambda: 0.0, 1.0, lambda: {"1:c": "silent"}, act)

    def exchange() -> None:
        with watch.watching():
            assert found.wait(DEADLINE)
        over.set()

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join(DEADLINE)
    watch.close()
    assert went_on == [False]


def test_an_error_ends_no_watching() -> None:
    """A full disk, a store that is gone: the next exchanges are watched all the same."""
    acted: queue.SimpleQueue[str] = queue.SimpleQueue()
    errors = [OSError("disk full"), RuntimeError("store gone")]

    def fails() -> dict[str, str]:
        if errors:
            raise errors.pop()
        return {"1:c": "silent"}

    def act(wrong: dict[str, str]) -> None:
        acted.put(wrong["1:c"])
        raise OSError("disk full")

    watch = Watch("test_watch", lambda: 0.0, 1.0, fails, act)
    for _ in range(2):
        with watch.watching():
            assert acted.get(timeout=DEADLINE) == "silent"
    watch.close()
    assert errors == []
