# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's search for groups that offer their state.

The state on which the groups agree stays unchanged from one update to the next. So a holder offers
it (`donor.py`) while the next step is computed, between the steps of a round, and while the groups
wait for each other. A joiner asks at any of these moments. `Membership.find_holders` returns the
groups that can be asked.

See docs/heal.md.
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
_FIRST_PAUSE_SECONDS = 0.1
"""Pause after the first search in vain. Each further pause is twice as long, up to the maximum."""
_MAX_PAUSE_SECONDS = 1.0

_EXPECTED_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RefusedError)
"""Errors of a network, of a store and of another run's servers. Such a group offers nothing."""


def ask_all(addresses: Mapping[int, Callable[[], str]], token: str, least_step: int) -> Offer:
    """Ask several groups at once for their offers; return the state in most offers.

    Args:
        addresses: for each slot, a function that finds the address of the group's state server.
        least_step: states with fewer committed updates do not count.
    """

    def ask(slot: int) -> Offer:
        try:
            offered = ask_offer(addresses[slot](), token, least_step)
        except _EXPECTED_ERRORS as error:
            logger.debug("no offer from group %d: %s", slot, first_line(error))
            return NO_OFFER
        return NO_OFFER if offered is None else Offer((slot,), *offered)

    answers = call_for_each(ask, [*addresses], "titan_ft_offers", _MAX_THREADS)
    return choose_offer([offer for offer in answers if offer.slots and offer.step >= least_step])


class OfferSearch:
    """Asks holders for offers, on a thread of its own.

    `Heal` calls all methods, on the training thread of the group's leading rank. That rank searches
    for the whole group. A search that fails counts as one that found no offer.

    Args:
        find_peers: returns the groups to ask, by slot.
        token: the run's shared secret.
        num_asked: number of groups that are asked together; 0 = all. If none of them offers a
            state, the next groups are asked.
    """

    def __init__(
        self,
        find_peers: Callable[[], dict[int, Peer]],
        token: str,
        num_asked: int,
    ) -> None:
        self._find_peers = find_peers
        self._token = token
        self._num_asked = num_asked
        self._search: Future[Offer] | None = None
        self._least_step = 0  # of the search under way
        self._paused_until = 0.0  # by `pause`
        self._next_search = 0.0  # after a search in vain
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def pause(self, seconds: float) -> None:
        """Drop the search under way, and start none for this time."""
        self._search = None
        self._paused_until = time.monotonic() + seconds
        self.hurry()

    def hurry(self) -> None:
        """End the pause after a search in vain: a round may have brought a short-lived offer."""
        self._next_search = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def poll(self, least_step: int, after: int) -> Offer:
        """Return the offer that the search under way has found; start a search if there is none.

        Args:
            least_step: states with fewer committed updates do not count.
            after: the groups are asked in the order of their slots, beginning after this one.

        Returns:
            `NO_OFFER` while no offer is found.
        """
        if self._search is None or self._least_step != least_step:
            if time.monotonic() >= max(self._next_search, self._paused_until):
                self._start_search(least_step, after)
            return NO_OFFER
        if not self._search.done():
            return NO_OFFER
        found = self._search.result()
        self._search = None
        if not found.slots:
            self._next_search = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for the search under way, at most for this time; return False if there is none."""
        if self._search is None:
            return False
        with contextlib.suppress(TimeoutError):
            self._search.exception(seconds)
        return True

    def _start_search(self, least_step: int, after: int) -> None:
        self._least_step = least_step
        self._search = call_aside(partial(self._look, least_step, after), "titan_ft_offers")

    def _look(self, least_step: int, after: int) -> Offer:
        try:
            peers = self._find_peers()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            # The next search may find groups.
            logger.debug("no group is found that could offer a state: %s", first_line(error))
            return NO_OFFER
        slots = rotate([*peers], after)
        num_asked = self._num_asked or max(1, len(slots))
        for start in range(0, len(slots), num_asked):
            addresses = {}
            for slot in slots[start : start + num_asked]:
                addresses[slot] = partial(_find_address, peers[slot], self._token)
            offer = ask_all(addresses, self._token, least_step)
            if offer.slots:
                return offer
        return NO_OFFER


def _find_address(peer: Peer, token: str) -> str:
    return peer.address or look_up(peer, 0, token)
