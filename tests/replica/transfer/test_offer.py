# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group offers in the midst of its round, how a joiner finds it, and how it comes to it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from state_donor import DEADLINE, TOKEN, Donor, check_equal, make_snapshot, wait_until

from titan_ft.engine import donor as donors
from titan_ft.engine import offer as offers
from titan_ft.engine.offer import NO_OFFER, Offer, OfferSearch, ask_all
from titan_ft.protocol.decision import Round, judge
from titan_ft.protocol.errors import RefusedError
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.row import Row, Standing
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.state_fetch import ask_offer
from titan_ft.transfer.wire import Message, TransferError

HELD = Message(step=5, lineage=1005, digest=77)


# The server


def test_who_offers_nothing_says_so(donor: Donor) -> None:
    """Also when it has a copy for others, and when it has taken an offer back."""
    donor.publish(make_snapshot(5, 10))
    assert ask_offer(donor.address, TOKEN) is None
    donor.server.offer(HELD)
    assert ask_offer(donor.address, TOKEN) == (5, 1005, 77, 0)
    donor.server.offer(None)
    assert ask_offer(donor.address, TOKEN) is None


def test_an_offer_is_for_who_knows_the_token(donor: Donor) -> None:
    """As all else that a donor says."""
    donor.server.offer(HELD)
    with pytest.raises(RefusedError):
        ask_offer(donor.address, "another secret")


def test_what_is_offered_is_copied_when_it_is_wanted(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """However long the step is that the copy has to wait for; to ask what is offered wants nothing yet."""
    donor = start_donor(wait_seconds=0.0)
    donor.server.offer(HELD)
    ask_offer(donor.address, TOKEN)
    assert not donor.server.wanted
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: donor.server.wanted)
    time.sleep(0.05)  # longer than an answer takes that would be too soon
    assert not fetched.done()
    sent = donor.publish(make_snapshot(5, 3000))
    assert not donor.server.wanted
    check_equal(fetched.result(DEADLINE), sent)
    check_equal(donor.fetch(5), sent)  # another joiner gets the same copy
    assert not donor.server.wanted


def test_an_offer_that_is_taken_back_ends_the_wait(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The others are at their next update: the joiner asks again behind it."""
    donor = start_donor(wait_seconds=0.0)
    donor.server.offer(HELD)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: donor.server.wanted)
    donor.server.offer(None)
    assert not donor.server.wanted
    with pytest.raises(TransferError, match="no state of step 5"):
        fetched.result(DEADLINE)


def test_what_can_be_copied_at_once_is_copied_for_who_wants_it(donor: Donor) -> None:
    """While training computes; what another joiner fetches is not replaced, and so not offered."""
    sent, copies = make_snapshot(5, 3000), []

    def copy(step: int) -> None:
        copies.append(step)
        if step == 5:
            donor.publish(sent)

    donor.server.offer(Message(step=5, lineage=1005, digest=0, milliseconds=700), copy)
    assert ask_offer(donor.address, TOKEN) == (5, 1005, 0, 700)
    assert copies == []
    check_equal(donor.fetch(5), sent)
    check_equal(donor.fetch(5), sent)
    assert copies == [5]
    assert ask_offer(donor.address, TOKEN) == (5, 1005, 0, 700)
    donor.server.offer(Message(step=6, lineage=1006, digest=0), copy)
    assert ask_offer(donor.address, TOKEN) is None
    donor.server.withdraw()
    assert ask_offer(donor.address, TOKEN) == (6, 1006, 0, 0)


def test_a_group_that_is_about_to_make_the_update_is_waited_for(donor: Donor, background: ThreadPoolExecutor) -> None:
    """A newcomer asks when its quorum comes, and the others may still apply the update before: each may be a donor."""
    donor.server.offer(Message(step=5, lineage=1005, digest=0), lambda step: None)
    asked = background.submit(ask_offer, donor.address, TOKEN, 6)
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    donor.server.offer(Message(step=6, lineage=1006, digest=0), lambda step: None)
    assert asked.result(DEADLINE) == (6, 1006, 0, 0)
    assert ask_offer(donor.address, TOKEN, 6) == (6, 1006, 0, 0)
    assert ask_offer(donor.address, TOKEN, 7) == (6, 1006, 0, 0), "nobody waits for long"
    donor.server.offer(None)
    assert ask_offer(donor.address, TOKEN, 7) is None


def test_what_cannot_be_copied_at_once_is_waited_for(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The update is being made: the round that ends with it shows the donor that a joiner wants the state before."""
    donor, asked = start_donor(), threading.Event()
    donor.server.offer(Message(step=5, lineage=1005, digest=0), lambda step: asked.set())
    fetched = background.submit(donor.fetch, 5)
    assert asked.wait(DEADLINE)
    sent = donor.publish(make_snapshot(5, 3000))
    check_equal(fetched.result(DEADLINE), sent)


# The search


def test_members_that_offer_the_same_state_are_found(start_donor: Callable[..., Donor]) -> None:
    """The state that most have of the step that is asked for; whoever cannot be reached or has another is left out."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    servers = [start_donor() for _ in range(5)]
    for donor, step, lineage in zip(servers, (5, 6, 5, 5), (9, 7, 7, 7), strict=False):
        donor.server.offer(Message(step=step, lineage=lineage, digest=0, milliseconds=30), lambda step: None)
    addresses = [gone, *(donor.address for donor in servers)]
    asked = {slot: partial(str, address) for slot, address in enumerate(addresses, 10)}
    assert ask_all(asked, TOKEN, 5) == ask_all(asked, TOKEN) == Offer((13, 14), 5, 7, 0, 30)
    assert ask_all(asked, TOKEN, 4) == NO_OFFER
    assert ask_all({slot: asked[slot] for slot in (11, 12, 13)}, TOKEN).slots == (12,), "the latest, if as many have it"
    assert ask_all(asked, "another secret", 5) == NO_OFFER


def search(monkeypatch: pytest.MonkeyPatch, donors: dict[int, str], first: int = 0, most: int = 1) -> OfferSearch:
    """Return a search among groups whose state servers are at these addresses."""
    monkeypatch.setattr(offers, "look_up", lambda peer, rank: donors[int(peer.unique)])
    return OfferSearch(lambda: {slot: Peer(str(slot), "") for slot in donors}, TOKEN, first, most)


def found_by(search: OfferSearch, beyond: int = 0) -> Offer | None:
    """Return what one search finds."""
    search.begin()
    search.rest(0.0)
    assert not search.wait(DEADLINE), "it waits for a search under way, and for nothing else"
    assert search.poll(beyond) is None  # it has just begun
    assert search.wait(DEADLINE)
    return search.poll(beyond)


def test_of_all_groups_that_live_one_with_an_offer_is_found(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be reached, that knows another token or has nothing to offer, is followed by the next."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    stranger, busy, one, other = start_donor(token="another secret"), *(start_donor() for _ in range(3))
    for number, donor in enumerate((stranger, one, other)):
        donor.server.offer(Message(step=5 + number, lineage=1, digest=2))
    addresses = {0: gone, 1: stranger.address, 2: busy.address, 3: one.address, 7: other.address}
    this = search(monkeypatch, addresses)
    assert found_by(this) == Offer((3,), 6, 1, 2)
    assert found_by(this, beyond=6) is None
    assert found_by(search(monkeypatch, addresses, first=5)) == Offer(
        (7,), 7, 1, 2
    )  # joiners ask different groups first
    assert found_by(search(monkeypatch, addresses, first=8)) == Offer((3,), 6, 1, 2)
    assert found_by(search(monkeypatch, {0: gone})) is None


def test_groups_that_offer_the_same_state_are_found_together(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as may be donors of it; those behind them are asked if none of the first offers anything."""
    servers = [start_donor() for _ in range(5)]
    for donor in servers[2:]:
        donor.server.offer(Message(step=5, lineage=7, digest=0), lambda step: None)
    addresses = {slot: donor.address for slot, donor in enumerate(servers)}
    assert found_by(search(monkeypatch, addresses, first=0, most=8)) == Offer((2, 3, 4), 5, 7, 0)
    assert found_by(search(monkeypatch, addresses, first=3, most=2)) == Offer((4,), 5, 7, 0)
    assert found_by(search(monkeypatch, addresses, first=4, most=2)) == Offer((2, 3), 5, 7, 0)


def test_one_search_in_which_nobody_offers_anything_is_enough(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of newcomers: all hold the state, or nobody does. A search that has found one is no such search."""
    donor, now = start_donor(), 100.0
    donor.server.offer(Message(step=5, lineage=7, digest=0), lambda step: None)
    monkeypatch.setattr(offers, "look_up", lambda peer, rank: donor.address)
    peers = {1: Peer("1", "")}
    this = OfferSearch(lambda: peers, TOKEN, 0, 8, once=True)
    monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: now))
    assert found_by(this) == Offer((1,), 5, 7, 0)
    peers.clear()
    assert found_by(this) is None
    now += 100
    assert this.poll(0) is None
    assert this._search is None


def test_a_search_in_vain_is_followed_by_another_one_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting group does not keep the lighthouse busy; and what a former search has found does not count."""
    this, now = search(monkeypatch, {}), 100.0
    monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: now))
    assert found_by(this) is None
    assert this.poll(0) is None
    assert this._search is None
    now += 2
    this.poll(0)
    assert this._search is not None
    this.begin()
    assert this._search is None


# When a group offers what it holds


class Server:
    """A state server that notes what it is told."""

    def __init__(self) -> None:
        self.offers: list[Message | None] = []
        self.published: list[int] = []
        self.wanted = False
        self.snapshot = None

    def offer(self, offer: Message | None) -> None:
        self.offers.append(offer)

    def publish(self, snapshot: Any, seconds: float) -> None:
        self.published.append(snapshot.step)

    def withdraw(self) -> None:
        return None


def made(*rows: dict[str, Any]) -> Round:
    """Return a round of groups that hold step 5 but for what is said of each."""
    held = {"lineage": 1005, "digest": 77, "training": 1}
    all_rows = [
        Row(slot, **{"standing": Standing.READY, "step": 5, **held, **changes}) for slot, changes in enumerate(rows)
    ]
    members = tuple(Member(row.slot, 0.0, f"process {row.slot}", "c0ffee") for row in all_rows)
    return Round(Quorum("1/a", 0, members, 5), all_rows, judge(all_rows), [])


@pytest.mark.parametrize(
    ("rows", "offers_it"),
    [
        ([{"opening": 1}, {"opening": 1}], True),
        ([{"opening": 1}, {"early": 1}], True),
        ([{"opening": 1}, {"standing": Standing.BEHIND, "step": 0}], True),
        ([{"opening": 1}, {"opening": 1, "digest": 0}], False),  # nobody knows whether its bytes are the others'
        ([{"opening": 1}, {}], False),  # that one is at the end of its round
        ([{}, {}], False),
        ([{"opening": 1, "digest": 76}, {"opening": 1}, {"opening": 1}], False),  # other bytes than the others'
    ],
)
def test_what_is_compared_behind_an_update_is_offered_until_the_next_round(
    rows: list[dict[str, Any]], offers_it: bool
) -> None:
    """From then on the group makes steps, and what the groups agree on stays as it is."""
    state = SimpleNamespace(copy=lambda step, lineage, part: SimpleNamespace(step=step, lineage=lineage, part=part))
    server, position = Server(), SimpleNamespace(step=5, lineage=1005)
    this = donors.Donor(state, server)  # type: ignore[arg-type]  # do what it asks of them
    this.serve(made(*rows), position, {})  # type: ignore[arg-type]
    assert server.offers == ([HELD] if offers_it else [])
    this.serve(made({}, {}), position, {})  # type: ignore[arg-type]
    assert server.offers == ([HELD, None] if offers_it else [])


def test_a_copy_that_was_made_between_two_rounds_is_served_until_nobody_fetches_it() -> None:
    """Also when the joiner is in the others' next round before it has all of it."""
    state = SimpleNamespace(copy=lambda step, lineage, part: SimpleNamespace(step=step, lineage=lineage, part=part))
    server, position = Server(), SimpleNamespace(step=5, lineage=1005)
    this = donors.Donor(state, server)  # type: ignore[arg-type]
    this.copy(position)  # type: ignore[arg-type]
    fetching = {"standing": Standing.CATCHING_UP, "step": 0, "donor": 0, "from_step": 5}
    this.serve(made({}, {}, fetching), position, {})  # type: ignore[arg-type]
    assert server.published == [5]
    assert this._served is not None
    this.serve(made({}, {}), position, {})  # type: ignore[arg-type]
    assert this._served is None
