# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Offers: a group lets a joiner have its state at once, before a round has named a donor.

A donor is named in a round, which ends with a step of the others. But what they agree on stays as it is from one update
to the next: a newcomer asks the members of its first quorum for it, while they compute that step, and the round shows
whether what it got is what they all hold. It asks before it has a quorum where it takes the place of a process that the
others' exchange counts on: that one breaks, and is made again, from the same state, with the newcomer.

With a semi-synchronous method there may be one round in an hour, and the groups have compared their bytes right behind
the last update: so each of them may serve it.

Without a quorum, who lacks the state finds the groups that live on the lighthouse's page, and asks their state servers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from titan_ft.protocol.errors import RefusedError, first_line
from titan_ft.transfer.reach import Peer, look_up
from titan_ft.transfer.state_fetch import ask_offer

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0  # between two searches


@dataclass(frozen=True)
class Offer:
    """What groups hold until their next update.

    Attributes:
        slots: of the groups; none = nobody offers anything.
        step, lineage: of their state.
        digest: of its bytes, which all groups had alike in a round behind the last update; 0 = none has compared them.
        milliseconds: that the first one's last step took; 0 = it does not tell.
    """

    slots: tuple[int, ...]
    step: int
    lineage: int
    digest: int
    milliseconds: int = 0


NO_OFFER = Offer((), 0, 0, 0)

_REASONS = (OSError, ValueError, KeyError, TypeError, RuntimeError, RefusedError)
"""Why somebody offers nothing: what network and store do, and another run's servers."""


def ask_all(addresses: Mapping[int, Callable[[], str]], token: str, step: int = 0) -> Offer:
    """Ask groups all at once what they offer; returns what most of them do.

    Args:
        addresses: what finds the address of each group's state server, by slot.
        step: committed updates that are wanted; 0 = any number.
    """

    def ask(slot: int) -> Offer:
        try:
            offered = ask_offer(addresses[slot](), token, step)
        except _REASONS as error:
            logger.debug("no offer from group %d: %s", slot, first_line(error))
            return NO_OFFER
        return NO_OFFER if offered is None else Offer((slot,), *offered)

    with ThreadPoolExecutor(len(addresses), "titan_ft_offers") as pool:
        offers = [offer for offer in pool.map(ask, addresses) if offer.slots and step in (0, offer.step)]
    if not offers:
        return NO_OFFER
    states = Counter((offer.step, offer.lineage) for offer in offers)
    state = max(states, key=lambda state: (states[state], state[0]))
    alike = [offer for offer in offers if (offer.step, offer.lineage) == state]
    return replace(alike[0], slots=tuple(slot for offer in alike for slot in offer.slots))


class OfferSearch:
    """Looks for groups that offer their state, on a thread of its own.

    Args:
        find_peers: returns the groups to ask, by slot.
        token: the run's shared secret.
        first: the slot to begin with; the next search begins with the one behind it.
        most: groups that are asked at once, and may be found together.
        once: whether the first search in which all of them were asked is the last one.
    """

    def __init__(
        self, find_peers: Callable[[], dict[int, Peer]], token: str, first: int, most: int, *, once: bool = False
    ) -> None:
        self._find_peers, self._token, self._first, self._most, self._once = find_peers, token, first, most, once
        self._over = False
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
            if time.monotonic() >= self._due and not self._over:
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

    def wait(self, seconds: float) -> bool:
        """Wait for what a search under way finds, no longer than so; says whether there was one."""
        if self._search is None:
            return False
        with contextlib.suppress(TimeoutError):
            self._search.exception(seconds)
        return True

    def _look(self) -> Offer | None:
        try:
            peers = self._find_peers()
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # the next search may find more
            logger.debug("nobody is found who could offer: %s", first_line(error))
            return None
        self._first += 1
        slots = sorted(peers, key=lambda slot: (slot < self._first, slot))
        for start in range(0, len(slots), self._most):
            some = slots[start : start + self._most]
            offer = ask_all({slot: partial(look_up, peers[slot], 0) for slot in some}, self._token)
            if offer.slots:
                return offer
        self._over = self._once
        return None
