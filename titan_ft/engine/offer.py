# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's question: which groups offer their state?

The state that groups agree on stays as it is from one update to the next. So a holder offers it (`donor.py`) while the
next step is computed, between the steps of a round of several, and while the groups wait for each other; and a joiner
asks at any of these moments. `Membership.find_holders` says which groups can be asked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from titan_ft.protocol.errors import RefusedError, first_line
from titan_ft.protocol.healing import NO_OFFER, Offer, choose_offer, rotate
from titan_ft.system.threads import call_aside, call_for_each
from titan_ft.transfer.reach import Peer, look_up
from titan_ft.transfer.state_fetch import ask_offer

logger = logging.getLogger(__name__)

_MAX_THREADS = 32  # each asks one group at a time
_FIRST_PAUSE_SECONDS = 0.1  # between two searches; doubles up to the next one
_MAX_PAUSE_SECONDS = 1.0

_REASONS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RefusedError)
"""Errors of a network, of a store and of another run's servers. Such a group offers nothing."""


def ask_all(addresses: Mapping[int, Callable[[], str]], token: str, least_step: int) -> Offer:
    """Ask groups all at once for their offers; returns the one that most of them make.

    Args:
        addresses: for each slot a function that finds the address of the group's state server.
        least_step: committed updates that a useful state has.
    """

    def ask(slot: int) -> Offer:
        try:
            offered = ask_offer(addresses[slot](), token, least_step)
        except _REASONS as error:
            logger.debug("no offer from group %d: %s", slot, first_line(error))
            return NO_OFFER
        return NO_OFFER if offered is None else Offer((slot,), *offered)

    answers = call_for_each(ask, [*addresses], "titan_ft_offers", _MAX_THREADS)
    return choose_offer([offer for offer in answers if offer.slots and offer.step >= least_step])


class OfferSearch:
    """Asks holders for offers, on a thread of its own. One rank of a group searches for all.

    Args:
        find_peers: returns the groups to ask, by slot.
        token: the run's shared secret.
        num_asked: groups that are asked together, and that can give the state together; 0 = all. The next groups are
            asked if none of these offers a state.
    """

    def __init__(self, find_peers: Callable[[], dict[int, Peer]], token: str, num_asked: int) -> None:
        self._find_peers, self._token, self._num_asked = find_peers, token, num_asked
        self._search: Future[Offer] | None = None
        self._least_step = 0  # of the search under way
        self._paused_until = 0.0
        self._due = 0.0  # after a search in vain
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def pause(self, seconds: float) -> None:
        """Begin no search for that long."""
        self._search = None
        self._paused_until = time.monotonic() + seconds
        self.hurry()

    def hurry(self) -> None:
        """End the pause after a search in vain: a round may have brought an offer, which may not last for long."""
        self._due = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def poll(self, least_step: int, after: int) -> Offer:
        """Return an offer of at least `least_step` updates if one is found; begins a search if none is under way.

        Args:
            after: the groups are asked in the order of their slots, beginning after this one.
        """
        if self._search is None or self._least_step != least_step:
            if time.monotonic() >= max(self._due, self._paused_until):
                self._begin(least_step, after)
            return NO_OFFER
        if not self._search.done():
            return NO_OFFER
        found, self._search = self._search.result(), None
        if not found.slots:
            self._due = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for the search under way, no longer than that; False if there is none."""
        if self._search is None:
            return False
        with contextlib.suppress(TimeoutError):
            self._search.exception(seconds)
        return True

    def _begin(self, least_step: int, after: int) -> None:
        self._least_step = least_step
        self._search = call_aside(partial(self._look, least_step, after), "titan_ft_offers")

    def _look(self, least_step: int, after: int) -> Offer:
        try:
            peers = self._find_peers()
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # the next search may find more
            logger.debug("no group is found that could offer a state: %s", first_line(error))
            return NO_OFFER
        slots = rotate([*peers], after)
        num_asked = self._num_asked or len(slots)
        for start in range(0, len(slots), max(1, num_asked)):
            some = slots[start : start + num_asked]
            addresses = {slot: partial(_find_address, peers[slot], self._token) for slot in some}
            offer = ask_all(addresses, self._token, least_step)
            if offer.slots:
                return offer
        return NO_OFFER


def _find_address(peer: Peer, token: str) -> str:
    return peer.address or look_up(peer, 0, token)
