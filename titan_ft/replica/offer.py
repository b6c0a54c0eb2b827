# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Offers: a group lets a joiner have its state at once, before a round has named a donor.

A donor is named in a round, which ends with a step of the others. But what they agree on stays as it is from one update
to the next: a newcomer asks the members of its first quorum for it, while they compute that step, and the round shows
whether what it got is what they all hold.

With a semi-synchronous method there may be one round in an hour, and the groups have compared their bytes right behind
the last update: so each of them may serve it. Who lacks it finds the groups that live on the lighthouse's page, and
asks their state servers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from titan_ft.replica.errors import RefusedError, first_line
from titan_ft.replica.reach import Peer, look_up
from titan_ft.replica.state_fetch import ask_offer

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0  # between two searches


@dataclass(frozen=True)
class Offer:
    """What a group holds until its next update.

    Attributes:
        slot: of the group.
        step, lineage: of its state.
        digest: of its bytes, which all groups had alike in a round behind the last update; 0 = none has compared them.
        milliseconds: that its last step took; 0 = it does not tell.
    """

    slot: int
    step: int
    lineage: int
    digest: int
    milliseconds: int = 0


NO_OFFER = Offer(-1, 0, 0, 0)

_REASONS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RefusedError)
"""Why somebody offers nothing: what network and store do, and another run's servers."""


def ask_members(addresses: Sequence[str], token: str, step: int) -> tuple[list[int], Offer]:
    """Ask state servers all at once what they offer of `step`.

    Returns:
        The places of those that offer the same state, the one that most have, and the offer, of slot -1.
    """

    def ask(address: str) -> Offer:
        try:
            offered = ask_offer(address, token, step)
        except _REASONS as error:
            logger.debug("no offer from %s: %s", address, first_line(error))
            return NO_OFFER
        return NO_OFFER if offered is None else Offer(-1, *offered)

    with ThreadPoolExecutor(len(addresses), "titan_ft_offers") as pool:
        offers = dict(enumerate(pool.map(ask, addresses)))
    fitting = {place: offer for place, offer in offers.items() if offer.step == step}
    if not fitting:
        return [], NO_OFFER
    lineage = Counter(offer.lineage for offer in fitting.values()).most_common(1)[0][0]
    places = [place for place, offer in fitting.items() if offer.lineage == lineage]
    return places, fitting[places[0]]


class OfferSearch:
    """Looks for a group that offers its state, on a thread of its own.

    Args:
        find_peers: returns the job's groups that live, by slot.
        token: the run's shared secret.
        first: the slot to begin with; the next search begins with the one behind it.
    """

    def __init__(self, find_peers: Callable[[], dict[int, Peer]], token: str, first: int) -> None:
        self._find_peers, self._token, self._first = find_peers, token, first
        self._search: Future[Offer | None] | None = None
        self._due = 0.0

    def begin(self) -> None:
        """Forget what a former search may find: it is of a former round."""
        self._search = None

    def rest(self, seconds: float) -> None:
        """Begin no search for so long."""
        self._due = time.monotonic() + seconds

    def poll(self, beyond: int) -> Offer | None:
        """Return an offer of more than `beyond` updates, if it is found; begins a search if none is under way."""
        if self._search is None:
            if time.monotonic() >= self._due:
                thread = ThreadPoolExecutor(1, "titan_ft_offers")
                self._search = thread.submit(self._look)
                thread.shutdown(wait=False)
            return None
        if not self._search.done():
            return None
        found, self._search = self._search.result(), None
        if found is not None and found.step > beyond:
            return found
        self.rest(_PAUSE_SECONDS)
        return None

    def _look(self) -> Offer | None:
        try:
            peers = self._find_peers()
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # the next search may find more
            logger.debug("nobody is found who could offer: %s", first_line(error))
            return None
        self._first += 1
        for slot in sorted(peers, key=lambda slot: (slot < self._first, slot)):
            try:
                offered = ask_offer(look_up(peers[slot], 0), self._token)
            except _REASONS as error:
                logger.debug("no offer from group %d: %s", slot, first_line(error))
                continue
            if offered is not None:
                return Offer(slot, *offered)
        return None
