# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The offers of a state server, a joiner's search for them, and the copy that it gets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from state_donor import DEADLINE, TOKEN, Donor, check_equal, make_snapshot, wait_until

from titan_ft.engine import offer as offers
from titan_ft.engine.offer import OfferSearch, ask_all
from titan_ft.protocol.errors import RefusedError
from titan_ft.protocol.healing import NO_OFFER, Offer
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.snapshot import WHOLE, Part
from titan_ft.transfer.state_fetch import ask_offer, fetch
from titan_ft.transfer.wire import Message, TransferError, handshake_as_joiner

HELD = Message(step=5, lineage=1005, digest=77)


def find_offer(address: str, token: str, step: int = 0) -> tuple[int, ...] | None:
    """Return the result of `ask_offer` without the time since the offer began."""
    found = ask_offer(address, token, step)
    return None if found is None else found[:4]


# The server


def test_who_offers_nothing_says_so(donor: Donor) -> None:
    """Neither a copy for other joiners nor a withdrawn offer is an offer."""
    donor.publish(make_snapshot(5, 10))
    assert ask_offer(donor.address, TOKEN) is None
    donor.server.offer(HELD)
    assert find_offer(donor.address, TOKEN) == (5, 1005, 77, 0)
    donor.server.offer(None)
    assert ask_offer(donor.address, TOKEN) is None


def test_an_offer_is_for_who_knows_the_token(donor: Donor) -> None:
    """All answers of a donor need the token."""
    donor.server.offer(HELD)
    with pytest.raises(RefusedError):
        ask_offer(donor.address, "another secret")


def test_what_is_offered_is_copied_when_it_is_wanted(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The copy may wait for a long step. A question about the offer requests no copy."""
    donor = start_donor(wait_seconds=0.0)
    donor.server.offer(HELD)
    ask_offer(donor.address, TOKEN)
    assert donor.server.wanted_part is None
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: donor.server.wanted_part == WHOLE)
    time.sleep(0.05)  # longer than an answer takes that would be too early
    assert not fetched.done()
    sent = donor.publish(make_snapshot(5, 3000))
    assert donor.server.wanted_part is None
    check_equal(fetched.result(DEADLINE), sent)
    check_equal(donor.fetch(5), sent)  # another joiner gets the same copy
    assert donor.server.wanted_part is None


def test_an_offer_that_is_taken_back_ends_the_wait(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The others make their next update. The joiner asks again after it."""
    donor = start_donor(wait_seconds=0.0)
    donor.server.offer(HELD)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: donor.server.wanted_part == WHOLE)
    donor.server.offer(None)
    assert donor.server.wanted_part is None
    with pytest.raises(TransferError, match="no state of step 5"):
        fetched.result(DEADLINE)


def test_what_can_be_copied_at_once_is_copied_for_who_wants_it(donor: Donor) -> None:
    """Training goes on. While a copy must stay for another joiner, nothing is offered."""
    sent, copies = make_snapshot(5, 3000), []

    def copy(step: int, part: Part) -> None:
        copies.append(step)
        if step == 5:
            donor.publish(sent)

    donor.server.offer(Message(step=5, lineage=1005, digest=0, milliseconds=700), copy)
    assert find_offer(donor.address, TOKEN) == (5, 1005, 0, 700)
    assert copies == []
    check_equal(donor.fetch(5), sent)
    check_equal(donor.fetch(5), sent)
    assert copies == [5]
    assert find_offer(donor.address, TOKEN) == (5, 1005, 0, 700)
    donor.server.offer(Message(step=6, lineage=1006, digest=0), copy)
    assert ask_offer(donor.address, TOKEN) is None
    donor.server.keep_snapshot(False)
    assert find_offer(donor.address, TOKEN) == (6, 1006, 0, 0), (
        "the other joiner has one more donor"
    )


def test_a_group_that_is_about_to_make_the_update_is_waited_for(
    donor: Donor, background: ThreadPoolExecutor
) -> None:
    """A newcomer asks when its quorum comes. The others may still apply the update before it."""
    donor.server.offer(Message(step=5, lineage=1005, digest=0), lambda step, part: None)
    asked = background.submit(ask_offer, donor.address, TOKEN, 6)
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    donor.server.offer(Message(step=6, lineage=1006, digest=0), lambda step, part: None)
    found = asked.result(DEADLINE)
    assert found is not None
    assert found[:3] == (6, 1006, 0)
    assert find_offer(donor.address, TOKEN, 6) == (6, 1006, 0, 0)
    assert find_offer(donor.address, TOKEN, 7) == (6, 1006, 0, 0), "no joiner waits for long"
    donor.server.offer(None)
    assert ask_offer(donor.address, TOKEN, 7) is None


def test_what_cannot_be_copied_at_once_is_waited_for(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The training thread makes an update.

    The round after it shows the donor that a joiner wants the state.
    """
    donor, asked = start_donor(), threading.Event()
    donor.server.offer(Message(step=5, lineage=1005, digest=0), lambda step, part: asked.set())
    fetched = background.submit(donor.fetch, 5)
    assert asked.wait(DEADLINE)
    sent = donor.publish(make_snapshot(5, 3000))
    check_equal(fetched.result(DEADLINE), sent)


def test_a_joiner_with_several_donors_says_which_part_each_may_copy(donor: Donor) -> None:
    """The place of the donor among all donors is its part. A lone donor copies the whole state."""
    parts: list[Part] = []

    def copy(step: int, part: Part) -> None:
        parts.append(part)
        donor.publish(make_snapshot(5, 3000))

    donor.server.offer(Message(step=5, lineage=1005, digest=0), copy)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    fetch([gone, donor.address], TOKEN, 5, "joiner", 2, DEADLINE)
    donor.server.withdraw()
    fetch([donor.address], TOKEN, 5, "joiner", 2, DEADLINE)
    assert parts == [Part(1, 2), WHOLE]


def test_a_part_is_followed_by_the_whole_for_who_needs_more(
    start_donor: Callable[..., Donor],
) -> None:
    """Memory is scarce. A joiner that fetches the present part goes on with the whole state."""
    donor, parts = start_donor(), list[Part]()
    whole = make_snapshot(5, 3000)

    def copy(step: int, part: Part) -> None:
        parts.append(part)
        if part == WHOLE:
            donor.publish(whole)
        else:
            donor.publish(replace(whole, payload=whole.payload[:0], part=part))

    donor.server.offer(Message(step=5, lineage=whole.lineage, digest=0), copy)
    with pytest.raises(TransferError):
        fetch([donor.address, "127.0.0.1:1"], TOKEN, 5, "joiner", 2, DEADLINE)
    check_equal(donor.fetch(5), whole)
    assert parts == [Part(0, 2), WHOLE]


@pytest.mark.parametrize("part", [(2, 2), (0, 0)])
def test_a_part_that_there_is_not_is_no_request(donor: Donor, part: tuple[int, int]) -> None:
    """The connection is closed, as after any other invalid line."""
    donor.publish(make_snapshot(5, 10))
    with socket.create_connection(("127.0.0.1", donor.server.port), DEADLINE) as connection:
        sealed = handshake_as_joiner(connection, donor.address, TOKEN)
        sealed.write({"step": 5, "header": True, "part": part})
        assert sealed.read() == {}


def test_a_request_for_an_outdated_state_is_refused_at_once(
    start_donor: Callable[..., Donor], background: ThreadPoolExecutor
) -> None:
    """The update was made before the copy. The joiner asks again without a wait."""
    donor = start_donor(wait_seconds=DEADLINE)
    donor.server.offer(HELD)
    fetched = background.submit(donor.fetch, 5)
    wait_until(lambda: donor.server.wanted_part == WHOLE)
    donor.server.offer(Message(step=6, lineage=1006, digest=0))
    with pytest.raises(TransferError, match="no state of step 5"):
        fetched.result(DEADLINE / 2)


# The search


def test_members_that_offer_the_same_state_are_found(start_donor: Callable[..., Donor]) -> None:
    """The state with the most holders wins, without outdated states.

    Unreachable groups are left out.
    """
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    servers = [start_donor() for _ in range(5)]
    for donor, step, lineage in zip(servers, (5, 6, 5, 5), (9, 7, 7, 7), strict=False):
        donor.server.offer(
            Message(step=step, lineage=lineage, digest=0, milliseconds=30), lambda step, part: None
        )
    addresses = [gone, *(donor.address for donor in servers)]
    asked = {slot: partial(str, address) for slot, address in enumerate(addresses, 10)}
    assert ask_all(asked, TOKEN, 5) == ask_all(asked, TOKEN, 0) == Offer((13, 14), 5, 7, 0, 30)
    assert ask_all({slot: asked[slot] for slot in (11, 12)}, TOKEN, 6) == Offer((12,), 6, 7, 0, 30)
    assert ask_all({11: asked[11]}, TOKEN, 7) == NO_OFFER
    assert ask_all(asked, "another secret", 5) == NO_OFFER


class Searching:
    """A search among groups with state servers at these addresses, and with a clock of its own."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        addresses: dict[int, str],
        known: bool = False,
        max_asked: int = 8,
    ) -> None:
        self.now = 100.0
        self.addresses = addresses
        self.looked_up: list[int] = []
        monkeypatch.setattr(offers, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(offers, "look_up", self._look_up)

        def peers() -> dict[int, Peer]:
            return {
                slot: Peer(str(slot), "", addresses[slot] if known else "")
                for slot in self.addresses
            }

        self.search = OfferSearch(peers, TOKEN, max_asked)

    def _look_up(self, peer: Peer, rank: int, token: str) -> str:
        self.looked_up.append(int(peer.unique))
        return self.addresses[int(peer.unique)]

    def find(self, least_step: int = 1, after: int = -1) -> Offer:
        """Return the result of one search."""
        self.search.restart()
        assert not self.search.wait_for_answers(DEADLINE), (
            "it waits for a search under way, and for nothing else"
        )
        assert self.search.poll(least_step, after) == NO_OFFER  # the search has just begun
        assert self.search.wait_for_answers(DEADLINE)
        return self.search.poll(least_step, after)


def test_of_all_groups_that_live_one_with_an_offer_is_found(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is unreachable, has another token or offers nothing is passed over.

    The next group is asked.
    """
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    stranger, busy, one, other = (
        start_donor(token="another secret"),
        *(start_donor() for _ in range(3)),
    )
    for number, donor in enumerate((stranger, one, other)):
        donor.server.offer(Message(step=5 + number, lineage=1, digest=2))
    addresses = {0: gone, 1: stranger.address, 2: busy.address, 3: one.address, 7: other.address}
    this = Searching(monkeypatch, addresses, max_asked=1)
    assert this.find() == Offer((3,), 6, 1, 2)
    assert this.find(least_step=7) == Offer((7,), 7, 1, 2)
    assert this.find(after=4) == Offer((7,), 7, 1, 2), "joiners ask different groups first"
    assert this.find(after=7) == Offer((3,), 6, 1, 2)
    assert Searching(monkeypatch, {0: gone}).find() == NO_OFFER


def test_groups_that_offer_the_same_state_are_found_together(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several groups are asked at the same time.

    The next ones are asked if none of them offers anything.
    """
    servers = [start_donor() for _ in range(5)]
    for donor in servers[2:]:
        donor.server.offer(Message(step=5, lineage=7, digest=0), lambda step, part: None)
    addresses = {slot: donor.address for slot, donor in enumerate(servers)}
    for max_asked in (8, None):  # None = all groups
        this = Searching(monkeypatch, addresses, max_asked=max_asked)
        assert this.find(after=0) == Offer((2, 3, 4), 5, 7, 0)
    this = Searching(monkeypatch, addresses, max_asked=2)
    assert this.find(after=3) == Offer((4,), 5, 7, 0)
    assert this.find(after=4) == Offer((2, 3), 5, 7, 0)


def test_an_address_that_is_known_is_not_looked_up(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a quorum have exchanged their addresses."""
    donor = start_donor()
    donor.server.offer(HELD)
    for known, looked_up in ((True, []), (False, [3])):
        this = Searching(monkeypatch, {3: donor.address}, known=known)
        assert this.find().slots == (3,)
        assert this.looked_up == looked_up


def test_a_search_in_vain_is_followed_by_another_one_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause doubles up to a second.

    So a waiting group loads neither the lighthouse nor the others.
    """
    this, pauses = Searching(monkeypatch, {}), list[float]()
    assert this.find() == NO_OFFER
    for _ in range(6):
        began = this.now
        while this.search._search is None:
            this.now += 0.05
            this.search.poll(1, -1)
        pauses.append(round(this.now - began, 2))
        assert this.search.wait_for_answers(DEADLINE)
        assert this.search.poll(1, -1) == NO_OFFER
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.06)


def test_a_search_for_an_outdated_state_is_followed_by_another_one_at_once(
    start_donor: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holders have made an update. The result of the former search does not count."""
    donor = start_donor()
    donor.server.offer(HELD)
    this = Searching(monkeypatch, {3: donor.address})
    this.search.poll(5, -1)
    assert this.search.wait_for_answers(DEADLINE)
    donor.server.offer(Message(step=6, lineage=1006, digest=0))
    assert this.search.poll(6, -1) == NO_OFFER
    assert this.search.wait_for_answers(DEADLINE)
    assert this.search.poll(6, -1) == Offer((3,), 6, 1006, 0)


def test_a_round_ends_the_pause_after_a_search_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between short rounds an offer lasts one step, and each search missed it.

    The pause after a failed attempt goes on.
    """
    this = Searching(monkeypatch, {})
    for _ in range(3):
        this.search.end_pause()
        this.search.poll(1, -1)
        assert this.search.wait_for_answers(DEADLINE), "the search begins at once"
        assert this.search.poll(1, -1) == NO_OFFER
    this.search.restart(4.0)
    this.search.end_pause()
    this.search.poll(1, -1)
    assert not this.search.wait_for_answers(DEADLINE)


def test_a_pause_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt has failed. No group is asked during the pause."""
    this = Searching(monkeypatch, {})
    this.search.poll(1, -1)
    this.search.restart(4.0)
    for seconds, begins in ((0.0, False), (3.9, False), (0.2, True)):
        this.now += seconds
        this.search.poll(1, -1)
        assert (this.search._search is not None) is begins
