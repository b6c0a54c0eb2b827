# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An exchange is broken off if a member is silent, or if the others have gone on without this
group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from titan_ft.membership.pulse import (
    LighthouseStatus,
    Pulse,
    StatusPage,
    Watch,
    expects_former,
    find_cut_off,
    find_outsiders,
    find_successors,
    has_leaver,
)
from titan_ft.protocol.member import Member

DEADLINE = 20.0  # seconds; only a bug reaches it
SILENCE_SECONDS = 0.3  # time without an event, long enough for many looks

OWN = Member(3, 1.5, "own", "digest", job="job")

PAGE = """
Current quorum_id: 7 <br>
Next quorum status: New quorum not ready, only have 0 participants <br>

<h3>Previous Quorum</h3>

Previous quorum id: 7 <br>
Num participants: 2 <br>

<div class="member
 recovering
">
  <b>0:a&#x2F;b</b> <br/>
  Step: 0 <br/>

  <button hx-post="/replica/0:a&#x2F;b/kill"
          hx-trigger="click">
    Kill
  </button>
</div>

<div class="member

">
  <b>3:&lt;own&gt;</b> <br/>
  Step: 1 <br/>
</div>

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
    """Answers with a status page that tests set, and records the requests."""

    def __init__(self) -> None:
        self.page = PAGE
        self.promised: int | None = (
            None  # number of bytes that the answer claims; it ends with the page all the same
        )
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the base class calls this name
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
def watch(lighthouse: Lighthouse) -> Iterator[Callable[..., tuple[Pulse, queue.SimpleQueue[Any]]]]:
    made: list[Pulse] = []

    def make(members: list[str], address: str = "") -> tuple[Pulse, queue.SimpleQueue[Any]]:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        page = StatusPage(address or lighthouse.address)
        made.append(
            Pulse(
                page,
                0.02,
                0.02,
                1.0,
                lambda: OWN,
                lambda: members,
                told.put,
                told.put,
                partial(told.put, "left"),
            )
        )
        return made[-1], told

    yield make
    for pulse in made:
        pulse.close()


def test_the_status_page_is_read() -> None:
    """The page has unescaped replica ids, seconds since each heartbeat, and the last quorum."""
    assert LighthouseStatus.parse(PAGE) == LighthouseStatus(
        {"0:a/b": 0.021028435, "1:c": 3.5}, ("0:a/b", "3:<own>")
    )
    assert LighthouseStatus.parse("") == LighthouseStatus({}, (), 0)
    waiting = (
        "New quorum not ready, only have 2 participants, need at least half of 5 healthy workers "
    )
    assert (
        LighthouseStatus.parse(f"{waiting}[2/3 participants healthy][5 heartbeating]").num_asking
        == 2
    )


def test_a_line_in_a_strangers_name_makes_nobody_silent() -> None:
    """A stranger's name may contain line feeds.

    The youngest line about a group is the lighthouse's own.
    """
    forged = "    x\n    1:c: seen 99999.5s ago\n    y: seen 0.01s ago\n"
    for page in (forged + PAGE, PAGE + forged):
        assert LighthouseStatus.parse(page).heartbeats["1:c"] == 3.5


OTHER = Member(1, 2.5, "other", "digest", job="job")


@pytest.mark.parametrize(
    ("quorum", "slots"),
    [
        ([OTHER], [1]),
        ([OTHER, replace(OTHER, slot=0)], [0, 1]),
        ([OTHER, replace(OTHER, slot=4)], [1]),
        ([replace(OTHER, unique="another process")], [1]),
        ([OTHER, OWN], []),
        ([OTHER, replace(OWN, unique="another process")], [1]),
        ([replace(OTHER, slot=4)], []),
        ([replace(OTHER, job="another")], []),
        ([replace(OTHER, config="another")], []),
        ([replace(OTHER, shape="another")], []),
        ([], []),
    ],
)
def test_who_has_gone_on_without_this_group(quorum: list[Member], slots: list[int]) -> None:
    """Groups of the exchange that form a quorum without this group.

    Not strangers, and not joiners alone.
    """
    names, others = [member.replica_id for member in quorum], [OTHER, replace(OTHER, slot=0)]
    assert find_successors(OWN, others, names) == slots
    assert find_successors(OWN, others, [*names, "a stranger"]) == slots


def test_who_lives_outside_of_a_quorum() -> None:
    """Groups of the job with a fresh heartbeat.

    Not members of the quorum under an earlier name.
    """
    beats = {
        OWN.replica_id: 0.1,
        replace(OWN, edition=1).replica_id: 0.1,
        OTHER.replica_id: 0.4,
        replace(OTHER, slot=2).replica_id: 0.6,
        replace(OTHER, slot=4, job="another").replica_id: 0.1,
        replace(OTHER, slot=5, config="another").replica_id: 0.1,
        replace(OTHER, slot=6, shape="another").replica_id: 0.1,
        "a stranger": 0.1,
    }
    assert find_outsiders(OWN, [OWN], LighthouseStatus(beats), 0.5) == [1]
    assert find_outsiders(OWN, [OWN], LighthouseStatus(beats), 1.0) == [1, 2]
    assert (
        find_outsiders(
            OWN, [OWN, replace(OTHER, unique="another process")], LighthouseStatus(beats), 0.5
        )
        == []
    )


def test_who_is_outside_because_of_a_dead_link() -> None:
    """Silent groups whose last name reports a dead link and a later state.

    Not a group whose successor reports no dead link.
    """
    reporting, second = OTHER.reporting(5, [OWN]), replace(OTHER, slot=2).reporting(7, [OWN])
    successor = replace(second, started=second.started + 9, edition=0, report=None)
    names = (
        OWN,
        OTHER,
        reporting,
        second,
        replace(OTHER, slot=3),
        replace(second, slot=4, job="another"),
    )
    silent = LighthouseStatus({member.replica_id: 60.0 for member in names})
    assert find_cut_off(OWN, [OWN], silent, 4) == [reporting, second]
    assert find_cut_off(OWN, [OWN], silent, 5) == [second]
    assert find_cut_off(OWN, [OWN, OTHER], silent, 4) == [second]
    assert find_cut_off(
        OWN, [OWN], LighthouseStatus(silent.heartbeats | {successor.replica_id: 0.1}), 4
    ) == [reporting]


def test_a_quorum_that_counts_on_a_former_process() -> None:
    """A former process of this group.

    Not this process under another name, and no other group's process.
    """
    former, others = (
        replace(OWN, started=1.0, unique="former"),
        [OTHER, replace(OWN, started=1.0, job="another")],
    )
    quorum = [member.replica_id for member in (*others, OWN.reporting(5, [OTHER]))]
    assert not expects_former(OWN, LighthouseStatus({}, (*quorum, "a stranger")))
    assert expects_former(OWN, LighthouseStatus({}, (*quorum, former.replica_id)))


def test_an_exchange_that_the_others_have_left_is_broken_off(
    lighthouse: Lighthouse, watch: Callable[..., tuple]
) -> None:
    """A quorum of the others alone is reported once. A quorum with this group, or none, is not."""
    lighthouse.page = ""
    pulse, told = watch([OTHER.replica_id])

    def show(*members: Member) -> None:
        for _ in range(3):  # the former page is looked at before
            lighthouse.asked.get(timeout=DEADLINE)
        assert told.empty()
        lighthouse.page = "".join(f"  <b>{member.replica_id}</b> <br/>\n" for member in members)

    with pulse.watching():
        show(OTHER, OWN)
        show(OTHER)
        assert told.get(timeout=DEADLINE) == [1]
        with pytest.raises(queue.Empty):
            told.get(timeout=SILENCE_SECONDS)


@pytest.mark.parametrize(
    ("beats", "num_asking", "leaver"),
    [
        ([OTHER, OWN], 0, False),
        ([OTHER, OWN], 1, True),
        ([OTHER, OWN, replace(OTHER, slot=2)], 1, False),  # a joiner asks
        ([OTHER, OWN, replace(OTHER, slot=2)], 2, True),
        ([OTHER, OWN, replace(OTHER, job="another")], 1, False),
    ],
)
def test_a_member_that_asks_for_the_next_quorum_has_left(
    beats: list[Member], num_asking: int, leaver: bool
) -> None:
    """More groups ask than are outside the exchange. So one of them is inside."""
    heartbeats = {member.replica_id: 0.1 for member in beats}
    assert (
        has_leaver(OWN, [OTHER.replica_id], LighthouseStatus(heartbeats, (), num_asking), 0.5)
        is leaver
    )
    long_gone = heartbeats | {replace(OTHER, slot=9).replica_id: 60.0}
    assert (
        has_leaver(OWN, [OTHER.replica_id], LighthouseStatus(long_gone, (), num_asking), 0.5)
        is leaver
    )


def test_an_exchange_that_one_member_has_left_is_broken_off(
    lighthouse: Lighthouse, wait_until: Callable[..., None]
) -> None:
    """Four looks in a row must see it. A member that completes the exchange earlier also asks."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    page, members = StatusPage(lighthouse.address), [OTHER.replica_id]
    alone = f"  {OTHER.replica_id}: seen 0.1s ago\n[0/0 participants healthy]\n"
    asks = alone.replace("[0/0", "[1/1")
    lighthouse.page = alone
    pulse = Pulse(
        page,
        0.01,
        0.01,
        0.1,
        lambda: OWN,
        lambda: members,
        told.put,
        told.put,
        partial(told.put, "left"),
    )

    def pages(*seen: str) -> None:
        for text in seen:
            lighthouse.asked.get(timeout=DEADLINE)
            lighthouse.page = text

    try:
        for _ in range(2):  # looks in one exchange do not count in the next one
            with pulse.watching():
                while not lighthouse.asked.empty():
                    lighthouse.asked.get()
                pages(asks, alone, alone)
            assert told.empty()
        with pulse.watching():
            lighthouse.page = asks
            assert told.get(timeout=DEADLINE) == "left"
            with pytest.raises(queue.Empty):
                told.get(timeout=SILENCE_SECONDS)
    finally:
        pulse.close()


def test_a_silent_member_is_told_once(lighthouse: Lighthouse, watch: Callable[..., tuple]) -> None:
    """The silent members are named once in an exchange, and again in the next one."""
    pulse, silences = watch(["0:a/b", "1:c"])
    for _ in range(2):
        with pulse.watching():
            assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}
            with pytest.raises(queue.Empty):
                silences.get(timeout=SILENCE_SECONDS)
    assert lighthouse.asked.get() == "/status"


def test_a_page_is_read_up_to_a_bound(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers' names may make it endless, and every group reads it."""
    monkeypatch.setattr("titan_ft.membership.pulse._PAGE_BYTES", 1000)
    beat = "    {}: seen 0.5s ago\n"
    lighthouse.page = beat.format("1:c") + 2000 * "x" + "\n" + beat.format("2:d")
    status = StatusPage(lighthouse.address).read(DEADLINE)
    assert status is not None
    assert [*status.heartbeats] == ["1:c"]


def test_the_first_look_may_come_long_before_the_next(lighthouse: Lighthouse) -> None:
    """A member may have been silent since long before the exchange."""
    lighthouse.page = "    1:c: seen 3.5s ago\n"
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    page = StatusPage(lighthouse.address)
    pulse = Pulse(
        page,
        0.01,
        10 * DEADLINE,
        1.0,
        lambda: OWN,
        lambda: ["1:c"],
        told.put,
        told.put,
        partial(told.put, "left"),
    )
    try:
        with pulse.watching():
            assert told.get(timeout=DEADLINE) == {"1:c": 3.5}
    finally:
        pulse.close()


def test_it_looks_again_when_a_member_would_be_silent(
    lighthouse: Lighthouse, wait_until: Any
) -> None:
    """With NCCL nothing else ends the exchange.

    The pulse looks at most ten times in an interval.
    """
    lighthouse.page = "    1:c: seen 0.9s ago\n    2:d: seen 0.2s ago\n"
    pauses: list[float] = []

    class Noting(Pulse):
        def _look_at_page(self) -> Callable[[], None] | None:
            act = super()._look_at_page()
            pauses.append(self._pause)
            return act

    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    page, members = StatusPage(lighthouse.address), ["1:c", "2:d"]
    pulse = Noting(
        page,
        0.01,
        0.5,
        1.0,
        lambda: OWN,
        lambda: members,
        told.put,
        told.put,
        partial(told.put, "left"),
    )
    try:
        with pulse.watching():
            wait_until(lambda: pauses, "a look")
            lighthouse.page = "    1:c: seen 0.999s ago\n    2:d: seen 0.2s ago\n"
            wait_until(lambda: 0.05 in pauses, "one that is soon followed by another")
            lighthouse.page = "    1:c: seen 1.2s ago\n    2:d: seen 0.2s ago\n"
            assert told.get(timeout=DEADLINE) == {"1:c": 1.2}
        assert pauses[0] == pytest.approx(0.1)
    finally:
        pulse.close()


@pytest.mark.parametrize("members", [["0:a/b"], ["0:a/b", "2:new"], []])
def test_members_that_live_or_are_new_are_waited_for(
    lighthouse: Lighthouse, watch: Callable[..., tuple], members: list[str]
) -> None:
    """The exchange goes on if its members live, or if the lighthouse does not know one of them yet.

    A stranger does not break it off either.
    """
    pulse, silences = watch(members)
    with pulse.watching():
        for _ in range(3 if members else 0):
            lighthouse.asked.get(timeout=DEADLINE)
    assert silences.empty()


def test_it_is_not_asked_between_exchanges(
    lighthouse: Lighthouse, watch: Callable[..., tuple]
) -> None:
    """Exchanges that end before the first look cause no request.

    None follows after an exchange.
    """
    pulse, silences = watch(["1:c"])
    for _ in range(50):
        with pulse.watching():
            pass
    with pulse.watching():
        silences.get(timeout=DEADLINE)
    assert lighthouse.asked.get() == "/status"
    assert lighthouse.asked.empty()


def test_a_lighthouse_that_is_away_breaks_nothing_off(
    lighthouse: Lighthouse, watch: Callable[..., tuple]
) -> None:
    """Without an answer no member counts as silent. The looks go on when the lighthouse is back."""
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
    """A truncated answer is ignored. The next complete one counts."""
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
    """This group's own heartbeat is older than half of the patience.

    So no member counts as gone.
    """
    lighthouse.page = f"  1:c: seen 3.5s ago\n  {OWN.replica_id}: seen {own}s ago\n"
    pulse, silences = watch(["1:c"])
    with pulse.watching():
        for _ in range(1 if silent else 3):
            lighthouse.asked.get(timeout=DEADLINE)
        if silent:
            assert silences.get(timeout=DEADLINE) == {"1:c": 3.5}
    assert silences.empty()


def test_an_exchange_that_ends_meanwhile_is_the_one_that_is_broken_off() -> None:
    """An action runs during the exchange that was looked at, and never during the next one."""
    found, over = threading.Event(), threading.Event()
    went_on: list[bool] = []

    def act() -> None:
        found.set()
        went_on.append(over.wait(SILENCE_SECONDS))

    watch = Watch("test_watch", lambda: 0.0, 1.0, lambda: act)

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
    """After a full disk or a lost store, the next exchanges are still watched."""
    acted: queue.SimpleQueue[str] = queue.SimpleQueue()
    errors = [OSError("disk full"), RuntimeError("store gone")]

    def look() -> Callable[[], None]:
        if errors:
            raise errors.pop()
        return partial(act, "silent")

    def act(wrong: str) -> None:
        acted.put(wrong)
        raise OSError("disk full")

    watch = Watch("test_watch", lambda: 0.0, 1.0, look)
    for _ in range(2):
        with watch.watching():
            assert acted.get(timeout=DEADLINE) == "silent"
    watch.close()
    assert errors == []
