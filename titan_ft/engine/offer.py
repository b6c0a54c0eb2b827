# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's search for groups that offer their state.

The job's state does not change between two updates. So each holder offers it during this time
(`donor.py`), also while it computes a step or waits for other groups. A joiner may ask at any
moment. `Membership.find_holders` finds the groups to ask.

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
"""Pause after the first search without an offer. Each further pause is twice as long, up to the
maximum."""
_MAX_PAUSE_SECONDS = 1.0

_EXPECTED_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RefusedError)
"""Errors of a network, of a store and of another run's servers. Such a group offers nothing."""


def ask_all(addresses: Mapping[int, Callable[[], str]], token: str, least_step: int) -> Offer:
    """Ask several groups at the same time for their offers; return the state in most offers.

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
        if offered is None:
            return NO_OFFER
        return Offer((slot,), *offered)

    answers = call_for_each(ask, [*addresses], "titan_ft_offers", _MAX_THREADS)
    return choose_offer([offer for offer in answers if offer.slots and offer.step >= least_step])


class OfferSearch:
    """Asks holders for offers, on a thread of its own.

    `Heal` calls all methods on the training thread. Only the group's leading rank searches, for the
    whole group. An error during a search has the same result as a search without an offer.

    Args:
        find_peers: returns the groups to ask, by slot.
        token: the run's shared secret.
        max_asked: number of groups that are asked at the same time; None = all. If none of them
            offers a state, the next groups are asked.
    """

    def __init__(
        self,
        find_peers: Callable[[], dict[int, Peer]],
        token: str,
        max_asked: int | None,
    ) -> None:
        self._find_peers = find_peers
        self._token = token
        self._max_asked = max_asked
        self._search: Future[Offer] | None = None
        self._least_step = 0  # of the search under way
        self._restart_at = 0.0  # `restart` allows no search before this time
        self._retry_at = 0.0  # nor does the pause after a search without an offer
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def restart(self, after_seconds: float = 0.0) -> None:
        """Drop the search under way. The next one starts after this time."""
        self._search = None
        self._restart_at = time.monotonic() + after_seconds
        self.end_pause()

    def end_pause(self) -> None:
        """End the pause after a search without an offer.

        `Heal` calls this after each round, because an offer after a round may not last long.
        """
        self._retry_at = 0.0
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def poll(self, least_step: int, after: int) -> Offer:
        """Return the offer that the search under way has found; start a search if there is none.

        Args:
            least_step: states with fewer committed updates do not count.
            after: a slot. The groups are asked in the order of their slots, beginning with the
                next slot.

        Returns:
            `NO_OFFER` while no offer is found.
        """
        if self._search is None or self._least_step != least_step:
            if time.monotonic() >= max(self._retry_at, self._restart_at):
                self._start_search(least_step, after)
            return NO_OFFER
        if not self._search.done():
            return NO_OFFER
        found = self._search.result()
        self._search = None
        if not found.slots:
            self._retry_at = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        return found

    def wait_for_answers(self, seconds: float) -> bool:
        """Wait for the search under way, at most for this time; return False if there is none."""
        if self._search is None:
            return False
        with contextlib.suppress(TimeoutError):
            self._search.exception(seconds)
        return True

    def _start_search(self, least_step: int, after: int) -> None:
        self._least_step = least_step
        self._search = call_aside(partial(self._run_search, least_step, after), "titan_ft_offers")

    def _run_search(self, least_step: int, after: int) -> Offer:
        """Find the groups, and ask them; on the thread of the search."""
        try:
            peers = self._find_peers()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            # The next search may find groups.
            logger.debug("no group is found that could offer a state: %s", first_line(error))
            return NO_OFFER
        slots = rotate([*peers], after)
        max_asked = self._max_asked or max(1, len(slots))
        for start in range(0, len(slots), max_asked):
            addresses = {}
            for slot in slots[start : start + max_asked]:
                addresses[slot] = partial(_find_address, peers[slot], self._token)
            offer = ask_all(addresses, self._token, least_step)
            if offer.slots:
                return offer
        return NO_OFFER


def _find_address(peer: Peer, token: str) -> str:
    return peer.address or look_up(peer, 0, token)
